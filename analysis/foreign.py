"""Reports of other programs: PyTorch's benchmarks/distributed/ddp/benchmark.py here, those of
nccl-tests and rccl-tests in nccl_tests.py."""

import json
from typing import Any

import numpy as np

from analysis.nccl_tests import json_report, lines_report, table_reports
from analysis.show import is_number
from common.report import Case, Report

PYTORCH = "PyTorch's DDP benchmark"
# What its cases are in the words of ddp_sweep.py's keys.
PYTORCH_KEY = {
    "dtype": "default",  # it sets no precision, so it has torch's own
    "device": "cuda",
    "image_size": 224,
    "channels_last": False,
    "gradient_as_bucket_view": False,
    "static_graph": False,
}


def read_foreign(content: bytes, path: str) -> list[Report]:
    """The reports of another program in `content`, of the file at `path`; none if it is no such."""
    text = content.decode(errors="replace")
    tables = table_reports(text, path)
    if tables:
        return tables
    try:
        return parse_foreign(text, path)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        what = f"{path} looks like a report of another program, but does not fit"
        raise ValueError(f"{what}: {type(error).__name__} {str(error)[:80]}") from None


def parse_foreign(text: str, path: str) -> list[Report]:
    """As `read_foreign`; raises errors of any kind where a field is missing or of another type."""
    document = parse_json(text)
    if isinstance(document, list):
        is_rccl = bool(document) and all(is_rccl_line(entry) for entry in document)
        return [lines_report(document, path)] if is_rccl else []
    if isinstance(document, dict) and "benchmark_results" in document:
        return [pytorch_report(document, path)]
    if isinstance(document, dict) and "results" in document:
        return [json_report(document, path)]
    return []


def parse_json(text: str) -> Any:
    """A JSON document, or the list of those that stand one a line; None if it is neither."""
    try:
        document = json.loads(text)
        return [document] if is_rccl_line(document) else document
    except (ValueError, RecursionError):
        pass
    try:
        return [json.loads(line) for line in text.splitlines() if line.strip()]
    except (ValueError, RecursionError):
        return None


def is_rccl_line(entry: Any) -> bool:
    return isinstance(entry, dict) and {"inPlace", "busBw"} <= entry.keys()


def label_of(world_size: Any) -> str:
    """What PyTorch's DDP benchmark tells about its ranks."""
    if not world_size:
        return "no ddp"
    return "1 rank" if world_size == 1 else f"{world_size} ranks"


def pytorch_report(document: dict[str, Any], path: str) -> Report:
    """A report of PyTorch's DDP benchmark."""
    report = Report(PYTORCH, {}, path, [], "", status="complete")
    fixed = {name: document.get(name) for name in ("distributed_backend", "bucket_size")}
    for entry in document["benchmark_results"]:
        for i, result in enumerate(entry["result"]):
            # it measures one rank twice: first without DDP, then with it
            is_wrapped = i > 0 or len(result["ranks"]) > 1
            report.cases.append(pytorch_case(entry, result, is_wrapped, fixed))
    report.environment = {
        "torch": document.get("pytorch_version"),
        "cuda": document.get("cuda_version"),
        "world_size": max(len(case.ranks) for case in report.cases),
    }
    return report


def pytorch_case(
    entry: dict[str, Any], result: dict[str, Any], is_wrapped: bool, fixed: dict[str, Any]
) -> Case:
    """The measurements are the times of the first rank, then those of the second, and so on."""
    ranks = result["ranks"]
    label = label_of(len(ranks) if is_wrapped else 0)
    key = {"model": entry["model"], "batch_size": entry["batch_size"], "label": label}
    samples = np.reshape(result["measurements"], (len(ranks), -1))
    median_s = float(np.median(samples.max(axis=0)))
    return Case(
        key | fixed,
        ranks,
        samples_s={"step": samples.tolist()},
        metrics={"step_time_p50_s": median_s},
    )


def our_key(key: dict[str, Any], ranks: int) -> dict[str, Any]:
    """The key of ddp_sweep.py for a case of PyTorch's DDP benchmark. ranks: 0 without DDP"""
    ours = {name: key[name] for name in ("model", "batch_size", "label")}
    ours |= PYTORCH_KEY
    ours["backend"] = key["distributed_backend"]
    ours["world_size"] = ranks
    if ranks == 0:
        return ours | {"bucket_size_mb": None, "comm_hook": None}
    size = key["bucket_size"]  # in whole MB, where ours is a float
    return ours | {
        "bucket_size_mb": float(size) if is_number(size) else size,
        "comm_hook": "none",
    }
