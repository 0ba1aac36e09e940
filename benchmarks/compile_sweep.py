#!/usr/bin/env python3
"""Does torch.compile help a data-parallel model, under which strategy, and what does it cost?

It times whole training steps (forward, loss, backward, optimizer step, zero_grad) of one model:

    models       toy (the original's), toy-small, decoder-tiny, -10m, -124m, -1.3b
    strategies   none (rank 0 alone), ddp, fsdp1 (FullyShardedDataParallel), fsdp2 (fully_shard)
    backends     eager (not compiled), inductor, aot_eager, cudagraphs, any other that dynamo
                 knows, and print, which prints the graphs; dynamo's own `eager` is dynamo_eager

The wrapped model is compiled; the loss and the optimizer are not. Caches are cold: each case and
rank has an empty folder.

In turns with whole steps it times forward and backward without the optimizer: `fwd+bwd`.

    first step   the first one, which includes compiling
    payback      (start of the backend + first three steps - first three steps of eager)
                 / (step of eager - step), in steps
    vs eager     fwd+bwd of the same strategy, not compiled / fwd+bwd
    vs none      step of `none` with the same backend / step: one process, one batch
    tflops       a decoder's FLOPs in a rank's step / step;  mfu = tflops / the device's peak

    torchrun --nproc-per-node 2 benchmarks/compile_sweep.py
    torchrun --nproc-per-node 8 benchmarks/compile_sweep.py --dtype bf16 --json report.jsonl
    torchrun --nproc-per-node 8 benchmarks/compile_sweep.py --models decoder-1.3b --strategies fsdp2

FSDP's units are the model's layers, and --fsdp-checkpoint recomputes the same layers: those of the
class that the model's longest list of layers holds, or of the classes that --fsdp-units names.

This is new code that does what PyTorch's benchmarks/dynamo/distributed.py did, with its flags.
BSD-3-Clause.
"""

import contextlib
import gc
import importlib
import importlib.util
import itertools
import sys
import tempfile
from argparse import SUPPRESS, BooleanOptionalAction, Namespace
from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper
from torch.distributed.elastic.multiprocessing.errors import record
from torch.profiler import record_function
from torch.utils import _pytree  # private, as _dynamo: seen to work with torch 2.11, 2.14, 2.15

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import cli
from common.answers import Estimate, median_of, ranked, series
from common.check import verdict
from common.groups import Group, agree, gather, share
from common.memory import peak, reset_peak, start_peak
from common.old import Benchmark, Workload
from common.report import Case
from common.stats import Times, percentiles, step_metrics
from common.table import Columns, metric, relative, render
from common.timing import Step, time_block
from common.workloads.decoder import DECODERS, Decoder, flops_per_token, random_text
from common.workloads.meshes import forget_groups
from common.workloads.peaks import peak_flops
from common.workloads.precision import name_precision, set_precision
from common.workloads.reference import CHECKED_STEPS, Reference, compare_training, sgd, train_alone

Key = dict[str, Any]
LossOf = Callable[[nn.Module, Any], Tensor]  # takes a model and a batch
Mark = Callable[[str], contextlib.AbstractContextManager[Any]]  # names a range of a trace
STRATEGIES = ("none", "ddp", "fsdp1", "fsdp2")
TOYS = {"toy": (10000, 1000), "toy-small": (1000, 100)}  # widths; toy has the original's
# of a loss, relative to the first one; torch's default may be TF32
TOLERANCES = {"default": 5e-3, "fp32": 2e-3, "tf32": 5e-3, "bf16": 3e-2}
BATCHES = 8  # different ones. More ranks share them, so that the reference costs no more


