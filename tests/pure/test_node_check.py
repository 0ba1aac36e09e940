"""node_check.py: its verdicts, and how often they are wrong."""

import os
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from benchmarks import node_check
from benchmarks.node_check import Judgement, conclude, doubts_of, judge
from benchmarks.workloads.links import Link, drift_of, widest
from benchmarks.workloads.outliers import Component, Crowd, Slowness, find_slow, sentences
from common.timing import StopRule
from harness.cpu_load import Others
from harness.environment import UNCORRECTED
from harness.report import Case
from tests import simulate_node_check as simulation

MARGINS = {"rank": 0.1, "node": 1.0, "rail": 1.0, "link": 1.0}
RANKS = ["rank 0 on a", "rank 1 on a", "rank 2 on b"]
NAMES = {"node": ["a", "b"], "rank": RANKS, "link": RANKS}


def cluster(nodes: list[list[int]], kinds: list[str]) -> node_check.Cluster:
    """A cluster of CPUs without limits. nodes: the ranks of each node."""
    node_of = {rank: node for node, ranks in enumerate(nodes) for rank in ranks}
    teams = {"rank": [[rank] for rank in range(len(kinds))], "node": nodes, "rail": [[0]]}
    node_of_rank = [node_of[rank] for rank in range(len(kinds))]
    return node_check.Cluster(True, node_of_rank, teams, kinds, MARGINS, {}, 5)


def ranks_with(step: str, *seconds: float) -> list[Case]:
    """A case for each rank, which takes these seconds for 10 bytes."""
    cases = []
    for rank, s in enumerate(seconds):
        metrics = {f"{step}_s": s, f"{step}_sustained_s": s, f"{step}_bytes_per_s": 10 / s}
        cases.append(Case(key={"rank": rank}, ranks=[rank], metrics=metrics))
    return cases


def test_slow_ranks_and_nodes() -> None:
    """Ranks are compared with others on the same kind of device, and with limits of the user. If a
    node takes three times as long, its ranks are not named separately."""
    cases = ranks_with("copy", 1, 1, 1, 2, 2, 5)
    of_kinds = cluster([list(range(6))], ["new"] * 3 + ["old"] * 3)
    slow, sustained = sentences(judge(cases, of_kinds))
    assert slow.startswith("slow rank 5: copy 2.50x the median time")
    assert sustained.startswith("slow rank 5: copy sustained 2.50x")
    limited = of_kinds._replace(limits={"copy": 4.0}, margins=MARGINS | {"rank": 9.0})
    assert sentences(judge(cases, limited)) == ["slow rank 5: copy rate 2e-09 GB/s, below 4e-09"]
    cases = ranks_with("all_reduce_inside", 1, 1, 1.1, 1.1, 3.3, 3.3)
    slow, sustained = sentences(judge(cases, cluster([[0, 1], [2, 3], [4, 5]], ["k"] * 6)))
    assert slow.startswith("slow node 2: all reduce inside 3.00x the median time")


def test_a_limit_applies_to_one_matrix_product() -> None:
    """Each rank has 55 TFLOP/s in fp32. With --min-tflops 600, a rank with 700 in bf16 is fit, and
    one with 550 is not. On the CPU the limit applies to fp32."""
    cases = ranks_with("matmul_fp32", 1, 1)
    for case, rate in zip(cases, (700e12, 550e12), strict=True):
        case.metrics |= {"matmul_bf16_s": 1.0, "matmul_bf16_sustained_s": 1.0}
        case.metrics |= {"matmul_bf16_flop_per_s": rate, "matmul_fp32_flop_per_s": 55e12}
    two = cluster([[0, 1]], ["k"] * 2)
    limits = node_check.limits_of(600, 350, "cuda")
    assert limits == {"matmul_bf16": 600e12, "all_reduce_inside": 350e9}
    below = ["slow rank 1: matmul bf16 rate 550 TFLOP/s, below 600"]
    assert sentences(judge(cases, two._replace(limits=limits))) == below
    on_cpu = node_check.limits_of(600, 0, "cpu")
    assert on_cpu == {"matmul_fp32": 600e12, "all_reduce_inside": 0}
    assert len(judge(cases, two._replace(limits=on_cpu))) == 2


