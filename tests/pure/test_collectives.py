"""The arithmetic of collectives.py, worked out by hand: no process group."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks import collectives
from common.groups import Group, Job
from common.report import Case
from common.stats import Times

KEY = {"collective": "all_reduce", "size_bytes": 64_000_000, "group_ranks": 4, "average": "max"}


@pytest.mark.parametrize(
    ("collective", "ranks", "factor"),
    [
        *(("all_reduce", 1, 0), ("all_reduce", 2, 1), ("all_reduce", 4, 1.5)),
        *(("all_gather", 4, 0.75), ("reduce_scatter", 8, 0.875), ("all_to_all", 2, 0.5)),
        *(("gather", 5, 0.8), ("scatter", 5, 0.8), ("broadcast", 8, 1), ("reduce", 8, 1)),
        *(("sendrecv", 8, 1), ("barrier", 4, 0)),
    ],
)
def test_bus_factor(collective: str, ranks: int, factor: float) -> None:
    assert collectives.OPERATIONS[collective].bus(ranks) == pytest.approx(factor)


def test_a_trace_of_graphs_has_whole_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """With -G only every 20th call replays a graph, of 20 calls."""
    captured, replays = [], []

    def capture(step: Any, device: torch.device) -> Any:
        captured.append(step)
        return lambda: replays.append(step)

    monkeypatch.setattr(collectives, "cuda_graph", capture)
    flags = ("-b", "64", "-e", "64", "-n", "20", "-G", "3")
    monkeypatch.setattr("sys.argv", ["collectives.py", *flags])
    args = collectives.parse_args()
    store = dist.HashStore()
    place = {"device": "cpu", "backend": "gloo", "world_size": 1}
    ((key,),) = collectives.plan(args, [], place, 1).values()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        world: Any = dist.group.WORLD
        job = Job(0, 0, 1, 1, torch.device("cpu"), "gloo", store)
        work = collectives.build(job, [], args, key, Group((0,), world, world))
    finally:
        dist.destroy_process_group()
    assert [*work.profiled] == ["in_place, a graph", "out_of_place, a graph"]
    for step in work.profiled.values():
        for _ in range(5):
            step()
    assert replays == [captured[0]] * 5 + [captured[1]] * 5


def derived(case: Case, facts: Any, groups: list[list[int]], **flags: Any) -> dict[str, Any]:
    args = SimpleNamespace(**({"limit": None, "check": 1} | flags))
    times = Times(case.samples_s, [])
    layout = collectives.Layout(groups, 1, args.limit, "the limit")
    collectives.derive(args, layout, case, times, facts)  # type: ignore[arg-type]
    return case.metrics


def test_the_top_quarter_is_of_the_largest_sizes() -> None:
    """Rates from the smallest size to the largest; a quarter of five is two."""
    assert collectives.top_quarter([1.0, 2.0, 3.0, 4.0]) == 4
    assert collectives.top_quarter([9.0, 1.0, 1.0, 2.0, 4.0]) == 3


def test_bandwidths() -> None:
    """64 MB among 4 ranks in 10 ms: 6.4 GB/s, and 1.5 times that on the bus."""
    rows = [[0.008, 0.010, 0.010], [0.010, 0.009, 0.012], [0.001] * 3, [0.002] * 3]
    facts = [{"calls": 5, "in_place": 0, "out_of_place": 0}] * 4
    case = Case(KEY, [0, 1, 2, 3], {"step": rows, "out_of_place": [[1.0]] * 4})
    m = derived(case, facts, [[0, 1, 2, 3]], limit=12.0)
    assert m["in_place_time_s"] == 0.010  # the slowest rank's: 10, 10, 12 ms
    assert m["in_place_algbw_gb_per_s"] == pytest.approx(6.4)
    assert m["in_place_busbw_gb_per_s"] == pytest.approx(9.6)
    assert m["efficiency"] == pytest.approx(0.8)
    assert case.check == "passed"
    for average, seconds in (("avg", 0.0055), ("min", 0.001), ("rank0", 0.010), ("2", 0.001)):
        case.key = KEY | {"average": average}
        again = derived(case, facts, [[0, 1, 2, 3]])
        assert again["in_place_time_s"] == pytest.approx(seconds), average


def test_of_several_groups_the_slowest_counts() -> None:
    samples = {"step": [[4], [1], [2], [3]], "out_of_place": [[1]] * 4}
    case = Case(KEY | {"group_ranks": 2}, [0, 1, 2, 3], samples)  # type: ignore[arg-type]
    facts = [{"calls": 1, "in_place": wrong, "out_of_place": 0} for wrong in (0, 0, 2, 1)]
    m = derived(case, facts, [[0, 3], [1, 2]])
    assert m["in_place_group_times_s"] == [4, 2]
    assert m["in_place_time_s"] == 4
    assert case.check == "failed: 3 wrong values"


def test_what_a_rank_sends_over_the_network() -> None:
    """377.34 GB/s on 32 ranks of 4 nodes: 377.34 * 3/31 = 36.52, and all_to_all 24/31 of busbw."""
    share = collectives.network_share
    for name in ("all_reduce", "all_gather", "reduce_scatter"):
        assert 377.34 * (share(name, 32, 4) or 0) == pytest.approx(36.52, abs=0.005)
        assert share(name, 4, 4) == 1  # one rank a node: busbw is what it sends
        assert share(name, 8, 1) is None
    assert share("all_to_all", 32, 4) == pytest.approx(24 / 31)
    assert share("broadcast", 32, 4) is None
    key = {"collective": "all_reduce", "group_ranks": 32, "matrix": False}
    assert collectives.network_line(key, 377.34, 4) == (
        "#   per rank over the network: 36.52 GB/s = busbw (k-1)/(n-1), k = 4 nodes, n = 32 ranks; "
        "over a ring more"
    )
    assert collectives.network_line(key, 377.34, 1) is None
    assert collectives.network_line(key | {"matrix": "a1b2"}, 377.34, 4) is None


def test_nodes_of_a_group() -> None:
    node_of = [0, 0, 1, 1, 2]
    assert collectives.nodes_of_a_group([[0, 1, 2, 3]], node_of) == 2
    assert collectives.nodes_of_a_group([[0, 2], [1, 3]], node_of) == 2
    assert collectives.nodes_of_a_group([[0, 1], [2, 3]], node_of) == 1
    assert collectives.nodes_of_a_group([[0, 1, 2]], node_of) == 0  # two ranks and one
    assert collectives.nodes_of_a_group([[0, 1], [2, 4]], node_of) == 0  # within a node and not


def test_the_limit_has_the_name_of_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    link = SimpleNamespace(kind="NVLink", gb_per_s=450)
    monkeypatch.setattr(collectives.peaks, "find_link", lambda environment, ranks: link)
    environment = {"ranks": [{"host": "a", "local_rank": r} for r in (0, 1)]}
    layout = collectives.layout_of([[0, 1]], environment, None)
    assert layout == ([[0, 1]], 1, 450, "NVLink's 450 GB/s")
    assert collectives.layout_of([[0, 1]], environment, 300.0).limit_name == "the limit"
    sizes = {"size_bytes": 8, "count": 2, "dtype": "float32", "redop": "sum", "root": -1}
    key = KEY | sizes | {"group_ranks": 2, "caches": "cold"}
    for name, backend, seen in (
        ("all_reduce", "nccl", True),
        ("all_reduce", "cpu:gloo,cuda:nccl", True),
        ("all_reduce", "gloo", False),
        ("broadcast", "nccl", False),
    ):
        samples = {"step": [[8 / 369e9]] * 2, "in_place": [[1.0]] * 2, "out_of_place": [[1.0]] * 2}
        case = Case(key | {"collective": name, "backend": backend}, [0, 1], samples)
        facts = [{"calls": 1, "in_place": 0, "out_of_place": 0}] * 2
        args: Any = SimpleNamespace(limit=None, check=1)
        collectives.derive(args, layout, case, Times(samples, []), facts)
        row = collectives.ScanTable({}).row(case)
        assert ("  82% of NVLink's 450 GB/s" in row) == seen


def test_sizes_may_be_sums() -> None:
    args = collectives.parse_args(["-b", "1M+2", "-e", "1M+6", "-i", "2"])
    assert (args.minbytes, args.maxbytes) == (2**20 + 2, 2**20 + 6)
    [keys] = planned(2, "-b", "1M+2", "-e", "1M+6", "-i", "2", "-d", "half").values()
    assert [key["count"] - 2**19 for key in keys] == [1, 2, 3]  # elements of two bytes


def test_shifted_buffers() -> None:
    """-u moves input and output off the multiples of 256 bytes where they begin otherwise."""
    for shift in (0, 3):
        [[key]] = planned(2, "-b", "100", "-e", "100", "-u", str(shift)).values()
        assert ("unalign" in key) == bool(shift)
        at: Any = SimpleNamespace(rank=1, matrix=[[key["count"]] * 2] * 2)
        buffers = collectives.make_buffers(key, at, torch.device("cpu"))
        for src, dst in [*buffers["out_of_place"][:5], *buffers["in_place"][:5]]:
            assert (src.data_ptr() - 4 * shift) % 64 == (dst.data_ptr() - 4 * shift) % 64 == 0
            assert src.storage_offset() % 64 == dst.storage_offset() % 64 == shift
            assert len(src) == len(dst) == 25


def test_skew_is_zipfs() -> None:
    """Of 100 pieces 1, 1/2, 1/3 and 1/4 are 48, 24, 16 and 12; 48 is 1.92 times the mean."""
    assert sorted(collectives.skewed_row(100, 4, 1.0)) == [12, 16, 24, 48]
    assert collectives.skewed_row(100, 4, 0.0) == [25] * 4
    assert collectives.skewed_row(100, 4, 1.0) == collectives.skewed_row(100, 4, 1.0)
    assert sum(collectives.skewed_row(1001, 7, 0.7)) == 1001
    tables = planned(4, "--skew", "0,1", "-b", "6400", "-e", "6400")
    assert [*tables] == [f"# all_to_all float32, world (4 ranks), skew {a}" for a in (0, 1)]
    [[even], [skewed]] = tables.values()
    [[plain]] = planned(4, "--collective", "all_to_all", "-b", "6400", "-e", "6400").values()
    # each rank sends 100 pieces of 16 bytes to each of the four, or 4 * 48 come to one
    assert (even["size_bytes"], even["count"]) == (plain["size_bytes"], 4 * plain["count"])
    assert (skewed["size_bytes"], skewed["count"]) == (6400 * 1.92, 1600)
    assert len({even["matrix"], skewed["matrix"], False}) == 3
    assert "skew" not in plain
    [[counted]] = planned(4, "--skew", "1", "--counts", "-b", "6400", "-e", "6400").values()
    assert counted == skewed | {"counts": True}


def test_the_rank_with_most_sets_the_bandwidth_of_a_skewed_case() -> None:
    """12,288 bytes come to one rank in 1 ms, 3/4 of them from the others."""
    [[key]] = planned(4, "--skew", "1", "-b", "6400", "-e", "6400").values()
    case = Case(key, [0, 1, 2, 3], {"step": [[1e-3]] * 4})
    m = derived(case, [{"calls": 1, "out_of_place": 0}] * 4, [[0, 1, 2, 3]])
    assert m["max_over_mean_received"] == pytest.approx(1.92)
    assert m["out_of_place_busbw_gb_per_s"] == pytest.approx(12288 / 1e-3 / 1e9 * 3 / 4)
    assert "max/mean received 1.92" in collectives.ScanTable({}).row(case)


def test_what_nccl_expects_is_a_column() -> None:
    sizes = {"size_bytes": 8, "count": 2, "dtype": "float32", "redop": "sum", "root": -1}
    samples = {"step": [[1e-5]] * 4, "out_of_place": [[1e-5]] * 4}
    for expected, shown in ((33.1e-6, True), (None, False)):
        case = Case(KEY | sizes | {"caches": "cold"}, [0, 1, 2, 3], samples)
        facts = [{"calls": 1, "in_place": 0, "out_of_place": 0, "expected_s": expected}] * 4
        derived(case, facts, [[0, 1, 2, 3]])
        assert ("  expected 33.10 us" in collectives.ScanTable({}).row(case)) == shown


def test_scan() -> None:
    assert collectives.scan(8, 64, None, 2.0) == [8, 16, 32, 64]
    assert collectives.scan(4, 100, None, 3.0) == [4, 12, 36]
    assert collectives.scan(1, 4, None, 1.1) == [1, 2, 3, 4]  # at least one byte further
    assert collectives.scan(10, 50, 20, 2.0) == [10, 30, 50]
    assert collectives.scan(8, 64, None, 1e308) == [8]


@pytest.mark.parametrize(("step", "factor"), [(1, 2.0), (None, 1.0000001)])
def test_too_many_sizes_are_refused(step: int | None, factor: float) -> None:
    """At once: not after a list of 67 million."""
    with pytest.raises(
        ValueError, match=r"^8 to 64M by -. \S+ are over 10,000 sizes; expected fewer"
    ):
        collectives.scan(8, 2**26, step, factor)
    assert len(collectives.scan(1, 10_000, 1, 2.0)) == 10_000


def planned(
    ranks: int, *words: str, matrix: Any = None, world_size: int | None = None
) -> dict[str, Any]:
    """The tables of a command on the CPU, with groups of so many ranks."""
    args = collectives.parse_args(list(words))
    place = {"device": "cpu", "backend": "gloo", "world_size": world_size or ranks}
    return collectives.plan(args, matrix or [], place, ranks)


def test_counts_are_those_of_nccl_tests() -> None:
    """A rank brings its share; a size that does not divide is cut, a repeated one measured once."""
    words = ("--collective", "all_gather,reduce", "-r", "1", "-b", "4", "-e", "100", "-f", "5")
    tables = planned(4, *words)
    sizes = [[(key["size_bytes"], key["count"]) for key in keys] for keys in tables.values()]
    assert sizes == [[(16, 1), (96, 6)], [(4, 1), (20, 5), (100, 25)]]
    assert [keys[0]["root"] for keys in tables.values()] == [-1, 1]
    assert list(tables)[1] == "# reduce float32 sum, world (4 ranks)"


def test_tables_of_several_backends() -> None:
    """Those of one collective follow each other. With one backend the title does not say which."""
    args = collectives.parse_args(["--backend", "GLOO,ucc", "--collective", "all_reduce,reduce"])
    assert args.backend == "gloo,ucc"
    place = {"device": "cpu", "backend": args.backend, "world_size": 2}
    tables = collectives.plan(args, [], place, 2)
    assert [title.split(", ")[-1] for title in tables] == ["gloo", "ucc", "gloo", "ucc"]
    assert [keys[0]["backend"] for keys in tables.values()] == ["gloo", "ucc", "gloo", "ucc"]
    one = collectives.plan(args, [], place | {"backend": "cpu:gloo,cuda:nccl"}, 2)
    assert [title.split(", ")[-1] for title in one] == ["world (2 ranks)"] * 2


def test_the_key_tells_matrices_and_worlds_apart() -> None:
    sizes = ("--collective", "all_to_all", "-b", "4K", "-e", "4K")
    one, two = [[0, 4096], [1024, 0]], [[0, 4096], [2048, 0]]
    tables = [planned(2, *sizes, matrix=matrix) for matrix in (one, two, one, None)]
    first, second, again, without = (key for table in tables for [key] in table.values())
    assert first == again
    assert len({first["matrix"], second["matrix"], without["matrix"]}) == 3
    assert without["matrix"] is False  # as reports of before have it
    worlds = [planned(2, "--groups", "node", "-e", "8", world_size=size) for size in (2, 4)]
    of_two, of_four = ([*tables.values()] for tables in worlds)  # one node of two ranks, two nodes
    assert of_two != of_four


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
        flags = ["-n", "20", "--expected"] if asked else []
        [[key]] = planned(1, "-b", "8", "-e", "8", *flags).values()
        args = collectives.parse_args(flags)
        workload = collectives.build(job, [], args, key, group)
        assert workload.calls == calls
        wanted = {"calls": calls, "in_place": 0, "out_of_place": 0}
        assert workload.facts() == wanted | {"expected_s": None}  # gloo expects nothing
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("-e 0", "argument -e/--maxbytes: expected a size above 0, got '0'; e.g. 8, 64K"),
        ("-i 0", "argument -i/--stepbytes: expected a size above 0, got '0'"),
        ("-i 8 -f 3", "argument -f/--stepfactor: not allowed with argument -i/--stepbytes"),
        ("-b 64 -e 8", "expected -e from -b on, got -b 64 and -e 8; e.g. -b 8 -e 64M"),
        ("--matrix=", "--matrix: expected a file, got ''; e.g. --matrix matrix.txt"),
        ("-b 1M+x", "-b/--minbytes: expected a size in bytes, got '1M+x'; e.g. 8, 64K, 4M, 1G or"),
        ("-b 4+-8", "-b/--minbytes: expected a size in bytes, got '4+-8'"),
        ("--skew -1", "argument --skew: expected a number of at least 0, got '-1'"),
        ("--skew 1 --matrix m", "--matrix: not allowed with argument --skew"),
        ("--skew 1 --collective all", "--skew is for all_to_all alone; leave out --collective"),
        ("--counts", "--counts expected --matrix or --skew, e.g. --skew 1 --counts"),
        ("--skew 1 --counts -G 2", "--counts makes the host wait, which a graph (-G) cannot"),
        ("--matrix m --collective all", "--matrix is for all_to_all alone; leave out --collective"),
        (
            "-G 2 -z 1",
            "-G replays a graph of calls, and -z 1 waits for each call; give one of them",
        ),
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


def test_settings_in_words() -> None:
    """Above a table stands what its rows share."""
    args = collectives.parse_args(["-n", "5", "-z", "1", "--cache-warm"])
    said = "at most 5 calls a sample, -a max, each call waited for (-z 1), one buffer"
    assert collectives.settings(args, []) == said
    as_default = collectives.settings(collectives.parse_args([]), [])
    assert as_default.startswith("at most 20 calls a sample, ")
    matrix = [[0, 16], [16, 0]]
    assert f"matrix {collectives.digest_of(matrix)}, " in collectives.settings(args, matrix)


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("0 4096\n100 31\n", [[0, 4096], [96, 16]]),  # down to 16 bytes
        ("0,1e6\n16,\t0", [[0, 1000000], [16, 0]]),
        *(("0 1 2\n3 4 5", None), ("0 x\n1 2", None), ("0 1\n2", None), ("0 -16\n1 2", None)),
        *(("nan 1\n1 1", None), ("0 0\n0 0", None), ("7", None), ("1 15\n1 1", None)),
    ],
)
def test_read_matrix(tmp_path: Any, text: str, rows: Any) -> None:
    path = tmp_path / "matrix"
    path.write_text(text)
    if rows:
        assert collectives.read_matrix(str(path), 2) == rows
        return
    with pytest.raises(ValueError, match=r"\w"):
        collectives.read_matrix(str(path), 2)
