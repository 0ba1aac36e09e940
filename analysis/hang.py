#!/usr/bin/env python3
# /// script
# requires-python = ">=3.11"
# dependencies = ["numpy>=1.26", "tabulate>=0.9"]
# ///
"""Which rank made this job hang? Reads the logs of any job that used torch.distributed.

    python analysis/hang.py job.log
    python analysis/hang.py logs/rank*.log
    python analysis/hang.py /tmp/nccl_trace_rank_*     # dumps of torch's flight recorder

It prints one sentence about the rank that is missing in a collective, or about ranks that called
different collectives. The files are one log, one log per rank or node, or a flight recorder dump
per rank (JSON or pickle; no code of a pickle is executed). They may contain any other lines.

Exit status: 0 no sign of a hang, 1 a rank or a mismatch was found, 4 it cannot be told.
docs/hang.md lists the messages that are understood. BSD-3-Clause.
"""

import json
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from analysis.logs.patterns import text_of
from analysis.logs.watchdog import UNKNOWN, Call, Evidence, Exit
from analysis.show import clean, one_line, put
from harness.cli import Parser, cut, positive_int
from harness.exits import NO_VERDICT
from readers import files
from readers.traces import rank_in_name

# collectives that no rank completes before all have started it
ALL_WAIT = {
    "all_reduce",
    "all_gather_into_tensor",
    "all_gather",
    "reduce_scatter_tensor",
    "barrier",
}
# a dump as JSON; a log may begin with a brace, too
IS_DUMP = re.compile(rb'\s*\{.{,2000}"(?:entries|pg_config|pg_status)"', re.DOTALL)


class Finding(NamedTuple):
    """A conclusion. ranks: those that it names; empty if it cannot be told which one."""

    sentence: str
    ranks: tuple[int, ...] = ()


def conclude(evidence: Evidence, world_size: int | None = None) -> Finding | None:
    """Return the conclusion with the strongest evidence; None if nothing points to a hang.

    Calls that differ come first, then ranks that are behind in a collective, ranks that a monitored
    barrier or a HANG message names, a rank that ended by itself, and timeouts of gloo.
    """
    everyone = set(range(world_size or max(evidence.seen, default=-1) + 1))
    is_closed = bool(evidence.exits) and not evidence.open_ended
    has_end = not evidence.cut_off and (world_size is not None or is_closed)
    groups = [of_group(evidence, group, everyone, has_end) for group in sorted(evidence.states)]
    findings = [finding for finding in groups if finding]
    named = [finding for finding in findings if finding.ranks]
    died = ended_by_themselves(evidence)
    if evidence.fingerprints:
        return of_fingerprints(evidence)
    if named:
        return with_exit(named[0], died)
    if evidence.missing:
        ranks = tuple(sorted(evidence.missing))
        return Finding(f"{ranks_text(ranks)} did not reach a monitored barrier", ranks)
    if evidence.in_group:
        return Finding(
            "cannot tell which rank: no line tells the global ranks of the group in "
            f"{cut(sorted(evidence.in_group))}"
        )
    if evidence.own:
        return of_own_message(evidence.own)
    if evidence.wrong_size:
        return Finding(
            "cannot tell which rank: gloo received a message of another size than it expected, so "
            "the ranks called different collectives; TORCH_DISTRIBUTED_DEBUG=DETAIL names them"
        )
    if evidence.waiting:
        return of_gloo(evidence, everyone - evidence.lost.keys(), has_end)
    if evidence.unmatched and not findings:
        return Finding(
            f"cannot tell which rank: {ranks_text(sorted(evidence.unmatched))} timed out in "
            f"a send, a receive or a batch of them, which are not matched"
        )
    if len(first := [exit for exit in died if exit.is_root and exit.time == died[0].time]) > 1:
        return Finding(
            f"cannot tell which rank ended first: {', '.join(exit_text(exit) for exit in first)}"
        )
    if died:
        others = "it was the first rank to end, and no rank hung"
        if findings:
            others = findings[0].sentence.removeprefix("cannot tell which rank: ")
        return Finding(f"{exit_text(died[0])}; {others}", (died[0].rank,))
    if findings:
        return findings[0]
    if evidence.lost:
        line = next(iter(evidence.lost.values()))[:200]
        return Finding(
            f"cannot tell which rank: a connection was lost, and no line names it: {line}"
        )
    return None


def ended_by_themselves(evidence: Evidence) -> list[Exit]:
    """Return the failed ranks of torchrun's summary that no other failure explains: not those that
    torchrun ended (SIGTERM), or that lost a peer or timed out, or that torch's watchdog aborted."""
    victims = {-1, *evidence.waiting, *evidence.lost, *evidence.unmatched}
    for states in evidence.states.values():
        victims |= states.keys()
    ended = [e for e in evidence.exits if e.status not in (0, -15) and e.rank not in victims]
    return sorted(ended, key=lambda exit: (exit.time, not exit.is_root))


