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
    workers needed  workers * loader / resident, if each one has a core

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
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing import get_all_start_methods, set_forkserver_preload
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torchvision
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torchvision.datasets.folder import pil_loader
from torchvision.transforms import v2

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import cli
from common.benchmark import Benchmark, Key, Planned
from common.check import compare_replicas, digest, verdict
from common.groups import Group, Job, share
from common.memory import GIB
from common.report import Case
from common.stats import Times, median, straggler, training_metrics
from common.table import Columns, Table, ends, metric
from common.timing import Workload
from common.workloads.decoder import DECODERS, Decoder, next_token_loss
from common.workloads.folders import remove_at_end

# What a dataset reads: the path and the class of each image, or the path of the file of tokens.
Source = list[tuple[str, int]] | str

CLASSES = 10  # of the images that are made
FILE_PIXELS = 400  # of a side of the images that are made
SMALL_WAIT = 0.05  # of a resident step: a shorter wait is not worth a change
LISTS = ("workers", "cache", "prefetch", "start_method")
COUNTED_BYTES = 0.9  # a case is cold if so much of what workers read came from the device


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = cli.Parser(__doc__)
    add, list_of, positive_int = parser.add_argument, cli.list_of, cli.positive_int
    add("--kind", choices=("images", "tokens"), default="images", help="(default: images)")
    data = "folder of class folders with images; for tokens a file of uint16 (default: made anew)"
    add("--data", metavar="PATH", help=data)
    made = "files, or sequences of tokens, that are made (default: 256)"
    add("--samples", type=positive_int, default=256, metavar="N", help=made)
    workers = "worker processes of a rank; 0 loads in the rank itself (default: 2)"
    add("--workers", type=list_of(cli.number(int)), default=[2], metavar="N", help=workers)
    cache = "warm, cold or both: files from the page cache, or from the device (default: both)"
    caches = list_of(str, ("warm", "cold"))
    add("--cache", type=caches, default=["warm", "cold"], metavar="C", help=cache)
    ahead = "batches that a worker may fetch ahead (default: 2)"
    add("--prefetch", type=list_of(positive_int), default=[2], metavar="N", help=ahead)
    methods = tuple(get_all_start_methods())
    how = f"of workers: {', '.join(methods)} (default: forkserver)"
    start_methods = list_of(str, methods)
    add("--start-method", type=start_methods, default=["forkserver"], metavar="M", help=how)
    model = "(default: resnet50, CPU mobilenet_v3_small; tokens: decoder-124m, CPU decoder-nano)"
    add("--model", metavar="NAME", help=model)
    batch = "samples of a rank in a step (default: %(default)s)"
    add("--batch-size", type=positive_int, default=cli.By(32, 8), metavar="N", help=batch)
    pixels = "after a crop (default: %(default)s)"
    add("--image-size", type=positive_int, default=cli.By(224, 64), metavar="PX", help=pixels)
    cli.add_common_flags(parser, max_seconds=10)
    args = parser.parse_args(argv)
    defaults, known = ("resnet50", "mobilenet_v3_small"), list(DECODERS)
    if args.kind == "tokens":
        defaults = ("decoder-124m", "decoder-nano")
    else:
        known = torchvision.models.list_models(module=torchvision.models)
    args.model = args.model or defaults[0 if cli.on_cuda(args.device) else 1]
    if args.model not in known:
        hint = cli.suggest(args.model, known) or f"; e.g. {known[0]}"
        parser.error(f"--model: unknown model '{args.model}' for {args.kind}{hint}")
    return args


# -- the data: what runs in the workers ------------------------------------------------------------
# [core]

Batch = tuple[Tensor, Tensor]  # inputs and targets, on the device
EPOCH_REST = 2000  # samples that a rank loads at most after the timing, to complete an epoch
PIXELS_MEAN, PIXELS_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet


def ticket(index: int, size: int) -> Tensor:
    """Stands in a sample beside its input and target: which it is, who made it, the bytes read."""
    return torch.tensor([index, os.getpid(), size])


class Images(Dataset[Any]):
    """JPEG or other images, decoded and augmented as for training on ImageNet."""

    def __init__(self, files: list[tuple[str, int]], pixels: int, cold: bool = False) -> None:
        self.files, self.cold = files, cold
        self.augment = augmentation(pixels)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int, Tensor]:
        path, target = self.files[index]
        content = self.content(index)
        return self.augment(content), target, ticket(index, os.path.getsize(path))

    def content(self, index: int) -> Tensor:
        """The pixels, uint8 [3, H, W], before augmentation."""
        path, _ = self.files[index]
        if self.cold:
            with open(path, "rb") as file:
                forget(file)
        try:
            return v2.functional.pil_to_tensor(pil_loader(path))
        except OSError as error:
            raise ValueError(f"{path} is no image: {type(error).__name__}") from None


