"""How fast the collectives of a trace are, and how fast they are alone on the same machine.

time   = of the rank whose call is the shortest: it came last, so it does not wait
algbw  = bytes / time; bytes are the larger of what a rank sends and receives
busbw  = algbw * 2(n-1)/n for all_reduce; * (n-1)/n for all_gather, reduce_scatter, all_to_all,
         gather and scatter; * 1 for the others (nccl-tests' doc/PERFORMANCE.md)
alone  = what collectives.py has measured at these sizes, on as many ranks in the same layout
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from analysis.calls import MATCHED, Call, Group, members
from analysis.kineto import Trace
from common.cli import cut
from common.report import Estimate
from common.stats import Alone, Layout, layout_of, time_alone, total

ON_A_NODE = 8  # ranks in a row, if the traces do not name their hosts


@dataclass
class Row:
    """The calls of a collective on a process group, in the mean step."""

    group: Group
    operation: str
    calls: float
    size_bytes: float | None
    ms: float
    waiting: bool  # its time includes waiting for other ranks
    step_ms: float  # of the mean step
    alone: Estimate | None = None  # milliseconds of the same calls

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
        return self.ms / self.alone if self.alone else None

    @property
    def share(self) -> float:
        """Of the step. Calls that overlap count each."""
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

    seconds: float  # of the rank whose call is the shortest
    size_bytes: int | None
    dtype: str
    weight: float = 1.0  # below 1 for calls that each rank has by itself: the mean over the ranks
    alone: Estimate | None = None  # seconds
    dtype_alone: str = ""  # with which it was measured alone
    why: str = ""  # it cannot be compared


def rows_of(
    groups: Sequence[Group],
    traces: Mapping[int, Trace],
    alone: Alone | None = None,
    ranks_per_node: int | None = None,
) -> tuple[list[Row], list[str]]:
    """The collectives of all groups, and lines about them. alone: what to compare them with.

    Calls that nothing can be compared with are in a row of their own, and a line says why.
    """
    rows, lines, notes = list[Row](), list[str](), dict[str, None]()
    for group in groups:
        steps = [step for rank in group.calls for step in traces[rank].steps]
        step_ms = fmean(step.end - step.start for step in steps) / 1e3
        ranks = members(group, traces)
        layout, is_guess = layout_in(ranks, traces, ranks_per_node)
        if alone is not None and is_guess:
            what = f"the traces do not name all hosts: {ON_A_NODE} ranks in a row are a node"
            notes[f"{what}; --gpus-per-node overrides that"] = None
        has_all = bool(ranks) and set(ranks) <= set(group.calls)
        for operation in sorted(
            {call.about.name for of_rank in group.calls.values() for call in of_rank}
        ):
            samples = timed(group, operation)
            if alone is not None:
                for sample in samples:
                    compare(sample, alone, operation, layout)
            waiting = not has_all or operation not in MATCHED
            for is_compared in (True, False):
                part = [sample for sample in samples if bool(sample.alone) == is_compared]
                if part:
                    rows.append(row_of(group, operation, part, waiting, step_ms))
            for why, count in Counter(one.why for one in samples if one.why).items():
                what = f"{operation}{group.of_name}, {count} of {len(samples)} calls"
                lines.append(f"not compared: {what}: {why}")
            for one in samples:
                if one.alone and one.dtype not in ("", one.dtype_alone):
                    what = f"with {one.dtype_alone}, not with {one.dtype}"
                    notes[f"alone: {operation} was measured {what}"] = None
    return rows, [*lines, *notes, *about_waiting(rows)]


def about_waiting(rows: Sequence[Row]) -> list[str]:
    """Lines about times that include waiting for other ranks, and why."""
    lines = []
    for matched, why in (
        (True, "without the trace of each rank of a group"),
        (False, "which calls of the ranks belong together is not known"),
    ):
        of = [
            row.operation for row in rows if row.waiting and (row.operation in MATCHED) == matched
        ]
        if of:
            names = cut(list(dict.fromkeys(of)), 4)
            lines.append(f"{why}: times of {names} include waiting for other ranks")
    return lines


def timed(group: Group, operation: str) -> list[Sample]:
    """The calls of an operation whose time is known."""
    samples = []
    for matched in group.matched.get(operation, ()):
        shortest = min(matched.values(), key=lambda call: call.us)
        sizes = [size_of(call, group.size) for call in matched.values()]
        size = max((size for size in sizes if size is not None), default=None)
        samples.append(Sample(shortest.us / 1e6, size, shortest.about.dtype))
    if operation in group.matched:
        return samples
    for calls in group.of(operation).values():
        for call in calls:
            size = size_of(call, group.size)
            samples.append(Sample(call.us / 1e6, size, call.about.dtype, 1 / len(group.calls)))
    return samples


def size_of(call: Call, ranks: int | None) -> int | None:
    """The bytes of a call as nccl-tests counts them; None if they are not known."""
    about = call.about
    if about.size_bytes is None or not about.of_rank:
        return about.size_bytes
    return about.size_bytes * ranks if ranks else None


def row_of(
    group: Group, operation: str, samples: Sequence[Sample], waiting: bool, step_ms: float
) -> Row:
    """The sums of some calls, over the steps."""
    ms = math.fsum(one.seconds * one.weight for one in samples) * 1e3 / group.steps
    calls = math.fsum(one.weight for one in samples) / group.steps
    size = None
    if all(one.size_bytes for one in samples):
        size = math.fsum((one.size_bytes or 0) * one.weight for one in samples) / group.steps
    row = Row(group, operation, calls, size, ms, waiting, step_ms)
    if known := [one.alone * one.weight for one in samples if one.alone]:
        row.alone = total(known) * (1e3 / group.steps)
    return row


# -- what the machine does alone -------------------------------------------------------------------


def layout_in(
    ranks: Sequence[int], traces: Mapping[int, Trace], ranks_per_node: int | None
) -> tuple[Layout, bool]:
    """The layout of a group, and whether it is a guess."""
    hosts = [traces[rank].host if rank in traces else "" for rank in ranks]
    if ranks_per_node is None and all(hosts):
        return layout_of(hosts), False
    nodes = [rank // (ranks_per_node or ON_A_NODE) for rank in ranks]
    return layout_of(nodes), ranks_per_node is None


def compare(sample: Sample, alone: Alone, operation: str, layout: Layout) -> None:
    """Fill in the time of a call of this size by itself, or why it is not known. It is that of the
    same type if that was measured, else of another type."""
    if sample.size_bytes is None:
        sample.why = "the trace does not say their bytes"
        return
    if not layout:
        sample.why = "the trace does not say the ranks of the group"
        return
    try:
        found = time_alone(alone, operation, layout, sample.dtype, sample.size_bytes)
        sample.alone, sample.dtype_alone = found
    except ValueError as error:
        sample.why = str(error)


def sentence(rows: Sequence[Row]) -> str:
    """The collective that matters most: its time as a multiple of the time alone, times its share
    of the step."""
    compared = [row for row in rows if row.ratio]
    if not compared:
        return "no collective of these traces can be compared"

    def weight(row: Row) -> float:
        return row.ratio.value * row.share if row.ratio else 0.0

    row = max(compared, key=weight)
    assert row.ratio
    what = f"{row.operation}{row.group.of_name} matters most"
    waiting = " (with waiting for other ranks)" if row.waiting else ""
    ratio = f"{row.ratio.times()} what this machine needs for it alone{waiting}"
    return f"{what}: {ratio}; {row.share:.1%} of the step"
