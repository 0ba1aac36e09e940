"""The network of the groups under test: a line, an entry in the report's last line, and the flag
--expect-network.

NCCL logs its choice into an anonymous file in memory, unless the user has set NCCL_DEBUG or one of
its relatives. gloo uses the interface of the control group.
"""

import argparse
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil

from common.groups import Group
from common.stats import Times
from common.timing import Workload
from harness.benchmark import Benchmark, Key, Observer
from harness.cli import Parser, cut, on_cuda
from harness.report import Case

CONFIGURATIONS = (Path("/etc/nccl.conf"), Path.home() / ".nccl.conf")  # read by NCCL
INTERNAL = ("IB", "Socket")  # NCCL's own networks; all others are plugins

log_fd: int | None = None  # of the file in memory; None if NCCL does not write one


class Network(Observer):
    """Reads NCCL's log after the first case of a rank."""

    @classmethod
    def before_join(cls, args: argparse.Namespace) -> dict[str, timedelta]:
        """Let NCCL log into a file in memory."""
        may_use_nccl = on_cuda(args.device) and args.backend != "gloo"
        if may_use_nccl and not user_logs():
            start_log()
        return {}

    def __init__(self, bench: Benchmark) -> None:
        super().__init__(bench)
        self.network = ""  # of this rank, from NCCL's log
        self.networks: list[str] = []  # of each rank, e.g. `IB (8 devices)`, on rank 0
        if bench.job.backend == "gloo":
            self.networks = bench.job.gather(gloo_network()) or []
            if bench.is_first and bench.report.environment["num_nodes"] > 1:
                bench.print(f"# network: {summary(self.networks)}")

    def after(self, key: Key, work: Workload, times: Times, group: Group) -> str:
        self.network = self.network or read_log()
        return self.network

    def row(self, case: Case, seen: list[Any]) -> list[str]:
        if not any(seen) or len(seen) <= len(self.networks):
            return []  # unknown, or known from a case with as many ranks
        self.networks = seen
        lines = [f"network: {summary(seen)}"]
        if self.bench.report.environment["num_nodes"] > 1 and any(
            text.startswith("Socket") for text in seen
        ):
            lines.append("warning: NCCL uses TCP sockets between nodes, no RDMA network such as IB")
        return lines

    def end(self, last_line: dict[str, Any]) -> list[str]:
        if self.networks:
            last_line["network"] = summary(self.networks)
        return []


def add_flag(parser: Parser) -> None:
    parser.add_argument(
        "--expect-network",
        metavar="NAME",
        help="exit with status 1 unless all ranks use this network: with NCCL e.g. IB, Socket or "
        "the name of a plugin, with gloo an interface such as eth0",
    )


def unexpected(bench: Benchmark, expected: str | None) -> str:
    """Return why the networks of the ranks are not the expected one; "" if they are, or if none is
    expected. Rank 0 calls it."""
    networks = [
        name for each in bench.observers if isinstance(each, Network) for name in each.networks
    ]
    return mismatch(networks, expected) if expected else ""


def mismatch(networks: Sequence[str], expected: str) -> str:
    """Return why the networks of the ranks are not the expected one; "" if they are."""
    begin = f"expected --expect-network {expected}"
    if not any(networks):
        return f"{begin}, but the network is unknown: NCCL_DEBUG must not be set"
    for rank, network in enumerate(networks):
        name = network.partition(" (")[0].partition(",")[0]
        if name.casefold() != expected.casefold():
            return f"{begin}, got {network or 'an unknown one'} on rank {rank}"
    return ""


def user_logs() -> bool:
    """Whether the user has set a variable of NCCL's log, in the environment or a configuration."""
    if any(name.startswith("NCCL_DEBUG") for name in os.environ):
        return True
    for path in CONFIGURATIONS:
        with suppress(OSError):
            if "NCCL_DEBUG" in path.read_text(errors="replace"):
                return True
    return False


def start_log() -> None:
    """Set the variables of NCCL's log. By its path, NCCL opens the file in memory a second time."""
    global log_fd
    fd = os.memfd_create("nccl")
    path = f"/proc/{os.getpid()}/fd/{fd}"
    if not os.access(path, os.W_OK):  # without /proc, NCCL would log to stdout
        os.close(fd)
        return
    log_fd = fd
    os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET", "NCCL_DEBUG_FILE": path}


def read_log() -> str:
    """Return the network that NCCL has logged, and close the log; "" as long as there is none.
    Processes that this one starts afterwards do not log."""
    global log_fd
    if log_fd is None:
        return ""
    text = os.pread(log_fd, os.fstat(log_fd).st_size, 0).decode(errors="replace")
    if not (network := describe(text)):
        return ""
    os.close(log_fd)
    log_fd = None
    for name in ("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE"):
        os.environ.pop(name, None)
    return network


def describe(log: str) -> str:
    """Return `IB (8 devices, GPUDirect RDMA), NVLS, plugin v9`, or `Socket (eth0)`; "" if the log
    does not name a network.

    The forms are those of NCCL 2.18 to 2.30: init.cc, graph/topo.cc, transport/net_ib,
    transport/net_socket.cc, transport/nvls.cc and plugin/net.
    """
    names = re.findall(r"NCCL INFO Using network (.+?)\s*$", log, re.MULTILINE)
    if not names:
        return ""
    name, details = names[-1], list[str]()
    if name.startswith("Socket"):
        interfaces = re.findall(r"NET/Socket : Using (.+)", log)
        details += re.findall(r"\[\d+\]([^\s:]+):", interfaces[-1] if interfaces else "")
    elif devices := re.findall(r"NET/IB : Using (.+?)(?:; OOB|$)", log, re.MULTILINE):
        links = re.findall(r"\[\d+\]\S+?:\d+/(\w+)", devices[-1])
        roce = ["RoCE"] if set(links) == {"RoCE"} else []
        details = [f"{len(links)} device{'s' * (len(links) != 1)}", *roce]
    found = re.findall(r"NET/(.+?) : GPU Direct RDMA (Enabled|Disabled) for HCA (\d+)", log)
    direct = {number: state == "Enabled" for net, state, number in found if net == name}
    if direct and name != "Socket":
        count = sum(direct.values())
        some = f"GPUDirect RDMA on {count} of {len(direct)}" if count else "no GPUDirect RDMA"
        details.append("GPUDirect RDMA" if count == len(direct) else some)
    parts = [f"{name} ({', '.join(details)})" if details else name]
    if re.search(r"NVLS multicast support is available", log):
        parts.append("NVLS")
    plugins = re.findall(r"NET/Plugin: Loaded net plugin .+ \((v\d+)\)", log)
    if plugins and name not in INTERNAL:
        parts.append(f"plugin {plugins[-1]}")
    return ", ".join(parts)


def gloo_network() -> str:
    """Return the interface of gloo on this rank and its speed: `eth0 (10 Gbit/s)`."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    state = psutil.net_if_stats().get(interface)
    return f"{interface} ({state.speed / 1000:g} Gbit/s)" if state and state.speed else interface


def summary(networks: Sequence[str]) -> str:
    """Return the network of all ranks; if it differs, each one with its ranks."""
    ranks_of: dict[str, list[int]] = {}
    for rank, network in enumerate(networks):
        ranks_of.setdefault(network or "unknown", []).append(rank)
    if len(ranks_of) == 1:
        return next(iter(ranks_of))
    return "; ".join(f"{network} on rank {cut(ranks)}" for network, ranks in ranks_of.items())
