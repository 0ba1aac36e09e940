"""Arithmetic of collectives.py and p2p_matrix.py, worked out by hand: no process group."""

import functools
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import collectives, p2p_matrix
from common import links, outliers, patterns
from common.ranks import node_of_each, partition
from common.report import Case
from common.stats import Times

KEY = {"collective": "all_reduce", "size_bytes": 64_000_000, "group_ranks": 4}


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


def derived(case: Case, facts: Any, groups: list[list[int]], **flags: Any) -> dict[str, Any]:
    args = SimpleNamespace(**({"average": "max", "limit": None, "check": 1} | flags))
    times = Times(case.samples_s, [])
    collectives.derive(args, groups, case, times, facts)  # type: ignore[arg-type]
    return case.metrics


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
        again = derived(case, facts, [[0, 1, 2, 3]], average=average)
        assert again["in_place_time_s"] == pytest.approx(seconds), average


def test_of_several_groups_the_slowest_counts() -> None:
    samples = {"step": [[4], [1], [2], [3]], "out_of_place": [[1]] * 4}
    case = Case(KEY | {"group_ranks": 2}, [0, 1, 2, 3], samples)  # type: ignore[arg-type]
    facts = [{"calls": 1, "in_place": wrong, "out_of_place": 0} for wrong in (0, 0, 2, 1)]
    m = derived(case, facts, [[0, 3], [1, 2]])
    assert m["in_place_group_times_s"] == [4, 2]
    assert m["in_place_time_s"] == 4
    assert case.check == "failed: 3 wrong values"


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


def test_the_key_has_the_calls_that_are_made() -> None:
    """A sample is 4 MiB at most on the CPU."""
    [keys] = planned(2, "-b", "64K", "-e", "16M", "-f", "16", "-n", "20").values()
    assert [(key["size_bytes"], key["calls"]) for key in keys] == [
        *((2**16, 20), (2**20, 4), (2**24, 1))
    ]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("-e 0", "argument -e/--maxbytes: expected a size above 0, got '0'; e.g. 8, 64K"),
        ("-i 0", "argument -i/--stepbytes: expected a size above 0, got '0'"),
        ("-i 8 -f 3", "argument -f/--stepfactor: not allowed with argument -i/--stepbytes"),
        ("-b 64 -e 8", "expected -e from -b on, got -b 64 and -e 8; e.g. -b 8 -e 64M"),
        ("--matrix=", "--matrix: expected a file, got ''; e.g. --matrix matrix.txt"),
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


def rows_of(*nodes: tuple[str, int]) -> dict[str, Any]:
    return {"ranks": [{"host": host, "local_rank": rank} for host, rank in nodes]}


def test_nodes() -> None:
    assert node_of_each(rows_of(("a", 0), ("a", 1), ("b", 0), ("b", 1))) == [0, 0, 1, 1]
    assert node_of_each(rows_of(("a", 0), ("b", 0), ("a", 1), ("b", 1))) == [0, 1, 0, 1]
    assert node_of_each(rows_of(("a", 0), ("a", 1), ("a", 0), ("a", 1))) == [0, 0, 1, 1]


def test_partition() -> None:
    nodes = [0, 0, 1, 1]
    assert partition("world", nodes) == [[0, 1, 2, 3]]
    assert partition("node", nodes) == [[0, 1], [2, 3]]
    assert partition("cross", nodes) == [[0, 2], [1, 3]]
    assert partition("3,0/1-2", nodes) == [[0, 3], [1, 2]]
    assert partition("world", [0, 0, 1]) == [[0, 1, 2]]
    # a word that is no rank after a group that is one; more numbers than memory holds
    odd = ("0,1/x", "0,1/2,9", "0-9999999999")
    for spec in ("0,1/1,2", "0/1,2", "0,4", "1-0", "x", "", "nodes", *odd):
        with pytest.raises(ValueError, match="disjoint groups of one size among ranks 0 to 3"):
            partition(spec, nodes)
    for spec in ("node", "cross"):
        with pytest.raises(ValueError, match=r"got \w+ on 2 nodes"):
            partition(spec, [0, 0, 1])


# -- patterns --------------------------------------------------------------------------------------

RANKS = [1, 2, 3, 8, 130, 512]
REDUCE = {
    **{"sum": lambda rows: rows.sum(0), "prod": lambda rows: rows.prod(0)},
    **{"min": lambda rows: rows.amin(0), "max": lambda rows: rows.amax(0)},
    "avg": lambda rows: rows.sum(0) / len(rows),
}


