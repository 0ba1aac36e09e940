"""parameter_server.py as its user runs it: routes, placements, and faults that it must name."""

import re
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from benchmarks import parameter_server
from common.report import Case, Estimate

SCRIPT = "benchmarks/parameter_server.py"
SMALL = "--num-embeddings 32 --embedding-dim 16 --dense-layers 3 --dense-size 16"
# buckets of a layer each, and 5 batches that no number of trainers but 1 and 5 shares out evenly
FEW = "--sample-count 20 --batch-size 4 --bucket-size 0.001"
TINY = (*SMALL.split(), *FEW.split(), "--device", "cpu", "--warmup-iters", "1")
SHORT = (*TINY, "--iters", "6")


def label(case: Any) -> str:
    return " ".join(filter(None, (case.key[n] for n in ("route", "server", "placement"))))


def checks(run: Any) -> dict[str, str]:
    return {label(case): case.check for case in run.report.cases}


@pytest.mark.smoke
@pytest.mark.oldest
def test_four_processes(bench: Callable[..., Any]) -> None:
    """2 trainers, a server and the master; the names of PyTorch's hooks; an epoch of 3 steps.

    Torch 2.11 hung where a later case made a second group over the same ranks.
    """
    flags = (*TINY, "--epochs", "3", "--servers", "running", "--timeout", "40")
    hooks = "rpc_hook,allreduce_hook,sparse_rpc_hook,hybrid_hook"
    run = bench(SCRIPT, *flags, "--ddp_hook", hooks, ranks=4)
    assert run.status == 0, run.err
    assert run.err == "" or "OMP_NUM_THREADS" in run.err
    assert "an epoch is 3 steps of 4 samples" in run.out
    assert "\nrpc threads 2, rpc transports " in run.out
    # one table of routes, one of all trainers' phases and one of all servers'
    assert len(re.findall(r"^----", run.out, re.MULTILINE)) == 3
    cases = {label(case): case for case in run.report.cases}
    through = ["rpc running grouped", "sparse_rpc running grouped"]
    assert list(cases) == ["allreduce", "hybrid", *through]  # those without servers first
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
        assert 0 < case.metrics["hook_s"].value <= longest["backward"]
        assert ("servers" in case.metrics) == (name in through)
        step_s = case.metrics["step_s"].value
        assert case.metrics["samples_per_s"].value == pytest.approx(2 * 4 / step_s)
    # a bucket for each layer and the embedding of each of 9 steps; of sparse_rpc the embedding's
    dense = cases["allreduce"].metrics["trainers"]["trainer0"]["hook dense"]["count"]
    counts = [cases[name].metrics["servers"]["all"]["straggler"]["count"] for name in through]
    assert counts == [dense + 9, 9]


@pytest.mark.smoke
def test_trainers_alone(bench: Callable[..., Any]) -> None:
    """No route uses a server, and none is there. The title has what the cases share."""
    flags = (*SHORT, "--ntrainer", "3", "--nserver", "0", "--routes", "allreduce")
    run = bench(SCRIPT, *flags, ranks=3)
    assert run.status == 0, run.err
    assert checks(run) == {"allreduce": "passed"}
    assert run.report.cases[0].key["servers"] == 0
    title = run.out[run.out.index("3 trainers, 0 servers") :].splitlines()[:2]
    assert title == [
        "3 trainers, 0 servers, 0 of them on CUDA; an epoch is 2 steps of 4 samples",
        "embedding 32 x 16, 16 rows a sample, 20 % never looked up; 3 dense layers of 16; "
        "buckets of 0.001 MB",
    ]
    assert "\nallreduce (gloo)  " in run.out


@pytest.mark.smoke
def test_seven_processes(bench: Callable[..., Any]) -> None:
    """4 trainers on 2 servers, which average over 2 of them or over all; settings of RPC."""
    settings = ("--rpc-threads", "2", "--rpc_transports", "uv", "--rpc_timeout", "60")
    flags = (*SHORT, *settings, "--routes", "rpc,sparse_rpc", "--servers", "batch")
    run = bench(SCRIPT, *flags, "--nserver", "2", ranks=7)
    assert run.status == 0, run.err
    placed = ("grouped", "sharded")
    names = [f"{route} batch {how}" for route in ("rpc", "sparse_rpc") for how in placed]
    assert checks(run) == dict.fromkeys(names, "passed")
    for case in run.report.cases:
        key, servers = case.key, case.metrics["servers"]
        assert (key["rpc_threads"], key["rpc_transports"]) == (2, "uv")
        counts = [servers[name].get("batch", {"count": 0})["count"] for name in servers]
        assert counts[0] + counts[1] == counts[2]
        if key["placement"] == "grouped":  # every bucket of either two trainers
            assert counts[0] == counts[1]
        elif key["route"] == "rpc":  # spread over both
            assert min(counts) > 0


