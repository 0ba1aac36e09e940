"""p2p_matrix.py: plan, tables and answers."""

import itertools
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import p2p_matrix
from benchmarks.workloads.links import Link, Messages
from benchmarks.workloads.outliers import Component, Crowd, Findings, Slowness
from harness.cpu_load import Others
from tests import simulate_node_check as simulation
from tests.pure.reports import refused


def test_the_key_of_a_round_contains_its_pairs() -> None:
    """12 ranks on 3 or 4 nodes: three rounds each, with different pairs."""
    args = p2p_matrix.parse_args(["--by", "node", "--size", "1M"])
    three, four = (p2p_matrix.plan(args, Messages(2**20, 8, 10), nodes) for nodes in (3, 4))
    assert (len(three), len(four)) == (3, 3)
    assert three[0][2] != four[0][2]
    told = "at least two ranks are required, got 1; "
    assert told in refused(p2p_matrix.members_of, "rank", [0])


def test_a_heat_map_replaces_only_heat_maps(tmp_path: Path) -> None:
    own, other = tmp_path / "own.png", tmp_path / "other.png"
    p2p_matrix.draw([met(0, 1, 20, 1.0)], 2, str(own))
    p2p_matrix.check_plot(str(own))
    other.write_bytes(b"\x89PNG of another program")
    told = "exists and is no output of torchrun-bench"
    assert told in refused(p2p_matrix.check_plot, str(other))


def names_of(count: int) -> dict[str, list[str]]:
    ranks = [f"rank {rank} on vm" for rank in range(count)]
    return {"node": [f"node{number}" for number in range(count)], "rank": ranks, "link": ranks}


def met(a: int, b: int, us: float, rate: float, spread: float | None = 0.1) -> Link:
    return Link(a, b, us, rate, rate, rate, spread)


def answered(links: list[Link], ranks: int, doubt: str = "") -> list[str]:
    """The last lines for ranks of one node."""
    found = p2p_matrix.slow_components(links, [0] * ranks, "rank", 5.0)
    if doubt:
        found = {finding: how for finding, how in found.items() if how.is_far}
    return p2p_matrix.answer(links, [0] * ranks, found, names_of(ranks), "--iters 8", doubt)


def test_matrices_and_many_links() -> None:
    """+-% is in percent in both triangles. Of too wide matrices, the worst links are listed."""
    rows = [met(0, 1, 20, 1.0, 0.025), met(0, 2, 20, 1.0, 134.0)]
    ranks = names_of(40)["rank"]
    *_, spread = p2p_matrix.tables(rows, ranks[:3], "rank", 80).split("\n\n")
    cells = [["0", "-", "2.500", ">100"], ["1", "2.500", "-", "-"], ["2", ">100", "-", "-"]]
    assert [line.split() for line in spread.splitlines()[1:]] == cells
    assert "worst" not in p2p_matrix.tables(rows, ranks[:7], "rank", 80)
    assert "worst" in p2p_matrix.tables(rows, ranks[:8], "rank", 80)
    pairs = itertools.combinations(range(40), 2)
    many = [met(a, b, 30 if (a, b) == (2, 5) else 10, 5) for a, b in pairs]
    _, latency, *_ = p2p_matrix.tables(many, ranks, "rank", None).split("\n\n")
    worst = "  rank 2 on vm -> rank 5 on vm  30.00"
    assert latency.splitlines()[:2] == ["worst 20 of 780 links:", worst]


def test_a_matrix_shows_the_names_of_hosts() -> None:
    """In rows and columns for nodes, and in a line below for ranks."""
    rows = [met(0, 1, 20, 1.0), met(0, 2, 20, 1.0), met(1, 2, 20, 1.0)]
    nodes = ["a-long-name", "vm (node 1)", "vm (node 2)"]
    table = p2p_matrix.tables(rows, nodes, "node", 80).split("\n\n")[1].splitlines()
    assert table[0].split() == " ".join(nodes).split()
    assert [line[:11] for line in table[1:]] == nodes
    ranks = ["rank 0 on a", "rank 1 on a", "rank 2 on b"]
    assert p2p_matrix.tables(rows, ranks, "rank", 80).endswith("\n\nranks 0 to 1 on a, 2 on b")
    assert p2p_matrix.ranks_of_nodes(ranks[:2]) == ""


