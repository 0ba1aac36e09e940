"""analysis/hang.py: which rank is missing, from lines of the forms of torch 2.6 to 2.14."""

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
from tests.pure.reports import refusal, run

FORMS = {  # prefixes of the group, and the line that follows a timeout
    "2.6": (
        "[Rank {r}]",
        "Exception (either an error or timeout) detected by watchdog at work: {seq}, last enqueued "
        "NCCL work: {enq}, last completed NCCL work: {done}.",
    ),
    "2.8": (
        "[Rank {r}]",
        " failure detected by watchdog at work sequence id: {seq} PG status: last enqueued work: "
        "{enq}, last completed work: {done}",
    ),
    "2.14": (
        "[PG GUID {g} Rank {r}]",
        " failure detected by watchdog at work sequence id: {seq} PG status: last enqueued work: "
        "{enq}, last started work: -1 (), last completed work: {done}",
    ),
}


def waits(
    ranks: Iterable[int | str], seq: int, op: str = "ALLREDUCE", numel: int = 65536, *,
    form: str = "2.14", group: str = "0(default_pg)", in_group: int | None = None, ahead: int = 0,
) -> list[str]:  # fmt: skip
    """The two lines of each rank whose collective timed out."""
    lines = []
    for rank in map(int, ranks):
        first, second = FORMS[form]
        here = {"r": rank if in_group is None else in_group, "g": group, "seq": seq}
        here |= {"enq": seq + ahead, "done": seq - 1}
        begin = f"[rank{rank}]:[E615 03:14:15.926535897 ProcessGroupNCCL.cpp:741] "
        work = f"WorkNCCL(SeqNum={seq}, OpType={op}, NumelIn={numel}, NumelOut={numel}, Timeout("
        what = f" Watchdog caught collective operation timeout: {work}ms)=60) ran for 61 millisec"
        lines.append(begin + first.format(**here) + what)
        lines.append(f"{begin}[PG ID 3 PG GUID {{g}} Rank {{r}}] {second}".format(**here))
    return lines


def signal(rank: int, enqueued: int) -> str:
    return (
        f"[rank{rank}]:[E615 03:14:15.926535897 ProcessGroupNCCL.cpp:1982] [PG ID 0 PG GUID "
        f"0(default_pg) Rank {rank}] Received a dump signal due to a collective timeout from  rank "
        f"0 and we will try our best to dump the debug info. Last enqueued NCCL work: {enqueued}, "
        f"last completed NCCL work: {enqueued}.This is most likely caused by incorrect usages of"
    )


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


def summary(*statuses: tuple[int, int]) -> list[str]:
    """torchrun's summary. Each rank is given with its exit code, the first failure first."""
    blocks = [
        [
            f"[{number}]:",
            "  time      : 2026-03-04_05:06:07",
            f"  host      : node{rank}",
            f"  rank      : {rank} (local_rank: 0)",
            f"  exitcode  : {status} (pid: 4711) ",
        ]
        for number, (rank, status) in enumerate(statuses)
    ]
    others = itertools.chain(*blocks[1:])
    return ["Failures:", *others, "Root Cause (first observed failure):", *blocks[0]]


def told(lines: Iterable[str], world_size: int | None = None) -> tuple[tuple[int, ...], str]:
    evidence = Evidence()
    evidence.add_lines(lines)
    finding = conclude(evidence, world_size)
    return (finding.ranks, finding.sentence) if finding else ((), "")


