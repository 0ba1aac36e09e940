"""rpc_latency through the real torchrun on gloo: its report, tables, nodes and sockets."""

import re
import socket
import sys
from pathlib import Path

import pytest
from harness import ROOT, Launch, launch, load, run, torchrun

LATENCY = str(ROOT / "benchmarks" / "rpc_latency.py")
QUICK = ["--device", "cpu", "--iters", "6"]


def test_every_operation_with_two_callers(tmp_path: Path) -> None:
    path = tmp_path / "a report.json"
    options = ["--sizes", "4,64K", "--rpc-threads", "2,3", "--in-flight", "3"]
    done = run([*torchrun(3), LATENCY, *QUICK, *options, "--json", str(path)], cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    report = load(path)
    assert {case["check"] for case in report["cases"]} == {"passed"}
    seen = [
        (key["rpc_threads"], key["operation"], key["in_flight"], key["size_bytes"], key["repeat"])
        for key in (case["key"] for case in report["cases"])
    ]

    def session(threads: int, ops: list[tuple[str, int]], sizes: list[int], again: bool) -> list:
        return [(threads, op, n, size, again) for op, n in ops for size in sizes]

    ops = [("rpc_sync", 1), ("rpc_async", 3), ("remote", 1), ("async_execution", 1)]
    assert seen == (
        session(2, ops, [4, 65536], False)
        + session(3, ops, [4, 65536], False)
        + session(2, ops, [4], True)
    )
    for case in report["cases"]:
        assert case["ranks"] == [0, 1]  # the callers
        assert case["key"]["callers"] == 2
        assert [len(row) for row in case["samples_s"]] == [6, 6]
        assert list(case["other_samples_s"]) == ["one way"]
        assert case["metrics"]["round_trip_gb_per_s"] > 0
    assert "# callers: rank 0-1; callee: rank 2;" in done.stdout
    assert done.stdout.count("# torchrun-bench") == 1
    assert len(re.findall(r"^rpc_async x3 +64K ", done.stdout, re.MULTILINE)) == 2
    assert "Fastest round trips, payloads up to 4K:" in done.stdout
    assert "and more:" not in done.stdout  # nothing large was measured


def test_settings_that_cannot_start_fail_their_cases_and_the_sweep_goes_on(tmp_path: Path) -> None:
    """Without such devices TensorPipe refuses ibv, and ends the process over cuda_ipc."""
    path = tmp_path / "report.json"
    options = ["--sizes", "4", "--rpc-threads", "2", "--ops", "rpc_sync", "--json", str(path)]
    options += ["--rpc-transports", "auto,ibv", "--rpc-channels", "cuda_ipc,basic"]
    done = run([*torchrun(2), LATENCY, *QUICK, *options])
    assert done.returncode == 1, done.stdout + done.stderr
    checks = {
        (case["key"]["rpc_transports"], case["key"]["rpc_channels"]): case["check"]
        for case in load(path)["cases"]
        if not case["key"]["repeat"]
    }
    assert checks["auto", "basic"] == "passed"
    assert "TensorPipe finds no transport of ibv here" in checks["ibv", "basic"]
    assert "no channel of cuda_ipc carries tensors" in checks["auto", "cuda_ipc"]
    assert "exitcode  : 1" in done.stderr


def test_resume_measures_only_what_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    command = [*torchrun(2), LATENCY, *QUICK, "--rpc-threads", "2", "--ops", "rpc_sync"]
    command += ["--json", str(path)]
    assert run([*command, "--sizes", "4"]).returncode == 0
    before = load(path)["cases"]
    second = run([*command, "--sizes", "4,1K", "--resume"])
    assert second.returncode == 0, second.stderr
    after = load(path)["cases"]
    assert after[:1] == before
    assert [case["key"]["size_bytes"] for case in after] == [4, 1024]
    assert len(re.findall(r"^rpc_sync ", second.stdout, re.MULTILINE)) == 2


def test_two_nodes(tmp_path: Path) -> None:
    """Two agents, two RPC sessions one after the other."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    path = tmp_path / "report.json"
    agent = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
    agent += ["--nproc-per-node", "1", "--rdzv-backend", "c10d", "--local-addr", "127.0.0.1"]
    agent += ["--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "two"]
    options = ["--sizes", "4,1M", "--rpc-threads", "2,3", "--ops", "rpc_sync,remote"]
    command = [*agent, LATENCY, *QUICK, *options, "--json", str(path)]
    with launch(command) as first, launch(command) as second:
        assert first.wait() == 0, first.output()
        assert second.wait() == 0, second.output()
    report = load(path)
    assert report["environment"]["num_nodes"] == 2
    assert {case["check"] for case in report["cases"]} == {"passed"}
    assert {case["key"]["rpc_threads"] for case in report["cases"]} == {2, 3}


def listening(pid: int) -> list[str]:
    """The local addresses, in the kernel's hexadecimal, on which a process accepts connections."""
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = str(descriptor.readlink())
        except OSError:  # closed meanwhile
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                found.append(fields[1].partition(":")[0])
    return found


LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}


def started_run(options: list[str]) -> list[str]:
    long = ["--sizes", "4", "--ops", "rpc_sync", "--max-seconds", "60", "--target-ci", "0.0001%"]
    return [*torchrun(2), LATENCY, "--device", "cpu", "--rpc-threads", "2", *long, *options]


@pytest.mark.parametrize("transport", ["auto", "uv"])
def test_on_one_node_no_rank_listens_beyond_loopback(transport: str) -> None:
    options = ["--rpc-transports", transport, "--rpc-channels", "mpt_uv+basic"]
    with launch(started_run(options)) as running:
        running.wait_for("2 threads")
        addresses = rank_addresses(running)
        assert all(addresses.values()), addresses  # the looking finds what there is
        assert set().union(*addresses.values()) <= LOOPBACK, addresses


def rank_addresses(running: Launch) -> dict[int, set[str]]:
    """Where each rank listens, once RPC has started: both have then sockets beyond gloo's."""
    import time

    found: dict[int, set[str]] = {}
    limit = time.monotonic() + 30
    while time.monotonic() < limit:
        lists = {rank: listening(pid) for rank, pid in running.ranks().items()}
        found = {rank: set(addresses) for rank, addresses in lists.items()}
        if all(len(addresses) > 2 for addresses in lists.values()):
            break
        time.sleep(0.5)
    return found
