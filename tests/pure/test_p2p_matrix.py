"""The plan, the tables and the answers of p2p_matrix.py."""

import pytest

from benchmarks import p2p_matrix
from common.workloads import links


def test_the_key_of_a_round_says_who_meets() -> None:
    """12 ranks on 3 or on 4 nodes: three rounds each, of other pairs."""
    args = p2p_matrix.parse_args(["--by", "node", "--size", "1M"])
    messages = links.Messages(2**20, 8, 10)
    three, four = (p2p_matrix.plan(args, messages, nodes) for nodes in (3, 4))
    assert len(three) == len(four) == 3
    assert three[0][0] == four[0][0] == "round 1"
    assert three[0][1] != four[0][1]
    assert three[0][2] != four[0][2]


def test_many_links_are_listed_by_the_worst() -> None:
    pairs = [(a, b) for a in range(40) for b in range(a + 1, 40)]
    rows = [links.Link(a, b, 30 if (a, b) == (2, 5) else 10, 5, 5, 9) for a, b in pairs]
    _, latency, *_, spread = p2p_matrix.tables(rows, 40, "rank", None).split("\n\n")
    assert spread == "worst 0 of 0 links:"  # they have no interval
    assert latency.splitlines()[:2] == ["worst 20 of 780 links:", "      2 -> 5     30"]
    of_eight, of_nine = (p2p_matrix.tables(rows[:7], n, "rank", 80) for n in (8, 9))
    assert "worst" in of_nine
    assert "worst" not in of_eight
    assert max(map(len, of_eight.splitlines())) <= 80


def met(a: int, b: int, us: float, rate: float, spread: float | None = 0.1) -> links.Link:
    return links.Link(a, b, us, rate, rate, rate, spread)


def test_answer() -> None:
    """A slow link: 60 us, and the median of 20, 20, 20, 21, 22 and 60 is 20.5."""
    alike = [met(0, 1, 20, 1.0, 0.2), met(2, 3, 21, 1.1), met(0, 2, 20, 1.0), met(1, 3, 22, 1.0)]
    alike += [met(0, 3, 20, 1.05), met(1, 2, 20, 1.0, 0.05)]
    where = ([0] * 4, "rank", 5.0)
    assert p2p_matrix.answer(alike, *where) == [
        "no link, rank or node is slow beyond noise",
        "latency 20 to 22 us, bandwidth 1 to 1.1 GB/s "
        "(the median sample of a link: +-10.0%, +-20.0% at most)",
        "all 4 ranks hold 1 GB/s",
    ]
    alike[-1] = met(1, 2, 60, 1.0, None)
    first, last, _ = p2p_matrix.answer(alike, *where)
    assert first.startswith("maybe slow link 1 -> 2: latency within nodes 2.93x the median's time")
    assert last.endswith("(the median sample of a link: no interval; raise --max-seconds)")
    few = p2p_matrix.answer(alike[:1], [0, 0], "rank", 5.0)
    assert few[0] == "with 1 link nobody can tell what is slow"
    assert len(few) == 2


def all_links(members: int, rates: dict[tuple[int, int], float]) -> list[links.Link]:
    """Of 380 GB/s, but for these."""
    pairs = [(a, b) for a in range(members) for b in range(a + 1, members)]
    return [met(a, b, 20, rates.get((a, b), 380)) for a, b in pairs]


@pytest.mark.parametrize("members", [8, 14])  # exact, and greedy
def test_what_to_leave_out(members: int) -> None:
    """A node with slow links; two; one slow link, of which either end may go; two links that share
    an end, which goes."""
    nodes = list(range(members))
    third = {(min(3, n), max(3, n)): 94.0 for n in nodes if n != 3}
    line = p2p_matrix.leave_out(all_links(members, third), nodes)
    rest = f"{members - 1} nodes hold 380 GB/s, all {members} hold 94 GB/s"
    assert line == f"without node 3: {rest}"
    both = third | {(min(5, n), max(5, n)): 50.0 for n in nodes if n != 5}
    line = p2p_matrix.leave_out(all_links(members, both), nodes)
    rates = f"{members - 2} nodes hold 380 GB/s, all {members} hold 50 GB/s"
    assert line == f"without node 3, node 5: {rates}"
    line = p2p_matrix.leave_out(all_links(members, {(1, 2): 94.0}), nodes)
    assert line in (f"without node 1: {rest}", f"without node 2: {rest}")
    line = p2p_matrix.leave_out(all_links(members, {(1, 2): 94.0, (2, 6): 200.0}), nodes)
    assert line == f"without node 2: {rest}"
    within = p2p_matrix.leave_out(all_links(members, {(1, 2): 350.0}), nodes)
    assert within == f"all {members} nodes hold 350 GB/s"  # 380 / 1.1 is 345


def test_ranks_of_a_node_count_together() -> None:
    """Three nodes of two ranks. The worst link between two nodes counts, and none within a node."""
    slow = {(0, 1): 1.0, (2, 4): 100.0, (1, 5): 300.0}
    line = p2p_matrix.leave_out(all_links(6, slow), [0, 0, 1, 1, 2, 2])
    assert line == "without node 2: 2 nodes hold 380 GB/s, all 3 hold 100 GB/s"


def test_how_steady_the_links_are_is_a_matrix() -> None:
    """In percent, in both halves."""
    rows = [met(0, 1, 20, 1.0, 0.025), met(0, 2, 20, 1.0, 134.0)]
    *_, spread = p2p_matrix.tables(rows, 3, "rank", 80).split("\n\n")
    assert [line.split() for line in spread.splitlines()] == [
        ["0", "1", "2"],
        ["0", "-", "2.5", ">100"],
        ["1", "2.5", "-", "-"],
        ["2", ">100", "-", "-"],
    ]
