#!/usr/bin/env python3
"""Is this job put together rightly? Run alone it prints who is where.

Every script does this at its start, silent when all is well. What would let the first collective
hang is refused instead, in one line: what is wrong, what was seen, the command that cures it.

    torchrun --nproc-per-node 8 -m common.preflight
    srun --ntasks-per-node=8 bash -c '. launch/slurm_env.sh && python -m common.preflight'

    before the ranks meet   the launcher's variables (common/job.py); the master's name, address
                            and port, and whether this node can reach it
    when they meet          who is missing, ranks that come twice, nodes whose torch, NCCL or
                            sources differ, ranks of a node that are not consecutive
"""

import argparse
import contextlib
import functools
import hashlib
import itertools
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

from common import cli, job, network

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

ROOT: Final = Path(__file__).resolve().parents[1]
ANSWER_S: Final = 30.0  # for a master that is up: longer means that packets are dropped
REFUSAL_S: Final = 5.0  # and that refuses connections
HANG: Final = 3  # exit status
SHOWN: Final = 64  # ranks with a line of their own; above, one a node
COLUMNS: Final = (
    *("rank", "local_rank", "host", "device"),
    *("interface", "address", "torch", "checkout"),
)

Row = dict[str, Any]  # what one node says of itself


# -- before the ranks meet -------------------------------------------------------------------------


def refuse_misfit() -> None:
    """End the program where the launcher's variables show that the job is put together wrongly."""
    agent: list[str] = []
    with contextlib.suppress(OSError):
        agent = Path(f"/proc/{os.getppid()}/cmdline").read_text().split("\0")
    problem = job.misfit(os.environ, agent)
    if problem:
        cli.refuse(problem, known_to_all=True)


def check_master(timeout: float) -> None:
    """End the program where this rank cannot meet the others at MASTER_ADDR. Not in a world of one.

    On the first rank of each further node the master is connected to; torch would try for the
    whole timeout, whatever the answer.
    """
    rank, world_size, local_rank, local_world_size = job.world(os.environ)
    address, port = job.master(os.environ)
    here = socket.gethostname()
    try:
        found = network.addresses_of(address)
    except OSError as error:
        cli.refuse(
            f"MASTER_ADDR={address} has no address on {here} ({error.strerror}); give the first "
            "node's, as `ip -br address` shows it there: torchrun --local-addr ADDRESS "
            "--rdzv-endpoint ADDRESS:29400, or export MASTER_ADDR=ADDRESS",
            speaks=local_rank == 0,
        )
    names = job.nodes(os.environ)
    if rank == 0 and _is_outside(address, found, names) and not job.switched_off(os.environ):
        cli.refuse(
            f"MASTER_ADDR={address} ({found[0]}) is none of the {len(names)} nodes of this Slurm "
            f"job, {os.environ['SLURM_JOB_NODELIST']}; name its first one: export MASTER_ADDR="
            f"$(scontrol show hostnames | head -n 1) ({job.MEANT})",
            speaks=True,
        )
    if local_rank > 0 or rank == 0 or local_world_size == world_size:
        return
    served = job.agent_serves_store(os.environ)  # then it is up since before this rank's start
    loopback = all(map(network.is_loopback, found))
    # rank 0 may be slow to start, but a master on this host not that slow
    patience = min(timeout, ANSWER_S if served else 2 * ANSWER_S if loopback else timeout)
    failed = network.unreachable(found, port, patience, REFUSAL_S if served else patience)
    if failed and loopback:
        cli.refuse(
            f"MASTER_ADDR={address} is {found[0]}, {here} itself, where nothing answers on port "
            f"{port} ({failed}): the master is on another node; give its address, as `ip -br "
            "address` shows it there: torchrun --local-addr ADDRESS, or export MASTER_ADDR=ADDRESS",
            speaks=True,
        )
    if failed:
        cli.refuse(
            f"{here} cannot reach the master, MASTER_ADDR={address} ({found[0]}) port {port}, in "
            f"{patience:g} s: {failed}; if rank 0 runs, see whether a firewall or another network "
            f"lies between: nc -vz {address} {port}",
            speaks=True,
        )


def _is_outside(address: str, found: Sequence[str], names: Sequence[str]) -> bool:
    """Whether the master is none of the nodes, by name and by address."""
    if not names or job.is_among(address, names) or any(map(network.is_own, found)):
        return False
    known: list[str] = []
    for name in names:
        with contextlib.suppress(OSError):
            known += network.addresses_of(name)
    return bool(known) and not set(found) & set(known)


