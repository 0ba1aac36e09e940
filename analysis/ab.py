#!/usr/bin/env python3
# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "numpy>=1.26", "pandas>=2.1", "scipy>=1.11", "tabulate>=0.9", "psutil>=5.9"
# ]
# ///
"""Is B slower than A? Runs the two commands alternately.

Without --b and --b-env, the script compares A with itself, and prints the smallest change that this
number of runs detects.

In each round, A and B run once, and the two runs form a pair. A coin decides which one runs first,
so that no periodic disturbance favors one of them. A pair is not evidence if other processes loaded
its two runs differently. It is then replaced by another round, up to --max-runs.

The script appends `--json PATH` to each command, so that every run writes its report to OUT/a or
OUT/b. To continue an interrupted call, repeat it: runs with a complete report are not repeated. For
a command that writes no report, use --step, which reads step times from its output instead.

docs/compare.md describes the verdicts.

    python analysis/ab.py --runs 6 --out threads --b-env OMP_NUM_THREADS=2 \\
        --a 'torchrun --nproc-per-node 2 benchmarks/ddp_sweep.py'
    python analysis/ab.py --out versions --runs 12 \\
        --a '/opt/torch-2.14/bin/torchrun --nproc-per-node 8 benchmarks/ddp_sweep.py' \\
        --b '/opt/torch-2.15/bin/torchrun --nproc-per-node 8 benchmarks/ddp_sweep.py'
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
import math
import random
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from analysis.compare import add_verdict_flags, can_interleave, exit_status, format_comparison
from analysis.logs import step_logs
from analysis.runs.commands import Command, ending_children, open_plan, run_round, seed_of
from analysis.runs.evidence import UNEQUAL_LOAD
from analysis.runs.load import load
from analysis.runs.looks import compare
from analysis.runs.plan import Verdict, remarks_on
from analysis.runs.verdicts import MAX_RUNS, Comparison, quantile, runs_needed
from analysis.show import one_line, put
from harness.cli import Parser, checked, duration, number, positive_int, raise_invalid
from harness.exits import print_error

FORECAST_AFTER = 3  # rounds
Compared = Callable[[int], Comparison]  # the comparison after a number of rounds


class Plan(NamedTuple):
    """How the rounds are run."""

    seed: int  # determines the order of the commands
    interleave: bool


def order_of(n: int, seed: int) -> list[str]:
    """Return the order of the commands in round n, which a coin decides independently of other
    rounds. It follows from the seed, and is therefore the same after a restart."""
    return random.Random(f"{seed} {n}").choice((["a", "b"], ["b", "a"]))


def lost_pairs(comparison: Comparison) -> int:
    """Return the number of pairs of runs that are left out only because of the load."""
    return sum(why == UNEQUAL_LOAD for why in comparison.left_out.values())


def run_rounds(
    commands: Sequence[Command], runs: int, most: int, plan: Plan, compared: Compared
) -> int:
    """Run both commands in rounds. Return the number of rounds.

    Pairs that are left out because of the load are replaced, up to `most` rounds. Raises
    RuntimeError if a run fails.
    """
    by_name = {command.name: command for command in commands}
    took_s: list[float] = []  # the rounds of this call

    def run(n: int, last: int) -> None:
        label = f"round {n} of {last}"
        if n > runs:
            label += ", replacing a disturbed pair,"
        seconds = run_round([by_name[name] for name in order_of(n, plan.seed)], n, plan.interleave)
        if seconds is None:
            print_error(f"{label} is already complete")
            return
        took_s.append(seconds)
        left = sum(not all(c.report(i).is_file() for c in commands) for i in range(n + 1, last + 1))
        first = len(took_s) == 1
        text = total_time(seconds, left + 1, most - last) if first else time_left(took_s, left)
        print_error(f"{label} took {duration(seconds)}{text}")

    for n in range(1, runs + 1):
        run(n, runs)
        if n == 1:
            compared(1)  # raises if the cases have no common key
        if n == FORECAST_AFTER < runs and took_s:
            line = forecast(compared(n), runs, most, fmean(took_s), sys.stderr.isatty())
            print_error(line or "no forecast: too few pairs count")
    rounds = runs
    while rounds < most:
        needed = min(most, runs + lost_pairs(compared(rounds)))
        if rounds >= needed:
            break
        rounds += 1
        run(rounds, needed)
    return rounds


def total_time(seconds: float, rounds: int, spare: int) -> str:
    """Return `; 6 rounds take about 4 min`: the estimate after the first round of a call.

    seconds: duration of that round. rounds: number of rounds in this call, including that one.
    spare: number of rounds that may be added.
    """
    if rounds == 1:
        return ""
    total = f"; {rounds} rounds take about {duration(rounds * seconds)}"
    if spare:
        most = duration((rounds + spare) * seconds)
        total += f", or up to {most} if disturbed pairs are replaced"
    return total


def time_left(took_s: Sequence[float], left: int) -> str:
    """Return `; about 3 min left`. took_s: seconds of earlier rounds."""
    return f"; about {duration(left * fmean(took_s))} left" if left else ""


def forecast(
    comparison: Comparison, runs: int, most: int, round_s: float, is_terminal: bool
) -> str:
    """Return a line on the number of pairs for which the intervals of all cases would be narrow
    enough about half of the time: narrower than the margin, or than a larger change seen so far.

    comparison: of the rounds so far. runs, most: the planned and the maximum number of rounds.
    round_s: duration of a round.
    """
    design, needs = comparison.design, list[int]()
    rounds = len(comparison.base)
    for case in comparison.cases:
        if case.ratio and case.interval:
            n = len(case.base_s)
            half = (math.log(case.interval[1]) - math.log(case.interval[0])) / 2
            scatter = half / quantile(n - 1) * math.sqrt(n)
            change = max(design.margin, case.ratio - 1, 1 / case.ratio - 1)
            needs.append(runs_needed(scatter, replace(design, margin=change)) or MAX_RUNS + 1)
    if not needs:
        return ""
    need = max(runs, *needs)  # a verdict requires `runs` pairs in any case
    count = f"more than {MAX_RUNS}" if need > MAX_RUNS else f"about {need}"
    took = f"{'over' if need > MAX_RUNS else 'about'} {duration(need * round_s)}"
    line = f"after {rounds} rounds: with this scatter, verdicts need {count} pairs, {took}"
    if need > runs:
        line += f", but --runs is {runs}"
        if most > runs:
            line += f" (--max-runs {most} only replaces disturbed pairs)"
        if can_interleave(comparison):
            line += "; --interleave needs fewer"
    return f"{line}; Ctrl-C ends with what was measured" if is_terminal else line


def measure(args: argparse.Namespace, at_interrupt: list[Callable[[], None]]) -> int:
    """Run the commands and print the result. Raises RuntimeError if a run fails.

    at_interrupt: gets a function that Ctrl-C calls.
    """
    of_reports = {"--interleave": args.interleave}
    steps = step_logs.steps_of(args, of_reports)
    if len(args.b) > 1:
        got = f"got {len(args.b)} after --b; compare each of them with A in its own --out"
        raise ValueError(f"expected one command B, quoted as one argument, {got}")
    out = Path(args.out)
    b_text = (args.b or [args.a])[0]
    a = Command("a", args.a, {}, out / "a", steps, args.watch)
    b = Command("b", b_text, dict(args.b_env), out / "b", steps, args.watch)
    most = max(args.runs, args.max_runs or 2 * args.runs)
    is_like_with_like = not args.b and not args.b_env
    verdict = Verdict(args.margin, args.ignore_key, args.allow_disturbed, is_like_with_like)

    @functools.cache
    def compared(rounds: int) -> Comparison:
        paths = [*a.reports(rounds), *b.reports(rounds)]
        with one_line([args.out]):
            run_of = {run.path: run for run in load(paths, ignore=args.ignore_key)}
            runs = [run_of[path] for path in paths]
            design = verdict.design(args.runs, args.interleave)
            return compare(runs[:rounds], runs[rounds:], design)

    def unchecked() -> list[str]:
        return list(dict.fromkeys(filter(None, (a.unchecked, b.unchecked))))

    plan = Plan(seed_of(out), args.interleave)
    settings = {"interleave": plan.interleave, "runs": args.runs, "seed": plan.seed}
    settings |= {"watch": shlex.join(args.watch)} if args.watch else {}
    settings |= steps.settings if steps else {}

    def show(rounds: int) -> Comparison:
        comparison = compared(rounds)
        comparison.remarks[:] = remarks_on(unchecked())
        put(format_comparison(args.format, comparison, args.fail_on, is_like_with_like, ("a", "b")))
        return comparison

    def show_so_far() -> None:
        """Show the complete rounds. Pairs are too few for a verdict before all rounds have run."""
        rounds = 0
        while not any(command.why_no_report(rounds + 1) for command in (a, b)):
            rounds += 1
        if rounds and args.format != "json":  # whose status would be wrong
            show(rounds)

    at_interrupt.append(show_so_far)
    with open_plan(out, [a, b], settings):
        for line in remarks_on(unchecked()):
            print_error(f"{line}; --watch FILE adds files")
        verdict.write(out)
        rounds = run_rounds([a, b], args.runs, most, plan, compared)
        verdict._replace(unchecked=unchecked()).write(out)
    at_interrupt.clear()
    return exit_status(show(rounds), args.fail_on)


def variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    return (name, value) if equals else raise_invalid("NAME=VALUE", repr(text))


def add_flags(parser: Parser) -> None:
    add = parser.add_argument
    command = checked(str, lambda text: bool(text.strip()), "a command", "e.g. --a 'torchrun x.py'")
    folder = checked(str, bool, "a folder", "e.g. --out threads")
    add("--a", required=True, type=command, metavar="COMMAND", help="command A, as one argument")
    several: dict[str, Any] = {"nargs": "+", "action": "extend", "default": []}
    add("--b", type=command, metavar="COMMAND", help="command B (default: A)", **several)
    add("--b-env", type=variable, metavar="NAME=VALUE", help="variables for B", **several)
    add("--out", required=True, type=folder, metavar="DIR", help="folder for reports and logs")
    add(
        "--runs",
        type=number(int, 2),
        default=6,
        metavar="N",
        help="number of pairs that a verdict requires (default: 6)",
    )
    add(
        "--max-runs",
        type=positive_int,
        metavar="N",
        help="maximum number of pairs, if disturbed ones are replaced (default: 2 times --runs)",
    )
    watch = "files or folders; if one of them changes between runs, do not continue"
    add("--watch", metavar="FILE", help=watch, **several)
    add(
        "--interleave",
        action="store_true",
        help="start both runs of a pair together, and let them alternate block by block",
    )
    step_logs.add_step_flags(parser, "the output of the commands; --json is then not appended")
    add_verdict_flags(parser)


def main() -> int:
    parser = Parser(__doc__)
    add_flags(parser)
    args = parser.parse_args()
    at_interrupt = list[Callable[[], None]]()
    with ending_children(args.out, at_interrupt):
        status = measure(args, at_interrupt)
    return status


if __name__ == "__main__":
    sys.exit(main())
