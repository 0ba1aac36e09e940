"""Run a script with injected faults: inject.py FAULT[,FAULT...] SCRIPT FLAGS...

A fault patches functions of torch or Python, never of the project. The project's checks and its
watchdog therefore report what they would report on a faulty machine. Unless a comment or docstring
names another rank, a fault affects rank 1.
"""

import copy
import inspect
import itertools
import json
import os
import pkgutil
import resource
import runpy
import shutil
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.futures import Future

RANK = int(os.environ.get("RANK", "0"))
LAST = int(os.environ.get("WORLD_SIZE", "1")) - 1
FAULTS: dict[str, Callable[[], object]] = {}


def fault(function: Callable[[], None]) -> Callable[[], None]:
    """Register a fault. Its name on the command line has hyphens."""
    FAULTS[function.__name__.replace("_", "-")] = function
    return function


def patch(path: str, new: Callable[..., Any], rank: int | None = 1) -> None:
    """Replace a function by `new(real, *arguments)` on a rank; None: on all ranks."""
    place, _, name = path.rpartition(".")
    owner = pkgutil.resolve_name(place)
    real = getattr(owner, name)
    if rank in (None, RANK):
        setattr(owner, name, lambda *args, **kwargs: new(real, *args, **kwargs))


def in_call(path: str, number: int | None, do: Callable[[], object], rank: int | None = 1) -> None:
    """Call `do` before the number-th call of a function; None: before each call."""
    calls = itertools.count(1)

    def call(real: Any, *args: Any, **kwargs: Any) -> Any:
        if number in (None, next(calls)):
            do()
        return real(*args, **kwargs)

    patch(path, call, rank)


def after(path: str, change: Callable[[Any], Any], rank: int | None = 1) -> None:
    """Replace the return value of a function by `change(result)`."""
    patch(path, lambda real, *args, **kwargs: change(real(*args, **kwargs)), rank)


def raising(error: type[Exception], text: str) -> Callable[[], None]:
    def fail() -> None:
        raise error(f"injected: {text}")

    return fail


planted_s = 0.0  # seconds of injected delays in this process, for `planted-time`


def wait(seconds: float) -> None:
    global planted_s
    time.sleep(seconds)
    planted_s += seconds


def busy(seconds: float) -> None:
    """Wait in a busy loop."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def nudge(tensor: torch.Tensor) -> torch.Tensor:
    """Replace the last value, if any, by the next larger number."""
    last = tensor.data.view(-1)[-1:]
    last.copy_(torch.nextafter(last, last + 1))
    return tensor


def limit_files(size: int) -> None:
    """Files of this process cannot grow beyond a size."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def report() -> str:
    return sys.argv[sys.argv.index("--json") + 1]


def save_and_die() -> None:
    shutil.copytree(os.environ["SAVES"], os.environ["LEFT"])
    die()


def out_of_range() -> None:
    """Afterwards the GPU fails in every further call."""
    torch.zeros(4, device="cuda")[torch.tensor([9], device="cuda")].sum().item()


