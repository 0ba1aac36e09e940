"""benchmarks/ddp_sweep.py: its plan, models, flags, tables and report, in one process."""

import argparse
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from torch import nn
from torchvision.models.regnet import BlockParams

from common.table import render

CLASSIFIERS = torchvision.models.list_models(module=torchvision.models)


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    path = Path(__file__).resolve().parents[2] / "benchmarks" / "ddp_sweep.py"
    spec = importlib.util.spec_from_file_location("ddp_sweep_in_unit_tests", path)
    assert spec is not None
    assert spec.loader is not None
    with pytest.MonkeyPatch.context() as monkeypatch:
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)  # dataclasses look their module up
        spec.loader.exec_module(module)
        yield module


# -- which ranks -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world", "local", "sizes"),
    [
        (1, 1, [1]),
        (2, 2, [1, 2]),
        (3, 3, [1, 2, 3]),
        (5, 5, [1, 2, 4, 5]),
        (8, 8, [1, 2, 4, 8]),
        (16, 8, [1, 2, 4, 8, 16]),
        (24, 8, [1, 2, 4, 8, 16, 24]),
        (128, 8, [1, 2, 4, 8, 16, 32, 64, 128]),
        (6, 3, [1, 2, 3, 6]),
        (2, 1, [1, 2]),
        (12, 8, [1, 2, 4, 8, 12]),  # nodes that differ in size
    ],
)
def test_world_sizes(script: ModuleType, world: int, local: int, sizes: list[int]) -> None:
    assert script.world_sizes(world, local) == sizes


@pytest.mark.parametrize(
    ("size", "local", "label"),
    [
        (1, 1, "1M/1G"),
        (1, 8, "1M/1G"),
        (5, 8, "1M/5G"),
        (8, 8, "1M/8G"),
        (16, 8, "2M/8G"),
        (24, 8, "3M/8G"),
        (12, 8, "2M/12G in all"),
        (2, 1, "2M/1G"),
    ],
)
def test_label_of(script: ModuleType, size: int, local: int, label: str) -> None:
    assert script.label_of(size, local) == label


def args_of(script: ModuleType, *argv: str) -> argparse.Namespace:
    args: argparse.Namespace = script.parse_args(list(argv))
    return args


def test_plan(script: ModuleType) -> None:
    args = args_of(
        script, "--models", "a,b", "--world-sizes", "8,1", "--bucket-size", "25,1", "--comm-hook",
        "none,fp16",
    )  # fmt: skip
    config = script.Config
    one_model = [
        [
            config(model, "fp32"),
            config(model, "fp32", 1, "1M/1G", 25.0, "none"),
            config(model, "fp32", 1, "1M/1G", 25.0, "fp16"),
            config(model, "fp32", 1, "1M/1G", 1.0, "none"),
            config(model, "fp32", 1, "1M/1G", 1.0, "fp16"),
            config(model, "fp32", 8, "2M/4G", 25.0, "none"),
            config(model, "fp32", 8, "2M/4G", 25.0, "fp16"),
            config(model, "fp32", 8, "2M/4G", 1.0, "none"),
            config(model, "fp32", 8, "2M/4G", 1.0, "fp16"),
        ]
        for model in "ab"
    ]
    assert script.plan(args, 8, 4) == one_model[0] + one_model[1]


def test_plan_counts_and_keys(script: ModuleType) -> None:
    args = args_of(script, "--models", "a,b,c", "--dtype", "fp32,bf16", "--comm-hook", "none,bf16")
    configs = script.plan(args, 16, 8)
    # 3 models * 2 types * (no ddp + 5 sets of ranks * 2 hooks)
    assert len(configs) == 3 * 2 * (1 + 5 * 2)
    ctx = SimpleNamespace(device=torch.device("cpu"), backend="gloo")
    assert len({repr(script.case_key(config, args, ctx)) for config in configs}) == len(configs)


def test_a_case_is_known_by_what_changes_its_time(script: ModuleType) -> None:
    ctx = SimpleNamespace(device=torch.device("cpu"), backend="gloo")
    config = script.Config("a", "fp32")
    plain = script.case_key(config, args_of(script, "--batch-size", "8"), ctx)
    for flags in (
        ("--batch-size", "9"),
        ("--batch-size", "8", "--image-size", "32"),
        ("--batch-size", "8", "--channels-last"),
        ("--batch-size", "8", "--gradient-as-bucket-view"),
        ("--batch-size", "8", "--static-graph"),
    ):
        assert script.case_key(config, args_of(script, *flags), ctx) != plain
    longer = args_of(script, "--batch-size", "8", "--max-seconds", "60", "--warmup-iters", "9")
    assert script.case_key(config, longer, ctx) == plain
    gpu = SimpleNamespace(device=torch.device("cuda", 3), backend="nccl")
    key = script.case_key(config, args_of(script, "--batch-size", "8"), gpu)
    assert (key["device"], key["backend"]) == ("cuda", "nccl")  # no index: it is another's turn


