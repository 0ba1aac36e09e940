"""ddp_sweep.py as its user runs it. What the core promises is in test_faults.py."""

import math
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import ddp_sweep
from common.report import Case
from common.stats import Times
from tests.process import ROOT

SCRIPT = "benchmarks/ddp_sweep.py"
SMALL = ("--model", "mobilenet_v3_small", "--image-size", "32", "--batch-size", "2")
SHORT = (*SMALL, "--iters", "6", "--warmup-iters", "1")
smoke = pytest.mark.smoke


@smoke
def test_two_ranks_then_resume(bench: Callable[..., Any]) -> None:
    run = bench(SCRIPT, *SHORT, ranks=2)
    assert run.status == 0, run.err
    assert [case.key["label"] for case in run.report.cases] == ["no ddp", "1M/1G", "1M/2G"]
    assert run.report.status == "complete"
    last = run.report.cases[-1]
    assert last.check == "passed"
    assert list(last.samples_s) == ["step", "local compute", "alone"]
    assert [len(rows) for rows in last.samples_s["step"]] == [6, 6]
    p50 = last.metrics["step_time_p50_s"]
    row = next(line for line in run.out.splitlines() if line.startswith("1M/2G"))
    assert f"{p50:.4f}" in row
    assert f"{2 / p50:.1f}" in row  # ex/sec/dev: the batch of a rank
    assert last.metrics["samples_per_s"] == pytest.approx(2 * 2 / p50)
    base = run.report.cases[0].metrics["step_time_p50_s"]
    assert last.metrics["efficiency"] == pytest.approx(base / p50)
    variables = run.report.environment["variables"]
    assert variables["OMP_NUM_THREADS"] == "1"
    # what the script sets itself is not the user's
    assert {"GLOO_SOCKET_IFNAME", "TORCH_NCCL_ASYNC_ERROR_HANDLING"}.isdisjoint(variables)
    path = shlex.quote(str(ROOT / SCRIPT))
    assert f"# command: {path} --model mobilenet_v3_small --image-size 32" in run.out

    lines = run.path.read_text().splitlines()
    again = bench(SCRIPT, *SHORT, "--resume", ranks=2)
    assert again.status == 0, again.err
    assert row in again.out  # shown from the report
    assert again.path.read_text().splitlines()[:-1] == lines  # and a second last line


@smoke
def test_five_ranks_from_a_path_with_a_space(bench: Callable[..., Any], tmp_path: Path) -> None:
    copy = tmp_path / "a checkout"
    for folder in ("benchmarks", "common"):
        shutil.copytree(ROOT / folder, copy / folder)
    run = bench(str(copy / SCRIPT), *SHORT, "--no-breakdown", ranks=5)
    assert run.status == 0, run.err
    labels = [case.key["label"] for case in run.report.cases]
    assert labels == ["no ddp", "1M/1G", "1M/2G", "1M/4G", "1M/5G"]
    assert {case.check for case in run.report.cases} == {"passed"}


