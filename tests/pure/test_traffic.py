"""traffic.py: closed forms of FSDP2, DDP and TP, groups, floors, what is refused."""

import threading
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from analysis import report as page
from analysis.load import load as load_runs
from analysis.load import numbers
from benchmarks import traffic
from common.private_torch import join_fake_world
from common.report import Case, Report, load
from common.workloads.decoder import DECODERS, Decoder
from tests.process import ROOT
from tests.recorded_traffic import counted_messages, verdict

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
    """The rotation is the only buffer: [64, 8] of float32. sgd has one momentum a weight."""
    step = step_of("ddp4", 4, "--optimizer", "sgd")
    assert totals(step, "dp") == {"all_reduce": 4 * WEIGHTS, "broadcast": 4 * 64 * 8}
    held = step.held_bytes
    assert held["parameters"] == held["gradients"] == held["optimizer"] == 4 * WEIGHTS


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


def test_real_messages_count_where_torch_hands_them_to_a_backend() -> None:
    """What tests/recorded_traffic.py compares with; one more or a longer one is told."""
    join_fake_world(1, 4)
    try:
        with counted_messages() as messages:
            dist.send(torch.ones(3), 2)
            two = [
                dist.P2POp(dist.isend, torch.ones(3), 2),
                dist.P2POp(dist.irecv, torch.ones(5), 0),
            ]
            dist.batch_isend_irecv(two)
        dist.send(torch.ones(3), 2)  # afterwards
        (group,) = {group for group, _, _ in messages}
        world: Any = dist.group.WORLD
        assert group == world.group_name
    finally:
        dist.destroy_process_group()
    expected = Counter({(group, "send", 12): 2, (group, "recv", 20): 1})
    assert verdict(messages, expected) == "same"
    assert verdict(messages, expected - Counter({(group, "send", 12): 1})) != "same"
    assert verdict(messages, Counter({(group, "send", 12): 2, (group, "recv", 24): 1})) != "same"


def test_a_thousand_ranks_and_their_nodes() -> None:
    words = ["--ranks", "1024", "--mesh", "dp128tp8", "--rank", "9", *NANO]
    (key,) = traffic.plan(traffic.parse_args(words))
    step = traffic.play(key)
    assert step.ranks["tp"] == list(range(8, 16))
    assert step.ranks["dp"] == list(range(1, 1024, 8))
    metrics = traffic.derive(key, step, None, None)
    assert metrics["tp_nodes"] == 1
    assert metrics["dp_nodes"] == 128
    assert metrics["across_nodes"] == "dp"


def test_activations_are_what_autograd_keeps_without_weights() -> None:
    """x, up(x) and gelu(up(x)): 3 * (8 + 32 + 32) float32."""
    model = nn.Sequential(nn.Linear(8, 32, bias=False), nn.GELU(), nn.Linear(32, 8, bias=False))
    activations = traffic.Activations()
    with saved_tensors_hooks(activations.keep, lambda tensor: tensor):
        loss = model(torch.ones(3, 8)).sum()
    assert activations.now == activations.most == 4 * 3 * (8 + 32 + 32)
    loss.backward()
    del loss
    assert activations.now == 0
    assert activations.most == 4 * 3 * (8 + 32 + 32)


def test_a_floor_is_linear_between_what_was_measured_and_nothing_beyond() -> None:
    measured = traffic.Measured([], {("all_gather", 8): {100: 1.0, 300: 2.0}})
    sizes = {100: 1, 200: 2, 400: 5}
    calls = Counter({("dp", "all_gather", size): count for size, count in sizes.items()})
    calls["dp", "recv", 200] = 1
    held = {"parameters": 1}
    eight = traffic.Step(calls, {"dp": list(range(8))}, held)
    assert traffic.floors_of(eight, measured) == ({"dp": 1.0 + 2 * 1.5}, {"dp": 100 + 2 * 200})
    four = traffic.Step(calls, {"dp": list(range(4))}, held)
    assert traffic.floors_of(four, measured) == ({}, {})


def test_a_measured_report_gives_the_fastest_time_of_each_size(tmp_path: Path) -> None:
    report = Report("collectives", {"devices": ["a CPU"]}, str(tmp_path / "report.jsonl"))
    report.start()
    key = {"collective": "sendrecv", "group_ranks": 2, "size_bytes": 8}
    for dtype, seconds in (("float32", 3.0), ("int8", 2.0)):
        metrics = {"out_of_place_time_s": seconds, "in_place_time_s": None}
        report.add(Case(key | {"dtype": dtype}, [0, 1], metrics=metrics))
    report.finish("complete")
    measured = traffic.read_measured(str(report.path))
    assert measured == traffic.Measured(["a CPU"], {("sendrecv", 2): {8: 2.0}})
    for message in ("send", "recv"):  # a sendrecv is both
        assert measured.seconds_of(message, 2, 8) == 1.0


