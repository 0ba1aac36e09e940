#!/usr/bin/env python3
"""Does torch.compile help a data-parallel model, under which strategy, and what does it cost?

It times whole training steps (forward, loss, backward, optimizer step, zero_grad) of one model:

    models       toy (the original's), toy-small, decoder-tiny, -10m, -124m, -1.3b, or your own:
                 package.module:function (docs/compile_sweep.md)
    strategies   none (rank 0 alone), ddp, fsdp1 (FullyShardedDataParallel), fsdp2 (fully_shard)
    backends     eager (not compiled), inductor, aot_eager, cudagraphs and any other that dynamo
                 knows; dynamo's own `eager` is dynamo_eager

The wrapped model is compiled; the loss and the optimizer are not. Caches are cold: each case and
rank has an empty folder. Two more steps are timed in turns with the step of a case:

    fwd+bwd      forward and backward, without the optimizer
    eager        the whole step of the same parameters, not compiled
    vs eager   = eager / step. gmean: geometric mean over rounds of block medians
    first step   the first one, which includes compiling

    --interleave times all strategies and backends in turns within one case: a replica of the model
                 each, and whole steps alone
    vs first   = step of the first setting / step of this one; the intervals of the k - 1 ratios
                 hold together with 95 % confidence (each at 1 - 0.05 / (k - 1))

    payback    = compiling / gain of a step, in steps
    compiling  = start of the backend + first 3 steps - 3 eager; gain of a step = eager - step

    torchrun --nproc-per-node 2 benchmarks/compile_sweep.py
    torchrun --nproc-per-node 8 benchmarks/compile_sweep.py --dtype bf16 --json report.jsonl
    torchrun --nproc-per-node 8 benchmarks/compile_sweep.py --model package.module:function \\
        --interleave --strategies ddp,fsdp2 --backends eager

It asks what PyTorch's benchmarks/dynamo/distributed.py asks, with its flags, and is written anew.
BSD-3-Clause.
"""

import contextlib
import copy
import dataclasses
import gc
import itertools
import os
import sys
import warnings
from argparse import SUPPRESS, BooleanOptionalAction, Namespace
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import cli  # first: it names a package that is missing

# isort: split
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper
from torch.distributed.elastic.multiprocessing.errors import record
from torch.profiler import record_function

from benchmarks.workloads.decoder import DECODERS, Decoder, next_token_loss, random_text
from benchmarks.workloads.meshes import forget_groups
from benchmarks.workloads.own_model import (
    Optimize,
    Trial,
    is_own,
    make_own,
    need_size,
    try_on_all,
    without_rate,
)
from benchmarks.workloads.precision import name_precision, set_precision
from benchmarks.workloads.reference import (
    CHECKED_STEPS,
    Reference,
    compare_training,
    sgd,
    train_alone,
)
from benchmarks.workloads.settings import compare_settings, fastest
from benchmarks.workloads.training import training_metrics
from common.benchmark import Benchmark, Key, Planned
from common.check import verdict
from common.environment import count_of
from common.groups import Group, Job, agree
from common.memory import peak, reset_peak, start_peak
from common.report import Case
from common.stats import Times, telling
from common.table import Columns, Table, ends, metric, relative
from common.timing import Workload, time_block

STRATEGIES = ("none", "ddp", "fsdp1", "fsdp2")
# of a loss, relative to the first one; torch's default may be TF32
TOLERANCES = {"default": 5e-3, "fp32": 2e-3, "tf32": 5e-3, "bf16": 3e-2}
GONE = {  # flags of the source program, and what replaces them
    "--trace-file": "--profile DIR writes a trace for each case and rank into DIR",
    "--torchbench-model": "--model tb:hf_Bert, with the tb.py of docs/compile_sweep.md",
    "--torchviz": "call torchviz in the function of --model package.module:function",
    "--verbose": "TORCH_LOGS=graph_code,ddp_graphs prints the graphs, TORCH_LOGS=+dynamo more",
}
BATCHES = 8  # different ones. More ranks share them, so that the reference costs no more


