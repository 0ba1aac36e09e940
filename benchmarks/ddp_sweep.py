#!/usr/bin/env python3
"""How long does a training step take under DistributedDataParallel, and how far does it scale?

Times whole training steps (zero_grad, forward, loss, backward with gradient averaging, optimizer
step) of torchvision models or of your own: `no ddp`, then 1, 2, 4, ... ranks of a node, then whole
nodes (`2M/8G`: 2 machines with 8 ranks each).

    step            the step; the slowest rank counts in each iteration
    local compute   the same step without averaging gradients (DDP's no_sync)
    alone           DDP's gradient buckets averaged by themselves, by the same hook
    exposed       = step - local compute: what DDP adds. It is communication that computing does
                    not hide, copies into and out of buckets, and what both take from computing
    late          = local compute of the slowest rank - of the median rank
    overlap       = 1 - exposed / alone
    one rank        the step of one rank alone, timed in turns with the step under DDP
    efficiency    = one rank / step;   speed-up = ranks * efficiency
                    --global-batch: that rank has the whole batch; efficiency = one rank / (ranks *
                    step)
    ex/sec/dev    = batch size of a rank / step;     samples/s = ranks * batch size / step
                    --accumulate K: a step has K batches, and so have these rates

Percentiles are over iterations. gmean: geometric mean over rounds of block medians. A printed ratio
or difference is the quotient or the difference of the printed gmeans.

    torchrun --nproc-per-node 2 benchmarks/ddp_sweep.py
    torchrun --nproc-per-node 8 benchmarks/ddp_sweep.py --model package.module:function
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \\
        benchmarks/ddp_sweep.py --comm-hook none,bf16 --bucket-size 25,100 --json report.jsonl

It asks what PyTorch's benchmarks/distributed/ddp/benchmark.py asks, and is written anew.
BSD-3-Clause.
"""

import argparse
import contextlib
import inspect
import itertools
import math
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import cli  # first: it names a package that is missing

# isort: split
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel

from benchmarks.workloads.own_model import (
    is_own,
    make_own,
    need_size,
    own_batch_size,
    without_rate,
)
from benchmarks.workloads.precision import PRECISION, name_precision, set_precision
from common.benchmark import Benchmark, Key, Planned
from common.check import NOT_FINITE, compare_replicas, digest, digest_of, verdict
from common.environment import count_of
from common.groups import Group, Job, agree
from common.memory import peak, start_peak
from common.report import Case, show_seconds
from common.stats import Disturbed, Times, breakdown, training_metrics
from common.table import Columns, ends, metric, percentile_columns, relative
from common.timing import Workload

