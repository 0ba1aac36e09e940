#!/usr/bin/env python3
"""How long does a training step take under DistributedDataParallel, and how far does it scale?

Times whole training steps (zero_grad, forward, loss, backward with gradient averaging, optimizer
step) of torchvision models on random images: `no ddp`, then 1, 2, 4, ... ranks of a node, then
whole nodes (`2M/8G`: 2 machines with 8 ranks each).

    step            the step; of each iteration the slowest rank counts
    local compute   the same step without averaging gradients (DDP's no_sync)
    alone           DDP's gradient buckets averaged by themselves, by the same hook
    exposed       = step - local compute: what DDP adds. Communication that computing does not
                    hide, copies into and out of buckets, and what both take from computing
    late          = local compute of the slowest rank - of the median rank
    overlap       = 1 - exposed / alone;   efficiency = step of `no ddp` / step
    ex/sec/dev    = batch size / step;     samples/s = ranks * batch size / step

    torchrun --nproc-per-node 2 benchmarks/ddp_sweep.py
    torchrun --nproc-per-node 8 benchmarks/ddp_sweep.py --json report.jsonl
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \\
        benchmarks/ddp_sweep.py --comm-hook none,bf16 --bucket-size 25,100

Asks what PyTorch's benchmarks/distributed/ddp/benchmark.py asks; written anew. BSD-3-Clause.
"""

import argparse
import itertools
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torchvision
from torch import Tensor, nn
from torch.distributed.algorithms import ddp_comm_hooks
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import cli
from common.benchmark import Benchmark, Workload
from common.check import compare_replicas, digest, verdict
from common.dist import Group, Job
from common.memory import peak, start_peak
from common.private_torch import TORCH_2_15, bucket_sizes
from common.report import Case
from common.stats import Times, breakdown_metrics, step_metrics
from common.table import Columns, interval_ends, metric, percentile_columns, relative, render
from common.timing import Step

Key = dict[str, Any]
CUDA_MODELS = ["resnet50", "resnet101", "resnext50_32x4d", "resnext101_32x8d"]
# their own start takes a minute and a warning: it draws every weight by scipy
MODEL_OPTIONS = {name: {"init_weights": False} for name in ("googlenet", "inception_v3")}
CPU_MODELS = ["resnet18", "mobilenet_v3_small"]  # for a first look on a laptop, at a small size
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
# matrix products and whether convolutions are in TF32; torch's own come before anyone sets them
PRECISION = {"default": (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32)}
PRECISION |= {"fp32": ("highest", False), "tf32": ("high", True)}
DTYPES = (*PRECISION, *AUTOCAST)
SHARED_FLAGS = ("channels_last", "gradient_as_bucket_view", "static_graph")

