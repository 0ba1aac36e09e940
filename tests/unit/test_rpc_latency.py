"""benchmarks/rpc_latency.py: its flags, plan, arithmetic and advice, in one process."""

import argparse
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from harness import load_script

from common import cli
from common.rpc import Layout, RpcOptions

lat: Any = load_script("rpc_latency")
OWN = RpcOptions(16, 600.0)
FEWER = RpcOptions(2, 600.0)
UV = RpcOptions(2, 600.0, ("uv",), ("basic", "cma"))


@pytest.mark.parametrize(
    ("text", "want"),
    [("4", 4), ("64K", 65536), ("64k", 65536), ("64KiB", 65536), ("1M", 2**20), ("2G", 2**31)],
)
def test_sizes(text: str, want: int) -> None:
    assert lat.payload_size(text) == want


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", "64K"),
        ("-4", "got '-4'"),
        ("1.5K", "got '1.5K'"),
        ("K", "got 'K'"),
        ("4T", "got '4T'"),
        ("", "got ''"),
        ("\u00b2", "got"),
        ("6", "multiple of 4 bytes .float32., got '6'; try 8"),
    ],
)
def test_sizes_that_are_none(text: str, expected: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=expected):
        lat.payload_size(text)


def test_size_text_is_what_the_flag_takes() -> None:
    sizes = [4, 12, 1024, 1028, 2**16, 2**20, 3 * 2**20, 2**30]
    texts = [lat.size_text(size) for size in sizes]
    assert texts == ["4", "12", "1K", "1028", "64K", "1M", "3M", "1G"]
    assert [lat.payload_size(text) for text in texts] == sizes


def test_alternatives() -> None:
    parse = lat.alternatives(cli.TRANSPORTS)
    assert parse("auto") is None
    assert parse("uv") == ("uv",)
    assert parse("uv+shm") == ("uv", "shm")
    for text, expected in {
        "smh": "unknown 'smh'; did you mean shm",
        "uv+auto": "unknown 'auto'",
        "uv+": "unknown ''",
        "uv+uv": "each name once",
    }.items():
        with pytest.raises(argparse.ArgumentTypeError, match=expected):
            parse(text)


def parse(*words: str) -> argparse.Namespace:
    args: argparse.Namespace = lat.parse_args(list(words))
    return args


def test_settings() -> None:
    assert [lat.flags(options) for options in lat.settings(parse(), 2)] == [
        "--rpc-threads 16 --rpc-transports auto",
        "--rpc-threads 2 --rpc-transports auto",
        "--rpc-threads 2 --rpc-transports uv",
        "--rpc-threads 2 --rpc-transports auto --rpc-channels basic",
    ]
    args = parse("--rpc-transports", "auto,shm+uv", "--rpc-channels", "basic")
    assert [lat.flags(options) for options in lat.settings(args, 4)] == [
        "--rpc-threads 4 --rpc-transports auto --rpc-channels basic",
        "--rpc-threads 4 --rpc-transports shm,uv --rpc-channels basic",
        "--rpc-threads 16 --rpc-transports auto --rpc-channels basic",
        "--rpc-threads 16 --rpc-transports shm,uv --rpc-channels basic",
    ]
    # as many cores as TensorPipe has threads: one setting, not two alike
    assert len(lat.settings(parse("--rpc-channels", "basic"), 16)) == 1


@pytest.mark.parametrize("options", [OWN, FEWER, UV])
def test_the_flags_parse_in_the_other_scripts(options: RpcOptions) -> None:
    parser = cli.Parser()
    cli.add_rpc_flags(parser)
    args = parser.parse_args(lat.flags(options).split())
    assert args.rpc_threads == options.threads
    assert tuple(args.rpc_transports) == (options.transports or ("auto",))
    assert tuple(args.rpc_channels or ()) == (options.channels or ())


def test_cases() -> None:
    args = parse("--in-flight", "2,8,16", "--sizes", "64M,4", "--ops", "rpc_async,remote")
    assert lat.cases(args, False) == [
        ("rpc_async", 2, 4),
        ("rpc_async", 2, 2**26),  # no more than 128 MiB: the other two come to the same
        ("rpc_async", 8, 4),
        ("rpc_async", 16, 4),
        ("remote", 1, 4),
        ("remote", 1, 2**26),
    ]


