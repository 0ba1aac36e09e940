"""What the numbers were measured on: versions, devices, topology, launcher."""

import hashlib
import os
import platform
import re
import socket
import subprocess
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common.dist import RankContext, gather_json

PREFIXES = ("NCCL_", "GLOO_", "TP_", "OMP_", "MKL_", "TORCH_", "CUDA_", "SLURM_JOB_", "KMP_")


def collect(ctx: RankContext) -> dict[str, Any] | None:
    """The report's `environment`, on rank 0; None elsewhere. All ranks must call it.

    `ranks[]` has rank, local_rank, node, host, device, cores and threads of each rank;
    `topologies[]` has the text of each node, by node.
    """
    mine = _this_rank(ctx)
    rows = gather_json(mine)
    if rows is None:
        return None
    leaders = [row for row in rows if row["local_rank"] == 0]
    cuda = any(row["cuda"] for row in rows)  # servers may be on the CPU and trainers not
    for node, leader in enumerate(leaders):
        last = leaders[node + 1]["rank"] if node + 1 < len(leaders) else len(rows)
        for row in rows[leader["rank"] : last]:
            row["node"] = node
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda if cuda else None,
        "nccl": next((row["nccl"] for row in rows if row["nccl"]), None),
        "driver": _driver() if cuda else None,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "os": platform.platform(),
        "launcher": launcher(),
        "world_size": ctx.world_size,
        "local_world_size": ctx.local_world_size,
        "num_nodes": ctx.num_nodes,
        "hosts": [leader["host"] for leader in leaders],
        "devices": sorted({row["device"] for row in rows}),
        "cpus": sorted({leader["cpu"]["model"] for leader in leaders}),
        "threads_per_rank": sorted({row["threads"] for row in rows}),
        "ranks": [
            {
                name: row[name]
                for name in (
                    "rank",
                    "local_rank",
                    "node",
                    "host",
                    "device",
                    "uuid",
                    "cores",
                    "threads",
                )
            }
            for row in rows
        ],
        "topologies": [leader["topology"] for leader in leaders],
        "differences": _differences(leaders),
        "variables": {
            name: os.environ[name] for name in sorted(os.environ) if name.startswith(PREFIXES)
        },
    }


def _this_rank(ctx: RankContext) -> dict[str, Any]:
    cuda = ctx.device.type == "cuda"
    cpu = _cpu()
    leader = ctx.local_rank == 0
    return {
        "rank": ctx.rank,
        "local_rank": ctx.local_rank,
        "cuda": cuda,
        "host": socket.gethostname(),
        "device": torch.cuda.get_device_name(ctx.device) if cuda else cpu["model"],
        "uuid": str(getattr(torch.cuda.get_device_properties(ctx.device), "uuid", ""))
        if cuda
        else "",
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "cpu": cpu,
        "torch": torch.__version__,
        "nccl": _nccl_version() if cuda else None,
        "topology": _topology(cuda, cpu) if leader else None,
    }


def refuse_shared_devices(
    environment: dict[str, Any], backend: str, tested: Sequence[int] | None = None
) -> None:
    """Raise ValueError where two ranks of a node have one device, which nccl cannot serve.

    tested: the ranks that nccl is used on; None for all.
    """
    owners: dict[tuple[int, str], int] = {}
    for row in environment["ranks"] if backend == "nccl" else []:
        if tested is not None and row["rank"] not in tested:
            continue
        device = (row["node"], row["uuid"])
        if row["uuid"] and device in owners:
            raise ValueError(
                f"ranks {owners[device]} and {row['rank']} share a device on {row['host']}, and "
                "nccl needs one for every rank; start fewer ranks, give each task its own (srun "
                "--gpus-per-node, not one CUDA_VISIBLE_DEVICES for all), or try "
                "--distributed-backend gloo"
            )
        owners[device] = row["rank"]


