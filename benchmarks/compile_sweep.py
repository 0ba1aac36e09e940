#!/usr/bin/env python3
"""Does torch.compile help a data-parallel model, under which strategy, and what does it cost?

It times whole training steps (forward, loss, backward, optimizer step, zero_grad) of one model:

    models       toy (the original's), toy-small, decoder-tiny, -10m, -124m, -1.3b
    strategies   none (rank 0 alone), ddp, fsdp1 (FullyShardedDataParallel), fsdp2 (fully_shard)
    backends     eager (not compiled), inductor, aot_eager, cudagraphs, any other that dynamo
                 knows, and print, which prints the graphs; dynamo's own `eager` is dynamo_eager

The wrapped model is compiled; the loss and the optimizer are not. Caches are cold: each case and
rank has an empty folder. Two more steps are timed in turns with the step of a case:

    fwd+bwd      forward and backward, without the optimizer
    eager        the whole step of the same parameters, not compiled
    vs eager   = eager / step, the median over rounds
    first step   the first one, which includes compiling
    payback    = (start of the backend + first 3 steps - 3 eager) / (eager - step), in steps
    tflops     = a decoder's FLOPs in a rank's step / step;  mfu = tflops / the device's peak

    torchrun --nproc-per-node 2 benchmarks/compile_sweep.py
    torchrun --nproc-per-node 8 benchmarks/compile_sweep.py --dtype bf16 --json report.jsonl
    torchrun --nproc-per-node 8 benchmarks/compile_sweep.py --models decoder-1.3b --strategies fsdp2

FSDP's units are the model's layers, and --fsdp-checkpoint recomputes the same layers: those of the
class that the model's longest list of layers holds, or of the classes that --fsdp-units names.

It asks what PyTorch's benchmarks/dynamo/distributed.py asks, with its flags, and is written anew.
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
from collections.abc import Callable, Iterable
from functools import cache, partial
from pathlib import Path
from typing import Any

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
from common.benchmark import Benchmark, Key, Planned
from common.check import verdict
from common.groups import Group, Job, agree
from common.memory import peak, reset_peak, start_peak
from common.report import Case
from common.stats import Times, percentiles, training_metrics
from common.table import Columns, Table, ends, metric, relative, render
from common.timing import Step, Workload, time_block
from common.workloads.decoder import DECODERS, Decoder, flops_per_token, random_text
from common.workloads.meshes import forget_groups
from common.workloads.peaks import peak_flops
from common.workloads.precision import name_precision, set_precision
from common.workloads.reference import CHECKED_STEPS, Reference, compare_training, sgd, train_alone

STRATEGIES = ("none", "ddp", "fsdp1", "fsdp2")
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
    dtypes = cli.list_of(str, [*TOLERANCES])
    default = "(default: %(default)s)"
    add = parser.add_mutually_exclusive_group().add_argument
    model = cli.By(["decoder-124m"], ["toy-small"])
    add("--models", "--model", type=models, default=model, metavar="M", help=default)
    add("--toy-model", dest="models", action="store_const", const=["toy"])
    add("--torchbench-model", dest="models", nargs=1, metavar="NAME", help="of torchbenchmark")
    add = parser.add_mutually_exclusive_group().add_argument
    all_here = cli.By([*STRATEGIES], ["none", "ddp", "fsdp2"])
    add("--strategies", type=strategies, default=all_here, metavar="S", help=default)
    add("--ddp", dest="strategies", action="store_const", const=["ddp"])
    add("--fsdp", dest="strategies", action="store_const", const=["fsdp1"])
    add = parser.add_argument
    names = ("--backends", "--dynamo")
    both, listed = ["eager", "inductor"], "(default: eager,inductor)"
    add(*names, type=backends, default=both, metavar="B", help=listed)
    batch = "of a rank (default: 8 on CUDA, 4 on the CPU; torchbenchmark: the model's own)"
    add("--batch-size", type=cli.positive_int, metavar="N", help=batch)
    text = "default (as torch is: TF32 in convolutions, not in products), fp32, tf32, bf16 "
    text += "(default: default)"
    add("--dtype", type=dtypes, default=["default"], metavar="D", help=text)
    add("--fsdp-wrap", action=BooleanOptionalAction, default=True, help="each layer is a unit")
    units = "their classes, e.g. BertLayer,T5Block (default: that of the longest list of layers)"
    add("--fsdp-units", type=cli.list_of(str), default=[], metavar="CLASS", help=units)
    switch = partial(add, action="store_true")
    switch("--fsdp-checkpoint", help="recompute each layer's activations, under every strategy")
    switch("--dynamo-no-optimize-ddp", help="do not split graphs at the borders of DDP's buckets")
    switch("--torchviz", help="write each case's autograd graph, of rank 0, to torchviz-*.dot")
    switch("--verbose", help="print the models and turn on dynamo's logs")
    add("--repeat", dest="iters", type=cli.positive_int, default=SUPPRESS, help="see --iters")
    cli.add_common_flags(parser, max_seconds=4)
    args = parser.parse_args(argv)
    cuda = cli.on_cuda(args.device)
    if not cuda and ("tf32" in args.dtype or "cudagraphs" in args.backends):
        parser.error("tf32 and cudagraphs need CUDA; try --dtype fp32 or --backends inductor")
    if args.torchviz and not importlib.util.find_spec("torchviz"):
        parser.error("--torchviz needs the package torchviz; try pip install torchviz")
    if args.models[0] in (*TOYS, *DECODERS):
        args.batch_size = args.batch_size or (8 if cuda else 4)
    elif not importlib.util.find_spec("torchbenchmark"):
        where = "docs/compile_sweep.md says how to install it, or try --toy-model"
        parser.error(f"--torchbench-model needs the package torchbenchmark: {where}")
    return args


# -- what is trained, and how: plain torch ---------------------------------------------------------
# [core]

TOYS = {"toy": (10000, 1000), "toy-small": (1000, 100)}  # widths; toy has the original's
LISTS = (nn.ModuleList, nn.Sequential)
LossOf = Callable[[nn.Module, Any], Tensor]  # takes a model and a batch
Mark = Callable[[str], contextlib.AbstractContextManager[Any]]  # names a range of a trace


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


def load_torchbench(
    name: str, size: int | None, device: torch.device
) -> tuple[nn.Module, Any, int | None]:
    """A model of github.com/pytorch/benchmark, its only batch, and the size of that batch."""
    loader = importlib.import_module("torchbenchmark").load_model_by_name(name)
    if loader is None:
        raise ValueError(f"torchbenchmark has no model {name!r}, or that lacks packages")
    benchmark = loader(test="train", device=device.type, batch_size=size)
    model, batch = benchmark.get_module()
    dtypes = {parameter.dtype for parameter in model.parameters()}
    if dtypes != {torch.float32}:
        raise ValueError(f"expected a model with weights in fp32, got {dtypes}")
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


def find_units(model: nn.Module, classes: list[str]) -> list[nn.Module]:
    """The layers that FSDP wraps or that are recomputed. Layers come before those around them.

    classes: the names of their classes; if empty, the class in the longest list of layers. Raises
    ValueError where the model has no such layers.
    """
    layers = [module for module in model.modules() if module is not model]
    known = {type(layer).__name__ for layer in layers}
    if unknown := set(classes) - known:
        names = ", ".join(sorted(known))
        raise ValueError(f"expected classes of layers, of {names}, got {', '.join(unknown)}")
    if not classes:
        stacks: list[Any] = [
            layer for layer in layers if isinstance(layer, LISTS) and is_stack(layer)
        ]
        if not stacks:
            instead = "try --fsdp-units CLASS or --no-fsdp-wrap"
            raise ValueError(f"the model has no list of layers; {instead}")
        classes = [type(max(stacks, key=len)[0]).__name__]
    return [layer for layer in reversed(layers) if type(layer).__name__ in classes]


def is_stack(layers: Iterable[nn.Module]) -> bool:
    """Whether these are at least two layers, all of one class."""
    classes = [type(layer) for layer in layers]
    return len(classes) > 1 and len(set(classes)) == 1 and classes[0] not in LISTS


def refuse_tied_units(model: nn.Module, units: list[nn.Module]) -> None:
    """Raise ValueError if a unit shares a weight with a module outside of it: FSDP would take the
    weight away from that module."""
    weights = [*model.named_parameters(remove_duplicate=False)]
    modules = [*model.named_modules(remove_duplicate=False)]
    for unit in units:
        paths = tuple(f"{path}." for path, module in modules if module is unit)
        mine = {id(weight): path for path, weight in weights if path.startswith(paths)}
        for other, weight in weights:
            if id(weight) in mine and not other.startswith(paths):
                kind = type(unit).__name__
                others = dict.fromkeys(type(unit).__name__ for unit in reversed(units))
                rest = ",".join(name for name in others if name != kind)
                instead = f"--fsdp-units {rest}" if rest else "--no-fsdp-wrap"
                tied = f"got {kind}, whose {mine[id(weight)]} is {other}, too; try {instead}"
                raise ValueError(f"FSDP expects units with weights of their own, {tied}")


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


def is_recomputed(module: nn.Module) -> bool:
    """Whether the backward pass computes this module again. Private, as `_checkpoint` says; seen to
    work with torch 2.11, 2.14 and 2.15."""
    return isinstance(module, checkpoint_wrapper.CheckpointWrapper)


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


def steps_of(
    model: nn.Module, loss_of: LossOf, batch: Any, optimizer: torch.optim.Optimizer
) -> tuple[Callable[..., Tensor], Callable[..., None]]:
    """A whole training step on a batch, and the same without the optimizer's part. Each takes a
    Mark if there is a trace."""

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

    return step, without_optimizer


def draw(model: nn.Module, loss: Tensor, file: str) -> None:
    """Write the autograd graph of a loss, in the language of Graphviz."""
    named = dict(model.named_parameters())
    viz = importlib.import_module("torchviz")
    viz.make_dot(loss, named, show_attrs=True, show_saved=True).save(file)


# [/core]
# -- what a case trains, and its check -------------------------------------------------------------


def create(
    name: str, size: Any, count: int, device: torch.device, bf16: bool
) -> tuple[nn.Module, list[Any], LossOf, int | None]:
    """A model, `count` batches, the loss, and the size of a batch. A model of torchbenchmark has
    one batch, and a size of its own if size is None. bf16: by autocast."""
    torch.manual_seed(0)
    loss_of = cross_entropy
    if name in TOYS:
        with device:
            model: nn.Module = Toy(*TOYS[name])
            batches = [(torch.rand(size, 10), torch.randint(5, (size,))) for _ in range(count)]
    elif name in DECODERS:
        with device:
            model = Decoder(DECODERS[name])
        texts = [random_text(DECODERS[name], size, seed) for seed in range(count)]
        batches = [(tokens.to(device), targets.to(device)) for tokens, targets in texts]
    else:
        model, batch, size = load_torchbench(name, size, device)
        batches, loss_of = [batch] * count, mean_output
    if bf16:
        # autocast keeps the weights that it has cast until its end, although a step changes them:
        # so it begins anew in each call of the loss
        loss_of = torch.autocast(device.type, torch.bfloat16)(loss_of)
    return model, batches, loss_of, size


def prepare_units(model: nn.Module, key: Key) -> list[nn.Module]:
    """The units for FSDP, none where it wraps the model as one. Recomputes layers if asked to.

    Raises ValueError where the model has no such layers, or where they share a weight with others.
    """
    units: list[nn.Module] = []
    if key["fsdp_wrap"] or key["fsdp_checkpoint"]:
        units = find_units(model, key["fsdp_units"].split(",") if key["fsdp_units"] else [])
    if key["fsdp_wrap"]:
        refuse_tied_units(model, units)
    if key["fsdp_checkpoint"]:
        checkpoint_wrapper.apply_activation_checkpointing(
            model, check_fn=lambda module: module in units
        )
        units = [module for module in reversed([*model.modules()]) if is_recomputed(module)]
    return units if key["fsdp_wrap"] else []


def check_units(keys: list[Key], device: torch.device) -> None:
    """Raise ValueError if the layers that --fsdp-units names cannot be units of a model."""
    # FSDP's key, if there is one, is a model's last
    for name, key in {key["model"]: key for key in keys if key["fsdp_units"]}.items():
        place = torch.device("meta") if name in (*TOYS, *DECODERS) else device
        try:
            model, *_ = create(name, key["batch_size"], 1, place, False)
        except Exception:
            continue  # its cases fail as well, and say why
        prepare_units(model, key)


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


def build(bench: Benchmark, args: Namespace, start_s: float, key: Key, group: Group) -> Workload:
    """start_s: what the start of the case's backend took."""
    device, rank, ranks = bench.job.device, bench.job.rank, len(group.ranks)
    name, size, dtype = key["model"], key["batch_size"], key["dtype"]
    set_precision(dtype)
    alone = train_alone_on(name, size, dtype, ranks, device) if rank == 0 else None
    wanted: Reference | str = agree(alone, group)
    dynamo_counters().clear()
    memory = start_peak(device)
    autocast = dtype == "bf16" and key["strategy"] in ("none", "ddp")  # FSDP casts by itself
    model, batches, loss_of, size = create(name, size, min(ranks, BATCHES), device, autocast)
    mesh = dist.DeviceMesh.from_group(group.test, device.type)
    forget_groups(mesh)  # or caches would keep the group open where a later case aborts it
    model = wrap(model, key["strategy"], mesh, prepare_units(model, key), dtype == "bf16")
    reset_peak(device)  # leaves out the full model, from which FSDP has cut the shards
    file = "-".join(key[field] for field in ("model", "dtype", "strategy", "compiler"))
    if args.verbose:
        bench.print(f"# {file}\n{model}")
    batch, compiled = batches[rank % BATCHES], compile_by(key["compiler"], model)
    optimizer = sgd(model, wanted.lr if isinstance(wanted, Reference) else 0.0)
    step, without_optimizer = steps_of(compiled, loss_of, batch, optimizer)
    losses, times_s, graphs = list[Tensor](), list[float](), list[int]()
    for number in range(1, CHECKED_STEPS + 1):  # all ranks of the case start each step together
        bench.phase(f"step {number} (the first one compiles)")
        dist.barrier(group.control)
        times_s += time_block(lambda: losses.append(step()), 1, device)[0]
        graphs.append(dynamo_counters()["stats"]["unique_graphs"])
    optimizer.param_groups[0]["lr"] = 0.0  # costs the same, and the weights stay finite
    found: dict[str, Any] = {
        "start_s": start_s,
        "first_step_s": times_s[0],
        "first_steps_s": sum(times_s),
    }
    found |= peak(device, memory)

    def facts() -> dict[str, Any]:
        metrics = found | count_graphs(graphs[0]) | count_units(model)
        if args.torchviz:
            loss = loss_of(compiled, batch)  # on all ranks: FSDP gathers weights in it
            if rank == 0:
                draw(model, loss, f"torchviz-{file}-0.dot")
        checked = check(key, rank, losses, wanted, metrics["graphs"])
        flops = peak_flops(device, dtype)
        return {"max": metrics, "check": checked, "batch_size": size, "device_flops": flops}

    parts: dict[str, Step] = {"forward+backward": without_optimizer}
    if key["compiler"] != "eager":  # torch.compile leaves the model's parameters where they are
        parts["eager"], _ = steps_of(model, loss_of, batch, optimizer)
    with_ranges: dict[str, Step] = {
        "step": partial(step, record_function),
        "forward+backward": partial(without_optimizer, record_function),
    }
    return Workload(step, parts, facts=facts, launches=True, profiled=with_ranges)


