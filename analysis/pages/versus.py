"""The comparison on report.py's page: what was compared, verdicts, all runs, and differences.

Verdicts, numbers and notes come from the functions with which compare.py and ab.py print them.
"""

import argparse
import json
import re
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from analysis import show
from analysis.compare import lines_above, notes_of, table_of, two_sides
from analysis.pages.page import Section, Table
from analysis.runs.evidence import load_text
from analysis.runs.load import Run, arrange, copies
from analysis.runs.looks import compare
from analysis.runs.plan import PLAN, VERDICT, Verdict, read_lines, remarks_on
from analysis.runs.verdicts import Comparison, Design, Result
from harness import files
from harness.cli import cut

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MARKS = {  # verdict -> how to highlight its row
    **dict.fromkeys(("slower", "failed"), "failed"),
    "faster": "faster",
    **dict.fromkeys(("undecided", "missing", "not compared"), "differs"),
}


@dataclass
class Versus:
    """A comparison, with the names and commands of its sides."""

    comparison: Comparison
    names: tuple[str, str]  # of BASE and TEST
    commands: tuple[str, str]
    is_like_with_like: bool = False  # TEST is BASE run again (an A/A test)

    @property
    def title(self) -> str:
        base, test = self.names
        return f"{base} against itself" if self.is_like_with_like else f"{test} against {base}"

    def section(self) -> Section:
        """The section about this comparison."""
        comparison = self.comparison
        headline, *notes = notes_of(comparison, self.is_like_with_like)
        headings = lines_above(comparison)[:2]
        hardware = [entry.field for entry in comparison.environment if entry.hardware]
        if not comparison.environment:
            notes.append("The environments of the two sides do not differ.")
        warnings = list(comparison.warnings)
        if hardware:
            warnings.insert(0, f"The hardware differs: {', '.join(hardware)}.")
        return Section(
            self.title,
            [self.differences(), self.runs()] if comparison.environment else [self.runs()],
            answers=[headline],
            warnings=warnings,
            first=[self.sides(), self.verdicts()],
            notes=notes,
            details=headings,
            figures=self.figures,
        )

    def figures(self) -> "list[Figure]":
        from analysis.pages.figures import all_runs  # not above: it takes longer than --help

        return all_runs(self.comparison, self.names, not self.is_like_with_like)

    def sides(self) -> Table:
        """The names, commands and versions of the two sides."""
        rows = []
        for side, runs, name, command in zip(
            ("BASE", "TEST"),
            (self.comparison.base, self.comparison.test),
            self.names,
            self.commands,
            strict=True,
        ):
            torch = show.join_distinct(str(run.environment.get("torch") or "-") for run in runs)
            commit = show.join_distinct(str(run.environment.get("version") or "-") for run in runs)
            starts = sorted(run.started_at[:16].replace("T", " ") for run in runs if run.started_at)
            first, last = (starts[0], starts[-1]) if starts else ("-", "-")
            when = first if first == last else f"{first} to {last}"
            when = when.replace(f"to {first[:11]}", "to ")  # do not repeat the day
            label = side if name == side else f"{side}: {name}"
            rows.append([label, command, str(len(runs)), torch, commit, when])
        heads = ("side", "command", "runs", "PyTorch", "version", "started")
        return Table("What was compared", heads, rows, {})

    def verdicts(self) -> Table:
        """The table of compare.py with the verdict first, and the number of runs that count."""
        header, rows = table_of(self.comparison, self.is_like_with_like)
        results = [*self.comparison.cases]
        results += [self.comparison.mean] if self.comparison.mean else []
        marks = {}
        for number, result in enumerate(results):
            if result.verdict in MARKS and not self.is_like_with_like:
                marks[number] = MARKS[result.verdict]
        counts = [self.count(result) for result in results]
        order = (0, 5, 3, 4, 1, 2)  # of the columns of compare.py
        cells = [[*(row[i] for i in order), n] for row, n in zip(rows, counts, strict=True)]
        heads = [*(header[i] for i in order), "runs that count"]
        return Table("Verdicts", heads, cells, marks)

    def count(self, result: Result) -> str:
        """`4 of 6, 6 of 6`: the number of runs of BASE and of TEST that count."""
        if result.cases > 1:
            return ""
        base, test = self.comparison.runs_of(result.benchmark)
        sides = ((base, result.base_why), (test, result.test_why))
        return ", ".join(f"{len(runs) - len(why)} of {len(runs)}" for runs, why in sides)

    def differences(self) -> Table:
        """The differences between the environments of the two sides."""
        rows, marks = [], {}
        for number, entry in enumerate(self.comparison.environment):
            kind = " (hardware)" if entry.hardware else ""
            marks[number] = "failed" if entry.hardware else "differs"
            rows.append([f"{entry.field}{kind}", "; ".join(entry.base), "; ".join(entry.test)])
        return Table("Differences of the environments", ("field", *self.names), rows, marks)

    def runs(self) -> Table:
        """Every run, with its load and the number of cases for which it counts."""
        rows: list[list[str]] = []
        marks = {}
        for name, runs, side in (
            ("base", self.comparison.base, self.names[0]),
            ("test", self.comparison.test, self.names[1]),
        ):
            places: Counter[str] = Counter()  # position among the runs of its benchmark
            for run in runs:
                place = places[run.benchmark]
                places[run.benchmark] += 1
                cases = [c for c in self.comparison.cases if c.benchmark == run.benchmark]
                whys = [why for c in cases if (why := getattr(c, f"{name}_why").get(place))]
                if len(whys) == len(cases):
                    marks[len(rows)] = "differs"
                when = run.started_at[:19].replace("T", " ") or "-"
                count = f"{len(cases) - len(whys)} of {len(cases)}"
                about = [run.label, side, count, load_text(run), when]
                rows.append([*about, cut(list(dict.fromkeys(whys)), 3)])
        cpu = "CPU use by other processes"
        heads = ["run", "side", "counts in", cpu, "started", "why it does not count"]
        if not any(row[-1] for row in rows):
            heads, rows = heads[:-1], [row[:-1] for row in rows]
        return Table("Runs", heads, rows, marks)