# each hook, and how far an averaged gradient may be off, relative to the largest one: fp16 rounds
# to 11 bits and bf16 to 8, a rank's share and the sum; the quantised ones have 255 levels;
# PowerSGD projects on one direction, which the check's gradients have
HOOKS: dict[str, tuple[Any, float]] = {
    "none": (None, 1e-5),  # DDP's own all-reduce, in C++
    "allreduce": (ddp_comm_hooks.default.allreduce_hook, 1e-5),
    "fp16": (ddp_comm_hooks.default.fp16_compress_hook, 2**-9),
    "bf16": (ddp_comm_hooks.default.bf16_compress_hook, 2**-6),
    "powersgd": (ddp_comm_hooks.powerSGD.powerSGD_hook, 1e-3),
    "quantize_per_tensor": (ddp_comm_hooks.quantization.quantization_pertensor_hook, 2 / 255),
    "quantize_per_channel": (ddp_comm_hooks.quantization.quantization_perchannel_hook, 2 / 255),
}
INLINE_WAITS = ("powersgd", "quantize_per_tensor", "quantize_per_channel")
FOOTER = """
# exposed: what DDP adds to a step; a median of differences within rounds, not the difference
# of the two medians before it. overlap: - where exposed may be 0 (its interval holds 0);
# under 0 communication costs more inside the step than alone"""
SETTLING_STEPS = 4  # DDP rebuilds its buckets in the second or third, and logs them after it


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = cli.Parser(__doc__)
    add, list_of, whole = parser.add_argument, cli.list_of, cli.positive_int
    models = f"a list (default: {','.join(CUDA_MODELS)} on CUDA, {','.join(CPU_MODELS)} on the CPU)"
    add("--models", "--model", type=list_of(str), metavar="NAME", help=models)
    add("--batch-size", type=whole, metavar="N", help="of a rank (default: 32, CPU 8)")
    add("--image-size", type=whole, metavar="PX", help="(default: 224, CPU 64)")
    sizes = "ranks beside `no ddp` (default: 1, 2, 4, ... of one node, then of nodes, and all)"
    sizes += "; nodes: 1, 2, 3, ... whole nodes"
    add("--world-sizes", type=list_of(ranks_or_nodes), metavar="N", help=sizes)
    cap = "DDP's bucket_cap_mb (default: 25)"
    add("--bucket-size", type=list_of(cli.positive_float), default=[25.0], metavar="MB", help=cap)
    hooks = f"{', '.join(HOOKS)} (default: none, DDP's own)"
    add("--comm-hook", type=list_of(str, tuple(HOOKS)), default=["none"], metavar="H", help=hooks)
    dtypes = "default (as torch is: TF32 in convolutions, not in products), fp32, tf32, autocast "
    dtypes += "to bf16, or to fp16 with a GradScaler (default: default)"
    add("--dtype", type=list_of(str, DTYPES), default=["default"], metavar="D", help=dtypes)
    add("--channels-last", action="store_true", help="images and weights in NHWC")
    add("--gradient-as-bucket-view", action="store_true", help="DDP's option")
    add("--static-graph", action="store_true", help="DDP's option")
    add("--no-breakdown", action="store_true", help="time the step alone, in a third of the time")
    add("--strict-topology", action="store_true", help="refuse to run on nodes that differ")
    add("--bind-cores", action="store_true", help="bind each rank to its share of the cores")
    cli.add_common_flags(parser)
    args = parser.parse_args(argv)
    cuda = torch.cuda.is_available() and args.device != "cpu"
    args.models = args.models or (CUDA_MODELS if cuda else CPU_MODELS)
    args.batch_size = args.batch_size or (32 if cuda else 8)
    args.image_size = args.image_size or (224 if cuda else 64)
    if "tf32" in args.dtype and not cuda:
        parser.error("tf32 is a mode of CUDA's tensor cores; try --dtype fp32 or bf16")
    known = torchvision.models.list_models(module=torchvision.models)  # those that classify
    for name in set(args.models).difference(known):
        cli.refuse(f"unknown model '{name}'{cli.suggest(name, known) or '; e.g. resnet50'}")
    if "inception_v3" in args.models and args.image_size < 299:
        parser.error(f"inception_v3 takes --image-size 299 or more, got {args.image_size}")
    return args


def ranks_or_nodes(text: str) -> int | str:
    """One entry of --world-sizes."""
    return text if text == "nodes" else int(cli.positive_int(text))


# -- the workload: plain torch ---------------------------------------------------------------------


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
    """The loss. googlenet and inception_v3 return the outputs of auxiliary heads after their own:
    those count 0.3 each (Szegedy et al. 2014, arXiv:1409.4842)."""
    if isinstance(outputs, Tensor):
        return nn.functional.cross_entropy(outputs, targets)
    loss, *auxiliary = [nn.functional.cross_entropy(head, targets) for head in outputs]
    return loss + 0.3 * torch.stack(auxiliary).sum()


def set_precision(dtype: str) -> None:
    """How fp32 products and convolutions are computed on CUDA. `default` by itself sets nothing."""
    wanted = PRECISION.get(dtype, PRECISION["fp32"])
    if wanted != (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32):
        torch.set_float32_matmul_precision(wanted[0])
        torch.backends.cudnn.allow_tf32 = wanted[1]


