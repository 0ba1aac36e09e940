"""analysis/hang.py: which rank is missing, from lines of the forms that torch prints.

The forms are those of torch 2.6, 2.8 and 2.14; the contents are made up.
"""

import itertools
import json
import os
import pickle
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from analysis.hang import conclude
from analysis.logs.watchdog import Evidence
from tests.pure.reports import run

FORMS = {  # prefixes of the group, and the line that follows a timeout
    "2.6": (
        "[Rank {r}]",
        "[PG ID {id} PG GUID {g} Rank {r}] Exception (either an error or timeout) detected "
        "by watchdog at work: {seq}, last enqueued NCCL work: {enq}, last completed NCCL "
        "work: {done}.",
    ),
    "2.8": (
        "[Rank {r}]",
        "[PG ID {id} PG GUID {g} Rank {r}]  failure detected by watchdog at work sequence id: "
        "{seq} PG status: last enqueued work: {enq}, last completed work: {done}",
    ),
    "2.14": (
        "[PG GUID {g} Rank {r}]",
        "[PG ID {id} PG GUID {g} Rank {r}]  failure detected by watchdog at work sequence id: "
        "{seq} PG status: last enqueued work: {enq}, last started work: -1 (), last "
        "completed work: {done}",
    ),
}
SIGNAL = (
    "[rank{r}]:[E615 03:14:15.926535897 ProcessGroupNCCL.cpp:1982] [PG ID 0 PG GUID "
    "0(default_pg) Rank {r}] Received a dump signal due to a collective timeout from  rank "
    "{other} and we will try our best to dump the debug info. Last enqueued NCCL work: {enq}, "
    "last completed NCCL work: {done}.This is most likely caused by incorrect usages of collectives"
)


def timeout(
    rank: int, seq: int, op: str = "ALLREDUCE", numel: int = 65536, *, form: str = "2.14",
    group: str = "0(default_pg)", in_group: int | None = None, ahead: int = 0,
) -> list[str]:  # fmt: skip
    """The two lines of a rank whose collective timed out."""
    first, second = FORMS[form]
    here = {"r": rank if in_group is None else in_group, "g": group, "id": 3, "seq": seq}
    here |= {"enq": seq + ahead, "done": seq - 1}
    begin = f"[rank{rank}]:[E615 03:14:15.926535897 ProcessGroupNCCL.cpp:741] "
    work = f"WorkNCCL(SeqNum={seq}, OpType={op}, NumelIn={numel}, NumelOut={numel}, Timeout(ms)=60)"
    what = f" Watchdog caught collective operation timeout: {work} ran for 61 milliseconds"
    return [begin + first.format(**here) + what, begin + second.format(**here)]


def signal(rank: int, enqueued: int) -> str:
    return SIGNAL.format(r=rank, other=0, enq=enqueued, done=enqueued)


def told(lines: Iterable[str], world_size: int | None = None) -> tuple[tuple[int, ...], str]:
    evidence = Evidence()
    evidence.add_lines(lines)
    finding = conclude(evidence, world_size)
    return (finding.ranks, finding.sentence) if finding else ((), "")


def of_all(ranks: Iterable[int], seq: int, **options: Any) -> list[str]:
    return [line for rank in ranks for line in timeout(rank, seq, **options)]


def verdict(folder: Path, logs: Mapping[str, list[str] | bytes], *flags: str) -> tuple[int, str]:
    """The exit status and output of hang.py for these files, in this order."""
    for name, log in logs.items():
        text = log if isinstance(log, bytes) else "\n".join([*log, ""]).encode()
        (folder / name).write_bytes(text)
    done = run("hang.py", *(str(folder / name) for name in logs), *flags)
    assert done.stderr == ""
    return done.returncode, done.stdout


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "prefix", ["", "7: ", "[default5]:", "2026-01-02T03:04:05 node7 ", "\x1b[31m"]
)
def test_a_rank_that_did_not_start_a_collective(form: str, prefix: str) -> None:
    others = [rank for rank in range(8) if rank != 5]
    lines = [*of_all(others, 1423, form=form, ahead=2), signal(5, 1422)]
    ranks, sentence = told(prefix + line for line in lines)
    assert ranks == (5,)
    assert "rank 5 did not start all_reduce 1,423 of group 0 (65,536 elements)" in sentence
    assert "in which ranks 0, 1, 2, 3, 4, 6, 7 wait" in sentence
    assert "its last completed collective is 1,422" in sentence


