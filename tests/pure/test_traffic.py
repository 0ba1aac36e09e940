"""traffic.py: its fake world, closed forms of FSDP2, DDP and TP, groups, what is refused."""

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.fsdp._fully_shard import _fsdp_param

from analysis import report as page
from analysis.load import load as load_runs
from benchmarks import traffic
from common.report import Case, load
from common.workloads.decoder import DECODERS, Decoder
from common.workloads.operations import all_gather, reduce_scatter

NANO = ("--model", "decoder-nano", "--dtype", "fp32")
WEIGHTS = sum(weight.numel() for weight in Decoder(DECODERS["decoder-nano"]).parameters())


def step_of(mesh: str, ranks: int, *flags: str) -> traffic.Step:
    words = ["--ranks", str(ranks), "--mesh", mesh, *NANO, *flags]
    (key,) = traffic.plan(traffic.parse_args(words))
    return traffic.play(key)


def totals(step: traffic.Step, axis: str) -> dict[str, int]:
    """The bytes of each collective of an axis."""
    sums = Counter[str]()
    for (its_axis, collective, size), count in step.calls.items():
        if its_axis == axis:
            sums[collective] += size * count
    return sums


def calls(step: traffic.Step, collective: str) -> int:
    return sum(count for (_, name, _), count in step.calls.items() if name == collective)


def test_fsdp_gathers_all_weights_twice_and_scatters_their_gradients_once() -> None:
    """8 ranks divide the first dimension of every weight: nothing is padded."""
    step = step_of("dp8", 8)
    assert step.ranks["dp"] == list(range(8))
    assert totals(step, "dp") == {"all_gather": 2 * 4 * WEIGHTS, "reduce_scatter": 4 * WEIGHTS}
    units = DECODERS["decoder-nano"].layers + 1
    assert calls(step, "all_gather") == 2 * units
    assert calls(step, "reduce_scatter") == units
    held = step.held_bytes
    assert held["parameters"] == held["gradients"] == 4 * WEIGHTS // 8
    assert held["optimizer"] == 2 * held["parameters"]


def test_ddp_reduces_all_gradients_and_sends_the_buffers() -> None:
    """The rotation is the only buffer: [64, 8] of float32. AdamW has two moments a weight."""
    step = step_of("ddp4", 4)
    assert totals(step, "dp") == {"all_reduce": 4 * WEIGHTS, "broadcast": 4 * 64 * 8}
    held = step.held_bytes
    assert held == {"parameters": 4 * WEIGHTS, "gradients": 4 * WEIGHTS, "optimizer": 8 * WEIGHTS}


def test_tensor_parallel_gathers_and_scatters_the_stream() -> None:
    """A gather and a scatter before and after each attention and MLP, and as many backwards; also
    after the embedding and before the head."""
    step = step_of("tp4", 4, "--global-batch", "4")
    stream = 4 * 64 * 64 * 4  # sequences, tokens, width, float32
    sums = totals(step, "tp")
    layers = DECODERS["decoder-nano"].layers
    assert sums["all_gather"] == sums["reduce_scatter"] == (4 * layers + 2) * stream


@pytest.mark.parametrize(("rank", "neighbours"), [(0, 1), (1, 2)])
def test_a_pipeline_sends_each_microbatch_forwards_and_backwards(
    rank: int, neighbours: int
) -> None:
    """One sequence a microbatch, of 64 tokens and width 64, to and from each neighbour."""
    flags = ("--rank", str(rank), "--microbatches", "4", "--global-batch", "4")
    step = step_of("pp4:1f1b", 4, *flags)
    size, count = 64 * 64 * 4, 4 * neighbours
    assert step.calls == {("pp", "send", size): count, ("pp", "recv", size): count}


def test_a_thousand_ranks_and_their_nodes() -> None:
    words = ["--ranks", "1024", "--mesh", "dp128tp8", "--rank", "9", *NANO]
    (key,) = traffic.plan(traffic.parse_args(words))
    step = traffic.play(key)
    assert step.ranks["tp"] == list(range(8, 16))
    assert step.ranks["dp"] == list(range(1, 1024, 8))
    metrics = traffic.derive(key, step)
    assert metrics["tp_nodes"] == 1
    assert metrics["dp_nodes"] == 128
    assert metrics["across_nodes"] == "dp"


