"""Look at a series of step times before it becomes one number: where an attempt begins, which steps
are slow only at the start, whether steps stall, and which series are ranks of one job."""

import itertools
from collections import Counter
from collections.abc import Sequence

import numpy as np

SLOW_START = 3.0  # leading steps that take longer than this number of medians are left out
UNUSUAL = 1.5  # a step by this factor off the median counts as one that stalls
LONG_BLOCK = 5  # unusual steps in a row
AS_AFTER_RESTARTS = (
    "as after restarts; --skip leaves out steps at the beginning of a log and after restarts that "
    "its step counter shows"
)
MIN_IN_COMMON = 10  # number of steps from which a correlation means anything
TOGETHER = 0.9  # rank correlation above which two series may be of one job,
ABOVE_OTHERS = 0.3  # if it is larger by this than that of any two series of different jobs
LEVEL = 0.6  # correlation from which two series may be of one job, if chance is excluded
SIGMAS = 4.0  # of independent steps: a correlation below is chance
MIN_GROWING = 10  # numbers in a row that grow, which is no noise if the last is at least twice the
MANY_GROWING = 30  # first, and from this number on also no drift
MIN_GROWTH = 0.1  # share of the lines that grow, up to which a run that doubles may be a drift


def restarts(columns: Sequence[Sequence[int]]) -> list[int]:
    """The positions at which the step counter begins again.

    columns: the integers in the line of each match. The counter is the integer that increases by
    the same amount in most lines. An integer that never decreases and increases at each of these
    positions is an epoch or the number of all steps, and there is no restart. Nor is there one
    where an epoch ends.
    """
    if len(columns) < 4:
        return []
    width = Counter(map(len, columns)).most_common(1)[0][0]
    kept = [i for i, row in enumerate(columns) if len(row) == width]
    table = np.array([columns[i] for i in kept], dtype=np.float64)
    change = np.diff(table, axis=0)
    best: list[int] = []
    most = 2
    for column in range(width):
        up = change[:, column][change[:, column] > 0]
        if len(up) <= most:
            continue
        step, count = Counter(up.tolist()).most_common(1)[0]
        if count < 0.8 * len(up):
            continue
        most = len(up)
        values = table[:, column]
        down = change[:, column]
        is_first = values[1:] <= values[0] + step
        # ranks that share a log may differ by a step
        drops = (down <= -3 * step) | (is_first & (down <= -2 * step))
        is_total = (change >= 0).all(axis=0) & (change[drops] > 0).all(axis=0)
        at = np.flatnonzero(drops & ~ends_of_epochs(values, drops))
        best = [] if is_total.any() else [kept[i + 1] for i in at]
    return best


def ends_of_epochs(counter: np.ndarray, drops: np.ndarray) -> np.ndarray:
    """Which of these drops of a counter end an epoch: [n] bool. An epoch counts from the smallest
    first number of all parts to the largest last one, and at least two parts do so."""
    firsts, lasts = counter[np.r_[True, drops]], counter[np.r_[drops, True]]
    begins, ends = firsts == firsts.min(), lasts == lasts.max()
    found = np.zeros_like(drops)
    if (begins & ends).sum() >= 2:
        found[drops] = ends[:-1] & begins[1:]
    return found


def after_skip(count: int, starts: Sequence[int], skip: int) -> list[int]:
    """The positions that remain if `skip` of them are left out at the beginning and after each
    restart."""
    bounds = [0, *starts, count]
    kept = [range(min(a + skip, b), b) for a, b in itertools.pairwise(bounds)]
    return [i for part in kept for i in part]


