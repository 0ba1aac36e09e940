""".ci/run installs packages only in CI."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.process import ROOT

TOOLS = {  # what .ci/run calls before it creates anything; no package is installed here
    "dpkg": "exit 1",
    "id": "echo 1000",
    "sudo": 'echo "$@"; exit 7',  # the end of .ci/run
}


@pytest.mark.parametrize(("ci", "status"), [("true", 7), ("", 1)])
def test_packages_are_installed_only_in_ci(ci: str, status: int, tmp_path: Path) -> None:
    for name, text in TOOLS.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CI": ci}
    command = [str(ROOT / ".ci" / "run")]
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500)
    assert run.returncode == status
    packages = " ".join((ROOT / ".ci" / "packages.txt").read_text().split())
    line = f"missing: {packages}; install them, or let CI=true do it\n"
    assert run.stderr == ("" if status == 7 else line)
