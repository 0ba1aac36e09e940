"""Roles of the ranks in the RPC scripts, trainers, servers and the master, and their devices."""

import argparse
import shlex
import sys
from dataclasses import replace
from typing import Any

import torch

from common.rpc import Roles
from harness.benchmark import find_world
from harness.exits import refuse, words_of


def split_roles(
    world_size: int,
    trainers: int | None = None,
    servers: int | None = None,
    *,
    master: bool = False,
    per_server: int = 2,
) -> Roles:
    """Return the roles of a world, all on the CPU. Refuses counts that do not add up to its size.
    By default, the servers follow from the trainers, or one rank in `per_server` is a server."""
    workers = world_size - 1 if master else world_size
    if servers is None:
        servers = max(1, workers - trainers if trainers else workers // per_server)
    trainers = trainers or max(1, workers - servers)
    last = trainers + servers
    roles = Roles(range(trainers), range(trainers, last), last if master else None)
    total = last + 1 if master else last
    if total != world_size:
        parts = f"{roles} and a master" if master else str(roles)
        more = f"e.g. torchrun --nproc-per-node {total} {shlex.join(words_of(sys.argv[0]))}"
        refuse(f"{parts} require {total} processes, got {world_size}; {more}")
    return roles


def assign_roles(
    args: argparse.Namespace,
    cuda_trainers: int | None = None,
    cuda_servers: int | None = None,
    **counts: Any,
) -> Roles:
    """Return the roles of this job. Refuses devices and channels that are not available. counts: of
    `split_roles`. cuda_trainers, cuda_servers: how many, the last of each role, are on CUDA; by
    default --device and --server-device decide."""
    _, _, world_size, _ = find_world()
    roles = split_roles(world_size, **counts)
    cuda = args.device == "cuda" or (args.device == "auto" and torch.cuda.is_available())
    if cuda_trainers is None:
        cuda_trainers = len(roles.trainers) if cuda else 0
    if cuda_servers is None:
        server_cuda = cuda if args.server_device == "auto" else args.server_device == "cuda"
        cuda_servers = len(roles.servers) if server_cuda else 0
    on_cuda = frozenset(roles.trainers[::-1][:cuda_trainers])
    on_cuda |= frozenset(roles.servers[::-1][:cuda_servers])
    if on_cuda and not torch.cuda.is_available():
        refuse("trainers or servers on CUDA: torch sees no CUDA device here; try --device cpu")
    channels = ",".join(args.rpc_channels or ["auto"])
    if not on_cuda and all(name.startswith("cuda_") for name in channels.split(",")):
        refuse(f"--rpc-channels {channels} requires CUDA, but all ranks are on the CPU; try basic")
    default = "nccl" if on_cuda.issuperset(roles.trainers) else "gloo"
    return replace(roles, cuda=on_cuda, backend=args.backend or default)


def args_of_rank(args: argparse.Namespace, roles: Roles, **changes: Any) -> argparse.Namespace:
    """Return a copy of the flags for `Benchmark`, with the device and the backend of this rank:
    gloo for servers and the master, which do not join the trainers' groups."""
    rank, _, _, _ = find_world()
    backend = roles.backend if rank in roles.trainers else "gloo"
    of_rank = {"device": roles.device(rank), "backend": backend}
    return argparse.Namespace(**vars(args) | of_rank | changes)
