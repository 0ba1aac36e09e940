"""launch/suite.sh with a torchrun that writes down what it was asked for; tests/launch has the
real one, in a Slurm job."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.pure.reports import ROOT, case, write

SUITE = str(ROOT / "launch" / "suite.sh")
SCRIPTS = ["node_check", "collectives", "p2p_matrix", "ddp_sweep"]
SCRIPTS += ["parallel_sweep", "compile_sweep", "checkpoint_sweep"]
TORCHRUN = """#!/bin/sh
echo "$*" >>"$FOLDER/calls"
trap 'echo SIGTERM >>"$FOLDER/calls"; exit 1' TERM
case "$*" in *collectives.py*)
    while [ -e "$FOLDER/slow" ]; do sleep .1; done
    [ ! -e "$FOLDER/fails" ] || exit 3
esac
"""
PYTHON = """#!/bin/sh
echo "$*" >>"$FOLDER/calls"
case "$*" in *compare.py*) exit 4; esac
exit 0
"""


def environment(folder: Path, **variables: str) -> dict[str, str]:
    """With a torchrun, a python3 and an nvidia-smi of this test in front of the real ones."""
    bin_folder = folder / "bin"
    bin_folder.mkdir(exist_ok=True)
    for name, text in (("torchrun", TORCHRUN), ("python3", PYTHON), ("nvidia-smi", "#!/bin/sh\n")):
        (bin_folder / name).write_text(text)
        (bin_folder / name).chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    return kept | {"FOLDER": str(folder), "PATH": f"{bin_folder}:{os.environ['PATH']}"} | variables


def suite(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", SUITE, *words],
        cwd=folder,
        env=environment(folder, **variables),
        capture_output=True,
        text=True,
        timeout=60,
    )


def calls(folder: Path) -> list[str]:
    """What torchrun and python3 were asked for, without the checkout's path."""
    path = folder / "calls"
    return path.read_text().replace(f"{ROOT}/", "").splitlines() if path.exists() else []


def test_the_next_script_runs_after_a_failure(tmp_path: Path) -> None:
    out = tmp_path / "my suite"
    write(out / "collectives.jsonl", case("x"))
    write(tmp_path / "before" / "collectives.jsonl", case("x"))
    (tmp_path / "fails").touch()
    flags = ["--nproc-per-node", "2", "--flags", "--device cpu", "--out", str(out)]
    scripts = ["node_check", "collectives -e 64", "ddp_sweep --models resnet18"]
    done = suite(tmp_path, *flags, "--baseline", "before", *scripts)
    start = "--standalone --nproc-per-node 2 benchmarks"
    assert calls(tmp_path) == [
        f"{start}/node_check.py --device cpu --json {out}/node_check.jsonl --resume",
        f"{start}/collectives.py -e 64 --device cpu --json {out}/collectives.jsonl --resume",
        f"{start}/ddp_sweep.py --models resnet18 --device cpu --json {out}/ddp_sweep.jsonl"
        " --resume",
        f"analysis/report.py {out} -o {out}/report.html",
        f"analysis/compare.py before --test {out} --fail-on slower",
    ]
    assert done.returncode == 3  # compare.py's 4 hides no failure
    assert "# suite.sh: collectives: status 3," in done.stdout
    assert done.stdout.splitlines()[-2:] == [
        "# suite.sh: compare.py with before: status 4",
        "# suite.sh: status 3",
    ]
    done = suite(tmp_path, *flags, *scripts)
    assert done.returncode == 3
    (tmp_path / "fails").unlink()
    done = suite(tmp_path, *flags, "--baseline", "before", *scripts)
    assert done.returncode == 4


def test_all_is_well(tmp_path: Path) -> None:
    done = suite(tmp_path, "--nproc-per-node", "2")
    assert (done.returncode, done.stderr) == (0, "")
    scripts = [call.split()[3] for call in calls(tmp_path)]
    assert scripts == [f"benchmarks/{name}.py" for name in SCRIPTS]  # and no page: no report


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_ends_the_suite_and_the_same_command_goes_on(tmp_path: Path, name: str) -> None:
    (tmp_path / "slow").touch()
    command = ["bash", SUITE, "--nproc-per-node", "2", *SCRIPTS[:3]]
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=environment(tmp_path),
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    end = time.monotonic() + 30
    while len(calls(tmp_path)) < 2 and time.monotonic() < end:
        time.sleep(0.05)
    number = signal.Signals[name]
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as a terminal does
    else:
        process.send_signal(number)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 128 + number
    assert said.splitlines()[-1] == (
        "suite.sh: interrupted; suite has the finished cases, and the same command goes on"
    )
    assert calls(tmp_path)[2:] == ["SIGTERM"]  # once, and the third script has not begun
    (tmp_path / "slow").unlink()
    assert suite(tmp_path, *command[2:]).returncode == 0
    assert "p2p_matrix.py" in calls(tmp_path)[-1]


