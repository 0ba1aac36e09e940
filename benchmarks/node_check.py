#!/usr/bin/env python3
"""Are these nodes fit for training? A verdict, with names and reasons if they are not.

    alone     each rank by itself: matrix products, copies within memory, to the device and back,
              and kernel launches. On the CPU the ranks of a node share its cores, so they run one
              after the other
    links     disjoint pairs of ranks, in rounds: first all pairs within a node, then all pairs of
              nodes on all rails at once (rail i: the i-th ranks of all nodes). A sample is a series
              of messages of up to 4 MiB (32 MiB on CUDA) that takes at least 50 ms
    together  all_reduce within each node, then between nodes along the rails
    times     the steps of `alone` and `together` are judged by two times: the fastest sample, and
              the mean of a block (`sustained`). This is the median block on CUDA, where heat slows
              down all blocks, and the fastest block on the CPU, where other processes slow down
              only some.
              A link is judged by its slowest block, because a switch or a cloud provider may allow
              bursts above the sustained bandwidth
    slow      the time exceeds the median of its peers by --sigmas robust standard deviations
              (1.4826 times the median absolute deviation) and by --margin, in two measurements. The
              second one is made only if the first one finds something. The all_reduce between nodes
              is also compared with the links that it uses
    wrong     the results of a rank differ from those of most of its peers; received data is
              corrupted; a node has fewer GPUs than the other nodes or than --gpus; other processes
              already used more than 1 GiB of a GPU's memory when the run started
    +-%       distance from the median sample to the farther end of its 95% interval, for the least
              steady step of a rank
    rates     TFLOP/s = 2 n^3 / sustained, n = 8192 (CPU: 512)
              copy = 2 * bytes / sustained, 512 MiB (CPU: 16 MiB)
              all_reduce = 2(n-1)/n * bytes / sustained, the busbw of nccl-tests
              link = 2 * bytes / mean of the slowest block, in both directions together
    node      the median of the times of its ranks alone (of an even number, the lower middle one)

There is no verdict on slowness while other processes use more than a tenth of the cores, or if the
two halves of a measurement differ by more than --margin in both measurements. A slowdown by more
than a factor of 5 is reported in any case. If ranks that run at the same time share cores, it has
to exceed 5 * ranks / cores, among at least 6 components. The verdict mentions the variables, the
versions and the numbers of threads that differ between nodes.

Exit status: 0 fit; 1 slow or wrong, with the names in the last lines; 2 a mistake in the command;
3 a hang; 4 nothing is wrong, and there is no verdict on slowness.

--min-tflops applies to the product in bf16 on CUDA, and to the one in fp32 on the CPU. Run the srun
command within a Slurm job to which whole nodes with GPUs are allocated, e.g. in salloc --exclusive.

    torchrun --nproc-per-node 8 benchmarks/node_check.py
    torchrun --nproc-per-node 8 benchmarks/node_check.py --min-tflops 600 --exclude-file bad.txt
    srun --ntasks-per-node 8 bash launch/slurm_env.sh python3 benchmarks/node_check.py && srun ...

The script answers the question of Megatron-LM's gpu_sniff_test.py with new code. docs/node_check.md
explains the output. BSD-3-Clause.
"""

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness import cli, exits

exits.report_missing_packages()

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record

from benchmarks.workloads import links, network, operations, start_up
from benchmarks.workloads.check import digest, verdict
from benchmarks.workloads.operations import Member
from benchmarks.workloads.outliers import (
    SIGMAS,
    Component,
    Costs,
    Crowd,
    Findings,
    Names,
    Slowness,
    beyond,
    find_slow,
    sentences,
)
from benchmarks.workloads.outliers import in_both as slow_in_both
from benchmarks.workloads.ranks import ranks_by_node
from common.groups import Group, Job, barrier_before_new_group, connect, silenced
from common.stats import Times, by_round, median, significant
from common.table import Cell, Columns, metric, relative
from common.timing import STEP, Step, Workload
from harness.benchmark import LOAD_UNKNOWN, Benchmark, Build, Derive, Key, Planned, check_flags
from harness.cpu_load import Others
from harness.environment import (
    count_of,
    gpu_problems,
    memory_in_use,
    node_names,
    node_of_each,
    rank_names,
)
from harness.report import Case, Report

Teams = list[list[int]]  # the ranks of each node, or of each rail


class Measure(NamedTuple):
    """What a step measures.

    level: the kind of component that its time characterizes. unit: the unit of the rate in the
    metrics. The table shows the rate times `scale`, under the heading `head`.
    """

    level: str
    unit: str
    head: str
    scale: float

    def rate(self, step: str) -> str:
        """The name of the metric that contains the rate."""
        return f"{step}_{self.unit}_per_s"