def test_plan_repeats_the_first_setting_at_the_end() -> None:
    args = parse("--rpc-threads", "16,2", "--sizes", "4,64K,1M", "--ops", "rpc_sync")
    sessions = lat.plan(args, 2)
    assert [options.threads for options, _ in sessions] == [16, 2, 16]
    sizes = [[config.size_bytes for config in configs] for _, configs in sessions]
    assert sizes == [[4, 2**16, 2**20], [4, 2**16, 2**20], [4, 2**20]]
    layout = Layout(1, 1, master=False)
    keys = [str(lat.case_key(c, layout)) for _, configs in sessions for c in configs]
    assert len(set(keys)) == len(keys)
    assert len(lat.plan(parse("--rpc-threads", "2"), 2)) == 1
    # nothing small or large to compare: no repeat
    assert len(lat.plan(parse("--rpc-threads", "16,2", "--sizes", "64K"), 2)) == 2


def test_call_metrics_of_one_caller() -> None:
    """Batches of 4 calls in 8, 4, 12, 4 ms: calls of 2, 1, 3, 1 ms; 16 calls in 28 ms."""
    metrics = lat.call_metrics(np.array([[0.008, 0.004, 0.012, 0.004]]), [2, 2], 4)
    assert metrics["p50_s"] == pytest.approx(0.0015)
    assert metrics["calls_per_s"] == pytest.approx(16 / 0.028)
    assert metrics["p50_ci95_s"] is None
    assert "p99_s" not in metrics


def test_call_metrics_of_callers_that_do_not_wait_for_each_other() -> None:
    """Per percentile the slowest caller; the rate until the last one is done with each block."""
    fast, slow = [1.0, 1.0, 1.0, 9.0], [2.0, 2.0, 2.0, 2.0]
    metrics = lat.call_metrics(np.array([fast, slow]), [2, 2], 1)
    assert metrics["p50_s"] == 2.0
    assert metrics["slowest_caller"] == 1
    assert metrics["p95_s"] == pytest.approx(float(np.percentile(fast, 95)))
    assert metrics["calls_per_s"] == pytest.approx(8 / (4 + 10))
    # not what per-iteration maxima give, (2, 2, 2, 9): those calls were not at the same time


def measured(seconds: float) -> SimpleNamespace:
    samples = {name: np.full((1, 4), seconds) for name in ("round trip", "one way")}
    return SimpleNamespace(samples=samples, rounds=[4])


def test_bytes_pass_both_ways_in_a_round_trip() -> None:
    config = lat.Config(FEWER, "rpc_sync", 1, 2**20)
    facts = [{"sunk": 5, "received": [5, 5 * 2**20], "echoes": 1, "wrong_echoes": 0}]
    metrics, check = lat.derive(config, measured(0.001), facts)
    assert check == "passed"
    assert metrics["one_way_gb_per_s"] == pytest.approx(1.048576)
    assert metrics["round_trip_gb_per_s"] == pytest.approx(2 * 1.048576)


@pytest.mark.parametrize(
    ("fact", "expected"),
    [
        ({"wrong_echoes": 2, "echoes": 8}, "failed: 2 of the last 8 echoes to caller 1"),
        ({"sunk": 6}, "failed: the callers sent 11 calls of 8 bytes, and 10 calls with 80 bytes"),
    ],
)
def test_verdicts(fact: dict[str, int], expected: str) -> None:
    good = {"sunk": 5, "received": [10, 80], "echoes": 1, "wrong_echoes": 0}
    config = lat.Config(FEWER, "rpc_sync", 1, 8)
    assert lat.verdict(config, [good, good]) == "passed"
    assert lat.verdict(config, [good, good | fact]).startswith(expected)


def test_payloads_differ() -> None:
    configs = [lat.Config(FEWER, op, 1, size) for op in lat.OPERATIONS for size in (16, 32)]
    first = [lat.create_payload(c, rank)[:4].tolist() for c in configs for rank in range(3)]
    assert len({str(values) for values in first}) == len(first)
    assert lat.create_payload(configs[0], 0).nbytes == 16


