#!/usr/bin/env python3
"""Which mesh is best for this model on these devices, and what does each axis of it cost?

Trains one transformer, with one global batch, under every mesh given, and times whole steps
(zero_grad, forward, loss, backward, optimizer step). A mesh is a product of axes over all ranks:

    dp8       FSDP2 (fully_shard): weights, gradients and optimizer in 8 shards
    dp2x4     HSDP: 2 replicas of 4 shards         ddp8     DistributedDataParallel, by itself
    tp8       tensor parallel, with sequence parallelism and loss_parallel
    pp8:1f1b  pipeline: gpipe, 1f1b, interleaved, bfs, or the zero-bubble izb, zbv, dualpipev
    cp8       context parallel by gathering keys and values; cp8:ring by context_parallel (CUDA)
    ep8       expert parallel: a block's MLP becomes --experts, its tokens go by all-to-all
    dp2tp2, dp2pp4:1f1b, dp2ep4, ...: products. In FSDP's eyes ranks of cp and ep are ranks of dp

Each axis is also timed without its communication: the same code on a twin of the mesh, where the
collectives of that axis return at once (torch's `fake` backend), in blocks that alternate with
the real ones. A twin computes garbage with a learning rate of 0; only its time is used.

    exposed(axis)  median over rounds of step - step with the axis fake
    compute        step with all axes fake
    idle           mean over the pipeline's stages of 1 - its step with pp fake / step
    theory         (p - 1) / (v m + p - 1): p ranks, v stages on each, m microbatches
    tokens/s       sequences of the global batch * their length / step

    torchrun --nproc-per-node 4 benchmarks/parallel_sweep.py
    torchrun --nproc-per-node 8 benchmarks/parallel_sweep.py --model decoder-1.3b --dtype bf16 \\
        --mesh dp8,dp4tp2,dp2pp4:1f1b,dp2pp4:zbv,cp8 --json report.jsonl

Loss and gradient norm of 3 steps are compared with one process. docs/parallel_sweep.md shows how
to read the table. BSD-3-Clause: copy the function of the axis you need.
"""

import argparse
import itertools
import logging
import math
import re
import sys
import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch.testing._internal.distributed.fake_pg  # registers the fake backend
from torch import Tensor, nn
from torch.distributed import _functional_collectives as funcol
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.benchmark import Benchmark, Workload
from common.check import CHECKED_STEPS, Reference, compare_training, sgd, train_alone, verdict
from common.cli import Parser, add_common_flags, list_of, positive_int, wrong
from common.decoder import (
    DECODERS,
    MLP,
    Attention,
    Decoder,
    DecoderConfig,
    flops_per_token,
    next_token_loss,
    random_text,
)
from common.dist import Group, Job, share
from common.memory import peak, start_peak
from common.peaks import peak_flops
from common.report import Case
from common.stats import difference, median_interval, step_metrics, straggler
from common.table import Columns, half_width, metric, relative

# schedule: torch's name, stages on a rank, whether they run down the ranks and up again, as a V
SCHEDULES = {
    "gpipe": ("GPipe", 1, False),
    "1f1b": ("1F1B", 1, False),
    "interleaved": ("Interleaved1F1B", 2, False),
    "bfs": ("LoopedBFS", 2, False),
    "izb": ("InterleavedZeroBubble", 2, False),
    "zbv": ("ZBVZeroBubble", 2, True),
    "dualpipev": ("DualPipeV", 2, True),
}
AXES = ("pp", "dp", "cp", "ep", "tp")  # outermost first: neighbours talk most
Texts = tuple[Tensor, Tensor]  # tokens and those that follow them
Loss = Callable[[Tensor, Tensor], Tensor]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TOLERANCES = {"fp32": 2e-3, "bf16": 5e-2}  # of loss and norm, over the first one

# -- one function an axis: torch's public API, to copy ---------------------------------------------


def data_parallelize(model: Decoder, dp: DeviceMesh, keep: bool) -> None:
    """FSDP2, a unit for each block; a 2-D mesh is HSDP. keep: weights until the backward pass."""
    apart = {w for moe in experts_in(model) if moe.group for w in moe.experts.parameters()}
    for unit in (*model.blocks, model):
        fully_shard(unit, mesh=dp, reshard_after_forward=not keep, ignored_params=apart)


