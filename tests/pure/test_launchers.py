"""launch/ with simulated variables and files. tests/launch uses real launchers."""

import shlex
import subprocess
from pathlib import Path

import pytest

from tests.process import ROOT

SCRIPT = str(ROOT / "benchmarks" / "ddp_sweep.py")
JOB = "SLURM_JOB_ID=4711 SLURM_JOB_NUM_NODES=2 DRY_RUN=1"
STEP = "SLURM_JOB_ID=4711 SLURM_STEP_TASKS_PER_NODE=1(x4) SLURM_PROCID=1 SLURM_LOCALID=0"
STEP += " SLURM_STEP_NUM_TASKS=4 SLURM_STEP_NUM_NODES=4 SLURM_NODEID=1"


def start(name: str, *words: str, given: str = "") -> subprocess.CompletedProcess[str]:
    """Run a script of launch/ with only these variables and the programs of the system."""
    env = {"PATH": "/usr/bin:/bin"} | dict(word.split("=", 1) for word in shlex.split(given))
    command = ["bash", str(ROOT / "launch" / name), *words]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=500)


def fake(folder: Path, name: str, text: str) -> str:
    """Write a program, and return a PATH that begins with its folder."""
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)
    return f"PATH={folder}:/usr/bin:/bin"


def test_the_first_host_of_a_nodelist(tmp_path: Path) -> None:
    """In a container Slurm's variables are set, but its programs are missing."""
    for name in ("bash", "sed", "getent", "sh"):
        (tmp_path / name).symlink_to(f"/usr/bin/{name}")
    lists = {"node[001-002,007],gpu-1": "node001", "rack[1-2]n[01-04]": "rack1n01"}
    for nodes, first in (lists | {"n[08-12]-ib": "n08-ib"}).items():
        given = f"{STEP} SLURM_STEP_NODELIST={nodes} PATH={tmp_path}"
        done = start("slurm_env.sh", "bash", "-c", "echo $MASTER_ADDR:$MASTER_PORT", given=given)
        assert (done.stdout, done.stderr) == (f"{first}:24711\n", "")


@pytest.mark.parametrize(
    ("wrapper", "tasks", "gpus", "ranks", "idle"),
    [
        ("slurm_torchrun.sbatch", "1", "a100:8", 8, 0),  # torchrun is its only task
        ("slurm_torchrun.sbatch", "", "8", 8, 0),
        ("slurm_srun.sbatch", "1", "8", 1, 7),
        ("slurm_srun.sbatch", "", "a100:4", 4, 0),
    ],
)
def test_ranks_of_a_node(wrapper: str, tasks: str, gpus: str, ranks: int, idle: int) -> None:
    """No GPU is called idle if the ranks run on the CPU."""
    given = f"{JOB} SLURM_NTASKS_PER_NODE={tasks} SLURM_GPUS_PER_NODE={gpus}"
    for flags in (("--device", "cpu"), ("--device=cpu",)):
        assert not start(wrapper, SCRIPT, *flags, given=given).stderr
    done = start(wrapper, SCRIPT, "--min-iters", "9", given=given)
    assert done.returncode == 0, done.stderr
    name = "--nproc-per-node" if "torchrun" in wrapper else "--ntasks-per-node"
    assert f"{name}={ranks}" in shlex.split(done.stdout)
    said = f"{wrapper}: {idle} of 8 GPUs per node are idle with --ntasks-per-node {ranks}; use"
    assert said in done.stderr if idle else not done.stderr


@pytest.mark.parametrize(
    ("script", "name", "value"),
    [
        ("slurm_srun.sbatch", "MAX_REQUEUES", "-1"),
        ("slurm_srun.sbatch", "GIVE_UP_S", "08"),
        ("slurm_env.sh", "SLURM_JOB_ID", "7_3"),
        ("slurm_env.sh", "SLURM_PROCID", ""),
    ],
)
def test_an_invalid_variable(script: str, name: str, value: str) -> None:
    given = f"{JOB} SLURM_NTASKS_PER_NODE=2" if "srun" in script else STEP
    done = start(script, SCRIPT, given=f"{given} {name}={value}")
    assert done.returncode == 2
    assert done.stderr.startswith(f"{script}: error: expected a number in {name}, got '{value}'")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(("begin", "end"), [("", "\n"), ("\ufeff", "\r\n")])