def explain_no_store(error: RuntimeError, timeout: float) -> NoReturn:
    """End the program with the reason for which torch could not open the store.

    Raises TimeoutError where the master has not answered in time.
    """
    address, port = job.master(os.environ)
    here = socket.gethostname()
    if "EADDRINUSE" in str(error):
        cli.refuse(
            f"MASTER_PORT={port} is taken on {here} by {network.listener_on(port)}; "
            f"take a free one on all ranks: export MASTER_PORT={network.free_port()}",
            speaks=True,
        )
    if "EACCES" in str(error):
        cli.refuse(
            f"MASTER_PORT={port} is not for users on {here}; take one from 1024 on, the same on "
            f"all ranks: export MASTER_PORT={network.free_port()}",
            speaks=True,
        )
    if "timed out" in str(error).lower():
        raise TimeoutError(
            f"HANG at the start: rank {os.environ['RANK']} on {here} had no answer in "
            f"{timeout:g} s from MASTER_ADDR={address} port {port}, where rank 0 serves the others"
        ) from None
    cli.refuse(
        f"no store of torch answers {here} at MASTER_ADDR={address} port {port}: "
        f"{str(error).splitlines()[0]}; if another program listens there, take a free port on all "
        f"ranks: export MASTER_PORT={network.free_port()}",
        speaks=True,
    )


# -- when they meet --------------------------------------------------------------------------------


def describe_node(backend: str) -> Row:
    """What this node says of itself: on its first rank, for the others to compare."""
    import torch

    rank, _, _, local_world_size = job.world(os.environ)
    nccl = None
    if backend == "nccl":
        nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return {
        "host": socket.gethostname(),
        "first": rank,
        "ranks": local_world_size,
        "address": network.address_towards(os.environ.get("MASTER_ADDR", "")),
        "torch": torch.__version__,
        "nccl": nccl,
        "interface": os.environ.get("GLOO_SOCKET_IFNAME"),
        "commit": commit(),
        "sources": sources(ROOT),
    }