def parse_args(argv: list[str] | None = None) -> Namespace:
    parser = cli.Parser(__doc__)
    known = torch.compiler.list_backends(exclude_tags=())
    usable = [name for name in known if "TESTING" not in name]  # the others fail by design
    models = cli.list_of(str, [*TOYS, *DECODERS])
    strategies = cli.list_of(str, STRATEGIES)
    backends = cli.list_of(str, ["eager", "dynamo_eager", "print", *usable])
    add = parser.add_mutually_exclusive_group().add_argument
    add("--models", "--model", type=models, metavar="M", help="decoder-124m, CPU toy-small")
    add("--toy-model", dest="models", action="store_const", const=["toy"])
    add("--torchbench-model", dest="models", nargs=1, metavar="NAME", help="of torchbenchmark")
    add = parser.add_mutually_exclusive_group().add_argument
    add("--strategies", type=strategies, metavar="S", help="(default: all, CPU not fsdp1)")
    add("--ddp", dest="strategies", action="store_const", const=["ddp"])
    add("--fsdp", dest="strategies", action="store_const", const=["fsdp1"])
    add = parser.add_argument
    switch = partial(parser.add_argument, action="store_true")
    add("--backends", "--dynamo", type=backends, metavar="B", help="(default: eager,inductor)")
    batch = "of a rank (default: 8, CPU 4; torchbenchmark: the model's own)"
    add("--batch-size", type=cli.positive_int, metavar="N", help=batch)
    dtypes = "default (as torch is: TF32 in convolutions, not in products), fp32, tf32, bf16"
    kinds = cli.list_of(str, [*TOLERANCES])
    dtypes += " (default: default)"
    add("--dtype", type=kinds, default=["default"], metavar="D", help=dtypes)
    add("--fsdp-wrap", action=BooleanOptionalAction, default=True, help="each layer is a unit")
    units = "their classes, e.g. BertLayer,T5Block (default: that of the longest list of layers)"
    add("--fsdp-units", type=cli.list_of(str), default=[], metavar="CLASS", help=units)
    switch("--fsdp-checkpoint", help="recompute each layer's activations, under every strategy")
    switch("--dynamo-no-optimize-ddp", help="do not split graphs at the borders of DDP's buckets")
    switch("--torchviz", help="write each case's autograd graph, of rank 0, to torchviz-*.dot")
    switch("--verbose", help="print the models and turn on dynamo's logs")
    add("--repeat", dest="iters", type=cli.positive_int, default=SUPPRESS, help="see --iters")
    cli.add_common_flags(parser, max_seconds=4 if torch.cuda.is_available() else 3)
    args = parser.parse_args(argv)
    cuda = torch.cuda.is_available() and args.device != "cpu"
    args.models = args.models or ["decoder-124m" if cuda else "toy-small"]
    args.strategies = args.strategies or (list(STRATEGIES) if cuda else ["none", "ddp", "fsdp2"])
    args.strategies.sort(key=STRATEGIES.index)  # `none` comes first: others are compared with it
    args.backends = args.backends or ["eager", "inductor"]
    args.backends = sorted(args.backends, key=lambda name: name != "eager")  # so does eager
    if args.models[0] in (*TOYS, *DECODERS):
        args.batch_size = args.batch_size or (8 if cuda else 4)
    refuse_what_cannot_run(parser, args, cuda)
    return args


def refuse_what_cannot_run(parser: cli.Parser, args: Namespace, cuda: bool) -> None:
    if not cuda and ("tf32" in args.dtype or "cudagraphs" in args.backends):
        parser.error("tf32 and cudagraphs need CUDA; try --dtype fp32 or --backends inductor")
    if args.torchviz and not importlib.util.find_spec("torchviz"):
        parser.error("--torchviz needs the package torchviz; try pip install torchviz")
    ours = args.models[0] in (*TOYS, *DECODERS)
    if not ours and not importlib.util.find_spec("torchbenchmark"):
        where = "docs/compile_sweep.md says how to install it, or try --toy-model"
        parser.error(f"--torchbench-model needs the package torchbenchmark: {where}")


# -- what is trained, and how: plain torch ---------------------------------------------------------


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


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    x, targets = batch
    return nn.functional.cross_entropy(model(x).flatten(0, -2).float(), targets.flatten())


def mean_output(model: nn.Module, batch: Any) -> Tensor:
    """The loss of a model of torchbenchmark: the mean of its first output of real numbers."""
    outputs = _pytree.tree_leaves(model(**batch) if isinstance(batch, dict) else model(*batch))
    tensors = [x for x in outputs if isinstance(x, Tensor) and x.is_floating_point()]
    return tensors[0].float().mean()


class Training(NamedTuple):
    """What is trained. It is the same on every rank."""

    model: nn.Module
    batches: list[Any]
    loss_of: LossOf
    batch_size: int | None  # None where a model of torchbenchmark does not say it


