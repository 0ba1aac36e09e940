"""Two torchrun agents, as on two nodes: labels, node order, the topology check."""

import sys
from pathlib import Path

from harness import SWEEP, TINY, free_port, launch, load


def test_two_agents(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    agent = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
    agent += ["--nproc-per-node", "2", "--rdzv-backend", "c10d", "--local-addr", "127.0.0.1"]
    agent += ["--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id", "two"]
    script = [SWEEP, *TINY, "--device", "cpu", "--iters", "6", "--json", str(path)]
    command = ["env", "GLOO_SOCKET_IFNAME=lo", *agent, *script]
    with launch(command) as first, launch(command) as second:
        assert first.wait() == 0, first.output()
        assert second.wait() == 0, second.output()
        printed = "".join(first.stdout + second.stdout)
    report = load(path)
    labels = [case["key"]["label"] for case in report["cases"]]
    assert labels == ["no ddp", "1M/1G", "1M/2G", "2M/2G"]
    assert [row["node"] for row in report["environment"]["ranks"]] == [0, 0, 1, 1]
    assert report["environment"]["num_nodes"] == 2
    assert report["environment"]["differences"] == []
    assert printed.count("# torchrun-bench ddp_sweep") == 1  # rank 0 alone speaks
    assert "4 ranks on 2 nodes" in printed
    assert "topology of node 0-1" in printed
