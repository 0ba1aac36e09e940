"""A model of an installed torchbenchmark as a plain module.

See https://github.com/pytorch/benchmark.
"""

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from common.cli import suggest

INSTALL = (
    "git clone https://github.com/pytorch/benchmark, run `python install.py {name}` there and add "
    "that folder to PYTHONPATH"
)


@dataclass(frozen=True)
class TorchbenchModel:
    """A module in training mode, its example inputs, and how many samples they are."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    batch_size: int | None  # None: the model does not tell


def find_model(name: str) -> Any:
    """The class of the model. Raises ValueError: no such package or model, or it does not load."""
    try:
        package = importlib.import_module("torchbenchmark")
    except ImportError as error:
        problem = "torchbenchmark is not installed"
        if error.name != "torchbenchmark":
            problem = f"torchbenchmark does not load ({_reason(error)})"
        raise ValueError(
            f"--torchbench-model {name}: {problem}; {INSTALL.format(name=name)}"
        ) from None
    folders = Path(str(package.__file__)).parent.joinpath("models")
    known = sorted(path.name for path in folders.glob("*") if (path / "__init__.py").is_file())
    try:
        model = package.load_model_by_name(name)
    except (Exception, SystemExit) as error:
        if name in known:
            raise ValueError(
                f"torchbenchmark's model '{name}' does not load: {_reason(error)}; "
                f"{INSTALL.format(name=name)}"
            ) from None
        model = None
    if model is None:
        hint = suggest(name, known) or f", e.g. {(known or ['BERT_pytorch'])[0]}"
        raise ValueError(f"torchbenchmark has no model '{name}'{hint}")
    return model


def load(name: str, device: torch.device, batch_size: int | None = None) -> TorchbenchModel:
    """Build the model for training on the current device of that type.

    batch_size: samples of a rank; None takes the model's own. Raises ValueError with the reason
    where the package, the model or its training is not to be had.
    """
    model = find_model(name)
    # torchbenchmark replaces this by a function that ignores the seed (util/model.py)
    manual_seed = torch.manual_seed
    try:
        benchmark = model(test="train", device=device.type, batch_size=batch_size)
        module, inputs = benchmark.get_module()
    except (Exception, SystemExit) as error:
        raise ValueError(
            f"torchbenchmark's model '{name}' does not train on {device.type}"
            f"{f' with batch size {batch_size}' if batch_size else ''}: {_reason(error)}"
        ) from None
    finally:
        torch.manual_seed = manual_seed
    if not isinstance(module, nn.Module):
        raise ValueError(
            f"torchbenchmark's model '{name}' is no torch.nn.Module but a {type(module).__name__}"
        )
    kwargs = dict(inputs) if isinstance(inputs, dict) else {}
    args = () if isinstance(inputs, dict) else tuple(inputs)
    return TorchbenchModel(
        module.train(), args, kwargs, getattr(benchmark, "batch_size", batch_size)
    )


def scalar_loss(output: Any) -> torch.Tensor:
    """Something to differentiate: the output's own `loss`, else the mean of its first tensor.

    output: what a module returned: a tensor, or tensors in tuples, lists, dicts or objects of
    Hugging Face. Raises ValueError where there is no tensor of floating point in it.
    """
    own = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    for leaf in [own, *_leaves(output)]:
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
            return leaf.float().mean()
    raise ValueError(f"expected a tensor to differentiate, got a {type(output).__name__}")


def _leaves(output: Any) -> list[Any]:
    if isinstance(output, dict):  # also those that torch does not know as a tree
        output = list(output.values())
    return tree_leaves(output)


def _reason(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__
