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
    theory         (p - 1) / (v m + p - 1): p stages of ranks, v stages a rank, m microbatches
    tokens/s       sequences of the global batch * their length / step

    torchrun --nproc-per-node 4 benchmarks/parallel_sweep.py
    torchrun --nproc-per-node 8 benchmarks/parallel_sweep.py --model decoder-1.3b --dtype bf16 \\
        --mesh dp8,dp4tp2,dp2pp4:1f1b,dp2pp4:zbv,cp8 --json report.jsonl

Loss and gradient norm of 3 steps are compared with one process. docs/parallel_sweep.md shows how
to read the table. BSD-3-Clause: copy the function of the axis you need.
"""

import argparse
import contextlib
import dataclasses
import itertools
import logging
import math
import re
import sys
import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
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
from common.cli import Parser, add_common_flags, list_of, number, positive_int, wrong
from common.decoder import (
    DECODERS,
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
from common.stats import Interval, difference, median_interval, step_metrics, straggler
from common.table import Columns, metric, relative

# schedule: torch's name, stages a rank, is stage i of the second half on the last rank but i
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
DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16}
TOLERANCES = {"fp32": 2e-3, "tf32": 1e-2, "bf16": 5e-2}  # of loss and norm, over the first one


# -- meshes: pure arithmetic -----------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """How many ranks each axis has. dp: all of it, of which `replicas` hold the same shard."""

    name: str
    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    tp: int = 1
    replicas: int = 1
    ddp: bool = False
    ring: bool = False
    schedule: str = ""

    @property
    def size(self) -> int:
        return math.prod(getattr(self, axis) for axis in AXES)

    @property
    def data(self) -> int:
        """Ranks that hold the same weights, and so share their gradients."""
        return self.dp * self.cp * self.ep

    @property
    def stages(self) -> int:
        return self.pp * (SCHEDULES[self.schedule][1] if self.schedule else 1)

    @property
    def axes(self) -> list[str]:
        """The axes that communicate; a tuple over data counts as dp."""
        return [a for a in AXES if getattr(self, a) > 1 or (a == "dp" and self.data > 1)]


def parse_mesh(text: str) -> Layout:
    """`dp2tp2`, `dp2x4`, `pp4:1f1b`, `cp4:ring`: a product of axes, then how."""
    product, *ways = text.split(":")
    if not re.fullmatch(r"((ddp|dp|tp|pp|cp|ep)[1-9]\d*(x[1-9]\d*)?)+", product):
        wrong("a mesh", repr(text), "e.g. dp8, dp2x4, dp4tp2, dp2pp4:1f1b, cp8")
    found: dict[str, Any] = {}
    for word, first, second in re.findall(r"([a-z]+?)(\d+)(?:x(\d+))?", product):
        axis = word.removeprefix("d") if word == "ddp" else word
        if axis in found or (second and word != "dp"):
            wrong("each axis once, and NxM for dp alone", repr(text), "e.g. dp2x4tp2")
        found[axis] = int(first) * int(second or 1)
        found |= {"ddp": True} if word == "ddp" else {}
        found |= {"replicas": int(first)} if second else {}
    if "ring" in ways and found.get("cp", 1) > 1:
        ways.remove("ring")
        found["ring"] = True
    pipeline = found.get("pp", 1) > 1
    if len(ways) != pipeline or any(way not in SCHEDULES for way in ways):
        known = f"{', '.join(SCHEDULES)} after a pipeline, ring after cp"
        wrong(known, repr(text), "e.g. pp4:1f1b or cp4:ring")
    if found.get("ddp") and set(found) - {"ddp", "dp", "cp"}:
        wrong("ddp by itself or with cp", repr(text), "dp (FSDP2) goes with every axis")
    return Layout(text, schedule="".join(ways), **found)


def misfit(
    mesh: Layout, ranks: int, model: str, sequence: int, batch: int, microbatches: int, experts: int
) -> str | None:
    """Which number does not fit, or None."""
    config = DECODERS[model]
    wanted = (
        (ranks, mesh.size, "ranks", "the ranks of the job"),
        (config.heads, mesh.tp, "tp", f"heads of {model}"),
        (config.vocab, mesh.tp, "tp", f"words of {model}"),
        (config.layers, mesh.stages, "stages", f"layers of {model}"),
        (sequence, mesh.cp * mesh.tp * (2 if mesh.ring else 1), "cp * tp", "--sequence-length"),
        (batch, mesh.dp * mesh.ep * microbatches, "dp * ep * microbatches", "--global-batch"),
        (experts or mesh.ep, mesh.ep, "ep", "--experts"),
    )
    if mesh.size != ranks:
        return f"mesh {mesh.name} has {mesh.size} ranks, this job {ranks}; e.g. dp{ranks}"
    for whole, parts, name, of in wanted:
        if whole % parts:
            return f"mesh {mesh.name}: {name} = {parts} does not divide {whole}, {of}"
    if microbatches < mesh.stages:
        return f"mesh {mesh.name}: --microbatches {microbatches} for {mesh.stages} stages"
    if mesh.schedule in ("interleaved", "izb") and microbatches % mesh.pp:
        return f"mesh {mesh.name}: pp = {mesh.pp} does not divide --microbatches {microbatches}"
    if experts and mesh.tp > 1:
        return f"mesh {mesh.name}: tp does not split experts; run it apart from ep and --experts"
    return None


def coordinates(mesh: Layout, rank: int) -> dict[str, int]:
    """The rank's place along each axis."""
    places = np.unravel_index(rank, [getattr(mesh, axis) for axis in AXES])
    return dict(zip(AXES, map(int, places), strict=True))


