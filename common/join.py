"""How a process joins the job: the launcher's environment, device, rendezvous, interface, cores."""

import atexit
import contextlib
import ctypes
import gc
import ipaddress
import json
import os
import re
import resource
import shlex
import socket
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import psutil
import torch
import torch.distributed as dist

from common.cli import HANG, backends_of, cut, refuse, shared_words, tell_torchrun
from common.groups import FOREVER, Job, local_rank

LOOPBACK = "127.0.0.1"
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's mallopt, in bytes
SYS = Path("/sys")  # what Linux says of cores and PCI devices
TORCH_WAITS = 4  # times --timeout, until torch's own guard ends a group under test
ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
SETTINGS = {  # of torch's NCCL, unless the user has set them; docs/gpus.md lists them
    # Our watchdog ends a hang. NCCL's own would end the process a minute after a failed case.
    ERROR_HANDLING: "0",
    # NCCL's watchdog would wait four times this long for other ranks' dumps after a failed case
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
    # A lost device ends the run with a reason. If NCCL's watchdog saw it first, it would abort.
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
}
BY_HAND = (
    "without torchrun e.g. RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=2 "
    "MASTER_ADDR=127.0.0.1 MASTER_PORT=29500"
)


def join(
    device: str,
    backend: str | None,
    timeout_s: float,
    bind_cores: bool = False,
    dry_run: bool = False,
) -> Job:
    """Join the job, or be a world of one, and take a device: the CPU, or `cuda:LOCAL_RANK` among
    the GPUs that are visible. Ends the run if not all ranks arrive within `timeout_s`.

    device: --device. backend: --backend, one or several; None for the device's usual one. dry_run:
    rank 0 meets nobody. Its control group has no other rank, whatever the world size.
    """
    rank, on_node, world_size, local_world_size = world()
    ranks_to_meet = 1 if dry_run else world_size
    check_network(ranks_to_meet)
    check_file_limit(ranks_to_meet)
    chosen = choose_device(device, on_node)
    cuda = chosen.type == "cuda"
    backend = backend or ("nccl" if cuda else "gloo")
    for name in backends_of(backend):
        check_backend(name, cuda)
    if bind_cores:
        bind(on_node, local_world_size, chosen)
    if cuda:
        torch.cuda.set_device(chosen)
    set_variables()
    if ranks_to_meet == 1:
        store: dist.Store = dist.HashStore()
        second_store = store.clone()
    else:
        on_loopback = meets_on_loopback(world_size, local_world_size)
        store, second_store = meet(rank, world_size, timeout_s, on_loopback)
    # By themselves gloo and TensorPipe take the address of the host's name: on Debian 127.0.1.1.
    one_node = ranks_to_meet in (1, local_world_size)
    interface = "lo" if one_node else find_interface(store, world_size)
    if interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("TP_SOCKET_IFNAME", interface)
    keeps_memory = keep_freed_memory()
    control = dist.PrefixStore("control", store)
    dist.init_process_group(
        "gloo", store=control, rank=rank, world_size=ranks_to_meet, timeout=FOREVER
    )
    # imported modules are never garbage: collections between cases need not walk through them
    gc.freeze()
    atexit.register(gc.unfreeze)  # otherwise nanobind reports leaks at the end
    guard = min(FOREVER, TORCH_WAITS * timedelta(seconds=timeout_s))
    return Job(
        rank=rank,
        local_rank=on_node,
        world_size=world_size,
        local_world_size=local_world_size,
        device=chosen,
        backend=backend,
        store=store,
        second_store=second_store,
        timeout=guard,
        keeps_memory=keeps_memory,
    )


def choose_device(wanted: str, on_node: int) -> torch.device:
    """The GPU of this rank, or the CPU. wanted: --device. on_node: its number on its node."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if wanted == "auto" and accelerator and accelerator.type != "cuda":
        refuse(f"torch sees {accelerator.type}; measured today are CUDA and CPUs: try --device cpu")
    count = torch.cuda.device_count()
    if wanted == "cuda" and not count:
        refuse("--device cuda: torch sees no CUDA device here; try --device cpu")
    if wanted == "cpu" or not count:
        return torch.device("cpu")
    return torch.device("cuda", on_node % count)


def keep_freed_memory() -> bool:
    """Tell glibc to keep the memory that the process frees. Returns whether it does so.

    By itself glibc gives memory back to the system after each step, until the heap has grown. So
    the first case of a process was 6 to 13 % slower on the CPU than the same step later
    (docs/measuring.md). Where the user has set malloc by variables, it stays so.
    """
    libc = ctypes.CDLL(None)
    users = any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ)
    if users or not hasattr(libc, "mallopt"):  # musl has none
        return False
    # the largest values that it takes: nothing is given back, blocks up to 32 MiB are kept
    kept = [libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1), libc.mallopt(M_MMAP_THRESHOLD, 2**25)]
    return all(kept)


def set_variables() -> None:
    """Set what torch's NCCL reads when the first group is made. What the user has set stays."""
    if torchrun_set_error_handling():
        del os.environ[ERROR_HANDLING]
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)


