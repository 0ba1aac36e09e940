"""How often does the interval of an overlap contain the true overlap?

    python tests/simulate_overlap.py         the numbers of docs/evidence.md, half a minute

Local compute takes 100 ms and the communication alone 20 ms. Of it, 0, 30 or 90% are hidden, or the
exposed time is 1.2 times the communication alone, an overlap of -20%. In each round, the machine is
slower or faster by 3% for all steps alike, and each block by a further `noise`.

mean        of the estimates: the true overlap if there is no bias
contained   share of intervals that contain the true overlap
negative    share of overlaps that are significantly negative, for which a cause is named
dropped     share of overlaps without an interval, because it exceeds +-100 points
"""

import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.ddp_sweep import interference
from benchmarks.workloads.training import breakdown
from common.stats import Times
from harness.report import Case

LOCAL, ALONE = 0.1, 0.02
OVERLAPS = (0.0, 0.3, 0.9, -0.2)
ROUNDS, NOISES = (6, 12, 24), (0.01, 0.03)


class Result(NamedTuple):
    mean: float
    contained: float
    negative: float
    dropped: float


def judged(overlap: float, rounds: int, noise: float, runs: int) -> Result:
    """The results of simulated runs with this true overlap and a fixed seed."""
    rng = np.random.default_rng(0)
    true_s = {"step": LOCAL + (1 - overlap) * ALONE, "local": LOCAL, "alone": ALONE}
    means, contained, negative = [], [], []
    for _ in range(runs):
        machine = np.exp(rng.normal(0, 0.03, rounds))
        samples = {
            name: [seconds * machine * np.exp(rng.normal(0, noise, rounds))]
            for name, seconds in true_s.items()
        }
        metrics = breakdown(Times(samples, [1] * rounds), "local", "alone")
        found = metrics["overlap"]
        means.append(found.value)
        if found.low is not None:
            contained.append(found.may_be(overlap))
        named = interference([Case(key={}, ranks=[0, 1], metrics=metrics, name="1M/2R")])
        negative.append(named is not None)
    dropped = 1 - len(contained) / runs
    return Result(*map(float, (np.mean(means), np.mean(contained), np.mean(negative), dropped)))


def main() -> None:
    print(f"{'overlap':>7} {'rounds':>6} {'noise':>5}   {'   '.join(Result._fields)}")
    for overlap in OVERLAPS:
        for rounds in ROUNDS:
            for noise in NOISES:
                found = judged(overlap, rounds, noise, 2000)
                cells = [
                    f"{share:{len(name)}.1%}"
                    for name, share in zip(Result._fields, found, strict=True)
                ]
                start = f"{overlap:7.0%} {rounds:6} {noise:5.0%}"
                print(f"{start}   {'   '.join(cells)}", flush=True)


if __name__ == "__main__":
    main()
