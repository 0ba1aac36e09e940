"""common/intervals.py, common/trace_summary.py and common/trace.py, on one rank."""

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import record_function

from common import trace
from common.intervals import difference, intersection, length, union
from common.trace import check_trace_path, profile_steps, trace_path
from common.trace_summary import read_events, summarize


def test_union() -> None:
    assert union([]) == []
    assert union([(5, 6), (0, 2), (1, 3), (3, 4), (0, 1)]) == [(0, 4), (5, 6)]


def test_intersection() -> None:
    assert intersection([(0, 4), (6, 9)], [(1, 2), (3, 7), (8, 20)]) == [
        (1, 2),
        (3, 4),
        (6, 7),
        (8, 9),
    ]
    assert intersection([(0, 1)], [(1, 2)]) == []
    assert intersection([(0, 3), (1, 5)], [(2, 4)]) == [(2, 4)]


def test_difference() -> None:
    assert difference([(0, 10)], [(2, 3), (5, 7)]) == [(0, 2), (3, 5), (7, 10)]
    assert difference([(0, 10), (20, 30)], [(-5, 25)]) == [(25, 30)]
    assert difference([(0, 2)], []) == [(0, 2)]
    assert difference([(0, 2)], [(0, 2)]) == []


def test_length() -> None:
    assert length([(0, 2), (1, 4), (10, 11)]) == 5
    assert length([]) == 0


def event(
    name: str, start: float, end: float, cat: str = "cpu_op", tid: int = 1, correlation: int = 0
) -> dict[str, Any]:
    """Times in seconds; a trace has microseconds."""
    return {
        "ph": "X",
        "name": name,
        "cat": cat,
        "ts": start * 1e6,
        "dur": (end - start) * 1e6,
        "tid": tid,
        "args": {"correlation": correlation},
    }


STEPS = [
    event("ProfilerStep#1", 10, 20, "user_annotation"),
    event("ProfilerStep#2", 20, 30, "user_annotation"),
    event("Forward", 10, 13, "user_annotation"),
    event("Backward", 13, 18, "user_annotation"),
    event("Optimizer", 18, 19, "user_annotation"),
    event("Forward", 20, 22, "user_annotation"),
    event("Backward", 22, 29, "user_annotation"),
]


def test_summary_on_the_cpu() -> None:
    events = [
        *STEPS,
        event("aten::ones", 5, 11),  # begins before the window: 1 of it counts
        event("aten::linear", 11, 13),
        event("aten::addmm", 11.5, 12.5),  # within the other
        event("autograd::engine::evaluate_function: AddmmBackward0", 13, 19),  # runs hooks too
        event("aten::mm", 13, 15),
        event("c10d::allreduce_", 15, 16),  # enqueues
        event("gloo:all_reduce", 14, 17, "user_annotation", tid=2),
        event("aten::copy_", 16, 17, tid=2),  # gloo's own
        event("## Call CompiledFxGraph abc ##", 20, 24),
        event("_c10d_functional::wait_tensor", 22, 23),  # waits within what is compiled
        event("gloo:all_gather", 21, 23, "user_annotation", tid=3),
        event("aten::mul", 23, 25, tid=4),
        event("python_function", 26, 27, "python_function"),
    ]
    # compute: 10-11, 11-13, 13-15, 20-22, 23-24, 23-25; communication: 14-17, 21-23
    # overlapped: 14-15, 21-22; idle: 17-20, 25-30
    assert summarize(events, 2, "cpu") == {
        "step_s": 10,
        "compute_s": 9 / 2,
        "communication_s": 5 / 2,
        "overlapped_s": 2 / 2,
        "idle_s": 8 / 2,
        "ranges_s": {"Forward": 5 / 2, "Backward": 12 / 2, "Optimizer": 1 / 2},
    }


def test_operators_count_on_a_thread_that_trains_whatever_it_records() -> None:
    """Torch has credited collectives to the thread that starts them."""
    events = [
        *STEPS,
        event("aten::mm", 10, 16),
        event("gloo:all_reduce", 14, 17, "user_annotation"),
    ]
    summary = summarize(events, 2, "cpu")
    assert (summary["compute_s"], summary["communication_s"]) == (3, 1.5)
    assert summary["overlapped_s"] == 1


