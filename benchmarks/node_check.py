#!/usr/bin/env python3
"""Are these nodes fit to train on? An answer within a minute, with a reason and a name.

    alone     each rank by itself: products of matrices, copies of memory, to the device and back,
              the cost of a launch; on the CPU the ranks of a node, which share cores, take turns
    links     disjoint pairs in rounds: each two ranks of a node meet once, then each two nodes,
              all their rails (a rail: the i-th ranks of all nodes) at the same time. A sample is
              messages of 4 MiB or more, back to back, for at least 50 ms
    together  all_reduce inside the nodes and between them, by rail
    times     alone and together two are judged: the fastest sample, and the mean of a block
              (`sustained`). That is the median block on CUDA, where heat slows all of them, and the
              fastest block on the CPU, where neighbours slow only some. Of a link it is the slowest
              block: a burst that a switch or a cloud lets pass is not what the link holds
    slow      takes longer than the median of its kind by --sigmas median absolute deviations and
              by --margin, twice: what is about to be named is measured again. An all_reduce between
              nodes is also compared with what its links gave
    wrong     results have other bits than on most ranks of the kind; data does not arrive; a node
              has fewer GPUs than the others, or than --gpus; other processes held over 1 GiB of a
              GPU's memory before the run
    +-%       how steady a rank was: the 95 % interval of its median sample, the widest of its steps
    busbw     2(n-1)/n * bytes / time

It cannot be told if anything is slow while other processes use over a tenth of the cores, or if the
halves of a measurement differ by more than --margin, twice. What takes over 5 times as long as its
peers is named all the same.

Exit status: 0 fit; 1 slow or wrong, named in the last lines; 2 a mistake; 3 a hang; 4 nothing is
wrong, and it cannot be told if something is slow.

    torchrun --nproc-per-node 8 benchmarks/node_check.py
    torchrun --nproc-per-node 8 benchmarks/node_check.py --min-tflops 600 --exclude-file bad.txt
    srun --ntasks-per-node 8 bash launch/slurm_env.sh python3 benchmarks/node_check.py && sbatch ...

It asks what Megatron-LM's gpu_sniff_test.py asks, written anew. BSD-3-Clause. docs/node_check.md.
"""

import argparse
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import cli  # first: it names a package that is missing

# isort: split
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record

from benchmarks.workloads import links, operations, start_up
from benchmarks.workloads.operations import Member
from benchmarks.workloads.outliers import (
    SIGMAS,
    Costs,
    Findings,
    Names,
    Slowness,
    Who,
    accuse,
    sentences,
)
from common.benchmark import LOAD_UNKNOWN, Benchmark, Build, Derive, Key, Planned, check_flags
from common.check import digest, verdict
from common.cpu_load import Others
from common.environment import (
    count_of,
    lacking,
    node_names,
    node_of_each,
    occupied,
    rank_names,
)
from common.groups import Group, Job, connect, rendezvous, share
from common.report import Case, Report
from common.stats import Times, in_rounds, median
from common.table import Cell, Columns, metric, relative
from common.timing import STEP, Step, Workload

Teams = list[list[int]]  # ranks of nodes, or of rails


class Measure(NamedTuple):
    """level: what the time of a step is a property of. unit: of its rate in the metrics; the table
    shows the rate times `scale` under `head`."""

    level: str
    unit: str
    head: str
    scale: float

    def rate(self, step: str) -> str:
        """The name of the metric."""
        return f"{step}_{self.unit}_per_s"


