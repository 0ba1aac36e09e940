#!/usr/bin/env python3
"""Does torch.compile help a data-parallel model, under which strategy, and what does it cost?

Times whole training steps (forward, loss, backward, optimizer step, zero_grad) of one model:

    models       toy (the original's), toy-small, decoder-tiny, -10m, -124m, -1.3b
    strategies   none (rank 0 alone), ddp, fsdp1 (FullyShardedDataParallel), fsdp2 (fully_shard)
    backends     eager (not compiled), inductor, aot_eager, cudagraphs, any other that dynamo
                 knows, and print, which prints the graphs; dynamo's own `eager` is dynamo_eager

The model is compiled as it is wrapped, the loss and the optimizer are not. Caches are cold: an
empty folder for each case and rank.

    first step   the first one, with everything that compiles in it
    payback      (start of the backend + first three steps - first three steps of eager)
                 / (step of eager - step), in steps
    vs eager     step of the same strategy, not compiled / step
    vs none      step of `none` with the same backend / step: one process, one batch
    tflops       a decoder's FLOPs in a rank's step / step;  mfu = tflops / the device's peak

    torchrun --nproc-per-node 2 benchmarks/compile_sweep.py
    torchrun --nproc-per-node 8 benchmarks/compile_sweep.py --dtype bf16 --json report.jsonl
    torchrun --nproc-per-node 8 benchmarks/compile_sweep.py --models decoder-1.3b --strategies fsdp2

Does what PyTorch's benchmarks/dynamo/distributed.py did, with its flags; new code, BSD-3-Clause.
"""

import contextlib
import gc
import importlib
import itertools
import sys
from argparse import SUPPRESS, BooleanOptionalAction, Namespace
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache
from torch.distributed import fsdp
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.elastic.multiprocessing.errors import record
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import cli
from common.benchmark import Benchmark, Workload
from common.check import verdict
from common.decoder import DECODERS, Decoder, flops_per_token, random_text
from common.dist import Group
from common.memory import peak, start_peak
from common.peaks import peak_flops
from common.report import Case
from common.stats import Times, step_metrics
from common.table import Columns, metric, relative, render
from common.timing import agree, time_block
from common.training import CHECKED_STEPS, Reference, compare_training, sgd, train_alone

Key = dict[str, Any]
LossOf = Callable[[nn.Module, Any], Tensor]  # of a model and a batch
STRATEGIES = ("none", "ddp", "fsdp1", "fsdp2")
TOYS = {"toy": (10000, 1000), "toy-small": (1000, 100)}  # widths; the first are the original's
TOLERANCES = {"fp32": 2e-3, "tf32": 5e-3, "bf16": 3e-2}  # of a loss, over the first one
BATCHES = 8  # different ones; more ranks share them, so that the reference costs no more


def parse_args(argv: list[str] | None = None) -> Namespace:
    parser = cli.Parser(__doc__)
    names = ["eager", "dynamo_eager", "print", *torch.compiler.list_backends(exclude_tags=())]
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
    add("--batch-size", type=cli.positive_int, metavar="N", help="of a rank (default: 8, CPU 4)")
    add("--dtype", type=dtypes, default=["fp32"], metavar="D", help="fp32 (default), tf32, bf16")
    add("--fsdp-wrap", action=BooleanOptionalAction, default=True, help="each block is a unit")
    switch("--fsdp-checkpoint", help="recompute each block's activations, under every strategy")
    switch("--dynamo-no-optimize-ddp", help="do not split graphs at the borders of DDP's buckets")
    switch("--profile", help="trace five steps of each case and rank, for ui.perfetto.dev or HTA")
    add("--trace-file", type=Path, default="profile.json", metavar="PATH", help="of --profile")
    switch("--torchviz", help="write each case's autograd graph to torchviz-*.dot")
    switch("--verbose", help="print the models and turn on dynamo's logs")
    add("--repeat", dest="iters", type=cli.positive_int, default=SUPPRESS, help="see --iters")
    cli.add_common_flags(parser, max_seconds=2 if torch.cuda.is_available() else 1.5)
    args = parser.parse_args(argv)
    cuda = torch.cuda.is_available() and args.device != "cpu"
    if not cuda and ("tf32" in args.dtype or "cudagraphs" in (args.backends or [])):
        parser.error("tf32 and cudagraphs need CUDA; try --dtype fp32 or --backends inductor")
    args.models = args.models or ["decoder-124m" if cuda else "toy-small"]
    args.batch_size = args.batch_size or (8 if cuda else 4)
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
    outputs = tree_leaves(model(**batch) if isinstance(batch, dict) else model(*batch))
    tensors = [x for x in outputs if isinstance(x, Tensor) and x.is_floating_point()]
    return tensors[0].float().mean()


