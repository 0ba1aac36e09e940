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


@pytest.mark.ci
def test_a_gpu_that_another_process_uses(bench: Callable[..., Run], lab: dict[str, str]) -> None:
    """Its memory before the first call of CUDA is a warning. Of GPU 3, which no rank uses, nothing
    is said. A power limit is named with both values."""
    answers = ["1:memory.used=20480 MiB", "3:memory.used=30720 MiB", "1:power.limit=500.00 W"]
    variables = lab | {"CUDALAB_SMI": ";".join(answers)}
    flags = ("-b", "64", "-e", "64", "--iters", "2")
    run = bench("benchmarks/collectives.py", *flags, cold=True, **variables)
    assert run.status == 0, run.err
    (host,) = run.report.environment["hosts"]
    held = "other processes already held 20.0 GiB of GPU 1"
    assert f"# warning: {host}: {held}\n" in run.out
    limit = "power limit of GPU 1 500.00 W (700.00 W elsewhere)"
    assert f"# warning: {host} differs: {limit}\n" in run.out
    assert "30.0 GiB" not in run.out + run.err
