"""Errors that the network hides by sending again: counters of each node, at the start and the end.

They count what all programs on the node did, not only this run. Each is a sum since the node or
its driver was started, so only the growth within a run tells something.
"""

from pathlib import Path
from typing import Any

from common.cli import cut
from common.groups import Job, gather

# A counter of InfiniBand or RoCE counts if its name has one of these. `cnp` are a receiver's
# requests to send more slowly.
WORDS = ("err", "discard", "drop", "retrans", "timeout", "out_of_seq", "cnp", "link_downed")
FLUSH = "flush"  # these grow when a connection is closed as it should be
INTERFACE = (
    *("rx_bytes", "rx_packets", "rx_errors", "rx_drops", "rx_fifo", "rx_frame", "rx_compressed"),
    *("rx_multicast", "tx_bytes", "tx_packets", "tx_errors", "tx_drops"),
)  # the columns of /proc/net/dev, as far as they are used
RESENT, NEEDLESS = "RetransSegs", "TCPDSACKRecv"  # of TCP, in the kernel's words
COUNTED = ("rx_errors", "rx_drops", "tx_errors", "tx_drops")
MOST_LINES = 16  # of nodes that are printed

Counters = dict[str, int]  # `mlx5_3/1 out_of_sequence` -> how often


def read(root: Path = Path("/")) -> Counters:
    """The error counters of this node. What the system does not have is not in it.

    root: where /proc and /sys are.
    """
    counters = Counters()
    for kind in ("counters", "hw_counters"):
        for path in root.glob(f"sys/class/infiniband/*/ports/*/{kind}/*"):
            name = path.name.lower()
            if FLUSH in name or not any(word in name for word in WORDS):
                continue
            port = path.parents[1]
            try:
                counters[f"{port.parents[1].name}/{port.name} {path.name}"] = int(path.read_text())
            except (OSError, ValueError):  # a driver lists counters that it does not have
                continue
    return counters | tcp(root) | interfaces(root)


def tcp(root: Path) -> Counters:
    """The TCP segments that this network namespace sent again, and those that came twice by it."""
    counters = Counters()
    for path, kind, field in (("snmp", "Tcp:", RESENT), ("netstat", "TcpExt:", NEEDLESS)):
        try:
            lines = (root / "proc/net" / path).read_text().splitlines()
        except OSError:
            continue
        names, values = (line.split() for line in lines if line.startswith(kind))
        counters[field] = int(dict(zip(names, values, strict=True))[field])
    return counters


def interfaces(root: Path) -> Counters:
    """Errors and drops of each network interface but loopback."""
    try:
        lines = (root / "proc/net/dev").read_text().splitlines()[2:]  # after two lines of header
    except OSError:
        return {}
    counters = Counters()
    for line in lines:
        name, _, numbers = line.strip().partition(":")
        row = dict(zip(INTERFACE, numbers.split(), strict=False))
        if name != "lo":
            counters |= {f"{name} {field}": int(row[field]) for field in COUNTED}
    return counters


def growth(before: Counters, after: Counters) -> Counters:
    """What grew between two readings, and by how much; the largest comes first."""
    grew = Counters()
    for name, count in after.items():
        # a counter that fell was reset, e.g. with its driver: since then it has counted `count`
        more = count - before.get(name, count)
        grew[name] = count if more < 0 else more
    ordered = sorted(grew.items(), key=lambda item: -item[1])
    return {name: more for name, more in ordered if more > 0}


def at_the_end(
    job: Job, environment: dict[str, Any], before: Counters
) -> tuple[dict[str, Any], list[str]]:
    """What grew on each node since `before`: an entry for the report's last line, and lines to
    print. All ranks call it. Both are empty on all ranks but rank 0.

    environment: that of the report. before: what `read` returned on this node, on its first rank.
    A run on one node prints nothing: then its data did not go over the network.
    """
    row = None  # only the first rank of a node speaks for it
    if job.local_rank == 0:
        after = read()
        row = {"counters": len(after), "grew": growth(before, after)}
    nodes = [row for row in gather(row) or [] if row]
    if not nodes:
        return {}, []
    lines = lines_of(environment["hosts"], [serious(node["grew"]) for node in nodes])
    return {"network": nodes}, lines if len(nodes) > 1 else []


def serious(grew: Counters) -> Counters:
    """What is worth a line: all but the TCP segments that were sent again for nothing.

    A host that is busy acknowledges late, and then its peer sends again although nothing was lost.
    The receiver of a segment that comes twice tells the sender so (DSACK, RFC 2883).
    """
    counters = {name: count for name, count in grew.items() if name not in (RESENT, NEEDLESS)}
    lost = grew.get(RESENT, 0) - grew.get(NEEDLESS, 0)
    return {"TCP segments sent again": lost, **counters} if lost > 0 else counters


def lines_of(hosts: list[str], grew: list[Counters]) -> list[str]:
    """A line for each host of which a counter grew; the host with the largest sum comes first."""
    by_host = dict(zip(hosts, grew, strict=False))  # nodes of one host count the same
    worst_first = sorted(by_host, key=lambda host: -sum(by_host[host].values()))
    lines = []
    for host in worst_first:
        counts = [f"{more:,} {name}" for name, more in by_host[host].items()]
        if counts:
            lines.append(f"warning: {host} counted during the run: {cut(counts)}")
    if more := len(lines[MOST_LINES:]):
        return [*lines[:MOST_LINES], f"... and {more:,} more nodes"]
    return lines
