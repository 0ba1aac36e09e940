"""The arithmetic of checkpoint_sweep.py, by hand: the example of its page, loads, the check."""

import gc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from benchmarks.checkpoint_sweep import (
    Load,
    Save,
    async_save,
    claim,
    column,
    derive,
    state_bytes,
)
from common.report import Case
from common.stats import Times


def save(blocked: float, steps: int, seconds: float, upload: float, write: float = 0.4) -> Any:
    """A save of which so many steps were beside the upload, each of `seconds`."""
    return Save(blocked + steps * seconds, steps * 0.15, blocked, upload, write)


FIRST = save(1.10, 4, 0.20, 1.6)


def facts(**other: Any) -> dict[str, Any]:
    return {
        "first": FIRST,
        "saves": [save(0.10, 4, 0.20, 0.8)] * 6,
        "unsynced": [save(0.10, 1, 0.20, 0.2)] * 3,
        "host_ram_gib": 0.5,
        "cold": [Load(seconds, 500_000_000, 200_000_000) for seconds in (0.4, 0.5, 0.6)],
        "warm": [Load(seconds, 500_000_000, 0) for seconds in (0.1, 0.1, 0.3)],
        "shard_bytes": 200_000_000,
        "same": True,
        "noticed": False,
        "files": 5,
    } | other


def derived(ranks: list[dict[str, Any]], every: float = 600, strategy: str = "fsdp2") -> Case:
    key = {"mode": "async-thread", "strategy": strategy, "every_s": every}
    case = Case(key, list(range(len(ranks))))
    samples = {name: column(ranks, "saves", name) for name in ("alone", "blocked", "upload")}
    samples["step"] = column(ranks, "saves", "save")
    derive(case, Times(samples, [1] * 6), ranks)
    return case


def test_the_example_of_the_page() -> None:
    case = derived([facts(), facts(saves=[save(0.05, 4, 0.15, 0.7, write=0.2)] * 6)])
    m = case.metrics
    assert m["blocked_s"] == 0.10
    assert m["stall_s"] == pytest.approx(0.30)
    assert m["stall_ci95_s"] == pytest.approx((0.30, 0.30))
    assert m["first_extra_s"] == pytest.approx(1.0)
    assert m["cost"] == pytest.approx(0.0005)
    assert m["write_gb_per_s"] == pytest.approx(0.4 / 0.8)
    assert m["fsync_factor"] == pytest.approx(4)
    assert (m["slowest_rank"], m["slowest_factor"]) == (0, pytest.approx(0.4 / 0.3))
    assert (m["load_cold_gb_per_s"], m["load_warm_gb_per_s"]) == (pytest.approx(0.8), 4)
    assert m["read_over_shard"] == 2.5
    assert case.check == "passed"


def test_replicas_are_one_state_and_uploads_may_queue() -> None:
    m = derived([facts(), facts()], every=0.5, strategy="ddp").metrics
    assert m["state_bytes"] == 200_000_000
    assert m["cost"] is None


def test_what_is_not_known_is_left_out() -> None:
    """Loads of which the device gave a part are not cold; torch.save does not time its writes."""
    cold = [Load(0.4, 500_000_000, 170_000_000)] * 3
    m = derived([facts(cold=cold, saves=[save(0.1, 0, 0.0, 0.1, write=0.0)] * 6)]).metrics
    assert "load_cold_s" not in m
    assert "slowest_rank" not in m
    assert m["stall_s"] == m["blocked_s"] == m["upload_s"]


@pytest.mark.parametrize(
    ("ranks", "check", "bit"),
    [
        ([{}, {"same": False}], "failed: rank 1 loads another state than it saved", "not noticed"),
        ([{"noticed": True}, {}], "passed", "noticed"),
    ],
)
def test_the_check(ranks: list[dict[str, Any]], check: str, bit: str) -> None:
    case = derived([facts(**rank) for rank in ranks])
    assert (case.check, case.metrics["flipped_bit"]) == (check, bit)


def test_twelve_bytes_a_parameter() -> None:
    block = 2 * 64 + 4 * 64 * 64 + 2 * 4 * 64 * 64  # norms, attention, MLP
    parameters = 8 * block + 2 * 256 * 64 + 64  # tokens, head, norm
    assert state_bytes("decoder-tiny") == 12 * parameters


def test_too_little_space(tmp_path: Path) -> None:
    folders, problem = claim([str(tmp_path / "new")], 2**62)
    assert "expected 4,611,686,018,427,387,904 bytes free, got " in str(problem)
    assert [str(path) for path in (tmp_path / "new").iterdir()] == folders  # to be removed


def test_no_save_keeps_a_copy_of_the_state(tmp_path: Path) -> None:
    """Python's garbage collector is off, as the script has it, and a stager refers to itself."""
    size = 1_234_567  # bytes, which nothing else has
    state = {"weights": torch.zeros(size, dtype=torch.uint8)}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    training: Any = SimpleNamespace(stager=None, device=torch.device("cpu"), state=lambda: state)
    training.saves = dist.group.WORLD
    gc.collect()
    gc.disable()
    try:
        for number in range(4):
            path, by = tmp_path / str(number), AsyncCheckpointerType.THREAD
            async_save(training, path, fsync=False, by=by).result()
        storages = [each for each in gc.get_objects() if type(each) is torch.UntypedStorage]
        copies = {each.data_ptr() for each in storages if each.nbytes() == size}
    finally:
        gc.enable()
        dist.destroy_process_group()
    assert len(copies) <= 2  # the state, and what one stager keeps
