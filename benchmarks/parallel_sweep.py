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
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch.testing._internal.distributed.fake_pg  # registers the fake backend
from torch import Tensor, nn
from torch.distributed import _functional_collectives as funcol
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
from common.cli import Parser, add_common_flags, list_of, positive_int, wrong
from common.decoder import DECODERS, Decoder, Experts, flops_per_token, next_token_loss, random_text
from common.dist import Group, Job
from common.memory import peak, start_peak
from common.peaks import peak_flops
from common.report import Case
from common.stats import difference, step_metrics, straggler
from common.table import Columns, half_width, metric, relative

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


def data_parallelize(model: Decoder, dp: DeviceMesh, how: str, apart: list[nn.Parameter]) -> Any:
    """FSDP2, a unit for each block; a 2-D mesh is HSDP. Or DDP: every rank has all weights."""
    if how == "ddp":
        ddp = DistributedDataParallel(model, process_group=dp.get_group())
        if dist.get_backend(dp.get_group()) == "fake":  # whose futures DDP cannot use
            ddp.register_comm_hook(None, noop_hook)
        return ddp
    keep = how in SCHEDULES  # the weights, until the last microbatch
    for unit in (*model.blocks, model):
        fully_shard(unit, mesh=dp, reshard_after_forward=not keep, ignored_params={*apart})
    return model


def tensor_parallelize(model: Decoder, mesh: DeviceMesh) -> None:
    """Split heads, hidden units and words; between them each rank has a part of the sequence."""
    part, whole = Shard(1), Replicate()
    in_block = {
        "attention_norm": tp.SequenceParallel(),
        "attention": tp.PrepareModuleInput(
            input_layouts=(part, None), desired_input_layouts=(whole, None)
        ),
        **{f"attention.{name}": tp.ColwiseParallel() for name in "qkv"},
        "attention.o": tp.RowwiseParallel(output_layouts=part),
        "mlp_norm": tp.SequenceParallel(),
        "mlp": tp.PrepareModuleInput(input_layouts=part, desired_input_layouts=whole),
        "mlp.up": tp.ColwiseParallel(),
        "mlp.down": tp.RowwiseParallel(output_layouts=part),
    }
    for block in model.blocks:
        tp.parallelize_module(block, mesh, in_block)
    if isinstance(model.tokens, nn.Embedding):  # the first stage of a pipeline
        words = tp.RowwiseParallel(input_layouts=whole, output_layouts=part)
        tp.parallelize_module(model, mesh, {"tokens": words})
    if isinstance(model.head, nn.Linear):  # the last one: each rank gets the logits of its words
        head = tp.ColwiseParallel(input_layouts=part)
        tp.parallelize_module(model, mesh, {"norm": tp.SequenceParallel(), "head": head})


def context_parallelize(model: Decoder, cp: DeviceMesh) -> None:
    """Each rank has a part of every sequence, and gathers the keys and values of all of it."""
    rotation = model.get_buffer("rotation")
    everywhere = torch.arange(len(rotation), device=rotation.device)
    here = everywhere.chunk(cp.size())[cp.get_local_rank()]
    seen = here[:, None] >= everywhere
    model.rotation = rotation[here]
    for moe in experts_in(model):
        moe.expert = moe.expert[here]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kv = DTensor.from_local(torch.stack((k, v)), cp, [Shard(3)], run_check=False)
        k, v = kv.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)

    for block in model.blocks:
        block.get_submodule("attention").attend = attend  # type: ignore[assignment]


