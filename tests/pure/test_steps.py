"""readers/traces.py and files.py: steps, ranks in names, numbers, and which files are
opened."""

import gzip
import os
from pathlib import Path
from typing import Any

import pytest

from harness.files import check_regular
from readers import files
from readers.traces import Range, as_number, find_steps, rank_in_name
from tests.pure.reports import refused

T = "thread 1"


RANKS: dict[str, int | None] = {
    "fr_0.json": 0,
    "nccl_trace_rank_3": 3,
    "comm_lib_trace_rank_12": 12,
    "nccl_trace_rank_node2_5": 5,
    "nccl_trace_rank_10.0.0.1_5": 5,
    "rank7_trace.json.gz": 7,
    "rank-0.Apr_03_18_51_38.1102.pt.trace.json.gz": 0,
    "rank2.1795837592.pt.trace.json": 2,
    "exp-rank[11].1762000000.pt.trace.json": 11,
    "dp0_pp0_tp1_ep0_rank6.1762.pt.trace.json.gz": 6,
    "local_rank1_rank9.json": 9,
    "RANK_4.json": 4,
    "trace_4": 4,
    "trace_2.json": 2,
    "1762000000-TP-2.trace.json.gz": 2,
    "13.json": 13,
}
# "vm_4711.1762...": a process, and a time
NO_RANK = ["frame.json", "frank.json", "vm_4711.1762000000000.pt.trace.json", "vm_10.pt.trace.json"]
RANKS |= dict.fromkeys([*NO_RANK, "trace_step_100.json", "iteration-5.json"])


def test_the_rank_in_a_name() -> None:
    assert {name: rank_in_name(name) for name in RANKS} == RANKS


def test_numbers_as_text() -> None:
    texts: list[Any] = ["12", "1.5", 7, "x", "", "nan", None, True, [1], float("inf")]
    assert [as_number(text) for text in texts] == [12, 1.5, 7] + [None] * 7


def marks(*names: str, each: float = 10, start: float = 0, thread: str = T) -> list[Range]:
    """Ranges that follow each other."""
    times = [start + each * number for number in range(len(names))]
    return [Range(x, x + each, name, thread) for x, name in zip(times, names, strict=True)]


@pytest.mark.parametrize(
    ("ranges", "starts"),
    [
        # the profiler's ranges count, whatever else is named step
        (marks("ProfilerStep#1", "ProfilerStep#2") + marks("step", "step", each=9), [0, 10]),
        (marks("step", "step"), [0, 10]),
        # a step within a step, in the same thread and in another one, and each range twice
        (marks("step", "step") * 2 + marks("step", "step", each=4, start=1), [0, 10]),
        (marks("step", "step") + marks("step", "step", each=3, start=12, thread="t"), [0, 10]),
        # threads that take turns, and threads that overlap: the one with the longest ranges
        (marks("step", start=20, thread="t") + marks("step", "step"), [0, 10, 20]),
        (marks("step", "step") + marks("step", each=8, start=5, thread="t"), [0, 10]),
    ],
)
def test_which_ranges_are_steps(ranges: list[Range], starts: list[float]) -> None:
    for order in (ranges, ranges[::-1]):
        steps, lost = find_steps(order, [])
        assert ([step.start for step in steps], lost) == (starts, None)


@pytest.mark.parametrize(
    ("counts", "kept"),
    [
        ((4, 4, 4), 3),
        ((4, 4, 2), 2),  # at most half of the others
        ((4, 4, 3), 3),
        ((4, 2, 4, 2), 4),  # steps of two kinds
        ((20, 2), 1),
        ((20, 3), 2),
        ((4, 0, 0), 3),  # nothing is known of the work of these steps
        ((2,), 1),
    ],
)
def test_an_incomplete_last_step(counts: tuple[int, ...], kept: int) -> None:
    """counts: the number of kernels of each step of 10 us."""
    names = [f"ProfilerStep#{number}" for number in range(len(counts))]
    work = [10 * step + 0.1 * x for step, count in enumerate(counts) for x in range(count)]
    steps, lost = find_steps(marks(*names), work)
    assert (len(steps), lost is None) == (kept, kept == len(counts))


def test_only_regular_files_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    for name, kind in (("pipe", "a pipe"), ("link", "a pipe"), ("/dev/zero", "a device")):
        for opens in (files.read, check_regular):
            assert f"expected a regular file, got {kind}" in refused(opens, tmp_path / name)
    packed = tmp_path / "a b"
    for first, told in (
        (b"\x28\xb5\x2f\xfd..", "ed by zstd; try zstd -d"),
        (b"PK\x03\x04..", "unzip"),
    ):
        packed.write_bytes(first)
        assert f"{told} '{packed}'" in refused(files.read, packed)
    for number in (10, 9, 1):
        (tmp_path / f"r{number}").write_bytes(gzip.compress(b"x" * 1000))
    assert files.read(tmp_path / "r9") == b"x" * 1000
    assert [path.name for path in files.files_of(tmp_path)][-3:] == ["r1", "r9", "r10"]
    monkeypatch.setattr(files, "MAX_FILE_BYTES", 999)
    assert "more than 999 bytes" in refused(files.read, tmp_path / "r9")
    monkeypatch.setattr(files, "MAX_FOLDER_BYTES", 50)
    told = refused(files.check_total, tmp_path, [tmp_path / "r9", tmp_path / "r10"])
    assert "bytes, more than the limit of 50; name the" in told
    monkeypatch.setattr(files, "MAX_FILES", 4)
    assert "has more than 4 files; name those to read" in refused(files.files_of, tmp_path)
