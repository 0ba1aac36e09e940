"""A real Slurm on this machine, whose nodes have separate networks, host names and processes.

    with Lab(folder, nodes=3) as lab:
        lab.run(1, "hostname").stdout                  # node1
        job = lab.sbatch("-N2", "--wrap", "srun hostname")

Nodes are sets of Linux namespaces (network, host name, mounts, processes). Node 0 is the controller
with munged, slurmctld and the bridge. node1 is 10.77.0.1 and has slurmd and sshd. The machine's own
network is not touched, and its files are the shared file system. All nodes end with the process
that started them. Needs root.
"""

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

SCRIPT = "benchmarks/collectives.py"  # the script with the fewest imports
SMALL = "--collective all_reduce,broadcast -b 64 -e 64 --cache-warm --device cpu --iters 6"
# 8 cases of 1 s each: a fault strikes while the second case is measured
LONG = "-b 64 -e 8K --cache-warm --device cpu --target-ci 0.01% --max-seconds 1"

NETWORK, CONTROLLER = "10.77.0", 254
NAMESPACES = ("--mount", "--uts", "--ipc", "--net", "--pid")
DIE = ("setpriv", "--pdeathsig", "KILL")  # when the process that started it ends
TOOLS = ["slurmctld", "slurmd", "sbatch", "munged", "unshare", "nsenter", "ip", "tc", "iptables"]
TOOLS += ["sshd", "ssh", "ssh-keygen"]
PATH = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
# the address of a node's own name in its /etc/hosts: 127.0.1.1, as on Debian, or localhost
OWN_NAME = {"debian": "127.0.1.1", "loopfqdn": "127.0.0.1 localhost"}
OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")

# the first process of a node: bash, which reaps orphans. When its stdin ends, the node ends
FIRST = r"""
set -eu
folder=$1 name=$2 address=$3
hostname "$name"
mount --bind "$folder/hosts-$name" /etc/hosts
mount -t tmpfs tmpfs /dev/shm
[ ! -e ~/.bashrc ] || mount --bind /dev/null ~/.bashrc # bash under sshd would run it
ip link set lo up
if [ "$name" = ctl ]; then
    mount -t tmpfs -o size=1m tmpfs "$folder/disk"
    ip link add eth0 type bridge
else
    until ip link show eth0 >/dev/null 2>&1; do sleep .01; done
fi
ip address add "$address/24" dev eth0
ip link set eth0 up
if [ "$name" = ctl ]; then
    m=$folder/munge
    munged -F --force --key-file="$m/key" --pid-file="$m/pid" --seed-file="$m/seed" \
        --log-file="$m/log" --socket="$m/socket" </dev/null >"$folder/log/munged" 2>&1 &
    until [ -S "$m/socket" ]; do sleep .02; done
    slurmctld -D -c </dev/null >"$folder/log/slurmctld" 2>&1 &
else
    slurmd -D -N "$name" </dev/null >"$folder/log/slurmd-$name" 2>&1 &
    "$(command -v sshd)" -f "$folder/sshd.conf" -E "$folder/log/sshd-$name"
fi
echo ready
read -r _
"""

SLURM_CONF = """
ClusterName=lab
SlurmctldHost=ctl({network}.{controller})
SlurmUser=root
SlurmdUser=root
AuthInfo=socket={folder}/munge/socket
ProctrackType=proctrack/linuxproc
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/builtin
SchedulerParameters=batch_sched_delay=0,sched_interval=1
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=10
KillWait=10
MessageTimeout=5
SlurmctldPidFile={folder}/log/slurmctld.pid
SlurmdPidFile={folder}/log/slurmd-%n.pid
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
NodeName=node[1-{nodes}] NodeAddr={network}.[1-{nodes}] CPUs=16 RealMemory=8000
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
SSHD_CONF = """
HostKey {folder}/key
AuthorizedKeysFile {folder}/key.pub
PidFile none
StrictModes no
"""
SSH_CONF = """
IdentityFile {folder}/key
UserKnownHostsFile /dev/null
StrictHostKeyChecking no
LogLevel ERROR
"""


def need(*tools: str, root: bool = False) -> None:
    """Skip the test if a tool is missing, and say which; in CI, fail instead."""
    missing = [tool for tool in tools if not shutil.which(tool, path=PATH)]
    reason = f"needs {', '.join(missing)} (.ci/packages.txt)" if missing else ""
    if root and os.geteuid() != 0:
        reason = "needs root, for namespaces"
    if reason:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)


def until(what: Callable[[], Any], explain: Callable[[], str], seconds: float = 300) -> Any:
    """Wait until `what` returns something true, and return that. The limit, after which the test
    fails, only ends a hang."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := what():
            return found
        time.sleep(0.2)
    pytest.fail(f"not within {seconds:g} s\n{explain()}")


