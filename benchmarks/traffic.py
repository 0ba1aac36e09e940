#!/usr/bin/env python3
"""What does a training step send under a mesh, before anybody rents its ranks?

One process plays one rank of a job of any size: the wrapping and the step of parallel_sweep.py,
tensors that have a shape and no memory, and collectives that return at once. Nothing is measured.

    bytes     size of a collective as in nccl-tests: what a rank gives or gets, whichever is more
    bus       bytes * factor: for an all_reduce of n ranks 2 (n - 1) / n, for all_gather,
              reduce_scatter and all_to_all (n - 1) / n, else 1
    compute   floor: FLOPs of the model / ranks / peak of a device
    axis      floor: times of collectives.py, linear in bytes between two sizes that were measured;
              a send or a receive takes half of a sendrecv
    step      floor: the largest of these floors. A step takes longer; how much is not said

    python benchmarks/traffic.py --ranks 1024 --mesh dp128tp8,dp1024,dp32pp4tp8:1f1b
    torchrun --nproc-per-node 8 benchmarks/collectives.py --collective all --json measured.jsonl
    python benchmarks/traffic.py --ranks 8 --mesh dp8,tp8 --measured measured.jsonl

Calls and bytes are those of a rank in a step. For 4 ranks of gloo, in each kind of mesh, they equal
what real ranks send. docs/traffic.md. BSD-3-Clause.
"""

import argparse
import atexit
import logging
import platform
import socket
import sys
import threading
import time
import warnings
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.answers import series, show_seconds
from common.cli import (
    Parser,
    checked,
    describe,
    first_lines,
    leave,
    list_of,
    number,
    positive_float,
    positive_int,
    refuse,
    show_size,
    take_stdout,
    version,
)
from common.environment import count_of, user_variables
from common.groups import Group, Job
from common.private_torch import ShapesOnly, join_fake_world
from common.remarks import report_lines
from common.report import Case, Report, load
from common.table import Columns, Table, cell, metric, progress_line
from common.workloads.axes import DTYPES, Trainer, train
from common.workloads.decoder import DECODERS, flops_per_token
from common.workloads.meshes import EXPERTS, Key, Mesh, config_of, misfit, open_meshes, parse_mesh
from common.workloads.peaks import find_peak
from common.workloads.reference import sgd

# a part of the name of an operation of c10d, without its underscores -> what the table calls it
COLLECTIVES = {
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "allreduce": "all_reduce",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
    "send": "send",
    "recv": "recv",
}
MESSAGES = ("send", "recv")
NOT_RUN = "skipped: counted on shapes, nothing was run"
SILENCE_S = 10.0  # after so long a line says what goes on
BYTES_A_TOKEN = 24  # of memory here: whole numbers are real, and exist three times
Calls = Counter[tuple[str, str, int]]  # axis, collective, bytes -> calls


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument
    whole = partial(add, type=positive_int, metavar="N")
    whole("--ranks", required=True, help="of the job that is played, e.g. 1024")
    add("--mesh", type=list_of(parse_mesh), required=True, help="as parallel_sweep.py takes them")
    ranks = "the ranks to play (default: 0); those of a pipeline differ"
    add("--rank", type=list_of(number(int, 0)), default=[0], metavar="N,...", help=ranks)
    whole("--gpus-per-node", default=8, help="ranks of a node, one after the other (default: 8)")
    add("--model", choices=list(DECODERS), default="decoder-7b", help="(default: decoder-7b)")
    dtype = "of weights, gradients and optimizer (default: bf16)"
    add("--dtype", choices=list(DTYPES), default="bf16", help=dtype)
    add("--optimizer", choices=("adamw", "sgd"), default="adamw", help="(default: adamw)")
    whole("--global-batch", help="sequences of all ranks together (default: 2 a rank)")
    whole("--sequence-length", help="tokens (default: the model's)")
    whole("--microbatches", help="of a pipeline (default: 2 for each of its ranks)")
    measured = "a report of collectives.py, for the floors of the communication time"
    report = checked(str, bool, "a report", "e.g. report.jsonl")
    add("--measured", type=report, metavar="REPORT", help=measured)
    peak = "of a device, for the floor of compute (default: by the device's name in --measured)"
    add("--peak-tflops", type=positive_float, metavar="X", help=peak)
    wanted = "write a report, as the other scripts do; - is stdout"
    add("-J", "--json", type=report, metavar="PATH", help=wanted)
    return parser.parse_args(argv)


