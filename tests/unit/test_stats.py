"""common/stats.py against numbers worked by hand, and its coverage by simulation."""

import numpy as np
import pytest
from numpy.typing import NDArray

from common.stats import (
    Estimate,
    Interval,
    Straggler,
    autocorrelation_time,
    difference,
    difference_of_means,
    discoveries,
    find_straggler,
    mean_of,
    median_interval,
    percentiles,
    relative_ci95,
    shift,
    t_quantile,
    t_tail,
)

Floats = NDArray[np.float64]


def ar1(phi: float, n: int, rng: np.random.Generator) -> Floats:
    """x[i] = phi * x[i - 1] + noise, with a median of 0; its tau is (1 + phi) / (1 - phi)."""
    x = rng.standard_normal(n + 100)
    for i in range(1, len(x)):
        x[i] += phi * x[i - 1]
    return x[100:]


def swinging(n: int) -> list[float]:
    """1..n as low, high, low, high, ...: their signs about the median alternate, so tau is 1."""
    values = range(1, n + 1)
    return [float(x) for pair in zip(values, reversed(values), strict=True) for x in pair][:n]


# -- autocorrelation -------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [3.0, 0.1, 0.3])
@pytest.mark.parametrize("n", [1, 3, 6, 10, 50])
def test_constant_samples_count_as_independent(value: float, n: int) -> None:
    assert autocorrelation_time([value] * n) == 1


def test_alternating_samples_count_as_independent() -> None:
    assert autocorrelation_time([1.0, 2.0] * 10) == 1


@pytest.mark.parametrize(
    ("samples", "tau"),
    [
        # about the mean: -.5 -.5 .5 .5, power 1, lag 1: .25 - .25 + .25 = .25; 1 + 2 * .25
        ([0, 0, 1, 1], 1.5),
        # signs -1 x10, +1 x10; lag k sums to 20 - 3k: pairs (20 + 17), (14 + 11), (8 + 5), (2 - 1),
        # then negative; over 20 they add up to 3.8; -1 + 2 * 3.8
        ([-1] * 10 + [1] * 10, 6.6),
        # - - + + repeated: lag 1 sums to 10 - 9 = 1; the next pair is negative; 1 + 2 / 20
        ([-1, -1, 1, 1] * 5, 1.1),
        ([1, 2, 3], 1.0),  # too few to tell
    ],
)
def test_autocorrelation_time_by_hand(samples: list[float], tau: float) -> None:
    assert autocorrelation_time(samples) == pytest.approx(tau)


@pytest.mark.parametrize(("phi", "tau"), [(0.0, 1.0), (0.5, 3.0), (0.8, 9.0)])
def test_autocorrelation_time_of_ar1(phi: float, tau: float) -> None:
    samples = ar1(phi, 20_000, np.random.default_rng(2))
    assert autocorrelation_time(samples) == pytest.approx(tau, rel=0.15)


# -- the interval of the median --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "positions"),
    [
        (0, None),
        (5, None),  # 2.5 - 1.96 * sqrt(5) / 2 = 0.31 -> 0, before the first
        (6, (1, 6)),  # 3 - 1.96 * sqrt(6) / 2 = 0.60 -> 1; 6 + 1 - 1 = 6
        (10, (2, 9)),  # 5 - 1.96 * sqrt(10) / 2 = 1.90 -> 2; 10 + 1 - 2 = 9
        (20, (6, 15)),  # 10 - 1.96 * sqrt(20) / 2 = 5.62 -> 6; 20 + 1 - 6 = 15
    ],
)
def test_median_interval_positions(n: int, positions: tuple[int, int] | None) -> None:
    want = positions and Interval(*positions)
    assert median_interval(swinging(n)) == want


def test_median_interval_at_another_confidence() -> None:
    # z = 2.576: 10 - 2.576 * sqrt(20) / 2 = 4.24 -> 4; 20 + 1 - 4 = 17
    assert median_interval(swinging(20), confidence=0.99) == Interval(4, 17)


def test_correlation_widens_the_interval() -> None:
    # low low high high: tau 1.1 as above; 10 - 1.96 * sqrt(20 * 1.1) / 2 = 5.40 -> 5
    low, high = range(1, 11), range(11, 21)
    samples = [x for i in range(0, 10, 2) for x in (*low[i : i + 2], *high[i : i + 2])]
    assert median_interval(samples) == Interval(5, 16)


def test_a_trend_gives_no_interval() -> None:
    # tau 6.6 as above: 10 - 1.96 * sqrt(20 * 6.6) / 2 = -1.26
    assert median_interval(range(1, 21)) is None