def parse_args(argv: list[str] | None = None) -> Namespace:
    parser = cli.Parser(__doc__, GONE)
    strategies = cli.list_of(str, STRATEGIES)
    dtypes = cli.list_of(str, [*TOLERANCES])
    default = "(default: %(default)s)"
    add = parser.add_mutually_exclusive_group().add_argument
    model = cli.By(["decoder-124m"], ["toy-small"])
    add("--models", "--model", type=cli.list_of(str), default=model, metavar="M", help=default)
    add("--toy-model", dest="models", action="store_const", const=["toy"])
    add = parser.add_mutually_exclusive_group().add_argument
    all_here = cli.By([*STRATEGIES], ["none", "ddp", "fsdp2"])
    text = f"(default: {all_here}; none not with --interleave)"
    add("--strategies", type=strategies, metavar="S", help=text)
    add("--ddp", dest="strategies", action="store_const", const=["ddp"])
    add("--fsdp", action="store_true", help="fsdp1, in one unit unless --fsdp-wrap is given")
    add = parser.add_argument
    both, listed = ["eager", "inductor"], "(default: eager,inductor)"
    add("--backends", "--dynamo", type=backend_list, default=both, metavar="B", help=listed)
    batch = "batch size per rank (default: 8 on CUDA, 4 on the CPU)"
    add("--batch-size", type=cli.positive_int, metavar="N", help=batch)
    text = "default (as torch sets it: TF32 in convolutions, not in matmuls), fp32, tf32, bf16 "
    text += "(default: default)"
    add("--dtype", type=dtypes, default=["default"], metavar="D", help=text)
    units = "shard each layer of the model's lists as a unit (default: yes, but with --fsdp no)"
    add("--fsdp-wrap", action=BooleanOptionalAction, help=units)
    classes = "shard the modules of these classes as units instead, e.g. BertLayer"
    add("--fsdp-wrap-classes", type=cli.list_of(str), default=[], metavar="CLASS", help=classes)
    recomputed = "activation checkpointing of these units: backward computes their activations anew"
    add("--fsdp-checkpoint", action="store_true", help=recomputed)
    whole = "do not split graphs at DDP's bucket boundaries"
    add("--dynamo-no-optimize-ddp", action="store_true", help=whole)
    turns = "time all strategies and backends in turns, a replica each, and say which is the "
    turns += "fastest; --max-seconds counts for each of them"
    add("--interleave", action="store_true", help=turns)
    add("--repeat", dest="iters", type=cli.positive_int, default=SUPPRESS, help="same as --iters")
    cli.add_common_flags(parser, max_seconds=4)
    args = parser.parse_args(argv)
    cuda = cli.on_cuda(args.device)
    if args.fsdp:
        args.strategies = ["fsdp1"]
    elif args.strategies is None:
        args.strategies = (all_here.cuda if cuda else all_here.cpu)[args.interleave :]
    elif args.interleave and "none" in args.strategies:
        only = "--interleave compares strategies on all ranks, and none uses one"
        parser.error(f"{only}; e.g. --strategies ddp,fsdp2")
    if args.interleave and len(args.strategies) * len(args.backends) < 2:
        got = f"{args.strategies[0]} {args.backends[0]}"
        expected = "--interleave: expected several strategies or backends"
        parser.error(f"{expected}, got {got} alone; e.g. --strategies ddp,fsdp2")
    if args.fsdp_wrap is None:
        args.fsdp_wrap = bool(args.fsdp_wrap_classes) or not args.fsdp
    if args.fsdp_wrap_classes and not args.fsdp_wrap:
        parser.error("--fsdp-wrap-classes: not allowed with argument --no-fsdp-wrap")
    if args.fsdp_checkpoint and not any(name.startswith("fsdp") for name in args.strategies):
        given = ",".join(args.strategies)
        parser.error(f"--fsdp-checkpoint: expected a strategy with FSDP, got {given}; e.g. --fsdp")
    for name in args.models:
        if name not in (*TOYS, *DECODERS) and not is_own(name):
            hint = cli.suggest(name, [*TOYS, *DECODERS]) or "; e.g. toy or package.module:function"
            parser.error(f"unknown model '{name}'{hint}")
        if is_own(name) and args.batch_size:
            example = f"'{name.partition('?')[0]}?batch=16' passes a parameter to the function"
            cannot = f"--batch-size cannot be used with {name}, which defines its own batch"
            parser.error(f"{cannot}; e.g. {example}")
    if not cuda and ("tf32" in args.dtype or "cudagraphs" in args.backends):
        parser.error("tf32 and cudagraphs require CUDA; use --dtype fp32 or --backends inductor")
    args.batch_size = args.batch_size or (8 if cuda else 4)
    return args


def backend_list(text: str) -> list[str]:
    """The value of --backends. Torch's list takes a second, so that --help does not wait for it."""
    known = {*torch.compiler.list_backends(exclude_tags=())} - {"eager"}  # here dynamo_eager
    usable = [name for name in sorted(known) if "TESTING" not in name]  # the others fail by design
    return list(cli.list_of(backend_name, ["eager", "dynamo_eager", *usable])(text))


def backend_name(text: str) -> str:
    """An entry of --backends. Refuses the source program's `print`, which was no backend."""
    if text == "print":
        advice = "TORCH_LOGS=graph_code,ddp_graphs prints the graphs of --dynamo inductor"
        cli.wrong("a backend", repr(text), advice)
    return text


# -- what is trained, and how: plain torch ---------------------------------------------------------
# [core]

TOYS = {"toy": (10000, 1000), "toy-small": (1000, 100)}  # widths; toy has the original's
LISTS = (nn.ModuleList, nn.ModuleDict)
Loss = Callable[[Any], Tensor]  # of a model's output
# positional and keyword arguments of the forward pass, and the loss for their targets
Batch = tuple[tuple[Any, ...], dict[str, Any], Loss]


