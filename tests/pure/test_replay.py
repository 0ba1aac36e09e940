"""replay.py without a process group: recordings, refusals, plans and arithmetic."""

import gzip
import json
import os
import pickle
import re
from collections import OrderedDict
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest
import torch

from benchmarks import replay
from benchmarks.replay import Collective, Kind, Recording
from common.stats import Times
from examples import record_collectives
from harness.report import Case
from readers.files import plain_pickle
from tests.process import ROOT
from tests.pure.reports import refused
from tests.pure.traces import about_call, event, step

RECORDINGS = ROOT / "tests" / "recordings"
MS = 1_000_000  # nanoseconds


def entry(name: str = "all_reduce", sent: Any = 6, received: Any = 6, **more: Any) -> Any:
    """An entry of the flight recorder, 1 ms after the start. None: a rank without that tensor."""
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


def read(folder: Path, *entries: Any, content: Any = None, **more: Any) -> Recording:
    """Read the recording of rank 0 of two: 2 steps of 10 ms, or other content of the file."""
    times = {"world_size": 2, "steps": 2, "started_ns": 999 * MS, "ended_ns": 1019 * MS}
    recorded = {"entries": list(entries), "groups": {"7": [0, 1]}} | times | more
    (folder / "fr_0.json").write_text(json.dumps(recorded) if content is None else content)
    (folder / "fr_1.json").touch()
    return replay.read(str(folder), 0, 2)


@pytest.mark.parametrize(
    ("name", "sent", "received", "op", "problem"),
    [
        ("allreduce_coalesced", 6, 6, "all_reduce", ""),
        ("_all_gather_base", 6, 12, "all_gather", ""),
        ("_reduce_scatter_base", 12, 6, "reduce_scatter", ""),
        ("_reduce_oop", 6, 6, "reduce", ""),
        ("barrier", None, None, "barrier", ""),
        ("send 0->1", 6, 6, "send", "this operation is not replayed"),
        ("all_to_all", 7, 7, "all_to_all", "parts differ in size, and only the sum is recorded"),
    ],
)
def test_an_entry(
    tmp_path: Path, name: str, sent: Any, received: Any, op: str, problem: str
) -> None:
    """NCCL's recorder also has the duration in the job."""
    setup, marker = entry(time_created_ns=998 * MS), entry("coalesced", None, None)
    recording = read(tmp_path, setup, marker, entry(name, sent, received, duration_ms=2.5))
    assert (recording.steps, recording.time_s) == pytest.approx((2, 0.020))
    kind = Kind(op, "mesh_dp", 2, "float32", 4 * max(sent or 0, received or 0))
    (call,) = recording.calls
    assert call == Collective(kind, ("mesh_dp", (0, 1)), 4, problem, 0.0)
    assert (call.begin_s, call.job_s) == pytest.approx((1e-3, 2.5e-3))


@pytest.mark.parametrize("content", ['{"world_size": 2, ', "{}", '{"a":' + "[" * 100_000])
def test_other_files_are_refused(tmp_path: Path, content: str) -> None:
    why = r"fr_0.json: expected the recording of a rank, got (\w+Error|neither)"
    assert re.search(why, refused(read, tmp_path, content=content))


FROM_4 = "is from a job of 4 ranks, and this job has 2; e.g. torchrun --nproc-per-node 4 "


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rank": 1}, "expected the recording of rank 0, got rank 1"),
        ({"rank": "x"}, "rank 'x' instead of a whole number"),
        ({"world_size": 4}, FROM_4),
        ({"world_size": "x"}, "world_size 'x' instead of a whole number"),
        ({"steps": 0}, "steps 0 instead of a whole number of 1 or more"),
        ({"steps": 10**9}, "1,000,000,000 steps in 0.02 s"),
        ({"ended_ns": 0}, "2 steps in -0.999 s"),
        ({"entries": [3]}, "AttributeError"),
        ({"entries": [entry(time_created_ns=10**19)]}, "an operation after 1e+10 s of steps of"),
        ({"entries": [entry(sent=-6)]}, "size -6 instead"),
        ({"entries": [entry(sent=1.5)]}, "size 1.5 instead"),
        ({"entries": [entry(collective_seq_id="x")]}, "sequence number 'x' instead"),
        ({"entries": [entry(duration_ms=-1)]}, "an operation that took -0.001 s"),
        ({"groups": {"7": [0, 0]}}, "a group with the ranks [0, 0]"),
        ({"groups": {"7": ["a", "b"]}}, "rank of a group 'a' instead"),
    ],
)
def test_a_damaged_recording_is_one_line(tmp_path: Path, changes: Any, reason: str) -> None:
    assert reason in refused(read, tmp_path, entry(), **changes)