CUDA_MODELS = ["resnet50", "resnet101", "resnext50_32x4d", "resnext101_32x8d"]
CPU_MODELS = ["resnet18", "mobilenet_v3_small"]  # for a first look on a laptop, at a small size
DDP_OPTIONS = ("gradient_as_bucket_view", "static_graph", "find_unused_parameters")
# DDP rebuilds its buckets in the second or third step; the log of a later one has their sizes
SETTLING_STEPS = 4


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = cli.Parser(__doc__)
    add, list_of, positive_int = parser.add_argument, cli.list_of, cli.positive_int
    default = cli.By(CUDA_MODELS, CPU_MODELS)
    text = "torchvision's classifiers, or package.module:function (default: %(default)s)"
    add("--models", "--model", type=list_of(str), default=default, metavar="NAME", help=text)
    one_of = parser.add_mutually_exclusive_group().add_argument
    batch = "batch size per rank (default: 32 on CUDA, 8 on the CPU)"
    one_of("--batch-size", type=positive_int, metavar="N", help=batch)
    whole = "total batch size, split evenly over the ranks: strong scaling"
    one_of("--global-batch", type=positive_int, metavar="N", help=whole)
    pixels = "width and height of the images (default: %(default)s)"
    add("--image-size", type=positive_int, default=cli.By(224, 64), metavar="PX", help=pixels)
    sizes = "numbers of ranks; nodes stands for 1, 2, 3, ... whole nodes (default: 1, 2, 4, ... "
    sizes += "ranks of a node, then 1, 2, 4, ... nodes, then all ranks)"
    add("--world-sizes", type=list_of(ranks_or_nodes), metavar="N", help=sizes)
    cap = "DDP's bucket_cap_mb (default: 25)"
    add("--bucket-size", type=list_of(cli.positive_float), default=[25.0], metavar="MB", help=cap)
    hooks = f"{', '.join(HOOKS)} (default: none, DDP's own all-reduce)"
    add("--comm-hook", type=list_of(str, tuple(HOOKS)), default=["none"], metavar="H", help=hooks)
    dtypes = "default (as torch sets it: TF32 in convolutions, not in matmuls), fp32, tf32, bf16 "
    dtypes += "by autocast (default: default)"
    all_dtypes = (*PRECISION, "bf16")
    add("--dtype", type=list_of(str, all_dtypes), default=["default"], metavar="D", help=dtypes)
    for option in DDP_OPTIONS:
        add(f"--{option.replace('_', '-')}", action="store_true", help="passed to DDP")
    several = "batches of a step: DDP averages the gradients of all after the last one (default: 1)"
    add("--accumulate", type=positive_int, default=1, metavar="K", help=several)
    only = "time only the step: about 4 times as fast, but no efficiency"
    add("--no-breakdown", action="store_true", help=only)
    cli.add_common_flags(parser)
    args = parser.parse_args(argv)
    cuda = cli.on_cuda(args.device)
    if "tf32" in args.dtype and not cuda:
        parser.error("tf32 is a mode of CUDA's tensor cores; try --dtype fp32 or bf16")
    import torchvision  # takes seconds, so it comes after the first lines of output

    known = set(torchvision.models.list_models(module=torchvision.models))
    known -= {"googlenet", "inception_v3"}  # they return the outputs of several heads
    for name in args.models:
        if is_own(name) and (args.batch_size or args.global_batch):
            example = f"'{name.partition('?')[0]}?batch=16' passes a parameter to the function"
            both = "--batch-size and --global-batch cannot be used with"
            parser.error(f"{both} {name}, which defines its own batch; e.g. {example}")
        if not is_own(name) and name not in known:
            hint = cli.suggest(name, known) or "; e.g. resnet50 or package.module:function"
            parser.error(f"unknown model '{name}'{hint}")
    args.batch_size = args.batch_size or (32 if cuda else 8)
    return args


def ranks_or_nodes(text: str) -> int | str:
    """An entry of --world-sizes."""
    return text if text == "nodes" else int(cli.positive_int(text))


# -- the workload: plain torch ---------------------------------------------------------------------
# [core]

HOOKS: dict[str, Any] = {  # how DDP averages gradients
    "none": None,  # DDP's own all-reduce, in C++
    "allreduce": default_hooks.allreduce_hook,
    "fp16": default_hooks.fp16_compress_hook,
    "bf16": default_hooks.bf16_compress_hook,
    "powersgd": powerSGD_hook.powerSGD_hook,  # of rank 1
}
Step = Callable[[], object]
# positional and keyword arguments of the forward pass, and the loss of a model's output
Batch = tuple[tuple[Any, ...], dict[str, Any], Callable[[Any], Tensor]]


def sgd(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9, weight_decay=1e-4)


def training_step(
    model: nn.Module,
    batch: Batch,
    optimizer: torch.optim.Optimizer,
    dtype: str,
    accumulate: int = 1,
    average: bool = True,
) -> Step:
    """One training step of a model. It accumulates the gradients of `accumulate` passes over the
    batch; DDP averages them in the last pass if `average` is set."""
    args, kwargs, loss_of = batch
    device_type = next(model.parameters()).device.type
    keep_local: Callable[[], Any] = (
        contextlib.nullcontext
    )  # passes whose gradients DDP does not average
    if isinstance(model, DistributedDataParallel):
        keep_local = model.no_sync

    def forward_backward() -> None:
        with torch.autocast(device_type, torch.bfloat16, enabled=dtype == "bf16"):
            loss = loss_of(model(*args, **kwargs))
        (loss / accumulate if accumulate > 1 else loss).backward()

    def step() -> None:
        optimizer.zero_grad()
        with keep_local():
            for _ in range(accumulate - average):
                forward_backward()
        for _ in range(average):
            forward_backward()
        optimizer.step()

    return step


def make_model(name: str, device: torch.device) -> nn.Module:
    import torchvision  # not before: it takes seconds

    return torchvision.models.get_model(name).to(device)


def make_batch(samples: int, pixels: int, device: torch.device) -> Batch:
    """Random images, [samples, 3, pixels, pixels], and cross-entropy with random targets."""
    targets = torch.randint(1000, (samples,), device=device)
    loss_of = partial(nn.functional.cross_entropy, target=targets)
    return (torch.rand(samples, 3, pixels, pixels, device=device),), {}, loss_of