def create(name: str, size: int | None, count: int, device: torch.device, bf16: bool) -> Training:
    """A model, and `count` batches of `size` samples each. bf16: by autocast."""
    torch.manual_seed(0)
    loss_of = cross_entropy
    if name not in (*TOYS, *DECODERS):
        model, batch, size = load_torchbench(name, size, device)
        batches, loss_of = [batch] * count, mean_output
    elif size is None:
        raise ValueError(f"{name} needs a batch size; try --batch-size 8")
    elif name in TOYS:
        with device:
            model = Toy(*TOYS[name])
            batches = [(torch.rand(size, 10), torch.randint(5, (size,))) for _ in range(count)]
    else:
        with device:
            model = Decoder(DECODERS[name])
        texts = [random_text(DECODERS[name], size, seed) for seed in range(count)]
        batches = [(tokens.to(device), targets.to(device)) for tokens, targets in texts]
    if bf16:
        # autocast keeps the weights that it has cast until its end, although a step changes them:
        # so it begins anew in each call of the loss
        loss_of = torch.autocast(device.type, torch.bfloat16)(loss_of)
    return Training(model, batches, loss_of, size)


def load_torchbench(
    name: str, size: int | None, device: torch.device
) -> tuple[nn.Module, Any, int | None]:
    """A model of github.com/pytorch/benchmark, its only batch, and the size of that batch."""
    loader = importlib.import_module("torchbenchmark").load_model_by_name(name)
    if loader is None:
        raise ValueError(
            f"torchbenchmark cannot load {name!r}: no such model, or it lacks packages"
        )
    benchmark = loader(test="train", device=device.type, batch_size=size)
    model, batch = benchmark.get_module()
    dtypes = {str(parameter.dtype) for parameter in model.parameters()}
    others = sorted(dtypes - {"torch.float32"})
    if others:
        raise ValueError(f"expected a model with weights in fp32, got {', '.join(others)}")
    turn_off_dropout(model)
    return model, batch, getattr(benchmark, "batch_size", size)


def turn_off_dropout(model: nn.Module) -> None:
    """With dropout the losses could not be compared. Its probability is a float of a module: `p`
    in nn.Dropout and its kin; `dropout` or the like where a module calls the function."""
    for module in model.modules():
        is_dropout = "Dropout" in type(module).__name__
        for name, value in vars(module).items():
            if isinstance(value, float) and ("drop" in name or (is_dropout and name == "p")):
                setattr(module, name, 0.0)


def longest_stack(model: nn.Module) -> list[nn.Module]:
    """The longest ModuleList or Sequential of at least two layers, all of one class; or []."""
    longest: list[nn.Module] = []
    for module in model.modules():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)) or len(module) < 2:
            continue
        classes = {type(layer) for layer in module}
        holds_lists = classes & {nn.ModuleList, nn.Sequential}
        if len(classes) == 1 and not holds_lists and len(module) > len(longest):
            longest = [*module]
    return longest


def find_units(model: nn.Module, classes: list[str]) -> list[nn.Module]:
    """The layers that FSDP wraps or that are recomputed. Layers come before those around them.

    classes: the names of their classes; if empty, the class in the longest list of layers. Raises
    ValueError where the model has no such layers.
    """
    layers = [module for module in model.modules() if module is not model]
    if not classes:
        stack = longest_stack(model)
        if not stack:
            raise ValueError(
                "the model has no list of layers; try --fsdp-units CLASS or --no-fsdp-wrap"
            )
        classes = [type(stack[0]).__name__]
    known = {type(layer).__name__ for layer in layers}
    for name in classes:
        if name not in known:
            raise ValueError(f"--fsdp-units: the model has no {name}{cli.suggest(name, known)}")
    return [layer for layer in reversed(layers) if type(layer).__name__ in classes]


def refuse_tied_units(model: nn.Module, units: list[nn.Module]) -> None:
    """Raise ValueError if a unit shares a weight with a module outside of it: FSDP would take the
    weight away from that module."""
    weights = [*model.named_parameters(remove_duplicate=False)]
    modules = [*model.named_modules(remove_duplicate=False)]
    for unit in units:
        paths = tuple(f"{path}." for path, module in modules if module is unit)
        mine = {id(weight): path for path, weight in weights if path.startswith(paths)}
        for other, weight in weights:
            if id(weight) not in mine or other.startswith(paths):
                continue
            kind = type(unit).__name__
            names = {type(unit).__name__: None for unit in reversed(units)}
            rest = ",".join(name for name in names if name != kind)
            got = f"got {kind}, whose {mine[id(weight)]} is {other}, too"
            instead = f"--fsdp-units {rest}" if rest else "--no-fsdp-wrap"
            raise ValueError(f"FSDP expects units with weights of their own, {got}; try {instead}")