@pytest.mark.parametrize(("phi", "n"), [(0.0, 20), (0.0, 60), (0.5, 200), (0.8, 400)])
def test_median_interval_covers_the_median_in_95_percent(phi: float, n: int) -> None:
    rng = np.random.default_rng(7)
    intervals = [median_interval(ar1(phi, n, rng)) for _ in range(600)]
    hits = [i.low <= 0 <= i.high for i in intervals if i is not None]
    assert len(hits) > 590
    # three standard errors are 0.03; not widened by tau it would be 0.8 at phi = 0.5, 0.6 at 0.8
    assert 0.92 <= np.mean(hits) <= 0.99


def test_half_width() -> None:
    assert Interval(2.0, 5.0).half_width == 1.5


def test_relative_ci95() -> None:
    # positions 6 and 15 of 1..20: half is 4.5, the median 10.5
    assert relative_ci95(swinging(20)) == pytest.approx(4.5 / 10.5)
    assert relative_ci95([1.0] * 5) is None
    assert relative_ci95([1.0] * 6) == 0


# -- differences -----------------------------------------------------------------------------------


def test_difference_is_the_median_over_rounds() -> None:
    a = [5.0, 1.0, 9.0, 4.0, 4.0, 7.0]  # medians of the rounds: 5, 4, 7
    b = [1.0, 2.0, 2.0, 3.0, 5.0, 1.0]  # 2, 4, 1
    value, interval = difference(a, b, [3, 2, 1])  # 3, 0, 6
    assert value == 3
    assert interval is None  # three rounds


def test_drift_cancels_in_the_difference() -> None:
    rounds = [4, 3, 4, 2, 4, 4]
    drift = np.repeat([1.0, 3.0, 9.0, 27.0, 81.0, 2.0], rounds)
    value, interval = difference(drift + 0.5, drift, rounds)
    assert value == pytest.approx(0.5)
    assert interval is not None
    assert (interval.low, interval.high) == pytest.approx((0.5, 0.5))


def test_difference_interval_is_over_rounds() -> None:
    # one pair a round: differences 1 6 2 5 3 4; n = 6 takes the first and the last
    value, interval = difference([1, 6, 2, 5, 3, 4], [0] * 6, [1] * 6)
    assert (value, interval) == (3.5, Interval(1, 6))


# -- percentiles -----------------------------------------------------------------------------------


def test_percentiles_by_hand() -> None:
    # of 1..101 percentile q is 1 + q
    want = {"p50": 51, "p75": 76, "p90": 91, "p95": 96, "p99": 100}
    assert percentiles(range(1, 102)) == pytest.approx(want)


@pytest.mark.parametrize(("n", "has_p99"), [(1, False), (99, False), (100, True)])
def test_p99_needs_100_samples(n: int, has_p99: bool) -> None:
    assert ("p99" in percentiles(range(n))) == has_p99


# -- stragglers ------------------------------------------------------------------------------------


def noisy(factors: list[float], n: int = 40) -> Floats:
    noise = np.random.default_rng(3).uniform(0.99, 1.01, (len(factors), n))
    return np.array(factors)[:, None] * noise


@pytest.mark.parametrize(
    ("factors", "row", "factor"),
    [
        ([1, 1, 1.5, 1], 2, 1.5),
        ([1.5, 1], 0, 1.5),
        ([1, 1.5], 1, 1.5),
        ([1.5, 1, 3, 1, 1], 2, 3.0),  # the slowest of two
        ([1, 0.5], 0, 2.0),
        ([1.08, 1, 1], 0, 1.08),
    ],
)
def test_a_straggler_is_found(factors: list[float], row: int, factor: float) -> None:
    found = find_straggler(noisy(factors))
    assert found is not None
    assert found.row == row
    assert found.factor == pytest.approx(factor, rel=0.01)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "samples",
    [
        noisy([1] * 8),
        noisy([1.03, 1, 1]),  # within the margin
        noisy([0.5, 1, 1, 1]),  # fast is not slow
        noisy([5]),  # a single rank
        noisy([1, 9], n=5),  # too few iterations
        np.empty((3, 0)),
    ],
    ids=["noise", "margin", "fast", "one rank", "five iterations", "none"],
)
def test_no_straggler(samples: Floats) -> None:
    assert find_straggler(samples) is None


def test_straggler_margin() -> None:
    assert find_straggler(noisy([1.03, 1, 1]), margin=0.01) is not None
    assert find_straggler(noisy([1.5, 1, 1]), margin=0.6) is None


def test_noise_rarely_looks_like_a_straggler() -> None:
    rng = np.random.default_rng(3)
    cases = [rng.lognormal(0, 0.05, (8, 60)) for _ in range(200)]
    assert np.mean([find_straggler(case, margin=0) is not None for case in cases]) <= 0.05


def test_straggler_by_hand() -> None:
    # row 1 / row 0 is 2 in each of eight iterations; the interval of the ratio is [2, 2]
    assert find_straggler([[1.0] * 8, [2.0] * 8]) == Straggler(1, 2.0)


def test_a_fast_rank_makes_no_other_a_straggler() -> None:
    assert find_straggler(np.array([[0.5] * 40, [1.0] * 40, [1.0] * 40])) is None