def test_a_rank_without_lines() -> None:
    """The log may have been cut off before its lines: rank 2 is named if the number of ranks is
    given, or if torchrun's summary shows that the log is complete."""
    lines = of_all([0, 1, 3], 12)
    ranks, sentence = told(lines)
    assert ranks == ()
    assert "rank 2 reported nothing about" in sentence
    assert sentence.endswith("give those of all nodes, and --world-size N")
    assert told(lines, world_size=4)[0] == (2,)
    assert told([*lines, *summary((0, -6), (1, -6), (2, -9), (3, -6))])[0] == (2,)
    assert told(of_all([0, 1, 2], 12))[0] == ()  # a rank 3 may or may not exist
    assert told(of_all([0, 1, 2], 12), world_size=4)[0] == (3,)
    # the log of the second of two nodes says nothing about the first one
    assert told(of_all(range(8, 16), 12))[0] == ()
    # the second line of a rank that waits, with the last enqueued work, was cut off
    assert told(timeout(1, 12)[:1])[0] == ()
    healthy = timeout(1, 12)[1] + " timeout, WorkNCCL(SeqNum=12, OpType=ALLREDUCE, NumelIn=1)"
    assert told([healthy]) == ((), "")


@pytest.mark.parametrize("end", [1.0, 0.995, 0.7, 0.4])
def test_a_log_that_is_cut_off_names_no_rank(end: float, tmp_path: Path) -> None:
    """Rank 7 is stopped, and rank 4 prints last: without its lines, it must not be named."""
    text = "\n".join([*of_all([0, 1, 2, 3, 5, 6, 4], 12), ""]).encode()
    logs = {"job.log": text[: int(end * len(text))]}
    if end == 1:
        status, out = verdict(tmp_path, logs, "--world-size", "8")
        assert (status, out.partition(" reported")[0]) == (1, "rank 7")
    for flags in [[]] if end == 1 else [[], ["--world-size", "8"]]:
        status, out = verdict(tmp_path, logs, *flags)
        assert (status, out.partition(":")[0]) == (4, "cannot tell which rank")
        assert ("job.log is incomplete; give the whole logs" in out) == (end < 1)


def test_each_rank_has_a_log(tmp_path: Path) -> None:
    """Rank 1 is stopped; its log has the steps until then."""
    logs = {f"rank{r}.log": ["step 12", *(timeout(r, 12) if r != 1 else [])] for r in range(3)}
    for status in (1, 4):
        found, out = verdict(tmp_path, logs)
        assert found == status
        assert "rank 1 reported nothing about all_reduce 12" in out
        logs.pop("rank1.log", None)


def test_the_log_of_one_node_is_cut_off(tmp_path: Path) -> None:
    """Rank 1 is stopped. The second node's log lacks the lines of rank 5 and the summary. The first
    node's summary may tell that torchrun killed rank 1."""
    first = of_all([0, 2, 3], 12)
    killed = summary((0, -6), (1, -9), (2, -6), (3, -6))
    second = [*of_all([4, 6, 7], 12), *timeout(5, 12)]
    both = [*second, *summary((4, -6), (5, -6), (6, -6), (7, -6))]
    for end, other, words in (
        (summary((0, -6), (2, -6), (3, -6)), second[:6], "cannot tell which rank: "),
        (killed, second[:6], "rank 1 on node1 ended by signal 9; ranks 1, 5 reported"),
        (killed, both, "rank 1 reported nothing about all_reduce 12"),
    ):
        status, out = verdict(tmp_path, {"a.log": [*first, *end], "b.log": other})
        assert out.startswith(words)
        assert status == (4 if words.startswith("cannot") else 1)


