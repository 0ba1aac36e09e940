"""Runs a script with faults in torch itself: inject.py FAULT[,FAULT...] SCRIPT FLAGS...

A fault patches what torch offers, never the project. So the project's checks and its watchdog say
what they would say of a faulty machine. Rank 1 has the fault, unless its docstring says otherwise.
"""

import copy
import inspect
import json
import os
import resource
import runpy
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import Any, NoReturn

import psutil
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import filesystem
from torch.utils.data import DistributedSampler

RANK = int(os.environ.get("RANK", "0"))
FAULTS: dict[str, Callable[[], None]] = {}


def fault(function: Callable[[], None]) -> Callable[[], None]:
    """Register a fault. On the command line its name has hyphens."""
    FAULTS[function.__name__.replace("_", "-")] = function
    return function


def in_call(owner: Any, name: str, number: int, then: Callable[[], Any], rank: int = 1) -> None:
    """Call `then` before the number-th call of a function of torch on a rank."""
    real = getattr(owner, name)
    calls = 0

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number and rank == RANK:
            then()
        return real(*args, **kwargs)

    setattr(owner, name, call)


# in an optimizer step; the twelfth one is in a timed block
in_step = partial(in_call, torch.optim.SGD, "step")


def fail(error: type[Exception], text: str) -> NoReturn:
    raise error(f"injected: {text}")


def send(signal_number: int) -> None:
    """Send a signal to this process."""
    os.kill(os.getpid(), signal_number)


def busy(seconds: float) -> None:
    """Wait, and keep a core busy."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


# -- machine: a rank that raises, stops, dies or does not come; a full disk, a closed stdout -------


@fault
def step_raises() -> None:
    """An optimizer step of rank 1 raises, as a kernel would that a GPU does not have."""
    in_step(12, partial(fail, RuntimeError, "no kernel for this step"))


@fault
def device_assert() -> None:
    """Rank 0 uses an index out of range on its GPU. The GPU refuses everything after that."""

    def out_of_range() -> None:
        row = torch.zeros(4, device="cuda")
        row[torch.tensor([9], device="cuda")].sum().item()

    in_step(12, out_of_range, rank=0)


@fault
def graph_raises() -> None:
    """Rank 1 raises where it replays a CUDA graph for the fourth time."""
    in_call(torch.cuda.CUDAGraph, "replay", 4, partial(fail, RuntimeError, "a graph is broken"))


@fault
def cyclic_graphs() -> None:
    """Each CUDA graph is in a reference cycle: only the garbage collector frees it."""
    real = torch.cuda.CUDAGraph.capture_begin

    def begin(graph: Any, *args: Any, **kwargs: Any) -> None:
        graph.itself = graph
        real(graph, *args, **kwargs)

    torch.cuda.CUDAGraph.capture_begin = begin  # type: ignore[method-assign,assignment]


@fault
def build_raises() -> None:
    """Rank 1 runs out of memory in its first model."""
    import torchvision

    out_of_memory = partial(fail, torch.OutOfMemoryError, "out of memory")
    in_call(torchvision.models, "get_model", 1, out_of_memory)


@fault
def twin_raises() -> None:
    """Rank 1 runs out of memory in its second model of a case, as it makes the optimizer."""
    out_of_memory = partial(fail, torch.OutOfMemoryError, "no memory for a twin")
    in_call(torch.optim.SGD, "__init__", 2, out_of_memory)


@fault
def team_raises() -> None:
    """Rank 1 cannot connect the first group that a workload makes. The case has connected its own
    one before."""
    in_call(dist, "all_reduce", 2, partial(fail, RuntimeError, "no memory for a team"))


@fault
def folder_missing() -> None:
    """Rank 1 does not see the folder of its first case below $SAVES: it is not mounted there."""
    real = Path.is_dir
    looked = False

    def is_dir(path: Path) -> bool:
        nonlocal looked
        if RANK == 1 and not looked and path.is_relative_to(os.environ["SAVES"]):
            looked = True
            return False
        return real(path)

    Path.is_dir = is_dir  # type: ignore[method-assign,assignment]


@fault
def stuck_in_build() -> None:
    """Rank 1 waits for ever when it makes its first model."""
    import torchvision

    in_call(torchvision.models, "get_model", 1, partial(time.sleep, 600))


@fault
def never_arrives() -> None:
    """Rank 1 does not join the job."""
    if RANK == 1:
        time.sleep(600)


@fault
def stops() -> None:
    """Rank 1 is stopped in a step, as by SIGSTOP or a debugger."""
    in_step(12, partial(send, signal.SIGSTOP))


@fault
def waits() -> None:
    """Rank 1 makes the file $MARKER in a step, and then waits for ever."""

    def wait() -> None:
        Path(os.environ["MARKER"]).touch()
        time.sleep(600)

    in_step(12, wait)


@fault
def dies() -> None:
    """Rank 1 is killed in a step, as by the kernel when memory runs out."""
    in_step(12, partial(send, signal.SIGKILL))


@fault
def dies_at_first() -> None:
    """As `dies`, but only before torchrun's first restart."""
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        dies()


