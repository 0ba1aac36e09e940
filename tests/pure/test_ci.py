""".ci/run: whose machine it changes."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.process import ROOT

TOOLS = {  # what .ci/run asks before it makes anything
    "dpkg": "exit 1",  # nothing is installed
    "id": "echo 1000",
    "sudo": 'shift; exec "$@"',  # without -n
    "apt-get": 'echo "$@" >>"$LOG"; exit 7',  # the end of .ci/run
}


@pytest.mark.parametrize(("ci", "installs"), [("true", True), ("", False), ("false", False)])
def test_packages_are_installed_in_ci_alone(ci: str, installs: bool, tmp_path: Path) -> None:
    for name, text in TOOLS.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    log = tmp_path / "log"
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "LOG": str(log), "CI": ci}
    command = [str(ROOT / ".ci" / "run")]
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert run.returncode == (7 if installs else 1)
    assert log.exists() == installs
    packages = " ".join((ROOT / ".ci" / "packages.txt").read_text().split())
    line = f"missing: {packages}; install them, or let CI=true do it\n"
    assert run.stderr == ("" if installs else line)