class Tokens(Dataset[Any]):
    """Sequences from a memory-mapped file of uint16, as nanoGPT writes it."""

    def __init__(self, path: str, length: int, vocab: int, cold: bool = False) -> None:
        self.path, self.cold = path, cold
        self.length, self.vocab = length, vocab

    def __len__(self) -> int:
        return (os.path.getsize(self.path) // 2 - 1) // self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        content = self.content(index)
        tokens = content % self.vocab  # a file of a larger vocabulary can be read, too
        return tokens[:-1], tokens[1:], ticket(index, 2 * len(content))

    def content(self, index: int) -> Tensor:
        """The tokens of a sequence and the next one, [length + 1]."""
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
    """Drop a file from the page cache. Some file systems ignore the request."""
    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


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

    def __init__(
        self,
        dataset: Images | Tokens,
        batch_size: int,
        rank: int,
        ranks: int,
        device: torch.device,
        workers: int,
        **of_workers: Any,
    ) -> None:
        """of_workers: arguments of DataLoader that it takes with workers alone."""
        self.dataset, self.device = dataset, device
        sampler: Any = DistributedSampler(dataset, ranks, rank)
        self.epoch = math.ceil(len(dataset) / ranks)  # samples of a rank, with padding
        self.indices = Batches(sampler, batch_size)
        if workers:
            of_workers["persistent_workers"] = True
        self.loader: DataLoader[Any] | None = DataLoader(
            dataset,
            batch_sampler=self.indices,
            num_workers=workers,
            pin_memory=device.type == "cuda",
            **(of_workers if workers else {}),
        )
        self.running: Iterator[Any] | None = None  # None while it is paused
        self.seen = torch.zeros(len(dataset), dtype=torch.int32)  # how often in the first epoch
        self.samples = 0  # that have come
        self.processes: set[int] = set()  # that have made them
        self.read_bytes = 0

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
        to_device = partial(torch.Tensor.to, device=self.device, non_blocking=True)
        return to_device(inputs), to_device(targets)

    def look_at(self, tickets: Tensor) -> None:
        """Count the samples of a batch. tickets: [batch, 3], as `ticket` makes them."""
        indices, processes, sizes = tickets.unbind(1)
        in_first_epoch = max(0, self.epoch - self.samples)
        self.seen += torch.bincount(indices[:in_first_epoch], minlength=len(self.seen))
        self.samples += len(indices)
        self.processes.update(processes.tolist())
        self.read_bytes += int(sizes.sum())

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

    def close(self) -> None:
        """End the workers."""
        self.pause()
        self.loader = None


# [/core]


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
    worker_cpu_s: float | None  # for a sample; None without workers
    from_device: float  # part of what was read
    rank_cores: float  # that are busy in a resident step
    problem: str | None  # with the samples
    epoch_done: float  # part of the first epoch that was checked
    digest: str  # of the parameters


def build(job: Job, source: Source, key: Key, group: Group) -> Workload:
    """Training under DDP with the loader, with a resident batch, and the loader alone."""
    torch.manual_seed(job.rank)
    cold, workers = key["cache"] == "cold", key["workers"]
    dataset: Images | Tokens
    model: nn.Module
    loss_of: Callable[..., Tensor]
    if isinstance(source, str):
        config = DECODERS[key["model"]]
        dataset = Tokens(source, config.context, config.vocab, cold)
        model = Decoder(config)
        loss_of = next_token_loss
    else:
        dataset = Images(source, key["image_size"], cold)
        classes = 1 + max(target for _, target in source)
        model = torchvision.models.get_model(key["model"], num_classes=max(1000, classes))
        loss_of = nn.functional.cross_entropy
    of_workers = {
        "prefetch_factor": key["prefetch"],
        "multiprocessing_context": key["start_method"],
    }
    place = (job.rank, job.world_size, job.device)
    feed = Feed(dataset, key["batch_size"], *place, workers, **of_workers)
    first_batch_s, resident = timed(feed.next)
    feed.pause()
    next_epoch_s, _ = timed(feed.next)
    before = Usage.now(feed)

    model = model.to(job.device)
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
    parts = {"resident": resident_step, "loader": feed.next}
    return Workload(step, parts, compared=["resident"], calls=max(1, workers), facts=facts)


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
    workers = feed.processes - {os.getpid()}
    pss_bytes = sum(pss_of(pid) for pid in workers if psutil.pid_exists(pid))
    read_bytes = now.read_bytes - before.read_bytes
    from_device = (now.device_bytes - before.device_bytes) / read_bytes
    cpu_s = (now.cpu_s - before.cpu_s) / (now.samples - before.samples) if workers else None
    feed.finish_epoch()
    seen = feed.seen.clone()
    dist.all_reduce(seen, group=group.control)
    problem = epoch_problem(seen, len(group.ranks))
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
    m, key = case.metrics, case.key
    samples = len(case.ranks) * key["batch_size"]
    m |= training_metrics(times, samples)
    loader, resident = times.median("loader"), times.median("resident")
    m["exposed_wait_s"] = times.beyond("resident")
    m["resident_s"], m["loader_s"] = resident, loader
    m["loader_samples_per_s"] = samples / loader
    m["training_samples_per_s"] = samples / resident
    m["workers_needed"] = loader * max(1, key["workers"]) / resident
    m["first_batch_s"] = max(fact.first_batch_s for fact in facts)
    m["next_epoch_s"] = max(fact.next_epoch_s for fact in facts)
    m["workers_pss_gib"] = max(fact.pss_bytes for fact in facts) / GIB
    m["rank_cores"] = max(fact.rank_cores for fact in facts)
    m["from_device"] = facts[0].from_device
    if facts[0].worker_cpu_s is not None:
        cpu_s = max(fact.worker_cpu_s or 0 for fact in facts)
        m["worker_cores"] = cpu_s * key["batch_size"] / resident.value
        m["cores_needed"] = node_ranks * (m["rank_cores"] + m["worker_cores"])
    m["epoch_checked"] = min(fact.epoch_done for fact in facts)
    by_rank = times.each("loader")
    m["late_s"] = median(by_rank.max(axis=0) - np.median(by_rank, axis=0))
    if slow := straggler(by_rank):
        m["straggler_rank"], m["straggler_factor"] = slow
    problems = [fact.problem for fact in facts if fact.problem]
    replicas = compare_replicas([fact.digest for fact in facts], case.ranks)
    case.check = verdict(problems[0] if problems else replicas)


def answer(node_ranks: int, cores: int, cases: list[Case]) -> list[str]:
    """For each state of the page cache the sentence of the fastest case."""
    sentences: list[str] = []
    for cache in dict.fromkeys(case.key["cache"] for case in cases):
        same = [case for case in cases if case.key["cache"] == cache]
        best = min(same, key=lambda case: case.metrics["step_s"].value)
        sentences.append(f"{best.name}: {sentence_of(best, node_ranks, cores)}")
    if any(not_cold(case) for case in cases):
        sentences.append("not cold: this file system keeps what it was told to drop")
    return sentences


def sentence_of(case: Case, node_ranks: int, cores: int) -> str:
    """Whether the loader feeds the training, in a sentence. cores: of a host."""
    m = case.metrics
    wait, resident = m["exposed_wait_s"], m["resident_s"]
    unsure = "it cannot be told whether the loader feeds the training"
    if wait.low is None:
        return f"{unsure}: too few samples"
    waits = f"a step waits {wait}"
    if wait.high <= SMALL_WAIT * resident.value:
        return f"not input-bound: {waits}, and computes {resident}"
    if wait.low <= 0:
        return f"{unsure}: {waits}; a larger --max-seconds may tell"
    brings = m["loader_samples_per_s"].text("samples/s", digits=0)
    takes = m["training_samples_per_s"].text("samples/s", digits=0)
    rates = f"the loader brings {brings}, training takes {takes}"
    needed, there = m["workers_needed"], f"this node has {cores} for {node_ranks} ranks"
    if needed.value > case.key["workers"]:
        busy = f"it would keep {needed.text(digits=1)} workers a rank busy"
        return f"input-bound: {rates}; {busy}, each with a core; {there}"
    if "cores_needed" in m:
        advice = f"ranks and workers need about {m['cores_needed']:.1f} cores; {there}"
    else:
        advice = f"the workers do not get enough of the cores; {there}"
    return f"the workers slow the training down: {waits}, although {rates}; {advice}"


def name_of(args: argparse.Namespace, key: Key) -> str:
    """What tells a case from the others: the number of workers, and settings that vary."""
    words = [f"{key['workers']} workers"]
    words += [f"{name} {key[name]}" for name in LISTS[1:] if len(getattr(args, name)) > 1]
    return ", ".join(words).replace("cache ", "").replace("_", " ")


COLUMNS: Columns = {
    "": lambda case: case.name,
    "step\n(ms)": metric("step_s", 1e3, 1),
    "resident\n(ms)": metric("resident_s", 1e3, 1),
    "wait\n(ms)": metric("exposed_wait_s", 1e3, 1),
    "95% ci\n(ms)": ends("exposed_wait_s", 1e3, 1),
    "loader\nsamples/s": metric("loader_samples_per_s", digits=0),
    "95% ci\n(loader)": ends("loader_samples_per_s", digits=0),
    "training\nsamples/s": metric("training_samples_per_s", digits=0),
    "95% ci\n(training)": ends("training_samples_per_s", digits=0),
    "first\nbatch (s)": metric("first_batch_s"),
    "next\nepoch (s)": metric("next_epoch_s", digits=3),
    "workers\n(GiB)": metric("workers_pss_gib"),
    "cores\na rank": metric("rank_cores", digits=1),
    "its\nworkers": metric("worker_cores", digits=1),
    "late\n(ms)": metric("late_s", 1e3, 1),
    "slowest\nrank": metric("straggler_rank", digits=0),
}
WIDEST = ["2 workers, warm", *["0.0"] * 3, "-0.0 to 00.0"]


# -- the files of a run ----------------------------------------------------------------------------


def make_files(args: argparse.Namespace, folder: Path, progress: Callable[[str], None]) -> None:
    """JPEG files in class folders, or a file of tokens: the same on every node."""
    if args.kind == "tokens":
        count = args.samples * DECODERS[args.model].context + 1
        tokens = np.random.default_rng(0).integers(2**16, size=count, dtype=np.uint16)
        write(folder / "tokens.bin", tokens.tobytes())
        return
    for number in range(CLASSES):
        (folder / str(number)).mkdir()
    for number in range(args.samples):
        progress(f"makes file {number + 1}")
        image = v2.functional.to_pil_image(random_image(FILE_PIXELS, seed=number))
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
    """What the datasets read. Raises OSError or ValueError if it cannot be read."""
    if args.kind == "tokens":
        path = str(folder if args.data else folder / "tokens.bin")
        with open(path, "rb"):
            needed = 2 * (DECODERS[args.model].context + 1)
            size = os.path.getsize(path)
        if size < needed:
            raise ValueError(f"expected {needed:,} bytes of tokens or more, got {size:,}")
        return path
    files = torchvision.datasets.ImageFolder(folder).samples
    few = files[:: math.ceil(len(files) / 8)]  # all files would take too long
    probe = Images(few, pixels=1)
    for index in range(len(few)):
        probe.content(index)
    return files


def prepare(bench: Benchmark, args: argparse.Namespace) -> tuple[Source, Path | None, Any]:
    """The data of this run, the folder that this rank has made for them, and what removes it."""
    job = bench.job
    if args.data:
        source = bench.prepare("--data", lambda: find_data(args, Path(args.data)))
        return source, None, None
    token = share(secrets.token_hex(8))
    first_of_node = job.rank - job.local_rank
    folder = Path(tempfile.gettempdir(), f"input_sweep-{token}-{first_of_node}")

    def make() -> Any:
        if job.local_rank != 0:
            return None
        folder.mkdir(mode=0o700)
        remover = remove_at_end([str(folder)])
        make_files(args, folder, bench.phase)
        return remover

    remover = bench.prepare("TMPDIR", make)
    source = bench.prepare("TMPDIR", lambda: find_data(args, folder))
    return source, folder if remover else None, remover


def plan(args: argparse.Namespace, ranks: int) -> list[Planned]:
    """The cases: each is a setting of the loader."""
    fixed = ("kind", "model", "batch_size", "image_size")
    shared = {name: getattr(args, name) for name in fixed}
    shared["data"] = args.data or f"{args.samples} of {FILE_PIXELS} px"
    cases: list[Planned] = []
    for values in itertools.product(*(getattr(args, name) for name in LISTS)):
        key = shared | dict(zip(LISTS, values, strict=True))
        cases.append((name_of(args, key), ranks, key))
    return cases


def not_cold(case: Case) -> bool:
    """Whether a case should have been cold, and much of what was read came from the page cache."""
    return case.key["cache"] == "cold" and case.metrics["from_device"] < COUNTED_BYTES


def main() -> int:
    args = parse_args()
    set_forkserver_preload(["torchvision", "common.benchmark"])
    with Benchmark("input_sweep", args) as bench:
        node_ranks, cores = bench.job.local_world_size, len(os.sched_getaffinity(0))
        data = f"{args.kind} of {args.data or 'its own'}"
        title = f"{args.model}, batch size {args.batch_size}, {data}"
        title += f", page cache {' and '.join(args.cache)}"
        cases = plan(args, bench.job.world_size)
        bench.announce({title: cases})
        source, folder, _remover = prepare(bench, args)
        told = partial(answer, node_ranks, cores)
        with bench.begin_table(title, COLUMNS, told, Table(COLUMNS, WIDEST)):
            for name, _, key in cases:
                begin = partial(build, bench.job, source)
                bench.measure(key, name, begin, partial(derive, node_ranks))
    if folder:
        # the shell may be late: a forked worker may still have the pipe that it listens to
        shutil.rmtree(folder, ignore_errors=True)
    return bench.status


if __name__ == "__main__":
    sys.exit(record(main)())
