"""rpc_latency.py as its user runs it, its sockets, its faults, its formulas by hand."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks import rpc_latency
from common.report import Case
from common.stats import Times

SCRIPT = "benchmarks/rpc_latency.py"
SHORT = ("--iters", "6", "--warmup-iters", "1", "--device", "cpu")
# two cases of at least 3 s each: the second one is measured once the first is in the report
LONG = ("--ops", "rpc_sync", "--sizes", "4,64K", "--max-seconds", "3", "--target-ci", "0.0001%")
LOOPBACK = {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
smoke, faults = pytest.mark.smoke, pytest.mark.faults


def cases_in(path: Path) -> int:
    return len(path.read_text().splitlines()) - 1 if path.exists() else 0


@smoke
def test_every_operation_with_two_callers(bench: Callable[..., Any]) -> None:
    flags = ("--rpc-threads", "3", "--rpc-transports", "uv,shm", "--rpc-channels", "basic")
    run = bench(SCRIPT, *SHORT, *flags, "--sizes", "4,64K", "--in-flight", "3", ranks=3)
    assert run.status == 0, run.err
    names = ["rpc_sync", "rpc_async x3", "remote", "async_execution"]
    expected = [f"{name} {size}" for name in names for size in ("4", "64K")]
    assert [case.name for case in run.report.cases] == expected
    for case in run.report.cases:
        assert case.check == "passed"
        settings = ("ranks", "rpc_threads", "rpc_transports", "rpc_channels")
        assert [case.key[name] for name in settings] == [2, 3, "uv+shm", "basic"]
        assert case.ranks == [0, 1]  # the callers
        assert list(case.samples_s) == ["step", "one way"]
        assert [len(row) for row in case.samples_s["step"]] == [6, 6]
        assert case.metrics["one_way_calls_per_s"].value > 0
        # a round trip carries the payload twice
        rate = case.metrics["round_trip_calls_per_s"].value
        bytes_per_s = rate * case.key["size_bytes"] * 2
        assert case.metrics["round_trip_gb_per_s"].value == pytest.approx(bytes_per_s / 1e9)


@faults
@pytest.mark.parametrize(
    ("flags", "inject", "said"),
    [
        (["--rpc-transports", "ibv"], None, "error: --rpc-transports ibv: there is none here"),
        # TensorPipe would abort the process; fewer files over uv, the default on one core
        (
            [],
            "few-files",
            r"error: ulimit -n: RPC opens up to (270|170) files a process, and 64 are allowed; "
            r"try ulimit -n \1",
        ),
        (["--rpc-timeout", "0.001"], None, "error: --rpc-timeout 0.001: RPC takes longer to start"),
    ],
    ids=["transport", "files", "timeout"],
)
def test_what_keeps_rpc_from_starting_is_one_line(
    flags: list[str], inject: str | None, said: str, bench: Callable[..., Any]
) -> None:
    run = bench(SCRIPT, *SHORT, *flags, inject=inject)
    assert run.status != 0
    line = next(line for line in run.err.splitlines() if re.search(said, line))
    assert line.startswith("rpc_latency.py: ") or line.startswith("inject.py: ")
    assert "Traceback" not in run.err.split(line)[0]
    assert run.reason == line  # torchrun repeats it


@smoke
def test_two_nodes(bench: Callable[..., Any]) -> None:
    run = bench(SCRIPT, *SHORT, "--ops", "rpc_sync", "--sizes", "6,1M", ranks=1, nodes=2)
    assert run.status == 0, run.err
    assert run.report.environment["num_nodes"] == 2
    assert {case.check for case in run.report.cases} == {"passed"}


@faults
def test_no_rank_listens_beyond_loopback_and_a_killed_server_is_named(
    start: Callable[..., Any], tmp_path: Path
) -> None:
    path = tmp_path / "report.jsonl"
    every = ("--rpc-channels", "mpt_uv,basic", "--rpc-transports", "auto")  # all that listen
    flags = (*LONG, *every, "--timeout", "20", "--json", str(path))
    process = start(SCRIPT, *flags, cold=True)  # a fork would listen where torchrun does
    process.until(lambda: cases_in(path), 150)
    there, ranks = process.tree(), process.ranks()
    assert sorted(ranks) == [0, 1]  # torchrun's own agent listens on all interfaces
    for rank in ranks.values():
        found = rank.net_connections("inet")
        addresses = {x.laddr.ip for x in found if x.status == psutil.CONN_LISTEN}
        assert addresses  # the looking finds what there is
        assert addresses <= LOOPBACK
    ranks[1].kill()
    assert process.wait(40) != 0
    assert re.search(r"rank +: 1 .*\n.*exitcode +: -9 ", process.err), process.err
    assert not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in there)
    assert cases_in(path) == 1  # what was measured is kept


@faults
def test_a_lost_call_and_a_wrong_echo_fail_their_cases(bench: Callable[..., Any]) -> None:
    flags = ("--ops", "rpc_sync,async_execution", "--sizes", "8")
    run = bench(SCRIPT, *SHORT, *flags, inject="callee-errs")
    assert run.status == 1
    lost, wrong = run.report.cases
    assert lost.check == "failed: the server received 12 calls with 96 bytes one way, of 13 sent"
    assert wrong.check == "failed: 1 of the last echoes to caller 0 are not what it sent"
    assert "rpc_sync 8  failed: " in run.out


def test_percentiles_of_the_slowest_caller_and_calls_of_all() -> None:
    """Batches of 2 calls: 1, 1, 1, 9 and 2, 2, 2, 2 us; blocks of two: max(2, 4) + max(10, 4)."""
    batches = [[1e-6, 1e-6, 1e-6, 9e-6], [2e-6] * 4]
    key = {"in_flight": 2, "size_bytes": 8}
    case = Case(
        key=key, ranks=[0, 1], samples_s={"step": batches, "one way": batches}, rounds=[2, 2]
    )
    times = Times(case.samples_s, case.rounds)
    facts: list[dict[str, Any]] = [{"sunk": 8, "wrong": 0, "received": (16, 128)} for _ in range(2)]
    rpc_latency.derive(case, times, facts)
    m = case.metrics
    assert m["one_way_s"].value == pytest.approx(1e-6)
    assert m["one_way_p95_s"] == pytest.approx(3.9e-6)  # the other caller's
    assert m["one_way_slowest"] == 1
    assert m["one_way_calls_per_s"].value == pytest.approx(16 / 14e-6)
    assert m["one_way_gb_per_s"].value == pytest.approx(16 / 14e-6 * 8 / 1e9)
    assert m["round_trip_gb_per_s"].value == pytest.approx(2 * m["one_way_gb_per_s"].value)
    assert case.check == "passed"
    facts[0]["received"] = (15, 120)
    rpc_latency.derive(case, times, facts)
    assert case.check == "failed: the server received 15 calls with 120 bytes one way, of 16 sent"
