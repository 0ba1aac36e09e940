"""checkpoint_sweep.py: its arithmetic and answer, and the memory that a checkpoint keeps."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks import checkpoint_sweep
from common.stats import Estimate, Times
from harness.report import Case


def test_metrics_by_hand() -> None:
    """The call returns after 0.1 s. Four steps during the upload take 0.8 s instead of 0.6 s."""
    seconds = {"step": [0.9, 0.65], "alone": [0.6, 0.6], "blocked": [0.1, 0.05]}
    seconds["upload"] = [0.8, 0.7]
    times = Times({part: [[s] * 6 for s in ranks] for part, ranks in seconds.items()}, [1] * 6)
    first = checkpoint_sweep.Checkpoint(total=1.10 + 0.80, alone=0.60, blocked=1.10, upload=1.6)
    marks = checkpoint_sweep.Marks(0.2, 0.3, 0.4)
    load = checkpoint_sweep.Load(marks, 400_000_000, True)
    fact: Any = {"first": first, "shard_bytes": 200_000_000, "loads": {"dcp.load": [load]}}
    case = Case(key={"strategy": "fsdp2", "every_s": 600}, ranks=[0, 1])
    checkpoint_sweep.derive(case, times, [fact, fact])
    m = case.metrics
    assert m["blocked_s"] == Estimate(0.10, 0.10, 0.10)
    assert vars(m["stall_s"]) == pytest.approx({"value": 0.30, "low": 0.30, "high": 0.30})
    assert m["first_extra_s"].value == pytest.approx(1.0)
    assert m["cost"].high == pytest.approx(0.0005)
    assert m["write_gb_per_s"].low == pytest.approx(0.4 / 0.8)
    assert case.check == "passed"
    case.key |= {"strategy": "ddp", "every_s": 0.5}  # replicas are one state, and uploads queue up
    other = load._replace(same=False)
    checkpoint_sweep.derive(case, times, [fact, fact | {"loads": {"dcp.load": [other]}}])
    assert (case.metrics["state_bytes"], case.metrics["cost"]) == (200_000_000, None)
    assert case.check == "failed: rank 1 loaded a state that differs from the saved one"


def test_the_parts_of_the_median_load_by_hand() -> None:
    """The median of 7 loads of 0.4 GB takes 0.5 s: its slowest rank had read after 0.2 s, and all
    ranks had their parts after 0.3 s. Each of 2 ranks read 0.2 GB from the disk."""
    middle = checkpoint_sweep.Marks(0.2, 0.3, 0.5)
    apart = (0, -3, 3, -1, 1, -2, 2)  # tenths of a second
    on_rank = [[middle._replace(applied=0.5 + n / 10) for n in apart] for _ in range(2)]
    on_rank[1][0] = middle._replace(read=0.1)
    rows = [[checkpoint_sweep.Load(each, 2 * 10**8, True) for each in row] for row in on_rank]
    facts: Any = [{"loads": {"dcp.load": row}} for row in rows]
    row = checkpoint_sweep.load_of("dcp.load", facts, 4 * 10**8)
    assert row["load_s"].value == pytest.approx(0.5)
    assert (row["load_s"].low, row["load_s"].high) == pytest.approx((0.2, 0.8))
    parts = [row[f"{part}_s"] for part in ("read", "distribute", "apply")]
    assert parts == pytest.approx([0.2, 0.1, 0.2])
    assert row["load_gb_per_s"].value == pytest.approx(0.8)
    assert row["from_disk"]
    assert not checkpoint_sweep.load_of("dcp.load", facts, 5 * 10**8)["from_disk"]
    case = Case(key={"path": "/x", "strategy": "ddp"}, ranks=[0], name="dcp.save")
    case.metrics = {"loads": [row, row | {"way": "another"}], "cost": None}
    case.key["every_s"] = 600
    assert checkpoint_sweep.answers([case])[1] == (
        "ddp from /x: a load takes 500 ms (200 to 800) with dcp.load (dcp.save), "
        "500 ms (200 to 800) with another (dcp.save)"
    )


def test_the_answer_does_not_rank_modes() -> None:
    """6 s of 600 s are 1%. The modes were timed one after the other, so they are not ranked."""
    key = {"every_s": 600, "path": "/x", "strategy": "ddp"}
    costs = {"a": Estimate(0.02, 0.018, 0.022), "b": Estimate(0.01), "queues": None}
    cases = [Case(key=key, ranks=[0], metrics={"cost": c}, name=mode) for mode, c in costs.items()]
    assert checkpoint_sweep.answer(cases) == (
        "ddp into /x: a checkpoint every 10 min costs 1.00% (no interval) of training time with "
        "b, 2.00% (1.80 to 2.20) with a; these were timed one after the other; use analysis/ab.py "
        "to compare them"
    )
    one, queues = (checkpoint_sweep.answer(some) for some in (cases[:1], cases[2:]))
    assert one.endswith(" costs 2.00% (1.80 to 2.20) of training time with a")
    assert queues == "ddp into /x: no upload ends within 10 min"


def test_foreign_and_full_folders_are_refused(tmp_path: Path) -> None:
    new, full = tmp_path / "new", tmp_path / "full"
    with pytest.raises(ValueError, match="expected 4,611,686,018,427,387,904 bytes free, got "):
        checkpoint_sweep.make_folders([str(new)], 2**62)
    assert [*new.iterdir()] == []
    full.mkdir()
    (full / "weights.pt").write_text("precious")
    with pytest.raises(ValueError, match=f"{full}: expected a new or empty folder"):
        checkpoint_sweep.make_folders([str(full)], 0)
    assert (full / "weights.pt").read_text() == "precious"


def test_checkpoints_do_not_keep_copies_of_the_state(tmp_path: Path) -> None:
    """Garbage collection is off, as in the script, and a stager refers to itself."""
    size = 1_234_567  # bytes; nothing else has this size
    content = {"weights": torch.zeros(size, dtype=torch.uint8)}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    none: Any = None
    world: Any = dist.group.WORLD
    state: Any = checkpoint_sweep.State(none, none, torch.device("cpu"), world)
    state.dicts = lambda: content
    gc.collect()
    gc.disable()
    try:
        for number in range(4):
            path, by = tmp_path / str(number), "THREAD"
            checkpoint_sweep.async_save(state, path, by=by).result()
        storages = [each for each in gc.get_objects() if type(each) is torch.UntypedStorage]
        copies = {each.data_ptr() for each in storages if each.nbytes() == size}
    finally:
        gc.enable()
        dist.destroy_process_group()
    assert len(copies) <= 2  # the state, and the copy of one stager
