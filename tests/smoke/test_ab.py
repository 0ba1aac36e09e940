"""ab.py and calibrate.py --ab as a user starts them: on a program that writes a report at once, and
on real runs."""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from harness import (
    CALIBRATE,
    ROOT,
    SWEEP,
    TINY,
    alive,
    environment,
    launch,
    load,
    load_script,
    run,
)

from common import error_rates
from common.sides import Side

AB = str(ROOT / "benchmarks" / "ab.py")
FAKE = str(ROOT / "tests" / "faults" / "fake_benchmark.py")


def ab(folder: Path, *flags: str, command: str = f"'{sys.executable}' '{FAKE}'") -> list[str]:
    sides = ["--a", command, "--b", command]
    return [sys.executable, AB, "--out", str(folder), "--runs", "2", *sides, *flags]


def runs(folder: Path) -> list[tuple[str, str]]:
    """Each run with its status, in the order of campaign.json."""
    document = load(folder / "campaign.json")
    return [(f"{r['side']}-{r['number']:02d}", r["status"]) for r in document["runs"]]


def wait_for(path: Path, text: str, seconds: float = 60) -> str:
    limit = time.monotonic() + seconds
    while not (path.exists() and text in path.read_text()):
        assert time.monotonic() < limit, f"{path} never had {text!r}"
        time.sleep(0.05)
    return path.read_text()


