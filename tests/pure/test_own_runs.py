"""Reports of one's own training loop and logs: the page, the pictures, Markdown and export.py."""

import csv
import io
import json
import random
import re
import shlex
from pathlib import Path

import pytest

from tests.pure.pages import page_of, tables_of, text_of
from tests.pure.reports import refusal, run
from tests.pure.tables import rows_of

STEP = ("--step", r"took ([\d.]+) ms")


def loops(folder: Path, level: float, command: str) -> str:
    """Three reports as the program of docs/ci.md writes them, without hosts and metrics.

    The median of the steps of each one is 1.00, 1.01 and 0.99 times `level`.
    """
    folder.mkdir()
    for number, factor in enumerate((1.0, 1.01, 0.99)):
        head = {"schema": "torchrun-bench/3", "benchmark": "my_training", "environment": {}}
        head |= {"started_at": f"2026-01-0{number + 1}T00:00:00+00:00"}
        head |= {"argv": shlex.split(command)} if command else {}
        steps = [level * factor * (1 + 1e-4 * (i - 10) * (number + 1)) for i in range(21)]
        case = {"name": "step", "key": {"batch_size": 32}, "ranks": [0]}
        lines = (head, case | {"samples_s": {"step": [steps]}}, {"status": "complete"})
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"{number}.jsonl").write_text(text)
    return str(folder)


def logs(folder: Path, level: float) -> str:
    folder.mkdir()
    rng = random.Random(level)
    for number in range(3):
        text = "".join(f"took {1000 * level * rng.gauss(1, 0.01):.3f} ms\n" for _ in range(21))
        (folder / f"{number}.log").write_text(text)
    return str(folder)


def test_the_page_shows_the_command_that_was_measured(tmp_path: Path) -> None:
    """Not that of report.py, also if the report has no command."""
    base = loops(tmp_path / "a", 0.1, "")
    test = loops(tmp_path / "b", 0.12, "train.py --lr 0.1 --json r.jsonl")
    tables = tables_of(page_of(tmp_path, base, "--test", test))
    commands = dict(row[:2] for row in tables["What was compared"][1:])
    assert commands == {"BASE": "-", "TEST": "train.py --lr 0.1"}
    assert "report.py" not in str(tables)
    assert ["step, a/1", "101 (no interval)"] in tables["Metrics"]  # the steps drift


def test_logs_on_a_page_and_in_a_csv_file(tmp_path: Path) -> None:
    sides = logs(tmp_path / "a", 0.1), logs(tmp_path / "b", 0.12)
    page = page_of(tmp_path, sides[0], "--test", sides[1], *STEP)
    (row,) = tables_of(page)["Verdicts"][1:]
    assert row[:2] == ["step", "slower [load not recorded]"]
    assert "last digit" not in page
    title = re.search("<title>(.*)</title>", page)
    assert title
    assert title[1] == "TEST against BASE: log"
    shown = run("export.py", sides[0], *STEP, "--to", "csv").stdout
    rows = list(csv.DictReader(io.StringIO(shown)))
    medians = [float(row["value"]) for row in rows if (row["metric"], row["n"]) == ("step_s", "21")]
    assert medians == pytest.approx([0.1] * 3, rel=0.01)
    line = refusal("report.py", sides[0], "-o", str(tmp_path / "page.html"))
    assert "there is no report (*.jsonl) in" in line


def test_export_of_a_training_loop(tmp_path: Path) -> None:
    """It has no metric, so the median of its steps is exported."""
    path = f"{loops(tmp_path / 'a', 0.1, '')}/1.jsonl"
    (row,) = json.loads(run("export.py", path, "--to", "gha").stdout)
    assert (row["name"], row["unit"]) == ("my_training/step/step_s", "s")
    assert row["value"] == pytest.approx(0.101)


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_a_figure_as_a_picture(tmp_path: Path, suffix: str) -> None:
    sides = loops(tmp_path / "a", 0.1, ""), loops(tmp_path / "b", 0.12, "")
    picture = tmp_path / f"x.{suffix}"
    words = ("report.py", sides[0], "--test", sides[1], "-o", str(picture), "--figure")
    for _ in range(2):  # it replaces its own picture
        done = run(*words, "all runs")
        assert (done.returncode, done.stderr) == (0, "")
    begins = {"png": b"\x89PNG", "svg": b"<?xml"}
    assert picture.read_bytes().startswith(begins[suffix])
    told = "--figure: expected one of the figures 'All runs', 'Time', got 'nothing'"
    assert refusal(*words, "nothing") == f"report.py: error: {told}"
    picture.write_text("mine")
    assert "is no output of torchrun-bench" in refusal(*words, "time")
    assert picture.read_text() == "mine"
    line = refusal(*words[:-1])
    assert "expected a file that ends in .html" in line
    assert "a picture requires --figure NAME" in line


def test_markdown_has_the_cells_of_the_table(tmp_path: Path) -> None:
    sides = loops(tmp_path / "a", 0.1, ""), loops(tmp_path / "b", 0.12, "")
    words = ("compare.py", sides[0], "--test", sides[1], "--fail-on", "slower")
    table, markdown = run(*words), run(*words, "--format", "markdown")
    assert (table.returncode, markdown.returncode) == (1, 1)
    gate, _, headline, *lines = markdown.stdout.splitlines()
    assert gate == r"**--fail-on slower: failed (1 slower \[load not recorded\])**"
    assert headline == r"**1 slower \[load not recorded\]**"
    cells = [line.replace("\\", "").strip("| ").split(" | ") for line in lines if "|" in line]
    assert cells[2:] == rows_of(table.stdout)
    told = [line for line in table.stdout.splitlines() if line.startswith("# ")]
    for line in told[:2]:
        assert f"- {line[2:]}" in [text.replace("\\", "") for text in lines]


def test_markdown_of_hostile_names(tmp_path: Path) -> None:
    bad = "<img src=x>|[a](b) `c` *d* @me"
    for side in "ab":
        path = Path(loops(tmp_path / side, 0.1, ""))
        for report in path.iterdir():
            text = report.read_text().replace('"name": "step"', f'"name": {json.dumps(bad)}')
            report.write_text(text)
    words = ("compare.py", str(tmp_path / "a"), "--test", str(tmp_path / "b"))
    shown = run(*words, "--format", "markdown").stdout
    (row,) = [line for line in shown.splitlines() if "img" in line]
    assert r"&lt;img src=x&gt;\|\[a\](b) \`c\` \*d\* @<!-- -->me" in row
    assert text_of(row).startswith("| <img src=x>")