@fault
def slow_rank() -> None:
    """Rank 1 waits 150 ms in each optimizer step: longer than what a busy machine delays."""
    real = torch.optim.SGD.step

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        if RANK == 1:
            time.sleep(0.15)
        return real(self, *args, **kwargs)

    torch.optim.SGD.step = step  # type: ignore[method-assign]


@fault
def slow_optimizer() -> None:
    """Rank 1's first optimizer takes 4 s."""
    in_call(torch.optim.SGD, "__init__", 1, partial(time.sleep, 4))


@fault
def few_files() -> None:
    """No rank may open more than 64 files (ulimit -n 64)."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))


@fault
def compiler_fails() -> None:
    """Rank 1's C++ compiler fails, as on a node where its headers are missing."""
    from torch._inductor import config

    if RANK == 1:
        config.cpp.cxx = (None, "false")


@fault
def reader_gone() -> None:
    """The reader of rank 0's stdout has ended, as `| head` does."""
    if RANK == 0:
        reading, writing = os.pipe()
        os.close(reading)
        os.dup2(writing, 1)


@fault
def log_disk_full() -> None:
    """Stdout goes to a disk that is full. Each line is written at once."""
    os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]


@fault
def stdout_closed() -> None:
    """Stdout is closed, as by `>&-`."""
    os.close(1)
    sys.stdout = None  # type: ignore[assignment]


@fault
def disk_hangs() -> None:
    """Rank 0's second line of the report waits for the disk for ever."""
    in_call(os, "fsync", 2, partial(time.sleep, 600), rank=0)


@fault
def full_disk() -> None:
    """From its 25th step on the files of rank 0 cannot grow. `no ddp` is in the report by then."""

    def limit() -> None:
        size = os.path.getsize(sys.argv[sys.argv.index("--json") + 1])
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, resource.RLIM_INFINITY))

    in_step(25, limit, rank=0)


@fault
def profiler_raises() -> None:
    """Rank 1 cannot begin a range of the profiler."""
    if os.environ["RANK"] == "1":

        def raises(self: Any) -> None:
            raise RuntimeError("injected: no profiler")

        torch.profiler.record_function.__enter__ = raises  # type: ignore[method-assign]


# -- DDP: gradients and replicas -------------------------------------------------------------------


@fault
def drifting_replica() -> None:
    """Rank 1's optimizer also moves one weight to the next larger number."""
    real = torch.optim.SGD.step

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = real(self, *args, **kwargs)
        if RANK == 1:
            weight = self.param_groups[0]["params"][0].data.view(-1)
            weight[0] = torch.nextafter(weight[0], weight[0] + 1)
        return result

    torch.optim.SGD.step = step  # type: ignore[method-assign]


