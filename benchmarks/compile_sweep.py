#!/usr/bin/env python3
"""Does torch.compile help a data-parallel model, under which strategy, and what does it cost?

Times whole training steps (forward, loss, backward, optimizer step, zero_grad) of one model:

    models       toy (the original's), toy-small, decoder-tiny, -10m, -124m, -1.3b
    strategies   none (rank 0 alone), ddp, fsdp1 (FullyShardedDataParallel), fsdp2 (fully_shard)
    backends     eager (not compiled), inductor, aot_eager, cudagraphs, any other that dynamo
                 knows, and print, which prints the graphs; dynamo's own `eager` is dynamo_eager

The model is compiled as it is wrapped, the loss and the optimizer are not. Caches are cold: an
empty folder for each case and rank.

Beside whole steps it times forward and backward alone, without the optimizer: `fwd+bwd`.

    first step   the first one, with everything that compiles in it
    payback      (start of the backend + first three steps - first three steps of eager)
                 / (step of eager - step), in steps
    vs eager     fwd+bwd of the same strategy, not compiled / fwd+bwd
    vs none      step of `none` with the same backend / step: one process, one batch
    tflops       a decoder's FLOPs in a rank's step / step;  mfu = tflops / the device's peak

    torchrun --nproc-per-node 2 benchmarks/compile_sweep.py
    torchrun --nproc-per-node 8 benchmarks/compile_sweep.py --dtype bf16 --json report.jsonl
    torchrun --nproc-per-node 8 benchmarks/compile_sweep.py --models decoder-1.3b --strategies fsdp2

FSDP's units, and what --fsdp-checkpoint recomputes, are the model's layers: all of the class that
its longest list of layers consists of, or of the classes that --fsdp-units names.

Does what PyTorch's benchmarks/dynamo/distributed.py did, with its flags; new code, BSD-3-Clause.
"""

import contextlib
import gc
import importlib
import importlib.util
import itertools
import sys
import tempfile
from argparse import SUPPRESS, BooleanOptionalAction, Namespace
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.elastic.multiprocessing.errors import record
from torch.profiler import record_function

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import cli
from common.benchmark import Benchmark, Workload
from common.check import CHECKED_STEPS, Reference, compare_training, sgd, train_alone, verdict
from common.decoder import DECODERS, Decoder, flops_per_token, random_text
from common.dist import Group, agree, gather, share
from common.memory import peak, start_peak
from common.peaks import peak_flops
from common.private_torch import (
    configure_compile,
    dynamo_counters,
    fresh_compile_cache,
    is_recomputed,
    leaves,
    recompute,
)
from common.report import Case
from common.stats import Times, percentiles, step_metrics
from common.table import Columns, metric, relative, render
from common.timing import time_block

Key = dict[str, Any]
LossOf = Callable[[nn.Module, Any], Tensor]  # of a model and a batch
STRATEGIES = ("none", "ddp", "fsdp1", "fsdp2")
TOYS = {"toy": (10000, 1000), "toy-small": (1000, 100)}  # widths; the first are the original's
TOLERANCES = {"fp32": 2e-3, "tf32": 5e-3, "bf16": 3e-2}  # of a loss, over the first one
BATCHES = 8  # different ones; more ranks share them, so that the reference costs no more
PROFILED = 10  # steps, unless --repeat gives another number


