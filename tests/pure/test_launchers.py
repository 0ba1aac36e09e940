"""The launchers' scripts by made-up variables and files: tests/launch has the real ones."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.process import ROOT

LAUNCH = ROOT / "launch"
SCRIPT = str(ROOT / "benchmarks" / "ddp_sweep.py")
JOB = "SLURM_JOB_ID=4711 SLURM_JOB_NUM_NODES=2 DRY_RUN=1"
STEP = "SLURM_JOB_ID=4711 SLURM_STEP_TASKS_PER_NODE=1(x4) SLURM_PROCID=1 SLURM_LOCALID=0"
STEP += " SLURM_STEP_NUM_TASKS=4 SLURM_STEP_NUM_NODES=4 SLURM_NODEID=1"


def start(name: str, *words: str, given: str = "") -> subprocess.CompletedProcess[str]:
    """Run a script of launch/ with these variables, and Debian's programs alone."""
    env = {"PATH": "/usr/bin:/bin"} | dict(word.split("=", 1) for word in given.split())
    return subprocess.run(
        ["bash", str(LAUNCH / name), *words], env=env, capture_output=True, text=True, timeout=30
    )


@pytest.fixture
def container(tmp_path: Path) -> str:
    """A PATH without Slurm's programs."""
    for name in ("bash", "sed", "getent", "sh"):
        (tmp_path / name).symlink_to(f"/usr/bin/{name}")
    return f"PATH={tmp_path}"


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node[001-002,007],gpu-1", "node001"),
        ("node7", "node7"),
        ("rack[1-2]n[01-04]", "rack1n01"),
        ("a1,b2", "a1"),
        ("gpu-[1-2],node3", "gpu-1"),
        ("linux[1,2]", "linux1"),
        ("a,b[001,003],c", "a"),
        ("cn-0[1-4].x,cn-10.y", "cn-01.x"),
        ("n[08-12]-ib", "n08-ib"),
    ],
)
def test_the_first_host_of_a_nodelist(nodes: str, first: str, container: str) -> None:
    """In a container Slurm's variables are there, and its programs are not."""
    given = f"{STEP} SLURM_STEP_NODELIST={nodes} {container}"
    done = start("slurm_env.sh", "bash", "-c", "echo $MASTER_ADDR:$MASTER_PORT", given=given)
    assert (done.stdout, done.stderr) == (f"{first}:24711\n", "")


@pytest.mark.parametrize(
    ("wrapper", "tasks", "gpus", "ranks", "idle"),
    [
        ("slurm_torchrun.sbatch", "1", "8", 8, 0),  # its one task is torchrun
        ("slurm_torchrun.sbatch", "1", "a100:8", 8, 0),
        ("slurm_torchrun.sbatch", "1", "", 1, 0),
        ("slurm_torchrun.sbatch", "2", "8", 2, 6),
        ("slurm_torchrun.sbatch", "", "8", 8, 0),
        ("slurm_srun.sbatch", "1", "8", 1, 7),
        ("slurm_srun.sbatch", "8", "8", 8, 0),
        ("slurm_srun.sbatch", "", "a100:4", 4, 0),
        ("slurm_srun.sbatch", "4", "", 4, 0),
    ],
)
def test_ranks_of_a_node(wrapper: str, tasks: str, gpus: str, ranks: int, idle: int) -> None:
    given = f"{JOB} SLURM_NTASKS_PER_NODE={tasks} SLURM_GPUS_PER_NODE={gpus}"
    done = start(wrapper, SCRIPT, given=given)
    assert done.returncode == 0, done.stderr
    name = "--nproc-per-node" if "torchrun" in wrapper else "--ntasks-per-node"
    assert f"{name}={ranks}" in shlex.split(done.stdout)
    said = f"{wrapper}: {idle} of 8 GPUs of a node stay idle: --ntasks-per-node {ranks} is as many"
    assert said in done.stderr if idle else not done.stderr


@pytest.mark.parametrize(
    ("wrong", "want"),
    [
        ("MAX_REQUEUES=abc", "expected a number in MAX_REQUEUES, got 'abc'; e.g. MAX_REQUEUES=3"),
        ("MAX_REQUEUES=-1", "expected a number in MAX_REQUEUES, got '-1'"),
        ("GIVE_UP_S=abc", "expected a number in GIVE_UP_S, got 'abc'; e.g. GIVE_UP_S=60"),
        ("GIVE_UP_S=08", "expected a number in GIVE_UP_S, got '08'"),
        ("SLURM_JOB_ID=7_3", "expected a number in SLURM_JOB_ID, got '7_3'"),
    ],
)
def test_a_job_with_a_wrong_variable(wrong: str, want: str) -> None:
    done = start("slurm_srun.sbatch", SCRIPT, given=f"{JOB} SLURM_NTASKS_PER_NODE=2 {wrong}")
    assert done.returncode == 2
    assert done.stderr.startswith(f"slurm_srun.sbatch: error: {want}")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [("SLURM_JOB_ID", "7_3"), ("SLURM_PROCID", ""), ("SLURM_STEP_NUM_NODES", "x")],
)
def test_a_step_with_a_wrong_variable(name: str, value: str) -> None:
    given = f"{STEP} SLURM_STEP_NODELIST=node1 {name}={value}"
    done = start("slurm_env.sh", "true", given=given)
    assert done.returncode == 2
    said = f"slurm_env.sh: error: expected a number in {name}, got '{value}'\n"
    assert done.stderr == said