class Hostile:
    """Unpickling it calls a function."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_only_plain_data_of_a_pickle_is_read(tmp_path: Path, protocol: int) -> None:
    """Nothing is executed: calls, classes, instances, sets, extensions, and a memo that would need
    32 GB are refused."""
    values: list[Any] = [None, True, -7, 2**70, 0.5, "\u00fc", (), (1,), (1, 2, 3, 4), {}]
    plain: dict[str, Any] = {"a": values} | (
        {"b": b"x"} if protocol > 2 else {}
    )  # by codecs.encode
    assert plain_pickle(pickle.dumps(plain, protocol)) == plain
    made = tmp_path / "made"
    others = [Hostile(made), OrderedDict(a=1), {1, 2}, bytearray(b"x"), replay.Kind, torch.float32]
    files = [pickle.dumps({"entries": [value]}, protocol) for value in others]
    files += [f"cos\nmkdir\n(V{made}\ntR.".encode(), f"(S'{made}'\nios\nmkdir\n.".encode()]
    files += [b"Pid\n.", b"\x82\x01.", b"(I1\nr\xff\xff\xff\xff."]
    for data in files:
        why = refused(plain_pickle, data)
        assert why.startswith(("a pickle that is not plain", "a pickle with the memo")), data
    assert not made.exists()
    (tmp_path / "nccl_trace_rank_0").write_bytes(files[0])
    why = refused(replay.read, str(tmp_path), 0, 1)
    assert "rank_0: expected the recording of a rank, got a pickle" in why


def plan_of(folder: Path, ranks: int = 2) -> replay.Plan:
    recordings = [replay.read(str(folder), rank, ranks) for rank in range(ranks)]
    return replay.choose(replay.in_order(recordings))


NO_STEPS = "the recording does not mark steps: `a step` is the whole recording"
NO_DURATIONS = "the recording has no durations of operations: `job` is empty"


@pytest.mark.parametrize("version", ["2.14", "2.15"])
def test_a_trace_of_the_profiler(version: str) -> None:
    """2 steps of DDP over gloo with 33 * 32 * 2 parameters of 4 bytes, and a send from 0 to 1."""
    plan = plan_of(RECORDINGS / f"profiler_{version}")
    assert plan.steps == 2
    assert 0 < plan.calls[0][0].begin_s < plan.calls[0][-1].begin_s < plan.time_s < 1
    sizes = {"all_reduce": 8448, "all_gather": 512, "broadcast": 256, "barrier": 0}
    assert [call.kind.op for call in plan.calls[0]] == [*sizes] * 2
    assert {kind.op: kind.size_bytes for kind in plan.kinds} == sizes
    assert {kind.dtype for kind in plan.kinds} == {"float32", "uint8"}
    assert all(0 < call.job_s < plan.time_s for call in plan.calls[0])
    assert plan.lines == [
        "2 x send of default_pg: this operation is not replayed",
        "2 x recv of default_pg: this operation is not replayed",
        "not replayed: 4 of 20 operations",
    ]


@pytest.mark.parametrize("name", ["dump_2.14", "dump_2.15", "json_2.15"])
def test_a_dump_of_torch(name: str) -> None:
    """A pickle and JSON, without steps and durations. With gloo mesh_tp's ranks are missing."""
    plan = plan_of(RECORDINGS / name)
    assert plan.steps == 1
    assert [calls[0].begin_s for calls in plan.calls] == [0, 0]
    assert plan.time_s == max(call.begin_s for calls in plan.calls for call in calls)
    assert plan.lines == [
        "2 x all_reduce of mesh_tp: the ranks of its group are not recorded",
        "not replayed: 2 of 60 operations",
        NO_STEPS,
        NO_DURATIONS,
    ]


