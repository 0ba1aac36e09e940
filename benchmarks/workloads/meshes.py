"""Meshes of ranks for training: parsing of names, validation of cases, process groups."""

import inspect
import math
import re
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from benchmarks.workloads.decoder import DECODERS
from common.groups import Group, Job, barrier_before_new_group, connect, silenced
from harness.cli import Parser, raise_invalid
from harness.environment import count_of

Key = dict[str, Any]  # of a case: mesh, model, sequence_length, global_batch, microbatches, experts
AXES = ("pp", "dp", "cp", "ep", "tp")  # outermost first; the innermost communicates most
# A class of torch.distributed.pipelining and the number of stages per rank. The module is slow to
# import, and --help must not wait for it.
SCHEDULES: dict[str, tuple[str, int]] = {
    "gpipe": ("ScheduleGPipe", 1),
    "1f1b": ("Schedule1F1B", 1),
    "interleaved": ("ScheduleInterleaved1F1B", 2),
    "izb": ("ScheduleInterleavedZeroBubble", 2),
    "zbv": ("ScheduleZBVZeroBubble", 2),
}
EXPERTS = 8


@dataclass(frozen=True)
class Mesh:
    """A product of axes; see `parse_mesh`."""

    name: str
    pp: int = 1  # ranks on each axis
    dp: int = 1
    cp: int = 1
    ep: int = 1
    tp: int = 1
    replicas: int = 1  # of HSDP, each with dp / replicas shards
    schedule: str = ""  # of the pipeline, one of SCHEDULES
    ring: bool = False  # cp uses torch's context_parallel
    ddp: bool = False  # dp uses DistributedDataParallel

    @property
    def shape(self) -> tuple[int, ...]:
        """Number of ranks on each axis, in the order of AXES."""
        return self.pp, self.dp, self.cp, self.ep, self.tp

    @property
    def data(self) -> int:
        """Number of ranks that hold the same weights and average their gradients."""
        return self.dp * self.cp * self.ep

    @property
    def stages(self) -> int:
        """Number of pipeline stages; 1 without a pipeline."""
        return self.pp * SCHEDULES[self.schedule][1] if self.pp > 1 else 1

    @property
    def axes(self) -> list[str]:
        """The axes that communicate. dp is one of them if only cp or ep share weights."""
        ranks = dict(zip(AXES, self.shape, strict=True)) | {"dp": self.data}
        return [axis for axis in AXES if ranks[axis] > 1]

    def place_of(self, rank: int) -> dict[str, int]:
        """The coordinate of a rank on each axis."""
        places = [int(place) for place in np.unravel_index(rank, self.shape)]
        return dict(zip(AXES, places, strict=True))


PRODUCT = re.compile(r"ddp[1-9]\d*|(dp[1-9]\d*x([2-9]|[1-9]\d+)|(dp|tp|pp|cp|ep)[1-9]\d*)+")
FACTOR = re.compile(r"([a-z]p)(\d+)(?:x(\d+))?")  # `dp2x4`: the axis, its ranks or replicas, shards


@cache
def parse_mesh(name: str) -> Mesh:
    """Parse the ranks of each axis, and a schedule or `ring`: dp2tp2, dp2x4, pp4:1f1b, cp4:ring.
    Raises argparse.ArgumentTypeError for any other name."""
    product, _, suffix = name.partition(":")
    factors = FACTOR.findall(product)
    different_axes = {axis for axis, _, _ in factors}
    if not PRODUCT.fullmatch(product) or len(different_axes) < len(factors):
        raise_invalid("a mesh", repr(name), "e.g. dp8, dp2x4, ddp8, dp4tp2, dp2pp4:1f1b")
    fields: dict[str, Any] = {"ddp": product.startswith("ddp")}
    for axis, count, shards in factors:
        fields[axis] = int(count)
        if shards != "":
            fields["replicas"] = int(count)
            fields[axis] *= int(shards)
    if fields.get("pp", 1) > 1:
        fields["schedule"] = suffix
        is_known = suffix in SCHEDULES
    else:
        fields["ring"] = suffix == "ring" and fields.get("cp", 1) > 1
        is_known = suffix == "" or fields["ring"]
    if not is_known:
        names = ", ".join(SCHEDULES)
        raise_invalid(f"{names} after a pipeline", repr(name), "e.g. pp4:1f1b or cp4:ring")
    return Mesh(name, **fields)


def misfit(key: Key) -> str | None:
    """Return why a case cannot run on its mesh; None if it can."""
    mesh, config, ranks = parse_mesh(key["mesh"]), config_of(key), key["world_size"]
    size = math.prod(mesh.shape)
    if size != ranks:
        product = f"mesh {mesh.name} has {count_of(size, 'rank')}"
        return f"{product}, but the job has {ranks}; e.g. dp{ranks}"
    rows = mesh.dp * mesh.ep * key["microbatches"]
    divisions = (
        ("tp", mesh.tp, config.heads, "heads"),
        ("stages", mesh.stages, config.layers, "layers"),
        ("cp * tp", mesh.cp * mesh.tp, config.context, "--sequence-length"),
        ("dp * ep * microbatches", rows, key["global_batch"], "--global-batch"),
        ("ep", mesh.ep, EXPERTS, "experts"),
    )
    for name, divisor, number, what in divisions:
        if number % divisor:
            problem = f"not divisible by {name} = {divisor}"
            if not what.startswith("--"):
                return f"mesh {mesh.name}: {number} {what} are {problem}"
            example = f"e.g. {what} {number + -number % divisor}"
            return f"mesh {mesh.name}: {what} {number} is {problem}; {example}"
    if key["experts"] and mesh.tp > 1:
        return f"mesh {mesh.name}: tp does not shard experts; measure it without ep in the same run"
    if mesh.ring and key["device"] != "cuda":
        return f"mesh {mesh.name}: ring attention needs CUDA; try cp{mesh.cp} without :ring"
    if mesh.pp > 1 and key["device"] == "cuda" and key["backend"] == "gloo":
        return f"mesh {mesh.name}: gloo sends no CUDA tensors between stages; e.g. dp{ranks}"
    return invalid_microbatches(mesh, key["microbatches"]) if mesh.pp > 1 else None


