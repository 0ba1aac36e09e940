"""The judgement of node_check.py, worked out by hand, and how often it errs."""

import itertools
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from benchmarks import node_check
from benchmarks.node_check import conclude, judge, odd_results, rounds_by_node, wrong_results
from common.environment import Others
from common.report import Case, Report
from common.stats import Times
from common.timing import StopRule
from common.workloads.outliers import Costs, Who, accuse, sentences
from tests import simulate_node_check as simulation

MARGINS = {"rank": 0.1, "node": 1.0, "rail": 1.0, "link": 1.0}
HOSTS = {"node": ["a", "b"], "rank": ["a", "a", "b"], "link": ["a", "a", "b"]}
RAN = "2 nodes, 3 ranks, 41 s of 60"
ONE_SLOW: Costs = {(0,): 1.0, (1,): 2.0, (2,): 1.0}


def names(found: Any) -> list[str]:
    return [who.name() for who, _ in found]


def cluster(nodes: list[list[int]], kinds: list[str]) -> node_check.Cluster:
    """Nodes of CPUs, without limits. nodes: the ranks of each."""
    node_of = {rank: node for node, ranks in enumerate(nodes) for rank in ranks}
    teams = {"rank": [[rank] for rank in range(len(kinds))], "node": nodes, "rail": [[0]]}
    node_of_rank = [node_of[rank] for rank in range(len(kinds))]
    return node_check.Cluster(True, node_of_rank, teams, kinds, MARGINS, {}, 5)


def ranks_with(step: str, *seconds: float) -> list[Case]:
    """A case for each rank; 10 bytes in so many seconds."""
    cases = []
    for rank, s in enumerate(seconds):
        metrics = {f"{step}_s": s, f"{step}_sustained_s": s, f"{step}_bytes_per_s": 10 / s}
        cases.append(Case(key={"rank": rank}, ranks=[rank], metrics=metrics))
    return cases


def test_kinds_and_limits() -> None:
    """A slower kind of device is none of the slow; a limit is a user's."""
    cases = ranks_with("copy", 1, 1, 1, 2, 2, 5)
    of_kinds = cluster([list(range(6))], ["new"] * 3 + ["old"] * 3)
    found = judge(cases, of_kinds)
    assert [(who.name(), what) for who, what in found] == [
        ("rank 5", "copy"),
        ("rank 5", "copy sustained"),
    ]
    assert sentences(found)[0].startswith("slow rank 5: copy 2.50x the median's time")
    limited = of_kinds._replace(limits={"copy": 4.0}, margins=MARGINS | {"rank": 9.0})
    assert sentences(judge(cases, limited)) == ["slow rank 5: copy bytes per s 2, under 4"]


def test_nodes_are_compared_by_their_all_reduce() -> None:
    """Three nodes of two ranks; the third takes three times as long, its ranks are not named."""
    cases = ranks_with("all_reduce_inside", 1, 1, 1.1, 1.1, 3.3, 3.3)
    found = judge(cases, cluster([[0, 1], [2, 3], [4, 5]], ["k"] * 6))
    assert set(names(found)) == {"node 2"}
    assert sentences(found)[0].startswith("slow node 2: all reduce inside 3.00x the median's time")


def test_each_rank_becomes_a_case() -> None:
    """Two turns of two rounds of two samples. Rank 1: blocks of 3 and 2 s, the fastest 1 s."""
    report = Report("node_check", {"ranks": [{"host": "a"}, {"host": "b"}]})
    rows: Any = {
        "copy, turn 0": [[2, 2, 2, 2], [0, 0, 0, 0]],
        "copy, turn 1": [[0] * 4, [5, 1, 2, 2]],
    }
    case = Case(
        key={"device": "cpu"}, ranks=[0, 1], samples_s=rows, rounds=[2, 2], name="each rank alone"
    )
    facts = [{"did": {"copy": (f"copy, turn {r}", 10.0)}, "bits": "x"} for r in (0, 1)]
    times = Times(rows, [2, 2])
    node_check.split(report, cluster([[0], [1]], ["k", "k"]), case, times, facts)
    first, second = report.cases
    assert second.key == {"device": "cpu", "rank": 1, "host": "b"}
    assert second.samples_s == {"copy": [[5, 1, 2, 2]]}
    m = second.metrics
    assert (m["copy_s"], m["copy_sustained_s"], m["copy_bytes_per_s"]) == (1, 2, 5)
    assert m["spread"] is None  # four samples have no interval
    assert (second.name, second.table) == ("rank 1", "each rank alone")
    assert (first.check, second.check) == ("passed", "passed")
    assert case.samples_s == {}


