"""traffic.py: closed forms for FSDP2, DDP, TP and pipelines, and tensors without memory."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp._fully_shard import _fsdp_param

from analysis import report as page
from analysis.runs.load import load as load_runs
from benchmarks import collectives, traffic
from benchmarks.workloads.decoder import DECODERS, Decoder
from common.stats import Estimate
from harness.report import Case, load
from readers.isolated import Layout
from tests.pure import reports
from tests.pure.reports import estimate

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
    """The bytes of each collective in a step."""
    sums = Counter[str]()
    for (_, collective, size), count in step.calls.items():
        sums[collective] += size * count
    return sums


@pytest.mark.parametrize("ranks", [8, 3, 1000])
def test_fsdp_gathers_all_weights_twice_and_reduce_scatters_gradients_once(ranks: int) -> None:
    """The rows of a weight are padded: not at all on 8 ranks, and mostly on 1,000."""
    padded = [-(-size[0] // ranks) * ranks * size.numel() // size[0] for size in SIZES]
    step = traffic.simulate(key_of(f"dp{ranks}", ranks))
    assert totals(step) == {"all_gather": 2 * 4 * sum(padded), "reduce_scatter": 4 * sum(padded)}
    counts = {name: 0 for _, name, _ in step.calls}
    for (_, name, _), count in step.calls.items():
        counts[name] += count
    assert counts == {"all_gather": 2 * (LAYERS + 1), "reduce_scatter": LAYERS + 1}
    if ranks == 8:
        held = {"parameters": 4 * WEIGHTS // 8, "gradients": 4 * WEIGHTS // 8}
        assert step.held_bytes == held | {"optimizer": WEIGHTS}


STREAM = 4 * 64 * 64 * 4  # sequences, tokens, width, float32
MESSAGE = 64 * 64 * 4  # one sequence per microbatch


@pytest.mark.parametrize(
    ("mesh", "flags", "expected"),
    [
        # the only buffer is the rotation, [64, 8] of float32
        ("ddp4", "", {"all_reduce": 4 * WEIGHTS, "broadcast": 4 * 64 * 8}),
        # a gather before and a scatter after each attention and MLP, and as many in the backward
        # pass; also after the embedding and before the head
        ("tp4", "", dict.fromkeys(("all_gather", "reduce_scatter"), (4 * LAYERS + 2) * STREAM)),
        # 4 microbatches to and from each of two neighbors
        (
            "pp4:1f1b",
            "--rank 1 --microbatches 4",
            {("pp", "send", MESSAGE): 8, ("pp", "recv", MESSAGE): 8},
        ),
    ],
)
def test_bytes_of_a_step(mesh: str, flags: str, expected: dict[Any, int]) -> None:
    step = traffic.simulate(key_of(mesh, 4, "--global-batch", "4", *flags.split()))
    found: dict[Any, int] = dict(step.calls) if flags else totals(step)
    assert {name: found[name] for name in expected} == expected
    assert mesh == "tp4" or len(found) == len(expected)
    if mesh == "ddp4":  # AdamW has two moments per weight
        held = {"parameters": 4 * WEIGHTS, "gradients": 4 * WEIGHTS, "optimizer": 8 * WEIGHTS}
        assert step.held_bytes == held


SLOW_MESHES = ("dp2x4", "dp2tp4", "cp4dp2", "dp2ep4", "dp2pp4:1f1b")


@pytest.mark.parametrize(
    "mesh", ["dp8", "ddp8", *(pytest.param(mesh, marks=pytest.mark.smoke) for mesh in SLOW_MESHES)]
)
def test_the_counted_step_equals_the_next_one(mesh: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Playing only the first steps is faster and counts the same."""
    key = key_of(mesh, 8, "--rank", "7")
    first = traffic.simulate(key)
    before = traffic.steps_before(traffic.parse_mesh(mesh))
    monkeypatch.setattr(traffic, "steps_before", lambda mesh: before + 1)
    assert traffic.simulate(key) == first


