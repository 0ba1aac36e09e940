#!/usr/bin/env python3
"""How long does a training step take under DistributedDataParallel, and how far does it scale?

Times whole training steps (zero_grad, forward, loss, backward with gradient averaging, optimizer
step) of torchvision models or of your own model: first one process without DDP (`no ddp`), then DDP
on 1, 2, 4, ... ranks of a node, then whole nodes. `2M/8G` is 2 machines with 8 GPUs each; on the
CPU, `1M/2R` is 1 machine with 2 ranks.

    step            one training step; the time of an iteration is the maximum over ranks
    local compute   the same step without gradient averaging (DDP's no_sync)
    alone           DDP's gradient buckets averaged with nothing else running, by the same hook
    exposed       = step - local compute: the time that DDP adds to a step. It consists of
                    communication that computation does not hide, copies into and out of buckets,
                    and the slowdown of computation by communication
    late          = local compute of the slowest rank - median of that of the other ranks
    overlap       = 1 - exposed / alone; negative if exposed exceeds alone
    one rank        the step of a single rank, interleaved with the step under DDP
    efficiency    = one rank / step;   speedup = ranks * efficiency
                    with --global-batch, that rank processes the whole batch, and
                    efficiency = one rank / (ranks * step)
    ex/sec/dev    = batch size per rank / step;   samples/s = ranks * batch size per rank / step
                    with --accumulate K, a step processes K batches, and the rates count all K

    --interleave    times all bucket sizes, hooks, dtypes and --ddp-options in alternating blocks
                    within one case; each setting trains its own replica
    vs first      = step of the first setting / step of this setting. For k settings, all k - 1
                    intervals hold simultaneously with 95% confidence: each of them has a
                    confidence of 1 - 0.05 / (k - 1)

Percentiles are taken over iterations. gmean is the geometric mean over rounds of block medians.
Each printed ratio or difference is the quotient or the difference of the printed gmeans.

    torchrun --nproc-per-node 2 benchmarks/ddp_sweep.py
    torchrun --nproc-per-node 8 benchmarks/ddp_sweep.py --model package.module:function
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \\
        benchmarks/ddp_sweep.py --comm-hook none,bf16 --bucket-size 25,100 --interleave

The script answers the question of PyTorch's benchmarks/distributed/ddp/benchmark.py with new code.
BSD-3-Clause.
"""

import argparse
import contextlib
import inspect
import itertools
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness import cli, exits

exits.report_missing_packages()

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel

from benchmarks.workloads.check import NOT_FINITE, compare_replicas, digest_of, verdict
from benchmarks.workloads.memory import peak, start_peak
from benchmarks.workloads.own_groups import guard_cases
from benchmarks.workloads.own_model import (
    Trial,
    check_hook,
    is_own,
    make_hook,
    make_own,
    try_on_all,
    without_rate,
)
from benchmarks.workloads.percentiles import percentile_columns
from benchmarks.workloads.precision import DTYPE_HELP, PRECISION, name_precision, set_precision
from benchmarks.workloads.settings import (
    NOT_COMPARED,
    SettingsTable,
    compare_rows,
    compare_settings,
    of_all,
    split_case,
)
from benchmarks.workloads.training import (
    breakdown,
    late_text,
    slowest_ranks,
    training_metrics,
)
from common.groups import Group, Job
from common.stats import Times, show_seconds
from common.table import Columns, ends, metric, relative
from common.timing import StopRule, Workload
from harness.benchmark import Benchmark, Implausible, Key, Planned, Sentence
from harness.environment import count_of, rank_names
from harness.report import Case

CUDA_MODELS = ["resnet50", "resnet101", "resnext50_32x4d", "resnext101_32x8d"]
CPU_MODELS = ["resnet18", "mobilenet_v3_small"]  # quick on a laptop, with small images
DEFAULT = "default"  # bucket size: DDP chooses, because it is not given a bucket_cap_mb
WIRE = {"fp16": torch.float16, "bf16": torch.bfloat16}  # in which a hook sends gradients
SAMPLED = 4096  # limit on the values of a gradient that are compared with the mean
DTYPES = (*PRECISION, "bf16")
DDP_OPTIONS = ("gradient_as_bucket_view", "static_graph", "find_unused_parameters")
# DDP rebuilds its buckets in the second or third step; the log of a later step has their sizes
SETTLING_STEPS = 4

