#!/usr/bin/env python3
# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "numpy>=1.26", "pandas>=2.1", "scipy>=1.11", "tabulate>=0.9", "matplotlib>=3.8", "psutil>=5.9"
# ]
# ///
"""Which of several settings is the fastest? Runs all of them in rounds, and drops the slower ones.

The settings are called arms. Each arm runs once a round, in a random order. After some rounds there
is a look: an arm that is slower than the best one with confidence is dropped. The race ends when
one arm is left, when the others are the same within --margin, or after --max-runs. All looks at all
pairs of arms share the 5 % of error.

    python analysis/race.py --out buckets --ignore-key bucket_size_mb -k 1M/2G \\
        --arm 1MB='torchrun --nproc-per-node 2 benchmarks/ddp_sweep.py --bucket-size 1' \\
        --arm 25MB='torchrun --nproc-per-node 2 benchmarks/ddp_sweep.py --bucket-size 25'
    python analysis/race.py --out algorithms --arm-env ring=NCCL_ALGO=Ring tree=NCCL_ALGO=Tree \\
        --command 'torchrun --nproc-per-node 8 benchmarks/collectives.py'

Arms are compared over all cases, by the geometric mean. At the end each case has its own line.
OUT/NAME holds the reports of an arm. The same call goes on where it was interrupted. --interleave
is as in ab.py: all arms of a round at once, block by block. docs/compare.md says more.

Exit status: 0; 1 where a run fails; 2 bad usage; 130 after Ctrl-C. BSD-3-Clause.
"""

import argparse
import functools
import random
import re
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # until main(): Ctrl-C while pandas is imported is no traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from analysis.commands import (
    Command,
    command_text,
    folder,
    load_rounds,
    open_folder,
    planned_looks,
    run_commands,
    run_round,
)
from analysis.compare import keep
from analysis.show import clean, list_once, put, show_table
from analysis.verdicts import Comparison, Design, Result, compare
from common.cli import Parser, fraction, list_of, number, positive_int, wrong

# An arm against another one over their first rounds: base, test, rounds -> ...
CompareArms = Callable[[str, str, int], Comparison]
ResultOf = Callable[[str, str, int], Result]


@dataclass
class Race:
    """How a race went."""

    best: str
    rounds: dict[str, int]  # how many each arm has run
    dropped: dict[str, str] = field(default_factory=dict)  # an arm, and the one that it lost to


def run_race(
    names: Sequence[str],
    looks: Sequence[int],
    run_rounds: Callable[[list[str], range], None],
    result_of: ResultOf,
) -> Race:
    """Run the arms and drop the slower ones, until the best is known or the looks are over.

    Successive elimination (Even-Dar et al., J. Mach. Learn. Res. 7, 2006). looks: after how many
    rounds. run_rounds: runs these arms in these rounds; the first round is 1.
    """
    race = Race(names[0], dict.fromkeys(names, 0))
    racing = list(names)
    past = 0
    for look in looks:
        run_rounds(racing, range(past + 1, look + 1))
        past = look
        race.rounds |= dict.fromkeys(racing, look)
        race.best = fastest(racing, look, result_of)
        others = [name for name in racing if name != race.best]
        results = {name: result_of(race.best, name, look) for name in others}
        slower = [name for name in others if is_slower(results[name])]
        race.dropped |= dict.fromkeys(slower, race.best)
        rivals = [name for name in others if name not in slower]
        if all(results[name].verdict == "same" for name in rivals):
            break
        racing = [name for name in racing if name not in slower]
    return race


def fastest(names: Sequence[str], rounds: int, result_of: ResultOf) -> str:
    """The arm with the smallest mean time: each one is compared with the best before it."""
    best, *rivals = names
    for rival in rivals:
        ratio = result_of(best, rival, rounds).ratio
        if ratio is not None and ratio < 1:
            best = rival
    return best


def is_slower(result: Result) -> bool:
    """Whether TEST is slower than BASE with confidence, by however little."""
    return result.interval is not None and result.interval[0] > 1


def overall(comparison: Comparison) -> Result:
    """The geometric mean over the cases, or the only case."""
    return comparison.mean or comparison.cases[0]


def results_against(race: Race, best: str, result_of: ResultOf) -> dict[str, Result]:
    """The result of each other arm against `best`, over the rounds that both have."""
    results = {}
    for name, rounds in race.rounds.items():
        if name != best:
            shared = min(rounds, race.rounds[best])
            results[name] = result_of(best, name, shared)
    return results


