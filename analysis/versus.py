"""The first part of report.py's page: what was compared, the verdicts, all runs, what differs.

Verdicts, numbers and notes are those of compare.py and ab.py, from the functions that print them.
"""

import argparse
import functools
import json
import re
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from analysis import show
from analysis.compare import above, cells, notes_of, table_of, two_sides
from analysis.evidence import load_text
from analysis.figures import all_rounds, all_runs
from analysis.load import Run, arrange, copies
from analysis.page import Section, Table
from analysis.plan import PLAN, VERDICT, Verdict, read_lines
from analysis.race import (
    Compared,
    against_the_best,
    conclusions,
    design_of,
    overall,
    replay,
    sides,
)
from analysis.verdicts import Comparison, Design, Result, compare
from common.cli import cut

MARKS = {  # verdict -> why its row stands out
    **dict.fromkeys(("slower", "failed"), "failed"),
    "faster": "faster",
    **dict.fromkeys(("undecided", "missing", "not compared"), "differs"),
}


@dataclass
class Versus:
    """A comparison and what its sides are called."""

    comparison: Comparison
    names: tuple[str, str]  # of BASE and TEST
    commands: tuple[str, str]
    is_like_with_like: bool = False  # TEST is BASE again
    folded: bool = False

    @property
    def title(self) -> str:
        base, test = self.names
        return f"{base} against itself" if self.is_like_with_like else f"{test} against {base}"

    def section(self) -> Section:
        """Which side is which, the verdicts, all runs, what differs, what disturbed the runs."""
        comparison = self.comparison
        headline, *notes = notes_of(comparison, self.is_like_with_like)
        headings = above(comparison)[:2]
        hardware = [entry.field for entry in comparison.environment if entry.hardware]
        if not comparison.environment:
            notes.append("The environments of the two sides do not differ.")
        loud = list(comparison.warnings)
        if hardware:
            loud.insert(0, f"The hardware differs: {', '.join(hardware)}.")
        return Section(
            self.title,
            [self.differences(), self.runs()] if comparison.environment else [self.runs()],
            answers=[headline],
            loud=loud,
            first=[self.sides(), self.verdicts()],
            notes=notes,
            quiet=headings,
            figures=partial(all_runs, comparison, self.names, not self.is_like_with_like),
            folded=self.folded,
        )

    def sides(self) -> Table:
        """Which side is which."""
        rows = []
        for side, runs, name, command in zip(
            ("BASE", "TEST"),
            (self.comparison.base, self.comparison.test),
            self.names,
            self.commands,
            strict=True,
        ):
            torch = show.list_once(str(run.environment.get("torch") or "-") for run in runs)
            commit = show.list_once(str(run.environment.get("version") or "-") for run in runs)
            starts = sorted(run.started_at[:16].replace("T", " ") for run in runs if run.started_at)
            first, last = (starts[0], starts[-1]) if starts else ("-", "-")
            when = first if first == last else f"{first} to {last}"
            when = when.replace(f"to {first[:11]}", "to ")  # the same day
            label = side if name == side else f"{side}: {name}"
            rows.append([label, command, str(len(runs)), torch, commit, when])
        heads = ("side", "command", "runs", "PyTorch", "version", "started")
        return Table("What was compared", heads, rows, {})

    def verdicts(self) -> Table:
        """The table of compare.py with its verdict first, and the number of runs that count."""
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
        """`4 of 6, 6 of 6`: of the runs of BASE and of TEST."""
        if not result.key:
            return ""
        parts = []
        sides = ((self.comparison.base, result.base_why), (self.comparison.test, result.test_why))
        for runs, why in sides:
            total = sum(run.benchmark == result.benchmark for run in runs)
            parts.append(f"{total - len(why)} of {total}")
        return ", ".join(parts)

    def differences(self) -> Table:
        """What differs in the environments of the two sides."""
        rows, marks = [], {}
        for number, entry in enumerate(self.comparison.environment):
            kind = " (hardware)" if entry.hardware else ""
            marks[number] = "failed" if entry.hardware else "differs"
            rows.append([f"{entry.field}{kind}", "; ".join(entry.base), "; ".join(entry.test)])
        return Table("Differences of the environments", ("field", *self.names), rows, marks)

    def runs(self) -> Table:
        """Every run, what disturbed it, and in how many cases it counts."""
        rows: list[list[str]] = []
        marks = {}
        for name, runs, side in (
            ("base", self.comparison.base, self.names[0]),
            ("test", self.comparison.test, self.names[1]),
        ):
            places: Counter[str] = Counter()  # by benchmark, as in `Result`
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
        heads = ["run", "side", "counts in", "others' CPU use", "started", "why it does not count"]
        if not any(row[-1] for row in rows):
            heads, rows = heads[:-1], [row[:-1] for row in rows]
        return Table("Runs", heads, rows, marks)