class Lab:
    """The cluster. All nodes share the folder `disk` of 1 MB; only commands of `run` see it."""

    def __init__(self, folder: Path, nodes: int) -> None:
        self.folder, self.disk, self.ssh_conf = folder, folder / "disk", folder / "ssh.conf"
        self.nodes = range(1, nodes + 1)
        self.started: dict[int, psutil.Popen] = {}
        self.first: dict[int, int] = {}  # this machine's pid of each node's first process
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "PYTEST"))}
        self.env |= {"PATH": PATH, "SLURM_CONF": f"{folder}/slurm.conf", "OMP_NUM_THREADS": "1"}

    def __enter__(self) -> "Lab":
        for name in ("log", "munge", "state", "disk", *(f"spool/node{n}" for n in self.nodes)):
            (self.folder / name).mkdir(parents=True)
        for path in (self.folder, self.folder / "munge"):
            path.chmod(0o755)  # munged requires it
        (self.folder / "munge/key").write_bytes(secrets.token_bytes(128))
        (self.folder / "munge/key").chmod(0o600)
        keygen = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / "key")]
        subprocess.run(keygen, check=True, timeout=500)
        Path("/run/sshd").mkdir(exist_ok=True)  # sshd requires it
        facts = {"folder": self.folder, "network": NETWORK, "controller": CONTROLLER}
        for name, text in (("slurm", SLURM_CONF), ("sshd", SSHD_CONF), ("ssh", SSH_CONF)):
            text = text.format(nodes=len(self.nodes), **facts)
            (self.folder / f"{name}.conf").write_text(text)
        try:
            self.names("plain")
            for node in (0, *self.nodes):
                self.start(node)
            self.until_idle()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.started.values():
            process.kill()  # unshare; the node's first process ends with it
            process.wait(10)

    # -- nodes -------------------------------------------------------------------------------------

    def name(self, node: int) -> str:
        return f"node{node}" if node else "ctl"

    def names(self, style: str) -> None:
        """Change the nodes' /etc/hosts: to `plain`, to a style of OWN_NAME, or to `none`, with
        which no node knows any name."""
        addresses = {n: f"{NETWORK}.{n or CONTROLLER}" for n in (0, *self.nodes)}
        for node in addresses:
            known = {} if node and style == "none" else dict(addresses)
            if node and style in OWN_NAME:
                known[node] = OWN_NAME[style]
            lines = [f"{address} {self.name(other)}" for other, address in known.items()]
            # in place, because the nodes have mounted this file
            path = self.folder / f"hosts-{self.name(node)}"
            path.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))

    def start(self, node: int) -> None:
        """Start a node, for the first time or after a power cut."""
        words = [str(self.folder), self.name(node), f"{NETWORK}.{node or CONTROLLER}"]
        unshare = ["unshare", *NAMESPACES, "--fork", "--kill-child", "--mount-proc", "bash", "-c"]
        with (self.folder / "log" / f"first-{self.name(node)}").open("ab") as log:
            process = self.started[node] = psutil.Popen(
                [*(self.enter(0) if node else DIE), *unshare, FIRST, "first", *words],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=self.env,
            )

        def first() -> int | None:
            below = process.children(recursive=True)
            return next((child.pid for child in below if child.name() == "bash"), None)

        pid = self.first[node] = until(first, self.logs)
        if node:
            with contextlib.suppress(subprocess.CalledProcessError):  # left by a power cut
                self.network(0, "ip", "link", "del", f"veth{node}")
            address = f"02:00:00:00:00:{node:02x}"  # the same after a restart, as on a real machine
            peer = ("peer", "name", "eth0", "address", address, "netns", str(pid))
            self.network(0, "ip", "link", "add", f"veth{node}", "type", "veth", *peer)
            self.network(0, "ip", "link", "set", f"veth{node}", "master", "eth0", "up")
        assert process.stdout.readline() == b"ready\n", self.logs()

    def enter(self, node: int) -> list[str]:
        """The words before a command that make it run on a node."""
        return ["nsenter", "--target", str(self.first[node]), *NAMESPACES, "--wdns=/", *DIE]

    def run(
        self, node: int, *command: str, cwd: str | Path = "/", **env: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a node and wait for its end."""
        inside = ["env", "-C", str(cwd), *(f"{k}={v}" for k, v in env.items())]
        return subprocess.run(
            [*self.enter(node), *inside, *command],
            env=self.env,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=500,
        )

    def network(self, node: int, *command: str) -> None:
        """Run a command of this machine in a node's network."""
        enter = ["nsenter", "--target", str(self.first[node]), "--net"]
        subprocess.run([*enter, *command], check=True, capture_output=True, env=self.env)

    def processes(self, node: int) -> list[psutil.Process]:
        """The processes of a node, without its daemons and without commands of `run`."""
        daemons, found = ("slurm", "munged", "sshd"), []
        for process in psutil.Process(self.first[node]).children(recursive=True):
            with contextlib.suppress(psutil.Error):  # ended meanwhile
                words = process.cmdline()
                if words and not words[0].split("/")[-1].startswith(daemons):
                    found.append(process)
        return found

    def ranks(self, node: int) -> dict[int, psutil.Process]:
        """The ranks of SCRIPT on a node."""
        ranks = {}
        for process in self.processes(node):
            with contextlib.suppress(psutil.Error):  # ended meanwhile
                variables = process.environ()
                if SCRIPT in process.cmdline()[1:3] and "RANK" in variables:
                    ranks[int(variables["RANK"])] = process
        return ranks

    # -- faults ------------------------------------------------------------------------------------

    def power_cut(self, node: int) -> None:
        os.kill(self.first[node], signal.SIGKILL)
        self.started.pop(node).wait()

    def link_down(self, node: int) -> None:
        self.network(0, "ip", "link", "set", f"veth{node}", "down")

    def drop(self, node: int, peer: int) -> None:
        """Lose all packets between two nodes without any error."""
        for way in (("INPUT", "-s"), ("OUTPUT", "-d")):
            self.network(node, "iptables", "-A", *way, f"{NETWORK}.{peer}", "-j", "DROP")

    def heal(self) -> None:
        """Undo these three, and wait until Slurm has all nodes again."""
        for node in self.nodes:
            if node not in self.started:
                self.start(node)
            self.network(0, "ip", "link", "set", f"veth{node}", "up")
            self.network(node, "iptables", "-F")
        self.until_idle()

    # -- Slurm -------------------------------------------------------------------------------------

    def sbatch(self, *arguments: str, cwd: str | Path = "/", **env: str) -> str:
        """Submit a job from the controller; return its id."""
        done = self.run(0, "sbatch", "--parsable", *arguments, cwd=cwd, **env)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def state(self, job: str) -> str:
        text = self.run(0, "scontrol", "-o", "show", "job", job).stdout
        return text.partition("JobState=")[2].partition(" ")[0]

    def until_over(self, job: str, explain: Callable[[], str]) -> str:
        """Wait until a job ends; return its state, one of OVER."""
        until(lambda: self.state(job) in OVER, lambda: f"{self.state(job)}\n{explain()}")
        return self.state(job)

    def until_idle(self) -> None:
        """Wait until all nodes are up and no job runs."""

        def idle() -> bool:
            # without `timeout`, sinfo waits a minute for a controller that is not up yet
            states = self.run(0, "timeout", "2", "sinfo", "-hNo", "%T").stdout.split()
            return states == ["idle"] * len(self.nodes)

        until(idle, self.logs)

    def logs(self) -> str:
        files = sorted(path for path in (self.folder / "log").iterdir() if path.suffix != ".pid")
        return "\n".join(f"-- {f.name}\n{f.read_text(errors='replace')[-600:]}" for f in files)
