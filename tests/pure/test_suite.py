"""launch/suite.sh with a stand-in for torchrun that logs its arguments. tests/launch runs the real
one in a Slurm job."""

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.pure.reports import ROOT, case, write

SCRIPTS = ["node_check", "collectives", "p2p_matrix", "ddp_sweep"]
SCRIPTS += ["parallel_sweep", "compile_sweep", "checkpoint_sweep"]
TWO = ["--nproc-per-node", "2"]
STAND_INS = {
    "torchrun": """#!/bin/sh
echo "$*" >>calls
trap 'echo SIGTERM >>calls; exit 1' TERM
case "$*" in *collectives.py*)
    while [ -e slow ]; do sleep .1; done
    [ ! -e fails ] || exit 3
esac
""",
    "python3": '#!/bin/sh\necho "$*" >>calls\ncase "$*" in *compare.py*) exit 4; esac\n',
    "nvidia-smi": "#!/bin/sh\ncat gpus 2>/dev/null\n",
}


def start(folder: Path, *words: str, **variables: str) -> "subprocess.Popen[str]":
    """Start suite.sh in a folder, with stand-ins first on PATH."""
    (folder / "bin").mkdir(exist_ok=True)
    for name, text in STAND_INS.items():
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    env = kept | {"PATH": f"{folder}/bin:{os.environ['PATH']}"} | variables
    options: dict[str, Any] = {"cwd": folder, "env": env, "text": True, "start_new_session": True}
    command, pipe = ["bash", str(ROOT / "launch" / "suite.sh"), *words], subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, **options)


def suite(folder: Path, *words: str, **variables: str) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of suite.sh, without the path of the checkout."""
    process = start(folder, *words, **variables)
    out, err = process.communicate(timeout=500)
    for checkout in (f"{ROOT}/", f"{ROOT}/".replace(" ", "\\ ")):
        out = out.replace(checkout, "")
    return process.returncode, out, err


def calls(folder: Path) -> list[str]:
    """The arguments of torchrun and python3, without the path of the checkout."""
    path = folder / "calls"
    return path.read_text().replace(f"{ROOT}/", "").splitlines() if path.exists() else []


def test_the_next_script_runs_after_a_failure(tmp_path: Path) -> None:
    out = tmp_path / "my suite"
    write(out / "collectives.jsonl", case("x"))
    write(tmp_path / "before" / "collectives.jsonl", case("x"))
    (tmp_path / "fails").touch()
    words = [*TWO, "--flags", "--device cpu", "--out", str(out), "--baseline", "before"]
    words += ["node_check", "collectives -e 64"]
    status, said, _ = suite(tmp_path, *words)
    begin = "--standalone --nproc-per-node 2 benchmarks"
    assert calls(tmp_path) == [
        f"{begin}/node_check.py --device cpu --json {out}/node_check.jsonl --resume",
        f"{begin}/collectives.py -e 64 --device cpu --json {out}/collectives.jsonl --resume",
        f"analysis/report.py {out} -o {out}/report.html",
        f"analysis/compare.py before --test {out} --fail-on slower",
    ]
    assert status == 3  # a 4 of compare.py does not hide a failure
    assert "# suite.sh: collectives: status 3," in said
    assert said.endswith("# suite.sh: compare.py with before: status 4\n# suite.sh: status 3\n")
    (tmp_path / "fails").unlink()
    assert suite(tmp_path, *words)[0] == 4


def test_ctrl_c_ends_the_suite_and_the_same_command_continues(tmp_path: Path) -> None:
    (tmp_path / "slow").touch()
    process = start(tmp_path, *TWO)
    end = time.monotonic() + 500
    while len(calls(tmp_path)) < 2 and time.monotonic() < end:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    _, said = process.communicate(timeout=500)
    assert process.returncode == 130
    assert said.splitlines()[-1] == (
        "suite.sh: interrupted; suite has the finished cases; repeat the same command to continue"
    )
    assert calls(tmp_path)[2:] == ["SIGTERM"]  # only once, and the third script was not started
    (tmp_path / "slow").unlink()
    (tmp_path / "calls").unlink()
    assert suite(tmp_path, *TWO)[0] == 0
    scripts = [call.split()[3] for call in calls(tmp_path)]
    # no page, because there is no report
    assert scripts == [f"benchmarks/{name}.py" for name in SCRIPTS]


def test_dry_run(tmp_path: Path) -> None:
    """The number of ranks comes from the flag, the GPUs or the Slurm job."""
    status, said, err = suite(tmp_path, "--dry-run", *TWO, "collectives -e 64")
    assert (status, err) == (0, "")
    assert said.splitlines() == [
        "torchrun --standalone --nproc-per-node 2 benchmarks/collectives.py -e 64 "
        "--json suite/collectives.jsonl --resume ",
        "python3 analysis/report.py suite -o suite/report.html ",
    ]
    (tmp_path / "gpus").write_text("GPU 0: NVIDIA H100 (UUID: 1)\n" * 3)
    assert "--nproc-per-node 3 " in suite(tmp_path, "--dry-run", "node_check")[1]
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS_PER_NODE": "4"}
    _, said, _ = suite(tmp_path, "--dry-run", "node_check", **job, SRUN_ARGS="--container-image=x")
    assert said.splitlines()[0].replace("'", "") == (
        "srun --nodes=2 --ntasks=8 --ntasks-per-node=4 --distribution=block --kill-on-bad-exit=1 "
        "--container-image=x bash launch/slurm_env.sh python3 benchmarks/node_check.py "
        "--json suite/node_check.jsonl --resume"
    )
    assert not {"calls", "suite"} & {path.name for path in tmp_path.iterdir()}


@pytest.mark.parametrize(
    ("words", "want"),
    [
        ("", "no GPU found; give the number of ranks, e.g. --nproc-per-node 2"),
        ("--otu x", "unknown flag '--otu'; expected --out, --flags, "),
        ("--flags", "expected a value after --flags, e.g. --flags '--device cpu'"),
        ("--nproc-per-node two", "expected a number of ranks after --nproc-per-node, e.g. 8, got"),
        ("--baseline absent", "expected a folder of reports after --baseline, got 'absen"),
        ("--baseline . --out .", "--baseline and --out are the same folder, '.'"),
        ("--out file", "cannot create the folder 'file'; choose another --out"),
        ("nodecheck", "no script 'nodecheck' in benchmarks/; the scripts are batch_update_"),
        ("node_check node_check", "node_check is given twice, but suite has one report per script"),
    ],
)
def test_a_mistake_is_one_line(tmp_path: Path, words: str, want: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "a.jsonl").touch()
    status, _, said = suite(tmp_path, *(TWO if words else []), *words.split())
    assert status == 2
    assert said.startswith(f"suite.sh: error: {want}"), said
    assert said.count("\n") == 1
    assert calls(tmp_path) == []
    assert not (tmp_path / "suite").exists()
    if not words:
        status, _, said = suite(tmp_path, "node_check", SLURM_JOB_ID="7")
        assert (status, said.count("\n")) == (2, 1)
        assert "unknown number of ranks per node; use sbatch --gpus-per-node 8" in said
