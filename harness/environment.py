"""The environment of a run: software, ranks, nodes, GPUs and variables, and which jobs are refused
because of it."""

import json
import os
import platform
import re
import shlex
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import psutil
import torch

from common.errors import Refused
from common.groups import Job
from harness.cli import TURN, cut, version
from harness.contents import differing
from harness.cpu_load import BUSY, Others
from harness.report import FAMILIES, without_secrets

# Variables that FAMILIES match, but that do not affect the measurement
PER_RUN = (
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "NCCL_DEBUG_FILE", TURN),
    "TORCH_CPP_LOG_LEVEL",
)
UNITS = "units: 64K, 4M, MiB and GiB count by 1,024; MB/s and GB/s by 1,000"
MOST_RANKS = 64  # maximum number of ranks in the preamble
UNCORRECTED = "ecc.errors.uncorrected.volatile.total"
GPU_STATE = (  # fields to query with nvidia-smi, in addition to the index
    f"uuid,name,driver_version,mig.mode.current,ecc.mode.current,{UNCORRECTED},"
    "power.limit,clocks.max.sm,temperature.gpu,clocks_event_reasons.active"
)
# Variables of FAMILIES that differ between ranks by design: devices, network adapters, folders, and
# threads. The number of threads of each rank is compared instead.
BY_DESIGN = re.compile(
    r".*(_VISIBLE_DEVICES|_HCA|_NET_DEVICES|_DIR|_DIRECTORY)|NCCL_HOSTID|TORCHELASTIC_.*"
    r"|OMP_(NUM_THREADS|PLACES|PROC_BIND|.*AFFINITY.*)|(GOMP|KMP)_.*AFFINITY.*"
)
MOST_LINES = 16  # maximum number of warnings of a kind
HELD_GIB = 1.0  # GPU memory that a driver may use itself, rounded up
ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


def user_variables() -> dict[str, str]:
    """Return the variables that can affect a measurement. Call it before `join` sets others."""
    prefixes = (*FAMILIES, "SLURM_JOB_")
    names = sorted(name for name in os.environ if name.startswith(prefixes))
    variables = {name: os.environ[name] for name in names if name not in PER_RUN}
    if torchrun_set_error_handling():
        del variables[ERROR_HANDLING]
    return without_secrets(variables)


def torchrun_set_error_handling() -> bool:
    """Return whether torchrun has set ERROR_HANDLING, which the user had not set."""
    return "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get(ERROR_HANDLING) == "1"


def others_text(hosts: Sequence[str], loads: Sequence[Others]) -> str:
    """Return the nodes on which other processes used more than BUSY of the cores; "" if none."""
    busy = [
        f"{load.busy:.1f} of {load.cores} cores of {host}"
        for host, load in zip(hosts, loads, strict=False)  # a dry run has no loads
        if load.fraction > BUSY
    ]
    return f"other processes used {cut(busy, 3)}" if busy else ""


def collect(job: Job, variables: dict[str, str], memory_held: dict[str, str]) -> dict[str, Any]:
    """Return the report's environment, on rank 0; {} on other ranks, which all call it. variables:
    of `user_variables`. memory_held: of `gpu_memory`, on the first rank of each node."""
    # with RPC, some ranks may be on the CPU, including the first rank of a node
    devices = job.gather(job.device.type)
    cuda = job.broadcast(devices and "cuda" in devices)
    node = None  # collected by the first rank of each node
    if job.local_rank == 0:
        gpus = gpu_state() if cuda else []
        for gpu in gpus:
            gpu["memory.used"] = memory_held.get(gpu["uuid"], "")
        node = {"topology": topology(cuda), "gpus": gpus}
        node |= {"cpu": cpu_model(), "kernel": platform.release()}
    compared = {name: value for name, value in variables.items() if is_compared(name)}
    rows = job.gather((describe_rank(job), node, compared))
    if rows is None:
        return {}
    ranks = [rank for rank, *_ in rows]
    nodes = [rank | node for rank, node, _ in rows if node]
    counts = [len(node["gpus"]) for node in nodes]
    for node in nodes:
        node["gpus"] = used_gpus(node["gpus"], ranks)
    return {
        "version": version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if cuda else None,
        "nccl": max(rank["nccl"] for rank in ranks) or None,  # "" on the CPU
        "torchvision": next((d.version for d in distributions(name="torchvision")), None),
        "python": platform.python_version(),
        "os": platform.platform(),
        "backend": job.backend,
        "world_size": job.world_size,
        "local_world_size": job.local_world_size,
        "num_nodes": len(nodes),
        "hosts": [node["host"] for node in nodes],
        "devices": sorted({rank["device"] for rank in ranks}),
        "cpus": [node["cpu"] for node in nodes],
        "kernels": [node["kernel"] for node in nodes],
        "topologies": [node["topology"] for node in nodes],
        "gpus": [node["gpus"] for node in nodes],
        "gpu_counts": counts,
        "ranks": ranks,
        "variables": variables,
        "other_variables": other_variables([compared for *_, compared in rows]),
    }


