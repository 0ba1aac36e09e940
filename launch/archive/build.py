#!/usr/bin/env python3
"""Write torchrun-bench.pyz: all scripts in one file, which needs Python and torch. `make pyz`."""

import shutil
import sys
import tempfile
import zipapp
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from harness import cli, exits

FOLDERS = ("benchmarks", "common", "harness", "readers", "analysis", "launch")
FILES = (*FOLDERS, "requirements.txt", "LICENSE")
LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.pyc", "archive")


def build(target: Path) -> None:
    """Write the archive, with the version of this checkout."""
    with tempfile.TemporaryDirectory() as folder:
        for name in FILES:
            source, copy = ROOT / name, Path(folder, name)
            if source.is_dir():
                shutil.copytree(source, copy, ignore=LEFT_OUT)
            else:
                shutil.copy(source, copy)
        shutil.copy(ROOT / "launch" / "archive" / "__main__.py", folder)
        Path(folder, exits.STAMP).write_text(cli.version())
        zipapp.create_archive(folder, target, "/usr/bin/env python3", compressed=True)


if __name__ == "__main__":
    build(Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "torchrun-bench.pyz"))