# an entry of --bucket-size: MiB, or DEFAULT
bucket_size = cli.checked(
    lambda text: text if text == DEFAULT else float(text),
    lambda size: size == DEFAULT or 0 < size < math.inf,
    "a number of MiB above 0, or default",
    "e.g. 25",
)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = cli.Parser(__doc__)
    add, list_of, positive_int = parser.add_argument, cli.list_of, cli.positive_int
    default = cli.PerDevice(CUDA_MODELS, CPU_MODELS)
    add(
        "--models",
        "--model",
        type=list_of(str),
        default=default,
        metavar="NAME",
        help="torchvision classifiers or package.module:function, separated by commas (default: "
        "%(default)s)",
    )
    one_of = parser.add_mutually_exclusive_group().add_argument
    one_of(
        "--batch-size",
        type=positive_int,
        metavar="N",
        help="batch size per rank (default: 32 on CUDA, 8 on the CPU)",
    )
    one_of(
        "--global-batch",
        type=positive_int,
        metavar="N",
        help="total batch size, divided evenly among the ranks (strong scaling)",
    )
    default_px = cli.PerDevice(224, 64)
    add(
        "--image-size",
        type=positive_int,
        default=default_px,
        metavar="PX",
        help="width and height of the images in pixels (default: %(default)s)",
    )
    add(
        "--world-sizes",
        type=list_of(ranks_or_nodes),
        metavar="N",
        help="numbers of ranks to measure; `nodes` means 1, 2, 3, ... whole nodes (default: 1, "
        "2, 4, ... ranks of a node, then 1, 2, 4, ... nodes, then all ranks)",
    )
    add(
        "--bucket-size",
        type=list_of(bucket_size),
        default=[DEFAULT],
        metavar="MIB",
        help="bucket_cap_mb of DDP in MiB, or `default` for DDP's own buckets of 25 MiB, of "
        "which the first has 1 MiB (default: default)",
    )
    add(
        "--comm-hook",
        type=list_of(hook_name),
        default=["none"],
        metavar="H",
        help=f"DDP communication hooks: {', '.join(HOOKS)}, or your own package.module:function "
        "(default: none, DDP's own all-reduce)",
    )
    dtypes = list_of(str, DTYPES)
    add("--dtype", type=dtypes, default=["default"], metavar="D", help=DTYPE_HELP)
    for option in DDP_OPTIONS:
        flag = f"--{option.replace('_', '-')}"
        add(flag, action="store_true", help="passed to DistributedDataParallel")
    add(
        "--ddp-options",
        type=list_of(ddp_options),
        default=[],
        metavar="O",
        help=f"compare these: none, {', '.join(DDP_OPTIONS)}, or several joined by +",
    )
    add(
        "--accumulate",
        type=positive_int,
        default=1,
        metavar="K",
        help="batches per step; DDP averages the accumulated gradients once, after the last "
        "batch (default: 1)",
    )
    add(
        "--interleave",
        action="store_true",
        help="time all bucket sizes, hooks, dtypes and --ddp-options in alternating blocks, each "
        "with its own replica, and report which is fastest; --max-seconds applies to each setting",
    )
    add(
        "--no-breakdown",
        action="store_true",
        help="skip the breakdown: about 4 times as fast, but without efficiency",
    )
    cli.add_common_flags(parser)
    args = parser.parse_args(argv)
    cuda = cli.on_cuda(args.device)
    if "tf32" in args.dtype and not cuda:
        parser.error("--dtype tf32 requires CUDA; use fp32 or bf16")
    if args.interleave and len(settings := all_settings(args)) < 2:
        expected = "--interleave: expected several bucket sizes, hooks, dtypes or --ddp-options"
        parser.error(f"{expected}, got only {settings[0].text}; e.g. --comm-hook none,bf16")
    if varies_dtype(args):
        if "default" in args.dtype:  # it is that of torch or of the case before
            parser.error("--interleave alternates fp32, tf32 and bf16, got default; e.g. fp32,bf16")
        args.no_breakdown = True  # local compute and one rank depend on the dtype
    import torchvision  # slow to import, so only after the first lines of output

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


def hook_name(text: str) -> str:
    """Return an entry of --comm-hook."""
    if text not in HOOKS and not is_own(text):
        advice = cli.suggest(text, HOOKS).lstrip("; ") or "e.g. bf16 or package.module:function"
        cli.raise_invalid(f"one of {', '.join(HOOKS)}", repr(text), advice)
    return text


def ddp_options(text: str) -> str:
    """Return an entry of --ddp-options."""
    for name in [] if text == "none" else text.split("+"):
        if name not in DDP_OPTIONS:
            advice = cli.suggest(name, DDP_OPTIONS).lstrip("; ") or "e.g. none,static_graph"
            cli.raise_invalid(f"none or names of {', '.join(DDP_OPTIONS)}", repr(name), advice)
    return text


class Setting(NamedTuple):
    """How DDP averages gradients: its `bucket_cap_mb`, and the name of a hook: in HOOKS, or the
    user's own.

    bucket_mb: in MiB, or `default` if the argument is not passed. dtype, options: of --dtype and
    --ddp-options, if they differ between the settings of a case.
    """

    bucket_mb: float | str
    hook: str
    dtype: str | None = None
    options: str | None = None

    @property
    def label(self) -> str:
        """`25MB bf16` or `default none fp32 static_graph`: in keys, rows and names of metrics."""
        words = (show_bucket_size(self.bucket_mb, "MB"), self.hook, self.dtype, self.options)
        return " ".join(filter(None, words))

    @property
    def text(self) -> str:
        """`25 MiB with bf16` or `default buckets, fp32, static_graph`: in sentences."""
        if self.bucket_mb == DEFAULT:
            size = "default buckets"
        else:
            size = show_bucket_size(self.bucket_mb, " MiB")
        size += f" with {self.hook}" if self.hook != "none" else ""
        options = "no options" if self.options == "none" else self.options
        return ", ".join(filter(None, (size, self.dtype, options)))

    @property
    def buckets(self) -> str:
        """`buckets of 25 MiB with bf16` or `DDP's default buckets with bf16`: in sentences that
        name the dtype elsewhere."""
        text = self._replace(dtype=None).text
        return f"DDP's {text}" if self.bucket_mb == DEFAULT else f"buckets of {text}"


def show_bucket_size(bucket_mb: float | str, unit: str) -> str:
    return bucket_mb if isinstance(bucket_mb, str) else f"{bucket_mb:.15g}{unit}"


def varies_dtype(args: argparse.Namespace) -> bool:
    """Whether the settings of a case differ in their dtype."""
    return bool(args.interleave and len(args.dtype) > 1)


def all_settings(args: argparse.Namespace) -> list[Setting]:
    """All combinations of bucket sizes, hooks, dtypes within a case, and options."""
    dtypes = args.dtype if varies_dtype(args) else [None]
    given = (args.bucket_size, args.comm_hook, dtypes, args.ddp_options or [None])
    return list(itertools.starmap(Setting, itertools.product(*given)))


def settings_of(key: Key) -> list[Setting]:
    """The settings that a case times: one; several with --interleave; none without DDP."""
    if not key["ddp"]:
        return []
    if "settings" not in key:
        return [Setting(key["bucket_size_mb"], key["comm_hook"], None, key.get("ddp_options"))]
    settings = []
    for label in key["settings"].split(", "):
        size, hook, *others = label.split()
        dtype = others.pop(0) if others and others[0] in DTYPES else None
        options = others[0] if others else None
        settings.append(Setting(bucket_size(size.removesuffix("MB")), hook, dtype, options))
    return settings


