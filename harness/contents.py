"""Hashes of the source files behind a result: the local modules that this process has imported.

A commit, a path or a module name does not identify a program, because files may have been edited
since. What was imported does, however the import found it.
"""

import functools
import hashlib
import os
import re
import sys
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from importlib.machinery import BuiltinImporter, FrozenImporter, ModuleSpec, PathFinder
from pathlib import Path

from harness.cli import ROOT

HARNESS = ("common", "harness", "benchmarks/workloads")  # folders that all scripts use
DIGITS = 12  # hexadecimal digits of a hash: 48 bits
# `from .a import b, c`, also with parentheses, and `import a.b as c, d`; without comments
IMPORT = re.compile(r"\bfrom\s*(\.*)([\w.]*)\s+import\s*(\([^)]*|[^\n;]+)|\bimport\s+([^\n;]+)")
VERSIONED = ("torch", "torchvision")  # the environment has their versions
INSTALLED = {"site-packages", "dist-packages"}  # folders of installed packages, including Spack's

Files = dict[str, Path]  # name, hashed with the file and independent of its folder -> file


def loaded() -> dict[str, str]:
    """Return the hash of the source of each local module in sys.modules, by name.

    The main script has the name of its file. Local modules are those outside the standard library
    and the folders of installed packages, so those of editable installations are local. Modules of
    VERSIONED packages are not, wherever they are.
    """
    found = {}
    for name, module in [*sys.modules.items()]:
        package = name.partition(".")[0]
        if package in VERSIONED or name == "__mp_main__":  # the main script's other name
            continue
        places = [file_of(sys.modules.get(package)), path := file_of(module)]
        if path and not any(map(is_installed, filter(None, places))):
            found[os.path.basename(path) if name == "__main__" else name] = source_hash(
                module, path
            )
    return dict(sorted(found.items()))