def is_compared(variable: str) -> bool:
    """Return whether a variable is expected to have the same value on all ranks."""
    return variable.startswith(FAMILIES) and not BY_DESIGN.fullmatch(variable)


def other_variables(of_ranks: Sequence[Mapping[str, str]]) -> list[dict[str, Any]]:
    """Return the sets of variables that differ from that of rank 0, most common set first: the
    `ranks` of each, and the `variables` that differ (None: not set)."""
    texts = [json.dumps(dict(variables), sort_keys=True) for variables in of_ranks]
    usual, sets = of_ranks[0], []
    for text, _ in Counter(texts).most_common():
        ranks = [rank for rank, of_rank in enumerate(texts) if of_rank == text]
        mine = of_ranks[ranks[0]]
        names = sorted(name for name in {*usual, *mine} if usual.get(name) != mine.get(name))
        if names:
            sets.append({"ranks": ranks, "variables": {name: mine.get(name) for name in names}})
    return sets


def bounded(lines: list[str], noun: str) -> list[str]:
    """Return the first MOST_LINES lines, and the number of the remaining ones."""
    more = len(lines) - MOST_LINES
    return [*lines[:MOST_LINES], f"... and {more:,} more {noun}"] if more > 0 else lines


def node_of_each(environment: dict[str, Any]) -> list[int]:
    """Return each rank's node. On a host with several nodes, each has its own local ranks."""
    seen: Counter[tuple[str, int]] = Counter()
    nodes: list[tuple[str, int]] = []
    for row in environment["ranks"]:
        seen[row["host"], row["local_rank"]] += 1
        nodes.append((row["host"], seen[row["host"], row["local_rank"]]))
    numbers = {node: number for number, node in enumerate(dict.fromkeys(nodes))}
    return [numbers[node] for node in nodes]


def node_names(environment: dict[str, Any]) -> list[str]:
    """Return the host name of each node, with its index if nodes share a host: `vm (node 1)`."""
    hosts = environment["hosts"]
    return [
        host if hosts.count(host) == 1 else f"{host} (node {number})"
        for number, host in enumerate(hosts)
    ]


def rank_names(environment: dict[str, Any]) -> list[str]:
    """Return the name of each rank: `rank 3 on vm`."""
    nodes = node_names(environment)
    return [f"rank {i} on {nodes[node]}" for i, node in enumerate(node_of_each(environment))]


def describe_rank(job: Job) -> dict[str, Any]:
    """Return this rank's entry in the environment."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "")
    addresses = [entry.address for entry in psutil.net_if_addrs().get(interface, [])]
    ipv4 = [address for address in addresses if "." in address]
    row = {
        "rank": job.rank,
        "local_rank": job.local_rank,
        "host": socket.gethostname(),
        "device": cpu_model(),
        "uuid": "",
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
        row["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return row


def output_of(command: list[str]) -> str:
    """Return the output of a command; "" if it is missing, fails or takes more than 20 s."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def gpu_state(query: str = GPU_STATE) -> list[dict[str, str]]:
    """Return these fields of nvidia-smi and `index`, for each GPU of this node; [] if it fails."""
    fields = ["index", *query.split(",")]
    text = output_of(["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"])
    rows = [line.split(", ") for line in text.splitlines()]
    return [dict(zip(fields, row, strict=True)) for row in rows if len(row) == len(fields)]


