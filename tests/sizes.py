"""Compare the time and the intervals of collectives.py in two checkouts, in alternating runs.

    git worktree add /tmp/before COMMIT
    python tests/sizes.py /tmp/before 4 12 20       on a quiet machine, 8 minutes

Runs `-b 8 -e 64M -f 2` on 2 ranks, 4 times: as in the other checkout, as here, and here with
`--total-seconds 12` and `20`. The width of a size is the relative half-width of the wider interval
of its two variants; a size without an interval counts as 200%. Ratios are geometric means over
sizes or runs. `wide` is the mean number of sizes without an interval or with one wider than 50%.
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import collectives  # noqa: E402
from harness.report import load  # noqa: E402

NO_INTERVAL = 2.0


def run(checkout: Path, flags: list[str]) -> tuple[float, list[float]]:
    """Return the seconds of a run, and the width of each size."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/r.jsonl"
        script = str(checkout / "benchmarks" / "collectives.py")
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
        sizes = ["-b", "8", "-e", "64M", "-f", "2", "--device", "cpu", "--json", path]
        begun = time.monotonic()
        subprocess.run([*torchrun, script, *sizes, *flags], check=True, capture_output=True)
        spent_s = time.monotonic() - begun
        cases = sorted(load(path).cases, key=lambda case: int(case.key["size_bytes"]))
        return spent_s, [collectives.width_of(case) or NO_INTERVAL for case in cases]


def main() -> None:
    before, rounds = Path(sys.argv[1]), int(sys.argv[2])
    kinds = {"before": (before, []), "now": (ROOT, list[str]())}
    for total in sys.argv[3:]:
        kinds[f"now, --total-seconds {total}"] = (ROOT, ["--total-seconds", total])
    found: dict[str, list[tuple[float, list[float]]]] = {name: [] for name in kinds}
    for number in range(rounds):
        for name in list(kinds)[:: 1 if number % 2 else -1]:
            found[name].append(run(*kinds[name]))
            print(f"# {name}: {found[name][-1][0]:.1f} s", file=sys.stderr, flush=True)
    print("| | seconds | ratio | width | ratio | wide |\n|---|---|---|---|---|---|")
    of_before = [np.log([s for s, _ in found["before"]]), np.log([w for _, w in found["before"]])]
    for name, runs in found.items():
        seconds, widths = np.log([s for s, _ in runs]), np.log([w for _, w in runs])
        ratios = [np.exp(np.mean(x - y)) for x, y in zip((seconds, widths), of_before, strict=True)]
        cells = f"{np.exp(np.mean(seconds)):.1f} | {ratios[0]:.2f}"
        wide = np.mean(np.sum(widths > np.log(collectives.UNSURE), axis=1))
        cells += f" | {np.exp(np.mean(widths)):.1%} | {ratios[1]:.2f} | {wide:.1f}"
        print(f"| {name} | {cells} |")


if __name__ == "__main__":
    main()
