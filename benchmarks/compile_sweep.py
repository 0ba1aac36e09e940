#!/usr/bin/env python3
"""Does torch.compile help a data-parallel model, under which strategy, and at what cost?

Times whole training steps (forward, loss, backward, optimizer step, zero_grad) of one model:

    models       toy (the original's), toy-small, decoder-tiny, decoder-10m, decoder-124m,
                 decoder-1.3b, or your own: package.module:function (docs/compile_sweep.md)
    strategies   none (rank 0 only), ddp, fsdp1 (FullyShardedDataParallel), fsdp2 (fully_shard)
    backends     eager (not compiled), inductor, aot_eager, cudagraphs, and every other backend of
                 dynamo; the backend that dynamo calls `eager` is dynamo_eager here

The wrapped model is compiled; the loss and the optimizer are not. Caches are cold: each case and
rank starts with an empty folder. Two more steps are interleaved with the step of a case:

    fwd+bwd      forward and backward, without the optimizer
    eager        the whole step with the same parameters, not compiled

    first step   the first step, which includes compilation
    vs eager   = eager / step
    payback    = compiling / gain of a step: the number of steps after which compiling pays off
    compiling  = start of the backend + first 3 steps - 3 eager steps
    gain of a step = eager - step

    --interleave times all strategies and backends in alternating blocks within one case: whole
                 steps only, each with its own replica of the model
    vs first   = step of the first setting / step of this setting. For k settings, all k - 1
                 intervals hold simultaneously with 95% confidence: each of them has a confidence
                 of 1 - 0.05 / (k - 1)

gmean is the geometric mean over rounds of block medians.

    torchrun --nproc-per-node 2 benchmarks/compile_sweep.py
    torchrun --nproc-per-node 8 benchmarks/compile_sweep.py --dtype bf16 --json report.jsonl
    torchrun --nproc-per-node 8 benchmarks/compile_sweep.py --model package.module:function \\
        --interleave --strategies ddp,fsdp2 --backends eager

The script is a new implementation of the original, PyTorch's benchmarks/dynamo/distributed.py, and
accepts most of its flags. BSD-3-Clause.
"""

import contextlib
import copy
import functools
import gc
import importlib
import itertools
import os
import sys
import warnings
from argparse import SUPPRESS, BooleanOptionalAction, Namespace
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any, NamedTuple
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness import cli, exits

exits.report_missing_packages()

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper
from torch.distributed.elastic.multiprocessing.errors import record
from torch.profiler import record_function

from benchmarks.workloads.check import verdict
from benchmarks.workloads.decoder import DECODERS, Decoder, next_token_loss, random_text
from benchmarks.workloads.memory import peak, reset_peak, start_peak
from benchmarks.workloads.meshes import forget_groups
from benchmarks.workloads.own_groups import guard_cases
from benchmarks.workloads.own_model import (
    Optimize,
    Trial,
    is_own,
    make_own,
    try_on_all,
    without_rate,
)
from benchmarks.workloads.precision import DTYPE_HELP, name_precision, set_precision
from benchmarks.workloads.reference import (
    CHECKED_STEPS,
    Reference,
    compare_training,
    sgd,
    train_alone,
)
from benchmarks.workloads.settings import (
    NOT_COMPARED,
    SettingsTable,
    compare_rows,
    compare_settings,
    of_all,
    split_case,
)
from benchmarks.workloads.training import training_metrics
from common.groups import Group, Job
from common.stats import Times, drop_wide_interval
from common.table import Columns, ends, metric, relative
from common.timing import Workload, time_block
from harness.benchmark import Benchmark, Key, Planned
from harness.environment import count_of
from harness.report import Case

STRATEGIES = ("none", "ddp", "fsdp1", "fsdp2")
# of a loss, relative to that of the first step; torch's default may include TF32
TOLERANCES = {"default": 5e-3, "fp32": 2e-3, "tf32": 5e-3, "bf16": 3e-2}
GONE = {  # flags of the original that are refused, and what replaces them
    "--trace-file": "--profile DIR writes a trace for each case and rank into DIR",
    "--torchbench-model": "--model tb:hf_Bert, with the tb.py of docs/compile_sweep.md",
    "--torchviz": "call torchviz in the function of --model package.module:function",
    "--verbose": "TORCH_LOGS=graph_code,ddp_graphs prints the graphs, TORCH_LOGS=+dynamo more",
}
BATCHES = 8  # different batches; more ranks share them, which limits the cost of the reference


