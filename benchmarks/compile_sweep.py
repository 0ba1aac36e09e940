#!/usr/bin/env python3
"""Does torch.compile help a data-parallel model, under which strategy, and what does it cost?

Times whole training steps (forward, loss, backward, optimizer step, zero_grad) of one model:

    models       toy (the original's), toy-small, decoder-tiny, -10m, -124m, -1.3b
    strategies   none (rank 0 alone), ddp, fsdp1 (FullyShardedDataParallel), fsdp2 (fully_shard)
    backends     eager (not compiled), inductor, aot_eager, cudagraphs, any other that dynamo
                 knows, and print, which prints the graphs; dynamo's own `eager` is dynamo_eager

The model is compiled as it is wrapped, the loss and the optimizer are not. Caches are cold: an
empty folder for each case and rank. What compiling costs is measured apart from the steps:

    first step   the first one, with everything that compiles in it
    payback      (start of the backend + first three steps - first three steps of eager)
                 / (step of eager - step), in steps
    fwd+bwd      the step without the optimizer's, where both fit into --max-seconds
    vs eager     step of the same strategy, not compiled / step
    vs none      step of `none` with the same backend / step: one process, one batch
    tflops       a decoder's FLOPs in a rank's step / step;  mfu = tflops / the device's peak

    torchrun --nproc-per-node 2 benchmarks/compile_sweep.py
    torchrun --nproc-per-node 8 benchmarks/compile_sweep.py --dtype bf16 --json report.jsonl
    torchrun --nproc-per-node 8 benchmarks/compile_sweep.py --models decoder-1.3b --strategies fsdp2

Does what PyTorch's benchmarks/dynamo/distributed.py did, with its flags, written anew.
BSD-3-Clause. docs/compile_sweep.md shows how to read the tables.
"""

import contextlib
import gc
import importlib.util
import itertools
import math
import sys
from argparse import SUPPRESS, BooleanOptionalAction, Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache
from torch.distributed import fsdp
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as checkpoint
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import profile
from torch.utils._pytree import tree_leaves, tree_map_only

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import cli
from common.benchmark import Benchmark, Workload
from common.check import CHECKED_STEPS, Reference, compare_training, sgd, train_alone, verdict
from common.decoder import DECODERS, Block, Decoder, flops_per_token, random_text
from common.dist import Group, share
from common.memory import peak, start_peak
from common.peaks import peak_flops
from common.report import Case
from common.stats import step_metrics
from common.table import Columns, metric, relative, render
from common.timing import time_block

Key = dict[str, Any]
STRATEGIES = ("none", "ddp", "fsdp1", "fsdp2")
TOYS = {"toy": (10000, 1000), "toy-small": (1000, 100)}  # widths; the first are the original's
TOLERANCES = {"fp32": 2e-3, "tf32": 5e-3, "bf16": 3e-2}  # of a loss, over the first one
BATCHES = 8  # different ones; more ranks share them, so that the reference costs no more


