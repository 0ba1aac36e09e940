"""common/torchbench.py, against a stand-in package with torchbenchmark's interface."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from common.torchbench import find_model, load, scalar_loss

CPU = torch.device("cpu")
PACKAGE = """
import importlib
from pathlib import Path

def load_model_by_name(name):
    if not (Path(__file__).parent / "models" / name).is_dir():
        return None
    return importlib.import_module(f"torchbenchmark.models.{name}").Model
"""
MODEL = """
import torch

class Model:
    def __init__(self, test, device, batch_size=None, extra_args=[]):
        torch.manual_seed = lambda seed: None
        assert (test, device) == ("train", "cpu"), (test, device)
        self.batch_size = batch_size or 4
        self.model = torch.nn.Linear(3, 2).eval()
        {extra}

    def get_module(self):
        return self.model, {inputs}
"""
MODELS = {
    "linear": MODEL.format(extra="pass", inputs="(torch.ones(self.batch_size, 3),)"),
    "by_name": MODEL.format(extra="pass", inputs="{'input': torch.ones(self.batch_size, 3)}"),
    "inference_only": MODEL.format(
        extra="raise NotImplementedError('Test train is not implemented.\\nmore')", inputs="()"
    ),
    "exits": MODEL.format(extra="raise SystemExit(1)", inputs="()"),
    "no_module": MODEL.format(extra="self.model = len", inputs="()"),
    "not_installed": "import a_package_that_is_not_there",
}


def forget() -> None:
    """The next test's package is another one, and most tests have none."""
    for name in [name for name in sys.modules if name.startswith("torchbenchmark")]:
        del sys.modules[name]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    root = tmp_path / "torchbenchmark"
    files = {"": PACKAGE, "models": ""} | {f"models/{name}": text for name, text in MODELS.items()}
    for name, text in files.items():
        (root / name).mkdir(parents=True, exist_ok=True)
        (root / name / "__init__.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    forget()
    yield
    forget()


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("name", ["linear", "by_name"])
def test_a_model_trains(name: str) -> None:
    seed = torch.manual_seed
    model = load(name, CPU, batch_size=5)
    assert torch.manual_seed is seed
    assert model.batch_size == 5
    assert load(name, CPU).batch_size == 4
    assert model.module.training
    output = model.module(*model.args, **model.kwargs)
    assert output.shape == (5, 2)
    scalar_loss(output).backward()
    assert all(p.grad is not None for p in model.module.parameters())


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("linaer", "torchbenchmark has no model 'linaer'; did you mean linear?"),
        ("zzz", "torchbenchmark has no model 'zzz', e.g. by_name"),
        (
            "inference_only",
            "torchbenchmark's model 'inference_only' does not train on cpu: "
            "NotImplementedError: Test train is not implemented.",
        ),
        ("exits", "torchbenchmark's model 'exits' does not train on cpu: SystemExit: 1"),
        (
            "no_module",
            "torchbenchmark's model 'no_module' is no torch.nn.Module but a "
            "builtin_function_or_method",
        ),
        (
            "not_installed",
            "torchbenchmark's model 'not_installed' does not load: ModuleNotFoundError: No module "
            "named 'a_package_that_is_not_there'; git clone https://github.com/pytorch/benchmark, "
            "run `python install.py not_installed` there and add that folder to PYTHONPATH",
        ),
    ],
)
def test_what_does_not_train_says_why_in_one_line(name: str, message: str) -> None:
    seed = torch.manual_seed
    with pytest.raises(ValueError, match="torchbenchmark") as caught:
        load(name, CPU)
    assert str(caught.value) == message
    assert torch.manual_seed is seed


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchbenchmark", None)
    with pytest.raises(ValueError, match="torchbenchmark is not installed; git clone ") as caught:
        find_model("hf_Bert")
    assert "`python install.py hf_Bert`" in str(caught.value)


@pytest.mark.usefixtures("package")
def test_a_package_that_does_not_load(tmp_path: Path) -> None:
    (tmp_path / "torchbenchmark" / "__init__.py").write_text("import another_that_is_not_there")
    with pytest.raises(ValueError, match=r"does not load .*another_that_is_not_there"):
        find_model("linear")


@pytest.mark.parametrize(
    ("output", "want"),
    [
        (torch.tensor([1.0, 3.0]), 2.0),
        (torch.tensor([1.0, 4.0], dtype=torch.bfloat16), 2.5),
        ((torch.tensor([7]), torch.tensor([1.0]), torch.tensor([9.0])), 1.0),
        ([{"boxes": [torch.tensor([2.0])]}, None], 2.0),
        ({"logits": torch.tensor([5.0]), "loss": torch.tensor(3.0)}, 3.0),
        ({"loss": None, "logits": torch.tensor([5.0])}, 5.0),
        (SimpleNamespace(loss=torch.tensor(4.0)), 4.0),
    ],
)
def test_scalar_loss(output: Any, want: float) -> None:
    loss = scalar_loss(output)
    assert loss.dtype == torch.float32
    assert loss.item() == want


@pytest.mark.parametrize("output", [None, torch.tensor([1]), SimpleNamespace(loss=None)])
def test_nothing_to_differentiate(output: Any) -> None:
    with pytest.raises(ValueError, match="expected a tensor to differentiate, got a "):
        scalar_loss(output)
