"""What the numbers were measured on, and whether the ranks and nodes fit together."""

import os
import platform
import re
import socket
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch

from common.cli import backends_of, cut, version
from common.cpu_load import CpuLoad, others_text
from common.gpus import gpu_state, lacking, run, sharing, throttled
from common.groups import Job, gather, share
from common.join import ERROR_HANDLING, torchrun_set_error_handling
from common.private_torch import creator_of
from common.report import FAMILIES, without_secrets
from common.turns import TURN

# These of the FAMILIES tell nothing.
PER_RUN = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "NCCL_DEBUG_FILE", TURN)

UNITS = "units: 64K, 4M, MiB and GiB count by 1,024; MB/s and GB/s by 1,000"
NCCL2_HINT = (
    "hint: with nccl2 DDP may overlap nothing: read in torch's source (WorkNCCL::getFuture), "
    "not measured. To compare: TORCH_DIST_USE_NCCL2=0"
)
MOST_RANKS, MOST_WARNINGS = 64, 16  # the preamble prints no more of them
# The variable that each launcher sets. mpirun comes before srun: it may use srun itself.
LAUNCHERS = {"TORCHELASTIC_RUN_ID": "torchrun", "OMPI_COMM_WORLD_RANK": "mpirun"}
LAUNCHERS |= {"MPI_LOCALRANKID": "mpirun", "FLUX_TASK_RANK": "flux", "SLURM_PROCID": "srun"}


def user_variables() -> dict[str, str]:
    """The variables that the user and the launcher have set. Call it before join(), which sets more
    of them."""
    told_apart_by = (*FAMILIES, "SLURM_JOB_")
    names = sorted(name for name in os.environ if name.startswith(told_apart_by))
    variables = {name: os.environ[name] for name in names if name not in PER_RUN}
    if torchrun_set_error_handling():
        del variables[ERROR_HANDLING]
    return without_secrets(variables)


def collect(job: Job, variables: dict[str, str], load: CpuLoad | None = None) -> dict[str, Any]:
    """On rank 0 the report's environment; empty on the others. All ranks call it.

    variables: what `user_variables` returned before this process joined the job. load: counts what
    others take from this node, on its first rank.
    """
    # with RPC some ranks may be on the CPU, the first one of a node among them
    cuda = "cuda" in share(gather(job.device.type))
    node = None  # the first rank of a node describes it
    if job.local_rank == 0:
        others = load.of_others() if load else None
        gpus = gpu_state() if cuda else []
        node = {"topology": topology(cuda), "gpus": gpus, "others": others}
    rows = gather((describe_rank(job), node))
    if rows is None:
        return {}
    ranks = [rank for rank, _ in rows]
    nodes = [rank | node for rank, node in rows if node]
    return {
        "version": version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if cuda else None,
        "nccl": max(rank["nccl"] for rank in ranks) or None,  # "" on the CPU
        "nccl_backend": nccl_backends(job.backend) if cuda else None,
        "python": platform.python_version(),
        "os": platform.platform(),
        "launcher": launcher(),
        "backend": job.backend,
        "world_size": job.world_size,
        "local_world_size": job.local_world_size,
        "num_nodes": len(nodes),
        "hosts": [node["host"] for node in nodes],
        "devices": sorted({rank["device"] for rank in ranks}),
        "topologies": [node["topology"] for node in nodes],
        "gpus": [node["gpus"] for node in nodes],
        "others": [node["others"] for node in nodes if node["others"]],
        "ranks": ranks,
        "differences": differences(nodes),
        "variables": variables,
    }


