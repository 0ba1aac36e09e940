"""docs/tutorial.md: its commands run, and its outputs are those of the reports in docs/results."""

import re
import shlex
from collections.abc import Callable
from typing import Any

import pytest

from analysis import compare
from analysis.ab import add_flags
from analysis.load import load as load_runs
from analysis.verdicts import Design
from analysis.verdicts import compare as compare_runs
from benchmarks import collectives, ddp_sweep, input_sweep, node_check
from common.cli import Parser
from common.report import Report, load
from common.table import cells_of
from tests.process import ROOT

PAGE = (ROOT / "docs" / "tutorial.md").read_text()
RESULTS = ROOT / "docs" / "results" / "tutorial"
STALE = pytest.mark.skip(reason="until `make results`")
COMMANDS = [
    shlex.split(line)
    for line in re.sub(r"\\\n\s*", "", PAGE).splitlines()
    if re.match(r"    (torchrun|python|sudo) ", line)
]
# Those that leave a report, by its name. test_examples.py runs the examples.
MEASURED = {command[-1]: command for command in COMMANDS if "--json" in command}
[AB] = [command for command in COMMANDS if "analysis/ab.py" in command]
FAST = ["--warmup-iters", "1", "--iters"]
# Flags that make a command short. Other tests run like commands of the other steps:
# test_node_check.py, test_input_sweep.py and test_ab.py.
SMALL = {
    "ddp.jsonl": ["--image-size", "32", *FAST, "6"],
    "collectives.jsonl": [*FAST, "6"],
}


def report_of(name: str) -> Report:
    return load(str(RESULTS / name))


def single_blanks(text: str) -> str:
    return " ".join(text.split())


LINES = {single_blanks(line) for line in PAGE.splitlines()}
# the sentences of a run go over some lines, each with its own #
FOLDED = single_blanks(re.sub(r"\n +# ", " ", PAGE))


@STALE
@pytest.mark.parametrize("name", MEASURED)
def test_a_report_is_what_its_command_has_left(name: str) -> None:
    """Its sentences are on the page, too."""
    report, command = report_of(name), MEASURED[name]
    script = next(i for i, word in enumerate(command) if word.endswith(".py"))
    assert report.argv == command[script:]
    assert report.status == "complete"
    for sentence in report.end["answer"]:
        assert sentence in FOLDED


@STALE
def test_rows_of_node_check() -> None:
    """The first table: that of each rank alone."""
    cases = [case for case in report_of("node.jsonl").cases if "rank" in case.key]
    alone = [case for case in cases if case.key["probe"] == cases[0].key["probe"]]
    assert len(alone) == 2
    for case in alone:
        cells = cells_of(node_check.COLUMNS, case)
        shown = [cell for cell in cells if cell != "-"]
        assert single_blanks(" ".join(shown)) in LINES


@STALE
def test_rows_of_ddp_sweep() -> None:
    for case in report_of("ddp.jsonl").cases:
        assert single_blanks(" ".join(cells_of(ddp_sweep.BREAKDOWN, case))) in LINES


@STALE
def test_rows_of_input_sweep() -> None:
    """Without the last columns."""
    report = report_of("input.jsonl")
    for case in report.cases:
        assert single_blanks(" ".join(cells_of(input_sweep.COLUMNS, case)[:8])) in LINES


@STALE
def test_two_nodes() -> None:
    """Rows without the last columns."""
    for case in report_of("two.jsonl").cases:
        assert single_blanks(" ".join(cells_of(ddp_sweep.BREAKDOWN, case)[:10])) in LINES
    table = collectives.ScanTable()
    printed = [single_blanks(table.row(case)) for case in report_of("link.jsonl").cases]
    assert LINES.issuperset(printed)


@STALE
def test_rows_of_collectives() -> None:
    """Without some sizes."""
    table = collectives.ScanTable()
    printed = [single_blanks(table.row(case)) for case in report_of("collectives.jsonl").cases]
    assert len(LINES.intersection(printed)) == 4


@STALE
def test_the_verdict_is_that_of_the_reports() -> None:
    parser = Parser(None)
    add_flags(parser)
    args = parser.parse_args(AB[2:])
    sides = [str(RESULTS / "change" / side / "*.jsonl") for side in "ab"]
    base, test = (load_runs([side], ignore=args.ignore_key) for side in sides)
    assert len(base) == len(test) == args.runs
    for (_, command), runs in zip((args.a, *args.b), (base, test), strict=True):
        words = shlex.split(command)
        assert all(run.argv[:-2] == words[4:] for run in runs)
    design = Design(args.margin, paired=True, interleaved=args.interleave)
    printed = compare.show(compare_runs(base, test, design))
    for line in printed.splitlines()[1:]:
        assert single_blanks(line.removeprefix("# ")) in FOLDED


@pytest.mark.smoke
@pytest.mark.parametrize("name", SMALL)
def test_a_command_runs(name: str, bench: Callable[..., Any]) -> None:
    launcher, flags = MEASURED[name][:3], MEASURED[name][3:-2]
    assert launcher == ["torchrun", "--nproc-per-node", "2"]
    run = bench(*flags, "--device", "cpu", *SMALL[name], timeout=120)
    assert run.status == 0, run.err
    assert {case.check for case in run.report.cases} == {"passed"}
