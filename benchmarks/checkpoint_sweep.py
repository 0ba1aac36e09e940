#!/usr/bin/env python3
"""What does a checkpoint cost the training, by each way to save it and on each storage?

It trains a decoder under FSDP2 or DDP with AdamW, and writes a checkpoint again and again. While an
asynchronous mode uploads its checkpoint, the training goes on, and its steps may be slower.

    blocked   seconds until the call that saves returns, which includes making the state dict
    upload    seconds from that call until all of the checkpoint is on disk, with fsync
    saving    seconds of the call that saves and of the steps beside the upload
    alone     seconds of the same number of steps when nothing is saved
    stall     what the training loses: saving - alone
    gmean     geometric mean over checkpoints, if there are 6 or more; otherwise the median
    cost      stall / --every: what the training loses with a checkpoint every so many seconds
    load      seconds until model and optimizer have the newest checkpoint again, the other half of
              its price: read (the files), distribute (plans, or parts of the full state to ranks)
              and apply (into model and optimizer). `from disk`: the page cache was dropped before

    torchrun --nproc-per-node 2 benchmarks/checkpoint_sweep.py
    torchrun --nproc-per-node 2 benchmarks/checkpoint_sweep.py --modes all --strategy fsdp2,ddp
    torchrun --nproc-per-node 8 benchmarks/checkpoint_sweep.py --model decoder-1.3b \\
        --paths /scratch/x,/nfs/x --every 600 --json report.jsonl

All files go into new folders, which are removed at the end. docs/checkpoint_sweep.md says how to
read the table. Written for this project, BSD-3-Clause: copy the mode that you need.
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
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple, TypedDict, cast

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import cli  # first: it names a package that is missing

# isort: split
import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException, FileSystemReader
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree  # private; seen to work with torch 2.11, 2.14 and 2.15

if __name__ == "__mp_main__":  # the process that writes for async-process, where torch logs a lot
    logging.disable(logging.WARNING)

from benchmarks.workloads.decoder import DECODERS, Decoder, next_token_loss, random_text
from benchmarks.workloads.folders import remove_at_end
from benchmarks.workloads.meshes import forget_groups
from common.benchmark import Benchmark, Key, Planned
from common.check import verdict
from common.groups import FOREVER, Group, agree, rendezvous, share
from common.report import Case, Estimate
from common.stats import Times, median
from common.table import Columns, Table, ends, metric, relative
from common.timing import RankTimes, Workload, rule_reached

IDLE_STEPS = 4  # before an asynchronous checkpoint: what a step takes when nothing is saved
FROM_DISK = 0.9  # a load is from disk if at least this share of the state was read from there
CPU_TOKENS = 32  # of a sequence on the CPU
DEFAULT_MODES = ["torch.save", "dcp.save", "async-thread"]


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = cli.Parser(__doc__)
    add, list_of = parser.add_argument, cli.list_of
    modes = f"{', '.join(MODES)}, or all (default: {','.join(DEFAULT_MODES)})"
    mode_list = list_of(str, tuple(MODES))
    add("--modes", type=mode_list, default=DEFAULT_MODES, metavar="M", help=modes)
    strategies = "fsdp2, ddp or both (default: fsdp2)"
    add("--strategy", type=list_of(str, ("fsdp2", "ddp")), default=["fsdp2"], help=strategies)
    paths = "new or empty folders to save into (default: a new one in TMPDIR)"
    add("--paths", "--path", type=list_of(str), metavar="PATH", help=paths)
    every = "checkpoint interval in seconds, for `cost` (default: 600)"
    add("--every", type=cli.positive_float, default=600.0, metavar="S", help=every)
    model = f"{', '.join(DECODERS)} (default: %(default)s)"
    default = cli.By("decoder-124m", "decoder-10m")
    add("--model", choices=list(DECODERS), default=default, metavar="NAME", help=model)
    batch = f"sequences per rank and step, {CPU_TOKENS} tokens long on the CPU "
    batch += "(default: %(default)s)"
    add("--batch-size", type=cli.positive_int, default=cli.By(8, 1), metavar="N", help=batch)
    loads = "loads of the newest checkpoint, within --max-seconds (default: 7)"
    add("--loads", type=cli.positive_int, default=7, metavar="N", help=loads)
    cli.add_common_flags(parser, min_iters=6)
    return parser.parse_args(argv)


# -- the modes: each saves a State into a new folder; async_save returns a future ------------------
# [core]


@dataclass
class State:
    """What a checkpoint holds: a model and its optimizer.

    group: gloo, for the collectives of saving alone. On the group of the training they would meet
    the collectives of the steps beside an upload. training: that group.
    """

    model: Any
    optimizer: torch.optim.Optimizer
    device: torch.device
    group: dist.ProcessGroup
    training: dist.ProcessGroup | None = None
    stager: DefaultStager | None = None  # of `async_save`

    def dicts(self, **options: Any) -> dict[str, Any]:
        """Model and optimizer, named as `set_state_dict` has them."""
        parts = get_state_dict(self.model, self.optimizer, options=StateDictOptions(**options))
        return dict(zip(("model_state_dict", "optim_state_dict"), parts, strict=True))


def torch_save(state: State, path: Path) -> None:
    """Rank 0 gathers the full state, and writes it into one file."""
    content = state.dicts(full_state_dict=True, cpu_offload=True)
    if dist.get_rank() == 0:
        path.mkdir(parents=True)
        with open(path / "state.pt", "wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
    dist.barrier(state.group)  # without it the other ranks would wait in their next step


def dcp_save(state: State, path: Path) -> None:
    """Each rank writes its part into a file, and syncs it."""
    dcp.save(state.dicts(), checkpoint_id=path, process_group=state.group)


@cache
def can_reuse_stager() -> bool:
    """Whether a stager serves more than one checkpoint. Torch 2.11's does not (Automodel#3125)."""
    stager = DefaultStager(StagingOptions(False, False, False, False))
    with contextlib.suppress(KeyError):
        for _ in range(2):
            stager.stage({})
        return True
    return False


