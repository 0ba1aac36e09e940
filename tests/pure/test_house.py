"""The house: which way the arrows point, and what keeps files readable."""

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.process import ROOT

FOLDERS = ("benchmarks", "common", "analysis", "examples")
FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def imports_of(path: Path) -> set[str]:
    """The project's modules that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & {name_of(path) for path in FILES}


USES = {name_of(path): imports_of(path) for path in FILES}


@pytest.mark.parametrize("module", sorted(USES))
def test_arrows_point_one_way(module: str) -> None:
    folder = module.split(".")[0]
    allowed = {
        "benchmarks": ("common.",),
        "common": ("common.",),
        "analysis": (
            "analysis.",
            "common.report",
            "common.cli",
            "common.turns",
            "common.stats",
            "common.samples",
        ),
        "examples": (),
    }[folder]
    assert all(used.startswith(allowed) for used in USES[module])


WITH_TORCH = [path for path in FILES if path.parent.name != "analysis"]


@pytest.mark.parametrize("path", WITH_TORCH, ids=lambda path: path.stem)
def test_no_switch_by_the_number_of_torchs_version(path: Path) -> None:
    """Ask for the feature: torch 2.14 has the names of 2.15 and some of 2.11's behaviour."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant):
            number = re.fullmatch(r"[1-9]\.\d+(\.\d+)*", str(node.value))
            assert not (isinstance(node.value, str) and number), f"line {node.lineno}"
        elif isinstance(node, ast.Compare):
            words = ast.unparse(node)
            assert not re.search(r"__version__|\['torch'\]", words), f"line {node.lineno}: {words}"


def test_common_has_a_map_and_imports_follow_it() -> None:
    """Ground and core: each module is in common/__init__.py, below those that it imports."""
    lines = (ROOT / "common" / "__init__.py").read_text().splitlines()
    order = [f"common.{line.split()[0]}" for line in lines if line.startswith("    ")]
    modules = [m for m in USES if re.fullmatch(r"common\.[a-z]\w*", m)]
    assert sorted(order) == sorted(modules)
    for number, module in enumerate(order):
        assert USES[module] <= {*order[:number], "common"}, module


@pytest.mark.parametrize("module", sorted(USES))
def test_what_looks_on_can_be_deleted(module: str) -> None:
    """Nothing but common/observe/ itself imports it. Nor does the core import common/workloads/."""
    if re.fullmatch(r"common\.\w+", module):
        assert not [used for used in USES[module] if used.startswith("common.workloads")]
    if not module.startswith("common.observe."):
        assert not [used for used in USES[module] if used.startswith("common.observe")]


def test_no_cycles() -> None:
    def reach(module: str, seen: set[str]) -> set[str]:
        for used in USES[module] - seen:
            seen |= {used} | reach(used, seen | {used})
        return seen

    assert [module for module in USES if module in reach(module, set())] == []