SYS = Path("/sys")  # where Linux describes PCI devices
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
# The time per case as a fraction of the budget, chosen so that there is time to measure again
ALONE_FRACTION = 0.06  # for up to two turns of the ranks of a node; less per turn beyond
LINKS_FRACTION = 1 / 150  # per round
ALL_LINKS_FRACTION = 1 / 4  # all rounds together: less than the half that they may use
TOGETHER_FRACTION = 1 / 15
SAMPLES = 8  # of a round; a message takes at most this part of its time, or SUSTAINED_S
FIRST_CASE_FRACTION = 0.1  # an estimate for the first case of a phase, including its start-up
# Defaults of --margin. Other processes slow down CPUs, and links and collectives whose data passes
# through the cores.
MARGIN_ALONE = {"cpu": 0.4, "cuda": 0.1}
MARGIN_TOGETHER = {"cpu": 2.0, "cuda": 0.1}
# An all_reduce between nodes is slow if its busbw is lower than that of its links by this factor.
# On the CPU it is lower even on healthy nodes: the core that sends the data also adds it up.
BELOW_LINKS = {"cpu": 8.0, "cuda": 4.0}


def parse_args() -> argparse.Namespace:
    parser = cli.Parser(__doc__)
    add, positive = parser.add_argument, cli.positive_float
    add(
        "--budget",
        type=positive,
        default=60.0,
        metavar="SECONDS",
        help="time limit from the start of rank 0; cases beyond it are skipped (default: 60)",
    )
    add(
        "--fail-on",
        choices=("slow", "wrong"),
        default="slow",
        help="slow: exit with status 1 if anything is slow or wrong; wrong: only if it is wrong "
        "(default: slow)",
    )
    add(
        "--sigmas",
        type=positive,
        default=SIGMAS,
        metavar="S",
        help="robust standard deviations above the median that count as slow (default: 5)",
    )
    add(
        "--margin",
        type=positive,
        metavar="FRACTION",
        help="minimum slowdown to report, as a fraction of the median time (default: 0.1; on the "
        "CPU 0.4 for ranks alone, 2 for communication)",
    )
    add(
        "--min-tflops",
        type=positive,
        default=0,
        metavar="T",
        help="minimum TFLOP/s of each rank's matrix product, in bf16 on CUDA, in fp32 on the CPU",
    )
    add(
        "--min-busbw",
        type=positive,
        default=0,
        metavar="GB/S",
        help="minimum busbw of all_reduce within each node, 256 MiB on CUDA, 1 MiB on the CPU",
    )
    add(
        "--fail-on-difference",
        action="store_true",
        help="nodes whose variables, versions or numbers of threads differ are not fit",
    )
    add("--gpus", type=cli.positive_int, metavar="N", help="minimum number of GPUs on each node")
    path = cli.checked(str, bool, "a file to write", "e.g. bad.txt")
    add(
        "--exclude-file",
        type=path,
        metavar="PATH",
        help="write the hosts that are not fit, for sbatch --exclude; only with status 0 or 1",
    )
    network.add_flag(parser)
    cli.add_common_flags(parser, min_iters=6, max_seconds=6, timeout=60)
    return parser.parse_args()


# [core]
LAUNCHES = 200  # per sample


class Probe(NamedTuple):
    step: Callable[[], Any]
    amount: float  # FLOPs, bytes or calls per step


def probes(device: torch.device) -> dict[str, Probe]:
    """What a rank runs by itself. All ranks multiply the same matrices."""
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
    """Run the probes of this rank, on the CPU in its turn, while the other ranks of its node wait
    in a barrier, which does not spin.

    A case times its step and the parts of it (common/timing.py: Workload). Here each of them is one
    probe in one turn; the first is the step.
    """
    my_probes = probes(job.device)
    my_turn = job.local_rank % turns
    steps: dict[str, Step] = {}
    did: dict[str, tuple[str, float]] = {}  # probe -> the part that timed it, and its amount
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
    """The process group of this rank's node and of its rail, by step; None if it is in no rail.

    A step is omitted if one of its teams has only one rank.
    """
    team_groups: dict[str, Any] = {}
    for name in ("all_reduce_inside", "all_reduce_between"):
        all_teams = teams[STEPS[name].level]
        if min(len(team) for team in all_teams) > 1:
            barrier_before_new_group(group)
            with silenced(job.backend):
                mine: Any = dist.new_subgroups_by_enumeration(all_teams, backend=job.backend)[0]
            team_groups[name] = mine
            if mine is not None:
                group.extra.append(mine)
                connect(mine, job)
    return team_groups