@functools.cache
def tiles(redop: str, ranks: int) -> torch.Tensor:
    return torch.stack([patterns.tile(rank, redop, ranks) for rank in range(ranks)])


@pytest.mark.parametrize("name", collectives.TYPES)
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("redop", ["sum", "prod", "min", "max"])
def test_reductions_are_exact(redop: str, ranks: int, name: str) -> None:
    """Reduced one rank after the other in the dtype itself, as a backend may do."""
    rows = tiles(redop, ranks).to(getattr(torch, name))
    total = rows[0]
    for row in rows[1:]:
        total = REDUCE[redop](torch.stack([total, row])).to(row.dtype)
    assert patterns.count_wrong(total, patterns.reduced_tile(redop, ranks)) == 0


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("ranks", RANKS)
def test_average_divided_first_or_last(ranks: int, name: str) -> None:
    dtype = getattr(torch, name)
    rows = [patterns.tile(rank, "avg", ranks).to(dtype) for rank in range(ranks)]
    first = last = torch.zeros(patterns.PERIOD, dtype=dtype)
    for row in rows:
        first, last = first + row / ranks, last + row
    want, near = patterns.reduced_tile("avg", ranks), patterns.tolerance("avg", dtype)
    assert patterns.count_wrong(first, want, relative=near) == 0
    assert patterns.count_wrong(last / ranks, want, relative=near) == 0
    if ranks > 1:
        assert patterns.count_wrong(last, want, relative=near) > 0


@pytest.mark.parametrize("redop", list(REDUCE))
@pytest.mark.parametrize("ranks", [2, 3, 8, 512])
def test_a_rank_that_is_left_out_is_seen(redop: str, ranks: int) -> None:
    want, near = patterns.reduced_tile(redop, ranks), patterns.tolerance(redop, torch.float32)
    for missing in {0, 1, ranks - 1}:
        some = [patterns.tile(r, redop, ranks) for r in range(ranks) if r != missing]
        rows = torch.stack(some).double()
        got = REDUCE[redop](rows) * (1 if redop != "avg" else (ranks - 1) / ranks)
        assert patterns.count_wrong(got.float(), want, relative=near) > 0


def test_moved_values_tell_ranks_and_places_apart() -> None:
    tiles = [tuple(patterns.tile(rank).tolist()) for rank in range(512)]
    assert len(set(tiles)) == 512
    assert all(0 <= value < patterns.SENTINEL for tile in tiles for value in tile)
    for shift in (2**k for k in range(20)):  # a chunk at another place
        assert torch.tensor(tiles[0]).roll(shift).tolist() != list(tiles[0])


def test_fill_and_count_wrong() -> None:
    period, length = patterns.tile(1), patterns.CHUNK + 1000
    buffer = torch.empty(length, dtype=torch.int32)
    patterns.fill(buffer, period)
    assert int(buffer[-1]) == int(period[(length - 1) % patterns.PERIOD])
    assert patterns.count_wrong(buffer[5:], period, start=5) == 0
    assert patterns.count_wrong(buffer, period, start=1) == length
    buffer[[0, 17, length - 1]] += 1
    assert patterns.count_wrong(buffer, period) == 3
    got = period.float()
    got[3] = math.nan
    assert patterns.count_wrong(got, period, relative=1e-3) == 1


# -- links -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 3, 4, 5, 8, 31, 64])
def test_each_pair_once_and_nobody_twice_in_a_round(n: int) -> None:
    rounds = links.rounds_of(n)
    seen = [pair for pairs in rounds for pair in pairs]
    assert len(seen) == len(set(seen)) == n * (n - 1) // 2
    assert all(0 <= a < b < n for a, b in seen)
    assert all(len({m for pair in pairs for m in pair}) == n - n % 2 for pairs in rounds)


def test_links_of_a_round() -> None:
    """1 MB, 2 messages a sample: 2 ms there is 1 GB/s; both ways in 8 ms is 2 * 2 MB / 8 ms."""
    messages = links.Messages(1_000_000, 8, 2)
    rows = {"step": [[0.006, 0.009], [0.008, 0.010]], "there": [[0.002, 0.004], [0.001, 0.005]]}
    rows |= {"back": [[0.004], [0.004]], "latency": [[2e-5], [4e-5]]}
    case = Case({}, [0, 5], rows)
    times = Times(rows, [2])
    links.derive([(0, 1)], [[(0, 5)]], messages, case, times, [0, 0])
    assert case.metrics["links"] == [[0, 1, 10.0, 1.0, 0.5, 0.5]]
    links.derive([(0, 1)], [[(0, 5)]], messages, case, times, [0, 3])
    assert case.check == "failed: wrong data came to rank 5"


