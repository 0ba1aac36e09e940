"""The lab itself: nodes apart from each other and from this machine; its faults; its end."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness import ROOT, alive, children
from lab import Lab, wait_until, why_not

pytestmark = pytest.mark.skipif(why_not(slurm=False) is not None, reason=str(why_not(slurm=False)))


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with Lab(tmp_path_factory.mktemp("lab"), nodes=2, slurm=False) as lab:
        yield lab


def reaches(lab: Lab, node: int, peer: int) -> bool:
    """Whether a connection from one node to another is answered, if with a refusal."""
    code = "import socket, sys; socket.create_connection((sys.argv[1], 9), timeout=1)"
    done = lab.run(node, [sys.executable, "-c", code, lab.address(peer)])
    assert done.returncode != 0
    return "ConnectionRefusedError" in done.stderr


def test_nodes_are_apart(lab: Lab, tmp_path: Path) -> None:
    assert lab.run(1, ["hostname"]).stdout == "node1\n"
    assert "10.77.0.2" in lab.run(2, ["ip", "address"]).stdout
    assert lab.run(1, ["getent", "hosts", "node2"]).stdout.split() == ["10.77.0.2", "node2"]
    assert len(lab.run(1, ["ps", "ax"]).stdout.splitlines()) < 8
    assert reaches(lab, 1, 2)
    assert reaches(lab, 2, 0)
    assert lab.run(2, ["pwd"], cwd=tmp_path).stdout == f"{tmp_path}\n"
    # this machine has neither the bridge nor the names
    assert "10.77.0" not in subprocess.run(["ip", "address"], capture_output=True, text=True).stdout


def test_two_labs_side_by_side(lab: Lab, tmp_path: Path) -> None:
    with Lab(tmp_path, nodes=1, slurm=False) as other:
        assert reaches(other, 1, 0)
        assert not reaches(other, 1, 2)  # that one is the first lab's
    assert reaches(lab, 1, 2)


@pytest.mark.parametrize(("style", "address"), [("debian", "127.0.1.1"), ("loopback", "127.0.0.1")])
def test_hosts(tmp_path: Path, style: str, address: str) -> None:
    with Lab(tmp_path, nodes=2, slurm=False, hosts=style) as lab:
        code = "import socket; print(socket.gethostbyname('node1'))"
        assert lab.run(1, [sys.executable, "-c", code]).stdout == f"{address}\n"
        assert lab.run(2, [sys.executable, "-c", code]).stdout == "10.77.0.1\n"


def test_link_faults(lab: Lab) -> None:
    lab.link_down(2)
    assert not reaches(lab, 1, 2)
    lab.heal(2)
    wait_until(lambda: reaches(lab, 1, 2), 10)
    lab.drop(2, 1)
    assert not reaches(lab, 1, 2)
    assert reaches(lab, 2, 0)
    lab.heal(2)
    assert reaches(lab, 1, 2)
    lab.slow_link(2, "10mbit")
    assert "10Mbit" in lab.run(2, ["tc", "qdisc", "show", "dev", "eth0"]).stdout
    lab.heal(2)
    assert "10Mbit" not in lab.run(2, ["tc", "qdisc", "show", "dev", "eth0"]).stdout


def test_power_cut_and_restart(lab: Lab) -> None:
    code = "import time; time.sleep(99)"
    with subprocess.Popen(lab.command(2, ["env", "RANK=3", sys.executable, "-c", code])) as process:
        wait_until(lambda: 3 in lab.ranks(2), 10)
        pid = lab.ranks(2)[3]
        assert lab.ranks(1) == {}
        lab.power_cut(2)
        assert not alive(pid)
        assert process.wait(10) != 0
    assert not reaches(lab, 1, 2)
    lab.restart(2)
    wait_until(lambda: reaches(lab, 1, 2), 10)


def test_kill_rank(lab: Lab) -> None:
    code = "import time; time.sleep(99)"
    with subprocess.Popen(lab.command(1, ["env", "RANK=0", sys.executable, "-c", code])) as process:
        wait_until(lambda: 0 in lab.ranks(1), 10)
        lab.kill_rank(1, 0)
        assert process.wait(10) == -signal.SIGKILL


def test_slow_cpu(tmp_path: Path) -> None:
    show = [sys.executable, "-c", "print(open('/proc/self/cgroup').read())"]
    group = f"lab-{os.getpid()}-node1"
    with Lab(tmp_path, nodes=2, slurm=False) as lab:
        try:
            lab.slow_cpu(1, 0.5)
        except RuntimeError as error:
            pytest.skip(str(error))
        assert group in lab.run(1, show).stdout
        assert group not in lab.run(2, show).stdout
    assert not list(Path("/sys/fs/cgroup").glob(f"*/{group}"))


def test_a_small_disk(lab: Lab) -> None:
    full = lab.run(1, ["dd", "if=/dev/zero", f"of={lab.disk}/file", "bs=2M", "count=1"])
    assert "No space left" in full.stderr
    assert lab.run(2, ["stat", "-c", "%s", f"{lab.disk}/file"]).stdout == f"{2**20}\n"


def test_the_lab_ends_with_its_process(tmp_path: Path) -> None:
    """Also with one that has no time to clean up."""
    code = (
        "import sys; from pathlib import Path; from lab import Lab\n"
        "with Lab(Path(sys.argv[1]), nodes=2, slurm=False) as lab:\n"
        "    lab.run(1, ['bash', '-c', 'nohup sleep 99 >/dev/null 2>&1 &'])\n"
        "    print('up', flush=True); sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(ROOT / "tests")},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        started = children(process.pid)
        assert len(started) >= 6
        process.kill()
    wait_until(lambda: not any(map(alive, started)), 10)


def test_what_a_lab_needs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert why_not(slurm=False) is None
    with monkeypatch.context() as patch:
        patch.setattr("lab.search_path", lambda: str(tmp_path))
        assert "needs unshare: apt-get install" in str(why_not())
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert why_not() == "needs root, for namespaces"
