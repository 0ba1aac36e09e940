"""Print how long the programs of analysis/ take to start, in seconds of CPU time.

    python tests/start_up.py

Each command runs five times, and the smallest time counts. `--help`, a typo and a mistake in the
arguments should take 0.3 s or less, and a comparison of 2 + 2 reports 1 s.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.pure.reports import runs  # noqa: E402

PROGRAMS = ("compare.py", "ab.py", "report.py", "export.py", "trace.py")


def commands(folder: Path) -> dict[str, list[str]]:
    """What is measured -> the words of the command."""
    old, new = runs(folder / "old", [0.1, 0.101]), runs(folder / "new", [0.11, 0.111])
    found = {f"{name} --help": [name, "--help"] for name in PROGRAMS}
    found |= {f"{name} --typo": [name, "--typo"] for name in PROGRAMS}
    found["compare.py A --test A"] = ["compare.py", old, "--test", old]
    found["compare.py, 2 + 2 reports"] = ["compare.py", old, "--test", new]
    found["compare.py --format json"] = ["compare.py", old, "--test", new, "--format", "json"]
    found["export.py --to gha"] = ["export.py", old, "--to", "gha"]
    page = str(folder / "page.html")
    found["report.py, 2 + 2 reports"] = ["report.py", old, "--test", new, "-o", page]
    return found


def cpu_s(words: list[str]) -> float:
    """CPU time of a command in seconds."""
    command = [sys.executable, str(ROOT / "analysis" / words[0]), *words[1:]]
    none = subprocess.DEVNULL
    process = subprocess.Popen(command, stdout=none, stderr=none)
    _, _, usage = os.wait4(process.pid, 0)
    process.returncode = 0  # it was waited for
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        print("| command | CPU time (s) |\n|---|---|")
        for name, words in commands(Path(folder)).items():
            print(f"| {name} | {min(cpu_s(words) for _ in range(5)):.2f} |", flush=True)
