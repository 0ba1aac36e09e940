"""Plausible mistakes, and the tests that notice them.

    python tests/mutations.py                # all mistakes and their tests: about 20 minutes
    python tests/mutations.py compare        # those with this word in name, file or tests

tests/mutations.toml lists them. Each is planted in a copy of the checkout by replacing one text,
and pytest runs its tests: the quick tests of that part, and a smoke test if only a run can tell. A
mistake that is not caught shows that a test is missing. When code changes, update the text.
"""

import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CHANGE = re.compile(r"<<((?:(?!<<).)*?) => (.*?)>>", re.DOTALL)


def mistakes_in(name: str, own: str) -> Iterator[dict[str, str]]:
    """The mistakes of a file in tests/. own: their tests by default, {} is the stem of a module."""
    for file, entries in tomllib.loads((ROOT / "tests" / name).read_text()).items():
        of_file = entries.pop("tests", own.format(Path(file).stem))
        for title, entry in entries.items():
            text, *more = [entry] if isinstance(entry, str) else entry
            tests, missed = {0: (of_file, ""), 1: (*more, ""), 2: more}[len(more)]
            yield {"name": title, "file": file, "text": text, "tests": tests, "missed": missed}


MISTAKES = [*mistakes_in("mutations.toml", "tests/pure/test_{}.py")]
ON_CUDA = [*mistakes_in("cudalab_faults.toml", "late {}")]  # rows of tests/test_cudalab.py


def plant(mistake: dict[str, str], checkout: Path) -> None:
    """Replace the text. Raises ValueError unless it occurs in the file exactly once."""
    path = checkout / mistake["file"]
    text = path.read_text()
    right, wrong = (CHANGE.sub(side, mistake["text"]) for side in (r"\1", r"\2"))
    if right == wrong or text.count(right) != 1:
        found = f"{mistake['file']} has its text {text.count(right)} times"
        raise ValueError(f"{mistake['name']}: expected <<right => wrong>> and one place; {found}")
    path.write_text(text.replace(right, wrong))


def caught_by(mistake: dict[str, str]) -> list[str]:
    """The first tests that fail with the mistake; empty if all pass, or none was selected."""
    with tempfile.TemporaryDirectory() as folder:
        checkout = Path(folder) / "checkout"
        shutil.copytree(ROOT, checkout, ignore=shutil.ignore_patterns(".git", "*cache*"))
        plant(mistake, checkout)
        command = [sys.executable, "-m", "pytest", "-q", "--maxfail=2", "-p", "no:cacheprovider"]
        command += ["-m", "smoke or faults or not smoke"]
        words = shlex.split(mistake["tests"])
        run = subprocess.run([*command, *words], cwd=checkout, capture_output=True, text=True)
        if run.returncode not in (0, 1, pytest.ExitCode.NO_TESTS_COLLECTED):
            raise RuntimeError(f"{mistake['name']}: {run.stdout}{run.stderr}")
        lines = run.stdout.splitlines()
        return [line.split()[1] for line in lines if line.startswith(("FAILED ", "ERROR "))]


def main() -> int:
    chosen = []
    for mistake in MISTAKES:
        place = f"{mistake['name']} {mistake['file']} {mistake['tests']}"
        if all(word in place for word in sys.argv[1:]):
            chosen.append(mistake)
    missed = 0
    for mistake in chosen:
        found = caught_by(mistake)
        missed += not found
        print(f"{mistake['name']:50} {found[0] if found else 'NOT CAUGHT'}", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} were caught")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