def expert_parallelize(moe: Experts, ep: DeviceMesh, same: DeviceMesh | None) -> None:
    """Each rank keeps some of the experts; tokens go to theirs by all-to-all, and back.

    The ranks have the same numbers of tokens for each. same: those that keep the same experts.
    """
    ranks, here, group = ep.size(), ep.get_local_rank(), ep.get_group()
    moe.each = moe.each[here * moe.count // ranks : (here + 1) * moe.count // ranks]
    if same is not None:
        fully_shard([*moe.each], mesh=same)
    compute_here, swap = moe.compute, funcol.all_to_all_single_autograd

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
    models: dict[int, nn.Module], pp: DeviceMesh, key: dict[str, Any], texts: Any, loss_of: Any
) -> Callable[[], list[Tensor]]:
    """Forward and backward through this rank's stages; returns the microbatches' losses."""
    mesh, config, (tokens, targets) = parse_mesh(key["mesh"]), config_of(key), texts
    last, parts = mesh.stages - 1, key["microbatches"]
    # torch can find out the shapes between stages by itself, but not over a fake group
    text = tokens[: len(tokens) // parts].to("meta")
    meta = partial(text.new_empty, dtype=DTYPES[key["dtype"]], requires_grad=True)
    hidden = meta((len(text), text.shape[1] // mesh.tp, config.width))
    logits = meta((*text.shape, config.vocab // mesh.tp))
    stages = []
    for i, model in models.items():
        shapes = (hidden if i > 0 else text, hidden if i < last else logits)
        place = (i, mesh.stages, tokens.device)
        stages.append(pipelining.PipelineStage(model, *place, *shapes, group=pp.get_group()))
    schedule_class, on_a_rank = SCHEDULES[mesh.how]
    schedule = schedule_class(stages if on_a_rank > 1 else stages[0], parts, loss_of)

    def forward_backward() -> list[Tensor]:
        losses: list[Tensor] = []
        inputs, wanted = (tokens,) if 0 in models else (), targets if last in models else None
        schedule.step(*inputs, target=wanted, losses=losses, return_outputs=False)
        return losses

    return forward_backward


@dataclass(frozen=True)
class Layout:
    """How many ranks each axis has, and what follows from that."""

    name: str
    how: str  # a schedule, ring, ddp or nothing
    pp: int
    dp: int
    cp: int
    ep: int
    tp: int
    data: int  # ranks that hold the same weights, and so share their gradients
    replicas: int  # parts of these, each of which has all weights
    stages: int
    axes: list[str]  # those that communicate


def parse_mesh(text: str) -> Layout:
    """`dp2tp2`, `dp2x4`, `pp4:1f1b`, `cp4:ring`: a product of axes, then how."""
    product, _, how = text.partition(":")
    words = re.findall(r"([a-z]p)(\d+)(?:x(\d+))?", product)
    n = dict.fromkeys(AXES, 1) | {axis: int(a) * int(b or 1) for axis, a, b in words}
    known = r"ddp[1-9]\d*|(dp[1-9]\d*x([2-9]|[1-9]\d+)|(dp|tp|pp|cp|ep)[1-9]\d*)+"
    once = len({axis for axis, _, _ in words}) == len(words)
    if not re.fullmatch(known, product) or not once:
        wrong("a mesh", repr(text), "e.g. dp8, dp2x4, dp4tp2, dp2pp4:1f1b, cp8; ddp8 by itself")
    if how not in (SCHEDULES if n["pp"] > 1 else ("", "ring") if n["cp"] > 1 else ("",)):
        wrong(f"{', '.join(SCHEDULES)} after a pipeline", repr(text), "e.g. pp4:1f1b or cp4:ring")
    data = n["dp"] * n["cp"] * n["ep"]
    return Layout(
        text,
        how="ddp" if product.startswith("ddp") else how,
        **n,
        data=data,
        replicas=next((int(a) for _, a, b in words if b), 1),
        stages=n["pp"] * (SCHEDULES[how][1] if n["pp"] > 1 else 1),
        axes=[axis for axis in AXES if n[axis] > 1 or (axis == "dp" and data > 1)],
    )


def misfit(key: dict[str, Any]) -> str | None:
    """Which number of a case does not fit its mesh, or None."""
    mesh, config, parts = parse_mesh(key["mesh"]), config_of(key), key["microbatches"]
    size, ranks = mesh.pp * mesh.data * mesh.tp, key["world_size"]
    if size != ranks:
        return f"mesh {mesh.name} has {size} ranks, this job {ranks}; e.g. dp{ranks}"
    rows = mesh.dp * mesh.ep * parts
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
    return None


def open_meshes(mesh: Layout, fake: list[str], job: Job, group: Group) -> dict[str, DeviceMesh]:
    """A DeviceMesh for each axis; collectives of the axes in `fake` return at once.

    dp holds the ranks of cp and ep, too, and is 2-D for HSDP; `same`: those with the same experts.
    """
    silent = {*fake, "outer", "inner", *(("replicas", "same") if "dp" in fake else ())}
    # DTensor keeps what it has worked out for a mesh, and takes meshes with the same ranks and
    # names for one: without names of its own a twin would talk over the real groups
    of = f" of {mesh.name}, fake {'+'.join(fake) or 'none'}"
    shards = mesh.data // mesh.replicas
    shapes = [{"pp": mesh.pp, "replicas": mesh.replicas, "dp": shards, "tp": mesh.tp}]
    if mesh.cp > 1:
        shapes += [{"outer": mesh.pp * mesh.dp, "cp": mesh.cp, "inner": mesh.ep * mesh.tp}]
    if mesh.ep > 1:
        shapes += [{"outer": mesh.pp, "same": mesh.dp * mesh.cp, "ep": mesh.ep}]
    found: dict[str, DeviceMesh] = {}
    for shape in shapes:
        sizes = {axis: size for axis, size in shape.items() if size > 1}
        if not sizes:  # dp1
            continue
        backends: Any = {axis + of: "fake" if axis in silent else job.backend for axis in sizes}
        names: Any = {"mesh_dim_names": tuple(backends), "backend_override": backends}
        made = init_device_mesh(job.device.type, tuple(sizes.values()), **names)
        for each in made.get_all_groups():
            group.more.append(each)
            dist.all_reduce(torch.ones(1, device=job.device), group=each)  # NCCL connects here
        # DTensor's caches keep the mesh for ever, and it, for torch.compile, its groups
        made._pg_registry.clear()
        found |= {axis: made[axis + of] for axis in sizes}
        if "replicas" in sizes:
            found["dp"] = made["replicas" + of, "dp" + of]
    return found


def config_of(key: dict[str, Any]) -> Any:
    return replace(DECODERS[key["model"]], context=key["sequence_length"], experts=key["experts"])


def create(key: dict[str, Any], device: torch.device) -> Decoder:
    """The same model on every rank and in every mesh."""
    torch.manual_seed(0)
    with torch.device(device):
        model = Decoder(config_of(key))
    for weight in model.parameters():  # the angles of positions keep their precision
        weight.data = weight.data.to(DTYPES[key["dtype"]])
    return model


def experts_in(model: nn.Module) -> list[Experts]:
    return [module for module in model.modules() if isinstance(module, Experts)]


def train(key: dict[str, Any], job: Job, axes: dict[str, DeviceMesh], lr: float) -> tuple[Any, ...]:
    """This rank's part of the model, the optimizer, and the step, which returns losses."""
    mesh, device = parse_mesh(key["mesh"]), job.device
    place = np.unravel_index(job.rank, [getattr(mesh, axis) for axis in AXES])
    pp, dp, cp, ep, _ = map(int, place)
    second = mesh.stages - 1 - pp if mesh.how == "zbv" else pp + mesh.pp  # zbv's form a V
    models: dict[int, Any] = {}
    for stage in (pp, second)[: mesh.stages // mesh.pp]:
        models[stage] = model = create(key, device)
        cut(model, stage, mesh.stages)
        if mesh.tp > 1:
            tensor_parallelize(model, axes["tp"])
        if mesh.cp > 1 and mesh.how != "ring":
            context_parallelize(model, axes["cp"])
        spread = experts_in(model) if mesh.ep > 1 else []
        for moe in spread:
            expert_parallelize(moe, axes["ep"], axes.get("same"))
        if mesh.data > 1:  # last: it shards what the others left
            apart = [weight for moe in spread for weight in moe.each.parameters()]
            models[stage] = data_parallelize(model, axes["dp"], mesh.how, apart)
    trained = nn.ModuleList(models.values())
    optimizer = sgd(trained, lr)
    experts: Any = [weight for moe in experts_in(trained) for weight in moe.each.parameters()]
    texts = random_text(config_of(key), key["global_batch"], seed=0)
    tokens, targets = (x.chunk(mesh.dp * mesh.ep)[dp * mesh.ep + ep].to(device) for x in texts)
    ring: Any = nullcontext
    if mesh.how == "ring":  # it cuts the texts, and what the model has for each position
        buffers = [tokens, targets, *trained.buffers()]
        dims = [1, 1] + [0] * (len(buffers) - 2)
        ring = partial(context_parallel, axes["cp"], buffers=buffers, buffer_seq_dims=dims)
    else:
        tokens, targets = (x.chunk(mesh.cp, dim=1)[cp].contiguous() for x in (tokens, targets))

    def loss_of(logits: Any, targets: Tensor) -> Any:
        if mesh.tp > 1:
            logits = DTensor.from_local(logits, axes["tp"], [Shard(-1)], run_check=False)
        loss: Any = next_token_loss(logits, targets)
        return loss.to_local() if mesh.tp > 1 else loss

    def forward_backward() -> list[Tensor]:
        loss = loss_of(models[0](tokens), targets)
        loss.backward()
        return [loss]

    if mesh.pp > 1:
        forward_backward = pipeline(models, axes["pp"], key, (tokens, targets), loss_of)

    def step() -> list[Tensor]:
        optimizer.zero_grad()
        with tp.loss_parallel() if mesh.tp > 1 else nullcontext(), ring():
            losses = forward_backward()
        for weight in experts:
            weight.grad /= mesh.ep  # a sum over tokens of all ep; FSDP's mean is over the rest
        optimizer.step()
        return losses

    return trained, optimizer, step


def train_reference(key: dict[str, Any], device: torch.device) -> Reference:
    """The same training in one process, a sequence at a time."""
    texts = random_text(config_of(key), key["global_batch"], seed=0)
    rows = list(zip(*(x.to(device).split(1) for x in texts), strict=True))
    model, weights = create(key, device), [1 / len(rows)] * len(rows)
    return train_alone(model, rows, lambda f, row: next_token_loss(f(row[0]), row[1]), weights)


def square_norm(model: nn.Module, mesh: Layout) -> float:
    """This rank's share of |gradient|^2: ranks that hold the same weight share it."""
    total = 0.0
    for name, weight in model.named_parameters():
        gradient: Any = weight.grad
        whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        holders = mesh.data * mesh.tp // (mesh.ep if ".each." in name else 1)
        total += float(whole.float().square().sum()) / holders
    return total


def build(key: dict[str, Any], lr: float, twins: bool, job: Job, group: Group) -> Workload:
    mesh = parse_mesh(key["mesh"])
    if mesh.how == "ring" and job.device.type != "cuda":
        raise ValueError("ring attention (context_parallel) needs CUDA; try cp without :ring")
    if mesh.how == "zbv" and job.backend == "gloo" and torch.__version__ < "2.15":  # it hangs
        raise ValueError("zbv over gloo does not end with torch 2.11; try nccl or torch 2.15")
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
    steps: dict[str, Callable[[], object]] = {"step": step}
    fakes = {f"{axis} fake": [axis] for axis in mesh.axes} if len(mesh.axes) > 1 else {}
    for name, fake in (fakes | {"compute": mesh.axes}).items() if twins else ():
        _, _, steps[name] = train(key, job, open_meshes(mesh, fake, job, group), lr=0.0)
    return Workload(steps, facts=lambda: facts)


def derive(alone: Reference, device: torch.device, case: Case, facts: list[Any]) -> None:
    """Fill in the metrics and the check, on rank 0."""
    key, m = case.key, case.metrics
    m |= step_metrics(case.samples_s["step"], key["global_batch"])
    m["tokens_per_s"] = m["samples_per_s"] * key["sequence_length"]
    m["tokens_per_s_per_rank"] = m["tokens_per_s"] / key["world_size"]
    if top := peak_flops(device, key["dtype"]):
        m["mfu"] = m["tokens_per_s_per_rank"] * flops_per_token(config_of(key)) / top
    memory = [fact["memory_gib"] for fact in facts]
    m |= {"memory_gib": max(memory), "memory_min_gib": min(memory)}
    if "compute" in case.samples_s:
        m |= breakdown(parse_mesh(key["mesh"]), case)
    losses = np.mean([fact["losses"] for fact in facts if fact["losses"][0]], axis=(0, 2))
    norms = np.sqrt(np.sum([fact["norms"] for fact in facts], axis=0))
    compare = partial(compare_training, tolerance=TOLERANCES[key["dtype"]])
    problem = compare("the gradient's norm", norms, alone.norms)
    case.check = verdict(problem or compare("the loss", losses, np.mean(alone.losses, axis=1)))


def breakdown(mesh: Layout, case: Case) -> dict[str, Any]:
    """What each axis exposes, and what each stage of a pipeline computes and waits."""
    samples = {name: np.array(rows) for name, rows in case.samples_s.items()}  # [ranks, n]
    step, compute = samples["step"].max(axis=0), samples["compute"]
    found: dict[str, Any] = {"compute_s": float(np.median(compute.max(axis=0)))}
    for axis in mesh.axes:
        silent = samples.get(f"{axis} fake", compute).max(axis=0)
        gap, interval = difference(step, silent, case.rounds)
        found |= {f"exposed_{axis}_s": gap, f"exposed_{axis}_ci95_s": interval}
    if slow := straggler(compute):
        found |= {"straggler_rank": slow[0], "straggler_factor": slow[1]}
    if mesh.pp > 1:

        def of_stages(rows: Any) -> Any:  # pp is the outermost axis
            return np.median(rows.reshape(mesh.pp, -1, len(step)).max(axis=1), axis=1)

        idle = 1 - of_stages(samples.get("pp fake", compute)) / np.median(step)
        slots = mesh.stages // mesh.pp * case.key["microbatches"]
        found["pipeline_idle"] = float(idle.mean())
        found["pipeline_idle_theory"] = (mesh.pp - 1) / (slots + mesh.pp - 1)
        found["stage_idle"] = idle.round(4).tolist()
        found["stage_compute_s"] = of_stages(compute).round(9).tolist()
    return found


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


def best(cases: list[Case]) -> str | None:
    """`# best: A, 1.12x B (95 % 1.09 to 1.15)`, and which neighbours cannot be told apart."""
    ranked = sorted((c for c in cases if not c.failed), key=lambda c: c.metrics["step_time_p50_s"])
    if len(ranked) < 2:
        return None
    names = [case.key["mesh"] for case in ranked]
    times = [case.metrics["step_time_p50_s"] for case in ranked]
    spans = [case.metrics["step_time_ci95_s"] for case in ranked]  # None for too few samples
    a, b = spans[:2]
    within = f"95 % {b[0] / a[1]:.2f} to {b[1] / a[0]:.2f}" if a and b else "too few samples"
    line = f"# best: {names[0]}, {times[1] / times[0]:.2f}x {names[1]} ({within})"
    pairs = zip(names, names[1:], spans, spans[1:], strict=False)
    alike = [f"{x} and {y}" for x, y, a, b in pairs if a and b and b[0] <= a[1]]
    return line + (f"; {', '.join(alike)} cannot be told apart" if alike else "")


def default_meshes(n: int) -> list[str]:
    """dp, tp, both, and a pipeline, on n ranks; tp and pp over at most 4 of them."""
    p = math.gcd(n, 4)
    dp = f"dp{n // p}" if n > p else ""
    both = [f"dp{n // 2}tp2"] if p == 4 else []
    return [f"dp{n}", *([f"{dp}tp{p}", *both, f"{dp}pp{p}:1f1b"] if p > 1 else [])]


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--mesh", type=list_of(parse_mesh), help="a list (default, of 4: dp4,tp4,dp2tp2,pp4:1f1b)")
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
    torch.set_flush_denormal(True)  # a twin's garbage must not be slow to compute with
    with Benchmark("parallel_sweep", args) as bench:
        job, cuda = bench.job, bench.job.device.type == "cuda"
        meshes = args.mesh or [parse_mesh(name) for name in default_meshes(job.world_size)]
        model = args.model or ("decoder-124m" if cuda else "decoder-nano")
        same = {
            "model": model,
            "dtype": args.dtype,
            "sequence_length": args.sequence_length or DECODERS[model].context,
            "global_batch": args.global_batch or (8 if cuda else 4) * job.world_size,
            "experts": EXPERTS if any(mesh.ep > 1 for mesh in meshes) else 0,
            "world_size": job.world_size,
            "device": job.device.type,
            "backend": job.backend,
        }
        keys, columns = [], dict(COLUMNS)
        for mesh in meshes:
            parts = args.microbatches or 2 * mesh.pp
            keys.append({"mesh": mesh.name, "microbatches": parts if mesh.pp > 1 else 1, **same})
            if problem := misfit(keys[-1]):
                bench.refuse(problem)
            for axis in mesh.axes:
                columns[f"exposed\n{axis} (ms)"] = metric(f"exposed_{axis}_s", 1e3, 1)
                columns[f"{axis}\n+-(ms)"] = half_width(f"exposed_{axis}_ci95_s", 1e3, 1)
        title = "{model}, {sequence_length} tokens, global batch {global_batch}, {dtype}"
        longest = max((mesh.name for mesh in meshes), key=len)
        bench.begin_table(title.format(**same), columns, [longest])
        alone = bench.share(train_reference(keys[0], job.device) if job.rank == 0 else None)
        cases = []
        for key in keys:
            begin = partial(build, key, alone.lr, not args.no_breakdown, job)
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