def parse_args(argv: list[str] | None = None) -> Namespace:
    parser = cli.Parser(__doc__)
    backends = ["eager", "dynamo_eager", "print", *torch.compiler.list_backends(exclude_tags=())]
    models, some, number = [*TOYS, *DECODERS], cli.list_of, cli.positive_int
    one, text = parser.add_mutually_exclusive_group().add_argument, "decoder-124m, CPU toy-small"
    one("--models", "--model", type=some(str, models), metavar="M", help=f"(default: {text})")
    one("--toy-model", dest="models", action="store_const", const=["toy"])
    one("--torchbench-model", metavar="NAME", help="of an installed torchbenchmark")
    one, text = parser.add_mutually_exclusive_group().add_argument, "(default: all, CPU not fsdp1)"
    one("--strategies", type=some(str, STRATEGIES), metavar="S", help=text)
    one("--ddp", dest="strategies", action="store_const", const=["ddp"])
    one("--fsdp", dest="strategies", action="store_const", const=["fsdp1"])
    add, switch = parser.add_argument, partial(parser.add_argument, action="store_true")
    text = "(default: eager,inductor)"
    add("--backends", "--dynamo", type=some(str, backends), metavar="B", help=text)
    add("--batch-size", type=number, metavar="N", help="of a rank (default: 8, CPU 4)")
    text = "fp32, tf32 or bf16 (default: fp32)"
    add("--dtype", type=some(str, [*TOLERANCES]), default=["fp32"], metavar="D", help=text)
    text = "each block is a unit of FSDP (default: yes), or the whole model is one"
    add("--fsdp-wrap", action=BooleanOptionalAction, default=True, help=text)
    switch("--fsdp-checkpoint", help="recompute each block's activations, under every strategy")
    switch("--dynamo-no-optimize-ddp", help="do not split graphs at the borders of DDP's buckets")
    switch("--warm-cache", help="use the compilers' own caches, not empty ones")
    switch("--profile", help="trace five steps of each case and rank, for ui.perfetto.dev or HTA")
    text = "of --profile; case and rank are added to its name (default: profile.json)"
    add("--trace-file", type=Path, default=Path("profile.json"), metavar="PATH", help=text)
    switch("--torchviz", help="write each case's autograd graph to torchviz-*.dot")
    switch("--verbose", help="print the models and turn on dynamo's logs")
    add("--repeat", dest="iters", type=number, default=SUPPRESS, metavar="N", help="see --iters")
    cli.add_common_flags(parser, max_seconds=2 if torch.cuda.is_available() else 1.5)
    args = parser.parse_args(argv)
    cuda = torch.cuda.is_available() and args.device != "cpu"
    bench = [args.torchbench_model] if args.torchbench_model else []
    args.models = bench or args.models or ["decoder-124m" if cuda else "toy-small"]
    args.strategies = args.strategies or (list(STRATEGIES) if cuda else ["none", "ddp", "fsdp2"])
    args.strategies.sort(key=STRATEGIES.index)  # what others are compared with comes first
    args.backends = sorted(args.backends or ["eager", "inductor"], key=lambda name: name != "eager")
    args.batch_size = args.batch_size or (None if bench else 8 if cuda else 4)
    for flag, package in (args.torchviz, "torchviz"), (bench, "torchbenchmark"):
        if flag and importlib.util.find_spec(package) is None:
            cli.refuse(f"expected the package {package}, which is not installed")
    return args


# -- what is trained: plain torch ------------------------------------------------------------------


class Layer(nn.Linear):
    """The toy's block."""

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(super().forward(x))


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


def create(
    key: Key, device: torch.device, low: bool
) -> tuple[nn.Module, list[Any], Callable[[nn.Module, Any], Tensor]]:
    """A model, batches, and the loss of one; the same on every rank. low: autocast to bf16.

    Without dropout, or losses could not be compared.
    """
    torch.manual_seed(0)
    name, size, count = key["model"], key["batch_size"], max(1, min(key["world_size"], BATCHES))
    model: nn.Module
    if name in TOYS:
        model, targets = Toy(*TOYS[name]), torch.randint(5, (count, size))
        batches = list(zip(torch.rand(count, size, 10), targets, strict=True))
    elif name in DECODERS:
        with device:
            model = Decoder(DECODERS[name])
        batches = [random_text(DECODERS[name], size, i) for i in range(count)]
    else:  # of github.com/pytorch/benchmark; it has one batch only
        found = importlib.import_module("torchbenchmark").load_model_by_name(name)
        model, batch = found(test="train", device=device.type, batch_size=size).get_module()
        batches = [batch] * count
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0

    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        # a context for each call: within one the weights' casts are kept, whatever a step changes
        with torch.autocast(device.type, torch.bfloat16, enabled=low):
            if name not in (*TOYS, *DECODERS):  # the first output that can be a loss
                outputs = tree_leaves(model(**batch) if isinstance(batch, dict) else model(*batch))
                tensors = [x for x in outputs if isinstance(x, Tensor) and x.is_floating_point()]
                return tensors[0].float().mean()
            x, targets = batch
            return F.cross_entropy(model(x).flatten(0, -2).float(), targets.flatten())

    batches = tree_map_only(Tensor, lambda tensor: tensor.to(device), batches)
    return model.to(device), batches, loss_of


