"""Does a bounded report say what the whole one would? Made-up cases, written and read both ways.

    python tests/simulate_report.py             cases of 3 x 2^18 samples, two minutes
    python tests/simulate_report.py quick       a 64th of the samples, 3 seconds

Each kind of case has runs of BASE and TEST. Each run is written whole and bounded. Prints how many
of the runs give the same times to analysis/, how many of compare.py's results are alike (ratio,
interval and verdict), and in how many runs `straggler` finds the same rank, or none, in the samples
that are left: fewer samples find a slow rank later, near the margin of 5 %. Metrics need no such
check: they are of all samples. Seeded.
"""

import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tabulate
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from analysis.load import Run, load
from analysis.verdicts import Design, compare
from common import report, samples
from common.stats import straggler

RUNS, ROUNDS = 3, 24
DESIGNS = (Design(), Design(paired=True), Design(paired=True, interleaved=True))


class Kind(NamedTuple):
    """A kind of case. The numbers are those of the full size."""

    name: str
    ranks: int
    slow: float = 1.0  # by this factor the local compute of rank 1 is longer
    ratio: float = 1.0  # TEST's time over BASE's
    aligned: bool = True
    correlation: float = 0.5  # of neighbouring iterations


KINDS = (
    Kind("1,024 ranks", 1024),
    Kind("1,024 ranks, one 1.3 times slower", 1024, slow=1.3),
    Kind("1,024 ranks, one 1.2 times slower", 1024, slow=1.2),
    Kind("256 ranks, TEST 3 % slower", 256, ratio=1.03),
    Kind("256 ranks, TEST 10 % slower", 256, ratio=1.1),
    Kind("256 ranks, correlated (0.95)", 256, correlation=0.95),
    Kind("256 ranks at their own pace, one 1.2 times slower", 256, slow=1.2, aligned=False),
    Kind("4 ranks, one 1.1 times slower", 4, slow=1.1),
)


def simulate(kind: Kind, ratio: float, count: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """The seconds of the step and of local compute, [2, ranks, iterations]: `count` samples."""
    noise = rng.normal(0, 1, (2, kind.ranks, count // (2 * kind.ranks)))
    for i in range(1, noise.shape[-1]):  # a stationary AR(1) process
        fresh = np.sqrt(1 - kind.correlation**2) * noise[..., i]
        noise[..., i] = kind.correlation * noise[..., i - 1] + fresh
    seconds = 1e-3 * ratio * rng.lognormal(0, 0.01) * np.exp(0.03 * noise)
    seconds[1, 1] *= kind.slow
    if not kind.aligned:
        seconds[0, 1] *= kind.slow
    return np.asarray(seconds.round(9))


def write(path: str, kind: Kind, seconds: NDArray[np.float64], limit: int) -> None:
    """A report of one case, of at most about `limit` samples."""
    blocks = np.array_split(np.arange(seconds.shape[-1]), ROUNDS)
    rounds = [len(block) for block in blocks]
    ranks = list(range(kind.ranks))
    case = report.Case({"kind": kind.name}, ranks, rounds=rounds, aligned=kind.aligned)
    samples.LIMIT = limit
    samples.keep_samples(case, {"step": seconds[0], "local compute": seconds[1]})
    simulated = report.Report("simulated", {}, path)
    simulated.start()
    simulated.add(case)


def finding(path: str) -> int | None:
    """The rank that is slow by the samples of local compute in the report."""
    [case] = report.load(path).cases
    slow = straggler(case.samples_s["local compute"])
    return slow[0] if slow else None


def alike(whole: list[Run], bounded: list[Run]) -> tuple[int, int]:
    """How many runs have the same times, and how many results of compare() are the same."""
    same_times = 0
    for one, other in zip(whole, bounded, strict=True):
        [row], [bounded_row] = one.rows.values(), other.rows.values()
        assert bounded_row.bounded
        assert not row.bounded
        same_times += row == replace(bounded_row, bounded="", iterations=[])
    same_results = 0
    for design in DESIGNS:
        [result] = compare(whole[:RUNS], whole[RUNS:], design).cases
        same_results += [result] == compare(bounded[:RUNS], bounded[RUNS:], design).cases
    return same_times, same_results


def row_of(kind: Kind, limit: int, rng: np.random.Generator, folder: str) -> list[int]:
    """The numbers of one row: same times, same results, same findings."""
    wholes, boundeds, same_findings = [], [], 0
    for number in range(2 * RUNS):  # those of BASE come first
        ratio = 1.0 if number < RUNS else kind.ratio
        seconds = simulate(kind, ratio, 3 * limit, rng)
        whole, bounded = f"{folder}/{number}.jsonl", f"{folder}/{number}b.jsonl"
        write(whole, kind, seconds, seconds.size)
        write(bounded, kind, seconds, limit)
        same_findings += finding(whole) == finding(bounded)
        wholes += load([whole], "step")
        boundeds += load([bounded], "step")
        Path(whole).unlink()
        Path(bounded).unlink()
    return [*alike(wholes, boundeds), same_findings]


def main() -> int:
    quick = sys.argv[1:] == ["quick"]
    rng, limit, rows = np.random.default_rng(2024), samples.LIMIT // (64 if quick else 1), []
    expected = [2 * RUNS, len(DESIGNS), 2 * RUNS]
    with tempfile.TemporaryDirectory() as folder:
        for kind in KINDS:
            if quick:
                kind = kind._replace(ranks=max(4, kind.ranks // 32))
            rows.append([kind.name, *row_of(kind, limit, rng, folder)])
    heads = ["", "times", "results", "findings"]
    print(f"The same with the whole and the bounded report, of {expected}\n")
    print(tabulate.tabulate(rows, heads, "github"))
    return int(any(row[1:] != expected for row in rows))


if __name__ == "__main__":
    sys.exit(main())
