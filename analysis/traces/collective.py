"""Identify the collectives in Kineto traces, from the names and arguments of kernels."""

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from readers.traces import as_number

# Names of communication kernels, in lower case: first libraries, then kernels of vLLM, SGLang,
# TensorRT-LLM, FlashInfer, aiter, TransformerEngine and symmetric memory.
COMMUNICATION = re.compile(
    r"nccl|rccl|oneccl|mscclpp|nvshmem|rocshmem|deep_?ep|\buccl|hybrid_?ep|\bmori::|pplx|userbuffers"
    r"|quick_?reduce|multimem|cross_device|put_signal|wait_signal"
    r"|all_?reduce|all_?gather|reduce_?scatter|all_?(to|2)_?all"
)
# torch.compile names a kernel after the operations that it fuses, including those whose inputs come
# from a collective: triton_poi_fused_all_gather_into_tensor_0 computes.
FUSED = re.compile(r"triton_[a-z0-9]+(_[a-z0-9]+)?_fused")
# Operations by their names in lower case without punctuation; the first match counts
OPERATION_OF = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "crossdevicereduce": "all_reduce",  # vLLM
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
# Type names of c10 and C++ -> the name in torch, and bytes per element
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
    """A call of a collective, as far as the trace describes it."""

    name: str  # all_reduce, ..., or the name of the kernel
    group: str = ""  # the name of its process group
    ranks: str = ""  # the ranks of that group: `[0, 1]`
    group_size: int | None = None
    dtype: str = ""  # name in torch: float32
    size_bytes: int | None = None  # the larger of the bytes that a rank sends and receives
    of_rank: bool = False  # size_bytes is the part of one rank, as gloo records it for all_gather
    call: tuple[Any, ...] = ()  # `Seq` and `Comms Id`, equal on all ranks; () if unknown
    link: tuple[int, ...] = ()  # of a send or receive: from which rank to which; () if unknown


def is_communication(name: str) -> bool:
    """Whether a kernel communicates, according to its name."""
    lower = name.lower()
    return bool(COMMUNICATION.search(lower)) and not FUSED.match(lower)


def is_annotation(name: str) -> bool:
    """Whether a range on the GPU is that of a collective: `nccl:_all_gather_base`."""
    return name.startswith(("nccl:", "rccl:", "xccl:"))


def operation_of(name: str) -> str:
    """`_allgather_base` -> `all_gather`. An unknown name is returned without its arguments."""
    letters = re.sub("[^a-z0-9]", "", name.lower()).replace("all2all", "alltoall")
    for word, operation in OPERATION_OF.items():
        if word in letters:
            return operation
    return name.partition("(")[0].partition("<")[0].removeprefix("void ")


def type_of(name: Any) -> tuple[str, int] | None:
    """The name of a type in torch and its bytes per element; None if unknown."""
    return TYPES.get(str(name).lower().removeprefix("c10::"))


def collective_of_kernel(name: str, args: Mapping[str, Any]) -> Collective:
    """The collective described by a kernel's arguments, or by its name if it has none."""
    if "Collective name" not in args:
        return Collective(operation_of(name), link=link_of(name, args))
    group = args.get("Process Group Description", "undefined")
    if group == "undefined":
        group = args.get("Process Group Name", "")
    known = type_of(args.get("dtype"))
    sent, received = as_number(args.get("In msg nelems")), as_number(args.get("Out msg nelems"))
    size = None
    if known and sent is not None and received is not None:
        size = int(max(sent, received)) * known[1]
    members, seq = as_number(args.get("Group size")), as_number(args.get("Seq"))
    return Collective(
        name=operation_of(str(args["Collective name"])),
        group=str(group),
        ranks=str(args.get("Process Group Ranks", "")),
        group_size=int(members) if members and members > 0 else None,
        dtype=known[0] if known else str(args.get("dtype", "")),
        size_bytes=size,
        call=(seq, str(args.get("Comms Id"))) if seq is not None and seq >= 0 else (),
        link=link_of(str(args["Collective name"]), args),
    )


def link_of(name: str, args: Mapping[str, Any]) -> tuple[int, ...]:
    """The ranks between which a message is sent, from its arguments or its name: `send 0->1`,
    `recv 1<-0`; () if unknown."""
    ends = as_number(args.get("Src Rank")), as_number(args.get("Dst Rank"))
    if ends[0] is not None and ends[1] is not None and min(ends[0], ends[1]) >= 0:
        return int(ends[0]), int(ends[1])
    found = re.search(r"(\d+)(->|<-)(\d+)", name)
    if not found:
        return ()
    own, peer = int(found[1]), int(found[3])
    return (own, peer) if found[2] == "->" else (peer, own)


def collective_of_gloo(name: str, args: Mapping[str, Any]) -> Collective:
    """The collective of a range `gloo:all_reduce`. Sizes are known if shapes were recorded."""
    operation = operation_of(name.partition(":")[2])
    size, dtype = 0, ""
    for dims, kind in zip(args.get("Input Dims") or (), args.get("Input type") or (), strict=False):
        known = type_of(kind)
        counts = [as_number(dim) if type(dim) is not list else None for dim in dims]
        if not known or None in counts:
            return Collective(operation)
        dtype = known[0]
        size += math.prod(int(count or 0) for count in counts) * known[1]
    part = operation in ("all_gather", "gather")
    return Collective(operation, dtype=dtype, size_bytes=size or None, of_rank=part)
