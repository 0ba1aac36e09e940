"""node_check.py as its user runs it; tests/pure/test_node_check.py has its judgement."""

import os
import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.pure.reports import run as analyse

SCRIPT = "benchmarks/node_check.py"
# no neighbour slows a rank down to a thirtieth: what such a margin names was planted
SURE = ("--iters", "6", "--margin", "30")


@pytest.mark.smoke
def test_fit(bench: Callable[..., Any]) -> None:
    """Two nodes of two ranks: all that there is to measure, and to export."""
    run = bench(SCRIPT, "--budget", "100", *SURE, nodes=2)
    assert run.status == 0, run.out + run.err
    last = run.out.splitlines()[-1]
    assert re.fullmatch(r"# fit: 2 nodes, 4 ranks, \d+ s of 100", last)
    assert "left out" not in run.out
    assert {case.check for case in run.report.cases} == {"passed"}
    ranks, together = (
        [case for case in run.report.cases if "rank" in case.key and case.key["probe"] == probe]
        for probe in ("each rank alone", "all ranks together")
    )
    assert [case.key["rank"] for case in ranks] == [0, 1, 2, 3]
    assert len({case.metrics["bits"] for case in ranks}) == 1
    for case in ranks:
        assert [*case.samples_s] == ["matmul_fp32", "copy", "launch"]
        assert [len(rows) for rows in case.samples_s.values()] == [1, 1, 1]
        assert case.metrics["matmul_fp32_s"] <= case.metrics["matmul_fp32_sustained_s"]
    names = ["all_reduce_inside", "all_reduce_between"]
    assert [[*case.samples_s] for case in together] == [names] * 4
    assert {name for case in ranks for name in case.metrics if name == "group_s"} == {"group_s"}
    start = run.out.splitlines()[-2]
    assert re.match(
        "# start-up: .* to make the group .*; rendezvous .*, others waited up to", start
    )
    a, b, c, d = (case.metrics["all_reduce_inside_s"] for case in together)
    assert (a, c) == (b, d)  # the slowest rank's, of nodes and of rails
    a, b, c, d = (case.metrics["all_reduce_between_s"] for case in together)
    assert (a, b) == (c, d)
    assert {case.key["nodes"] for case in run.report.cases} == {2}
    assert "\nlinks\n\n2 rounds, messages of 131,072 bytes\n" in run.out
    assert run.out.count("+-%") == 2  # alone and together
    first = [case for case in run.report.cases if case.key["attempt"] == 1]
    links = [link for case in first for link in case.metrics.get("links", [])]
    assert [link[:2] for link in links] == [[0, 1], [2, 3], [0, 2], [1, 3]]
    exported = analyse("export.py", str(run.path), "--to", "csv")
    assert exported.returncode == 0, exported.stderr
    assert "copy_bytes_per_s" in exported.stdout


@pytest.mark.smoke
def test_a_budget_that_is_too_small(bench: Callable[..., Any]) -> None:
    run = bench(SCRIPT, "--budget", "0.1", ranks=0)
    assert run.status == 2
    assert "--budget 0.1 ends before the first case; e.g. --budget 60" in run.err
    assert run.report.cases == []


@pytest.mark.faults
def test_a_rank_at_half_speed_is_named(bench: Callable[..., Any]) -> None:
    run = bench(SCRIPT, "--margin", "0.6", ranks=4, inject="half-speed,quiet")
    assert run.status == 1, run.out + run.err
    assert "# each rank alone again, for rank 1\n" in run.out
    assert "# slow rank 1 on " in run.out
    assert run.out.splitlines()[-1].startswith("# not fit: rank 1 on ")
    assert "error: not fit: rank 1 on " in run.err
    assert run.reason == run.out.splitlines()[-1].removeprefix("# ")


@pytest.mark.faults
def test_beside_other_programs_nobody_is_called_slow(bench: Callable[..., Any]) -> None:
    """What is wrong is wrong all the same."""
    run = bench(SCRIPT, "--margin", "0.6", ranks=4, inject="half-speed,neighbours")
    cores = len(os.sched_getaffinity(0))
    verdict = f"cannot be told: other programs took {0.8 * cores:.1f} of {cores} cores"
    assert run.status == 1  # of torchrun; its summary has that of the ranks
    assert "exitcode  : 4 " in run.err
    assert "# slow rank 1 on " in run.out
    assert run.out.splitlines()[-1] == f"# {verdict}"
    assert run.reason == verdict
    assert run.report.status == "complete"
    run = bench(SCRIPT, *SURE, "--resume", ranks=4, inject="quiet")  # measures all again
    assert run.status == 0
    assert run.out.splitlines()[-1].startswith("# fit: ")
    run = bench(SCRIPT, "--min-tflops", "1000", *SURE, inject="wrong-sum,neighbours")
    assert "exitcode  : 1 " in run.err
    assert re.search("# not fit: rank [01] on ", run.out.splitlines()[-1])


@pytest.mark.faults
def test_wrong_numbers_and_limits_are_named(bench: Callable[..., Any]) -> None:
    """Rank 1 computes another product than two others, and a wrong sum; nobody is fast enough."""
    run = bench(SCRIPT, "--min-tflops", "1000", *SURE, ranks=3, inject="wrong-product,wrong-sum")
    assert run.status == 1, run.out + run.err
    lines = [line for line in run.out.splitlines() if line.startswith("# wrong ")]
    assert lines[0].startswith("# wrong rank 1 on ")
    assert lines[0].endswith(" are those of 1 of 3 of its kind")
    assert lines[-1].startswith("# wrong rank 1 on ")
    assert lines[-1].endswith(": a wrong sum of all_reduce_inside")
    assert run.out.splitlines()[-1].startswith("# not fit: rank 1 on ")
    others = [case.check for case in run.report.cases if case.key.get("rank") in (0, 2)]
    assert others == ["passed"] * 6  # alone, alone again, together
    assert "# each rank alone again, for rank 0, rank 1, rank 2\n" in run.out
    assert "matmul fp32 flop per s " in run.out
    assert ", under 1e+15\n" in run.out


@pytest.mark.faults
def test_a_rank_that_hangs_is_named(bench: Callable[..., Any]) -> None:
    run = bench(SCRIPT, *SURE, "--timeout", "6", inject="stuck-product")
    assert run.status != 0
    assert "HANG: no progress for 6 s\nrank 1 on " in run.err
    assert "case 'each rank alone'" in run.err
