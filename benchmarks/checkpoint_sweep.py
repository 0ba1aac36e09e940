#!/usr/bin/env python3
"""What does a checkpoint cost the training, by each way to save it and on each storage?

It trains a decoder under FSDP2 or DDP with AdamW, and saves it again and again. It goes on training
beside an asynchronous save. Logs show `blocked`; the steps beside the upload are slower as well.

    blocked   seconds until the call returns, which includes making the state dict
    upload    seconds from the call until all of it is on disk, with fsync
    stall     save - alone. save: seconds from the call to the end of the step in which the upload
              ends. alone: what the same number of steps takes when nothing is saved
    cost      stall / --every: what the training loses with a checkpoint every S seconds

    torchrun --nproc-per-node 2 benchmarks/checkpoint_sweep.py
    torchrun --nproc-per-node 2 benchmarks/checkpoint_sweep.py --modes all --strategy fsdp2,ddp
    torchrun --nproc-per-node 8 benchmarks/checkpoint_sweep.py --model decoder-1.3b \\
        --paths /scratch/x,/nfs/x --every 600 --json report.jsonl

All files go into new folders, which are removed at the end. docs/checkpoint_sweep.md has the other
formulas and says how to read the tables. BSD-3-Clause: copy the mode that you need.
"""

import argparse
import contextlib
import gc
import itertools
import logging
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple, TypedDict, cast

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException, FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree  # private; seen to work with torch 2.11, 2.14 and 2.15

if __name__ == "__mp_main__":  # in the process of async-process torch logs each save
    logging.disable(logging.WARNING)
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import cli
from common.benchmark import Benchmark, Key, Planned
from common.check import verdict
from common.groups import FOREVER, Group, agree, rendezvous, share
from common.memory import peak, start_peak
from common.report import Case, Estimate
from common.stats import Times
from common.table import Columns, Table, ends, metric, relative, render
from common.timing import Measured, rule_reached
from common.workloads.decoder import DECODERS, Decoder, next_token_loss, random_text
from common.workloads.folders import remove_at_end
from common.workloads.meshes import forget_groups

LOADS = 3  # this many cold ones and as many warm ones; fewer if there are fewer saves
IDLE_STEPS = 4  # before an asynchronous save, to know what a step takes when nothing is saved
CPU_TOKENS = 32  # of a sequence on the CPU
FROM_DEVICE = 0.9  # a load is cold if more than this part of the state came from the device


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = cli.Parser(__doc__)
    add, list_of = parser.add_argument, cli.list_of
    usual = ["torch.save", "dcp.save", "async-thread"]
    modes = f"{', '.join(MODES)}, or all (default: {','.join(usual)})"
    add("--modes", type=list_of(str, tuple(MODES)), default=usual, metavar="M", help=modes)
    strategies = "fsdp2, ddp or both (default: fsdp2)"
    add("--strategy", type=list_of(str, ("fsdp2", "ddp")), default=["fsdp2"], help=strategies)
    paths = "new or empty folders (default: one in TMPDIR)"
    add("--paths", "--path", type=list_of(str), metavar="PATH", help=paths)
    every = "seconds from one checkpoint to the next, for `costs` (default: 600)"
    add("--every", type=cli.positive_float, default=600.0, metavar="S", help=every)
    model = f"{', '.join(DECODERS)} (default: %(default)s)"
    default = cli.By("decoder-124m", "decoder-10m")
    add("--model", choices=list(DECODERS), default=default, metavar="NAME", help=model)
    batch = f"sequences of a rank in a step, on the CPU of {CPU_TOKENS} tokens "
    batch += "(default: %(default)s)"
    add("--batch-size", type=cli.positive_int, default=cli.By(8, 1), metavar="N", help=batch)
    cli.add_common_flags(parser, min_iters=6)
    return parser.parse_args(argv)


# -- the modes: save into a new folder; async_save returns a future --------------------------------
# [core]