def wrap(model: nn.Module, key: Key, device: torch.device, group: dist.ProcessGroup) -> nn.Module:
    if key["fsdp_checkpoint"]:
        blocks = (Layer, Block)
        checkpoint.apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, blocks))
    units = [*getattr(model, "blocks", [])] if key["fsdp_wrap"] else []
    low, high = (torch.bfloat16, torch.float32) if key["dtype"] == "bf16" else (None, None)
    if key["strategy"] == "ddp":
        return DistributedDataParallel(model, process_group=group)
    if key["strategy"] == "fsdp1":
        return fsdp.FullyShardedDataParallel(
            model,
            process_group=group,
            auto_wrap_policy=fsdp.wrap.CustomPolicy(lambda m: m in units),
            mixed_precision=fsdp.MixedPrecision(low, high),
            device_id=device,
            use_orig_params=True,  # torch.compile needs it
        )
    if key["strategy"] == "fsdp2":
        mesh = DeviceMesh.from_group(group, device.type)
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


# -- one case --------------------------------------------------------------------------------------


def train_reference(key: Key, device: torch.device) -> Reference | None:
    """One eager process with the batches of all ranks; None where the whole model does not fit."""
    ranks = max(1, key["world_size"])
    weights = [len(range(i, ranks, BATCHES)) / ranks for i in range(min(ranks, BATCHES))]
    try:
        return train_alone(*create(key, device, key["dtype"] == "bf16"), weights)
    except torch.OutOfMemoryError:
        return None


def build(
    bench: Benchmark, references: dict[Any, Any], start_s: float, key: Key, group: Group
) -> Workload:
    args = bench.args
    device, rank, dtype, backend = bench.job.device, bench.job.rank, key["dtype"], key["compiler"]
    name = "-".join(key[part] for part in ("model", "dtype", "strategy", "compiler"))
    if device.type == "cpu" and (dtype == "tf32" or backend == "cudagraphs"):
        raise ValueError("tf32 and cudagraphs need CUDA; try --dtype fp32 or --backends inductor")
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = dtype == "tf32"
    same = key["model"], dtype, key["world_size"]
    if rank == 0 and same not in references:
        references[same] = train_reference(key, device)
    wanted = share(references.get(same), group.control)

    counters.clear()
    memory = start_peak(device)
    low = dtype == "bf16" and key["strategy"] in ("none", "ddp")  # FSDP casts by itself
    model, batches, loss_of = create(key, device, low)
    model, batch = wrap(model, key, device, group.test), batches[rank % BATCHES]
    start_peak(device)  # the shards count, not the whole model that FSDP has cut them from
    if args.verbose:
        bench.print(f"# {name}\n{model}")
    compiled, optimizer = compile_by(backend, model), sgd(model, wanted.lr if wanted else 0.0)

    def step(update: bool = True) -> Tensor:
        loss = loss_of(compiled, batch)
        loss.backward()
        if update:
            optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    losses, times_s, graphs = list[Tensor](), list[float](), list[int]()
    for i in range(CHECKED_STEPS):
        bench.watchdog.phase(name, f"step {i + 1} (the first one compiles)")
        dist.barrier(group.control)
        times_s += time_block(lambda: losses.append(step()), 1, device)[0]
        graphs.append(counters["stats"]["unique_graphs"])
    optimizer.param_groups[0]["lr"] = 0.0  # costs the same, and the weights stay finite
    gib = peak(device, memory)

    def facts() -> Key:
        left = counters["graph_break"] + counters["unimplemented"]
        # the context manager in DDP's forward, a generator, breaks nothing
        breaks = sum(times for why, times in left.items() if "enerator" not in why)
        made = counters["stats"]["unique_graphs"]
        found: Key = {"graphs": made, "recompiles": made - graphs[0], "graph_breaks": breaks}
        found |= {"first_step_s": times_s[0], "first_steps_s": sum(times_s), "start_s": start_s}
        if args.profile:
            with profile() as profiler:
                time_block(step, 5, device)
            file = args.trace_file.with_stem(f"{args.trace_file.stem}-{name}-{rank}")
            file.parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(file))
        if args.torchviz:
            make_dot = importlib.import_module("torchviz").make_dot
            parameters = dict(model.named_parameters())
            graph = make_dot(loss_of(model, batch), parameters, show_attrs=True, show_saved=True)
            graph.save(f"torchviz-{name}-{rank}.dot")
        seen, peak_s = [float(loss) for loss in losses], peak_flops(device, dtype)
        return {"max": found | gib, "losses": seen, "wanted": wanted, "peak": peak_s}

    steps: dict[str, Callable[[], object]] = {"step": step}
    # two steps are timed in at least 6 rounds, each with an untimed iteration before
    if args.iters or share(times_s[-1], group.control) * 2 * 6 * 2 <= args.max_seconds:
        steps["fwd+bwd"] = partial(step, update=False)
    return Workload(steps, facts=facts)


