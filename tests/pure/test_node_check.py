"""The judgement of node_check.py, worked out by hand, and how often it errs."""

import os
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from benchmarks import node_check
from benchmarks.node_check import conclude, judge, odd_results, rounds_by_node, wrong_results
from benchmarks.workloads.outliers import Who, accuse, sentences
from common.environment import Others
from common.report import Case
from common.timing import StopRule
from tests import simulate_node_check as simulation

MARGINS = {"rank": 0.1, "node": 1.0, "rail": 1.0, "link": 1.0}
HOSTS = {"node": ["a", "b"], "rank": ["a", "a", "b"], "link": ["a", "a", "b"]}


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


def test_who_is_slow() -> None:
    """A slower kind of device is none of the slow; a limit is a user's. The ranks of a node that
    takes three times as long are not named."""
    cases = ranks_with("copy", 1, 1, 1, 2, 2, 5)
    of_kinds = cluster([list(range(6))], ["new"] * 3 + ["old"] * 3)
    slow, sustained = sentences(judge(cases, of_kinds))
    assert slow.startswith("slow rank 5: copy 2.50x the median's time")
    assert sustained.startswith("slow rank 5: copy sustained 2.50x")
    limited = of_kinds._replace(limits={"copy": 4.0}, margins=MARGINS | {"rank": 9.0})
    assert sentences(judge(cases, limited)) == ["slow rank 5: copy bytes per s 2, under 4"]
    cases = ranks_with("all_reduce_inside", 1, 1, 1.1, 1.1, 3.3, 3.3)
    slow, sustained = sentences(judge(cases, cluster([[0, 1], [2, 3], [4, 5]], ["k"] * 6)))
    assert slow.startswith("slow node 2: all reduce inside 3.00x the median's time")


def test_the_block_that_counts() -> None:
    """Blocks of 3.5 and 2.5 s: the best one on the CPU, the median on CUDA."""
    case = Case(key={"device": "cpu"}, ranks=[0], rounds=[2, 2])
    samples = np.array([3.0, 4.0, 3.0, 2.0])
    assert node_check.sustained(samples, case) == 2.5
    case.key["device"] = "cuda"
    assert node_check.sustained(samples, case) == 3.0


def test_odd_results() -> None:
    one = {1: "its results (b) are those of 1 of 3 of its kind"}
    assert odd_results(["a", "b", "a"], ["k"] * 3) == one
    assert odd_results(["a", "b"], ["k", "l"]) == {}  # two kinds may round differently
    assert [*odd_results(["a", "b"], ["k", "k"])] == [0, 1]  # of two nobody knows which
    assert [*odd_results(["not finite"] * 2, ["k", "k"])] == [0, 1]


SLOW = accuse({(0,): 1.0, (1,): 2.0, (2,): 1.0}, {}, "rank", "copy")
BAD = Case(key={"probe": "alone", "rank": 2}, ranks=[2], check="failed: why")
# the host comes from the metrics: a number in an error's text need not be a rank
LINKS = Case(key={"probe": "links"}, ranks=[0], metrics={"failed_rank": 2}, check="failed: rank 1")
WRONG = wrong_results({1: "lacks"}, [BAD, BAD, LINKS], HOSTS)
OTHERS = Others(1.6, 2)


@pytest.mark.parametrize(
    ("slow", "others", "wrong", "fail_on", "status", "last"),
    [
        (SLOW, None, WRONG, "slow", 1, "not fit: node 1 on b, rank 2 on b, links, rank 1 on a"),
        (SLOW, OTHERS, [], "wrong", 0, "fit, though slow: 41 s"),
        (SLOW, OTHERS, [], "slow", 4, "cannot be told: other programs took 1.6 of 2 cores"),
        (SLOW, OTHERS, WRONG, "slow", 1, "not fit: node 1 on b, rank 2 on b, links"),
    ],
)
def test_the_verdict(
    slow: Any, others: Any, wrong: Any, fail_on: str, status: int, last: str
) -> None:
    got, lines = conclude(slow, others, wrong, fail_on, HOSTS, "41 s")
    assert (got, lines[-1]) == (status, last)
    assert len(lines) == len(slow) + len(wrong) + 1
    if wrong:
        assert lines[-3:-1] == ["wrong rank 2 on b: why", "wrong links: rank 1 on b"]


def test_who_is_slow_in_one_of_two_measurements_is_not_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 1 is slow twice, rank 2 the first time and rank 3 the second. What fitted the first time
    is measured again, whatever is left of the budget: 100, 30 and 20 s."""
    bench = Mock(report=Mock(cases=[], environment={"num_nodes": 1}), rule=StopRule())
    bench.args = Mock(budget=100.0, max_seconds=1.0)
    bench.measure = lambda key, *given, **more: bench.report.cases.append(Case(key=key, ranks=[0]))

    def suspects(measured: list[Case]) -> node_check.Findings:
        ranks = {1: (1, 2), 2: (1, 3)}[measured[-1].key["attempt"]]
        return {(Who("rank", ((rank,),)), "copy"): "2x" for rank in ranks}

    monkeypatch.setattr(node_check, "share", lambda value: value)
    left = iter([100.0, 30.0, 20.0, 1.0])
    monkeypatch.setattr(node_check, "seconds_left", lambda budget: next(left))
    parts = [node_check.Part("a case", {}, [0], Mock(), Mock()) for _ in range(2)]
    found = node_check.measure_twice(bench, node_check.Phase("alone", 0.1, parts, suspects))
    assert [who.name() for who, _ in found] == ["rank 1"]
    assert [case.key["attempt"] for case in bench.report.cases] == [1, 2]


def test_links_of_nodes() -> None:
    """Each two ranks of a node, then each two nodes by each rail; nobody twice in a round."""
    inside, *between = rounds_by_node([[0, 1], [2, 3], [4, 5]])
    assert inside == [(0, 1), (2, 3), (4, 5)]
    assert between == [[(2, 4), (3, 5)], [(0, 4), (1, 5)], [(0, 2), (1, 3)]]


def test_a_process_stays_near_its_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node of 2 sockets of 4 cores with 2 threads each, numbered 0-7 and then 8-15. If the
    launcher gave no core of the GPU's socket, the process stays where it is."""
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


@pytest.mark.parametrize("name", ["CPU, 9 %", "CPU, 30 %", "GPU"])
def test_healthy_ranks_are_not_accused_and_a_slow_one_is(name: str) -> None:
    """The limits are wide: docs/node_check.md has what more runs say."""
    world = simulation.WORLDS[name]
    assert simulation.rates(world, 1.0, 15)["not fit"] <= 0.05
    slow = simulation.rates(world, 1.2 if world.device == "cuda" else 1.6, 10)
    assert slow["cannot be told" if name == "CPU, 30 %" else "named alone"] >= 0.9