@dataclass
class State:
    """What is saved: a model and its optimizer. group: gloo, for the collectives of saves alone,
    since these must not meet the collectives of the steps beside a save."""

    model: Any
    optimizer: torch.optim.Optimizer
    device: torch.device
    group: dist.ProcessGroup
    stager: DefaultStager | None = None  # of `async_save`

    def dicts(self, **options: Any) -> dict[str, Any]:
        """Model and optimizer, named as `set_state_dict` has them."""
        parts = get_state_dict(self.model, self.optimizer, options=StateDictOptions(**options))
        return dict(zip(("model_state_dict", "optim_state_dict"), parts, strict=True))


def torch_save(state: State, path: Path, fsync: bool) -> None:
    """Rank 0 gathers the full state, and writes it into one file."""
    content = state.dicts(full_state_dict=True, cpu_offload=True)
    if dist.get_rank() == 0:
        path.mkdir(parents=True)
        with open(path / "state.pt", "wb") as file:
            torch.save(content, file)
            if fsync:
                file.flush()
                os.fsync(file.fileno())
    dist.barrier(state.group)  # without it the other ranks would wait in their next step


def dcp_save(state: State, path: Path, fsync: bool, threads: int = 1) -> None:
    """Each rank writes its part. Each of its threads writes a file."""
    writer = Writer(path, sync_files=fsync, thread_count=threads)
    dcp.save(state.dicts(), storage_writer=writer, process_group=state.group)


@cache
def stagers_last() -> bool:
    """Whether a stager serves more than one save. Torch 2.11's does not (Automodel#3125)."""
    stager = DefaultStager(StagingOptions(False, False, False, False))
    with contextlib.suppress(KeyError):
        for _ in range(2):
            stager.stage({})
        return True
    return False


def async_save(state: State, path: Path, fsync: bool, by: AsyncCheckpointerType) -> Any:
    """Each rank copies its part; a thread or a process writes the copy."""
    cuda = state.device.type == "cuda"
    # a stager keeps its buffers for the next save, and each new one would have its own
    if state.stager is None or not stagers_last():
        options = StagingOptions(
            use_pinned_memory=cuda,
            use_shared_memory=by == AsyncCheckpointerType.PROCESS,
            use_async_staging=False,
            use_non_blocking_copy=cuda,
        )
        state.stager = DefaultStager(options)
    return dcp.async_save(
        state.dicts(),
        storage_writer=Writer(path, sync_files=fsync),
        process_group=state.group,
        async_stager=state.stager,
        async_checkpointer_type=by,
    )


MODES: dict[str, Callable[[State, Path, bool], Any]] = {
    "torch.save": torch_save,
    "dcp.save": dcp_save,
    "dcp.save-4-threads": partial(dcp_save, threads=4),
    "async-thread": partial(async_save, by=AsyncCheckpointerType.THREAD),
    "async-process": partial(async_save, by=AsyncCheckpointerType.PROCESS),
}


class Writer(FileSystemWriter):
    """Writes beside the files how long its rank took. The writer may be in another process."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        start = perf_counter()
        results = super().write_data(plan, planner)  # returns when all is written, and synced
        Path(self.path, f"seconds.{self.rank}").write_text(str(perf_counter() - start))
        return results


def write_seconds(path: Path) -> float:
    """How long this rank's `Writer` took; 0 without one."""
    file = path / f"seconds.{dist.get_rank()}"
    return float(file.read_text()) if file.exists() else 0.0


def load(state: State, path: Path) -> None:
    """Each rank reads its part; of the one file of torch.save each rank reads all."""
    one_file = path / "state.pt"
    full = one_file.exists()
    if full:
        content = torch.load(one_file, map_location="cpu", weights_only=True)
    else:
        content = state.dicts()
        dcp.load(content, checkpoint_id=path, process_group=state.group)
    options = StateDictOptions(full_state_dict=full)
    set_state_dict(state.model, state.optimizer, **content, options=options)


