"""User-defined models: --model package.module:function of ddp_sweep.py and compile_sweep.py.

    def function(device: torch.device, batch: int = 16):
        return model, inputs, loss

model: an nn.Module on the device. inputs: the batch of a rank, either a tuple of positional
arguments or a dict of keyword arguments of the forward pass; tensors may be nested in tuples, lists
and dicts. loss: a function from the model's output, which may be any object, to a scalar.

Alternatively the function returns a dict with the keys model, loss, and args (a tuple) or kwargs (a
dict) or both. Two more keys are optional:

    optimizer       a function from parameters to a torch.optim.Optimizer; the default is SGD
    fsdp_units      a list of modules of the model that FSDP shards as units

`package.module:function?batch=16&rope=true` passes keyword arguments: integers, floats, true or
false, or strings.
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

from harness.benchmark import Benchmark
from harness.cli import cut, suggest
from harness.exits import describe

Loss = Callable[[Any], Tensor]
Optimize = Callable[[Any], torch.optim.Optimizer]
FIELDS = ("model", "args", "kwargs", "loss", "optimizer", "fsdp_units")  # of a returned dict
TOKENS = "input_ids"  # name of the argument whose elements are tokens, as in transformers
# Settings of the process that are restored after the function returns, because they would affect
# other models: name, getter, setter. The default device "cpu" means that none is set.
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
    """A user-defined model cannot be measured; the message is one line."""


class OwnModel(NamedTuple):
    """The return value of the user's function."""

    model: nn.Module
    args: tuple[Any, ...]  # of the forward pass
    kwargs: dict[str, Any]
    loss: Loss
    optimizer: Optimize | None = None
    fsdp_units: list[nn.Module] | None = None

    def tensors(self) -> list[Tensor]:
        """The tensors of the batch, in the order of the arguments."""
        return [leaf for _, leaf in leaves_of([*self.args, self.kwargs])]

    def tokens(self) -> int:
        """Number of tokens in the batch; 0 if no argument is named input_ids."""
        named = leaves_of([*self.args, self.kwargs])
        return sum(tensor.numel() for name, tensor in named if name == TOKENS)


def leaves_of(value: Any, name: str = "") -> list[tuple[str, Tensor]]:
    """The tensors in nested tuples, lists and dicts, each with its key in the innermost dict."""
    if isinstance(value, Tensor):
        return [(name, value)]
    if isinstance(value, Mapping):
        return [leaf for key, entry in value.items() for leaf in leaves_of(entry, str(key))]
    if isinstance(value, (tuple, list)):
        return [leaf for entry in value for leaf in leaves_of(entry, name)]
    return []


class Trial(NamedTuple):
    """Properties of a model that a trial run on a rank has determined."""

    samples: int | None  # batch size: the first dimension of the first tensor; None if unknown
    changes: list[str]  # settings of the process that the function changed, one line each
    units: int | None = None  # number of fsdp_units; None if the function returns none
    tokens: int = 0  # in a batch; 0 if unknown
    layers: int | None = None  # number of layers that FSDP shards by default; None if unknown


def is_own(name: str) -> bool:
    """Whether --model names a user-defined model."""
    return ":" in name


def parameters_of(name: str) -> tuple[str, str, dict[str, Any]]:
    """Split `package.module:function?batch=16` into package.module, function, {"batch": 16}.
    Raises Refused for a name of any other form."""
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
    """Call the user's function. The working directory is put on sys.path. changes: see `contained`.
    Raises ValueError if there is no such function or if its return value has another form."""
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
    """Raise Refused if the function does not accept these parameters."""
    known = inspect.signature(function).parameters
    if any(parameter.kind == parameter.VAR_KEYWORD for parameter in known.values()):
        return
    for parameter in parameters:
        if parameter not in known:
            names = cut([*known][1:]) or "none"  # the first parameter is the device
            near = suggest(parameter, known)
            raise Refused(f"{name}: expected parameters {names}, got {parameter!r}{near}")


def own_of(name: str, returned: Any) -> OwnModel:
    """Return what a function has returned as a tuple or a dict. Raises Refused for others."""
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
    """Isolate the user's code: SETTINGS are restored, SystemExit, KeyboardInterrupt and the like
    become Refused. Changes of the working directory and of sys.path persist, because the model may
    rely on them. Each change adds a line to `changes`."""
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
                changes.append(f"the {word} from {before[word]} to {now}; it was restored")
        if (now := os.getcwd()) != folder:
            changes.append(f"the working directory from {folder} to {now}; this persists")
        if sys.path != path:
            new = [entry for entry in sys.path if entry not in path]
            changes.append(f"sys.path ({cut(new) or 'fewer entries'}); this persists")


def place_of(error: BaseException) -> str:
    """Return ` (my_model.py:12)`, the innermost line of the user's code in a traceback: not of this
    file, the standard library or installed packages; or ""."""
    installed = Path(sysconfig.get_path("stdlib"))
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        foreign = path.is_relative_to(installed) or "site-packages" in path.parts
        if path.is_file() and path != Path(__file__) and not foreign:
            return f" ({path.name}:{frame.lineno})"
    return ""


def try_own(name: str, device: torch.device, idle_allowed: bool = True) -> Trial:
    """Run the forward and backward passes once.

    A model that does not fit into GPU memory is accepted: its cases fail with that reason, and
    other models are measured. Raises ValueError as `make_own` does, for any other error in the
    user's code, for an empty batch, for a loss that is not a scalar, and, unless `idle_allowed`,
    for a parameter that receives no gradient.
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
        raise Refused(f"{name}: {idle[0]} receives no gradient; try {flag}")
    return Trial(samples, changes, units, tokens)


def without_rate(optimizer: torch.optim.Optimizer) -> None:
    """Set the learning rate to 0: a step takes the same time but leaves the weights unchanged.

    Raises ValueError if the optimizer has no learning rate.
    """
    for group in optimizer.param_groups:
        rate = group.get("lr")
        if isinstance(rate, Tensor):
            rate.zero_()  # in place: a captured graph or a compiled step reads this tensor
        elif isinstance(rate, (int, float)):
            group["lr"] = 0.0
        else:
            kind = type(optimizer).__name__
            raise ValueError(f"expected an optimizer with a learning rate, got {kind} (lr {rate})")


def try_on_all(bench: Benchmark, name: str, idle_allowed: bool = True) -> Trial:
    """Try a model on every rank and combine the results. All ranks call it. Ends the run if a rank
    refuses the model or if batch sizes differ.

    `samples` is None if the model fits into memory on no rank; `build` must then call `need_size`.
    """
    attempt = partial(try_own, name, bench.job.device, idle_allowed)
    trial = bench.prepare("--model", attempt)
    trials: list[Trial] = bench.job.broadcast(bench.job.gather(trial))
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
    """Raise ValueError if the batch size is unknown although the model now fits into memory."""
    if samples is None:
        raise ValueError(
            f"{name} did not fit into memory when its batch size was read; run it again"
        )


def uneven(name: str, samples: list[int | None]) -> str | None:
    """Return why these batch sizes, by rank, are refused, or None: rates require equal ones. A size
    is None if it is unknown."""
    known = {rank: count for rank, count in enumerate(samples) if count is not None}
    first = next(iter(known), 0)
    others = [rank for rank, count in known.items() if count != known[first]]
    if not others:
        return None
    got = f"got {known[first]} on rank {first} and {known[others[0]]} on rank {cut(others)}"
    return f"--model {name}: expected batches of the same size on all ranks, {got}"