# -- the workload: plain torch ---------------------------------------------------------------------
# [core]

HOOKS: dict[str, Any] = {  # DDP communication hooks, which average the gradients
    "none": None,  # DDP's own all-reduce, in C++
    "allreduce": default_hooks.allreduce_hook,
    "fp16": default_hooks.fp16_compress_hook,
    "bf16": default_hooks.bf16_compress_hook,
    "powersgd": powerSGD_hook.powerSGD_hook,  # matrix_approximation_rank=1
}
EXACT = HOOKS.keys() - {"powersgd"}  # they average, up to rounding
Step = Callable[[], object]
# positional and keyword arguments of the forward pass, and a function from the output to the loss
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
    """One training step, which accumulates the gradients of `accumulate` passes over the batch. DDP
    averages them in the last pass if `average` is set; otherwise they stay local."""
    args, kwargs, loss_of = batch
    device_type = next(model.parameters()).device.type
    keep_local: Callable[[], Any] = contextlib.nullcontext
    if isinstance(model, DistributedDataParallel):
        keep_local = model.no_sync  # within it DDP averages no gradients

    def forward_backward() -> None:
        with torch.autocast(device_type, torch.bfloat16, enabled=dtype == "bf16"):
            loss = loss_of(model(*args, **kwargs))
        (loss / accumulate if accumulate > 1 else loss).backward()

    local_passes = accumulate - 1 if average else accumulate

    def step() -> None:
        optimizer.zero_grad()
        with keep_local():
            for _ in range(local_passes):
                forward_backward()
        if average:
            forward_backward()
        optimizer.step()

    return step


def make_model(name: str, device: torch.device) -> nn.Module:
    import torchvision  # slow to import

    return torchvision.models.get_model(name).to(device)


def make_batch(samples: int, pixels: int, device: torch.device) -> Batch:
    """Random images, [samples, 3, pixels, pixels], and cross-entropy with random targets."""
    targets = torch.randint(1000, (samples,), device=device)
    loss_of = partial(nn.functional.cross_entropy, target=targets)
    return (torch.rand(samples, 3, pixels, pixels, device=device),), {}, loss_of


def wrap(
    model: nn.Module, group: dist.ProcessGroup, bucket_mb: float | None, hook: str, **options: bool
) -> DistributedDataParallel:
    """Wrap the model in DDP, which then communicates gradients, but no buffers.

    bucket_mb: DDP's bucket_cap_mb, in MiB; None for its default, 25 MiB and 1 MiB for the first
    bucket. options: further arguments of DDP.
    """
    sync_buffers = "forward_sync_buffers"  # older versions of torch have broadcast_buffers instead
    if sync_buffers not in inspect.signature(DistributedDataParallel).parameters:
        sync_buffers = "broadcast_buffers"
    settings: dict[str, Any] = {sync_buffers: False, **options}
    settings |= {"process_group": group, "bucket_cap_mb": bucket_mb}
    ddp = DistributedDataParallel(model, **settings)
    state: Any = group
    if hook == "powersgd":  # by default the first 1,000 steps are not compressed; 2 is the minimum
        state = powerSGD_hook.PowerSGDState(group, start_powerSGD_iter=2)
    if HOOKS.get(hook):
        ddp.register_comm_hook(state, HOOKS[hook])
    return ddp


def bucket_sizes(ddp: DistributedDataParallel) -> list[int]:
    """The size of each DDP bucket in bytes."""
    # private API; returns a text such as "1000, 400" in torch 2.11, 2.14 and 2.15
    logged = ddp._get_ddp_logging_data()
    sizes = logged.get("rebuilt_bucket_sizes") or logged["bucket_sizes"]
    return [int(size) for size in str(sizes).split(", ")]


def average_alone(ddp: DistributedDataParallel, hook: str) -> Step:
    """Return a step that only averages gradients: all buckets at once, with DDP's bucket sizes and
    the same hook. DDP does not expose its buckets, so tensors of zeros replace them.

    Raises ValueError for powersgd, which does not send its low-rank factors all at once.
    """
    if hook == "powersgd":
        raise ValueError("powersgd cannot be timed alone: its factors are not sent all at once")
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


class Replica(NamedTuple):
    """A model and its training step."""

    setting: Setting | None  # None without DDP
    model: nn.Module  # under DDP, or the bare model
    batch: Batch
    tokens: int  # in the batch; 0 if unknown
    # training_step with this replica's optimizer. All its steps share that optimizer, because its
    # state needs memory; a wrapped model has the same parameters
    make_step: Callable[..., Step]
    step: Step


