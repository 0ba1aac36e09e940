"""Test whether cudalab does what CUDA and NCCL do.

    python -m torch.distributed.run --standalone --nproc-per-node 2 selftest.py

Prints `rank R of N: fine` on each rank; otherwise an assertion fails.
"""

import ctypes
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def full(value: float, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full(shape or (4,), value, device="cuda", dtype=dtype)


def values_equal_those_of_the_cpu() -> None:
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 5))
    model, x = nn.Sequential(*layers), torch.randn(4, 3, 8, 8)
    expected = model(x)
    assert torch.allclose(model.cuda()(x.cuda()).cpu(), expected, atol=1e-5)
    q = torch.randn(2, 4, 16, 32)
    attend = nn.functional.scaled_dot_product_attention
    on_cuda = attend(q.cuda(), q.cuda(), q.cuda(), is_causal=True)
    assert torch.allclose(on_cuda.cpu(), attend(q, q, q, is_causal=True), atol=1e-5)
    index = torch.tensor([[0, 2, 0]], device="cuda")
    sparse = torch.sparse_coo_tensor(index, full(1.0, 3, 2), (4, 2), check_invariants=True)
    assert sparse.coalesce().to_dense().cpu().tolist() == [[2, 2], [0, 0], [1, 1], [0, 0]]


def random_numbers_follow_the_seed() -> None:
    torch.cuda.manual_seed(1)
    first = torch.rand(3, device="cuda")
    torch.cuda.manual_seed(1)
    assert first.equal(torch.rand(3, device="cuda"))
    assert not first.equal(torch.rand(3, device="cuda"))


def mistakes_are_errors() -> None:
    def two_devices() -> Tensor:
        return full(1.0) + torch.ones(4)

    def too_large() -> Tensor:
        return torch.empty(2**40, dtype=torch.uint8, device="cuda")

    expected: list[tuple[Callable[[], Tensor], str]] = [
        (two_devices, "same device"),
        (too_large, "CUDA out of memory"),
    ]
    for mistake, text in expected:
        message = ""
        try:
            mistake()
        except RuntimeError as error:
            message = str(error)
        assert text in message, message or f"{mistake.__name__} did not raise"


def a_missing_function_ends_the_process() -> None:
    """cudaDeviceReset: no code in torch calls it, and the emulation does not have it."""
    pid = os.fork()
    if pid == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        ctypes.CDLL("libcudart.so.13").cudaDeviceReset()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGABRT


def collectives(rank: int, n: int) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int8, torch.float64):
        y = full(rank + 1, dtype=dtype)
        dist.all_reduce(y)
        assert y[0] == n * (n + 1) / 2, y
    rows = [full(0.0) for _ in range(n)]
    dist.all_gather(rows, full(float(rank)))
    assert [int(row[0]) for row in rows] == list(range(n))
    part = full(0.0, 2)
    dist.reduce_scatter(part, list(torch.arange(2.0 * n, device="cuda").view(n, 2)))
    assert part.tolist() == [n * 2.0 * rank, n * (2.0 * rank + 1)]
    swapped = full(0.0, n)
    dist.all_to_all_single(swapped, torch.arange(float(n), device="cuda") + 10 * rank)
    assert swapped.tolist() == [10.0 * other + rank for other in range(n)]
    received = full(0.0)
    send = dist.P2POp(dist.isend, full(float(rank)), (rank + 1) % n)
    receive = dist.P2POp(dist.irecv, received, (rank - 1) % n)
    for work in dist.batch_isend_irecv([send, receive]):
        work.wait()
    assert received[0] == (rank - 1) % n


def a_capture_records_and_a_replay_computes(n: int) -> None:
    h = full(1.0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        dist.all_reduce(h)
        twice = h * 2
    assert h[0] == 1
    graph.replay()
    graph.replay()
    assert h[0] == n**2
    assert twice[0] == 2 * n**2


def a_missing_wait_is_seen() -> None:
    """Kernels and copies are later than what does not wait for them. With CUDALAB_LATE=1 only."""
    x, side = full(0.0), torch.cuda.Stream()
    pinned = torch.zeros(4).pin_memory()
    torch.cuda.synchronize()
    x.fill_(1)
    with torch.cuda.stream(side):
        assert (x + 1).tolist() == [1] * 4
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        assert (x + 1).tolist() == [2] * 4
    pinned.copy_(x, non_blocking=True)
    assert pinned.tolist() == [0] * 4
    torch.cuda.synchronize()
    assert pinned.tolist() == [1] * 4


def a_late_peer_delays_the_stream_but_not_the_host(rank: int) -> None:
    dist.barrier()
    torch.cuda.synchronize()
    time.sleep(rank == 1)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    x = full(1.0)
    begin.record()
    dist.all_reduce(x)
    end.record()
    assert rank != 0 or not end.query()  # nothing has waited for rank 1, which sleeps for a second
    torch.cuda.synchronize()
    assert rank != 0 or begin.elapsed_time(end) > 0


def an_abort_ends_a_collective_whose_peer_is_missing(rank: int) -> None:
    pair: Any = dist.new_group([0, 1], backend="nccl")
    x = full(1.0)
    if rank < 2:
        dist.all_reduce(x, group=pair)
        torch.cuda.synchronize()
        if rank == 0:
            dist.all_reduce(x, group=pair)
        pair.abort()
        torch.cuda.synchronize()


def main() -> None:
    rank, n = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    a_missing_function_ends_the_process()  # before there are threads, which a fork would lose
    torch.sparse.check_sparse_tensor_invariants.disable()  # torch 2.11 and 2.12 warn otherwise
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    values_equal_those_of_the_cpu()
    random_numbers_follow_the_seed()
    mistakes_are_errors()
    if os.environ.get("CUDALAB_LATE") == "1":
        a_missing_wait_is_seen()
    collectives(rank, n)
    a_capture_records_and_a_replay_computes(n)
    a_late_peer_delays_the_stream_but_not_the_host(rank)
    an_abort_ends_a_collective_whose_peer_is_missing(rank)
    print(f"rank {rank} of {n}: fine", flush=True)
    os._exit(0)  # an aborted group cannot be destroyed


if __name__ == "__main__":
    main()
