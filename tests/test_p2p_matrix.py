"""p2p_matrix.py in full runs; tests/pure/test_links.py tests the arithmetic."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.process import Bench

SCRIPT = "benchmarks/p2p_matrix.py"
SHORT = ("--size", "4K", "-n", "2", "-w", "1", "--iters", "6")


def pairs(run: Any) -> list[list[int]]:
    return [link[:2] for case in run.report.cases for link in case.metrics["links"]]


@pytest.mark.smoke
def test_every_pair_and_a_heat_map(bench: Bench, tmp_path: Path) -> None:
    path = tmp_path / "a heat map.png"
    run = bench(SCRIPT, *SHORT, "--plot", str(path), ranks=3)
    assert {case.check for case in run.report.cases} == {"passed"}
    assert sorted(pairs(run)) == [[0, 1], [0, 2], [1, 2]]
    assert run.out.count(", by rank") == 4
    assert "; messages of 4K bytes (latency: 8), 2 per sample\n" in run.out
    assert path.read_bytes().startswith(b"\x89PNG")
    # everything was measured earlier, when ranks shared cores or the load was not recorded
    run = bench(SCRIPT, *SHORT, "--resume", ranks=3)
    first, *_ = [line for line in run.out.splitlines() if line.startswith("# measured ")]
    unknown = "no verdict on slow links, ranks or nodes: CPU use by other processes was not record"
    assert re.match(rf"# measured 20.* UTC on .*: ({unknown}|it cannot be told )", first), first


@pytest.mark.smoke
def test_by_node(bench: Bench) -> None:
    run = bench(SCRIPT, *SHORT, "--by", "node", ranks=2, nodes=2)
    assert pairs(run) == [[0, 1]]
    assert run.report.cases[0].ranks == [0, 1, 2, 3]
    assert "latency (us), by node" in run.out


@pytest.mark.faults
def test_wrong_data_and_a_slow_rank_are_named(bench: Bench) -> None:
    """Rank 1 receives a wrong byte in each of its 5 rounds, and rank 2 sends late, by far more than
    sharing the cores explains. It is named after a second measurement."""
    faults = "planted-time,one-wrong-value,slow-sends,quiet"
    run = bench(SCRIPT, *SHORT, "--serial", inject=faults, ranks=6, status=1)
    assert len(pairs(run)) == 2 * 6 * 5 / 2
    for case in run.report.cases:
        wrong = "failed: rank 1 received wrong data"
        assert case.check == (wrong if 1 in case.ranks else "passed")
    assert "one pair at a time" in run.out
    assert "slow rank 2 on " in run.out
