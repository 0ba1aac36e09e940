"""Line coverage that survives every kind of exit, such as SIGKILL and os._exit.

CUDALAB_COVER=FILE:FOLDER[,FOLDER...] appends `path:line` to FILE when a line of a file below one of
the folders runs for the first time in a process. `unreached` reads FILE.
"""

import ast
import os
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

Trace = Callable[[FrameType, str, Any], Any]


def start(setting: str) -> None:
    """Trace this process, all its Python threads, and the processes that it forks."""
    file, _, names = setting.partition(":")
    folders = tuple(os.path.realpath(name) + os.sep for name in names.split(","))
    out = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    seen: set[tuple[CodeType, int]] = set()
    wanted: dict[str, bool] = {}

    def lines(frame: FrameType, event: str, _: Any) -> Any:
        place = frame.f_code, frame.f_lineno
        if event == "line" and place not in seen:
            seen.add(place)
            os.write(out, f"{os.path.realpath(place[0].co_filename)}:{place[1]}\n".encode())
        return lines

    def calls(frame: FrameType, event: str, _: Any) -> Any:
        name = frame.f_code.co_filename
        if name not in wanted:
            wanted[name] = os.path.realpath(name).startswith(folders)
        return lines if wanted[name] else None

    threading.settrace(calls)
    sys.settrace(calls)


def follow_rpc() -> None:
    """Trace the functions that RPC calls, too. Their threads are started in C++."""
    trace = sys.gettrace()
    if trace is None:
        return
    from torch.distributed.rpc import internal

    real = internal._run_function

    def run(*args: Any) -> Any:
        sys.settrace(trace)
        return real(*args)

    internal._run_function = run


def first_lines(tree: ast.Module) -> dict[int, ast.stmt]:
    """The statements by their first line, without docstrings and what has no line event."""
    found: dict[int, ast.stmt] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        if isinstance(node, ast.stmt) and not isinstance(node, (ast.Global, ast.Nonlocal)):
            found.setdefault(node.lineno, node)
    return found


def unreached(file: Path, sources: Iterable[Path]) -> dict[Path, list[int]]:
    """By source file: the first line of each statement that no process has run."""
    ran: dict[str, set[int]] = {}
    for line in set(file.read_text().split("\n")):
        name, _, number = line.rpartition(":")
        if number.isdigit():
            ran.setdefault(name, set()).add(int(number))
    missed = {}
    for path in sources:
        wanted = set(first_lines(ast.parse(path.read_text())))
        missed[path] = sorted(wanted - ran.get(str(path.resolve()), set()))
    return missed
