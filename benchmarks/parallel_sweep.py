#!/usr/bin/env python3
"""Which mesh is best for this model on these devices, and what does each axis of it cost?

It trains one transformer with one global batch under every mesh, and times whole steps. A mesh is
a product of axes over all ranks, such as dp4tp2, dp2pp4:1f1b or dp2ep4:

    dp8       FSDP2 (fully_shard); dp2x4 is HSDP, 2 replicas of 4 shards; ddp8, by itself, is DDP
    tp8       tensor parallel, with sequence parallelism and loss_parallel
    pp8:1f1b  pipeline: gpipe, 1f1b, interleaved, or the zero-bubble izb and zbv
    cp8       context parallel by gathering keys and values; cp8:ring by context_parallel (CUDA)
    ep8       expert parallel: a block has 8 experts for its MLP, tokens go to them by all-to-all

Each axis is also timed without its communication: the same code runs, in alternating blocks, on a
twin of the mesh whose collectives return at once (torch's `fake` backend). A twin computes garbage.

    exposed(axis)  median over rounds of step - step with the axis fake
    compute        step with all axes fake
    idle           mean over the places of the pipeline of 1 - its step with pp fake / step
    theory         (p - 1) / (v m + p - 1): p places, v stages at each, m microbatches

    torchrun --nproc-per-node 4 benchmarks/parallel_sweep.py
    torchrun --nproc-per-node 8 benchmarks/parallel_sweep.py --model decoder-1.3b --dtype bf16 \\
        --mesh dp8,dp4tp2,dp2pp4:1f1b,dp2pp4:zbv,cp8 --json report.jsonl

The loss and the gradient's norm of 3 steps are checked against one process. How to read the table:
docs/parallel_sweep.md. BSD-3-Clause: copy the function of the axis that you need
from common/workloads/axes.py.
"""

import argparse
import importlib
import logging
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.answers import estimate_of, fastest, ranked, series, show_seconds
from common.check import verdict
from common.cli import Parser, add_common_flags, describe, list_of, positive_int
from common.environment import sharers
from common.groups import Group, Job, share
from common.memory import peak, reset_peak, start_peak
from common.old import Benchmark, Key, Workload
from common.report import Case
from common.stats import Times, step_metrics, straggler
from common.table import Columns, interval_ends, metric, relative
from common.timing import Step
from common.workloads.axes import DTYPES, create, is_expert, train
from common.workloads.decoder import DECODERS, flops_per_token, next_token_loss, random_text
from common.workloads.meshes import (
    EXPERTS,
    Mesh,
    config_of,
    default_meshes,
    misfit,
    open_meshes,
    parse_mesh,
)
from common.workloads.peaks import peak_flops
from common.workloads.reference import CHECKED_STEPS, Reference, compare_training, sgd, train_alone
from common.workloads.room import too_much

TOLERANCES = {"fp32": 2e-3, "bf16": 5e-2}  # of a loss or a norm, relative to the first one


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument
    meshes = "a list of meshes (default, with 4 ranks: dp4,tp4,dp2tp2,pp4:1f1b)"
    add("--mesh", type=list_of(parse_mesh), help=meshes)
    add("--model", choices=list(DECODERS), help="(default: decoder-124m, CPU decoder-nano)")
    dtype = "of weights, gradients and optimizer (default: fp32)"
    add("--dtype", choices=list(DTYPES), default="fp32", help=dtype)
    number = partial(add, type=positive_int, metavar="N")
    number("--global-batch", help="sequences of all ranks together (default: 8 a rank, CPU 4)")
    number("--sequence-length", help="tokens (default: the model's)")
    number("--microbatches", help="of a pipeline (default: 2 for each of its ranks)")
    add("--no-breakdown", action="store_true", help="time the steps only, without twins")
    add_common_flags(parser, max_seconds=3)
    return parser.parse_args(argv)


# -- a case: the model, its twins, the check -------------------------------------------------------


