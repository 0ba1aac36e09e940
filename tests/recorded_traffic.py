"""Compare the collectives of real gloo ranks with those that traffic.py predicts, for each mesh.

    torchrun --standalone --nproc-per-node 4 tests/recorded_traffic.py dp4,tp4,dp2ep2

The last rank compares its own calls. gloo's flight recorder has collectives, but no sends and
receives. Gloo implements a reduce-scatter as an all-reduce of the same bytes. For an all-gather
into a list (of DTensor) the recorder has the input of a rank.
"""

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import traffic
from benchmarks.workloads.axes import train
from benchmarks.workloads.meshes import Key, open_meshes, parse_mesh
from common.groups import Group, Job
from harness.observe.watchdog import recorded_collectives

BYTES = {"Float": 4, "Int": 4, "Long": 8, "Byte": 1}
MODEL = ["--model", "decoder-nano", "--sequence-length", "32", "--dtype", "fp32"]


def recorded(key: Key, job: Job) -> tuple[traffic.Calls, dict[str, int]]:
    """The calls of this rank in a mesh's third step, and the bytes that it holds afterwards."""
    world: Any = dist.group.WORLD
    meshes = open_meshes(parse_mesh(key["mesh"]), [], job, Group((), world, world))
    trainer = train(key, job, meshes, traffic.adamw)
    for _ in range(2):
        trainer.step()
    dist.barrier()
    before = len(recorded_collectives())
    trainer.step()
    axes = traffic.groups_of(meshes)
    calls: traffic.Calls = Counter()
    for entry in recorded_collectives()[before:]:
        axis, ranks = axes[entry["process_group"][0]]
        size = max(bytes_of(entry, "input"), bytes_of(entry, "output"))
        if entry["profiling_name"] == "gloo:all_gather":
            size = len(ranks) * bytes_of(entry, "input")
        calls[axis, traffic.collective_of(entry["profiling_name"]), size] += 1
    return calls, traffic.held_by(trainer)


def bytes_of(entry: dict[str, Any], side: str) -> int:
    """Bytes of the input or output tensors of a recorded collective."""
    shapes = zip(entry[f"{side}_dtypes"], entry[f"{side}_sizes"], strict=True)
    return sum(BYTES[dtype] * torch.Size(shape).numel() for dtype, shape in shapes)


def main(meshes: list[str]) -> int:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    world: Any = dist.group.WORLD
    job = Job(rank, rank, ranks, ranks, torch.device("cpu"), "gloo", dist.HashStore(), world)
    records = []
    for mesh in meshes:  # separately: only meshes with ep have experts
        words = ["--ranks", str(ranks), "--rank", str(rank), "--mesh", mesh, *MODEL]
        (key,) = traffic.plan(traffic.parse_args(words))
        records.append((key, *recorded(key, job)))
    dist.barrier()
    dist.destroy_process_group()
    status = 0
    for key, calls, held in records if rank == ranks - 1 else []:
        step = traffic.simulate(key)
        simulated: traffic.Calls = Counter()
        for (axis, collective, size), count in step.calls.items():
            name = "all_reduce" if collective == "reduce_scatter" else collective
            if collective not in traffic.MESSAGES:
                simulated[axis, name, size] += count
        same = calls == simulated and held == step.held_bytes
        status |= not same
        verdict = "same" if same else f"{calls - simulated} and not {simulated - calls}; {held}"
        print(f"{key['mesh']} rank {rank}: {calls.total()} calls: {verdict}")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1].split(",")))
