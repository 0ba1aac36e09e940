"""A step of each mesh on real gloo ranks: do their collectives have what traffic.py says?

    torchrun --standalone --nproc-per-node 4 tests/recorded_traffic.py dp4,tp4,dp2ep2

Each rank compares itself. gloo's flight recorder has its collectives, but no sends and receives.
Gloo makes an all-reduce of a reduce-scatter, of the same bytes, so traffic.py's reduce-scatters
are taken for all-reduces here. Of an all-gather into a list (DTensor's) the recorder has what a
rank gives: it counts times the ranks. The bytes of weights, gradients and optimizer are compared.
"""

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import traffic
from common.groups import Group, Job
from common.watchdog import recorded_collectives
from common.workloads.axes import train
from common.workloads.meshes import Key, open_meshes, parse_mesh

BYTES = {"Float": 4, "Int": 4, "Long": 8, "Byte": 1}
MODEL = ["--model", "decoder-nano", "--sequence-length", "32", "--dtype", "fp32"]


def recorded(key: Key, job: Job) -> tuple[traffic.Calls, dict[str, int]]:
    """What this rank sends in the third step of a mesh, and the bytes that it holds afterwards."""
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
        if entry["profiling_name"] == "gloo:all_gather":
            size = len(ranks) * bytes_of(entry, "input")
        else:
            size = max(bytes_of(entry, "input"), bytes_of(entry, "output"))
        calls[axis, traffic.collective_of(entry["profiling_name"]), size] += 1
    return calls, traffic.held_by(trainer)


def bytes_of(entry: dict[str, Any], side: str) -> int:
    """Of the tensors that went into a recorded collective, or that came out."""
    shapes = zip(entry[f"{side}_dtypes"], entry[f"{side}_sizes"], strict=True)
    return sum(BYTES[dtype] * torch.Size(shape).numel() for dtype, shape in shapes)


def as_recorded(calls: traffic.Calls) -> traffic.Calls:
    """The calls of traffic.py, as gloo's recorder has them."""
    renamed: traffic.Calls = Counter()
    for (axis, collective, size), count in calls.items():
        if collective not in traffic.MESSAGES:
            name = "all_reduce" if collective == "reduce_scatter" else collective
            renamed[axis, name, size] += count
    return renamed


def main() -> int:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    job = Job(rank, rank, ranks, ranks, torch.device("cpu"), "gloo", dist.HashStore())
    keys = []
    for mesh in sys.argv[1].split(","):  # one by one: only those with ep have experts
        words = ["--ranks", str(ranks), "--rank", str(rank), "--mesh", mesh, *MODEL]
        keys += traffic.plan(traffic.parse_args(words))
    records = [recorded(key, job) for key in keys]
    dist.barrier()
    dist.destroy_process_group()
    status = 0
    for key, (calls, held) in zip(keys, records, strict=True):
        step = traffic.play(key)
        played, record = as_recorded(step.calls), Counter(calls)
        same = played == record and held == step.held_bytes
        verdict = "same"
        if not same:
            verdict = f"recorded more {record - played}, played more {played - record}; {held}"
            status = 1
        print(f"{key['mesh']} rank {rank}: {record.total()} calls: {verdict}\n", end="", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
