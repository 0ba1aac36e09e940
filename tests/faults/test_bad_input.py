"""A user's mistake: one line on stderr, exit status 2, nothing started, nothing lost."""

import json
import sys
from pathlib import Path

import pytest
from harness import SWEEP, TINY, run, torchrun


def refused(options: list[str], cwd: Path) -> str:
    done = run([sys.executable, SWEEP, "--device", "cpu", *options], cwd=cwd)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("ddp_sweep.py: error: ")
    return lines[0]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--model", "resnet5"], ["unknown model 'resnet5'", "did you mean", "resnet50"]),
        (["--model", "fasterrcnn_resnet50_fpn"], ["does not classify", "resnet50"]),
        (["--model", "fcn_resnet50"], ["does not classify"]),
        (["--batch-size", "0"], ["--batch-size", "at least 1", "'0'"]),
        (["--batch-size", "-4"], ["--batch-size", "'-4'"]),
        (["--bucket-size", "0"], ["--bucket-size", "above 0", "'0'"]),
        (["--bucket-size", "nan"], ["--bucket-size", "'nan'"]),
        (["--world-sizes", "2"], ["--world-sizes 2", "1 rank", "--nproc-per-node 2"]),
        (["--comm-hook", "fp61"], ["unknown 'fp61'", "fp16"]),
        (["--dtype", "fp32,fp32"], ["each item once"]),
        (["--distributed-backend", "nccl"], ["nccl", "gloo"]),
        (["--bucketsize", "3"], ["unknown argument '--bucketsize'", "--bucket-size"]),
        (["--iters", "5", "--min-iters", "3"], ["--min-iters has no effect with --iters"]),
        (["--resume"], ["--json PATH"]),
        (["--json", "."], ["is a directory"]),
        (["--json", "missing/report.json"], ["no directory"]),
        (["--json", "/dev/null"], ["not a regular file"]),
        (["--json", "other.txt"], ["overwrite", "not JSON"]),
        (["--json", "broken.json", "--resume"], ["broken.json", "not JSON"]),
        (["--json", "pickled.json", "--resume"], ["pickled.json"]),
        (["--json", "calibrate.json", "--resume"], ["a report of calibrate"]),
        (["--json", "elsewhere.json", "--resume"], ["environment differs", "torch"]),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else None,
)
def test_refused(tmp_path: Path, options: list[str], expected: list[str]) -> None:
    files = {
        "other.txt": b"my notes\n",
        "broken.json": b'{"schema": "torchrun-bench/1", "cases": [',
        "pickled.json": b"\x80\x04\x95cos\nsystem\n",
        "calibrate.json": json.dumps(report("calibrate")).encode(),
        "elsewhere.json": json.dumps(report("ddp_sweep")).encode(),
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    message = refused(options, tmp_path)
    for text in expected:
        assert text in message
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == files


def report(benchmark: str) -> dict[str, object]:
    return {
        "schema": "torchrun-bench/1",
        "benchmark": benchmark,
        "status": "complete",
        "argv": [],
        "started_at": "2026-01-01T00:00:00+00:00",
        "environment": {"torch": "0.1"},
        "cases": [],
    }


def test_cuda_asked_for_and_absent(tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is CUDA here")
    done = run([sys.executable, SWEEP, "--device", "cuda"], cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "ddp_sweep.py: error: --device cuda: torch sees no CUDA device here; try --device cpu"
    ]


def test_an_unwritable_folder(tmp_path: Path) -> None:
    """Root may write everywhere but in a file system of the kernel's."""
    message = refused(["--json", "/proc/report.json"], tmp_path)
    assert "cannot be written" in message


@pytest.mark.parametrize("options", [["--model", "resnet5"], ["--batch-size", "x"]])
def test_one_message_for_all_ranks(tmp_path: Path, options: list[str]) -> None:
    done = run([*torchrun(3), SWEEP, *options], cwd=tmp_path)
    assert done.returncode != 0
    said = [line for line in done.stderr.splitlines() if "error: " in line and "ddp_sweep" in line]
    assert len(said) == 1, done.stderr
    assert "exitcode  : 2" in done.stderr


def test_environment_of_half_a_launcher(tmp_path: Path) -> None:
    command = ["env", "RANK=0", sys.executable, SWEEP, "--device", "cpu", *TINY]
    done = run(command, cwd=tmp_path)
    assert done.returncode == 2
    assert "WORLD_SIZE" in done.stderr
    assert len(done.stderr.splitlines()) == 1
