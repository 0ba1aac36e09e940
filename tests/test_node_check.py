"""node_check.py in full runs; tests/pure/test_node_check.py tests its verdicts."""

import os
import re
import socket
from pathlib import Path

import pytest

from tests.process import Bench
from tests.pure.reports import run as analyse

SCRIPT = "benchmarks/node_check.py"
# other processes do not slow a rank down 30 times: only a planted fault exceeds this margin
SURE = ("--iters", "6", "--margin", "30")


@pytest.mark.smoke
def test_fit(bench: Bench, tmp_path: Path) -> None:
    """Two nodes of two ranks: everything is measured, and export.py reads it."""
    bad = tmp_path / "bad.txt"
    flags = ("--budget", "200", *SURE, "--exclude-file", str(bad))
    run = bench(SCRIPT, *flags, nodes=2, inject="quiet")
    assert bad.read_text() == ""
    *_, start, last = run.out.splitlines()
    few = "4 ranks share 2 cores of .*: links and all_reduce slower by less than 10 times are not"
    assert re.fullmatch(rf"# fit: 2 nodes, 4 ranks, \d+ s of 200(; {few} judged)?", last)
    assert re.match("# start-up: .* to create the group .*; rendezvous .*, other ranks wait", start)
    assert "not measured within" not in run.out
    assert {(case.check, case.key["nodes"]) for case in run.report.cases} == {("passed", 2)}
    first = [case for case in run.report.cases if case.key["attempt"] == 1]
    ranks = [case for case in first if "rank" in case.key]
    assert [case.key["rank"] for case in ranks] == [0, 1, 2, 3] * 2
    alone, together = ranks[:4], ranks[4:]
    assert len({case.metrics["bits"] for case in alone}) == 1
    assert {tuple(case.samples_s) for case in alone} == {("matmul_fp32", "copy", "launch")}
    a, b, c, d = (case.metrics["all_reduce_inside_s"] for case in together)
    assert (a, c) == (b, d)  # each pair has the value of its slowest rank
    a, b, c, d = (case.metrics["all_reduce_between_s"] for case in together)
    assert (a, b) == (c, d)
    assert "\nlinks\n\n2 rounds, messages of up to 4,194,304 bytes, " in run.out
    links = [link[:2] for case in first for link in case.metrics.get("links", [])]
    assert links == [[0, 1], [2, 3], [0, 2], [1, 3]]
    exported = analyse("export.py", str(run.path), "--to", "csv")
    assert "copy_bytes_per_s" in exported.stdout


@pytest.mark.smoke
def test_a_budget_too_small_for_one_case(bench: Bench) -> None:
    run = bench(SCRIPT, "--budget", "0.1", ranks=0, status=2)
    assert "--budget 0.1 ends before the first case; e.g. --budget 60" in run.err


@pytest.mark.faults
def test_a_slow_rank_is_named(bench: Bench, tmp_path: Path) -> None:
    """At half speed while other processes are busy: there is no verdict, and no file is written.
    With --resume everything is measured again."""
    bad = tmp_path / "bad.txt"
    flags = ("--budget", "60", "--exclude-file", str(bad), *SURE)
    run = bench(SCRIPT, *flags, ranks=4, inject="half-speed,neighbours", status=1)
    cores = len(os.sched_getaffinity(0))
    verdict = f"no verdict: other processes used {0.8 * cores:.1f} of {cores} cores"
    assert "exitcode  : 4 " in run.err  # of the ranks, in torchrun's summary
    assert run.out.splitlines()[-1].startswith(f"# {verdict}")
    assert run.reason.startswith(verdict)
    assert run.report.status == "complete"
    assert not bad.exists()
    run = bench(SCRIPT, *flags, "--resume", ranks=4, inject="fiftieth-speed,quiet", status=1)
    assert "# each rank alone again, for rank 1\n" in run.out
    assert run.out.splitlines()[-1].startswith("# not fit: rank 1 on ")
    assert bad.read_text() == f"{socket.gethostname()}\n"
    assert run.reason == run.out.splitlines()[-1].removeprefix("# ")
    # the report has nothing of the first run, whose second attempts would count as this run's
    assert (tmp_path / "a folder" / "report.jsonl.bak").exists()
    assert {case.measured_at for case in run.report.cases} == {run.report.started_at}
    assert {case.key["attempt"] for case in run.report.cases} == {1, 2}


@pytest.mark.faults
def test_wrong_numbers_and_limits_are_named(bench: Bench) -> None:
    """Rank 1 computes a wrong product and a wrong sum, which other busy processes do not excuse.
    No rank is fast enough."""
    faults = "wrong-product,wrong-sum,neighbours"
    run = bench(SCRIPT, "--min-tflops", "1000", *SURE, ranks=3, inject=faults, status=1)
    assert "exitcode  : 1 " in run.err
    wrong = [line for line in run.out.splitlines() if line.startswith("# wrong ")]
    assert {line.partition(" on ")[0] for line in wrong} == {"# wrong rank 1"}
    shared = ": only 1 of 3 ranks with the same device and number of threads computed these results"
    assert shared in wrong[0]
    assert wrong[-1].endswith(": a wrong sum of all_reduce_inside")
    assert run.out.splitlines()[-1].startswith("# not fit: rank 1 on ")
    assert "# each rank alone again, for rank 0, rank 1, rank 2\n" in run.out
    assert " TFLOP/s, below 1000\n" in run.out
