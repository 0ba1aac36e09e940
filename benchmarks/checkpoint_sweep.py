#!/usr/bin/env python3
"""What does a checkpoint cost the training, by each way to save it and on each storage?

Trains a decoder under FSDP2 or DDP with AdamW, saves it again and again, and goes on training
beside an asynchronous save. Logs show `blocked`; the steps beside the upload are slower as well.

    blocked   seconds until the call returns, making the state dict included
    upload    seconds from the call until all of it is on disk, with fsync
    stall     save - alone. save: seconds from the call to the end of the step in which the upload
              ends; alone: what so many steps take when nothing is saved
    cost      stall / --every: what the training loses with a checkpoint every S seconds

    torchrun --nproc-per-node 2 benchmarks/checkpoint_sweep.py
    torchrun --nproc-per-node 2 benchmarks/checkpoint_sweep.py --modes all --strategy fsdp2,ddp
    torchrun --nproc-per-node 8 benchmarks/checkpoint_sweep.py --model decoder-1.3b \\
        --paths /scratch/x,/nfs/x --every 600 --json report.jsonl

All files go into new folders, which are removed at the end. docs/checkpoint_sweep.md has the other
formulas, and how to read the tables. BSD-3-Clause: copy the mode that you need.
"""

import contextlib
import gc
import itertools
import logging
import mmap
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple, cast

import numpy as np
import psutil
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

if __name__ == "__mp_main__":  # the process of async-process: torch tells of each save there
    logging.disable(logging.WARNING)
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.benchmark import Benchmark, Measured
from common.check import verdict
from common.cli import Parser, add_common_flags, list_of, positive_float, positive_int
from common.decoder import DECODERS, Decoder, next_token_loss, random_text
from common.dist import FOREVER, Group, agree, share
from common.memory import peak, start_peak
from common.private_torch import TORCH_2_15, forget_groups, leaves
from common.report import Case
from common.stats import Times
from common.table import Columns, interval_ends, metric, render
from common.timing import rule_reached

Facts = dict[str, Any]


class Save(NamedTuple):
    """Seconds of one save on a rank; the docstring says of what."""

    save: float
    alone: float
    blocked: float
    upload: float
    write: float  # of this rank's own files


class Load(NamedTuple):
    """One load on a rank."""

    seconds: float
    read_bytes: int  # by the process
    device_bytes: int  # of them from the device, not from the page cache


LOADS = 3  # cold ones, and as many warm ones; with --iters 1 or 2 as few


def parse_args(argv: list[str] | None = None) -> Namespace:
    parser = Parser(__doc__)
    add, usual = parser.add_argument, ["torch.save", "dcp.save", "async-thread"]
    text = f"{', '.join(MODES)}, or all (default: {','.join(usual)})"
    add("--modes", type=list_of(str, tuple(MODES)), default=usual, metavar="M", help=text)
    text = "fsdp2, ddp or both (default: fsdp2)"
    add("--strategy", type=list_of(str, ("fsdp2", "ddp")), default=["fsdp2"], help=text)
    text = "new or empty folders (default: one in TMPDIR)"
    add("--paths", "--path", type=list_of(str), metavar="PATH", help=text)
    text = "seconds from one checkpoint to the next, for `costs` (default: 600)"
    add("--every", type=positive_float, default=600.0, metavar="S", help=text)
    text = f"{', '.join(DECODERS)} (default: decoder-124m, CPU decoder-10m)"
    add("--model", choices=list(DECODERS), metavar="NAME", help=text)
    text = "sequences of a rank in a step (default: 8, CPU 1, of 32 tokens)"
    add("--batch-size", type=positive_int, metavar="N", help=text)
    add_common_flags(parser, min_iters=6)
    args = parser.parse_args(argv)
    cuda = torch.cuda.is_available() and args.device != "cpu"
    args.model = args.model or ("decoder-124m" if cuda else "decoder-10m")
    args.batch_size = args.batch_size or (8 if cuda else 1)
    return args


# -- the modes: save into a new folder; a future where that goes on beside the training ------------


def torch_save(t: "Training", path: Path, fsync: bool) -> None:
    """Rank 0 gathers the whole state, and writes it into one file."""
    state = t.state(full_state_dict=True, cpu_offload=True)
    if dist.get_rank() == 0:
        path.mkdir(parents=True)
        with open(path / "state.pt", "wb") as file:
            torch.save(state, file)
            if fsync:
                file.flush()
                os.fsync(file.fileno())
    dist.barrier(t.saves)  # the others would wait in their next step


def dcp_save(t: "Training", path: Path, fsync: bool, threads: int = 1) -> None:
    """Each rank writes its part, into a file for each thread."""
    writer = Writer(path, sync_files=fsync, thread_count=threads)
    dcp.save(t.state(), storage_writer=writer, process_group=t.saves)


