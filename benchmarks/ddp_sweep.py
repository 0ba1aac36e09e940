#!/usr/bin/env python3
"""How long does a training step take under DistributedDataParallel, and how far does it scale?

Times whole training steps (zero_grad, forward, loss, backward with gradient averaging, optimizer
step) of torchvision models over a growing set of ranks: `no ddp`, then 1, 2, 4, ... ranks of one
node, then whole nodes (`2M/8G`: 2 machines with 8 ranks each). Loading data is not timed: each rank
trains on one batch of random images. Three things are timed in alternating blocks:

    step            the step; of each iteration the slowest rank counts
    local compute   the same step without averaging gradients (DDP's no_sync)
    alone           DDP's gradient buckets averaged by themselves, by the same hook
    exposed       = step - local compute: communication that computing does not hide. A late
                    rank is on both sides and cancels out
    late          = local compute of the slowest rank - of the median rank
    overlap       = 1 - exposed / alone;   efficiency = step of `no ddp` / step
    ex/sec/dev    = batch size / step;     samples/s = ranks * batch size / step

    torchrun --nproc-per-node 2 benchmarks/ddp_sweep.py
    torchrun --nproc-per-node 8 benchmarks/ddp_sweep.py --json report.jsonl
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \\
        benchmarks/ddp_sweep.py --comm-hook none,bf16 --bucket-size 25,100

Does what PyTorch's benchmarks/distributed/ddp/benchmark.py did (same models, step and labels),
written anew. BSD-3-Clause. docs/ddp_sweep.md shows how to read the tables.
"""

import argparse
import contextlib
import inspect
import itertools
import math
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torchvision
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
    powerSGD_hook,
    quantization_hooks,
)
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.benchmark import Benchmark, Workload
from common.check import compare_replicas, digest, verdict
from common.cli import (
    Parser,
    add_common_flags,
    list_of,
    positive_float,
    positive_int,
    refuse,
    suggest,
)
from common.dist import Group, Job
from common.memory import peak, start_peak
from common.report import Case
from common.stats import breakdown_metrics, step_metrics
from common.table import Columns, half_width, metric, percentile_columns, relative, render

CUDA_MODELS = ["resnet50", "resnet101", "resnext50_32x4d", "resnext101_32x8d"]
CPU_MODELS = ["resnet18", "mobilenet_v3_small"]  # for a first look on a laptop, at a small size
DTYPES = ("fp32", "tf32", "bf16", "fp16")

