#!/usr/bin/env python3
"""Does torch.compile help a data-parallel model, under which strategy, and what does it cost?

Times whole training steps (forward, loss, backward, optimizer step, zero_grad) of one model under
each strategy and backend. A case is one strategy x backend x model x dtype:

    strategies   none   the plain model, on rank 0 alone
                 ddp    DistributedDataParallel
                 fsdp1  FullyShardedDataParallel, a unit per block
                 fsdp2  fully_shard, a unit per block
    backends     eager (not compiled), inductor, aot_eager, cudagraphs, any other that dynamo
                 knows, and print, which prints the graphs; dynamo's own `eager` is dynamo_eager

Data is made before. Only the model is compiled, as it is wrapped; the loss and the optimizer are
not. Compiling is measured apart from the steps:

    first step   the first one, with everything that compiles in it
    payback      (first step + recompiling + start of the backend - first step of eager)
                 / (step of eager - step), in steps
    vs eager     step of the same strategy, not compiled / step
    vs none      step of `none` with the same backend / step: one process, one batch
    tflops       FLOPs of the model in a rank's step / step;  mfu = tflops / the device's peak

    torchrun --nproc-per-node 2 benchmarks/compile_sweep.py
    torchrun --nproc-per-node 8 benchmarks/compile_sweep.py --models decoder-124m --json report.json
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \\
        benchmarks/compile_sweep.py --strategies ddp,fsdp2 --models decoder-1.3b --dtype bf16

Does what PyTorch's benchmarks/dynamo/distributed.py did (its flags select a single case), written
anew. BSD-3-Clause.
"""

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import cli

STRATEGY_NAMES = ("none", "ddp", "fsdp1", "fsdp2")
DTYPES = ("fp32", "bf16")
SIZES = ("layers", "heads", "width", "vocab")  # of the decoder
DYNAMO_EAGER, PRINT = "dynamo_eager", "print"
TRACE_FILE = "profile-{case}-{rank}.json"
GRAPH_FILE = "torchviz-{case}.svg"


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = cli.Parser(description=__doc__)
    add = parser.add_argument
    names = cli.list_of(str)
    model = parser.add_mutually_exclusive_group()
    model.add_argument(
        "--models",
        "--model",
        type=names,
        metavar="NAME",
        help="toy, toy-small, decoder-10m, decoder-124m, decoder-1.3b, or a torchvision "
        "classification model; a list (default: decoder-124m on CUDA, toy-small on the CPU)",
    )
    model.add_argument("--toy-model", action="store_true", help="the same as --models toy")
    model.add_argument("--torchbench-model", metavar="NAME", help="of an installed torchbenchmark")
    strategy = parser.add_mutually_exclusive_group()
    strategy.add_argument(
        "--strategies",
        type=cli.names(STRATEGY_NAMES),
        metavar="NAME",
        help=f"of {', '.join(STRATEGY_NAMES)}; a list, or all (default: all on CUDA, "
        "none,ddp,fsdp2 on the CPU)",
    )
    strategy.add_argument("--ddp", action="store_true", help="the same as --strategies ddp")
    strategy.add_argument("--fsdp", action="store_true", help="the same as --strategies fsdp1")
    backend = parser.add_mutually_exclusive_group()
    backend.add_argument(
        "--backends",
        type=names,
        metavar="NAME",
        help="how to compile: eager for not at all, or a backend; a list (default: eager,inductor)",
    )
    backend.add_argument(
        "--dynamo",
        metavar="BACKEND",
        help="one of dynamo's backends; with --ddp, --fsdp or neither of them a single case",
    )
    add("--batch-size", type=cli.positive_int, metavar="N", help="a rank's (default: 8)")
    add("--image-size", type=cli.positive_int, metavar="PX", help="(default: 224, CPU 64)")
    size = cli.positive_int
    add("--sequence-length", type=size, metavar="N", help="tokens (default: the decoder's context)")
    for name in SIZES:
        add(f"--{name}", type=size, metavar="N", help="of the decoder, instead of the preset's")
    add(
        "--dtype",
        type=cli.list_of(str, DTYPES),
        default=["fp32"],
        metavar="DTYPE",
        help="fp32, or bf16 by autocast (none, ddp) or by FSDP's mixed precision; a list "
        "(default: fp32)",
    )
    add(
        "--fsdp-wrap",
        action=argparse.BooleanOptionalAction,
        help="each repeated block is a unit of FSDP; otherwise the whole model is one (default: "
        "yes; the original's default was no)",
    )
    add(
        "--fsdp-checkpoint",
        action="store_true",
        help="recompute the activations of each repeated block; under every strategy",
    )
    add("--no-optimizer", action="store_true", help="forward and backward only, as the original")
    add(
        "--dynamo-no-optimize-ddp",
        action="store_true",
        help="do not split graphs at the borders of DDP's buckets",
    )
    add("--warm-cache", action="store_true", help="use the compilers' own caches, not empty ones")
    add("--profile", action="store_true", help="write a trace of a few steps for each case")
    add(
        "--trace-file",
        metavar="PATH",
        help=f"of --profile; {{case}} and {{rank}} are replaced (default: {TRACE_FILE})",
    )
    add("--torchviz", action="store_true", help=f"write each case's autograd graph to {GRAPH_FILE}")
    add("--memory-snapshot", metavar="PATH", help="write CUDA memory's history; {case}, {rank}")
    add("--verbose", action="store_true", help="print the models and turn on dynamo's logs")
    add("--distributed-backend", choices=cli.BACKENDS, help="(default: nccl on CUDA, CPU gloo)")
    cli.add_measurement_flags(parser, other_names={"--iters": "--repeat"})
    cli.add_report_flags(parser)
    args = parser.parse_args(argv)
    cli.check_measurement_flags(args)
    return args


