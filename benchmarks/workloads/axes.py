"""A decoder under each axis of a mesh, and its training step. For parallel_sweep.py and traffic.py.

One function per axis, in torch's public API; copy those that you need. `parallelize` and `train`
show in which order the axes are applied.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor import parallel as tp
from torch.distributed.tensor.experimental import context_parallel
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from benchmarks.workloads.decoder import DTYPES, Decoder, Experts, next_token_loss, random_text
from benchmarks.workloads.meshes import SCHEDULES, Key, Mesh, config_of, parse_mesh, stages_of
from common.groups import Job

Losses = list[Tensor]  # by microbatch; empty on a rank without the last stage


def data_parallelize(model: Decoder, dp: DeviceMesh, reshard_after_forward: bool) -> None:
    """FSDP2 with each block as a unit; with a 2-D mesh, HSDP."""
    for unit in (*model.blocks, model):
        fully_shard(unit, mesh=dp, reshard_after_forward=reshard_after_forward)


def replicate(model: Decoder, dp: DeviceMesh) -> DistributedDataParallel:
    """DDP: every rank holds all weights."""
    ddp = DistributedDataParallel(model, process_group=dp.get_group())
    if dist.get_backend(dp.get_group()) == "fake":  # DDP cannot use the futures of this backend
        ddp.register_comm_hook(dp.get_group(), reduce_at_once)
    return ddp


def reduce_at_once(group: dist.ProcessGroup, bucket: dist.GradBucket) -> Future[Tensor]:
    """A DDP communication hook that returns a completed future."""
    dist.all_reduce(bucket.buffer(), group=group)
    reduced: Future[Tensor] = Future()
    reduced.set_result(bucket.buffer())
    return reduced


def tensor_parallelize(model: Decoder, mesh: DeviceMesh) -> None:
    """Shard heads, hidden units and the vocabulary; in between, shard the sequence."""
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
        # each rank computes the logits of its part of the vocabulary
        "head": tp.ColwiseParallel(input_layouts=part, use_local_output=False),
    }
    tp.parallelize_module(model, mesh, plan)


def context_parallelize(model: Decoder, cp: DeviceMesh) -> None:
    """Shard every sequence. Each rank gathers the keys and values of all shards."""
    positions = torch.arange(model.config.context, device=cp.device_type)
    my_positions = positions.chunk(cp.size())[cp.get_local_rank()]
    visible = my_positions[:, None] >= positions
    for buffer in model.buffers():  # rotary angles and experts, by position
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
    """A context for each step, in which torch's context_parallel shards all tensors with positions:
    the texts [batch, sequence] and the model's buffers [sequence, ...]."""
    buffers = list(model.buffers())
    dims = [1] * len(texts) + [0] * len(buffers)
    attend = F.scaled_dot_product_attention

    @contextmanager
    def cut_texts() -> Iterator[None]:
        try:
            with context_parallel(cp, buffers=[*texts, *buffers], buffer_seq_dims=dims):
                yield
        finally:  # after an error, torch 2.11 does not restore it
            F.scaled_dot_product_attention = attend

    return cut_texts


def expert_parallelize(model: Decoder, ep: DeviceMesh, same_experts: DeviceMesh) -> None:
    """Shard the experts. Tokens reach their expert by all-to-all, and so do the results.

    All ranks must have the same number of tokens for an expert. same_experts: the ranks that hold
    the same experts as this rank.
    """
    [moe] = [module for module in model.modules() if isinstance(module, Experts)]
    ranks, place, group = ep.size(), ep.get_local_rank(), ep.get_group()
    count = moe.count // ranks
    moe.mlps = moe.mlps[place * count : (place + 1) * count]
    fully_shard([*moe.mlps], mesh=same_experts)
    # with autograd. Private API; works in torch 2.11, 2.14 and 2.15
    exchange = all_to_all_single_autograd
    compute_local = moe.compute

    def compute(tokens: Tensor, counts: Tensor) -> Tensor:
        counts_by_rank = counts.view(ranks, -1)
        sent = counts_by_rank.sum(1).tolist()
        received = [sent[place]] * ranks
        local = exchange(tokens, received, sent, group)
        local = local.unflatten(0, (ranks, -1))  # [source rank, token, width]
        results = compute_local(local, counts_by_rank[place])
        return exchange(results.flatten(0, 1), sent, received, group)

    moe.compute = compute  # type: ignore[method-assign]


def cut(model: Decoder, stage: int, stages: int) -> None:
    """Reduce the model to one pipeline stage: some of the blocks, the embedding in the first stage,
    norm and head in the last."""
    count = len(model.blocks) // stages
    model.blocks = model.blocks[stage * count : (stage + 1) * count]
    if stage > 0:
        model.tokens = nn.Identity()
    if stage < stages - 1:
        model.norm, model.head = nn.Identity(), nn.Identity()


class Stage(pipelining.PipelineStage):
    """A stage whose first messages have the size that its neighbors expect. Torch 2.9 sends 8 bytes
    where it receives 4, and gloo then aborts. Private API; newer versions need no change."""

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        ops = super()._get_init_p2p_neighbors_ops()
        for op in ops:
            op.tensor = op.tensor.float()
        return ops


