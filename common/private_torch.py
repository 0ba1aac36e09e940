"""What the project uses of torch that is not public, in one place.

Each was seen to work with torch 2.11, 2.14 and 2.15. When a new torch breaks one, look here first:
the docstring says what it is for and where torch keeps it. tests/pure/test_private_torch.py calls
all of them, and sees to it that no other file of common/ or benchmarks/ imports a name of torch
that begins with an underscore. TensorPipe's arguments `_transports` and `_channels` are in rpc.py.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

# an all-to-all whose gradient goes back the same way; torch/distributed/_functional_collectives.py
all_to_all_with_gradient = all_to_all_single_autograd


def leaves(tree: Any) -> list[Any]:
    """What stands in nested lists, tuples and dicts. torch/utils/_pytree.py."""
    return _pytree.tree_leaves(tree)


def bucket_sizes(ddp: DistributedDataParallel) -> list[int]:
    """The bytes of each of DDP's gradient buckets. Reducer's logging data, a text with commas."""
    logged = ddp._get_ddp_logging_data()
    sizes = logged.get("rebuilt_bucket_sizes") or logged["bucket_sizes"]
    return [int(size) for size in str(sizes).split(", ")]


def forget_groups(mesh: DeviceMesh) -> None:
    """Let go of a mesh's process groups. DTensor's caches keep every mesh for ever, and a mesh
    keeps its groups for torch.compile; torch/distributed/device_mesh.py, `_pg_registry`."""
    mesh._pg_registry.clear()


def creator_of(backend: str) -> str:
    """The name of the function that makes groups of this backend, or "" where torch 2.11 makes them
    itself. Which one `nccl` stands for is told by nothing else. `Backend` in
    torch/distributed/distributed_c10d.py."""
    dist.is_backend_available(f"cuda:{backend}")  # registers it, as making a group does
    plugin = dist.Backend._plugins.get(backend.upper())
    return plugin.creator_fn.__name__ if plugin else ""


def expected_s(
    call: Callable[[], object], group: dist.ProcessGroup, device: torch.device
) -> float | None:
    """The seconds that the group's backend itself expects the collectives in `call` to take. It
    does not run them. None where it cannot say: only NCCL can. torch/distributed/__init__.py.
    """
    try:
        with dist._time_estimator(group, device) as estimator:  # type: ignore[attr-defined]
            call()
    except (AttributeError, NotImplementedError):
        return None
    time_us = estimator.estimated_time
    return None if time_us is None else time_us / 1e6


def register_fake_backend() -> None:
    """From now on there is a backend `fake` whose collectives return at once."""
    import torch.testing._internal.distributed.fake_pg  # noqa: F401


def join_fake_world(rank: int, ranks: int) -> dist.Store:
    """Let this process be one rank of a job that does not exist. Its backend is `fake`."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    store: dist.Store = FakeStore()
    dist.init_process_group("fake", store=store, rank=rank, world_size=ranks)
    return store


class ShapesOnly(TorchDispatchMode):
    """Within it tensors have a shape and no memory, and every collective is told to `listen`.

    Whole numbers are real, and so is what follows from them alone: positions, masks, splits.
    torch/_subclasses/fake_tensor.py, torch/utils/_python_dispatch.py; for speed also
    torch/distributed/fsdp/_fully_shard/_fsdp_common.py, _chunk_with_empty.
    """

    def __init__(self, listen: Callable[[str, str, int], None]) -> None:
        """listen: called with the name of an operation of c10d, the name of its group, and the
        bytes of what it takes or of what it makes, whichever are more."""
        super().__init__()
        self.listen, self.shapes = listen, FakeTensorMode(allow_non_fake_inputs=True)

    def __enter__(self) -> "ShapesOnly":
        # here, because every script imports this file and FSDP takes 0.6 s to import
        from torch.distributed.fsdp._fully_shard import _fsdp_param

        self.shapes.__enter__()
        self.chunks = mock.patch.object(_fsdp_param, "_chunk_with_empty", chunks_alike)
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
        if set(types) - {FakeTensor}:  # a DTensor: what it does with its local tensor comes here
            return NotImplemented
        if operation.namespace == "prim":  # the device of a tensor, and such
            return operation(*args, **kwargs)
        if operation is torch.ops.aten.index_put_.default and types:
            return args[0]  # FakeTensorMode would ask a mask how many it holds
        result = None
        if types or makes_floats(operation, args, kwargs):
            result = operation(*args, **kwargs)
        else:
            with unset_fake_temporarily():
                result = operation(*args, **kwargs)
        if operation.namespace in ("c10d", "_c10d_functional"):
            self.tell(operation, args, result)
        return result

    def tell(self, operation: Any, args: Sequence[Any], result: Any) -> None:
        """Say what an operation of c10d is. Those that have no group only wait."""
        values = dict(zip((a.name for a in operation._schema.arguments), args, strict=False))
        group = values.get("group_name")
        if "process_group" in values:
            group = dist.ProcessGroup.unbox(values["process_group"]).group_name
        if group is not None:
            sizes = [bytes_of(value) for value in (*args, result)]
            self.listen(operation._schema.name, group, max(sizes))


def makes_floats(operation: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether it makes tensors of floats out of none."""
    if tensors_in((args, kwargs)):
        return False
    made = tensors_in(operation(*args, **kwargs))
    return not made or made[0].is_floating_point()


def chunks_alike(whole: torch.Tensor, count: int, dim: int) -> list[torch.Tensor]:
    """A weight without memory in `count` chunks. FSDP takes one of them, and to make a thousand
    takes a while: here one stands for all that are as long. The last ones may be empty."""
    size = whole.shape[dim]
    length = -(-size // count)  # rounded up, as in torch.chunk
    full, rest = divmod(size, max(1, length))
    lengths = [length] * full + [rest] * (full < count)
    lengths += [0] * (count - len(lengths))
    by_length = {length: whole.narrow(dim, 0, length) for length in set(lengths)}
    return [by_length[length] for length in lengths]


def tensors_in(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in leaves(tree) if isinstance(leaf, torch.Tensor)]


def bytes_of(tree: Any) -> int:
    """The bytes of the tensors in nested lists."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(tree))


def recompute(model: nn.Module, units: Collection[nn.Module]) -> None:
    """Let these parts of the model be computed again in the backward pass instead of kept.

    torch/distributed/algorithms/_checkpoint/checkpoint_wrapper.py.
    """
    checkpoint_wrapper.apply_activation_checkpointing(model, check_fn=lambda part: part in units)


def is_recomputed(module: nn.Module) -> bool:
    """Whether `recompute` has wrapped it."""
    return isinstance(module, checkpoint_wrapper.CheckpointWrapper)


def dynamo_counters() -> dict[str, Counter[str]]:
    """What torch.compile counts: graphs, and why it broke them. torch/_dynamo/utils.py."""
    from torch._dynamo.utils import counters

    return counters


def fresh_compile_cache() -> contextlib.AbstractContextManager[Any]:
    """Within it torch.compile finds nothing that was compiled before. torch/_inductor/utils.py."""
    from torch._inductor.utils import fresh_cache

    return fresh_cache()


def configure_compile(split_for_ddp: bool, verbose: bool) -> None:
    """split_for_ddp: whether dynamo cuts graphs at DDP's buckets, so that communication can begin.
    verbose: print graph breaks and recompiles. torch/_dynamo/config.py, torch/_logging."""
    torch._dynamo.config.optimize_ddp = split_for_ddp
    if verbose:
        torch._logging.set_logs(graph_breaks=True, recompiles=True)