def test_the_metrics_by_hand() -> None:
    """3 GiB of dp on 8 ranks, 1 GiB of tp on 2, and 0.5 GiB of pp in each direction. A rank sends
    14/8 of the all-reduce, half of the all-gather, and the half of pp that it does not receive."""
    calls = Counter({("dp", "all_reduce", 2**30): 3, ("tp", "all_gather", 2**30): 1})
    calls |= {("pp", "send", 2**29): 1, ("pp", "recv", 2**29): 1}
    ranks = {"dp": list(range(8)), "tp": [0, 1], "pp": [0, 8]}
    metrics = traffic.derive(key_of("dp2", 2), traffic.Step(calls, ranks, {"parameters": 1}))
    assert (metrics["all_bytes"], metrics["ring_bytes"]) == (5 * 2**30, 6.25 * 2**30)
    assert (metrics["dp_calls"], metrics["dp_all_reduce_bytes"]) == (3, 3 * 2**30)
    assert (metrics["pp_ranks"], metrics["pp_nodes"], metrics["across_nodes"]) == (2, 2, "pp")
    # 4 sequences of 64 tokens; a block has 12 * 64^2 weights; attention is not halved for causality
    assert metrics["flops"] == 2 * 64 * (6 * (4 * 12 * 64**2 + 256 * 64) + 12 * 4 * 64 * 64)


def test_the_answer() -> None:
    """The rank that sends the most bytes counts."""

    def simulated(mesh: str, ring_gib: float) -> Case:
        metrics = {"ring_bytes": ring_gib * 2**30, "all_bytes": 2**31}
        return Case(key={"mesh": mesh}, ranks=[0], metrics=metrics)

    assert traffic.answer([simulated("a", 1.5), simulated("a", 6.25), simulated("b", 2.75)]) == (
        "with ring algorithms, a rank sends 2.75G bytes per step under b, the minimum, and 6.25G "
        "under a, the maximum; its collectives add up to 2G and 2G bytes"
    )
    begin = "with ring algorithms, a rank sends 1.5G bytes per step under"
    end = "; its collectives add up to 2G bytes"
    equal = [simulated("a", 1.5), simulated("b", 1.5)]
    assert traffic.answer(equal) == f"{begin} all 2 meshes{end}"
    assert traffic.answer([simulated("a", 1.5)]) == f"{begin} a{end}"


def test_table_and_report(monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "report.jsonl")
    flags = ["--ranks", "2", "--mesh", "ddp2,dp2", "--json", path]
    monkeypatch.setattr("sys.argv", ["traffic.py", *flags, *NANO])
    assert traffic.main() == 0
    out, err = capsys.readouterr()
    assert "# dp2, rank 0: dp, 2 ranks on 1 node: all_gather 10 x, 1.754M (bus 898.2K); " in out
    assert err == "# simulating ddp2, rank 0\n# simulating dp2, rank 0\n"
    runs = load_runs([path])
    assert page.where(runs[0]) == "ranks: 2, nodes: 1"
    (table,) = page.benchmark(runs).tables
    rows = {row[0]: list(row[1:]) for row in table.rows}
    assert rows["dp all gather bytes"] == ["-", "1.754M"]


def test_with_shapes_only_floats_have_no_memory_and_integers_are_real() -> None:
    """Afterwards, also after an error, everything is restored."""
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
def test_a_weight_is_split_as_by_torch(count: int) -> None:
    """If there are fewer rows than chunks, the last chunks are empty."""
    for rows in range(12):
        weight = torch.empty(3, rows)
        lengths = [chunk.shape[1] for chunk in traffic.chunks_alike(weight, count, 1)]
        expected = [chunk.shape[1] for chunk in weight.chunk(count, dim=1)]
        assert lengths == expected + [0] * (count - len(expected))


# -- times -----------------------------------------------------------------------------------------

Times = dict[tuple[str, Layout, str], dict[int, Estimate]]
NODE = {"gpus_per_node": 8}
MEASURED = {  # seconds by size: 1 ms plus 1 us per byte, +-10%
    size: Estimate(1e-3 + size * 1e-6, 0.9 * (1e-3 + size * 1e-6), 1.1 * (1e-3 + size * 1e-6))
    for size in (1000, 3000, 9000)
}


def simulated(calls: dict[traffic.Call, int], ranks: dict[str, list[int]]) -> traffic.Step:
    return traffic.Step(Counter(calls), ranks, {}, dict.fromkeys(calls, "float32"))