SYS = Path("/sys")  # what Linux says of PCI devices
STEPS = {
    "matmul_bf16": Measure("rank", "flop", "TFLOP/s", 1e-12),
    "matmul_fp32": Measure("rank", "flop", "TFLOP/s", 1e-12),
    "copy": Measure("rank", "bytes", "GB/s", 1e-9),
    "to_device": Measure("rank", "bytes", "GB/s", 1e-9),
    "to_host": Measure("rank", "bytes", "GB/s", 1e-9),
    "launch": Measure("rank", "calls", "1000/s", 1e-3),
    "all_reduce_inside": Measure("node", "bytes", "GB/s", 1e-9),
    "all_reduce_between": Measure("rail", "bytes", "GB/s", 1e-9),
}
# How long a case is timed, as a fraction of the budget: choices that leave time to measure again
ALONE_FRACTION = 0.06  # for up to two turns of the ranks of a node; less for more turns
LINKS_FRACTION = 1 / 150  # for each round
TOGETHER_FRACTION = 1 / 15
FIRST_CASE_FRACTION = 0.1  # a guess: what the first case of a phase will take, with its start
# --margin by default. CPUs have neighbours, and links and collectives cross their cores
MARGIN_ALONE = {"cpu": 0.4, "cuda": 0.1}
MARGIN_TOGETHER = {"cpu": 2.0, "cuda": 0.1}
# An all_reduce between nodes is slow if its busbw is below what its links hold by this factor. On
# the CPU a healthy one is below, too: the core that sends the numbers also adds them
BELOW_LINKS = {"cpu": 8.0, "cuda": 4.0}


def parse_args() -> argparse.Namespace:
    parser = cli.Parser(__doc__)
    add, positive = parser.add_argument, cli.positive_float
    budget = "time limit from the start of rank 0; cases beyond it are skipped (default: 60)"
    add("--budget", type=positive, default=60.0, metavar="SECONDS", help=budget)
    what = "exit with status 1 if anything is slow or wrong, or only if wrong (default: slow)"
    add("--fail-on", choices=("slow", "wrong"), default="slow", help=what)
    add("--sigmas", type=positive, default=SIGMAS, metavar="S", help="threshold (default: 5)")
    margin = "minimum slowdown to report (default: 0.1; on the CPU 0.4, all ranks together 2)"
    add("--margin", type=positive, metavar="SHARE", help=margin)
    add("--min-tflops", type=positive, default=0, metavar="T", help="required of each product")
    add("--min-busbw", type=positive, default=0, metavar="GB/S", help="required within each node")
    add("--gpus", type=cli.positive_int, metavar="N", help="required on each node")
    hosts = "write the hosts that are not fit, for sbatch --exclude; nothing with status 4"
    path = cli.checked(str, bool, "a file to write", "e.g. bad.txt")
    add("--exclude-file", type=path, metavar="PATH", help=hosts)
    cli.add_common_flags(parser, min_iters=6, max_seconds=6, timeout=60)
    return parser.parse_args()


# [core]
LAUNCHES = 200  # in a sample


class Probe(NamedTuple):
    step: Callable[[], Any]
    amount: float  # that the step does


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


# [/core]


def build_alone(turns: int, job: Job, key: Key, group: Group) -> Workload:
    """While a rank has its turn, the others of its node wait in a barrier, which does not spin.

    Each part of the case is one probe in one turn; the first of them has to be the case's step.
    """
    my_probes = probes(job.device)
    my_turn = job.local_rank % turns
    steps: dict[str, Step] = {}
    did: dict[str, tuple[str, float]] = {}  # by probe: the part that timed it, and its amount
    for turn in range(turns):
        for name, probe in my_probes.items():
            part = f"{name}, turn {turn}" if steps else STEP
            if turn == my_turn:
                steps[part] = probe.step
                did[name] = (part, probe.amount)
            else:
                steps[part] = lambda: None

    def facts() -> dict[str, Any]:
        products = nn.ParameterList()
        for name, probe in my_probes.items():
            if name.startswith("matmul"):
                products.append(probe.step())
        started = start_up.start_up_of(job, group)
        return {"did": did, "bits": digest(products)[:10], "start_up": started}

    first = steps.pop(STEP)
    return Workload(first, steps, facts=facts)