def replicate(model: Decoder, dp: DeviceMesh) -> DistributedDataParallel:
    """DDP: every rank has all weights."""
    ddp = DistributedDataParallel(model, process_group=dp.get_group())
    if dist.get_backend(dp.get_group()) == "fake":  # whose futures DDP cannot use
        ddp.register_comm_hook(None, noop_hook)
    return ddp


def tensor_parallelize(model: Decoder, tp: DeviceMesh) -> None:
    """Split heads, hidden units and words; between them each rank has a part of the sequence."""
    part, whole = Shard(1), Replicate()
    in_block = {
        "attention_norm": SequenceParallel(),
        "attention": PrepareModuleInput(
            input_layouts=(part, None), desired_input_layouts=(whole, None)
        ),
        **{f"attention.{name}": ColwiseParallel() for name in "qkv"},
        "attention.o": RowwiseParallel(output_layouts=part),
        "mlp_norm": SequenceParallel(),
        "mlp": PrepareModuleInput(input_layouts=part, desired_input_layouts=whole),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=part),
    }
    for block in model.blocks:
        parallelize_module(block, tp, in_block)
    if isinstance(model.tokens, nn.Embedding):  # not so where a pipeline has left an Identity
        words = RowwiseParallel(input_layouts=whole, output_layouts=part)
        parallelize_module(model, tp, {"tokens": words})
    if isinstance(model.head, nn.Linear):  # each rank gets the logits of its words
        head = ColwiseParallel(input_layouts=part)
        parallelize_module(model, tp, {"norm": SequenceParallel(), "head": head})


def context_parallelize(model: Decoder, cp: DeviceMesh) -> None:
    """Each rank has a part of every sequence, and gathers the keys and values of all of it."""
    rotation = model.get_buffer("rotation")
    everywhere = torch.arange(len(rotation), device=rotation.device)
    here = everywhere.chunk(cp.size())[cp.get_local_rank()]
    seen = here[:, None] >= everywhere
    model.rotation = rotation[here]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kv = DTensor.from_local(torch.stack((k, v)), cp, [Shard(3)], run_check=False)
        k, v = kv.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)

    for attention in (m for m in model.modules() if isinstance(m, Attention)):
        attention.attend = attend  # type: ignore[method-assign]


def expert_parallelize(model: Decoder, ep: DeviceMesh, same: DeviceMesh | None) -> None:
    """Each rank keeps some of the experts; `same`, the ranks with the same ones, shard them."""
    for moe in experts_in(model):
        moe.group, experts = ep.get_group(), moe.experts.each
        count, place = len(experts) // ep.size(), ep.get_local_rank()
        moe.experts.each = experts[place * count : (place + 1) * count]
        if same is not None:
            fully_shard(moe.experts, mesh=same)


def cut(model: Decoder, stage: int, stages: int) -> None:
    """Leave a stage of a pipeline: its blocks; tokens in the first, norm and head in the last."""
    count = len(model.blocks) // stages
    model.blocks = model.blocks[stage * count : (stage + 1) * count]
    if stage > 0:
        model.tokens = nn.Identity()
    if stage < stages - 1:
        model.norm, model.head = nn.Identity(), nn.Identity()


