"""The samples of a case: how they reach rank 0, which count, and what a report keeps."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from common.report import Case
from common.stats import time_of_iterations

Samples = NDArray[np.float64]
LIMIT = 2**18  # a case of more samples is not written whole: its line would have megabytes
FEWEST = 12  # iterations of which all samples are written, however many ranks there are
RULE = (
    "samples_s: all ranks in {kept} evenly spread iterations of {all}, listed in iterations; "
    "slowest_s: the time of every iteration; quartiles_s: of all samples of each rank"
)


def rounded(samples_s: Mapping[str, Sequence[float]]) -> dict[str, Samples]:
    """The seconds of each step, [iterations], rounded to the nanosecond.

    Each rank does this for itself. Rank 0 then gathers arrays: they take fewer bytes and less time
    than lists.
    """
    arrays = {}
    for step, seconds in samples_s.items():
        arrays[step] = np.array([round(second, 9) for second in seconds], dtype=np.float64)
    return arrays


def stacked(by_rank: Sequence[Mapping[str, Samples]]) -> dict[str, Samples]:
    """The samples of all ranks that timed a step, [ranks, iterations] of each.

    by_rank: [iterations] of each step that the rank has timed.
    """
    samples_s = {}
    for step in dict.fromkeys(step for samples in by_rank for step in samples):
        samples_s[step] = np.stack([samples[step] for samples in by_rank if step in samples])
    return samples_s


def keep_samples(case: Case, samples_s: Mapping[str, Samples]) -> None:
    """Put the samples into the case: all of them, or what docs/measuring.md says above LIMIT.

    samples_s: [ranks, iterations] of each step, all of one shape. case.aligned must be right.
    """
    ranks, iterations = samples_s["step"].shape
    steps = len(samples_s)
    chosen = np.arange(iterations)
    if steps * ranks * iterations > LIMIT:
        left = LIMIT - steps * (iterations + 3 * ranks)  # beside slowest_s and quartiles_s
        count = min(iterations, max(FEWEST, left // (steps * ranks)))
        chosen = np.arange(count) * iterations // count
        case.bounded = RULE.format(kept=count, all=iterations)
        case.iterations = chosen.tolist()
    for step, samples in samples_s.items():
        case.samples_s[step] = samples[:, chosen].tolist()
        if case.bounded:
            case.slowest_s[step] = time_of_iterations(samples, case.aligned).tolist()
            quartiles = np.percentile(samples, [25, 50, 75], axis=1).T
            case.quartiles_s[step] = quartiles.round(9).tolist()