def build_together(
    size: int, teams: dict[str, Teams], job: Job, key: Key, group: Group
) -> Workload:
    """all_reduce of `size` bytes within each node, and along the rails between nodes."""
    x = torch.zeros(size // 4, device=job.device)  # float32
    all_reduce = operations.OPERATIONS["all_reduce"]
    steps: dict[str, Step] = {}
    did: dict[str, tuple[str, float]] = {}
    members: dict[str, Member] = {}
    for name, mine in open_teams(teams, job, group).items():
        part = name if steps else STEP
        if mine is None:  # other nodes have fewer ranks, so this one is in no rail
            steps[part] = lambda: None
            continue
        members[name] = Member(mine, mine.rank(), mine.size(), len(x), "sum")
        steps[part] = partial(all_reduce.call, x, x, members[name])
        sent_by_rank = all_reduce.bus(mine.size()) * size  # with a ring algorithm
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
    """The pairs of ranks that are measured in each round. members: the ranks of each node.

    First each pair of ranks within a node is measured once, in all nodes at the same time. Then
    each pair of nodes is measured once, on all rails at the same time.
    """
    rounds: list[list[links.Pair]] = []
    largest_node = max(len(ranks) for ranks in members)
    for places in links.rounds_of(largest_node):
        inside: list[links.Pair] = []
        for ranks in members:  # smaller nodes do not have the last places
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
    """The ranks, how they belong together, and how they are judged."""

    cpu: bool
    nodes: list[int]  # the node of each rank
    teams: dict[str, Teams]  # level -> the ranks of each rank, node or rail
    kinds: list[str]  # the device of each rank; only ranks of the same kind are compared
    margins: dict[str, float]  # by level
    limits: dict[str, float]  # step -> minimum rate
    sigmas: float
    crowd: Crowd | None = None  # where ranks that run at the same time share cores


def cluster_of(bench: Benchmark) -> Cluster:
    args = bench.args
    environment = bench.report.environment
    nodes = node_of_each(environment)
    members = ranks_by_node(nodes)
    teams = {
        "rank": [[rank] for rank in range(len(nodes))],
        "node": members,
        "rail": [list(ranks) for ranks in zip(*members, strict=False)],
    }
    kinds = [row["device"] for row in environment["ranks"]]
    device = bench.job.device.type
    together = args.margin or MARGIN_TOGETHER[device]
    alone = args.margin or MARGIN_ALONE[device]
    margins = {"rank": alone, "node": together, "rail": together, "link": together}
    limits = limits_of(args.min_tflops, args.min_busbw, device)
    crowd = links.crowd_of(bench.job, environment)
    return Cluster(device == "cpu", nodes, teams, kinds, margins, limits, args.sigmas, crowd)


def limits_of(min_tflops: float, min_busbw: float, device: str) -> dict[str, float]:
    """The minimum rate of each step that has a limit, in FLOP/s or bytes/s; 0 for no limit.

    min_tflops: in TFLOP/s. It applies to bf16 on CUDA, where fp32 is slower by an order of
    magnitude, and to fp32 on the CPU, which multiplies nothing else. min_busbw: in GB/s.
    """
    product = "matmul_fp32" if device == "cpu" else "matmul_bf16"
    return {product: min_tflops * 1e12, "all_reduce_inside": min_busbw * 1e9}


def odd_results(bits: list[str], kinds: list[str]) -> dict[int, str]:
    """The ranks whose results are not finite, or differ from those of most ranks with the same
    device and number of threads: rank -> why. kinds: the device and number of threads of each rank.
    """
    with_bits = Counter(zip(kinds, bits, strict=True))
    of_kind = Counter(kinds)
    odd: dict[int, str] = {}
    for rank, mine in enumerate(bits):
        kind = kinds[rank]
        same, all_of_it = with_bits[kind, mine], of_kind[kind]
        if mine == "not finite":
            odd[rank] = "its results are not finite"
        elif same <= all_of_it / 2:
            peers = f"{all_of_it} ranks with the same device and number of threads"
            odd[rank] = f"only {same} of {peers} computed these results ({mine})"
    return odd


def split(
    report: Report, cluster: Cluster, case: Case, times: Times, facts: list[dict[str, Any]]
) -> None:
    """Write a case for each rank to the report. The time of an iteration is the maximum over the
    ranks of its node or rail."""
    # a sum in several threads may round differently
    kinds = [f"{row['device']}, {row['threads']} threads" for row in report.environment["ranks"]]
    odd = odd_results([fact.get("bits", "") for fact in facts], kinds)
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
            blocks_s = [float(block.mean()) for block in by_round(slowest, case.rounds)]
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
    case.metrics["num_ranks"] = len(facts)  # --resume considers a case without metrics damaged


def sustained(blocks_s: Sequence[float], on_cuda: bool) -> float:
    """The time of the block that is judged. blocks_s: the mean sample of each block."""
    return float(np.median(blocks_s) if on_cuda else np.min(blocks_s))


def judge(cases: list[Case], cluster: Cluster) -> Findings:
    """Find the components that are slower than their peers, or whose rate is below its limit.

    All ranks of a node or rail have the same times, so those of its first rank are used.
    """
    findings: Findings = {}
    by_rank = {case.key["rank"]: case.metrics for case in cases}
    for step, how in STEPS.items():
        rate = how.rate(step)
        # a slow node is reported instead of its ranks
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
                component = Component(how.level, ((number,),))
                shown = f"{got * how.scale:.4g} {how.head}, below {least * how.scale:.4g}"
                findings[component, f"{step.replace('_', ' ')} rate"] = Slowness(None, shown)
        for name in (step, f"{step}_sustained"):
            for kind in dict.fromkeys(cluster.kinds):
                costs = Costs()
                for number, rank in measured.items():
                    if cluster.kinds[rank] == kind:
                        costs[(number,)] = by_rank[rank][f"{name}_s"]
                what = name.replace("_", " ")
                findings |= find_slow(costs, levels, how.level, what, *rule, of_two=True)
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
    """slow: the slow components. unsteady: those whose time changed by more than the margin during
    the measurement. left_out: the cases that did not fit into the budget, in words. unsure: the
    components that look slow where ranks share cores, which may be the cause."""

    slow: Findings
    unsteady: list[Component]
    left_out: str = ""
    unsure: Sequence[Component] = ()


def judge_ranks(bench: Benchmark, cluster: Cluster, cases: list[Case]) -> Judgement:
    """Print a row for each rank, and judge the ranks."""
    rows = [case for case in cases if "rank" in case.key]
    if not rows:
        return Judgement({}, [])
    # a column that is empty for the first rank is empty for all, except that of the intervals
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
        Component("rank", ((row.key["rank"],),))
        for row in rows
        if drifted(row.metrics["drift"], margin)
    ]
    return Judgement(findings, unsteady)