def fastest_first(results: dict[str, Result]) -> list[tuple[str, Result]]:
    """The arms and their results. An arm without a ratio stands where it would be like the best."""
    return sorted(results.items(), key=lambda item: item[1].ratio or 1.0)


def sentence(race: Race, best: str, results: dict[str, Result], margin: float) -> str:
    """`best: X; Y cannot be told apart from it; Z is 1.12 (1.08 to 1.17) times slower`"""
    parts = [f"best: {best}"]
    for name, result in fastest_first(results):
        if result.interval is None:
            parts.append(f"{name} has no time to compare")
        elif is_slower(result):
            low, high = result.interval
            parts.append(f"{name} is {result.ratio:.3g} ({low:.3g} to {high:.3g}) times slower")
        elif result.verdict == "same":
            parts.append(f"{name} is the same within {100 * margin:g} %")
        elif name in race.dropped:
            parts.append(f"{name} was slower than {race.dropped[name]}")
        else:
            parts.append(f"{name} cannot be told apart from it")
    return "; ".join(parts)


def show(race: Race, args: argparse.Namespace, compared: CompareArms) -> str:
    """The arms over all cases as a table, then a sentence on each case and on all."""

    def over_all(base: str, test: str, rounds: int) -> Result:
        return overall(compared(base, test, rounds))

    results = results_against(race, race.best, over_all)
    first, second, *_ = race.rounds
    cases = compared(first, second, 1).cases
    lines = [heading(race, args, cases), "", show_arms(race, results), ""]
    if len(cases) > 1:
        for case in cases:
            text = sentence_of_case(race, case.key, compared, args.margin)
            lines.append(f"# {case.label}: {text}")
    lines.append(f"# {sentence(race, race.best, results, args.margin)}")
    return "\n".join(lines)


def show_arms(race: Race, results: dict[str, Result]) -> str:
    """A table of the arms. results: those of the others against the best."""
    header = ["arm", "runs", "time / best", "interval"]
    rows: list[list[Any]] = [[race.best, race.rounds[race.best], "1", ""]]
    for name, result in fastest_first(results):
        ratio = f"{result.ratio:.4g}" if result.ratio else "-"
        ends = [f"{end:.4g}" for end in result.interval or ()]
        interval = " to ".join(ends)
        rows.append([name, race.rounds[name], ratio, interval])
    return show_table(header, rows, (1, 2), "table")


def sentence_of_case(race: Race, key: dict[str, Any], compared: CompareArms, margin: float) -> str:
    """`sentence` for one case, in which another arm may be the best than over all cases."""

    def result_of(base: str, test: str, rounds: int) -> Result:
        cases = compared(base, test, rounds).cases
        return next((case for case in cases if case.key == key), Result("", key))

    ratios = {race.best: 1.0}
    for name, result in results_against(race, race.best, result_of).items():
        if result.ratio:
            ratios[name] = result.ratio
    best = min(ratios, key=lambda name: ratios[name])
    results = results_against(race, best, result_of)
    return sentence(race, best, results, margin)


def heading(race: Race, args: argparse.Namespace, cases: Sequence[Result]) -> str:
    names = list_once(case.benchmark for case in cases)
    measures = list_once(case.measure for case in cases if case.measure)
    arms = len(race.rounds)
    runs = sum(race.rounds.values())
    turns = "; their blocks took turns" if args.interleave else ""
    what = f"{arms} arms, {runs} runs where {args.max_runs * arms} were allowed"
    return clean(f"# torchrun-bench race {names} ({measures}): {what}{turns}", 500)


def design_of(
    names: Sequence[str], looks: Sequence[int], margin: float, interleave: bool
) -> Design:
    """Every look at every pair of arms has its part of the 5 %: nobody knows which will lead."""
    pairs = len(names) * (len(names) - 1) // 2
    return Design(margin, True, interleave, len(looks) * pairs)