def train_reference(key: Key, device: torch.device) -> Reference | str:
    """The same training in one process, a sequence at a time; or why that failed."""
    tokens, targets = random_text(config_of(key), key["global_batch"], seed=0)
    rows = list(zip(tokens.to(device).split(1), targets.to(device).split(1), strict=True))
    weights = [1 / len(rows)] * len(rows)

    def loss_of(model: nn.Module, row: tuple[Tensor, Tensor]) -> Tensor:
        tokens, targets = row
        return next_token_loss(model(tokens), targets)

    try:
        return train_alone(create(key, device), rows, loss_of, weights)
    except RuntimeError as error:  # a model that needs several devices has none
        return f"one process alone fails: {describe(error)}"


def square_norm(model: nn.Module, mesh: Mesh) -> float:
    """This rank's part of |gradient|^2. Ranks that hold the same weight divide it among them."""
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
    """ranks_of_gpu: how many ranks share this rank's GPU."""
    mesh = parse_mesh(key["mesh"])
    with_twins = key.get("breakdown", True)
    before = start_peak(job.device)
    meshes = open_meshes(mesh, [], job, group)
    trainer = train(key, job, meshes, partial(sgd, lr=lr))
    losses: list[list[float]] = []
    norms: list[float] = []
    for _ in range(CHECKED_STEPS):
        reset_peak(job.device)  # leaves out the full model that the shards were cut from
        losses.append([loss.item() for loss in trainer.step()])
        memory = peak(job.device, before)  # before the norm, which gathers gradients
        norms.append(square_norm(trainer.model, mesh))
    facts = memory | {"losses": losses, "norms": norms}
    trainer.optimizer.param_groups[0]["lr"] = 0.0
    twins: dict[str, Step] = {}
    if with_twins:
        scatter_noise(key, job.device, ranks_of_gpu)
        for part, silent in parts_of(mesh).items():
            meshes = open_meshes(mesh, silent, job, group)
            twin = train(key, job, meshes, partial(sgd, lr=0.0))
            twins[part] = twin.step
    shown = [without(mesh, axis) for axis in mesh.axes] if with_twins else []
    launches = mesh.ep == 1  # ep's counts wait for the device
    return Workload(trainer.step, twins, compared=shown, facts=lambda: facts, launches=launches)


