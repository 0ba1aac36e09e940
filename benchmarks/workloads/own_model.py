"""User-defined models: --model package.module:function of ddp_sweep.py and compile_sweep.py.

    def function(device: torch.device, batch: int = 16):
        return model, inputs, loss

model: an nn.Module on the device. inputs: the batch of a rank: a tuple of positional arguments, a
dict of keyword arguments of the forward pass, or a single argument of any other type, such as a
tensor or an object. loss: a function from the model's output, which may be any object, to a scalar.

Alternatively the function returns a dict with the keys model, loss, and args (a tuple) or kwargs (a
dict) or both. More keys are optional:

    optimizer       a function from parameters to a torch.optim.Optimizer; the default is SGD
    samples         the number of samples in the batch, if its tensors do not show it
    fsdp_units      a list of modules of the model that FSDP shards as units

`package.module:function?batch=16&rope=true` passes keyword arguments: integers, floats, true or
false, or strings.
"""

import dataclasses
import importlib
import inspect
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.workloads.own_groups import align_group_names, default_group
from benchmarks.workloads.process_settings import (
    AT_ONCE,
    OF_CASE,
    Settings,
    apply_settings,
    differences,
    lines_about,
    read_settings,
    restored,
)
from common.errors import Refused
from common.groups import Group, Job
from harness.benchmark import Benchmark
from harness.cli import cut, suggest
from harness.exits import describe, place_of

Loss = Callable[[Any], Tensor]
Optimize = Callable[[Any], torch.optim.Optimizer]
FIELDS = ("model", "args", "kwargs", "loss", "optimizer", "samples", "fsdp_units")
TOKENS = "input_ids"  # name of the argument whose elements are tokens, as in transformers
PLAIN = (bool, int, float, complex, str, bytes, type(None))  # types of arguments without tensors
NAMESPACES = re.compile(r"\w*c10d\w*|_dtensor|symm_mem")  # of operators that communicate
LOCAL_OPS = ("wait_tensor", "wrap_tensor_autograd", "check_for_nan")  # operators that do not
# What the first call found, which holds for all later calls: settings of the process that the
# import of a module changes, and the stated samples and the shapes of a batch, by --model.
IMPORTED: dict[str, Settings] = {}
SIZES: dict[str, tuple[int | None, list[list[int]]]] = {}


class OwnModel(NamedTuple):
    """The return value of the user's function."""

    model: nn.Module
    args: tuple[Any, ...]  # of the forward pass
    kwargs: dict[str, Any]
    loss: Loss
    optimizer: Optimize | None = None
    fsdp_units: list[nn.Module] | None = None
    stated_samples: int | None = None

    def leaves(self) -> list[tuple[str, Any]]:
        """Return the tensors and objects of the batch with their names, in order."""
        return leaves_of([*self.args, self.kwargs])

    def shapes(self) -> list[list[int]]:
        """Return the shapes of the tensors of the batch. Of a nested tensor only its length."""
        tensors = [leaf for _, leaf in self.leaves() if isinstance(leaf, Tensor)]
        return [[len(t)] if t.is_nested else [*map(int, t.shape)] for t in tensors]

    def tokens(self) -> int:
        """Return the number of tokens in the batch; 0 if no argument is named input_ids."""
        named = [leaf for name, leaf in self.leaves() if name == TOKENS]
        return sum(int(leaf.numel()) for leaf in named if isinstance(leaf, Tensor))

    def samples(self) -> int | None:
        """Return the batch size: the stated one, or the first dimension that all tensors share, of
        those that are not broadcast over it. None if there is none, as in a graph or in packed
        sequences."""
        if self.stated_samples is not None:
            return self.stated_samples
        if not all(isinstance(leaf, Tensor) for _, leaf in self.leaves()):
            return None
        lengths = {shape[0] for shape in self.shapes() if shape}
        lengths = lengths - {1} or lengths
        return lengths.pop() if len(lengths) == 1 else None


