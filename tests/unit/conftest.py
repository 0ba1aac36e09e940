"""A world of one on gloo."""

from collections.abc import Iterator

import pytest
import torch

from common.dist import CaseGroup, RankContext, case_group, init, shutdown

LAUNCHER = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"),
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "SLURM_PROCID"),
    *("SLURM_STEP_ID", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "PMI_SIZE"),
    *("TORCHELASTIC_USE_AGENT_STORE", "SLURM_RESTART_COUNT", "SLURM_JOB_ID"),
)


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests run alike under a launcher and without."""
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session")
def world() -> Iterator[RankContext]:
    """This process as the only rank of a job."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        for name in LAUNCHER:
            monkeypatch.delenv(name, raising=False)
        ctx = init(torch.device("cpu"), "gloo")
    yield ctx
    shutdown()


@pytest.fixture
def group(world: RankContext) -> Iterator[CaseGroup]:
    with case_group((0,), world) as members:
        assert members is not None
        yield members
