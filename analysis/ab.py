#!/usr/bin/env python3
# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "numpy>=1.26", "pandas>=2.1", "scipy>=1.11", "tabulate>=0.9", "psutil>=5.9"
# ]
# ///
"""Is B slower than A? Or: which of several commands is the fastest? Runs the commands alternately.

Without --b and --b-env, the script compares A with itself, and prints the smallest change that this
number of runs detects.

In each round, A and B run once, and the two runs form a pair. Of every 4 rounds, two begin with A
and two with B, in random order, so that no periodic disturbance favors one of them. A pair is not
evidence if other processes loaded its two runs differently. It is then replaced by another round,
up to --max-runs.

The script appends `--json PATH` to each command, so that every run writes its report to OUT/a or
OUT/b. To continue an interrupted call, repeat it: runs with a complete report are not repeated. For
a command that writes no report, use --step, which reads step times from its output instead.

To compare several commands, give each a NAME. Each command runs once per round, in random order.
After 6, 8, 12, ... rounds, commands that are significantly slower than the fastest are dropped. The
script ends when one command is left, when the others are the same within --margin, or after
--max-runs. See docs/compare.md.

    python analysis/ab.py --runs 6 --out threads --b-env OMP_NUM_THREADS=2 \\
        --a 'torchrun --nproc-per-node 2 benchmarks/ddp_sweep.py'
    python analysis/ab.py --out versions --runs 12 \\
        --a '/opt/torch-2.14/bin/torchrun --nproc-per-node 8 benchmarks/ddp_sweep.py' \\
        --b '/opt/torch-2.15/bin/torchrun --nproc-per-node 8 benchmarks/ddp_sweep.py'
    python analysis/ab.py --out buckets --ignore-key bucket_size_mb \\
        --a 25MB='torchrun --nproc-per-node 2 benchmarks/ddp_sweep.py --bucket-size 25' \\
        --b 1MB='torchrun --nproc-per-node 2 benchmarks/ddp_sweep.py --bucket-size 1' \\
            5MB='torchrun --nproc-per-node 2 benchmarks/ddp_sweep.py --bucket-size 5'
    python analysis/ab.py --out compiled --skip 10 --step 'step took ([\\d.]+) ms' \\
        --a 'torchrun --nproc-per-node 8 train.py' \\
        --b 'torchrun --nproc-per-node 8 train.py --compile'

On a shared machine use --interleave: the runs of a round alternate block by block. It requires
scripts of this project, with rank 0 on this machine.

Exit status: 0 success; 1 if a run failed, the disk is full, or a case failed or has a verdict of
--fail-on; 2 incorrect usage; 4 with --fail-on, if there is no verdict; 129, 130 and 143 after
SIGHUP, Ctrl-C and SIGTERM. BSD-3-Clause.
"""

import argparse
import functools
import itertools
import math
import random
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from analysis.compare import add_verdict_flags, as_pair, exit_status, format_comparison, show
from analysis.logs import step_logs
from analysis.runs import as_json
from analysis.runs.commands import Command, ending_children, open_plan, run_round, seed_of
from analysis.runs.evidence import UNEQUAL_LOAD
from analysis.runs.load import load
from analysis.runs.plan import Verdict
from analysis.runs.race import (
    Compared,
    Race,
    against_the_best,
    conclusions,
    design_of,
    overall,
    sides,
)
from analysis.runs.verdicts import Comparison, Result, compare
from analysis.show import one_line, put
from harness.cli import Parser, checked, duration, number, positive_int, print_error, raise_invalid

Commands = dict[str, Command]  # by name; the first one is A


class Plan(NamedTuple):
    """How the rounds are run."""

    seed: int  # determines the order of the commands
    interleave: bool


# All ways in which two of 4 rounds can be in reverse order
PATTERNS = [*sorted(set(itertools.permutations([False, False, True, True])))]


def order_of(names: Sequence[str], n: int, seed: int) -> list[str]:
    """The order of the commands in round n, counting from 1. It follows from the seed, and is
    therefore the same after a restart.

    Of two commands, each comes first in two of every 4 rounds (1 to 4, 5 to 8, ...), chosen at
    random. The order of several commands is drawn independently in each round.
    """
    if len(names) > 2:
        order = list(names)
        random.Random(f"{seed} {n}").shuffle(order)
        return order
    block, place = divmod(n - 1, 4)
    is_reversed = random.Random(f"{seed} {block}").choice(PATTERNS)[place]
    return list(reversed(names)) if is_reversed else list(names)


def lost_pairs(comparison: Comparison) -> int:
    """The number of pairs of runs that are left out only because of the load."""
    return sum(why == UNEQUAL_LOAD for why in comparison.left_out.values())


