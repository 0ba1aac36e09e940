"""The wrappers of launch/ on a real Slurm: what they run, in which order, and how they end."""

import contextlib
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import ROOT, SLOW, TINY, environment, load, slow
from lab import Lab, search_path, wait_until, why_not

from common import results

pytestmark = [
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
    pytest.mark.timeout(900),  # a job waits for its turn, and for cores that are not there
]

NODES = 3
SWEEP = ["benchmarks/ddp_sweep.py", *TINY, "--device", "cpu"]
DDP_RPC = "benchmarks/ddp_rpc.py --number-embeddings 40 --embedding-dim 8 --warmup-cycles 1"
DDP_RPC += " --epochs 2 --device cpu"
PARAMETER_SERVER = (
    "benchmarks/parameter_server.py --num-embeddings 32 --embedding-dim 16 --dense-layers 3 "
    "--dense-size 16 --classes 8 --sample-count 20 --batch-size 4 --bucket-size 0.001 --device cpu "
    "--routes allreduce,rpc --epochs 2"
)
BATCH_UPDATE = "benchmarks/batch_update_ps.py --iters 8 --device cpu"
LATENCY = (
    "benchmarks/rpc_latency.py --device cpu --iters 4 --sizes 4,64K --ops rpc_sync,remote "
    "--rpc-threads 2,3"
)
COLLECTIVES = (
    "benchmarks/collectives.py --collective all_reduce,all_to_all -b 64 -e 6400 -f 100 -n 4 -w 1 "
    "--max-seconds 0.001 --cache-warm --device cpu"
)
WRAPPERS = ("slurm_torchrun.sbatch", "slurm_srun.sbatch")


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with Lab(tmp_path_factory.mktemp("lab"), NODES, hosts="debian") as lab:
        yield lab


def submit(
    lab: Lab, path: Path, wrapper: str, nodes: int, ranks: int, script: list[str], *options: str
) -> str:
    """Submit a script with its report at `path`, its output beside it; the job's id."""
    output = ["--output", str(path.with_suffix(".out"))]
    flags = ["--nproc-per-node", str(ranks)]
    job = ["-N", str(nodes), *output, *options, f"launch/{wrapper}", *flags]
    return lab.sbatch([*job, *script, "--json", str(path)], cwd=ROOT)


def output(path: Path) -> str:
    return path.with_suffix(".out").read_text()


