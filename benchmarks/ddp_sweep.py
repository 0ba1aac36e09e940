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
    overlap       = 1 - exposed / alone;   efficiency = step of `no ddp` / step
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
from common.answers import Estimate, estimate_of, fastest, ranked, series, show_seconds
from common.benchmark import Benchmark, Workload
from common.check import compare_replicas, digest, verdict
from common.environment import count_of
from common.groups import Group, Job
from common.memory import peak, start_peak
from common.private_torch import bucket_sizes
from common.report import Case
from common.stats import Times, breakdown_metrics, step_metrics
from common.table import Columns, interval_ends, metric, percentile_columns, relative, render
from common.timing import Step
from common.workloads.precision import PRECISION, name_precision, set_precision

Key = dict[str, Any]
CUDA_MODELS = ["resnet50", "resnet101", "resnext50_32x4d", "resnext101_32x8d"]
# Their own initialisation draws every weight by scipy, which takes a minute and warns.
MODEL_OPTIONS = {name: {"init_weights": False} for name in ("googlenet", "inception_v3")}
CPU_MODELS = ["resnet18", "mobilenet_v3_small"]  # for a first look on a laptop, at a small size
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
DTYPES = (*PRECISION, *AUTOCAST)
SHARED_FLAGS = ("channels_last", "gradient_as_bucket_view", "static_graph")
WITHOUT_DDP = 0  # the world_size in the key of `no ddp`, which is one process without DDP


class CommHook(NamedTuple):
    """How DDP averages gradients. Tolerance: how far an average may be off, relative to the largest
    gradient."""

    function: Any
    tolerance: float


# Tolerances: fp16 rounds to 11 bits and bf16 to 8, both what a rank brings and the sum. The
# quantised hooks have 255 levels. PowerSGD projects on one direction: the check's gradients have
# only one.
HOOKS = {
    "none": CommHook(None, 1e-5),  # DDP's own all-reduce, in C++
    "allreduce": CommHook(default_hooks.allreduce_hook, 1e-5),
    "fp16": CommHook(default_hooks.fp16_compress_hook, 2**-9),
    "bf16": CommHook(default_hooks.bf16_compress_hook, 2**-6),
    "powersgd": CommHook(powerSGD_hook.powerSGD_hook, 1e-3),
    "quantize_per_tensor": CommHook(quantization_hooks.quantization_pertensor_hook, 2 / 255),
    "quantize_per_channel": CommHook(quantization_hooks.quantization_perchannel_hook, 2 / 255),
}
# these wait for their communication within the backward pass
INLINE_WAITS = ("powersgd", "quantize_per_tensor", "quantize_per_channel")
FOOTER = """
# exposed: what DDP adds to a step; a median of differences within rounds, not the difference
# of the two medians before it. overlap: - where exposed may be 0 (its interval holds 0);
# below 0: communication costs more inside the step than alone"""
# DDP rebuilds its buckets in the second or third step, and logs their sizes after it; PowerSGD
# compresses from the third step on
SETTLING_STEPS = 4


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = cli.Parser(__doc__)
    add, list_of, positive_int = parser.add_argument, cli.list_of, cli.positive_int
    models = f"a list (default: {','.join(CUDA_MODELS)} on CUDA, {','.join(CPU_MODELS)} on the CPU)"
    add("--models", "--model", type=list_of(str), metavar="NAME", help=models)
    batch = "samples of a rank in a step (default: 32, CPU 8)"
    add("--batch-size", type=positive_int, metavar="N", help=batch)
    add("--image-size", type=positive_int, metavar="PX", help="(default: 224, CPU 64)")
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
    import torchvision  # takes seconds, so it comes after the first lines of output

    cuda = torch.cuda.is_available() and args.device != "cpu"
    args.models = args.models or (CUDA_MODELS if cuda else CPU_MODELS)
    args.batch_size = args.batch_size or (32 if cuda else 8)
    args.image_size = args.image_size or (224 if cuda else 64)
    if "tf32" in args.dtype and not cuda:
        parser.error("tf32 is a mode of CUDA's tensor cores; try --dtype fp32 or bf16")
    classifiers = torchvision.models.list_models(module=torchvision.models)
    for name in set(args.models).difference(classifiers):
        hint = cli.suggest(name, classifiers) or "; e.g. resnet50"
        cli.refuse(f"unknown model '{name}'{hint}")
    if "inception_v3" in args.models and args.image_size < 299:
        parser.error(f"inception_v3 takes --image-size 299 or more, got {args.image_size}")
    return args


