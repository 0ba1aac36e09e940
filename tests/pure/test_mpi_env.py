"""launch/mpi_env.sh by made-up variables: tests/launch/test_mpi.py has the real mpirun's.

Those of flux and Intel MPI are from their manuals; neither was there to be tried.
"""

import os
import shlex
import socket
import subprocess
from pathlib import Path

import pytest

from common.join import world

WRAPPER = Path(__file__).resolve().parents[2] / "launch" / "mpi_env.sh"
MADE = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
MADE += ["PET_NNODES", "PET_NODE_RANK", "OMP_NUM_THREADS"]

INTEL = "PMI_RANK={rank} PMI_SIZE=4 MPI_LOCALRANKID={local} MPI_LOCALNRANKS=2"
FLUX = "FLUX_TASK_RANK={rank} FLUX_JOB_SIZE=4 FLUX_TASK_LOCAL_ID={local} FLUX_JOB_NNODES=2"
FLUX += " FLUX_JOB_ID=ƒ2Sq5"
OPEN = "OMPI_COMM_WORLD_RANK={rank} OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK={local}"
OPEN += " OMPI_COMM_WORLD_LOCAL_SIZE=2 PMIX_NAMESPACE=77 PMIX_RANK={rank}"
PMIX = "PMIX_RANK={rank} PMIX_NAMESPACE=prterun-a-7@1"
ADDRESS = "MASTER_ADDR=10.0.0.1"


def start(variables: str, *command: str, path: str = "") -> subprocess.CompletedProcess[str]:
    """Run the wrapper with these variables and no others."""
    env = dict(word.split("=", 1) for word in shlex.split(variables))
    return subprocess.run(
        ["bash", str(WRAPPER), *command],
        env={"PATH": f"{path}{os.environ['PATH']}:/sbin", **env},
        capture_output=True,
        text=True,
        timeout=30,
    )


def variables(given: str, path: str = "") -> dict[str, str | None]:
    """What the command gets."""
    done = start(given, "env", path=path)
    assert done.returncode == 0, done.stderr
    env = dict(line.split("=", 1) for line in done.stdout.splitlines())
    return {name: env.get(name) for name in MADE}


