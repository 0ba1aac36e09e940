#!/usr/bin/env python3
"""Are these nodes fit to train on? An answer within a minute, with a reason and a name.

    alone     each rank by itself: products of matrices, copies of memory, to the device and back,
              the cost of a launch; on the CPU the ranks of a node, which share cores, take turns
    links     disjoint pairs in rounds: each two ranks of a node meet once, then each two nodes,
              all their rails (a rail: the i-th ranks of all nodes) at the same time
    together  all_reduce inside the nodes and between them, by rail; a training step
    slow      takes longer than the median of its kind by --sigmas median absolute deviations and
              by --margin, twice: what is about to be named is measured again. If it is not slow
              again, or if other programs take over a tenth of the cores, it cannot be told
    wrong     results have other bits than on most ranks of the kind; data does not arrive; a node
              has fewer GPUs than the others, or than --gpus
    times     two are judged: the fastest sample, and the mean of a block (`sustained`). That is
              the median block on CUDA, where heat counts, and the best one on the CPU, where
              neighbours do
    +-%       how steady a rank was: the 95 % interval of its median sample, the widest of its steps
    busbw     2(n-1)/n * bytes / time

Exit status: 0 fit; 1 slow or wrong, named in the last lines; 2 a mistake; 3 a hang; 4 nothing is
wrong, and it cannot be told if something is slow.

    torchrun --nproc-per-node 8 benchmarks/node_check.py
    torchrun --nproc-per-node 8 benchmarks/node_check.py --min-tflops 600 --json node.jsonl
    srun --ntasks-per-node 8 bash launch/slurm_env.sh python3 benchmarks/node_check.py && sbatch ...

Asks what Megatron-LM's gpu_sniff_test.py asks; written anew. BSD-3-Clause. docs/node_check.md.
"""

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import cli
from common.benchmark import Benchmark, Build, Derive, Key, Planned
from common.check import digest, verdict
from common.environment import Others, count_of, lacking, node_of_each
from common.groups import Group, Job, connect, rendezvous, share
from common.report import Case, Report
from common.stats import Times, in_rounds, median
from common.table import Columns, cell, metric, relative, render
from common.timing import STEP, Step, StopRule, Workload
from common.workloads import links, operations
from common.workloads.decoder import DECODERS, Decoder, next_token_loss, random_text
from common.workloads.operations import Member
from common.workloads.outliers import SIGMAS, Costs, Findings, Hosts, Who, accuse, sentences

Teams = list[list[int]]  # ranks of nodes, or of rails


class Probe(NamedTuple):
    step: Callable[[], Any]
    amount: float  # that the step does


class Did(NamedTuple):
    """What a probe did on a rank: the part of the workload that timed it, and how much it did."""

    part: str
    amount: float


class Measure(NamedTuple):
    """level: whom the time of a step tells something about. unit: of its rate in the metrics; the
    table shows the rate times `scale` under `head`."""

    level: str
    unit: str
    head: str
    scale: float

    def rate(self, step: str) -> str:
        """The name of the metric."""
        return f"{step}_{self.unit}_per_s"


