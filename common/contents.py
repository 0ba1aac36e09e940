"""Hashes of the source files behind a number. Two runs belong together only if these are equal.

A commit, a path or a module's name does not identify a program: the files may have been edited
since. Modules are located, and never imported: importing them runs their code.
"""

import ast
import hashlib
import importlib.util
import os
import re
import sys
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from common.cli import ROOT

HARNESS = ("common", "benchmarks/workloads")  # folders that every script measures with
DIGITS = 12  # of a hash: 48 bits
# `import a.b as c, d` and `from a import b`, wherever the words stand, also in a string
IMPORT = re.compile(rb"\bfrom\s+([.\w]+)|\bimport\s+([^\n;#]+)")
INIT = "/__init__.py"
INSTALLED = {"site-packages", "dist-packages"}  # folders of installed packages, also of Spack's

Files = dict[str, Path]  # the name that is hashed with the file, independent of the folder -> file


def of_run(script: str, models: Iterable[str] = ()) -> dict[str, str]:
    """What a run of a script measures with: part -> hash.

    script: the path of the script. models: modules by name, such as `my_package.models`. The parts
    are the harness, the script with the local modules that it imports, and each model's module with
    its package, or with the local modules that it imports. A module that is not there has no part.
    """
    PathFinder.invalidate_caches()  # a file may be newer than the listing of its folder
    parts = {" and ".join(f"{folder}/" for folder in HARNESS): harness()}
    path = Path(script)
    if path.is_file():
        parts[path.name] = python_program(path, sys.path)
    for name in models:
        parts[name] = model(name, [os.getcwd(), *sys.path])
    return {name: digest(files) for name, files in parts.items() if files}


def harness(root: Path = ROOT) -> Files:
    """The Python files that all scripts share."""
    files: Files = {}
    for folder in HARNESS:
        files |= package(root / folder, folder)
    return files


def python_program(path: Path, search: Sequence[str]) -> Files:
    """A script with the local modules that it imports, without the harness."""
    local = [folder for folder in search if not is_installed(folder)]
    files = modules(imports(path, path.name, "", local), local)
    harness_folders = tuple(f"{ROOT / folder}{os.sep}" for folder in HARNESS)
    kept = {n: file for n, file in files.items() if not str(file).startswith(harness_folders)}
    return {path.name: path} | kept


def model(name: str, search: Sequence[str]) -> Files:
    """A module that a flag names, or all of its package, with the local modules that they import.

    An installed module counts as well. search: like sys.path.
    """
    local = [folder for folder in search if not is_installed(folder)]
    files = files_of(name, search, whole=True) or hooked(name)
    own = name.partition(".")[0] if f"{name.partition('.')[0]}{INIT}" in files else ""
    imported: set[str] = set()
    for label, path in files.items():
        if not is_installed(str(path)):
            imported |= imports(path, label, own, local)
    return modules(imported, local) | files


def modules(names: Iterable[str], local: Sequence[str]) -> Files:
    """The files of local modules, and of the local modules that these import, recursively."""
    files: Files = {}
    waiting, seen = set(names), set[str]()
    while waiting:
        name = waiting.pop()
        seen.add(name)
        for label, path in files_of(name, local).items():
            if label not in files:
                files[label] = path
                waiting |= imports(path, label, "", local) - seen
    return files


def files_of(name: str, search: Sequence[str], whole: bool = False) -> Files:
    """The file of a module, and of each package that it is in; {} if it is not there.

    whole: all Python files of the outermost regular package instead. search: like sys.path.
    """
    files: Files = {}
    folders, walked = list(search), ""
    for part in name.split("."):
        spec = PathFinder.find_spec(part, folders) if part else None
        if spec is None:  # `from module import name` may name a function
            break
        walked = f"{walked}/{part}".lstrip("/")
        if spec.has_location:
            files |= files_at(spec, walked, whole)
            if whole:
                break
        folders = list(spec.submodule_search_locations or ())
    return files


def hooked(name: str) -> Files:
    """The package of a module that only an import hook finds, as of an editable installation."""
    top = name.partition(".")[0]
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return {}
    return files_at(spec, top, whole=True) if spec and spec.has_location else {}


def files_at(spec: ModuleSpec, label: str, whole: bool) -> Files:
    """The file of a module; of a package its __init__.py, or all of it."""
    path = Path(spec.origin or "")
    if spec.submodule_search_locations is None:
        return {f"{label}{path.suffix}": path}
    return package(path.parent, label) if whole else {f"{label}{INIT}": path}


def package(folder: Path, label: str) -> Files:
    """All Python files below a folder, but not those of hidden folders and environments."""
    files: Files = {}
    for place, inner, names in os.walk(folder):
        here = Path(place)
        inner[:] = [
            name
            for name in inner
            if not name.startswith((".", "__pycache__"))
            and not (here / name / "pyvenv.cfg").exists()
        ]
        for path in [here / name for name in names if name.endswith(".py")]:
            files[f"{label}/{path.relative_to(folder)}"] = path
    return files


def imports(path: Path, label: str, own: str, local: Sequence[str]) -> set[str]:
    """The modules that a file imports by name, if any of them may be local.

    own: the regular package of the file, all of which is hashed anyway.
    """
    try:
        content = path.read_bytes()
        if not may_import(content, own, local):  # parsing takes far longer than reading
            return set()
        tree = ast.parse(content)
    except (OSError, SyntaxError, ValueError, RecursionError):
        return set()
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = label.split("/")[: -node.level] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            names |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    return {name for name in names if not f"{name}.".startswith(f"{own or '?'}.")}


def may_import(content: bytes, own: str, local: Sequence[str]) -> bool:
    """Whether a file has the words of an import of a local module, other than of its package."""
    tops: set[str] = set()
    for of_from, of_import in IMPORT.findall(content):
        words = [of_from] if of_from else of_import.split(b",")
        tops |= {word.split()[0].decode().partition(".")[0] for word in words if word.split()}
    if "" in tops and not own:  # from . import x
        return True
    return any(PathFinder.find_spec(top, local) for top in tops - {own} if top.isidentifier())


def is_installed(path: str) -> bool:
    """Whether a path is in Python's standard library or among installed packages."""
    real = os.path.realpath(path or ".")
    paths = sysconfig.get_paths()
    library = tuple(f"{os.path.realpath(paths[name])}{os.sep}" for name in ("stdlib", "platstdlib"))
    return f"{real}{os.sep}".startswith(library) or bool(INSTALLED & set(Path(real).parts))


def digest(files: Mapping[str, Path]) -> str:
    """A hash of the names and the bytes of files. One that cannot be read counts as empty."""
    total = hashlib.sha256()
    for name in sorted(files):
        total.update(f"{name}\0{of_file(files[name])}\n".encode())
    return total.hexdigest()[:DIGITS]


def of_file(path: Path) -> str:
    """A hash of a file's bytes; "" if it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:DIGITS]
    except OSError:
        return ""