class Layer(nn.Linear):
    """Linear, then ReLU. nn.Sequential would not do: FSDP2 needs dynamo to compile each layer's
    forward, and dynamo does not compile a forward that is torch.nn's own."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


class Toy(nn.Module):
    def __init__(self, wide: int, narrow: int) -> None:
        super().__init__()
        widths = itertools.pairwise([10, wide, wide, wide, *[narrow] * 8])
        self.blocks = nn.ModuleList(Layer(a, b) for a, b in widths)
        self.head = nn.Linear(narrow, 5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def toy_batch(size: int, device: torch.device) -> Batch:
    x, targets = torch.rand(size, 10, device=device), torch.randint(5, (size,), device=device)
    return (x,), {}, partial(nn.functional.cross_entropy, target=targets)


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The layers in the model's lists of at least two of one class. Inner layers come first."""
    layers: list[nn.Module] = []
    for module in model.modules():
        classes = {type(child) for child in module.children()}
        if isinstance(module, LISTS) and len(module) > 1 and len(classes) == 1:
            layers += module.children()
    return layers[::-1]


def modules_of(model: nn.Module, classes: list[str]) -> list[nn.Module]:
    """The modules of these classes, by their names. Inner modules come first."""
    return [module for module in model.modules() if type(module).__name__ in classes][::-1]


def recompute(model: nn.Module, layers: list[nn.Module]) -> list[nn.Module]:
    """Activation checkpointing: backward computes the activations of these layers anew. Returns the
    modules that replace the layers in the model."""
    # private, as torchtitan imports it; seen to work with torch 2.14 and 2.15
    checkpoint_wrapper.apply_activation_checkpointing(model, check_fn=lambda m: m in layers)
    wrapped: type[nn.Module] = checkpoint_wrapper.CheckpointWrapper
    return [module for module in model.modules() if isinstance(module, wrapped)][::-1]


def wrap(
    model: nn.Module, strategy: str, mesh: dist.DeviceMesh, units: list[nn.Module], bf16: bool
) -> nn.Module:
    """The model under a strategy: what data parallelism needs, and all that it needs."""
    low, high = (torch.bfloat16, torch.float32) if bf16 else (None, None)
    if strategy == "ddp":
        return nn.parallel.DistributedDataParallel(model, process_group=mesh.get_group())
    if strategy == "fsdp1":
        return fsdp.FullyShardedDataParallel(
            model,
            process_group=mesh.get_group(),
            auto_wrap_policy=fsdp.wrap.CustomPolicy(lambda module: module in units),
            mixed_precision=fsdp.MixedPrecision(low, high),
            device_id=next(model.parameters()).device,
            use_orig_params=True,  # torch.compile needs it
        )
    if strategy == "fsdp2":
        for module in [*units, model]:
            fsdp.fully_shard(module, mesh=mesh, mp_policy=fsdp.MixedPrecisionPolicy(low, high))
    return model


def compile_by(backend: str, model: Any) -> Any:
    """The compiled model; with the backend eager the model as it is."""
    if backend == "eager":
        return model
    return torch.compile(model, backend="eager" if backend == "dynamo_eager" else backend)


def loss_of(model: nn.Module, batch: Batch, bf16: bool = False) -> Tensor:
    """bf16: by autocast. It keeps the weights that it has cast until its end, although a step
    changes them: so it begins anew in each call."""
    args, kwargs, loss = batch
    with torch.autocast(next(model.parameters()).device.type, torch.bfloat16, enabled=bf16):
        return loss(model(*args, **kwargs))


def steps_of(
    model: nn.Module, batch: Batch, autocast: bool, optimizer: torch.optim.Optimizer
) -> tuple[Callable[[], Tensor], Callable[[], None]]:
    """A whole training step on a batch, and the same without the optimizer's part."""

    def forward_backward() -> Tensor:
        with record_function("forward"):  # the name of a range in a trace
            loss = loss_of(model, batch, autocast)
        with record_function("backward"):
            loss.backward()
        return loss.detach()

    def step() -> Tensor:
        loss = forward_backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def without_optimizer() -> None:
        forward_backward()
        optimizer.zero_grad()

    return step, without_optimizer


# [/core]
# -- what a case trains, and its check -------------------------------------------------------------


class Made(NamedTuple):
    """A model before it is wrapped, and its batches.

    optimize: of one's own model, a function from parameters to an optimizer. units: of one's own
    model, the modules that FSDP shards. tokens: of a batch of one's own model; 0 if unknown.
    """

    model: nn.Module
    batches: list[Batch]
    optimize: Optimize | None = None
    units: list[nn.Module] | None = None
    tokens: int = 0


def create(name: str, size: int, count: int, device: torch.device) -> Made:
    """A model and `count` batches, the same on all ranks. One's own model has one batch."""
    torch.manual_seed(0)
    if is_own(name):
        own = make_own(name, device)
        batch = (own.args, own.kwargs, own.loss)
        return Made(own.model, [batch] * count, own.optimizer, own.fsdp_units, own.tokens())
    if name in TOYS:
        with device:
            return Made(Toy(*TOYS[name]), [toy_batch(size, device) for _ in range(count)])
    batches: list[Batch] = []
    for seed in range(count):
        tokens, targets = random_text(DECODERS[name], size, seed)
        loss = partial(next_token_loss, targets=targets.to(device))
        batches.append(((tokens.to(device),), {}, loss))
    with device:
        return Made(Decoder(DECODERS[name]), batches)