def stages_of(mesh: Layout, place: int) -> list[int]:
    """The stages on the ranks at this place of the pipeline, e.g. of 4: [1, 5], as a V [1, 6]."""
    _, count, folded = SCHEDULES[mesh.schedule or "1f1b"]
    last = 2 * mesh.pp - 1 - place if folded else place + mesh.pp
    return [place, last][:count]


def idle_in_theory(mesh: Layout, microbatches: int) -> float | None:
    """(p - 1) / (v m + p - 1); None where it depends on the two halves of the backward pass."""
    if not mesh.schedule or mesh.schedule in ("izb", "zbv", "dualpipev"):
        return None
    return (mesh.pp - 1) / (mesh.stages // mesh.pp * microbatches + mesh.pp - 1)


# -- a mixture of experts --------------------------------------------------------------------------


class Experts(nn.Module):
    """MLPs with one weight tensor each way: [experts, width, 4 width] and back."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(experts, width, 4 * width) * width**-0.5)
        self.down = nn.Parameter(torch.randn(experts, 4 * width, width) * (4 * width) ** -0.5)

    def forward(self, x: Tensor, counts: list[int]) -> Tensor:
        """x: [tokens, width], sorted by expert; counts: the tokens of each."""
        parts = zip(x.split(counts), self.up, self.down, strict=True)
        return torch.cat([F.gelu(part @ up) @ down for part, up, down in parts])


class MixtureOfExperts(nn.Module):
    """Each token goes to one expert, the first ones more often. [batch, sequence, width].

    Routes: the expert of each token, and how many tokens of each source this rank's experts get.
    They follow from the data, which a fake axis spoils: a twin repeats those of the real run.
    """

    def __init__(self, width: int, experts: int, skew: float, calls: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        popularity = -skew * torch.arange(1, experts + 1).log()  # Zipf's law
        self.register_buffer("popularity", popularity, persistent=False)
        self.experts = Experts(width, experts)
        self.group: dist.ProcessGroup | None = None
        self.routes: deque[tuple[Tensor, Tensor]] = deque(maxlen=calls)  # of the newest step
        self.repeat: Iterator[tuple[Tensor, Tensor]] | None = None

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        scores = (self.router(tokens) + self.popularity).softmax(-1)
        expert = scores.argmax(-1)
        received = sent = expert.bincount(minlength=scores.shape[1])
        if self.group:
            received = torch.empty_like(sent)
            dist.all_to_all_single(received, sent, group=self.group)
        self.routes.append((expert, received))
        if self.repeat:
            expert, received = next(self.repeat)
            sent = expert.bincount(minlength=scores.shape[1])
        order = expert.argsort(stable=True)
        y = self.dispatch(tokens[order], sent, received)
        return (scores.gather(1, expert[:, None]) * y[order.argsort()]).view_as(x)

    def dispatch(self, x: Tensor, sent: Tensor, received: Tensor) -> Tensor:
        """To the ranks of the experts and back. x: [tokens, width], sorted by expert."""
        size = self.group.size() if self.group else 1
        received = received.view(size, -1)  # [source, expert here]
        out, back = sent.view(size, -1).sum(1).tolist(), received.sum(1).tolist()
        if self.group:
            x = funcol.all_to_all_single_autograd(x, back, out, self.group)
        local = torch.arange(received.shape[1], device=x.device).repeat(size)
        order = local.repeat_interleave(received.flatten()).argsort(stable=True)
        y = self.experts(x[order], received.sum(0).tolist())[order.argsort()]
        if self.group:
            y = funcol.all_to_all_single_autograd(y, out, back, self.group)
        return y


# -- the axes: torch's public API ------------------------------------------------------------------


def tensor_parallelize(model: Decoder, mesh: DeviceMesh) -> None:
    """Split heads, hidden units and words; between them each rank has a part of the sequence."""
    part = Shard(1)
    plan: dict[str, Any] = {
        "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=part),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=part),  # a part of the logits, for loss_parallel
    }
    in_block = {
        "attention_norm": SequenceParallel(),
        "attention": PrepareModuleInput(
            input_layouts=(part, None), desired_input_layouts=(Replicate(), None)
        ),
        **{f"attention.{name}": ColwiseParallel() for name in "qkv"},
        "attention.o": RowwiseParallel(output_layouts=part),
        "mlp_norm": SequenceParallel(),
        "mlp": PrepareModuleInput(input_layouts=part, desired_input_layouts=Replicate()),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=part),
    }
    for block in model.blocks:
        parallelize_module(block, mesh, in_block)
    # other stages of a pipeline have an nn.Identity there
    here = {name: style for name, style in plan.items() if list(getattr(model, name).parameters())}
    parallelize_module(model, mesh, here)


def context_parallelize(model: Decoder, mesh: DeviceMesh, sequence: int) -> None:
    """Each rank has a part of every sequence, and gathers the keys and values of all of it."""
    rotation = model.get_buffer("rotation")
    everywhere = torch.arange(sequence, device=rotation.device)
    here = everywhere.chunk(mesh.size())[mesh.get_local_rank()]
    seen = here[:, None] >= everywhere
    model.rotation = rotation[here]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kv = DTensor.from_local(torch.stack((k, v)), mesh, [Shard(3)], run_check=False)
        k, v = kv.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)

    for attention in (m for m in model.modules() if isinstance(m, Attention)):
        attention.attend = attend  # type: ignore[method-assign]


def expert_parallelize(model: Decoder, ep: DeviceMesh, dp: DeviceMesh | None) -> None:
    """Each rank keeps some of the experts; the ranks of dp that have the same ones shard them."""
    for moe in (m for m in model.modules() if isinstance(m, MixtureOfExperts)):
        moe.group = ep.get_group()
        for name, weight in list(moe.experts.named_parameters()):
            mine = weight.detach().chunk(ep.size())[ep.get_local_rank()].clone()
            setattr(moe.experts, name, nn.Parameter(mine))
        if dp is not None:
            fully_shard(moe.experts, mesh=dp)


def data_parallelize(model: Decoder, mesh: DeviceMesh, keep: bool) -> None:
    """FSDP2, a unit for each block; a 2-D mesh is HSDP. keep: weights until the backward pass."""
    parted = [m for m in model.modules() if isinstance(m, MixtureOfExperts) and m.group]
    mine = {p for m in parted for p in m.experts.parameters()}  # other ranks of ep have others
    for unit in (*model.blocks, model):
        fully_shard(unit, mesh=mesh, reshard_after_forward=not keep, ignored_params=mine)


def cut(model: Decoder, stage: int, stages: int) -> None:
    """Leave a stage of a pipeline: its blocks; tokens in the first, norm and head in the last."""
    count = len(model.blocks) // stages
    model.blocks = model.blocks[stage * count : (stage + 1) * count]
    if stage > 0:
        model.tokens = nn.Identity()
    if stage < stages - 1:
        model.norm, model.head = nn.Identity(), nn.Identity()


# -- training under a mesh -------------------------------------------------------------------------


class Meshes:
    """The device meshes of a case by axis, made over all ranks. Axes of one rank are left out.

    weights: pp, dp (2-D for HSDP) and tp, where what shares weights is a rank of dp. tokens: dp,
    cp and ep. Collectives of the axes in `fake` return at once and move nothing.
    """

    def __init__(self, mesh: Layout, fake: Collection[str], job: Job) -> None:
        self.groups: list[dist.ProcessGroup] = []
        # DTensor keeps what it has worked out for a mesh, and takes meshes with the same ranks and
        # names for one: without names of its own a twin would talk over the real groups
        of = f" of {mesh.name}, fake {'+'.join(fake) or 'none'}"

        def make(shape: dict[str, int], silent: Collection[str]) -> dict[str, DeviceMesh]:
            backends: dict[Any, Any] = {
                name + of: "fake" if name in silent else job.backend for name in shape
            }
            device, sizes, names = job.device.type, tuple(shape.values()), tuple(backends)
            made = init_device_mesh(device, sizes, mesh_dim_names=names, backend_override=backends)
            self.groups += made.get_all_groups()
            # DTensor's caches keep the mesh for ever, and it, for torch.compile, its groups
            made._pg_registry.clear()
            if "shard" not in shape:
                return {name: made[name + of] for name in shape}
            hybrid = made["replicate" + of, "shard" + of]
            return {n: made[n + of] for n in shape if n in AXES} | {"dp": hybrid}

        data = {"dp": mesh.data}
        if mesh.replicas > 1:
            data = {"replicate": mesh.replicas, "shard": mesh.data // mesh.replicas}
        shape = {"pp": mesh.pp, **data, "tp": mesh.tp}
        shape = {name: size for name, size in shape.items() if size > 1 or name == "shard"}
        silent = {*fake, *(data if "dp" in fake else ())}
        self.weights = make(shape, silent) if shape else {}
        shape = {axis: size for axis in AXES if (size := getattr(mesh, axis)) > 1}
        self.tokens = make(shape, {*fake, "pp", "tp"}) if mesh.cp * mesh.ep > 1 else {}


@dataclass
class Training:
    """step: one training step; the losses of its microbatches where the last stage is."""

    models: dict[int, nn.Module]  # the stages of this rank
    optimizer: torch.optim.Optimizer
    step: Callable[[], list[Tensor]]
    moe: list[MixtureOfExperts]


def config_of(key: dict[str, Any]) -> DecoderConfig:
    return dataclasses.replace(DECODERS[key["model"]], context=key["sequence_length"])


def create(key: dict[str, Any], device: torch.device) -> Decoder:
    """The same model on every rank and in every mesh."""
    torch.manual_seed(0)
    with torch.device(device):
        model = Decoder(config_of(key))
        if key["experts"]:
            block = model.blocks[len(model.blocks) // 2]
            sizes = (model.config.width, key["experts"])
            block.mlp = MixtureOfExperts(*sizes, key["skew"], calls=key["microbatches"])
    rotation = model.rotation
    model.to(DTYPES[key["dtype"]])
    model.rotation = rotation  # angles keep their precision
    return model


def train(mesh: Layout, key: dict[str, Any], job: Job, meshes: Meshes) -> Training:
    """The model of this rank, parallelized along every axis of the mesh, and its training step."""
    config, place, device = config_of(key), coordinates(mesh, job.rank), job.device
    weights, tensor = meshes.weights, meshes.weights.get("tp")
    texts = random_text(config, key["global_batch"], seed=0)
    row, column = place["dp"] * mesh.ep + place["ep"], place["cp"]
    tokens, targets = (x.chunk(mesh.dp * mesh.ep)[row].to(device) for x in texts)
    if not mesh.ring:
        tokens, targets = (x.chunk(mesh.cp, dim=1)[column].contiguous() for x in (tokens, targets))
    models: dict[int, nn.Module] = {}
    rotations = []
    for stage in stages_of(mesh, place["pp"]):
        model = create(key, device)
        cut(model, stage, mesh.stages)
        if tensor is not None:
            tensor_parallelize(model, tensor)
        if mesh.cp > 1 and not mesh.ring:
            context_parallelize(model, meshes.tokens["cp"], key["sequence_length"])
        if mesh.ep > 1:
            expert_parallelize(model, meshes.tokens["ep"], meshes.tokens.get("dp"))
        rotations.append(model.get_buffer("rotation"))
        models[stage] = model
        if mesh.ddp:
            group = weights["dp"].get_group()
            models[stage] = ddp = DistributedDataParallel(model, process_group=group)
            if dist.get_backend(group) == "fake":  # whose futures DDP cannot use
                ddp.register_comm_hook(None, noop_hook)
        elif mesh.data > 1:
            data_parallelize(model, weights["dp"], keep=mesh.pp > 1)
    modules = [m for model in models.values() for m in model.modules()]
    moe = [m for m in modules if isinstance(m, MixtureOfExperts)]
    optimizer = sgd(nn.ModuleList(models.values()), 0.0)

    def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
        if tensor is None:
            return next_token_loss(logits, targets)
        split = DTensor.from_local(logits, tensor, [Shard(-1)], run_check=False)
        loss: Any = next_token_loss(split, targets)
        return loss.to_local()

    def forward_backward() -> list[Tensor]:
        loss = loss_of(next(iter(models.values()))(tokens), targets)
        loss.backward()
        return [loss.detach()]

    if mesh.schedule:
        group = weights["pp"].get_group()
        forward_backward = pipeline(mesh, key, models, group, (tokens, targets), loss_of)

    def step() -> list[Tensor]:
        optimizer.zero_grad()
        with contextlib.ExitStack() as stack:
            if tensor is not None:
                stack.enter_context(loss_parallel())
            if mesh.ring:
                parts = [tokens, targets, *rotations]
                dims = [1, 1] + [0] * len(rotations)
                ring = meshes.tokens["cp"]
                stack.enter_context(context_parallel(ring, buffers=parts, buffer_seq_dims=dims))
            losses = forward_backward()
        for weight in (w for m in moe for w in m.experts.parameters()):
            # a sum over the ranks of ep, each with a mean over its own tokens; FSDP's is over dp
            if weight.grad is not None:
                weight.grad /= mesh.ep
        optimizer.step()
        return losses

    return Training(models, optimizer, step, moe)


def pipeline(
    mesh: Layout,
    key: dict[str, Any],
    models: dict[int, nn.Module],
    group: dist.ProcessGroup,
    texts: tuple[Tensor, Tensor],
    loss_of: Callable[[Tensor, Tensor], Tensor],
) -> Callable[[], list[Tensor]]:
    """Forward and backward of the stages of this rank, in the order of the schedule."""
    tokens, targets = texts
    batch, sequence = len(tokens) // key["microbatches"], tokens.shape[1]
    config, first, last = config_of(key), 0 in models, mesh.stages - 1 in models
    meta = partial(torch.empty, device="meta", dtype=DTYPES[key["dtype"]])
    # the shapes between stages, which a fake group cannot find out
    words = meta(batch, sequence, dtype=torch.int64)
    hidden = meta(batch, sequence // mesh.tp, config.width).requires_grad_()
    logits = meta(batch, sequence, config.vocab // mesh.tp).requires_grad_()
    stages = []
    for stage, model in models.items():
        entering = hidden if stage else words
        leaving = hidden if stage < mesh.stages - 1 else logits
        place = (stage, mesh.stages, tokens.device)
        stages.append(PipelineStage(model, *place, (entering,), (leaving,), group=group))
    name, count, _ = SCHEDULES[mesh.schedule]
    scheduled: Any = stages if count > 1 else stages[0]
    schedule = get_schedule_class(name)(scheduled, key["microbatches"], loss_of)

    def forward_backward() -> list[Tensor]:
        losses: list[Tensor] = []
        inputs = (tokens,) if first else ()
        wanted = targets if last else None
        schedule.step(*inputs, target=wanted, losses=losses, return_outputs=False)
        return [loss.detach() for loss in losses]

    return forward_backward


# -- a case ----------------------------------------------------------------------------------------


def lacks(mesh: Layout, key: dict[str, Any], job: Job) -> str | None:
    """What this backend or torch cannot do; some of it would hang instead of failing."""
    if mesh.ring and job.device.type != "cuda":
        return "ring attention (context_parallel) needs CUDA's kernels; try cp without :ring"
    old = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 15)
    if mesh.schedule in ("zbv", "dualpipev") and job.backend == "gloo" and old:
        return f"{mesh.schedule} over gloo does not end with torch 2.11; try nccl or torch 2.15"
    if key["dtype"] == "tf32" and job.device.type != "cuda":
        return "tf32 is a mode of CUDA's tensor cores; try --dtype fp32 or bf16"
    return None


def reference(key: dict[str, Any], device: torch.device) -> Reference | None:
    """The same training in one process; None where that does not fit into the device's memory."""
    texts = [x.to(device) for x in random_text(config_of(key), key["global_batch"], seed=0)]
    at_once = math.gcd(4, key["global_batch"])
    batches = list(zip(*(x.split(at_once) for x in texts), strict=True))

    def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return next_token_loss(model(batch[0]), batch[1])

    try:
        shares = [1 / len(batches)] * len(batches)
        return train_alone(create(key, device), batches, loss_of, shares)
    except torch.OutOfMemoryError:
        return None


def square_norms(models: dict[int, nn.Module], place: dict[str, int]) -> dict[str, float]:
    """Of the gradients, by the part of the model they belong to: ranks may hold the same part."""
    found: dict[str, float] = {}
    for stage, model in models.items():
        for name, weight in model.named_parameters():
            part = f"stage {stage}, experts {place['ep']}" if ".experts." in name else str(stage)
            if weight.grad is not None:
                square = weight.grad.float().square().sum()
                whole = square.full_tensor() if isinstance(square, DTensor) else square
                found[part] = found.get(part, 0.0) + float(whole)
    return found


def build(
    key: dict[str, Any],
    args: argparse.Namespace,
    job: Job,
    references: dict[str, Reference | None],
    group: Group,
) -> Workload:
    mesh = parse_mesh(key["mesh"])
    if problem := lacks(mesh, key, job):
        raise ValueError(problem)
    torch.set_float32_matmul_precision("high" if key["dtype"] == "tf32" else "highest")
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # the check's collectives
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    torch.set_flush_denormal(True)  # a twin's garbage must not be slow to compute with
    if job.rank == 0 and not references:  # the same for all meshes of a run
        references["one process"] = reference(key, job.device)
    wanted: Reference | None = share(references.get("one process"), group.control)
    fakes: dict[str, list[str]] = {"step": []}
    if not args.no_breakdown and mesh.axes:
        fakes |= {f"{axis} fake": [axis] for axis in mesh.axes} if mesh.axes[1:] else {}
        fakes["compute"] = mesh.axes
    meshes = {name: Meshes(mesh, fake, job) for name, fake in fakes.items()}
    for each in (g for m in meshes.values() for g in m.groups):
        group.more.append(each)
        dist.all_reduce(torch.ones(1, device=job.device), group=each)  # NCCL connects here
    memory = start_peak(job.device)
    real = train(mesh, key, job, meshes["step"])
    start_peak(job.device)  # its shards count, not the whole model that they were cut from
    place = coordinates(mesh, job.rank)
    real.optimizer.param_groups[0]["lr"] = wanted.lr if wanted else 0.0
    losses, norms = [], []
    for _ in range(CHECKED_STEPS):
        losses.append([float(loss) for loss in real.step()])
        norms.append(square_norms(real.models, place))
    facts = peak(job.device, memory) | {"losses": losses, "norms": norms}
    real.optimizer.param_groups[0]["lr"] = 0.0
    real.step()
    steps: dict[str, Callable[[], object]] = {"step": real.step}
    for name in list(fakes)[1:]:
        twin = train(mesh, key, job, meshes[name])
        for moe, original in zip(twin.moe, real.moe, strict=True):
            moe.repeat = itertools.cycle(list(original.routes))
        steps[name] = twin.step
    received = [float(r.sum()) for moe in real.moe for _, r in moe.routes]
    return Workload(steps, facts=lambda: facts | {"received": sum(received)})


# -- what rank 0 makes of it -----------------------------------------------------------------------


def wrong_training(wanted: Reference, facts: list[dict[str, Any]], tolerance: float) -> str | None:
    """The first thing that differs from one process, or between ranks that should agree."""
    want = [sum(row) / len(row) for row in wanted.losses]
    losses, norms = [], []
    for step in range(CHECKED_STEPS):
        mine = [x for fact in facts for x in fact["losses"][step]]
        losses.append(sum(mine) / len(mine))
        parts: dict[str, float] = {}
        for rank, fact in enumerate(facts):
            for part, square in fact["norms"][step].items():
                first = parts.setdefault(part, square)
                if not abs(square - first) <= tolerance * first:
                    return f"rank {rank} has another gradient than others of part {part}"
        norms.append(math.sqrt(sum(parts.values())))
    problem = compare_training("the loss", losses, want, tolerance)
    return problem or compare_training("the gradient's norm", norms, wanted.norms, tolerance)


def derive(
    job: Job,
    references: dict[str, Reference | None],
    case: Case,
    facts: list[dict[str, Any]],
) -> None:
    """Fill in the metrics and the check."""
    key, m = case.key, case.metrics
    mesh = parse_mesh(key["mesh"])
    samples = {name: np.array(rows) for name, rows in case.samples_s.items()}
    slowest = {name: rows.max(axis=0) for name, rows in samples.items()}
    m |= step_metrics(samples["step"], key["global_batch"])
    m["tokens_per_s"] = m["samples_per_s"] * key["sequence_length"]
    m["tokens_per_s_per_rank"] = m["tokens_per_s"] / mesh.size
    if top := peak_flops(job.device, key["dtype"]):
        m["mfu"] = m["tokens_per_s_per_rank"] * flops_per_token(config_of(key)) / top
    for name in ("memory_gib", "memory_allocated_gib"):
        if name in facts[0]:
            m[name] = max(fact[name] for fact in facts)
            m[name.replace("_gib", "_min_gib")] = min(fact[name] for fact in facts)
    if mesh.ep > 1:
        received = [fact["received"] for fact in facts if fact["received"]]
        m["received_max_over_mean"] = max(received) / (sum(received) / len(received))
    if "compute" in samples:
        m["compute_s"] = float(np.median(slowest["compute"]))
        m["compute_ci95_s"] = median_interval(slowest["compute"])
        for axis in mesh.axes:
            fake = slowest["compute" if len(mesh.axes) == 1 else f"{axis} fake"]
            gap, interval = difference(slowest["step"], fake, case.rounds)
            m |= {f"exposed_{axis}_s": gap, f"exposed_{axis}_ci95_s": interval}
        rows = samples["compute"]
        if mesh.schedule:
            rows = by_stage(samples["compute"], mesh)
            alone = by_stage(samples.get("pp fake", samples["compute"]), mesh)
            idle = 1 - np.median(alone, axis=1) / m["step_time_p50_s"]
            m["pipeline_idle"] = float(idle.mean())
            m["pipeline_idle_theory"] = idle_in_theory(mesh, key["microbatches"])
            m["stage_idle"] = idle.round(4).tolist()
            m["stage_compute_s"] = np.median(rows, axis=1).round(9).tolist()
        if slow := straggler(rows):
            m["straggler_rank" if rows is samples["compute"] else "straggler_stage"] = slow[0]
            m["straggler_factor"] = slow[1]
    if (wanted := references.get("one process")) is None:
        case.check = "skipped: one device cannot hold the model, to compare with"
    else:
        case.check = verdict(wrong_training(wanted, facts, TOLERANCES[key["dtype"]]))


def by_stage(samples: Any, mesh: Layout) -> Any:
    """[ranks, n] -> [places in the pipeline, n]: the slowest of the ranks at each."""
    return samples.reshape(mesh.pp, -1, samples.shape[-1]).max(axis=1)  # pp is outermost


def faster(a: Case, b: Case) -> tuple[float, Interval | None]:
    """How much shorter a's step is than b's, as a ratio, with its 95 % interval.

    The half widths of the two medians' intervals are added as squares, on a logarithmic scale:
    the cases were measured one after the other. What changed between them is not in it.
    """
    p50 = [case.metrics["step_time_p50_s"] for case in (a, b)]
    bounds = [case.metrics["step_time_ci95_s"] for case in (a, b)]
    ratio = p50[1] / p50[0]
    if None in bounds:
        return ratio, None
    down = math.hypot(math.log(bounds[0][1] / p50[0]), math.log(p50[1] / bounds[1][0]))
    up = math.hypot(math.log(p50[0] / bounds[0][0]), math.log(bounds[1][1] / p50[1]))
    return ratio, (ratio * math.exp(-down), ratio * math.exp(up))


def best(cases: list[Case]) -> str | None:
    """`# best: A, 1.12x B (95 % 1.09 to 1.15)`, and which neighbours cannot be told apart."""
    ranked = sorted((c for c in cases if not c.failed), key=lambda c: c.metrics["step_time_p50_s"])
    if len(ranked) < 2:
        return None
    names = [case.key["mesh"] for case in ranked]
    pairs = [faster(a, b) for a, b in itertools.pairwise(ranked)]
    ratio, interval = pairs[0]
    within = f"95 % {interval[0]:.2f} to {interval[1]:.2f}" if interval else "too few samples"
    parts = [f"# best: {names[0]}, {ratio:.2f}x {names[1]} ({within})"]
    for i, (_, bounds) in enumerate(pairs):
        if bounds is None or bounds[0] <= 1:
            parts.append(f"{names[i]} and {names[i + 1]} cannot be told apart")
    return "; ".join(parts)


def exposed(axis: str) -> Callable[[Case], str]:
    """A cell with a time in ms and half its interval."""

    def cell(case: Case) -> str:
        value = case.metrics.get(f"{axis}_s")
        if value is None:
            return "-"
        interval = case.metrics[f"{axis}_ci95_s"]
        width = f"{(interval[1] - interval[0]) / 2 * 1e3:.1f}" if interval else "?"
        return f"{value * 1e3:.1f} +-{width}"

    return cell


def slowest_of(case: Case) -> str:
    for kind in ("rank", "stage"):
        if (number := case.metrics.get(f"straggler_{kind}")) is not None:
            return f"{kind} {number}: {case.metrics['straggler_factor']:.2f}x"
    return "-"


def columns(meshes: list[Layout], args: argparse.Namespace, job: Job) -> Columns:
    present = [
        axis for axis in ("dp", "tp", "pp", "cp", "ep") if any(axis in m.axes for m in meshes)
    ]
    memory = "reserved" if job.device.type == "cuda" else "RSS growth"
    shown: Columns = {
        "mesh": lambda case: case.key["mesh"],
        "tokens/s": metric("tokens_per_s", digits=0),
        "95% ci\nof p50": relative("step_time_ci95_rel"),
        "tokens/s\n/rank": metric("tokens_per_s_per_rank", digits=0),
        "mfu\n(%)": metric("mfu", 100, 1),
        "step\n(ms)": metric("step_time_p50_s", 1e3, 1),
    }
    if job.device.type != "cuda":
        del shown["mfu\n(%)"]
    if not args.no_breakdown:
        shown["compute\n(ms)"] = exposed("compute")
        shown |= {f"exposed\n{axis} (ms)": exposed(f"exposed_{axis}") for axis in present}
        if "pp" in present:
            shown["idle\n(%)"] = metric("pipeline_idle", 100, 0)
            shown["theory\n(%)"] = metric("pipeline_idle_theory", 100, 0)
        shown["slowest"] = slowest_of
    shown[f"{memory}\nmax (GiB)"] = metric("memory_gib", digits=3)
    shown["min\n(GiB)"] = metric("memory_min_gib", digits=3)
    return shown


# -- the sweep -------------------------------------------------------------------------------------


def default_meshes(ranks: int) -> list[str]:
    """dp, tp, both, and a pipeline; those that the number of ranks allows."""
    if ranks == 1:
        return ["dp1"]
    stages = next(p for p in (4, 2, 1) if ranks % p == 0)
    others = f"dp{ranks // stages}" if stages < ranks else ""
    names = [f"dp{ranks}", f"tp{ranks}"]
    names += [f"dp{ranks // 2}tp2"] if ranks % 2 == 0 and ranks > 2 else []
    return names + ([f"{others}pp{stages}:1f1b"] if stages > 1 else [])


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument
    usual = "of 4 ranks dp4,tp4,dp2tp2,pp4:1f1b"
    add("--mesh", "--meshes", type=list_of(parse_mesh), help=f"a list (default: {usual})")
    models = f"{', '.join(DECODERS)} (default: decoder-124m, CPU decoder-tiny)"
    add("--model", choices=list(DECODERS), metavar="NAME", help=models)
    dtypes = f"{', '.join(DTYPES)}: of weights, gradients and optimizer (default: fp32)"
    add("--dtype", choices=list(DTYPES), default="fp32", metavar="DTYPE", help=dtypes)
    batch = "sequences in a step, of all ranks together (default: 64, CPU 16)"
    add("--global-batch", type=positive_int, metavar="N", help=batch)
    add("--sequence-length", type=positive_int, metavar="N", help="tokens (default: the model's)")
    microbatches = "of a pipeline (default: 2 for each of its ranks)"
    add("--microbatches", type=positive_int, metavar="N", help=microbatches)
    experts = "in the middle block of the model, under every mesh (default: 8 if one has ep, or 0)"
    add("--experts", type=positive_int, metavar="N", help=experts)
    skew = "of the router: it prefers the k-th expert by k^-S (default: 1)"
    add("--skew", type=number(float), default=1.0, metavar="S", help=skew)
    alone = "time the steps alone, without the twins and their time and memory"
    add("--no-breakdown", action="store_true", help=alone)
    add_common_flags(parser)
    args = parser.parse_args(argv)
    cuda = torch.cuda.is_available() and args.device != "cpu"
    args.model = args.model or ("decoder-124m" if cuda else "decoder-tiny")
    args.global_batch = args.global_batch or (64 if cuda else 16)
    args.sequence_length = args.sequence_length or DECODERS[args.model].context
    return args


def plan(args: argparse.Namespace, job: Job, ranks: int) -> list[dict[str, Any]] | str:
    """The key of each case, or which number does not fit. Of the default meshes those that do."""
    meshes = args.mesh or [parse_mesh(name) for name in default_meshes(ranks)]
    experts = args.experts or (8 if any(mesh.ep > 1 for mesh in meshes) else 0)
    keys, problems = [], []
    for mesh in meshes:
        microbatches = (args.microbatches or 2 * mesh.pp) if mesh.schedule else 1
        numbers = (args.sequence_length, args.global_batch, microbatches, experts)
        if problem := misfit(mesh, ranks, args.model, *numbers):
            problems.append(problem)
            continue
        names = ("sequence_length", "global_batch", "microbatches", "experts")
        key = {"mesh": mesh.name, "model": args.model, "dtype": args.dtype}
        key |= dict(zip(names, numbers, strict=True))
        key |= {"skew": args.skew if experts else None}
        keys.append(key | {"world_size": ranks, "device": job.device.type, "backend": job.backend})
    return problems[0] if problems and (args.mesh or not keys) else keys


def main() -> int:
    args = parse_args()
    with Benchmark("parallel_sweep", args) as bench:
        job = bench.job
        keys = plan(args, job, job.world_size)
        if isinstance(keys, str):
            bench.refuse(keys)
            return bench.status
        first = keys[0]
        title = f"{args.model}, {first['sequence_length']} tokens, global batch {args.global_batch}"
        title += f", {args.dtype}" + (f", {first['experts']} experts" if first["experts"] else "")
        meshes = [parse_mesh(key["mesh"]) for key in keys]
        shown = columns(meshes, args, job)
        widest = {"mesh": max((key["mesh"] for key in keys), key=len), "slowest": "stage 3: 1.25x"}
        widest |= dict.fromkeys(("compute", "exposed"), "100.0 +-10.0")
        cells = [widest.get(head.split("\n")[0], "0.0000") for head in shown]
        bench.begin_table(title, shown, cells)
        references: dict[str, Reference | None] = {}
        cases = []
        for key in keys:
            case = bench.measure(
                key, partial(build, key, args, job, references), partial(derive, job, references)
            )
            cases += [case] if case else []
        bench.print("")
        for case in cases:
            if stages := case.metrics.get("stage_compute_s"):
                idle = ", ".join(f"{share:.0%}" for share in case.metrics["stage_idle"])
                times = ", ".join(f"{seconds * 1e3:.1f}" for seconds in stages)
                bench.print(f"# {case.key['mesh']}: stages compute {times} ms, idle {idle}")
        if line := best(cases):
            bench.print(
                f"{line}\n# intervals hold the noise within a case, not what changed between cases"
            )
    return bench.status


if __name__ == "__main__":
    sys.exit(record(main)())
