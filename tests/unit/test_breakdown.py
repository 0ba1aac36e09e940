"""common/breakdown.py against numbers worked by hand."""

import numpy as np
import pytest
from numpy.typing import NDArray

from common.breakdown import bounds, communication_metrics, step_metrics
from common.stats import Interval

ROUNDS = [2] * 6


def constant(*ranks: float) -> NDArray[np.float64]:
    """The same time in each of twelve iterations, a rank a row."""
    return np.repeat(np.array(ranks)[:, None], sum(ROUNDS), axis=1)


def test_step_metrics() -> None:
    # per iteration the slowest rank: 20 30 30 20 25 25 ms; the median is 25 ms. 16 samples a step
    # over all ranks: 16 / 0.025 = 640 a second, 320 on each of the two
    step = np.array([[20, 10, 30, 20, 25, 1], [10, 30, 10, 10, 25, 25]]) / 1e3
    metrics = step_metrics(step, samples_per_step=16)
    # p75: position 0.75 * 5 = 3.75 of 20 20 25 25 30 30; p90 4.5; p95 4.75
    assert metrics.pop("step_time_ci95_s") == pytest.approx([0.020, 0.030])  # the 1st and the 6th
    assert metrics == pytest.approx(
        {
            "step_time_p50_s": 0.025,
            "step_time_p75_s": 0.02875,
            "step_time_p90_s": 0.030,
            "step_time_p95_s": 0.030,
            "samples_per_s": 640,
            "samples_per_s_per_device": 320,
        }
    )


def test_step_metrics_without_an_interval() -> None:
    assert step_metrics(constant(0.1)[:, :5], 8)["step_time_ci95_s"] is None


@pytest.mark.parametrize(
    ("step", "local", "alone", "exposed", "overlap"),
    [
        (0.030, 0.020, 0.016, 0.010, 0.375),  # 10 of 16 ms are exposed
        (0.020, 0.020, 0.016, 0.000, 1.000),  # all is hidden
        (0.036, 0.020, 0.016, 0.016, 0.000),  # nothing is
        (0.044, 0.020, 0.016, 0.024, -0.50),  # inside the step it costs half more than alone
        (0.019, 0.020, 0.016, -0.001, 1.0625),  # noise
    ],
)
def test_exposed_and_overlap(
    step: float, local: float, alone: float, exposed: float, overlap: float
) -> None:
    # in each the slowest rank counts
    metrics = communication_metrics(
        constant(step, step - 0.001), constant(local - 0.0005, local), constant(0.01, alone), ROUNDS
    )
    assert metrics.pop("exposed_communication_ci95_s") == pytest.approx([exposed, exposed])
    assert metrics == pytest.approx(
        {
            "local_compute_p50_s": local,
            "exposed_communication_s": exposed,
            "communication_p50_s": alone,
            "overlap": overlap,
        }
    )


def test_no_communication() -> None:
    """A hook that sends nothing has no overlap to speak of."""
    metrics = communication_metrics(constant(0.02), constant(0.02), constant(0.0), ROUNDS)
    assert metrics["communication_p50_s"] == 0
    assert metrics["overlap"] is None


def test_communication_not_measured() -> None:
    metrics = communication_metrics(constant(0.02), constant(0.02), None, ROUNDS)
    assert not {"communication_p50_s", "overlap"} & set(metrics)


def test_a_rank_that_lags_is_named() -> None:
    step, communication = constant(0.04, 0.04, 0.04), constant(0.01, 0.01, 0.01)
    metrics = communication_metrics(step, constant(0.02, 0.03, 0.02), communication, ROUNDS)
    assert metrics["straggler_rank"] == 1
    assert metrics["straggler_factor"] == pytest.approx(1.5)
    assert metrics["local_compute_p50_s"] == 0.03


def test_bounds() -> None:
    assert bounds(Interval(1.0, 2.0)) == [1.0, 2.0]
    assert bounds(None) is None
