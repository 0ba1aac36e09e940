#!/usr/bin/env python3
"""How much training time does a checkpoint cost, by method and storage, and how long is a restart?

The script trains a decoder with AdamW under FSDP2 or DDP and writes checkpoints repeatedly. While
an asynchronous mode uploads its checkpoint, training continues, possibly with slower steps.

    blocked   seconds until the save call returns, including the creation of the state dict
    upload    seconds from that call until the whole checkpoint is on disk (fsync)
    saving    seconds of the save call and of the steps during the upload
    alone     seconds of the same number of steps when nothing is saved
    stall     training time lost: saving - alone
    gmean     geometric mean over checkpoints if there are at least 6, otherwise the median
    cost      stall / --every: share of training time lost to checkpoints
    load      seconds until model and optimizer are restored from the most recent checkpoint: read
              (the files), distribute (load plans, or parts of the full state to ranks) and apply
              (into model and optimizer). The page cache is dropped before each load

    torchrun --nproc-per-node 2 benchmarks/checkpoint_sweep.py
    torchrun --nproc-per-node 2 benchmarks/checkpoint_sweep.py --modes all --strategy fsdp2,ddp
    torchrun --nproc-per-node 8 benchmarks/checkpoint_sweep.py --model decoder-1.3b \\
        --paths /scratch/x,/nfs/x --every 600 --json report.jsonl

All files are written into new folders, which are removed at the end. docs/checkpoint_sweep.md
explains the tables. Written for this project, BSD-3-Clause: copy the mode that you need.
"""

import argparse
import contextlib
import gc
import itertools
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple, TypedDict, cast

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness import cli, exits

exits.report_missing_packages()

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import (
    CheckpointException,
    FileSystemReader,
    staging,
    state_dict_saver,
)
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree  # private API; works in torch 2.11, 2.14 and 2.15

if __name__ == "__mp_main__":  # the writing process of async-process
    logging.disable(logging.WARNING)  # which torch logs
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # see `silenced`

from benchmarks.workloads.check import verdict
from benchmarks.workloads.decoder import DECODERS, Decoder, next_token_loss, random_text
from benchmarks.workloads.folders import remove_at_end
from benchmarks.workloads.meshes import forget_groups
from benchmarks.workloads.settings import SEQUENTIAL
from common.groups import Group, barrier_before_new_group, silenced
from common.stats import Estimate, Times, median
from common.table import Columns, Table, ends, metric, relative
from common.timing import Workload, rule_reached
from harness.benchmark import NO_TIMEOUT, Benchmark, Key, Planned
from harness.report import Case

IDLE_STEPS = 4  # steps timed before an asynchronous checkpoint, while nothing is saved
FROM_DISK = 0.9  # minimum share of the state that a load `from disk` reads from the device
CPU_TOKENS = 32  # tokens per sequence on the CPU
HAS_STAGER = hasattr(staging, "DefaultStager")
DEFAULT_MODES = ["torch.save", "dcp.save", *(["async-thread"] if HAS_STAGER else [])]


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = cli.Parser(__doc__)
    add, list_of = parser.add_argument, cli.list_of
    modes = list_of(str, tuple(MODES))
    add(
        "--modes",
        type=modes,
        default=DEFAULT_MODES,
        metavar="M",
        help=f"save methods: {', '.join(MODES)} or all (default: {','.join(DEFAULT_MODES)})",
    )
    add(
        "--strategy",
        type=list_of(str, ("fsdp2", "ddp")),
        default=["fsdp2"],
        help="list of fsdp2, ddp (default: fsdp2)",
    )
    add(
        "--paths",
        "--path",
        type=list_of(str),
        metavar="PATH",
        help="new or empty folders to save into, shared by all nodes (default: a new one in "
        "TMPDIR)",
    )
    add(
        "--every",
        type=cli.positive_float,
        default=600.0,
        metavar="S",
        help="checkpoint interval in seconds, for `cost` (default: 600)",
    )
    default = cli.PerDevice("decoder-124m", "decoder-10m")
    add(
        "--model",
        choices=list(DECODERS),
        default=default,
        metavar="NAME",
        help=f"{', '.join(DECODERS)} (default: %(default)s)",
    )
    add(
        "--batch-size",
        type=cli.positive_int,
        default=cli.PerDevice(8, 1),
        metavar="N",
        help=f"sequences per rank and step, of {CPU_TOKENS} tokens on the CPU (default: "
        "%(default)s)",
    )
    add(
        "--loads",
        type=cli.positive_int,
        default=7,
        metavar="N",
        help="maximum number of loads of the last checkpoint, within --max-seconds (default: 7)",
    )
    cli.add_common_flags(parser, min_iters=6)
    args = parser.parse_args(argv)
    if not HAS_STAGER and any(mode.startswith("async") for mode in args.modes):
        # torch 2.6 saves a state on the CPU while the next steps change it
        lacks = "this torch lacks (DefaultStager in torch.distributed.checkpoint.staging)"
        parser.error(f"async-* require a stager, which {lacks}; use --modes torch.save,dcp.save")
    on_cpu = not cli.on_cuda(args.device)
    if on_cpu and "fsdp2" in args.strategy and not hasattr(torch.cpu.Stream, "record_event"):
        lacks = "this torch lacks (record_event of torch.cpu.Stream)"
        parser.error(f"fsdp2 on the CPU requires a stream, which {lacks}; use --strategy ddp")
    return args


