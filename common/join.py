"""Joining the job: the launcher's variables, the device, the rendezvous, the network interface."""

import contextlib
import ctypes
import errno
import ipaddress
import json
import os
import resource
import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import NoReturn

import psutil
import torch
import torch.distributed as dist

from common.errors import NotArrived, Refused, cut
from common.groups import Job, local_rank, silenced

LOOPBACK = "127.0.0.1"
LEAST_FILES = 32  # opened by a rank, and 2 more per rank: torch's files, and sockets of two groups
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's mallopt, in bytes
POLL_S = 0.05  # interval between polls of the store until all ranks have arrived
TELL_S = 10  # the other ranks wait this much longer than rank 0, which knows who is missing
BY_HAND = (
    "without torchrun e.g. RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=2 "
    "MASTER_ADDR=127.0.0.1 MASTER_PORT=29500"
)
ADVICE = "set LOCAL_RANK and LOCAL_WORLD_SIZE"


def join(
    device: str = "auto",
    backend: str | None = None,
    timeout: timedelta | None = None,
    *,
    control_timeout: timedelta | None = None,
) -> Job:
    """Join the job, or start a world of one, and select a device. Raises Refused and NotArrived.

    device: `auto` (CUDA if torch finds a GPU), `cpu` or `cuda`. backend: of groups under test; None
    for nccl on CUDA and gloo on the CPU. timeout: of the rendezvous and of groups under test; None
    for torch's default. control_timeout: of control groups; by default the same. Until all ranks
    have met, none of them occupies GPU memory.
    """
    place = rank, on_node, world_size, local_world_size = world()
    wanted, least = 64 + 16 * world_size, LEAST_FILES + 2 * world_size
    if (limit := raise_file_limit(wanted)) < least:
        raise Refused(
            f"a rank needs at least {least} open files; {socket.gethostname()} allows {limit}; "
            f"try ulimit -n {wanted}",
            here=True,
        )
    chosen = choose_device(device, on_node)
    backend = backend or ("nccl" if chosen.type == "cuda" else "gloo")
    check_backend(backend, chosen)
    start = time.perf_counter()
    on_loopback = world_size == 1 or meets_on_loopback(world_size, local_world_size)
    if on_loopback and not address_towards(LOOPBACK):
        here = socket.gethostname()
        raise Refused(f"{here}: the loopback interface is down; try `ip link set lo up`")
    store: dist.Store = dist.HashStore()
    second_store = store  # within this process, both threads can use it
    if world_size > 1:
        limit_s = (timeout or dist.distributed_c10d.default_pg_timeout).total_seconds()
        store, second_store = meet(rank, world_size, limit_s, on_loopback)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    # By default gloo and TensorPipe bind to the address of the host's name: 127.0.1.1 on Debian.
    one_node = world_size == local_world_size
    if interface := "lo" if one_node else find_interface(store, world_size):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("TP_SOCKET_IFNAME", interface)
    limits = timeout, control_timeout or timeout
    prefixed = dist.PrefixStore("control", store)
    try:
        with silenced("gloo"):
            dist.init_process_group(
                "gloo", store=prefixed, rank=rank, world_size=world_size, timeout=limits[1]
            )
    except RuntimeError as error:
        if "Unable to find address" not in str(error):
            raise
        refuse_interface()
    control = dist.group.WORLD
    assert control
    keeps, took_s = keep_freed_memory(), time.perf_counter() - start
    return Job(*place, chosen, backend, store, control, second_store, *limits, keeps, took_s)


def leave(job: Job) -> None:
    """Close the control group. All ranks call it, once their other groups are closed."""
    job.barrier()
    dist.destroy_process_group(job.control)


def world() -> tuple[int, int, int, int]:
    """Return (rank, index on its node, world size, ranks of its node), by the launcher's variables.
    Without them this is a world of one. Raises Refused for missing and invalid values."""
    if not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"} & set(os.environ):
        return 0, 0, 1, 1  # started by python
    world_size = variable("WORLD_SIZE", 1, 10**6)
    rank = variable("RANK", 0, world_size - 1)
    if not has_local_variables():
        return rank, rank, world_size, world_size  # `meet` checks that there is one node
    local_world_size = variable("LOCAL_WORLD_SIZE", 1, world_size)
    variable("LOCAL_RANK", 0, local_world_size - 1)
    return rank, local_rank(), world_size, local_world_size


def has_local_variables() -> bool:
    """False if only RANK and WORLD_SIZE are set: then all ranks must be on one node."""
    return "LOCAL_RANK" in os.environ or "LOCAL_WORLD_SIZE" in os.environ