def test_a_step_takes_as_long_as_its_calls() -> None:
    """3 all-gathers of 2,000 bytes take 3 ms each, interpolated between 2 and 4 ms. On tp 2
    all-reduces of 9,000 bytes take 10 ms each. In a pipeline 4 sends and 3 receives of 1,000 bytes
    take 4 times 2 ms."""
    calls = {("dp", "all_gather", 2000): 3, ("tp", "all_reduce", 9000): 2}
    calls |= {("pp", "send", 1000): 4, ("pp", "recv", 1000): 3}
    step = simulated(calls, {"dp": [0, 2, 4, 6], "tp": [0, 1], "pp": [0, 8]})
    layouts = (("all_gather", (4,)), ("all_reduce", (2,)), ("sendrecv", (1, 1)))
    found = traffic.timed(NODE, step, {(*layout, "float32"): MEASURED for layout in layouts})
    expected = {"dp_s": 9e-3, "tp_s": 20e-3, "pp_s": 8e-3, "communication_s": 37e-3}
    assert {name: value.value for name, value in found.items()} == pytest.approx(expected)
    total = found["communication_s"]
    assert (total.low, total.high) == pytest.approx((0.9 * 37e-3, 1.1 * 37e-3))


def test_groups_of_one_rank_take_no_time() -> None:
    step = simulated({("dp", "all_gather", 2000): 3}, {"dp": [5]})
    found = traffic.timed(NODE, step, {("x", (2,), "float32"): MEASURED})
    assert found == {"dp_s": Estimate(0, 0, 0), "communication_s": Estimate(0, 0, 0)}


@pytest.mark.parametrize(
    ("ranks", "calls", "said", "start"),
    [
        # beyond the largest size, and two more unknown calls
        (
            [0, 1, 2, 3],
            {("dp", "all_gather", 9001): 1, ("dp", "all_gather", 20): 2},
            "(and 1 more): 8.79K bytes are outside the measured range, 1000 to 8.789K; measure it",
            "--nproc-per-node 4 benchmarks/collectives.py --collective all_gather -d float32 -b 16",
        ),
        # the same number of ranks, but two per node
        (
            [0, 1, 8, 9],
            {("dp", "all_gather", 2000): 1},
            "it was measured on 4 ranks of one host, not on 4 ranks of 2 hosts (2 each); measure",
            "--nnodes 2 --nproc-per-node 2 benchmarks/collectives.py --collective all_gather -d",
        ),
        # one rank on each node: one of eight rails
        (
            [0, 8],
            {("dp", "all_to_all", 2048): 1},
            "all_to_all of 2,048 bytes: it was not measured; measure it: torchrun",
            "--nnodes 2 --nproc-per-node 8 benchmarks/collectives.py --groups cross --collective",
        ),
        (
            [0, 1, 2, 8],
            {("dp", "all_reduce", 4): 1},
            "it was not measured",
            "--nnodes 2 --nproc-per-node 3 benchmarks/collectives.py --groups 0-2,3-3 ",
        ),
    ],
)
def test_no_extrapolation(ranks: list[int], calls: Any, said: str, start: str) -> None:
    step = simulated(calls, {"dp": ranks})
    found = traffic.timed(NODE, step, {("all_gather", (4,), "float32"): MEASURED})
    assert not {"dp_s", "communication_s"} & found.keys()
    assert said in found["dp_missing"]
    command = found["dp_missing"].partition("measure it: torchrun ")[2]
    assert command.startswith(start)
    words = command.partition("benchmarks/collectives.py ")[2].split()
    args = collectives.parse_args([*words, "--device", "cpu"])
    for _, _, size in calls:  # the size is within those of that command
        sizes = collectives.scan(args.minbytes, args.maxbytes, args.stepbytes, args.stepfactor)
        assert sizes[0] <= size <= sizes[-1]


def test_another_dtype_is_mentioned() -> None:
    step = simulated({("dp", "all_gather", 2000): 1}, {"dp": [0, 1]})
    step.dtypes["dp", "all_gather", 2000] = "bfloat16"
    alone: Times = {("all_gather", (2,), "float32"): MEASURED}
    found = traffic.timed(NODE, step, alone)
    metrics = found | {"dp_ranks": 2}
    case = Case(key={"mesh": "dp2"}, name="dp2, rank 0", ranks=[0], metrics=metrics)
    said = "dp2, rank 0: dp: all_gather was measured with float32, not with bfloat16"
    assert traffic.lines_of_times(case) == [said]
    alone["all_gather", (2,), "bfloat16"] = {2000: Estimate(7e-3)}
    assert traffic.timed(NODE, step, alone)["dp_s"] == Estimate(7e-3)