def prepare_units(model: nn.Module, key: Key) -> list[nn.Module]:
    """The units for FSDP, none where it wraps the model as one. Recomputes layers if asked to.

    Raises ValueError where the model has no such layers, or where they share a weight with others.
    """
    units: list[nn.Module] = []
    if key["fsdp_wrap"] or key["fsdp_checkpoint"]:
        classes = key["fsdp_units"]
        units = find_units(model, [] if classes is None else classes.split(","))
    if key["fsdp_wrap"]:
        refuse_tied_units(model, units)
    if key["fsdp_checkpoint"]:
        checkpoint_wrapper.apply_activation_checkpointing(
            model, check_fn=lambda module: module in units
        )
        modules = reversed([*model.modules()])
        units = [module for module in modules if is_recomputed(module)]
    return units if key["fsdp_wrap"] else []


def is_recomputed(module: nn.Module) -> bool:
    """Whether the backward pass computes this module again. Private, as `_checkpoint` says; seen to
    work with torch 2.11, 2.14 and 2.15."""
    return isinstance(module, checkpoint_wrapper.CheckpointWrapper)


def wrap(model: nn.Module, key: Key, device: torch.device, group: dist.ProcessGroup) -> nn.Module:
    """The model under a strategy: what data parallelism needs, and all that it needs."""
    units = prepare_units(model, key)
    low, high = (torch.bfloat16, torch.float32) if key["dtype"] == "bf16" else (None, None)
    if key["strategy"] == "ddp":
        return nn.parallel.DistributedDataParallel(model, process_group=group)
    if key["strategy"] == "fsdp1":
        return fsdp.FullyShardedDataParallel(
            model,
            process_group=group,
            auto_wrap_policy=fsdp.wrap.CustomPolicy(lambda module: module in units),
            mixed_precision=fsdp.MixedPrecision(low, high),
            device_id=device,
            use_orig_params=True,  # torch.compile needs it
        )
    if key["strategy"] == "fsdp2":
        mesh = dist.DeviceMesh.from_group(group, device.type)
        forget_groups(mesh)  # or caches would keep the group open where a later case aborts it
        for module in [*units, model]:
            fsdp.fully_shard(module, mesh=mesh, mp_policy=fsdp.MixedPrecisionPolicy(low, high))
    return model


def count_units(model: nn.Module) -> dict[str, int]:
    """How many layers are FSDP units, and how many are recomputed, as metrics."""
    sharded = (fsdp.FullyShardedDataParallel, fsdp.FSDPModule)
    layers = [module for module in model.modules() if module is not model]
    return {
        "fsdp_units": sum(isinstance(layer, sharded) for layer in layers),
        "recomputed_layers": sum(map(is_recomputed, layers)),
    }


def print_graph(graph: torch.fx.GraphModule, inputs: Any) -> Any:
    if dist.get_rank() == 0:
        print(f"# graph of the backend print\n{graph.graph}", flush=True)
    return graph.forward


def compile_by(backend: str, model: Any) -> Any:
    """The compiled model; with the backend eager the model as it is."""
    if backend == "eager":
        return model
    chosen: Any = backend
    if backend == "dynamo_eager":
        chosen = "eager"
    elif backend == "print":
        chosen = print_graph
    return torch.compile(model, backend=chosen)


class Steps(NamedTuple):
    """What is timed. Each takes a Mark if there is a trace."""

    step: Callable[..., Tensor]  # returns the loss
    without_optimizer: Callable[..., None]


def steps_of(
    model: nn.Module, loss_of: LossOf, batch: Any, optimizer: torch.optim.Optimizer
) -> Steps:
    """A whole training step on a batch, and the same without the optimizer's part."""

    def forward_backward(mark: Mark) -> Tensor:
        with mark("forward"):
            loss = loss_of(model, batch)
        with mark("backward"):
            loss.backward()
        return loss.detach()

    def step(mark: Mark = contextlib.nullcontext) -> Tensor:
        loss = forward_backward(mark)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def without_optimizer(mark: Mark = contextlib.nullcontext) -> None:
        forward_backward(mark)
        optimizer.zero_grad()

    return Steps(step, without_optimizer)


# -- the check, and what is written for other tools ------------------------------------------------


