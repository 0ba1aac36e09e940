#!/usr/bin/env python3
"""How long does a training step take under DistributedDataParallel, and how far does it scale?

Times whole training steps (zero_grad, forward, loss, backward with gradient averaging,
optimizer step) of torchvision models over a growing set of ranks: `no ddp`, then 1, 2, 4, ...
ranks of one node, then whole nodes (`2M/8G`: 2 machines with 8 ranks each). Data loading is not
timed: each rank trains on one batch of random images that is made before.

Three things are timed in alternating blocks, so that a drift of the machine hits them alike:

    step            the step; per iteration the slowest rank counts
    local compute   the same step without averaging gradients (DDP's no_sync)
    communication   DDP's own gradient buckets averaged alone, by the same hook
    exposed       = step - local compute: communication that computing does not hide
    overlap       = 1 - exposed / communication
    efficiency    = step of `no ddp` / step
    ex/sec/device = batch size / step;   samples/s = ranks * batch size / step

    torchrun --nproc-per-node 2 benchmarks/ddp_sweep.py
    torchrun --nproc-per-node 8 benchmarks/ddp_sweep.py --json report.json
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \\
        benchmarks/ddp_sweep.py --comm-hook none,bf16 --bucket-size 25,100

Does what PyTorch's benchmarks/distributed/ddp/benchmark.py did (same models, step and report
keys), written anew. BSD-3-Clause.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import cli

CUDA_MODELS = ["resnet50", "resnet101", "resnext50_32x4d", "resnext101_32x8d"]
CPU_MODELS = ["resnet18", "mobilenet_v3_small"]  # for a first run on a laptop, at a small size
DTYPES = ("fp32", "bf16", "fp16")
COMM_HOOKS = (
    *("none", "allreduce", "fp16", "bf16", "powersgd", "batched_powersgd"),
    *("quantize_per_tensor", "quantize_per_channel", "noop"),
)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = cli.Parser(description=__doc__)
    add = parser.add_argument
    defaults = f"{','.join(CUDA_MODELS)} on CUDA, {','.join(CPU_MODELS)} on the CPU"
    add(
        "--models",
        "--model",
        type=cli.list_of(str),
        metavar="NAME",
        help=f"torchvision classification models; a list (default: {defaults})",
    )
    sizes = cli.list_of(cli.positive_int)
    add("--batch-size", type=cli.positive_int, metavar="N", help="a rank's (default: 32, CPU 8)")
    add("--image-size", type=cli.positive_int, metavar="PX", help="(default: 224, CPU 64)")
    add(
        "--world-sizes",
        type=sizes,
        metavar="N",
        help="ranks to run on, beside `no ddp`; a list (default: 1, 2, 4, ... of one node, then "
        "1, 2, 4, ... nodes, and all)",
    )
    add(
        "--bucket-size",
        type=cli.list_of(cli.positive_float),
        default=[25.0],
        metavar="MB",
        help="DDP's bucket_cap_mb; a list (default: 25)",
    )
    add(
        "--comm-hook",
        type=cli.list_of(str, COMM_HOOKS),
        default=["none"],
        metavar="HOOK",
        help=f"how gradients are averaged, of {', '.join(COMM_HOOKS)}; a list (default: none)",
    )
    add(
        "--dtype",
        type=cli.list_of(str, DTYPES),
        default=["fp32"],
        metavar="DTYPE",
        help="fp32, or autocast to bf16, or to fp16 with a GradScaler; a list (default: fp32)",
    )
    add("--channels-last", action="store_true", help="images and weights in NHWC")
    add("--gradient-as-bucket-view", action="store_true", help="DDP's option")
    add("--static-graph", action="store_true", help="DDP's option")
    add("--no-breakdown", action="store_true", help="time the step alone, in a third of the time")
    add("--distributed-backend", choices=cli.BACKENDS, help="(default: nccl on CUDA, CPU gloo)")
    add("--strict-topology", action="store_true", help="refuse to run on nodes that differ")
    add("--bind-cores", action="store_true", help="bind each rank to its share of the cores")
    cli.add_measurement_flags(parser)
    cli.add_report_flags(parser)
    args = parser.parse_args(argv)
    cli.check_measurement_flags(args)
    return args


if __name__ == "__main__":
    ARGS = parse_args()  # before the imports below, so that --help need not wait for them

import contextlib
import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torchvision
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel

from common import comm_hooks
from common.breakdown import communication_metrics, step_metrics
from common.check import compare_replicas, digest
from common.dist import CaseGroup, RankContext, choose_device, world_from_environment
from common.memory import peak_gib, start_peak
from common.ranks import label_of, world_sizes
from common.results import Case
from common.sweep import Outcome, Sweep, check_report_flags, stop_rule
from common.table import (
    Columns,
    StreamedTable,
    half_width,
    interval_width,
    metric,
    percentile_columns,
    render,
)
from common.timing import Measurement, measure, time_block


@dataclass(frozen=True)
class Config:
    """What is measured in one case. The defaults are `no ddp`: the plain model on rank 0."""

    model: str
    dtype: str
    world_size: int = 0
    label: str = "no ddp"
    bucket_size_mb: float | None = None
    comm_hook: str | None = None

    def __str__(self) -> str:
        ddp = f" {self.bucket_size_mb:g}MB {self.comm_hook}" if self.comm_hook else ""
        return f"{self.model} {self.dtype} {self.label}{ddp}"


# -- the workload: plain torch ---------------------------------------------------------------------


def create_model(name: str, image_size: int) -> nn.Module:
    """A torchvision model with random weights; input [batch, 3, image_size, image_size]."""
    options: dict[str, Any] = {}
    if name.startswith("vit_"):
        options = {"image_size": image_size}
    elif name.startswith("maxvit"):
        options = {"input_size": (image_size, image_size)}
    elif name in ("googlenet", "inception_v3"):  # their second head would need a second loss
        options = {"aux_logits": False, "init_weights": True}
    return torchvision.models.get_model(name, weights=None, **options)


def sgd(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=1e-4)


def autocast(device: torch.device, dtype: str) -> contextlib.AbstractContextManager[object]:
    if dtype == "fp32":
        return contextlib.nullcontext()
    return torch.autocast(device.type, torch.bfloat16 if dtype == "bf16" else torch.float16)


def create_step(
    model: nn.Module,
    images: torch.Tensor,
    targets: torch.Tensor,
    optimizer: torch.optim.Optimizer,
    dtype: str,
) -> Callable[[], None]:
    """One training step. images: [batch, 3, H, W]; targets: [batch]."""
    loss_fn = nn.CrossEntropyLoss()
    scaler = torch.amp.GradScaler(images.device.type, enabled=dtype == "fp16")

    def step() -> None:
        optimizer.zero_grad()
        with autocast(images.device, dtype):
            loss = loss_fn(model(images), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return step


# DDP's broadcast_buffers has another name since torch 2.15
KEEP_BUFFERS = "forward_sync_buffers"
if KEEP_BUFFERS not in inspect.signature(DistributedDataParallel).parameters:
    KEEP_BUFFERS = "broadcast_buffers"


def wrap(
    config: Config, args: argparse.Namespace, model: nn.Module, group: dist.ProcessGroup
) -> DistributedDataParallel:
    options = {
        KEEP_BUFFERS: False,
        "bucket_cap_mb": config.bucket_size_mb,
        "gradient_as_bucket_view": args.gradient_as_bucket_view,
        "static_graph": args.static_graph,
    }
    return DistributedDataParallel(model, process_group=group, **options)


# -- one case --------------------------------------------------------------------------------------


def run_case(config: Config, args: argparse.Namespace, sweep: Sweep, group: CaseGroup) -> Outcome:
    """Time one case on this rank."""
    device = sweep.ctx.device
    memory = start_peak(device)
    torch.manual_seed(sweep.ctx.rank)
    layout = torch.channels_last if args.channels_last else torch.contiguous_format
    model = create_model(config.model, args.image_size).to(device, memory_format=layout)
    images = torch.rand(args.batch_size, 3, args.image_size, args.image_size, device=device)
    images = images.to(memory_format=layout)
    targets = torch.randint(1000, (args.batch_size,), device=device)

    steps: dict[str, Callable[[], None]] = {}
    if config.world_size == 0:
        steps["step"] = create_step(model, images, targets, sgd(model, 0.001), config.dtype)
    else:
        ddp = wrap(config, args, model, group.test)
        communication = comm_hooks.register(str(config.comm_hook), ddp)
        steps["step"] = create_step(ddp, images, targets, sgd(model, 0.001), config.dtype)
        # a learning rate of 0 costs the same, and leaves the replicas as they are: equal
        local_step = create_step(ddp, images, targets, sgd(model, 0.0), config.dtype)

        def local_compute() -> None:
            with ddp.no_sync():
                local_step()

        if not args.no_breakdown:
            steps["local compute"] = local_compute
        if not args.no_breakdown and config.world_size > 1 and config.comm_hook != "noop":
            steps["communication"] = communication

    first = time_block(steps["step"], comm_hooks.SETTLING_STEPS, device)
    measurement = measure(steps, group, device, stop_rule(args), sweep.next_block)
    facts = {
        "first_iteration_s": first[0],
        "memory_gib": peak_gib(device, memory),
        "parameters": digest(model),
    }
    return Outcome(facts, measurement)


def derive(
    config: Config, args: argparse.Namespace, sweep: Sweep, measured: Measurement, facts: list[Any]
) -> tuple[dict[str, Any], str]:
    """A case's metrics (see docs/numbers.md) and the verdict on its result. On rank 0."""
    samples = measured.samples
    ranks = list(range(max(1, config.world_size)))
    metrics = step_metrics(samples["step"], len(ranks) * args.batch_size)
    baseline = sweep.find(case_key(Config(config.model, config.dtype), args, sweep.ctx))
    if baseline is not None and "step_time_p50_s" in baseline["metrics"]:
        metrics["efficiency"] = baseline["metrics"]["step_time_p50_s"] / metrics["step_time_p50_s"]
    if "local compute" in samples:
        metrics |= communication_metrics(
            samples["step"], samples["local compute"], samples.get("communication"), measured.rounds
        )
    if "straggler_rank" in metrics:
        metrics["straggler_host"] = sweep.host_of(metrics["straggler_rank"])
    for name in ("first_iteration_s", "memory_gib"):
        metrics[name] = max(fact[name] for fact in facts)
    if config.comm_hook == "noop":
        return metrics, "skipped: the noop hook does not average gradients"
    wrong = compare_replicas([fact["parameters"] for fact in facts], ranks)
    return metrics, f"failed: {wrong}" if wrong else "passed"


