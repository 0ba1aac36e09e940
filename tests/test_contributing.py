"""The script in docs/new_script and its tests work when they are copied as in CONTRIBUTING.md."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.process import ROOT

PAGE = (ROOT / "CONTRIBUTING.md").read_text()
# file, the line below which an entry belongs, and the entry
ENTRIES = re.findall(r"^\| `(\S+)` \| in `(\w+)`: `(.+?,)`", PAGE, re.MULTILINE)
COPY = "    cp -r docs/new_script/. .\n"
ROW = "| Does an all-reduce overlap with a matmul? | [x.py](docs/x.md) |"


def insert(path: Path, place: str, line: str) -> None:
    """Insert a line below the line that begins with `place`."""
    text, count = re.subn(
        rf"^{place}\b.*\n", lambda at: f"{at[0]}{line}\n", path.read_text(), count=1, flags=re.M
    )
    assert count == 1, f"no line of {path} begins with {place}"
    path.write_text(text)


@pytest.mark.smoke
def test_the_example_passes_its_tests_and_breaks_no_other_test(tmp_path: Path) -> None:
    """In a copy of the project, with the other files that CONTRIBUTING.md requires for a script."""
    checkout = tmp_path / "a checkout"
    ignored = shutil.ignore_patterns(".git", ".*_cache", "__pycache__", ".build")
    shutil.copytree(ROOT, checkout, ignore=ignored)
    assert COPY in PAGE
    subprocess.run(COPY.split(), cwd=checkout, check=True)
    assert len(ENTRIES) == 3
    for name, place, line in ENTRIES:
        insert(checkout / name, place, f"    {line}")
    readme = checkout / "README.md"
    insert(readme, r"\| How far does DDP", ROW)

    pure = {path: path.read_text() for path in checkout.glob("tests/pure/*.py")}
    of_all_scripts = [
        path for path, text in pure.items() if "benchmarks" in text and "glob(" in text
    ]
    files = ["tests/pure/test_x.py", "tests/test_x.py", *map(str, of_all_scripts)]
    # of the many invalid commands in test_refusals.py only that of x.py
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *files]
    command += ["-m", "smoke or faults or not smoke", "-k", "not mistake or 64X"]
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout
    assert "::test_a_wrong_sum_is_detected PASSED" in done.stdout
