"""parameter_server with a fault planted into most of its cases, by their names.

LONG: none of them; instead the cases through a server take long, and rank 0 says when one is
being measured.
"""

import dataclasses
import functools
import importlib.util
import os
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
path = ROOT / "benchmarks" / "parameter_server.py"
spec = importlib.util.spec_from_file_location("parameter_server", path)
assert spec is not None
assert spec.loader is not None
script: Any = importlib.util.module_from_spec(spec)
sys.modules["parameter_server"] = script
spec.loader.exec_module(script)

import torch  # noqa: E402

from common.averaging_server import Bucket, Server  # noqa: E402

run_case, create_step, measure, digest = (
    getattr(script, name) for name in ("run_case", "create_step", "measure", "digest")
)


class Sums(Server):
    """Does not divide: it answers with the sum."""

    def _average(self, step: int, index: int, bucket: Bucket, last_s: float) -> None:
        bucket.kept = [functools.reduce(torch.add, bucket.kept) * self.trainers]
        super()._average(step, index, bucket, last_s)


class First(Server):
    """Answers each trainer with its own gradient, as a group of one."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.trainers = 1


class OutOfMemory(Server):
    """Fails in the middle of the run, in one trainer's call."""

    calls = 0

    def _finish(self) -> None:
        self.calls += 1
        if self.calls == 60:
            raise torch.OutOfMemoryError("no more memory")


class Stuck(Server):
    """Does not come back from one trainer's call in time."""

    def _average(self, step: int, index: int, bucket: Bucket, last_s: float) -> None:
        if step == 6:
            time.sleep(6)
        super()._average(step, index, bucket, last_s)


SERVERS = {
    "rpc running sharded": OutOfMemory,
    "rpc batch grouped": Sums,
    "rpc batch sharded": First,
    "sparse_rpc running sharded": Stuck,
}


def failing_step(*args: Any) -> Any:
    step, calls = create_step(*args), 0

    def counted() -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise ValueError("a trainer's own mistake")
        step()

    return counted


def faulty_case(config: Any, args: Any, layout: Any, devices: Any, sweep: Any, group: Any) -> Any:
    case, rank = str(config), sweep.ctx.rank
    script.Server = SERVERS.get(case, Server)
    failing = case in ("rpc running grouped", "hybrid") and rank == 1
    script.create_step = failing_step if failing else create_step
    differs = case == "sparse_rpc running grouped" and rank == 2
    script.digest = (lambda model: digest(model)[::-1]) if differs else digest
    return run_case(config, args, layout, devices, sweep, group)


def long_case(config: Any, args: Any, layout: Any, devices: Any, sweep: Any, group: Any) -> Any:
    def announced(steps: Any, group: Any, device: Any, rule: Any, progress: Any) -> Any:
        if config.server is None:
            rule = dataclasses.replace(rule, iters=6)
        elif sweep.ctx.rank == 0:
            print(f"measuring {config}", flush=True)
        return measure(steps, group, device, rule, progress)

    script.measure = announced
    return run_case(config, args, layout, devices, sweep, group)


if __name__ == "__main__":
    script.run_case = long_case if os.environ.get("LONG") else faulty_case
    sys.exit(script.record(script.main)(script.parse_args()))