def judge_links(bench: Benchmark, cluster: Cluster, cases: list[Case]) -> Judgement:
    """Print the range of the links of these rounds, and judge them."""
    measured = [link for case in cases for link in links.links_of(case)]
    within = [link for link in measured if cluster.nodes[link.a] == cluster.nodes[link.b]]
    between = [link for link in measured if link not in within]
    if cases:
        rounds, size = count_of(len(cases), "round"), cases[0].key["size"]
        bench.print(f"\n{rounds}, messages of up to {size:,} bytes, both directions at once")
        names = rank_names(bench.report.environment)
        bench.print(range_of("within nodes", within, names) if within else "")
        bench.print(range_of("between nodes", between, names) if between else "")
    # links within a node of CPUs share its cores: only their data is checked
    judged = between if cluster.cpu else measured
    margin = cluster.margins["link"]
    rule = (cluster.sigmas, margin)
    findings = links.slow_links(judged, cluster.nodes, "rank", *rule, of_two=True)
    unsteady = [
        Component("link", ((link.a, link.b),)) for link in judged if drifted(link.drift, margin)
    ]
    return Judgement(findings, unsteady)


def range_of(where: str, measured: Sequence[links.Link], names: Sequence[str]) -> str:
    """`between nodes: 0.0060 to 0.210 GB/s, median 0.200; slowest rank 1 on b -> rank 2 on c`"""
    rates = [link.both for link in measured]
    low, middle, high = (significant(x, 3) for x in (min(rates), np.median(rates), max(rates)))
    a, b, *_ = min(measured, key=lambda link: link.both)
    return f"{where}: {low} to {high} GB/s, median {middle}; slowest {names[a]} -> {names[b]}"


def drifted(drift: float | None, margin: float) -> bool:
    """Whether a time changed by more than the margin, or may have: an unknown drift is no evidence
    of steadiness."""
    return drift is None or drift > margin


def below_links(rows: list[Case], measured: list[links.Link], cluster: Cluster) -> Findings:
    """Find the rails whose all_reduce is far slower than their slowest link.

    In a ring each rank sends and receives at the same time, so busbw is limited by half of the
    bidirectional bandwidth of a link. rows: a case for each rank.
    """
    findings: Findings = {}
    rates = {case.key["rank"]: case.metrics for case in rows}
    limit = BELOW_LINKS["cpu" if cluster.cpu else "cuda"]
    for number, rail in enumerate(cluster.teams["rail"]):
        own = [link.both / 2 for link in measured if {link.a, link.b} <= {*rail}]
        busbw = rates[rail[0]].get("all_reduce_between_bytes_per_s")
        if own and busbw and busbw * limit < min(own) * 1e9:
            factor = min(own) * 1e9 / busbw
            got, of_link = significant(busbw / 1e9, 3), significant(min(own), 3)
            text = f"{got} GB/s, but its slowest link sustains {of_link} GB/s"
            component = Component("rail", ((number,),))
            findings[component, "all reduce between"] = Slowness(factor, text)
    return findings


# -- the verdict -----------------------------------------------------------------------------------


def doubts_of(
    unsteady: Sequence[str],
    others: Others | None,
    left_out: Sequence[str],
    no_peer: str = "",
    is_load_unknown: bool = False,
    unsure: str = "",
) -> list[str]:
    """Why there is no verdict on slowness; empty if there can be one.

    unsteady: names of the components whose speed changed in both measurements. others: the CPU use
    of other processes, if it was high. left_out: the cases that did not fit into the budget.
    no_peer: see `without_peer`. is_load_unknown: whether neither this run nor ab.py records it.
    unsure: what cannot be told, and why.
    """
    doubts = []
    if unsure:
        doubts.append(unsure)
    if no_peer:
        doubts.append(f"{no_peer}, because there is nothing to compare it with")
    if others:
        doubts.append(f"other processes used {others.busy:.1f} of {others.cores} cores")
    if is_load_unknown:
        doubts.append(LOAD_UNKNOWN)
    if unsteady:
        names = cli.cut(list(dict.fromkeys(unsteady)), 3)
        doubts.append(f"the speed of {names} changed during both measurements")
    if left_out:
        doubts.append(f"the budget was too short for {', '.join(left_out)}; raise --budget")
    return doubts


