"""Clock offsets and the split of a call, on times made up for the purpose."""

import random

import pytest

from common.skew import Offset, clock_offsets, offset_of, split


def test_the_quickest_round_trip_counts() -> None:
    """The peer is 5 s ahead. A trip of 2 ms, answered halfway, and slower ones that mislead."""
    trips = [(10.0, 15.009, 10.010), (20.0, 25.001, 20.002), (30.0, 35.001, 30.020)]
    offset = offset_of(trips)
    assert offset.seconds == pytest.approx(5.0)
    assert offset.error == pytest.approx(0.001)


def test_the_error_bounds_the_offset() -> None:
    """Whatever the way there and back take, the true offset is within the error."""
    rng = random.Random(0)
    for _ in range(200):
        true, trips = rng.uniform(-100, 100), []
        for _ in range(20):
            sent = rng.uniform(0, 1000)
            there, back = rng.expovariate(1e4), rng.expovariate(1e4)
            trips.append((sent, sent + there + true, sent + there + back))
        offset = offset_of(trips)
        assert abs(offset.seconds - true) <= offset.error + 1e-9
        assert offset.error < 1e-3


def test_split() -> None:
    """Rank 1 comes 3 ms after rank 0 and the call ends 2 ms later; its clock is 1 s ahead."""
    came = [[0.000, 1.000], [1.003, 2.003]]
    done = [[0.005, 1.005], [1.005, 2.005]]
    parts = split(came, done, [Offset(0, 0), Offset(1.0, 1e-6)])
    assert parts.waiting == pytest.approx(0.003)
    assert parts.transfer == pytest.approx(0.002)
    assert parts.total == pytest.approx(0.005)
    assert parts.late == pytest.approx([0, 0.003])


def test_split_is_the_mean_of_calls_and_the_root_may_be_done_early() -> None:
    came = [[0.0, 10.0], [0.004, 10.002]]
    done = [[0.001, 10.001], [0.006, 10.006]]  # the root of a broadcast leaves at once
    parts = split(came, done, [Offset(0, 0), Offset(0, 0)])
    assert parts.waiting == pytest.approx(0.003)
    assert parts.transfer == pytest.approx(0.003)


def test_one_rank_waits_for_nobody(group: object) -> None:
    assert clock_offsets(group.control) == [Offset(0.0, 0.0)]  # type: ignore[attr-defined]
    assert split([[1.0]], [[1.5]], [Offset(0, 0)]).waiting == 0
