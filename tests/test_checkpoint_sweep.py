"""checkpoint_sweep.py as its user runs it, and with a disk, a writer and a rank that fail it."""

import os
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from benchmarks.checkpoint_sweep import MODES

SCRIPT = "benchmarks/checkpoint_sweep.py"
SMALL = ("--model", "decoder-nano", "--warmup-iters", "1", "--iters", "1")
# of decoder-nano: weights, and AdamW's two moments; each rank writes a part of each
TENSORS, PARAMETERS = 35 * 3, 229_952


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("strategy", "modes"), [("fsdp2", list(MODES)), ("ddp", ["torch.save", "async-thread"])]
)
def test_every_mode(
    bench: Callable[..., Any], tmp_path: Path, strategy: str, modes: list[str]
) -> None:
    path = tmp_path / "checkpoints"
    flags = ("--strategy", strategy, "--modes", ",".join(modes), "--every", "60")
    run = bench(SCRIPT, *SMALL, *flags, "--paths", str(path))
    assert run.status == 0, run.out + run.err
    assert [case.key["mode"] for case in run.report.cases] == modes
    for case in run.report.cases:
        m = case.metrics
        assert case.check == "passed"
        assert [len(row) for row in case.samples_s["step"]] == [1, 1]
        assert 0 < m["blocked_s"].value <= m["upload_s"].value
        assert m["cost"].value == pytest.approx(m["stall_s"].value / 60)
        assert m["state_bytes"] == pytest.approx(12 * PARAMETERS, rel=1e-3)  # and the step counters
        assert (m["stall_s"] == m["blocked_s"]) == (not case.name.startswith("async"))
    assert list(path.iterdir()) == []
    title = f"decoder-nano, batch size 1, {strategy}, AdamW: 0.003 GB into {path} every 60 s"
    assert f"\n{title}\n" in run.out


@pytest.mark.smoke
def test_folders_that_are_not_its_own_are_refused(
    bench: Callable[..., Any], tmp_path: Path
) -> None:
    new, full = tmp_path / "new", tmp_path / "full"
    full.mkdir()
    (full / "weights.pt").write_text("precious")
    run = bench(SCRIPT, *SMALL, "--paths", f"{new},{full}", ranks=0, json=False)
    assert run.status == 2
    assert f"--paths: {full}: expected an empty or a new folder" in run.err
    assert run.err.count("\n") == 1
    assert (full / "weights.pt").read_text() == "precious"


@pytest.mark.smoke
def test_two_storages(bench: Callable[..., Any], tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        flags = ("--paths", f"{disk},{memory}", "--modes", "dcp.save")
        run = bench(SCRIPT, *SMALL, *flags, ranks=0)
        assert list(Path(memory).iterdir()) == list(disk.iterdir()) == []
    assert run.status == 0, run.err
    assert [case.key["path"] for case in run.report.cases] == [str(disk), memory]


@pytest.mark.faults
def test_a_slow_writer_stalls_the_steps_beside_it(bench: Callable[..., Any]) -> None:
    flags = ("--modes", "dcp.save,async-thread", "--iters", "2")
    run = bench(SCRIPT, *SMALL, *flags, inject="slow-writer")
    assert run.status == 0, run.out + run.err
    beside, synchronous = (case.metrics for case in reversed(run.report.cases))
    planted = TENSORS * 0.005
    assert synchronous["blocked_s"].value > planted
    assert beside["upload_s"].value > planted
    assert beside["stall_s"].value > beside["blocked_s"].value


@pytest.mark.faults
def test_a_wrong_load_fails_its_case_and_no_other(bench: Callable[..., Any]) -> None:
    run = bench(SCRIPT, *SMALL, "--modes", "dcp.save,torch.save", inject="wrong-load")
    assert run.status == 1
    checks = [case.check for case in run.report.cases]
    assert checks == ["failed: rank 1 loads another state than it saved", "passed"]


@pytest.mark.faults
def test_a_disk_that_is_full_in_the_middle_of_a_save(
    bench: Callable[..., Any], tmp_path: Path
) -> None:
    path = tmp_path / "checkpoints"
    modes = ("--modes", "dcp.save,async-thread,torch.save")
    run = bench(SCRIPT, *SMALL, *modes, "--paths", str(path), inject="disk-fills")
    assert run.status == 1
    *full, whole = [case.check for case in run.report.cases]
    for check in full:  # the disk of rank 1 stays as it is
        assert "the checkpoint failed on rank 1: [Errno 27] File too large" in check
    assert whole == "passed"
    assert list(path.iterdir()) == []


@pytest.mark.faults
def test_a_rank_killed_while_saving_leaves_the_checkpoint_before(
    bench: Callable[..., Any], tmp_path: Path
) -> None:
    path, left = tmp_path / "checkpoints", tmp_path / "left"
    flags = ("--modes", "dcp.save", "--paths", str(path))
    run = bench(SCRIPT, *SMALL, *flags, inject="dies-in-save", SAVES=str(path), LEFT=str(left))
    assert run.status != 0
    assert run.report.cases == []
    before, broken = sorted(left.glob("*/fsdp2-dcp.save/*"))
    assert not (broken / ".metadata").exists()
    dcp_to_torch_save(before, tmp_path / "whole.pt")
    state = torch.load(tmp_path / "whole.pt")
    values = [*state["model_state_dict"].values()]
    for moments in state["optim_state_dict"]["state"].values():
        values += [moments["exp_avg"], moments["exp_avg_sq"]]
    assert len(values) == TENSORS
    assert all(bool(x.isfinite().all()) for x in values)


@pytest.mark.faults
@pytest.mark.parametrize("end", ["ctrl-c", "rank 0 is killed"])
def test_an_end_beside_a_process_that_saves(
    start: Callable[..., Any], tmp_path: Path, end: str
) -> None:
    """Nothing listens beyond loopback, the folders go, and no process is left."""
    path = tmp_path / "checkpoints"
    flags = ("--modes", "async-process", "--iters", "1000", "--paths", str(path))
    process = start(SCRIPT, *SMALL, *flags, cold=True)  # a fork would listen where torchrun does
    process.until(lambda: [*path.glob("*/fsdp2-async-process/2/.metadata")])
    ranks = process.ranks()
    family = [p for rank in ranks.values() for p in (rank, *rank.children(recursive=True))]
    assert len(family) >= 2 * len(ranks)
    for each in family:
        for connection in each.net_connections("inet"):
            if connection.status == psutil.CONN_LISTEN:
                assert connection.laddr.ip in ("127.0.0.1", "::1"), connection
    if end == "ctrl-c":
        os.kill(process.parts[0].pid, signal.SIGINT)
    else:
        ranks[0].kill()
    assert process.wait(60) != 0
    process.until(lambda: not [*path.iterdir()])
    _, alive = psutil.wait_procs(family, timeout=20)
    assert alive == []
