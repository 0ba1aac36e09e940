"""The sentences that end a run: numbers with their intervals, and what can be told apart.

A ratio's interval is made of the ends of two intervals: it holds if both of them do.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from common.cli import cut
from common.report import Case
from common.stats import Interval

UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}  # of a time, in seconds


class Estimate(NamedTuple):
    """A number with its 95 % interval. It has none for too few samples, or samples that drift."""

    value: float
    interval: Interval | None = None

    def text(self, unit: str = "", scale: float = 1, digits: int | None = None) -> str:
        """`1.24 GB/s (1.10 to 1.39)`, times `scale`. digits: after the point."""
        shown = [end * scale for end in (self.value, *(self.interval or ()))]
        digits = digits_of(shown[0]) if digits is None else digits
        number, *ends = [f"{end:,.{digits}f}" for end in shown]
        words = [number, unit, f"({' to '.join(ends) or 'no interval'})"]
        return " ".join(word for word in words if word)

    def times(self) -> str:
        """`1.24 times (1.10 to 1.39)`"""
        return self.text("times", digits=2)

    def __str__(self) -> str:
        """Of seconds: `76.1 ms (70.2 to 80.0)`"""
        unit = unit_of(self.value)
        return self.text(unit, 1 / UNITS[unit])

    def over(self, other: "Estimate") -> "Estimate":
        """This one / the other one."""
        interval = None
        if self.interval and other.interval:
            (low, high), (other_low, other_high) = self.interval, other.interval
            interval = (low / other_high, high / other_low)
        return Estimate(self.value / other.value, interval)

    def scaled(self, factor: float) -> "Estimate":
        """This one times a positive number."""
        return self.over(Estimate(1 / factor, (1 / factor, 1 / factor)))

    def inverse(self) -> "Estimate":
        return Estimate(1.0, (1.0, 1.0)).over(self)

    def may_be(self, value: float) -> bool:
        """Whether the interval holds the value."""
        return self.interval is not None and self.interval[0] <= value <= self.interval[1]

    def overlaps(self, other: "Estimate") -> bool:
        """Whether both have intervals, and these have a value in common."""
        if not self.interval or not other.interval:
            return False
        return self.interval[0] <= other.interval[1] and other.interval[0] <= self.interval[1]

    def beside(self, whole: float) -> str:
        """`16.2 (11.3 to 22.0)`, or `0.3 (-1.0 to 2.0: maybe none)`: seconds in the unit and with
        the digits of a time that stands beside them."""
        scale = 1 / UNITS[unit_of(whole)]
        text = self.text("", scale, digits_of(whole * scale))
        return f"{text[:-1]}: maybe none)" if self.may_be(0) else text


def digits_of(value: float) -> int:
    """Digits after the point, so that three count: 124, 12.4, 1.24, 0.124."""
    digits = 0
    while digits < 5 and abs(value) < 10 ** (2 - digits):
        digits += 1
    return digits


def unit_of(seconds: float) -> str:
    """The largest unit of which there is at least one."""
    return next((unit for unit, length in UNITS.items() if abs(seconds) >= length), "us")


def show_seconds(seconds: float) -> str:
    """`76.1 ms`"""
    unit = unit_of(seconds)
    scaled = seconds / UNITS[unit]
    return f"{scaled:.{digits_of(scaled)}f} {unit}"


def median_of(case: Case, name: str = "step_time") -> Estimate | None:
    """The metric `{name}_p50_s` with its interval; None where the case has none.

    Where the report has only how far the interval reaches, at most, that counts on both sides.
    """
    metrics = case.metrics
    p50 = metrics.get(f"{name}_p50_s")
    if not p50:
        return None
    interval = metrics.get(f"{name}_ci95_s")
    width = metrics.get(f"{name}_ci95_rel") or metrics.get(f"{name}_p50_ci95_rel")
    if interval is None and width is not None and width < 1:
        interval = (p50 * (1 - width), p50 * (1 + width))
    return Estimate(p50, ends_of(interval))


def ends_of(interval: Sequence[float] | None) -> Interval | None:
    """A report has an interval as a list."""
    return (interval[0], interval[1]) if interval else None


def ranked(cases: Sequence[Case], name: str = "step_time") -> list[tuple[Case, Estimate]]:
    """The cases that have this median, with it. The fastest case comes first."""
    pairs = [(case, median_of(case, name)) for case in cases]
    known = [(case, median) for case, median in pairs if median]
    return sorted(known, key=lambda pair: pair[1].value)


def estimate_of(case: Case, name: str, interval_name: str) -> Estimate | None:
    """A metric with its interval; None where the case has none."""
    value, interval = case.metrics.get(name), case.metrics.get(interval_name)
    if value is None:
        return None
    return Estimate(value, ends_of(interval))


def series(cases: Sequence[Case], varied: Collection[str]) -> dict[str, list[Case]]:
    """The cases whose keys agree in all but `varied`, under `resnet18, fp32: `: the values in which
    the series differ. The name is empty if there is one series."""
    by_shared: dict[str, list[Case]] = {}
    for case in cases:
        by_shared.setdefault(str(shared_of(case, varied)), []).append(case)
    all_shared = [shared_of(same[0], varied) for same in by_shared.values()]
    names = dict.fromkeys(name for shared in all_shared for name in shared)
    differing = [name for name in names if differs(name, all_shared)]
    named = {}
    for shared, same in zip(all_shared, by_shared.values(), strict=True):
        words = [word_of(name, shared.get(name)) for name in differing]
        named[", ".join(words) + ": " if words else ""] = same
    return named


def differs(name: str, keys: Sequence[dict[str, Any]]) -> bool:
    """Whether a field has another value in one of the keys."""
    return any(key.get(name) != keys[0].get(name) for key in keys)


def shared_of(case: Case, varied: Collection[str]) -> dict[str, Any]:
    """The fields of the key that are not varied, in a fixed order."""
    return {name: case.key[name] for name in sorted(case.key) if name not in varied}


def word_of(name: str, value: Any) -> str:
    """`resnet18`, or `batch size 8`: a number does not say what it is."""
    return value if isinstance(value, str) else f"{name.replace('_', ' ')} {value}"


def fastest(times: Mapping[str, Estimate]) -> str:
    """`a is 1.12 times (1.09 to 1.15) as fast as b, the next`, or who cannot be told apart. times:
    seconds by name, at least one."""
    first, *others = sorted(times, key=lambda name: times[name].value)
    if not others:
        return f"{first} takes {times[first]}"
    ratios = {name: times[name].over(times[first]) for name in others}
    alike = [name for name, ratio in ratios.items() if ratio.may_be(1)]
    next_one = others[0]
    if alike and ratios[next_one].interval:
        return f"{first} and {cut(alike, 3)} cannot be told apart"
    rank = ", the next" if len(others) > 1 else ""
    return f"{first} is {ratios[next_one].times()} as fast as {next_one}{rank}"
