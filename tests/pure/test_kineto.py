"""analysis/traces/kineto.py: which events count, and which files are refused."""

import cProfile
import json
import os
import pstats
import re
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from analysis import trace
from analysis.traces import kineto
from analysis.traces.collective import operation_of
from tests.large_trace import events as large
from tests.pure.traces import (
    GEMM,
    Events,
    collective,
    event,
    kernel,
    mean,
    refusal,
    remarks,
    save,
    step,
    table,
)

COMMUNICATE = [
    "ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)",
    "rcclGenericKernel",
    "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(vllm::RankData*)",
    "void aiter::reduce_scatter_cross_device_store<__hip_bfloat16, 8>(aiter::RankData*)",
    "one_shot_all_reduce_kernel",
    "multimem_all_reduce_kernel",
    "void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<8>",
    "quickreduce::allreduce_prototype_twoshot<quickreduce::AllReduceTwoshot<__half>>",
    "void mori::moe::EpDispatchIntraNodeKernel<hip_bfloat16>",
    "void deep_ep::intranode::dispatch<8, 768, 8192>",
    "void hybrid_ep::dispatch_kernel<...>",
    "void uccl::internode_ll::combine<true>",
    "mscclpp::allreduce7",
    "oneccl_allreduce_ring_kernel",
    "nvshmemi_proxy_quiet_entrypoint",
    "rocshmem_alltoall_kernel",
    "moeAllToAllDispatchKernel",
    "triton_all_gather_matmul_kernel",
]
COMPUTE = [
    "triton_red_fused_all_reduce_free_name_0",
    "triton_poi_fused_all_gather_into_tensor_wait_tensor_3",
    "triton_per_fused__to_copy_reduce_scatter_tensor_1",
    "dequantize_and_gather_kv_cache_kernel",
    "__amd_rocclr_copyBuffer",
    "memory_mori_kernel",
    "void at::native::_scatter_gather_elementwise_kernel<128, 8>",
]


@pytest.mark.parametrize("name", [*COMMUNICATE, *COMPUTE])
def test_kernels_that_communicate(name: str, tmp_path: Path) -> None:
    """A matmul of 1 ms, then the kernel for 1 ms."""
    path = save(tmp_path / "x.json", [*kernel(GEMM, 10, 1000), *kernel(name, 1010, 1000)])
    assert mean(path)["exposed (%)"] == ("50.0" if name in COMMUNICATE else "0.0")


def test_names_of_operations_are_normalized() -> None:
    names = {
        "_allgather_base": "all_gather",
        "ALLGATHER_coalesced": "all_gather",
        "_reduce_scatter_base": "reduce_scatter",
        "all_to_allv": "all_to_all",
        "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)": "sendrecv",
        "void vllm::cross_device_reduce_1stage<float, 8>(vllm::RankData*)": "all_reduce",
        "void deep_ep::intranode::dispatch<8, 768>(int)": "deep_ep::intranode::dispatch",
    }
    assert {name: operation_of(name) for name in names} == names


def test_a_merged_file_is_refused(tmp_path: Path) -> None:
    other = [one | {"pid": 200} if one["cat"] != "kernel" else one for one in kernel(GEMM, 20, 5)]
    for what, events in (
        ("events of 2 processes (100, 200)", other),
        ("kernels of 2 devices", kernel(GEMM, 20, 5, device=1)),
    ):
        line = refusal(save(tmp_path / "a.json", [*kernel(GEMM, 10, 5), *events]))
        assert f"got {what} in one file; expected a separate file for each rank" in line


def healthy(late: float = 0, **args: Any) -> Events:
    """Three steps of 1.2 ms: a matmul of 0.6 ms, then an all-reduce until 1.0 ms."""
    events = []
    for number in range(3):
        start = 1000 + number * 1200
        events += step(number, start - 20, 1190)
        events += kernel(GEMM, start, 600)
        events += collective("allreduce", start + 600 + late, 400 - late, **args)
    return events


