"""What the numbers were measured on, and whether the ranks and nodes fit together."""

import os
import platform
import re
import socket
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import torch

from common.dist import Job, gather

# variables that change what is measured, or that tell runs apart
PREFIXES = (
    *("NCCL_", "GLOO_", "TP_", "OMP_", "MKL_", "KMP_", "TORCH", "PYTORCH_", "CUDA_", "NVIDIA_TF32"),
    *("CUBLAS_", "CUDNN_", "TRITON_", "UCX_", "FI_", "NVSHMEM_", "SLURM_JOB_"),
)
PER_RUN = (  # variables that tell nothing
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "TORCHRUN_BENCH_TURN", "NCCL_DEBUG_FILE"),
)
GPU_STATE = (
    *("index", "uuid", "pci.bus_id", "name", "driver_version", "mig.mode.current"),
    *("ecc.mode.current", "ecc.errors.uncorrected.volatile.total", "power.limit"),
    *("clocks.current.sm", "clocks.max.sm", "clocks.current.memory", "temperature.gpu"),
    "clocks_event_reasons.active",
)
# bits of clocks_event_reasons.active that slow a GPU down: NVML's nvmlClocksEventReasons
THROTTLED = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "software thermal",
    0x40: "hardware thermal",
    0x80: "power brake",
}


def collect(job: Job) -> dict[str, Any] | None:
    """The report's environment, on rank 0; None elsewhere. All ranks call it.

    `ranks` has a row for each rank; `gpus` and `topologies` an entry for each node.
    """
    cuda = job.device.type == "cuda"
    first = job.local_rank == 0
    p: Any = torch.cuda.get_device_properties(job.device) if cuda else None
    rows = gather(
        {
            "rank": job.rank,
            "local_rank": job.local_rank,
            "host": socket.gethostname(),
            "device": p.name if p else cpu_model(),
            "uuid": str(p.uuid) if p else "",
            "pci": f"{p.pci_domain_id:04x}:{p.pci_bus_id:02x}:{p.pci_device_id:02x}" if p else "",
            "network": " ".join(network()),
            "cores": len(os.sched_getaffinity(0)),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else "",
            "topology": topology(cuda) if first else "",
            "gpus": gpu_state() if first and cuda else [],
        }
    )
    if rows is None:
        return None
    leaders = [row for row in rows if row["local_rank"] == 0]
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda if cuda else None,
        "nccl": rows[0]["nccl"] or None,
        "nccl_backend": nccl_backend() if cuda else None,
        "python": platform.python_version(),
        "os": platform.platform(),
        "launcher": launcher(),
        "backend": job.backend,
        "world_size": job.world_size,
        "local_world_size": job.local_world_size,
        "num_nodes": len(leaders),
        "hosts": [leader["host"] for leader in leaders],
        "devices": sorted({row["device"] for row in rows}),
        "topologies": [leader["topology"] for leader in leaders],
        "gpus": [leader["gpus"] for leader in leaders],
        "ranks": [{k: v for k, v in row.items() if k not in ("topology", "gpus")} for row in rows],
        "differences": differences(leaders),
        "variables": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(PREFIXES) and name not in PER_RUN
        },
    }


def nccl_backend() -> str:
    """torch 2.15 has a second implementation of NCCL's process group, and takes it by default."""
    new = hasattr(torch.distributed.distributed_c10d, "ProcessGroupNCCL2")
    return "nccl2" if new and os.environ.get("TORCH_DIST_USE_NCCL2") != "0" else "legacy"


def at_the_end(job: Job) -> dict[str, list[Any]] | None:
    """What each node says after the last case, on rank 0: `gpus`, their state, and `nccl`, what it
    chose. None elsewhere, empty lists on the CPU. All ranks call it."""
    first = job.local_rank == 0 and job.device.type == "cuda"
    rows = gather((gpu_state(), nccl_choices(nccl_log())) if first else None)
    if rows is None:
        return None
    said = [row for row in rows if row]
    return {"gpus": [row[0] for row in said], "nccl": [row[1] for row in said]}


def nccl_log() -> str:
    """What NCCL has written on this node's first rank; join.py asks it to."""
    path = Path(os.environ.get("NCCL_DEBUG_FILE", ""))
    return path.read_text(errors="replace") if path.is_file() else ""


def nccl_choices(log: str) -> dict[str, list[str]]:
    """The networks and transports in a log of NCCL_DEBUG=INFO, and whether it set up NVLS."""
    found = {
        "network": re.findall(r"Using network (\S+)", log),
        "transport": re.findall(r"Channel \S+ : \S+ -> \S+(?: \[\w+\])? via (\S+)", log),
        "nvls": re.findall(r"NVLS multicast support is (\w+)", log),
    }
    return {name: sorted(set(values)) for name, values in found.items()}


def lacking(found: dict[str, Any], wanted: int | None = None) -> dict[int, str]:
    """Nodes with fewer GPUs than `wanted`, by default than others, or with broken memory -> why."""
    wanted = wanted or max(map(len, found["gpus"]))
    why = {}
    for node, gpus in enumerate(found["gpus"]):
        errors = [gpu["ecc.errors.uncorrected.volatile.total"] for gpu in gpus]
        bad = [i for i, count in enumerate(errors) if count.isdigit() and int(count)]
        if bad:
            why[node] = f"GPU {bad[0]} has uncorrected errors of its memory"
        if len(gpus) < wanted:
            why[node] = f"it has {len(gpus)} of {wanted} GPUs"
    return why