def launcher() -> str:
    """What started this process: torchrun, srun, or python by hand."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return "torchrun"
    return "srun" if "SLURM_PROCID" in os.environ and "RANK" in os.environ else "python"


def _cpu() -> dict[str, Any]:
    """Model, sockets, physical cores, logical CPUs and NUMA nodes of this host, from Linux."""
    text = Path("/proc/cpuinfo").read_text()
    found = re.search(r"^model name\s*: (.+)$", text, re.MULTILINE)
    model = found[1].strip() if found else platform.machine()
    places: list[tuple[str, str]] = []
    for block in text.split("\n\n"):
        ids = dict(re.findall(r"^(physical id|core id)\s*: (\d+)$", block, re.MULTILINE))
        if block.strip():
            places.append((ids.get("physical id", "0"), ids.get("core id", str(len(places)))))
    nodes = list(Path("/sys/devices/system/node").glob("node[0-9]*"))
    return {
        "model": model,
        "sockets": len({socket_id for socket_id, _ in places}) or 1,
        "cores": len(set(places)),
        "cpus": len(places) or os.cpu_count(),
        "numa_nodes": len(nodes) or 1,
    }


def _topology(cuda: bool, cpu: dict[str, Any]) -> str:
    """How the devices of this node hang together, as text."""
    if cuda:
        text = _run(["nvidia-smi", "topo", "-m"])
        if text:
            return re.sub(r"\x1b\[[0-9;]*m", "", text)  # it underlines its header
    return (
        f"{cpu['model']}: {_count(cpu['sockets'], 'socket')}, {_count(cpu['cores'], 'core')}, "
        f"{_count(cpu['cpus'], 'CPU')}, {_count(cpu['numa_nodes'], 'NUMA node')}"
    )


def _nccl_version() -> str:
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]


def _driver() -> str | None:
    text = _run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    return text.splitlines()[0].strip() if text else None


def _run(command: list[str]) -> str | None:
    """The command's output, or None where it is absent, slow or failing."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def _differences(leaders: list[dict[str, Any]]) -> list[str]:
    """One line for each node that is unlike most of the others, naming what differs."""
    lines = []
    for name in ("device", "cpu", "torch", "nccl", "topology"):
        values = [str(leader[name]) for leader in leaders]
        usual, _ = Counter(values).most_common(1)[0]
        for node, (leader, value) in enumerate(zip(leaders, values, strict=True)):
            if value != usual:
                lines.append(
                    f"node {node} ({leader['host']}): {name} differs: {_short(value)}, "
                    f"others have {_short(usual)}"
                )
    return lines


def _short(text: str) -> str:
    if len(text) <= 60 and "\n" not in text:
        return text
    return f"text with digest {hashlib.sha256(text.encode()).hexdigest()[:8]}"


def preamble(benchmark: str, environment: dict[str, Any], backend: str) -> str:
    """The `#` lines over the tables: versions, one line a rank up to 64, each topology once."""
    env = environment
    cuda = (
        f", CUDA {env['cuda']}, NCCL {env['nccl']}, driver {env['driver']}" if env["cuda"] else ""
    )
    lines = [
        f"torchrun-bench {benchmark}",
        f"PyTorch {env['torch']}{cuda}, Python {env['python']}, backend {backend}",
        f"{_count(env['world_size'], 'rank')} on {_count(env['num_nodes'], 'node')}, "
        f"started by {env['launcher']}",
    ]
    for row in env["ranks"][:64]:
        lines.append(
            f"rank {row['rank']}: {row['host']}, {row['device']}, "
            f"{_count(row['cores'], 'core')}, {_count(row['threads'], 'thread')}"
        )
    if len(env["ranks"]) > 64:
        lines.append(f"... and {_count(len(env['ranks']) - 64, 'more rank')}")
    nodes_with: dict[str, list[int]] = {}
    for i, text in enumerate(env["topologies"]):
        nodes_with.setdefault(text, []).append(i)
    for text, nodes in nodes_with.items():
        lines.append(f"topology of node {_runs(nodes)}:")
        lines += text.splitlines()
    return "\n".join(f"# {line}" for line in lines)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _runs(numbers: list[int]) -> str:
    """`0-3,7` for [0, 1, 2, 3, 7]; the numbers ascend."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
