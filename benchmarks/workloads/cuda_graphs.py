"""CUDA graphs of a step."""

from collections.abc import Callable

import torch


def cuda_graph(step: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """Return the replay, a single launch, of a CUDA graph of the kernels that `step` launches."""
    step()  # connects NCCL, which is not possible during capture
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    # "thread_local": a call of NCCL's watchdog thread must not invalidate this thread's capture
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        step()
    return graph.replay
