"""CUDA and NCCL code on the stand-in of tests/cudalab (`make cudalab`)."""

from collections.abc import Callable

import pytest
import torch.distributed as dist

from tests.process import Run

pytestmark = pytest.mark.cudalab
# each implementation of NCCL's process group that this torch has; see docs/gpus.md
NCCL2 = ["0", "1"] if hasattr(dist, "ProcessGroupNCCL2") else ["0"]


@pytest.mark.ci
@pytest.mark.parametrize("nccl2", NCCL2)
def test_the_stand_in(nccl2: str, bench: Callable[..., Run], lab: dict[str, str]) -> None:
    """Cold: torch is imported as by a user, after sitecustomize.py."""
    variables = lab | {"TORCH_DIST_USE_NCCL2": nccl2}
    run = bench("tests/cudalab/selftest.py", json=False, cold=True, **variables)
    assert run.status == 0, run.out + run.err
    assert run.out.count("of 2: fine") == 2
