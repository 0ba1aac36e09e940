#!/usr/bin/env python3
"""Is B slower than A? Runs two commands in turn and compares their reports.

The commands alternate as A B, B A, A B, ...: a drift of the machine hits both alike, and two runs
that are neighbours in time make a pair. Every run writes a report of its own (`--json` is added
to the command), and the run is the unit of evidence: see compare.py for the verdicts.

    python benchmarks/ab.py --runs 6 --out threads --b-env OMP_NUM_THREADS=2 \\
        --a 'torchrun --nproc-per-node 2 benchmarks/ddp_sweep.py' \\
        --b 'torchrun --nproc-per-node 2 benchmarks/ddp_sweep.py'
    python benchmarks/ab.py --runs 6 --out algorithms --b-env NCCL_ALGO=Tree \\
        --a 'torchrun --nproc-per-node 8 benchmarks/collectives.py -b 1M -e 1G' \\
        --b 'torchrun --nproc-per-node 8 benchmarks/collectives.py -b 1M -e 1G'
    python benchmarks/ab.py --runs 6 --out versions --until-decided --max-runs 24 \\
        --a-env VIRTUAL_ENV=/opt/torch-2.14 --b-env VIRTUAL_ENV=/opt/torch-2.15 \\
        --a 'torchrun --nproc-per-node 8 benchmarks/ddp_sweep.py' \\
        --b 'torchrun --nproc-per-node 8 benchmarks/ddp_sweep.py'

The commands run without a shell, in the directory in which this is started. They may name another
interpreter by its path; `--a-env VIRTUAL_ENV=DIR` puts DIR/bin first in PATH, as its `activate`
does.

`--interleave` is for a machine that is not yours alone: both runs of a pair start together and take
turns, block by block, so that both see the same moments of the machine. Only one of them works at
a time; both need their memory at once. For scripts of this project with rank 0 on this machine.

The folder of `--out` holds each run's report and log, and campaign.json with the commands and every
run's status, start and end. The same command again goes on where an interrupted or failed campaign
was.

`--until-decided` looks at the result after --runs runs a side and then by a third more runs each
time, up to --max-runs, and stops as soon as no case is undecided. Who looks K times at a level of
5 % errs more often than in 5 %. So the 5 % are shared equally among the looks, all of which are
planned before the first run: the intervals of all of them are right together with 95 %, however the
looks depend on each other (Bonferroni's inequality, for the repeated confidence intervals of
C. Jennison and B. W. Turnbull 1989, J. R. Statist. Soc. B 51:305-361). Looks at 6, 8, 12, 16 and 24
runs share the 5 % among five; a look after every pair would share them among 19.

Exit status: 0; 1 where a run fails, or for what --fail-on names; 2 for bad usage; 130 after Ctrl-C.

Written for this project. BSD-3-Clause.
"""

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import cli

FAILURES = ("slower", "faster", "undecided", "missing")  # as compare.py


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = cli.Parser(description=__doc__)
    add = parser.add_argument
    add("--a", required=True, metavar="COMMAND", help="the base, as one word: quote it")
    add("--b", required=True, metavar="COMMAND", help="what is compared with it")
    for side in ("a", "b"):
        add(
            f"--{side}-env",
            nargs="+",
            action="extend",
            default=[],
            metavar="NAME=VALUE",
            help=f"variables of {side.upper()}'s runs alone, on top of those of this shell",
        )
    add("--out", required=True, metavar="DIR", help="keep reports, logs and campaign.json here")
    add(
        "--runs",
        type=cli.positive_int,
        default=6,
        metavar="N",
        help="runs a side; with --until-decided before the first look (default: 6)",
    )
    add(
        "--interleave",
        action="store_true",
        help="start both runs of a pair together, and let them take turns, block by block",
    )
    add("--until-decided", action="store_true", help="stop as soon as every case has a verdict")
    add(
        "--max-runs",
        type=cli.positive_int,
        metavar="N",
        help="at most so many runs a side, with --until-decided (default: 4 times --runs)",
    )
    add(
        "--margin",
        type=cli.percentage,
        default=0.02,
        metavar="P",
        help="the smallest change that matters (default: 2%%)",
    )
    add(
        "--ignore-key",
        type=cli.list_of(str),
        default=[],
        metavar="NAME",
        help="compare cases that differ in these fields of their keys, e.g. comm_hook where A has "
        "one and B another; a list (default: none)",
    )
    add(
        "--timeout",
        type=cli.positive_float,
        metavar="S",
        help="end a run that takes longer than S seconds, and the campaign (default: no limit)",
    )
    add("--format", choices=("table", "markdown", "json"), default="table", help="(default: table)")
    add(
        "--fail-on",
        type=cli.list_of(str, FAILURES),
        default=[],
        metavar="VERDICT",
        help=f"exit with 1 where a case, or the mean, is one of {', '.join(FAILURES)} (not "
        "measured in B); a list (default: none)",
    )
    args = parser.parse_args(argv)
    if args.runs < 2:
        cli.refuse("--runs must be at least 2: one run a side cannot show how much runs differ")
    if args.max_runs is not None and not args.until_decided:
        cli.refuse("--max-runs has no effect without --until-decided")
    if args.max_runs is not None and args.max_runs < args.runs:
        cli.refuse(f"--max-runs {args.max_runs} is less than --runs {args.runs}")
    if "TORCHELASTIC_RUN_ID" in os.environ:
        cli.refuse("this starts the commands itself; start it with python, not with torchrun")
    return args


if __name__ == "__main__":
    ARGS = parse_args()  # before the imports below, so that --help need not wait for them

import json
import shlex
from dataclasses import dataclass

