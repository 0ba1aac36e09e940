"""replay.py: what it reads, refuses and plans, and its arithmetic by hand; no process group."""

import gzip
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import replay
from benchmarks.replay import Collective, Kind, Recording
from common.report import Case

MS = 1_000_000  # nanoseconds


def entry(name: str = "all_reduce", sent: Any = 6, received: Any = 6, **more: Any) -> Any:
    """Of the flight recorder, 1 ms after the start."""
    return {
        "profiling_name": f"gloo:{name}",
        "process_group": ["7", "mesh_dp"],
        "collective_seq_id": 4,
        "input_sizes": [[sent]] if sent is not None else [],
        "output_sizes": [[received]] if received is not None else [],
        "input_dtypes": ["Float"] if sent is not None else [],
        "output_dtypes": ["Float"],
        "time_created_ns": 1000 * MS,
        "is_p2p": False,
    } | more


def recording(*entries: Any, **more: Any) -> Any:
    """As record() writes it: 2 ranks, 2 steps of 10 ms."""
    fixed = {"world_size": 2, "steps": 2, "started_ns": 999 * MS, "ended_ns": 1019 * MS}
    return {"entries": list(entries), "groups": {"7": [0, 1]}} | fixed | more


def read(folder: Path, content: Any, name: str = "fr_0.json") -> Recording:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return replay.read(path)


@pytest.mark.parametrize(
    ("name", "sent", "received", "op"),
    [
        ("all_reduce", 6, 6, "all_reduce"),
        ("allreduce_coalesced", 6, 6, "all_reduce"),
        ("_all_gather_base", 6, 12, "all_gather"),
        ("all_gather_single", 6, 12, "all_gather"),
        ("_reduce_scatter_base", 12, 6, "reduce_scatter"),
        ("all_to_all", 6, 6, "all_to_all"),
        ("broadcast", 6, 6, "broadcast"),
        ("barrier", None, None, "barrier"),
    ],
)
def test_an_entry(tmp_path: Path, name: str, sent: Any, received: Any, op: str) -> None:
    setup, marker = entry(time_created_ns=998 * MS), entry("coalesced", None, None)
    found = read(tmp_path, recording(setup, marker, entry(name, sent, received)))
    assert (found.steps, found.time_s) == pytest.approx((2, 0.020))
    (call,) = found.calls
    assert (call.op, call.why_not, call.seq) == (op, "", 4)
    assert call.team == ("mesh_dp", (0, 1))
    assert (call.sent, call.received) == (sent or 0, received or 0)
    assert call.begin_s == pytest.approx(1e-3)
    assert call.kind == Kind(op, "mesh_dp", 2, "float32", 4 * max(sent or 0, received or 0))


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
    (call,) = read(tmp_path, recording(broken)).calls
    assert call.why_not == why


def test_an_nccl_dump(tmp_path: Path) -> None:
    """A pickle without record(): groups are in pg_config, times in duration_ms."""
    config = {"7": {"name": "7", "desc": "mesh_dp", "ranks": "[0, 1, 2, 3]"}}
    timed = entry("all_reduce", duration_ms=2.5) | {"profiling_name": "nccl:all_reduce"}
    dump = pickle.dumps({"entries": [timed], "pg_config": config, "version": "2.10"}, protocol=2)
    (call,) = read(tmp_path, dump, "nccl_trace_rank_0").calls
    assert call.ranks == (0, 1, 2, 3)
    assert call.job_s == pytest.approx(2.5e-3)


def kineto(**more: Any) -> Any:
    """Two steps of 10 ms, in the first an all-gather that took 3 ms; a kernel, and a wait."""
    comms = {
        "External id": 12,
        "Collective name": "_allgather_base",
        "In msg nelems": 8,
        "Out msg nelems": 16,
        "dtype": "BFloat16",
        "Process Group Name": "3",
        "Process Group Description": "mesh_dp",
        "Process Group Ranks": "[0, 1]",
    } | more
    event: dict[str, Any] = {"ph": "X", "cat": "cpu_op", "name": "record_param_comms"}
    kernel = event | {"cat": "kernel", "name": "nccl", "dur": 3000.0}
    step = {"ph": "X", "cat": "user_annotation", "dur": 10_000.0}
    return {
        "distributedInfo": {"rank": 0, "world_size": 2, "pg_config": [{"pg_name": "3"}]},
        "traceEvents": [
            event | {"ts": 5002_000.0, "dur": 90.0, "args": comms},
            event | {"ts": 5003_000.0, "dur": 1.0, "args": comms | {"Collective name": "wait"}},
            event | {"ts": 4000_000.0, "dur": 1.0, "args": comms},  # before the first step
            kernel | {"ts": 5002_500.0, "args": comms},
            step | {"name": "ProfilerStep#1", "ts": 5000_000.0},
            step | {"name": "ProfilerStep#2", "ts": 5010_000.0},
            {"ph": "M", "name": "process_name"},
        ],
    }


