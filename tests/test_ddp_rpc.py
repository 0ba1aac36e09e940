"""ddp_rpc.py as its user runs it, and what its check against one process finds."""

import re
from collections.abc import Callable
from typing import Any

import pytest

SCRIPT = "benchmarks/ddp_rpc.py"
SHORT = ("--device", "cpu", "--epochs", "6", "--warmup-cycles", "1")
PARTS = ("lookup", "forward", "backward", "exchange", "step")


def checks(run: Any) -> dict[str, str]:
    return {f"{c.key['lookup']} {c.key['autograd']}": c.check for c in run.report.cases}


@pytest.mark.smoke
def test_four_processes(bench: Callable[..., Any]) -> None:
    """2 trainers, a server and the master: every way of lookup and autograd."""
    run = bench(SCRIPT, *SHORT, "--lookup", "all", ranks=4)
    assert run.status == 0, run.err
    assert run.err == "" or "OMP_NUM_THREADS" in run.err
    assert "2 trainers, 1 servers with a table of 300 x 64 each" in run.out
    assert checks(run) == dict.fromkeys(
        (
            *("parallel distributed", "parallel manual"),
            *("sequential distributed", "sequential manual"),
        ),
        "passed",
    )
    for case in run.report.cases:
        m = case.metrics
        assert case.ranks == [0, 1]
        assert [len(row) for row in case.samples_s["epoch"]] == [6, 6]
        assert [name for name in m if name.endswith("_s")][-5:] == [f"{p}_s" for p in PARTS]
        # the parts of a batch add up to a tenth of the mean epoch of a trainer
        mean = sum(map(sum, case.samples_s["epoch"])) / 12
        assert 10 * sum(m[f"{name}_s"] for name in PARTS) == pytest.approx(mean, rel=0.05)
        assert m["samples"] == sum(trainer["samples"] for trainer in m["trainers"]) == 140
        assert m["samples_per_s"] == pytest.approx(140 / m["epoch_time_p50_s"])
        slowest = max(trainer["epoch_time_p50_s"] for trainer in m["trainers"])
        assert m["epoch_time_p50_s"] >= slowest
    rows = [line.split()[0] for line in run.out.splitlines() if "/s" not in line and line.strip()]
    assert [row for row in rows if row in ("Trainer0", "Trainer1", "All")] == [
        *("Trainer0", "Trainer1", "All") * 4
    ]


@pytest.mark.smoke
@pytest.mark.oldest
@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        (5, ("--number-trainers", "2", "--number_ps", "2", "--sparse", "--embedding-dim", "256")),
        (7, ("--number-trainers", "3", "--number-ps", "3", "--number-embeddings", "70")),
    ],
)
def test_any_number_of_servers(
    bench: Callable[..., Any], ranks: int, flags: tuple[str, ...]
) -> None:
    """Two tables that join to 512 columns, sparse; three that do not: PyTorch's script crashed."""
    run = bench(SCRIPT, *SHORT, *flags, ranks=ranks)
    assert run.status == 0, run.err
    assert checks(run) == {"parallel distributed": "passed", "parallel manual": "passed"}


@pytest.mark.faults
@pytest.mark.parametrize(
    ("fault", "wrong"),
    [
        # a server's table answers with a millionth too much: both ways of training are off
        ("wrong-lookup", ("distributed", "manual")),
        ("lost-gradient", ("manual",)),
        # distributed autograd keeps gradients in its context, where this fault does not reach
        ("wrong-average", ("manual",)),
    ],
)
def test_the_check_sees(bench: Callable[..., Any], fault: str, wrong: tuple[str, ...]) -> None:
    run = bench(SCRIPT, *SHORT, ranks=4, inject=fault)
    assert run.status != 0
    found = checks(run)
    for way in ("distributed", "manual"):
        check = found[f"parallel {way}"]
        if way not in wrong:
            assert check == "passed"
            continue
        off = re.fullmatch(
            r"failed: after 3 steps the tables (\S+) and the dense weights (\S+) of their change "
            r"away from a single process \(at most 1e-06\)",
            check,
        )
        assert off, check
        assert max(float(off[1]), float(off[2])) > 1e-6
        assert check in run.out


@pytest.mark.faults
def test_a_trainer_that_fails(bench: Callable[..., Any]) -> None:
    """The other one does not wait for it, and the next case is measured."""
    flags = ("--autograd", "manual,distributed", "--epochs", "6", "--timeout", "60")
    run = bench(SCRIPT, *flags, "--device", "cpu", ranks=4, inject="step-raises")
    assert run.status != 0
    assert checks(run) == {
        "parallel manual": "failed: RuntimeError: injected: no kernel for this step (rank 1)",
        "parallel distributed": "passed",
    }
    assert run.report.status == "failed"
