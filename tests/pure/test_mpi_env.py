"""launch/mpi_env.sh with simulated variables. tests/launch/test_mpi.py uses real launchers.

The variables of flux and Intel MPI are from their manuals; neither was available for a test.
"""

import os
import shlex
import socket
import subprocess
from pathlib import Path

import pytest

from tests.process import ROOT

MADE = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"]
MADE += ["PET_NNODES", "PET_NODE_RANK", "OMP_NUM_THREADS", "MASTER_PORT"]

INTEL = "PMI_RANK={rank} PMI_SIZE=4 MPI_LOCALRANKID={local} MPI_LOCALNRANKS=2"
FLUX = "FLUX_TASK_RANK={rank} FLUX_JOB_SIZE=4 FLUX_TASK_LOCAL_ID={local} FLUX_JOB_NNODES=2"
FLUX += " FLUX_JOB_ID=ƒ2Sq5"
OPEN = "OMPI_COMM_WORLD_RANK={rank} OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK={local}"
OPEN += " OMPI_COMM_WORLD_LOCAL_SIZE=2 PMIX_NAMESPACE=77 PMIX_RANK={rank}"
PALS = "PALS_RANKID={rank} PALS_SIZE=4 PALS_LOCAL_RANKID={local} PALS_LOCAL_SIZE=2 PALS_APID=x"
PALS += " PMI_RANK={rank} PMI_SIZE=4 PMI_LOCAL_RANK={local} PMI_LOCAL_SIZE=2"
JSRUN = "JSM_NAMESPACE_RANK={rank} JSM_NAMESPACE_SIZE=4 JSM_NAMESPACE_LOCAL_RANK={local}"
JSRUN += " JSM_NAMESPACE_LOCAL_SIZE=2"
MVAPICH = OPEN.replace("OMPI", "MV2").partition(" PMIX")[0]
PMIX = "PMIX_RANK={rank} PMIX_NAMESPACE=prterun-a-7@1"
ADDRESS = "MASTER_ADDR=10.0.0.1"