def async_save(state: State, path: Path, by: AsyncCheckpointerType) -> Any:
    """Each rank copies its part; a thread or a process writes the copy."""
    cuda = state.device.type == "cuda"
    # a stager keeps its buffers for the next checkpoint, and each new one would have its own
    if state.stager is None or not can_reuse_stager():
        options = StagingOptions(
            use_pinned_memory=cuda,
            use_shared_memory=by == AsyncCheckpointerType.PROCESS,
            use_async_staging=False,
            use_non_blocking_copy=cuda,
        )
        state.stager = DefaultStager(options)
    # The copy is on the CPU. To read ahead from a GPU, the thread or process that writes would make
    # a CUDA context on GPU 0, for each rank.
    writer = dcp.FileSystemWriter(path, per_thread_copy_ahead=0)
    return dcp.async_save(
        state.dicts(),
        storage_writer=writer,
        process_group=state.group,
        async_stager=state.stager,
        async_checkpointer_type=by,
    )


MODES: dict[str, Callable[[State, Path], Any]] = {
    "torch.save": torch_save,
    "dcp.save": dcp_save,
    "async-thread": partial(async_save, by=AsyncCheckpointerType.THREAD),
    "async-process": partial(async_save, by=AsyncCheckpointerType.PROCESS),
}


class Marks(NamedTuple):
    """Seconds since a load began, on a rank, when its parts had ended on all ranks."""

    read: float  # of `dcp.load` the seconds that this rank spent reading
    distributed: float
    applied: float


class TimedReader(FileSystemReader):
    """Sums up the seconds that it spends reading."""

    read_s = 0.0

    def read_data(self, *args: Any) -> Any:
        start = perf_counter()
        done = super().read_data(*args)
        self.read_s += perf_counter() - start
        return done


