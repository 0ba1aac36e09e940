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

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
UNITS = {"flop": ("TFLOP/s", 1e-12), "bytes": ("GB/s", 1e-9), "calls": ("1000/s", 1e-3)}
LAUNCHES = 200  # in a sample
PRODUCTS = 3  # whose bits are compared
BATCH = 2  # texts of a rank in the training step
# slower by less is not named, alone and together. CPUs have neighbours, and links cross their cores
MARGINS = {"cuda": (0.10, 0.10), "cpu": (0.40, 1.0)}


def parse_args() -> argparse.Namespace:
    parser = cli.Parser(__doc__)
    add, positive = parser.add_argument, cli.positive_float
    budget = "since rank 0 has started; what does not fit is left out, and said (default: 60)"
    add("--budget", type=positive, default=60.0, metavar="SECONDS", help=budget)
    what = "what ends with status 1: all that is slow or wrong, or wrong alone (default: slow)"
    add("--fail-on", choices=("slow", "wrong"), default="slow", help=what)
    dtypes = "of the products; a list (default: fp32, on CUDA bf16,fp32)"
    add("--dtype", type=cli.list_of(str, tuple(DTYPES)), metavar="DTYPE", help=dtypes)
    size = "of an all_reduce; a link carries an eighth of it (default: 1M, on CUDA 256M)"
    add("--size", type=cli.size, metavar="SIZE", help=size)
    add("--sigmas", type=positive, default=SIGMAS, metavar="S", help="(default: 5)")
    margin = "slower by less is not named (default: 0.1; on the CPU 0.4, and 1 for all together)"
    add("--margin", type=positive, metavar="SHARE", help=margin)
    add("--min-tflops", type=positive, default=0, metavar="T", help="of each product, on each rank")
    add("--min-busbw", type=positive, default=0, metavar="GB/S", help="of all_reduce in each node")
    add("--gpus", type=cli.positive_int, metavar="N", help="that each node must have")
    cli.add_common_flags(parser, min_iters=6, max_seconds=6, timeout=60)
    args = parser.parse_args()
    cuda = torch.cuda.is_available() and args.device != "cpu"
    args.dtype = args.dtype or (["bf16", "fp32"] if cuda else ["fp32"])
    args.size = args.size or (2**28 if cuda else 2**20)
    args.margins = (args.margin,) * 2 if args.margin else MARGINS["cuda" if cuda else "cpu"]
    return args


# -- each rank alone -------------------------------------------------------------------------------


class Probe(NamedTuple):
    step: Step
    work: float  # in one step
    unit: str


def seeded(dtype: str, device: torch.device) -> list[torch.Tensor]:
    """Two matrices that are the same on every device of a kind, and room for their product."""
    n = 8192 if device.type == "cuda" else 512
    source = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(n, n, generator=source, device=device).to(DTYPES[dtype]) for _ in "ab")
    return [a, b, torch.empty_like(a)]


def probes(dtypes: list[str], device: torch.device) -> dict[str, Probe]:
    found = {}
    for dtype in dtypes:
        a, b, c = seeded(dtype, device)
        found[f"matmul {dtype}"] = Probe(partial(torch.mm, a, b, out=c), 2 * len(a) ** 3, "flop")
    size = 2**29 if device.type == "cuda" else 2**24
    x, y = torch.ones(2, size, dtype=torch.uint8, device=device)
    found["copy"] = Probe(partial(y.copy_, x), 2 * size, "bytes")  # read and written
    if device.type == "cuda":
        host = torch.ones(size, dtype=torch.uint8, pin_memory=True)
        found["to device"] = Probe(partial(x.copy_, host, non_blocking=True), size, "bytes")
        found["to host"] = Probe(partial(host.copy_, x, non_blocking=True), size, "bytes")
    one = torch.zeros(1, device=device)

    def launch() -> None:
        for _ in range(LAUNCHES):
            one.add_(1)

    return found | {"launch": Probe(launch, LAUNCHES, "calls")}


