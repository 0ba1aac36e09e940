"""Settings of the process that a user-defined model may change: read, compared and restored.

Most are found by the names of functions: what a module can both get and set. Not seen: patched
classes and functions, global hooks, modes of dispatch, flush-to-zero, and settings of libraries
that only the model imports.
"""

import builtins
import enum
import functools
import gc
import importlib
import os
import re
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.backends import ContextProp
from torch.utils._config_module import ConfigModule

from harness.benchmark import Benchmark
from harness.cli import cut

Settings = dict[str, Any]  # values by name; a variable that is not set has no entry
Access = tuple[Callable[[], Any], Callable[[Any], object]]  # getter, setter
VARIABLE = "variable "  # begins the name of each environment variable
STREAMS = ("stdin", "stdout", "stderr")  # the numbers of their descriptors are their places
# The DataLoader of torch sets a handler of SIGCHLD only once per process
HANDLERS = sorted({*signal.Signals} - {signal.SIGCHLD, signal.SIGKILL, signal.SIGSTOP})
# Restored as soon as the user's function returns, because the code of this project would run under
# them, too. All others apply until the end of the model's case.
AT_ONCE = (
    *("number of threads", "default dtype", "default device", "gradient mode", "umask"),
    *(f"sys.{name}" for name in STREAMS),
    *(f"file descriptor {number}" for number in range(len(STREAMS))),
    *(f"handler of {number.name}" for number in HANDLERS),
)
# Words that `pairs_of` finds, but that are not settings, or that all_settings has by another name
OMITTED = re.compile(
    "autocast_(?!cache).*|(default_d|num_|graph_|tracing_).*|.*rng_state|deterministic_algorithms"
    "|(anomaly|grad)_enabled|cublas_allow_tf32|thread_name|torch_function_state|hostname|flags"
)
PRECISION = "torch's fp32_precision of "
OPS = ("all", "matmul", "conv", "rnn")
STUCK: set[str] = set()  # settings that could not be restored
# User-defined models of the present case: name, check of its batch, settings once it was made
OF_CASE: list[tuple[str, Callable[[], None], Settings]] = []
TOLD: set[str] = set()  # lines about settings that a step has changed