def reference_of(made: Made, dtype: str, ranks: int) -> Reference | str:
    """The same steps in one eager process, with the batches of all ranks; or why there is nothing
    to compare with."""
    batches = made.batches
    weights = [len(range(batch, ranks, BATCHES)) / ranks for batch in range(len(batches))]
    loss = partial(loss_of, bf16=dtype == "bf16")
    try:
        alone = copy.deepcopy(made.model)
        once = float(loss(alone, batches[0]).detach())
        reference = train_alone(alone, batches, loss, weights, made.optimize)
    except RuntimeError as error:  # if it fails on all ranks as well, the case fails
        return f"one process alone fails: {cli.describe(error)}"
    if abs(reference.losses[0][0] - once) > TOLERANCES[dtype] / 100 * abs(once):
        return "the model draws random numbers, such as those of dropout"
    return reference


def dynamo_counters() -> dict[str, Counter[str]]:
    """What torch.compile counts: graphs, and why it broke them."""
    from torch._dynamo.utils import counters

    return counters


def fresh_compile_cache() -> contextlib.AbstractContextManager[Any]:
    """Within it torch.compile finds nothing that was compiled before."""
    from torch._inductor.utils import fresh_cache

    return fresh_cache()


@contextlib.contextmanager
def compile_cache(number: int) -> Iterator[None]:
    """Within it torch.compile finds nothing that was compiled for another setting of the case. The
    folder is in that of `fresh_compile_cache`, so that it stays until the end of the case."""
    from torch._inductor.utils import clear_caches

    folder = os.path.join(os.environ["TORCHINDUCTOR_CACHE_DIR"], f"setting{number}")
    places = {"TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": os.path.join(folder, "triton")}
    with mock.patch.dict(os.environ, places):
        clear_caches()
        yield
    clear_caches()


def count_graphs(in_first_step: int) -> dict[str, int]:
    """The case's graphs and graph breaks, as metrics. in_first_step: graphs made in that step."""
    counters = dynamo_counters()
    graphs = counters["stats"]["unique_graphs"]
    breaks = 0
    for why, times in (counters["graph_break"] + counters["unimplemented"]).items():
        # DDP's forward has a context manager, which is a generator and breaks nothing
        if "enerator" not in why:
            breaks += times
    return {"graphs": graphs, "recompiles": graphs - in_first_step, "graph_breaks": breaks}


def check(key: Key, rank: int, losses: list[float], wanted: Reference | str, graphs: float) -> str:
    """The check of a rank's first steps: was the model compiled, and are the losses right?"""
    if key["compiler"] != "eager" and not graphs:
        return verdict(f"{key['compiler']} compiled nothing: dynamo has made no graph of the model")
    if isinstance(wanted, str):
        return f"skipped: {wanted}"
    want = [losses_of_step[rank % BATCHES] for losses_of_step in wanted.losses]
    what = f"the loss of rank {rank}"
    return verdict(compare_training(what, losses, want, TOLERANCES[key["dtype"]]))


# -- a case ----------------------------------------------------------------------------------------


def choose_layers(
    model: nn.Module, key: Key, own: list[nn.Module] | None = None
) -> list[nn.Module]:
    """The modules that FSDP shards as units of their own, or checkpoints: of the classes that were
    asked for, else those that one's own model names, else the layers in its lists. Inner modules
    come first.

    Raises ValueError if the model has no class that was asked for, or nothing to checkpoint.
    """
    if not key["fsdp_wrap"] and not key["fsdp_checkpoint"]:
        return []
    classes = list(filter(None, key["fsdp_wrap_classes"].split(",")))
    known = {type(module).__name__ for module in model.modules()}
    for name in classes:
        if name not in known:
            near = cli.suggest(name, known) or f"; it has {cli.cut(sorted(known))}"
            raise ValueError(f"--fsdp-wrap-classes: the model has no module {name!r}{near}")
    layers = modules_of(model, classes) if classes else layers_of(model)
    if own is not None and not classes:
        layers = [module for module in model.modules() if module in own][::-1]
    if key["fsdp_checkpoint"] and not layers:
        advice = "e.g. --fsdp-wrap-classes BertLayer"
        raise ValueError(f"--fsdp-checkpoint: the model has no layers in lists; {advice}")
    return layers


Facts = tuple[dict[str, float], str]  # of a replica on a rank: costs by metric, and its check


class Setting(NamedTuple):
    """What --interleave compares."""

    strategy: str
    compiler: str

    @property
    def label(self) -> str:
        return f"{self.strategy} {self.compiler}"