def measure(args: argparse.Namespace) -> str:
    """Run the race; what is to be printed. Raises RuntimeError where a run fails."""
    looks = planned_looks(args.runs, args.max_runs)
    arms = arms_of(args)
    names = list(arms)
    design = design_of(names, looks, args.margin, args.interleave)

    @functools.cache
    def compared(base: str, test: str, rounds: int) -> Comparison:
        pair = [arms[base], arms[test]]
        runs = load_rounds(pair, [rounds, rounds], args.ignore_key)
        base_runs = runs[base]
        test_runs = runs[test]
        if args.k:
            keep([*base_runs, *test_runs], args.k)
        return compare(base_runs, test_runs, design)

    def run_rounds(racing: list[str], rounds: range) -> None:
        for n in rounds:
            order = [arms[name] for name in racing]
            random.Random(n).shuffle(order)  # the same order after an interruption
            run_round(order, n, args.interleave, f"round {n} of {looks[-1]}, {len(order)} arms,")
            if n == 1:  # do keys meet?
                for name in names[1:]:
                    compared(names[0], name, 1)

    def over_all(base: str, test: str, rounds: int) -> Result:
        return overall(compared(base, test, rounds))

    plan: dict[str, Any] = {}
    for command in arms.values():
        plan[command.name] = (command.text, command.variables)
    plan |= {"interleave": args.interleave, "looks after runs": looks}
    with open_folder(args.out, list(arms.values()), plan):
        race = run_race(names, looks, run_rounds, over_all)
        return show(race, args, compared)


def arm(text: str) -> tuple[str, str]:
    """NAME=REST as a pair."""
    name, equals, rest = text.partition("=")
    if not re.fullmatch(r"[\w.+-]+", name) or not equals or not rest.strip():
        wrong("NAME=COMMAND, the name without blanks", repr(text), "e.g. --arm 1MB='torchrun x.py'")
    return name, rest


def arm_variable(text: str) -> tuple[str, str]:
    """NAME=VARIABLE=VALUE as the name and the rest."""
    name, rest = arm(text)
    if "=" not in rest:
        wrong("NAME=VARIABLE=VALUE", repr(text), "e.g. --arm-env ring=NCCL_ALGO=Ring")
    return name, rest


def arms_of(args: argparse.Namespace) -> dict[str, Command]:
    """The arms by their names. Raises ValueError where there are fewer than two, or one twice."""
    arms: dict[str, Command] = {}
    for name, text in args.arm:
        if name in arms:
            raise ValueError(f"two arms are called {name}; give each a name of its own")
        arms[name] = Command(name, text, [], args.out / name)
    for name, variable in args.arm_env:
        if name not in arms and not args.command:
            raise ValueError(f"--arm-env {name}: there is no --arm of this name, and no --command")
        arms.setdefault(name, Command(name, args.command, [], args.out / name))
        arms[name].variables.append(variable)
    if len(arms) < 2:
        raise ValueError(f"expected two arms or more, got {len(arms)}; e.g. --arm 1MB=... 25MB=...")
    return arms


def add_flags(parser: Parser) -> None:
    add = parser.add_argument
    lists: dict[str, Any] = {"nargs": "+", "action": "extend", "default": []}
    add("--arm", type=arm, metavar="NAME=COMMAND", help="an arm, as one word: quote it", **lists)
    variable = "NAME=VARIABLE=VALUE, for the runs of one arm alone"
    add("--arm-env", type=arm_variable, metavar="SETTING", help=variable, **lists)
    command = "the command of arms that have variables alone"
    add("--command", type=command_text, metavar="COMMAND", help=command)
    add("--out", required=True, type=folder, metavar="DIR", help="keep plan, reports and logs here")
    add("--runs", type=number(int, 2), default=6, metavar="N", help="first look (default: 6)")
    most = "at most so many runs of an arm (default: 4 times --runs)"
    add("--max-runs", type=positive_int, metavar="N", help=most)
    add("--interleave", action="store_true", help="all arms of a round at once, block by block")
    margin = "arms that differ by less are the same (default: 2%%)"
    add("--margin", type=fraction, default=0.02, metavar="P", help=margin)
    key = "join cases that differ in these fields of their keys; a list"
    add("--ignore-key", type=list_of(str), default=[], metavar="NAME", help=key)
    add("-k", metavar="TEXT", help="only the cases with TEXT in their name or key")


def parse_args() -> argparse.Namespace:
    parser = Parser(__doc__)
    add_flags(parser)
    args = parser.parse_args()
    args.max_runs = max(args.runs, args.max_runs or 4 * args.runs)
    return args


def main() -> int:
    args = parse_args()
    put(run_commands(lambda: measure(args)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
