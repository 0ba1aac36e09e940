"""Compare the time and the intervals of collectives.py in two checkouts, in alternating runs.

    git worktree add /tmp/before COMMIT
    python tests/sizes.py /tmp/before 4 12 20       on a quiet machine, 8 minutes

Runs `-b 8 -e 64M -f 2` on 2 ranks, 4 times: as in the other checkout, as here, and here with
`--total-seconds 12` and `20`. The width of a size is the relative half-width of the wider interval
of its two variants; a size without an interval counts as 200%. Ratios are geometric means over
sizes or runs. `wide` is the mean number of sizes without an interval or with one wider than 50%.
`scatter` is the standard deviation of a time between the runs, as a fraction; the median over sizes
and variants. The last line is computed from the widths before: a width falls with the square root
of the time, so a size of width w that stops at a wider one, s, needs (w / s)^2 of its time.
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


def run(checkout: Path, flags: list[str]) -> tuple[float, list[float], list[float]]:
    """Return the seconds of a run, the width of each size, and the times of each variant."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/r.jsonl"
        script = str(checkout / "benchmarks" / "collectives.py")
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
        sizes = ["-b", "8", "-e", "64M", "-f", "2", "--device", "cpu", "--json", path]
        begun = time.monotonic()
        subprocess.run([*torchrun, script, *sizes, *flags], check=True, capture_output=True)
        spent_s = time.monotonic() - begun
        cases = sorted(load(path).cases, key=lambda case: int(case.key["size_bytes"]))
        widths = [collectives.width_of(case) or NO_INTERVAL for case in cases]
        names = [f"{variant}_time_s" for variant in collectives.VARIANTS]
        return spent_s, widths, [case.metrics[name].value for case in cases for name in names]


def main() -> None:
    before, rounds = Path(sys.argv[1]), int(sys.argv[2])
    kinds = {"before": (before, []), "now": (ROOT, list[str]())}
    for total in sys.argv[3:]:
        kinds[f"now, --total-seconds {total}"] = (ROOT, ["--total-seconds", total])
    found: dict[str, list[tuple[float, list[float], list[float]]]] = {name: [] for name in kinds}
    for number in range(rounds):
        for name in list(kinds)[:: 1 if number % 2 else -1]:
            found[name].append(run(*kinds[name]))
            print(f"# {name}: {found[name][-1][0]:.1f} s", file=sys.stderr, flush=True)
    print("| | seconds | ratio | width | ratio | wide | scatter |\n|---|---|---|---|---|---|---|")
    seconds, widths, times_s = (
        {name: np.log([row[column] for row in rows]) for name, rows in found.items()}
        for column in range(3)
    )
    for name in found:
        cells = []
        for of_runs, digits in ((seconds, ".1f"), (widths, ".1%")):
            ratio = np.exp(np.mean(of_runs[name] - of_runs["before"]))
            cells += [f"{np.exp(np.mean(of_runs[name])):{digits}}", f"{ratio:.2f}"]
        cells.append(f"{np.mean(np.sum(widths[name] > np.log(collectives.UNSURE), axis=1)):.1f}")
        cells.append(f"{np.median(np.std(times_s[name], axis=0, ddof=1)):.1%}")
        print(f"| {name} | {' | '.join(cells)} |")
    stops = (0.02, 0.1, 0.2, collectives.UNSURE)
    needed = [np.mean(np.minimum(1, np.exp(2 * widths["before"]) / stop**2)) for stop in stops]
    told = [
        f"{share:.0%} if it stops at +-{stop:.0%}"
        for share, stop in zip(needed, stops, strict=True)
    ]
    print(f"\nTime that a size needs: {', '.join(told)}")


if __name__ == "__main__":
    main()
