"""replay.py: what it reads, refuses and plans, and its arithmetic by hand; no process group."""

import gzip
import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from benchmarks import replay
from benchmarks.replay import Kind, Op, Recording
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
    ("name", "sent", "received", "op", "count"),
    [
        ("all_reduce", 6, 6, "all_reduce", 6),
        ("allreduce_coalesced", 6, 6, "all_reduce", 6),
        ("_all_gather_base", 6, 12, "all_gather", 6),
        ("all_gather_single", 6, 12, "all_gather", 6),
        ("_reduce_scatter_base", 12, 6, "reduce_scatter", 6),
        ("reduce_scatter_single", 12, 6, "reduce_scatter", 6),
        ("all_to_all", 6, 6, "all_to_all", 3),
        ("broadcast", 6, 6, "broadcast", 6),
        ("barrier", None, None, "barrier", 0),
    ],
)
def test_an_entry(tmp_path: Path, name: str, sent: Any, received: Any, op: str, count: int) -> None:
    (found,) = read(tmp_path, recording(entry(name, sent, received))).ops
    assert (found.name, found.count, found.why) == (op, count, "")
    assert (found.group, found.ranks, found.seq) == ("mesh_dp", (0, 1), 4)
    assert found.dtype == "float32"
    assert found.begin_s == pytest.approx(1e-3)
    assert found.elements() == (sent or 0, received or 0)
    assert found.kind == Kind(op, "mesh_dp", 2, "float32", 4 * max(sent or 0, received or 0))


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        (entry("sparse_all_reduce"), "this operation is not known"),
        (entry("send 0->1"), "this operation is not known"),
        (entry(input_dtypes=["ComplexFloat"]), "this dtype is not known"),
        (entry("_all_gather_base", 6, 11), "parts differ in size, and only the sum is recorded"),
        (entry("all_to_all", 6, 8), "parts differ in size, and only the sum is recorded"),
        (entry(process_group=["9", "other"]), "the ranks of its group are not recorded"),
    ],
)
def test_what_cannot_be_replayed_says_why(tmp_path: Path, broken: Any, why: str) -> None:
    (op,) = read(tmp_path, recording(broken)).ops
    assert op.why == why


def test_setup_and_markers_are_no_operations(tmp_path: Path) -> None:
    setup, marker = entry(time_created_ns=998 * MS), entry("coalesced", None, None)
    found = read(tmp_path, recording(setup, marker, entry()))
    assert len(found.ops) == 1
    assert (found.world_size, found.steps, found.time_s) == pytest.approx((2, 2, 0.020))


