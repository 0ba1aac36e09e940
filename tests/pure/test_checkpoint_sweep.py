"""The arithmetic of checkpoint_sweep.py, by hand: the example of its page, the check, a refusal."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from benchmarks.checkpoint_sweep import (
    Checkpoint,
    State,
    answer,
    async_save,
    derive,
    make_folders,
    state_bytes,
)
from common.report import Case, Estimate
from common.stats import Times

FIRST = Checkpoint(total=1.10 + 0.80, alone=0.60, blocked=1.10, upload=1.6)


def derived(every: float, strategy: str, samples: dict[str, list[float]], same: bool = True) -> Any:
    """The metrics of six checkpoints, and the check. samples: seconds of each rank."""
    key = {"mode": "async-thread", "strategy": strategy, "every_s": every}
    case = Case(key=key, ranks=[0, 1])
    times = {name: [[seconds] * 6 for seconds in ranks] for name, ranks in samples.items()}
    fact = {"first": FIRST, "shard_bytes": 200_000_000, "same": True}
    derive(case, Times(times, [1] * 6), [fact, fact | {"same": same}])  # type: ignore[list-item]
    return case.metrics, case.check


def test_the_example_of_the_page() -> None:
    """The call returns after 0.1 s; four steps beside the upload take 0.8 s in place of 0.6 s."""
    samples = {
        "step": [0.9, 0.65],
        "alone": [0.6, 0.6],
        "blocked": [0.1, 0.05],
        "upload": [0.8, 0.7],
    }
    m, check = derived(600, "fsdp2", samples)
    assert m["blocked_s"] == Estimate(0.10, 0.10, 0.10)
    assert vars(m["stall_s"]) == pytest.approx({"value": 0.30, "low": 0.30, "high": 0.30})
    assert m["first_extra_s"].value == pytest.approx(1.0)
    assert m["cost"].high == pytest.approx(0.0005)
    assert m["write_gb_per_s"].low == pytest.approx(0.4 / 0.8)
    assert check == "passed"
    m, check = derived(0.5, "ddp", samples, same=False)  # replicas are one state; uploads queue
    assert (m["state_bytes"], m["cost"]) == (200_000_000, None)
    assert check == "failed: rank 1 loads another state than it saved"


def saved(mode: str, *cost: float | None, every_s: float = 600) -> Case:
    key = {"mode": mode, "every_s": every_s, "path": "/x", "strategy": "ddp"}
    return Case(key=key, ranks=[0], metrics={"cost": Estimate(*cost) if cost else None}, name=mode)  # type: ignore[arg-type]


def test_the_answer_tells_no_order_of_modes() -> None:
    """6 s of 600 are 1 %. The modes ran one after the other."""
    cases = [saved("a", 0.02, 0.018, 0.022), saved("b", 0.01, 0.009, 0.011), saved("c", 0.015)]
    assert answer(cases) == (
        "ddp into /x: a checkpoint every 10 min costs the training 1.00 % (0.90 to 1.10) with b, "
        "1.50 % (no interval) with c, 2.00 % (1.80 to 2.20) with a; "
        "analysis/ab.py compares two modes in turns"
    )
    assert answer([saved("a", 0.01, every_s=30), saved("b")]) == (
        "ddp into /x: a checkpoint every 30 s costs the training 1.00 % (no interval) with a"
    )
    assert answer([saved("a")]) == "ddp into /x: no checkpoint is on disk within 10 min"


def test_twelve_bytes_a_parameter() -> None:
    block = 2 * 64 + 4 * 64 * 64 + 2 * 4 * 64 * 64  # norms, attention, MLP
    parameters = 8 * block + 2 * 256 * 64 + 64  # tokens, head, norm
    assert state_bytes("decoder-tiny") == 12 * parameters


def test_too_little_space(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected 4,611,686,018,427,387,904 bytes free, got "):
        make_folders([str(tmp_path / "new")], 2**62)
    assert [*(tmp_path / "new").iterdir()] == []


def test_no_checkpoint_keeps_a_copy_of_the_state(tmp_path: Path) -> None:
    """Python's garbage collector is off, as the script has it, and a stager refers to itself."""
    size = 1_234_567  # bytes, which nothing else has
    content = {"weights": torch.zeros(size, dtype=torch.uint8)}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    world: Any = dist.group.WORLD
    state: Any = State(None, None, torch.device("cpu"), world)  # type: ignore[arg-type]
    state.dicts = lambda: content
    gc.collect()
    gc.disable()
    try:
        for number in range(4):
            path, by = tmp_path / str(number), AsyncCheckpointerType.THREAD
            async_save(state, path, by=by).result()
        storages = [each for each in gc.get_objects() if type(each) is torch.UntypedStorage]
        copies = {each.data_ptr() for each in storages if each.nbytes() == size}
    finally:
        gc.enable()
        dist.destroy_process_group()
    assert len(copies) <= 2  # the state, and what one stager keeps
