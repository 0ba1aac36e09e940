"""Which runs are copies of another run: those with the same samples, whatever surrounds them.

Bytes, hosts, starts, prefixes of lines and names of files change when a log or report is copied;
the times in it do not. Lines may be lost, repeated, edited or sorted. Two runs are one if they have
more equal samples than chance allows.
"""

import hashlib
import zlib
from collections import Counter
from collections.abc import Hashable, Sequence
from functools import cache, lru_cache
from itertools import combinations
from math import erf, exp, floor, lgamma, log, log2, log10, pi, sqrt
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from analysis.logs import series
from analysis.runs.load import DECIMALS, LAST_DIGIT, Row, Run, number_of
from analysis.show import unit_of

Side = Sequence[tuple[Run, Row | None]]  # the runs of BASE or TEST, each with its row for a case

SURE_BITS = 40.0  # equal samples with less information than this may be equal by chance
SHARE = 0.9  # of the samples of the shorter run that the longer one has, too, if it is a copy
FINEST = 1e-5  # of the median: smaller differences come from a conversion
LEAST_SCATTER = 0.01  # of single times in different runs, relative: the scatter that is assumed
LEAST_NOISE = 0.001  # the same for the times of one step in runs whose steps go together
NEAR = 0.05  # of the samples of a copy with fewer digits: misses by one unit, from rounding twice
MOST_ALIGNED = 20_000  # samples of a run that are searched for those in the same order
MOST_OVERLAPPED = 2_000  # samples of runs that may overlap
CODES = 0x110000  # of characters


class Samples(NamedTuple):
    """The samples of a case in a run, [n], and one unit of their last digit, in the same unit."""

    values: NDArray[np.float64]
    unit: float


class Rounded(NamedTuple):
    """Samples as multiples of a unit, each as a character, and how often each occurs. chance: upper
    limit of the probability that two samples of the run are equal."""

    text: str
    counts: Counter[str]
    chance: float


def duplicates(side: Side, last: Sequence[int] = ()) -> dict[int, list[int]]:
    """Return the position of each copy -> the positions of the runs that it copies.

    Of equal runs, the first one is the original; of a run and a part of it, the whole run. A run
    that contains several others, as a concatenation of their logs does, is a copy of these.
    last: positions that come after all others, e.g. of reports that were copied before the end.
    """
    samples, marks = [samples_of(row) for _, row in side], [identity(*one) for one in side]

    def length(i: int) -> int:
        one = samples[i]
        return len(one.values) if one else 0

    equal_pairs = pairs_in_common(samples)
    copies: dict[int, list[int]] = {}
    originals: list[int] = []
    for i in sorted(range(len(side)), key=lambda i: (length(i), i in last, i)):
        equal = [j for j in originals if marks[i] == marks[j] or has_equal_times(side[i], side[j])]
        inside = [j for j in originals if frozenset((i, j)) in equal_pairs]
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


# -- samples in common -----------------------------------------------------------------------------


def pairs_in_common(samples: Sequence[Samples | None]) -> set[frozenset[int]]:
    """Return the pairs of runs, by position, whose samples in common exclude chance.

    Steps may also be equal because all runs have the same data and print few digits. So the
    information in a sample is that of LEAST_NOISE, unless other runs show that their steps do not
    go together.
    """

    @cache
    def rounded(i: int, unit: float) -> Rounded:
        one = samples[i]
        assert one
        return on_grid(np.round(one.values / unit))

    def rounded_as(i: int, j: int, unit: float) -> Rounded:
        """Run i at the resolution of run j: 10.125 may have been 10.1249 or 10.1251, and is 10.12
        or 10.13 with two decimals, whichever run j has."""
        one, other = samples[i], samples[j]
        assert one is not None
        assert other is not None
        if one.unit > other.unit / 2:
            return rounded(i, unit)
        reach = 0.5001 * one.unit / unit
        low, high = (np.round(one.values / unit + sign * reach) for sign in (-1, 1))
        return on_grid(np.where(np.isin(low, np.round(other.values / unit)), low, high))

    found, doubtful, others = set(), set(), list[tuple[int, int]]()
    middles = {i: float(np.median(one.values)) for i, one in enumerate(samples) if one}
    for i, j in combinations(middles, 2):
        a, b, middle = samples[i], samples[j], max(middles[i], middles[j], 1e-12)
        assert a is not None
        assert b is not None
        unit = 10.0 ** max(nearest(a.unit), nearest(b.unit), floor(log10(FINEST * middle)))
        both = rounded_as(i, j, unit), rounded_as(j, i, unit)
        least = chance_of_noise(unit / (LEAST_NOISE * middle))
        is_rounded_twice = nearest(a.unit) != nearest(b.unit)
        most_near = NEAR * min(len(a.values), len(b.values)) if is_rounded_twice else 0.0
        shared = samples_in_common(*both)
        if (shared and bits_in(shared, *both, least) >= SURE_BITS) or (
            (overlap := bits_in_overlap(a, b, unit, least)) >= SURE_BITS
            and overlap * min(randomness(one.text) for one in both) >= SURE_BITS
        ):
            found.add(frozenset((i, j)))
        elif not shared:
            others.append((i, j))
        elif bits_in(shared, *both) >= SURE_BITS and near_misses(*both) <= most_near:
            doubtful.add(frozenset((i, j)))
        else:
            others.append((i, j))
    if doubtful:
        times = [[] if one is None else one.values.tolist() for one in samples]
        alike = [x for i, j in others if (x := series.correlation(times[i], times[j])) is not None]
        if alike and max(alike) <= series.TOGETHER:
            found |= doubtful
    return found


