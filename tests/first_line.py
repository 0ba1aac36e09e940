"""How early does a script say something? The time to its first line over that of a bare script.

    python tests/first_line.py                        ddp_sweep and collectives, 5 pairs of runs
    python tests/first_line.py ddp_sweep --runs 9     this one

The bare script imports torch, makes a gloo group of all ranks, and prints a line. torchrun starts
both with 2 ranks, in turns, and each is the first in every other pair. The script has --dry-run, so
that it ends soon. A ratio is that of a pair.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BARE = """
import torch.distributed as dist
dist.init_process_group("gloo")
if dist.get_rank() == 0:
    print("first line", flush=True)
dist.destroy_process_group()
"""


def seconds_to_first_line(*words: str) -> float:
    """From the start of torchrun. Raises CalledProcessError if the run fails."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, "--nproc-per-node", "2", *words]
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        process.stdout.readline()
        first_line_s = time.perf_counter() - start
        process.communicate()
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return first_line_s


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("scripts", nargs="*", default=["ddp_sweep", "collectives"])
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
        file.write(BARE)
        file.flush()
        for script in args.scripts:
            words = [str(ROOT / "benchmarks" / f"{script}.py"), "--device", "cpu", "--dry-run"]
            bare_s, script_s = [], []
            for number in range(args.runs):
                if number % 2 == 0:
                    bare_s.append(seconds_to_first_line(file.name))
                script_s.append(seconds_to_first_line(*words))
                if number % 2 == 1:
                    bare_s.append(seconds_to_first_line(file.name))
            ratios = [ours / bare for ours, bare in zip(script_s, bare_s, strict=True)]
            print(
                f"{script}: {statistics.median(script_s):.2f} s, bare "
                f"{statistics.median(bare_s):.2f} s, ratio {statistics.median(ratios):.2f} "
                f"({min(ratios):.2f} to {max(ratios):.2f})",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