SYS = Path("/sys")  # what Linux says of PCI devices
LAUNCHES = 200  # in a sample
BATCH = 2  # texts of a rank in the training step
STEPS = {
    "matmul_bf16": Measure("rank", "flop", "TFLOP/s", 1e-12),
    "matmul_fp32": Measure("rank", "flop", "TFLOP/s", 1e-12),
    "copy": Measure("rank", "bytes", "GB/s", 1e-9),
    "to_device": Measure("rank", "bytes", "GB/s", 1e-9),
    "to_host": Measure("rank", "bytes", "GB/s", 1e-9),
    "launch": Measure("rank", "calls", "1000/s", 1e-3),
    "all_reduce_inside": Measure("node", "bytes", "GB/s", 1e-9),
    "all_reduce_between": Measure("rail", "bytes", "GB/s", 1e-9),
    "training_step": Measure("job", "texts", "texts/s", 1),
}
# How long a case is timed, as a fraction of the budget. These are choices, no measurements: with
# 60 s they are 3.6 s, 0.4 s and 4 s, which leaves time to start, and to measure a phase again.
ALONE_FRACTION = 0.06  # for up to two turns of the ranks of a node; less for more turns
LINKS_FRACTION = 1 / 150  # for each round
TOGETHER_FRACTION = 1 / 15
FIRST_CASE_FRACTION = 0.1  # a guess: what the first case of a phase will take, with its start
# --margin by default. CPUs have neighbours, and links and collectives cross their cores
MARGIN_ALONE = {"cpu": 0.4, "cuda": 0.1}
MARGIN_TOGETHER = {"cpu": 2.0, "cuda": 0.1}
COLUMNS: Columns = {
    "rank": lambda case: str(case.key["rank"]),
    "host": lambda case: str(case.key["host"]),
    "pci": cell("pci", str),
    "network": cell("network", str),
    **{
        f"{step.replace('_', ' ')}\n{how.head}": metric(how.rate(step), how.scale, 3)
        for step, how in STEPS.items()
    },
    "+-%": relative("spread"),
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
    n = 8192 if cuda else 512
    size = 2**29 if cuda else 2**24
    source = torch.Generator(device).manual_seed(0)
    a = torch.randn(n, n, generator=source, device=device)
    b = torch.randn(n, n, generator=source, device=device)
    x, y = torch.ones(2, size, dtype=torch.uint8, device=device)
    host = torch.ones(size, dtype=torch.uint8, pin_memory=cuda)
    one = torch.zeros(1, device=device)

    def product(dtype: torch.dtype) -> Callable[[], torch.Tensor]:
        out = torch.empty(n, n, dtype=dtype, device=device)
        return partial(torch.mm, a.to(dtype), b.to(dtype), out=out)

    def launch() -> None:
        for _ in range(LAUNCHES):
            one.add_(1)

    on_both = {
        "matmul_fp32": Probe(product(torch.float32), 2 * n**3),
        "copy": Probe(lambda: y.copy_(x), 2 * size),  # read and written
        "launch": Probe(launch, LAUNCHES),
    }
    if not cuda:
        return on_both
    return {
        "matmul_bf16": Probe(product(torch.bfloat16), 2 * n**3),
        **on_both,
        "to_device": Probe(lambda: x.copy_(host, non_blocking=True), size),
        "to_host": Probe(lambda: host.copy_(x, non_blocking=True), size),
    }


def build_alone(turns: int, job: Job, key: Key, group: Group) -> Workload:
    """While a rank has its turn, the others of its node wait in a barrier, which does not spin."""
    my_probes = probes(job.device)
    my_turn = job.local_rank % turns
    steps: dict[str, Step] = {}
    did: dict[str, Did] = {}
    for turn in range(turns):
        for name, probe in my_probes.items():
            part = f"{name}, turn {turn}" if steps else STEP
            if turn == my_turn:
                steps[part] = probe.step
                did[name] = Did(part, probe.amount)
            else:
                steps[part] = lambda: None

    def facts() -> dict[str, Any]:
        products = torch.nn.ParameterList()
        for name, probe in my_probes.items():
            if name.startswith("matmul"):
                products.append(probe.step())
        return {"did": did, "bits": digest(products)[:10]}

    return Workload(steps.pop(STEP), steps, facts=facts)


def open_teams(teams: dict[str, Teams], job: Job, group: Group) -> dict[str, Any]:
    """The group of this rank's node and of its rail, by step; None where it is in no team.

    A step whose teams are of one rank is left out.
    """
    team_groups: dict[str, Any] = {}
    for name in ("all_reduce_inside", "all_reduce_between"):
        all_teams = teams[STEPS[name].level]
        if min(len(team) for team in all_teams) > 1:
            rendezvous(group)
            mine: Any = dist.new_subgroups_by_enumeration(all_teams, backend=job.backend)[0]
            team_groups[name] = mine
            if mine is not None:
                group.more.append(mine)
                connect(mine, job)
    return team_groups


def build_together(
    size: int, teams: dict[str, Teams], job: Job, key: Key, group: Group
) -> Workload:
    """all_reduce of `size` bytes, and a training step of a small language model under DDP."""
    team_groups = open_teams(teams, job, group)
    torch.manual_seed(0)
    config = DECODERS["decoder-124m" if job.device.type == "cuda" else "decoder-tiny"]
    decoder = Decoder(config).to(job.device)
    model = DistributedDataParallel(decoder, process_group=group.test)
    text = random_text(config, BATCH, seed=job.rank)
    tokens, targets = (x.to(job.device) for x in text)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def train() -> None:
        optimizer.zero_grad()
        next_token_loss(model(tokens), targets).backward()
        optimizer.step()

    parts: dict[str, Step] = {}
    did = {"training_step": Did(STEP, BATCH * job.world_size)}
    x = torch.zeros(size // 4, device=job.device)
    all_reduce = operations.OPERATIONS["all_reduce"]
    members: dict[str, Member] = {}
    for name, mine in team_groups.items():
        if mine is None:  # there is no rank like this one on other nodes
            parts[name] = lambda: None
            continue
        members[name] = Member(mine, mine.rank(), mine.size(), len(x), "sum")
        parts[name] = partial(all_reduce.call, x, x, members[name])
        # what a ring sends over a rank's link
        did[name] = Did(name, all_reduce.bus(mine.size()) * size)

    def facts() -> dict[str, Any]:
        wrong = None
        for name, member in members.items():
            operations.fill(x, x, member)
            all_reduce.call(x, x, member)
            if operations.count_wrong(all_reduce, x, member):
                wrong = f"a wrong sum of {name}"
        return {"did": did, "bits": digest(model)[:10], "wrong": wrong}

    return Workload(train, parts, facts=facts, launches=True)


def rounds_by_node(members: Teams) -> list[list[links.Pair]]:
    """Who meets whom in each round. members: the ranks of each node.

    Each two ranks of a node meet once, all nodes at the same time. Then each two nodes meet once:
    the i-th rank of one and the i-th of the other, for all i at the same time.
    """
    rounds: list[list[links.Pair]] = []
    largest_node = max(len(ranks) for ranks in members)
    for places in links.rounds_of(largest_node):
        inside: list[links.Pair] = []
        for ranks in members:  # a smaller node lacks the last places
            inside += [(ranks[a], ranks[b]) for a, b in places if b < len(ranks)]
        rounds.append(inside)
    for nodes in links.rounds_of(len(members)):
        between: list[links.Pair] = []
        for a, b in nodes:
            between += zip(members[a], members[b], strict=False)
        rounds.append(between)
    return [pairs for pairs in rounds if pairs]


# -- judge -----------------------------------------------------------------------------------------


class Cluster(NamedTuple):
    """What is judged, and how."""

    cpu: bool
    nodes: list[int]  # of each rank
    teams: dict[str, Teams]  # the ranks of each rank, node and rail, and of the job
    kinds: list[str]  # of each rank: ranks of a kind are compared
    margins: dict[str, float]  # by level
    limits: dict[tuple[str, str], float]  # by level and unit, of a rate
    sigmas: float

    @property
    def members(self) -> Teams:
        """The ranks of each node."""
        return self.teams["node"]


def odd_results(bits: list[str], kinds: list[str]) -> dict[int, str]:
    """Whose results are not those of most ranks of its kind, or not finite: rank -> why."""
    alike = Counter(zip(kinds, bits, strict=True))
    ranks_of_kind = Counter(kinds)
    odd: dict[int, str] = {}
    for rank, mine in enumerate(bits):
        kind = kinds[rank]
        same = alike[kind, mine]
        every = ranks_of_kind[kind]
        if 2 * same <= every or mine == "not finite":
            odd[rank] = f"its results ({mine}) are those of {same} of {every} of its kind"
    return odd


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
    for rank, fact in enumerate(facts):
        samples = {}
        spreads: list[float | None] = []
        machine = report.environment["ranks"][rank]
        metrics = {"pci": machine["pci"], "network": machine["network"], "bits": fact["bits"]}
        for step, (part, amount) in fact["did"].items():
            how = STEPS[step]
            times_s = times.each(part)  # [ranks, iterations]
            team = next(team for team in teams[how.level] if rank in team)
            slowest = times_s[team].max(axis=0)
            sustained_s = sustained(slowest, case)
            metrics[f"{step}_s"] = float(slowest.min())
            metrics[f"{step}_sustained_s"] = sustained_s
            metrics[how.rate(step)] = amount / sustained_s
            spreads.append(median(slowest).relative)
            samples[step] = [times_s[rank].tolist()]
        known = [spread for spread in spreads if spread is not None]
        metrics["spread"] = max(known) if len(known) == len(spreads) else None
        key = case.key | {"rank": rank, "host": machine["host"]}
        of_rank = Case(
            key=key,
            ranks=[rank],
            samples_s=samples,
            rounds=case.rounds,
            stop=case.stop,
            metrics=metrics,
        )
        of_rank.name, of_rank.table = f"rank {rank}", case.name
        of_rank.check = verdict(fact.get("wrong") or odd.get(rank))
        report.add(of_rank)
    case.samples_s = {}


def sustained(times_s: Any, case: Case) -> float:
    """The time of a block of iterations that counts. times_s: [iterations], in blocks of the case.

    Heat slows all blocks of a GPU down: the median counts. Neighbours slow only some of a CPU's:
    the fastest counts.
    """
    means = [block.mean() for block in in_rounds(times_s, case.rounds)]
    if case.key["device"] == "cuda":
        return float(np.median(means))
    return float(np.min(means))


def judge(cases: list[Case], cluster: Cluster) -> Findings:
    """Who takes longer than the others of its kind, or has a rate below the limit of its unit.

    All ranks of a node or of a rail have the same numbers: those of its first rank count.
    """
    findings: Findings = {}
    by_rank = {case.key["rank"]: case.metrics for case in cases}
    for step, (level, unit, *_) in STEPS.items():
        measured: dict[int, dict[str, Any]] = {}
        kind_of: dict[int, str] = {}
        for number, (first, *_) in enumerate(cluster.teams[level]):
            if f"{step}_s" in by_rank[first]:
                measured[number] = by_rank[first]
                kind_of[number] = cluster.kinds[first]
        findings |= below_limit(step, measured, cluster.limits.get((level, unit), 0))
        levels = {"node": cluster.nodes} if level == "rank" else {}
        sigmas, margin = cluster.sigmas, cluster.margins[level]
        for name in (step, f"{step}_sustained"):
            what = name.replace("_", " ")
            for kind in dict.fromkeys(cluster.kinds):
                costs = Costs()
                for number, metrics in measured.items():
                    if kind_of[number] == kind:
                        costs[(number,)] = metrics[f"{name}_s"]
                findings |= accuse(costs, levels, level, what, sigmas, margin, of_two=True)
    return findings


def below_limit(step: str, measured: dict[int, dict[str, Any]], least: float) -> Findings:
    """Who has a rate under the user's limit. measured: metrics by the number of rank or node."""
    level, rate = STEPS[step].level, STEPS[step].rate(step)
    findings: Findings = {}
    what = rate.replace("_", " ")
    for number, metrics in measured.items():
        if metrics[rate] < least:
            who = Who(level, ((number,),))
            findings[who, what] = f"{metrics[rate]:.3g}, under {least:.3g}"
    return findings


# -- measure, and measure again --------------------------------------------------------------------


class Part(NamedTuple):
    """A case of a phase. key: what it has beside the phase's."""

    name: str
    key: Key
    ranks: list[int]
    build: Build
    derive: Derive


class Phase(NamedTuple):
    """fraction: of the budget, that each case is timed for. judge: who is slow, of all cases."""

    name: str
    fraction: float
    parts: Sequence[Part]
    judge: Callable[[list[Case]], Findings]


def cluster_of(bench: Benchmark) -> Cluster:
    args = bench.args
    environment = bench.report.environment
    nodes = node_of_each(environment)
    everyone = list(range(bench.job.world_size))
    members: Teams = [[] for _ in range(max(nodes) + 1)]  # the ranks of each node
    for rank, node in enumerate(nodes):
        members[node].append(rank)
    teams = {
        "rank": [[rank] for rank in everyone],
        "node": members,
        "rail": [list(ranks) for ranks in zip(*members, strict=False)],
        "job": [everyone],
    }
    kinds = [f"{row['device']}, {row['threads']} threads" for row in environment["ranks"]]
    device = bench.job.device.type
    margins = dict.fromkeys(teams, args.margin or MARGIN_TOGETHER[device])
    margins["rank"] = args.margin or MARGIN_ALONE[device]
    limits = {
        ("rank", "flop"): args.min_tflops * 1e12,
        ("node", "bytes"): args.min_busbw * 1e9,
    }
    return Cluster(device == "cpu", nodes, teams, kinds, margins, limits, args.sigmas)


def judge_ranks(bench: Benchmark, cluster: Cluster, cases: list[Case]) -> Findings:
    """Print a row for each rank, and judge them."""
    rows = [case for case in cases if "rank" in case.key]
    if not rows:
        return {}
    # what no rank has is left out, but for how steady they are
    shown = {head: text for head, text in COLUMNS.items() if head == "+-%" or text(rows[0]) != "-"}
    bench.print(f"\n{render(shown, rows)}\n")
    return judge(rows, cluster)


def judge_links(bench: Benchmark, cluster: Cluster, cases: list[Case]) -> Findings:
    """Print how many rounds were measured, and judge their links."""
    if cases:
        size = cases[0].key["size"]
        bench.print(f"\n{count_of(len(cases), 'round')}, messages of {size:,} bytes")
    judged: list[links.Link] = []
    for case in cases:
        for link in links.links_of(case):
            # inside a node of CPUs all share the cores: their data counts, not their times
            if not cluster.cpu or cluster.nodes[link.a] != cluster.nodes[link.b]:
                judged.append(link)
    margin = cluster.margins["job"]
    return links.slow_links(judged, cluster.nodes, "rank", cluster.sigmas, margin)


def plan(bench: Benchmark, cluster: Cluster) -> list[Phase]:
    job = bench.job
    teams = cluster.teams
    turns = 1
    size = 2**28
    if cluster.cpu:  # the ranks of a node share its cores
        turns = max(len(ranks) for ranks in cluster.members)
        size = 2**20
    rounds: list[list[links.Pair]] = []
    if cluster.cpu or job.backend != "gloo":  # gloo sends no CUDA tensors
        rounds = rounds_by_node(cluster.members)
    messages = links.Messages(size // 8, 8, 1)

    everyone = list(range(job.world_size))
    rows = partial(split, bench.report, teams, cluster.kinds)
    alone = Part("each rank alone", {}, everyone, partial(build_alone, turns, job), rows)
    meetings = []
    for number, pairs in enumerate(rounds, 1):
        key = {"round": number, "size": messages.size}
        meeting = links.round_of(pairs, teams["rank"], messages, job)
        meetings.append(Part(f"links, round {number}", key, *meeting))
    train = partial(build_together, size, teams, job)
    together = Part("all ranks together", {}, everyone, train, rows)
    alone_fraction = ALONE_FRACTION * min(1, 2 / turns)
    of_ranks = partial(judge_ranks, bench, cluster)
    of_links = partial(judge_links, bench, cluster)
    return [
        Phase(alone.name, alone_fraction, [alone], of_ranks),
        Phase("links", LINKS_FRACTION, meetings, of_links),
        Phase(together.name, TOGETHER_FRACTION, [together], of_ranks),
    ]


def seconds_left(budget: float) -> float:
    """Since rank 0 has started, by its clock. All ranks call it."""
    import psutil  # here: if it is missing, common/ has said so

    return float(share(psutil.Process().create_time() + budget - time.time()))


def rule_of(bench: Benchmark, phase: Phase) -> StopRule:
    """A case of the phase takes its fraction of the budget, no less; two samples warm it up."""
    seconds = min(bench.args.max_seconds, phase.fraction * bench.args.budget)
    # no interval is so narrow that it ends a case
    rule = replace(bench.rule, target_ci=0.0, max_seconds=seconds, patience=1)
    if rule.full_warmup:
        return rule
    return replace(rule, warmup_iters=2)


def key_of(bench: Benchmark, phase: Phase, attempt: int) -> Key:
    """What all cases of a phase have in their keys. With the ranks it says who meets."""
    nodes = bench.report.environment["num_nodes"]
    return {"probe": phase.name, "attempt": attempt, "nodes": nodes}


def measure_part(bench: Benchmark, phase: Phase, part: Part, attempt: int) -> None:
    key = key_of(bench, phase, attempt) | part.key
    name = part.name if attempt == 1 else f"{part.name}, again"
    rule = rule_of(bench, phase)
    case = bench.measure(key, name, part.build, part.derive, ranks=part.ranks, rule=rule)
    if case and case.failed:
        bench.print(f"# {name}: {case.check}")


def measure_first(bench: Benchmark, phase: Phase) -> int:
    """Measure what fits of a phase. How many of its cases did.

    A case begins only if it is expected to end within half of what is left of the budget when the
    phase begins. It is expected to take as long as the one before.
    """
    budget = bench.args.budget
    left = seconds_left(budget)
    reserve = left / 2
    expected = FIRST_CASE_FRACTION * budget
    for number, part in enumerate(phase.parts):
        if left - expected < reserve:
            parts = len(phase.parts)
            rounds = f"{parts - number} of {parts} rounds of " if number else ""
            bench.print(f"# left out, for --budget {budget:g}: {rounds}{phase.name}")
            return number
        measure_part(bench, phase, part, attempt=1)
        before = left
        left = seconds_left(budget)
        expected = before - left
    return len(phase.parts)


def measure_twice(bench: Benchmark, phase: Phase) -> tuple[Findings, Findings]:
    """Who is slow both times, and who else is slow in one of the two measurements.

    The second one is only for a phase that has suspects, and its time is the reserve that the first
    one has left.
    """

    def suspects_in(attempt: int) -> Findings:
        """Rank 0's judgement of the cases of a measurement."""
        key = key_of(bench, phase, attempt)
        measured = [case for case in bench.report.cases if key.items() <= case.key.items()]
        return share(phase.judge(measured))

    bench.print(f"\n{phase.name}")
    measured = measure_first(bench, phase)
    suspects = suspects_in(attempt=1)
    if not suspects:
        return {}, {}
    names = cli.cut(unique(who.name() for who, _ in suspects))
    bench.print(f"# {phase.name} again, for {names}")
    for part in phase.parts[:measured]:
        measure_part(bench, phase, part, attempt=2)
    return both_times(suspects, suspects_in(attempt=2))


def unique(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))


def both_times(first: Findings, second: Findings) -> tuple[Findings, Findings]:
    """Who is slow in two measurements, and who else is slow in one of them."""
    twice = {finding: how for finding, how in second.items() if finding in first}
    named = {who for who, _ in twice}
    once = {
        (who, what): f"{how}, in one of two measurements"
        for (who, what), how in (first | second).items()
        if who not in named
    }
    return twice, once


# -- the last lines --------------------------------------------------------------------------------


class Wrong(NamedTuple):
    """Who has a wrong result, or lacks something, and why it counts."""

    name: str
    why: str


def conclude(
    slow: Findings,
    once: Findings,
    others: Others | None,
    wrong: list[Wrong],
    fail_on: str,
    hosts: Hosts,
    ran: str,
) -> tuple[int, list[str]]:
    """The status of the run and the last lines; the very last one is the verdict.

    slow, once: who is slow both times, and in one of two measurements. others: what other programs
    took, if it was much. ran: what was measured, and how long that took, in words.
    """
    lines = sentences(slow | once, hosts) + [f"wrong {one.name}: {one.why}" for one in wrong]
    accused, doubt = [one.name for one in wrong], ""
    if fail_on == "slow" and (slow or once):
        if others:
            doubt = f"other programs took {others.busy:.1f} of {others.cores} cores"
        elif not slow:
            names = cli.cut(unique(who.name(hosts) for who, _ in once))
            doubt = f"only one of two measurements found this slow: {names}"
        else:
            accused += [who.name(hosts) for who, _ in slow]
    if accused:
        return 1, [*lines, f"not fit: {cli.cut(unique(accused))}"]
    if doubt:
        return cli.NO_VERDICT, [*lines, f"cannot be told: {doubt}"]
    return 0, [*lines, f"{'fit, though slow' if slow or once else 'fit'}: {ran}"]


def wrong_results(lacks: dict[int, str], cases: list[Case], hosts: Hosts) -> list[Wrong]:
    """The nodes that lack something, and who has a wrong result or none."""
    wrong = [Wrong(Who("node", ((node,),)).name(hosts), why) for node, why in lacks.items()]
    for case in cases:
        if not case.failed:
            continue
        why, name = case.check.removeprefix("failed: "), case.key["probe"]
        if "failed_rank" in case.metrics:  # it noticed the failure: another one may be its cause
            why += f" on {hosts['rank'][case.metrics['failed_rank']]}"
        if "rank" in case.key:
            name = Who("rank", ((case.key["rank"],),)).name(hosts)
        wrong.append(Wrong(name, why))
    return list(dict.fromkeys(wrong))


def hosts_of(environment: dict[str, Any]) -> dict[str, list[str]]:
    """The host of each node, of each rank, and of each rank that is an end of a link."""
    ranks = [row["host"] for row in environment["ranks"]]
    return {"node": environment["hosts"], "rank": ranks, "link": ranks}


def stay_near(device: torch.device) -> None:
    """Keep this process on those of its cores that are next to its GPU, if there are any. On
    another socket its pinned memory would be far away."""
    if device.type != "cuda":
        return
    p: Any = torch.cuda.get_device_properties(device.index)
    pci = f"{p.pci_domain_id:04x}:{p.pci_bus_id:02x}:{p.pci_device_id:02x}.0"
    mask = SYS / "bus/pci/devices" / pci / "local_cpus"
    near = int(mask.read_text().replace(",", ""), 16) if mask.exists() else 0  # a bit for each core
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core for core in allowed if near >> core & 1} or allowed)