def derive(case: Case, times: Times, facts: list[Any]) -> None:
    """Fill in the metrics and the check, on rank 0."""
    metrics, size = case.metrics, facts[0]["batch_size"]
    metrics |= training_metrics(times, len(facts) * (size or 0))
    metrics["batch_size"] = size
    if size is None:
        del metrics["samples_per_s"]
    metrics |= percentiles(times.slowest("forward+backward"), "forward_backward")
    metrics["forward_backward_s"] = times.median("forward+backward")
    del metrics["forward_backward_p50_s"]  # it is forward_backward_s
    metrics["forward_backward_mean_s"] = float(times.slowest("forward+backward").mean())
    for name in facts[0]["max"]:
        metrics[name] = max(fact["max"][name] for fact in facts)
    if config := DECODERS.get(case.key["model"]):
        flop = size * config.context * flops_per_token(config)
        metrics["tflops"] = flop / 1e12 / metrics["step_s"]
        peaks = [fact["device_flops"] for fact in facts]
        if all(peaks):
            metrics["mfu"] = flop / float(np.mean(peaks)) / metrics["step_s"]
    if "eager" in times:
        metrics |= compare_with_eager(metrics, times)
    case.check = worst([fact["check"] for fact in facts])


def compare_with_eager(metrics: dict[str, Any], times: Times) -> dict[str, Any]:
    """What compiling gains; after how many steps it pays, if it certainly does."""
    gains: dict[str, Any] = {"eager_s": times.median("eager"), "vs_eager": times.ratio("eager")}
    gain_s = 0 - times.beyond("eager")
    if gain_s.value > 0 and not gain_s.may_be(0):
        cost_s = metrics["start_s"] + metrics["first_steps_s"]
        gains["payback_steps"] = max(0.0, cost_s - CHECKED_STEPS * gains["eager_s"].value) / gain_s
    return gains