def gpu_memory() -> dict[str, str]:
    """Return the memory in use on each GPU of this node: UUID -> text such as `4 MiB`. Call it
    before any rank of the node has used CUDA, so that the memory belongs to other processes."""
    gpus = gpu_state("uuid,memory.used") if torch.cuda.device_count() else []
    return {gpu["uuid"]: gpu["memory.used"] for gpu in gpus}


def used_gpus(gpus: list[dict[str, str]], ranks: list[dict[str, Any]]) -> list[dict[str, str]]:
    """Return the GPUs of a node that the job's ranks, of all nodes, use. A GPU in MIG mode is kept:
    torch reports the UUID of the instance, nvidia-smi that of the GPU."""
    used = {f"GPU-{row['uuid']}" for row in ranks}  # torch omits the prefix
    return [gpu for gpu in gpus if gpu["uuid"] in used or gpu["mig.mode.current"] == "Enabled"]


def topology(cuda: bool) -> str:
    """Return the topology of this node's devices, as text."""
    if cuda and (text := output_of(["nvidia-smi", "topo", "-m"])):
        return re.sub(r"\x1b\[[0-9;]*m", "", text)  # the header is underlined
    numa = len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or 1
    cores, cpus = psutil.cpu_count(logical=False) or "?", psutil.cpu_count()
    return f"{cpu_model()}: {cores} cores, {cpus} CPUs, {count_of(numa, 'NUMA node')}"


def cpu_model() -> str:
    """Return the model name of the CPU; its architecture if Linux does not report a name."""
    with suppress(OSError, UnicodeDecodeError):
        cpuinfo = Path("/proc/cpuinfo").read_text()
        if match := re.search(r"^model name\s*: (.+)$", cpuinfo, re.MULTILINE):
            return match[1].strip()
    return platform.machine()


def refuse_differences(
    job: Job, environment: dict[str, Any], contents: Mapping[str, str], tested: range | None = None
) -> None:
    """Raise Refused if the ranks do not belong to one run. All ranks call it, before any of them
    uses NCCL. contents: of this rank's modules. tested: the ranks that NCCL connects; None for all.
    """
    words = [os.path.basename(sys.argv[0]), *without_paths(sys.argv[1:])]
    first, usual = job.broadcast((words, dict(contents)))
    rows = job.gather(([] if words == first else words, differing(usual, contents)))
    found = next(problems(environment, rows, first, tested), None) if rows else None
    if problem := job.broadcast(found):
        raise Refused(problem)


def problems(
    environment: dict[str, Any], rows: list[Any], first: list[str], tested: range | None
) -> Iterator[str]:
    """Yield messages on other command lines, other versions of torch or NCCL, a shared GPU under
    NCCL, and other files. rows: of each rank, its words and modules that differ from rank 0's.
    first: the words of rank 0."""
    ranks = environment["ranks"]
    if others := [rank for rank, (words, _) in enumerate(rows) if words]:
        got = shlex.join(rows[others[0]][0])
        yield (
            f"expected the same arguments on all ranks, got `{got}` on rank {cut(others)}, "
            f"`{shlex.join(first)}` on rank 0"
        )
    for name in ("torch", "nccl"):  # "" for a server on the CPU, which does not use NCCL
        counts = Counter(row[name] for row in ranks if row[name]).most_common()
        if len(counts) > 1:
            usual, rarest = counts[0][0], counts[-1][0]
            host = next(row["host"] for row in ranks if row[name] == rarest)
            yield f"{name} is {rarest} on {host}, {usual} elsewhere"
    # NCCL 2.30 and newer support sharing with this variable
    can_share = environment["variables"].get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
    shared = shared_gpu(environment, tested)
    if shared and "nccl" in environment["backend"] and not can_share:
        yield f"{shared}; NCCL requires one GPU per rank: start fewer, or use --backend gloo"
    if others := [rank for rank, (_, modules) in enumerate(rows) if modules]:
        yield (
            f"expected the same files on all ranks, but {cut(rows[others[0]][1])} of rank "
            f"{cut(others)} ({ranks[others[0]]['host']}) differ from rank 0's; use one checkout on "
            "all nodes"
        )