def test_the_metrics_by_hand() -> None:
    """3 GiB of dp on 8 ranks, 1 of tp on 2, and of pp one half each way: 14/8 of the all-reduce are
    sent, half of the all-gather, and of pp what is not received."""
    (key,) = traffic.plan(traffic.parse_args(["--ranks", "2", "--mesh", "dp2", *NANO]))
    calls = Counter({("dp", "all_reduce", 2**30): 3, ("tp", "all_gather", 2**30): 1})
    calls |= {("pp", "send", 2**29): 1, ("pp", "recv", 2**29): 1}
    ranks = {"dp": list(range(8)), "tp": [0, 1], "pp": [0, 8]}
    metrics = traffic.derive(key, traffic.Step(calls, ranks, {"parameters": 1}))
    assert (metrics["all_bytes"], metrics["ring_bytes"]) == (5 * 2**30, 6.25 * 2**30)
    assert (metrics["dp_calls"], metrics["dp_all_reduce_bytes"]) == (3, 3 * 2**30)
    assert (metrics["pp_ranks"], metrics["pp_nodes"], metrics["across_nodes"]) == (2, 2, "pp")
    assert metrics["parameters_bytes"] == 1
    # 4 sequences of 64 tokens; a block has 12 * 64^2 weights, attention is counted in full
    assert metrics["flops"] == 2 * 64 * (6 * (4 * 12 * 64**2 + 256 * 64) + 12 * 4 * 64 * 64)


def played(mesh: str, ring_gib: float, rank: int = 0) -> Case:
    metrics = {"ring_bytes": ring_gib * 2**30, "all_bytes": 2**31}
    return Case(key={"mesh": mesh, "rank": rank}, ranks=[0], metrics=metrics)


def test_the_answer() -> None:
    """The rank that sends the most counts."""
    a, b = played("a", 1.5), played("b", 2.75)
    assert traffic.answer([a, played("a", 6.25, rank=1), b]) == (
        "a rank of b sends 2.75G bytes a step in rings (its collectives have 2G), the least; "
        "a rank of a 6.25G (2G)"
    )
    alone = "a rank of a sends 1.5G bytes a step in rings (its collectives have 2G)"
    assert traffic.answer([a, played("b", 1.5)]) == f"{alone}, under all 2 meshes"
    assert traffic.answer([a]) == alone
    assert traffic.answer([]) is None


