#!/usr/bin/env python3
"""Does the loader feed the training, or does the training wait for its batches?

It trains a model under DDP, in alternating blocks: with batches from a DataLoader, and with one
batch that stays on the device. A third block takes batches from the loader and does not train.

    step            a training step with the next batch from the loader
    resident        the same step with the resident batch. The workers rest meanwhile
    exposed wait  = step - resident: waiting for batches, and what workers take from the training
    loader          taking the next batch, without training
    loader brings   ranks * batch size / loader, in samples/s
    training takes  ranks * batch size / resident, in samples/s
    workers needed  workers * loader / resident, rounded up, if each one has a core

Workers fetch ahead. So before a resident block everything that they have fetched is thrown away,
and they get no more work: a block with the loader begins with an empty queue.

    torchrun --nproc-per-node 2 benchmarks/input_sweep.py
    torchrun --nproc-per-node 8 benchmarks/input_sweep.py --data /scratch/imagenet/train \\
        --workers 2,4,8,16 --json report.jsonl
    torchrun --nproc-per-node 2 benchmarks/input_sweep.py --kind tokens --data train.bin

Without --data it makes files in TMPDIR, and removes them at the end. docs/input_sweep.md says how
to read the table. BSD-3-Clause.
"""

import argparse
import io
import itertools
import math
import os
import secrets
import shutil
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing import get_all_start_methods, set_forkserver_preload
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import PIL.Image
import torch
import torch.distributed as dist
import torchvision
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, default_collate
from torchvision.transforms import v2

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import cli
from common.answers import Estimate, ranked, series
from common.check import compare_replicas, digest, verdict
from common.groups import Group, Job, gather, share
from common.memory import GIB
from common.old import Benchmark, Key, Workload
from common.report import Case
from common.stats import Interval, Times, median_interval, step_metrics, straggler
from common.table import Columns, interval_ends, metric
from common.workloads.decoder import DECODERS, Decoder, next_token_loss
from common.workloads.folders import remove_at_end
from common.workloads.room import free_on_host

Batch = tuple[Tensor, Tensor]  # inputs and targets, on the device
# What a dataset reads: the path and the class of each image, or the path of the file of tokens.
Source = list[tuple[str, int]] | str