def variable(name: str, least: int, most: int) -> int:
    """Return the integer in a variable of the launcher. Refuses any other value."""
    text = os.environ.get(name)
    with contextlib.suppress(ValueError):
        if text is not None and least <= int(text) <= most:
            return int(text)
    refuse_variable(name, f"a whole number from {least} to {most}", text)


def refuse_variable(name: str, expected: str, text: str | None) -> NoReturn:
    """Refuse the value of a variable, which may be valid on other ranks."""
    got = "but it is not set" if text is None else f"got {text!r}"
    here = socket.gethostname()
    raise Refused(f"{name} on {here}: expected {expected}, {got}; {BY_HAND}", here=True)


def raise_file_limit(wanted: int) -> int:
    """Raise the soft limit on open files to `wanted`, or to the hard limit. Returns that number."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return limit


def choose_device(wanted: str, on_node: int) -> torch.device:
    """Return the device of the rank with this index on its node. wanted: see `join`."""
    count = torch.cuda.device_count()
    if wanted == "cuda" and not count:
        raise Refused("device cuda: torch sees no CUDA device here; try cpu")
    if wanted == "cpu" or not count:
        return torch.device("cpu")
    return torch.device("cuda", on_node % count)


def check_backend(backend: str, device: torch.device) -> None:
    """Refuse a backend that is not available. A name may list devices: cpu:gloo,cuda:nccl."""
    if "nccl" in backend and device.type != "cuda":  # nccl2, nccl-legacy and nccl-lazy as well
        raise Refused(f"backend {backend} requires CUDA, but this run is on the CPU; try gloo")
    try:
        available = dist.is_backend_available(backend)
    except ValueError:
        raise Refused(
            f"backend: expected a name such as gloo or cpu:gloo,cuda:nccl, got '{backend}'"
        ) from None
    if not available:
        raise Refused(f"backend {backend}: this torch was built without it; try gloo")


def keep_freed_memory() -> bool:
    """Make glibc keep freed memory, unless variables of the user configure malloc. Returns whether
    it does. By default glibc returns memory after each step until the heap has grown, which made
    the first case of a process 6 to 13% slower than the same step later (docs/evidence.md)."""
    libc = ctypes.CDLL(None)
    users = any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ)
    if users or not hasattr(libc, "mallopt"):  # musl lacks it
        return False
    # the maximum values: memory is never returned, and blocks up to 32 MiB are kept
    kept = [libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1), libc.mallopt(M_MMAP_THRESHOLD, 2**25)]
    return all(kept)


# -- the rendezvous --------------------------------------------------------------------------------


def meets_on_loopback(world_size: int, local_world_size: int) -> bool:
    """Whether it is certain before the rendezvous that all ranks are on this host."""
    address = os.environ.get("MASTER_ADDR")
    try:
        found = socket.getaddrinfo(address or "no address", None)  # a name may resolve to loopback
    except (OSError, UnicodeError):
        refuse_variable("MASTER_ADDR", "the name or address of rank 0's host", address)
    if has_local_variables():
        return local_world_size == world_size
    return all(ipaddress.ip_address(row[4][0]).is_loopback for row in found)


def connect_to_store(rank: int, limit_s: float, on_loopback: bool) -> dist.TCPStore:
    """Return a connection to the store, which rank 0 serves unless torchrun's agent does.
    on_loopback: the server listens on loopback only; by default it listens on all interfaces."""
    port, listener = variable("MASTER_PORT", 1, 65535), None
    served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    is_master = rank == 0 and not served
    if on_loopback and not served:
        os.environ["MASTER_ADDR"] = LOOPBACK  # also for processes that this one starts
    address = os.environ["MASTER_ADDR"]
    try:
        if on_loopback and is_master:
            listener = socket.create_server((LOOPBACK, port)).detach()
        return dist.TCPStore(
            address,
            port,
            is_master=is_master,
            timeout=timedelta(seconds=limit_s),
            wait_for_workers=False,
            master_listen_fd=listener,
        )
    except (OSError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        if isinstance(error, OSError) or "EADDRINUSE" in reason:
            why = os.strerror(getattr(error, "errno", None) or errno.EADDRINUSE)
            refuse_variable("MASTER_PORT", f"a free port ({why})", str(port))
        name = "rank 0 on loopback" if on_loopback else "MASTER_ADDR"
        raise NotArrived(
            f"{socket.gethostname()} cannot reach {name} {address}:{port}: {reason}", [0]
        ) from None


def meet(
    rank: int, world_size: int, limit_s: float, on_loopback: bool = False
) -> tuple[dist.Store, dist.Store]:
    """Wait until all ranks have arrived, for up to `limit_s` seconds. Returns two connections to
    the store. Both are made now, while ranks arrive one by one: the store resolves the name of each
    client in turn (pytorch/pytorch#159007), and if all ranks connected at once, a name server might
    drop requests, which blocks the store for 5 s each."""
    until = time.monotonic() + limit_s
    tcp = connect_to_store(rank, limit_s, on_loopback)
    # torchrun's store survives a restart of the ranks. Without a prefix per attempt the new ranks
    # would connect to ports of the old ones (pytorch/pytorch#135712).
    prefix = f"torchrun-bench/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    store, second_store = (
        dist.PrefixStore(prefix, link) for link in (tcp, second_client(tcp, limit_s))
    )
    here, address = socket.gethostname(), os.environ["MASTER_ADDR"]
    store.set(f"here/{rank}", json.dumps([here, address_towards(address)]))
    if rank == 0:
        store.set("all here", json.dumps(missing_or_apart(store, world_size, until, limit_s)))
    try:
        while not store.check(["all here"]):  # polls, so that Ctrl-C works
            if time.monotonic() > until + TELL_S:
                raise NotArrived(f"not all ranks arrived within {limit_s:g} s", [])
            time.sleep(POLL_S)
        missing, problem = json.loads(store.get("all here"))
    except RuntimeError:  # rank 0 has ended, and the store with it
        at = f"{address}:{os.environ['MASTER_PORT']}"
        raise NotArrived(f"{here} lost rank 0 at {at} before all ranks had arrived", [0]) from None
    if problem:
        if rank == 0:  # it may serve the store, which the other ranks poll
            time.sleep(1)
        raise NotArrived(problem, missing) if missing else Refused(problem)
    return store, second_store


def second_client(tcp: dist.TCPStore, limit_s: float) -> dist.Store:
    """Return another connection to a store."""
    if hasattr(tcp, "clone"):
        return tcp.clone()
    # resolves the name again, which a clone does not
    return dist.TCPStore(tcp.host, tcp.port, timeout=timedelta(seconds=limit_s))


def missing_or_apart(
    store: dist.Store, world_size: int, until: float, limit_s: float
) -> tuple[list[int], str]:
    """Wait until all ranks have arrived. Returns those that have not, and why the ranks cannot form
    a job; "" if they can."""
    ranks = range(world_size)
    while not store.check([f"here/{rank}" for rank in ranks]):
        if time.monotonic() > until:
            missing = [rank for rank in ranks if not store.check([f"here/{rank}"])]
            arrived = addresses(store, sorted({*ranks} - {*missing}))
            there = cut(sorted({host for host, _ in arrived}))
            hint = "" if has_local_variables() else f"; on several hosts {ADVICE}"
            return missing, (
                f"rank {cut(missing)} did not arrive within {limit_s:g} s; "
                f"ranks on {there} did{hint}"
            )
        time.sleep(POLL_S)
    hosts = [f"{host} ({address})" for host, address in sorted(set(addresses(store, ranks)))]
    if has_local_variables() or len(hosts) == 1:
        return [], ""
    return [], f"only RANK and WORLD_SIZE are set, but ranks are on {cut(hosts)}; {ADVICE}"


def addresses(store: dist.Store, ranks: Sequence[int]) -> list[tuple[str, str]]:
    """Return the host of each of these ranks, and its address on the route to the master."""
    return [tuple(json.loads(text)) for text in store.multi_get([f"here/{r}" for r in ranks])]


# -- the network interface -------------------------------------------------------------------------


def find_interface(store: dist.Store, world_size: int) -> str:
    """Return the interface with the route to the master; "" if unknown. On the master's own node,
    where that may be loopback, the one with the route to a rank on another node."""
    address = address_towards(os.environ["MASTER_ADDR"])
    if address.startswith("127."):
        here = socket.gethostname()
        others = [other for host, other in addresses(store, range(world_size)) if host != here]
        address = next((address_towards(other) for other in others if other), address)
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in entries):
            return name
    return "lo" if address.startswith("127.") else ""


def address_towards(host: str) -> str:
    """Return this host's IPv4 address on the route to another host; "" if there is no route."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends no packet: it selects the route
        return str(probe.getsockname()[0])
    return ""


def refuse_interface() -> NoReturn:
    """Refuse the interface on which gloo found no address. On other hosts it may be valid."""
    name = os.environ.get("GLOO_SOCKET_IFNAME", "")
    known = cut(sorted({*psutil.net_if_addrs()} - {name})) or "lo"
    raise Refused(
        f"GLOO_SOCKET_IFNAME on {socket.gethostname()}: expected an interface with an address, "
        f"e.g. {known}, got {name!r}",
        here=True,
    )