# -- what rank 0 makes of it -----------------------------------------------------------------------


def derive(cases: dict[Any, Case], case: Case, facts: list[Any]) -> None:
    """Fill in the metrics and the check. cases: those before this one, of the same model."""
    m, key, first = case.metrics, case.key, facts[0]
    m |= step_metrics(case.samples_s["step"], len(facts) * (key["batch_size"] or 0))
    m |= {name: max(fact["max"][name] for fact in facts) for name in first["max"]}
    step_s, eager = m["step_time_p50_s"], cases.get((key["strategy"], "eager"))
    if "fwd+bwd" in case.samples_s:
        m["fwd_bwd_p50_s"] = float(np.median(np.max(case.samples_s["fwd+bwd"], axis=0)))
    if not key["batch_size"]:
        del m["samples_per_s"]  # torchbenchmark chooses the size
    if key["model"] in DECODERS:
        config = DECODERS[key["model"]]
        flop_per_s = key["batch_size"] * config.context * flops_per_token(config) / step_s
        m["tflops"] = flop_per_s / 1e12
        if all(fact["peak"] for fact in facts):
            m["mfu"] = flop_per_s / np.mean([fact["peak"] for fact in facts])
    for name, base in ("eager", eager), ("none", cases.get(("none", key["compiler"]))):
        if base:
            a, b = base.metrics["step_time_ci95_s"], m["step_time_ci95_s"]
            m[f"vs_{name}"] = base.metrics["step_time_p50_s"] / step_s
            m[f"vs_{name}_bounds"] = [a[0] / b[1], a[1] / b[0]] if a and b else None
    if eager and (gain_s := eager.metrics["step_time_p50_s"] - step_s) > 0:
        cost_s = m["start_s"] + m["first_steps_s"] - eager.metrics["first_steps_s"]
        m["payback_steps"] = max(0, math.ceil(cost_s / gain_s))
    if first["wanted"] is None:
        case.check = "skipped: the whole model does not fit on one device, to compare with"
        return
    problems, tolerance = [], TOLERANCES[key["dtype"]]
    for rank, fact in enumerate(facts):
        want = [row[rank % BATCHES] for row in first["wanted"].losses]
        name = f"the loss of rank {rank}"
        problems.append(compare_training(name, fact["losses"], want, tolerance))
    case.check = verdict(next(filter(None, problems), None))
    if not case.failed and not compare_training("", want[-1:], want[:1], tolerance):
        case.check = "skipped: the losses stay as they are: a wrong gradient would not show"


def name_of(case: Case) -> str:
    return f"{case.key['strategy']} {case.key['compiler']}"


