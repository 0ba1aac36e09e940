"""traffic.py: closed forms of FSDP2, DDP, TP and pipelines, by hand; tensors without memory."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp._fully_shard import _fsdp_param

from analysis import report as page
from analysis.load import load as load_runs
from benchmarks import traffic
from benchmarks.workloads.decoder import DECODERS, Decoder
from common.report import Case

NANO = ("--model", "decoder-nano", "--dtype", "fp32")
SIZES = [weight.shape for weight in Decoder(DECODERS["decoder-nano"]).parameters()]
WEIGHTS = sum(size.numel() for size in SIZES)
LAYERS = DECODERS["decoder-nano"].layers


def key_of(mesh: str, ranks: int, *flags: str) -> traffic.Key:
    words = ["--ranks", str(ranks), "--mesh", mesh, *NANO, *flags]
    (key,) = traffic.plan(traffic.parse_args(words))
    return key


def test_without_a_mesh_all_ranks_are_dp() -> None:
    (key,) = traffic.plan(traffic.parse_args(["--ranks", "6", *NANO]))
    assert key == key_of("dp6", 6)


def totals(step: traffic.Step) -> dict[str, int]:
    """The bytes of each collective."""
    sums = Counter[str]()
    for (_, collective, size), count in step.calls.items():
        sums[collective] += size * count
    return sums


@pytest.mark.parametrize("ranks", [8, 3, 1000])
def test_fsdp_gathers_all_weights_twice_and_scatters_their_gradients_once(ranks: int) -> None:
    """It cuts the rows of a weight into chunks of one length, and fills up the last ones: nothing
    on 8 ranks, most of it on 1,000."""
    padded = [-(-size[0] // ranks) * ranks * size.numel() // size[0] for size in SIZES]
    step = traffic.play(key_of(f"dp{ranks}", ranks))
    assert totals(step) == {"all_gather": 2 * 4 * sum(padded), "reduce_scatter": 4 * sum(padded)}
    calls = Counter[str]()
    for (_, collective, _), count in step.calls.items():
        calls[collective] += count
    assert calls == {"all_gather": 2 * (LAYERS + 1), "reduce_scatter": LAYERS + 1}
    if ranks == 8:
        held = {"parameters": 4 * WEIGHTS // 8, "gradients": 4 * WEIGHTS // 8}
        assert step.held_bytes == held | {"optimizer": WEIGHTS}


def test_ddp_reduces_all_gradients_and_sends_the_buffers() -> None:
    """The rotation is the only buffer: [64, 8] of float32. AdamW has two moments a weight."""
    step = traffic.play(key_of("ddp4", 4))
    assert totals(step) == {"all_reduce": 4 * WEIGHTS, "broadcast": 4 * 64 * 8}
    held = step.held_bytes
    assert held == {"parameters": 4 * WEIGHTS, "gradients": 4 * WEIGHTS, "optimizer": 8 * WEIGHTS}


def test_tensor_parallel_gathers_and_scatters_the_stream() -> None:
    """A gather and a scatter before and after each attention and MLP, and as many backwards; also
    after the embedding and before the head."""
    sums = totals(traffic.play(key_of("tp4", 4, "--global-batch", "4")))
    stream = 4 * 64 * 64 * 4  # sequences, tokens, width, float32
    assert sums["all_gather"] == sums["reduce_scatter"] == (4 * LAYERS + 2) * stream


def test_a_pipeline_sends_each_microbatch_forwards_and_backwards() -> None:
    """One sequence a microbatch, of 64 tokens and width 64, to and from each of two neighbours."""
    flags = ("--rank", "1", "--microbatches", "4", "--global-batch", "4")
    step = traffic.play(key_of("pp4:1f1b", 4, *flags))
    size = 64 * 64 * 4
    assert step.calls == {("pp", "send", size): 8, ("pp", "recv", size): 8}


def test_the_metrics_by_hand() -> None:
    """3 GiB of dp on 8 ranks, 1 of tp on 2, and of pp one half each way: 14/8 of the all-reduce are
    sent, half of the all-gather, and of pp what is not received."""
    calls = Counter({("dp", "all_reduce", 2**30): 3, ("tp", "all_gather", 2**30): 1})
    calls |= {("pp", "send", 2**29): 1, ("pp", "recv", 2**29): 1}
    ranks = {"dp": list(range(8)), "tp": [0, 1], "pp": [0, 8]}
    metrics = traffic.derive(key_of("dp2", 2), traffic.Step(calls, ranks, {"parameters": 1}))
    assert (metrics["all_bytes"], metrics["ring_bytes"]) == (5 * 2**30, 6.25 * 2**30)
    assert (metrics["dp_calls"], metrics["dp_all_reduce_bytes"]) == (3, 3 * 2**30)
    assert (metrics["pp_ranks"], metrics["pp_nodes"], metrics["across_nodes"]) == (2, 2, "pp")
    # 4 sequences of 64 tokens; a block has 12 * 64^2 weights, attention is counted in full
    assert metrics["flops"] == 2 * 64 * (6 * (4 * 12 * 64**2 + 256 * 64) + 12 * 4 * 64 * 64)


def test_the_answer() -> None:
    """The rank that sends the most counts."""

    def played(mesh: str, ring_gib: float) -> Case:
        metrics = {"ring_bytes": ring_gib * 2**30, "all_bytes": 2**31}
        return Case(key={"mesh": mesh}, ranks=[0], metrics=metrics)

    assert traffic.answer([played("a", 1.5), played("a", 6.25), played("b", 2.75)]) == (
        "a rank of b sends 2.75G bytes a step in rings (its collectives have 2G), the least; "
        "a rank of a 6.25G (2G)"
    )
    alone = "a rank of a sends 1.5G bytes a step in rings (its collectives have 2G)"
    assert traffic.answer([played("a", 1.5), played("b", 1.5)]) == f"{alone}, under all 2 meshes"
    assert traffic.answer([played("a", 1.5)]) == alone


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
    runs = load_runs([path])
    assert page.where(runs[0]) == "ranks: 2, nodes: 1"
    (table,) = page.benchmark(runs).tables
    rows = {row[0]: list(row[1:]) for row in table.rows}
    assert rows["dp all gather bytes"] == ["-", "1.754M"]


def test_with_shapes_only_floats_have_no_memory_and_whole_numbers_are_real() -> None:
    """After it, also after an error, all is as before."""
    of_torch = _fsdp_param._chunk_with_empty
    with traffic.ShapesOnly(lambda *told: None):
        matrix = torch.ones(2**24, 2**20)  # 64 TiB
        assert (matrix @ matrix.T).shape == (2**24, 2**24)
        numbers = torch.arange(5)
        assert numbers[numbers > 1].tolist() == [2, 3, 4]
    with pytest.raises(RuntimeError), traffic.ShapesOnly(lambda *told: None):
        torch.ones(2) @ torch.ones(3)
    assert _fsdp_param._chunk_with_empty is of_torch
    assert torch.ones(2).sum().item() == 2


@pytest.mark.parametrize("count", [1, 3, 7])
def test_a_weight_is_cut_as_torch_cuts_it(count: int) -> None:
    """If rows are fewer than chunks, the last chunks are empty."""
    for rows in range(12):
        weight = torch.empty(3, rows)
        lengths = [chunk.shape[1] for chunk in traffic.chunks_alike(weight, count, 1)]
        expected = [chunk.shape[1] for chunk in weight.chunk(count, dim=1)]
        assert lengths == expected + [0] * (count - len(expected))
