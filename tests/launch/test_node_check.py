"""node_check.py under Slurm on three nodes, the second with a slow link."""

import re
import shlex
import sys
from pathlib import Path

import pytest

from tests.launch.lab import Lab
from tests.process import ROOT

pytestmark = pytest.mark.launch


@pytest.mark.parametrize("burst", ["16kb", "256kb", "1mb"])
def test_the_slow_node_is_named(lab: Lab, tmp_path: Path, burst: str) -> None:
    """100 Mbit/s, after a burst at full speed."""
    slow_link = f"dev veth2 root tbf rate 100mbit burst {burst} latency 50ms".split()
    # `quiet`: the nodes share this machine's cores
    launch = ["srun", "bash", str(ROOT / "launch" / "slurm_env.sh"), sys.executable]
    flags = "--budget 100 --json /tmp/nc.jsonl --device cpu"
    script = f"tests/inject.py quiet benchmarks/node_check.py {flags}"
    command = f"{shlex.join(launch)} {script}"
    output = tmp_path / "out"
    options = ["-N3", "--ntasks-per-node=1", f"--output={output}", f"--error={output}"]
    lab.network(0, "tc", "qdisc", "add", *slow_link)
    try:
        job = lab.sbatch(*options, f"--wrap={command}", cwd=ROOT)
        assert lab.until_over(job, output.read_text) == "FAILED"
    finally:
        lab.network(0, "tc", "qdisc", "del", "dev", "veth2", "root")
    text = output.read_text()
    assert re.findall(r"# not fit: (.*)", text) == ["node2"], text
