"""Match the collectives of several ranks, and find out which ranks wait for which.

No rank can leave an all-reduce before all ranks have arrived, and then all leave it at about the
same time. Therefore the waiting time of a rank is the length of its call minus that of the shortest
call, which belongs to the rank that arrived last. Only durations are compared, because the nodes do
not share a clock.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from statistics import fmean
from typing import Any, NamedTuple

from analysis.show import clean
from analysis.traces.collective import Collective
from analysis.traces.kineto import Activity, Span, Trace, union
from harness.cli import cut

# Operations in which no rank can finish before the last rank has started
SYNCHRONIZING = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
MATCHED = (*SYNCHRONIZING, "broadcast", "reduce", "gather", "scatter")  # called by every rank
LATE = 0.05  # share of a step: a rank is named if the other ranks wait longer than this for it
MANY = 3  # steps: with fewer, nothing is said of most steps
SEQ = "torch 2.12 and later number them (Seq)"


class Call(NamedTuple):
    """A call of a collective on one rank, within a step."""

    step: str  # the name of the step
    activity: Activity

    @property
    def about(self) -> Collective:
        collective = self.activity.collective
        assert collective is not None  # true for each call of a Group
        return collective

    @property
    def us(self) -> float:
        """The duration in microseconds."""
        return self.activity.end - self.activity.start


Matched = dict[int, Call]  # one collective: rank -> call


class Message(NamedTuple):
    """A send and its receive."""

    source: int  # the rank that sends
    rank: int  # the rank that receives
    sent: Call
    received: Call


@dataclass
class Group:
    """A process group, as described by the traces."""

    name: str
    ranks: str  # `[0, 1]`; empty if unknown
    size: int | None  # number of ranks; None if unknown
    calls: dict[int, list[Call]]  # by rank
    steps: int  # number of steps that were compared, or else that all these traces contain
    comparable: bool  # whether all traces are known to be of the same group
    compared: dict[int, list[str]]  # by rank: the steps that were compared, if any; see `match`
    matched: dict[str, list[Matched]] = field(default_factory=dict)  # by operation
    messages: list[Message] = field(default_factory=list)  # see `receives.match`
    remarks: list[str] = field(default_factory=list)

    @property
    def of_name(self) -> str:
        """The name as part of a sentence: ` of dp`."""
        return f" of {clean(self.name, 60)}" if self.name else ""

    def all_calls(self) -> Iterator[Call]:
        return chain.from_iterable(self.calls.values())

    def of(self, operation: str) -> dict[int, list[Call]]:
        """The calls of an operation, by rank."""
        return {
            rank: [call for call in calls if call.about.name == operation]
            for rank, calls in self.calls.items()
        }

    def other_ends(self) -> dict[int, Call]:
        """The receive of each matched send and the send of each matched receive, by the id of its
        activity."""
        pairs = [(one.sent, one.received) for one in self.messages]
        return {id(a.activity): b for x, y in pairs for a, b in ((x, y), (y, x))}


def groups_of(traces: Mapping[int, Trace]) -> list[Group]:
    """The process groups in the traces, with their calls matched."""
    found = defaultdict[tuple[str, str], dict[int, list[Call]]](lambda: defaultdict(list))
    for rank, trace in traces.items():
        for step in trace.steps:
            for one in step.calls:
                if one.collective:
                    key = (one.collective.group, one.collective.ranks)
                    found[key][rank].append(Call(step.name, one))
    own = [[group for group in trace.groups if len(group) > 1] for trace in traces.values()]
    # If all groups of one rank contain all traced ranks, so do the calls of that rank. Other ranks
    # may have made calls of other groups as well: `match` requires equal numbers.
    sure = [of_rank for of_rank in own if all(traces.keys() <= set(group) for group in of_rank)]
    have_all = bool(sure)
    groups = []
    for (name, ranks), calls in sorted(found.items()):
        names = [{step.name for step in traces[rank].steps} for rank in calls]
        steps = len(set.intersection(*names)) or min(map(len, names))
        known = {call.about.group_size for of_rank in calls.values() for call in of_rank} - {None}
        even = len({len(of_rank) for of_rank in calls.values()}) == 1
        sizes = {len(group) for of_rank in (sure if sure and even else own) for group in of_rank}
        if not known and len(sizes) == 1 and not ranks:
            known = {*sizes}
        size = known.pop() if len(known) == 1 else None
        group = Group(name, ranks, size, dict(calls), steps, bool(ranks) or have_all, {})
        if group.comparable:
            match(group)
            group.compared = compared_steps(group, traces)
            group.steps = min(map(len, group.compared.values())) or steps
        groups.append(group)
    return groups


# -- matching calls --------------------------------------------------------------------------------


def match(group: Group) -> None:
    """Match the calls of all ranks that belong to the same collective. Adds remarks on other calls.

    Calls are matched by `Seq` and `Comms Id` if the traces contain these. Otherwise they are
    matched by their order within a step, provided that all ranks have the same number of calls.
    """
    operations = {call.about.name for calls in group.calls.values() for call in calls}
    unmatched, uneven = 0, Counter[str]()  # calls, and steps of each operation
    for operation in sorted(operations & set(MATCHED)):
        of_rank = group.of(operation)
        numbered = all(call.about.call for calls in of_rank.values() for call in calls)
        places = defaultdict[Any, dict[int, list[Call]]](lambda: defaultdict(list))
        for rank, calls in of_rank.items():
            for call in calls:
                places[call.about.call if numbered else call.step][rank].append(call)
        matched: list[Matched] = []
        for by_rank in places.values():
            if len(by_rank) < len(group.calls):
                unmatched += max(map(len, by_rank.values()))
            elif len({len(calls) for calls in by_rank.values()}) > 1:
                uneven[operation] += 1
            else:
                matched += pair(by_rank)
        group.matched[operation] = matched
    if unmatched:
        count = "1 call" if unmatched == 1 else f"{unmatched} calls"
        what = f"{count}{group.of_name} that some traces do not contain"
        group.remarks.append(f"left out {what}")
    for operation, count_of_steps in uneven.items():
        what = f"{operation}{group.of_name} in {count_of_steps} steps"
        why = "the ranks have different numbers of calls"
        group.remarks.append(f"left out {what}: {why}; {SEQ}")


def pair(by_rank: Mapping[int, Sequence[Call]]) -> Iterator[Matched]:
    """Match the calls of each rank in order; all ranks have the same number of calls.

    If the sizes are the same on all ranks, calls are matched by size first, because gloo's threads
    may run them in a different order on each rank.
    """
    sizes = [Counter(call.about.size_bytes for call in calls) for calls in by_rank.values()]
    ordered = {}
    for rank, calls in by_rank.items():
        alike = all(size == sizes[0] for size in sizes)
        by_size = sorted(calls, key=lambda call: call.about.size_bytes or 0)  # a stable sort
        ordered[rank] = by_size if alike else calls
    for calls in zip(*ordered.values(), strict=True):
        yield dict(zip(ordered, calls, strict=True))


def compared_steps(group: Group, traces: Mapping[int, Trace]) -> dict[int, list[str]]:
    """The steps of each rank in which its calls are compared with those of the other ranks.

    These are the steps with matched calls, and those without calls that all traces contain.
    """
    common = set.intersection(*({step.name for step in traces[rank].steps} for rank in group.calls))
    compared = {}
    for rank, calls in group.calls.items():
        of_all = {call.step for call in calls if call.about.name in MATCHED}
        found = [every for matched in group.matched.values() for every in matched]
        matched = {calls_of[rank].step for calls_of in found if rank in calls_of}
        names = [step.name for step in traces[rank].steps]
        compared[rank] = [x for x in names if x in matched or (x in common and x not in of_all)]
    return compared


# -- waiting ---------------------------------------------------------------------------------------


Spans = defaultdict[str, list[Span]]  # by step, on the clock of the rank


def spans_by_step() -> Spans:
    return defaultdict(list)


@dataclass
class Waiting:
    """When a rank waits for other ranks, and when other ranks wait for it.

    Calls may overlap, as those of gloo's threads do. Time during which a rank waits in two calls
    counts once.
    """

    waits: Spans = field(default_factory=spans_by_step)
    late: Spans = field(default_factory=spans_by_step)
    later: Spans = field(default_factory=spans_by_step)  # `late` without the first call of a group
    first: set[str] = field(default_factory=set)  # the steps of these first calls
    steps: dict[str, None] = field(default_factory=dict)  # those that were compared, in order
    where: Counter[str] = field(default_factory=Counter)  # lateness in ns, by operation and group


def waiting_in(group: Group) -> dict[int, Waiting]:
    """The waiting times in a group, by rank; empty if calls cannot be compared."""
    compared = compared_calls(group)
    first: dict[int, float] = {}  # by rank: start of its first call
    for _, calls in compared:
        for rank, call in calls.items():
            first[rank] = min(call.activity.start, first.get(rank, call.activity.start))
    waiting = {rank: Waiting(steps=dict.fromkeys(group.compared[rank])) for rank in first}
    for operation, calls in compared:
        lateness = lateness_by_rank({rank: call.us for rank, call in calls.items()})
        shortest = min(call.us for call in calls.values())
        is_first = any(call.activity.start == first[rank] for rank, call in calls.items())
        for rank, call in calls.items():
            one, start = waiting[rank], call.activity.start
            one.waits[call.step].append((start, start + call.us - shortest))
            one.late[call.step].append((start - lateness[rank], start))
            if is_first:
                one.first.add(call.step)
            else:
                one.later[call.step].append((start - lateness[rank], start))
            one.where[f"{operation}{group.of_name}"] += round(lateness[rank] * 1e3)
    return waiting


def compared_calls(group: Group) -> list[tuple[str, Matched]]:
    """The calls whose lengths show which rank waits, with their operation."""
    every = ((name, calls) for name in SYNCHRONIZING for calls in group.matched.get(name, ()))
    return [(name, calls) for name, calls in every if len(calls) > 1]


def ms_by_step(spans: Mapping[str, Sequence[Span]]) -> dict[str, float]:
    """The milliseconds covered by the spans of each step."""
    return {
        step: sum(end - start for start, end in union(of_step)) / 1e3
        for step, of_step in spans.items()
    }


def lateness_by_rank(lengths: Mapping[int, float]) -> dict[int, float]:
    """How long the other ranks wait for each rank in a collective: the median over the other ranks.

    lengths: duration of each rank's call. For an even number of other ranks, this is the lower
    median: with the upper one, a single early rank would make all other ranks appear late.
    """
    ordered = sorted(lengths.values())
    middle = (len(ordered) - 2) // 2
    late = {}
    for rank, length in lengths.items():
        # the median of the other ranks, without sorting them for each rank
        of_others = ordered[middle + 1 if length <= ordered[middle] else middle]
        late[rank] = max(0.0, of_others - length)
    return late


def total(waiting: Sequence[dict[int, Waiting]]) -> dict[int, Waiting]:
    """The waiting times of all groups together, by rank."""
    result: dict[int, Waiting] = {}
    for of_group in waiting:
        for rank, one in of_group.items():
            whole = result.setdefault(rank, Waiting())
            parts = ((whole.waits, one.waits), (whole.late, one.late), (whole.later, one.later))
            for into, more in parts:
                for step, spans in more.items():
                    into[step] += spans
            whole.first |= one.first
            whole.steps |= one.steps
            whole.where.update(one.where)
    return result


Ms = Mapping[int, Mapping[str, float]]  # milliseconds by rank and step


def without_start(
    late: Ms, later: Ms, first: Mapping[int, set[str]], lengths: Ms
) -> tuple[Ms, Ms, int | None]:
    """Leave out the first calls if a rank is late in these only, because profilers do not start at
    the same time on all ranks.

    late, lengths: see `sentence`. later: `late` without the first calls. first: the steps of these.
    Returns `late`, `lengths`, and the rank that is late at the start; None if nothing is left out.
    The steps of the first calls are left out, or, if there are no others, only the first calls.
    """
    excess: dict[int, float] = {}
    for rank, own in lengths.items():
        at_start = max((late[rank].get(step, 0) for step in first[rank]), default=0)
        margin = LATE * max(own.values(), default=0)
        others = [late[rank].get(step, 0) for step in own if step not in first[rank]]
        rest = max(others or [later[rank].get(step, 0) for step in own], default=0)
        if at_start > margin and (at_start - rest > margin if others else rest <= margin):
            excess[rank] = at_start - rest
    if not excess:
        return late, lengths, None
    if all(set(own) - first[rank] for rank, own in lengths.items()):
        later = late
        lengths = {
            rank: {step: ms for step, ms in own.items() if step not in first[rank]}
            for rank, own in lengths.items()
        }
    kept = {rank: {step: later[rank].get(step, 0) for step in own} for rank, own in lengths.items()}
    return kept, lengths, max(excess, key=excess.__getitem__)


def sentence(
    late: Ms,
    where: Mapping[int, Mapping[str, int]],
    lengths: Ms,
    labels: Mapping[int, str],
    compared: str = "",
) -> str:
    """Name the ranks for which the other ranks wait: longer than the share LATE of the mean step,
    and of most individual steps. In case of a tie, no rank is named.

    late: milliseconds that the other ranks wait for each rank, by step. where: its distribution
    over operations. lengths: milliseconds of the steps that were compared, by rank. labels: words
    for each rank. compared: the calls that were compared, in words, unless nearly all were.
    """
    mean = {rank: fmean(lengths[rank].values()) for rank in late}
    cost = {rank: sum(by_step.values()) / len(lengths[rank]) for rank, by_step in late.items()}
    large = [rank for rank in late if cost[rank] > LATE * mean[rank]]
    large.sort(key=lambda rank: -cost[rank])

    def late_steps(rank: int, other: int | None = None) -> int:
        """The number of steps in which a rank is late, or later than another rank."""
        margins = {step: LATE * length for step, length in lengths[rank].items()}
        than = {} if other is None else late[other]
        own = late[rank]
        return sum(own.get(step, 0) - than.get(step, 0) > ms for step, ms in margins.items())

    def is_usually_late(rank: int, other: int | None = None) -> bool:
        return 2 * late_steps(rank, other) > len(lengths[rank])

    def times(rank: int) -> str:
        count = len(lengths[rank])
        return f"in {late_steps(rank)} of {count} step{'s' * (count > 1)}"

    def ms(rank: int) -> str:
        if cost[rank] > mean[rank]:  # calls of other threads may end after the step
            return f"{cost[rank]:.5g} ms, longer than a {mean[rank]:.5g} ms step"
        share = f"{cost[rank] / mean[rank]:.1%}"
        return f"{cost[rank]:.5g} ms of a {mean[rank]:.5g} ms step ({share})"

    def each(ranks: Sequence[int]) -> str:
        return cut([f"{ms(rank)} for {labels[rank]}" for rank in ranks], 3)

    if not large:
        return f"no rank makes the other ranks wait for more than {LATE:.0%} of a step{compared}"
    named = [rank for rank in large if is_usually_late(rank)]
    if not named:
        wait = f"the other ranks wait {each(large[:1])}, {times(large[0])}"
        if len(lengths[large[0]]) < MANY:
            return f"{wait}: too few steps to name a rank"
        return f"no rank is late in most steps; {wait}"
    if 2 * len(named) > len(late):  # most ranks are late at some point: one must stand out
        first, second = named[:2]
        if cost[first] - cost[second] <= LATE * mean[first] or not is_usually_late(first, second):
            return f"no rank stands out: the other ranks wait {each(named)}"
        named = [first]
    if len(named) > 1:
        return f"the other ranks wait for {len(named)} ranks: {each(named)}"
    (rank,) = named
    most = max(where[rank], key=where[rank].__getitem__)
    often = f"for more than {LATE:.0%} {times(rank)}"
    return f"{labels[rank]} makes the other ranks wait {ms(rank)}, {often}; mostly in {most}"


def conclude(
    groups: Sequence[Group], waiting: Sequence[dict[int, Waiting]], traces: Mapping[int, Trace]
) -> list[str]:
    """Which rank the other ranks wait for in collectives, in words, and what could not be compared.
    `receives.sentences` reports waits in matched messages."""
    together = {rank: one for rank, one in total(waiting).items() if one.steps}
    labels = {rank: trace.label for rank, trace in traces.items()}
    part, others = share_compared(groups, traces)
    messages = any(group.messages for group in groups)
    kind = "in collectives, " if messages else ""
    if not together:
        if len(traces) < 2 or not others:
            return []
        unknown = "" if messages else "which ranks wait is unknown; "
        return [f"{unknown}not compared between ranks: {others}"]
    longest: dict[str, float] = {}  # of all ranks: the ranks that wait have the longer steps
    for rank in together:
        for step in traces[rank].steps:
            ms = (step.end - step.start) / 1e3
            longest[step.name] = max(ms, longest.get(step.name, 0))
    lengths: Ms = {rank: {x: longest[x] for x in one.steps} for rank, one in together.items()}
    late: Ms = {rank: ms_by_step(one.late) for rank, one in together.items()}
    later: Ms = {rank: ms_by_step(one.later) for rank, one in together.items()}
    first = {rank: one.first for rank, one in together.items()}
    where = {rank: one.where for rank, one in together.items()}
    kept, left, early = without_start(late, later, first, lengths)
    lines = []
    if early is not None:
        at_start = max(late[early].get(step, 0) for step in first[early])
        what = f"the other ranks wait {at_start:.5g} ms for {labels[early]}"
        first_calls = "left out the first collectives of the traces, where profilers start"
        lines.append(f"{first_calls}: {what} there")
        if not any(one.later for one in together.values()):
            unknown = f"{kind}which rank is late is unknown: no other calls could be compared"
            return [*lines, unknown]
    compared = f" in the calls that were compared ({part:.1%} of a step); not compared: {others}"
    answer = sentence(kept, where, left, labels, compared if others else "")
    if others and compared not in answer:
        lines.append(f"not compared between ranks: {others}")
    return [*lines, kind + answer]


def share_compared(groups: Sequence[Group], traces: Mapping[int, Trace]) -> tuple[float, str]:
    """The share of a step in collectives that show which rank waits, and the other operations,
    except matched messages, that take more than LATE of a step on any rank: `sendrecv (38.3% of a
    step)`. Shares are means over the ranks; the largest one is added if it is larger by LATE."""
    compared = {
        id(call.activity)
        for group in groups
        for _, calls in compared_calls(group)
        for call in calls.values()
    }
    messages = {end for group in groups for end in group.other_ends()}
    shares = defaultdict[str, dict[int, float]](dict)  # by operation and rank
    for rank, trace in traces.items():
        names = {name for group in groups for name in group.compared.get(rank, ())}
        steps = [step for step in trace.steps if step.name in names] or trace.steps
        spans = defaultdict[str, list[Span]](list)
        for one in (x for step in steps for x in step.calls if id(x) not in messages):
            name = one.collective.name if one.collective else one.name
            spans["" if id(one) in compared else name].append((one.start, one.end))
        length = sum(step.end - step.start for step in steps)
        for name, of_name in spans.items():
            shares[name][rank] = sum(end - start for start, end in union(of_name)) / length
    mean = {name: sum(by_rank.values()) / len(traces) for name, by_rank in shares.items()}
    part = mean.pop("", 0.0)
    large = [name for name in mean if max(shares[name].values()) > LATE]
    large.sort(key=lambda name: -mean[name])
    words = []
    for name in large:
        most = max(shares[name], key=shares[name].__getitem__)
        share = f"{mean[name]:.1%} of a step"
        if shares[name][most] - mean[name] > LATE:
            share = f"on average {share}, {shares[name][most]:.1%} on {traces[most].label}"
        words.append(f"{clean(name, 60)} ({share})")
    return part, cut(words, 3)


# -- ranks of a group ------------------------------------------------------------------------------


def members(group: Group, traces: Mapping[int, Trace]) -> tuple[int, ...]:
    """The ranks of a group; () if unknown. torch abbreviates long lists."""
    words = [word.strip() for word in group.ranks.strip("[]").split(",")]
    if group.ranks and all(word.isdecimal() for word in words):
        return tuple(map(int, words))
    known = {ranks for rank in group.calls for ranks in traces[rank].groups if len(ranks) > 1}
    fit = [ranks for ranks in known if set(group.calls) <= set(ranks)]
    fit = [ranks for ranks in fit if group.size in (None, len(ranks))]
    return fit[0] if len(fit) == 1 else ()
