"""Reports of other programs: PyTorch's benchmarks/distributed/ddp/benchmark.py, and what nccl-tests
write with `-J` (its src/util.cu, versions 1 and 2)."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from analysis.show import is_number
from common.report import Case, Report

PYTORCH = "PyTorch's DDP benchmark"
# What its cases are in the words of ddp_sweep.py's keys.
PYTORCH_KEY = {
    "dtype": "default",  # it sets no precision, so it has torch's own
    "device": "cuda",
    "image_size": 224,
    "bind_cores": False,
    "channels_last": False,
    "gradient_as_bucket_view": False,
    "static_graph": False,
}


def read_foreign(content: bytes, path: str) -> Report | None:
    """The report of another program, if `content` of the file at `path` is one."""
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):
        return None
    if not isinstance(document, dict):
        return None
    try:
        if "benchmark_results" in document:
            return pytorch_report(document, path)
        if "results" in document:
            return nccl_report(document, path)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        what = f"{path} looks like a report of another program, but does not fit"
        raise ValueError(f"{what}: {type(error).__name__} {str(error)[:80]}") from None
    return None


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
    ours = {name: key[name] for name in ("model", "batch_size", "label")} | PYTORCH_KEY
    ours |= {"backend": key["distributed_backend"], "world_size": ranks}
    if ranks == 0:
        return ours | {"bucket_size_mb": None, "comm_hook": None}
    size = key["bucket_size"]  # in whole MB, where ours is a float
    return ours | {
        "bucket_size_mb": float(size) if is_number(size) else size,
        "comm_hook": "none",
    }


def nccl_report(document: dict[str, Any], path: str) -> Report:
    """A report of nccl-tests' -J: microseconds and GB/s, out of place and in place."""
    argv = [str(word) for word in document["args"]]
    config = document["config"]
    devices = config["devices"]  # the first of each process
    ranks = len(devices) * config["nthreads"] * config["ngpus"]
    variables = [v for v in document["env"] if v.startswith("NCCL_")]  # not the secrets
    environment = {
        "nccl": document["nccl_version"],
        "world_size": ranks,
        "hosts": sorted({device["hostname"] for device in devices}),
        "devices": sorted({device["device_info"] for device in devices}),
        "variables": dict(variable.split("=", 1) for variable in variables),
    }
    report = Report("nccl-tests", environment, path, argv, str(document["start_time"]))
    report.status = "complete" if "end_time" in document else "interrupted"
    collective = Path(argv[0]).name.removesuffix("_perf")
    report.cases = [nccl_case(result, collective, ranks) for result in document["results"]]
    return report


def nccl_case(result: dict[str, Any], collective: str, ranks: int) -> Case:
    key = {
        "collective": collective,
        "size_bytes": result["size"],
        "dtype": result["type"],
        "redop": result["redop"],
        "root": str(result["root"]).strip(),
        "ranks": ranks,
    }
    case = Case(key, list(range(ranks)))
    for place in ("out_of_place", "in_place"):
        numbers = result.get(place) or {}
        time_us = numbers.get("time", numbers.get("cpu_time"))
        if is_number(time_us):
            case.metrics[f"{place}_time_s"] = time_us / 1e6
            case.metrics[f"{place}_algbw_gb_per_s"] = numbers["alg_bw"]
            case.metrics[f"{place}_busbw_gb_per_s"] = numbers["bus_bw"]
        wrong = numbers.get("nwrong")
        if is_number(wrong) and wrong > 0:
            case.check = f"failed: {wrong:g} wrong values {place.replace('_', ' ')}"
    return case
