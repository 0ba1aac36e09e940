"""A network that loses packets, on a Slurm of two nodes: who had to send again is said."""

import json
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.launch.lab import NETWORK, Lab

pytestmark = [pytest.mark.launch, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[2]
FLAGS = "-b 4M -e 4M --cache-warm -n 1 --iters 12 --device cpu --json"


@contextmanager
def lost_packets(lab: Lab) -> Iterator[None]:
    """Of the packets that node2 sends to node1, 1 % get lost. Every hundredth, not by chance."""
    every = ("-m", "statistic", "--mode", "nth", "--every", "100", "--packet", "0")
    rule = ("INPUT", "-s", f"{NETWORK}.2", *every)
    lab.network(1, "iptables", "-A", *rule, "-j", "DROP")
    try:
        yield
    finally:
        lab.network(1, "iptables", "-D", *rule, "-j", "DROP")


def run(lab: Lab, folder: Path) -> tuple[list[dict[str, int]], list[str]]:
    """A run of collectives.py: what grew on each node, and the hosts that are named."""
    report, output = folder / "a report.jsonl", folder / "out"
    script = ["benchmarks/collectives.py", *FLAGS.split(), str(report)]
    words = ["srun", "bash", str(ROOT / "launch" / "slurm_env.sh"), sys.executable, *script]
    options = ["-N2", "--ntasks-per-node=1", f"--output={output}", f"--error={output}"]
    job = lab.sbatch(*options, f"--wrap={shlex.join(words)}", cwd=ROOT)
    assert lab.until_over(job, 120, output.read_text) == "COMPLETED", output.read_text()
    last = json.loads(report.read_text().splitlines()[-1])
    grew = [node["grew"] for node in last["network"]]
    return grew, re.findall(r"# warning: (\w+) counted during the run: ", output.read_text())


def test_the_node_whose_packets_get_lost_is_named(lab: Lab, tmp_path: Path) -> None:
    """TCP's count is that of a network namespace: node1, on the same machine, does not have it."""
    with lost_packets(lab):
        grew, named = run(lab, tmp_path)
    assert named == ["node2"], grew
    assert grew[1]["RetransSegs"] > 100


def test_nobody_is_named_without_a_loss(lab: Lab, tmp_path: Path) -> None:
    """Although a busy machine acknowledges late, and segments are then sent again for nothing."""
    grew, named = run(lab, tmp_path)
    assert named == [], grew
