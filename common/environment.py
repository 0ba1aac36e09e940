"""What the numbers were measured on, and whether the ranks and nodes fit together."""

import os
import platform
import re
import shlex
import socket
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import torch

from common.cli import TURN, cut
from common.dist import Job, gather
from common.gpus import gpu_state, lacking, run, sharing, throttled

# variables that change what is measured, or that tell runs apart
FAMILIES = "NCCL_ NVSHMEM_ GLOO_ UCX_ FI_ TP_ OMP_ MKL_ KMP_ TORCH PYTORCH_ TRITON_ CUDA_ CUBLAS_"
FAMILIES += " CUDNN_ NVIDIA_TF32 SLURM_JOB_"
# and those of them that tell nothing; join() overrides what torchrun sets for the last one
PER_RUN = (
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "NCCL_DEBUG_FILE", TURN),
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
)


def user_variables() -> dict[str, str]:
    """What user and launcher have set. To be called before join(), which sets some itself."""
    families = tuple(FAMILIES.split())
    names = sorted(name for name in os.environ if name.startswith(families))
    return {name: os.environ[name] for name in names if name not in PER_RUN}


def collect(job: Job, variables: dict[str, str]) -> dict[str, Any]:
    """The report's environment, on rank 0; empty elsewhere. All ranks call it."""
    cuda, first = job.device.type == "cuda", job.local_rank == 0
    p: Any = torch.cuda.get_device_properties(job.device) if cuda else None
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "")
    entries = psutil.net_if_addrs().get(interface, [])
    row = {
        "rank": job.rank,
        "local_rank": job.local_rank,
        "host": socket.gethostname(),
        "device": p.name if p else cpu_model(),
        "uuid": str(p.uuid) if p else "",
        "pci": f"{p.pci_domain_id:04x}:{p.pci_bus_id:02x}:{p.pci_device_id:02x}" if p else "",
        "network": " ".join([interface, *(e.address for e in entries if "." in e.address)]),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else "",
    }
    node = {"topology": topology(cuda), "gpus": gpu_state() if cuda else []} if first else {}
    rows = gather((row, node))
    if rows is None:
        return {}
    ranks, leaders = [row for row, _ in rows], [row | node for row, node in rows if node]
    by_hand = "srun" if "SLURM_PROCID" in os.environ and "RANK" in os.environ else "python"
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda if cuda else None,
        "nccl": row["nccl"] or None,
        "nccl_backend": nccl_backend(job.backend) if cuda else None,
        "python": platform.python_version(),
        "os": platform.platform(),
        "launcher": "torchrun" if "TORCHELASTIC_RUN_ID" in os.environ else by_hand,
        "backend": job.backend,
        "world_size": job.world_size,
        "local_world_size": job.local_world_size,
        "num_nodes": len(leaders),
        "hosts": [leader["host"] for leader in leaders],
        "devices": sorted({row["device"] for row in ranks}),
        "topologies": [leader["topology"] for leader in leaders],
        "gpus": [leader["gpus"] for leader in leaders],
        "ranks": ranks,
        "differences": differences(leaders),
        "variables": variables,
    }


def nccl_backend(backend: str) -> str | None:
    """Which of torch's process groups for NCCL a name stands for; None where it is not NCCL's.

    torch 2.15 has several: nccl2 (also by the name nccl), nccl-legacy, which all others have, and
    nccl-lazy.
    """
    name = backend.rpartition("cuda:")[2].partition(",")[0]  # of cpu:gloo,cuda:nccl
    if name != "nccl":
        return name.removeprefix("nccl-") if "nccl" in name else None
    new = hasattr(torch.distributed.distributed_c10d, "ProcessGroupNCCL2")
    return "nccl2" if new and os.environ.get("TORCH_DIST_USE_NCCL2") != "0" else "legacy"


def topology(cuda: bool) -> str:
    """How the devices of this node hang together, as text."""
    if cuda and (text := run(["nvidia-smi", "topo", "-m"])):
        return re.sub(r"\x1b\[[0-9;]*m", "", text)  # it underlines its header
    numa = len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or 1
    cores, cpus = psutil.cpu_count(logical=False) or "?", psutil.cpu_count()
    return f"{cpu_model()}: {cores} cores, {cpus} CPUs, {numa} NUMA node{'s' * (numa > 1)}"


def cpu_model() -> str:
    found = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found[1].strip() if found else platform.machine()


def problem(found: dict[str, Any], tested: range | None = None) -> str | None:
    """What must not be measured: another torch on a node, ranks of `tested` (by default all) that
    share a GPU under NCCL."""
    for name in ("torch", "nccl"):
        # a server on the CPU has no NCCL
        counts = Counter(row[name] for row in found["ranks"] if row[name]).most_common()
        if len(counts) > 1:
            host = next(row["host"] for row in found["ranks"] if row[name] == counts[-1][0])
            return f"{name} is {counts[-1][0]} on {host}, {counts[0][0]} elsewhere"
    shared = sharing(found, tested)
    if shared and "nccl" in found["backend"]:
        return f"{shared}, which nccl cannot; start fewer ranks a node, or try --backend gloo"
    return None


def differences(nodes: list[dict[str, Any]]) -> list[str]:
    """A line for each property that some nodes do not share with most of the others."""
    lines = []
    for name in ("device", "cores", "topology"):
        usual = Counter(node[name] for node in nodes).most_common(1)[0][0]
        odd = [node["host"] for node in nodes if node[name] != usual]
        if odd:
            lines.append(f"{name} of {cut(odd)} is not that of other nodes")
    return lines


def preamble(name: str, found: dict[str, Any]) -> str:
    """The `#` lines above the tables: versions, ranks, each topology once, and warnings."""

    def many(count: int, what: str) -> str:
        return f"{count:,} {what}{'s' * (count > 1)}"

    cuda = f", CUDA {found['cuda']}, NCCL {found['nccl']}" if found["cuda"] else ""
    ranks, nodes = many(found["world_size"], "rank"), many(found["num_nodes"], "node")
    lines = [
        f"torchrun-bench {name}",
        f"command: {shlex.join(sys.argv)}",
        f"PyTorch {found['torch']}{cuda}, Python {found['python']}, backend {found['backend']}",
        f"{ranks} on {nodes}, started by {found['launcher']}",
    ]
    for row in found["ranks"][:64]:
        threads = many(row["threads"], "thread")
        place = f"rank {row['rank']}: {row['host']}, {row['device']}"
        lines.append(f"{place}, {row['cores']} cores, {threads}")
    if more := len(found["ranks"][64:]):
        lines.append(f"... and {many(more, 'more rank')}")
    for text in dict.fromkeys(found["topologies"]):
        lines += text.splitlines()
    warnings = [*found["differences"], *throttled(found["hosts"], found["gpus"])]
    warnings += [f"{found['hosts'][node]}: {why}" for node, why in lacking(found).items()]
    if shared := sharing(found):
        warnings.append(f"{shared}: their times include each other's turns")
    if alone := [row["rank"] for row in found["ranks"] if row["uuid"] and row["cores"] == 1]:
        warnings.append(f"rank {alone[0]} has 1 core for its GPU; see srun --cpus-per-task")
    lines += [f"warning: {warning}" for warning in warnings[:16]]
    if more := len(warnings[16:]):
        lines.append(f"... and {many(more, 'more warning')}")
    return "\n".join(f"# {line}" for line in lines)
