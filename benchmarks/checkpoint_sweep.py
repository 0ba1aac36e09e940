#!/usr/bin/env python3
"""What does a checkpoint cost the training, by each way to save it and on each storage?

Trains a decoder under FSDP2 or DDP with AdamW, saves it again and again, and goes on training
beside an asynchronous save. Logs show `blocked`; the steps beside the upload are slower as well.

    blocked       seconds until the call returns, making the state dict included
    upload        seconds from the call until all of it is on disk, with fsync
    stall         save - alone. save: seconds from the call to the end of the step in which the
                  upload ends; alone: what so many steps take when nothing is saved
    first         stall of the first save - stall: a process to start, buffers to pin
    GB/s, fsync   bytes of the state / upload; upload / upload without fsync
    cost          stall / --every: what the training loses with a checkpoint every S seconds
    read / shard  bytes that a rank reads to load / bytes of its part of the state

    torchrun --nproc-per-node 2 benchmarks/checkpoint_sweep.py
    torchrun --nproc-per-node 2 benchmarks/checkpoint_sweep.py --modes all --strategy fsdp2,ddp
    torchrun --nproc-per-node 8 benchmarks/checkpoint_sweep.py --model decoder-1.3b \\
        --paths /scratch/x,/nfs/x --every 600 --json report.jsonl

An iteration (--iters) is a save. Files are written into new folders alone, which are removed at the
end. docs/checkpoint_sweep.md shows how to read the tables. BSD-3-Clause: copy the mode you need.
"""

import argparse
import dataclasses
import gc
import hashlib
import itertools
import logging
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, cast

import numpy as np
import psutil
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

if __name__ == "__mp_main__":  # the process of async-process: torch tells of each save there
    logging.disable(logging.WARNING)
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.benchmark import Benchmark, Workload
from common.check import verdict
from common.cli import Parser, add_common_flags, list_of, positive_float, positive_int
from common.decoder import DECODERS, Decoder, next_token_loss, random_text
from common.dist import FOREVER, Group
from common.memory import peak, start_peak
from common.report import Case
from common.stats import difference
from common.table import Columns, half_width, metric, render
from common.timing import STOPS, agree, decide

Key = dict[str, Any]
IDLE_STEPS = 4  # before an asynchronous save: what a step takes when nothing is saved
LOADS = 3  # cold ones, and as many warm ones
# Removes the folders once its stdin closes: when rank 0 ends, whichever way
KEEPER = 'exec >/dev/null 2>&1; cat; for i in 1 2 3; do rm -rf -- "$@" && exit; sleep 1; done'


def create(key: Key) -> Decoder:
    torch.manual_seed(0)
    config = DECODERS[key["model"]]
    return Decoder(dataclasses.replace(config, context=key["sequence_length"]))