if __name__ == "__main__":
    ARGS = parse_args()  # before the imports below, so that --help need not wait for them
    if ARGS.profile:  # the profiler's own notes about what it does not find, on every rank
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")

import contextlib
import dataclasses
import functools
import gc
import itertools
import logging
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointWrapper,
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import record_function

from common import compiling, reference, torchbench
from common.autograd_graph import check_graph_path, write_graph
from common.breakdown import step_metrics
from common.compile_facts import facts_so_far, start_counting
from common.compile_report import (
    EAGER,
    case_name,
    compare,
    cost_tables,
    rank_metrics,
    step_columns,
    title,
    widest_row,
)
from common.dist import (
    CaseGroup,
    RankContext,
    broadcast_json,
    choose_device,
    gather_json,
    world_from_environment,
)
from common.memory import peak_gib, start_peak
from common.peaks import count_flops, fp32_on_cuda, peak_flops
from common.results import Case
from common.sweep import Outcome, Sweep, check_report_flags, stop_rule
from common.table import StreamedTable
from common.timing import Measurement, measure, time_block
from common.trace import check_trace_path, profile_steps, trace_path
from common.workloads import (
    DECODER,
    TOYS,
    Sizes,
    Workload,
    blocks_of,
    create_workload,
    decoder_sizes,
    describe_sizes,
    model_names,
)

CHECKED_STEPS = 3  # the first ones, whose losses are compared
# Of a loss over the first one. The losses fall by a tenth a step, so that a wrong update shows.
# bf16 has 8 bits, and each strategy rounds to them at other places.
TOLERANCES = {"fp32": 2e-3, "bf16": 3e-2}
PROFILED_STEPS = 5


@dataclass(frozen=True)
class Config:
    """What is measured in one case."""

    model: str
    dtype: str
    strategy: str
    backend: str

    def __str__(self) -> str:
        return f"{self.model} {self.dtype} {self.strategy} {self.backend}"