def dcp_load(state: State, path: Path) -> Marks:
    """Each rank reads its part, of the files of any mode but `torch.save`."""
    start = perf_counter()
    content, reader = state.dicts(), TimedReader(path)
    dcp.load(content, storage_reader=reader, process_group=state.group)
    dist.barrier(state.group)
    distributed = perf_counter() - start
    return Marks(reader.read_s, distributed, apply(state, content, start))


def torch_load(state: State, path: Path, source: int | None) -> Marks:
    """The one file of `torch.save`. source: the only rank that reads it; None: each rank does."""
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
    """This rank's part of a full state. source: the only rank that has it; None: each rank does."""
    current, names = _pytree.tree_flatten(state.dicts())
    wholes: list[Any] = [None] * len(current)
    if full is not None:
        wholes = _pytree.tree_leaves(_pytree.tree_map(lambda _, whole: whole, state.dicts(), full))
    is_large = [isinstance(part, Tensor) and part.numel() > 1 for part in current]
    if source is not None:
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
        if large and source is not None and whole is None:  # what arrives takes its place
            whole = torch.empty(part.shape, dtype=part.dtype, device=state.device)
        if isinstance(part, DTensor):
            mesh, placements = part.device_mesh, part.placements
            whole = whole.to(state.device)
            whole = distribute_tensor(whole, mesh, placements, src_data_rank=source)
        elif large and source is not None:
            whole = whole.to(state.device)
            dist.broadcast(whole, source, group=state.training)
        parts.append(whole)
    return cast(dict[str, Any], _pytree.tree_unflatten(parts, names))


def apply(state: State, content: dict[str, Any], start: float) -> float:
    """Load a state into model and optimizer. Returns the seconds since `start`."""
    set_state_dict(state.model, state.optimizer, **content)
    torch.get_device_module(state.device).synchronize()  # does nothing on the CPU
    dist.barrier(state.group)
    return perf_counter() - start


def loaders(mode: str) -> dict[str, Callable[[State, Path], Marks]]:
    """The ways to load what a mode has saved, by name."""
    if mode != "torch.save":
        return {"dcp.load": dcp_load}
    ways = {"torch.load on each rank": None, "torch.load on rank 0": 0}
    return {name: partial(torch_load, source=source) for name, source in ways.items()}


def drop_page_cache(folder: Path) -> None:
    """Ask this host to forget the content of the files. Some file systems ignore it."""
    for path in folder.iterdir():
        with open(path, "rb") as file:
            os.fsync(file)
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


# [/core]
# -- the training, and its checkpoints -------------------------------------------------------------


def local_tensors(state: State) -> list[Tensor]:
    """This rank's part of the state, in place: the bytes of each tensor."""
    parts = []
    for value in _pytree.tree_leaves(state.dicts()):
        if isinstance(value, Tensor):
            tensor = value.detach()
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            parts.append(local.view(-1).view(torch.uint8))
    return parts


class Checkpoint(NamedTuple):
    """Seconds of one checkpoint on a rank."""

    total: float  # from the call to the end of the step in which the upload ends
    alone: float  # what as many steps take when nothing is saved; stall = total - alone
    blocked: float
    upload: float


class Load(NamedTuple):
    """One load on a rank."""

    marks: Marks
    disk_bytes: int  # that were read from the storage, not from the page cache
    same: bool  # whether it has brought what was saved