def chance_of_noise(unit: float) -> float:
    """The chance that two samples of one time are in the same cell, if a cell is this number of
    standard deviations wide: the mean of 1 - d / unit for their distance d < unit."""
    return erf(unit / 2) - 2 / (unit * sqrt(pi)) * (1 - exp(-((unit / 2) ** 2)))


def nearest(unit: float) -> int:
    """The power of ten that a unit of the last digit is. The median of the numbers, from which it
    was computed, may have been another one."""
    return round(log10(unit))


def on_grid(cells: NDArray[np.float64]) -> Rounded:
    """The samples of a run as multiples of a unit."""
    text = "".join(map(code, cells.astype(np.int64).tolist()))
    counts = Counter(text)
    n = len(text)
    pairs = max(1, n * (n - 1) // 2)
    equal = sum(count * (count - 1) // 2 for count in counts.values())
    squares, cubes = (sum((c / n) ** power for c in counts.values()) for power in (2, 3))
    # relative standard error of the number of equal pairs
    error = sqrt(4 * max(0.0, cubes / squares**2 - 1) / n + 1 / (equal + 1))
    return Rounded(text, counts, min(1.0, (equal + 1) / pairs * (1 + 3 * error)))


def samples_in_common(a: Rounded, b: Rounded) -> Counter[str]:
    """The samples that both runs have; none if they are too few for a copy."""
    shared = {x: min(a.counts[x], b.counts[x]) for x in a.counts.keys() & b.counts.keys()}
    return Counter(shared if sum(shared.values()) >= SHARE * min(len(a.text), len(b.text)) else {})


def bits_in(shared: Counter[str], a: Rounded, b: Rounded, least: float = 0.0) -> float:
    """The information in the samples that two runs have in common: independent runs have so many
    with a probability of at most 2^-bits. least: lower limit of the chance that two are equal.

    If p is the chance that two samples are equal, the expected number of ways to match k samples
    out of n and m is C(n, k) C(m, k) k! p^k, without k! for those in the same order, and with
    n - m + 1 instead of all factors for all m in a row. The probability that there are w ways is at
    most the w-th part of this (Markov).
    """
    long, short = sorted((a, b), key=lambda one: -len(one.text))
    n, m, k = len(long.text), len(short.text), shared.total()
    each = -log2(max(sqrt(a.chance * b.chance), least))
    if k * each < SURE_BITS:
        return 0.0
    least_random, most_random = sorted((randomness(a.text), randomness(b.text)))

    def bits(k: int, each: float, most: int = n) -> float:
        return k * each - log2_choose(min(n, most), k) - log2_choose(min(m, most), k) - log2(m)

    ways = sum(
        log2_choose(long.counts[x], c) + log2_choose(short.counts[x], c) + log2_factorial(c)
        for x, c in shared.items()
    )
    found = [bits(k, most_random * each) + ways - log2_factorial(k)]
    each *= least_random
    if short.text in long.text:
        found.append(m * each - log2(n - m + 1))
    elif bits(k, each) >= SURE_BITS:
        ordered = in_order(long.text[:MOST_ALIGNED], short.text[:MOST_ALIGNED])
        found.append(bits(ordered, each, MOST_ALIGNED))
    return max(found)


def bits_in_overlap(a: Samples, b: Samples, unit: float, least: float) -> float:
    """The information in consecutive samples that both runs have, if they are at least half of the
    shorter run: of two parts of a run that overlap, or if the first lines were lost.

    The samples with fewer digits may be rounded or cut off. unit: of these. least: as in `bits_in`.
    """
    fine, coarse = sorted((a, b), key=lambda one: one.unit)
    n, m = len(fine.values), len(coarse.values)
    if max(n, m) > MOST_OVERLAPPED:
        return 0.0
    cells, x = np.round(coarse.values / unit), fine.values / unit
    is_finer = fine.unit <= coarse.unit / 2
    reach = 0.5001 * fine.unit / unit if is_finer else 0.0
    readings = [(np.round(x - reach), np.round(x + reach))]
    if is_finer:
        readings.append((np.floor(x + 1e-6), np.floor(x + 1e-6)))
    shortest = (min(n, m) + 1) // 2
    found = 0.0
    for low, high in readings:
        if (np.isin(low, cells) | np.isin(high, cells)).sum() < shortest:
            continue
        is_equal = (low[:, np.newaxis] == cells) | (high[:, np.newaxis] == cells)  # [n, m]
        each = -log2(max(is_equal.mean(), least))
        for shift in range(shortest - n, m - shortest + 1):
            piece = is_equal.diagonal(shift)
            if len(piece) * each > found and piece.all():
                found = len(piece) * each
    return max(0.0, found - log2((n + m) * len(readings)))


def near_misses(a: Rounded, b: Rounded) -> int:
    """The number of samples that only one run has, and that differ by one unit of the last digit
    from one that only the other has. Noise causes them if the steps of all runs are alike."""
    rest, other = a.counts - b.counts, b.counts - a.counts

    def beside(x: str) -> int:
        return other[code(ord(x) - 1)] + other[code(ord(x) + 1)]

    return sum(min(count, beside(x)) for x, count in rest.items())


def code(cell: int) -> str:
    """The character that stands for a number of units."""
    return chr(cell % CODES)


def log2_factorial(k: int) -> float:
    return lgamma(k + 1) / log(2)


def log2_choose(n: int, k: int) -> float:
    return log2_factorial(n) - log2_factorial(k) - log2_factorial(n - k)


@lru_cache(64)
def randomness(text: str) -> float:
    """The share of the information in a series that remains if the order of its samples is known:
    small for steps that stall at regular intervals and for those that get slower and slower."""
    codes = np.unique([*text], return_inverse=True)[1].astype(np.uint16)
    series_of = codes, np.random.default_rng(0).permutation(codes), np.zeros_like(codes)
    known, shuffled, constant = (len(zlib.compress(one.tobytes())) for one in series_of)
    return min(1.0, max(0, known - constant) / max(1, shuffled - constant))


def in_order(long: str, short: str) -> int:
    """The length of the longest common subsequence (Hyyro 2004, bit-parallel)."""
    places: dict[str, int] = {}
    for i, x in enumerate(long):
        places[x] = places.get(x, 0) | 1 << i
    every = (1 << len(long)) - 1
    left = every
    for x in short:
        here = left & places.get(x, 0)
        left = ((left + here) | (left - here)) & every
    return len(long) - left.bit_count()


def samples_of(row: Row | None) -> Samples | None:
    """Return the samples of a case: times in seconds, or rates if the log has rates."""
    if row is None or not len(row.times_s):
        return None
    values = np.asarray(row.times_s, dtype=np.float64)
    if LAST_DIGIT in row.metrics and row.measure.startswith("1 /"):
        values = 1 / values
    return Samples(values, row.last_digit * float(np.median(values)) or 10.0**-DECIMALS)


# -- cases with a single time or with few samples --------------------------------------------------


def has_equal_times(a: tuple[Run, Row | None], b: tuple[Run, Row | None]) -> bool:
    """Whether a case without samples is the same in two runs: nearly all times of all such cases
    are equal, as in two logs of nccl-tests. A single time is too little evidence."""
    if any(row is None or len(row.times_s) > 1 for _, row in (a, b)):
        return False
    one, other = single_times(a[0]), single_times(b[0])
    common = one.keys() & other.keys()
    equal = [name for name in common if one[name] == other[name]]
    bits = sum(information(one[name]) for name in equal) - log2_choose(len(common), len(equal))
    return len(equal) >= SHARE * len(common) and bits >= SURE_BITS


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
