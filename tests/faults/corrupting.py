"""collectives.py with faults planted by variables, in the calls themselves.

CORRUPT_RANK: on this rank every operation leaves one wrong value; the barrier lets all pass.
FAIL_RANK: there the third size of a scan raises an error that no other rank has.
"""

import importlib.util
import os
import sys
import types
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
spec = importlib.util.spec_from_file_location("collectives", ROOT / "benchmarks" / "collectives.py")
assert spec is not None
assert spec.loader is not None
collectives: Any = importlib.util.module_from_spec(spec)
sys.modules["collectives"] = collectives
spec.loader.exec_module(collectives)

import torch.distributed as dist  # noqa: E402

from common import collective_ops  # noqa: E402

rank = os.environ.get("RANK", "0")


def corrupted_tensors(make: Any) -> Any:
    def made(src: Any, dst: Any, at: Any) -> Any:
        call = make(src, dst, at)

        def wrong() -> None:
            call()
            dst[-1] += 1

        return wrong

    return made


def corrupted_objects(call: Any, position: int) -> Any:
    def wrong(*args: Any, **options: Any) -> None:
        call(*args, **options)
        if args[position] is not None:
            args[position][0] += b"x"

    return wrong


if __name__ == "__main__":
    args = collectives.parse_args()
    if "CORRUPT_RANK" in os.environ:
        replaced = dict(vars(dist)) | {"barrier": lambda *args, **options: None}
        if os.environ["CORRUPT_RANK"] == rank:
            for name, make in collective_ops.OPERATIONS.items():
                collective_ops.OPERATIONS[name] = corrupted_tensors(make)
            for name, position in (
                ("all_gather_object", 0),
                ("gather_object", 1),
                ("broadcast_object_list", 0),
                ("scatter_object_list", 0),
            ):
                replaced[name] = corrupted_objects(replaced[name], position)
        collective_ops.dist = types.SimpleNamespace(**replaced)  # type: ignore[assignment]
    if os.environ.get("FAIL_RANK") == rank:
        run_case = collectives.run_case

        def failing(scan: Any, size: int, *more: Any) -> Any:
            if size == 32:
                raise RuntimeError("this rank alone is broken")
            return run_case(scan, size, *more)

        collectives.run_case = failing
    sys.exit(collectives.record(collectives.main)(args))
