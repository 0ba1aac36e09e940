"""Benchmarks for PyTorch distributed, in one file. It needs torch, torchvision, numpy, tabulate and
psutil, and may be copied to any folder.

    torchrun --nproc-per-node 8 {archive} ddp_sweep --model resnet50
    python {archive} compare base.jsonl --test test.jsonl
    python {archive} NAME --help

Own models are found in the working directory. `python {archive} launch NAME` prints a launcher for
Slurm, ssh or mpirun.
"""

import ast
import importlib
import os
import shlex
import sys
import zipfile
from pathlib import Path

# launch/archive/build.py writes the archive; this is its main module
ARCHIVE = os.path.dirname(os.path.realpath(__file__))
sys.path[0] = ARCHIVE  # also valid in worker processes and after os.chdir

from harness import cli, exits

FOLDERS = ("analysis", "benchmarks")


def read_questions(names: list[str]) -> dict[str, str]:
    """Return the first line of the docstring of each script."""
    found = {}
    for path in [Path(name) for name in names if name.endswith(".py")]:
        if str(path.parent) in FOLDERS and "\ndef main(" in (text := exits.read_text(str(path))):
            found[path.stem] = str(ast.get_docstring(ast.parse(text))).splitlines()[0]
    return found


def print_overview(names: list[str]) -> None:
    """Print how to use the archive, and each script with its question."""
    (archive,) = exits.words_of("")
    lines = [str(__doc__).format(archive=shlex.quote(archive))]
    lines += [f"    {name:17} {question}" for name, question in read_questions(names).items()]
    show("\n".join(lines) + "\n")


def show(text: str) -> None:
    """Print a text, or as much of it as a reader such as `head` takes."""
    try:
        print(text, end="", flush=True)
    except BrokenPipeError:
        exits.abandon(sys.stdout)


def print_wrapper(names: list[str], chosen: list[str]) -> int:
    """Print a file of launch/, and on stderr which other files it needs."""
    launch = [name[7:] for name in names if name.startswith("launch/") and name[-1] != "/"]
    if len(chosen) != 1 or chosen[0] not in launch:
        exits.refuse(f"expected one of {', '.join(launch)}; got {shlex.join(chosen) or 'nothing'}")
    text = exits.read_text(f"launch/{chosen[0]}")
    if needed := [name for name in launch if f"/{name}" in text and name != chosen[0]]:
        extract = shlex.join(["python", "-m", "zipfile", "-e", *exits.words_of(""), "FOLDER"])
        requires = f"{chosen[0]} requires {', '.join(needed)} in its folder"
        exits.print_error(f"{requires}; to extract all files: {extract}")
    show(text)
    return 0


def main() -> int | None:
    """Start the script that the first argument names, as if its file had been started."""
    names = sorted(zipfile.ZipFile(ARCHIVE).namelist())
    word, rest = sys.argv[1] if len(sys.argv) > 1 else "--help", sys.argv[2:]
    name = word.removesuffix(".py").replace("-", "_")
    if word in ("-h", "--help"):
        if exits.is_rank_0():
            print_overview(names)
        return 0
    if name == "launch":
        return print_wrapper(names, rest)
    for folder in FOLDERS:
        if f"{folder}/{name}.py" in names:
            sys.argv = [f"{ARCHIVE}/{folder}/{name}.py", *rest]
            # Worker processes import the classes of a script by the name of its module, so runpy
            # cannot run it. They also run the main module, which would otherwise be this one.
            module = importlib.import_module(f"{folder}.{name}")
            sys.modules["__main__"] = module
            if hasattr(module, "main"):
                status: int | None = getattr(module, "record", lambda main: main)(module.main)()
                return status
    lists = f"`python {shlex.quote(sys.argv[0])}` lists the scripts"
    exits.refuse(f"no script {word!r}{cli.suggest(name, read_questions(names))}; {lists}")


if __name__ == "__main__":
    sys.exit(main())
