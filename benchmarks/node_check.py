#!/usr/bin/env python3
"""Are these nodes fit to train on? An answer within a minute, with a reason and a name.

    alone     each rank by itself: products of matrices, copies of memory, to the device and back,
              the cost of a launch; on the CPU the ranks of a node, which share cores, take turns
    together  all_reduce inside the nodes and between them (a rail: the i-th ranks of all nodes), a
              training step, and links, disjoint pairs in rounds: each two ranks of a node meet
              once, then each two nodes, all their rails at the same time
    slow      takes longer than the median of its kind by --sigmas median absolute deviations and
              by --margin, twice: what is about to be named is measured again
    wrong     the same seeded product has other bits than on most ranks of the kind; data does not
              arrive; replicas differ; a node has fewer GPUs than the others, or than --gpus
    times     of the fastest sample and of a block's mean (`sustained`): the median block's on
              CUDA, where heat counts, and the best one's on the CPU, where neighbours do
    busbw     2(n-1)/n * bytes / time

Exit status: 0 fit; 1 slow or wrong, named in the last lines; 2 a mistake; 3 a hang.

    torchrun --nproc-per-node 8 benchmarks/node_check.py
    torchrun --nproc-per-node 8 benchmarks/node_check.py --min-tflops 600 --json node.jsonl
    srun --ntasks-per-node 8 bash launch/slurm_env.sh python3 benchmarks/node_check.py && sbatch ...

Asks what Megatron-LM's gpu_sniff_test.py asks; written anew. BSD-3-Clause. docs/node_check.md.
"""

import argparse
import hashlib
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import cli, links, patterns
from common.benchmark import Benchmark, Build, Workload
from common.check import compare_replicas, digest, odd_results, verdict
from common.decoder import DECODERS, Decoder, next_token_loss, random_text
from common.dist import Group, Job, node_of_each
from common.gpus import lacking
from common.outliers import SIGMAS, Findings, judge, on_hosts, sentences
from common.report import Case, Report
from common.stats import step_metrics
from common.table import Columns, metric, render
from common.timing import Step

Key = dict[str, Any]
Teams = list[list[int]]  # ranks of nodes, or of rails

DTYPES = {"cpu": {"fp32": torch.float32}, "cuda": {"bf16": torch.bfloat16, "fp32": torch.float32}}
LAUNCHES = 200  # in a sample
PRODUCTS = 3  # whose bits are compared
BATCH = 2  # texts of a rank in the training step


def parse_args() -> argparse.Namespace:
    parser = cli.Parser(__doc__)
    add, positive = parser.add_argument, cli.positive_float
    budget = "since rank 0 has started; what does not fit is left out, and said (default: 60)"
    add("--budget", type=positive, default=60.0, metavar="SECONDS", help=budget)
    what = "what ends with status 1: all that is slow or wrong, or wrong alone (default: slow)"
    add("--fail-on", choices=("slow", "wrong"), default="slow", help=what)
    add("--sigmas", type=positive, default=SIGMAS, metavar="S", help="(default: 5)")
    margin = "slower by less is not named (default: 0.1; on the CPU 0.4, and 1 for all together)"
    add("--margin", type=positive, metavar="SHARE", help=margin)
    add("--min-tflops", type=positive, default=0, metavar="T", help="of each product, on each rank")
    add("--min-busbw", type=positive, default=0, metavar="GB/S", help="of all_reduce in each node")
    add("--gpus", type=cli.positive_int, metavar="N", help="that each node must have")
    cli.add_common_flags(parser, min_iters=6, max_seconds=6, timeout=60)
    return parser.parse_args()


# -- each rank alone -------------------------------------------------------------------------------


class Probe(NamedTuple):
    step: Step
    work: float  # in one step
    unit: str
    result: torch.Tensor | None = None  # alike on all devices of a kind


def probes(device: torch.device) -> dict[str, Probe]:
    found, cuda = dict[str, Probe](), device.type == "cuda"
    n, source = 8192 if cuda else 512, torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(n, n, generator=source, device=device) for _ in "ab")
    for name, dtype in DTYPES[device.type].items():
        x, y, product = a.to(dtype), b.to(dtype), torch.empty_like(a, dtype=dtype)
        found[f"matmul {name}"] = Probe(
            partial(torch.mm, x, y, out=product), 2 * n**3, "flop", product
        )
    size = 2**29 if cuda else 2**24
    x, y = torch.ones(2, size, dtype=torch.uint8, device=device)
    found["copy"] = Probe(partial(y.copy_, x), 2 * size, "bytes")  # read and written
    if cuda:
        host = torch.ones(size, dtype=torch.uint8, pin_memory=True)
        found["to device"] = Probe(partial(x.copy_, host, non_blocking=True), size, "bytes")
        found["to host"] = Probe(partial(host.copy_, x, non_blocking=True), size, "bytes")
    one = torch.zeros(1, device=device)

    def launch() -> None:
        for _ in range(LAUNCHES):
            one.add_(1)

    return found | {"launch": Probe(launch, LAUNCHES, "calls")}


