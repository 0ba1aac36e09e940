"""How a process joins the job: the launcher's environment, device, rendezvous, interface, cores."""

import atexit
import contextlib
import gc
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


def join(device: str, backend: str | None, timeout_s: float, bind_cores: bool = False) -> Job:
    """Join the job, or be a world of one, and take a device: `cuda:LOCAL_RANK` by what is visible,
    or the CPU. Ends the run where not all ranks arrive within `timeout_s`."""
    rank, local_rank, world_size, local_world_size = world()
    count = torch.cuda.device_count()
    if device == "cuda" and not count:
        refuse("--device cuda: torch sees no CUDA device here; try --device cpu")
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if device == "auto" and accelerator and accelerator.type != "cuda":
        refuse(f"torch sees {accelerator.type}; measured today are CUDA and CPUs: try --device cpu")
    cuda = device != "cpu" and count > 0
    backend = backend or ("nccl" if cuda else "gloo")
    if backend == "nccl" and not cuda:
        refuse("--backend nccl needs CUDA devices, this run is on the CPU; try --backend gloo")
    if not dist.is_backend_available(backend):
        refuse(f"--backend {backend}: this torch was built without it; try --backend gloo")
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
        handle, os.environ["NCCL_DEBUG_FILE"] = tempfile.mkstemp(prefix="nccl-", suffix=".log")
        os.close(handle)
        atexit.register(Path(os.environ["NCCL_DEBUG_FILE"]).unlink, missing_ok=True)
    store = dist.HashStore() if world_size == 1 else meet(rank, world_size, timeout_s)
    # gloo and TensorPipe would take the address of the host's name, on Debian 127.0.1.1
    interface = "lo" if local_world_size == world_size else find_interface(store, world_size)
    for name in ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME") if interface else ():
        os.environ.setdefault(name, interface)
    own: Any = dict(store=dist.PrefixStore("control", store), rank=rank, world_size=world_size)
    dist.init_process_group("gloo", timeout=FOREVER, **own)
    gc.freeze()  # what was imported is no garbage: collections between cases need not look at it
    atexit.register(gc.unfreeze)  # or nanobind reports leaks at the end
    return Job(rank, local_rank, world_size, local_world_size, place, backend, store)


def world() -> tuple[int, ...]:
    """(rank, local rank, world size, local world size) as the launcher set them."""
    # srun and mpirun start N processes that each take themselves for rank 0 of 1
    single = "RANK" not in os.environ or os.environ.get("GROUP_WORLD_SIZE") == "1"
    for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "FLUX_JOB_SIZE"):
        if single and (tasks := os.environ.get(name, "1")) != "1":
            ranks = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "FLUX_TASK_RANK")
            # of all these worlds the first one speaks
            os.environ["RANK"] = max(os.environ.get(rank, "0") for rank in ranks)
            refuse(
                f"{name} says {tasks} tasks, but each would run by itself; start them with "
                "launch/slurm_torchrun.sbatch (torchrun on each node, one job), "
                "launch/slurm_srun.sbatch (a task a rank) or launch/mpi_env.sh (mpirun, flux)"
            )
    defaults = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1}
    return tuple(int(os.environ.get(name, default)) for name, default in defaults.items())


def meet(rank: int, world_size: int, timeout_s: float) -> dist.Store:
    """The store in which all ranks have met."""
    here, address = socket.gethostname(), os.environ.get("MASTER_ADDR", "")
    port = int(os.environ.get("MASTER_PORT", "0"))
    served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # by torchrun's agent
    own, end = rank == 0 and not served, time.monotonic() + timeout_s
    try:
        tcp = dist.TCPStore(address, port, None, own, timedelta(seconds=timeout_s), False)
    except RuntimeError as error:
        if os.environ.get("LOCAL_RANK", "0") == "0":
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
        if time.monotonic() > end + (10 if rank else 0):  # rank 0 speaks first
            if rank == 0:
                late = [str(r) for r, key in enumerate(everyone) if not store.check([key])]
                print(f"HANG: no sign of rank {', '.join(late)} in {timeout_s:g} s", flush=True)
            raise SystemExit(HANG)
        time.sleep(0.05)
    if rank == 0:
        store.set("all here", "")
    return store


def find_interface(store: dist.Store, world_size: int) -> str:
    """The one that leads to the master; on the master's own node, where it may be loopback, the
    one that leads to a peer."""
    own = address_towards(os.environ["MASTER_ADDR"])
    if own.startswith("127."):
        rows = [json.loads(store.get(f"here/{r}")) for r in range(world_size)]
        others = (address_towards(a) for host, a in rows if host != socket.gethostname() and a)
        own = next(others, own)
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == own for entry in entries):
            return name
    return "lo" if own.startswith("127.") else ""


def address_towards(host: str) -> str:
    """The own IPv4 address on the way to a host; nothing where there is none."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing: it chooses the route
        return str(probe.getsockname()[0])
    return ""


def bind(local_rank: int, local_world_size: int, device: torch.device) -> None:
    """Bind this process to its share of the cores; on CUDA of those next to its GPU."""
    allowed = sorted(os.sched_getaffinity(0))

    def cores_of(rank: int) -> list[int]:
        near = 0  # a bit for each core
        if device.type == "cuda":
            p: Any = torch.cuda.get_device_properties(rank % torch.cuda.device_count())
            place = f"{p.pci_domain_id:04x}:{p.pci_bus_id:02x}:{p.pci_device_id:02x}.0"
            mask = Path(f"/sys/bus/pci/devices/{place}/local_cpus")
            near = int(mask.read_text().replace(",", ""), 16) if mask.exists() else 0
        return [core for core in allowed if near >> core & 1] or allowed

    mine = cores_of(local_rank)
    fellows = [rank for rank in range(local_world_size) if cores_of(rank) == mine]
    share = len(mine) // len(fellows)
    if not share:
        fewer = f"start fewer ranks a node, e.g. --nproc-per-node {len(mine)}"
        refuse(f"--bind-cores: {len(mine)} cores for {len(fellows)} ranks; {fewer}")
    first = fellows.index(local_rank) * share
    os.sched_setaffinity(0, mine[first : first + share])
