#!/usr/bin/env python3
"""Are these nodes fit to train on? An answer within a minute, with a reason and a name.

    alone     each rank by itself: products of matrices, copies of memory, to the device and back,
              the cost of a launch; on the CPU the ranks of a node, which share cores, take turns
    links     disjoint pairs in rounds: each two ranks of a node meet once, then each two nodes,
              all their rails (a rail: the i-th ranks of all nodes) at the same time
    together  all_reduce inside the nodes and between them, by rail; a training step
    slow      takes longer than the median of its kind by --sigmas median absolute deviations and
              by --margin, twice: what is about to be named is measured again
    wrong     results have other bits than on most ranks of the kind; data does not arrive; a node
              has fewer GPUs than the others, or than --gpus
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
import itertools
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
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
from common.benchmark import Benchmark, Workload
from common.check import digest, verdict
from common.decoder import DECODERS, Decoder, next_token_loss, random_text
from common.dist import Group, Job, share
from common.gpus import lacking
from common.outliers import SIGMAS, Costs, Findings, Hosts, Who, accuse, sentences
from common.ranks import node_of_each
from common.report import Case, Report
from common.stats import Times
from common.table import Columns, cell, metric, render
from common.timing import STEP, Step

Key = dict[str, Any]
Teams = list[list[int]]  # ranks of nodes, or of rails
Probe = tuple[Callable[[], Any], float]  # a step, and how much it does


class Did(NamedTuple):
    """What a probe did on a rank: the part of the workload that timed it, and how much it did."""

    part: str
    work: float


LAUNCHES = 200  # in a sample
BATCH = 2  # texts of a rank in the training step
STEPS = {  # whom its time tells something about, the unit of its rate, and as that is shown
    "matmul_bf16": ("rank", "flop", "TFLOP/s", 1e-12),
    "matmul_fp32": ("rank", "flop", "TFLOP/s", 1e-12),
    "copy": ("rank", "bytes", "GB/s", 1e-9),
    "to_device": ("rank", "bytes", "GB/s", 1e-9),
    "to_host": ("rank", "bytes", "GB/s", 1e-9),
    "launch": ("rank", "calls", "1000/s", 1e-3),
    "all_reduce_inside": ("node", "bytes", "GB/s", 1e-9),
    "all_reduce_between": ("rail", "bytes", "GB/s", 1e-9),
    "training_step": ("job", "texts", "texts/s", 1),
}
COLUMNS: Columns = {
    "rank": lambda case: str(case.key["rank"]),
    "host": lambda case: str(case.key["host"]),
    "pci": cell("pci", str),
    "network": cell("network", str),
    **{
        f"{step.replace('_', ' ')}\n{head}": metric(f"{step}_{unit}_per_s", scale, 3)
        for step, (_, unit, head, scale) in STEPS.items()
    },
    "bits": cell("bits", str),
}


def parse_args() -> argparse.Namespace:
    parser = cli.Parser(__doc__)
    add, positive = parser.add_argument, cli.positive_float
    budget = "since rank 0 has started; what does not fit is left out, and said (default: 60)"
    add("--budget", type=positive, default=60.0, metavar="SECONDS", help=budget)
    what = "what ends with status 1: all that is slow or wrong, or wrong alone (default: slow)"
    add("--fail-on", choices=("slow", "wrong"), default="slow", help=what)
    add("--sigmas", type=positive, default=SIGMAS, metavar="S", help="(default: 5)")
    margin = "slower by less is not named (default: 0.1; on the CPU 0.4, and 2 for all together)"
    add("--margin", type=positive, metavar="SHARE", help=margin)
    add("--min-tflops", type=positive, default=0, metavar="T", help="of each product, on each rank")
    add("--min-busbw", type=positive, default=0, metavar="GB/S", help="of all_reduce in each node")
    add("--gpus", type=cli.positive_int, metavar="N", help="that each node must have")
    cli.add_common_flags(parser, min_iters=6, max_seconds=6, timeout=60)
    return parser.parse_args()


# -- probes: each rank alone, then all together ----------------------------------------------------


def probes(device: torch.device) -> dict[str, Probe]:
    """What a rank does alone. Products are of the same seed on all ranks."""
    cuda = device.type == "cuda"
    n, size = (8192, 2**29) if cuda else (512, 2**24)
    source = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(n, n, generator=source, device=device) for _ in "ab")
    x, y = torch.ones(2, size, dtype=torch.uint8, device=device)
    host = torch.ones(size, dtype=torch.uint8, pin_memory=cuda)
    one = torch.zeros(1, device=device)

    def product(dtype: torch.dtype) -> Callable[[], torch.Tensor]:
        out = torch.empty(n, n, dtype=dtype, device=device)
        return partial(torch.mm, a.to(dtype), b.to(dtype), out=out)

    def launch() -> None:
        for _ in range(LAUNCHES):
            one.add_(1)

    table: dict[str, Probe] = {
        "matmul_bf16": (product(torch.bfloat16), 2 * n**3),
        "matmul_fp32": (product(torch.float32), 2 * n**3),
        "copy": (lambda: y.copy_(x), 2 * size),  # read and written
        "to_device": (lambda: x.copy_(host, non_blocking=True), size),
        "to_host": (lambda: host.copy_(x, non_blocking=True), size),
        "launch": (launch, LAUNCHES),
    }
    return table if cuda else {name: table[name] for name in ("matmul_fp32", "copy", "launch")}


def build_alone(turns: int, job: Job, key: Key, group: Group) -> Workload:
    """While a rank has its turn, the others of its node wait in a barrier, which does not spin."""
    table, mine = probes(job.device), job.local_rank % turns
    steps, did = dict[str, Step](), dict[str, Did]()
    for turn, (name, (step, work)) in itertools.product(range(turns), table.items()):
        part = f"{name}, turn {turn}" if steps else STEP
        steps[part] = step if turn == mine else lambda: None
        if turn == mine:
            did[name] = Did(part, work)

    def facts() -> dict[str, Any]:
        products = [step() for name, (step, _) in table.items() if name.startswith("matmul")]
        return {"did": did, "bits": digest(torch.nn.ParameterList(products))[:10]}

    return Workload(steps.pop(STEP), steps, facts=facts)


def build_together(
    size: int, teams: dict[str, Teams], job: Job, key: Key, group: Group
) -> Workload:
    """all_reduce of `size` bytes, and a training step of a small language model under DDP."""
    torch.manual_seed(0)
    config = DECODERS["decoder-124m" if job.device.type == "cuda" else "decoder-tiny"]
    model = DistributedDataParallel(Decoder(config).to(job.device), process_group=group.test)
    tokens, targets = (x.to(job.device) for x in random_text(config, BATCH, seed=job.rank))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def train() -> None:
        optimizer.zero_grad()
        next_token_loss(model(tokens), targets).backward()
        optimizer.step()

    parts, sums = dict[str, Step](), dict[str, Any]()
    did = {"training_step": Did(STEP, BATCH * job.world_size)}
    x = torch.zeros(size // 4, device=job.device)
    for name in ("all_reduce_inside", "all_reduce_between"):
        some = teams[STEPS[name][0]]
        if min(map(len, some)) > 1:
            own: Any = dist.new_subgroups_by_enumeration(some, backend=job.backend)[0]
            parts[name] = lambda: None
            if own is not None:  # else there is no rank like this one on other nodes
                group.more.append(own)
                sums[name], parts[name] = own, partial(dist.all_reduce, x, group=own)
                did[name] = Did(name, 2 * (own.size() - 1) / own.size() * size)

    def facts() -> dict[str, Any]:
        wrong = None
        for name, own in sums.items():
            patterns.fill(x, patterns.tile(own.rank(), "sum", own.size()))
            dist.all_reduce(x, group=own)
            if patterns.count_wrong(x, patterns.reduced_tile("sum", own.size())):
                wrong = f"a wrong sum of {name}"
        return {"did": did, "bits": digest(model)[:10], "wrong": wrong}

    return Workload(train, parts, facts=facts)


def rounds_by_node(members: Teams) -> list[list[links.Pair]]:
    """Each two ranks of a node meet once, all nodes at the same time; then each two nodes, the
    i-th rank of one and the i-th of the other, all i at the same time. members: of each node."""
    inside = [
        [(own[a], own[b]) for own in members for a, b in pairs if b < len(own)]
        for pairs in links.rounds_of(max(map(len, members)))
    ]
    between = [
        [pair for a, b in pairs for pair in zip(members[a], members[b], strict=False)]
        for pairs in links.rounds_of(len(members))
    ]
    return [pairs for pairs in inside + between if pairs]


# -- judge -----------------------------------------------------------------------------------------


def odd_results(bits: list[str], kinds: list[str]) -> dict[int, str]:
    """Whose results are not those of most ranks of its kind, or not finite: rank -> why."""
    rows = list(zip(kinds, bits, strict=True))
    alike, every = Counter(rows), Counter(kinds)
    return {
        rank: f"its results ({own}) are those of {alike[kind, own]} of {every[kind]} of its kind"
        for rank, (kind, own) in enumerate(rows)
        if 2 * alike[kind, own] <= every[kind] or own == "not finite"
    }


def split(
    report: Report,
    teams: dict[str, Teams],
    kinds: list[str],
    case: Case,
    times: Times,
    facts: list[Any],
) -> None:
    """Each rank becomes a case. The slowest rank of its node or rail counts in each iteration."""
    odd = odd_results([fact["bits"] for fact in facts], kinds)
    pick: Callable[[Any], Any] = np.median if case.key["device"] == "cuda" else np.min
    for rank, fact in enumerate(facts):
        place, samples = report.environment["ranks"][rank], {}
        metrics = {"pci": place["pci"], "network": place["network"], "bits": fact["bits"]}
        for step, (part, work) in fact["did"].items():
            level, unit, *_ = STEPS[step]
            team = next(team for team in teams[level] if rank in team)
            slowest = times.each(part)[team].max(axis=0)
            blocks = np.split(slowest, np.cumsum(case.rounds)[:-1])
            sustained = float(pick([block.mean() for block in blocks]))
            metrics |= {f"{step}_s": float(slowest.min()), f"{step}_sustained_s": sustained}
            metrics[f"{step}_{unit}_per_s"] = work / sustained
            samples[step] = [case.samples_s[part][rank]]
        key = case.key | {"rank": rank, "host": place["host"]}
        check = verdict(fact.get("wrong") or odd.get(rank))
        report.add(Case(key, [rank], samples, case.rounds, case.stop, metrics, check))
    case.samples_s = {}


def judge(
    cases: list[Case],
    teams: dict[str, Teams],
    kinds: list[str],
    limits: dict[tuple[str, str], float],
    sigmas: float,
    margins: dict[str, float],
) -> Findings:
    """Who takes longer than the others of its kind, or has a rate below the limit of its unit.

    Of a node or a rail all ranks have the same numbers: those of its first rank count.
    """
    found, measured = Findings(), {case.key["rank"]: case.metrics for case in cases}
    owner = [n for rank in measured for n, node in enumerate(teams["node"]) if rank in node]
    for step, (level, unit, *_) in STEPS.items():
        first = {n: team[0] for n, team in enumerate(teams[level])}
        of = {n: measured[rank] for n, rank in first.items() if f"{step}_s" in measured[rank]}
        least, rate = limits.get((level, unit), 0), f"{step}_{unit}_per_s"
        for n, metrics in of.items():
            if metrics[rate] < least:
                what = rate.replace("_", " ")
                found[Who(level, ((n,),)), what] = f"{metrics[rate]:.3g}, under {least:.3g}"
        for name in (step, f"{step}_sustained"):
            for kind in dict.fromkeys(kinds):
                costs: Costs = {(n,): of[n][f"{name}_s"] for n in of if kinds[first[n]] == kind}
                above = {"node": owner} if level == "rank" else {}
                what = name.replace("_", " ")
                found |= accuse(costs, above, level, what, sigmas, margins[level], of_two=True)
    return found


# -- measure, and measure again --------------------------------------------------------------------


class Phase(NamedTuple):
    """share: of the budget, that each case is timed for. judge: who is slow, of all that came."""

    name: str
    share: float
    cases: list[Callable[[Key], object]]
    judge: Callable[[list[Case]], Findings]


def plan(bench: Benchmark, found: dict[str, Any]) -> list[Phase]:
    args, job, nodes = bench.args, bench.job, node_of_each(found)
    cpu, everyone = job.device.type == "cpu", list(range(job.world_size))
    members = [[r for r in everyone if nodes[r] == node] for node in range(max(nodes) + 1)]
    singles, rails = [[r] for r in everyone], [list(r) for r in zip(*members, strict=False)]
    teams = {"rank": singles, "node": members, "rail": rails, "job": [everyone]}
    kinds = [f"{row['device']}, {row['threads']} threads" for row in found["ranks"]]
    turns, size = (max(map(len, members)), 2**20) if cpu else (1, 2**28)
    # CPUs have neighbours, and links cross their cores
    alone, together = (args.margin or share for share in ((0.4, 2.0) if cpu else (0.1, 0.1)))
    margins = dict.fromkeys(teams, together) | {"rank": alone}
    limits = {("rank", "flop"): args.min_tflops * 1e12, ("node", "bytes"): args.min_busbw * 1e9}

    def judge_ranks(cases: list[Case]) -> Findings:
        if not (cases := [case for case in cases if "rank" in case.key]):
            return {}
        shown = {head: cell for head, cell in COLUMNS.items() if cell(cases[0]) != "-"}
        bench.print(f"\n{cases[0].key['probe']}\n\n{render(shown, cases)}\n")
        return judge(cases, teams, kinds, limits, args.sigmas, margins)

    def meet(number: int, pairs: list[links.Pair], key: Key) -> None:
        messages = links.Messages(size // 8, 8, 1)
        key = key | {"round": number, "size": messages.size}
        links.measure_round(bench, key, pairs, singles, messages)

    def judge_links(cases: list[Case]) -> Findings:
        if cases:
            number = f"{len(cases)} round{'s' * (len(cases) > 1)}"
            bench.print(f"\nlinks: {number}, messages of {cases[0].key['size']:,} bytes")
        rows = [link for case in cases for link in links.links_of(case)]
        # inside a node of CPUs they are cores that all share: their data counts, not their times
        rows = [link for link in rows if not cpu or nodes[link.a] != nodes[link.b]]
        return links.slow_links(rows, nodes, "rank", args.sigmas, together)

    turn, derive = 0.06 * min(1, 2 / turns), partial(split, bench.report, teams, kinds)
    by_itself = partial(bench.measure, build=partial(build_alone, turns, job), derive=derive)
    at_once = partial(bench.measure, build=partial(build_together, size, teams, job), derive=derive)
    rounds = rounds_by_node(members) if cpu or job.backend != "gloo" else []
    return [
        Phase("each rank alone", turn, [by_itself], judge_ranks),
        Phase("links", 1 / 150, [partial(meet, *r) for r in enumerate(rounds, 1)], judge_links),
        Phase("all ranks together", 1 / 15, [at_once], judge_ranks),
    ]


def measure_twice(bench: Benchmark, phase: Phase) -> Findings:
    """Who is slow both times: who is about to be accused is measured again.

    The second time has its reserve: a case of the first begins only where it ends within half of
    what is left of the budget when the phase begins.
    """
    args = bench.args

    def left() -> float:
        """Seconds, by the clock of rank 0. All ranks call it."""
        return float(share(psutil.Process().create_time() + args.budget - time.time()))

    seconds = min(args.max_seconds, phase.share * args.budget)
    rule = replace(bench.rule, target_ci=1e-9, max_seconds=seconds, patience=1)
    bench.rule = replace(rule, warmup_iters=rule.warmup_iters if rule.full_warmup else 2)
    nodes = 1 + max(node_of_each(bench.report.environment))  # with the ranks it says who meets
    cases, now, expected = phase.cases, left(), args.budget / 10
    half, suspects, found = now / 2, Findings(), Findings()
    for attempt in (1, 2):
        key = {"probe": phase.name, "attempt": attempt, "nodes": nodes}
        for number, measure in enumerate(cases):
            if attempt == 1 and now - expected < half:
                some = f"{len(cases) - number} of {len(cases)} rounds of " if number else ""
                bench.print(f"# left out, for --budget {args.budget:g}: {some}{phase.name}")
                cases = cases[:number]
                break
            measure(key)
            before, now = now, left()
            expected = before - now
        measured = [case for case in bench.report.cases if key.items() <= case.key.items()]
        suspects, found = found, share(phase.judge(measured))
        if not found:
            break
        if attempt == 1:
            names = ", ".join(dict.fromkeys(who.name() for who, _ in found))
            bench.print(f"# {phase.name} again, for {names}")
    return {who: how for who, how in found.items() if who in suspects}


# -- the last lines --------------------------------------------------------------------------------


def conclude(
    slow: Findings, lacks: dict[int, str], cases: list[Case], fail_on: str, hosts: Hosts
) -> tuple[list[str], str | None]:
    """The last lines, and why the nodes are not fit; None where they are."""
    wrong = [(Who("node", ((node,),)).name(hosts), why) for node, why in lacks.items()]
    for case in cases:
        if case.failed:
            mine = "rank" in case.key
            who = Who("rank", ((case.key["rank"],),)).name(hosts) if mine else case.key["probe"]
            wrong.append((who, with_host(case.check.removeprefix("failed: "), hosts["rank"])))
    bad = [who for who, _ in wrong]
    if fail_on == "slow":
        bad += [who.name(hosts) for who, _ in slow]
    problem = f"not fit: {', '.join(dict.fromkeys(bad))}" if bad else None
    lines = [*sentences(slow, hosts), *(f"wrong {who}: {why}" for who, why in dict.fromkeys(wrong))]
    return [*lines, problem or ("fit, though slow" if slow else "fit")], problem


def hosts_of(environment: dict[str, Any]) -> dict[str, list[str]]:
    """The host of each node, of each rank, and of each rank that is an end of a link."""
    ranks = [row["host"] for row in environment["ranks"]]
    return {"node": environment["hosts"], "rank": ranks, "link": ranks}


def with_host(why: str, hosts: Sequence[str]) -> str:
    """Why a case failed, with the host of the rank that ends the text, if one does. hosts: by rank.

    The text may be any error's: a number that is no rank stays as it is.
    """
    match = re.search(r"\brank (\d+)\)?$", why)
    return f"{why} on {hosts[int(match[1])]}" if match and int(match[1]) < len(hosts) else why


def main() -> int:
    args = parse_args()
    with Benchmark("node_check", args) as bench:
        found, slow = bench.report.environment, Findings()
        for phase in plan(bench, found):
            slow |= measure_twice(bench, phase)
        if not share(len(bench.report.cases)):
            bench.refuse(f"--budget {args.budget:g} ends before the first case; e.g. --budget 60")
        if bench.job.rank == 0:
            lacks, cases = lacking(found, args.gpus), bench.report.cases
            lines, problem = conclude(slow, lacks, cases, args.fail_on, hosts_of(found))
            bench.print("\n" + "\n".join(f"# {line}" for line in lines))
            if problem:
                bench.fail(problem)
    return bench.status


if __name__ == "__main__":
    sys.exit(record(main)())
