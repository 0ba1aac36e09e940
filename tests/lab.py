"""A small cluster on this machine: nodes with a network, a host name and processes of their own.

    with Lab(folder, nodes=2) as lab:
        lab.run(1, ["hostname"]).stdout                  # node1
        job = lab.sbatch(["-N2", "--wrap", "srun hostname"])

The lab is a set of Linux namespaces (network, host name, mounts, processes). Within it lie the
bridge and the controller, node 0, and one more set for each node: 10.77.0.1 is node1. Nothing of
it touches the machine's own network, so that labs can run side by side. The files of the machine
are its shared file system. All of it ends with the process that started it, even with a SIGKILL:
the first process of the lab reads from a pipe that then closes, and takes the others along.

With `slurm` there is a real Slurm: munged and slurmctld on node 0, a slurmd on each other node.
Needs root, Linux, iproute2 and util-linux, for Slurm Debian's slurm-wlm and munge.
"""

import contextlib
import os
import secrets
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from harness import children, environment

NETWORK = "10.77.0"
CONTROLLER = 254  # its address
NAMESPACES = ("--mount", "--uts", "--ipc", "--net", "--pid")
CGROUPS = Path("/sys/fs/cgroup")
# What a node's own name is in its /etc/hosts: its address; 127.0.1.1, as Debian has it; 127.0.0.1.
# With none, no name of another node is known, either.
HOSTS = ("plain", "debian", "loopback", "none")

# The first process of the lab and of each node: the last line ends when the pipe closes. Bash
# reaps the orphans meanwhile. When the first process of a pid namespace ends, so do all others.
FIRST = r"""
set -eu
folder=$1 name=$2 address=$3 slurm=$4
hostname "$name"
mount --bind "$folder/hosts-$name" /etc/hosts
mount -t tmpfs tmpfs /dev/shm
ip link set lo up
if [ "$name" = ctl ]; then
    mkdir -p "$folder/disk"
    mount -t tmpfs -o size=1m tmpfs "$folder/disk"
    ip link add eth0 type bridge
else
    until ip link show eth0 >/dev/null 2>&1; do sleep .01; done
fi
ip address add "$address/24" dev eth0
ip link set eth0 up
if [ "$slurm" = yes ] && [ "$name" != ctl ]; then
    slurmd -D -N "$name" -f "$folder/slurm.conf" </dev/null >"$folder/log/slurmd-$name" 2>&1 &
fi
echo ready
read -r _
"""

