"""Joining the job: the launcher's variables, the device, the rendezvous, the network interface."""

import atexit
import contextlib
import ctypes
import errno
import gc
import ipaddress
import json
import os
import resource
import shlex
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import psutil
import torch
import torch.distributed as dist

from common.groups import NO_TIMEOUT, Job, local_rank
from harness.cli import HANG, cut, exit_now, read_launchers, refuse, suggest

LOOPBACK = "127.0.0.1"
LEAST_FILES = 32  # opened by a rank, and 2 more per rank: torch's files, and sockets of two groups
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's mallopt, in bytes
TORCH_WAITS = 4  # torch's own timeout of a group under test, as a multiple of --timeout
ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
SETTINGS = {  # for NCCL in torch, unless the user has set them; docs/gpus.md lists them
    # Our watchdog ends a hang. NCCL's own would end the process a minute after a failed case.
    ERROR_HANDLING: "0",
    # After a failed case NCCL's watchdog would wait four times this long for others' dumps.
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
    # A lost device ends the run with a reason. NCCL's watchdog would abort the process instead.
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
}
BY_HAND = (
    "without torchrun e.g. RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=2 "
    "MASTER_ADDR=127.0.0.1 MASTER_PORT=29500"
)
ADVICE = "set LOCAL_RANK and LOCAL_WORLD_SIZE"


def join(
    device: str, backend: str | None, timeout_s: float, contents: dict[str, str] | None = None
) -> Job:
    """Join the job, or start a world of one, and select a device.

    The run ends with one line and status 2 if the ranks' arguments or files differ, and with status
    3 if not all ranks arrive within `timeout_s`. CUDA is first called once all ranks have met, so
    that until then no rank of this job occupies GPU memory.

    device, backend: the flags; backend None selects the default of the device. contents: the hashes
    of this rank's files, as returned by contents.of_run.
    """
    rank, on_node, world_size, local_world_size = world()
    limit, least = raise_file_limit(64 + 16 * world_size), LEAST_FILES + 2 * world_size
    if limit < least:
        needs = f"a rank needs {least} open files or more, but the limit on {socket.gethostname()}"
        refuse(f"{needs} is {limit}; try ulimit -n {64 + 16 * world_size}", prints=True)
    chosen = choose_device(device, on_node)
    cuda = chosen.type == "cuda"
    backend = backend or ("nccl" if cuda else "gloo")
    check_backend(backend, cuda)
    set_variables()
    start = time.perf_counter()
    on_loopback = world_size == 1 or meets_on_loopback(world_size, local_world_size)
    if on_loopback and not address_towards(LOOPBACK):
        refuse(f"{socket.gethostname()}: the loopback interface is down; try `ip link set lo up`")
    store: dist.Store = dist.HashStore()
    second_store = store.clone()
    if world_size > 1:
        store, second_store = meet(rank, world_size, timeout_s, on_loopback, contents)
    if cuda:
        torch.cuda.set_device(chosen)
    # By default gloo and TensorPipe bind to the address of the host's name: 127.0.1.1 on Debian.
    one_node = world_size == local_world_size
    if interface := "lo" if one_node else find_interface(store, world_size):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("TP_SOCKET_IFNAME", interface)
    prefixed = dist.PrefixStore("control", store)
    try:
        dist.init_process_group(
            "gloo", store=prefixed, rank=rank, world_size=world_size, timeout=NO_TIMEOUT
        )
    except RuntimeError as error:
        if "Unable to find address" not in str(error):
            raise
        refuse_interface()
    control = dist.group.WORLD
    assert control
    rendezvous_s = time.perf_counter() - start
    # Imported modules are never garbage, so collections between cases need not traverse them.
    gc.freeze()
    atexit.register(gc.unfreeze)  # otherwise nanobind reports leaks at exit
    return Job(
        rank=rank,
        local_rank=on_node,
        world_size=world_size,
        local_world_size=local_world_size,
        device=chosen,
        backend=backend,
        store=store,
        control=control,
        second_store=second_store,
        timeout=min(NO_TIMEOUT, TORCH_WAITS * timedelta(seconds=timeout_s)),
        keeps_memory=keep_freed_memory(),
        rendezvous_s=rendezvous_s,
    )