def local_bytes(state: State) -> list[Tensor]:
    """This rank's part of the state, in place: the bytes of each tensor."""
    parts = []
    for value in _pytree.tree_leaves(state.dicts()):
        if isinstance(value, Tensor):
            tensor = value.detach()
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            parts.append(local.view(-1).view(torch.uint8))
    return parts


def drop_from_page_cache(folder: Path) -> None:
    """This host forgets the content of the files. Some file systems ignore the request."""
    for path in folder.iterdir():
        with open(path, "rb") as file:
            os.fsync(file)
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


# [/core]
# -- the training that is saved --------------------------------------------------------------------


class Save(NamedTuple):
    """Seconds of one save on a rank. The docstring of this file defines them."""

    save: float
    alone: float
    blocked: float
    upload: float
    write: float  # of the files of this rank; 0 if not known


class Load(NamedTuple):
    """One load on a rank."""

    seconds: float
    read_bytes: int  # by the process
    device_bytes: int  # the part of them that came from the device, not from the page cache


class Training:
    """A decoder under its strategy, and the checkpoints of a case, on each rank. Each checkpoint is
    a folder in `path`, with a number."""

    def __init__(self, key: Key, path: Path, bench: Benchmark, group: Group) -> None:
        self.bench, self.control = bench, group.control
        self.path, self.count = path, 0  # of checkpoints so far
        self.mode = key["mode"]
        device = bench.job.device
        # A save may take long: while the steps go on, nothing hangs.
        rendezvous(group)
        saves = cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=FOREVER))
        group.more.append(saves)
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
        self.state = State(model, torch.optim.AdamW(model.parameters(), lr=1e-4), device, saves)
        texts = random_text(DECODERS[key["model"]], key["batch_size"], seed=bench.job.rank)
        length = CPU_TOKENS if device.type == "cpu" else None
        self.tokens, self.targets = (text[:, :length].to(device) for text in texts)
        # what the newest save should hold of this rank's part
        self.saved = [part.to("cpu", copy=True) for part in local_bytes(self.state)]

    @property
    def newest(self) -> Path:
        return self.path / str(self.count)

    def train(self, more: Callable[[int], bool]) -> list[float]:
        """Seconds of each step. more: says after how many steps this rank wants another one.

        The training goes on while any rank wants another step.
        """
        state, times = self.state, list[float]()
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

    def save(self, fsync: bool = True) -> Save:
        """Save into a new folder. The checkpoint before stays until this one is complete."""
        self.bench.turn()
        if self.bench.job.rank == 0 and self.count > 1:
            shutil.rmtree(self.path / str(self.count - 1))
        self.count += 1
        overlaps = self.mode.startswith("async")
        idle_steps = IDLE_STEPS if overlaps else 1
        idle = self.train(lambda steps: steps < idle_steps)
        for copy, part in zip(self.saved, local_bytes(self.state), strict=True):
            copy.copy_(part)
        beside: list[float] = []  # seconds of the steps beside the upload
        uploads: list[float] = []  # empty until the upload has ended
        self.bench.phase(f"save {self.newest}")
        dist.barrier(self.control)
        start = perf_counter()
        future = MODES[self.mode](self.state, self.newest, fsync)
        blocked = perf_counter() - start
        if overlaps:
            future.add_done_callback(lambda _: uploads.append(perf_counter() - start))
            beside = self.train(lambda _: not uploads)
            future.result()  # raises what went wrong
        alone = len(beside) * float(np.median(idle))
        upload = uploads[0] if uploads else blocked
        return Save(blocked + sum(beside), alone, blocked, upload, write_seconds(self.newest))

    def load(self, cold: bool = False) -> Load:
        """Load the newest checkpoint. cold: from the device, not from the page cache."""
        import psutil  # here: if it is missing, common/ has said so

        self.bench.phase(f"load {self.newest}")
        dist.barrier(self.control)  # nobody reads any more
        if cold and self.bench.job.local_rank == 0:
            drop_from_page_cache(self.newest)
        for part in local_bytes(self.state):
            part.zero_()  # the check then sees only what was read
        dist.barrier(self.control)
        process = psutil.Process()
        before, start = process.io_counters(), perf_counter()
        load(self.state, self.newest)
        torch.get_device_module(self.state.device).synchronize()  # its copies are in flight
        seconds, after = perf_counter() - start, process.io_counters()
        read_bytes = after.read_chars - before.read_chars
        return Load(seconds, read_bytes, after.read_bytes - before.read_bytes)

    def is_as_saved(self) -> bool:
        """Whether this rank's part is what the newest save held, bit for bit."""
        pairs = zip(local_bytes(self.state), self.saved, strict=True)
        return all(torch.equal(part.cpu(), copy) for part, copy in pairs)


