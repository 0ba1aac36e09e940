"""--step: times from the logs of any program, the patterns in docs/compare.md, and ab.py with
logs."""

import argparse
import itertools
import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from analysis.ab import add_flags
from analysis.logs import step_logs
from analysis.logs.step_logs import Steps, pattern, steps_of, times_of
from analysis.runs.load import load
from harness.cli import Parser
from harness.report import load as load_report
from tests.process import ROOT
from tests.pure.reports import run

MS = r"took ([\d.]+) ms"


def seconds(text: str, words: str, unit: str = "s", skip: int = 0) -> list[float]:
    found = times_of(text.encode(), Steps(pattern(words), unit, skip), "x.log")
    return found.times_s


# -- numbers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words", "unit", "expected"),
    [
        ("took 250 ms\ntook 1.5 ms\n", MS, "ms", [0.25, 0.0015]),
        ("loss 2.0 took 6.20.\n", r"took ([\d.]+)", "s", [6.2]),  # the period ends a sentence
        (
            "tps: 6,123  tflops: 1\ntps: 1,234,567\n",
            r"tps: ([\d,]+)",
            "1/s",
            [1 / 6123, 1 / 1234567],
        ),
        ("t=1.2e-05, t=3E+00\n", r"t=([\d.eE+-]+)", "s", [1.2e-5, 3.0]),
        ("t=12,345.6\n", r"t=([\d.,]+)", "ms", [12.3456]),
        ("\x1b[31mstep: 1  \x1b[34mtps: \x1b[1m2\x1b[39m\n", r"tps: ([\d,]+)", "1/s", [0.5]),
        # a progress bar: each update begins with \r, and tqdm changes the unit at 1/s
        (
            "\r 1/9 [00:01, ?it/s]\r 2/9 [00:02,  2.00it/s]\x1b[A\r 3/9 [00:05,  1.25s/it]\n",
            r"(?P<rate>[\d.]+)it/s|(?P<s>[\d.]+)s/it",
            "",
            [0.5, 1.25],
        ),
        ("a 5 ms\r\nb 6 ms\r\n", r"^\w (\d+) ms$", "ms", [0.005, 0.006]),
        # not part of a number: the pattern continues after the group
        ("1.5,125,7\n", r"^([\d.]+)", "s", [1.5]),
        ("125,300\n", r"^(\d+),", "s", [125.0]),
    ],
)
def test_numbers(text: str, words: str, unit: str, expected: list[float]) -> None:
    assert seconds(text, words, unit) == pytest.approx(expected, rel=1e-12)


def test_the_first_matches_are_skipped() -> None:
    """They need not be numbers."""
    text = "took nan ms\ntook 0 ms\ntook 3 ms\ntook 4 ms\n"
    assert seconds(text, r"took (\S+) ms", "ms", skip=2) == [0.003, 0.004]


@pytest.mark.parametrize(
    ("text", "words", "skip", "message"),
    [
        ("step 1\nloss 2.5\n\n", MS, 0, r"x.log: expected lines with 'took .*', got none in 4; "),
        ("step 1\nloss 2.5\n\n", MS, 0, "e.g. its last line is 'loss 2.5'"),
        ("", MS, 0, "x.log: expected lines with .*, got none in 1$"),
        (
            "took 1 ms\ntook 2 ms\n",
            MS,
            2,
            "2 matches of --step, and --skip 2 leaves none; e.g. --s",
        ),
        ("ok\ntook N/A ms\n", r"took (\S+) ms", 0, "line 2: expected a number above 0, got 'N/A'"),
        ("took 0.0 ms\n", MS, 0, "line 1: expected a number above 0, got '0.0'"),
        ("took nan ms\n", r"took (\w+) ms", 0, "expected a number above 0, got 'nan'"),
        ("took 1.2.3 ms\n", MS, 0, "expected a number above 0, got '1.2.3'"),
        ("took -5 ms\n", r"took (\S+) ms", 0, "expected a number above 0, got '-5'"),
        ("took 1e400 ms\n", r"took (\S+) ms", 0, "expected a number above 0, got '1e400'"),
        ("took 1e30 ms\n", r"took (\S+) ms", 0, "has a time outside of 1e-12 to 1e.09 s"),
        # parts of numbers
        ("tps: 6,123\n", r"tps: ([\d.]+)", 0, "the whole number '6,123', got '6'; e.g. "),
        ("t=1.2e-05\n", r"t=([\d.]+)", 0, r"the whole number '1.2e-05', got '1.2'; e.g. \(\["),
        ("t=12.5\n", r"t=(\d+)", 0, "the whole number '12.5', got '12'"),
        ("12.5ms\n", r"(\d+)ms", 0, "the whole number '12.5', got '5'"),
        ("1,234.5 it/s\n", r"([\d.]+) it/s", 0, "the whole number '1,234.5', got '234.5'"),
        ("1 s 2 s\n", r"(\d) s (\d) s", 0, "one group of --step to match, got 2 in '1 s 2 s'"),
        ("took 1 ms\n", r"took( \d+\.)? 1 ms", 0, "one group of --step to match, got 0"),
    ],
)
def test_an_invalid_match_is_refused_in_one_line(
    text: str, words: str, skip: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message) as error:
        seconds(text, words, "s", skip)
    assert "\n" not in str(error.value)