def run_rounds(
    commands: Commands, looks: Sequence[int], most: int, plan: Plan, compared: Compared
) -> tuple[Race, int]:
    """Run the commands in rounds. Returns the race and the number of rounds.

    looks: numbers of rounds after which the results are evaluated. Two commands run in all rounds.
    Pairs that are left out because of the load are then replaced, up to `most` rounds. If there are
    more commands, the slower ones are dropped at each look, until the fastest is known or no look
    is left. Raises RuntimeError if a run fails.
    """

    def result_of(base: str, test: str, rounds: int) -> Result:
        return overall(compared(base, test, rounds))

    is_race = len(commands) > 2
    took: list[tuple[int, float]] = []  # rounds of this call: number of commands, seconds

    def run(names: Sequence[str], n: int, last: int) -> None:
        order = [commands[name] for name in order_of(names, n, plan.seed)]
        label = f"round {n} of {last}, {len(order)} commands,"
        if not is_race and n > looks[-1]:
            label += " replacing a disturbed pair,"
        seconds = run_round(order, n, plan.interleave)
        if seconds is None:
            print_error(f"{label} is already complete")
            return
        took.append((len(order), seconds))
        left = sum(not all(c.report(i).is_file() for c in order) for i in range(n + 1, last + 1))
        if len(took) == 1:
            spare, first_look = (0, looks[0]) if is_race else (most - last, None)
            text = total_time(seconds, left + 1, spare, first_look)
        else:
            text = time_left([s for count, s in took if count == len(order)], left, is_race)
        print_error(f"{label} took {duration(seconds)}{text}")

    first, *others = commands
    race = Race(list(commands))
    for n in range(1, looks[-1] + 1):
        run(race.racing, n, looks[-1])
        if n == 1:  # check early that the cases have common keys
            for name in others:
                compared(first, name, 1)
        if is_race and n in looks and race.look(n, result_of):
            return race, n
    rounds = looks[-1]
    while not is_race and rounds < most:
        needed = min(most, looks[-1] + lost_pairs(compared(first, others[0], rounds)))
        if rounds >= needed:
            break
        rounds += 1
        run(race.racing, rounds, needed)
    return race, rounds


def total_time(seconds: float, rounds: int, spare: int, first_look: int | None) -> str:
    """`; 6 rounds take about 4 min`: the estimate after the first round of a call.

    seconds: duration of that round. rounds: number of rounds in this call, including that one.
    spare: number of rounds that may be added. first_look: number of rounds before the first look,
    at which a race may end; None for two commands.
    """
    if rounds == 1:
        return ""
    total = f"{rounds} rounds take about {duration(rounds * seconds)}"
    if first_look is not None:
        return f"; at most {total}; the first look is after round {first_look}"
    if spare:
        most = duration((rounds + spare) * seconds)
        total += f", or up to {most} if disturbed pairs are replaced"
    return f"; {total}"


def time_left(took_s: Sequence[float], left: int, is_race: bool) -> str:
    """`; about 3 min left`. took_s: seconds of earlier rounds with the same number of commands."""
    if not left:
        return ""
    return f"; {'at most' if is_race else 'about'} {duration(left * fmean(took_s))} left"


def planned_looks(first: int, most: int) -> list[int]:
    """The numbers of rounds after which a race is evaluated: 6, 8, 12, 16, 24 for (6, 24).

    Each number is the previous one plus a third, rounded up to an even number, and the last one is
    `most`. A look is omitted if `most` is larger by at most 15%: it would take a share of the error
    rate, but could save only few runs.
    """
    looks = [first]
    while looks[-1] < most:
        following = 2 * math.ceil(looks[-1] * 2 / 3)
        looks.append(most if following * 1.15 >= most else following)
    return looks