def open_teams(teams: dict[str, Teams], job: Job, group: Group) -> dict[str, Any]:
    """The group of this rank's node and of its rail, by step; None where it is in no team.

    A step is left out if any of its teams is of one rank.
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
    """all_reduce of `size` bytes inside the nodes and between them."""
    x = torch.zeros(size // 4, device=job.device)  # numbers of 4 bytes
    all_reduce = operations.OPERATIONS["all_reduce"]
    steps: dict[str, Step] = {}
    did: dict[str, tuple[str, float]] = {}
    members: dict[str, Member] = {}
    for name, mine in open_teams(teams, job, group).items():
        part = name if steps else STEP
        if mine is None:  # there is no rank like this one on other nodes
            steps[part] = lambda: None
            continue
        members[name] = Member(mine, mine.rank(), mine.size(), len(x), "sum")
        steps[part] = partial(all_reduce.call, x, x, members[name])
        sent_by_rank = all_reduce.bus(mine.size()) * size  # in a ring
        did[name] = (part, sent_by_rank)

    def facts() -> dict[str, Any]:
        wrong = None
        for name, member in members.items():
            operations.fill(x, x, member)
            all_reduce.call(x, x, member)
            if operations.count_wrong(all_reduce, x, member):
                wrong = f"a wrong sum of {name}"
        return {"did": did, "wrong": wrong}

    first = steps.pop(STEP)
    return Workload(first, steps, facts=facts, launches=True)


def rounds_by_node(members: Teams) -> list[list[links.Pair]]:
    """The pairs that meet in each round. members: the ranks of each node.

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


# -- from times to findings ------------------------------------------------------------------------


class Cluster(NamedTuple):
    """What is judged, and how."""

    cpu: bool
    nodes: list[int]  # of each rank
    teams: dict[str, Teams]  # the ranks of each rank, node and rail
    kinds: list[str]  # of each rank: ranks of a kind are compared
    margins: dict[str, float]  # by level
    limits: dict[str, float]  # of a rate, by step
    sigmas: float


def cluster_of(bench: Benchmark) -> Cluster:
    args = bench.args
    environment = bench.report.environment
    nodes = node_of_each(environment)
    members: Teams = [[] for _ in range(max(nodes) + 1)]  # the ranks of each node
    for rank, node in enumerate(nodes):
        members[node].append(rank)
    teams = {
        "rank": [[rank] for rank in range(len(nodes))],
        "node": members,
        "rail": [list(ranks) for ranks in zip(*members, strict=False)],
    }
    kinds = [f"{row['device']}, {row['threads']} threads" for row in environment["ranks"]]
    device = bench.job.device.type
    together = args.margin or MARGIN_TOGETHER[device]
    alone = args.margin or MARGIN_ALONE[device]
    margins = {"rank": alone, "node": together, "rail": together, "link": together}
    limits = dict.fromkeys(("matmul_bf16", "matmul_fp32"), args.min_tflops * 1e12)
    limits["all_reduce_inside"] = args.min_busbw * 1e9
    return Cluster(device == "cpu", nodes, teams, kinds, margins, limits, args.sigmas)


def odd_results(bits: list[str], kinds: list[str]) -> dict[int, str]:
    """The ranks whose results differ from most of their kind, or are not finite: rank -> why."""
    with_bits = Counter(zip(kinds, bits, strict=True))
    of_kind = Counter(kinds)
    odd: dict[int, str] = {}
    for rank, mine in enumerate(bits):
        kind = kinds[rank]
        same, all_of_it = with_bits[kind, mine], of_kind[kind]
        is_minority = same <= all_of_it / 2
        if is_minority or mine == "not finite":
            odd[rank] = f"its results ({mine}) are those of {same} of {all_of_it} of its kind"
    return odd