def start(
    given: str, *command: str, rank: int = 0, path: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run the wrapper with only these variables. rank: one of four ranks on two nodes."""
    words = shlex.split(given.format(rank=rank, local=rank % 2))
    env = {"PATH": f"{path}{os.environ['PATH']}:/sbin"} | dict(w.split("=", 1) for w in words)
    command = ("bash", str(ROOT / "launch" / "mpi_env.sh"), *command)
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=500)


def variables(given: str, rank: int = 0, path: str = "") -> list[str]:
    """The variables that the command gets, in the order of MADE."""
    done = start(given, "env", rank=rank, path=path)
    assert done.returncode == 0, done.stderr
    env = dict(line.split("=", 1) for line in done.stdout.splitlines())
    return [env.get(name, "") for name in MADE]


@pytest.mark.parametrize(
    "launcher",
    [
        f"{INTEL} {ADDRESS} SLURM_JOB_ID=5 SLURM_STEP_ID=0 SLURM_PROCID=1",  # by srun
        f"{FLUX} {ADDRESS} PMI_RANK=9 PMI_SIZE=9",
        f"{PMIX} {ADDRESS} WORLD_SIZE=4 LOCAL_WORLD_SIZE=2",
        f"{PALS} {ADDRESS}",
        f"{MVAPICH} {ADDRESS} SLURM_JOB_ID=5",
        f"{JSRUN} {ADDRESS} LSB_JOBID=5",
    ],
)
def test_ranks(launcher: str) -> None:
    """All ranks on two nodes have the same address and port."""
    *first, port = variables(launcher)
    assert first == ["0", "0", "4", "2", "10.0.0.1", "2", "0", "1"]
    assert variables(launcher, rank=3) == ["3", "1", "4", "2", "10.0.0.1", "2", "1", "1", port]
    assert 20000 <= int(port) < 30000


def test_the_address_is_found(tmp_path: Path) -> None:
    """That of the first host for flux, and loopback on one node. Numbers may begin with 0."""
    one = "PMI_RANK=08 PMI_SIZE=010 MPI_LOCALRANKID=8 MPI_LOCALNRANKS=010 PBS_JOBID=7"
    assert variables(one)[:5] == ["8", "8", "10", "10", "127.0.0.1"]
    assert variables(one)[-1] != variables(one.replace("=7", "=8"))[-1]  # two jobs
    flux = tmp_path / "flux"
    flux.write_text('#!/bin/sh\n[ "$*" = "hostlist --nth=0 local" ] && echo 127.0.0.1\n')
    flux.chmod(0o755)
    assert variables(FLUX, path=f"{tmp_path}:")[4] == "127.0.0.1"


UNKNOWN = "not started by a supported launcher (mpirun, mpiexec, flux, jsrun)"


def test_pals_without_its_size(tmp_path: Path) -> None:
    """cray-pals: the size is lines of PBS_NODEFILE x PALS_LOCAL_SIZE. The first has rank 0."""
    nodes = tmp_path / "nodes"
    nodes.write_text("127.0.0.1\n192.0.2.77\n")
    given = f"{PALS.replace('PALS_SIZE=4', '')} PBS_NODEFILE={nodes}"
    *first, port = variables(given)
    assert first == ["0", "0", "4", "2", "127.0.0.1", "2", "0", "1"]
    assert variables(f"{given} {ADDRESS}", rank=3)[:4] == ["3", "1", "4", "2"]
    assert port != variables(given.replace("APID=x", "APID=y"))[-1]


NO_JOB = "the launcher sets no job ID from which to derive a port"
LOST = f"on {socket.gethostname()} cannot determine the host of rank 0; set MASTER_ADDR, e.g."


@pytest.mark.parametrize(
    ("given", "want"),
    [
        ("", f"{UNKNOWN}; e.g. mpirun -n 2 bash launch/mpi_env.sh true"),
        ("PMI_RANK=0 PMI_SIZE=2", UNKNOWN),
        (PALS.replace("PALS_SIZE=4", ""), "expected a number in PALS_SIZE, got ''"),
        # PMI_* of srun differ from those of mpirun
        ("SLURM_STEP_ID=0 PMI_RANK=0 PMI_SIZE=2", "this process was started by srun; use launch/"),
        (FLUX.replace("NNODES", "X"), "expected a number in FLUX_JOB_NNODES, got ''"),
        (f"{PMIX} WORLD_SIZE=two", "expected a number in WORLD_SIZE, got 'two'"),
        (FLUX.replace("NNODES=2", "NNODES=00"), "expected at least 1 in FLUX_JOB_NNODES, got '00'"),
        (f"{INTEL} {ADDRESS}", f"{NO_JOB}; set MASTER_PORT, e.g. mpirun -genv MASTER_PORT 29400"),
        (f"{INTEL} SLURM_JOB_ID=5", f"rank 0 {LOST}"),
        # rank 0 is not on the host of mpirun
        (f"{OPEN} OMPI_MCA_orte_hnp_uri='8.0;tcp://192.0.2.77:44093'", f"rank 0 {LOST}"),
        (OPEN.replace("SIZE=4", "SIZE=5"), "rank 0 of 5 is rank 0 of 2 on"),
        (OPEN.replace("={local}", "=1"), "rank 0 of 4 is rank 1 of 2 on"),
    ],
)
def test_what_is_missing(given: str, want: str) -> None:
    done = start(given, "true", path="/nowhere:")
    assert done.returncode == 2
    assert done.stderr.startswith(f"mpi_env.sh: error: {want}")
    assert done.stderr.count("\n") == 1


def test_the_command() -> None:
    """Arguments and variables are passed unchanged, and the status is that of the command."""
    given = f"{INTEL} {ADDRESS} MASTER_PORT=7 OMP_NUM_THREADS=3"
    assert variables(given)[-2:] == ["3", "7"]
    assert start(given, "printf", "%s|", "a b", "c'd", "").stdout == "a b|c'd||"
    assert start(given, "bash", "-c", "exit 130").returncode == 130


HUNG = 'echo "{\\"message\\": \\"HANG: no progress\\"}" >"$TORCHELASTIC_ERROR_FILE"; '


@pytest.mark.parametrize("launcher", [OPEN, INTEL])
def test_a_rank_that_is_killed(launcher: str, tmp_path: Path) -> None:
    """If hang detection has killed it, this is the last line. MPICH and Intel MPI end the other
    ranks only after a signal."""
    given = f"{launcher} {ADDRESS} MASTER_PORT=7 TMPDIR={tmp_path}"
    name = f"mpi_env.sh: rank 0 on {socket.gethostname()}: "
    for command, how in (("", "SIGKILL"), (HUNG, "ended because it hung")):
        done = start(given, "bash", "-c", f"{command}kill -KILL $$")
        assert done.stderr.splitlines()[-1] == name + how
        assert done.returncode == (3 if command and launcher == OPEN else -9)
        assert list(tmp_path.iterdir()) == []