def without_peer(cluster: Cluster) -> str:
    """The component that cannot be judged, since it has neither a peer nor a limit, in words; "" if
    there is none."""
    has_limit = any(least for step, least in cluster.limits.items() if STEPS[step].level == "rank")
    for kind, count in Counter(cluster.kinds).items():
        if count == 1 and not has_limit:
            if len(cluster.kinds) == 1:
                return "a single rank cannot be judged without --min-tflops"
            rank = f"rank {cluster.kinds.index(kind)}"
            return f"{rank}, the only one on {kind}, cannot be judged without --min-tflops"
    if len(cluster.teams["node"]) == 2 and len(cluster.teams["rail"]) == 1:
        return "there is one link between the nodes"
    return ""


def not_judged(cluster: Cluster, names: Names) -> list[str]:
    """What a verdict does not include, in words."""
    remarks = []
    of_nodes = cluster.teams["node"]
    kinds = Counter(cluster.kinds[ranks[0]] for ranks in of_nodes)
    if min(map(len, of_nodes)) > 1 and not cluster.limits.get("all_reduce_inside"):
        pairs = zip(names["node"], of_nodes, strict=True)
        if alone := [name for name, ranks in pairs if kinds[cluster.kinds[ranks[0]]] == 1]:
            where = cli.cut(alone, 3)
            remarks.append(f"all_reduce within {where} is not judged: no peer, no --min-busbw")
    if crowd := cluster.crowd:
        few = f"links and all_reduce slower by less than {crowd.factor:g} times are not judged"
        remarks.append(f"{crowd.text}: {few}")
    return remarks


def differences_of(environment: dict[str, Any]) -> dict[int, str]:
    """What differs between nodes: node -> `differs: NCCL_ALGO, threads`, or `differs on rank 3:
    threads` if other ranks of the node do not. A value differs unless most ranks have it.
    """
    nodes, ranks = node_of_each(environment), environment["ranks"]
    rows: list[dict[str, Any]] = []
    for rank, node in zip(ranks, nodes, strict=True):
        drivers = {gpu["driver_version"] for gpu in environment["gpus"][node]}
        row = {"threads": rank["threads"], "cores": rank["cores"]}
        row |= {"kernel": environment["kernels"][node], "NVIDIA driver": sorted(drivers)}
        rows.append(row)
    for other in environment["other_variables"]:
        for rank in other["ranks"]:
            rows[rank] |= other["variables"]
    usual = environment["variables"]
    found: dict[int, dict[int, list[str]]] = {}  # node -> rank -> names
    for name in sorted({name for row in rows for name in row}, key=lambda x: (x.islower(), x)):
        values = [str(row.get(name, usual.get(name))) for row in rows]
        counts = Counter(values)
        for rank, value in enumerate(values):
            if counts[value] <= len(rows) / 2:
                found.setdefault(nodes[rank], {}).setdefault(rank, []).append(name)
    lines = {}
    for node, by_rank in sorted(found.items()):
        names = list(dict.fromkeys(name for of_rank in by_rank.values() for name in of_rank))
        on = f" on rank {cli.cut([*by_rank])}" if len(by_rank) < nodes.count(node) else ""
        lines[node] = f"differs{on}: {cli.cut(names)}"
    return lines


def conclude(
    slow: Findings,
    doubts: Sequence[str],
    is_busy: bool,
    wrong: list[tuple[str, str]],
    fail_on: str,
    names: Names,
    ran: str,
    is_load_known: bool = True,
    differs: str = "",
) -> tuple[int, list[str]]:
    """The exit status and the last lines of the run. The very last line is the verdict.

    doubts: see `doubts_of`. is_busy: whether the CPU use of other processes was so high that only a
    slowdown by a large factor is certain. wrong: names and reasons. ran: what was measured, and how
    long that took, in words. is_load_known: False if the CPU use of other processes was not
    recorded; the verdict then says so. differs: the nodes that differ, in words.
    """
    lines = sentences(slow, names) + [f"wrong {name}: {why}" for name, why in wrong]
    accused = [name for name, _ in wrong]
    accused += [component.name(names) for component, _ in certain(slow, fail_on, is_busy)]
    unknown = "" if is_load_known else f"; {LOAD_UNKNOWN}"
    beside = f"; {differs}" if differs else ""
    if accused:
        return 1, [*lines, f"not fit: {cli.cut(list(dict.fromkeys(accused)))}{unknown}{beside}"]
    why = "; ".join(doubts)
    if doubts and fail_on == "slow":
        return exits.NO_VERDICT, [*lines, f"no verdict: {why}{beside}"]
    if doubts:
        return 0, [*lines, f"nothing is wrong; no verdict on slowness: {why}{beside}"]
    but = f", but {differs}; " if differs else ": "
    return 0, [*lines, f"{'fit, though slow' if slow else 'fit'}{but}{ran}{unknown}"]