def worst(checks: list[str]) -> str:
    """A failure if a rank has one, else why a rank was not checked, else `passed`."""
    order = ("failed", "skipped", "passed")
    return min(checks, key=lambda check: order.index(check.partition(":")[0]))


# -- what is printed -------------------------------------------------------------------------------

COLUMNS: Columns = {
    "": lambda case: case.name,
    "95% ci\nof p50": relative("step_s"),
    "step\nmean (s)": metric("step_mean_s", digits=4),
    "step\np50 (s)": metric("step_s", digits=4),
    **{f"step\np{q} (s)": metric(f"step_p{q}_s", digits=4) for q in (75, 90, 95)},
    "samples/s": metric("samples_per_s", digits=1),
    "fwd+bwd\nmean (s)": metric("forward_backward_mean_s", digits=4),
    "fwd+bwd\np50 (s)": metric("forward_backward_s", digits=4),
    "\n95% ci": relative("forward_backward_s"),
    "vs\neager": metric("vs_eager"),
    "\n95% ci ": ends("vs_eager"),
}
COSTS: Columns = {
    "": COLUMNS[""],
    "first\nstep (s)": metric("first_step_s"),
    "start of\nbackend (s)": metric("start_s"),
    "payback\n(steps)": metric("payback_steps", digits=0),
    "\n95% ci": ends("payback_steps", digits=0),
    "recom-\npiles": metric("recompiles", digits=0),
    "graphs": metric("graphs", digits=0),
    "graph\nbreaks": metric("graph_breaks", digits=0),
    "FSDP\nunits": metric("fsdp_units", digits=0),
    "memory\n(GiB)": metric("memory_gib"),
    "tflops": metric("tflops", digits=3),
    "mfu\n(%)": metric("mfu", 100, 1),
}


