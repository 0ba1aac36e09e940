"""Each flag in a message is accepted by the script, or by the program that the message names.
--help imports no slow package."""

import ast
import importlib
import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.run import get_args_parser

from common.stats import Estimate
from harness import cli
from harness.observe.hints import hints
from harness.report import Case, load
from tests.process import ROOT, environment

SCRIPTS = sorted(path.stem for path in (ROOT / "benchmarks").glob("[a-z]*.py"))
SHARED = sorted({*ROOT.glob("common/*.py"), *ROOT.glob("harness/**/*.py")})
SHARED.remove(ROOT / "harness" / "observe" / "hints.py")  # depends on the script: see below
LONG = re.compile(r"(?<![\w-])--[a-z][a-z-]*[a-z](?![\w-])")
FLAG = re.compile(r"(?<![\w-])--?[a-zA-Z](?:[a-z-]*[a-z])?(?![\w-])")
OTHERS = {  # the flags that messages pass to other programs
    r"torchrun": {"--nproc-per-node", "--nnodes"},
    r"srun": {"--cpus-per-task"},
    r"sbatch": {"--exclude"},
    r"ab\.py": {"--interleave"},
}


@cache
def parser_of(script: str, folder: str = "benchmarks") -> cli.Parser:
    """The parser of a script: its parse_args is left when it has all flags."""

    class Found(Exception):
        pass

    def stop(parser: cli.Parser, *_: Any) -> None:
        raise Found(parser)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cli.Parser, "parse_args", stop)
        module = importlib.import_module(f"{folder}.{script}")
        parse = module.parse_args if folder == "benchmarks" else module.main
        with pytest.raises(Found) as found:
            parse()
    parser: cli.Parser = found.value.args[0]
    return parser


def defaults_of(script: str) -> dict[str, Any]:
    """The flags that a script has parsed if none is given on a CPU."""
    pairs = {action.dest: action.default for action in parser_of(script)._actions}
    return {n: x.cpu if isinstance(x, cli.PerDevice) else x for n, x in pairs.items()}


def flags_of(script: str) -> set[str]:
    return {flag for action in parser_of(script)._actions for flag in action.option_strings}


def refused(text: str, flags: set[str], kind: re.Pattern[str] = FLAG) -> list[str]:
    """The flags in a text that are neither in `flags` nor those of a program that it names."""
    others = {flag for name, given in OTHERS.items() if re.search(name, text) for flag in given}
    for name in set(re.findall(r"(\w+)\.py", text)).intersection(SCRIPTS):
        others |= flags_of(name)
    return [flag for flag in kind.findall(text) if flag not in flags | others]


@cache
def messages(path: Path) -> list[str]:
    """The texts with blanks of a file without its docstrings; f-strings are one text."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    parts = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    parts |= {id(node.value) for node in nodes if isinstance(node, ast.Expr)}  # docstrings
    whole = [node for node in nodes if isinstance(node, ast.JoinedStr | ast.Constant)]
    texts = [ast.unparse(node) for node in whole if id(node) not in parts]
    return [text for text in texts if " " in text]


def imported(path: Path) -> list[Path]:
    """The modules of benchmarks/workloads/ that a script imports."""
    names = re.findall(r"^from benchmarks\.workloads\.(\w+) import", path.read_text(), re.M)
    if "--mesh" not in flags_of(path.stem):  # then it checks no meshes with their messages
        names = [name for name in names if name != "meshes"]
    return [ROOT / "benchmarks" / "workloads" / f"{name}.py" for name in names]


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_accepts_the_flags_in_its_messages(script: str) -> None:
    path, flags = ROOT / "benchmarks" / f"{script}.py", flags_of(script)
    shared = [] if script == "traffic" else SHARED  # it measures nothing
    found = {}
    for file in [path, *imported(path), *shared]:
        for text in messages(file):
            if wrong := refused(text, flags, LONG):
                found[file.name, text] = wrong
    assert found == {}


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_flags_of_a_script(script: str) -> None:
    """No flag is an ambiguous prefix of torchrun's: before Python 3.12 argparse reads flags behind
    the script as abbreviations of its own. Every suggested replacement of a flag exists."""
    actions = get_args_parser()._actions
    theirs = {name.replace("_", "-") for action in actions for name in action.option_strings}
    for flag in flags_of(script) - theirs:
        assert len([name for name in theirs if name.startswith(flag)]) < 2 or len(flag) == 2, flag
    gone = cli.LAUNCHER_FLAGS | getattr(importlib.import_module(f"benchmarks.{script}"), "GONE", {})
    assert set(LONG.findall(" ".join(gone.values()))) - theirs <= flags_of(script)


@pytest.mark.parametrize("script", [name for name in SCRIPTS if name != "traffic"])
def test_a_script_accepts_the_flags_in_its_hints(script: str) -> None:
    """Those on uncertain intervals, for each cause."""
    defaults = defaults_of(script)
    case = Case(key={}, ranks=[0], samples_s={"step": [[2.0] * 6]}, metrics={"step_s": Estimate(2)})
    for given in ({}, {"iters": 6}):
        args: Any = SimpleNamespace(**defaults | given)
        texts = [hints([case], args, *why) for why in (("", ""), ("busy", ""), ("", "crowded"))]
        assert [refused(text, flags_of(script)) for [text] in texts] == [[]] * 3
        assert FLAG.search(texts[0][0])


@pytest.mark.parametrize("path", sorted(ROOT.glob("docs/results/*.jsonl")), ids=lambda x: x.name)
def test_a_script_accepts_the_flags_in_its_answers(path: Path) -> None:
    report = load(str(path), lambda _, case: case.samples_s.clear())
    for answer in report.end["answer"]:
        assert refused(answer, flags_of(report.benchmark)) == []


# These take seconds to import. A script imports them only after its flags are parsed.
SLOW = (
    *("torchvision", "transformers", "matplotlib", "torch._dynamo", "torch._inductor"),
    *("torch.distributed.pipelining", "benchmarks.workloads.axes"),
)

# Each script runs in a fork of a process that has imported what all of them import.
PROBE = """
import json, os, runpy, sys
import torch.distributed.fsdp, torch.distributed.rpc
before = set(sys.modules)
out = os.dup(1)
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
for script in sys.argv[1:]:
    if os.fork():
        os.wait()
        continue
    sys.argv, sys.path[0] = [script, "--help"], os.path.dirname(script)
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        line = [os.path.basename(script), end.code or 0, sorted(set(sys.modules) - before)]
        os.write(out, json.dumps(line).encode() + b"\\n")
    os._exit(0)
"""


def test_nothing_slow_is_imported() -> None:
    paths = [str(ROOT / "benchmarks" / f"{name}.py") for name in SCRIPTS]
    command = [sys.executable, "-c", PROBE, *paths]
    env = environment(CUDA_VISIBLE_DEVICES="")
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500)
    found = {}
    for script, status, imported in map(json.loads, done.stdout.splitlines()):
        found[script] = status, [name for name in imported if name.startswith(SLOW)]
    assert found == {f"{name}.py": (0, []) for name in SCRIPTS}
