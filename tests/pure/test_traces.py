"""--profile and analysis/trace.py: files, ranks, a full disk; what a trace says of a step, by hand
and by counting on a grid; traces as other programs write them, and what is no trace."""

import gzip
import json
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import profile, record_function

from analysis import trace
from common import cli
from common.benchmark import Benchmark
from common.observe.trace import check, choose_ranks, lines_about, name_of_case, write

KEY = {"device": "cpu", "backend": "gloo", "world_size": 2}
GROUP = {"Collective name": "allreduce", "Process Group Name": "7"}


def event(
    cat: str, name: str, start: float, end: float, tid: int = 1, **args: Any
) -> dict[str, Any]:
    whole = {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": end - start, "tid": tid}
    return whole | {"args": {word.replace("_", " "): args[word] for word in args}}


def launched(cat: str, name: str, at: float, start: float, end: float, **args: Any) -> list[Any]:
    """A kernel, and the call of the host that launched it."""
    number = int(at * 1e3)
    call = event("cuda_runtime", "cudaLaunchKernel", at, at + 1, correlation=number)
    return [call, event(cat, name, start, end, correlation=number, **args)]


def save(path: Path, events: list[Any], **more: Any) -> str:
    text = json.dumps({"traceEvents": events} | more)
    path.write_text(f" \n{text}")
    return str(path)


def table(*argv: str) -> list[list[str]]:
    """What the command prints: the cells of each line, split where two blanks or more stand."""
    lines = run(*argv).splitlines()
    return [re.split(r"\s{2,}", line.strip()) for line in lines if line and line[:2] != "--"]


def run(*argv: str) -> str:
    with pytest.MonkeyPatch.context() as patch:
        shown: list[str] = []
        patch.setattr("sys.argv", ["trace.py", *argv])
        patch.setattr(trace, "put", shown.append)
        assert trace.main() == 0
    return "\n".join(shown)


# -- analysis/trace.py -----------------------------------------------------------------------------


def test_a_trace_of_nccl(tmp_path: Path) -> None:
    """A step of 100 us on the GPU: computing for 60, NCCL for 50, 20 of them at once, a copy for 5
    alone. The host launches all of it in the first 30 us."""
    events = [
        event("user_annotation", "ProfilerStep#3", 0, 30),
        event("cpu_op", "aten::mm", 1, 500),
        *launched("kernel", "sm90_xmma_gemm_f32", 2, 20, 70, tid=7),
        *launched("kernel", "elementwise_kernel", 3, 60, 80, tid=8),  # beside the one before
        *launched("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL", 4, 60, 110, tid=20),
        *launched("gpu_memcpy", "Memcpy HtoD", 5, 105, 115, tid=7),
        *launched("kernel", "elementwise_kernel", 40, 200, 300, tid=8),  # of no step
        *launched("gpu_memset", "Memset", 29, 119.999, 120, tid=7),
        {"ph": "M", "name": "process_name"},
    ]
    rows = table(save(tmp_path / "rank5.json", events))
    percent = ["60.0", "50.0", "30.0", "20.0", "5.0", "5.0"]
    assert rows[1] == ["5", "ProfilerStep#3", "0.100", *percent]


def test_steps_of_the_profiler_follow_each_other(tmp_path: Path) -> None:
    """The GPU is idle from 40 to 100 us, before the second step's first kernel."""
    events = [
        event("user_annotation", "ProfilerStep#1", 0, 50),
        event("user_annotation", "ProfilerStep#2", 50, 90),
        *launched("kernel", "gemm", 2, 20, 40),
        *launched("kernel", "gemm", 60, 100, 110),
    ]
    rows = table(save(tmp_path / "a.json", events))
    assert [row[:4] for row in rows[1:2]] == [["0", "mean of 2", "0.045", "33.3"]]
    assert [row[:4] for row in rows[3:5]] == [
        ["0", "ProfilerStep#1", "0.080", "25.0"],
        ["0", "ProfilerStep#2", "0.010", "100.0"],
    ]


def gloo_events() -> list[Any]:
    """Two steps of 50 us. An operator that waits for a collective does not compute meanwhile."""
    return [
        event("user_annotation", "step", 0, 50),
        event("user_annotation", "without dp", 50, 100),
        event("user_annotation", "step", 100, 150),
        event("user_annotation", "gloo:all_reduce", 10, 40, tid=2),
        event("user_annotation", "gloo:all_reduce", 20, 30, tid=3),
        event("user_annotation", "gloo:barrier", 90, 100, tid=3),
        event("cpu_op", "aten::addmm", 0, 20),
        event("cpu_op", "aten::copy_", 5, 6),
        event("cpu_op", "aten::sort", 32, 34, tid=2),  # within gloo's operation
        event("cpu_op", "aten::mm", 100, 150),
        event("cpu_op", "_c10d_functional::wait_tensor", 110, 150),
    ]


def test_a_trace_of_gloo(tmp_path: Path) -> None:
    path = save(tmp_path / "x.json", gloo_events(), distributedInfo={"rank": 3})
    rows = table(path)
    assert rows[1] == ["3", "mean of 2", "0.050", "30.0", "30.0", "20.0", "10.0", "0.0", "50.0"]
    assert rows[3] == ["3", "step 0", "0.050", "40.0", "60.0", "40.0", "20.0", "0.0", "20.0"]
    assert table(path, "--step", "without dp")[1][:5] == ["3", "without dp", "0.050", "0.0", "20.0"]


def test_the_whole_trace_without_steps(tmp_path: Path) -> None:
    events = [event("cpu_op", "aten::mm", 0, 25), event("cpu_op", "aten::mm", 75, 100)]
    assert table(save(tmp_path / "x.json", events))[1][:4] == ["0", "all", "0.100", "50.0"]


@pytest.mark.parametrize("seed", range(20))
def test_against_a_count_on_a_grid(seed: int) -> None:
    """Spans with whole numbers: what runs in each microsecond is counted one by one."""
    draw = random.Random(seed)
    spans: dict[str, list[trace.Span]] = {}
    for kind in trace.COLORS:
        starts = [draw.randrange(90) for _ in range(draw.randrange(12))]
        spans[kind] = [(start, start + draw.randrange(15)) for start in starts]
    first, second = sorted(draw.sample(range(1, 99), 2))
    steps = [trace.Step(f"{a}", a, b, (a, b)) for a, b in ((0, first), (second, 100))]
    found = trace.times_of(spans, steps)
    for step, times in zip(steps, found[1:], strict=True):
        counted = Counter[str]()
        for time in range(int(step.start), int(step.end)):
            running = {k for k in spans if any(a <= time < b for a, b in spans[k])}
            computes, communicates = "computing" in running, "communication" in running
            counted["computing"] += computes
            counted["communication"] += communicates
            counted["both"] += computes and communicates
            counted["exposed"] += communicates and not computes
            counted["copies"] += running == {"copies"}
            counted["idle"] += not running
        for name in trace.COLUMNS:
            assert times[name] * 1e3 == pytest.approx(counted[name], abs=1e-9)
        assert found[0]["ms"] * 2e3 == pytest.approx(first + 100 - second)


def nccl_rank(waits: float, group: str = "[0, 1]") -> list[Any]:
    """Two all-reduces that end at 100 and 200 us, and a send that tells nothing."""
    about = GROUP | {"Process Group Description": "dp", "Process Group Ranks": group}
    words = {word.replace(" ", "_"): about[word] for word in about}
    send = words | {"Collective_name": "send"}
    return [
        event("user_annotation", "ProfilerStep#1", 0, 300),
        *launched("kernel", "gemm", 1, 10, 90),
        *launched("kernel", "ncclDevKernel_AllReduce", 2, 90 - waits, 100, tid=9, **words),
        *launched("kernel", "ncclDevKernel_AllReduce", 3, 190 - waits, 200, tid=9, **words),
        *launched("kernel", "ncclDevKernel_SendRecv", 4, 200, 200 + 10 * waits, tid=9, **send),
    ]


def test_which_rank_the_others_wait_for(tmp_path: Path) -> None:
    """Rank 1 comes 20 us later. The clocks differ by a second, which does not matter."""
    late = [one | {"ts": one["ts"] + 1e6} for one in nccl_rank(0)]
    paths = [save(tmp_path / "a_rank1.json", late), save(tmp_path / "a_rank0.json", nccl_rank(20))]
    rows = table(*paths)
    assert rows[4:] == [
        ["dp", "[0, 1]", "0", "3", "0.26", "0.24", "0.04", "0 of 2"],
        ["dp", "[0, 1]", "1", "3", "0.02", "0.02", "0", "2 of 2"],
        ["# rank 1 comes last most often, to 2 of 2 collectives"],
    ]
    apart = [save(tmp_path / f"b_rank{rank}.json", nccl_rank(rank, f"[{rank}]")) for rank in (0, 1)]
    assert [row[-1] for row in table(*apart)[4:]] == ["-", "-"]


def test_gloo_does_not_name_groups(tmp_path: Path) -> None:
    """Two ranks of one group are compared; where a rank may be in another group, they are not."""
    for ranks, want in (([0, 1], "1 of 2"), ([0, 2], "-")):
        about = {"pg_config": [{"pg_name": "0", "ranks": ranks}, {"pg_name": "1", "ranks": [0]}]}
        paths = []
        for rank in (0, 1):
            events = gloo_events()
            events[3]["dur"] += rank
            events[4]["dur"] -= rank
            info = about | {"rank": rank}
            paths.append(save(tmp_path / f"{rank}.json", events, distributedInfo=info))
        assert [row[-1] for row in table(*paths) if row[-1] in ("1 of 2", "-")] == [want, want]


def test_a_picture_of_a_step(tmp_path: Path) -> None:
    path = save(tmp_path / "x.json", gloo_events())
    picture = tmp_path / "x.svg"
    run(path, "-o", str(picture))
    assert "rank 0, thread 2" in picture.read_text() or "<path" in picture.read_text()


NO_TRACES = {
    b"": "Expecting value",
    b'{"traceEvents": [{"ph": "X"': "Expecting ",
    b"\x1f\x8b cut off": "",
    b"[1, 2]": "JSON without traceEvents",
    b'{"nodes": []}': "JSON without traceEvents",
    b'{"traceEvents": []}': "a trace of another program",
    b'{"traceEvents": [7]}': "other events",
    b'{"traceEvents": [{"ph": "X", "cat": "Kernel", "name": "", "ts": 1, "dur": 1}]}': "an older",
    b'{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": 7, "ts": 1, "dur": 1}]}': "other ev",
}


@pytest.mark.parametrize("content", NO_TRACES)
def test_what_is_no_trace(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(SystemExit) as caught:
        run(str(path))
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    start = f"trace.py: error: {path}: expected a trace of torch.profiler, e.g. by export_chrome_tr"
    assert line.startswith(start)
    assert NO_TRACES[content] in line


def test_what_else_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = save(tmp_path / "x.json", gloo_events())
    host = [event("user_annotation", "nccl:all_reduce", 0, 1)]
    cases = [
        ((path, "--step", "save"), "no range save; its ranges are step, gloo:all_reduce, w"),
        ((path, save(tmp_path / "rank0.json", gloo_events())), "expected a trace of each rank"),
        ((path, "-o", "x.txt"), "expected a file that ends in .png or .svg or .pdf, got 'x.txt'"),
        ((save(tmp_path / "host.json", host),), "a GPU's without kernels"),
        ((str(tmp_path / "none.json"),), "No such file"),
    ]
    for argv, words in cases:
        with pytest.raises(SystemExit) as caught:
            run(*argv)
        assert caught.value.code == 2
        assert words in capsys.readouterr().err


# -- --profile -------------------------------------------------------------------------------------


def test_names_are_safe_and_unique() -> None:
    keys = [
        KEY | {"model": "a/b"},
        KEY | {"model": "a b"},
        KEY | {"model": "A b"},
        KEY | {"model": "a b", "flag": True},
        KEY | {"model": "a b", "flag": False},
        KEY | {"model": "../" * 100},
        KEY | {"model": "ü\n"},
    ]
    names = [name_of_case("ddp_sweep", key) for key in keys]
    names.append(name_of_case("collectives", keys[0]))
    assert len({name.lower() for name in names}) == 8
    for name in names:
        assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{1,200}", name)
    assert names[0].startswith("ddp_sweep-cpu-gloo-2-a-b-")
    assert name_of_case("ddp_sweep", keys[0]) == names[0]  # also in the next run


def test_the_first_rank_of_each_node_and_the_slowest() -> None:
    nodes = [0, 0, 0, 1, 1, 1]
    assert choose_ranks([0, 1, 2, 3, 4, 5], nodes, [1, 2, 3, 1, 5, 4], None) == {0, 3, 4}
    assert choose_ranks([1, 2], nodes, [3.0, 2.0], None) == {1}
    assert choose_ranks([1, 2], nodes, [3.0, 2.0], {0, 2}) == {2}
    assert choose_ranks([1, 2], nodes, [3.0, 2.0], {0}) == set()


def small_profile() -> profile:
    with profile(acc_events=True) as profiler, record_function("step"):
        torch.ones(8, 8).sum()
    return profiler


def test_a_trace_is_written_and_read(tmp_path: Path) -> None:
    path = tmp_path / "a b-rank4.json.gz"
    assert write(small_profile(), path) == {}
    (row,) = table(str(path))[1:]
    assert row[:2] == ["4", "step"]
    assert 0 < float(row[3]) <= 100


def test_a_full_disk_loses_the_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "rank0.json.gz"
    file.symlink_to("/dev/full")
    monkeypatch.setattr(Path, "unlink", lambda *args, **options: None)
    lost = write(small_profile(), file)
    assert lost == {"lost": "No space left on device"}
    (line,) = lines_about({"0": {"file": "t/x.gz"} | lost})
    assert line == "trace of rank 0 lost: No space left on device: t/x.gz"


def test_a_trace_that_kineto_has_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It writes to the folder of temporary files first, and does not say if that is full."""
    profiler, file = small_profile(), tmp_path / "rank0.json.gz"

    def export(path: str) -> None:
        Path(path).write_bytes(gzip.compress(b'{"traceEvents": ['))

    monkeypatch.setattr(profiler, "export_chrome_trace", export)
    assert write(profiler, file)["lost"].startswith("cut off; is ")
    assert not file.exists()


def test_the_line_of_a_case() -> None:
    names = [f"t/x-rank{rank}.json.gz" for rank in range(12)]
    traces = {"0": {"file": names[0], "slowdown": 1.05}, "3": {"file": names[3], "slowdown": 1.0}}
    assert lines_about({}) == []
    assert lines_about(traces) == ["trace of rank 0, 3: t/x-rank*.json.gz"]
    traces["3"]["slowdown"] = 1.276
    slow = "; under the profiler a step took 1.28 times as long on rank 3"
    assert lines_about(traces) == [f"trace of rank 0, 3: t/x-rank*.json.gz{slow}"]
    many = {str(rank): {"file": name} for rank, name in enumerate(names)}
    assert lines_about(many) == ["trace of 12 ranks: t/x-rank*.json.gz"]


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    below = tmp_path / "file" / "below"
    with pytest.raises(ValueError, match=re.escape(f"cannot write into {below}: Not a directory")):
        check(below, None, 2)
    check(tmp_path / "new" / "below", {0, 1}, 2)
    assert list((tmp_path / "new" / "below").iterdir()) == []
    with pytest.raises(ValueError, match=r"expected --profile-ranks from 0 to 3, got 4; e\.g\. 0"):
        check(tmp_path / "x", {0, 4}, 4)


def test_ranks_need_a_folder(capsys: pytest.CaptureFixture[str]) -> None:
    parser = cli.Parser("")
    cli.add_common_flags(parser)
    with pytest.raises(SystemExit) as caught:
        Benchmark("x", parser.parse_args(["--profile-ranks", "0,1"]))
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert "--profile-ranks needs the folder of the traces; e.g. --profile" in said
    assert parser.parse_args(["--profile-ranks", "1,0"]).profile_ranks == {0, 1}