def invalid_microbatches(mesh: Mesh, count: int) -> str | None:
    """Return why the schedule does not support this number of microbatches; None if it does."""
    if mesh.schedule in ("1f1b", "zbv") and count < mesh.stages:
        required = f"{mesh.schedule} with {mesh.stages} stages requires {mesh.stages} microbatches"
        example = f"e.g. --microbatches {mesh.stages}"
        return f"mesh {mesh.name}: {required} or more, got {count}; {example}"
    rounds = max(1, count // mesh.pp)  # as in torch
    if mesh.schedule in ("interleaved", "izb") and count % rounds:
        required = f"{mesh.schedule} requires a number of microbatches divisible by {rounds} rounds"
        return f"mesh {mesh.name}: {required}, got {count}; e.g. --microbatches {2 * mesh.pp}"
    return None


def open_meshes(mesh: Mesh, silent: list[str], job: Job, group: Group) -> dict[str, DeviceMesh]:
    """Return a DeviceMesh for each axis. Collectives of the `silent` ones return at once (backend
    `fake`). dp includes cp and ep, and is 2-D for HSDP."""
    talking = set(mesh.axes).difference(silent)
    if "dp" in talking:
        talking |= {"replicas", "same_experts"}
    # DTensor caches by the ranks and dimension names of a mesh. With the names of the real mesh, a
    # twin would therefore communicate over the real groups
    suffix = f" of {mesh.name}, fake {'+'.join(silent) or 'none'}"
    if job.backend == "fake":  # traffic.py simulates one rank after the other in one process
        suffix += f", as rank {job.rank}"
    opened: dict[str, DeviceMesh] = {}
    for sizes in layouts(mesh):
        backends: dict[int | str, Any] = {}
        for axis, size in sizes.items():
            real = axis in talking and size > 1
            backends[axis + suffix] = job.backend if real else "fake"
        barrier_before_new_group(group)
        with silenced(job.backend):
            device_mesh = init_device_mesh(
                job.device.type,
                tuple(sizes.values()),
                mesh_dim_names=tuple(axis + suffix for axis in sizes),
                backend_override=backends,
            )
        process_groups = device_mesh.get_all_groups()
        group.extra.extend(process_groups)  # first of all, so that a rank that fails closes them
        for process_group in process_groups:
            barrier_before_new_group(group)  # NCCL creates the communicator in the first collective
            connect(process_group, job)
        forget_groups(device_mesh)
        for axis in sizes:
            opened[axis] = device_mesh[axis + suffix]
        if mesh.replicas > 1 and "replicas" in sizes:
            opened["dp"] = device_mesh["replicas" + suffix, "dp" + suffix]
    return opened


def refuse_without_backends(parser: Parser) -> None:
    """Refuse to run with a torch in which the axes of a mesh cannot have different backends."""
    if "backend_override" not in inspect.signature(init_device_mesh).parameters:
        lacks = "whose init_device_mesh has backend_override; this one is"
        parser.error(f"this script requires a newer torch, {lacks} {torch.__version__}")


def forget_groups(mesh: DeviceMesh) -> None:
    """Drop a mesh's references to its process groups. DTensor's caches never release a mesh, which
    keeps its groups for torch.compile. Private API; works in torch 2.11, 2.14 and 2.15. In older
    versions without it, a mesh has only the names of its groups."""
    if hasattr(mesh, "_pg_registry"):
        mesh._pg_registry.clear()


def layouts(mesh: Mesh) -> list[dict[str, int]]:
    """Return the dimensions of device meshes, each over all ranks, that contain all axes. cp and ep
    need separate meshes, because their ranks are also ranks of dp."""
    shards = mesh.data // mesh.replicas
    meshes = [{"pp": mesh.pp, "replicas": mesh.replicas, "dp": shards, "tp": mesh.tp}]
    if mesh.cp > 1:
        meshes.append({"outer": mesh.pp * mesh.dp, "cp": mesh.cp, "inner": mesh.ep * mesh.tp})
    if mesh.ep > 1:
        meshes.append({"outer": mesh.pp, "same_experts": mesh.dp * mesh.cp, "ep": mesh.ep})
    return meshes


def default_meshes(ranks: int) -> list[str]:
    """dp, tp, both combined, and a pipeline over all ranks; tp and pp span at most 4 ranks."""
    names = [f"dp{ranks}"]
    most = math.gcd(ranks, 4)
    if most == 1:
        return names
    dp = f"dp{ranks // most}" if ranks > most else ""
    names.append(f"{dp}tp{most}")
    if most == 4:
        names.append(f"dp{ranks // 2}tp2")
    names.append(f"{dp}pp{most}:1f1b")
    return names


def stages_of(mesh: "Mesh", place: int) -> list[int]:
    """The pipeline stages of a rank. place: its coordinate on the axis pp."""
    if mesh.stages == mesh.pp:
        return [place]
    if mesh.schedule == "zbv":  # the second stages are assigned in reverse order, like a V
        return [place, mesh.stages - 1 - place]
    return [place, place + mesh.pp]


def config_of(key: Key) -> Any:
    """The DecoderConfig of a case."""
    return replace(DECODERS[key["model"]], context=key["sequence_length"], experts=key["experts"])
