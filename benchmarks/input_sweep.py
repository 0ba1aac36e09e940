#!/usr/bin/env python3
"""Is the training input-bound, and how many DataLoader workers does it need?

The script trains a model under DDP in alternating blocks: with batches from a DataLoader, and with
one resident batch that stays on the device. In a third kind of block it fetches batches without
training. The dataset consists of images, or is your own.

    step              a training step with the next batch from the loader
    resident          the same step with the resident batch, while the workers are idle
    wait              step - resident: time spent waiting for batches, and the slowdown that workers
                      cause by using cores and memory bandwidth
    loader            fetching the next batch, without training
    loader samples/s  ranks * batch size / loader
    training          ranks * batch size / resident, in samples/s
    workers needed    workers * loader / resident, if each worker has a core

Times are geometric means (gmean) over rounds of block medians, and rates are derived from them.

Workers prefetch batches. Therefore, before a resident block, all prefetched batches are discarded
and the workers receive no further work, so that a block with the loader starts with an empty queue.

    torchrun --nproc-per-node 2 benchmarks/input_sweep.py
    torchrun --nproc-per-node 8 benchmarks/input_sweep.py --data /scratch/imagenet/train \\
        --workers 2,4,8,16 --json report.jsonl
    torchrun --nproc-per-node 8 benchmarks/input_sweep.py --model package.module:function \\
        --dataset package.module:function

Without --data and --dataset the script generates JPEG files in TMPDIR and removes them at the end.
docs/input_sweep.md explains the table. Written for this project, BSD-3-Clause.
"""

import argparse
import dataclasses
import io
import itertools
import math
import os
import secrets
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from multiprocessing import get_all_start_methods, parent_process, set_forkserver_preload
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness import cli, exits

exits.report_missing_packages()

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, default_collate

from benchmarks.workloads.check import compare_replicas, digest, verdict
from benchmarks.workloads.folders import remove_at_end
from benchmarks.workloads.own_groups import guard_cases
from benchmarks.workloads.own_model import (
    Optimize,
    Trial,
    is_own,
    make_dataset,
    make_own,
    try_on_all,
    without_rate,
)
from benchmarks.workloads.training import LATE, late_ranks, slowest_ranks, training_metrics
from common.groups import Group, Job
from common.stats import Times, drop_wide_interval
from common.table import Columns, Table, ends, metric, relative
from common.timing import Workload
from harness.benchmark import Benchmark, Key, Planned, flag_for_more
from harness.environment import count_of
from harness.report import Case

