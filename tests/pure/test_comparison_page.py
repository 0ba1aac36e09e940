"""report.py with two sides: the page agrees with the output of compare.py and ab.py."""

import itertools
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from analysis.pages.figures import all_runs, draw
from analysis.pages.page import short_names, without_folders
from analysis.runs.load import load
from analysis.runs.verdicts import Design, compare
from tests.pure.pages import lines_of, page_of, tables_of
from tests.pure.reports import alike, case, estimate, fake, run, start, write
from tests.pure.tables import check_pair, rows_of

COLUMNS = ["case", "BASE", "TEST", "TEST is", "95% interval", "verdict"]
TITLES = ["What was compared", "Verdicts", "Runs", "What was measured"]
NAMES = ("no ddp", "1M/2G", "1M/2G bf16")
Cases = list[dict[str, Any]]
Change = Callable[[int, Cases], tuple[Cases, dict[str, Any]]]


def side(folder: Path, factors: list[float], seed: int, runs: int = 5, **more: Any) -> str:
    """A folder of reports of three cases, which take 0.1, 0.2 and 0.3 s times these factors.
    change: a function of the number and the cases of a run that returns its cases and entries."""
    change: Change = more.pop("change", lambda i, cases: (cases, {}))
    times = [alike(runs, 0.1 * (k + 1) * x, seed + 10 * k, 0.003) for k, x in enumerate(factors)]
    for i in range(runs):
        cases = [case(name, [times[k][i]] * 12) for k, name in enumerate(NAMES)]
        kept, entries = change(i, cases)
        write(folder / f"{i + 1:02}.jsonl", *kept, **{"started_at": start(i)} | more | entries)
    return str(folder)


def fails_or_is_missing(i: int, cases: Cases) -> tuple[Cases, dict[str, Any]]:
    """The second case is missing, the third one failed, and there is another one."""
    failed = cases[2] | {"check": "failed: out of memory", "samples_s": {}, "metrics": {}}
    return [cases[0], failed, case("another", [0.5] * 12)], {"status": "failed"}


def is_disturbed(i: int, cases: Cases) -> tuple[Cases, dict[str, Any]]:
    return cases, {"others": [[1.5 if i in (1, 3) else 0.02, 2]]}


def assert_agree(page: str, printed: str) -> None:
    """The page has each cell of the printed table, and the same notes."""
    header, *rows = tables_of(page)["Verdicts"]
    by_name = [dict(zip(header, row, strict=True)) for row in rows]
    columns = [*COLUMNS[:4], *(name for name in header if "interval" in name), header[1]]
    assert [[row[name] for name in columns] for row in by_name] == rows_of(printed)
    told = [line.removeprefix("# ") for line in printed.splitlines() if line.startswith("# ")]
    others = re.compile("warning: |environment: |THE HARD|BASE: ")
    headline, *notes = [line for line in told[2:] if not others.match(line)]
    assert headline in lines_of(page, "answer")
    assert set(notes) <= set(lines_of(page, "")) | set(lines_of(page, "answer"))
    assert set(told[:2]) <= set(lines_of(page, "detail"))


@pytest.mark.parametrize(
    ("words", "runs", "change", "verdicts"),
    [
        ("", 5, None, ["same", "slower", "faster", "same"]),
        ("", 1, None, ["undecided"] * 4),
        ("--paired", 5, None, [f"{x} [5 pairs]" for x in ("same", "slower", "faster", "same")]),
        ("--interleaved", 5, None, ["same", "slower", "faster", "same"]),
        ("--allow-disturbed", 5, is_disturbed, ["same [disturbed runs allowed]"]),
        ("", 5, fails_or_is_missing, ["same", "missing", "failed", "new"]),
    ],
)
def test_page_and_table_agree(
    words: str, runs: int, change: Change | None, verdicts: list[str], tmp_path: Path
) -> None:
    base = side(tmp_path / "base", [1, 1, 1], 1, runs)
    more: dict[str, Any] = {"change": change} if change else {}
    test = side(tmp_path / "test", [1, 1.2, 1 / 1.2], 2, runs, **more)
    sides = (base, "--test", test, *words.split())
    printed = run("compare.py", *sides)
    page = page_of(tmp_path, *sides)
    assert_agree(page, printed.stdout)
    found = [row[1] for row in tables_of(page)["Verdicts"][1:]]
    assert found[: len(verdicts)] == verdicts
    assert "The environments of the two sides do not differ." in lines_of(page, "")
    titles = [title for title in tables_of(page) if title in TITLES or title.startswith("Diff")]
    assert titles == TITLES


