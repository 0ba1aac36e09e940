"""parameter_server.py as its user runs it: routes, and faults that it must name."""

from collections.abc import Callable
from typing import Any

import pytest

SCRIPT = "benchmarks/parameter_server.py"
SMALL = "--num-embeddings 32 --embedding-dim 16 --dense-layers 3 --dense-size 16"
# buckets of a layer each, and 5 batches that no number of trainers but 1 and 5 shares out evenly
FEW = "--sample-count 20 --batch-size 4 --bucket-size 0.001"
TINY = (*SMALL.split(), *FEW.split(), "--device", "cpu", "--warmup-iters", "1")


def checks(run: Any) -> dict[str, str]:
    return {case.name: case.check for case in run.report.cases}


@pytest.mark.smoke
@pytest.mark.oldest
def test_five_processes(bench: Callable[..., Any]) -> None:
    """2 trainers, 2 servers and the master; the names of PyTorch's hooks; an epoch of 3 steps.

    Torch 2.11 hung where a later case made a second group over the same ranks.
    """
    flags = (*TINY, "--epochs", "3", "--servers", "running", "--timeout", "40", "--nserver", "2")
    flags += ("--rpc-threads", "2", "--rpc_transports", "uv", "--rpc_timeout", "60")
    hooks = "rpc_hook,allreduce_hook,sparse_rpc_hook,hybrid_hook"
    run = bench(SCRIPT, *flags, "--ddp_hook", hooks, ranks=5)
    assert run.status == 0, run.err
    assert run.err == "" or "OMP_NUM_THREADS" in run.err
    assert "an epoch is 3 steps of 4 samples" in run.out
    through = ["rpc running", "sparse_rpc running"]
    # those without servers first
    assert checks(run) == dict.fromkeys(["allreduce", "hybrid", *through], "passed")
    cases = {case.name: case for case in run.report.cases}
    for name, case in cases.items():
        assert case.ranks == [0, 1]
        trainers = case.metrics["trainers"]
        assert list(trainers) == ["trainer0", "trainer1", "all"]
        # only timed steps count: 9 of each trainer
        assert trainers["trainer1"]["forward"]["count"] == 9
        assert trainers["all"]["hook sparse"]["count"] == 18
        # within a step: no trainer's longest bucket takes longer than its longest backward
        longest = {phase: found["max_s"] for phase, found in trainers["all"].items()}
        assert 0 < longest["hook dense"] <= longest["backward"] <= longest["batch"]
        assert 0 < case.metrics["hook_s"].value <= longest["backward"]
        assert ("servers" in case.metrics) == (name in through)
        step_s = case.metrics["step_s"].value
        assert case.metrics["samples_per_s"].value == pytest.approx(2 * 4 / step_s)
    # a bucket for each layer and the embedding of each of 9 steps, spread over the servers; of
    # sparse_rpc the embedding's
    dense = cases["allreduce"].metrics["trainers"]["trainer0"]["hook dense"]["count"]
    servers = cases["rpc running"].metrics["servers"]
    counts = [servers[name]["straggler"]["count"] for name in ("server0", "server1", "all")]
    assert counts[0] + counts[1] == counts[2] == dense + 9
    assert min(counts) > 0
    assert cases["sparse_rpc running"].metrics["servers"]["all"]["straggler"]["count"] == 9


@pytest.mark.faults
def test_a_wrong_answer_and_a_replica_that_drifts(bench: Callable[..., Any]) -> None:
    """A server answers one thousandth too much. Rank 1 drifts by less than the check of gradients
    sees; bit for bit it shows."""
    flags = (*TINY, "--iters", "6", "--routes", "sparse_rpc,rpc,allreduce", "--servers", "batch")
    run = bench(SCRIPT, *flags, ranks=4, inject="wrong-answer,drifting-replica")
    assert run.status != 0
    found = checks(run)
    differ = "after the steps the parameters of rank 1 differ from rank 0's"
    assert found["allreduce"] == f"failed: {differ}"
    for name, part in (("sparse_rpc batch", "embedding"), ("rpc batch", "")):
        assert found[name].startswith(f"failed: the gradient of {part}")
        assert "is off the trainers' mean by 0.001 (rank 0)" in found[name]
    assert run.report.status == "failed"


@pytest.mark.faults
def test_nobody_waits_long_for_a_server_that_failed(bench: Callable[..., Any]) -> None:
    """Its trainers wait 2 s for the average; the run goes on with the next kind of server."""
    flags = (*TINY, "--iters", "30", "--routes", "rpc", "--straggler-timeout", "2")
    run = bench(SCRIPT, *flags, "--timeout", "60", ranks=4, inject="server-raises")
    assert run.status != 0
    found = checks(run)
    failed = "failed: OutOfMemoryError('injected: out of memory') (rank "
    assert found["rpc running"].startswith(failed)
    assert found["rpc batch"] == "passed"
    assert "HANG" not in run.err
