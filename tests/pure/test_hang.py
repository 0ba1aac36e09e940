"""analysis/hang.py: which rank is missing, from lines of the forms that torch prints.

The forms are those of torch 2.6, 2.8 and 2.14; the contents are made up.
"""

import itertools
import json
import os
import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from analysis import hang
from analysis.hang import conclude
from analysis.logs.watchdog import Evidence

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


def of_all(ranks: Iterable[int], seq: int, **options: object) -> list[str]:
    return [line for rank in ranks for line in timeout(rank, seq, **options)]  # type: ignore[arg-type]


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


@pytest.mark.parametrize("end", [1.0, 0.995, 0.7, 0.4])
def test_a_log_that_is_cut_off_names_no_rank(
    end: float,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 7 is stopped, and rank 4 prints last: without its lines, it must not be named."""
    text = "\n".join([*of_all([0, 1, 2, 3, 5, 6, 4], 12), ""])
    path = tmp_path / "job.log"
    path.write_text(text[: int(end * len(text))])
    for flags in ([], ["--world-size", "8"]):
        monkeypatch.setattr("sys.argv", ["hang.py", str(path), *flags])
        status, out = hang.main(), capsys.readouterr().out
        if end == 1 and flags:
            assert (status, out.partition(" reported")[0]) == (1, "rank 7")
        else:
            assert (status, out.partition(":")[0]) == (4, "cannot tell which rank")
            assert ("job.log is incomplete; give the whole logs" in out) == (end < 1)


def test_each_rank_has_a_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 is stopped; its log has the steps until then."""
    for rank in range(3):
        lines = ["step 12", *(timeout(rank, 12) if rank != 1 else [])]
        (tmp_path / f"rank{rank}.log").write_text("\n".join([*lines, ""]))
    for count, status in ((3, 1), (2, 4)):  # all logs; those of ranks 0 and 2
        paths = [
            str(path)
            for path in sorted(tmp_path.glob("*.log"))
            if count == 3 or "1" not in path.name
        ]
        monkeypatch.setattr("sys.argv", ["hang.py", *paths])
        assert hang.main() == status
        assert "rank 1 reported nothing about all_reduce 12" in capsys.readouterr().out


def test_the_log_of_one_node_is_cut_off(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 is stopped. The second node's log lacks the lines of rank 5 and the summary. The first
    node's summary may tell that torchrun killed rank 1."""
    first = of_all([0, 2, 3], 12)
    killed = summary((0, -6), (1, -9), (2, -6), (3, -6))
    second = [*of_all([4, 6, 7], 12), *timeout(5, 12)]
    both = summary((4, -6), (5, -6), (6, -6), (7, -6))
    for lines, words in (
        ((first, summary((0, -6), (2, -6), (3, -6)), second[:6], []), "cannot tell which rank: "),
        ((first, killed, second[:6], []), "rank 1 on node1 ended by signal 9; ranks 1, 5 reported"),
        ((first, killed, second, both), "rank 1 reported nothing about all_reduce 12"),
    ):
        (tmp_path / "a.log").write_text("\n".join([*lines[0], *lines[1], ""]))
        (tmp_path / "b.log").write_text("\n".join([*lines[2], *lines[3], ""]))
        monkeypatch.setattr("sys.argv", ["hang.py", *map(str, sorted(tmp_path.glob("*.log")))])
        assert hang.main() == (4 if words.startswith("cannot") else 1)
        assert capsys.readouterr().out.startswith(words)


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


def test_the_newest_attempt_in_the_logs_of_two_nodes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 hung in the first attempt, rank 3 in the second one. In the log of the second node,
    rank 2 waits first in collective 9, then in 50."""
    nodes = {
        "node0": [*timeout(0, 9), signal(1, 8), *of_all([0, 1], 50)],
        "node1": [*of_all([2, 3], 9), *timeout(2, 50), signal(3, 49)],
    }
    for name, lines in nodes.items():
        (tmp_path / f"{name}.out").write_text("\n".join([*lines, ""]))
    tasks = [f"{n}: {line}" for n, lines in enumerate(nodes.values()) for line in lines]
    (tmp_path / "srun.out").write_text("\n".join([*tasks, ""]))
    for paths in (["node0.out", "node1.out"], ["node1.out", "node0.out"], ["srun.out"]):
        monkeypatch.setattr("sys.argv", ["hang.py", *(str(tmp_path / path) for path in paths)])
        assert hang.main() == 1
        assert capsys.readouterr().out.startswith("rank 3 did not start all_reduce 50 of group 0")


def test_calls_that_differ() -> None:
    """The minority is named, with both calls. The size counts only where ranks must agree on it."""
    ranks, sentence = told([*of_all([0, 2, 3], 9), *timeout(1, 9, "BROADCAST")])
    assert ranks == (1,)
    assert "rank 1: broadcast of 65,536 elements; ranks 0, 2, 3: all_reduce" in sentence
    assert told([*of_all([0, 1, 3], 9), *timeout(2, 9, numel=7)])[0] == (2,)
    assert told([*timeout(0, 9), *timeout(1, 9, numel=7)])[0] == (0, 1)  # a tie names both
    uneven = [line for rank in range(3) for line in timeout(rank, 9, "ALLTOALL_BASE", 10 * rank)]
    assert told([*uneven, signal(3, 8)])[0] == (3,)


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


def test_one_rank_ahead_of_the_others() -> None:
    """Either it called one collective too many, or the others are stuck: no rank is named."""
    lines = [*timeout(0, 11), *(signal(rank, 10) for rank in range(1, 8))]
    ranks, sentence = told(lines)
    assert ranks == ()
    assert "cannot tell" in sentence


DETAIL = (
    "[rank{a}]: RuntimeError: Detected mismatch between collectives on ranks. Rank {a} is running "
    "collective: CollectiveFingerPrint(SequenceNumber=7, OpType={op_a}, TensorShape=[10, 3], "
    "TensorDtypes=Float, TensorDeviceTypes=TensorOptions(dtype=float (default), device=cpu)), but "
    "Rank {b} is running collective: CollectiveFingerPrint(SequenceNumber=7, OpType={op_b}, "
    "TensorShape=[10, 3]).Collectives differ in the following aspects: \t Op type"
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


@pytest.mark.parametrize(
    ("lines", "ranks", "words"),
    [
        (
            [
                DETAIL.format(a=1, b=0, op_a="BROADCAST", op_b="ALLREDUCE"),
                DETAIL.format(a=2, b=1, op_a="ALLREDUCE", op_b="BROADCAST"),
            ],
            (1,),
            "rank 1: broadcast 7 of shape [10, 3]; ranks 0, 2: all_reduce",
        ),
        (
            [
                "[rank0]:[E1 ProcessGroupGloo.cpp:68] [Rank 0]: Ranks 1, 3 failed to pass "
                "monitoredBarrier in 5000 ms",
                "[rank2]:[E1 ProcessGroupGloo.cpp:68] Rank 2 successfully reached "
                "monitoredBarrier, but received errors while waiting for send/recv from rank 0.",
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
            [
                "[rank0]: RuntimeError: [gloo/transport/tcp/pair.cc:561] Connection closed by peer "
                "[127.0.0.1]:6178",
                *summary((0, 1), (1, -9), (2, -15)),
            ],
            (1,),
            "rank 1 on node1 ended by signal 9",
        ),
        (
            [
                *(
                    f"[rank{rank}]: RuntimeError: [unbound_buffer.cc:78] Timed out waiting 8000ms "
                    "for recv operation to complete"
                    for rank in (0, 2)
                ),
                *summary((0, 1), (2, 1), (1, -9)),
            ],
            (1,),
            "rank 1 reported no timeout, while ranks 0, 2 timed out",
        ),
        (
            [
                "[rank0]: RuntimeError: Timed out waiting 8000ms for recv operation to complete",
                "[rank1]: RuntimeError: [pair.cc:534] Connection closed by peer [127.0.0.1]:6178",
                "[rank2]: step 12",
                *summary((0, 1), (1, 1), (2, -9)),
            ],
            (2,),
            "rank 2 reported no timeout, while rank 0 timed out",
        ),
        (
            [
                "[rank0]: RuntimeError: Timed out waiting 8000ms for recv operation to complete",
                "[rank2]: step 12",
            ],
            (),
            "ranks 1, 2 reported no timeout, while rank 0 timed out in an operation over gloo, but",
        ),
        (["[rank0]: Connection closed by peer [10.0.0.7]:6178"], (), "10.0.0.7"),
        (["enforce fail: Received data size doesn't match expected size."], (), "DETAIL"),
    ],
)
def test_other_messages(lines: list[str], ranks: tuple[int, ...], words: str) -> None:
    named, sentence = told(lines)
    assert named == ranks
    assert words in sentence


def test_an_abort_of_the_watchdog_is_not_a_cause() -> None:
    """Ranks 0 and 2 ended by SIGABRT because they waited for rank 1, which was stopped."""
    ranks, sentence = told([*of_all([0, 2], 9), *summary((0, -6), (2, -6), (1, -9))])
    assert ranks == (1,)
    assert sentence.endswith("rank 1 on node1 ended by signal 9")


@pytest.mark.parametrize("form", ["pickle", "json"])
def test_dumps_of_the_flight_recorder(
    form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 of 3 waits in a group of ranks 0 and 1, in which rank 0 never called anything."""

    def entry(
        seq: int, done: bool, group: str = "0", op: str = "nccl:all_reduce"
    ) -> dict[str, Any]:
        made = {"process_group": (group, "default_pg" if group == "0" else "mesh_tp")}
        shapes = {"input_sizes": [[10, 3]], "state": "completed" if done else "scheduled"}
        return {**made, **shapes, "collective_seq_id": seq, "profiling_name": op, "is_p2p": False}

    config = {"0": {"ranks": "[0, 1, 2]"}, "7": {"ranks": "[0, 1]"}}
    entries = {
        0: [entry(4, True)],
        1: [entry(4, True), entry(1, False, "7")],
        2: [entry(4, True), entry(5, False, op="nccl:_all_gather_base")],
    }
    paths = []
    for rank, of_rank in entries.items():
        content = {"pg_config": config, "entries": of_rank}
        data = pickle.dumps(content, 2) if form == "pickle" else json.dumps(content).encode()
        paths.append(tmp_path / f"nccl_trace_rank_{rank}")
        paths[-1].write_bytes(data)
    monkeypatch.setattr("sys.argv", ["hang.py", *map(str, paths)])
    assert hang.main() == 1
    assert capsys.readouterr().out == (
        "rank 0 did not start all_gather_into_tensor 5 of group 0 (30 elements), in which rank 2 "
        "waits; its last completed collective is 4\n"
    )


SIZES = [65536, 65536, 7]


def test_another_size_in_an_all_reduce(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
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
    (tmp_path / "job.log").write_text("\n".join([*lines, ""]))
    for rank, size in enumerate(SIZES):
        entry = {
            "process_group": ["0", "default_pg"], "collective_seq_id": 9, "is_p2p": False,
            "profiling_name": "nccl:all_reduce", "input_sizes": [[size]],
            "state": "completed" if rank == 2 else "started",
        }  # fmt: skip
        content = {"pg_config": {"0": {"ranks": "[0, 1, 2]"}}, "entries": [entry]}
        (tmp_path / f"nccl_trace_rank_{rank}").write_text(json.dumps(content))
    paths = map(str, sorted(tmp_path.iterdir()))
    monkeypatch.setattr("sys.argv", ["hang.py", *paths])
    assert hang.main() == 1
    assert capsys.readouterr().out == (
        "the ranks called different collectives as 9 of group 0: rank 2: all_reduce of 7 elements; "
        "ranks 0, 1: all_reduce of 65,536 elements\n"
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
def test_files_that_are_refused(
    content: bytes | None, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    path = tmp_path / "dump_rank_0"
    path.write_bytes(content) if content is not None else os.mkfifo(path)
    monkeypatch.setattr("sys.argv", ["hang.py", str(path)])
    with pytest.raises(SystemExit) as end:
        hang.main()
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert str(path) in error
    assert words in error


@pytest.mark.parametrize(
    "line",
    [
        "[rank3]:[W615 ProcessGroupNCCL.cpp:5023] using GPU 3 as device used by this process",
        "[PG ID 0 PG GUID 0(default_pg) Rank 3] NCCL Work update periodically: last enqueued NCCL "
        "work: 12, last completed NCCL work: 11.",
        "[PG ID 0 PG GUID 0 Rank 3] ProcessGroupNCCL watchdog thread joined.",
        "node1:4711:4711 [0] NCCL INFO Using network Socket",
        "node1:1:2 [0] misc/socket.cc:1 NCCL WARN connect to 10.0.0.7 timed out, retrying (2/34)",
        "node1:1:2 [0] NCCL WARN socket to 10.0.0.7 closed; retry after 100 msec",
        "step 12, loss 3.2, 51 ms; rank 3 waits for data",
    ],
)
def test_a_healthy_log_names_no_rank(line: str) -> None:
    assert told([line] * 3) == ((), "")


def test_a_log_that_begins_with_a_brace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As trainers print their metrics: Python's dicts or JSON."""
    path = tmp_path / "rank0.log"
    for first, code in (("{'loss': 2.3}", "utf-8"), ('{"loss": 2.3}', "utf-8"), ("", "utf-16")):
        path.write_text("\n".join([first, *of_all([0, 2], 12), signal(1, 11)]), encoding=code)
        monkeypatch.setattr("sys.argv", ["hang.py", str(path)])
        assert hang.main() == 1
        assert capsys.readouterr().out.startswith("rank 1 did not start")


def test_two_ranks_in_one_line() -> None:
    """The second prefix counts for what follows it, wherever the first line was cut."""
    lines = of_all([0, 1, 2], 12)
    for cut in (8, 60, len(lines[0])):
        ranks, sentence = told(
            [lines[0], lines[1][:cut] + lines[2], *lines[3:], signal(3, 11), lines[1]]
        )
        assert ranks == (3,)
        assert "ranks 0, 1, 2 wait" in sentence


@pytest.mark.parametrize("ops", [("SEND", "RECV"), ("COALESCED", "COALESCED"), ("RECV", "RECV")])
def test_sends_and_receives_are_not_compared(ops: tuple[str, str]) -> None:
    """Their numbers differ between ranks. A rank that waits in one is not the cause elsewhere."""
    lines = [*timeout(0, 12, ops[0], group="5(pp)"), *timeout(1, 11, ops[1], 7, group="5(pp)")]
    ranks, sentence = told(lines)
    assert ranks == ()
    assert "ranks 0, 1 timed out in a send, a receive" in sentence
    lines += [signal(0, 8), signal(1, 8), signal(2, 8), *of_all(range(3, 8), 9)]
    assert told(lines)[0] == (2,)


def test_a_rank_that_waits_is_not_behind() -> None:
    """Its second line, with the last enqueued work, was cut off."""
    assert told(timeout(1, 12)[:1])[0] == ()
    healthy = timeout(1, 12)[1] + " timeout, WorkNCCL(SeqNum=12, OpType=ALLREDUCE, NumelIn=1)"
    assert told([healthy]) == ((), "")


def test_ranks_within_a_group_are_not_named_as_global_ranks() -> None:
    """Ranks 4 and 5 are ranks 0 and 1 of their group."""
    first = DETAIL.format(a=0, b=1, op_a="ALLREDUCE", op_b="BROADCAST").replace(
        "[rank0]", "[rank4]"
    )
    second = DETAIL.format(a=1, b=0, op_a="BROADCAST", op_b="ALLREDUCE")
    second = second.replace("[rank1]", "[rank5]")
    ranks, sentence = told([first, second])
    assert ranks == (4, 5)
    assert "rank 5: broadcast 7 of shape [10, 3]; rank 4: all_reduce" in sentence
    assert told([second])[0] == ()
    barrier = "[rank4]: RuntimeError: [Rank 0]: Rank 1 failed to pass monitoredBarrier in 9 ms"
    ranks, sentence = told([barrier])
    assert ranks == ()
    assert "global ranks" in sentence


def test_calls_that_differ_in_the_type_only() -> None:
    line = DETAIL.format(a=1, b=0, op_a="ALLREDUCE", op_b="ALLREDUCE")
    lines = [line.replace("Rank 1", f"Rank {r}").replace("[rank1]", f"[rank{r}]") for r in range(3)]
    lines[2] = lines[2].replace("Float", "Double")
    ranks, sentence = told(lines)
    assert ranks == (2,)
    assert "rank 2: all_reduce 7 of shape [10, 3], Double; ranks 0, 1: " in sentence


@pytest.mark.parametrize("prefix", ["", "3: ", "2026-03-04T05:06:07.8Z ", "[pod/job-0] "])
def test_the_summary_of_torchrun(prefix: str) -> None:
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


def test_words_of_a_summary_elsewhere() -> None:
    words = ["time: 0.54", "  time      : 0.54", "  host: n1", "  rank      : 3", "exitcode: 1"]
    assert told(words) == ((), "")