def parse_args(argv: list[str] | None = None) -> Namespace:
    parser = cli.Parser(__doc__, GONE)
    strategies = cli.list_of(str, STRATEGIES)
    dtypes = cli.list_of(str, [*TOLERANCES])
    add = parser.add_mutually_exclusive_group().add_argument
    model = cli.PerDevice(["decoder-124m"], ["toy-small"])
    add(
        "--models",
        "--model",
        type=cli.list_of(str),
        default=model,
        metavar="M",
        help="models, separated by commas; see above (default: %(default)s)",
    )
    add(
        "--toy-model",
        dest="models",
        action="store_const",
        const=["toy"],
        help="same as --model toy",
    )
    add = parser.add_mutually_exclusive_group().add_argument
    all_here = cli.PerDevice([*STRATEGIES], ["none", "ddp", "fsdp2"])
    add(
        "--strategies",
        type=strategies,
        metavar="S",
        help=f"strategies, see above (default: {all_here}; with --interleave without none)",
    )
    add(
        "--ddp",
        dest="strategies",
        action="store_const",
        const=["ddp"],
        help="same as --strategies ddp",
    )
    add("--fsdp", action="store_true", help="fsdp1, as one unit unless --fsdp-wrap is given")
    add = parser.add_argument
    add(
        "--backends",
        "--dynamo",
        type=backend_list,
        default=["eager", "inductor"],
        metavar="B",
        help="backends, see above (default: eager,inductor)",
    )
    add(
        "--batch-size",
        type=cli.positive_int,
        metavar="N",
        help="batch size per rank (default: 8 on CUDA, 4 on the CPU)",
    )
    add("--dtype", type=dtypes, default=["default"], metavar="D", help=DTYPE_HELP)
    add(
        "--fsdp-wrap",
        action=BooleanOptionalAction,
        help="shard each layer in the model's ModuleLists as a unit (default: yes; with --fsdp: "
        "no)",
    )
    add(
        "--fsdp-wrap-classes",
        type=cli.list_of(str),
        default=[],
        metavar="CLASS",
        help="instead shard the modules of these classes as units, e.g. BertLayer",
    )
    add(
        "--fsdp-checkpoint",
        action="store_true",
        help="activation checkpointing of these units: backward recomputes their activations",
    )
    add(
        "--dynamo-no-optimize-ddp",
        action="store_true",
        help="do not split graphs at DDP's bucket boundaries",
    )
    add(
        "--interleave",
        action="store_true",
        help="time all strategies and backends in alternating blocks, each with its own replica, "
        "and report which is fastest; --max-seconds applies to each of them",
    )
    positive = cli.positive_int
    add(
        "--repeat",
        dest="iters",
        type=positive,
        default=SUPPRESS,
        metavar="N",
        help="same as --iters",
    )
    cli.add_common_flags(parser, max_seconds=4)
    args = parser.parse_args(argv)
    cuda = cli.on_cuda(args.device)
    if args.fsdp:
        args.strategies = ["fsdp1"]
    elif args.strategies is None:
        args.strategies = (all_here.cuda if cuda else all_here.cpu)[args.interleave :]
    elif args.interleave and "none" in args.strategies:
        only = "--interleave compares strategies on all ranks, and none uses only one"
        parser.error(f"{only}; e.g. --strategies ddp,fsdp2")
    if args.interleave and len(args.strategies) * len(args.backends) < 2:
        got = f"{args.strategies[0]} {args.backends[0]}"
        expected = "--interleave: expected several strategies or backends"
        parser.error(f"{expected}, got only {got}; e.g. --strategies ddp,fsdp2")
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
    """The value of --backends. Torch needs a second to list them, so --help does not."""
    known = {*torch.compiler.list_backends(exclude_tags=())} - {"eager"}  # here dynamo_eager
    usable = [name for name in sorted(known) if "TESTING" not in name]  # those fail on purpose
    return list(cli.list_of(backend_name, ["eager", "dynamo_eager", *usable])(text))


def backend_name(text: str) -> str:
    """An entry of --backends. `print` is refused: in the original it printed the graphs."""
    if text == "print":
        advice = "TORCH_LOGS=graph_code,ddp_graphs prints the graphs of --dynamo inductor"
        cli.raise_invalid("a backend", repr(text), advice)
    return text


# -- the workload: plain torch ---------------------------------------------------------------------
# [core]

TOYS = {"toy": (10000, 1000), "toy-small": (1000, 100)}  # widths; those of toy are the original's
LISTS = (nn.ModuleList, nn.ModuleDict)  # called ModuleLists in messages
# positional and keyword arguments of the forward pass, and a function from the output to the loss
Batch = tuple[tuple[Any, ...], dict[str, Any], Callable[[Any], Tensor]]