def test_the_rounds_of_many_nodes_fit_into_the_budget() -> None:
    """22 rounds take 0.4 s each of 60 s, 70 take 0.43 s of 120 s: at most a quarter in all."""
    members = [list(range(8 * node, 8 * node + 8)) for node in range(64)]
    assert [len(node_check.rounds_by_node(members[:nodes])) for nodes in (8, 16, 64)] == [
        14,
        22,
        70,
    ]
    fraction = node_check.fraction_per_round
    assert [fraction(22) * 60, fraction(70) * 120] == pytest.approx([0.4, 0.4286], rel=1e-3)
    assert fraction(134) * 134 == pytest.approx(0.25)
    assert fraction(0) == fraction(1) == 1 / 150


def test_blocks_of_a_measurement() -> None:
    """Of blocks of 3.5 and 2.5 s, the best counts on the CPU and the median on CUDA. Of the first
    and the last three blocks, the smallest are 2 and 3, the largest 4 and 5. The middle one of an
    odd number counts: in the first half, 2, 4, 9 and 3, 3, the difference is 2."""
    assert node_check.sustained([3.5, 2.5], on_cuda=False) == 2.5
    assert node_check.sustained([3.5, 2.5], on_cuda=True) == 3.0
    blocks = [2.0, 4.0, 3.0, 3.0, 5.0, 4.0]
    assert drift_of(blocks, min) == pytest.approx(0.5)
    assert drift_of(blocks, max) == pytest.approx(0.25)
    assert drift_of([2.0, 4.0, 9.0, 3.0, 3.0], max) == pytest.approx(2.0)
    assert drift_of([1.0], max) is None
    assert (widest([0.1, 0.3]), widest([0.1, None]), widest([])) == (0.3, None, None)
    assert [node_check.drifted(x, 0.4) for x in (0.39, 0.41, None)] == [False, True, True]


def test_an_all_reduce_that_its_links_do_not_explain() -> None:
    """Two rails of two nodes. The slowest link of rail 0 has 2 GB/s in each direction, and its
    all_reduce reaches 0.1 GB/s, 20 times less. That of rail 1 reaches 0.3 GB/s, 7 times less."""
    rows = ranks_with("all_reduce_between", 1, 1, 1, 1)
    for row, rate in zip(rows, (1e8, 3e8, 1e8, 3e8), strict=True):
        row.metrics["all_reduce_between_bytes_per_s"] = rate
    measured = [Link(a, b, 50, None, None, both) for a, b, both in [(0, 2, 4), (1, 3, 4.2)]]
    measured.append(Link(0, 1, 50, None, None, 0.01))  # within a node, so not part of a rail
    of_rails = cluster([[0, 1], [2, 3]], ["k"] * 4)
    of_rails.teams["rail"] = [[0, 2], [1, 3]]
    [(found, slowness)] = node_check.below_links(rows, measured, of_rails).items()
    assert (found[0].name(), found[1]) == ("rail 0", "all reduce between")
    assert slowness.factor == pytest.approx(20)
    assert slowness.description == "0.100 GB/s, but its slowest link sustains 2.00 GB/s"
    assert node_check.below_links(rows, measured[2:], of_rails) == {}  # its links were not measured
    assert node_check.below_links(rows[:2], measured, of_rails._replace(cpu=False)) != {}


def test_nodes_with_gpus_in_use_are_not_fit() -> None:
    """Other processes use 20 GiB on the second node, which also lacks a GPU."""
    environment: dict[str, Any] = {"gpu_counts": [2, 1], "gpus": []}
    for node in range(2):
        gpu = {"index": "0", "mig.mode.current": "Disabled", UNCORRECTED: "0"}
        environment["gpus"].append([gpu | {"memory.used": f"{20480 * node} MiB"}])
    held = "other processes were already using 20.0 GiB of GPU 0"
    assert node_check.unfit(environment, None) == {1: f"it has 1 of 2 GPUs; {held}"}
    assert node_check.unfit(environment, 1) == {1: held}