AGENT = (
    "E1129 08:14:35.136000 17 torch/distributed/elastic/multiprocessing/api.py:984] failed "
    "(exitcode: -6) local_rank: 0 (pid: 4711) of binary: /usr/bin/python3"
)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("seq", "ahead", "between"),
    [(40, 0, []), (200, 0, []), (104, 0, []), (102, 4, [AGENT]), (102, 0, [AGENT])],
)
def test_the_newest_attempt_counts(form: str, seq: int, ahead: int, between: list[str]) -> None:
    """The job was restarted and counts from 1 again: it gets less far, or farther, than before.
    The agent's line separates attempts if the collective had been enqueued in the first one."""
    first = [*of_all([0, 1, 3], 100, form=form, ahead=ahead), signal(2, 99), *between]
    second = [*of_all([0, 2, 3], seq, form=form), signal(1, seq - 1)]
    for lines in ([*first, *second], [f"{n}: {line}" for line in [*first, *second] for n in "0"]):
        ranks, sentence = told(lines)
        assert ranks == (1,)
        assert f"ranks 0, 2, 3 wait; its last completed collective is {seq - 1}" in sentence


def test_calls_of_one_attempt_that_time_out_one_after_the_other() -> None:
    """Collectives 12 and 13 were enqueued when 12 timed out: rank 2 did not start 12."""
    first = of_all([0, 1], 12, ahead=1)
    assert told([*first, *of_all([0, 1], 13), signal(2, 11)])[0] == (2,)


def test_the_newest_attempt_in_the_logs_of_two_nodes(tmp_path: Path) -> None:
    """Rank 1 hung in the first attempt, rank 3 in the second one. In the log of the second node,
    rank 2 waits first in collective 9, then in 50."""
    one = [*timeout(0, 9), signal(1, 8), *of_all([0, 1], 50)]
    two = [*of_all([2, 3], 9), *timeout(2, 50), signal(3, 49)]
    tasks = [*(f"0: {line}" for line in one), *(f"1: {line}" for line in two)]
    for logs in ({"1": one, "2": two}, {"2": two, "1": one}, {"srun": tasks}):
        status, out = verdict(tmp_path, logs)
        assert status == 1
        assert out.startswith("rank 3 did not start all_reduce 50 of group 0")


def test_calls_that_differ() -> None:
    """The minority is named, with both calls. The size counts only where ranks must agree on it."""
    ranks, sentence = told([*of_all([0, 2, 3], 9), *timeout(1, 9, "BROADCAST")])
    assert ranks == (1,)
    assert "rank 1: broadcast of 65,536 elements; ranks 0, 2, 3: all_reduce" in sentence
    assert told([*of_all([0, 1, 3], 9), *timeout(2, 9, numel=7)])[0] == (2,)
    assert told([*timeout(0, 9), *timeout(1, 9, numel=7)])[0] == (0, 1)  # a tie names both
    uneven = [line for rank in range(3) for line in timeout(rank, 9, "ALLTOALL_BASE", 10 * rank)]
    assert told([*uneven, signal(3, 8)])[0] == (3,)
    dtypes = ("Float", "Float", "Double")
    ranks, sentence = told(mismatch(r, 0, "ALLREDUCE", dtype=d) for r, d in enumerate(dtypes))
    assert ranks == (2,)
    assert "rank 2: all_reduce 7 of shape [10, 3], Double; ranks 0, 1: " in sentence
    # either rank 0 called one collective too many, or the others are stuck: no rank is named
    ranks, sentence = told([*timeout(0, 11), *(signal(rank, 10) for rank in range(1, 8))])
    assert ranks == ()
    assert "cannot tell" in sentence


def test_ranks_that_wait_in_another_group_are_not_the_cause() -> None:
    """Rank 0 waits for rank 1 in a group of two; so ranks 0 and 1 did not start the collective in
    which ranks 2 and 3 wait. The numbers of ranks within a group differ from the global ones."""
    inner = timeout(4, 3, "_ALLGATHER_BASE", group="17(mesh_tp)", in_group=0)
    behind = [signal(4, 8), signal(5, 8)]
    lines = [*of_all([0, 1, 2, 3], 9), *inner, *behind]
    assert told(lines)[0] == (5,)
    # without a prefix, the ranks of a group other than the default one are unknown
    bare = [line.partition("]:")[2] for line in inner]
    assert told(bare)[0] == ()


