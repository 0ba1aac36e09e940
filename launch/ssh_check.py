"""What ssh_torchrun.sh has to know of a host before it starts anything there.

    ssh HOST python3 - ROOT CWD PORT [FILE=DIGEST...] < ssh_check.py

Read from stdin, because the host's checkout may be what is wrong, and by whatever python there is:
standard library only, in the syntax of Python 3.6. Prints lines whose fields are parted by tabs
and whose first one is `ssh_check`, since a login shell may print things of its own.
"""

import contextlib
import hashlib
import os
import platform
import socket
import sys
from pathlib import Path


def main(root: str, cwd: str, port: str, *files: str) -> None:
    for problem in look(root, cwd, files):
        say("problem", problem)
    torch, devices = "-", 0
    sys.path[:] = [entry for entry in sys.path if entry]  # not what lies in the home folder
    try:
        import torch as found

        torch, devices = str(found.__version__), found.cuda.device_count()
    except Exception as error:  # a broken torch raises anything
        reason = f"{type(error).__name__}: {error}"
        say("problem", f"no torch in {sys.executable}: {reason[:200]}; give --venv DIR")
    # client address, its port, server address, its port: of the connection, as sshd sees it
    connection = os.environ.get("SSH_CONNECTION", "- - - -").split()
    say("facts", torch, devices, free_port(int(port)), connection[0], connection[2], machine())


def look(root: str, cwd: str, files: "tuple[str, ...]") -> "list[str]":
    """What differs from the host where ssh_torchrun.sh runs."""
    problems = []
    if sys.version_info < (3, 10):  # noqa: UP036
        version = platform.python_version()
        problems.append(
            f"{sys.executable} is Python {version}, needed is 3.10 or newer; give --venv DIR"
        )
    if not Path(root).is_dir():
        problems.append(f"no folder {root}: the checkout must be at one path everywhere")
    else:
        pairs = [file.rpartition("=") for file in files]
        other = [name for name, _, expected in pairs if digest(root, name) != expected]
        if other:
            more = f" and {len(other) - 3} more" if len(other) > 3 else ""
            names = ", ".join(other[:3])
            problems.append(f"not the same checkout in {root}: {names}{more} differ")
    if not Path(cwd).is_dir():
        problems.append(f"no folder {cwd}, where ssh_torchrun.sh was started")
    return problems


def digest(root: str, name: str) -> str:
    """The start of a file's SHA-256."""
    try:
        return hashlib.sha256(Path(root, name).read_bytes()).hexdigest()[:16]
    except OSError:
        return "missing"


def free_port(port: int) -> int:
    """`port` where it can be listened on, 0 where it is taken; for port 0 a free one."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
            probe.listen(1)
        except OSError:
            return 0
        return int(probe.getsockname()[1])


def machine() -> str:
    """What two names of one machine have in common."""
    boot = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()} {boot}"


def say(*fields: object) -> None:
    print("\t".join(["ssh_check"] + [" ".join(str(field).split()) or "-" for field in fields]))


main(*sys.argv[1:])