def test_kernels_that_end_after_the_next_one_starts(tmp_path: Path) -> None:
    """A kernel of 2 s without other calls: its duration is unknown."""
    path = save(tmp_path / "rank0.json", healthy() + kernel("elementwise", 1605, 2e6))
    row = mean(path)
    assert (row["computing (%)"], row["exposed (%)"]) == ("52.9", "35.3")  # 1.8 and 1.2 of 3.4 ms
    line = "# rank 0: 1 event runs past the next one on the same stream, by up to 2000 ms; cut: "
    assert remarks(path)[0] == line + "elementwise"
    # Kernels take 100 us. One lasts 2 ms according to the trace, but the next one on its stream
    # starts after 50 us. A kernel that is 1.05 ms too long, or in a CUDA graph, is not changed.
    usual = [event for n in range(5) for event in kernel("k", 100.0 * n, 100)]
    changed = kernel("k", 1000, 2000) + kernel(GEMM, 1050, 100)
    path = save(tmp_path / "a.json", usual + changed)
    assert mean(path)["ms"] == "1.150"
    assert mean(path)["computing (%)"] == f"{100 * (500 + 50 + 100) / 1150:.1f}"
    below = kernel("k", 1000, 1050) + kernel(GEMM, 1050, 100)  # 1 ms past the next one
    graph = kernel("k", 1000, 2000, graph_node_id=5) + kernel(GEMM, 1050, 100)
    for name, events, length in (("b", below, "2.050"), ("c", graph, "3.000")):
        path = save(tmp_path / f"{name}.json", usual + events)
        assert (mean(path)["ms"], remarks(path)) == (length, [])
    # Four kernels take 10 us. A fifth lasts 5 ms according to the trace, but the next one starts
    # after 400 us: it is cut to 10 us.
    first = kineto.Kernel(0, 10, "computing", "s", "k", 0, False, None)
    calls = [first._replace(start=t, end=t + 10) for t in range(0, 80, 20)]
    damaged, last = first._replace(start=100, end=5100), first._replace(start=500, end=510)
    cut, (line,) = kineto.cut_overruns([*calls, damaged, last])
    assert [one.end for one in cut[-2:]] == [110, 510]
    assert line.endswith("by up to 5 ms; cut: k")


@pytest.mark.parametrize("length", ["NaN", "-400", "Infinity", "null", '"x"', "1e400"])
def test_an_event_with_an_impossible_duration_is_left_out(length: str, tmp_path: Path) -> None:
    events = [*kernel(GEMM, 0, 10), *kernel("broken", 20, 12345), *kernel(GEMM, 90, 10)]
    path = Path(save(tmp_path / "rank3.json", events))
    path.write_text(path.read_text().replace("12345", length))
    assert (mean(str(path))["ms"], mean(str(path))["computing (%)"]) == ("0.100", "20.0")
    (line,) = remarks(str(path))
    assert line.startswith("# rank 3: left out 1 event with an impossible duration (")
    assert line.endswith("): broken")


def test_events_that_are_in_the_file_twice(tmp_path: Path) -> None:
    once, twice = (save(tmp_path / f"{n}.json", healthy() * n) for n in (1, 2))
    assert mean(twice) == mean(once) | {"rank": "2"}
    assert remarks(twice)[0] == "# rank 2: left out 6 events that the file contains twice"
    operator = event("cpu_op", "aten::mm", 1, 5)
    gloo = event("user_annotation", "gloo:barrier", 1, 5, 2)
    path = save(tmp_path / "4.json", [operator, gloo] * 2)
    assert remarks(path)[0] == "# rank 4: left out 1 event that the file contains twice"


def test_a_missing_step_does_not_lengthen_its_neighbor(tmp_path: Path) -> None:
    """Without the range of step 1, step 0 ends with its last kernel: after 1 ms, not 2.4."""
    events = [event for event in healthy() if event["name"] != "ProfilerStep#1"]
    rows = table(save(tmp_path / "0.json", events))
    steps = dict(row[1:3] for row in rows if row[1:] and row[1].startswith("Prof"))
    assert steps == {"ProfilerStep#0": "1.000", "ProfilerStep#2": "1.000"}