def test_a_kineto_trace(tmp_path: Path) -> None:
    found = read(tmp_path, gzip.compress(json.dumps(kineto()).encode()), "rank0.json.gz")
    assert (found.steps, found.time_s) == pytest.approx((2, 0.020))
    (call,) = found.calls
    assert (call.op, call.team) == ("all_gather", ("mesh_dp", (0, 1)))
    assert (call.sent, call.received, call.kind.size_bytes) == (8, 16, 32)
    assert (call.begin_s, call.job_s) == pytest.approx((2e-3, 3e-3))
    assert not call.blocking


def test_a_kineto_trace_with_many_ranks_cut_short(tmp_path: Path) -> None:
    content = kineto(**{"Process Group Ranks": "[0, 1, ..., 31]", "Is asynchronized op": False})
    content["distributedInfo"]["pg_config"] = [{"pg_name": "3", "ranks": [0, 1]}]
    (call,) = read(tmp_path, content, "rank0.json").calls
    assert call.ranks == (0, 1)
    assert call.blocking


class Evil:
    def __reduce__(self) -> Any:
        return print, ("code of a recording runs",)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (json.dumps(recording(entry())).encode()[:200], "JSONDecodeError: "),
        (pickle.dumps({"entries": Evil()}), "it asks for the class builtins.print"),
        (pickle.dumps({"entries": []})[:-4], "expected a rank's recording"),
        (b"", "EOFError"),
        (b"{}", "KeyError: 'pg_config'"),
        (recording(entry(sent=-6)), "'-6' where a whole number from 0 on belongs"),
        (recording(entry(sent=2.5)), "'2.5' where a whole number"),
        (recording(entry(), groups={"7": [0, -1]}), "'-1' where a whole number"),
        (recording({"profiling_name": "gloo:all_reduce"}), "KeyError: 'time_created_ns'"),
        (b'{"traceEvents": []}', "KeyError: 'distributedInfo'"),
        (b'{"a":' + b"[" * 100_000, "RecursionError"),
    ],
)
def test_bad_files_are_one_line(
    tmp_path: Path, content: Any, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match="expected a rank's recording") as error:
        read(tmp_path, content)
    assert text in str(error.value)
    assert str(error.value).startswith(str(tmp_path / "fr_0.json"))
    assert "\n" not in str(error.value)
    assert capsys.readouterr().out == ""


def call(seq: int = 1, count: int = 100, **more: Any) -> Collective:
    fields: dict[str, Any] = {"name": "all_reduce", "group": "mesh_dp", "ranks": (0, 1)}
    sizes = {"sent": count, "received": count}
    return Collective(**fields | {"seq": seq, "dtype": "Float"} | sizes | more)


def kept(*rows: list[Collective]) -> list[list[int]]:
    """The sequence numbers of what each rank replays."""
    found, _ = replay.replayable([Recording(1, 0.010, row) for row in rows])
    return [[each.seq for each in recording.calls] for recording in found]


def test_ring_buffers_that_begin_apart() -> None:
    assert kept([call(1), call(2)], [call(2), call(3)]) == [[2], [2]]


def test_coalesced_operations_share_a_number() -> None:
    assert kept([call(1), call(1, 7)], [call(1), call(1, 7)]) == [[1, 1], [1, 1]]
    assert kept([call(1), call(1), call(2)], [call(1), call(2)]) == [[2], [2]]


def test_ranks_that_disagree() -> None:
    """On a size, on a dtype, and on one whose parts are even on one rank alone."""
    gather: dict[str, Any] = {"name": "all_gather", "sent": 6}
    same = call(9)
    assert kept([call(1, 5), same], [call(1, 6), same]) == [[9], [9]]
    assert kept([call(1), same], [call(1, dtype="Half"), same]) == [[9], [9]]
    even, odd = call(1, **gather, received=12), call(1, **gather, received=11)
    assert kept([even, same], [odd, same]) == [[9], [9]]


def test_groups_of_one_name() -> None:
    """Disjoint groups may have the same name: their ranks tell them apart."""
    even, odd = [call(ranks=(0, 2))], [call(ranks=(1, 3))]
    assert kept(even, odd, even, odd) == [[1]] * 4


