"""--profile and analysis/trace.py: files of traces, and the shares of a step."""

import gzip
import random
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.profiler import profile, record_function

from analysis import trace
from harness.observe import trace as recorded
from tests.pure.traces import about_call, event, kernel, refusal, save, step, table


def test_a_trace_of_nccl(tmp_path: Path) -> None:
    """A step takes 100 us on the GPU: 60 us of computing and 50 us of NCCL, which overlap for 20
    us. The host launches everything in the first 30 us."""
    events = [
        *step(3, 0, 30),
        event("cpu_op", "aten::mm", 1, 499),
        *kernel("sm90_xmma_gemm_f32", 20, 50, launch=2),
        *kernel("elementwise_kernel", 60, 20, 8, launch=3),  # concurrent with the previous one
        *kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 60, 50, 20, launch=4),
        *kernel("Memcpy HtoD", 105, 10, launch=5, cat="gpu_memcpy"),
        *kernel("elementwise_kernel", 200, 100, launch=40),  # outside of the step
        *kernel("elementwise_kernel", 119.999, 0.001, launch=29),
        {"ph": "M", "name": "process_name"},
    ]
    (_, mean, third, *_) = table(save(tmp_path / "rank5.json", events))
    assert third == ["5", "ProfilerStep#3", "0.100", "60.0", "50.0", "30.0", "20.0", "10.0"]
    assert mean == ["5", "mean of 1", *third[2:]]


def test_steps_of_the_profiler_follow_each_other(tmp_path: Path) -> None:
    """The GPU is idle from 40 to 100 us, before the first kernel of the second step."""
    kernels = [*kernel("gemm", 20, 20, launch=2), *kernel("gemm", 100, 10, launch=60)]
    events = [*step(1, 0, 50), *step(2, 50, 40), *kernels]
    assert [row[1:4] for row in table(save(tmp_path / "a.json", events))[1:]] == [
        ["mean of 2", "0.045", "33.3"],
        ["ProfilerStep#1", "0.080", "25.0"],
        ["ProfilerStep#2", "0.010", "100.0"],
    ]


def gloo_events() -> list[Any]:
    """Two steps of 50 us. An operator that waits for a collective does not count as computing."""
    return [
        event("user_annotation", "step", 0, 50),
        event("user_annotation", "without dp", 50, 50),
        event("user_annotation", "step", 100, 50),
        event("user_annotation", "gloo:all_reduce", 10, 30, tid=2),
        event("user_annotation", "gloo:all_reduce", 20, 10, tid=3),
        event("user_annotation", "gloo:barrier", 90, 10, tid=3),
        event("cpu_op", "aten::addmm", 0, 20),
        event("cpu_op", "aten::copy_", 5, 1),
        event("cpu_op", "aten::sort", 32, 2, tid=2),  # within an operation of gloo
        event("cpu_op", "aten::mm", 100, 50),
        event("cpu_op", "_c10d_functional::wait_tensor", 110, 40),
    ]


def test_a_trace_of_gloo_and_a_picture(tmp_path: Path) -> None:
    path = save(tmp_path / "x.json", gloo_events(), distributedInfo={"rank": 3})
    rows = table(path, "-o", str(tmp_path / "x.svg"))
    assert rows[1] == ["3", "mean of 2", "0.050", "30.0", "30.0", "20.0", "10.0", "50.0"]
    assert rows[2] == ["3", "step 0", "0.050", "40.0", "60.0", "40.0", "20.0", "20.0"]
    assert "<path" in (tmp_path / "x.svg").read_text()
    without_steps = [event("cpu_op", "aten::mm", 0, 25), event("cpu_op", "aten::mm", 75, 25)]
    rows = table(save(tmp_path / "x.json", without_steps))
    assert rows[2][:4] == ["0", "all", "0.100", "50.0"]


@pytest.mark.parametrize("seed", range(20))
def test_shares_equal_a_count_on_a_grid(seed: int) -> None:
    """For spans with integer ends, the result equals a count for each microsecond."""
    draw = random.Random(seed)
    kinds: list[list[trace.Span]] = []
    for _ in range(3):
        starts = [draw.randrange(90) for _ in range(draw.randrange(12))]
        kinds.append([(start, start + draw.randrange(15)) for start in starts])
    computing, communication, holes = kinds
    first, second = sorted(draw.sample(range(1, 99), 2))
    steps = [trace.Step(f"{a}", a, b, []) for a, b in ((0, first), (second, 100))]
    _, *times = trace.shares_of(trace.union(computing, holes), communication, steps)
    for part, row in zip(steps, times, strict=True):
        counted = Counter[str]()
        for time in range(int(part.start), int(part.end)):
            runs = [any(a <= time < b for a, b in spans) for spans in kinds]
            computes, communicates = runs[0] and not runs[2], runs[1]
            counted["computing"] += computes
            counted["communication"] += communicates
            counted["exposed"] += communicates and not computes
            counted["both"] += computes and communicates
            counted["idle"] += not computes and not communicates
        want = [part.end - part.start, *(counted[name] for name in trace.COLUMNS)]
        assert [time * 1e3 for time in row] == pytest.approx(want, abs=1e-9)


