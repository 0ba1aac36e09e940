"""How often does node_check.py name a healthy rank, and how often a slow one?

    python tests/simulate_node_check.py         the table of docs/node_check.md, half a minute

8 ranks are measured once, and again if one of them looks slow. The script's functions judge them.

CPU, quiet    the noise of the ranks of one node with 2 cores where nothing else ran: levels that
              differ by 2 %, samples that are 6 to 25 % longer, and 3 in 100 several times as long
CPU, N %      beside a program that takes N % of the 2 cores, in bursts of a second. A rank stays on
              the core where the program runs in half of the bursts; 85 in 100 of its samples then
              take 2 to 6 times as long
GPU           levels that differ by 1.5 %, blocks that differ by 1 %; heat slows 1 of 10 blocks
"""

import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import node_check
from benchmarks.workloads.outliers import SIGMAS, Findings
from common.environment import BUSY, Others
from common.report import Case

RANKS, CORES = 8, 2
SLOW = 3  # the rank that is slow, where one is
ROUNDS, ITERATIONS = 12, 2  # of a measurement, which takes a second
NOISE = {"matmul_fp32": 0.06, "copy": 0.2, "launch": 0.25}  # of samples on the CPU
Rng = np.random.Generator
Times = NDArray[np.float64]  # [iterations]


class World(NamedTuple):
    device: str
    margin: float
    neighbours: float  # their share of the cores


WORLDS = {
    "CPU, quiet": World("cpu", 0.4, 0.0),
    "CPU, 5 %": World("cpu", 0.4, 0.05),
    "CPU, 9 %": World("cpu", 0.4, 0.09),
    "CPU, 30 %": World("cpu", 0.4, 0.3),
    "GPU": World("cuda", 0.1, 0.0),
}


def on_gpu(rng: Rng) -> Times:
    blocks = rng.normal(1, 0.01, ROUNDS) * rng.normal(1, 0.015)
    blocks *= np.where(rng.random(ROUNDS) < 0.1, 1.15, 1.0)
    return np.repeat(blocks, ITERATIONS) * np.exp(rng.normal(0, 0.003, ROUNDS * ITERATIONS))


def on_cpu(rng: Rng, noise: float, busy: NDArray[np.bool_]) -> Times:
    """busy: whether the rank shares its core in a round, [rounds]."""
    n = ROUNDS * ITERATIONS
    samples = np.exp(np.abs(rng.normal(0, noise, n))) * rng.normal(1, 0.02)
    samples *= np.where(rng.random(n) < 0.03, rng.uniform(2, 8, n), 1.0)
    waits = np.repeat(busy, ITERATIONS) & (rng.random(n) < 0.85)
    return samples * np.where(waits, rng.uniform(2, 6, n), 1.0)


def bursts(rng: Rng, share: float) -> NDArray[np.bool_]:
    """Whether the program runs in each round. It takes one core, so it runs for CORES * share of
    the time, a second on average before it pauses."""
    running = CORES * share
    at = np.arange(ROUNDS) / ROUNDS
    now, is_on, states = 0.0, bool(rng.random() < running), np.zeros(ROUNDS, dtype=bool)
    while now < 1 and running:
        length = rng.exponential(1.0 if is_on else (1 - running) / running)
        states[(at >= now) & (at < now + length)] = is_on
        now, is_on = now + length, not is_on
    return states


def measured(rng: Rng, world: World, slow: float) -> list[Case]:
    """A measurement of each rank alone. slow: how many times as long rank SLOW takes."""
    runs = bursts(rng, world.neighbours)
    cases = []
    for rank in range(RANKS):
        busy = runs & (rng.random() < 0.5)
        metrics: dict[str, float] = {}
        for step, noise in NOISE.items():
            times = on_gpu(rng) if world.device == "cuda" else on_cpu(rng, noise, busy)
            times *= slow if rank == SLOW else 1.0
            case = Case(key={"device": world.device}, ranks=[rank], rounds=[ITERATIONS] * ROUNDS)
            metrics[f"{step}_s"] = float(times.min())
            metrics[f"{step}_sustained_s"] = node_check.sustained(times, case)
            metrics[node_check.STEPS[step].rate(step)] = 1.0
        cases.append(Case(key={"rank": rank}, ranks=[rank], metrics=metrics))
    return cases


def verdict(rng: Rng, world: World, slow: float) -> str:
    """The last line of a run."""
    alone: list[list[int]] = [[rank] for rank in range(RANKS)]
    teams = {"rank": alone, "node": [list(range(RANKS))], "rail": alone}
    margins = dict.fromkeys(("rank", "node", "rail", "link"), world.margin)
    cluster = node_check.Cluster(True, [0] * 8, teams, ["kind"] * 8, margins, {}, SIGMAS)
    found: Findings = node_check.judge(measured(rng, world, slow), cluster)
    if found:
        again = node_check.judge(measured(rng, world, slow), cluster)
        found = node_check.in_both(found, again)
    others = Others(world.neighbours * CORES, CORES) if world.neighbours > BUSY else None
    hosts = {"rank": ["a"] * RANKS, "node": ["a"], "rail": ["a"]}
    return node_check.conclude(found, others, [], "slow", hosts, "")[1][-1]


def rates(world: World, slow: float, runs: int) -> dict[str, float]:
    """Shares of the runs that end so."""
    rng = np.random.default_rng(1)
    lines = [verdict(rng, world, slow) for _ in range(runs)]
    return {
        "not fit": sum(line.startswith("not fit") for line in lines) / runs,
        "cannot be told": sum(line.startswith("cannot be told") for line in lines) / runs,
        "named alone": lines.count(f"not fit: rank {SLOW} on a") / runs,
    }


def main() -> None:
    print("| 8 ranks | slow rank | not fit | cannot be told | that rank named alone |")
    print("|---|---|---|---|---|")
    for name, world in WORLDS.items():
        for slow in (1.0, 1.2 if world.device == "cuda" else 1.6):
            shares = [f"{share:.1%}" for share in rates(world, slow, 1000).values()]
            print(f"| {name} | {f'{slow:g} times' if slow > 1 else '-'} | {' | '.join(shares)} |")


if __name__ == "__main__":
    main()
