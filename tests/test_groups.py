"""The control group must not outlive the run."""

import subprocess
import sys

import pytest

from tests.process import ROOT

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
    """Its threads would outlive the run, which occasionally crashed at interpreter exit. This needs
    a separate process, because the modules of the first optimizer are imported only once."""
    command = [sys.executable, "-c", RUN]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.stdout == "gone\n", done.stderr