def answer(cases: list[Case]) -> list[str]:
    """For each compiled case: `toy, fp32: whole steps of ddp inductor are 1.30 times (1.21 to 1.38)
    as fast as eager ones; compiling pays after 950 steps (800 to 1,200)`."""
    sentences = []
    for case in [case for case in cases if "vs_eager" in case.metrics]:
        ratio, name = case.metrics["vs_eager"], case.name
        sentence = f"whole steps of {name} are {ratio.times()} as fast as eager ones"
        if ratio.may_be(1):
            sentence = f"{name} and eager cannot be told apart: {ratio.times()} as fast"
        elif ratio.value < 1:
            sentence += "; compiling does not pay"
        elif payback := case.metrics.get("payback_steps"):
            sentence += f"; compiling pays after {payback.text('steps', digits=0)}"
        sentences.append(f"{case.key['model']}, {case.key['dtype']}: {sentence}")
    return sentences


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


# -- which cases -----------------------------------------------------------------------------------


def plan(args: Namespace, job: Job) -> dict[str, list[Planned]]:
    """The title of each table (a model and a dtype), and its cases."""
    tables = {}
    for model, dtype in itertools.product(args.models, args.dtype):
        cases: list[Planned] = []
        for strategy, compiler in itertools.product(args.strategies, args.backends):
            ranks = 1 if strategy == "none" else job.world_size
            key = {"model": model, "dtype": dtype, **key_of(args, strategy, compiler)}
            cases.append((f"{strategy} {compiler}", ranks, key))
        tables[title_of(args, model, dtype, job.device)] = cases
    return tables


