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

import contextlib
import gc
import itertools
import logging
import mmap
import os
import shutil
import socket
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple, cast

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

from common.answers import Estimate, estimate_of, series
from common.check import verdict
from common.cli import Parser, add_common_flags, cut, list_of, positive_float, positive_int
from common.groups import FOREVER, Group, agree, rendezvous, share
from common.memory import peak, start_peak
from common.old import Benchmark, Measured
from common.report import Case
from common.stats import Times
from common.table import Columns, interval_ends, metric, render
from common.timing import rule_reached
from common.workloads.decoder import DECODERS, Decoder, next_token_loss, random_text
from common.workloads.folders import remove_at_end
from common.workloads.meshes import forget_groups

Key = dict[str, Any]
Facts = dict[str, Any]


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


LOADS = 3  # this many cold ones and as many warm ones; fewer if there are fewer saves
IDLE_STEPS = 4  # before an asynchronous save, to know what a step takes when nothing is saved
CPU_TOKENS = 32  # of a sequence on the CPU


def parse_args(argv: list[str] | None = None) -> Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument
    usual = ["torch.save", "dcp.save", "async-thread"]
    modes = f"{', '.join(MODES)}, or all (default: {','.join(usual)})"
    add("--modes", type=list_of(str, tuple(MODES)), default=usual, metavar="M", help=modes)
    strategies = "fsdp2, ddp or both (default: fsdp2)"
    add("--strategy", type=list_of(str, ("fsdp2", "ddp")), default=["fsdp2"], help=strategies)
    paths = "new or empty folders (default: one in TMPDIR)"
    add("--paths", "--path", type=list_of(str), metavar="PATH", help=paths)
    every = "seconds from one checkpoint to the next, for `costs` (default: 600)"
    add("--every", type=positive_float, default=600.0, metavar="S", help=every)
    model = f"{', '.join(DECODERS)} (default: decoder-124m, CPU decoder-10m)"
    add("--model", choices=list(DECODERS), metavar="NAME", help=model)
    batch = f"sequences of a rank in a step (default: 8, CPU 1, of {CPU_TOKENS} tokens)"
    add("--batch-size", type=positive_int, metavar="N", help=batch)
    add_common_flags(parser, min_iters=6)
    args = parser.parse_args(argv)
    cuda = torch.cuda.is_available() and args.device != "cpu"
    args.model = args.model or ("decoder-124m" if cuda else "decoder-10m")
    args.batch_size = args.batch_size or (8 if cuda else 1)
    return args


# -- the modes: save into a new folder; async_save returns a future --------------------------------


def torch_save(t: "Training", path: Path, fsync: bool) -> None:
    """Rank 0 gathers the full state, and writes it into one file."""
    state = t.state(full_state_dict=True, cpu_offload=True)
    if dist.get_rank() == 0:
        path.mkdir(parents=True)
        with open(path / "state.pt", "wb") as file:
            torch.save(state, file)
            if fsync:
                file.flush()
                os.fsync(file.fileno())
    dist.barrier(t.saves)  # without it the other ranks would wait in their next step


def dcp_save(t: "Training", path: Path, fsync: bool, threads: int = 1) -> None:
    """Each rank writes its part. Each of its threads writes a file."""
    writer = Writer(path, sync_files=fsync, thread_count=threads)
    dcp.save(t.state(), storage_writer=writer, process_group=t.saves)


@cache
def stagers_last() -> bool:
    """Whether a stager serves more than one save. Torch 2.11's does not (Automodel#3125)."""
    stager = DefaultStager(StagingOptions(False, False, False, False))
    with contextlib.suppress(KeyError):
        for _ in range(2):
            stager.stage({})
        return True
    return False


def async_save(t: "Training", path: Path, fsync: bool, by: AsyncCheckpointerType) -> Any:
    """Each rank copies its part; a thread or a process writes the copy."""
    cuda = t.device.type == "cuda"
    # a stager keeps its buffers for the next save, and each new one would have its own
    if t.stager is None or not stagers_last():
        options = StagingOptions(
            use_pinned_memory=cuda,
            use_shared_memory=by == AsyncCheckpointerType.PROCESS,
            use_async_staging=False,
            use_non_blocking_copy=cuda,
        )
        t.stager = DefaultStager(options)
    return dcp.async_save(
        t.state(),
        storage_writer=Writer(path, sync_files=fsync),
        process_group=t.saves,
        async_stager=t.stager,
        async_checkpointer_type=by,
    )


