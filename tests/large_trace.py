"""A large trace like that of a GPU: kernels, their launches, operators on the host."""

from collections.abc import Iterator
from typing import Any

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