def refuse_interface() -> NoReturn:
    """Refuse the interface on which gloo found no address. On other hosts it may be valid."""
    name = os.environ.get("GLOO_SOCKET_IFNAME", "")
    known = sorted({*psutil.net_if_addrs()} - {name})
    expected = f"expected an interface with an address, e.g. {cut(known) or 'lo'}, got {name!r}"
    line = f"GLOO_SOCKET_IFNAME on {socket.gethostname()}: {expected}"
    refuse(line + suggest(name, known), prints=True)


def choose_device(wanted: str, on_node: int) -> torch.device:
    """Return the device of this rank. wanted: --device. on_node: the rank's index on its node."""
    count = torch.cuda.device_count()
    if wanted == "cuda" and not count:
        refuse("--device cuda: torch sees no CUDA device here; try --device cpu")
    if wanted == "cpu" or not count:
        return torch.device("cpu")
    return torch.device("cuda", on_node % count)


def check_backend(backend: str, cuda: bool) -> None:
    """Refuse a backend that is not available. A name may list devices: cpu:gloo,cuda:nccl."""
    if "nccl" in backend and not cuda:  # nccl2, nccl-legacy and nccl-lazy as well
        refuse(f"--backend {backend} requires CUDA, but this run is on the CPU; try gloo")
    try:
        available = dist.is_backend_available(backend)
    except ValueError:
        refuse(f"--backend: expected a name such as gloo or cpu:gloo,cuda:nccl, got '{backend}'")
    if not available:
        refuse(f"--backend {backend}: this torch was built without it; try gloo")


def keep_freed_memory() -> bool:
    """Make glibc keep memory that the process frees, unless variables of the user configure malloc.

    By default glibc returns memory to the system after each step until the heap has grown, which
    made the first case of a process 6 to 13% slower than the same step later (docs/measuring.md).
    Returns whether glibc accepted the settings.
    """
    libc = ctypes.CDLL(None)
    users = any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ)
    if users or not hasattr(libc, "mallopt"):  # musl lacks it
        return False
    # the maximum values: memory is never returned, and blocks up to 32 MiB are kept
    kept = [libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1), libc.mallopt(M_MMAP_THRESHOLD, 2**25)]
    return all(kept)


def set_variables() -> None:
    """Set the variables that NCCL in torch reads when the first group is created. Values that the
    user has set are kept."""
    if torchrun_set_error_handling():
        del os.environ[ERROR_HANDLING]
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)


def torchrun_set_error_handling() -> bool:
    """Whether ERROR_HANDLING was set by torchrun, which sets it to 1 unless the user has set it."""
    return "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get(ERROR_HANDLING) == "1"


def world() -> tuple[int, int, int, int]:
    """Return (rank, index on its node, world size, ranks of its node), by the launcher's variables.

    Refuses missing and invalid values, and tasks of a launcher that would each be a world of one.
    """
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
    """False if only RANK and WORLD_SIZE are set: then all ranks must be on one node."""
    return "LOCAL_RANK" in os.environ or "LOCAL_WORLD_SIZE" in os.environ


