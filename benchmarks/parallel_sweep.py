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
docs/parallel_sweep.md. BSD-3-Clause: copy the function of the axis that you need.
"""

import argparse
import logging
import math
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

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
from common.dist import Group, Job, connect, share
from common.memory import peak, reset_peak, start_peak, too_much
from common.peaks import peak_flops
from common.private_torch import (
    TORCH_2_15,
    all_to_all_with_gradient,
    forget_groups,
    register_fake_backend,
)
from common.report import Case
from common.stats import Interval, Times, step_metrics, straggler
from common.table import Columns, interval_ends, metric, relative
from common.timing import Step

Key = dict[str, Any]
Losses = list[Tensor]  # of each microbatch; empty on a rank without the last stage
AXES = ("pp", "dp", "cp", "ep", "tp")  # from the outermost to the innermost, which talks most
SCHEDULES: dict[str, tuple[Any, int]] = {  # with the number of stages on a rank
    "gpipe": (pipelining.ScheduleGPipe, 1),
    "1f1b": (pipelining.Schedule1F1B, 1),
    "interleaved": (pipelining.ScheduleInterleaved1F1B, 2),
    "izb": (pipelining.ScheduleInterleavedZeroBubble, 2),
    "zbv": (pipelining.ScheduleZBVZeroBubble, 2),
}
EXPERTS = 8
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
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


# -- one function an axis: torch's public API, to copy ---------------------------------------------


def data_parallelize(model: Decoder, dp: DeviceMesh, reshard_after_forward: bool) -> None:
    """FSDP2: each block is a unit. With a 2-D mesh this is HSDP."""
    for unit in (*model.blocks, model):
        fully_shard(unit, mesh=dp, reshard_after_forward=reshard_after_forward)


def replicate(model: Decoder, dp: DeviceMesh) -> DistributedDataParallel:
    """DDP: every rank has all weights."""
    ddp = DistributedDataParallel(model, process_group=dp.get_group())
    if dist.get_backend(dp.get_group()) == "fake":  # DDP cannot use the futures of this backend
        ddp.register_comm_hook(None, noop_hook)
    return ddp


def tensor_parallelize(model: Decoder, mesh: DeviceMesh) -> None:
    """Split heads, hidden units and words. In between each rank has a part of the sequence."""
    part, full = Shard(1), Replicate()
    plan = {
        "tokens": tp.RowwiseParallel(input_layouts=full, output_layouts=part),
        "blocks.*.attention_norm": tp.SequenceParallel(),
        "blocks.*.attention": tp.PrepareModuleInput(
            input_layouts=(part, None), desired_input_layouts=(full, None)
        ),
        "blocks.*.attention.[qkv]": tp.ColwiseParallel(),
        "blocks.*.attention.o": tp.RowwiseParallel(output_layouts=part),
        "blocks.*.mlp_norm": tp.SequenceParallel(),
        "blocks.*.mlp": tp.PrepareModuleInput(input_layouts=part, desired_input_layouts=full),
        "blocks.*.mlp.up": tp.ColwiseParallel(),
        "blocks.*.mlp.down": tp.RowwiseParallel(output_layouts=part),
        "norm": tp.SequenceParallel(),
        # each rank gets the logits of its words
        "head": tp.ColwiseParallel(input_layouts=part, use_local_output=False),
    }
    tp.parallelize_module(model, mesh, plan)


def context_parallelize(model: Decoder, cp: DeviceMesh) -> None:
    """Each rank has a part of every sequence, and gathers the keys and values of all parts."""
    positions = torch.arange(model.config.context, device=cp.device_type)
    my_positions = positions.chunk(cp.size())[cp.get_local_rank()]
    visible = my_positions[:, None] >= positions
    for buffer in model.buffers():  # the rotation and the expert of each position
        buffer.data = buffer[my_positions]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kv = DTensor.from_local(torch.stack((k, v)), cp, [Shard(3)], run_check=False)
        k, v = kv.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=visible)

    for block in model.blocks:
        block.get_submodule("attention").attend = attend  # type: ignore[assignment]


def ring_attention(
    model: nn.Module, cp: DeviceMesh, texts: Sequence[Tensor]
) -> Callable[[], AbstractContextManager[Any]]:
    """A context for each step, in which torch's context_parallel cuts what has positions.

    These are the texts [batch, sequence] and the model's buffers [sequence, ...].
    """
    buffers = list(model.buffers())
    dims = [1] * len(texts) + [0] * len(buffers)
    attend = F.scaled_dot_product_attention

    @contextmanager
    def cut_texts() -> Iterator[None]:
        try:
            with context_parallel(cp, buffers=[*texts, *buffers], buffer_seq_dims=dims):
                yield
        finally:  # torch 2.11 leaves its own in place after an error
            F.scaled_dot_product_attention = attend

    return cut_texts


def expert_parallelize(model: Decoder, ep: DeviceMesh, same_experts: DeviceMesh) -> None:
    """Each rank keeps a part of the experts. Tokens go to their expert by all-to-all, and back.

    All ranks must have equally many tokens for an expert. same_experts: the ranks that keep the
    same experts as this one.
    """
    [moe] = [module for module in model.modules() if isinstance(module, Experts)]
    ranks, place, group = ep.size(), ep.get_local_rank(), ep.get_group()
    count = moe.count // ranks
    moe.mlps = moe.mlps[place * count : (place + 1) * count]
    fully_shard([*moe.mlps], mesh=same_experts)
    compute_local, exchange = moe.compute, all_to_all_with_gradient

    def compute(tokens: Tensor, counts: Tensor) -> Tensor:
        counts_by_rank = counts.view(ranks, -1)
        sent = counts_by_rank.sum(1).tolist()
        received = [sent[place]] * ranks
        local = exchange(tokens, received, sent, group)
        local = local.unflatten(0, (ranks, -1))  # [from which rank, token, width]
        results = compute_local(local, counts_by_rank[place])
        return exchange(results.flatten(0, 1), sent, received, group)

    moe.compute = compute  # type: ignore[method-assign]


def cut(model: Decoder, stage: int, stages: int) -> None:
    """Leave one stage of a pipeline: its blocks; tokens in the first, norm and head in the last."""
    count = len(model.blocks) // stages
    model.blocks = model.blocks[stage * count : (stage + 1) * count]
    if stage > 0:
        model.tokens = nn.Identity()
    if stage < stages - 1:
        model.norm, model.head = nn.Identity(), nn.Identity()


def pipeline(
    models: dict[int, Any],
    pp: DeviceMesh,
    mesh: "Mesh",
    microbatches: int,
    tokens: Tensor,
    loss_of: Any,
) -> Any:
    """The schedule of this rank's stages. models: by stage. tokens: of all microbatches."""
    first = next(iter(models.values()))
    # torch can find out the shapes between stages by itself, but not over a fake group
    text = tokens.chunk(microbatches)[0].to("meta")
    dtype = next(first.parameters()).dtype
    empty = partial(text.new_empty, dtype=dtype, requires_grad=True)
    hidden = empty((len(text), text.shape[1] // mesh.tp, first.config.width))
    logits = empty((*text.shape, first.config.vocab))
    stages = []
    for number, model in models.items():
        stage = pipelining.PipelineStage(
            model,
            number,
            mesh.stages,
            tokens.device,
            input_args=text if number == 0 else hidden,
            output_args=logits if number == mesh.stages - 1 else hidden,
            group=pp.get_group(),
        )
        stages.append(stage)
    schedule, stages_on_rank = SCHEDULES[mesh.schedule]
    return schedule(stages if stages_on_rank > 1 else stages[0], microbatches, loss_of)


# -- how the axes go together ----------------------------------------------------------------------


class Trainer(NamedTuple):
    """What a rank trains, and how."""

    model: nn.Module  # the rank's stages
    optimizer: torch.optim.Optimizer
    step: Callable[[], Losses]


def train(key: Key, job: Job, axes: dict[str, DeviceMesh], lr: float) -> Trainer:
    """This rank's part of the model, wrapped for every axis, and its training step."""
    mesh = parse_mesh(key["mesh"])
    place = mesh.place_of(job.rank)
    stages = {}
    for stage in stages_of(mesh, place["pp"]):
        stages[stage] = parallelize(create(key, job.device), stage, mesh, axes)
    model = nn.ModuleList(stages.values())
    optimizer = sgd(model, lr)
    experts: list[Any] = [weight for name, weight in model.named_parameters() if is_expert(name)]
    texts = local_texts(key, mesh, place, job.device)
    in_ring: Callable[[], AbstractContextManager[Any]] = nullcontext
    if mesh.ring:
        in_ring = ring_attention(model, axes["cp"], texts)
    if mesh.pp > 1:
        forward_backward = pipelined(stages, axes["pp"], mesh, key["microbatches"], texts)
    else:
        forward_backward = unpipelined(stages[0], texts)

    def step() -> Losses:
        optimizer.zero_grad()
        loss_parallel = tp.loss_parallel() if mesh.tp > 1 else nullcontext()
        with loss_parallel, in_ring():
            losses = forward_backward()
        for weight in experts:  # a sum over tokens of all ep; FSDP has averaged over the others
            weight.grad /= mesh.ep
        optimizer.step()
        return losses

    return Trainer(model, optimizer, step)


def stages_of(mesh: "Mesh", place: int) -> list[int]:
    """The pipeline stages of the rank at this place of pp."""
    if mesh.stages == mesh.pp:
        return [place]
    if mesh.schedule == "zbv":  # the second stages lie on the ranks in reverse order: a V
        return [place, mesh.stages - 1 - place]
    return [place, place + mesh.pp]


def parallelize(model: Decoder, stage: int, mesh: "Mesh", axes: dict[str, DeviceMesh]) -> Any:
    """One stage of the model, wrapped for every axis. A mesh without pp has one stage."""
    if mesh.tp > 1:
        tensor_parallelize(model, axes["tp"])
    if mesh.cp > 1 and not mesh.ring:
        context_parallelize(model, axes["cp"])
    if mesh.ep > 1:
        expert_parallelize(model, axes["ep"], axes["same_experts"])
    cut(model, stage, mesh.stages)
    # data parallelism comes last: it shards what the other axes have left
    if mesh.data == 1:
        return model
    if mesh.ddp:
        return replicate(model, axes["dp"])
    # a pipeline keeps the gathered weights for its next microbatch
    data_parallelize(model, axes["dp"], reshard_after_forward=mesh.pp == 1)
    return model


def is_expert(name: str) -> bool:
    """Whether a parameter of this name belongs to an expert."""
    return ".mlps." in name


def local_texts(
    key: Key, mesh: "Mesh", place: dict[str, int], device: torch.device
) -> list[Tensor]:
    """This rank's tokens and targets. Ring attention cuts the sequences by itself."""
    row = place["dp"] * mesh.ep + place["ep"]
    texts = []
    for text in random_text(config_of(key), key["global_batch"], seed=0):
        rows = text.chunk(mesh.dp * mesh.ep)[row].to(device)
        if not mesh.ring:
            rows = rows.chunk(mesh.cp, dim=1)[place["cp"]].contiguous()
        texts.append(rows)
    return texts


def local_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """The loss; a plain tensor also where the words of the logits are split."""
    loss = next_token_loss(logits, targets)
    return loss.to_local() if isinstance(loss, DTensor) else loss


def pipelined(
    stages: dict[int, Any], pp: DeviceMesh, mesh: "Mesh", microbatches: int, texts: list[Tensor]
) -> Callable[[], Losses]:
    """Forward and backward of all microbatches through the stages of this rank."""
    tokens, targets = texts
    schedule = pipeline(stages, pp, mesh, microbatches, tokens, local_loss)
    inputs = [tokens] if 0 in stages else []

    def forward_backward() -> Losses:
        losses: Losses = []
        schedule.step(*inputs, target=targets, losses=losses, return_outputs=False)
        return losses

    return forward_backward


def unpipelined(model: nn.Module, texts: list[Tensor]) -> Callable[[], Losses]:
    """Forward and backward of one batch."""
    tokens, targets = texts

    def forward_backward() -> Losses:
        loss = local_loss(model(tokens), targets)
        loss.backward()
        return [loss]

    return forward_backward


# -- meshes: their names, whether they fit, their process groups -----------------------------------


@dataclass(frozen=True)
class Mesh:
    """A product of axes. `parse_mesh` makes it from its name."""

    name: str
    pp: int = 1  # ranks on each axis
    dp: int = 1
    cp: int = 1
    ep: int = 1
    tp: int = 1
    replicas: int = 1  # HSDP's: dp is this many replicas of dp / replicas shards
    schedule: str = ""  # of the pipeline, one of SCHEDULES
    ring: bool = False  # cp by torch's context_parallel
    ddp: bool = False  # dp by DistributedDataParallel

    @property
    def shape(self) -> tuple[int, ...]:
        """The ranks on each axis, in the order of AXES."""
        return self.pp, self.dp, self.cp, self.ep, self.tp

    @property
    def data(self) -> int:
        """The number of ranks that have the same weights, and so share gradients."""
        return self.dp * self.cp * self.ep

    @property
    def stages(self) -> int:
        """Of the pipeline; 1 without one."""
        return self.pp * SCHEDULES[self.schedule][1] if self.pp > 1 else 1

    @property
    def axes(self) -> list[str]:
        """The axes that communicate. dp does also where only cp or ep share weights."""
        ranks = dict(zip(AXES, self.shape, strict=True)) | {"dp": self.data}
        return [axis for axis in AXES if ranks[axis] > 1]

    def place_of(self, rank: int) -> dict[str, int]:
        """The place of a rank on each axis."""
        places = [int(place) for place in np.unravel_index(rank, self.shape)]
        return dict(zip(AXES, places, strict=True))


PRODUCT = re.compile(r"ddp[1-9]\d*|(dp[1-9]\d*x([2-9]|[1-9]\d+)|(dp|tp|pp|cp|ep)[1-9]\d*)+")
FACTOR = re.compile(r"([a-z]p)(\d+)(?:x(\d+))?")  # `dp2x4`: the axis, its ranks or replicas, shards


@cache
def parse_mesh(name: str) -> Mesh:
    """`dp2tp2`, `dp2x4`, `pp4:1f1b` or `cp4:ring`: the ranks of each axis, then the way."""
    product, _, way = name.partition(":")
    factors = FACTOR.findall(product)
    different_axes = {axis for axis, _, _ in factors}
    if not PRODUCT.fullmatch(product) or len(different_axes) < len(factors):
        wrong("a mesh", repr(name), "e.g. dp8, dp2x4, dp4tp2, dp2pp4:1f1b; ddp8 by itself")
    fields: dict[str, Any] = {"ddp": product.startswith("ddp")}
    for axis, count, shards in factors:
        fields[axis] = int(count)
        if shards != "":
            fields["replicas"] = int(count)
            fields[axis] *= int(shards)
    if fields.get("pp", 1) > 1:
        fields["schedule"] = way
        known_way = way in SCHEDULES
    else:
        fields["ring"] = way == "ring" and fields.get("cp", 1) > 1
        known_way = way == "" or fields["ring"]
    if not known_way:
        names = ", ".join(SCHEDULES)
        wrong(f"{names} after a pipeline", repr(name), "e.g. pp4:1f1b or cp4:ring")
    return Mesh(name, **fields)


def misfit(key: Key) -> str | None:
    """Which number of a case does not fit its mesh, or None."""
    mesh, config, ranks = parse_mesh(key["mesh"]), config_of(key), key["world_size"]
    size = math.prod(mesh.shape)
    if size != ranks:
        return f"mesh {mesh.name} has {size} ranks, this job {ranks}; e.g. dp{ranks}"
    rows = mesh.dp * mesh.ep * key["microbatches"]
    divisions = (
        ("tp", mesh.tp, config.heads, "heads"),
        ("stages", mesh.stages, config.layers, "layers"),
        ("cp * tp", mesh.cp * mesh.tp, config.context, "--sequence-length"),
        ("dp * ep * microbatches", rows, key["global_batch"], "--global-batch"),
        ("ep", mesh.ep, EXPERTS, "experts"),
    )
    for name, divisor, number, what in divisions:
        if number % divisor:
            return f"mesh {mesh.name}: {name} = {divisor} does not divide {number}, {what}"
    if key["experts"] and mesh.tp > 1:
        return f"mesh {mesh.name}: tp does not split experts; run it apart from ep"
    if mesh.ring and key["device"] != "cuda":
        return f"mesh {mesh.name}: ring attention needs CUDA; try cp{mesh.cp} without :ring"
    if mesh.pp > 1 and key["device"] == "cuda" and key["backend"] == "gloo":
        return f"mesh {mesh.name}: gloo sends no CUDA tensors between stages; e.g. dp{ranks}"
    if mesh.schedule == "zbv" and key["backend"] == "gloo" and not TORCH_2_15:  # it hangs
        return f"mesh {mesh.name}: zbv over gloo does not end with torch 2.11; try torch 2.15"
    return wrong_microbatches(mesh, key["microbatches"]) if mesh.pp > 1 else None


def wrong_microbatches(mesh: Mesh, count: int) -> str | None:
    """Why a pipeline cannot take so many microbatches, as its schedule would say, or None."""
    if mesh.schedule in ("1f1b", "zbv") and count < mesh.stages:
        stages = f"{mesh.schedule} has {mesh.stages} stages and needs as many microbatches"
        return f"mesh {mesh.name}: {stages}, got {count}; e.g. --microbatches {mesh.stages}"
    rounds = max(1, count // mesh.pp)  # as torch splits them
    if mesh.schedule in ("interleaved", "izb") and count % rounds:
        equal = f"{mesh.schedule} needs microbatches that {rounds} rounds share equally"
        return f"mesh {mesh.name}: {equal}, got {count}; e.g. --microbatches {2 * mesh.pp}"
    return None


def open_meshes(mesh: Mesh, silent: list[str], job: Job, group: Group) -> dict[str, DeviceMesh]:
    """A DeviceMesh for each axis. Collectives of the `silent` axes return at once.

    dp has the ranks of cp and ep as well, and is 2-D for HSDP. `same_experts` has those that keep
    the same experts.
    """
    talking = set(mesh.axes).difference(silent)
    if "dp" in talking:
        talking |= {"replicas", "same_experts"}
    # DTensor keeps what it has worked out for a mesh, and takes meshes with the same ranks and
    # names for one: without names of its own a twin would talk over the real groups
    suffix = f" of {mesh.name}, fake {'+'.join(silent) or 'none'}"
    opened: dict[str, DeviceMesh] = {}
    for sizes in layouts(mesh):
        backends: dict[int | str, Any] = {}
        for axis, size in sizes.items():
            real = axis in talking and size > 1
            backends[axis + suffix] = job.backend if real else "fake"
        device_mesh = init_device_mesh(
            job.device.type,
            tuple(sizes.values()),
            mesh_dim_names=tuple(axis + suffix for axis in sizes),
            backend_override=backends,
        )
        for process_group in device_mesh.get_all_groups():
            group.more.append(process_group)
            connect(process_group, job.device)
        forget_groups(device_mesh)
        for axis in sizes:
            opened[axis] = device_mesh[axis + suffix]
        if mesh.replicas > 1 and "replicas" in sizes:
            opened["dp"] = device_mesh["replicas" + suffix, "dp" + suffix]
    return opened


def layouts(mesh: Mesh) -> list[dict[str, int]]:
    """The sizes of the device meshes that hold all axes. Each is a product over all ranks.

    cp and ep have meshes of their own, because their ranks are ranks of dp as well.
    """
    shards = mesh.data // mesh.replicas
    meshes = [{"pp": mesh.pp, "replicas": mesh.replicas, "dp": shards, "tp": mesh.tp}]
    if mesh.cp > 1:
        meshes.append({"outer": mesh.pp * mesh.dp, "cp": mesh.cp, "inner": mesh.ep * mesh.tp})
    if mesh.ep > 1:
        meshes.append({"outer": mesh.pp, "same_experts": mesh.dp * mesh.cp, "ep": mesh.ep})
    return meshes


def default_meshes(ranks: int) -> list[str]:
    """dp, tp, both, and a pipeline, on so many ranks; tp and pp over at most 4 of them."""
    names = [f"dp{ranks}"]
    most = math.gcd(ranks, 4)
    if most == 1:
        return names
    dp = f"dp{ranks // most}" if ranks > most else ""
    names.append(f"{dp}tp{most}")
    if most == 4:
        names.append(f"dp{ranks // 2}tp2")
    names.append(f"{dp}pp{most}:1f1b")
    return names


# -- a case: the model, its twins, the check -------------------------------------------------------


def config_of(key: Key) -> Any:
    return replace(DECODERS[key["model"]], context=key["sequence_length"], experts=key["experts"])


def create(key: Key, device: torch.device) -> Decoder:
    """The same model on every rank and in every mesh."""
    torch.manual_seed(0)
    with torch.device(device):
        model = Decoder(config_of(key))
    for weight in model.parameters():  # not the buffers: the angles of positions stay precise
        weight.data = weight.data.to(DTYPES[key["dtype"]])
    return model


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
        total += float(gradient.float().square().sum()) / holders
    return total


def build(lr: float, job: Job, key: Key, group: Group) -> Workload:
    mesh, with_twins = parse_mesh(key["mesh"]), key.get("breakdown", True)
    before = start_peak(job.device)
    trainer = train(key, job, open_meshes(mesh, [], job, group), lr)
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
        scatter_noise(key, job)
        for part, silent in parts_of(mesh).items():
            twin = train(key, job, open_meshes(mesh, silent, job, group), lr=0.0)
            twins[part] = twin.step
    shown = [without(mesh, axis) for axis in mesh.axes] if with_twins else []
    launches = mesh.ep == 1  # ep's counts wait for the device
    return Workload(trainer.step, twins, compared=shown, facts=lambda: facts, launches=launches)


def scatter_noise(key: Key, job: Job) -> None:
    """Leave random numbers in the memory that twins will get. What a twin should have received is
    what was there before, and GPUs multiply zeros faster: they take less power.

    All ranks of a node together take a quarter of what is free: they may share a GPU.
    """
    if job.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(job.device)
        dtype = DTYPES[key["dtype"]]
        count = free // 4 // job.local_world_size // dtype.itemsize
        torch.randn(count, dtype=dtype, device=job.device)


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
    return compare_training("the loss", means, np.mean(reference.losses, axis=1), tolerance)


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


def step_time(case: Case) -> float:
    return case.metrics["step_time_p50_s"]


def step_interval(case: Case) -> Interval | None:
    """None for too few samples, and for samples that drift."""
    return case.metrics["step_time_ci95_s"]


def best(cases: list[Case]) -> str | None:
    """`# best: A, 1.12x B (1.09 to 1.15 by their intervals)`, and which neighbours are alike.

    The bounds of the ratio hold if both intervals do: each is an end of one / an end of the other.
    """
    ranked = sorted((case for case in cases if not case.failed), key=step_time)
    if len(ranked) < 2:
        return None
    first, second = ranked[:2]
    bounds = "no bounds: too few samples, or they drift"
    fast, slow = step_interval(first), step_interval(second)
    if fast and slow:
        bounds = f"{slow[0] / fast[1]:.2f} to {slow[1] / fast[0]:.2f} by their intervals"
    ratio = step_time(second) / step_time(first)
    line = f"# best: {first.key['mesh']}, {ratio:.2f}x {second.key['mesh']} ({bounds})"
    alike = []
    for faster, slower in pairwise(ranked):
        fast, slow = step_interval(faster), step_interval(slower)
        if fast and slow and slow[0] <= fast[1]:
            alike.append(f"{faster.key['mesh']} and {slower.key['mesh']}")
    return f"{line}; {', '.join(alike)} cannot be told apart" if alike else line


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


def too_long(key: Key, job: Job) -> str | None:
    """Why the texts have no room, or None. Each rank makes all tokens and targets, of 8 bytes."""
    needed = 2 * 8 * key["sequence_length"] * key["global_batch"]
    return too_much(needed, job, "--sequence-length or --global-batch")


def main() -> int:
    args = parse_args()
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # the check gathers
    register_fake_backend()
    torch.set_flush_denormal(True)  # a twin's garbage must not be slow to compute with
    with Benchmark("parallel_sweep", args) as bench:
        job = bench.job
        meshes = args.mesh or [parse_mesh(name) for name in default_meshes(job.world_size)]
        keys = plan(args, meshes, job.device.type == "cuda", bench.place)
        problems = [misfit(key) for key in keys]
        problems.append(share(too_long(keys[0], job)))
        for problem in problems:
            if problem:
                bench.refuse(problem)
        longest = max((mesh.name for mesh in meshes), key=len)
        bench.begin_table(title_of(keys[0], args.microbatches), columns_of(meshes), [longest])
        reference = share(train_reference(keys[0], job.device) if job.rank == 0 else None)
        lr = 0.0
        if isinstance(reference, str):
            bench.print(f"# not checked: {reference}")
        else:
            lr = reference.lr
        begin = partial(build, lr, job)
        end = partial(derive, reference, job.device)
        cases: list[Case] = []  # on rank 0; the other ranks have none
        for key in keys:
            case = bench.measure(key, begin, end)
            if case:
                cases.append(case)
        bench.print("")
        lines = [*map(places_line, cases), best(cases)]
        for line in lines:
            if line:
                bench.print(line)
    return bench.status


if __name__ == "__main__":
    sys.exit(record(main)())
