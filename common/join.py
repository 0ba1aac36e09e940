"""How a process joins the job: the launcher's environment, device, rendezvous, interface, cores."""

import atexit
import contextlib
import json
import os
import socket
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from common.cli import HANG, refuse
from common.dist import FOREVER, Job


def join(
    device: str,
    backend: str | None,
    timeout_s: float,
    bind_cores: bool = False,
    tested: range | None = None,
) -> Job:
    """Join the job and take a device: `cuda:LOCAL_RANK` by what is visible, or the CPU.

    tested: the ranks that the groups under test may hold; None for all of them.

    Without torchrun this is a world of one. Ends the run, in one line, where the launcher's
    environment does not make one job, or where not all ranks arrive within `timeout_s`.
    """
    rank, local_rank, world_size, local_world_size = world()
    count = torch.cuda.device_count()
    if device == "cuda" and not count:
        refuse("--device cuda: torch sees no CUDA device here; try --device cpu")
    cuda = device != "cpu" and count > 0
    backend = backend or ("nccl" if cuda else "gloo")
    if backend == "nccl" and not cuda:
        refuse("--backend nccl needs CUDA devices, this run is on the CPU; try --backend gloo")
    if not dist.is_backend_available(backend):
        refuse(f"--backend {backend}: this torch was built without it; try --backend gloo")
    local = range(rank - local_rank, rank - local_rank + local_world_size)
    members = len(local if tested is None else set(local) & set(tested))
    if backend == "nccl" and 1 < count < members:
        refuse(
            f"nccl needs a device for each rank: {members} ranks on {socket.gethostname()}, "
            f"{count} devices; try --nproc-per-node {count}, or --backend gloo to share them",
            node=True,
        )
    place = torch.device("cuda", local_rank % count) if cuda else torch.device("cpu")
    if bind_cores:
        bind(local_rank, local_world_size, place)
    if cuda:
        torch.cuda.set_device(place)
    # the watchdog ends a hang; NCCL's own would end the process a minute after a failed case
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"  # torchrun sets 1
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # the flight recorder: who is where
    if cuda and local_rank == 0 and "NCCL_DEBUG" not in os.environ:
        # which network and transport it takes; it says so when it connects, not while it is timed
        os.environ["NCCL_DEBUG"], os.environ["NCCL_DEBUG_SUBSYS"] = "INFO", "INIT,NET,P2P,SHM"
        handle, log = tempfile.mkstemp(prefix="nccl-", suffix=".log")
        os.close(handle)
        os.environ["NCCL_DEBUG_FILE"] = log
        atexit.register(Path(log).unlink, missing_ok=True)
    store = meet(rank, world_size, local_rank, local_world_size, timeout_s)
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore("control", store),
        rank=rank,
        world_size=world_size,
        timeout=FOREVER,
    )
    return Job(rank, local_rank, world_size, local_world_size, place, backend, store)


def world() -> tuple[int, int, int, int]:
    """(rank, local rank, world size, local world size) as the launcher set them."""
    # srun and mpirun start N processes that each take themselves for rank 0 of 1
    for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        tasks = os.environ.get(name, "1")
        single = "RANK" not in os.environ or os.environ.get("GROUP_WORLD_SIZE") == "1"
        if tasks != "1" and single:
            if os.environ.get("RANK", "0") == "0":  # of all these worlds the first one speaks
                tellers = ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
                os.environ["RANK"] = next((os.environ[n] for n in tellers if n in os.environ), "0")
            refuse(
                f"{name} says {tasks} tasks, but each would run by itself; start them with "
                "launch/slurm_torchrun.sbatch (torchrun on each node, one job) or "
                "launch/slurm_srun.sbatch (a task a rank), or without srun or mpirun"
            )
    names = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1}
    given = [name for name in names if name in os.environ]
    if given and len(given) < len(names):
        missing = ", ".join(name for name in names if name not in given)
        refuse(f"{given[0]} is set, but not {missing}; torchrun sets all four")
    try:
        rank, local_rank, size, local = (int(os.environ.get(n, d)) for n, d in names.items())
    except ValueError as error:
        refuse(f"RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE must be numbers: {error}")
    if not (0 <= rank < size and 0 <= local_rank < local <= size):
        refuse(f"rank {rank} of {size}, local rank {local_rank} of {local}: no such rank")
    return rank, local_rank, size, local