def test_a_dump_without_times_is_replayed_without_gaps(tmp_path: Path) -> None:
    dump = {"entries": [entry(time_created_ns=0), entry()], "pg_config": {"7": {"ranks": "[0, 1]"}}}
    for rank in range(2):
        (tmp_path / f"rank_{rank}").write_bytes(pickle.dumps(dump))
    plan = plan_of(tmp_path)
    assert (plan.steps, plan.time_s) == (1, 0.0)
    no_times = "the recording has no times: replayed without gaps"
    assert plan.lines == ["not replayed: 0 of 4 operations", NO_STEPS, no_times]
    case = Case(key={}, ranks=[0, 1])
    big = str(plan.kinds[0])
    samples = {"step": [[0.004] * 8] * 2, big: [[0.001] * 8] * 2}
    times = Times(samples, [4, 4], [[{plan.kinds[0]: 0.002}] * 8] * 2)
    replay.derive(plan, case, times, [None, None])
    told = "the communication of a step takes 4.00 ms (4.00 to 4.00) back to back"
    assert replay.answer(case.metrics) == told


def comm(ts: float, size: int = 1024, cat: str = "cpu_op", **args: Any) -> dict[str, Any]:
    """Kineto's event of an all-reduce over NCCL on 2 ranks."""
    about = about_call("allreduce", size, "default_pg", **{"External id": int(ts)} | args)
    return event(cat, "record_param_comms", ts, 50) | {"args": about}


def trace(*events: Any, **about: Any) -> str:
    info = {"rank": 0, "world_size": 1, "pg_config": [{"pg_name": "9", "ranks": [0, 1, 2]}]}
    return json.dumps(
        {"distributedInfo": info | about, "traceEvents": [*step(1, 1e3, 2e4), *events]}
    )


def of_kineto(folder: Path, *events: Any, name: str = "rank0.json", **about: Any) -> Recording:
    (folder / name).write_text(trace(*events, **about))
    return replay.read(str(folder), 0, 1)


def test_a_trace_over_nccl(tmp_path: Path) -> None:
    """Times are those of the kernels. Events outside of the steps do not count."""
    kernel = comm(2500, cat="kernel", **{"External id": 2000}) | {"dur": 300.0}
    wait: dict[str, Any] = {"Collective name": "wait"}
    copy = comm(2500, cat="gpu_user_annotation")
    calls = [comm(9e5), comm(2000, Seq=7), comm(2001, **wait)]
    recording = of_kineto(tmp_path, *calls, kernel, copy)
    assert (recording.steps, recording.time_s) == pytest.approx((1, 0.02))
    (call,) = recording.calls
    assert call.kind == Kind("all_reduce", "default_pg", 2, "float32", 4096)
    assert (call.seq, call.problem) == (7, "")
    assert (call.begin_s, call.job_s) == pytest.approx((1e-3, 3e-4))


def ranges(*names: str, length: float = 1e4, thread: int = 1, at: float = 0) -> list[Any]:
    """Ranges of 10 ms that follow each other, as of record_function."""
    times = [(name, at + 1e4 * number) for number, name in enumerate(names)]
    return [event("user_annotation", name, ts, length - 1, thread) for name, ts in times]


MARKS = ranges(*(f"ProfilerStep#{number}" for number in range(4)))
CALLS = [comm(1e4 * number + at) for number in range(4) for at in (100, 2100, 4100)]