@pytest.mark.parametrize(("given", "shown"), [(*["ProfilerStep#{}"] * 2,), ("step", "step {}")])
def test_a_last_step_without_its_kernels(given: str, shown: str, tmp_path: Path) -> None:
    """The third step has lost one of its two kernels."""
    events = healthy()[:-2]
    for one in events:
        one["name"] = re.sub(r"Profiler.*#(.)", lambda match: given.format(match[1]), one["name"])
    path = save(tmp_path / "0.json", events)
    steps = [row[1] for row in table(path) if len(row) == 8 and row[0] == "0"]
    assert steps == ["mean of 2", shown.format(0), shown.format(1)]
    line = f"# rank 0: left out the last step, {given.format(2)}: the trace has lost its kernels"
    assert remarks(path)[0] == line


DTOD = "Memcpy DtoD (Device -> Device)"


def by_copy_engine(name: str, copy: str = DTOD, stream: int = 20, *more: Any) -> Events:
    """A collective of 8 ms in which two copies of 4 ms run, and then a matmul of 2 ms."""
    copies = [kernel(copy, start, 4000, 20, cat="gpu_memcpy") for start in (10, 4010)]
    span = event("gpu_user_annotation", name, 10, 8000, stream, 0, device=0, stream=stream)
    return [*kernel(GEMM, 8010, 2000), *copies[0], *copies[1], *more, span]


def test_copies_in_a_collective_communicate(tmp_path: Path) -> None:
    for name, copy, stream, more, shares in (
        ("nccl:_all_gather_base", DTOD, 20, [], ["80.0", "0.0"]),
        ("rccl:all_gather", "CopyDeviceToDevice", 20, [], ["80.0", "0.0"]),
        # a kernel of the same range
        ("nccl:all_gather", DTOD, 20, kernel("ncclKernel", 8000, 10, 20), ["80.0", "0.0"]),
        # a range of something else, and one on another stream: 2 ms of computing are the step
        ("Optimizer.step#SGD", DTOD, 20, [], ["0.0", "0.0"]),
        ("nccl:_all_gather_base", DTOD, 7, [], ["0.0", "0.0"]),
    ):
        path = save(tmp_path / "0.json", by_copy_engine(name, copy, stream, *more))
        row = mean(path)
        assert [row["exposed (%)"], row["idle (%)"]] == shares
        calls = [row for row in table(path) if row[:2] == ["not named", "all_gather"]]
        assert len(calls) == (shares[0] != "0.0" and not more)
        assert all(row[3] == "1" for row in calls)  # one call, not two copies


def test_copies_in_a_range_on_the_host_only(tmp_path: Path) -> None:
    """Copies that are launched within the range communicate: those at 0 and 4 ms."""
    for name, thread, end, exposed in (
        ("nccl:_all_gather_base", 100, 4005, "80.0"),
        ("nccl:_all_gather_base", 7, 4005, "0.0"),  # another thread
        ("step of mine", 100, 4005, "0.0"),
        # the second copy is launched after the range: 4 of 10 ms
        ("nccl:_all_gather_base", 100, 3000, "40.0"),
    ):
        *events, span = by_copy_engine(name)
        span |= {"cat": "user_annotation", "pid": 100, "tid": thread, "ts": -1, "dur": 1 + end}
        path = save(tmp_path / "0.json", [*events, span])
        assert mean(path)["exposed (%)"] == exposed


def test_traces_of_another_kind_are_refused(tmp_path: Path) -> None:
    for category in ("mtia_ccp_events", "privateuse1_runtime", "Kernel", ["a"]):
        other = event("cpu_op", "x", 0, 9) | {"cat": category}
        line = refusal(save(tmp_path / "x.json", [event("cpu_op", "aten::mm", 0, 9), other]))
        assert f"got unsupported events ({category}); only kernels of CUDA, ROCm and XPU" in line
    (tmp_path / "step.pftrace").write_bytes(b"\n!\b\0")
    assert "got a Perfetto trace; export .json instead" in refusal(str(tmp_path / "step.pftrace"))


