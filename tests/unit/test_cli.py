"""common/cli.py: what the flags take, and how they say no."""

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common import cli

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def parser() -> cli.Parser:
    made = cli.Parser(prog="bench.py")
    made.add_argument("--batch-size", type=cli.positive_int)
    made.add_argument("--models", "--model", type=cli.list_of(str))
    cli.add_measurement_flags(made)
    cli.add_report_flags(made)
    return made


@pytest.fixture
def refusal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[Callable[[], Any]], str]:
    """Runs something that must end the program as a usage error; returns its one line."""
    monkeypatch.setattr(sys, "argv", ["/path/to/bench.py"])

    def run(work: Callable[[], Any]) -> str:
        with pytest.raises(SystemExit) as ended:
            work()
        assert ended.value.code == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.count("\n") == 1
        assert err.startswith("bench.py: error: ")
        return err.removeprefix("bench.py: error: ").rstrip("\n")

    return run


# -- types -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (cli.positive_int, "1", 1),
        (cli.positive_int, "128", 128),
        (cli.positive_float, "0.5", 0.5),
        (cli.positive_float, "1e3", 1000.0),
        (cli.percentage, "2%", 0.02),
        (cli.percentage, "0.02", 0.02),
        (cli.percentage, "0.5%", 0.005),
        (cli.percentage, "99%", 0.99),
        (cli.list_of(str), "a", ["a"]),
        (cli.list_of(str), "a, b,c", ["a", "b", "c"]),
        (cli.list_of(cli.positive_int), "4,1,2", [4, 1, 2]),
        (cli.list_of(str, ["fp32", "bf16"]), "bf16,fp32", ["bf16", "fp32"]),
    ],
)
def test_types_accept(kind: Callable[[str], Any], text: str, value: Any) -> None:
    assert kind(text) == value


WHOLE = "expected a whole number of at least 1, got '{}'"
ABOVE = "expected a number above 0, got '{}'"
LESS = "expected more than 0 and less than 100%, e.g. 2%, got '{}'"


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        *((cli.positive_int, text, WHOLE) for text in ("0", "-1", "1.5", "four", "")),
        *((cli.positive_float, text, ABOVE) for text in ("0", "-1", "nan", "inf", "x", "")),
        (cli.percentage, "100%", LESS),
        (cli.percentage, "1", LESS),
        (cli.percentage, "2", LESS),
        (cli.percentage, "0", LESS),
        (cli.percentage, "-0.5", LESS),
        *((cli.list_of(str), text, "expected a list like a,b,c, got '{}'") for text in ("", "a,,")),
        (cli.list_of(str), "a,b,a", "expected each item once, got '{}'"),
        (cli.list_of(cli.positive_float), "25,25.0", "expected each item once, got '{}'"),
        (cli.list_of(cli.positive_int), "1,0", WHOLE.format("0")),
        (cli.list_of(str, ["fp32", "bf16"]), "fp3", "unknown 'fp3'; did you mean fp32?"),
        (cli.list_of(str, ["fp32", "bf16"]), "x", "unknown 'x'; choose from fp32, bf16"),
    ],
)
def test_types_refuse(kind: Callable[[str], Any], text: str, message: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError) as refused:
        kind(text)
    assert str(refused.value) == message.format(text)


def test_suggest() -> None:
    known = ["resnet50", "resnet152", "vgg16"]
    assert cli.suggest("resnet5", known) == "; did you mean resnet50, resnet152?"
    assert cli.suggest("xyz", known) == ""


# -- the parser ------------------------------------------------------------------------------------


def test_underscores_are_hyphens(parser: cli.Parser) -> None:
    args = parser.parse_args(
        ["--batch_size", "4", "--model=my_net", "--max_seconds=2", "--json", "a_b"]
    )
    assert (args.batch_size, args.max_seconds) == (4, 2.0)
    assert (args.models, args.json) == (["my_net"], "a_b")  # values stay as they are


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--batch-sise", "4"], "unknown argument '--batch-sise'; did you mean --batch-size?"),
        (["--batch_sise=4"], "unknown argument '--batch-sise'; did you mean --batch-size?"),
        (["--batch", "4"], "unknown argument '--batch'; did you mean --batch-size?"),
        (["--zzz"], "unknown argument '--zzz'"),
        (["stray"], "unknown argument 'stray'"),
        (
            ["--batch-size", "0"],
            "argument --batch-size: expected a whole number of at least 1, got '0'",
        ),
        (["--batch-size"], "argument --batch-size: expected one argument"),
    ],
)
def test_bad_flags(
    parser: cli.Parser, refusal: Callable[..., str], argv: list[str], message: str
) -> None:
    assert refusal(lambda: parser.parse_args(argv)) == message


def test_a_bad_choice_names_the_choices(parser: cli.Parser, refusal: Callable[..., str]) -> None:
    line = refusal(lambda: parser.parse_args(["--device", "tpu"]))
    assert all(word in line for word in ("--device", "tpu", "auto", "cpu", "cuda"))


def test_the_other_ranks_wait_before_they_speak(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    naps: list[float] = []

    def sleep(seconds: float) -> None:
        assert capsys.readouterr() == ("", "")
        naps.append(seconds)

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit) as ended:
        cli.refuse("no")
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("[rank 1] ")
    assert sum(naps) >= 5  # rank 0 has said why before the launcher ends it


# -- flags that all scripts share ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "want"),
    [
        ([], (5, None, 20, 0.02, 5.0)),
        (["--iters", "7"], (5, 7, 20, 0.02, 5.0)),
        (["--warmup-iters", "1", "--min-iters", "9"], (1, None, 9, 0.02, 5.0)),
        (["--target-ci", "5%", "--max-seconds", "60"], (5, None, 20, 0.05, 60.0)),
    ],
)
def test_measurement_flags(parser: cli.Parser, argv: list[str], want: tuple[Any, ...]) -> None:
    args = parser.parse_args(argv)
    cli.check_measurement_flags(args)
    got = (args.warmup_iters, args.iters, args.min_iters, args.target_ci, args.max_seconds)
    assert got == want


def test_measurement_defaults_of_a_script() -> None:
    parser = cli.Parser()
    cli.add_measurement_flags(parser, min_iters=100, max_seconds=1.5)
    args = parser.parse_args([])
    cli.check_measurement_flags(args)
    assert (args.min_iters, args.max_seconds) == (100, 1.5)
    assert "(default: 100)" in parser.format_help()


@pytest.mark.parametrize(
    ("flag", "value"), [("--min-iters", "20"), ("--target-ci", "2%"), ("--max-seconds", "5")]
)
def test_iters_leaves_the_stop_rule_without_effect(
    parser: cli.Parser, refusal: Callable[..., str], flag: str, value: str
) -> None:
    args = parser.parse_args(["--iters", "5", flag, value])
    line = refusal(lambda: cli.check_measurement_flags(args))
    assert line.startswith(f"{flag} has no effect with --iters")


def test_report_flags(parser: cli.Parser) -> None:
    args = parser.parse_args([])
    assert (args.json, args.resume, args.timeout) == (None, False, 300.0)
    args = parser.parse_args(["--json", "r.json", "--resume", "--timeout", "9"])
    assert (args.json, args.resume, args.timeout) == ("r.json", True, 9.0)


def test_the_module_imports_only_the_standard_library() -> None:
    code = "import sys; import common.cli; print({'torch', 'numpy', 'tabulate'} & {*sys.modules})"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (done.stdout.strip(), done.stderr) == ("set()", "")