def parse_args(argv: list[str] | None = None) -> Namespace:
    parser = cli.Parser(__doc__)
    known = torch.compiler.list_backends(exclude_tags=())
    # the others fail by design
    names = ["eager", "dynamo_eager", "print", *(name for name in known if "TESTING" not in name)]
    models, backends = cli.list_of(str, [*TOYS, *DECODERS]), cli.list_of(str, names)
    strategies, dtypes = cli.list_of(str, STRATEGIES), cli.list_of(str, [*TOLERANCES])
    add = parser.add_mutually_exclusive_group().add_argument
    add("--models", "--model", type=models, metavar="M", help="decoder-124m, CPU toy-small")
    add("--toy-model", dest="models", action="store_const", const=["toy"])
    add("--torchbench-model", dest="models", nargs=1, metavar="NAME", help="of torchbenchmark")
    add = parser.add_mutually_exclusive_group().add_argument
    add("--strategies", type=strategies, metavar="S", help="(default: all, CPU not fsdp1)")
    add("--ddp", dest="strategies", action="store_const", const=["ddp"])
    add("--fsdp", dest="strategies", action="store_const", const=["fsdp1"])
    add, switch = parser.add_argument, partial(parser.add_argument, action="store_true")
    add("--backends", "--dynamo", type=backends, metavar="B", help="(default: eager,inductor)")
    text = "of a rank (default: 8, CPU 4; torchbenchmark: the model's own)"
    add("--batch-size", type=cli.positive_int, metavar="N", help=text)
    add("--dtype", type=dtypes, default=["fp32"], metavar="D", help="fp32 (default), tf32, bf16")
    add("--fsdp-wrap", action=BooleanOptionalAction, default=True, help="each layer is a unit")
    text = "their classes, e.g. BertLayer,T5Block (default: that of the longest list of layers)"
    add("--fsdp-units", type=cli.list_of(str), default=[], metavar="CLASS", help=text)
    switch("--fsdp-checkpoint", help="recompute each layer's activations, under every strategy")
    switch("--dynamo-no-optimize-ddp", help="do not split graphs at the borders of DDP's buckets")
    text = f"trace --repeat ({PROFILED}) steps of each case and rank, for ui.perfetto.dev or HTA"
    switch("--profile", help=text)
    path = cli.checked(Path, lambda file: file.name != "", "a file", "e.g. profile.json")
    add("--trace-file", type=path, default="profile.json", metavar="PATH", help="of --profile")
    switch("--torchviz", help="write each case's autograd graph, of rank 0, to torchviz-*.dot")
    switch("--verbose", help="print the models and turn on dynamo's logs")
    add("--repeat", dest="iters", type=cli.positive_int, default=SUPPRESS, help="see --iters")
    cli.add_common_flags(parser, max_seconds=4 if torch.cuda.is_available() else 3)
    args = parser.parse_args(argv)
    cuda = torch.cuda.is_available() and args.device != "cpu"
    if not cuda and ("tf32" in args.dtype or "cudagraphs" in (args.backends or [])):
        parser.error("tf32 and cudagraphs need CUDA; try --dtype fp32 or --backends inductor")
    if args.torchviz and not importlib.util.find_spec("torchviz"):
        parser.error("--torchviz needs the package torchviz; try pip install torchviz")
    args.models = args.models or ["decoder-124m" if cuda else "toy-small"]
    if args.models[0] in (*TOYS, *DECODERS):
        args.batch_size = args.batch_size or (8 if cuda else 4)
    elif not importlib.util.find_spec("torchbenchmark"):
        where = "docs/compile_sweep.md says how to install it, or try --toy-model"
        parser.error(f"--torchbench-model needs the package torchbenchmark: {where}")
    args.strategies = args.strategies or (list(STRATEGIES) if cuda else ["none", "ddp", "fsdp2"])
    args.strategies.sort(key=STRATEGIES.index)  # what others are compared with comes first
    args.backends = sorted(args.backends or ["eager", "inductor"], key=lambda name: name != "eager")
    return args


# -- what is trained, and how: plain torch ---------------------------------------------------------


class Layer(nn.Linear):
    """Not nn.Sequential: dynamo compiles no forward of torch.nn by itself, as FSDP2 would need."""

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
    """Of a model of torchbenchmark: its first output that can be a loss."""
    outputs = leaves(model(**batch) if isinstance(batch, dict) else model(*batch))
    tensors = [x for x in outputs if isinstance(x, Tensor) and x.is_floating_point()]
    return tensors[0].float().mean()


class Training(NamedTuple):
    """What is trained; the same on every rank."""

    model: nn.Module
    batches: list[Any]
    loss_of: LossOf
    batch_size: int | None  # None where a model of torchbenchmark does not say it


def create(name: str, size: int | None, count: int, device: torch.device, low: bool) -> Training:
    """A model and so many batches of `size` samples each. low: autocast to bf16."""
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
    # it is entered in each call: within one the weights' casts are kept, whatever a step changes
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=low)
    return Training(model, batches, autocast(loss_of), size)


def load_torchbench(
    name: str, size: int | None, device: torch.device
) -> tuple[nn.Module, Any, int | None]:
    """A model of github.com/pytorch/benchmark, its only batch, and the size of that."""
    loader = importlib.import_module("torchbenchmark").load_model_by_name(name)
    if loader is None:
        raise ValueError(
            f"torchbenchmark cannot load {name!r}: no such model, or it lacks packages"
        )
    benchmark = loader(test="train", device=device.type, batch_size=size)
    model, batch = benchmark.get_module()
    if low := {str(p.dtype) for p in model.parameters()} - {"torch.float32"}:
        raise ValueError(f"expected a model with weights in fp32, got {', '.join(sorted(low))}")
    for module in model.modules():  # with dropout losses could not be compared
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model, batch, getattr(benchmark, "batch_size", size)