def parsed(text: str) -> tuple[list[Any], dict[str, Any]]:
    found: list[Any] = []
    return found, kineto.parse(text, found.append, lambda share: None)


def test_the_text_is_read_event_by_event() -> None:
    event = {"ph": "X", "name": 'a "]}" \x07 \u00fc', "args": {"list": [[1, {}], []]}}
    whole = {"a": [1, {"b": "]"}], "traceEvents": [event, {"ph": "M"}, event], "z": {"rank": 3}}
    for text in (json.dumps(whole), f" {json.dumps(whole, indent=3)}\r\n\t"):
        assert parsed(text) == ([event, event], whole | {"traceEvents": []})
    assert parsed('{"traceEvents" :[ ] }') == ([], {"traceEvents": []})
    raw = '{"traceEvents":[{"ph":"X","name":"\x07"}]}'  # Kineto does not escape it
    assert parsed(raw)[0] == [{"ph": "X", "name": "\x07"}]
    whole_text = '{"a": 1, "traceEvents": [{"ph": "X"}, {"ph": "M"}], "b": [2] }'
    assert parsed(whole_text)
    for end in range(1, len(whole_text)):
        with pytest.raises(ValueError, match=r"Expecting|Unterminated"):
            parsed(whole_text[:end])
    for text in ("[]", "[7]", '[{"a": 1}]', "7", '{"a": 1}', '{"traceEvents": {"a": 1}}'):
        with pytest.raises(kineto.NotATrace, match="JSON without traceEvents"):
            parsed(text)
    for text in ('{"traceEvents": []} x', '{"traceEvents": [],}', "{,}"):
        with pytest.raises(json.JSONDecodeError):
            parsed(text)


def test_other_forms_of_a_trace(tmp_path: Path) -> None:
    """A bare list of events, and numbers that are written as text."""
    path, text = tmp_path / "rank0.json", json.dumps(healthy())
    expected = mean(save(tmp_path / "rank00.json", healthy()))
    for form in (text, re.sub(r'("(ts|dur|In msg nelems)": )(\d+)', r'\1"\3"', text)):
        path.write_text(form)
        assert mean(str(path)) == expected


def cost(path: str) -> tuple[int, int]:
    """The number of Python calls to print the tables of a trace, and the peak memory in bytes."""
    profile = cProfile.Profile()
    tracemalloc.start()
    try:
        one = profile.runcall(kineto.read, path)._replace(rank=0)
        profile.runcall(trace.show_shares, [one])
        profile.runcall(trace.show_collectives, {0: one}, None, None)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return pstats.Stats(profile).total_calls, peak  # type: ignore[attr-defined]