def flags(*words: str) -> argparse.Namespace:
    parser = Parser(None)
    add_flags(parser)
    return parser.parse_args(["--a", "x", "--out", "x", *words])


def test_the_unit_is_never_guessed() -> None:
    """A rate read as a time would invert the verdict."""
    steps = steps_of(flags("--step", r"per iteration \(ms\): ([\d.]+)"), {})
    assert steps
    assert (steps.unit, steps.skip, steps.measure) == ("ms", 0, "step")
    rate = steps_of(flags("--step", r"tps: ([\d,]+)", "--unit", "1/s", "--skip", "3"), {})
    assert rate
    assert (rate.unit, rate.skip, rate.measure) == ("1/s", 3, "1 / rate")
    assert steps_of(flags("--step", r"(?P<rate>\d+)it/s"), {})
    with pytest.raises(ValueError, match="--unit: expected the unit of the numbers in 'tps: "):
        steps_of(flags("--step", r"tps: ([\d,]+)"), {})
    with pytest.raises(ValueError, match=r"--unit s cannot be used with .*named after their units"):
        steps_of(flags("--step", r"(?P<rate>\d+)it/s", "--unit", "s"), {})


# -- compare.py ------------------------------------------------------------------------------------


def write_log(path: Path, times_ms: list[float], form: str = "step {} took {:.2f} ms") -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [form.format(number, time_ms) for number, time_ms in enumerate(times_ms, 1)]
    path.write_text("starting\n" + "\n".join(lines) + "\n")
    return str(path)


def test_logs_are_compared_as_runs(tmp_path: Path) -> None:
    """Three logs a side have medians of 100, 101, 102 and 120, 121.2, 122.4 ms after two slow
    steps: a ratio of 1.2. The logarithms of a side have a variance of 9.8e-5. t(4) = 2.776 times
    the error of 0.0081 is +-0.0225."""
    for side, factor in (("old", 1.0), ("new", 1.2)):
        for number, base in enumerate((100.0, 101.0, 102.0)):
            times = [900, 500, base - 1, base, base + 1]
            write_log(tmp_path / side / f"{number}.log", [time * factor for time in times])
    old, new = str(tmp_path / "old"), str(tmp_path / "new")
    words = ("compare.py", old, "--test", new, "--step", MS, "--skip", "2", "--fail-on", "slower")
    done = run(*words)
    assert done.returncode == 1, done.stderr
    assert "# torchrun-bench compare log (step): 3 of BASE, 3 of TEST; margin 2%" in done.stdout
    assert "time of a run: median of 3 matches of --step\n" in done.stdout
    row = r"^step +101.0 ms +121.2 ms +1.20x slower +1.17\d to 1.22\d +slower \[load not .*\]$"
    assert re.search(row, done.stdout, re.MULTILINE), done.stdout
    assert "--fail-on slower: failed (1 slower [load not recorded])" in done.stdout
    # as rates, 1.2 times as many per second are faster
    rates = run(*words[:4], "--step", MS, "--skip", "2", "--unit", "1/s")
    assert "compare log (1 / rate)" in rates.stdout
    assert "1.20x faster" in rates.stdout
    one = run("compare.py", f"{old}/0.log", "--test", f"{new}/0.log", "--step", MS)
    assert "one run per side does not show how much runs vary" in one.stdout
    assert "# 1 undecided\n" in one.stdout


