"""The arithmetic of collectives.py, worked out by hand: no process group."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks import collectives
from common.groups import Group, Job
from common.report import Case, Estimate
from common.stats import Times

KEY = {"collective": "all_reduce", "size_bytes": 64_000_000, "group_ranks": 4}


def test_a_trace_of_graphs_has_whole_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """With -G only every 20th call replays a graph, of 20 calls."""
    captured, replays = [], []

    def capture(step: Any, device: torch.device) -> Any:
        captured.append(step)
        return lambda: replays.append(step)

    monkeypatch.setattr(collectives, "cuda_graph", capture)
    flags = ("-b", "64", "-e", "64", "-n", "20", "-G", "3")
    monkeypatch.setattr("sys.argv", ["collectives.py", *flags])
    monkeypatch.setattr(collectives.cli, "on_cuda", lambda device: True)
    args = collectives.parse_args()
    store = dist.HashStore()
    ((planned,),) = collectives.plan(args, "cpu", [[0]]).values()
    key = planned[2]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        world: Any = dist.group.WORLD
        job = Job(0, 0, 1, 1, torch.device("cpu"), "gloo", store)
        work = collectives.build(job, args, key, Group((0,), world, world))
    finally:
        dist.destroy_process_group()
    assert [*work.profiled] == ["in_place, a graph", "out_of_place, a graph"]
    for step in work.profiled.values():
        for _ in range(5):
            step()
    assert replays == [captured[0]] * 5 + [captured[1]] * 5


def derived(
    case: Case, facts: Any, groups: list[list[int]], limit: float | None = None
) -> dict[str, Any]:
    args: Any = SimpleNamespace(limit=limit, check=1)
    collectives.derive(args, groups, case, Times(case.samples_s, []), facts)
    return case.metrics


def test_the_top_quarter_is_of_the_largest_sizes() -> None:
    """Rates from the smallest size to the largest; a quarter of five is two."""
    rates = [Estimate(rate, rate - 1, rate + 2) for rate in (9.0, 1.0, 1.0, 2.0, 4.0)]
    assert collectives.top_quarter(rates[1:]) == Estimate(4, 3, 6)
    assert collectives.top_quarter(rates) == Estimate(3, 2, 5)
    assert collectives.top_quarter([*rates, Estimate(8)]) == Estimate(6)


def test_bandwidths() -> None:
    """64 MB among 4 ranks in 10 ms: 6.4 GB/s, and 1.5 times that on the bus."""
    rows = [[0.008, 0.010, 0.010], [0.010, 0.009, 0.012], [0.001] * 3, [0.002] * 3]
    facts = [{"calls": 5, "in_place": 0, "out_of_place": 0}] * 4
    case = Case(key=KEY, ranks=[0, 1, 2, 3], samples_s={"step": rows, "out_of_place": [[1.0]] * 4})
    m = derived(case, facts, [[0, 1, 2, 3]], limit=12.0)
    assert m["in_place_time_s"] == Estimate(0.010)  # the slowest rank's: 10, 10, 12 ms
    assert m["in_place_algbw_gb_per_s"].value == pytest.approx(6.4)
    assert m["in_place_busbw_gb_per_s"].value == pytest.approx(9.6)
    assert m["efficiency"].value == pytest.approx(0.8)
    assert case.check == "passed"
    key = {"count": 16_000_000, "dtype": "float32", "redop": "sum", "root": -1, "caches": "cold"}
    case.key |= key
    row = collectives.ScanTable({}).row(case)
    assert row.endswith(" 0      -  80% of the limit")  # three samples have no interval
    m["out_of_place_time_s"] = Estimate(1.0, 0.99, 1.05)
    m["in_place_time_s"] = Estimate(0.010, 0.008, 0.011)
    assert collectives.ScanTable({}).row(case).endswith(" 0  20.0%  80% of the limit")
    m["in_place_time_s"] = Estimate(0.010, 0.008, 0.021)
    assert collectives.ScanTable({}).row(case).endswith(" 0  >100%  80% of the limit")


def test_the_interval_is_that_of_the_time() -> None:
    """Six samples of the slower rank: 2 to 7 ms, whose median's interval goes from end to end."""
    rows = [[0.001] * 6, [0.002, 0.007, 0.003, 0.006, 0.004, 0.005]]
    facts = [{"calls": 1, "in_place": 0, "out_of_place": 0}] * 2
    case = Case(
        key=KEY | {"group_ranks": 2}, ranks=[0, 1], samples_s={"step": rows, "out_of_place": rows}
    )
    time = derived(case, facts, [[0, 1]])["in_place_time_s"]
    assert (time.low, time.high) == (0.002, 0.007)
    assert time.value == pytest.approx(0.0045)
    busbw = case.metrics["in_place_busbw_gb_per_s"]
    assert busbw.low == pytest.approx(64 / 7)
    assert busbw.high == pytest.approx(64 / 2)


