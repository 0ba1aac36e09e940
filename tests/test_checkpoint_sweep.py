"""checkpoint_sweep.py as its user runs it, and with a disk, a writer and a rank that fail it."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from benchmarks import checkpoint_sweep

SCRIPT = "benchmarks/checkpoint_sweep.py"
SMALL = ("--model", "decoder-tiny", "--warmup-iters", "1", "--iters", "2")
TENSORS = (
    67 * 3
)  # of decoder-tiny: weights, and AdamW's two moments; each rank writes a part of all


@pytest.mark.smoke
@pytest.mark.parametrize("strategy", ["fsdp2", "ddp"])
def test_every_mode(bench: Callable[..., Any], tmp_path: Path, strategy: str) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    flags = ("--modes", "all", "--strategy", strategy, "--every", "60")
    run = bench(SCRIPT, *SMALL, *flags, TMPDIR=str(temporary), timeout=400)
    assert run.status == 0, run.out + run.err
    assert [case.key["mode"] for case in run.report.cases] == list(checkpoint_sweep.MODES)
    for case in run.report.cases:
        m = case.metrics
        assert case.check == "passed"
        assert [len(row) for row in case.samples_s["save"]] == [2, 2]
        assert 0 < m["blocked_s"] <= m["upload_s"]
        assert m["cost"] == pytest.approx(m["stall_s"] / 60)
        assert m["state_bytes"] == pytest.approx(12 * 427_072, rel=1e-3)  # and the step counters
        assert m["write_gb_per_s"] == pytest.approx(m["state_bytes"] / m["upload_s"] / 1e9)
        assert m["flipped_bit"] in ("noticed", "not noticed")
        synchronous = not case.key["mode"].startswith("async")
        assert (m["stall_s"] == m["blocked_s"]) == synchronous
        assert m["read_over_shard"] > 1
        if case.key["mode"] == "torch.save":
            assert round(m["read_over_shard"]) == (2 if strategy == "fsdp2" else 1)
    files = [case.metrics["files"] for case in run.report.cases]
    assert files == [1, 5, 11, 5, 5]  # .metadata, and of each rank its part and its seconds
    assert list(temporary.glob("checkpoint_sweep-*")) == []


@pytest.mark.smoke
def test_folders_that_are_not_its_own_are_refused(
    bench: Callable[..., Any], tmp_path: Path
) -> None:
    empty, full, new = (tmp_path / name for name in ("empty", "full", "new"))
    for folder in (empty, full):
        folder.mkdir()
    (full / "weights.pt").write_text("precious")
    for paths, words in (
        (f"{new},{full}", f"--paths {full} cannot be used: expected an empty or a new folder"),
        (f"{full}/weights.pt", "cannot be used: Not a directory"),
        ("/proc/self/new", "--paths /proc/self/new cannot be used: "),
    ):
        run = bench(SCRIPT, *SMALL, "--paths", paths, ranks=0, json=False)
        assert run.status == 2
        assert words in run.err
        assert run.err.count("\n") == 1
    assert (full / "weights.pt").read_text() == "precious"
    run = bench(SCRIPT, *SMALL, "--paths", f"{new},{empty}", "--modes", "dcp.save", ranks=0)
    assert run.status == 0, run.err
    assert [case.key["path"] for case in run.report.cases] == [str(new), str(empty)]
    assert list(empty.iterdir()) == []


@pytest.mark.faults
def test_a_slow_writer_stalls_the_steps_beside_it(bench: Callable[..., Any]) -> None:
    run = bench(SCRIPT, *SMALL, "--modes", "dcp.save,async-thread", inject="slow-writer")
    assert run.status == 0, run.out + run.err
    beside, synchronous = (case.metrics for case in reversed(run.report.cases))
    planted = TENSORS * 0.005
    assert synchronous["blocked_s"] > planted
    assert beside["upload_s"] > planted
    assert beside["stall_s"] > beside["blocked_s"]


@pytest.mark.faults
def test_a_wrong_load_fails_its_case_and_no_other(bench: Callable[..., Any]) -> None:
    run = bench(SCRIPT, *SMALL, "--modes", "dcp.save,torch.save", inject="wrong-load")
    assert run.status == 1
    checks = [case.check for case in run.report.cases]
    assert checks == ["failed: rank 1 loads another state than it saved", "passed"]


@pytest.mark.faults
@pytest.mark.parametrize("mode", ["dcp.save", "async-thread"])
def test_a_disk_that_is_full_in_the_middle_of_a_save(
    bench: Callable[..., Any], tmp_path: Path, mode: str
) -> None:
    path = tmp_path / "saves"
    modes = ("--modes", f"{mode},torch.save")
    run = bench(SCRIPT, *SMALL, *modes, "--paths", str(path), inject="disk-fills")
    assert run.status == 1
    checks = [case.check for case in run.report.cases]
    assert checks == ["failed: OSError: [Errno 27] File too large (rank 1)", "passed"]
    assert not path.exists()


@pytest.mark.faults
def test_a_rank_killed_while_saving_leaves_the_checkpoint_before(
    bench: Callable[..., Any], tmp_path: Path
) -> None:
    path = tmp_path / "saves"
    flags = ("--modes", "dcp.save", "--keep", "--paths", str(path))
    run = bench(SCRIPT, *SMALL, *flags, inject="dies-in-save")
    assert run.status != 0
    assert run.report.cases == []
    before, broken = sorted((path / "fsdp2-dcp.save").iterdir())
    assert not (broken / ".metadata").exists()
    dcp_to_torch_save(before, tmp_path / "whole.pt")
    state = torch.load(tmp_path / "whole.pt")
    values = [*state["model_state_dict"].values()]
    for moments in state["optim_state_dict"]["state"].values():
        values += [moments["exp_avg"], moments["exp_avg_sq"]]
    assert len(values) == TENSORS
    assert all(bool(x.isfinite().all()) for x in values)


@pytest.mark.faults
def test_ctrl_c_beside_a_process_that_saves(start: Callable[..., Any], tmp_path: Path) -> None:
    """Nothing listens beyond loopback, the folders go, and no process is left."""
    path = tmp_path / "saves"
    flags = ("--modes", "async-process", "--iters", "1000", "--paths", str(path))
    process = start(SCRIPT, *SMALL, *flags)
    process.until((path / "fsdp2-async-process" / "2" / ".metadata").exists)
    ranks = process.ranks()
    family = [p for rank in ranks.values() for p in (rank, *rank.children(recursive=True))]
    assert len(family) >= 2 * len(ranks)
    for each in family:
        for connection in each.net_connections("inet"):
            if connection.status == psutil.CONN_LISTEN:
                assert connection.laddr.ip in ("127.0.0.1", "::1"), connection
    os.kill(process.parts[0].pid, signal.SIGINT)
    assert process.wait(60) != 0
    process.until(lambda: not path.exists())
    _, alive = psutil.wait_procs(family, timeout=20)
    assert alive == []
