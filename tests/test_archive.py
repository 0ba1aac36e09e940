"""torchrun-bench.pyz, alone in a folder with a model, behaves like the checkout."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from harness import cli
from tests.process import ROOT, Start, python

TIMES = ("--iters", "6", "--warmup-iters", "1")
SIDES = ("a", "--test", "b", "--ignore-key", "bucket_size_mb,comm_hook", "--allow-disturbed")
MODEL = """
import torch

class Net(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layer = torch.nn.Linear(width, width)

    def forward(self, x):
        return self.layer(x).relu()

def net(device, width=32):
    return Net(width).to(device), torch.randn(4, width, device=device), torch.Tensor.sum
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("built") / "torchrun-bench.pyz"
    build = [sys.executable, str(ROOT / "launch" / "archive" / "build.py"), str(path)]
    subprocess.run(build, check=True, timeout=600)
    return path


@pytest.fixture
def archive(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of the archive in the working directory, which contains nothing else."""
    folder = tmp_path / "new folder"
    folder.mkdir()
    shutil.copy(built, folder)
    monkeypatch.chdir(folder)
    return built.name


@pytest.mark.smoke
@pytest.mark.parametrize(
    "words",
    [
        "ddp_sweep --model mine:net",
        "compile_sweep --model mine:net?width=16 --strategies ddp",
        "collectives -b 64 -e 64",
        "input_sweep --samples 16 --workers 1 --start-method forkserver,spawn --cache warm",
        "checkpoint_sweep --modes async-process --model decoder-tiny",  # in another process
        "node_check --budget 100 --fail-on wrong",
    ],
)
def test_a_script_runs(words: str, archive: str, start: Start) -> None:
    Path("mine.py").write_text(MODEL)
    process = start(os.path.abspath(archive), *words.split(), *TIMES, "--json", "r", cold=True)
    assert process.wait() == 0, process.err
    done = Path("r").read_text().splitlines()
    assert f'"version": "{cli.version()}"' in done[0]
    assert '"harness.benchmark": "' in done[0]  # sources are compared as in a checkout
    assert ('"mine": "' in done[0]) == ("mine:net" in words)
    assert '"status": "complete"' in done[-1]
    name, _, flags = words.partition(" ")
    assert f"# command: {archive} {name} {flags} {' '.join(TIMES)}" in process.out.replace("'", "")
    assert f"python {archive} report r -o page.html" in process.out
    assert "- root - INFO" not in process.err + process.out  # of the checkpoint's process


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("program", "flags"), [("compare", SIDES), ("report", (*SIDES[:-1], "-o", "page.html"))]
)
def test_reports_as_in_the_checkout(program: str, flags: tuple[str, ...], archive: str) -> None:
    shutil.copytree(ROOT / "docs" / "results" / "tutorial" / "change", ".", dirs_exist_ok=True)
    results = []
    for words in ([archive, program], [str(ROOT / "analysis" / f"{program}.py")]):
        done = python(*words, *flags)
        page = Path("page.html").read_text() if program == "report" else ""
        page = re.sub(r"#?\b[mp][0-9a-f]{10}\b", "", page)  # random names in SVG
        results.append((done.returncode, done.stdout, done.stderr, page))
    assert results[0] == results[1]
    assert results[0][1] + results[0][3]


@pytest.mark.smoke
def test_the_overview_lists_each_script_with_its_question(archive: str) -> None:
    names = {path.stem for path in ROOT.glob("benchmarks/[a-z]*.py")}
    names |= {path.stem for path in ROOT.glob("analysis/[a-z]*.py")} - {"show"}
    listed = re.findall(r"^ +(\w+) {2,}[A-Z].+[.?]$", python(archive).stdout, re.M)
    assert sorted(listed) == sorted(names)
    assert Path(archive).stat().st_size < 2_000_000
    assert f"python {archive} compare" in python(archive, "compare", "--help").stdout
    for flags in ("", "launch slurm_srun.sbatch"):  # a reader that ends early
        command = f"{shlex.join([sys.executable, archive])} {flags} 2>err | true"
        subprocess.run(["bash", "-c", f"{command}; exit ${{PIPESTATUS[0]}}"], check=True)
        assert "Error" not in Path("err").read_text()


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("words", "variables", "expected"),
    [
        ("colectives", {}, "no script 'colectives'; did you mean collectives?"),
        ("ddp_sweep", {"SLURM_STEP_NUM_TASKS": "2"}, "SLURM_STEP_NUM_TASKS=2, but each task would"),
        ("ddp_sweep --model resnet500", {}, "did you mean resnet50"),
        ("ddp_sweep", {"PYTHONPATH": "without"}, "torch is not installed; try pip install 'torch>"),
        ("launch slurm.sh", {}, "expected one of bind_cores.sh, "),
    ],
)
def test_a_mistake(words: str, variables: dict[str, str], expected: str, archive: str) -> None:
    Path("without").mkdir()
    Path("without", "sitecustomize.py").write_text("import sys\nsys.modules['torch'] = None\n")
    done = python(archive, *words.split(), **variables)
    assert done.returncode == 2
    assert expected in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.smoke
def test_wrappers_are_printed_and_extracted(archive: str) -> None:
    done = python(archive, "launch", "slurm_torchrun.sbatch")
    assert done.stdout == (ROOT / "launch" / "slurm_torchrun.sbatch").read_text()
    requires = "slurm_torchrun.sbatch requires slurm_job.sh in its folder; to extract all files: "
    assert done.stderr == f"{requires}python -m zipfile -e {archive} FOLDER\n"
    assert python("-m", "zipfile", "-e", archive, "all").returncode == 0
    assert Path("all/launch/slurm_job.sh").read_text() == (ROOT / "launch/slurm_job.sh").read_text()
    extracted = python("all/benchmarks/collectives.py", "--version")  # has no git, but a version
    assert extracted.stdout == f"torchrun-bench {cli.VERSION}, commit {cli.version()}\n"


@pytest.mark.faults
def test_a_stopped_rank_is_named_with_its_stack(archive: str, start: Start) -> None:
    Path("mine.py").write_text(MODEL)
    flags = ("--model", "mine:net", *TIMES, "--world-sizes", "2", "--timeout", "5")
    process = start(os.path.abspath(archive), "ddp_sweep", *flags, inject="stops")
    assert process.wait() != 0
    hang = process.err[process.err.index("HANG") :]
    assert re.search("rank 1 on .*1M/2R.*, block .*does not answer", hang)
    stack = re.search(r'File ".*/torchrun-bench.pyz/common/timing.py", line \d+.*\n +(.+)', hang)
    assert stack, hang
    assert stack[1] in (ROOT / "common" / "timing.py").read_text()  # the source line, from the zip