OF_TWO: Any = {"op": "_ALLGATHER_BASE", "group": "17(mesh_tp)", "in_group": 0}
OTHER_SIZE = [*waits("01", 9), signal(2, 9)]
MIXED = waits("012", 12)
BY_DTYPE = [mismatch(r, 0, "ALLREDUCE", dtype=x) for r, x in enumerate(("Float", "Float", "Int"))]
FIRST = summary((3, 1), (1, 1), (2, -15))
MONITORED = "[rank{0}]:[E1 ProcessGroupGloo.cpp:68] [Rank {0}]: "
TIMED_OUT = "[rank{}]: [buffer.cc:78] Timed out waiting 8000ms for recv operation to complete"
LOST = "[rank{}]: [gloo/transport/tcp/pair.cc:561] Connection closed by peer [127.0.0.1]:6178"
TOLD: tuple[tuple[tuple[int, ...], str, list[str]], ...] = (
    # A log may have been cut off before the lines of rank 2; a summary shows that it is complete.
    ((), "cannot tell which rank: rank 2 reported nothing about", waits("013", 12)),
    ((2,), "", [*waits("013", 12), *summary((0, -6), (1, -6), (2, -9), (3, -6))]),
    ((), "cannot tell", waits("012", 12)),  # a rank 3 may or may not exist
    ((), "cannot tell", waits(range(8, 16), 12)),  # of the second of two nodes
    # the second line of a rank that waits, with the last enqueued work, was cut off
    ((), "cannot tell", waits("1", 12)[:1]),
    # collectives 12 and 13 were enqueued when 12 timed out
    ((2,), "", [*waits("01", 12, ahead=1), *waits("01", 13), signal(2, 11)]),
    # Calls differ, and the minority is named. Sizes count only where ranks must agree on them.
    ((1,), "rank 1: broadcast of 65,536 el", [*waits("023", 9), *waits("1", 9, "BROADCAST")]),
    ((2,), "rank 2: all_reduce of 7 elements", [*waits("013", 9), *waits("2", 9, numel=7)]),
    ((0, 1), "", [*waits("0", 9), *waits("1", 9, numel=7)]),  # a tie
    ((3,), "", [*waits("01", 9, "ALLTOALL"), *waits("2", 9, "ALLTOALL", 7), signal(3, 8)]),
    ((2,), "rank 2: all_reduce 7 of shape [10, 3], Int; ranks 0, 1: ", BY_DTYPE),
    (
        (1,),
        "rank 1: broadcast 7 of shape [10, 3]; ranks 0, 2: all_reduce",
        [mismatch(1, 0, "BROADCAST", "ALLREDUCE"), mismatch(2, 1, "ALLREDUCE", "BROADCAST")],
    ),
    # either rank 0 called one collective too many, or the others are stuck
    ((), "cannot tell", [*waits("0", 11), *(signal(rank, 10) for rank in range(1, 8))]),
    # Rank 4 waits for rank 5 in a group of two, so neither started what ranks 0 to 3 wait in.
    ((5,), "", [*waits("0123", 9), *waits("4", 3, **OF_TWO), signal(4, 8), signal(5, 8)]),
    # the ranks of a group other than the default one are unknown without a prefix
    ((), "global ranks", [line.partition("]:")[2] for line in waits("4", 3, **OF_TWO)]),
    ((), "global ranks", ["[rank4]: [Rank 0]: Rank 1 failed to pass monitoredBarrier in 9 ms"]),
    ((), "cannot tell", [mismatch(1, 0, "BROADCAST", at=5)]),
    (
        (4, 5),
        "rank 5: broadcast 7 of shape [10, 3]; rank 4: all_reduce",
        [mismatch(0, 1, "ALLREDUCE", "BROADCAST", at=4), mismatch(1, 0, "BROADCAST", at=5)],
    ),
    # NCCL does not compare sizes: rank 2 completes its smaller call, or waits in the next one.
    ((), "rank 2 completed all_reduce 9 of group 0 (65,536 elements), in which ranks", OTHER_SIZE),
    ((), "rank 2 completed all_reduce 9", [*waits("01", 9), *waits("2", 10)]),
    # a broadcast is over for its source when it has sent
    ((), "none is behind", [*waits("01", 9, "BROADCAST"), signal(2, 9)]),
    # The second of two ranks in a line counts for what follows, wherever the first was cut.
    *(
        ((3,), "0, 1, 2 wait", [MIXED[0], MIXED[1][:n] + MIXED[2], *MIXED[3:], signal(3, 11)])
        for n in (8, 60, len(MIXED[0]))
    ),
    (
        (1, 3),
        "did not reach a monitored barrier",
        [
            MONITORED.format(0) + "Ranks 1, 3 failed to pass monitoredBarrier in 5000 ms",
            MONITORED.format(2) + "Rank 2 successfully reached monitoredBarrier, but received "
            "errors while waiting for send/recv from rank 0.",
        ],
    ),
    (
        (1,),
        "rank 1 did not start a collective 6 of group 0, in which ranks 0, 2 wait",
        [
            "\t - [1] finished collective #5, but didn't join collective #6 (count from 1)",
            "\t - [0, 2] joined but didn't finish collective #6 (count from 1)",
        ],
    ),
    (
        (1,),
        "rank 1 on vm does not answer",
        [
            "HANG: no progress for 25 s",
            "  rank 1 on vm, case '1M/2R', step, block 1: does not answer (stopped, dead)",
            "  rank 0 on vm, case '1M/2R', step, block 1: waits",
        ],
    ),
    # gloo
    (
        (1,),
        "rank 1 reported no timeout, while ranks 0, 2 timed out",
        [TIMED_OUT.format(0), TIMED_OUT.format(2), *summary((0, 1), (2, 1), (1, -9))],
    ),
    (
        (2,),
        "rank 2 reported no timeout, while rank 0 timed out",
        [TIMED_OUT.format(0), LOST.format(1), "[rank2]: 1", *summary((0, 1), (1, 1), (2, -9))],
    ),
    ((), "ranks 1, 2 reported no timeout", [TIMED_OUT.format(0), "[rank2]: step 12"]),
    ((), "127.0.0.1", [LOST.format(0)]),
    ((), "DETAIL", ["enforce fail: Received data size doesn't match expected size."]),
    # torchrun's summary
    ((1,), "ended by signal 9", [LOST.format(0), *summary((0, 1), (1, -9), (2, -15))]),
    ((), "rank 3 on node3 ended with status 1, rank 6 on node6", [*FIRST, *summary((6, 1))]),
)