class Training:
    """A decoder under its strategy, and the checkpoints of a case, on each rank. Each checkpoint is
    a folder in `path`, with a number."""

    def __init__(self, key: Key, path: Path, bench: Benchmark, group: Group) -> None:
        self.bench, self.group, self.control = bench, group, group.control
        self.path, self.count = path, 0  # of checkpoints so far
        self.mode = key["mode"]
        device = bench.job.device
        # An upload may take long: while the steps go on, nothing hangs.
        rendezvous(group)
        uploads = cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=FOREVER))
        group.more.append(uploads)
        torch.manual_seed(0)
        with device:
            model: Any = Decoder(DECODERS[key["model"]])
        if key["strategy"] == "ddp":
            model = DistributedDataParallel(model, process_group=group.test)
        else:
            # DTensor takes meshes with the same ranks and names for one: each case has its own
            name = f"{self.mode} into {key['path']}"
            mesh = dist.DeviceMesh.from_group(group.test, device.type, mesh_dim_names=(name,))
            forget_groups(mesh)
            for unit in (*model.blocks, model):
                fully_shard(unit, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        self.state = State(model, optimizer, device, uploads, group.test)
        texts = random_text(DECODERS[key["model"]], key["batch_size"], seed=bench.job.rank)
        length = CPU_TOKENS if device.type == "cpu" else None
        self.tokens, self.targets = (text[:, :length].to(device) for text in texts)
        # a copy of this rank's part, as it is in the newest checkpoint
        self.copies = [part.to("cpu", copy=True) for part in local_tensors(self.state)]

    @property
    def newest(self) -> Path:
        return self.path / str(self.count)

    def train(self, more: Callable[[int], bool]) -> list[float]:
        """Seconds of each step. more: says after how many steps this rank wants another one.

        The training goes on while any rank wants another step.
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
            torch.get_device_module(state.device).synchronize()  # does nothing on the CPU
            go_on.fill_(more(len(times) + 1))
            dist.all_reduce(go_on, op=dist.ReduceOp.MAX, group=self.control)
            times.append(perf_counter() - start)
        return times

    def write_checkpoint(self) -> Checkpoint:
        """Into a new folder. The checkpoint before stays until this one is complete."""
        self.bench.turn()  # where ab.py runs two commands in turns
        if self.bench.job.rank == 0 and self.count > 1:
            shutil.rmtree(self.path / str(self.count - 1))
        self.count += 1
        is_async = self.mode.startswith("async")
        idle_steps = IDLE_STEPS if is_async else 1
        idle = self.train(lambda steps: steps < idle_steps)
        for copy, part in zip(self.copies, local_tensors(self.state), strict=True):
            copy.copy_(part)
        beside: list[float] = []  # seconds of the steps beside the upload
        uploads: list[float] = []  # empty until the upload has ended
        self.bench.phase(f"save {self.newest}")
        dist.barrier(self.control)
        start = perf_counter()
        future = MODES[self.mode](self.state, self.newest)
        blocked = perf_counter() - start
        if is_async:
            future.add_done_callback(lambda _: uploads.append(perf_counter() - start))
            beside = self.train(lambda _: not uploads)
            future.result()  # raises what went wrong
        alone = len(beside) * float(np.median(idle))
        upload = uploads[0] if uploads else blocked
        return Checkpoint(blocked + sum(beside), alone, blocked, upload)

    def load(self, way: Callable[[State, Path], Marks]) -> Load:
        """Load the newest checkpoint, and compare this rank's part with what it was, bit by bit."""
        import psutil  # not above: if it is missing, common/ says so in one line

        self.bench.phase(f"load {self.newest}")
        dist.barrier(self.control)  # no rank reads
        if self.bench.job.local_rank == 0:
            drop_page_cache(self.newest)
        for part in local_tensors(self.state):
            part.zero_()  # the comparison then sees only what was read
        torch.get_device_module(self.state.device).synchronize()
        dist.barrier(self.control)
        process = psutil.Process()
        before = process.io_counters()
        marks = way(self.state, self.newest)
        after = process.io_counters()
        pairs = zip(local_tensors(self.state), self.copies, strict=True)
        same = all(torch.equal(part.cpu(), copy) for part, copy in pairs)
        return Load(marks, after.read_bytes - before.read_bytes, same)

    def loads(self) -> dict[str, list[Load]]:
        """The loads of each way, in turns: as many as --loads, --iters and --max-seconds allow.

        Their number is odd, so that one of them has the median time.
        """
        ways, rule = loaders(self.mode), self.bench.rule
        most = min(self.bench.args.loads, rule.iters or self.bench.args.loads)
        done: dict[str, list[Load]] = {name: [] for name in ways}
        start = perf_counter()
        enough = False
        while not enough:
            for name, way in ways.items():
                done[name].append(self.load(way))
            count = len(done[name])
            spent_s = perf_counter() - start
            is_last = count + 2 > most or spent_s * (count + 2) / count > rule.max_seconds
            enough = count % 2 == 1 and bool(agree(is_last, self.group))
        return done


# -- a case ----------------------------------------------------------------------------------------


class Facts(TypedDict):
    """What a rank says of a case."""

    first: Checkpoint
    loads: dict[str, list[Load]]
    shard_bytes: int


def build(bench: Benchmark, folders: dict[str, str], key: Key, group: Group) -> Workload:
    """Measure a case. Its steps differ from checkpoint to checkpoint, so the loop of other scripts
    does not fit. folders: the folder that this run has made in each path."""
    path = folder_of(folders, key)
    if not path.parent.is_dir():
        raise ValueError(f"there is no {path.parent} here; give --paths that all nodes share")
    training = Training(key, path, bench, group)
    training.train(lambda steps: steps < bench.rule.warmup_iters)
    try:
        return measure(training, group)
    except CheckpointException as error:  # is no Exception
        failed, (reason, _) = min(error.failures.items())
        raise RuntimeError(f"the checkpoint failed on rank {failed}: {reason}") from None


def folder_of(folders: dict[str, str], key: Key) -> Path:
    """The folder of a case."""
    return Path(folders[key["path"]], f"{key['strategy']}-{key['mode']}")


def measure(training: Training, group: Group) -> Workload:
    """Write checkpoints until the stop rule ends it, then load the newest one again and again."""
    first = training.write_checkpoint()
    timed: list[Checkpoint] = []
    stop = ""
    started = perf_counter()
    while not stop:
        timed.append(training.write_checkpoint())
        spent = perf_counter() - started
        totals = [checkpoint.total for checkpoint in timed]
        reached = rule_reached(totals, len(totals), spent, training.bench.rule, compared=True)
        stop = agree(reached, group)
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
        timed=RankTimes(samples_s, [1] * len(timed), stop),
    )