@fault
def unaveraged_gradients() -> None:
    """Each rank keeps its own gradients, under DDP and under fully_shard."""
    from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
    from torch.nn.parallel import DistributedDataParallel as DDP

    real = DDP.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        real(self, *args, **kwargs)
        self.register_comm_hook(None, noop_hook)

    def keep_own_part(output: Any, input: Any, *args: Any, **kwargs: Any) -> None:
        parts = input.chunk(input.numel() // output.numel())
        output.copy_(parts[RANK]).mul_(2)

    DDP.__init__ = init  # type: ignore[method-assign]
    for name in ("reduce_scatter_tensor", "reduce_scatter_single"):  # 2.11's, and newer ones'
        setattr(dist, name, keep_own_part)


# -- axes: of a device mesh ------------------------------------------------------------------------


def count_by_step(axes: list[str]) -> Counter[str]:
    """A counter of the calls by axis since the last optimizer step.

    Rank 0 writes to $CALLS how many calls most of the steps had, by axis. Not all steps have as
    many: around the first ones the check gathers gradients.
    """
    calls: Counter[str] = Counter()
    steps_by_calls: dict[str, Counter[int]] = {axis: Counter() for axis in axes}
    real = torch.optim.SGD.step

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        for axis, number in calls.items():
            steps_by_calls[axis][number] += 1
        calls.clear()
        if RANK == 0:
            counted = {axis: steps for axis, steps in steps_by_calls.items() if steps}
            most = {axis: steps.most_common(1)[0][0] for axis, steps in counted.items()}
            Path(os.environ["CALLS"]).write_text(json.dumps(most))
        return real(self, *args, **kwargs)

    torch.optim.SGD.step = step  # type: ignore[method-assign]
    return calls


def axis_of(group: Any) -> str | None:
    """The axis that a collective's group is for, e.g. `dp of dp1cp2`; None on the fake backend."""
    if isinstance(group, tuple):  # a mesh and a dimension of it
        mesh, dimension = group
        group = mesh.get_group(dimension)
    if not group or dist.get_backend(group) == "fake":
        return None
    return str(group.group_desc).removeprefix("mesh_").split(",")[0]


@fault
def slow_axis() -> None:
    """Each collective of an axis in $SLOW, e.g. `dp of dp1cp2`, takes $DELAY seconds more.

    On all ranks, and only where the axis has a real backend. `count_by_step` counts them.
    """
    from torch.distributed import _functional_collectives as funcol

    slow_axes, delay_s = os.environ["SLOW"].split(","), float(os.environ["DELAY"])
    calls = count_by_step(slow_axes)
    within = False  # functions of torch call each other: only the outermost one counts

    def delay(real: Any) -> Any:
        names = inspect.signature(real).parameters

        def delayed(*args: Any, **kwargs: Any) -> Any:
            nonlocal within
            if within:
                return real(*args, **kwargs)
            arguments = dict(zip(names, args, strict=False)) | kwargs
            axis = axis_of(arguments.get("group"))
            if axis in slow_axes:
                calls[axis] += 1
                time.sleep(delay_s)
            within = True
            try:
                return real(*args, **kwargs)
            finally:
                within = False

        return delayed

    collectives = ("all_gather_", "reduce_scatter_", "all_reduce", "all_to_all_single")
    for module in (dist, funcol):
        for name in dir(module):
            function = getattr(module, name)
            if name.startswith(collectives) and inspect.isfunction(function):
                setattr(module, name, delay(function))


@fault
def wrong_axis() -> None:
    """FSDP's gradients are summed over the ranks of a shard's group, not averaged."""
    from torch.distributed.fsdp import FSDPModule

    fsdp: Any = torch.distributed.fsdp
    real = fsdp.fully_shard

    def fully_shard(module: Any, **kwargs: Any) -> FSDPModule:
        sharded: FSDPModule = real(module, **kwargs)
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)
        return sharded

    fsdp.fully_shard = fully_shard


# -- RPC: trainers and servers ---------------------------------------------------------------------


