"""compare.py on two reports of 1,000 cases x 64 ranks x 100 samples: seconds and peak memory.

    python tests/unit/large_reports.py           about 20 seconds, 160 MB in a temporary folder

Prints what it measures, as JSON. test_compare.py asserts the memory.
"""

import contextlib
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness import children

ROOT = Path(__file__).resolve().parents[2]
CASES, RANKS, SAMPLES = 1000, 64, 100


def write_report(path: Path, seed: int, scale: float) -> None:
    """A report whose cases have the same rows of samples, shuffled: to make numbers takes long."""
    rng = random.Random(seed)
    rows = [
        json.dumps([round(scale * rng.gauss(0.1, 0.005), 9) for _ in range(SAMPLES)])
        for _ in range(RANKS)
    ]
    head = {
        "schema": "torchrun-bench/1",
        "benchmark": "ddp_sweep",
        "status": "complete",
        "argv": [],
        "started_at": f"2025-01-0{seed}T00:00:00+00:00",
        "environment": {"world_size": RANKS},
    }
    rest = {"ranks": list(range(RANKS)), "stop": {}, "metrics": {}, "check": "passed"}
    with open(path, "w") as file:
        file.write(json.dumps(head)[:-1] + ', "cases": [')
        for i in range(CASES):
            rng.shuffle(rows)
            case = json.dumps({"key": {"case": i}, "label": f"case {i}"} | rest)[:-1]
            file.write(f'{"," if i else ""}{case}, "samples_s": [{",".join(rows)}]}}')
        file.write("]}")


def peaks_of(process: "subprocess.Popen[str]") -> dict[int, int]:
    """KiB that a process and its children have had at the most (VmHWM, proc(5)), until it ends."""
    found = {}
    while process.poll() is None:
        for pid in [process.pid, *children(process.pid)]:
            with contextlib.suppress(OSError):
                for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                    if line.startswith("VmHWM:"):
                        found[pid] = int(line.split()[1])
        time.sleep(0.02)
    return found


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / name for name in ("base.json", "test.json")]
        for i, path in enumerate(paths):
            write_report(path, i + 1, 1 + 0.05 * i)
        script = str(ROOT / "benchmarks" / "compare.py")
        command = [sys.executable, script, str(paths[0]), "--test", str(paths[1])]
        output = Path(folder) / "output"
        start = time.perf_counter()
        with output.open("w") as stdout:
            process = subprocess.Popen([*command, "--format", "json"], stdout=stdout, text=True)
            peaks = peaks_of(process)
        seconds = time.perf_counter() - start
        size = paths[0].stat().st_size
        if process.returncode != 0:
            sys.exit(process.returncode)
        cases = len(json.loads(output.read_text())["cases"])
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    measured = {
        "cases": cases,
        "report_mb": round(size / 1e6),
        "seconds": round(seconds, 2),
        "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 2),
        "processes": len(peaks),
        # of all together: pages that they share count in each
        "peak_mib": round(sum(peaks.values()) / 1024),
    }
    print(json.dumps(measured))


if __name__ == "__main__":
    main()