from common.commands import Interrupted, signals_blocked

with signals_blocked():
    from common import compare_text
    from common.campaign import Campaign, RunFailed, Slot, check_report
    from common.compare import Comparison, compare, load_run, missing_in_test
    from common.sides import Side, balanced_order, read_side
    from common.text import markdown, printable


def planned_looks(first: int, most: int) -> list[int]:
    """After how many runs a side the result is looked at: by a third more each time, and even.

    Even, since ABBA balances a drift over two pairs. The last is `most`; one right before it, with
    15 % fewer runs or less, would not be worth its share of the error rate.
    """
    looks = [first]
    while looks[-1] < most:
        following = 2 * -(-max(4 * looks[-1], 3 * looks[-1] + 3) // 6)
        looks.append(most if following * 1.15 >= most else following)
    return looks


def pairs(runs: int) -> list[list[Slot]]:
    """The first `runs` runs of each side, in ABBA order."""
    order = balanced_order(("a", "b"), runs)
    return [[(side, number) for side in row] for number, row in enumerate(order, start=1)]


@dataclass(frozen=True)
class Result:
    """What a campaign found, and when."""

    comparison: Comparison
    runs: int  # a side
    looks: int  # taken, of those planned


def measure(campaign: Campaign, args: argparse.Namespace, looks: list[int]) -> Result:
    """Run what is planned, or until every case has a verdict."""
    for runs in [1, *looks]:
        campaign.run_all(pairs(runs), 2 * looks[-1])
        a, b = (
            [load_run(path, ignore=args.ignore_key) for path in paths(campaign, side, runs)]
            for side in ("a", "b")
        )
        if runs == 1:  # no verdict yet, only whether there is anything to compare
            compare(a, b)
            continue
        campaign.note_look()
        # the error rate is shared among all looks that are planned, taken or not
        found = compare(
            a, b, args.margin, paired=True, looks=len(looks), interleaved=args.interleave
        )
        undecided = sum(case.verdict == "undecided" for case in found.cases)
        if len(looks) > 1:
            print(
                f"after {runs} runs a side {undecided} of {len(found.cases)} cases are undecided",
                file=sys.stderr,
                flush=True,
            )
        if not undecided:
            break
    return Result(found, runs, looks.index(runs) + 1)


def paths(campaign: Campaign, side: str, runs: int) -> list[str]:
    return [campaign.path(side, number) for number in range(1, runs + 1)]


def show(
    result: Result, campaign: Campaign, args: argparse.Namespace, looks: list[int]
) -> tuple[str, set[str]]:
    """The text to print in the format asked for, and the verdicts in it."""
    found, counts = result.comparison, (result.runs, result.runs)
    verdicts = {case.verdict for case in [*found.cases, *([found.mean] if found.mean else [])]}
    if missing_in_test(found):
        verdicts.add("missing")
    if args.format == "json":
        files = (paths(campaign, "a", result.runs), paths(campaign, "b", result.runs))
        document = compare_text.as_json(found, files, args.margin)
        plan = {"planned_looks": looks, "looks": result.looks, "a": args.a, "b": args.b}
        return json.dumps(document | plan, indent=1, allow_nan=False), verdicts
    commands = [
        f"{name}: {printable(' '.join([*map(shlex.quote, variables), command]), 500)}"
        for name, command, variables in (("BASE", args.a, args.a_env), ("TEST", args.b, args.b_env))
    ]
    if len(looks) > 1:
        commands.append(
            f"look {result.looks} of at most {len(looks)}: each of these intervals holds with "
            f"{100 - 5 / len(looks):g} %, all looks together with 95 %"
        )
    if args.format == "markdown":
        head = "\n".join(f"- {markdown(line, 600)}" for line in commands)
        return f"{head}\n\n{compare_text.as_markdown(found, counts, args.margin, False)}", verdicts
    head = "\n".join(f"# {line}" for line in commands)
    return f"{head}\n{compare_text.as_table(found, counts, args.margin, False)}", verdicts


def refuse_one_port(sides: list[Side]) -> None:
    """Two torchruns at once cannot both have torchrun's default port. Raises ValueError."""
    for side in sides:
        torchrun = (
            Path(side.command[0]).name == "torchrun" or "torch.distributed.run" in side.command
        )
        own = ("--standalone", "--rdzv", "--master-port", "--master_port")
        if torchrun and not any(word.startswith(own) for word in side.command):
            raise ValueError(
                f"--{side.name}: with --interleave two torchruns run at once, and both would take "
                "port 29500; add --standalone, as in 'torchrun --standalone --nproc-per-node 2 ...'"
            )


def main(args: argparse.Namespace) -> int:
    looks = [args.runs]
    design = {"--runs": args.runs}
    if args.until_decided:
        looks = planned_looks(args.runs, args.max_runs or 4 * args.runs)
        design |= {"--max-runs": looks[-1], "--margin": args.margin}
    try:
        sides = [read_side("a", args.a, args.a_env), read_side("b", args.b, args.b_env)]
        if args.interleave:
            refuse_one_port(sides)
        with Campaign(
            args.out, sides, design, check_report, args.timeout, args.interleave
        ) as campaign:
            result = measure(campaign, args, looks)
        text, verdicts = show(result, campaign, args, looks)
    except ValueError as error:
        cli.refuse(printable(str(error), 1000))
    except (RunFailed, Interrupted) as end:
        print(
            f"ab.py: {end}\nthe finished runs are kept; the same command goes on", file=sys.stderr
        )
        return end.status
    return compare_text.conclude("ab.py", text, verdicts, args.fail_on)


if __name__ == "__main__":
    sys.exit(main(ARGS))
