"""Measure the results that the pages quote again: docs/results, and the pictures in README.md and
docs/p2p_matrix.md. This takes 20 minutes and needs a quiet machine and a clean checkout.

    make results                                # as root, for the tutorial's two nodes
    python tests/measure_results.py ddp_sweep   # one script, or several

The reports of the scripts come from the commands below, and those of the tutorial from the commands
on its page. They replace the old ones last, so that new ones record the version of a clean
checkout. Traces (docs/results/profile) are not recorded again. Afterwards, update the outputs on
the pages: tests compare them with the reports.
"""

import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from analysis.pages.figures import draw
from analysis.runs.load import load

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"
RANKS = {  # number of ranks of a script, and of a script with FLAGS
    "batch_update_ps": 4,
    "checkpoint_sweep": 2,
    "compile_sweep": 2,
    "compile_sweep_interleave": 2,
    "ddp_rpc": 4,
    "ddp_sweep": 2,
    "ddp_sweep_interleave": 2,
    "input_sweep": 2,
    "node_check": 6,
    "p2p_matrix": 4,
    "parallel_sweep": 4,
    "parameter_server": 5,
    "rpc_latency": 2,
    "collectives": 2,
}
FLAGS = {
    "collectives": "-b 8 -e 64M -f 512",
    "ddp_sweep_interleave": "--model mobilenet_v3_small --world-sizes 2 --bucket-size 25,0.1 "
    "--comm-hook none,bf16 --interleave --max-seconds 10",
    "compile_sweep_interleave": "--strategies ddp,fsdp1,fsdp2 --backends eager --interleave "
    "--max-seconds 6",
}
PYTHON = shlex.quote(sys.executable)


def run(command: str) -> None:
    print(f"$ {command}", flush=True)
    torchrun = f"{PYTHON} -m torch.distributed.run"
    command = re.sub(r"^torchrun|(?<=\")torchrun", lambda _: torchrun, command)
    command = re.sub(r"^python", lambda _: PYTHON, command)
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, check=False)
    print(f"status {done.returncode}", flush=True)


def script_command(name: str) -> str:
    script = name.removesuffix("_interleave")
    words = f"benchmarks/{script}.py {FLAGS.get(name, '')}".strip()
    report = f"{name}_cpu_{RANKS[name]}ranks.jsonl"
    return f"torchrun --nproc-per-node {RANKS[name]} {words} --json {report}"


def tutorial_commands() -> list[str]:
    """The commands of docs/tutorial.md that write reports."""
    text = re.sub(r"\\\n\s*", "", (ROOT / "docs" / "tutorial.md").read_text())
    lines = re.findall(r"^    (torchrun .*|python .*|sudo .*)$", text, re.MULTILINE)
    return [line.removeprefix("sudo ") for line in lines if "--json" in line or "ab.py" in line]


def draw_picture(report: str, number: int, picture: str) -> None:
    """Draw a figure of a report as report.py does. number: of the figure."""
    figure = draw(load([str(RESULTS / report)]))[number]
    figure.savefig(ROOT / "docs" / picture, dpi=80, bbox_inches="tight")


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
            shutil.rmtree(RESULTS / "tutorial")
        kept = shutil.ignore_patterns("*.log", "*.txt")  # other files of ab.py
        shutil.copytree(new, RESULTS, ignore=kept, dirs_exist_ok=True)
    draw_picture("ddp_sweep_cpu_2ranks.jsonl", 1, "scaling.png")  # samples/s of the second model
    draw_picture("p2p_matrix_cpu_4ranks.jsonl", 1, "links.png")  # bandwidth of all links


if __name__ == "__main__":
    main()