def refuse_worlds_of_one() -> None:
    """Refuse N processes that were started without torchrun or a wrapper of launch/: each of them
    would be rank 0 of a world of one."""
    if "RANK" in os.environ and os.environ.get("GROUP_WORLD_SIZE") != "1":
        return
    of_torchrun = [os.environ.get(name, "1") for name in ("PET_NNODES", "PET_NPROC_PER_NODE")]
    if "RANK" not in os.environ and of_torchrun != ["1", "1"]:
        # Kubeflow Trainer sets them in each pod (kubeflow/trainer#3930), which has its own log
        sets = "PET_NNODES={} and PET_NPROC_PER_NODE={} configure torchrun".format(*of_torchrun)
        refuse(f"{sets}, but python was started; start torchrun with this script", prints=True)
    launchers = read_launchers()
    ranks = ["RANK", *(rank for rank, _ in launchers)]
    for _, size in launchers:
        tasks = os.environ.get(size, "1")
        if tasks == "1":
            continue
        refuse(
            f"{size}={tasks}, but each task would run as a world of one; start them with "
            "launch/slurm_torchrun.sbatch (torchrun on each node), "
            "launch/slurm_srun.sbatch (a task per rank) or "
            "launch/mpi_env.sh (mpirun, mpiexec, flux)",
            prints=all(os.environ.get(rank, "0") == "0" for rank in ranks),
        )


def variable(name: str, least: int, most: int = 2**31) -> int:
    """Return the integer in a variable of the launcher. Refuses any other value."""
    text = os.environ.get(name)
    with contextlib.suppress(ValueError):
        if text is not None and least <= int(text) <= most:
            return int(text)
    limits = f"of at least {least}" if most == 2**31 else f"from {least} to {most}"
    refuse_variable(name, f"a whole number {limits}", text)


def refuse_variable(name: str, expected: str, text: str | None) -> NoReturn:
    """Refuse the value of a variable. It may be valid on other ranks, so each rank prints its own
    line."""
    got = "but it is not set" if text is None else f"got {text!r}"
    line = f"{name} on {socket.gethostname()}: expected {expected}, {got}; {BY_HAND}"
    refuse(line, prints=True)


