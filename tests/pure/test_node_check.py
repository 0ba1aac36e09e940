"""The judgement of node_check.py, worked out by hand."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from benchmarks import node_check
from benchmarks.node_check import (
    both_times,
    conclude,
    hosts_of,
    judge,
    odd_results,
    rounds_by_node,
    stay_near,
    wrong_results,
)
from common.environment import Others
from common.report import Case, Report
from common.stats import Times
from common.workloads.outliers import Who, accuse, sentences


def costs(*values: float) -> dict[tuple[int, ...], float]:
    return {(rank,): value for rank, value in enumerate(values)}


def names(found: Any) -> list[str]:
    return [who.name() for who, _ in found]


TEAMS = {"rank": [[0], [1], [2]], "node": [[0, 1], [2]], "rail": [[0, 2]], "job": [[0, 1, 2]]}


MARGINS = {"rank": 0.1, "node": 1.0, "rail": 1.0, "job": 1.0}


def cluster(teams: dict[str, Any], kinds: list[str]) -> node_check.Cluster:
    """Nodes of CPUs, without limits."""
    node_of = {rank: node for node, ranks in enumerate(teams["node"]) for rank in ranks}
    nodes = [node_of[rank] for rank in range(len(kinds))]
    return node_check.Cluster(True, nodes, teams, kinds, MARGINS, {}, 5)


def ranks_with(step: str, *seconds: float) -> list[Case]:
    """A case for each rank; 10 bytes in so many seconds."""
    names = (f"{step}_s", f"{step}_sustained_s", f"{step}_bytes_per_s")
    values = [dict(zip(names, (s, s, 10 / s), strict=True)) for s in seconds]
    return [Case(key={"rank": rank}, ranks=[rank], metrics=own) for rank, own in enumerate(values)]


def test_kinds_and_limits() -> None:
    """A slower kind of device is none of the slow; a limit is a user's."""
    cases = ranks_with("copy", 1, 1, 1, 2, 2, 5)
    teams = TEAMS | {"rank": [[rank] for rank in range(6)], "node": [list(range(6))]}
    kinds = ["new", "new", "new", "old", "old", "old"]
    found = judge(cases, cluster(teams, kinds))
    assert names(found) == ["rank 5", "rank 5"]
    assert [what for _, what in found] == ["copy", "copy sustained"]
    assert sentences(found)[0].startswith("slow rank 5: copy 2.50x the median's time")
    limited = cluster(teams, kinds)._replace(
        limits={("rank", "bytes"): 4.0}, margins=MARGINS | {"rank": 9.0}
    )
    found = judge(cases, limited)
    assert sentences(found) == ["slow rank 5: copy bytes per s 2, under 4"]


def test_nodes_are_compared_by_their_all_reduce() -> None:
    """Three nodes of two ranks; the third takes three times as long, its ranks are not named."""
    cases = ranks_with("all_reduce_inside", 1, 1, 1.1, 1.1, 3.3, 3.3)
    teams = TEAMS | {"node": [[0, 1], [2, 3], [4, 5]]}
    found = judge(cases, cluster(teams, ["k"] * 6))
    assert [*dict.fromkeys(names(found))] == ["node 2"]
    assert sentences(found)[0].startswith("slow node 2: all reduce inside 3.00x the median's time")


def test_each_rank_becomes_a_case() -> None:
    """Two turns of two rounds of two samples. Rank 1: blocks of 3 and 2 s, the fastest 1 s."""
    place = {"host": "a", "pci": "", "network": "lo"}
    report = Report("node_check", {"ranks": [place, place | {"host": "b"}]})
    rows: Any = {
        "copy, turn 0": [[2, 2, 2, 2], [0, 0, 0, 0]],
        "copy, turn 1": [[0] * 4, [5, 1, 2, 2]],
    }
    case = Case(
        key={"device": "cpu"}, ranks=[0, 1], samples_s=rows, rounds=[2, 2], name="each rank alone"
    )
    facts = [{"did": {"copy": (f"copy, turn {r}", 10.0)}, "bits": "x"} for r in (0, 1)]
    times = Times(rows, [2, 2])
    node_check.split(report, {"rank": [[0], [1]]}, ["k", "k"], case, times, facts)
    first, second = report.cases
    assert second.key == {"device": "cpu", "rank": 1, "host": "b"}
    assert second.samples_s == {"copy": [[5, 1, 2, 2]]}
    assert second.metrics["copy_s"] == 1
    assert second.metrics["copy_sustained_s"] == 2
    assert second.metrics["copy_bytes_per_s"] == 5
    assert second.metrics["spread"] is None  # four samples have no interval
    assert (second.name, second.table) == ("rank 1", "each rank alone")
    assert (first.check, second.check) == ("passed", "passed")
    assert case.samples_s == {}