def scatter_noise(key: Key, device: torch.device, ranks_of_gpu: int) -> None:
    """Leave random numbers in the memory that twins will get. What a twin should have received is
    what was there before, and GPUs multiply zeros faster: they take less power.

    The ranks of a GPU together take a quarter of what is free.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        dtype = DTYPES[key["dtype"]]
        count = free // 4 // ranks_of_gpu // dtype.itemsize
        torch.randn(count, dtype=dtype, device=device)


def parts_of(mesh: Mesh) -> dict[str, list[str]]:
    """What is timed beside the step, and the axes that do not communicate in it.

    A mesh of one axis needs no part for that axis: without it nothing communicates.
    """
    parts = {without(mesh, axis): [axis] for axis in mesh.axes}
    return parts | {"compute": mesh.axes}


def without(mesh: Mesh, axis: str) -> str:
    """The name of the part in which this axis does not communicate."""
    return f"without {axis}" if len(mesh.axes) > 1 else "compute"


# -- what rank 0 makes of it -----------------------------------------------------------------------


def derive(
    reference: Reference | str, device: torch.device, case: Case, times: Times, facts: list[Any]
) -> None:
    """Fill in the metrics and the check."""
    key, m = case.key, case.metrics
    m |= step_metrics(times.each(), key["global_batch"])
    m["tokens_per_s"] = m["samples_per_s"] * key["sequence_length"]
    m["tokens_per_s_per_rank"] = m["tokens_per_s"] / key["world_size"]
    if device_flops := peak_flops(device, key["dtype"]):
        m["mfu"] = m["tokens_per_s_per_rank"] * flops_per_token(config_of(key)) / device_flops
    memory = [fact["memory_gib"] for fact in facts]
    m["memory_gib"] = max(memory)
    m["memory_min_gib"] = min(memory)
    if "memory_allocated_gib" in facts[0]:  # on CUDA
        m["memory_allocated_gib"] = max(fact["memory_allocated_gib"] for fact in facts)
    if "compute" in times.samples_s:
        m |= breakdown(parse_mesh(key["mesh"]), key["microbatches"], times)
    if isinstance(reference, str):
        case.check = f"skipped: {reference}"
    else:
        case.check = verdict(wrong_training(reference, facts, TOLERANCES[key["dtype"]]))


def wrong_training(reference: Reference, facts: list[Any], tolerance: float) -> str | None:
    """How the training of all ranks differs from that of one process, or None."""
    norms = np.sqrt(np.sum([fact["norms"] for fact in facts], axis=0))
    problem = compare_training("the gradient's norm", norms, reference.norms, tolerance)
    if problem:
        return problem
    losses = [fact["losses"] for fact in facts if fact["losses"][0]]  # [ranks, steps, microbatches]
    means = np.mean(losses, axis=(0, 2))
    wanted = np.mean(reference.losses, axis=1)
    return compare_training("the loss", means, wanted, tolerance)


def breakdown(mesh: Mesh, microbatches: int, times: Times) -> dict[str, Any]:
    """What each axis exposes, and how long each place of a pipeline computes and waits.

    A place is the ranks that have the same stages: one stage, or two, as the schedule says.
    """
    m: dict[str, Any] = {"compute_s": times.p50("compute")}
    for axis in mesh.axes:
        m[f"exposed_{axis}_s"], m[f"exposed_{axis}_ci95_s"] = times.exposed(without(mesh, axis))
    if slow := straggler(times.each("compute")):
        m["straggler_rank"], m["straggler_factor"] = slow
    if mesh.pp == 1:
        return m

    def place_medians(part: str) -> Any:
        """Seconds at each place of pp, [pp]. The slowest of the ranks at a place counts."""
        samples = times.each(part)  # [ranks, n]; pp is the outermost axis of the ranks
        slowest = samples.reshape(mesh.pp, -1, samples.shape[1]).max(axis=1)
        return np.median(slowest, axis=1)

    idle = 1 - place_medians(without(mesh, "pp")) / times.p50()
    slots = mesh.stages // mesh.pp * microbatches
    m["pipeline_idle"] = float(idle.mean())
    m["pipeline_idle_theory"] = (mesh.pp - 1) / (slots + mesh.pp - 1)
    m["stage_idle"] = idle.round(4).tolist()
    m["stage_compute_s"] = place_medians("compute").round(9).tolist()
    return m


def answer(cases: list[Case]) -> list[str]:
    """Which mesh is the fastest, and what each of its axes exposes."""
    sentences: list[str] = []
    for name, same in series(cases, ("mesh", "microbatches", "breakdown")).items():
        steps = ranked(same)
        if not steps:
            continue
        meshes = {case.key["mesh"]: step for case, step in reversed(steps)}
        sentences.append(name + fastest(meshes))
        case, step = steps[0]
        parts: list[str] = []
        for axis in parse_mesh(case.key["mesh"]).axes:
            exposed = estimate_of(case, f"exposed_{axis}_s", f"exposed_{axis}_ci95_s")
            if exposed:
                parts.append(f"{axis} exposes {exposed.beside(step.value)}")
        if parts:
            of_step = f"of a step's {show_seconds(step.value)} under {case.key['mesh']}"
            sentences.append(f"{name}{of_step} {', '.join(parts)}")
    return sentences


def places_line(case: Case) -> str | None:
    """`# pp2:1f1b, place by place: compute 1.0, 1.1 ms, idle 20%, 18%`; None without a pipeline."""
    if "stage_compute_s" not in case.metrics:
        return None
    compute = ", ".join(f"{seconds * 1e3:.1f}" for seconds in case.metrics["stage_compute_s"])
    idle = ", ".join(f"{fraction:.0%}" for fraction in case.metrics["stage_idle"])
    return f"# {case.key['mesh']}, place by place: compute {compute} ms, idle {idle}"


COLUMNS: Columns = {
    "mesh": lambda case: case.key["mesh"],
    "tokens/s": metric("tokens_per_s", digits=0),
    "95% ci\nof p50": relative("step_time_ci95_rel"),
    "tokens/s\n/rank": metric("tokens_per_s_per_rank", digits=0),
    "mfu\n(%)": metric("mfu", 100, 1),
    "memory\nmax (GiB)": metric("memory_gib", digits=3),
    "min\n(GiB)": metric("memory_min_gib", digits=3),
    "slowest\nrank": metric("straggler_rank", digits=0),
    "by\n(x)": metric("straggler_factor"),
    "idle\n(%)": metric("pipeline_idle", 100, 0),
    "theory\n(%)": metric("pipeline_idle_theory", 100, 0),
    "step\n(ms)": metric("step_time_p50_s", 1e3, 1),
    "compute\n(ms)": metric("compute_s", 1e3, 1),
}


def columns_of(meshes: list[Mesh]) -> Columns:
    """COLUMNS, and two for the exposed communication of each axis that a mesh has."""
    columns = dict(COLUMNS)
    for mesh in meshes:
        for axis in mesh.axes:
            columns[f"exposed\n{axis} (ms)"] = metric(f"exposed_{axis}_s", 1e3, 1)
            columns[f"\n{axis} 95% ci (ms)"] = interval_ends(f"exposed_{axis}_ci95_s", 1e3, 1)
    return columns


def title_of(key: Key, microbatches: int | None) -> str:
    """The settings that all meshes share. microbatches: those that the user gave."""
    words = [
        key["model"],
        f"{key['sequence_length']} tokens",
        f"global batch {key['global_batch']}",
        key["dtype"],
        "SGD",
    ]
    if key["experts"]:
        words.append(f"{key['experts']} experts")
    if microbatches:
        words.append(f"{microbatches} microbatches in a pipeline")
    return ", ".join(words)


def plan(args: argparse.Namespace, meshes: list[Mesh], cuda: bool, place: Key) -> list[Key]:
    """The key of each mesh. place: world size, device and backend."""
    model = args.model or ("decoder-124m" if cuda else "decoder-nano")
    with_experts = any(mesh.ep > 1 for mesh in meshes)
    shared = {
        "model": model,
        "dtype": args.dtype,
        "sequence_length": args.sequence_length or DECODERS[model].context,
        "global_batch": args.global_batch or (8 if cuda else 4) * place["world_size"],
        "experts": EXPERTS if with_experts else 0,
        **place,
    }
    if args.no_breakdown:  # a key without this field has a breakdown, as in older reports
        shared["breakdown"] = False
    keys = []
    for mesh in meshes:
        in_pipeline = args.microbatches or 2 * mesh.pp
        microbatches = in_pipeline if mesh.pp > 1 else 1
        keys.append({"mesh": mesh.name, "microbatches": microbatches, **shared})
    return keys


def too_long(key: Key, job: Job, environment: dict[str, Any]) -> str | None:
    """Why the texts have no room, or None. Each rank makes all tokens and targets, of 8 bytes."""
    needed = 2 * 8 * key["sequence_length"] * key["global_batch"]
    return too_much(needed, job, environment, "--sequence-length or --global-batch")


def main() -> int:
    args = parse_args()
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # the check gathers
    # registers a backend `fake` whose collectives return at once; seen with torch 2.11, 2.14, 2.15
    importlib.import_module("torch.testing._internal.distributed.fake_pg")
    torch.set_flush_denormal(True)  # a twin's garbage must not be slow to compute with
    with Benchmark("parallel_sweep", args, answer=answer) as bench:
        job = bench.job
        meshes = args.mesh or [parse_mesh(name) for name in default_meshes(job.world_size)]
        keys = plan(args, meshes, job.device.type == "cuda", bench.place)
        problems = [misfit(key) for key in keys]
        problems.append(share(too_long(keys[0], job, bench.report.environment)))
        for problem in problems:
            if problem:
                bench.refuse(problem)
        bench.announce(keys)
        longest = max((mesh.name for mesh in meshes), key=len)
        bench.begin_table(title_of(keys[0], args.microbatches), columns_of(meshes), [longest])
        reference = share(train_reference(keys[0], job.device) if job.rank == 0 else None)
        lr = 0.0
        if isinstance(reference, str):
            bench.print(f"# not checked: {reference}")
        else:
            lr = reference.lr
        begin = partial(build, lr, job, sharers(bench.report.environment, job.rank))
        end = partial(derive, reference, job.device)
        cases: list[Case] = []  # on rank 0; the other ranks have none
        for key in keys:
            case = bench.measure(key, begin, end)
            if case:
                cases.append(case)
        lines = [line for line in map(places_line, cases) if line]
        if lines:
            bench.print("\n" + "\n".join(lines))
    return bench.status


if __name__ == "__main__":
    sys.exit(record(main)())