def test_a_copied_log_does_not_count_twice(tmp_path: Path) -> None:
    base = [write_log(tmp_path / f"a{n}.log", [100.0 + n] * 3) for n in (1, 2)]
    test = [write_log(tmp_path / f"b{n}.log", [100.5] * 3) for n in (1, 2)]
    done = run("compare.py", *base, "--test", *test, "--step", MS, "--fail-on", "slower")
    assert done.returncode == 4
    assert f"left out: a copy of {test[0]}: {test[1]}" in done.stdout


@pytest.mark.parametrize(
    ("base", "test", "verdict"),
    [
        # 0.33 and 0.34 may stand for 0.3349 and 0.3351
        ("0.33", "0.34", "undecided"),
        ("0.33", "0.33", "undecided"),
        ("0.33", "0.50", "faster"),
        ("0.330", "0.330", "same"),
    ],
)
def test_rounded_numbers_widen_the_interval(
    tmp_path: Path, base: str, test: str, verdict: str
) -> None:
    """Equal numbers do not prove equality within 2% if a unit of the last digit is 3%."""
    sides = {"a": base, "b": test}
    for side, number in itertools.product(sides, (1, 2, 3)):
        text = f"run {number} of {side}\n" + f"{sides[side]}it/s\n" * 5
        (tmp_path / f"{side}{number}.log").write_text(text)
    words = [str(tmp_path / "a?.log"), "--test", str(tmp_path / "b?.log"), "--unit", "1/s"]
    done = run("compare.py", *words, "--step", r"([\d.]+)it/s")
    assert f"# 1 {verdict}" in done.stdout, done.stdout + done.stderr
    if (base, test) == ("0.33", "0.33"):  # a unit of the last digit is 0.01 / 0.33
        assert re.search("0.9699 to 1.031 +undecided", done.stdout)
        assert "so few digits that a number may be off by 1.5%" in done.stdout


# -- the patterns of the page ----------------------------------------------------------------------