def test_the_floor_of_a_step_is_its_largest_floor() -> None:
    words = ["--ranks", "2", "--mesh", "dp2", "--global-batch", "2", *NANO]
    (key,) = traffic.plan(traffic.parse_args(words))
    calls = Counter({("dp", "all_gather", 8): 3, ("tp", "all_gather", 16): 1})
    step = traffic.Step(calls, {"dp": [0, 1], "tp": [0, 1]}, {"parameters": 1})
    measured = traffic.Measured([], {("all_gather", 2): {8: 2.0}})
    metrics = traffic.derive(key, step, measured, 1.0)
    assert metrics["parameters_bytes"] == 1
    assert (metrics["dp_floor_s"], metrics["dp_floor_bytes"]) == (6.0, 24)
    assert (metrics["tp_floor_s"], metrics["tp_floor_bytes"]) == (None, 0)
    # 64 tokens a rank; a block has 12 * 64^2 weights, attention is counted in full
    flops = 64 * (6 * (4 * 12 * 64**2 + 256 * 64) + 12 * 4 * 64 * 64)
    assert metrics["compute_floor_s"] == metrics["step_floor_s"] == metrics["flops"] == flops
    assert traffic.derive(key, step, measured, None)["step_floor_s"] == 6.0


def test_factors_are_those_of_nccl_tests() -> None:
    assert traffic.bus_factor("all_reduce", 4) == 1.5
    assert traffic.bus_factor("all_gather", 4) == traffic.bus_factor("reduce_scatter", 4) == 0.75
    assert traffic.bus_factor("send", 4) == 1


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--ranks 8 --mesh tp4", "mesh tp4 has 4 ranks, this job 8; e.g. dp8"),
        ("--ranks 2 --mesh dp2 --rank 2", "--rank: expected 0 to 1, got 2; e.g. --rank 0"),
        ("--ranks 4 --mesh cp4:ring", "ring attention needs CUDA; try cp4"),
        ("--ranks 48 --mesh tp48", "tp = 48 does not divide 8, heads"),
        ("--ranks 1000 --mesh dp125pp8:1f1b", "stages = 8 does not divide 4, layers"),
        ("--ranks 4 --mesh pp4", "after a pipeline, got 'pp4'; e.g. pp4:1f1b"),
        ("--ranks 4 --mesh pp4:1f1", "after a pipeline, got 'pp4:1f1'"),
        ("--ranks 4 --mesh dp2dp2", "expected a mesh, got 'dp2dp2'"),
        ("--ranks 4 --mesh dp4,", "expected a mesh, got ''"),
        ("--ranks 3 --mesh dp3 --global-batch 4", "does not divide 4, --global-batch"),
        ("--ranks 4 --mesh pp4:1f1b --microbatches 2", "e.g. --microbatches 4"),
        ("--ranks 0 --mesh dp1", "--ranks: expected a whole number of at least 1, got '0'"),
        ("--ranks 1", "required: --mesh"),
        ("--mesh dp1", "required: --ranks"),
        ("--ranks 1 --mesh dp1 --rank x", "--rank: expected a whole number"),
        ("--ranks 1 --mesh dp1 --gpu-per-node 8", "'--gpu-per-node'; did you mean --gpus-per-node"),
        ("--ranks 1 --mesh dp1 --gpus-per-node 0", "--gpus-per-node: expected a whole number"),
        ("--ranks 1 --mesh dp1 --model decoder-8b", "invalid choice: 'decoder-8b'"),
        ("--ranks 1 --mesh dp1 --dtype fp8", "invalid choice: 'fp8'"),
        ("--ranks 1 --mesh dp1 --optimizer adam", "invalid choice: 'adam'"),
        ("--ranks 9 --mesh dp9 --sequence-length 1000000000", "of 18 sequences of 1,000,000,000"),
        ("--ranks 8 --mesh dp8 --global-batch 1000000000", "bytes of memory here, and "),
        ("--ranks 1 --mesh dp1 --sequence-length -1", "--sequence-length: expected a whole"),
        ("--ranks 1 --mesh dp1 --peak-tflops 0", "--peak-tflops: expected a number above 0"),
        ("--ranks 1 --mesh dp1 --measured nowhere.jsonl", "nowhere.jsonl: No such file"),
        ("--ranks 1 --mesh dp1 --measured=", "--measured: expected a report, got ''"),
        ("--ranks 1 --mesh dp1 --json nowhere/report.jsonl", "No such file or directory"),
        ("--ranks 1 --mesh dp1 --json=", "--json: expected a report, got ''"),
    ],
)
def test_what_cannot_be_is_one_line(
    flags: str, says: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr("sys.argv", ["traffic.py", *NANO, *flags.split()])
    with pytest.raises(SystemExit) as end:
        traffic.main()
    assert end.value.code == 2
    out, err = capsys.readouterr()
    assert says in err
    assert (out, err.count("\n")) == ("", 1)


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


def test_the_table_and_the_report(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path
) -> None:
    path = tmp_path / "report.jsonl"
    flags = ["--ranks", "2", "--mesh", "dp2", "--json", str(path), *NANO]
    monkeypatch.setattr("sys.argv", ["traffic.py", *flags])
    assert traffic.main() == 0
    report = load(str(path))
    (case,) = report.cases
    assert (report.status, case.check) == ("complete", traffic.NOT_RUN)
    assert case.metrics["dp_all_gather_bytes"] == 2 * 4 * WEIGHTS
    out = capsys.readouterr().out
    assert "# dp2, rank 0: dp, 2 ranks on 1 node: all_gather 10 x, 1.754M (bus 898.2K); " in out


def test_ten_seconds_of_silence_get_a_line(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """A case that takes longer than two of them, which are short here."""
    monkeypatch.setattr(traffic, "SILENCE_S", 0.01)
    spoken = threading.Event()
    said: list[str] = []

    def write(text: str) -> None:
        said.append(text)
        if "".join(said).count(" s so far\n") == 2:
            spoken.set()

    def play(key: Any) -> traffic.Step:
        assert spoken.wait(60)
        return traffic.Step(Counter(), {}, {})

    monkeypatch.setattr("sys.stderr", Mock(write=write))
    monkeypatch.setattr(traffic, "play", play)
    (key,) = traffic.plan(traffic.parse_args(["--ranks", "8", "--mesh", "dp8", *NANO]))
    assert not traffic.measure(key, None, None).failed
    assert "".join(said).startswith("# dp8, rank 0: 0 s so far\n")


def test_the_floors_of_a_real_report(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path
) -> None:
    """The gradients are one bucket of ddp2. Its size lies between two that were measured."""
    measured = str(ROOT / "docs" / "results" / "collectives_cpu_2ranks.jsonl")
    fastest_s: dict[int, float] = {}
    for case in load(measured).cases:
        if case.key["collective"] == "all_reduce" and case.key["group_ranks"] == 2:
            both = (case.metrics["out_of_place_time_s"], case.metrics["in_place_time_s"])
            fastest_s[case.key["size_bytes"]] = min(both)
    size = 4 * WEIGHTS
    below = max(known for known in fastest_s if known <= size)
    above = min(known for known in fastest_s if known >= size)
    way = (size - below) / (above - below)
    floor_s = fastest_s[below] + way * (fastest_s[above] - fastest_s[below])
    path = tmp_path / "report.jsonl"
    flags = ["--ranks", "2", "--mesh", "ddp2", "--measured", measured, "--json", str(path)]
    monkeypatch.setattr("sys.argv", ["traffic.py", *flags, *NANO])
    assert traffic.main() == 0
    (case,) = load(str(path)).cases
    assert case.metrics["dp_floor_s"] == pytest.approx(floor_s)
    assert case.metrics["dp_floor_bytes"] == size  # the broadcast was not measured
    assert f"floor {floor_s * 1e3:.4g} ms, from times of 99.8% of" in capsys.readouterr().out


def test_the_analysis_takes_its_report(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path
) -> None:
    path = str(tmp_path / "report.jsonl")
    flags = ["--ranks", "2", "--mesh", "ddp2,dp2", "--json", path]
    monkeypatch.setattr("sys.argv", ["traffic.py", *flags, *NANO])
    assert traffic.main() == 0
    runs = load_runs([path])
    values = {(row["case"], row["metric"]): row["value"] for row in numbers(runs)}
    assert values["dp2", "dp_all_gather_bytes"] == 2 * 4 * WEIGHTS
    assert page.where(runs[0]) == "ranks: 2, nodes: 1, no device"
    (table,) = page.benchmark(runs).tables
    rows = [dict(zip(table.header, row, strict=True)) for row in table.rows]
    assert [row["case"] for row in rows] == ["ddp2", "dp2"]
    assert [row["dp all gather bytes"] for row in rows] == ["-", "1.754M"]