# -- flags -----------------------------------------------------------------------------------------


def test_parse_args_defaults(script: ModuleType) -> None:
    args = vars(args_of(script))
    args.pop("measurement_defaults")
    assert args == {
        "models": None,
        "batch_size": None,
        "image_size": None,
        "world_sizes": None,
        "bucket_size": [25.0],
        "comm_hook": ["none"],
        "dtype": ["fp32"],
        "channels_last": False,
        "gradient_as_bucket_view": False,
        "static_graph": False,
        "distributed_backend": None,
        "strict_topology": False,
        "no_breakdown": False,
        "bind_cores": False,
        "device": "auto",
        "warmup_iters": 5,
        "iters": None,
        "min_iters": 20,
        "target_ci": 0.02,
        "max_seconds": 5.0,
        "json": None,
        "resume": False,
        "timeout": 300.0,
    }


def test_defaults_on_the_cpu(script: ModuleType) -> None:
    args = args_of(script, "--device", "cpu")
    assert script.check_args(args) == (torch.device("cpu"), "gloo")
    assert (args.models, args.batch_size, args.image_size) == (script.CPU_MODELS, 8, 64)


def test_default_models_exist(script: ModuleType) -> None:
    assert set(script.CPU_MODELS + script.CUDA_MODELS) <= set(CLASSIFIERS)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--models", "resnet5"], "unknown model 'resnet5'; did you mean resnet50, resnet152"),
        (["--models", "zzz"], "unknown model 'zzz', e.g. resnet50"),
        (["--models", "resnet18,fcn_resnet50"], "model 'fcn_resnet50' does not classify images"),
        (["--world-sizes", "1,4"], "--world-sizes 4 is more than the 1 ranks there are"),
        (["--distributed-backend", "nccl"], "--distributed-backend nccl needs CUDA devices"),
        (["--resume"], "--resume needs the report to resume; add --json PATH"),
        (["--json", "/missing/r.json"], "--json /missing/r.json: there is no directory /missing"),
    ],
)
def test_what_cannot_run_is_refused(
    script: ModuleType,
    argv: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["ddp_sweep.py"])
    args = args_of(script, "--device", "cpu", *argv)
    with pytest.raises(SystemExit) as ended:
        script.check_args(args)
    assert ended.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith(f"ddp_sweep.py: error: {message}")
    assert err.count("\n") == 1


# -- models ----------------------------------------------------------------------------------------

# their patches and windows do not divide 64 pixels
ONLY_LARGE = ("maxvit_t", "vit_h_14")


@pytest.fixture
def block_params_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """RegNet works out its widths with tensors, which on the meta device have no values."""
    compute = BlockParams.from_init_params

    def on_cpu(*args: Any, **kwargs: Any) -> BlockParams:
        with torch.device("cpu"):
            return compute(*args, **kwargs)

    monkeypatch.setattr(BlockParams, "from_init_params", on_cpu)


def on_meta(script: ModuleType, name: str, image_size: int) -> nn.Module:
    with torch.device("meta"):
        model: nn.Module = script.create_model(name, image_size)
    return model


@pytest.mark.usefixtures("block_params_on_cpu")
@pytest.mark.parametrize("image_size", [224, 64])
@pytest.mark.parametrize("name", CLASSIFIERS)
def test_every_model_can_be_made(script: ModuleType, name: str, image_size: int) -> None:
    if image_size == 64 and name in ONLY_LARGE:
        with pytest.raises((ValueError, AssertionError), match="divisible"):
            on_meta(script, name, image_size)
        return
    model = on_meta(script, name, image_size)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert sum(parameter.numel() for parameter in model.parameters()) > 1_000_000


def test_there_are_models() -> None:
    assert len(CLASSIFIERS) >= 80  # as in torchvision 0.29; or the test above would hold nothing


