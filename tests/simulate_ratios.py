"""Compare two estimators of a ratio: quotients of geometric means over rounds, and of medians.

    python tests/simulate_ratios.py          the numbers of docs/evidence.md, a minute

Two steps with a ratio of 0.8 are simulated under several conditions of the machine:

steady      samples differ by 5%
drift       the machine becomes 30% slower over the run, for both steps alike
outliers    one block in ten takes twice as long
neighbor    another process runs intermittently, in phases of half a block, 3, 10 or 30 blocks on
            average, and slows the steps down by 50%

medians: the quotient of the medians over all iterations, with a bootstrap interval: rounds are
drawn 300 times with replacement, and the deviation of the logarithms is scaled by Student's t.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.stats import Estimate, Times, student_t

RATIO, NOISE = 0.8, 0.05
Rng = np.random.Generator
Samples = NDArray[np.float64]  # [rounds, iterations of a block]
CONDITIONS = ("steady", "drift", "outliers", *(f"neighbor, {x:g}" for x in (0.5, 3, 10, 30)))
SIZES = ((6, 8), (12, 4), (24, 4))  # rounds, iterations of a block


def level(condition: str, rounds: int, block: int, rng: Rng) -> Samples:
    """The slowdown of the machine in each iteration of a run, in the order in which they run."""
    count = 2 * rounds * block
    slow = np.ones(count)
    if condition == "drift":
        slow = np.linspace(1, 1.3, count)
    if condition == "outliers":
        slow = np.repeat(np.where(rng.random(2 * rounds) < 0.1, 2.0, 1.0), block)
    if condition.startswith("neighbor"):
        phase, is_on, at = float(condition.split()[1]) * block, rng.random() < 0.5, 0
        while at < count:
            length = max(1, int(rng.exponential(phase)))
            slow[at : at + length] = 1.5 if is_on else 1.0
            is_on, at = not is_on, at + length
    return slow


def two_steps(condition: str, rounds: int, block: int, rng: Rng) -> tuple[Samples, Samples]:
    """The part and the step. Every other round is in reverse order, as in common/timing.py."""
    count = 2 * rounds * block
    samples = level(condition, rounds, block, rng) * np.exp(NOISE * rng.normal(size=count))
    blocks = samples.reshape(rounds, 2, block)
    blocks[1::2] = blocks[1::2, ::-1]
    return RATIO * blocks[:, 0], blocks[:, 1]


def by_rounds(part: Samples, step: Samples, rng: Rng) -> Estimate:
    """The estimator of the scripts: the quotient of geometric means over rounds."""
    rounds = [part.shape[1]] * part.shape[0]
    return Times({"part": [part.ravel()], "step": [step.ravel()]}, rounds).ratio("part")


def by_medians(part: Samples, step: Samples, rng: Rng) -> Estimate:
    """The quotient of medians over all iterations."""
    rounds = len(part)
    drawn = rng.integers(0, rounds, size=(300, rounds))
    medians = [np.median(x[drawn].reshape(300, -1), axis=1) for x in (part, step)]
    spread = np.std(np.log(medians[0] / medians[1]), ddof=1) * np.sqrt(rounds / (rounds - 1))
    value, reach = np.median(part) / np.median(step), np.exp(student_t(0.95, rounds - 1) * spread)
    return Estimate(float(value), float(value / reach), float(value * reach))


ESTIMATORS: dict[str, Callable[[Samples, Samples, Rng], Estimate]] = {
    "geometric means": by_rounds,
    "medians": by_medians,
}


def judged(name: str, condition: str, rounds: int, block: int, runs: int) -> tuple[float, float]:
    """The share of intervals that contain the true ratio, and the median of their relative
    half-widths. block: iterations of a block."""
    rng = np.random.default_rng(0)
    holds, widths = [], []
    for _ in range(runs):
        estimate = ESTIMATORS[name](*two_steps(condition, rounds, block, rng), rng)
        holds.append(estimate.may_be(RATIO))
        if estimate.low is not None and estimate.high is not None:
            widths.append(np.log(estimate.high / estimate.low) / 2)
    return float(np.mean(holds)), float(np.median(widths))


def main() -> None:
    print(f"{'machine':16} {'rounds':>6}   " + "   ".join(f"{name:>16}" for name in ESTIMATORS))
    for condition in CONDITIONS:
        for rounds, block in SIZES:
            cells = []
            for name in ESTIMATORS:
                holds, width = judged(name, condition, rounds, block, 1000)
                cells.append(f"{holds:7.1%} +-{width:6.1%}")
            print(f"{condition:16} {rounds:6}   {'   '.join(cells)}", flush=True)


if __name__ == "__main__":
    main()
