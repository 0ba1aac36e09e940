"""Compare the table that a comparison prints with the JSON document of the same call."""

import itertools
import re
from statistics import geometric_mean
from typing import Any

import pytest

UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
HEADER = ["case", "BASE", "TEST", "TEST is"]


def rows_of(text: str) -> list[list[str]]:
    """The cells of a printed table. The dashes below the header mark its columns."""
    lines = text.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("case "))
    spans: list[tuple[int, int | None]] = [
        match.span() for match in re.finditer("-+", lines[first + 1])
    ]
    assert [lines[first][a:b].strip() for a, b in spans][:4] == HEADER
    spans[-1] = (spans[-1][0], None)
    rows = itertools.takewhile(bool, lines[first + 2 :])
    return [[row[a:b].strip() for a, b in spans] for row in rows if not row.startswith("---")]


def check_time(cell: str, seconds: float | None) -> None:
    if seconds is None:
        assert cell in ("-", "")
        return
    number, unit = cell.replace(",", "").split()
    assert float(number) * UNITS[unit] == pytest.approx(seconds, rel=5.1e-4)  # four digits


def check_ratio(cell: str, ratio: float | None) -> None:
    if ratio is None:
        assert cell == "-"
        return
    match = re.fullmatch(r"([\d.]+)x(?: (slower|faster))?", cell)
    assert match
    assert float(match[1]) == pytest.approx(max(ratio, 1 / ratio), abs=0.0051)
    if match[2]:
        assert match[2] == ("slower" if ratio > 1 else "faster")


def check_row(cells: list[str], row: dict[str, Any], is_like_with_like: bool) -> None:
    """Compare every cell of a row with the entries of the document."""
    label, base, test, ratio, interval, last = cells
    assert label == row["case"]
    check_time(base, row["base_s"])
    check_time(test, row["test_s"])
    check_ratio(ratio, row["ratio"])
    if row["interval"] is None:
        assert interval in ("-", "no interval")
    else:
        ends = [float(word) for word in interval.split(" to ")]
        assert ends == pytest.approx(row["interval"], rel=5.1e-4)
    if is_like_with_like:
        change = row["smallest_change"]
        percent = float(last.removesuffix("%").removeprefix(">"))
        assert percent == pytest.approx(min(100 * change, 200), rel=0.051)
        assert last.startswith(">") == (change > 2)
        return
    verdict, _, caveats = last.rstrip("]").partition(" [")
    assert verdict == row["verdict"]
    if verdict in ("slower", "faster", "same"):
        assert caveats == ", ".join(row["caveats"])


def check_pair(pair: dict[str, Any], text: str, is_like_with_like: bool = False) -> None:
    """Compare the table, the lines above and below it, and the means of the runs that count."""
    rows = pair["cases"] + ([pair["mean"]] if pair["mean"] else [])
    for cells, row in zip(rows_of(text), rows, strict=True):
        check_row(cells, row, is_like_with_like)
    counts = [len(pair["runs"][side]) for side in ("base", "test")]
    pattern = r": (\d+) of BASE, (\d+) of TEST; margin ([\d.]+)%; (?:unit of .*: the (\w+)|one)"
    head = re.search(pattern, text)
    assert head
    assert [int(head[1]), int(head[2])] == counts
    assert float(head[3]) == pytest.approx(100 * pair["design"]["margin"])
    assert (head[4] or "run") == pair["design"]["unit"]
    sure = re.search(r"  ([\d.]+)% interval", text)
    assert sure
    assert float(sure[1]) == pytest.approx(100 * pair["design"]["confidence"], rel=5.1e-4)
    for warning in pair["warnings"]:
        assert f"# warning: {warning}\n" in text
    assert text.count("# warning: ") == len(pair["warnings"])
    for difference in pair["environment"]:
        kind = "THE HARDWARE DIFFERS" if difference["hardware"] else "environment"
        sides = [", ".join(difference[side]) for side in ("base", "test")]
        assert f"# {kind}: {difference['field']}: {sides[0]} in BASE, {sides[1]} in TEST" in text
    below = text[text.rindex("\n\n#") + 2 :].splitlines()
    assert below[: len(pair["notes"])] == [f"# {note}" for note in pair["notes"]]
    for row in pair["cases"]:
        for side in ("base", "test"):
            runs = [one for one in row["runs"] if one["side"] == side]
            assert [one["run"] for one in runs] == [one["run"] for one in pair["runs"][side]]
            assert all(one["counts"] == (one["why"] is None) for one in runs)
            assert all(one["time_s"] for one in runs if one["counts"])
            times = [one["time_s"] for one in runs if one["time_s"]]
            mean = pytest.approx(geometric_mean(times)) if times else None
            assert row[f"{side}_s"] == mean
