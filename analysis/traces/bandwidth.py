"""The bandwidth of the collectives in a trace, compared with their isolated bandwidth.

time   = duration of the shortest call of any rank: that rank arrived last, so it does not wait;
         of a matched message: of the shorter one of its send and its receive
algbw  = bytes / time, where bytes is the larger of what a rank sends and receives
busbw  = algbw * 2(n-1)/n for all_reduce; * (n-1)/n for all_gather, reduce_scatter, all_to_all,
         gather and scatter; * 1 for other operations (nccl-tests' doc/PERFORMANCE.md)
alone  = time of the same calls in isolation, as measured by collectives.py at these sizes, on the
         same number of ranks in the same layout
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from analysis.traces.calls import MATCHED, Call, Group, members
from analysis.traces.kineto import Trace
from common.stats import Estimate
from harness.cli import cut
from readers.isolated import IsolatedTimes, Layout, isolated_time, layout_of, total

RANKS_PER_NODE = 8  # consecutive ranks on a node, if the traces do not name their hosts


@dataclass
class Row:
    """All calls of one kind of collective on a process group, per step (mean over steps)."""

    group: Group
    operation: str
    calls: float
    size_bytes: float | None
    ms: float
    waiting: bool  # whether `ms` includes waiting for other ranks
    step_ms: float  # length of the mean step
    alone: Estimate | None = None  # milliseconds of the same calls in isolation

    @property
    def algbw(self) -> float | None:
        """GB/s."""
        return self.size_bytes / self.ms / 1e6 if self.size_bytes and self.ms else None

    @property
    def busbw(self) -> float | None:
        if self.algbw is None or not self.group.size:
            return None
        return self.algbw * bus_factor(self.operation, self.group.size)

    @property
    def ratio(self) -> Estimate | None:
        """Time in the trace / time in isolation."""
        return self.ms / self.alone if self.alone else None

    @property
    def share(self) -> float:
        """Share of the step. Overlapping calls each count in full."""
        return self.ms / self.step_ms if self.step_ms else 0.0


def bus_factor(operation: str, ranks: int) -> float:
    """busbw / algbw."""
    without_own_part = (ranks - 1) / ranks
    if operation == "all_reduce":
        return 2 * without_own_part
    parts = ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")
    return without_own_part if operation in parts else 1.0


@dataclass
class Sample:
    """A call of a collective."""

    seconds: float  # time of the rank with the shortest call, if the calls are matched
    size_bytes: int | None
    dtype: str
    weight: float = 1.0  # below 1 if the calls of the ranks are not matched
    alone: Estimate | None = None  # seconds in isolation
    dtype_alone: str = ""  # the dtype with which that was measured
    why: str = ""  # why the call cannot be compared


def rows_of(
    groups: Sequence[Group],
    traces: Mapping[int, Trace],
    alone: IsolatedTimes | None = None,
    ranks_per_node: int | None = None,
) -> tuple[list[Row], list[str]]:
    """The collectives of all groups, and remarks on them.

    alone: times in isolation, in which case calls that cannot be compared are in separate rows, and
    a remark explains why. ranks_per_node: None to use the host names in the traces.
    """
    rows, lines, notes = list[Row](), list[str](), dict[str, None]()
    for group in groups:
        steps = [step for rank in group.calls for step in traces[rank].steps]
        step_ms = fmean(step.end - step.start for step in steps) / 1e3
        ranks = members(group, traces)
        layout, is_guess = layout_in(ranks, traces, ranks_per_node)
        if alone is not None and is_guess:
            what = f"{RANKS_PER_NODE} consecutive ranks are assumed to be a node"
            why = "the traces do not name all hosts"
            notes[f"{why}, so {what}; --gpus-per-node overrides this"] = None
        has_all = bool(ranks) and set(ranks) <= set(group.calls)
        ends = {*group.other_ends()}
        for operation in sorted(
            {call.about.name for of_rank in group.calls.values() for call in of_rank}
        ):
            samples = timed(group, operation, traces)
            if alone is not None:
                for sample in samples:
                    compare(sample, alone, operation, layout)
            of_all = (id(call.activity) for of in group.of(operation).values() for call in of)
            waiting = not has_all if operation in MATCHED else not ends.issuperset(of_all)
            for is_compared in (True, False):
                part = [sample for sample in samples if bool(sample.alone) == is_compared]
                if part:
                    rows.append(row_of(group, operation, part, waiting, step_ms))
            for why, count in Counter(one.why for one in samples if one.why).items():
                what = f"{operation}{group.of_name}, {count} of {len(samples)} calls"
                lines.append(f"not compared: {what}: {why}")
            for one in samples:
                if one.alone and one.dtype not in ("", one.dtype_alone):
                    what = f"with {one.dtype_alone} instead of {one.dtype}"
                    notes[f"alone: {operation} was measured {what}"] = None
    return rows, [*lines, *notes, *remarks_on_waiting(rows)]


def remarks_on_waiting(rows: Sequence[Row]) -> list[str]:
    """Remarks on times that include waiting for other ranks."""
    lines = []
    for matched, why in (
        (True, "because some ranks of a group have no trace"),
        (False, "which is known only for collectives and matched messages"),
    ):
        of = [
            row.operation for row in rows if row.waiting and (row.operation in MATCHED) == matched
        ]
        if of:
            names = cut(list(dict.fromkeys(of)), 4)
            lines.append(f"times of {names} include waiting for other ranks, {why}")
    return lines


def timed(group: Group, operation: str, traces: Mapping[int, Trace]) -> list[Sample]:
    """The calls of an operation, with their times."""
    samples = []
    for matched in group.matched.get(operation, ()):
        shortest = min(matched.values(), key=lambda call: call.us)
        sizes = [size_of(call, group.size) for call in matched.values()]
        size = max((size for size in sizes if size is not None), default=None)
        samples.append(Sample(shortest.us / 1e6, size, shortest.about.dtype))
    if operation in group.matched:
        return samples
    ends = group.other_ends()
    for rank, calls in group.of(operation).items():
        # all steps of the rank, also those that were not compared
        weight = group.steps / len(traces[rank].steps) / len(group.calls)
        for call in calls:
            size = size_of(call, group.size)
            us = min(call.us, ends.get(id(call.activity), call).us)
            samples.append(Sample(us / 1e6, size, call.about.dtype, weight))
    return samples


def size_of(call: Call, ranks: int | None) -> int | None:
    """The size of a call in bytes, as nccl-tests defines it; None if unknown."""
    about = call.about
    if about.size_bytes is None or not about.of_rank:
        return about.size_bytes
    return about.size_bytes * ranks if ranks else None


def row_of(
    group: Group, operation: str, samples: Sequence[Sample], waiting: bool, step_ms: float
) -> Row:
    """The sum over these calls, per step."""
    ms = math.fsum(one.seconds * one.weight for one in samples) * 1e3 / group.steps
    calls = math.fsum(one.weight for one in samples) / group.steps
    size = None
    if all(one.size_bytes for one in samples):
        size = math.fsum((one.size_bytes or 0) * one.weight for one in samples) / group.steps
    row = Row(group, operation, calls, size, ms, waiting, step_ms)
    if known := [one.alone * one.weight for one in samples if one.alone]:
        row.alone = total(known) * (1e3 / group.steps)
    return row


# -- times in isolation ----------------------------------------------------------------------------


def layout_in(
    ranks: Sequence[int], traces: Mapping[int, Trace], ranks_per_node: int | None
) -> tuple[Layout, bool]:
    """The layout of a group, and whether it is a guess."""
    hosts = [traces[rank].host if rank in traces else "" for rank in ranks]
    if ranks_per_node is None and all(hosts):
        return layout_of(hosts), False
    nodes = [rank // (ranks_per_node or RANKS_PER_NODE) for rank in ranks]
    return layout_of(nodes), ranks_per_node is None


def compare(sample: Sample, alone: IsolatedTimes, operation: str, layout: Layout) -> None:
    """Set the time in isolation of a call of this size, or the reason why it is unknown.

    A time that was measured with the same dtype is preferred.
    """
    if sample.size_bytes is None:
        sample.why = "the trace does not contain their sizes"
        return
    if not layout:
        sample.why = "the trace does not contain the ranks of the group"
        return
    try:
        found = isolated_time(alone, operation, layout, sample.dtype, sample.size_bytes)
        sample.alone, sample.dtype_alone = found
    except ValueError as error:
        sample.why = str(error)


def sentence(rows: Sequence[Row]) -> str:
    """Name the collective that matters most: the one with the largest product of the ratio to its
    isolated time and its share of the step."""
    compared = [row for row in rows if row.ratio]
    if not compared:
        return "no collective of these traces can be compared"

    def weight(row: Row) -> float:
        return row.ratio.value * row.share if row.ratio else 0.0

    row = max(compared, key=weight)
    assert row.ratio
    what = f"{row.operation}{row.group.of_name} matters most"
    waiting = " (including waiting for other ranks)" if row.waiting else ""
    ratio = f"it takes {row.ratio.as_factor()} as long as in isolation{waiting}"
    return f"{what}: {ratio}, and {row.share:.1%} of the step"