def plan(args: argparse.Namespace) -> list[Key]:
    """The key of each mesh and rank. Raises ValueError for what cannot be."""
    import psutil  # here: if it is missing, common/ has said so

    beyond = [rank for rank in args.rank if rank >= args.ranks]
    if beyond:
        raise ValueError(f"--rank: expected 0 to {args.ranks - 1}, got {beyond[0]}; e.g. --rank 0")
    shared = {
        "model": args.model,
        "dtype": args.dtype,
        "optimizer": args.optimizer,
        "sequence_length": args.sequence_length or DECODERS[args.model].context,
        "global_batch": args.global_batch or 2 * args.ranks,
        "experts": EXPERTS if any(mesh.ep > 1 for mesh in args.mesh) else 0,
        "gpus_per_node": args.gpus_per_node,
        "world_size": args.ranks,
        "device": "none",
        "backend": "fake",
    }
    keys = []
    for mesh in args.mesh:
        microbatches = args.microbatches or 2 * mesh.pp
        for rank in args.rank:
            own = {"mesh": mesh.name, "rank": rank}
            keys.append({**own, "microbatches": microbatches if mesh.pp > 1 else 1, **shared})
        if problem := misfit(keys[-1]):
            raise ValueError(problem)
    sequences, tokens = shared["global_batch"], shared["sequence_length"]
    needed, free = sequences * tokens * BYTES_A_TOKEN, psutil.virtual_memory().available
    if needed > free:
        batch = f"a global batch of {sequences:,} sequences of {tokens:,} tokens"
        room = f"{show_size(needed)} bytes of memory here, and {show_size(free)} are free"
        raise ValueError(f"{batch} takes {room}; e.g. --sequence-length 4096 --global-batch 2048")
    return keys


# -- a step of one rank: what it sends and what it keeps -------------------------------------------


@dataclass
class Step:
    """What one rank sends in a step and holds after it."""

    calls: Calls
    ranks: dict[str, list[int]]  # of this rank's group, by axis
    held_bytes: dict[str, int]  # parameters, gradients, optimizer, activations


class Activations:
    """What autograd keeps for the backward pass, without weights: bytes now, and at most."""

    def __init__(self) -> None:
        self.known: Any = weakref.WeakSet()
        self.now = self.most = 0

    def keep(self, tensor: Tensor) -> Tensor:
        owner = tensor if tensor._base is None else tensor._base
        storage = local(tensor).untyped_storage()
        is_weight = owner.is_leaf and owner.requires_grad
        if not is_weight and storage not in self.known:
            self.known.add(storage)
            self.now += storage.nbytes()
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self.free, storage.nbytes())
        return tensor

    def free(self, size: int) -> None:
        self.now -= size