MODES: dict[str, Callable[["Training", Path, bool], Any]] = {
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


def load(t: "Training", path: Path) -> None:
    """Each rank reads its part; of the one file of torch.save each rank reads all."""
    one_file = path / "state.pt"
    full = one_file.exists()
    if full:
        state = torch.load(one_file, map_location="cpu", weights_only=True)
    else:
        state = t.state()
        dcp.load(state, checkpoint_id=path, process_group=t.saves)
    set_state_dict(t.model, t.optimizer, **state, options=StateDictOptions(full_state_dict=full))


# -- the training that is saved --------------------------------------------------------------------


class Training:
    """A decoder under its strategy, AdamW, and a batch that differs by rank. On all ranks."""

    def __init__(self, key: Key, bench: Benchmark, group: Group) -> None:
        self.control = group.control
        self.device = bench.job.device
        self.mode = key["mode"]
        self.announce = bench.watchdog.phase
        # A save has collectives, too, which must not meet those of the steps beside it. It may take
        # long: while the steps go on, nothing hangs.
        rendezvous(group)
        self.saves = cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=FOREVER))
        group.more.append(self.saves)
        torch.manual_seed(0)
        with self.device:
            self.model: Any = Decoder(DECODERS[key["model"]])
        if key["strategy"] == "ddp":
            self.model = DistributedDataParallel(self.model, process_group=group.test)
        else:
            # DTensor takes meshes with the same ranks and names for one: each case has its own
            name = f"{self.mode} into {key['path']}"
            mesh = dist.DeviceMesh.from_group(group.test, self.device.type, mesh_dim_names=(name,))
            forget_groups(mesh)
            for unit in (*self.model.blocks, self.model):
                fully_shard(unit, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        texts = random_text(DECODERS[key["model"]], key["batch_size"], seed=bench.job.rank)
        length = CPU_TOKENS if self.device.type == "cpu" else None
        shorter = [text[:, :length] for text in texts]
        self.tokens, self.targets = (text.to(self.device) for text in shorter)
        self.stager: DefaultStager | None = None  # of `async_save`
        # what the newest save should hold of this rank's part
        self.saved = [part.to("cpu", copy=True) for part in self.local_bytes()]

    def train(self, more: Callable[[int], bool]) -> list[float]:
        """Seconds of each step. more: says after how many steps this rank wants another one.

        The training goes on while any rank wants another step.
        """
        times: list[float] = []
        go_on = torch.ones(1)
        while go_on:
            self.announce(f"step {len(times) + 1}")
            start = perf_counter()
            self.optimizer.zero_grad()
            next_token_loss(self.model(self.tokens), self.targets).backward()
            self.optimizer.step()
            torch.get_device_module(self.device).synchronize()  # does nothing on the CPU
            go_on.fill_(more(len(times) + 1))
            dist.all_reduce(go_on, op=dist.ReduceOp.MAX, group=self.control)
            times.append(perf_counter() - start)
        return times

    def save(self, path: Path, fsync: bool) -> Save:
        """One save on this rank."""
        overlaps = self.mode.startswith("async")
        idle_steps = IDLE_STEPS if overlaps else 1
        idle = self.train(lambda steps: steps < idle_steps)
        for copy, part in zip(self.saved, self.local_bytes(), strict=True):
            copy.copy_(part)
        beside: list[float] = []  # seconds of the steps beside the upload
        uploads: list[float] = []  # empty until the upload has ended
        self.announce(f"save {path}")
        dist.barrier(self.control)
        start = perf_counter()
        future = MODES[self.mode](self, path, fsync)
        blocked = perf_counter() - start
        if overlaps:
            future.add_done_callback(lambda _: uploads.append(perf_counter() - start))
            beside = self.train(lambda _: not uploads)
            future.result()  # raises what went wrong
        alone = len(beside) * float(np.median(idle))
        upload = uploads[0] if uploads else blocked
        return Save(blocked + sum(beside), alone, blocked, upload, write_seconds(path))

    def state(self, **options: Any) -> dict[str, Any]:
        """Model and optimizer, named as `set_state_dict` has them."""
        parts = get_state_dict(self.model, self.optimizer, options=StateDictOptions(**options))
        return dict(zip(("model_state_dict", "optim_state_dict"), parts, strict=True))

    def local_bytes(self) -> list[Tensor]:
        """This rank's part of the state, in place: the bytes of each tensor."""
        parts = []
        for value in _pytree.tree_leaves(self.state()):
            if isinstance(value, Tensor):
                tensor = value.detach()
                local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                parts.append(local.view(-1).view(torch.uint8))
        return parts


def write_seconds(path: Path) -> float:
    """How long this rank's `Writer` took; 0 without one."""
    file = path / f"seconds.{dist.get_rank()}"
    return float(file.read_text()) if file.exists() else 0.0


# -- a case: saves and loads -----------------------------------------------------------------------


class CheckpointFolder:
    """The folder of a case. Each checkpoint is a folder in it, with a number. On all ranks."""

    def __init__(self, path: Path, training: Training, bench: Benchmark) -> None:
        self.path, self.training, self.bench = path, training, bench
        self.count = 0  # of checkpoints so far

    @property
    def newest(self) -> Path:
        return self.path / str(self.count)

    def save(self, fsync: bool = True) -> Save:
        """Save into a new folder. The checkpoint before stays until this one is complete."""
        self.bench.turn()
        if self.bench.job.rank == 0 and self.count > 1:
            shutil.rmtree(self.path / str(self.count - 1))
        self.count += 1
        return self.training.save(self.newest, fsync)

    def load(self, cold: bool = False) -> Load:
        """Load the newest checkpoint. cold: from the device, not from the page cache."""
        import psutil  # here: if it is missing, common/ has said so

        t = self.training
        t.announce(f"load {self.newest}")
        dist.barrier(t.control)  # nobody reads any more
        if cold and self.bench.job.local_rank == 0:
            drop_from_page_cache(self.newest)
        for part in t.local_bytes():
            part.zero_()  # so that what is not 0 after the load has been read
        dist.barrier(t.control)
        process = psutil.Process()
        before, start = process.io_counters(), perf_counter()
        load(t, self.newest)
        torch.get_device_module(t.device).synchronize()  # its copies to the device are in flight
        seconds, after = perf_counter() - start, process.io_counters()
        read_bytes = after.read_chars - before.read_chars
        return Load(seconds, read_bytes, after.read_bytes - before.read_bytes)


def drop_from_page_cache(folder: Path) -> None:
    """This host forgets the content of the files. Not every file system does as it is told."""
    for path in folder.iterdir():
        with open(path, "rb") as file:
            os.fsync(file)
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def flip_a_bit(folder: Path) -> None:
    """Change a tensor: the middle of the largest file is part of one."""
    largest = max(folder.iterdir(), key=lambda file: file.stat().st_size)
    with open(largest, "r+b") as file, mmap.mmap(file.fileno(), 0) as content:
        content[len(content) // 2] ^= 1


def build(bench: Benchmark, folders: dict[str, str], key: Key, group: Group) -> Measured:
    """Measure a case. Its steps differ from save to save, so the loop of other scripts does not
    fit. folders: the folder that this run has made in each path."""
    path = folder_of(folders, key)
    if not path.parent.is_dir():
        raise ValueError(f"there is no {path.parent} here; give --paths that all nodes share")
    training = Training(key, bench, group)
    training.train(lambda steps: steps < bench.rule.warmup_iters)
    try:
        return measure(CheckpointFolder(path, training, bench), group)
    except CheckpointException as error:  # is no Exception
        failed, (reason, _) = min(error.failures.items())
        raise RuntimeError(f"the checkpoint failed on rank {failed}: {reason}") from None


def folder_of(folders: dict[str, str], key: Key) -> Path:
    """The folder of a case."""
    return Path(folders[key["path"]], f"{key['strategy']}-{key['mode']}")


class Saves(NamedTuple):
    """The saves of a case, the first one apart, and the rule that ended them."""

    synced: list[Save]
    unsynced: list[Save]  # without fsync
    stop: str


def save_until_stop(folder: CheckpointFolder, group: Group) -> Saves:
    """Save until the stop rule ends it. After every other save, one without fsync."""
    synced: list[Save] = []
    unsynced: list[Save] = []
    stop = ""
    started = perf_counter()
    while not stop:
        synced.append(folder.save())
        if len(synced) % 2 == 1:
            unsynced.append(folder.save(fsync=False))
        spent = perf_counter() - started
        times = [save.save for save in synced]
        stalls = [save.save - save.alone for save in synced]
        reached = rule_reached(times, len(times), spent, folder.bench.rule, [stalls])
        stop = agree(reached, group)
    return Saves(synced, unsynced, stop)


def measure(folder: CheckpointFolder, group: Group) -> Measured:
    """Save until the stop rule ends it, load the newest checkpoint, flip a bit and load again."""
    training = folder.training
    host = torch.device("cpu")  # its memory, also on CUDA
    memory = start_peak(host)
    first = folder.save()
    saves = save_until_stop(folder, group)
    host_ram_gib = peak(host, memory)["memory_gib"]
    if training.mode == "async-process":
        host_ram_gib += children_gib()
    cold: list[Load] = []
    warm: list[Load] = []
    for _ in saves.synced[:LOADS]:
        cold.append(folder.load(cold=True))
        warm.append(folder.load())
    facts: Facts = {
        "first": first,
        "saves": saves.synced,
        "unsynced": saves.unsynced,
        "host_ram_gib": host_ram_gib,
        "cold": cold,
        "warm": warm,
        "same": is_as_saved(training),
        "shard_bytes": sum(len(part) for part in training.saved),
        "files": len(os.listdir(folder.newest)),
    }
    dist.barrier(training.control)  # all have read what is now changed
    if folder.bench.job.rank == 0:
        flip_a_bit(folder.newest)
    facts["noticed"] = load_raises(folder)
    samples_s = {
        "step": [save.save for save in saves.synced],
        "alone": [save.alone for save in saves.synced],
        "blocked": [save.blocked for save in saves.synced],
        "upload": [save.upload for save in saves.synced],
    }
    profiled = {"save": folder.save}
    return Measured(samples_s, [1] * len(saves.synced), saves.stop, facts, profiled=profiled)


def children_gib() -> float:
    """What the processes that this one has started have for themselves."""
    import psutil

    children = psutil.Process().children()
    return sum(child.memory_full_info().uss for child in children) / 2**30


def is_as_saved(training: Training) -> bool:
    """Whether this rank's part is what the newest save held, bit for bit."""
    pairs = zip(training.local_bytes(), training.saved, strict=True)
    return all(torch.equal(part.cpu(), copy) for part, copy in pairs)


def load_raises(folder: CheckpointFolder) -> bool:
    try:
        folder.load()
    except (Exception, CheckpointException):  # CheckpointException is no Exception
        return True
    return False


# -- what rank 0 makes of it -----------------------------------------------------------------------


def column(facts: list[Facts], what: str, name: str) -> Any:
    """One time of all saves or loads: [ranks, saves or loads]."""
    rows = []
    for fact in facts:
        rows.append([getattr(save_or_load, name) for save_or_load in fact[what]])
    return np.array(rows)


def derive(case: Case, times: Times, facts: list[Facts]) -> None:
    """Fill in the metrics and the check. The slowest rank counts in each save and load."""
    shards = np.array([fact["shard_bytes"] for fact in facts])
    is_sharded = case.key["strategy"] == "fsdp2"
    every_s = case.key["every_s"]
    m = case.metrics
    m["blocked_s"] = times.p50("blocked")
    m["upload_s"] = times.p50("upload")
    m["stall_s"], m["stall_ci95_s"] = times.exposed("alone")
    first_save = max(fact["first"].save for fact in facts)
    first_alone = max(fact["first"].alone for fact in facts)
    m["first_extra_s"] = first_save - first_alone - m["stall_s"]
    m["state_bytes"] = int(shards.sum() if is_sharded else shards.max())
    m["write_gb_per_s"] = m["state_bytes"] / m["upload_s"] / 1e9
    unsynced_s = column(facts, "unsynced", "upload").max(axis=0)
    m["fsync_factor"] = m["upload_s"] / np.median(unsynced_s)
    m["cost"] = m["stall_s"] / every_s if m["upload_s"] < every_s else None
    m["files"] = facts[0]["files"]
    m["host_ram_gib"] = max(fact["host_ram_gib"] for fact in facts)
    writes = np.median(column(facts, "saves", "write"), axis=1)
    if writes.all():  # torch.save does not time them
        m["slowest_rank"] = int(writes.argmax())
        m["slowest_factor"] = writes.max() / np.median(writes)
    m |= load_metrics(facts, m["state_bytes"])
    last_read = column(facts, "warm", "read_bytes")[:, -1]
    m["read_over_shard"] = (last_read / shards).max()
    is_noticed = any(fact["noticed"] for fact in facts)
    m["flipped_bit"] = "noticed" if is_noticed else "not noticed"
    case.check = verdict(changed_state(case.ranks, facts))


def changed_state(ranks: list[int], facts: list[Facts]) -> str | None:
    """The first rank that loads another state than it saved, or None."""
    for rank, fact in zip(ranks, facts, strict=True):
        if not fact["same"]:
            return f"rank {rank} loads another state than it saved"
    return None


def load_metrics(facts: list[Facts], state_bytes: int) -> dict[str, float]:
    """Seconds and GB/s of warm loads, and of cold ones if the host had forgotten the files."""
    from_device = column(facts, "cold", "device_bytes").sum(axis=0).mean()
    kinds = ["cold", "warm"] if from_device / state_bytes > 0.9 else ["warm"]
    metrics: dict[str, float] = {}
    for kind in kinds:
        seconds = np.median(column(facts, kind, "seconds").max(axis=0))
        metrics[f"load_{kind}_s"] = seconds
        metrics[f"load_{kind}_gb_per_s"] = state_bytes / seconds / 1e9
    return metrics


COLUMNS: Columns = {
    "mode": lambda case: case.key["mode"],
    "blocked\n(s)": metric("blocked_s", digits=3),
    "stall\n(s)": metric("stall_s", digits=3),
    "95% ci\n(s)": interval_ends("stall_ci95_s", digits=3),
    "upload\n(s)": metric("upload_s", digits=3),
    "write\nGB/s": metric("write_gb_per_s"),
    "fsync\n(x)": metric("fsync_factor"),
    "first save\nextra (s)": metric("first_extra_s", digits=3),
    "slowest\nrank": metric("slowest_rank", digits=0),
    "writes\n(x)": metric("slowest_factor"),
    "host RAM\n(GiB)": metric("host_ram_gib"),
}
LOAD_COLUMNS: Columns = {
    "load": lambda case: case.key["mode"],
    "cold\nGB/s": metric("load_cold_gb_per_s"),
    "warm\nGB/s": metric("load_warm_gb_per_s"),
    "read /\nshard": metric("read_over_shard"),
    "a flipped bit is": lambda case: case.metrics["flipped_bit"],
}
WIDEST = ["dcp.save-4-threads", "0.000", "0.000", "0.000 to 0.000", *["0.000"] * 4]


def answer(cases: list[Case]) -> list[str]:
    """For each path and strategy: what the cheapest and the dearest mode cost."""
    sentences: list[str] = []
    for name, same in series(cases, ("mode",)).items():
        every_s = same[0].key["every_s"]
        costs: dict[str, Estimate] = {}
        for case in same:
            stall = estimate_of(case, "stall_s", "stall_ci95_s")
            if stall and case.metrics["cost"] is not None:
                costs[case.key["mode"]] = stall.scaled(1 / every_s)
        if costs:
            sentences.append(f"{name}a save every {interval_name(every_s)} {cost_words(costs)}")
        elif any("cost" in case.metrics for case in same):
            sentences.append(f"{name}no save is on disk within {interval_name(every_s)}")
    return sentences


def cost_words(costs: dict[str, Estimate]) -> str:
    """`costs 0.038 % (0.030 to 0.044) of the training with dcp.save, 0.095 % ... with torch.save`.
    costs: by mode, as a part of the training."""
    cheapest, *others = sorted(costs, key=lambda mode: costs[mode].value)
    words = f"costs {costs[cheapest].text('%', 100)} of the training with {cheapest}"
    if not others:
        return words
    alike = [mode for mode in others if costs[cheapest].overlaps(costs[mode])]
    if alike:
        return f"{words}; {cut(alike)} cannot be told apart from it"
    return f"{words}, {costs[others[-1]].text('%', 100)} with {others[-1]}"


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


def claim(paths: list[str] | None, needed: int) -> tuple[list[str], str | None]:
    """A new folder in each path, and what is wrong with a path. needed: bytes in each of them."""
    folders: list[str] = []
    for path in paths or [tempfile.gettempdir()]:
        try:
            os.makedirs(path, exist_ok=True)
            if paths and os.listdir(path):
                return folders, f"--paths {path}: expected an empty or a new folder, it holds files"
            folders.append(tempfile.mkdtemp(prefix="checkpoint_sweep-", dir=os.path.abspath(path)))
        except OSError as error:
            return folders, f"--paths {path} cannot be used: {error.strerror}"
        free = shutil.disk_usage(path).free
        if free < needed:
            return folders, f"--paths {path}: expected {needed:,} bytes free, got {free:,}"
    return folders, None


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


def plan(args: Namespace, path: str, strategy: str) -> list[Key]:
    """The key of each mode."""
    shared = {"model": args.model, "batch_size": args.batch_size, "every_s": args.every}
    return [{"mode": mode, "path": path, "strategy": strategy, **shared} for mode in args.modes]


def measure_table(bench: Benchmark, folders: dict[str, str], keys: list[Key]) -> None:
    """Measure the cases of one path and strategy, then print how fast they load."""
    cases: list[Case] = []  # those that passed, on rank 0
    for key in keys:
        case = bench.measure(key, partial(build, bench, folders), derive)
        if case and not case.failed:
            cases.append(case)
        if bench.job.rank == 0:
            shutil.rmtree(folder_of(folders, key), ignore_errors=True)
    if cases:
        bench.print(f"\n{render(LOAD_COLUMNS, cases)}")
    if any("load_cold_s" not in case.metrics for case in cases):
        bench.print("# not cold: this file system keeps what it was told to drop")


def main() -> int:
    args = parse_args()
    # or the processes of async-process meet in a store that listens on every interface
    os.environ.setdefault("DCP_USE_PREFIX_STORE", "1")
    gc.disable()  # a collection on one rank would stop them all
    torch.optim.SGD([torch.zeros(1)])  # the first optimizer imports torch._dynamo: for seconds
    with Benchmark("checkpoint_sweep", args, answer=answer) as bench:
        keys: list[Key] = []
        for path, strategy in itertools.product(args.paths or ["TMPDIR"], args.strategy):
            keys += plan(args, path, strategy)
        bench.announce(keys)
        first, size = bench.job.rank == 0, state_bytes(args.model)
        if "async-process" in args.modes and "MASTER_ADDR" not in os.environ:
            _store = serve_on_loopback()  # lives until this function returns
        # the newest checkpoint stays until the next one is complete
        claimed, problem = share(claim(args.paths, 2 * size) if first else None)
        if first:
            remover = remove_at_end(claimed)
        if problem:
            bench.refuse(problem)
        folders = dict(zip(args.paths or ["TMPDIR"], claimed, strict=True))
        columns = COLUMNS | {f"every {args.every:g} s\ncosts (%)": metric("cost", 100, 3)}
        for path, strategy in itertools.product(folders, args.strategy):
            trained = f"{args.model}, batch size {args.batch_size}, {strategy}, AdamW"
            bench.begin_table(f"{trained}: {size / 1e9:.3f} GB into {path}", columns, WIDEST)
            measure_table(bench, folders, plan(args, path, strategy))
    if first:
        remover.communicate()
    return bench.status


if __name__ == "__main__":
    sys.exit(record(main)())
