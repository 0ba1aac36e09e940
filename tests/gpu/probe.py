"""Answer questions about CUDA and NCCL that only a GPU can answer: python tests/gpu/probe.py

One process on one GPU, about a minute. Each line begins with the name of a question:

    versions   of torch, CUDA, NCCL and the driver
    zeros      is a product of zeros or of NaN faster than one of random numbers? A pipeline that
               sends nothing computes on whatever its buffers hold (parallel_sweep.py)
    throttle   does nvidia-smi still say after a load that the GPU was throttled?
    group      how long does it take to connect a communicator, and to close or abort it?
    future     does the caller's stream go on after get_future() of an all-reduce? If `False`, DDP
               overlaps nothing
"""

import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from harness.environment import gpu_state
from harness.observe.watchdog import set_nccl_variables

DEVICE = torch.device("cuda", 0)


def say(question: str, text: object) -> None:
    print(f"{question:10} {text}", flush=True)


def device_ms(step: Callable[[], object], calls: int) -> float:
    """The milliseconds that a call takes on the device, after three calls that do not count."""
    for _ in range(3):
        step()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(calls):
        step()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / calls


def ask_versions() -> None:
    gpu = torch.cuda.get_device_properties(DEVICE)
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    say("versions", f"torch {torch.__version__}, NCCL {nccl}, {gpu.name}")
    for state in gpu_state():
        say("versions", state)


def ask_zeros() -> None:
    shape = (8192, 8192)
    weights = torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)
    inputs = {
        "random numbers": torch.randn_like(weights),
        "zeros": torch.zeros_like(weights),
        "NaN": torch.full_like(weights, float("nan")),
    }
    times: dict[str, list[float]] = {name: [] for name in inputs}
    for _ in range(6):  # alternately, because the clocks change
        for name, values in inputs.items():
            times[name].append(device_ms(partial(torch.mm, values, weights), 100))
    for name, samples in times.items():
        ratio = median(samples) / median(times["random numbers"])
        say("zeros", f"a product with {name}: {median(samples):.4f} ms, ratio {ratio:.3f}")


def ask_throttle() -> None:
    """The counters are in microseconds. The active reasons are those at the moment."""
    x = torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16)
    say("throttle", f"before: {gpu_state()}")
    end = time.monotonic() + 4
    while time.monotonic() < end:
        torch.mm(x, x)  # hundreds wait in the stream
    say("throttle", f"during: {gpu_state()}")
    torch.cuda.synchronize()
    say("throttle", f"after: {gpu_state()}")


def new_group() -> dist.ProcessGroup:
    """A connected NCCL group of this process only."""
    group = dist.new_group([0], backend="nccl")
    assert isinstance(group, dist.ProcessGroup)
    dist.all_reduce(torch.ones(1, device=DEVICE), group=group)
    torch.cuda.synchronize()
    return group


def ask_group() -> None:
    ways: dict[str, Callable[[dist.ProcessGroup], object]] = {
        "destroyed (first communicator)": dist.destroy_process_group,
        "destroyed": dist.destroy_process_group,
        "aborted": dist.distributed_c10d._abort_process_group,
    }
    for name, close in ways.items():
        began = time.perf_counter()
        group = new_group()
        connected = time.perf_counter()
        close(group)
        closed = time.perf_counter()
        connect_ms, close_ms = (connected - began) * 1e3, (closed - connected) * 1e3
        say("group", f"connected in {connect_ms:.0f} ms, {name} in {close_ms:.0f} ms")


def ask_future(group: dist.ProcessGroup) -> None:
    x, side = torch.ones(2, device=DEVICE), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(10**9)  # about half a second, before the all-reduce
        pending = dist.all_reduce(x, group=group, async_op=True)
    assert pending is not None
    pending.get_future()
    goes_on = torch.cuda.current_stream().query()
    torch.cuda.synchronize()
    say("future", f"the caller's stream goes on: {goes_on}")


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("probe.py: error: torch sees no CUDA device here")
    torch.cuda.set_device(DEVICE)
    set_nccl_variables()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    ask_versions()
    ask_zeros()
    ask_throttle()
    ask_group()
    ask_future(new_group())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