# -- the modes: each saves a State into a new folder; async_save returns a future ------------------
# [core]


@dataclass
class State:
    """The content of a checkpoint, a model and its optimizer, and the groups to save it with.

    group: a gloo group that only saving and loading use. On the group of the training their
    collectives could interleave with those of the steps during an upload. training: the group of
    the training, which distributes a loaded state under DDP.
    """

    model: Any
    optimizer: torch.optim.Optimizer
    device: torch.device
    group: dist.ProcessGroup
    training: dist.ProcessGroup | None = None
    stager: Any = None  # of `async_save`

    def dicts(self, **options: Any) -> dict[str, Any]:
        """The state dicts by the names of the arguments of `set_state_dict`."""
        parts = get_state_dict(self.model, self.optimizer, options=StateDictOptions(**options))
        return dict(zip(("model_state_dict", "optim_state_dict"), parts, strict=True))


def torch_save(state: State, path: Path) -> None:
    """Gather the full state on rank 0, which writes one file."""
    content = state.dicts(full_state_dict=True, cpu_offload=True)
    if dist.get_rank() == 0:
        path.mkdir(parents=True)
        with open(path / "state.pt", "wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
    dist.barrier(state.group)  # otherwise the other ranks would wait for it in their next step


def dcp_save(state: State, path: Path) -> None:
    """Write the part of each rank into its own file, with fsync."""
    dcp.save(state.dicts(), checkpoint_id=path, process_group=state.group)


@cache
def can_reuse_stager() -> bool:
    """Whether a stager can stage more than one checkpoint. In torch 2.11 it cannot
    (Automodel#3125)."""
    stager = staging.DefaultStager(staging.StagingOptions(False, False, False, False))
    with contextlib.suppress(KeyError):
        for _ in range(2):
            stager.stage({})
        return True
    return False


def async_save(state: State, path: Path, by: str) -> Any:
    """Copy the part of each rank to host memory; a thread or a process writes the copy."""
    cuda = state.device.type == "cuda"
    # No read-ahead from the GPU, because the copy is in host memory. With it, the writing thread or
    # process of each rank would create a CUDA context on GPU 0.
    writer = dcp.FileSystemWriter(path, per_thread_copy_ahead=0)
    # reuse the stager, which keeps its buffers for the next checkpoint
    if state.stager is None or not can_reuse_stager():
        options = staging.StagingOptions(
            use_pinned_memory=cuda,
            use_shared_memory=by == "PROCESS",
            use_async_staging=False,
            use_non_blocking_copy=cuda,
        )
        state.stager = staging.DefaultStager(options)
    return dcp.async_save(
        state.dicts(),
        storage_writer=writer,
        process_group=state.group,
        async_stager=state.stager,
        async_checkpointer_type=state_dict_saver.AsyncCheckpointerType[by],
    )


MODES: dict[str, Callable[[State, Path], Any]] = {
    "torch.save": torch_save,
    "dcp.save": dcp_save,
    "async-thread": partial(async_save, by="THREAD"),
    "async-process": partial(async_save, by="PROCESS"),
}


class Marks(NamedTuple):
    """Seconds from the start of a load until all ranks have completed each of its parts."""

    read: float  # with `dcp.load`: the seconds that this rank spent reading
    distributed: float
    applied: float


class TimedReader(FileSystemReader):
    """A FileSystemReader that accumulates the seconds spent reading."""

    read_s = 0.0

    def read_data(self, *args: Any) -> Any:
        start = perf_counter()
        done = super().read_data(*args)
        self.read_s += perf_counter() - start
        return done


def dcp_load(state: State, path: Path) -> Marks:
    """Load a checkpoint of any mode except `torch.save`: each rank reads its part."""
    start = perf_counter()
    content, reader = state.dicts(), TimedReader(path)
    dcp.load(content, storage_reader=reader, process_group=state.group)
    dist.barrier(state.group)
    distributed = perf_counter() - start
    return Marks(reader.read_s, distributed, apply(state, content, start))


def torch_load(state: State, path: Path, source: int | None) -> Marks:
    """Load the file of `torch.save`. source: the only rank that reads it; None: all ranks do."""
    start = perf_counter()
    full = None
    if source in (None, dist.get_rank()):
        full = torch.load(path / "state.pt", map_location="cpu", weights_only=True)
    dist.barrier(state.group)
    read = perf_counter() - start
    content = distribute(state, full, source)
    dist.barrier(state.group)
    distributed = perf_counter() - start
    return Marks(read, distributed, apply(state, content, start))


def distribute(state: State, full: Any, source: int | None) -> dict[str, Any]:
    """This rank's part of a full state. source: the only rank that has it; None: all ranks do."""
    current, structure = _pytree.tree_flatten(state.dicts())
    wholes: list[Any] = [None] * len(current)
    if full is not None:
        wholes = _pytree.tree_leaves(_pytree.tree_map(lambda _, whole: whole, state.dicts(), full))
    is_large = [isinstance(part, Tensor) and part.numel() > 1 for part in current]
    if source is not None:  # broadcast scalars such as step counters together
        small = [whole for whole, large in zip(wholes, is_large, strict=True) if not large]
        dist.broadcast_object_list(small, source, group=state.group)
        of_source = iter(small)
        wholes = [
            whole if large else next(of_source)
            for whole, large in zip(wholes, is_large, strict=True)
        ]
    parts: list[Any] = []
    whole: Any
    for part, whole, large in zip(current, wholes, is_large, strict=True):
        if large and source is not None and whole is None:  # a buffer for the broadcast
            whole = torch.empty(part.shape, dtype=part.dtype, device=state.device)
        if isinstance(part, DTensor):
            mesh, placements = part.device_mesh, part.placements
            whole = whole.to(state.device)
            whole = distribute_tensor(whole, mesh, placements, src_data_rank=source)
        elif large and source is not None:
            whole = whole.to(state.device)
            dist.broadcast(whole, source, group=state.training)
        parts.append(whole)
    return cast(dict[str, Any], _pytree.tree_unflatten(parts, structure))


def apply(state: State, content: dict[str, Any], start: float) -> float:
    """Set the state of model and optimizer. Returns the seconds since `start`."""
    set_state_dict(state.model, state.optimizer, **content)
    torch.get_device_module(state.device).synchronize()  # no-op on the CPU
    dist.barrier(state.group)
    return perf_counter() - start


def loaders(mode: str) -> dict[str, Callable[[State, Path], Marks]]:
    """The functions that load a checkpoint of a mode, by name."""
    if mode != "torch.save":
        return {"dcp.load": dcp_load}
    sources = {"torch.load on each rank": None, "torch.load on rank 0": 0}
    return {name: partial(torch_load, source=source) for name, source in sources.items()}


def drop_page_cache(folder: Path) -> None:
    """Drop the files of a folder from this host's page cache. Some file systems ignore this."""
    for path in folder.iterdir():
        with open(path, "rb") as file:
            os.fsync(file)
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


# [/core]
# -- the folders of a run --------------------------------------------------------------------------


def state_bytes(model: str) -> int:
    """Bytes of the weights and AdamW's two moments, in float32."""
    with torch.device("meta"):
        parameters = sum(weight.numel() for weight in Decoder(DECODERS[model]).parameters())
    return 3 * 4 * parameters


def make_folders(paths: list[str] | None, needed: int) -> list[str]:
    """Create a folder in each path. needed: bytes that must be free in each of them.

    Raises ValueError if a path contains files or lacks space.
    """
    folders = []
    for path in paths or [tempfile.gettempdir()]:
        os.makedirs(path, exist_ok=True)
        if paths and os.listdir(path):
            raise ValueError(f"{path}: expected a new or empty folder, but it contains files")
        free = shutil.disk_usage(path).free
        if free < needed:
            raise ValueError(f"{path}: expected {needed:,} bytes free, got {free:,}")
        folder = tempfile.mkdtemp(prefix="checkpoint_sweep-", dir=os.path.abspath(path))
        folders.append(folder)
        remove_at_end(folder)
    return folders


# -- the training, and its checkpoints -------------------------------------------------------------


def local_tensors(state: State) -> list[Tensor]:
    """The bytes of each tensor in this rank's part of the state, uint8 [n], not copied."""
    parts = []
    for value in _pytree.tree_leaves(state.dicts()):
        if isinstance(value, Tensor):
            tensor = value.detach()
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            parts.append(local.view(-1).view(torch.uint8))
    return parts


class Checkpoint(NamedTuple):
    """The seconds of one checkpoint on a rank."""

    total: float  # from the save call to the end of the step in which the upload ends
    alone: float  # of as many steps when nothing is saved; stall = total - alone
    blocked: float
    upload: float


class Load(NamedTuple):
    """One load on a rank."""

    marks: Marks
    disk_bytes: int  # read from the device, not from the page cache
    same: bool  # whether the loaded state equals the saved one


class Training:
    """A decoder in training and the checkpoints of a case, on one rank. The checkpoints are the
    folders 1, 2, ... in `path`."""

    def __init__(self, key: Key, path: Path, bench: Benchmark, group: Group) -> None:
        self.bench, self.group, self.control = bench, group, group.control
        self.path, self.count = path, 0  # number of checkpoints so far
        self.mode = key["mode"]
        device = bench.job.device
        # without a timeout: an upload may take long, and while steps continue nothing hangs
        barrier_before_new_group(group)
        with silenced("gloo"):
            uploads = cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=NO_TIMEOUT))
        group.extra.append(uploads)
        torch.manual_seed(0)
        with device:
            model: Any = Decoder(DECODERS[key["model"]])
        if key["strategy"] == "ddp":
            model = DistributedDataParallel(model, process_group=group.workload)
        else:
            # a name per case, because DTensor treats meshes with equal ranks and names as one
            name = f"{self.mode} into {key['path']}"
            mesh = dist.DeviceMesh.from_group(group.workload, device.type, mesh_dim_names=(name,))
            forget_groups(mesh)
            for unit in (*model.blocks, model):
                fully_shard(unit, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        self.state = State(model, optimizer, device, uploads, group.workload)
        texts = random_text(DECODERS[key["model"]], key["batch_size"], seed=bench.job.rank)
        length = CPU_TOKENS if device.type == "cpu" else None
        self.tokens, self.targets = (text[:, :length].to(device) for text in texts)
        # a copy of this rank's part of the state in the most recent checkpoint
        self.copies = [part.to("cpu", copy=True) for part in local_tensors(self.state)]

    @property
    def newest(self) -> Path:
        return self.path / str(self.count)

    def train(self, more: Callable[[int], bool]) -> list[float]:
        """Train and return the seconds of each step.

        more: called with the number of steps so far; training continues while it returns True on
        any rank.
        """
        state = self.state
        times: list[float] = []
        go_on = torch.ones(1)
        while go_on:
            self.bench.phase(f"step {len(times) + 1}")
            start = perf_counter()
            state.optimizer.zero_grad()
            next_token_loss(state.model(self.tokens), self.targets).backward()
            state.optimizer.step()
            torch.get_device_module(state.device).synchronize()  # no-op on the CPU
            go_on.fill_(more(len(times) + 1))
            dist.all_reduce(go_on, op=dist.ReduceOp.MAX, group=self.control)
            times.append(perf_counter() - start)
        return times

    def write_checkpoint(self) -> Checkpoint:
        """Write a checkpoint into a new folder. The previous one is kept until it is complete."""
        self.bench.turn()  # wait while ab.py --interleave runs the other command
        if self.bench.job.rank == 0 and self.count > 1:
            shutil.rmtree(self.path / str(self.count - 1))
        self.count += 1
        is_async = self.mode.startswith("async")
        idle_steps = IDLE_STEPS if is_async else 1
        idle = self.train(lambda steps: steps < idle_steps)
        for copy, part in zip(self.copies, local_tensors(self.state), strict=True):
            copy.copy_(part)
        during: list[float] = []  # seconds of the steps during the upload
        uploads: list[float] = []  # empty until the upload has ended
        self.bench.phase(f"save {self.newest}")
        dist.barrier(self.control)
        start = perf_counter()
        future = MODES[self.mode](self.state, self.newest)
        blocked = perf_counter() - start
        if is_async:
            future.add_done_callback(lambda _: uploads.append(perf_counter() - start))
            during = self.train(lambda _: not uploads)
            future.result()  # raises the error of a failed upload
        alone = len(during) * float(np.median(idle))
        upload = uploads[0] if uploads else blocked
        return Checkpoint(blocked + sum(during), alone, blocked, upload)

    def load(self, method: Callable[[State, Path], Marks]) -> Load:
        """Load the most recent checkpoint and compare this rank's part bitwise with its copy."""
        import psutil  # not above: common/ reports in one line if it is missing

        self.bench.phase(f"load {self.newest}")
        dist.barrier(self.control)  # no rank is reading
        if self.bench.job.local_rank == 0:
            drop_page_cache(self.newest)
        for part in local_tensors(self.state):
            part.zero_()  # so that the comparison depends on the loaded values only
        torch.get_device_module(self.state.device).synchronize()
        dist.barrier(self.control)
        process = psutil.Process()
        before = process.io_counters()
        marks = method(self.state, self.newest)
        after = process.io_counters()
        pairs = zip(local_tensors(self.state), self.copies, strict=True)
        same = all(torch.equal(part.cpu(), copy) for part, copy in pairs)
        return Load(marks, after.read_bytes - before.read_bytes, same)

    def loads(self) -> dict[str, list[Load]]:
        """Load by each method alternately, as often as --loads, --iters and --max-seconds allow.

        The number of loads is odd, so that one of them has the median time.
        """
        methods, rule = loaders(self.mode), self.bench.rule
        most = min(self.bench.args.loads, rule.iters or self.bench.args.loads)
        done: dict[str, list[Load]] = {name: [] for name in methods}
        start = perf_counter()
        enough = False
        while not enough:
            for name, method in methods.items():
                done[name].append(self.load(method))
            count = len(done[name])
            spent_s = perf_counter() - start
            is_last = count + 2 > most or spent_s * (count + 2) / count > rule.max_seconds
            enough = count % 2 == 1 and bool(self.group.broadcast(is_last))
        return done


# -- a case ----------------------------------------------------------------------------------------


class Facts(TypedDict):
    """The facts of a rank."""

    first: Checkpoint
    loads: dict[str, list[Load]]
    shard_bytes: int


def build(bench: Benchmark, folders: dict[str, str], key: Key, group: Group) -> Workload:
    """Measure a case with a separate loop, because the number of steps varies between checkpoints.

    folders: the folder that this run has created in each path.
    """
    path = folder_of(folders, key)
    if not path.parent.is_dir():
        raise ValueError(f"{path.parent} is missing on this node; try --paths on shared storage")
    training = Training(key, path, bench, group)
    training.train(lambda steps: steps < bench.rule.warmup_iters)
    try:
        return measure(training, group)
    except CheckpointException as error:  # not a subclass of Exception
        failed, (reason, _) = min(error.failures.items())
        raise RuntimeError(f"the checkpoint failed on rank {failed}: {reason}") from None


def folder_of(folders: dict[str, str], key: Key) -> Path:
    """The folder of a case."""
    return Path(folders[key["path"]], f"{key['strategy']}-{key['mode']}")


def measure(training: Training, group: Group) -> Workload:
    """Write checkpoints until the stop rule is met, then load the most recent one repeatedly."""
    first = training.write_checkpoint()
    timed: list[Checkpoint] = []
    stop = ""
    started = perf_counter()
    while not stop:
        timed.append(training.write_checkpoint())
        spent = perf_counter() - started
        totals = [checkpoint.total for checkpoint in timed]
        reached = rule_reached(totals, len(totals), spent, training.bench.rule, compared=True)
        stop = group.broadcast(reached)
    facts = Facts(
        first=first,
        loads=training.loads(),
        shard_bytes=sum(len(part) for part in training.copies),
    )
    samples_s = {"step": totals}
    for name in ("alone", "blocked", "upload"):
        samples_s[name] = [getattr(checkpoint, name) for checkpoint in timed]
    return Workload(
        training.write_checkpoint,
        facts=lambda: facts,
        profiled={"save": training.write_checkpoint},
        timed=Times.of_rank(samples_s, [1] * len(timed), stop),
    )


# -- metrics and answers ---------------------------------------------------------------------------


def derive(case: Case, times: Times, facts: list[Facts]) -> None:
    """Compute the metrics and the verdict of the check. facts: one entry per rank.

    The time of a checkpoint is the maximum over ranks.
    """
    shards = [fact["shard_bytes"] for fact in facts]
    size = sum(shards) if case.key["strategy"] == "fsdp2" else max(shards)
    upload, stall = times.mean("upload"), times.excess_over("alone")
    first_total = max(fact["first"].total for fact in facts)
    first_alone = max(fact["first"].alone for fact in facts)
    every_s = case.key["every_s"]
    case.metrics |= {
        "blocked_s": times.mean("blocked"),
        "upload_s": upload,
        "saving_s": times.mean(),
        "alone_s": times.mean("alone"),
        "stall_s": stall,
        "first_extra_s": first_total - first_alone - stall,
        "state_bytes": size,
        "write_gb_per_s": size / upload / 1e9,
        "cost": stall / every_s if upload.value < every_s else None,
    }
    case.metrics["loads"] = [load_of(method, facts, size) for method in facts[0]["loads"]]
    for number, row in enumerate(case.metrics["loads"]):
        prefix = "load" if number == 0 else "load_from_rank_0"
        case.metrics |= {f"{prefix}_s": row["load_s"], f"{prefix}_gb_per_s": row["load_gb_per_s"]}
    changed = [
        rank
        for rank, fact in zip(case.ranks, facts, strict=True)
        if not all(load.same for loads in fact["loads"].values() for load in loads)
    ]
    problem = None
    if changed:
        problem = f"rank {changed[0]} loaded a state that differs from the saved one"
    case.check = verdict(problem)


def load_of(method: str, facts: list[Facts], size: int) -> dict[str, Any]:
    """The metrics of the loads by one method: the median load and its parts.

    size: bytes of the state.
    """
    loads = [fact["loads"][method] for fact in facts]  # [ranks][loads]
    # seconds [ranks, loads, marks] -> [loads, marks] of the slowest rank
    marks = np.array([[load.marks for load in of_rank] for of_rank in loads]).max(axis=0)
    order = np.argsort(marks[:, 2], kind="stable")
    read_s, distributed_s, load_s = (float(mark) for mark in marks[order[len(order) // 2]])
    total = median(marks[:, 2])
    disk_bytes = sum(load.disk_bytes for of_rank in loads for load in of_rank) / len(order)
    return {
        "way": method,
        "load_s": total,
        "load_gb_per_s": size / total / 1e9,
        "read_s": read_s,
        "distribute_s": distributed_s - read_s,
        "apply_s": load_s - distributed_s,
        "from_disk": disk_bytes >= FROM_DISK * size,
        "by_rank_s": [[load.marks.applied for load in of_rank] for of_rank in loads],
    }


COLUMNS: Columns = {
    "mode": lambda case: case.name,
    "blocked\ngmean (s)": metric("blocked_s", digits=3),
    "stall\n(s)": metric("stall_s", digits=3),
    "95% ci\n(s)": ends("stall_s", digits=3),
    "saving\ngmean (s)": metric("saving_s", digits=3),
    "alone\ngmean (s)": metric("alone_s", digits=3),
    "cost\n(%)": metric("cost", 100, 3),
    "upload\ngmean (s)": metric("upload_s", digits=3),
    "95% ci": relative("upload_s"),
    "write\nGB/s": metric("write_gb_per_s"),
    "first\nextra (s)": metric("first_extra_s", digits=3),
}
WIDEST = ["", "0.000", "0.000", "0.000 to 0.000", *["0.000"] * 2]


LOAD_COLUMNS: Columns = {  # read, distribute and apply of the median load add up to its time
    "mode": lambda row: row.name,
    "load by": lambda row: row.key["way"],
    "load\n(s)": metric("load_s", digits=3),
    "95% ci\n(s)": ends("load_s", digits=3),
    "read\n(s)": metric("read_s", digits=3),
    "distribute\n(s)": metric("distribute_s", digits=3),
    "apply\n(s)": metric("apply_s", digits=3),
    "from": lambda row: "disk" if row.key["from_disk"] else "page cache",
    "load\nGB/s": metric("load_gb_per_s"),
}


def load_rows(cases: list[Case]) -> list[Case]:
    """The rows of the table of loads: one for each case and method."""
    rows = []
    for case in cases:
        for row in case.metrics.get("loads", []):
            rows.append(replace(case, key=row, metrics=row))
    return rows


def answers(cases: list[Case]) -> list[str]:
    """The cost of checkpoints, and the time of a load."""
    key, times = cases[0].key, {}
    for row in load_rows(cases):
        times[f"{row.key['way']} ({row.name})"] = row.metrics["load_s"]
    ordered = sorted(times, key=lambda name: times[name].value)
    loads = ", ".join(f"{times[name]} with {name}" for name in ordered)
    return [answer(cases), f"{key['strategy']} from {key['path']}: a load takes {loads}"]


def answer(cases: list[Case]) -> str:
    """The cost of each mode, without a ranking, because the modes ran one after the other."""
    key = cases[0].key
    every = cli.duration(key["every_s"])
    costs: dict[str, Estimate] = {}
    for case in cases:
        if case.metrics["cost"] is not None:
            costs[case.name] = case.metrics["cost"]
    place = f"{key['strategy']} into {key['path']}"
    if not costs:
        return f"{place}: no upload ends within {every}"
    ordered = sorted(costs, key=lambda mode: costs[mode].value)
    first, *others = [costs[mode].text("%", 100) for mode in ordered]
    shares = [f"{first} of training time", *others]
    words = [f"{share} with {mode}" for share, mode in zip(shares, ordered, strict=True)]
    sentence = f"{place}: a checkpoint every {every} costs {', '.join(words)}"
    return sentence + (f"; {SEQUENTIAL}" if others else "")


# -- the cases -------------------------------------------------------------------------------------


def plan(args: argparse.Namespace, ranks: int) -> dict[str, list[Planned]]:
    """The cases by the title of their table: a table per path and strategy, a case per mode."""
    size = state_bytes(args.model)
    fixed = {"model": args.model, "batch_size": args.batch_size, "every_s": args.every}
    tables = {}
    for path, strategy in itertools.product(args.paths or ["TMPDIR"], args.strategy):
        title = f"{args.model}, batch size {args.batch_size}, {strategy}, AdamW: "
        title += f"{size / 1e9:.3f} GB into {path} every {args.every:g} s"
        cases: list[Planned] = []
        for mode in args.modes:
            key = {"mode": mode, "path": path, "strategy": strategy, **fixed}
            cases.append(Planned(mode, ranks, key))
        tables[title] = cases
    return tables


def main() -> int:
    args = parse_args()
    # otherwise the processes of async-process use a new store, which listens on all interfaces
    os.environ.setdefault("DCP_USE_PREFIX_STORE", "1")
    gc.disable()  # a collection on one rank would stop all ranks
    with Benchmark("checkpoint_sweep", args) as bench:
        is_first = bench.job.rank == 0
        tables = plan(args, bench.job.world_size)
        bench.announce(tables)
        # the previous checkpoint is kept until the next one is complete
        needed = 2 * state_bytes(args.model)
        made = bench.prepare(
            "--paths", lambda: make_folders(args.paths, needed) if is_first else []
        )
        folders = dict(zip(args.paths or ["TMPDIR"], bench.job.broadcast(made), strict=True))
        for title, cases in tables.items():
            with bench.begin_table(title, COLUMNS, answers, Table(COLUMNS, WIDEST)) as table:
                for name, _, key in cases:
                    bench.measure(key, name, partial(build, bench, folders), derive)
                    if is_first:
                        shutil.rmtree(folder_of(folders, key), ignore_errors=True)
            if rows := load_rows(table.passed):
                bench.print_table(LOAD_COLUMNS, rows)
        for folder in made:
            shutil.rmtree(folder, ignore_errors=True)
    return bench.status


if __name__ == "__main__":
    sys.exit(record(main)())