class Folder(NamedTuple):
    """A folder of ab.py, as described by its plan."""

    path: Path
    commands: dict[str, str]  # name -> the command with its variables; the first one is A
    runs: int  # number of pairs that a verdict requires
    interleave: bool
    verdict: Verdict

    def reports(self) -> list[str]:
        """The reports of all commands, without other files of the folder."""
        found = [path for name in self.commands for path in (self.path / name).glob("*.jsonl")]
        return sorted(map(str, found))


def is_folder(word: str) -> bool:
    return (Path(word) / PLAN).is_file()


def read_folder(word: str) -> Folder:
    """Read the plan in a folder of ab.py. Raises ValueError if it is damaged."""
    path = Path(word)
    for name in (PLAN, VERDICT):
        files.check_regular(path / name)
    lines = read_lines(path / PLAN)
    commands = {name: text for kind, name, text in map(split_line, lines) if kind == "command"}
    for kind, name, text in map(split_line, lines):
        if kind == "variable of" and name in commands:
            variable, _, value = text.partition("=")
            commands[name] = f"{variable}={shlex.quote(value)} {commands[name]}"
    settings = dict(line.split(": ", 1) for line in lines if re.match(r"(runs|interleave)", line))
    try:
        runs = int(settings["runs"])
        verdict = Verdict(**json.loads((path / VERDICT).read_text()))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a complete folder of ab.py: {error}") from None
    if len(commands) != 2:
        raise ValueError(f"{path / PLAN} names {len(commands)} commands, expected 2")
    return Folder(path, commands, runs, settings.get("interleave") == "True", verdict)


def split_line(line: str) -> tuple[str, str, str]:
    """`command a: torchrun x.py` -> command, a, torchrun x.py."""
    match = re.match(r"(command|variable of) ([\w.+-]+): (.*)", line)
    return (match[1], match[2], match[3]) if match else ("", "", "")


def compare_folder(
    folder: Folder, given: argparse.Namespace, runs: Sequence[Run], commands: dict[str, str]
) -> Section:
    """The comparison that ab.py printed for a folder, computed again from its runs.

    given: flags of report.py; None for those of the last call of ab.py. commands: their texts for
    the page. Raises ValueError if no case is on both sides.
    """
    verdict = with_flags(folder.verdict, given)
    a, b = folder.commands
    of_path = {run.path: run for run in runs}
    sides: dict[str, list[Run]] = {a: [], b: []}
    for name, side in sides.items():
        while run := of_path.get(str(folder.path / name / f"{len(side) + 1:02d}.jsonl")):
            side.append(run)
    common = min(map(len, sides.values()))
    if not common:
        raise ValueError("no round is complete")
    chosen = copies([*sides[a][:common], *sides[b][:common]])
    arrange([*chosen], verdict.ignore_key)  # sorts a copy of the list
    design = verdict.design(folder.runs, folder.interleave)
    comparison = compare(chosen[:common], chosen[common:], design)
    comparison.remarks.extend(remarks_on(verdict.unchecked))
    texts = commands[a], commands[b]
    section = Versus(comparison, (a, b), texts, verdict.is_like_with_like).section()
    rounds = {name: len(side) for name, side in sides.items()}
    section.warnings += unfinished_rounds(rounds, common)
    return section


def with_flags(verdict: Verdict, given: argparse.Namespace) -> Verdict:
    """The flags of ab.py, overridden by those given to report.py."""
    changed = {}
    if given.margin is not None:
        changed["margin"] = given.margin
    if given.ignore_key:
        changed["ignore_key"] = given.ignore_key
    if given.allow_disturbed:
        changed["allow_disturbed"] = True
    return verdict._replace(**changed)


def unfinished_rounds(rounds: dict[str, int], common: int) -> list[str]:
    """A remark on the runs of a round that was not finished."""
    more = [f"{name}/{common + 1:02d}" for name, count in rounds.items() if count > common]
    return [f"{', '.join(more)} has no partner: its round was not finished."] if more else []


def compare_sides(
    base: Sequence[str], given: argparse.Namespace, runs: Sequence[Run], endings: Sequence[str]
) -> Section:
    """The comparison that compare.py prints. given: its flags; the margin may be None. endings:
    suffixes of the files to read from a folder.

    Raises ValueError if no case is on both sides.
    """
    margin = Design.margin if given.margin is None else given.margin
    flags = argparse.Namespace(**vars(given) | {"base": base, "margin": margin})
    chosen = copies(runs)
    arrange(chosen, given.ignore_key, join_foreign=True)
    comparison = two_sides(flags, chosen, endings)
    commands = []
    for side in (comparison.base, comparison.test):
        commands.append(show.join_distinct(command_of(run) for run in side))
    return Versus(comparison, ("BASE", "TEST"), (commands[0], commands[1])).section()


def command_of(run: Run) -> str:
    """The command of a report, without the path of the report."""
    words = list(map(str, run.argv))
    for flag in ("--json", "-J", "--output-file"):
        if flag in words[:-1]:
            del words[words.index(flag) : words.index(flag) + 2]
    return " ".join(words) or "-"