def case(p50: float, relative: float = 0.01) -> dict[str, Any]:
    interval = [p50 * (1 - relative), p50 * (1 + relative)]
    return {"round_trip_p50_s": p50, "round_trip_p50_ci95_s": interval}


def test_compare() -> None:
    found = lat.compare([case(1.0), case(2.0)], [case(2.0), case(16.0)], 1.05)
    assert found.ratio == pytest.approx(4)  # the geometric mean of 2 and 8
    # the logs are 0.693 and 2.079: a spread of 0.98, two errors of the mean are 1.386
    assert found.noise == pytest.approx(4)
    steady = lat.compare([case(1.0)] * 4, [case(1.5)] * 4, 1.05)
    assert (steady.ratio, steady.noise) == (pytest.approx(1.5), pytest.approx(1.05))
    # one case: its own interval counts
    alone = lat.compare([case(1.0, 0.3)], [case(1.4, 0.4)], 1.05)
    assert alone.noise == pytest.approx(np.exp(0.5))


def test_noise_floor() -> None:
    assert lat.noise_floor([case(1.0)], [case(1.2)]) == pytest.approx(1.2)
    assert lat.noise_floor([case(1.2)], [case(1.0)]) == pytest.approx(1.2)
    assert lat.noise_floor([case(1.0)], [case(1.01)]) == 1.05
    assert lat.noise_floor([case(1.0)], []) == 1.05


def advice(p50s: dict[RpcOptions, float], again: float) -> list[str]:
    """What is said of settings whose two cases take so long; and the first one again."""
    sessions, cases = [], {}
    settings = [(options, p50, False) for options, p50 in p50s.items()]
    for options, p50, repeat in [*settings, (next(iter(p50s)), again, True)]:
        configs = [lat.Config(options, "rpc_sync", 1, size, repeat) for size in (4, 1024)]
        sessions.append((options, configs))
        cases.update({config: {"metrics": case(p50)} for config in configs if p50})
    lines: list[str] = lat.recommendation(sessions, lambda size: size <= 4096, cases.get)
    return lines


def test_advice() -> None:
    assert advice({OWN: 4.0, FEWER: 2.0, UV: 1.0}, again=4.0) == [
        "  --rpc-threads 2 --rpc-transports uv --rpc-channels basic,cma",
        "  4.00x faster than TensorPipe's default (noise: 1.05x)",
        "  2.00x faster than the next, --rpc-threads 2 --rpc-transports auto (noise: 1.05x)",
    ]
    assert advice({OWN: 1.0, FEWER: 2.0}, again=1.0) == [
        "  --rpc-threads 16 --rpc-transports auto",
        "  which is TensorPipe's default",
        "  2.00x faster than the next, --rpc-threads 2 --rpc-transports auto (noise: 1.05x)",
    ]


def test_no_winner_is_invented() -> None:
    """1.5 times faster, where the same setting differs from itself by 1.6."""
    assert advice({OWN: 1.5, FEWER: 1.0}, again=2.4) == [
        "  no clear difference (noise: 1.60x) between",
        "  --rpc-threads 2 --rpc-transports auto",
        "  --rpc-threads 16 --rpc-transports auto",
        "  TensorPipe's default is among them",
    ]


def test_a_setting_with_a_missing_case_does_not_count() -> None:
    assert advice({OWN: 1.0, FEWER: 0.0}, again=1.0) == []
    lines = advice({OWN: 1.0, FEWER: 0.0, UV: 2.0}, again=1.0)
    assert "--rpc-threads 2 --rpc-transports uv" in lines[-1]


def test_too_much_for_the_memory() -> None:
    args = parse("--sizes", "1024G")
    with pytest.raises(ValueError, match="--sizes 1024G with 1 in flight from 2 callers needs"):
        lat.refuse_memory(args, Layout(2, 1, master=False), 3)
    lat.refuse_memory(parse("--sizes", "4"), Layout(2, 1, master=False), 3)
