"""Which runs are copies of another run: those with the same samples, whatever surrounds them.

Bytes, hosts, starts, prefixes of lines and names of files change when a log or report is copied;
the times in it do not. Two runs with equal times are one run if chance is excluded.
"""

import hashlib
from collections.abc import Hashable, Sequence
from functools import cache
from math import log2
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from analysis.runs.load import LAST_DIGIT, Row, Run, number_of
from analysis.show import unit_of

Side = Sequence[tuple[Run, Row | None]]  # the runs of BASE or TEST, each with its row for a case

SURE_BITS = 40.0  # equal samples with less information than this may be equal by chance
DECIMALS = 12  # resolution of reports that store all digits, in decimals of a second
LEAST_SCATTER = 0.01  # of single times in different runs, relative: the scatter that is assumed


class Samples(NamedTuple):
    """The samples of a case in a run, [n], and one unit of their last digit, in the same unit."""

    values: NDArray[np.float64]
    unit: float


def duplicates(side: Side, last: Sequence[int] = ()) -> dict[int, list[int]]:
    """Return the position of each copy -> the positions of the runs that it copies.

    Of equal runs, the first one is the original; of a run and a part of it, the whole run. A run
    that contains several others, as a concatenation of their logs does, is a copy of these.
    last: positions that come after all others, e.g. of reports that were copied before the end.
    """
    samples, marks = [samples_of(row) for _, row in side], [identity(*one) for one in side]
    values = [one.values for one in samples if one]

    @cache
    def bits(unit: float) -> float:
        """The information in one sample: the chance that two independent ones are equal is
        2^-bits. It is the collision entropy of the samples of all runs."""
        _, counts = np.unique(np.round(np.concatenate(values) / unit), return_counts=True)
        return -log2(float(np.sum((counts / counts.sum()) ** 2)))

    def contains(long: Samples | None, short: Samples | None) -> bool:
        if not long or not short or len(long.values) < len(short.values):
            return False
        unit = max(long.unit, short.unit)
        return len(short.values) * bits(unit) >= SURE_BITS and is_within(long, short, unit)

    def length(i: int) -> int:
        one = samples[i]
        return len(one.values) if one else 0

    copies: dict[int, list[int]] = {}
    originals: list[int] = []
    for i in sorted(range(len(side)), key=lambda i: (length(i), i in last, i)):
        equal = [j for j in originals if marks[i] == marks[j] or has_equal_times(side[i], side[j])]
        inside = [j for j in originals if contains(samples[i], samples[j])]
        equal += [j for j in inside if length(j) == length(i)]
        if equal or len(inside) > 1:
            copies[i] = equal[:1] or inside
            continue
        for j in inside:  # a part of this run
            copies[j] = [i]
            copies |= {k: [i] for k, others in copies.items() if others == [j]}
            originals.remove(j)
        originals.append(i)
    return copies


def is_within(long: Samples, short: Samples, unit: float) -> bool:
    """Whether the samples of `long` contain those of `short` in a row, at a resolution."""
    n, reach = len(short.values), 0.5005 * unit
    begins = np.abs(long.values[: len(long.values) - n + 1] - short.values[0]) <= reach
    return any(
        bool(np.all(np.abs(long.values[i : i + n] - short.values) <= reach))
        for i in np.flatnonzero(begins)
    )


def samples_of(row: Row | None) -> Samples | None:
    """Return the samples of a case: times in seconds, or rates if the log has rates."""
    if row is None or not len(row.times_s):
        return None
    values = np.asarray(row.times_s, dtype=np.float64)
    share = number_of(row.metrics.get(LAST_DIGIT))
    if share:
        values = 1 / values if row.measure.startswith("1 /") else values
        return Samples(values, share * float(np.median(values)))
    for decimals in range(DECIMALS):
        scaled = values * 10.0**decimals
        if np.all(np.abs(scaled - np.round(scaled)) < 1e-3):
            return Samples(values, 10.0**-decimals)
    return Samples(values, 10.0**-DECIMALS)


# -- cases with a single time or with few samples --------------------------------------------------


def has_equal_times(a: tuple[Run, Row | None], b: tuple[Run, Row | None]) -> bool:
    """Whether a case without samples is the same in two runs: all times of all such cases are
    equal, as in two logs of nccl-tests. A single time is too little evidence."""
    if any(row is None or len(row.times_s) > 1 for _, row in (a, b)):
        return False
    one, other = single_times(a[0]), single_times(b[0])
    common = one.keys() & other.keys()
    return all(one[name] == other[name] for name in common) and (
        sum(information(one[name]) for name in common) >= SURE_BITS
    )


def single_times(run: Run) -> dict[tuple[str, str], float]:
    """Return the times in the metrics of all cases that have no samples."""
    found = {}
    for form, row in run.rows.items():
        for name, value in row.metrics.items() if len(row.times_s) < 2 else ():
            number = number_of(value)
            if number and unit_of(name).name == "s":
                found[form, name] = number
    return found


def information(time_s: float) -> float:
    """Return the bits in a single time, if other runs scatter by LEAST_SCATTER around it."""
    digits, _, exponent = f"{time_s:.11e}".partition("e")
    decimals = len(digits.rstrip("0").partition(".")[2])
    unit = 10.0 ** (int(exponent) - decimals)
    return log2(max(1.0, LEAST_SCATTER * time_s / unit))


def identity(run: Run, row: Row | None) -> Hashable:
    """Return a value that is equal for copies with few samples: host, start and samples, or the
    bytes of the file if host or start are unknown."""
    hosts = run.environment.get("hosts")
    if not (hosts and run.started_at):
        return run.digest or id(run)
    if row is None:
        return id(run)
    samples = repr((row.check, row.time_s, list(row.times_s)))
    return (str(hosts), run.started_at, hashlib.sha256(samples.encode()).hexdigest())
