"""common/job.py: what the launcher's variables say; each launcher's as it sets them."""

import pytest

from common import job

# what Slurm 22.05 sets: in a batch script or salloc's shell, and in a task of a step
BATCH = {
    "SLURM_JOB_NODELIST": "node[1-2]",
    "SLURM_NTASKS": "4",
    "SLURM_NPROCS": "4",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_TASKS_PER_NODE": "2(x2)",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
}


def step(tasks: int, per_node: str, procid: int = 0, node: int = 0) -> dict[str, str]:
    return BATCH | {
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": str(tasks),
        "SLURM_STEP_TASKS_PER_NODE": per_node,
        "SLURM_PROCID": str(procid),
        "SLURM_NODEID": str(node),
    }


def ranks(rank: int, world_size: int, local_rank: int, local: int) -> dict[str, str]:
    values = (rank, world_size, local_rank, local)
    return dict(zip(job.WORLD, map(str, values), strict=True))


def torchrun(rank: int, world_size: int, local_rank: int, local: int) -> dict[str, str]:
    return ranks(rank, world_size, local_rank, local) | {
        "TORCHELASTIC_RUN_ID": "none",
        "GROUP_RANK": str(rank // local),
        "GROUP_WORLD_SIZE": str(world_size // local),
        "MASTER_ADDR": "node1",
        "MASTER_PORT": "29400",
    }


OMPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
PMI = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALNRANKS": "4"}


# -- who this process is ---------------------------------------------------------------------------


def test_world() -> None:
    assert job.world({}) == (0, 1, 0, 1)
    assert job.world(BATCH) == (0, 1, 0, 1)
    assert job.world(ranks(5, 8, 1, 4)) == (5, 8, 1, 4)
    assert job.world(ranks(2, 3, 0, 1)) == (2, 3, 0, 1)  # 2 ranks on the first node, 1 here


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "0"}, "got WORLD_SIZE=None; start with torchrun"),
        ({"WORLD_SIZE": "2"}, "got RANK=None"),
        (ranks(0, 2, 0, 2) | {"LOCAL_RANK": "x"}, "got LOCAL_RANK='x'"),
        (ranks(2, 2, 0, 2), "RANK from 0 to WORLD_SIZE - 1, got RANK=2 and WORLD_SIZE=2"),
        (ranks(-1, 2, 0, 2), "got RANK=-1"),
        (ranks(0, 0, 0, 1), "got RANK=0 and WORLD_SIZE=0"),
        (ranks(1, 4, 2, 2), "got LOCAL_RANK=2 and LOCAL_WORLD_SIZE=2"),
        (ranks(0, 2, 0, 4), "got 0 of 4 on this node and 0 of 2 in all"),
        (ranks(0, 4, 1, 2), "got 1 of 2 on this node and 0 of 4 in all"),
    ],
)
def test_ranks_that_cannot_be(variables: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        job.world(variables)


def test_master() -> None:
    good = {"MASTER_ADDR": "n1", "MASTER_PORT": "29500"}
    assert job.master(good) == ("n1", 29500)
    for name, value in (
        *(("MASTER_ADDR", value) for value in (None, "", " ")),
        *(("MASTER_PORT", value) for value in (None, "", "x", "0", "-1", "65536", "2950O", "1.5")),
    ):
        variables = {key: text for key, text in (good | {name: value or ""}).items()}
        if value is None:
            del variables[name]
        with pytest.raises(ValueError, match=f"expected {name}.*got {value!r}; start with torchr"):
            job.master(variables)


# -- tasks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, None),
        (BATCH, None),  # SLURM_NTASKS=4, and yet the script runs once
        (step(4, "2(x2)", 3, 1), job.Tasks("Slurm", 3, 4, 2)),
        (step(3, "2,1", 2, 1), job.Tasks("Slurm", 2, 3, 1)),
        (step(4, "2(x2)") | {"SLURM_PTY_PORT": "4711"}, job.Tasks("Slurm", 0, 1, 1)),
        (step(4, "what?"), job.Tasks("Slurm", 0, 4, 1)),
        (OMPI, job.Tasks("MPI", 1, 4, 2)),
        (PMI, job.Tasks("MPI", 3, 4, 4)),
        (step(2, "1(x2)", 1, 1) | OMPI, job.Tasks("MPI", 1, 4, 2)),  # mpirun's daemons: by srun
        (step(2, "1(x2)", 1, 1) | PMI, job.Tasks("Slurm", 1, 2, 1)),  # srun --mpi=pmi2
        ({"OMPI_COMM_WORLD_SIZE": "2"}, job.Tasks("MPI", 0, 2, 1)),
    ],
)
def test_tasks(variables: dict[str, str], expected: job.Tasks | None) -> None:
    assert job.tasks(variables) == expected


