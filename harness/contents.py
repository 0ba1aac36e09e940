"""Hashes of the source files behind a result: the local modules that this process has imported.

A commit, a path or a module name does not identify a program, because files may have been edited
since. What was imported does, however the import found it.
"""

import functools
import hashlib
import os
import sys
import sysconfig
from collections.abc import Collection, Mapping
from pathlib import Path

DIGITS = 12  # hexadecimal digits of a hash: 48 bits
# The environment has their versions. Torch 2.6 generates the source of the last one.
VERSIONED = ("torch", "torchvision", "_remote_module_non_scriptable")
INSTALLED = {"site-packages", "dist-packages"}  # folders of installed packages, including Spack's


def loaded(known: Collection[str] = ()) -> dict[str, str]:
    """Return the hash of the source of each local module in sys.modules, by name (the main script:
    of its file), but for the known names. VERSIONED modules, the standard library and installed
    packages are not local, unless they are editable installations."""
    found = {}
    for name, module in [*sys.modules.items()]:
        if name in known or name == "__mp_main__":  # the main script's other name
            continue
        package = name.partition(".")[0]
        # compiled kernels of torch.compile are in no imported package
        if package in VERSIONED or package not in sys.modules:
            continue
        places = [file_of(sys.modules.get(package)), path := file_of(module)]
        if path and not any(map(is_installed, filter(None, places))):
            label = os.path.basename(path) if name == "__main__" else name
            found[label] = source_hash(module, path)
    return dict(sorted(found.items()))


def differing(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return the modules whose source differs. One on one side only may be imported late."""
    return [name for name in now if before.get(name, now[name]) != now[name]]


def file_of(module: object) -> str:
    """Return the file of a module; "" for namespace packages and modules without a file."""
    attributes = getattr(module, "__dict__", {})  # getattr would make lazy modules import others
    return str(attributes.get("__file__") or "")


def source_hash(module: object, path: str) -> str:
    """Return a hash of a file, read by the module's loader (it may be an archive); "" on errors."""
    read = getattr(vars(module).get("__loader__"), "get_data", lambda path: Path(path).read_bytes())
    try:
        content = read(path)
    except OSError:
        return ""
    return hashlib.sha256(content).hexdigest()[:DIGITS]


@functools.cache
def is_installed(path: str) -> bool:
    """Return whether a path is in the standard library or in a folder of installed packages."""
    real = os.path.realpath(path or ".")
    paths = sysconfig.get_paths()
    library = tuple(f"{os.path.realpath(paths[name])}{os.sep}" for name in ("stdlib", "platstdlib"))
    return f"{real}{os.sep}".startswith(library) or bool(INSTALLED & set(Path(real).parts))
