"""p2p_matrix.py as rank 137 of 512 over torch's fake backend, which sends nothing; PATH: a report.

The schedule, the memory and the report must stay small. Run by test_p2p_matrix.py.
"""

import json
import sys
import tracemalloc
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from harness import load_script  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

from common import link_report, links  # noqa: E402
from common.dist import CaseGroup  # noqa: E402
from common.results import Report  # noqa: E402

p2p: Any = load_script("p2p_matrix")
RANKS = 512
ME = 137


def simulate(path: str) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=ME, world_size=RANKS)
    group_of_all: Any = dist.group.WORLD
    times = {"latency": [12.3456e-6], "a -> b": [1.23456e-3], "b -> a": [2.3456e-3]}
    fact = {"peer": 0, "times": times | {"both": [3.456e-3]}, "wrong": 0}
    args = p2p.parse_args(
        ["--size", "4K", "-n", "2", "-w", "1", "--blocks", "1", "--device", "cpu"]
    )
    members = [(rank,) for rank in range(RANKS)]
    schedule = links.rounds(RANKS)
    group = CaseGroup(tuple(range(RANKS)), group_of_all, group_of_all, group_of_all)
    report = Report(path, "p2p_matrix", {}, lambda cases: {})
    tracemalloc.start()
    met = []
    for i, pairs in enumerate(schedule):
        mine = p2p.run_round(
            pairs, members, args, torch.device("cpu"), group, lambda phase: None
        ).facts
        met.append(mine["peer"])
        if i % 64 == 0:  # the others, as rank 0 would have them gathered
            facts = [fact] * RANKS
            ranks, samples, metrics, _ = p2p.derive(pairs, members, args, facts)
            assert samples is None
            assert len(metrics["links"]) == RANKS // 2
            case = {"key": {"round": i}, "ranks": ranks, "samples_s": [], "stop": {}}
            report.add(case | {"metrics": metrics, "check": "passed"})
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert sorted(met) == [rank for rank in range(RANKS) if rank != ME]
    assert peak < 20 * 2**20
    assert len(json.dumps(mine)) < 500  # what a rank sends for a round
    written = Path(path).stat().st_size / len(report.cases)
    assert written * len(schedule) < 8 * 2**20  # 130,816 links
    every = [(a, b, 10.0 + a, 5.0, 5.0, 8.0) for pairs in schedule for a, b in pairs]
    text = link_report.tables(every, [rank // 8 for rank in range(RANKS)], args)
    assert len(text.splitlines()) < 3 * (20 + 64 + 8)
    dist.destroy_process_group()
    print(f"{len(schedule)} rounds simulated")


if __name__ == "__main__":
    simulate(sys.argv[1])
