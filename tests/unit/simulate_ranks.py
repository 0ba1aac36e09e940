"""What a job of thousands of ranks costs rank 0: time, memory, bytes and calls to the store.

    python tests/unit/simulate_ranks.py 1024 16384

This process is rank 0 of such a world over torch's fake backend, which sends nothing; what the
other ranks would have sent is made up. The planning, gathering, tables and report are the real
ones. Memory is the peak of what Python and numpy allocate within a step, from a second run, since
tracing it takes time; bytes are what the step prints, writes, receives or moves through the store.
With --json PATH the figures go there: a test compares two worlds.
"""

import argparse
import contextlib
import gc
import io
import json
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from harness import load_script  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

from common import dist as common_dist  # noqa: E402
from common import environment, links, preflight, sweep  # noqa: E402
from common.collective_case import derive as derive_collective  # noqa: E402
from common.collective_case import scans  # noqa: E402
from common.dist import CaseGroup, RankContext, gather_json  # noqa: E402
from common.hang import publish_verdict, read_verdict  # noqa: E402
from common.partition import partition  # noqa: E402
from common.results import Report  # noqa: E402
from common.sweep import Sweep  # noqa: E402
from common.table import Progress, render  # noqa: E402
from common.timing import Measurement  # noqa: E402

ddp: Any = load_script("ddp_sweep")
coll: Any = load_script("collectives")
p2p: Any = load_script("p2p_matrix")
NODE = 8
ITERS = 20
Row = dict[str, Any]


class CountingStore:
    """As much of a store as is used here, in a dict; counts calls and the bytes that move."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.calls = self.bytes = 0

    def _count(self, moved: int) -> None:
        self.calls += 1
        self.bytes += moved

    def set(self, key: str, value: str) -> None:
        self._count(len(value))
        self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        self._count(len(self.values[key]))
        return self.values[key]

    def add(self, key: str, amount: int) -> int:
        self._count(8)
        self.values[key] = str(int(self.values.get(key, b"0")) + amount).encode()
        return int(self.values[key])

    def check(self, keys: list[str]) -> bool:
        self._count(0)
        return all(key in self.values for key in keys)

    def wait(self, keys: list[str], timeout: Any = None) -> None:
        self._count(0)
        if not all(key in self.values for key in keys):
            raise RuntimeError(f"nobody has set {keys}")


@contextlib.contextmanager
def others_send(value: Callable[[int], Any], ranks: int) -> Iterator[list[int]]:
    """Within it gather_json receives `value(rank)` from every other rank; yields [bytes]."""
    texts = [json.dumps(value(rank)).encode() for rank in range(1, ranks)]
    longest = max(map(len, texts))
    before = dist.all_reduce, common_dist.gather_rows

    def all_reduce(tensor: torch.Tensor, op: Any = None) -> None:
        tensor.fill_(longest)

    def gather_rows(own: torch.Tensor, group: Any = None) -> torch.Tensor:
        rows = np.zeros((ranks, longest), dtype=np.uint8)
        for row, text in zip(rows[1:], texts, strict=True):
            row[: len(text)] = np.frombuffer(text, dtype=np.uint8)
        return torch.from_numpy(rows)

    dist.all_reduce, common_dist.gather_rows = all_reduce, gather_rows  # type: ignore[assignment]
    try:
        yield [longest * ranks]
    finally:
        dist.all_reduce, common_dist.gather_rows = before


class Meter:
    """Takes the time of steps, or their memory."""

    def __init__(self, ranks: int, memory: bool) -> None:
        self.ranks = ranks
        self.memory = memory
        self.rows: list[Row] = []

    def step(self, name: str, work: Callable[[], tuple[Any, int] | tuple[Any, int, int]]) -> Any:
        """work: returns (result, bytes) or (result, bytes, calls to the store)."""
        if self.memory:
            tracemalloc.start()
        start = time.perf_counter()
        result, size, *calls = work()
        seconds = time.perf_counter() - start
        row: Row = {"step": name, "ranks": self.ranks, "bytes": size}
        row["calls"] = calls[0] if calls else None
        if self.memory:
            row["memory_bytes"] = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        else:
            row["seconds"] = seconds
        self.rows.append(row)
        return result


def simulate(ranks: int, folder: Path, memory: bool) -> list[Row]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    meter = Meter(ranks, memory)
    cpu = torch.device("cpu")
    ctx = RankContext(0, 0, ranks, NODE, ranks // NODE, cpu, "gloo", FakeStore(), "0.0")
    meet(meter)
    found = collect(meter, ctx)
    ddp_sweep(meter, ctx, found, folder)
    collectives(meter, ctx, found, folder)
    p2p_matrix(meter, folder)
    hang(meter)
    dist.destroy_process_group()
    return meter.rows


def meet(meter: Meter) -> None:
    """Every rank's arrival, rank 0's verdict, and every rank's look at it."""
    node = {"host": "node-0001", "ranks": NODE, "address": "10.0.0.1", "torch": "2.15.0"}
    node |= {"nccl": "2.30.1", "interface": "eth0", "commit": "0" * 8, "sources": "0" * 8}

    def work() -> tuple[None, int, int]:
        store: Any = CountingStore()
        for rank in range(1, meter.ranks):
            row = node | {"first": rank} if rank % NODE == 0 else None
            preflight.arrive(store, row, rank, meter.ranks)
        for rank in range(meter.ranks):
            if rank == 0:
                store.values["count"] = str(meter.ranks - 1).encode()
                verdict = preflight.meet(store, node | {"first": 0}, 0, meter.ranks, 1.0)
                assert {verdict["problem"], verdict["difference"]} == {None}
            else:
                store.wait(["verdict"])
                store.get("verdict")
        return None, store.bytes, store.calls

    meter.step("preflight: all ranks meet", work)


