"""benchmarks/workloads/room.py: memory for the ranks that share a GPU or a host."""

from contextlib import nullcontext
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from benchmarks.workloads import room
from benchmarks.workloads.room import check_room
from common.groups import Job

GB = 10**9


def job_with(local_ranks: int, device: torch.device, backend: str) -> Job:
    """Rank 1 of 8 ranks."""
    return Job(1, 1, 8, local_ranks, device, backend, dist.HashStore(), Mock())


@pytest.mark.parametrize(
    ("uuids", "visible", "problem"),
    [
        ("ABCD", 1, None),  # one GPU per rank, as with srun --gpus-per-task=1
        (
            "AABB",
            2,
            "the buffers need 60,000,000,000 bytes of this device, but only 50,000,000,000 are",
        ),
    ],
)
def test_memory_of_ranks_that_share_a_gpu(
    uuids: str, visible: int, problem: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank needs 30 GB, and 50 GB are free. GPUs of different hosts may have the same UUID."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (50 * GB, 80 * GB))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    ranks = [{"host": host, "uuid": uuid} for host in "ab" for uuid in uuids]
    job = job_with(4, torch.device("cuda", 0), "nccl")
    with pytest.raises(ValueError, match=problem) if problem else nullcontext():
        check_room(30 * GB, job, {"ranks": ranks}, "-e")


def test_memory_of_ranks_on_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "free_on_host", lambda: 50 * GB)
    job = job_with(2, torch.device("cpu"), "gloo")
    check_room(25 * GB, job, {"ranks": []}, "-e")
    told = "the buffers need 52,000,000,000 bytes of this host, but only 50,000,000,000 are free; "
    told += "lower -e"
    with pytest.raises(ValueError, match=told):
        check_room(26 * GB, job, {"ranks": []}, "-e")
