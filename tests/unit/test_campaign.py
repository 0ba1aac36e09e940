"""The order of runs, what may run, the plan of looks, and the error rates of both."""

import argparse
import json
import os
import random
import re
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from harness import ROOT, load_script, run

from common import busy_wait, error_rates
from common.campaign import Campaign, load_campaign
from common.commands import SIGNALS
from common.compare import Comparison, Run, RunCase, compare
from common.error_rates import is_slowed, share_interval, tally
from common.sides import Side, balanced_order, environment_of, read_side

# -- the order -------------------------------------------------------------------------------------


def test_two_sides_take_turns_as_abba() -> None:
    assert "".join("".join(row) for row in balanced_order("AB", 4)) == "ABBAABBA"
    assert "".join("".join(row) for row in balanced_order("AB", 2, first=1)) == "BAAB"


@pytest.mark.parametrize("n", [2, 3, 4, 5, 6])
def test_each_side_is_as_often_in_each_place_and_behind_each_other(n: int) -> None:
    sides = "ABCDEF"[:n]
    rows = balanced_order(sides, n if n % 2 == 0 else 2 * n)
    assert all(sorted(row) == list(sides) for row in rows)
    places = Counter((side, place) for row in rows for place, side in enumerate(row))
    assert set(places.values()) == {len(rows) // n}
    followers = Counter(pair for row in rows for pair in pairwise(row))
    assert len(followers) == n * (n - 1)
    assert set(followers.values()) == {len(rows) // n}


def test_a_drift_cancels() -> None:
    """Each run 1 s slower than the one before: the sides come out alike; in AB AB they do not."""
    runs = [side for row in balanced_order("AB", 4) for side in row]
    assert sum(t for t, side in enumerate(runs) if side == "A") == sum(
        t for t, side in enumerate(runs) if side == "B"
    )
    assert sum(range(0, 8, 2)) != sum(range(1, 8, 2))


# -- commands --------------------------------------------------------------------------------------


def test_a_command_is_split_as_a_shell_would() -> None:
    side = read_side("a", f"{sys.executable} 'a b.py' --x=1", ["NCCL_ALGO=Ring", "EMPTY="])
    assert side == Side(
        "a", (sys.executable, "a b.py", "--x=1"), {"NCCL_ALGO": "Ring", "EMPTY": ""}
    )
    assert environment_of(side)["NCCL_ALGO"] == "Ring"


@pytest.mark.parametrize(
    ("command", "variables", "message"),
    [
        ("", [], "--b needs a command"),
        ("python 'x.py", [], "cannot split"),
        ("python x.py --json y", [], "the command has --json; leave it out"),
        ("python x.py --json=y", [], "the command has --json"),
        ("python x.py -J y", [], "the command has -J"),
        ("pyton-of-mine x.py", [], "there is no program 'pyton-of-mine' in PATH"),
        ("./no/python x.py", [], "there is no program './no/python';"),
        ("python x.py", ["X"], "--b-env: expected NAME=VALUE, got 'X'"),
        ("python x.py", ["1X=2"], "expected NAME=VALUE"),
        ("python x.py", ["X=1", "X=2"], "X is given twice"),
        ("python x.py", ["VIRTUAL_ENV=/none"], "there is no /none/bin/python"),
        ("python x.py", ["PATH=/none"], "there is no program 'python' in PATH"),
    ],
)
def test_what_cannot_run_is_refused(command: str, variables: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        read_side("b", command, variables)


def test_a_virtual_environment_comes_first_in_path(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    side = read_side("a", "python x.py", [f"VIRTUAL_ENV={tmp_path}"])
    assert environment_of(side)["PATH"] == f"{tmp_path}/bin:{os.environ['PATH']}"
    assert environment_of(Side("a", ("x",), {}))["PATH"] == os.environ["PATH"]


# -- the folder ------------------------------------------------------------------------------------


def campaign(folder: Path, **changes: Any) -> Campaign:
    sides = [
        Side("a", ("true",), {}),
        Side("b", ("true",), changes.pop("variables", {})),
    ]
    return Campaign(str(folder), sides, changes.pop("design", {"--runs": 2}), lambda path: None)


def finish(folder: Path, side: str, number: int) -> None:
    """Put a complete run there, as if it had been run."""
    (folder / f"{side}-{number:02d}.json").write_text("{}")
    path = folder / "campaign.json"
    document = json.loads(path.read_text())
    document["runs"].append({"side": side, "number": number, "status": "complete", "seconds": 1.0})
    path.write_text(json.dumps(document))


def test_finished_runs_are_kept_and_others_repeated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "a b"
    with campaign(folder):
        pass
    finish(folder, "a", 1)
    finish(folder, "b", 1)
    (folder / "b-01.json").unlink()
    document = json.loads((folder / "campaign.json").read_text())
    document["runs"].append({"side": "b", "number": 2, "status": "running", "seconds": None})
    (folder / "campaign.json").write_text(json.dumps(document))
    with campaign(folder) as again:
        assert [again.done(side, n) for side, n in (("a", 1), ("b", 1), ("b", 2))] == [
            *(True, False, False)
        ]
    assert capsys.readouterr().err.splitlines() == [
        "b-01 is run again: it wrote no report, although it ended well; does the command know "
        "--json?",
        "b-02 is run again, it was running",
        "runs that are kept: 1",
    ]


def test_another_command_or_a_changed_plan_is_refused(tmp_path: Path) -> None:
    with campaign(tmp_path):
        pass
    with pytest.raises(ValueError, match="--b-env was nothing there, and is X=1 now"):
        campaign(tmp_path, variables={"X": "1"}).__enter__()
    with campaign(tmp_path, design={"--runs": 3}) as first:  # nobody has looked yet
        first.note_look()
    with pytest.raises(ValueError, match="computed with --runs 3, and now it is 4"):
        campaign(tmp_path, design={"--runs": 4}).__enter__()
    with pytest.raises(ValueError, match="computed with --runs 3, and now it is None"):
        campaign(tmp_path, design={}).__enter__()


def test_one_campaign_at_a_time(tmp_path: Path) -> None:
    with campaign(tmp_path), pytest.raises(ValueError, match="another campaign is running"):
        campaign(tmp_path).__enter__()


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ValueError, match=r"holds notes\.txt but no campaign"):
        campaign(tmp_path).__enter__()
    with pytest.raises(ValueError, match="is not a folder"):
        campaign(tmp_path / "notes.txt").__enter__()
    for text in ("", "[]", '{"schema": "torchrun-bench-campaign/1", "runs": [3]}', "\0"):
        (tmp_path / "campaign.json").write_text(text)
        with pytest.raises(ValueError, match=r"campaign\.json is"):
            load_campaign(str(tmp_path / "campaign.json"))


# -- looking repeatedly ----------------------------------------------------------------------------

AB = load_script("ab")
NOISE = random.Random(0)


@pytest.mark.parametrize(
    ("first", "most", "looks"),
    [
        (6, 24, [6, 8, 12, 16, 24]),
        (6, 6, [6]),
        (6, 7, [6, 7]),
        (2, 12, [2, 4, 6, 8, 12]),
        (5, 40, [5, 8, 12, 16, 22, 30, 40]),
        (3, 12, [3, 4, 6, 8, 12]),
    ],
)
def test_looks_are_planned(first: int, most: int, looks: list[int]) -> None:
    assert AB.planned_looks(first, most) == looks


def run_of(value: float) -> Run:
    case = RunCase({"n": 1}, "case", "samples", value, None, "passed")
    return Run("", "fake", "complete", {}, "", {"n": case}, str(NOISE.random()))


class Simulated:
    """A campaign whose runs are there at once: lognormal times, B as fast as A."""

    def __init__(self, runs: int) -> None:
        self.runs = {
            (side, number): run_of(NOISE.lognormvariate(0, 0.1))
            for side in "ab"
            for number in range(1, runs + 1)
        }
        self.looked = 0

    def run_all(self, rounds: Any, planned: int) -> None:
        pass

    def note_look(self) -> None:
        self.looked += 1

    def path(self, side: str, number: int) -> Any:
        return self.runs[side, number]


def false_calls(monkeypatch: pytest.MonkeyPatch, corrected: bool, campaigns: int) -> float:
    """The share of A/A campaigns that end with B called slower or faster."""
    NOISE.seed(1)
    monkeypatch.setattr(AB, "load_run", lambda run, **options: run)

    def without_correction(*args: Any, **kwargs: Any) -> Comparison:
        return compare(*args, **kwargs | {"looks": 1})

    monkeypatch.setattr(AB, "compare", compare if corrected else without_correction)
    args = argparse.Namespace(
        ignore_key=[], margin=0.001, interleave=False
    )  # so that the margin hides nothing
    looks = AB.planned_looks(4, 16)
    called = 0
    for _ in range(campaigns):
        simulated = Simulated(looks[-1])
        result = AB.measure(simulated, args, looks)
        assert 1 <= simulated.looked == result.looks <= len(looks)
        called += result.comparison.cases[0].verdict in ("slower", "faster")
    return called / campaigns


def test_looking_repeatedly_errs_in_5_percent_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    assert false_calls(monkeypatch, corrected=True, campaigns=1000) <= 0.05


def test_looking_repeatedly_without_the_correction_errs_more_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert false_calls(monkeypatch, corrected=False, campaigns=400) > 0.08


# -- error rates -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "total", "low", "high"),
    # Wilson by hand: 5 of 10 is (0.5 + 0.192) / 1.384 -+ sqrt(0.025 + 0.0096) * 1.96 / 1.384
    [(5, 10, 0.2366, 0.7634), (0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (0, 0, 0.0, 1.0)],
)
def test_interval_of_a_share(count: int, total: int, low: float, high: float) -> None:
    interval = share_interval(count, total)
    assert (interval.low, interval.high) == pytest.approx((low, high), abs=1e-4)


def comparison_of(ratio: float) -> Comparison:
    """Four pairs whose ratio is this one, near enough."""
    base = [1.0, 1.001, 0.999, 1.0]
    pairs = [[run_of(t) for t in times] for times in (base, [t * ratio for t in base])]
    test = [run_of(t * ratio * e) for t, e in zip(base, (1, 1.001, 0.999, 1), strict=True)]
    return compare(pairs[0], test, 0.02, paired=True)


def test_tally() -> None:
    found = [comparison_of(ratio) for ratio in (1.0, 1.0, 1.0, 1.1)]
    alike = tally(found, 0.0)
    assert (alike["cases"], alike["cases_same"], alike["cases_slower"]) == (4, 3, 1)
    assert (alike["called"], alike["comparisons_called"], alike["coverage"]) == (0.25, 0.25, 0.75)
    assert tally([comparison_of(0.9)], 0.0)["called"] == 1
    slower = tally(found, 0.1)
    assert (slower["called"], slower["coverage"]) == (0.25, 0.25)
    assert tally([comparison_of(0.9)], 0.1)["called"] == 0
    nothing = tally([], 0.0)
    assert (nothing["called"], nothing["called_ci95"]) == (None, [0.0, 1.0])
    assert "-" in error_rates.render({"A/A": nothing, "5 % slower": slower})


def test_slowed_campaigns_are_spread() -> None:
    assert [i for i in range(12) if is_slowed(i, 3, 12)] == [3, 7, 11]
    assert sum(is_slowed(i, 7, 40) for i in range(40)) == 7


def test_the_plan_of_calibrate() -> None:
    args = load_script("calibrate").parse_args(
        ["--ab", "--out=x", "--campaigns=4", "--runs=2", "--slowed-campaigns=2", "--slowdowns=5%"]
    )
    campaigns = error_rates.plan(args)
    assert campaigns[0] == [[("a", 1), ("b", 1)], [("b", 2), ("a", 2)]]
    assert [sorted(row) for row in campaigns[1]] == [
        [(kind, n) for kind in ("a", "b", "slow5")] for n in (3, 4)
    ]
    flat = [slot for rounds in campaigns for row in rounds for slot in row]
    assert len(flat) == len(set(flat)) == 4 * 4 + 2 * 2
    slow = error_rates.sides_of(args)[2].command
    assert slow[slow.index("--slow-sweep") :] == ("--slow-sweep", "5%", "--", *args.sweep)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--ab", "add --out DIR"),
        ("--out x", "--out has no effect without --ab"),
        ("--ab --out x --modes clock", "--modes has no effect with --ab"),
        ("--ab --out x --runs 1", "--runs must be at least 2"),
        ("--ab --out x --slowdowns none --slowed-campaigns 3", "no effect with --slowdowns none"),
        ("--ab --out x --slowdowns 5", "less than 100%"),
        ("--ab --out x --campaigns 3 --slowed-campaigns 4", "more than the 3 of --campaigns"),
        ("--ab --out x --slow-sweep 5%", "--slow-sweep has no effect with --ab"),
        ("--slow-sweep 5% --json x", "--json has no effect with --slow-sweep"),
        ("--ab --out x -- --json y", "--json has no effect after --"),
        ("clock", "'clock' has no effect without --ab"),
    ],
)
def test_calibrate_refuses_flags_without_effect(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        load_script("calibrate").parse_args(words.split())
    assert end.value.code == 2
    assert message in capsys.readouterr().err


def test_the_busy_wait_is_a_share_of_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(
        busy_wait, "perf_counter", lambda: clock.__setitem__(0, clock[0] + 1e-6) or clock[0]
    )
    durations = iter([0.1, 0.2, 0.6])

    def step() -> None:
        clock[0] += next(durations)

    wait = busy_wait.BusyWait(0.5)
    slowed = wait.add_to(step)

    def seconds() -> float:
        start = clock[0]
        slowed()
        return clock[0] - start

    assert [seconds() for _ in range(3)] == pytest.approx([0.15, 0.3, 0.9], abs=1e-4)
    facts = wait.facts()
    assert facts == pytest.approx({"busy_wait_s": 0.15, "plain_step_s": 0.3}, abs=1e-4)


def test_the_threads_of_numpy_leave_signals_alone() -> None:
    """Else a Ctrl-C could reach one of them, and end ab.py where it sits."""
    code = """
import os, runpy, sys
from pathlib import Path
runpy.run_path(sys.argv[1])
assert "numpy" in sys.modules
tasks = sorted(Path("/proc/self/task").iterdir(), key=lambda task: int(task.name) != os.getpid())
for task in tasks:
    fields = dict(line.split(":", 1) for line in (task / "status").read_text().splitlines())
    print(fields["SigBlk"].strip())
"""
    variables = ["env", "-u", "OMP_NUM_THREADS", "-u", "OPENBLAS_NUM_THREADS"]
    done = run([*variables, sys.executable, "-c", code, str(ROOT / "benchmarks" / "ab.py")])
    assert done.returncode == 0, done.stderr
    main, *threads = (int(mask, 16) for mask in done.stdout.split())
    assert main == 0
    assert all(mask >> (number - 1) & 1 for mask in threads for number in SIGNALS)


def test_a_run_has_no_limit_of_time_unless_one_is_given() -> None:
    parse = load_script("calibrate").parse_args
    assert parse([]).timeout == 300
    assert parse(["--ab", "--out", "x"]).timeout is None
    assert parse(["--ab", "--out", "x", "--timeout", "300"]).timeout == 300
