"""replay.py: what it reads, refuses and plans, and its arithmetic by hand; no process group."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import replay
from benchmarks.replay import Collective, Kind, Recording
from common.report import Case, Estimate
from common.stats import Times
from examples import record_collectives

MS = 1_000_000  # nanoseconds


def entry(name: str = "all_reduce", sent: Any = 6, received: Any = 6, **more: Any) -> Any:
    """Of the flight recorder, 1 ms after the start. None: a rank without that tensor."""
    return {
        "profiling_name": f"gloo:{name}",
        "process_group": ["7", "mesh_dp"],
        "collective_seq_id": 4,
        "input_sizes": [[sent]] if sent is not None else [],
        "output_sizes": [[received]] if received is not None else [],
        "input_dtypes": ["Float"] if sent is not None else [],
        "output_dtypes": ["Float"],
        "time_created_ns": 1000 * MS,
    } | more


def recording(*entries: Any, **more: Any) -> Any:
    """As record() writes it: 2 ranks, 2 steps of 10 ms."""
    fixed = {"world_size": 2, "steps": 2, "started_ns": 999 * MS, "ended_ns": 1019 * MS}
    return {"entries": list(entries), "groups": {"7": [0, 1]}} | fixed | more


def read(folder: Path, content: Any) -> Any:
    """What is read of rank 0 in a world of two."""
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    (folder / "fr_0.json").write_bytes(data)
    return replay.read(str(folder), 0, 2)


@pytest.mark.parametrize(
    ("name", "sent", "received", "op"),
    [
        ("all_reduce", 6, 6, "all_reduce"),
        ("allreduce_coalesced", 6, 6, "all_reduce"),
        ("_all_gather_base", 6, 12, "all_gather"),
        ("all_gather_single", 6, 12, "all_gather"),
        ("_reduce_scatter_base", 12, 6, "reduce_scatter"),
        ("_reduce_oop", 6, 6, "reduce"),
        ("all_to_all", 6, 6, "all_to_all"),
        ("broadcast", 6, 6, "broadcast"),
        ("barrier", None, None, "barrier"),
    ],
)
def test_an_entry(tmp_path: Path, name: str, sent: Any, received: Any, op: str) -> None:
    setup, marker = entry(time_created_ns=998 * MS), entry("coalesced", None, None)
    steps, time_s, calls = read(tmp_path, recording(setup, marker, entry(name, sent, received)))
    assert (steps, time_s) == pytest.approx((2, 0.020))
    kind = Kind(op, "mesh_dp", 2, "float32", 4 * max(sent or 0, received or 0))
    assert calls == [Collective(kind, ("mesh_dp", (0, 1)), 4, "", 0.0)]
    assert calls[0].begin_s == pytest.approx(1e-3)
    assert kind.counts()[1:] == (sent or 0, received or 0)


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        (entry("sparse_all_reduce"), "this operation is not known"),
        (entry("send 0->1"), "this operation is not known"),
        (entry(input_dtypes=["ComplexFloat"]), "this dtype is not known"),
        (entry("_all_gather_base", 6, 11), "parts differ in size, and only the sum is recorded"),
        (entry("all_to_all", 7, 7), "parts differ in size, and only the sum is recorded"),
        (entry(process_group=["9", "other"]), "the ranks of its group are not recorded"),
    ],
)
def test_what_cannot_be_replayed_says_why(tmp_path: Path, broken: Any, why: str) -> None:
    _, _, (call,) = read(tmp_path, recording(broken))
    assert call.problem == why


def test_the_time_in_the_job(tmp_path: Path) -> None:
    """NCCL's recorder has it."""
    timed = entry(duration_ms=2.5) | {"profiling_name": "nccl:all_reduce"}
    _, _, (call,) = read(tmp_path, recording(timed))
    assert call.job_s == pytest.approx(2.5e-3)


