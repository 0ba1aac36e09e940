"""p2p_matrix.py through the real torchrun on gloo, up to 16 processes."""

from pathlib import Path
from typing import Any

import pytest
from harness import P2P_MATRIX, ROOT, free_port, launch, load, run, slow, torchrun

from common import results

QUICK = ["--device", "cpu", "--size", "4K", "-n", "2", "-w", "1", "--blocks", "2"]


def links(report: dict[str, Any]) -> list[list[float]]:
    return [link for case in report["cases"] for link in case["metrics"]["links"]]


@pytest.mark.parametrize(
    ("nproc", "serial"), [pytest.param(2, False, marks=slow), (3, True), (16, False)]
)
def test_every_pair(tmp_path: Path, nproc: int, serial: bool) -> None:
    path = tmp_path / "a report.json"
    options = [*QUICK, "--json", str(path), *(["--serial"] if serial else [])]
    if nproc == 3:
        pytest.importorskip("matplotlib")
        options += ["--plot", str(tmp_path / "a heat map.png")]
    done = run([*torchrun(nproc), P2P_MATRIX, *options], timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    report = results.load(str(path))
    assert report["status"] == "complete"
    assert {case["check"] for case in report["cases"]} == {"passed"}
    found = links(report)
    pairs = [(a, b) for a, b, *_ in found]
    assert sorted(pairs) == [(a, b) for a in range(nproc) for b in range(a + 1, nproc)]
    assert all(value > 0 for link in found for value in link[2:])
    for case in report["cases"]:
        assert [len(row) for row in case["samples_s"]] == [2] * len(case["ranks"])
    assert done.stdout.count(", by rank") == 3
    assert ("one pair at a time" in done.stdout) == serial
    if nproc == 3:
        assert (tmp_path / "a heat map.png").read_bytes().startswith(b"\x89PNG")


def test_resume(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    command = [*torchrun(4), P2P_MATRIX, *QUICK, "--json", str(path)]
    assert run(command).returncode == 0
    first = load(path)
    lost = first | {"cases": first["cases"][:2], "status": "interrupted"}
    import json

    path.write_text(json.dumps(lost))
    done = run([*command, "--resume"])
    assert done.returncode == 0, done.stderr
    again = load(path)
    assert again["cases"][:2] == first["cases"][:2]
    assert len(again["cases"]) == 3
    assert done.stdout.count(", by rank") == 3  # of all rounds


def test_by_node_and_groups_of_nodes(tmp_path: Path) -> None:
    """Two agents, as on two nodes; collectives.py's named groups ride along."""
    collectives = str(ROOT / "benchmarks" / "collectives.py")
    tiny = ["--device", "cpu", "-b", "64", "-e", "64", "-n", "2", "--cache-warm"]
    for script, options in (
        (P2P_MATRIX, [*QUICK, "--by", "node"]),
        (collectives, [*tiny, "--groups", "node"]),
        (collectives, [*tiny, "--groups", "cross"]),
    ):
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.json"
        agent = ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"]
        agent += ["--rdzv-backend", "c10d", "--local-addr", "127.0.0.1", "--rdzv-id", path.stem]
        agent += ["--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
        import sys

        command = ["env", "GLOO_SOCKET_IFNAME=lo", sys.executable, *agent, script, *options]
        with (
            launch([*command, "--json", str(path)]) as a,
            launch([*command, "--json", str(path)]) as b,
        ):
            assert a.wait() == 0, a.output()
            assert b.wait() == 0, b.output()
        cases = load(path)["cases"]
        assert {case["check"] for case in cases} == {"passed"}
        if script == P2P_MATRIX:
            assert [link[:2] for link in links({"cases": cases})] == [[0, 1]]
            assert sorted(cases[0]["ranks"]) == [0, 1, 2, 3]
        elif "node" in options:
            assert [(c["key"]["group"], c["ranks"]) for c in cases] == [
                ("node 0", [0, 1]),
                ("node 1", [2, 3]),
            ]
        else:
            assert [case["ranks"] for case in cases] == [[0, 2], [1, 3]]