def product_bits(dtypes: list[str], device: torch.device) -> str:
    hasher = hashlib.blake2b(digest_size=4)
    for dtype in dtypes:
        a, b, c = seeded(dtype, device)
        torch.mm(a, b, out=c)
        hasher.update(c.cpu().view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()


def build_alone(dtypes: list[str], job: Job, turns: int, group: Group) -> Workload:
    """While a rank has its turn, the others of its node wait in a barrier, which does not spin."""
    found, mine = probes(dtypes, job.device), job.local_rank if turns > 1 else 0
    steps: dict[str, Step] = {
        f"{name}, turn {turn}": probe.step if turn == mine else lambda: None
        for turn in range(turns)
        for name, probe in found.items()
    }

    def facts() -> dict[str, Any]:
        bits = [product_bits(dtypes, job.device) for _ in range(PRODUCTS)]
        work = {name: (probe.work, probe.unit) for name, probe in found.items()}
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
        fact, samples = facts[rows[0]], dict[str, list[list[float]]]()
        metrics: dict[str, Any] = {"product": bits[rows[0]][0]}
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
        key, check = case.key | {level: number}, verdict(wrong[0] if wrong else None)
        if level != "rail":
            key["host"] = report.environment["ranks"][ranks[0]]["host"]
        report.add(Case(key, ranks, samples, case.rounds, case.stop, metrics, check))
    case.samples_s = {}


def columns(level: str, first: Case, ranks: list[dict[str, Any]]) -> Columns:
    """Who and where, each rate that was measured, and what the product hashes to."""
    found: Columns = {level: lambda case: str(case.key[level])}
    for name in ("host", "pci", "network") if level == "rank" else ():
        found[name] = partial(lambda name, case: ranks[case.key["rank"]][name], name)
    for name in [name for name in first.metrics if name.endswith("_per_s")]:
        *words, unit, _, _ = name.split("_")
        label, scale = UNITS[unit]
        found[f"{' '.join(words)}\n{label}"] = metric(name, scale, 3)
    if first.metrics["product"]:
        found["product"] = lambda case: case.metrics["product"]
    return found


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


def main() -> int:
    args = parse_args()
    with Benchmark("node_check", args) as bench:
        job, report = bench.job, bench.report
        found = bench.share(report.environment)
        nodes = node_of_each(found)
        members = [[r for r, n in enumerate(nodes) if n == k] for k in range(max(nodes) + 1)]
        kinds = [f"{row['device']}, {row['threads']} threads" for row in found["ranks"]]
        fixed = {"world_size": job.world_size, "device": job.device.type, "backend": job.backend}
        limits = {"rank": {"flop_per_s": args.min_tflops * 1e12}, "rail": {}}
        limits["node"] = {"all_reduce_bytes_per_s": args.min_busbw * 1e9}
        end, rule = psutil.Process().create_time() + args.budget, bench.rule
        slow, left_out, longest = Findings(), list[str](), 0.0

        def left() -> float:
            """Seconds of the budget, by the clock of rank 0. All ranks call it."""
            return bench.share(end - time.time())

        def twice(what: str, share: float, once: Callable[[Key, Findings], Findings]) -> None:
            """Measure, and again if somebody is to be named. Of `once` rank 0's findings count.

            share: of the budget, that a case may take.
            """
            nonlocal longest
            if (before := left()) < max(longest, args.budget / 10):
                left_out.append(what)
                return
            seconds = min(args.max_seconds, share * args.budget)
            warm = min(args.warmup_iters, 2)
            bench.rule = replace(rule, warmup_iters=warm, target_ci=1e-9, max_seconds=seconds)
            key = {"probe": what, "attempt": 1} | fixed
            first = bench.share(once(key, {}))
            names = ", ".join(dict.fromkeys(who for who, _ in first))
            longest = max(longest, before - left())
            if first and left() < longest:
                left_out.append(f"{what} again, although this suspects {names}")
            elif first:
                bench.print(f"# {what} again, for {names}")
                second = bench.share(once(key | {"attempt": 2}, first))
                slow.update({who: by for who, by in second.items() if who in first})

        def probe(level: str, teams: Teams, build: Build, key: Key, _: Findings) -> Findings:
            """Measure and judge each rank, node or rail."""
            ranks = sorted(rank for team in teams for rank in team)
            derive = partial(split, report, level, teams, kinds)
            bench.measure(key, build, derive, ranks, None if level == "rank" else teams)
            cases = [c for c in report.cases if level in c.key and c.key == c.key | key]
            if not cases:
                return {}
            table = render(columns(level, cases[0], found["ranks"]), cases)
            bench.print(f"\n{key['probe']}\n\n{table}\n")
            values = {case.key[level]: case.metrics for case in cases}
            levels, of = ({"node": nodes}, kinds) if level == "rank" else ({}, [""] * len(values))
            margin = args.margins[level != "rank"]
            return judge(values, level, levels, of, limits[level], args.sigmas, margin)

        measured: dict[links.Pair, links.Link] = {}

        def all_links(key: Key, suspects: Findings) -> Findings:
            """The second time those rounds alone that hold a suspect."""
            rounds = list(enumerate(links.rounds_by_node(members), 1))
            rounds = [r for r in rounds if not suspects or links.concerned(r[1], suspects, nodes)]
            reserve, slowest = (0.0 if suspects else left() / 2), 0.0
            messages = links.Messages(max(1, args.size // 8), 8, 1)
            for done, (number, pairs) in enumerate(rounds):
                if (start := left()) - slowest < reserve:
                    rest = f"{len(rounds) - done} of {len(rounds)} rounds of links"
                    left_out.append(rest + " again" * bool(suspects))
                    if suspects:  # the values of some are still those of the first time
                        return {}
                    break
                this = key | {"round": number, "size": messages.size}
                rows = links.measure_round(bench, this, pairs, singles, messages)
                measured.update({(row[0], row[1]): row for row in rows})
                slowest = max(slowest, start - left())
            rows = list(measured.values())
            return links.slow_links(rows, nodes, "rank", args.sigmas, args.margins[1])

        def step(key: Key, _: Findings) -> Findings:
            def derive(case: Case, digests: list[str]) -> None:
                case.metrics |= step_metrics(case.samples_s["step"], BATCH * len(case.ranks))
                case.check = verdict(compare_replicas(digests, case.ranks))

            case = bench.measure(key, partial(build_step, job), derive)
            if case and not case.failed:
                bench.print(f"# a training step: {case.metrics['step_time_p50_s'] * 1e3:.4g} ms")
            return {}

        turns = max(map(len, members)) if job.device.type == "cpu" else 1
        build = partial(build_alone, args.dtype, job, turns)
        singles = [[rank] for rank in range(job.world_size)]
        share = 0.06 * min(1, 2 / turns)
        twice("each rank alone", share, partial(probe, "rank", singles, build))
        rails = [list(ranks) for ranks in zip(*members, strict=False)]
        for where, level, teams in (("inside", "node", members), ("between", "rail", rails)):
            if min(map(len, teams)) > 1:
                build = partial(build_all_reduce, args.size, teams, job)
                what = f"all_reduce of {cli.show_size(args.size)} {where} nodes"
                twice(what, 1 / 60, partial(probe, level, teams, build))
        twice("training step", 1 / 30, step)
        if job.world_size > 1 and not (job.device.type == "cuda" and job.backend == "gloo"):
            twice("links", 1 / 150, all_links)
        for what in left_out:
            bench.print(f"# left out, for --budget {args.budget:g}: {what}")
        if job.rank == 0:
            lacks = {f"node {node}": why for node, why in lacking(found, args.gpus).items()}
            lines, problem = conclude(slow, lacks, report.cases, args.fail_on)
            bench.print("\n" + "\n".join(f"# {on_hosts(line, found)}" for line in lines))
            if problem:
                bench.fail(on_hosts(problem, found))
    return bench.status


if __name__ == "__main__":
    sys.exit(record(main)())
