"""The cluster, which is started once for all tests in this folder."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.lab import TOOLS, Lab, need
from tests.process import ROOT


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    need(*TOOLS, root=True)
    with Lab(tmp_path_factory.mktemp("lab") / "lab", 3) as lab:
        yield lab


@pytest.fixture(scope="session")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project as a user has it, in a path with a space."""
    path = tmp_path_factory.mktemp("home") / "a checkout"
    for name in ("analysis", "benchmarks", "common", "harness", "launch", "readers"):
        shutil.copytree(ROOT / name, path / name, ignore=shutil.ignore_patterns("__pycache__"))
    return path
