"""Does an all-reduce overlap with a matmul?

    exposed = step - matmul, in ms: the time of both together minus that of the matmul alone

    torchrun --nproc-per-node 2 benchmarks/x.py --sizes 64K,4M --json report.jsonl

BSD-3-Clause.
"""

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness import cli, exits

exits.report_missing_packages()

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from common.groups import Group
from common.stats import Times
from common.table import ends, metric
from common.timing import Workload
from harness.benchmark import Benchmark, Planned
from harness.report import Case


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = cli.Parser(__doc__)
    sizes = cli.list_of(cli.size)
    parser.add_argument("--sizes", type=sizes, default=[2**16], metavar="SIZE", help="(64K)")
    cli.add_common_flags(parser)
    return parser.parse_args(argv)


def build(device: torch.device, key: dict[str, Any], group: Group) -> Workload:
    if key["size_bytes"] < 4:
        raise ValueError(f"{key['size_bytes']} bytes are too few for a float32")
    x = torch.full([key["size_bytes"] // 4], float(dist.get_rank()), device=device)
    matrix = torch.ones(256, 256, device=device)

    def matmul() -> None:
        torch.mm(matrix, matrix)

    def both() -> None:  # in place: repeating MAX keeps the values, SUM would grow
        pending = dist.all_reduce(x, dist.ReduceOp.MAX, group=group.workload, async_op=True)
        matmul()
        pending.wait()

    def facts() -> list[float]:  # from new values, so that each all-reduce has to work
        x.fill_(dist.get_rank())
        both()
        return list(x.unique().tolist())

    return Workload(both, {"matmul": matmul}, compared=["matmul"], facts=facts)


def derive(case: Case, times: Times, facts: list[Any]) -> None:
    case.metrics["step_s"] = times.mean()
    case.metrics["matmul_s"] = times.mean("matmul")
    case.metrics["exposed_s"] = times.excess_over("matmul")
    if any(values != [case.ranks[-1]] for values in facts):
        case.check = f"failed: expected {case.ranks[-1]} on all ranks, got {facts}"


def answer(cases: list[Case]) -> str:  # a list, no ranking: cases are timed one after the other
    times = [(case.name, case.metrics["step_s"], case.metrics["exposed_s"]) for case in cases]
    shown = [f"{exposed.part_of(step.value)} at {size} bytes" for size, step, exposed in times]
    return f"exposed: {', '.join(shown)}"


COLUMNS = {
    "size": lambda case: case.name,
    "exposed\n(ms)": metric("exposed_s", 1e3),
    "95% ci\n(ms)": ends("exposed_s", 1e3),
    "step\ngmean (ms)": metric("step_s", 1e3),  # exposed = step - matmul, so print both
    "matmul\ngmean (ms)": metric("matmul_s", 1e3),
}


def main() -> int:
    args = parse_args()
    with Benchmark("x", args) as bench:
        title, ranks = "all-reduce overlapping with a matmul", bench.job.world_size
        cases = [Planned(cli.show_size(n), ranks, {"size_bytes": n}) for n in args.sizes]
        bench.announce({title: cases})
        bench.run(title, cases, COLUMNS, partial(build, bench.job.device), derive, answer)
    return bench.status


if __name__ == "__main__":
    sys.exit(record(main)())
