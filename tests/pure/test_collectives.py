"""The arithmetic of collectives.py, worked out by hand: no process group."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks import collectives
from common.groups import Group, Job
from common.report import Case, Estimate
from common.stats import Disturbed, Times

KEY = {"collective": "all_reduce", "size_bytes": 64_000_000, "group_ranks": 4, "cudagraph": 0}
ROW = {"count": 16_000_000, "dtype": "float32", "redop": "sum", "root": -1, "caches": "cold"}


def derived(
    case: Case, facts: Any, groups: list[list[int]], limit: float | None = None
) -> dict[str, Any]:
    args: Any = SimpleNamespace(limit=limit, check=1)
    collectives.derive(args, groups, case, Times(case.samples_s, []), facts)
    return case.metrics


def facts_of(*wrong: int) -> list[dict[str, Any]]:
    """Of each rank: so many wrong values in place."""
    return [{"start_up": {}, "in_place": count, "out_of_place": 0} for count in wrong]


def test_bandwidths() -> None:
    """64 MB among 4 ranks in 10 ms: 6.4 GB/s, and 1.5 times that on the bus."""
    rows = [[0.008, 0.010, 0.010], [0.010, 0.009, 0.012], [0.001] * 3, [0.002] * 3]
    samples = {"step": rows, "out_of_place": [[1.0]] * 4}
    case = Case(key=KEY | ROW, ranks=[0, 1, 2, 3], samples_s=samples, stop="max-seconds")
    m = derived(case, facts_of(0, 0, 0, 0), [[0, 1, 2, 3]], limit=12.0)
    assert m["in_place_time_s"] == Estimate(0.010)  # the slowest rank's: 10, 10, 12 ms
    assert m["in_place_algbw_gb_per_s"].value == pytest.approx(6.4)
    assert m["in_place_busbw_gb_per_s"].value == pytest.approx(9.6)
    assert m["efficiency"].value == pytest.approx(0.8)
    assert case.check == "passed"
    limit, short = "  80% of the limit", "  unsure: raise --max-seconds"
    # three samples have no interval
    assert collectives.ScanTable().row(case).endswith(f" 0      -{short}{limit}")
    m["out_of_place_time_s"] = Estimate(1.0, 0.99, 1.05)
    for high, cell in ((0.011, f" 0  10.0%{limit}"), (0.021, f" 0  >100%{short}{limit}")):
        m["in_place_time_s"] = Estimate(0.010, 0.0095, high)
        assert collectives.ScanTable().row(case).endswith(cell)


def test_of_a_graph_a_call_counts() -> None:
    """A sample is a replay of 5 calls: 10 ms."""
    case = Case(key=KEY | {"cudagraph": 2, "calls": 5}, ranks=[0], samples_s={"step": [[0.01]]})
    case.samples_s["out_of_place"] = [[0.02]]
    m = derived(case, facts_of(0), [[0]])
    assert [m[f"{v}_time_s"].value for v in ("in_place", "out_of_place")] == [0.002, 0.004]


def test_how_samples_spread() -> None:
    """1 to 200 us: the 198th of 200; mean 100.5, variance (200^2 - 1) / 12. Nearest rank, as in
    nccl-tests: of few samples it is the largest."""
    us = torch.arange(1, 201).flip(0).double().numpy()
    spread = collectives.spread_of(us)
    assert (spread["min_s"], spread["max_s"], spread["p99_s"]) == (1, 200, 198)
    assert spread["cv"] == pytest.approx((39_999 / 12) ** 0.5 / 100.5)
    assert collectives.spread_of(us[:99])["p99_s"] == 200
    rows = [[1e-6 * x for x in us]]
    case = Case(key=KEY | ROW, ranks=[0], samples_s={"step": rows, "out_of_place": rows})
    derived(case, facts_of(0), [[0]])
    _, names, _, row = collectives.ScanTable(True).row(case).splitlines()
    assert names.split()[-5:] == ["i_min", "i_max", "i_p99", "i_cv%", "+-%"]
    assert row.split()[9:13] == row.split()[17:21] == ["1.00", "200.00", "198.00", "57.45"]


def test_of_several_groups_the_slowest_counts() -> None:
    samples: Any = {"step": [[4], [1], [2], [3]], "out_of_place": [[1]] * 4}
    case = Case(key=KEY | {"group_ranks": 2}, ranks=[0, 1, 2, 3], samples_s=samples)
    m = derived(case, facts_of(0, 0, 2, 1), [[0, 3], [1, 2]])
    assert m["in_place_group_times_s"] == [Estimate(4), Estimate(2)]
    assert m["in_place_time_s"] == Estimate(4)
    assert case.check == "failed: 3 wrong values"


def test_scan() -> None:
    assert collectives.scan(8, 64, None, 2.0) == [8, 16, 32, 64]
    assert collectives.scan(4, 100, None, 3.0) == [4, 12, 36]
    assert collectives.scan(1, 4, None, 1.1) == [1, 2, 3, 4]  # at least one byte further
    assert collectives.scan(10, 50, 20, 2.0) == [10, 30, 50]
    assert collectives.scan(8, 64, None, 1e308) == [8]


def planned(ranks: int, *words: str, device: str = "cpu") -> dict[str, Any]:
    """The keys of each table of a command, with one group of so many ranks."""
    args = collectives.parse_args(list(words))
    tables = collectives.plan(args, device, [list(range(ranks))])
    return {title: [key for _, _, key in cases] for title, cases in tables.items()}


def test_counts_are_those_of_nccl_tests() -> None:
    """A rank brings its share; a size that does not divide is cut, a repeated one measured once."""
    words = ("--collective", "all_gather,reduce", "-r", "1", "-b", "4", "-e", "100", "-f", "5")
    tables = planned(4, *words)
    sizes = [[(key["size_bytes"], key["count"]) for key in keys] for keys in tables.values()]
    assert sizes == [[(16, 1), (96, 6)], [(4, 1), (20, 5), (100, 25)]]
    assert [keys[0]["root"] for keys in tables.values()] == [-1, 1]
    title = "# reduce float32 sum, world (4 ranks); at most 1 call a sample, cold buffers"
    assert list(tables)[1] == title


def test_the_ranks_of_a_case_are_those_of_all_groups() -> None:
    """Two groups of two. An operation that does not reduce is measured once, whatever --op."""
    args = collectives.parse_args(["--collective", "broadcast", "-o", "all", "-b", "8", "-e", "8"])
    (((name, ranks, key),),) = collectives.plan(args, "cpu", [[0, 2], [1, 3]]).values()
    assert (name, ranks, key["group_ranks"]) == ("broadcast float32, 8 bytes", 4, 2)


@pytest.mark.parametrize(
    ("device", "words", "calls"),
    [
        ("cpu", (), [1, 1]),
        ("cuda", (), [20, 4]),  # 4 GiB at most
        ("cuda", ("-I", "1"), [1, 1]),
        ("cuda", ("-n", "30"), [30, 30]),
        ("cpu", ("-n", "30"), [30, 30]),
    ],
)
def test_the_calls_of_a_sample(device: str, words: tuple[str, ...], calls: list[int]) -> None:
    """One on the CPU; a number that -n gives is taken as it is."""
    [keys] = planned(2, "-b", "64K", "-e", "1G", "-f", "16384", *words, device=device).values()
    assert [key["calls"] for key in keys] == calls


def test_a_graph_has_the_calls_of_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """With -G a step is a replay, and a sample has so many."""
    replays: list[str] = []
    graph = SimpleNamespace(replay=lambda: replays.append("replay"))
    monkeypatch.setattr(collectives, "cuda_graph", lambda step, device: graph.replay)
    monkeypatch.setattr(collectives.cli, "on_cuda", lambda device: True)
    args = collectives.parse_args(["-b", "64", "-e", "64", "-n", "5", "-G", "3"])
    store = dist.HashStore()
    ((planned_case,),) = collectives.plan(args, "cpu", [[0]]).values()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        world: Any = dist.group.WORLD
        job = Job(0, 0, 1, 1, torch.device("cpu"), "gloo", store)
        work = collectives.build(job, args, planned_case[2], Group((0,), world, world))
    finally:
        dist.destroy_process_group()
    assert work.calls == 3
    work.step()
    assert replays == ["replay"]


@pytest.mark.parametrize(("sent", "received"), [(25, 25), (25, 75), (75, 25)])
@pytest.mark.parametrize("cold", [True, False])
def test_buffers(sent: int, received: int, cold: bool) -> None:
    """All begin at a multiple of 64 elements; in place the smaller one is rank 1's part."""
    buffers = collectives.make_buffers(sent, received, 1, torch.float64, torch.device("cpu"), cold)
    assert len(buffers["out_of_place"]) == (4096 if cold else 1)
    for src, dst in buffers["out_of_place"][:5]:
        assert (len(src), len(dst)) == (sent, received)
        assert src.storage_offset() % 64 == dst.storage_offset() % 64 == 0
        assert dst.storage_offset() >= src.storage_offset() + sent
    for pair in buffers["in_place"][:5]:
        smaller, larger = sorted(pair, key=len)
        offset = 25 if sent != received else 0
        assert smaller.storage_offset() == larger.storage_offset() + offset


