"""common/report_runs.py: what of a report reaches a page."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hostile import ODD, RESULTS, report, write

from common.report_runs import (
    environments,
    labels_of,
    load,
    number,
    pair,
    significant,
    text,
    unique,
)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "-"),
        (True, "yes"),
        (0.25, "0.25"),
        (3, "3"),
        ("a\tb\n c ", "a b  c"),
        ([1, "x"], "1, x"),
        ({"b": 1, "a": [None]}, '{"a": [null], "b": 1}'),
        ("<b>&", "<b>&"),  # escaping is the page's business
        ("\x00\x1b[1m", "\\x00\\x1b[1m"),
        ("\u202eabc\u2066", "\\u202eabc\\u2066"),
        ("\ud800", "\\ud800"),
        ("Ω ≈ 日本", "Ω ≈ 日本"),
    ],
)
def test_text(value: Any, shown: str) -> None:
    assert text(value) == shown
    shown.encode()  # a file takes it


def test_text_is_cut() -> None:
    assert text("x" * 300, 10) == "x" * 9 + "…"
    assert len(text("\x00" * 300, 10)) == 37
    assert text("a\nb\r", lines=True) == "a\nb "


def test_nesting_has_an_end() -> None:
    value: list[Any] = []
    for _ in range(100_000):
        value = [value]
    assert text(value) == "nested too deeply to be shown"


@pytest.mark.parametrize(
    ("value", "found"),
    [
        *((1, 1.0), (-2.5, -2.5), (0, 0.0), (1e-40, 0.0), (1e29, 1e29)),
        *((True, None), ("1", None), (None, None), ([1], None)),
        *((math.nan, None), (math.inf, None), (1e31, None), (10**400, None), (-(10**400), None)),
    ],
)
def test_number(value: Any, found: float | None) -> None:
    assert number(value) == found


def test_pair() -> None:
    assert pair([1, 2.5]) == (1.0, 2.5)
    for bad in ([2, 1], [1], [1, 2, 3], (1, 2), [1, "2"], [1, math.nan], None, 3):
        assert pair(bad) is None


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        *((0, "0"), (2, "2"), (0.123456, "0.1235"), (12.3456, "12.35"), (123456.7, "123457")),
        *((0.00001, "1.000e-05"), (-1.5, "-1.500"), (1e12, "1.000e+12"), (1234.5, "1234")),
    ],
)
def test_significant(value: float, shown: str) -> None:
    assert significant(value) == shown


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["a.json"], ["a"]),
        (["a.json", "dir/b.json"], ["a", "b"]),
        (["/x/a.json", "/y/a.json"], ["x/a", "y/a"]),
        (["/x/1/a.json", "/x/2/a.json", "/b.json"], ["1/a", "2/a", "b"]),
        (["/1/x/a.json", "/2/x/a.json"], ["1/x/a", "2/x/a"]),
        (["/x/a.json", "/x/a.txt"], ["a.json", "a.txt"]),
        (["/x/.json", "/x/\x1b.json"], [".json", "\\x1b"]),
    ],
)
def test_labels(paths: list[str], names: list[str]) -> None:
    assert labels_of(paths) == names


def test_labels_stay_apart_when_they_are_cut() -> None:
    found = unique(["a" * 80, "b" + "a" * 80, "short", "short"])
    assert len(set(found)) == 4
    assert max(map(len, found)) < 60


def test_load_keeps_what_is_drawn(tmp_path: Path) -> None:
    document = report(next(path for path in RESULTS if path.stem == "ddp_sweep_cpu_2ranks"))
    run = load(str(write(tmp_path / "r.json", document)), "name")
    case, source = run.cases[2], document["cases"][2]
    assert (run.label, run.status, run.seconds) == ("name", "complete", 47.0)
    assert case.spread is not None
    assert case.local is not None
    assert case.spread.quartiles.shape == (2, 5)
    assert case.spread.quartiles[1, 2] == pytest.approx(np.median(source["samples_s"][1]))
    assert case.spread.iterations == len(source["samples_s"][0])
    assert run.count("passed") == len(document["cases"])


def test_many_samples_are_thinned(tmp_path: Path) -> None:
    document = report(RESULTS[0])
    document["cases"] = document["cases"][:1]
    document["cases"][0] |= {"ranks": [0], "samples_s": [[float(i) for i in range(1000)]]}
    spread = load(str(write(tmp_path / "r.json", document)), "a").cases[0].spread
    assert spread is not None
    assert spread.points.shape == (1, 40)
    assert spread.points[0, [0, -1]].tolist() == [0.0, 999.0]


@pytest.mark.parametrize("odd", ODD, ids=str)
def test_samples_that_are_none(tmp_path: Path, odd: Any) -> None:
    document = report(RESULTS[0])
    for others in (odd, {"local compute": odd}, {"local compute": [odd]}):
        document["cases"][0]["other_samples_s"] = others
        load(str(write(tmp_path / "r.json", document)), "a")


def test_environments_differ_where_they_do(tmp_path: Path) -> None:
    document = report(RESULTS[0])
    one = load(str(write(tmp_path / "1.json", document)), "one")
    document["environment"]["torch"] = "9.9"
    document["environment"]["new"] = [1]
    document["environment"]["variables"]["NCCL_ALGO"] = "Ring"
    two = load(str(write(tmp_path / "2.json", document)), "two")
    fields = environments([one, two])
    assert {field.name for field in fields if field.differs} == {"torch", "new", "NCCL_ALGO"}
    assert next(f.values for f in fields if f.name == "NCCL_ALGO") == ("-", "Ring")
    assert not any(field.differs for field in environments([one, one]))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"{", "not JSON"),
        (b'{"schema": "other"}', "expected 'torchrun-bench/1'"),
        (b"[]", "an object"),
        (b'{"a": NaN}', "NaN"),
        (b"\xff", "not JSON"),
        (b"[" * 200_000, "nested too deeply"),
    ],
)
def test_load_refuses(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "r.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=words) as refusal:
        load(str(path), "a")
    assert str(path) in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_load_refuses_what_is_no_file(tmp_path: Path) -> None:
    for path, words in {
        str(tmp_path): "not a file",
        "/dev/zero": "not a file",
        str(tmp_path / "none"): "No such file",
        "a\0b": "null byte",
    }.items():
        with pytest.raises(ValueError, match=words):
            load(path, "a")


def test_load_refuses_a_huge_file_unread(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    with open(path, "wb") as file:
        file.truncate(2**30)  # a hole: it takes no room
    with pytest.raises(ValueError, match="1,024 MiB"):
        load(str(path), "a")


def test_truncated(tmp_path: Path) -> None:
    content = json.dumps(report(RESULTS[0]))
    path = tmp_path / "r.json"
    path.write_text(content[: len(content) // 2])
    with pytest.raises(ValueError, match="not JSON"):
        load(str(path), "a")
