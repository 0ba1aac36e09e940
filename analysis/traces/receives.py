"""The time that each stage of a pipeline spends in receives, and for which rank it waits.

A message ends at about the same time on both ranks. Therefore the time for which a rank waits in a
receive is its length minus that of the send, which belongs to the rank that arrived later.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from analysis.traces.calls import LATE, Call, Group, Spans, members, ms_by_step, spans_by_step
from analysis.traces.kineto import Trace

RECEIVES = ("recv", "sendrecv")  # a kernel SendRecv may also be an all-to-all


@dataclass
class Receives:
    """The receives of a rank."""

    calls: int = 0
    spans: Spans = field(default_factory=spans_by_step)
    waits: dict[int, Spans] = field(default_factory=dict)  # by the rank that sends
    matched: int = 0  # number of calls whose send was found


def receives_of(groups: Sequence[Group], traces: Mapping[int, Trace]) -> dict[int, Receives]:
    """The receives of each rank that sends or receives messages; {} without a receive, and for a
    single trace also if it only has kernels that may be an all-to-all."""
    found: dict[int, Receives] = {}
    for group in groups:
        ranks = members(group, traces)
        for rank, calls in group.calls.items():
            own = [call for call in calls if call.about.name in RECEIVES]
            if own or any(call.about.name == "send" for call in calls):
                one = found.setdefault(rank, Receives())
                one.calls += len(own)
                for call in own:
                    span = (call.activity.start, call.activity.end)
                    one.spans[call.step].append(span)
        for source, rank, sends, receives in links(group, ranks):
            for sent, received in matched(sends, receives):
                one, start = found[rank], received.activity.start
                one.matched += 1
                waits = one.waits.setdefault(source, spans_by_step())
                waits[received.step].append((start, start + max(0, received.us - sent.us)))
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
        if rank in group.calls:
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
        step_ms = sum(step.end - step.start for step in steps) / len(steps) / 1e3
        row = [rank, f"{one.calls / len(steps):.5g}", f"{ms:.5g}", f"{100 * ms / step_ms:.1f}"]
        if one.matched:
            source, waits = longest_wait(one, traces[rank])
            rows.append([*row, f"{waits:.5g}", source if waits else "-"])
        else:
            rows.append([*row, "-", "-"])
    return rows


def longest_wait(one: Receives, trace: Trace) -> tuple[int, float]:
    """The rank for which another one waits longest, and the milliseconds of a step."""
    waits = {
        source: sum(ms_by_step(spans).values()) / len(trace.steps)
        for source, spans in one.waits.items()
    }
    source = max(waits, key=waits.__getitem__)
    return source, waits[source]


def sentences(found: Mapping[int, Receives], traces: Mapping[int, Trace]) -> list[str]:
    """Which ranks wait in receives, or that this is unknown."""
    lines = []
    for rank, one in sorted(found.items()):
        steps = traces[rank].steps
        step_ms = sum(step.end - step.start for step in steps) / len(steps) / 1e3
        if not one.matched:
            continue
        source, waits = longest_wait(one, traces[rank])
        if waits > LATE * step_ms:
            sender = traces[source].label if source in traces else f"rank {source}"
            what = f"{waits:.5g} ms of a {step_ms:.5g} ms step ({waits / step_ms:.1%})"
            lines.append(f"{traces[rank].label} waits {what} in messages from {sender}")
    if any(one.calls and not one.matched for one in found.values()):
        what = "for which rank the ranks wait in recv and sendrecv is unknown"
        lines.append(f"{what}: the traces do not state who sends")
    return lines