def collect(meter: Meter, ctx: RankContext) -> dict[str, Any]:
    """The environment, from rows such as 8-GPU nodes send, and the preamble."""
    own = environment._this_rank(ctx)
    topology = "\n".join(f"GPU{i}\t" + "NV18\t" * 8 + "0-47,96-143\t0" for i in range(8))

    def row(rank: int) -> Row:
        place = {"rank": rank, "local_rank": rank % NODE, "host": f"node-{rank // NODE:04}"}
        gpu = {"device": "NVIDIA H200", "uuid": f"{rank:032x}"}
        return own | place | gpu | {"topology": topology if rank % NODE == 0 else None}

    with others_send(row, meter.ranks) as received:

        def work() -> tuple[Any, int]:
            found = environment.collect(ctx)
            assert found is not None
            assert len(found["hosts"]) == meter.ranks // NODE
            return found, received[0]

        found: dict[str, Any] = meter.step("environment: gather", work)
    meter.step(
        "environment: preamble",
        lambda: (None, len(environment.preamble("ddp_sweep", found, "nccl"))),
    )
    meter.step("environment: in the report", lambda: (None, len(json.dumps(found))))
    return found


def run_of(name: str, args: Any, ctx: RankContext, found: Any, path: Path) -> Sweep:
    """A Sweep on rank 0 whose job is there already."""
    args.json = str(path)
    before, sweep.init = sweep.init, lambda *_: ctx
    try:
        made = Sweep(name, args, ctx.device, ctx.backend)
    finally:
        sweep.init = before
    made.report = Report(str(path), name, found, made._extras)
    made._progress = Progress(False)
    return made


