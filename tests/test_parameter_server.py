"""parameter_server.py in full runs: routes, and faults that it must name."""

import re
import statistics

import pytest

from tests.process import RPC_CLOSED, Bench

SCRIPT = "benchmarks/parameter_server.py"
SMALL = "--num-embeddings 32 --embedding-dim 16 --dense-layers 3 --dense-size 16"
# one layer a bucket, and 5 batches, which only 1 or 5 trainers share evenly
FEW = "--sample-count 20 --batch-size 4 --bucket-size 0.001"
WRONG_MEAN = "differs from the trainers' mean by 0.001 of its largest value"
TINY = (*SMALL.split(), *FEW.split(), "--device", "cpu", "--warmup-iters", "1")


@pytest.mark.smoke
@pytest.mark.oldest
def test_five_processes(bench: Bench) -> None:
    """2 trainers, 2 servers and the master, with PyTorch's names of the hooks."""
    flags = (*TINY, "--epochs", "3", "--servers", "running", "--timeout", "40", "--nserver", "2")
    flags += ("--rpc-threads", "2", "--rpc_transports", "uv", "--rpc_timeout", "60")
    hooks = "rpc_hook,allreduce_hook,sparse_rpc_hook,hybrid_hook"
    run = bench(SCRIPT, *flags, "--ddp_hook", hooks, ranks=5)
    assert RPC_CLOSED.sub("", run.err) == "" or "OMP_NUM_THREADS" in run.err
    assert "an epoch is 3 steps of 4 samples" in run.out
    through = ["rpc running", "sparse_rpc running"]
    # routes without servers come first
    assert run.checks == dict.fromkeys(["allreduce", "hybrid", *through], "passed")
    cases = {case.name: case for case in run.report.cases}
    for name, case in cases.items():
        trainers = case.metrics["trainers"]
        assert list(trainers) == ["trainer0", "trainer1", "all"]
        # only timed steps count: 9 for each trainer
        assert trainers["trainer1"]["forward"]["count"] == 9
        assert trainers["all"]["hook sparse"]["count"] == 18
        # a trainer's longest bucket is within a backward, and a backward within a step
        longest = {phase: found["max_s"] for phase, found in trainers["all"].items()}
        assert 0 < longest["hook dense"] <= longest["backward"] <= longest["batch"]
        assert 0 < case.metrics["hook_s"].value <= longest["backward"]
        assert ("servers" in case.metrics) == (name in through)
        step_s = case.metrics["step_s"].value
        assert case.metrics["samples_per_s"].value == pytest.approx(2 * 4 / step_s)
    # in each of 9 steps a bucket for each layer and for the embedding, spread over the servers;
    # with sparse_rpc only the embedding's
    dense = cases["allreduce"].metrics["trainers"]["trainer0"]["hook dense"]["count"]
    servers = cases["rpc running"].metrics["servers"].values()
    one, two, both = (server["straggler"]["count"] for server in servers)
    assert one + two == both == dense + 9
    assert min(one, two) > 0
    assert cases["sparse_rpc running"].metrics["servers"]["all"]["straggler"]["count"] == 9


@pytest.mark.smoke
def test_servers_with_trainers_of_their_own(bench: Bench) -> None:
    """4 trainers, 2 servers: server 0 averages all buckets of trainers 0 and 1, server 1 those of
    trainers 2 and 3. With `buckets` one server of sparse_rpc is idle, and a line says so."""
    flags = (*TINY, "--iters", "6", "--servers", "running", "--nserver", "2", "--rpc-threads", "2")
    routes = ("--routes", "allreduce,rpc,sparse_rpc", "--placement", "buckets,grouped")
    run = bench(SCRIPT, *flags, *routes, ranks=7)
    ways = [f"{way} running{how}" for way in ("rpc", "sparse_rpc") for how in ("", " grouped")]
    assert run.checks == dict.fromkeys(["allreduce", *ways], "passed")
    cases = {case.name: case for case in run.report.cases}
    placements = [None, *["buckets", "grouped"] * 2]
    assert [case.key["placement"] for case in cases.values()] == placements
    assert [case.aligned for case in cases.values()] == [True, True, False, True, True]
    for way, sent in zip(ways[1::2], (["sparse", "dense"], ["sparse"]), strict=True):
        m = cases[way].metrics
        for server, trainer in (("server0", "trainer1"), ("server1", "trainer2")):
            # each server answers every bucket of its trainers
            buckets = sum(m["trainers"][trainer][f"hook {kind}"]["count"] for kind in sent)
            assert m["servers"][server]["straggler"]["count"] == buckets
    m = cases["rpc running grouped"].metrics
    slowest = max(statistics.median(row) for row in cases["rpc running grouped"].samples_s["step"])
    assert m["step_p50_s"].value == pytest.approx(slowest)
    assert m["samples_per_s"].value == pytest.approx(m["samples"] / m["step_s"].value)
    advice = "--placement grouped assigns each server its own trainers"
    lines = re.findall(r"^# (.*): no bucket was sent to (server\d); (.*)$", run.out, re.MULTILINE)
    assert [(name, said) for name, _, said in lines] == [("sparse_rpc running", advice)]


@pytest.mark.faults
@pytest.mark.parametrize(
    ("ranks", "fault", "words"),
    [
        # rank 2 serves trainer 0 alone
        (5, "wrong-answer", f"the gradient of embedding.weight {WRONG_MEAN} (rank 0)"),
        # trainers 0 and 1 share a server
        (7, "drifting-replica", "after the steps the parameters of rank 1 differ from rank 0's"),
    ],
)
def test_a_fault_within_a_group(bench: Bench, ranks: int, fault: str, words: str) -> None:
    flags = (*TINY, "--iters", "2", "--routes", "sparse_rpc", "--servers", "batch")
    more = ("--placement", "grouped", "--nserver", "2", "--rpc-threads", "2")
    run = bench(SCRIPT, *flags, *more, ranks=ranks, inject=fault, status=1)
    assert run.checks["sparse_rpc batch grouped"].startswith(f"failed: {words}")


@pytest.mark.faults
def test_a_wrong_answer_and_a_drifting_replica(bench: Bench) -> None:
    """A server's answer is too large by one thousandth. Rank 1 drifts by less than the tolerance of
    the gradients; only the comparison of all bits of the parameters finds it."""
    flags = (*TINY, "--iters", "6", "--routes", "sparse_rpc,rpc,allreduce", "--servers", "batch")
    run = bench(SCRIPT, *flags, ranks=4, inject="wrong-answer,drifting-replica", status=1)
    differ = "failed: after the steps the parameters of rank 1 differ from rank 0's"
    assert run.checks["allreduce"] == differ
    for name, part in (("sparse_rpc batch", "embedding"), ("rpc batch", "")):
        assert run.checks[name].startswith(f"failed: the gradient of {part}")
        assert f"{WRONG_MEAN} (rank 0)" in run.checks[name]
    assert run.report.status == "failed"


@pytest.mark.faults
def test_nobody_waits_long_for_a_server_that_failed(bench: Bench) -> None:
    """Its trainers wait 2 s for the average. The run continues with the next kind of server."""
    flags = (*TINY, "--iters", "30", "--routes", "rpc", "--straggler-timeout", "2")
    run = bench(SCRIPT, *flags, "--timeout", "60", ranks=4, inject="server-raises", status=1)
    failed = "failed: OutOfMemoryError('injected: out of memory') (rank "
    assert run.checks["rpc running"].startswith(failed)
    assert run.checks["rpc batch"] == "passed"
    assert "HANG" not in run.err