def test_the_lines_of_a_log() -> None:
    for ranks, words, lines in TOLD:
        named, sentence = told(lines)
        assert named == ranks, lines
        assert words in sentence
    healthy = waits("1", 12)[1] + " timeout, WorkNCCL(SeqNum=12, OpType=ALLREDUCE, NumelIn=1)"
    assert told([healthy]) == ((), "")
    assert told(waits("013", 12), world_size=4)[0] == (2,)
    assert told(waits("012", 12), world_size=4)[0] == (3,)


def test_sends_and_receives_are_not_compared() -> None:
    """Their numbers differ between ranks. A rank that waits in one is not the cause elsewhere."""
    pp: Any = {"group": "5(pp)"}
    for ops in (("SEND", "RECV"), ("COALESCED", "COALESCED"), ("RECV", "RECV")):
        lines = [*waits("0", 12, ops[0], **pp), *waits("1", 11, ops[1], 7, **pp)]
        ranks, sentence = told(lines)
        assert ranks == ()
        assert "ranks 0, 1 timed out in a send, a receive" in sentence
        lines += [signal(0, 8), signal(1, 8), signal(2, 8), *waits(range(3, 8), 9)]
        assert told(lines)[0] == (2,)


def test_the_summary_of_torchrun() -> None:
    for prefix in ("", "3: ", "2026-03-04T05:06:07.8Z ", "[pod/job-0] "):
        assert told(prefix + line for line in FIRST)[0] == (3,)
    # torchrun was killed while it printed: nothing is known about rank 3
    assert told(FIRST[:3])[0] == ()
    assert told(FIRST[: FIRST.index("  rank      : 3 (local_rank: 0)")])[0] == (1,)
    # two nodes: the earlier failure counts, also if their lines take turns
    later = [line.replace("05:06:07", "05:06:08") for line in summary((6, 1), (7, -15))]
    pairs = itertools.zip_longest(later, FIRST, fillvalue="")
    assert told(line for a, b in pairs for line in ("0: " + a, "1: " + b))[0] == (3,)