def unfit(environment: dict[str, Any], gpus: int | None) -> dict[int, str]:
    """The nodes that have too few GPUs, GPUs with memory errors, or GPUs whose memory was in use by
    other processes before the run: node -> why. gpus: --gpus."""
    why = gpu_problems(environment, gpus)
    for node, held in memory_in_use(environment).items():
        why[node] = "; ".join(filter(None, [why.get(node), held]))
    return why


def certain(slow: Findings, fail_on: str, is_busy: bool) -> list[tuple[Component, str]]:
    """The findings that make a node unfit: see `conclude`."""
    if fail_on == "wrong":
        return []
    return [finding for finding, found in slow.items() if found.is_far or not is_busy]


def hosts_at_fault(
    findings: Sequence[tuple[Component, str]],
    lacks: Sequence[int],
    cases: list[Case],
    teams: dict[str, Teams],
    host_of_rank: Sequence[str],
) -> list[str]:
    """The hosts that may be at fault, sorted. They include all suspects if it is impossible to tell
    which one is at fault, both ends of a link, and all hosts of a rail.

    findings: the slow components that make a node unfit. lacks: the nodes that are not fit for
    another reason.
    """
    ranks: set[int] = set()
    for component, _ in findings:
        teams_of_level = teams["rank" if component.level == "link" else component.level]
        for members in component.suspects:
            for member in members:
                ranks.update(teams_of_level[member])
    for node in lacks:
        ranks.update(teams["node"][node])
    for case in cases:
        if case.failed and "failed_rank" in case.metrics:
            failed = case.metrics["failed_rank"]  # it received wrong data, which its peer has sent
            pairs = [row[:2] for row in case.metrics.get("links", []) if failed in row[:2]]
            ranks.update([failed, *(rank for pair in pairs for rank in pair)])
        elif case.failed:
            ranks.update(case.ranks)
    return sorted({host_of_rank[rank] for rank in ranks})


def wrong_results(lacks: dict[int, str], cases: list[Case], names: Names) -> list[tuple[str, str]]:
    """The nodes that are not fit by themselves, and the ranks with a wrong result or without one:
    names and reasons."""
    wrong = [(Component("node", ((node,),)).name(names), why) for node, why in lacks.items()]
    for case in cases:
        if not case.failed:
            continue
        why = case.check.removeprefix("failed: ")
        name = case.key["probe"]
        if "failed_rank" in case.metrics:  # it detected the failure; its peer may be the cause
            failed = names["rank"][case.metrics["failed_rank"]]
            why = why.replace(f"rank {case.metrics['failed_rank']}", failed)
            why += "" if failed in why else f" on {failed.partition(' on ')[2]}"
        if "rank" in case.key:
            name = Component("rank", ((case.key["rank"],),)).name(names)
        wrong.append((name, why))
    return list(dict.fromkeys(wrong))


# -- measure, and measure again --------------------------------------------------------------------


class Part(NamedTuple):
    """What a phase measures as one case, the unit of a report. key: the entries that identify the
    case, in addition to the key of the phase."""

    name: str
    key: Key
    ranks: list[int]
    build: Build
    derive: Derive


class Phase(NamedTuple):
    """A group of cases. fraction: the time of each case, as a fraction of the budget. judge: judges
    all cases of the phase. crowd: where ranks that run at the same time share cores."""

    name: str
    fraction: float
    parts: Sequence[Part]
    judge: Callable[[list[Case]], Judgement]
    crowd: Crowd | None = None