class Replica(NamedTuple):
    """A model under a strategy and a backend, after its first steps.

    eager: the same step, not compiled; None if nothing was compiled. facts: called after the
    timing.
    """

    step: Callable[[], object]
    without_optimizer: Callable[[], object]
    eager: Callable[[], object] | None
    facts: Callable[[], Facts]


def settings_of(key: Key) -> list[Setting]:
    """The strategies and backends of a case: one, or those that are timed in turns."""
    if "settings" not in key:
        return [Setting(key["strategy"], key["compiler"])]
    return [Setting(*label.split()) for label in key["settings"].split(", ")]


def key_of_setting(key: Key, setting: Setting) -> Key:
    """The key that the setting has where it is a case of its own."""
    compiled_ddp = setting.strategy == "ddp" and setting.compiler != "eager"
    by_fsdp = setting.strategy.startswith("fsdp")
    return key | {
        **setting._asdict(),
        "fsdp_wrap": key["fsdp_wrap"] and by_fsdp,
        "fsdp_wrap_classes": key["fsdp_wrap_classes"] if by_fsdp else "",
        "fsdp_checkpoint": key["fsdp_checkpoint"] and by_fsdp,
        "dynamo_no_optimize_ddp": key["dynamo_no_optimize_ddp"] and compiled_ddp,
    }


def build(bench: Benchmark, start_s: dict[str, float], key: Key, group: Group) -> Workload:
    """What a rank measures in a case: a step and its parts. With --interleave the step is that of
    the first setting, and those of the others are parts.

    start_s: what the start of each backend took.
    """
    device, ranks = bench.job.device, len(group.ranks)
    set_precision(key["dtype"])
    memory = start_peak(device)
    made = create(key["model"], key["batch_size"], min(ranks, BATCHES), device)
    need_size(key["model"], key["batch_size"])
    alone = reference_of(made, key["dtype"], ranks) if bench.job.rank == 0 else None
    wanted: Reference | str = agree(alone, group)
    mesh = dist.DeviceMesh.from_group(group.test, device.type)
    forget_groups(mesh)  # or caches would keep the group open where a later case aborts it
    settings = settings_of(key)
    replicas: list[Replica] = []
    for number, setting in enumerate(settings):
        if number:  # from the same seed
            made = create(key["model"], key["batch_size"], min(ranks, BATCHES), device)
        of_setting, seconds = key_of_setting(key, setting), start_s[setting.compiler]
        with compile_cache(number) if len(settings) > 1 else contextlib.nullcontext():
            replicas.append(set_up(bench, made, seconds, of_setting, group, mesh, wanted, memory))
    first, *others = replicas

    def facts() -> list[Facts]:
        return [replica.facts() for replica in replicas]

    if others:
        labels = [setting.label for setting in settings[1:]]
        steps = {label: replica.step for label, replica in zip(labels, others, strict=True)}
        return Workload(first.step, steps, compared=labels, facts=facts, launches=True)
    parts: dict[str, Callable[[], object]] = {"forward+backward": first.without_optimizer}
    if first.eager:
        parts["eager"] = first.eager
    return Workload(first.step, parts, facts=facts, launches=True)


def set_up(
    bench: Benchmark,
    made: Made,
    start_s: float,
    key: Key,
    group: Group,
    mesh: dist.DeviceMesh,
    wanted: Reference | str,
    memory: int,
) -> Replica:
    """Wrap and compile a model, and train its first steps, which are checked. key: of its setting.
    memory: what `start_peak` returned before the case."""
    device, rank = bench.job.device, bench.job.rank
    bf16, strategy = key["dtype"] == "bf16", key["strategy"]
    autocast = bf16 and strategy in ("none", "ddp")  # FSDP casts by itself
    model, batches = made.model, made.batches
    layers = choose_layers(model, key, made.units)
    if key["fsdp_checkpoint"]:
        layers = recompute(model, layers)
    units = layers if key["fsdp_wrap"] else []
    model = wrap(model, strategy, mesh, units, bf16)
    reset_peak(device)  # leaves out the full model, from which FSDP has cut the shards
    compiled, batch = compile_by(key["compiler"], model), batches[rank % BATCHES]
    if made.optimize:
        optimizer = made.optimize(model.parameters())
    else:
        optimizer = sgd(model, wanted.lr if isinstance(wanted, Reference) else 0.0)
    step, without_optimizer = steps_of(compiled, batch, autocast, optimizer)
    losses, times_s, graphs = list[Tensor](), list[float](), list[int]()
    dynamo_counters().clear()
    for number in range(1, CHECKED_STEPS + 1):  # all ranks of the case start each step together
        bench.phase(f"{strategy} {key['compiler']}, step {number} (the first one compiles)")
        dist.barrier(group.control)
        times_s += time_block(lambda: losses.append(step()), 1, device)[0]
        graphs.append(dynamo_counters()["stats"]["unique_graphs"])
    without_rate(optimizer)  # costs the same, and the weights stay finite
    costs = {"start_s": start_s, "first_step_s": times_s[0], "first_steps_s": sum(times_s)}
    costs |= peak(device, memory)
    costs |= {"fsdp_units": len(units), "tokens": made.tokens}
    counted = count_graphs(graphs[0])

    def facts() -> Facts:
        # torch counts the graphs of all replicas together: of several, those of the first steps
        metrics = costs | (counted if "settings" in key else count_graphs(graphs[0]))
        return metrics, check(key, rank, [float(x) for x in losses], wanted, metrics["graphs"])

    eager = None
    if key["compiler"] != "eager":  # torch.compile leaves the model's parameters where they are
        eager, _ = steps_of(model, batch, autocast, optimizer)
    return Replica(step, without_optimizer, eager, facts)


