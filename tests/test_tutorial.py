"""The outputs on docs/tutorial.md are those of the reports in docs/results."""

import re
import shlex

import pytest

from analysis import compare
from analysis.ab import add_flags
from analysis.runs.load import load as load_runs
from analysis.runs.verdicts import Design
from analysis.runs.verdicts import compare as compare_runs
from benchmarks import collectives, ddp_sweep, input_sweep, node_check
from harness.cli import Parser
from harness.report import load
from tests.process import ROOT

PAGE = (ROOT / "docs" / "tutorial.md").read_text()
RESULTS = ROOT / "docs" / "results" / "tutorial"
COMMANDS = [
    shlex.split(line)
    for line in re.sub(r"\\\n\s*", "", PAGE).splitlines()
    if re.match(r"    (torchrun|python|sudo) ", line)
]
# The commands that write a report, by its name. test_examples.py runs the examples.
MEASURED = {command[-1]: command for command in COMMANDS if "--json" in command}
[AB] = [command for command in COMMANDS if "analysis/ab.py" in command]


def single_blanks(text: str) -> str:
    return " ".join(text.split())


LINES = {single_blanks(line) for line in PAGE.splitlines()}
# a sentence of a run is printed over several lines, each with its own #
FOLDED = single_blanks(re.sub(r"\n +# ", " ", PAGE))


@pytest.mark.parametrize("name", MEASURED)
def test_a_report_comes_from_its_command(name: str) -> None:
    """Its sentences are on the page, except the one about the start-up."""
    report, command = load(str(RESULTS / name)), MEASURED[name]
    script = next(i for i, word in enumerate(command) if word.endswith(".py"))
    assert report.argv == command[script:]
    assert report.status == "complete"
    for sentence in report.end["answer"]:
        assert sentence in FOLDED or sentence.startswith("start-up: ")


def test_rows() -> None:
    """Without the last columns. node_check.py leaves out columns without numbers."""
    for name, columns, shown, rows in (
        ("node.jsonl", node_check.COLUMNS, 99, 2),  # of each rank alone
        ("ddp.jsonl", ddp_sweep.BREAKDOWN, 9, 3),
        ("input.jsonl", input_sweep.COLUMNS, 10, 1),
        ("two.jsonl", ddp_sweep.BREAKDOWN, 8, 3),
    ):
        for case in load(str(RESULTS / name)).cases[:rows]:
            cells = [cell(case) for cell in columns.values()][:shown]
            cells = [cell for cell in cells if cell != "-" or name != "node.jsonl"]
            assert single_blanks(" ".join(cells)) in LINES, name


@pytest.mark.parametrize("name", ["collectives.jsonl", "link.jsonl"])
def test_rows_of_collectives(name: str) -> None:
    """Two of the sizes, without the last word."""
    table = collectives.ScanTable()
    lines = [table.row(case).splitlines()[-1] for case in load(str(RESULTS / name)).cases]
    assert len(LINES & {single_blanks(line.partition("imprecise")[0]) for line in lines}) == 2


def test_the_verdict_comes_from_the_reports() -> None:
    parser = Parser(None)
    add_flags(parser)
    args = parser.parse_args(AB[2:])
    sides = [str(RESULTS / "change" / side / "*.jsonl") for side in "ab"]
    base, test = (load_runs([side], ignore=args.ignore_key) for side in sides)
    assert len(base) == len(test) == args.runs
    for command, runs in zip((args.a, *args.b), (base, test), strict=True):
        assert all(run.argv[:-2] == shlex.split(command)[4:] for run in runs)
    design = Design(args.margin, paired=True, interleaved=args.interleave)
    printed = compare.show(compare_runs(base, test, design))
    for line in printed.splitlines()[1:]:
        assert single_blanks(line.removeprefix("# ")) in FOLDED
