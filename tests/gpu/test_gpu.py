"""Tests that need CUDA (`make gpu`): commands of test_cudalab.py, with all NCCL ranks on one GPU.

The ranks take turns on it (share_gpu.py), so these tests tell that code works, never how fast it
is. The others use all GPUs of the machine; run one test at a time on a machine with several.
"""

from pathlib import Path

import pytest
import torch

from tests import test_cudalab as table
from tests.process import ROOT, Bench

pytestmark = pytest.mark.gpu

SHARE_GPU = str(ROOT / "tests" / "gpu" / "share_gpu.py")
ON_GPU = [
    row for row in table.ROWS if not (row.variables or row.emulated or table.lacks_backend(row))
]
GPUS = max(1, torch.cuda.device_count())
SMALL = f"benchmarks/ddp_sweep.py {table.SHORT} --model mobilenet_v3_small --image-size 64"
DECODER = f"benchmarks/compile_sweep.py --models decoder-10m {table.SHORT}"


@pytest.mark.parametrize("row", ON_GPU, ids=lambda row: row.name)
def test_row(row: table.Row, bench: Bench, tmp_path: Path) -> None:
    words = table.words_of(row.command, tmp_path)
    if row.status and "--timeout" not in words:
        words += ["--timeout", "60"]
    run = bench(SHARE_GPU, *words, ranks=row.ranks, status=None, timeout=400)
    table.judge(row, run, emulated=False)


@pytest.mark.parametrize("name", table.EXAMPLES)
def test_example(name: str, bench: Bench, tmp_path: Path) -> None:
    table.check_example(name, [], [SHARE_GPU], bench, tmp_path)


@pytest.mark.parametrize(
    "command",
    [
        f"{table.ALL} -e 64K -d float32,bfloat16,int8 -o sum,avg,max",
        f"{table.ALL} -e 64K -G 3",
        f"{SMALL} --comm-hook none,fp16,bf16 --dtype fp32,tf32,bf16",
        f"{table.CKPT} --modes all --strategy fsdp2,ddp",
        table.INPUT,
        f"{DECODER} --strategies all --backends eager,inductor --dtype bf16",
        f"benchmarks/parallel_sweep.py {table.SHORT} --mesh ddp{GPUS},dp{GPUS} --dtype bf16",
    ],
)
def test_all_gpus(command: str, bench: Bench) -> None:
    run = bench(*command.split(), ranks=GPUS)
    assert {case.check for case in run.report.cases} == {"passed"}
    environment, end = run.report.environment, run.report.end
    assert environment["cuda"]
    assert environment["nccl"]
    [gpus] = environment["gpus"]  # of one node
    assert len(gpus) >= GPUS
    assert all(gpu["power.limit"] and gpu["uuid"] for gpu in gpus)
    assert end["gpus"][0][0]["temperature.gpu"]
    if "ddp_sweep" in command:
        for case in run.report.cases:
            assert case.metrics["memory_gib"] >= case.metrics["memory_allocated_gib"] > 0
            assert "step" in case.metrics["launch_share"]


def test_cuda_graphs_of_a_single_rank(bench: Bench) -> None:
    flags = "--strategies none --backends eager,cudagraphs"
    run = bench(*DECODER.split(), *flags.split(), ranks=1)
    assert {case.check for case in run.report.cases} == {"passed"}


def test_ranks_that_share_a_gpu_are_refused(bench: Bench) -> None:
    run = bench("benchmarks/p2p_matrix.py", "--size", "1M", ranks=GPUS + 1, status=1)
    assert "NCCL requires one GPU per rank" in run.err


def test_the_next_model_is_measured_after_one_is_out_of_memory(bench: Bench) -> None:
    """resnet152 needs about 38 GB for this batch. Other tests run on the GPU at the same time."""
    flags = "--models resnet152,mobilenet_v3_small --batch-size 256 --iters 6 --image-size 224"
    variables = {"PYTORCH_ALLOC_CONF": "per_process_memory_fraction:0.15"}
    words = ("benchmarks/ddp_sweep.py", *flags.split(), "--no-breakdown")
    run = bench(*words, ranks=1, status=1, **variables)
    checks = {case.key["model"]: case.check for case in run.report.cases}
    assert "OutOfMemoryError" in checks["resnet152"]
    assert checks["mobilenet_v3_small"] == "passed"