def split(
    report: Report, cluster: Cluster, case: Case, times: Times, facts: list[dict[str, Any]]
) -> None:
    """Each rank becomes a case. The slowest rank of its node or rail counts in each iteration."""
    odd = odd_results([fact.get("bits", "") for fact in facts], cluster.kinds)
    for rank, fact in enumerate(facts):
        host = report.environment["ranks"][rank]["host"]
        metrics = {"bits": fact.get("bits"), **fact.get("start_up", {})}
        samples = {}
        spreads: list[float | None] = []
        drifts: list[float | None] = []
        for step, (part, amount) in fact["did"].items():
            how = STEPS[step]
            times_s = times.each(part)  # [ranks, iterations]
            team = next(team for team in cluster.teams[how.level] if rank in team)
            slowest = times_s[team].max(axis=0)
            blocks_s = [float(block.mean()) for block in in_rounds(slowest, case.rounds)]
            on_cuda = case.key["device"] == "cuda"
            sustained_s = sustained(blocks_s, on_cuda)
            metrics[f"{step}_s"] = float(slowest.min())
            metrics[f"{step}_sustained_s"] = sustained_s
            metrics[how.rate(step)] = amount / sustained_s
            spreads.append(median(slowest).relative)
            drifts.append(links.drift_of(blocks_s, partial(sustained, on_cuda=on_cuda)))
            samples[step] = [times_s[rank].tolist()]
        metrics["spread"], metrics["drift"] = links.widest(spreads), links.widest(drifts)
        of_rank = Case(
            key=case.key | {"rank": rank, "host": host},
            ranks=[rank],
            name=f"rank {rank}",
            table=case.name,
            samples_s=samples,
            rounds=case.rounds,
            stop=case.stop,
            metrics=metrics,
            check=verdict(fact.get("wrong") or odd.get(rank)),
        )
        report.add(of_rank)
    case.samples_s = {}
    case.metrics["num_ranks"] = len(facts)  # --resume takes a case without metrics for damaged


def sustained(blocks_s: Sequence[float], on_cuda: bool) -> float:
    """The mean of the block that counts. blocks_s: the mean of each block."""
    return float(np.median(blocks_s) if on_cuda else np.min(blocks_s))


def judge(cases: list[Case], cluster: Cluster) -> Findings:
    """What takes longer than its peers, or has a rate below its limit.

    All ranks of a node or of a rail have the same numbers: those of its first rank count.
    """
    findings: Findings = {}
    by_rank = {case.key["rank"]: case.metrics for case in cases}
    for step, how in STEPS.items():
        rate = how.rate(step)
        # a node whose ranks are slow is named in their place
        levels = {"node": cluster.nodes} if how.level == "rank" else {}
        rule = (cluster.sigmas, cluster.margins[how.level])
        first_ranks = [ranks[0] for ranks in cluster.teams[how.level]]
        measured: dict[int, int] = {}  # the number of a rank, node or rail -> its first rank
        for number, rank in enumerate(first_ranks):
            if f"{step}_s" in by_rank[rank]:
                measured[number] = rank
        for number, rank in measured.items():
            got, least = by_rank[rank][rate], cluster.limits.get(step, 0)
            if got < least:
                who = Who(how.level, ((number,),))
                missed = Slowness(None, f"{got:.3g}, below {least:.3g}")
                findings[who, rate.replace("_", " ")] = missed
        for name in (step, f"{step}_sustained"):
            for kind in dict.fromkeys(cluster.kinds):
                costs = Costs()
                for number, rank in measured.items():
                    if cluster.kinds[rank] == kind:
                        costs[(number,)] = by_rank[rank][f"{name}_s"]
                what = name.replace("_", " ")
                findings |= accuse(costs, levels, how.level, what, *rule, of_two=True)
    return findings


COLUMNS: Columns = {
    "rank": lambda case: str(case.key["rank"]),
    "host": lambda case: str(case.key["host"]),
    **{
        f"{step.replace('_', ' ')}\n{how.head}": metric(how.rate(step), how.scale, 3)
        for step, how in STEPS.items()
    },
    "+-%": relative("spread"),
    "bits": Cell("bits", str),
}


class Judgement(NamedTuple):
    """slow: what is slow. unsteady: what changed by more than the margin while it was measured.
    left_out: what the budget had no time for, in words."""

    slow: Findings
    unsteady: list[Who]
    left_out: str = ""


def judge_ranks(bench: Benchmark, cluster: Cluster, cases: list[Case]) -> Judgement:
    """Print a row for each rank, and judge them."""
    rows = [case for case in cases if "rank" in case.key]
    if not rows:
        return Judgement({}, [])
    # what the first rank lacks, all lack: it is left out, but for how steady they are
    shown = {head: text for head, text in COLUMNS.items() if head == "+-%" or text(rows[0]) != "-"}
    bench.print_table(shown, rows)
    bench.print("")
    findings = judge(rows, cluster)
    if "all_reduce_between_s" in rows[0].metrics:
        measured = [link for case in bench.report.cases for link in links.links_of(case)]
        findings |= below_links(rows, measured, cluster)
    is_alone = any("copy_s" in row.metrics for row in rows)
    margin = cluster.margins["rank" if is_alone else "node"]
    unsteady = [
        Who("rank", ((row.key["rank"],),)) for row in rows if drifted(row.metrics["drift"], margin)
    ]
    return Judgement(findings, unsteady)


