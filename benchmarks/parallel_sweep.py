#!/usr/bin/env python3
"""Which mesh trains a model fastest on these devices, and what does each of its axes cost?

Trains one transformer with one global batch under every mesh, and times whole steps. A mesh is a
product of axes over all ranks, such as dp4tp2, dp2pp4:1f1b or dp2ep4:

    dp8       FSDP2 (fully_shard); dp2x4 is HSDP, 2 replicas of 4 shards; ddp8, on its own, is DDP
    tp8       tensor parallelism, with sequence parallelism and loss_parallel
    pp8:1f1b  pipeline parallelism: gpipe, 1f1b, interleaved, or izb and zbv (zero-bubble)
    cp8       context parallelism that gathers keys and values; cp8:ring is context_parallel (CUDA)
    ep8       expert parallelism: one block has 8 experts instead of an MLP, reached by all-to-all

Each axis is also timed without its communication: in alternating blocks, the same code runs on a
twin of the mesh whose collectives return at once (torch's `fake` backend). A twin computes garbage.

    exposed(axis) = step - step without the axis, i.e. with fake collectives on that axis
    compute       = step with fake collectives on all axes
    busy          = step without pp, averaged over the pipeline ranks
    idle          = 1 - busy / step
    theory        = (p - 1) / (v m + p - 1): p pipeline ranks, v stages on each, m microbatches
    gmean         = geometric mean over rounds of block medians

    torchrun --nproc-per-node 4 benchmarks/parallel_sweep.py
    torchrun --nproc-per-node 8 benchmarks/parallel_sweep.py --model decoder-1.3b --dtype bf16 \\
        --mesh dp8,dp4tp2,dp2pp4:1f1b,dp2pp4:zbv,cp8 --json report.jsonl

The loss and the gradient norm of 3 steps are checked against training in one process. To copy the
code of an axis, see benchmarks/workloads/axes.py. Written for this project, BSD-3-Clause.
"""

import argparse
import importlib
import logging
import os
import sys
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness import cli, exits

# Set before torch is imported: otherwise c10d's warnings about a pipeline's first sends interrupt
# the table.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

exits.report_missing_packages()

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.tensor import DTensor

from benchmarks.workloads.check import verdict
from benchmarks.workloads.decoder import (
    DECODERS,
    DTYPES,
    flops_per_token,
    next_token_loss,
    random_text,
)
from benchmarks.workloads.memory import peak, reset_peak, start_peak
from benchmarks.workloads.meshes import (
    EXPERTS,
    Mesh,
    config_of,
    default_meshes,
    misfit,
    open_meshes,
    parse_mesh,
    refuse_without_backends,
)
from benchmarks.workloads.reference import (
    CHECKED_STEPS,
    Reference,
    compare_training,
    sgd,
    train_alone,
)
from benchmarks.workloads.room import check_room, sharers
from benchmarks.workloads.settings import SEQUENTIAL
from benchmarks.workloads.training import (
    LATE,
    late_ranks,
    late_text,
    slowest_ranks,
    training_metrics,
)
from common.groups import Group, Job
from common.stats import Estimate, Times, show_seconds
from common.table import Columns, ends, metric, relative
from common.timing import Step, Workload
from harness.benchmark import Benchmark, Implausible, Key, Planned, Sentence
from harness.environment import rank_names
from harness.report import Case

TOLERANCES = {"fp32": 2e-3, "bf16": 5e-2}  # of a loss or a norm, relative to that of the first step
# Peak TFLOP/s in fp32 and bf16 of dense matrix products accumulated in fp32, from NVIDIA's
# datasheets, by the GPU's full name without "NVIDIA ". A MIG instance has a longer name.
PEAKS: dict[str, tuple[float, float]] = {
    "A100-SXM4-40GB": (19.5, 312),
    "A100-SXM4-80GB": (19.5, 312),
    "A100-PCIE-40GB": (19.5, 312),
    "A100 80GB PCIe": (19.5, 312),
    "A10": (31.2, 125),
    "L4": (30.3, 121),
    "L40S": (91.6, 362.05),
    "H100 80GB HBM3": (66.9, 989.4),
    "H100 PCIe": (51.2, 756),
    "H100 NVL": (60, 835.5),
    "H200": (67, 989.5),
    "B200": (75, 2250),  # of HGX
    "GB200": (80, 2500),  # of NVL72
}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = cli.Parser(__doc__)
    add = parser.add_argument
    add(
        "--mesh",
        type=cli.list_of(parse_mesh),
        help="meshes to measure (default with 4 ranks: dp4,tp4,dp2tp2,pp4:1f1b)",
    )
    models = cli.PerDevice("decoder-124m", "decoder-nano")
    add(
        "--model",
        choices=list(DECODERS),
        default=models,
        help="transformer to train (default: %(default)s)",
    )
    add(
        "--dtype",
        choices=list(DTYPES),
        default="fp32",
        help="dtype of weights, gradients and optimizer state (default: %(default)s)",
    )
    number = partial(add, type=cli.positive_int, metavar="N")
    number(
        "--global-batch",
        help="sequences per step over all ranks (default: 8 per rank, 4 on the CPU)",
    )
    number("--sequence-length", help="tokens per sequence (default: the model's)")
    number("--microbatches", help="microbatches of a pipeline (default: 2 per pipeline rank)")
    add("--no-breakdown", action="store_true", help="time the steps only, without twins")
    cli.add_common_flags(parser, max_seconds=3)
    args = parser.parse_args(argv)
    refuse_without_backends(parser)
    return args