def test_a_hostfile_with_bom_and_crlf(tmp_path: Path, begin: str, end: str) -> None:
    lines = ["# two", "node1 slots=8", "node2 slots=4 # the small one", ""]
    (tmp_path / "hosts").write_bytes((begin + end.join(lines)).encode())
    done = start("ssh_torchrun.sh", str(tmp_path / "hosts"), SCRIPT, given="DRY_RUN=1")
    assert done.returncode == 0, done.stderr
    assert "\r" not in done.stdout
    for line, (host, ranks) in zip(
        done.stdout.splitlines(), (("node1", 8), ("node2", 4)), strict=True
    ):
        assert line.startswith(f"[{host}] ")
        assert f"--nproc-per-node={ranks}" in line


def test_dry_run_0_starts_the_ranks(tmp_path: Path) -> None:
    """The launchers start ssh and srun."""
    path = fake(tmp_path, "ssh", '[ "$2" = -G ] || echo "ssh was started"')
    fake(tmp_path, "srun", "echo srun was started")
    (tmp_path / "hosts").write_text("a|b&c slots=1\n")
    done = start("ssh_torchrun.sh", str(tmp_path / "hosts"), SCRIPT, given=f"DRY_RUN=0 {path}")
    assert done.stdout == "[a|b&c] ssh was started\n"
    given = f"{JOB} SLURM_NTASKS_PER_NODE=2 DRY_RUN=0 {path}"
    assert start("slurm_srun.sbatch", SCRIPT, given=given).stdout == "srun was started\n"


def test_each_rank_has_its_own_cpus(tmp_path: Path) -> None:
    """The last rank. `taskset` reports these CPUs for the process."""
    refused = "bind_cores.sh: error: 5 CPUs for 6 ranks; start fewer ranks per node\n"
    for cpus, ranks, said in (
        ("0-3,8", 2, "-c 2,3 python x.py a b\n"),
        ("1,3,9-11", 5, "-c 11 python x.py a b\n"),
        ("0-3,8", 6, refused),
    ):
        shows = f'echo "pid $2\'s current affinity list: {cpus}"'
        path = fake(tmp_path, "taskset", f'if [ "$1" = -pc ]; then {shows}; else echo "$@"; fi')
        given = f"{path} LOCAL_RANK={ranks - 1} LOCAL_WORLD_SIZE={ranks}"
        done = start("bind_cores.sh", "python", "x.py", "a b", given=given)
        assert done.stdout + done.stderr == said


SUMMARY = "  exitcode  : {} (pid: 4711)"  # as torchrun prints it


@pytest.mark.parametrize(
    ("lines", "status", "ended"),
    [
        (("# fit: 1 node, 8 ranks",), 0, 0),
        (("# slow rank 1 on vm: matmul", "# not fit: rank 1 on vm", SUMMARY.format(1)), 1, 1),
        (("# no verdict: other processes used 3 of 8 cores", SUMMARY.format(4)), 1, 0),
        (("torchrun: error", SUMMARY.format(2)), 1, 1),
    ],
)
def test_how_a_prolog_ends(lines: tuple[str, ...], status: int, ended: int, tmp_path: Path) -> None:
    said = "\n".join(f"echo '{line}'" for line in lines)
    fake(tmp_path, "torchrun", f"{said}\nexit {status}")
    variables = f"CHECKOUT={shlex.quote(str(ROOT))} TORCHRUN={tmp_path}/torchrun"
    run = start("prolog.sh", given=f"{variables} PATH=/usr/bin:/bin")
    assert run.returncode == ended, run.stderr
    printed = [line for line in lines if line.startswith("# ") and "fit: 1 node" not in line]
    assert run.stdout.splitlines() == printed


@pytest.mark.parametrize(
    ("status", "bad", "said"),
    [
        (0, "", "submitted train.sbatch"),
        (1, "node007,node012", "submitted --exclude=node007,node012 train.sbatch"),
        (1, "a,b,c,d,e", "not submitted: bad.txt excludes more than 4 hosts"),
        (4, None, "not submitted: the nodes were not checked, or there is no verdict: status 4"),
    ],
)
def test_bad_hosts_are_excluded(status: int, bad: str | None, said: str, tmp_path: Path) -> None:
    """A file of an earlier check does not count."""
    (tmp_path / "bad.txt").write_text("old\n")
    write = "" if bad is None else f"printf '{bad and bad + chr(10)}' >bad.txt"
    check = f'if [ "$1" = --wait ]; then\n{write}\nexit {status}\nfi'
    path = fake(tmp_path, "sbatch", f'{check}\necho submitted "$@"')
    env = dict([path.split("=", 1)])
    command = ["bash", str(ROOT / "launch" / "check_and_submit.sh"), "16", "train.sbatch"]
    run = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert (run.stdout + run.stderr).strip() == said
    assert run.returncode == (0 if said.startswith("submitted") else 1)