def test_of_several_groups_the_slowest_counts() -> None:
    samples = {"step": [[4], [1], [2], [3]], "out_of_place": [[1]] * 4}
    case = Case(key=KEY | {"group_ranks": 2}, ranks=[0, 1, 2, 3], samples_s=samples)  # type: ignore[arg-type]
    facts = [{"calls": 1, "in_place": wrong, "out_of_place": 0} for wrong in (0, 0, 2, 1)]
    m = derived(case, facts, [[0, 3], [1, 2]])
    assert m["in_place_group_times_s"] == [Estimate(4), Estimate(2)]
    assert m["in_place_time_s"] == Estimate(4)
    assert case.check == "failed: 3 wrong values"


def test_scan() -> None:
    assert collectives.scan(8, 64, None, 2.0) == [8, 16, 32, 64]
    assert collectives.scan(4, 100, None, 3.0) == [4, 12, 36]
    assert collectives.scan(1, 4, None, 1.1) == [1, 2, 3, 4]  # at least one byte further
    assert collectives.scan(10, 50, 20, 2.0) == [10, 30, 50]
    assert collectives.scan(8, 64, None, 1e308) == [8]
    assert len(collectives.scan(8, 2**26, 1, 2.0)) == 10_001  # too many: no list of 67 million
    assert len(collectives.scan(8, 2**26, None, 1.0000001)) == 10_001


def planned(ranks: int, *words: str) -> dict[str, Any]:
    """The keys of each table of a command on the CPU, with one group of so many ranks."""
    args = collectives.parse_args(list(words))
    tables = collectives.plan(args, "cpu", [list(range(ranks))])
    return {title: [key for _, _, key in cases] for title, cases in tables.items()}


def test_counts_are_those_of_nccl_tests() -> None:
    """A rank brings its share; a size that does not divide is cut, a repeated one measured once."""
    words = ("--collective", "all_gather,reduce", "-r", "1", "-b", "4", "-e", "100", "-f", "5")
    tables = planned(4, *words)
    sizes = [[(key["size_bytes"], key["count"]) for key in keys] for keys in tables.values()]
    assert sizes == [[(16, 1), (96, 6)], [(4, 1), (20, 5), (100, 25)]]
    assert [keys[0]["root"] for keys in tables.values()] == [-1, 1]
    title = "# reduce float32 sum, world (4 ranks); at most 20 calls a sample, cold buffers"
    assert list(tables)[1] == title


def test_the_ranks_of_a_case_are_those_of_all_groups() -> None:
    """Two groups of two. An operation that does not reduce is measured once, whatever --op."""
    args = collectives.parse_args(["--collective", "broadcast", "-o", "all", "-b", "8", "-e", "8"])
    (((name, ranks, key),),) = collectives.plan(args, "cpu", [[0, 2], [1, 3]]).values()
    assert (name, ranks, key["group_ranks"]) == ("broadcast float32, 8 bytes", 4, 2)


def test_the_key_has_the_most_calls_of_a_sample() -> None:
    """A sample is 4 MiB at most on the CPU. How long a call takes does not change the key."""
    sizes = ("-b", "64K", "-e", "16M", "-f", "16")
    [keys] = planned(2, *sizes, "-n", "20").values()
    assert [(key["size_bytes"], key["calls"]) for key in keys] == [
        *((2**16, 20), (2**20, 4), (2**24, 1))
    ]
    [by_time] = planned(2, *sizes).values()  # another statistic: it does not join with -n
    assert [key | {"exact_calls": True} for key in by_time] == keys