@cache
def train_alone_on(
    name: str, size: int | None, dtype: str, ranks: int, device: torch.device
) -> Reference | str:
    """One eager process with the batches of all ranks; or why there is nothing to compare with."""
    count = min(ranks, BATCHES)
    ranks_with = [len(range(batch, ranks, BATCHES)) for batch in range(count)]
    weights = [number / ranks for number in ranks_with]
    try:
        model, batches, loss_of, _ = create(name, size, count, device, dtype == "bf16")
        once = float(loss_of(model, batches[0]).detach())
        reference = train_alone(model, batches, loss_of, weights)
    except Exception as error:  # if it fails on all ranks as well, the case fails
        return f"one process alone fails: {cli.describe(error)}"
    again = reference.losses[0][0]
    if abs(again - once) > TOLERANCES[dtype] / 100 * abs(once):
        losses = f"the losses {once:.6g} and {again:.6g} for one batch"
        return f"the model draws random numbers: one process gets {losses}"
    means = [np.mean(losses) for losses in reference.losses]
    if abs(means[-1] - means[0]) <= TOLERANCES[dtype] * abs(means[0]):
        return "the losses stay as they are: a wrong gradient would not show"
    return reference


def draw(model: nn.Module, loss: Tensor, file: str) -> None:
    """Write the autograd graph of a loss, in the language of Graphviz."""
    named = dict(model.named_parameters())
    viz = importlib.import_module("torchviz")
    viz.make_dot(loss, named, show_attrs=True, show_saved=True).save(file)


def dynamo_counters() -> dict[str, Counter[str]]:
    """What torch.compile counts: graphs, and why it broke them."""
    from torch._dynamo.utils import counters

    return counters


def fresh_compile_cache() -> contextlib.AbstractContextManager[Any]:
    """Within it torch.compile finds nothing that was compiled before."""
    from torch._inductor.utils import fresh_cache

    return fresh_cache()


def configure_compile(split_for_ddp: bool, verbose: bool) -> None:
    """split_for_ddp: whether dynamo cuts graphs at DDP's buckets, so that communication can begin.
    verbose: print graph breaks and recompiles."""
    torch._dynamo.config.optimize_ddp = split_for_ddp
    if verbose:
        torch._logging.set_logs(graph_breaks=True, recompiles=True)


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


def check(key: Key, rank: int, losses: list[Tensor], wanted: Reference | str, graphs: int) -> str:
    """The check of a rank's first steps: was the model compiled, and are the losses right?"""
    if key["compiler"] != "eager" and not graphs:
        return verdict(f"{key['compiler']} compiled nothing: dynamo has made no graph of the model")
    if isinstance(wanted, str):
        return f"skipped: {wanted}"
    want = [losses_of_step[rank % BATCHES] for losses_of_step in wanted.losses]
    got = [float(loss) for loss in losses]
    what = f"the loss of rank {rank}"
    return verdict(compare_training(what, got, want, TOLERANCES[key["dtype"]]))


# -- a case ----------------------------------------------------------------------------------------


class FirstSteps(NamedTuple):
    """The steps that are checked, of which the first one compiles."""

    losses: list[Tensor]
    times_s: list[float]
    graphs: list[int]  # made so far, after each step


def take_first_steps(bench: Benchmark, group: Group, step: Callable[[], Tensor]) -> FirstSteps:
    """All ranks of the case start each step together."""
    first = FirstSteps([], [], [])

    def kept_step() -> None:
        first.losses.append(step())

    for number in range(1, CHECKED_STEPS + 1):
        bench.watchdog.phase(f"step {number} (the first one compiles)")
        dist.barrier(group.control)
        times_s, _ = time_block(kept_step, 1, bench.job.device)
        first.times_s.extend(times_s)
        first.graphs.append(dynamo_counters()["stats"]["unique_graphs"])
    return first