def test_time_and_memory_grow_linearly(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Twice as many steps take twice as many calls and bytes."""
    files = [save(tmp_path / f"{n}.json", large(n, 10, 20)) for n in (100, 200)]
    (calls, peak), (calls_of_twice, peak_of_twice) = map(cost, files)
    capsys.readouterr()
    assert calls_of_twice < 2.2 * calls
    assert peak_of_twice < 2.2 * peak
    assert peak_of_twice < 4 * Path(files[1]).stat().st_size


def test_a_folder_of_traces(tmp_path: Path) -> None:
    for rank in (0, 1):
        save(tmp_path / "a" / f"rank{rank}.pt.trace.json", healthy())
    own = [event("cpu_op", "aten::empty", 1, 3)]
    server = save(tmp_path / "a" / "host7_4711.async_llm.json", own)
    config = save(tmp_path / "a" / "config.json", [])
    Path(config).write_text("{}")
    rows = table(str(tmp_path / "a"))
    assert [row[0] for row in rows if row[1:2] == ["mean of 3"]] == ["0", "1"]
    assert rows[-3:-1] == [
        [f"# left out {config}: JSON without traceEvents"],
        [f"# left out {server}: it has neither a rank nor kernels"],
    ]
    assert "JSON without traceEvents" in refusal(config)  # it was named explicitly
    line = refusal(str(tmp_path))
    assert f"{tmp_path}: expected a folder with .json or .json.gz; its folders are a" in line
    (tmp_path / "loss.json").write_text("[2.1]")
    line = f"got none; left out {tmp_path}/loss.json: JSON without traceEvents"
    assert refusal(str(tmp_path)).endswith(line)


def test_a_folder_with_a_pipe_and_a_compressed_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rank1.json")
    (tmp_path / "rank2.json.zst").write_bytes(b"\x28\xb5\x2f\xfd")
    pipe, other = f"left out {tmp_path}/rank1.json: a pipe", f"left out {tmp_path}/rank2.json.zst"
    assert f"expected a folder with .json or .json.gz; {pipe}" in refusal(str(tmp_path))
    save(tmp_path / "rank0.json", healthy())
    assert remarks(str(tmp_path))[:2] == [f"# {pipe}", f"# {other}: compressed"]
    assert "expected a regular file, got a pipe" in refusal(f"{tmp_path}/rank1.json")
    assert "zstd; try zstd -d" in refusal(f"{tmp_path}/rank2.json.zst")
    os.mkfifo(tmp_path / "x.png")
    line = refusal(f"{tmp_path}/rank0.json", "-o", f"{tmp_path}/x.png")
    assert "x.png: expected a regular file, got a pipe" in line


def test_each_case_of_a_folder_is_reported(tmp_path: Path) -> None:
    """Different ranks of the two cases were profiled. Files may also be named explicitly."""
    cases = ["ddp_sweep-cpu-2-0123abcd", "ddp_sweep-cpu-1-89abcdef"]
    files = [(cases[0], 0), (cases[0], 1), (cases[1], 0)]
    paths = [save(tmp_path / f"{case}-rank{rank}.json.gz", healthy()) for case, rank in files]
    rows = table(str(tmp_path))
    heads = [row[0] for row in rows if row[0].startswith("# ddp_sweep")]
    assert heads == [f"# {case}" for case in cases[::-1]]
    assert [row[0] for row in rows if row[1:2] == ["mean of 3"]] == ["0", "0", "1"]
    assert sum("makes the other ranks wait" in row[0] for row in rows) == 1
    assert table(*reversed(paths[:2]), paths[2]) != rows  # in the order given
    assert table(paths[2], *paths[:2]) == rows
    line = refusal(str(tmp_path), "-o", str(tmp_path / "x.png"))
    assert f"-o draws one case, got 2: {cases[1]}, {cases[0]}" in line


def test_the_late_rank_by_the_names_of_files(tmp_path: Path) -> None:
    """Of 12 files number 2, the fifth one in alphabetical order, is 0.3 ms late."""
    about: dict[str, Any] = {"Process Group Ranks": str(list(range(12))), "Group size": 12}
    for name in (
        *("exp-rank[{}].1762000000.pt.trace.json", "trace_{}.json", "1762-TP-{}.trace.json"),
        "vm_4711.{}.pt.trace.json",
    ):
        folder = tmp_path / name.format("")
        for rank in range(12):
            save(folder / name.format(rank), healthy(300 * (rank == 2), **about))
        *others, line = remarks(str(folder))
        is_known = not name.startswith("vm")
        label = "rank 2" if is_known else f"the rank of {folder.name}/{name.format(2)}"
        assert line.startswith(f"# {label} makes the other ranks wait 0.3 ms of a 1.1333 ms step")
        assert is_known == (not others)


def test_ranks_of_files(tmp_path: Path) -> None:
    """Files are numbered by position, but only if the rank of none is known."""
    unknown = [save(tmp_path / f"{name}.json", healthy()) for name in "ab"]
    assert [row[0] for row in table(*unknown) if row[1:2] == ["mean of 3"]] == ["0", "1"]
    known = save(tmp_path / "rank0.json", healthy())
    for paths in ((unknown[0], known), (known, unknown[0])):
        line = f"{unknown[0]}: expected a rank in the trace or in the file's name"
        assert line in refusal(*paths)