def judge_links(bench: Benchmark, cluster: Cluster, cases: list[Case]) -> Judgement:
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
    margin = cluster.margins["link"]
    rule = (cluster.sigmas, margin)
    findings = links.slow_links(judged, cluster.nodes, "rank", *rule, of_two=True)
    unsteady = [Who("link", ((link.a, link.b),)) for link in judged if drifted(link.drift, margin)]
    return Judgement(findings, unsteady)


def drifted(drift: float | None, margin: float) -> bool:
    """Whether a time changed by more than the margin; unknown is no evidence of steadiness."""
    return drift is None or drift > margin


def below_links(rows: list[Case], measured: list[links.Link], cluster: Cluster) -> Findings:
    """The rails whose all_reduce is far slower than their slowest link.

    rows: a case for each rank. In a ring each rank sends and receives at once, so half of a link's
    bidirectional bandwidth is what busbw can reach.
    """
    findings: Findings = {}
    rates = {case.key["rank"]: case.metrics for case in rows}
    limit = BELOW_LINKS["cpu" if cluster.cpu else "cuda"]
    for number, rail in enumerate(cluster.teams["rail"]):
        own = [link.both / 2 for link in measured if {link.a, link.b} <= {*rail}]
        busbw = rates[rail[0]].get("all_reduce_between_bytes_per_s")
        if own and busbw and busbw * limit < min(own) * 1e9:
            factor = min(own) * 1e9 / busbw
            how = f"{busbw / 1e9:.3g} GB/s, and its slowest link holds {min(own):.3g} GB/s"
            findings[Who("rail", ((number,),)), "all reduce between"] = Slowness(factor, how)
    return findings


# -- the last lines --------------------------------------------------------------------------------


def doubts_of(
    unsteady: Sequence[str], others: Others | None, left_out: Sequence[str], no_peer: str = ""
) -> list[str]:
    """Why it cannot be told that nothing is slow; empty if it can.

    unsteady: names of what changed by more than the margin, twice. others: what other processes
    used, if it was much. left_out: what the budget had no time for. no_peer: what is the only
    one of its kind, so that nothing can be compared with it.
    """
    doubts = []
    if no_peer:
        doubts.append(f"{no_peer}, with nothing to compare it with")
    if others:
        doubts.append(f"other processes used {others.busy:.1f} of {others.cores} cores")
    if unsteady:
        names = cli.cut(list(dict.fromkeys(unsteady)), 3)
        doubts.append(f"the speed of {names} changed during both measurements")
    if left_out:
        doubts.append(f"the budget had no time for {', '.join(left_out)}; raise --budget")
    return doubts


def without_peer(cluster: Cluster) -> str:
    """What is the only one of its kind, in words; "" if everything has a peer or a limit."""
    if len(cluster.nodes) == 1 and not any(cluster.limits.values()):
        return "there is one rank without a limit such as --min-tflops"
    if len(cluster.teams["node"]) == 2 and len(cluster.teams["rail"]) == 1:
        return "there is one link between the nodes"
    return ""


def conclude(
    slow: Findings,
    doubts: Sequence[str],
    is_busy: bool,
    wrong: list[tuple[str, str]],
    fail_on: str,
    names: Names,
    ran: str,
    is_load_known: bool = True,
) -> tuple[int, list[str]]:
    """The status of the run and the last lines; the very last one is the verdict.

    is_load_known: False if nothing has recorded CPU use by other processes; the verdict says so.
    doubts: as of `doubts_of`. is_busy: other processes used much of the cores, so only what is far
    off is certain. wrong: names and why. ran: what was measured, and how long that took, in words.
    """
    lines = sentences(slow, names) + [f"wrong {name}: {why}" for name, why in wrong]
    accused = [name for name, _ in wrong]
    accused += [who.name(names) for who, _ in certain(slow, fail_on, is_busy)]
    unknown = "" if is_load_known else f"; {LOAD_UNKNOWN}"
    if accused:
        return 1, [*lines, f"not fit: {cli.cut(list(dict.fromkeys(accused)))}{unknown}"]
    why = "; ".join(doubts)
    if doubts and fail_on == "slow":
        return cli.NO_VERDICT, [*lines, f"cannot be told: {why}"]
    if doubts:
        return 0, [*lines, f"nothing is wrong; it cannot be told if anything is slow: {why}"]
    return 0, [*lines, f"{'fit, though slow' if slow else 'fit'}: {ran}{unknown}"]