def without_paths(words: Sequence[str]) -> list[str]:
    """Return the words with PATH as the values of --json and --profile, which may differ between
    ranks: rank 0 alone writes the report, and each rank its own traces."""
    flags = ("-J", "--json", "--output-file", "--output_file", "--profile")
    kept: list[str] = []
    for last, word in zip(["", *words], words, strict=False):
        name, equals, _ = word.partition("=")
        if last in flags and word != "-":
            word = "PATH"
        elif name in flags and equals:
            word = f"{name}=PATH"
        kept.append(word)
    return kept


def shared_gpu(environment: dict[str, Any], tested: range | None = None) -> str | None:
    """Return `ranks 0 and 1 share a GPU on host`; None if each tested rank has its own GPU."""
    owners: dict[tuple[str, str], int] = {}
    for row in environment["ranks"]:
        if row["uuid"] and (tested is None or row["rank"] in tested):
            other = owners.setdefault((row["host"], row["uuid"]), row["rank"])
            if other != row["rank"]:
                return f"ranks {other} and {row['rank']} share a GPU on {row['host']}"
    return None


def memory_in_use(environment: dict[str, Any]) -> dict[int, str]:
    """Return the nodes on which other processes held memory of the job's GPUs -> a text with the
    amounts above HELD_GIB. Other instances of GPUs in MIG mode may belong to other jobs."""
    held = {}
    for node, gpus in enumerate(environment["gpus"]):
        parts = []
        for gpu in gpus:
            number, _, unit = gpu.get("memory.used", "").partition(" ")
            gib = int(number) / 1024 if number.isdigit() and unit == "MiB" else 0.0
            if gib > HELD_GIB and gpu["mig.mode.current"] != "Enabled":
                parts.append(f"{gib:.1f} GiB of GPU {gpu['index']}")
        if parts:
            held[node] = f"other processes were already using {cut(parts)}"
    return held


def gpu_problems(environment: dict[str, Any], wanted: int | None = None) -> dict[int, str]:
    """Return the nodes with uncorrected memory errors or with too few GPUs -> the reason.
    wanted: expected number of GPUs per node; by default the largest number found on a node."""
    counts = environment["gpu_counts"]
    wanted = wanted or max(counts)
    why = {}
    for node, (gpus, count) in enumerate(zip(environment["gpus"], counts, strict=True)):
        # a count, or "[N/A]"
        broken = [gpu["index"] for gpu in gpus if gpu[UNCORRECTED].strip("0").isdigit()]
        reasons = []
        if broken:
            verb = "has" if len(broken) == 1 else "have"
            reasons.append(f"GPU {cut(broken)} {verb} uncorrected memory errors")
        if count < wanted:
            reasons.append(f"it has {count} of {wanted} GPUs")
        if reasons:
            why[node] = "; ".join(reasons)
    return why


def preamble(environment: dict[str, Any]) -> str:
    """Return the `#` lines below the command: versions, ranks, and each distinct topology."""
    cuda = ""
    if environment["cuda"]:
        cuda = f", CUDA {environment['cuda']}, NCCL {environment['nccl']}"
    versions = f"PyTorch {environment['torch']}{cuda}, Python {environment['python']}"
    ranks = count_of(environment["world_size"], "rank")
    nodes = count_of(environment["num_nodes"], "node")
    lines = [f"{versions}, backend {environment['backend']}", f"{ranks} on {nodes}"]
    for row in environment["ranks"][:MOST_RANKS]:
        threads = count_of(row["threads"], "thread")
        place = f"rank {row['rank']}: {row['host']}, {row['device']}"
        lines.append(f"{place}, {row['cores']} cores, {threads}")
    if more := len(environment["ranks"][MOST_RANKS:]):
        lines.append(f"... and {count_of(more, 'more rank')}")
    for text in dict.fromkeys(environment["topologies"]):
        lines += text.splitlines()
    lines.append(UNITS)
    return "\n".join(f"# {line}" for line in lines)


def count_of(count: int, noun: str) -> str:
    """Return a count with its noun: `1 rank`, `1,024 ranks`."""
    return f"{count:,} {noun}{'s' * (count != 1)}"
