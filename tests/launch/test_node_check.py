"""node_check.py on a Slurm of three nodes, of which the second has a slow link."""

import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.launch.lab import Lab

pytestmark = [pytest.mark.launch, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def slow_link(lab: Lab) -> Iterator[None]:
    """What comes to node2 comes at 20 Mbit/s."""
    shape = ("root", "tbf", "rate", "20mbit", "burst", "16kb", "latency", "200ms")
    lab.network(0, "tc", "qdisc", "add", "dev", "veth2", *shape)
    try:
        yield
    finally:
        lab.network(0, "tc", "qdisc", "del", "dev", "veth2", "root")


def test_the_slow_node_is_named(lab: Lab, tmp_path: Path) -> None:
    words = ["srun", "bash", str(ROOT / "launch" / "slurm_env.sh"), sys.executable]
    words += ["tests/inject.py", "quiet"]  # the three nodes share this machine's cores
    command = shlex.join([*words, "benchmarks/node_check.py", "--budget", "100", "--device", "cpu"])
    output = tmp_path / "out"
    with slow_link(lab):
        options = ["-N3", "--ntasks-per-node=1", f"--output={output}", f"--error={output}"]
        job = lab.sbatch(*options, f"--wrap={command}", cwd=ROOT)
        assert lab.until_over(job, 200, output.read_text) == "FAILED"
    text = output.read_text()
    named = re.findall(r"# not fit: (.*)", text)
    assert named == ["node 1 on node2"], text