class Device:
    """A GPU with a clock, in ms: what the host queues on a stream starts when the stream is free.
    It stands for torch.cuda; each look at the clock takes the host 0.01 ms."""

    def __init__(self) -> None:
        self.now = 0.0
        self.synchronized = 0
        self.current = self.Stream(self)

    class Stream:
        def __init__(self, device: "Device") -> None:
            self.device, self.free_at = device, 0.0

        def queue(self, takes: float = 0.0) -> float:
            """When the work ends."""
            self.free_at = max(self.free_at, self.device.now) + takes
            return self.free_at

        def wait_stream(self, other: Any) -> None:
            self.free_at = max(self.free_at, other.free_at)

        def synchronize(self) -> None:
            self.device.now = max(self.device.now, self.free_at)
            self.device.synchronized += 1

    class Event:
        def __init__(self, device: "Device") -> None:
            self.device = device

        def record(self) -> None:
            self.at = self.device.current.queue()

        def elapsed_time(self, end: Any) -> float:
            return float(end.at - self.at)

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def perf_counter(self) -> float:
        self.now += 0.01
        return self.now / 1e3


@pytest.mark.parametrize(("end_s", "ends_at_ms"), [(0, 8.0), (0.03, 30.0)])  # b runs beside both
def test_over_nccl_the_host_waits_once(
    end_s: float, ends_at_ms: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two operations of one team, 4 ms each, and one of another, 5 ms; all at once in the job."""
    device = Device()
    monkeypatch.setattr(replay, "time", device)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: device.current)
    monkeypatch.setattr(torch.cuda, "stream", device.stream)
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Device.Event(device))
    a, b = (Kind("all_reduce", name, 2, "float32", 4) for name in "ab")
    calls = [
        Collective(a, ("a", (0, 1)), 1, "", 0.0),
        Collective(b, ("b", (0, 2)), 1, "", 0.0),
        Collective(a, ("a", (0, 1)), 2, "", 0.0),
    ]
    work_of_a = SimpleNamespace(wait=lambda: device.current.queue(4.0))
    work_of_b = SimpleNamespace(wait=lambda: device.current.queue(5.0))
    starts = {(a, calls[0].team): lambda: work_of_a, (b, calls[1].team): lambda: work_of_b}
    streams = {call.team: Device.Stream(device) for call in calls}
    played = replay.play_on_streams(calls, starts, streams, end_s)
    assert played[a] == pytest.approx([0.004, 0.004])
    assert played[b] == pytest.approx([0.005])
    assert device.synchronized == 1
    assert device.now == pytest.approx(ends_at_ms, abs=0.05)


@pytest.mark.parametrize(
    ("recorder", "has_nccl2"),
    [("nccl2", True), ("legacy", True), ("gloo", True), ("legacy", False), ("gloo", False)],
)
def test_every_backend_has_a_recorder_of_its_own(
    recorder: str, has_nccl2: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """nccl2's is apart from the older NCCL's. Gloo's may hold other groups'. Torch 2.14 has
    nccl2, but no recorder of it."""

    def dump(name: str) -> bytes:
        entries = [entry(process_group=["7", name])] if name in (recorder, "gloo") else []
        return json.dumps({"entries": entries}).encode()

    c10d, dist = torch._C._distributed_c10d, torch.distributed
    patch = partial(monkeypatch.setattr, raising=False)
    patch(c10d, "ProcessGroupNCCL2", object)
    patch(c10d, "_dump_nccl_trace_json", lambda: dump("legacy"))
    patch(
        c10d,
        "_dump_fr_trace_json",
        (lambda backend="gloo": dump(backend)) if has_nccl2 else (lambda: dump("gloo")),
    )
    patch(dist, "get_rank", lambda: 0)
    patch(dist, "get_world_size", lambda: 1)
    record_collectives.record(str(tmp_path), 999 * MS, 2)
    recorded: Any = replay.read(str(tmp_path), 0, 1)
    steps, _, (call,) = recorded
    assert (steps, call.kind.group) == (2, recorder)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (json.dumps(recording(entry())).encode()[:200], "JSONDecodeError: "),
        (b"\x80\x04}q\x00.", "UnicodeDecodeError: "),  # a pickle
        ({"traceEvents": []}, "KeyError: 'world_size'"),  # Kineto's
        ([entry()], "TypeError: "),
        (recording({"profiling_name": "gloo:all_reduce"}), "KeyError: 'time_created_ns'"),
        (b'{"a":' + b"[" * 100_000, "RecursionError: "),
    ],
)
def test_a_file_that_is_no_recording(tmp_path: Path, content: Any, text: str) -> None:
    with pytest.raises(ValueError, match="expected what record") as caught:
        read(tmp_path, content)
    said = str(caught.value)
    assert said.startswith(f"{tmp_path / 'fr_0.json'}: expected what record() of examples/")
    assert f", got {text}" in said
    assert "\n" not in said


def test_a_recording_of_other_ranks(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="torchrun --nproc-per-node 4 ") as caught:
        read(tmp_path, recording(entry(), world_size=4))
    assert "fr_0.json is of 4 ranks, and this job has 2" in str(caught.value)


def call(seq: int = 1, size: int = 400, **more: Any) -> Collective:
    """An all-reduce of mesh_dp of the ranks 0 and 1."""
    fields: dict[str, Any] = {"op": "all_reduce", "group": "mesh_dp", "ranks": (0, 1)} | more
    ranks, dtype = fields["ranks"], fields.get("dtype", "float32")
    kind = Kind(fields["op"], fields["group"], len(ranks), dtype, size)
    problem, job_s = fields.get("problem", ""), fields.get("job_s", 0.0)
    return Collective(kind, (kind.group, ranks), seq, problem, 0.0, job_s)


ODD = call(1, problem="parts differ")
EVEN_RANKS, ODD_RANKS = [call(ranks=(0, 2))], [call(ranks=(1, 3))]


@pytest.mark.parametrize(
    ("rows", "kept"),
    [
        ([[call(1), call(2)], [call(2), call(3)]], [[2], [2]]),  # ring buffers begin apart
        ([[call(1), call(1, 28)]] * 2, [[1, 1]] * 2),  # coalesced ones share a number
        ([[call(1), call(1), call(2)], [call(1), call(2)]], [[2], [2]]),
        ([[call(1, 20), call(9)], [call(1, 24), call(9)]], [[9], [9]]),
        ([[call(1), call(9)], [call(1, dtype="float16"), call(9)]], [[9], [9]]),
        ([[call(1), call(9)], [ODD, call(9)]], [[9], [9]]),
        ([EVEN_RANKS, ODD_RANKS] * 2, [[1]] * 4),  # two groups of one name
    ],
)
def test_what_all_ranks_of_a_group_have(rows: Any, kept: Any) -> None:
    plan = replay.choose([Recording(1, 0.010, row) for row in rows])
    assert [[each.seq for each in row] for row in plan.calls] == kept


@pytest.mark.parametrize("only", [(), ("dp",), ("mesh_dp", "mesh_tp")])
def test_what_is_left(only: tuple[str, ...]) -> None:
    """4 all-reduces, one of tp and an unknown one, on each of 2 ranks; 3 and 2 steps."""
    row = [call(1), call(2), call(3), call(4), call(1, group="mesh_tp")]
    odd = call(2, group="mesh_tp", op="what", problem="this operation is not known")
    recordings = [Recording(3, 0.03, [*row, odd]), Recording(2, 0.06, [*row, odd])]
    plan = replay.choose(recordings, only)
    tp = only != ("dp",)
    assert (plan.steps, plan.time_s) == (3, 0.06)
    assert plan.calls == [row if tp else row[:4]] * 2
    what = ["2 x what of mesh_tp: this operation is not known"]
    assert plan.lines == ([*what, "not replayed: 2 of 12"] if tp else ["not replayed: 0 of 8"])


@pytest.mark.parametrize(
    ("calls", "time_s", "text"),
    [
        ([], 0.01, "nothing is left of the groups mesh_tp; not replayed: 0 of 0"),
        ([call()], 1e10, "the recorded steps took 1e\\+10 s, and a replay takes as long; record"),
        ([call(size=2**40), call(2, 2**40)], 0.01, "the buffers need 2,199,023,255,552 bytes"),
    ],
)
def test_what_cannot_be_replayed_is_refused(
    calls: list[Collective], time_s: float, text: str
) -> None:
    """On one rank with --timeout 300. Both all-reduces use the same two buffers."""
    args, report = SimpleNamespace(timeout=300), SimpleNamespace(environment={})
    job = SimpleNamespace(rank=0, device=torch.device("cpu"), local_world_size=1)
    bench: Any = SimpleNamespace(args=args, job=job, report=report)
    recordings = [Recording(1, time_s, [call(group="mesh_tp")])]
    kinds = sorted({each.kind for each in calls})
    plan = replay.Plan(1, time_s, [calls], kinds, ["not replayed: 0 of 0"])
    with pytest.raises(ValueError, match=text):
        replay.check_plan(plan, recordings, bench)


def test_the_table_by_hand() -> None:
    """8 MB among 4 ranks: replayed in 10 ms, which is 0.8 GB/s, times 1.5 on the bus.

    2 calls of 10 ms and 1 of 20 ms share the time half and half. Rank 1 takes half as long as
    rank 0.
    """
    four: dict[str, Any] = {"group": "dp", "ranks": (0, 1, 2, 3)}
    bigs = [call(seq, 8_000_000, job_s=0.019 + seq % 2 * 0.002, **four) for seq in range(4)]
    small = [call(seq, 4_000_000, op="all_gather", **four) for seq in (4, 5)]
    big, other = bigs[0].kind, small[0].kind
    plan = replay.Plan(2, 0.2, [[*bigs, *small]] * 2, [big, other], [])
    samples = {"step": 0.2, "back to back": 0.08, str(big): 0.005, str(other): 0.010}
    rows = {name: [[s] * 8, [s / 2] * 8] for name, s in samples.items()}
    case = Case(key={}, ranks=[0, 1], samples_s=rows, rounds=[4, 4])
    returned = [[{big: s, other: 2 * s}] * 8 for s in (0.010, 0.005)]
    replay.derive(plan, case, Times(case.samples_s, case.rounds, returned), [None, None])
    m, (row, last) = case.metrics, case.metrics["operations"]
    assert (m["with_gaps_s"].value, m["back_to_back_s"].value) == (0.1, 0.04)
    assert (m["job_step_s"], m["step_bytes"]) == (0.1, 2 * 8_000_000 + 4_000_000)
    assert (row["calls"], last["calls"]) == (2, 1)
    expected = {
        "replayed_s": 0.010,
        "job_s": 0.020,
        "replayed_busbw_gb_per_s": 1.2,
        "alone_busbw_gb_per_s": 2.4,
        "job_busbw_gb_per_s": 0.6,
        "replayed_over_alone": 2,
        "share": 0.5,
    }
    assert {name: row[name].value for name in expected} == pytest.approx(expected)
    assert row["replayed_s"].low == row["replayed_s"].high == pytest.approx(0.010)
    assert last["share"].value == pytest.approx(0.5)
    assert "job_s" not in last


def test_the_answer() -> None:
    metrics = {
        "back_to_back_s": Estimate(0.025, 0.020, 0.030),
        "with_gaps_s": Estimate(0.101, 0.100, 0.104),
        "job_step_s": 0.1,
    }
    assert replay.answer(metrics) == (
        "a step: 25.0 ms (20.0 to 30.0) back to back, 25 % (20 to 30) of the job's 100 ms; "
        "101 ms (100 to 104) with its gaps"
    )
    metrics["back_to_back_s"] = Estimate(0.025)
    assert "25.0 ms (no interval) back to back, 25 % (no interval)" in replay.answer(metrics)