# -- a case: saves and loads -----------------------------------------------------------------------


class Facts(TypedDict):
    """What a rank says of a case."""

    first: Save
    saves: list[Save]
    unsynced: list[Save]  # without fsync
    host_ram_gib: float
    cold: list[Load]
    warm: list[Load]
    same: bool  # the last load brought what was saved
    shard_bytes: int
    files: int  # of the newest checkpoint


def build(bench: Benchmark, folders: dict[str, str], key: Key, group: Group) -> Measured:
    """Measure a case. Its steps differ from save to save, so the loop of other scripts does not
    fit. folders: the folder that this run has made in each path."""
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


def measure(training: Training, group: Group) -> Measured:
    """Save until the stop rule ends it, then load the newest checkpoint."""
    host = torch.device("cpu")  # its memory, also on CUDA
    memory = start_peak(host)
    first = training.save()
    saves: list[Save] = []
    unsynced: list[Save] = []  # after every other save, one without fsync
    stop = ""
    started = perf_counter()
    while not stop:
        saves.append(training.save())
        if len(saves) % 2 == 1:
            unsynced.append(training.save(fsync=False))
        spent = perf_counter() - started
        times = [save.save for save in saves]
        stalls = [save.save - save.alone for save in saves]
        reached = rule_reached(times, len(times), spent, training.bench.rule, [stalls])
        stop = agree(reached, group)
    host_ram_gib = peak(host, memory)["memory_gib"]
    if training.mode == "async-process":
        host_ram_gib += children_gib()
    cold: list[Load] = []
    warm: list[Load] = []
    for _ in saves[:LOADS]:
        cold.append(training.load(cold=True))
        warm.append(training.load())
    facts = Facts(
        first=first,
        saves=saves,
        unsynced=unsynced,
        host_ram_gib=host_ram_gib,
        cold=cold,
        warm=warm,
        same=training.is_as_saved(),
        shard_bytes=sum(len(part) for part in training.saved),
        files=len(os.listdir(training.newest)),
    )
    samples_s = {"step": [save.save for save in saves]}
    for name in ("alone", "blocked", "upload"):
        samples_s[name] = [getattr(save, name) for save in saves]
    return Measured(samples_s, [1] * len(saves), stop, facts, profiled={"save": training.save})


def children_gib() -> float:
    """What the processes that this one has started have for themselves."""
    import psutil

    children = psutil.Process().children()
    return sum(child.memory_full_info().uss for child in children) / 2**30


# -- what rank 0 makes of it -----------------------------------------------------------------------


def column(rows: list[list[Any]], name: str) -> Any:
    """One field of the saves or loads of each rank: [ranks, saves or loads]."""
    return np.array([[getattr(entry, name) for entry in row] for row in rows])