def test_a_rank_that_did_not_start_a_collective() -> None:
    prefixes = ("", "7: ", "[default5]:", "2026-01-02T03:04:05 node7 ", "\x1b[31m")
    for form, prefix in itertools.product(FORMS, prefixes):
        lines = [*waits("0123467", 1423, form=form, ahead=2), signal(5, 1422)]
        assert told(prefix + line for line in lines) == (
            (5,),
            "rank 5 did not start all_reduce 1,423 of group 0 (65,536 elements), in which ranks 0, "
            "1, 2, 3, 4, 6, 7 wait; its last completed collective is 1,422",
        )


AGENT = (
    "E1129 08:14:35.136000 17 torch/distributed/elastic/multiprocessing/api.py:984] failed "
    "(exitcode: -6) local_rank: 0 (pid: 4711) of binary: /usr/bin/python3"
)


def test_the_newest_attempt_counts() -> None:
    """The job was restarted and counts from 1 again: it gets less far, or farther, than before.
    The agent's line separates attempts if the collective had been enqueued in the first one."""
    rows: Any = (40, 0, []), (200, 0, []), (104, 0, []), (102, 4, [AGENT]), (102, 0, [AGENT])
    for form, (seq, ahead, between) in itertools.product(FORMS, rows):
        first = [*waits("013", 100, form=form, ahead=ahead), signal(2, 99), *between]
        lines = [*first, *waits("023", seq, form=form), signal(1, seq - 1)]
        for log in (lines, [f"0: {line}" for line in lines]):
            ranks, sentence = told(log)
            assert ranks == (1,)
            assert f"ranks 0, 2, 3 wait; its last completed collective is {seq - 1}" in sentence


# -- files -----------------------------------------------------------------------------------------


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


def verdict(folder: Path, logs: Mapping[str, list[str] | bytes], *flags: str) -> tuple[int, str]:
    """The exit status and output of hang.py for these files, in this order."""
    for name, log in logs.items():
        text = log if isinstance(log, bytes) else "\n".join([*log, ""]).encode()
        (folder / name).write_bytes(text)
    done = run("hang.py", *(str(folder / name) for name in logs), *flags)
    assert done.stderr == ""
    return done.returncode, done.stdout


# Rank 1 is stopped. Its own log has the steps until then.
OF_RANKS = {f"rank{r}.log": ["step 12", *(waits([r], 12) if r != 1 else [])] for r in range(3)}
# Of two nodes. The second log may lack the lines of rank 5 and the summary.
NODE, SECOND = waits("023", 12), waits("4675", 12)
KILLED = [*NODE, *summary((0, -6), (1, -9), (2, -6), (3, -6))]
# Rank 1 hung in the first attempt, rank 3 in the second. In the log of the second node, rank 2
# waits first in collective 9, then in 50.
RESTARTED = [*waits("0", 9), signal(1, 8), *waits("01", 50)]
OF_SECOND = [*waits("23", 9), *waits("2", 50), signal(3, 49)]
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
BEHIND = [*waits("02", 12), signal(1, 11)]


def dumps_of(dumps: Any) -> dict[str, bytes]:
    """Rank 1 of 3 waits in a group of ranks 0 and 1, in which rank 0 never called anything."""
    over, gathers = entry(4, "completed"), {"profiling_name": "nccl:_all_gather_base"}
    entries = [[over], [over, entry(1, "scheduled", "7")], [over, entry(5, "scheduled", **gathers)]]
    config = {"0": "[0, 1, 2]", "7": "[0, 1]"}
    return {f"trace_rank_{rank}": dump(dumps, config, *rows) for rank, rows in enumerate(entries)}


def dumps_with_sizes() -> dict[str, bytes]:
    """Rank 2 has completed a smaller all-reduce, of which a log has no size."""
    calls = [("started", 65536), ("started", 65536), ("completed", 7)]
    entries = [entry(9, state, input_sizes=[[size]]) for state, size in calls]
    dumps = [dump(as_json, {"0": "[0, 1, 2]"}, one) for one in entries]
    return {f"trace_rank_{rank}": content for rank, content in enumerate(dumps)}