def of_fingerprints(evidence: Evidence) -> Finding:
    """Return the conclusion from TORCH_DISTRIBUTED_DEBUG=DETAIL: which ranks called what.

    Within a group, only the rank that prints a line is known by its global number.
    """
    own = evidence.fingerprints
    prints = own if evidence.in_group else {**evidence.of_peers, **own}
    calls = {rank: call for rank, (call, _) in prints.items()}
    if len(set(calls.values())) == 1:
        calls = {rank: ", ".join(filter(None, both)) for rank, both in prints.items()}
    text, ranks = different(calls, calls)
    if len(set(calls.values())) > 1:
        return Finding(f"the ranks called different collectives: {text}", ranks)
    return Finding(
        f"cannot tell which rank: ranks called different collectives, but only one call is known: "
        f"{text}"
    )


def of_group(evidence: Evidence, group: str, everyone: set[int], has_end: bool) -> Finding | None:
    """Return which ranks keep the others of a group waiting; None if no rank of it waits.

    has_end: whether the logs are known to have the lines of all ranks until the end.
    """
    states = evidence.states[group]
    calls = {rank: state.call for rank, state in states.items() if state.call}
    if not calls:
        return None
    seq = min(call.seq for call in calls.values())
    waiting = {rank: call for rank, call in calls.items() if call.seq == seq}
    name = name_of(evidence, group)
    in_dumps = {r: state.calls[seq] for r, state in states.items() if seq in state.calls}
    if differing := mismatch(in_dumps | waiting):
        text, ranks = differing
        return Finding(
            f"the ranks called different collectives as {seq:,} of group {name}: {text}", ranks
        )
    call = next(iter(waiting.values()))
    size = f" ({call.numel:,} elements)" if call.numel >= 0 else ""
    what = f"{call.op} {seq:,} of group {name}{size}"
    wait = f"in which {ranks_text(sorted(waiting))} {'waits' if len(waiting) == 1 else 'wait'}"
    if group in evidence.unnumbered and group != "0":
        return Finding(f"cannot tell which rank: no line tells the global ranks of {what}, {wait}")
    elsewhere = evidence.unmatched | {
        rank
        for other, of_other in evidence.states.items()
        for rank, state in of_other.items()
        if other != group and state.call
    }
    behind = [
        rank
        for rank, state in sorted(states.items())
        if state.enqueued < seq and rank not in calls and rank not in elsewhere
    ]
    is_default = group == "0" or evidence.names.get(group) == "default_pg"
    members = evidence.members.get(group) or (everyone if is_default else set())
    silent = sorted(members - states.keys() - elsewhere)
    if len(behind) > len(waiting):
        return Finding(
            f"cannot tell which rank: {ranks_text(behind)} did not start {what}, {wait}; either "
            f"they are stuck elsewhere, or {ranks_text(sorted(waiting))} called one too many"
        )
    if behind:
        last = states[behind[0]].completed
        done = f"its last completed collective is {last:,}" if last > 0 else "it completed none"
        return Finding(f"{ranks_text(behind)} did not start {what}, {wait}; {done}", tuple(behind))
    if silent and len(silent) < len(waiting):
        if not (has_end or is_here(evidence, group, silent)):
            return Finding(
                f"cannot tell which rank: {ranks_text(silent)} reported nothing about {what}, "
                f"{wait}, but {what_is_missing(evidence)}"
            )
        return Finding(
            f"{ranks_text(silent)} reported nothing about {what}, {wait}: stopped, dead, "
            f"unreachable, or past its last collective",
            tuple(silent),
        )
    past = sorted(r for r, state in states.items() if state.completed >= seq and r not in waiting)
    if past and call.op in ALL_WAIT:
        return Finding(
            f"cannot tell which rank: {ranks_text(past)} completed {what}, {wait}; either the "
            f"sizes of their tensors differ, which dumps of the flight recorder show, or the "
            f"lines are of different attempts"
        )
    lacking = f"{ranks_text(silent)} left no line in these files" if silent else "none is behind"
    return Finding(
        f"cannot tell which rank: {ranks_text(sorted(waiting))} started {what}, and {lacking}; "
        f"{what_is_missing(evidence)}"
    )


def is_here(evidence: Evidence, group: str, ranks: Sequence[int]) -> bool:
    """Whether it is known that these ranks exist, and that their lines are not just missing: the
    files are dumps, which tell the members of a group, or each of the ranks has its own log."""
    return not evidence.cut_off and (
        group in evidence.members or evidence.with_file.issuperset(ranks)
    )


def what_is_missing(evidence: Evidence) -> str:
    """Return why the absence of lines is no evidence, and the remedy."""
    if evidence.cut_off:
        return f"the last line of {cut(evidence.cut_off, 3)} is incomplete; give the whole logs"
    return "the logs may be incomplete; give those of all nodes, and --world-size N"


def mismatch(waiting: Mapping[int, Call]) -> tuple[str, tuple[int, ...]] | None:
    """Return what the ranks called, and those of the minority, if calls of one number differ."""
    calls = {rank: call.signature for rank, call in waiting.items() if call.op != UNKNOWN}
    texts = {rank: str(call) for rank, call in waiting.items()}
    return different(calls, texts) if len(set(calls.values())) > 1 else None