def local(tensor: Any) -> Tensor:
    """This rank's part of a DTensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def bytes_of(tensors: Any) -> int:
    return sum(local(tensor).numel() * tensor.element_size() for tensor in tensors)


def play(key: Key) -> Step:
    """Train as the rank of a key in a world that does not exist, and look at one step."""
    rank, nodes = key["rank"], key["gpus_per_node"]
    store = join_fake_world(rank, key["world_size"])
    try:
        device = torch.device("cpu")
        job = Job(rank, rank % nodes, key["world_size"], nodes, device, "fake", store)
        return step_of(key, job)
    finally:
        dist.destroy_process_group()


def optimizer_of(key: Key) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """Makes the optimizer of a model."""
    if key["optimizer"] == "sgd":
        return partial(sgd, lr=1e-3)
    return lambda model: torch.optim.AdamW(model.parameters())


def step_of(key: Key, job: Job) -> Step:
    mesh = parse_mesh(key["mesh"])
    world: Any = dist.group.WORLD
    meshes = open_meshes(mesh, [], job, Group((job.rank,), world, world))
    groups = groups_of(meshes)
    heard: Counter[tuple[str, str, int]] = Counter()

    def listen(operation: str, group: str, size: int) -> None:
        heard[group, operation, size] += 1

    with ShapesOnly(listen):
        trainer = train(key, job, meshes, optimizer_of(key))
        for _ in range(2 if mesh.ddp else 1):  # DDP chooses its buckets anew in the second step
            trainer.step()
        heard.clear()
        activations = Activations()
        with saved_tensors_hooks(activations.keep, lambda tensor: tensor):
            trainer.step()
    calls: Calls = Counter()
    for (group, operation, size), count in heard.items():
        axis, _ = groups[group]
        calls[axis, collective_of(operation), size] += count
    return Step(calls, dict(groups.values()), held_by(trainer) | {"activations": activations.most})


def held_by(trainer: Trainer) -> dict[str, int]:
    """The bytes that a rank holds after a step. The optimizer's numbers, such as AdamW's count of
    steps, are left out."""
    weights = list(trainer.model.parameters())
    states = [list(state.values()) for state in trainer.optimizer.state.values()]
    return {
        "parameters": bytes_of(weights),
        "gradients": bytes_of(weight.grad for weight in weights),
        "optimizer": bytes_of(tensor for state in states for tensor in state if tensor.dim() > 0),
    }


def groups_of(meshes: dict[str, Any]) -> dict[str, tuple[str, list[int]]]:
    """The axis and the ranks of each of this rank's groups, by the group's name."""
    groups = {}
    for device_mesh in meshes.values():
        names = device_mesh.mesh_dim_names
        for name, group in zip(names, device_mesh.get_all_groups(), strict=True):
            axis = name.partition(" of ")[0]
            groups[group.group_name] = (axis, dist.get_process_group_ranks(group))
    return groups


def collective_of(operation: str) -> str:
    """`c10d::_allgather_base_` -> `all_gather`."""
    word = operation.rpartition(":")[2].replace("_", "")
    for part, name in COLLECTIVES.items():
        if part in word:
            return name
    raise ValueError(f"{operation} is no collective that this script knows")


# -- floors ----------------------------------------------------------------------------------------


@dataclass
class Measured:
    """What a report of collectives.py holds."""

    devices: list[str] = field(default_factory=list)
    # collective, ranks of a group -> bytes -> seconds of the fastest variant
    times_s: dict[tuple[str, int], dict[int, float]] = field(default_factory=dict)

    def seconds_of(self, collective: str, ranks: int, size: int) -> float | None:
        """Of one call: linear in bytes between two sizes that were measured. None beyond those."""
        if collective in MESSAGES:  # a sendrecv is a send and a receive
            sendrecv_s = self.seconds_of("sendrecv", ranks, size)
            return None if sendrecv_s is None else sendrecv_s / 2
        times = self.times_s.get((collective, ranks), {})
        sizes = sorted(times)
        if not sizes or not sizes[0] <= size <= sizes[-1]:
            return None
        return float(np.interp(size, sizes, [times[known] for known in sizes]))


def read_measured(path: str) -> Measured:
    """Raises ValueError for what is no report of collectives.py."""
    report = load(path)
    if report.benchmark != "collectives":
        raise ValueError(f"{path} is of {report.benchmark}; expected a report of collectives.py")
    measured = Measured(report.environment.get("devices") or [])
    for case in report.cases:
        seconds = [case.metrics.get(f"{way}_time_s") for way in ("out_of_place", "in_place")]
        known = [time for time in seconds if time]
        if case.failed or not known:
            continue
        key = case.key
        times = measured.times_s.setdefault((key["collective"], key["group_ranks"]), {})
        before = times.get(key["size_bytes"], np.inf)
        times[key["size_bytes"]] = min(before, *known)
    return measured


def bus_factor(collective: str, ranks: int) -> float:
    """busbw / algbw, as in nccl-tests' doc/PERFORMANCE.md."""
    if collective == "all_reduce":
        return 2 * (ranks - 1) / ranks
    return 1.0 if collective in ("broadcast", *MESSAGES) else (ranks - 1) / ranks