def derive(case: Case, times: Times, facts: list[list[Facts]]) -> None:
    """Fill in the metrics and the check, on rank 0. facts: of each rank and setting.

    With --interleave the metrics are those of the first setting. Those of another one begin with
    its label, as in `fsdp2 eager step_s`; `row_of` finds them.
    """
    settings, metrics = settings_of(case.key), case.metrics
    checks = []
    for number, setting in enumerate(settings):
        of_setting = [of_rank[number] for of_rank in facts]
        about = times.about(setting.label) if number else times
        own = training_metrics(about, len(facts) * case.key["batch_size"])
        for name in of_setting[0][0]:
            own[name] = max(costs[name] for costs, _ in of_setting)
        if own.pop("tokens", 0):
            tokens = sum(costs["tokens"] for costs, _ in of_setting)
            own["tokens_per_s"] = tokens / own["step_s"]
        if len(settings) > 1:  # memory is that of all replicas together
            own = {name: value for name, value in own.items() if not name.startswith("memory")}
        prefix = f"{setting.label} " if number else ""
        metrics |= {prefix + name: value for name, value in own.items()}
        # `failed` comes before `skipped`
        worst = min((check for _, check in of_setting if check != "passed"), default="passed")
        kind, colon, reason = worst.partition(": ")
        label = f"{setting.label}: " if len(settings) > 1 and worst.startswith("failed") else ""
        checks.append(f"{kind}{colon}{label}{reason}")
    if len(settings) > 1:
        metrics |= compare_settings(times, [setting.label for setting in settings])
    else:
        metrics["forward_backward_s"] = times.mean("forward+backward")
        metrics["forward_backward_mean_s"] = float(times.slowest("forward+backward").mean())
        if "eager" in times:
            metrics |= compare_with_eager(metrics, times)
    case.check = min((check for check in checks if check != "passed"), default="passed")


def compare_with_eager(metrics: dict[str, Any], times: Times) -> dict[str, Any]:
    """What compiling gains; after how many steps it pays, if it certainly does."""
    gains: dict[str, Any] = {"eager_s": times.mean("eager"), "vs_eager": times.ratio("eager")}
    gain_s = 0 - times.beyond("eager")
    cost_s = metrics["start_s"] + metrics["first_steps_s"]
    cost_s = max(0.0, cost_s - CHECKED_STEPS * gains["eager_s"].value)
    gains |= {"compiling_s": cost_s, "gain_s": gain_s}
    if gain_s.value > 0 and not gain_s.may_be(0):
        gains["payback_steps"] = telling(cost_s / gain_s)
    return gains


# -- what is printed -------------------------------------------------------------------------------

COLUMNS: Columns = {
    "": lambda case: case.name,
    "fwd+bwd\nmean (s)": metric("forward_backward_mean_s", digits=4),
    "vs\neager": metric("vs_eager"),
    "95% ci\nof it": ends("vs_eager"),
    "eager\ngmean (s)": metric("eager_s", digits=4),
    "step\ngmean (s)": metric("step_s", digits=4),
    "95% ci\nof step": relative("step_s"),
    "samples/s": metric("samples_per_s", digits=1),
    "fwd+bwd\ngmean (s)": metric("forward_backward_s", digits=4),
    "95% ci\nof fwd+bwd": relative("forward_backward_s"),
    "step\nmean (s)": metric("step_mean_s", digits=4),
    **{f"step\np{q} (s)": metric(f"step_p{q}_s", digits=4) for q in (50, 75, 90, 95)},
}
COMPARED: Columns = {  # with --interleave
    "": COLUMNS[""],
    "vs\nfirst": metric("speed"),
    "simult.\n95% ci": ends("speed"),
    **{head: COLUMNS[head] for head in ("step\ngmean (s)", "95% ci\nof step", "samples/s")},
    **{
        head: COLUMNS[head] for head in COLUMNS if head.startswith("step\n") and "gmean" not in head
    },
}
COSTS: Columns = {
    "": COLUMNS[""],
    "payback\n(steps)": metric("payback_steps", digits=0),
    "\n95% ci": ends("payback_steps", digits=0),
    "compiling\n(s)": metric("compiling_s", digits=3),
    "gain of a\nstep (ms)": metric("gain_s", 1e3, 3),
    "first\nstep (s)": metric("first_step_s"),
    "graph\nbreaks": metric("graph_breaks", digits=0),
    "recom-\npiles": metric("recompiles", digits=0),
    "graphs": metric("graphs", digits=0),
    "start of\nbackend (s)": metric("start_s"),
    "FSDP\nlayers": metric("fsdp_units", digits=0),
    "memory\n(GiB)": metric("memory_gib"),
}