def hosts(path: Path, text: str, **variables: str) -> subprocess.CompletedProcess[str]:
    path.write_bytes(text.encode())
    given = " ".join(f"{name}={value}" for name, value in variables.items())
    return start("ssh_torchrun.sh", str(path), SCRIPT, given=given)


@pytest.mark.parametrize(("begin", "end"), [("", "\n"), ("", "\r\n"), ("\ufeff", "\r\n")])
def test_a_hostfile_of_any_system(tmp_path: Path, begin: str, end: str) -> None:
    text = begin + end.join(["# two", "node1 slots=8", "node2 slots=4 # the small one", ""])
    done = hosts(tmp_path / "hosts", text, DRY_RUN="1")
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first.startswith("[node1] ")
    assert "--nproc-per-node=8" in first
    assert second.startswith("[node2] ")
    assert "--nproc-per-node=4" in second
    assert "\r" not in done.stdout


@pytest.mark.parametrize(
    "line",
    [
        *("node1", "node1:8", "node1 slots=8 max_slots=8", "node1 8", "node1 slots=0"),
        "node1 slots=08 max-slots=9 # more",
    ],
)
def test_other_forms_of_a_hostfile_are_named_in_full(tmp_path: Path, line: str) -> None:
    done = hosts(tmp_path / "hosts", f"{line}\r\nnode2 slots=8\r\n")
    assert done.returncode == 2
    got = line.partition(" #")[0]
    assert done.stderr.endswith(f", e.g. node1 slots=8, got '{got}'\n")
    assert done.stderr.count("\n") == 1


def test_dry_run_0_is_none(tmp_path: Path) -> None:
    """It starts ssh, and srun: neither knows this host."""
    (tmp_path / "ssh").write_text('#!/bin/sh\n[ "$2" = -G ] || echo "ssh was started"\n')
    (tmp_path / "srun").write_text("#!/bin/sh\necho srun was started\n")
    for name in ("ssh", "srun"):
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path}{os.pathsep}/usr/bin:/bin"
    done = hosts(tmp_path / "hosts", "a|b&c slots=1\n", DRY_RUN="0", PATH=path)
    assert done.stdout == "[a|b&c] ssh was started\n"
    given = f"{JOB} SLURM_NTASKS_PER_NODE=2 DRY_RUN=0 PATH={path}"
    done = start("slurm_srun.sbatch", SCRIPT, given=given)
    assert done.stdout == "srun was started\n"


def bound(cores: str, rank: int, ranks: int, folder: Path) -> subprocess.CompletedProcess[str]:
    """bind_cores.sh where `taskset` says that the process has these cores."""
    taskset = folder / "taskset"
    said = f"pid $2's current affinity list: {cores}"
    taskset.write_text(f'#!/bin/sh\nif [ "$1" = -pc ]; then echo "{said}"; else echo "$@"; fi\n')
    taskset.chmod(0o755)
    given = f"PATH={folder}:/usr/bin:/bin LOCAL_RANK={rank} LOCAL_WORLD_SIZE={ranks}"
    return start("bind_cores.sh", "python", "x.py", "a b", given=given)


@pytest.mark.parametrize(
    ("cores", "ranks", "parts"),
    [
        ("0-3,8", 2, ["0,1", "2,3"]),
        ("0-3,8", 1, ["0,1,2,3,8"]),
        ("7", 1, ["7"]),
        ("1,3,9-11", 5, ["1", "3", "9", "10", "11"]),
    ],
)
def test_each_rank_is_bound_to_cores_of_its_own(
    cores: str, ranks: int, parts: list[str], tmp_path: Path
) -> None:
    got = [bound(cores, rank, ranks, tmp_path) for rank in range(ranks)]
    assert [done.stdout for done in got] == [f"-c {part} python x.py a b\n" for part in parts]


def test_what_cannot_be_bound_is_refused(tmp_path: Path) -> None:
    done = bound("0-3,8", 0, 6, tmp_path)
    said = "bind_cores.sh: error: 5 cores for 6 ranks; start fewer a node\n"
    assert (done.returncode, done.stderr) == (2, said)
    done = start("bind_cores.sh", "python")
    assert (done.returncode, done.stdout) == (1, "")
    assert "LOCAL_RANK: start this by torchrun --no-python" in done.stderr
    assert start("bind_cores.sh", given="LOCAL_RANK=0 LOCAL_WORLD_SIZE=1").returncode == 1