def build(bench: Benchmark, start_s: float, key: Key, group: Group) -> Workload:
    """start_s: what the start of the case's backend took."""
    args = bench.args
    device = bench.job.device
    rank = bench.job.rank
    ranks = len(group.ranks)
    dtype = key["dtype"]
    set_precision(dtype)
    one_process: Reference | str | None = None
    if rank == 0:
        one_process = train_alone_on(key["model"], key["batch_size"], dtype, ranks, device)
    wanted = agree(one_process, group)
    dynamo_counters().clear()
    memory = start_peak(device)
    autocast = dtype == "bf16" and key["strategy"] in ("none", "ddp")  # FSDP casts by itself
    count = min(ranks, BATCHES)
    model, batches, loss_of, size = create(key["model"], key["batch_size"], count, device, autocast)
    model = wrap(model, key, device, group.test)
    batch = batches[rank % BATCHES]
    reset_peak(device)  # leaves out the full model, from which FSDP has cut the shards
    if args.verbose:
        bench.print(f"# {name_of(key)}\n{model}")
    compiled = compile_by(key["compiler"], model)
    optimizer = sgd(model, wanted.lr if isinstance(wanted, Reference) else 0.0)
    steps = steps_of(compiled, loss_of, batch, optimizer)
    first = take_first_steps(bench, group, steps.step)
    optimizer.param_groups[0]["lr"] = 0.0  # costs the same, and the weights stay finite
    memory_metrics = peak(device, memory)

    def facts() -> Key:
        metrics: Key = count_graphs(first.graphs[0]) | memory_metrics | count_units(model)
        metrics["start_s"] = start_s
        metrics["first_step_s"] = first.times_s[0]
        metrics["first_steps_s"] = sum(first.times_s)
        if args.torchviz:
            loss = loss_of(compiled, batch)  # on all ranks: FSDP gathers weights in it
            if rank == 0:
                draw(model, loss, f"torchviz-{name_of(key)}-0.dot")
        return {
            "max": metrics,
            "check": check(key, rank, first.losses, wanted, metrics["graphs"]),
            "batch_size": size,
            "device_flops": peak_flops(device, dtype),
        }

    parts = {"forward+backward": steps.without_optimizer}
    with_ranges: dict[str, Step] = {
        "step": partial(steps.step, record_function),
        "forward+backward": partial(steps.without_optimizer, record_function),
    }
    return Workload(steps.step, parts, facts=facts, launches=True, profiled=with_ranges)


def name_of(key: Key) -> str:
    """`toy-small-fp32-ddp-inductor`, for the names of files."""
    return "-".join(key[field] for field in ("model", "dtype", "strategy", "compiler"))


# -- what rank 0 makes of it -----------------------------------------------------------------------


def derive(cases: dict[tuple[str, str], Case], case: Case, times: Times, facts: list[Any]) -> None:
    """Fill in the metrics and the check.

    cases: those before this one with the same model, by strategy and compiler.
    """
    m = case.metrics
    key = case.key
    size = facts[0]["batch_size"]
    samples = 0 if size is None else len(facts) * size
    m |= step_metrics(times.each(), samples)
    m["batch_size"] = size
    if size is None:
        m["samples_per_s"] = None
    without_optimizer = times.slowest("forward+backward")
    m |= percentiles(without_optimizer, "forward_backward")
    m["forward_backward_mean_s"] = float(without_optimizer.mean())
    for name in facts[0]["max"]:
        m[name] = max(fact["max"][name] for fact in facts)
    if key["model"] in DECODERS:
        m |= flops_metrics(key["model"], size, m["step_time_p50_s"], facts)
    if eager := cases.get((key["strategy"], "eager")):
        m |= against_eager(m, eager.metrics)
    if none := cases.get(("none", key["compiler"])):
        m["vs_none"] = none.metrics["step_time_p50_s"] / m["step_time_p50_s"]
    case.check = worst([fact["check"] for fact in facts])


def flops_metrics(model: str, batch_size: int, step_s: float, facts: list[Any]) -> dict[str, float]:
    """A rank's TFLOPS; and the MFU, if the peaks of all devices are known."""
    config = DECODERS[model]
    flop_per_s = batch_size * config.context * flops_per_token(config) / step_s
    metrics = {"tflops": flop_per_s / 1e12}
    device_flops = [fact["device_flops"] for fact in facts]
    if all(device_flops):
        metrics["mfu"] = flop_per_s / np.mean(device_flops)
    return metrics


def against_eager(m: dict[str, Any], eager: dict[str, Any]) -> dict[str, Any]:
    """What compiling gains over the metrics of `eager`, and after how many steps it pays."""
    gains = {"vs_eager": eager["forward_backward_p50_s"] / m["forward_backward_p50_s"]}
    gain_s = eager["step_time_p50_s"] - m["step_time_p50_s"]
    if gain_s > 0:
        cost_s = m["start_s"] + m["first_steps_s"] - eager["first_steps_s"]
        gains["payback_steps"] = max(0, int(np.ceil(cost_s / gain_s)))
    return gains


def worst(checks: list[str]) -> str:
    """A failure if a rank has one, else why a rank was not checked, else `passed`."""
    for kind in ("failed", "skipped"):
        of_kind = [check for check in checks if check.startswith(kind)]
        if of_kind:
            return min(of_kind)
    return "passed"


