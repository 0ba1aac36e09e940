"""A step of each mesh on real gloo ranks: do they send what traffic.py says?

    torchrun --standalone --nproc-per-node 4 tests/recorded_traffic.py dp4,tp4,pp4:1f1b

Each rank looks at itself. gloo's flight recorder has its collectives. gloo makes an all-reduce of a
reduce-scatter, of the same bytes, and the recorder has that: so the reduce-scatters of traffic.py
are taken for all-reduces here. Of an all-gather into a list (DTensor's) the recorder has what a
rank gives: it counts times the ranks. The recorder has no sends and receives: those are counted
where torch hands them to gloo. The bytes of weights, gradients and optimizer are compared as well.
Flags after the meshes go to traffic.py, e.g. --optimizer sgd.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import traffic
from common.groups import Group, Job
from common.watchdog import recorded_collectives
from common.workloads.axes import train
from common.workloads.meshes import Key, open_meshes, parse_mesh

Sent = traffic.Calls
BYTES = {"Float": 4, "Int": 4, "Long": 8, "Byte": 1}
MODEL = ["--model", "decoder-nano", "--sequence-length", "32", "--dtype", "fp32"]


@contextmanager
def counted_messages() -> Iterator[Sent]:
    """Within it the sends and receives of this process count: group, send or recv, bytes."""
    messages: Sent = Counter()

    def counting(name: str) -> Callable[..., Any]:
        original = getattr(dist.ProcessGroup, name)

        def call(group: Any, tensors: list[torch.Tensor], *place: int) -> Any:
            messages[group.group_name, name, sum(tensor.nbytes for tensor in tensors)] += 1
            return original(group, tensors, *place)

        return call

    functions: dict[str, Any] = {name: counting(name) for name in traffic.MESSAGES}
    with mock.patch.multiple(dist.ProcessGroup, **functions):
        yield messages


def recorded(key: Key, job: Job) -> tuple[Sent, dict[str, int]]:
    """What this rank sends in the third step of a mesh, and the bytes that it holds afterwards."""
    world: Any = dist.group.WORLD
    meshes = open_meshes(parse_mesh(key["mesh"]), [], job, Group((), world, world))
    trainer = train(key, job, meshes, traffic.optimizer_of(key))
    for _ in range(2):
        trainer.step()
    dist.barrier()
    before = len(recorded_collectives())
    with counted_messages() as messages:
        trainer.step()
    axes = traffic.groups_of(meshes)
    sent: Sent = Counter()
    for (group, name, size), count in messages.items():
        sent[axes[group][0], name, size] += count
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
    return sent, traffic.held_by(trainer)


def as_gloo(calls: traffic.Calls) -> Sent:
    """The calls of traffic.py, with the all-reduce that gloo makes of a reduce-scatter."""
    sent: Sent = Counter()
    for (axis, collective, size), count in calls.items():
        name = "all_reduce" if collective == "reduce_scatter" else collective
        sent[axis, name, size] += count
    return sent


def verdict(record: Counter[Any], played: Counter[Any]) -> str:
    if record == played:
        return "same"
    return f"recorded more {dict(record - played)}, played more {dict(played - record)}"


def main() -> int:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    job = Job(rank, rank, ranks, ranks, torch.device("cpu"), "gloo", dist.HashStore())
    _, meshes, *flags = sys.argv
    place = ["--ranks", str(ranks), "--rank", str(rank)]
    keys = []
    for mesh in meshes.split(","):  # one by one: only those with ep have experts
        keys += traffic.plan(traffic.parse_args([*place, "--mesh", mesh, *MODEL, *flags]))
    records = [recorded(key, job) for key in keys]
    dist.barrier()
    dist.destroy_process_group()
    same = True
    for key, (record, held) in zip(keys, records, strict=True):
        step = traffic.play(key)
        sends = verdict(record, as_gloo(step.calls))
        holds = verdict(Counter(held), Counter(step.held_bytes | {"activations": 0}))
        same &= sends == holds == "same"
        total = sum(size * count for (_, _, size), count in record.items())
        messages = sum(count for (_, name, _), count in record.items() if name in traffic.MESSAGES)
        sent = f"{record.total()} calls, {messages} of them messages, {total} bytes: {sends}"
        print(f"{key['mesh']} rank {rank}: {sent}; holds: {holds}\n", end="", flush=True)
    return int(not same)


if __name__ == "__main__":
    sys.exit(main())