CLASSES = 10  # of generated images
FILE_PIXELS = 400  # width and height of generated images
MAX_FOLDER_LENGTH = 107 - len("/listener-12345678")  # characters; the path of a socket has 107
SMALL_WAIT = 0.05  # of a resident step; training is not input-bound below it
LISTS = ("workers", "cache", "prefetch", "start_method")
FROM_DEVICE = 0.9  # minimum share of bytes read from the device in a cold case


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = cli.Parser(__doc__)
    add, list_of, positive_int = parser.add_argument, cli.list_of, cli.positive_int
    data = parser.add_mutually_exclusive_group().add_argument
    data(
        "--data",
        metavar="PATH",
        help="folder with images in class folders, as ImageFolder reads it (default: generate "
        "images)",
    )
    data(
        "--dataset",
        metavar="NAME",
        help="package.module:function that returns a dataset, or a dataset and a collate function",
    )
    add(
        "--samples",
        type=cli.number(int, CLASSES),
        default=256,
        metavar="N",
        help="number of images to generate (default: 256)",
    )
    add(
        "--workers",
        type=list_of(cli.number(int)),
        default=[2],
        metavar="N",
        help="worker processes per rank; 0 loads in the rank itself (default: 2)",
    )
    caches = list_of(str, ("warm", "cold"))
    add(
        "--cache",
        type=caches,
        metavar="C",
        help="read files from the page cache (warm) or from the device (cold) (default: both; with "
        "--dataset only warm)",
    )
    add(
        "--prefetch",
        type=list_of(positive_int),
        default=[2],
        metavar="N",
        help="batches that each worker prefetches (default: 2)",
    )
    methods = tuple(get_all_start_methods())
    start_methods = list_of(str, methods)
    add(
        "--start-method",
        type=start_methods,
        default=["forkserver"],
        metavar="M",
        help=f"start method of worker processes: {', '.join(methods)} (default: forkserver)",
    )
    default = cli.PerDevice("resnet50", "mobilenet_v3_small")
    add(
        "--model",
        default=default,
        metavar="NAME",
        help="torchvision model or package.module:function (default: %(default)s)",
    )
    add(
        "--batch-size",
        type=positive_int,
        metavar="N",
        help="batch size per rank (default: 32 on CUDA, 8 on the CPU)",
    )
    add(
        "--image-size",
        type=positive_int,
        default=cli.PerDevice(224, 64),
        metavar="PX",
        help="width and height of images after the crop (default: %(default)s)",
    )
    cli.add_common_flags(parser, max_seconds=10)
    args = parser.parse_args(argv)
    import torchvision  # takes seconds to import, so not before the first lines of output

    known = torchvision.models.list_models(module=torchvision.models)
    if is_own(args.model) and not args.dataset:
        parser.error(
            f"--model {args.model} requires --dataset package.module:function, which returns its "
            "dataset; examples/input_wait.py is a loop for any other loader"
        )
    if is_own(args.model) and args.batch_size:
        parser.error(f"--batch-size cannot be used with {args.model}, which defines its own batch")
    if args.dataset and "cold" in (args.cache or ()):
        parser.error("--cache cold requires images, whose files are known; leave out --cache")
    args.cache = args.cache or (["warm"] if args.dataset else ["warm", "cold"])
    args.batch_size = args.batch_size or (32 if cli.on_cuda(args.device) else 8)
    if not is_own(args.model) and args.model not in known:
        hint = cli.suggest(args.model, known) or f"; e.g. {known[0]}"
        parser.error(f"--model: unknown model '{args.model}'{hint}")
    return args


# -- the dataset, which the workers read -----------------------------------------------------------
# [core]

Files = list[tuple[str, int]]  # path and class of each image
PIXELS_MEAN, PIXELS_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet


class Images(Dataset[Any]):
    """Image files, decoded by Pillow and augmented as for training on ImageNet. A sample is (image,
    class)."""

    def __init__(self, files: Files, pixels: int, cold: bool = False) -> None:
        """pixels: width and height after the crop. cold: read files from the device."""
        from torchvision.transforms import v2  # here and below, so that --help is fast

        self.files, self.cold = files, cold
        self.augment = v2.Compose(  # the transforms of torchvision's reference training
            [
                v2.RandomResizedCrop(pixels, antialias=True),
                v2.RandomHorizontalFlip(),
                v2.ToDtype(torch.float32, scale=True),
                v2.Normalize(PIXELS_MEAN, PIXELS_STD),
            ]
        )

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.augment(self.content(index)), self.files[index][1]

    def size_bytes(self, index: int) -> int:
        return os.path.getsize(self.files[index][0])

    def content(self, index: int) -> Tensor:
        """The decoded image, uint8 [3, H, W]. Raises ValueError if it cannot be decoded."""
        from torchvision.datasets.folder import pil_loader
        from torchvision.transforms.v2.functional import pil_to_tensor

        path, _ = self.files[index]
        if self.cold:
            with open(path, "rb") as file:
                # drop the file from the page cache; some file systems ignore this
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        try:
            return pil_to_tensor(pil_loader(path))
        except OSError as error:
            raise ValueError(f"{path} is not an image: {type(error).__name__}") from None