COLUMNS: Columns = {
    "": lambda case: f"{case.key['strategy']} {case.key['compiler']}",
    "95% ci\nof p50": relative("step_time_ci95_rel"),
    "step\nmean (s)": metric("step_time_mean_s", digits=4),
    **{f"step\np{q} (s)": metric(f"step_time_p{q}_s", digits=4) for q in (50, 75, 90, 95)},
    "samples/s": metric("samples_per_s", digits=1),
    "fwd+bwd\nmean (s)": metric("forward_backward_mean_s", digits=4),
    "fwd+bwd\np50 (s)": metric("forward_backward_p50_s", digits=4),
    "vs\neager": metric("vs_eager"),
    "vs\nnone": metric("vs_none"),
}
COSTS: Columns = {
    "": COLUMNS[""],
    "first\nstep (s)": metric("first_step_s"),
    "start of\nbackend (s)": metric("start_s"),
    "payback\n(steps)": metric("payback_steps", digits=0),
    "recom-\npiles": metric("recompiles", digits=0),
    "graphs": metric("graphs", digits=0),
    "graph\nbreaks": metric("graph_breaks", digits=0),
    "FSDP\nunits": metric("fsdp_units", digits=0),
    "memory\n(GiB)": metric("memory_gib"),
    "tflops": metric("tflops", digits=3),
    "mfu\n(%)": metric("mfu", 100, 1),
}


# cases that agree in these are compared with each other
WRAPPING = ("strategy", "fsdp_wrap", "fsdp_units")


def answer(cases: list[Case]) -> list[str]:
    """For each strategy and backend: whether compiling pays, and after how many steps."""
    sentences: list[str] = []
    varied = (*WRAPPING, "compiler", "world_size", "dynamo_no_optimize_ddp")
    for name, same in series(cases, varied).items():
        eager: dict[str, Estimate] = {}
        for case, step in ranked(same):
            if case.key["compiler"] == "eager":
                eager[wrapping_of(case.key)] = step
        for case in same:
            case_step = median_of(case)
            if case.key["compiler"] != "eager" and case_step:
                sentences.append(name + gain(case, case_step, eager.get(wrapping_of(case.key))))
    return sentences


def wrapping_of(key: Key) -> str:
    return str([key.get(name) for name in WRAPPING])


def gain(case: Case, step: Estimate, eager: Estimate | None) -> str:
    """`whole steps of ddp inductor are 1.30 times (1.21 to 1.38) as fast as those of eager;
    compiling pays after 950 steps`"""
    compiled = f"{case.key['strategy']} {case.key['compiler']}"
    if not eager:
        return f"{compiled} takes {step} a step; without eager nobody can tell whether it pays"
    ratio = eager.over(step)
    if ratio.may_be(1):
        return f"{compiled} and eager cannot be told apart: whole steps are {ratio.times()} as fast"
    sentence = f"whole steps of {compiled} are {ratio.times()} as fast as those of eager"
    if ratio.value <= 1:
        return f"{sentence}; compiling does not pay"
    if "payback_steps" in case.metrics:  # not where eager was measured after it, by --resume
        sentence += f"; compiling pays after {case.metrics['payback_steps']:,} steps"
    return sentence


def title_of(args: Namespace, model: str, dtype: str, device: torch.device) -> str:
    """The settings that all cases of a table share."""
    size = f"batch size {args.batch_size}" if args.batch_size else "the model's own batch size"
    words = [model, size, name_precision(dtype, device)]
    if any(strategy.startswith("fsdp") for strategy in args.strategies):
        layer = " and ".join(args.fsdp_units) or "layer"
        words.append(f"FSDP wraps each {layer}" if args.fsdp_wrap else "FSDP in one unit")
    words.append("activations recomputed" if args.fsdp_checkpoint else "activations kept")
    if args.dynamo_no_optimize_ddp:
        words.append("one graph under DDP")
    return ", ".join(words)


def key_of(args: Namespace, model: str, dtype: str, strategy: str, compiler: str) -> Key:
    """What identifies a case. A flag is true only where it changes what the case does."""
    wrapped = args.fsdp_wrap and strategy.startswith("fsdp")
    compiled_ddp = strategy == "ddp" and compiler != "eager"
    units = None
    if args.fsdp_units and (wrapped or args.fsdp_checkpoint):
        units = ",".join(args.fsdp_units)
    return {
        "model": model,
        "dtype": dtype,
        "strategy": strategy,
        "compiler": compiler,
        "batch_size": args.batch_size,
        "fsdp_wrap": wrapped,
        "fsdp_units": units,
        "fsdp_checkpoint": args.fsdp_checkpoint,
        "dynamo_no_optimize_ddp": args.dynamo_no_optimize_ddp and compiled_ddp,
    }


