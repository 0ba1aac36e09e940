"""Tests that need CUDA (`make gpu`): each script over NCCL, ranks that share a GPU over gloo, and
faults of a device. One GPU is enough. On a machine with several GPUs all are used; run one test at
a time there. test_one_gpu.py has several NCCL ranks on one GPU."""

from typing import Any

import pytest
import torch

from tests.process import Bench

pytestmark = pytest.mark.gpu

GPUS = max(1, torch.cuda.device_count())
SHORT = ("--iters", "12", "--warmup-iters", "2")
SMALL = "--model mobilenet_v3_small --image-size 64 --batch-size 8 --iters 12 --warmup-iters 2"
SWEEP = f"{SMALL} --comm-hook none,fp16,bf16"
LONG = 500  # seconds: with many GPUs, creating the communicator of each case takes long
COLLECTIVES = "--collective all -d float32,bfloat16,int8 -o sum,avg,max -b 64 -e 64K -f 32 -n 4"
COLLECTIVES += " --max-seconds 0.05"
COMPILED = "--models decoder-10m --iters 12 --warmup-iters 2"
INDUCTOR = f"{COMPILED} --strategies all --backends eager,inductor --dtype bf16"
SEVERAL = pytest.mark.skipif(GPUS < 2, reason="a link needs two GPUs")
RPC = "--device cuda --sizes 4,64K,4M --iters 12"
SERVERS = "--device cuda --backend gloo --iters 12 --warmup-iters 2"
ROLES = "--backend gloo --iters 12 --warmup-iters 2"


def passed(run: Any) -> list[Any]:
    """The cases of the run, all of which must have passed their check."""
    checks = {case.check for case in run.report.cases}
    assert checks == {"passed"}
    return list(run.report.cases)


@pytest.mark.parametrize(
    ("script", "ranks", "flags"),
    [
        ("collectives", GPUS, COLLECTIVES),
        ("collectives", GPUS, f"{COLLECTIVES} -G 3"),
        ("collectives", GPUS, f"{COLLECTIVES} --cache-warm"),
        ("ddp_sweep", 2, f"{SWEEP} --dtype fp32,bf16 --backend gloo"),
        ("p2p_matrix", 2, "--size 1M --backend gloo"),
        pytest.param("p2p_matrix", GPUS, "--size 1M", marks=SEVERAL),
        ("compile_sweep", GPUS, INDUCTOR),
        ("compile_sweep", 1, f"{COMPILED} --strategies none --backends eager,cudagraphs"),
        ("parallel_sweep", GPUS, f"--mesh ddp{GPUS},dp{GPUS} --dtype bf16 --iters 12"),
        ("rpc_latency", 2, f"{RPC} --server-device cpu"),
        ("rpc_latency", 2, f"{RPC} --server-device cuda"),
        ("ddp_rpc", 4, f"{SERVERS} --server-device cpu"),
        ("ddp_rpc", 4, f"{SERVERS} --server-device cuda"),
        ("batch_update_ps", 4, f"{SERVERS} --server-device cpu"),
        ("batch_update_ps", 4, f"{SERVERS} --server-device cuda"),
        ("parameter_server", 4, f"{ROLES} --ncudatrainer 2 --ncudaserver 0"),
        ("parameter_server", 4, f"{ROLES} --ncudatrainer 0 --ncudaserver 1"),
        ("parameter_server", 4, f"{ROLES} --ncudatrainer 2 --ncudaserver 1"),
    ],
)
def test_each_script(bench: Bench, script: str, ranks: int, flags: str) -> None:
    passed(bench(f"benchmarks/{script}.py", *flags.split(), ranks=ranks, timeout=LONG))


def test_what_ddp_sweep_reports(bench: Bench) -> None:
    flags = (*SWEEP.split(), "--dtype", "fp32,tf32,bf16")
    run = bench("benchmarks/ddp_sweep.py", *flags, ranks=GPUS, timeout=LONG)
    for case in passed(run):
        assert case.metrics["memory_gib"] >= case.metrics["memory_allocated_gib"] > 0
        assert "step" in case.metrics["launch_share"]
    environment, end = run.report.environment, run.report.end
    assert environment["cuda"]
    assert environment["nccl"]
    [gpus] = environment["gpus"]  # of one node
    assert len(gpus) >= GPUS
    assert all(gpu["power.limit"] and gpu["uuid"] for gpu in gpus)
    assert end["gpus"][0][0]["temperature.gpu"]


def test_ranks_that_share_a_gpu_are_refused(bench: Bench) -> None:
    run = bench("benchmarks/p2p_matrix.py", "--size", "1M", ranks=GPUS + 1, status=1)
    assert "NCCL requires one GPU per rank" in run.err


def test_averaging_over_nccl_and_through_a_server(bench: Bench) -> None:
    """The default backend on one GPU, with a master, 1 trainer and 1 server on the CPU."""
    roles = ("--ncudatrainer", "1", "--nserver", "1")
    run = bench("benchmarks/parameter_server.py", *roles, *SHORT, ranks=3)
    keys = {case.key["route"]: case.key for case in passed(run)}
    assert keys["allreduce"]["backend"] == "nccl"
    assert keys["allreduce"]["dense_embedding"]
    assert not keys["hybrid"]["dense_embedding"]


@pytest.mark.parametrize("wire", ["cpu", "cuda"])
def test_wires_between_roles_on_cuda(bench: Bench, wire: str) -> None:
    """1 trainer and 1 server share the GPU. Tensors travel by a device map or through the CPU."""
    roles = ("--ncudatrainer", "1", "--ncudaserver", "1", "--routes", "rpc,sparse_rpc")
    run = bench("benchmarks/parameter_server.py", *roles, "--wire", wire, *SHORT, ranks=3)
    assert {case.key["wire"] for case in passed(run)} == {wire}


def test_the_next_model_is_measured_after_one_is_out_of_memory(bench: Bench) -> None:
    """resnet152 needs about 38 GB for this batch, mobilenet_v3_small about 3. The process gets a
    small part of the GPU, because other tests run on it at the same time."""
    flags = ["--models", "resnet152,mobilenet_v3_small", "--batch-size", "256", "--iters", "6"]
    flags += ["--image-size", "224", "--no-breakdown"]
    variables = {"PYTORCH_ALLOC_CONF": "per_process_memory_fraction:0.15"}
    run = bench("benchmarks/ddp_sweep.py", *flags, ranks=1, status=1, **variables)
    checks = {case.key["model"]: case.check for case in run.report.cases}
    assert "OutOfMemoryError" in checks["resnet152"]
    assert checks["mobilenet_v3_small"] == "passed"


def test_a_lasting_device_error_ends_the_run(bench: Bench) -> None:
    run = bench(
        "benchmarks/ddp_sweep.py", *SMALL.split(), inject="device-assert", ranks=1, status=1
    )
    assert "this process can no longer use its GPU" in run.err
