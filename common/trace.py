"""A few steps under torch's profiler: a Chrome trace per rank, and a summary of it."""

import gzip
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from common.trace_summary import read_events, summarize


def check_trace_path(path: str, world_size: int, cases: int = 1) -> None:
    """Raise ValueError where the traces of all ranks and cases could not be written to `path`.

    `{rank}` and `{case}` in its name are replaced; each must be there where there are several.
    """
    if not path.endswith((".json", ".json.gz")):
        raise ValueError(
            f"--trace-file needs a name that ends in .json or .json.gz, got '{path}'; "
            "e.g. --trace-file trace-{rank}.json"
        )
    stem = path.removesuffix(".gz").removesuffix(".json")
    for count, what, field in ((world_size, "ranks", "{rank}"), (cases, "cases", "{case}")):
        if count > 1 and field not in Path(path).name:
            raise ValueError(
                f"--trace-file {path}: the {count} {what} would write the same file; put {field} "
                f"into its name, e.g. --trace-file {stem}-{field}{path.removeprefix(stem)}"
            )
    target = trace_path(path, 0, "")
    try:
        if not target.parent.is_dir():
            raise ValueError(
                f"--trace-file {path}: there is no directory {target.parent}; make it first"
            )
        if target.exists() and not target.is_file():
            raise ValueError(f"--trace-file {path}: {target} is not a regular file")
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}."):
            pass
    except OSError as error:
        raise ValueError(f"--trace-file {path} cannot be written: {error.strerror}") from None


def trace_path(path: str, rank: int, case: str = "") -> Path:
    """The file of one rank and case. case: any text; what is no letter or digit becomes `-`."""
    word = re.sub(r"[^A-Za-z0-9.]+", "-", case).strip("-")
    return Path(path.replace("{rank}", str(rank)).replace("{case}", word))


def profile_steps(
    step: Callable[[], object], steps: int, device: torch.device, path: Path | None = None
) -> dict[str, Any]:
    """Run 1 + `steps` steps, the first one unrecorded; returns `trace_summary.summarize` of them.

    The steps mark their parts by record_function, with the names in trace_summary.RANGES. The
    trace is written to `path`, or nowhere. Every rank of a job has to call this. Raises OSError
    where the trace cannot be written.
    """
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    plan = schedule(wait=0, warmup=1, active=steps, repeat=1)
    with profile(activities=activities, schedule=plan) as profiler:
        for i in range(1 + steps):
            step()
            if device.type == "cuda" and i in (0, steps):  # kernels end within their steps
                torch.cuda.synchronize(device)
            profiler.step()
    folder = None if path is None else path.parent
    with tempfile.TemporaryDirectory(prefix=".trace-", dir=folder) as scratch:
        raw = Path(scratch) / "trace.json"
        profiler.export_chrome_trace(str(raw))
        try:
            events = read_events(raw)
        except (OSError, ValueError):  # the profiler itself does not tell that the disk is full
            raise OSError(f"the trace could not be written to {path or scratch}") from None
        if path is not None:
            _move(raw, path)
    return summarize(events, steps, device.type)


def _move(raw: Path, path: Path) -> None:
    """To its place at once, compressed where its name says so."""
    ready = raw
    if path.suffix == ".gz":
        ready = raw.with_suffix(".gz")
        with raw.open("rb") as source, gzip.open(ready, "wb") as sink:
            shutil.copyfileobj(source, sink)
    ready.replace(path)
