"""Measure the results that the pages quote again: docs/results and the picture in README.md. This
takes 25 minutes and needs a quiet machine and a clean checkout.

    make results                                # as root, for the tutorial's two nodes
    python tests/measure_results.py ddp_sweep   # one script, or several

The reports of the scripts come from the commands below, and those of the tutorial from the commands
on its page. Old reports are removed last, so that new ones record the version of a clean checkout.
Afterwards, update the outputs on the pages: tests compare them with the reports.
"""

import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from analysis.figures import draw
from analysis.load import load

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"
RANKS = {  # number of ranks; the other settings are the defaults
    "batch_update_ps": 4,
    "checkpoint_sweep": 2,
    "compile_sweep": 2,
    "ddp_rpc": 4,
    "ddp_sweep": 2,
    "input_sweep": 2,
    "node_check": 6,
    "p2p_matrix": 4,
    "parallel_sweep": 4,
    "parameter_server": 5,
    "rpc_latency": 2,
    "collectives": 2,
}
FLAGS = {"collectives": "-b 8 -e 64M -f 512"}
PYTHON = shlex.quote(sys.executable)


def run(command: str) -> None:
    print(f"$ {command}", flush=True)
    torchrun = f"{PYTHON} -m torch.distributed.run"
    command = re.sub(r"^torchrun|(?<=\")torchrun", lambda _: torchrun, command)
    command = re.sub(r"^python", lambda _: PYTHON, command)
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, check=False)
    print(f"status {done.returncode}", flush=True)


def script_command(name: str) -> str:
    words = f"benchmarks/{name}.py {FLAGS.get(name, '')}".strip()
    report = f"{name}_cpu_{RANKS[name]}ranks.jsonl"
    return f"torchrun --nproc-per-node {RANKS[name]} {words} --json {report}"


def tutorial_commands() -> list[str]:
    """The commands of docs/tutorial.md that write reports."""
    text = re.sub(r"\\\n\s*", "", (ROOT / "docs" / "tutorial.md").read_text())
    lines = re.findall(r"^    (torchrun .*|python .*|sudo .*)$", text, re.MULTILINE)
    return [line.removeprefix("sudo ") for line in lines if "--json" in line or "ab.py" in line]


def draw_picture(report: Path) -> None:
    """Draw samples/s over ranks of the second model, as report.py does."""
    figure = draw(load([str(report)]))[1]
    figure.savefig(ROOT / "docs" / "scaling.png", dpi=80, bbox_inches="tight")


def measure(commands: list[str], to: Path) -> None:
    """Run the commands in the checkout, and move their reports or folders of reports to `to`."""
    to.mkdir(exist_ok=True)
    for command in commands:
        run(command)
        left = re.search(r"--json (\S+)|--out (\S+)", command)
        assert left
        shutil.move(ROOT / (left[1] or left[2]), to)


def main() -> None:
    """Measure all results, or only those of the named scripts."""
    names = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        new = Path(folder)
        measure([script_command(name) for name in names or RANKS], new)
        if not names:
            measure(tutorial_commands(), new / "tutorial")
            shutil.rmtree(RESULTS)
        kept = shutil.ignore_patterns("*.log", "*.txt")  # other files of ab.py
        shutil.copytree(new, RESULTS, ignore=kept, dirs_exist_ok=True)
    if not names or "ddp_sweep" in names:
        draw_picture(RESULTS / "ddp_sweep_cpu_2ranks.jsonl")


if __name__ == "__main__":
    main()
