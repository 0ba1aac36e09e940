"""compile_sweep with faults planted by variables, in the cases of one strategy over several ranks.

FAIL_ON_RANK: the third step raises there. NO_AVERAGE: the gradients are not averaged. FULL_DISK:
the first trace cannot be written.
"""

import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness import load_script

compile_sweep: Any = load_script("compile_sweep")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.distributed.device_mesh import DeviceMesh  # noqa: E402

rank = os.environ.get("RANK", "0")
create_step, strategies = compile_sweep.create_step, dict(compile_sweep.STRATEGIES)
profile_steps = compile_sweep.profile_steps


def failing(*parts: Any, **options: Any) -> Any:
    step = create_step(*parts, **options)
    calls = 0

    def counted() -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise torch.OutOfMemoryError("no more memory")
        return step()

    return counted


def full_disk(*arguments: Any) -> None:
    compile_sweep.profile_steps = profile_steps
    raise OSError("the trace could not be written to here")


def planted(name: str) -> Any:
    """The strategy with a fault."""

    def wrap(model: Any, place: Any, units: Any) -> Any:
        if os.environ.get("NO_AVERAGE") == name:
            group = [dist.new_group([other], backend="gloo") for other in range(2)][int(rank)]
            mesh = DeviceMesh.from_group(group, "cpu")
            place = dataclasses.replace(place, group=group, mesh=mesh)
        compile_sweep.create_step = create_step
        if os.environ.get("FAIL_ON_RANK") == rank:
            compile_sweep.create_step = failing
        return strategies[name](model, place, units)

    return wrap


if __name__ == "__main__":
    args = compile_sweep.parse_args()
    for name in ("ddp", "fsdp1", "fsdp2"):
        compile_sweep.STRATEGIES[name] = planted(name)
    if "FULL_DISK" in os.environ:
        compile_sweep.profile_steps = full_disk
    sys.exit(compile_sweep.record(compile_sweep.main)(args))