@pytest.mark.faults
def test_a_wrong_answer_of_a_server(bench: Callable[..., Any]) -> None:
    """One thousandth too much; what needs no server passes."""
    flags = (*SHORT, "--routes", "sparse_rpc,rpc,allreduce", "--servers", "batch")
    run = bench(SCRIPT, *flags, ranks=4, inject="wrong-answer")
    assert run.status != 0
    found = checks(run)
    assert found["allreduce"] == "passed"
    for name, part in (("sparse_rpc", "embedding"), ("rpc", "dense")):
        check = found[f"{name} batch grouped"]
        assert check.startswith("failed: the gradient of "), check
        assert f"of {part}." in check or name == "rpc"
        assert "is off the trainers' mean by 0.001 (rank 0)" in check
    assert run.report.status == "failed"


@pytest.mark.faults
def test_a_replica_that_drifts(bench: Callable[..., Any]) -> None:
    """By less than the check of gradients sees; bit for bit it shows. A dense embedding."""
    flags = (*SHORT, "--routes", "rpc", "--servers", "running", "--dense-embedding")
    run = bench(SCRIPT, *flags, ranks=4, inject="drifting-replica")
    assert run.status != 0
    assert checks(run) == {
        "rpc running grouped": "failed: embedding: after the steps the parameters of rank 1 differ "
        "from rank 0's"
    }


@pytest.mark.faults
def test_nobody_waits_long_for_a_server_that_failed(bench: Callable[..., Any]) -> None:
    """Its trainers wait 2 s for the average; the run goes on with the next kind of server."""
    flags = (*TINY, "--iters", "60", "--routes", "rpc", "--straggler-timeout", "2")
    run = bench(SCRIPT, *flags, "--timeout", "60", ranks=4, inject="server-raises")
    assert run.status != 0
    found = checks(run)
    assert "server0: OutOfMemoryError('injected: out of memory')" in found["rpc running grouped"]
    assert found["rpc batch grouped"] == "passed"
    assert "HANG" not in run.err


@pytest.mark.faults
@pytest.mark.parametrize("fault", ["server-dies", "server-stops"])
def test_a_server_that_is_gone(start: Callable[..., Any], fault: str) -> None:
    """Who and where within the timeout, and no process is left."""
    flags = (*TINY, "--iters", "60", "--routes", "rpc", "--servers", "running", "--timeout", "8")
    process = start(SCRIPT, *flags, ranks=4, inject=fault)
    ranks = process.until(lambda: len(found := process.ranks()) == 4 and found)
    assert process.wait(120) != 0
    if fault == "server-stops":
        hang = process.err[process.err.index("HANG: no progress for 8 s") :]
        assert hang.splitlines()[1].startswith("rank 2 on ")
        assert "does not answer" in hang.splitlines()[1]
        assert "rpc running grouped" in hang
    else:
        assert "rank      : 2 (local_rank: 2)" in process.err  # torchrun's summary
        assert "exitcode  : -9" in process.err
    _, alive = psutil.wait_procs(ranks.values(), timeout=5)
    assert not alive


def routed(name: str, server: str | None, ms: float) -> Case:
    step = Estimate(ms / 1e3, ms * 0.9e-3, ms * 1.1e-3)
    return Case(key={"server": server}, ranks=[0], name=name, metrics={"step_s": step})


def test_the_answer_has_both_ways_side_by_side() -> None:
    plain, slow = routed("allreduce (gloo)", None, 10), routed("rpc batch", "batch", 20)
    assert parameter_server.answer([plain, routed("rpc running", "running", 30), slow]) == (
        "a step takes 20.0 ms (18.0 to 22.0) by rpc batch, through a server, "
        "10.0 ms (9.0 to 11.0) by allreduce (gloo), all-reduce; "
        "timed one after the other, analysis/ab.py takes turns"
    )
    assert parameter_server.answer([plain]) == (
        "a step takes 10.0 ms (9.0 to 11.0) by allreduce (gloo), all-reduce"
    )
