"""Ranks without torchrun, as srun, mpirun and people start them: how they meet, and who listens."""

import contextlib
import random
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from common.report import load
from tests.process import ROOT, Process, environment

pytestmark = pytest.mark.smoke

LOOPBACK = {"127.0.0.1", "::1"}
COLLECTIVES = "benchmarks/collectives.py -b 8 -e 64 --cache-warm"
# all that listen
RPC = "benchmarks/rpc_latency.py --sizes 8,64 --rpc-channels mpt_uv,basic --rpc-transports auto"
# torch's own processes for this mode meet at MASTER_ADDR
CHECKPOINT = "benchmarks/checkpoint_sweep.py --modes async-process --iters 2 --model decoder-tiny"
QUICK = f"{COLLECTIVES} --device cpu --iters 3"


def free_port() -> int:
    """Below those that the kernel gives out: nobody gets it before the ranks have started."""
    while True:
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", random.randrange(10_000, 30_000)))
            return int(probe.getsockname()[1])


@pytest.fixture
def by_hand(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    """by_hand(command of rank 0, command of rank 1, ..., NAME="value") -> Process.

    RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set, and LOCAL_* where `local` is true.
    before: a command that starts each of them.
    """
    started: list[Process] = []

    def begin(
        *ranks: str,
        local: bool = False,
        before: tuple[str, ...] = (),
        **variables: str,
    ) -> Process:
        size = str(len(ranks))
        given = {"WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1"} | variables
        given["MASTER_PORT"] = str(free_port())
        commands = []
        for rank, command in enumerate(ranks):
            script, *flags = command.split()
            own = [f"RANK={rank}"]
            if local:
                own += [f"LOCAL_RANK={rank}", f"LOCAL_WORLD_SIZE={size}"]
            python = [sys.executable, str(ROOT / script), *flags]
            commands.append([*before, "env", *own, *python])
        started.append(Process(commands, tmp_path, environment(**given)))
        return started[-1]

    yield begin
    for process in started:
        process.stop()


@pytest.mark.parametrize(
    ("command", "local"),
    [(COLLECTIVES, False), (COLLECTIVES, True), (RPC, False), (RPC, True), (CHECKPOINT, True)],
)
def test_nobody_listens_beyond_loopback(
    by_hand: Callable[..., Process], tmp_path: Path, command: str, local: bool
) -> None:
    """Also where MASTER_ADDR leads elsewhere, if LOCAL_WORLD_SIZE says that all are here."""
    report = tmp_path / "report.jsonl"
    variables = {"MASTER_ADDR": socket.gethostname()} if local else {}
    command += f" --json {report} --max-seconds 1 --target-ci 0.01%"
    process = by_hand(*[command] * 2, local=local, **variables)
    seen: set[str] = set()

    def look() -> bool:
        for each in process.tree():
            with contextlib.suppress(psutil.NoSuchProcess):
                found = each.net_connections("inet")
                seen.update(c.laddr.ip for c in found if c.status == psutil.CONN_LISTEN)
        return report.exists() and report.read_text().count("\n") > 1

    process.until(look, 120)
    assert seen  # the looking finds what there is
    assert seen <= LOOPBACK
    assert process.wait(120) == 0, process.err
    done = load(str(report))
    assert {case.check for case in done.cases} == {"passed"}
    assert [rank["local_rank"] for rank in done.environment["ranks"]] == [0, 1]


def test_ranks_with_other_arguments_are_refused(by_hand: Callable[..., Process]) -> None:
    process = by_hand(QUICK, f"{QUICK} --max-seconds 7")
    assert process.wait(120) == 2
    (line,) = process.err.splitlines()
    common = QUICK.removeprefix("benchmarks/")
    assert line == (
        "collectives.py: error: expected the same arguments on all ranks, got "
        f"`{common} --max-seconds 7` on rank 1, `{common}` on rank 0"
    )


def test_the_soft_limit_on_files_is_raised(by_hand: Callable[..., Process]) -> None:
    """With 20 files no two ranks can meet."""
    limited = ("bash", "-c", 'ulimit -Sn 20; exec "$@"', "_")
    process = by_hand(*[QUICK] * 2, before=limited)
    assert process.wait(120) == 0, process.err
