"""What the launcher's variables say of this job: ranks, tasks, nodes.

Pure: a mapping of variables in, no torch, no network.
"""

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

WORLD: Final = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
SWITCH: Final = "TORCHRUN_BENCH_PREFLIGHT"
MEANT: Final = f"if that is meant: export {SWITCH}=off"
# Of each MPI: this process's rank, the processes of the job, those of this node.
MPI: Final = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),
)

Variables = Mapping[str, str]


@dataclass(frozen=True)
class Tasks:
    """The parallel tasks that srun or mpirun started, of which this process is in one."""

    launcher: str
    rank: int
    count: int
    here: int  # on this node


def switched_off(variables: Variables) -> bool:
    """Whether the user has switched the refusals off. Raises ValueError for a misspelt value."""
    value = variables.get(SWITCH, "on")
    if value not in ("on", "off"):
        raise ValueError(f"{SWITCH} is on (the default) or off, got '{value}'; unset {SWITCH}")
    return value == "off"


def world(variables: Variables) -> tuple[int, int, int, int]:
    """(rank, world size, local rank, local world size) as the launcher set them.

    Without a launcher this is a world of one. Raises ValueError for half a set of them, for what
    is no number, and for numbers that contradict each other.
    """
    if "RANK" not in variables and "WORLD_SIZE" not in variables:
        return 0, 1, 0, 1
    values = []
    for name in WORLD:
        try:
            values.append(int(variables[name]))
        except (KeyError, ValueError):
            raise ValueError(
                f"expected the variables {', '.join(WORLD)} from the launcher, "
                f"got {name}={variables.get(name)!r}; start with torchrun"
            ) from None
    rank, world_size, local_rank, local_world_size = values
    for inner, outer in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        number, count = int(variables[inner]), int(variables[outer])
        if not 0 <= number < count:
            raise ValueError(
                f"expected {inner} from 0 to {outer} - 1, got {inner}={number} and "
                f"{outer}={count}; start with torchrun, which sets both"
            )
    if local_world_size > world_size or local_rank > rank:
        raise ValueError(
            f"expected a node's ranks to be among all ranks, got {local_rank} of "
            f"{local_world_size} on this node and {rank} of {world_size} in all "
            f"({', '.join(WORLD)}); start with torchrun, which sets them"
        )
    return rank, world_size, local_rank, local_world_size


def master(variables: Variables) -> tuple[str, int]:
    """The address and port where the ranks meet. Raises ValueError where they cannot be one."""
    address, port = variables.get("MASTER_ADDR", ""), variables.get("MASTER_PORT", "")
    if not address.strip():
        raise ValueError(
            "expected MASTER_ADDR, the first node's address, from the launcher, got "
            f"{variables.get('MASTER_ADDR')!r}; start with torchrun, or export MASTER_ADDR=HOST"
        )
    if not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ValueError(
            "expected MASTER_PORT from 1 to 65535, the same on all ranks, got "
            f"{variables.get('MASTER_PORT')!r}; start with torchrun, or export MASTER_PORT=29500"
        )
    return address, int(port)


def agent_serves_store(variables: Variables) -> bool:
    """Whether torchrun's agent serves the store, and not rank 0."""
    return variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def may_restart(variables: Variables) -> bool:
    """Whether torchrun starts the ranks again where one fails."""
    return int(variables.get("TORCHELASTIC_MAX_RESTARTS") or 0) > 0


# -- Slurm and MPI ---------------------------------------------------------------------------------


def tasks(variables: Variables) -> Tasks | None:
    """The tasks beside which this process was started; None outside srun and mpirun.

    A batch script and the shell of salloc run once, whatever SLURM_NTASKS says: only a step has
    tasks. With `srun --pty` only the first one has a terminal, and the others are gone at once.
    """
    for rank, size, here in MPI[:2]:  # within Slurm mpirun starts its daemons by srun
        if size in variables:
            return _mpi_tasks(variables, rank, size, here)
    count = _number(variables, "SLURM_STEP_NUM_TASKS")
    if "SLURM_STEP_ID" in variables and count:
        if "SLURM_PTY_PORT" in variables:
            return Tasks("Slurm", 0, 1, 1)
        try:
            per_node = expand_counts(variables["SLURM_STEP_TASKS_PER_NODE"])
            here_count = per_node[_number(variables, "SLURM_NODEID") or 0]
        except (KeyError, ValueError, IndexError):
            here_count = 1
        return Tasks("Slurm", _number(variables, "SLURM_PROCID") or 0, count, here_count)
    rank, size, here = MPI[2]
    return _mpi_tasks(variables, rank, size, here) if size in variables else None


def _mpi_tasks(variables: Variables, rank: str, size: str, here: str) -> Tasks:
    numbers = [_number(variables, name) for name in (rank, size, here)]
    return Tasks("MPI", numbers[0] or 0, numbers[1] or 1, numbers[2] or 1)


def _number(variables: Variables, name: str) -> int | None:
    text = variables.get(name, "")
    return int(text) if text.isdecimal() else None