# each hook, and how far an averaged gradient may be off, relative to the largest one, by its
# precision: fp16 rounds to 11 bits and bf16 to 8, each rank's share and then the sum; the quantised
# ones have 255 levels; PowerSGD projects on one direction, which the check's gradients have
HOOKS: dict[str, tuple[Any, float]] = {
    "none": (None, 1e-5),  # DDP's own all-reduce, in C++
    "allreduce": (default_hooks.allreduce_hook, 1e-5),
    "fp16": (default_hooks.fp16_compress_hook, 2**-9),
    "bf16": (default_hooks.bf16_compress_hook, 2**-6),
    "powersgd": (powerSGD_hook.powerSGD_hook, 1e-3),
    "quantize_per_tensor": (quantization_hooks.quantization_pertensor_hook, 2 / 255),
    "quantize_per_channel": (quantization_hooks.quantization_perchannel_hook, 2 / 255),
    "noop": (debugging_hooks.noop_hook, math.inf),  # it does not average
}
# they wait for one collective inside the callback of another, on the threads that gloo needs to
# finish it: pytorch/pytorch#48478
INLINE_WAITS = ("powersgd", "quantize_per_tensor", "quantize_per_channel")
# DDP rebuilds its buckets in the second step (the third with static_graph), and logs them after it
SETTLING_STEPS = 4


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument
    models = f"a list (default: {','.join(CUDA_MODELS)} on CUDA, {','.join(CPU_MODELS)} on the CPU)"
    add("--models", "--model", type=list_of(str), metavar="NAME", help=models)
    add("--batch-size", type=positive_int, metavar="N", help="of a rank (default: 32, CPU 8)")
    add("--image-size", type=positive_int, metavar="PX", help="(default: 224, CPU 64)")
    sizes = "ranks beside `no ddp` (default: 1, 2, 4, ... of one node, then of nodes, and all)"
    add("--world-sizes", type=list_of(positive_int), metavar="N", help=sizes)
    sizes = "DDP's bucket_cap_mb (default: 25)"
    add("--bucket-size", type=list_of(positive_float), default=[25.0], metavar="MB", help=sizes)
    hooks = f"how gradients are averaged, of {', '.join(HOOKS)} (default: none, DDP's own)"
    add("--comm-hook", type=list_of(str, tuple(HOOKS)), default=["none"], metavar="H", help=hooks)
    dtypes = "fp32, tf32, autocast to bf16, or to fp16 with a GradScaler (default: fp32)"
    add("--dtype", type=list_of(str, DTYPES), default=["fp32"], metavar="DTYPE", help=dtypes)
    add("--channels-last", action="store_true", help="images and weights in NHWC")
    add("--gradient-as-bucket-view", action="store_true", help="DDP's option")
    add("--static-graph", action="store_true", help="DDP's option")
    add("--no-breakdown", action="store_true", help="time the step alone, in a third of the time")
    add("--strict-topology", action="store_true", help="refuse to run on nodes that differ")
    add("--bind-cores", action="store_true", help="bind each rank to its share of the cores")
    add_common_flags(parser)
    args = parser.parse_args(argv)
    cuda = torch.cuda.is_available() and args.device != "cpu"
    args.models = args.models or (CUDA_MODELS if cuda else CPU_MODELS)
    args.batch_size = args.batch_size or (32 if cuda else 8)
    args.image_size = args.image_size or (224 if cuda else 64)
    known = torchvision.models.list_models(module=torchvision.models)  # those that classify
    for name in args.models:
        if name not in known:
            refuse(f"unknown model '{name}'{suggest(name, known) or '; e.g. resnet50'}")
    return args


# -- the workload: plain torch ---------------------------------------------------------------------