def sources(root: Path) -> str:
    """A digest of the scripts and of what they share."""
    digest = hashlib.blake2b(digest_size=4)
    for folder in ("benchmarks", "common"):
        for path in sorted((root / folder).glob("*.py")):
            digest.update(f"{folder}/{path.name}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def commit() -> str | None:
    """The checkout's commit; None where there is no git to ask."""
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def meet(
    store: "Store", row: Row | None, rank: int, world_size: int, timeout: float
) -> dict[str, Any]:
    """Wait for all ranks, and for rank 0's verdict on the nodes; the same on all ranks.

    row: this node's, on its first rank; None elsewhere. Costs each rank a fixed number of calls
    to the store, and rank 0 a value a node.

    Raises TimeoutError, naming the ranks that are missing, when not all arrive in `timeout` s.
    """
    arrive(store, row, rank, world_size)
    patience = timedelta(seconds=timeout)
    try:
        if rank == 0:
            store.wait(["all"], patience)
            store.set("verdict", json.dumps(judge(rows_of(store), world_size)))
        store.wait(["verdict"], patience)
        verdict: dict[str, Any] = json.loads(store.get("verdict"))
        refused = verdict["problem"] or verdict["difference"]
        if refused and store.add("read", 1) == world_size:
            store.set("all read", "")
    except RuntimeError:
        text = "HANG at the start: the store is gone, and with it the process that served it"
        with contextlib.suppress(RuntimeError):
            text = _missing(store, world_size, timeout)
        raise TimeoutError(text) from None
    if refused and rank == 0:  # may serve the store, which ends with it
        with contextlib.suppress(RuntimeError):
            store.wait(["all read"], timedelta(seconds=min(timeout, 10)))
    return verdict


def arrive(store: "Store", row: Row | None, rank: int, world_size: int) -> None:
    """Leave word in the store that this rank is here, and what its node is like.

    Ends the program where another rank of this number has done so.
    """
    host = socket.gethostname()
    if store.add(f"rank/{rank}", 1) > 1:
        cli.refuse(
            f"RANK={rank} is given twice, here on {host} and to another process; every rank "
            "needs its own: start with torchrun, or by launch/slurm_srun.sbatch",
            speaks=True,
        )
    if row is not None:
        store.set(f"node/{store.add('nodes', 1)}", json.dumps(row))
    if store.add("count", 1) == world_size:
        store.set("all", "")


def rows_of(store: "Store") -> list[Row]:
    """Every node's row, in the order of their ranks; after all have arrived."""
    keys = [f"node/{i + 1}" for i in range(store.add("nodes", 0))]
    return sorted((json.loads(store.get(key)) for key in keys), key=lambda row: row["first"])


def _missing(store: "Store", world_size: int, timeout: float) -> str:
    """Who is missing. Only the first to ask looks at every rank: it costs a call for each."""
    arrived, head = store.add("count", 0), "HANG at the start: "
    if arrived == world_size:
        return f"{head}rank 0 has not compared the nodes in {timeout:g} s"
    if store.add("asked", 1) > 1:
        time.sleep(10)  # or this one's end would have the launcher end the one that asks
        return f"{head}{arrived} of {world_size} ranks arrived in {timeout:g} s"
    missing = [rank for rank in range(world_size) if not store.check([f"rank/{rank}"])]
    names = ", ".join(map(str, missing[:16])) + (", ..." if len(missing) > 16 else "")
    return f"{head}rank {names} of {world_size} did not arrive in {timeout:g} s"


def judge(rows: Sequence[Row], world_size: int) -> dict[str, Any]:
    """`problem`, `difference` and `warning`, in a line each or None.

    The user may mean a difference to be; not a problem. `peer` is an address outside the first
    node, or None; `nodes` how many there are. rows: by first rank.
    """
    peers = [row["address"] for row in rows[1:] if row["address"]]
    return {
        "problem": _inconsistent(rows, world_size),
        "difference": _unlike(rows),
        "warning": _uneven(rows),
        "nodes": len(rows),
        "peer": next((peer for peer in peers if not network.is_loopback(peer)), None),
    }


def _inconsistent(rows: Sequence[Row], world_size: int) -> str | None:
    said = sum(row["ranks"] for row in rows)
    if said != world_size:
        counts = _by_node(rows, "ranks")
        return (
            f"the nodes count {said} ranks (LOCAL_WORLD_SIZE: {counts}), and WORLD_SIZE is "
            f"{world_size}; set both alike, or start with torchrun, which does"
        )
    for row, after in itertools.pairwise(rows):
        if row["first"] + row["ranks"] != after["first"]:
            return (
                f"the ranks of {row['host']} are not consecutive: it has {row['ranks']} from rank "
                f"{row['first']} on, and {after['host']} starts at rank {after['first']}; place "
                "them node by node: srun --distribution=block"
            )
    inside = [row["host"] for row in rows if row["interface"] == "lo"]
    if inside and len({row["host"] for row in rows}) > 1:
        return (
            f"GLOO_SOCKET_IFNAME=lo on {inside[0]} leads to no other host; unset it, or name the "
            "interface that does, as `ip -br address` shows it: export GLOO_SOCKET_IFNAME=NAME"
        )
    return None


def _unlike(rows: Sequence[Row]) -> str | None:
    """What the nodes run that must not differ: it could hang, or measure two programs at once."""
    for name, shown in (
        ("torch", lambda row: ".".join(row["torch"].split(".")[:2])),
        ("nccl", lambda row: row["nccl"]),
        ("sources", lambda row: row["sources"]),
    ):
        usual, _ = Counter(map(shown, rows)).most_common(1)[0]
        odd = [row for row in rows if shown(row) != usual]
        if not odd:
            continue
        other = next(row for row in rows if shown(row) == usual)
        hosts = ", ".join(row["host"] for row in odd[:4]) + (", ..." if len(odd) > 4 else "")
        if name == "sources":
            seen = [
                f"commit {row['commit'] or '?'}, digest {shown(row)}" for row in (odd[0], other)
            ]
            return (
                f"other sources in benchmarks/ and common/ on {hosts} ({seen[0]}) than on "
                f"{other['host']} ({seen[1]}); bring them to one state, e.g. rsync -a --delete "
                f"{ROOT}/ {odd[0]['host']}:{ROOT}/ ({job.MEANT})"
            )
        what = "NCCL" if name == "nccl" else "torch"
        return (
            f"another {what} on {hosts} ({odd[0][name]}) than on {other['host']} ({other[name]}); "
            f"install one version on all: pip install torch=={other['torch'].split('+')[0]} "
            f"({job.MEANT})"
        )
    return None


def _uneven(rows: Sequence[Row]) -> str | None:
    if len({row["ranks"] for row in rows}) < 2:
        return None
    return (
        f"the nodes have unlike numbers of ranks ({_by_node(rows, 'ranks')}); whole nodes are "
        "counted by the first one's; give each as many: --nproc-per-node N, or srun "
        "--ntasks-per-node=N"
    )


def _by_node(rows: Sequence[Row], name: str) -> str:
    shown = ", ".join(f"{row['host']} {row[name]}" for row in rows[:4])
    return shown + (", ..." if len(rows) > 4 else "")


@contextlib.contextmanager
def connecting(timeout: float) -> Iterator[None]:
    """Within it gloo connects the ranks; the program ends where that fails, or takes too long.

    gloo itself would wait as long as any of the job's operations may take.
    """
    here, rank = socket.gethostname(), os.environ.get("RANK", "0")
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "that of the host's name")
    what = f"gloo cannot connect rank {rank} on {here} to all others over interface {interface}"
    cure = (
        "name the one that leads to the other nodes, as `ip -br address` shows it: "
        "export GLOO_SOCKET_IFNAME=NAME TP_SOCKET_IFNAME=NAME"
    )

    def hang() -> None:
        text = f"HANG at the start: {what} in {timeout:g} s; {cure}\n"
        os.write(2, text.encode())
        os._exit(HANG)

    timer = threading.Timer(timeout, hang)
    timer.daemon = True
    timer.start()
    try:
        yield
    except RuntimeError as error:
        if os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE"):
            raise  # on one node it is not the network
        cli.refuse(f"{what}: {str(error).splitlines()[0]}; {cure}", speaks=True)
    finally:
        timer.cancel()