def imagined(environment: dict[str, Any], job: Job) -> dict[str, Any]:
    """For --dry-run: the environment of a job whose nodes are all like this one."""
    row = environment["ranks"][0] | {"uuid": "", "pci": ""}  # the ranks of a node share no GPU
    per_node = job.local_world_size
    ranks = [row | {"rank": rank, "local_rank": rank % per_node} for rank in range(job.world_size)]
    count = -(-job.world_size // per_node)
    alike = {name: environment[name] * count for name in ("hosts", "topologies", "gpus")}
    return environment | alike | {"ranks": ranks, "num_nodes": count, "others": []}


def node_of_each(environment: dict[str, Any]) -> list[int]:
    """The node of each rank, from 0. A host may run several: there local ranks start anew."""
    seen: Counter[tuple[str, int]] = Counter()
    nodes: list[tuple[str, int]] = []
    for row in environment["ranks"]:
        seen[row["host"], row["local_rank"]] += 1
        nodes.append((row["host"], seen[row["host"], row["local_rank"]]))
    numbers = {node: number for number, node in enumerate(dict.fromkeys(nodes))}
    return [numbers[node] for node in nodes]


def launcher() -> str:
    """What started this rank: torchrun, mpirun, flux, srun, or python by hand."""
    if "RANK" in os.environ:
        for variable, name in LAUNCHERS.items():
            if variable in os.environ:
                return name
    return "python"


def describe_rank(job: Job) -> dict[str, Any]:
    """This rank's row in the environment."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "")
    addresses = [entry.address for entry in psutil.net_if_addrs().get(interface, [])]
    ipv4 = [address for address in addresses if "." in address]
    row = {
        "rank": job.rank,
        "local_rank": job.local_rank,
        "host": socket.gethostname(),
        "device": cpu_model(),
        "uuid": "",
        "pci": "",
        "network": " ".join([interface, *ipv4]),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "keeps_freed_memory": job.keeps_memory,
        "torch": torch.__version__,
        "nccl": "",
    }
    if job.device.type == "cuda":
        gpu: Any = torch.cuda.get_device_properties(job.device)
        row["device"], row["uuid"] = gpu.name, str(gpu.uuid)
        row["pci"] = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}"
        row["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return row


def nccl_backends(backend: str) -> str | None:
    """What `nccl_backend` says of each backend: `legacy,nccl2`. None if none is NCCL's."""
    names = [nccl_backend(name) for name in backends_of(backend)]
    return ",".join(name for name in names if name) or None


def nccl_backend(backend: str) -> str | None:
    """Which of torch's process groups for NCCL a backend's name means; None for other backends.

    Newer torches have several: nccl2, nccl-legacy and nccl-lazy. Which of them `nccl` is depends on
    the version and on TORCH_DIST_USE_NCCL2. Older ones have only what is called nccl-legacy now.
    """
    name = backend.rpartition("cuda:")[2].partition(",")[0]  # of cpu:gloo,cuda:nccl
    if name == "nccl":
        return "nccl2" if "nccl2" in creator_of(name) else "legacy"
    return name.removeprefix("nccl-") if "nccl" in name else None


def topology(cuda: bool) -> str:
    """How the devices of this node are connected, as text."""
    if cuda and (text := run(["nvidia-smi", "topo", "-m"])):
        return re.sub(r"\x1b\[[0-9;]*m", "", text)  # it underlines its header
    numa = len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or 1
    cores, cpus = psutil.cpu_count(logical=False) or "?", psutil.cpu_count()
    return f"{cpu_model()}: {cores} cores, {cpus} CPUs, {numa} NUMA node{'s' * (numa > 1)}"


def cpu_model() -> str:
    """The name of this machine's processor; its architecture where Linux does not say."""
    with suppress(OSError, UnicodeDecodeError):
        cpuinfo = Path("/proc/cpuinfo").read_text()
        if match := re.search(r"^model name\s*: (.+)$", cpuinfo, re.MULTILINE):
            return match[1].strip()
    return platform.machine()


def problem(environment: dict[str, Any], tested: range | None = None) -> str | None:
    """Why this must not be measured, or None: a node has another torch or NCCL, or ranks share a
    GPU under NCCL. tested: the ranks that NCCL connects; None for all of them."""
    ranks = environment["ranks"]
    for name in ("torch", "nccl"):
        # a server on the CPU has no NCCL, and is not counted
        counts = Counter(row[name] for row in ranks if row[name]).most_common()
        if len(counts) > 1:
            usual, rarest = counts[0][0], counts[-1][0]
            host = next(row["host"] for row in ranks if row[name] == rarest)
            return f"{name} is {rarest} on {host}, {usual} elsewhere"
    shared = sharing(environment, tested)
    # NCCL 2.30 and newer can, with this variable
    can_share = environment["variables"].get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
    if shared and "nccl" in environment["backend"] and not can_share:
        return f"{shared}; NCCL wants one for each rank: start fewer a node, or try --backend gloo"
    return None


def differences(nodes: list[dict[str, Any]]) -> list[str]:
    """A line for each property in which some nodes differ from most of the others."""
    lines = []
    for name in ("device", "cores", "topology"):
        usual = Counter(node[name] for node in nodes).most_common(1)[0][0]
        odd = [node["host"] for node in nodes if node[name] != usual]
        if odd:
            lines.append(f"{name} of {cut(odd)} is not that of other nodes")
    return lines


def preamble(environment: dict[str, Any]) -> str:
    """The other `#` lines above the tables: versions, ranks, each topology once, and warnings."""
    cuda = ""
    if environment["cuda"]:
        cuda = f", CUDA {environment['cuda']}, NCCL {environment['nccl']}"
    versions = f"PyTorch {environment['torch']}{cuda}, Python {environment['python']}"
    ranks = count_of(environment["world_size"], "rank")
    nodes = count_of(environment["num_nodes"], "node")
    lines = [
        f"{versions}, backend {environment['backend']}",
        f"{ranks} on {nodes}, started by {environment['launcher']}",
    ]
    for row in environment["ranks"][:MOST_RANKS]:
        threads = count_of(row["threads"], "thread")
        place = f"rank {row['rank']}: {row['host']}, {row['device']}"
        lines.append(f"{place}, {row['cores']} cores, {threads}")
    if more := len(environment["ranks"][MOST_RANKS:]):
        lines.append(f"... and {count_of(more, 'more rank')}")
    for text in dict.fromkeys(environment["topologies"]):
        lines += text.splitlines()
    lines.append(UNITS)
    warnings = warnings_of(environment)
    lines += [f"warning: {warning}" for warning in warnings[:MOST_WARNINGS]]
    if more := len(warnings[MOST_WARNINGS:]):
        lines.append(f"... and {count_of(more, 'more warning')}")
    if environment["nccl_backend"] == "nccl2":
        lines.append(NCCL2_HINT)
    return "\n".join(f"# {line}" for line in lines)


def count_of(count: int, noun: str) -> str:
    """`1 rank`, `1,024 ranks`."""
    return f"{count:,} {noun}{'s' * (count > 1)}"


def warnings_of(environment: dict[str, Any]) -> list[str]:
    """What makes the numbers doubtful, a line each: nodes that differ, GPUs that are throttled,
    missing or shared, GPUs with one core, and cores that others use."""
    hosts = environment["hosts"]
    warnings = [*environment["differences"], *throttled(hosts, environment["gpus"])]
    warnings += [f"{hosts[node]}: {why}" for node, why in lacking(environment).items()]
    if busy := others_text(hosts, environment["others"]):
        warnings.append(f"{busy}: times will scatter")
    if shared := sharing(environment):
        warnings.append(f"{shared}: their times include each other's turns")
    for row in environment["ranks"]:
        if row["uuid"] and row["cores"] == 1:
            cure = "see srun --cpus-per-task"
            warnings.append(f"rank {row['rank']} has 1 core for its GPU; {cure}")
            break  # the others have as few
    return warnings