def mismatch(
    a: int, b: int, op_a: str, op_b: str = "ALLREDUCE", at: int | None = None, dtype: str = "Float"
) -> str:
    """The line of TORCH_DISTRIBUTED_DEBUG=DETAIL. at: the global number of rank `a`."""
    return (
        f"[rank{a if at is None else at}]: RuntimeError: Detected mismatch between collectives on "
        f"ranks. Rank {a} is running collective: CollectiveFingerPrint(SequenceNumber=7, "
        f"OpType={op_a}, TensorShape=[10, 3], TensorDtypes={dtype}, TensorDeviceTypes="
        f"TensorOptions(dtype=float (default), device=cpu)), but Rank {b} is running collective: "
        f"CollectiveFingerPrint(SequenceNumber=7, OpType={op_b}, TensorShape=[10, 3]).Collectives "
        "differ in the following aspects: \t Op type"
    )


def summary(first: tuple[int, int], *others: tuple[int, int]) -> list[str]:
    """torchrun's summary. Each rank is given with its exit code."""

    def block(number: int, rank: int, status: int) -> list[str]:
        return [
            f"[{number}]:",
            "  time      : 2026-03-04_05:06:07",
            f"  host      : node{rank}",
            f"  rank      : {rank} (local_rank: 0)",
            f"  exitcode  : {status} (pid: 4711) ",
        ]

    later = itertools.chain(*(block(n + 1, *other) for n, other in enumerate(others)))
    return ["Failures:", *later, "Root Cause (first observed failure):", *block(0, *first)]


TIMED_OUT = "Timed out waiting 8000ms for recv operation to complete"
LOST = "RuntimeError: [gloo/transport/tcp/pair.cc:561] Connection closed by peer [127.0.0.1]:6178"
MONITORED = "[rank{0}]:[E1 ProcessGroupGloo.cpp:68] [Rank {0}]: "


def test_other_messages() -> None:
    for lines, ranks, words in (
        (
            [mismatch(1, 0, "BROADCAST", "ALLREDUCE"), mismatch(2, 1, "ALLREDUCE", "BROADCAST")],
            (1,),
            "rank 1: broadcast 7 of shape [10, 3]; ranks 0, 2: all_reduce",
        ),
        (
            [
                MONITORED.format(0) + "Ranks 1, 3 failed to pass monitoredBarrier in 5000 ms",
                MONITORED.format(2) + "Rank 2 successfully reached monitoredBarrier, but received "
                "errors while waiting for send/recv from rank 0.",
            ],
            (1, 3),
            "did not reach a monitored barrier",
        ),
        (
            [
                "\t - [1] finished collective #5, but didn't join collective #6 (count from 1)",
                "\t - [0, 2] joined but didn't finish collective #6 (count from 1)",
            ],
            (1,),
            "rank 1 did not start a collective 6 of group 0, in which ranks 0, 2 wait",
        ),
        (
            [
                "HANG: no progress for 25 s",
                "  rank 1 on vm, case '1M/2R', step, block 1: does not answer (stopped, dead)",
                "  rank 0 on vm, case '1M/2R', step, block 1: waits",
            ],
            (1,),
            "rank 1 on vm does not answer",
        ),
        (
            [f"[rank0]: {LOST}", *summary((0, 1), (1, -9), (2, -15))],
            (1,),
            "rank 1 on node1 ended by signal 9",
        ),
        (
            [f"[rank{r}]: RuntimeError: [buffer.cc:78] {TIMED_OUT}" for r in (0, 2)]
            + summary((0, 1), (2, 1), (1, -9)),
            (1,),
            "rank 1 reported no timeout, while ranks 0, 2 timed out",
        ),
        (
            [
                *(f"[rank0]: RuntimeError: {TIMED_OUT}", f"[rank1]: {LOST}", "[rank2]: step 12"),
                *summary((0, 1), (1, 1), (2, -9)),
            ],
            (2,),
            "rank 2 reported no timeout, while rank 0 timed out",
        ),
        (
            [f"[rank0]: RuntimeError: {TIMED_OUT}", "[rank2]: step 12"],
            (),
            "ranks 1, 2 reported no timeout, while rank 0 timed out in an operation over gloo, but",
        ),
        (["[rank0]: Connection closed by peer [10.0.0.7]:6178"], (), "10.0.0.7"),
        (["enforce fail: Received data size doesn't match expected size."], (), "DETAIL"),
    ):
        named, sentence = told(lines)
        assert named == ranks
        assert words in sentence