# sample lines in the format of each program, and the seconds in them
MEGATRON = """
 [2026-11-02 09:00:41] iteration       10/    2000 | consumed samples:         2560 | elapsed time \
per iteration (ms): 1147.6 | throughput per GPU (TFLOP/s/GPU): 401.2 | learning rate: 1.2E-05 |
 [2026-11-02 09:00:52] iteration       20/    2000 | consumed samples:         5120 | elapsed time \
per iteration (ms): 431.5 | throughput per GPU (TFLOP/s/GPU): 420.1 | learning rate: 2.4E-05 |
"""
TITAN = """
[rank0]:[titan] 2026-11-02 09:00:41,338 - root - INFO - \x1b[31mstep:  1  \x1b[32mloss: 12.2541  \
\x1b[38;5;208mgrad_norm:  3.1000  \x1b[36mmemory:  9.46GiB(64.99%)  \x1b[34mtps: 812  \
\x1b[36mtflops: 0.52  \x1b[35mmfu: 0.17%\x1b[39m
[rank0]:[titan] 2026-11-02 09:00:42,457 - root - INFO - \x1b[33mvalidate step:  1  \x1b[32mloss: \
9.1  \x1b[36mmemory:  9.46GiB(64.99%)  \x1b[34mtps: 20,500\x1b[39m
[rank0]:[titan] 2026-11-02 09:00:43,577 - root - INFO - \x1b[31mstep: 10  \x1b[32mloss:  7.1024  \
\x1b[38;5;208mgrad_norm:  1.0513  \x1b[36mmemory:  9.46GiB(64.99%)  \x1b[34mtps: 7,250  \
\x1b[36mtflops: 4.66  \x1b[35mmfu: 1.49%\x1b[39m
"""
LIGHTNING = (
    "Sanity Checking DataLoader 0: 100%|####| 2/2 [00:00<00:00, 31.10it/s]\r"
    "Epoch 0:  50%|##  | 50/100 [00:10<00:10,  5.00it/s, v_num=3]\r"
    "Epoch 0: 100%|####| 100/100 [00:15<00:00,  6.67it/s, v_num=3]\n"
    "Epoch 1:  50%|##  | 50/100 [00:06<00:06,  8.33it/s, v_num=3]\r"
    "Epoch 1: 100%|####| 100/100 [00:12<00:00,  8.00it/s, v_num=3, loss=0.5]\r"
    "Epoch 10: 100%|###| 100/100 [00:12<00:00,  8.16it/s, v_num=3, loss=0.4]\n"
)
NEMO = """
Training epoch 0, iteration 0/99 | lr: 1.9e-06 | global_batch_size: 8 | global_step: 0 | \
reduced_train_loss: 11.31 | train_step_timing in s: 7.126
Training epoch 0, iteration 1/99 | lr: 3.9e-06 | global_batch_size: 8 | global_step: 1 | \
reduced_train_loss: 10.65 | train_step_timing in s: 0.03146 | consumed_samples: 16
Epoch 0: :   2%|2  | 2/99 [00:10<08:00, reduced_train_loss=9.83, global_step=2.000, \
train_step_timing in s=3.130]
"""
TRAINER = """
{'loss': '1.642', 'grad_norm': '3.312', 'learning_rate': '1.03e-06', 'epoch': '1'}
 50%|#####     | 40/80 [00:50<00:50,  1.27s/it]
{'train_runtime': '101.6', 'train_samples_per_second': '3.544', 'train_steps_per_second': '0.788', \
'train_loss': '6.252', 'epoch': '2'}
{'train_runtime': 52.3131, 'train_samples_per_second': 61.17, 'train_steps_per_second': 1.912, \
'train_loss': 1.9, 'epoch': 2.0}
"""
LOGS: dict[str, tuple[str, list[float]]] = {
    "Megatron-LM": (MEGATRON, [1.1476, 0.4315]),
    "torchtitan": (TITAN, [1 / 812, 1 / 7250]),
    "Lightning": (LIGHTNING, [1 / 8.0, 1 / 8.16]),
    "NeMo": (NEMO, [7.126, 0.03146, 3.13]),
    "Hugging Face Trainer": (TRAINER, [1 / 0.788, 1 / 1.912]),
    "tqdm": (TRAINER, [1.27]),
}
PAGE = (ROOT / "docs" / "compare.md").read_text()
ROWS = re.findall(r"^\| ([\w -]+) \| `(--step .+)` \|", PAGE, re.MULTILINE)
ROWS += [("tqdm", words) for words in re.findall(r"^    (--step .+)$", PAGE, re.MULTILINE)]


def test_each_pattern_of_the_page_has_a_sample_log() -> None:
    assert [name for name, _ in ROWS] == list(LOGS)


@pytest.mark.parametrize(("name", "words"), ROWS)
def test_the_patterns_of_the_page(name: str, words: str) -> None:
    steps = steps_of(flags(*shlex.split(words)), {})
    assert steps
    text, expected = LOGS[name]
    assert times_of(text.encode(), steps, name).times_s == pytest.approx(expected, rel=1e-12)


# -- ab.py -----------------------------------------------------------------------------------------

# these commands do not accept --json; a run that fails has printed a step before
COMMAND = """
import os, sys
base, mode = float(sys.argv[1]), sys.argv[2]
assert len(sys.argv) == 3
calls = os.path.join(os.path.dirname(sys.argv[0]), f"calls {base:g}")
with open(calls, "a") as file:
    number = file.tell() + 1
    file.write(".")
print("step 0 took", 77 if mode == "fail once" else base * 9, "ms", flush=True)
if mode == "fail once" and number == 2:
    sys.exit("a reason to fail")
for step in range(5 if mode != "silent" else 0):
    print("step", step, "took", base + step + 0.1 * number, "ms")
"""


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(COMMAND)
    return tmp_path / "out"