class Training:
    """A model under its strategy, AdamW, and a batch of each rank's own. On all ranks."""

    def __init__(self, key: Key, bench: Benchmark, group: Group) -> None:
        self.group, self.device, self.rank = group, bench.job.device, bench.job.rank
        self.say = partial(bench.watchdog.phase, key["mode"])
        self.uploads = cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=FOREVER))
        group.more.append(self.uploads)
        with torch.device(self.device):
            model = create(key)
        self.model: nn.Module = model
        if key["strategy"] == "fsdp2":
            # DTensor takes meshes with the same ranks and names for one: each case has its own
            name = f"{key['mode']} into {key['path']}"
            mesh = DeviceMesh.from_group(group.test, self.device.type, mesh_dim_names=(name,))
            mesh._pg_registry.clear()  # DTensor's caches keep the mesh, and it the group, for ever
            for unit in (*model.blocks, model):
                fully_shard(unit, mesh=mesh)
        else:
            self.model = DistributedDataParallel(model, process_group=group.test)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        texts = random_text(model.config, key["batch_size"], seed=self.rank)
        self.tokens, self.targets = (x.to(self.device) for x in texts)
        # for asynchronous saves: pinned, shared with a process, copied by a thread, not blocking
        cuda, process = self.device.type == "cuda", key["mode"] == "async-process"
        self.staging = StagingOptions(cuda, process, False, cuda)
        self.kept_stager = DefaultStager(self.staging)

    def stager(self) -> DefaultStager:
        """The one of the case, with its buffers; torch 2.11's serve one save (Automodel#3125)."""
        old = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 15)
        return DefaultStager(self.staging) if old else self.kept_stager

    def train(self, more: Callable[[int], bool]) -> list[float]:
        """Seconds of each step; goes on while any rank wants `more` after so many of them."""
        times: list[float] = []
        go = torch.ones(1)
        while go:
            self.say(f"step {len(times) + 1}")
            start = perf_counter()
            self.optimizer.zero_grad()
            next_token_loss(self.model(self.tokens), self.targets).backward()
            self.optimizer.step()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            go.fill_(more(len(times) + 1))
            dist.all_reduce(go, op=dist.ReduceOp.MAX, group=self.group.control)
            times.append(perf_counter() - start)
        return times

    def state(self, **options: Any) -> dict[str, Any]:
        """Model and optimizer, named as `set_state_dict` has them."""
        parts = get_state_dict(self.model, self.optimizer, options=StateDictOptions(**options))
        return dict(zip(("model_state_dict", "optim_state_dict"), parts, strict=True))

    def tensors(self) -> list[Tensor]:
        """This rank's part of the state, in place."""
        leaves = [x.detach() for x in tree_leaves(self.state()) if isinstance(x, Tensor)]
        return [x.to_local() if isinstance(x, DTensor) else x for x in leaves]

    def digest(self) -> str:
        """A hash of this rank's part of the state, bit by bit."""
        hasher = hashlib.blake2b()
        for x in self.tensors():
            hasher.update(x.cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        return hasher.hexdigest()


# -- the modes: save into a new folder; a future where that goes on beside the training ------------


class Writer(dcp.FileSystemWriter):
    """Leaves beside the files how long its rank wrote them, which may be in another process."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        start = perf_counter()
        results = super().write_data(plan, planner)  # returns when all is written and synced
        Path(self.path, f"seconds.{self.rank}").write_text(str(perf_counter() - start))
        return results


def save_whole(t: Training, path: str, fsync: bool) -> None:
    """Rank 0 gathers the whole state, and writes it into one file."""
    state = t.state(full_state_dict=True, cpu_offload=True)
    if t.rank == 0:
        os.mkdir(path)
        with open(f"{path}/state.pt", "wb") as file:
            torch.save(state, file)
            if fsync:
                file.flush()
                os.fsync(file.fileno())
    dist.barrier(t.uploads)  # the others would wait in their next step


def save_shards(t: Training, path: str, fsync: bool, threads: int = 1) -> None:
    """Each rank writes its part, into as many files as threads."""
    writer = Writer(path, thread_count=threads, sync_files=fsync)
    dcp.save(t.state(), storage_writer=writer, process_group=t.uploads)


def save_beside(t: Training, path: str, fsync: bool, kind: AsyncCheckpointerType) -> Future[Any]:
    """Each rank copies its part, and a thread or a process of it writes the copy."""
    response: Any = dcp.async_save(
        t.state(),
        storage_writer=Writer(path, sync_files=fsync),
        async_stager=t.stager(),
        async_checkpointer_type=kind,
        process_group=t.uploads,  # its collectives must not meet those of the steps
    )
    return getattr(response, "upload_completion", response)


MODES: dict[str, Callable[[Training, str, bool], Future[Any] | None]] = {
    "torch.save": save_whole,
    "dcp.save": save_shards,
    "dcp.save-4-threads": partial(save_shards, threads=4),
    "async-thread": partial(save_beside, kind=AsyncCheckpointerType.THREAD),
    "async-process": partial(save_beside, kind=AsyncCheckpointerType.PROCESS),
}
DEFAULT_MODES = ["torch.save", "dcp.save", "async-thread"]


def load_whole(t: Training, path: str) -> None:
    """Each rank reads the whole file."""
    state = torch.load(f"{path}/state.pt", map_location="cpu", weights_only=True)
    options = StateDictOptions(full_state_dict=True)
    set_state_dict(t.model, t.optimizer, **state, options=options)


def load_shards(t: Training, path: str) -> None:
    """Each rank reads its part."""
    state = t.state()
    dcp.load(state, checkpoint_id=path, process_group=t.uploads)
    set_state_dict(t.model, t.optimizer, **state)


# -- a case ----------------------------------------------------------------------------------------


def build(
    key: Key, args: argparse.Namespace, bench: Benchmark, folder: str, group: Group
) -> Workload:
    """Saves are timed here, each beside idle steps of its own, and loads after them."""
    mode, host = key["mode"], torch.device("cpu")
    t = Training(key, bench, group)
    if t.rank == 0:
        os.mkdir(folder)
    t.train(lambda steps: steps < args.warmup_iters)
    if problem := lacks(key, bench, folder):
        raise ValueError(problem)
    kept: list[str] = []  # the newest checkpoint, and the one before until this one is complete
    numbers = itertools.count(1)
    idle_steps = IDLE_STEPS if mode.startswith("async") else 1

    def save(fsync: bool = True, check: bool = False) -> dict[str, Any]:
        """Seconds of one save on this rank."""
        if bench.turn:
            bench.turn.pass_on()
        if t.rank == 0 and len(kept) > 1:
            shutil.rmtree(kept.pop(0))
        dist.barrier(group.control)
        idle = float(np.median(t.train(lambda steps: steps < idle_steps)))
        digest = t.digest() if check else ""
        path = f"{folder}/{next(numbers)}"
        t.say(f"save {path}")
        steps, uploaded = list[float](), list[float]()
        dist.barrier(group.control)
        start = perf_counter()
        future = MODES[mode](t, path, fsync)
        blocked = perf_counter() - start
        if future is not None:
            future.add_done_callback(lambda _: uploaded.append(perf_counter() - start))
            steps = t.train(lambda _: not uploaded)
            future.result()  # raises what went wrong
        kept.append(path)
        seconds = Path(path, f"seconds.{t.rank}")
        return {
            "save": blocked + sum(steps),
            "alone": idle * len(steps),
            "blocked": blocked,
            "upload": uploaded[0] if uploaded else blocked,
            "write": float(seconds.read_text()) if seconds.exists() else 0.0,
            "idle": idle,
            "digest": digest,
        }

    memory = start_peak(host)  # the host's, also on CUDA
    gc.disable()  # a collection on one rank would stop them all
    try:
        first, saves, unsynced, stop = save(), list[Key](), list[Key](), ""
        started = perf_counter()
        while not stop:
            saves.append(save())
            if len(saves) % 2:
                unsynced.append(save(fsync=False))
            times, spent = [each["save"] for each in saves], perf_counter() - started
            stop = STOPS[agree(decide(times, len(times), spent, bench.rule), group)]
        ram = peak(host, memory)["memory_gib"]
        if mode == "async-process":
            ram += sum(p.memory_full_info().uss for p in psutil.Process().children()) / 2**30
        facts = dict(first=first, saves=saves, unsynced=unsynced, stop=stop, host_ram_gib=ram)
        want = save(check=True)["digest"]
        facts |= load(t, mode, kept[-1], want, bench.job.local_rank == 0)
    except CheckpointException as error:  # is no Exception
        if failure := error.failures.get(t.rank):
            raise failure[0] from None
        dist.barrier(group.control)  # ends once the rank that failed has said why, and left
        raise RuntimeError("the checkpoint of another rank failed") from None
    finally:
        gc.enable()
    return Workload({}, facts=lambda: facts)


def lacks(key: Key, bench: Benchmark, folder: str) -> str | None:
    """What a rank cannot do here; some of it would kill the process."""
    if not os.path.isdir(folder):
        return f"there is no {folder} here; give --paths that all nodes share"
    if key["mode"] != "async-process":
        return None
    if "MASTER_ADDR" not in os.environ:
        return "async-process meets in the launcher's store; start it with torchrun"
    ranks, copies = bench.job.local_world_size, 1 if key["strategy"] == "ddp" else key["world_size"]
    needed, free = state_bytes(key) * ranks // copies, shutil.disk_usage("/dev/shm").free
    return f"needs {needed:,} bytes in /dev/shm, {free:,} are free" if free < needed else None


def load(t: Training, mode: str, path: str, want: str, first_here: bool) -> dict[str, Any]:
    """Time loads, cold and warm: is it what was saved, and is a flipped bit noticed?"""
    process, cold, warm, dropped, read = psutil.Process(), list[float](), list[float](), True, 0

    def once() -> float:
        t.say(f"load {path}")
        for x in t.tensors():
            x.zero_()  # what is there afterwards was read
        dist.barrier(t.group.control)
        start = perf_counter()
        (load_whole if mode == "torch.save" else load_shards)(t, path)
        return perf_counter() - start

    for _ in range(LOADS):
        dist.barrier(t.group.control)  # nobody reads any more
        dropped &= drop_cache(path) if first_here else True
        cold.append(once())
        before = process.io_counters().read_chars
        warm.append(once())
        read = process.io_counters().read_chars - before
    same, flipped = t.digest() == want, "not noticed"
    shard, largest = sum(x.nbytes for x in t.tensors()), max(t.tensors(), key=lambda x: x.nbytes)
    beginning = largest.flatten()[:16].cpu().numpy().tobytes()
    if t.rank == 0:
        flip_bit(path, beginning)
    try:
        once()
        flipped = "not noticed" if t.digest() != want else "not read"
    except (Exception, CheckpointException):
        flipped = "noticed"
    if t.rank == 0:
        flip_bit(path, beginning)  # as it was
    facts = dict(cold_s=cold, warm_s=warm, dropped=dropped, read_bytes=read, shard_bytes=shard)
    return facts | {"same": same, "flipped": flipped, "files": len(os.listdir(path))}


def flip_bit(folder: str, beginning: bytes) -> None:
    """Flip a bit of the tensor in the folder's files that begins so."""
    for path in Path(folder).iterdir():
        with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as content:
            if (at := content.find(beginning)) >= 0:
                content[at + len(beginning)] ^= 1
                return


def drop_cache(folder: str) -> bool:
    """Drop the files from this host's memory; False where the file system keeps them there."""

    def dropped(path: Path) -> bool:
        with open(path, "rb") as file:
            os.fsync(file)
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            try:  # does a read that must not wait for the device find the byte in the middle?
                middle = os.fstat(file.fileno()).st_size // 2
                os.preadv(file.fileno(), [bytearray(1)], middle, os.RWF_NOWAIT)
            except BlockingIOError:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # what it read ahead
                return True
            except OSError:  # this file system cannot say
                return False
            return False

    # pages that another core has just used stay the first time
    return all(any(dropped(path) for _ in range(5)) for path in Path(folder).iterdir())


# -- what rank 0 makes of it -----------------------------------------------------------------------


def derive(every: float, case: Case, facts: list[dict[str, Any]]) -> None:
    """Fill in samples, metrics and the check. Of each save and load the slowest rank counts."""
    m, names = case.metrics, ("save", "alone", "blocked", "upload")
    case.samples_s = {n: [[save[n] for save in fact["saves"]] for fact in facts] for n in names}
    case.stop, case.rounds = facts[0]["stop"], [1] * len(facts[0]["saves"])
    slowest = {name: np.max(rows, axis=0) for name, rows in case.samples_s.items()}
    m |= {f"{name}_s": float(np.median(slowest[name])) for name in ("blocked", "upload")}
    m["stall_s"], m["stall_ci95_s"] = difference(slowest["save"], slowest["alone"], case.rounds)
    first = {name: max(fact["first"][name] for fact in facts) for name in names}
    m["first_extra_s"] = first["save"] - first["alone"] - m["stall_s"]
    m["idle_step_s"] = float(np.median([save["idle"] for save in facts[0]["saves"]]))
    shards = [fact["shard_bytes"] for fact in facts]
    m["state_bytes"] = sum(shards) if case.key["strategy"] == "fsdp2" else max(shards)
    m["write_gb_per_s"] = m["state_bytes"] / m["upload_s"] / 1e9
    unsynced = np.max([[save["upload"] for save in fact["unsynced"]] for fact in facts], axis=0)
    m["fsync_factor"] = m["upload_s"] / float(np.median(unsynced))
    m["cost"] = m["stall_s"] / every if m["upload_s"] < every else None
    m |= {"files": facts[0]["files"], "host_ram_gib": max(f["host_ram_gib"] for f in facts)}
    written = [float(np.median([save["write"] for save in fact["saves"]])) for fact in facts]
    if min(written) > 0:
        m["slowest_rank"] = int(np.argmax(written))
        m["slowest_factor"] = max(written) / float(np.median(written))
    for kind in ("cold", "warm") if all(fact["dropped"] for fact in facts) else ("warm",):
        m[f"load_{kind}_s"] = float(np.median(np.max([f[f"{kind}_s"] for f in facts], axis=0)))
        m[f"load_{kind}_gb_per_s"] = m["state_bytes"] / m[f"load_{kind}_s"] / 1e9
    m["read_over_shard"] = max(f["read_bytes"] / f["shard_bytes"] for f in facts)
    said = {fact["flipped"] for fact in facts}
    m["flipped_bit"] = "noticed" if "noticed" in said else "not noticed"
    other = [rank for rank, fact in zip(case.ranks, facts, strict=True) if not fact["same"]]
    problem = f"rank {other[0]} loads another state than it saved" if other else None
    unread = "a flipped bit of a file is in no rank's state" if said == {"not read"} else None
    case.check = verdict(problem or unread)


def slowest_rank(case: Case) -> str:
    rank = case.metrics.get("slowest_rank")
    return "-" if rank is None else f"{rank}: {case.metrics['slowest_factor']:.2f}x"


def columns(every: float) -> Columns:
    return {
        "mode": lambda case: case.key["mode"],
        "blocked\n(s)": metric("blocked_s", digits=3),
        "stall\n(s)": metric("stall_s", digits=3),
        "95% ci\n+-(s)": half_width("stall_ci95_s", digits=3),
        "upload\n(s)": metric("upload_s", digits=3),
        "write\nGB/s": metric("write_gb_per_s"),
        "fsync\n(x)": metric("fsync_factor"),
        "first save\nextra (s)": metric("first_extra_s", digits=3),
        "slowest\nrank": slowest_rank,
        "host RAM\n(GiB)": metric("host_ram_gib"),
        f"every {every:g} s\ncosts (%)": metric("cost", 100, 3),
    }


LOAD_COLUMNS: Columns = {
    "load": lambda case: case.key["mode"],
    "cold\nGB/s": metric("load_cold_gb_per_s"),
    "warm\nGB/s": metric("load_warm_gb_per_s"),
    "read /\nshard": metric("read_over_shard"),
    "a flipped bit is": lambda case: case.metrics["flipped_bit"],
}


# -- the sweep -------------------------------------------------------------------------------------


def state_bytes(key: Key) -> int:
    """Weights and AdamW's two moments, in fp32."""
    with torch.device("meta"):
        return 3 * 4 * sum(p.numel() for p in create(key).parameters())


def claim(path: str | None, needed: int) -> str:
    """A folder of our own: `path`, or a new one in it where it is there and empty.

    needed: bytes. Raises OSError and ValueError.
    """
    if path is not None and not os.path.exists(path):
        os.makedirs(path)
    elif path is not None and os.listdir(path):
        raise ValueError("expected an empty or a new folder, it holds other files")
    else:
        path = tempfile.mkdtemp(prefix="checkpoint_sweep-", dir=path)
    if (free := shutil.disk_usage(path).free) < needed:
        os.rmdir(path)
        raise ValueError(f"expected {needed:,} bytes free, got {free:,}; try a smaller --model")
    return os.path.abspath(path)


def claim_all(args: argparse.Namespace, size: int) -> tuple[list[str], str | None]:
    """The folder of each path, and what is wrong with one. size: of a checkpoint, in bytes."""
    folders, count = list[str](), 1 + (len(args.modes) * len(args.strategy) if args.keep else 1)
    for path in args.paths or [None]:
        try:
            folders.append(claim(path, count * size))
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            return folders, f"--paths {path or tempfile.gettempdir()} cannot be used: {reason}"
    return folders, None


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument
    modes = f"a list of {', '.join(MODES)}, or all (default: {','.join(DEFAULT_MODES)})"
    add("--modes", type=list_of(str, tuple(MODES)), default=DEFAULT_MODES, metavar="M", help=modes)
    strategies = "fsdp2, ddp or both (default: fsdp2)"
    add("--strategy", type=list_of(str, ("fsdp2", "ddp")), default=["fsdp2"], help=strategies)
    paths = "new or empty folders, one after the other (default: a new one in TMPDIR)"
    add("--paths", "--path", type=list_of(str), metavar="PATH", help=paths)
    every = "for `costs`: seconds from one checkpoint to the next (default: 600)"
    add("--every", type=positive_float, default=600.0, metavar="S", help=every)
    add("--keep", action="store_true", help="leave the folders, with each case's last checkpoint")
    models = f"{', '.join(DECODERS)} (default: decoder-124m, CPU decoder-10m)"
    add("--model", choices=list(DECODERS), metavar="NAME", help=models)
    batch = "sequences of a rank in a step (default: 8, CPU 1)"
    add("--batch-size", type=positive_int, metavar="N", help=batch)
    tokens = "tokens (default: the model's, CPU 32)"
    add("--sequence-length", type=positive_int, metavar="N", help=tokens)
    add_common_flags(parser, min_iters=6)
    args = parser.parse_args(argv)
    cuda = torch.cuda.is_available() and args.device != "cpu"
    args.model = args.model or ("decoder-124m" if cuda else "decoder-10m")
    args.batch_size = args.batch_size or (8 if cuda else 1)
    args.sequence_length = args.sequence_length or (DECODERS[args.model].context if cuda else 32)
    return args


def main() -> int:
    args = parse_args()
    if "MASTER_ADDR" in os.environ:
        # the processes of async-process meet in the launcher's store; otherwise that of rank 0
        # opens one of its own, which listens on every interface
        os.environ.setdefault("DCP_USE_PREFIX_STORE", "1")
    keeper = None
    with Benchmark("checkpoint_sweep", args) as bench:
        job = bench.job
        fixed = {name: getattr(args, name) for name in ("model", "batch_size", "sequence_length")}
        fixed |= {"every_s": args.every, "world_size": job.world_size}
        fixed |= {"device": job.device.type, "backend": job.backend}
        size = state_bytes(fixed)
        folders, problem = bench.share(claim_all(args, size) if job.rank == 0 else None)
        if job.rank == 0 and not args.keep:
            keeper = subprocess.Popen(
                ["sh", "-c", KEEPER, "sh", *folders], stdin=subprocess.PIPE, start_new_session=True
            )
        if problem:
            bench.refuse(problem)
        places = zip(args.paths or ["TMPDIR"], folders, strict=True)
        for (path, folder), strategy in itertools.product(places, args.strategy):
            title = f"{args.model}, {strategy}, AdamW: {size / 1e9:.3f} GB into {path}"
            bench.begin_table(title, columns(args.every), ["dcp.save-4-threads", *["0.000"] * 7])
            cases = []
            for mode in args.modes:
                key = {"mode": mode, "path": path, "strategy": strategy} | fixed
                own = f"{folder}/{strategy}-{mode}"
                task = partial(build, key, args, bench, own)
                case = bench.measure(key, task, partial(derive, args.every))
                if job.rank == 0 and not args.keep:
                    shutil.rmtree(own, ignore_errors=True)
                cases += [case] if case and not case.failed else []
            if cases:
                bench.print(f"\n{render(LOAD_COLUMNS, cases)}")
                if any("load_cold_s" not in case.metrics for case in cases):
                    bench.print("# not cold: this file system keeps what it was told to drop")
    if keeper:
        keeper.communicate()
    return bench.status


if __name__ == "__main__":
    sys.exit(record(main)())