class Folder(NamedTuple):
    """A folder of ab.py, as its plan describes it."""

    path: Path
    commands: dict[str, str]  # name -> the command with its variables; the first one is A
    looks: list[int]  # numbers of rounds
    interleave: bool
    verdict: Verdict

    def reports(self) -> list[str]:
        """All reports of the commands; no other file of the folder."""
        found = [path for name in self.commands for path in (self.path / name).glob("*.jsonl")]
        return sorted(map(str, found))


def is_folder(word: str) -> bool:
    return (Path(word) / PLAN).is_file()


def read_folder(word: str) -> Folder:
    """The plan in a folder of ab.py. Raises ValueError if it is damaged."""
    path = Path(word)
    lines = read_lines(path / PLAN)
    commands = {name: text for kind, name, text in map(split_line, lines) if kind == "command"}
    for kind, name, text in map(split_line, lines):
        if kind == "variable of" and name in commands:
            variable, _, value = text.partition("=")
            commands[name] = f"{variable}={shlex.quote(value)} {commands[name]}"
    settings = dict(line.split(": ", 1) for line in lines if re.match(r"(looks|interleave)", line))
    try:
        looks = [int(number) for number in json.loads(settings["looks after runs"])]
        verdict = Verdict(**json.loads((path / VERDICT).read_text()))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no whole folder of ab.py: {error}") from None
    if len(commands) < 2 or not looks:
        raise ValueError(f"{path / PLAN} names {len(commands)} commands, expected 2 or more")
    return Folder(path, commands, looks, settings.get("interleave") == "True", verdict)


def split_line(line: str) -> tuple[str, str, str]:
    """`command a: torchrun x.py` -> command, a, torchrun x.py."""
    match = re.match(r"(command|variable of) ([\w.+-]+): (.*)", line)
    return (match[1], match[2], match[3]) if match else ("", "", "")


def compare_folder(
    folder: Folder, given: argparse.Namespace, runs: Sequence[Run], commands: dict[str, str]
) -> list[Section]:
    """What ab.py printed of a folder, from its runs. given: flags, None where ab.py's own hold.

    commands: their texts as the page shows them. Raises ValueError if no case is on both sides.
    """
    verdict = with_flags(folder.verdict, given)
    names = list(folder.commands)
    design = design_of(verdict, folder.looks, folder.interleave, len(names))
    of_path = {run.path: run for run in runs}

    def path_of(name: str, number: int) -> str:
        return str(folder.path / name / f"{number:02d}.jsonl")

    def rounds_of(name: str) -> int:
        number = 0
        while path_of(name, number + 1) in of_path:
            number += 1
        return number

    @functools.cache
    def compared(base: str, test: str, rounds: int) -> Comparison:
        paths = [[path_of(name, n + 1) for n in range(rounds)] for name in (base, test)]
        chosen = copies([of_path[path] for path in (*paths[0], *paths[1])])
        arrange(chosen, verdict.ignore_key)
        return compare(*sides(chosen, *paths), design)

    rounds = {name: rounds_of(name) for name in names}
    if len(names) == 2:
        common = min(rounds.values())
        if not common:
            raise ValueError("no round is complete")
        a, b = names
        sides_of_pair = commands[a], commands[b]
        pair = Versus(compared(a, b, common), (a, b), sides_of_pair, verdict.is_like_with_like)
        section = pair.section()
        section.loud += without_partner(rounds, common)
        return [section]
    return sections_of_race(folder, rounds, compared, commands, verdict.margin)