def pipeline(
    models: dict[int, Any],
    pp: DeviceMesh,
    mesh: Mesh,
    microbatches: int,
    tokens: Tensor,
    loss_of: Any,
) -> Any:
    """The schedule of this rank's stages. models: by stage number. tokens: of all microbatches."""
    first = next(iter(models.values()))
    # torch can infer the shapes between stages, but not over a fake group
    text = tokens.chunk(microbatches)[0].to("meta")
    dtype = next(first.parameters()).dtype
    empty = partial(text.new_empty, dtype=dtype, requires_grad=True)
    hidden = empty((len(text), text.shape[1] // mesh.tp, first.config.width))
    logits = empty((*text.shape, first.config.vocab))
    stages = []
    for number, model in models.items():
        stage = Stage(
            model,
            number,
            mesh.stages,
            tokens.device,
            input_args=text if number == 0 else hidden,
            output_args=logits if number == mesh.stages - 1 else hidden,
            group=pp.get_group(),
        )
        stages.append(stage)
    name, stages_on_rank = SCHEDULES[mesh.schedule]
    schedule = getattr(pipelining, name)
    return schedule(stages if stages_on_rank > 1 else stages[0], microbatches, loss_of)


# -- all axes together -----------------------------------------------------------------------------


class Trainer(NamedTuple):
    """The model of a rank, its optimizer and its training step."""

    model: nn.Module  # all stages of the rank
    optimizer: torch.optim.Optimizer
    step: Callable[[], Losses]


def train(
    key: Key,
    job: Job,
    axes: dict[str, DeviceMesh],
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
) -> Trainer:
    """This rank's part of the model, wrapped for every axis, and its training step."""
    mesh = parse_mesh(key["mesh"])
    place = mesh.place_of(job.rank)
    stages = {}
    for stage in stages_of(mesh, place["pp"]):
        stages[stage] = parallelize(create(key, job.device), stage, mesh, axes)
    model = nn.ModuleList(stages.values())
    optimizer = make_optimizer(model)
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
        for weight in experts:  # FSDP averages over same_experts; average over ep as well
            weight.grad /= mesh.ep
        optimizer.step()
        return losses

    return Trainer(model, optimizer, step)


def create(key: Key, device: torch.device) -> Decoder:
    """A model that is equal on every rank and in every mesh."""
    torch.manual_seed(0)
    with torch.device(device):
        model = Decoder(config_of(key))
    for weight in model.parameters():  # not the buffers: the rotary angles stay in float32
        weight.data = weight.data.to(DTYPES[key["dtype"]])
    return model


def parallelize(model: Decoder, stage: int, mesh: Mesh, axes: dict[str, DeviceMesh]) -> Any:
    """One stage of the model, wrapped for every axis. A mesh without pp has one stage."""
    if mesh.tp > 1:
        tensor_parallelize(model, axes["tp"])
    if mesh.cp > 1 and not mesh.ring:
        context_parallelize(model, axes["cp"])
    if mesh.ep > 1:
        expert_parallelize(model, axes["ep"], axes["same_experts"])
    cut(model, stage, mesh.stages)
    # data parallelism comes last: it shards what remains after the other axes
    if mesh.data == 1:
        return model
    if mesh.ddp:
        return replicate(model, axes["dp"])
    # a pipeline keeps the gathered weights for the next microbatch
    data_parallelize(model, axes["dp"], reshard_after_forward=mesh.pp == 1)
    return model


def is_expert(name: str) -> bool:
    """Whether the parameter belongs to an expert."""
    return ".mlps." in name


def local_texts(key: Key, mesh: Mesh, place: dict[str, int], device: torch.device) -> list[Tensor]:
    """This rank's tokens and targets. Ring attention itself shards the sequences."""
    row = place["dp"] * mesh.ep + place["ep"]
    texts = []
    for text in random_text(config_of(key), key["global_batch"], seed=0):
        rows = text.chunk(mesh.dp * mesh.ep)[row].to(device)
        if not mesh.ring:
            rows = rows.chunk(mesh.cp, dim=1)[place["cp"]].contiguous()
        texts.append(rows)
    return texts


def local_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """The loss as a plain tensor, also if the logits are sharded by vocabulary."""
    loss = next_token_loss(logits, targets)
    return loss.to_local() if isinstance(loss, DTensor) else loss


def pipelined(
    stages: dict[int, Any], pp: DeviceMesh, mesh: Mesh, microbatches: int, texts: list[Tensor]
) -> Callable[[], Losses]:
    """Forward and backward of all microbatches through the stages of this rank."""
    tokens, targets = texts
    schedule = pipeline(stages, pp, mesh, microbatches, tokens, local_loss)
    inputs = [tokens] if 0 in stages else []
    can_omit = "return_outputs" in inspect.signature(schedule.step).parameters
    options = {"return_outputs": False} if can_omit else {}

    def forward_backward() -> Losses:
        losses: Losses = []
        schedule.step(*inputs, target=targets, losses=losses, **options)
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
