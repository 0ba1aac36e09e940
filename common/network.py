"""Addresses, routes and ports of this host, by the standard library."""

import contextlib
import fcntl
import ipaddress
import socket
import struct
import time
from pathlib import Path
from typing import Final

SIOCGIFADDR: Final = 0x8915  # of Linux: an interface's IPv4 address
LISTEN: Final = "0A"  # a state in /proc/net/tcp


def addresses_of(host: str) -> list[str]:
    """The addresses that a name has here. Raises OSError where it has none."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def is_own(address: str) -> bool:
    """Whether the address is one of this host's."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def address_towards(host: str) -> str | None:
    """The IPv4 address that the kernel sends from to reach a host; None without a route."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # sends nothing: it only chooses the route
            own: str = probe.getsockname()[0]
            return own
    except OSError:
        return None


def interface_towards(host: str) -> str | None:
    """The network interface whose IPv4 address the kernel sends from to reach a host.

    None where there is no such route, or the address is not known.
    """
    own = address_towards(host)
    if own is None:
        return None
    for _, name in socket.if_nameindex():
        if address_of(name) == own:
            return name
    return "lo" if own.startswith("127.") else None


def address_of(interface: str) -> str | None:
    """The IPv4 address of an interface; None where it has none."""
    request = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


def unreachable(addresses: list[str], port: int, patience: float, refusal: float) -> str | None:
    """Why none of the addresses can be connected to; None once one can.

    Seconds to go on trying: `patience` where nothing answers, `refusal` where a host says no.
    """
    start = time.monotonic()
    while True:
        for address in addresses:
            try:
                socket.create_connection((address, port), timeout=min(patience, 5)).close()
                return None
            except OSError as error:
                why = error
        limit = refusal if isinstance(why, ConnectionRefusedError) else patience
        if time.monotonic() - start > limit:
            return why.strerror or "no answer"
        time.sleep(0.2)


def free_port() -> int:
    """A TCP port that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port


def listener_on(port: int) -> str:
    """The process that listens on a TCP port of this host, as far as it can be seen."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                    inodes.add(f"socket:[{fields[9]}]")
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if any(str(link.readlink()) in inodes for link in (process / "fd").iterdir()):
                words = (process / "cmdline").read_text().split("\0")
                return f"process {process.name} ({' '.join(words).strip()[:60]})"
    return "a process of another user"