# -- the sweep -------------------------------------------------------------------------------------


def plan(args: argparse.Namespace, world_size: int, local_world_size: int) -> list[Config]:
    """Every case, in the order in which they run: small sets of ranks first."""
    sizes = args.world_sizes or world_sizes(world_size, local_world_size)
    configs = []
    for model, dtype in itertools.product(args.models, args.dtype):
        configs.append(Config(model, dtype))
        for size, bucket, hook in itertools.product(
            sorted(sizes), args.bucket_size, args.comm_hook
        ):
            label = label_of(size, local_world_size)
            configs.append(Config(model, dtype, size, label, bucket, hook))
    return configs


def case_key(config: Config, args: argparse.Namespace, ctx: RankContext) -> dict[str, Any]:
    options = ("batch_size", "image_size", "channels_last", "gradient_as_bucket_view")
    return (
        {name: value for name, value in dataclasses.asdict(config).items()}
        | {name: getattr(args, name) for name in (*options, "static_graph")}
        | {"device": ctx.device.type, "backend": ctx.backend}
        | ({"bind_cores": True} if args.bind_cores else {})
    )


def check_args(args: argparse.Namespace) -> tuple[torch.device, str]:
    """Fill in the defaults that depend on the device; refuse what cannot run."""
    try:
        device, backend = choose_device(args.device, args.distributed_backend)
        world_size = world_from_environment()[1]
    except ValueError as error:
        cli.refuse(str(error))
    cuda = device.type == "cuda"
    args.small = not (cuda or args.models or args.image_size)
    args.models = args.models or (CUDA_MODELS if cuda else CPU_MODELS)
    args.batch_size = args.batch_size or (32 if cuda else 8)
    args.image_size = args.image_size or (224 if cuda else 64)
    classifiers = torchvision.models.list_models(module=torchvision.models)
    for name in args.models:
        if name in torchvision.models.list_models() and name not in classifiers:
            cli.refuse(
                f"model '{name}' does not classify images; give one that does, e.g. resnet50"
            )
        if name not in classifiers:
            cli.refuse(
                f"unknown model '{name}'{cli.suggest(name, classifiers) or ', e.g. resnet50'}"
            )
    for size in args.world_sizes or []:
        if size > world_size:
            cli.refuse(
                f"--world-sizes {size} is more than the {world_size} ranks there are; "
                f"start {size}: torchrun --nproc-per-node {size} ..."
            )
    check_report_flags(args, "ddp_sweep")
    return device, backend


