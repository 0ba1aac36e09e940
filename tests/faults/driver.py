"""ddp_sweep with faults planted by variables.

FAIL_ON_RANK, DIVERGE_ON_RANK, LATE_RANK, DIE_ON_RANK: the rank. All cases but the one over the
whole world are cut short; in a job that Slurm has requeued that one, too.
"""

import dataclasses
import importlib.util
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
spec = importlib.util.spec_from_file_location("ddp_sweep", ROOT / "benchmarks" / "ddp_sweep.py")
assert spec is not None
assert spec.loader is not None
ddp_sweep: Any = importlib.util.module_from_spec(spec)
sys.modules["ddp_sweep"] = ddp_sweep
spec.loader.exec_module(ddp_sweep)

import torch  # noqa: E402

import common.sweep  # noqa: E402

rank = os.environ.get("RANK", "0")
run_case, stop_rule = ddp_sweep.run_case, ddp_sweep.stop_rule


def faulty_case(config: Any, args: Any, sweep: Any, group: Any) -> Any:
    whole = config.world_size == sweep.ctx.world_size
    whole &= "SLURM_RESTART_COUNT" not in os.environ
    if os.environ.get("FAIL_ON_RANK") == rank and config.world_size == 2:
        fail_in_the_third_step(config)
    elif os.environ.get("FAIL_ON_RANK"):
        ddp_sweep.create_step = create_step
    if os.environ.get("DIVERGE_ON_RANK") == rank and config.world_size == 2:
        ddp_sweep.digest = lambda model: digest(model)[::-1]
    rule = stop_rule(args)
    short = dataclasses.replace(rule, iters=6)
    ddp_sweep.stop_rule = lambda args: rule if whole else short
    return run_case(config, args, sweep, group)


create_step, digest = ddp_sweep.create_step, ddp_sweep.digest


def fail_in_the_third_step(config: Any) -> None:
    def failing(*args: Any) -> Any:
        step = create_step(*args)
        calls = 0

        def counted() -> None:
            nonlocal calls
            calls += 1
            if calls == 3:
                raise torch.OutOfMemoryError("no more memory")
            step()

        return counted

    ddp_sweep.create_step = failing


open_groups = common.sweep.open_groups


def dying_open_groups(groups: Any, ctx: Any) -> Any:
    """Die where no connection tells the peers: they wait in the store for this rank."""
    if len(groups[0]) == ctx.world_size:
        os.kill(os.getpid(), signal.SIGKILL)
    return open_groups(groups, ctx)


if __name__ == "__main__":
    if os.environ.get("DIE_ON_RANK") == rank and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        common.sweep.open_groups = dying_open_groups
    args = ddp_sweep.parse_args()
    if os.environ.get("LATE_RANK") == rank:
        time.sleep(60)
    ddp_sweep.run_case = faulty_case
    sys.exit(ddp_sweep.record(ddp_sweep.main)(args))
