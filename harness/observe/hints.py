"""Hints: a possible cause of missing and wide intervals and the flag that helps, launch-bound
cases, and steps with two modes."""

import os
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from common.stats import (
    Estimate,
    autocorrelation_time,
    iteration_times,
    mean_time,
    show_seconds,
    significant,
)
from common.timing import MIN_SAMPLES
from harness.benchmark import Observer, flag_for_more
from harness.cli import TURN
from harness.cpu_load import Others
from harness.environment import count_of, node_of_each, others_text
from harness.exits import as_started
from harness.report import Case

WIDE = 0.1  # an interval that extends further from its value, relative to it, gets a hint
MIN_MODE_RATIO = 2.0  # minimum ratio of the slow mode's time to that of the fast mode
MIN_MODE_SAMPLES = 5  # of each mode
MIN_LONGER = 1.05  # a line is printed if mean and typical time differ by a larger factor
LAUNCH_BOUND = 0.9  # a case is launch-bound if launching takes a larger share of the device's time
LAUNCH_HINT = (
    "launch-bound: launching the kernels takes the host over 90% of the time, so this measures "
    "Python; try larger batches or messages, CUDA graphs, or torch.compile"
)


class Hints(Observer):
    """Adds lines below the row of a case that is launch-bound or has two modes, and at the end
    hints on uncertain results."""

    def row(self, case: Case, seen: list[Any]) -> list[str]:
        if case.failed:
            return []  # its row has no times
        share, table = launch_bound(case), self.bench.table
        lines = [f"launch-bound {share:.0%}"] if share else []
        rows = table.rows_of(case) if table else [case]
        for row in rows:  # one for each setting
            begin = f"{row.name}: " if len(rows) > 1 else ""
            lines += [begin + line for line in two_modes(row)]
        return lines

    def end(self, last_line: dict[str, Any]) -> list[str]:
        others = self.bench.load_of_others()
        measured_on, args = self.bench.report.environment, self.bench.args
        # the load of this run does not explain times that an earlier run measured
        report = self.bench.report
        passed = [case for case in report.cases if not (case.failed or report.is_earlier(case))]
        busy = others_text(measured_on["hosts"], others)
        crowded = crowded_text(measured_on["ranks"], others, node_of_each(measured_on))
        lines = hints(passed, args, busy, crowded, bool(others))
        if any(launch_bound(case) for case in passed):
            lines.append(LAUNCH_HINT)
        return lines


def launch_bound(case: Case) -> float | None:
    """Return the launch time over the device's time of the step with the largest share; None if it
    is at most LAUNCH_BOUND."""
    share = max(case.metrics.get("launch_share", {}).values(), default=0.0)
    return float(share) if share > LAUNCH_BOUND else None


