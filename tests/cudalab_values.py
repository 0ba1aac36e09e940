"""Run a script and record its losses, gradients and parameters: cudalab_values.py FOLDER SCRIPT ...

Each process that trains appends to a file of its rank in FOLDER. tests/test_cudalab.py compares the
files of a run on CUDA with those of a run on the CPU.
"""

import functools
import json
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.autograd as dist_autograd
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

LIMIT = 1000  # values of a process


def record(write: Callable[[str, float], object]) -> None:
    """Write each loss of which this process computes gradients, and after each step of one of its
    optimizers the norms of gradients and parameters."""

    def norm(tensors: list[Tensor]) -> Tensor:
        dense = [t.to_dense() if t.is_sparse else t for t in tensors]
        local = [getattr(t, "_local_tensor", t).detach().double().cpu() for t in dense]  # DTensor
        return torch.stack([t.square().sum() for t in local]).sum().sqrt()

    def stepped(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        write("gradients", float(norm([p.grad for p in parameters if p.grad is not None])))
        write("parameters", float(norm(parameters)))

    register_optimizer_step_post_hook(stepped)

    def with_losses(real: Any, losses_of: Any) -> Any:
        @functools.wraps(real)
        def backward(*args: Any, **kwargs: Any) -> Any:
            for loss in losses_of(args):
                write("loss", float(loss.detach()))
            return real(*args, **kwargs)

        return backward

    Tensor.backward = with_losses(Tensor.backward, lambda args: args[:1])  # type: ignore[method-assign]
    dist_autograd.backward = with_losses(dist_autograd.backward, lambda args: args[1])


if __name__ == "__main__":
    folder, *sys.argv = sys.argv[1:]
    count = iter(range(LIMIT))
    with Path(folder, f"rank{os.environ['RANK']}.jsonl").open("a", buffering=1) as file:
        record(lambda *entry: next(count, None) is None or file.write(json.dumps(entry) + "\n"))
        sys.path[0] = str(Path(sys.argv[0]).parent)
        runpy.run_path(sys.argv[0], run_name="__main__")