def async_save(t: "Training", path: Path, fsync: bool, by: AsyncCheckpointerType) -> Any:
    """Each rank copies its part; a thread or a process writes the copy."""
    cuda, process = t.device.type == "cuda", by == AsyncCheckpointerType.PROCESS
    if t.stager is None or not TORCH_2_15:  # there it serves one save (Automodel#3125)
        # pinned, shared with a process, copying in a thread, not blocking; it keeps its buffers
        t.stager = DefaultStager(StagingOptions(cuda, process, False, cuda))
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
    """Leaves beside the files how long its rank wrote them, which may be in another process."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        start = perf_counter()
        results = super().write_data(plan, planner)  # returns when all is written and synced
        Path(self.path, f"seconds.{self.rank}").write_text(str(perf_counter() - start))
        return results


def load(t: "Training", path: Path) -> None:
    """Each rank reads its part, of torch.save's file all of it."""
    if whole := (path / "state.pt").exists():
        state = torch.load(path / "state.pt", map_location="cpu", weights_only=True)
    else:
        state = t.state()
        dcp.load(state, checkpoint_id=path, process_group=t.saves)
    set_state_dict(t.model, t.optimizer, **state, options=StateDictOptions(full_state_dict=whole))


class Training:
    """A decoder under its strategy, AdamW, and a batch of each rank's own. On all ranks."""

    def __init__(self, key: Facts, bench: Benchmark, group: Group) -> None:
        self.control, self.device, self.mode = group.control, bench.job.device, key["mode"]
        self.say = bench.watchdog.phase
        # a save has collectives, too, which must not meet those of the steps beside it
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
        length = 32 if self.device.type == "cpu" else None
        self.tokens, self.targets = (text[:, :length].to(self.device) for text in texts)
        self.stager: DefaultStager | None = None  # of `async_save`
        self.saved = [x.to("cpu", copy=True) for x in self.own_bytes()]  # by the newest save

    def train(self, more: Callable[[int], bool]) -> list[float]:
        """Seconds of each step; goes on while any rank wants `more` after so many of them."""
        times, go = list[float](), torch.ones(1)
        while go:
            self.say(f"step {len(times) + 1}")
            start = perf_counter()
            self.optimizer.zero_grad()
            next_token_loss(self.model(self.tokens), self.targets).backward()
            self.optimizer.step()
            torch.get_device_module(self.device).synchronize()  # does nothing on the CPU
            go.fill_(more(len(times) + 1))
            dist.all_reduce(go, op=dist.ReduceOp.MAX, group=self.control)
            times.append(perf_counter() - start)
        return times

    def save(self, path: Path, fsync: bool) -> Save:
        """One save on this rank."""
        overlaps = self.mode.startswith("async")
        idle = self.train(lambda steps: steps < (4 if overlaps else 1))
        for copy, x in zip(self.saved, self.own_bytes(), strict=True):
            copy.copy_(x)
        steps, uploaded = list[float](), list[float]()
        self.say(f"save {path}")
        dist.barrier(self.control)
        start = perf_counter()
        future = MODES[self.mode](self, path, fsync)
        blocked = perf_counter() - start
        if overlaps:
            future.add_done_callback(lambda _: uploaded.append(perf_counter() - start))
            steps = self.train(lambda _: not uploaded)
            future.result()  # raises what went wrong
        alone = len(steps) * float(np.median(idle))
        upload = uploaded[0] if uploaded else blocked
        wrote = path / f"seconds.{dist.get_rank()}"
        write = float(wrote.read_text()) if wrote.exists() else 0.0
        return Save(blocked + sum(steps), alone, blocked, upload, write)

    def state(self, **options: Any) -> dict[str, Any]:
        """Model and optimizer, named as `set_state_dict` has them."""
        parts = get_state_dict(self.model, self.optimizer, options=StateDictOptions(**options))
        return dict(zip(("model_state_dict", "optim_state_dict"), parts, strict=True))

    def own_bytes(self) -> list[Tensor]:
        """This rank's part of the state, in place: the bytes of each tensor."""
        tensors = [x.detach() for x in leaves(self.state()) if isinstance(x, Tensor)]
        local = [x.to_local() if isinstance(x, DTensor) else x for x in tensors]
        return [x.view(-1).view(torch.uint8) for x in local]


def build(bench: Benchmark, folder: Path, key: Facts, group: Group) -> Measured:
    """A case is measured here: its steps differ from save to save, so no block would fit."""
    if not folder.parent.is_dir():
        raise ValueError(f"there is no {folder.parent} here; give --paths that all nodes share")
    t = Training(key, bench, group)
    t.train(lambda steps: steps < bench.rule.warmup_iters)
    try:
        return measure(t, bench, folder, group)
    except CheckpointException as error:  # is no Exception
        failed, (reason, _) = min(error.failures.items())
        raise RuntimeError(f"the checkpoint failed on rank {failed}: {reason}") from None