def on_server(change: Callable[[Any, Callable[[], Any]], Any]) -> None:
    """On the last rank, answer calls by RPC with `change(function, run)`; `run` makes the call."""
    from torch.distributed.rpc import internal

    real = internal._run_function

    def run(call: Any) -> Any:
        return change(getattr(call, "func", None), lambda: real(call))

    if int(os.environ["WORLD_SIZE"]) - 1 == RANK:
        internal._run_function = run


@fault
def callee_errs() -> None:
    """The last rank, a server, loses its tenth call of each function that returns nothing.

    Where a function returns a Future, the last value in it is one too large.
    """
    calls: Counter[Any] = Counter()

    def one_more(future: Any) -> Any:
        value = copy.deepcopy(future.value())
        tensors = list(value.parameters()) if isinstance(value, torch.nn.Module) else [value]
        if tensors[-1] is not None:
            tensors[-1].data.view(-1)[-1] += 1
        return value

    def err(function: Any, run: Callable[[], Any]) -> Any:
        calls[function] += 1
        returns = getattr(function, "__annotations__", {}).get("return", "unknown")
        if returns is None and calls[function] == 10:
            return None
        answer = run()
        if isinstance(answer, torch.futures.Future):
            return answer.then(one_more)
        return answer

    on_server(err)


@fault
def callee_stops() -> None:
    """The last rank stops, as a debugger stops it, in its 150th call by RPC."""
    calls = 0

    def stop(function: Any, run: Callable[[], Any]) -> Any:
        nonlocal calls
        calls += 1
        if calls == 150:
            send(signal.SIGSTOP)
        return run()

    on_server(stop)


@fault
def trainer_falters() -> None:
    """The 60th call by RPC of rank 1 comes 5 s late, the 110th raises."""
    from torch.distributed import rpc

    in_call(rpc, "rpc_sync", 60, partial(time.sleep, 5))
    in_call(rpc, "rpc_sync", 110, partial(fail, MemoryError, "no room for the gradients"))


@fault
def server_raises() -> None:
    """Rank 2, a server, runs out of memory where it adds its 40th gradient to others."""
    out_of_memory = partial(fail, torch.OutOfMemoryError, "out of memory")
    in_call(torch.Tensor, "add_", 40, out_of_memory, rank=2)


@fault
def wrong_answer() -> None:
    """Rank 2, a server, answers one thousandth too much in RPC's async_execution."""
    import torch.distributed.rpc as rpc

    def more(answer: torch.futures.Future[Any]) -> Any:
        return answer.value() * 1.001

    def decorate(function: Any) -> Any:
        @wraps(function)
        def answer(*args: Any) -> Any:
            return function(*args).then(more) if RANK == 2 else function(*args)

        return real(answer)

    real = rpc.functions.async_execution
    rpc.functions.async_execution = decorate


@fault
def wrong_lookup() -> None:
    """Rank 2, a server, looks up one millionth too much."""
    real = torch.nn.EmbeddingBag.forward

    def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        return real(*args, **kwargs) * (1 + 1e-6 * (RANK == 2))

    torch.nn.EmbeddingBag.forward = forward  # type: ignore[method-assign]


