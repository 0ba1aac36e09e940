"""How often does node_check.py err? Runs on 6 gloo ranks that are healthy or have a planted fault.

    python tests/series_node_check.py           20 runs of each, taking turns
    python tests/series_node_check.py 5 --budget 60 --margin 0.3

What follows the number goes to node_check.py. Rank 1 is held to half speed, or its products are
wrong in their last bit; a budget of 20 s names it, and healthy runs have the default of 60 s. Exit
status 0 if at most one healthy run of 20 accused somebody, and each other one exactly rank 1.
"""

import re
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.process import Warm, command_of, environment

FAULTS = {"healthy": None, "half speed": "half-speed", "wrong product": "wrong-product"}
VERDICTS = ("nobody", "exactly rank 1", "rank 1 and others", "somebody else", "no verdict")


def verdict(out: str) -> str:
    """Of the last line: `# fit: ...`, or `# not fit: rank 1 on vm, ...`."""
    last = (out.splitlines() or [""])[-1]
    accused = re.findall(r"(\w+ \d+(?: -> \d+)?) on ", last)
    if last.startswith("# fit: "):
        return "nobody"
    if not last.startswith("# not fit: "):
        return "no verdict"
    if "rank 1" not in accused:
        return "somebody else"
    return "exactly rank 1" if accused == ["rank 1"] else "rank 1 and others"


def main() -> int:
    runs, flags = int((sys.argv[1:] or ["20"])[0]), sys.argv[2:]
    counts = {condition: Counter[str]() for condition in FAULTS}
    for number in range(1, runs + 1):
        for condition, fault in FAULTS.items():
            with tempfile.TemporaryDirectory() as folder:
                start = time.monotonic()
                budget = ["--budget", "20" if fault else "60"]
                script = ("benchmarks/node_check.py", *budget, *flags)
                commands = command_of(*script, ranks=6, inject=fault)
                run = Warm(commands, Path(folder), environment())
                run.wait(300)
                found, seconds = verdict(run.out), time.monotonic() - start
                counts[condition][found] += 1
                more = "" if found in ("nobody", "exactly rank 1") else f"\n{run.out}{run.err}"
                left = ", ".join(re.findall(r"left out.*: (.*)", run.out))
                print(f"{number:3} {condition:14} {seconds:5.1f} s  {found}", end="")
                print(f" (left out: {left})" * bool(left), more, flush=True)
    for condition, count in counts.items():
        print(f"# {condition}:", ", ".join(f"{name} {count[name]}" for name in VERDICTS))
    errs = counts["healthy"].total() - counts["healthy"]["nobody"]
    named = [counts[condition]["exactly rank 1"] == runs for condition in list(FAULTS)[1:]]
    return int(errs > runs / 20 or not all(named))


if __name__ == "__main__":
    sys.exit(main())
