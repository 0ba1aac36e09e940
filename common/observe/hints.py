"""What was uncertain in a run, why, and which flag helps. What is launch-bound or has two modes."""

import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from common.benchmark import Observer
from common.cli import TURN, cut
from common.cpu_load import Others
from common.environment import count_of, node_of_each, others_text
from common.report import Case, Estimate, show_seconds
from common.stats import autocorrelation_time, modes, time_of_iterations
from common.timing import MIN_SAMPLES

WIDE = 0.1  # an interval that reaches farther from its value, as a share of it, gets a hint
LAUNCH_BOUND = 0.9  # a case is launch-bound if launching takes more of the device's time
LAUNCH_HINT = (
    "launch-bound: the host takes over 90 % of the time to launch the kernels, so this measures "
    "Python; try a larger --batch-size, CUDA graphs (-G) or compile"
)


class Hints(Observer):
    """Lines below the row of a case that is launch-bound, or that has two modes; at the end what is
    uncertain and what helps."""

    def row(self, case: Case, seen: list[Any]) -> list[str]:
        share = launch_bound(case)
        return ([f"launch-bound {share:.0%}"] if share else []) + two_modes(case)

    def end(self, last_line: dict[str, Any]) -> list[str]:
        others: list[Others] = self.bench.load_of_others()
        last_line["others"] = others
        measured_on, args = self.bench.report.environment, self.bench.args
        passed = [case for case in self.bench.report.cases if not case.failed]
        busy = others_text(measured_on["hosts"], others)
        crowded = crowded_text(measured_on["ranks"], others, node_of_each(measured_on))
        lines = hints(passed, args, busy, crowded, bool(others))
        if any(launch_bound(case) for case in passed):
            lines.append(LAUNCH_HINT)
        return lines


def launch_bound(case: Case) -> float | None:
    """Launching over the device's time, where this is largest among the steps; None if it is no
    more than LAUNCH_BOUND."""
    share = max(case.metrics.get("launch_share", {}).values(), default=0.0)
    return float(share) if share > LAUNCH_BOUND else None


def two_modes(case: Case) -> list[str]:
    """A line if the step takes one of two times, such as 0.3 ms or 3.6 ms for a call that waits for
    a core: the median is the time of neither, or says nothing about the other."""
    both = modes(slowest_s(case))
    if case.failed or not both:
        return []
    shown = [f"{show_seconds(mode.time_s)} ({mode.share:.0%})" for mode in both]
    return [f"two modes: {', '.join(shown)}"]


def crowded_text(rows: Iterable[dict[str, Any]], loads: Sequence[Others], nodes: list[int]) -> str:
    """Where more ranks than cores are; "" if nowhere. rows: of the ranks. nodes: of each rank."""
    for node, load in enumerate(loads):
        ranks = nodes.count(node)
        if ranks > load.cores:
            host = [row["host"] for row in rows][nodes.index(node)]
            return f"{ranks} ranks share {load.cores} cores of {host}"
    return ""


def estimates_of(case: Case) -> Iterator[tuple[str, Estimate]]:
    """The estimated numbers of a case, in words: `exposed_s` is `exposed`, and so is `25MB bf16
    exposed_s` of one of several settings. Rates are left out: they follow from times."""
    for name, value in case.metrics.items():
        if isinstance(value, Estimate) and "_per_" not in name:
            yield name.rpartition(" ")[2].removesuffix("_s").replace("_", " "), value


def without_interval(case: Case) -> set[str]:
    return {name for name, number in estimates_of(case) if number.relative is None}


def with_wide_interval(case: Case) -> set[str]:
    """Those whose interval is wide. A difference that may be 0 is as small as it can be told."""
    wide = set()
    for name, number in estimates_of(case):
        if number.relative and number.relative > WIDE and not number.may_be(0):
            wide.add(name)
    return wide


def slowest_s(case: Case) -> list[float]:
    """The time of the step in each iteration."""
    if not case.samples_s.get("step"):
        return []
    return [float(x) for x in time_of_iterations(case.samples_s["step"], case.aligned)]


def timed_s(case: Case) -> float:
    """The seconds of all samples of the first row, the step's and the parts' together."""
    return sum(sum(rows[0]) for rows in case.samples_s.values() if rows)