def create(
    name: str, size: int, count: int, device: torch.device, low: bool
) -> tuple[nn.Module, list[Any], LossOf]:
    """A model, batches, and the loss of one; the same on every rank. low: autocast to bf16."""
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
    else:  # of github.com/pytorch/benchmark; it has one batch only
        found = importlib.import_module("torchbenchmark").load_model_by_name(name)
        model, batch = found(test="train", device=device.type, batch_size=size).get_module()
        batches, loss_of = [batch] * count, mean_output
        for module in model.modules():  # with dropout losses could not be compared
            if isinstance(module, nn.Dropout):
                module.p = 0.0
    # it is entered in each call: within one the weights' casts are kept, whatever a step changes
    return model, batches, torch.autocast(device.type, torch.bfloat16, enabled=low)(loss_of)


def wrap(model: nn.Module, key: Key, device: torch.device, group: dist.ProcessGroup) -> nn.Module:
    """The model under a strategy: what data parallelism needs, and all that it needs."""
    blocks: Any = getattr(model, "blocks", [])
    if key["fsdp_checkpoint"]:
        for i, block in enumerate(blocks):
            blocks[i] = checkpoint_wrapper(block)
    units = [*blocks] if key["fsdp_wrap"] else []
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


def print_graph(graph: torch.fx.GraphModule, inputs: Any) -> Any:
    if dist.get_rank() == 0:
        print(f"# graph of the backend print\n{graph.graph}", flush=True)
    return graph.forward


def compile_by(backend: str, model: Any) -> Any:
    chosen: Any = {"dynamo_eager": "eager", "print": print_graph}.get(backend, backend)
    return model if backend == "eager" else torch.compile(model, backend=chosen)


@cache
def train_alone_on(
    name: str, size: int, dtype: str, ranks: int, device: torch.device
) -> Reference | str:
    """One eager process with the batches of all ranks; or why there is nothing to compare with."""
    weights = [len(range(i, ranks, BATCHES)) / ranks for i in range(min(ranks, BATCHES))]
    try:
        found = train_alone(*create(name, size, len(weights), device, dtype == "bf16"), weights)
    except Exception as error:  # what fails on all ranks as well fails their case
        return f"one process alone fails: {cli.describe(error)}"
    first, *_, last = map(np.mean, found.losses)
    still = abs(last - first) <= TOLERANCES[dtype] * abs(first)
    return "the losses stay as they are: a wrong gradient would not show" if still else found


def build(bench: Benchmark, start_s: float, key: Key, group: Group) -> Workload:
    args, device, rank = bench.args, bench.job.device, bench.job.rank
    size, dtype, backend, ranks = key["batch_size"], key["dtype"], key["compiler"], len(group.ranks)
    name = "-".join(key[part] for part in ("model", "dtype", "strategy", "compiler"))
    viz = importlib.import_module("torchviz") if args.torchviz else None
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = dtype == "tf32"
    alone = train_alone_on(key["model"], size, dtype, ranks, device) if rank == 0 else None
    wanted = agree(alone, group)
    counters.clear()
    memory = start_peak(device)
    low = dtype == "bf16" and key["strategy"] in ("none", "ddp")  # FSDP casts by itself
    model, batches, loss_of = create(key["model"], size, min(ranks, BATCHES), device, low)
    model, batch = wrap(model, key, device, group.test), batches[rank % BATCHES]
    start_peak(device)  # the shards count, not the whole model that FSDP has cut them from
    if args.verbose:
        bench.print(f"# {name}\n{model}")
    compiled = compile_by(backend, model)
    optimizer = sgd(model, wanted.lr if isinstance(wanted, Reference) else 0.0)

    def step() -> Tensor:
        loss = loss_of(compiled, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    losses, times_s, graphs = list[Tensor](), list[float](), list[int]()
    for i in range(CHECKED_STEPS):
        bench.watchdog.phase(f"step {i + 1} (the first one compiles)")
        dist.barrier(group.control)
        times_s += time_block(lambda: losses.append(step()), 1, device)[0]
        graphs.append(counters["stats"]["unique_graphs"])
    optimizer.param_groups[0]["lr"] = 0.0  # costs the same, and the weights stay finite
    gib = peak(device, memory)

    def facts() -> Key:
        made = counters["stats"]["unique_graphs"]
        left = counters["graph_break"] + counters["unimplemented"]
        # the context manager in DDP's forward, a generator, breaks nothing
        breaks = sum(times for why, times in left.items() if "enerator" not in why)
        cost: Key = {"graphs": made, "recompiles": made - graphs[0], "graph_breaks": breaks}
        cost |= {"first_step_s": times_s[0], "first_steps_s": sum(times_s), "start_s": start_s}
        if args.profile:
            with torch.profiler.profile() as profiler:
                time_block(step, 5, device)
            file = args.trace_file.with_stem(f"{args.trace_file.stem}-{name}-{rank}")
            file.parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(file))
        if viz:
            named = dict(model.named_parameters())
            graph = viz.make_dot(loss_of(model, batch), named, show_attrs=True, show_saved=True)
            graph.save(f"torchviz-{name}-{rank}.dot")
        if isinstance(wanted, str):
            result = f"skipped: {wanted}"
        else:
            want = [row[rank % BATCHES] for row in wanted.losses]
            got = [float(loss) for loss in losses]
            off = compare_training(f"the loss of rank {rank}", got, want, TOLERANCES[dtype])
            result = verdict(off)
        return {"max": cost | gib, "check": result, "peak": peak_flops(device, dtype)}

    return Workload(step, facts=facts, launches=True)