def test_odd_results() -> None:
    peers = "3 ranks with the same device and number of threads"
    one = {1: f"only 1 of {peers} computed these results (b)"}
    assert node_check.odd_results(["a", "b", "a"], ["k"] * 3) == one
    assert node_check.odd_results(["a", "b"], ["k", "l"]) == {}  # kinds may round differently
    assert [*node_check.odd_results(["a", "b"], ["k", "k"])] == [
        0,
        1,
    ]  # with two, either may be wrong
    told = "its results are not finite"
    assert node_check.odd_results(["not finite"] * 2, ["k"] * 2) == {0: told, 1: told}


SLOW = find_slow({(0,): 1.0, (1,): 2.0, (2,): 1.0}, {}, "rank", "copy")
FAR = find_slow({(0,): 1.0, (1,): 6.0, (2,): 1.0}, {}, "rank", "copy")
BELOW = {(Component("rank", ((0,),)), "copy"): Slowness(None, "2, below 4")}
BAD = Case(key={"probe": "alone", "rank": 2}, ranks=[2], check="failed: why")
# the host follows from the metrics: a number in the text of an error may not be a rank
LINKS = Case(key={"probe": "links"}, ranks=[0], metrics={"failed_rank": 2}, check="failed: rank 1")
WRONG = node_check.wrong_results({1: "lacks"}, [BAD, BAD, LINKS], NAMES)
BUSY = Others(1.6, 2)
USED = "other processes used 1.6 of 2 cores"
CHANGED = ["rank 0 on a", "rank 0 on a", "rank 2 on b"]
CHANGED_TWICE = "rank 0 on a, rank 2 on b changed during both measurements"
NONE = "no verdict on slowness"
OUT = ["2 of 4 rounds of links"]
NO_TIME = "the budget was too short for 2 of 4 rounds of links; raise --budget"


UNKNOWN = "CPU use by other processes was not recorded"
ONE_LINK = "there is one link between the nodes"
DIFFERS = {"differs": "c differs: threads"}
NOT_KNOWN = {"is_load_known": False}  # ab.py records it while two commands are interleaved


@pytest.mark.parametrize(
    ("slow", "doubts", "options", "status", "last"),
    [
        (SLOW, {}, {"wrong": WRONG}, 1, "not fit: b, rank 2 on b, links, rank 1 on a"),
        (SLOW, {"others": BUSY}, {"wrong": WRONG}, 1, "not fit: b, rank 2 on b, links"),
        (SLOW, {}, {"fail_on": "wrong"}, 0, "fit, though slow: 41 s"),
        (SLOW, {"others": BUSY}, {}, 4, f"no verdict: {USED}"),
        # 6 times as slow as its peers, which load does not explain
        (FAR, {"others": BUSY}, {}, 1, "not fit: rank 1 on a"),
        (BELOW, {"others": BUSY}, {}, 4, f"no verdict: {USED}"),
        (BELOW, {}, {}, 1, "not fit: rank 0 on a"),
        # `fit` requires evidence as well
        ({}, {}, {}, 0, "fit: 41 s"),
        ({}, {"others": BUSY}, {}, 4, f"no verdict: {USED}"),
        ({}, {"unsteady": CHANGED}, {}, 4, f"no verdict: the speed of {CHANGED_TWICE}"),
        ({}, {"left_out": OUT}, {}, 4, f"no verdict: {NO_TIME}"),
        (SLOW, {"left_out": OUT}, {}, 1, "not fit: rank 1 on a"),
        (
            *({}, {"others": BUSY, "left_out": OUT}, {"fail_on": "wrong"}, 0),
            f"nothing is wrong; {NONE}: {USED}; {NO_TIME}",
        ),
        (
            {},
            {"no_peer": ONE_LINK},
            {},
            4,
            f"no verdict: {ONE_LINK}, because there is nothing to compare it with",
        ),
        ({}, {"unsure": "it cannot be told"}, {}, 4, "no verdict: it cannot be told"),
        ({}, {"is_load_unknown": True}, NOT_KNOWN, 4, f"no verdict: {UNKNOWN}"),
        ({}, {}, NOT_KNOWN, 0, f"fit: 41 s; {UNKNOWN}"),
        (SLOW, {}, NOT_KNOWN, 1, f"not fit: rank 1 on a; {UNKNOWN}"),
        ({}, {}, DIFFERS, 0, "fit, but c differs: threads; 41 s"),
        (SLOW, {}, DIFFERS, 1, "not fit: rank 1 on a; c differs: threads"),
        ({}, {"unsure": "why"}, DIFFERS, 4, "no verdict: why; c differs: threads"),
    ],
)
def test_the_verdict(slow: Any, doubts: Any, options: Any, status: int, last: str) -> None:
    why = doubts_of(**{"unsteady": [], "others": None, "left_out": []} | doubts)
    is_busy = "others" in doubts or "is_load_unknown" in doubts
    given = {"wrong": [], "fail_on": "slow", "names": NAMES, "ran": "41 s"} | options
    got, lines = conclude(slow, why, is_busy, **given)
    assert (got, lines[-1]) == (status, last)
    assert len(lines) == len(slow) + len(given["wrong"]) + 1
    if given["wrong"]:
        assert lines[-3:-1] == ["wrong rank 2 on b: why", "wrong links: rank 1 on b"]