def drifts(case: Case) -> bool:
    """Whether samples in a row are so alike that all count as fewer than MIN_SAMPLES."""
    samples = slowest_s(case)
    if len(samples) < MIN_SAMPLES:
        return False
    return len(samples) / autocorrelation_time(samples) < MIN_SAMPLES


def hints(
    cases: Sequence[Case], args: Any, busy: str, crowded: str, is_load_known: bool = True
) -> list[str]:
    """If intervals are missing or wide: of which numbers and cases, and a line for each cause that
    can be seen, with the flag that helps.

    cases: those that did not fail. busy, crowded: CPU use by other processes, and where ranks share
    cores, as text. is_load_known: whether CPU use by other processes was measured.
    """
    lacking = [case for case in cases if without_interval(case)]
    wide = [case for case in cases if with_wide_interval(case) and case not in lacking]
    doubtful = [*lacking, *wide]
    if not doubtful:
        return []
    lines = list_intervals("missing (-)", cases, without_interval)
    lines += list_intervals(f"wider than +-{WIDE:.0%}", cases, with_wide_interval)
    return lines + [f"  {cause}" for cause in causes(doubtful, args, busy, crowded, is_load_known)]


def list_intervals(
    what: str, cases: Sequence[Case], numbers_of: Callable[[Case], set[str]]
) -> list[str]:
    """[`95 % interval missing (-) in 2 of 3 cases: step (ddp eager, fsdp2 eager)`], or [] if there
    are none. numbers_of: the numbers of a case that have such an interval."""
    tables: dict[str, set[str]] = {}  # that have a row of this name
    for case in cases:
        tables.setdefault(case.name, set()).add(case.table)
    found: dict[str, list[str]] = {}  # by number: the cases
    for case in cases:
        is_unique = len(tables[case.name]) == 1  # in a run several tables may have such a row
        name = case.name if is_unique else f"{case.name} of {case.table.partition(',')[0]}"
        for number in sorted(numbers_of(case)):
            found.setdefault(number, []).append(name)
    if not found:
        return []
    count = sum(bool(numbers_of(case)) for case in cases)
    listed = "; ".join(f"{number} ({cut(names, 3)})" for number, names in found.items())
    return [f"95 % interval {what} in {count} of {count_of(len(cases), 'case')}: {listed}"]


def causes(
    doubtful: Sequence[Case], args: Any, busy: str, crowded: str, is_load_known: bool
) -> list[str]:
    """A line for each cause that can be seen, with what helps against it; if there is none, what
    often helps."""
    lines = []
    if crowded:
        lines.append(f"{crowded}: start fewer ranks")
    if busy:
        cure = "wait until they end, or compare by analysis/ab.py --interleave"
        lines.append(f"{busy}: {cure}")
    counts = [len(slowest_s(case)) for case in doubtful]
    drifting = sum(drifts(case) for case in doubtful)
    longer = flag_for_more(doubtful, args)
    if drifting:
        lines.append(f"the samples of {drifting} drift, so they count as fewer: {longer}")
    elif min(counts) < args.min_iters:
        lines.append(f"few samples, {min(counts)} in one of them: {longer}")
    if is_load_known:
        return lines or [f"no cause is seen; what often helps: {longer}"]
    by_ab = "ab.py records it" if os.environ.get(TURN) else "so it may be the cause"
    unknown = f"CPU use by other processes was not measured here; {by_ab}"
    return [*lines, unknown] if lines else [f"{unknown}; what often helps: {longer}"]


def flag_for_more(doubtful: Sequence[Case], args: Any) -> str:
    """The flag that gives such cases more samples: twice as many iterations, or four times as
    long as their samples took, since each block starts with an untimed iteration."""
    if args.iters:
        return f"--iters {2 * args.iters}"
    # of a case with several settings --max-seconds counts for each of them
    counts = [len(str(case.key.get("settings", "")).split(", ")) for case in doubtful]
    timed = [timed_s(case) / count for case, count in zip(doubtful, counts, strict=True)]
    seconds = 4 * max(args.max_seconds, *timed)
    return f"--max-seconds {math.ceil(seconds)}"