def test_outliers() -> None:
    """Median 10, deviations 0 1 1 1 10: the median one is 1, scaled 1.4826."""
    costs = dict(enumerate([10.0, 9, 11, 9, 20]))
    [(name, (factor, sigmas))] = outliers.outliers(costs, 5).items()
    assert (name, factor) == (4, 2.0)
    assert sigmas == pytest.approx(10 / 1.4826)
    assert outliers.outliers(costs, 7) == {}
    for quiet in ([10, 10, 10, 1], [10, 10, 10, 10.9], [10, 90], [], [10, 12, 8, 14, 6, 15]):
        assert outliers.outliers(dict(enumerate(map(float, quiet))), 5) == {}


def matrix(n: int, slow: dict[tuple[int, int], float]) -> list[Any]:
    """Latencies of about 10 us; bandwidths all alike."""
    pairs = [(a, b) for a in range(n) for b in range(a + 1, n)]
    return [
        links.Link(a, b, 10 * slow.get((a, b), 1 + (a * 7 + b * 3) % 5 / 100), 5, 5, 9)
        for a, b in pairs
    ]


def slow_lines(*matrix_nodes_by_sigmas: Any) -> list[str]:
    return outliers.sentences(links.slow_links(*matrix_nodes_by_sigmas))


def test_a_slow_link_is_no_slow_rank_and_the_other_way_round() -> None:
    one = slow_lines(matrix(8, {(2, 5): 3.0}), [0] * 8, "rank", 5)
    assert [line.partition(":")[0] for line in one] == ["slow link 2 -> 5"]
    of_rank = {(min(3, r), max(3, r)): 2.0 for r in range(8) if r != 3}
    some = slow_lines(matrix(8, of_rank | {(0, 1): 4.0}), [0] * 8, "rank", 5)
    assert [line.partition(":")[0] for line in some] == ["slow rank 3", "slow link 0 -> 1"]
    assert "within nodes 1.9" in some[0] or "within nodes 2.0" in some[0]


def test_a_slow_node_is_named_before_its_ranks() -> None:
    nodes = [rank // 2 for rank in range(8)]
    slow = {
        (a, b): 2.0 for a in range(8) for b in range(a + 1, 8) if (a // 2 == 1) != (b // 2 == 1)
    }
    lines = slow_lines(matrix(8, slow), nodes, "rank", 5)
    assert [line.partition(":")[0] for line in lines] == ["slow node 1"]
    assert "between nodes" in lines[0]


def test_the_key_of_a_round_says_who_meets() -> None:
    """12 ranks on 3 or on 4 nodes: three rounds each, of other pairs."""
    job: Any = SimpleNamespace(device=torch.device("cpu"), backend="gloo", world_size=12)
    args = p2p_matrix.parse_args(["--by", "node", "--size", "1M"])
    three, four = (p2p_matrix.plan(args, job, nodes) for nodes in (3, 4))
    assert len(three) == len(four) == 3
    assert three[0][1] != four[0][1]
    assert three[0][0] != four[0][0]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            "--plot links",
            "expected a file that ends in .png, .svg or .pdf, got 'links'; e.g. links",
        ),
        ("--plot links.xyz", "expected a file that ends in .png, .svg or .pdf, got 'links.xyz'"),
        ("--plot .png", "expected a file that ends in .png, .svg or .pdf, got '.png'"),
        ("--size 0", "expected a size above 0, got '0'"),
    ],
)
def test_mistakes_of_p2p_matrix(
    words: str, line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(SystemExit) as caught:
        p2p_matrix.parse_args(words.split())
    assert caught.value.code == 2
    assert line in capsys.readouterr().err


def test_where_no_plot_can_be_written(tmp_path: Path) -> None:
    """matplotlib would write folder.png.png, and say the rest after all was measured."""
    (tmp_path / "folder.png").mkdir()
    assert "this is a folder" in (p2p_matrix.why_no_plot(str(tmp_path / "folder.png")) or "")
    nowhere = str(tmp_path / "nowhere" / "links.png")
    assert "expected a folder that can be written" in (p2p_matrix.why_no_plot(nowhere) or "")
    assert p2p_matrix.why_no_plot(str(tmp_path / "links.svg")) is None


def test_many_links_are_listed_by_the_worst() -> None:
    text = p2p_matrix.tables(matrix(40, {(2, 5): 3.0}), 40, "rank")
    latency = text.split("\n\n")[2 - 1]
    assert latency.splitlines()[:2] == ["worst 20 of 780 links:", "      2 -> 5     30"]