def test_the_slowest_rank_of_a_node_counts() -> None:
    """Of each iteration: 3, 4, 3, 2; on CUDA the median of the blocks' 3.5 and 2.5."""
    report = Report("node_check", {"ranks": [{"host": "a", "pci": "", "network": ""}] * 2})
    step, rows = "all_reduce_inside", [[1.0, 4.0, 1.0, 2.0], [3.0, 1.0, 3.0, 1.0]]
    case = Case(key={"device": "cuda"}, ranks=[0, 1], samples_s={step: rows}, rounds=[2, 2])
    did = {step: (step, 6.0)}
    facts = [{"did": did, "bits": "x", "wrong": wrong} for wrong in (None, "why")]
    times = Times({step: rows}, [2, 2])
    node_check.split(report, {"node": [[0, 1]]}, ["k", "k"], case, times, facts)
    assert [case.metrics[f"{step}_sustained_s"] for case in report.cases] == [3, 3]
    assert [case.metrics[f"{step}_s"] for case in report.cases] == [2, 2]
    assert [case.samples_s[step] for case in report.cases] == [[rows[0]], [rows[1]]]
    assert [case.check for case in report.cases] == ["passed", "failed: why"]


def test_odd_results() -> None:
    assert odd_results(["a"] * 3, ["k"] * 3) == {}
    one = {1: "its results (b) are those of 1 of 3 of its kind"}
    assert odd_results(["a", "b", "a"], ["k"] * 3) == one
    assert odd_results(["a", "b"], ["k", "l"]) == {}  # two kinds may round differently
    assert [*odd_results(["a", "b"], ["k", "k"])] == [0, 1]  # of two nobody knows which
    assert [*odd_results(["not finite"] * 2, ["k", "k"])] == [0, 1]


RAN = "2 nodes, 3 ranks, 41 s of 60"


def test_the_last_lines() -> None:
    found = accuse(costs(1.0, 2.0, 1.0), {}, "rank", "copy")
    bad = Case(key={"probe": "each rank alone", "rank": 2}, ranks=[2], check="failed: why")
    hosts = hosts_of({"hosts": ["a", "b"], "ranks": [{"host": host} for host in "aab"]})
    wrong = wrong_results({1: "lacks"}, [bad, bad], hosts)
    status, lines = conclude(found, {}, None, wrong, "slow", hosts, RAN)
    problem = "not fit: node 1 on b, rank 2 on b, rank 1 on a"
    assert status == 1
    assert lines[-3:] == ["wrong node 1 on b: lacks", "wrong rank 2 on b: why", problem]
    assert lines[0].startswith("slow rank 1 on a: copy 2.00x")
    slow = [*sentences(found, hosts), f"fit, though slow: {RAN}"]
    assert conclude(found, {}, None, [], "wrong", hosts, RAN) == (0, slow)
    assert conclude({}, found, Others(1.6, 2), [], "wrong", hosts, RAN) == (0, slow)
    assert conclude({}, {}, None, [], "slow", hosts, RAN) == (0, [f"fit: {RAN}"])
    assert Who("link", ((2, 0),)).name(hosts) == "link 2 on b -> 0 on a"
    assert Who("rail", ((1,),)).name(hosts) == "rail 1"
    assert Who("rank", ((1,), (2,))).name(hosts) == "rank 1 on a or rank 2 on b"


def test_what_is_only_slow_cannot_always_be_told() -> None:
    """Other programs are a reason for 4, and two measurements that disagree are another one."""
    found = accuse(costs(1.0, 2.0, 1.0), {}, "rank", "copy")
    other = accuse(costs(1.0, 1.0, 3.0), {}, "rank", "launch")
    hosts = hosts_of({"hosts": ["a"], "ranks": [{"host": "a"}] * 3})
    others = Others(1.6, 2)
    disturbed = "cannot be told: other programs took 1.6 of 2 cores"
    for slow, once in ((found, {}), ({}, found), (found, other)):
        status, lines = conclude(slow, once, others, [], "slow", hosts, RAN)
        assert (status, lines[-1]) == (4, disturbed)
    assert conclude({}, {}, others, [], "slow", hosts, RAN)[0] == 0  # nobody is slow
    wrong = wrong_results({0: "lacks"}, [], hosts)
    status, lines = conclude(found, {}, others, wrong, "slow", hosts, RAN)
    assert (status, lines[-1]) == (1, "not fit: node 0 on a")

    assert both_times(found, found) == (found, {})
    assert both_times(found | other, found)[0] == found
    for first, second in ((found, {}), (found, other)):
        twice, once = both_times(first, second)
        assert twice == {}
        assert names(once) == names(first | second)
        status, lines = conclude(twice, once, None, [], "slow", hosts, RAN)
        assert status == 4
        assert lines[0].endswith(", in one of two measurements")
        assert lines[-1].startswith("cannot be told: only one of two measurements found this slow:")
    # the first measurement names more of the same rank
    copy = accuse(costs(1.0, 3.0, 1.0), {}, "rank", "launch")
    assert both_times(found | copy, found) == (found, {})