def test_the_slowest_rank_of_a_node_counts() -> None:
    """Of each iteration: 3, 4, 3, 2; on CUDA the median of the blocks' 3.5 and 2.5."""
    report = Report("node_check", {"ranks": [{"host": "a"}] * 2})
    step, rows = "all_reduce_inside", [[1.0, 4.0, 1.0, 2.0], [3.0, 1.0, 3.0, 1.0]]
    case = Case(key={"device": "cuda"}, ranks=[0, 1], samples_s={step: rows}, rounds=[2, 2])
    facts = [{"did": {step: (step, 6.0)}, "wrong": wrong} for wrong in (None, "why")]
    times = Times({step: rows}, [2, 2])
    node_check.split(report, cluster([[0, 1]], ["k", "k"]), case, times, facts)
    assert [case.metrics[f"{step}_sustained_s"] for case in report.cases] == [3, 3]
    assert [case.metrics[f"{step}_s"] for case in report.cases] == [2, 2]
    assert [case.check for case in report.cases] == ["passed", "failed: why"]


def test_odd_results() -> None:
    assert odd_results(["a"] * 3, ["k"] * 3) == {}
    one = {1: "its results (b) are those of 1 of 3 of its kind"}
    assert odd_results(["a", "b", "a"], ["k"] * 3) == one
    assert odd_results(["a", "b"], ["k", "l"]) == {}  # two kinds may round differently
    assert [*odd_results(["a", "b"], ["k", "k"])] == [0, 1]  # of two nobody knows which
    assert [*odd_results(["not finite"] * 2, ["k", "k"])] == [0, 1]


def test_the_last_lines() -> None:
    slow = accuse(ONE_SLOW, {}, "rank", "copy")
    bad = Case(key={"probe": "each rank alone", "rank": 2}, ranks=[2], check="failed: why")
    wrong = wrong_results({1: "lacks"}, [bad, bad], HOSTS)
    status, lines = conclude(slow, None, wrong, "slow", HOSTS, RAN)
    problem = "not fit: node 1 on b, rank 2 on b, rank 1 on a"
    assert status == 1
    assert lines[-3:] == ["wrong node 1 on b: lacks", "wrong rank 2 on b: why", problem]
    assert lines[0].startswith("slow rank 1 on a: copy 2.00x")
    though_slow = [*sentences(slow, HOSTS), f"fit, though slow: {RAN}"]
    assert conclude(slow, None, [], "wrong", HOSTS, RAN) == (0, though_slow)
    assert conclude(slow, Others(1.6, 2), [], "wrong", HOSTS, RAN) == (0, though_slow)
    assert conclude({}, Others(1.6, 2), [], "slow", HOSTS, RAN) == (0, [f"fit: {RAN}"])
    status, lines = conclude(slow, Others(1.6, 2), [], "slow", HOSTS, RAN)
    assert (status, lines[-1]) == (4, "cannot be told: other programs took 1.6 of 2 cores")
    status, lines = conclude(slow, Others(1.6, 2), wrong, "slow", HOSTS, RAN)
    assert (status, lines[-1]) == (1, "not fit: node 1 on b, rank 2 on b")
    assert Who("link", ((2, 0),)).name(HOSTS) == "link 2 on b -> 0 on a"
    assert Who("rail", ((1,),)).name(HOSTS) == "rail 1"