@pytest.mark.parametrize("only", [(), ("dp",), ("mesh_dp", "mesh_tp")])
def test_what_is_left(only: tuple[str, ...]) -> None:
    """4 all-reduces, one of tp and an unknown one, on each of 2 ranks; 3 and 2 steps."""
    row = [call(1), call(2), call(3), call(4), call(1, group="mesh_tp")]
    odd = call(2, group="mesh_tp", name="what")
    recordings = [Recording(3, 0.03, [*row, odd]), Recording(2, 0.06, [*row, odd])]
    found, lines = replay.replayable(recordings, only)
    tp = only != ("dp",)
    assert found == [Recording(3, 0.06, row if tp else row[:4])] * 2
    what = ["# 2 x what of mesh_tp: this operation is not known"]
    assert lines == ([*what, "# not replayed: 2 of 12"] if tp else ["# not replayed: 0 of 8"])


def test_nothing_is_left() -> None:
    recordings = [Recording(1, 0.01, [call(), call(group="mesh_tp")])] * 2
    with pytest.raises(ValueError, match="nothing is left to replay of the groups mesh_dp, mesh_"):
        replay.replayable(recordings, ["pp"])


def test_scaled_sizes_have_no_time_of_the_job() -> None:
    """Each part is rounded up: 6 elements, of which 2 ranks bring 3 each, become 1 each."""
    parts: dict[str, Any] = {"name": "all_to_all", "sent": 6, "received": 6}
    row = [call(count=3, job_s=1.0), call(2, **parts), call(3, count=0, name="barrier")]
    found, _ = replay.replayable([Recording(1, 0.01, row)] * 2, scale=0.1)
    assert [(each.sent, each.received) for each in found[0].calls] == [(1, 1), (2, 2), (0, 0)]
    assert found[0].calls[0].job_s == 0


@pytest.mark.parametrize(
    ("name", "ranks", "factor"),
    [
        *(("all_reduce", 4, 1.5), ("all_gather", 4, 0.75), ("reduce_scatter", 8, 0.875)),
        *(("all_to_all", 2, 0.5), ("broadcast", 8, 1), ("reduce", 8, 1), ("barrier", 4, 0)),
    ],
)
def test_bus_factor(name: str, ranks: int, factor: float) -> None:
    assert replay.OPERATIONS[name][2](ranks) == pytest.approx(factor)


def test_the_table_by_hand() -> None:
    """8 MB among 4 ranks: replayed in 10 ms, which is 0.8 GB/s, times 1.5 on the bus.

    2 calls of 10 ms and 1 of 20 ms share the time half and half. The first two replays are a
    warm-up; rank 1 takes half of rank 0's time.
    """
    four: dict[str, Any] = {"group": "dp", "ranks": (0, 1, 2, 3)}
    bigs = [call(seq, 2_000_000, job_s=0.019 + seq % 2 * 0.002, **four) for seq in range(4)]
    small = [call(seq, name="all_gather", sent=250_000, received=10**6, **four) for seq in (4, 5)]
    found = [Recording(2, 0.2, [*bigs, *small])] * 2
    big, other = bigs[0].kind, small[0].kind
    samples = {"with gaps": 0.2, "back to back": 0.08, str(big): 0.005, str(other): 0.010}
    rows = {name: [[s] * 8, [s / 2] * 8] for name, s in samples.items()}
    case = Case({}, [0, 1], rows, [4, 4])
    seconds = np.array([[9.0] * 6] * 2 + [[0.009, 0.011, 0.010, 0.010, 0.020, 0.020]] * 8)
    replay.derive(found, [big, other], case, [seconds, seconds / 2])
    m, (row, last) = case.metrics, case.metrics["operations"]
    assert (m["with_gaps_p50_s"], m["back_to_back_p50_s"]) == (0.1, 0.04)
    assert (m["job_step_s"], m["step_bytes"]) == (0.1, 2 * 8_000_000 + 4_000_000)
    assert (row["calls"], last["calls"]) == (2, 1)
    assert row["replayed_p50_s"] == pytest.approx(0.010)
    assert row["job_p50_s"] == pytest.approx(0.020)
    assert row["replayed_busbw_gb_per_s"] == pytest.approx(1.2)
    assert row["alone_busbw_gb_per_s"] == pytest.approx(2.4)
    assert row["job_busbw_gb_per_s"] == pytest.approx(0.6)
    assert row["replayed_over_alone"] == pytest.approx(2)
    assert (row["share"], last["share"]) == pytest.approx((0.5, 0.5))
    assert "job_p50_s" not in last
