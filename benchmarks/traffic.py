#!/usr/bin/env python3
"""How much does a training step communicate on a mesh of any size? Computed without its ranks.

Nothing is measured. One process simulates one rank of a job: the training step of parallel_sweep.py
with AdamW, where tensors have a shape but no memory, and collectives are counted and return at
once. With --measured, the script also computes how long the collectives take, from times that
collectives.py has measured.

    bytes     size of a collective as in nccl-tests: of the input or output of a rank, whichever is
              larger
    bus       bytes * factor: the bytes that a ring algorithm sends over each link. The factor for n
              ranks is 2 (n - 1) / n for all_reduce; (n - 1) / n for all_gather, reduce_scatter and
              all_to_all; and 1 otherwise
    TFLOP     FLOPs of the model for the global batch, divided by the number of ranks
    ms        sum over calls of the time that collectives.py has measured for the same collective on
              the same number of ranks and of ranks per node. Times are interpolated between two
              measured sizes, and never extrapolated

    python benchmarks/traffic.py --ranks 1024 --mesh dp128tp8,dp1024,dp32pp4tp8:1f1b
    python benchmarks/traffic.py --ranks 16 --mesh dp16,dp2tp8 --measured collectives.jsonl
    torchrun --nproc-per-node 8 benchmarks/parallel_sweep.py --mesh dp8,tp8   # times such a step

Calls and bytes are per rank and step. A test compares them with those of 4 real ranks over gloo.
Written for this project, BSD-3-Clause. docs/traffic.md explains how to read the table.
"""

import argparse
import logging
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness import cli, exits

exits.report_missing_packages()

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.tensor import DTensor
from torch.nn import Module
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.workloads.decoder import DECODERS, DTYPES, flops_per_token
from benchmarks.workloads.meshes import (
    EXPERTS,
    Key,
    Mesh,
    config_of,
    misfit,
    open_meshes,
    parse_mesh,
    refuse_without_backends,
)
from benchmarks.workloads.operations import OPERATIONS
from benchmarks.workloads.room import free_on_host
from common.groups import Group, Job
from common.stats import Estimate, drop_wide_interval
from common.table import Cell, Columns, ends, fitted, metric
from harness.benchmark import folded, omitted, report_lines, terminal_width
from harness.environment import count_of
from harness.report import Case, Report, load
from readers.isolated import (
    IsolatedTimes,
    Layout,
    collective_times,
    isolated_time,
    layout_of,
    total,
)

if TYPE_CHECKING:
    from benchmarks.workloads.axes import Trainer

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast")
MESSAGES = ("send", "recv")
NOT_RUN = "skipped: counted from shapes, nothing was executed"
BYTES_PER_TOKEN = 24  # memory of this process: tensors of integers are real, and exist three times
Call = tuple[str, str, int]  # axis, collective, bytes
Calls = Counter[Call]  # number of each in a step
# keys that a case must share with one of parallel_sweep.py to be compared with it
SAME = ("model", "dtype", "sequence_length", "global_batch", "microbatches", "experts")
PART_OF_DP = ("dp", "replicas", "same_experts")  # axes that parallel_sweep.py reports as dp


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = cli.Parser(__doc__)
    add = parser.add_argument
    whole = partial(add, type=cli.positive_int, metavar="N")
    whole("--ranks", required=True, help="world size of the simulated job, e.g. 1024")
    add(
        "--mesh",
        type=cli.list_of(parse_mesh),
        help="meshes in the syntax of parallel_sweep.py (default: dp over all ranks)",
    )
    add(
        "--rank",
        type=cli.list_of(cli.number(int, 0)),
        default=[0],
        metavar="N,...",
        help="ranks to simulate, e.g. one per pipeline stage (default: 0)",
    )
    whole("--gpus-per-node", default=8, help="number of consecutive ranks per node (default: 8)")
    add("--model", choices=list(DECODERS), default="decoder-7b", help="(default: decoder-7b)")
    add("--dtype", choices=list(DTYPES), default="bf16", help="dtype of weights (default: bf16)")
    whole("--global-batch", help="sequences per step, over all ranks (default: 2 per rank)")
    whole("--sequence-length", help="tokens per sequence (default: that of the model)")
    whole("--microbatches", help="microbatches of a pipeline (default: 2 per stage)")
    add(
        "--measured",
        nargs="+",
        default=[],
        metavar="REPORT",
        help="reports of collectives.py, from which to compute how long the collectives take",
    )
    add(
        "--against",
        metavar="REPORT",
        help="report of parallel_sweep.py with the same meshes, to compare the computed times with",
    )
    add("--wide", action="store_true", help="print all columns, also on a terminal")
    report = cli.checked(str, bool, "a report", "e.g. report.jsonl")
    add("-J", "--json", type=report, metavar="PATH", help="write a report; - is stdout")
    args = parser.parse_args(argv)
    refuse_without_backends(parser)
    # private API; works in torch 2.9, 2.14 and 2.15
    if not torch._C._dispatch_has_kernel_for_dispatch_key("c10d::scatter_", "Meta"):
        lacks = f"whose collectives accept fake tensors; this one is {torch.__version__}"
        parser.error(f"this script requires a newer torch, {lacks}")
    cli.check_output("--json", args.json)
    args.mesh = args.mesh or [parse_mesh(f"dp{args.ranks}")]
    if args.against and not args.measured:
        parser.error("--against requires --measured, e.g. --measured collectives.jsonl")
    return args


