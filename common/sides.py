"""What is to be compared: commands with their variables, and the order in which they take turns."""

import os
import re
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

REPORT_FLAGS = ("--json", "-J", "--output-file", "--output_file")


@dataclass(frozen=True)
class Side:
    """One of the commands that take turns."""

    name: str
    command: tuple[str, ...]
    variables: dict[str, str]  # on top of this process's


def read_side(name: str, text: str, variables: Sequence[str]) -> Side:
    """A side as the command line gives it: `--a 'COMMAND' --a-env NAME=VALUE ...`.

    Raises ValueError for a command that cannot run, or that names a report of its own.
    """
    try:
        command = tuple(shlex.split(text))
    except ValueError as error:
        raise ValueError(f"--{name}: cannot split {text!r}: {error}") from None
    if not command:
        raise ValueError(f"--{name} needs a command, e.g. --{name} 'python train.py'")
    for word in command:
        if word.split("=")[0] in REPORT_FLAGS:
            raise ValueError(
                f"--{name}: the command has {word.split('=')[0]}; leave it out, every run gets a "
                "report of its own"
            )
    side = Side(name, command, read_variables(f"--{name}-env", variables))
    find_program(side)
    return side


def read_variables(flag: str, words: Sequence[str]) -> dict[str, str]:
    """NAME=VALUE words as a dict. Raises ValueError for anything else, and for a name twice."""
    variables: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise ValueError(f"{flag}: expected NAME=VALUE, got '{word}'; e.g. NCCL_ALGO=Ring")
        if name in variables:
            raise ValueError(f"{flag}: {name} is given twice")
        variables[name] = value
    return variables


def environment_of(side: Side) -> dict[str, str]:
    """The environment of a side's runs.

    VIRTUAL_ENV=DIR does what DIR's `activate` does: DIR/bin comes first in PATH.
    """
    environment = {**os.environ, **side.variables}
    if "VIRTUAL_ENV" in side.variables:
        if "PATH" not in side.variables:
            path = environment.get("PATH", os.defpath)
            environment["PATH"] = f"{side.variables['VIRTUAL_ENV']}/bin{os.pathsep}{path}"
        environment.pop("PYTHONHOME", None)
    return environment


def find_program(side: Side) -> str:
    """The path of the side's program. Raises ValueError where there is none."""
    venv = side.variables.get("VIRTUAL_ENV")
    if venv is not None and not os.path.exists(Path(venv) / "bin" / "python"):
        raise ValueError(
            f"--{side.name}-env VIRTUAL_ENV={venv}: there is no {venv}/bin/python; make it with "
            f"python3 -m venv {venv}"
        )
    program = side.command[0]
    found = shutil.which(program, path=environment_of(side).get("PATH", os.defpath))
    if found is None and os.path.isfile(program):
        raise ValueError(
            f"--{side.name}: {program} cannot be executed; a script needs its interpreter, "
            f"e.g. --{side.name} 'python {program}'"
        )
    if found is None:
        where = "" if "/" in program else " in PATH"
        raise ValueError(
            f"--{side.name}: there is no program '{program}'{where}; give its full path, or "
            f"--{side.name}-env VIRTUAL_ENV=DIR"
        )
    return found


def balanced_order(sides: Sequence[str], rounds: int, first: int = 0) -> list[list[str]]:
    """Each round has every side once, in an order that neither a drift nor a neighbour favours.

    Rows of a Williams square: over n rounds (2n if n is odd) each side is equally often in each
    place, and equally often right behind each other side (E. J. Williams 1949, "Experimental
    designs balanced for the estimation of residual effects of treatments", Australian Journal of
    Scientific Research A 2:149-168). Two sides take turns as A B, B A, A B, ...: ABBA.

    first: the number of the first round.
    """
    n = len(sides)
    zigzag = [0, *(k // 2 if k % 2 == 0 else n - k // 2 for k in range(2, n + 1))]
    # 0, 1, n-1, 2, n-2, ...: the steps between neighbours are all different
    square = [[sides[(step + row) % n] for step in zigzag] for row in range(n)]
    if n % 2:
        square += [row[::-1] for row in square]
    return [square[number % len(square)] for number in range(first, first + rounds)]