def raise_file_limit(wanted: int) -> int:
    """Raise the soft limit on open files to `wanted`, or to the hard limit. Returns that number."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return limit


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


def connect_to_store(
    rank: int, timeout_s: float, on_loopback: bool
) -> tuple[dist.TCPStore, dist.Store]:
    """Return two connections to the store, which rank 0 serves unless torchrun's agent does.

    on_loopback: the server listens on loopback only; by default it listens on all interfaces.
    """
    port, listener = variable("MASTER_PORT", 1, 65535), None
    served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    is_master = rank == 0 and not served
    if on_loopback and not served:
        # also for the processes of checkpoint_sweep's async-process, which use the same address
        os.environ["MASTER_ADDR"] = LOOPBACK
    address = os.environ["MASTER_ADDR"]
    try:
        if on_loopback and is_master:
            listener = socket.create_server((LOOPBACK, port)).detach()
        store = dist.TCPStore(
            address,
            port,
            is_master=is_master,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=listener,
        )
        return store, store.clone()
    except (OSError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        if isinstance(error, OSError) or "EADDRINUSE" in reason:
            why = os.strerror(getattr(error, "errno", None) or errno.EADDRINUSE)
            refuse_variable("MASTER_PORT", f"a free port ({why})", str(port))
        name = "rank 0 on loopback" if on_loopback else "MASTER_ADDR"
        unreached = f"{socket.gethostname()} cannot reach {name} {address}:{port}: {reason}"
        exit_now(HANG, unreached, prints=local_rank() == 0)


def meet(
    rank: int,
    world_size: int,
    timeout_s: float,
    on_loopback: bool = False,
    contents: Mapping[str, str] | None = None,
) -> tuple[dist.Store, dist.Store]:
    """Wait in the store until all ranks have arrived. Refuses ranks that cannot form one job.

    Returns two connections to the store. Both are made now, while ranks arrive one by one: the
    store resolves the name of each client in turn (pytorch/pytorch#159007). If all ranks connected
    at once, a name server might drop requests, and the store would block until each times out
    after 5 s.
    """
    until = time.monotonic() + timeout_s
    tcp, second_tcp = connect_to_store(rank, timeout_s, on_loopback)
    # torchrun's store survives a restart of the ranks. Without a prefix per attempt the new ranks
    # would connect to ports of the old ones (pytorch/pytorch#135712).
    prefix = f"torchrun-bench/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    store = dist.PrefixStore(prefix, tcp)
    here, address = socket.gethostname(), os.environ["MASTER_ADDR"]
    words = [os.path.basename(sys.argv[0]), *without_paths(sys.argv[1:])]
    row = [here, address_towards(address), words, dict(contents or {})]
    store.set(f"here/{rank}", json.dumps(row))
    if rank == 0:
        signs = [f"here/{other}" for other in range(world_size)]
        if not wait_for(store, signs, until):
            missing = cut([rank for rank, sign in enumerate(signs) if not store.check([sign])])
            hint = "" if has_local_variables() else f"; on several hosts {ADVICE}"
            exit_now(HANG, f"HANG: no sign of rank {missing} in {timeout_s:g} s{hint}")
        store.set("all here", mismatch(rows_of(store, world_size)) or "")
    try:
        if not wait_for(store, ["all here"], until + 10):  # rank 0 reports first
            exit_now(HANG, f"HANG: not all ranks arrived within {timeout_s:g} s", prints=False)
        if problem := store.get("all here").decode():
            if rank == 0:  # it may serve the store, which the other ranks poll every 0.05 s
                time.sleep(1)
            refuse(problem)
    except RuntimeError:  # rank 0 has ended, and the store with it
        port = os.environ["MASTER_PORT"]
        lost = f"{here} lost rank 0 at {address}:{port} before all ranks had arrived"
        exit_now(HANG, lost, prints=local_rank() == 0)
    return store, dist.PrefixStore(prefix, second_tcp)


def without_paths(words: Sequence[str]) -> list[str]:
    """Replace the values of --json and --profile with PATH. They may differ between ranks: rank 0
    alone writes the report, and each rank writes its own traces."""
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


def wait_for(store: dist.Store, keys: list[str], until: float) -> bool:
    """Wait for all keys in the store. Returns False if one is missing at `until`. Ctrl-C works."""
    while not store.check(keys):
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def rows_of(store: dist.Store, world_size: int) -> list[Any]:
    """Return the entry of each rank in the store: its host, its address, its command line and the
    hashes of its files."""
    signs = [f"here/{rank}" for rank in range(world_size)]
    return [json.loads(text) for text in store.multi_get(signs)]


def mismatch(rows: list[Any]) -> str | None:
    """Return why these ranks cannot form one job, or None if they can. rows: see `rows_of`."""
    hosts = {f"{host} ({address})" for host, address, *_ in rows}
    if not has_local_variables() and len(hosts) > 1:
        return f"only RANK and WORLD_SIZE are set, but ranks are on {cut(sorted(hosts))}; {ADVICE}"
    first = rows[0][2]
    others = [rank for rank, (_, _, words, _) in enumerate(rows) if words != first]
    if others:
        got = f"got `{shlex.join(rows[others[0]][2])}` on rank {cut(others)}"
        return f"expected the same arguments on all ranks, {got}, `{shlex.join(first)}` on rank 0"
    others = [rank for rank, row in enumerate(rows) if row[3] != rows[0][3]]
    if others:
        here, there = rows[0][3], rows[others[0]][3]
        parts = [name for name in here | there if here.get(name) != there.get(name)]
        got = f"{cut(parts)} of rank {cut(others)} ({rows[others[0]][0]}) differ from rank 0's"
        return f"expected the same files on all ranks, but {got}; use one checkout on all nodes"
    return None


def find_interface(store: dist.Store, world_size: int) -> str:
    """Return the interface with the route to the master; "" if unknown.

    On the master's own node that route may be loopback. There the interface is the one with the
    route to a rank on another node.
    """
    address = address_towards(os.environ["MASTER_ADDR"])
    if address.startswith("127."):
        here = socket.gethostname()
        rows = rows_of(store, world_size)
        others = [other for host, other, *_ in rows if host != here and other]
        address = address_towards(others[0]) if others else address
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