def torchrun_set_error_handling() -> bool:
    """Whether that variable is torchrun's: it sets 1 where the user has set nothing."""
    return "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get(ERROR_HANDLING) == "1"


def check_backend(backend: str, cuda: bool) -> None:
    """Refuse a backend that cannot work here. A name may list devices: cpu:gloo,cuda:nccl."""
    if "nccl" in backend and not cuda:  # nccl2, nccl-legacy and nccl-lazy as well
        refuse(f"--backend {backend} needs CUDA devices, this run is on the CPU; try gloo")
    if "fake" in backend:
        refuse("--backend fake sends nothing, so there is nothing to measure; try gloo")
    try:
        available = dist.is_backend_available(backend)
    except ValueError:
        refuse(f"--backend: expected a name such as gloo or cpu:gloo,cuda:nccl, got '{backend}'")
    if not available:
        refuse(f"--backend {backend}: this torch was built without it; try gloo")


def world() -> tuple[int, int, int, int]:
    """(rank, its number on its node, world size, ranks of its node) as the launcher set them."""
    refuse_worlds_of_one()
    if not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"} & set(os.environ):
        return 0, 0, 1, 1  # started by python
    world_size = variable("WORLD_SIZE", 1)
    rank = variable("RANK", 0, world_size - 1)
    if not has_local_variables():
        return rank, rank, world_size, world_size  # `meet` checks that there is one node
    local_world_size = variable("LOCAL_WORLD_SIZE", 1, world_size)
    variable("LOCAL_RANK", 0, local_world_size - 1)
    return rank, local_rank(), world_size, local_world_size


def has_local_variables() -> bool:
    """False where RANK and WORLD_SIZE alone say which rank this is: then all are on one node."""
    return "LOCAL_RANK" in os.environ or "LOCAL_WORLD_SIZE" in os.environ


def refuse_worlds_of_one() -> None:
    """Refuse N processes that srun, mpirun or flux started without a wrapper: each would be rank 0
    of a world of 1."""
    if "RANK" in os.environ and os.environ.get("GROUP_WORLD_SIZE") != "1":
        return
    for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "FLUX_JOB_SIZE"):
        tasks = os.environ.get(name, "1")
        if tasks == "1":
            continue
        ranks = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "FLUX_TASK_RANK")
        # refuse() speaks on rank 0: that is the first of these processes
        os.environ["RANK"] = max(os.environ.get(rank, "0") for rank in ranks)
        refuse(
            f"{name} says {tasks} tasks, but each would run by itself; start them with "
            "launch/slurm_torchrun.sbatch (torchrun on each node, one job), "
            "launch/slurm_srun.sbatch (a task a rank) or launch/mpi_env.sh (mpirun, flux)"
        )


def variable(name: str, least: int, most: int = 2**31) -> int:
    """The whole number in a variable of the launcher. Refuses any other value."""
    text = os.environ.get(name)
    with contextlib.suppress(ValueError):
        if text is not None and least <= int(text) <= most:
            return int(text)
    limits = f"of at least {least}" if most == 2**31 else f"from {least} to {most}"
    refuse_here(name, f"expected a whole number {limits}", text)


def refuse_here(name: str, problem: str, text: str | None, example: str = BY_HAND) -> NoReturn:
    """Refuse the value of a variable. Each process speaks for itself: on other nodes the variable
    may be right."""
    os.environ["RANK"] = "0"  # so that refuse() speaks
    got = "but it is not set" if text is None else f"got {text!r}"
    refuse(f"{name} on {socket.gethostname()}: {problem}, {got}; {example}")


def check_network(world_size: int) -> None:
    """Refuse variables that would lead to a hang, or to a library's own words about them."""
    interfaces = set(psutil.net_if_addrs())
    for name in ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
        text = os.environ.get(name)
        if text and not interfaces.issuperset(text.split(",")):
            if local_rank() > 0:
                refuse(name)  # silently: the first rank of the node speaks
            known = f"expected one of {', '.join(sorted(interfaces))}"
            refuse_here(name, known, text, "e.g. as `ip -br address` shows them")
    lo = psutil.net_if_stats().get("lo")
    if lo and not lo.isup:
        if local_rank() > 0:
            refuse("lo")
        refuse_here("lo", "expected the loopback interface up", "down", "try ip link set lo up")
    if world_size == 1:
        return
    address = os.environ.get("MASTER_ADDR")
    try:
        socket.getaddrinfo(address or "no address", None)
    except (OSError, UnicodeError):
        refuse_here("MASTER_ADDR", "expected the name or address of rank 0's host", address)
    variable("MASTER_PORT", 1, 65535)


