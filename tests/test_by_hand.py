"""Ranks started without torchrun, as by srun, mpirun or by hand: rendezvous and listening
sockets."""

import contextlib
import socket
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from harness.report import load
from tests.process import Warm

pytestmark = pytest.mark.smoke

COLLECTIVES = "benchmarks/collectives.py -b 8 -e 64 --cache-warm"
# all channels and transports that listen
RPC = "benchmarks/rpc_latency.py --sizes 8,64 --rpc-channels mpt_uv,basic --rpc-transports auto"
# the processes of torch for this mode rendezvous at MASTER_ADDR
CHECKPOINT = "benchmarks/checkpoint_sweep.py --modes async-process --iters 1 --model decoder-nano"


@pytest.mark.parametrize(
    ("command", "local"), [(COLLECTIVES, False), (RPC, True), (CHECKPOINT, True)]
)
def test_no_process_listens_beyond_loopback(
    by_hand: Callable[..., Warm], tmp_path: Path, command: str, local: bool
) -> None:
    """Even if MASTER_ADDR is another address, if LOCAL_WORLD_SIZE says that all are local."""
    report = tmp_path / "report.jsonl"
    variables = {"MASTER_ADDR": socket.gethostname(), "LOCAL_WORLD_SIZE": "2"} if local else {}
    command += f" --json {report} --max-seconds 1 --target-ci 0.01% --warmup-iters 1"
    process = by_hand(command, command, **variables)
    seen: set[str] = set()

    def look() -> bool:
        for each in process.tree():
            with contextlib.suppress(psutil.NoSuchProcess):
                found = each.net_connections("inet")
                seen.update(c.laddr.ip for c in found if c.status == psutil.CONN_LISTEN)
        return report.exists() and report.read_text().count("\n") > 1

    process.until(look)
    assert seen  # listening sockets are found
    assert seen <= {"127.0.0.1", "::1"}
    assert process.wait() == 0, process.err
    done = load(str(report))
    assert {case.check for case in done.cases} == {"passed"}
    assert [rank["local_rank"] for rank in done.environment["ranks"]] == [0, 1]


def test_ranks_with_different_arguments_are_refused(by_hand: Callable[..., Warm]) -> None:
    process = by_hand(COLLECTIVES, f"{COLLECTIVES} --max-seconds 7")
    assert process.wait() == 2
    first, *others = process.err.splitlines()
    what = "collectives.py: error: expected the same arguments on all ranks, got `"
    assert first.startswith(what)
    assert all(line.startswith(what) for line in others)  # without torchrun each rank prints it
