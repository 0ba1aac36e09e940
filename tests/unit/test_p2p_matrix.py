"""p2p_matrix.py: what is made of a round, and what is printed."""

import argparse
from pathlib import Path
from typing import Any

import pytest
from harness import load_script

from common import link_report, links

p2p: Any = load_script("p2p_matrix")


def parse(*options: str) -> argparse.Namespace:
    return p2p.parse_args(["--device", "cpu", *options])  # type: ignore[no-any-return]


def fact(peer: int, latency: float, ab: float, ba: float, both: float) -> dict[str, Any]:
    times = {"latency": [latency], "a -> b": [ab], "b -> a": [ba], "both": [both]}
    return {"peer": peer, "times": times, "wrong": 0}


def test_a_link_by_hand() -> None:
    """1 MB: 4 us there and back; 1 ms to, 2 ms from, by the sender's clock; 4 ms both at once."""
    args = parse("--size", "1000000")
    facts = [fact(1, 4e-6, 1e-3, 9, 3e-3), fact(0, 9, 9, 2e-3, 4e-3)]
    ranks, samples, metrics, check = p2p.derive([(0, 1)], [(0,), (1,)], args, facts)
    assert ranks == [0, 1]
    assert check == "passed"
    assert metrics == {"links": [[0, 1, 2.0, 1.0, 0.5, 0.5]]}
    assert samples.samples["both"].tolist() == [[3e-3], [4e-3]]


def test_direction_where_the_first_member_has_the_higher_rank() -> None:
    """Rank 0, of the second member, is the one that sends in phase `a -> b`."""
    args = parse("--size", "1000000")
    facts = [fact(1, 4e-6, 1e-3, 9, 3e-3), fact(0, 9, 9, 2e-3, 4e-3)]
    _, _, metrics, _ = p2p.derive([(0, 1)], [(1,), (0,)], args, facts)
    assert metrics == {"links": [[0, 1, 2.0, 0.5, 1.0, 0.5]]}


def test_a_link_of_nodes_by_hand() -> None:
    """Rank 0 with 2 and 1 with 3: bandwidths added, the largest latency."""
    args = parse("--size", "1000000")
    quick, slow = fact(0, 2e-6, 1e-3, 1e-3, 2e-3), fact(0, 6e-6, 2e-3, 2e-3, 4e-3)
    _, _, metrics, _ = p2p.derive([(0, 1)], [(0, 1), (2, 3)], args, [quick, slow, quick, slow])
    assert metrics == {"links": [[0, 1, 3.0, 1.5, 1.5, 1.5]]}


def test_wrong_data_fails_the_round() -> None:
    facts = [fact(1, 1, 1, 1, 1), fact(0, 1, 1, 1, 1) | {"wrong": 3}]
    assert p2p.derive([(0, 1)], [(0,), (1,)], parse(), facts)[3] == (
        "failed: wrong data came to rank 1"
    )


def healthy(n: int, spread: float = 0.01) -> list[Any]:
    """Links of equal nodes, within 1 % of each other."""
    return [
        (a, b, *(base * (1 + spread * ((a * 7 + b * 3) % 5)) for base in (10.0, 5.0, 5.0, 8.0)))
        for pairs in links.rounds(n)
        for a, b in pairs
    ]


def test_nothing_is_slow_on_a_healthy_machine() -> None:
    assert link_report.verdicts(healthy(16), [0] * 16, parse()) == []


def test_a_slow_direction_of_a_link_is_named() -> None:
    found = [(a, b, t, 1.0 if (a, b) == (2, 5) else x, y, z) for a, b, t, x, y, z in healthy(8)]
    lines = link_report.verdicts(found, [0] * 8, parse())
    assert len(lines) == 1
    assert lines[0].startswith("slow link 2 -> 5: bandwidth 5.")
    assert link_report.verdicts(found, [0] * 8, parse(), ["one"] * 8) == lines
    hosts = [f"host{member}" for member in range(8)]
    [line] = link_report.verdicts(found, list(range(8)), parse(), hosts)
    assert line.startswith("slow link 2 (host2) -> 5 (host5): bandwidth 5.")


def test_a_slow_node_is_named_and_not_its_ranks() -> None:
    """8 nodes of 4; what crosses the border of node 3 is slow, what is within it is not."""
    nodes = [rank // 4 for rank in range(32)]
    found = []
    for a, b, t, x, y, z in healthy(32):
        slow = 3.0 if nodes[a] != nodes[b] and 3 in (nodes[a], nodes[b]) else 1.0
        far = 2.0 if nodes[a] != nodes[b] else 1.0  # between nodes all is slower, which is no fault
        found.append((a, b, t * far * slow, x / far / slow, y / far / slow, z / far / slow))
    lines = link_report.verdicts(found, nodes, parse())
    assert len(lines) == 3  # latency, bandwidth, bidirectional
    assert all(line.startswith("slow node 3: ") for line in lines), lines
    assert all("between nodes" in line for line in lines)


def test_tables() -> None:
    small = link_report.tables(healthy(3), [0] * 3, parse())
    assert small.count("by rank") == 3
    assert [line.split()[0] for line in small.splitlines() if line.startswith("   0 ")] == ["0"] * 3
    large = link_report.tables(healthy(40), [r // 8 for r in range(40)], parse())
    assert large.count("worst 20 of") == 3
    assert large.count("  node ") == 3 * 5


def test_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    args = parse("--plot", str(tmp_path / "links.png"))
    link_report.plot(healthy(6), 6, args, "six ranks")
    assert (tmp_path / "links.png").read_bytes().startswith(b"\x89PNG")
