"""Bandwidths of collectives, and the sizes of a scan: pure arithmetic, as nccl-tests has it.

`size` is the total: the larger of what a rank sends and what it receives. `count` is the number
of elements a rank brings: size / element size, and / n for the operations of `SHARED`.
The factors are from nccl-tests' doc/PERFORMANCE.md, but for the uneven all_to_all.
"""

import math
import re
from collections.abc import Sequence
from typing import Final

UNITS: Final = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}

MAX_SIZES: Final = 100_000

REDUCING: Final = ("all_reduce", "reduce", "reduce_scatter")
ROOTED: Final = ("broadcast", "reduce", "gather", "scatter")
OBJECTS: Final = (*("all_gather_object", "gather_object", "broadcast_object", "scatter_object"),)
COLLECTIVES: Final = (
    *("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "all_to_all_uneven"),
    *("broadcast", "reduce", "gather", "scatter", "sendrecv", "barrier", *OBJECTS),
)

# whose size is n times their count
SHARED: Final = ("all_gather", "reduce_scatter", "all_to_all", "all_to_all_uneven")
SHARED_ROOTED: Final = ("gather", "scatter")


def parse_size(text: str) -> int:
    """Bytes from `8`, `64K`, `4M`, `1G`, `1.5G` (binary). Raises ValueError for anything else."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if found is None:
        raise ValueError(f"expected a size like 8, 64K, 4M or 1G, got '{text}'")
    return int(float(found[1]) * UNITS[found[2].upper()])


def show_size(size: int) -> str:
    """`64K`, `4M`: the largest unit that divides the size."""
    for unit, scale in reversed(UNITS.items()):
        if size and size % scale == 0:
            return f"{size // scale}{unit}" if unit else f"{size}B"
    return f"{size}B"


def scan(low: int, high: int, step: int | None, factor: float | None) -> list[int]:
    """Sizes from `low` to `high`, each `step` bytes more than the last or `factor` times it.

    Raises ValueError where the scan would be empty or would not end.
    """
    if low < 1:
        raise ValueError(f"the smallest size must be at least 1 byte, got {low}")
    if low > high:
        raise ValueError(f"the smallest size, {low} bytes, is above the largest, {high}")
    if step is not None and step < 1:
        raise ValueError(f"a step of {step} bytes would not end; give at least 1")
    if factor is not None and not 1 < factor < math.inf:
        raise ValueError(f"a factor of {factor:g} would not end; give more than 1, e.g. 2")
    if step and (high - low) // step > MAX_SIZES:
        raise ValueError(f"steps of {step} bytes are too many; give at most {MAX_SIZES} sizes")
    sizes = [low]
    while True:
        last = sizes[-1]
        following = last + step if step else max(last + 1, int(last * (factor or 2)))
        if following > high:
            return sizes
        sizes.append(following)


def shares(collective: str, ranks: int) -> int:
    """By how much the size is larger than what one rank brings."""
    return ranks if collective.removesuffix("_object") in SHARED + SHARED_ROOTED else 1


def counts(
    collective: str, sizes: Sequence[int], element_bytes: int, ranks: int
) -> list[tuple[int, int]]:
    """The (size, count) to measure for each size asked for, without repeats.

    Rounded down to a whole number of elements, the same on every rank, and at least one.
    """
    unit = element_bytes * shares(collective, ranks)
    return list(dict.fromkeys((max(1, s // unit) * unit, max(1, s // unit)) for s in sizes))


def bus_factor(collective: str, ranks: int) -> float | None:
    """busbw / algbw: the bytes that pass the busiest link of an ideal algorithm, over the size.

    None for a barrier. The uneven all_to_all sends 1, 2, .. n parts of n(n+1)/2; the busiest rank,
    the first, keeps one part: 1 - 2/(n(n+1)).
    """
    n = ranks
    name = collective.removesuffix("_object")
    if name == "barrier":
        return None
    if name == "all_reduce":
        return 2 * (n - 1) / n
    if name == "all_to_all_uneven":
        return 1 - 2 / (n * (n + 1))
    return (n - 1) / n if name in SHARED + SHARED_ROOTED else 1.0


def bandwidths(collective: str, ranks: int, size: int, seconds: float) -> tuple[float, float]:
    """(algbw, busbw) in GB/s of 10^9 bytes: size / time, and that times the bus factor."""
    algbw = size / seconds / 1e9
    return algbw, algbw * (bus_factor(collective, ranks) or 0.0)


def top_quarter(rates: Sequence[tuple[int, float]]) -> list[float]:
    """The rates of the largest quarter of the sizes, at least of one. rates: (size, GB/s)."""
    sizes = sorted({size for size, _ in rates}, reverse=True)
    largest = set(sizes[: -(-len(sizes) // 4)])
    return [rate for size, rate in rates if size in largest]


def mean(rates: Sequence[float]) -> float:
    """Their mean, 0 for none. The only rates averaged in the project, because nccl-tests does."""
    return sum(rates) / len(rates) if rates else 0.0