SLURM_CONF = """
ClusterName=lab
SlurmctldHost=ctl({network}.{controller})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
TaskPluginParam=None
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/builtin
SchedulerParameters=batch_sched_delay=0
SwitchType=switch/none
SlurmdParameters=config_overrides
ReturnToService=2
SlurmctldTimeout=30
SlurmdTimeout=10
KillWait=10
MessageTimeout=5
SlurmctldPidFile={folder}/run/slurmctld
SlurmdPidFile={folder}/run/slurmd-%n
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
GresTypes=gpu
NodeName=node[1-{nodes}] NodeAddr={network}.[1-{nodes}] CPUs=16 RealMemory=8000 Gres=gpu:4
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def why_not(slurm: bool = True) -> str | None:
    """Why there can be no lab here, or None."""
    tools = {
        "util-linux": ("unshare", "nsenter", "setpriv"),
        "iproute2": ("ip", "tc"),
        "iptables": ("iptables",),
    }
    if slurm:
        tools |= {"slurm-wlm": ("slurmctld", "slurmd", "sbatch", "srun"), "munge": ("munged",)}
    if os.geteuid() != 0:
        return "needs root, for namespaces"
    for package, names in tools.items():
        for name in names:
            if shutil.which(name, path=search_path()) is None:
                return f"needs {name}: apt-get install --no-install-recommends {package}"
    tried = subprocess.run(
        ["unshare", *NAMESPACES, "--fork", "--mount-proc", "true"], capture_output=True, text=True
    )
    return f"needs namespaces: {tried.stderr.strip()}" if tried.returncode else None


def search_path() -> str:
    """Of the lab's commands: torchrun is that of this Python, and some tools are root's."""
    paths = (str(Path(sys.executable).parent), os.environ.get("PATH", ""))
    return ":".join((*paths, "/usr/sbin:/sbin:/usr/bin:/bin"))


class Lab:
    """The cluster; a context manager. Nodes are numbered from 1; 0 is the controller.

    folder: an empty one for its files; /etc/hosts of each node is made from `hosts`, of HOSTS.
    `disk` is a folder on all nodes with room for 1 MB, to be looked at with `run`.
    """

    def __init__(self, folder: Path, nodes: int, slurm: bool = True, hosts: str = "plain") -> None:
        self.folder = folder
        self.nodes = range(1, nodes + 1)
        self.slurm = slurm
        self.hosts = hosts
        self.disk = folder / "disk"
        self._variables = [f"PATH={search_path()}"]
        self._variables += [f"SLURM_CONF={folder}/slurm.conf"] if slurm else []
        self._started: dict[int, subprocess.Popen[bytes]] = {}
        self._first: dict[int, int] = {}  # the pid, on this machine, of each node's first process
        self._cgroups: dict[int, Path] = {}

    def __enter__(self) -> "Lab":
        try:
            self._start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop()

    # -- nodes -------------------------------------------------------------------------------------

    def name(self, node: int) -> str:
        return f"node{node}" if node else "ctl"

    def address(self, node: int) -> str:
        return f"{NETWORK}.{node or CONTROLLER}"

    def command(self, node: int, command: Sequence[str], cwd: Path | None = None) -> list[str]:
        """The command that runs `command` on a node, e.g. for harness.launch.

        It dies with the process that starts it. cwd: by default the root folder.
        """
        return [*self._enter(node, cwd), "setpriv", "--pdeathsig", "KILL", *command]

    def _enter(self, node: int, cwd: Path | None = None) -> list[str]:
        enter = ["nsenter", "--target", str(self._first[node]), *NAMESPACES]
        if node in self._cgroups:  # what runs there has passed it on; this comes from outside
            join = 'echo $$ >"$0/cgroup.procs"; exec "$@"'
            enter = ["sh", "-c", join, str(self._cgroups[node]), *enter]
        return [*enter, "env", "-C", str(cwd or "/"), *self._variables]

    def run(
        self, node: int, command: Sequence[str], timeout: float = 60, cwd: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a node to its end."""
        return subprocess.run(
            self.command(node, command, cwd),
            env=environment(),
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=timeout,
        )

    def processes(self, node: int) -> dict[int, list[str]]:
        """What runs on a node: pid on this machine, and command line. Without its daemons."""
        daemons = ("slurmd", "slurmstepd:", "slurmctld", "munged", "sshd:")
        found = {}
        for pid in self._pids(node):
            with contextlib.suppress(OSError):  # ended meanwhile
                words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")[:-1]
                if words and Path(words[0].split()[0]).name not in daemons:
                    found[pid] = words
        del found[self._first[node]]
        return found

    def _pids(self, node: int) -> list[int]:
        """All processes of a node, on this machine."""
        space = Path(f"/proc/{self._first[node]}/ns/pid").readlink()
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdecimal() and (entry / "ns/pid").readlink() == space:
                    found.append(int(entry.name))
        return found

    def ranks(self, node: int) -> dict[int, int]:
        """The pid on this machine of each global rank that runs on a node."""
        found: dict[int, int] = {}  # of each pid the rank; a rank's children have it too
        for pid in self.processes(node):
            with contextlib.suppress(OSError):
                for variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    if variable.startswith(b"RANK="):
                        found[pid] = int(variable.partition(b"=")[2])
        started = {child for pid in found for child in children(pid)}
        return {rank: pid for pid, rank in found.items() if pid not in started}

    # -- faults ------------------------------------------------------------------------------------

    def power_cut(self, node: int) -> None:
        """End a node and everything on it at once."""
        os.kill(self._first[node], signal.SIGKILL)
        self._started.pop(node).wait(10)

    def restart(self, node: int, hosts: str | None = None) -> None:
        """Start a node, after a power cut if it runs; hosts: what is in its /etc/hosts from now."""
        if node in self._started:
            self.power_cut(node)
        self.hosts = hosts or self.hosts
        self._start_node(node)

    def link_down(self, node: int) -> None:
        """Pull the cable of a node."""
        self._in_network(0, f"ip link set veth{node} down")

    def drop(self, node: int, peer: int) -> None:
        """Lose all packets between two nodes, and tell neither."""
        for direction in ("INPUT -s", "OUTPUT -d"):
            self._in_network(node, f"iptables -A {direction} {self.address(peer)} -j DROP")

    def slow_link(self, node: int, rate: str) -> None:
        """Let a node's link carry no more than a rate of tc's, e.g. 10mbit, in each direction."""
        for where, device in ((0, f"veth{node}"), (node, "eth0")):
            limit = f"tbf rate {rate} burst 64kb latency 200ms"
            self._in_network(where, f"tc qdisc replace dev {device} root {limit}")

    def heal(self, node: int) -> None:
        """Undo the three above on this node."""
        self._in_network(0, f"ip link set veth{node} up")
        self._in_network(node, "iptables -F")
        for where, device in ((0, f"veth{node}"), (node, "eth0")):
            with contextlib.suppress(RuntimeError):  # there is none
                self._in_network(where, f"tc qdisc del dev {device} root")

    def slow_cpu(self, node: int, cores: float) -> None:
        """Let all that runs on a node, now and later, have no more than so many cores together.

        Raises RuntimeError where there is no cgroup to be had.
        """
        v1 = (CGROUPS / "cpu").is_dir()
        group = (CGROUPS / "cpu" if v1 else CGROUPS) / f"lab-{os.getpid()}-node{node}"
        quota = str(int(cores * 100_000))
        try:
            if not v1:
                (CGROUPS / "cgroup.subtree_control").write_text("+cpu")
            group.mkdir(exist_ok=True)
            self._cgroups[node] = group
            if v1:
                (group / "cpu.cfs_quota_us").write_text(quota)
            else:
                (group / "cpu.max").write_text(f"{quota} 100000")
            for _ in range(2):  # what was forked meanwhile is in the second round
                for pid in self._pids(node):
                    with contextlib.suppress(ProcessLookupError):
                        (group / "cgroup.procs").write_text(str(pid))
        except OSError as error:
            raise RuntimeError(f"no cgroup to limit the CPU with: {error}") from error

    def kill_rank(self, node: int, rank: int) -> None:
        """SIGKILL to the process of a global rank that runs on a node."""
        os.kill(self.ranks(node)[rank], signal.SIGKILL)

    # -- Slurm -------------------------------------------------------------------------------------

    def sbatch(self, arguments: Sequence[str], cwd: Path | None = None) -> str:
        """Submit a job from the controller; its id."""
        done = self.run(0, ["sbatch", "--parsable", *arguments], cwd=cwd)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def job(self, job: str) -> dict[str, str]:
        """What scontrol shows of a job, e.g. JobState and ExitCode."""
        done = self.run(0, ["scontrol", "-o", "show", "job", job])
        return dict(word.partition("=")[::2] for word in done.stdout.split())

    def wait_for_state(self, job: str, *states: str, timeout: float = 120) -> dict[str, str]:
        """Wait until a job is in one of these states, as squeue names them; what it then shows."""

        def arrived() -> bool:
            return self.job(job).get("JobState") in states

        wait_until(arrived, timeout, lambda: f"job {job}: {self.job(job)}")
        return self.job(job)

    def wait_for_end(self, job: str, timeout: float = 120) -> str:
        """Wait until a job is over; its state, e.g. COMPLETED, FAILED, CANCELLED, TIMEOUT."""
        ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "DEADLINE")
        return self.wait_for_state(job, *ended, timeout=timeout)["JobState"]

    # -- up and down -------------------------------------------------------------------------------

    def _start(self) -> None:
        for name in ("log", "run", "munge", "state", "spool", "dev"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        for folder in (self.folder, self.folder / "run", self.folder / "munge"):
            folder.chmod(0o755)  # munged insists
        if self.slurm:
            self._configure_slurm()
        self._start_node(0)
        if self.slurm:
            self._start_controller()
        for node in self.nodes:
            self._start_node(node)
        if self.slurm:
            wait_until(self._all_idle, 60, self._logs)

    def _stop(self) -> None:
        if 0 in self._started:
            self._started[0].kill()  # unshare: it takes the first process of the lab along
        for process in self._started.values():
            if process.stdin:
                process.stdin.close()
            process.wait(10)
        for group in self._cgroups.values():
            wait_until(lambda group=group: _removed(group), 10, lambda: "a cgroup is in use")  # type: ignore[misc]

    def _start_node(self, node: int) -> None:
        (self.folder / f"hosts-{self.name(node)}").write_text(self._hosts_file(node))
        unshare = ["unshare", *NAMESPACES, "--fork", "--kill-child", "--mount-proc"]
        words = [str(self.folder), self.name(node), self.address(node)]
        first = [*unshare, "bash", "-c", FIRST, "first", *words, "yes" if self.slurm else "no"]
        outer = ["setpriv", "--pdeathsig", "KILL", *first] if node == 0 else None
        with open(self.folder / "log" / f"first-{self.name(node)}", "wb") as log:
            process = self._started[node] = subprocess.Popen(
                outer or self.command(0, first),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment() | {"PATH": search_path()},
            )

        def descendant() -> int | None:
            # setpriv becomes unshare; nsenter has it as its child
            pid: int | None = process.pid
            for _ in range(1 if node == 0 else 2):
                pid = _only_child(pid) if pid else None
            return pid

        wait_until(descendant, 10, self._logs)
        pid = self._first[node] = descendant() or 0
        if node:
            with contextlib.suppress(RuntimeError):  # of one that has ended just now
                self._in_network(0, f"ip link del veth{node}")
            # a hardware address that outlives a restart, as a machine's does
            peer = f"peer name eth0 address 02:00:00:00:00:{node:02x} netns {pid}"
            self._in_network(0, f"ip link add veth{node} type veth {peer}")
            self._in_network(0, f"ip link set veth{node} master eth0 up")
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n", self._logs()

    def _hosts_file(self, node: int) -> str:
        name = self.name(node)
        style = "plain" if node == 0 and self.hosts != "none" else self.hosts
        # the first name on a line is what its address is called
        lines = ["127.0.0.1 localhost" + (f" {name}" if style == "loopback" else "")]
        lines += {"plain": [f"{self.address(node)} {name}"], "debian": [f"127.0.1.1 {name}"]}.get(
            style, []
        )
        others = [other for other in (0, *self.nodes) if other != node and style != "none"]
        lines += [f"{self.address(other)} {self.name(other)}" for other in others]
        return "\n".join(lines) + "\n"

    def _configure_slurm(self) -> None:
        for gpu in range(4):  # /dev/null by another name: Slurm counts them, torch sees none
            path = self.folder / "dev" / f"gpu{gpu}"
            if not path.exists():
                os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 3))
        (self.folder / "munge" / "key").write_bytes(secrets.token_bytes(128))
        (self.folder / "munge" / "key").chmod(0o600)
        numbers = {"nodes": len(self.nodes), "network": NETWORK, "controller": CONTROLLER}
        (self.folder / "slurm.conf").write_text(SLURM_CONF.format(folder=self.folder, **numbers))
        devices = f"NodeName=node[1-{len(self.nodes)}] Name=gpu File={self.folder}/dev/gpu[0-3]\n"
        (self.folder / "gres.conf").write_text(devices)
        for node in self.nodes:
            (self.folder / "spool" / self.name(node)).mkdir(exist_ok=True)

    def _start_controller(self) -> None:
        at = {
            name: f"{self.folder}/munge/{name}" for name in ("key", "socket", "pid", "seed", "log")
        }
        files = [f"--{name}-file={at[name]}" for name in ("key", "pid", "seed", "log")]
        self._daemon("munged", ["munged", "-F", "--force", *files, f"--socket={at['socket']}"])
        wait_until(lambda: Path(at["socket"]).exists(), 20, self._logs)
        self._daemon("slurmctld", ["slurmctld", "-D", "-c", "-f", f"{self.folder}/slurm.conf"])

    def _daemon(self, name: str, command: Sequence[str]) -> None:
        """Start what ends with the lab."""
        log = str(self.folder / "log" / name)
        detached = ["bash", "-c", 'exec "$@" </dev/null >"$0" 2>&1 &', log, *command]
        subprocess.run([*self._enter(0), *detached], check=True, timeout=20, env=environment())

    def _all_idle(self) -> bool:
        try:
            done = self.run(0, ["sinfo", "-h", "-N", "-o", "%T"], timeout=3)
        except subprocess.TimeoutExpired:  # the controller is not there yet
            return False
        return done.stdout.split() == ["idle"] * len(self.nodes)

    def _in_network(self, node: int, words: str) -> None:
        enter = ["nsenter", "--target", str(self._first[node]), "--net"]
        variables = environment() | {"PATH": search_path()}
        done = subprocess.run(
            [*enter, *shlex.split(words)], capture_output=True, text=True, env=variables
        )
        if done.returncode:
            raise RuntimeError(f"{words}: {done.stderr.strip()}")

    def _logs(self) -> str:
        tails = []
        for path in sorted((self.folder / "log").iterdir()):
            tails += [f"-- {path.name}", *path.read_text(errors="replace").splitlines()[-5:]]
        return "\n".join(tails)


# -- waiting ---------------------------------------------------------------------------------------


def wait_until(
    condition: Callable[[], Any], timeout: float, explain: Callable[[], str] = lambda: ""
) -> None:
    """Wait until it is so; an AssertionError with the explanation if it never is."""
    limit = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < limit, f"not within {timeout:g} s\n{explain()}"
        time.sleep(0.02)


def _only_child(pid: int) -> int | None:
    with contextlib.suppress(OSError):
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return int(children[0]) if children else None
    return None


def _removed(group: Path) -> bool:
    with contextlib.suppress(OSError):  # its processes are ending
        group.rmdir()
    return not group.exists()
