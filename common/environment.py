"""What the numbers were measured on, whether ranks and nodes fit together, and who else uses the
cores."""

import hashlib
import json
import os
import platform
import re
import socket
import subprocess
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import torch

from common.cli import TURN, cut, version
from common.cpu_load import BUSY, CpuLoad, Others
from common.groups import Job, gather, peers, share
from common.join import ERROR_HANDLING, torchrun_set_error_handling
from common.report import FAMILIES, shown, without_secrets

# These of the FAMILIES tell nothing.
PER_RUN = (
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "NCCL_DEBUG_FILE", TURN),
    "TORCH_CPP_LOG_LEVEL",
)
UNITS = "units: 64K, 4M, MiB and GiB count by 1,024; MB/s and GB/s by 1,000"
MOST_RANKS = 64  # the preamble prints no more of them
UNCORRECTED = "ecc.errors.uncorrected.volatile.total"
GPU_STATE = (  # what nvidia-smi is asked about each GPU, beside its index
    f"uuid,name,driver_version,mig.mode.current,ecc.mode.current,{UNCORRECTED},"
    "power.limit,clocks.max.sm,temperature.gpu,clocks_event_reasons.active"
)
# Variables that should be the same on all ranks begin with one of these, ...
ON_ALL_RANKS = (
    *("NCCL_", "RCCL_", "TORCH_", "OMP_", "GLOO_", "UCX_", "FI_", "MLX5_", "HSA_", "LD_PRELOAD"),
)
# ... except those that differ by design: devices, network cards, and threads (each rank's number
# of threads is compared instead)
BY_DESIGN = re.compile(
    r".*(_VISIBLE_DEVICES|_HCA|_NET_DEVICES)|NCCL_HOSTID"
    r"|OMP_(NUM_THREADS|PLACES|PROC_BIND|.*AFFINITY.*)"
)
OF_NODES = ("device", "cpu", "kernel", "cores", "topology")  # the same on all nodes
OF_GPUS = (
    *("name", "driver_version", "power.limit", "clocks.max.sm"),
    *("ecc.mode.current", "mig.mode.current"),
)
MOST_SETS = 64  # of variables, of which the values are gathered
MOST_LINES = 16  # of a kind
HELD_GIB = 1.0  # of a GPU's memory: more than a driver holds by itself


def user_variables() -> dict[str, str]:
    """The variables that the user and the launcher have set. Call it before join(), which sets more
    of them."""
    told_apart_by = (*FAMILIES, "SLURM_JOB_")
    names = sorted(name for name in os.environ if name.startswith(told_apart_by))
    variables = {name: os.environ[name] for name in names if name not in PER_RUN}
    if torchrun_set_error_handling():
        del variables[ERROR_HANDLING]
    return without_secrets(variables)


def others_text(hosts: Sequence[str], loads: Sequence[Others]) -> str:
    """The nodes whose cores other processes used; "" if none. loads: of each node."""
    busy = [
        f"{load.busy:.1f} of {load.cores} cores of {host}"
        for host, load in zip(hosts, loads, strict=False)  # a dry run has no loads
        if load.fraction > BUSY
    ]
    return f"other processes used {cut(busy, 3)}" if busy else ""