CLASSES = 10  # of the images that are made
NOT_CHECKED = -1  # in place of a checksum
EPOCH_REST = 2000  # samples that a rank loads at most after the timing, to complete an epoch
WORKER_BYTES = 64 * 2**20  # that a worker has for itself at least (docs/input_sweep.md)
SMALL_WAIT = 0.05  # of a resident step: a shorter wait is not worth a change
PIXELS_MEAN, PIXELS_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet
LISTS = ("workers", "cache", "prefetch", "pin_memory", "persistent_workers", "start_method")
COUNTED_BYTES = 0.9  # a case is cold if so much of what workers read came from the device


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = cli.Parser(__doc__)
    add, list_of, positive_int = parser.add_argument, cli.list_of, cli.positive_int
    add("--kind", choices=("images", "tokens"), default="images", help="(default: images)")
    data = "folder of class folders with images; for tokens a file of uint16 (default: made anew)"
    add("--data", metavar="PATH", help=data)
    made = "files, or sequences of tokens, that are made (default: 256)"
    add("--samples", type=positive_int, default=256, metavar="N", help=made)
    add("--file-size", type=positive_int, default=400, metavar="PX", help="of them (default: 400)")
    add("--seed", type=cli.number(int), default=0, metavar="N", help="of data and order (0)")
    workers = "worker processes of a rank; 0 loads in the rank itself (default: 2)"
    add("--workers", type=list_of(cli.number(int)), default=[2], metavar="N", help=workers)
    cache = "warm, cold or both: files from the page cache, or from the device (default: both)"
    caches = list_of(str, ("warm", "cold"))
    add("--cache", type=caches, default=["warm", "cold"], metavar="C", help=cache)
    ahead = "batches that a worker may fetch ahead (default: 2)"
    add("--prefetch", type=list_of(positive_int), default=[2], metavar="N", help=ahead)
    on_off, methods = list_of(str, ("on", "off")), tuple(get_all_start_methods())
    add("--pin-memory", type=on_off, metavar="on|off", help="(default: on with CUDA)")
    keep = "on: workers live for all epochs; off: each epoch starts new ones (default: on)"
    add("--persistent-workers", type=on_off, default=["on"], metavar="on|off", help=keep)
    how = f"of workers: {', '.join(methods)} (default: forkserver)"
    start_methods = list_of(str, methods)
    add("--start-method", type=start_methods, default=["forkserver"], metavar="M", help=how)
    where = "where JPEG files are decoded (default: cpu)"
    add("--decode", choices=("cpu", "cuda"), default="cpu", help=where)
    model = "(default: resnet50, CPU mobilenet_v3_small; tokens: decoder-124m, CPU decoder-nano)"
    add("--model", metavar="NAME", help=model)
    batch = "samples of a rank in a step (default: 32, CPU 8)"
    add("--batch-size", type=positive_int, metavar="N", help=batch)
    add("--image-size", type=positive_int, metavar="PX", help="after a crop (default: 224, CPU 64)")
    cli.add_common_flags(parser, max_seconds=10)
    args = parser.parse_args(argv)
    cuda = torch.cuda.is_available() and args.device != "cpu"
    if args.kind == "images":
        args.model = args.model or ("resnet50" if cuda else "mobilenet_v3_small")
    else:
        args.model = args.model or ("decoder-124m" if cuda else "decoder-nano")
    args.batch_size = args.batch_size or (32 if cuda else 8)
    args.image_size = args.image_size or (224 if cuda else 64)
    args.pin_memory = args.pin_memory or ["on" if cuda else "off"]
    if not cuda and ("on" in args.pin_memory or args.decode == "cuda"):
        parser.error("--pin-memory on and --decode cuda need a GPU; try off and cpu")
    images = torchvision.models.list_models(module=torchvision.models)
    known = images if args.kind == "images" else list(DECODERS)
    if args.model not in known:
        hint = cli.suggest(args.model, known) or f"; e.g. {known[0]}"
        parser.error(f"--model: unknown model '{args.model}' for {args.kind}{hint}")
    return args


# -- the data: what runs in the workers ------------------------------------------------------------


class Samples(Dataset[Any]):
    """A sample is its input, its target and a ticket. `content` is in the classes below."""

    checked = False  # whether this process has made a checksum

    def __len__(self) -> int:
        raise NotImplementedError

    def content(self, index: int) -> Tensor:
        """The decoded pixels or tokens of a sample, before augmentation."""
        raise NotImplementedError

    def ticket(self, index: int, content: Tensor, size: int) -> Tensor:
        """Which sample this is, who made it, a checksum of its first one, and the bytes read."""
        checksum = NOT_CHECKED if self.checked else checksum_of(content)
        self.checked = True
        return torch.tensor([index, os.getpid(), checksum, size])


class Images(Samples):
    """JPEG or other images, decoded and augmented as for training on ImageNet."""

    def __init__(self, files: list[tuple[str, int]], key: Key) -> None:
        self.files = files
        self.cold = key["cache"] == "cold"
        self.encoded = key["decode"] == "cuda"  # the rank decodes, not the worker
        self.augment = augmentation(key["image_size"])

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int, Tensor]:
        path, target = self.files[index]
        content = self.content(index)
        ticket = self.ticket(index, content, os.path.getsize(path))
        return content if self.encoded else self.augment(content), target, ticket

    def content(self, index: int) -> Tensor:
        path, _ = self.files[index]
        with open(path, "rb") as file:
            if self.cold:
                forget(file)
            if self.encoded:
                return torch.frombuffer(bytearray(file.read()), dtype=torch.uint8)
            try:
                image = PIL.Image.open(file).convert("RGB")
            except OSError as error:
                raise ValueError(f"{path} is no image: {type(error).__name__}") from None
        return v2.functional.pil_to_tensor(image)