def test_dry_run(tmp_path: Path) -> None:
    done = suite(tmp_path, "--dry-run", "--nproc-per-node", "2", "collectives -e 64")
    assert done.returncode == 0, done.stderr
    root = f"{ROOT}/".replace(" ", "\\ ")
    assert done.stdout.replace(root, "").splitlines() == [
        "torchrun --standalone --nproc-per-node 2 benchmarks/collectives.py -e 64 "
        "--json suite/collectives.jsonl --resume ",
        "python3 analysis/report.py suite -o suite/report.html ",
    ]
    assert calls(tmp_path) == []
    assert not (tmp_path / "suite").exists()


def test_in_a_slurm_job(tmp_path: Path) -> None:
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS_PER_NODE": "4"}
    done = suite(tmp_path, "--dry-run", "node_check", **job)
    assert done.returncode == 0, done.stderr
    command = done.stdout.splitlines()[0].replace("'", "")
    assert command.startswith("srun --nodes=2 --ntasks=8 --ntasks-per-node=4 ")
    assert command.endswith("benchmarks/node_check.py --json suite/node_check.jsonl --resume")
    one_machine = suite(tmp_path, "--dry-run", "--nproc-per-node", "2", "node_check", **job)
    assert one_machine.stdout.startswith("torchrun ")


def test_a_rank_for_each_gpu(tmp_path: Path) -> None:
    variables = environment(tmp_path)
    listing = "echo 'GPU 0: NVIDIA H100 (UUID: GPU-1)'; echo 'GPU 1: NVIDIA H100 (UUID: GPU-2)'"
    (tmp_path / "bin" / "nvidia-smi").write_text(f"#!/bin/sh\n{listing}\n")
    command = ["bash", SUITE, "--dry-run", "node_check"]
    said = subprocess.check_output(command, cwd=tmp_path, env=variables, text=True, timeout=30)
    assert said.startswith("torchrun --standalone --nproc-per-node 2 ")


RANKS = "--nproc-per-node 2"


@pytest.mark.parametrize(
    ("words", "want"),
    [
        ("", "no GPU here: how many ranks? E.g. --nproc-per-node 2"),
        ("--otu x", "unknown flag '--otu'; expected --out, --flags, "),
        ("--dryrun", "unknown flag '--dryrun'; expected --out, --flags, "),
        ("--out", "expected a value after --out, e.g. --out suite"),
        ("--flags", "expected a value after --flags, e.g. --flags '--device cpu'"),
        ("--nproc-per-node two", "expected a number of ranks after --nproc-per-node, e.g. 8, got"),
        (f"{RANKS} --baseline absent", "expected a folder of reports after --baseline, got 'absen"),
        (f"{RANKS} --baseline . --out .", "--baseline and --out are the same folder, '.'"),
        (f"{RANKS} --out file", "cannot make the folder 'file'; give another --out"),
        (f"{RANKS} nodecheck", "no script 'nodecheck' in benchmarks/; there are batch_update_ps, "),
        (f"{RANKS} node_check node_check", "node_check twice, but each has one report in suite"),
    ],
)
def test_a_mistake_is_one_line(tmp_path: Path, words: str, want: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "a.jsonl").touch()
    done = suite(tmp_path, *words.split())
    assert done.returncode == 2
    assert done.stderr.startswith(f"suite.sh: error: {want}"), done.stderr
    assert done.stderr.count("\n") == 1
    assert calls(tmp_path) == []
    assert not (tmp_path / "suite").exists()


def test_a_slurm_job_that_does_not_say_its_ranks(tmp_path: Path) -> None:
    done = suite(tmp_path, "node_check", SLURM_JOB_ID="7")
    assert done.returncode == 2
    assert "how many ranks a node? Give sbatch --gpus-per-node 8" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "suite").exists()