def collect(
    job: Job,
    variables: dict[str, str],
    load: CpuLoad | None = None,
    contents: dict[str, str] | None = None,
    memory_held: dict[str, str] | None = None,
) -> dict[str, Any]:
    """On rank 0 the report's environment; empty on the others. All ranks call it.

    variables: what `user_variables` returned before this process joined the job. load: measures CPU
    use by other processes on this node, on its first rank. contents: the hashes of the files, which
    `join` has found to be the same on all ranks. memory_held: what `gpu_memory` returned before
    this process joined, on the first rank of its node.
    """
    mine = {n: v for n, v in variables.items() if is_compared(n)}
    # with RPC some ranks may be on the CPU, the first one of a node among them
    gathered = gather((job.device.type, hash_of(mine)))
    cuda, hashes, speakers = False, list[str](), list[int]()
    if gathered:
        cuda = "cuda" in [device for device, _ in gathered]
        hashes = [digest for _, digest in gathered]
        speakers = speakers_of(hashes)
    cuda, speakers = share((cuda, speakers))
    if job.rank in speakers:
        with peers():
            job.store.set(f"variables/{job.rank}", json.dumps(mine))
    node = None  # the first rank of a node describes it
    if job.local_rank == 0:
        others = load.of_others() if load else None
        gpus = gpu_state() if cuda else []
        for gpu in gpus:
            gpu["memory.used"] = (memory_held or {}).get(gpu["uuid"], "")
        node = {"topology": topology(cuda), "gpus": gpus, "others": others}
        node |= {"cpu": cpu_model(), "kernel": platform.release()}
    rows = gather((describe_rank(job), node))
    if rows is None:
        return {}
    ranks = [rank for rank, _ in rows]
    nodes = [rank | node for rank, node in rows if node]
    with peers():
        values = {rank: json.loads(job.store.get(f"variables/{rank}")) for rank in speakers}
    sets = other_variables(hashes, values)
    hosts_of_ranks = [rank["host"] for rank in ranks]
    counts = [len(node["gpus"]) for node in nodes]
    for node in nodes:
        node["gpus"] = used_gpus(node["gpus"], ranks)
    return {
        "version": version(),
        "contents": contents or {},
        "torch": torch.__version__,
        "cuda": torch.version.cuda if cuda else None,
        "nccl": max(rank["nccl"] for rank in ranks) or None,  # "" on the CPU
        "torchvision": installed("torchvision"),
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
        "others": [node["others"] for node in nodes if node["others"]],
        "ranks": ranks,
        "differences": variable_lines(sets, values, hosts_of_ranks) + differences(nodes, ranks),
        "variables": variables,
        "other_variables": sets,
    }


def is_compared(variable: str) -> bool:
    """Whether a variable should have the same value on all ranks."""
    return variable.startswith(ON_ALL_RANKS) and not BY_DESIGN.fullmatch(variable)


def hash_of(variables: dict[str, str]) -> str:
    return hashlib.sha256(json.dumps(variables, sort_keys=True).encode()).hexdigest()[:16]


def speakers_of(hashes: Sequence[str]) -> list[int]:
    """The ranks that send their variables: the first rank of each set, at most MOST_SETS. The most
    common set comes first, of equally common ones rank 0's. [] if all ranks have the same set.

    hashes: of the variables of each rank.
    """
    usual, *others = [digest for digest, _ in Counter(hashes).most_common()]
    return [hashes.index(digest) for digest in [usual, *others[:MOST_SETS]]] if others else []


def other_variables(
    hashes: Sequence[str], values: dict[int, dict[str, str]]
) -> list[dict[str, Any]]:
    """The sets of variables that are not the most common one: the ranks that have them, and each
    variable that differs, null where it is not set.

    hashes: of the variables of each rank. values: the variables of the speakers, as `speakers_of`
    lists them.
    """
    sets = []
    speakers = list(values)
    for speaker in speakers[1:]:
        usual, mine = values[speakers[0]], values[speaker]
        names = sorted(name for name in usual | mine if usual.get(name) != mine.get(name))
        ranks = [rank for rank, digest in enumerate(hashes) if digest == hashes[speaker]]
        sets.append({"ranks": ranks, "variables": {name: mine.get(name) for name in names}})
    return sets


def variable_lines(
    sets: Sequence[dict[str, Any]], values: dict[int, dict[str, str]], hosts: Sequence[str]
) -> list[str]:
    """A line for each host with ranks whose variables differ from those of the most common set.

    sets: as `other_variables` returns them. hosts: of each rank.
    """
    if not sets:
        return []
    first = next(iter(values))  # a rank with the most common set
    ranks_of: dict[str, list[int]] = {}
    texts_of: dict[str, dict[str, None]] = {}  # by host: names, each with its values
    names_of: dict[str, dict[str, None]] = {}
    for row in sets:
        for host in dict.fromkeys(hosts[rank] for rank in row["ranks"]):
            ranks_of.setdefault(host, []).extend(r for r in row["ranks"] if hosts[r] == host)
            for name, value in row["variables"].items():
                usual = shown(values[first].get(name))
                text = f"{name} {shown(value)} (rank {first}: {usual})"
                texts_of.setdefault(host, {})[text] = None
                names_of.setdefault(host, {})[name] = None
    lines = []
    for host, ranks in ranks_of.items():
        *names, last = names_of[host]
        what = f"{', '.join(names)} and {last}" if names else last
        verb = "are not those" if names else "is not that"
        noun = "rank" if len(ranks) == 1 else "ranks"
        values_text = cut(list(texts_of[host]), 16)
        lines.append(
            f"{what} of {noun} {cut(sorted(ranks))} {verb} of rank {first}: on {host} {values_text}"
        )
    return bounded(lines, "hosts with other variables")