def measure(args: argparse.Namespace) -> int:
    """Run the commands and print the result. Raises RuntimeError if a run fails."""
    of_reports = {"--interleave": args.interleave, "--ignore-key": args.ignore_key}
    steps = step_logs.steps_of(args, of_reports)
    commands = commands_of(args, steps)
    names = list(commands)
    is_race = len(names) > 2
    if is_race and args.fail_on:
        raise ValueError("--fail-on cannot be used with several --b: it applies to two commands")
    most = max(args.runs, args.max_runs or (4 if is_race else 2) * args.runs)
    looks = planned_looks(args.runs, most) if is_race else [args.runs]
    is_like_with_like = not args.b and not args.b_env
    verdict = Verdict(args.margin, args.ignore_key, args.allow_disturbed, is_like_with_like)
    design = design_of(verdict, looks, args.interleave, len(names))

    @functools.cache
    def compared(base: str, test: str, rounds: int) -> Comparison:
        base_paths = commands[base].reports(rounds)
        test_paths = commands[test].reports(rounds)
        with one_line([args.out]):
            runs = load([*base_paths, *test_paths], ignore=args.ignore_key)
            return compare(*sides(runs, base_paths, test_paths), design)

    out = Path(args.out)
    plan = Plan(seed_of(out), args.interleave)
    settings = {"interleave": plan.interleave, "looks after runs": looks, "seed": plan.seed}
    settings |= steps.settings if steps else {}
    with open_plan(out, list(commands.values()), settings):
        verdict.write(out)
        race, rounds = run_rounds(commands, looks, most, plan, compared)
    if is_race:
        show_race(race, compared, args.margin, args.format)
        return 0
    comparison = compared(*names, rounds)
    both = names[0], names[1]
    put(format_comparison(args.format, comparison, args.fail_on, is_like_with_like, both))
    return exit_status(comparison, args.fail_on)


def show_race(race: Race, compared: Compared, margin: float, form: str = "table") -> None:
    """Print the comparison of each command with the best one, and the result in a sentence.

    form: the value of --format.
    """
    comparisons = against_the_best(race, compared)
    if form == "json":
        pairs = [as_pair(each, race.best, name) for name, each in comparisons.items()]
        about = as_json.race_of(race, comparisons, margin)
        put(as_json.document(pairs, race=about, gate=None, status=0))
        return
    for name, comparison in comparisons.items():
        put(f"# BASE: {race.best}. TEST: {name}.\n{show(comparison)}\n")
    for line in conclusions(race, comparisons, margin):
        put(f"# {line}")


def commands_of(args: argparse.Namespace, steps: step_logs.Steps | None) -> Commands:
    """A and the commands to compare with it. steps: where to find step times in their logs.

    Raises ValueError if a name is missing or used twice.
    """
    a_name, a_text = args.a
    rivals = [(name, text, args.b_env) for name, text in args.b]
    if not rivals:
        rivals = [("", a_text, args.b_env)]
    commands: Commands = {}
    for name, text, variables in [(a_name or "a", a_text, []), *rivals]:
        if not name and len(rivals) > 1:
            example = "e.g. --b 1MB='torchrun x.py' 5MB='torchrun y.py'"
            raise ValueError(f"several commands need names, {example}")
        name = name or "b"
        if name in commands:
            raise ValueError(f"two commands are named {name}; use different names")
        commands[name] = Command(name, text, dict(variables), Path(args.out) / name, steps)
    return commands


def command(text: str) -> tuple[str, str]:
    """The name, which may be empty, and the command of `COMMAND` or `NAME=COMMAND`."""
    name, equals, rest = text.partition("=")
    if not equals or not re.fullmatch(r"[\w.+-]+", name):
        name, rest = "", text
    if not rest.strip():
        raise_invalid("a command", repr(text), "e.g. --a 'torchrun x.py'")
    return name, rest


def variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    return (name, value) if equals else raise_invalid("NAME=VALUE", repr(text))


def add_flags(parser: Parser) -> None:
    add = parser.add_argument
    lists: dict[str, Any] = {"nargs": "+", "action": "extend", "default": []}
    base = "command A, with which the commands of --b are compared; quoted as one argument"
    add("--a", required=True, type=command, metavar="[NAME=]COMMAND", help=base)
    b = "one or more commands to compare with A (default: A itself)"
    add("--b", type=command, metavar="[NAME=]COMMAND", help=b, **lists)
    b_env = "environment variables for the commands of --b"
    add("--b-env", type=variable, metavar="NAME=VALUE", help=b_env, **lists)
    folder = checked(str, bool, "a folder", "e.g. --out threads")
    add("--out", required=True, type=folder, metavar="DIR", help="folder for reports and logs")
    runs = "runs of each command; with several --b, runs before the first look (default: 6)"
    add("--runs", type=number(int, 2), default=6, metavar="N", help=runs)
    interleave = "start the runs of a round together, and let them alternate block by block"
    add("--interleave", action="store_true", help=interleave)
    limit = "maximum number of runs of each command (default: 2 times --runs, to replace disturbed "
    limit += "pairs; 4 times --runs with several --b)"
    add("--max-runs", type=positive_int, metavar="N", help=limit)
    step_logs.add_step_flags(parser, "the output of the commands; --json is then not appended")
    add_verdict_flags(parser)


def main() -> int:
    parser = Parser(__doc__)
    add_flags(parser)
    args = parser.parse_args()
    with ending_children(args.out):
        status = measure(args)
    return status


if __name__ == "__main__":
    sys.exit(main())