def derive(cases: dict[Any, Case], case: Case, times: Times, facts: list[Any]) -> None:
    """Fill in the metrics and the check. cases: those before this one, of the same model."""
    m, key = case.metrics, case.key
    m |= step_metrics(times.each(), len(facts) * key["batch_size"])
    m |= {name: max(fact["max"][name] for fact in facts) for name in facts[0]["max"]}
    step_s, eager = m["step_time_p50_s"], cases.get((key["strategy"], "eager"))
    if key["model"] in DECODERS:
        config = DECODERS[key["model"]]
        flop_per_s = key["batch_size"] * config.context * flops_per_token(config) / step_s
        m["tflops"] = flop_per_s / 1e12
        if all(fact["peak"] for fact in facts):
            m["mfu"] = flop_per_s / np.mean([fact["peak"] for fact in facts])
    for name, base in ("eager", eager), ("none", cases.get(("none", key["compiler"]))):
        if base:
            m[f"vs_{name}"] = base.metrics["step_time_p50_s"] / step_s
    if eager and (gain_s := eager.metrics["step_time_p50_s"] - step_s) > 0:
        cost_s = m["start_s"] + m["first_steps_s"] - eager.metrics["first_steps_s"]
        m["payback_steps"] = max(0, int(np.ceil(cost_s / gain_s)))
    case.check = next(filter("passed".__ne__, sorted(fact["check"] for fact in facts)), "passed")


COLUMNS: Columns = {
    "": lambda case: f"{case.key['strategy']} {case.key['compiler']}",
    "95% ci\nof p50": relative("step_time_ci95_rel"),
    **{f"p{q}\nsec/step": metric(f"step_time_p{q}_s", digits=4) for q in (50, 75, 90, 95)},
    "samples/s": metric("samples_per_s", digits=1),
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
    "memory\n(GiB)": metric("memory_gib"),
    "tflops": metric("tflops", digits=3),
    "mfu\n(%)": metric("mfu", 100, 1),
}


def main() -> int:
    args = parse_args()
    torch._dynamo.config.optimize_ddp = not args.dynamo_no_optimize_ddp
    if args.verbose:
        torch._logging.set_logs(graph_breaks=True, recompiles=True)
    with Benchmark("compile_sweep", args) as bench:
        job, start_s = bench.job, dict.fromkeys(args.backends, 0.0)
        options = ("batch_size", "fsdp_wrap", "fsdp_checkpoint", "dynamo_no_optimize_ddp")
        fixed = {name: getattr(args, name) for name in options}
        # imports, worker processes, a look at the compiler: for all ranks at once, not in a case
        for backend in [name for name in args.backends if name not in ("eager", "print")]:
            start = partial(compile_by(backend, torch.square), torch.ones(64, device=job.device))
            with contextlib.suppress(Exception), fresh_cache():  # what fails here fails its cases
                start_s[backend] = time_block(start, 1, job.device)[0][0]
        gc.freeze()  # what the backends import, as `join` does
        for model, dtype in itertools.product(args.models, args.dtype):
            title = f"{model}, batch size {args.batch_size}, {dtype}"
            bench.begin_table(title, COLUMNS, ["fsdp2 dynamo_eager", "+-10.0%"])
            cases: dict[tuple[str, str], Case] = {}
            for strategy, compiler in itertools.product(args.strategies, args.backends):
                size = 0 if strategy == "none" else job.world_size
                key = dict(model=model, dtype=dtype, strategy=strategy, compiler=compiler)
                key |= {"world_size": size} | fixed
                work = partial(build, bench, start_s[compiler])
                with fresh_cache():
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