class Ticketed(Dataset[Any]):
    """The samples of a dataset, each with a ticket, int64 [3]: the index of the sample, the PID of
    the process that loaded it, and the size of its file in bytes; 0 if that is unknown."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any] = default_collate) -> None:
        self.dataset, self.collate_samples = dataset, collate

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[Any, list[int]]:
        size = self.dataset.size_bytes(index) if isinstance(self.dataset, Images) else 0
        return self.dataset[index], [index, os.getpid(), size]

    def collate(self, samples: list[Any]) -> tuple[Any, Tensor]:
        """Return a batch and its tickets, [batch, 3]."""
        values, tickets = zip(*samples, strict=True)
        return self.collate_samples(list(values)), torch.tensor(tickets)


def to_device(value: Any, device: torch.device) -> Any:
    """Move the tensors in a batch of nested tuples, lists, dicts, and objects with `.to`."""
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if hasattr(value, "to"):
        return value.to(device)
    if isinstance(value, Mapping):
        return {key: to_device(entry, device) for key, entry in value.items()}
    if isinstance(value, (tuple, list)):
        moved = [to_device(entry, device) for entry in value]
        return type(value)(*moved) if hasattr(value, "_fields") else type(value)(moved)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return type(value)(**to_device(vars(value), device))
    return value


def end_with_rank(worker: int) -> None:
    """End this worker when its rank ends. Used as `worker_init_fn` of a DataLoader.

    torch's own check compares the PID of the parent process, which is the fork server here. The
    fork server in turn waits for its workers, so without this function both would run forever.
    """
    rank = parent_process()
    assert rank is not None

    def wait() -> None:
        rank.join()
        os._exit(1)

    threading.Thread(target=wait, name="end with rank", daemon=True).start()


# -- the loader ------------------------------------------------------------------------------------


class Batches:
    """A batch sampler that continues over epochs and ends when it is `paused`."""

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
    """The batches of a rank from its DataLoader, and statistics of their samples."""

    def __init__(
        self,
        dataset: Ticketed,
        batch_size: int,
        rank: int,
        ranks: int,
        device: torch.device,
        **options: Any,
    ) -> None:
        """options: further arguments of the DataLoader, such as num_workers."""
        self.device = device
        sampler: Any = DistributedSampler(dataset, ranks, rank)
        self.epoch_samples = math.ceil(len(dataset) / ranks)  # per rank, including padding
        self.indices = Batches(sampler, batch_size)
        self.loader: DataLoader[Any] | None = DataLoader(
            dataset,
            batch_sampler=self.indices,
            collate_fn=dataset.collate,
            pin_memory=device.type == "cuda",
            **options,
        )
        self.running: Iterator[Any] | None = None  # None while paused
        self.seen = torch.zeros(len(dataset), dtype=torch.int32)  # by sample, in the first epoch
        self.samples = 0  # number of samples so far
        self.processes: set[int] = set()  # PIDs of the processes that loaded them
        self.read_bytes = 0  # size of their files

    def next(self) -> Any:
        """The next batch, on the device. Starts the workers or resumes their work."""
        if self.running is None:
            assert self.loader is not None
            self.running = iter(self.loader)
        try:
            batch, tickets = next(self.running)
        except (ConnectionError, EOFError) as error:  # a worker died while it sent a batch
            time.sleep(1)  # torch's signal handler raises, too; later that would end the run
            raise RuntimeError(f"DataLoader worker exited unexpectedly: {error}") from None
        self.record(tickets)
        return to_device(batch, self.device)

    def record(self, tickets: Tensor) -> None:
        """Count the samples of a batch. tickets: [batch, 3], see Ticketed."""
        indices, processes, sizes = tickets.unbind(1)
        in_first_epoch = max(0, self.epoch_samples - self.samples)
        self.seen += torch.bincount(indices[:in_first_epoch], minlength=len(self.seen))
        self.samples += len(indices)
        self.processes.update(processes.tolist())
        self.read_bytes += int(sizes.sum())

    def pause(self) -> None:
        """Give the workers no further work, and discard the batches that they have prefetched."""
        if self.running is None:
            return
        self.indices.paused = True
        for _, tickets in self.running:
            self.record(tickets)
        self.indices.paused = False
        self.running = None

    def close(self) -> None:
        """End the workers."""
        self.pause()
        self.loader = None


# [/core]
# -- the files of a run ----------------------------------------------------------------------------


def make_files(count: int, folder: Path, progress: Callable[[str], None]) -> None:
    """Generate JPEG files in class folders, the same on every node. progress: called per file."""
    from torchvision.transforms.v2.functional import to_pil_image

    for number in range(CLASSES):
        (folder / str(number)).mkdir()
    for number in range(count):
        progress(f"write file {number + 1}")
        image = to_pil_image(random_image(FILE_PIXELS, seed=number))
        encoded = io.BytesIO()
        image.save(encoded, "JPEG", quality=90)
        with open(folder / str(number % CLASSES) / f"{number}.jpg", "wb") as file:
            file.write(encoded.getvalue())
            file.flush()
            os.fsync(file.fileno())  # only clean pages can be dropped from the page cache


def random_image(pixels: int, seed: int) -> Tensor:
    """Smooth noise with grain, uint8 [3, pixels, pixels]; as a JPEG it is as large as a photo."""
    source = torch.Generator().manual_seed(seed)
    blocks = pixels // 16 + 2
    coarse = torch.rand(1, 3, blocks, blocks, generator=source)
    [smooth] = nn.functional.interpolate(coarse, (pixels, pixels), mode="bilinear")
    grain = torch.rand(3, pixels, pixels, generator=source) - 0.5
    image = (smooth + 0.1 * grain).clamp(0, 1)
    return (image * 255).to(torch.uint8)


def find_files(folder: Path) -> Files:
    """The images in class folders. Raises OSError or ValueError if they cannot be read."""
    from torchvision.datasets import ImageFolder

    if not folder.is_dir():
        example = "e.g. --data /scratch/imagenet/train"
        raise ValueError(
            f"expected a folder with a folder of images per class, got {folder}; {example}"
        )
    files = ImageFolder(folder).samples
    probe = Images(files[:: math.ceil(len(files) / 8)], pixels=1)  # decode at most 8 of them
    for index in range(len(probe)):
        probe.content(index)
    return files


def make_socket_folder() -> None:
    """Create the folder in which multiprocessing and its workers open sockets.

    multiprocessing itself removes it only if this process exits normally. Raises ValueError if its
    path is too long for a socket: workers would then fail to send their batches.
    """
    folder = get_temp_dir()
    remove_at_end(folder)
    if len(folder) > MAX_FOLDER_LENGTH:
        limit = f"expected a path of at most {MAX_FOLDER_LENGTH} characters"
        raise ValueError(f"{limit} for the workers' sockets, got {folder}; e.g. TMPDIR=/tmp")


def prepare_files(bench: Benchmark, args: argparse.Namespace) -> tuple[Files, str]:
    """The images of this run, and the folder in which they were generated; "" with --data."""
    job = bench.job
    if args.data:
        return bench.prepare("--data", lambda: find_files(Path(args.data))), ""
    first_of_node = job.rank - job.local_rank
    name = f"input_sweep-{job.broadcast(secrets.token_hex(8))}-{first_of_node}"
    folder = Path(tempfile.gettempdir(), name)

    def make() -> None:
        if job.local_rank == 0:
            folder.mkdir(mode=0o700)
            remove_at_end(str(folder))
            # ahead=0: the other ranks wait for this one, so they must not count as behind it
            make_files(args.samples, folder, partial(bench.phase, ahead=0))

    bench.prepare("TMPDIR", make)
    return bench.prepare("TMPDIR", lambda: find_files(folder)), str(folder)


# -- a case ----------------------------------------------------------------------------------------


class Facts(NamedTuple):
    """The facts of a rank, after the timing."""

    from_device: float | None  # share of the bytes read that came from the device, if known
    problem: str | None  # with the samples of the first epoch
    digest: str  # of the parameters


def make_step(key: Key, files: Files, job: Job, group: Group) -> tuple[nn.Module, Any]:
    """A model under DDP, and its training step on a batch."""
    make_optimizer: Optimize = partial(torch.optim.SGD, lr=1e-3, momentum=0.9)
    if is_own(key["model"]):
        own = make_own(key["model"], job.device)
        model, make_optimizer = own.model, own.optimizer or make_optimizer

        def loss_of(batch: Any) -> Tensor:
            if isinstance(batch, Mapping):
                return own.loss(ddp(**batch))
            return own.loss(ddp(*(batch if isinstance(batch, (tuple, list)) else (batch,))))
    else:
        import torchvision

        classes = 1 + max((target for _, target in files), default=0)
        model = torchvision.models.get_model(key["model"], num_classes=max(1000, classes))

        def loss_of(batch: Any) -> Tensor:
            images, targets = batch
            return nn.functional.cross_entropy(ddp(images), targets)

    ddp = DistributedDataParallel(model.to(job.device), process_group=group.workload)
    optimizer = make_optimizer(ddp.parameters())
    if is_own(key["model"]):
        without_rate(optimizer)  # the weights stay finite, whatever the loss is

    def train(batch: Any) -> None:
        optimizer.zero_grad()
        loss_of(batch).backward()
        optimizer.step()

    return ddp, train


def build(job: Job, files: Files, own: Ticketed | None, key: Key, group: Group) -> Workload:
    """The workload of a rank: training with the loader; as parts, with a resident batch and the
    loader without training. own: the user's dataset; None for images."""
    torch.manual_seed(job.rank)
    workers = key["workers"]
    dataset = own or Ticketed(Images(files, key["image_size"], cold=key["cache"] == "cold"))
    options: dict[str, Any] = {"num_workers": workers}
    if workers:  # DataLoader refuses these options without workers
        options["persistent_workers"] = True
        options["prefetch_factor"] = key["prefetch"]
        options["worker_init_fn"] = end_with_rank
        options["multiprocessing_context"] = key["start_method"]
    feed = Feed(dataset, key["batch_size"], job.rank, job.world_size, job.device, **options)
    resident = feed.next()
    feed.pause()
    before = bytes_read(feed)
    model, train = make_step(key, files, job, group)

    def step() -> None:
        train(feed.next())

    def resident_step() -> None:
        feed.pause()  # has an effect only in the first untimed step of a block
        train(resident)

    def facts() -> Facts:
        total, from_device = bytes_read(feed)
        total_before, from_device_before = before
        share_from_device = None
        if total > total_before:
            share_from_device = (from_device - from_device_before) / (total - total_before)
        feed.close()
        seen = feed.seen.clone()
        dist.all_reduce(seen, group=group.control)
        return Facts(share_from_device, epoch_problem(seen, len(group.ranks)), digest(model))

    # Batches arrive in bursts, one from each worker, so a sample is the mean over as many steps.
    parts = {"resident": resident_step, "loader": feed.next}
    return Workload(
        step, parts, compared=["resident"], calls_per_sample=max(1, workers), facts=facts
    )


