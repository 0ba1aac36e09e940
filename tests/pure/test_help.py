"""--help and an unknown flag import no slow package, and only rank 0 prints."""

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.process import ROOT, environment

SCRIPTS = sorted(ROOT.glob("benchmarks/[a-z]*.py"))
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
for script in sys.argv[1:]:
    for flag in ("--help", "--szie"):
        for rank in ("0", "1") if flag == "--help" else ("0",):
            sys.stdout.flush()
            if os.fork():
                os.wait()
                continue
            os.environ["RANK"] = rank
            sys.argv = [script, flag]
            sys.path[0] = os.path.dirname(script)
            out, result = os.dup(1), os.memfd_create("stdout")
            os.dup2(result, 1)
            status = None
            try:
                runpy.run_path(script, run_name="__main__")
            except SystemExit as end:
                status = end.code
            sys.stdout.flush()
            told = os.pread(result, 2**20, 0).decode()
            imported = sorted(set(sys.modules) - before)
            line = json.dumps([os.path.basename(script)[:-3], flag, rank, status, told, imported])
            os.write(out, line.encode() + b"\\n")
            os._exit(0)
"""


@pytest.fixture(scope="module")
def answers() -> dict[tuple[str, str, str], Any]:
    """By script, flag and rank: exit status, stdout, and modules imported besides torch."""
    command = [sys.executable, "-c", PROBE, *map(str, SCRIPTS)]
    env = environment(CUDA_VISIBLE_DEVICES="")
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    return {(script, flag, rank): rest for script, flag, rank, *rest in rows}


@pytest.mark.parametrize("script", [path.stem for path in SCRIPTS])
def test_nothing_slow_is_imported(script: str, answers: dict[tuple[str, str, str], Any]) -> None:
    """Only rank 0 prints the help and refuses the unknown flag."""
    status, out, imported = answers[script, "--help", "0"]
    assert status in (0, None)
    assert out.startswith(f"usage: {script}.py ")
    assert "\n  --device " in out or script == "traffic"
    assert answers[script, "--help", "1"][:2] == [status, ""]
    status, out, _ = answers[script, "--szie", "0"]
    assert (status, out) == (2, "")
    for flag in ("--help", "--szie"):
        imported = answers[script, flag, "0"][2]
        assert [name for name in imported if name.startswith(SLOW)] == []