def longest_stack(model: nn.Module) -> list[nn.Module]:
    """The model's longest ModuleList or Sequential of one class; of two layers at least, or []."""
    longest: list[nn.Module] = []
    for module in model.modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module) > 1:
            classes = {type(layer) for layer in module}
            nested = classes & {nn.ModuleList, nn.Sequential}
            if len(classes) == 1 and not nested and len(module) > len(longest):
                longest = [*module]
    return longest


def find_units(model: nn.Module, classes: list[str]) -> list[nn.Module]:
    """The model's layers that FSDP wraps or that are recomputed, inner ones first.

    classes: names of their classes; none for the class that the longest list of layers consists
    of. Raises ValueError where the model has no such layers.
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


def wrap(model: nn.Module, key: Key, device: torch.device, group: dist.ProcessGroup) -> nn.Module:
    """The model under a strategy: what data parallelism needs, and all that it needs."""
    units: list[nn.Module] = []
    if key["fsdp_wrap"] or key["fsdp_checkpoint"]:
        units = find_units(model, key["fsdp_units"].split(",") if key["fsdp_units"] else [])
    if key["fsdp_checkpoint"]:
        recompute(model, units)
        units = [module for module in reversed([*model.modules()]) if is_recomputed(module)]
    if not key["fsdp_wrap"]:
        units = []
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
    chosen: Any = {"dynamo_eager": "eager", "print": print_graph}.get(backend, backend)
    return model if backend == "eager" else torch.compile(model, backend=chosen)


@cache
def train_alone_on(
    name: str, size: int | None, dtype: str, ranks: int, device: torch.device
) -> Reference | str:
    """One eager process with the batches of all ranks; or why there is nothing to compare with."""
    weights = [len(range(i, ranks, BATCHES)) / ranks for i in range(min(ranks, BATCHES))]
    try:
        model, batches, loss_of, _ = create(name, size, len(weights), device, dtype == "bf16")
        found = train_alone(model, batches, loss_of, weights)
    except Exception as error:  # what fails on all ranks as well fails their case
        return f"one process alone fails: {cli.describe(error)}"
    first, *_, last = map(np.mean, found.losses)
    still = abs(last - first) <= TOLERANCES[dtype] * abs(first)
    return "the losses stay as they are: a wrong gradient would not show" if still else found


def trace(step: Callable[[Any], Any], steps: int, file: Path, device: torch.device) -> None:
    """Write a trace of so many steps, with ranges `forward` and `backward`."""
    with torch.profiler.profile() as profiler:
        time_block(partial(step, record_function), steps, device)
    file.unlink(missing_ok=True)
    profiler.export_chrome_trace(str(file))
    file.stat()  # raises if it is not there: the profiler itself only logs that it cannot write


def draw(model: nn.Module, loss: Tensor, file: str) -> None:
    """Write the autograd graph of a loss, in the language of Graphviz."""
    named = dict(model.named_parameters())
    viz = importlib.import_module("torchviz")
    viz.make_dot(loss, named, show_attrs=True, show_saved=True).save(file)


def count_graphs(first: int) -> dict[str, int]:
    """The case's graphs and graph breaks, as metrics. first: graphs that the first step made."""
    counters = dynamo_counters()
    made = counters["stats"]["unique_graphs"]
    left = counters["graph_break"] + counters["unimplemented"]
    # the context manager in DDP's forward, a generator, breaks nothing
    breaks = sum(times for why, times in left.items() if "enerator" not in why)
    return {"graphs": made, "recompiles": made - first, "graph_breaks": breaks}


def check(key: Key, rank: int, losses: list[Tensor], wanted: Reference | str, graphs: int) -> str:
    """The check of a rank's first steps: was the model compiled, and are the losses right?"""
    if key["compiler"] != "eager" and not graphs:
        return verdict(f"{key['compiler']} compiled nothing: dynamo has made no graph of the model")
    if isinstance(wanted, str):
        return f"skipped: {wanted}"
    want = [row[rank % BATCHES] for row in wanted.losses]
    got = [float(loss) for loss in losses]
    return verdict(
        compare_training(f"the loss of rank {rank}", got, want, TOLERANCES[key["dtype"]])
    )