@pytest.mark.parametrize(
    ("name", "image_size"),
    [
        ("alexnet", 64),
        ("densenet121", 64),
        ("efficientnet_b0", 64),
        ("googlenet", 64),
        ("inception_v3", 128),
        ("maxvit_t", 224),
        ("mobilenet_v3_small", 64),
        ("resnet18", 64),
        ("resnext50_32x4d", 64),
        ("swin_t", 64),
        ("swin_v2_t", 64),
        ("vit_b_16", 64),
    ],
)
def test_models_answer_with_one_tensor(script: ModuleType, name: str, image_size: int) -> None:
    """In training, too, where some of torchvision's answer with two heads."""
    model = on_meta(script, name, image_size).train()
    output = model(torch.empty(2, 3, image_size, image_size, device="meta"))
    assert isinstance(output, torch.Tensor)
    assert output.shape == (2, 1000)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_a_step_trains(script: ModuleType, dtype: str) -> None:
    """Gradients are zeroed between steps, the loss falls, and it is scaled for fp16 alone."""
    torch.manual_seed(0)
    head = nn.Linear(12, 5)
    model = nn.Sequential(nn.Flatten(), head)
    images, targets = torch.rand(4, 3, 2, 2), torch.arange(4)
    step = script.create_step(model, images, targets, script.sgd(model, 0.0), dtype)
    gradients: list[list[torch.Tensor]] = []
    peaks: list[float] = []
    head.weight.register_hook(lambda gradient: peaks.append(gradient.abs().max().item()))
    for _ in range(2):
        step()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    torch.testing.assert_close(*gradients)  # a learning rate of 0: the same step twice
    scale = peaks[0] / gradients[0][0].abs().max().item()
    assert scale == (65536 if dtype == "fp16" else 1)
    before = nn.functional.cross_entropy(model(images), targets).item()
    step = script.create_step(model, images, targets, script.sgd(model, 0.1), dtype)
    for _ in range(5):
        step()
    assert nn.functional.cross_entropy(model(images), targets).item() < before


# -- metrics, tables, report -----------------------------------------------------------------------


def derived(
    script: ModuleType, config: Any, samples: dict[str, list[float]], digests: list[str]
) -> tuple[dict[str, Any], str]:
    """derive() of constant times a rank, in seconds, with a `no ddp` of 20 ms in the report."""
    rows = {name: np.repeat(np.array(x)[:, None], 12, axis=1) for name, x in samples.items()}
    sweep = SimpleNamespace(
        ctx=SimpleNamespace(device=torch.device("cpu"), backend="gloo"),
        find=lambda key: {"metrics": {"step_time_p50_s": 0.020}} if not key["world_size"] else None,
        host_of=lambda rank: f"host-{rank}",
    )
    facts = [
        {"first_iteration_s": 1.0 + i, "memory_gib": 0.5 * i, "parameters": digest}
        for i, digest in enumerate(digests)
    ]
    measured = SimpleNamespace(samples=rows, rounds=[2] * 6)
    args = args_of(script, "--batch-size", "8")
    metrics, check = script.derive(config, args, sweep, measured, facts)
    return metrics, check


def test_derive(script: ModuleType) -> None:
    samples = {
        "step": [0.025, 0.024],
        "local compute": [0.016, 0.016],
        "communication": [0.011, 0.012],
    }
    config = script.Config("a", "fp32", 2, "1M/2G", 25.0, "none")
    metrics, check = derived(script, config, samples, ["x", "x"])
    assert check == "passed"
    want = {
        "efficiency": 0.8,  # 20 ms of no ddp / 25 ms
        "samples_per_s": 640,  # 2 ranks * 8 / 0.025
        "samples_per_s_per_device": 320,
        "exposed_communication_s": 0.009,  # 25 - 16 ms
        "overlap": 0.25,  # 1 - 9 / 12
        "first_iteration_s": 2.0,  # of the slowest rank
        "memory_gib": 0.5,  # of the largest
    }
    assert {name: metrics[name] for name in want} == pytest.approx(want)
    assert "straggler_rank" not in metrics


def test_derive_names_who_lags_and_who_differs(script: ModuleType) -> None:
    samples = {"step": [0.03] * 3, "local compute": [0.01, 0.01, 0.02]}
    config = script.Config("a", "fp32", 3, "1M/3G", 25.0, "none")
    metrics, check = derived(script, config, samples, ["x", "y", "x"])
    assert check == "failed: after the steps the parameters of rank 1 differ from rank 0's"
    assert (metrics["straggler_rank"], metrics["straggler_host"]) == (2, "host-2")
    assert metrics["straggler_factor"] == pytest.approx(2)


def test_derive_without_ddp_and_with_noop(script: ModuleType) -> None:
    metrics, check = derived(script, script.Config("a", "fp32"), {"step": [0.04]}, ["x"])
    assert check == "passed"
    assert metrics["samples_per_s"] == pytest.approx(200)  # 8 / 0.04
    config = script.Config("a", "fp32", 2, "1M/2G", 25.0, "noop")
    samples = {"step": [0.03, 0.03], "local compute": [0.03, 0.03]}
    _, check = derived(script, config, samples, ["x", "y"])
    assert check.startswith("skipped: ")


def case(model: str, ranks: list[int], samples: list[list[float]], **key: Any) -> dict[str, Any]:
    defaults = {"model": model, "batch_size": 8, "label": f"1M/{len(ranks)}G", "dtype": "fp32"}
    hook = {"comm_hook": "none", "bucket_size_mb": 25.0, "image_size": 64}
    return {"key": defaults | hook | key, "ranks": ranks, "samples_s": samples, "metrics": {}}