# -- tables ----------------------------------------------------------------------------------------


def case_name(case: dict[str, Any], args: argparse.Namespace) -> str:
    """The rank set, and what else tells the case from its neighbours."""
    key = case["key"]
    parts = [key["label"]]
    if key["comm_hook"] and len(args.bucket_size) > 1:
        parts.append(f"{key['bucket_size_mb']:g}MB")
    if key["comm_hook"] and len(args.comm_hook) > 1:
        parts.append(key["comm_hook"])
    return " ".join(parts)


def title(key: dict[str, Any], args: argparse.Namespace) -> str:
    parts = [
        key["model"],
        f"batch size {key['batch_size']}",
        f"{key['image_size']} px",
        key["dtype"],
    ]
    if len(args.bucket_size) == 1:
        parts.append(f"buckets of {args.bucket_size[0]:g} MB")
    if len(args.comm_hook) == 1:
        parts.append(f"hook {args.comm_hook[0]}")
    return ", ".join(parts)


def step_columns(args: argparse.Namespace) -> Columns:
    """The first table: how long a step takes."""
    return {
        "": functools.partial(case_name, args=args),
        "95% ci\nof p50": interval_width,
        **percentile_columns("step_time", "sec/iter", "ex/sec/dev", work="batch_size"),
    }