@smoke
def test_hooks_and_dtypes(bench: Callable[..., Any]) -> None:
    hooks = "none,allreduce,fp16,bf16,powersgd"
    flags = ("--comm-hook", hooks, "--bucket-size", "1", "--dtype", "bf16")
    run = bench(SCRIPT, *SMALL, *flags, "--iters", "2", "--world-sizes", "2", ranks=2)
    cases = {case.key["comm_hook"]: case for case in run.report.cases}
    for hook in ("none", "allreduce", "fp16", "bf16"):
        assert cases[hook].check == "passed"
        assert cases[hook].metrics["communication_p50_s"] > 0
    assert "deadlocks gloo" in cases["powersgd"].check
    assert run.status != 0


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (("--modle", "resnet50"), "unknown argument '--modle'; did you mean --model"),
        (("--model", "resnet5"), "unknown model 'resnet5'; did you mean resnet50"),
        (("--model", "fcn_resnet50"), "unknown model 'fcn_resnet50'"),  # no classifier
        (("--bucket-size", "25,x"), "--bucket-size: expected a number above 0, got 'x'"),
        (("--comm-hook", "bf61"), "got 'bf61'; did you mean bf16?"),
        (("--world-sizes", "2,node"), "--world-sizes: expected a whole number of at least 1"),
        (("--model", "inception_v3", "--image-size", "224"), "--image-size 299 or more, got 224"),
    ],
)
def test_a_mistake_is_one_line(
    flags: tuple[str, ...], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        ddp_sweep.parse_args(list(flags))
    assert caught.value.code == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert line in said


@smoke
@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (("--world-sizes", "4"), "--world-sizes 4 is more than the 1 ranks"),
        (("--json", __file__), "--json: it would replace"),
        (("--backend", "smoke"), "--backend smoke: this torch was built without it"),
    ],
)
def test_a_mistake_that_the_running_job_shows(
    bench: Callable[..., Any], flags: tuple[str, ...], line: str
) -> None:
    before = Path(__file__).read_bytes()
    run = bench(SCRIPT, *SHORT, *flags, ranks=0, json=False)
    assert run.status == 2
    (said,) = run.err.splitlines()
    assert said.startswith("ddp_sweep.py: error: ")
    assert line in said
    assert Path(__file__).read_bytes() == before


def test_labels_and_sets_of_ranks() -> None:
    assert ddp_sweep.world_sizes(1, 1) == [1]
    assert ddp_sweep.world_sizes(5, 5) == [1, 2, 4, 5]
    assert ddp_sweep.world_sizes(24, 8) == [1, 2, 4, 8, 16, 24]
    labels = [ddp_sweep.label_of(size, 8) for size in (1, 8, 16, 12)]
    assert labels == ["1M/1G", "1M/8G", "2M/8G", "2M/12G in all"]


def test_every_number_of_nodes_by_a_word() -> None:
    assert ddp_sweep.chosen_sizes(None, 24, 8) == [1, 2, 4, 8, 16, 24]
    assert ddp_sweep.chosen_sizes(["nodes"], 48, 8) == [8, 16, 24, 32, 40, 48]
    assert ddp_sweep.chosen_sizes([2, "nodes"], 20, 8) == [2, 8, 16, 20]
    assert ddp_sweep.chosen_sizes(["nodes"], 5, 5) == [5]
    assert ddp_sweep.chosen_sizes([4, 2], 8, 8) == [2, 4]


def test_ranks_stand_beside_the_label_where_it_does_not_say_them() -> None:
    args = ddp_sweep.parse_args(["--device", "cpu"])
    names = []
    for size in (0, 1, 8, 16, 12):
        label = ddp_sweep.label_of(size, 8) if size else "no ddp"
        key = {"label": label, "world_size": size, "bucket_size_mb": 25.0, "comm_hook": "none"}
        names.append(ddp_sweep.name_of(args, Case(key, [0])))
    assert names == ["no ddp", "1M/1G", "1M/8G", "2M/8G (16)", "2M/12G in all"]


def test_the_title_has_what_all_cases_share() -> None:
    def title(*flags: str) -> str:
        args = ddp_sweep.parse_args(["--device", "cpu", *flags])
        return ddp_sweep.title_of("resnet18", args.dtype[0], args, torch.device("cpu"))

    start = "resnet18, batch size 8, 64 px, "
    assert title() == start + "torch's default precision, buckets of 25 MB"
    assert title("--dtype", "fp32", "--bucket-size", "1,2") == start + "fp32"
    assert title("--comm-hook", "bf16", "--bucket-size", "100").endswith("100 MB, hook bf16")
    assert title("--comm-hook", "bf16,none").endswith("25 MB")
    flags = ("--channels-last", "--static-graph", "--gradient-as-bucket-view")
    assert title(*flags).endswith("25 MB, channels last, gradient as bucket view, static graph")