def test_who_is_slow_in_one_of_two_measurements_is_not_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 1 is slow twice, rank 2 the first time and rank 3 the second. Nobody is measured twice
    where nobody is slow. What is measured again is what fitted the first time, whatever is left of
    the budget: 100, 30 and 20 s."""
    slow: dict[int, tuple[int, ...]] = {1: (1, 2), 2: (1, 3)}  # by attempt
    cases: list[Case] = []
    report = Mock(cases=cases, environment={"num_nodes": 1})
    bench: Any = Mock(report=report, args=Mock(budget=100.0, max_seconds=1.0))
    bench.rule = StopRule()

    def suspects(measured: list[Case]) -> node_check.Findings:
        ranks = slow.get(measured[-1].key["attempt"], ())
        return {(Who("rank", ((rank,),)), "copy"): "2x" for rank in ranks}

    def measure(key: node_check.Key, *given: Any, **more: Any) -> None:
        cases.append(Case(key=key, ranks=[0]))

    bench.measure = measure
    monkeypatch.setattr(node_check, "share", lambda value: value)
    left = itertools.chain([100.0, 30.0, 20.0, 1.0], itertools.repeat(100.0))
    monkeypatch.setattr(node_check, "seconds_left", lambda budget: next(left))
    parts = [node_check.Part("a case", {}, [0], Mock(), Mock()) for _ in range(2)]
    phase = node_check.Phase("each rank alone", 0.1, parts, suspects)
    assert names(node_check.measure_twice(bench, phase)) == ["rank 1"]
    assert [case.key["attempt"] for case in cases] == [1, 2]
    slow.clear()
    assert node_check.measure_twice(bench, phase) == {}
    assert [case.key["attempt"] for case in cases] == [1, 2, 1, 1]


@pytest.mark.parametrize(
    ("metrics", "where"), [({}, ""), ({"failed_rank": 0}, " on a"), ({"failed_rank": 2}, " on b")]
)
def test_the_host_of_a_failed_rank_is_named(metrics: dict[str, int], where: str) -> None:
    """It comes from the metrics: a number in an error's text need not be a rank."""
    why = "RuntimeError: a tensor of rank 1"
    failed = Case(key={"probe": "links"}, ranks=[0, 1], metrics=metrics, check=f"failed: {why}")
    _, lines = conclude({}, None, wrong_results({}, [failed], HOSTS), "slow", HOSTS, RAN)
    assert lines == [f"wrong links: {why}{where}", "not fit: links"]


@pytest.mark.parametrize("members", [[[0, 1, 2, 3]], [[0], [1], [2]], [[0, 1], [2, 3], [4, 5]]])
def test_links_of_nodes(members: list[list[int]]) -> None:
    """Each two ranks of a node, and each two nodes by each rail, once; nobody twice in a round."""
    rounds = rounds_by_node(members)
    expected = [(a, b) for ranks in members for a in ranks for b in ranks if a < b]
    for i, node in enumerate(members):
        for other in members[i + 1 :]:
            expected += zip(node, other, strict=True)
    assert sorted(pair for pairs in rounds for pair in pairs) == sorted(expected)
    for pairs in rounds:
        ranks = [rank for pair in pairs for rank in pair]
        assert len(ranks) == len(set(ranks))


def test_a_process_stays_near_its_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A made-up node: 2 sockets of 4 cores with 2 threads each, numbered 0-7 and then 8-15, and 2
    GPUs on each socket. The process gets all of the socket's cores that the launcher gave it; if
    none is there, it stays where it is."""
    bound: list[set[int]] = []
    cores = set(range(16))
    for gpu, mask in enumerate(("0f0f", "0f0f", "f0f0", "f0f0")):
        device = tmp_path / f"bus/pci/devices/0000:{gpu:02x}:00.0"
        device.mkdir(parents=True)
        (device / "local_cpus").write_text(f"00000000,0000{mask}\n")

    def properties(gpu: int) -> Any:
        return SimpleNamespace(pci_domain_id=0, pci_bus_id=gpu, pci_device_id=0)

    monkeypatch.setattr(node_check, "SYS", tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: cores)
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: bound.append(cores))
    node_check.stay_near(torch.device("cpu"))
    assert bound == []
    node_check.stay_near(torch.device("cuda", 2))
    cores = {0, 1, 6}
    node_check.stay_near(torch.device("cuda", 2))
    cores = {0, 1}
    node_check.stay_near(torch.device("cuda", 2))
    node_check.stay_near(torch.device("cuda", 9))  # Linux has no such device, as in containers
    assert bound == [{4, 5, 6, 7, 12, 13, 14, 15}, {6}, {0, 1}, {0, 1}]


@pytest.mark.parametrize("name", simulation.WORLDS)
def test_healthy_ranks_are_not_accused_and_a_slow_one_is(name: str) -> None:
    """The limits are wide: docs/node_check.md has what more runs say."""
    world = simulation.WORLDS[name]
    assert simulation.rates(world, 1.0, 15)["not fit"] <= 0.05
    slow = simulation.rates(world, 1.2 if world.device == "cuda" else 1.6, 10)
    assert slow["cannot be told" if name == "CPU, 30 %" else "named alone"] >= 0.9
