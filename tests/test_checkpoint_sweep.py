"""checkpoint_sweep.py under torchrun, and with a full disk, a slow writer and a killed rank."""

import os
import signal
import tempfile
from pathlib import Path

import psutil
import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.process import Bench, Start

SCRIPT = "benchmarks/checkpoint_sweep.py"
SMALL = ("--model", "decoder-nano", "--warmup-iters", "1", "--iters", "1")
# of decoder-nano: weights and two moments of AdamW; each rank writes a part of each
TENSORS, PARAMETERS = 35 * 3, 229_952
faults = pytest.mark.faults


@pytest.mark.smoke
def test_both_strategies_on_two_storages(bench: Bench, tmp_path: Path) -> None:
    """Other modes are used in the tests of faults below and in test_by_hand.py (async-process)."""
    disk = tmp_path / "disk"
    flags = ("--strategy", "fsdp2,ddp", "--modes", "torch.save,async-thread", "--every", "60")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        run = bench(SCRIPT, *SMALL, *flags, "--paths", f"{disk},{memory}")
        assert list(Path(memory).iterdir()) == list(disk.iterdir()) == []
    assert [case.key["path"] for case in run.report.cases] == [str(disk)] * 4 + [memory] * 4
    for case in run.report.cases:
        m = case.metrics
        assert case.check == "passed"
        assert 0 < m["blocked_s"].value <= m["upload_s"].value
        assert m["cost"].value == pytest.approx(m["stall_s"].value / 60)
        assert m["state_bytes"] == pytest.approx(12 * PARAMETERS, rel=1e-3)  # plus step counters
        assert (m["stall_s"] == m["blocked_s"]) == (case.name == "torch.save")
        by_torch = ["torch.load on each rank", "torch.load on rank 0"]
        ways = by_torch if case.name == "torch.save" else ["dcp.load"]
        assert [row["way"] for row in m["loads"]] == ways
        for row in m["loads"]:
            parts = [row[f"{part}_s"] for part in ("read", "distribute", "apply")]
            assert min(parts) > 0
            assert sum(parts) == pytest.approx(row["load_s"].value)
        assert m["load_s"] == m["loads"][0]["load_s"]
        if case.key["path"] == memory:
            assert not any(row["from_disk"] for row in m["loads"])
    title = f"decoder-nano, batch size 1, ddp, AdamW: 0.003 GB into {disk} every 60 s"
    assert f"\n{title}\n" in run.out


@faults
def test_a_slow_writer_and_a_wrong_load(bench: Bench) -> None:
    """An upload continues after the call. A wrong load fails only its case."""
    flags = ("--modes", "dcp.save,async-thread,torch.save")
    run = bench(SCRIPT, *SMALL, *flags, inject="slow-writer,wrong-load", status=1)
    wrong = "failed: rank 1 loaded a state that differs from the saved one"
    assert [case.check for case in run.report.cases] == [wrong, wrong, "passed"]
    synchronous, beside, _ = (case.metrics for case in run.report.cases)
    planted = TENSORS * 0.005
    assert synchronous["blocked_s"].value > planted
    assert beside["upload_s"].value > planted
    assert beside["upload_s"].value > beside["blocked_s"].value


@faults
def test_a_disk_that_fills_up_during_a_save(bench: Bench, tmp_path: Path) -> None:
    path = tmp_path / "checkpoints"
    modes = ("--modes", "dcp.save,async-thread,torch.save")
    run = bench(SCRIPT, *SMALL, *modes, "--paths", str(path), inject="disk-fills", status=1)
    *full, whole = [case.check for case in run.report.cases]
    for check in full:  # the disk of rank 1 remains full
        assert "the checkpoint failed on rank 1: [Errno 27] File too large" in check
    assert whole == "passed"
    assert list(path.iterdir()) == []


@faults
def test_a_rank_killed_while_saving_leaves_the_previous_one(bench: Bench, tmp_path: Path) -> None:
    path, left = tmp_path / "checkpoints", tmp_path / "left"
    flags = ("--modes", "dcp.save", "--paths", str(path))
    folders = {"SAVES": str(path), "LEFT": str(left)}
    run = bench(SCRIPT, *SMALL, *flags, inject="dies-in-save", status=1, **folders)
    assert run.report.cases == []
    before, broken = sorted(left.glob("*/fsdp2-dcp.save/*"))
    assert not (broken / ".metadata").exists()
    dcp_to_torch_save(before, tmp_path / "whole.pt")
    moments = torch.load(tmp_path / "whole.pt")["optim_state_dict"]["state"].values()
    assert len(moments) == TENSORS / 3
    assert all(bool(each["exp_avg"].isfinite().all()) for each in moments)


@faults
def test_ctrl_c_while_another_process_saves(start: Start, tmp_path: Path) -> None:
    """Folders are removed and no process is left. test_input_sweep.py kills all ranks."""
    path = tmp_path / "checkpoints"
    flags = ("--modes", "async-process", "--iters", "1000", "--paths", str(path))
    process = start(SCRIPT, *SMALL, *flags)
    process.until(lambda: [*path.glob("*/fsdp2-async-process/1/.metadata")])
    family = process.tree()
    assert len(family) > 4  # torchrun, two ranks, and a process that saves for each of them
    os.kill(process.parts[0].pid, signal.SIGINT)
    assert process.wait() != 0
    process.until(lambda: not [*path.iterdir()])
    _, alive = psutil.wait_procs(family, timeout=500)
    assert alive == []