def passed(lab: Lab, job: str, path: Path, nodes: int, ranks: int) -> dict[str, Any]:
    """The report of a job once it is over; complete, and its ranks in the order of the nodes."""
    assert lab.wait_for_end(job, 600) == "COMPLETED", output(path)
    report = results.load(str(path))
    assert report["status"] == "complete", output(path)
    assert {case["check"] for case in report["cases"]} == {"passed"}
    rows = report["environment"]["ranks"]
    assert [row["host"] for row in rows] == [
        f"node{1 + rank // ranks}" for rank in range(nodes * ranks)
    ]
    assert [row["local_rank"] for row in rows] == list(range(ranks)) * nodes
    return report


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_every_kind_of_script(lab: Lab, tmp_path: Path, wrapper: str) -> None:
    """Each by one of the wrappers. SLOW_TESTS=1: by both, on 2 nodes by one, on 3 by the other."""
    turn = WRAPPERS.index(wrapper)
    scripts = [
        ([*SWEEP, "--iters", "6"], 2),
        (COLLECTIVES.split(), 1),
        (LATENCY.split(), 1),
        (DDP_RPC.split(), 2),
        (PARAMETER_SERVER.split(), 2),
        (BATCH_UPDATE.split(), 1),
    ]
    for i, (script, ranks) in enumerate(scripts):
        if not SLOW and i % 2 != turn:
            continue
        nodes = 2 + (i // 3 + turn * SLOW) % 2
        path = tmp_path / f"{i} {nodes} nodes.json"
        job = submit(lab, path, wrapper, nodes, ranks, script)
        report = passed(lab, job, path, nodes, ranks)
        launcher = "srun" if "srun" in wrapper else "torchrun"
        assert report["environment"]["launcher"] == launcher
        assert report["environment"]["num_nodes"] == nodes
        variables = report["environment"]["variables"]
        assert variables["GLOO_SOCKET_IFNAME"] == variables["TP_SOCKET_IFNAME"] == "eth0"


# -- without a job ---------------------------------------------------------------------------------


def in_salloc(lab: Lab, command: str, cwd: Path = ROOT) -> tuple[int, str, str]:
    """A shell command inside an allocation: status, stdout, stderr without salloc's own words."""
    done = lab.run(0, shlex.split(command), timeout=600, cwd=cwd)
    words = [line for line in done.stderr.splitlines() if not line.startswith("salloc: ")]
    return done.returncode, done.stdout, "\n".join(words)


def test_dry_run(lab: Lab, tmp_path: Path) -> None:
    command = f"{ROOT}/launch/slurm_torchrun.sbatch --dry-run --nproc-per-node 2 --port 1234"
    script = "benchmarks/ddp_sweep.py --json 'a report.json'"
    status, stdout, stderr = in_salloc(lab, f"salloc -N3 --exclusive {command} {script}", tmp_path)
    assert (status, stderr) == (0, "")
    words = shlex.split(stdout)
    at = words.index("srun")
    variables = ["LAUNCH_MASTER_ADDR=node1", "LAUNCH_PEER=node2", "LAUNCH_MASTER_PORT=1234"]
    assert words[:at] == ["env", *variables]
    step = next(word for word in words if word.startswith("--job-name=bench-"))
    assert words[at:] == [
        *("srun", "--nodes=3", "--ntasks=3", "--ntasks-per-node=1", "--distribution=block"),
        *("--kill-on-bad-exit=1", step, "--export=ALL", "--cpu-bind=none", "bash"),
        *(f"{ROOT}/launch/slurm_env.sh", "torchrun", "--nproc-per-node=2"),
        *(f"{ROOT}/benchmarks/ddp_sweep.py", "--json", "a report.json"),
    ]


@pytest.mark.parametrize(
    ("job", "want"),
    [
        ("-N3 --ntasks-per-node 4 -c 2", ["--ntasks=12", "--ntasks-per-node=4"]),
        ("-N2 -n6", ["--ntasks=6", "--ntasks-per-node=3"]),
        ("-N2 --gpus-per-node 2", ["--ntasks=4", "--ntasks-per-node=2"]),
    ],
)
def test_ranks_of_a_node(lab: Lab, job: str, want: list[str]) -> None:
    dry = "--dry-run --container-image 'my image' --container-mounts /data:/data --venv /venv"
    status, stdout, _ = in_salloc(
        lab, f"salloc {job} --exclusive launch/slurm_srun.sbatch {dry} benchmarks/ddp_sweep.py"
    )
    assert status == 0
    words = shlex.split(stdout)
    assert [word for word in words if word.startswith("--ntasks")] == want
    assert ("--cpus-per-task=2" in words) == ("-c 2" in job)
    assert words[-2:] == ["python3", "benchmarks/ddp_sweep.py"]
    assert "LAUNCH_VENV=/venv" in words
    container = [word for word in words if word.startswith("--container")]
    mounts = f"--container-mounts={ROOT}:{ROOT},/data:/data"
    assert container == ["--container-image=my image", f"--container-workdir={ROOT}", mounts]


@pytest.mark.parametrize(
    ("command", "want"),
    [
        ("benchmarks/ddp_sweep.py", "this is no Slurm job; start it with sbatch"),
        ("--nproc-per-node 2", "expected a script, e.g. benchmarks/ddp_sweep.py"),
        ("--nproc-per-node", "--nproc-per-node needs a value"),
        ("--nproc-per-node=two x", "expected a whole number of at least 1, got 'two'"),
        ("--nproc-per-nod 2 x", "unknown flag --nproc-per-nod; see --help"),
        ("benchmarks/ddp_swee.py", "no benchmarks/ddp_swee.py in"),
        ("--container-mounts /a:/a benchmarks/ddp_sweep.py", "no effect without --container-image"),
        ("--max-restarts 1 benchmarks/ddp_sweep.py", "is torchrun's"),
    ],
)
def test_a_users_mistake(lab: Lab, command: str, want: str) -> None:
    done = lab.run(0, ["launch/slurm_srun.sbatch", *shlex.split(command)], cwd=ROOT)
    assert done.returncode == 2
    assert done.stderr.startswith("slurm_srun.sbatch: error: ")
    assert want in done.stderr
    assert done.stderr.count("\n") == 1


def test_mistakes_in_a_job(lab: Lab) -> None:
    script = "benchmarks/ddp_sweep.py"
    status, _, stderr = in_salloc(lab, f"salloc -N2 launch/slurm_srun.sbatch {script}")
    assert status == 2
    assert "how many ranks a node?" in stderr
    status, _, stderr = in_salloc(lab, f"salloc -N2 -n3 launch/slurm_srun.sbatch {script}")
    assert status == 2
    assert "3 tasks do not spread evenly over 2 nodes" in stderr
    status, _, stderr = in_salloc(
        lab, f"salloc -N2 launch/slurm_srun.sbatch --nproc-per-node 2 {script}"
    )
    assert status == 2
    assert "2 ranks a node, and the job has 1 of a node's CPUs; give salloc" in stderr
    missing = "env LAUNCH_VENV=/missing srun -w node1 bash launch/slurm_env.sh true"
    status, _, stderr = in_salloc(lab, missing)
    assert status == 2
    assert "slurm_env.sh: no virtual environment at /missing on node1" in stderr
    status, _, stderr = in_salloc(lab, "srun -w node1 bash launch/slurm_env.sh nothing")
    assert status == 2
    assert "no nothing on node1; activate an environment" in stderr
    done = lab.run(1, ["bash", "launch/slurm_env.sh", "true"], cwd=ROOT)
    assert done.returncode == 2
    assert "SLURM_JOB_ID is not set; start this with srun" in done.stderr


def test_preflight_under_srun(lab: Lab) -> None:
    """The layout; and without what makes one job of the tasks, that each is a world of one."""
    alone = "python -m common.preflight"
    words = f"salloc -N2 --ntasks-per-node=2 srun bash -c '. launch/slurm_env.sh && {alone}'"
    status, stdout, stderr = in_salloc(lab, words)
    assert status == 0, stderr
    assert "4 ranks on 2 nodes, backend gloo: all met, nothing is wrong" in stdout
    rows = [line.split()[:3] for line in stdout.splitlines() if " node" in line[:30]]
    hosts = ["node1", "node1", "node2", "node2"]
    assert [(row[0], row[2]) for row in rows if row[0].isdigit() and row[2] in hosts] == [
        (str(rank), host) for rank, host in enumerate(hosts)
    ]
    status, _, stderr = in_salloc(lab, f"salloc -N2 srun {alone}")
    assert status == 2
    assert "2 worlds of one" in stderr


def test_the_variables_of_a_task(lab: Lab) -> None:
    """Of an uneven step, and sourced; what the site has set stays; a wrong order is refused."""
    names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE MASTER_ADDR"
    show = f"for name in {names} TP_SOCKET_IFNAME GLOO_SOCKET_IFNAME; do echo ${{!name}}; done"
    sourced = f". launch/slurm_env.sh && echo $({show})"
    step = ["env", "GLOO_SOCKET_IFNAME=eth7", "srun", "-N2", "-n3", "--exclusive"]
    done = lab.run(0, [*step, "--distribution=block", "bash", "-c", sourced], cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        "0 0 3 2 0 2 node1 eth0 eth7",
        "1 1 3 2 0 2 node1 eth0 eth7",
        "2 0 3 1 1 2 node1 eth0 eth7",
    ]
    done = lab.run(0, [*step, "--distribution=cyclic", "bash", "-c", sourced], cwd=ROOT)
    assert done.returncode == 2
    assert "give srun --distribution=block, so that ranks follow the order" in done.stderr


# -- ends ------------------------------------------------------------------------------------------


def long_sweep(lab: Lab, path: Path, wrapper: str, *flags: str) -> str:
    """A sweep over 2 nodes that is in its last case, which takes long; the job's id."""
    script = ["tests/faults/driver.py", *TINY, "--device", "cpu", "--target-ci", "0.01%"]
    job = submit(lab, path, wrapper, 2, 1, [*flags, *script, "--max-seconds", "300"])
    wait_until(lambda: path.exists() and len(labels(path)) == 2, 300, lambda: output(path))
    return job


def labels(path: Path) -> list[str]:
    return [case["key"]["label"] for case in load(path)["cases"]]


def nothing_left(lab: Lab) -> bool:
    return not any(lab.processes(node) for node in lab.nodes)


@pytest.mark.parametrize(
    "wrapper",
    [
        WRAPPERS[0],
        pytest.param(WRAPPERS[1], marks=slow),
    ],
)
def test_time_limit_requeue_and_resume(lab: Lab, tmp_path: Path, wrapper: str) -> None:
    path = tmp_path / "report.json"
    job = long_sweep(lab, path, wrapper, "--max-requeues", "1")
    first = load(path)["cases"]
    if wrapper == WRAPPERS[0]:  # Slurm itself looks twice a minute; its signal is the same
        hours, minutes, _ = (int(part) for part in lab.job(job)["RunTime"].split(":"))
        limit = f"TimeLimit={hours * 60 + minutes + 2}"
        assert lab.run(0, ["scontrol", "update", f"jobid={job}", limit]).returncode == 0
    else:
        lab.run(0, ["scancel", "--batch", "--signal=USR1", job])
    lab.wait_for_state(job, "PENDING", timeout=200)
    wait_until(lambda: nothing_left(lab), 60)
    report = load(path)
    assert report["status"] == "interrupted", output(path)
    assert report["cases"] == first
    assert "the time is nearly up: the ranks are to end" in output(path)
    assert "requeued, 1 of at most 1 times" in output(path)
    # Slurm waits 2 minutes; within the same second the nodes take it for the job that was stopped
    again = ["TimeLimit=UNLIMITED", "StartTime=now+5"]
    assert lab.run(0, ["scontrol", "update", f"jobid={job}", *again]).returncode == 0
    assert lab.wait_for_end(job, 300) == "COMPLETED", output(path)
    report = load(path)
    assert report["status"] == "complete"
    assert report["cases"][:2] == first  # not measured again
    assert labels(path) == ["no ddp", "1M/1G", "2M/1G"]


def test_no_more_requeues_than_allowed(lab: Lab, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    job = long_sweep(lab, path, "slurm_srun.sbatch", "--max-requeues", "0")
    lab.run(0, ["scancel", "--batch", "--signal=USR1", job])
    assert lab.wait_for_end(job) == "FAILED"
    assert "not requeued again: --max-requeues is 0" in output(path)
    assert load(path)["status"] == "interrupted"


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_killed_rank_ends_the_job(lab: Lab, tmp_path: Path, wrapper: str) -> None:
    path = tmp_path / "report.json"
    job = long_sweep(lab, path, wrapper)
    lab.kill_rank(2, 1)
    assert lab.wait_for_end(job) == "FAILED", output(path)
    wait_until(lambda: nothing_left(lab), 60)
    assert load(path)["status"] in ("failed", "interrupted")
    assert len(labels(path)) == 2


def test_a_killed_rank_is_started_again(lab: Lab, tmp_path: Path) -> None:
    """By torchrun, on both nodes; the restart resumes the report."""
    path = tmp_path / "report.json"
    job = long_sweep(lab, path, "slurm_torchrun.sbatch", "--max-restarts", "1")
    first = load(path)
    before = {node: lab.ranks(node) for node in (1, 2)}
    lab.kill_rank(2, 1)

    def again() -> bool:
        return all(lab.ranks(node).keys() == before[node].keys() for node in (1, 2)) and all(
            lab.ranks(node) != before[node] for node in (1, 2)
        )

    wait_until(again, 120, lambda: output(path))
    wait_until(lambda: output(path).count("# torchrun-bench ddp_sweep") == 2, 120)
    lab.run(0, ["scancel", job])
    assert lab.wait_for_end(job) == "CANCELLED"
    report = load(path)
    assert report["cases"] == first["cases"]
    assert report["started_at"] == first["started_at"]


def test_scancel(lab: Lab, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    job = long_sweep(lab, path, "slurm_torchrun.sbatch")
    lab.run(0, ["scancel", job])
    assert lab.wait_for_end(job) == "CANCELLED"
    wait_until(lambda: nothing_left(lab), 60)
    report = load(path)
    assert report["status"] == "interrupted"
    assert len(report["cases"]) == 2
    assert "# interrupted (SIGTERM" in output(path)


# -- names that lead elsewhere, and many ranks -----------------------------------------------------


def test_inside_salloc_where_a_nodes_name_is_its_loopback(tmp_path: Path) -> None:
    """And from another folder, by the virtual environment that is given."""
    with Lab(tmp_path / "lab", nodes=2, hosts="loopback") as lab:
        path = tmp_path / "a report.json"
        venv = f"--venv {sys.prefix}" if Path(sys.prefix, "bin/activate").exists() else ""
        command = f"{ROOT}/launch/slurm_torchrun.sbatch --nproc-per-node 1 {venv} {BATCH_UPDATE}"
        status, stdout, stderr = in_salloc(lab, f"salloc -N2 {command} --json '{path}'", tmp_path)
        assert status == 0, stderr
        assert "started by torchrun" in stdout
        assert load(path)["environment"]["hosts"] == ["node1", "node2"]


def test_where_no_name_is_known(tmp_path: Path) -> None:
    with Lab(tmp_path / "lab", nodes=2, hosts="none") as lab:
        dry = "--dry-run --nproc-per-node 2 benchmarks/ddp_sweep.py"
        status, stdout, _ = in_salloc(lab, f"salloc -N2 -c2 launch/slurm_torchrun.sbatch {dry}")
        assert status == 0
        assert "LAUNCH_MASTER_ADDR=10.77.0.1 LAUNCH_PEER=10.77.0.2 srun " in stdout


@pytest.mark.skipif(not SLOW, reason="64 ranks, minutes and 10 GB: set SLOW_TESTS=1")
def test_64_ranks_on_4_nodes(tmp_path: Path) -> None:
    """By one task a rank, from a process a node that has torch: see forked_python.py."""
    stand_in = tmp_path / "bin" / "python3"
    stand_in.parent.mkdir()
    forked = shlex.join([sys.executable, "-S", f"{ROOT}/tests/launch/forked_python.py", "run"])
    stand_in.write_text(f'#!/bin/sh\nexec {forked} "{tmp_path}/$(hostname)" "$@"\n')
    stand_in.chmod(0o755)
    serve = [sys.executable, str(ROOT / "tests/launch/forked_python.py"), "serve"]
    with Lab(tmp_path / "lab", nodes=4) as lab, contextlib.ExitStack() as stack:
        sockets = [tmp_path / lab.name(node) for node in lab.nodes]
        for node, path in zip(lab.nodes, sockets, strict=True):
            server = subprocess.Popen(lab.command(node, [*serve, str(path)]), env=environment())
            stack.callback(server.wait, 30)
            stack.callback(server.kill)
        wait_until(lambda: all(path.exists() for path in sockets), 240)
        path = tmp_path / "report.json"
        script = [*SWEEP, "--iters", "6", "--warmup-iters", "1", "--world-sizes", "64"]
        export = f"--export=ALL,PATH={stand_in.parent}:{search_path()}"
        job = submit(lab, path, "slurm_srun.sbatch", 4, 16, script, export)
        report = passed(lab, job, path, 4, 16)
        assert [case["key"]["label"] for case in report["cases"]] == ["no ddp", "4M/16G"]