def derive(case: Case, times: Times, facts: list[Facts]) -> None:
    """Fill in the metrics and the check. The slowest rank counts in each save and load."""
    shards = np.array([fact["shard_bytes"] for fact in facts])
    is_sharded = case.key["strategy"] == "fsdp2"
    size = int(shards.sum() if is_sharded else shards.max())
    upload, stall = times.median("upload"), times.beyond("alone")
    first_save = max(fact["first"].save for fact in facts)
    first_alone = max(fact["first"].alone for fact in facts)
    unsynced = column([fact["unsynced"] for fact in facts], "upload").max(axis=0)
    every_s = case.key["every_s"]
    case.metrics |= {
        "blocked_s": times.median("blocked"),
        "upload_s": upload,
        "stall_s": stall,
        "first_extra_s": first_save - first_alone - stall,
        "state_bytes": size,
        "write_gb_per_s": size / upload / 1e9,
        "fsync_factor": upload.value / float(np.median(unsynced)),
        "cost": stall / every_s if upload.value < every_s else None,
        "files": facts[0]["files"],
        "host_ram_gib": max(fact["host_ram_gib"] for fact in facts),
    }
    writes = np.median(column([fact["saves"] for fact in facts], "write"), axis=1)
    if writes.all():  # torch.save does not time them
        case.metrics["slowest_rank"] = int(writes.argmax())
        case.metrics["slowest_factor"] = float(writes.max() / np.median(writes))
    case.metrics |= load_metrics(facts, size)
    last_read = [fact["warm"][-1].read_bytes for fact in facts]
    case.metrics["read_over_shard"] = float((np.array(last_read) / shards).max())
    case.check = verdict(changed_state(case.ranks, facts))


def changed_state(ranks: list[int], facts: list[Facts]) -> str | None:
    """The first rank that loads another state than it saved, or None."""
    for rank, fact in zip(ranks, facts, strict=True):
        if not fact["same"]:
            return f"rank {rank} loads another state than it saved"
    return None


def load_metrics(facts: list[Facts], size: int) -> dict[str, Any]:
    """Seconds and GB/s of warm loads, and of cold ones if the host had forgotten the files. Three
    loads give no interval. size: of the state, in bytes."""
    loads = {"cold": [fact["cold"] for fact in facts], "warm": [fact["warm"] for fact in facts]}
    from_device = column(loads["cold"], "device_bytes").sum(axis=0).mean()
    if from_device / size <= FROM_DEVICE:
        del loads["cold"]
    metrics: dict[str, Any] = {}
    for kind, rows in loads.items():
        seconds = float(np.median(column(rows, "seconds").max(axis=0)))
        metrics[f"load_{kind}_s"] = seconds
        metrics[f"load_{kind}_gb_per_s"] = size / seconds / 1e9
    return metrics


COLUMNS: Columns = {
    "mode": lambda case: case.name,
    "blocked\n(s)": metric("blocked_s", digits=3),
    "stall\n(s)": metric("stall_s", digits=3),
    "95% ci\n(s)": ends("stall_s", digits=3),
    "upload\n(s)": metric("upload_s", digits=3),
    "95% ci": relative("upload_s"),
    "write\nGB/s": metric("write_gb_per_s"),
    "fsync\n(x)": metric("fsync_factor"),
    "first save\nextra (s)": metric("first_extra_s", digits=3),
    "slowest\nrank": metric("slowest_rank", digits=0),
    "writes\n(x)": metric("slowest_factor"),
    "host RAM\n(GiB)": metric("host_ram_gib"),
}
LOAD_COLUMNS: Columns = {
    "load": lambda case: case.name,
    "cold\nGB/s": metric("load_cold_gb_per_s"),
    "warm\nGB/s": metric("load_warm_gb_per_s"),
    "read /\nshard": metric("read_over_shard"),
}
WIDEST = ["dcp.save-4-threads", "0.000", "0.000", "0.000 to 0.000", *["0.000"] * 4]


def answer(cases: list[Case]) -> str:
    """What each mode costs. The modes ran one after the other, so none is called the cheapest."""
    key = cases[0].key
    every = interval_name(key["every_s"])
    costs: dict[str, Estimate] = {}
    for case in cases:
        if case.metrics["cost"] is not None:
            costs[case.name] = case.metrics["cost"]
    place = f"{key['strategy']} into {key['path']}"
    if not costs:
        return f"{place}: no save is on disk within {every}"
    ordered = sorted(costs, key=lambda mode: costs[mode].value)
    words = [f"{costs[mode].text('%', 100)} with {mode}" for mode in ordered]
    sentence = f"{place}: a save every {every} costs of the training {', '.join(words)}"
    return sentence + ("; analysis/ab.py compares two modes in turns" if len(words) > 1 else "")


