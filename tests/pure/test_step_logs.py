"""--step: times from the logs of any program, the patterns in docs/logs.md, and ab.py with
logs."""

import argparse
import io
import itertools
import json
import re
import shlex
import sys
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from analysis.ab import add_flags
from analysis.logs import patterns, step_logs, suggestions
from analysis.logs.step_logs import Steps, matches_in, pattern, steps_of, times_of
from analysis.logs.suggestions import suggestion
from analysis.runs.load import load
from harness.cli import Parser
from harness.report import load as load_report
from tests.process import ROOT
from tests.pure.reports import refusal, refused, run

MS = r"took ([\d.]+) ms"


def found_in(text: str, steps: Steps, name: str) -> step_logs.Found:
    return times_of(matches_in(io.BytesIO(text.encode()).read, steps, name), steps, name)


def seconds(text: str, words: str, unit: str = "s", skip: int = 0) -> list[float]:
    return found_in(text, Steps(pattern(words), unit, skip), "x.log").times_s


def check(
    expected: list[float] | str, text: str, words: str, unit: str = "s", skip: int = 0
) -> None:
    """The seconds in a log, or what matches the line with which it is refused."""
    if isinstance(expected, str):
        assert re.search(expected, refused(seconds, text, words, unit, skip))
    else:
        assert seconds(text, words, unit, skip) == pytest.approx(expected, rel=1e-12)


# -- numbers ---------------------------------------------------------------------------------------


FIRST_OF_TWO = r"got 2, .*; e.g. --step 'fwd time: \(\[\\d.\]\+\)'"
# not in s: rates and times, next to the number on either side
OTHER_UNITS = [
    *("2.5 steps/S", "2.5 /s", "2.5/ s", "(it/s): 2.5", "2.5 it per s", "2.5 tok/GPU/s"),
    *("2.5 widgets/s", "2.5 fps", "2.5 (ips)", "2.5 [1/s]", "[1/s]: 2.5", "2.5 (s^-1)"),
    *("2.5 s**-1", "2.5 it s^{-1}", "s^-1: 2.5", "2.5 it\u00b7s\u207b\u00b9", "2.5 (ms)", "2.5 MS"),
    *("2.5, ms", "2.5\tms", "2.5\u00a0ms", "2.5-ms", "2.5_ms", "(ms): 2.5", "ms=2.5", "2.5 millis"),
    *("2.5 Milliseconds", '2.5, "unit": "ms"'),
]
NUMBER = r"took ([\d.]+)"


