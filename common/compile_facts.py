"""What torch.compile made of a step (graphs, breaks, recompilations), and why it failed.

Counted by dynamo itself (torch._dynamo.utils), which has no public names for it.
"""

import re
import textwrap
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch._dynamo import utils

KEPT = 10_000  # compilations that dynamo remembers; it would keep 64
WIDTH = 160  # of a reason
EAGER = "or leave it uncompiled: --backends eager"
# What is in the text of an error, or among the names of its classes -> what it means and what to do
HINTS = {
    r"InvalidCxxCompiler|No working C\+\+ compiler": "no C++ compiler: install one (apt-get "
    "install g++), or name it in CXX; or take --backends aot_eager",
    r"Python\.h": "Python's headers are missing: apt-get install python3-dev",
    r"Failed to find C compiler": "no C compiler, which Triton needs: install one (apt-get install "
    "gcc), or name it in CC; or take --backends aot_eager",
    r"TritonMissing|working triton installation|No module named 'triton'": "Triton is missing: pip "
    "install the version that this torch asks for (pip show torch); or take --backends aot_eager",
    r"GPUTooOldForTriton|too old to be supported by the triton": "the GPU is too old for Triton, "
    "which needs compute capability 7.0: take --backends aot_eager",
    r"InvalidBackend|Invalid backend": "there is no such backend; take one of "
    "torch._dynamo.list_backends(), e.g. --backends inductor",
    r"No module named": f"install it, {EAGER}",
    r"First bucket should be smaller": "DDP's buckets are smaller than 1 MB, at which dynamo "
    "cannot split the graph: add --dynamo-no-optimize-ddp",
    r"higher.?order.?op.*DDPOptimizer|DDPOptimizer.*higher.?order.?op": "DDPOptimizer cannot "
    "split activation checkpointing: add --dynamo-no-optimize-ddp",
    r"CppCompileError|C\+\+ compile error": f"the C++ compiler failed: try another in CXX, {EAGER}",
    r"No space left on device": "the compile cache's disk is full: name another in "
    "TORCHINDUCTOR_CACHE_DIR or TMPDIR",
}


@dataclass(frozen=True)
class CompileFacts:
    """What dynamo has done in this process since `start_counting`. Reasons: one line -> times."""

    graphs: int
    breaks: dict[str, int]
    recompiles: dict[str, int]


def start_counting() -> None:
    """Drop what is compiled and set all counters to zero. Caches on disk stay."""
    torch.compiler.reset()
    utils.counters.clear()
    utils.set_compilation_metrics_limit(KEPT)
    utils.clear_compilation_metrics()


def facts_so_far() -> CompileFacts:
    """Read the counters.

    A break is where a frame leaves a graph: an operation that dynamo cannot trace, a branch on
    data, or the limit of recompilations, from which on a frame runs eager.
    """
    counters: Any = utils.counters
    breaks: Counter[str] = Counter()
    # what breaks a graph moves to "graph_break"; what gives a frame up stays "unimplemented"
    for category in ("graph_break", "unimplemented"):
        for reason, times in counters[category].items():
            # a context manager's generator, as in DDP's forward, is left alone: that breaks nothing
            if category == "graph_break" or "generator" not in one_line(str(reason)).lower():
                breaks[one_line(str(reason))] += times
    # torch 2.6 does not count branches on data, only the functions that go on after them
    resumed = sum(counters["resumes"].values())
    if resumed and not breaks:
        breaks["without a name; TORCH_LOGS=graph_breaks prints it"] = resumed
    recompiles: Counter[str] = Counter()
    for record in utils.get_compilation_metrics():
        # "FRAME/ATTEMPT"; a backward pass that is compiled later is no second attempt
        attempt = re.search(r"/(\d+)(?:_\d+)?$", str(record.compile_id))
        failed = getattr(record, "fail_type", None) is not None
        if attempt and int(attempt[1]) > 0 and record.is_forward is not False and not failed:
            recompiles[_guard(getattr(record, "recompile_reason", None))] += 1
    graphs = int(counters["stats"]["unique_graphs"])
    return CompileFacts(graphs, {k: v for k, v in breaks.items() if v}, dict(recompiles))


def one_line(reason: str) -> str:
    """The title of a graph break and, where there is one, its explanation."""
    lines = [line.strip() for line in reason.strip().splitlines()] or [""]
    explained = re.search(r"^\s*Explanation: (.+)$", reason, re.MULTILINE)
    text = f"{lines[0]}: {explained[1]}" if explained else lines[0]
    text = re.sub(r" at 0x[0-9a-f]+", "", text)  # the same function on every rank, in every run
    text = re.sub(r"/\S*?/(torch|torchvision)/", r"\1/", text)
    return textwrap.shorten(text, WIDTH, placeholder=" ...")


def _guard(reason: str | None) -> str:
    """`0/0: n == 1      # return x * n  # file.py:3 in f` -> `n == 1`."""
    text = re.sub(r"^\S+/\S+: ", "", (reason or "unknown").strip()).partition("\n")[0]
    return textwrap.shorten(text.partition("  #")[0], WIDTH, placeholder=" ...")


def explain_failure(error: BaseException) -> str:
    """Why compiling failed and what to do about it, in one line.

    Dynamo and inductor wrap errors, each version its own way: looked at are the names and texts of
    the error and of all that led to it.
    """
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in chain:
        chain.append(cause)
        inner = getattr(cause, "inner_exception", None) or cause.__cause__
        cause = inner if isinstance(inner, BaseException) else None
    text = "\n".join(f"{type(e).__name__}: {e}" for e in chain)
    root = chain[-1]
    said = re.search(r"^.*\b(?:fatal )?error: .*$", str(root), re.MULTILINE)  # of a C++ compiler
    first = said[0] if said else next(iter(_lines(str(root))), "")
    what = textwrap.shorten(f"{type(root).__name__}: {first}".removesuffix(": "), 300)
    hint = next((hint for pattern, hint in HINTS.items() if re.search(pattern, text, re.I)), None)
    return f"{what}; {hint}" if hint else what


def _lines(text: str) -> list[str]:
    """Without empty ones, and without what dynamo puts before a backend's own words."""
    lines = [line.strip() for line in text.splitlines()]
    return [line for line in lines if line and not re.match(r"backend=.* raised:$", line)]