def register_hook(name: str, ddp: DistributedDataParallel) -> Step:
    """Register a hook. Returns a step that averages the model's gradient buckets alone, at once."""
    hook, group = HOOKS[name][0], ddp.process_group
    if name in INLINE_WAITS and dist.get_backend(group) == "gloo":
        raise ValueError(f"hook {name} deadlocks gloo (pytorch/pytorch#48478); it needs nccl")
    average: Any = partial(dist.all_reduce, group=group, async_op=True)
    buckets: list[Any] = []  # of the newest backward pass
    if hook:
        powersgd = ddp_comm_hooks.powerSGD.PowerSGDState(group, 1, start_powerSGD_iter=2)
        average = partial(hook, powersgd if name == "powersgd" else group)

        def remember(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
            if bucket.index() == 0:
                buckets.clear()
            buckets.append(bucket)
            return average(bucket)

        ddp.register_comm_hook(None, remember)

    def alone() -> None:
        if not buckets:  # DDP's own all-reduce shows none, but logs their sizes in bytes
            sizes = bucket_sizes(ddp)
            buckets.extend(torch.zeros(size // 4, device=ddp.device) for size in sizes)
        for work in [average(bucket) for bucket in buckets]:
            work.wait()

    return alone


def build(args: argparse.Namespace, job: Job, key: Key, group: Group) -> Workload:
    """What a rank measures in a case: the step, and the parts that it is made of."""
    dtype, hook, device = key["dtype"], key["comm_hook"], job.device
    set_precision(dtype)
    buffers = "forward_sync_buffers" if TORCH_2_15 else "broadcast_buffers"
    options: Key = {"process_group": group.test, buffers: False}
    options |= {n: getattr(args, n) for n in ("static_graph", "gradient_as_bucket_view")}
    if hook:
        check_hook(hook, dtype, device, options)
    memory = start_peak(device)
    torch.manual_seed(job.rank)
    layout = torch.channels_last if args.channels_last else torch.contiguous_format
    model = torchvision.models.get_model(key["model"], **MODEL_OPTIONS.get(key["model"], {}))
    model = model.to(device, memory_format=layout)
    images = torch.rand(args.batch_size, 3, args.image_size, args.image_size, device=device)
    images = images.to(memory_format=layout)
    targets = torch.randint(1000, (args.batch_size,), device=device)
    if hook:
        model = DistributedDataParallel(model, bucket_cap_mb=key["bucket_size_mb"], **options)
        alone = register_hook(hook, model)
    step = training_step(model, images, targets, 1e-3, dtype)
    for _ in range(SETTLING_STEPS):
        step()
    peaks = peak(device, memory)  # before the breakdown, which needs memory of its own
    parts: dict[str, Step] = {}
    if hook and not args.no_breakdown:
        # a learning rate of 0 costs the same, and leaves the replicas equal
        local_step = training_step(model, images, targets, 0.0, dtype)

        def local_compute() -> None:
            with model.no_sync():
                local_step()

        parts["local compute"] = local_compute
        if key["world_size"] > 1:
            parts["alone"] = alone
    launches = dtype != "fp16"  # whose GradScaler waits for the device in each step
    return Workload(
        step,
        parts,
        compared=("local compute",) if "local compute" in parts else (),  # exposed's interval
        facts=lambda: (digest(model), peaks),
        launches=launches,
    )


def check_hook(name: str, dtype: str, device: torch.device, options: Key) -> None:
    """Raise ValueError where the gradients that this hook averages are not the average.

    This process alone makes the reference, from all ranks' batches. Rows of a batch differ in
    targets only: a weight's gradient is of rank one, which PowerSGD of rank one must reproduce.
    """

    def gradients(model: nn.Module, rank: int) -> Tensor:
        model.zero_grad()
        inputs = torch.linspace(-1, 1, 96, device=device).repeat(4, 1)
        targets = (torch.arange(4, device=device) * 5 + rank * 3) % 16
        with torch.autocast(device.type, AUTOCAST.get(dtype), enabled=dtype in AUTOCAST):
            loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    group, tolerance = options["process_group"], HOOKS[name][1]
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(96, 96) for _ in range(4)], nn.Linear(96, 16)).to(device)
    each = torch.stack([gradients(model, rank) for rank in range(dist.get_world_size(group))])
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.05, **options)  # several buckets
    register_hook(name, ddp)
    for _ in range(SETTLING_STEPS):  # PowerSGD compresses from the third step on
        got = gradients(ddp, dist.get_rank(group))
    error = float((got - each.double().mean(0)).abs().max() / each.abs().max())
    if not error <= tolerance:  # nor is NaN
        explained = f"hook {name} explains {tolerance:.2g}"
        raise ValueError(f"averaged gradients are off by {error:.2g} of the largest; {explained}")