class Tokens(Samples):
    """Sequences from a memory-mapped file of uint16, as nanoGPT writes it."""

    def __init__(self, path: str, key: Key) -> None:
        config = DECODERS[key["model"]]
        self.path, self.cold = path, key["cache"] == "cold"
        self.length, self.vocab = config.context, config.vocab

    def __len__(self) -> int:
        return (os.path.getsize(self.path) // 2 - 1) // self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        content = self.content(index)
        tokens = content % self.vocab  # a file of a larger vocabulary can be read, too
        return tokens[:-1], tokens[1:], self.ticket(index, content, 2 * len(content))

    def content(self, index: int) -> Tensor:
        start = index * self.length
        with open(self.path, "rb") as file:
            if self.cold:
                forget(file)
            tokens = np.memmap(file, dtype=np.uint16, mode="r")
            sample = tokens[start : start + self.length + 1]
            return torch.from_numpy(sample.astype(np.int64))


def augmentation(pixels: int) -> nn.Module:
    """ImageNet's, as torchvision's references train with it: [3, H, W] -> [3, pixels, pixels]."""
    return v2.Compose(
        [
            v2.RandomResizedCrop(pixels, antialias=True),
            v2.RandomHorizontalFlip(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(PIXELS_MEAN, PIXELS_STD),
        ]
    )


def forget(file: Any) -> None:
    """Drop a file from the page cache. Not every file system does as it is told."""
    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def checksum_of(content: Tensor) -> int:
    return zlib.crc32(content.numpy().tobytes())


def keep_encoded(samples: list[Any]) -> tuple[list[Tensor], Tensor, Tensor]:
    """A batch of files that the rank decodes: they differ in length, so they stay a list."""
    files, targets, tickets = zip(*samples, strict=True)
    return list(files), torch.tensor(targets), torch.stack(tickets)


# -- the loader ------------------------------------------------------------------------------------


class Batches:
    """The indices of one batch after the other, epoch after epoch, until `paused`."""

    def __init__(self, sampler: DistributedSampler[Any], batch_size: int) -> None:
        self.sampler, self.batch_size = sampler, batch_size
        self.paused = False
        self.indices = self.endless()

    def endless(self) -> Iterator[int]:
        for epoch in itertools.count():
            self.sampler.set_epoch(epoch)
            yield from self.sampler

    def __iter__(self) -> Iterator[list[int]]:
        while not self.paused:
            yield list(itertools.islice(self.indices, self.batch_size))


class Feed:
    """Batches of a rank from its DataLoader, and what has been seen of the samples in them."""

    def __init__(self, dataset: Samples, key: Key, job: Job) -> None:
        self.dataset = dataset
        self.key = key
        self.device = job.device
        ranks = job.world_size
        sampler: Any = DistributedSampler(dataset, ranks, job.rank, seed=key["seed"])
        self.epoch = math.ceil(len(dataset) / ranks)  # samples of a rank, with padding
        self.indices = Batches(sampler, key["batch_size"])
        with_workers = {
            "prefetch_factor": key["prefetch"],
            "persistent_workers": key["persistent_workers"] == "on",
            "multiprocessing_context": key["start_method"],
        }
        self.loader: DataLoader[Any] | None = DataLoader(
            dataset,
            batch_sampler=self.indices,
            num_workers=key["workers"],
            pin_memory=key["pin_memory"] == "on",
            collate_fn=keep_encoded if key["decode"] == "cuda" else default_collate,
            **(with_workers if key["workers"] else {}),
        )
        self.running: Iterator[Any] | None = None  # None while it is paused
        self.augment = augmentation(key["image_size"]).to(job.device)  # if the rank decodes
        self.seen = torch.zeros(len(dataset), dtype=torch.int32)  # how often in the first epoch
        self.samples = 0  # that have come
        self.processes: set[int] = set()  # that have made them
        self.read_bytes = 0
        self.checksums: dict[int, int] = {}  # index -> checksum, of each worker's first sample

    def next(self) -> Batch:
        """The next batch, on the device. Starts the workers, or wakes them up."""
        if self.running is None:
            assert self.loader is not None
            self.running = iter(self.loader)
        try:
            inputs, targets, tickets = next(self.running)
        except (ConnectionError, EOFError) as error:  # it was handing over the memory of a batch
            time.sleep(1)  # torch's own error comes by a signal: later it would end the run
            raise RuntimeError(f"DataLoader worker is gone: {error}") from None
        self.look_at(tickets)
        if isinstance(inputs, list):
            rgb = torchvision.io.ImageReadMode.RGB
            images = torchvision.io.decode_jpeg(inputs, rgb, device=self.device)
            inputs = torch.stack([self.augment(image) for image in images])
        on_device = partial(torch.Tensor.to, device=self.device, non_blocking=True)
        return on_device(inputs), on_device(targets)

    def look_at(self, tickets: Tensor) -> None:
        """Count the samples of a batch. tickets: [batch, 4], as Samples.ticket makes them."""
        indices, processes, checksums, sizes = tickets.unbind(1)
        in_first_epoch = max(0, self.epoch - self.samples)
        self.seen += torch.bincount(indices[:in_first_epoch], minlength=len(self.seen))
        self.samples += len(indices)
        self.processes.update(processes.tolist())
        self.read_bytes += int(sizes.sum())
        for index, checksum in zip(indices.tolist(), checksums.tolist(), strict=True):
            if checksum != NOT_CHECKED:
                self.checksums[index] = checksum

    def pause(self) -> None:
        """Give the workers no more work, and throw away what they have fetched ahead."""
        if self.running is None:
            return
        self.indices.paused = True
        for _, _, tickets in self.running:
            self.look_at(tickets)
        self.indices.paused = False
        self.running = None

    def finish_epoch(self) -> None:
        """Load the rest of the first epoch, if it is short."""
        if self.epoch - self.samples <= EPOCH_REST:
            while self.samples < self.epoch:
                self.next()

    def wrong_checksum(self) -> str | None:
        """Decode what each worker decoded first, here, and compare. None if all are alike."""
        for index, checksum in self.checksums.items():
            if checksum_of(self.dataset.content(index)) != checksum:
                return f"a worker decodes sample {index} into other values than this rank"
        return None

    def close(self) -> None:
        """End the workers."""
        self.pause()
        self.loader = None


class Usage(NamedTuple):
    """What the processes that load for a rank have used so far."""

    samples: int
    cpu_s: float
    device_bytes: int  # read from the device
    read_bytes: int  # read from the device or the page cache

    @classmethod
    def now(cls, feed: Feed) -> "Usage":
        import psutil  # here: if it is missing, common/ has said so

        cpu_s, device_bytes = 0.0, 0
        for pid in filter(psutil.pid_exists, feed.processes):
            process = psutil.Process(pid)
            times = process.cpu_times()
            cpu_s += times.user + times.system
            device_bytes += process.io_counters().read_bytes
        return cls(feed.samples, cpu_s, device_bytes, feed.read_bytes)


# -- a case ----------------------------------------------------------------------------------------


class Facts(NamedTuple):
    """What a rank says of a case after the timing."""

    first_batch_s: float  # with the start of the workers
    next_epoch_s: float  # the first batch of another epoch
    pss_bytes: int  # of the workers
    worker_cpu_s: float | None  # for a sample; None without workers that live on
    from_device: float | None  # part of what was read; likewise
    rank_cores: float  # that are busy in a resident step
    problem: str | None  # with the samples
    epoch_done: float  # part of the first epoch that was checked
    digest: str  # of the parameters


def make_model(key: Key, classes: int) -> nn.Module:
    if key["kind"] == "tokens":
        return Decoder(DECODERS[key["model"]])
    return torchvision.models.get_model(key["model"], num_classes=max(1000, classes))


def build(job: Job, source: Source, key: Key, group: Group) -> Workload:
    """Training under DDP with the loader, with a resident batch, and the loader alone."""
    torch.manual_seed(job.rank)
    dataset: Samples
    loss_of: Callable[..., Tensor]
    if isinstance(source, str):
        dataset = Tokens(source, key)
        classes = 0
        loss_of = next_token_loss
    else:
        dataset = Images(source, key)
        classes = 1 + max(target for _, target in source)
        loss_of = nn.functional.cross_entropy
    feed = Feed(dataset, key, job)
    first_batch_s, resident = timed(feed.next)
    feed.pause()
    next_epoch_s, _ = timed(feed.next)
    before = Usage.now(feed)

    model = make_model(key, classes).to(job.device)
    ddp = DistributedDataParallel(model, process_group=group.test)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3, momentum=0.9)
    spent = {"cpu_s": 0.0, "wall_s": 1e-9}  # in resident steps

    def train(batch: Batch) -> None:
        inputs, targets = batch
        optimizer.zero_grad()
        loss_of(ddp(inputs), targets).backward()
        optimizer.step()

    def step() -> None:
        train(feed.next())

    def resident_step() -> None:
        feed.pause()  # does nothing but in the untimed step that begins a block
        cpu_s = time.process_time()
        wall_s = time.perf_counter()
        train(resident)
        spent["cpu_s"] += time.process_time() - cpu_s
        spent["wall_s"] += time.perf_counter() - wall_s

    def facts() -> Facts:
        starts_s = (first_batch_s, next_epoch_s)
        cores = spent["cpu_s"] / spent["wall_s"]
        return facts_of(feed, before, starts_s, cores, digest(model), group)

    # Batches come in bursts, one of each worker. So a sample is the mean of as many steps.
    calls = max(1, key["workers"])
    parts = {"resident": resident_step, "loader": feed.next}
    return Workload(step, parts, compared=["resident"], calls=calls, facts=facts)


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    """The seconds that a call takes, and what it returns."""
    start = time.perf_counter()
    result = function()
    return time.perf_counter() - start, result


def facts_of(
    feed: Feed,
    before: Usage,
    starts_s: tuple[float, float],
    rank_cores: float,
    parameters: str,
    group: Group,
) -> Facts:
    """Look at the workers, check the samples and end the workers. All ranks call it together."""
    import psutil

    now = Usage.now(feed)
    cpu_s = None
    from_device = None
    workers = feed.processes - {os.getpid()}
    pss_bytes = sum(pss_of(pid) for pid in workers if psutil.pid_exists(pid))
    if feed.key["workers"] == 0 or feed.key["persistent_workers"] == "on":
        read_bytes = now.read_bytes - before.read_bytes
        from_device = (now.device_bytes - before.device_bytes) / read_bytes
        if workers:
            cpu_s = (now.cpu_s - before.cpu_s) / (now.samples - before.samples)
    feed.finish_epoch()
    seen = feed.seen.clone()
    dist.all_reduce(seen, group=group.control)
    problem = feed.wrong_checksum() or epoch_problem(seen, len(group.ranks))
    epoch_done = min(1.0, feed.samples / feed.epoch)
    feed.close()
    return Facts(
        *starts_s, pss_bytes, cpu_s, from_device, rank_cores, problem, epoch_done, parameters
    )


def pss_of(pid: int) -> int:
    """Bytes of a process. A page that n processes share counts 1/n."""
    import psutil

    return psutil.Process(pid).memory_full_info().pss


def epoch_problem(seen: Tensor, ranks: int) -> str | None:
    """What is wrong with an epoch, or with the part of it that has come; None if it is right.

    seen: how often each sample came, over all ranks. DistributedSampler repeats a few samples so
    that all ranks have the same number: these may come twice.
    """
    padding = -len(seen) % ranks
    repeated = int((seen - 1).clamp(min=0).sum())
    missing = int((seen == 0).sum())
    if int(seen.sum()) == len(seen) + padding and missing:
        return f"{missing:,} of {len(seen):,} samples do not come in an epoch"
    if repeated > padding:
        return f"{repeated:,} samples come twice in an epoch; padding explains {padding}"
    return None


# -- what rank 0 makes of it -----------------------------------------------------------------------


def derive(node_ranks: int, case: Case, times: Times, facts: list[Facts]) -> None:
    """Fill in the metrics and the check. node_ranks: ranks of a host."""
    m = case.metrics
    key = case.key
    samples = len(case.ranks) * key["batch_size"]
    m |= step_metrics(times.each(), samples)
    m["exposed_wait_s"], m["exposed_wait_ci95_s"] = times.exposed("resident")
    for name in ("resident", "loader"):
        m[f"{name}_p50_s"] = times.p50(name)
        m[f"{name}_ci95_s"] = median_interval(times.slowest(name))
    m["loader_samples_per_s"] = samples / m["loader_p50_s"]
    m["training_samples_per_s"] = samples / m["resident_p50_s"]
    workers_busy = max(1, key["workers"]) * m["loader_p50_s"]
    m["workers_needed"] = math.ceil(workers_busy / m["resident_p50_s"])
    m["first_batch_s"] = max(fact.first_batch_s for fact in facts)
    m["next_epoch_s"] = max(fact.next_epoch_s for fact in facts)
    m["workers_pss_gib"] = max(fact.pss_bytes for fact in facts) / GIB
    m["rank_cores"] = max(fact.rank_cores for fact in facts)
    m["from_device"] = facts[0].from_device
    if facts[0].worker_cpu_s is not None:
        cpu_s = max(fact.worker_cpu_s or 0 for fact in facts)
        m["worker_cores"] = cpu_s * key["batch_size"] / m["resident_p50_s"]
        m["cores_needed"] = node_ranks * (m["rank_cores"] + m["worker_cores"])
    m["epoch_checked"] = min(fact.epoch_done for fact in facts)
    by_rank = times.each("loader")
    behind = by_rank.max(axis=0) - np.median(by_rank, axis=0)
    m["late_s"] = float(np.median(behind))
    if slow := straggler(by_rank):
        m["straggler_rank"], m["straggler_factor"] = slow
    problems = [fact.problem for fact in facts if fact.problem]
    replicas = compare_replicas([fact.digest for fact in facts], case.ranks)
    case.check = verdict(problems[0] if problems else replicas)


def rate_with_interval(samples: int, p50_s: float, interval_s: Interval | None) -> str:
    """`812 samples/s (790 to 830)`; a short time is a high rate."""
    rate = Estimate(p50_s, interval_s).inverse().scaled(samples)
    return rate.text("samples/s", digits=0)


def answer(args: argparse.Namespace, node_ranks: int, cores: int, cases: list[Case]) -> list[str]:
    """For each cache the sentence of the fastest case."""
    sentences: list[str] = []
    for same in series(cases, [name for name in LISTS if name != "cache"]).values():
        steps = ranked(same)
        if steps:
            best, _ = steps[0]
            told = sentence_of(best, node_ranks, cores)
            sentences.append(f"{name_of(args, best.key)}: {told}")
    if any(not_cold(case) for case in cases):
        sentences.append("not cold: this file system keeps what it was told to drop")
    return sentences


def sentence_of(case: Case, node_ranks: int, cores: int) -> str:
    """Whether the loader feeds the training, in a sentence. cores: of a host."""
    m, interval = case.metrics, case.metrics["exposed_wait_ci95_s"]
    resident_ms, wait_ms = m["resident_p50_s"] * 1e3, m["exposed_wait_s"] * 1e3
    if interval is None:
        return "it cannot be told whether the loader feeds the training: too few samples"
    low_ms, high_ms = interval[0] * 1e3, interval[1] * 1e3
    wait = f"a step waits {wait_ms:.1f} ms ({low_ms:.1f} to {high_ms:.1f})"
    if high_ms <= SMALL_WAIT * resident_ms:
        return f"not input-bound: {wait}, and computes {resident_ms:.1f} ms"
    if low_ms <= 0:
        unsure = "it cannot be told whether the loader feeds the training"
        return f"{unsure}: {wait}; a larger --max-seconds may tell"
    samples = len(case.ranks) * case.key["batch_size"]
    brings = rate_with_interval(samples, m["loader_p50_s"], m["loader_ci95_s"])
    takes = rate_with_interval(samples, m["resident_p50_s"], m["resident_ci95_s"])
    needed, there = m["workers_needed"], f"there are {cores}"
    rates = f"the loader brings {brings}, training takes {takes}"
    if needed > case.key["workers"]:
        processes = needed * node_ranks
        advice = f"{needed} workers a rank would do ({processes} cores; {there})"
        return f"input-bound: {rates}; {advice}"
    if "cores_needed" in m:
        advice = f"ranks and workers need {m['cores_needed']:.1f} cores; {there}"
    else:
        advice = f"the workers do not get enough of the cores; {there}"
    return f"the workers slow the training down: {wait}, although {rates}; {advice}"


def name_of(args: argparse.Namespace, key: Key) -> str:
    """What tells a case from the others: the number of workers, and settings that vary."""
    words = [f"{key['workers']} workers"]
    words += [f"{name} {key[name]}" for name in LISTS[1:] if len(getattr(args, name)) > 1]
    return ", ".join(words).replace("cache ", "").replace("_", " ")


def columns(args: argparse.Namespace) -> Columns:
    return {
        "": lambda case: name_of(args, case.key),
        "step\n(ms)": metric("step_time_p50_s", 1e3, 1),
        "resident\n(ms)": metric("resident_p50_s", 1e3, 1),
        "wait\n(ms)": metric("exposed_wait_s", 1e3, 1),
        "95% ci\n(ms)": interval_ends("exposed_wait_ci95_s", 1e3, 1),
        "loader\nsamples/s": metric("loader_samples_per_s", digits=0),
        "training\nsamples/s": metric("training_samples_per_s", digits=0),
        "first\nbatch (s)": metric("first_batch_s"),
        "next\nepoch (s)": metric("next_epoch_s", digits=3),
        "workers\n(GiB)": metric("workers_pss_gib"),
        "cores\na rank": metric("rank_cores", digits=1),
        "its\nworkers": metric("worker_cores", digits=1),
        "late\n(ms)": metric("late_s", 1e3, 1),
        "slowest\nrank": metric("straggler_rank", digits=0),
    }


# -- the files of a run ----------------------------------------------------------------------------


def make_files(args: argparse.Namespace, folder: Path, progress: Callable[[str], None]) -> None:
    """JPEG files in class folders, or a file of tokens. The same on every node: the seed is."""
    if args.kind == "tokens":
        count = args.samples * DECODERS[args.model].context + 1
        tokens = np.random.default_rng(args.seed).integers(2**16, size=count, dtype=np.uint16)
        write(folder / "tokens.bin", tokens.tobytes())
        return
    for number in range(CLASSES):
        (folder / str(number)).mkdir()
    for number in range(args.samples):
        progress(f"makes file {number + 1}")
        pixels = random_image(args.file_size, args.seed + number)
        image = v2.functional.to_pil_image(pixels)
        encoded = io.BytesIO()
        image.save(encoded, "JPEG", quality=90)
        write(folder / str(number % CLASSES) / f"{number}.jpg", encoded.getvalue())


def write(path: Path, content: bytes) -> None:
    """Write a file and sync it: only what is on the device can be dropped from the page cache."""
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def random_image(pixels: int, seed: int) -> Tensor:
    """Blurred noise with some grain, uint8 [3, pixels, pixels]. Its JPEG has a photo's size."""
    source = torch.Generator().manual_seed(seed)
    blocks = pixels // 16 + 2
    coarse = torch.rand(1, 3, blocks, blocks, generator=source)
    [smooth] = nn.functional.interpolate(coarse, (pixels, pixels), mode="bilinear")
    grain = torch.rand(3, pixels, pixels, generator=source) - 0.5
    image = (smooth + 0.1 * grain).clamp(0, 1)
    return (image * 255).to(torch.uint8)


def find_data(args: argparse.Namespace, folder: Path) -> Source:
    """What the datasets read. Raises OSError or ValueError where it is not what it should be."""
    if args.kind == "tokens":
        path = str(folder if args.data else folder / "tokens.bin")
        with open(path, "rb"):
            needed = 2 * (DECODERS[args.model].context + 1)
            size = os.path.getsize(path)
        if size < needed:
            raise ValueError(f"expected {needed:,} bytes of tokens or more, got {size:,}")
        return path
    files = torchvision.datasets.ImageFolder(folder).samples
    some = files[:: math.ceil(len(files) / 8)]  # all files would take too long
    probe = Images(some, {"cache": "warm", "decode": "cpu", "image_size": 1})
    for index in range(len(some)):
        probe.content(index)
    return files


def check_room(args: argparse.Namespace, job: Job) -> None:
    """Raise ValueError where this host has not enough memory for the workers."""
    workers = job.local_world_size * max(args.workers)
    sample_bytes = 3 * args.image_size**2 * 4
    if args.kind == "tokens":
        sample_bytes = 2 * DECODERS[args.model].context * 8
    queues = workers * max(args.prefetch) * args.batch_size * sample_bytes
    rooms = {
        "host memory": (queues + workers * WORKER_BYTES, free_on_host()),
        "/dev/shm": (queues, shutil.disk_usage("/dev/shm").free),
    }
    for place, (needed, free) in rooms.items():
        if needed > free:
            lower = "lower --workers, --prefetch or --batch-size"
            raise ValueError(f"expected {needed:,} bytes of {place}, {free:,} are free; {lower}")


def call_or_refuse(bench: Benchmark, what: str, function: Callable[[], Any]) -> Any:
    """Call a function on all ranks. Refuse the run if it raises on any of them."""
    result = None
    problem = None
    try:
        result = function()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        problem = f"{what}: {reason.splitlines()[0]}"
    problems = gather(problem) or []
    first = next((problem for problem in problems if problem), None)
    if first := share(first):
        bench.refuse(first)
    return result


def prepare(bench: Benchmark, args: argparse.Namespace) -> tuple[Source, Any]:
    """The data of this run, and what removes its folder at the end.

    The latter is None with --data, and on ranks that have not made the folder.
    """
    job = bench.job
    token = share(secrets.token_hex(8))
    remover = None

    def make() -> Path:
        nonlocal remover
        first_of_node = job.rank - job.local_rank
        folder = Path(tempfile.gettempdir(), f"input_sweep-{token}-{first_of_node}")
        if job.local_rank == 0:
            folder.mkdir(mode=0o700)
            remover = remove_at_end([str(folder)])
            make_files(args, folder, bench.watchdog.phase)
        return folder

    room = partial(check_room, args, job)
    call_or_refuse(bench, f"--workers {max(args.workers)}", room)
    folder = Path(args.data) if args.data else call_or_refuse(bench, "TMPDIR", make)
    what = f"--data {args.data}" if args.data else "TMPDIR"
    return call_or_refuse(bench, what, partial(find_data, args, folder)), remover


def plan(args: argparse.Namespace) -> list[Key]:
    """The key of each case: a setting of the loader."""
    fixed = ("kind", "model", "batch_size", "image_size", "decode", "seed")
    shared = {name: getattr(args, name) for name in fixed}
    shared["data"] = args.data or f"{args.samples} of {args.file_size} px"
    lists = [getattr(args, name) for name in LISTS]
    settings = itertools.product(*lists)
    return [shared | dict(zip(LISTS, values, strict=True)) for values in settings]


def not_cold(case: Case) -> bool:
    """Whether a case should have been cold, and much of what was read came from the page cache."""
    part = case.metrics.get("from_device")
    return case.key["cache"] == "cold" and part is not None and part < COUNTED_BYTES


def main() -> int:
    args = parse_args()
    set_forkserver_preload(["torchvision", "common.benchmark"])
    with Benchmark("input_sweep", args) as bench:
        keys = plan(args)
        bench.announce(keys)
        source, remover = prepare(bench, args)
        data = f"{args.kind} of {args.data or 'its own'}"
        title = f"{args.model}, batch size {args.batch_size}, {data}"
        title += f", page cache {' and '.join(args.cache)}"
        bench.begin_table(title, columns(args), ["2 workers, warm", *["0.0"] * 3, "-0.0 to 00.0"])
        node_ranks, cores = bench.job.local_world_size, len(os.sched_getaffinity(0))
        bench.answer = partial(answer, args, node_ranks, cores)
        for key in keys:
            derive_case = partial(derive, node_ranks)
            bench.measure(key, partial(build, bench.job, source), derive_case)
    if remover:
        # not communicate(): a forked worker may still have the pipe that the shell listens to
        shutil.rmtree(remover.args[-1], ignore_errors=True)
    return bench.status


if __name__ == "__main__":
    sys.exit(record(main)())