def why_columns(args: argparse.Namespace, memory: str) -> Columns:
    """The second table: where the time goes."""

    def slowest(case: dict[str, Any]) -> str:
        metrics = case["metrics"]
        if "straggler_rank" not in metrics:
            return "-"
        place = f"{metrics['straggler_rank']} ({metrics['straggler_host']})"
        return f"{place} {metrics['straggler_factor']:.2f}x"

    columns: Columns = {
        "": functools.partial(case_name, args=args),
        "samples/s": metric("samples_per_s", digits=1),
        "efficiency\n(%)": metric("efficiency", 100, 1),
        "step\n(ms)": metric("step_time_p50_s", 1e3),
        "local\ncompute\n(ms)": metric("local_compute_p50_s", 1e3),
        "commun.\nalone\n(ms)": metric("communication_p50_s", 1e3),
        "exposed\ncommun.\n(ms)": metric("exposed_communication_s", 1e3),
        "95% ci\n+-(ms)": half_width("exposed_communication_ci95_s", 1e3),
        "overlap\n(%)": metric("overlap", 100, 0),
        "slowest\nrank": slowest,
        f"{memory}\n(GiB)": metric("memory_gib"),
    }
    if args.no_breakdown:
        timed = ("", "samples/s", "efficiency\n(%)", "step\n(ms)", f"{memory}\n(GiB)")
        return {name: column for name, column in columns.items() if name in timed}
    return columns