@fault
def lost_gradient() -> None:
    """The third gradient that rank 2, a server, computes is zero."""
    real = torch.autograd.grad
    calls = 0

    def grad(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        factor = 0 if calls == 3 and RANK == 2 else 1
        return tuple(gradient * factor for gradient in real(*args, **kwargs))

    torch.autograd.grad = grad


# -- collectives: and messages between pairs -------------------------------------------------------


# functions of torch.distributed: the place of the output among their arguments
OUTPUTS = {
    **{"all_reduce": 0, "all_gather_into_tensor": 0, "reduce_scatter_tensor": 0},
    **{"all_gather_single": 0, "reduce_scatter_single": 0},  # the names of torch 2.14 and newer
    **{"all_to_all_single": 0, "broadcast": 0, "reduce": 0, "gather": 1, "scatter": 0},
}


def tested(value: Any) -> Any:
    """The tensor under test in an argument, or None.

    The tests measure bfloat16, which the core's own messages never are.
    """
    tensor = value[-1] if isinstance(value, list) and value else value
    if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.bfloat16:
        return tensor
    return None


@fault
def one_wrong_value() -> None:
    """On rank 1 the last value of each output of bfloat16 is off by one."""

    def corrupted(real: Any, place: int) -> Any:
        def call(*args: Any, **more: Any) -> Any:
            result = real(*args, **more)
            output = tested(args[place]) if RANK == 1 else None
            if output is not None:
                output[-1] += 1
            return result

        return call

    for name, place in OUTPUTS.items():
        if hasattr(dist, name):
            setattr(dist, name, corrupted(getattr(dist, name), place))
    real_exchange = dist.batch_isend_irecv

    def exchange(ops: Any) -> Any:
        for work in real_exchange(ops):
            work.wait()
        for op in ops:
            # p2p_matrix.py sends bytes; the 8 that it times as latency are left as they are
            under_test = op.tensor.dtype in (torch.bfloat16, torch.uint8) and len(op.tensor) > 8
            if RANK == 1 and op.op is dist.irecv and under_test:
                op.tensor[-1] += 1
        return []

    dist.batch_isend_irecv = exchange  # type: ignore[assignment]


@fault
def collective_raises() -> None:
    """Rank 1's 40th all_reduce of bfloat16 raises."""
    calls = 0
    real = dist.all_reduce

    def all_reduce(tensor: Any, *args: Any, **more: Any) -> Any:
        nonlocal calls
        calls += RANK == 1 and tested(tensor) is not None
        if calls == 40:
            calls += 1
            fail(RuntimeError, "the link is down")
        return real(tensor, *args, **more)

    dist.all_reduce = all_reduce


@fault
def left_out() -> None:
    """Rank 1 brings zeros to each all_reduce of bfloat16."""
    real = dist.all_reduce

    def all_reduce(tensor: Any, *args: Any, **more: Any) -> Any:
        if RANK == 1 and tested(tensor) is not None:
            tensor.zero_()
        return real(tensor, *args, **more)

    dist.all_reduce = all_reduce


@fault
def slow_sends() -> None:
    """Each message that rank 2 sends to a peer takes 2 ms more."""
    real = dist.batch_isend_irecv

    def exchange(ops: Any) -> Any:
        if RANK == 2 and any(op.op is dist.isend for op in ops):
            busy(0.002)
        return real(ops)

    dist.batch_isend_irecv = exchange  # type: ignore[assignment]


# -- files: of checkpoints -------------------------------------------------------------------------


@fault
def slow_writer() -> None:
    """Each tensor that DCP writes keeps a core busy for 5 ms more, on all ranks."""
    real = filesystem._write_item

    def write_item(*args: Any, **kwargs: Any) -> Any:
        busy(0.005)
        return real(*args, **kwargs)

    filesystem._write_item = write_item


@fault
def disk_fills() -> None:
    """From its 250th tensor on rank 1 cannot write more than 4 KiB into a file."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    small = (resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    in_call(filesystem, "_write_item", 250, partial(resource.setrlimit, *small))


@fault
def dies_in_save() -> None:
    """Rank 1 is killed when it writes its 250th tensor. $LEFT is a copy of the folder $SAVES."""

    def die() -> None:
        shutil.copytree(os.environ["SAVES"], os.environ["LEFT"])
        send(signal.SIGKILL)

    in_call(filesystem, "_write_item", 250, die)


@fault
def wrong_load() -> None:
    """The last value of each tensor that rank 1 loads by DCP is off by the smallest step."""
    real = filesystem.narrow_tensor_by_index

    def narrow(*args: Any) -> torch.Tensor:
        part = real(*args).clone()
        if RANK == 1 and part.numel():
            value = part.view(-1)
            value[-1] = torch.nextafter(value[-1], value[-1] + 1)
        return part

    filesystem.narrow_tensor_by_index = narrow  # type: ignore[assignment]


# -- input: loaders and what they read -------------------------------------------------------------
# A worker has these faults if it is forked: --start-method fork.


@fault
def slow_decoder() -> None:
    """Each image takes 5 ms more to decode, on all ranks. It keeps no core busy."""
    from torchvision.transforms.v2 import functional

    real = functional.pil_to_tensor

    def decode(image: Any) -> torch.Tensor:
        time.sleep(0.005)
        return real(image)

    functional.pil_to_tensor = decode


@fault
def worker_dies() -> None:
    """A worker process of rank 1 is killed, as by the kernel when memory runs out."""
    from torchvision.transforms.v2 import functional

    real = functional.pil_to_tensor
    calls = 0

    def decode(image: Any) -> torch.Tensor:
        nonlocal calls
        calls += RANK == 1 and torch.utils.data.get_worker_info() is not None
        if calls == 40:
            send(signal.SIGKILL)
        return real(image)

    functional.pil_to_tensor = decode


@fault
def same_part() -> None:
    """Rank 1 takes the part of rank 0, as without a sampler that knows its rank."""
    real = DistributedSampler.__iter__

    def iterate(sampler: Any) -> Any:
        sampler.rank = 0
        return real(sampler)

    DistributedSampler.__iter__ = iterate  # type: ignore[method-assign]


# -- node: a slow or wrong one, for node_check.py --------------------------------------------------


@fault
def half_speed() -> None:
    """Rank 1 takes twice the time for products, copies and additions. It keeps its core busy."""

    def slowed(real: Any) -> Any:
        def call(*args: Any, **more: Any) -> Any:
            start = time.perf_counter()
            result = real(*args, **more)
            busy(time.perf_counter() - start)
            return result

        return call

    if RANK == 1:
        torch.mm = slowed(torch.mm)
        for name in ("copy_", "add_"):
            setattr(torch.Tensor, name, slowed(getattr(torch.Tensor, name)))


def others_take(part: float) -> None:
    """Other programs take this part of each core, and the job takes nothing."""
    idle = psutil.cpu_times(percpu=True)[0]._replace(**dict.fromkeys(("nice", "system"), 0.0))

    def cpu_times(percpu: bool = False) -> Any:
        times = idle._replace(user=part * time.monotonic(), steal=0.0)
        return [times] * (psutil.cpu_count() or 1) if percpu else times

    psutil.cpu_times = cpu_times
    nothing = (
        psutil.Process()
        .cpu_times()
        ._replace(user=0.0, system=0.0, children_user=0.0, children_system=0.0)
    )
    psutil.Process.cpu_times = lambda process: nothing


@fault
def quiet() -> None:
    """No other program takes anything of this machine, whatever runs beside the test."""
    others_take(0.0)


@fault
def neighbours() -> None:
    """Other programs take 0.8 of each core."""
    others_take(0.8)


@fault
def wrong_sum() -> None:
    """On rank 1 the last value of each large all_reduce of float32 is off by one."""
    real = dist.all_reduce

    def all_reduce(tensor: torch.Tensor, *args: Any, **more: Any) -> Any:
        work = real(tensor, *args, **more)
        if RANK == 1 and tensor.dtype == torch.float32 and tensor.numel() > 1000:
            if work is not None:
                work.wait()
            tensor[-1] += 1
        return work

    dist.all_reduce = all_reduce


@fault
def wrong_product() -> None:
    """On rank 1 the last value of each product is the next larger number."""
    real = torch.mm

    def mm(*args: Any, out: torch.Tensor) -> torch.Tensor:
        real(*args, out=out)
        if RANK == 1:
            out[-1, -1] = torch.nextafter(out[-1, -1], out[-1, -1] + 1)
        return out

    torch.mm = mm  # type: ignore[assignment]


if __name__ == "__main__":
    faults, script = sys.argv[1:3]
    sys.argv = sys.argv[2:]
    sys.path[0] = str(Path(script).resolve().parent)
    for name in faults.split(","):
        FAULTS[name]()
    runpy.run_path(script, run_name="__main__")
