"""The arithmetic of checkpoint_sweep.py, by hand: the example of its page, loads, the check."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from benchmarks.checkpoint_sweep import (
    Load,
    Save,
    State,
    answer,
    async_save,
    claim,
    column,
    derive,
    state_bytes,
)
from common.report import Case, Estimate
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
        "files": 5,
    } | other


def derived(ranks: list[Any], every: float = 600, strategy: str = "fsdp2") -> Case:
    key = {"mode": "async-thread", "strategy": strategy, "every_s": every}
    case = Case(key=key, ranks=list(range(len(ranks))))
    samples = {
        name: column([rank["saves"] for rank in ranks], name)
        for name in ("alone", "blocked", "upload")
    }
    samples["step"] = column([rank["saves"] for rank in ranks], "save")
    derive(case, Times(samples, [1] * 6), ranks)
    return case


def test_the_example_of_the_page() -> None:
    case = derived([facts(), facts(saves=[save(0.05, 4, 0.15, 0.7, write=0.2)] * 6)])
    m = case.metrics
    assert m["blocked_s"] == Estimate(0.10, 0.10, 0.10)
    assert vars(m["stall_s"]) == pytest.approx({"value": 0.30, "low": 0.30, "high": 0.30})
    assert m["first_extra_s"].value == pytest.approx(1.0)
    assert m["cost"].high == pytest.approx(0.0005)
    assert m["write_gb_per_s"].low == pytest.approx(0.4 / 0.8)
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


def test_the_check() -> None:
    case = derived([facts(), facts(same=False)])
    assert case.check == "failed: rank 1 loads another state than it saved"


def saved(mode: str, *cost: float | None, every_s: float = 600) -> Case:
    key = {"mode": mode, "every_s": every_s, "path": "/x", "strategy": "ddp"}
    return Case(key=key, ranks=[0], metrics={"cost": Estimate(*cost) if cost else None}, name=mode)  # type: ignore[arg-type]


def test_the_answer_tells_no_order_of_modes() -> None:
    """6 s of 600 are 1 %. The modes ran one after the other."""
    cases = [saved("a", 0.02, 0.018, 0.022), saved("b", 0.01, 0.009, 0.011), saved("c", 0.015)]
    assert answer(cases) == (
        "ddp into /x: a save every 10 minutes costs of the training 1.00 % (0.90 to 1.10) with b, "
        "1.50 % (no interval) with c, 2.00 % (1.80 to 2.20) with a; "
        "analysis/ab.py compares two modes in turns"
    )
    assert answer([saved("a", 0.01, every_s=30), saved("b")]) == (
        "ddp into /x: a save every 30 s costs of the training 1.00 % (no interval) with a"
    )
    assert answer([saved("a")]) == "ddp into /x: no save is on disk within 10 minutes"


def test_twelve_bytes_a_parameter() -> None:
    block = 2 * 64 + 4 * 64 * 64 + 2 * 4 * 64 * 64  # norms, attention, MLP
    parameters = 8 * block + 2 * 256 * 64 + 64  # tokens, head, norm
    assert state_bytes("decoder-tiny") == 12 * parameters


def test_too_little_space(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected 4,611,686,018,427,387,904 bytes free, got "):
        claim([str(tmp_path / "new")], 2**62)
    assert [*(tmp_path / "new").iterdir()] == []


def test_no_save_keeps_a_copy_of_the_state(tmp_path: Path) -> None:
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
            async_save(state, path, fsync=False, by=by).result()
        storages = [each for each in gc.get_objects() if type(each) is torch.UntypedStorage]
        copies = {each.data_ptr() for each in storages if each.nbytes() == size}
    finally:
        gc.enable()
        dist.destroy_process_group()
    assert len(copies) <= 2  # the state, and what one stager keeps