def plan(args: Namespace, model: str, dtype: str, world_size: int) -> list[Key]:
    """The key of each case of a table; those that others are compared with come first."""
    keys = []
    for strategy, compiler in itertools.product(args.strategies, args.backends):
        key = key_of(args, model, dtype, strategy, compiler)
        key["world_size"] = 0 if strategy == "none" else world_size
        keys.append(key)
    return keys


def unusable_units(keys: list[Key], device: torch.device) -> str | None:
    """Why the layers that --fsdp-units names cannot be units of a model; None if they can."""
    # FSDP's key, if there is one, is a model's last
    keys_by_model = {key["model"]: key for key in keys if key["fsdp_units"]}
    for name, key in keys_by_model.items():
        place = torch.device("meta") if name in (*TOYS, *DECODERS) else device
        try:
            model = create(name, key["batch_size"], 1, place, False).model
        except Exception:
            continue  # its cases fail as well, and say why
        try:
            prepare_units(model, key)
        except ValueError as error:
            return str(error)
    return None


def unwritable(folder: Path) -> str | None:
    """Why this rank could not write what --torchviz makes; None if it can."""
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        return f"--torchviz: cannot write into {folder.resolve()}: {error.strerror}"
    return None


def start(backend: str, device: torch.device) -> tuple[float, str | None]:
    """Seconds of a process's first compilation, of next to nothing; or why that fails.

    It imports, starts worker processes and looks at the compiler. All ranks do this at once, before
    the first case.
    """
    if backend in ("eager", "print"):
        return 0.0, None
    square = partial(compile_by(backend, torch.square), torch.ones(64, device=device))
    with fresh_compile_cache():  # an error must not leave it, or it would keep its folder
        try:
            return time_block(square, 1, device)[0][0], None
        except Exception as error:
            reason = cli.describe(getattr(error, "inner_exception", error))  # the backend's own
            return 0.0, f"--backends {backend} cannot compile x * x here: {reason}"
        finally:
            torch.compiler.reset()  # or dynamo compiles nothing from the ninth backend on


def measure_table(bench: Benchmark, start_s: dict[str, float], title: str, keys: list[Key]) -> None:
    """Measure the cases of one model and dtype, then print what compiling cost."""
    cases: dict[tuple[str, str], Case] = {}  # by strategy and compiler; on rank 0
    for key in keys:
        begin = partial(build, bench, start_s[key["compiler"]])
        ranks = range(max(1, key["world_size"]))  # `none` is rank 0
        with fresh_compile_cache():
            case = bench.measure(key, begin, partial(derive, cases), ranks)
            torch.compiler.reset()  # it holds the model
        if case and not case.failed:
            cases[key["strategy"], key["compiler"]] = case
            if case.check != "passed":
                bench.print(f"# {case.check}")
    if cases:
        bench.print(f"\nCost: {title}\n\n{render(COSTS, list(cases.values()))}")


def main() -> int:
    args = parse_args()
    configure_compile(not args.dynamo_no_optimize_ddp, args.verbose)
    with Benchmark("compile_sweep", args, answer=answer) as bench:
        keys: list[Key] = []
        for model, dtype in itertools.product(args.models, args.dtype):
            keys += plan(args, model, dtype, bench.job.world_size)
        bench.announce(keys)
        problems = gather(unwritable(Path()) if args.torchviz else None) or []
        problem = share(next((problem for problem in problems if problem), None))
        if not problem:
            is_first = bench.job.rank == 0
            problem = share(unusable_units(keys, bench.job.device) if is_first else None)
            gc.collect()  # the models that it has made
        if problem:
            bench.refuse(problem)
        start_s: dict[str, float] = {}
        for backend in args.backends:
            start_s[backend], problem = start(backend, bench.job.device)
            problem = share(problem)  # a backend that fails on other ranks only fails its cases
            if problem:
                bench.refuse(problem)
        gc.freeze()  # what the backends have imported, as `join` does
        names = [
            f"{strategy} {backend}" for strategy in args.strategies for backend in args.backends
        ]
        widest = [max(names, key=len), "+-10.0%"]
        for model, dtype in itertools.product(args.models, args.dtype):
            title = title_of(args, model, dtype, bench.job.device)
            bench.begin_table(title, COLUMNS, widest)
            measure_table(bench, start_s, title, plan(args, model, dtype, bench.job.world_size))
    return bench.status


if __name__ == "__main__":
    sys.exit(record(main)())
