"""The tournament's rounds, and who is slow."""

import pytest

from common.links import outliers, rounds, slow_links, slow_members


@pytest.mark.parametrize("n", [0, 1, 2, 3, 4, 5, 7, 8, 16, 31, 64, 512])
def test_each_pair_once_and_nobody_twice_in_a_round(n: int) -> None:
    schedule = rounds(n)
    assert len(schedule) == (0 if n < 2 else n - 1 + n % 2)
    seen = [pair for pairs in schedule for pair in pairs]
    assert len(seen) == len(set(seen)) == n * (n - 1) // 2
    assert all(0 <= a < b < n for a, b in seen)
    for pairs in schedule:
        members = [member for pair in pairs for member in pair]
        assert len(set(members)) == len(members) == n - n % 2


def test_rounds_of_four_by_hand() -> None:
    assert rounds(4) == [[(0, 3), (1, 2)], [(0, 2), (1, 3)], [(0, 1), (2, 3)]]


def costs(values: list[float]) -> list[tuple[tuple[int, ...], float]]:
    return [((i,), value) for i, value in enumerate(values)]


def test_outliers_by_hand() -> None:
    """Median 10, deviations 0 1 1 1 10: the median one is 1, scaled 1.4826."""
    found, middle = outliers(costs([10, 9, 11, 9, 20]), 5)
    assert middle == 10
    assert [outlier.name for outlier in found] == [(4,)]
    assert found[0].factor == 2
    assert found[0].sigmas == pytest.approx(10 / 1.4826)
    assert outliers(costs([10, 9, 11, 9, 20]), 7)[0] == []


def test_faster_and_nearly_equal_are_no_outliers() -> None:
    assert outliers(costs([10, 10, 10, 1]), 5)[0] == []
    assert outliers(costs([10, 10, 10, 10.9]), 5)[0] == []  # no deviation, but under 10 %
    assert [o.sigmas for o in outliers(costs([10, 10, 10, 12]), 5)[0]] == [float("inf")]
    assert outliers(costs([10, 90]), 5)[0] == []  # nothing to compare with
    assert outliers([], 5) == ([], 0.0)


def test_noise_hides_what_is_within_it() -> None:
    assert outliers(costs([10, 12, 8, 14, 6, 15]), 5)[0] == []


def links(n: int, slow: dict[tuple[int, int], float]) -> list[tuple[tuple[int, int], float]]:
    return [
        ((a, b), slow.get((a, b), 1 + (a * 7 + b * 3) % 5 / 100))
        for pairs in rounds(n)
        for a, b in pairs
    ]


def test_a_slow_link_is_a_link_and_not_two_slow_ranks() -> None:
    found = links(8, {(2, 5): 3.0})
    assert slow_members(found, 5) == []
    assert [outlier.name for outlier in slow_links(found, [], 5)] == [(2, 5)]


def test_a_slow_rank_is_a_rank_and_not_seven_slow_links() -> None:
    found = links(8, {tuple(sorted((3, r))): 2.0 for r in range(8) if r != 3} | {(0, 1): 4.0})  # type: ignore[misc]
    members = slow_members(found, 5)
    assert [outlier.name for outlier in members] == [(3,)]
    assert members[0].factor == pytest.approx(2, rel=0.05)
    assert [outlier.name for outlier in slow_links(found, members, 5)] == [(0, 1)]
