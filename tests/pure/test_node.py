"""common/observe/node.py: what it says of GPUs and networks. No GPU, no process group."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from common.observe import node
from common.observe.node import (
    SLOWED,
    Node,
    growth,
    network_errors,
    network_lines,
    slowed_lines,
    slowed_seconds,
    throttled,
    warnings_at_start,
    without_counters,
)

ECC = "ecc.errors.uncorrected.volatile.total"
REASONS = "clocks_event_reasons.active"


def counted(*microseconds: str, index: str = "0") -> dict[str, str]:
    """A GPU's counters: power cap, software thermal, hardware thermal, power brake."""
    return {"index": index, **dict(zip(SLOWED, microseconds, strict=True))}


def test_a_throttled_gpu_is_named_with_its_reasons() -> None:
    idle = {"index": "0", REASONS: "0x0000000000000001"}  # bit 0: idle
    hot = {"index": "3", REASONS: "0x0000000000000044"}
    unknown = {"index": "1", REASONS: "[N/A]"}
    assert throttled(["a", "b"], [[idle, unknown], [idle, hot]]) == [
        "GPU 3 of b is throttled: power cap, hardware thermal"
    ]


def test_what_is_wrong_at_the_start() -> None:
    """Planted: a GPU that is hot and has broken memory, and one core for rank 1."""
    hot = {"index": "0", REASONS: "0x0000000000000040", ECC: "2"}
    ranks = [{"rank": i, "uuid": "G0", "cores": 8 - 7 * i} for i in (0, 1)]
    found: dict[str, Any] = {"hosts": ["a"], "gpus": [[hot]], "ranks": ranks}
    assert warnings_at_start(found) == [
        "warning: GPU 0 of a is throttled: hardware thermal",
        "warning: a: GPU 0 has uncorrected errors of its memory",
        "warning: rank 1 has 1 core for its GPU; see srun --cpus-per-task",
    ]
    on_cpu = {"hosts": ["a"], "gpus": [[]], "ranks": [{"uuid": "", "cores": 1}]}
    assert warnings_at_start(on_cpu) == []
    many = {"hosts": ["a"] * 20, "gpus": [[hot | {ECC: "0"}]] * 20, "ranks": []}
    lines = warnings_at_start(many)
    assert len(lines) == 17
    assert lines[-1] == "... and 4 more warnings"


def test_what_slowed_a_gpu_down_within_the_run() -> None:
    """The counters go on from earlier runs, and after the last case the GPUs are idle."""
    zeros = ("0 us",) * 4
    before = [counted(*["6869275397 us"] * 2, "0 us", "0 us", index="1"), counted(*zeros)]
    hot = counted("6881625397 us", "6869280000 us", "250000 us", "0 us", index="1")
    slowed = slowed_seconds(before, [counted("12300000 us", *zeros[1:]), hot])
    assert slowed == [
        {"power cap": 12.3},
        {"power cap": pytest.approx(12.35), "hardware thermal": 0.25},
    ]
    assert slowed_lines(["a"], [slowed]) == [
        "warning: GPU 1 of a was throttled: power cap for 12.3 s, hardware thermal for 0.2 s",
        "note: GPU 0 of a was limited by its power: power cap for 12.3 s",
    ]
    assert slowed_seconds(before, before) == [{}, {}]
    assert slowed_seconds([], before) is None  # a GPU that came meanwhile
    assert slowed_lines(["a"], [[{}, {}]]) == []


def test_a_driver_without_counters_is_named() -> None:
    """Silence would read as `was not throttled`."""
    unknown = [counted(*["[N/A]"] * 4)]
    assert slowed_seconds([], []) is None  # it refuses the whole question
    assert slowed_seconds(unknown, unknown) is None
    old, new = [{"driver_version": "535.113.01"}], [{"driver_version": "595.45.04"}]
    assert without_counters(["a", "b", "c"], [old, new, old], [None, [{}], None]) == [
        "note: this driver has no throttle counters (535.113.01 on a, c): "
        "GPUs may have been slowed down"
    ]
    assert without_counters(["a", "b"], [new, []], [[{}], None]) == []  # b has no nvidia-smi