def check_file_limit(world_size: int) -> None:
    """Raise the soft limit on open files. Refuse one that is too low for any script.

    Counted with torch 2.15 on the CPU: rank 0 of 2, 4 and 6 ranks has 35, 75 and 55 open, where
    the 4 ranks have several sets of groups. Where torchrun's agent has the store, it has two fewer
    for each rank: 22 of 2 ranks, 28 of 4.
    """
    needed = 25 + (3 if agent_has_store() else 5) * world_size
    limit = raise_file_limit(64 + 16 * world_size)
    if limit < needed:
        if local_rank() > 0:
            refuse("ulimit")  # silently: the first rank of the node speaks
        example = f"raise the hard limit, e.g. ulimit -Hn {needed} as root"
        refuse_here("ulimit -n", f"expected at least {needed} open files", str(limit), example)


def raise_file_limit(needed: int) -> int:
    """Let this process open so many files, if the hard limit allows. Returns the limit it got."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return needed
    limit = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return limit


def meets_on_loopback(world_size: int, local_world_size: int) -> bool:
    """Whether all ranks are on this host for certain, before they have met."""
    if has_local_variables():
        return local_world_size == world_size
    found = socket.getaddrinfo(os.environ["MASTER_ADDR"], None)  # a name may lead there, too
    return all(ipaddress.ip_address(row[4][0]).is_loopback for row in found)


def agent_has_store() -> bool:
    """Whether torchrun's agent serves the store in which the ranks meet, not rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def listen_on_loopback(port: int) -> int:
    """The number of a socket for the store, which would listen on all interfaces by itself."""
    try:
        return socket.create_server((LOOPBACK, port)).detach()
    except OSError as error:
        why = os.strerror(error.errno or 0)
        refuse_here("MASTER_PORT", f"expected a free port ({why})", str(port))


def meet(
    rank: int, world_size: int, timeout_s: float, on_loopback: bool = False
) -> tuple[dist.Store, dist.Store]:
    """Two connections to the store in which all ranks have met. Refuses what does not fit together.

    Both are made while the ranks arrive one by one. The store looks up the name of each client, one
    after the other (pytorch/pytorch#159007). If all ranks connected at once, a name server might
    drop requests, and the store would serve nobody until they time out, 5 s each.
    """
    here, address = socket.gethostname(), os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    served = agent_has_store()
    is_master = rank == 0 and not served
    listener = None
    if on_loopback and not served:
        # also for the processes of checkpoint_sweep's async-process, which meet there, too
        address = os.environ["MASTER_ADDR"] = LOOPBACK
        listener = listen_on_loopback(port) if is_master else None
    end = time.monotonic() + timeout_s
    try:
        tcp = dist.TCPStore(
            address,
            port,
            is_master=is_master,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=listener,
        )
        second_tcp = tcp.clone()
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        if "EADDRINUSE" in reason:
            refuse_here("MASTER_PORT", "expected a free port (Address already in use)", str(port))
        name = "rank 0 on loopback" if on_loopback else "MASTER_ADDR"
        unreached = f"{here} cannot reach {name} {address}:{port}: {reason}"
        give_up(unreached, say=local_rank() == 0)
    # torchrun's store outlives a restart of the ranks. Without a prefix of their own the new ranks
    # would dial the ports of the dead ones (pytorch/pytorch#135712).
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    prefix = f"torchrun-bench/{attempt}"
    store = dist.PrefixStore(prefix, tcp)
    store.set(f"here/{rank}", json.dumps([here, address_towards(address), shared_words()]))
    if rank == 0:
        wait_for_all(store, world_size, end, timeout_s)
        store.set("all here", misfit(come(store, world_size)) or "")
    try:
        while not store.check(["all here"]):
            if time.monotonic() > end + 10:  # rank 0 speaks first
                give_up(f"HANG: not all ranks came within {timeout_s:g} s", say=False)
            time.sleep(0.05)
        if problem := store.get("all here").decode():
            say_no(store, rank, world_size, problem)
    except RuntimeError:  # rank 0 has ended, and the store with it
        lost = f"{here} lost rank 0 at {address}:{port} before all had met"
        give_up(lost, say=local_rank() == 0)
    return store, dist.PrefixStore(prefix, second_tcp)


def come(store: dist.Store, world_size: int) -> list[Any]:
    """What each rank has left in the store: its host, its address, its command line."""
    return [json.loads(text) for text in store.multi_get(signs_of(world_size))]