def plan(args: argparse.Namespace) -> list[Key]:
    """The key of each mesh and rank. Raises ValueError for settings that do not fit together."""
    beyond = [rank for rank in args.rank if rank >= args.ranks]
    if beyond:
        raise ValueError(f"--rank: expected 0 to {args.ranks - 1}, got {beyond[0]}; e.g. --rank 0")
    shared = {
        "model": args.model,
        "dtype": args.dtype,
        "optimizer": "adamw",
        "sequence_length": args.sequence_length or DECODERS[args.model].context,
        "global_batch": args.global_batch or 2 * args.ranks,
        "experts": EXPERTS if any(mesh.ep > 1 for mesh in args.mesh) else 0,
        "gpus_per_node": args.gpus_per_node,
        "world_size": args.ranks,
        "ranks": args.ranks,
        "device": "none",
        "backend": "fake",
    }
    keys = []
    for mesh in args.mesh:
        microbatches = (args.microbatches or 2 * mesh.pp) if mesh.pp > 1 else 1
        for rank in args.rank:
            keys.append({"mesh": mesh.name, "rank": rank, "microbatches": microbatches, **shared})
        if problem := misfit(keys[-1]):
            raise ValueError(problem)
    sequences, tokens = shared["global_batch"], shared["sequence_length"]
    needed, free = sequences * tokens * BYTES_PER_TOKEN, free_on_host()
    if needed > free:
        batch = f"a global batch of {sequences:,} sequences of {tokens:,} tokens"
        room = f"{cli.show_size(needed)} bytes of memory, but only {cli.show_size(free)} are free"
        raise ValueError(f"{batch} needs {room}; e.g. --sequence-length 4096 --global-batch 2048")
    return keys


# [core]
# This code uses private parts of torch. They work with torch 2.11, 2.14 and 2.15.


@contextmanager
def fake_world(rank: int, ranks: int) -> Iterator[dist.Store]:
    """Make this process a rank of a job without other processes. Collectives do nothing."""
    store: dist.Store = FakeStore()
    dist.init_process_group("fake", store=store, rank=rank, world_size=ranks)
    try:
        yield store
    finally:
        dist.destroy_process_group()