class Layer(nn.Linear):
    """Linear, then ReLU. Not an nn.Sequential, because under FSDP2 dynamo compiles the forward of
    each layer, and skips a forward that is defined in torch.nn."""

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
    """The layers in the model's lists of two or more modules of one class, inner layers first. If
    it has none, the blocks in such an nn.Sequential: modules that have children, as in timm."""
    layers: list[nn.Module] = []
    blocks: list[nn.Module] = []
    for module in model.modules():
        children = list(module.children())
        if len(children) > 1 and len({type(child) for child in children}) == 1:
            if isinstance(module, LISTS):
                layers += children
            elif isinstance(module, nn.Sequential):
                blocks += [child for child in children if list(child.children())]
    return (layers or blocks)[::-1]


def modules_of(model: nn.Module, classes: list[str]) -> list[nn.Module]:
    """The modules whose classes have these names, inner modules first."""
    return [module for module in model.modules() if type(module).__name__ in classes][::-1]


def recompute(model: nn.Module, layers: list[nn.Module]) -> list[nn.Module]:
    """Activation checkpointing: backward recomputes the activations of these layers. Returns the
    modules that replace the layers in the model."""
    # private API, imported as in torchtitan; works in torch 2.14 and 2.15
    checkpoint_wrapper.apply_activation_checkpointing(model, check_fn=lambda m: m in layers)
    wrapped: type[nn.Module] = checkpoint_wrapper.CheckpointWrapper
    return [module for module in model.modules() if isinstance(module, wrapped)][::-1]


def wrap(
    model: nn.Module, strategy: str, mesh: dist.DeviceMesh, units: list[nn.Module], bf16: bool
) -> nn.Module:
    """The model under a data-parallel strategy. units: modules that FSDP shards as units."""
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
            use_orig_params=True,  # required by torch.compile
        )
    if strategy == "fsdp2":
        modules: list[Any] = [*units, model]
        for module in modules:
            fsdp.fully_shard(module, mesh=mesh, mp_policy=fsdp.MixedPrecisionPolicy(low, high))
        if not averages(mesh.get_group()):
            if not hasattr(fsdp.FSDPModule, "set_force_sum_reduction_for_comms"):
                needs = "whose FSDPModule has set_force_sum_reduction_for_comms"
                raise ValueError(f"fsdp2 over gloo requires a newer torch, {needs}")
            for module in modules:
                module.set_force_sum_reduction_for_comms(True)
    return model


def averages(group: dist.ProcessGroup) -> bool:
    """Whether reduce_scatter averages if it is told to, as FSDP2 does. With gloo in torch 2.8 it
    sums (https://github.com/pytorch/pytorch/issues/162338)."""
    if dist.get_backend(group) != "gloo":
        return True
    mean = torch.zeros(1)
    ones = torch.ones(dist.get_world_size(group))
    reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    reduce_scatter(mean, ones, dist.ReduceOp.AVG, group)
    return float(mean) == 1