def dump(dumps: Any, config: dict[str, str], *entries: dict[str, Any]) -> bytes:
    groups = {group: {"ranks": ranks} for group, ranks in config.items()}
    return dumps({"pg_config": groups, "entries": entries})  # type: ignore[no-any-return]


def entry(seq: int, state: str, group: str = "0", **more: Any) -> dict[str, Any]:
    """A call in a dump of the flight recorder."""
    made: dict[str, Any] = {
        "process_group": (group, "default_pg" if group == "0" else "mesh_tp"),
        "state": state,
    }
    made |= {"collective_seq_id": seq, "is_p2p": False, "input_sizes": [[10, 3]]}
    return made | {"profiling_name": "nccl:all_reduce"} | more


def as_json(content: object) -> bytes:
    return json.dumps(content).encode()


@pytest.mark.parametrize("dumps", [pickle.dumps, as_json])
def test_dumps_of_the_flight_recorder(dumps: Any, tmp_path: Path) -> None:
    """Rank 1 of 3 waits in a group of ranks 0 and 1, in which rank 0 never called anything."""
    over, gathers = entry(4, "completed"), {"profiling_name": "nccl:_all_gather_base"}
    entries = [[over], [over, entry(1, "scheduled", "7")], [over, entry(5, "scheduled", **gathers)]]
    config = {"0": "[0, 1, 2]", "7": "[0, 1]"}
    logs = {f"trace_rank_{rank}": dump(dumps, config, *rows) for rank, rows in enumerate(entries)}
    assert verdict(tmp_path, logs) == (
        1,
        "rank 0 did not start all_gather_into_tensor 5 of group 0 (30 elements), in which rank 2 "
        "waits; its last completed collective is 4\n",
    )


def test_another_size_in_an_all_reduce(tmp_path: Path) -> None:
    """NCCL does not compare sizes: rank 2 completes its smaller call, and the others wait. The log
    has no size of a completed call, but dumps have."""
    lines = [*of_all([0, 1], 9), signal(2, 9)]
    ranks, sentence = told(lines)
    assert ranks == ()
    assert "rank 2 completed all_reduce 9 of group 0 (65,536 elements), in which ranks" in sentence
    assert "the sizes of their tensors differ, which dumps of the flight recorder show" in sentence
    # it waits in the next one
    assert "rank 2 completed all_reduce 9" in told([*of_all([0, 1], 9), *timeout(2, 10)])[1]
    # a broadcast is over for its source when it has sent
    assert "completed" not in told([*of_all([0, 1], 9, op="BROADCAST"), signal(2, 9)])[1]
    calls = [entry(9, "started", input_sizes=[[65536]])] * 2
    calls.append(entry(9, "completed", input_sizes=[[7]]))
    dumps = [dump(as_json, {"0": "[0, 1, 2]"}, call) for call in calls]
    logs = {f"trace_rank_{rank}": content for rank, content in enumerate(dumps)}
    assert verdict(tmp_path, {"job.log": lines, **logs}) == (
        1,
        "the ranks called different collectives as 9 of group 0: rank 2: all_reduce of 7 elements; "
        "ranks 0, 1: all_reduce of 65,536 elements\n",
    )


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\x80\x02cos\nsystem\n.", "plain data"),
        (b'{"pg_config": ', "line 1"),
        (b'{"entries": [], "rank": "x"}', "without a rank"),
        (None, "regular file"),
    ],
)
def test_files_that_are_refused(content: bytes | None, words: str, tmp_path: Path) -> None:
    path = tmp_path / "dump_rank_0"
    path.write_bytes(content) if content is not None else os.mkfifo(path)
    done = run("hang.py", str(path))
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert str(path) in done.stderr
    assert words in done.stderr