@pytest.mark.parametrize(
    ("text", "words", "unit", "expected"),
    [
        ("took 250 ms\ntook 1.5 ms\n", MS, "ms", [0.25, 0.0015]),
        ("loss 2.0 took 6.20.\n", NUMBER, "s", [6.2]),  # the period ends a sentence
        ("tps: 6,123  mfu: 1\ntps: 1,234,567\n", r"tps: ([\d,]+)", "1/s", [1 / 6123, 1 / 1234567]),
        ("t=1.2e-05\nt=3E+00\n", r"t=([\d.eE+-]+)", "s", [1.2e-5, 3.0]),
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
        ("10-20:t=5.5,~6\n", r"t=([\d.]+)", "s", [5.5]),
        ("rank=0|5.5ms|3/100;5.1%,(2)6\n", r"([\d.]+)ms", "ms", [0.0055]),
        ("mean 5.5\u00b10.2 ms, 5+-1\n", r"mean ([\d.]+)", "ms", [0.0055]),
        ("512.3/s (0.6s)\n", r"^([\d.]+)", "1/s", [1 / 512.3]),
        # not part of a number: the pattern continues after the group
        ("1.5,125,7\n", r"^([\d.]+)", "s", [1.5]),
        ("125,300\n", r"^(\d+),", "s", [125.0]),
        # two matches in a line: that which begins a word is meant
        ("time: 0.540, data_time: 0.006", r"time: ([\d.]+)", "s", [0.540]),
        ("data_time: 0.006, time: 0.540", r"time: ([\d.]+)", "s", [0.540]),
        ("0.540 s, 0.006 s", r"([\d.]+) s", "s", "got 2, e.g. '0.540 s' and '0.006 s'; begin it"),
        ("fwd time: 0.1, bwd time: 0.2", r"time: ([\d.]+)", "s", FIRST_OF_TWO),
        # 10 is a step if some steps cannot be thousands, or if all count up
        ("1 431.5\n2 432.5\n3 433.5", r"([\d.]+)$", "ms", [0.4315, 0.4325, 0.4335]),
        ("10 431.5\n10 1431.5\n", r"([\d.]+)$", "ms", [0.4315, 1.4315]),
        ("1 431.5\n", r"^\d+ ([\d.]+)", "ms", [0.4315]),
        # other numbers of the lines show the decimal mark
        ("lr 0.1 took 998 s\nlr 0.1 took 1.013 s", r"took (.*) s", "s", [998, 1.013]),
        ("loss: 7.1024 tps: 6,123\n", r"tps: ([\d,]+)", "1/s", [1 / 6123]),
        ("loss: 7 1024 tps: 6,123\n", r"tps: ([\d,]+)", "1/s", r"'6,123' may be 6123 or 6\.123"),
        (
            "2.5 it/s\n20 samples/s\n",
            r"([\d.]+)",
            "1/s",
            "line 2: .* per step, .* line 1, got .* sam",
        ),
        # the unit in the line
        ("it 1: 2.0it/s\nit 2: 1.5kit/s\n", r": ([\d.]+)", "1/s", [0.5, 1 / 1500]),
        ("tps: 12.5k\ntps: 980\n", r"tps: ([\d.]+)", "1/s", [1 / 12500, 1 / 980]),
        ("took 5 ms\ntook 1.2 s\n", NUMBER, "ms", "line 2: expected numbers in ms"),
        ("took 5 min\n", NUMBER, "s", "line 1: expected numbers in s, got '5 min'"),
        ("took 0.02s\n", NUMBER, "1/s", "line 1: expected numbers in 1/s, got '0.02s'"),
        ("it 1: 2.0it/s\nit 2: 30 it/min\n", r": ([\d.]+)", "1/s", [0.5, 2.0]),
        ("at 2 steps per second\n", r"at ([\d.]+)", "s", "expected numbers in s, got '2 steps p"),
        ("took 5 s/100it\n", r"took ([\d.]+) s", "s", "of one step, got '5 s/100it'"),
        ("at 4 Hz\n", r"at ([\d.]+)", "s", "expected numbers in s, got '4 Hz'"),
        ("30 it/min\n", r"([\d.]+)", "1/s", [2.0]),
        ("it/min: 30\nit/s: 3\n", r": ([\d.]+)", "1/s", [2.0, 1 / 3]),
        ("1.5K tok/s\n800 tok/s\n", r"([\d.]+)", "1/s", [1 / 1500, 1 / 800]),
        ("iter_ms: 998\niter_ms: 1.25K\n", r"_ms: ([\d.]+)", "ms", [0.998, 1.25]),
        ("took 1.25K ms\n", NUMBER, "s", "line 1: expected numbers in s, got '1.25K ms'"),
        # a clock
        (
            "".join(f"step_avg:250ms train_time:{250 * i}ms\n" for i in range(1, 12)),
            r"train_time:(\d+)ms",
            "ms",
            r"x.log: expected the time of each step, got .*: 250, 500, 750 and 8 more; e.g.",
        ),
        # the name of the next field is not a unit
        ("took 5 s: 7\n", NUMBER, "ms", [0.005]),
        ("took 5, ms 7\n", NUMBER, "s", [5.0]),
        ("took 5 (min 4)\n", NUMBER, "s", [5.0]),
        ("3.2 it/s 0.31\n", r" ([\d.]+)$", "s", [0.31]),  # nor is that of another number
        # a name of which only --unit says what it means
        ("iter_s: 5\n", r": ([\d.]+)", "1/s", [0.2]),
        ("latency/ms: 5\n", r": ([\d.]+)", "ms", [0.005]),
        ("widgets/s: 5\n", r": ([\d.]+)", "1/s", [0.2]),
        *((f"t {text}\n", r"(2\.5)", "s", "line 1: expected numbers in s") for text in OTHER_UNITS),
        # no number, or a part of one
        ("step 1\nloss 2.5\n\n", MS, "s", r"x.log: expected lines with 'took .*', got none in 4; "),
        ("step 1\nloss 2.5\n\n", MS, "s", "e.g. its last line is 'loss 2.5'"),
        ("", MS, "s", "x.log: expected lines with .*, got none in 1$"),
        (
            "ok\ntook N/A ms\n",
            r"took (\S+) ms",
            "ms",
            "line 2: expected a number above 0, got 'N/A'",
        ),
        *(
            (
                f"took {bad} ms\n",
                r"took (\S+) ms",
                "ms",
                f"line 1: expected a number .*, got '{bad}'",
            )
            for bad in ("0.0", "nan", "1.2.3", "-5", "1e400")
        ),
        ("took 1e30\n", r"took (\S+)", "s", "has a time outside of 1e-12 to 1e.09 s"),
        # parts of numbers
        ("tps: 6,123\n", r"tps: ([\d.]+)", "s", "the whole number '6,123', got '6'; e.g. "),
        ("t=1.2e-05\n", r"t=([\d.]+)", "s", r"the whole number '1.2e-05', got '1.2'; e.g. \(\["),
        ("t=12.5\n", r"t=(\d+)", "s", "the whole number '12.5', got '12'"),
        ("12.5ms\n", r"(\d+)ms", "s", "the whole number '12.5', got '5'"),
        ("1,234.5 it/s\n", r"([\d.]+) it/s", "s", "the whole number '1,234.5', got '234.5'"),
        ("1 s 2 s\n", r"(\d) s (\d) s", "s", "one group of --step to match, got 2 in '1 s 2 s'"),
        ("took 1 ms\n", r"took( \d+\.)? 1 ms", "ms", "one group of --step to match, got 0"),
        # fields of JSON
        ('{"perf": {"step_ms": 250}}', "perf.step_ms", "", [0.25]),
        ('{"perf": {"step_ms": 250}}', "perf.step", "s", "a field 'perf.step'.*fields are perf"),
        ("tps 5", "tps", "s", "expected JSON with a field 'tps', or a pattern"),
        ('{"step_time": 250, "unit": "ms", "loss_unit": "nats"}', "step_time", "ms", [0.25]),
        ('{"step_time": 250, "unit": "ms"}', "step_time", "s", "in s, got 'unit: ms'; e.g. --unit"),
        ('{"tps": [1]}', "tps", "1/s", "line 1: expected a number in 'tps', got a list"),
    ],
)
def test_numbers(text: str, words: str, unit: str, expected: list[float] | str) -> None:
    check(expected, text, words, unit)