@pytest.mark.parametrize("ranks", [3, 5, 1000])
def test_any_number_of_ranks_pads_each_weight(ranks: int) -> None:
    """FSDP cuts the rows of a weight into chunks of one length, and fills up the last ones."""
    padded = 0
    for weight in Decoder(DECODERS["decoder-nano"]).parameters():
        rows = weight.shape[0]
        padded += -(-rows // ranks) * ranks * weight.numel() // rows
    step = step_of(f"dp{ranks}", ranks)
    assert totals(step, "dp") == {"all_gather": 2 * 4 * padded, "reduce_scatter": 4 * padded}


def test_one_rank_sends_nothing() -> None:
    step = step_of("dp1", 1)
    assert step.calls == {}
    assert step.held_bytes["parameters"] == 4 * WEIGHTS


def test_the_table_the_report_and_the_analysis(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path
) -> None:
    path = str(tmp_path / "report.jsonl")
    flags = ["--ranks", "2", "--mesh", "ddp2,dp2", "--json", path]
    monkeypatch.setattr("sys.argv", ["traffic.py", *flags, *NANO])
    assert traffic.main() == 0
    out, err = capsys.readouterr()
    assert "# dp2, rank 0: dp, 2 ranks on 1 node: all_gather 10 x, 1.754M (bus 898.2K); " in out
    assert err == "# plays ddp2, rank 0\n# plays dp2, rank 0\n"
    report = load(path)
    assert report.status == "complete"
    assert {case.check for case in report.cases} == {traffic.NOT_RUN}
    assert report.cases[1].metrics["dp_all_gather_bytes"] == 2 * 4 * WEIGHTS
    runs = load_runs([path])
    assert page.where(runs[0]) == "ranks: 2, nodes: 1"
    (table,) = page.benchmark(runs).tables
    rows = {row[0]: list(row[1:]) for row in table.rows}
    assert table.header[1:] == ["ddp2, rank 0", "dp2, rank 0"]
    assert rows["dp all gather bytes"] == ["-", "1.754M"]


# -- the fake world, and tensors without memory ---------------------------------------------------

RANKS = 1000  # of the world that does not exist


@pytest.fixture
def fake_world() -> Iterator[dist.Store]:
    with traffic.fake_world(5, RANKS) as store:
        yield store


def test_with_shapes_only_floats_have_no_memory_and_whole_numbers_are_real() -> None:
    with traffic.ShapesOnly(lambda *told: None):
        matrix = torch.ones(2**24, 2**20)  # 64 TiB
        product = matrix @ matrix.T
        numbers = torch.arange(5)
        assert numbers[numbers > 1].tolist() == [2, 3, 4]
    assert product.shape == (2**24, 2**24)
    for tensor in (matrix, product):
        assert isinstance(tensor, traffic.FakeTensor)
    assert type(numbers) is torch.Tensor


def test_after_shapes_only_everything_is_as_before() -> None:
    of_torch = _fsdp_param._chunk_with_empty
    with traffic.ShapesOnly(lambda *told: None):
        assert _fsdp_param._chunk_with_empty is traffic.chunks_alike
    assert _fsdp_param._chunk_with_empty is of_torch
    with pytest.raises(RuntimeError), traffic.ShapesOnly(lambda *told: None):
        torch.ones(2) @ torch.ones(3)
    assert _fsdp_param._chunk_with_empty is of_torch
    assert torch.ones(2).sum().item() == 2


def world_group() -> Any:
    return dist.group.WORLD


COLLECTIVES: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "c10d::_allgather_base_": lambda part, whole: all_gather(whole, part),
    "c10d::allgather_": lambda part, whole: dist.all_gather(list(whole.chunk(RANKS)), part),
    "c10d::_reduce_scatter_base_": lambda part, whole: reduce_scatter(part, whole),
    "c10d::alltoall_base_": lambda part, whole: dist.all_to_all_single(whole, whole.clone()),
    "c10d::allreduce_": lambda part, whole: dist.all_reduce(whole),
    "c10d::broadcast_": lambda part, whole: dist.broadcast(whole, 0),
    "c10d::send": lambda part, whole: dist.send(whole, 6),
    "c10d::recv_": lambda part, whole: dist.recv(whole, 4),
    "_c10d_functional::all_reduce": lambda part, whole: all_reduce(whole, "sum", world_group()),
}


@pytest.mark.parametrize("operation", COLLECTIVES)
def test_shapes_only_tells_the_larger_side_of_a_collective(
    operation: str, fake_world: dist.Store
) -> None:
    """Three elements of bfloat16 a rank. Waiting for the result is not told."""
    told: list[tuple[str, str, int]] = []
    with traffic.ShapesOnly(lambda *values: told.append(values)):
        part = torch.ones(3, dtype=torch.bfloat16)
        whole = torch.ones(3 * RANKS, dtype=torch.bfloat16)
        COLLECTIVES[operation](part, whole)
    assert told == [(operation, world_group().group_name, 2 * 3 * RANKS)]


def test_a_weight_is_cut_as_torch_cuts_it() -> None:
    """Where rows are fewer than chunks, the last chunks are empty."""
    for rows in range(12):
        weight = torch.empty(3, rows)
        for count in range(1, 8):
            chunks = traffic.chunks_alike(weight, count, 1)
            lengths = [chunk.shape[1] for chunk in chunks]
            expected = [chunk.shape[1] for chunk in weight.chunk(count, dim=1)]
            expected += [0] * (count - len(expected))
            assert lengths == expected
            assert {chunk.shape[0] for chunk in chunks} == {3}
