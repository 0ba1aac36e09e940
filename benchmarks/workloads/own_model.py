"""One's own model, by `--model package.module:function`. For ddp_sweep.py and compile_sweep.py.

    def function(device: torch.device):
        return model, inputs, loss

model: an nn.Module on the device. inputs: a tuple of tensors, the batch of a rank; `model(*inputs)`
is the forward pass. loss: a function from the model's output to a scalar.
"""

import importlib
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from common.benchmark import Benchmark
from common.cli import cut, describe, suggest
from common.groups import gather, share

Inputs = tuple[Tensor, ...]
Loss = Callable[[Any], Tensor]
# Settings of the process that the function must not change for the models that follow: the word
# for it, how to read it, how to set it. A default device of "cpu" is torch's own: none is set.
SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "number of threads": (torch.get_num_threads, torch.set_num_threads),
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "gradient mode": (torch.is_grad_enabled, torch.set_grad_enabled),
    "default device": (
        torch.get_default_device,
        lambda device: torch.set_default_device(None if device.type == "cpu" else device),
    ),
}


class Refused(ValueError):
    """Why a model cannot be measured, in one line."""


class Trial(NamedTuple):
    """What a rank found out about a model."""

    samples: int | None  # of a batch: the first size of the first input; None if unknown
    changes: list[str]  # of the process, by the function or its module; a line each


def is_own(name: str) -> bool:
    return ":" in name