def wrap(
    model: nn.Module, group: dist.ProcessGroup, bucket_mb: float, hook: str, **options: bool
) -> DistributedDataParallel:
    """The model under DDP. In a step gradients alone are sent, no buffers. options: of DDP."""
    send_buffers = "forward_sync_buffers"  # the option's name; an older torch has another one
    if send_buffers not in inspect.signature(DistributedDataParallel).parameters:
        send_buffers = "broadcast_buffers"
    settings: dict[str, Any] = {send_buffers: False, **options}
    settings |= {"process_group": group, "bucket_cap_mb": bucket_mb}
    ddp = DistributedDataParallel(model, **settings)
    state: Any = group
    if hook == "powersgd":  # by default the first 1,000 steps are not compressed; 2 is the least
        state = powerSGD_hook.PowerSGDState(group, start_powerSGD_iter=2)
    if hook != "none":
        ddp.register_comm_hook(state, HOOKS[hook])
    return ddp


def bucket_sizes(ddp: DistributedDataParallel) -> list[int]:
    """The bytes of each of DDP's buckets."""
    # private: the text of DDP's log, "1000, 400"; seen to work with torch 2.11, 2.14 and 2.15
    logged = ddp._get_ddp_logging_data()
    sizes = logged.get("rebuilt_bucket_sizes") or logged["bucket_sizes"]
    return [int(size) for size in str(sizes).split(", ")]