def test_who_is_slow_in_one_of_two_measurements_is_no_suspect(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 1 is slow twice, rank 2 the first time and rank 3 the second. Nobody is measured twice
    where nobody is slow."""
    slow: dict[int, tuple[int, ...]] = {1: (1, 2), 2: (1, 3)}  # by attempt
    cases: list[Case] = []
    report = Mock(cases=cases, environment={"num_nodes": 1})
    bench: Any = Mock(report=report, args=Mock(budget=100.0))

    def suspects(measured: list[Case]) -> node_check.Findings:
        ranks = slow.get(measured[-1].key["attempt"], ())
        return {(Who("rank", ((rank,),)), "copy"): "2x" for rank in ranks}

    def measure(key: node_check.Key, *given: Any, **more: Any) -> None:
        cases.append(Case(key=key, ranks=[0]))

    bench.measure = measure
    monkeypatch.setattr(node_check, "share", lambda value: value)
    monkeypatch.setattr(node_check, "rule_of", lambda *given: None)
    monkeypatch.setattr(node_check, "seconds_left", lambda budget: budget)
    part = node_check.Part("each rank alone", {}, [0], Mock(), Mock())
    phase = node_check.Phase("each rank alone", 0.1, [part], suspects)
    twice, once = node_check.measure_twice(bench, phase)
    assert names(twice) == ["rank 1"]
    assert sorted(names(once)) == ["rank 2", "rank 3"]
    assert [case.key["attempt"] for case in cases] == [1, 2]
    slow.clear()
    assert node_check.measure_twice(bench, phase) == ({}, {})
    assert [case.key["attempt"] for case in cases] == [1, 2, 1]


@pytest.mark.parametrize(
    ("metrics", "where"), [({}, ""), ({"failed_rank": 0}, " on a"), ({"failed_rank": 1}, " on b")]
)
def test_the_host_of_a_failed_rank_is_named(metrics: dict[str, int], where: str) -> None:
    """It comes from the metrics: a number in an error's text need not be a rank."""
    hosts = hosts_of({"hosts": ["a", "b"], "ranks": [{"host": "a"}, {"host": "b"}]})
    why = "RuntimeError: a tensor of rank 1"
    failed = Case(key={"probe": "links"}, ranks=[0, 1], metrics=metrics, check=f"failed: {why}")
    wrong = wrong_results({}, [failed], hosts)
    _, lines = conclude({}, {}, None, wrong, "slow", hosts, RAN)
    assert lines == [f"wrong links: {why}{where}", "not fit: links"]


@pytest.mark.parametrize("members", [[[0, 1, 2, 3]], [[0], [1], [2]], [[0, 1], [2, 3], [4, 5]]])
def test_links_of_nodes(members: list[list[int]]) -> None:
    """Each two ranks of a node, and each two nodes by each rail, once; nobody twice in a round."""
    rounds = rounds_by_node(members)
    seen = [pair for pairs in rounds for pair in pairs]
    inside = [(a, b) for own in members for a in own for b in own if a < b]
    between = [
        pair
        for i, a in enumerate(members)
        for b in members[i + 1 :]
        for pair in zip(a, b, strict=True)
    ]
    assert sorted(seen) == sorted(inside + between)
    for pairs in rounds:
        ranks = [rank for pair in pairs for rank in pair]
        assert len(ranks) == len(set(ranks))


def test_a_long_list_of_the_unfit_is_cut() -> None:
    hosts = {"node": [f"n{node}" for node in range(20)], "rank": [], "link": []}
    lacks = dict.fromkeys(range(20), "lacks a GPU")
    wrong = wrong_results(lacks, [], hosts)
    _, lines = conclude({}, {}, None, wrong, "slow", hosts, RAN)
    assert lines[-1].endswith("node 7 on n7 and 12 more")
    assert len(lines) == 21  # a line for each stays


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
    stay_near(torch.device("cpu"))
    assert bound == []
    stay_near(torch.device("cuda", 2))
    cores = {0, 1, 6}
    stay_near(torch.device("cuda", 2))
    cores = {0, 1}
    stay_near(torch.device("cuda", 2))
    stay_near(torch.device("cuda", 9))  # Linux has no such device, as in some containers
    assert bound == [{4, 5, 6, 7, 12, 13, 14, 15}, {6}, {0, 1}, {0, 1}]
