"""The arithmetic of collectives.py, without a process group."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from benchmarks import collectives
from common.stats import Estimate, Times
from harness.benchmark import Implausible
from harness.report import Case

KEY = {"collective": "all_reduce", "size_bytes": 64_000_000, "group_ranks": 4, "cudagraph": 0}
KEY |= {"count": 16_000_000, "dtype": "float32", "redop": "sum", "root": -1, "caches": "cold"}


def derived(rows: Any, groups: list[list[int]], wrong: list[int], **key: Any) -> Case:
    """A case from times [rank][sample] of both variants. wrong: wrong values per rank, in place."""
    ranks = sorted(rank for group in groups for rank in group)
    samples = {"step": rows, "out_of_place": rows}
    case = Case(key=KEY | key, ranks=ranks, samples_s=samples, stop="max-seconds")
    facts = [{"start_up": {}, "in_place": count, "out_of_place": 0} for count in wrong]
    args: Any = SimpleNamespace(limit=12.0, check=1)
    collectives.derive(args, groups, case, Times(samples, []), facts)
    return case


def test_bandwidths() -> None:
    """64 MB on 4 ranks in 10 ms: algbw is 6.4 GB/s, and busbw 1.5 times as much."""
    rows = [[0.008, 0.010, 0.010], [0.010, 0.009, 0.012], [0.001] * 3, [0.002] * 3]
    case = derived(rows, [[0, 1, 2, 3]], [0] * 4)
    m = case.metrics
    assert m["in_place_time_s"] == Estimate(0.010)  # of the slowest rank: 10, 10, 12 ms
    assert m["in_place_algbw_gb_per_s"].value == pytest.approx(6.4)
    assert m["in_place_busbw_gb_per_s"].value == pytest.approx(9.6)
    assert m["efficiency"].value == pytest.approx(0.8)
    assert case.check == "passed"
    limit, short = "  80% of the limit", "  imprecise"
    # three samples have no interval
    assert collectives.ScanTable().row(case).endswith(f" 0      -{short}{limit}")
    m["out_of_place_time_s"] = Estimate(1.0, 0.99, 1.05)
    for high, cell in ((0.011, f" 0  10.0%{limit}"), (0.021, f" 0  >100%{short}{limit}")):
        m["in_place_time_s"] = Estimate(0.010, 0.0095, high)
        assert collectives.ScanTable().row(case).endswith(cell)
    # With -G, the time of a replay of 5 calls is divided by 5.
    rows, key = [[20], [5], [10], [15]], {"group_ranks": 2, "cudagraph": 3, "calls": 5}
    case = derived(rows, [[0, 3], [1, 2]], [0, 0, 2, 1], **key)
    assert case.metrics["in_place_group_times_s"] == [Estimate(4), Estimate(2)]
    assert case.metrics["in_place_time_s"] == Estimate(4)
    assert case.check == "failed: 3 wrong values"


def test_the_average_does_not_mix_two_runs_in_a_report() -> None:
    """Two sizes of 2 and 4 GB/s were measured before the report was resumed, one of 8 GB/s now."""
    cases = []
    for start, rate in (("1", 2.0), ("1", 4.0), ("2", 8.0)):
        numbers = {"in_place_time_s": Estimate(1.0), "in_place_busbw_gb_per_s": Estimate(rate)}
        cases.append(Case(key=KEY, ranks=[0], metrics=numbers, measured_at=start))

    def last_lines(*chosen: Case) -> str:
        bench = Mock()
        collectives.footer({"a": list(chosen)}, 0, bench)
        return "\n".join(call.args[0] for call in bench.print.call_args_list)

    assert "# Avg bus bandwidth    : 3\n" in last_lines(*cases[:2])
    assert "leaves out" not in last_lines(*cases[:2])
    assert "# Avg bus bandwidth    : 8\n" in last_lines(*cases)
    assert "# The average leaves out the rows that were measured earlier." in last_lines(*cases)
    assert "# Avg bus bandwidth    : 0\n" in last_lines()


def test_spread_of_samples() -> None:
    """Of 1 to 200 us, p99 is the 198th value, the mean is 100.5 and the variance (200^2 - 1) / 12.
    Percentiles are nearest-rank, as in nccl-tests: p99 of few samples is the largest."""
    us = torch.arange(1, 201).flip(0).double().numpy()
    assert collectives.spread_of(us[:99])["p99_s"] == 200
    _, names, _, row = collectives.ScanTable(True).row(derived([us / 1e6], [[0]], [0])).splitlines()
    assert names.split()[-5:] == ["i_min", "i_max", "i_p99", "i_cv%", "+-%"]
    assert row.split()[9:13] == row.split()[17:21] == ["1.00", "200.00", "198.00", "57.45"]


def planned(flags: str, groups: list[list[int]], device: str = "cpu") -> dict[str, Any]:
    """The planned cases of each table."""
    return collectives.plan(collectives.parse_args(flags.split()), device, groups)


def test_sizes_counts_and_calls() -> None:
    """Two groups of two ranks. A size is rounded down to a multiple of the ranks, and duplicates
    are measured once. An operation that does not reduce has one table, whatever --op."""
    flags = "--collective all_gather,reduce -o sum,max -r 1 -b 2 -e 50 -f 5"
    tables = planned(flags, [[0, 2], [1, 3]])
    sizes = [[(key["size_bytes"], key["count"]) for _, _, key in rows] for rows in tables.values()]
    assert sizes == [[(8, 1), (48, 6)], [(4, 1), (8, 2), (48, 12)], [(4, 1), (8, 2), (48, 12)]]
    assert list(tables)[1].startswith("# reduce float32 sum, world (2 ranks); at most 1 call per s")
    ((name, ranks, key), *_), *_ = tables.values()
    assert (name, ranks, key["group_ranks"]) == ("all_gather float32, 8 bytes", 4, 2)
    with pytest.raises(ValueError, match="reduce requires a rank of its group, 0 to 1, got 2"):
        collectives.check_root(Mock(collective=["reduce"], beside=None, root=2), 2)
    assert collectives.scan(4, 100, None, 3.0) == [4, 12, 36]
    assert collectives.scan(1, 4, None, 1.1) == [1, 2, 3, 4]  # a step of at least one byte
    assert collectives.scan(10, 50, 20, 2.0) == [10, 30, 50]
    # 20 on CUDA, limited to 4 GiB in total. A number given by -n is used unchanged.
    for device, flags, calls in (
        ("cpu", "", [1, 1]),
        ("cuda", "", [20, 4]),
        ("cuda", "-I 1", [1, 1]),
        ("cpu", "-n 9", [9, 9]),
    ):
        [cases] = planned(f"-b 64K -e 1G -f 16384 {flags}", [[0, 1]], device).values()
        assert [key["calls"] for _, _, key in cases] == calls


def measured(size: int, us: float, gb_per_s: float, width: float = 0.01) -> Case:
    """A case, in place twice as fast as out of place. width: relative half-width of intervals."""

    def near(value: float) -> Estimate:
        return Estimate(value, value * (1 - width), value * (1 + width))

    metrics = {"in_place_time_s": near(us / 1e6), "out_of_place_time_s": near(2 * us / 1e6)}
    metrics["in_place_busbw_gb_per_s"] = near(gb_per_s)
    metrics["out_of_place_busbw_gb_per_s"] = near(gb_per_s / 2)
    return Case(key=KEY | {"size_bytes": size, "device": "cpu"}, ranks=[0], metrics=metrics)


def test_the_rest_of_the_time_is_divided_by_widths() -> None:
    for rest_s, widths, spent_s, shares in (
        (8.0, [0.1, 0.8], [1.0, 1.0], [1, 7]),  # 10 s in total, as 1 : 8^(2/3) = 1 : 4
        (1.0, [0.1, 0.8], [1.0, 1.0], [0, 1]),  # of 3 s, the first one has had more than 1 / 5
        (6.0, [0.2, 0.2, 0.0], [8.0, 1.0, 5.0], [2, 4, 0]),  # 15 s, as 8^(1/3) : 1 = 2 : 1
        (0.0, [0.1, 0.8], [1.0, 1.0], [0, 0]),
        (5.0, [0.0, 0.0], [1.0, 1.0], [0, 0]),
    ):
        assert collectives.divide(rest_s, widths, spent_s) == pytest.approx(shares)


def test_answer() -> None:
    """Half of 0.8 GB/s is reached at 64K, missed at 1M, and reached again at 2M."""
    rows = [(8, 31, 0.001), (2**16, 50, 0.45), (2**20, 90, 0.3), (2**21, 95, 0.8), (2**22, 99, 0.7)]
    cases = [measured(*row) for row in rows]
    assert collectives.answer(None, cases[::-1]) == (
        "all_reduce float32 sum: peak bus bandwidth 0.800 GB/s (0.792 to 0.808) at 2M bytes; "
        "half of the peak from 2M bytes on; 8 bytes take 31.0 us (30.7 to 31.3)"
    )
    assert " at 2M bytes, the largest size; " in collectives.answer(None, cases[:4])
    # 0.792 to 0.808 is over --limit
    assert isinstance(collectives.answer(0.79, cases), Implausible)
    wide = [*cases[:4], measured(2**22, 99, 0.7, width=0.2)]
    assert " at 2M bytes (no significant difference from 4M); " in collectives.answer(None, wide)
    # without an interval, neither alike nor different
    wide[-1].metrics |= dict.fromkeys(wide[-1].metrics, Estimate(0.7))
    assert " at 2M bytes; " in collectives.answer(None, wide)
    alone = str(collectives.answer(None, [measured(8, 3, 0.0)]))
    assert alone.endswith("8 bytes take 3.00 us (2.97 to 3.03); a single rank has no bus bandwidth")


def test_beside_by_hand() -> None:
    """Alone the two take 10 and 5 ms. Both together take 12 ms, and 18 ms in one of 6 rounds. The
    geometric mean is 12 * 1.5^(1 / 6) = 12.839 ms, and the standard deviation of the logarithms is
    0.1655, so the interval is 1.284 exp(-+ 2.571 * 0.1655 / sqrt(6)). Rank 1 is 1,000 times as
    fast, and the slowest rank counts."""
    both = [0.012, 0.012, 0.018, 0.012, 0.012, 0.012]
    rows = {"step": both, "alone": [0.010] * 6, "beside": [0.005] * 6}
    samples = {name: [row, [x / 1e3 for x in row]] for name, row in rows.items()}
    case = Case(key=KEY | {"beside": "all_to_all", "beside_bytes": 2**20}, ranks=[0, 1])
    facts = [{"start_up": {}, "wrong": 0}] * 2
    args: Any = SimpleNamespace(check=1)
    collectives.derive_beside(args, case, Times(samples, [1] * 6), facts)
    m = case.metrics
    times = [m[f"{name}_time_s"].value for name in ("both", "alone", "beside", "longer")]
    assert times == pytest.approx([0.012839, 0.010, 0.005, 0.010], rel=1e-4)
    ratio = m["both_over_longer"]
    assert (ratio.value, ratio.low, ratio.high) == pytest.approx((1.2839, 1.0792, 1.5275), rel=1e-3)
    assert (m["longer"], m["in_turn_over_longer"]) == ("all_reduce", pytest.approx(1.5))
    assert case.check == "passed"
    sentence = "at the same time they take 1.28 times (1.08 to 1.53) as long as all_reduce alone"
    end = "; one after the other, 1.50 times"
    pair = "all_reduce of 61.04M bytes and all_to_all of 1M"
    assert collectives.answer_beside([case]) == f"{pair}: {sentence}{end}"
    m["both_over_longer"] = Estimate(0.97, 0.9, 1.1)
    sentence = "no significant slowdown if both run at the same time: 0.97 times (0.90 to 1.10) "
    sentence += "as long as all_reduce alone"
    assert collectives.answer_beside([case]) == f"{pair}: {sentence}{end}"
    facts[1] = {"start_up": {}, "wrong": 7}
    collectives.derive_beside(args, case, Times(samples, [1] * 6), facts)
    assert case.check == "failed: 7 wrong values"


def test_cases_with_beside() -> None:
    """The other collective has its own size, rounded down to whole parts, or that of the case."""
    for flag, sizes in (("all_to_all", [24, 96]), ("all_to_all:50", [48, 48])):
        [(title, cases)] = planned(f"-b 24 -e 96 -f 4 --beside {flag}", [[0, 1, 2]]).items()
        assert title.endswith("; at most 1 call per sample, one buffer; beside all_to_all")
        assert [key["beside_bytes"] for *_, key in cases] == sizes
        assert [key["beside_count"] for *_, key in cases] == [size // 12 for size in sizes]
        name = f"all_reduce float32 sum, 24 bytes beside all_to_all, {sizes[0]} bytes"
        assert cases[0][0] == name
    with pytest.raises(ValueError, match="reduce requires a rank of its group, 0 to 1, got 2"):
        collectives.check_root(Mock(collective=["all_reduce"], beside=("reduce", 0), root=2), 2)