@functools.cache
def with_own_forward(kind: Any) -> Any:
    """A subclass with the same forward, which is not defined in torch."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return kind.forward(self, *args, **kwargs)

    return type(kind.__name__, (kind,), {"forward": forward})


def make_compilable(modules: list[nn.Module]) -> list[str]:
    """Replace the classes of these modules where dynamo would skip the forward, as that of
    nn.Sequential, because torch defines it. Returns the names of the classes.

    In torch 2.14, torch.compile adds such a forward to a model (OptimizedModule._initialize), but
    not to a model inside DDP or FSDP, where dynamo starts anew.
    """
    from torch._dynamo import trace_rules

    names = set()
    for module in modules:
        if isinstance(module.forward, MethodType) and trace_rules.check(module.forward):
            kind: Any = type(module)
            names.add(kind.__name__)
            module.__class__ = with_own_forward(kind)
    return sorted(names)


def compile_by(backend: str, model: Any) -> Any:
    """The compiled model; the model itself for the backend eager."""
    if backend == "eager":
        return model
    return torch.compile(model, backend="eager" if backend == "dynamo_eager" else backend)


def loss_of(model: nn.Module, batch: Batch, bf16: bool = False) -> Tensor:
    """The loss of a batch. bf16: under autocast, which is entered and exited in each call, because
    it caches the weights that it has cast, and a step changes the weights."""
    args, kwargs, loss = batch
    with torch.autocast(next(model.parameters()).device.type, torch.bfloat16, enabled=bf16):
        return loss(model(*args, **kwargs))


def steps_of(
    model: nn.Module, batch: Batch, autocast: bool, optimizer: torch.optim.Optimizer
) -> tuple[Callable[[], Tensor], Callable[[], None]]:
    """A whole training step on a batch, and the same step without the optimizer."""

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
# -- models, caches, and the check -----------------------------------------------------------------


class Task(NamedTuple):
    """A model before it is wrapped, and its batches. Only your own model defines the last three."""

    model: nn.Module
    batches: list[Batch]
    optimize: Optimize | None = None  # from parameters to an optimizer
    units: list[nn.Module] | None = None  # modules that FSDP shards as units
    tokens: int = 0  # in a batch; 0 if unknown


def create(name: str, size: int, count: int, device: torch.device) -> Task:
    """A model and `count` batches, equal on all ranks. Your own model defines a single batch."""
    torch.manual_seed(0)
    if is_own(name):
        own = make_own(name, device)
        batch = (own.args, own.kwargs, own.loss)
        return Task(own.model, [batch] * count, own.optimizer, own.fsdp_units, own.tokens())
    if name in TOYS:
        with device:
            return Task(Toy(*TOYS[name]), [toy_batch(size, device) for _ in range(count)])
    batches: list[Batch] = []
    for seed in range(count):
        tokens, targets = random_text(DECODERS[name], size, seed)
        loss = partial(next_token_loss, targets=targets.to(device))
        batches.append(((tokens.to(device),), {}, loss))
    with device:
        return Task(Decoder(DECODERS[name]), batches)


def reference_of(task: Task, key: Key, rank: int, group: Group) -> Reference | str:
    """The same eager steps without DDP or FSDP, or why there is no reference: in one process on the
    batches of all ranks; if the model communicates, on all ranks, which average their gradients."""
    ranks, batches = len(group.ranks), task.batches
    weights = [len(range(batch, ranks, BATCHES)) / ranks for batch in range(len(batches))]
    if "communicates" in key:
        found: list[Any] = [None] * ranks
        mine = train_reference(task, [batches[rank % BATCHES]], [1.0], key["dtype"], group)
        dist.all_gather_object(found, mine, group=group.control)
        return next((why for why in found if isinstance(why, str)), mine)
    alone: Reference | str | None = None
    try:
        if rank == 0:
            alone = train_reference(task, batches, weights, key["dtype"])
    except RuntimeError as error:  # an error that all ranks share fails the case later
        alone = f"the reference, in one process, fails: {exits.describe(error)}"
    reference: Reference | str = group.broadcast(alone)
    return reference


def train_reference(
    task: Task, batches: list[Batch], weights: list[float], dtype: str, group: Group | None = None
) -> Reference | str:
    """The reference, or why there is none. group: of the ranks that average; None if alone."""
    loss = partial(loss_of, bf16=dtype == "bf16")

    def average(tensor: Tensor) -> None:
        if group:
            mean = tensor.detach().cpu() / len(group.ranks)
            dist.all_reduce(mean, group=group.control)
            tensor.detach().copy_(mean)

    model = copy.deepcopy(task.model)
    once = float(loss(model, batches[0]).detach())
    reference = train_alone(model, batches, loss, weights, task.optimize, average)
    if abs(reference.losses[0][0] - once) > TOLERANCES[dtype] / 100 * abs(once):
        changes = "through dropout or a buffer that forward updates, for example"
        return f"the loss of one batch changes between two calls, {changes}"
    return reference


def dynamo_counters() -> dict[str, Counter[str]]:
    """torch.compile's counters of graphs and of reasons for graph breaks."""
    from torch._dynamo.utils import counters

    return counters


def fresh_compile_cache() -> contextlib.AbstractContextManager[Any]:
    """A context in which torch.compile finds no earlier compilation."""
    utils: Any = importlib.import_module("torch._inductor.utils")
    has_name = hasattr(utils, "fresh_cache")  # otherwise an older one
    cache: contextlib.AbstractContextManager[Any]
    cache = (utils.fresh_cache if has_name else utils.fresh_inductor_cache)()
    return cache


@contextlib.contextmanager
def compile_cache(number: int) -> Iterator[None]:
    """A context in which torch.compile finds no compilation of another setting of the case. Its
    folder lies within that of `fresh_compile_cache` and remains until the end of the case."""
    utils: Any = importlib.import_module("torch._inductor.utils")
    clear = utils.clear_caches if hasattr(utils, "clear_caches") else utils.clear_inductor_caches
    folder = os.path.join(os.environ["TORCHINDUCTOR_CACHE_DIR"], f"setting{number}")
    places = {"TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": os.path.join(folder, "triton")}
    with mock.patch.dict(os.environ, places):
        clear()
        yield
    clear()


