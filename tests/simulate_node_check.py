"""Simulate the error rates of node_check.py and p2p_matrix.py: how often they name healthy and slow
ranks, nodes or links.

    python tests/simulate_node_check.py         the numbers of docs/evidence.md, 3 minutes

8 ranks are measured, and measured again if one of them looks slow or unsteady. The links of 8 nodes
are measured in the same way. The times are simulated; the functions of the script judge them.

CPU, quiet    the noise of ranks on an idle node with 2 cores: levels differ by 2%, samples are 6 to
              25% longer, and 3 in 100 several times as long
CPU, N %      another process uses N % of the 2 cores in bursts of a second. In half of the bursts a
              rank is on the same core; 85 in 100 of its samples then take 2 to 6 times as long
GPU           levels that differ by 1.5%, blocks that differ by 1%; heat slows 1 of 10 blocks
links, CPU    samples of 50 ms over gloo with 15% noise; 3 in 100 take twice as long
links, GPU    samples of 50 ms over NCCL with 1% noise, and levels that differ by 1%
crowded       the links of 8 ranks that share 2 cores: levels differ by a factor of 1.6 (standard
              deviation), and 1 in 10 samples takes 2 to 20 times as long

p2p_matrix.py judges the links of 8 ranks, measured as on the CPU (3 rounds of 3 samples) or on GPUs
(7 rounds of 1). In 15 in 100 samples, an unsteady link takes 5 to 20 times as long.
"""

import sys
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import node_check, p2p_matrix
from benchmarks.node_check import Judgement
from benchmarks.workloads.links import Link, drift_of, link_of, rounds_of, slow_links, widest
from benchmarks.workloads.outliers import SIGMAS, Component, Crowd
from common import stats
from common.stats import median
from harness.cpu_load import BUSY, Others
from harness.report import Case

RANKS, CORES = 8, 2
SLOW = 3  # the rank or node that is slow, if any
ROUNDS, ITERATIONS = 12, 2  # of a measurement of one second
NOISE = {"matmul_fp32": 0.06, "copy": 0.2, "launch": 0.25}  # of samples on the CPU
Rng = np.random.Generator
Times = NDArray[np.float64]  # [iterations]


class Condition(NamedTuple):
    device: str
    margin: float
    others: float  # the share of the cores that other processes use
    links: bool = False
    crowd: Crowd | None = None


CONDITIONS = {
    "CPU, quiet": Condition("cpu", 0.4, 0.0),
    "CPU, 5%": Condition("cpu", 0.4, 0.05),
    "CPU, 9%": Condition("cpu", 0.4, 0.09),
    "CPU, 30%": Condition("cpu", 0.4, 0.3),
    "GPU": Condition("cuda", 0.1, 0.0),
    "links, CPU": Condition("cpu", 2.0, 0.0, links=True),
    "links, GPU": Condition("cuda", 0.1, 0.0, links=True),
    "crowded": Condition("cpu", 2.0, 0.0, links=True, crowd=Crowd("vm", RANKS, CORES)),
}
# how many times as long the slow rank or node takes
SLOWER = {"CPU": 1.6, "GPU": 1.2, "links, CPU": 4.0, "links, GPU": 1.3, "crowded": 150.0}


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
    """Whether the other process runs in each round. It uses one core for CORES * share of the time,
    in bursts of a second on average."""
    running = CORES * share
    at = np.arange(ROUNDS) / ROUNDS
    now, is_on, states = 0.0, bool(rng.random() < running), np.zeros(ROUNDS, dtype=bool)
    while now < 1 and running:
        length = rng.exponential(1.0 if is_on else (1 - running) / running)
        states[(at >= now) & (at < now + length)] = is_on
        now, is_on = now + length, not is_on
    return states