def unfit(environment: dict[str, Any], gpus: int | None) -> dict[int, str]:
    """The nodes that lack GPUs, whose GPUs have memory errors, or on whose GPUs other processes
    held memory before the run -> why. gpus: --gpus."""
    why = lacking(environment, gpus)
    for node, held in occupied(environment).items():
        why[node] = "; ".join(filter(None, [why.get(node), held]))
    return why


def certain(slow: Findings, fail_on: str, is_busy: bool) -> list[tuple[Who, str]]:
    """The findings for which nodes are not fit: see `conclude`."""
    if fail_on == "wrong":
        return []
    return [finding for finding, found in slow.items() if found.is_far or not is_busy]


def hosts_at_fault(
    findings: Sequence[tuple[Who, str]],
    lacks: Sequence[int],
    cases: list[Case],
    teams: dict[str, Teams],
    host_of_rank: Sequence[str],
) -> list[str]:
    """The hosts that may be at fault, sorted: of alternatives, of both ends of a link and of a rail
    all of them.

    findings: the slow ones that count. lacks: the nodes that lack something.
    """
    ranks: set[int] = set()
    for who, _ in findings:
        for members in who.suspects:
            for member in members:
                ranks.update([member] if who.level == "link" else teams[who.level][member])
    for node in lacks:
        ranks.update(teams["node"][node])
    for case in cases:
        if case.failed and "failed_rank" in case.metrics:
            failed = case.metrics["failed_rank"]  # it noticed wrong data, which its peer has sent
            pairs = [row[:2] for row in case.metrics.get("links", []) if failed in row[:2]]
            ranks.update([failed, *(rank for pair in pairs for rank in pair)])
        elif case.failed:
            ranks.update(case.ranks)
    return sorted({host_of_rank[rank] for rank in ranks})


def check_exclude_file(path: str) -> None:
    """Raises ValueError if the file could not be written, before anything is measured."""
    folder = Path(path).parent
    if Path(path).is_dir() or not os.access(folder, os.W_OK):
        raise ValueError(f"expected a file in a folder that can be written, got {path}")


def wrong_results(lacks: dict[int, str], cases: list[Case], names: Names) -> list[tuple[str, str]]:
    """The nodes that lack something, and the ranks with a wrong result or none: names, and why."""
    wrong = [(Who("node", ((node,),)).name(names), why) for node, why in lacks.items()]
    for case in cases:
        if not case.failed:
            continue
        why = case.check.removeprefix("failed: ")
        name = case.key["probe"]
        if "failed_rank" in case.metrics:  # it noticed the failure: another one may be its cause
            failed = names["rank"][case.metrics["failed_rank"]]
            why = why.replace(f"rank {case.metrics['failed_rank']}", failed)
            why += "" if failed in why else f" on {failed.partition(' on ')[2]}"
        if "rank" in case.key:
            name = Who("rank", ((case.key["rank"],),)).name(names)
        wrong.append((name, why))
    return list(dict.fromkeys(wrong))


# -- measure, and measure again --------------------------------------------------------------------


class Part(NamedTuple):
    """A case of a phase. key: what it has beside the phase's."""

    name: str
    key: Key
    ranks: list[int]
    build: Build
    derive: Derive


class Phase(NamedTuple):
    """fraction: of the budget, that each case is timed for. judge: what is slow, of all cases."""

    name: str
    fraction: float
    parts: Sequence[Part]
    judge: Callable[[list[Case]], Judgement]