ENVIRONMENT: dict[str, Any] = {
    "ranks": [
        {"host": host, "local_rank": local, "threads": 1, "cores": 2, "device": "cpu"}
        for host in "abc"
        for local in range(2)
    ],
    "hosts": ["a", "b", "c"],
    "kernels": ["6.1"] * 3,
    "gpus": [[], [], []],
    "variables": {"NCCL_ALGO": "Ring"},
    "other_variables": [],
}


def test_ranks_with_other_threads_are_compared_with_all() -> None:
    """Rank 1 has two threads and takes 12 times as long: it is named, and so is the difference."""
    ranks = [row | {"threads": 1 + (n == 1)} for n, row in enumerate(ENVIRONMENT["ranks"])]
    environment = ENVIRONMENT | {"ranks": ranks}
    bench = Mock(report=Mock(environment=environment))
    bench.args = Mock(margin=None, min_tflops=0, min_busbw=0, sigmas=5)
    bench.job = Mock(device=torch.device("cpu"), broadcast=lambda value: value)
    bench.job.gather = lambda value: [value] * 6
    of_all = node_check.cluster_of(bench)
    cases = ranks_with("matmul_fp32", 1, 12, 1, 1, 1, 1)
    for case in cases:
        case.metrics["matmul_fp32_flop_per_s"] = 1e9
    found = judge(cases, of_all)
    assert [component.name() for component, _ in found] == ["rank 1"] * 2
    assert node_check.differences_of(environment) == {0: "differs on rank 1: threads"}
    assert node_check.without_peer(of_all) == ""


def test_differences_between_nodes() -> None:
    """Node c has another NCCL_ALGO and 2 threads. Of two nodes, either may be the wrong one."""
    ranks = [row | {"threads": 1 + (row["host"] == "c")} for row in ENVIRONMENT["ranks"]]
    other = [{"ranks": [4, 5], "variables": {"NCCL_ALGO": None, "FI_PROVIDER": "efa"}}]
    environment = ENVIRONMENT | {"ranks": ranks, "other_variables": other}
    found = node_check.differences_of(environment)
    assert found == {2: "differs: FI_PROVIDER, NCCL_ALGO, threads"}
    assert node_check.differences_of(ENVIRONMENT) == {}
    two = environment | {"ranks": ranks[2:], "hosts": ["b", "c"], "kernels": ["6.1", "6.2"]}
    two["other_variables"] = []
    both = "differs: kernel, threads"
    assert node_check.differences_of(two) == {0: both, 1: both}


