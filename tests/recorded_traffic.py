"""A step of each mesh on real gloo ranks: does the flight recorder have what traffic.py says?

    torchrun --standalone --nproc-per-node 4 tests/recorded_traffic.py dp4,tp4,pp4:1f1b

Each rank looks at itself. gloo makes an all-reduce of a reduce-scatter, of the same bytes, and the
recorder has that: so the reduce-scatters of traffic.py are taken for all-reduces here. Of an
all-gather into a list (DTensor's) the recorder of gloo has what a rank gives: it counts times the
ranks. It has no messages between two ranks: those of a pipeline are not compared.
"""

import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

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
    world: Any = dist.group.WORLD
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
        axis, ranks = axes[entry["process_group"][0]]
        sizes = []
        for side in ("input", "output"):
            width = [BYTES[name] for name in entry[f"{side}_dtypes"]]
            counts = [torch.Size(shape).numel() for shape in entry[f"{side}_sizes"]]
            sizes.append(sum(a * b for a, b in zip(width, counts, strict=True)))
        if entry["profiling_name"] == "gloo:all_gather":
            sizes = [size * len(ranks) for size in sizes[:1]]
        sent[axis, traffic.collective_of(entry["profiling_name"]), max(sizes)] += 1
    return sent


def said(key: Key) -> Sent:
    """The same step, as traffic.py plays it."""
    sent: Sent = Counter()
    for axis, collectives in traffic.play(key).calls.items():
        for collective, sizes in collectives.items():
            if collective in ("send", "recv"):
                continue
            name = "all_reduce" if collective == "reduce_scatter" else collective
            for size, count in sizes.items():
                sent[axis, name, size] += count
    return sent


def verdict(record: Sent, played: Sent) -> str:
    if record == played:
        return "same"
    return f"recorded more {dict(record - played)}, played more {dict(played - record)}"


def main() -> int:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    job = Job(rank, rank, ranks, ranks, torch.device("cpu"), "gloo", dist.HashStore())
    keys = []
    for mesh in sys.argv[1].split(","):
        place = ["--ranks", str(ranks), "--rank", str(rank), "--mesh", mesh]
        model = [
            "--model",
            "decoder-nano",
            "--sequence-length",
            "32",
            "--dtype",
            "fp32",
            "--optimizer",
            "sgd",
        ]
        keys += traffic.plan(traffic.parse_args([*place, *model]))
    records = [recorded(key, job) for key in keys]
    dist.barrier()
    dist.destroy_process_group()
    same = True
    for key, record in zip(keys, records, strict=True):
        played = said(key)
        same &= record == played
        total = sum(size * count for (_, _, size), count in record.items())
        sent = f"{record.total()} calls, {total} bytes"
        print(f"{key['mesh']} rank {rank}: {sent}: {verdict(record, played)}\n", end="", flush=True)
    return int(not same)


if __name__ == "__main__":
    sys.exit(main())
