"""The control group: it must not outlive the run, and the default group is not used."""

import pytest

from tests.process import ROOT, Bench, python

RUN = """
import gc, weakref
import common.groups
import torch
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
torch.optim.SGD([torch.zeros(1)])
world = weakref.ref(dist.group.WORLD)
dist.destroy_process_group()
gc.collect()
print("alive" if world() else "gone")
"""


@pytest.mark.smoke
def test_no_default_argument_of_torch_keeps_the_control_group() -> None:
    """In a process of its own, because modules of the first optimizer are imported only once."""
    done = python("-c", RUN, PYTHONPATH=str(ROOT))
    assert done.stdout == "gone\n", done.stderr


@pytest.mark.smoke
@pytest.mark.parametrize(
    "command",
    [
        "ddp_sweep --model mobilenet_v3_small --image-size 32 --batch-size 2 --world-sizes 2",
        "collectives -b 64 -e 64 --collective all_reduce,sendrecv",
        "p2p_matrix --size 64",
    ],
)
def test_no_collective_uses_the_default_group(bench: Bench, command: str) -> None:
    """It is then free for a model of the user."""
    script, *flags = command.split()
    run = bench(f"benchmarks/{script}.py", *flags, "--iters", "6", inject="default-group-fails")
    assert run.report.cases
    assert not [case.check for case in run.report.cases if case.failed]