def slow_start(times_s: Sequence[float], starts: Sequence[int] = ()) -> list[int]:
    """The positions of leading steps above SLOW_START medians, such as those that compile.

    The median is that of the second halves of all attempts, and at least a quarter of the steps of
    an attempt remain.
    """
    bounds = [0, *starts, len(times_s)]
    parts = [range(a, b) for a, b in itertools.pairwise(bounds) if b - a >= 4]
    ends = [times_s[i] for part in parts for i in part[len(part) // 2 :]]
    if not ends:
        return []
    limit = SLOW_START * float(np.median(ends))
    slow: list[int] = []
    for part in parts:
        leading = next((n for n, i in enumerate(part) if times_s[i] <= limit), len(part))
        if leading <= 0.75 * len(part):
            slow += part[:leading]
    return slow


def only_grow(numbers: Sequence[float], many: int = MANY_GROWING) -> bool:
    """Whether most of the numbers are in long runs that grow, as those of a clock, which may begin
    again. Equal neighbors count once. many: the length from which a run is no drift. A shorter run
    counts if it doubles, unless few lines grow: these may be times with few digits."""
    values = np.asarray(numbers)
    grows = (np.diff(values) > 0).sum() > MIN_GROWTH * len(values)
    many = many if grows else MANY_GROWING
    values = values[np.diff(values, prepend=np.nan) != 0]
    runs = np.split(values, np.flatnonzero(np.diff(values) < 0) + 1)
    growing = [
        len(run)
        for run in runs
        if len(run) >= many or (grows and len(run) >= MIN_GROWING and run[-1] >= 2 * run[0])
    ]
    return sum(growing) > len(values) / 2


def excess(times_s: Sequence[float]) -> float:
    """mean / median - 1: the time of steps that stall, as a share of that of the others."""
    return float(np.mean(times_s) / np.median(times_s)) - 1


def stalls(times_s: Sequence[float]) -> tuple[np.ndarray, float] | None:
    """The positions of steps that take UNUSUAL times the median or longer, and their median as a
    multiple of the median of the others; those that are faster by UNUSUAL if there are more of
    them. None without either."""
    times = np.asarray(times_s)
    off = times / np.median(times)
    slow, fast = off >= UNUSUAL, off <= 1 / UNUSUAL
    unusual = slow if slow.sum() >= fast.sum() else fast
    if not unusual.any() or unusual.all():
        return None
    return np.flatnonzero(unusual), float(np.median(times[unusual]) / np.median(times[~unusual]))


def stall_text(runs_s: Sequence[Sequence[float]]) -> str:
    """`1 of 4 steps takes 2.9 times as long`; "" if no step is unusual. runs_s: the times of each
    log."""
    scaled = np.concatenate([np.asarray(times) / np.median(times) for times in runs_s])
    found = stalls(scaled.tolist())
    if not found:
        return ""
    where, factor = found
    count, size = len(where), len(scaled)
    run = np.repeat(range(len(runs_s)), [len(times) for times in runs_s])[where]
    blocks = 1 + int(((np.diff(where) > 1) | (np.diff(run) > 0)).sum())
    if count >= LONG_BLOCK * blocks:
        which = f"{count} of {size} steps, in blocks of about {round(count / blocks)}, take"
        return f"{which} {factor:.2g} times as long, {AS_AFTER_RESTARTS}"
    one_of = round(size / count)
    is_regular = abs(size / count / one_of - 1) < 0.05
    which = f"1 of {one_of} steps takes" if is_regular else f"{count} of {size} steps take"
    return f"{which} {factor:.2g} times as long"


def levels(times_s: Sequence[float]) -> tuple[float, float]:
    """The medians of the fast and of the slow steps, of times some of which are unusual."""
    where, _ = stalls(times_s) or (np.array([], dtype=int), 1.0)
    others = np.delete(times_s, where)
    both = float(np.median(np.asarray(times_s)[where])), float(np.median(others))
    return min(both), max(both)


def correlation(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Spearman's rank correlation of the steps that both have; None if they are too few, or all
    alike."""
    count = min(len(a), len(b))
    if count < MIN_IN_COMMON:
        return None
    x, y = ranks(a[:count]), ranks(b[:count])
    if not x.any() or not y.any():
        return None
    return float(x @ y / np.sqrt((x @ x) * (y @ y)))


def together(a: Sequence[float], b: Sequence[float]) -> float | None:
    """How much the steps of two series go together. A trend that both have is no evidence: the
    changes from step to step must go together, too."""
    found = correlation(a, b)
    changes = correlation(np.diff(a).tolist(), np.diff(b).tolist())
    if found is None or changes is None or changes > LEVEL:
        return found
    return min(found, changes)


def is_chance(found: float, a: Sequence[float], b: Sequence[float]) -> bool:
    return found * float(np.sqrt(min(len(a), len(b)) - 1)) < SIGMAS


def ranks(times_s: Sequence[float]) -> np.ndarray:
    """The position of each value in the sorted series, minus the mean; equal values share one."""
    values, inverse, counts = np.unique(times_s, return_inverse=True, return_counts=True)
    middle = np.cumsum(counts) - (counts + 1) / 2
    if len(values) == 1:
        return np.zeros(len(inverse))
    return np.asarray(middle[inverse] - middle[inverse].mean())


def groups(count: int, pairs: Sequence[tuple[int, int]]) -> list[list[int]]:
    """The connected components of a graph with these edges, in order of their first member."""
    leader = list(range(count))
    for a, b in pairs:
        old, new = sorted((leader[a], leader[b]), reverse=True)
        leader = [new if one == old else one for one in leader]
    return [[i for i in range(count) if leader[i] == one] for one in sorted(set(leader))]
