"""Where the time of a training step goes: pure functions of the samples of one case.

`step`, `local` and `communication` are [ranks, iterations] in seconds, timed in the same rounds.
docs/numbers.md derives each number.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.stats import Interval, difference, find_straggler, median_interval, percentiles

Samples = NDArray[np.float64]


def step_metrics(step: Samples, samples_per_step: int) -> dict[str, Any]:
    """Percentiles of the step time and the throughput that follows from its median.

    Per iteration the slowest rank counts. samples_per_step: over all ranks.
    """
    slowest = step.max(axis=0)
    p50 = float(np.median(slowest))
    return {
        **{f"step_time_{name}_s": value for name, value in percentiles(slowest).items()},
        "step_time_ci95_s": bounds(median_interval(slowest)),
        "samples_per_s": samples_per_step / p50,
        "samples_per_s_per_device": samples_per_step / p50 / len(step),
    }


def communication_metrics(
    step: Samples, local: Samples, communication: Samples | None, rounds: Sequence[int]
) -> dict[str, Any]:
    """Local compute, communication alone, what of it is exposed, and the rank that lags.

    exposed = step - local compute; overlap = 1 - exposed / communication alone. An overlap under
    0 says that communication inside the step costs more than alone.
    """
    exposed, interval = difference(step.max(axis=0), local.max(axis=0), rounds)
    metrics: dict[str, Any] = {
        "local_compute_p50_s": float(np.median(local.max(axis=0))),
        "exposed_communication_s": exposed,
        "exposed_communication_ci95_s": bounds(interval),
    }
    if communication is not None:
        alone = float(np.median(communication.max(axis=0)))
        metrics["communication_p50_s"] = alone
        metrics["overlap"] = 1 - exposed / alone if alone > 0 else None
    straggler = find_straggler(local)
    if straggler is not None:
        metrics["straggler_rank"] = straggler.row
        metrics["straggler_factor"] = straggler.factor
    return metrics


def bounds(interval: Interval | None) -> list[float] | None:
    """The interval as JSON has it."""
    return None if interval is None else [interval.low, interval.high]
