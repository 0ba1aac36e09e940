#!/usr/bin/env python3
# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "numpy>=1.26", "pandas>=2.1", "scipy>=1.11", "tabulate>=0.9", "matplotlib>=3.8", "psutil>=5.9"
# ]
# ///
"""Is B slower than A? Runs two commands in turn and compares their reports.

Without --b it runs A against A, and tells the smallest change that so many runs can show here.

The order is A B, B A, A B: a drift of the machine hits both alike, and neighbours make a pair.
Every run writes its report to OUT/a or OUT/b: `--json` is added to the command. The same call goes
on where it was interrupted, as long as commands, their files and variables are the same.
docs/compare.md says more.

    python analysis/ab.py --runs 6 --out threads --b-env OMP_NUM_THREADS=2 \\
        --a 'torchrun --nproc-per-node 2 benchmarks/ddp_sweep.py' \\
        --b 'torchrun --nproc-per-node 2 benchmarks/ddp_sweep.py'
    python analysis/ab.py --out versions --until-decided --max-runs 24 \\
        --a '/opt/torch-2.14/bin/torchrun --nproc-per-node 8 benchmarks/ddp_sweep.py' \\
        --b '/opt/torch-2.15/bin/torchrun --nproc-per-node 8 benchmarks/ddp_sweep.py'

--interleave is for a machine with neighbours: both runs of a pair take turns, block by block. It
needs this project's scripts, and rank 0 on this machine. --until-decided looks after --runs runs a
side, then after a third more each time; the looks share the 5 % of error.

Exit status: 0; 1 where a run or the disk fails, or for what --fail-on names; 2 bad usage; 4 no
verdict, with --fail-on; 130 after Ctrl-C. BSD-3-Clause.
"""

import argparse
import signal
import sys
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
    variable,
)
from analysis.compare import add_verdict_flags, conclude
from analysis.verdicts import Comparison, Design, compare
from common.cli import Parser, number, positive_int
from common.report import without_secrets


def measure(args: argparse.Namespace) -> Comparison:
    """Run what is planned, or until every case has a verdict. Raises RuntimeError."""
    most = args.max_runs or 4 * args.runs
    looks = planned_looks(args.runs, most) if args.until_decided else [args.runs]
    b_variables = args.b_env if args.b else args.a_env + args.b_env
    a = Command("a", args.a, args.a_env, args.out / "a")
    b = Command("b", args.b or args.a, b_variables, args.out / "b")
    plan = {
        "a": args.a,
        "a_env": public(args.a_env),
        "b": args.b,
        "b_env": public(args.b_env),
        "interleave": args.interleave,
        "looks after runs": looks,
    }
    design = Design(args.margin, True, args.interleave, len(looks))
    with open_folder(args.out, [a, b], plan, args.anew):
        for pair in range(1, looks[-1] + 1):
            order = [a, b] if pair % 2 else [b, a]
            run_round(order, pair, args.interleave, f"pair {pair} of {looks[-1]}")
            if pair in (1, *looks):  # after the first: do keys meet?
                runs = load_rounds([a, b], [pair, pair], args.ignore_key)
                comparison = compare(runs["a"], runs["b"], design)
            is_decided = all(case.verdict != "undecided" for case in comparison.cases)
            if pair in looks and is_decided:
                break
    return comparison


def public(variables: list[str]) -> dict[str, str]:
    """--a-env or --b-env, as the plan tells them."""
    return without_secrets(dict(variable.split("=", 1) for variable in variables))


def add_flags(parser: Parser) -> None:
    add = parser.add_argument
    lists: dict[str, Any] = {"type": variable, "nargs": "+", "action": "extend", "default": []}
    add(
        "--a",
        required=True,
        type=command_text,
        metavar="COMMAND",
        help="the base, as one word: quote it",
    )
    add("--a-env", help="NAME=VALUE, variables of A's runs alone", **lists)
    b = "what is compared with it (default: A, to see what runs that are alike differ by)"
    add("--b", type=command_text, metavar="COMMAND", help=b)
    add("--b-env", help="NAME=VALUE, variables of B's runs alone", **lists)
    add("--out", required=True, type=folder, metavar="DIR", help="keep plan, reports and logs here")
    anew = "keep the runs of another plan in DIR.bak, and begin anew"
    add("--anew", action="store_true", help=anew)
    add("--runs", type=number(int, 2), default=6, metavar="N", help="runs a side (default: 6)")
    add("--interleave", action="store_true", help="both runs of a pair at once, block by block")
    add("--until-decided", action="store_true", help="stop once every case has a verdict")
    limit = "at most so many runs a side, with --until-decided (default: 4 times --runs)"
    add("--max-runs", type=positive_int, metavar="N", help=limit)
    add_verdict_flags(parser)


def main() -> int:
    parser = Parser(__doc__)
    add_flags(parser)
    args = parser.parse_args()
    comparison = run_commands(lambda: measure(args))
    is_control = args.b is None and not args.b_env
    return conclude([comparison], args.format, args.fail_on, is_control)


if __name__ == "__main__":
    sys.exit(main())
