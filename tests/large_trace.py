#!/usr/bin/env python3
"""How much time and memory does analysis/trace.py need for a large trace?

    python tests/large_trace.py --steps 2000 --kernels 20
    python tests/large_trace.py --steps 2000 --kernels 20 --operators 50    # 90 MB

Writes a trace like that of a GPU (kernels, their launches, operators on the host), reads it with
analysis/trace.py, and prints wall-clock and CPU seconds and the peak of resident memory. Twice as
many steps should take twice as long.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
STEP_US = 10_000
DETAILS = {"External id": 1, "device": 0, "context": 1, "grid": [8, 1, 1], "block": [544, 1, 1]}


def events(steps: int, kernels: int, operators: int) -> Iterator[dict[str, Any]]:
    """Operators and kernels of each step. The last kernel is an all-reduce."""
    about = {"Collective name": "allreduce", "In msg nelems": 2**20, "Out msg nelems": 2**20}
    about |= {"Group size": 2, "dtype": "Float", "Process Group Name": "0"}
    about |= {"Process Group Description": "default_pg", "Process Group Ranks": "[0, 1]"}
    for step in range(steps):
        start = 1e9 + step * STEP_US
        host = {"ph": "X", "pid": 100, "tid": 100}
        name = f"ProfilerStep#{step}"
        yield host | {"cat": "user_annotation", "name": name, "ts": start, "dur": STEP_US - 10}
        for number in range(operators):
            args = {"External id": number, "Input Dims": [[64, 512], [512, 512]]}
            span = {"ts": start + number, "dur": 0.9}
            yield host | {"cat": "cpu_op", "name": "aten::addmm", **span, "args": args}
        for number in range(kernels):
            correlation = step * kernels + number
            span = {"ts": start + 5 + number * 1.5, "dur": 1}
            launch = {"cat": "cuda_runtime", "name": "cudaLaunchKernel"}
            yield host | launch | span | {"args": {"correlation": correlation}}
            last = number == kernels - 1
            length = (STEP_US - 1000) / kernels
            span = {"ts": start + 500 + number * length, "dur": length * 0.9}
            args = {**DETAILS, "correlation": correlation, **(about if last else {})}
            kernel = "ncclDevKernel_AllReduce_Sum_f32_RING_LL" if last else "sm90_xmma_gemm_f32f32"
            where = {"ph": "X", "cat": "kernel", "pid": 0, "tid": 20 if last else 7}
            yield where | {"name": kernel, **span, "args": args}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("steps", 2000), ("kernels", 20), ("operators", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rank0.json"
        with path.open("w") as file:
            file.write('{"distributedInfo": {"rank": 0, "world_size": 2}, "traceEvents": [\n')
            for number, event in enumerate(events(args.steps, args.kernels, args.operators)):
                file.write(",\n" * bool(number) + json.dumps(event))
            file.write("\n]}")
        size = path.stat().st_size
        begin = time.perf_counter()
        command = [sys.executable, str(ROOT / "analysis" / "trace.py"), str(path)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        seconds = time.perf_counter() - begin
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    what = f"{args.steps} steps of {args.kernels} kernels and {args.operators} operators"
    cpu, peak = used.ru_utime + used.ru_stime, used.ru_maxrss / 2**20
    print(f"{what}, {size / 1e6:.0f} MB: {seconds:.1f} s, {cpu:.1f} s of CPU, {peak:.2f} GiB")


if __name__ == "__main__":
    main()
