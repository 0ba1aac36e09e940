"""The times of collectives by themselves, from a report of collectives.py. Needs no torch."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from common.stats import Estimate
from harness.cli import show_size
from harness.report import Case, Report

MAX_SIZE_RATIO = 4.0  # maximum ratio of two sizes between which `interpolate` interpolates
ROUNDED = 1.05  # times as much, for sizes that were rounded to a multiple of the number of ranks
Layout = tuple[int, ...]  # number of ranks of a group on each of its hosts, the largest first
TimesBySize = dict[int, Estimate]  # seconds, by size in bytes
IsolatedTimes = Mapping[tuple[str, Layout, str], TimesBySize]  # by collective, layout and dtype


def interpolate(times: Mapping[int, Estimate], size: float) -> Estimate:
    """Interpolate the time at `size`, and the ends of its interval, between the two nearest sizes
    in bytes, as in the model latency + size / bandwidth (Hockney 1994, Parallel Computing 20:389).

    Raises ValueError outside the measured range, or if the two differ by more than a factor of
    MAX_SIZE_RATIO: libraries switch between protocols, and such a time is not linear.
    """
    if size in times:
        return times[int(size)]
    below = max((measured for measured in times if measured < size), default=None)
    above = min((measured for measured in times if measured > size), default=None)
    wanted = f"{show_size(size)} bytes"
    if below is None or above is None:
        if not times:
            raise ValueError(f"no size is measured, and {wanted} are needed")
        ends = f"{show_size(min(times))} to {show_size(max(times))}"
        raise ValueError(f"{wanted} are outside the measured range, {ends}")
    if above > MAX_SIZE_RATIO * ROUNDED * below:
        raise ValueError(
            f"{size:,.10g} bytes are between the measured {below:,} and {above:,}, which are more "
            f"than a factor of {MAX_SIZE_RATIO:g} apart"
        )
    a, b = times[below], times[above]
    weight = (size - below) / (above - below)
    return total([a * (1 - weight), b * weight])


def total(estimates: Sequence[Estimate]) -> Estimate:
    """Return the sum of n estimates. The ends of its interval are the sums of the ends, so it
    contains the true sum with a probability of at least 1 - 0.05 n (Bonferroni)."""
    value = math.fsum(one.value for one in estimates)
    lows = [one.low for one in estimates if one.low is not None]
    highs = [one.high for one in estimates if one.high is not None]
    if len(lows) < len(estimates) or len(highs) < len(estimates):
        return Estimate(value)
    return Estimate(value, math.fsum(lows), math.fsum(highs))


def isolated_time(
    alone: IsolatedTimes, collective: str, layout: Layout, dtype: str, size: float
) -> tuple[Estimate, str]:
    """Return the time of a collective of `size` bytes by itself, and the dtype with which it was
    measured: `dtype` if available, otherwise another one. Raises ValueError with the reason."""
    fit = {
        of: times for (name, at, of), times in alone.items() if (name, at) == (collective, layout)
    }
    there = sorted({at for name, at, _ in alone if name == collective})
    if not there:
        raise ValueError("it was not measured")
    if not fit:
        others = " and ".join(map(show_layout, there))
        raise ValueError(f"it was measured on {others}, not on {show_layout(layout)}")
    measured = dtype if dtype in fit else next(iter(fit))
    return interpolate(fit[measured], size), measured


def show_layout(layout: Layout) -> str:
    """Format a layout: `16 ranks of 2 hosts (8 each)`."""
    ranks = f"{sum(layout)} ranks" if sum(layout) > 1 else "1 rank"
    if len(layout) == 1:
        return f"{ranks} of one host"
    each = f"{layout[0]} each" if len(set(layout)) == 1 else " + ".join(map(str, layout))
    return f"{ranks} of {len(layout)} hosts ({each})"


def collective_times(report: Report) -> dict[tuple[str, Layout, str], TimesBySize]:
    """Return the times of the faster variant (in place or out of place) in a report of
    collectives.py. Of several reduction operators, the first one counts. Raises ValueError."""
    if report.benchmark != "collectives":
        raise ValueError(f"expected a report of collectives.py, got one of {report.benchmark}.py")
    hosts = {row["rank"]: row["host"] for row in report.environment.get("ranks") or ()}
    found: dict[tuple[str, Layout, str], TimesBySize] = {}
    for case in report.cases:
        names = [f"{variant}_time_s" for variant in ("out_of_place", "in_place")]
        times = [case.metrics[name] for name in names if name in case.metrics]
        if not case.failed and times:
            kind = (case.key["collective"], layout_of_case(case, hosts), case.key["dtype"])
            by_size = found.setdefault(kind, {})
            by_size.setdefault(case.key["size_bytes"], min(times, key=lambda time: time.value))
    return found


def layout_of_case(case: Case, hosts: Mapping[int, str]) -> Layout:
    """Return the layout of the first group of a case of collectives.py. hosts: by rank."""
    spec, count = case.key["groups"], case.key["group_ranks"]
    if spec in ("node", "rank"):
        return (count,)
    if spec == "cross":
        return (1,) * count
    members: Sequence[int] = case.ranks
    if spec != "world":  # `0-3/4,5,6,7`
        words = [word.partition("-") for word in spec.split("/")[0].split(",")]
        ranges = [range(int(first), int(last or first) + 1) for first, _, last in words]
        members = [rank for part in ranges for rank in part]
    return layout_of(hosts.get(rank) for rank in members)


def layout_of(hosts: Iterable[Any]) -> Layout:
    """Return the layout of a group. hosts: of each of its ranks."""
    return tuple(sorted(Counter(hosts).values(), reverse=True))
