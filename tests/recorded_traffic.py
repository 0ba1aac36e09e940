"""A step of each mesh on real gloo ranks: does the flight recorder have what traffic.py says?

    torchrun --standalone --nproc-per-node 4 tests/recorded_traffic.py dp4,tp4,pp4:1f1b

Each rank looks at itself. gloo makes an all-reduce of a reduce-scatter, of the same bytes, and the
recorder has that: so the reduce-scatters of traffic.py are taken for all-reduces here.
"""

import os
import sys
from collections import Counter
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import traffic
from common.axes import train
from common.check import sgd
from common.dist import Group, Job
from common.meshes import Key, open_meshes, parse_mesh
from common.private_torch import recorded_collectives

Sent = Counter[tuple[str, str, int]]  # axis, collective, bytes -> calls
BYTES = {"Float": 4, "Int": 4, "Long": 8, "Byte": 1}


def recorded(key: Key, job: Job) -> Sent:
    """The third step of a mesh, as the recorder has it."""
    world: dist.ProcessGroup = dist.group.WORLD
    meshes = open_meshes(parse_mesh(key["mesh"]), [], job, Group((), world, world))
    trainer = train(key, job, meshes, partial(sgd, lr=1e-3))
    for _ in range(2):
        trainer.step()
    dist.barrier()
    before = len(recorded_collectives())
    trainer.step()
    axes = traffic.groups_of(meshes)
    sent: Sent = Counter()
    for entry in recorded_collectives()[before:]:
        axis, _ = axes[entry["process_group"][0]]
        sizes = []
        for side in ("input", "output"):
            width = [BYTES[name] for name in entry[f"{side}_dtypes"]]
            counts = [torch.Size(shape).numel() for shape in entry[f"{side}_sizes"]]
            sizes.append(sum(a * b for a, b in zip(width, counts, strict=True)))
        sent[axis, traffic.collective_of(entry["profiling_name"]), max(sizes)] += 1
    return sent


def said(key: Key) -> Sent:
    """The same step, as traffic.py plays it."""
    sent: Sent = Counter()
    for axis, collectives in traffic.play(key).calls.items():
        for collective, sizes in collectives.items():
            name = "all_reduce" if collective == "reduce_scatter" else collective
            for size, count in sizes.items():
                sent[axis, name, size] += count
    return sent


def main() -> int:
    dist.init_process_group("gloo")
    rank, ranks, store = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    job = Job(rank, rank, ranks, ranks, torch.device("cpu"), "gloo", store)
    flags = ["--ranks", str(ranks), "--mesh", sys.argv[1], "--rank", str(rank), "--dtype", "fp32"]
    keys = []
    for mesh in sys.argv[1].split(","):
        flags[3] = mesh
        words = [*flags, "--model", "decoder-nano", "--sequence-length", "32"]
        keys += traffic.plan(traffic.parse_args(words))
    records = [recorded(key, job) for key in keys]
    dist.barrier()
    dist.destroy_process_group()
    wrong = 0
    for key, record in zip(keys, records, strict=True):
        played = said(key)
        more, less = record - played, played - record
        verdict = f"recorded more {dict(more)}, played more {dict(less)}" if more or less else "same"
        wrong += record != played
        total = sum(size * count for (_, _, size), count in record.items())
        print(f"{key['mesh']} rank {rank}: {record.total()} calls, {total} bytes: {verdict}\n", end="")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
