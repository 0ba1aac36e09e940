#!/usr/bin/env python3
"""Which mesh is best for this model on these devices, and what does each axis of it cost?

Trains one transformer with one global batch under every mesh, and times whole steps. A mesh is a
product of axes over all ranks, as dp4tp2, dp2pp4:1f1b or dp2ep4:

    dp8       FSDP2 (fully_shard); dp2x4 is HSDP, 2 replicas of 4 shards; ddp8, by itself, is DDP
    tp8       tensor parallel, with sequence parallelism and loss_parallel
    pp8:1f1b  pipeline: gpipe, 1f1b, interleaved, or the zero-bubble izb and zbv
    cp8       context parallel by gathering keys and values; cp8:ring by context_parallel (CUDA)
    ep8       expert parallel: a block has 8 experts for its MLP, tokens go to them by all-to-all

Each axis is also timed without its communication: the same code, in alternating blocks, on a twin
of the mesh whose collectives return at once (torch's `fake` backend). What it computes is garbage.

    exposed(axis)  median over rounds of step - step with the axis fake
    compute        step with all axes fake
    idle           mean over the pipeline's stages of 1 - its step with pp fake / step
    theory         (p - 1) / (v m + p - 1): p ranks, v stages on each, m microbatches

    torchrun --nproc-per-node 4 benchmarks/parallel_sweep.py
    torchrun --nproc-per-node 8 benchmarks/parallel_sweep.py --model decoder-1.3b --dtype bf16 \\
        --mesh dp8,dp4tp2,dp2pp4:1f1b,dp2pp4:zbv,cp8 --json report.jsonl

Loss and gradient norm of 3 steps are checked against one process. How to read the table:
docs/parallel_sweep.md. BSD-3-Clause: copy the function of the axis you need.
"""

import argparse
import logging
import math
import re
import sys
import warnings
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor import parallel as tp
from torch.distributed.tensor.experimental import context_parallel
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.benchmark import Benchmark, Workload
from common.check import CHECKED_STEPS, Reference, compare_training, sgd, train_alone, verdict
from common.cli import Parser, add_common_flags, describe, list_of, positive_int, wrong
from common.decoder import DECODERS, Decoder, Experts, flops_per_token, next_token_loss, random_text
from common.dist import Group, Job, share
from common.memory import peak, start_peak, too_much
from common.peaks import peak_flops
from common.private_torch import (
    TORCH_2_15,
    all_to_all_with_gradient,
    forget_groups,
    register_fake_backend,
)
from common.report import Case
from common.stats import Times, step_metrics, straggler
from common.table import Columns, interval_ends, metric, relative
from common.timing import Step

Key = dict[str, Any]
AXES = ("pp", "dp", "cp", "ep", "tp")  # outermost first: neighbours talk most
SCHEDULES: dict[str, tuple[Any, int]] = {  # with the stages on a rank
    "gpipe": (pipelining.ScheduleGPipe, 1),
    "1f1b": (pipelining.Schedule1F1B, 1),
    "interleaved": (pipelining.ScheduleInterleaved1F1B, 2),
    "izb": (pipelining.ScheduleInterleavedZeroBubble, 2),
    "zbv": (pipelining.ScheduleZBVZeroBubble, 2),
}
EXPERTS = 8
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TOLERANCES = {"fp32": 2e-3, "bf16": 5e-2}  # of loss and norm, over the first one

# -- one function an axis: torch's public API, to copy ---------------------------------------------


def data_parallelize(model: Decoder, dp: DeviceMesh, how: str) -> Any:
    """FSDP2, a unit for each block; a 2-D mesh is HSDP. Or DDP: every rank has all weights."""
    if how == "ddp":
        ddp = DistributedDataParallel(model, process_group=dp.get_group())
        if dist.get_backend(dp.get_group()) == "fake":  # whose futures DDP cannot use
            ddp.register_comm_hook(None, noop_hook)
        return ddp
    for unit in (*model.blocks, model):  # a pipeline keeps the weights for its next microbatch
        fully_shard(unit, mesh=dp, reshard_after_forward=how not in SCHEDULES)
    return model