def test_fit_needs_a_peer_or_a_limit() -> None:
    """A single rank, a single rank on a kind of device and a single link between nodes cannot be
    compared with anything. Without --min-busbw, neither can the all_reduce of a single node."""
    odd_one = cluster([[0, 1, 2]], ["k", "k", "m"])
    alone = "rank 2, the only one on m, cannot be judged without --min-tflops"
    assert node_check.without_peer(odd_one) == alone
    busbw = odd_one._replace(limits={"matmul_fp32": 0, "all_reduce_inside": 1e9})
    assert node_check.without_peer(busbw) == alone
    names = {"node": ["a"]}
    remark = "all_reduce within a is not judged: no peer, no --min-busbw"
    assert node_check.not_judged(odd_one, names) == [remark]
    assert node_check.not_judged(busbw, names) == []
    assert node_check.not_judged(cluster([[0, 1], [2, 3]], ["k"] * 4), NAMES) == []
    single = cluster([[0]], ["k"])
    assert node_check.without_peer(single).startswith("a single rank cannot be judged")
    assert node_check.without_peer(single._replace(limits={"matmul_fp32": 1e12})) == ""
    pair = cluster([[0], [1]], ["k"] * 2)
    pair.teams["rail"] = [[0, 1]]
    assert node_check.without_peer(pair) == ONE_LINK
    four = cluster([[0, 1], [2, 3]], ["k"] * 4)
    four.teams["rail"] = [[0, 2], [1, 3]]
    assert node_check.without_peer(four) == ""


def test_both_measurements_count() -> None:
    """The smaller of two factors counts. Unsteady are only ranks that were so twice."""
    who = (Component("rank", ((1,),)), "copy")
    other = (Component("rank", ((2,),)), "copy")
    first = Judgement({who: Slowness(7.0, "7x"), other: Slowness(3.0, "3x")}, [other[0]], "x")
    second = Judgement({who: Slowness(4.0, "4x")}, [who[0], other[0]])
    assert node_check.in_both(first, second) == Judgement(
        {who: Slowness(4.0, "4x")}, [other[0]], "x"
    )
    assert node_check.in_both(first, Judgement({}, [])) == Judgement({}, [], "x")


def test_what_cannot_be_told_where_ranks_share_cores() -> None:
    """One of 6 links takes 12 times as long, another 9 times. 4 ranks on 2 cores explain 10."""
    costs: dict[tuple[int, ...], float] = {(0, n): 1.0 for n in range(3, 7)}
    costs |= {(0, 1): 12.0, (0, 2): 9.0}
    both = Judgement(find_slow(costs, {}, "link", "x"), [])
    found = node_check.without_unsure(both, Crowd("vm", 4, 2))
    assert [component.name() for component, _ in found.slow] == ["link 0 -> 1"]
    assert [component.name() for component in found.unsure] == ["link 0 -> 2"]


def test_ranks_that_are_slow_once_are_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 is slow twice, rank 2 the first time and rank 3 the second time. Parts that fitted
    into the budget the first time are measured again in any case. 100, 30 and 20 s are left."""
    bench = Mock(report=Mock(cases=[], environment={"num_nodes": 1}), rule=StopRule())
    bench.args = Mock(budget=100.0, max_seconds=1.0)
    bench.measure = lambda key, *given, **more: bench.report.cases.append(Case(key=key, ranks=[0]))

    def suspects(measured: list[Case]) -> Judgement:
        ranks = {1: (1, 2), 2: (1, 3)}[measured[-1].key["attempt"]]
        who = [(Component("rank", ((rank,),)), "copy") for rank in ranks]
        return Judgement(dict.fromkeys(who, Slowness(2.0, "2x")), [])

    bench.job.broadcast = lambda value: value
    left = iter([100.0, 30.0, 20.0, 1.0])
    monkeypatch.setattr(node_check, "seconds_left", lambda job, budget: next(left))
    parts = [node_check.Part("a case", {}, [0], Mock(), Mock()) for _ in range(2)]
    found = node_check.measure_twice(bench, node_check.Phase("alone", 0.1, parts, suspects))
    assert [component.name() for component, _ in found.slow] == ["rank 1"]
    assert found.left_out == "1 of 2 rounds of alone"
    assert [case.key["attempt"] for case in bench.report.cases] == [1, 2]


def test_names_and_ranges() -> None:
    either = Component("rank", ((1,), (0,)))
    rest = [Component("rank", ((0,),)), Component("link", ((0, 1),))]
    assert node_check.names_of_suspects([either, *rest]) == ["rank 1", "rank 0", "link 0 -> 1"]
    rows = [Link(a, 2, 80, None, None, rate) for a, rate in ((1, 0.2), (0, 0.006), (1, 0.21))]
    line = "between nodes: 0.00600 to 0.210 GB/s, median 0.200; slowest rank 0 on a -> rank 2 on b"
    assert node_check.range_of("between nodes", rows, RANKS) == line


def test_links_of_nodes() -> None:
    """Pairs within nodes, then pairs of nodes on each rail; no rank is twice in a round."""
    inside, *between = node_check.rounds_by_node([[0, 1], [2, 3], [4, 5]])
    assert inside == [(0, 1), (2, 3), (4, 5)]
    assert between == [[(2, 4), (3, 5)], [(0, 4), (1, 5)], [(0, 2), (1, 3)]]


def test_a_process_stays_near_its_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node has 2 sockets of 4 cores with 2 threads each, numbered 0-7 and 8-15."""
    device = tmp_path / "bus/pci/devices/0000:02:00.0"
    device.mkdir(parents=True)
    (device / "local_cpus").write_text("00000000,0000f0f0\n")
    place = Mock(pci_domain_id=0, pci_bus_id=2, pci_device_id=0)
    monkeypatch.setattr(node_check, "SYS", tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: place)
    for allowed, cores in (({0, 1, 6, 15}, {6, 15}), ({0, 1}, {0, 1})):
        bind = Mock()
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, allowed=allowed: allowed)
        monkeypatch.setattr(os, "sched_setaffinity", bind)
        node_check.stay_near(torch.device("cuda", 2))
        bind.assert_called_once_with(0, cores)