@dataclass
class Shared:
    """What a rank keeps from one case to the next."""

    folder: Path | None  # of cold caches
    references: dict[tuple[str, str, int], reference.Reference] = field(default_factory=dict)
    flops: dict[str, int | None] = field(default_factory=dict)
    start_s: dict[str, float] = field(default_factory=dict)
    broken: dict[str, str | None] = field(default_factory=dict)  # backend -> why it cannot work


# -- strategies: plain torch -----------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """Where a model is trained, and in which type; not every strategy uses all of it."""

    device: torch.device
    group: dist.ProcessGroup
    mesh: DeviceMesh  # of the group
    param_dtype: torch.dtype | None  # of FSDP's mixed precision


def checkpoint_blocks(model: nn.Module) -> None:
    """Let each block recompute its activations in the backward pass."""
    blocks = set(blocks_of(model))
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if child in blocks:
                parent.register_module(name, checkpoint_wrapper(child))


def units_of(model: nn.Module, args: argparse.Namespace) -> list[nn.Module]:
    """The units of FSDP within the model; none where the whole model is one unit."""
    if not args.fsdp_wrap:
        return []
    checkpointed = [m for m in model.modules() if isinstance(m, CheckpointWrapper)]
    return checkpointed or blocks_of(model)


def with_none(model: nn.Module, place: Place, units: list[nn.Module]) -> nn.Module:
    return model.to(place.device)


def with_ddp(model: nn.Module, place: Place, units: list[nn.Module]) -> nn.Module:
    return DistributedDataParallel(model.to(place.device), process_group=place.group)


def with_fsdp1(model: nn.Module, place: Place, units: list[nn.Module]) -> nn.Module:
    dtype, chosen = place.param_dtype, set(units)
    precision = MixedPrecision(param_dtype=dtype, reduce_dtype=torch.float32) if dtype else None
    return FullyShardedDataParallel(
        model,
        process_group=place.group,
        auto_wrap_policy=CustomPolicy(lambda module: module in chosen),
        mixed_precision=precision,
        device_id=place.device,
        use_orig_params=True,  # torch.compile needs it
    )


def with_fsdp2(model: nn.Module, place: Place, units: list[nn.Module]) -> nn.Module:
    dtype = place.param_dtype
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32 if dtype else None)
    # batch norms stay in fp32, in which their statistics are; FSDP1 sees to that by itself
    norms = [m for m in model.modules() if dtype and isinstance(m, nn.modules.batchnorm._BatchNorm)]
    for module in norms:
        fully_shard(module, mesh=place.mesh)
    for module in [*(unit for unit in units if unit not in norms), model]:
        fully_shard(module, mesh=place.mesh, mp_policy=policy)
    return model


STRATEGIES: dict[str, Callable[..., nn.Module]] = {
    "none": with_none,
    "ddp": with_ddp,
    "fsdp1": with_fsdp1,
    "fsdp2": with_fsdp2,
}


def autocast(device: torch.device, dtype: str) -> contextlib.AbstractContextManager[object]:
    return torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bf16")