def tensor_parallelize(model: Decoder, mesh: DeviceMesh) -> None:
    """Split heads, hidden units and words; between them each rank has a part of the sequence."""
    part, whole = Shard(1), Replicate()
    plan = {
        "tokens": tp.RowwiseParallel(input_layouts=whole, output_layouts=part),
        "blocks.*.attention_norm": tp.SequenceParallel(),
        "blocks.*.attention": tp.PrepareModuleInput(
            input_layouts=(part, None), desired_input_layouts=(whole, None)
        ),
        "blocks.*.attention.[qkv]": tp.ColwiseParallel(),
        "blocks.*.attention.o": tp.RowwiseParallel(output_layouts=part),
        "blocks.*.mlp_norm": tp.SequenceParallel(),
        "blocks.*.mlp": tp.PrepareModuleInput(input_layouts=part, desired_input_layouts=whole),
        "blocks.*.mlp.up": tp.ColwiseParallel(),
        "blocks.*.mlp.down": tp.RowwiseParallel(output_layouts=part),
        "norm": tp.SequenceParallel(),
        # each rank gets the logits of its words
        "head": tp.ColwiseParallel(input_layouts=part, use_local_output=False),
    }
    tp.parallelize_module(model, mesh, plan)


def context_parallelize(model: Decoder, cp: DeviceMesh) -> None:
    """Each rank has a part of every sequence, and gathers the keys and values of all of it."""
    everywhere = torch.arange(model.config.context, device=cp.device_type)
    here = everywhere.chunk(cp.size())[cp.get_local_rank()]
    seen = here[:, None] >= everywhere
    for buffer in model.buffers():  # the rotation and the expert of each position
        buffer.data = buffer[here]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kv = DTensor.from_local(torch.stack((k, v)), cp, [Shard(3)], run_check=False)
        k, v = kv.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)

    for block in model.blocks:
        block.get_submodule("attention").attend = attend  # type: ignore[assignment]