# -- comparing runs --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("df", "confidence", "t"),
    [  # from the usual tables
        (1, 0.95, 12.7062),
        (2, 0.95, 4.3027),
        (5, 0.95, 2.5706),
        (10, 0.95, 2.2281),
        (30, 0.95, 2.0423),
        (1000, 0.95, 1.9623),
        (1, 0.99, 63.6567),
        (4, 0.999, 8.6103),
        (10, 0.5, 0.6998),
    ],
)
def test_students_t(df: float, confidence: float, t: float) -> None:
    assert t_quantile(df, confidence) == pytest.approx(t, abs=1e-4)
    assert t_tail(t_quantile(df, confidence), df) == pytest.approx(1 - confidence)


def test_students_t_at_its_ends() -> None:
    assert t_tail(0, 3) == 1
    assert t_tail(1e200, 3) == 0
    assert t_tail(1, 1) == pytest.approx(0.5)  # Cauchy: 1 - 2 atan(1) / pi
    assert t_quantile(1.0) > t_quantile(1.5) > t_quantile(2.0)  # not only whole numbers


def test_difference_of_means_by_hand() -> None:
    """Squares about the means: 2 and 2; pooled variance 4 / 4 = 1; error sqrt(1 / 3 + 1 / 3)."""
    found = difference_of_means([1, 2, 3], [4, 5, 6])
    assert found is not None
    assert (found.value, found.df) == (3, 4)
    assert found.error == pytest.approx((2 / 3) ** 0.5)
    assert found.p == pytest.approx(t_tail(3 / (2 / 3) ** 0.5, 4))
    assert found.interval().half_width == pytest.approx(2.7764 * found.error, rel=1e-4)


def test_difference_of_means_with_one_value_on_a_side() -> None:
    """The scatter of the other side counts: 1, with 2 degrees of freedom."""
    found = difference_of_means([1, 2, 3], [7])
    assert found is not None
    assert (found.value, found.df, found.error) == (5, 2, pytest.approx((1 + 1 / 3) ** 0.5))
    assert difference_of_means([1], [2]) is None


def test_unequal_numbers_take_the_wider_interval() -> None:
    """Welch: variances 2 / 2 and 1 / 3 of the means, df = (4/3)^2 / (1 + (1/3)^2 / 2) = 1.684."""
    found = difference_of_means([0, 2], [4, 5, 6])
    assert found is not None
    assert found.df == pytest.approx((4 / 3) ** 2 / (1 + (1 / 3) ** 2 / 2))
    assert found.error == pytest.approx((4 / 3) ** 0.5)
    alike = difference_of_means([0, 1, 2], [4, 5, 6, 4, 5, 6])
    assert alike is not None
    pooled = Estimate(4, ((2 + 4) / 7 * (1 / 3 + 1 / 6)) ** 0.5, 7)
    assert alike.interval().half_width >= pooled.interval().half_width


def test_values_without_scatter() -> None:
    for a, b, p in (([1, 1], [1, 1], 1), ([1, 1], [2, 2], 0), ([1, 1], [2, 2, 2], 0)):
        found = difference_of_means(a, b)
        assert found is not None
        assert found.p == p
        assert found.interval() == Interval(b[0] - 1, b[0] - 1)


def test_mean_of_by_hand() -> None:
    found = mean_of([1, 2, 3])
    assert found is not None
    assert (found.value, found.df, found.error) == (2, 2, pytest.approx(1 / 3**0.5))
    assert mean_of([1]) is None


def test_discoveries_by_hand() -> None:
    """Benjamini and Hochberg's own 15 p-values: 4 are discoveries at 5 %."""
    p = [0.0001, 0.0004, 0.0019, 0.0095, 0.0201, 0.0278, 0.0298, 0.0344, 0.0459, 0.3240]
    p += [0.4262, 0.5719, 0.6528, 0.7590, 1.0]
    assert discoveries(p).tolist() == [True] * 4 + [False] * 11
    assert discoveries(p[::-1]).tolist() == [False] * 11 + [True] * 4
    assert discoveries([0.04, 0.05]).tolist() == [True, True]  # the larger carries the smaller
    assert discoveries([0.04, 0.06]).tolist() == [False, False]
    assert discoveries([]).tolist() == []


def test_shift_by_hand() -> None:
    """Differences of {5, 6, 100} and {1, 2, 3}: 2 3 3 4 4 5 97 98 99, median 4."""
    assert shift([1, 2, 3], [5, 6, 100]) == (4, None)
    value, interval = shift(np.arange(8), np.arange(8) + 10)
    assert value == 10
    # 32 - 1.96 * sqrt(64 * 17 / 12) = 13.3: the 13th of the 64 differences from either end
    differences = sorted(10 + i - j for i in range(8) for j in range(8))
    assert interval == Interval(differences[12], differences[51])
