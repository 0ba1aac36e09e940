"""Jobs that are put together wrongly: one line that says what, who and how to mend it.

The ranks are started one by one, as srun starts them; a node is a process that says so.
"""

import contextlib
import re
import shutil
import socket
import sys
from pathlib import Path

from harness import ROOT, SWEEP, TINY, Launch, free_port, launch, load

from common import network

SHORT = ["--device", "cpu", "--timeout", "60"]


def start(
    stack: contextlib.ExitStack, variables: dict[str, object], *options: str, root: Path = ROOT
) -> Launch:
    """`python -m common.preflight` with these variables, from a checkout."""
    given = [f"{name}={value}" for name, value in variables.items()]
    module = [sys.executable, "-m", "common.preflight", *(options or SHORT)]
    return stack.enter_context(launch(["env", "-C", str(root), *given, *module]))


def node(rank: int, nodes: int, port: int, address: str = "127.0.0.1") -> dict[str, object]:
    """The variables of the only rank of a node."""
    world = {"RANK": rank, "WORLD_SIZE": nodes, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    return {**world, "MASTER_ADDR": address, "MASTER_PORT": port}


def task(number: int) -> dict[str, object]:
    """The variables of one of two tasks that srun has started on a node."""
    step = {"SLURM_STEP_ID": 0, "SLURM_STEP_NUM_TASKS": 2, "SLURM_STEP_TASKS_PER_NODE": "2"}
    return {**step, "SLURM_NODEID": 0, "SLURM_PROCID": number}


def errors(ended: Launch, status: int = 2) -> list[str]:
    """What it said, after it has ended with this status."""
    assert ended.wait() == status, ended.output()
    assert "Traceback" not in ended.output()
    return [line for line in "".join(ended.stderr).splitlines() if "error: " in line]


def test_nodes_with_other_sources(tmp_path: Path) -> None:
    """Refused by rank 0 alone; or run, if the user says so: then the layout shows both."""
    other = tmp_path / "other checkout"
    for folder in ("common", "benchmarks"):
        shutil.copytree(ROOT / folder, other / folder)
    (other / "common" / "ranks.py").open("a").write("# edited on one node\n")
    with contextlib.ExitStack() as stack:
        refused, meant = free_port(), free_port()
        ranks = [start(stack, node(0, 2, refused)), start(stack, node(1, 2, refused), root=other)]
        off = {"TORCHRUN_BENCH_PREFLIGHT": "off"}
        start(stack, node(1, 2, meant) | off, root=other)
        first = start(stack, node(0, 2, meant) | off)
        (line,) = errors(ranks[0])
        assert "other sources in benchmarks/ and common/ on " in line
        assert errors(ranks[1]) == []
        assert first.wait() == 0, first.output()
        table = "".join(first.stdout)
        assert "2 ranks on 2 nodes, backend gloo: all met, nothing is wrong" in table
        rows = [line.split() for line in table.splitlines() if re.match(r"[01] ", line)]
        assert [row[:2] for row in rows] == [["0", "0"], ["1", "0"]]
        assert [row[4] for row in rows] == ["lo", "lo"]
        assert rows[0][-1] != rows[1][-1]


def test_what_one_rank_can_see() -> None:
    with contextlib.ExitStack() as stack, socket.create_server(("", 0)) as server:
        taken, free = server.getsockname()[1], free_port()
        outside = network.address_towards("198.51.100.7") or "127.0.0.1"  # RFC 5737: nobody's
        torchrun = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
        expected = {
            "worlds": (task(0), ["2 worlds of one: each of 2 Slurm tasks", "launch/slurm_srun"]),
            "misspelt": (task(0) | {"TORCHRUN_BENCH_PREFLIGHT": "no"}, ["off, got 'no'"]),
            "port": (node(0, 2, taken), [f"MASTER_PORT={taken} is taken", "by process "]),
            "no port": (node(0, 2, free) | {"MASTER_PORT": "29k"}, ["MASTER_PORT", "'29k'"]),
            "no name": (node(1, 2, free, "n1.invalid"), ["MASTER_ADDR=n1.invalid has no address"]),
            "loopback": (
                node(1, 2, free, "localhost") | torchrun,
                ["MASTER_ADDR=localhost is 127.0.0.1, ", "the master is on another node"],
            ),
            "refused": (
                node(1, 2, free, outside) | {"MASTER_PORT": free_port()},
                [f"MASTER_ADDR={outside} ", "Connection refused"],
            ),
            "range": (node(2, 2, free), ["RANK from 0 to WORLD_SIZE - 1, got RANK=2"]),
        }
        short = ["--device", "cpu", "--timeout", "3"]
        started = {name: start(stack, given, *short) for name, (given, _) in expected.items()}
        silent = start(stack, task(1))
        for name, (_, parts) in expected.items():
            (line,) = errors(started[name])
            for part in parts:
                assert part in line, name
        assert errors(silent) == []


def test_a_rank_twice_and_a_rank_missing() -> None:
    with contextlib.ExitStack() as stack:
        port = free_port()
        options = ["--device", "cpu", "--timeout", "20"]
        zero, *ones = [start(stack, node(rank, 3, port), *options) for rank in (0, 1, 1)]
        assert zero.wait() == 3, zero.output()
        assert sorted(one.wait() for one in ones) == [2, 3]
        texts = "".join(each.output() for each in (zero, *ones))  # the first to give up says it
        assert "HANG at the start: rank 2 of 3 did not arrive in 20 s" in texts
        assert sum("RANK=1 is given twice" in one.output() for one in ones) == 1


def test_nodes_of_unlike_size(tmp_path: Path) -> None:
    """They agree on the cases, and say what is odd about them."""
    path = tmp_path / "report.json"
    agent = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
    agent += ["--rdzv-backend", "c10d", "--local-addr", "127.0.0.1", "--rdzv-id", "uneven"]
    agent += ["--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    script = [SWEEP, *TINY, "--device", "cpu", "--iters", "2", "--json", str(path)]
    with (
        launch([*agent, "--nproc-per-node", "2", *script]) as two,
        launch([*agent, "--nproc-per-node", "1", *script]) as one,
    ):
        assert two.wait(240) == 0, two.output()
        assert one.wait() == 0, one.output()
        said = two.output() + one.output()
    assert said.count("warning: the nodes have unlike numbers of ranks (") == 1
    report = load(path)
    assert report["status"] == "complete"
    sizes = [case["key"]["world_size"] for case in report["cases"]]
    assert sizes == [0, 1, 2, 3]