def expert_parallelize(model: Decoder, ep: DeviceMesh, same: DeviceMesh) -> None:
    """Each rank keeps some of the experts; tokens go to theirs by all-to-all, and back.

    The ranks have the same numbers of tokens for each. same: those that keep the same experts.
    """
    [moe] = [module for module in model.modules() if isinstance(module, Experts)]
    ranks, here, group = ep.size(), ep.get_local_rank(), ep.get_group()
    moe.each = moe.each[here * moe.count // ranks : (here + 1) * moe.count // ranks]
    fully_shard([*moe.each], mesh=same)
    compute_here, swap = moe.compute, all_to_all_with_gradient

    def compute(tokens: Tensor, counts: Tensor) -> Tensor:
        of_ranks = counts.view(ranks, -1)
        there = of_ranks.sum(1).tolist()
        back = [there[here]] * ranks
        mine = swap(tokens, back, there, group).unflatten(0, (ranks, -1))  # [from, token, width]
        return swap(compute_here(mine, of_ranks[here]).flatten(0, 1), there, back, group)

    moe.compute = compute  # type: ignore[method-assign]


def cut(model: Decoder, stage: int, stages: int) -> None:
    """Leave a stage of a pipeline: its blocks; tokens in the first, norm and head in the last."""
    count = len(model.blocks) // stages
    model.blocks = model.blocks[stage * count : (stage + 1) * count]
    if stage > 0:
        model.tokens = nn.Identity()
    if stage < stages - 1:
        model.norm, model.head = nn.Identity(), nn.Identity()


def pipeline(
    models: dict[int, Any], pp: DeviceMesh, mesh: "Mesh", parts: int, tokens: Tensor, loss_of: Any
) -> Any:
    """The schedule of this rank's stages. tokens: of all `parts` microbatches."""
    first = next(iter(models.values()))
    # torch can find out the shapes between stages by itself, but not over a fake group
    text = tokens.chunk(parts)[0].to("meta")
    meta = partial(text.new_empty, dtype=next(first.parameters()).dtype, requires_grad=True)
    hidden = meta((len(text), text.shape[1] // mesh.tp, first.config.width))
    logits = meta((*text.shape, first.config.vocab))
    stages = []
    for i, model in models.items():
        shapes = (text if i == 0 else hidden, logits if i == mesh.stages - 1 else hidden)
        place = (i, mesh.stages, tokens.device)
        stages.append(pipelining.PipelineStage(model, *place, *shapes, group=pp.get_group()))
    schedule, on_a_rank = SCHEDULES[mesh.how]
    return schedule(stages if on_a_rank > 1 else stages[0], parts, loss_of)


def train(key: Key, job: Job, axes: dict[str, DeviceMesh], lr: float) -> tuple[Any, ...]:
    """This rank's part of the model, the optimizer, and the step, which returns losses."""
    mesh = Mesh(key["mesh"])
    pp, dp, cp, ep, _ = map(int, np.unravel_index(job.rank, mesh.shape))

    def parallelize(stage: int) -> Any:
        model = create(key, job.device)
        if mesh.tp > 1:
            tensor_parallelize(model, axes["tp"])
        if mesh.cp > 1 and mesh.how != "ring":
            context_parallelize(model, axes["cp"])
        if mesh.ep > 1:
            expert_parallelize(model, axes["ep"], axes["same"])
        cut(model, stage, mesh.stages)
        # last: it shards what the others left
        return data_parallelize(model, axes["dp"], mesh.how) if mesh.data > 1 else model

    second = mesh.stages - 1 - pp if mesh.how == "zbv" else pp + mesh.pp  # zbv's form a V
    models = {stage: parallelize(stage) for stage in (pp, second)[: mesh.stages // mesh.pp]}
    trained = nn.ModuleList(models.values())
    optimizer = sgd(trained, lr)
    experts: Any = [weight for name, weight in trained.named_parameters() if ".each." in name]
    batch = random_text(config_of(key), key["global_batch"], seed=0)
    texts = [x.chunk(mesh.dp * mesh.ep)[dp * mesh.ep + ep].to(job.device) for x in batch]
    ring: Any = nullcontext
    if mesh.how == "ring":  # it cuts the texts, and what the model has for each position
        buffers = [*texts, *trained.buffers()]
        dims = [1, 1] + [0] * (len(buffers) - 2)
        ring = partial(context_parallel, axes["cp"], buffers=buffers, buffer_seq_dims=dims)
    else:
        texts = [x.chunk(mesh.cp, dim=1)[cp].contiguous() for x in texts]

    def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
        loss = next_token_loss(logits, targets)
        return loss.to_local() if isinstance(loss, DTensor) else loss

    if mesh.pp > 1:
        schedule = pipeline(models, axes["pp"], mesh, key["microbatches"], texts[0], loss_of)

    def step() -> list[Tensor]:
        optimizer.zero_grad()
        losses: list[Tensor] = []  # of microbatches; empty without the last stage
        with tp.loss_parallel() if mesh.tp > 1 else nullcontext(), ring():
            if mesh.pp > 1:
                inputs = texts[:1] if 0 in models else []
                schedule.step(*inputs, target=texts[1], losses=losses, return_outputs=False)
            else:
                losses.append(loss_of(models[0](texts[0]), texts[1]))
                losses[0].backward()
        for weight in experts:
            weight.grad /= mesh.ep  # a sum over tokens of all ep; FSDP's mean is over the rest
        optimizer.step()
        return losses

    return trained, optimizer, step


# -- meshes: their names, whether they fit, their process groups -----------------------------------


@dataclass
class Mesh:
    """`dp2tp2`, `dp2x4`, `pp4:1f1b`, `cp4:ring`: the ranks of each axis, then how."""

    name: str

    def __post_init__(self) -> None:
        product, _, how = self.name.partition(":")
        words = re.findall(r"([a-z]p)(\d+)(?:x(\d+))?", product)
        ranks = dict.fromkeys(AXES, 1) | {axis: int(a) * int(b or 1) for axis, a, b in words}
        known = r"ddp[1-9]\d*|(dp[1-9]\d*x([2-9]|[1-9]\d+)|(dp|tp|pp|cp|ep)[1-9]\d*)+"
        twice = len({axis for axis, _, _ in words}) < len(words)
        if twice or not re.fullmatch(known, product):
            wrong("a mesh", repr(self.name), "e.g. dp8, dp2x4, dp4tp2, dp2pp4:1f1b; ddp8 by itself")
        ways = SCHEDULES if ranks["pp"] > 1 else ("", "ring") if ranks["cp"] > 1 else ("",)
        if how not in ways:
            names = ", ".join(SCHEDULES)
            wrong(f"{names} after a pipeline", repr(self.name), "e.g. pp4:1f1b or cp4:ring")
        self.how = "ddp" if product.startswith("ddp") else how
        self.shape = self.pp, self.dp, self.cp, self.ep, self.tp = tuple(ranks.values())
        self.replicas = next((int(a) for _, a, b in words if b), 1)  # of dp: HSDP's
        self.data = self.dp * self.cp * self.ep  # ranks that share weights, and so gradients
        self.stages = self.pp * (SCHEDULES[how][1] if self.pp > 1 else 1)
        self.axes = [axis for axis, n in (ranks | {"dp": self.data}).items() if n > 1]


def misfit(key: Key) -> str | None:
    """Which number of a case does not fit its mesh, or None."""
    mesh, config, ranks = Mesh(key["mesh"]), config_of(key), key["world_size"]
    if (size := math.prod(mesh.shape)) != ranks:
        return f"mesh {mesh.name} has {size} ranks, this job {ranks}; e.g. dp{ranks}"
    rows = mesh.dp * mesh.ep * key["microbatches"]
    for name, n, whole, of in (
        ("tp", mesh.tp, config.heads, "heads"),
        ("stages", mesh.stages, config.layers, "layers"),
        ("cp * tp", mesh.cp * mesh.tp, config.context, "--sequence-length"),
        ("dp * ep * microbatches", rows, key["global_batch"], "--global-batch"),
        ("ep", mesh.ep, EXPERTS, "experts"),
    ):
        if whole % n:
            return f"mesh {mesh.name}: {name} = {n} does not divide {whole}, {of}"
    if key["experts"] and mesh.tp > 1:
        return f"mesh {mesh.name}: tp does not split experts; run it apart from ep"
    if mesh.how == "ring" and key["device"] != "cuda":
        return f"mesh {mesh.name}: ring attention needs CUDA; try cp{mesh.cp} without :ring"
    if mesh.how == "zbv" and key["backend"] == "gloo" and not TORCH_2_15:  # it hangs
        return f"mesh {mesh.name}: zbv over gloo does not end with torch 2.11; try torch 2.15"
    return wrong_microbatches(mesh, key["microbatches"]) if mesh.pp > 1 else None


def wrong_microbatches(mesh: Mesh, count: int) -> str | None:
    """Why a pipeline cannot take so many microbatches, as its schedule would say, or None."""
    if mesh.how in ("1f1b", "zbv") and count < mesh.stages:
        stages = f"{mesh.how} has {mesh.stages} stages and needs as many microbatches"
        return f"mesh {mesh.name}: {stages}, got {count}; e.g. --microbatches {mesh.stages}"
    rounds = max(1, count // mesh.pp)
    if mesh.how in ("interleaved", "izb") and count % rounds:
        multiple = f"{mesh.how} needs a multiple of its {mesh.pp} ranks in microbatches"
        return f"mesh {mesh.name}: {multiple}, got {count}; e.g. --microbatches {2 * mesh.pp}"
    return None


def title_of(key: Key, microbatches: int | None) -> str:
    """The settings that all meshes share. microbatches: those that the user gave."""
    words = [
        key["model"],
        f"{key['sequence_length']} tokens",
        f"global batch {key['global_batch']}",
    ]
    words += [key["dtype"], "SGD"]
    if key["experts"]:
        words.append(f"{key['experts']} experts")
    if microbatches:
        words.append(f"{microbatches} microbatches in a pipeline")
    return ", ".join(words)


def open_meshes(mesh: Mesh, fake: list[str], job: Job, group: Group) -> dict[str, DeviceMesh]:
    """A DeviceMesh for each axis; collectives of the axes in `fake` return at once.

    dp holds the ranks of cp and ep, too, and is 2-D for HSDP; `same`: those with the same experts.
    """
    real = {*mesh.axes} - {*fake}
    if "dp" in real:
        real |= {"replicas", "same"}
    shards = mesh.data // mesh.replicas
    shapes = [{"pp": mesh.pp, "replicas": mesh.replicas, "dp": shards, "tp": mesh.tp}]
    if mesh.cp > 1:
        shapes += [{"outer": mesh.pp * mesh.dp, "cp": mesh.cp, "inner": mesh.ep * mesh.tp}]
    if mesh.ep > 1:
        shapes += [{"outer": mesh.pp, "same": mesh.dp * mesh.cp, "ep": mesh.ep}]
    # DTensor keeps what it has worked out for a mesh, and takes meshes with the same ranks and
    # names for one: without names of its own a twin would talk over the real groups
    of = f" of {mesh.name}, fake {'+'.join(fake) or 'none'}"
    found: dict[str, DeviceMesh] = {}
    for shape in shapes:
        talks = {axis for axis, size in shape.items() if axis in real and size > 1}
        backends: Any = {axis + of: job.backend if axis in talks else "fake" for axis in shape}
        names: Any = {"mesh_dim_names": (*backends,), "backend_override": backends}
        made = init_device_mesh(job.device.type, (*shape.values(),), **names)
        for each in made.get_all_groups():
            group.more.append(each)
            dist.all_reduce(torch.ones(1, device=job.device), group=each)  # NCCL connects here
        forget_groups(made)
        found |= {axis: made[axis + of] for axis in shape}
        if mesh.replicas > 1 and "replicas" in shape:
            found["dp"] = made["replicas" + of, "dp" + of]
    return found


def default_meshes(n: int) -> list[str]:
    """dp, tp, both, and a pipeline, on n ranks; tp and pp over at most 4 of them."""
    p = math.gcd(n, 4)
    dp = f"dp{n // p}" if n > p else ""
    both = [f"dp{n // 2}tp2"] if p == 4 else []
    return [f"dp{n}", *([f"{dp}tp{p}", *both, f"{dp}pp{p}:1f1b"] if p > 1 else [])]


# -- a case: the model, its twins, the check -------------------------------------------------------


def config_of(key: Key) -> Any:
    return replace(DECODERS[key["model"]], context=key["sequence_length"], experts=key["experts"])


def create(key: Key, device: torch.device) -> Decoder:
    """The same model on every rank and in every mesh."""
    torch.manual_seed(0)
    with torch.device(device):
        model = Decoder(config_of(key))
    for weight in model.parameters():  # the angles of positions keep their precision
        weight.data = weight.data.to(DTYPES[key["dtype"]])
    return model


def train_reference(key: Key, device: torch.device) -> Reference | str:
    """The same training in one process, a sequence at a time; or why that failed."""
    texts = random_text(config_of(key), key["global_batch"], seed=0)
    rows = list(zip(*(x.to(device).split(1) for x in texts), strict=True))
    weights = [1 / len(rows)] * len(rows)
    try:
        model = create(key, device)
        return train_alone(model, rows, lambda f, row: next_token_loss(f(row[0]), row[1]), weights)
    except RuntimeError as error:  # a model that needs several devices has none
        return f"one process alone fails: {describe(error)}"


def square_norm(model: nn.Module, mesh: Mesh) -> float:
    """This rank's share of |gradient|^2: ranks that hold the same weight share it."""
    total = 0.0
    for name, weight in model.named_parameters():
        gradient: Any = weight.grad
        whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        holders = mesh.data * mesh.tp // (mesh.ep if ".each." in name else 1)
        total += float(whole.float().square().sum()) / holders
    return total


def build(lr: float, twins: bool, job: Job, key: Key, group: Group) -> Workload:
    mesh = Mesh(key["mesh"])
    before = start_peak(job.device)
    model, optimizer, step = train(key, job, open_meshes(mesh, [], job, group), lr)
    losses: list[list[float]] = []
    norms: list[float] = []
    for _ in range(CHECKED_STEPS):
        start_peak(job.device)  # without the whole model that the shards were cut from
        losses.append([loss.item() for loss in step()])
        facts = peak(job.device, before) | {"losses": losses, "norms": norms}
        norms.append(square_norm(model, mesh))
    optimizer.param_groups[0]["lr"] = 0.0
    parts: dict[str, Step] = {}
    for part, fake_axes in parts_of(mesh).items() if twins else ():
        _, _, parts[part] = train(key, job, open_meshes(mesh, fake_axes, job, group), lr=0.0)
    return Workload(step, parts, compared=tuple(parts), facts=lambda: facts)


def parts_of(mesh: Mesh) -> dict[str, list[str]]:
    """What is timed beside the step, and the axes without communication in it.

    A mesh of one axis needs no part for that axis: without it nothing communicates.
    """
    one_each = {without(mesh, axis): [axis] for axis in mesh.axes}
    return one_each | {"compute": mesh.axes}


def without(mesh: Mesh, axis: str) -> str:
    """The part in which this axis does not communicate."""
    return f"without {axis}" if len(mesh.axes) > 1 else "compute"


# -- what rank 0 makes of it -----------------------------------------------------------------------


def derive(
    alone: Reference | str, device: torch.device, case: Case, times: Times, facts: list[Any]
) -> None:
    """Fill in the metrics and the check."""
    key, m = case.key, case.metrics
    m |= step_metrics(times.each(), key["global_batch"])
    m["tokens_per_s"] = m["samples_per_s"] * key["sequence_length"]
    m["tokens_per_s_per_rank"] = m["tokens_per_s"] / key["world_size"]
    if top := peak_flops(device, key["dtype"]):
        m["mfu"] = m["tokens_per_s_per_rank"] * flops_per_token(config_of(key)) / top
    memory = [fact["memory_gib"] for fact in facts]
    m |= {"memory_gib": max(memory), "memory_min_gib": min(memory)}
    if "memory_allocated_gib" in facts[0]:  # on CUDA
        m["memory_allocated_gib"] = max(fact["memory_allocated_gib"] for fact in facts)
    if "compute" in times.samples_s:
        m |= breakdown(Mesh(key["mesh"]), key["microbatches"], times)
    if isinstance(alone, str):
        case.check = f"skipped: {alone}"
        return
    losses = np.mean([fact["losses"] for fact in facts if fact["losses"][0]], axis=(0, 2))
    norms = np.sqrt(np.sum([fact["norms"] for fact in facts], axis=0))
    compare = partial(compare_training, tolerance=TOLERANCES[key["dtype"]])
    problem = compare("the gradient's norm", norms, alone.norms)
    case.check = verdict(problem or compare("the loss", losses, np.mean(alone.losses, axis=1)))


def breakdown(mesh: Mesh, microbatches: int, times: Times) -> dict[str, Any]:
    """What each axis exposes, and what each stage of a pipeline computes and waits."""
    m: dict[str, Any] = {"compute_s": float(np.median(times.slowest("compute")))}
    for axis in mesh.axes:
        gap, interval = times.exposed(without(mesh, axis))
        m |= {f"exposed_{axis}_s": gap, f"exposed_{axis}_ci95_s": interval}
    if slow := straggler(times.each("compute")):
        m |= {"straggler_rank": slow[0], "straggler_factor": slow[1]}
    if mesh.pp == 1:
        return m

    def stage_medians(part: str) -> Any:
        """Seconds of each pipeline rank, [pp]; the slowest of its ranks counts."""
        rows = times.each(part)  # [ranks, n]; pp is the outermost axis of the ranks
        return np.median(rows.reshape(mesh.pp, -1, rows.shape[1]).max(axis=1), axis=1)

    idle = 1 - stage_medians(without(mesh, "pp")) / np.median(times.slowest())
    slots = mesh.stages // mesh.pp * microbatches
    m["pipeline_idle"] = float(idle.mean())
    m["pipeline_idle_theory"] = (mesh.pp - 1) / (slots + mesh.pp - 1)
    m["stage_idle"] = idle.round(4).tolist()
    m["stage_compute_s"] = stage_medians("compute").round(9).tolist()
    return m


def best(cases: list[Case]) -> str | None:
    """`# best: A, 1.12x B (95 % 1.09 to 1.15)`, and which neighbours cannot be told apart."""
    names = ("step_time_p50_s", "step_time_ci95_s")  # no interval for too few samples
    rows = [(*(c.metrics[name] for name in names), c.key["mesh"]) for c in cases if not c.failed]
    if len(rows) < 2:
        return None
    (fast, a, name), (slow, b, other), *_ = rows = sorted(rows, key=lambda row: row[0])
    within = f"95 % {b[0] / a[1]:.2f} to {b[1] / a[0]:.2f}" if a and b else "too few samples"
    alike = [f"{x} and {y}" for (_, a, x), (_, b, y) in pairwise(rows) if a and b and b[0] <= a[1]]
    line = f"# best: {name}, {slow / fast:.2f}x {other} ({within})"
    return line + (f"; {', '.join(alike)} cannot be told apart" if alike else "")


COLUMNS: Columns = {  # and the exposed communication of each axis
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


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--mesh", type=list_of(Mesh), help="a list (default, of 4: dp4,tp4,dp2tp2,pp4:1f1b)")
    add("--model", choices=list(DECODERS), help="(default: decoder-124m, CPU decoder-nano)")
    text = "of weights, gradients and optimizer (default: fp32)"
    add("--dtype", choices=list(DTYPES), default="fp32", help=text)
    number = partial(add, type=positive_int, metavar="N")
    number("--global-batch", help="sequences of all ranks together (default: 8 a rank, CPU 4)")
    number("--sequence-length", help="tokens (default: the model's)")
    number("--microbatches", help="of a pipeline (default: 2 for each of its ranks)")
    add("--no-breakdown", action="store_true", help="time the steps alone, without twins")
    add_common_flags(parser, max_seconds=3)
    return parser.parse_args(argv)


def main() -> int:
    args = parse_args()
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # the check gathers
    register_fake_backend()
    torch.set_flush_denormal(True)  # a twin's garbage must not be slow to compute with
    with Benchmark("parallel_sweep", args) as bench:
        job, cuda = bench.job, bench.job.device.type == "cuda"
        meshes = args.mesh or [Mesh(name) for name in default_meshes(job.world_size)]
        model = args.model or ("decoder-124m" if cuda else "decoder-nano")
        same = {
            "model": model,
            "dtype": args.dtype,
            "sequence_length": args.sequence_length or DECODERS[model].context,
            "global_batch": args.global_batch or (8 if cuda else 4) * job.world_size,
            "experts": EXPERTS if any(mesh.ep > 1 for mesh in meshes) else 0,
            **bench.place,
        }
        keys, columns = [], dict(COLUMNS)
        for mesh in meshes:
            parts = args.microbatches or 2 * mesh.pp
            keys.append({"mesh": mesh.name, "microbatches": parts if mesh.pp > 1 else 1, **same})
            if problem := misfit(keys[-1]):
                bench.refuse(problem)
            for axis in mesh.axes:
                columns[f"exposed\n{axis} (ms)"] = metric(f"exposed_{axis}_s", 1e3, 1)
                columns[f"\n{axis} 95% ci (ms)"] = interval_ends(f"exposed_{axis}_ci95_s", 1e3, 1)
        # each rank makes all tokens and targets, of 8 bytes each
        needed = 2 * 8 * same["sequence_length"] * same["global_batch"]
        flags = "--sequence-length or --global-batch"
        if problem := share(too_much(needed, job, flags)):
            bench.refuse(problem)
        longest = max((mesh.name for mesh in meshes), key=len)
        bench.begin_table(title_of(same, args.microbatches), columns, [longest])
        alone = share(train_reference(keys[0], job.device) if job.rank == 0 else None)
        if isinstance(alone, str):
            bench.print(f"# not checked: {alone}")
        lr, cases = 0.0 if isinstance(alone, str) else alone.lr, []
        for key in keys:
            begin = partial(build, lr, not args.no_breakdown, job)
            if case := bench.measure(key, begin, partial(derive, alone, job.device)):
                cases.append(case)  # on rank 0
        bench.print("")
        for case in cases:
            if times := case.metrics.get("stage_compute_s"):
                compute = ", ".join(f"{seconds * 1e3:.1f}" for seconds in times)
                idle = ", ".join(f"{share:.0%}" for share in case.metrics["stage_idle"])
                bench.print(f"# {case.key['mesh']}: stages compute {compute} ms, idle {idle}")
        if line := best(cases):
            bench.print(line)
    return bench.status


if __name__ == "__main__":
    sys.exit(record(main)())
