"""--help imports no slow package."""

import json
import subprocess
import sys

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
    command = [sys.executable, "-c", PROBE, *map(str, SCRIPTS)]
    env = environment(CUDA_VISIBLE_DEVICES="")
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500)
    found = {}
    for script, status, imported in map(json.loads, done.stdout.splitlines()):
        found[script] = status, [name for name in imported if name.startswith(SLOW)]
    assert found == {path.name: (0, []) for path in SCRIPTS}