def test_summary_on_cuda() -> None:
    nccl = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
    events = [
        *STEPS,
        event("aten::mm", 10, 12),  # on the host: no compute
        event("nccl:all_reduce", 13, 29, "user_annotation"),  # likewise
        event("cudaLaunchKernel", 11, 11.1, "cuda_runtime", correlation=1),
        event("cudaLaunchKernel", 14, 14.1, "cuda_runtime", tid=7, correlation=2),
        event("cuLaunchKernelEx", 15, 15.1, "cuda_driver", tid=7, correlation=3),
        event("sm90_gemm", 12, 15, "kernel", 70, 1),  # runs on into Backward
        event("sm90_gemm", 16, 21, "kernel", 70, 2),
        event(nccl, 18, 24, "kernel", 71, 3),
        event("Memcpy HtoD", 26, 27, "gpu_memcpy", 72, 99),  # launched nowhere we know
        event("Forward", 12, 15, "gpu_user_annotation", 70),
    ]
    # compute: 12-15, 16-21, 26-27; communication: 18-24; idle: 10-12, 15-16, 24-26, 27-30
    assert summarize(events, 2, "cuda") == {
        "step_s": 10,
        "compute_s": 9 / 2,
        "communication_s": 6 / 2,
        "overlapped_s": 3 / 2,
        "idle_s": 8 / 2,
        "ranges_s": {"Forward": 5 / 2, "Backward": 12 / 2, "Optimizer": 1 / 2},
        "ranges_device_s": {"Forward": 3 / 2, "Backward": 8 / 2, "Optimizer": 0},
    }


def test_gloo_on_cuda_devices_is_communication() -> None:
    events = [*STEPS, event("gloo:all_reduce", 14, 17, "user_annotation", tid=2)]
    assert summarize(events, 2, "cuda")["communication_s"] == 1.5


def test_a_trace_without_steps() -> None:
    with pytest.raises(ValueError, match="no ProfilerStep"):
        summarize([event("aten::mm", 0, 1)], 1, "cpu")


def step() -> None:
    x = torch.ones(50, 50, requires_grad=True)
    with record_function("Forward"):
        loss = (x @ x).sum()
    with record_function("Backward"):
        loss.backward()


@pytest.mark.parametrize("name", ["a trace.json", "trace.json.gz"])
def test_profiling_on_one_rank(tmp_path: Path, name: str) -> None:
    calls = []

    def counted() -> None:
        calls.append(1)
        step()

    path = tmp_path / name
    summary = profile_steps(counted, 3, torch.device("cpu"), path)
    assert len(calls) == 4
    assert 0 < summary["compute_s"] < summary["step_s"]
    assert summary["communication_s"] == summary["overlapped_s"] == 0
    assert summary["compute_s"] + summary["idle_s"] == pytest.approx(summary["step_s"])
    assert summary["ranges_s"]["Forward"] > 0
    assert summary["ranges_s"]["Backward"] > 0
    assert summary["ranges_s"]["Optimizer"] == 0
    data = path.read_bytes()
    document = json.loads(gzip.decompress(data) if name.endswith("gz") else data)
    names = [e.get("name") for e in document["traceEvents"]]
    assert names.count("Forward") == names.count("Backward") == 3
    assert list(tmp_path.iterdir()) == [path]


def test_profiling_without_a_file() -> None:
    assert profile_steps(step, 1, torch.device("cpu"))["compute_s"] > 0


def test_a_trace_that_was_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a full disk, which the profiler's export does not report."""
    export = trace.profile.export_chrome_trace

    def cut(self: Any, path: str) -> None:
        export(self, path)
        os.truncate(path, 100)

    monkeypatch.setattr(trace.profile, "export_chrome_trace", cut)
    with pytest.raises(OSError, match=r"could not be written to .*t\.json"):
        profile_steps(step, 1, torch.device("cpu"), tmp_path / "t.json")
    assert not list(tmp_path.iterdir())
    (tmp_path / "cut").write_text("{")
    with pytest.raises(ValueError, match="Expecting"):
        read_events(tmp_path / "cut")


def test_trace_names() -> None:
    assert trace_path("a b/t-{rank}-{case}.json", 3, "fsdp2 / aot_eager") == Path(
        "a b/t-3-fsdp2-aot-eager.json"
    )


@pytest.mark.parametrize("name", ["t.json", "t-{rank}.json", "{case}.{rank}.json.gz"])
def test_a_good_trace_file(tmp_path: Path, name: str) -> None:
    check_trace_path(str(tmp_path / name), 2 if "{rank}" in name else 1, 2 if "case" in name else 1)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "ranks", "cases", "message"),
    [
        ("", 1, 1, "needs a name that ends in .json or .json.gz, got '/'"),
        ("t.txt", 1, 1, "needs a name that ends in .json or .json.gz"),
        ("t.json", 2, 1, "the 2 ranks would write the same file; put {rank} into its name, e.g. "),
        ("t.json.gz", 2, 1, "/t-{rank}.json.gz"),
        ("t-{rank}.json", 2, 3, "the 3 cases would write the same file; put {case} into its name"),
        ("none/t.json", 1, 1, "there is no directory"),
        ("d.json", 1, 1, "is not a regular file"),
        ("n" * 300 + ".json", 1, 1, "cannot be written: File name too long"),
    ],
)
def test_a_bad_trace_file(tmp_path: Path, name: str, ranks: int, cases: int, message: str) -> None:
    (tmp_path / "d.json").mkdir()
    with pytest.raises(ValueError, match=r"^--trace-file ") as caught:
        check_trace_path(f"{tmp_path}/{name}", ranks, cases)
    assert message.replace("'/'", f"'{tmp_path}/'") in str(caught.value)
    assert "\n" not in str(caught.value)