hang = partial(wait, 600)
stop = partial(signal.raise_signal, signal.SIGSTOP)  # like a debugger
die = partial(signal.raise_signal, signal.SIGKILL)  # like the kernel when memory is exhausted
full_memory = raising(torch.OutOfMemoryError, "out of memory")
STEP = "torch.optim.SGD.step"
NEW_OPTIMIZER = "torch.optim.SGD.__init__"
DDP = "torch.nn.parallel.DistributedDataParallel"
MODEL = "torchvision.models.get_model"
GRAPH = "torch.cuda.CUDAGraph.replay"
TRACED = "torch.profiler.record_function.__enter__"
ADD = "torch.Tensor.add_"
ANSWER = "torch.distributed.rpc.internal._run_function"
CALL = "torch.distributed.rpc.rpc_sync"
WRITE = "torch.distributed.checkpoint.filesystem._write_item"
DECODE = "torchvision.transforms.v2.functional.pil_to_tensor"
# function, number of the call (None: each), action before the call, rank (None: all)
IN_CALL: dict[str, tuple[str, int | None, Callable[[], object], int | None]] = {
    # the twelfth step is in a timed block
    "step-raises": (STEP, 12, raising(RuntimeError, "no kernel for this step"), 1),
    "stops": (STEP, 12, stop, 1),
    "leaves": (STEP, 12, partial(os._exit, 0), 1),
    "rank-0-leaves": (STEP, 12, partial(os._exit, 0), 0),
    "device-assert": (STEP, 12, out_of_range, 0),
    "report-removed": (STEP, 12, lambda: os.unlink(report()), 0),
    "stops-in-all-reduce": ("torch.distributed.all_reduce", 60, stop, 1),  # in a timed block
    "slow-rank": (STEP, None, partial(wait, 0.15), 1),  # longer than delays on a busy machine
    "slow-optimizer": (NEW_OPTIMIZER, 1, partial(wait, 12), 1),
    # in the second model of a case
    "twin-raises": (NEW_OPTIMIZER, 2, raising(torch.OutOfMemoryError, "no memory for a twin"), 1),
    "build-raises": (MODEL, 1, full_memory, 1),
    "stuck-in-build": (MODEL, 1, hang, 1),
    "graph-raises": (GRAPH, 4, raising(RuntimeError, "a graph is broken"), 1),
    "profiler-raises": (TRACED, None, raising(RuntimeError, "no profiler"), 1),
    # while the second line of the report is written to disk: `no ddp`
    "disk-hangs": ("os.fsync", 2, hang, 0),
    "full-disk": ("os.fsync", 2, lambda: limit_files(os.path.getsize(report()) + 100), 0),
    "slow-files": ("os.fsync", None, partial(wait, 3.5), 0),
    "late-call": (CALL, 60, partial(wait, 5), 1),
    "failing-call": (CALL, 110, raising(MemoryError, "no room for the gradients"), 1),
    # when rank 2, a server, adds its 40th gradient
    "server-raises": (ADD, 40, full_memory, 2),
    "dies-as-rpc-starts": ("torch.distributed.all_gather_object", 1, die, 1),
    "callee-stops": (ANSWER, 150, stop, LAST),
    "slow-sends": ("torch.distributed.batch_isend_irecv", None, partial(busy, 0.002), 2),
    # for each tensor of a checkpoint
    "slow-writer": (WRITE, None, partial(busy, 0.005), None),
    "disk-fills": (WRITE, 250, partial(limit_files, 4096), 1),
    "dies-in-save": (WRITE, 250, save_and_die, 1),
    # for each image; workers of a DataLoader have the fault if they are forked: --start-method fork
    "slow-decoder": (DECODE, None, partial(wait, 0.005), None),
}


@fault
def planted_time() -> None:
    """The clock shows only injected delays, plus a microsecond each time it is read.

    Measured times then do not depend on the load of the machine. A step takes as long as the delays
    injected into it on the same rank, without waiting times for other ranks.
    """
    looks = itertools.count()
    time.perf_counter = lambda: planted_s + next(looks) * 1e-6
    patch("random.SystemRandom.getrandbits", lambda *_: 86, None)  # the untimed iterations


@fault
def one_untimed() -> None:
    """Each block has one untimed iteration, so that calls can be counted."""
    patch("random.Random.choice", lambda real, self, choices: choices[0], None)


# -- machine: a rank that dies or is missing, a closed stdout --------------------------------------


@fault
def dies() -> None:
    """Rank 1 is killed in a step. After a restart by torchrun it starts 1 s late and continues."""
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        in_call(STEP, 12, die)
    elif RANK == 1:
        time.sleep(1)


@fault
def waits() -> None:
    """Rank 1 creates the file $MARKER in a step and then waits forever."""
    in_call(STEP, 12, hang)
    in_call(STEP, 12, Path(os.environ["MARKER"]).touch)  # the outer patch, so it runs first


@fault
def never_arrives() -> None:
    """Rank 1 does not join the job."""
    if RANK == 1:
        hang()