def columns_of(args: Namespace, tokens_known: bool) -> Columns:
    """The columns of a table, with tokens/s beside samples/s if the number of tokens is known."""
    columns: Columns = {}
    for head, cell in (COMPARED if args.interleave else COLUMNS).items():
        columns[head] = cell
        if head == "samples/s" and tokens_known:
            columns["tokens/s"] = metric("tokens_per_s", digits=0)
    return columns


def answer(cases: list[Case]) -> list[str]:
    """For each compiled case: `toy, fp32: whole steps of ddp inductor are 1.30 times (1.21 to 1.38)
    as fast as eager ones; compiling pays after 950 steps (800 to 1,200)`. Then the steps of all
    cases, or with --interleave how they compare."""
    key, sentences = cases[0].key, list[str]()
    begin = f"{key['model']}, {name_precision(key['dtype'], torch.device(key['device']))}"
    if "settings" in key:
        return [f"{begin}: {sentence}" for sentence in comparison(cases)]
    for case in [case for case in cases if "vs_eager" in case.metrics]:
        ratio, name = case.metrics["vs_eager"], case.name
        sentence = f"whole steps of {name} are {ratio.times()} as fast as eager ones"
        if ratio.may_be(1):
            sentence = f"{name} and eager cannot be told apart: {ratio.times()} as fast"
        elif ratio.value < 1:
            sentence += "; compiling does not pay"
        elif payback := case.metrics.get("payback_steps"):
            sentence += f"; compiling pays after {payback.text('steps', digits=0)}"
        sentences.append(f"{begin}: {sentence}")
    if len(cases) > 1:
        steps = ", ".join(f"{case.metrics['step_s']} by {case.name}" for case in cases)
        how = "these were timed one after the other, so they are not ranked"
        sentences.append(f"{begin}: a step takes {steps}; {how}; --interleave compares them")
    return sentences


def comparison(rows: list[Case]) -> list[str]:
    """`fsdp2 eager is 0.82 times (0.78 to 0.87) as fast as ddp eager` for each setting but the
    first one; of three or more whether one is the fastest. rows: of an interleaved case."""
    first, *others = rows
    sentences = []
    for row in others:
        speed = row.metrics["speed"]
        sentence = f"{row.name} is {speed.times()} as fast as {first.name}"
        if speed.may_be(1):
            sentence = f"{row.name} and {first.name} do not differ significantly: {speed.times()}"
        sentences.append(sentence)
    leads = {row.name: row.metrics["lead_of_fastest"] for row in rows if not is_fastest(row)}
    if len(leads) > 1:
        [best] = [row.name for row in rows if is_fastest(row)]
        sentences.append(fastest(best, leads))
    return sentences


def is_fastest(row: Case) -> bool:
    return "lead_of_fastest" not in row.metrics


def rows_of(case: Case) -> list[Case]:
    """The rows of a case in tables and sentences: one for each setting that it has timed."""
    if case.failed or "settings" not in case.key:
        return [case]
    labels, rows = [setting.label for setting in settings_of(case.key)], list[Case]()
    for label in labels:
        own = {}
        for name, value in case.metrics.items():
            if name.startswith(f"{label} "):
                own[name.removeprefix(f"{label} ")] = value
            elif label == labels[0] and not name.startswith(tuple(f"{x} " for x in labels)):
                own[name] = value
        rows.append(dataclasses.replace(case, name=label, metrics=own))
    return rows


class SettingsTable(Table):
    """A table in which each setting of a case has a row."""

    def make_room(self, names: Iterable[str]) -> None:
        """The name of an interleaved case is no row."""

    def rows_of(self, case: Case) -> list[Case]:
        return rows_of(case)


def title_of(
    args: Namespace, model: str, own: Trial | None, dtype: str, device: torch.device
) -> str:
    """The settings that all cases of a table share. own: what is known of one's own model."""
    size = own.samples if own else args.batch_size
    words = [model, f"batch size {size or 'unknown'}", name_precision(dtype, device)]
    if any(strategy.startswith("fsdp") for strategy in args.strategies):
        named = own.units if own else None  # number of modules that the model itself names
        units = (
            "the layers in lists" if named is None else f"{count_of(named, 'module')} of fsdp_units"
        )
        units = cli.cut(args.fsdp_wrap_classes) or units
        in_one = not args.fsdp_wrap or (named == 0 and not args.fsdp_wrap_classes)
        words.append("FSDP in one unit" if in_one else f"FSDP wraps {units}")
        words += ["FSDP with activation checkpointing"] if args.fsdp_checkpoint else []
    if args.dynamo_no_optimize_ddp:
        words.append("one graph under DDP")
    return ", ".join(words)


# -- which cases -----------------------------------------------------------------------------------