def ranks_or_nodes(text: str) -> int | str:
    """An entry of --world-sizes."""
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
    """The loss. googlenet and inception_v3 also return the outputs of auxiliary heads, which count
    0.3 each (Szegedy et al. 2014, arXiv:1409.4842)."""
    if isinstance(outputs, Tensor):
        return nn.functional.cross_entropy(outputs, targets)
    loss, *auxiliary = [nn.functional.cross_entropy(output, targets) for output in outputs]
    return loss + 0.3 * torch.stack(auxiliary).sum()


def make_model(key: Key, device: torch.device) -> nn.Module:
    import torchvision  # parse_args has imported it already

    options = MODEL_OPTIONS.get(key["model"], {})
    model = torchvision.models.get_model(key["model"], **options)
    return model.to(device, memory_format=memory_format(key))


def make_batch(key: Key, device: torch.device) -> tuple[Tensor, Tensor]:
    """Random images, [batch, 3, H, W], and random targets, [batch]."""
    pixels = key["image_size"]
    images = torch.rand(key["batch_size"], 3, pixels, pixels, device=device)
    images = images.to(memory_format=memory_format(key))
    return images, torch.randint(1000, (key["batch_size"],), device=device)


def memory_format(key: Key) -> torch.memory_format:
    return torch.channels_last if key["channels_last"] else torch.contiguous_format


def wrap(key: Key, model: nn.Module, group: Group, bucket_mb: float) -> DistributedDataParallel:
    """The model under DDP. In a step no rank sends its buffers: gradients alone are sent."""
    buffers = "forward_sync_buffers"  # an older torch calls it broadcast_buffers
    if buffers not in inspect.signature(DistributedDataParallel).parameters:
        buffers = "broadcast_buffers"
    no_buffers: dict[str, Any] = {buffers: False}
    return DistributedDataParallel(
        model,
        process_group=group.test,
        bucket_cap_mb=bucket_mb,
        static_graph=key["static_graph"],
        gradient_as_bucket_view=key["gradient_as_bucket_view"],
        **no_buffers,
    )