def ddp_sweep(meter: Meter, ctx: RankContext, found: Any, folder: Path) -> None:
    ranks = meter.ranks
    args = ddp.parse_args(["--model", "resnet50", "--batch-size", "32", "--image-size", "224"])
    run = run_of("ddp_sweep", args, ctx, found, folder / "ddp.json")

    def plan() -> tuple[Any, int]:
        configs = ddp.plan(args, ranks, NODE)
        keys = [ddp.case_key(config, args, ctx) for config in configs]
        assert not any(run.find(key) for key in keys)
        return configs, len(json.dumps(keys))

    config = meter.step("ddp_sweep: plan", plan)[-1]
    assert config.world_size == ranks
    fact = {"first_iteration_s": 0.123456, "memory_gib": 12.3456, "parameters": "0" * 32}
    with others_send(lambda rank: [None, fact], ranks) as received:
        rows = meter.step("ddp_sweep: gather", lambda: (gather_json([None, fact]), received[0]))
    samples = 0.1 + np.random.default_rng(0).random((ranks, ITERS)) / 100
    names = ("step", "local compute", "communication")
    stop = {"rule": "iters", "iterations": ITERS, "ci95_rel": 0.01}
    measured = Measurement(dict.fromkeys(names, samples), {}, [2] * (ITERS // 2), {}, stop)

    def keep() -> tuple[Any, int]:
        metrics, check = ddp.derive(config, args, run, measured, [row[1] for row in rows])
        key = ddp.case_key(config, args, ctx)
        case = run.keep(key, "label", tuple(range(ranks)), measured, metrics, check)
        assert check == "passed"
        return case, (folder / "ddp.json").stat().st_size

    case = meter.step("ddp_sweep: a case into the report", keep)
    columns = ddp.why_columns(args, "max_reserved")
    meter.step("ddp_sweep: table", lambda: (None, len(render(columns, [case]))))


def collectives(meter: Meter, ctx: RankContext, found: Any, folder: Path) -> None:
    """One size on groups of a node each, all at once: a case a node."""
    ranks = meter.ranks
    args = coll.parse_args(["-b", "1M", "-e", "1M", "--groups", "node", "--timeout", "60"])
    args.sizes = [2**20]
    run = run_of("collectives", args, ctx, found, folder / "collectives.json")
    scan = scans(args)[0]

    def plan() -> tuple[Any, int]:
        groups = partition("node", [row["node"] for row in found["ranks"]])
        keys = [coll.keys_of(scan, args.sizes, group, args, run)[0] for group in groups]
        assert not any(run.find(key) for key in keys)
        return (groups, keys), len(json.dumps(keys))

    groups, keys = meter.step("collectives: plan, a group a node", plan)
    times = [[0.00123456789] * 4] * 12
    times_of = dict.fromkeys(scan.variants, times)
    fact = {"times": times_of, "stop": "blocks", "skew": {}, "wrong": dict.fromkeys(times_of, 0)}
    with others_send(lambda rank: [None, fact], ranks) as received:
        rows = meter.step("collectives: gather", lambda: (gather_json([None, fact]), received[0]))

    def keep() -> tuple[None, int]:
        for i, (key, (_, members)) in enumerate(zip(keys, groups, strict=True)):
            mine = [rows[rank][1] for rank in members]
            save = i == len(keys) - 1
            run.keep(key, "label", members, *derive_collective(key, args, members, mine), save)
        return None, (folder / "collectives.json").stat().st_size

    meter.step("collectives: a size into the report", keep)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        meter.step("collectives: footer", lambda: (coll.print_footer(keys, run), 0))
    meter.rows[-1]["bytes"] = len(printed.getvalue())


def p2p_matrix(meter: Meter, folder: Path) -> None:
    """One round of the tournament: this rank's part of it, and what rank 0 makes of all."""
    ranks = meter.ranks
    args = p2p.parse_args(
        ["--size", "4K", "-n", "2", "-w", "1", "--blocks", "1", "--device", "cpu"]
    )
    members = [(rank,) for rank in range(ranks)]
    everyone: Any = dist.group.WORLD
    group = CaseGroup(tuple(range(ranks)), everyone, everyone, everyone)
    numbers = range(0, links.round_count(ranks), max(1, ranks // 8))

    def plan() -> tuple[Any, int]:
        pairs = links.pairs_of(ranks, 3)
        return pairs, len(pairs)

    pairs = meter.step("p2p_matrix: plan a round", plan)

    def part() -> tuple[None, int]:
        met = set()
        for number in numbers:
            outcome = p2p.run_round(
                links.pairs_of(ranks, number), members, args, torch.device("cpu"), group, print_none
            )
            met.add(outcome.facts["peer"])
            gc.collect()  # not the memory of two rounds, whenever that is done by itself
        assert len(met) == len(numbers)
        sent = len(json.dumps(outcome.facts))
        assert sent < 500
        return None, sent

    meter.step("p2p_matrix: 8 rounds on a rank", part)
    times = {"latency": [12.3456e-6], "a -> b": [1.23456e-3], "b -> a": [2.3456e-3]}
    facts = [{"peer": 0, "times": times | {"both": [3.456e-3]}, "wrong": 0}] * ranks
    path = folder / "p2p.json"
    report = Report(str(path), "p2p_matrix", {}, lambda cases: {})

    def keep() -> tuple[None, int]:
        met, samples, metrics, check = p2p.derive(pairs, members, args, facts)
        assert samples is None
        assert len(metrics["links"]) == ranks // 2
        case = {"key": {"round": 3}, "ranks": met, "samples_s": [], "stop": {}}
        report.add(case | {"metrics": metrics, "check": check})
        return None, path.stat().st_size

    meter.step("p2p_matrix: a round into the report", keep)


def print_none(text: str) -> None:
    pass


def hang(meter: Meter) -> None:
    """The roll call after a hang: rank 5 is stopped, rank 9 did not arrive."""
    phase = {"case": "resnet50 fp32 128M/8G 25MB none", "phase": "step, block 7"}

    def work() -> tuple[None, int, int]:
        store: Any = CountingStore()
        for rank in range(meter.ranks):
            order = [3, 0, 7 if rank == 9 else 8]
            who = {"rank": rank, "host": f"node-{rank // NODE:04}", "pid": 1, "started": "1"}
            store.set(f"phase/{rank}", json.dumps(who | phase | {"order": order}))
            if rank != 5:
                store.set(f"answer/{rank}", "here")
        publish_verdict(store, meter.ranks, 300)
        seen = [read_verdict(store, rank) for rank in range(meter.ranks) if rank != 5]
        assert [speaks for _, speaks, _ in seen].count(True) == 1
        assert [silent for _, _, silent in seen if silent] == [[[1, "1"]]]
        assert "rank 9 on node-0001 did not arrive" in seen[0][0]
        return None, store.bytes, store.calls

    meter.step("hang: roll call of all ranks", work)


def show(rows: list[Row]) -> str:
    """A row a step; for each world its time, memory, bytes and calls."""
    steps: dict[str, Row] = {}
    for row in rows:
        at = f"{row['ranks']:,}"
        cells = {
            f"{at}\nms": f"{row['seconds'] * 1e3:,.1f}",
            f"{at}\nMiB": f"{row['memory_bytes'] / 2**20:,.2f}",
            f"{at}\nbytes": f"{row['bytes']:,}",
            f"{at}\ncalls": "-" if row["calls"] is None else f"{row['calls']:,}",
        }
        steps[row["step"]] = steps.get(row["step"], {"": row["step"]}) | cells
    first = next(iter(steps.values()))
    columns = {name: (lambda row, name=name: str(row[name])) for name in first}
    return render(columns, list(steps.values()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ranks", type=int, nargs="+", help=f"sizes of worlds, multiples of {NODE}")
    parser.add_argument("--json", metavar="PATH")
    options = parser.parse_args()
    found: list[Row] = []
    for size in options.ranks:
        with tempfile.TemporaryDirectory() as temporary:
            timed = simulate(size, Path(temporary), memory=False)
            traced = simulate(size, Path(temporary), memory=True)
        found += [one | other for one, other in zip(timed, traced, strict=True)]
    print(show(found))
    if options.json:
        Path(options.json).write_text(json.dumps(found))