def training_step(
    model: nn.Module, images: torch.Tensor, targets: torch.Tensor, lr: float, dtype: str
) -> Callable[[], None]:
    """One training step. images: [batch, 3, H, W]; targets: [batch]."""
    device = images.device.type
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=1e-4)
    scaler = torch.amp.GradScaler(device, enabled=dtype == "fp16")
    loss_fn = nn.CrossEntropyLoss()

    def step() -> None:
        optimizer.zero_grad()
        with autocast(device, dtype):
            loss = loss_fn(model(images), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return step


def autocast(device: str, dtype: str) -> contextlib.AbstractContextManager[object]:
    low = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(dtype)
    return torch.autocast(device, low) if low else contextlib.nullcontext()


def wrap(
    model: nn.Module, bucket_mb: float, args: argparse.Namespace, group: dist.ProcessGroup
) -> DistributedDataParallel:
    names = inspect.signature(DistributedDataParallel).parameters
    # broadcast_buffers has another name since torch 2.15
    buffers = "forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers"
    options: dict[str, Any] = {
        "bucket_cap_mb": bucket_mb,
        "gradient_as_bucket_view": args.gradient_as_bucket_view,
        "static_graph": args.static_graph,
        buffers: False,
    }
    return DistributedDataParallel(model, process_group=group, **options)


def register_hook(name: str, ddp: DistributedDataParallel) -> Callable[[], None]:
    """Register a hook. Returns a function that averages the model's gradient buckets alone.

    It sends all of them at once, as the backward pass does. Call it after SETTLING_STEPS.
    """
    hook, group = HOOKS[name][0], ddp.process_group
    if name in INLINE_WAITS and dist.get_backend(group) == "gloo":
        raise ValueError(f"hook {name} deadlocks gloo (pytorch/pytorch#48478); it needs nccl")
    if hook is None:
        zeros: list[torch.Tensor] = []

        def all_reduce_alone() -> None:
            if not zeros:
                logged = ddp._get_ddp_logging_data()
                sizes = str(logged.get("rebuilt_bucket_sizes") or logged["bucket_sizes"])  # bytes
                device = next(ddp.parameters()).device
                zeros.extend(torch.zeros(int(n) // 4, device=device) for n in sizes.split(", "))
            for work in [dist.all_reduce(z, group=group, async_op=True) for z in zeros]:
                work.wait()

        return all_reduce_alone
    state: Any = group
    if name == "powersgd":
        state = powerSGD_hook.PowerSGDState(group, 1, start_powerSGD_iter=2)
    buckets: dict[int, dist.GradBucket] = {}

    def remember(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        if bucket.index() == 0:
            buckets.clear()  # the buckets of the first steps were others
        buckets[bucket.index()] = bucket
        return hook(state, bucket)

    ddp.register_comm_hook(state, remember)

    def alone() -> None:
        for future in [hook(state, bucket) for _, bucket in sorted(buckets.items())]:
            future.wait()

    return alone


def build(key: dict[str, Any], args: argparse.Namespace, job: Job, group: Group) -> Workload:
    """What a rank measures in a case: the step, and the parts that it is made of."""
    if key["dtype"] == "tf32" and job.device.type != "cuda":
        raise ValueError("tf32 is a mode of CUDA's tensor cores; try --dtype fp32 or bf16")
    torch.set_float32_matmul_precision("high" if key["dtype"] == "tf32" else "highest")
    if key["comm_hook"]:
        check_hook(key, args, job.device, group.test)
    memory = start_peak(job.device)
    torch.manual_seed(job.rank)
    layout = torch.channels_last if args.channels_last else torch.contiguous_format
    model = torchvision.models.get_model(key["model"], weights=None).to(job.device)
    model = model.to(memory_format=layout)
    images = torch.rand(args.batch_size, 3, args.image_size, args.image_size, device=job.device)
    images = images.to(memory_format=layout)
    targets = torch.randint(1000, (args.batch_size,), device=job.device)
    steps: dict[str, Callable[[], object]]
    if not key["comm_hook"]:  # `no ddp`
        steps = {"step": training_step(model, images, targets, 1e-3, key["dtype"])}
    else:
        ddp = wrap(model, key["bucket_size_mb"], args, group.test)
        alone = register_hook(key["comm_hook"], ddp)
        steps = {"step": training_step(ddp, images, targets, 1e-3, key["dtype"])}
    for _ in range(SETTLING_STEPS):
        steps["step"]()
    facts = peak(job.device, memory)  # before the breakdown, which needs memory of its own
    if key["comm_hook"] and not args.no_breakdown:
        # a learning rate of 0 costs the same, and leaves the replicas equal
        local_step = training_step(ddp, images, targets, 0.0, key["dtype"])

        def local_compute() -> None:
            with ddp.no_sync():
                local_step()

        steps["local compute"] = local_compute
        if key["world_size"] > 1 and key["comm_hook"] != "noop":
            steps["alone"] = alone
    return Workload(steps, facts=lambda: facts | {"digest": digest(model)})


# -- is a hook's average right? --------------------------------------------------------------------


def check_hook(
    key: dict[str, Any], args: argparse.Namespace, device: torch.device, group: dist.ProcessGroup
) -> None:
    """Raise ValueError where the gradients that this hook averages are not the average.

    The reference is made by this process alone: the gradients of the batch of each rank, one after
    the other. The rows of a batch have the same input and other targets, so a weight's gradient is
    a matrix of rank one, which PowerSGD of rank one must reproduce.
    """
    name, tolerance = key["comm_hook"], HOOKS[key["comm_hook"]][1]

    def backward(model: nn.Module, rank: int) -> list[torch.Tensor]:
        model.zero_grad()
        inputs = torch.linspace(-1, 1, 96, device=device).repeat(4, 1)
        targets = (torch.arange(4, device=device) * 5 + rank * 3) % 16
        with autocast(device.type, key["dtype"]):
            loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        return [p.grad.double() for p in model.parameters() if p.grad is not None]

    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(96, 96), nn.Tanh())]
    model = nn.Sequential(*layers, nn.Linear(96, 16)).to(device)
    world_size = dist.get_world_size(group)
    each = [backward(model, rank) for rank in range(world_size)]
    ddp = wrap(model, 0.05, args, group)  # several buckets
    register_hook(name, ddp)
    for _ in range(SETTLING_STEPS):  # PowerSGD compresses from the third step on
        got = backward(ddp, dist.get_rank(group))
    largest = max(float(g.abs().max()) for gradients in each for g in gradients)
    wanted = [torch.stack(same).mean(0) for same in zip(*each, strict=True)]
    off = [float((a - b).abs().max()) / largest for a, b in zip(got, wanted, strict=True)]
    error = max(x if math.isfinite(x) else math.inf for x in off)
    if error > tolerance:
        raise ValueError(
            f"averaged gradients are off by {error:.2g} of the largest; the precision of hook "
            f"{name} explains {tolerance:.2g}"
        )


# -- what rank 0 makes of it -----------------------------------------------------------------------


def derive(base: Case | None, batch_size: int, case: Case, facts: list[dict[str, Any]]) -> None:
    """Fill in the metrics and the check. base: the case of `no ddp`."""
    samples = {name: np.array(rows) for name, rows in case.samples_s.items()}
    m = case.metrics
    m |= step_metrics(samples["step"], len(case.ranks) * batch_size)
    if base and "step_time_p50_s" in base.metrics:
        m["efficiency"] = base.metrics["step_time_p50_s"] / m["step_time_p50_s"]
    if "local compute" in samples:
        alone = samples.get("alone")
        m |= breakdown_metrics(samples["step"], samples["local compute"], alone, case.rounds)
    for name in facts[0]:
        if name != "digest":
            m[name] = max(fact[name] for fact in facts)
    if case.key["comm_hook"] == "noop":
        case.check = "skipped: the noop hook does not average gradients"
    else:
        case.check = verdict(compare_replicas([fact["digest"] for fact in facts], case.ranks))


def columns(args: argparse.Namespace) -> Columns:
    """The first table: how long a step takes."""
    return {
        "": partial(name_of, args=args),
        "95% ci\nof p50": relative("step_time_ci95_rel"),
        **percentile_columns("step_time", "sec/iter", "ex/sec/dev", lambda c: c.key["batch_size"]),
    }


def why_columns(args: argparse.Namespace, job: Job) -> Columns:
    """The second table: where the time goes."""
    memory = "max_reserved" if job.device.type == "cuda" else "RSS growth"
    timed: Columns = {
        "": partial(name_of, args=args),
        "samples/s": metric("samples_per_s", digits=1),
        "efficiency\n(%)": metric("efficiency", 100, 1),
        "step\n(ms)": metric("step_time_p50_s", 1e3),
    }
    if not args.no_breakdown:
        timed |= {
            "local\ncompute\n(ms)": metric("local_compute_p50_s", 1e3),
            "exposed\ncommun.\n(ms)": metric("exposed_communication_s", 1e3),
            "95% ci\n+-(ms)": half_width("exposed_communication_ci95_s", 1e3),
            "commun.\nalone\n(ms)": metric("communication_p50_s", 1e3),
            "overlap\n(%)": metric("overlap", 100, 0),
            "late\n(ms)": metric("late_s", 1e3),
            "slowest\nrank": slowest_rank,
        }
    return timed | {f"{memory}\n(GiB)": metric("memory_gib")}


def slowest_rank(case: Case) -> str:
    rank = case.metrics.get("straggler_rank")
    return "-" if rank is None else f"{rank}: {case.metrics['straggler_factor']:.2f}x"


def name_of(case: Case, args: argparse.Namespace) -> str:
    """The set of ranks, and what else tells the case from its neighbours."""
    key, parts = case.key, [case.key["label"]]
    if key["comm_hook"] and len(args.bucket_size) > 1:
        parts.append(f"{key['bucket_size_mb']:g}MB")
    if key["comm_hook"] and len(args.comm_hook) > 1:
        parts.append(key["comm_hook"])
    return " ".join(parts)


# -- the sweep -------------------------------------------------------------------------------------


def world_sizes(world_size: int, node: int) -> list[int]:
    """1, 2, 4, ... ranks of one node, then 1, 2, 4, ... nodes, and the whole world."""
    sizes = {world_size, min(node, world_size)}
    sizes |= {2**i for i in range(node.bit_length()) if 2**i <= min(node, world_size)}
    sizes |= {node * 2**i for i in range(world_size.bit_length()) if node * 2**i <= world_size}
    return sorted(sizes)


def label_of(world_size: int, node: int) -> str:
    """`2M/8G`: 2 machines with 8 ranks each. Uneven: `2M/12G in all`."""
    machines = -(-world_size // node)
    ranks = min(world_size, node) if world_size % node == 0 or machines == 1 else world_size
    return f"{machines}M/{ranks}G" + (" in all" if ranks > node else "")


def plan(args: argparse.Namespace, job: Job, node: int) -> list[dict[str, Any]]:
    """The key of each case of one model and dtype, small sets of ranks first."""
    options = ("batch_size", "image_size", "channels_last", "gradient_as_bucket_view")
    fixed = {name: getattr(args, name) for name in (*options, "static_graph", "bind_cores")}
    fixed |= {"device": job.device.type, "backend": job.backend}
    sizes = args.world_sizes or world_sizes(job.world_size, node)
    cases = [(0, "no ddp", None, None)]
    for size, bucket, hook in itertools.product(sorted(sizes), args.bucket_size, args.comm_hook):
        cases.append((size, label_of(size, node), bucket, hook))
    names = ("world_size", "label", "bucket_size_mb", "comm_hook")
    return [dict(zip(names, case, strict=True)) | fixed for case in cases]


def main() -> int:
    args = parse_args()
    with Benchmark("ddp_sweep", args) as bench:
        job = bench.job
        if args.world_sizes and max(args.world_sizes) > job.world_size:
            bench.refuse(
                f"--world-sizes {max(args.world_sizes)} is more than the {job.world_size} ranks "
                f"there are; e.g. torchrun --nproc-per-node {max(args.world_sizes)} ..."
            )
        node = bench.share(job.local_world_size)  # nodes may differ, plans may not
        for model, dtype in itertools.product(args.models, args.dtype):
            title = f"{model}, batch size {args.batch_size}, {args.image_size} px, {dtype}"
            bench.begin_table(title, columns(args), ["1M/2G 25MB none", "+-10.0%"])
            cases: list[Case] = []
            for key in plan(args, job, node):
                key = {"model": model, "dtype": dtype} | key
                case = bench.measure(
                    key,
                    partial(build, key, args, job),
                    partial(derive, cases[0] if cases else None, args.batch_size),
                    range(max(1, key["world_size"])),
                )
                cases += [case] if case else []
            whole = [case for case in cases if not case.failed]
            if whole:
                bench.print(f"\nWhy: {title}\n\n{render(why_columns(args, job), whole)}")
        if not args.no_breakdown:
            bench.print(
                "\n# exposed: a median of differences within rounds, not the difference of the two"
                "\n# medians before it; overlap under 0: communication costs more inside the step"
            )
    return bench.status


if __name__ == "__main__":
    sys.exit(record(main)())