def make_own(
    name: str, device: torch.device, changes: list[str] | None = None
) -> tuple[nn.Module, Inputs, Loss]:
    """What the user's function returns. The working folder is on the path.

    changes: gets a line for each setting of the process that the function has changed. Raises
    ValueError if there is no such function, or if it returns something else.
    """
    module_name, _, function_name = name.partition(":")
    if not all(part.isidentifier() for part in module_name.split(".")):
        example = "e.g. my_model:make for the function make in my_model.py"
        raise Refused(f"expected package.module:function, got {name!r}; {example}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    with contained(name, [] if changes is None else changes):
        try:
            module = importlib.import_module(module_name)
        except ImportError as error:
            reason = f"{name}: cannot import {module_name}: {error}; e.g. my_model:make"
            raise Refused(reason) from None
        function = getattr(module, function_name, None)
        if not callable(function):
            others = (word for word in vars(module) if callable(getattr(module, word)))
            near = suggest(function_name, others)
            file = getattr(module, "__file__", None) or module_name
            got = f", but a value of type {type(function).__name__}" if function else ""
            raise Refused(f"{name}: {file} has no function {function_name!r}{got}{near}")
        returned = function(device)
    kinds = type(returned).__name__
    if isinstance(returned, tuple) and len(returned) == 3:
        model, inputs, loss = returned
        tensors = isinstance(inputs, tuple) and all(isinstance(x, Tensor) for x in inputs)
        if isinstance(model, nn.Module) and inputs and tensors and callable(loss):
            return model, inputs, loss
        kinds = ", ".join(type(part).__name__ for part in returned)
    raise Refused(f"{name}: expected a module, a tuple of tensors, a function; got {kinds}")


@contextmanager
def contained(name: str, changes: list[str]) -> Iterator[None]:
    """Run the user's code: it ends neither the process nor what other models are measured with.

    SETTINGS are restored. A changed working directory and a changed sys.path stay, because the
    model may need them. Each change becomes a line of `changes`. SystemExit and other exceptions
    that are no Exception become a ValueError.
    """
    before = {word: read() for word, (read, _) in SETTINGS.items()}
    folder, path = os.getcwd(), list(sys.path)
    try:
        yield
    except Exception:
        raise
    except BaseException as error:
        raise Refused(f"{name}: {describe(error)}{place_of(error)}") from None
    finally:
        for word, (read, set_it) in SETTINGS.items():
            if (now := read()) != before[word]:
                set_it(before[word])
                changes.append(f"the {word} from {before[word]} to {now}; it is restored")
        if (now := os.getcwd()) != folder:
            changes.append(f"the working directory from {folder} to {now}; it stays")
        if sys.path != path:
            new = [entry for entry in sys.path if entry not in path]
            changes.append(f"sys.path ({cut(new) or 'fewer entries'}); it stays")


def place_of(error: BaseException) -> str:
    """` (my_model.py:12)`: the last line of the user's code before an error; "" if there is none.

    The user's code is what is neither this file nor a part of Python or an installed package.
    """
    installed = Path(sysconfig.get_path("stdlib"))
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        foreign = path.is_relative_to(installed) or "site-packages" in path.parts
        if path.is_file() and path != Path(__file__) and not foreign:
            return f" ({path.name}:{frame.lineno})"
    return ""


def try_own(name: str, device: torch.device, idle_allowed: bool = True) -> Trial:
    """Run the forward and backward passes once.

    A model that does not fit into the GPU's memory is not refused: its cases fail with the reason,
    and other models are measured. Raises ValueError as `make_own` does, for any other error of the
    user's code, for a batch without samples, if the loss is no scalar, and for a parameter without
    a gradient, unless `idle_allowed`.
    """
    changes: list[str] = []
    samples = None
    try:
        model, inputs, loss = make_own(name, device, changes)
        shapes = [list(x.shape) for x in inputs]
        samples = shapes[0][0] if shapes[0] else 0
        if not samples:
            raise Refused(f"{name}: expected a batch of at least 1 sample, got {shapes[0]}")
        with contained(name, changes):
            value = loss(model(*inputs))
            if not isinstance(value, Tensor) or value.numel() != 1:
                got = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise Refused(f"{name}: expected a loss that is a scalar, got {got}")
            value.backward()
    except Refused:
        raise
    except torch.OutOfMemoryError:
        return Trial(samples, changes)
    except Exception as error:
        raise Refused(f"{name}: {describe(error)}{place_of(error)}") from None
    now = [list(x.shape) for x in inputs]
    if now != shapes:
        raise Refused(f"{name}: a step changes the shape of its inputs, from {shapes} to {now}")
    trained = [(path, weight) for path, weight in model.named_parameters() if weight.requires_grad]
    idle = [path for path, weight in trained if weight.grad is None]
    if idle and not idle_allowed:
        flag = "--find-unused-parameters"
        raise Refused(f"{name}: {idle[0]} gets no gradient; try {flag}")
    return Trial(samples, changes)


def own_batch_size(bench: Benchmark, name: str, idle_allowed: bool = True) -> int | None:
    """The number of samples in a rank's batch of a user's model, which every rank tries once. None
    if no rank has the memory to make the model: then `build` must call `need_size`.

    All ranks call it. Ends the run if a rank refuses the model, or if the batch sizes differ. Rank
    0 prints what the function has changed.
    """
    attempt = partial(try_own, name, bench.job.device, idle_allowed)
    trial = bench.prepare("--model", attempt)
    trials: list[Trial] = share(gather(trial))
    samples = [trial.samples for trial in trials]
    if problem := uneven(name, samples):
        bench.refuse(problem)
    for change in dict.fromkeys(change for trial in trials for change in trial.changes):
        ranks = [rank for rank, trial in enumerate(trials) if change in trial.changes]
        where = "" if len(ranks) == len(trials) else f" on rank {cut(ranks)}"
        bench.print(f"# {name} has changed {change}{where}")
    return next(filter(None, samples), None)


def need_size(name: str, samples: int | None) -> None:
    """Refuse a case whose batch size is unknown, once its model has been made nevertheless."""
    if samples is None:
        raise ValueError(f"{name} did not fit when its batch size was read; run it again")


def uneven(name: str, samples: list[int | None]) -> str | None:
    """Why these batch sizes, by rank, are refused: rates assume that all ranks have the same. None
    stands for an unknown size."""
    known = {rank: count for rank, count in enumerate(samples) if count is not None}
    first = next(iter(known), 0)
    others = [rank for rank, count in known.items() if count != known[first]]
    if not others:
        return None
    got = f"got {known[first]} on rank {first} and {known[others[0]]} on rank {cut(others)}"
    return f"--model {name}: expected batches of the same size on all ranks, {got}"