def measured_ranks(rng: Rng, condition: Condition, slow: float) -> Judgement:
    """A measurement of each rank alone. slow: how many times as long rank SLOW takes."""
    alone: list[list[int]] = [[rank] for rank in range(RANKS)]
    teams = {"rank": alone, "node": [list(range(RANKS))], "rail": alone}
    margins = dict.fromkeys(("rank", "node", "rail", "link"), condition.margin)
    cluster = node_check.Cluster(True, [0] * 8, teams, ["kind"] * 8, margins, {}, SIGMAS)
    runs = bursts(rng, condition.others)
    cases, unsteady = [], []
    for rank in range(RANKS):
        busy = runs & (rng.random() < 0.5)
        metrics: dict[str, float] = {}
        drifts: list[float | None] = []
        for step, noise in NOISE.items():
            on_cuda = condition.device == "cuda"
            times = on_gpu(rng) if on_cuda else on_cpu(rng, noise, busy)
            times *= slow if rank == SLOW else 1.0
            blocks = times.reshape(ROUNDS, ITERATIONS).mean(axis=1).tolist()
            metrics[f"{step}_s"] = float(times.min())
            metrics[f"{step}_sustained_s"] = node_check.sustained(blocks, on_cuda)
            metrics[node_check.STEPS[step].rate(step)] = 1.0
            judged = partial(node_check.sustained, on_cuda=on_cuda)
            drifts.append(drift_of(blocks, judged))
        cases.append(Case(key={"rank": rank}, ranks=[rank], metrics=metrics))
        if node_check.drifted(widest(drifts), condition.margin):
            unsteady.append(Component("rank", ((rank,),)))
    return Judgement(node_check.judge(cases, cluster), unsteady)


def measured_links(rng: Rng, condition: Condition, slow: float) -> Judgement:
    """A measurement of the links of 8 nodes. slow: how many times as long those of SLOW take."""
    links, unsteady = [], []
    for a, b in (pair for pairs in rounds_of(RANKS) for pair in pairs):
        level = rng.normal(1, 0.01) * (slow if SLOW in (a, b) else 1.0)
        samples = level * np.exp(rng.normal(0, 0.15 if condition.device == "cpu" else 0.01, 6))
        if condition.crowd:
            samples *= np.exp(rng.normal(0, np.log(1.6)))
            samples *= np.where(rng.random(6) < 0.1, rng.uniform(2, 20, 6), 1.0)
        if condition.device == "cpu":
            samples *= np.where(rng.random(6) < 0.03, 2.0, 1.0)
        blocks = samples.reshape(2, 3).mean(axis=1).tolist()
        link = Link(a, b, 10.0, None, None, 1 / max(blocks), median(samples).relative)
        links.append(link._replace(drift=drift_of(blocks, max)))
        if node_check.drifted(links[-1].drift, condition.margin):
            unsteady.append(Component("link", ((a, b),)))
    found = slow_links(links, list(range(RANKS)), "rank", SIGMAS, condition.margin)
    return Judgement(found, unsteady)


def verdict(rng: Rng, condition: Condition, slow: float) -> str:
    """The last line of a run."""
    measured = measured_links if condition.links else measured_ranks
    found = measured(rng, condition, slow)
    if found.slow or found.unsteady:
        found = node_check.in_both(found, measured(rng, condition, slow))
        found = node_check.without_unsure(found, condition.crowd)
    others = Others(condition.others * CORES, CORES) if condition.others > BUSY else None
    members = [f"member {number}" for number in range(RANKS)]
    names = {"rank": members, "node": members, "link": members}
    unsteady = [component.name(names) for component in found.unsteady]
    unsure = "some" if found.unsure else ""
    doubts = node_check.doubts_of(unsteady, others, [], unsure=unsure)
    return node_check.conclude(found.slow, doubts, bool(others), [], "slow", names, "")[1][-1]


def rates(condition: Condition, slow: float, runs: int) -> dict[str, float]:
    """Shares of the runs by verdict."""
    rng = np.random.default_rng(1)
    lines = [verdict(rng, condition, slow) for _ in range(runs)]
    return {
        "not fit": sum(line.startswith("not fit") for line in lines) / runs,
        "no verdict": sum(line.startswith("no verdict") for line in lines) / runs,
        "named alone": lines.count(f"not fit: member {SLOW}") / runs,
    }


