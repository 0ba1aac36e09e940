"""ddp_rpc.py as its user runs it, and what its check against one process finds."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks import ddp_rpc

SCRIPT = "benchmarks/ddp_rpc.py"
SHORT = ("--device", "cpu", "--epochs", "6", "--warmup-cycles", "1")
BOTH = ("distributed", "manual")


def checks(run: Any) -> dict[str, str]:
    return {f"{c.key['lookup']} {c.key['autograd']}": c.check for c in run.report.cases}


@pytest.mark.smoke
def test_four_processes(bench: Callable[..., Any]) -> None:
    """2 trainers, a server and the master: every way of lookup and autograd."""
    run = bench(SCRIPT, *SHORT, "--lookup", "all", ranks=4)
    assert run.status == 0, run.err
    assert run.err == "" or "OMP_NUM_THREADS" in run.err
    ways = [f"{how} {way}" for how in ("parallel", "sequential") for way in BOTH]
    assert checks(run) == dict.fromkeys(ways, "passed")
    for case in run.report.cases:
        m = case.metrics
        assert case.ranks == [0, 1]
        assert [len(row) for row in case.samples_s["step"]] == [6, 6]
        # the phases of a batch add up to a tenth of the mean epoch of a trainer
        mean = sum(map(sum, case.samples_s["step"])) / 12
        assert 10 * sum(m[f"{name}_s"] for name in ddp_rpc.PHASES) == pytest.approx(mean, rel=0.05)
        assert m["samples"] == sum(trainer["samples"] for trainer in m["trainers"]) == 140
        assert m["samples_per_s"].value == pytest.approx(140 / m["epoch_s"].value)
        slowest = max(trainer["epoch_s"].value for trainer in m["trainers"])
        assert m["epoch_s"].value >= slowest
    rows = re.findall(r"^(All|Trainer\d) ", run.out, re.MULTILINE)
    assert rows == ["All", "Trainer0", "Trainer1"] * 4
    assert "by lookup parallel, autograd distributed, " in run.out


@pytest.mark.smoke
@pytest.mark.oldest
def test_seven_processes(bench: Callable[..., Any]) -> None:
    """4 trainers, 2 servers whose sparse tables join to 512 columns: no projection."""
    flags = ("--number-trainers", "4", "--number_ps", "2", "--sparse", "--embedding-dim", "256")
    run = bench(SCRIPT, *SHORT, *flags, ranks=7)
    assert run.status == 0, run.err
    assert "4 trainers, 2 servers with a sparse table of 300 x 256 each\nrpc threads" in run.out
    assert checks(run) == {f"parallel {way}": "passed" for way in BOTH}


@pytest.mark.faults
@pytest.mark.parametrize(
    ("fault", "wrong"),
    [
        # a server's table answers with a millionth too much: both ways of training are off
        ("wrong-lookup", BOTH),
        # a server forgets one; distributed autograd does not pass where this fault reaches
        ("lost-gradient", BOTH[1:]),
    ],
)
def test_the_check_sees(bench: Callable[..., Any], fault: str, wrong: tuple[str, ...]) -> None:
    run = bench(SCRIPT, *SHORT, ranks=4, inject=fault)
    assert run.status != 0
    for way in BOTH:
        check = checks(run)[f"parallel {way}"]
        off = re.fullmatch(
            r"failed: after 3 steps the parameters are (\S+) of their change away from a single "
            r"process \(at most 1e-06\)",
            check,
        )
        assert bool(off) == (way in wrong), check
        assert off is None or float(off[1]) > 1e-6
        assert off is None or check in run.out


@pytest.mark.faults
def test_a_trainer_that_fails(bench: Callable[..., Any]) -> None:
    """The other one does not wait for it, and the next case is measured."""
    flags = ("--autograd", "manual,distributed", "--timeout", "60")
    run = bench(SCRIPT, *SHORT, *flags, ranks=4, inject="step-raises")
    assert run.status != 0
    assert "\nlookup parallel, autograd manual  failed: RuntimeError: injected" in run.out
    assert checks(run) == {
        "parallel manual": "failed: RuntimeError: injected: no kernel for this step (rank 1)",
        "parallel distributed": "passed",
    }
    assert run.report.status == "failed"