def modes(samples: ArrayLike) -> list[tuple[float, float]]:
    """Return the fast and the slow mode of times [n] in seconds, each as the median of its samples
    and their share of all samples; [] if there is a single mode.

    The logarithms are split where the variance between the two sides is largest (Otsu 1979, IEEE
    Trans. SMC 9:62), with at least a tenth of the samples on each side. The sides are modes if
    their medians differ by a factor of MIN_MODE_RATIO or more and few samples are in the middle
    third between them. A single mode has no such valley, however wide or skewed it is.
    """
    x = np.sort(np.log(np.maximum(samples, 1e-9)))
    n = len(x)
    least = max(MIN_MODE_SAMPLES, -(-n // 10))
    if n < 2 * least:
        return []
    cuts = np.arange(least, n - least + 1)  # number of samples on the fast side
    sums = np.cumsum(x)[cuts - 1]
    means_apart = (x.sum() - sums) / (n - cuts) - sums / cuts
    cut = int(cuts[np.argmax(cuts * (n - cuts) * means_apart**2)])
    fast, slow = float(np.median(x[:cut])), float(np.median(x[cut:]))
    third = (slow - fast) / 3
    if 3 * third < np.log(MIN_MODE_RATIO):
        return []

    def near(center: float) -> int:
        return int(np.sum(np.abs(x - center) <= third / 2))

    if min(near(fast), near(slow)) < MIN_MODE_SAMPLES + 3 * near((fast + slow) / 2):
        return []
    return [(float(np.exp(fast)), cut / n), (float(np.exp(slow)), 1 - cut / n)]


def two_modes(case: Case) -> list[str]:
    """Return a line if the step has two modes, such as 0.3 ms, and 3.6 ms for a call that waits for
    a core, or if for another reason its time on average is not what the median says: some steps
    stall, there are three modes, or the slowest rank differs from step to step. A rate that is
    derived from the median is then none at which the model was trained: the line adds the rate over
    all iterations."""
    times_s = slowest_s(case)
    both = modes(times_s)
    lines = [", ".join(f"{show_seconds(x)} ({share:.0%})" for x, share in both)] if both else []
    lines = [f"two modes: {line}" for line in lines]
    rate, step = (case.metrics.get(name) for name in ("samples_per_s", "step_s"))
    if len(times_s) and isinstance(rate, Estimate) and isinstance(step, Estimate):
        longer = mean_time(case.samples_s["step"]) / step.value
        overall = rate.value / longer
        low, high = rate.low or rate.value, rate.high or rate.value
        slower, faster = rate.value / MIN_LONGER, rate.value * MIN_LONGER
        if both or not min(low, slower) <= overall <= max(high, faster):
            lines = lines or [f"on average a step takes {longer:.2f} times this long"]
            lines[0] += f"; over all iterations {significant(overall)} samples/s"
    return lines


def crowded_text(rows: Iterable[dict[str, Any]], loads: Sequence[Others], nodes: list[int]) -> str:
    """Name the first node with more ranks than cores; "" if there is none. rows, nodes: of the
    ranks. loads: of the nodes."""
    for node, load in enumerate(loads):
        ranks = nodes.count(node)
        if ranks > load.cores:
            host = [row["host"] for row in rows][nodes.index(node)]
            return f"{ranks} ranks share {load.cores} cores of {host}"
    return ""


def is_doubtful(case: Case) -> bool:
    """Whether an estimate has no interval, or one wider than WIDE. Rates follow from times, and
    relative to a difference that may be 0, any interval is wide: these do not count."""
    metrics = {name: x for name, x in case.metrics.items() if isinstance(x, Estimate)}
    counted = [x for name, x in metrics.items() if "_per_" not in name]
    return any(x.relative is None or (x.relative > WIDE and not x.may_be(0)) for x in counted)


def slowest_s(case: Case) -> list[float]:
    """Return the time of the step in each iteration."""
    if not case.samples_s.get("step"):
        return []
    return [float(x) for x in iteration_times(case.samples_s["step"], case.aligned)]


def drifts(case: Case) -> bool:
    """Whether the samples are so correlated that they count as fewer than MIN_SAMPLES."""
    samples = slowest_s(case)
    if len(samples) < MIN_SAMPLES:
        return False
    return len(samples) / autocorrelation_time(samples) < MIN_SAMPLES


def hints(
    cases: Sequence[Case], args: Any, busy: str, crowded: str, is_load_known: bool = True
) -> list[str]:
    """Return a line on missing and wide intervals: in how many cases, a possible cause, the remedy.

    cases: those that did not fail. busy, crowded: CPU use by other processes, and nodes with more
    ranks than cores, as text. is_load_known: whether CPU use by other processes was measured.
    """
    doubtful = [case for case in cases if is_doubtful(case)]
    if not doubtful:
        return []
    cause = unknown = ""
    if crowded:
        cause, remedy = f"{crowded} and {busy}" if busy else crowded, "start fewer ranks"
        remedy += ", and wait until the other processes end" if busy else ""
    elif busy:
        cause = busy
        remedy = as_started("wait until they end, or compare with analysis/ab.py --interleave")
    else:
        counts = [len(slowest_s(case)) for case in doubtful]
        if drifting := sum(drifts(case) for case in doubtful):
            cause = f"samples of {count_of(drifting, 'case')} drift, and so count as fewer"
        elif min(counts) < args.min_iters:
            cause = f"few samples, down to {min(counts)} per case"
        if not is_load_known:
            by_ab = " (ab.py records it)" if os.environ.get(TURN) else ""
            unknown = f"; CPU use by other processes was not measured here{by_ab}"
        remedy = f"try {flag_for_more(doubtful, args)}"
    count = f"{len(doubtful)} of {count_of(len(cases), 'case')}"
    what = f"95% intervals missing (-) or wider than +-{WIDE:.0%} in {count}"
    why = f"possible cause: {cause}" if cause else "no cause found"
    return [f"{what}; {why}{unknown}; {remedy}"]