def misfit(rows: list[Any]) -> str | None:
    """Why these ranks cannot be one job; None if they can. rows: of `come`."""
    hosts = {f"{host} ({address})" for host, address, _ in rows}
    if not has_local_variables() and len(hosts) > 1:
        where = f"RANK and WORLD_SIZE alone are for one host, got {cut(sorted(hosts))}"
        return f"{where}; set LOCAL_RANK and LOCAL_WORLD_SIZE"
    first = rows[0][2]
    others = [rank for rank, (_, _, words) in enumerate(rows) if words != first]
    if others:
        got = f"got `{shlex.join(rows[others[0]][2])}` on rank {cut(others)}"
        return f"expected the same arguments on all ranks, {got}, `{shlex.join(first)}` on rank 0"
    return None


def say_no(store: dist.Store, rank: int, world_size: int, problem: str) -> NoReturn:
    """End the run on all ranks. Rank 0, which may hold the store, waits until they know of it."""
    store.set(f"told/{rank}", "")
    if rank == 0:
        with contextlib.suppress(RuntimeError):
            store.wait([f"told/{other}" for other in range(world_size)], timedelta(seconds=10))
    refuse(problem)


def signs_of(world_size: int) -> list[str]:
    return [f"here/{rank}" for rank in range(world_size)]


def wait_for_all(store: dist.Store, world_size: int, end: float, timeout_s: float) -> None:
    """Wait on rank 0 until all ranks have come. Ends the run at `end` and names who is missing."""
    signs = signs_of(world_size)
    while not store.check(signs):
        if time.monotonic() > end:
            missing = cut([rank for rank, sign in enumerate(signs) if not store.check([sign])])
            elsewhere = "; on several hosts set LOCAL_RANK and LOCAL_WORLD_SIZE"
            hint = "" if has_local_variables() else elsewhere
            give_up(f"HANG: no sign of rank {missing} in {timeout_s:g} s{hint}")
        time.sleep(0.05)


def give_up(reason: str, say: bool = True) -> NoReturn:
    """End the run because not all ranks meet. say: print why."""
    tell_torchrun(reason)
    if say:
        print(reason, flush=True)
    raise SystemExit(HANG) from None


def find_interface(store: dist.Store, world_size: int) -> str:
    """The interface that leads to the master. On the master's own node that may be loopback: there
    it is the one that leads to a rank on another node."""
    address = address_towards(os.environ["MASTER_ADDR"])
    if address.startswith("127."):
        rows = come(store, world_size)
        others = [other for host, other, _ in rows if host != socket.gethostname() and other]
        if others:
            address = address_towards(others[0])
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in entries):
            return name
    return "lo" if address.startswith("127.") else ""


def address_towards(host: str) -> str:
    """This host's IPv4 address on the way to another host; "" if there is no way."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing: it chooses the route
        return str(probe.getsockname()[0])
    return ""


def bind(local_rank: int, local_world_size: int, device: torch.device) -> None:
    """Bind this process to its part of the cores; on CUDA to a part of those next to its GPU."""

    def cores_of(rank: int) -> list[int]:
        gpus = torch.cuda.device_count() if device.type == "cuda" else 0
        return near_cores(rank % gpus if gpus else None)

    cores = cores_of(local_rank)
    sharers = [rank for rank in range(local_world_size) if cores_of(rank) == cores]
    cores_per_rank = len(cores) // len(sharers)
    if cores_per_rank == 0:
        fewer = f"start fewer ranks a node, e.g. --nproc-per-node {len(cores)}"
        refuse(f"--bind-cores: {len(cores)} cores for {len(sharers)} ranks; {fewer}")
    first = sharers.index(local_rank) * cores_per_rank
    os.sched_setaffinity(0, cores[first : first + cores_per_rank])


def near_cores(gpu: int | None) -> list[int]:
    """This process's cores next to a GPU; all of its cores without one, or if none is near.

    The threads of a core follow each other. Often Linux numbers them 0 and 112, not 0 and 1.
    """
    allowed = os.sched_getaffinity(0)
    near = 0  # a bit for each core
    if gpu is not None:
        p: Any = torch.cuda.get_device_properties(gpu)
        pci = f"{p.pci_domain_id:04x}:{p.pci_bus_id:02x}:{p.pci_device_id:02x}.0"
        mask = SYS / "bus/pci/devices" / pci / "local_cpus"
        near = int(mask.read_text().replace(",", ""), 16) if mask.exists() else 0
    cores = [core for core in allowed if near >> core & 1] or allowed
    return sorted(cores, key=lambda core: (first_thread(core), core))


def first_thread(core: int) -> int:
    """The first of the threads that share a core: 0 for `0,112`."""
    siblings = SYS / f"devices/system/cpu/cpu{core}/topology/thread_siblings_list"
    return int(re.split("[,-]", siblings.read_text())[0]) if siblings.exists() else core


def stay_near(device: torch.device) -> None:
    """Keep this process next to its GPU: on another socket its pinned memory would lie far away."""
    if device.type == "cuda":
        os.sched_setaffinity(0, near_cores(device.index))