@pytest.mark.parametrize(
    "events",
    [
        # ranges within steps and in another thread, and every event twice
        ranges(*["step"] * 4) + ranges(*["step"] * 4, length=5e3, at=10, thread=2) + CALLS,
        (MARKS + CALLS) * 2,
        [one | {"ts": str(one["ts"]), "dur": str(one["dur"])} for one in MARKS + CALLS],
    ],
)
@pytest.mark.parametrize("is_bare", [True, False])
def test_steps_and_calls_count_once(tmp_path: Path, events: list[Any], is_bare: bool) -> None:
    """4 steps of 10 ms with 3 calls each."""
    content = events if is_bare else {"traceEvents": events}
    (tmp_path / "rank[0].json").write_text(json.dumps(content))
    recording = replay.read(str(tmp_path), 0, 1)
    assert (recording.steps, len(recording.calls)) == (4, 12)
    assert recording.time_s == pytest.approx(0.04, rel=1e-3)
    assert recording.calls[3].begin_s == pytest.approx(0.0101)


@pytest.mark.parametrize("steps", [(1, 2), (2, 2, 0)])
def test_recordings_of_different_steps_are_refused(steps: tuple[int, ...]) -> None:
    recordings = [Recording(count, 0.1, [], rank) for rank, count in enumerate(steps)]
    why = refused(replay.in_order, recordings)
    assert re.search(r"same number of steps .*; rank \d has [01], rank \d has 2", why)


NAMED = {"Process Group Name": "9"}
UNKNOWN = {"Process Group Ranks": "", "Global rank start": -1, "Global rank stride": -1}
TO_ALL = {"Collective name": "all_to_allv"}


@pytest.mark.parametrize(
    ("args", "ranks", "problem"),
    [
        ({"Process Group Ranks": "[0, 1, ...]"} | NAMED, (0, 1, 2), ""),
        ({"Process Group Ranks": "[0, 1]"} | NAMED, (0, 1), ""),
        (UNKNOWN | {"Global rank start": 1, "Global rank stride": 4}, (1, 5), ""),
        (UNKNOWN, (), "the ranks of its group are not recorded"),
        (TO_ALL | {"In split size": "[512, 512]"}, (0, 1), ""),
        (TO_ALL | {"In split size": "[1, 1023]"}, (0, 1), replay.UNEVEN),
        (TO_ALL | {"Out split size": "[512, ...]"}, (0, 1), replay.UNEVEN),
        ({"Collective name": "allreduce_sparse"}, (0, 1), "this operation is not replayed"),
        ({"dtype": "ComplexFloat"}, (0, 1), "this dtype is not known"),
    ],
)
def test_a_call_of_a_trace(tmp_path: Path, args: Any, ranks: Any, problem: str) -> None:
    (call,) = of_kineto(tmp_path, comm(2000, **args)).calls
    assert (call.team[1], bool(call.problem)) == (ranks, bool(problem))
    assert problem in call.problem


def test_a_trace_without_collectives_or_sizes(tmp_path: Path) -> None:
    why = refused(of_kineto, tmp_path)
    assert "a Kineto trace without collectives of NCCL or gloo" in why
    event = comm(2e3) | {"name": "c10d::allreduce_", "args": {}}
    why = refused(of_kineto, tmp_path, event)
    assert "without the sizes of collectives; over gloo set record_" in why
    why = refused(of_kineto, tmp_path, comm(2000, cat="kernel") | {"dur": float("nan")})
    assert "rank0.json: expected the recording of a rank, got an" in why


def test_names_without_a_rank(tmp_path: Path) -> None:
    """The names of tensorboard_trace_handler. The rank is in the content. A pipe is not read."""

    def why(ranks: int) -> str:
        return refused(replay.read, str(tmp_path), 0, ranks)

    os.mkfifo(tmp_path / "rank0.json")
    assert "has no recordings; expected a file of each rank" in why(2)
    (tmp_path / "rank0.json").unlink()
    for name, rank in (("vm_10.pt.trace.json", 1), ("vm_11.pt.trace.json.gz", 0)):
        text = trace(comm(2000 + rank), rank=rank, world_size=2).encode()
        (tmp_path / name).write_bytes(gzip.compress(text) if name.endswith("gz") else text)
    (tmp_path / "notes.txt").write_text("ours")
    read_by_each = [replay.read(str(tmp_path), rank, 2) for rank in (0, 1)]
    assert [each.rank for each in read_by_each] == [1, 0]
    assert [each.rank for each in replay.in_order(read_by_each)] == [0, 1]
    assert "of each of 2 ranks, got ranks [1, 1]" in refused(replay.in_order, read_by_each[:1] * 2)
    assert "has recordings of 2 ranks, and this job has 3; e.g. " in why(3)
    (tmp_path / "rank0.json").touch()
    (tmp_path / "rank_0").touch()
    assert "several recordings of rank 0: rank0.json and rank_0;" in why(2)


