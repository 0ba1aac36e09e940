"""benchmarks/compile_sweep.py: its flags, plan and keys. Steps are tested by real runs."""

import argparse
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import load_script

script: Any = load_script("compile_sweep")


def checked(*options: str) -> argparse.Namespace:
    args: argparse.Namespace = script.parse_args(["--device", "cpu", *options])
    script.check_args(args)
    return args


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--models", "resnet5"], ["unknown model 'resnet5'", "resnet50"]),
        (["--models", "decoder-10m", "--width", "10"], ["the heads divide", "width 10"]),
        (["--dynamo", "inducter"], ["unknown backend 'inducter'", "inductor"]),
        (["--strategies", "fsdp"], ["unknown 'fsdp'", "fsdp1"]),
        (["--ddp", "--fsdp"], ["not allowed with argument"]),
        (["--image-size", "32"], ["--image-size has no effect", "torchvision"]),
        (["--layers", "3"], ["--layers has no effect", "decoder-10m"]),
        (["--ddp", "--fsdp-wrap"], ["--fsdp-wrap has no effect", "fsdp1"]),
        (["--ddp", "--no-fsdp-wrap"], ["--fsdp-wrap has no effect"]),
        (["--trace-file", "t.json"], ["--trace-file has no effect", "--profile"]),
        (["--profile", "--trace-file", "t.json"], ["{case}"]),
        (["--backends", "eager", "--warm-cache"], ["--warm-cache has no effect"]),
        (["--fsdp", "--dynamo-no-optimize-ddp"], ["--dynamo-no-optimize-ddp has no effect"]),
        (["--memory-snapshot", "m.pickle"], ["--memory-snapshot has no effect", "CUDA"]),
        (["--torchbench-model", "resnet18"], ["torchbenchmark is not installed", "install.py"]),
        (["--iters", "3", "--repeat", "x"], ["expected a whole number", "'x'"]),
    ],
    ids=lambda value: " ".join(value)[:40],
)
def test_refused_in_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    expected: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        checked(*options)
    assert ended.value.code == 2
    (message,) = capsys.readouterr().err.splitlines()
    for text in ("error: ", *expected):
        assert text in message
    assert not list(tmp_path.iterdir())


def test_torchviz_is_asked_for_and_absent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torchviz", None)
    with pytest.raises(SystemExit):
        checked("--torchviz")
    (message,) = capsys.readouterr().err.splitlines()
    assert "pip install torchviz" in message


def cells(*options: str) -> list[tuple[str, str, str]]:
    configs = script.plan(checked(*options))
    return [(config.model, config.strategy, config.backend) for config in configs]


@pytest.mark.parametrize(
    ("options", "cell"),
    [
        (["--toy-model"], None),
        (["--toy_model", "--ddp"], ("toy", "ddp", "eager")),
        (["--toy-model", "--fsdp", "--dynamo", "inductor"], ("toy", "fsdp1", "inductor")),
        (["--toy-model", "--dynamo", "print"], ("toy", "none", "print")),
        (["--toy-model", "--ddp", "--dynamo", "eager"], ("toy", "ddp", "dynamo_eager")),
    ],
)
def test_the_original_flags_choose_a_single_case(
    options: list[str], cell: tuple[str, str, str] | None
) -> None:
    found = cells(*options)
    assert found == ([cell] if cell else found)
    assert (len(found) == 1) == (cell is not None)


def test_eager_and_none_come_first() -> None:
    found = cells("--strategies", "fsdp2,none", "--backends", "inductor,eager")
    assert [cell[1:] for cell in found] == [
        ("none", "eager"),
        ("none", "inductor"),
        ("fsdp2", "eager"),
        ("fsdp2", "inductor"),
    ]


def test_the_original_numbers_are_numbers() -> None:
    args = checked("--repeat", "7", "--batch-size", "3", "--toy-model")
    assert (args.iters, args.batch_size) == (7, 3)


def test_keys_differ_by_what_matters_only() -> None:
    context = argparse.Namespace(device=torch.device("cpu"), backend="gloo", world_size=2)

    def key(strategy: str, backend: str, *options: str) -> dict[str, Any]:
        config = script.Config("toy-small", "fp32", strategy, backend)
        found: dict[str, Any] = script.case_key(config, checked(*options), context)
        return found

    base = ["--strategies", "all"]
    split = [*base, "--dynamo-no-optimize-ddp"]
    assert key("ddp", "inductor", *base) != key("ddp", "inductor", *split)
    assert key("ddp", "eager", *base) == key("ddp", "eager", *split)
    assert key("fsdp2", "eager", *base) != key("fsdp2", "eager", *base, "--no-fsdp-wrap")
    assert key("none", "eager", *base) == key("none", "eager", *base, "--no-fsdp-wrap")
    assert key("ddp", "eager", *base) != key("ddp", "eager", *base, "--fsdp-checkpoint")


def test_checkpointed_blocks_are_the_units() -> None:
    args = checked("--strategies", "fsdp2")
    sizes = script.sizes_of(args)
    model = script.create_workload("toy-small", sizes, torch.device("cpu")).model
    blocks = script.units_of(model, args)
    assert len(blocks) == 11
    script.checkpoint_blocks(model)
    units = script.units_of(model, args)
    assert [unit._checkpoint_wrapped_module for unit in units] == blocks
    args.fsdp_wrap = False
    assert script.units_of(model, args) == []