def plan(bench: Benchmark, cluster: Cluster) -> list[Phase]:
    job, teams = bench.job, cluster.teams
    everyone = list(range(job.world_size))
    turns, size = 1, 2**28
    if cluster.cpu:  # the ranks of a node share its cores
        turns, size = max(len(ranks) for ranks in teams["node"]), 2**20
    # both directions at once: a link that is slow in one of them is slow in both, in half the time
    messages = links.Messages(max(size // 8, links.SUSTAINED_SIZE), 8, each_way=False)
    into_ranks = partial(split, bench.report, cluster)
    alone = [Part("each rank alone", {}, everyone, partial(build_alone, turns, job), into_ranks)]
    meetings: list[Part] = []
    if cluster.cpu or job.backend != "gloo":  # gloo sends no CUDA tensors
        for number, pairs in enumerate(rounds_by_node(teams["node"]), 1):
            key = {"round": number, "size": messages.size}
            ranks_and_how = links.round_of(pairs, teams["rank"], messages, job)
            meetings.append(Part(f"links, round {number}", key, *ranks_and_how))
    together: list[Part] = []
    if len(everyone) > 1:
        build = partial(build_together, size, teams, job)
        together.append(Part("all ranks together", {}, everyone, build, into_ranks))
    alone_fraction = ALONE_FRACTION * min(1, 2 / turns)
    by_ranks = partial(judge_ranks, bench, cluster)
    return [
        Phase("each rank alone", alone_fraction, alone, by_ranks),
        Phase("links", LINKS_FRACTION, meetings, partial(judge_links, bench, cluster)),
        Phase("all ranks together", TOGETHER_FRACTION, together, by_ranks),
    ]


def seconds_left(budget: float) -> float:
    """Seconds left of the budget, which began when rank 0 started. All ranks call it."""
    return float(share(budget - cli.age_s()))


def key_of(bench: Benchmark, phase: Phase, attempt: int) -> Key:
    """What all cases of a phase have in their keys. With the ranks it says which pairs meet."""
    nodes = bench.report.environment["num_nodes"]
    return {"probe": phase.name, "attempt": attempt, "nodes": nodes}


def measure(
    bench: Benchmark, phase: Phase, attempt: int, parts: Sequence[Part]
) -> tuple[Judgement, Sequence[Part]]:
    """What is slow or unsteady, on all ranks, and what was measured of these parts.

    The first time a case begins only if it is expected to end within half of what is left of the
    budget when the phase begins; the other half is for measuring again. It is expected to take as
    long as the one before.
    """
    budget, key = bench.args.budget, key_of(bench, phase, attempt)
    # a case takes its fraction of the budget: no interval is so narrow that it ends a case
    seconds = min(bench.args.max_seconds, phase.fraction * budget)
    rule = replace(bench.rule, target_ci=0.0, max_seconds=seconds, patience=1)
    if not rule.full_warmup:
        rule = replace(rule, warmup_iters=2)
    left = seconds_left(budget)
    reserve = left / 2
    expected, left_out = FIRST_CASE_FRACTION * budget, ""
    for number, part in enumerate(parts):
        if attempt == 1 and left - expected < reserve:
            rounds = f"{len(parts) - number} of {len(parts)} rounds of " if number else ""
            left_out = f"{rounds}{phase.name}"
            bench.print(f"# left out, for --budget {budget:g}: {left_out}")
            parts = parts[:number]
            break
        name = part.name if attempt == 1 else f"{part.name}, again"
        case = bench.measure(
            key | part.key, name, part.build, part.derive, ranks=part.ranks, rule=rule
        )
        if case and case.failed:
            bench.print(f"# {name}: {case.check}")
        before, left = left, seconds_left(budget)
        expected = before - left
    # those whose key has all entries of the phase's
    cases = [case for case in bench.report.cases if key.items() <= case.key.items()]
    return share(phase.judge(cases)._replace(left_out=left_out)), parts


def measure_twice(bench: Benchmark, phase: Phase) -> Judgement:
    """What is slow or unsteady in two measurements. The second one is only made if the first one
    has found something."""
    bench.print(f"\n{phase.name}")
    first, parts = measure(bench, phase, 1, phase.parts)
    suspects = [who for who, _ in first.slow] + first.unsteady
    if not suspects:
        return first
    names = list(dict.fromkeys(who.name() for who in suspects))
    bench.print(f"# {phase.name} again, for {cli.cut(names)}")
    second, _ = measure(bench, phase, 2, parts)
    return in_both(first, second)


def in_both(first: Judgement, second: Judgement) -> Judgement:
    """What both measurements have found. The smaller factor counts."""
    slow: Findings = {}
    for finding in first.slow.keys() & second.slow.keys():
        found = (first.slow[finding], second.slow[finding])
        slow[finding] = min(found, key=lambda slowness: slowness.factor or 0.0)
    in_order = {finding: slow[finding] for finding in second.slow if finding in slow}
    unsteady = [who for who in first.unsteady if who in second.unsteady]
    return Judgement(in_order, unsteady, first.left_out)


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
    check_flags(args)
    # the verdict is about now, so nothing of an earlier report is kept: it is moved to PATH.bak
    args.resume = False
    with Benchmark("node_check", args) as bench:
        if args.exclude_file:
            is_first = bench.job.rank == 0  # it writes the file
            check = partial(check_exclude_file, args.exclude_file) if is_first else lambda: None
            bench.prepare("--exclude-file", check)
        stay_near(bench.job.device)  # or healthy ranks' copies to the host differ by the socket
        environment = bench.report.environment
        cluster = cluster_of(bench)
        phases = plan(bench, cluster)
        planned: dict[str, list[Planned]] = {}
        for phase in phases:
            key = key_of(bench, phase, attempt=1)
            parts = [(part.name, len(part.ranks), key | part.key) for part in phase.parts]
            planned[phase.name] = parts
        bench.announce(planned)
        slow: Findings = {}
        unsteady: list[Who] = []
        left_out: list[str] = []
        for phase in phases:
            if phase.parts:
                judgement = measure_twice(bench, phase)
                slow |= judgement.slow
                unsteady += judgement.unsteady
                left_out += [judgement.left_out] if judgement.left_out else []
        if not share(len(bench.report.cases)):
            bench.refuse(f"--budget {args.budget:g} ends before the first case; e.g. --budget 60")
        others, seconds = bench.disturbed(), args.budget - seconds_left(args.budget)
        if bench.job.rank == 0:
            nodes = count_of(environment["num_nodes"], "node")
            ranks = count_of(environment["world_size"], "rank")
            ran = f"{nodes}, {ranks}, {seconds:.0f} s of {args.budget:g}"
            of_ranks = rank_names(environment)
            names = {"node": node_names(environment), "rank": of_ranks, "link": of_ranks}
            lacks = unfit(environment, args.gpus)
            wrong = wrong_results(lacks, bench.report.cases, names)
            changed = [who.name(names) for who in unsteady]
            doubts = doubts_of(changed, others, left_out, without_peer(cluster))
            status, lines = conclude(
                slow, doubts, bool(others), wrong, args.fail_on, names, ran, bench.records_load
            )
            if status:
                bench.fail(lines[-1], status)
            if args.exclude_file and status != cli.NO_VERDICT:
                host_of_rank = [row["host"] for row in environment["ranks"]]
                findings = certain(slow, args.fail_on, bool(others))
                cases = bench.report.cases
                hosts = hosts_at_fault(findings, [*lacks], cases, cluster.teams, host_of_rank)
                try:  # Slurm's form of a list of hosts; empty if all are fit
                    Path(args.exclude_file).write_text(",".join(hosts) + "\n" * bool(hosts))
                except OSError as error:
                    bench.fail(f"--exclude-file {args.exclude_file}: {error.strerror}")
            of_cases = [case.metrics for case in bench.report.cases]
            started = [metrics for metrics in of_cases if "group_s" in metrics]
            if started:
                by_rank = start_up.seconds_by_name(started)
                ranks_of_job = range(bench.job.world_size)
                lines.insert(0, start_up.sentence(by_rank, ranks_of_job, environment))
            bench.conclude(lines)
    return bench.status


if __name__ == "__main__":
    sys.exit(record(main)())