def words_of(out: Path, a: str, b: str, *more: str) -> list[str]:
    train = shlex.join([sys.executable, str(out.parent / "train.py")])
    words = ["--a", f"{train} {a}", "--b", f"{train} {b}", "--out", str(out), "--runs", "2"]
    return [*words, "--max-runs", "2", "--allow-disturbed", "--step", MS, "--skip", "1", *more]


def test_ab_with_commands_that_write_no_report(out: Path) -> None:
    """The first step is skipped: the medians are 102.1 and 102.2 ms, and 202.1 and 202.2 ms."""
    done = run("ab.py", *words_of(out, "100 x", "200 x"))
    assert done.returncode == 0, done.stderr
    row = r"^step +102.1 ms +202.1 ms +1.98x slower .* slower \[disturbed runs allowed, 2 pairs\]$"
    assert re.search(row, done.stdout, re.MULTILINE), done.stdout
    report = load_report(str(out / "a" / "01.jsonl"))
    assert (report.benchmark, report.status, report.argv[-2:]) == ("log", "complete", ["100", "x"])
    assert report.cases[0].samples_s == {"step": [[0.1001, 0.1011, 0.1021, 0.1031, 0.1041]]}
    (both,) = {len(run.loads) for run in load([str(out)])}
    assert both == 1  # the load is recorded
    other = run("ab.py", *words_of(out, "100 x", "200 x", "--skip", "2"))
    assert (other.returncode, other.stderr.count("\n")) == (2, 1)
    assert "its plan does not contain skip: 2; choose another --out" in other.stderr
    # compare.py reads both the reports and the logs
    for ending, step in (("jsonl", ()), ("log", ("--step", MS, "--skip", "1"))):
        sides = [str(out / side / f"*.{ending}") for side in "ab"]
        shown = run("compare.py", sides[0], "--test", sides[1], *step, "--allow-disturbed").stdout
        assert re.search(r"^step +102.1 ms +202.1 ms +1.98x slower ", shown, re.MULTILINE), shown


def test_lines_of_an_earlier_attempt_do_not_count(out: Path) -> None:
    done = run("ab.py", *words_of(out, "100 'fail once'", "200 x"))
    assert done.returncode == 1
    assert re.search("a [12]: exit status 1; .*:\n    step 0 took 77 ms\n.*reason", done.stderr)
    done = run("ab.py", *words_of(out, "100 'fail once'", "200 x"))
    assert done.returncode == 0, done.stderr
    (old,) = (out / "a").glob("*.log.bak")
    assert "a reason to fail" in old.read_text()
    for path in (out / "a").glob("*.jsonl"):
        times = json.loads(path.read_text().splitlines()[1])["samples_s"]["step"]
        assert len(times[0]) == 5


def test_a_command_without_steps_ends_the_rounds(out: Path) -> None:
    done = run("ab.py", *words_of(out, "100 x", "200 silent"))
    assert done.returncode == 1
    message = "b 1: exit status 0; .*01.log has 1 match of --step, and --skip 1 leaves none"
    assert re.search(message, done.stderr), done.stderr


def test_report_py_shows_logs(out: Path, tmp_path: Path) -> None:
    assert run("ab.py", *words_of(out, "100 x", "200 x")).returncode == 0
    page = tmp_path / "page.html"
    done = run("report.py", str(out), "-o", str(page))
    assert done.returncode == 0, done.stderr
    assert "last digit share" in page.read_text()


def test_a_folder_without_logs(tmp_path: Path) -> None:
    log = write_log(tmp_path / "a.log", [1.0])
    (tmp_path / "empty").mkdir()
    done = run("compare.py", log, "--test", str(tmp_path / "empty"), "--step", MS)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert f"there is no file *{', *'.join(step_logs.ENDINGS)} in " in done.stderr


def test_escape_sequences_are_removed() -> None:
    for codes in ("\x1b[1;31m", "\x1b]0;title\x07", "\x1b]8;;x\x1b\\", "\x1b[2K", "\x1bM"):
        assert step_logs.CODES.sub("", f"a{codes}b") == "ab"
