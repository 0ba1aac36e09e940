"""Settings of the process that a user-defined model may change: read, compared and restored.

They are what torch and Python let one read. Not seen: patched classes and functions, global hooks,
modes of dispatch, niceness, flush-to-zero, and what other libraries keep.
"""

import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch.backends import ContextProp

from harness.cli import cut

Settings = dict[str, Any]  # values by name; a variable that is not set has no entry
Access = tuple[Callable[[], Any], Callable[[Any], object]]  # getter, setter
VARIABLE = "variable "  # begins the name of each environment variable
# Restored as soon as the user's function returns, because the code of this project would run under
# them, too. All others apply until the end of the model's case.
AT_ONCE = (
    "number of threads",
    "default dtype",
    "default device",
    "gradient mode",
    "standard output",
)
OF_SDP = ("flash", "mem_efficient", "math", "cudnn")


def set_default_device(device: torch.device) -> None:
    """Set the default device; the CPU means that none is set."""
    torch.set_default_device(None if device.type == "cpu" else device)


def set_folder(folder: str | None) -> None:
    if folder is not None:
        os.chdir(folder)


def set_path(entries: list[str]) -> None:
    sys.path[:] = entries


@functools.cache
def all_settings() -> dict[str, Access]:
    """Return a getter and a setter for each setting but environment variables."""
    deterministic = torch.utils.deterministic
    found: dict[str, Access] = {
        "number of threads": (torch.get_num_threads, torch.set_num_threads),
        "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
        "gradient mode": (torch.is_grad_enabled, torch.set_grad_enabled),
        "default device": (torch.get_default_device, set_default_device),
        "anomaly mode": (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
        "deterministic mode": (
            torch.get_deterministic_debug_mode,
            torch.set_deterministic_debug_mode,
        ),
        "fill_uninitialized_memory": attribute(deterministic, "fill_uninitialized_memory"),
        "float32 matmul precision": (
            torch.get_float32_matmul_precision,
            torch.set_float32_matmul_precision,
        ),
        "cores of the process": (
            lambda: sorted(os.sched_getaffinity(0)),
            lambda cores: os.sched_setaffinity(0, cores),
        ),
        "working directory": (os.getcwd, set_folder),
        "sys.path": (lambda: list(sys.path), set_path),
        "standard output": attribute(sys, "stdout"),
        "standard error": attribute(sys, "stderr"),
    }
    for kind in ("cpu", "cuda"):
        found[f"autocast of {kind}"] = (
            functools.partial(torch.is_autocast_enabled, kind),
            functools.partial(torch.set_autocast_enabled, kind),
        )
    for name, module in vars(torch.backends).items():
        for prop, kept in vars(type(module)).items():
            if isinstance(kept, ContextProp) and name != "m":  # m is torch.backends itself
                found[f"torch.backends.{name}.{prop}"] = (kept.getter, kept.setter)
    cuda = torch.backends.cuda
    for name in OF_SDP:
        access = (getattr(cuda, f"{name}_sdp_enabled"), getattr(cuda, f"enable_{name}_sdp"))
        found[f"torch.backends.cuda.{name}_sdp"] = access
    for name in ("fp16_reduced_precision_reduction", "bf16_reduced_precision_reduction"):
        access = attribute(cuda.matmul, f"allow_{name}")
        found[f"torch.backends.cuda.matmul.allow_{name}"] = access
    for name in ("enabled", "strategy"):
        found[f"torch.backends.opt_einsum.{name}"] = attribute(torch.backends.opt_einsum, name)
    return found


def attribute(owner: Any, name: str) -> Access:
    """Return a getter and a setter of an attribute."""
    return functools.partial(getattr, owner, name), functools.partial(setattr, owner, name)


def read_settings() -> Settings:
    """Return the present settings. Those that this build of torch cannot read are omitted."""
    settings: Settings = {f"{VARIABLE}{name}": value for name, value in os.environ.items()}
    for name, (read, _) in all_settings().items():
        # torch refuses to read one of two APIs for the precision after the other one has set it;
        # the working directory may have been removed
        with suppress(Exception):
            settings[name] = read()
    return settings


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
                all_settings()[name][1](value)
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
        apply_settings({k: old for k, (old, _) in found.items() if not names or k in names})
        if changes is not None:
            for name, (old, new) in found.items():
                changes[name] = (changes.get(name, (old,))[0], new)


def lines_about(changes: dict[str, tuple[Any, Any]]) -> list[str]:
    """Return a line about each setting that a model has changed, and one about all variables."""
    lines = []
    for name, (old, new) in changes.items():
        if name.startswith(VARIABLE):
            continue
        scope = "it was restored" if name in AT_ONCE else "it applies to this model only"
        if name == "sys.path":
            what = f"sys.path ({cut([entry for entry in new if entry not in old]) or 'order'})"
        elif name.startswith("standard"):
            what = f"the {name}"
        else:
            article = "" if name.startswith("torch") else "the "
            what = f"{article}{name} from {old} to {new}"
        lines.append(f"{what}; {scope}")
    if variables := [name.removeprefix(VARIABLE) for name in changes if name.startswith(VARIABLE)]:
        lines.append(f"environment variables ({cut(variables)}); they apply to this model only")
    return lines