def meet(
    rank: int, world_size: int, local_rank: int, local_world_size: int, timeout_s: float
) -> dist.Store:
    """The store in which all ranks have met; GLOO_ and TP_SOCKET_IFNAME are set after it."""
    if world_size == 1:
        set_interface("lo")
        return dist.HashStore()
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not (address and port.isdigit()):
        refuse("MASTER_ADDR and MASTER_PORT must name where rank 0 is; torchrun sets them")
    here = socket.gethostname()
    served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # by torchrun's agent
    start = time.monotonic()
    try:
        tcp = dist.TCPStore(
            address,
            int(port),
            is_master=rank == 0 and not served,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
        )
    except RuntimeError as error:
        if local_rank == 0:
            reason = str(error).splitlines()[0]
            print(f"{here} cannot reach MASTER_ADDR {address}:{port}: {reason}", flush=True)
        raise SystemExit(HANG) from None
    # torchrun's store outlives a restart of the ranks; without a prefix of their own the new ones
    # would dial the ports of the dead (pytorch/pytorch#135712)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"torchrun-bench/{attempt}", tcp)
    store.set(f"here/{rank}", json.dumps([here, address_towards(address)]))
    everyone = [f"here/{r}" for r in range(world_size)]
    while not store.check(["all here"] if rank else everyone):
        if time.monotonic() - start > timeout_s + (10 if rank else 0):
            if rank == 0:
                late = [str(r) for r, key in enumerate(everyone) if not store.check([key])]
                names = ", ".join(late[:16]) + (", ..." if late[16:] else "")
                print(f"HANG: no sign of rank {names} in {timeout_s:g} s", flush=True)
            raise SystemExit(HANG)
        time.sleep(0.05)
    if rank == 0:
        store.set("all here", "")
    if local_world_size == world_size:
        set_interface("lo")
        return store
    # the way to the master; on the master's own node that may be loopback: the way to a peer
    own = address_towards(address)
    if own.startswith("127."):
        others = (json.loads(store.get(key)) for key in everyone[::local_world_size])
        own = next((address_towards(a) for host, a in others if host != here and a), own)
    set_interface(interface_of(own))
    return store


def address_towards(host: str) -> str:
    """The own IPv4 address on the way to a host; nothing where there is none."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing: it chooses the route
        return str(probe.getsockname()[0])
    return ""


def interface_of(address: str) -> str:
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in entries):
            return name
    return "lo" if address.startswith("127.") else ""


def set_interface(name: str) -> None:
    """gloo and TensorPipe would take the address of the host's name, on Debian 127.0.1.1."""
    if name:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        os.environ.setdefault("TP_SOCKET_IFNAME", name)


def bind(local_rank: int, local_world_size: int, device: torch.device) -> None:
    """Bind this process to its share of the cores; on CUDA of those next to its GPU."""

    def cores_of(rank: int) -> list[int]:
        allowed = sorted(os.sched_getaffinity(0))
        if device.type != "cuda":
            return allowed
        p: Any = torch.cuda.get_device_properties(rank % torch.cuda.device_count())
        place = f"{p.pci_domain_id:04x}:{p.pci_bus_id:02x}:{p.pci_device_id:02x}.0"
        near = Path(f"/sys/bus/pci/devices/{place}/local_cpulist")
        spans = near.read_text().strip().split(",") if near.exists() else []
        ends = [(int(span.split("-")[0]), int(span.split("-")[-1])) for span in spans if span]
        return [c for c in allowed if any(a <= c <= b for a, b in ends)] or allowed

    mine = cores_of(local_rank)
    fellows = [rank for rank in range(local_world_size) if cores_of(rank) == mine]
    share = len(mine) // len(fellows)
    if not share:
        refuse(
            f"--bind-cores: {len(mine)} cores for {len(fellows)} ranks; start fewer ranks a node, "
            f"e.g. --nproc-per-node {len(mine)}"
        )
    first = fellows.index(local_rank) * share
    os.sched_setaffinity(0, mine[first : first + share])