def bounded(lines: list[str], noun: str) -> list[str]:
    """The first lines, and how many more there are."""
    more = len(lines) - MOST_LINES
    return [*lines[:MOST_LINES], f"... and {more:,} more {noun}"] if more > 0 else lines


def installed(package: str) -> str | None:
    """The version of an installed package; None if it is not installed."""
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return None


def node_of_each(environment: dict[str, Any]) -> list[int]:
    """The node of each rank, from 0. A host may run several: there local ranks start anew."""
    seen: Counter[tuple[str, int]] = Counter()
    nodes: list[tuple[str, int]] = []
    for row in environment["ranks"]:
        seen[row["host"], row["local_rank"]] += 1
        nodes.append((row["host"], seen[row["host"], row["local_rank"]]))
    numbers = {node: number for number, node in enumerate(dict.fromkeys(nodes))}
    return [numbers[node] for node in nodes]


def node_names(environment: dict[str, Any]) -> list[str]:
    """The name of each node: that of its host, and with its number if nodes share a host:
    `vm (node 1)`."""
    hosts = environment["hosts"]
    return [
        host if hosts.count(host) == 1 else f"{host} (node {number})"
        for number, host in enumerate(hosts)
    ]


def rank_names(environment: dict[str, Any]) -> list[str]:
    """The name of each rank: `rank 3 on vm`."""
    nodes = node_names(environment)
    of_rank = node_of_each(environment)
    return [f"rank {rank} on {nodes[node]}" for rank, node in enumerate(of_rank)]


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


