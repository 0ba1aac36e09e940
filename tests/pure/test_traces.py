"""traces.py: what a trace says of its step, by hand; names of files; which ranks; a full disk."""

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import profile, record_function

from analysis import timeline
from common import cli
from common.benchmark import Benchmark
from common.report import Case
from common.traces import choose_ranks, name_of_case, problem_with, shares, trace_lines, write

KEY = {"device": "cpu", "backend": "gloo", "world_size": 2}


def event(cat: str, name: str, start: float, end: float, tid: int = 1) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": end - start, "tid": tid}


def test_a_trace_of_nccl() -> None:
    """A step of 100 us on the GPU: kernels for 60, NCCL for 50, both of them for 20."""
    events = [
        event("user_annotation", "step", 0, 30),  # the host has launched it and goes on
        event("gpu_user_annotation", "step", 20, 120, tid=7),
        event("gpu_user_annotation", "step", 50, 110, tid=20),
        event("cpu_op", "aten::mm", 1, 500),
        event("cpu_op", "record_param_comms", 2, 400),
        event("kernel", "sm90_xmma_gemm_f32", 10, 70, tid=7),  # 10 of it are before the step
        event("kernel", "elementwise_kernel", 60, 80, tid=8),  # beside the one before
        event("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL", 60, 110, tid=20),
        event("gpu_memcpy", "Memcpy HtoD", 110, 120, tid=7),
        {"ph": "M", "name": "process_name"},
    ]
    assert shares(events, "step") == {
        "computing_alone": 0.4,
        "communication_alone": 0.3,
        "both": 0.2,
    }


def test_a_trace_of_gloo() -> None:
    """Two steps of 50 us. An operator that waits for a collective does not compute meanwhile."""
    events = [
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
    assert shares(events, "step") == {
        "computing_alone": 0.2,
        "communication_alone": 0.2,
        "both": 0.1,
    }


def test_without_communication_or_without_the_step() -> None:
    events = [event("user_annotation", "step", 0, 50), event("cpu_op", "aten::mm", 0, 25)]
    assert shares(events, "step") == {"computing_alone": 0.5}
    assert shares(events, "save") == {}


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
    summary = write(small_profile(), tmp_path / "a b-rank0.json.gz", "step")
    assert list(summary) == ["computing_alone"]
    assert 0 < summary["computing_alone"] <= 1


def test_a_full_disk_loses_the_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "rank0.json.gz"
    file.symlink_to("/dev/full")
    monkeypatch.setattr(Path, "unlink", lambda *args, **options: None)
    summary = write(small_profile(), file, "step")
    assert summary == {"lost": "No space left on device"}
    case = Case(KEY, [0], metrics={"traces": {"0": {"file": "t/x.gz"} | summary}})
    assert trace_lines(case) == ["# trace of rank 0: lost: No space left on device: t/x.gz"]


def test_the_line_of_a_trace() -> None:
    summary = {"computing_alone": 0.4, "communication_alone": 0.3, "both": 0.2, "file": "t/x.gz"}
    traces = {str(rank): summary | {"slowdown": 1 + rank / 11} for rank in range(6)}
    lines = trace_lines(Case(KEY, [*range(6)], metrics={"traces": traces}))
    assert len(lines) == 4
    words = "communication alone 30%, with computing 20%, computing alone 40% of the step"
    assert lines[0] == f"# trace of rank 0: {words}; t/x.gz"
    assert "under the profiler" not in lines[1]  # it is 9 % slower
    assert lines[2].endswith(f"{words}; under the profiler it took 1.18 times as long; t/x.gz")
    alone = {"computing_alone": 0.5, "file": "x"}
    (line,) = trace_lines(Case(KEY, [0], metrics={"traces": {"0": alone}}))
    assert line == "# trace of rank 0: computing 50% of the step, no communication was recorded; x"


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    problem = problem_with(str(tmp_path / "file" / "below"), None, 2)
    assert problem
    assert problem.startswith(f"--profile {tmp_path}/file/below: cannot write into it")
    assert problem_with(str(tmp_path / "new" / "below"), {0, 1}, 2) is None
    assert list((tmp_path / "new" / "below").iterdir()) == []
    problem = problem_with(str(tmp_path / "x"), {0, 4}, 4)
    assert problem == "--profile-ranks: expected ranks from 0 to 3, got 4; e.g. 0"


def test_a_picture_of_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the second step, 50 to 100 us: what runs in it, cut at its ends, in ms."""
    events = [
        event("user_annotation", "step", 0, 50),
        event("user_annotation", "step", 50, 100),
        event("cpu_op", "aten::mm", 40, 60),
        event("cpu_op", "c10d::allreduce_", 60, 61),
        event("user_annotation", "gloo:all_reduce", 70, 120, tid=2),
        event("cpu_op", "aten::mm", 110, 120),
    ]
    trace, picture = tmp_path / "x.json.gz", tmp_path / "x.svg"
    trace.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    spans = timeline.find_spans(events, 50, 100)
    assert spans == {
        ("thread 1", "computing"): [(0.0, 0.01)],
        ("thread 2", "communication"): [(0.02, 0.03)],
    }
    monkeypatch.setattr("sys.argv", ["timeline.py", str(trace), str(picture)])
    assert timeline.main() == 0
    assert "communication" in picture.read_text()
    monkeypatch.setattr("sys.argv", ["timeline.py", str(trace), str(picture), "--number", "2"])
    with pytest.raises(SystemExit) as caught:
        timeline.main()
    assert caught.value.code == 2


def test_ranks_need_a_folder(capsys: pytest.CaptureFixture[str]) -> None:
    parser = cli.Parser("")
    cli.add_common_flags(parser)
    with pytest.raises(SystemExit) as caught:
        Benchmark("x", parser.parse_args(["--profile-ranks", "0,1"]))
    assert caught.value.code == 2
    assert (
        "--profile-ranks needs the folder of the traces; e.g. --profile" in capsys.readouterr().err
    )
    assert parser.parse_args(["--profile-ranks", "1,0"]).profile_ranks == {0, 1}
