"""analysis/traces/bandwidth.py and readers/isolated.py: bytes, bandwidths, and times of the same
collectives alone."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from analysis.traces.bandwidth import bus_factor, layout_in
from analysis.traces.kineto import Trace
from common.stats import Estimate
from harness import report
from harness.report import Case, Report
from readers.isolated import collective_times, interpolate, layout_of_case, show_layout
from tests.pure import reports
from tests.pure.reports import estimate
from tests.pure.traces import (
    GEMM,
    Events,
    collective,
    kernel,
    refusal,
    remarks,
    save_ranks,
    step,
    table,
)

MIB = 2**18  # elements of float32


def rank_of_two(late: float, *more: Events) -> Events:
    """Two steps of 10 ms: an all-reduce of 1 MiB takes 1 ms and one of 2 MiB takes 2 ms, an
    all-gather of 2 MiB takes 1 ms. late: how many microseconds later the other rank arrives."""
    events: Events = []
    out: dict[str, Any] = {"Out msg nelems": 2 * MIB}
    for number in range(2):
        start = 1000 + number * 10_000
        events += step(number, start - 20, 9900) + kernel(GEMM, start, 9900)
        for at, length, elements in ((1000, 1000, MIB), (3000, 2000, 2 * MIB)):
            events += collective("allreduce", start + at - late, length + late, elements)
        events += collective("_allgather_base", start + 8000, 1000, MIB, **out)
        for other in more:
            events += [one | {"ts": one["ts"] + start} for one in other]
    return events


def bandwidths(*words: str) -> dict[str, list[str]]:
    """The rows of the collectives by name. A second row of the same name is called name*."""
    rows = table(*words)
    first = next(n for n, row in enumerate(rows) if row[:2] == ["group", "collective"])
    found: dict[str, list[str]] = {}
    for row in rows[first + 1 :]:
        if row[0] == "dp":
            found[f"{row[1]}*" if row[1] in found else row[1]] = row[2:]
    return found


def test_bytes_and_bandwidths_without_waiting(tmp_path: Path) -> None:
    """3 MiB in 3 ms are 1.0486 GB/s, and 2 MiB in 1 ms are 2.0972. With 2 ranks the busbw of an
    all-reduce equals its algbw, and that of an all-gather is half of it. Steps of 10 and 9.9 ms
    have a mean of 9.95 ms."""
    paths = save_ranks(tmp_path, rank_of_two(700), rank_of_two(0))
    assert bandwidths(*paths) == {
        "all_gather": ["2", "1", "2M", "1", "2.097", "1.049", "10.1"],
        "all_reduce": ["2", "2", "3M", "3", "1.049", "1.049", "30.2"],
    }
    alone = bandwidths(paths[0])
    assert alone["all_reduce"] == ["2", "2", "3M", "4.4", "0.7149", "0.7149", "44.2"]
    line = "# times of all_gather, all_reduce include waiting for other ranks, because "
    assert remarks(paths[0]) == [f"{line}some ranks of a group have no trace"]


def test_messages_are_averaged_over_ranks(tmp_path: Path) -> None:
    """Each rank sends 1 MiB, in 3 ms on rank 0 and 1 ms on rank 1: 2 ms on average."""
    ranks = [rank_of_two(0, collective("send", 4500, length, MIB)) for length in (3000, 1000)]
    paths = save_ranks(tmp_path, *ranks)
    assert bandwidths(*paths)["send"] == ["2", "1", "1M", "2", "0.5243", "0.5243", "20.1"]
    line = "# times of send include waiting for other ranks, which is known only for collectives"
    assert remarks(*paths)[0] == f"{line} and matched messages"
    # rank 0 sends to rank 1, which arrives 2 ms later: without waiting, 1 ms, and 0.5 ms per rank
    ends = (("send", 4500, 3000), ("recv", 6500, 1000))
    paths = save_ranks(tmp_path, *(rank_of_two(0, collective(*end, MIB)) for end in ends))
    cells = ["2", "0.5", "512K", "0.5", "1.049", "1.049", "5.0"]
    assert [bandwidths(*paths)[name] for name, _, _ in ends] == [cells, cells]
    assert remarks(*paths) == [
        "# rank 0 waits 2 ms of a 9.95 ms step (20.1%) in messages to rank 1",
        "# in collectives, no rank makes the other ranks wait for more than 5% of a step",
    ]
    # rank 1's window has the second of two steps and another one
    ranks = [rank_of_two(0, collective("send", 4500, 1000, MIB)) for _ in range(2)]
    for event in ranks[1]:
        event["name"] = event["name"].replace("#1", "#2").replace("#0", "#1")
    rows = bandwidths(*save_ranks(tmp_path, *ranks))
    assert rows["send"][1:4] == ["1", "1M", "1"]
    assert rows["all_reduce"][1:4] == ["2", "3M", "3"]


def measured(name: str, size: int, *time: float, **changes: Any) -> dict[str, Any]:
    """A case of collectives.py on 2 ranks. In place takes twice as long."""
    key = {"collective": name, "dtype": "float32", "redop": "sum", "groups": "world"}
    numbers = {"group_ranks": 2, "size_bytes": size}
    twice = [2 * seconds for seconds in time]
    metrics = {"out_of_place_time_s": estimate(*time), "in_place_time_s": estimate(*twice)}
    whole = reports.case(f"{name} {size} {changes}")
    return whole | {"key": key | numbers | changes, "ranks": [0, 1], "metrics": metrics}


def scan(path: Path, *cases: dict[str, Any], hosts: tuple[str, ...] = ("vm", "vm")) -> str:
    ranks = [{"rank": rank, "local_rank": rank, "host": host} for rank, host in enumerate(hosts)]
    return reports.write(path, *cases, benchmark="collectives", environment={"ranks": ranks})


def all_reduces() -> list[dict[str, Any]]:
    """1 MiB takes 0.5 ms (0.4 to 0.6), 3 MiB takes 1.5 ms (1.2 to 2.0)."""
    small = measured("all_reduce", 2**20, 5e-4, 4e-4, 6e-4)
    return [small, measured("all_reduce", 3 * 2**20, 15e-4, 12e-4, 20e-4)]


def test_ratio_to_the_times_alone(tmp_path: Path) -> None:
    """2 MiB alone take 1.0 ms (0.8 to 1.3), halfway between 1 and 3 MiB. The all-reduces of a step
    take 3 ms, and alone 1.5 ms (1.2 to 1.9): a ratio of 2.00 (1.58 to 2.50). The all-gather takes
    1 ms, and alone 0.25 ms. A factor of 4.00 of 10.1% of the step matters more than 2.00 of 20%,
    but less than 2.00 of 30.2%."""
    gathers = [measured("all_gather", 2 * 2**20, 2.5e-4, 2.5e-4, 2.5e-4)]
    against = scan(tmp_path / "c.jsonl", *all_reduces(), *gathers)
    tiny = collective("allreduce", 7000, 100, 1)  # it has a separate row without a ratio
    paths = save_ranks(tmp_path, rank_of_two(700, tiny), rank_of_two(0, tiny), hosts=["vm", "vm"])
    rows = bandwidths(*paths, "--against", against)
    assert rows["all_reduce"][-4:] == ["30.2", "1.5", "2.00", "1.58 to 2.50"]
    assert rows["all_gather"][-4:] == ["10.1", "0.25", "4.00", "4.00 to 4.00"]
    assert rows["all_reduce*"][1:4] == ["1", "4", "0.1"]
    assert rows["all_reduce*"][-3:] == ["-", "-", "-"]
    *lines, last = remarks(*paths, "--against", against)
    what = "4 bytes are outside the measured range, 1M to 3M"
    assert f"# not compared: all_reduce of dp, 2 of 6 calls: {what}" in lines
    what = "it takes 2.00 times (1.58 to 2.50) as long as in isolation, and 30.2% of the step"
    assert last == f"# all_reduce of dp matters most: {what}"


def test_only_the_same_layout_is_compared(tmp_path: Path) -> None:
    against = scan(tmp_path / "c.jsonl", *all_reduces(), hosts=("a", "b"))
    paths = save_ranks(tmp_path, rank_of_two(0), rank_of_two(0), hosts=["vm", "vm"])
    lines = remarks(*paths, "--against", against)
    what = "it was measured on 2 ranks of 2 hosts (1 each), not on 2 ranks of one host"
    assert f"# not compared: all_reduce of dp, 4 of 4 calls: {what}" in lines
    assert "# not compared: all_gather of dp, 2 of 2 calls: it was not measured" in lines
    assert lines[-1] == "# no collective of these traces can be compared"
    apart = remarks(*paths, "--against", against, "--gpus-per-node", "1")
    matters = "# all_reduce of dp matters most: it takes 2.00 times (1.58 to 2.50)"
    assert apart[-1].startswith(matters)


def test_a_dtype_that_was_not_measured(tmp_path: Path) -> None:
    """bfloat16 has half the bytes. Times of another dtype are used, and a line names it."""
    half: dict[str, Any] = {"dtype": "BFloat16"}
    rank = kernel(GEMM, 0, 5000) + collective("allreduce", 5000, 1000, 2 * MIB, **half)
    words = (*save_ranks(tmp_path, rank, rank, hosts=["vm", "vm"]), "--against")
    against = scan(tmp_path / "c.jsonl", *all_reduces())
    assert bandwidths(*words, against)["all_reduce"][2] == "1M"
    line = "# alone: all_reduce was measured with float32 instead of bfloat16"
    assert line in remarks(*words, against)


def test_layouts_and_the_factors_of_nccl_tests() -> None:
    def traces(*hosts: str) -> dict[int, Trace]:
        return {rank: Trace("x", rank, True, [], [], [], host) for rank, host in enumerate(hosts)}

    assert layout_in((0, 1, 2), traces("a", "b", "a"), None) == ((2, 1), False)
    assert layout_in((0, 1, 2), traces("a", "", "a"), None) == ((3,), True)
    assert layout_in((0, 8, 16), {}, None) == ((1, 1, 1), True)
    assert layout_in((0, 1, 2), traces("a", "b", "a"), 2) == ((2, 1), False)
    assert bus_factor("all_reduce", 4) == 1.5
    assert bus_factor("reduce_scatter", 4) == bus_factor("scatter", 4) == 0.75
    assert bus_factor("broadcast", 4) == bus_factor("send", 4) == 1
    assert show_layout((8, 8)) == "16 ranks of 2 hosts (8 each)"
    assert show_layout((2, 1)) == "3 ranks of 2 hosts (2 + 1)"
    hosts = dict(enumerate("aabb"))

    def of(groups: str, count: int) -> tuple[int, ...]:
        key = {"groups": groups, "group_ranks": count}
        return layout_of_case(Case(key=key, ranks=[0, 1, 2, 3]), hosts)

    assert of("world", 4) == (2, 2)
    assert (of("node", 2), of("cross", 2)) == ((2,), (1, 1))
    assert (of("0,2/1,3", 2), of("0-2", 3)) == ((1, 1), (2, 1))


def test_times_of_a_report() -> None:
    """The faster variant counts. Failed cases do not."""
    of = []
    for size, check in ((8, ""), (16, "failed: 3 wrong values")):
        one = measured("all_reduce", size, 3.0)
        metrics = json.loads(json.dumps(one["metrics"]), object_hook=report.as_estimate)
        of.append(Case(key=one["key"], ranks=[0, 1], metrics=metrics, check=check))
    environment = {"ranks": [{"rank": rank, "host": "vm"} for rank in (0, 1)]}
    found = collective_times(Report("collectives", environment, cases=of))
    assert found == {("all_reduce", (2,), "float32"): {8: Estimate(3.0)}}


def test_interpolation_between_measured_sizes() -> None:
    times = {1024: Estimate(10, 9, 11), 2048: Estimate(20, 18, 25), 8192: Estimate(50)}
    # a quarter of the way from 1 KiB to 2 KiB is 10 + 10 / 4, and likewise for the ends
    assert interpolate(times, 1280) == Estimate(12.5, 11.25, 14.5)
    assert interpolate(times, 2048) == times[2048]
    assert interpolate(times, 5120) == Estimate(35)  # one of the sizes has no interval
    rounded = {65_532: Estimate(1), 262_140: Estimate(4)}  # 4.0002: multiples of 3 ranks
    assert interpolate(rounded, 65_532 * 2).value == pytest.approx(2, rel=1e-3)
    for size, words in (
        (1023, "1023 bytes are outside the measured range, 1K to 64K"),
        (2**17, "128K bytes are outside the measured range, 1K to 64K"),
        (2**14, "16,384 bytes are between the measured 8,192 and 65,536, which are more than a "),
    ):
        with pytest.raises(ValueError, match=f"^{words}"):
            interpolate(times | {2**16: Estimate(60)}, size)
    with pytest.raises(ValueError, match="no size is measured"):
        interpolate({}, size)


def test_other_reports_are_refused(tmp_path: Path) -> None:
    paths = save_ranks(tmp_path, rank_of_two(0))
    other = reports.write(tmp_path / "x.jsonl")
    words = "expected a report of collectives.py, got one of ddp_sweep.py"
    assert f"--against {other}: {words}" in refusal(*paths, "--against", other)
    absent = str(tmp_path / "absent")
    assert re.search("--against .*No such file", refusal(*paths, "--against", absent))
    damaged = scan(tmp_path / "d.jsonl", measured("all_reduce", 8, 1.0) | {"key": {}})
    assert "an entry does not have the expected form" in refusal(*paths, "--against", damaged)