def build(bench: Benchmark, start_s: float, key: Key, group: Group) -> Workload:
    args, device, rank = bench.args, bench.job.device, bench.job.rank
    size, dtype, backend, ranks = key["batch_size"], key["dtype"], key["compiler"], len(group.ranks)
    name = "-".join(key[part] for part in ("model", "dtype", "strategy", "compiler"))
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = dtype == "tf32"
    alone = train_alone_on(key["model"], size, dtype, ranks, device) if rank == 0 else None
    wanted = agree(alone, group)
    counters = dynamo_counters()
    counters.clear()
    memory = start_peak(device)
    low = dtype == "bf16" and key["strategy"] in ("none", "ddp")  # FSDP casts by itself
    model, batches, loss_of, size = create(key["model"], size, min(ranks, BATCHES), device, low)
    model, batch = wrap(model, key, device, group.test), batches[rank % BATCHES]
    start_peak(device)  # the shards count, not the whole model that FSDP has cut them from
    if args.verbose:
        bench.print(f"# {name}\n{model}")
    compiled = compile_by(backend, model)
    optimizer = sgd(model, wanted.lr if isinstance(wanted, Reference) else 0.0)

    def forward_backward(mark: Any = contextlib.nullcontext) -> Tensor:
        """mark: names a range of a trace."""
        with mark("forward"):
            loss = loss_of(compiled, batch)
        with mark("backward"):
            loss.backward()
        return loss.detach()

    def step(mark: Any = contextlib.nullcontext) -> Tensor:
        loss = forward_backward(mark)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def without_optimizer() -> None:
        forward_backward()
        optimizer.zero_grad()

    losses, times_s, graphs = list[Tensor](), list[float](), list[int]()
    for i in range(CHECKED_STEPS):
        bench.watchdog.phase(f"step {i + 1} (the first one compiles)")
        dist.barrier(group.control)
        times_s += time_block(lambda: losses.append(step()), 1, device)[0]
        graphs.append(counters["stats"]["unique_graphs"])
    optimizer.param_groups[0]["lr"] = 0.0  # costs the same, and the weights stay finite
    gib = peak(device, memory)

    def facts() -> Key:
        cost: Key = count_graphs(graphs[0]) | {"start_s": start_s}
        cost |= {"first_step_s": times_s[0], "first_steps_s": sum(times_s)}
        if args.profile:
            file = args.trace_file.with_stem(f"{args.trace_file.stem}-{name}-{rank}")
            trace(step, args.iters or PROFILED, file, device)
        if args.torchviz:
            loss = loss_of(compiled, batch)  # on all ranks: FSDP gathers weights in it
            if rank == 0:
                draw(model, loss, f"torchviz-{name}-0.dot")
        result = check(key, rank, losses, wanted, cost["graphs"])
        most = cost | gib | count_units(model)
        return {"max": most, "check": result, "batch_size": size, "peak": peak_flops(device, dtype)}

    return Workload(step, {"forward+backward": without_optimizer}, facts=facts, launches=True)


def derive(cases: dict[Any, Case], case: Case, times: Times, facts: list[Any]) -> None:
    """Fill in the metrics and the check. cases: those before this one, of the same model."""
    m, key, size = case.metrics, case.key, facts[0]["batch_size"]
    m |= step_metrics(times.each(), len(facts) * (size or 0))
    m |= {"batch_size": size, "samples_per_s": m["samples_per_s"] or None}
    without_optimizer = times.slowest("forward+backward")
    m |= percentiles(without_optimizer, "forward_backward")
    m["forward_backward_mean_s"] = float(without_optimizer.mean())
    m |= {name: max(fact["max"][name] for fact in facts) for name in facts[0]["max"]}
    step_s, eager = m["step_time_p50_s"], cases.get((key["strategy"], "eager"))
    none = cases.get(("none", key["compiler"]))
    if key["model"] in DECODERS:
        config = DECODERS[key["model"]]
        flop_per_s = size * config.context * flops_per_token(config) / step_s
        m["tflops"] = flop_per_s / 1e12
        if all(fact["peak"] for fact in facts):
            m["mfu"] = flop_per_s / np.mean([fact["peak"] for fact in facts])
    if eager:
        m["vs_eager"] = eager.metrics["forward_backward_p50_s"] / m["forward_backward_p50_s"]
    if none:
        m["vs_none"] = none.metrics["step_time_p50_s"] / step_s
    if eager and (gain_s := eager.metrics["step_time_p50_s"] - step_s) > 0:
        cost_s = m["start_s"] + m["first_steps_s"] - eager.metrics["first_steps_s"]
        m["payback_steps"] = max(0, int(np.ceil(cost_s / gain_s)))
    case.check = next(filter("passed".__ne__, sorted(fact["check"] for fact in facts)), "passed")


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