@pytest.mark.parametrize(
    ("asked", "call_s", "calls"), [(False, 2e-3, 1), (False, 1e-5, 20), (True, 2e-3, 20)]
)
def test_a_sample_has_as_many_calls_as_take_a_millisecond(
    monkeypatch: pytest.MonkeyPatch, asked: bool, call_s: float, calls: int
) -> None:
    """20 at most. A number that -n gives is taken as it is."""
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        world: Any = dist.group.WORLD
        group = Group((0,), world, world)
        job = Job(0, 0, 1, 1, torch.device("cpu"), "gloo", store)
        monkeypatch.setattr(collectives, "time_block", lambda *_: ([call_s * 9, call_s], 0.0))
        flags = ["-n", "20"] if asked else []
        [[key]] = planned(1, "-b", "8", "-e", "8", *flags).values()
        args = collectives.parse_args(flags)
        workload = collectives.build(job, args, key, group)
        assert workload.calls == calls
        assert workload.facts() == {"calls": calls, "in_place": 0, "out_of_place": 0}
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("-e 0", "argument -e/--maxbytes: expected a size above 0, got '0'; e.g. 8, 64K"),
        ("-i 0", "argument -i/--stepbytes: expected a size above 0, got '0'"),
        ("-i 8 -f 3", "argument -f/--stepfactor: not allowed with argument -i/--stepbytes"),
        ("-b 64 -e 8", "expected -e from -b on, got -b 64 and -e 8; e.g. -b 8 -e 64M"),
        ("-G 3 --device cpu", "-G replays CUDA graphs, and this run is on the CPU; leave it out"),
        ("-i 1", "-b to -e are over 10,000 sizes; expected fewer, e.g. -f 2"),
    ],
)
def test_what_would_be_ignored_is_refused(
    words: str, line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(SystemExit) as caught:
        collectives.parse_args(words.split())
    assert caught.value.code == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert line in said


def test_settings_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Above a table stands what its rows share."""
    monkeypatch.setattr(collectives.cli, "on_cuda", lambda device: True)
    for flags, said in (
        ("-n 5 --cache-warm", "at most 5 calls a sample, one buffer"),
        ("-n 5 -G 3", "at most 5 calls a sample, 3 replays of a graph (-G), one buffer"),
        ("", "at most 20 calls a sample, cold buffers"),
    ):
        assert collectives.settings(collectives.parse_args(flags.split())) == said


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


def test_large_buffers_are_one() -> None:
    """Two of 256 MiB are not in the memory of the small ones, which is as large as one of them."""
    size = collectives.COLD_BYTES
    buffers = collectives.make_buffers(size, size, 0, torch.uint8, torch.device("cpu"), cold=True)
    assert [len(pairs) for pairs in buffers.values()] == [1, 1]


def measured(size: int, us: float, gb_per_s: float, width: float = 0.01) -> Case:
    """The variant in place is the better one. width: of the intervals, as a share."""
    key = {"collective": "all_reduce", "dtype": "float32", "redop": "sum", "size_bytes": size}
    case = Case(key=key, ranks=[0])
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
    assert collectives.answer(cases[::-1]) == (
        "all_reduce float32 sum: at most 0.800 GB/s (0.792 to 0.808) bus bandwidth, at 2M bytes; "
        "about half of it from 2M on; 8 bytes take 31.0 us (30.7 to 31.3)"
    )
    assert "at 2M bytes, the largest size; " in collectives.answer(cases[:4])
    assert collectives.answer(cases[3:4]) == (
        "all_reduce float32 sum: 2M bytes take 95.0 us (94.1 to 96.0), "
        "0.800 GB/s (0.792 to 0.808) bus bandwidth"
    )
    wide = [*cases[:4], measured(2**22, 99, 0.7, width=0.2)]
    assert ", at 2M bytes (cannot be told apart: 4M); " in collectives.answer(wide)
    one_rank = [measured(8, 3, 0.0), measured(64, 4, 0.0)]
    assert collectives.answer(one_rank) == (
        "all_reduce float32 sum: 8 bytes take 3.00 us (2.97 to 3.03); "
        "one rank alone has no bus bandwidth"
    )
