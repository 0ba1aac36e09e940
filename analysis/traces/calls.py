"""Match the collectives of several ranks, and find out which ranks wait for which.

No rank can leave an all-reduce before all ranks have arrived, and then all leave it at about the
same time. Therefore the waiting time of a rank is the length of its call minus that of the shortest
call, which belongs to the rank that arrived last. Only durations are compared, because the nodes do
not share a clock.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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


@dataclass
class Group:
    """A process group, as described by the traces."""

    name: str
    ranks: str  # `[0, 1]`; empty if unknown
    size: int | None  # number of ranks; None if unknown
    calls: dict[int, list[Call]]  # by rank
    steps: int  # number of steps that the traces of all these ranks contain
    comparable: bool  # whether all traces are known to be of the same group
    matched: dict[str, list[Matched]] = field(default_factory=dict)  # by operation
    remarks: list[str] = field(default_factory=list)

    @property
    def of_name(self) -> str:
        """The name as part of a sentence: ` of dp`."""
        return f" of {clean(self.name, 60)}" if self.name else ""

    def of(self, operation: str) -> dict[int, list[Call]]:
        """The calls of an operation, by rank."""
        return {
            rank: [call for call in calls if call.about.name == operation]
            for rank, calls in self.calls.items()
        }


def groups_of(traces: Mapping[int, Trace]) -> list[Group]:
    """The process groups in the traces, with their calls matched."""
    found = defaultdict[tuple[str, str], dict[int, list[Call]]](lambda: defaultdict(list))
    for rank, trace in traces.items():
        for step in trace.steps:
            for one in step.calls:
                if one.collective:
                    key = (one.collective.group, one.collective.ranks)
                    found[key][rank].append(Call(step.name, one))
    of_job = [group for trace in traces.values() for group in trace.groups if len(group) > 1]
    have_all = all(traces.keys() <= set(group) for group in set(of_job))
    sizes = {len(group) for group in of_job}
    groups = []
    for (name, ranks), calls in sorted(found.items()):
        names = [{step.name for step in traces[rank].steps} for rank in calls]
        steps = len(set.intersection(*names)) or min(map(len, names))
        known = {call.about.group_size for of_rank in calls.values() for call in of_rank} - {None}
        if not known and len(sizes) == 1 and not ranks:
            known = {*sizes}
        size = known.pop() if len(known) == 1 else None
        group = Group(name, ranks, size, dict(calls), steps, bool(ranks) or have_all)
        if group.comparable:
            match(group)
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


# -- waiting ---------------------------------------------------------------------------------------


Spans = defaultdict[str, list[Span]]  # by step, on the clock of the rank


@dataclass
class Waiting:
    """When a rank waits for other ranks, and when other ranks wait for it.

    Calls may overlap, as those of gloo's threads do. Time during which a rank waits in two calls
    counts once.
    """

    waits: Spans = field(default_factory=lambda: defaultdict(list))
    late: Spans = field(default_factory=lambda: defaultdict(list))
    where: Counter[str] = field(default_factory=Counter)  # lateness in ns, by operation and group


def waiting_in(group: Group) -> dict[int, Waiting]:
    """The waiting times in a group, by rank; empty if calls cannot be compared."""
    waiting: dict[int, Waiting] = {}
    for operation in SYNCHRONIZING:
        for calls in group.matched.get(operation, ()):
            if len(calls) < 2:
                continue
            lateness = lateness_by_rank({rank: call.us for rank, call in calls.items()})
            shortest = min(call.us for call in calls.values())
            for rank, call in calls.items():
                one, start = waiting.setdefault(rank, Waiting()), call.activity.start
                one.waits[call.step].append((start, start + call.us - shortest))
                one.late[call.step].append((start - lateness[rank], start))
                one.where[f"{operation}{group.of_name}"] += round(lateness[rank] * 1e3)
    return waiting


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
            for into, more in ((whole.waits, one.waits), (whole.late, one.late)):
                for step, spans in more.items():
                    into[step] += spans
            whole.where.update(one.where)
    return result


def sentence(
    late: Mapping[int, Mapping[str, float]],
    where: Mapping[int, Mapping[str, int]],
    lengths: Mapping[int, Mapping[str, float]],
    hosts: Mapping[int, str] | None = None,
) -> str:
    """Name the ranks for which the other ranks wait: longer than the share LATE of the mean step,
    and of most individual steps. In case of a tie, no rank is named.

    late: milliseconds that the other ranks wait for each rank, by step. where: its distribution
    over operations. lengths: milliseconds of each rank's steps. hosts: the known host names.
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

    def name(rank: int) -> str:
        host = (hosts or {}).get(rank)
        return f"rank {rank} on {clean(host, 60)}" if host else f"rank {rank}"

    def ms(rank: int) -> str:
        share = f"{cost[rank] / mean[rank]:.1%}"
        return f"{cost[rank]:.5g} ms of a {mean[rank]:.5g} ms step ({share})"

    def each(ranks: Sequence[int]) -> str:
        return cut([f"{ms(rank)} for {name(rank)}" for rank in ranks], 3)

    if not large:
        return f"no rank makes the other ranks wait for more than {LATE:.0%} of a step"
    named = [rank for rank in large if is_usually_late(rank)]
    if not named:
        times = f"in {late_steps(large[0])} of {len(lengths[large[0]])} steps"
        return f"no rank is late in most steps; the other ranks wait {each(large[:1])}, {times}"
    if 2 * len(named) > len(late):  # most ranks are late at some point: one must stand out
        first, second = named[:2]
        if cost[first] - cost[second] <= LATE * mean[first] or not is_usually_late(first, second):
            return f"no rank stands out: the other ranks wait {each(named)}"
        named = [first]
    if len(named) > 1:
        return f"the other ranks wait for {len(named)} ranks: {each(named)}"
    (rank,) = named
    most = max(where[rank], key=where[rank].__getitem__)
    times = f"for more than {LATE:.0%} in {late_steps(rank)} of {len(lengths[rank])} steps"
    return f"{name(rank)} makes the other ranks wait {ms(rank)}, {times}; mostly in {most}"


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
