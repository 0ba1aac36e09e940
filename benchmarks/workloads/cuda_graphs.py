"""CUDA graphs of a step."""

from collections.abc import Callable

import torch


def cuda_graph(step: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """Capture the kernels that `step` launches in a CUDA graph, whose replay is a single launch.

    Returns the function that replays the graph.
    """
    step()  # connects NCCL, which is not possible during capture
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    # "thread_local": a call of NCCL's watchdog thread must not invalidate this thread's capture
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        step()
    return graph.replay