def plan(args: Namespace, job: Job, own: dict[str, Trial]) -> dict[str, list[Planned]]:
    """The title of each table (a model and a dtype), and its cases. own: what is known of one's own
    models. A key's flag is true only if it changes what the case does."""
    tables = {}
    settings = list(itertools.starmap(Setting, itertools.product(args.strategies, args.backends)))
    names = ("fsdp_wrap", "fsdp_checkpoint", "dynamo_no_optimize_ddp")
    flags = {name: getattr(args, name) for name in names}
    flags["fsdp_wrap_classes"] = ",".join(args.fsdp_wrap_classes)
    for model, dtype in itertools.product(args.models, args.dtype):
        size = own[model].samples if model in own else args.batch_size
        shared: Key = {"model": model, "dtype": dtype, "batch_size": size}
        cases: list[Planned] = []
        for setting in settings:
            ranks = 1 if setting.strategy == "none" else job.world_size
            cases.append((setting.label, ranks, key_of_setting(shared | flags, setting)))
        if args.interleave:
            labels = ", ".join(setting.label for setting in settings)
            used: Key = {name: any(key[name] for _, _, key in cases) for name in names}
            by_fsdp = used["fsdp_wrap"] or used["fsdp_checkpoint"]
            used["fsdp_wrap_classes"] = flags["fsdp_wrap_classes"] if by_fsdp else ""
            key = shared | {"strategy": None, "compiler": None, "settings": labels} | used
            cases = [(labels, job.world_size, key)]
        tables[title_of(args, model, own.get(model), dtype, job.device)] = cases
    return tables


def has_no_lists(case: Case, own: dict[str, Trial]) -> bool:
    """Whether FSDP was to shard the layers in lists, and there are none."""
    names_units = case.key["model"] in own and own[case.key["model"]].units is not None
    if case.failed or names_units or not case.key["fsdp_wrap"]:
        return False
    rows = zip(settings_of(case.key), rows_of(case), strict=True)
    return any(x.strategy.startswith("fsdp") and not row.metrics["fsdp_units"] for x, row in rows)


def start(backend: str, job: Job) -> float:
    """Seconds of a process's first compilation, of next to nothing.

    It imports, starts worker processes and looks at the compiler. All ranks do this at once, before
    the first case. Raises ValueError if it fails.
    """
    if backend == "eager":
        return 0.0
    square = partial(compile_by(backend, torch.square), torch.ones(64, device=job.device))
    with fresh_compile_cache():  # an error must not leave it, or it would keep its folder
        try:
            return time_block(square, 1, job.device)[0][0]
        except Exception as error:
            reason = cli.describe(getattr(error, "inner_exception", error))  # the backend's own
        finally:
            torch.compiler.reset()  # or dynamo compiles nothing from the ninth backend on
    raise ValueError(f"{backend} cannot compile x * x on rank {job.rank}: {reason}")


def main() -> int:
    args = parse_args()
    # whether dynamo cuts graphs at DDP's buckets, so that communication can begin
    torch._dynamo.config.optimize_ddp = not args.dynamo_no_optimize_ddp
    # each replica is compiled by itself, and beyond the limit dynamo silently runs eager code
    torch._dynamo.config.recompile_limit *= len(args.strategies) * len(args.backends)
    # in the middle of a table; the losses are checked
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    warnings.filterwarnings("ignore", "TRITON_DEFAULT_FP_FUSION is unset")  # torch 2.15's Triton
    with Benchmark("compile_sweep", args) as bench:
        job, own, start_s = bench.job, {}, {}
        for model in filter(is_own, args.models):
            own[model] = try_on_all(bench, model)
        tables = plan(args, job, own)
        bench.announce(tables)
        for backend in args.backends:
            start_s[backend] = bench.prepare("--backends", partial(start, backend, job))
        gc.collect()
        gc.freeze()  # what the backends have imported, as `join` does
        for title, cases in tables.items():
            columns = columns_of(args, any(own[x].tokens for x in own if x == cases[0][2]["model"]))
            labels = [setting.label for _, _, key in cases for setting in settings_of(key)]
            form = SettingsTable(columns, [max(labels, key=len)])
            with bench.begin_table(title, columns, answer, form) as table:
                for name, ranks, key in cases:
                    count = len(settings_of(key))
                    rule = dataclasses.replace(
                        bench.rule, max_seconds=count * bench.rule.max_seconds
                    )
                    begin = partial(build, bench, start_s)
                    with fresh_compile_cache():
                        case = bench.measure(
                            key, name, begin, derive, ranks=range(ranks), rule=rule
                        )
                        torch.compiler.reset()  # it holds the model
                    if case and case.check.startswith("skipped"):
                        bench.print(f"# not checked: {case.check.removeprefix('skipped: ')}")
                    if case and has_no_lists(case, own):
                        bench.print(f"# {key['model']} has no lists of layers: FSDP in one unit")
            if table.passed:
                bench.print_table(COSTS, table.passed, f"Cost: {title}")
    return bench.status


if __name__ == "__main__":
    sys.exit(record(main)())
