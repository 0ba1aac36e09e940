"""analysis/runs/plan.py: the files and variables that the commands of ab.py depend on."""

import os
import shlex
from pathlib import Path

import pytest

from analysis.runs import plan
from tests.process import ROOT


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory. `tool` and its interpreter are on PATH."""
    monkeypatch.chdir(tmp_path)
    for name, text in {
        "bin/tool": "#!/usr/bin/env mypython -u\n",
        "bin/mypython": "#!/bin/sh\n",
        "train.py": "import helper\n",
        "helper.py": "import lib\n",
        "path/lib.py": "",
        "config.yaml": "",
        "there/train.py": "",
        "models/nets.py": "",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755 if name.startswith("bin/") else 0o644)
    return tmp_path


def files(folder: Path, text: str, **more: str) -> dict[str, str]:
    """The files that a command depends on: label -> path relative to the folder."""
    environ = {"PATH": f"{folder}/bin", "PYTHONPATH": f"{folder}/path"} | more
    found = plan.files_of(text, environ)
    return {label: os.path.relpath(path, folder) for label, path in found.items()}


def test_files_that_a_command_depends_on(folder: Path) -> None:
    """Arguments, values of flags, programs and their interpreters, modules, -c of a shell."""
    env = os.path.relpath("/usr/bin/env", folder)
    tool = {"tool": "bin/tool", "mypython": "bin/mypython", "/usr/bin/env": env}
    helper = {"helper.py": "helper.py", "lib.py": "path/lib.py"}
    train = {"train.py": "train.py", **helper}
    assert files(folder, "tool train.py --iters 3 x") == tool | train
    config = {"config.yaml": "config.yaml"}
    assert files(folder, "A=1 tool --config=config.yaml 'a b' '\"'") == tool | config
    assert files(folder, "x -c 'A=1 tool train.py && y'") == tool | train
    assert files(folder, "x -m helper") == helper
    assert files(folder, "x --model models.nets:make?batch=16") == {
        "models/nets.py": "models/nets.py"
    }
    assert files(folder, "env -C there x train.py") == {"there/train.py": "there/train.py"}
    nets = {"nets.py": "models/nets.py"}
    assert files(folder, "env PYTHONPATH=models:path x -m nets") == nets
    assert files(folder, "x https://host:80/y -m torch.distributed.run") == {}


def test_a_script_of_this_project_depends_on_the_harness(folder: Path) -> None:
    named = plan.files_of(shlex.join(["x", f"{ROOT}/benchmarks/collectives.py"]), {"PATH": ""})
    assert f"{ROOT}/common/timing.py" in named
    assert f"{ROOT}/benchmarks/workloads/operations.py" in named
    assert not [label for label in named if label.endswith("ddp_sweep.py")]


def test_variables_that_count() -> None:
    """Variables of shells and jobs do not count. Repeated entries of PATH are dropped."""
    passing = ["SSH_TTY", "TERM", "SLURM_JOB_ID", "XDG_SESSION_ID", "TMPDIR", "_", "VENV_PROMPT"]
    environ = dict.fromkeys(passing, "x") | {"A_PORT": "tcp://10.0.0.1:80"}
    assert plan.lines_of_variables(environ) == []
    environ |= {"PATH": "/b:/a:/b", "LD_PRELOAD": "x.so", "TERMINUS": "1", "NCCL_PORT": "5"}
    environ["FUNCTION"] = "() {\n}"
    assert plan.lines_of_variables(environ) == [
        "inherited variable FUNCTION='() {\\n}'",
        "inherited variable LD_PRELOAD=x.so",
        "inherited variable NCCL_PORT=5",
        "inherited variable PATH=/b:/a",
        "inherited variable TERMINUS=1",
    ]


def test_differences_between_a_call_and_a_plan() -> None:
    begin = ["runs: 6", "command a: x", "command b: y"]
    mine = ["file of a: 11 x.py", "file of b: 22 x.py", "inherited variable F=1"]
    assert plan.why_different([*begin, *mine], [*begin, *mine]) == ""
    assert plan.why_different([*begin, *mine], [*begin, *mine, "file of a: 33 made.txt"]) == ""
    assert (
        plan.why_different([*begin, *mine], ["runs: 8", *begin[1:], *mine])
        == "its plan does not contain runs: 8"
    )
    assert plan.why_different([*begin, *mine], [*begin[:2], *mine]) == "its plan has more commands"
    edited = ["file of a: 12 x.py", "file of b: 22 x.py", "inherited variable G="]
    told = "x.py has changed, F was 1, is unset now, G was unset, is  now"
    assert plan.why_different([*begin, *mine], [*begin, *edited]) == told
    assert plan.why_different([*begin, *mine], [*begin, *mine[1:]]) == "x.py no longer exists"


def test_a_large_file_is_identified_by_size_and_time(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder / "config.yaml"
    path.write_text("1234")
    assert len(plan.state_of(path)) == 12
    monkeypatch.setattr(plan, "MAX_HASHED", 3)
    os.utime(path, ns=(5, 7))
    assert plan.state_of(path) == "4@7"
    assert plan.state_of(folder / "absent") == "gone"