def test_the_first_matches_are_skipped() -> None:
    """They need not be numbers."""
    assert seconds("took nan ms\ntook 3 ms\n", r"took (\S+) ms", "ms", skip=1) == [0.003]
    told = "2 matches of --step, and --skip 2 leaves none; e.g."
    check(told, "took 1 ms\ntook 2 ms\n", MS, "ms", skip=2)


def flags(*words: str) -> argparse.Namespace:
    parser = Parser(None)
    add_flags(parser)
    return parser.parse_args(["--a", "x", "--out", "x", *words])


UNITS: dict[tuple[bool, float, str] | None, tuple[str, ...]] = {  # is a rate, factor, measure
    (False, 1.0, "step"): (
        *(r"dt=([\d.]+)s", r"train_step_timing in s[:=] ?([\d.e-]+)", r"([\d.]+)s/it"),
        *("epoch_step_s", "time_per_token_s", r"seconds_per_step=([\d.]+)"),
    ),
    (False, 1e-3, "step"): (r"elapsed time per iteration \(ms\): ([\d.]+)", MS),
    (False, 1e-6, "step"): (r"step_time_us[:=]\s*([\d.]+)",),
    (False, 1e-3, "time per token"): (r"([\d.]+) ms/token",),
    (True, 1e3, "1 / rate"): (r"([\d.]+)kit/s",),
    (True, 1 / 60, "1 / rate"): (r"([\d.]+) it/min",),
    (True, 1.0, "1 / rate"): (
        *(r"(?P<rate>\d+)it", r"'train_steps_per_second': '?([\d.]+)", r"([\d.]+) s\^-1"),
        *(r"iteration \(ms\):.*TFLOP/s/GPU\): ([\d.]+)", r"([\d.]+) tokens per second"),
        *(r"tokens / s: ([\d.]+)", r"\[1/s\] ([\d.]+)"),
    ),
    None: (
        # a quantity and its unit, unless the quantity is something that is counted
        *(r"latency/ms: ([\d.]+)", r"Step time/s: ([\d.]+)", r"([\d.]+) dt/ms", "step_time/ms"),
        # names that may be those of rates
        *("toks_per_gpu_s", r"tokens per GPU-second: ([\d.]+)", "tok_s", r"speed \(s\): ([\d.]+)"),
        *("t/ms", r"steps_s=([\d.]+)"),
        # elsewhere, two at once, or none
        *(r"iteration \(ms\): .* rate: ([\d.]+)", r"time in ms .* ([\d.]+)", r"([\d.]+)s?"),
        *(r"time_ms: ([\d.]+)s", r"(?:steps|items): ([\d.]+)", r"tps: ([\d,]+)"),
    ),
}


@pytest.mark.parametrize("expected", UNITS)
def test_the_unit_next_to_the_group(expected: tuple[bool, float, str] | None) -> None:
    """A rate read as a time would invert the verdict, so a unit elsewhere does not count."""
    for words in UNITS[expected]:
        if expected is None:
            line = refused(steps_of, flags("--step", words), {})
            assert f"--unit: expected the unit of the numbers in '{words}'" in line
            assert "--unit 1/s" not in line  # no example that inverts the verdict
        else:
            steps = steps_of(flags("--step", words), {})
            assert steps, words
            (unit,) = steps.units
            assert unit, words
            assert (unit.is_rate, unit.factor, steps.measure) == expected, words