def bytes_read(feed: Feed) -> tuple[int, int]:
    """Bytes that the loading processes of a rank have read so far: in total, from the device."""
    import psutil  # not above: common/ reports in one line if it is missing

    from_device = 0
    for pid in filter(psutil.pid_exists, feed.processes):
        from_device += psutil.Process(pid).io_counters().read_bytes
    return feed.read_bytes, from_device


def epoch_problem(seen: Tensor, ranks: int) -> str | None:
    """Describe missing or repeated samples in the first epoch, as far as it was read, or None.

    seen: number of occurrences of each sample, over all ranks, [samples]. DistributedSampler
    repeats a few samples so that all ranks have the same number; these may occur twice.
    """
    padding = -len(seen) % ranks
    repeated = int((seen - 1).clamp(min=0).sum())
    missing = int((seen == 0).sum())
    if int(seen.sum()) == len(seen) + padding and missing:
        return f"{missing:,} of {len(seen):,} samples are missing from an epoch"
    if repeated > padding:
        return f"{repeated:,} samples are repeated in an epoch; padding accounts for {padding}"
    return None


# -- metrics and answer ----------------------------------------------------------------------------


def derive(case: Case, times: Times, facts: list[Facts]) -> None:
    """Compute the metrics and the verdict of the check. facts: one entry per rank."""
    m, key = case.metrics, case.key
    samples = len(case.ranks) * key["batch_size"]
    m |= training_metrics(times, samples)
    loader, resident = times.mean("loader"), times.mean("resident")
    m["exposed_wait_s"] = times.excess_over("resident")
    m["resident_s"], m["loader_s"] = resident, loader
    m["loader_samples_per_s"] = samples / loader
    m["training_samples_per_s"] = samples / resident
    m["workers_needed"] = drop_wide_interval(loader * max(1, key["workers"]) / resident)
    if facts[0].from_device is not None:
        m["from_device"] = facts[0].from_device
    if late := late_ranks(times.each("loader"), times.rounds, LATE * loader.value):
        m["late_ranks"], m["late_wait_s"] = late
    problems = [fact.problem for fact in facts if fact.problem]
    replicas = compare_replicas([fact.digest for fact in facts], case.ranks)
    case.check = verdict(problems[0] if problems else replicas)