def main() -> int:
    args = parse_args()
    torch.optim.SGD([torch.zeros(1)])  # the first optimizer imports torch._dynamo: for seconds
    with Benchmark("node_check", args) as bench:
        # the verdict is about now: nobody knows who took the cores in the run that is resumed
        bench.done, bench.report.cases = [], []
        stay_near(bench.job.device)  # or healthy ranks' copies to the host differ by the socket
        environment = bench.report.environment
        slow: Findings = {}
        once: Findings = {}
        phases = plan(bench, cluster_of(bench))
        planned: dict[str, list[Planned]] = {}
        for phase in phases:
            key = key_of(bench, phase, attempt=1)
            parts = [(part.name, len(part.ranks), key | part.key) for part in phase.parts]
            planned[phase.name] = parts
        bench.announce(planned)
        for phase in phases:
            twice, one_time = measure_twice(bench, phase)
            slow, once = slow | twice, once | one_time
        if not share(len(bench.report.cases)):
            bench.refuse(f"--budget {args.budget:g} ends before the first case; e.g. --budget 60")
        others, seconds = bench.disturbed(), args.budget - seconds_left(args.budget)
        if bench.job.rank == 0:
            nodes = count_of(environment["num_nodes"], "node")
            ranks = count_of(environment["world_size"], "rank")
            ran = f"{nodes}, {ranks}, {seconds:.0f} s of {args.budget:g}"
            hosts = hosts_of(environment)
            wrong = wrong_results(lacking(environment, args.gpus), bench.report.cases, hosts)
            status, lines = conclude(slow, once, others, wrong, args.fail_on, hosts, ran)
            if status:
                bench.fail(lines[-1], status)
            bench.conclude(lines)
    return bench.status


if __name__ == "__main__":
    sys.exit(record(main)())