class ShapesOnly(TorchDispatchMode):
    """A mode in which tensors have a shape but no memory, and collectives are reported to `listen`.

    Tensors of integers and booleans are real, as long as they only depend on each other: positions,
    masks, splits.
    """

    def __init__(self, listen: Callable[[str, str, int, str], None]) -> None:
        """listen: called with the name of an operation of c10d, the name of its process group, the
        bytes of its input or output, whichever is larger, and the dtype, e.g. bfloat16."""
        super().__init__()
        self.listen = listen
        self.shapes = FakeTensorMode(allow_non_fake_inputs=True)
        self.chunks = mock.patch.object(_fsdp_param, "_chunk_with_empty", chunks_alike)

    def __enter__(self) -> "ShapesOnly":
        self.shapes.__enter__()
        self.chunks.start()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.chunks.stop()
        self.shapes.__exit__(*error)

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if set(types) - {FakeTensor}:  # a DTensor, which will dispatch on its local tensor
            return NotImplemented
        if operation.namespace == "prim":  # attributes of a tensor, e.g. its device
            return operation(*args, **kwargs)
        if operation is torch.ops.aten.index_put_.default and types:
            return args[0]  # FakeTensorMode cannot know how many elements a mask selects
        result = None
        if types or makes_floats(operation, args, kwargs):
            result = operation(*args, **kwargs)
        else:
            with unset_fake_temporarily():
                result = operation(*args, **kwargs)
        if operation.namespace in ("c10d", "_c10d_functional"):
            self.report(operation, args, result)
        return result

    def report(self, operation: Any, args: Sequence[Any], result: Any) -> None:
        """Call `listen` for an operation of c10d. Operations without a group only wait."""
        values = dict(zip((a.name for a in operation._schema.arguments), args, strict=False))
        group = values.get("group_name")
        if "process_group" in values:
            group = dist.ProcessGroup.unbox(values["process_group"]).group_name
        if group is not None:
            sizes = [bytes_of(value) for value in (*args, result)]
            dtypes = [str(tensor.dtype) for tensor in tensors_in((args, result))]
            dtype = dtypes[0].removeprefix("torch.") if dtypes else ""
            self.listen(operation._schema.name, group, max(sizes), dtype)