CONDITIONS = ["CPU, quiet", "CPU, 30%", "GPU", "links, CPU", "links, GPU", "crowded"]


@pytest.mark.parametrize("name", CONDITIONS)
def test_healthy_ranks_are_fit_and_a_slow_one_is_named(name: str) -> None:
    """The limits are wide. docs/evidence.md has the rates of more runs."""
    condition = simulation.CONDITIONS[name]
    healthy = simulation.rates(condition, 1.0, 15)
    slow = simulation.rates(condition, simulation.slower(name), 10)
    if condition.crowd:  # at most without a verdict
        assert healthy["not fit"] == 0
        assert slow["named alone"] >= 0.9
    elif condition.others > 0.1:
        assert healthy["no verdict"] == slow["no verdict"] == 1.0
    else:
        assert healthy["not fit"] + healthy["no verdict"] <= 0.07
        assert slow["named alone"] >= 0.9


def test_hosts_to_exclude() -> None:
    """4 nodes with 2 ranks each. Excluded are both of two suspects, both ends of a link, all nodes
    of a rail, nodes that lack something, and the rank that received wrong data with its peer."""
    hosts = ["d", "d", "c", "c", "b", "b", "a", "a"]
    teams = {"rank": [[rank] for rank in range(8)], "node": [[0, 1], [2, 3], [4, 5], [6, 7]]}
    teams["rail"] = [[0, 2, 4, 6], [1, 3, 5, 7]]

    def excluded(level: str = "", *suspects: Any, lacks: Any = (), case: Any = None) -> list[str]:
        findings = [(Component(level, suspects), "copy")] if level else []
        return node_check.hosts_at_fault(findings, lacks, [case] if case else [], teams, hosts)

    assert excluded() == []
    assert excluded("node", (1,)) == ["c"]
    assert excluded("node", (1,), (3,)) == ["a", "c"]
    assert excluded("rank", (3,)) == ["c"]
    assert excluded("link", (0, 7)) == ["a", "d"]
    assert excluded("link", (0, 1)) == ["d"]
    assert excluded("rail", (0,)) == ["a", "b", "c", "d"]
    assert excluded(lacks=[2]) == ["b"]
    found = {"failed_rank": 2, "links": [[0, 1, 9.0], [2, 4, 9.0]]}
    wrong = Case(key={}, ranks=[0, 1, 2, 4], metrics=found, check="failed: x")
    assert excluded(case=wrong) == ["b", "c"]
    assert excluded(case=Case(key={}, ranks=[6], check="failed: x")) == ["a"]
    assert excluded(case=Case(key={}, ranks=[6], check="passed")) == []