def differing(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return the modules whose source differs. A module on one side only is no difference, because
    modules may be imported late."""
    return [name for name in now if before.get(name, now[name]) != now[name]]


def file_of(module: object) -> str:
    """Return the file of a module; "" for namespace packages and modules without a file."""
    attributes = getattr(module, "__dict__", {})  # getattr would make lazy modules import others
    return str(attributes.get("__file__") or "")


def source_hash(module: object, path: str) -> str:
    """Return a hash of a module's file, read by its loader, e.g. from an archive; "" if the file
    cannot be read."""
    read = getattr(vars(module).get("__loader__"), "get_data", lambda path: Path(path).read_bytes())
    try:
        content = read(path)
    except OSError:
        return ""
    return hashlib.sha256(content).hexdigest()[:DIGITS]


def harness(root: Path = ROOT) -> Files:
    """The Python files of HARNESS in a checkout."""
    files: Files = {}
    for folder in HARNESS:
        files |= package(root / folder, folder)
    return files


def python_program(path: Path, search: Sequence[str]) -> Files:
    """A script with the local modules that it imports, without the harness.

    search: folders, as in sys.path.
    """
    files = modules(imports(path, path.name), search)
    harness_folders = tuple(f"{ROOT / folder}{os.sep}" for folder in HARNESS)
    kept = {n: file for n, file in files.items() if not str(file).startswith(harness_folders)}
    return {path.name: path} | kept


def model(name: str, search: Sequence[str]) -> Files:
    """A module named by a flag, or its whole package, with the local modules that they import.

    Unlike imported modules, it may be installed. search: folders, as in sys.path.
    """
    files = files_of(name, search, whole=True) or hooked(name.partition(".")[0])
    editable = [(path, label) for label, path in files.items() if not is_installed(str(path))]
    return modules(set[str]().union(*(imports(*file) for file in editable)), search) | files


def modules(names: Iterable[str], search: Sequence[str]) -> Files:
    """The files of local modules and of the local modules that they import, recursively.

    These include packages of editable installations. search: folders, as in sys.path. Modules in
    folders of installed packages are not local.
    """
    local = [folder for folder in search if not is_installed(folder)]
    files: Files = {}
    waiting, seen = set(names), set[str]()
    while waiting:
        name = waiting.pop()
        seen.add(name)
        found = files_of(name, local) or hooked(name.partition(".")[0])
        for label, path in found.items():
            if label not in files:
                files[label] = path
                waiting |= imports(path, label) - seen
    return files


def files_of(name: str, search: Sequence[str], whole: bool = False) -> Files:
    """The file of a module and of each package that contains it; {} if the module is missing.

    search: folders, as in sys.path. whole: return all Python files of the outermost regular package
    instead.
    """
    files: Files = {}
    folders, walked = list(search), ""
    for part in name.split("."):
        spec = PathFinder.find_spec(part, folders) if part else None
        if spec is None:  # `name` in `from module import name` may be a function
            break
        walked = f"{walked}/{part}".lstrip("/")
        if spec.has_location:
            files |= files_at(spec, walked, whole)
            if whole:
                break
        folders = list(spec.submodule_search_locations or ())
    return files


def hooked(name: str) -> Files:
    """The files of a top-level module or package that only an import hook finds, and that is not in
    a folder of installed packages: that of an editable installation."""
    for finder in sys.meta_path:
        if finder in (BuiltinImporter, FrozenImporter, PathFinder):
            continue
        find_spec = getattr(finder, "find_spec", None)  # Python skips hooks without it
        spec = find_spec(name, None) if find_spec and name else None
        if spec and spec.has_location and not is_installed(spec.origin or ""):
            return files_at(spec, name, whole=True)
    return {}


def files_at(spec: ModuleSpec, label: str, whole: bool) -> Files:
    """The file of a module, or the __init__.py of a package, or all files of it if `whole`."""
    path = Path(spec.origin or "")
    if spec.submodule_search_locations is None:
        return {f"{label}{path.suffix}": path}
    return package(path.parent, label) if whole else {f"{label}/__init__.py": path}


def package(folder: Path, label: str) -> Files:
    """All Python files below a folder, except in hidden folders and virtual environments."""
    files: Files = {}
    for place, inner, names in os.walk(folder):
        here = Path(place)
        shown = [name for name in inner if not name.startswith((".", "__pycache__"))]
        inner[:] = [name for name in shown if not (here / name / "pyvenv.cfg").exists()]
        for path in [here / name for name in names if name.endswith(".py")]:
            files[f"{label}/{path.relative_to(folder)}"] = path
    return files


def imports(path: Path, label: str) -> set[str]:
    """The names of the modules that a file seems to import, including imports in strings.

    label: name of the file, to resolve relative imports.
    """
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return set()
    text = re.sub(r"#.*", "", text).replace("\\\n", " ")
    names: set[str] = set()
    for dots, module, imported, plain in IMPORT.findall(text):
        if plain:
            names |= {words.split()[0] for words in plain.split(",") if words.strip()}
            continue
        above = label.split("/")[: -len(dots)] if dots else []
        base = ".".join([*above, *filter(None, [module])])
        names |= {base, *(f"{base}.{name}" for name in re.findall(r"\w+", imported))}
    return names


@functools.cache
def is_installed(path: str) -> bool:
    """Return whether a path is in the standard library or in a folder of installed packages."""
    real = os.path.realpath(path or ".")
    paths = sysconfig.get_paths()
    library = tuple(f"{os.path.realpath(paths[name])}{os.sep}" for name in ("stdlib", "platstdlib"))
    return f"{real}{os.sep}".startswith(library) or bool(INSTALLED & set(Path(real).parts))


def digest(files: Mapping[str, Path]) -> str:
    """A hash of the names and contents of files. A file that cannot be read counts as empty."""
    total = hashlib.sha256()
    for name in sorted(files):
        total.update(f"{name}\0{of_file(files[name])}\n".encode())
    return total.hexdigest()[:DIGITS]


def of_file(path: Path) -> str:
    """A hash of the contents of a file; "" if it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:DIGITS]
    except OSError:
        return ""