class BucketHook:
    """Averages the gradient buckets of DDP: each when DDP hands it over, or all by themselves.

    It must not refer to the model. DDP's C++ part refers to the hook, and the garbage collector
    does not see a cycle through C++: the model would never be freed.
    """

    def __init__(self, name: str, group: Any) -> None:
        self.function = HOOKS[name].function
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
    buckets = [torch.zeros(size // 4, device=ddp.device) for size in bucket_sizes(ddp)]
    group = ddp.process_group

    def average_alone() -> None:
        reductions = [dist.all_reduce(bucket, group=group, async_op=True) for bucket in buckets]
        for reduction in reductions:
            reduction.wait()

    return average_alone


class Facts(NamedTuple):
    """What a rank says of a case after the timing."""

    digest: str  # of the parameters
    memory: dict[str, float]  # metrics, in GiB


def build(job: Job, key: Key, group: Group) -> Workload:
    """What a rank measures in a case: the step and, for a breakdown, the parts that it is made of.

    Memory is read before the breakdown, which needs memory of its own.
    """
    dtype, device = key["dtype"], job.device
    with_ddp = key["world_size"] != WITHOUT_DDP
    set_precision(dtype)
    if with_ddp:
        check_hook(key, group, device)
    memory_before = start_peak(device)
    torch.manual_seed(job.rank)
    model = make_model(key, device)
    images, targets = make_batch(key, device)
    hook = None
    if with_ddp:
        model = wrap(key, model, group, key["bucket_size_mb"])
        hook = register_hook(key["comm_hook"], model)
    step = training_step(model, images, targets, 1e-3, dtype)
    for _ in range(SETTLING_STEPS):
        step()
    memory = peak(device, memory_before)

    parts: dict[str, Step] = {}
    if isinstance(model, DistributedDataParallel) and key.get("breakdown", True):
        parts["local compute"] = local_step(model, images, targets, dtype)
        if key["world_size"] > 1:
            parts["alone"] = hook.average_alone if hook else all_reduce_alone(model)
    return Workload(
        step,
        parts,
        compared=("local compute",) if "local compute" in parts else (),  # exposed's interval
        facts=lambda: Facts(digest(model), memory),
        launches=dtype != "fp16",  # fp16's GradScaler waits for the device in each step
    )


def local_step(ddp: DistributedDataParallel, images: Tensor, targets: Tensor, dtype: str) -> Step:
    """A training step that averages no gradients.

    Its learning rate of 0 costs the same as another one, and leaves the replicas equal.
    """
    step = training_step(ddp, images, targets, 0.0, dtype)

    def local_compute() -> None:
        with ddp.no_sync():
            step()

    return local_compute


def check_hook(key: Key, group: Group, device: torch.device) -> None:
    """Raise ValueError where the gradients that the case's hook averages are not the average.

    Each rank makes the reference by itself, from the batches of all ranks. The rows of a batch
    differ in their targets only. So a weight's gradient is of rank one, which PowerSGD of rank one
    must reproduce.
    """
    torch.manual_seed(0)
    layers = [nn.Linear(96, 96) for _ in range(4)]
    model = nn.Sequential(*layers, nn.Linear(96, 16)).to(device)
    ranks, rank = dist.get_world_size(group.test), dist.get_rank(group.test)
    gradients = [check_gradients(model, other, key["dtype"]) for other in range(ranks)]
    of_each_rank = torch.stack(gradients)  # [ranks, n]

    ddp = wrap(key, model, group, bucket_mb=0.05)  # so small that there are several buckets
    register_hook(key["comm_hook"], ddp)
    for _ in range(SETTLING_STEPS):
        averaged = check_gradients(ddp, rank, key["dtype"])
    largest_error = (averaged - of_each_rank.double().mean(0)).abs().max()
    error = float(largest_error / of_each_rank.abs().max())
    tolerance = HOOKS[key["comm_hook"]].tolerance
    if not error <= tolerance:  # an error of NaN raises, too
        explained = f"hook {key['comm_hook']} explains {tolerance:.2g}"
        raise ValueError(f"averaged gradients are off by {error:.2g} of the largest; {explained}")


def check_gradients(model: nn.Module, rank: int, dtype: str) -> Tensor:
    """All gradients of the check's model for the batch of a rank, as one row."""
    device = next(model.parameters()).device
    model.zero_grad()
    inputs = torch.linspace(-1, 1, 96, device=device).repeat(4, 1)
    targets = (torch.arange(4, device=device) * 5 + rank * 3) % 16
    with torch.autocast(device.type, AUTOCAST.get(dtype), enabled=dtype in AUTOCAST):
        loss = nn.functional.cross_entropy(model(inputs), targets)
    loss.backward()
    gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return torch.cat(gradients)


def derive(one_process_s: float | None, case: Case, times: Times, facts: list[Facts]) -> None:
    """Fill in the metrics and the check, on rank 0.

    one_process_s: the median step of `no ddp`; None in that case itself, and where it failed.
    """
    metrics = case.metrics
    metrics |= step_metrics(times.each(), len(case.ranks) * case.key["batch_size"])
    if one_process_s:
        metrics["efficiency"] = one_process_s / metrics["step_time_p50_s"]
    if "local compute" in times.samples_s:
        alone = "alone" if "alone" in times.samples_s else None
        metrics |= breakdown_metrics(times, "local compute", alone)
    case.check = verdict(compare_replicas([fact.digest for fact in facts], case.ranks))
    for name in facts[0].memory:
        metrics[name] = max(fact.memory[name] for fact in facts)


# -- what is printed -------------------------------------------------------------------------------


def name_of(args: argparse.Namespace, case: Case) -> str:
    """The set of ranks, and what else tells the case from its neighbours."""
    key, name = case.key, str(case.key["label"])
    if key["world_size"] == WITHOUT_DDP:
        return name
    if f"/{key['world_size']}G" not in name:
        name += f" ({key['world_size']})"  # `2M/8G (16)`: 16 ranks in all
    if len(args.bucket_size) > 1:
        name += f" {key['bucket_size_mb']:g}MB"
    if len(args.comm_hook) > 1:
        name += f" {key['comm_hook']}"
    return name


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


def columns(args: argparse.Namespace) -> Columns:
    """The first table: how long a step takes."""
    rates = percentile_columns("step_time", "sec/iter", "ex/sec/dev", lambda c: c.key["batch_size"])
    return {"": partial(name_of, args), "95% ci\nof p50": relative("step_time_ci95_rel"), **rates}


def why_columns(args: argparse.Namespace, job: Job) -> Columns:
    """The second table: where the time goes."""
    memory = "max_reserved" if job.device.type == "cuda" else "RSS growth"
    shown: Columns = {
        "": partial(name_of, args),
        "samples/s": metric("samples_per_s", digits=1),
        "efficiency\n(%)": metric("efficiency", 100, 1),
        "step\n(ms)": metric("step_time_p50_s", 1e3),
    }
    if not args.no_breakdown:
        shown |= {
            "local\ncompute\n(ms)": metric("local_compute_p50_s", 1e3),
            "exposed\ncommun.\n(ms)": metric("exposed_communication_s", 1e3),
            "95% ci\n(ms)": interval_ends("exposed_communication_ci95_s", 1e3, 1),
            "commun.\nalone\n(ms)": metric("communication_p50_s", 1e3),
            "overlap\n(%)": metric("overlap", 100, 0),
            "late\n(ms)": metric("late_s", 1e3),
            "slowest\nrank": metric("straggler_rank", digits=0),
        }
    return shown | {f"{memory}\n(GiB)": metric("memory_gib")}


def answer(cases: list[Case]) -> list[str]:
    """For each model: how the most ranks compare with one process, and what DDP takes of a step."""
    varied = ("world_size", "label", "bucket_size_mb", "comm_hook", "breakdown")
    sentences: list[str] = []
    for name, same in series(cases, varied).items():
        steps = ranked(same)
        one_process = [step for case, step in steps if case.key["world_size"] == WITHOUT_DDP]
        ranks = max((case.key["world_size"] for case, _ in steps), default=WITHOUT_DDP)
        if ranks == WITHOUT_DDP:
            sentences += [f"{name}a step of one process takes {step}" for step in one_process]
            continue
        largest = [(case, step) for case, step in steps if case.key["world_size"] == ranks]
        sentences.append(name + scaling(*largest[0], one_process))
        if len(largest) > 1:
            settings = {setting_of(case.key): step for case, step in largest}
            sentences.append(name + fastest(settings))
    return sentences


def setting_of(key: Key) -> str:
    return f"hook {key['comm_hook']} with {key['bucket_size_mb']:g} MB"


def scaling(case: Case, step: Estimate, one_process: list[Estimate]) -> str:
    """`DDP on 2 ranks trains 1.24 times (1.10 to 1.39) as fast as one process; DDP takes
    16.2 (11.3 to 22.0) of a step's 76.1 ms`. one_process: its step, or nothing."""
    ranks = case.key["world_size"]
    on_ranks = f"DDP on {count_of(ranks, 'rank')}"
    sentence = f"{on_ranks} takes {step} a step"
    if one_process:
        speed = one_process[0].over(step).scaled(ranks)
        sentence = f"{on_ranks} trains {speed.times()} as fast as one process"
        if speed.may_be(1):
            sentence = f"{on_ranks} and one process cannot be told apart: {speed.times()} as fast"
    exposed = estimate_of(case, "exposed_communication_s", "exposed_communication_ci95_s")
    if not exposed:
        return sentence
    of_step = f"{exposed.beside(step.value)} of a step's {show_seconds(step.value)}"
    return f"{sentence}; DDP takes {of_step}"


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


def label_of(world_size: int, node_ranks: int) -> str:
    """`2M/8G`: 2 machines with 8 ranks each. Uneven: `2M/12G in all`."""
    machines = math.ceil(world_size / node_ranks)
    if machines > 1 and world_size % node_ranks:
        return f"{machines}M/{world_size}G in all"
    return f"{machines}M/{min(world_size, node_ranks)}G"


def plan(args: argparse.Namespace, job: Job, node_ranks: int) -> dict[str, list[Key]]:
    """The title and the keys of each table: one for each model and dtype. `no ddp` comes first."""
    options = ("batch_size", "image_size", *SHARED_FLAGS, "bind_cores")
    fixed = {name: getattr(args, name) for name in options}
    sizes = chosen_sizes(args.world_sizes, job.world_size, node_ranks)
    tables = {}
    for model, dtype in itertools.product(args.models, args.dtype):
        no_ddp = {"model": model, "dtype": dtype, "world_size": WITHOUT_DDP, "label": "no ddp"}
        no_ddp |= {"bucket_size_mb": None, "comm_hook": None, **fixed}
        keys = [no_ddp]
        for size, bucket_mb, hook in itertools.product(sizes, args.bucket_size, args.comm_hook):
            key = no_ddp | {"world_size": size, "label": label_of(size, node_ranks)}
            key |= {"bucket_size_mb": bucket_mb, "comm_hook": hook}
            if args.no_breakdown:  # a key without this field has a breakdown, as in older reports
                key["breakdown"] = False
            keys.append(key)
        tables[title_of(model, dtype, args, job.device)] = keys
    return tables


def measure_table(bench: Benchmark, keys: list[Key]) -> list[Case]:
    """Measure the cases of a table. Those that passed; on rank 0, elsewhere none."""
    passed: list[Case] = []
    one_process_s = None
    for key in keys:
        ranks = range(max(1, key["world_size"]))  # `no ddp` runs on rank 0
        case = bench.measure(key, partial(build, bench.job), partial(derive, one_process_s), ranks)
        if not case or case.failed:
            continue
        passed.append(case)
        if key["world_size"] == WITHOUT_DDP:
            one_process_s = case.metrics["step_time_p50_s"]
    return passed


def main() -> int:
    args = parse_args()
    with Benchmark("ddp_sweep", args, answer=answer) as bench:
        environment = bench.report.environment
        node_ranks = environment["local_world_size"]
        largest = chosen_sizes(args.world_sizes, bench.job.world_size, node_ranks)[-1]
        if largest > bench.job.world_size:
            bench.refuse(f"--world-sizes {largest} is more than the {bench.job.world_size} ranks")
        if args.strict_topology and environment["differences"]:
            bench.refuse(f"--strict-topology: {environment['differences'][0]}")
        tables = plan(args, bench.job, node_ranks)
        bench.announce(list(itertools.chain(*tables.values())))
        for title, keys in tables.items():
            bench.begin_table(title, columns(args), ["1M/2G 25MB none", "+-10.0%"])
            if passed := measure_table(bench, keys):
                bench.print(f"\nWhy: {title}\n\n{render(why_columns(args, bench.job), passed)}")
        if not args.no_breakdown:
            bench.print(FOOTER)
    return bench.status


if __name__ == "__main__":
    sys.exit(record(main)())