def different(calls: Mapping[int, object], texts: Mapping[int, str]) -> tuple[str, tuple[int, ...]]:
    """Return who called what, and the ranks whose call is not the most common one; all ranks if
    there is no such call."""
    counts = Counter(calls.values()).most_common()
    tied = counts[1:] and counts[0][1] == counts[1][1]
    parts, minority = [], list[int]()
    for call, _ in reversed(counts):
        ranks = sorted(rank for rank in calls if calls[rank] == call)
        parts.append(f"{ranks_text(ranks)}: {texts[ranks[0]]}")
        if tied or call != counts[0][0]:
            minority += ranks
    return "; ".join(parts), tuple(sorted(minority))


def with_exit(finding: Finding, died: Sequence[Exit]) -> Finding:
    """Return the finding, with what torchrun says about a rank that it names."""
    for exit in died:
        if exit.rank in finding.ranks:
            return finding._replace(sentence=f"{finding.sentence}; {exit_text(exit)}")
    return finding


def of_own_message(own: dict[str, list[str]]) -> Finding:
    """Return the conclusion from a HANG message of these scripts."""
    for state in ("does not answer", "is behind the other ranks"):
        if names := own.get(state):
            ranks = tuple(int(name.split()[1]) for name in names)
            return Finding(f"{cut(names)} {state}".replace("ranks ranks", "ranks"), ranks)
    return Finding("cannot tell which rank: all ranks of the HANG message wait")


def exit_text(exit: Exit) -> str:
    where = f" on {exit.host}" if exit.host else ""
    how = f"by signal {-exit.status}" if exit.status < 0 else f"with status {exit.status}"
    return f"rank {exit.rank}{where} ended {how}"


def of_gloo(evidence: Evidence, everyone: set[int], has_end: bool) -> Finding:
    """Return the conclusion from timeouts of gloo, which name neither a peer nor a collective.

    everyone: the ranks that may be the cause, without those that lost a connection.
    """
    waiting = evidence.waiting
    silent = tuple(sorted(everyone - waiting))
    if silent:
        what = (
            f"{ranks_text(silent)} reported no timeout, while {ranks_text(sorted(waiting))} timed "
            f"out in an operation over gloo"
        )
        if has_end or is_here(evidence, "", silent):
            return Finding(what, silent)
        return Finding(f"cannot tell which rank: {what}, but {what_is_missing(evidence)}")
    return Finding(
        f"cannot tell which rank: {ranks_text(sorted(waiting))} timed out in operations over gloo; "
        f"--world-size N tells the number of ranks, and TORCH_DISTRIBUTED_DEBUG=DETAIL makes torch "
        f"compare their calls"
    )


def ranks_text(ranks: Sequence[int]) -> str:
    """Return `rank 3` or `ranks 1, 2, 5`."""
    return f"rank{'s' * (len(ranks) != 1)} {cut(list(ranks))}"


def name_of(evidence: Evidence, group: str) -> str:
    name = evidence.names.get(group, "")
    return f"{group} ({name})" if name and name not in ("undefined", "default_pg") else group


def read(path: str, evidence: Evidence) -> None:
    """Read a log, or a dump of the flight recorder. Raises OSError or ValueError."""
    try:
        data = bytes(files.read(path))
        if not (data[:1] == b"\x80" or IS_DUMP.match(data)):
            text = text_of(data)
            own = Evidence()
            own.add_lines(text.splitlines())
            evidence.merge(own)
            if len(own.seen) > 1 and not own.exits:
                evidence.open_ended.append(path)
            if text and not text.endswith(("\n", "\r")):
                evidence.cut_off.append(path)
            return
        content = json.loads(data) if data[:1] == b"{" else files.plain_pickle(data)
        rank = content.get("rank", rank_in_name(path))
        if not isinstance(rank, int):
            raise ValueError("a dump without a rank in its name; e.g. nccl_trace_rank_0")
        evidence.add_dump(content, rank)
    except (ValueError, TypeError, LookupError, AttributeError, EOFError) as error:
        raise ValueError(f"{path}: {clean(error)}") from None


def main() -> int:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("logs", nargs="+", metavar="LOG", help="logs of a job, or dumps of the flight recorder")
    add(
        "--world-size", type=positive_int, metavar="N", help="number of ranks (default: those seen)"
    )
    args = parser.parse_args()
    evidence = Evidence()
    with one_line(args.logs):
        for path in args.logs:
            read(path, evidence)
        ranks = [rank for path in args.logs if (rank := rank_in_name(path)) is not None]
    if len(ranks) > 1 and len(set(ranks)) == len(ranks):
        evidence.with_file = set(ranks)
    finding = conclude(evidence, args.world_size)
    if finding is None:
        put("no sign of a hang")
        return 0
    put(finding.sentence)
    return 1 if finding.ranks else NO_VERDICT


if __name__ == "__main__":
    sys.exit(main())
