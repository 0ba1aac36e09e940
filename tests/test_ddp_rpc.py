"""ddp_rpc.py under torchrun, and faults that its check against one process finds."""

import re

import pytest

from benchmarks import ddp_rpc
from tests.process import RPC_CLOSED, Bench

SCRIPT = "benchmarks/ddp_rpc.py"
SHORT = ("--device", "cpu", "--epochs", "3", "--warmup-cycles", "1")


@pytest.mark.smoke
@pytest.mark.oldest
def test_five_processes(bench: Bench) -> None:
    """2 trainers, and 2 servers whose sparse tables have 512 columns together: no projection."""
    flags = ("--number-trainers", "2", "--number_ps", "2", "--sparse", "--embedding-dim", "256")
    run = bench(SCRIPT, *SHORT, *flags, "--lookup", "all", ranks=5)
    assert RPC_CLOSED.sub("", run.err) == "" or "OMP_NUM_THREADS" in run.err
    assert "2 trainers, 2 servers with a sparse table of 300 x 256 each\nrpc threads 2" in run.out
    ways = [(how, way) for how in ("parallel", "sequential") for way in ("distributed", "manual")]
    assert [(c.key["lookup"], c.key["autograd"]) for c in run.report.cases] == ways
    for case in run.report.cases:
        m = case.metrics
        assert (case.check, case.ranks) == ("passed", [0, 1])
        assert [len(row) for row in case.samples_s["step"]] == [3] * 2
        # the phases of a batch take at most a tenth of a trainer's mean epoch (there are gaps
        # between them on a busy machine)
        mean = sum(map(sum, case.samples_s["step"])) / 6
        phases = [m[f"{name}_s"] for name in ddp_rpc.PHASES]
        assert min(phases) > 0
        assert 10 * sum(phases) <= 1.001 * mean
        assert m["samples"] == sum(trainer["samples"] for trainer in m["trainers"])
        slowest = max(trainer["epoch_s"].value for trainer in m["trainers"])
        assert m["epoch_s"].value >= slowest
    rows = re.findall(r"^(All|Trainer\d) ", run.out, re.MULTILINE)
    assert rows == ["All", "Trainer0", "Trainer1"] * 4


@pytest.mark.faults
@pytest.mark.parametrize(
    ("fault", "autograd"), [("wrong-lookup", "distributed"), ("lost-gradient", "manual")]
)
def test_the_check_finds_wrong_results(bench: Bench, fault: str, autograd: str) -> None:
    run = bench(SCRIPT, *SHORT, "--autograd", autograd, ranks=4, inject=fault, status=1)
    (case,) = run.report.cases
    off = re.fullmatch(
        r"failed: after 3 steps the parameters differ from those of a single process by (\S+) of "
        r"their change \(limit 1e-06\)",
        case.check,
    )
    assert off
    assert float(off[1]) > 1e-6
    assert case.check in run.out


@pytest.mark.faults
def test_a_trainer_that_fails(bench: Bench) -> None:
    """The other trainer does not wait for it, and the next case is measured."""
    flags = ("--autograd", "manual,distributed", "--timeout", "60")
    run = bench(SCRIPT, *SHORT, *flags, ranks=4, inject="step-raises", status=1)
    first, second = run.report.cases
    assert first.check == "failed: RuntimeError: injected: no kernel for this step (rank 1)"
    assert f"\n{first.name}  failed: RuntimeError: injected" in run.out
    assert (second.check, run.report.status) == ("passed", "failed")