def answer(args: argparse.Namespace, node_ranks: int, cores: int, cases: list[Case]) -> list[str]:
    """A sentence about the fastest case for each state of the page cache.

    node_ranks: number of ranks on rank 0's node. cores: number of cores of that node.
    """
    sentences: list[str] = []
    for cache in dict.fromkeys(case.key["cache"] for case in cases):
        same = [case for case in cases if case.key["cache"] == cache]
        best = min(same, key=lambda case: case.metrics["step_s"].value)
        sentences.append(f"{best.name}: {sentence_of(best, args, node_ranks, cores)}")
    cold = [case for case in cases if case.key["cache"] == "cold"]
    if any(case.metrics["from_device"] < FROM_DEVICE for case in cold):
        sentences.append("not cold: this file system did not drop files from the page cache")
    return sentences


def sentence_of(case: Case, args: argparse.Namespace, node_ranks: int, cores: int) -> str:
    """Whether a case is input-bound, in a sentence with the evidence; arguments as for `answer`."""
    m = case.metrics
    wait, resident = m["exposed_wait_s"], m["resident_s"]
    unknown = "unclear whether the training is input-bound"
    if wait.low is None:
        return f"{unknown}: too few samples"
    waits = f"a step waits {wait}"
    if wait.high <= SMALL_WAIT * resident.value:
        return f"not input-bound: {waits} and computes for {resident}"
    if wait.low <= 0:
        return f"{unknown}: {waits}; try {flag_for_more([case], args)}"
    loader = m["loader_samples_per_s"].text("samples/s", digits=0)
    training = m["training_samples_per_s"].text("samples/s", digits=0)
    rates = f"the loader delivers {loader} and training consumes {training}"
    needed = m["workers_needed"]
    cores_text, ranks_text = count_of(cores, "core"), count_of(node_ranks, "rank")
    if needed.value > case.key["workers"]:
        busy = f"training would keep {needed.text(digits=1)} workers per rank busy"
        node = f"this node has {cores_text} for {ranks_text}"
        return f"input-bound: {rates}; {busy}, with one core each; {node}"
    sharing = f"the workers and {ranks_text} share this node's {cores_text}"
    return f"the workers slow the training down: {waits}, although {rates}; {sharing}"


