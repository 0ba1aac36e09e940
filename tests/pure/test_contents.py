"""harness/contents.py: the files that a run depends on, and when their hash changes."""

import sys
from importlib.util import spec_from_file_location
from pathlib import Path

import pytest

from harness import contents
from tests.process import ROOT


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a script, models and local modules."""
    monkeypatch.chdir(tmp_path)
    shapes = "from shapes import (  # (wide)\n    wide as w,\n)\n"
    write(tmp_path, "train.py", f"import torch, helper  # import unused\n{shapes}")
    write(tmp_path, "helper.py", "import json\nif True: import deep.below.leaf as leaf, absent\n")
    write(tmp_path, "shapes/wide.py", "from . import \\\n    narrow\nfrom.other import x\n")
    write(tmp_path, "shapes/narrow.py", "this is no Python")
    write(tmp_path, "shapes/other.py", "x = 1\n")
    write(tmp_path, "deep/__init__.py", "")
    write(tmp_path, "deep/below/__init__.py", "")
    write(tmp_path, "deep/below/leaf.py", "import train\n")
    write(tmp_path, "deep/unused.py", "")
    write(tmp_path, "zoo/__init__.py", "raise RuntimeError('imported')\n")
    write(tmp_path, "zoo/nets/big.py", "from .. import layers\nfrom zoo.nets import y\n")
    write(tmp_path, "zoo/layers.py", "import importlib, helper\n")
    write(tmp_path, "zoo/env/pyvenv.cfg", "")
    write(tmp_path, "zoo/env/lib.py", "")
    return tmp_path


def write(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


LEAF = {"deep/__init__.py", "deep/below/__init__.py", "deep/below/leaf.py"}
SHAPES = {"shapes/wide.py", "shapes/narrow.py", "shapes/other.py"}


def test_a_script_includes_the_local_modules_that_it_imports(folder: Path) -> None:
    """Imports are followed recursively, including relative ones without __init__.py and cycles."""
    files = contents.python_program(folder / "train.py", [str(folder), *sys.path])
    assert set(files) == {"train.py", "helper.py", *LEAF, *SHAPES}
    own = contents.python_program(ROOT / "benchmarks/replay.py", [str(ROOT), *sys.path])
    assert not [name for name in own if name.startswith(contents.HARNESS)]
    assert "benchmarks/ddp_sweep.py" not in own


def test_a_model_includes_its_package_and_is_not_imported(folder: Path) -> None:
    search = [str(folder), *sys.path]
    of_package = {"zoo/__init__.py", "zoo/nets/big.py", "zoo/layers.py"}
    files = contents.model("zoo.nets.big", search)
    assert set(files) == {*of_package, "helper.py", "train.py", *LEAF, *SHAPES}
    assert set(contents.model("shapes.wide", search)) == SHAPES
    assert contents.model("train", search).keys() >= {"train.py", "helper.py"}
    for missing in ("nowhere", "zoo/nets", "", ".zoo", "..:x"):
        assert contents.model(missing, search) == {}
    assert "zoo" not in sys.modules
    installed = contents.model("numpy.linalg", search)  # it was named explicitly
    assert "numpy/linalg/__init__.py" in installed
    assert not [name for name in installed if not name.startswith("numpy/")]


def test_packages_of_editable_installations_are_followed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip install -e may install an import hook instead of a folder of sys.path."""
    write(folder, "source/mine/__init__.py", "raise RuntimeError('imported')")
    write(folder, "source/mine/nets.py", "import helper\n")
    write(folder, "script.py", "from mine.nets import net\nimport numpy.linalg\n")

    class Hook:
        @staticmethod
        def find_spec(name: str, path: object = None, target: object = None) -> object:
            init = folder / "source" / "mine" / "__init__.py"
            return spec_from_file_location(name, init) if name == "mine" else None

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Hook])
    package = {"mine/__init__.py", "mine/nets.py"}
    files = contents.python_program(folder / "script.py", [str(folder), *sys.path])
    assert set(files) >= {"script.py", *package, "helper.py"}
    assert not [name for name in files if name.startswith("numpy")]
    assert set(contents.model("mine.nets", sys.path)) >= package
    assert "mine" not in sys.modules


@pytest.mark.parametrize("edited", ["train.py", "deep/below/leaf.py", "shapes/other.py"])
def test_an_edit_changes_the_hash(folder: Path, edited: str) -> None:
    """The name of the folder does not change it."""
    before = contents.of_run("train.py", ["train"])
    assert set(before) == {"common/ and harness/ and benchmarks/workloads/", "train.py", "train"}
    copy = folder / "a copy"
    for path in sorted(folder.rglob("*.py")):
        write(copy, str(path.relative_to(folder)), path.read_text())
    assert contents.digest(contents.model("train", [str(copy)])) == before["train"]
    write(folder, edited, "x = 2\n")
    assert contents.digest(contents.model("train", [str(folder)])) != before["train"]


def test_the_harness_is_hashed_by_its_bytes(tmp_path: Path) -> None:
    """A commit with `-dirty` is not enough. Files outside of the harness do not count."""
    write(tmp_path, "harness/observe/a.py", "1")
    write(tmp_path, "benchmarks/workloads/b.py", "2")
    write(tmp_path, "benchmarks/c.py", "3")
    files = contents.harness(tmp_path)
    assert set(files) == {"harness/observe/a.py", "benchmarks/workloads/b.py"}
    before = contents.digest(files)
    write(tmp_path, "benchmarks/c.py", "4")
    assert contents.digest(contents.harness(tmp_path)) == before
    write(tmp_path, "harness/observe/a.py", "5")
    assert contents.digest(contents.harness(tmp_path)) != before
    assert contents.of_file(tmp_path / "missing") == ""
