"""Each script once, with a short command: .ci/run runs these tests on the oldest torch."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.process import ROOT

SCRIPTS = {path.stem for path in (ROOT / "benchmarks").glob("[a-z]*.py")}
TIMES = ("--iters", "6", "--warmup-iters", "1")
RPC = ("--max-seconds", "0.5")
ELSEWHERE = {"ddp_rpc", "parameter_server", "replay", "traffic"}  # in other test files
COMMANDS: dict[str, tuple[int, tuple[str, ...]]] = {  # other scripts: TIMES on 2 ranks
    "ddp_sweep": (2, ("--model", "mobilenet_v3_small", "--image-size", "32", *TIMES)),
    "collectives": (2, ("--collective", "all", "-b", "64", "-e", "64", "-n", "2", *TIMES)),
    "p2p_matrix": (3, ("--size", "4K", "-n", "2", *TIMES)),
    "compile_sweep": (2, ("--strategies", "ddp,fsdp2", "--backends", "eager", *TIMES)),
    "rpc_latency": (2, ("--sizes", "4,64K", *RPC)),
    "batch_update_ps": (3, RPC),
    "checkpoint_sweep": (2, ("--modes", "all", "--model", "decoder-tiny", "--iters", "1")),
    "input_sweep": (2, ("--workers", "1", "--samples", "16", "--cache", "warm", *TIMES)),
    "node_check": (2, ("--budget", "100", "--fail-on", "wrong", *TIMES)),
    "parallel_sweep": (2, ("--mesh", "dp2,tp2,pp2:1f1b", *TIMES)),
}


@pytest.mark.oldest
@pytest.mark.parametrize("script", sorted(SCRIPTS - ELSEWHERE))
def test_a_short_run(script: str, bench: Callable[..., Any]) -> None:
    ranks, flags = COMMANDS.get(script, (2, TIMES))
    cold = script == "ddp_sweep"  # the first command of a new user
    run = bench(f"benchmarks/{script}.py", *flags, ranks=ranks, cold=cold)
    assert run.status == 0, run.err
    assert run.report.status == "complete"
