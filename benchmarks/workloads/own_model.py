"""One's own model, by `--model package.module:function`. For ddp_sweep.py and compile_sweep.py.

    def function(device: torch.device, batch: int = 16):
        return model, inputs, loss

model: an nn.Module on the device. inputs: the batch of a rank, a tuple of positional arguments or a
dict of keyword arguments of the forward pass; tensors may be nested in tuples, lists and dicts.
loss: a function from the model's output, which may be any object, to a scalar.

Or the function returns a dict: model, loss, args (a tuple) or kwargs (a dict) or both, and if
wanted

    optimizer       a function from parameters to a torch.optim.Optimizer, instead of SGD
    fsdp_units      a list of the model's modules that FSDP shards as units

`package.module:function?batch=16&rope=true` passes keyword arguments: ints, floats, true or false,
or strings.
"""

import importlib
import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

import torch
from torch import Tensor, nn

from common.benchmark import Benchmark
from common.cli import cut, describe, suggest
from common.groups import gather, share

Loss = Callable[[Any], Tensor]
Optimize = Callable[[Any], torch.optim.Optimizer]
FIELDS = ("model", "args", "kwargs", "loss", "optimizer", "fsdp_units")  # of a dict
TOKENS = "input_ids"  # the argument whose elements are tokens, as transformers calls it
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


class OwnModel(NamedTuple):
    """What the user's function has returned."""

    model: nn.Module
    args: tuple[Any, ...]  # of the forward pass
    kwargs: dict[str, Any]
    loss: Loss
    optimizer: Optimize | None = None
    fsdp_units: list[nn.Module] | None = None

    def tensors(self) -> list[Tensor]:
        """Those of the batch, in the order of the arguments."""
        return [leaf for _, leaf in leaves_of([*self.args, self.kwargs])]

    def tokens(self) -> int:
        """The number of tokens of the batch; 0 if no argument is called input_ids."""
        named = leaves_of([*self.args, self.kwargs])
        return sum(tensor.numel() for name, tensor in named if name == TOKENS)


def leaves_of(value: Any, name: str = "") -> list[tuple[str, Tensor]]:
    """The tensors in nested tuples, lists and dicts, each with the key of the innermost dict."""
    if isinstance(value, Tensor):
        return [(name, value)]
    if isinstance(value, Mapping):
        return [leaf for key, entry in value.items() for leaf in leaves_of(entry, str(key))]
    if isinstance(value, (tuple, list)):
        return [leaf for entry in value for leaf in leaves_of(entry, name)]
    return []


class Trial(NamedTuple):
    """What a rank found out about a model."""

    samples: int | None  # of a batch: the first size of the first tensor; None if unknown
    changes: list[str]  # of the process, by the function or its module; a line each
    units: int | None = None  # number of fsdp_units; None if the function names none
    tokens: int = 0  # of a batch; 0 if unknown


def is_own(name: str) -> bool:
    return ":" in name


def parameters_of(name: str) -> tuple[str, str, dict[str, Any]]:
    """`package.module:function?batch=16` -> package.module, function, {"batch": 16}.

    Raises Refused if it has another form.
    """
    path, _, query = name.partition("?")
    module_name, _, function_name = path.partition(":")
    if not all(part.isidentifier() for part in module_name.split(".")):
        example = "e.g. my_model:make for the function make in my_model.py"
        raise Refused(f"expected package.module:function, got {name!r}; {example}")
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
    except ValueError:
        form = "expected parameters as in 'my_model:make?batch=16&layers=4'"
        raise Refused(f"{name}: {form}, got {query!r}") from None
    return module_name, function_name, {key: value_of(text) for key, text in pairs}