HEALTHY = [
    "[rank3]:[W615 ProcessGroupNCCL.cpp:5023] using GPU 3 as device used by this process",
    "[PG ID 0 PG GUID 0(default_pg) Rank 3] NCCL Work update periodically: last enqueued NCCL "
    "work: 12, last completed NCCL work: 11.",
    "[PG ID 0 PG GUID 0 Rank 3] ProcessGroupNCCL watchdog thread joined.",
    "node1:4711:4711 [0] NCCL INFO Using network Socket",
    "node1:1:2 [0] misc/socket.cc:1 NCCL WARN connect to 10.0.0.7 timed out, retrying (2/34)",
    "node1:1:2 [0] NCCL WARN socket to 10.0.0.7 closed; retry after 100 msec",
    "step 12, loss 3.2, 51 ms; rank 3 waits for data",
    # words of a summary elsewhere
    *("time: 0.54", "  time      : 0.54", "  host: n1", "  rank      : 3", "exitcode: 1"),
]


def test_a_healthy_log_names_no_rank(tmp_path: Path) -> None:
    assert verdict(tmp_path, {"job.log": HEALTHY}) == (0, "no sign of a hang\n")
    for line in HEALTHY:
        assert told([line] * 3) == ((), "")


def test_a_log_that_begins_with_a_brace(tmp_path: Path) -> None:
    """As trainers print their metrics: Python's dicts or JSON."""
    for first, code in (("{'loss': 2.3}", "utf-8"), ('{"loss": 2.3}', "utf-8"), ("", "utf-16")):
        text = "\n".join([first, *of_all([0, 2], 12), signal(1, 11)])
        status, out = verdict(tmp_path, {"rank0.log": text.encode(code)})
        assert status == 1
        assert out.startswith("rank 1 did not start")


def test_two_ranks_in_one_line() -> None:
    """The second prefix counts for what follows it, wherever the first line was cut."""
    lines = of_all([0, 1, 2], 12)
    for cut in (8, 60, len(lines[0])):
        mixed = [lines[0], lines[1][:cut] + lines[2], *lines[3:], signal(3, 11), lines[1]]
        ranks, sentence = told(mixed)
        assert ranks == (3,)
        assert "ranks 0, 1, 2 wait" in sentence


def test_sends_and_receives_are_not_compared() -> None:
    """Their numbers differ between ranks. A rank that waits in one is not the cause elsewhere."""
    for ops in (("SEND", "RECV"), ("COALESCED", "COALESCED"), ("RECV", "RECV")):
        lines = [*timeout(0, 12, ops[0], group="5(pp)"), *timeout(1, 11, ops[1], 7, group="5(pp)")]
        ranks, sentence = told(lines)
        assert ranks == ()
        assert "ranks 0, 1 timed out in a send, a receive" in sentence
        lines += [signal(0, 8), signal(1, 8), signal(2, 8), *of_all(range(3, 8), 9)]
        assert told(lines)[0] == (2,)


def test_ranks_within_a_group_are_not_named_as_global_ranks() -> None:
    """Ranks 4 and 5 are ranks 0 and 1 of their group."""
    first = mismatch(0, 1, "ALLREDUCE", "BROADCAST", at=4)
    second = mismatch(1, 0, "BROADCAST", at=5)
    ranks, sentence = told([first, second])
    assert ranks == (4, 5)
    assert "rank 5: broadcast 7 of shape [10, 3]; rank 4: all_reduce" in sentence
    assert told([second])[0] == ()
    barrier = "[rank4]: RuntimeError: [Rank 0]: Rank 1 failed to pass monitoredBarrier in 9 ms"
    ranks, sentence = told([barrier])
    assert ranks == ()
    assert "global ranks" in sentence


def test_the_summary_of_torchrun() -> None:
    for prefix in ("", "3: ", "2026-03-04T05:06:07.8Z ", "[pod/job-0] "):
        ended = summary((3, 1), (1, 1), (2, -15))
        assert told(prefix + line for line in ended)[0] == (3,)
        # torchrun was killed while it printed: nothing is known about rank 3
        assert told(ended[:3])[0] == ()
        assert told(ended[: ended.index("  rank      : 3 (local_rank: 0)")])[0] == (1,)
        # two nodes: the earlier failure counts, also if their lines take turns
        later = [line.replace("05:06:07", "05:06:08") for line in summary((6, 1), (7, -15))]
        pairs = itertools.zip_longest(later, ended, fillvalue="")
        assert told(line for a, b in pairs for line in ("0: " + a, "1: " + b))[0] == (3,)
        both = told([*ended, *summary((6, 1))])
        assert both[0] == ()
        assert "rank 3 on node3 ended with status 1, rank 6 on node6" in both[1]