# -- the report and the table ----------------------------------------------------------------------


def derive(key: Key, step: Step, measured: Measured | None, peak: float | None) -> dict[str, Any]:
    """The metrics of a case."""
    tokens = key["global_batch"] * key["sequence_length"]
    m: dict[str, Any] = {"flops": flops_per_token(config_of(key)) * tokens / key["world_size"]}
    m |= {f"{name}_bytes": size for name, size in step.held_bytes.items()}
    m["compute_floor_s"] = m["flops"] / peak if peak else None
    floors_s, counted = floors_of(step, measured or Measured())
    known = [floor for floor in (m["compute_floor_s"], *floors_s.values()) if floor]
    m["step_floor_s"] = max(known, default=None)
    across = []
    for axis in dict.fromkeys(axis for axis, _, _ in step.calls):
        ranks = step.ranks[axis]
        nodes = {rank // key["gpus_per_node"] for rank in ranks}
        m |= {f"{axis}_ranks": len(ranks), f"{axis}_nodes": len(nodes)}
        if len(nodes) > 1:
            across.append(axis)
        if measured:
            m[f"{axis}_floor_s"] = floors_s.get(axis)
            m[f"{axis}_floor_bytes"] = counted[axis]
    return m | totals_of(step.calls) | {"across_nodes": ", ".join(across)}


def totals_of(calls: Calls) -> Counter[str]:
    """Calls and bytes of each axis, and of each collective of an axis, as metrics."""
    totals: Counter[str] = Counter()
    for (axis, collective, size), count in calls.items():
        for name in (axis, f"{axis}_{collective}"):
            totals[f"{name}_calls"] += count
            totals[f"{name}_bytes"] += size * count
    return totals


def floors_of(step: Step, measured: Measured) -> tuple[dict[str, float], Counter[str]]:
    """By axis: seconds of its calls, one after the other, and the bytes of the calls that count.

    A call counts if its bytes lie between two that were measured, on as many ranks.
    """
    floors_s: dict[str, float] = defaultdict(float)
    counted: Counter[str] = Counter()
    for (axis, collective, size), count in step.calls.items():
        seconds = measured.seconds_of(collective, len(step.ranks[axis]), size)
        if seconds is not None:
            floors_s[axis] += seconds * count
            counted[axis] += size * count
    return floors_s, counted


def axis_line(case: Case, axis: str) -> str:
    """`# dp8, rank 0: dp, 8 ranks on 1 node: all_gather 10 x, 4G (bus 3.5G); ...`"""
    m = case.metrics
    parts = []
    for collective in COLLECTIVES.values():
        if calls := m.get(f"{axis}_{collective}_calls"):
            size = m[f"{axis}_{collective}_bytes"]
            bus = size * bus_factor(collective, m[f"{axis}_ranks"])
            parts.append(f"{collective} {calls:,} x, {show_size(size)} (bus {show_size(bus)})")
    nodes = count_of(m[f"{axis}_nodes"], "node")
    line = f"# {case.key['mesh']}, rank {case.key['rank']}: {axis}, {m[f'{axis}_ranks']} ranks"
    line += f" on {nodes}: {'; '.join(parts)}"
    if f"{axis}_floor_bytes" in m:
        covered = m[f"{axis}_floor_bytes"] / m[f"{axis}_bytes"]
        floor = f"{(m[f'{axis}_floor_s'] or 0) * 1e3:.4g} ms"
        line += f"; floor {floor}, from times of {covered:.1%} of the bytes"
    return line


def columns_of(axes: list[str], floors: bool) -> Columns:
    columns: Columns = {
        "mesh": lambda case: case.key["mesh"],
        "rank": lambda case: str(case.key["rank"]),
    }
    for name in ("parameters", "gradients", "optimizer", "activations"):
        columns[f"{name}\n(bytes)"] = cell(f"{name}_bytes", show_size)
    columns["TFLOP"] = cell("flops", lambda flops: f"{flops / 1e12:.4g}")
    for axis in axes:
        columns[f"{axis}\ncalls"] = metric(f"{axis}_calls", digits=0)
        columns[f"{axis}\n(bytes)"] = cell(f"{axis}_bytes", show_size)
    columns["across\nnodes"] = lambda case: case.metrics.get("across_nodes") or "-"
    if floors:
        columns["compute\nfloor (ms)"] = metric("compute_floor_s", 1e3)
        columns["step\nfloor (ms)"] = metric("step_floor_s", 1e3)
    return columns


def answer(cases: list[Case]) -> list[str]:
    """Which mesh sends the least, and which step could be the shortest."""
    sentences: list[str] = []
    for name, same in series(cases, ("mesh", "rank", "microbatches")).items():
        played = [case for case in same if "flops" in case.metrics]
        if not played:
            continue
        sent: dict[str, Sent] = {}  # by mesh: of the rank that sends the most
        floors_s: dict[str, float] = {}
        for case in played:
            mesh, metrics = case.key["mesh"], case.metrics
            sent[mesh] = max(sent.get(mesh, Sent(0, 0)), sent_by(metrics))
            if metrics["step_floor_s"]:
                floors_s[mesh] = max(floors_s.get(mesh, 0.0), metrics["step_floor_s"])
        sentences.append(name + least_sent(sent))
        if floors_s:
            mesh = min(floors_s, key=lambda mesh: floors_s[mesh])
            floor = show_seconds(floors_s[mesh])
            sentences.append(f"{name}a step takes at least {floor} under {mesh}, the lowest floor")
    return sentences


class Sent(NamedTuple):
    """Bytes of a rank in a step, on all axes."""

    ring: float  # that it sends if its collectives are rings
    size: int  # of its collectives, as in nccl-tests


def sent_by(metrics: dict[str, Any]) -> Sent:
    """By the rank of these metrics. It does not send what it receives from one other rank."""
    axes = [name.removesuffix("_ranks") for name in metrics if name.endswith("_ranks")]
    ring = 0.0
    for axis in axes:
        for collective in set(COLLECTIVES.values()) - {"recv"}:
            size = metrics.get(f"{axis}_{collective}_bytes", 0)
            ring += size * bus_factor(collective, metrics[f"{axis}_ranks"])
    return Sent(ring, sum(metrics[f"{axis}_bytes"] for axis in axes))


def least_sent(sent: dict[str, Sent]) -> str:
    """`a rank of dp8 sends 10.5G bytes a step in rings (its collectives have 12G), the least; a
    rank of tp8 31.5G (36G)`. sent: by mesh."""
    least, *others = sorted(sent, key=lambda mesh: sent[mesh])
    ring, size = map(show_size, sent[least])
    sentence = f"a rank of {least} sends {ring} bytes a step in rings (its collectives have {size})"
    if not others:
        return sentence
    most = others[-1]
    if sent[most] == sent[least]:
        return f"{sentence}, under all {len(sent)} meshes"
    ring, size = map(show_size, sent[most])
    return f"{sentence}, the least; a rank of {most} {ring} ({size})"


def environment(args: argparse.Namespace) -> dict[str, Any]:
    """What a report says of the job. It has no devices."""
    return {
        "version": version(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "os": platform.platform(),
        "launcher": "python",
        "backend": "fake",
        "world_size": args.ranks,
        "local_world_size": args.gpus_per_node,
        "num_nodes": -(-args.ranks // args.gpus_per_node),
        "hosts": [socket.gethostname()],
        "variables": user_variables(),
    }


def axes_of(meshes: list[Mesh]) -> list[str]:
    """Every axis that a rank of one of these meshes may talk on, in the order of the table."""
    axes: dict[str, None] = {}
    for mesh in meshes:
        extra = ["replicas"] * (mesh.replicas > 1)
        extra += ["same_experts"] * (mesh.ep > 1 and mesh.data > mesh.ep)
        axes |= dict.fromkeys([*mesh.axes, *extra])
    return list(axes)


@contextmanager
def signs_of_life(what: str) -> Iterator[None]:
    """Say on stderr every SILENCE_S that it goes on."""
    over, start = threading.Event(), time.monotonic()

    def speak() -> None:
        while not over.wait(SILENCE_S):
            print(f"# {what}: {time.monotonic() - start:.0f} s so far", file=sys.stderr, flush=True)

    thread = threading.Thread(target=speak, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def measure(key: Key, measured: Measured | None, peak: float | None) -> Case:
    """A case. A mesh that this torch cannot play fails; the others go on."""
    case = Case(key, [key["rank"]], check=NOT_RUN)
    try:
        with signs_of_life(f"{key['mesh']}, rank {key['rank']}"):
            case.metrics = derive(key, play(key), measured, peak)
    except Exception as error:
        case.check = f"failed: {describe(error)}"
    return case


def begin(args: argparse.Namespace) -> tuple[Report, list[Key], Measured | None]:
    """The report, the cases, and what --measured holds. A mistake ends the run."""
    files = [take_stdout()] if args.json == "-" else []
    report = Report("traffic", environment(args), args.json, files=files)
    try:
        keys = plan(args)
        measured = read_measured(args.measured) if args.measured else None
        replaced = report.start()
    except (ValueError, OSError) as error:
        refuse(str(error))
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    print(first_lines())
    print(f"# PyTorch {torch.__version__}; {args.ranks:,} ranks are played, none is there")
    if replaced:
        print(f"# the report that was there is now {replaced}")
    return report, keys, measured


def main() -> int:
    args = parse_args()
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    report, keys, measured = begin(args)
    peak = args.peak_tflops * 1e12 if args.peak_tflops else None
    if measured and measured.devices and not peak:
        peak = find_peak(measured.devices[0], args.dtype, 0)
    about = f"{args.model}, {keys[0]['sequence_length']} tokens"
    batch = f"global batch {keys[0]['global_batch']}"
    print(f"\na rank's step: {about}, {batch}, {args.dtype}, {args.optimizer}\n")
    axes = axes_of(args.mesh)
    longest = max((mesh.name for mesh in args.mesh), key=len)
    table = Table(columns_of(axes, bool(measured or peak)), [longest])
    progress = progress_line(True)
    for key in keys:
        progress.set_description_str(f"{key['mesh']}, rank {key['rank']}")
        case = measure(key, measured, peak)
        report.add(case)
        progress.write(table.row(case), file=sys.stdout)
    progress.close()
    print()
    for case in report.cases:
        for axis in axes:
            if f"{axis}_bytes" in case.metrics:
                print(axis_line(case, axis))
    failed = any(case.failed for case in report.cases)
    for line in report_lines(report.path, None):
        print(f"# {line}")
    sentences = answer([case for case in report.cases if not case.failed])
    if sentences:
        print("\n# " + "\n# ".join(sentences))
    report.finish("failed" if failed else "complete", answer=sentences)
    return int(failed)


if __name__ == "__main__":
    status = main()
    atexit.register(leave, status)
    sys.exit(status)