@pytest.mark.parametrize("recorder", ["nccl2", "legacy", "gloo"])
def test_each_recorder(recorder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of nccl2 is separate from that of legacy NCCL. Gloo's may contain other groups."""

    def dump(name: str = "gloo") -> bytes:
        entries = [entry(process_group=["7", name])] if name in (recorder, "gloo") else []
        return json.dumps({"entries": entries}).encode()

    c10d, patch = torch._C._distributed_c10d, partial(monkeypatch.setattr, raising=False)
    patch(c10d, "_dump_nccl_trace_json", partial(dump, "legacy"))
    patch(c10d, "_dump_fr_trace_json", lambda backend="gloo": dump(backend))
    patch(torch.distributed, "get_rank", lambda: 0)
    patch(torch.distributed, "get_world_size", lambda: 1)
    record_collectives.record(str(tmp_path), 999 * MS, 2)
    recording = replay.read(str(tmp_path), 0, 1)
    assert [call.kind.group for call in recording.calls] == [recorder]


def call(seq: int = 1, size: int = 400, **more: Any) -> Collective:
    """An all-reduce of mesh_dp on ranks 0 and 1."""
    fields: dict[str, Any] = {"op": "all_reduce", "group": "mesh_dp", "ranks": (0, 1)} | more
    ranks, dtype = fields["ranks"], fields.get("dtype", "float32")
    kind = Kind(fields["op"], fields["group"], len(ranks), dtype, size)
    problem, job_s = fields.get("problem", ""), fields.get("job_s", 0.0)
    return Collective(kind, (kind.group, ranks), seq, problem, 0.0, job_s)


OTHER = call(9, group="tp")


@pytest.mark.parametrize(
    ("rows", "kept"),
    [
        ([[call(1), call(2)], [call(2), call(3)]], [[2], [2]]),  # ring buffers start apart
        ([[call(1), call(1, 28)]] * 2, [[1, 1]] * 2),  # coalesced calls share a number
        ([[call(1), call(1), call(2)], [call(1), call(2)]], [[2], [2]]),
        ([[call(1, 20), call(9)], [call(1, 24), call(9)]], [[9], [9]]),
        ([[call(1), call(9)], [call(1, problem="parts differ"), call(9)]], [[9], [9]]),
        # two groups with the same name
        ([[call(ranks=(0, 2))], [call(ranks=(1, 3))]] * 2, [[1]] * 4),
        # a different order would hang; other groups are not affected
        ([[call(1), call(2), OTHER], [call(2), call(1), OTHER]], [[9]] * 2),
        ([[call(ranks=(1,))], [call(ranks=(1,))]], [[], []]),
    ],
)
def test_only_calls_recorded_on_all_ranks_are_replayed(rows: Any, kept: Any) -> None:
    plan = replay.choose([Recording(1, 0.010, row) for row in rows])
    assert [[each.seq for each in row] for row in plan.calls] == kept


def test_replay_of_one_group() -> None:
    row = [call(1), call(2), call(1, group="mesh_tp")]
    plan = replay.choose([Recording(3, 0.03, row), Recording(3, 0.06, row)], ["dp"])
    assert (plan.steps, plan.time_s, plan.calls) == (3, 0.06, [row[:2]] * 2)
    assert plan.lines == ["not replayed: 0 of 4 operations", NO_DURATIONS]


@pytest.mark.parametrize(
    ("calls", "time_s", "text"),
    [
        ([], 0.01, "no operation of the groups mesh_tp can be replayed; not replayed: 0 of 0 ope"),
        ([call()], 1e10, "; record fewer steps, "),
        # both use the same two buffers
        ([call(size=2**40), call(2, 2**40)], 0.01, "the buffers need 2,199,023,255,552 bytes"),
    ],
)
def test_impossible_plans_are_refused(calls: list[Collective], time_s: float, text: str) -> None:
    bench = Mock(args=Mock(timeout=300), report=Mock(environment={}))
    bench.job = Mock(rank=0, device=torch.device("cpu"), local_world_size=1)
    kinds = [each.kind for each in calls]
    plan = replay.Plan(1, time_s, [calls], kinds, ["not replayed: 0 of 0 operations"])
    why = refused(replay.check_plan, plan, [Recording(1, time_s, [call(group="mesh_tp")])], bench)
    assert text in why


def test_over_nccl_the_host_waits_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host waits after it has queued all operations. CUDA events measure the times."""
    cuda, log = MagicMock(), Mock()
    monkeypatch.setattr(torch, "cuda", cuda)
    cuda.Event.return_value.elapsed_time.return_value = 4.0
    calls = [call(1), call(1, group="mesh_tp", ranks=(0, 2)), call(2)]
    starts = {(each.kind, each.team): log.start for each in calls}
    streams = {each.team: MagicMock() for each in calls}
    cuda.current_stream.return_value.synchronize = log.synchronize
    played = replay.play_on_streams(calls, starts, streams)
    assert played == {calls[0].kind: [0.004, 0.004], calls[1].kind: [0.004]}
    assert [name for name, *_ in log.mock_calls] == ["start", "start().wait"] * 3 + ["synchronize"]
    used = [cuda.stream.call_args_list.count(((streams[each.team],),)) for each in calls]
    assert used == [2, 1, 2]


def test_the_table_by_hand() -> None:
    """8 MB on 4 ranks are replayed in 10 ms: algbw is 0.8 GB/s, and busbw 1.5 times as much.

    2 calls of 10 ms and 1 of 20 ms take half of the time each. Rank 1 takes half as long as rank 0.
    In the job, rank 0's calls take 19 and 21 ms, and rank 1's 12 ms longer: it waits for rank 0.
    """
    four: dict[str, Any] = {"group": "dp", "ranks": (0, 1, 2, 3)}
    bigs = [call(seq, 8_000_000, job_s=0.019 + seq % 2 * 0.002, **four) for seq in range(4)]
    small = [call(seq, 4_000_000, op="all_gather", **four) for seq in (4, 5)]
    big, other = bigs[0].kind, small[0].kind
    early = [replace(each, job_s=each.job_s and each.job_s + 0.012) for each in bigs]
    plan = replay.Plan(2, 0.2, [[*bigs, *small], [*early, *small]], [big, other], [])
    samples = {"step": 0.08, "with gaps": 0.2, str(big): 0.005, str(other): 0.010}
    rows = {name: [[s] * 8, [s / 2] * 8] for name, s in samples.items()}
    case = Case(key={}, ranks=[0, 1], samples_s=rows, rounds=[4, 4])
    returned = [[{big: s, other: 2 * s}] * 8 for s in (0.010, 0.005)]
    replay.derive(plan, case, Times(case.samples_s, case.rounds, returned), [None, None])
    m, (row, last) = case.metrics, case.metrics["operations"]
    assert (m["with_gaps_s"].value, m["back_to_back_s"].value) == (0.1, 0.04)
    assert (m["job_step_s"], m["step_bytes"]) == (0.1, 2 * 8_000_000 + 4_000_000)
    expected = {"replayed_s": 0.010, "job_s": 0.032, "replayed_over_alone": 2, "share": 0.5}
    expected |= {"replayed_busbw_gb_per_s": 1.2, "alone_busbw_gb_per_s": 2.4}
    expected |= {"job_busbw_gb_per_s": 0.375}
    assert {name: row[name].value for name in expected} == pytest.approx(expected)
    assert row["job_waits_s"] == pytest.approx(0.012)
    assert (row["calls"], last["calls"]) == (2, 1)
    words = "takes 32.0 ms on the slowest rank, which waits 12.0 ms of it for late ranks"
    assert replay.answers(m)[1:] == [f"in the job, all_reduce of dp, 8,000,000 bytes, {words}"]
    assert "job_s" not in last