def pipeline(
    models: dict[int, nn.Module], pp: DeviceMesh, key: dict[str, Any], texts: Texts, loss_of: Loss
) -> Callable[[], list[Tensor]]:
    """Forward and backward through this rank's stages; returns the microbatches' losses."""
    mesh, config, (tokens, targets) = parse_mesh(key["mesh"]), config_of(key), texts
    # torch can find out the shapes between stages by itself, but not over a fake group
    rows, length = len(tokens) // key["microbatches"], tokens.shape[1]
    meta = partial(torch.empty, device="meta", dtype=DTYPES[key["dtype"]], requires_grad=True)
    hidden, last = meta(rows, length // mesh.tp, config.width), mesh.stages - 1
    stages = []
    for stage, model in models.items():
        entering = hidden if stage else tokens[:rows].to("meta")
        leaving = hidden if stage < last else meta(rows, length, config.vocab // mesh.tp)
        place = (stage, mesh.stages, tokens.device)
        stages.append(PipelineStage(model, *place, entering, leaving, group=pp.get_group()))
    name, on_a_rank, _ = SCHEDULES[mesh.how]
    schedule_class: Any = get_schedule_class(name)
    schedule = schedule_class(stages if on_a_rank > 1 else stages[0], key["microbatches"], loss_of)

    def forward_backward() -> list[Tensor]:
        losses: list[Tensor] = []
        inputs, wanted = (tokens,) if 0 in models else (), targets if last in models else None
        schedule.step(*inputs, target=wanted, losses=losses, return_outputs=False)
        return losses

    return forward_backward


# -- a mixture of experts --------------------------------------------------------------------------


class Experts(nn.Module):
    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.each = nn.ModuleList(MLP(width) for _ in range(experts))

    def forward(self, x: Tensor, counts: list[int]) -> Tensor:
        """x: [tokens, width], sorted by expert; counts: the tokens of each."""
        parts = zip(self.each, x.split(counts), strict=True)
        return torch.cat([mlp(part) for mlp, part in parts])


class MixtureOfExperts(nn.Module):
    """Each token goes to one expert, the first ones more often. [batch, sequence, width]."""

    def __init__(self, width: int, experts: int, calls: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        popularity = -torch.arange(1, experts + 1).log()  # Zipf: 1/k of the first one's
        self.register_buffer("popularity", popularity, persistent=False)
        self.experts = Experts(width, experts)
        self.group: dist.ProcessGroup | None = None  # the ranks that the experts are spread over
        # a twin's routes would follow from garbage: it repeats those of the newest real step
        self.routes: deque[tuple[Tensor, Tensor, Tensor]] = deque(maxlen=calls)
        self.repeat: Iterator[tuple[Tensor, Tensor, Tensor]] | None = None

    def route(self, expert: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The expert of each token, how many go to each, and how many come [source, expert]."""
        sent = received = expert.bincount(minlength=len(self.router.weight))
        if self.group:
            received = torch.empty_like(sent)
            dist.all_to_all_single(received, sent, group=self.group)
        self.routes.append((expert, sent, received.view(-1, len(self.experts.each))))
        return next(self.repeat) if self.repeat else self.routes[-1]

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        scores = (self.router(tokens) + self.popularity).softmax(-1)
        expert, sent, received = self.route(scores.argmax(-1))
        out, back = sent.view(len(received), -1).sum(1).tolist(), received.sum(1).tolist()
        order = expert.argsort(stable=True)
        y = self.move(tokens[order], back, out)
        mine = torch.arange(received.shape[1], device=x.device).repeat(len(received))
        by_expert = mine.repeat_interleave(received.flatten()).argsort(stable=True)
        y = self.experts(y[by_expert], received.sum(0).tolist())[by_expert.argsort()]
        y = self.move(y, out, back)[order.argsort()]
        return (scores.gather(1, expert[:, None]) * y).view_as(x).type_as(x)

    def move(self, x: Tensor, receive: list[int], send: list[int]) -> Tensor:
        """x: [tokens, width], sorted by rank."""
        if self.group is None:
            return x
        return funcol.all_to_all_single_autograd(x, receive, send, self.group)


def experts_in(model: nn.Module) -> list[MixtureOfExperts]:
    return [module for module in model.modules() if isinstance(module, MixtureOfExperts)]


# -- meshes: pure arithmetic -----------------------------------------------------------------------


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
    size: int
    data: int  # ranks that hold the same weights, and so share their gradients
    replicas: int  # parts of these, each of which has all weights
    stages: int
    axes: list[str]  # those that communicate


def parse_mesh(text: str) -> Layout:
    """`dp2tp2`, `dp2x4`, `pp4:1f1b`, `cp4:ring`: a product of axes, then how."""
    product, _, how = text.partition(":")
    if not re.fullmatch(r"ddp[1-9]\d*|(dp[1-9]\d*x[1-9]\d*|(dp|tp|pp|cp|ep)[1-9]\d*)+", product):
        wrong("a mesh", repr(text), "e.g. dp8, dp2x4, dp4tp2, dp2pp4:1f1b, cp8; ddp8 by itself")
    words = re.findall(r"([a-z]p)(\d+)(?:x(\d+))?", product)
    n = dict.fromkeys(AXES, 1) | {axis: int(a) * int(b or 1) for axis, a, b in words}
    if len({axis for axis, _, _ in words}) < len(words):
        wrong("each axis once", repr(text), "e.g. dp2tp2")
    if how not in (SCHEDULES if n["pp"] > 1 else ("", "ring") if n["cp"] > 1 else ("",)):
        wrong(f"{', '.join(SCHEDULES)} after a pipeline", repr(text), "e.g. pp4:1f1b or cp4:ring")
    data = n["dp"] * n["cp"] * n["ep"]
    return Layout(
        text,
        how="ddp" if product.startswith("ddp") else how,
        **n,
        size=math.prod(n.values()),
        data=data,
        replicas=next((int(a) for _, a, b in words if b), 1),
        stages=n["pp"] * (SCHEDULES[how][1] if n["pp"] > 1 else 1),
        axes=[axis for axis in AXES if n[axis] > 1 or (axis == "dp" and data > 1)],
    )


def misfit(key: dict[str, Any]) -> str | None:
    """Which number of a case does not fit its mesh, or None."""
    mesh, config, microbatches = parse_mesh(key["mesh"]), config_of(key), key["microbatches"]
    rows = mesh.dp * mesh.ep * microbatches
    numbers = (
        ("tp", mesh.tp, config.heads, "heads"),
        ("stages", mesh.stages, config.layers, "layers"),
        ("cp * tp", mesh.cp * mesh.tp, config.context, "--sequence-length"),
        ("dp * ep * microbatches", rows, key["global_batch"], "--global-batch"),
        ("ep", mesh.ep, key["experts"], "--experts"),
    )
    if mesh.size != key["world_size"]:
        ranks = key["world_size"]
        return f"mesh {mesh.name} has {mesh.size} ranks, this job {ranks}; e.g. dp{ranks}"
    for name, parts, whole, of in numbers:
        if whole % parts:
            return f"mesh {mesh.name}: {name} = {parts} does not divide {whole}, {of}"
    if microbatches < mesh.stages:
        return f"mesh {mesh.name}: --microbatches {microbatches} for {mesh.stages} stages"
    if key["experts"] and mesh.tp > 1:
        return f"mesh {mesh.name}: tp does not split experts; run it apart from ep and --experts"
    return None


def stages_of(mesh: Layout, place: int) -> list[int]:
    """The stages on the ranks at this place of the pipeline, e.g. of 4: [1, 5], as a V [1, 6]."""
    folded = mesh.pp > 1 and SCHEDULES[mesh.how][2]
    last = 2 * mesh.pp - 1 - place if folded else place + mesh.pp
    return [place, last][: mesh.stages // mesh.pp]


def idle_in_theory(mesh: Layout, microbatches: int) -> float | None:
    """(p - 1) / (v m + p - 1); None where it depends on the two halves of the backward pass."""
    if mesh.how not in ("gpipe", "1f1b", "interleaved", "bfs"):
        return None
    return (mesh.pp - 1) / (mesh.stages // mesh.pp * microbatches + mesh.pp - 1)


def open_meshes(mesh: Layout, fake: Collection[str], job: Job, group: Group) -> dict[str, Any]:
    """A DeviceMesh for each axis; collectives of the axes in `fake` return at once.

    dp holds the ranks of cp and ep, too, and is 2-D for HSDP; `same`: those with the same experts.
    """
    silent = {*fake, "outer", "inner", *(("replicas", "same") if "dp" in fake else ())}
    # DTensor keeps what it has worked out for a mesh, and takes meshes with the same ranks and
    # names for one: without names of its own a twin would talk over the real groups
    of = f" of {mesh.name}, fake {'+'.join(fake) or 'none'}"

    def make(**sizes: int) -> dict[str, DeviceMesh]:
        sizes = {axis: size for axis, size in sizes.items() if size > 1}
        backends: Any = {axis + of: "fake" if axis in silent else job.backend for axis in sizes}
        if not sizes:
            return {}
        kind, shape, names = job.device.type, tuple(sizes.values()), tuple(backends)
        made = init_device_mesh(kind, shape, mesh_dim_names=names, backend_override=backends)
        for each in made.get_all_groups():
            group.more.append(each)
            dist.all_reduce(torch.ones(1, device=job.device), group=each)  # NCCL connects here
        # DTensor's caches keep the mesh for ever, and it, for torch.compile, its groups
        made._pg_registry.clear()
        found = {axis: made[axis + of] for axis in sizes}
        if "replicas" in found:
            found["dp"] = made["replicas" + of, "dp" + of]
        return found

    parts = {"replicas": mesh.replicas, "dp": mesh.data // mesh.replicas}
    found = make(pp=mesh.pp, **parts, tp=mesh.tp)
    if mesh.cp > 1:
        found |= make(outer=mesh.pp * mesh.dp, cp=mesh.cp, inner=mesh.ep * mesh.tp)
    if mesh.ep > 1:
        found |= make(outer=mesh.pp, same=mesh.dp * mesh.cp, ep=mesh.ep, inner=mesh.tp)
    return found


def config_of(key: dict[str, Any]) -> DecoderConfig:
    return replace(DECODERS[key["model"]], context=key["sequence_length"])


def create(key: dict[str, Any], device: torch.device) -> Decoder:
    """The same model on every rank and in every mesh."""
    torch.manual_seed(0)
    with torch.device(device):
        model = Decoder(config_of(key))
        if key["experts"]:
            middle = model.blocks[len(model.blocks) // 2]
            middle.mlp = MixtureOfExperts(model.config.width, key["experts"], key["microbatches"])
    for weight in model.parameters():  # the angles of positions keep their precision
        weight.data = weight.data.to(DTYPES[key["dtype"]])
    return model


def parallelize(model: Decoder, stage: int, mesh: Layout, axes: dict[str, Any]) -> nn.Module:
    """A stage of the model along every axis; FSDP last: it shards what the others left."""
    cut(model, stage, mesh.stages)
    if mesh.tp > 1:
        tensor_parallelize(model, axes["tp"])
    if mesh.cp > 1 and mesh.how != "ring":
        context_parallelize(model, axes["cp"])
    if mesh.ep > 1:
        expert_parallelize(model, axes["ep"], axes.get("same"))
    if mesh.data > 1 and mesh.how == "ddp":
        return replicate(model, axes["dp"])
    if mesh.data > 1:
        data_parallelize(model, axes["dp"], keep=mesh.pp > 1)
    return model


def train(
    key: dict[str, Any], job: Job, axes: dict[str, Any], lr: float
) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], list[Tensor]]]:
    """This rank's part of the model, the optimizer, and the step, which returns losses."""
    mesh = parse_mesh(key["mesh"])
    place = np.unravel_index(job.rank, [getattr(mesh, axis) for axis in AXES])
    stage, dp, cp, ep, _ = map(int, place)
    here, device = stages_of(mesh, stage), job.device
    models = {i: parallelize(create(key, device), i, mesh, axes) for i in here}
    model = nn.ModuleList(models.values())
    optimizer = sgd(model, lr)
    texts = random_text(config_of(key), key["global_batch"], seed=0)
    tokens, targets = (x.chunk(mesh.dp * mesh.ep)[dp * mesh.ep + ep].to(device) for x in texts)
    ring: Any = nullcontext
    if mesh.how == "ring":  # cuts the texts itself
        parts = [tokens, targets, models[0].get_buffer("rotation")]
        ring = partial(context_parallel, axes["cp"], buffers=parts, buffer_seq_dims=[1, 1, 0])
    else:
        tokens, targets = (x.chunk(mesh.cp, dim=1)[cp].contiguous() for x in (tokens, targets))

    def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
        if mesh.tp == 1:
            return next_token_loss(logits, targets)
        split: Any = DTensor.from_local(logits, axes["tp"], [Shard(-1)], run_check=False)
        loss: Any = next_token_loss(split, targets)
        return loss.to_local()

    def whole() -> list[Tensor]:
        loss = loss_of(models[0](tokens), targets)
        loss.backward()
        return [loss]

    forward_backward = whole
    if mesh.pp > 1:
        forward_backward = pipeline(models, axes["pp"], key, (tokens, targets), loss_of)

    def step() -> list[Tensor]:
        optimizer.zero_grad()
        with loss_parallel() if mesh.tp > 1 else nullcontext(), ring():
            losses = forward_backward()
        for weight in (w for moe in experts_in(model) for w in moe.experts.parameters()):
            if weight.grad is not None:
                weight.grad /= mesh.ep  # a sum over tokens of all ep; FSDP's mean is over the rest
        optimizer.step()
        return [loss.detach() for loss in losses]

    return model, optimizer, step


# -- a case ----------------------------------------------------------------------------------------


def lacks(mesh: Layout, job: Job) -> str | None:
    """What this backend or torch cannot do; some of it would hang instead of failing."""
    if mesh.how == "ring" and job.device.type != "cuda":
        return "ring attention (context_parallel) needs CUDA's kernels; try cp without :ring"
    old = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 15)
    if mesh.how in ("zbv", "dualpipev") and job.backend == "gloo" and old:
        return f"{mesh.how} over gloo does not end with torch 2.11; try nccl or torch 2.15"
    return None


def train_reference(key: dict[str, Any], device: torch.device) -> Reference | None:
    """The same training in one process; None where that does not fit into the device's memory."""
    texts = [x.to(device) for x in random_text(config_of(key), key["global_batch"], seed=0)]
    batches = list(zip(*(x.split(math.gcd(4, len(x))) for x in texts), strict=True))

    def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return next_token_loss(model(batch[0]), batch[1])

    try:
        weights = [1 / len(batches)] * len(batches)
        return train_alone(create(key, device), batches, loss_of, weights)
    except torch.OutOfMemoryError:
        return None


def square_norm(model: nn.Module, mesh: Layout) -> float:
    """This rank's share of |gradient|^2: ranks that hold the same weight share it."""
    total = 0.0
    for name, weight in model.named_parameters():
        if (gradient := weight.grad) is not None:
            whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            holders = mesh.size // mesh.pp // (mesh.ep if ".experts." in name else 1)
            total += float(whole.float().square().sum()) / holders
    return total


def build(
    key: dict[str, Any],
    args: argparse.Namespace,
    job: Job,
    reference: Callable[[], Reference | None],
    group: Group,
) -> Workload:
    mesh = parse_mesh(key["mesh"])
    if problem := lacks(mesh, job):
        raise ValueError(problem)
    wanted: Reference | None = share(reference() if job.rank == 0 else None, group.control)
    fakes: dict[str, list[str]] = {"step": []}
    if not args.no_breakdown and mesh.axes:
        fakes |= {f"{axis} fake": [axis] for axis in mesh.axes} if mesh.axes[1:] else {}
        fakes["compute"] = mesh.axes
    meshes = {name: open_meshes(mesh, fake, job, group) for name, fake in fakes.items()}
    before = start_peak(job.device)
    model, optimizer, step = train(key, job, meshes["step"], lr=wanted.lr if wanted else 0.0)
    losses, norms = [], []
    for _ in range(CHECKED_STEPS):
        losses.append([float(loss) for loss in step()])
        norms.append(square_norm(model, mesh))
    optimizer.param_groups[0]["lr"] = 0.0
    start_peak(job.device)  # without the whole model that the shards were cut from, and the check
    step()
    facts = peak(job.device, before) | {"losses": losses, "norms": norms, "reference": wanted}
    steps: dict[str, Callable[[], object]] = {"step": step}
    for name in list(fakes)[1:]:
        twin, _, steps[name] = train(key, job, meshes[name], lr=0.0)
        for moe, original in zip(experts_in(twin), experts_in(model), strict=True):
            moe.repeat = itertools.cycle(list(original.routes))
    return Workload(steps, facts=lambda: facts)


def derive(device: torch.device, case: Case, facts: list[dict[str, Any]]) -> None:
    """Fill in the metrics and the check, on rank 0."""
    key, m, mesh = case.key, case.metrics, parse_mesh(case.key["mesh"])
    m |= step_metrics(case.samples_s["step"], key["global_batch"])
    m["tokens_per_s"] = m["samples_per_s"] * key["sequence_length"]
    m["tokens_per_s_per_rank"] = m["tokens_per_s"] / mesh.size
    if top := peak_flops(device, key["dtype"]):
        m["mfu"] = m["tokens_per_s_per_rank"] * flops_per_token(config_of(key)) / top
    m["memory_gib"] = max(fact["memory_gib"] for fact in facts)
    m["memory_min_gib"] = min(fact["memory_gib"] for fact in facts)
    if "compute" in case.samples_s:
        m |= breakdown(mesh, case)
    if (wanted := facts[0]["reference"]) is None:
        case.check = "skipped: one device cannot hold the model, to compare with"
        return
    tolerance = TOLERANCES[key["dtype"]]
    rows = [[x for fact in facts for x in fact["losses"][i]] for i in range(CHECKED_STEPS)]
    losses, alone = ([float(np.mean(row)) for row in each] for each in (rows, wanted.losses))
    norms = np.sqrt(np.sum([fact["norms"] for fact in facts], axis=0)).tolist()
    problem = compare_training("the gradient's norm", norms, wanted.norms, tolerance)
    problem = problem or compare_training("the loss", losses, alone, tolerance)
    case.check = verdict(problem)


def breakdown(mesh: Layout, case: Case) -> dict[str, Any]:
    """What each axis exposes, and what each stage of a pipeline computes and waits."""
    samples = {name: np.array(rows) for name, rows in case.samples_s.items()}  # [ranks, n]
    slowest = {name: rows.max(axis=0) for name, rows in samples.items()}
    compute = slowest["compute"]
    found: dict[str, Any] = {"compute_s": float(np.median(compute))}
    found["compute_ci95_s"] = median_interval(compute)
    for axis in mesh.axes:
        silent = slowest.get(f"{axis} fake", compute)
        gap, interval = difference(slowest["step"], silent, case.rounds)
        found |= {f"exposed_{axis}_s": gap, f"exposed_{axis}_ci95_s": interval}
    rows, of = samples["compute"], "rank"
    if mesh.pp > 1:
        # [places in the pipeline, n], the slowest rank at each: pp is the outermost axis
        shape, of = (mesh.pp, -1, rows.shape[1]), "stage"
        alone = samples.get("pp fake", rows).reshape(shape).max(axis=1)
        rows = rows.reshape(shape).max(axis=1)
        idle = 1 - np.median(alone, axis=1) / np.median(slowest["step"])
        found["pipeline_idle"] = float(idle.mean())
        found["pipeline_idle_theory"] = idle_in_theory(mesh, case.key["microbatches"])
        found["stage_idle"] = idle.round(4).tolist()
        found["stage_compute_s"] = np.median(rows, axis=1).round(9).tolist()
    if slow := straggler(rows):
        found |= {f"straggler_{of}": slow[0], "straggler_factor": slow[1]}
    return found


def best(cases: list[Case]) -> str | None:
    """`# best: A, 1.12x B (95 % 1.09 to 1.15)`, and which neighbours cannot be told apart.

    The ratio's bounds are those of the two medians at their worst. What changed between the cases,
    which were measured one after the other, is not in them.
    """
    ranked = sorted((c for c in cases if not c.failed), key=lambda c: c.metrics["step_time_p50_s"])
    parts: list[str] = []
    for a, b in itertools.pairwise(ranked):
        names = [case.key["mesh"] for case in (a, b)]
        x, y = (case.metrics["step_time_ci95_s"] for case in (a, b))
        low, high = (y[0] / x[1], y[1] / x[0]) if x and y else (0.0, math.inf)
        if not parts:
            ratio = b.metrics["step_time_p50_s"] / a.metrics["step_time_p50_s"]
            within = f"95 % {low:.2f} to {high:.2f}" if low else "too few samples"
            parts.append(f"# best: {names[0]}, {ratio:.2f}x {names[1]} ({within})")
        if low <= 1:
            parts.append(f"{names[0]} and {names[1]} cannot be told apart")
    return "; ".join(parts) or None


def slowest_of(case: Case) -> str:
    for kind in ("rank", "stage"):
        if (number := case.metrics.get(f"straggler_{kind}")) is not None:
            return f"{kind} {number}: {case.metrics['straggler_factor']:.2f}x"
    return "-"


def columns(meshes: list[Layout], detailed: bool, device: torch.device) -> Columns:
    axes = [axis for axis in ("dp", "tp", "pp", "cp", "ep") if any(axis in m.axes for m in meshes)]
    shown: Columns = {
        "mesh": lambda case: case.key["mesh"],
        "tokens/s": metric("tokens_per_s", digits=0),
        "95% ci\nof p50": relative("step_time_ci95_rel"),
        "tokens/s\n/rank": metric("tokens_per_s_per_rank", digits=0),
        "step\n(ms)": metric("step_time_p50_s", 1e3, 1),
    }
    if device.type == "cuda":
        shown["mfu\n(%)"] = metric("mfu", 100, 1)
    if detailed:
        shown["compute\n(ms)"] = metric("compute_s", 1e3, 1)
    for axis in axes if detailed else ():
        shown[f"exposed\n{axis} (ms)"] = metric(f"exposed_{axis}_s", 1e3, 1)
        shown[f"{axis}\n+-(ms)"] = half_width(f"exposed_{axis}_ci95_s", 1e3, 1)
    if detailed and "pp" in axes:
        shown["idle\n(%)"] = metric("pipeline_idle", 100, 0)
        shown["theory\n(%)"] = metric("pipeline_idle_theory", 100, 0)
    memory = "reserved" if device.type == "cuda" else "RSS growth"
    shown[f"{memory}\nmax (GiB)"] = metric("memory_gib", digits=3)
    shown["min\n(GiB)"] = metric("memory_min_gib", digits=3)
    return shown | {"slowest": slowest_of}


# -- the sweep -------------------------------------------------------------------------------------


def default_meshes(n: int) -> list[str]:
    """dp, tp, both, and a pipeline of up to 4 stages, on n ranks."""
    p = math.gcd(n, 4)
    pipeline = f"dp{n // p}pp{p}:1f1b" if n > p else f"pp{p}:1f1b"
    both = n > 2 and n % 2 == 0
    names = {f"dp{n}": True, f"tp{n}": n > 1, f"dp{n // 2}tp2": both, pipeline: p > 1}
    return [name for name, there in names.items() if there]


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--mesh", type=list_of(parse_mesh), help="a list (default, of 4: dp4,tp4,dp2tp2,pp4:1f1b)")
    models = f"{', '.join(DECODERS)} (default: decoder-124m, CPU decoder-tiny)"
    add("--model", choices=list(DECODERS), metavar="NAME", help=models)
    dtypes = "fp32 or bf16: of weights, gradients and optimizer (default: fp32)"
    add("--dtype", choices=list(DTYPES), default="fp32", metavar="DTYPE", help=dtypes)
    batch = "sequences in a step, of all ranks together (default: 64, CPU 16)"
    add("--global-batch", type=positive_int, metavar="N", help=batch)
    add("--sequence-length", type=positive_int, metavar="N", help="tokens (default: the model's)")
    microbatches = "of a pipeline (default: 2 for each of its ranks)"
    add("--microbatches", type=positive_int, metavar="N", help=microbatches)
    experts = "in the middle block of the model, under every mesh (default: 8 if one has ep, or 0)"
    add("--experts", type=positive_int, metavar="N", help=experts)
    add("--no-breakdown", action="store_true", help="time the steps alone, without twins")
    add_common_flags(parser)
    args = parser.parse_args(argv)
    cuda = torch.cuda.is_available() and args.device != "cpu"
    args.model = args.model or ("decoder-124m" if cuda else "decoder-tiny")
    args.global_batch = args.global_batch or (64 if cuda else 16)
    args.sequence_length = args.sequence_length or DECODERS[args.model].context
    return args


def plan(args: argparse.Namespace, job: Job) -> list[dict[str, Any]]:
    """The key of each case."""
    meshes = args.mesh or [parse_mesh(name) for name in default_meshes(job.world_size)]
    experts = args.experts or (8 if any(mesh.ep > 1 for mesh in meshes) else 0)
    names = ("model", "dtype", "sequence_length", "global_batch")
    same = {name: getattr(args, name) for name in names} | {"experts": experts}
    same |= {"world_size": job.world_size, "device": job.device.type, "backend": job.backend}
    parts = [(args.microbatches or 2 * mesh.pp) if mesh.pp > 1 else 1 for mesh in meshes]
    return [{"mesh": m.name, "microbatches": n, **same} for m, n in zip(meshes, parts, strict=True)]


def main() -> int:
    args = parse_args()
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # the check gathers
    torch.set_flush_denormal(True)  # a twin's garbage must not be slow to compute with
    with Benchmark("parallel_sweep", args) as bench:
        device, keys = bench.job.device, plan(args, bench.job)
        problems = [problem for key in keys if (problem := misfit(key))]
        if problems and (args.mesh or len(problems) == len(keys)):
            bench.refuse(problems[0])
        keys = [key for key in keys if not misfit(key)]
        meshes = [parse_mesh(key["mesh"]) for key in keys]
        shown = columns(meshes, not args.no_breakdown, device)
        widest = [max((mesh.name for mesh in meshes), key=len)]
        title = f"{args.model}, {args.sequence_length} tokens, global batch {args.global_batch}"
        experts = f", {keys[0]['experts']} experts" if keys[0]["experts"] else ""
        bench.begin_table(f"{title}, {args.dtype}{experts}", shown, widest)
        reference = cache(partial(train_reference, keys[0], device))  # the same for all meshes
        done = [
            bench.measure(
                key, partial(build, key, args, bench.job, reference), partial(derive, device)
            )
            for key in keys
        ]
        cases = [case for case in done if case]  # on rank 0
        bench.print("")
        for case in cases:
            if stages := case.metrics.get("stage_compute_s"):
                idle = ", ".join(f"{share:.0%}" for share in case.metrics["stage_idle"])
                times = ", ".join(f"{seconds * 1e3:.1f}" for seconds in stages)
                bench.print(f"# {case.key['mesh']}: stages compute {times} ms, idle {idle}")
        if line := best(cases):
            bench.print(line)
    return bench.status


if __name__ == "__main__":
    sys.exit(record(main)())