def pytorch_report(script: ModuleType, cases: list[dict[str, Any]], *argv: str) -> dict[str, Any]:
    args = args_of(script, "--batch-size", "8", *argv)
    report: dict[str, Any] = script.pytorch_report(cases, args, "gloo")
    return report


def test_pytorch_report(script: ModuleType) -> None:
    cases = [
        case("a", [0], [[0.1, 0.2]]),
        case("a", [0, 1], [[0.1, 0.4], [0.3, 0.2]]),
        case("a", [0, 1], []),  # failed: it has no measurements
        case("b", [0], [[0.5]]),
    ]
    report = pytorch_report(script, cases, "--bucket-size", "5")
    assert report == {
        "pytorch_version": torch.__version__,
        "cuda_version": torch.version.cuda,
        "distributed_backend": "gloo",
        "bucket_size": 5.0,
        "benchmark_results": [
            {
                "model": "a",
                "batch_size": 8,
                "result": [
                    {"ranks": [0], "measurements": [0.1, 0.2]},
                    {"ranks": [0, 1], "measurements": [0.3, 0.4]},  # the slowest of each iteration
                ],
            },
            {"model": "b", "batch_size": 8, "result": [{"ranks": [0], "measurements": [0.5]}]},
        ],
    }


def test_pytorch_report_before_the_first_case(script: ModuleType) -> None:
    assert pytorch_report(script, [])["benchmark_results"] == []


def test_pytorch_report_lists_a_model_once(script: ModuleType) -> None:
    """Also when a failed case of it was repeated after the next model's."""
    cases = [case("a", [0], [[0.1]]), case("b", [0], [[0.2]]), case("a", [0, 1], [[0.3], [0.3]])]
    results = pytorch_report(script, cases)["benchmark_results"]
    assert [(entry["model"], len(entry["result"])) for entry in results] == [("a", 2), ("b", 1)]


def test_pytorch_report_tells_the_batch_size_of_the_case(script: ModuleType) -> None:
    """A resumed report may hold cases of a run with another one."""
    cases = [case("a", [0], [[0.1]], batch_size=16)]
    assert pytorch_report(script, cases)["benchmark_results"][0]["batch_size"] == 16


@pytest.mark.parametrize(
    ("flags", "name", "title"),
    [
        ([], "1M/2G", "a, batch size 8, 64 px, fp32, buckets of 25 MB, hook none"),
        (["--bucket-size", "25,1"], "1M/2G 25MB", "a, batch size 8, 64 px, fp32, hook none"),
        (
            ["--comm-hook", "none,bf16"],
            "1M/2G none",
            "a, batch size 8, 64 px, fp32, buckets of 25 MB",
        ),
    ],
)
def test_names(script: ModuleType, flags: list[str], name: str, title: str) -> None:
    found = case("a", [0, 1], [])
    args = args_of(script, *flags)
    assert script.case_name(found, args) == name
    assert script.title(found["key"], args) == title
    no_ddp = case("a", [0], [], label="no ddp", comm_hook=None, bucket_size_mb=None)
    assert script.case_name(no_ddp, args) == "no ddp"
    assert script.title(no_ddp["key"], args) == title  # one table for both


def test_the_tables(script: ModuleType) -> None:
    metrics = {f"step_time_p{q}_s": ms / 1e3 for q, ms in ((50, 25), (75, 32), (90, 40), (95, 50))}
    metrics |= {"samples_per_s": 640, "efficiency": 0.8, "local_compute_p50_s": 0.016}
    metrics |= {"communication_p50_s": 0.012, "exposed_communication_s": 0.009, "overlap": 0.25}
    names = {"straggler_rank": 1, "straggler_host": "n0", "straggler_factor": 1.5}
    interval = {"exposed_communication_ci95_s": [0.008, 0.011], "memory_gib": 0.25}
    measured = case("a", [0, 1], []) | {"stop": {"ci95_rel": 0.01}}
    measured["metrics"] = metrics | names | interval
    args = args_of(script)
    # 8 / 25 ms = 320, 8 / 32 ms = 250, 8 / 40 ms = 200, 8 / 50 ms = 160
    assert last_line(render(script.step_columns(args), [measured])) == (
        "1M/2G +-1.0% 0.0250 320.0 0.0320 250.0 0.0400 200.0 0.0500 160.0"
    )
    assert last_line(render(script.why_columns(args, "RSS growth"), [measured])) == (
        "1M/2G 640.0 80.0 25.00 16.00 12.00 9.00 1.50 25 1 (n0) 1.50x 0.25"
    )


def last_line(table: str) -> str:
    return " ".join(table.splitlines()[-1].split())
