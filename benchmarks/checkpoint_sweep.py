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

All files go into new folders, which are removed at the end. docs/checkpoint_sweep.md shows how to
read the tables. BSD-3-Clause: copy the mode that you need.
"""

import contextlib
import gc
import itertools
import logging
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable
from functools import cache, partial
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
LOADS = 3  # cold ones, and as many warm ones


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


class Training:
    """A decoder under its strategy, AdamW, and a batch of each rank's own. On all ranks."""

    def __init__(self, key: Key, bench: Benchmark, group: Group) -> None:
        self.control, self.rank = group.control, bench.job.rank
        self.device = device = bench.job.device
        self.say = partial(bench.watchdog.phase, key["mode"])
        # a save has collectives, too, which must not meet those of the steps beside it
        self.saves = cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=FOREVER))
        group.more.append(self.saves)
        torch.manual_seed(0)
        with device:
            model = Decoder(DECODERS[key["model"]])
        self.model: nn.Module = model
        if key["strategy"] == "ddp":
            self.model = DistributedDataParallel(model, process_group=group.test)
        else:
            # DTensor takes meshes with the same ranks and names for one: each case has its own
            name = f"{key['mode']} into {key['path']}"
            mesh = DeviceMesh.from_group(group.test, device.type, mesh_dim_names=(name,))
            mesh._pg_registry.clear()  # DTensor's caches keep the mesh, and it the group, for ever
            for unit in (*model.blocks, model):
                fully_shard(unit, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        cuda, process = device.type == "cuda", key["mode"] == "async-process"
        texts = random_text(model.config, key["batch_size"], seed=self.rank)
        self.tokens, self.targets = (x[:, : None if cuda else 32].to(device) for x in texts)
        # the copy of an asynchronous save: pinned, shared with a process, in a thread, not blocking
        stager = partial(DefaultStager, StagingOptions(cuda, process, False, cuda))
        # kept with its buffers; torch 2.11's serve one save (Automodel#3125)
        old = torch.__version__ < "2.15"
        self.stager: Callable[[], DefaultStager] = stager if old else cache(stager)

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

    def state(self, **options: Any) -> dict[str, Any]:
        """Model and optimizer, named as `set_state_dict` has them."""
        parts = get_state_dict(self.model, self.optimizer, options=StateDictOptions(**options))
        return dict(zip(("model_state_dict", "optim_state_dict"), parts, strict=True))

    def own_bytes(self) -> list[Tensor]:
        """This rank's part of the state, in place: the bytes of each tensor."""
        tensors = [x.detach() for x in tree_leaves(self.state()) if isinstance(x, Tensor)]
        local = [x.to_local() if isinstance(x, DTensor) else x for x in tensors]
        return [x.view(-1).view(torch.uint8) for x in local]


# -- the modes: save into a new folder; a future where that goes on beside the training ------------


class Writer(dcp.FileSystemWriter):
    """Leaves beside the files how long its rank wrote them, which may be in another process."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        start = perf_counter()
        results = super().write_data(plan, planner)  # returns when all is written and synced
        Path(self.path, f"seconds.{self.rank}").write_text(str(perf_counter() - start))
        return results


def torch_save(t: Training, path: Path, fsync: bool) -> None:
    """Rank 0 gathers the whole state, and writes it into one file."""
    state = t.state(full_state_dict=True, cpu_offload=True)
    if t.rank == 0:
        path.mkdir(parents=True)
        with open(path / "state.pt", "wb") as file:
            torch.save(state, file)
            if fsync:
                file.flush()
                os.fsync(file.fileno())
    dist.barrier(t.saves)  # the others would wait in their next step


MODES: dict[str, Callable[[Training, Path, bool], Any]] = {
    "torch.save": torch_save,
    "dcp.save": lambda t, path, fsync: dcp.save(
        t.state(), storage_writer=Writer(path, sync_files=fsync), process_group=t.saves
    ),
    "dcp.save-4-threads": lambda t, path, fsync: dcp.save(
        t.state(),
        storage_writer=Writer(path, sync_files=fsync, thread_count=4),
        process_group=t.saves,
    ),
    "async-thread": lambda t, path, fsync: dcp.async_save(
        t.state(),
        storage_writer=Writer(path, sync_files=fsync),
        process_group=t.saves,
        async_stager=t.stager(),
    ),
    "async-process": lambda t, path, fsync: dcp.async_save(
        t.state(),
        storage_writer=Writer(path, sync_files=fsync),
        process_group=t.saves,
        async_stager=t.stager(),
        async_checkpointer_type=AsyncCheckpointerType.PROCESS,
    ),
}


def load(t: Training, path: Path) -> None:
    """Each rank reads its part, of torch.save's file all of it."""
    whole = (path / "state.pt").exists()
    if whole:
        state = torch.load(path / "state.pt", map_location="cpu", weights_only=True)
    else:
        state = t.state()
        dcp.load(state, checkpoint_id=path, process_group=t.saves)
    set_state_dict(t.model, t.optimizer, **state, options=StateDictOptions(full_state_dict=whole))


# -- a case ----------------------------------------------------------------------------------------


def build(key: Key, bench: Benchmark, folder: Path, group: Group) -> Workload:
    """Saves are timed here, each beside idle steps of its own, and loads after them."""
    mode, rank, paths, process = key["mode"], bench.job.rank, list[Path](), psutil.Process()
    if not folder.parent.is_dir():
        raise ValueError(f"there is no {folder.parent} here; give --paths that all nodes share")
    t = Training(key, bench, group)
    t.train(lambda steps: steps < bench.rule.warmup_iters)
    copies = [x.to("cpu", copy=True) for x in t.own_bytes()]  # of what was saved last

    def save(fsync: bool = True) -> dict[str, float]:
        """Seconds of one save on this rank."""
        if bench.turn:
            bench.turn.pass_on()
        if rank == 0 and len(paths) > 1:  # the newest one stays until this one is complete
            shutil.rmtree(paths[-2])
        paths.append(folder / str(len(paths) + 1))
        dist.barrier(group.control)
        idle = t.train(lambda steps: steps < (4 if mode.startswith("async") else 1))
        for copy, x in zip(copies, t.own_bytes(), strict=True):
            copy.copy_(x)
        steps, uploaded = list[float](), list[float]()
        t.say(f"save {paths[-1]}")
        dist.barrier(group.control)
        start = perf_counter()
        future = MODES[mode](t, paths[-1], fsync)
        blocked = perf_counter() - start
        if mode.startswith("async"):
            future.add_done_callback(lambda _: uploaded.append(perf_counter() - start))
            steps = t.train(lambda _: not uploaded)
            future.result()  # raises what went wrong
        wrote = paths[-1] / f"seconds.{rank}"
        return {
            "save": blocked + sum(steps),
            "alone": len(steps) * float(np.median(idle)),
            "blocked": blocked,
            "upload": uploaded[0] if uploaded else blocked,
            "write": float(wrote.read_text()) if wrote.exists() else 0.0,
        }

    def load_once() -> list[float]:
        """Seconds, bytes that the process read, and how many of them came from the device."""
        t.say(f"load {paths[-1]}")
        for x in t.own_bytes():
            x.zero_()  # what is there afterwards was read
        dist.barrier(group.control)
        before, start = process.io_counters(), perf_counter()
        load(t, paths[-1])
        seconds, after = perf_counter() - start, process.io_counters()
        return [seconds, after.read_chars - before.read_chars, after.read_bytes - before.read_bytes]

    def same() -> bool:
        return all(torch.equal(x.cpu(), y) for x, y in zip(t.own_bytes(), copies, strict=True))

    try:
        memory = start_peak(torch.device("cpu"))  # the host's, also on CUDA
        gc.disable()  # a collection on one rank would stop them all
        first, saves, unsynced, stop = save(), list[Key](), list[Key](), ""
        started = perf_counter()
        while not stop:
            saves.append(save())
            if len(saves) % 2:
                unsynced.append(save(fsync=False))
            times, spent = [each["save"] for each in saves], perf_counter() - started
            stop = STOPS[agree(decide(times, len(times), spent, bench.rule), group)]
        facts: Key = dict(first=first, saves=saves, unsynced=unsynced, stop=stop, cold=[], warm=[])
        facts["host_ram_gib"] = peak(torch.device("cpu"), memory)["memory_gib"]
        if mode == "async-process":
            own = sum(child.memory_full_info().uss for child in process.children())
            facts["host_ram_gib"] += own / 2**30
        for _ in range(LOADS):
            dist.barrier(group.control)  # nobody reads any more
            if bench.job.local_rank == 0:
                drop_cache(paths[-1])
            facts["cold"].append(load_once())
            facts["warm"].append(load_once())
        facts |= {"same": same(), "shard_bytes": sum(map(len, copies)), "flipped": "noticed"}
        facts["files"] = len(os.listdir(paths[-1]))
        if rank == 0:  # what is in the middle of the largest file is a tensor's
            largest = max(paths[-1].iterdir(), key=lambda file: file.stat().st_size)
            with open(largest, "r+b") as file, mmap.mmap(file.fileno(), 0) as content:
                content[len(content) // 2] ^= 1
        with contextlib.suppress(Exception, CheckpointException):
            load_once()
            facts["flipped"] = "in no tensor" if same() else "not noticed"
    except CheckpointException as error:  # is no Exception
        failed, (reason, _) = min(error.failures.items())
        raise RuntimeError(f"the checkpoint failed on rank {failed}: {reason}") from None
    finally:
        gc.enable()
    return Workload({}, facts=lambda: facts)


def drop_cache(folder: Path) -> None:
    """Have this host forget the files; not every file system does."""
    for path in folder.iterdir():
        with open(path, "rb") as file:
            os.fsync(file)
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


# -- what rank 0 makes of it -----------------------------------------------------------------------


def derive(every: float, case: Case, facts: list[Key]) -> None:
    """Fill in samples, metrics and the check. Of each save and load the slowest rank counts."""
    m, names = case.metrics, ("save", "alone", "blocked", "upload")
    case.samples_s = {n: [[save[n] for save in f["saves"]] for f in facts] for n in names}
    case.stop, case.rounds = facts[0]["stop"], [1] * len(facts[0]["saves"])
    save, alone, blocked, upload = (np.max(case.samples_s[name], axis=0) for name in names)
    m |= {"blocked_s": float(np.median(blocked)), "upload_s": float(np.median(upload))}
    m["stall_s"], m["stall_ci95_s"] = difference(save, alone, case.rounds)
    first = {name: max(fact["first"][name] for fact in facts) for name in names}
    m["first_extra_s"] = first["save"] - first["alone"] - m["stall_s"]
    shards = np.array([fact["shard_bytes"] for fact in facts])
    m["state_bytes"] = int(shards.sum() if case.key["strategy"] == "fsdp2" else shards.max())
    m["write_gb_per_s"] = m["state_bytes"] / m["upload_s"] / 1e9
    unsynced = np.max([[save["upload"] for save in fact["unsynced"]] for fact in facts], axis=0)
    m["fsync_factor"] = m["upload_s"] / float(np.median(unsynced))
    m["cost"] = m["stall_s"] / every if m["upload_s"] < every else None
    m |= {"files": facts[0]["files"], "host_ram_gib": max(f["host_ram_gib"] for f in facts)}
    written = [float(np.median([save["write"] for save in f["saves"]])) for f in facts]
    if min(written) > 0:
        m["slowest_rank"] = int(np.argmax(written))
        m["slowest_factor"] = max(written) / float(np.median(written))
    cold, warm = (np.array([fact[name] for fact in facts]) for name in ("cold", "warm"))
    loads = {"load_cold": cold, "load_warm": warm}  # [ranks, loads, 3]
    if cold[:, :, 2].sum() < 0.9 * LOADS * m["state_bytes"]:  # they did not come from the device
        del loads["load_cold"]
    for name, rows in loads.items():
        m[f"{name}_s"] = float(np.median(rows[:, :, 0].max(axis=0)))
        m[f"{name}_gb_per_s"] = m["state_bytes"] / m[f"{name}_s"] / 1e9
    m["read_over_shard"] = float((warm[:, -1, 1] / shards).max())
    words, said = ("noticed", "not noticed", "in no tensor"), {f["flipped"] for f in facts}
    m["flipped_bit"] = next(word for word in words if word in said)
    other = [rank for rank, fact in zip(case.ranks, facts, strict=True) if not fact["same"]]
    case.check = verdict(f"rank {other[0]} loads another state than it saved" if other else None)


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


# -- the sweep, in folders of its own --------------------------------------------------------------

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


def main() -> int:
    args = parse_args()
    # or the processes of async-process meet in a store that listens on every interface
    os.environ.setdefault("DCP_USE_PREFIX_STORE", "1")
    with Benchmark("checkpoint_sweep", args) as bench:
        job, size = bench.job, state_bytes(args.model)
        fixed = {"model": args.model, "batch_size": args.batch_size, "every_s": args.every}
        fixed |= {"world_size": job.world_size}
        fixed |= {"device": job.device.type, "backend": job.backend}
        # the newest checkpoint stays until the next one is complete
        folders, problem = bench.share(claim(args.paths, 2 * size) if job.rank == 0 else None)
        if job.rank == 0:
            command = ["sh", "-c", REMOVE, "sh", *folders]
            remover = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        if problem:
            bench.refuse(problem)
        places = zip(args.paths or ["TMPDIR"], folders, strict=True)
        for (path, folder), strategy in itertools.product(places, args.strategy):
            title = f"{args.model}, {strategy}, AdamW: {size / 1e9:.3f} GB into {path}"
            bench.begin_table(title, columns(args.every), ["dcp.save-4-threads", *["0.000"] * 7])
            cases = []
            for mode in args.modes:
                key = {"mode": mode, "path": path, "strategy": strategy} | fixed
                own = Path(folder, f"{strategy}-{mode}")
                work = partial(build, key, bench, own)
                case = bench.measure(key, work, partial(derive, args.every))
                if job.rank == 0:
                    shutil.rmtree(own, ignore_errors=True)
                if case and not case.failed:
                    cases.append(case)
            if cases:
                bench.print(f"\n{render(LOAD_COLUMNS, cases)}")
            if any("load_cold_s" not in case.metrics for case in cases):
                bench.print("# not cold: this file system keeps what it was told to drop")
    if job.rank == 0:
        remover.communicate()
    return bench.status


if __name__ == "__main__":
    sys.exit(record(main)())
