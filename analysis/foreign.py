"""Reports of other programs: PyTorch's benchmarks/distributed/ddp/benchmark.py, and what nccl-tests
write with `-J` (its src/util.cu, versions 1 and 2)."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from analysis.show import is_number
from common.report import Case, Report

PYTORCH = "PyTorch's DDP benchmark"
# What its cases are in the words of ddp_sweep.py's keys. It sets no precision: that is torch's own.
PYTORCH_KEY = {"dtype": "default", "device": "cuda", "image_size": 224, "bind_cores": False}
PYTORCH_KEY |= dict.fromkeys(("channels_last", "gradient_as_bucket_view", "static_graph"), False)


def read_foreign(content: bytes, path: str) -> Report | None:
    """The report of another program, if `content` of the file at `path` is one."""
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):
        return None
    lists = [name for name in FOREIGN if isinstance(document, dict) and name in document]
    try:
        return FOREIGN[lists[0]](document, path) if lists else None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        what = f"{path} looks like a report of another program, but does not fit"
        raise ValueError(f"{what}: {type(error).__name__} {str(error)[:80]}") from None


def label_of(world_size: Any) -> str:
    """What PyTorch's DDP benchmark tells of its ranks."""
    return f"{world_size} rank{'s' * (world_size != 1)}" if world_size else "no ddp"


def pytorch_report(document: dict[str, Any], path: str) -> Report:
    """Of PyTorch's DDP benchmark: times of the first rank, then of the second, ..."""
    report = Report(PYTORCH, {}, path, [], "", status="complete")
    fixed = {name: document.get(name) for name in ("distributed_backend", "bucket_size")}
    for entry in document["benchmark_results"]:
        for i, result in enumerate(entry["result"]):
            count = len(result["ranks"])
            # it measures one rank twice: first without DDP, then with it
            label = label_of(count if i or count > 1 else 0)
            key = {"model": entry["model"], "batch_size": entry["batch_size"], "label": label}
            rows = np.reshape(result["measurements"], (count, -1))
            median = {"step_time_p50_s": float(np.median(rows.max(axis=0)))}
            case = Case(key | fixed, result["ranks"], {"step": rows.tolist()}, metrics=median)
            report.cases.append(case)
    about = {"torch": document.get("pytorch_version"), "cuda": document.get("cuda_version")}
    report.environment = about | {"world_size": max(len(case.ranks) for case in report.cases)}
    return report


def our_key(key: dict[str, Any], ranks: int) -> dict[str, Any]:
    """The key that ddp_sweep.py gives to a case of PyTorch's DDP benchmark. ranks: 0 without DDP"""
    ours = {name: key[name] for name in ("model", "batch_size", "label")} | PYTORCH_KEY
    ours |= {"backend": key["distributed_backend"], "world_size": ranks}
    size = key["bucket_size"]  # whole MB, ours are not
    wrapped = {"bucket_size_mb": float(size) if is_number(size) else size, "comm_hook": "none"}
    return ours | (wrapped if ranks else dict.fromkeys(wrapped))


def nccl_report(document: dict[str, Any], path: str) -> Report:
    """Of nccl-tests' -J: microseconds and GB/s, out of place and in place."""
    argv = [str(word) for word in document["args"]]
    config = document["config"]
    devices = config["devices"]  # the first of each process
    ranks = len(devices) * config["nthreads"] * config["ngpus"]
    variables = [v for v in document["env"] if v.startswith("NCCL_")]  # not the secrets
    environment = {"nccl": document["nccl_version"], "world_size": ranks}
    environment |= {"hosts": sorted({device["hostname"] for device in devices})}
    environment |= {"devices": sorted({device["device_info"] for device in devices})}
    environment |= {"variables": dict(variable.split("=", 1) for variable in variables)}
    report = Report("nccl-tests", environment, path, argv, str(document["start_time"]))
    report.status = "complete" if "end_time" in document else "interrupted"
    for result in document["results"]:
        key = {"collective": Path(argv[0]).name.removesuffix("_perf")}
        key |= {"size_bytes": result["size"], "dtype": result["type"], "redop": result["redop"]}
        case = Case(key | {"root": str(result["root"]).strip(), "ranks": ranks}, [*range(ranks)])
        for place in ("out_of_place", "in_place"):
            found = result.get(place) or {}
            time_us = found.get("time", found.get("cpu_time"))
            if is_number(time_us):
                case.metrics[f"{place}_time_s"] = time_us / 1e6
                case.metrics[f"{place}_algbw_gb_per_s"] = found["alg_bw"]
                case.metrics[f"{place}_busbw_gb_per_s"] = found["bus_bw"]
            if is_number(found.get("nwrong")) and found["nwrong"] > 0:
                case.check = f"failed: {found['nwrong']:g} wrong values {place.replace('_', ' ')}"
        report.cases.append(case)
    return report


FOREIGN = {"benchmark_results": pytorch_report, "results": nccl_report}