def make_replica(key: Key, group: Group, job: Job, setting: Setting | None) -> Replica:
    """Make a replica and train it until DDP has rebuilt its buckets. setting: None without DDP."""
    torch.manual_seed(job.rank)
    # With a setting, the optimizer may communicate over group.workload, and should average
    # nothing: DDP does. Without one it must not communicate: in the breakdown a single rank of the
    # group makes and runs such a replica. Setting the learning rate to 0 must keep the weights.
    # With an optimizer that communicates, ranks wait for each other within `local compute`, too, so
    # `derive` has to leave out OF_RANKS. `known_reason` below compares with `sgd`.
    make_optimizer: Callable[[Any], torch.optim.Optimizer] = sgd
    tokens = 0
    if is_own(key["model"]):
        own = make_own(key["model"], job.device)
        model, tokens = own.model, own.tokens()
        batch: Batch = (own.args, own.kwargs, own.loss)
        make_optimizer = own.optimizer or sgd
    else:
        model = make_model(key["model"], job.device)
        batch = make_batch(key["batch_size"], key["image_size"], job.device)
    if setting:
        key = key | options_of(setting)
        options = {name: key[name] for name in DDP_OPTIONS}
        bucket_mb = None if isinstance(setting.bucket_mb, str) else setting.bucket_mb
        model = wrap(model, group.workload, bucket_mb, setting.hook, **options)
        if is_own(setting.hook):
            model.register_comm_hook(*make_hook(setting.hook, group.workload))
        refuse_deadlock(model, setting, dist.get_backend(group.workload))
    optimizer = make_optimizer(model.parameters())
    dtype = (setting and setting.dtype) or key["dtype"]
    make_step = partial(
        training_step, optimizer=optimizer, dtype=dtype, accumulate=key["accumulate"]
    )
    step = make_step(model, batch)
    if setting and setting.dtype:
        step = in_precision(dtype, step)
    try:
        for _ in range(SETTLING_STEPS):
            step()
    except RuntimeError as error:
        if reason := known_reason(error, key, model, make_optimizer is sgd):
            raise ValueError(reason) from None
        raise
    # With a rate of 0, a step takes as long, and the weights stay finite and equal on all ranks,
    # regardless of the loss
    without_rate(optimizer)
    return Replica(setting, model, batch, tokens, make_step, step)


def options_of(setting: Setting) -> dict[str, bool]:
    """The arguments of DDP that a setting sets, in addition to those of the flags."""
    return {name: True for name in DDP_OPTIONS if name in (setting.options or "").split("+")}


def in_precision(dtype: str, step: Step) -> Step:
    """A step that sets the precision for a dtype, unless the step before has set it: in a block,
    that is an untimed one."""
    products, _ = PRECISION.get(dtype) or PRECISION["fp32"] or ("", False)

    def run() -> None:
        if torch.get_float32_matmul_precision() != products:
            set_precision(dtype)
        step()

    return run


def known_reason(
    error: RuntimeError, key: Key, model: nn.Module, default_optimizer: bool
) -> str | None:
    """Return why a step fails, with what to do, for errors of torch that do not say so."""
    if "INTERNAL ASSERT" in str(error) and key["static_graph"] and key["accumulate"] > 1:
        return (
            "DDP of torch fails with --static-graph and --accumulate above 1 "
            "(github.com/pytorch/pytorch/issues/187732); use only one of them"
        )
    for path, parameter in model.named_parameters():
        name = path.removeprefix("module.")
        if default_optimizer and parameter.grad is not None and parameter.grad.is_sparse:
            return (
                f"the gradient of {name} is sparse, which the default optimizer, SGD with weight "
                "decay, does not support; return an optimizer, e.g. torch.optim.SparseAdam"
            )
    return None


def build(bench: Benchmark, key: Key, group: Group) -> Workload:
    """The workload of a case: the step and, for the breakdown, its parts. With --interleave the
    step is that of the first setting, and the steps of the other settings are parts.

    Memory is read before the breakdown, which itself allocates memory.
    """
    job = bench.job
    set_precision(key["dtype"] or "fp32")
    memory_before = start_peak(job.device)
    settings = settings_of(key)
    of_replicas: Sequence[Setting | None] = settings or [None]
    replicas = [make_replica(key, group, job, setting) for setting in of_replicas]
    first, *others = replicas
    memory = {} if others else peak(job.device, memory_before)  # defined for a single replica only
    parts: dict[str, Step | None] = {}  # None on a rank that does not run the part
    for setting, replica in zip(settings[1:], others, strict=True):
        parts[setting.label] = replica.step
    model = first.model
    if isinstance(model, DistributedDataParallel) and key["breakdown"]:
        # buckets, hooks and options play no part without averaging, so one replica is sufficient
        parts["local compute"] = first.make_step(model, first.batch, average=False)
        # see average_alone; a hook of the user's may need more of a bucket than its buffer
        can_be_alone = settings[0].hook in HOOKS and settings[0].hook != "powersgd"
        if key["ranks"] > 1 and not others and can_be_alone:
            parts["alone"] = average_alone(model, settings[0].hook)
        if key["ranks"] > 1 and not communicates(key):
            one_rank: Replica | None = None
            size = key["global_batch"] or key["batch_size"]
            if dist.get_rank(group.workload) == 0:
                with contextlib.suppress(torch.OutOfMemoryError):
                    one_rank = make_replica(key | {"batch_size": size}, group, job, None)
            if group.broadcast(one_rank is not None):  # the first rank decides
                parts["no ddp"] = one_rank and one_rank.step
            else:
                bench.print(
                    f"# efficiency omitted: a batch of {size} and a second replica do not fit into "
                    "the memory of one rank"
                )
    return Workload(
        first.step,
        parts,
        # parts whose difference from the step, or ratio to it, is printed with an interval
        compared=[name for name in parts if name not in ("alone", "no ddp")],
        facts=lambda: facts_of(replicas, memory, group),
        launches=True,
    )


def communicates(key: Key) -> bool:
    """Whether the model of a case communicates in its forward pass, loss or backward pass."""
    return bool(key.get("communicates"))


class Facts(NamedTuple):
    """The state of a rank after the timing of a case."""

    parameters: str  # digest
    gradients: str  # digest of the gradients of one more step
    memory: dict[str, float]  # metrics
    tokens: int  # in a batch; 0 if unknown
    others: tuple["Facts", ...] = ()  # of the replicas of the other settings
    wrong: str | None = None  # a gradient that is not the mean over ranks


def facts_of(replicas: Sequence[Replica], memory: dict[str, float], group: Group) -> Facts:
    first, *others = replicas
    # one more step, because the last timed step may not have averaged its gradients
    wrong = compare_with_mean(first, group)
    parameters = [*averaged(first.model).values()]
    gradients = (p.grad for p in parameters if p.grad is not None)
    of_others = tuple(facts_of([replica], memory, group) for replica in others)
    hashed = digest_of(parameters), digest_of(gradients)
    return Facts(*hashed, memory, first.tokens, of_others, wrong)