def test_answer() -> None:
    """A slow link takes 60 us. The median of 20, 20, 20, 21, 22 and 60 is 20.5 us."""
    alike = [met(0, 1, 20, 1.0, 0.2), met(2, 3, 21, 1.1), met(0, 2, 20, 1.0), met(1, 3, 22, 1.0)]
    alike += [met(0, 3, 20, 1.05), met(1, 2, 20, 1.0, 0.05)]
    assert answered(alike, 4) == [
        "no link, rank or node is significantly slower than its peers",
        "latency 20.00 to 22.00 us, bandwidth 1.000 to 1.100 GB/s "
        "(uncertainty of a link: median +-10.0%, maximum +-20.0%)",
        "all 4 ranks sustain 1.000 GB/s",
    ]
    alike[-1] = met(1, 2, 60, 1.0, None)
    first, last, _ = answered(alike, 4)
    named = "possibly slow link rank 1 on vm -> rank 2 on vm: latency within nodes"
    assert first.startswith(f"{named} 2.93x the median time")
    of_links = "median +-10.0%, maximum +-20.0%, 1 link without an interval"
    assert last.endswith(f"(uncertainty of a link: {of_links}; try --iters 8)")


USED = "other processes used 1.6 of 2 cores"
UNKNOWN = "CPU use by other processes was not recorded"
NO_VERDICT = "no verdict on slow links, ranks or nodes"
NONE_SLOWER = "no link, rank or node is significantly slower than its peers$"
ONE_TO_TWO = "slow link rank 1 on vm -> rank 2 on vm: latency within nodes"
PAIRS = [*itertools.combinations(range(8), 2)]
CLOSE = {(0, 2): 20.02, (1, 2): 26.0}  # two of three links are equal by chance
OF_0 = {(0, other): 60.0 for other in range(1, 8)}
ODD = {(0, 1): None, (0, 2): None, (0, 3): 0.6}
MOST, NO_SPREAD = ODD | dict.fromkeys(PAIRS[:15]), dict.fromkeys(PAIRS)


@pytest.mark.parametrize(
    ("ranks", "slow_us", "spreads", "drift", "doubt", "first"),
    [
        (2, {}, {}, None, "", "with 1 link it is impossible to tell which link, rank or node is "),
        # while other processes run, or may run, only links over 5 times as slow are named
        (3, {}, {}, None, USED, f"{NO_VERDICT}: {USED}$"),
        (3, {(1, 2): 60}, {}, None, UNKNOWN, f"{NO_VERDICT}: {UNKNOWN}$"),
        (3, {(1, 2): 120}, {}, None, UNKNOWN, f"{ONE_TO_TWO} 6.00x"),
        # the scatter of three links has a floor: samples of links are known to 40%, or to 1%
        (3, CLOSE, dict.fromkeys(PAIRS, 0.4), None, "", NONE_SLOWER),
        (3, CLOSE, dict.fromkeys(PAIRS, 0.01), None, "", f"{ONE_TO_TWO} 1.30x"),
        # of 28 links with few samples some have no interval: only what they show is uncertain
        (8, {}, ODD, None, "", "no link, .* slower; too unsteady to be judged: 3 of 28 links$"),
        (8, {(6, 7): 60}, ODD, None, "", "slow link rank 6 on vm -> rank 7 on vm: latency"),
        (8, {(0, 1): 60}, ODD, None, "", "possibly slow link rank 0 on vm -> rank 1 on vm"),
        # rank 0 has 7 links, 3 of which are unsteady; with 4 of them it is uncertain
        (8, OF_0, ODD, None, "", "slow rank 0 on vm: latency"),
        (8, OF_0, ODD | {(0, 4): None}, None, "", "possibly slow rank 0 on vm: latency"),
        (8, {}, MOST, None, "", ".*: the links are too unsteady; try --iters 8$"),
        # an interval may be missing if the rounds agree
        (8, {}, NO_SPREAD, 0.02, "", NONE_SLOWER),
        (8, OF_0, NO_SPREAD, 0.02, "", "slow rank 0 on vm: latency"),
        # rounds that differ by 11% may be judged, but do not name a link for sure
        (8, OF_0, NO_SPREAD, 0.11, "", "possibly slow rank 0 on vm: latency"),
        (8, {}, NO_SPREAD, 0.11, "", "no link,"),
    ],
)
def test_the_first_line(
    ranks: int, slow_us: Any, spreads: Any, drift: Any, doubt: str, first: str
) -> None:
    """Other links take 20 us, which is known to 10%."""
    pairs = [pair for pair in PAIRS if max(pair) < ranks]
    links = [met(*pair, slow_us.get(pair, 20), 1.0, spreads.get(pair, 0.1)) for pair in pairs]
    links = [link._replace(drift=drift) for link in links]
    assert re.match(first, answered(links, ranks, doubt)[0])