def test_a_module_of_common_has_two_users() -> None:
    users = {module: [m for m, used in USES.items() if module in used] for module in USES}
    alone = [m for m in USES if m.startswith("common.") and len(users[m]) < 2]
    core = {
        "common.__init__",
        "common.workloads.__init__",
        "common.benchmark",
        "common.old",
        "common.join",
        "common.watchdog",
    }
    core |= {"common.remarks", "common.traces"}
    lookers_on = {module for module in alone if module.startswith("common.observe.")}
    assert set(alone) - core - lookers_on == set()


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_private_names_do_not_cross_files(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module in USES:
            assert not any(alias.name.startswith("_") for alias in node.names), path


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_file_says_what_it_is(path: Path) -> None:
    tree = ast.parse(path.read_text())
    if path.name != "__init__.py":
        assert ast.get_docstring(tree), path
    if path.parent.name in ("benchmarks", "examples"):
        assert "BSD-3-Clause" in (ast.get_docstring(tree) or ""), path
        assert "torchrun --n" in (ast.get_docstring(tree) or ""), path


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks").glob("*.py")), ids=name_of)
def test_a_script_has_its_page_its_test_and_its_row(path: Path) -> None:
    """docs/x.md, a file test_x.py or more, and a row in the table of README.md."""
    name = path.stem
    assert (ROOT / "docs" / f"{name}.md").exists()
    assert list((ROOT / "tests").rglob(f"test_{name}.py"))
    assert f"\n| [{name}.py](docs/{name}.md) | " in (ROOT / "README.md").read_text()


# -- a line says one thing: how much a function, and a line of it, may hold ------------------------

LONGEST_FUNCTION = 60  # lines
MOST_TOKENS = 10.2  # a line of code, on average over a folder
MOST_BRANCHES = 0.9  # a line, of functions of SHORT lines and more
SHORT = 8
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
# What is thicker than that, to be unfolded. Remove an entry when its function is done.
NOT_YET: tuple[str, ...] = ()


def branches(node: ast.AST) -> int:
    """How many ways there are through it: if, for, while, except, `and`, comprehensions."""
    count = 0
    for part in ast.walk(node):
        if isinstance(part, (ast.If, ast.For, ast.While, ast.ExceptHandler, ast.IfExp)):
            count += 1
        elif isinstance(part, ast.BoolOp):
            count += len(part.values) - 1
        elif isinstance(part, ast.comprehension):
            count += 1 + len(part.ifs)
    return count


def nests(node: ast.AST) -> bool:
    """Whether a comprehension in it holds another one."""
    outer = [part for part in ast.walk(node) if isinstance(part, COMPREHENSIONS)]
    inner = [part for node in outer for part in ast.walk(node) if part is not node]
    return any(isinstance(part, COMPREHENSIONS) for part in inner)


def thick_places(path: Path) -> Iterator[str]:
    """What breaks the rules in a file, as `file: function: what`."""
    place = path.relative_to(ROOT).as_posix()
    tree = ast.parse(path.read_text())
    scripts = path.parent.name in ("benchmarks", "examples")
    if scripts and nests(tree):
        yield f"{place}: a comprehension within a comprehension"
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef):
            continue
        length = (node.end_lineno or node.lineno) - node.lineno + 1
        if length > LONGEST_FUNCTION:
            yield f"{place}: {node.name}: too long"
        if length >= SHORT and branches(node) / length >= MOST_BRANCHES:
            yield f"{place}: {node.name}: too many branches a line"


def tokens_by_line(path: Path) -> Counter[int]:
    """How many names, operators, numbers and strings each line of code has, docstrings apart."""
    source = path.read_text()
    tree = ast.parse(source)
    hidden: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(
            node
        ):
            docstring = node.body[0]
            hidden |= set(range(docstring.lineno, (docstring.end_lineno or 0) + 1))
    kinds = (tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING)
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    lines = [token.start[0] for token in tokens if token.type in kinds]
    return Counter(line for line in lines if line not in hidden)


@pytest.mark.parametrize("folder", FOLDERS)
def test_lines_are_short_of_words(folder: str) -> None:
    """Unfold the densest functions where this fails: an idea gets a name."""
    counts = [tokens_by_line(path) for path in FILES if path.is_relative_to(ROOT / folder)]
    lines = sum(len(count) for count in counts)
    assert sum(count.total() for count in counts) / lines <= MOST_TOKENS


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_line_says_one_thing(path: Path) -> None:
    assert set(thick_places(path)) - set(NOT_YET) == set()


def test_what_counts_as_thick() -> None:
    """Two in a comprehension with a condition, one each in `or`, for, if and the last one."""
    tree = ast.parse("[x for x in y if x] or z\nfor a in b:\n    if a:\n        c = [a for a in b]")
    assert branches(tree) == 6
    assert not nests(tree)
    assert nests(ast.parse("[[a for a in b] for b in c]"))
    assert not nests(ast.parse("[a for b in c for a in b]"))