def plan(bench: Benchmark, cluster: Cluster) -> list[Phase]:
    job, teams = bench.job, cluster.teams
    world = list(range(job.world_size))
    turns, size = 1, 2**28
    if cluster.cpu:  # the ranks of a node share its cores
        turns, size = max(len(ranks) for ranks in teams["node"]), 2**20
    rounds = rounds_by_node(teams["node"])
    links_fraction = fraction_per_round(len(rounds))
    # Both directions at the same time: half the duration, and a link slow in one is detected. With
    # smaller messages, the round of a slow link fits into the budget.
    messages = links.Messages(
        max(size // 8, links.SUSTAINED_SIZE),
        8,
        each_way=False,
        limit_s=max(links.SUSTAINED_S, links_fraction * bench.args.budget / SAMPLES),
    )
    into_ranks = partial(split, bench.report, cluster)
    alone = [Part("each rank alone", {}, world, partial(build_alone, turns, job), into_ranks)]
    meetings: list[Part] = []
    if cluster.cpu or job.backend != "gloo":  # gloo does not send CUDA tensors
        for number, pairs in enumerate(rounds, 1):
            key = {"round": number, "size": messages.size}
            ranks_and_how = links.round_of(pairs, teams["rank"], messages, job)
            meetings.append(Part(f"links, round {number}", key, *ranks_and_how))
    together: list[Part] = []
    if len(world) > 1:
        build = partial(build_together, size, teams, job)
        together.append(Part("all ranks together", {}, world, build, into_ranks))
    alone_fraction = ALONE_FRACTION * min(1, 2 / turns)
    by_ranks = partial(judge_ranks, bench, cluster)
    return [
        Phase("each rank alone", alone_fraction, alone, by_ranks),
        Phase(
            "links", links_fraction, meetings, partial(judge_links, bench, cluster), cluster.crowd
        ),
        Phase("all ranks together", TOGETHER_FRACTION, together, by_ranks, cluster.crowd),
    ]


def fraction_per_round(rounds: int) -> float:
    """The time of a round of links, as a fraction of the budget. With many nodes it is smaller, so
    that all rounds fit if the budget is raised."""
    return min(LINKS_FRACTION, ALL_LINKS_FRACTION / max(rounds, 1))


def seconds_left(job: Job, budget: float) -> float:
    """Seconds left of the budget, which began when rank 0 started. A collective call."""
    return float(job.broadcast(budget + exits.STARTED_S - time.monotonic()))


def key_of(bench: Benchmark, phase: Phase, attempt: int) -> Key:
    """The key that all cases of a phase share. With the ranks of a case it identifies the pairs."""
    nodes = bench.report.environment["num_nodes"]
    return {"probe": phase.name, "attempt": attempt, "nodes": nodes}


def measure(
    bench: Benchmark, phase: Phase, attempt: int, parts: Sequence[Part]
) -> tuple[Judgement, Sequence[Part]]:
    """Measure the cases of a phase. Returns the judgement, on all ranks, and the measured cases.

    In the first attempt, a case starts only if it is expected to end within half of the budget that
    is left when the phase starts; the other half is reserved for measuring again. A case is
    expected to take as long as the previous one.
    """
    budget, key = bench.args.budget, key_of(bench, phase, attempt)
    # a case takes its fraction of the budget: target_ci 0 keeps narrow intervals from ending it
    seconds = min(bench.args.max_seconds, phase.fraction * budget)
    rule = replace(bench.rule, target_ci=0.0, max_seconds=seconds, patience=1)
    if not rule.full_warmup:
        rule = replace(rule, warmup_iters=2)
    left = seconds_left(bench.job, budget)
    reserve = left / 2
    expected, left_out = FIRST_CASE_FRACTION * budget, ""
    for number, part in enumerate(parts):
        if attempt == 1 and left - expected < reserve:
            rounds = f"{len(parts) - number} of {len(parts)} rounds of " if number else ""
            left_out = f"{rounds}{phase.name}"
            bench.print(f"# not measured within --budget {budget:g}: {left_out}")
            parts = parts[:number]
            break
        name = part.name if attempt == 1 else f"{part.name}, again"
        case = bench.measure(
            key | part.key, name, part.build, part.derive, ranks=part.ranks, rule=rule
        )
        if case and case.failed:
            bench.print(f"# {name}: {case.check}")
        before, left = left, seconds_left(bench.job, budget)
        expected = before - left
    # the key of a case contains all entries of the key of its phase
    cases = [case for case in bench.report.cases if key.items() <= case.key.items()]
    return bench.job.broadcast(phase.judge(cases)._replace(left_out=left_out)), parts


def measure_twice(bench: Benchmark, phase: Phase) -> Judgement:
    """Measure a phase, and measure it again if anything looks slow or unsteady. Only what both
    measurements find is returned."""
    bench.print(f"\n{phase.name}")
    first, parts = measure(bench, phase, 1, phase.parts)
    suspects = [component for component, _ in first.slow] + first.unsteady
    if not suspects:
        return first
    bench.print(f"# {phase.name} again, for {cli.cut(names_of_suspects(suspects))}")
    second, _ = measure(bench, phase, 2, parts)
    return without_unsure(in_both(first, second), phase.crowd)


def names_of_suspects(components: Sequence[Component]) -> list[str]:
    """The name of each suspect once, also of those between which it is impossible to decide."""
    each = [
        component._replace(suspects=(members,))
        for component in components
        for members in component.suspects
    ]
    return list(dict.fromkeys(component.name() for component in each))


def without_unsure(found: Judgement, crowd: Crowd | None) -> Judgement:
    """Set aside the slow components that may be slow because ranks share cores."""
    slow = beyond(found.slow, crowd)
    unsure = [component for component, _ in found.slow.keys() - slow.keys()]
    return found._replace(slow=slow, unsure=sorted(set(unsure)))


def in_both(first: Judgement, second: Judgement) -> Judgement:
    """The findings that both measurements share, with the smaller factor."""
    unsteady = [component for component in first.unsteady if component in second.unsteady]
    return Judgement(slow_in_both(first.slow, second.slow), unsteady, first.left_out)


def stay_near(device: torch.device) -> None:
    """Bind this process to those of its cores that are next to its GPU, if there are any. Otherwise
    its pinned memory may be on another socket."""
    if device.type != "cuda":
        return
    p: Any = torch.cuda.get_device_properties(device.index)
    pci = f"{p.pci_domain_id:04x}:{p.pci_bus_id:02x}:{p.pci_device_id:02x}.0"
    mask = SYS / "bus/pci/devices" / pci / "local_cpus"
    near = int(mask.read_text().replace(",", ""), 16) if mask.exists() else 0  # a bit per core
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core for core in allowed if near >> core & 1} or allowed)