def makes_floats(operation: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether an operation creates floating-point tensors, without taking any tensor."""
    if tensors_in((args, kwargs)):
        return False
    made = tensors_in(operation(*args, **kwargs))
    return not made or made[0].is_floating_point()


def chunks_alike(whole: Tensor, count: int, dim: int) -> list[Tensor]:
    """Split a weight into `count` chunks, the last of which may be empty.

    FSDP only uses one of them. Since chunks have no memory, all chunks of a length are the same
    tensor: creating a thousand views would take long.
    """
    size = whole.shape[dim]
    length = -(-size // count)  # rounded up, as in torch.chunk
    full, rest = divmod(size, max(1, length))
    lengths = [length] * full + [rest] * (full < count)
    lengths += [0] * (count - len(lengths))
    by_length = {length: whole.narrow(dim, 0, length) for length in set(lengths)}
    return [by_length[length] for length in lengths]


def tensors_in(tree: Any) -> list[Tensor]:
    return [leaf for leaf in _pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def bytes_of(tree: Any) -> int:
    """Bytes of the tensors in nested lists. For a DTensor, those of this rank."""
    tensors = tensors_in(tree)
    return sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in tensors)


# [/core]


@dataclass
class Step:
    """The communication of one rank in a step, and the memory that it uses afterwards."""

    calls: Calls
    ranks: dict[str, list[int]]  # axis -> the ranks of this rank's group
    held_bytes: dict[str, int]  # of parameters, gradients and optimizer
    dtypes: dict[Call, str] = field(default_factory=dict)  # e.g. bfloat16

    def dtype_of(self, axis: str, collective: str, size: int) -> str:
        """The dtype of a call. For a sendrecv it is that of a send or receive."""
        names = MESSAGES if collective == "sendrecv" else (collective,)
        return next((d for name in names if (d := self.dtypes.get((axis, name, size)))), "")


def simulate(key: Key) -> Step:
    """Train as the rank of a key, without the other ranks, and record one step."""
    rank, ranks, per_node = key["rank"], key["world_size"], key["gpus_per_node"]
    with fake_world(rank, ranks) as store:
        world: Any = dist.group.WORLD
        cpu = torch.device("cpu")
        return record_step(
            key, Job(rank, rank % per_node, ranks, per_node, cpu, "fake", store, world)
        )


def record_step(key: Key, job: Job) -> Step:
    from benchmarks.workloads.axes import train  # takes seconds to import; --help does not wait

    mesh = parse_mesh(key["mesh"])
    meshes = open_meshes(mesh, [], job, Group((job.rank,), job.control, job.control))
    groups = groups_of(meshes)
    heard: Counter[tuple[str, str, int, str]] = Counter()

    def listen(operation: str, group: str, size: int, dtype: str) -> None:
        heard[operation, group, size, dtype] += 1

    with ShapesOnly(listen):
        trainer = train(key, job, meshes, adamw)
        for _ in range(steps_before(mesh)):
            trainer.step()
        heard.clear()
        trainer.step()
    calls: Calls = Counter()
    dtypes: dict[Call, str] = {}
    for (operation, group, size, dtype), count in heard.items():
        axis, _ = groups[group]
        call = (axis, collective_of(operation), size)
        calls[call] += count
        dtypes[call] = dtype
    return Step(calls, dict(groups.values()), held_by(trainer), dtypes)


def steps_before(mesh: Mesh) -> int:
    """Number of steps before the one that is counted, so that it is like all later ones. DDP
    rebuilds its buckets in the second step, and a pipeline sets up its stages in the first one."""
    return 2 if mesh.ddp else int(mesh.pp > 1)


def adamw(model: Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


def groups_of(meshes: dict[str, Any]) -> dict[str, tuple[str, list[int]]]:
    """Name of a process group of this rank -> its axis and its ranks."""
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
    for name in (*COLLECTIVES, *MESSAGES):
        if name.replace("_", "") in word:
            return name
    raise ValueError(f"unknown collective {operation}")


def held_by(trainer: "Trainer") -> dict[str, int]:
    """The bytes that a rank stores after a step, without scalars of the optimizer, such as AdamW's
    step count."""
    weights = list(trainer.model.parameters())
    states = tensors_in([*trainer.optimizer.state.values()])
    return {
        "parameters": bytes_of(weights),
        "gradients": bytes_of([weight.grad for weight in weights]),
        "optimizer": bytes_of([tensor for tensor in states if tensor.dim() > 0]),
    }


def case_of(key: Key, title: str, alone: IsolatedTimes, swept: Sequence[Case]) -> Case:
    """Simulate a mesh. If this version of torch cannot, the case fails.

    alone: the times that collectives.py has measured. swept: the cases of parallel_sweep.py.
    """
    name = f"{key['mesh']}, rank {key['rank']}"
    print(f"# simulating {name}", file=sys.stderr, flush=True)
    case = Case(key=key, ranks=[key["rank"]], check=NOT_RUN, name=name, table=title)
    try:
        step = simulate(key)
        case.metrics = derive(key, step)
        if alone:
            case.metrics |= timed(key, step, alone)
        if swept:
            case.metrics |= compared(key, case.metrics, swept)
    except Exception as error:
        case.check = f"failed: {exits.describe(error)}"
    return case


def bus_factor(collective: str, ranks: int) -> float:
    """busbw / algbw, as in nccl-tests' doc/PERFORMANCE.md."""
    return 1.0 if collective in MESSAGES else OPERATIONS[collective].bus(ranks)


def derive(key: Key, step: Step) -> dict[str, Any]:
    """The metrics of a case. ring_bytes: bytes that the rank sends if its collectives are rings.
    Data that it receives from a single rank, by recv, is not included."""
    tokens = key["global_batch"] * key["sequence_length"]
    flops = flops_per_token(config_of(key)) * tokens / key["world_size"]
    m: dict[str, Any] = {"flops": flops, "ring_bytes": 0.0, "all_bytes": 0}
    m |= {f"{name}_bytes": size for name, size in step.held_bytes.items()}
    across = []
    for axis in dict.fromkeys(axis for axis, _, _ in step.calls):
        ranks = step.ranks[axis]
        nodes = {rank // key["gpus_per_node"] for rank in ranks}
        m |= {f"{axis}_ranks": len(ranks), f"{axis}_nodes": len(nodes)}
        if len(nodes) > 1:
            across.append(axis)
    totals: Counter[str] = Counter()  # per axis, and per axis and collective
    for (axis, collective, size), count in step.calls.items():
        for name in (axis, f"{axis}_{collective}"):
            totals[f"{name}_calls"] += count
            totals[f"{name}_bytes"] += size * count
        m["all_bytes"] += size * count
        if collective != "recv":
            m["ring_bytes"] += size * count * bus_factor(collective, m[f"{axis}_ranks"])
    return m | totals | {"across_nodes": ", ".join(across)}


# -- times of the collectives, from reports of collectives.py --------------------------------------


def read(flag: str, path: str) -> Report:
    try:
        return load(path)
    except ValueError as error:
        raise ValueError(f"{flag}: {error}") from None


def read_measured(paths: Sequence[str]) -> IsolatedTimes:
    """The times in reports of collectives.py, all on one kind of device. Later reports add to
    earlier ones. Raises ValueError with one line."""
    found: dict[tuple[str, Layout, str], dict[int, Estimate]] = {}
    kinds: dict[tuple[Any, Any], str] = {}
    for path in paths:
        report = read("--measured", path)
        try:
            of_report = collective_times(report)
            of_cases = {(case.key["backend"], case.key["device"]) for case in report.cases}
        except ValueError as error:
            raise ValueError(f"--measured {path}: {error}") from None
        except (AttributeError, LookupError, TypeError) as error:
            what = f"an entry is not what collectives.py writes ({type(error).__name__}: {error})"
            raise ValueError(f"--measured {path}: {what}") from None
        if not of_report:
            raise ValueError(f"--measured {path}: no case has a time")
        kinds |= dict.fromkeys(of_cases, path)
        for kind, times in of_report.items():
            sizes = {size: time for size, time in times.items() if size > 0}
            found[kind] = found.get(kind, {}) | sizes
    if len(kinds) > 1:
        parts = [f"{backend} on {device} ({path})" for (backend, device), path in kinds.items()]
        raise ValueError(f"--measured: expected reports of one backend, got {', '.join(parts)}")
    return found


def timed(key: Key, step: Step, alone: IsolatedTimes) -> dict[str, Any]:
    """Seconds of the collectives of a step, for each axis and in total, as if they ran one after
    the other.

    An axis has no time if one of its collectives was not measured on such a group or around such a
    size. `{axis}_missing` then names the collective and the command that measures it.
    """
    m: dict[str, Any] = {}
    parts: list[Estimate] = []
    for axis in dict.fromkeys(axis for axis, _, _ in step.calls):
        layout = layout_of(rank // key["gpus_per_node"] for rank in step.ranks[axis])
        of_axis: list[Estimate] = []
        lacking: dict[Call, str] = {}
        others: dict[str, None] = {}  # collectives that were measured with another dtype
        for call, count in messages_once(step.calls, axis).items():
            _, collective, size = call
            dtype = step.dtype_of(*call)
            if sum(layout) == 1:  # a group of one rank: at most a copy
                continue
            try:
                one, used = isolated_time(alone, collective, layout, dtype, size)
            except ValueError as error:
                lacking[call] = str(error)
                continue
            of_axis.append(one * count)
            if used != dtype:
                others[f"{collective} was measured with {used}, not with {dtype}"] = None
        if lacking:
            m[f"{axis}_missing"] = why_missing(key, step, axis, layout, lacking)
        else:
            m[f"{axis}_s"] = drop_wide_interval(total(of_axis))
        if others:
            m[f"{axis}_other_dtype"] = "; ".join(others)
        parts += of_axis
    if not any(name.endswith("_missing") for name in m):
        m["communication_s"] = drop_wide_interval(total(parts))
    return m


def messages_once(calls: Calls, axis: str) -> Calls:
    """The calls on an axis. A send and a receive of the same size become one sendrecv."""
    found: Calls = Counter()
    for (of, collective, size), count in calls.items():
        if of == axis and collective in MESSAGES:
            call = (axis, "sendrecv", size)
            found[call] = max(found[call], count)
        elif of == axis:
            found[of, collective, size] = count
    return found


def why_missing(
    key: Key, step: Step, axis: str, layout: Layout, lacking: Mapping[Call, str]
) -> str:
    """Names a collective without a time, the reason, and the command that measures it."""
    (_, collective, size), why = next(iter(lacking.items()))
    more = f" (and {len(lacking) - 1} more)" if len(lacking) > 1 else ""
    names = [name for name in OPERATIONS if name in {call[1] for call in lacking}]
    sizes = [call[2] for call in lacking]
    dtypes = dict.fromkeys(step.dtype_of(*call) or "float32" for call in lacking)
    spread, ranks_per_node = len(layout) > 1, layout[0]
    script = exits.as_started("benchmarks/collectives.py")
    words = ["torchrun", *(["--nnodes", str(len(layout))] if spread else []), "--nproc-per-node"]
    if spread and set(layout) == {1} and key["gpus_per_node"] > 1:  # each group is a rail
        words += [str(key["gpus_per_node"]), script, "--groups", "cross"]
    else:
        words += [str(ranks_per_node), script]
        if set(layout) != {ranks_per_node}:
            firsts = [node * ranks_per_node for node in range(len(layout))]
            parts = zip(firsts, layout, strict=True)
            words += ["--groups", ",".join(f"{at}-{at + count - 1}" for at, count in parts)]
    words += ["--collective", ",".join(names), "-d", ",".join(dtypes)]
    least, most = 2 ** (min(sizes).bit_length() - 1), 2 ** max(sizes).bit_length()
    words += ["-b", cli.show_size(least), "-e", cli.show_size(most), "--json", "more.jsonl"]
    what = f"{collective} of {size:,} bytes{more}: {why}"
    return f"{what}; measure it: {' '.join(words)}"


def read_swept(path: str) -> list[Case]:
    """The cases of a report of parallel_sweep.py that have a breakdown by axis. Raises ValueError
    with one line."""
    report = read("--against", path)
    if report.benchmark != "parallel_sweep":
        what = f"expected a report of parallel_sweep.py, got one of {report.benchmark}.py"
        raise ValueError(f"--against {path}: {what}")
    cases = [case for case in report.cases if not case.failed and "compute_s" in case.metrics]
    if not cases:
        raise ValueError(
            f"--against {path}: no case has a breakdown; run parallel_sweep.py without "
            "--no-breakdown"
        )
    return cases


def compared(key: Key, metrics: Mapping[str, Any], swept: Sequence[Case]) -> dict[str, Any]:
    """The exposed time of each axis of this mesh, as parallel_sweep.py has measured it, and its
    ratio to the computed time."""
    of_mesh = [case.key for case in swept if case.key["mesh"] == key["mesh"]]
    if not of_mesh:
        return {"not_compared": "the sweep did not measure this mesh"}
    different = [name for name in (*SAME, "world_size") if of_mesh[0].get(name) != key[name]]
    if different:
        pairs = [
            f"{name} {of_mesh[0].get(name)} in the sweep, {key[name]} here" for name in different
        ]
        return {"not_compared": "; ".join(pairs)}
    measured = next(case for case in swept if case.key is of_mesh[0]).metrics
    found: dict[str, Any] = {}
    for axis in parse_mesh(key["mesh"]).axes:
        names = PART_OF_DP if axis == "dp" else (axis,)
        parts = [metrics[f"{name}_s"] for name in names if f"{name}_s" in metrics]
        if not parts or any(f"{name}_missing" in metrics for name in names):
            continue
        alone_s, exposed_s = drop_wide_interval(total(parts)), measured[f"exposed_{axis}_s"]
        found |= {f"{axis}_alone_s": alone_s, f"{axis}_exposed_s": exposed_s}
        if not (exposed_s.low is not None and exposed_s.may_be(0)) and alone_s.value > 0:
            found[f"{axis}_exposed_over_alone"] = drop_wide_interval(exposed_s / alone_s)
    return found


# -- the table and the lines below it --------------------------------------------------------------


def columns_of(axes: list[str], has_times: bool) -> Columns:
    columns: Columns = {
        "mesh": lambda case: case.key["mesh"],
        "rank": lambda case: str(case.key["rank"]),
    }
    if has_times:
        columns["all axes\n(ms)"] = metric("communication_s", 1e3)
        columns["95% ci\n(ms)"] = ends("communication_s", 1e3)
        for axis in axes:
            columns[f"{axis}\n(ms)"] = metric(f"{axis}_s", 1e3)
            columns[f"{axis} 95% ci\n(ms)"] = ends(f"{axis}_s", 1e3)
    for axis in axes:
        columns[f"{axis}\ncalls"] = metric(f"{axis}_calls", digits=0)
        columns[f"{axis}\n(bytes)"] = Cell(f"{axis}_bytes", cli.show_size)
    columns["across\nnodes"] = lambda case: case.metrics.get("across_nodes") or "-"
    for name in ("parameters", "gradients", "optimizer"):
        columns[f"{name}\n(bytes)"] = Cell(f"{name}_bytes", cli.show_size)
    columns["TFLOP"] = Cell("flops", lambda flops: f"{flops / 1e12:.4g}")
    return columns


def axes_of(cases: list[Case]) -> list[str]:
    """The axes on which a rank of these cases communicates."""
    names = dict.fromkeys(name for case in cases for name in case.metrics)
    return [name.removesuffix("_ranks") for name in names if name.endswith("_ranks")]


def axis_line(case: Case, axis: str) -> str:
    """`dp8, rank 0: dp, 8 ranks on 1 node: all_gather 10 x, 4G (bus 3.5G); ...`"""
    m = case.metrics
    parts = []
    for collective in (*COLLECTIVES, *MESSAGES):
        if calls := m.get(f"{axis}_{collective}_calls"):
            size = m[f"{axis}_{collective}_bytes"]
            bus = cli.show_size(size * bus_factor(collective, m[f"{axis}_ranks"]))
            parts.append(f"{collective} {calls:,} x, {cli.show_size(size)} (bus {bus})")
    nodes = count_of(m[f"{axis}_nodes"], "node")
    return f"{case.name}: {axis}, {m[f'{axis}_ranks']} ranks on {nodes}: {'; '.join(parts)}"


def lines_of_times(case: Case) -> list[str]:
    """Axes without a time or with the time of another dtype, and the comparison with the sweep."""
    lines, m = [], case.metrics
    for axis in axes_of([case]):
        if why := m.get(f"{axis}_missing"):
            lines.append(f"no time for {axis}: {why}")
        if other := m.get(f"{axis}_other_dtype"):
            lines.append(f"{axis}: {other}")
    for axis in parse_mesh(case.key["mesh"]).axes:
        if exposed_s := m.get(f"{axis}_exposed_s"):
            ratio = m.get(f"{axis}_exposed_over_alone")
            alone = f"the collectives of {axis} take {m[f'{axis}_alone_s']} alone"
            exposed = f"parallel_sweep.py measured {exposed_s} as exposed"
            end = (
                f": exposed / alone = {ratio.text(digits=2)}"
                if ratio
                else ", which may be 0: no ratio"
            )
            lines.append(f"{alone}; {exposed}{end}")
    if why := m.get("not_compared"):
        lines.append(f"not compared with parallel_sweep.py: {why}")
    return [f"{case.name}: {line}" for line in lines]


def answer(cases: list[Case]) -> str | None:
    """The bytes that a rank sends under the meshes that send the least and the most. They are
    counted, so there is no uncertainty."""
    sent: dict[str, tuple[float, int]] = {}  # mesh -> bytes of the rank that sends the most
    for case in cases:
        mine = (case.metrics["ring_bytes"], case.metrics["all_bytes"])
        mesh = case.key["mesh"]
        sent[mesh] = max(sent.get(mesh, mine), mine)
    if not sent:
        return None
    least, *others = sorted(sent, key=lambda mesh: sent[mesh])
    meshes = least
    if others and sent[others[-1]] == sent[least]:
        meshes, others = f"all {len(sent)} meshes", []
    ring, size = map(cli.show_size, sent[least])
    sentence = f"with ring algorithms, a rank sends {ring} bytes per step under {meshes}"
    if others:
        ring, most = map(cli.show_size, sent[others[-1]])
        sentence += f", the minimum, and {ring} under {others[-1]}, the maximum"
        size += f" and {most}"
    return f"{sentence}; its collectives add up to {size} bytes"


def answer_in_seconds(cases: list[Case]) -> str | None:
    """How long the collectives of a step take under each mesh, on the rank that takes longest."""
    longest: dict[str, Estimate] = {}
    for case in cases:
        if time := case.metrics.get("communication_s"):
            mesh = case.key["mesh"]
            longest[mesh] = max(longest.get(mesh, time), time, key=lambda one: one.value)
    if not longest:
        return None
    times = [f"{time} under {mesh}" for mesh, time in longest.items()]
    return f"one after the other, the collectives of a step take {', '.join(times)}"


def answer_off(cases: list[Case]) -> str | None:
    """The ratio of the exposed time in parallel_sweep.py to the computed time, for each axis."""
    off: list[str] = []
    for case in cases:
        for axis in parse_mesh(case.key["mesh"]).axes:
            if ratio := case.metrics.get(f"{axis}_exposed_over_alone"):
                computed = "" if off else " the computed time"
                off.append(f"{ratio.as_factor()}{computed} for {axis} of {case.name}")
    return f"the exposed time in parallel_sweep.py is {'; '.join(off)}" if off else None


def environment(args: argparse.Namespace) -> dict[str, Any]:
    """The job as a report describes it, without devices."""
    return {
        "version": cli.version(),
        "torch": torch.__version__,
        "backend": "fake",
        "world_size": args.ranks,
        "num_nodes": -(-args.ranks // args.gpus_per_node),
    }


def main() -> int:
    args = parse_args()
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    max_width = None if args.wide else terminal_width()
    files = [exits.take_stdout()] if args.json == "-" else []
    report = Report("traffic", environment(args), args.json, files=files)
    try:
        alone = read_measured(args.measured)
        swept = read_swept(args.against) if args.against else []
        keys = plan(args)
        replaced = report.start()
    except (ValueError, OSError) as error:
        exits.refuse(str(error))
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    print(cli.first_lines())
    print(f"# PyTorch {torch.__version__}; simulates a job of {count_of(args.ranks, 'rank')}")
    title = "a rank's step: {model}, {sequence_length} tokens, global batch {global_batch}, "
    title = (title + "{dtype}, {optimizer}").format(**keys[0])
    print(f"\n{title}\n")
    for key in keys:
        report.add(case_of(key, title, alone, swept))
    simulated = [case for case in report.cases if not case.failed]
    axes = axes_of(simulated)
    table, hidden = fitted(columns_of(axes, bool(alone)), simulated, max_width)
    print("\n".join([table, *omitted(hidden)]), end="\n\n")
    for case in report.cases:
        if case.failed:
            print(folded(f"{case.name}: {case.check}", max_width))
        for axis in axes:
            if f"{axis}_ranks" in case.metrics:
                print(folded(axis_line(case, axis), max_width))
        for line in lines_of_times(case):
            print(folded(line, max_width))
    for line in report_lines(report, report.path, replaced):
        print(f"# {line}")
    sentences = [find(simulated) for find in (answer, answer_in_seconds, answer_off)]
    answers = [sentence for sentence in sentences if sentence]
    if answers:
        print()
    for sentence in answers:
        print(folded(sentence, max_width))
    lacks = [case for case in simulated if alone and "communication_s" not in case.metrics]
    status = "complete" if len(simulated) == len(keys) and not lacks else "failed"
    report.finish(status, answer=answers)
    return int(status != "complete")


if __name__ == "__main__":
    exits.fast_exit(main())
