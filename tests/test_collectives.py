"""collectives.py as its user runs it; tests/pure/test_collectives.py has its arithmetic."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.collectives import OPERATIONS

SCRIPT = "benchmarks/collectives.py"
# two sizes, six samples of each, in little memory
SHORT = ("-b", "64", "-e", "6400", "-f", "100", "-n", "4", "-w", "1", "--iters", "6")
SMALL = (*SHORT, "--cache-warm")


@pytest.mark.smoke
@pytest.mark.parametrize("ranks", [1, 3])
def test_every_operation(bench: Callable[..., Any], ranks: int) -> None:
    flags = ("--collective", "all", "-r", str(ranks - 1), "-c", "2")
    run = bench(SCRIPT, *SMALL, *flags, ranks=ranks)
    assert run.status == 0, run.err
    names = [name for name in OPERATIONS if name != "sendrecv" or ranks > 1]
    found = {name: [c for c in run.report.cases if c.key["collective"] == name] for name in names}
    assert sum(map(len, found.values())) == len(run.report.cases) == 2 * len(names)
    for name, cases in found.items():
        for case in cases:
            variants = OPERATIONS[name].variants
            assert case.check == "passed", case
            assert list(case.samples_s) == ["step", *variants[1:]]
            assert [len(rows) for rows in case.samples_s["step"]] == [6] * ranks
            assert all(case.metrics[f"{v}_wrong"] == 0 for v in variants)
            assert case.metrics[f"{variants[-1]}_time_s"].value > 0
            shared = name in ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")
            elements = case.key["count"] * (ranks if shared else 1)
            assert case.key["size_bytes"] == 4 * elements
    assert ("# n/a: gloo sends neither to itself nor from CUDA" in run.out) == (ranks == 1)
    assert "# Out of bounds values : 0 OK" in run.out
    assert "# Avg bus bandwidth    : " in run.out
    rows = [line.split() for line in run.out.splitlines() if line[:1] == " "]
    assert rows[0][:5] == ["64", "16", "float32", "sum", "-1"]
    assert [rows[0][i] for i in (8, 12)] == ["0", "0"]  # #wrong
    assert re.fullmatch(r"\d+\.\d%|>100%|-", rows[0][13])
    assert rows[0][14:] == ["warm", "caches"]
    *answers, start = run.report.end["answer"]
    assert len(answers) == len(names)
    assert answers[0].startswith("all_reduce float32 sum: ")
    assert re.match(r"start-up: .* to make the group \(rank . on .*, first collective ", start)
    started = [
        case.metrics["group_s"] > 0 for case in run.report.cases if "group_s" in case.metrics
    ]
    assert started == [True]  # the case that made the group


@pytest.mark.smoke
def test_types_and_reductions(bench: Callable[..., Any]) -> None:
    run = bench(SCRIPT, *SMALL, "-e", "64", "-d", "all", "-o", "all", ranks=2)
    assert run.status == 0, run.err
    pairs = {(case.key["dtype"], case.key["redop"]) for case in run.report.cases}
    assert len(pairs) == 8 * 5 - 4  # whole numbers have no exact average
    assert run.out.count("# n/a: averages of integers are not defined") == 4
    assert {case.check for case in run.report.cases} == {"passed"}


@pytest.mark.smoke
@pytest.mark.parametrize(("groups", "nodes", "ranks"), [("0,3/1,2", 1, 5), ("cross", 2, 2)])
def test_groups(bench: Callable[..., Any], groups: str, nodes: int, ranks: int) -> None:
    flags = ("--collective", "all_reduce,broadcast", "-r", "1", "--groups", groups)
    run = bench(SCRIPT, *SMALL, *flags, nodes=nodes, ranks=ranks)
    assert run.status == 0, run.err
    assert {case.check for case in run.report.cases} == {"passed"}
    assert {tuple(case.ranks) for case in run.report.cases} == {(0, 1, 2, 3)}
    assert len(run.report.cases[0].metrics["in_place_group_times_s"]) == 2
    assert f"# all_reduce float32 sum, {groups} (2 ranks)" in run.out


@pytest.mark.smoke
def test_a_limit_and_a_lower_bound_through_cold_buffers(bench: Callable[..., Any]) -> None:
    flags = ("--collective", "all_to_all", "-d", "float,double", "--limit", "5", "-b", "6400")
    run = bench(SCRIPT, *SHORT, *flags, "--min-busbw", "1e9", ranks=3)
    sizes = [(c.key["size_bytes"], c.key["count"], c.check) for c in run.report.cases]
    assert sizes == [(6396, 533, "passed"), (6384, 266, "passed")]
    assert {case.key["caches"] for case in run.report.cases} == {"cold"}
    m = run.report.cases[1].metrics
    assert m["efficiency"] == m["out_of_place_busbw_gb_per_s"] / 5
    assert "% of the limit" in run.out
    assert run.status == 1
    assert "all_to_all float32: busbw is " in run.err
    assert "under 0.9 of --min-busbw 1e+09" in run.err


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (("-e", "64T"), "lower -e"),
        (("--groups", "0,1", "-c", "0"), "expected world, node, cross or disjoint groups"),
        (("--root", "1", "--collective", "all"), "--root: broadcast expected a rank within its"),
    ],
)
def test_mistakes(bench: Callable[..., Any], flags: tuple[str, ...], text: str) -> None:
    run = bench(SCRIPT, *flags, ranks=0)
    assert run.status == 2
    assert text in run.err
    assert run.err.count("\n") == 1


@pytest.mark.faults
def test_one_wrong_value_is_counted_in_every_operation(bench: Callable[..., Any]) -> None:
    """In place and out of place one each, in each of 4 calls. Rank 1 is the root, it receives."""
    flags = ("--collective", "all", "-d", "bfloat16", "-r", "1", "-e", "64")
    run = bench(SCRIPT, *SHORT, *flags, inject="one-wrong-value")
    assert run.status == 1
    assert [case.key["collective"] for case in run.report.cases] == list(OPERATIONS)
    for case in run.report.cases:
        variants, m = OPERATIONS[case.key["collective"]].variants, case.metrics
        assert [m[f"{v}_wrong"] for v in variants] == [case.key["calls"]] * len(variants), case
        assert case.check == f"failed: {m['wrong']} wrong values"
    assert " FAILED\n" in run.out


@pytest.mark.faults
def test_a_rank_that_does_not_take_part(bench: Callable[..., Any]) -> None:
    flags = ("-d", "bfloat16", "-o", "sum,avg,max", "-b", "6400")
    run = bench(SCRIPT, *SMALL, *flags, inject="left-out", ranks=3)
    assert run.status == 1
    assert [case.key["redop"] for case in run.report.cases] == ["sum", "avg", "max"]
    assert all(case.metrics["in_place_wrong"] > 100 for case in run.report.cases)
