"""parameter_server.py as its user runs it: routes, placements, and faults that it must name."""

from collections.abc import Callable
from typing import Any

import psutil
import pytest

SCRIPT = "benchmarks/parameter_server.py"
SMALL = "--num-embeddings 32 --embedding-dim 16 --dense-layers 3 --dense-size 16 --classes 8"
# buckets of a layer each, and 5 batches that no number of trainers but 1 and 5 shares out evenly
FEW = "--sample-count 20 --batch-size 4 --bucket-size 0.001"
TINY = (*SMALL.split(), *FEW.split(), "--device", "cpu", "--warmup-iters", "1")
SHORT = (*TINY, "--iters", "6")
LAYERS = (16 * 16 + 16, 16 * 16 + 16, 16 * 8 + 8)  # parameters of each


def label(case: Any) -> str:
    return " ".join(filter(None, (case.key[n] for n in ("route", "server", "placement"))))


def checks(run: Any) -> dict[str, str]:
    return {label(case): case.check for case in run.report.cases}


@pytest.mark.smoke
def test_four_processes(bench: Callable[..., Any]) -> None:
    """2 trainers, a server and the master; the names of PyTorch's hooks; an epoch of 3 steps."""
    flags = (*TINY, "--epochs", "3", "--servers", "running")
    run = bench(SCRIPT, *flags, "--ddp_hook", "allreduce_hook,rpc_hook,sparse_rpc_hook", ranks=4)
    assert run.status == 0, run.err
    assert run.err == "" or "OMP_NUM_THREADS" in run.err
    assert "an epoch is 3 steps of 4 samples" in run.out
    assert "drift apart" not in run.out
    cases = {label(case): case for case in run.report.cases}
    through = ["rpc running grouped", "sparse_rpc running grouped"]
    assert list(cases) == ["allreduce", *through]
    for name, case in cases.items():
        assert case.check == "passed"
        assert case.ranks == [0, 1]
        assert [len(row) for row in case.samples_s["step"]] == [9, 9]
        trainers = case.metrics["trainers"]
        assert list(trainers) == ["trainer0", "trainer1", "all"]
        assert set(trainers["all"]) == {"forward", "backward", "batch", "hook dense", "hook sparse"}
        # only timed steps count: 9 of each trainer
        assert trainers["trainer1"]["forward"]["count"] == 9
        assert trainers["all"]["hook sparse"]["count"] == 18
        assert trainers["all"]["hook dense"]["count"] % 18 == 0
        # within a step: no trainer's longest bucket takes longer than its longest backward
        longest = {name: found["max_s"] for name, found in trainers["all"].items()}
        assert 0 < longest["hook dense"] <= longest["backward"] <= longest["batch"]
        assert case.metrics["hook_p50_s"] > 0
        assert ("servers" in case.metrics) == (name in through)
        assert case.metrics["samples_per_s"] == pytest.approx(
            2 * 4 / case.metrics["step_time_p50_s"]
        )
    # a bucket for each layer and the embedding of each of 9 steps; of sparse_rpc the embedding's
    dense = cases["allreduce"].metrics["trainers"]["trainer0"]["hook dense"]["count"]
    counts = [cases[name].metrics["servers"]["all"]["straggler"]["count"] for name in through]
    assert counts == [dense + 9, 9]
    # 2 trainers: dense gradients there and back by either route
    moved = [cases[name].metrics["bytes_per_step"] for name in through]
    assert moved[0] == moved[1] > 2 * 4 * sum(LAYERS)
    again = bench(SCRIPT, *flags, "--routes", "allreduce,rpc,sparse_rpc", "--resume", ranks=4)
    assert again.status == 0, again.err
    assert [c.samples_s for c in again.report.cases] == [c.samples_s for c in cases.values()]


@pytest.mark.smoke
def test_five_processes_and_two_servers(bench: Callable[..., Any]) -> None:
    """2 trainers with a server each, both placements; settings of RPC."""
    settings = ("--rpc-threads", "2", "--rpc_transports", "uv", "--rpc_timeout", "60")
    flags = (*SHORT, *settings, "--routes", "rpc,sparse_rpc", "--servers", "batch")
    run = bench(SCRIPT, *flags, "--nserver", "2", ranks=5)
    assert run.status == 0, run.err
    assert "drift apart" in run.out
    placed = ("grouped", "sharded")
    names = [f"{route} batch {how}" for route in ("rpc", "sparse_rpc") for how in placed]
    assert checks(run) == dict.fromkeys(names, "passed")
    for case in run.report.cases:
        key, servers = case.key, case.metrics["servers"]
        assert (key["rpc_threads"], key["rpc_transports"]) == (2, "uv")
        counts = [servers[name].get("batch", {"count": 0})["count"] for name in servers]
        assert counts[0] + counts[1] == counts[2]
        if key["placement"] == "grouped":  # every bucket of either trainer
            assert counts[0] == counts[1]
        elif key["route"] == "rpc":  # spread over both
            assert min(counts) > 0


