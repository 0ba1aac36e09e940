"""analysis/runs/plan.py: the files and variables that the commands of ab.py depend on."""

import os
import re
import shlex
from pathlib import Path

import pytest

from analysis.runs import plan
from analysis.runs.commands import Command, open_plan
from tests.process import ROOT
from tests.pure.reports import refused

APP = ["app/__init__.py", "app/__main__.py"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory. `tool` is on PATH."""
    monkeypatch.chdir(tmp_path)
    texts = {"bin/tool": "#!/usr/bin/env python\n", "run": "#!/bin/sh\n"}
    files = ["train.py", "config.yaml", "there/train.py", "path/lib.py", "models/nets.py", *APP]
    for name in (*texts, *files, "app/inner/__main__.py"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(texts.get(name, ""))
        path.chmod(0o755 if name in texts else 0o644)
    return tmp_path


MAIN = "app/__main__.py"
NAMED = {
    "tool train.py --iters 3 x": ["bin/tool", "train.py"],
    "A=1 tool --config=config.yaml 'a b' '\"'": ["bin/tool", "config.yaml"],
    "x -c 'A=1 tool train.py && y'": ["bin/tool", "train.py"],
    "x -fconfig.yaml @train.py": ["config.yaml", "train.py"],
    **dict.fromkeys(("x -m app", "x -mapp", "x -um app"), APP),
    "x app": [MAIN],
    "x app/": [MAIN],
    "x -m app.inner": ["app/__init__.py", "app/inner/__main__.py"],
    "x -m lib": ["path/lib.py"],
    "env PYTHONPATH=models:path x -m nets": ["models/nets.py"],
    "x --model models.nets:make?batch=16": ["models/nets.py"],
    "env -C there x train.py": ["there/train.py", "train.py"],
    "env --chdir=there x train.py": ["there/train.py", "train.py"],
    "cd there && x train.py": ["there/train.py", "train.py"],
    "x https://host:80/y -m torch.distributed.run": [],
}


def test_files_that_a_command_names(folder: Path) -> None:
    environ = {"PATH": f"{folder}/bin", "PYTHONPATH": f"{folder}/path"}
    found = {text: plan.files_of(text, environ).values() for text in NAMED}
    names = {t: sorted(os.path.relpath(path, folder) for path in found[t]) for t in NAMED}
    assert names == NAMED


@pytest.mark.parametrize(
    ("text", "edited", "expected"),
    [
        ("python -m app", MAIN, f"{MAIN} has changed"),
        ("python -mtrain", "train.py", "train.py has changed"),
        ("python app", MAIN, f"{MAIN} has changed"),
        ("env --chdir=app python __main__.py", MAIN, f"{MAIN} has changed"),
        ("python train.py", "path/lib.py", "what train.py calls or imports"),
        ("python -um app", "path/lib.py", "what app/__main__.py calls or imports"),
        ("./run x", "train.py", "what run calls or imports"),
        ("sh run there/train.py", "train.py", "what run, there/train.py call or import"),
        ("python -c 'import train'", "train.py", "what `python -c 'import train'` runs"),
        ("make measure", "train.py", "what `make measure` runs"),
        # its reports have contents
        (shlex.join(["python", f"{ROOT}/benchmarks/collectives.py"]), "train.py", ""),
    ],
)
def test_an_edit_is_found_or_unchecked(folder: Path, text: str, edited: str, expected: str) -> None:
    def second_call(*watched: str) -> str:
        (folder / edited).write_text("")
        command = Command("a", text, {}, folder / f"out{len(watched)}" / "a", None, watched)
        with open_plan(command.folder.parent, [command], {}):
            assert not list(command.folder.iterdir())
        (folder / edited).write_text("edited")
        try:
            with open_plan(command.folder.parent, [command], {}):
                return command.unchecked
        except ValueError as error:
            return str(error)

    assert expected in second_call()
    if "changed" not in expected:
        assert second_call() == expected
        assert f"{edited} has changed" in second_call(edited)


def test_watched_folders(folder: Path) -> None:
    (folder / "app" / ".hidden").touch()
    watched = plan.watched_files(["app", "config.yaml"])
    assert list(watched) == [*APP, "app/inner/__main__.py", "config.yaml"]
    told = "--watch: expected a file or a folder, but there is no a"
    assert told in refused(plan.watched_files, ["a"])


def test_variables_that_count() -> None:
    """Only whole names are ignored: prefixes may be a user's. Entries of PATH count once."""
    environ = dict.fromkeys(["SSH_TTY", "TERM", "SLURM_JOB_ID", "TMPDIR", "_"], "x")
    assert plan.lines_of_variables(environ) == []
    users = ["BUILD_TYPE", "CI_X", "SSH_X", "LESSX", "X_TMPDIR", "RUNNER_X", "SLURM_X"]
    environ |= dict.fromkeys(users, "1") | {"A_PORT": "tcp://10.0.0.1:80"}
    environ |= {"PATH": "/b:/a:/b", "PYTHON_F": "() {\n}", "MY_OTP": "hunter2"}
    lines = plan.lines_of_variables(environ)
    names = [line.removeprefix("inherited variable ").partition("=")[0] for line in lines]
    assert names == sorted([*users, "A_PORT", "MY_OTP", "PATH", "PYTHON_F"])
    assert "inherited variable PATH=/b:/a" in lines
    assert "inherited variable PYTHON_F='() {\\n}'" in lines
    # a value that no measurement depends on may be a secret: a change is seen, but not the value
    (secret,) = (line for line in lines if "MY_OTP" in line)
    assert re.fullmatch(r"inherited variable MY_OTP=\(set, [0-9a-f]{3}\)", secret)
    others = plan.lines_of_variables(environ | {"MY_OTP": "hunter3"})
    assert plan.why_different(lines, others) == "MY_OTP has changed"


def test_differences_between_a_call_and_a_plan() -> None:
    begin = ["runs: 6", "command a: x", "command b: y"]
    mine = ["file of a: 11 x.py", "file of b: 22 x.py", "inherited variable F=1"]
    assert plan.why_different([*begin, *mine], [*begin, *mine]) == ""
    assert plan.why_different([*begin, *mine], [*begin, *mine, "file of a: 33 made.txt"]) == ""
    told = "its plan does not contain runs: 8"
    assert plan.why_different([*begin, *mine], ["runs: 8", *begin[1:], *mine]) == told
    told = "the earlier call had more commands"
    assert plan.why_different([*begin, *mine], [*begin[:2], *mine]) == told
    edited = ["file of a: 12 x.py", "file of b: 22 x.py", "inherited variable G="]
    told = "x.py has changed, F was 1, is unset now, G was unset, is  now"
    assert plan.why_different([*begin, *mine], [*begin, *edited]) == told
    assert plan.why_different([*begin, *mine], [*begin, *mine[1:]]) == "x.py no longer exists"


def test_size_and_time_of_a_large_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "config.yaml"
    path.write_text("1234")
    assert len(plan.state_of(path)) == 12
    monkeypatch.setattr(plan, "MAX_HASHED", 3)
    os.utime(path, ns=(5, 7))
    assert plan.state_of(path) == "4@7"
    assert plan.state_of(folder / "absent") == "gone"
