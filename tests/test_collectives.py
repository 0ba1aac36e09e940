"""collectives.py under torchrun. tests/pure/test_collectives.py tests its arithmetic."""

import json
import re

import pytest

from benchmarks.collectives import OPERATIONS
from tests.process import Bench

SCRIPT = "benchmarks/collectives.py"
SHORT = ("-b", "64", "-e", "64", "-n", "2", "-w", "1", "--iters", "6")


@pytest.mark.smoke
@pytest.mark.parametrize("ranks", [1, 3])
def test_every_operation(bench: Bench, ranks: int) -> None:
    flags = ("--collective", "all", "-r", str(ranks - 1), "--cache-warm")
    run = bench(SCRIPT, *SHORT, *flags, ranks=ranks)
    names = [name for name in OPERATIONS if name != "sendrecv" or ranks > 1]
    assert [case.key["collective"] for case in run.report.cases] == names
    for case in run.report.cases:
        variants = OPERATIONS[case.key["collective"]].variants
        assert case.check == "passed", case
        assert list(case.samples_s) == ["step", *variants[1:]]
        assert [len(rows) for rows in case.samples_s["step"]] == [6] * ranks
    assert ("# n/a: gloo cannot send to the same rank" in run.out) == (ranks == 1)
    assert re.search("# Out of bounds values : 0 OK\n# Avg bus bandwidth    : ", run.out)
    *answers, start = run.report.end["answer"]
    assert len(answers) == len(names)
    assert re.match(r"start-up: .* to create the group \(rank . on .*, first collective ", start)
    made_the_group = ["group_s" in case.metrics for case in run.report.cases]
    assert made_the_group == [True] + [False] * (len(names) - 1)


@pytest.mark.smoke
def test_types_and_reductions(bench: Bench) -> None:
    run = bench(SCRIPT, *SHORT, "--iters", "1", "-d", "half,uint8,int64", "-o", "all")
    pairs = {(case.key["dtype"], case.key["redop"]) for case in run.report.cases}
    assert len(pairs) == 3 * 5 - 2
    assert run.out.count("# n/a: averages of integers are not defined") == 2
    assert {case.check for case in run.report.cases} == {"passed"}


@pytest.mark.smoke
def test_groups_a_limit_and_a_lower_bound(bench: Bench) -> None:
    flags = ("--collective", "all_gather", "-d", "half", "--groups", "0,3/1,2", "--limit", "5")
    run = bench(SCRIPT, *SHORT, *flags, "--min-busbw", "1e9", ranks=5, status=1)
    (case,) = run.report.cases
    assert (case.check, case.ranks, case.key["caches"]) == ("passed", [0, 1, 2, 3], "cold")
    assert len(case.metrics["in_place_group_times_s"]) == 2
    assert "# all_gather float16, 0,3/1,2 (2 ranks)" in run.out
    assert "% of the limit" in run.out
    assert "is below 90% of --min-busbw 1e+09" in run.err


@pytest.mark.smoke
def test_sizes_share_a_total_time(bench: Bench) -> None:
    """No interval is as narrow as 1e-6, so each size is visited three times. Samples add up."""
    limits = ("--total-seconds", "1000", "--max-seconds", "0.5", "--target-ci", "1e-6")
    run = bench(SCRIPT, "-b", "8", "-e", "32", *limits)
    lines = run.path.read_text().splitlines()
    visits = [json.loads(line) for line in lines if '"key"' in line]
    assert [v["key"]["size_bytes"] for v in visits] == [8, 16, 32] * 3
    for first, second in zip(visits[:6], visits[3:], strict=True):
        count = len(first["samples_s"]["step"][0])
        assert second["samples_s"]["step"][0][:count] == first["samples_s"]["step"][0]
        assert len(second["samples_s"]["out_of_place"][1]) == sum(second["rounds"]) > count
    rows = re.findall(r"^ +(\d+) +\d+ +float32", run.out, re.M)
    assert rows == ["8", "16", "32"]  # each once, with the samples of all visits
    assert len(run.report.cases) == 3


@pytest.mark.smoke
def test_a_size_that_does_not_fit(bench: Bench) -> None:
    (line,) = bench(SCRIPT, "-e", "64T", ranks=0, status=2).err.splitlines()
    assert "lower -e" in line


@pytest.mark.faults
def test_one_wrong_value_is_counted_in_every_operation(bench: Bench) -> None:
    """In each call, in place and out of place. Rank 1 is the root, so that it receives."""
    flags = ("--collective", "all", "-d", "bfloat16", "-r", "1")
    run = bench(SCRIPT, *SHORT, *flags, inject="one-wrong-value", status=1)
    assert [case.key["collective"] for case in run.report.cases] == list(OPERATIONS)
    for case in run.report.cases:
        variants, m = OPERATIONS[case.key["collective"]].variants, case.metrics
        assert [m[f"{v}_wrong"] for v in variants] == [case.key["calls"]] * len(variants), case
        assert case.check == f"failed: {m['wrong']} wrong values"
    assert " FAILED\n" in run.out


@pytest.mark.faults
def test_a_rank_that_does_not_take_part(bench: Bench) -> None:
    flags = ("-d", "bfloat16", "-o", "sum,avg,max", "-b", "6400", "-e", "6400")
    run = bench(SCRIPT, *SHORT, *flags, inject="left-out", ranks=3, status=1)
    assert [case.key["redop"] for case in run.report.cases] == ["sum", "avg", "max"]
    assert all(case.metrics["in_place_wrong"] > 100 for case in run.report.cases)


BESIDE = ("-b", "1K", "-e", "1K", "-w", "1", "--iters", "6", "--beside")


@pytest.mark.smoke
def test_two_concurrent_collectives(bench: Bench) -> None:
    """Each alone and both together, interleaved within a case, for all operations."""
    names = [name for name in OPERATIONS if name != "sendrecv"]
    run = bench(SCRIPT, *BESIDE, "all_to_all:4K", "--collective", ",".join(names), ranks=3)
    cases = run.report.cases
    assert [case.key["collective"] for case in cases] == names
    for case in cases:
        assert case.check == "passed", case
        assert list(case.samples_s) == ["step", "alone", "beside"]
        assert (case.key["beside"], case.key["beside_bytes"]) == ("all_to_all", 4092)
        both, longer = (case.metrics[f"{name}_time_s"].value for name in ("both", "longer"))
        assert case.metrics["both_over_longer"].value == pytest.approx(both / longer)
    assert "# Avg bus bandwidth" not in run.out
    run = bench(SCRIPT, *BESIDE, "all_reduce", "--groups", "0,3/1,2", ranks=4)
    (case,) = run.report.cases
    assert (case.check, case.key["beside_bytes"]) == ("passed", 1024), run.err


@pytest.mark.faults
@pytest.mark.parametrize(
    ("name", "beside"), [("all_reduce", "all_gather"), ("all_gather", "all_reduce")]
)
def test_a_wrong_value_of_either_is_found(bench: Bench, name: str, beside: str) -> None:
    flags = (*BESIDE, f"{beside}:8K", "--collective", name, "-b", "8K", "-e", "8K")
    run = bench(SCRIPT, *flags, inject="wrong-sum", status=1)
    assert run.report.cases[0].check == "failed: 1 wrong values"
