"""One's own model, by `--model package.module:function`. For ddp_sweep.py and compile_sweep.py.

    def function(device: torch.device):
        return model, inputs, loss

model: an nn.Module on the device. inputs: a tuple of tensors, the batch of a rank; `model(*inputs)`
is the forward pass. loss: a function from the model's output to a scalar.
"""

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from common.cli import suggest

Inputs = tuple[Tensor, ...]
Loss = Callable[[Any], Tensor]


def is_own(name: str) -> bool:
    return ":" in name


def make_own(name: str, device: torch.device) -> tuple[nn.Module, Inputs, Loss]:
    """What the user's function returns. Raises ValueError if there is no such function, or if it
    returns something else. The working folder is on the path."""
    module_name, _, function_name = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(
            f"{name}: cannot import {module_name}: {error}; e.g. my_model:make"
        ) from None
    function = getattr(module, function_name, None)
    if not callable(function):
        near = suggest(function_name, vars(module))
        raise ValueError(f"{name}: {module.__file__} has no function {function_name!r}{near}")
    returned = function(device)
    kinds = type(returned).__name__
    if isinstance(returned, tuple) and len(returned) == 3:
        model, inputs, loss = returned
        tensors = isinstance(inputs, tuple) and all(isinstance(x, Tensor) for x in inputs)
        if isinstance(model, nn.Module) and inputs and tensors and callable(loss):
            return model, inputs, loss
        kinds = ", ".join(type(part).__name__ for part in returned)
    raise ValueError(f"{name}: expected a module, a tuple of tensors, a function; got {kinds}")


def try_own(name: str, device: torch.device, idle_allowed: bool = True) -> int:
    """Forward and backward once: the samples of a batch, the first size of the first input.

    Raises ValueError as `make_own` does, if the loss is no scalar, and for a parameter without a
    gradient, unless these are allowed.
    """
    model, inputs, loss = make_own(name, device)
    value = loss(model(*inputs))
    if not isinstance(value, Tensor) or value.numel() != 1:
        got = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"{name}: expected a loss that is a scalar, got {got}")
    value.backward()
    trained = [(path, weight) for path, weight in model.named_parameters() if weight.requires_grad]
    idle = [path for path, weight in trained if weight.grad is None]
    if idle and not idle_allowed:
        flag = "--find-unused-parameters"
        raise ValueError(f"{name}: {idle[0]} gets no gradient; try {flag}")
    return len(inputs[0])