@pytest.mark.parametrize(
    ("variables", "parts"),
    [
        (
            step(4, "2(x2)", 1),
            ["4 worlds of one", "4 Slurm tasks", "sbatch launch/slurm_srun.sbatch"],
        ),
        (OMPI, ["4 worlds of one", "4 MPI tasks", "torchrun --nproc-per-node 2"]),
        (step(4, "2(x2)") | ranks(0, 1, 0, 1), ["4 Slurm tasks, and WORLD_SIZE=1"]),
        (step(4, "2(x2)", 3) | ranks(3, 2, 1, 2), ["WORLD_SIZE=2"]),  # before RANK=3 is refused
        (
            step(4, "2(x2)") | torchrun(0, 4, 0, 2),
            ["torchrun was started 2 times on a node", "srun --ntasks-per-node=1 torchrun"],
        ),
        (OMPI | torchrun(0, 4, 0, 2), ["2 times on a node", "mpirun --map-by ppr:1:node torchrun"]),
        (
            step(2, "1(x2)") | torchrun(0, 8, 0, 8),
            ["2 worlds instead of one", "torchrun --nnodes 2 --rdzv-backend c10d"],
        ),
        (
            step(4, "2(x2)", 3) | ranks(3, 4, 1, 2) | {"MASTER_ADDR": "localhost"},
            ["MASTER_ADDR=localhost is another host on each", "export MASTER_ADDR=$(scontrol"],
        ),
        (OMPI | ranks(1, 4, 1, 2) | {"MASTER_ADDR": "127.0.0.1"}, ["MASTER_ADDR=127.0.0.1 is ano"]),
    ],
)
def test_misfits(
    variables: dict[str, str], parts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    line = job.misfit(variables)
    assert line is not None
    assert "\n" not in line
    for part in parts:
        assert part in line
    if job.MEANT in line:  # the line says how to go on nevertheless
        assert job.misfit(variables | {job.SWITCH: "off"}) is None
    with pytest.raises(ValueError, match="or off, got 'no'"):
        job.misfit(variables | {job.SWITCH: "no"})


@pytest.mark.parametrize(
    ("variables", "agent"),
    [
        ({}, ()),
        (BATCH, ()),  # python in a batch script: a world of one, and meant
        (BATCH | torchrun(0, 8, 0, 8), ()),  # torchrun --standalone there
        (step(1, "1"), ()),
        (step(4, "4") | {"SLURM_PTY_PORT": "4711"}, ()),  # a shell of `srun -n 4 --pty bash`
        (step(4, "4") | {"SLURM_PTY_PORT": "4711"} | torchrun(0, 4, 0, 4), ()),
        (step(4, "2(x2)", 3, 1) | ranks(3, 4, 1, 2) | {"MASTER_ADDR": "node1"}, ()),
        (step(4, "4", 3) | ranks(3, 4, 3, 4) | {"MASTER_ADDR": "localhost"}, ()),  # one node
        (step(1, "1") | ranks(3, 4, 3, 4), ()),  # a script in a task that starts ranks itself
        (step(2, "1(x2)", 1, 1) | torchrun(8, 16, 0, 8), ()),
        (step(2, "1(x2)") | PMI | torchrun(0, 16, 0, 8), ()),
        # an elastic job that goes on with one node of two
        (step(2, "1(x2)") | torchrun(0, 8, 0, 8), ("torchrun", "--nnodes", "1:2", "x.py")),
        (step(2, "1(x2)") | torchrun(0, 8, 0, 8), ("torchrun", "--nnodes=1:2", "x.py")),
        (OMPI | {"OMPI_COMM_WORLD_SIZE": "1"}, ()),
    ],
)
def test_what_fits(variables: dict[str, str], agent: tuple[str, ...]) -> None:
    assert job.misfit(variables, agent) is None


@pytest.mark.parametrize(
    ("variables", "speaks"),
    [
        ({}, True),
        (ranks(0, 4, 0, 2), True),
        (ranks(1, 4, 1, 2), False),
        (step(4, "2(x2)", 0), True),
        (step(4, "2(x2)", 1), False),  # rank 0 of a world of one, but not the first task
        (step(2, "1(x2)", 0) | torchrun(0, 8, 0, 8), True),
        (step(2, "1(x2)", 1) | torchrun(0, 8, 0, 8), False),
        (step(2, "1(x2)", 0) | torchrun(1, 8, 1, 8), False),
        (step(2, "1(x2)", 1, 1) | torchrun(0, 16, 0, 8), True),  # c10d: in order of arrival
        (OMPI, False),
    ],
)
def test_one_speaks_for_all(variables: dict[str, str], speaks: bool) -> None:
    assert job.speaks(variables) == speaks


# -- nodes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", []),
        ("node1", ["node1"]),
        ("node[1-3]", ["node1", "node2", "node3"]),
        ("n[08-10,12],login1", ["n08", "n09", "n10", "n12", "login1"]),
        ("a,b[2],c", ["a", "b2", "c"]),
        ("r[1-2]n[1-2]-ib", ["r1n1-ib", "r1n2-ib", "r2n1-ib", "r2n2-ib"]),
        ("gpu-a100-[001-002].hpc,x", ["gpu-a100-001.hpc", "gpu-a100-002.hpc", "x"]),
    ],
)
def test_expand_hostlist(text: str, names: list[str]) -> None:
    assert job.expand_hostlist(text) == names
    assert job.nodes({"SLURM_JOB_NODELIST": text}) == names


@pytest.mark.parametrize("text", ["n[1-2", "n1-2]", "n[]", "n[a-b]", "n[1-]", "n[1-x]", "n[1]]"])
def test_what_is_no_hostlist(text: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        job.expand_hostlist(text)
    assert job.nodes({"SLURM_JOB_NODELIST": text}) == []


@pytest.mark.parametrize(
    ("text", "counts"), [("4", [4]), ("2(x3),1", [2, 2, 2, 1]), ("1,2(x2)", [1, 2, 2])]
)
def test_expand_counts(text: str, counts: list[int]) -> None:
    assert job.expand_counts(text) == counts


@pytest.mark.parametrize("text", ["", "x", "2(3)", "2(x)", "1,,2"])
def test_what_is_no_list_of_counts(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected tasks per node such as 2\(x3\),1"):
        job.expand_counts(text)


def test_is_among() -> None:
    names = ["n1", "n2.cluster"]
    for host in ("n1", "n1.cluster", "n2", "n2.cluster"):
        assert job.is_among(host, names)
    for host in ("n3", "n11", "10.0.0.1", "n", ""):
        assert not job.is_among(host, names)
    assert job.is_among("10.0.0.1", ["10.0.0.1"])
    assert not job.is_among("10.0.0.2", ["10.0.0.1"])  # not its first word