def derive(cases: list[Case], case: Case, times: Times, facts: list[Any]) -> None:
    """Fill in the metrics and the check. cases: those before it, `no ddp` first."""
    m = case.metrics
    m |= step_metrics(times.each(), len(case.ranks) * case.key["batch_size"])
    if cases and not cases[0].failed:
        m["efficiency"] = cases[0].metrics["step_time_p50_s"] / m["step_time_p50_s"]
    if "local compute" in times.samples_s:
        alone = "alone" if "alone" in times.samples_s else None
        m |= breakdown_metrics(times, "local compute", alone)
    case.check = verdict(compare_replicas([digest for digest, _ in facts], case.ranks))
    m |= {name: max(memory[name] for _, memory in facts) for name in facts[0][1]}


def name_of(args: argparse.Namespace, case: Case) -> str:
    """The set of ranks, and what else tells the case from its neighbours."""
    key, name = case.key, str(case.key["label"])
    if key["world_size"] and f"/{key['world_size']}G" not in name:
        name += f" ({key['world_size']})"  # `2M/8G (16)`: how many ranks that is
    if key["comm_hook"] and len(args.bucket_size) > 1:
        name += f" {key['bucket_size_mb']:g}MB"
    if key["comm_hook"] and len(args.comm_hook) > 1:
        name += f" {key['comm_hook']}"
    return name


def title_of(model: str, dtype: str, args: argparse.Namespace, device: torch.device) -> str:
    """What all cases of a table share."""
    if dtype == "default":
        tf32 = device.type == "cuda" and PRECISION[dtype][1] and torch.cuda.is_tf32_supported()
        dtype = "torch's default precision" + (" (TF32 in convolutions)" if tf32 else "")
    parts = [model, f"batch size {args.batch_size}", f"{args.image_size} px", dtype]
    if len(args.bucket_size) == 1:
        parts.append(f"buckets of {args.bucket_size[0]:g} MB")
    if len(args.comm_hook) == 1 and args.comm_hook != ["none"]:
        parts.append(f"hook {args.comm_hook[0]}")
    parts += [name.replace("_", " ") for name in SHARED_FLAGS if getattr(args, name)]
    return ", ".join(parts)


def columns(args: argparse.Namespace) -> Columns:
    """The first table: how long a step takes."""
    rates = percentile_columns("step_time", "sec/iter", "ex/sec/dev", lambda c: c.key["batch_size"])
    return {"": partial(name_of, args), "95% ci\nof p50": relative("step_time_ci95_rel"), **rates}