def value_of(text: str) -> int | float | bool | str:
    """`16` -> 16, `1e-3` -> 0.001, `true` -> True; anything else is a string."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text


def make_own(name: str, device: torch.device, changes: list[str] | None = None) -> OwnModel:
    """What the user's function returns. The working folder is on the path.

    changes: gets a line for each setting of the process that the function has changed. Raises
    ValueError if there is no such function, or if it returns something else.
    """
    module_name, function_name, parameters = parameters_of(name)
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
        if parameters:
            refuse_unknown(name, function, parameters)
        returned = function(device, **parameters)
    return own_of(name, returned)


def refuse_unknown(name: str, function: Callable[..., Any], parameters: dict[str, Any]) -> None:
    """Raises Refused if the function has no such parameters."""
    known = inspect.signature(function).parameters
    if any(parameter.kind == parameter.VAR_KEYWORD for parameter in known.values()):
        return
    for parameter in parameters:
        if parameter not in known:
            names = cut([*known][1:]) or "none"  # the first one is the device
            near = suggest(parameter, known)
            raise Refused(f"{name}: expected parameters {names}, got {parameter!r}{near}")


def own_of(name: str, returned: Any) -> OwnModel:
    """The model that a function has returned, as a tuple or as a dict. Raises Refused for anything
    else."""
    kinds = type(returned).__name__
    form = "expected a module, a batch (a tuple or a dict with tensors), a function"
    if isinstance(returned, tuple) and len(returned) == 3:
        model, inputs, loss = returned
        args, kwargs = ((), inputs) if isinstance(inputs, Mapping) else (inputs, {})
        returned = {"model": model, "args": args, "kwargs": kwargs, "loss": loss}
        kinds = ", ".join(type(part).__name__ for part in (model, inputs, loss))
    elif isinstance(returned, Mapping):
        form = f"expected a dict with model, loss and args or kwargs ({', '.join(FIELDS)})"
        kinds = ", ".join(f"{key}: {type(part).__name__}" for key, part in returned.items())
        if unknown := [key for key in returned if key not in FIELDS]:
            near = suggest(str(unknown[0]), FIELDS)
            raise Refused(f"{name}: {form}; got the key {unknown[0]!r}{near}")
    else:
        raise Refused(f"{name}: {form}; got {kinds}")
    model, loss, optimizer = (returned.get(part) for part in ("model", "loss", "optimizer"))
    args, kwargs = returned.get("args", ()), returned.get("kwargs", {})
    are_inputs = isinstance(args, (tuple, list)) and isinstance(kwargs, Mapping)
    are_functions = callable(loss) and (optimizer is None or callable(optimizer))
    if not (isinstance(model, nn.Module) and are_inputs and are_functions):
        raise Refused(f"{name}: {form}; got {kinds}")
    own = OwnModel(model, tuple(args), dict(kwargs), loss, optimizer, returned.get("fsdp_units"))
    if not own.tensors():
        raise Refused(f"{name}: {form}; got no tensor in the batch")
    inside = set(model.modules())
    for unit in own.fsdp_units or ():
        if unit not in inside:
            got = type(unit).__name__
            raise Refused(f"{name}: expected modules of the model in fsdp_units, got a {got}")
    return own


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
    samples, units, tokens = None, None, 0
    try:
        own = make_own(name, device, changes)
        units = None if own.fsdp_units is None else len(own.fsdp_units)
        tokens = own.tokens()
        shapes = [list(tensor.shape) for tensor in own.tensors()]
        samples = shapes[0][0] if shapes[0] else 0
        if not samples:
            raise Refused(f"{name}: expected a batch of at least 1 sample, got {shapes[0]}")
        with contained(name, changes):
            value = own.loss(own.model(*own.args, **own.kwargs))
            if not isinstance(value, Tensor) or value.numel() != 1:
                got = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise Refused(f"{name}: expected a loss that is a scalar, got {got}")
            value.backward()
            if own.optimizer:
                without_rate(own.optimizer(own.model.parameters()))
    except Refused:
        raise
    except torch.OutOfMemoryError:
        return Trial(samples, changes, units, tokens)
    except Exception as error:
        raise Refused(f"{name}: {describe(error)}{place_of(error)}") from None
    now = [list(tensor.shape) for tensor in own.tensors()]
    if now != shapes:
        raise Refused(f"{name}: a step changes the shape of its inputs, from {shapes} to {now}")
    weights = own.model.named_parameters()
    idle = [path for path, weight in weights if weight.requires_grad and weight.grad is None]
    if idle and not idle_allowed:
        flag = "--find-unused-parameters"
        raise Refused(f"{name}: {idle[0]} gets no gradient; try {flag}")
    return Trial(samples, changes, units, tokens)


def without_rate(optimizer: torch.optim.Optimizer) -> None:
    """Set the learning rate to 0: a step costs the same, and the weights stay as they are.

    Raises ValueError if the optimizer has no learning rate.
    """
    for group in optimizer.param_groups:
        rate = group.get("lr")
        if isinstance(rate, Tensor):
            rate.zero_()  # a captured graph or a compiled step reads it there
        elif isinstance(rate, (int, float)):
            group["lr"] = 0.0
        else:
            kind = type(optimizer).__name__
            raise ValueError(f"expected an optimizer with a learning rate, got {kind} (lr {rate})")


def own_batch_size(bench: Benchmark, name: str, idle_allowed: bool = True) -> int | None:
    """The number of samples in a rank's batch of a user's model; see `try_on_all`."""
    return try_on_all(bench, name, idle_allowed).samples


def try_on_all(bench: Benchmark, name: str, idle_allowed: bool = True) -> Trial:
    """What all ranks have found out about a user's model, which each tries once. `samples` is None
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
    units = [trial.units for trial in trials if trial.units is not None]
    tokens = max(trial.tokens for trial in trials)
    return Trial(next(filter(None, samples), None), [], units[0] if units else None, tokens)


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
