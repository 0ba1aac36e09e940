"""What needs CUDA (`make gpu`): each script over NCCL, ranks that share a GPU over gloo, and faults
of a device that must not end the run. One GPU is enough. More are used where there are more; there
run one test at a time. test_one_gpu.py has several NCCL ranks on one GPU."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.gpu

GPUS = max(1, torch.cuda.device_count())
SWEEP = "benchmarks/ddp_sweep.py"
SMALL = ("--model", "mobilenet_v3_small", "--image-size", "64", "--batch-size", "8")
SHORT = ("--iters", "12", "--warmup-iters", "2")
DECODER = ("--models", "decoder-10m", *SHORT)
LONG = 500  # seconds: with many GPUs each case makes a communicator
FEW = ("-b", "64", "-e", "64K", "-f", "32", "-n", "4", "--max-seconds", "0.05")


def passed(run: Any) -> list[Any]:
    """The run's cases. All of them must have passed their check."""
    assert run.status == 0, run.out + run.err
    checks = {case.check for case in run.report.cases}
    assert checks == {"passed"}
    return list(run.report.cases)


@pytest.mark.parametrize(
    ("ranks", "backend", "dtypes"),
    [(GPUS, "nccl", "fp32,tf32,bf16"), (2, "gloo", "fp32,bf16")],
)
def test_sweep(bench: Callable[..., Any], ranks: int, backend: str, dtypes: str) -> None:
    flags = ("--dtype", dtypes, "--comm-hook", "none,fp16,bf16")
    run = bench(SWEEP, *SMALL, *SHORT, *flags, "--backend", backend, ranks=ranks, timeout=LONG)
    for case in passed(run):
        assert case.metrics["memory_gib"] >= case.metrics["memory_allocated_gib"] > 0
        if backend == "nccl":  # with gloo the host waits for the device in each step
            assert "step" in case.metrics["launch_share"]


def test_gpus_and_how_they_are_driven_are_in_the_report(bench: Callable[..., Any]) -> None:
    run = bench(SWEEP, *SMALL, *SHORT, "--no-breakdown", ranks=GPUS)
    environment, end = run.report.environment, run.report.end
    assert environment["cuda"]
    assert environment["nccl"]
    [gpus] = environment["gpus"]  # of one node
    assert len(gpus) >= GPUS
    assert all(gpu["power.limit"] and gpu["uuid"] for gpu in gpus)
    assert end["gpus"][0][0]["temperature.gpu"]


@pytest.mark.parametrize("mode", [(), ("-G", "3"), ("--cache-warm",)])
def test_collectives(bench: Callable[..., Any], mode: tuple[str, ...]) -> None:
    flags = ("--collective", "all", "-d", "float32,bfloat16,int8", "-o", "sum,avg,max", *FEW)
    passed(bench("benchmarks/collectives.py", *flags, *mode, ranks=GPUS, timeout=LONG))


@pytest.mark.parametrize(("ranks", "backend"), [(max(2, GPUS), "nccl"), (2, "gloo")])
def test_p2p_matrix(bench: Callable[..., Any], ranks: int, backend: str) -> None:
    flags = ("--size", "1M", "--backend", backend)
    run = bench("benchmarks/p2p_matrix.py", *flags, ranks=ranks)
    if backend == "nccl" and ranks > GPUS:  # NCCL refuses ranks that share a GPU
        assert "NCCL wants one for each rank" in run.err
        assert run.status != 0
        return
    passed(run)


@pytest.mark.parametrize("strategy", ["none", "ddp", "fsdp1", "fsdp2"])
def test_every_strategy_compiled(bench: Callable[..., Any], strategy: str) -> None:
    flags = ("--strategies", strategy, "--backends", "eager,inductor", "--dtype", "bf16")
    passed(bench("benchmarks/compile_sweep.py", *DECODER, *flags, ranks=GPUS, timeout=LONG))


def test_cudagraphs(bench: Callable[..., Any]) -> None:
    flags = ("--strategies", "none", "--backends", "eager,cudagraphs")
    passed(bench("benchmarks/compile_sweep.py", *DECODER, *flags, ranks=1))


def test_parallel_sweep(bench: Callable[..., Any]) -> None:
    flags = ("--mesh", f"ddp{GPUS},dp{GPUS}", "--dtype", "bf16", *SHORT)
    passed(bench("benchmarks/parallel_sweep.py", *flags, ranks=GPUS))


