"""harness/observe/nodes.py: lines about GPUs and networks, without a GPU or a process group."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from harness.observe import nodes
from harness.observe.nodes import SLOWED, Nodes

ECC = "ecc.errors.uncorrected.volatile.total"
REASONS = "clocks_event_reasons.active"


def counted(*microseconds: str, index: str = "0") -> dict[str, str]:
    """Throttle counters of a GPU: power cap, software thermal, hardware thermal, power brake."""
    return {"index": index, **dict(zip(SLOWED, microseconds, strict=True))}


def test_warnings_at_the_start() -> None:
    """There is no warning about an idle GPU (bit 0) or unknown values."""
    hot = {"index": "0", REASONS: "0x0000000000000040", ECC: "2"}
    capped = {"index": "3", REASONS: "0x0000000000000005", ECC: "0"}
    unknown = {"index": "1", REASONS: "[N/A]", ECC: "[N/A]"}
    ranks = [{"rank": i, "uuid": "G0", "cores": 8 - 7 * i} for i in (0, 1)]
    found: dict[str, Any] = {"hosts": ["a", "b"], "gpus": [[hot, unknown], [unknown, capped]]}
    found["gpu_counts"] = [8, 8]
    assert nodes.gpu_warnings(found | {"ranks": ranks}) == [
        "warning: GPU 0 of a is throttled: hardware thermal",
        "warning: GPU 3 of b is throttled: power cap",
        "warning: a: GPU 0 has uncorrected memory errors",
        "warning: rank 1 has 1 core for its GPU; see srun --cpus-per-task",
    ]
    on_cpu: dict[str, Any] = {"hosts": ["a"], "gpus": [[]], "gpu_counts": [0]}
    on_cpu["ranks"] = [{"uuid": "", "cores": 1}]
    assert nodes.gpu_warnings(on_cpu) == []


def test_reasons_for_throttling_during_the_run() -> None:
    """The counters continue from earlier runs, and after the last case the GPUs are idle."""
    zeros = ("0 us",) * 4
    before = [counted(*["6869275397 us"] * 2, "0 us", "0 us", index="1"), counted(*zeros)]
    hot = counted("6881625397 us", "6869280000 us", "250000 us", "0 us", index="1")
    after = [counted("12300000 us", *zeros[1:]), hot, counted("9000000 us", *zeros[1:], index="2")]
    slowed = nodes.slowed_seconds(before, after, ["1", "0"])
    hot_s = {"power cap": pytest.approx(12.35), "hardware thermal": 0.25}
    assert slowed == [hot_s, {"power cap": 12.3}]
    gpus = [{"index": "1"}, {"index": "0"}]
    assert nodes.slowed_lines(["a"], [gpus], [slowed]) == [
        "warning: GPU 1 of a was throttled: power cap for 12.3 s, hardware thermal for 0.2 s",
        "note: GPU 0 of a was limited by its power: power cap for 12.3 s",
    ]
    assert nodes.slowed_seconds(before, before, ["0", "1"]) == [{}, {}]
    assert nodes.slowed_lines(["a"], [gpus], [[{}, {}]]) == []
    assert nodes.slowed_lines(["a"], [[]], [None]) == []


def test_a_driver_without_counters_is_named() -> None:
    """Without a line the GPUs would seem not to have been throttled."""
    unknown = [counted(*["[N/A]"] * 4)]
    assert nodes.slowed_seconds([], [], []) is None
    assert nodes.slowed_seconds(unknown, unknown, ["0"]) is None
    assert nodes.slowed_seconds(unknown, [], ["0"]) is None  # the second query failed
    old, new = ([{"index": "0", "driver_version": x}] for x in ("535.113.01", "595.45.04"))
    # d has no nvidia-smi
    assert nodes.slowed_lines([*"abcd"], [old, new, old, []], [None, [{}], None, None]) == [
        "note: no throttle counters (driver 535.113.01 of a, 535.113.01 of c): GPUs may have been "
        "slowed down"
    ]


def test_a_node_with_network_errors_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest growth comes first. Loopback and a new interface do not count."""
    eth0 = {"errin": 1, "errout": 0, "dropin": 2, "dropout": 4}
    interfaces = {name: SimpleNamespace(**eth0) for name in ("lo", "eth0")}
    monkeypatch.setattr("psutil.net_io_counters", lambda pernic: interfaces)
    before = nodes.network_errors()
    assert before == {f"eth0 {name}": count for name, count in eth0.items()}
    after = before | {"eth0 errin": 4, "eth0 dropin": 1206, "eth1 errin": 7}
    grew = [{}, nodes.growth(before, after), *[{"eth0 dropin": 1}] * 18]
    lines = nodes.network_lines([f"node{number}" for number in range(20)], grew)
    first = "warning: node1 counted during the run: 1,204 eth0 dropin, 3 eth0 errin"
    assert (lines[0], len(lines), lines[-1]) == (first, 17, "... and 3 more nodes")
    monkeypatch.setattr("psutil.net_io_counters", Mock(side_effect=FileNotFoundError))
    assert nodes.network_errors() == {}


def test_the_last_lines_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node with two ranks, of which only the first reads the counters. No data used the network,
    so drops are only in the report. GPU 0 belongs to another job."""
    same = {"driver_version": "580.65.06", REASONS: "0x0", ECC: "0", "mig.mode.current": "Disabled"}
    gpus = [{"index": index, "uuid": f"GPU-{index}"} | same for index in ("0", "1")]
    zeros = ("0 us",) * 4
    start = [counted(*zeros), counted(*zeros, index="1")]
    end = [counted(*["9000000 us"] * 4), counted("2000000 us", *zeros[1:], index="1")]
    readings = [start, end]
    monkeypatch.setattr(nodes, "gpu_state", lambda query="": readings.pop(0) if query else gpus)
    drops = [{"eth0 dropin": 1}, {"eth0 dropin": 8}]
    monkeypatch.setattr(nodes, "network_errors", lambda: drops.pop(0))
    ranks = [{"uuid": "1", "cores": 4, "rank": 0}]
    environment: dict[str, Any] = {"cuda": "13.2", "hosts": ["a"], "ranks": ranks}
    environment |= {"gpus": [gpus[1:]], "gpu_counts": [2]}
    job = Mock(local_rank=0, gather=lambda row: [row, None])
    bench: Any = Mock(is_first=False, job=job, report=Mock(environment=environment))
    observer, last_line = Nodes(bench), dict[str, Any]()
    line = "note: GPU 1 of a was limited by its power: power cap for 2.0 s"
    assert observer.end(last_line) == [line]
    assert last_line.pop("slowed_s") == [[{"power cap": 2.0}]]
    assert last_line == {"network": [{"eth0 dropin": 7}], "gpus": [gpus[1:]]}
