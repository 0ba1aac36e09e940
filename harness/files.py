"""Kinds of files: opening a named pipe, or reading a device, may block for ever."""

import os
import stat
from pathlib import Path


def kind_of(path: str | Path) -> str:
    """Return what a path is instead of a regular file: `a folder`, `a pipe`, ...; "" if absent."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return ""
    if stat.S_ISREG(mode):
        return ""
    kinds = {stat.S_ISDIR: "a folder", stat.S_ISFIFO: "a pipe", stat.S_ISSOCK: "a socket"}
    return next((kind for test, kind in kinds.items() if test(mode)), "a device")


def check_regular(path: str | Path) -> None:
    """Raise ValueError if a path is neither a regular file nor absent."""
    if kind := kind_of(path):
        raise ValueError(f"{path}: expected a regular file, got {kind}")