def test_runs_that_are_left_out_are_named_with_their_reason(tmp_path: Path) -> None:
    """The second and fourth run of TEST were disturbed, and one is a copy."""
    base = side(tmp_path / "base", [1, 1, 1], 1)
    test = side(tmp_path / "test", [1, 1, 1], 2, change=is_disturbed)
    (tmp_path / "test" / "09.jsonl").write_bytes((tmp_path / "test" / "01.jsonl").read_bytes())
    page = page_of(tmp_path, base, "--test", test)
    assert_agree(page, run("compare.py", base, "--test", test).stdout)
    tables = tables_of(page)
    assert [row[-1] for row in tables["Verdicts"][1:]] == ["5 of 5, 3 of 6"] * 3 + [""]
    heads, *rows = tables["Runs"]
    found = {row[0]: dict(zip(heads, row, strict=True)) for row in rows}
    busy = "other processes used more than a tenth of the cores: "
    whys = {name: why for name, row in found.items() if (why := row["why it does not count"])}
    disturbed = dict.fromkeys(("test/02", "test/04"), f"{busy}1.5 of 2 cores")
    assert whys == disturbed | {"test/09": "a copy of test/01"}
    assert [found[f"test/0{n}"]["counts in"] for n in (1, 2)] == ["3 of 3", "0 of 3"]
    assert found["test/01"]["CPU use by other processes"] == "0.02 of 2 cores"
    warnings = lines_of(page, "warning")
    assert "left out: a copy of test/01: test/09" in warnings
    assert f"left out: {busy}test/02 (1.5 of 2 cores), test/04 (1.5 of 2 cores)" in warnings


def test_differences_of_the_environments_are_shown(tmp_path: Path) -> None:
    base, test = (
        side(tmp_path / t, [1, 1, 1], i, environment={"devices": [d], "torch": t})
        for i, (d, t) in enumerate((("H100", "2.14"), ("A100", "2.15")))
    )
    page = page_of(tmp_path, base, "--test", test)
    assert tables_of(page)["Differences of the environments"] == [
        ["field", "BASE", "TEST"],
        ["devices (hardware)", "H100", "A100"],
        ["torch", "2.14", "2.15"],
    ]
    assert "The hardware differs: devices." in lines_of(page, "warning")


def test_a_folder_of_ab_py(tmp_path: Path) -> None:
    """The page uses the margin and the variables of the call."""
    out = str(tmp_path / "out")
    words = ("--runs", "4", "--margin", "30%", "--b-env", "MODE=fast", "HF_TOKEN=hunter2")
    sides = ("--a", fake(tmp_path, "0.1 x"), "--b", fake(tmp_path, "0.12 x"))
    done = run("ab.py", "--out", out, *sides, *words)
    assert done.returncode == 0, done.stderr
    (tmp_path / "out" / "verdict.json").write_text("{}")  # left by --format json; not a report
    page = page_of(tmp_path, out)
    assert_agree(page, done.stdout)
    assert lines_of(page, "answer")[0] == "1 same [4 pairs]"
    heads, base, test = tables_of(page)["What was compared"]
    assert (base[0], test[0]) == ("BASE: a", "TEST: b")
    assert "MODE=fast" in test[heads.index("command")]
    assert "hunter2" not in page
    assert [base[heads.index("runs")], test[heads.index("runs")]] == ["4", "4"]
    strict = page_of(tmp_path, out, "--margin", "2%")
    assert lines_of(strict, "answer")[0] == "1 slower [4 pairs]"
    assert tables_of(strict)["Verdicts"][1][1] == "slower [4 pairs]"


def test_a_command_against_itself(tmp_path: Path) -> None:
    words = ("--out", str(tmp_path / "out"), "--a", fake(tmp_path, "0.1 x"), "--runs", "4")
    done = run("ab.py", *words)
    # the times of fake.py depend only on the round
    row = r"^x +100.2 ms +100.2 ms +1.00x +1.000 to 1.000 +0\.00\d+%$"
    assert re.search(row, done.stdout, re.MULTILINE)
    assert "# smallest change: 4 runs per side detect it in 9 of 10 comparisons" in done.stdout
    page = page_of(tmp_path, str(tmp_path / "out"))
    assert_agree(page, done.stdout)
    assert '<h2 id="s1">a against itself</h2>' in page
    assert "smallest change" in tables_of(page)["Verdicts"][0]
    as_json = run("ab.py", *words, "--format", "json")
    check_pair(json.loads(as_json.stdout)["pairs"][0], done.stdout, is_like_with_like=True)


