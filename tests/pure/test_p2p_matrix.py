"""The plan, the tables and the answers of p2p_matrix.py."""

import itertools

import pytest

from benchmarks import p2p_matrix
from benchmarks.workloads.links import Link, Messages


def test_the_key_of_a_round_says_who_meets() -> None:
    """12 ranks on 3 or on 4 nodes: three rounds each, of other pairs."""
    args = p2p_matrix.parse_args(["--by", "node", "--size", "1M"])
    three, four = (p2p_matrix.plan(args, Messages(2**20, 8, 10), nodes) for nodes in (3, 4))
    assert (len(three), len(four)) == (3, 3)
    assert three[0][2] != four[0][2]
    with pytest.raises(ValueError, match="a link needs two ranks, and there is 1; "):
        p2p_matrix.members_of("rank", [0])
    with pytest.raises(ValueError, match="a folder that can be written, got nowhere"):
        p2p_matrix.check_plot("nowhere/links.png")


def met(a: int, b: int, us: float, rate: float, spread: float | None = 0.1) -> Link:
    return Link(a, b, us, rate, rate, rate, spread)


def test_matrices_and_many_links() -> None:
    """+-% in percent, in both halves. Of what is too wide the worst links are listed."""
    rows = [met(0, 1, 20, 1.0, 0.025), met(0, 2, 20, 1.0, 134.0)]
    *_, spread = p2p_matrix.tables(rows, 3, "rank", 80).split("\n\n")
    cells = [["0", "-", "2.5", ">100"], ["1", "2.5", "-", "-"], ["2", ">100", "-", "-"]]
    assert [line.split() for line in spread.splitlines()[1:]] == cells
    assert ["worst" in p2p_matrix.tables(rows, n, "rank", 80) for n in (8, 9)] == [False, True]
    pairs = itertools.combinations(range(40), 2)
    many = [met(a, b, 30 if (a, b) == (2, 5) else 10, 5) for a, b in pairs]
    _, latency, *_ = p2p_matrix.tables(many, 40, "rank", None).split("\n\n")
    assert latency.splitlines()[:2] == ["worst 20 of 780 links:", "      2 -> 5     30"]


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
    assert "with 1 link nobody can tell" in p2p_matrix.answer(alike[:1], [0, 0], "rank", 5.0)[0]


SLOW = {(min(3, n), max(3, n)): 94.0 for n in range(14) if n != 3}
SLOW |= {(min(5, n), max(5, n)): 50.0 for n in range(14) if n != 5}
SHARED = {(1, 2): 94.0, (2, 6): 200.0}  # two links that share an end
WITHIN = {(0, 1): 1.0, (2, 4): 100.0, (1, 5): 300.0}  # the first one is within a node


@pytest.mark.parametrize(
    ("slow", "nodes", "line"),
    [
        (SLOW, range(8), "without node 3, node 5: 6 nodes hold 380 GB/s, all 8 hold 50 GB/s"),
        (SLOW, range(14), "without node 3, node 5: 12 nodes hold 380 GB/s, all 14 hold 50 GB/s"),
        (SHARED, range(8), "without node 2: 7 nodes hold 380 GB/s, all 8 hold 94 GB/s"),
        ({(1, 2): 350.0}, range(8), "all 8 nodes hold 350 GB/s"),  # 380 / 1.1 is 345
        (WITHIN, [0, 0, 1, 1, 2, 2], "without node 2: 2 nodes hold 380 GB/s, all 3 hold 100 GB/s"),
    ],
)
def test_what_to_leave_out(slow: dict[tuple[int, int], float], nodes: list[int], line: str) -> None:
    """All other links hold 380 GB/s. 14 nodes are over EXACT."""
    pairs = itertools.combinations(range(len(nodes)), 2)
    links = [met(a, b, 20, slow.get((a, b), 380)) for a, b in pairs]
    assert p2p_matrix.leave_out(links, list(nodes)) == line