def test_errors_of_each_interface_but_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {"bytes_recv": 10**9, "errin": 1, "errout": 0, "dropin": 2, "dropout": 4}
    interfaces = {name: SimpleNamespace(**fields) for name in ("lo", "eth0")}
    monkeypatch.setattr("psutil.net_io_counters", lambda pernic: interfaces)
    assert network_errors() == {
        "eth0 errin": 1,
        "eth0 errout": 0,
        "eth0 dropin": 2,
        "eth0 dropout": 4,
    }
    monkeypatch.setattr("psutil.net_io_counters", Mock(side_effect=FileNotFoundError))
    assert network_errors() == {}


def test_a_node_whose_counters_grew_is_named() -> None:
    """Only what grew counts, the largest first. Nothing is printed if nothing grew. An interface
    that came meanwhile has counted elsewhere."""
    before = {"eth0 errin": 100, "eth0 dropin": 12, "eth1 dropin": 1}
    after = {"eth0 errin": 103, "eth0 dropin": 1216, "eth1 dropin": 1, "eth2 errin": 7}
    grew = growth(before, after)
    assert list(grew.items()) == [("eth0 dropin", 1204), ("eth0 errin", 3)]
    assert network_lines(["node1", "node2"], [{}, grew]) == [
        "warning: node2 counted during the run: 1,204 eth0 dropin, 3 eth0 errin"
    ]
    assert growth(before, before) == {}
    assert network_lines(["node1", "node2"], [{}, {}]) == []


def test_the_worst_nodes_come_first_and_the_lines_are_bounded() -> None:
    hosts = [f"node{number}" for number in range(20)]
    lines = network_lines(hosts, [{"eth0 dropin": number} for number in range(1, 21)])
    assert lines[0] == "warning: node19 counted during the run: 20 eth0 dropin"
    assert len(lines) == 17
    assert lines[-1] == "... and 4 more nodes"


def test_the_last_lines_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nodes of two ranks. The second rank of a node says nothing."""
    gpu = {"index": "0", "driver_version": "580.65.06", REASONS: "0x0", ECC: "0"}
    readings = {"before": counted(*["0 us"] * 4), "after": counted("2000000 us", *["0 us"] * 3)}
    drops = iter((1, 8, 8))
    now = ["before"]

    def gpu_state(query: str = "") -> list[dict[str, str]]:
        return [readings[now[0]] if query else gpu]

    monkeypatch.setattr(node, "gpu_state", gpu_state)
    monkeypatch.setattr(node, "network_errors", lambda: {"eth0 dropin": next(drops)})
    monkeypatch.setattr(node, "gather", lambda row: [row, None, row, None])
    environment: dict[str, Any] = {"cuda": "13.2", "hosts": ["a", "b"], "gpus": [[gpu]] * 2}
    environment["ranks"] = []
    bench: Any = SimpleNamespace(
        job=SimpleNamespace(local_rank=0), report=SimpleNamespace(environment=environment)
    )
    observer = Node(bench)
    now[0] = "after"
    last_line: dict[str, Any] = {}
    assert observer.end(last_line) == [
        "warning: a counted during the run: 7 eth0 dropin",
        "warning: b counted during the run: 7 eth0 dropin",
        "note: GPU 0 of a was limited by its power: power cap for 2.0 s",
        "note: GPU 0 of b was limited by its power: power cap for 2.0 s",
    ]
    assert last_line == {
        "network": [{"eth0 dropin": 7}] * 2,
        "gpus": [[gpu]] * 2,
        "slowed_s": [[{"power cap": 2.0}]] * 2,
    }
    # on one node the data did not go over the network, and on the CPU there are no GPUs to name
    environment |= {"cuda": None, "hosts": ["a"], "gpus": [[]]}
    monkeypatch.setattr(node, "gather", lambda row: [row])
    last_line = {}
    assert observer.end(last_line) == []
    assert last_line == {"network": [{"eth0 dropin": 7}]}
