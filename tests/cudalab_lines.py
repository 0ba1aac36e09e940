"""Lines that only CUDA reaches and that no row of tests/test_cudalab.py has run (`make cudalab`).

    python tests/cudalab_lines.py FILE      FILE: the output of CUDALAB_COVER

Each of them needs a reason in tests/cudalab_unreached.txt: file, text of the line and reason,
separated by ` | `. The exit status is 1 if a reason is missing or refers to a line that is gone.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "cudalab" / "python")]

import cudalab_cover  # type: ignore[import-not-found]  # noqa: E402

REASONS = ROOT / "tests" / "cudalab_unreached.txt"
ABOUT_CUDA = re.compile(r"cuda|nccl|\bgpu|nvidia|pin_memory", re.IGNORECASE)


def headers(tree: ast.AST, enclosing: tuple[ast.stmt, ...] = ()) -> Iterator[tuple[ast.stmt, ...]]:
    """Each statement, preceded by the statements of its function that enclose it."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield (node,)
            yield from headers(node)
        elif isinstance(node, ast.stmt):
            yield (*enclosing, node)
            yield from headers(node, (*enclosing, node))
        else:
            yield from headers(node, enclosing)


def text_of(node: ast.stmt, lines: list[str]) -> str:
    """The text of a statement, without the body of a compound one."""
    body = getattr(node, "body", None)
    end = body[0].lineno - 1 if body else node.end_lineno
    return "\n".join(lines[node.lineno - 1 : max(end or 0, node.lineno)])


def about_cuda(path: Path) -> set[int]:
    """First lines of statements that mention CUDA or are in an `if` or `with` that does."""
    source = path.read_text()
    found = set()
    for chain in headers(ast.parse(source)):
        texts = (text_of(node, source.splitlines()) for node in chain)
        if ABOUT_CUDA.search("\n".join(texts)):
            found.add(chain[-1].lineno)
    return found


def main(file: str) -> int:
    folders = (ROOT / "benchmarks", ROOT / "common", ROOT / "harness", ROOT / "examples")
    sources = sorted(path for folder in folders for path in folder.rglob("*.py"))
    sources = [path for path in sources if path.name != "traffic.py"]  # it uses no device
    missed = cudalab_cover.unreached(Path(file), sources)
    known: dict[tuple[str, str], str] = {}
    for line in REASONS.read_text().splitlines():
        if line and not line.startswith("#"):
            name, text, reason = line.split(" | ")
            known[name, text] = reason
    unknown, used = [], set()
    for path in sources:
        lines = path.read_text().splitlines()
        name = path.relative_to(ROOT).as_posix()
        used |= {key for key in known if key[0] == name and key[1] in map(str.strip, lines)}
        for number in sorted(set(missed[path]) & about_cuda(path)):
            text = lines[number - 1].strip()
            if (name, text) in known:
                print(f"{name}:{number}: {text}\n    {known[name, text]}")
            else:
                unknown.append(f"{name}:{number}: {text}")
    gone = [" | ".join(key) for key in known if key not in used]
    for title, found in (("lines without a reason", unknown), ("reasons without a line", gone)):
        if found:
            print(f"{title} in {REASONS.name}:", *found, sep="\n    ")
    return int(bool(unknown or gone))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
