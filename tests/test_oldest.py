"""Each script once, with a short command: .ci/run runs these tests on the oldest torch."""

import inspect

import pytest
import torch.distributed.checkpoint.staging
from torch.distributed.device_mesh import init_device_mesh

from tests.process import ROOT, Bench

SCRIPTS = {path.stem for path in (ROOT / "benchmarks").glob("[a-z]*.py")}
TIMES = ("--iters", "6", "--warmup-iters", "1")
RPC = ("--max-seconds", "0.5")
HAS_STAGER = hasattr(torch.distributed.checkpoint.staging, "DefaultStager")
MODES = "all" if HAS_STAGER else "torch.save,dcp.save"
HAS_STREAM = hasattr(torch.cpu.Stream, "record_event")  # FSDP2 on the CPU requires it
FSDP = "fsdp2" if HAS_STREAM else "ddp"
HAS_BACKENDS = "backend_override" in inspect.signature(init_device_mesh).parameters
TINY = ("--model", "decoder-tiny", "--iters", "1")
ELSEWHERE = {"ddp_rpc", "parameter_server", "replay", "traffic"}  # in other test files
COMMANDS: dict[str, tuple[int, tuple[str, ...]]] = {  # other scripts: TIMES on 2 ranks
    "ddp_sweep": (2, ("--model", "mobilenet_v3_small", "--image-size", "32", *TIMES)),
    "collectives": (2, ("--collective", "all", "-b", "64", "-e", "64", "-n", "2", *TIMES)),
    "p2p_matrix": (3, ("--size", "4K", "-n", "2", *TIMES)),
    "compile_sweep": (2, ("--strategies", f"ddp,{FSDP}", "--backends", "eager", *TIMES)),
    "rpc_latency": (2, ("--sizes", "4,64K", *RPC)),
    "batch_update_ps": (3, RPC),
    "checkpoint_sweep": (2, ("--modes", MODES, "--strategy", FSDP, *TINY)),
    "input_sweep": (2, ("--workers", "1", "--samples", "16", "--cache", "warm", *TIMES)),
    "node_check": (2, ("--budget", "100", "--fail-on", "wrong", *TIMES)),
    "parallel_sweep": (2, ("--mesh", "dp2,tp2,pp2:1f1b", *TIMES)),
}


@pytest.mark.oldest
@pytest.mark.parametrize("script", sorted(SCRIPTS - ELSEWHERE))
def test_a_short_run(script: str, bench: Bench) -> None:
    ranks, flags = COMMANDS.get(script, (2, TIMES))
    cold = script == "ddp_sweep"  # the first command of a new user
    needs_newer = script == "parallel_sweep" and not HAS_BACKENDS
    status = 1 if needs_newer else 0
    run = bench(f"benchmarks/{script}.py", *flags, ranks=ranks, cold=cold, status=status)
    if needs_newer:
        assert "requires a newer torch, whose init_device_mesh has backend_override" in run.err
        return
    assert run.report.status == "complete"