def interval_name(seconds: float) -> str:
    """`10 minutes`, or `30 s`"""
    minutes = seconds / 60
    return f"{minutes:g} minutes" if minutes >= 2 and minutes % 1 == 0 else f"{seconds:g} s"


# -- the folders of a run --------------------------------------------------------------------------


def state_bytes(model: str) -> int:
    """Weights and AdamW's two moments, in fp32."""
    with torch.device("meta"):
        parameters = sum(weight.numel() for weight in Decoder(DECODERS[model]).parameters())
    return 3 * 4 * parameters


def claim(paths: list[str] | None, needed: int) -> dict[str, subprocess.Popen[bytes]]:
    """A new folder in each path, with the process that removes it. needed: bytes in each of them.

    Raises ValueError for a path with files, or without room.
    """
    folders = {}
    for path in paths or [tempfile.gettempdir()]:
        os.makedirs(path, exist_ok=True)
        if paths and os.listdir(path):
            raise ValueError(f"{path}: expected an empty or a new folder, it holds files")
        free = shutil.disk_usage(path).free
        if free < needed:
            raise ValueError(f"{path}: expected {needed:,} bytes free, got {free:,}")
        folder = tempfile.mkdtemp(prefix="checkpoint_sweep-", dir=os.path.abspath(path))
        folders[folder] = remove_at_end([folder])
    return folders


def serve_on_loopback() -> dist.Store:
    """A store in which the processes of async-process meet, where no launcher has one."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", str(port)
    return dist.TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def plan(args: argparse.Namespace, ranks: int) -> dict[str, list[Planned]]:
    """The title of each table (a path and a strategy), and its cases: a mode each."""
    size = state_bytes(args.model)
    fixed = {"model": args.model, "batch_size": args.batch_size, "every_s": args.every}
    tables = {}
    for path, strategy in itertools.product(args.paths or ["TMPDIR"], args.strategy):
        title = f"{args.model}, batch size {args.batch_size}, {strategy}, AdamW: "
        title += f"{size / 1e9:.3f} GB into {path}"
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
    torch.optim.SGD([torch.zeros(1)])  # the first optimizer imports torch._dynamo: for seconds
    with Benchmark("checkpoint_sweep", args) as bench:
        is_first = bench.job.rank == 0
        tables = plan(args, bench.job.world_size)
        bench.announce(tables)
        if "async-process" in args.modes and "MASTER_ADDR" not in os.environ:
            _store = serve_on_loopback()  # lives until this function returns
        # the newest checkpoint stays until the next one is complete
        needed = 2 * state_bytes(args.model)
        claimed = bench.prepare("--paths", lambda: claim(args.paths, needed) if is_first else {})
        folders = dict(zip(args.paths or ["TMPDIR"], share([*claimed]), strict=True))
        columns = COLUMNS | {f"every {args.every:g} s\ncosts (%)": metric("cost", 100, 3)}
        for title, cases in tables.items():
            with bench.begin_table(title, columns, answer, Table(columns, WIDEST)) as table:
                for name, _, key in cases:
                    bench.measure(key, name, partial(build, bench, folders), derive)
                    if is_first:
                        shutil.rmtree(folder_of(folders, key), ignore_errors=True)
            if table.passed:
                bench.print(f"\n{render(LOAD_COLUMNS, table.passed)}")
            if any("load_cold_s" not in case.metrics for case in table.passed):
                bench.print("# not cold: this file system keeps what it was told to drop")
    for remover in claimed.values():
        remover.communicate()
    return bench.status


if __name__ == "__main__":
    sys.exit(record(main)())