COLUMNS: Columns = {
    "": lambda case: case.name,
    "step\ngmean (ms)": metric("step_s", 1e3, 1),
    "resident\ngmean (ms)": metric("resident_s", 1e3, 1),
    "wait\n(ms)": metric("exposed_wait_s", 1e3, 1),
    "95% ci\n(ms)": ends("exposed_wait_s", 1e3, 1),
    "loader\ngmean (ms)": metric("loader_s", 1e3, 2),
    "workers\nneeded": metric("workers_needed", digits=1),
    "95% ci": relative("workers_needed"),
    "loader\nsamples/s": metric("loader_samples_per_s", digits=0),
    "95% ci\n(loader)": ends("loader_samples_per_s", digits=0),
    "training\nsamples/s": metric("training_samples_per_s", digits=0),
    "95% ci\n(training)": ends("training_samples_per_s", digits=0),
    "slowest\nrank": slowest_ranks,
}
WIDEST = ["", *["0.0"] * 3, "-0.0 to 00.0"]


# -- the cases -------------------------------------------------------------------------------------


def name_of(args: argparse.Namespace, key: Key) -> str:
    """The name of a case: its number of workers, and the other settings that vary."""
    words = [count_of(key["workers"], "worker")]
    words += [f"{name} {key[name]}" for name in LISTS[1:] if len(getattr(args, name)) > 1]
    return ", ".join(words).replace("cache ", "").replace("_", " ")