def test_doubts() -> None:
    """The load is unknown while two commands are interleaved, or for links of an earlier run."""
    assert p2p_matrix.doubt_of(Others(1.6, 2), True) == USED
    assert p2p_matrix.doubt_of(Others(1.6, 2), False) == UNKNOWN
    assert p2p_matrix.doubt_of(None, True) == ""


@pytest.mark.parametrize(("drift", "start"), [(0.4, "slow"), (3.2, "possibly slow")])
def test_a_bandwidth_that_is_low_in_one_block_only(drift: float, start: str) -> None:
    """The slowest block counts, but the median sample and its interval do not show it."""
    links = [met(a, b, 20, 1.0) for a, b in itertools.combinations(range(8), 2)]
    links[0] = Link(0, 1, 20, 0.25, 0.25, 0.25, 0.1, drift)
    first = f"{start} link rank 0 on vm -> rank 1 on vm: bandwidth within nodes 4.00x"
    assert answered(links, 8)[0].startswith(first)


@pytest.mark.parametrize(("device", "slow"), [("cpu", 4.0), ("cuda", 1.5)])
def test_how_often_ranks_and_links_are_named(device: str, slow: float) -> None:
    """3 of 28 links stall now and then. With 40 runs a rate of 5% is known to 3%."""
    for level, least in (("rank", 0.8), ("link", 0.5)):
        found = simulation.matrix_rates(device, slow, level, 3, 40)
        assert found["named"] >= least
        assert found["others named"] <= 0.1
    assert simulation.matrix_rates(device, 1.0, "rank", 0, 40)["no link named"] >= 0.9


def test_where_ranks_share_cores_a_link_cannot_be_told() -> None:
    """One of three links takes 6 times as long, which is less than 5 * 3 / 2. There is one cause,
    and no advice to measure longer."""
    rows = [met(0, 1, 20, 1.0), met(0, 2, 20, 1.0), met(1, 2, 120, 1.0, None)]
    crowd = Crowd("vm", 3, 2)
    first, last, _ = p2p_matrix.answer(rows, [0] * 3, {}, names_of(3), "--iters 8", "", crowd)
    why = "3 ranks share 2 cores of vm"
    assert first == f"it cannot be told which link, rank or node is slow: {why}"
    assert last.endswith("maximum +-10.0%, 1 link without an interval)")


SLOW = {(min(3, n), max(3, n)): 94.0 for n in range(14) if n != 3}
SLOW |= {(min(5, n), max(5, n)): 50.0 for n in range(14) if n != 5}
SHARED = {(1, 2): 94.0, (2, 6): 200.0}  # two links with a common end
WITHIN = {(0, 1): 1.0, (2, 4): 100.0, (1, 5): 300.0}  # the first one is within a node


@pytest.mark.parametrize(
    ("slow", "nodes", "best", "every"),
    [
        (SLOW, range(8), "without node3, node5: 6", "all 8 nodes sustain 50.00"),
        (SLOW, range(14), "without node3, node5: 12", "all 14 nodes sustain 50.00"),
        (SHARED, range(8), "without node2: 7", "all 8 nodes sustain 94.00"),
        ({(1, 2): 350.0}, range(8), "", "all 8 nodes sustain 350.0"),  # 380 / 1.1 is 345
        (WITHIN, [0, 0, 1, 1, 2, 2], "without node2: 2", "all 3 nodes sustain 100.0"),
    ],
)
def test_nodes_to_leave_out(slow: Any, nodes: list[int], best: str, every: str) -> None:
    """All other links have 380 GB/s. 14 nodes are more than EXACT."""
    line = f"{best} nodes sustain 380.0 GB/s, {every} GB/s" if best else f"{every} GB/s"
    pairs = itertools.combinations(range(len(nodes)), 2)
    links = [met(a, b, 20, slow.get((a, b), 380)) for a, b in pairs]
    names, found = names_of(len(nodes)), Slowness(4.0, "4x")
    named: Findings = {(Component("node", ((node,),)), "x"): found for node in nodes}
    assert p2p_matrix.leave_out(links, list(nodes), names, named) == line
    nobody = p2p_matrix.leave_out(links, list(nodes), names, {})
    assert nobody == f"{every} GB/s"  # nodes that were not named are not left out
    within = [pair for pair in slow if max(pair) < len(nodes)]
    ends: Findings = {(Component("link", (pair,)), "x"): found for pair in within}
    assert p2p_matrix.leave_out(links, list(nodes), names, ends) == line