def build_alone(turns: int, job: Job, group: Group) -> Workload:
    """While a rank has its turn, the others of its node wait in a barrier, which does not spin."""
    found, mine = probes(job.device), job.local_rank if turns > 1 else 0
    steps: dict[str, Step] = {
        f"{name}, turn {turn}": probe.step if turn == mine else lambda: None
        for turn in range(turns)
        for name, probe in found.items()
    }

    def product_bits() -> str:
        hasher = hashlib.blake2b(digest_size=4)
        for probe in found.values():
            if probe.result is not None:
                probe.step()
                hasher.update(probe.result.cpu().view(torch.uint8).numpy().tobytes())
        return hasher.hexdigest()

    def facts() -> dict[str, Any]:
        work = {name: (probe.work, probe.unit) for name, probe in found.items()}
        bits = [product_bits() for _ in range(PRODUCTS)]
        return {"work": work, "turn": f", turn {mine}", "bits": bits}

    return Workload(steps, facts=facts)


# -- all ranks together ----------------------------------------------------------------------------


def build_all_reduce(size: int, teams: Teams, job: Job, group: Group) -> Workload:
    x = torch.zeros(max(1, size // 4), device=job.device)
    team = next(team for team in teams if job.rank in team)
    n, all_reduce = len(team), partial(dist.all_reduce, x, group=group.test)

    def facts() -> dict[str, Any]:
        patterns.fill(x, patterns.tile(team.index(job.rank), "sum", n))
        all_reduce()
        wrong = patterns.count_wrong(x, patterns.reduced_tile("sum", n))
        return {"work": {"all_reduce": (2 * (n - 1) / n * size, "bytes")}, "wrong": wrong}

    return Workload({"all_reduce": all_reduce}, facts=facts)


def build_step(job: Job, group: Group) -> Workload:
    """A training step of a small language model under DDP."""
    torch.manual_seed(0)
    config = DECODERS["decoder-124m" if job.device.type == "cuda" else "decoder-tiny"]
    model = DistributedDataParallel(Decoder(config).to(job.device), process_group=group.test)
    tokens, targets = (x.to(job.device) for x in random_text(config, BATCH, seed=job.rank))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        next_token_loss(model(tokens), targets).backward()
        optimizer.step()

    return Workload({"step": step}, facts=lambda: digest(model))


# -- the verdict -----------------------------------------------------------------------------------


def split(
    report: Report, level: str, teams: Teams, kinds: list[str], case: Case, facts: list[Any]
) -> None:
    """Each rank, node or rail becomes a case. Of an iteration its slowest rank counts."""
    bits = [fact.get("bits", [""]) for fact in facts]
    odd = odd_results(bits, [kinds[rank] for rank in case.ranks])
    pick: Callable[[Any], Any] = np.median if case.key["device"] == "cuda" else np.min
    for number, ranks in enumerate(teams):
        rows = [case.ranks.index(rank) for rank in ranks]
        fact, place = facts[rows[0]], report.environment["ranks"][ranks[0]]
        key, metrics, samples = case.key | {level: number}, dict[str, Any](), {}
        if level != "rail":
            key["host"] = place["host"]
        if level == "rank":
            metrics = {"product": bits[rows[0]][0]}
            metrics |= {name: place[name] for name in ("pci", "network") if name in place}
        for name, (work, unit) in fact["work"].items():
            steps = case.samples_s[name + fact.get("turn", "")]
            samples[name] = [steps[row] for row in rows]
            blocks = np.split(np.max(samples[name], axis=0), np.cumsum(case.rounds)[:-1])
            word, sustained = name.replace(" ", "_"), float(pick([x.mean() for x in blocks]))
            fastest = float(min(x.min() for x in blocks))
            metrics |= {f"{word}_s": fastest, f"{word}_sustained_s": sustained}
            metrics[f"{word}_{unit}_per_s"] = work / sustained
        wrong = [odd[row] for row in rows if row in odd]
        bad = [rank for rank, row in zip(ranks, rows, strict=True) if facts[row].get("wrong")]
        wrong += [f"a wrong sum on rank {rank}" for rank in bad]
        check = verdict(wrong[0] if wrong else None)
        report.add(Case(key, ranks, samples, case.rounds, case.stop, metrics, check))
    case.samples_s = {}


COLUMNS: Columns = {  # of what was measured
    "host": lambda case: case.key.get("host", "-"),
    "pci": lambda case: case.metrics.get("pci", "-"),
    "network": lambda case: case.metrics.get("network", "-"),
    "matmul bf16\nTFLOP/s": metric("matmul_bf16_flop_per_s", 1e-12, 3),
    "matmul fp32\nTFLOP/s": metric("matmul_fp32_flop_per_s", 1e-12, 3),
    "copy\nGB/s": metric("copy_bytes_per_s", 1e-9, 3),
    "to device\nGB/s": metric("to_device_bytes_per_s", 1e-9, 3),
    "to host\nGB/s": metric("to_host_bytes_per_s", 1e-9, 3),
    "launch\n1000/s": metric("launch_calls_per_s", 1e-3, 3),
    "all reduce\nGB/s": metric("all_reduce_bytes_per_s", 1e-9, 3),
    "product": lambda case: case.metrics.get("product", "-"),
}


def conclude(
    slow: Findings, wrong: dict[str, str], cases: list[Case], fail_on: str
) -> tuple[list[str], str | None]:
    """The last lines, and why the nodes are not fit; None where they are."""
    for case in cases:
        if case.failed:
            parts = [f"{n} {case.key[n]}" for n in ("rank", "node", "rail") if n in case.key]
            wrong[parts[0] if parts else case.key["probe"]] = case.check.removeprefix("failed: ")
    lines = [*sentences(slow), *(f"wrong {who}: {why}" for who, why in wrong.items())]
    bad = [*wrong, *(who for who, _ in slow if fail_on == "slow")]
    problem = f"not fit: {', '.join(dict.fromkeys(bad))}" if bad else None
    return [*lines, problem or ("fit, though slow" if slow else "fit")], problem


# -- the run ---------------------------------------------------------------------------------------


class Phase(NamedTuple):
    """share: of the budget, that each case is timed for. judge: who is slow, of all that came."""

    name: str
    share: float
    cases: list[Callable[[Key], object]]
    judge: Callable[[list[Case]], Findings]


def plan(args: argparse.Namespace, bench: Benchmark, found: dict[str, Any]) -> list[Phase]:
    job, cpu, nodes = bench.job, bench.job.device.type == "cpu", node_of_each(found)
    kinds = [f"{row['device']}, {row['threads']} threads" for row in found["ranks"]]
    singles = [[rank] for rank in range(job.world_size)]
    members = [[r for r, n in enumerate(nodes) if n == node] for node in range(max(nodes) + 1)]
    rails = [list(ranks) for ranks in zip(*members, strict=False)]
    turns, size = (max(map(len, members)), 2**20) if cpu else (1, 2**28)
    # CPUs have neighbours, and links cross their cores
    alone, together = (args.margin or share for share in ((0.4, 1.0) if cpu else (0.1, 0.1)))
    limits = {"rank": {"flop_per_s": args.min_tflops * 1e12}}
    limits["node"] = {"bytes_per_s": args.min_busbw * 1e9}

    def compare(name: str, share: float, level: str, teams: Teams, build: Build) -> Phase:
        """All teams do the same at the same time, and each becomes a case of the report."""
        by_rank, ranks = level == "rank", sorted(rank for team in teams for rank in team)
        apart: Any = {"ranks": ranks, "teams": None if by_rank else teams}
        derive = partial(split, bench.report, level, teams, kinds)
        above, of = ({"node": nodes}, kinds) if by_rank else ({}, [""] * len(teams))
        how = (above, of, limits.get(level, {}), args.sigmas, alone if by_rank else together)

        def judged(cases: list[Case]) -> Findings:
            if cases := [case for case in cases if level in case.key]:
                shown = {head: cell for head, cell in COLUMNS.items() if cell(cases[0]) != "-"}
                shown = {level: lambda case: str(case.key[level])} | shown
                bench.print(f"\n{name}\n\n{render(shown, cases)}\n")
            return judge({case.key[level]: case.metrics for case in cases}, level, *how)

        measure = partial(bench.measure, build=build, derive=derive, **apart)
        return Phase(name, share, [measure] if by_rank or min(map(len, teams)) > 1 else [], judged)

    def derive_step(case: Case, digests: list[str]) -> None:
        case.metrics |= step_metrics(case.samples_s["step"], BATCH * len(case.ranks))
        case.check = verdict(compare_replicas(digests, case.ranks))
        bench.print(f"# a training step: {case.metrics['step_time_p50_s'] * 1e3:.4g} ms")

    def meet(number: int, pairs: list[links.Pair], key: Key) -> None:
        messages = links.Messages(size // 8, 8, 1)
        key = key | {"round": number, "size": messages.size}
        links.measure_round(bench, key, pairs, singles, messages)

    def judge_links(cases: list[Case]) -> Findings:
        rows = [tuple(link) for case in cases for link in case.metrics.get("links", [])]
        return links.slow_links(rows, nodes, "rank", args.sigmas, together)

    what, reduce = f"all_reduce of {cli.show_size(size)}", partial(build_all_reduce, size)
    turn, by_itself = 0.06 * min(1, 2 / turns), partial(build_alone, turns, job)
    step = partial(bench.measure, build=partial(build_step, job), derive=derive_step)
    rounds = links.rounds_by_node(members) if cpu or job.backend != "gloo" else []
    return [
        compare("each rank alone", turn, "rank", singles, by_itself),
        compare(f"{what} inside nodes", 1 / 60, "node", members, partial(reduce, members, job)),
        compare(f"{what} between nodes", 1 / 60, "rail", rails, partial(reduce, rails, job)),
        Phase("links", 1 / 150, [partial(meet, *r) for r in enumerate(rounds, 1)], judge_links),
        Phase("training step", 1 / 30, [step], lambda cases: {}),
    ]


def check(phases: list[Phase], bench: Benchmark) -> tuple[Findings, list[str]]:
    """Who is slow whenever it is measured, and what the budget left out.

    A case begins where there is time for it and for all of its phase again: who is suspected is
    measured again.
    """
    args, job, rule = bench.args, bench.job, bench.rule
    slow, left_out, longest = Findings(), list[str](), args.budget / 20
    fixed = {"world_size": job.world_size, "device": job.device.type, "backend": job.backend}

    def left() -> float:
        """Seconds, by the clock of rank 0. All ranks call it."""
        return bench.share(psutil.Process().create_time() + args.budget - time.time())

    for name, share, cases, judged in phases:
        seconds, warm = min(args.max_seconds, share * args.budget), min(args.warmup_iters, 2)
        bench.rule = replace(rule, warmup_iters=warm, target_ci=1e-9, max_seconds=seconds)
        # of its first case little is known: what was slow before need not be slow here
        spent, expected, suspects = 0.0, min(longest, args.budget / 10), Findings()
        for attempt in (1, 2):
            key = {"probe": name, "attempt": attempt} | fixed
            for number, measure in enumerate(cases):
                before = left()
                if attempt == 1 and before < spent + 2 * expected:
                    some = f"{len(cases) - number} of {len(cases)} rounds of " if number else ""
                    left_out.append(some + name)
                    cases = cases[:number]
                    break
                measure(key)
                took = before - left()
                expected = max(took, expected if number else 0)
                spent, longest = spent + took, max(longest, took)
            found = [case for case in bench.report.cases if case.key == case.key | key]
            accused: Findings = bench.share(judged(found))
            if attempt == 2:
                slow |= {who: by for who, by in accused.items() if who in suspects}
            elif suspects := accused:
                names = ", ".join(dict.fromkeys(who for who, _ in suspects))
                bench.print(f"# {name} again, for {names}")
            else:
                break
    return slow, left_out


def main() -> int:
    args = parse_args()
    with Benchmark("node_check", args) as bench:
        found = bench.report.environment
        slow, left_out = check(plan(args, bench, found), bench)
        if not bench.share(len(bench.report.cases)):
            bench.refuse(f"--budget {args.budget:g} ends before the first case; e.g. --budget 60")
        for what in left_out:
            bench.print(f"# left out, for --budget {args.budget:g}: {what}")
        if bench.job.rank == 0:
            lacks = {f"node {node}": why for node, why in lacking(found, args.gpus).items()}
            lines, problem = conclude(slow, lacks, bench.report.cases, args.fail_on)
            bench.print("\n" + "\n".join(f"# {on_hosts(line, found)}" for line in lines))
            if problem:
                bench.fail(on_hosts(problem, found))
    return bench.status


if __name__ == "__main__":
    sys.exit(record(main)())