@fault
def default_group_fails() -> None:
    """Collectives and messages without a group raise, on all ranks."""
    fail = raising(RuntimeError, "the default group")

    def call(real: Any, *args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(real).bind(*args, **kwargs).arguments
        if given.get("group") is None:
            fail()
        return real(*args, **kwargs)

    def exchange(real: Any, ops: Any) -> Any:
        if any(op.group is dist.group.WORLD for op in ops):
            fail()
        return real(ops)

    of_objects = ("all_gather_object", "gather_object", "broadcast_object_list")
    for name in ("barrier", "all_gather", *of_objects, *OUTPUTS):
        if hasattr(dist, name):
            patch(f"torch.distributed.{name}", call, rank=None)
    patch("torch.distributed.batch_isend_irecv", exchange, rank=None)


@fault
def cyclic_graphs() -> None:
    """Each CUDA graph is in a reference cycle, so that only the garbage collector frees it."""

    def begin(real: Any, graph: Any, *args: Any, **kwargs: Any) -> None:
        graph.itself = graph
        real(graph, *args, **kwargs)

    patch("torch.cuda.CUDAGraph.capture_begin", begin, rank=None)


@fault
def folder_missing() -> None:
    """Rank 1 does not see the folder of its first case below $SAVES, as if it were not mounted."""
    looks = itertools.count(1)

    def is_dir(real: Any, path: Path) -> bool:
        missing = path.is_relative_to(os.environ["SAVES"]) and next(looks) == 1
        return not missing and real(path)

    patch("pathlib.Path.is_dir", is_dir)


@fault
def compiler_fails() -> None:
    """The C++ compiler of rank 1 fails, as on a node without its headers."""
    from torch._inductor import config

    if RANK == 1:
        config.cpp.cxx = (None, "false")


@fault
def reader_gone() -> None:
    """The reader of rank 0's stdout has ended, like `| head`."""
    if RANK == 0:
        reading, writing = os.pipe()
        os.close(reading)
        os.dup2(writing, 1)


# -- training: gradients, replicas, the axes of a mesh ---------------------------------------------


@fault
def drifting_replica() -> None:
    """The optimizer of rank 1 also changes one weight to the next larger number."""

    def step(real: Any, optimizer: Any, *args: Any) -> None:
        real(optimizer, *args)
        nudge(optimizer.param_groups[0]["params"][0])

    patch(STEP, step)


@fault
def optimizer_communicates() -> None:
    """The optimizer of each DDP replica broadcasts a weight, as ZeroRedundancyOptimizer does."""
    groups: list[Any] = []  # of a replica whose optimizer has not been made yet

    def wrap(real: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        real(model, *args, **kwargs)
        groups.append(model.process_group)

    def make(real: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        real(optimizer, *args, **kwargs)
        optimizer.group = groups.pop() if groups else None

    def step(real: Any, optimizer: Any, *args: Any) -> None:
        real(optimizer, *args)
        if optimizer.group:
            weight = optimizer.param_groups[0]["params"][0]
            dist.broadcast(weight.data, group_src=0, group=optimizer.group)

    warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated")
    patch(f"{DDP}.__init__", wrap, rank=None)
    patch(NEW_OPTIMIZER, make, rank=None)
    patch(STEP, step, rank=None)


@fault
def unaveraged_gradients() -> None:
    """Each rank keeps its own gradients, under DDP and under fully_shard."""

    def init(real: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        real(model, *args, **kwargs)
        model.register_comm_hook(None, noop_hook)

    def keep_own_part(real: Any, output: Any, input: Any, *args: Any, **kwargs: Any) -> None:
        parts = input.chunk(input.numel() // output.numel())
        output.copy_(parts[RANK]).mul_(2)

    patch(f"{DDP}.__init__", init, rank=None)
    for name in ("reduce_scatter_tensor", "reduce_scatter_single"):  # of older and newer torch
        if hasattr(dist, name):
            patch(f"torch.distributed.{name}", keep_own_part, rank=None)


Hook = Callable[[Any, dist.GradBucket], Future[torch.Tensor]]


def replace_hooks(change: Callable[[Hook], Hook]) -> None:
    """Register `change(hook)` in place of each hook of DDP, on all ranks."""
    register = f"{DDP}.register_comm_hook"
    patch(register, lambda real, ddp, state, hook: real(ddp, state, change(hook)), rank=None)


@fault
def stops_averaging() -> None:
    """After 12 buckets the hook of each rank returns only its own gradients."""

    def change(hook: Hook) -> Hook:
        def stopping(state: Any, bucket: dist.GradBucket) -> Future[torch.Tensor]:
            return (hook if next(calls) <= 12 else noop_hook)(state, bucket)

        calls = itertools.count(1)
        return stopping

    replace_hooks(change)


@fault
def adds_instead() -> None:
    """The hook of each rank returns the sum of the gradients instead of their mean."""

    def change(hook: Hook) -> Hook:
        def adding(state: Any, bucket: dist.GradBucket) -> Future[torch.Tensor]:
            return hook(state, bucket).then(lambda mean: mean.value() * (LAST + 1))

        return adding

    replace_hooks(change)


@fault
def wrong_axis() -> None:
    """FSDP's gradients are summed over the ranks of a group instead of averaged."""

    def sum_up(sharded: Any) -> Any:
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
        return sharded

    after("torch.distributed.fsdp.fully_shard", sum_up, rank=None)


def axis_of(arguments: tuple[Any, ...]) -> str | None:
    """The mesh axis of a collective's group, e.g. `dp of dp1cp2`; None for the fake backend."""
    for group in arguments:
        if isinstance(group, tuple):  # a mesh and a dimension of it
            group = group[0].get_group(group[1])
        if isinstance(group, dist.ProcessGroup) and dist.get_backend(group) != "fake":
            return str(group.group_desc).removeprefix("mesh_").split(",")[0]
    return None


@fault
def slow_axis() -> None:
    """Each collective of the axis $SLOW, e.g. `dp of dp1cp2`, takes $DELAY seconds longer on all
    ranks.

    Rank 0 writes to $CALLS the most common number of these collectives in a step. (During the first
    steps the check gathers gradients as well.)
    """
    slow, delay_s = os.environ["SLOW"], float(os.environ["DELAY"])
    calls, steps_by_calls = 0, Counter[int]()
    within = False  # functions of torch call each other, and only the outermost call counts

    def count() -> None:
        nonlocal calls
        if calls:  # not a step of a part without this axis
            steps_by_calls[calls] += 1
            calls = 0
            ((most, _),) = steps_by_calls.most_common(1)
            Path(os.environ["CALLS"]).write_text(json.dumps({slow: most}))

    def delayed(real: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls, within
        if within:
            return real(*args, **kwargs)
        if axis_of((*args, *kwargs.values())) == slow:
            calls += 1
            wait(delay_s)
        within = True
        try:
            return real(*args, **kwargs)
        finally:
            within = False

    collectives = ("all_gather_", "reduce_scatter_", "all_reduce", "all_to_all_single")
    for module in ("torch.distributed", "torch.distributed._functional_collectives"):
        for name, _ in inspect.getmembers(pkgutil.resolve_name(module), inspect.isfunction):
            if name.startswith(collectives):
                patch(f"{module}.{name}", delayed, rank=None)
    in_call(STEP, None, count, rank=0)


# -- RPC: trainers and servers ---------------------------------------------------------------------


@fault
def callee_errs() -> None:
    """The last rank, a server, skips its tenth call of each function that returns nothing.

    If a function returns a Future, the last value in it is one too large.
    """
    calls = Counter[Any]()

    def one_more(future: Any) -> Any:
        value = copy.deepcopy(future.value())
        tensors = list(value.parameters()) if isinstance(value, torch.nn.Module) else [value]
        if tensors[-1] is not None:
            tensors[-1].data.view(-1)[-1] += 1
        return value

    def err(run: Any, call: Any) -> Any:
        function = getattr(call, "func", None)
        calls[function] += 1
        returns = getattr(function, "__annotations__", {}).get("return", "unknown")
        if returns is None and calls[function] == 10:
            return None
        answer = run(call)
        return answer.then(one_more) if isinstance(answer, Future) else answer

    patch(ANSWER, err, rank=LAST)


@fault
def wrong_answer() -> None:
    """Rank 2, a server, returns values 0.1% too large from functions with async_execution."""

    def enlarged(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(enlarged(part) for part in value)
        is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value * 1.001 if is_float else value

    def decorate(real: Any, function: Any) -> Any:
        @wraps(function)  # RPC looks it up by name
        def answer(*args: Any) -> Any:
            return function(*args).then(lambda done: enlarged(done.value()))

        return real(answer)

    patch("torch.distributed.rpc.functions.async_execution", decorate, rank=2)


@fault
def lost_gradient() -> None:
    """The third gradient that rank 2, a server, computes is zero."""
    calls = itertools.count(1)

    def lose(gradients: Any) -> Any:
        return tuple(map(torch.zeros_like, gradients)) if next(calls) == 3 else gradients

    after("torch.autograd.grad", lose, rank=2)


# lookups of rank 2, a server, are too large by a factor of 1e-6
LOOK_UP = "torch.nn.EmbeddingBag.forward"
FAULTS["wrong-lookup"] = partial(after, LOOK_UP, lambda rows: rows * (1 + 1e-6), 2)


# -- collectives, and messages between pairs of ranks ----------------------------------------------


# functions of torch.distributed, and the position of the output among their arguments
OUTPUTS = {
    **{"all_reduce": 0, "all_gather_into_tensor": 0, "reduce_scatter_tensor": 0},
    **{"all_gather_single": 0, "reduce_scatter_single": 0},  # names of torch 2.14 and newer
    **{"all_to_all_single": 0, "broadcast": 0, "reduce": 0, "gather": 1, "scatter": 0},
}


def under_test(tensor: Any) -> bool:
    """Whether a tensor is measured: the tests use bfloat16, which common/ itself never sends."""
    return isinstance(tensor, torch.Tensor) and tensor.dtype == torch.bfloat16


def corrupt(name: str, place: int, wanted: Callable[[Any], bool]) -> None:
    """On rank 1 the last value of each output for which `wanted` holds is off by one."""

    def call(real: Any, *args: Any, **more: Any) -> Any:
        work, output = real(*args, **more), args[place]
        if isinstance(output, list) and output:
            output = output[-1]
        if wanted(output):
            if work is not None:
                work.wait()
            output[-1] += 1
        return work

    patch(f"torch.distributed.{name}", call)


@fault
def one_wrong_value() -> None:
    """On rank 1 the last value of each output of bfloat16 is off by one."""
    for name, place in OUTPUTS.items():
        if hasattr(dist, name):
            corrupt(name, place, under_test)

    def exchange(real: Any, ops: Any) -> Any:
        for work in real(ops):
            work.wait()
        for op in ops:
            # p2p_matrix.py sends bytes; the 8 bytes for latency are not changed
            long = op.tensor.dtype in (torch.bfloat16, torch.uint8) and len(op.tensor) > 8
            if op.op is dist.irecv and long:
                op.tensor[-1] += 1
        return []

    patch("torch.distributed.batch_isend_irecv", exchange)


@fault
def wrong_sum() -> None:
    """On rank 1 the last value of each large all_reduce of float32 is off by one."""
    corrupt("all_reduce", 0, lambda x: x.dtype == torch.float32 and x.numel() > 1000)


@fault
def left_out() -> None:
    """Rank 1 contributes zeros to each all_reduce of bfloat16."""

    def all_reduce(real: Any, tensor: Any, *args: Any, **more: Any) -> Any:
        if under_test(tensor):
            tensor.zero_()
        return real(tensor, *args, **more)

    patch("torch.distributed.all_reduce", all_reduce)


# -- files: checkpoints and input ------------------------------------------------------------------

# the last value of each tensor that rank 1 loads by DCP is the next larger number
LOAD = "torch.distributed.checkpoint.filesystem.narrow_tensor_by_index"
FAULTS["wrong-load"] = partial(after, LOAD, lambda part: nudge(part.clone()))


@fault
def worker_dies() -> None:
    """A worker process of rank 1 is killed at its 40th image."""
    images = itertools.count(1)

    def die_in_worker() -> None:
        if torch.utils.data.get_worker_info() and next(images) == 40:
            die()

    in_call(DECODE, None, die_in_worker)


@fault
def same_part() -> None:
    """Rank 1 reads the samples of rank 0, as without a distributed sampler."""

    def iterate(real: Any, sampler: Any) -> Any:
        sampler.rank = 0
        return real(sampler)

    patch("torch.utils.data.DistributedSampler.__iter__", iterate)


# -- node: slow or wrong ranks for node_check.py ---------------------------------------------------


def slow_down(factor: float) -> None:
    """Rank 1 takes `factor` times as long for products, copies and additions, in a busy loop."""

    def slowed(real: Any, *args: Any, **more: Any) -> Any:
        start = time.perf_counter()
        result = real(*args, **more)
        busy((factor - 1) * (time.perf_counter() - start))
        return result

    for path in ("torch.mm", "torch.Tensor.copy_", ADD):
        patch(path, slowed)


def others_take(part: float) -> None:
    """Other processes seem to use this share of each core, and the job none."""

    def of_cores(real: Any, percpu: bool = False) -> Any:
        idle = real()._replace(nice=0.0, system=0.0, steal=0.0, user=part * time.monotonic())
        return [idle] * (psutil.cpu_count() or 1) if percpu else idle

    def of_process(real: Any, process: Any) -> Any:
        return type(real(process))(*[0.0] * len(real(process)))

    patch("psutil.cpu_times", of_cores, rank=None)
    patch("psutil.Process.cpu_times", of_process, rank=None)


FAULTS["half-speed"] = partial(slow_down, 2.0)
FAULTS["fiftieth-speed"] = partial(slow_down, 50.0)  # load does not have such an effect
FAULTS["quiet"] = partial(others_take, 0.0)  # whatever else runs on the machine
FAULTS["neighbours"] = partial(others_take, 0.8)
# the last value of each product is the next larger number
FAULTS["wrong-product"] = partial(after, "torch.mm", nudge)


if __name__ == "__main__":
    faults, script = sys.argv[1:3]
    sys.argv = sys.argv[2:]
    sys.path[0] = str(Path(script).resolve().parent)
    for name in faults.split(","):
        if name in IN_CALL:
            in_call(*IN_CALL[name])
        else:
            FAULTS[name]()
    runpy.run_path(script, run_name="__main__")