def measure(t: Training, bench: Benchmark, folder: Path, group: Group) -> Measured:
    """Save until the stop rule ends it; load the newest checkpoint; flip a bit and load again."""
    cpu, process, paths = torch.device("cpu"), psutil.Process(), list[Path]()

    def save(fsync: bool = True) -> Save:
        bench.turn()
        if bench.job.rank == 0 and len(paths) > 1:  # the newest stays until this one is complete
            shutil.rmtree(paths[-2])
        paths.append(folder / str(len(paths) + 1))
        return t.save(paths[-1], fsync)

    def load_once(cold: bool = False) -> Load:
        t.say(f"load {paths[-1]}")
        dist.barrier(t.control)  # nobody reads any more
        for path in paths[-1].iterdir() if cold and bench.job.local_rank == 0 else ():
            with open(path, "rb") as file:  # this host forgets it; not every file system does
                os.fsync(file)
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        for x in t.own_bytes():
            x.zero_()  # what is there afterwards was read
        dist.barrier(t.control)
        before, start = process.io_counters(), perf_counter()
        load(t, paths[-1])
        torch.get_device_module(t.device).synchronize()  # its copies to the device are in flight
        seconds, after = perf_counter() - start, process.io_counters()
        read_bytes = after.read_chars - before.read_chars
        return Load(seconds, read_bytes, after.read_bytes - before.read_bytes)

    memory = start_peak(cpu)  # the host's, also on CUDA
    first, saves, unsynced, stop = save(), list[Save](), list[Save](), ""
    started = perf_counter()
    while not stop:
        saves.append(save())
        if len(saves) % 2 == 1:
            unsynced.append(save(fsync=False))
        times, spent = [each.save for each in saves], perf_counter() - started
        stalls = [each.save - each.alone for each in saves]
        stop = agree(rule_reached(times, len(times), spent, bench.rule, [stalls]), group)
    facts: Facts = {"first": first, "saves": saves, "unsynced": unsynced, "noticed": True}
    facts["host_ram_gib"] = peak(cpu, memory)["memory_gib"]
    if t.mode == "async-process":
        facts["host_ram_gib"] += sum(p.memory_full_info().uss for p in process.children()) / 2**30
    facts["cold"], facts["warm"] = list[Load](), list[Load]()
    for _ in saves[:LOADS]:
        facts["cold"].append(load_once(cold=True))
        facts["warm"].append(load_once())
    facts["same"] = all(map(torch.equal, (x.cpu() for x in t.own_bytes()), t.saved))
    facts["shard_bytes"], facts["files"] = sum(map(len, t.saved)), len(os.listdir(paths[-1]))
    dist.barrier(t.control)  # all have read what is now changed
    if bench.job.rank == 0:  # what is in the middle of the largest file is a tensor's
        largest = max(paths[-1].iterdir(), key=lambda file: file.stat().st_size)
        with open(largest, "r+b") as file, mmap.mmap(file.fileno(), 0) as content:
            content[len(content) // 2] ^= 1
    with contextlib.suppress(Exception, CheckpointException):
        load_once()
        facts["noticed"] = False
    samples_s = {
        "step": [each.save for each in saves],
        "alone": [each.alone for each in saves],
        "blocked": [each.blocked for each in saves],
        "upload": [each.upload for each in saves],
    }
    return Measured(samples_s, [1] * len(saves), stop, facts)


def column(facts: list[Facts], what: str, name: str) -> Any:
    """One time of all saves or loads: [ranks, saves or loads]."""
    return np.array([[getattr(each, name) for each in fact[what]] for fact in facts])


def derive(every: float, case: Case, times: Times, facts: list[Facts]) -> None:
    """Fill in the metrics and the check. The slowest rank counts in each save and load."""
    shards = np.array([fact["shard_bytes"] for fact in facts])
    m = case.metrics
    m["blocked_s"] = np.median(times.slowest("blocked"))
    m["upload_s"] = np.median(times.slowest("upload"))
    m["stall_s"], m["stall_ci95_s"] = times.exposed("alone")
    first_save = max(fact["first"].save for fact in facts)
    first_alone = max(fact["first"].alone for fact in facts)
    m["first_extra_s"] = first_save - first_alone - m["stall_s"]
    m["state_bytes"] = int(shards.sum() if case.key["strategy"] == "fsdp2" else shards.max())
    m["write_gb_per_s"] = m["state_bytes"] / m["upload_s"] / 1e9
    m["fsync_factor"] = m["upload_s"] / np.median(column(facts, "unsynced", "upload").max(axis=0))
    m["cost"] = m["stall_s"] / every if m["upload_s"] < every else None
    m |= {"files": facts[0]["files"], "host_ram_gib": max(f["host_ram_gib"] for f in facts)}
    written = np.median(column(facts, "saves", "write"), axis=1)
    if written.all():
        m["slowest_rank"] = int(written.argmax())
        m["slowest_factor"] = written.max() / np.median(written)
    from_device = column(facts, "cold", "device_bytes").sum(axis=0).mean() / m["state_bytes"]
    for kind in ("cold", "warm"):
        if kind == "warm" or from_device > 0.9:  # else the host had not forgotten the files
            m[f"load_{kind}_s"] = np.median(column(facts, kind, "seconds").max(axis=0))
            m[f"load_{kind}_gb_per_s"] = m["state_bytes"] / m[f"load_{kind}_s"] / 1e9
    m["read_over_shard"] = (column(facts, "warm", "read_bytes")[:, -1] / shards).max()
    m["flipped_bit"] = "noticed" if any(f["noticed"] for f in facts) else "not noticed"
    other = [rank for rank, fact in zip(case.ranks, facts, strict=True) if not fact["same"]]
    case.check = verdict(f"rank {other[0]} loads another state than it saved" if other else None)


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
# by a shell whose stdin closes when rank 0 ends, whichever way; other ranks may still write then
REMOVE = 'exec >/dev/null 2>&1; cat; for i in 1 2 3; do rm -rf -- "$@" && exit; sleep 1; done'


def state_bytes(model: str) -> int:
    """Weights and AdamW's two moments, in fp32."""
    with torch.device("meta"):
        return 3 * 4 * sum(p.numel() for p in Decoder(DECODERS[model]).parameters())


def claim(paths: list[str] | None, needed: int) -> tuple[list[str], str | None]:
    """A new folder in each path, and what is wrong with one. needed: bytes in each."""
    folders: list[str] = []
    for path in paths or [tempfile.gettempdir()]:
        try:
            os.makedirs(path, exist_ok=True)
            if paths and os.listdir(path):
                return folders, f"--paths {path}: expected an empty or a new folder, it holds files"
            folders.append(tempfile.mkdtemp(prefix="checkpoint_sweep-", dir=os.path.abspath(path)))
        except OSError as error:
            return folders, f"--paths {path} cannot be used: {error.strerror}"
        if (free := shutil.disk_usage(path).free) < needed:
            return folders, f"--paths {path}: expected {needed:,} bytes free, got {free:,}"
    return folders, None


def serve_on_loopback() -> dist.Store:
    """A store for the process of async-process, where there is no launcher's."""
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


def main() -> int:
    args = parse_args()
    # or the processes of async-process meet in a store that listens on every interface
    os.environ.setdefault("DCP_USE_PREFIX_STORE", "1")
    gc.disable()  # a collection on one rank would stop them all
    with Benchmark("checkpoint_sweep", args) as bench:
        job, size = bench.job, state_bytes(args.model)
        if "async-process" in args.modes and "MASTER_ADDR" not in os.environ:
            _store = serve_on_loopback()  # lives until this function returns
        fixed: Facts = {"model": args.model, "batch_size": args.batch_size, "every_s": args.every}
        # the newest checkpoint stays until the next one is complete
        folders, problem = share(claim(args.paths, 2 * size) if job.rank == 0 else None)
        if job.rank == 0:
            command = ["sh", "-c", REMOVE, "sh", *folders]
            remover = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        if problem:
            bench.refuse(problem)
        columns = COLUMNS | {f"every {args.every:g} s\ncosts (%)": metric("cost", 100, 3)}
        places = zip(args.paths or ["TMPDIR"], folders, strict=True)
        for (path, folder), strategy in itertools.product(places, args.strategy):
            trained = f"{args.model}, batch size {args.batch_size}, {strategy}, AdamW"
            title = f"{trained}: {size / 1e9:.3f} GB into {path}"
            widest = ["dcp.save-4-threads", "0.000", "0.000", "0.000 to 0.000", *["0.000"] * 4]
            bench.begin_table(title, columns, widest)
            cases = []
            for mode in args.modes:
                key = {"mode": mode, "path": path, "strategy": strategy} | fixed
                work = partial(build, bench, own := Path(folder, f"{strategy}-{mode}"))
                cases.append(bench.measure(key, work, partial(derive, args.every)))
                if job.rank == 0:
                    shutil.rmtree(own, ignore_errors=True)
            if passed := [case for case in cases if case and not case.failed]:
                bench.print(f"\n{render(LOAD_COLUMNS, passed)}")
            if any("load_cold_s" not in case.metrics for case in passed):
                bench.print("# not cold: this file system keeps what it was told to drop")
    if job.rank == 0:
        remover.communicate()
    return bench.status


if __name__ == "__main__":
    sys.exit(record(main)())