def test_an_nccl_dump(tmp_path: Path) -> None:
    """A pickle without record(): groups are in pg_config, times in duration_ms."""
    config = {"7": {"name": "7", "desc": "mesh_dp", "ranks": "[0, 1, 2, 3]"}}
    timed = entry("all_reduce", duration_ms=2.5) | {"profiling_name": "nccl:all_reduce"}
    dump = pickle.dumps({"entries": [timed], "pg_config": config, "version": "2.10"}, protocol=2)
    found = read(tmp_path, dump, "nccl_trace_rank_0")
    assert found.world_size == 4
    assert found.ops[0].ranks == (0, 1, 2, 3)
    assert found.ops[0].job_s == pytest.approx(2.5e-3)


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
    return {
        "distributedInfo": {"rank": 0, "world_size": 2, "pg_config": [{"pg_name": "3"}]},
        "traceEvents": [
            event | {"ts": 5002_000.0, "dur": 90.0, "args": comms},
            event | {"ts": 5003_000.0, "dur": 1.0, "args": comms | {"Collective name": "wait"}},
            event | {"ts": 4000_000.0, "dur": 1.0, "args": comms},  # before the first step
            event
            | {"ts": 5002_500.0, "dur": 3000.0, "cat": "kernel", "name": "nccl", "args": comms},
            {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#1", "ts": 5000_000.0}
            | {"dur": 10_000.0},
            {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#2", "ts": 5010_000.0}
            | {"dur": 10_000.0},
            {"ph": "M", "name": "process_name"},
        ],
    }


@pytest.mark.parametrize("compressed", [False, True])
def test_a_kineto_trace(tmp_path: Path, compressed: bool) -> None:
    data = json.dumps(kineto()).encode()
    name = "rank0.json.gz" if compressed else "rank0.pt.trace.json"
    found = read(tmp_path, gzip.compress(data) if compressed else data, name)
    (op,) = found.ops
    assert (op.name, op.group, op.ranks, op.count) == ("all_gather", "mesh_dp", (0, 1), 8)
    assert op.kind.size_bytes == 32
    assert (op.begin_s, op.job_s) == pytest.approx((2e-3, 3e-3))
    assert not op.blocking
    assert (found.world_size, found.steps, found.time_s) == pytest.approx((2, 2, 0.020))


def test_a_kineto_trace_with_many_ranks_cut_short(tmp_path: Path) -> None:
    content = kineto(**{"Process Group Ranks": "[0, 1, ..., 31]", "Is asynchronized op": False})
    content["distributedInfo"]["pg_config"] = [{"pg_name": "3", "ranks": [0, 1]}]
    (op,) = read(tmp_path, content, "rank0.json").ops
    assert op.ranks == (0, 1)
    assert op.blocking


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
        (recording(entry(sent=True)), "'True' where a whole number"),
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


def op(seq: int = 1, count: int = 100, **more: Any) -> Op:
    fields: dict[str, Any] = {"name": "all_reduce", "group": "mesh_dp", "ranks": (0, 1)}
    return Op(**fields | {"seq": seq, "count": count, "dtype": "float32", "begin_s": 0.0} | more)


def reasons(*rows: list[Op]) -> list[list[str]]:
    return [[each.why for each in ops] for ops in replay.match(rows)]


def test_ring_buffers_that_begin_apart() -> None:
    lacks = "not recorded on every rank of its group"
    assert reasons([op(1), op(2)], [op(2), op(3)]) == [[lacks, ""], ["", lacks]]


def test_coalesced_operations_share_a_number() -> None:
    assert reasons([op(1), op(1, 7)], [op(1), op(1, 7)]) == [["", ""], ["", ""]]
    assert reasons([op(1), op(1)], [op(1)])[0] == ["", "not recorded on every rank of its group"]


def test_ranks_that_disagree() -> None:
    differ = "its ranks recorded different calls"
    assert reasons([op(1, 5)], [op(1, 6)]) == [[differ], [differ]]
    assert reasons([op(1)], [op(1, dtype="float16")]) == [[differ], [differ]]


def test_a_reason_holds_for_the_whole_group() -> None:
    assert reasons([op(1, why="odd")], [op(1)]) == [["odd"], ["odd"]]


def test_groups_of_one_name() -> None:
    """Disjoint groups may have the same name: their ranks tell them apart."""
    rows = [[op(ranks=(0, 2))], [op(ranks=(1, 3))], [op(ranks=(0, 2))], [op(ranks=(1, 3))]]
    assert reasons(*rows) == [[""]] * 4


def two_ranks(*ops: Op) -> list[Recording]:
    return [Recording(2, 2, 0.020, list(ops))] * 2


def test_the_plan() -> None:
    """4 all-reduces of 400 bytes, one of tp, and an unknown one, on each of 2 ranks."""
    ops = [op(seq) for seq in (1, 2, 3, 4)]
    tp, odd = op(1, group="mesh_tp"), op(2, group="mesh_tp", name="what", why="odd")
    plan, rows = replay.make_plan(two_ranks(*ops, tp, odd))
    kind = Kind("all_reduce", "mesh_dp", 2, "float32", 400)
    assert plan.kinds == [kind, kind._replace(group="mesh_tp")]
    assert plan.steps == 2
    assert plan.step_s == pytest.approx(0.010)
    assert plan.groups == [("mesh_dp", (0, 1)), ("mesh_tp", (0, 1))]
    assert plan.lines == ["# 2 x what of mesh_tp: odd", "# not replayed: 2 of 12"]
    assert rows == [[*ops, tp]] * 2


@pytest.mark.parametrize("name", ["dp", "mesh_dp"])
def test_only(name: str) -> None:
    recordings = two_ranks(op(), op(group="mesh_tp"))
    plan, _ = replay.make_plan(recordings, [name])
    assert {kind.group for kind in plan.kinds} == {"mesh_dp"}
    assert plan.lines == ["# not replayed: 0 of 2"]
    with pytest.raises(ValueError, match="--only: expected some of mesh_dp, mesh_tp, got pp"):
        replay.make_plan(recordings, ["pp"])


def test_scaled_sizes_have_no_time_of_the_job() -> None:
    recordings = two_ranks(op(count=3, job_s=1.0), op(2, count=0, name="barrier"))
    _, rows = replay.make_plan(recordings, scale=0.1)
    assert [(each.count, each.job_s) for each in rows[0]] == [(1, None), (0, None)]


def test_buffers_are_bounded() -> None:
    """400 bytes in and out take 832. Many share 256 MiB; one of 1 TB cannot."""
    assert replay.arena_bytes([op()]) == 832
    assert replay.arena_bytes([op(count=2**20)] * 1000) == 2**28
    assert replay.arena_bytes([op(count=2**38)]) == 2**41
    assert replay.arena_bytes([]) == 0


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

    2 calls of 10 ms and 1 of 20 ms share the time half and half.
    """
    big = Kind("all_reduce", "dp", 4, "float32", 8_000_000)
    small = Kind("all_gather", "dp", 4, "float32", 4_000_000)
    plan = replay.Plan(2, 0.1, [], [big, small], [], "")
    samples = {"with gaps": 0.2, "back to back": 0.08, str(big): 0.005, str(small): 0.010}
    case = Case({}, [0, 1], {name: [[s] * 8, [s / 2] * 8] for name, s in samples.items()})
    kinds = {
        big: {"calls": 2.0, "job": [0.019, 0.021], "times": [0.010] * 12},
        small: {"calls": 1.0, "job": [None], "times": [0.020] * 12},
    }
    replay.derive(plan, case, [{"kinds": kinds, "unseen": ""}] * 2)
    m, (row, other) = case.metrics, case.metrics["operations"]
    assert (m["with_gaps_p50_s"], m["back_to_back_p50_s"]) == (0.1, 0.04)
    assert m["step_bytes"] == 20_000_000
    assert (row["replayed_p50_s"], row["alone_p50_s"]) == (0.010, 0.005)
    assert row["job_p50_s"] == pytest.approx(0.020)
    assert row["replayed_busbw_gb_per_s"] == pytest.approx(1.2)
    assert row["alone_busbw_gb_per_s"] == pytest.approx(2.4)
    assert row["job_busbw_gb_per_s"] == pytest.approx(0.6)
    assert row["replayed_over_alone"] == 2
    assert (row["share"], other["share"]) == (0.5, 0.5)
    assert "job_p50_s" not in other
    assert case.check == "passed"
    replay.derive(plan, case, [{"kinds": kinds, "unseen": text} for text in ("", "1 x it")])
    assert case.check == "failed: the flight recorder of rank 1 lacks 1 x it"
