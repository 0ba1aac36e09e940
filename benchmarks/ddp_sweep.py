#!/usr/bin/env python3
"""How long does a training step take under DistributedDataParallel, and how far does it scale?

Times whole training steps (zero_grad, forward, loss, backward with gradient averaging, optimizer
step) of torchvision models on random images: `no ddp`, then 1, 2, 4, ... ranks of a node, then
whole nodes (`2M/8G`: 2 machines with 8 ranks each).

    step            the step; the slowest rank counts in each iteration
    local compute   the same step without averaging gradients (DDP's no_sync)
    alone           DDP's gradient buckets averaged by themselves, by the same hook
    exposed       = step - local compute: what DDP adds. It is communication that computing does
                    not hide, copies into and out of buckets, and what both take from computing
    late          = local compute of the slowest rank - of the median rank
    overlap       = 1 - exposed / alone
    efficiency    = step of one rank alone / step, timed in turns;   speed-up = ranks * efficiency
    ex/sec/dev    = batch size / step;     samples/s = ranks * batch size / step

    torchrun --nproc-per-node 2 benchmarks/ddp_sweep.py
    torchrun --nproc-per-node 8 benchmarks/ddp_sweep.py --json report.jsonl
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \\
        benchmarks/ddp_sweep.py --comm-hook none,bf16 --bucket-size 25,100

It asks what PyTorch's benchmarks/distributed/ddp/benchmark.py asks, and is written anew.
BSD-3-Clause.
"""

import argparse
import inspect
import itertools
import math
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    powerSGD_hook,
    quantization_hooks,
)
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import cli
from common.benchmark import Benchmark, Key, Planned
from common.check import compare_replicas, digest, verdict
from common.environment import count_of
from common.groups import Group, Job
from common.memory import peak, start_peak
from common.report import Case, show_seconds
from common.stats import Times, breakdown, fastest, training_metrics
from common.table import Columns, ends, metric, percentile_columns, relative, render
from common.timing import Workload
from common.workloads.precision import PRECISION, name_precision, set_precision

CUDA_MODELS = ["resnet50", "resnet101", "resnext50_32x4d", "resnext101_32x8d"]
CPU_MODELS = ["resnet18", "mobilenet_v3_small"]  # for a first look on a laptop, at a small size
SHARED_FLAGS = ("channels_last", "gradient_as_bucket_view", "static_graph")
# DDP rebuilds its buckets in the second or third step, and logs their sizes after it; PowerSGD
# compresses from the third step on
SETTLING_STEPS = 4
FOOTER = """
# exposed: what DDP adds to a step; a median of differences within rounds, not the difference
# of the two medians before it. overlap: - where exposed may be 0 (its interval holds 0);
# below 0: communication costs more inside the step than alone. efficiency: timed in turns within
# each case. memory: reserved by torch on CUDA, growth of the resident set on the CPU"""


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = cli.Parser(__doc__)
    add, list_of, positive_int = parser.add_argument, cli.list_of, cli.positive_int
    models = cli.By(CUDA_MODELS, CPU_MODELS)
    text = "names of torchvision's classifiers (default: %(default)s)"
    add("--models", "--model", type=list_of(str), default=models, metavar="NAME", help=text)
    batch = "samples of a rank in a step (default: %(default)s)"
    add("--batch-size", type=positive_int, default=cli.By(32, 8), metavar="N", help=batch)
    pixels = "(default: %(default)s)"
    add("--image-size", type=positive_int, default=cli.By(224, 64), metavar="PX", help=pixels)
    sizes = "ranks beside `no ddp` (default: 1, 2, 4, ... of one node, then of nodes, and all)"
    sizes += "; nodes: 1, 2, 3, ... whole nodes"
    add("--world-sizes", type=list_of(ranks_or_nodes), metavar="N", help=sizes)
    cap = "DDP's bucket_cap_mb (default: 25)"
    add("--bucket-size", type=list_of(cli.positive_float), default=[25.0], metavar="MB", help=cap)
    hooks = f"{', '.join(HOOKS)} (default: none, DDP's own)"
    add("--comm-hook", type=list_of(str, tuple(HOOKS)), default=["none"], metavar="H", help=hooks)
    dtypes = "default (as torch is: TF32 in convolutions, not in products), fp32, tf32, autocast "
    dtypes += "to bf16, or to fp16 with a GradScaler (default: default)"
    all_dtypes = (*PRECISION, *AUTOCAST)
    add("--dtype", type=list_of(str, all_dtypes), default=["default"], metavar="D", help=dtypes)
    add("--channels-last", action="store_true", help="images and weights in NHWC")
    add("--gradient-as-bucket-view", action="store_true", help="DDP's option")
    add("--static-graph", action="store_true", help="DDP's option")
    only = "time the step alone, in a quarter of the time: then there is no efficiency"
    add("--no-breakdown", action="store_true", help=only)
    add("--strict-topology", action="store_true", help="refuse to run on nodes that differ")
    cli.add_common_flags(parser)
    args = parser.parse_args(argv)
    import torchvision  # takes seconds, so it comes after the first lines of output

    if "tf32" in args.dtype and not cli.on_cuda(args.device):
        parser.error("tf32 is a mode of CUDA's tensor cores; try --dtype fp32 or bf16")
    classifiers = torchvision.models.list_models(module=torchvision.models)
    for name in set(args.models).difference(classifiers):
        hint = cli.suggest(name, classifiers) or "; e.g. resnet50"
        parser.error(f"unknown model '{name}'{hint}")
    if "inception_v3" in args.models and args.image_size < 299:
        parser.error(f"inception_v3 takes --image-size 299 or more, got {args.image_size}")
    return args


