"""Reports of other programs: PyTorch's benchmarks/distributed/ddp/benchmark.py, in JSON, and by
nccl_tests.py those of nccl-tests and rccl-tests."""

import json
from typing import Any

import numpy as np

from analysis import nccl_tests
from analysis.show import is_number
from common.report import Case, Report
from common.stats import median

PYTORCH = "PyTorch's DDP benchmark"
NOT_IN_PYTORCH = ("world_size", "breakdown")  # fields of ddp_sweep.py's keys
# What its cases are in the words of ddp_sweep.py's keys.
PYTORCH_KEY = {
    "dtype": "default",  # it sets no precision, so it has torch's own
    "device": "cuda",
    "image_size": 224,
    "find_unused_parameters": False,
    "global_batch": None,
    "gradient_as_bucket_view": False,
    "static_graph": False,
}


def read(content: bytes, path: str) -> list[Report]:
    """The reports of another program in `content`, the bytes of the file at `path`.

    Returns an empty list if it is no such file. Raises ValueError with one line if it is damaged.
    """
    text = content.decode(errors="replace")
    tables = nccl_tests.table_reports(text, path)
    if tables:
        return tables
    try:
        return json_reports(parse_json(text), path)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        what = f"{path} looks like a report of another program, but does not fit"
        raise ValueError(f"{what}: {type(error).__name__} {str(error)[:80]}") from None


def parse_json(text: str) -> Any:
    """A JSON document, or the list of those that stand one a line; None if it is neither."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        return [json.loads(line) for line in text.splitlines() if line.strip()]
    except (ValueError, RecursionError):
        return None


def json_reports(document: Any, path: str) -> list[Report]:
    """As `read`. Raises errors of many kinds if a field is missing or has another type."""
    if isinstance(document, dict) and "benchmark_results" in document:
        return [pytorch_report(document, path)]
    return nccl_tests.json_reports(document, path)


def pytorch_report(document: dict[str, Any], path: str) -> Report:
    """A report of PyTorch's DDP benchmark. It measures one rank twice: first without DDP.

    Its measurements are the times of the first rank, then those of the second, and so on.
    """
    report = Report(PYTORCH, {}, path, argv=[], started_at="", status="complete")
    fixed = {name: document.get(name) for name in ("distributed_backend", "bucket_size")}
    for entry in document["benchmark_results"]:
        about = {"model": entry["model"], "batch_size": entry["batch_size"]}
        table = f"{about['model']}, batch size {about['batch_size']}"
        for i, result in enumerate(entry["result"]):
            ranks = result["ranks"]
            count, is_wrapped = len(ranks), i > 0 or len(ranks) > 1
            key = about | {"ranks": count, "ddp": is_wrapped} | fixed
            name = f"{count} rank{'s' if count > 1 else ''}" if is_wrapped else "no ddp"
            samples = np.reshape(result["measurements"], (count, -1))
            case = Case(key=key, name=name, table=table, ranks=ranks)
            case.samples_s = {"step": samples.tolist()}
            case.metrics = {"step_s": median(samples.max(axis=0))}
            report.cases.append(case)
    report.environment = {
        "torch": document.get("pytorch_version"),
        "cuda": document.get("cuda_version"),
        "world_size": max(len(case.ranks) for case in report.cases),
    }
    return report


def key_of_ddp_sweep(case: Case) -> dict[str, Any]:
    """The key of ddp_sweep.py for a case of PyTorch's DDP benchmark."""
    ours = {name: case.key[name] for name in ("model", "batch_size", "ranks", "ddp")}
    ours |= PYTORCH_KEY | {"backend": case.key["distributed_backend"]}
    if not case.key["ddp"]:
        return ours | {"bucket_size_mb": None, "comm_hook": None}
    size = case.key["bucket_size"]  # in whole MB, where ours is a float
    return ours | {"bucket_size_mb": float(size) if is_number(size) else size, "comm_hook": "none"}