@pytest.mark.parametrize(
    ("words", "unit", "message"),
    [
        (r"dt=([\d.]+)s", "1/s", "--unit 1/s contradicts the unit in .*, which is s;"),
        (r"([\d.]+)it/s", "ms", "--unit ms contradicts .*, which is it/s;"),
        (r"(?P<rate>\d+)it/s", "s", "--unit s cannot be used with .*named after their units"),
    ],
)
def test_a_unit_that_contradicts_the_pattern(words: str, unit: str, message: str) -> None:
    assert re.search(message, refused(steps_of, flags("--step", words, "--unit", unit), {}))


# pattern -> what is joined, and the part of it that the pattern would read
PARTS = {
    NUMBER: [
        *("1,5>1", "1m02>1", "95%>95", "9.8*10^2>9.8", "9.8D+02>9.8", "1.2^3>1.2", "1`110.0>1"),
        *("1\u00b4110.0>1", "1\u00b7110.0>1", "1\u066c234.5>1", "5~6>5", "0x20>0", "1e5>1"),
        *("1_0000.5>1", "12s500m>12", "1.2 x 10^2>1.2", "1.2\u4e07>1.2"),
    ],
    r"([\d.]+) s": [
        *("1'013.0>013.0", "1\u202f013.0>013.0", "0,99>99", "1:02.5>02.5", "1m 02>02", "5-6>6"),
        *("1 min, 2.5>2.5", "1'02.5>02.5", "5.1\u00b10.2>0.2", "5.1 +- 0.2>0.2", "-5>5"),
        *("9.8*10^2>2", "9.8D+02>02", "1.2^3>3", "1`110.0>110.0", "1\u00b4110.0>110.0", "5~6>6"),
        *("1\u00b7110.0>110.0", "1\u066c234.5>234.5", "0x20>20", "1e5>5", "1_0000.5>0000.5"),
    ],
    r"took .*:([\d.]+) s": ["0:16:53.5>53.5"],
    r"took (\d+).*s": ["12.5>12"],
}


@pytest.mark.parametrize("words", PARTS)
def test_a_number_is_read_whole(words: str) -> None:
    for both in PARTS[words]:
        whole, part = both.split(">")
        line = refused(seconds, f"took {whole} s\n", words)
        told = re.search("whole number '(.*)', got '(.*?)'", line)
        assert told, line
        assert told[2] == part
        assert part in told[1] != part


@pytest.mark.parametrize(
    ("numbers", "words", "expected"),
    [
        # a decimal comma: 0,998 and 1,5 cannot have a separator of thousands
        (["0,998", "1,002"], r"took ([\d,.]+)", [0.998, 1.002]),
        (["1,5", "12,25", "1234,125"], r"took ([\d,.]+)", [1.5, 12.25, 1234.125]),
        (["1.013,5", "998,25", "1.013"], r"took ([\d,.]+)", [1013.5, 998.25, 1013]),
        (["1,003", "1,004"], r"took (\d+,\d+)", [1.003, 1.004]),  # the pattern says so
        # separators of thousands
        (["6,123", "7,250.5"], r"took ([\d,.]+)", [6123, 7250.5]),
        (["6,123", "812"], r"took (\d+(?:,\d{3})*)", [6123, 812]),
        (["1 013.0", "990.0"], r"took ([\d. ]+) s", [1013, 990]),
        (["1'013.0", "1\u202f013,5"], r"took ([\d.,'\u202f]+) s", "both decimal points and"),
        (["1\u202f013,5", "990,0"], r"took ([\d.,\s]+) s", [1013.5, 990]),
        (["1'013'250.5"], r"took ([\d.']+)", [1013250.5]),
        (["1_013.5"], r"took ([\d._]+)", [1013.5]),
        (["1,234,567.25"], r"took ([\d.,]+)", [1234567.25]),
        (["998", "1.013", "1.5"], r"took ([\d,.]+)", [998, 1.013, 1.5]),
        (["1002", "1.013"], r"took ([\d,.]+)", [1002, 1.013]),
        (["998", "1.013"], r"took (\d+(?:\.\d{3})*)", [998, 1013]),
        (["998", "1.013"], r"took (\d+(?:\.\d+)?)", [998, 1.013]),
        # which of the two it is cannot be told
        (["998", "1.013"], r"took ([\d,.]+)", "'1.013' may be 1013 or 1.013"),
        (["1,003", "1,004"], r"took ([\d,.]+)", "'1,003' may be 1003 or 1.003"),
        (["1.013", "1,004"], r"took ([\d,.]+)", "'1,004' may be 1004 or 1.004"),
        (["0.998", "0,998"], r"took ([\d,.]+)", "both decimal points and decimal commas"),
        # parts of a number
        *(
            (["1 013.0"], words, "'1 013.0' may be one number or two")
            for words in (r"([\d.]+) s", NUMBER, r".* ([\d.]+) s")
        ),
        (["1 113.0", "990.0"], r"([\d.]+) s", "'1 113.0' may be one number or two"),
        (["5.1 +- 0.2"], NUMBER + " ", [5.1]),
        (["990.0", "1 013.0"], NUMBER + " s", "line 2: expected no separator of thousands"),
        (["1,00,000.5"], r"took ([\d.,]+)", "expected a number above 0, got '1,00,000.5'"),
    ],
)
def test_separators(numbers: list[str], words: str, expected: list[float] | str) -> None:
    check(expected, "".join(f"took {number} s\n" for number in numbers), words)