def misfit(variables: Variables, agent: Sequence[str] = ()) -> str | None:
    """What is wrong with how the job was started, in one line; None where nothing is seen.

    agent: the command line of the parent process, which is torchrun's agent if there is one.
    Every process of the job comes to the same answer.
    """
    started = tasks(variables)
    if started is None or started.count < 2 or switched_off(variables):
        return None
    many = f"{started.count} {started.launcher} tasks"
    slurm = started.launcher == "Slurm"
    once_a_node = "srun --ntasks-per-node=1" if slurm else "mpirun --map-by ppr:1:node"
    cure = (
        "sbatch launch/slurm_srun.sbatch SCRIPT, or launch/slurm_torchrun.sbatch"
        if slurm
        else f"{once_a_node} torchrun --nproc-per-node {started.here} ..."
    )
    if "TORCHELASTIC_RUN_ID" in variables:
        if started.here > 1:
            return (
                f"torchrun was started {started.here} times on a node, once by each of {many}, and "
                "each starts ranks of its own; start it once a node: "
                f"{once_a_node} torchrun ... ({MEANT})"
            )
        elastic = any(re.search(r"(^|=)\d+:\d+$", word) for word in agent)
        if variables.get("GROUP_WORLD_SIZE") == "1" and not elastic:
            return (
                f"{started.count} worlds instead of one: each of {many} runs a torchrun of one "
                f"node, which knows of no other; join them: {once_a_node} torchrun --nnodes "
                f"{started.count} --rdzv-backend c10d --rdzv-endpoint FIRST_HOST:29400 ... "
                f"({MEANT})"
            )
        return None
    world_size = _number(variables, "WORLD_SIZE")
    if world_size is None and "RANK" not in variables:
        return (
            f"{started.count} worlds of one: each of {many} takes itself for rank 0 of 1, as RANK "
            f"and WORLD_SIZE are not set; start it with {cure} ({MEANT})"
        )
    if world_size is not None and world_size < started.count:
        return (
            f"there are {many}, and WORLD_SIZE={world_size}: their ranks cannot all differ; "
            f"start it with {cure} ({MEANT})"
        )
    address = variables.get("MASTER_ADDR", "")
    if started.here < started.count and (address == "localhost" or address.startswith("127.")):
        first = "$(scontrol show hostnames | head -n 1)" if slurm else "FIRST_HOST"
        return (
            f"MASTER_ADDR={address} is another host on each node, and {many} run on several; "
            f"name the first node: export MASTER_ADDR={first}"
        )
    return None


def speaks(variables: Variables) -> bool:
    """Whether this is the process that speaks for all: rank 0, of the first task."""
    started = tasks(variables)
    if started and ("RANK" not in variables or variables.get("GROUP_WORLD_SIZE") == "1"):
        return started.rank == 0 and variables.get("LOCAL_RANK", "0") == "0"
    return variables.get("RANK", "0") == "0"


# -- the nodes of a job ----------------------------------------------------------------------------


def expand_hostlist(text: str) -> list[str]:
    """`n[08-10,12],login1` as [n08, n09, n10, n12, login1]: Slurm's hostlist expressions.

    Raises ValueError for what is none.
    """
    found = []
    for part in re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", text):
        pieces = re.split(r"\[([^\]]*)\]", part)  # literal, ranges, literal, ...
        if "[" in "".join(pieces[::2]) or "]" in "".join(pieces[::2]):
            raise ValueError(f"expected a list of hosts such as n[1-4], got '{text}'")
        choices = [_ranges(piece) if i % 2 else [piece] for i, piece in enumerate(pieces)]
        found += ["".join(words) for words in itertools.product(*choices)]
    if text.count("[") != text.count("]"):
        raise ValueError(f"expected a list of hosts such as n[1-4], got '{text}'")
    return found


def _ranges(text: str) -> list[str]:
    found = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError(f"expected numbers such as 1-4,7, got '{text}'")
        width = len(first)
        numbers = range(int(first), int(last if dash else first) + 1)
        found += [f"{number:0{width}d}" for number in numbers]
    return found


def expand_counts(text: str) -> list[int]:
    """`2(x3),1` as [2, 2, 2, 1]: Slurm's tasks per node. Raises ValueError for what is none."""
    found = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise ValueError(f"expected tasks per node such as 2(x3),1, got '{text}'")
        found += [int(match[1])] * int(match[2] or 1)
    return found


def nodes(variables: Variables) -> list[str]:
    """The names of the Slurm job's nodes; [] outside Slurm."""
    try:
        return expand_hostlist(variables.get("SLURM_JOB_NODELIST", ""))
    except ValueError:
        return []


def is_among(host: str, names: Sequence[str]) -> bool:
    """Whether a host is one of these by name, with or without its domain."""
    short = host if re.fullmatch(r"[\d.]+|.*:.*", host) else host.split(".")[0]
    return host in names or short in {name.split(".")[0] for name in names}