def title_of(args: Namespace, model: str, dtype: str) -> str:
    """The settings that all cases of a table share."""
    size = f"batch size {args.batch_size}" if args.batch_size else "the model's own batch size"
    words = [model, size, dtype]
    if any(strategy.startswith("fsdp") for strategy in args.strategies):
        layer = " and ".join(args.fsdp_units) or "layer"
        words.append(f"FSDP wraps each {layer}" if args.fsdp_wrap else "FSDP in one unit")
    words.append("activations recomputed" if args.fsdp_checkpoint else "activations kept")
    if args.dynamo_no_optimize_ddp:
        words.append("one graph under DDP")
    return ", ".join(words)


def key_of(args: Namespace, model: str, dtype: str, strategy: str, compiler: str) -> Key:
    """What identifies a case. A flag is true only where it changes what the case does."""
    sharded, split = strategy.startswith("fsdp"), strategy == "ddp" and compiler != "eager"
    key = dict(model=model, dtype=dtype, strategy=strategy, compiler=compiler)
    used = args.fsdp_checkpoint or (args.fsdp_wrap and sharded)
    return key | {
        "batch_size": args.batch_size,
        "fsdp_wrap": args.fsdp_wrap and sharded,
        "fsdp_units": ",".join(args.fsdp_units) or None if used else None,
        "fsdp_checkpoint": args.fsdp_checkpoint,
        "dynamo_no_optimize_ddp": args.dynamo_no_optimize_ddp and split,
    }


def unwritable(args: Namespace) -> str | None:
    """Why this rank could not write what --profile and --torchviz make; None if it can."""
    folders = [args.trace_file.parent] * args.profile + [Path()] * args.torchviz
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            return f"cannot write into {folder.resolve()}: {error.strerror}"
    return None


def start(backend: str, device: torch.device) -> tuple[float, str | None]:
    """Seconds of a process's first compilation, of next to nothing, or why that fails.

    Imports, worker processes, a look at the compiler: for all ranks at once, not in a case.
    """
    if backend in ("eager", "print"):
        return 0.0, None
    square = partial(compile_by(backend, torch.square), torch.ones(64, device=device))
    with fresh_compile_cache():  # it would keep its folder if an error left it
        try:
            return time_block(square, 1, device)[0][0], None
        except Exception as error:
            reason = cli.describe(getattr(error, "inner_exception", error))  # the backend's own
            return 0.0, f"--backends {backend} cannot compile x * x here: {reason}"
        finally:
            torch.compiler.reset()  # or dynamo compiles nothing from the ninth backend on


def main() -> int:
    args = parse_args()
    configure_compile(not args.dynamo_no_optimize_ddp, args.verbose)
    with Benchmark("compile_sweep", args) as bench:
        job, start_s = bench.job, dict[str, float]()
        problems = gather(unwritable(args))
        if problem := share(next(filter(None, problems or []), None)):
            bench.refuse(problem)
        for backend in args.backends:
            start_s[backend], problem = start(backend, job.device)
            if problem := share(problem):  # what fails on other ranks alone fails its cases
                bench.refuse(problem)
        gc.freeze()  # what the backends import, as `join` does
        widest = max((f"{s} {b}" for s in args.strategies for b in args.backends), key=len)
        for model, dtype in itertools.product(args.models, args.dtype):
            title = title_of(args, model, dtype)
            bench.begin_table(title, COLUMNS, [widest, "+-10.0%"])
            cases: dict[tuple[str, str], Case] = {}
            for strategy, compiler in itertools.product(args.strategies, args.backends):
                size = 0 if strategy == "none" else job.world_size
                key = key_of(args, model, dtype, strategy, compiler)
                key["world_size"] = size
                work = partial(build, bench, start_s[compiler])
                with fresh_compile_cache():
                    case = bench.measure(key, work, partial(derive, cases), range(max(1, size)))
                    torch.compiler.reset()  # it holds the model
                if case and not case.failed:
                    cases[strategy, compiler] = case
                    if case.check != "passed":
                        bench.print(f"# {case.check}")
            if cases:
                bench.print(f"\nCost: {title}\n\n{render(COSTS, list(cases.values()))}")
    return bench.status


if __name__ == "__main__":
    sys.exit(record(main)())