def key_of(args: Namespace, strategy: str, compiler: str) -> Key:
    """The settings of a case. A flag is true only where it changes what the case does."""
    wrapped = args.fsdp_wrap and strategy.startswith("fsdp")
    has_units = args.fsdp_units and (wrapped or args.fsdp_checkpoint)
    compiled_ddp = strategy == "ddp" and compiler != "eager"
    return {
        "strategy": strategy,
        "compiler": compiler,
        "batch_size": args.batch_size,
        "fsdp_wrap": wrapped,
        "fsdp_units": ",".join(args.fsdp_units) if has_units else None,
        "fsdp_checkpoint": args.fsdp_checkpoint,
        "dynamo_no_optimize_ddp": args.dynamo_no_optimize_ddp and compiled_ddp,
    }


def start(backend: str, job: Job) -> float:
    """Seconds of a process's first compilation, of next to nothing.

    It imports, starts worker processes and looks at the compiler. All ranks do this at once, before
    the first case. Raises ValueError if it fails on rank 0; on another rank it fails that rank's
    cases, which say why.
    """
    if backend in ("eager", "print"):
        return 0.0
    square = partial(compile_by(backend, torch.square), torch.ones(64, device=job.device))
    with fresh_compile_cache():  # an error must not leave it, or it would keep its folder
        try:
            return time_block(square, 1, job.device)[0][0]
        except Exception as error:
            reason = cli.describe(getattr(error, "inner_exception", error))  # the backend's own
            if job.rank == 0:
                raise ValueError(f"{backend} cannot compile x * x here: {reason}") from None
            return 0.0
        finally:
            torch.compiler.reset()  # or dynamo compiles nothing from the ninth backend on