def count_graphs(in_first_step: int) -> dict[str, int]:
    """Metrics: graphs, recompiles and graph breaks. in_first_step: graphs of the first step."""
    counters = dynamo_counters()
    graphs = counters["stats"]["unique_graphs"]
    breaks = 0
    for why, times in (counters["graph_break"] + counters["unimplemented"]).items():
        # a context manager in DDP's forward is reported as a generator but breaks no graph
        if "enerator" not in why:
            breaks += times
    return {"graphs": graphs, "recompiles": graphs - in_first_step, "graph_breaks": breaks}


def check(key: Key, rank: int, losses: list[float], wanted: Reference | str, graphs: float) -> str:
    """The check of a rank's first steps: the model was compiled, and the losses are correct."""
    if key["compiler"] != "eager" and not graphs:
        return verdict(f"{key['compiler']} compiled nothing: dynamo captured no graph of the model")
    if isinstance(wanted, str):
        return f"skipped: {wanted}"
    want = [losses_of_step[rank % len(losses_of_step)] for losses_of_step in wanted.losses]
    what = f"the loss of rank {rank}"
    return verdict(compare_training(what, losses, want, TOLERANCES[key["dtype"]]))


# -- a case ----------------------------------------------------------------------------------------


def choose_layers(
    model: nn.Module, key: Key, own: list[nn.Module] | None = None
) -> list[nn.Module]:
    """The modules that FSDP shards as units or checkpoints, inner modules first: those of
    --fsdp-wrap-classes, otherwise those that your own model names, otherwise the layers in LISTS.

    Raises ValueError if the model has no module of such a class, or no layers to checkpoint.
    """
    if not key["fsdp_wrap"] and not key["fsdp_checkpoint"]:
        return []
    classes = list(filter(None, key["fsdp_wrap_classes"].split(",")))
    known = {type(module).__name__ for module in model.modules()}
    for name in classes:
        if name not in known:
            near = cli.suggest(name, known) or f"; its classes are {cli.cut(sorted(known))}"
            raise ValueError(f"--fsdp-wrap-classes: the model has no module {name!r}{near}")
    layers = modules_of(model, classes) if classes else layers_of(model)
    if own is not None and not classes:
        layers = [module for module in model.modules() if module in own][::-1]
    if key["fsdp_checkpoint"] and not layers:
        advice = "e.g. --fsdp-wrap-classes BertLayer"
        raise ValueError(f"--fsdp-checkpoint: the model has no layers in ModuleLists; {advice}")
    return layers


Facts = tuple[dict[str, float], str]  # of a replica on a rank: its costs by metric, its check


class Setting(NamedTuple):
    """A strategy and a backend."""

    strategy: str
    compiler: str

    @property
    def label(self) -> str:
        return f"{self.strategy} {self.compiler}"


class Replica(NamedTuple):
    """A model under a strategy and a backend, after its first steps."""

    step: Callable[[], object]
    without_optimizer: Callable[[], object]
    eager: Callable[[], object] | None  # the same step, not compiled; None for the backend eager
    facts: Callable[[], Facts]  # called after the timing


def settings_of(key: Key) -> list[Setting]:
    """The settings that a case times: one, or several with --interleave."""
    if "settings" not in key:
        return [Setting(key["strategy"], key["compiler"])]
    return [Setting(*label.split()) for label in key["settings"].split(", ")]


def key_of_setting(key: Key, setting: Setting) -> Key:
    """The key of the setting as a separate case. A flag is true only if it affects the case."""
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
    """The workload of a case: a step and its parts. With --interleave the step is that of the first
    setting, and the steps of the other settings are parts.

    start_s: seconds that the start of each backend took.
    """
    device, ranks = bench.job.device, len(group.ranks)
    set_precision(key["dtype"])
    memory = start_peak(device)
    task = create(key["model"], key["batch_size"], min(ranks, BATCHES), device)
    wanted = reference_of(task, key, bench.job.rank, group)
    mesh = dist.DeviceMesh.from_group(group.workload, device.type)
    forget_groups(mesh)  # otherwise caches would keep the group open when a later case aborts it
    settings = settings_of(key)
    replicas: list[Replica] = []
    for number, setting in enumerate(settings):
        if number:  # an equal model, from the same seed
            task = create(key["model"], key["batch_size"], min(ranks, BATCHES), device)
        of_setting, seconds = key_of_setting(key, setting), start_s[setting.compiler]
        with compile_cache(number) if len(settings) > 1 else contextlib.nullcontext():
            replicas.append(
                make_replica(bench, task, seconds, of_setting, group, mesh, wanted, memory)
            )
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


