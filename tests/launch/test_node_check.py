"""node_check.py on a Slurm of three nodes, of which the second has a slow link, or few cycles."""

import re
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.launch.lab import Lab

pytestmark = [pytest.mark.launch, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[2]
CGROUP = Path("/sys/fs/cgroup/cpu/torchrun-bench-slow-node")


@contextmanager
def slow_link(lab: Lab) -> Iterator[None]:
    """What comes to node2 comes at 20 Mbit/s."""
    shape = ("root", "tbf", "rate", "20mbit", "burst", "16kb", "latency", "200ms")
    lab.network(0, "tc", "qdisc", "add", "dev", "veth2", *shape)
    try:
        yield
    finally:
        lab.network(0, "tc", "qdisc", "del", "dev", "veth2", "root")


@contextmanager
def slow_node(lab: Lab) -> Iterator[None]:
    """All that runs on node2 has 10 ms of a core in each 100 ms."""
    if not CGROUP.parent.is_dir():
        pytest.skip("needs the cpu controller of cgroup v1")

    def move(to: Path) -> None:
        space = (Path(f"/proc/{lab.first[2]}/ns/pid")).readlink()
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if (process / "ns/pid").readlink() == space:
                    (to / "cgroup.procs").write_text(process.name)
            except OSError:  # ended meanwhile
                continue

    CGROUP.mkdir(exist_ok=True)
    (CGROUP / "cpu.cfs_period_us").write_text("100000")
    (CGROUP / "cpu.cfs_quota_us").write_text("10000")
    move(CGROUP)
    try:
        yield
    finally:
        move(CGROUP.parent)
        CGROUP.rmdir()


@pytest.mark.parametrize("fault", [slow_link, slow_node])
def test_the_slow_node_is_named(lab: Lab, tmp_path: Path, fault: Callable[[Lab], object]) -> None:
    words = ["srun", "bash", str(ROOT / "launch" / "slurm_env.sh"), sys.executable]
    words += ["tests/inject.py", "quiet"]  # the three nodes share this machine's cores
    command = shlex.join([*words, "benchmarks/node_check.py", "--budget", "100", "--device", "cpu"])
    output = tmp_path / "out"
    with ExitStack() as stack:
        stack.enter_context(fault(lab))  # type: ignore[arg-type]
        options = ["-N3", "--ntasks-per-node=1", f"--output={output}", f"--error={output}"]
        job = lab.sbatch(*options, f"--wrap={command}", cwd=ROOT)
        assert lab.until_over(job, 200, output.read_text) == "FAILED"
    text = output.read_text()
    named = re.findall(r"# not fit: (.*)", text)
    assert named == ["node 1 on node2"], text