def leaves_of(value: Any, name: str = "") -> list[tuple[str, Any]]:
    """Return the tensors and objects in nested tuples, lists, dicts and dataclasses, each with its
    key in the innermost one. Numbers, strings and None are omitted."""
    if isinstance(value, Tensor):
        return [(name, value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        slots = {name: getattr(value, name) for name in names if hasattr(value, name)}
        value = slots | getattr(value, "__dict__", {})
    if isinstance(value, Mapping):
        return [leaf for key, entry in value.items() for leaf in leaves_of(entry, str(key))]
    if isinstance(value, (tuple, list)):
        return [leaf for entry in value for leaf in leaves_of(entry, name)]
    return [] if isinstance(value, PLAIN) else [(name, value)]


class Communication(TorchDispatchMode):
    """Collects the names of the collectives, sends and receives that run in it. Communication that
    C++ code starts without torch's dispatcher is not seen."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().partition("::")[2].strip("_")
        if NAMESPACES.fullmatch(func.namespace) and name not in LOCAL_OPS:
            self.ops.add(name)
        return func(*args, **(kwargs or {}))


class Trial(NamedTuple):
    """Properties of a model that a trial run on a rank has determined."""

    samples: int | None  # batch size; None if unknown
    changes: list[str]  # settings of the process that the function changed, one line each
    units: int | None = None  # number of fsdp_units; None if the function returns none
    tokens: int = 0  # in a batch; 0 if unknown
    layers: int | None = None  # number of layers that FSDP shards by default; None if unknown
    shapes: list[list[int]] | None = None  # of all tensors; None if the model did not fit
    communication: tuple[str, ...] = ()  # collectives, sends and receives of a step
    fits: bool = True  # into GPU memory
    communicates: bool = False  # on any of several ranks


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


def make_own(
    name: str, device: torch.device, changes: dict[str, tuple[Any, Any]] | None = None
) -> OwnModel:
    """Call the user's function. The working directory is put on sys.path.

    Settings in AT_ONCE are restored; `restored` around the case restores the others. changes:
    receives the old and new values of the settings that the function changes. Raises ValueError if
    there is no such function, if its return value has another form, or if the batch has other
    shapes than in the first call of this process, with which it would be compared.
    """
    search_working_directory()
    with restored(*AT_ONCE, changes=changes), contained(name):
        function, parameters = find_function(name)
        returned = function(device, **parameters)
    own = own_of(name, returned)
    check_sizes(name, own)
    if changes is None:
        batch = own._replace(model=nn.Module(), fsdp_units=None)  # FSDP may replace the model
        OF_CASE.append((name, partial(check_sizes, name, batch), read_settings()))
    return own


def check_sizes(name: str, own: OwnModel) -> None:
    """Raise Refused if a batch has other shapes, or another number of samples, than in the first
    call of this process."""
    sizes = own.stated_samples, own.shapes()
    if sizes != (first := SIZES.setdefault(name, sizes)):
        was, now = (
            (cut([*map(str, shapes)]) or "no tensors")
            + (f" with {samples} samples" if samples else "")
            for samples, shapes in (first, sizes)
        )
        raise Refused(
            f"{name}: expected batches of equal shapes in all calls and steps, got {was} first "
            f"and {now} now"
        )


def find_function(name: str, given: int = 1) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Return the function that `package.module:function?...` names, and its parameters. Settings
    that the import changes are applied in each call. given: number of parameters that the caller
    passes, such as the device. Raises ValueError if there is no such function."""
    module_name, function_name, parameters = parameters_of(name)
    before = read_settings()
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        reason = f"{name}: cannot import {module_name}: {error}; e.g. my_model:make"
        raise Refused(reason) from None
    changed = differences(before, read_settings())
    IMPORTED.setdefault(module_name, {word: new for word, (_, new) in changed.items()})
    apply_settings(IMPORTED[module_name])  # later calls import nothing
    function = getattr(module, function_name, None)
    if not callable(function):
        others = (word for word in vars(module) if callable(getattr(module, word)))
        near = suggest(function_name, others)
        file = getattr(module, "__file__", None) or module_name
        got = f", but a value of type {type(function).__name__}" if function else ""
        raise Refused(f"{name}: {file} has no function {function_name!r}{got}{near}")
    if parameters:
        refuse_unknown(name, function, parameters, given)
    return function, parameters


def make_hook(name: str, group: Any) -> tuple[Any, Callable[..., Any]]:
    """Return the state and the function of a user's DDP communication hook.

    `module:hook` is the hook itself, and its state is the process group. `module:function?rank=4`
    calls the function with the group and these parameters; it returns the state and the hook.
    """
    search_working_directory()
    with restored(*AT_ONCE), contained(name):
        function, parameters = find_function(name)
        if "?" not in name:
            return group, function
        made = function(group, **parameters)
    if not (isinstance(made, tuple) and len(made) == 2 and callable(made[1])):
        got = type(made).__name__
        raise Refused(f"{name}: expected a state and a hook, (state, function), got a {got}")
    return made


def check_hook(name: str) -> None:
    """Raise ValueError if a name is not that of a user's hook; imports its module."""
    search_working_directory()
    with restored(), contained(name):
        find_function(name)


def make_dataset(name: str) -> tuple[Any, ...]:
    """Return a user's dataset and, if the function returns one, its collate function."""
    search_working_directory()
    with restored(), contained(name):
        function, parameters = find_function(name, given=0)
        try:
            made = function(**parameters)
        except Exception as error:
            raise Refused(f"{name}: {describe(error)}{place_of(error)}") from None
    dataset, *collate = made if isinstance(made, tuple) else (made,)
    if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        got = type(dataset).__name__
        raise Refused(f"{name}: expected a dataset with __getitem__ and __len__, got a {got}")
    if len(collate) > 1 or not all(map(callable, collate)):
        raise Refused(f"{name}: expected a dataset, or a dataset and a collate function")
    return (dataset, *collate)


def search_working_directory() -> None:
    """Put the working directory on sys.path."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


def refuse_unknown(
    name: str, function: Callable[..., Any], parameters: dict[str, Any], given: int
) -> None:
    """Raise Refused if the function does not accept these parameters."""
    known = inspect.signature(function).parameters
    if any(parameter.kind == parameter.VAR_KEYWORD for parameter in known.values()):
        return
    for parameter in parameters:
        if parameter not in known:
            names = cut([*known][given:]) or "none"
            near = suggest(parameter, known)
            raise Refused(f"{name}: expected parameters {names}, got {parameter!r}{near}")


def own_of(name: str, returned: Any) -> OwnModel:
    """Return what a function has returned as a tuple or a dict. Raises Refused for others."""
    kinds = type(returned).__name__
    form = "expected a module, a batch (a tuple or a dict with tensors), a function"
    if isinstance(returned, tuple) and len(returned) == 3:
        model, inputs, loss = returned
        args, kwargs = ((), inputs) if isinstance(inputs, Mapping) else (inputs, {})
        if not isinstance(args, (tuple, list)):
            args = (args,)  # a single argument
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
    samples, units = returned.get("samples"), returned.get("fsdp_units")
    if not (samples is None or (isinstance(samples, int) and samples > 0)):
        raise Refused(f"{name}: expected a number of samples above 0, got {samples!r}; e.g. 32")
    own = OwnModel(model, tuple(args), dict(kwargs), loss, optimizer, units, samples)
    if not own.leaves():
        raise Refused(f"{name}: {form}; got no tensor in the batch")
    inside = set(model.modules())
    for unit in own.fsdp_units or ():
        if unit not in inside:
            got = type(unit).__name__
            raise Refused(f"{name}: expected modules of the model in fsdp_units, got a {got}")
    return own


@contextmanager
def contained(name: str) -> Iterator[None]:
    """Raise Refused instead of SystemExit, KeyboardInterrupt and the like, which would end the
    process."""
    try:
        yield
    except Exception:
        raise
    except BaseException as error:
        raise Refused(f"{name}: {describe(error)}{place_of(error)}") from None


def try_own(
    name: str,
    device: torch.device,
    idle_allowed: bool = True,
    layers_of: Callable[[nn.Module], list[nn.Module]] | None = None,
) -> Trial:
    """Run the forward and backward passes once. All settings of the process are restored.

    A model that does not fit into GPU memory is accepted: its cases fail with that reason, and
    other models are measured. Raises ValueError as `make_own` does, for any other error in the
    user's code, for an empty batch, for a loss that is not a scalar, and, unless `idle_allowed`,
    for a parameter that receives no gradient.
    """
    changes: dict[str, tuple[Any, Any]] = {}
    trial = Trial(None, [])
    search_working_directory()  # not a change of the model's
    try:
        with restored(changes=changes), contained(name), restored(*AT_ONCE, changes=changes):
            own = make_own(name, device, changes)
            shapes = own.shapes()
            if any(0 in shape[:1] for shape in shapes) or shapes == [[]]:
                raise Refused(f"{name}: expected a batch of at least 1 sample, got {shapes[0]}")
            trial = Trial(
                own.samples(),
                [],
                None if own.fsdp_units is None else len(own.fsdp_units),
                own.tokens(),
                layers_of and len(layers_of(own.model)),
                shapes,
            )
            idle: list[str] = []
            with Communication() as communication:
                value = own.loss(own.model(*own.args, **own.kwargs))
                if isinstance(value, Tensor) and value.numel() == 1:
                    value.backward()
                    weights = own.model.named_parameters()
                    idle = [path for path, x in weights if x.requires_grad and x.grad is None]
                    if own.optimizer:
                        optimizer = own.optimizer(own.model.parameters())
                        without_rate(optimizer)
                        optimizer.step()  # it may communicate
            trial = trial._replace(communication=tuple(sorted(communication.ops)))
            if not isinstance(value, Tensor) or value.numel() != 1:
                got = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise Refused(f"{name}: expected a loss that is a scalar, got {got}")
            if (now := own.shapes()) != shapes:
                change = f"from {shapes} to {now}"
                raise Refused(f"{name}: a step changes the shape of its inputs, {change}")
            if idle and not idle_allowed:
                raise Refused(
                    f"{name}: {idle[0]} receives no gradient; try --find-unused-parameters or "
                    f"--static-graph (ddp_sweep.py)"
                )
    except Refused:
        raise
    except torch.OutOfMemoryError:
        trial = trial._replace(fits=False)
    except Exception as error:
        cure = ""
        if isinstance(error, TypeError) and "unexpected keyword argument" in str(error):
            cure = "; for a forward pass that takes the whole dict, return the batch as (dict,)"
        raise Refused(f"{name}: {describe(error)}{place_of(error)}{cure}") from None
    return trial._replace(changes=lines_about(changes))


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


def try_on_all(
    bench: Benchmark, names: list[str], seed: int, ranks: int, alone: str = "", **options: Any
) -> dict[str, Trial]:
    """Try the user-defined models among --models on every rank. All ranks call it.

    A model that any rank refuses, or whose batches differ between ranks, is removed from `names`:
    rank 0 prints the reason, and the run ends with status 2 after it has measured the others. If
    none is left, the run ends. seed: of this rank, before each call of a function. ranks: of the
    largest case. alone: what is not measured if a model communicates. options: further arguments of
    `try_own`. Returns the combined trials by name. Rank 0 prints the settings that a model has
    changed.
    """
    found: dict[str, Trial] = {}
    problems: list[str] = []
    for name in list(dict.fromkeys(filter(is_own, names))):
        attempt = Attempt(name, bench.job, seed, options)
        failed_rank = rehearse(bench, f"trial of {name}", attempt.run)
        attempts = bench.job.broadcast(bench.job.gather((attempt.trial, attempt.refused)))
        trials = [trial for trial, _ in attempts]
        # reasons of other ranks may follow from that of the first one
        refused = attempts[failed_rank][1] if failed_rank is not None else ""
        problem = refused or uneven(name, trials)
        ops = cut(sorted({op for trial in trials for op in trial.communication}))
        if ops and not problem and ranks == 1 < bench.job.world_size:
            problem = f"{name}: its step communicates ({ops}), and these cases have only one rank"
        if problem:
            problems.append(f"--model {problem}")
            names[:] = [other for other in names if other != name]
            continue
        found[name] = combined(bench, name, trials)
        if ops and bench.job.world_size > 1:
            found[name] = found[name]._replace(communicates=True)
            left_out = f", so {alone} are not measured" if alone else ""
            bench.print(f"# {name}: its step communicates ({ops}){left_out}")
    if problems and not names:
        bench.refuse(problems[0])
    for problem in problems:
        if bench.is_first:
            bench.fail(problem, 2)
    if len(found) > 1:
        each = " or ".join(f"--model {shlex.quote(name)}" for name in found)
        bench.commands.append(f"to measure a model in a process of its own: {each}")
    return found


def rehearse(bench: Benchmark, label: str, run: Callable[[Group], object]) -> int | None:
    """Run a function on all ranks in the groups of a case. If it raises on any rank, the others do
    not wait for that one. Returns the first rank on which it raised, or None. All ranks call it."""
    ranks = tuple(range(bench.job.world_size))
    bench.begin(label)
    bench.phase("setup")
    bench.attempt(run, ranks, (ranks,))
    bench.phase("waiting for all ranks")
    bench.job.barrier()
    _, failed_rank = bench.job.broadcast(bench.first_failure())
    bench.release(ranks, (ranks,), failed=failed_rank is not None)
    align_group_names(bench.job)
    bench.begin("start")
    return failed_rank


class Attempt:
    """The trial of a model on this rank."""

    def __init__(self, name: str, job: Job, seed: int, options: Any) -> None:
        """seed: set before the function is called. options: further arguments of `try_own`."""
        self.name, self.job, self.seed, self.options = name, job, seed, options
        self.trial = Trial(None, [])
        self.refused = ""  # why the model is refused

    def run(self, group: Group) -> None:
        """Try the model. Raises if it is refused or does not fit: other ranks may wait for it."""
        torch.manual_seed(self.seed)
        try:
            with default_group(group, self.job, own=True):
                self.trial = try_own(self.name, self.job.device, **self.options)
        except Refused as refused:
            self.refused = str(refused)
            raise
        if not self.trial.fits:
            raise torch.OutOfMemoryError


def combined(bench: Benchmark, name: str, trials: Sequence[Trial]) -> Trial:
    """Return the trial of all ranks. Rank 0 prints the settings that the model has changed."""
    for change in dict.fromkeys(change for trial in trials for change in trial.changes):
        ranks = [rank for rank, trial in enumerate(trials) if change in trial.changes]
        where = "" if len(ranks) == len(trials) else f" on rank {cut(ranks)}"
        bench.print(f"# {name} has changed {change}{where}")
    known = {rank: trial for rank, trial in enumerate(trials) if trial.shapes is not None}
    first, trial = next(iter(known.items()), (0, trials[0]))
    if others := [rank for rank in known if known[rank].shapes != trial.shapes]:
        mine, other = (cut([*map(str, known[r].shapes or ())]) for r in (first, others[0]))
        got = f"{mine} on rank {first}, {other} on rank {cut(others)}"
        bench.print(f"# {name}: shapes of the batch differ between ranks: {got}")
    return trial._replace(changes=[], tokens=max(trial.tokens for trial in trials))


def uneven(name: str, trials: Sequence[Trial]) -> str | None:
    """Return why these batches, by rank, are refused, or None: rates require equal numbers of
    samples on all ranks. A rank on which the model does not fit is not compared."""
    known = {rank: t.samples for rank, t in enumerate(trials) if t.shapes is not None}
    first = next(iter(known), 0)
    others = [rank for rank, samples in known.items() if samples != known[first]]
    if not others:
        return None
    mine, other = (known[rank] or "an unknown number" for rank in (first, others[0]))
    got = f"got {mine} on rank {first} and {other} on rank {cut(others)}"
    return f"{name}: expected the same number of samples on all ranks, {got}"