GROUP_COLUMNS = ["calls/step", "ms", "exposed (ms)", "waits (ms)", "late (ms)"]


def nccl_rank(waits: float, group: str = "[0, 1]") -> list[Any]:
    """Two all-reduces that end at 100 and 200 us, and a send, which is not matched."""
    words = about_call("allreduce") | {"Process Group Ranks": group}
    reduce = {"launch": 2, **words}
    send = words | {"Collective name": "send"}
    return [
        *step(1, 0, 300),
        *kernel("gemm", 10, 80, launch=1),
        *kernel("ncclDevKernel_AllReduce", 90 - waits, 10 + waits, 9, **reduce),
        *kernel("ncclDevKernel_AllReduce", 190 - waits, 10 + waits, 9, **reduce),
        *kernel("ncclDevKernel_SendRecv", 200, 10 * waits, 9, launch=4, **send),
    ]


def test_which_rank_the_others_wait_for(tmp_path: Path) -> None:
    """Rank 1 arrives 20 us later. A difference of 1 s between the clocks does not matter."""
    late = [one | {"ts": one["ts"] + 1e6} for one in nccl_rank(0)]
    paths = [save(tmp_path / "a_rank1.json", late), save(tmp_path / "a_rank0.json", nccl_rank(20))]
    rows = table(*paths)
    first = rows.index(["group", "ranks", "rank", *GROUP_COLUMNS])
    assert rows[first + 1] == ["dp", "[0, 1]", "0", "3", "0.26", "0.24", "0.04", "0"]
    assert rows[first + 2] == ["dp", "[0, 1]", "1", "3", "0.02", "0.02", "0", "0.04"]
    cost = "0.04 ms of a 0.39 ms step (10.3%), for more than 5% in 1 of 1 step"  # rank 0's step
    assert rows[-1] == [f"# rank 1 makes the other ranks wait {cost}; mostly in all_reduce of dp"]
    apart = [save(tmp_path / f"b_rank{rank}.json", nccl_rank(rank, f"[{rank}]")) for rank in (0, 1)]
    lates = [row[-2:] for row in table(*apart) if row[0] == "dp" and len(row) == 8]
    assert lates == [["-", "-"]] * 2


