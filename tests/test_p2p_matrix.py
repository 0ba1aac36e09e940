"""p2p_matrix.py as its user runs it. tests/pure/test_links.py has the arithmetic."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SCRIPT = "benchmarks/p2p_matrix.py"
SHORT = ("--size", "4K", "-n", "2", "-w", "1", "--iters", "6")


def links(run: Any) -> list[list[float]]:
    return [link for case in run.report.cases for link in case.metrics["links"]]


@pytest.mark.smoke
def test_every_pair_and_a_heat_map(bench: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "a heat map.png"
    run = bench(SCRIPT, *SHORT, "--plot", str(path), ranks=3)
    assert run.status == 0, run.err
    assert {case.check for case in run.report.cases} == {"passed"}
    assert sorted((a, b) for a, b, *_ in links(run)) == [(0, 1), (0, 2), (1, 2)]
    assert all(value > 0 for link in links(run) for value in link[2:])
    for case in run.report.cases:
        assert [len(rows) for rows in case.samples_s["latency"]] == [6] * len(case.ranks)
    assert run.out.count(", by rank") == 4
    assert "+-% of the median sample, by rank" in run.out
    assert "; messages of 4K bytes (latency: 8), 2 a sample\n" in run.out
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.smoke
def test_by_node(bench: Callable[..., Any]) -> None:
    run = bench(SCRIPT, *SHORT, "--by", "node", ranks=2, nodes=2)
    assert run.status == 0, run.err
    assert [link[:2] for link in links(run)] == [[0, 1]]
    assert run.report.cases[0].ranks == [0, 1, 2, 3]
    assert "latency (us), by node" in run.out


@pytest.mark.smoke
def test_one_rank_has_no_link(bench: Callable[..., Any]) -> None:
    run = bench(SCRIPT, ranks=0)
    assert run.status == 2
    assert "a link needs two ranks, and there is 1; e.g. --nproc-per-node 2" in run.err


@pytest.mark.smoke
def test_a_plot_that_cannot_be_written_is_said_first(bench: Callable[..., Any]) -> None:
    run = bench(SCRIPT, *SHORT, "--plot", "nowhere/links.png", ranks=2)
    assert run.status != 0
    assert "--plot nowhere/links.png: expected a folder that can be written, got now" in run.err
    assert run.report.cases == []


@pytest.mark.faults
def test_wrong_data_is_named(bench: Callable[..., Any]) -> None:
    run = bench(SCRIPT, *SHORT, inject="one-wrong-value", ranks=3)
    assert run.status == 1
    checks = [case.check for case in run.report.cases if 1 in case.ranks]
    assert checks == ["failed: wrong data came to rank 1"] * 2


@pytest.mark.faults
def test_a_slow_rank_is_named(bench: Callable[..., Any]) -> None:
    run = bench(SCRIPT, *SHORT, "--serial", inject="slow-sends", ranks=5)
    assert run.status == 0, run.err
    assert len({(a, b) for a, b, *_ in links(run)}) == 5 * 4 / 2
    assert "one pair at a time" in run.out
    assert "slow rank 2: " in run.out