# -- what rank 0 makes of it -----------------------------------------------------------------------


def derive(case: Case, times: Times, facts: list[Facts]) -> None:
    """Fill in the metrics and the check. Each checkpoint takes as long as its slowest rank."""
    shards = [fact["shard_bytes"] for fact in facts]
    size = sum(shards) if case.key["strategy"] == "fsdp2" else max(shards)
    upload, stall = times.mean("upload"), times.beyond("alone")
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
    case.metrics["loads"] = [load_of(way, facts, size) for way in facts[0]["loads"]]
    for number, row in enumerate(case.metrics["loads"]):
        prefix = "load" if number == 0 else "load_from_rank_0"
        case.metrics |= {f"{prefix}_s": row["load_s"], f"{prefix}_gb_per_s": row["load_gb_per_s"]}
    changed = [
        rank
        for rank, fact in zip(case.ranks, facts, strict=True)
        if not all(load.same for loads in fact["loads"].values() for load in loads)
    ]
    problem = f"rank {changed[0]} loads another state than it saved" if changed else None
    case.check = verdict(problem)


def load_of(way: str, facts: list[Facts], size: int) -> dict[str, Any]:
    """The metrics of the loads of one way: the median load and its parts.

    size: of the state, in bytes.
    """
    loads = [fact["loads"][way] for fact in facts]  # [ranks][loads]
    # seconds of [ranks, loads, marks] -> of the slowest rank
    marks = np.array([[load.marks for load in of_rank] for of_rank in loads]).max(axis=0)
    order = np.argsort(marks[:, 2], kind="stable")
    read_s, distributed_s, load_s = (float(mark) for mark in marks[order[len(order) // 2]])
    total = median(marks[:, 2])
    disk_bytes = sum(load.disk_bytes for of_rank in loads for load in of_rank) / len(order)
    return {
        "way": way,
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


LOAD_COLUMNS: Columns = {  # of the median load: read + distribute + apply = load
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
    """The rows of the table of loads: one of each way and case."""
    rows = []
    for case in cases:
        for row in case.metrics.get("loads", []):
            of_case = Case(key=row, ranks=case.ranks, name=case.name, metrics=row)
            of_case.part = case.part
            rows.append(of_case)
    return rows


def answers(cases: list[Case]) -> list[str]:
    """What checkpoints cost the training, and how long resuming from one takes."""
    key, times = cases[0].key, {}
    for row in load_rows(cases):
        times[f"{row.key['way']} ({row.name})"] = row.metrics["load_s"]
    ordered = sorted(times, key=lambda name: times[name].value)
    loads = ", ".join(f"{times[name]} by {name}" for name in ordered)
    return [answer(cases), f"{key['strategy']} from {key['path']}: a load takes {loads}"]


def answer(cases: list[Case]) -> str:
    """What each mode costs. The modes ran one after the other, so none is called the cheapest."""
    key = cases[0].key
    every = cli.duration(key["every_s"])
    costs: dict[str, Estimate] = {}
    for case in cases:
        if case.metrics["cost"] is not None:
            costs[case.name] = case.metrics["cost"]
    place = f"{key['strategy']} into {key['path']}"
    if not costs:
        return f"{place}: no checkpoint is on disk within {every}"
    ordered = sorted(costs, key=lambda mode: costs[mode].value)
    words = [f"{costs[mode].text('%', 100)} with {mode}" for mode in ordered]
    sentence = f"{place}: a checkpoint every {every} costs the training {', '.join(words)}"
    return sentence + ("; analysis/ab.py compares two modes in turns" if len(words) > 1 else "")


# -- the folders of a run --------------------------------------------------------------------------


def state_bytes(model: str) -> int:
    """Weights and AdamW's two moments, in fp32."""
    with torch.device("meta"):
        parameters = sum(weight.numel() for weight in Decoder(DECODERS[model]).parameters())
    return 3 * 4 * parameters


def make_folders(paths: list[str] | None, needed: int) -> list[str]:
    """A new folder in each path. needed: bytes in each of them.

    Raises ValueError for a path with files, or without room.
    """
    folders = []
    for path in paths or [tempfile.gettempdir()]:
        os.makedirs(path, exist_ok=True)
        if paths and os.listdir(path):
            raise ValueError(f"{path}: expected an empty or a new folder, it holds files")
        free = shutil.disk_usage(path).free
        if free < needed:
            raise ValueError(f"{path}: expected {needed:,} bytes free, got {free:,}")
        folder = tempfile.mkdtemp(prefix="checkpoint_sweep-", dir=os.path.abspath(path))
        folders.append(folder)
        remove_at_end(folder)
    return folders


def plan(args: argparse.Namespace, ranks: int) -> dict[str, list[Planned]]:
    """The title of each table (a path and a strategy), and its cases: a mode each."""
    size = state_bytes(args.model)
    fixed = {"model": args.model, "batch_size": args.batch_size, "every_s": args.every}
    tables = {}
    for path, strategy in itertools.product(args.paths or ["TMPDIR"], args.strategy):
        title = f"{args.model}, batch size {args.batch_size}, {strategy}, AdamW: "
        title += f"{size / 1e9:.3f} GB into {path} every {args.every:g} s"
        cases: list[Planned] = []
        for mode in args.modes:
            key = {"mode": mode, "path": path, "strategy": strategy, **fixed}
            cases.append((mode, ranks, key))
        tables[title] = cases
    return tables


def main() -> int:
    args = parse_args()
    # or the processes of async-process meet in a store that listens on every interface
    os.environ.setdefault("DCP_USE_PREFIX_STORE", "1")
    gc.disable()  # a collection on one rank would stop them all
    with Benchmark("checkpoint_sweep", args) as bench:
        is_first = bench.job.rank == 0
        tables = plan(args, bench.job.world_size)
        bench.announce(tables)
        # the newest checkpoint stays until the next one is complete
        needed = 2 * state_bytes(args.model)
        made = bench.prepare(
            "--paths", lambda: make_folders(args.paths, needed) if is_first else []
        )
        folders = dict(zip(args.paths or ["TMPDIR"], share(made), strict=True))
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