@pytest.mark.smoke
def test_seven_processes(bench: Callable[..., Any]) -> None:
    """4 trainers on 2 servers, checked beside plain DDP of two trainers; a dense embedding."""
    flags = (*SHORT, "--routes", "allreduce,rpc", "--servers", "running", "--dense-embedding")
    run = bench(SCRIPT, *flags, "--nserver", "2", ranks=7)
    assert run.status == 0, run.err
    assert list(checks(run).values()) == ["passed"] * 3
    # everything is dense: through a server S both ways, by an all-reduce of 4 half as much again
    size = 4 * (32 * 16 + sum(LAYERS))
    moved = [case.metrics["bytes_per_step"] for case in run.report.cases]
    assert moved == pytest.approx([3 * size, 2 * size, 2 * size])


@pytest.mark.smoke
@pytest.mark.oldest
def test_two_routes_over_two_groups(bench: Callable[..., Any]) -> None:
    """Torch 2.11 hung where a later case made a second group over the same ranks."""
    run = bench(SCRIPT, *SHORT, "--routes", "allreduce,hybrid", "--timeout", "40", ranks=5)
    assert run.status == 0, run.err
    assert checks(run) == {"allreduce": "passed", "hybrid": "passed"}
    moved = [case.metrics["bytes_per_step"] for case in run.report.cases]
    assert moved[0] == moved[1]


@pytest.mark.faults
def test_a_wrong_answer_of_a_server(bench: Callable[..., Any]) -> None:
    """One thousandth too much; and the sweep goes on with what needs no server."""
    flags = (*SHORT, "--routes", "sparse_rpc,rpc,allreduce", "--servers", "batch")
    run = bench(SCRIPT, *flags, ranks=4, inject="wrong-answer")
    assert run.status != 0
    found = checks(run)
    assert found["allreduce"] == "passed"
    for name, part in (("sparse_rpc", "embedding"), ("rpc", "dense")):
        check = found[f"{name} batch grouped"]
        assert check.startswith("failed: the gradient of "), check
        assert f"of {part}." in check or name == "rpc"
        assert "is off plain DDP's by 0.001 (rank 0)" in check
    assert run.report.status == "failed"


@pytest.mark.faults
def test_a_replica_that_drifts(bench: Callable[..., Any]) -> None:
    """By less than the check beside plain DDP sees; bit for bit it shows."""
    flags = (*SHORT, "--routes", "rpc", "--servers", "running", "--placement", "sharded")
    run = bench(SCRIPT, *flags, "--nserver", "2", ranks=5, inject="drifting-replica")
    assert run.status != 0
    assert checks(run) == {
        "rpc running sharded": "failed: embedding: after the steps the parameters of rank 1 differ "
        "from rank 0's"
    }


@pytest.mark.faults
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("server-raises", "server0: OutOfMemoryError('injected: out of memory')"),
        ("step-raises", "RuntimeError: injected: no kernel for this step"),
    ],
)
def test_nobody_waits_long_for_one_that_failed(
    bench: Callable[..., Any], fault: str, reason: str
) -> None:
    """A server or a trainer fails: the others wait for its gradients for 2 s; the run goes on."""
    flags = (*TINY, "--iters", "60", "--routes", "rpc,hybrid", "--servers", "running,batch")
    patience = ("--straggler-timeout", "2", "--timeout", "60")
    run = bench(SCRIPT, *flags, *patience, ranks=4, inject=fault)
    assert run.status != 0
    found = checks(run)
    assert list(found) == ["rpc running grouped", "rpc batch grouped", "hybrid"]
    assert reason in found.pop("rpc running grouped")
    assert set(found.values()) == {"passed"}, found
    assert "HANG" not in run.err


@pytest.mark.faults
@pytest.mark.parametrize(("fault", "rank"), [("dies", 1), ("server-dies", 2), ("server-stops", 2)])
def test_a_process_that_is_gone(start: Callable[..., Any], fault: str, rank: int) -> None:
    """A trainer, or the server: who and where within the timeout, and no process is left."""
    flags = (*TINY, "--iters", "60", "--routes", "rpc", "--servers", "running", "--timeout", "20")
    process = start(SCRIPT, *flags, ranks=4, inject=fault)
    ranks = process.until(lambda: len(found := process.ranks()) == 4 and found)
    assert process.wait(120) != 0
    if fault == "server-stops":
        hang = process.err[process.err.index("HANG: no progress for 20 s") :]
        assert hang.splitlines()[1].startswith("rank 2 on ")
        assert "does not answer" in hang.splitlines()[1]
        assert "rpc running grouped" in hang
    else:
        assert f"rank      : {rank} (local_rank: {rank})" in process.err  # torchrun's summary
        assert "exitcode  : -9" in process.err
    _, alive = psutil.wait_procs(ranks.values(), timeout=5)
    assert not alive