def plan(args: argparse.Namespace, ranks: int, own: Trial | None = None) -> list[Planned]:
    """A case for each combination of the loader's settings. own: the trial of your own model."""
    fixed = ("model", "batch_size", "image_size")
    shared = {name: getattr(args, name) for name in fixed}
    shared["data"] = args.data or args.dataset or f"{args.samples} of {FILE_PIXELS} px"
    if args.dataset:
        shared["image_size"] = None
    if own and own.communicates:
        shared["communicates"] = True
    cases: list[Planned] = []
    for values in itertools.product(*(getattr(args, name) for name in LISTS)):
        key = shared | dict(zip(LISTS, values, strict=True))
        cases.append(Planned(name_of(args, key), ranks, key))
    return cases


def main() -> int:
    args = parse_args()
    # modules that each worker needs are imported once, in the fork server
    modules = ["torchvision.datasets.folder", "torchvision.transforms.v2", "harness.benchmark"]
    set_forkserver_preload(modules)
    with Benchmark("input_sweep", args) as bench:
        job = bench.job
        guard_cases(bench, lambda key: "communicates" in key)
        own = None
        if is_own(args.model):
            trials = try_on_all(bench, [args.model], job.rank, job.world_size, idle_allowed=False)
            own = trials[args.model]
            if own.samples is None:
                why = "the number of samples in its batch, the batch size of the loader, is unknown"
                bench.refuse(f"--model {args.model}: {why}; state it as `samples`")
            args.batch_size = own.samples
        images = f"images of {args.data}" if args.data else args.dataset or "generated images"
        title = f"{args.model}, batch size {args.batch_size}, {images}"
        if not args.dataset:
            title += f", page cache {' and '.join(args.cache)}"
        dataset = None
        if args.dataset:
            dataset = bench.prepare("--dataset", lambda: Ticketed(*make_dataset(args.dataset)))
        cases = plan(args, job.world_size, own)
        bench.announce({title: cases})
        if any(args.workers):
            bench.prepare("TMPDIR", make_socket_folder)
        files, folder = ([], "") if dataset else prepare_files(bench, args)
        cores = len(os.sched_getaffinity(0))
        answer_of_node = partial(answer, args, job.local_world_size, cores)
        layout, make = Table(COLUMNS, WIDEST), partial(build, job, files, dataset)
        bench.run(title, cases, COLUMNS, make, derive, answer_of_node, layout=layout)
        if folder and job.local_rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
    return bench.status


if __name__ == "__main__":
    sys.exit(record(main)())