def make_replica(
    bench: Benchmark,
    task: Task,
    start_s: float,
    key: Key,
    group: Group,
    mesh: dist.DeviceMesh,
    wanted: Reference | str,
    memory: int,
) -> Replica:
    """Wrap and compile a model, and train the first steps, which are checked later.

    key: of the setting, see `key_of_setting`. memory: returned by `start_peak` before the case.
    """
    device, rank = bench.job.device, bench.job.rank
    bf16, strategy = key["dtype"] == "bf16", key["strategy"]
    autocast = bf16 and strategy in ("none", "ddp")  # FSDP casts the parameters itself
    model, batches = task.model, task.batches
    layers = choose_layers(model, key, task.units)
    if key["fsdp_checkpoint"]:
        layers = recompute(model, layers)
    units = layers if key["fsdp_wrap"] else []
    skipped = make_compilable([*units, model])
    if skipped and strategy != "none" and key["compiler"] != "eager":
        label = Setting(strategy, key["compiler"]).label
        why = f"inside DDP and FSDP, torch.compile skips the forward of {cli.cut(skipped)}"
        bench.print(f"# {label}: {why}; subclasses that define their own are measured")
    model = wrap(model, strategy, mesh, units, bf16)
    reset_peak(device)  # excludes the full model, which FSDP has sharded
    compiled, batch = compile_by(key["compiler"], model), batches[rank % BATCHES]
    if task.optimize:
        optimizer = task.optimize(model.parameters())
    else:
        optimizer = sgd(model, wanted.lr if isinstance(wanted, Reference) else 0.0)
    step, without_optimizer = steps_of(compiled, batch, autocast, optimizer)
    losses, times_s, graphs = list[Tensor](), list[float](), list[int]()
    dynamo_counters().clear()
    for number in range(1, CHECKED_STEPS + 1):  # all ranks start each step together
        bench.phase(f"{strategy} {key['compiler']}, step {number} (the first one compiles)")
        dist.barrier(group.control)
        times_s += time_block(lambda: losses.append(step()), 1, device)[0]
        graphs.append(dynamo_counters()["stats"]["unique_graphs"])
    without_rate(optimizer)  # a step takes as long, and the weights stay finite
    costs = {"start_s": start_s, "first_step_s": times_s[0], "first_steps_s": sum(times_s)}
    costs |= peak(device, memory)
    costs |= {"fsdp_units": len(units), "tokens": task.tokens}
    counted = count_graphs(graphs[0])

    def facts() -> Facts:
        # torch counts the graphs of all replicas together, so with --interleave only those of the
        # first steps are known
        metrics = costs | (counted if "settings" in key else count_graphs(graphs[0]))
        return metrics, check(key, rank, [float(x) for x in losses], wanted, metrics["graphs"])

    eager = None
    if key["compiler"] != "eager":  # the compiled model has the parameters of this one
        eager, _ = steps_of(model, batch, autocast, optimizer)
    return Replica(step, without_optimizer, eager, facts)


def derive(case: Case, times: Times, facts: list[list[Facts]]) -> None:
    """Fill in the metrics and the check, on rank 0. facts: by rank and setting.

    With --interleave the metrics are those of the first setting. The names of all others start with
    the label of their setting, as in `fsdp2 eager step_s`.
    """
    settings, metrics = settings_of(case.key), case.metrics
    checks = []
    for number, setting in enumerate(settings):
        of_setting = [of_rank[number] for of_rank in facts]
        about = times.relative_to(setting.label) if number else times
        own = training_metrics(about, len(facts) * (case.key["batch_size"] or 0))
        if case.key["batch_size"] is None:
            del own["samples_per_s"]
        for name in of_setting[0][0]:
            own[name] = max(costs[name] for costs, _ in of_setting)
        if own.pop("tokens", 0):
            tokens = sum(costs["tokens"] for costs, _ in of_setting)
            own["tokens_per_s"] = tokens / own["step_s"]
        if len(settings) > 1:  # memory was measured for all replicas together
            own = {name: value for name, value in own.items() if not name.startswith("memory")}
        prefix = f"{setting.label} " if number else ""
        metrics |= {prefix + name: value for name, value in own.items()}
        # "failed" sorts before "skipped"
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
    """Metrics: the gain and cost of compiling, and its payback if the gain is significant."""
    gains: dict[str, Any] = {"eager_s": times.mean("eager"), "vs_eager": times.ratio("eager")}
    gain_s = 0 - times.excess_over("eager")
    cost_s = metrics["start_s"] + metrics["first_steps_s"]
    cost_s = max(0.0, cost_s - CHECKED_STEPS * gains["eager_s"].value)
    gains |= {"compiling_s": cost_s, "gain_s": gain_s}
    if gain_s.value > 0 and not gain_s.may_be(0):
        gains["payback_steps"] = drop_wide_interval(cost_s / gain_s)
    return gains