def problem(found: dict[str, Any], tested: range | None = None) -> str | None:
    """What must not be measured: ranks that share a GPU under NCCL, nodes with another torch.

    tested: the ranks that the groups under test may hold; None for all.
    """
    for name in ("torch", "nccl"):
        counts = Counter(row[name] for row in found["ranks"])
        if len(counts) > 1:
            odd = counts.most_common()[-1][0]
            host = next(row["host"] for row in found["ranks"] if row[name] == odd)
            return f"{name} is {odd} on {host}, {counts.most_common(1)[0][0]} elsewhere"
    shared = sharing(found, tested)
    if shared and found["backend"] == "nccl":
        return (
            f"{shared}, which nccl cannot; start fewer ranks, give each task its own device (srun "
            "--gpus-per-node), or try --backend gloo"
        )
    return None


def sharing(found: dict[str, Any], tested: range | None = None) -> str | None:
    """`ranks 0 and 1 share a GPU on host`; None where each has its own."""
    owners: dict[tuple[str, str], int] = {}
    for row in found["ranks"]:
        if not row["uuid"] or (tested is not None and row["rank"] not in tested):
            continue
        other = owners.setdefault((row["host"], row["uuid"]), row["rank"])
        if other != row["rank"]:
            return f"ranks {other} and {row['rank']} share a GPU on {row['host']}"
    return None


def warnings(found: dict[str, Any]) -> list[str]:
    """What a reader of the numbers should know: nodes that differ, throttled GPUs, few cores."""
    lines = list(found["differences"])
    lines += [f"{found['hosts'][node]}: {why}" for node, why in lacking(found).items()]
    if shared := sharing(found):
        lines.append(f"{shared}: their times include each other's turns")
    for row in found["ranks"]:
        if row["uuid"] and row["cores"] == 1:
            lines.append(f"rank {row['rank']} has 1 core for its GPU; see srun --cpus-per-task")
            break
    return lines + throttled(found["hosts"], found["gpus"])


def throttled(hosts: list[str], gpus: list[list[dict[str, str]]]) -> list[str]:
    """A line for each GPU that runs slower than it could, with the reason. gpus: by node."""
    lines = []
    for host, node in zip(hosts, gpus, strict=False):
        for gpu in node:
            text = gpu["clocks_event_reasons.active"]
            bits = int(text, 16) if re.fullmatch(r"0x[0-9a-fA-F]+", text) else 0
            if reasons := [name for bit, name in THROTTLED.items() if bits & bit]:
                lines.append(f"GPU {gpu['index']} of {host} is throttled: {', '.join(reasons)}")
    return lines


def differences(leaders: list[dict[str, Any]]) -> list[str]:
    """A line for each node that is unlike most of the others."""
    lines = []
    for name in ("device", "cores", "topology"):
        usual, _ = Counter(str(leader[name]) for leader in leaders).most_common(1)[0]
        for leader in leaders:
            if (value := str(leader[name])) != usual:
                texts = (value, usual) if len(value + usual) < 120 else ("another one", "this one")
                lines.append(f"{name} of {leader['host']} is {texts[0]}, elsewhere {texts[1]}")
    return lines


def preamble(name: str, found: dict[str, Any]) -> str:
    """The `#` lines above the tables: versions, a line a rank up to 64, each topology once."""
    cuda = f", CUDA {found['cuda']}, NCCL {found['nccl']}" if found["cuda"] else ""
    count, nodes = found["world_size"], found["num_nodes"]
    lines = [
        f"torchrun-bench {name}",
        f"PyTorch {found['torch']}{cuda}, Python {found['python']}, backend {found['backend']}",
        f"{count} rank{'s' * (count > 1)} on {nodes} node{'s' * (nodes > 1)}, started by "
        f"{found['launcher']}",
    ]
    for row in found["ranks"][:64]:
        lines.append(
            f"rank {row['rank']}: {row['host']}, {row['device']}, {row['cores']} cores, "
            f"{row['threads']} thread{'s' * (row['threads'] > 1)}"
        )
    if count > 64:
        lines.append(f"... and {count - 64} more ranks")
    for text in dict.fromkeys(found["topologies"]):
        lines += text.splitlines()
    return "\n".join(f"# {line}" for line in lines)


def launcher() -> str:
    """What started this process: torchrun, srun, or python by hand."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return "torchrun"
    return "srun" if "SLURM_PROCID" in os.environ and "RANK" in os.environ else "python"


def topology(cuda: bool) -> str:
    """How the devices of this node hang together, as text."""
    if cuda and (text := run(["nvidia-smi", "topo", "-m"])):
        return re.sub(r"\x1b\[[0-9;]*m", "", text)  # it underlines its header
    numa = len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or 1
    cores, cpus = psutil.cpu_count(logical=False) or "?", psutil.cpu_count()
    return f"{cpu_model()}: {cores} cores, {cpus} CPUs, {numa} NUMA node{'s' * (numa > 1)}"


def gpu_state() -> list[dict[str, str]]:
    """What nvidia-smi says of each GPU of this node; empty where it says nothing."""
    text = run(["nvidia-smi", f"--query-gpu={','.join(GPU_STATE)}", "--format=csv,noheader"])
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    return [dict(zip(GPU_STATE, row, strict=True)) for row in rows if len(row) == len(GPU_STATE)]


def network() -> tuple[str, str]:
    """The interface that gloo takes, and its address."""
    name = os.environ.get("GLOO_SOCKET_IFNAME", "")
    entries = psutil.net_if_addrs().get(name, [])
    return name, next((e.address for e in entries if e.family == socket.AF_INET), "")


def cpu_model() -> str:
    found = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found[1].strip() if found else platform.machine()


def run(command: list[str]) -> str:
    """A command's output; nothing where it is absent, slow or failing."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