def averaged(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that DDP keeps equal on all ranks, by name: not those that a model makes it
    ignore, such as experts that differ between ranks."""
    named = {name.removeprefix("module."): p for name, p in model.named_parameters()}
    ignored = getattr(model, "parameters_to_ignore", ())  # of DDP
    return {name: parameter for name, parameter in named.items() if name not in ignored}


def compare_with_mean(replica: Replica, group: Group) -> str | None:
    """Compute gradients and compare those of DDP with the mean over ranks of the local ones.

    The mean is computed over the control group, from at most SAMPLED evenly spaced values of each
    gradient. powersgd only approximates gradients of two or more dimensions, and a hook of the
    user's may approximate all: these are not compared. Returns a description of the first
    difference, or None.
    """
    setting, named = replica.setting, dict[str, nn.Parameter]()
    for name, parameter in averaged(replica.model).items():
        exact = setting and (
            setting.hook in EXACT or (setting.hook in HOOKS and parameter.dim() < 2)
        )
        if parameter.requires_grad and exact:
            named[name] = parameter
    local = {name: torch.zeros_like(sample(p)) for name, p in named.items()}

    def add(name: str, gradient: Tensor) -> None:  # before DDP averages it
        local[name] += sample(gradient)

    hooks = [p.register_hook(partial(add, name)) for name, p in named.items()]
    no_optimizer = SimpleNamespace(zero_grad=replica.model.zero_grad, step=lambda: None)
    replica.make_step(replica.model, replica.batch, optimizer=no_optimizer)()
    for hook in hooks:
        hook.remove()
    if not setting or not named:
        return None
    flat = torch.cat([*local.values()])
    means = torch.stack([flat, flat.abs()])
    dist.all_reduce(means, group=group.control)
    means /= len(group.ranks)
    splits = means.split([len(part) for part in local.values()], dim=1)
    for (name, parameter), (mean, mean_size) in zip(named.items(), splits, strict=True):
        got = 0 if parameter.grad is None else sample(parameter.grad)  # None: used on no rank
        error, largest = float((got - mean).abs().max()), float(mean_size.max())
        types = [torch.finfo(t) for t in (parameter.dtype, WIRE.get(setting.hook, parameter.dtype))]
        rounding = max(info.eps * max(largest, info.smallest_normal) for info in types)
        # each of ranks - 1 additions, the division and the casts may round; also if it is NaN
        if not error <= (len(group.ranks) + 4) * rounding:
            differs = f"differs from the mean over ranks by {error / largest:.2g} of its largest"
            return f"the gradient of {name} {differs} value"
    return None


def sample(tensor: Tensor) -> Tensor:
    """At most SAMPLED evenly spaced values of a tensor, as float64 on the CPU: of a complex one its
    real and imaginary parts."""
    dense = (tensor.to_dense() if tensor.is_sparse else tensor).detach()
    flat = (torch.view_as_real(dense) if dense.is_complex() else dense).reshape(-1)
    return flat[:: max(1, math.ceil(len(flat) / SAMPLED))].double().cpu()


def refuse_deadlock(model: nn.Module, setting: Setting, backend: str) -> None:
    """Raise ValueError for PowerSGD over gloo if the gradients need more than one bucket.

    torch's hook then deadlocks: its callback waits for an all-reduce on the very thread that runs
    all of them.
    """
    size = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    can_hang = setting.hook == "powersgd" and backend == "gloo"
    first_mb = 1.0 if isinstance(setting.bucket_mb, str) else setting.bucket_mb
    if can_hang and size > first_mb * 2**20:
        raise ValueError(
            f"the powersgd hook hangs over gloo with several buckets, and the gradients take "
            f"{size / 2**20:.3g} MiB; try --bucket-size {size // 2**20 + 1}"
        )


def derive(case: Case, times: Times, facts: list[Facts]) -> None:
    """Fill in the metrics and the check, on rank 0.

    With --interleave the metrics are those of the first setting. The names of all others start with
    the label of their setting, as in `25MB bf16 step_s`.
    """
    metrics, settings = case.metrics, settings_of(case.key)
    tokens = sum(fact.tokens for fact in facts)
    metrics |= step_metrics(case, times, tokens)
    if "local compute" in times:
        parts = breakdown(times, "local compute", "alone" if "alone" in times else None)
        # if the model communicates, ranks wait for each other within local compute
        left_out = OF_RANKS if communicates(case.key) else ()
        metrics |= {name: value for name, value in parts.items() if name not in left_out}
    if "no ddp" in times:
        metrics["no_ddp_s"] = times.mean("no ddp")
    for setting in settings[1:]:
        own = step_metrics(case, times.relative_to(setting.label), tokens)
        metrics |= {f"{setting.label} {name}": value for name, value in own.items()}
    if len(settings) > 1:
        metrics |= compare_settings(times, [setting.label for setting in settings])
    case.check = check_all(facts, case.ranks, [setting.label for setting in settings])
    for name in facts[0].memory:
        metrics[name] = max(fact.memory[name] for fact in facts)


def step_metrics(case: Case, times: Times, tokens: int) -> dict[str, Any]:
    """The metrics of a step. tokens: number of tokens in the batches of all ranks."""
    key, ranks = case.key, len(case.ranks)
    samples = ranks * (samples_of_rank(case) or 0)
    metrics = training_metrics(times, samples)
    if samples:
        metrics["sample_s"] = metrics["step_s"] / samples
    else:  # the batch size is unknown
        del metrics["samples_per_s"]
    if tokens:
        metrics["tokens_per_s"] = tokens * key["accumulate"] / metrics["step_s"]
    metrics["step_cv"] = float(times.slowest().std() / times.slowest().mean())
    if "local compute" in times:
        metrics["exposed_s"] = times.excess_over("local compute")
    if "no ddp" in times:
        # under weak scaling `no ddp` does 1 / ranks of the work, under strong scaling all of it
        metrics["efficiency"] = times.ratio("no ddp") / (ranks if key["global_batch"] else 1)
    return metrics


def samples_of_rank(case: Case) -> int | None:
    """Number of samples that a rank processes in a step; None if unknown."""
    size = case.key["batch_size"]
    return None if size is None else int(size * case.key["accumulate"])


def check_all(facts: list[Facts], ranks: list[int], labels: list[str]) -> str:
    """The check of all replicas: the first that failed, otherwise the first that was skipped."""
    checks = [check(facts, ranks)]
    for number, label in enumerate(labels[1:]):
        kind, colon, reason = check([fact.others[number] for fact in facts], ranks).partition(": ")
        checks.append(kind + colon + (f"{label}: {reason}" if reason else ""))
    problems = [checked for checked in checks if checked != "passed"]
    return min(problems, key=lambda checked: not checked.startswith("failed"), default="passed")


def check(facts: list[Facts], ranks: list[int]) -> str:
    """Whether all ranks have equal parameters and equal averaged gradients, which are the mean of
    the local ones.

    A loss that is not finite is no fault of DDP: if the values of all ranks are not finite, the
    check is skipped; if only those of some ranks are not, it fails.
    """
    for what in ("parameters", "gradients"):
        digests = [getattr(fact, what) for fact in facts]
        if set(digests) == {NOT_FINITE}:
            return f"skipped: the {what} of all ranks are not finite"
        if problem := compare_replicas(digests, ranks, what):
            return verdict(problem)
    return verdict(next((fact.wrong for fact in facts if fact.wrong), None))


# -- tables and answers ----------------------------------------------------------------------------

BREAKDOWN: Columns = {
    "": lambda case: case.name,
    "efficiency\n(%)": metric("efficiency", 100, 1),
    "95% ci\n(%)": ends("efficiency", 100, 1),
    "one rank\ngmean (ms)": metric("no_ddp_s", 1e3),
    "step\ngmean (ms)": metric("step_s", 1e3),
    "exposed\ncommun.\n(ms)": metric("exposed_s", 1e3),
    "95% ci\n(ms)": ends("exposed_s", 1e3, 1),
    "local\ncompute\ngmean (ms)": metric("local_compute_s", 1e3),
    "commun.\nalone\ngmean (ms)": metric("communication_s", 1e3),
    "overlap\n(%)": metric("overlap", 100, 0),
    "95% ci of\noverlap\n(%)": ends("overlap", 100, 0),
    "late\n(ms)": metric("late_s", 1e3),
    "95% ci\nof late\n(ms)": ends("late_s", 1e3, 1),
    "slowest\nrank": slowest_ranks,
    "95% ci\nof alone\n(ms)": ends("communication_s", 1e3, 1),
    "memory\n(GiB)": metric("memory_gib"),
}
OF_ONE_SETTING = ("communication_s", "overlap", "memory_gib")  # metrics
STEP_ALONE: Columns = {  # with --no-breakdown
    "": BREAKDOWN[""],
    "step\ngmean (ms)": BREAKDOWN["step\ngmean (ms)"],
    "95% ci\nof step": relative("step_s"),
    "memory\n(GiB)": BREAKDOWN["memory\n(GiB)"],
}
COMPARED: Columns = {  # with --interleave: the ratio, then the times of which it is the quotient
    "": BREAKDOWN[""],
    "vs\nfirst": metric("speed"),
    "simult.\n95% ci": ends("speed"),
    "step\ngmean (ms)": BREAKDOWN["step\ngmean (ms)"],
}
EXPOSED = ("exposed\ncommun.\n(ms)", "95% ci\n(ms)")
RATES: Columns = {
    "": lambda case: case.name,
    "samples/s": metric("samples_per_s", digits=1),
    "tokens/s": metric("tokens_per_s", digits=0),
    "95% ci\nof p50": relative("step_p50_s"),
    **percentile_columns("step", "sec/iter", "ex/sec/dev", samples_of_rank),
    "per\nsample\n(ms)": metric("sample_s", 1e3),
}
# metrics that compare ranks, and those that --interleave measures once for all settings
OF_RANKS = ("late_s", "late_ranks", "late_wait_s")
SHARED = ("local_compute_s", "no_ddp_s", *OF_RANKS)


def columns_of(args: argparse.Namespace) -> Columns:
    """The columns of the first table."""
    columns = STEP_ALONE if args.no_breakdown else BREAKDOWN
    if not args.interleave:
        return columns
    exposed = {head: columns[head] for head in EXPOSED if head in columns}
    others = {
        head: cell
        for head, cell in columns.items()
        if getattr(cell, "name", None) not in OF_ONE_SETTING
    }
    return COMPARED | exposed | others


def rates_of(cases: list[Case]) -> Columns:
    """The columns of the second table, with tokens/s if the number of tokens is known."""
    known = any("tokens_per_s" in case.metrics for case in cases)
    return {head: cell for head, cell in RATES.items() if known or head != "tokens/s"}


def rows_of(case: Case) -> list[Case]:
    """The rows of a case: one for each setting."""
    settings = settings_of(case.key)
    rows = split_case(case, [setting.label for setting in settings], SHARED)
    if len(rows) < 2:
        return rows
    named = []
    for setting, row in zip(settings, rows, strict=True):
        key = case.key | {"bucket_size_mb": setting.bucket_mb, "comm_hook": setting.hook}
        key |= {"settings": setting.label, "dtype": setting.dtype or key["dtype"]}
        named.append(replace(row, name=f"{case.name} {setting.label}", key=key))
    return named


def row_labels(cases: Sequence[Planned]) -> list[str]:
    """The first cells of all rows of these cases."""
    labels: list[str] = []
    for name, _, key in cases:
        settings = settings_of(key) if "settings" in key else []
        labels += [f"{name} {setting.label}" for setting in settings] or [name]
    return labels


def interference(cases: list[Case]) -> str | None:
    """A line about the cases whose overlap is significantly negative; None if there are none."""
    overlaps = {case.name: case.metrics.get("overlap") for case in cases}
    slowed = [name for name, overlap in overlaps.items() if overlap and (1 - overlap).above(1)]
    if not slowed:
        return None
    return (
        f"exposed exceeds communication alone for {cli.cut(slowed)}: computation and "
        "communication may slow each other down"
    )


def answer(cases: list[Case], names: Sequence[str] = ()) -> list[Sentence]:
    """For the largest number of ranks, one sentence per setting that compares it with one rank
    alone; with --interleave also sentences that compare the settings. names: of all ranks, with
    their hosts, if known."""
    with_ddp = [case for case in cases if case.key["ddp"]]
    if not with_ddp:
        return [f"{model_of(cases[0])}: a step of one rank takes {cases[0].metrics['step_s']}"]
    ranks = max(len(case.ranks) for case in with_ddp)
    largest = [case for case in with_ddp if len(case.ranks) == ranks]
    first, model = largest[0], model_of(largest[0])
    if setting_of(first).dtype:
        model = first.key["model"]
    if "settings" in first.key:
        begin = f"{model}, {count_of(ranks, 'rank')}"
        compared = compare_rows(largest, lambda row: setting_of(row).text)
        return [scaling(first, names), *(f"{begin}: {sentence}" for sentence in compared)]
    sentences = [scaling(case, names) for case in largest]
    if len(largest) > 1:
        how = "the settings were timed one after the other, so they are not ranked"
        sentences.append(f"{model}: {how}; --interleave compares them")
    return sentences


def model_of(case: Case) -> str:
    """`resnet18, bf16`"""
    key = case.key
    return f"{key['model']}, {name_precision(key['dtype'], torch.device(key['device']))}"


def setting_of(row: Case) -> Setting:
    return settings_of(row.key)[0]


def scaling(case: Case, names: Sequence[str] = ()) -> Sentence:
    """`DDP on 2 ranks trains 1.24 times (1.10 to 1.39) as fast as one rank alone; DDP adds
    16.2 ms (11.3 to 22.0) to a step, which takes 76.1 ms`.

    Ranks that wait for a late one train more slowly for another reason than DDP: `2 ranks train
    0.51 times (0.46 to 0.58) as fast as one rank alone; rank 1 on vm makes the other rank wait
    400 ms (390 to 410) of 595 ms; DDP adds ...`.
    """
    metrics, ranks = case.metrics, len(case.ranks)
    of, waiting = f"{model_of(case)}, {setting_of(case).buckets}", late_text(case, names)
    step, on_ranks = metrics["step_s"], f"{of}: DDP on {count_of(ranks, 'rank')}"
    trains, takes = "trains", "takes"
    if waiting:
        on_ranks, trains, takes = f"{of}: {count_of(ranks, 'rank')}", "train", "take"
    sentence, possible = f"{on_ranks} {takes} {step} per step", True
    if "efficiency" in metrics:
        speed = metrics["efficiency"] * ranks
        # under strong scaling the smaller batch of a rank may fit into its caches
        most = math.inf if case.key["global_batch"] else ranks
        possible = not speed.above(most)
        shown = speed.as_factor(most if possible else math.inf, "the number of ranks")
        stalls = of_all(speed, case, case, "no ddp", 1 if case.key["global_batch"] else ranks)
        sentence = f"{on_ranks} {trains} {shown} as fast as one rank alone{stalls}"
        if speed.low is None:
            sentence = f"{on_ranks} and one rank alone {NOT_COMPARED}"
        elif speed.may_be(1):
            both = f"{on_ranks} and one rank alone do not differ significantly"
            sentence = f"{both}: {shown} as fast{stalls}"
    if waiting:
        sentence += f"; {waiting}"
    if exposed := metrics.get("exposed_s"):
        added = exposed.part_of(step.value)  # in the unit of the step
        sentence += f"; DDP adds {added} to a step, which takes {show_seconds(step.value)}"
        possible = possible and not (exposed / step).above(1)
    if overlap := metrics.get("overlap"):
        possible = possible and not overlap.above(1)
    return sentence if possible else Implausible(sentence)


# -- the plan: which cases are measured ------------------------------------------------------------


def sizes_of(chosen: list[Any] | None, world_size: int, node_ranks: int) -> list[int]:
    """The numbers of ranks to measure. chosen: --world-sizes; node_ranks: ranks per node."""
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


def invalid_sizes(args: argparse.Namespace, world_size: int, sizes: list[int]) -> str | None:
    """Why these numbers of ranks cannot be measured; None if they can."""
    if sizes[-1] > world_size:
        ranks = count_of(world_size, "rank")
        problem = f"--world-sizes {sizes[-1]} exceeds the {ranks} of this job"
        return f"{problem}; e.g. --world-sizes {world_size}"
    batch = args.global_batch or 0  # 0 is divisible by every number of ranks
    if uneven := [ranks for ranks in sizes if batch % ranks]:
        fit = ",".join(str(n) for n in range(1, world_size + 1) if batch % n == 0)
        ranks = count_of(uneven[0], "rank")
        return f"--global-batch {batch} is not divisible by {ranks}; try --world-sizes {fit}"
    return None


def name_of(ranks: int, node_ranks: int, device: torch.device) -> str:
    """`1M/2G`: 1 machine with 2 GPUs; `2M/8G (16)`: 2 machines with 8 GPUs each; `2M/12G in all`:
    unevenly over 2 machines. On the CPU `1M/2R`: 1 machine with 2 ranks."""
    machines = math.ceil(ranks / node_ranks)
    kind = "G" if device.type == "cuda" else "R"
    if machines > 1 and ranks % node_ranks:
        return f"{machines}M/{ranks}{kind} in all"
    return f"{machines}M/{min(ranks, node_ranks)}{kind}" + (f" ({ranks})" if machines > 1 else "")


def title_of(
    model: str, dtype: str | None, size: int | None, args: argparse.Namespace, job: Job
) -> str:
    """The settings that all cases of a table share. dtype: None if it differs within cases. size:
    batch size per rank; None if unknown."""
    batch = f"batch size {size or 'unknown'} per rank (weak scaling)"
    if args.global_batch:
        batch = f"global batch {args.global_batch} (strong scaling)"
    parts = [model, batch]
    if not is_own(model):
        parts.append(f"{args.image_size} px")
    if dtype:
        parts.append(name_precision(dtype, job.device))
    if len(args.bucket_size) == 1:
        parts.append(Setting(args.bucket_size[0], "none").buckets)
    if len(args.comm_hook) == 1 and args.comm_hook != ["none"]:
        parts.append(f"hook {args.comm_hook[0]}")
    if args.accumulate > 1:
        parts.append(f"{args.accumulate} batches accumulated")
    options = [name for name in DDP_OPTIONS if getattr(args, name)]
    if len(args.ddp_options) == 1:
        options += args.ddp_options
    parts += [name.replace("_", " ") for name in options if name != "none"]
    return ", ".join(parts)


def plan(
    args: argparse.Namespace, job: Job, sizes: list[int], own: dict[str, Trial]
) -> dict[str, list[Planned]]:
    """The cases by the title of their table: of each model and, unless it alternates, each dtype.
    own: the trials of your own models, by name. Of those that communicate, cases of one rank are
    omitted."""
    tables, settings = {}, all_settings(args)
    fixed = {name: getattr(args, name) for name in ("global_batch", "accumulate", *DDP_OPTIONS)}
    dtypes = [None] if varies_dtype(args) else args.dtype
    for model, dtype in itertools.product(args.models, dtypes):
        of_table = {"model": model, "dtype": dtype, **fixed, "breakdown": not args.no_breakdown}
        of_table["image_size"] = None if is_own(model) else args.image_size
        size = own[model].samples if model in own else args.batch_size
        together = model in own and own[model].communicates
        if together:
            of_table["communicates"] = True
        no_ddp = {"ddp": False, "batch_size": size, "bucket_size_mb": None, "comm_hook": None}
        cases: list[Planned] = []
        if not (args.global_batch or together):
            for each in [dtype] if dtype else args.dtype:
                name = "no ddp" if dtype else f"no ddp {each}"
                cases.append(Planned(name, 1, of_table | no_ddp | {"dtype": each}))
        for ranks in sizes:
            if together and ranks == 1:
                continue
            name = name_of(ranks, job.local_world_size, job.device)
            share_of_rank = args.global_batch // ranks if args.global_batch else size
            ddp = of_table | {"ddp": True, "batch_size": share_of_rank}
            if args.interleave:
                labels = ", ".join(setting.label for setting in settings)
                ddp |= {"bucket_size_mb": None, "comm_hook": None, "settings": labels}
                cases.append(Planned(name, ranks, ddp))
                continue
            for setting in settings:
                size_label = show_bucket_size(setting.bucket_mb, "MB")
                label = f" {size_label}" if len(args.bucket_size) > 1 else ""
                label += f" {setting.hook}" if len(args.comm_hook) > 1 else ""
                label += f" {setting.options}" if len(args.ddp_options) > 1 else ""
                of_case = {"bucket_size_mb": setting.bucket_mb, "comm_hook": setting.hook}
                of_case |= {"ddp_options": setting.options} if setting.options else {}
                cases.append(Planned(name + label, ranks, ddp | of_case | options_of(setting)))
        tables[title_of(model, dtype, size, args, job)] = cases
    return tables


def main() -> int:
    args = parse_args()
    with Benchmark("ddp_sweep", args) as bench:
        job = bench.job
        guard_cases(bench, communicates)
        sizes = sizes_of(args.world_sizes, job.world_size, job.local_world_size)
        if problem := invalid_sizes(args, job.world_size, sizes):
            bench.refuse(problem)
        for hook in filter(is_own, args.comm_hook):
            bench.prepare("--comm-hook", partial(check_hook, hook))
        # DDP trains a model with unused parameters under each of these options
        allowing = {"find_unused_parameters", "static_graph"}
        idle_allowed = args.find_unused_parameters or args.static_graph
        if args.ddp_options:
            idle_allowed |= all(allowing.intersection(x.split("+")) for x in args.ddp_options)
        alone = "no ddp, 1M/1R and the efficiency"
        own = try_on_all(bench, args.models, job.rank, sizes[-1], alone, idle_allowed=idle_allowed)
        tables = plan(args, job, sizes, own)
        bench.announce(tables)
        if varies_dtype(args):
            bench.print("# no breakdown: local compute and one rank differ between dtypes")
        columns, names = columns_of(args), rank_names(bench.report.environment)

        def answer_of(cases: list[Case]) -> list[Sentence]:
            # an earlier run, which --resume continues, may have had other hosts
            return answer(cases, () if bench.report.is_earlier(cases[0]) else names)

        def rule(key: Key) -> StopRule:
            settings = max(1, len(settings_of(key)))
            return replace(bench.rule, max_seconds=settings * bench.rule.max_seconds)

        for title, cases in tables.items():
            layout = SettingsTable(columns, rows_of, row_labels(cases))
            begin = partial(build, bench)
            table = bench.run(
                title, cases, columns, begin, derive, answer_of, layout=layout, rule=rule
            )
            if table.passed:
                if line := interference(table.passed):
                    bench.show(None, [line])
                if bench.max_width:  # the first table and the answers fit on one screen
                    bench.print("# not shown: percentiles and rates; --wide prints them")
                    continue
                heading = f"Percentiles and rates: {title}"
                bench.print_table(rates_of(table.passed), table.passed, heading)
    return bench.status


if __name__ == "__main__":
    sys.exit(record(main)())
