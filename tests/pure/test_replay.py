"""replay.py: what it reads, refuses and plans, and its arithmetic by hand; no process group."""

import json
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest
import torch

from benchmarks import replay
from benchmarks.replay import Collective, Kind, Recording
from common.report import Case
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


def read(folder: Path, *entries: Any, content: Any = None, **more: Any) -> Recording:
    """What is read of rank 0 in a world of two: 2 steps of 10 ms, or other content of the file."""
    times = {"world_size": 2, "steps": 2, "started_ns": 999 * MS, "ended_ns": 1019 * MS}
    recorded = {"entries": list(entries), "groups": {"7": [0, 1]}} | times | more
    (folder / "fr_0.json").write_text(json.dumps(recorded) if content is None else content)
    return replay.read(str(folder), 0, 2)


@pytest.mark.parametrize(
    ("name", "sent", "received", "op", "problem"),
    [
        ("allreduce_coalesced", 6, 6, "all_reduce", ""),
        ("_all_gather_base", 6, 12, "all_gather", ""),
        ("_reduce_scatter_base", 12, 6, "reduce_scatter", ""),
        ("_reduce_oop", 6, 6, "reduce", ""),
        ("barrier", None, None, "barrier", ""),
        ("send 0->1", 6, 6, "send", "this operation is not known"),
        ("all_to_all", 7, 7, "all_to_all", "parts differ in size, and only the sum is recorded"),
    ],
)
def test_an_entry(
    tmp_path: Path, name: str, sent: Any, received: Any, op: str, problem: str
) -> None:
    """NCCL's recorder has the time in the job as well."""
    setup, marker = entry(time_created_ns=998 * MS), entry("coalesced", None, None)
    recording = read(tmp_path, setup, marker, entry(name, sent, received, duration_ms=2.5))
    assert (recording.steps, recording.time_s) == pytest.approx((2, 0.020))
    kind = Kind(op, "mesh_dp", 2, "float32", 4 * max(sent or 0, received or 0))
    (call,) = recording.calls
    assert call == Collective(kind, ("mesh_dp", (0, 1)), 4, problem, 0.0)
    assert (call.begin_s, call.job_s) == pytest.approx((1e-3, 2.5e-3))


@pytest.mark.parametrize("content", ['{"world_size": 2, ', "{}", '{"a":' + "[" * 100_000])
def test_a_file_that_is_no_recording(tmp_path: Path, content: str) -> None:
    with pytest.raises(
        ValueError, match=r"fr_0.json: expected what record\(\) of .*, got \w+Error"
    ):
        read(tmp_path, content=content)
    with pytest.raises(ValueError, match=r"is of 4 ranks, .* has 2; e.g. .*-per-node 4 "):
        read(tmp_path, world_size=4)


@pytest.mark.parametrize("recorder", ["nccl2", "legacy", "gloo"])
def test_every_backend_has_a_recorder_of_its_own(
    recorder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """nccl2's is apart from the older NCCL's. Gloo's may hold other groups'."""

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
    """An all-reduce of mesh_dp of the ranks 0 and 1."""
    fields: dict[str, Any] = {"op": "all_reduce", "group": "mesh_dp", "ranks": (0, 1)} | more
    ranks, dtype = fields["ranks"], fields.get("dtype", "float32")
    kind = Kind(fields["op"], fields["group"], len(ranks), dtype, size)
    problem, job_s = fields.get("problem", ""), fields.get("job_s", 0.0)
    return Collective(kind, (kind.group, ranks), seq, problem, 0.0, job_s)


@pytest.mark.parametrize(
    ("rows", "kept"),
    [
        ([[call(1), call(2)], [call(2), call(3)]], [[2], [2]]),  # ring buffers begin apart
        ([[call(1), call(1, 28)]] * 2, [[1, 1]] * 2),  # coalesced ones share a number
        ([[call(1), call(1), call(2)], [call(1), call(2)]], [[2], [2]]),
        ([[call(1, 20), call(9)], [call(1, 24), call(9)]], [[9], [9]]),
        ([[call(1), call(9)], [call(1, problem="parts differ"), call(9)]], [[9], [9]]),
        # two groups of one name
        ([[call(ranks=(0, 2))], [call(ranks=(1, 3))]] * 2, [[1]] * 4),
    ],
)
def test_what_all_ranks_of_a_group_have(rows: Any, kept: Any) -> None:
    plan = replay.choose([Recording(1, 0.010, row) for row in rows])
    assert [[each.seq for each in row] for row in plan.calls] == kept


def test_only_a_group() -> None:
    """3 and 2 steps."""
    row = [call(1), call(2), call(1, group="mesh_tp")]
    plan = replay.choose([Recording(3, 0.03, row), Recording(2, 0.06, row)], ["dp"])
    assert (plan.steps, plan.time_s, plan.calls) == (3, 0.06, [row[:2]] * 2)
    assert plan.lines == ["not replayed: 0 of 4"]


@pytest.mark.parametrize(
    ("calls", "time_s", "text"),
    [
        ([], 0.01, "nothing is left of the groups mesh_tp; not replayed: 0 of 0"),
        ([call()], 1e10, "the recorded steps took .*, and a replay takes as long; record"),
        # both use the same two buffers
        ([call(size=2**40), call(2, 2**40)], 0.01, "the buffers need 2,199,023,255,552 bytes"),
    ],
)
def test_what_cannot_be_replayed_is_refused(
    calls: list[Collective], time_s: float, text: str
) -> None:
    bench = Mock(args=Mock(timeout=300), report=Mock(environment={}))
    bench.job = Mock(rank=0, device=torch.device("cpu"), local_world_size=1)
    kinds = [each.kind for each in calls]
    plan = replay.Plan(1, time_s, [calls], kinds, ["not replayed: 0 of 0"])
    with pytest.raises(ValueError, match=text):
        replay.check_plan(plan, [Recording(1, time_s, [call(group="mesh_tp")])], bench)


def test_over_nccl_the_host_waits_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """After it has queued all operations; CUDA events take the times."""
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
    assert [cuda.stream.call_args_list.count(((streams[each.team],),)) for each in calls] == [
        2,
        1,
        2,
    ]


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
    assert (row["calls"], last["calls"]) == (2, 1)
    assert "job_s" not in last