def swept_case(mesh: str, **more: Any) -> dict[str, Any]:
    """A case of parallel_sweep.py on 2 ranks, in which 30 ms (20 to 40) of dp are exposed."""
    key = {"mesh": mesh, "microbatches": 1, "model": "decoder-nano", "dtype": "fp32"}
    key |= {"sequence_length": 64, "global_batch": 4, "experts": 0, "world_size": 2}
    metrics = {"compute_s": estimate(0.05, 0.04, 0.06), "exposed_dp_s": estimate(0.03, 0.02, 0.04)}
    return reports.case(mesh, key=key | more, metrics=metrics)


def measured_case(collective: str, size: int, seconds: float, **more: Any) -> dict[str, Any]:
    key = {"collective": collective, "dtype": "float32", "size_bytes": size, "groups": "world"}
    key |= {"group_ranks": 2, "backend": "gloo", "device": "cpu"} | more
    metrics = {"in_place_time_s": estimate(seconds, 0.9 * seconds, 1.1 * seconds)}
    return reports.case(f"{collective} {size}", key=key, ranks=[0, 1], metrics=metrics)


def scan(path: Path, *names: str, **more: Any) -> str:
    """A report of collectives.py on 2 ranks: 1 ms at every size."""
    environment = {"ranks": [{"rank": rank, "host": "vm"} for rank in (0, 1)]}
    sizes = [2**k for k in range(2, 22, 2)]
    cases = [measured_case(name, size, 1e-3, **more) for name in names for size in sizes]
    return reports.write(path, *cases, benchmark="collectives", environment=environment)


def test_measured_and_against(monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path) -> None:
    """15 calls of FSDP at 1 ms each are half of the 30 ms that were exposed. Their interval is 13.5
    to 16.5 ms, so the interval of the ratio is 20 / 16.5 to 40 / 13.5."""
    first = scan(tmp_path / "a.jsonl", "all_gather")
    second = scan(tmp_path / "b.jsonl", "reduce_scatter")

    def run(*words: str) -> tuple[int, str]:
        command = ["traffic.py", "--ranks", "2", *NANO, "--mesh", "dp2", "--measured", first]
        monkeypatch.setattr("sys.argv", [*command, *words])
        return traffic.main(), capsys.readouterr().out

    def against(case: dict[str, Any], *words: str) -> str:
        path = reports.write(tmp_path / "s.jsonl", case, benchmark="parallel_sweep")
        status, out = run(second, "--against", path, *words)
        assert status == 0
        return out

    status, out = run()
    assert (status, "dp2, rank 0: no time for dp: reduce_scatter of " in out) == (1, True)
    out = against(swept_case("dp2"), "--json", str(tmp_path / "report.jsonl"))
    assert "# dp2, rank 0: the collectives of dp take 15.0 ms (13.5 to 16.5) alone; " in out
    assert "parallel_sweep.py measured 30.0 ms (20.0 to 40.0) as exposed: exposed / alone = " in out
    assert " = 2.00 (1.21 to 2.96)\n" in out
    assert out.endswith(
        "# one after the other, the collectives of a step take 15.0 ms (13.5 to 16.5) under dp2\n"
        "# the exposed time in parallel_sweep.py is "
        "2.00 times (1.21 to 2.96) the computed time for dp of dp2, rank 0\n"
    )
    (case,) = load(str(tmp_path / "report.jsonl")).cases
    assert case.metrics["dp_s"].value == pytest.approx(0.015)
    said = "not compared with parallel_sweep.py: global_batch 8 in the sweep, 4 here"
    assert said in against(swept_case("dp2", global_batch=8))
    none = swept_case("dp2")
    none["metrics"]["exposed_dp_s"] = estimate(0.01, -0.01, 0.03)
    assert " (-10.0 to 30.0) as exposed, which may be 0: no ratio\n" in against(none)
    # times of gloo and nccl cannot be mixed
    with pytest.raises(SystemExit):
        run(scan(tmp_path / "c.jsonl", "all_reduce", backend="nccl", device="cuda"))
    assert "expected reports of one backend, got gloo on cpu (" in capsys.readouterr().err
