"""harness/contents.py: the modules behind a result, and when they count as different."""

import runpy
import sys
import zipfile
from hashlib import sha256
from importlib import import_module, invalidate_caches
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from harness.contents import differing, loaded


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of sys.path. Modules imported by the test are forgotten after it."""
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    invalidate_caches()


def test_what_was_imported_counts_however_it_was_found(folder: Path) -> None:
    """A folder that a module adds to sys.path, a computed name, packages, and archives."""
    adds = "import sys; sys.path.insert(0, __file__[:-7] + 'lib'); import helper"
    write(folder / "mine.py", adds)
    computes = "import importlib; importlib.import_module('com' + 'puted')"
    write(folder / "lib" / "helper.py", computes)
    write(folder / "lib" / "computed.py", "import names.pace\nT = 1")
    write(folder / "names" / "pace.py", "")  # of a namespace package
    with zipfile.ZipFile(folder / "a.zip", "w") as archive:
        archive.writestr("packed.py", "")
    sys.path.append(str(folder / "a.zip"))
    write(folder / "unused.py", "")
    before = loaded()
    for name in ("mine", "packed"):
        import_module(name)
    after = loaded()
    new = ["computed", "helper", "mine", "names.pace", "packed"]
    assert sorted(after.keys() - before.keys()) == new
    assert differing(before, after) == differing(after, before) == []
    assert after["names.pace"] == after["packed"] == "e3b0c44298fc"  # SHA-256 of nothing
    write(folder / "lib" / "computed.py", "import names.pace\nT = 2")
    assert differing(after, loaded()) == ["computed"]
    (folder / "mine.py").unlink()
    assert differing(after, loaded()) == ["computed", "mine"]
    write(folder / "train.py", "from harness.contents import loaded\nfound = loaded()")
    found = runpy.run_path(str(folder / "train.py"), run_name="__main__")["found"]
    assert found["train.py"] == sha256((folder / "train.py").read_bytes()).hexdigest()[:12]
    assert "__main__" not in found


def test_installed_modules_are_not_local(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Except those of an editable installation, which an import hook may find."""
    write(folder / "lib" / "python3" / "dist-packages" / "theirs.py", "")
    sys.path.append(str(folder / "lib" / "python3" / "dist-packages"))
    write(folder / "source" / "__init__.py", "")
    write(folder / "generated.py", "")
    assert import_module("theirs").__file__
    generated = ("pytest.generated", "cd2ptlhee5da.kernel")  # the latter as by torch.compile
    files = {"editable": "source/__init__.py"} | dict.fromkeys(generated, "generated.py")
    for name, path in files.items():
        spec = spec_from_file_location(name, folder / path)
        assert spec
        assert spec.loader
        sys.modules[name] = module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    monkeypatch.setitem(sys.modules, "absent", None)  # as tests do
    names = loaded()
    assert {"editable", "harness.contents", "tests.pure.test_contents"} <= names.keys()
    other = {"theirs", *generated, "json", "sys", "absent", "pytest"}
    assert not other & names.keys()
