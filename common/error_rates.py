"""How often do comparisons err? Real runs against others alike, and against slower ones.

The kinds of runs: `a` and `b`, which differ in nothing, and the sweep with a busy-wait of a known
share of the step (see common/busy_wait.py). All of them take turns. A campaign is what one user of
ab.py would have: so many runs of `a` and so many of another kind, compared as ab.py does.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from datetime import datetime
from math import sqrt
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import tabulate

from common import cli, results
from common.campaign import Campaign, RunFailed, Slot, check_report
from common.commands import Interrupted
from common.compare import Comparison, compare, load_run
from common.sides import Side, balanced_order
from common.stats import Interval
from common.text import printable

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


def share_interval(count: int, total: int, confidence: float = 0.95) -> Interval:
    """Confidence interval of a probability that came true `count` times out of `total`.

    E. B. Wilson 1927, J. Amer. Statist. Assoc. 22:209-212. From 0 to 1 where total is 0.
    """
    if total == 0:
        return Interval(0.0, 1.0)
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    share = count / total
    middle = (share + z * z / (2 * total)) / (1 + z * z / total)
    half = z / (1 + z * z / total) * sqrt(share * (1 - share) / total + (z / (2 * total)) ** 2)
    return Interval(max(0.0, middle - half), min(1.0, middle + half))


def tally(comparisons: Sequence[Comparison], share: float) -> dict[str, Any]:
    """What the comparisons of one kind found.

    share: by how much the second side is really slower; 0 for two sides alike. A case is `called`
    where its verdict is slower or, with a share of 0, slower or faster: then each of them is an
    error. The cases of a comparison come from the same runs, and so err together: beside the share
    of cases there is the share of comparisons with a called case.
    """
    cases = [case for comparison in comparisons for case in comparison.cases]
    count = {
        verdict: sum(case.verdict == verdict for case in cases)
        for verdict in ("slower", "faster", "same", "undecided")
    }
    wanted = ("slower",) if share else ("slower", "faster")
    called = sum(count[verdict] for verdict in wanted)
    with_call = sum(
        any(case.verdict in wanted for case in comparison.cases) for comparison in comparisons
    )
    means = [comparison.mean for comparison in comparisons if comparison.mean]
    means_called = sum(mean.verdict in wanted for mean in means)
    intervals = [case.ci95 for case in cases if case.ci95]
    covered = sum(low <= 1 + share <= high for low, high in intervals)
    return {
        "comparisons": len(comparisons),
        "cases": len(cases),
        **{f"cases_{verdict}": n for verdict, n in count.items()},
        **_share("called", called, len(cases)),
        **_share("comparisons_called", with_call, len(comparisons)),
        **_share("means_called", means_called, len(means)),
        **_share("coverage", covered, len(intervals)),
        "ratio_p50": float(np.median([case.ratio for case in cases])) if cases else None,
    }


def _share(name: str, count: int, total: int) -> dict[str, Any]:
    interval = share_interval(count, total)
    return {
        name: count / total if total else None,
        f"{name}_ci95": [interval.low, interval.high],
    }


def is_slowed(campaign: int, slowed: int, campaigns: int) -> bool:
    """Whether the slower kinds take part in this campaign (from 0): in `slowed`, evenly spread."""
    return (campaign + 1) * slowed // campaigns > campaign * slowed // campaigns


def sides_of(args: argparse.Namespace) -> list[Side]:
    """The kinds of runs, each with its torchrun command."""
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    runner = (*torchrun, "--nproc-per-node", str(args.ranks))
    plain = (*runner, str(BENCHMARKS / "ddp_sweep.py"), *args.sweep)
    slow = (*runner, str(BENCHMARKS / "calibrate.py"), "--slow-sweep")
    return [
        Side("a", plain, {}),
        Side("b", plain, {}),
        *(
            Side(name_of(share), (*slow, f"{share * 100:g}%", "--", *args.sweep), {})
            for share in args.slowdowns
        ),
    ]


def name_of(share: float) -> str:
    return f"slow{share * 100:g}" if share else "b"


Rounds = list[list[Slot]]  # of a campaign: in each, one run of every kind


def plan(args: argparse.Namespace) -> list[Rounds]:
    """For each campaign its rounds."""
    campaigns = []
    for index in range(args.campaigns):
        slowed = is_slowed(index, args.slowed_campaigns, args.campaigns)
        names = ["a", "b", *(name_of(share) for share in args.slowdowns if slowed)]
        first = index * args.runs
        rows = balanced_order(names, args.runs, first)
        campaigns.append([[(name, first + i) for name in row] for i, row in enumerate(rows, 1)])
    return campaigns


def find_comparisons(
    campaign: Campaign, planned: list[Rounds], share: float, margin: float, interleaved: bool
) -> list[Comparison]:
    """Runs of `a` against those of one kind, in every campaign that is finished and has it."""
    found = []
    for rounds in planned:
        slots = [slot for row in rounds for slot in row]
        other = name_of(share)
        numbers = sorted(number for name, number in slots if name == other)
        if numbers and all(campaign.done(*slot) for slot in slots):
            a, b = ([load_run(campaign.path(n, i)) for i in numbers] for n in ("a", other))
            found.append(compare(a, b, margin, paired=True, interleaved=interleaved))
    return found


def injected(campaign: Campaign, planned: list[Rounds], share: float) -> float | None:
    """The busy-wait over the step without it: the median over runs and cases."""
    name = name_of(share)
    found = []
    for slot in [slot for rounds in planned for row in rounds for slot in row if slot[0] == name]:
        if campaign.done(*slot):
            for case in json.loads(Path(campaign.path(*slot)).read_text("utf-8"))["cases"]:
                m = case["metrics"]
                found.append(m["busy_wait_s"] / m["plain_step_s"])
    return float(np.median(found)) if found else None


def durations(campaign: Campaign) -> dict[str, float]:
    """How long a run takes, and how much of that is before its report begins (imports, torchrun).

    Both times are cut to seconds: only the mean over many runs means anything.
    """
    runs = campaign.finished()
    before = []
    for run in runs:
        report = json.loads(Path(campaign.path(run["side"], run["number"])).read_text("utf-8"))
        ends = (report["started_at"], run["started_at"])
        begun, launched = (datetime.fromisoformat(end) for end in ends)
        before.append((begun - launched).total_seconds())
    return {
        "run_p50_s": float(np.median([run["seconds"] for run in runs])),
        "start_up_mean_s": float(np.mean(before)),
    }


def percent(share: float | None, interval: Sequence[float] | None = None, digits: int = 1) -> str:
    if share is None:
        return "-"
    text = f"{share * 100:.{digits}f}"
    if interval is None:
        return text
    return f"{text} ({interval[0] * 100:.{digits}f} to {interval[1] * 100:.{digits}f})"


def render(kinds: dict[str, dict[str, Any]]) -> str:
    """A row for each kind of comparison."""
    rows = []
    for name, m in kinds.items():
        counts = [m[f"cases_{verdict}"] for verdict in ("faster", "slower", "same", "undecided")]
        rows.append(
            [
                name,
                m["comparisons"],
                m["cases"],
                *counts,
                percent(m["called"], m["called_ci95"]),
                percent(m["means_called"], m["means_called_ci95"]),
                percent(m["coverage"], m["coverage_ci95"]),
                "-" if m["ratio_p50"] is None else f"{m['ratio_p50']:.3f}",
                percent(m.get("injected"), digits=2),
            ]
        )
    headers = [
        "",
        "compa-\nrisons",
        "cases",
        *("faster", "slower", "same", "unde-\ncided"),
        "called\n(%)",
        "mean called\n(%)",
        "coverage\n(%)",
        "ratio\np50",
        "wait /\nstep (%)",
    ]
    tabulate.MIN_PADDING = 0
    align = ("left",) + ("right",) * (len(headers) - 1)
    return tabulate.tabulate(rows, headers, "simple", colalign=align, disable_numparse=True)


def conclude(
    campaign: Campaign, planned: list[Rounds], args: argparse.Namespace
) -> dict[str, dict[str, Any]]:
    """The metrics of every kind of comparison, from the campaigns that are finished."""
    kinds = {}
    for share in (0.0, *args.slowdowns):
        metrics = tally(
            find_comparisons(campaign, planned, share, args.margin, args.interleave), share
        )
        if share:
            metrics["injected"] = injected(campaign, planned, share)
        kinds[f"{share * 100:g} % slower" if share else "A/A"] = metrics
    return kinds


def write_report(
    campaign: Campaign,
    kinds: dict[str, dict[str, Any]],
    times: dict[str, float],
    args: argparse.Namespace,
) -> bool:
    """The report of --json: a case for each kind of comparison. False if it was not written."""
    first = campaign.finished()[0]
    path = campaign.path(first["side"], first["number"])
    environment = json.loads(Path(path).read_text("utf-8"))["environment"]
    report = results.Report(args.json, "calibrate", environment, lambda cases: {})
    report.open(resume=False)
    for name, metrics in kinds.items():
        key = {"mode": "ab", "comparison": name, "runs": args.runs, "margin": args.margin}
        key["interleave"] = args.interleave
        report.add(
            {
                "key": key | {"ranks": args.ranks, "sweep": args.sweep},
                "label": name,
                "ranks": [],
                "samples_s": [],
                "stop": {"rule": "campaigns", "iterations": metrics["comparisons"]},
                "metrics": metrics | times,
                "check": "passed" if metrics["comparisons"] else "skipped: no campaign is finished",
            }
        )
    return report.finish("complete")


def main(args: argparse.Namespace) -> int:
    """`calibrate.py --ab`."""
    planned = plan(args)
    rounds = [row for rounds in planned for row in rounds]
    count = sum(map(len, rounds))
    design = {
        "--runs": args.runs,
        "--slowdowns": ",".join(f"{share * 100:g}%" for share in args.slowdowns) or "none",
    }
    design |= {"--campaigns": args.campaigns, "--slowed-campaigns": args.slowed_campaigns}
    status = 0
    try:
        if args.json:
            results.check_path(args.json, resume=False)
        sides = sides_of(args)
        campaign = Campaign(args.out, sides, design, check_report, args.timeout, args.interleave)
        with campaign:
            print(f"# {count} runs of {shlex.join(sides[0].command)}", flush=True)
            campaign.run_all(rounds, count)
    except ValueError as error:
        cli.refuse(printable(str(error), 1000))
    except (RunFailed, Interrupted) as end:
        print(f"calibrate.py: {end}\nthe same command goes on from here", file=sys.stderr)
        status = end.status
    if not campaign.finished():
        return status
    kinds = conclude(campaign, planned, args)
    times = durations(campaign)
    print(
        f"# a run takes {times['run_p50_s']:.1f} s (p50), {times['start_up_mean_s']:.1f} s of it "
        f"for starting (mean)\n\n{render(kinds)}",
        flush=True,
    )
    if args.json and not write_report(campaign, kinds, times, args):
        return status or 1
    return status