@pytest.mark.parametrize("callee", ["cpu", "cuda"])
def test_rpc_latency(bench: Callable[..., Any], callee: str) -> None:
    flags = ("--device", "cuda", "--server-device", callee, "--sizes", "4,64K,4M", "--iters", "12")
    passed(bench("benchmarks/rpc_latency.py", *flags, ranks=2))


@pytest.mark.parametrize("server", ["cpu", "cuda"])
@pytest.mark.parametrize("script", ["ddp_rpc", "batch_update_ps"])
def test_trainers_and_servers(bench: Callable[..., Any], script: str, server: str) -> None:
    flags = ("--device", "cuda", "--server-device", server, "--backend", "gloo", *SHORT)
    passed(bench(f"benchmarks/{script}.py", *flags, ranks=4))


@pytest.mark.parametrize(("trainers", "servers"), [(2, 0), (0, 1), (2, 1)])
def test_roles_on_cuda(bench: Callable[..., Any], trainers: int, servers: int) -> None:
    flags = ("--ncudatrainer", str(trainers), "--ncudaserver", str(servers), "--backend", "gloo")
    passed(bench("benchmarks/parameter_server.py", *flags, *SHORT, ranks=4))


def test_averaging_over_nccl_and_through_a_server(bench: Callable[..., Any]) -> None:
    """The default backend on one GPU, with a master, 1 trainer, and 1 server on the CPU."""
    roles = ("--ncudatrainer", "1", "--nserver", "1")
    run = bench("benchmarks/parameter_server.py", *roles, *SHORT, ranks=3)
    keys = {case.key["route"]: case.key for case in passed(run)}
    assert keys["allreduce"]["backend"] == "nccl"
    assert keys["allreduce"]["dense_embedding"]
    assert not keys["hybrid"]["dense_embedding"]


@pytest.mark.parametrize("wire", ["cpu", "cuda"])
def test_wires_between_roles_on_cuda(bench: Callable[..., Any], wire: str) -> None:
    """1 trainer and 1 server share the GPU. Tensors go by a device map, or through the CPU."""
    roles = ("--ncudatrainer", "1", "--ncudaserver", "1", "--routes", "rpc,sparse_rpc")
    run = bench("benchmarks/parameter_server.py", *roles, "--wire", wire, *SHORT, ranks=3)
    assert {case.key["wire"] for case in passed(run)} == {wire}


def test_out_of_memory_is_a_row_and_the_next_model_is_measured(bench: Callable[..., Any]) -> None:
    """resnet152 needs about 38 GB for this batch, mobilenet_v3_small about 3.

    The process gets a small part of the GPU: other tests run on it meanwhile.
    """
    flags = ("--models", "resnet152,mobilenet_v3_small", "--batch-size", "256", "--iters", "6")
    variables = {"PYTORCH_ALLOC_CONF": "per_process_memory_fraction:0.15"}
    run = bench(SWEEP, *flags, "--no-breakdown", "--image-size", "224", ranks=1, **variables)
    checks = {case.key["model"]: case.check for case in run.report.cases}
    assert "OutOfMemoryError" in checks["resnet152"]
    assert checks["mobilenet_v3_small"] == "passed"
    assert run.status == 1


@pytest.mark.skipif(GPUS < 2, reason="a peer needs a GPU of its own")
def test_a_rank_that_fails_beside_its_peers_kernels_is_a_row(bench: Callable[..., Any]) -> None:
    """Its peers are in an all-reduce that it never joins. They abort it, and the run goes on."""
    flags = (*SMALL, *SHORT, "--world-sizes", "2", "--comm-hook", "none,fp16", "--no-breakdown")
    run = bench(SWEEP, *flags, inject="step-raises", ranks=2)
    checks = {case.key["comm_hook"]: case.check for case in run.report.cases}
    assert "injected: no kernel for this step (rank 1)" in checks["none"]
    assert checks["fp16"] == "passed"
    assert run.status == 1


def test_an_error_that_lasts_ends_the_run_with_its_reason(bench: Callable[..., Any]) -> None:
    run = bench(SWEEP, *SMALL, *SHORT, inject="device-assert", ranks=1)
    assert run.status == 1
    assert "this process cannot use its GPU any more" in run.err


def test_a_stopped_rank_on_a_shared_gpu_is_named(bench: Callable[..., Any]) -> None:
    flags = ("--backend", "gloo", "--timeout", "20", "--world-sizes", "2")
    run = bench(SWEEP, *SMALL, *SHORT, *flags, inject="stops", ranks=2, timeout=120)
    assert run.status != 0
    assert "does not answer" in run.err