@pytest.mark.timeout(120)  # ends a search that is quadratic again
@pytest.mark.parametrize(
    ("line", "words", "told"),
    [
        ('{"step_ms": [' + "12.345, " * 100_000 + "1]}", r"(\d+\.\d+)", "got 100,000"),
        ("1," * 400_000 + "5 ms", r"(\d+) ms", "whole number"),
        ("x" * 20_000_000, MS, "at most 1,000,000 characters"),
    ],
)
def test_a_long_line_is_read_in_linear_time(line: str, words: str, told: str) -> None:
    check(told, line, words, "ms")


@pytest.mark.parametrize("chunk_bytes", [2, 3, 5, 1000])
@pytest.mark.parametrize("code", ["utf-8", "utf-16"])
def test_a_log_in_parts(chunk_bytes: int, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part may end within a line, a character, or between CR and LF."""
    monkeypatch.setattr(patterns, "CHUNK_BYTES", chunk_bytes)
    text = "5 \u00b5s\r\n\x1b[31m6\x1b[0m \u4e2d\r\r\n\n7"
    lines = ["5 \u00b5s", "6 \u4e2d", "", "", "7"]
    assert [*patterns.lines_in(io.BytesIO(text.encode(code)).read, 20)] == lines
    begins = [*patterns.lines_in(io.BytesIO(f"1\n{'x' * 99}".encode()).read, 20)]
    assert begins[0] == "1"
    assert 20 < len(begins[1]) <= 99


def test_too_little_memory_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(step_logs, "matches_in", read)
    log, other = (write_log(tmp_path / name, [1.0]) for name in ("a.log", "b.log"))
    line = refusal("compare.py", log, "--test", other, "--step", MS)
    assert "not enough memory; give smaller files" in line


FIELDS = {
    "metrics.jsonl": (
        '{"step": 1, "time/step(s)": 0.50, "tps": null}\n'
        'a line of the launcher\n[rank0]: {"step": 2, "time/step(s)": 0.25}\n{"step": 3}\n'
    ),
    "trainer_state.json": (
        '{"epoch": 2.0, "log_history": [\n{"loss": 1.5, "step": 10, "time/step(s)": 0.50},\n'
        '{"step": 20, "time/step(s)": 0.25}, {"train_runtime": 52.3}]}'
    ),
}


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_of_json(name: str) -> None:
    """The name has a group, and is no pattern where a field has this name."""
    steps = steps_of(flags("--step", "time/step(s)"), {})
    assert steps
    found = found_in(FIELDS[name], steps, name)
    assert (found.times_s, steps.measure) == ([0.5, 0.25], "step")
    assert found.last_digit == pytest.approx(0.01 / 0.375)


# -- compare.py ------------------------------------------------------------------------------------


def write_log(path: Path, times_ms: list[float], form: str = "step {} took {:.2f} ms") -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [form.format(number, time_ms) for number, time_ms in enumerate(times_ms, 1)]
    path.write_text("starting\n" + "\n".join(lines) + "\n")
    return str(path)


@pytest.mark.parametrize(
    ("base", "test", "words", "verdict"),
    [
        ("took {:.0f} ms", "took {:.0f} ms", MS, "slower"),
        ("took {:.0f} ms", "took 1.{:03.0f} ms", MS, "undecided"),  # 968 ms, 1.047 ms
        ("took {:.1f} ms", "took 1.{:03.0f} Sek.", NUMBER, "undecided"),
    ],
)
def test_another_unit(base: str, test: str, words: str, verdict: str, tmp_path: Path) -> None:
    """About 960 ms and 1,050 ms: read as 1.05 or 50 ms, the latter are not faster."""
    for side, form, first in (("old", base, 960), ("new", test, 50 if base != test else 1050)):
        for number in range(3):
            times = [first + number, first + 2 * number, first + 3.0 * number]
            write_log(tmp_path / side / f"{number}.log", times, "step {}: " + form)
    sides = (str(tmp_path / "old"), "--test", str(tmp_path / "new"))
    unit = () if " ms" in words else ("--unit", "ms")
    done = run("compare.py", *sides, "--step", words, *unit, "--fail-on", "slower,faster")
    assert re.search(rf"^step .* {verdict}(?: \[|$)", done.stdout, re.MULTILINE), done.stdout
    assert (done.returncode, "another unit" in done.stdout) == ((1, False), (4, True))[
        verdict == "undecided"
    ]


@pytest.mark.parametrize(
    ("base", "test", "unit", "differ"),
    [
        ("2.5 it/s", "20 samples/s", "1/s", "step in BASE, sample in TEST"),
        ("2.5 it/s", "20 steps/s", "1/s", ""),
        ("100 tok/s/gpu", "800 tokens/s", "1/s", "token/gpu in BASE, token in TEST"),
        ("800 tokens/s", "1.6K tok/s", "1/s", ""),
        ("10 ms/token", "50 ms/step", "ms", "token in BASE, step in TEST"),
        ("10 ms", "50 ms/step", "ms", ""),
        ("10 ms", "12 ms/microbatch", "ms", "step in BASE, microbatch in TEST"),
        ("tok/s/gpu: 100", "tok/s: 800", "1/s", "token/gpu in BASE, token in TEST"),
        ("ms per 10 steps: 50", "ms per 100 steps: 500", "ms", "10 step in BASE, 100 step in TEST"),
        ("1.5Mi", "1.2Ti", "1/s", "mi in BASE, ti in TEST"),
    ],
)
def test_logs_that_count_other_things(
    base: str, test: str, unit: str, differ: str, tmp_path: Path
) -> None:
    """100 tokens per second and GPU are 800 per second on 8 GPUs, and no change."""
    old, new = (
        write_log(tmp_path / f"{text != base}.log", [1.0] * 3, text) for text in (base, test)
    )
    words = ["compare.py", old, "--test", new, "--step", r"([\d.]+)[ /\w]*$", "--unit", unit]
    done = run(*words)
    what = f"the keys differ in counts ({differ}); --ignore-key counts joins these cases\n"
    assert (done.returncode, done.stderr.endswith(what)) == ((2, True) if differ else (0, False))
    assert run(*words, *(["--ignore-key", "counts"] if differ else [])).returncode == 0


def test_a_side_counts_one_thing(tmp_path: Path) -> None:
    words = ["it/s", "samples/s", "it/s"]
    logs = [write_log(tmp_path / f"{i}.log", [2.5] * 3, "{1} " + of) for i, of in enumerate(words)]
    sides = ["compare.py", *logs[:2], "--test", logs[2], "--step", r"([\d.]+)", "--unit", "1/s"]
    error = run(*sides).stderr
    assert "the numbers of BASE count different things: step (" in error
    assert error.endswith("sample (" + logs[1] + "); --ignore-key counts joins them\n")
    assert run(*sides, "--ignore-key", "counts").returncode == 0


def test_logs_are_compared_as_runs(tmp_path: Path) -> None:
    """Three logs a side have medians of 100, 101, 102 and 120, 121.2, 122.4 ms after two slow
    steps: a ratio of 1.2. The logarithms of a side have a variance of 9.8e-5. t(4) = 2.776 times
    the error of 0.0081 is +-0.0225."""

    def compared(form: str, step: str, *words: str) -> CompletedProcess[str]:
        for side, factor in (("old", 1.0), ("new", 1.2)):
            for number, base in enumerate((100.0, 101.0, 102.0)):
                times = [factor * time for time in (900, 500, base - 1, base, base + 1)]
                write_log(tmp_path / side / f"{number}.log", times, "step {} " + form)
        sides = [str(tmp_path / "old"), "--test", str(tmp_path / "new")]
        return run("compare.py", *sides, "--step", step, "--skip", "2", *words)

    done = compared("took {:.2f} ms", MS, "--fail-on", "slower")
    assert done.returncode == 1, done.stderr
    assert "# torchrun-bench compare log (step): 3 of BASE, 3 of TEST; margin 2%" in done.stdout
    assert "time of a run: median of 3 matches of --step\n" in done.stdout
    read_as = "# the numbers of the logs were read as times: the lower, the faster\n"
    assert f"# 1 slower [load not recorded]\n{read_as}" in done.stdout
    row = r"^step +101.0 ms +121.2 ms +1.20x slower +1.17\d to 1.22\d +slower \[load not .*\]$"
    assert re.search(row, done.stdout, re.MULTILINE), done.stdout
    assert "--fail-on slower: failed (1 slower [load not recorded])" in done.stdout
    # as rates, 1.2 times as many per second are faster
    rates = compared("took {:.2f} it/s", NUMBER, "--unit", "1/s").stdout
    assert "compare log (1 / rate)" in rates
    assert "the numbers of the logs were read as rates: the higher, the faster\n" in rates
    assert re.search(r"^1 / rate .* 1.20x faster", rates, re.MULTILINE), rates
    # a name that does not say which of the two it is
    for unit, way in (((), "slower"), (("--unit", "1/s"), "faster")):
        named = compared("iter_s: {:.2f}", r"iter_s: ([\d.]+)", *unit).stdout
        assert re.search(rf" 1.20x {way}", named), named
        assert ("because of its name; if it is a rate, --unit 1/s" in named) == (not unit)
    logs = [write_log(tmp_path / f"{ms}.log", [ms] * 3) for ms in (1.0, 1.2)]
    one = run("compare.py", logs[0], "--test", logs[1], "--step", MS)
    assert "one run per side does not show how much runs vary" in one.stdout
    assert "# 1 undecided\n" in one.stdout


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
def test_rounded_numbers(tmp_path: Path, base: str, test: str, verdict: str) -> None:
    """Equal numbers do not prove equality within 2% if a unit of the last digit is 3%."""
    for (side, rate), number in itertools.product({"a": base, "b": test}.items(), (1, 2, 3)):
        text = f"run {number} of {side}\n" + f"{rate}it/s\n" * 5
        (tmp_path / f"{side}{number}.log").write_text(text)
    words = [str(tmp_path / "a?.log"), "--test", str(tmp_path / "b?.log"), "--unit", "1/s"]
    done = run("compare.py", *words, "--step", r"([\d.]+)it/s")
    assert f"# 1 {verdict}" in done.stdout, done.stdout + done.stderr
    if (base, test) == ("0.33", "0.33"):  # a unit of the last digit is 0.01 / 0.33
        assert re.search("0.9699 to 1.031 +undecided", done.stdout)
        assert "so coarse that they may be off by 1.5%" in done.stdout


# -- the patterns of the page ----------------------------------------------------------------------

# sample lines in the format of each program, and the seconds in them
MEGATRON = """
 iteration 10/ 2000 | consumed samples: 2560 | elapsed time per iteration (ms): 1147.6 | lr: 1E-05 |
 iteration 20/ 2000 | consumed samples: 5120 | elapsed time per iteration (ms): 431.5 | lr: 2E-05 |
"""
TITAN = """
[rank0]:[titan] 09:00:41,338 - root - INFO - \x1b[31mstep:  1  \x1b[32mloss: 12.2541  \
\x1b[36mmemory:  9.46GiB(64.99%)  \x1b[34mtps: 812  \x1b[36mtflops: 0.52  \x1b[35mmfu: 0%\x1b[39m
[rank0]:[titan] 09:00:42,457 - root - INFO - \x1b[33mvalidate step:  1  \x1b[32mloss: 9.1  \
\x1b[36mmemory:  9.46GiB(64.99%)  \x1b[34mtps: 20,500\x1b[39m
[rank0]:[titan] 09:00:43,577 - root - INFO - \x1b[31mstep: 10  \x1b[32mloss:  7.1024  \
\x1b[36mmemory:  9.46GiB(64.99%)  \x1b[34mtps: 7,250  \x1b[36mtflops: 4.66  \x1b[35mmfu: 1%\x1b[39m
"""
LIGHTNING = (
    "Sanity Checking DataLoader 0: 100%|####| 2/2 [00:00<00:00, 31.10it/s]\r"
    "Epoch 0: 100%|####| 100/100 [00:15<00:00,  6.67it/s, v_num=3]\n"
    "Epoch 1:  50%|##  | 50/100 [00:06<00:06,  8.33it/s, v_num=3]\r"
    "Epoch 1: 100%|####| 100/100 [00:12<00:00,  8.00it/s, v_num=3, loss=0.5]\r"
    "Epoch 10: 100%|###| 100/100 [00:12<00:00,  8.16it/s, v_num=3, loss=0.4]\n"
)
NEMO = """
Training epoch 0, iteration 0/99 | global_batch_size: 8 | train_step_timing in s: 7.126
Training epoch 0, iteration 1/99 | train_step_timing in s: 0.03146 | consumed_samples: 16
Epoch 0: :   2%|2  | 2/99 [00:10<08:00, global_step=2.000, train_step_timing in s=3.130]
"""
TRAINER = """
{'loss': '1.642', 'grad_norm': '3.312', 'learning_rate': '1.03e-06', 'epoch': '1'}
 50%|#####     | 40/80 [00:50<00:50,  1.27s/it]
{'train_runtime': '101.6', 'train_steps_per_second': '0.788', 'train_loss': '6.252', 'epoch': '2'}
{'train_runtime': 52.3131, 'train_samples_per_second': 61.17, 'train_steps_per_second': 1.912}
"""
MMENGINE = """
2026/11/02 09:00:41 - mmengine - INFO - Epoch(train)  [1][ 10/7330]  lr: 2.0e-04  eta: 1 day, \
1:02:03  time: 0.5402  data_time: 0.0061  memory: 9540  loss: 2.31
"""
LOGS: dict[str, tuple[str, list[float]]] = {
    "Megatron-LM": (MEGATRON, [1.1476, 0.4315]),
    "torchtitan": (TITAN, [1 / 812, 1 / 7250]),
    "Lightning": (LIGHTNING, [1 / 8.0, 1 / 8.16]),
    "NeMo": (NEMO, [7.126, 0.03146, 3.13]),
    "Hugging Face Trainer": (TRAINER, [1 / 0.788, 1 / 1.912]),
    "mmengine": (MMENGINE, [0.5402]),
    "tqdm": (TRAINER, [1.27]),
}
PAGE = (ROOT / "docs" / "logs.md").read_text()
ROWS = re.findall(r"^\| ([\w -]+) \| `(--step .+)` \|", PAGE, re.MULTILINE)
ROWS += [("tqdm", words) for words in re.findall(r"^    (--step .+)$", PAGE, re.MULTILINE)]


def test_the_patterns_of_the_page() -> None:
    assert [name for name, _ in ROWS] == list(LOGS)
    assert dict(ROWS) == patterns.PATTERNS
    for name, words in ROWS:
        steps = steps_of(flags(*shlex.split(words)), {})
        assert steps
        text, expected = LOGS[name]
        assert found_in(text, steps, name).times_s == pytest.approx(expected, rel=1e-12)


RUNTIME = '{{"_step": {0}, "_runtime": {1}.5, "_timestamp": 17{1}, "tps": 100, "step_time": 0.{2}}}'


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("iter time: 345.6{2} ms (step) remaining time: 0:12:34", r"'iter time: ([\d.]+) ms'"),
        ("loss: 4.3 | dt: 511.2{2}ms | tok/sec: 9 | total time: 0.85m", r"'dt: ([\d.]+)ms'"),
        ("step:{0}/12 train_time:{1}ms step_avg:250.0{2}ms", r"'step_avg:([\d.]+)ms'"),
        ("iter 3 | data 0.012 s | step 0.25{2} s", r"'data ([\d.]+) s' or 'step ([\d.]+) s'"),
        (RUNTIME, "'tps' --unit 1/s or 'step_time' --unit s"),
        # one number that two patterns read
        ("speed 2.0{2}it/s", f"{patterns.PATTERNS['tqdm'][len('--step ') :]} (tqdm)"),
        ("step {0} elapsed {1}s", ""),
        ("step {0} eta {3}s", ""),
    ],
)
def test_suggestions_read_the_lines(form: str, expected: str) -> None:
    """expected: the flags, without --step; "" for an example that is not from the lines. Numbers
    that only grow or only fall are not suggested."""
    line = suggestion(
        "\n".join(form.format(i, 25 * i, 1 + i % 3, 90 - 3 * i) for i in range(10, 22)).encode()
    )
    several = "; use the one that is the time or rate of a whole step, or write another"
    end = several if "' or '" in expected or "/s or '" in expected else ""
    if expected:
        assert line.replace("--step ", "") == "; its lines are read by " + expected + end
    else:
        assert line.startswith("; step times of a log are read by --step, e.g. ")


@pytest.mark.parametrize("end", ["\n", "\r"])
def test_suggestions_from_a_long_log(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps follow other lines, and are cut at any character."""
    monkeypatch.setattr(suggestions, "MOST_BYTES", 2000)
    lines = ["NCCL INFO Channel 00/02 : 0 1 2 3 via ring"] * 40
    lines += [f"step: {i}  loss: 4.25  tps: {1200 + 17 * i % 50:,}" for i in range(100)]
    for shift in range(0, 40, 3):
        text = "x" * shift + end.join(lines) + "\n"
        assert suggestion(text.encode()).endswith(" (torchtitan)")


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
    page = out.parent / "page.html"
    assert run("report.py", str(out), "-o", str(page)).returncode == 0
    assert "step mean (ms)" in page.read_text()
    other = refusal("ab.py", *words_of(out, "100 x", "200 x", "--skip", "2"))
    assert "its plan does not contain skip: 2; choose another --out" in other
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


def test_a_folder_without_logs(tmp_path: Path) -> None:
    log = write_log(tmp_path / "a.log", [1.0])
    (tmp_path / "empty").mkdir()
    line = refusal("compare.py", log, "--test", str(tmp_path / "empty"), "--step", MS)
    assert f"there is no file *{', *'.join(step_logs.ENDINGS)} in " in line


def test_escape_sequences_are_removed() -> None:
    for codes in ("\x1b[1;31m", "\x1b]0;title\x07", "\x1b]8;;x\x1b\\", "\x1b[2K", "\x1bM"):
        assert patterns.CODES.sub("", f"a{codes}b") == "ab"
