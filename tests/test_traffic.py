"""traffic.py against real ranks, which make the same calls with the same bytes."""

import importlib.util
import inspect
import re
from pathlib import Path

import pytest
from torch.distributed.device_mesh import init_device_mesh

from harness.report import load
from tests.process import ROOT, Bench, python

MESHES = "ddp4,dp2tp2,dp2ep2"  # together a mesh for each kind of collective


@pytest.mark.smoke
def test_gloo_sends_what_traffic_says(bench: Bench) -> None:
    """Compared: axis, collective, bytes and calls of the last of four ranks."""
    script, variables = "tests/recorded_traffic.py", {"TORCH_FR_BUFFER_SIZE": "20000"}
    run = bench(script, MESHES, ranks=4, json=False, **variables)
    assert run.out.count(" calls: same\n") == 3
    assert " 0 calls" not in run.out


@pytest.mark.smoke
def test_times_next_to_those_of_real_ranks(bench: Bench, tmp_path: Path) -> None:
    """The commands of docs/traffic.md for dp on 4 ranks. Their times depend on the machine, but
    each call of the step must have one, and the mesh must be found in the sweep."""
    few = ("--device", "cpu", "--iters", "6", "-w", "1")
    sizes = ("-b", "16K", "-e", "1M", "-f", "4", "--collective", "all_gather,reduce_scatter")
    measured = bench("benchmarks/collectives.py", *sizes, *few, ranks=4)
    paths = [str(measured.path.rename(tmp_path / "measured.jsonl"))]
    swept = bench("benchmarks/parallel_sweep.py", "--mesh", "dp4", *few, ranks=4)
    report = str(tmp_path / "report.jsonl")
    flags = ["--ranks", "4", "--model", "decoder-nano", "--dtype", "fp32", "--global-batch", "16"]
    flags += ["--measured", *paths, "--against", str(swept.path), "--json", report]
    done = python(str(ROOT / "benchmarks" / "traffic.py"), *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    (case,) = load(report).cases
    assert case.metrics["dp_alone_s"].value == case.metrics["dp_s"].value > 0
    (of_sweep,) = swept.report.cases
    assert case.metrics["dp_exposed_s"] == of_sweep.metrics["exposed_dp_s"]
    said = "# dp4, rank 0: the collectives of dp take .* alone; parallel_sweep.py measured .* as e"
    assert re.search(said, done.stdout), done.stdout


@pytest.mark.oldest
def test_one_process_is_any_rank(tmp_path: Path) -> None:
    report = str(tmp_path / "report.jsonl")
    meshes = "dp2tp4,dp2pp2tp2:1f1b,cp4dp2"
    flags = ["--ranks", "8", "--model", "decoder-nano", "--mesh", meshes, "--json", report]
    done = python(str(ROOT / "benchmarks" / "traffic.py"), *flags)
    if "backend_override" not in inspect.signature(init_device_mesh).parameters:
        assert "requires a newer torch, whose init_device_mesh has backend_override" in done.stderr
        return
    if importlib.util.find_spec("torch.distributed._meta_registrations") is None:
        assert "requires a newer torch, whose collectives accept fake tensors" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    assert [case.failed for case in load(report).cases] == [False] * 3
