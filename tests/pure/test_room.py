"""benchmarks/workloads/room.py: memory for the ranks that share a GPU or a host."""

from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from benchmarks.workloads import room
from benchmarks.workloads.room import check_room
from common.groups import Job
from tests.pure.reports import refused

GB = 10**9


def job_with(local_ranks: int, device: torch.device, backend: str) -> Job:
    """Rank 1 of 8 ranks."""
    return Job(1, 1, 8, local_ranks, device, backend, dist.HashStore(), Mock())


def test_memory_of_ranks_that_share_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank needs 30 GB, and 50 GB are free. GPUs of different hosts may have the same UUID."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (50 * GB, 80 * GB))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    job = job_with(4, torch.device("cuda", 0), "nccl")
    one_each, shared = (
        {"ranks": [{"host": host, "uuid": uuid} for host in "ab" for uuid in uuids]}
        for uuids in ("ABCD", "AABB")
    )
    told = "the buffers need 60,000,000,000 bytes of this device, but only 50,000,000,000 are"
    assert told in refused(check_room, 30 * GB, job, shared, "-e")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # srun --gpus-per-task=1
    check_room(30 * GB, job, one_each, "-e")


def test_memory_of_ranks_on_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "free_on_host", lambda: 50 * GB)
    job = job_with(2, torch.device("cpu"), "gloo")
    check_room(25 * GB, job, {"ranks": []}, "-e")
    told = "the buffers need 52,000,000,000 bytes of this host, but only 50,000,000,000 are free; "
    told += "lower -e"
    assert told in refused(check_room, 26 * GB, job, {"ranks": []}, "-e")