def faster(name: str) -> Callable[[Case], str]:
    """A cell with a ratio of medians; `?` where their intervals do not tell them apart."""

    def cell(case: Case) -> str:
        low, high = case.metrics.get(f"{name}_bounds") or (0, math.inf)
        ratio = case.metrics.get(name)
        return f"{ratio:.2f}x{'?' if low <= 1 <= high else ' '}" if ratio else "-"

    return cell


COLUMNS: Columns = {
    "": name_of,
    "95% ci\nof p50": relative("step_time_ci95_rel"),
    **{f"p{q}\nsec/step": metric(f"step_time_p{q}_s", digits=4) for q in (50, 75, 90, 95)},
    "samples/s": metric("samples_per_s", digits=1),
    "vs\neager": faster("vs_eager"),
    "vs\nnone": faster("vs_none"),
}
COSTS: Columns = {
    "": name_of,
    "first\nstep (s)": metric("first_step_s"),
    "start of\nbackend (s)": metric("start_s"),
    "payback\n(steps)": metric("payback_steps", digits=0),
    "recom-\npiles": metric("recompiles", digits=0),
    "graphs": metric("graphs", digits=0),
    "graph\nbreaks": metric("graph_breaks", digits=0),
    "fwd+bwd\n(ms)": metric("fwd_bwd_p50_s", 1e3),
    "memory\n(GiB)": metric("memory_gib"),
    "tflops": metric("tflops", digits=3),
    "mfu\n(%)": metric("mfu", 100, 1),
}
NOTES = """
# ?: the intervals of the two medians do not tell them apart
# TORCH_LOGS=graph_breaks says where graphs break, TORCH_LOGS=recompiles why frames recompile"""


def main() -> int:
    args = parse_args()
    torch._dynamo.config.optimize_ddp = not args.dynamo_no_optimize_ddp
    if args.verbose:
        torch._logging.set_logs(graph_breaks=True, recompiles=True)
    with Benchmark("compile_sweep", args) as bench:
        job, references, start_s = bench.job, dict[Any, Any](), dict[str, float]()
        options = ("fsdp_wrap", "fsdp_checkpoint", "dynamo_no_optimize_ddp", "warm_cache")
        fixed = {name: getattr(args, name) for name in ("batch_size", *options)}
        fixed |= {"device": job.device.type, "backend": job.backend}
        caches: Any = contextlib.nullcontext if args.warm_cache else fresh_cache
        # imports, worker processes, a look at the compiler: for all ranks at once, not in a case
        for backend in [name for name in args.backends if name not in ("eager", "print")]:
            start = partial(compile_by(backend, torch.square), torch.ones(64, device=job.device))
            with contextlib.suppress(Exception), caches():  # what fails here fails its cases
                start_s[backend] = time_block(start, 1, job.device)[0][0]
        gc.freeze()  # what was imported: collections between cases need not look at it
        for model, dtype in itertools.product(args.models, args.dtype):
            title = f"{model}, batch size {args.batch_size or 'of the model'}, {dtype}"
            bench.begin_table(title, COLUMNS, ["fsdp2 dynamo_eager", "+-10.0%"])
            cases: dict[tuple[str, str], Case] = {}
            for strategy, compiler in itertools.product(args.strategies, args.backends):
                size = 0 if strategy == "none" else job.world_size
                key = dict(model=model, dtype=dtype, strategy=strategy, compiler=compiler)
                key |= {"world_size": size} | fixed
                work = partial(build, bench, references, start_s.get(compiler, 0.0), key)
                made, ranks = partial(derive, cases), range(max(1, size))
                with caches():
                    case = bench.measure(key, work, made, ranks)
                    torch.compiler.reset()  # it holds the model
                if case and not case.failed:
                    cases[strategy, compiler] = case
            if cases:
                bench.print(f"\nCost: {title}\n\n{render(COSTS, list(cases.values()))}")
            for case in cases.values():
                if case.check != "passed":
                    bench.print(f"# {name_of(case)}: {case.check}")
        bench.print(NOTES)
        gc.unfreeze()
    return bench.status


if __name__ == "__main__":
    sys.exit(record(main)())