# -- tables and answers ----------------------------------------------------------------------------

COLUMNS: Columns = {
    "": lambda case: case.name,
    "fwd+bwd\nmean (s)": metric("forward_backward_mean_s", digits=4),
    "vs\neager": metric("vs_eager"),
    "95% ci\nof ratio": ends("vs_eager"),
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
    """The columns of a table, with tokens/s after samples/s if the number of tokens is known."""
    columns: Columns = {}
    for head, cell in (COMPARED if args.interleave else COLUMNS).items():
        columns[head] = cell
        if head == "samples/s" and tokens_known:
            columns["tokens/s"] = metric("tokens_per_s", digits=0)
    return columns


def answer(cases: list[Case]) -> list[str]:
    """`toy, fp32: whole steps of ddp inductor are 1.30 times (1.21 to 1.38) as fast as eager ones;
    compiling pays off after 950 steps (800 to 1,200)` for each compiled case, and a sentence with
    the step times of all cases; with --interleave how the settings compare."""
    key, sentences = cases[0].key, list[str]()
    begin = f"{key['model']}, {name_precision(key['dtype'], torch.device(key['device']))}"
    if "settings" in key:
        compared = compare_rows(cases, lambda row: row.name)
        return [f"{begin}: {sentence}" for sentence in compared]
    for case in [case for case in cases if "vs_eager" in case.metrics]:
        ratio, name = case.metrics["vs_eager"], case.name
        shown = ratio.as_factor() + " as fast"
        stalls = of_all(ratio, case, case, "eager")
        sentence = f"whole steps of {name} are {shown} as eager ones{stalls}"
        if ratio.low is None:
            sentence = f"{name} and eager {NOT_COMPARED}"
        elif ratio.may_be(1):
            sentence = f"{name} and eager do not differ significantly: {shown}{stalls}"
        elif stalls:
            pass  # means and medians may disagree on whether compiling pays off
        elif ratio.value < 1:
            sentence += "; compiling does not pay off"
        elif payback := case.metrics.get("payback_steps"):
            sentence += f"; compiling pays off after {payback.text('steps', digits=0)}"
        sentences.append(f"{begin}: {sentence}")
    if len(cases) > 1:
        steps = ", ".join(f"{case.metrics['step_s']} with {case.name}" for case in cases)
        how = "these were timed one after the other, so they are not ranked"
        sentences.append(f"{begin}: a step takes {steps}; {how}; --interleave compares them")
    return sentences


def rows_of(case: Case) -> list[Case]:
    """The rows of a case: one for each setting."""
    return split_case(case, [setting.label for setting in settings_of(case.key)])


def title_of(
    args: Namespace, model: str, own: Trial | None, dtype: str, device: torch.device
) -> str:
    """The settings that all cases of a table share. own: the trial of your own model."""
    size = own.samples if own else args.batch_size
    words = [model, f"batch size {size or 'unknown'}", name_precision(dtype, device)]
    if any(strategy.startswith("fsdp") for strategy in args.strategies):
        units, count = "the layers in ModuleLists", None
        if args.fsdp_wrap_classes:
            units = cli.cut(args.fsdp_wrap_classes)
        elif own and own.units is not None:
            units, count = f"{count_of(own.units, 'module')} of fsdp_units", own.units
        elif own and own.layers is not None:
            units, count = count_of(own.layers, "layer"), own.layers
        in_one = not args.fsdp_wrap or count == 0
        words.append("FSDP in one unit" if in_one else f"FSDP wraps {units}")
        words += ["FSDP with activation checkpointing"] if args.fsdp_checkpoint else []
    if args.dynamo_no_optimize_ddp:
        words.append("one graph under DDP")
    return ", ".join(words)


# -- the plan: which cases are measured ------------------------------------------------------------


def plan(args: Namespace, job: Job, own: dict[str, Trial]) -> dict[str, list[Planned]]:
    """The cases by the title of their table; each model and dtype has a table. own: the trials of
    your own models, by name."""
    tables = {}
    settings = list(itertools.starmap(Setting, itertools.product(args.strategies, args.backends)))
    names = ("fsdp_wrap", "fsdp_checkpoint", "dynamo_no_optimize_ddp")
    flags = {name: getattr(args, name) for name in names}
    flags["fsdp_wrap_classes"] = ",".join(args.fsdp_wrap_classes)
    for model, dtype in itertools.product(args.models, args.dtype):
        size = own[model].samples if model in own else args.batch_size
        shared: Key = {"model": model, "dtype": dtype, "batch_size": size}
        together = model in own and own[model].communicates
        if together:
            shared["communicates"] = True
        cases: list[Planned] = []
        for setting in settings:
            if together and setting.strategy == "none":
                continue
            ranks = 1 if setting.strategy == "none" else job.world_size
            cases.append(Planned(setting.label, ranks, key_of_setting(shared | flags, setting)))
        if args.interleave:
            labels = ", ".join(setting.label for setting in settings)
            used: Key = {name: any(key[name] for _, _, key in cases) for name in names}
            by_fsdp = used["fsdp_wrap"] or used["fsdp_checkpoint"]
            used["fsdp_wrap_classes"] = flags["fsdp_wrap_classes"] if by_fsdp else ""
            key = shared | {"strategy": None, "compiler": None, "settings": labels} | used
            cases = [Planned(labels, job.world_size, key)]
        tables[title_of(args, model, own.get(model), dtype, job.device)] = cases
    return tables


def start(backend: str, job: Job) -> float:
    """Seconds of the first compilation in a process, of a trivial function.

    It includes imports, the start of worker processes and a check of the C++ compiler. All ranks
    call it at the same time, before the first case. Raises ValueError if the compilation fails.
    """
    if backend == "eager":
        return 0.0
    square = partial(compile_by(backend, torch.square), torch.ones(64, device=job.device))
    with fresh_compile_cache():  # if an exception leaves this context, its folder is not removed
        try:
            return time_block(square, 1, job.device)[0][0]
        except Exception as error:
            reason = exits.describe(getattr(error, "inner_exception", error))  # the backend's own
        finally:
            torch.compiler.reset()  # otherwise dynamo compiles nothing from the ninth backend on
    raise ValueError(f"{backend} cannot compile x * x on rank {job.rank}: {reason}")


def main() -> int:
    args = parse_args()
    # whether dynamo splits graphs at DDP's buckets, so that communication can start early
    torch._dynamo.config.optimize_ddp = not args.dynamo_no_optimize_ddp
    # each replica is compiled separately, and above this limit dynamo silently runs eager code
    dynamo: Any = torch._dynamo.config
    limit = "recompile_limit" if hasattr(dynamo, "recompile_limit") else "cache_size_limit"
    setattr(dynamo, limit, getattr(dynamo, limit) * len(args.strategies) * len(args.backends))
    # warnings that would interrupt a table; the losses are checked
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    warnings.filterwarnings("ignore", "TRITON_DEFAULT_FP_FUSION is unset")  # torch 2.15's Triton
    with Benchmark("compile_sweep", args) as bench:
        job, start_s = bench.job, {}
        guard_cases(bench, lambda key: "communicates" in key)
        # equal models and batches on all ranks, as in `create`
        most = 1 if args.strategies == ["none"] else job.world_size
        own = try_on_all(bench, args.models, 0, most, "cases of `none`", layers_of=layers_of)
        tables = plan(args, job, own)
        bench.announce(tables)
        for backend in args.backends:
            start_s[backend] = bench.prepare("--backends", partial(start, backend, job))
        gc.collect()
        gc.freeze()  # the modules that the backends have imported, as `join` does for torch
        for title, cases in tables.items():
            columns = columns_of(
                args, any(own[x].tokens for x in own if x == cases[0].key["model"])
            )
            labels = [setting.label for _, _, key in cases for setting in settings_of(key)]
            form = SettingsTable(columns, rows_of, labels)
            with bench.begin_table(title, columns, answer, form) as table:
                for name, ranks, key in cases:
                    count = len(settings_of(key))
                    rule = replace(bench.rule, max_seconds=count * bench.rule.max_seconds)
                    begin, on = partial(build, bench, start_s), range(ranks)
                    with fresh_compile_cache():
                        bench.measure(key, name, begin, derive, ranks=on, rule=rule)
                        torch.compiler.reset()  # otherwise it keeps the model alive
            if table.passed:
                bench.print_table(COSTS, table.passed, f"Cost: {title}")
    return bench.status


if __name__ == "__main__":
    sys.exit(record(main)())