def test_two_interpreters_in_abba_order(tmp_path: Path) -> None:
    """Each side with variables and a virtual environment of its own; verdicts and formats."""
    venv = tmp_path / "v env"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").symlink_to(sys.executable)
    log = tmp_path / "log"
    folder = tmp_path / "a b"
    sides = [
        *("--a", f"python '{FAKE}'", "--a-env", f"VIRTUAL_ENV={venv}", f"FAKE_LOG={log}"),
        *("--b", f"'{sys.executable}' '{FAKE}'", "--b-env", "FAKE_SCALE=1.5", f"FAKE_LOG={log}"),
    ]
    command = [sys.executable, AB, "--out", str(folder), "--runs", "3", *sides]
    done = run([*command, "--fail-on", "slower"], cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "# TEST: FAKE_SCALE=1.5" in done.stdout
    assert "1.50x slower" in done.stdout
    assert "failed: slower" in done.stderr
    ran = [line.split(maxsplit=1) for line in log.read_text().splitlines()]
    assert [name for name, _ in ran] == ["a-01", "b-01", "b-02", "a-02", "a-03", "b-03"]
    for name, python in ran:
        assert python == (f"{venv}/bin/python" if name[0] == "a" else sys.executable)
    assert {status for _, status in runs(folder)} == {"complete"}
    assert load(folder / "campaign.json")["status"] == "complete"

    again = run([*command, "--format", "json"], cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    found = json.loads(again.stdout)
    assert {case["verdict"] for case in found["cases"]} == {"slower"}
    assert found["planned_looks"] == [3]
    assert len(log.read_text().splitlines()) == 6, "nothing was run again"

    for flags, message in {
        ("--runs", "4"): "computed with --runs 3, and now it is 4",
        ("--b-env", "X=1"): "--b-env was FAKE_LOG",
    }.items():
        refused = run([*command, *flags], cwd=tmp_path)
        assert refused.returncode == 2
        assert message in refused.stderr
        assert refused.stderr.count("\n") == 1
    elsewhere = run(command, cwd=ROOT)
    assert (elsewhere.returncode, "the directory it was started in" in elsewhere.stderr) == (
        2,
        True,
    )


def test_until_decided(tmp_path: Path) -> None:
    flags = ["--until-decided", "--max-runs", "6", "--runs", "3", "--b-env", "FAKE_SCALE=1.5"]
    done = run(ab(tmp_path / "sure", *flags))
    assert done.returncode == 0, done.stderr
    assert "look 1 of at most 3: each of these intervals holds with 98.3333 %" in done.stdout
    assert len(runs(tmp_path / "sure")) == 6
    noisy = f"'{sys.executable}' '{FAKE}' --noise 0.5"
    done = run(ab(tmp_path / "unsure", *flags[:-2], command=noisy))
    assert "look 3 of at most 3" in done.stdout
    assert len(runs(tmp_path / "unsure")) == 12


def test_interrupted_and_resumed(tmp_path: Path) -> None:
    folder = tmp_path / "campaign"
    with launch(["env", f"FAKE_STUBBORN_FROM={folder}/b-01.json", *ab(folder)]) as started:
        log = wait_for(folder / "b-01.log", "started")
        again = run(ab(folder))
        assert again.returncode == 2
        assert "another campaign is running there" in again.stderr
        for _ in range(3):  # the run ignores SIGINT and SIGTERM: each Ctrl-C goes a step further
            os.kill(started.process.pid, signal.SIGINT)
            time.sleep(0.5)
        assert started.wait() == 130, started.output()
    child = int(log.split()[1])
    assert not alive(child), "what the run had started is left behind"
    assert runs(folder) == [("a-01", "complete"), ("b-01", "interrupted")]
    assert load(folder / "campaign.json")["status"] == "interrupted"
    (folder / "b-01.json").write_text('{"half": ')
    before = (folder / "a-01.json").stat().st_mtime_ns
    done = run(ab(folder))
    assert done.returncode == 0, done.stderr
    assert (folder / "a-01.json").stat().st_mtime_ns == before
    assert len(load(folder / "b-01.json")["cases"]) == 2
    assert runs(folder) == [(name, "complete") for name in ("a-01", "b-01", "b-02", "a-02")]


def test_killed_leaves_no_run_behind(tmp_path: Path) -> None:
    with launch(["env", "FAKE_SLEEP=300", *ab(tmp_path)]) as started:
        wait_for(tmp_path / "a-01.log", "started")
        (pid,) = [
            int(word)
            for word in Path(f"/proc/{started.process.pid}/task/{started.process.pid}/children")
            .read_text()
            .split()
        ]
        started.process.kill()
        started.wait()
        limit = time.monotonic() + 30
        while alive(pid):
            assert time.monotonic() < limit
            time.sleep(0.05)


@pytest.mark.parametrize(
    ("variables", "status", "message"),
    [
        ({"FAKE_FAIL_ONCE": "once"}, "failed", "run a-01 ended with status 7"),
        ({"FAKE_HALF": "1"}, "failed", "run a-01 left a report of no use"),
        ({"FAKE_CHECK": "failed: no memory"}, "failed", "case 0: failed: no memory"),
        ({"FAKE_STATUS": "interrupted"}, "failed", "its status is interrupted"),
        ({"FAKE_SLEEP": "60"}, "failed", "run a-01 took longer than 3 s and was ended"),
    ],
    ids=["status", "half", "case", "incomplete", "late"],
)
def test_a_failing_run_stops_the_campaign(
    tmp_path: Path, variables: dict[str, str], status: str, message: str
) -> None:
    folder = tmp_path / "campaign"
    words = [f"{name}={value}" for name, value in variables.items()]
    late = ["--timeout", "3"] if "FAKE_SLEEP" in variables else []
    done = run(["env", *words, *ab(folder, *late)], cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert done.stdout == ""
    assert message in done.stderr
    assert "    started" in done.stderr, "the end of the log is shown"
    assert "\nTraceback" not in done.stderr
    assert runs(folder) == [("a-01", status)]
    again = run(ab(folder), cwd=tmp_path)
    assert again.returncode == 0, again.stderr


def test_interleaved(tmp_path: Path) -> None:
    """Both runs of a pair at once, turn by turn; a pair that is not complete runs again."""
    log = tmp_path / "log"
    folder = tmp_path / "campaign"
    words = ["env", f"FAKE_LOG={log}", "FAKE_TURNS=3"]
    command = ab(folder, "--interleave", "--b-env", "FAKE_SCALE=1.5")
    done = run([*words, *command])
    assert done.returncode == 0, done.stderr
    assert "1.50x slower" in done.stdout
    assert log.read_text().split()[::2] == ["a-01", "b-01"] * 3 + ["b-02", "a-02"] * 3
    assert "a-01, b-01 took" in done.stderr
    document = load(folder / "campaign.json")
    assert [entry["turns"] for entry in document["runs"]] == [4] * 4
    (folder / "a-02.json").unlink()
    log.unlink()
    again = run([*words, *command])
    assert again.returncode == 0, again.stderr
    assert log.read_text().split()[::2] == ["b-02", "a-02"] * 3
    refused = run([*words, *(word for word in command if word != "--interleave")])
    assert refused.returncode == 2
    assert "--interleave was True there, and is False now" in refused.stderr


def test_interleaved_failures(tmp_path: Path) -> None:
    """A command that takes no turns; one that fails while the other waits; Ctrl-C."""
    refused = run(ab(tmp_path / "foreign", "--interleave"))
    assert refused.returncode == 1
    assert "run a-01 took no turn: only this project's scripts can" in refused.stderr

    torchrun = f"'{sys.executable}' -m torch.distributed.run x.py"
    refused = run(ab(tmp_path / "port", "--interleave", command=torchrun))
    assert refused.returncode == 2
    assert "both would take port 29500; add --standalone" in refused.stderr

    log = tmp_path / "log"
    words = ["env", f"FAKE_LOG={log}", "FAKE_TURNS=200", "FAKE_SLEEP=300"]
    folder = tmp_path / "fails"
    one = ["--b-env", f"FAKE_FAIL_ONCE={tmp_path}/once", "FAKE_TURNS=2", "FAKE_SLEEP=0"]
    failed = run([*words, *ab(folder, "--interleave", *one)])
    assert failed.returncode == 1
    assert "run b-01 ended with status 7" in failed.stderr
    assert "the last words" in failed.stderr
    assert runs(folder) == [("a-01", "stopped"), ("b-01", "failed")]

    folder = tmp_path / "interrupted"
    with launch([*words, *ab(folder, "--interleave")]) as started:
        limit = time.monotonic() + 60
        while log.read_text().count("a-01") < 10:
            assert time.monotonic() < limit
            time.sleep(0.05)
        (thread,) = Path(f"/proc/{started.process.pid}/task").glob(f"{started.process.pid}")
        pids = [int(word) for word in (thread / "children").read_text().split()]
        assert len(pids) == 2
        os.kill(started.process.pid, signal.SIGINT)
        assert started.wait() == 130, started.output()
    assert not any(map(alive, pids))
    assert runs(folder) == [("a-01", "interrupted"), ("b-01", "interrupted")]


def test_nothing_in_common_is_told_after_the_first_pair(tmp_path: Path) -> None:
    flags = ["--runs", "3", "--b-env", "FAKE_BENCHMARK=another"]
    done = run(ab(tmp_path, *flags))
    assert done.returncode == 2
    assert "no case is on both sides: BASE has reports of fake, TEST of another" in done.stderr
    assert [name for name, _ in runs(tmp_path)] == ["a-01", "b-01"]


def test_a_full_disk(tmp_path: Path) -> None:
    refused = run(ab(Path("/proc/campaign")))
    assert refused.returncode == 2
    assert "--out /proc/campaign cannot be used" in refused.stderr
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            ab(tmp_path),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            env=environment(),
        )
    assert done.returncode == 1
    assert "cannot print: No space left on device" in done.stderr


def fake_sides(args: argparse.Namespace) -> list[Side]:
    """The kinds of calibrate.py --ab, made of the program that writes a report at once."""
    plain = (sys.executable, FAKE, "--noise", "0.001")
    slow = [Side(error_rates.name_of(s), plain, {"FAKE_SCALE": f"{1 + s}"}) for s in args.slowdowns]
    return [Side("a", plain, {}), Side("b", plain, {}), *slow]


def test_error_rates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(error_rates, "sides_of", fake_sides)
    folder, path = tmp_path / "rates", tmp_path / "rates.json"
    words = ["--ab", "--out", str(folder), "--json", str(path), "--slowdowns", "10%"]
    calibrate = load_script("calibrate")

    def rates(*more: str) -> dict[str, dict[str, Any]]:
        assert error_rates.main(calibrate.parse_args([*words, *more])) == 0
        return {case["label"]: case["metrics"] for case in load(path)["cases"]}

    found = rates("--campaigns", "2", "--runs", "3", "--slowed-campaigns", "1")
    assert (found["A/A"]["comparisons"], found["A/A"]["cases"], found["A/A"]["called"]) == (2, 4, 0)
    slower = found["10 % slower"]
    assert (slower["comparisons"], slower["called"], slower["coverage"]) == (1, 1, 1)
    assert slower["injected"] == pytest.approx(0.1)
    assert "10 % slower" in capsys.readouterr().out
    assert len(runs(folder)) == 2 * 6 + 3
    longer = rates("--campaigns", "3", "--runs", "3", "--slowed-campaigns", "1")
    assert longer["A/A"]["comparisons"] == 3
    assert "runs that are kept: 1" in capsys.readouterr().err


@pytest.mark.timeout(900)
def test_real_runs(tmp_path: Path) -> None:
    """A sweep that takes turns with the same one and a busy-wait; calibrate.py --ab's torchrun."""
    flags = " ".join([*TINY, "--device", "cpu", "--iters", "6", "--warmup-iters", "1"])
    flags += " --no-breakdown"
    command = [sys.executable, AB, "--out", str(tmp_path / "ab"), "--runs", "2", "--interleave"]
    plain = f"'{sys.executable}' '{SWEEP}' {flags}"
    slow = f"'{sys.executable}' '{CALIBRATE}' --slow-sweep 50% -- {flags}"
    done = run([*command, "--a", plain, "--b", slow], timeout=400)
    assert done.returncode == 0, done.stderr
    assert "ddp_sweep: 2 of BASE, 2 of TEST" in done.stdout
    for entry in load(tmp_path / "ab" / "campaign.json")["runs"]:
        assert entry["turns"] > 2 * 6, "each block had a turn of its own"
    for name in ("b-01", "b-02"):
        cases = load(tmp_path / "ab" / f"{name}.json")["cases"]
        assert [case["key"]["label"] for case in cases] == ["no ddp", "1M/1G"]
        for case in cases:
            assert case["other_samples_s"] == {}
            check_wait(case)

    folder = tmp_path / "rates"
    sweep = ["--", *TINY, "--device", "cpu", "--world-sizes", "2", "--max-seconds", "60"]
    with launch([sys.executable, CALIBRATE, "--ab", "--out", str(folder), *sweep]) as started:
        wait_for(folder / "a-01.log", "# rank 1", 200)  # two ranks under torchrun
        wait_for(folder / "a-01.log", "no ddp", 200)
        os.kill(started.process.pid, signal.SIGINT)
        assert started.wait(200) == 130, started.output()
    assert load(folder / "a-01.json")["status"] == "interrupted"
    assert runs(folder) == [("a-01", "interrupted")]


def check_wait(case: dict[str, Any]) -> None:
    """The wait is half of what the step takes without it, or longer where others had the core."""
    metrics = case["metrics"]
    assert metrics["busy_wait_s"] >= 0.5 * metrics["plain_step_s"]
    assert metrics["step_time_p50_s"] > metrics["busy_wait_s"] > 0