def print_why(keys: list[dict[str, Any]], args: argparse.Namespace, sweep: Sweep) -> None:
    """Print the second table of what is measured so far."""
    memory = "max_reserved" if sweep.ctx.device.type == "cuda" else "RSS growth"
    negative = False
    for heading, group in itertools.groupby(keys, key=lambda key: title(key, args)):
        cases = [case for case in map(sweep.find, group) if case is not None]
        if cases:
            table = render(why_columns(args, memory), cases)
            sweep.say(f"\nWhy: {heading}\n\n{table}")
            negative |= any((case["metrics"].get("overlap") or 0) < 0 for case in cases)
    if negative:
        sweep.say(
            "\n# overlap under 0: inside the step communication costs more than alone, because it\n"
            "# shares the cores with computing or waits for a late rank"
        )


def pytorch_report(cases: list[Case], args: argparse.Namespace, backend: str) -> dict[str, Any]:
    """The keys of PyTorch's own DDP benchmark report, for tools that read those."""
    results: dict[Any, list[dict[str, Any]]] = {}
    for case in cases:
        if case["samples_s"]:
            slowest = [max(times) for times in zip(*case["samples_s"], strict=True)]
            which = (case["key"].get("model"), case["key"].get("batch_size"))
            results.setdefault(which, []).append({"ranks": case["ranks"], "measurements": slowest})
    return {
        "pytorch_version": torch.__version__,
        "cuda_version": torch.version.cuda,
        "distributed_backend": backend,
        "bucket_size": args.bucket_size[0],
        "benchmark_results": [
            {"model": model, "batch_size": batch_size, "result": result}
            for (model, batch_size), result in results.items()
        ],
    }


def main(args: argparse.Namespace) -> int:
    device, backend = check_args(args)
    extras = functools.partial(pytorch_report, args=args, backend=backend)
    with Sweep("ddp_sweep", args, device, backend, extras) as sweep:
        if args.strict_topology:
            sweep.refuse_differences()
        if args.small:
            sweep.say(
                "# CPU defaults: small models at a small size, for a first look; what is measured "
                "on GPUs: --models resnet50 --image-size 224 --batch-size 32"
            )
        node = sweep.share(sweep.ctx.local_world_size)  # nodes may differ, plans may not
        configs = plan(args, sweep.ctx.world_size, node)
        keys = [case_key(config, args, sweep.ctx) for config in configs]
        known = sweep.plan(keys, summary=functools.partial(print_why, keys, args, sweep))
        names = [case_name({"key": key}, args) for key in keys]
        widest = [max(names, key=len), "+-10.0%", *["0.0000", "10000.0"] * 4]
        wrong: dict[tuple[str | None, str], str | None] = {}  # by hook and dtype
        heading = ""
        for config, key, done in zip(configs, keys, known, strict=True):
            hook = (config.comm_hook, config.dtype)
            if not done and config.comm_hook and hook not in wrong:
                wrong[hook] = comm_hooks.check(
                    config.comm_hook,
                    functools.partial(wrap, dataclasses.replace(config, bucket_size_mb=0.05), args),
                    functools.partial(autocast, device, config.dtype),
                    sweep,
                )
            if done:
                case = sweep.find(key)
            else:
                case = sweep.case(
                    key,
                    str(config),
                    tuple(range(max(1, config.world_size))),
                    functools.partial(run_case, config, args, sweep),
                    functools.partial(derive, config, args, sweep),
                    broken=wrong.get(hook),
                )
            if case is None:
                continue  # not rank 0
            if title(key, args) != heading:
                heading = title(key, args)
                table = StreamedTable(step_columns(args), widest)
                sweep.say(f"\n{heading}\n")
            failed = case["check"].startswith("failed")
            sweep.say(f"{case_name(case, args)}  {case['check']}" if failed else table.row(case))
    return sweep.status


if __name__ == "__main__":
    sys.exit(record(main)(ARGS))