def give_verdict(bench: Benchmark, cluster: Cluster, found: Judgement, left_out: list[str]) -> None:
    """Print the verdict, and write --exclude-file. found: the findings of all phases."""
    args, environment, cases = bench.args, bench.report.environment, bench.report.cases
    others, seconds = bench.disturbed(), args.budget - seconds_left(bench.job, args.budget)
    if bench.job.rank != 0:
        return
    nodes = count_of(environment["num_nodes"], "node")
    ranks = count_of(environment["world_size"], "rank")
    of_nodes, of_ranks = node_names(environment), rank_names(environment)
    names = {"node": of_nodes, "rank": of_ranks, "link": of_ranks}
    ran = f"{nodes}, {ranks}, {seconds:.0f} s of {args.budget:g}"
    ran = "; ".join([ran, *not_judged(cluster, names)])
    lacks, differs = unfit(environment, args.gpus), differences_of(environment)
    if args.fail_on_difference:
        for node, what in differs.items():
            lacks[node] = "; ".join(filter(None, [lacks.get(node), what]))
        differs = {}
    differ = "; ".join(f"{of_nodes[node]} {what}" for node, what in [*differs.items()][:3])
    differ += f" and {len(differs) - 3} more nodes" if len(differs) > 3 else ""
    wrong = wrong_results(lacks, cases, names)
    if problem := network.unexpected(bench, args.expect_network):
        wrong.append(("network", problem))
    changed = [component.name(names) for component in found.unsteady]
    is_load_unknown = not (bench.records_load or bench.is_interleaved)
    is_busy = bool(others) or is_load_unknown
    unsure = ""
    if found.unsure and cluster.crowd:
        which = cli.cut([component.name(names) for component in found.unsure], 3)
        unsure = f"it cannot be told whether {which} is slow: {cluster.crowd.text}"
    doubts = doubts_of(changed, others, left_out, without_peer(cluster), is_load_unknown, unsure)
    status, lines = conclude(
        *(found.slow, doubts, is_busy, wrong, args.fail_on, names, ran),
        *(bench.records_load, differ),
    )
    if status:
        bench.fail(lines[-1], status)
    if args.exclude_file and status != exits.NO_VERDICT:
        host_of_rank = [row["host"] for row in environment["ranks"]]
        findings = certain(found.slow, args.fail_on, is_busy)
        hosts = hosts_at_fault(findings, [*lacks], cases, cluster.teams, host_of_rank)
        try:  # in the form of Slurm's lists of hosts; empty if all are fit
            Path(args.exclude_file).write_text(",".join(hosts) + "\n" * bool(hosts))
        except OSError as error:
            bench.fail(f"--exclude-file {args.exclude_file}: {error.strerror}")
    started = [case.metrics for case in cases if "group_s" in case.metrics]
    if started:
        by_rank = start_up.seconds_by_name(started)
        lines.insert(0, start_up.sentence(by_rank, range(bench.job.world_size), environment))
    bench.conclude(lines)


def main() -> int:
    args = parse_args()
    check_flags(args)
    # a verdict is about the current state: an earlier report is moved to PATH.bak, not resumed
    args.resume = False
    with Benchmark("node_check", args, observers=[network.Network]) as bench:
        stay_near(bench.job.device)  # otherwise copies to the host depend on the socket
        cluster = cluster_of(bench)
        phases = plan(bench, cluster)
        planned: dict[str, list[Planned]] = {}
        for phase in phases:
            key = key_of(bench, phase, attempt=1)
            planned[phase.name] = [
                Planned(part.name, len(part.ranks), key | part.key) for part in phase.parts
            ]
        bench.announce(planned)
        found = Judgement({}, [], unsure=[])
        left_out: list[str] = []
        for phase in phases:
            if phase.parts:
                judgement = measure_twice(bench, phase)
                found.slow.update(judgement.slow)
                found.unsteady.extend(judgement.unsteady)
                found = found._replace(unsure=[*found.unsure, *judgement.unsure])
                left_out += [judgement.left_out] if judgement.left_out else []
        if not bench.job.broadcast(len(bench.report.cases)):
            bench.refuse(f"--budget {args.budget:g} ends before the first case; e.g. --budget 60")
        give_verdict(bench, cluster, found, left_out)
    return bench.status


if __name__ == "__main__":
    sys.exit(record(main)())
