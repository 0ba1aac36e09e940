"""rpc_latency.py in full runs, with faults, and its formulas against values computed by hand."""

import re
from typing import Any

import pytest

from benchmarks import rpc_latency
from common.stats import Times
from harness.report import Case
from tests.process import Bench

SCRIPT = "benchmarks/rpc_latency.py"
SHORT = ("--iters", "6", "--warmup-iters", "1", "--device", "cpu")
smoke, faults = pytest.mark.smoke, pytest.mark.faults


@smoke
def test_every_operation_with_two_callers_on_three_nodes(bench: Bench) -> None:
    flags = ("--rpc-threads", "3", "--rpc-transports", "uv,shm", "--rpc-channels", "basic")
    sizes = ("--sizes", "4,64K", "--in-flight", "3")
    run = bench(SCRIPT, *SHORT, *flags, *sizes, ranks=1, nodes=3)
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


@faults
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--rpc-transports", "ibv"], "error: RPC transports ibv: not available on this host"),
        (["--rpc-timeout", "0.001"], "error: starting RPC took longer than --rpc-timeout 0.001"),
    ],
    ids=["transport", "timeout"],
)
def test_rpc_that_cannot_start_is_one_line(flags: list[str], said: str, bench: Bench) -> None:
    run = bench(SCRIPT, *SHORT, *flags, status=1)
    assert "Traceback" not in run.err.partition(said)[0]
    assert said in run.reason  # torchrun repeats it
    assert run.reason.count("\n") == 0


@faults
def test_a_rank_that_dies_while_rpc_starts(bench: Bench) -> None:
    run = bench(SCRIPT, *SHORT, inject="dies-as-rpc-starts", status=1)
    assert "Signal 9 (SIGKILL)" in run.err
    assert "Process group" not in run.err  # torch's misleading warning on the other rank


@faults
def test_a_lost_call_and_a_wrong_echo_fail_their_cases(bench: Bench) -> None:
    flags = ("--ops", "rpc_sync,async_execution", "--sizes", "8")
    run = bench(SCRIPT, *SHORT, *flags, inject="callee-errs", status=1)
    lost, wrong = run.report.cases
    counts = r"received (\d+) one-way calls with (\d+) bytes, but the callers sent (\d+) calls"
    found = re.fullmatch(f"failed: the server {counts}", lost.check)
    assert found
    received, size_bytes, sent = map(int, found.groups())
    assert (received, size_bytes) == (sent - 1, 8 * (sent - 1))
    assert wrong.check == "failed: 1 of the last echoes to caller 0 differ from its payload"


def test_percentiles_of_the_slowest_caller_and_calls_of_all() -> None:
    """Batches of 2 calls: 1, 1, 1, 9 and 2, 2, 2, 2 us. Two blocks of 8 calls take max(2, 4) and
    max(10, 4) us. The median rate is (2 + 0.8) / 2 calls per us."""
    batches = [[1e-6, 1e-6, 1e-6, 9e-6], [2e-6] * 4]
    samples = {"step": batches, "one way": batches}
    key = {"in_flight": 2, "size_bytes": 8}
    case = Case(key=key, ranks=[0, 1], samples_s=samples, rounds=[2, 2])
    facts: list[dict[str, Any]] = [{"sent": 8, "wrong": 0, "received": (16, 128)} for _ in range(2)]
    rpc_latency.derive(case, Times(case.samples_s, case.rounds), facts)
    m = case.metrics
    assert m["one_way_s"].value == pytest.approx(1e-6)
    assert m["one_way_p95_s"] == pytest.approx(3.9e-6)  # the other caller's
    assert m["one_way_slowest"] == 1
    assert m["one_way_calls_per_s"].value == pytest.approx(1.4e6)
    assert m["one_way_gb_per_s"].value == pytest.approx(1.4e6 * 8 / 1e9)
    assert m["round_trip_gb_per_s"].value == pytest.approx(2 * m["one_way_gb_per_s"].value)
    assert case.check == "passed"