@functools.cache
def all_settings() -> dict[str, Access]:
    """Return a getter and a setter for each setting but environment variables."""
    importlib.import_module("torch._dynamo.config")  # as the first optimizer does; it has settings
    found: dict[str, Access] = {
        "number of threads": (torch.get_num_threads, torch.set_num_threads),
        "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
        "gradient mode": (torch.is_grad_enabled, torch.set_grad_enabled),
        "default device": (
            torch.get_default_device,  # the CPU means that none is set
            lambda device: torch.set_default_device(None if device.type == "cpu" else device),
        ),
        "anomaly mode": (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
        "deterministic mode": (
            torch.get_deterministic_debug_mode,
            torch.set_deterministic_debug_mode,
        ),
        "garbage collection": (gc.isenabled, lambda on: gc.enable() if on else gc.disable()),
        "cores of the process": (
            lambda: sorted(os.sched_getaffinity(0)),
            lambda cores: os.sched_setaffinity(0, cores),
        ),
        "niceness": (
            partial(os.getpriority, os.PRIO_PROCESS, 0),
            partial(os.setpriority, os.PRIO_PROCESS, 0),
        ),
        "umask": (read_umask, lambda mask: os.umask(int(mask, 8))),
        "working directory": (os.getcwd, os.chdir),
    }
    for name in ("path", "argv"):
        found[f"sys.{name}"] = partial(copy_of, name), partial(refill, name)
    for name in vars(builtins):  # such as a print that is silent on some ranks
        found[f"builtins.{name}"] = attribute(builtins, name)
    for name in (*STREAMS, "excepthook", "displayhook", "unraisablehook"):
        found[f"sys.{name}"] = attribute(sys, name)
    for number in range(len(STREAMS)):
        found[f"file descriptor {number}"] = descriptor(number)
    for number in HANDLERS:
        handler = partial(signal.getsignal, number), partial(signal.signal, number)
        found[f"handler of {number.name}"] = handler
    names = sorted((x for x in vars(resource) if x.startswith("RLIMIT_")), reverse=True)
    for number, name in {getattr(resource, x): x for x in names}.items():  # some have two names
        limit = partial(resource.getrlimit, number), partial(resource.setrlimit, number)
        found[name] = limit
    for kind in ("cpu", "cuda"):
        enabled = (
            partial(torch.is_autocast_enabled, kind),
            partial(torch.set_autocast_enabled, kind),
        )
        found[f"autocast of {kind}"] = enabled
        dtype = partial(torch.get_autocast_dtype, kind), partial(torch.set_autocast_dtype, kind)
        found[f"autocast dtype of {kind}"] = dtype
    for name, module in vars(torch.backends).items():
        if isinstance(module, ModuleType) and name != "m":  # m is torch.backends itself
            found |= properties_of(module, f"torch.backends.{name}")
            found |= pairs_of(module, f"torch.backends.{name}.")
    known = {read for read, _ in found.values()}
    # Private API, which torch.backends calls; works in torch 2.11, 2.14 and 2.15
    of_torch = pairs_of(torch._C, "torch's ")
    found |= {name: access for name, access in of_torch.items() if access[0] not in known}
    for module in (dist, sys, gc, threading, socket, np):
        found |= pairs_of(module, f"{module.__name__}.")
    # last, because older settings of the precision set these, too; `all` before what inherits it
    of_backends = [(backend, op) for op in OPS for backend in ("generic", "cuda", "mkldnn")]
    for backend, op in of_backends if hasattr(torch._C, "_get_fp32_precision_getter") else ():
        read = partial(torch._C._get_fp32_precision_getter, backend, op)
        write = partial(torch._C._set_fp32_precision_setter, backend, op)
        found[f"{PRECISION}{backend} {op}"] = (read, write)
    return found


def properties_of(owner: Any, title: str) -> dict[str, Access]:
    """Return the properties of an object of torch.backends, and of the objects in it, that can be
    set."""
    found: dict[str, Access] = {}
    for name, kept in vars(type(owner)).items():
        # Setting mkldnn.fp32_precision sets that of all backends (torch 2.14): see PRECISION
        can_set = hasattr(kept, "__set__") and getattr(kept, "fset", True)
        if can_set and not name.startswith("_") and name != "fp32_precision":
            read, write = attribute(owner, name)
            found[f"{title}.{name}"] = (
                kept.getter if isinstance(kept, ContextProp) else read,
                write,
            )
    for name in dir(owner):
        inner = getattr(owner, name, None)
        if type(inner).__module__.startswith("torch.backends") and not isinstance(
            inner, ModuleType
        ):
            found |= properties_of(inner, f"{title}.{name}")
    return found


def pairs_of(module: ModuleType, title: str) -> dict[str, Access]:
    """Return what a module can both get and set, by the names of its functions: get_x or is_x and
    set_x, or x_enabled and enable_x, with or without underscores. A tuple is several arguments."""
    found: dict[str, Access] = {}
    functions = {name: value for name, value in vars(module).items() if callable(value)}
    for name, write in functions.items():
        if match := re.fullmatch(r"_?(?:set_?(\w+)|enable_(\w+))", name):
            word = match[1] or f"{match[2]}_enabled"
            names = (start + word for start in ("_get_", "get_", "get", "_is_", "is_", "_", ""))
            read = next((functions[x] for x in names if x in functions and x != name), None)
            if read and not OMITTED.fullmatch(word):
                found[f"{title}{word}"] = (read, partial(spread, write))
    return found


def spread(function: Callable[..., Any], value: Any) -> None:
    """Call a setter with what its getter has returned."""
    if isinstance(value, dict):
        function(**value)
    else:
        function(*(value if type(value) is tuple else [value]))


def attribute(owner: Any, name: str) -> Access:
    """Return a getter and a setter of an attribute."""
    return partial(getattr, owner, name), partial(setattr, owner, name)


def descriptor(number: int) -> Access:
    """Return a getter and a setter of the file behind a descriptor. It can only be set to the file
    of the first call."""
    with suppress(OSError):
        kept = os.dup(number)

    def identity() -> str:
        with suppress(OSError):
            state = os.fstat(number)
            return f"file {state.st_dev}:{state.st_ino}"
        return "closed"

    return identity, lambda _: os.dup2(kept, number, inheritable=True)


def copy_of(name: str) -> list[str]:
    """Return the present entries of a list in sys."""
    return list(getattr(sys, name))


def refill(name: str, entries: list[str]) -> None:
    """Set the entries of a list in sys."""
    getattr(sys, name)[:] = entries


def read_umask() -> str:
    """Return the permissions that new files lack, as octal digits."""
    mask = os.umask(0o077)
    os.umask(mask)
    return f"{mask:03o}"


def read_settings() -> Settings:
    """Return the present settings. Those that this build of torch cannot read are omitted."""
    settings: Settings = {}
    for name, (read, _) in all_settings().items():
        # torch refuses to read one of two APIs for the precision after the other one has set it;
        # the working directory may have been removed
        with suppress(Exception):
            settings[name] = read()
    for name, config in configs().items():
        settings |= {f"{name}.{key}": value for key, value in config.get_config_copy().items()}
    # last, because torch.compile may set one when it is imported
    return settings | {f"{VARIABLE}{name}": value for name, value in os.environ.items()}


def configs() -> dict[str, ConfigModule]:
    """Return the modules of torch.compile's settings that are imported, by name."""
    return {name: x for name, x in [*sys.modules.items()] if isinstance(x, ConfigModule)}


def differences(before: Settings, now: Settings) -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ: name -> (before, now). None for a variable that is not set;
    other settings that only one side could read are omitted."""
    changed = {}
    for name in dict.fromkeys([*before, *now]):
        old, new = before.get(name), now.get(name)
        is_known = name.startswith(VARIABLE) or (name in before and name in now)
        if is_known and old is not new and old != new:
            changed[name] = (old, new)
    return changed


def apply_settings(values: Settings) -> None:
    """Set these settings. None unsets an environment variable."""
    for name, value in values.items():
        if not name.startswith(VARIABLE):
            with suppress(Exception):  # such as a folder that was removed
                if name in all_settings():
                    all_settings()[name][1](value)
                for module, config in configs().items():
                    if name.startswith(f"{module}."):
                        config.load_config({name.removeprefix(f"{module}."): value})
        elif value is None:
            os.environ.pop(name.removeprefix(VARIABLE), None)
        else:
            os.environ[name.removeprefix(VARIABLE)] = value


@contextmanager
def restored(*names: str, changes: dict[str, tuple[Any, Any]] | None = None) -> Iterator[None]:
    """Restore the settings with these names at the end of the block; all settings without names.

    changes: receives the old and the new value of each setting that has changed.
    """
    before = read_settings()
    try:
        yield
    finally:
        found = differences(before, read_settings())
        if changes is not None:
            for name, (old, new) in found.items():
                changes[name] = (changes.get(name, (old,))[0], new)
        for _ in range(4):  # a setting may set others, or make them readable
            wrong = {k: old for k, (old, _) in found.items() if not names or k in names}
            if not wrong:
                break
            apply_settings(wrong)
            found = differences(before, read_settings())
        else:
            STUCK.update(wrong)


@contextmanager
def around_case(bench: Benchmark) -> Iterator[None]:
    """Restore all settings after a case, so that those of a model do not affect the next one. Rank
    0 prints those that a step of the model has changed, once. Raises Refused if a step has changed
    the sizes of a batch."""
    changes: dict[str, tuple[Any, Any]] = {}
    try:
        with restored():
            yield
            for _, check, _ in OF_CASE:
                check()
            for _, _, settings in OF_CASE[:1]:
                changes = differences(settings, read_settings())
        for line in lines_about(changes, "it was restored after the case"):
            if (told := f"# a step of {OF_CASE[0][0]} has changed {line}") not in TOLD:
                bench.print(told)
                TOLD.add(told)
    finally:
        OF_CASE.clear()


def lines_about(
    changes: dict[str, tuple[Any, Any]], scope: str = "it applies to this model only"
) -> list[str]:
    """Return a line about each setting that a model has changed, and one about all variables.
    scope: what has become of a setting that is not in AT_ONCE."""
    lines = []
    precisions: dict[str, list[str]] = {}
    for name, (old, new) in changes.items():
        if name.startswith(VARIABLE):
            continue
        what = f"from {text_of(old)} to {text_of(new)}"
        if name.startswith(PRECISION):
            precisions.setdefault(what, []).append(name.removeprefix(PRECISION))
            continue
        end = "it was restored" if name in AT_ONCE else scope
        if name in STUCK:
            end = "it could not be restored, and applies to later models, too"
        if name == "sys.path":
            what = f"({cut([entry for entry in new if entry not in old]) or 'order'})"
        elif name.startswith(("sys.std", "file descriptor")):
            what = ""
        article = "the " if re.match("[a-z ]+$|handler", name) else ""
        lines.append(f"{article}{name} {what}".rstrip() + f"; {end}")
    for what, names in precisions.items():
        lines.append(f"{PRECISION}{cut(names)} {what}; {scope}")
    if variables := [name.removeprefix(VARIABLE) for name in changes if name.startswith(VARIABLE)]:
        plural = scope.replace("it applies", "they apply").replace("it was", "they were")
        lines.append(f"environment variables ({cut(variables)}); {plural}")
    return lines


def text_of(value: Any) -> str:
    """Return a value in at most 200 printable characters, which are the same on all ranks."""
    name = value.name if isinstance(value, enum.Enum) else getattr(value, "__qualname__", value)
    text = str(name)[:200]
    return text if text.isprintable() else ascii(text)