def test_a_folder_that_was_interrupted(tmp_path: Path) -> None:
    """Complete rounds are compared. Without any, the page still shows the reports."""
    out = tmp_path / "out"
    words = ("--a", fake(tmp_path, "0.1 x"), "--b", fake(tmp_path, "0.12 x"), "--runs", "3")
    assert run("ab.py", "--out", str(out), *words).returncode == 0
    (out / "b" / "03.jsonl").unlink()
    page = page_of(tmp_path, str(out))
    assert tables_of(page)["Verdicts"][1][-1] == "2 of 2, 2 of 2"
    assert "a/03 has no partner: its round was not finished." in lines_of(page, "warning")
    assert "3 usable pairs are needed, but there are 2" in page
    for report in (out / "b").glob("*.jsonl"):
        report.unlink()
    page = page_of(tmp_path, str(out))
    assert lines_of(page, "warning") == ["The commands cannot be compared: no round is complete"]
    assert "What was measured" in tables_of(page)
    (out / "verdict.txt").write_text("{")
    done = run("report.py", str(out), "-o", str(tmp_path / "other.html"))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "is not a complete folder of ab.py: " in done.stderr


def test_a_page_has_no_absolute_paths(tmp_path: Path) -> None:
    """Neither of reports nor in commands and variables. Different paths remain different."""
    folders = {name: f"/home/me/{name}/train.py" for name in ("base", "head")}
    for name, script in folders.items():
        variables = {"HF_HOME": "/data/models/hf", "LD_PRELOAD": f"/opt/{name}/lib/libx.so"}
        inside = {"torch": "2", "variables": variables, "hosts": ["vm"], "devices": ["/dev/cpu/0"]}
        key = {"model": "/home/me/models/mine.py:mlp", "rate": "3 GB/s", "setting": name}
        cases = [case("/scratch/me/x.bin", key=key, check="skipped: /scratch/me/x.bin is gone")]
        argv = [script, "--data", "/data/set/train", "--json", str(tmp_path / name)]
        write(tmp_path / name / "r.jsonl", *cases, argv=argv, environment=inside)
    sides = str(tmp_path / "base"), "--test", str(tmp_path / "head"), "--ignore-key", "setting"
    for words in ((str(tmp_path),), sides):
        page = page_of(tmp_path, *words)
        (tmp_path / "page.html").unlink()
        for folder in (str(tmp_path), "/home/me", "/data", "/opt", "/scratch"):
            assert folder not in page
        for kept in (".../base/train.py", ".../head/train.py", "3 GB/s", ".../mine.py:mlp"):
            assert kept in page


def test_short_names_by_hand() -> None:
    """Names within a folder have one form. The suffix is kept if only that differs."""
    for paths, expected in (
        (["/x/a/01.jsonl", "/x/b/01.jsonl", "/x/b/02.jsonl"], ["a/01", "b/01", "b/02"]),
        (["r/ddp.jsonl", "r/t/ddp2.jsonl"], ["ddp", "ddp2"]),
        (["r/1.json", "r/1.jsonl"], ["1.json", "1.jsonl"]),
        (["01.jsonl", "b/01.jsonl"], ["01", "b/01"]),
        (["one/two/x.jsonl"], ["x"]),
    ):
        assert list(short_names(paths).values()) == expected
    text = "a /opt/2.14/bin/run b=/opt/2.15/bin/run:/usr/lib64 12 GB/s http://x.org/a/b ~/c/d /tmp"
    assert without_folders([text])(text) == (
        "a .../2.14/bin/run b=.../2.15/bin/run:.../lib64 12 GB/s http://x.org/a/b ~/c/d /tmp"
    )


def compared(tmp_path: Path, **more: Any) -> Any:
    base = load([side(tmp_path / "base", [1, 1, 1], 1)])
    test = load([side(tmp_path / "test", [1, 1.2, 1 / 1.2], 2, **more)])
    return compare(base, test, Design())


def points(figure: Figure, marker: str) -> list[tuple[float, float, str]]:
    """x, y and the face colour of each point of the plot, without the legend."""
    lines = [line for line in figure.axes[0].lines if line.get_marker() == marker]
    found = []
    for line in lines:
        x_and_y: Any = line.get_xydata()
        face = str(line.get_markerfacecolor())
        found += [(round(float(x), 3), float(y), face) for x, y in x_and_y]
    return found