@pytest.mark.parametrize(
    "launcher",
    [
        f"{INTEL} {ADDRESS} SLURM_JOB_ID=5",
        f"{INTEL} {ADDRESS} SLURM_JOB_ID=5 SLURM_STEP_ID=0 SLURM_PROCID=1",  # srun starts proxies
        f"{FLUX} {ADDRESS} PMI_RANK=9 PMI_SIZE=9",
        f"{OPEN} {ADDRESS}",
        f"{PMIX} {ADDRESS} WORLD_SIZE=4 LOCAL_WORLD_SIZE=2",
    ],
)
def test_ranks(launcher: str) -> None:
    """Four ranks on two nodes; all of them agree on where they meet."""
    made = [variables(launcher.format(rank=rank, local=rank % 2)) for rank in range(4)]
    for rank, values in enumerate(made):
        port = values.pop("MASTER_PORT")
        assert port == variables(launcher.format(rank=0, local=0))["MASTER_PORT"]
        assert 20000 <= int(port or 0) < 30000
        assert list(values.values()) == [
            *(str(rank), str(rank % 2), "4", "2", "10.0.0.1"),
            *("2", str(rank // 2), "1"),
        ]


def test_what_is_set_stays() -> None:
    values = variables(f"{INTEL} {ADDRESS} MASTER_PORT=7 OMP_NUM_THREADS=3".format(rank=3, local=1))
    assert [values["MASTER_PORT"], values["OMP_NUM_THREADS"]] == ["7", "3"]


def test_one_node_needs_no_address() -> None:
    one = "PMI_RANK=1 PMI_SIZE=2 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2 PBS_JOBID=7.host"
    assert variables(one)["MASTER_ADDR"] == "127.0.0.1"


def test_two_jobs_have_two_ports() -> None:
    jobs = [OPEN.replace("=77", f"={number}") + f" {ADDRESS}" for number in range(70, 80)]
    ports = {variables(job.format(rank=0, local=0))["MASTER_PORT"] for job in jobs}
    assert len(ports) == 10


def test_the_address_is_found(tmp_path: Path) -> None:
    """mpirun's host or flux's first one, for ranks that are there and ranks that are not."""
    here, uri = "127.0.0.1", "OMPI_MCA_orte_hnp_uri='8.0;tcp://{}:44093;tcp6://[fd00::2]:38787'"
    elsewhere = "192.0.2.77"
    both = f"{OPEN} {uri.format(f'{elsewhere},{here}')}"
    assert variables(both.format(rank=1, local=1))["MASTER_ADDR"] == here
    assert variables(both.format(rank=2, local=0))["MASTER_ADDR"] == elsewhere
    flux = tmp_path / "flux"
    flux.write_text(f'#!/bin/sh\n[ "$*" = "hostlist --nth=0 local" ] && echo {here}\n')
    flux.chmod(0o755)
    job = FLUX.format(rank=0, local=0)
    assert variables(job, path=f"{tmp_path}:")["MASTER_ADDR"] == here


LOST = f"on {socket.gethostname()} does not know where rank 0 is; set MASTER_ADDR, e.g. mpirun -x"


@pytest.mark.parametrize(
    ("given", "want"),
    [
        ("", "neither mpirun nor flux started this; e.g. mpirun -n 2 bash launch/mpi_env.sh true"),
        # srun's PMI_* are not mpirun's
        ("SLURM_STEP_ID=0 PMI_RANK=0 PMI_SIZE=2", "srun started this; use launch/slurm_env.sh"),
        ("SLURM_STEP_ID=0 PMIX_RANK=0", "srun started this; use launch/slurm_env.sh"),
        ("PMI_RANK=0 PMI_SIZE=2", "neither mpirun nor flux started this"),
        (INTEL.replace("MPI_LOCALNRANKS", "X"), "expected a number in MPI_LOCALNRANKS, got ''"),
        (FLUX.replace("NNODES", "X"), "expected a number in FLUX_JOB_NNODES, got ''"),
        (OPEN.replace("LD_RANK", "X"), "expected a number in OMPI_COMM_WORLD_RANK, got ''"),
        (PMIX, "expected a number in WORLD_SIZE, got ''"),
        (f"{PMIX} WORLD_SIZE=two", "expected a number in WORLD_SIZE, got 'two'"),
        (f"{INTEL} {ADDRESS}", "set MASTER_PORT, e.g. mpirun -genv MASTER_PORT 29400"),
        (f"{INTEL} SLURM_JOB_ID=5", f"rank 0 {LOST}"),
        # mpirun's host is not rank 0's
        (f"{OPEN} OMPI_MCA_orte_hnp_uri='8.0;tcp://192.0.2.77:44093'", f"rank 0 {LOST}"),
        (FLUX, f"rank 0 {LOST}"),
        (OPEN.replace("WORLD_SIZE=4", "WORLD_SIZE=0"), "expected at least 1 in OMPI_COMM_WORLD_SI"),
        (FLUX.replace("NNODES=2", "NNODES=00"), "expected at least 1 in FLUX_JOB_NNODES, got '00'"),
    ],
)
def test_what_is_missing(given: str, want: str) -> None:
    done = start(given.format(rank=0, local=0), "true", path="/nowhere:")
    assert done.returncode == 2
    assert done.stderr.startswith(f"mpi_env.sh: error: {want}")
    assert done.stderr.count("\n") == 1


def test_a_number_may_begin_with_0() -> None:
    """bash takes 08 for octal, and there is no such digit."""
    given = "PMI_RANK=08 PMI_SIZE=010 MPI_LOCALRANKID=8 MPI_LOCALNRANKS=010 PBS_JOBID=7"
    assert list(variables(given).values())[:4] == ["8", "8", "10", "10"]


@pytest.mark.parametrize(("rank", "local", "size"), [(1, 0, 4), (2, 0, 5)])
def test_ranks_fill_node_after_node(rank: int, local: int, size: int) -> None:
    given = f"{OPEN} {ADDRESS}".format(rank=rank, local=local).replace("SIZE=4", f"SIZE={size}")
    done = start(given, "true")
    assert done.returncode == 2
    assert f"error: rank {rank} of {size} is rank {local} of 2 on" in done.stderr
    assert "give mpirun --map-by ppr:N:node or -ppn N" in done.stderr


def test_the_command(tmp_path: Path) -> None:
    """Words stay what they are; the status is the command's."""
    given = f"{INTEL} {ADDRESS} MASTER_PORT=7".format(rank=1, local=1)
    assert start(given, "printf", "%s|", "a b", "c'd", "").stdout == "a b|c'd||"
    assert start(given, "bash", "-c", "exit 130").returncode == 130
    assert "error: expected a command, e.g. python3" in start(given).stderr
    # MPICH names no rank
    killed = start(given, "bash", "-c", "kill -9 $$")
    assert killed.returncode == -9  # or mpirun would not end the others
    assert f"mpi_env.sh: rank 1 on {socket.gethostname()}: SIGKILL" in killed.stderr


@pytest.mark.parametrize(
    ("size", "rank"),
    [
        ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
        ("PMI_SIZE", "PMI_RANK"),
        ("FLUX_JOB_SIZE", "FLUX_TASK_RANK"),
    ],
)
def test_worlds_of_one_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], size: str, rank: str
) -> None:
    for name in ("RANK", "WORLD_SIZE", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.setenv(name, "")  # noted, so that it is as before at the end
        monkeypatch.delenv(name)
    monkeypatch.setenv(size, "2")
    monkeypatch.setenv(rank, "0")
    with pytest.raises(SystemExit, match="2"):
        world()
    said = capsys.readouterr().err
    assert f"{size} says 2 tasks, but each would run by itself; start them with" in said
    assert "launch/mpi_env.sh (mpirun, flux)" in said