def average_alone(ddp: DistributedDataParallel, hook: str) -> Step:
    """A step that averages as DDP does: buckets of the same sizes, all at once, by the same hook.
    DDP shows its buckets to nobody, so zeros take their place."""
    dtype = next(ddp.parameters()).dtype
    counts = [size // dtype.itemsize for size in bucket_sizes(ddp)]
    buckets = [torch.zeros(count, dtype=dtype, device=ddp.device) for count in counts]

    def average(bucket: Tensor) -> Any:
        if hook == "none":
            return dist.all_reduce(bucket, group=ddp.process_group, async_op=True)
        return HOOKS[hook](ddp.process_group, SimpleNamespace(buffer=lambda: bucket))

    def average_all() -> None:
        pending = [average(bucket) for bucket in buckets]
        for reduction in pending:
            reduction.wait()

    return average_all


# [/core]
# -- a case ----------------------------------------------------------------------------------------


def build(bench: Benchmark, key: Key, group: Group) -> Workload:
    """What a rank measures in a case: the step and, for a breakdown, the parts that it is made of.

    Memory is read before the breakdown, which needs memory of its own.
    """
    dtype, device, pixels = key["dtype"], bench.job.device, key["image_size"]
    set_precision(dtype)
    memory_before = start_peak(device)
    torch.manual_seed(bench.job.rank)
    make_optimizer: Callable[[Any], torch.optim.Optimizer] = sgd
    tokens = 0
    if is_own(key["model"]):
        own = make_own(key["model"], device)
        need_size(key["model"], key["batch_size"])
        model, tokens = own.model, own.tokens()
        batch: Batch = (own.args, own.kwargs, own.loss)
        make_optimizer = own.optimizer or sgd
    else:
        model = make_model(key["model"], device)
        batch = make_batch(key["batch_size"], pixels, device)
    if key["ddp"]:
        options = {name: key[name] for name in DDP_OPTIONS}
        model = wrap(model, group.test, key["bucket_size_mb"], key["comm_hook"], **options)
        refuse_deadlock(model, key, dist.get_backend(group.test))
    # One optimizer for all steps: its state takes memory. The wrapped model has the same parameters
    optimizer = make_optimizer(model.parameters())
    make_step = partial(training_step, optimizer=optimizer, dtype=dtype)
    step = make_step(model, batch, accumulate=key["accumulate"])
    for _ in range(SETTLING_STEPS):
        step()
    # A step costs the same, and whatever the loss is, the timed steps leave the weights finite, and
    # equal on all ranks
    without_rate(optimizer)
    memory = peak(device, memory_before)

    parts: dict[str, Step | None] = {}  # None: this rank waits while the first one does it
    if isinstance(model, DistributedDataParallel) and key["breakdown"]:
        local = make_step(model, batch, accumulate=key["accumulate"], average=False)
        parts["local compute"] = local
        if key["ranks"] > 1:
            if key["comm_hook"] != "powersgd":  # its low-rank factors are not sent at once
                parts["alone"] = average_alone(model, key["comm_hook"])
            one_rank = None  # the step of one rank alone; it is the case's first rank
            if dist.get_rank(group.test) == 0:
                all_of_it = key["global_batch"]
                its_batch = make_batch(all_of_it, pixels, device) if all_of_it else batch
                # no second model: the one within DDP
                one_rank = make_step(model.module, its_batch, accumulate=key["accumulate"])
            if agree(one_rank and fits(one_rank), group):  # as the first rank says
                parts["no ddp"] = one_rank
            else:
                bench.print(f"# no efficiency: a batch of {key['global_batch']} fits on no rank")

    def facts() -> Facts:
        step()  # a fresh one: its gradients are averaged ones
        gradients = (p.grad for p in model.parameters() if p.grad is not None)
        return Facts(digest(model), digest_of(gradients), memory, tokens)

    return Workload(
        step,
        parts,
        compared=("local compute",) if "local compute" in parts else (),  # exposed's interval
        facts=facts,
        launches=True,
    )


class Facts(NamedTuple):
    """What a rank knows after a case: digests of its parameters and of the gradients of one more
    step, its memory by metric, the tokens of its batch (0: unknown)."""

    parameters: str
    gradients: str
    memory: dict[str, float]
    tokens: int


def refuse_deadlock(model: nn.Module, key: Key, backend: str) -> None:
    """Raises ValueError for PowerSGD over gloo if the gradients do not fit into one bucket: torch's
    hook waits for an all-reduce in a callback of the thread that runs all of them, and hangs."""
    size = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    can_hang = key["comm_hook"] == "powersgd" and backend == "gloo"
    if can_hang and size > key["bucket_size_mb"] * 2**20:
        raise ValueError(
            f"the powersgd hook hangs over gloo with several buckets, and the gradients take "
            f"{size / 2**20:.3g} MB; try --bucket-size {size // 2**20 + 1}"
        )


def fits(step: Step) -> bool:
    """Whether the device has the memory for a step."""
    try:
        step()
    except torch.OutOfMemoryError:
        return False
    return True


def derive(case: Case, times: Times, facts: list[Facts]) -> None:
    """Fill in the metrics and the check, on rank 0."""
    metrics, key, ranks = case.metrics, case.key, len(case.ranks)
    samples = ranks * key["batch_size"] * key["accumulate"]
    metrics |= training_metrics(times, samples)
    metrics["sample_s"] = metrics["step_s"] / samples
    if facts[0].tokens:
        tokens = sum(fact.tokens for fact in facts) * key["accumulate"]
        metrics["tokens_per_s"] = tokens / metrics["step_s"]
    metrics["step_cv"] = float(times.slowest().std() / times.slowest().mean())
    if "local compute" in times:
        metrics |= breakdown(times, "local compute", "alone" if "alone" in times else None)
    if "no ddp" in times:
        # weak scaling: `no ddp` does 1 / ranks of the work; strong scaling: all of it
        metrics["no_ddp_s"] = times.mean("no ddp")
        metrics["efficiency"] = times.ratio("no ddp") / (ranks if key["global_batch"] else 1)
    case.check = check(facts, case.ranks)
    for name in facts[0].memory:
        metrics[name] = max(fact.memory[name] for fact in facts)


def check(facts: list[Facts], ranks: list[int]) -> str:
    """Whether all ranks have the same parameters, and averaged to the same gradients.

    A loss that diverges is no fault of DDP: if values are not finite on every rank, the check is
    skipped.
    """
    for what in ("parameters", "gradients"):
        digests = [getattr(fact, what) for fact in facts]
        if set(digests) == {NOT_FINITE}:
            return f"skipped: the loss diverges: the {what} of all ranks are not finite"
        if problem := compare_replicas(digests, ranks, what):
            return verdict(problem)
    return "passed"


# -- what is printed -------------------------------------------------------------------------------


def samples_of_rank(case: Case) -> int:
    """The samples of a rank in a step."""
    return int(case.key["batch_size"] * case.key["accumulate"])


STEPS: Columns = {
    "": lambda case: case.name,
    "95% ci\nof p50": relative("step_p50_s"),
    **percentile_columns("step", "sec/iter", "ex/sec/dev", samples_of_rank),
}
BREAKDOWN: Columns = {
    "": lambda case: case.name,
    "efficiency\n(%)": metric("efficiency", 100, 1),
    "95% ci\n(%)": ends("efficiency", 100, 1),
    "one rank\ngmean (ms)": metric("no_ddp_s", 1e3),
    "step\ngmean (ms)": metric("step_s", 1e3),
    "exposed\ncommun.\n(ms)": metric("exposed_s", 1e3),
    "95% ci\n(ms)": ends("exposed_s", 1e3, 1),
    "local\ncompute\ngmean (ms)": metric("local_compute_s", 1e3),
    "samples/s": metric("samples_per_s", digits=1),
    "tokens/s": metric("tokens_per_s", digits=0),
    "commun.\nalone\ngmean (ms)": metric("communication_s", 1e3),
    "overlap\n(%)": metric("overlap", 100, 0),
    "late\n(ms)": metric("late_s", 1e3),
    "slowest\nrank": metric("straggler_rank", digits=0),
    "memory\n(GiB)": metric("memory_gib"),
    "per\nsample\n(ms)": metric("sample_s", 1e3),
}


def shown(cases: list[Case]) -> Columns:
    """The columns of the breakdown; tokens/s only if the number of tokens is known."""
    known = any("tokens_per_s" in case.metrics for case in cases)
    return {head: cell for head, cell in BREAKDOWN.items() if known or head != "tokens/s"}


def answer(cases: list[Case]) -> str:
    """How the most ranks, at their best setting, compare with one rank alone."""
    with_ddp = [case for case in cases if case.key["ddp"]]
    if not with_ddp:
        return f"{model_of(cases[0])}: a step of one rank takes {cases[0].metrics['step_s']}"
    ranks = max(len(case.ranks) for case in with_ddp)
    largest = [case for case in with_ddp if len(case.ranks) == ranks]
    return scaling(min(largest, key=lambda case: case.metrics["step_s"].value))


def model_of(case: Case) -> str:
    return f"{case.key['model']}, {case.key['dtype']}"


def scaling(case: Case) -> str:
    """`DDP on 2 ranks trains 1.24 times (1.10 to 1.39) as fast as one rank alone; DDP adds
    16.2 ms (11.3 to 22.0) to a step, which takes 76.1 ms`."""
    metrics, ranks = case.metrics, len(case.ranks)
    step, on_ranks = metrics["step_s"], f"{model_of(case)}: DDP on {count_of(ranks, 'rank')}"
    sentence, possible = f"{on_ranks} takes {step} a step", True
    if "efficiency" in metrics:
        speed = metrics["efficiency"] * ranks
        # under strong scaling the smaller batch of a rank may fit into its caches
        most = math.inf if case.key["global_batch"] else ranks
        possible = not speed.above(most)
        shown = speed.times(most) if possible else speed.times()
        sentence = f"{on_ranks} trains {shown} as fast as one rank alone"
        if speed.may_be(1):
            sentence = f"{on_ranks} and one rank alone cannot be told apart: {shown}"
    if exposed := metrics.get("exposed_s"):
        added = exposed.beside(step.value)  # in the step's unit
        sentence += f"; DDP adds {added} to a step, which takes {show_seconds(step.value)}"
        possible = possible and not (exposed / step).above(1)
    return sentence if possible else Disturbed(sentence)


# -- which cases -----------------------------------------------------------------------------------


def sizes_of(chosen: list[Any] | None, world_size: int, node_ranks: int) -> list[int]:
    """How many ranks each case has. chosen: --world-sizes; node_ranks: the ranks of a node."""
    if not chosen:
        powers = [2**i for i in range(world_size.bit_length())]
        within_a_node = [ranks for ranks in powers if ranks < node_ranks]
        whole_nodes = [nodes * node_ranks for nodes in powers]
        usual = within_a_node + whole_nodes
        chosen = [ranks for ranks in usual if ranks < world_size] + [world_size]
    sizes = {size for size in chosen if size != "nodes"}
    if "nodes" in chosen:
        sizes |= {*range(node_ranks, world_size, node_ranks), world_size}
    return sorted(sizes)


def name_of(ranks: int, node_ranks: int) -> str:
    """`1M/2G`: 1 machine with 2 ranks; `2M/8G (16)`: 8 on each of 2; uneven: `2M/12G in all`."""
    machines = math.ceil(ranks / node_ranks)
    if machines > 1 and ranks % node_ranks:
        return f"{machines}M/{ranks}G in all"
    return f"{machines}M/{min(ranks, node_ranks)}G" + (f" ({ranks})" if machines > 1 else "")


def title_of(model: str, dtype: str, size: int | None, args: argparse.Namespace, job: Job) -> str:
    """What all cases of a table share. size: the batch size of a rank; None if unknown."""
    batch = f"batch size {size or 'unknown'} a rank (weak scaling)"
    if args.global_batch:
        batch = f"global batch {args.global_batch} (strong scaling)"
    parts = [model, batch]
    if not is_own(model):
        parts.append(f"{args.image_size} px")
    parts.append(name_precision(dtype, job.device))
    if len(args.bucket_size) == 1:
        parts.append(f"buckets of {args.bucket_size[0]:g} MB")
    if len(args.comm_hook) == 1 and args.comm_hook != ["none"]:
        parts.append(f"hook {args.comm_hook[0]}")
    if args.accumulate > 1:
        parts.append(f"{args.accumulate} batches accumulated")
    parts += [name.replace("_", " ") for name in DDP_OPTIONS if getattr(args, name)]
    return ", ".join(parts)


def plan(
    args: argparse.Namespace, job: Job, sizes: list[int], own: dict[str, int | None]
) -> dict[str, list[Planned]]:
    """The title of each table (a model and a dtype), and its cases. own: batch sizes, by model."""
    tables = {}
    fixed = {name: getattr(args, name) for name in ("global_batch", "accumulate", *DDP_OPTIONS)}
    for model, dtype in itertools.product(args.models, args.dtype):
        of_table = {"model": model, "dtype": dtype, **fixed, "breakdown": not args.no_breakdown}
        of_table["image_size"] = None if is_own(model) else args.image_size
        size = own.get(model, args.batch_size)
        no_ddp = {"ddp": False, "batch_size": size, "bucket_size_mb": None, "comm_hook": None}
        cases: list[Planned] = [] if args.global_batch else [("no ddp", 1, of_table | no_ddp)]
        for ranks, bucket_mb, hook in itertools.product(sizes, args.bucket_size, args.comm_hook):
            name = name_of(ranks, job.local_world_size)
            name += f" {bucket_mb:g}MB" if len(args.bucket_size) > 1 else ""
            name += f" {hook}" if len(args.comm_hook) > 1 else ""
            share_of_rank = args.global_batch // ranks if args.global_batch else size
            ddp = {"ddp": True, "batch_size": share_of_rank}
            ddp |= {"bucket_size_mb": bucket_mb, "comm_hook": hook}
            cases.append((name, ranks, of_table | ddp))
        tables[title_of(model, dtype, size, args, job)] = cases
    return tables


def refused(args: argparse.Namespace, world_size: int, sizes: list[int]) -> str | None:
    """Why these sets of ranks cannot be, or None."""
    if sizes[-1] > world_size:
        ranks = count_of(world_size, "rank")
        return f"--world-sizes {sizes[-1]} is more than {ranks}; e.g. --world-sizes {world_size}"
    batch = args.global_batch or 0  # 0 divides among any ranks
    if uneven := [ranks for ranks in sizes if batch % ranks]:
        fit = ",".join(str(n) for n in range(1, world_size + 1) if batch % n == 0)
        ranks = count_of(uneven[0], "rank")
        return f"--global-batch {batch} is not divisible by {ranks}; try --world-sizes {fit}"
    return None


def main() -> int:
    args = parse_args()
    with Benchmark("ddp_sweep", args) as bench:
        job, own = bench.job, {}
        sizes = sizes_of(args.world_sizes, job.world_size, job.local_world_size)
        if problem := refused(args, job.world_size, sizes):
            bench.refuse(problem)
        for name in filter(is_own, args.models):
            own[name] = own_batch_size(bench, name, args.find_unused_parameters)
        tables = plan(args, job, sizes, own)
        bench.announce(tables)
        for title, cases in tables.items():
            with bench.begin_table(title, STEPS, answer) as table:
                for name, ranks, key in cases:
                    bench.measure(key, name, partial(build, bench), derive, ranks=range(ranks))
            if table.passed:
                columns = shown(table.passed)
                bench.print_table(columns, table.passed, f"Where the time goes: {title}")
    return bench.status


if __name__ == "__main__":
    sys.exit(record(main)())