def with_flags(verdict: Verdict, given: argparse.Namespace) -> Verdict:
    """The flags of ab.py, or those given to report.py."""
    changed = {}
    if given.margin is not None:
        changed["margin"] = given.margin
    if given.ignore_key:
        changed["ignore_key"] = given.ignore_key
    if given.allow_disturbed:
        changed["allow_disturbed"] = True
    return verdict._replace(**changed)


def without_partner(rounds: dict[str, int], common: int) -> list[str]:
    """What to say of runs whose round was not finished."""
    more = [f"{name}/{common + 1:02d}" for name, count in rounds.items() if count > common]
    return [f"{', '.join(more)} has no partner: the round was not finished."] if more else []


def sections_of_race(
    folder: Folder,
    rounds: dict[str, int],
    compared: Compared,
    commands: dict[str, str],
    margin: float,
) -> list[Section]:
    """The order of several commands, and each against the best one."""
    if not min(rounds.values()):
        raise ValueError("no round is complete")
    race, is_finished = replay(folder.looks, rounds, compared)
    comparisons = against_the_best(race, compared)
    headline, *warnings = conclusions(race, comparisons, margin)
    results = {name: overall(comparison) for name, comparison in comparisons.items()}
    rows = [[race.best, "BASE", "", "", str(race.rounds[race.best]), commands[race.best]]]
    marks = {}
    for name, result in results.items():
        if result.verdict in MARKS:
            marks[len(rows)] = MARKS[result.verdict]
        *_, ratio, ends, verdict = cells(result)
        rows.append([name, verdict, ratio, ends, str(race.rounds[name]), commands[name]])
    header, _ = table_of(next(iter(comparisons.values())))
    heads = ("name", "verdict", f"against {race.best}", header[4], "rounds", "command")
    title = "Each against the best"
    if any(not result.key for result in results.values()):
        title += ": geometric means over the cases"
    loud = warnings
    if not is_finished:
        loud = ["The race was not finished: the order may change.", *warnings]
    overview = Section(
        "Which is the fastest?",
        [],
        answers=[headline],
        loud=loud,
        first=[Table(title, heads, rows, marks)],
        figures=partial(all_rounds, results, race.best),
    )
    parts = []
    for name, comparison in comparisons.items():
        sides_of_pair = commands[race.best], commands[name]
        parts.append(Versus(comparison, (race.best, name), sides_of_pair, folded=True).section())
    return [overview, *parts]


def compare_sides(base: Sequence[str], given: argparse.Namespace, runs: Sequence[Run]) -> Section:
    """What compare.py prints of two sides. given: its flags; a margin of None is the default.

    Raises ValueError if no case is on both sides.
    """
    margin = Design.margin if given.margin is None else given.margin
    flags = argparse.Namespace(**vars(given) | {"base": base, "margin": margin})
    chosen = copies(runs)
    arrange(chosen, given.ignore_key, join_foreign=True)
    comparison = two_sides(flags, chosen)
    commands = []
    for side in (comparison.base, comparison.test):
        commands.append(show.list_once(command_of(run) for run in side))
    return Versus(comparison, ("BASE", "TEST"), (commands[0], commands[1])).section()


def command_of(run: Run) -> str:
    """The command of a report, without the name of the report."""
    words = list(map(str, run.argv))
    for flag in ("--json", "-J", "--output-file"):
        if flag in words[:-1]:
            del words[words.index(flag) : words.index(flag) + 2]
    return " ".join(words) or "-"
