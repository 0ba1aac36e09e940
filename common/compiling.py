"""Around torch.compile: cold caches, the start of a backend, its errors, and when it pays."""

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch._inductor.utils
from torch._dynamo.utils import compilation_time_metrics

from common.compile_facts import explain_failure, start_counting

# dynamo's own timers: of a frame, and of a backward pass that is compiled when it first runs
TIMERS = ("_compile.compile_inner", "backward._backward_impl")
CACHE_VARIABLES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
COMPILERS = ("torch._dynamo", "torch._inductor", "torch._functorch")


class CompileError(RuntimeError):
    """A model that a backend cannot compile, said in one line."""


def compile_seconds() -> float:
    """What dynamo has spent on compiling in this process so far."""
    return sum(sum(compilation_time_metrics.get(name, ())) for name in TIMERS)


def payback_steps(cost_s: float, eager_s: float, compiled_s: float) -> int | None:
    """After how many steps compiling has saved what it cost; None where it saves nothing.

    cost_s: what compiling took beyond the eager start; eager_s, compiled_s: the median steps.
    """
    gain = eager_s - compiled_s
    if gain <= 0:
        return None
    return max(0, math.ceil(cost_s / gain))


def speed_up(
    slow: tuple[float, list[float] | None], fast: tuple[float, list[float] | None]
) -> tuple[float, list[float] | None]:
    """How many times faster `fast` is: the ratio of two medians, and bounds of it.

    slow, fast: a median and its interval. The bounds are those of the two intervals at their
    worst, wider than a 95 % interval of the ratio; None where an interval is missing.
    """
    a, b = slow[1], fast[1]
    bounds = None if a is None or b is None else [a[0] / b[1], a[1] / b[0]]
    return slow[0] / fast[0], bounds


@contextlib.contextmanager
def caches_in(folder: Path | None) -> Iterator[None]:
    """Let the compilers keep their files in this folder; None: where they are wont to."""
    if folder is None:
        yield
        return
    # what this process has loaded would be taken from memory, without a look at the folder
    utils: Any = torch._inductor.utils
    clear = getattr(utils, "clear_caches", None) or getattr(utils, "clear_inductor_caches", None)
    if clear is not None:
        clear()
    before = {name: os.environ.get(name) for name in CACHE_VARIABLES}
    os.environ[CACHE_VARIABLES[0]] = str(folder)
    os.environ[CACHE_VARIABLES[1]] = str(folder / "triton")
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def start_backend(backend: Any, device: torch.device) -> float:
    """Compile next to nothing, forward and backward; returns the seconds that it takes.

    That is what a process pays once for a backend: imports, worker processes, a look at the C++
    compiler. Raises CompileError where the backend cannot work here.
    """
    start = perf_counter()
    start_counting()
    x = torch.ones(64, device=device, requires_grad=True)
    try:
        torch.compile(lambda x: (x * 2).sum(), backend=backend)(x).backward()
    except Exception as error:
        raise CompileError(explain_failure(error)) from error
    finally:
        start_counting()
    return perf_counter() - start


@contextlib.contextmanager
def compile_errors() -> Iterator[None]:
    """Turn the compilers' errors into a CompileError; all others stay as they are."""
    try:
        yield
    except Exception as error:
        if any(cls.__module__.startswith(COMPILERS) for cls in type(error).__mro__):
            raise CompileError(explain_failure(error)) from error
        raise