def test_the_metrics_of_a_case_by_hand() -> None:
    """6 rounds of a sample. In each the slowest rank's step is 10 ms and its local compute 8 ms."""
    rows = {
        "step": [[0.010] * 6, [0.009] * 6],
        "local compute": [[0.004] * 6, [0.008] * 6],
        "alone": [[0.004] * 6, [0.003] * 6],
    }
    case = Case({"batch_size": 5}, [0, 1], rows, [1] * 6)
    facts = [ddp_sweep.Facts("abc", {"memory_gib": gib}) for gib in (0.5, 0.75)]
    ddp_sweep.derive(0.008, case, Times(rows, case.rounds), facts)
    m = case.metrics
    assert case.check == "passed"
    assert m["step_time_p50_s"] == pytest.approx(0.010)
    assert m["samples_per_s"] == pytest.approx(2 * 5 / 0.010)
    assert m["efficiency"] == pytest.approx(0.8)  # one process takes 8 ms
    assert m["exposed_communication_s"] == pytest.approx(0.002)
    assert m["communication_p50_s"] == pytest.approx(0.004)
    assert m["overlap"] == pytest.approx(0.5)  # 2 of 4 ms
    assert m["late_s"] == pytest.approx(0.002)  # 8 ms, and 6 ms between the two ranks
    assert m["memory_gib"] == 0.75

    different = [ddp_sweep.Facts(digest, {}) for digest in ("abc", "abd")]
    alone = Case({"batch_size": 5}, [0, 1], {"step": rows["step"]}, [1] * 6)
    ddp_sweep.derive(None, alone, Times(alone.samples_s, alone.rounds), different)
    assert alone.check.startswith("failed: ")
    assert "efficiency" not in alone.metrics
    assert "exposed_communication_s" not in alone.metrics


def test_the_plan_begins_each_table_with_one_process() -> None:
    flags = ("--device", "cpu", "--model", "resnet18", "--dtype", "fp32,bf16")
    args = ddp_sweep.parse_args([*flags, "--bucket-size", "1,25", "--world-sizes", "2"])
    job: Any = SimpleNamespace(world_size=4, device=torch.device("cpu"))
    tables = ddp_sweep.plan(args, job, 4)
    assert list(tables) == [f"resnet18, batch size 8, 64 px, {dtype}" for dtype in ("fp32", "bf16")]
    for keys in tables.values():
        settings = [(key["world_size"], key["bucket_size_mb"], key["comm_hook"]) for key in keys]
        assert settings == [(0, None, None), (2, 1.0, "none"), (2, 25.0, "none")]


def test_a_case_without_a_breakdown_has_another_key() -> None:
    """The default is in no key: cases of older reports are met by it. `no ddp` never has one."""
    job: Any = SimpleNamespace(world_size=2, device=torch.device("cpu"))
    for flags, fields in (([], {}), (["--no-breakdown"], {"breakdown": False})):
        args = ddp_sweep.parse_args(
            ["--device", "cpu", "--model", "resnet18", "--world-sizes", "2", *flags]
        )
        (keys,) = ddp_sweep.plan(args, job, 2).values()
        no_ddp, ddp = keys
        assert "breakdown" not in no_ddp
        assert {name: ddp[name] for name in ddp if name == "breakdown"} == fields


def test_auxiliary_heads_are_in_the_loss() -> None:
    targets = torch.tensor([0, 1])
    heads = [torch.tensor([[2.0, 0.0], [0.0, 2.0]]), torch.zeros(2, 2), torch.zeros(2, 2)]
    plain = math.log(1 + math.exp(-2))  # of a logit of 2 for the right class of two
    assert ddp_sweep.loss_of(heads[0], targets).item() == pytest.approx(plain)
    loss = ddp_sweep.loss_of(tuple(heads), targets).item()
    assert loss == pytest.approx(plain + 2 * 0.3 * math.log(2))


@smoke
def test_a_model_with_auxiliary_heads(bench: Callable[..., Any]) -> None:
    small = ("--model", "googlenet", "--image-size", "64", "--batch-size", "2")
    run = bench(SCRIPT, *small, "--iters", "1", "-w", "1", "--world-sizes", "2", ranks=2)
    assert run.status == 0, run.err
    assert {case.check for case in run.report.cases} == {"passed"}