# -- a case: the model, its twins, the check -------------------------------------------------------


def train_reference(key: Key, device: torch.device) -> Reference | str:
    """The same training in one process, one sequence at a time; or why that failed."""
    from benchmarks.workloads.axes import create  # slow to import, so not for --help

    tokens, targets = random_text(config_of(key), key["global_batch"], seed=0)
    rows = list(zip(tokens.to(device).split(1), targets.to(device).split(1), strict=True))
    weights = [1 / len(rows)] * len(rows)

    def loss_of(model: nn.Module, row: tuple[Tensor, Tensor]) -> Tensor:
        tokens, targets = row
        return next_token_loss(model(tokens), targets)

    try:
        return train_alone(create(key, device), rows, loss_of, weights)
    except RuntimeError as error:  # the model may be too large for one device
        return f"the reference, in one process, fails: {exits.describe(error)}"


def square_norm(model: nn.Module, mesh: Mesh) -> float:
    """This rank's contribution to |gradient|^2, such that the sum over all ranks counts every
    weight once."""
    from benchmarks.workloads.axes import is_expert

    total = 0.0
    for name, weight in model.named_parameters():
        gradient: Any = weight.grad
        if isinstance(gradient, DTensor):
            gradient = gradient.full_tensor()
        holders = mesh.data * mesh.tp
        if is_expert(name):
            holders //= mesh.ep
        square = gradient.float().square().sum()
        total += float(square) / holders
    return total


def build(lr: float, job: Job, ranks_of_gpu: int, key: Key, group: Group) -> Workload:
    """The workload of a case: the step of a mesh, and those of its twins.

    ranks_of_gpu: number of ranks that share this rank's GPU.
    """
    from benchmarks.workloads.axes import train

    mesh = parse_mesh(key["mesh"])
    before = start_peak(job.device)
    meshes = open_meshes(mesh, [], job, group)
    trainer = train(key, job, meshes, partial(sgd, lr=lr))
    losses: list[list[float]] = []
    norms: list[float] = []
    for _ in range(CHECKED_STEPS):
        reset_peak(job.device)  # excludes the full model, from which the shards were cut
        losses.append([loss.item() for loss in trainer.step()])
        memory = peak(job.device, before)  # read before the norm, which gathers gradients
        norms.append(square_norm(trainer.model, mesh))
    trainer.optimizer.param_groups[0]["lr"] = 0.0
    twins: dict[str, Step] = {}
    compared: list[str] = []
    if key["breakdown"]:
        scatter_noise(key, job.device, ranks_of_gpu)
        for part, silent in parts_of(mesh).items():
            meshes = open_meshes(mesh, silent, job, group)
            twins[part] = train(key, job, meshes, partial(sgd, lr=0.0)).step
        compared = [without(mesh, axis) for axis in mesh.axes]
    return Workload(
        trainer.step,
        twins,
        compared,
        facts=lambda: memory | {"losses": losses, "norms": norms},
        launches=mesh.ep == 1,  # with ep the host waits for the token counts of the experts
    )


