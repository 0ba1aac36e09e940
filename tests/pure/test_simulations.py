"""Quick versions of tests/simulate_*.py, whose tables are in docs/evidence.md, and the summary of
tests/measure_verdicts.py."""

import json
from typing import Any

import numpy as np
import pytest

from tests import simulate_intervals, simulate_overlap, simulate_ratios
from tests import simulate_verdicts as verdicts
from tests.measure_verdicts import summary, upper_bound
from tests.process import ROOT


@pytest.mark.parametrize("name", simulate_intervals.CASES)
def test_coverage(name: str) -> None:
    """With 300 series a coverage of 0.93 is known to about 0.03."""
    covered, shown = simulate_intervals.coverage(name, 300)
    assert covered >= simulate_intervals.CASES[name][1] - 0.03
    assert shown >= (0.5 if name.startswith("AR .9") else 0.8)


@pytest.mark.parametrize("name", simulate_intervals.VERDICTS)
def test_how_often_healthy_and_slow_ranks_are_named(name: str) -> None:
    _, factor, threshold = simulate_intervals.VERDICTS[name]
    rate = simulate_intervals.frequency(name, 100)
    assert rate <= threshold + 0.02 if factor == 1 else rate >= threshold - 0.05


@pytest.mark.parametrize("overlap", simulate_overlap.OVERLAPS)
def test_intervals_of_an_overlap(overlap: float) -> None:
    """A block differs by 2%, so that an estimate from 12 rounds has a standard deviation of 5
    points. The limits are 3 standard deviations of 400 runs: 0.22 * 3 / sqrt(400) = 3.3 points of
    coverage, and 5 * 3 / sqrt(400) = 0.75 points of the mean."""
    found = simulate_overlap.judged(overlap, 12, 0.02, 400)
    assert found.contained == pytest.approx(0.95, abs=0.033)
    assert found.mean == pytest.approx(overlap, abs=0.0075)
    assert found.dropped == 0
    # at most half of the 5% are on this side, plus 3 standard deviations
    assert found.negative >= 0.8 if overlap < 0 else found.negative <= 0.05


@pytest.mark.parametrize("condition", simulate_ratios.CONDITIONS)
def test_coverage_of_the_interval_of_a_ratio(condition: str) -> None:
    holds, _ = simulate_ratios.judged("geometric means", condition, 12, 4, 150)
    assert holds >= 0.87


def test_varying_load_widens_medians_more() -> None:
    of_means, of_medians = (
        simulate_ratios.judged(name, "neighbor, 3", 12, 4, 60)[1]
        for name in ("geometric means", "medians")
    )
    assert of_means < 0.7 * of_medians


# -- compare.py and ab.py --------------------------------------------------------------------------

LIMITS = {  # start of the name; number of simulations, lower and upper limit of the rate
    "the interval contains the true ratio, if TEST varies": (100, 0.85, 1),
    "equal programs are called different | at most 5%": (100, 0, 0.12),
    "equal programs are called different, if all of BASE": (100, 0.06, 1),
    "false discoveries among all discoveries, 24 cases": (8, 0, 0.15),
}


@pytest.mark.parametrize("start", LIMITS)
def test_error_rates_of_comparisons(start: str) -> None:
    count, least, most = LIMITS[start]
    (name,) = [name for name in verdicts.CASES if name.startswith(start)]
    assert least <= verdicts.share(name, count) <= most


@pytest.mark.parametrize("name", ["every 3rd run", "2 of 4 runs"])
def test_periodic_disturbances(name: str) -> None:
    """At most 6% of the verdicts on equal programs are wrong, and 20% are found. With the order
    A B, B A, A B, ... two slow runs of four make a difference in half of the comparisons."""

    def called(change: float, **more: Any) -> float:
        rng = np.random.default_rng(0)
        pairs = (verdicts.pairs_under(rng, name, change, **more) for _ in range(200))
        return float(np.mean([verdicts.is_called(result) for result in pairs]))

    assert called(0.0) <= 0.06
    assert called(0.2) >= 0.98
    if name == "2 of 4 runs":
        assert called(0.0, order=lambda n, seed: ["a", "b"] if n % 2 else ["b", "a"]) >= 0.4


@pytest.mark.parametrize("how", [verdicts.by_ab, verdicts.by_compare])
def test_equal_programs_under_load_are_not_called_different(how: Any) -> None:
    for condition in ("a busy loop throughout", "a busy loop every 10 s"):
        assert verdicts.under_load(how, condition, 0, 15)[0] <= 0.2


def test_steady_load_and_pairs() -> None:
    condition = "30% of the cores"
    assert verdicts.under_load(verdicts.by_ab, condition, 0.1, 6)[2] == 1
    assert verdicts.under_load(verdicts.by_compare, condition, 0.1, 6)[1] == 1


@pytest.mark.parametrize("is_log", [False, True])
def test_one_night_against_a_baseline_of_nights(is_log: bool) -> None:
    """Nights differ by 3%: as independent runs, most equal programs would differ."""
    rng = np.random.default_rng(0)
    equal, slower = (
        [verdicts.fails(verdicts.against_nights(rng, 3, 1, change, is_log)) for _ in range(count)]
        for change, count in ((0, 100), (0.2, 20))
    )
    assert np.mean(equal) <= 0.1
    assert np.mean(slower) >= 0.9


def test_the_page_has_the_measured_verdicts() -> None:
    """29 of 700 by ab.py, and 13 by compare.py."""
    assert upper_bound(0, 100) == pytest.approx(1 - 0.05**0.01)  # 1 - p^n = 95%
    assert upper_bound(3, 3) == 1
    lines = (ROOT / "tests" / "measured_verdicts.jsonl").read_text().splitlines()
    equal = [line for line in map(json.loads, lines) if line["change"] == 0]
    page = " ".join((ROOT / "docs" / "evidence.md").read_text().split())
    assert f"{len(equal)} comparisons of equal programs really ran" in page
    for tool, sentence in (("ab", "ab.py was wrong in"), ("compare", "compare.py in")):
        wrong = sum(line[tool] in ("slower", "faster") for line in equal)
        share, most = wrong / len(equal), upper_bound(wrong, len(equal))
        assert f"{sentence} {wrong} ({share:.1%}, at most {most:.1%})" in page


def test_a_verdict_that_misses_a_planted_change_is_wrong() -> None:
    line = {"condition": "idle", "change": 10.0, "load": 0.0, "ab": "slower", "compare": "same"}
    cells = summary([line]).splitlines()[-1].split("|")
    of_ab, of_compare = (["0.0%", "95.0%", "0.0%", "100.0%"], ["100.0%", "100.0%", "0.0%", "0.0%"])
    assert [cell.strip() for cell in cells[5:13]] == of_ab + of_compare
