"""The time that each stage of a pipeline spends in receives, and for which rank it waits.

A message ends at about the same time on both ranks. Therefore the rank whose call is longer waits
in it, for the difference of the two: the other rank arrived later.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from analysis.traces.calls import (
    LATE,
    Call,
    Group,
    Message,
    Spans,
    members,
    ms_by_step,
    spans_by_step,
)
from analysis.traces.kineto import Step, Trace

RECEIVES = ("recv", "sendrecv")  # a kernel SendRecv may also be an all-to-all


@dataclass
class Receives:
    """The receives of a rank, and how long it waits in messages."""

    calls: int = 0
    spans: Spans = field(default_factory=spans_by_step)
    waits: dict[tuple[str, int], Spans] = field(default_factory=dict)  # ("from" or "to", rank)
    steps: set[str] = field(default_factory=set)  # those with messages
    matched: int = 0  # number of calls whose send was found


def match(groups: Sequence[Group], traces: Mapping[int, Trace]) -> None:
    """Set the messages of the groups: the sends and receives in which waiting is known."""
    for group in groups:
        for source, rank, sends, receives in links(group, members(group, traces)):
            pairs = matched(sends, receives)
            group.messages += [Message(source, rank, *pair) for pair in pairs]


def receives_of(groups: Sequence[Group], traces: Mapping[int, Trace]) -> dict[int, Receives]:
    """The receives of each rank that sends or receives messages; {} without a receive, and for a
    single trace also if it only has kernels that may be an all-to-all."""
    found: dict[int, Receives] = {}
    for group in groups:
        for rank, calls in group.calls.items():
            own = [call for call in calls if call.about.name in RECEIVES]
            steps = {call.step for call in calls if call.about.name in ("send", *RECEIVES)}
            if steps:
                one = found.setdefault(rank, Receives())
                one.calls += len(own)
                one.steps |= steps
                for call in own:
                    span = (call.activity.start, call.activity.end)
                    one.spans[call.step].append(span)
        for source, rank, sent, received in group.messages:
            found[rank].matched += 1
            for own_rank, call, other, end in (
                (rank, received, sent, ("from", source)),
                (source, sent, received, ("to", rank)),
            ):
                start = call.activity.start
                waits = found[own_rank].waits.setdefault(end, spans_by_step())
                waits[call.step].append((start, start + max(0, call.us - other.us)))
    named = any(call.about.name == "recv" for group in groups for call in group.all_calls())
    shown = any(one.calls for one in found.values()) and (named or len(traces) > 1)
    return found if shown else {}


def links(group: Group, ranks: Sequence[int]) -> Iterator[tuple[int, int, list[Call], list[Call]]]:
    """The messages from one rank to another one: both ranks, sends and receives.

    A kernel that sends and receives does not state its peer, which is known in a group of two.
    """
    peers = dict(zip(ranks, reversed(ranks), strict=True)) if len(ranks) == 2 else {}
    sides = defaultdict[tuple[int, int], dict[str, list[Call]]](lambda: defaultdict(list))
    for rank, calls in group.calls.items():
        for call in calls:
            name, ends = call.about.name, call.about.link
            if ends and ranks and not {*ends} <= {*ranks} and max(ends) < len(ranks):
                ends = tuple(ranks[end] for end in ends)  # numbers within the group
            if not ends and rank in peers and name in ("send", *RECEIVES):
                ends = (rank, peers[rank]) if name == "send" else (peers[rank], rank)
            if not ends:
                continue
            if name in RECEIVES:
                sides[ends[0], ends[1]]["receives"].append(call)
            if name == "send":
                sides[ends[0], ends[1]]["sends"].append(call)
            elif name == "sendrecv" and rank in peers:
                sides[rank, peers[rank]]["sends"].append(call)
    for (source, rank), of in sides.items():
        if {source, rank} <= group.calls.keys():
            yield source, rank, of["sends"], of["receives"]


def matched(sends: Sequence[Call], receives: Sequence[Call]) -> Iterator[tuple[Call, Call]]:
    """Pairs of a send and its receive: in order within a step, if their numbers are equal."""
    by_step = defaultdict[str, tuple[list[Call], list[Call]]](lambda: ([], []))
    for side, calls in enumerate((sends, receives)):
        for call in calls:
            by_step[call.step][side].append(call)
    for of in by_step.values():
        if len(of[0]) == len(of[1]):
            yield from zip(*of, strict=True)


def rows_of(found: Mapping[int, Receives], traces: Mapping[int, Trace]) -> list[list[object]]:
    """A row for each rank: calls, milliseconds and share of a step, and for which rank it waits."""
    rows: list[list[object]] = []
    for rank, one in sorted(found.items()):
        steps = traces[rank].steps
        ms = sum(ms_by_step(one.spans).values()) / len(steps)
        share = ms / mean_ms(steps)
        row = [rank, f"{one.calls / len(steps):.5g}", f"{ms:.5g}", f"{100 * share:.1f}"]
        if one.waits:
            (_, other), waits, _ = longest_wait(one, traces[rank])
            rows.append([*row, f"{waits:.5g}", other if waits else "-"])
        else:
            rows.append([*row, "-", "-"])
    return rows


def mean_ms(steps: Sequence[Step]) -> float:
    """The length of the mean step in milliseconds."""
    return fmean(step.end - step.start for step in steps) / 1e3


def longest_wait(one: Receives, trace: Trace) -> tuple[tuple[str, int], float, float]:
    """The messages in which a rank waits longest, the milliseconds of a step, and those of the mean
    step: over the steps with matched messages and those without messages."""
    names = {name for spans in one.waits.values() for name in spans}
    steps = [step for step in trace.steps if step.name in names or step.name not in one.steps]
    waits = {
        end: sum(ms_by_step(spans).values()) / len(steps)
        for end, spans in sorted(one.waits.items())
    }
    end = max(waits, key=waits.__getitem__)
    return end, waits[end], mean_ms(steps)


def sentences(found: Mapping[int, Receives], traces: Mapping[int, Trace]) -> list[str]:
    """Which ranks wait in messages, and in how many receives this is unknown."""
    lines = []
    for rank, one in sorted(found.items()):
        if not one.waits:
            continue
        (way, other), waits, step_ms = longest_wait(one, traces[rank])
        if waits > LATE * step_ms:
            what = f"{waits:.5g} ms of a {step_ms:.5g} ms step ({waits / step_ms:.1%})"
            lines.append(
                f"{traces[rank].label} waits {what} in messages {way} {traces[other].label}"
            )
    calls = sum(one.calls for one in found.values())
    if unknown := calls - sum(one.matched for one in found.values()):
        what = f"for which rank the ranks wait in {unknown} of {calls} calls of recv and sendrecv"
        why = "the traces do not contain or do not identify their sends"
        lines.append(f"{what} is unknown: {why}")
    return lines
