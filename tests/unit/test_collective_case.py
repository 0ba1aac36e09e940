"""What is made of a size's samples, by hand; what cannot be measured."""

import argparse
from typing import Any

import pytest
from harness import load_script

from common.collective_case import LACKING, Scan, derive, lacking, scans, sized

collectives: Any = load_script("collectives")


def parse(*options: str) -> argparse.Namespace:
    return collectives.parse_args(["--device", "cpu", *options])  # type: ignore[no-any-return]


KEY = {"collective": "all_reduce", "size_bytes": 1_000_000}


def facts(*ranks: list[list[float]], wrong: int = 0) -> list[dict[str, Any]]:
    """One rank a list: its blocks of parts, in place, in milliseconds."""
    return [
        {
            "times": {"in_place": [[x / 1e3 for x in block] for block in blocks]},
            "wrong": {"in_place": wrong},
            "stop": "blocks",
        }
        for blocks in ranks
    ]


def test_time_is_the_median_of_the_blocks_of_the_slowest_rank() -> None:
    """Block means (1, 2, 3) and (2, 1, 4) ms: blocks of 2, 2, 4 and so 2 ms."""
    found = facts([[0.5, 1.5], [2, 2], [3, 3]], [[2, 2], [1, 1], [4, 4]])
    measured, metrics, check = derive(KEY, parse(), (0, 1), found)
    assert metrics["in_place_time_s"] == pytest.approx(2e-3)
    assert metrics["in_place_algbw_gb_per_s"] == pytest.approx(0.5)
    assert metrics["in_place_busbw_gb_per_s"] == pytest.approx(0.5)  # 2 ranks: factor 1
    assert check == "passed"
    assert measured.samples["in_place"].shape == (2, 6)
    assert measured.rounds == [2, 2, 2]
    assert measured.stop["iterations"] == 60


@pytest.mark.parametrize(
    ("across", "expected"), [("max", 4), ("min", 1), ("avg", 2.5), ("rank0", 1), ("3", 4)]
)
def test_across_ranks(across: str, expected: float) -> None:
    _, metrics, _ = derive(KEY, parse("-a", across), (0, 1), facts([[1.0]], [[4.0]]))
    assert metrics["in_place_time_s"] == pytest.approx(expected / 1e3)


def test_each_call() -> None:
    """Slowest per call: 2, 3, 1 ms."""
    args = parse("--per-iteration", "-n", "3", "--limit", "2")
    _, metrics, _ = derive(KEY, args, (0, 1), facts([[1, 3, 1]], [[2, 1, 1]]))
    assert metrics["in_place_min_s"] == pytest.approx(1e-3)
    assert metrics["in_place_max_s"] == pytest.approx(3e-3)
    assert metrics["in_place_cv"] == pytest.approx((2 / 3) ** 0.5 / 2)
    assert "in_place_p99_s" not in metrics  # under 100 calls there is none
    assert metrics["in_place_efficiency"] == pytest.approx(metrics["in_place_busbw_gb_per_s"] / 2)


def test_skew() -> None:
    """Rank 5 comes 3 ms late, by a clock that is 1 s ahead."""
    found = facts([[1.0]], [[1.0]])
    for fact, skew in zip(found, (([0.0], [0.005]), ([1.003], [1.005])), strict=True):
        fact["skew"] = {"in_place": skew}
    found[0]["offsets"] = [(0.0, 0.0), (1.0, 1e-6)]
    _, metrics, _ = derive(KEY, parse("--skew"), (2, 5), found)
    assert metrics["in_place_waiting_s"] == pytest.approx(0.003)
    assert metrics["in_place_transfer_s"] == pytest.approx(0.002)
    assert metrics["in_place_latest_rank"] == 5
    assert metrics["in_place_clock_error_s"] == pytest.approx(1e-6)


def test_wrong_values_fail() -> None:
    _, metrics, check = derive(KEY, parse(), (0, 1), facts([[1.0]], [[1.0]], wrong=2))
    assert metrics["in_place_wrong"] == 4
    assert check == "failed: 4 wrong values"
    assert derive(KEY, parse("-c", "0"), (0,), facts([[1.0]]))[2] == "skipped: -c 0"


def test_scans() -> None:
    found = scans(parse("--collective", "all_reduce,broadcast,barrier,gather_object", "-d", "all"))
    assert len(found) == 8 + 8 + 1 + 1
    assert found[0] == Scan("all_reduce", "float32", "sum", -1)
    assert found[8] == Scan("broadcast", "float32", "none", 0)
    assert found[16:] == [
        Scan("barrier", "none", "none", -1),
        Scan("gather_object", "object", "none", 0),
    ]
    assert sized(found[16], 64, 2) == (0, 0)


def test_lacking() -> None:
    args, average = parse(), Scan("all_reduce", "int8", "avg", -1)
    assert "floating-point" in str(lacking(average, args, 2, "gloo"))
    assert lacking(average, args, 4, "nccl") is None
    assert "overflow" in str(lacking(average, args, 5, "nccl"))
    assert "2 ranks" in str(lacking(Scan("sendrecv", "int8", "none", -1), args, 1, "gloo"))
    assert lacking(Scan("sendrecv", "int8", "none", -1), args, 1, "nccl") is None


def test_only_what_says_so_is_lacking() -> None:
    for text in (
        "RuntimeError: result type Float can't be cast to the desired output type Char",
        "RuntimeError: ProcessGroupGloo::allgather: unsupported device type cuda",
        "RuntimeError: Backend gloo does not support allgather_coalesced",
        "RuntimeError: Cannot use ReduceOp.AVG with Gloo",
        "ValueError: Invalid scalar type",
        "TypeError: Input tensor data type is not supported for NCCL process group: UInt32",
    ):
        assert LACKING.search(text), text
    for text in (
        "OutOfMemoryError: CUDA out of memory",
        "TypeError: missing 1 required argument",
        "DistBackendError: NCCL error: invalid usage, ncclInvalidArgument: Invalid value",
    ):
        assert not LACKING.search(text), text


def test_a_scan_table_row_has_its_columns() -> None:
    from common.scan_table import ScanTable

    table = ScanTable(per_iteration=False, limit=False, skew=False)
    key = {"size_bytes": 64, "count": 16, "dtype": "float32", "redop": "sum", "root": -1}
    metrics = {f"in_place_{n}": 1.5e-5 for n in ("time_s", "algbw_gb_per_s", "busbw_gb_per_s")}
    row = table.row({"key": key, "metrics": metrics | {"in_place_wrong": 0}}).split()
    assert " ".join(row) == "64 16 float32 sum -1 N/A N/A N/A N/A 15.00 0.00 0.00 0"
    names, units = table.header().splitlines()[1:]
    assert names.split() == ["#", "size", "count", "type", "redop", "root"] + 2 * [
        *("time", "algbw", "busbw", "#wrong"),
    ]
    assert units.split() == ["#", "(B)", "(elements)"] + 2 * ["(us)", "(GB/s)", "(GB/s)"]