@pytest.mark.parametrize(
    ("groups", "late"),
    [
        (([[0, 1]], [[0, 1]]), "0.0005"),
        (([[0, 2]], [[0, 2]]), "-"),
        # all calls of rank 1 are of a group with rank 0, which has the same number of calls
        (([[0, 2], [0, 1, 2]], [[0, 1, 2]]), "0.0005"),
        (([[0, 2], [0, 1, 2]], [[1, 2], [0, 1, 2]]), "-"),
    ],
)
def test_groups_of_gloo(tmp_path: Path, groups: tuple[list[list[int]], ...], late: str) -> None:
    """Two ranks of a group are compared unless both may be in others. Each is 1 us late once."""
    paths = []
    for rank in (0, 1):
        events = gloo_events()
        events[3]["dur"] += rank
        events[4]["dur"] -= rank
        info = {"rank": rank, "pg_config": [{"ranks": ranks} for ranks in [[0], *groups[rank]]]}
        paths.append(save(tmp_path / f"{rank}.json", events, distributedInfo=info))
    rows = [row for row in table(*paths) if row[0] == "not named" and len(row) == 7]
    assert [row[-1] for row in rows] == [late, late]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "Expecting value"),
        (b"\x1f\x8b cut off", ""),
        (b'{"traceEvents": [7]}', "events of an unknown form"),
        (b'{"traceEvents": []}', "no kernels and no operators"),
        (b'{"traceEvents": [{"ph": "X", "cat": "cuda_runtime", "name": ""}]}', "of a GPU without"),
    ],
)
def test_other_files_are_refused(content: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(content)
    line = refusal(str(path))
    assert line.startswith(f"trace.py: error: {path}: expected a trace of torch.profiler, e.g. by ")
    assert words in line


def test_two_traces_of_a_rank_are_refused(tmp_path: Path) -> None:
    paths = [save(tmp_path / name, gloo_events()) for name in ("a-rank0.json", "b-rank0.json")]
    assert "one trace per rank, got another one of rank 0" in refusal(*paths)


# -- --profile -------------------------------------------------------------------------------------


def test_names_are_safe_and_unique() -> None:
    models = ["a/b", "a b", "A b", "../" * 100, "ü\n"]
    names = [
        recorded.name_of_case("ddp_sweep", {"device": "cpu", "model": model}) for model in models
    ]
    assert len({name.lower() for name in names}) == 5
    assert all(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{1,200}", name) for name in names)
    assert re.fullmatch("ddp_sweep-cpu-a-b-[0-9a-f]{8}", names[0])


def test_the_first_rank_of_each_node_and_the_slowest() -> None:
    nodes = [0, 0, 0, 1, 1, 1]
    assert recorded.choose_ranks([0, 1, 2, 3, 4, 5], nodes, [1, 2, 3, 1, 5, 4], None) == {0, 3, 4}
    assert recorded.choose_ranks([1, 2], nodes, [3.0, 2.0], None) == {1}
    assert recorded.choose_ranks([1, 2], nodes, [3.0, 2.0], {0, 2}) == {2}


def test_a_trace_is_written_and_read(tmp_path: Path) -> None:
    with profile(acc_events=True) as profiler, record_function("step"):
        torch.ones(8, 8).sum()
    assert recorded.write(profiler, tmp_path / "a b-rank4.json.gz") == {}
    _, _, row = table(str(tmp_path / "a b-rank4.json.gz"))
    assert row[:2] == ["4", "step 0"]
    assert 0 < float(row[3]) <= 100


@pytest.mark.parametrize(("full", "why"), [(True, "No space left on device"), (False, "cut off")])
def test_a_full_disk(full: bool, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kineto writes to the temporary folder first, and reports no error if that is full."""
    half = gzip.compress(b'{"traceEvents": [')
    profiler: Any = SimpleNamespace(export_chrome_trace=lambda path: Path(path).write_bytes(half))
    file = tmp_path / "rank0.json.gz"
    if full:
        file.symlink_to("/dev/full")
        monkeypatch.setattr(Path, "unlink", lambda *args, **options: None)
    (line,), _ = recorded.lines_about({"0": {"file": "t/x.gz"} | recorded.write(profiler, file)})
    assert line.startswith(f"trace of rank 0 lost: {why}")
    assert full or not file.exists()


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"cannot write into .*/below: Not a directory"):
        recorded.check(tmp_path / "file" / "below", None, 2)
    with pytest.raises(ValueError, match=r"expected --profile-ranks from 0 to 3, got 4; e\.g\. 0"):
        recorded.check(tmp_path / "x", {0, 4}, 4)


# -- one call that dominates the shares ------------------------------------------------------------


@pytest.mark.parametrize("first_is_long", [True, False])
def test_a_first_call_that_dominates_is_named(tmp_path: Path, first_is_long: bool) -> None:
    """Four steps of 1 ms of computing and 0.5 ms of all-reduce. The first call takes 99 ms longer:
    99.5 of 101 ms are 98.51%. Without these 99.5 ms the steps take (1 + 0) + 3 * 1.5 ms in all,
    1.375 ms on average, of which 3 * 0.5 / 4 ms or 27.3% are exposed. A long call in a later step
    is not start-up, and is visible in the row of that step."""
    events, start = [], 0.0
    for number in range(4):
        long = 99_000 * (number == (0 if first_is_long else 2))
        events += step(number, start, 10) + kernel("gemm", start + 20, 1000, launch=start + 1)
        name, after = "ncclDevKernel_AllReduce", start + 2
        events += kernel(name, start + 1020, 500 + long, launch=after)
        start += 1500 + long
    path = save(tmp_path / "x.json", events)
    lines = [row[0] for row in table(path) if "one call" in row[0]]
    call = "all_reduce, 99.5 ms, in the first step"
    line = f"# rank 0: one call of 4 ({call}) accounts for 98.51% of the communication; without "
    assert lines == ([f"{line}it, 27.3% of a 1.375 ms step is exposed"] if first_is_long else [])


def test_the_command_for_the_traces_of_the_last_case() -> None:
    """The shell expands only the pattern, whatever characters the folder has."""
    traces = {"0": {"lost": "full", "file": "a b/x-rank0.json.gz"}}
    assert recorded.lines_about(traces)[1] == ""
    traces["3"] = {"file": "a b/x-rank3.json.gz"}
    _, command = recorded.lines_about(traces)
    assert command.startswith("traces of the last case; python ")
    assert command.endswith("analysis/trace.py 'a b/x'-rank*.json.gz")