# -- alone -----------------------------------------------------------------------------------------


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = cli.Parser(prog="python -m common.preflight", description=__doc__)
    add = parser.add_argument
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="(default: auto)")
    add("--distributed-backend", choices=cli.BACKENDS, help="(default: nccl on CUDA, CPU gloo)")
    add(
        "--timeout",
        type=cli.positive_float,
        default=300.0,
        metavar="S",
        help="wait so long for the other ranks (default: 300)",
    )
    return parser.parse_args(argv)


def layout(rows: Sequence[Row]) -> str:
    """The table of all ranks; of all nodes, where there are many ranks."""
    from common.table import render

    if len(rows) > SHOWN:
        leaders = [row for row in rows if row["local_rank"] == 0]
        ends = [row["rank"] - 1 for row in leaders[1:]] + [rows[-1]["rank"]]
        rows = [
            row | {"rank": f"{row['rank']}-{end}", "local_rank": f"0-{end - row['rank']}"}
            for row, end in zip(leaders, ends, strict=True)
        ]
    columns: dict[str, Callable[[Row], str]] = {
        name.replace("_", "\n"): functools.partial(_cell, name) for name in COLUMNS
    }
    return render(columns, rows)


def _cell(name: str, row: Row) -> str:
    return "-" if row[name] is None else str(row[name])


def main(args: argparse.Namespace) -> int:
    import torch

    from common import dist
    from common.environment import collect, refuse_shared_devices

    try:
        device, backend = dist.choose_device(args.device, args.distributed_backend)
        ctx = dist.init(device, backend, args.timeout)
    except ValueError as error:
        cli.refuse(str(error))
    except TimeoutError as error:
        print(error, file=sys.stderr, flush=True)
        os._exit(HANG)
    environment = collect(ctx)
    problem = None
    if environment is not None:
        try:
            refuse_shared_devices(environment, backend)
        except ValueError as error:
            problem = str(error)
    problem = dist.broadcast_json(problem)
    if problem:
        cli.refuse(problem, known_to_all=True)
    cuda = device.type == "cuda"
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    rows = dist.gather_json(
        {
            "rank": ctx.rank,
            "local_rank": ctx.local_rank,
            "host": socket.gethostname(),
            "device": f"{device} {torch.cuda.get_device_name(device)}" if cuda else "cpu",
            "interface": interface,
            "address": interface and network.address_of(interface.split(",")[0]),
            "torch": torch.__version__,
            "checkout": f"{commit() or '-'} {sources(ROOT)}",
        }
    )
    if rows is not None:
        print(layout(rows))
        count = f"{ctx.world_size} rank{'' if ctx.world_size == 1 else 's'}"
        nodes = f"{ctx.num_nodes} node{'' if ctx.num_nodes == 1 else 's'}"
        print(f"\n{count} on {nodes}, backend {backend}: all met, nothing is wrong", flush=True)
    dist.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main(parse_args()))