def sgd(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def create_step(
    model: nn.Module,
    batch: tuple[Any, ...],
    loss_of: Callable[..., torch.Tensor],
    optimizer: torch.optim.Optimizer,
    cast: Callable[[], contextlib.AbstractContextManager[object]],
    update: bool = True,
    part: Callable[[str], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
) -> Callable[[], torch.Tensor]:
    """One training step; it returns the loss. update: whether the optimizer steps."""

    def step() -> torch.Tensor:
        with part("Forward"), cast():
            loss = loss_of(model, *batch)
        with part("Backward"):
            loss.backward()
        with part("Optimizer"):
            if update:
                optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    return step


# -- one case --------------------------------------------------------------------------------------


def torch_backend(name: str, sweep: Sweep) -> Any:
    """What torch.compile takes for a backend."""

    def print_graph(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        sweep.say(f"# graph of the backend print\n{graph.graph}\n")
        return graph.forward

    if name == PRINT:
        return print_graph
    return "eager" if name == DYNAMO_EAGER else name


def shared_reference(
    config: Config, args: argparse.Namespace, sweep: Sweep, group: CaseGroup, shared: Shared
) -> reference.Reference | None:
    """The losses of one eager process on the batches of all ranks; on all ranks.

    The group's first rank computes them, once for each dtype and number of ranks, bf16 by
    autocast. None where the model does not fit on its device as a whole.
    """
    ranks, device = len(group.ranks), sweep.ctx.device
    weights = reference.shares(ranks)
    values = torch.zeros(1 + CHECKED_STEPS * len(weights), dtype=torch.float64)
    if group.ranks[0] == sweep.ctx.rank:
        of_this = (config.model, config.dtype, ranks)
        if of_this not in shared.references:
            sweep.watch.phase("reference")
            work = create_workload(config.model, sizes_of(args), device, args.torchbench)
            batches = [work.batch(i) for i in range(len(weights))]

            def loss_of(*parts: Any) -> torch.Tensor:
                with autocast(device, config.dtype):
                    return work.loss_of(*parts)

            with contextlib.suppress(torch.OutOfMemoryError):
                shared.references[of_this] = reference.train_alone(
                    work.model.to(device), batches, weights, loss_of, sgd, CHECKED_STEPS
                )
        found = shared.references.get(of_this)
        values[:] = torch.tensor(found.flat() if found else [float("nan")] * len(values))
    if ranks > 1:
        dist.broadcast(values, group_src=0, group=group.control)
    if bool(values[0].isnan()):
        return None
    return reference.unflatten(values.tolist(), CHECKED_STEPS)


def flops_of(name: str, work: Workload, shared: Shared) -> int | None:
    """The model's FLOPs in a step of one rank; None where they cannot be counted."""
    if name not in shared.flops:
        try:
            shared.flops[name] = count_flops(work.model, work.batch(0), work.loss_of)
        except Exception as error:
            print(f"warning: no tflops for {name}: {error}".splitlines()[0], file=sys.stderr)
            shared.flops[name] = None
    return shared.flops[name]


def run_case(
    config: Config, args: argparse.Namespace, sweep: Sweep, shared: Shared, group: CaseGroup
) -> Outcome:
    """Time one case on this rank, and leave nothing behind that keeps its group alive.

    A peer learns of a failure here by the group's closed sockets. Dynamo's cache holds the model,
    and DTensor's caches of operators hold the mesh for ever.
    """
    folder = shared.folder and shared.folder / str(config).replace(" ", "-")
    mesh = DeviceMesh.from_group(group.test, sweep.ctx.device.type)
    try:
        with compiling.caches_in(folder):
            return time_case(config, args, sweep, shared, group, mesh)
    finally:
        start_counting()  # resets dynamo
        gc.collect()  # a model under FSDP refers to itself, and would be in the next case's memory
        getattr(mesh, "_pg_registry", {}).clear()  # of newer versions; others hold names
        if folder and sweep.ctx.local_rank == 0:
            shutil.rmtree(folder, ignore_errors=True)


def time_case(
    config: Config,
    args: argparse.Namespace,
    sweep: Sweep,
    shared: Shared,
    group: CaseGroup,
    mesh: DeviceMesh,
) -> Outcome:
    device, rank = sweep.ctx.device, sweep.ctx.rank
    wanted = shared_reference(config, args, sweep, group, shared)
    memory = start_peak(device)
    work = create_workload(config.model, sizes_of(args), device, args.torchbench)
    flops = flops_of(config.model, work, shared) if rank == group.ranks[0] else None
    peak = peak_of(work.model, config.dtype, device)
    batch = work.batch(reference.batch_of(rank))
    if args.fsdp_checkpoint:
        checkpoint_blocks(work.model)
    bf16 = torch.bfloat16 if config.dtype == "bf16" else None
    place = Place(device, group.test, mesh, bf16)
    model = STRATEGIES[config.strategy](work.model, place, units_of(work.model, args))
    if args.verbose:
        sweep.say(f"# {config}\n{model}")
    start_counting()
    compiled = model
    if config.backend != EAGER:
        compiled = torch.compile(model, backend=torch_backend(config.backend, sweep))
    optimizer = sgd(model, wanted.lr if wanted else 0.0)
    dtype = "fp32" if config.strategy.startswith("fsdp") else config.dtype  # FSDP casts by itself
    cast = functools.partial(autocast, device, dtype)
    parts = (compiled, batch, work.loss_of, optimizer, cast)

    losses: list[float] = []
    step = create_step(*parts)
    sweep.watch.phase("first step, which compiles")
    with compiling.compile_errors():
        (first_step_s,) = time_block(lambda: losses.append(step()), 1, device)
        first, first_compile_s = facts_so_far(), compiling.compile_seconds()
        for i in range(1, CHECKED_STEPS):
            sweep.watch.phase(f"checked step {i + 1}")
            losses.append(step())
    for parameters in optimizer.param_groups:
        parameters["lr"] = 0.0  # costs the same, and no number of steps makes the weights grow
    step = create_step(*parts, update=not args.no_optimizer)
    measurement = measure({"step": step}, group, device, stop_rule(args), sweep.next_block)
    later = Counter(facts_so_far().recompiles) - Counter(first.recompiles)
    facts = {
        "first_step_s": first_step_s,
        "graphs": first.graphs,
        "graph_breaks": first.breaks,
        "recompiles": sum(later.values()),
        "recompile_s": compiling.compile_seconds() - first_compile_s,
        "recompile_reasons": later,
        "start_s": shared.start_s.get(config.backend, 0.0),
        "memory_gib": peak_gib(device, memory),
        "losses": [float(loss) for loss in losses],
        "reference": wanted and wanted.flat(),
        "flops": flops,
        "peak_flops": peak,
        "samples": work.samples,
        "tokens": work.tokens,
    }
    profiled = create_step(*parts, update=not args.no_optimizer, part=record_function)

    def draw() -> None:  # uncompiled: a compiled graph is one node; all ranks take part
        with cast():
            loss = work.loss_of(model, *batch)
        if rank == group.ranks[0]:
            write_graph(loss, model, str(trace_path(GRAPH_FILE, rank, str(config))))

    try:
        facts |= extras(config, args, sweep, profiled, draw)
    except (OSError, ValueError) as error:  # a full disk costs the picture, not what is measured
        facts["unwritten"] = f"{error} (rank {rank})"
    return Outcome(facts, measurement)


def extras(
    config: Config,
    args: argparse.Namespace,
    sweep: Sweep,
    step: Callable[[], torch.Tensor],
    draw: Callable[[], None],
) -> dict[str, Any]:
    """What was asked for beside the numbers, and made after them: trace, graph, memory."""
    rank, device = sweep.ctx.rank, sweep.ctx.device
    facts: dict[str, Any] = {}
    case = str(config)
    if args.profile:
        sweep.watch.phase("profile")
        path = trace_path(args.trace_file, rank, case)
        facts["profile"] = profile_steps(step, PROFILED_STEPS, device, path)
    if args.torchviz:
        sweep.watch.phase("torchviz")
        draw()
    if args.memory_snapshot:
        sweep.watch.phase("memory snapshot")
        torch.cuda.memory._record_memory_history(max_entries=100_000)
        for _ in range(PROFILED_STEPS):
            step()
        torch.cuda.memory._dump_snapshot(str(trace_path(args.memory_snapshot, rank, case)))
        torch.cuda.memory._record_memory_history(enabled=None)
    return facts


def peak_of(model: nn.Module, dtype: str, device: torch.device) -> float | None:
    """FLOP/s that this device could do in the dtype; None where that is not known."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    used = fp32_on_cuda(model, properties.name) if dtype == "fp32" else dtype
    return peak_flops(properties.name, used, properties.multi_processor_count)


def derive(
    config: Config, args: argparse.Namespace, sweep: Sweep, measured: Measurement, facts: list[Any]
) -> tuple[dict[str, Any], str]:
    """A case's metrics (see docs/numbers.md) and the verdict on its losses. On rank 0."""
    samples = facts[0]["samples"]
    metrics = step_metrics(measured.samples["step"], len(facts) * (samples or 0))
    if samples is None:
        del metrics["samples_per_s"], metrics["samples_per_s_per_device"]
    metrics |= rank_metrics(facts, metrics["step_time_p50_s"])

    def other(**changes: str) -> Case | None:
        changed = dataclasses.replace(config, **changes)
        return None if changed == config else sweep.find(case_key(changed, args, sweep.ctx))

    metrics |= compare(metrics, other(backend=EAGER), other(strategy="none"))
    unwritten = next((fact["unwritten"] for fact in facts if "unwritten" in fact), None)
    if unwritten:
        return metrics, f"failed: {unwritten}"
    if facts[0]["reference"] is None:
        return metrics, "skipped: the whole model does not fit on one device, to compare with"
    wanted = reference.unflatten(facts[0]["reference"], CHECKED_STEPS)
    losses = [fact["losses"] for fact in facts]
    return metrics, reference.verdict(losses, wanted, TOLERANCES[config.dtype])


# -- the sweep -------------------------------------------------------------------------------------


def plan(args: argparse.Namespace) -> list[Config]:
    """Every case, in the order in which they run: what others are compared with comes first."""
    strategies = [name for name in STRATEGY_NAMES if name in args.strategies]
    backends = sorted(args.backends, key=lambda name: name != EAGER)
    return [
        Config(*of_case)
        for of_case in itertools.product(args.models, args.dtype, strategies, backends)
    ]


def case_key(config: Config, args: argparse.Namespace, ctx: RankContext) -> dict[str, Any]:
    """What identifies a case: of the options those that matter to it."""
    key: dict[str, Any] = {"model": config.model, "dtype": config.dtype}
    key |= {"strategy": config.strategy, "compile_backend": config.backend}
    key |= {"device": ctx.device.type, "backend": ctx.backend, "batch_size": args.batch_size}
    key |= {"world_size": 0 if config.strategy == "none" else ctx.world_size}
    key |= {"checkpoint": args.fsdp_checkpoint, "optimizer": not args.no_optimizer}
    key |= {} if args.torchbench else describe_sizes(config.model, sizes_of(args))
    if config.strategy.startswith("fsdp"):
        key["wrap"] = args.fsdp_wrap
    if config.backend != EAGER:
        key["warm_cache"] = args.warm_cache
        if config.strategy == "ddp":
            key["optimize_ddp"] = not args.dynamo_no_optimize_ddp
    return key


def sizes_of(args: argparse.Namespace) -> Sizes:
    given = {name: getattr(args, name) for name in ("sequence_length", *SIZES)}
    return Sizes(args.batch_size, args.image_size, **given)


def check_args(args: argparse.Namespace) -> tuple[torch.device, str]:
    """Fill in the defaults that depend on others; refuse what cannot run or has no effect."""
    try:
        device, distributed = choose_device(args.device, args.distributed_backend)
        cuda = device.type == "cuda"
        args.small = not (cuda or args.models or args.toy_model or args.torchbench_model)
        choose_cases(args, cuda)
        refuse_without_effect(args, cuda)
        args.image_size = args.image_size or (224 if cuda else 64)
        if not args.torchbench:
            args.batch_size = args.batch_size or 8
        args.fsdp_wrap = args.fsdp_wrap is not False
        refuse_unknown(args)
        if args.profile:
            args.trace_file = args.trace_file or TRACE_FILE
            cases = len(plan(args))
            check_trace_path(args.trace_file, world_from_environment()[1], cases)
        if args.torchviz:
            check_graph_path(GRAPH_FILE)
        if args.memory_snapshot:
            check_snapshot_path(args)
    except ValueError as error:
        cli.refuse(str(error))
    check_report_flags(args, "compile_sweep")
    return device, distributed


def choose_cases(args: argparse.Namespace, cuda: bool) -> None:
    """The models, strategies and backends that the flags name; the original's name one of each."""
    single = args.ddp or args.fsdp or args.dynamo
    everywhere = list(STRATEGY_NAMES) if cuda else ["none", "ddp", "fsdp2"]
    if args.ddp or args.fsdp:
        args.strategies = ["ddp" if args.ddp else "fsdp1"]
    if args.dynamo:
        args.backends = [DYNAMO_EAGER if args.dynamo == "eager" else args.dynamo]
    if args.toy_model or args.torchbench_model:
        args.models = ["toy" if args.toy_model else args.torchbench_model]
    args.torchbench = args.torchbench_model is not None
    args.strategies = args.strategies or (["none"] if single else everywhere)
    args.backends = args.backends or ([EAGER] if single else [EAGER, "inductor"])
    args.models = args.models or ["decoder-124m" if cuda else "toy-small"]


def refuse_unknown(args: argparse.Namespace) -> None:
    """Refuse models and backends that there are not, and a decoder's sizes that do not fit."""
    backends = [EAGER, DYNAMO_EAGER, PRINT, *torch._dynamo.list_backends(exclude_tags=())]
    for name in args.backends:
        if name not in backends:
            hint = cli.suggest(name, backends) or ", e.g. eager, inductor or aot_eager"
            raise ValueError(f"unknown backend '{name}'{hint}")
    if args.torchbench:
        torchbench.find_model(args.torchbench_model)
        return
    for name in args.models:
        if name not in model_names():
            hint = cli.suggest(name, model_names()) or ", e.g. toy, decoder-10m or resnet50"
            raise ValueError(f"unknown model '{name}'{hint}")
        if name.startswith(DECODER):
            decoder_sizes(name, sizes_of(args))


def refuse_without_effect(args: argparse.Namespace, cuda: bool) -> None:
    """Refuse flags that none of the cases heeds."""
    compiled = args.backends != [EAGER]
    named = [] if args.torchbench else args.models
    decoder = any(name.startswith(DECODER) for name in named)
    image = any(name not in TOYS and not name.startswith(DECODER) for name in named)
    fsdp = any(name.startswith("fsdp") for name in args.strategies)
    for flag, useful, needs in (
        *((f"--{size}", decoder, "a decoder, e.g. --models decoder-10m") for size in SIZES),
        ("--sequence-length", decoder, "a decoder, e.g. --models decoder-10m"),
        ("--image-size", image, "a torchvision model, e.g. --models resnet50"),
        ("--fsdp-wrap", fsdp, "fsdp1 or fsdp2 among the strategies"),
        ("--warm-cache", compiled, "a backend that compiles, e.g. --backends eager,inductor"),
        ("--trace-file", args.profile, "--profile"),
        ("--memory-snapshot", cuda, "CUDA, whose allocator keeps a history"),
        (
            "--dynamo-no-optimize-ddp",
            compiled and "ddp" in args.strategies,
            "ddp and a backend that compiles, e.g. --ddp --dynamo inductor",
        ),
    ):
        given = getattr(args, flag.removeprefix("--").replace("-", "_"))
        unset = None if flag == "--fsdp-wrap" else False
        if given is not None and given is not unset and not useful:
            cli.refuse(f"{flag} has no effect in this run: it needs {needs}")


def check_snapshot_path(args: argparse.Namespace) -> None:
    """Raise ValueError where several ranks or cases would write the same file."""
    path = Path(args.memory_snapshot)
    counts = {"{rank}": world_from_environment()[1], "{case}": len(plan(args))}
    for name, count in counts.items():
        if count > 1 and name not in path.name:
            raise ValueError(
                f"--memory-snapshot {path}: {count} snapshots would be the same file; put {name} "
                "into its name, e.g. --memory-snapshot memory-{case}-{rank}.pickle"
            )
    if not path.parent.is_dir():
        raise ValueError(f"--memory-snapshot {path}: there is no directory {path.parent}")


def create_cache_folder(args: argparse.Namespace, ctx: RankContext) -> Path | None:
    """An empty folder for compilers, one for each host, as all ranks of a host share one in
    training; None with --warm-cache."""
    if args.warm_cache or args.backends == [EAGER]:
        return None
    # inductor gives its compiler paths without quotes (torch 2.15): a folder without spaces
    place = None if len(tempfile.gettempdir().split()) == 1 else "/tmp"
    own = tempfile.mkdtemp(prefix="compile_sweep-", dir=place) if ctx.local_rank == 0 else ""
    folders = broadcast_json(gather_json(own))
    return Path(folders[ctx.rank - ctx.local_rank])


def remove_cache_folder(shared: Shared, ctx: RankContext) -> None:
    if shared.folder and ctx.local_rank == 0:
        shutil.rmtree(shared.folder, ignore_errors=True)


def start_backend(name: str, sweep: Sweep, shared: Shared) -> str | None:
    """Why a backend cannot work here, or None; found out once, on all ranks."""
    if name in (EAGER, PRINT):
        return None
    if name not in shared.broken:

        def start() -> None:
            device = sweep.ctx.device
            if name == "cudagraphs" and device.type != "cuda":
                raise compiling.CompileError("cudagraphs needs CUDA; on the CPU try inductor")
            folder = shared.folder and shared.folder / "start"
            with compiling.caches_in(folder):
                shared.start_s[name] = compiling.start_backend(torch_backend(name, sweep), device)

        shared.broken[name] = sweep.everywhere(f"start of {name}", start)
    return shared.broken[name]


def main(args: argparse.Namespace) -> int:
    device, backend = check_args(args)
    if args.dynamo_no_optimize_ddp:
        torch._dynamo.config.optimize_ddp = False
    if args.verbose:
        torch._logging.set_logs(dynamo=logging.INFO, graph_breaks=True, recompiles=True)
    with Sweep("compile_sweep", args, device, backend) as sweep:
        if args.small:
            sweep.say(
                "# CPU defaults: a small model, for a first look; what is measured on GPUs: "
                "--models decoder-124m --strategies all"
            )
        shared = Shared(create_cache_folder(args, sweep.ctx))
        if args.backends != [EAGER]:
            state = "cold, an empty folder a case" if shared.folder else "warm, as they are"
            sweep.say(f"# compile caches: {state}")
        configs = plan(args)
        keys = [case_key(config, args, sweep.ctx) for config in configs]

        def finish() -> None:  # also when the run is interrupted
            remove_cache_folder(shared, sweep.ctx)
            cases = [case for case in map(sweep.find, keys) if case is not None]
            sweep.say(cost_tables(cases, "max_reserved" if device.type == "cuda" else "RSS growth"))

        known = sweep.plan(keys, summary=finish)
        heading = ""
        for config, key, done in zip(configs, keys, known, strict=True):
            case = sweep.find(key) if done else None
            if not done:
                ranks = 1 if config.strategy == "none" else sweep.ctx.world_size
                case = sweep.case(
                    key,
                    str(config),
                    tuple(range(ranks)),
                    functools.partial(run_case, config, args, sweep, shared),
                    functools.partial(derive, config, args, sweep),
                    broken=start_backend(config.backend, sweep, shared),
                )
            if case is None:
                continue  # not rank 0
            if title(key) != heading:
                heading = title(key)
                table = StreamedTable(step_columns(key), widest_row(keys))
                sweep.say(f"\n{heading}\n")
            failed = case["check"].startswith("failed")
            sweep.say(f"{case_name(case)}  {case['check']}" if failed else table.row(case))
        remove_cache_folder(shared, sweep.ctx)
    return sweep.status


if __name__ == "__main__":
    sys.exit(record(main)(ARGS))