def test_the_plot_has_every_run(tmp_path: Path) -> None:
    """Runs of BASE are above those of TEST, and a run that was left out is a cross. The mean of
    BASE is 1, and the diamonds are the ratios of the table."""
    comparison = compared(tmp_path, change=is_disturbed)
    (figure,) = all_runs(comparison, ("BASE", "TEST"))
    assert len(points(figure, "o")) == 3 * (5 + 3)
    assert [y % 1 for _, y, _ in points(figure, "x")] == [0.0] * 3 * 2  # the lane of TEST
    of_base = [x for x, y, _ in points(figure, "o") if y == -0.24]
    assert math.prod(of_base) == pytest.approx(1, abs=5e-3)
    diamonds = [x for x, _, _ in points(figure, "D")]
    assert diamonds == [round(case.ratio, 3) for case in comparison.cases]
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert texts == ["same", "slower", "faster"]
    assert [text.get_text() for text in figure.axes[0].get_yticklabels()] == list(NAMES)
    # runs that were disturbed alike are hollow
    base, test = (load([side(tmp_path / x, [1, 1, 1], 1, 3, others=[[1.5, 2]])]) for x in "cd")
    (figure,) = all_runs(compare(base, test, Design(paired=True)), ("BASE", "TEST"))
    assert {face for _, _, face in points(figure, "o")} == {"none"}
    assert points(figure, "x") == []
    # cases that were measured on one side count, but have no counterpart
    (figure,) = all_runs(compared(tmp_path / "e", change=fails_or_is_missing), ("BASE", "TEST"))
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert texts == ["same", "missing", "failed", "new"]
    assert points(figure, "x") == []
    assert len(points(figure, "D")) == 1


def covered(figure: Figure) -> bool:
    """Whether the legend covers the axes, where the points are."""
    figure.draw_without_rendering()
    axes = figure.axes[0]
    legend = axes.get_legend()
    return bool(legend and legend.get_window_extent().overlaps(axes.get_window_extent().padded(-1)))


def has_room(figure: Figure) -> bool:
    """Whether no label of the y axis covers another."""
    figure.draw_without_rendering()
    boxes = [label.get_window_extent() for label in figure.axes[0].get_yticklabels()]
    return not any(a.overlaps(b) for a, b in itertools.pairwise(boxes))


def test_one_figure_for_each_setting_and_no_legend_over_points(tmp_path: Path) -> None:
    """Each report is a curve. Settings with only one number of ranks are bars of one figure."""
    hooks = ("none", "bf16", "a hook with a long name")
    paths = []
    for name, ranks in (("first", (1, 2, 4)), ("second", (1, 2, 4)), ("single", (2,))):
        cases = []
        for hook, n in itertools.product(hooks, ranks):
            key = {"model": "m", "ranks": n, "ddp": True, "comm_hook": hook}
            rate = estimate(10.0 * n, 9.0 * n, 11.0 * n)
            cases.append(case(f"{n} {hook}", key=key, metrics={"samples_per_s": rate}))
        paths.append(write(tmp_path / f"{name}.jsonl", *cases))
    figures = draw(load(paths[:2]))
    titles = [f"samples/s, m, comm hook {hook}" for hook in hooks]
    assert [figure.get_label() for figure in figures] == titles
    for figure in figures:
        legend = figure.axes[0].get_legend()
        assert legend
        assert len(legend.get_texts()) == 2
        assert not covered(figure)
    (bars,) = draw(load(paths[2:]))
    assert len(bars.axes[0].get_yticklabels()) == 3
    assert not covered(bars)
    (runs,) = all_runs(compared(tmp_path, change=is_disturbed), ("a" * 30, "b" * 30))
    assert not covered(runs)


def test_many_cases_have_a_row_each(tmp_path: Path) -> None:
    """No label covers another, and the common prefix of 64 cases is in the title."""
    for i in range(2):
        times = alike(64, 0.1, i)
        cases = [case(f"all_reduce sum, {2**k} bytes", [t] * 12) for k, t in enumerate(times)]
        write(tmp_path / f"{i}.jsonl", *cases)
    base, test = (load([str(tmp_path / f"{i}.jsonl")]) for i in range(2))
    (figure,) = all_runs(compare(base, test, Design()), ("BASE", "TEST"))
    assert figure.get_label() == "All runs: all_reduce sum"
    labels = figure.axes[0].get_yticklabels()
    assert [label.get_text() for label in labels][:2] == ["1 bytes", "2 bytes"]
    assert has_room(figure)
    cases = [case(f"a case with quite a long name, number {k}") for k in range(20)]
    (bars,) = draw(load([write(tmp_path / "a.jsonl", *cases, benchmark="mine")]))
    assert has_room(bars)


def test_answers_of_several_reports_are_a_table(tmp_path: Path) -> None:
    """The answer of a single report is in bold."""
    for name in ("a", "b"):
        end = {"status": "complete", "answer": [f"{name} is fast", "and right"]}
        write(tmp_path / f"{name}.jsonl", case("x"), end, status=None)
    page = page_of(tmp_path, str(tmp_path / "a.jsonl"))
    assert lines_of(page, "answer") == ["a is fast", "and right"]
    page = page_of(tmp_path, str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl"))
    assert lines_of(page, "answer") == []
    rows = [["a", "a is fast"], ["", "and right"], ["b", "b is fast"], ["", "and right"]]
    assert tables_of(page)["Answers"][1:] == rows