def run(command: list[str]) -> str:
    """The output of a command; "" where the command is missing, slow or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def gpu_state(query: str = GPU_STATE) -> list[dict[str, str]]:
    """What nvidia-smi says about each GPU of this node, its `index` first: rows of two questions
    belong together by it. [] where it says nothing."""
    fields = ["index", *query.split(",")]
    text = run(["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"])
    rows = [line.split(", ") for line in text.splitlines()]
    return [dict(zip(fields, row, strict=True)) for row in rows if len(row) == len(fields)]


def gpu_memory() -> dict[str, str]:
    """The memory in use of each GPU of this node, such as `4 MiB`, by UUID. Call it before any rank
    of the node calls CUDA: then other processes hold it."""
    return {gpu["uuid"]: gpu["memory.used"] for gpu in gpu_state("uuid,memory.used")}


def used_gpus(gpus: list[dict[str, str]], ranks: list[dict[str, Any]]) -> list[dict[str, str]]:
    """The GPUs of a node that ranks of the job use, by UUID: nvidia-smi also shows those of other
    jobs. A GPU in MIG mode is kept: torch reports the UUID of the instance, nvidia-smi the GPU's.

    gpus: as `gpu_state` returns them. ranks: rows of `describe_rank`, also of other nodes.
    """
    used = {row["uuid"] for row in ranks}
    return [
        gpu for gpu in gpus if bare(gpu["uuid"]) in used or gpu["mig.mode.current"] == "Enabled"
    ]


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


def differences(nodes: list[dict[str, Any]], ranks: list[dict[str, Any]]) -> list[str]:
    """A line for each node that differs from most of the others, with both values of each property.

    nodes: of each node its host, OF_NODES, and its `gpus` as `gpu_state` returns them. ranks: of
    each rank its node's host, its local rank, and its threads.
    """
    lines = []
    usual_threads = most_common(row["threads"] for row in ranks)
    other_threads: dict[int, list[dict[str, Any]]] = {}  # by node: ranks with another number
    for row, number in zip(ranks, node_of_each({"ranks": ranks}), strict=True):
        if row["threads"] != usual_threads:
            other_threads.setdefault(number, []).append(row)
    usual_of = {name: most_common(node[name] for node in nodes) for name in OF_NODES}
    gpus = [gpu for node in nodes for gpu in node["gpus"]]
    usual_gpu = {name: most_common(gpu[name] for gpu in gpus) for name in OF_GPUS}
    for number, node in enumerate(nodes):
        parts = []
        for name, usual in usual_of.items():
            if node[name] != usual:
                values = "" if name == "topology" else f" {node[name]} ({usual} elsewhere)"
                parts.append(f"{name}{values}")
        for name, usual in usual_gpu.items():
            odd = [gpu for gpu in node["gpus"] if gpu[name] != usual]
            if odd:
                got = cut(list(dict.fromkeys(gpu[name] for gpu in odd)))
                where = f"GPU {cut([gpu['index'] for gpu in odd])}"
                if len(odd) == len(node["gpus"]):
                    where = "its GPUs"
                what = name.replace("_", " ").replace(".", " ")
                parts.append(f"{what} of {where} {got} ({usual} elsewhere)")
        if odd_ranks := other_threads.get(number):
            who = cut([row["rank"] for row in odd_ranks])
            got = cut(list(dict.fromkeys(row["threads"] for row in odd_ranks)))
            parts.append(f"threads of rank {who}: {got} ({usual_threads} elsewhere)")
        if parts:
            lines.append(f"{node['host']} differs: {'; '.join(parts)}")
    return bounded(lines, "nodes that differ")


def most_common(values: Iterable[Any]) -> Any:
    """The most common value, of equally common ones the first; None if there is none."""
    counts = Counter(values).most_common(1)
    return counts[0][0] if counts else None


def occupied(environment: dict[str, Any]) -> dict[int, str]:
    """The nodes on which other processes held memory of our ranks' GPUs before the run -> the
    amounts. What a driver holds by itself, up to HELD_GIB, does not count."""
    ours: dict[int, set[str]] = {}
    for row, node in zip(environment["ranks"], node_of_each(environment), strict=True):
        if row["uuid"]:
            ours.setdefault(node, set()).add(bare(row["uuid"]))
    held = {}
    for node, gpus in enumerate(environment["gpus"]):
        parts = []
        for gpu in gpus:
            number, _, unit = gpu.get("memory.used", "").partition(" ")
            gib = int(number) / 1024 if number.isdigit() and unit == "MiB" else 0.0
            if bare(gpu["uuid"]) in ours.get(node, ()) and gib > HELD_GIB:
                parts.append(f"{gib:.1f} GiB of GPU {gpu['index']}")
        if parts:
            held[node] = f"other processes already held {cut(parts)}"
    return held


def bare(uuid: str) -> str:
    """torch's UUIDs lack the prefix of nvidia-smi's."""
    return uuid.removeprefix("GPU-")


def lacking(environment: dict[str, Any], wanted: int | None = None) -> dict[int, str]:
    """The nodes with broken memory or with too few GPUs -> why.

    wanted: how many GPUs a node should have; by default as many as the node with the most.
    """
    counts = environment["gpu_counts"]
    wanted = wanted or max(counts)
    why = {}
    for node, (gpus, count) in enumerate(zip(environment["gpus"], counts, strict=True)):
        # strip: the count may also be "[N/A]"
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


def sharing(environment: dict[str, Any], tested: range | None = None) -> str | None:
    """`ranks 0 and 1 share a GPU on host`; None where each rank has a GPU of its own.

    tested: look only at these ranks.
    """
    owners: dict[tuple[str, str], int] = {}
    for row in environment["ranks"]:
        if row["uuid"] and (tested is None or row["rank"] in tested):
            other = owners.setdefault((row["host"], row["uuid"]), row["rank"])
            if other != row["rank"]:
                return f"ranks {other} and {row['rank']} share a GPU on {row['host']}"
    return None


def sharers(environment: dict[str, Any], rank: int) -> int:
    """How many ranks use the GPU of this rank, itself included; 1 where it is on the CPU.

    The UUIDs tell: torch's device count is 1 on all ranks where each sees only its own GPU.
    """
    places = [(row["host"], row["uuid"]) for row in environment["ranks"]]
    return places.count(places[rank]) if places[rank][1] else 1


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
        f"{ranks} on {nodes}",
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
    lines += [f"warning: {warning}" for warning in warnings_of(environment)]
    return "\n".join(f"# {line}" for line in lines)


def count_of(count: int, noun: str) -> str:
    """`1 rank`, `1,024 ranks`."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def warnings_of(environment: dict[str, Any]) -> list[str]:
    """What makes the numbers doubtful, a line each: ranks and nodes that differ, CPU use by other
    processes, GPUs that ranks share or that other processes use."""
    warnings = list(environment["differences"])
    if busy := others_text(environment["hosts"], environment["others"]):
        warnings.append(f"{busy}: times will scatter")
    if shared := sharing(environment):
        warnings.append(f"{shared}: their times include each other's turns")
    names = node_names(environment)
    held = [f"{names[node]}: {why}" for node, why in occupied(environment).items()]
    return warnings + bounded(held, "nodes with memory in use")