def slower(name: str) -> float:
    """How many times as long the slow rank or node takes under a condition."""
    return SLOWER.get(name) or SLOWER[name.partition(",")[0]]


def matrix(rng: Rng, device: str, slow: float, level: str, unsteady: int) -> list[Link]:
    """The links of 8 ranks: those of rank SLOW, or one of its links, take `slow` times as long, and
    the last ones are unsteady."""
    pairs = [pair for pairs in rounds_of(RANKS) for pair in pairs if SLOW in pair]
    pairs += [pair for pairs in rounds_of(RANKS) for pair in pairs if SLOW not in pair]
    rounds, noise = ([3] * 3, 0.15) if device == "cpu" else ([1] * 7, 0.01)
    links = []
    for number, (a, b) in enumerate(pairs):
        cost = rng.normal(1, 0.01) * (slow if number < (7 if level == "rank" else 1) else 1.0)
        rows = {}
        for name in ("there", "back", "step", "latency"):
            samples = cost * np.exp(rng.normal(0, noise, sum(rounds)))
            stalls = rng.random(len(samples)) < (0.15 if number >= len(pairs) - unsteady else 0)
            rows[name] = [samples * np.where(stalls, rng.uniform(5, 20, len(samples)), 1.0)] * 2
        case = Case(key={}, ranks=[a, b], rounds=rounds)
        links.append(link_of(a, b, [(a, b)], [1], 1, case, stats.Times(rows, rounds)))
    return links


def matrix_rates(
    device: str, slow: float, level: str, unsteady: int, runs: int
) -> dict[str, float]:
    """Shares of the runs: what p2p_matrix.py says about the planted rank or link, and others."""
    rng = np.random.default_rng(1)
    nodes, ranks = [0] * RANKS, [f"rank {rank}" for rank in range(RANKS)]
    planted = (
        ("rank 3:",) if level == "rank" else ("link rank 3 -> rank 4:", "link rank 4 -> rank 3:")
    )
    counts = dict.fromkeys(("others named", "no verdict", "no link named", "named"), 0)
    for _ in range(runs):
        links = matrix(rng, device, slow, level, unsteady)
        found = p2p_matrix.slow_components(links, nodes, "rank", SIGMAS)
        names = {"node": ["vm"], "rank": ranks, "link": ranks}
        lines = p2p_matrix.answer(links, nodes, found, names, "")
        named = [line for line in lines if line.startswith("slow ")]
        right = [line for line in named if line[5:].startswith(planted) and slow > 1]
        counts["others named"] += len(right) < len(named)
        counts["named"] += bool(right)
        counts["no verdict"] += lines[0].startswith("no verdict")
        counts["no link named"] += lines[0].startswith("no link")
    return {name: count / runs for name, count in counts.items()}


def main() -> None:
    columns = "injected slowdown | not fit | no verdict | only the slow one named"
    print(f"| simulated noise: 8 ranks, or links of 8 nodes | {columns} |")
    print("|---|---|---|---|---|")
    for name, condition in CONDITIONS.items():
        for slow in (1.0, slower(name)):
            shares = [f"{share:.1%}" for share in rates(condition, slow, 1000).values()]
            if slow == 1:  # nothing is planted
                shares[-1] = "-"
            print(f"| {name} | {f'{slow:g} times' if slow > 1 else '-'} | {' | '.join(shares)} |")
    columns = "slow | others named | no verdict | no link named | the slow one named"
    print(f"\n| p2p_matrix.py, unsteady of 28 links | {columns} |\n|---|---|---|---|---|---|")
    for device, factor in (("cpu", 4.0), ("cuda", 1.5)):
        for unsteady in (0, 1, 3, 14):
            for slow, level in ((1.0, ""), (factor, "rank"), (factor, "link")):
                rates_of = matrix_rates(device, slow, level or "rank", unsteady, 500)
                shares = [f"{share:.1%}" for share in rates_of.values()]
                what = f"{level}, {slow:g} times" if level else "-"
                print(f"| {device}, {unsteady} | {what} | {' | '.join(shares)} |")


if __name__ == "__main__":
    main()