def ranks_or_nodes(text: str) -> int | str:
    """An entry of --world-sizes."""
    return text if text == "nodes" else int(cli.positive_int(text))


# -- the workload: plain torch ---------------------------------------------------------------------
# [core]

# Their own initialisation draws every weight by scipy, which takes a minute and warns.
MODEL_OPTIONS = {name: {"init_weights": False} for name in ("googlenet", "inception_v3")}
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
HOOKS: dict[str, Any] = {  # how DDP averages gradients
    "none": None,  # DDP's own all-reduce, in C++
    "allreduce": default_hooks.allreduce_hook,
    "fp16": default_hooks.fp16_compress_hook,
    "bf16": default_hooks.bf16_compress_hook,
    "powersgd": powerSGD_hook.powerSGD_hook,
    "quantize_per_tensor": quantization_hooks.quantization_pertensor_hook,
    "quantize_per_channel": quantization_hooks.quantization_perchannel_hook,
}
# these wait for their communication within the backward pass
INLINE_WAITS = ("powersgd", "quantize_per_tensor", "quantize_per_channel")
Step = Callable[[], object]


def training_step(model: nn.Module, images: Tensor, targets: Tensor, lr: float, dtype: str) -> Step:
    """One training step. images: [batch, 3, H, W]; targets: [batch]."""
    device = images.device.type
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=1e-4)
    scaler = torch.amp.GradScaler(device, enabled=dtype == "fp16")

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(device, AUTOCAST.get(dtype), enabled=dtype in AUTOCAST):
            loss = loss_of(model(images), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return step


def loss_of(outputs: Any, targets: Tensor) -> Tensor:
    """The loss. googlenet and inception_v3 also return the outputs of auxiliary heads, which count
    0.3 each (Szegedy et al. 2014, arXiv:1409.4842)."""
    if isinstance(outputs, Tensor):
        return nn.functional.cross_entropy(outputs, targets)
    loss, *auxiliary = [nn.functional.cross_entropy(output, targets) for output in outputs]
    return loss + 0.3 * torch.stack(auxiliary).sum()


def make_model(name: str, device: torch.device, layout: torch.memory_format) -> nn.Module:
    import torchvision  # not before: it takes seconds

    model = torchvision.models.get_model(name, **MODEL_OPTIONS.get(name, {}))
    return model.to(device, memory_format=layout)


def make_batch(
    samples: int, pixels: int, device: torch.device, layout: torch.memory_format
) -> tuple[Tensor, Tensor]:
    """Random images, [samples, 3, pixels, pixels], and random targets, [samples]."""
    images = torch.rand(samples, 3, pixels, pixels, device=device).to(memory_format=layout)
    return images, torch.randint(1000, (samples,), device=device)


def wrap(
    model: nn.Module, group: dist.ProcessGroup, bucket_mb: float, **options: bool
) -> DistributedDataParallel:
    """The model under DDP. In a step no rank sends its buffers: gradients alone are sent.

    options: static_graph, gradient_as_bucket_view.
    """
    buffers = "forward_sync_buffers"  # an older torch calls it broadcast_buffers
    if buffers not in inspect.signature(DistributedDataParallel).parameters:
        buffers = "broadcast_buffers"
    settings: dict[str, Any] = {buffers: False, **options}
    return DistributedDataParallel(model, process_group=group, bucket_cap_mb=bucket_mb, **settings)


class BucketHook:
    """Averages the gradient buckets of DDP: each when DDP hands it over, or all by themselves.

    It must not refer to the model. DDP's C++ part refers to the hook, and the garbage collector
    does not see a cycle through C++: the model would never be freed.
    """

    def __init__(self, name: str, group: Any) -> None:
        self.function = HOOKS[name]
        self.state = group
        if name == "powersgd":
            self.state = powerSGD_hook.PowerSGDState(group, 1, start_powerSGD_iter=2)
        self.buckets: list[dist.GradBucket] = []  # of the newest backward pass

    def average(self, state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """DDP calls it for each bucket of a backward pass. state: not used."""
        if bucket.index() == 0:  # a new backward pass
            self.buckets.clear()
        self.buckets.append(bucket)
        return self.function(self.state, bucket)

    def average_alone(self) -> None:
        """Average the newest buckets again, all at once, and wait."""
        futures = [self.function(self.state, bucket) for bucket in self.buckets]
        for future in futures:
            future.wait()


def register_hook(name: str, ddp: DistributedDataParallel) -> BucketHook | None:
    """Register a hook with DDP. None where DDP averages by itself.

    Raises ValueError for a hook that would hang.
    """
    group = ddp.process_group
    if name in INLINE_WAITS and dist.get_backend(group) == "gloo":
        raise ValueError(f"hook {name} deadlocks gloo (pytorch/pytorch#48478); it needs nccl")
    if name == "none":
        return None
    hook = BucketHook(name, group)
    ddp.register_comm_hook(None, hook.average)
    return hook


def all_reduce_alone(ddp: DistributedDataParallel) -> Step:
    """A step that averages as DDP does without a hook: all-reduces of buckets of the same sizes.

    DDP shows these buckets to nobody, so zeros take their place.
    """
    # private: the text of DDP's log, "1000, 400"; seen to work with torch 2.11, 2.14 and 2.15
    logged = ddp._get_ddp_logging_data()
    sizes = str(logged.get("rebuilt_bucket_sizes") or logged["bucket_sizes"]).split(", ")
    buckets = [torch.zeros(int(size) // 4, device=ddp.device) for size in sizes]
    group = ddp.process_group

    def average_alone() -> None:
        reductions = [dist.all_reduce(bucket, group=group, async_op=True) for bucket in buckets]
        for reduction in reductions:
            reduction.wait()

    return average_alone


def local_step(ddp: DistributedDataParallel, images: Tensor, targets: Tensor, dtype: str) -> Step:
    """A training step that averages no gradients.

    Its learning rate of 0 costs the same as another one, and leaves the replicas equal.
    """
    step = training_step(ddp, images, targets, 0.0, dtype)

    def local_compute() -> None:
        with ddp.no_sync():
            step()

    return local_compute


# [/core]
# -- a case ----------------------------------------------------------------------------------------


class Facts(NamedTuple):
    """What a rank says of a case after the timing."""

    digest: str  # of the parameters
    memory: dict[str, float]  # metrics, in GiB


def build(job: Job, key: Key, group: Group) -> Workload:
    """What a rank measures in a case: the step and, for a breakdown, the parts that it is made of.

    Memory is read before the breakdown, which needs memory of its own.
    """
    dtype, device = key["dtype"], job.device
    layout = torch.channels_last if key["channels_last"] else torch.contiguous_format
    set_precision(dtype)
    memory_before = start_peak(device)
    torch.manual_seed(job.rank)
    model = make_model(key["model"], device, layout)
    images, targets = make_batch(key["batch_size"], key["image_size"], device, layout)
    hook = None
    if key["ddp"]:
        options = {name: key[name] for name in ("static_graph", "gradient_as_bucket_view")}
        model = wrap(model, group.test, key["bucket_size_mb"], **options)
        hook = register_hook(key["comm_hook"], model)
    step = training_step(model, images, targets, 1e-3, dtype)
    for _ in range(SETTLING_STEPS):
        step()
    memory = peak(device, memory_before)

    parts: dict[str, Step | None] = {}  # None: this rank waits while the first one does it
    if isinstance(model, DistributedDataParallel) and key["breakdown"]:
        parts["local compute"] = local_step(model, images, targets, dtype)
        if key["ranks"] > 1:
            parts["alone"] = hook.average_alone if hook else all_reduce_alone(model)
            # no second model: the one within DDP, at a rate that leaves the replicas equal
            one_rank = training_step(model.module, images, targets, 0.0, dtype)
            parts["no ddp"] = one_rank if dist.get_rank(group.test) == 0 else None
    return Workload(
        step,
        parts,
        compared=("local compute",) if "local compute" in parts else (),  # exposed's interval
        facts=lambda: Facts(digest(model), memory),
        launches=dtype != "fp16",  # fp16's GradScaler waits for the device in each step
    )


def derive(case: Case, times: Times, facts: list[Facts]) -> None:
    """Fill in the metrics and the check, on rank 0."""
    metrics = case.metrics
    metrics |= training_metrics(times, len(case.ranks) * case.key["batch_size"])
    if "local compute" in times:
        metrics |= breakdown(times, "local compute", "alone" if "alone" in times else None)
    if "no ddp" in times:
        metrics["efficiency"] = times.ratio("no ddp")
    case.check = verdict(compare_replicas([fact.digest for fact in facts], case.ranks))
    for name in facts[0].memory:
        metrics[name] = max(fact.memory[name] for fact in facts)


# -- what is printed -------------------------------------------------------------------------------

STEPS: Columns = {
    "": lambda case: case.name,
    "95% ci\nof p50": relative("step_s"),
    **percentile_columns("step", "sec/iter", "ex/sec/dev", lambda case: case.key["batch_size"]),
}
BREAKDOWN: Columns = {
    "": lambda case: case.name,
    "samples/s": metric("samples_per_s", digits=1),
    "efficiency\n(%)": metric("efficiency", 100, 1),
    "95% ci\n(%)": ends("efficiency", 100, 1),
    "step\n(ms)": metric("step_s", 1e3),
    "local\ncompute\n(ms)": metric("local_compute_s", 1e3),
    "exposed\ncommun.\n(ms)": metric("exposed_s", 1e3),
    "95% ci\n(ms)": ends("exposed_s", 1e3, 1),
    "commun.\nalone\n(ms)": metric("communication_s", 1e3),
    "overlap\n(%)": metric("overlap", 100, 0),
    "late\n(ms)": metric("late_s", 1e3),
    "slowest\nrank": metric("straggler_rank", digits=0),
    "memory\n(GiB)": metric("memory_gib"),
}


def answer(cases: list[Case]) -> list[str]:
    """How the most ranks compare with one rank alone, and what DDP adds to a step."""
    model = f"{cases[0].key['model']}, {cases[0].key['dtype']}"
    with_ddp = [case for case in cases if case.key["ddp"]]
    if not with_ddp:
        return [f"{model}: a step of one rank takes {cases[0].metrics['step_s']}"]
    ranks = max(len(case.ranks) for case in with_ddp)
    largest = [case for case in with_ddp if len(case.ranks) == ranks]
    first = min(largest, key=lambda case: case.metrics["step_s"].value)
    sentences = [f"{model}: {scaling(first)}"]
    if len(largest) > 1:
        settings = {setting_of(case.key): case.metrics["step_s"] for case in largest}
        sentences.append(f"{model}: {fastest(settings)}")
    return sentences


def setting_of(key: Key) -> str:
    return f"hook {key['comm_hook']} with {key['bucket_size_mb']:g} MB"


def scaling(case: Case) -> str:
    """`DDP on 2 ranks trains 1.24 times (1.10 to 1.39) as fast as one rank alone; DDP adds
    16.2 ms (11.3 to 22.0) to a step, which takes 76.1 ms`."""
    metrics, on_ranks = case.metrics, f"DDP on {count_of(len(case.ranks), 'rank')}"
    step = metrics["step_s"]
    sentence = f"{on_ranks} takes {step} a step"
    if "efficiency" in metrics:
        speed = metrics["efficiency"] * len(case.ranks)
        sentence = f"{on_ranks} trains {speed.times()} as fast as one rank alone"
        if speed.may_be(1):
            sentence = f"{on_ranks} and one rank alone cannot be told apart: {speed.times()}"
    if "exposed_s" not in metrics:
        return sentence
    adds = f"DDP adds {metrics['exposed_s'].beside(step.value)} to a step"
    return f"{sentence}; {adds}, which takes {show_seconds(step.value)}"


# -- which cases -----------------------------------------------------------------------------------


def world_sizes(world_size: int, node_ranks: int) -> list[int]:
    """1, 2, 4, ... ranks of one node, then 1, 2, 4, ... nodes, and all ranks."""
    powers = [2**i for i in range(world_size.bit_length())]
    within_a_node = [n for n in powers if n < node_ranks]
    nodes = [n * node_ranks for n in powers]
    sizes = {n for n in within_a_node + nodes if n < world_size}
    return sorted(sizes | {world_size})


def chosen_sizes(chosen: list[Any] | None, world_size: int, node_ranks: int) -> list[int]:
    """How many ranks each case has. chosen: --world-sizes; node_ranks: the ranks of a node."""
    if not chosen:
        return world_sizes(world_size, node_ranks)
    sizes = {size for size in chosen if size != "nodes"}
    if "nodes" in chosen:
        sizes |= {*range(node_ranks, world_size, node_ranks), world_size}
    return sorted(sizes)


def name_of(ranks: int, node_ranks: int) -> str:
    """`1M/2G`: 1 machine with 2 ranks. `2M/8G (16)`: 8 on each of 2 machines. Uneven: `2M/12G in
    all`."""
    machines = math.ceil(ranks / node_ranks)
    if machines > 1 and ranks % node_ranks:
        return f"{machines}M/{ranks}G in all"
    return f"{machines}M/{min(ranks, node_ranks)}G" + (f" ({ranks})" if machines > 1 else "")


def title_of(model: str, dtype: str, args: argparse.Namespace, device: torch.device) -> str:
    """What all cases of a table share."""
    precision = name_precision(dtype, device)
    parts = [model, f"batch size {args.batch_size}", f"{args.image_size} px", precision]
    if len(args.bucket_size) == 1:
        parts.append(f"buckets of {args.bucket_size[0]:g} MB")
    if len(args.comm_hook) == 1 and args.comm_hook != ["none"]:
        parts.append(f"hook {args.comm_hook[0]}")
    parts += [name.replace("_", " ") for name in SHARED_FLAGS if getattr(args, name)]
    return ", ".join(parts)


def plan(args: argparse.Namespace, job: Job) -> dict[str, list[Planned]]:
    """The title of each table (a model and a dtype), and its cases: `no ddp` comes first."""
    node_ranks = job.local_world_size
    fixed = {name: getattr(args, name) for name in ("batch_size", "image_size", *SHARED_FLAGS)}
    fixed["breakdown"] = not args.no_breakdown
    sizes = chosen_sizes(args.world_sizes, job.world_size, node_ranks)
    tables = {}
    for model, dtype in itertools.product(args.models, args.dtype):
        key = {"model": model, "dtype": dtype, "ddp": False, "bucket_size_mb": None}
        key |= {"comm_hook": None, **fixed}
        cases: list[Planned] = [("no ddp", 1, key)]
        for ranks, bucket_mb, hook in itertools.product(sizes, args.bucket_size, args.comm_hook):
            name = name_of(ranks, node_ranks)
            name += f" {bucket_mb:g}MB" if len(args.bucket_size) > 1 else ""
            name += f" {hook}" if len(args.comm_hook) > 1 else ""
            chosen = {"ddp": True, "bucket_size_mb": bucket_mb, "comm_hook": hook}
            cases.append((name, ranks, key | chosen))
        tables[title_of(model, dtype, args, job.device)] = cases
    return tables


def main() -> int:
    args = parse_args()
    with Benchmark("ddp_sweep", args) as bench:
        environment, job = bench.report.environment, bench.job
        largest = chosen_sizes(args.world_sizes, job.world_size, job.local_world_size)[-1]
        if largest > job.world_size:
            bench.refuse(f"--world-sizes {largest} is more than the {job.world_size} ranks")
        if args.strict_topology and environment["differences"]:
            bench.refuse(f"--strict-topology: {environment['differences'][0]}")
        tables = plan(args, job)
        bench.announce(tables)
        for title, cases in tables.items():
            with bench.begin_table(title, STEPS, answer) as table:
                for name, ranks, key in cases:
                    bench.measure(key, name, partial(build, job), derive, ranks=range(ranks))
            if table.passed:
                bench.print(f"\nWhere the time goes: {title}\n\n{render(BREAKDOWN, table.passed)}")
        if not args.no_breakdown:
            bench.print(FOOTER)
    return bench.status


if __name__ == "__main__":
    sys.exit(record(main)())