def why_columns(args: argparse.Namespace, job: Job) -> Columns:
    """The second table: where the time goes."""
    memory = "max_reserved" if job.device.type == "cuda" else "RSS growth"
    found: Columns = {
        "": partial(name_of, args),
        "samples/s": metric("samples_per_s", digits=1),
        "efficiency\n(%)": metric("efficiency", 100, 1),
        "step\n(ms)": metric("step_time_p50_s", 1e3),
    }
    if not args.no_breakdown:
        found |= {
            "local\ncompute\n(ms)": metric("local_compute_p50_s", 1e3),
            "exposed\ncommun.\n(ms)": metric("exposed_communication_s", 1e3),
            "95% ci\n(ms)": interval_ends("exposed_communication_ci95_s", 1e3, 1),
            "commun.\nalone\n(ms)": metric("communication_p50_s", 1e3),
            "overlap\n(%)": metric("overlap", 100, 0),
            "late\n(ms)": metric("late_s", 1e3),
            "slowest\nrank": metric("straggler_rank", digits=0),
        }
    return found | {f"{memory}\n(GiB)": metric("memory_gib")}


def world_sizes(world_size: int, node: int) -> list[int]:
    """1, 2, 4, ... ranks of one node, then 1, 2, 4, ... nodes, and the whole world."""
    powers = [2**i for i in range(world_size.bit_length())]
    sizes = [n for n in powers if n < node] + [node * n for n in powers]
    return sorted({n for n in sizes if n < world_size} | {world_size})


def chosen_sizes(chosen: list[Any] | None, world_size: int, node: int) -> list[int]:
    """The sets of ranks to measure. chosen: --world-sizes; node: the ranks of a node."""
    if not chosen:
        return world_sizes(world_size, node)
    sizes = {size for size in chosen if size != "nodes"}
    if "nodes" in chosen:
        sizes |= {*range(node, world_size, node), world_size}
    return sorted(sizes)


def label_of(world_size: int, node: int) -> str:
    """`2M/8G`: 2 machines with 8 ranks each. Uneven: `2M/12G in all`."""
    machines = -(-world_size // node)
    uneven = machines > 1 and world_size % node
    return f"{machines}M/" + (f"{world_size}G in all" if uneven else f"{min(world_size, node)}G")


def plan(model: str, dtype: str, args: argparse.Namespace, job: Job, node: int) -> list[Key]:
    """The key of each case of one model and dtype, small sets of ranks first. node: its ranks."""
    options = ("batch_size", "image_size", *SHARED_FLAGS, "bind_cores")
    fixed = {name: getattr(args, name) for name in options}
    sizes = chosen_sizes(args.world_sizes, job.world_size, node)
    base = {"model": model, "dtype": dtype, "world_size": 0, "label": "no ddp"}
    keys = [base | {"bucket_size_mb": None, "comm_hook": None} | fixed]
    for size, bucket, hook in itertools.product(sizes, args.bucket_size, args.comm_hook):
        own = {"world_size": size, "label": label_of(size, node)}
        keys.append(keys[0] | own | {"bucket_size_mb": bucket, "comm_hook": hook})
    return keys


def main() -> int:
    args = parse_args()
    with Benchmark("ddp_sweep", args) as bench:
        job, found = bench.job, bench.report.environment
        node = found["local_world_size"]
        largest = chosen_sizes(args.world_sizes, job.world_size, node)[-1]
        if largest > job.world_size:
            bench.refuse(f"--world-sizes {largest} is more than the {job.world_size} ranks")
        for line in found["differences"] if args.strict_topology else []:
            bench.refuse(f"--strict-topology: {line}")
        for model, dtype in itertools.product(args.models, args.dtype):
            title = title_of(model, dtype, args, job.device)
            bench.begin_table(title, columns(args), ["1M/2G 25MB none", "+-10.0%"])
            cases: list[Case] = []
            for key in plan(model, dtype, args, job, node):
                ranks = range(max(1, key["world_size"]))
                work, made = partial(build, args, job), partial(derive, cases)
                if case := bench.measure(key, work, made, ranks):
                    cases.append(case)
            if whole := [case for case in cases if not case.failed]:
                bench.print(f"\nWhy: {title}\n\n{render(why_columns(args, job), whole)}")
        if not args.no_breakdown:
            bench.print(FOOTER)
    return bench.status


if __name__ == "__main__":
    sys.exit(record(main)())