def main() -> int:
    args = parse_args()
    configure_compile(not args.dynamo_no_optimize_ddp, args.verbose)
    with Benchmark("compile_sweep", args) as bench:
        job = bench.job
        tables = plan(args, job)
        bench.announce(tables)
        if args.torchviz:
            bench.prepare("--torchviz", partial(tempfile.TemporaryFile, dir=Path()))
        keys = [key for cases in tables.values() for _, _, key in cases]
        bench.prepare("--fsdp-units", partial(check_units, keys, job.device))
        gc.collect()  # the models that it has made
        start_s = {}
        for backend in args.backends:
            start_s[backend] = bench.prepare("--backends", partial(start, backend, job))
        gc.freeze()  # what the backends have imported, as `join` does
        for title, cases in tables.items():
            widest = [max((name for name, _, _ in cases), key=len), "+-10.0%"]
            with bench.begin_table(title, COLUMNS, answer, Table(COLUMNS, widest)) as table:
                for name, ranks, key in cases:
                    begin = partial(build, bench, args, start_s[key["compiler"]])
                    with fresh_compile_cache():
                        case = bench.measure(key, name, begin, derive, ranks=range(ranks))
                        torch.compiler.reset()  # it holds the model
                    if case and case.check.startswith("skipped"):
                        bench.print(f"# {case.check}")
            if table.passed:
                bench.print(f"\nCost: {title}\n\n{render(COSTS, table.passed)}")
    return bench.status


if __name__ == "__main__":
    sys.exit(record(main)())
