"""Collectives in Kineto traces: which kernels communicate, and what their arguments say."""

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from analysis.show import is_number

# Kernels that communicate, by their names in lower case. Libraries first, then what kernels of
# vLLM, SGLang, TensorRT-LLM, FlashInfer, aiter, TransformerEngine and symmetric memory are called.
COMMUNICATION = re.compile(
    r"nccl|rccl|oneccl|mscclpp|nvshmem|rocshmem|deep_?ep|\buccl|hybrid_?ep|\bmori::|pplx|userbuffers"
    r"|quick_?reduce|multimem|cross_device|put_signal|wait_signal"
    r"|all_?reduce|all_?gather|reduce_?scatter|all_?(to|2)_?all"
)
# torch.compile calls a kernel by the operations that it has fused, among them those whose inputs
# come from a collective: triton_poi_fused_all_gather_into_tensor_0 computes.
FUSED = re.compile(r"triton_[a-z0-9]+(_[a-z0-9]+)?_fused")
# Operations by the letters of their names; the first that fits counts
OPERATION_OF = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "crossdevicereduce": "all_reduce",  # of vLLM
    "quickreduce": "all_reduce",
    "barrier": "barrier",
    "broadcast": "broadcast",
    "sendrecv": "sendrecv",
    "send": "send",
    "recv": "recv",
    "gather": "gather",
    "scatter": "scatter",
    "reduce": "reduce",
}
# Types by the names that c10 and C++ have for them: torch's name, and bytes of an element
TYPES = {
    "float": ("float32", 4),
    "double": ("float64", 8),
    "half": ("float16", 2),
    "bfloat16": ("bfloat16", 2),
    "byte": ("uint8", 1),
    "unsigned char": ("uint8", 1),
    "char": ("int8", 1),
    "signed char": ("int8", 1),
    "bool": ("bool", 1),
    "short": ("int16", 2),
    "short int": ("int16", 2),
    "int": ("int32", 4),
    "long": ("int64", 8),
    "long int": ("int64", 8),
    "complexfloat": ("complex64", 8),
    "complexdouble": ("complex128", 16),
    "float8_e4m3fn": ("float8_e4m3fn", 1),
    "float8_e5m2": ("float8_e5m2", 1),
    "float8_e4m3fnuz": ("float8_e4m3fnuz", 1),
    "float8_e5m2fnuz": ("float8_e5m2fnuz", 1),
}


class Collective(NamedTuple):
    """What a trace says of a call of a collective."""

    name: str  # all_reduce, ..., or the name of the kernel
    group: str = ""  # its process group, if the trace names it
    ranks: str = ""  # of that group: `[0, 1]`
    group_size: int | None = None
    dtype: str = ""  # torch's name: float32
    size_bytes: int | None = None  # the larger of what a rank sends and receives
    of_rank: bool = False  # size_bytes is that of this rank's part, as gloo records all_gather
    call: tuple[Any, ...] = ()  # `Seq` and `Comms Id`, the same on all ranks; () without


def is_communication(name: str) -> bool:
    """Whether a kernel communicates, by its name."""
    lower = name.lower()
    return bool(COMMUNICATION.search(lower)) and not FUSED.match(lower)


def operation_of(name: str) -> str:
    """`_allgather_base` -> `all_gather`. A name that tells no operation, without its arguments."""
    letters = re.sub("[^a-z0-9]", "", name.lower()).replace("all2all", "alltoall")
    for word, operation in OPERATION_OF.items():
        if word in letters:
            return operation
    return name.partition("(")[0].partition("<")[0].removeprefix("void ")


def type_of(name: Any) -> tuple[str, int] | None:
    """torch's name of a type, and the bytes of an element; None if it is not known."""
    return TYPES.get(str(name).lower().removeprefix("c10::"))


def collective_of_kernel(name: str, args: Mapping[str, Any]) -> Collective:
    """What the arguments of a kernel say; without any, what its name says."""
    if "Collective name" not in args:
        return Collective(operation_of(name))
    group = args.get("Process Group Description", "undefined")
    if group == "undefined":
        group = args.get("Process Group Name", "")
    known = type_of(args.get("dtype"))
    size, sent, received = None, args.get("In msg nelems"), args.get("Out msg nelems")
    if known and is_number(sent) and is_number(received):
        size = int(max(sent, received)) * known[1]
    members = args.get("Group size")
    call: tuple[Any, ...] = ()
    if is_number(args.get("Seq")) and args["Seq"] >= 0:
        call = (args["Seq"], args.get("Comms Id"))
    return Collective(
        name=operation_of(str(args["Collective name"])),
        group=str(group),
        ranks=str(args.get("Process Group Ranks", "")),
        group_size=int(members) if is_number(members) and members > 0 else None,
        dtype=known[0] if known else str(args.get("dtype", "")),
        size_bytes=size,
        call=call,
    )


def collective_of_gloo(name: str, args: Mapping[str, Any]) -> Collective:
    """`gloo:all_reduce`. The sizes are known if the profiler was told to record shapes."""
    operation = operation_of(name.partition(":")[2])
    size, dtype = 0, ""
    for dims, kind in zip(args.get("Input Dims") or (), args.get("Input type") or (), strict=False):
        known = type_of(kind)
        if not known or not all(is_number(dim) for dim in dims):
            return Collective(operation)
        dtype = known[0]
        size += math.prod(int(dim) for dim in dims) * known[1]
    part = operation in ("all_gather", "gather")
    return Collective(operation, dtype=dtype, size_bytes=size or None, of_rank=part)