def test_several_files(tmp_path: Path) -> None:
    of_both = [*(f"0: {line}" for line in RESTARTED), *(f"1: {line}" for line in OF_SECOND)]
    whole = [*SECOND, *summary((4, -6), (5, -6), (6, -6), (7, -6))]
    gathers = (
        "rank 0 did not start all_gather_into_tensor 5 of group 0 (30 elements), in which rank"
    )
    rows: tuple[tuple[dict[str, Any], int, str], ...] = (
        (OF_RANKS, 1, "rank 1 reported nothing about all_reduce 12"),
        ({name: log for name, log in OF_RANKS.items() if "1" not in name}, 4, "cannot tell which"),
        # the first node's summary may tell that torchrun killed rank 1
        ({"a": [*NODE, *summary((0, -6), (2, -6), (3, -6))], "b": SECOND[:6]}, 4, "cannot tell"),
        ({"a": KILLED, "b": SECOND[:6]}, 1, "rank 1 on node1 ended by signal 9; ranks 1, 5 repor"),
        ({"a": KILLED, "b": whole}, 1, "rank 1 reported nothing about all_reduce 12"),
        ({"1": RESTARTED, "2": OF_SECOND}, 1, "rank 3 did not start all_reduce 50 of group 0"),
        ({"2": OF_SECOND, "1": RESTARTED}, 1, "rank 3 did not start all_reduce 50 of group 0"),
        ({"srun": of_both}, 1, "rank 3 did not start all_reduce 50 of group 0"),
        (dumps_of(pickle.dumps), 1, f"{gathers} 2 waits; its last completed collective is 4\n"),
        (dumps_of(as_json), 1, f"{gathers} 2 waits; its last completed collective is 4\n"),
        (
            {"job.log": OTHER_SIZE} | dumps_with_sizes(),
            1,
            "the ranks called different collectives as 9 of group 0: rank 2: all_reduce of 7 "
            "elements; ranks 0, 1: all_reduce of 65,536 elements\n",
        ),
        # logs that begin with a brace, as trainers print their metrics, or in UTF-16
        ({"rank0.log": ["{'loss': 2.3}", *BEHIND]}, 1, "rank 1 did not start"),
        ({"rank0.log": ['{"loss": 2.3}', *BEHIND]}, 1, "rank 1 did not start"),
        ({"rank0.log": "\n".join(BEHIND).encode("utf-16")}, 1, "rank 1 did not start"),
        ({"job.log": HEALTHY}, 0, "no sign of a hang\n"),
    )
    for logs, status, words in rows:
        found, out = verdict(tmp_path, logs)
        assert (found, out[: len(words)]) == (status, words)
    for line in HEALTHY:
        assert told([line] * 3) == ((), "")


@pytest.mark.parametrize("end", [1.0, 0.995, 0.7, 0.4])
def test_a_log_that_is_cut_off_names_no_rank(end: float, tmp_path: Path) -> None:
    """Rank 7 is stopped, and rank 4 prints last: without its lines, it must not be named."""
    text = "\n".join([*waits("0123564", 12), ""]).encode()
    logs = {"job.log": text[: int(end * len(text))]}
    if end == 1:
        status, out = verdict(tmp_path, logs, "--world-size", "8")
        assert (status, out.partition(" reported")[0]) == (1, "rank 7")
    for flags in [[]] if end == 1 else [[], ["--world-size", "8"]]:
        status, out = verdict(tmp_path, logs, *flags)
        assert (status, out.partition(":")[0]) == (4, "cannot tell which rank")
        assert ("job.log is incomplete; give the whole logs" in out) == (end < 1)


def test_files_that_are_refused(tmp_path: Path) -> None:
    for content, words in (
        (b"\x80\x02cos\nsystem\n.", "plain data"),
        (b'{"pg_config": ', "line 1"),
        (b'{"entries": [], "rank": "x"}', "without a rank"),
        (None, "regular file"),
    ):
        path = tmp_path / f"{words}_rank_0"
        path.write_bytes(content) if content is not None else os.mkfifo(path)
        line = refusal("hang.py", str(path))
        assert str(path) in line
        assert words in line.replace(str(path), "")