def scatter_noise(key: Key, device: torch.device, ranks_of_gpu: int) -> None:
    """Fill memory that the twins will allocate with random numbers, on CUDA.

    A buffer that a twin should have received keeps its old contents, and GPUs multiply zeros
    faster, because that consumes less power. All ranks of a GPU together fill a quarter of its free
    memory.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        dtype = DTYPES[key["dtype"]]
        count = free // 4 // ranks_of_gpu // dtype.itemsize
        torch.randn(count, dtype=dtype, device=device)


def parts_of(mesh: Mesh) -> dict[str, list[str]]:
    """The parts that are timed with the step, and the axes that do not communicate in each.

    In a mesh with one axis, the part without that axis is `compute`.
    """
    parts = {without(mesh, axis): [axis] for axis in mesh.axes}
    return parts | {"compute": mesh.axes}


def without(mesh: Mesh, axis: str) -> str:
    """Name of the part in which this axis does not communicate."""
    return f"without {axis}" if len(mesh.axes) > 1 else "compute"


# -- metrics and check, on rank 0 ------------------------------------------------------------------


def peak_flops(device: torch.device, dtype: str) -> float | None:
    """Peak FLOP/s of the device; None on the CPU and for a GPU that is not in PEAKS."""
    if device.type != "cuda":
        return None
    peaks = PEAKS.get(torch.cuda.get_device_name(device).removeprefix("NVIDIA "))
    return peaks[dtype == "bf16"] * 1e12 if peaks else None


def derive(
    reference: Reference | str, device: torch.device, case: Case, times: Times, facts: list[Any]
) -> None:
    """Fill in the metrics and the check."""
    key, metrics = case.key, case.metrics
    metrics |= training_metrics(times, key["global_batch"])
    metrics["tokens_per_s"] = metrics["samples_per_s"] * key["sequence_length"]
    metrics["tokens_per_s_per_rank"] = metrics["tokens_per_s"] / len(case.ranks)
    if device_flops := peak_flops(device, key["dtype"]):
        flops_per_s = metrics["tokens_per_s_per_rank"] * flops_per_token(config_of(key))
        metrics["mfu"] = flops_per_s / device_flops
    memory = [fact["memory_gib"] for fact in facts]
    metrics["memory_gib"] = max(memory)
    metrics["memory_min_gib"] = min(memory)
    if "memory_allocated_gib" in facts[0]:  # on CUDA
        metrics["memory_allocated_gib"] = max(fact["memory_allocated_gib"] for fact in facts)
    if "compute" in times:
        metrics |= breakdown(parse_mesh(key["mesh"]), key["microbatches"], times)
    case.check = check(reference, facts, TOLERANCES[key["dtype"]])


def check(reference: Reference | str, facts: list[Any], tolerance: float) -> str:
    """Whether all ranks together produce the losses and gradient norms of one process."""
    if isinstance(reference, str):
        return f"skipped: {reference}"
    norms = np.sqrt(np.sum([fact["norms"] for fact in facts], axis=0))
    if problem := compare_training("the gradient's norm", norms, reference.norms, tolerance):
        return verdict(problem)
    losses = [fact["losses"] for fact in facts if fact["losses"][0]]  # [ranks, steps, microbatches]
    means = np.mean(losses, axis=(0, 2))
    wanted = np.mean(reference.losses, axis=1)
    return verdict(compare_training("the loss", means, wanted, tolerance))


def breakdown(mesh: Mesh, microbatches: int, times: Times) -> dict[str, Any]:
    """The exposed time of each axis, and the busy and idle time of each pipeline rank.

    A pipeline rank stands for all ranks that have the same stages: one or two, depending on the
    schedule.
    """
    metrics: dict[str, Any] = {"compute_s": times.mean("compute")}
    for axis in mesh.axes:
        metrics[f"without_{axis}_s"] = times.mean(without(mesh, axis))
        metrics[f"exposed_{axis}_s"] = times.excess_over(without(mesh, axis))
    if late := late_among_peers(mesh, times):
        metrics["late_ranks"], metrics["late_wait_s"] = late
    if mesh.pp == 1:
        return metrics

    def by_pipeline_rank(part: str) -> list[Any]:
        """Seconds of each pipeline rank, [n]: those of its slowest rank. pp is the outer axis."""
        return [ranks.max(axis=0) for ranks in np.split(times.each(part), mesh.pp)]

    def with_busy(seconds: Any) -> Times:
        return Times({"step": times.each(), "busy": [seconds]}, times.rounds)

    busy_s = by_pipeline_rank(without(mesh, "pp"))
    average = with_busy(np.mean(busy_s, axis=0))
    metrics["pipeline_busy_s"] = average.mean("busy")
    metrics["pipeline_idle"] = 1 - average.ratio("busy")
    slots = mesh.stages // mesh.pp * microbatches
    metrics["pipeline_idle_theory"] = (mesh.pp - 1) / (slots + mesh.pp - 1)
    metrics["stage_busy_s"] = [with_busy(seconds).mean("busy") for seconds in busy_s]
    metrics["stage_compute_s"] = [with_busy(s).mean("busy") for s in by_pipeline_rank("compute")]
    metrics["stage_idle"] = [1 - with_busy(seconds).ratio("busy") for seconds in busy_s]
    return metrics


def late_among_peers(mesh: Mesh, times: Times) -> tuple[list[int], Estimate] | None:
    """The late ranks (see `late_ranks`) among those with equal work: of the pipeline rank whose
    ranks wait longest, because its stages may differ from those of the others."""
    by_rank, least_s, found = times.each("compute"), LATE * times.mean().value, []
    for peers in np.split(np.arange(len(by_rank)), mesh.pp):  # pp is the outermost axis
        if late := late_ranks(by_rank[peers], times.rounds, least_s):
            found.append(([int(peers[row]) for row in late[0]], late[1]))
    return max(found, key=lambda late: late[1].value, default=None)


# -- tables and answers ----------------------------------------------------------------------------


def answer(cases: list[Case], names: Sequence[str] = ()) -> list[Sentence]:
    """The step time under each mesh, the exposed time of each axis in the shortest step, and its
    late ranks. names: of all ranks, with their hosts, if known."""
    ordered = sorted(cases, key=lambda case: case.metrics["step_s"].value)
    steps = [f"{case.metrics['step_s']} under {case.name}" for case in ordered]
    in_turn = f"; {SEQUENTIAL}" if len(steps) > 1 else ""
    sentences: list[Sentence] = [f"a step takes {', '.join(steps)}{in_turn}"]
    first, metrics = ordered[0].name, ordered[0].metrics
    if "compute_s" in metrics and (axes := parse_mesh(first).axes):
        step_s = metrics["step_s"].value
        exposed = {axis: metrics[f"exposed_{axis}_s"] for axis in axes}
        parts = [f"{axis} adds {seconds.part_of(step_s)}" for axis, seconds in exposed.items()]
        sentence = f"under {first}, the communication of {' and that of '.join(parts)} "
        sentence += f"to a step, which takes {show_seconds(step_s)}"
        cannot = any((seconds / metrics["step_s"]).above(1) for seconds in exposed.values())
        sentences.append(Implausible(sentence) if cannot else sentence)
    if late := late_text(ordered[0], names):
        sentences.append(f"under {first}, {late}")
    return sentences


def pipeline_lines(case: Case) -> list[str]:
    """`# pp2:1f1b, pp rank 0 computes for 20.3 ms (19.9 to 21.1), is busy for 22.0 ms (21.1 to
    23.0) of a step's 33.0 ms, and is idle for 33% (30 to 36) of it`, ..."""
    lines, metrics = [], case.metrics
    for rank, compute_s in enumerate(metrics.get("stage_compute_s", [])):
        computes = f"# {case.name}, pp rank {rank} computes for {compute_s}"
        step = f"a step's {show_seconds(metrics['step_s'].value)}"
        busy = f"is busy for {metrics['stage_busy_s'][rank]} of {step}"
        idle = f"is idle for {metrics['stage_idle'][rank].text('%', 100, 0)} of it"
        lines.append(f"{computes}, {busy}, and {idle}")
    return lines


FIRST_COLUMNS: Columns = {
    "mesh": lambda case: case.name,
    "tokens/s": metric("tokens_per_s", digits=0),
    "95% ci\nof step": relative("step_s"),
    "step\ngmean (ms)": metric("step_s", 1e3, 1),
}
LAST_COLUMNS: Columns = {
    "compute\ngmean (ms)": metric("compute_s", 1e3, 1),
    "\n95% ci": relative("compute_s"),
    "busy\ngmean (ms)": metric("pipeline_busy_s", 1e3, 1),
    "idle\n(%)": metric("pipeline_idle", 100, 0),
    "95% ci\n(%)": ends("pipeline_idle", 100, 0),
    "theory\n(%)": metric("pipeline_idle_theory", 100, 0),
    "tokens/s\n/rank": metric("tokens_per_s_per_rank", digits=0),
    "mfu\n(%)": metric("mfu", 100, 1),
    "slowest\nrank": slowest_ranks,
    "others\nwait (ms)": metric("late_wait_s", 1e3),
    "95% ci\n(ms)": ends("late_wait_s", 1e3, 1),
    "memory\nmax (GiB)": metric("memory_gib", digits=3),
    "min\n(GiB)": metric("memory_min_gib", digits=3),
}


def columns_of(meshes: list[Mesh]) -> Columns:
    """All columns, with three for the exposed communication of each axis that occurs."""
    columns = dict(FIRST_COLUMNS)
    for mesh in meshes:
        for axis in mesh.axes:
            columns[f"without\n{axis}, gmean\n(ms)"] = metric(f"without_{axis}_s", 1e3, 1)
            columns[f"exposed\n{axis} (ms)"] = metric(f"exposed_{axis}_s", 1e3, 1)
            columns[f"\n{axis} 95% ci (ms)"] = ends(f"exposed_{axis}_s", 1e3, 1)
    return columns | LAST_COLUMNS


def title_of(key: Key, microbatches: int | None) -> str:
    """The settings that all meshes share. microbatches: as given by the user, otherwise None."""
    tokens, batch = f"{key['sequence_length']} tokens", f"global batch {key['global_batch']}"
    words = [key["model"], tokens, batch, key["dtype"], "SGD"]
    if key["experts"]:
        words.append(f"{key['experts']} experts")
    if microbatches:
        words.append(f"{microbatches} microbatches in a pipeline")
    return ", ".join(words)


# -- the plan: which cases are measured ------------------------------------------------------------


def plan(args: argparse.Namespace, meshes: list[Mesh], job: Job) -> tuple[str, list[Planned]]:
    """The title of the table and its cases, one per mesh, each on all ranks."""
    sequences = 8 if job.device.type == "cuda" else 4  # per rank
    shared = {
        "model": args.model,
        "dtype": args.dtype,
        "sequence_length": args.sequence_length or DECODERS[args.model].context,
        "global_batch": args.global_batch or sequences * job.world_size,
        "experts": EXPERTS if any(mesh.ep > 1 for mesh in meshes) else 0,
        "breakdown": not args.no_breakdown,
    }
    cases: list[Planned] = []
    for mesh in meshes:
        microbatches = (args.microbatches or 2 * mesh.pp) if mesh.pp > 1 else 1
        key = {"mesh": mesh.name, "microbatches": microbatches, **shared}
        cases.append(Planned(mesh.name, job.world_size, key))
    return title_of(shared, args.microbatches), cases


def main() -> int:
    args = parse_args()
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    # the check gathers gradients, which DTensor warns about
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    # torch 2.15 recommends another backend once per run; see docs/parallel_sweep.md
    logging.getLogger("torch.distributed.pipelining").setLevel(logging.ERROR)
    # registers the backend `fake`, whose collectives return at once. Private API; works in
    # torch 2.11, 2.14 and 2.15
    importlib.import_module("torch.testing._internal.distributed.fake_pg")
    torch.set_flush_denormal(True)  # arithmetic on the garbage of a twin must not be slower
    with Benchmark("parallel_sweep", args) as bench:
        job, environment = bench.job, bench.report.environment
        meshes = args.mesh or [parse_mesh(name) for name in default_meshes(job.world_size)]
        title, cases = plan(args, meshes, job)
        first = cases[0].key
        place = {"world_size": job.world_size, "device": job.device.type, "backend": job.backend}
        for case in cases:
            if problem := misfit(case.key | place):
                bench.refuse(problem)
        needed = 2 * 8 * first["sequence_length"] * first["global_batch"]  # tokens and targets
        flags = "--sequence-length or --global-batch"
        bench.prepare("--global-batch", partial(check_room, needed, job, environment, flags))
        bench.announce({title: cases})
        reference = job.broadcast(train_reference(first, job.device) if job.rank == 0 else None)
        lr = reference.lr if isinstance(reference, Reference) else 0.0
        begin = partial(build, lr, job, sharers(environment, job.rank))
        end = partial(derive, reference, job.device)
        names = rank_names(environment)

        def tell(cases: list[Case]) -> list[Sentence]:
            # an earlier run, which --resume continues, may have had other hosts
            return answer(cases, () if any(map(bench.report.is_earlier, cases)) else names)

        table = bench.run(title, cases, columns_of(meshes), begin, end, tell)
        lines = [line for case in table.passed for line in pipeline_lines(case)]
        if lines:
            bench.print("\n" + "\n".join(lines))
    return bench.status


if __name__ == "__main__":
    sys.exit(record(main)())
