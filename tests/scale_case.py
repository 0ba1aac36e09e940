"""The cost of a case with many ranks on rank 0: gather, derive, write, with simulated ranks.

    python tests/scale_case.py                  1,024 ranks, 1,000 iterations
    python tests/scale_case.py RANKS ITERATIONS

Each rank has a step and two parts. Results are unpickled as in `gather`, without the time for the
network. Then Benchmark.write completes the case and writes its line.
"""

import pickle
import resource
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.workloads.training import breakdown, training_metrics
from common.stats import Times
from harness.benchmark import Benchmark, RankResult
from harness.report import Case, Report

SPLIT = "local compute"


class Cost(NamedTuple):
    """Time and bytes that rank 0 needs for one case."""

    unpickle_s: float
    keep_s: float  # complete and write the case
    gathered_bytes: int
    report_bytes: int
    peak_bytes: int  # peak memory of the process, including torch


def results_of(ranks: int, iterations: int) -> list[bytes]:
    """The pickled results that each rank sends to rank 0. Rank 3 is slow."""
    rng = np.random.default_rng(0)
    rounds = [len(part) for part in np.array_split(np.arange(iterations), 12)]
    sent = []
    for rank in range(ranks):
        slow = 1.3 if rank == 3 else 1.0
        step, local, alone = rng.lognormal(-7, 0.05, (3, iterations)) * [[2.0], [slow], [0.5]]
        samples = {"step": step.tolist(), SPLIT: local.tolist(), "alone": alone.tolist()}
        timed = Times.of_rank(samples, rounds, "iters")
        sent.append(pickle.dumps(RankResult(timed, None, [])))
    return sent


def derive(case: Case, times: Times, facts: list[Any]) -> None:
    case.metrics |= training_metrics(times, 8 * len(facts))
    case.metrics |= breakdown(times, SPLIT, "alone")


def cost_of_case(ranks: int = 1024, iterations: int = 1000) -> Cost:
    sent = results_of(ranks, iterations)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "report.jsonl")
        bench = Benchmark.__new__(Benchmark)
        bench.report = Report("scale_case", {}, str(path))
        bench.report.start()
        bench.observers = []
        start = perf_counter()
        results = [pickle.loads(content) for content in sent]
        unpickled = perf_counter()
        case = Case(key={"ranks": ranks}, ranks=list(range(ranks)))
        with patch.object(bench, "first_failure", return_value=(None, None)):
            reason, _ = bench.write(case, derive, results, [])
        kept = perf_counter()
        assert reason is None, reason
        assert case.metrics["late_ranks"] == [3]
        peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        sizes = (sum(map(len, sent)), path.stat().st_size, peak)
        return Cost(unpickled - start, kept - unpickled, *sizes)


if __name__ == "__main__":
    cost = cost_of_case(*map(int, sys.argv[1:]))
    print(f"unpickle       {cost.unpickle_s:8.3f} s, {cost.gathered_bytes / 1e6:.1f} MB")
    print(f"keep and write {cost.keep_s:8.3f} s, {cost.report_bytes / 1e3:.0f} kB")
    print(f"peak memory    {cost.peak_bytes / 1e9:8.3f} GB, with torch")