def measured(size: int, us: float, gb_per_s: float, width: float = 0.01) -> Case:
    """The variant in place is the better one. width: of the intervals, as a share."""
    key = {"collective": "all_reduce", "dtype": "float32", "redop": "sum", "size_bytes": size}
    case = Case(key=key | {"device": "cpu"}, ranks=[0])
    for variant, factor in (("out_of_place", 0.5), ("in_place", 1.0)):
        for name, value in (
            (f"{variant}_time_s", us / factor / 1e6),
            (f"{variant}_busbw_gb_per_s", gb_per_s * factor),
        ):
            case.metrics[name] = Estimate(value, value * (1 - width), value * (1 + width))
    return case


def test_answer() -> None:
    """Half of 0.8 is reached at 64K, missed at 1M, and reached again at 2M."""
    rows = [(8, 31, 0.001), (2**16, 50, 0.45), (2**20, 90, 0.3), (2**21, 95, 0.8), (2**22, 99, 0.7)]
    cases = [measured(*row) for row in rows]
    assert collectives.answer(None, cases[::-1]) == (
        "all_reduce float32 sum: at most 0.800 GB/s (0.792 to 0.808) bus bandwidth, at 2M bytes; "
        "about half of it from 2M on; 8 bytes take 31.0 us (30.7 to 31.3)"
    )
    assert "at 2M bytes, the largest size; " in collectives.answer(None, cases[:4])
    assert collectives.answer(None, cases[3:4]) == (
        "all_reduce float32 sum: 2M bytes take 95.0 us (94.1 to 96.0), "
        "0.800 GB/s (0.792 to 0.808) bus bandwidth"
    )
    beyond = collectives.answer(0.79, cases)
    assert isinstance(beyond, Disturbed)  # 0.792 to 0.808
    assert beyond.endswith("at 2M bytes, over --limit 0.79")
    assert not isinstance(collectives.answer(0.795, cases), Disturbed)
    wide = [*cases[:4], measured(2**22, 99, 0.7, width=0.2)]
    assert ", at 2M bytes (cannot be told apart: 4M); " in collectives.answer(None, wide)
    one_rank = [measured(8, 3, 0.0), measured(64, 4, 0.0)]
    assert collectives.answer(None, one_rank) == (
        "all_reduce float32 sum: 8 bytes take 3.00 us (2.97 to 3.03); "
        "one rank alone has no bus bandwidth"
    )
