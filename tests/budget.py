"""How long does each script take beyond its budget? Runs each one by default on this machine.

    python tests/budget.py                          all scripts, about 8 minutes on 2 cores
    python tests/budget.py collectives rpc_latency  these

    budget   --max-seconds of all cases; --budget of node_check.py
    start    seconds until the third line of output: torchrun, imports, joining
    cases    seconds from then to the last line of output
    end      seconds from then until torchrun has ended
    ratio    cases / budget

The exit status is 1 if a ratio is above 1.5.
"""

import contextlib
import importlib
import io
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.report import Case, load

ROOT = Path(__file__).resolve().parents[1]
# The ranks of each script, and the flags that it cannot do without.
RUNS = {
    "batch_update_ps": "3",
    "calibrate": "2",
    "checkpoint_sweep": "2",
    "collectives": "2",
    "compile_sweep": "2",
    "ddp_rpc": "4",
    "ddp_sweep": "2",
    "input_sweep": "2",
    "node_check": "2",
    "p2p_matrix": "2",
    "parallel_sweep": "4",
    "parameter_server": "4 --nserver 1",
    "replay": "2 tests/recording",
    "rpc_latency": "2",
}
MOST = 1.5


@dataclass
class Seconds:
    """What a run took."""

    start: float
    cases: float
    end: float


def run(command: list[str]) -> Seconds:
    """Raises CalledProcessError if the run fails."""
    began = time.perf_counter()
    lines_at = list[float]()
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        for _ in process.stdout:
            lines_at.append(time.perf_counter())
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    first, last = lines_at[min(2, len(lines_at) - 1)], lines_at[-1]
    return Seconds(first - began, last - first, time.perf_counter() - last)


def budget_of(script: str, flags: list[str], cases: list[Case]) -> float:
    """In seconds. A case of calibrate.py has its own, in its key."""
    sys.argv = [script, *flags]
    with contextlib.redirect_stdout(io.TextIOWrapper(io.BytesIO())):  # it prints the first lines
        args = importlib.import_module(f"benchmarks.{script}").parse_args()
    if script == "node_check":
        return float(args.budget)
    return sum(float(case.key.get("seconds") or args.max_seconds) for case in cases)


def show(script: str, ranks: str, flags: list[str], seconds: Seconds, cases: list[Case]) -> bool:
    """Print the row. Returns whether the run has kept to its budget."""
    timed = [case for case in cases if case.samples_s]
    budget = budget_of(script, flags, timed)
    ratio = seconds.cases / budget
    name = " ".join([f"{script}.py", *flags])
    columns = (budget, seconds.start, seconds.cases, seconds.end)
    numbers = "  ".join(f"{number:6.1f}" for number in columns)
    print(f"{name:31}  {ranks:>5}  {len(timed):5}  {numbers}  {ratio:5.2f}", flush=True)
    return ratio <= MOST


def main() -> int:
    kept = True
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print(f"{'default run':31}  ranks  cases  budget   start   cases     end  ratio")
    for script in sys.argv[1:] or RUNS:
        ranks, *flags = RUNS[script].split()
        with tempfile.TemporaryDirectory() as folder:
            report = str(Path(folder) / "report.jsonl")
            launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
            words = [f"benchmarks/{script}.py", *flags, "--json", report]
            seconds = run([sys.executable, *launch, *words])
            kept &= show(script, ranks, flags, seconds, load(report).cases)
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
