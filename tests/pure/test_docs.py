"""README and docs: links resolve, commands parse, the tables are those of docs/results."""

import ast
import importlib
import re
import shlex
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from benchmarks import ddp_sweep
from common.report import load
from common.table import render
from tests.process import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
RESULTS = sorted((ROOT / "docs" / "results").glob("*.jsonl"))
STALE = pytest.mark.skip(reason="until `make results`")


def anchors(page: Path) -> set[str]:
    heads = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_resolve(page: Path) -> None:
    text = page.read_text()
    links = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r"^\[[^\]]+\]: (\S+)$", text, re.M)
    for link in links:
        if not link.startswith(("http://", "https://")):
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link


def commands() -> list[str]:
    """Each command of a script in README, docs and the scripts' own help, on one line."""
    found = []
    for page in [*PAGES, *(ROOT / "benchmarks").glob("*.py")]:
        text = re.sub(r"\\+\n\s*", " ", page.read_text())
        text = re.sub(r"```python.*?```", "", text, flags=re.DOTALL)  # test_contributing.py runs it
        for line in text.splitlines():
            if match := re.match(
                r"^    (?:[A-Z_]+=\S+ )*(torchrun --n.*|python benchmarks/.*)$", line
            ):
                found.append(match[1].split("  #")[0].split(" && ")[0].split(" | ")[0])
    return sorted(set(found))


@pytest.mark.parametrize("command", commands())
def test_commands_parse(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their flags are ones that the script takes; what needs a running job is not reached."""
    words = shlex.split(command)
    place = next((i for i, w in enumerate(words) if w.endswith(".py")), None)
    if place is None or "inject.py" in words[place] or words[place].startswith("examples/"):
        return
    assert (ROOT / words[place]).exists(), command
    script = importlib.import_module(f"benchmarks.{Path(words[place]).stem}")
    monkeypatch.setattr(sys, "argv", words[place:])
    script.parse_args()


@STALE
@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_results_are_complete(path: Path) -> None:
    report = load(str(path))
    assert report.status == "complete"
    assert report.cases


@STALE
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_shown_output_says_its_reports_command(page: Path) -> None:
    text = page.read_text()
    outputs = re.findall(r"^ +# torchrun-bench \w+.*\n +# (.*)$", text, re.MULTILINE)
    reports = [load(str(path)) for path in RESULTS if path.name in text]
    commands = [f"command: {shlex.join(report.argv)}" for report in reports]
    assert [line for line in outputs if line not in commands] == []


@STALE
def test_readme_shows_its_report() -> None:
    report = load(str(ROOT / "docs" / "results" / "ddp_sweep_cpu_2ranks.jsonl"))
    cases = [case for case in report.cases if case.key["model"] == "mobilenet_v3_small"]
    readme = (ROOT / "README.md").read_text()
    for row in render(ddp_sweep.BREAKDOWN, cases).splitlines()[-len(cases) :]:
        assert re.sub(r" +", " ", row.strip()) in re.sub(r" +", " ", readme)


def names_in(file: str) -> set[str]:
    """What a file defines: functions, classes and constants; methods as `Class.method`."""
    names = set()
    for node in ast.parse((ROOT / file).read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = [entry for entry in node.body if isinstance(entry, ast.FunctionDef)]
            names |= {f"{node.name}.{method.name}" for method in methods}
        if isinstance(node, ast.Assign):
            names |= {ast.unparse(target) for target in node.targets}
        if isinstance(node, ast.AnnAssign):
            names.add(ast.unparse(node.target))
    return names


def test_measuring_says_where_to_read() -> None:
    """Each line of the section names a function that is there."""
    page = (ROOT / "docs" / "measuring.md").read_text()
    _, _, section = page.partition("## How a number comes about: where to read")
    section, _, _ = section.partition("\n## ")
    references = re.findall(r"^\| `([\w/]+\.py): ([\w.]+)` \|", section, re.MULTILINE)
    assert len(references) == 20
    assert len({file for file, _ in references}) == 4
    for file, name in references:
        assert name in names_in(file), f"{file}: {name}"


REFERENCE = re.compile(r"`([\w/]+\.py): ([\w.]+)`")
NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)?(?:e-\d+)?(?!\w)")
SOURCES = re.split(r"^## .*: ", (ROOT / "docs" / "sources.md").read_text(), flags=re.M)[1:]


def source_of(file: str, name: str) -> ast.AST:
    """The definition of a function, class, method or constant, without its docstrings."""
    node: ast.AST = ast.parse((ROOT / file).read_text())
    for part in name.split("."):
        node = next(entry for entry in ast.iter_child_nodes(node) if part in defined_by(entry))
    for entry in ast.walk(node):
        if isinstance(entry, (ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(entry):
            entry.body = entry.body[1:] or [ast.Pass()]
    return node


def defined_by(node: ast.AST) -> list[str]:
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return [node.name]
    targets = getattr(node, "targets", [getattr(node, "target", None)])
    return [target.id for target in targets if isinstance(target, ast.Name)]


def missing_from_sources(first: str, here: str) -> list[str]:
    """What a row says, and the source of what it names does not have: words in code, numbers."""
    references = REFERENCE.findall(here)
    nodes = [source_of(file if "/" in file else f"benchmarks/{file}", n) for file, n in references]
    code = "\n".join(ast.unparse(node) for node in nodes)
    values = [part.value for node in nodes for part in ast.walk(node) if hasattr(part, "value")]
    said = REFERENCE.sub("", here)
    if here.strip().startswith("the same"):
        said += first
    flags = re.compile(r"`(--[^`]+)`")
    words = re.findall(r"`([^`]+)`", flags.sub("", said))
    numbers = NUMBER.findall(re.sub(r"`[^`]+`", "", said))
    assert words or numbers or flags.search(first + here), f"nothing to look for: {first}"
    missing = [word for word in words if word not in code]
    return missing + [number for number in numbers if float(number) not in values]


@pytest.mark.parametrize("section", SOURCES, ids=lambda section: section.split(".py")[0])
def test_features_of_a_source_are_as_the_page_says(
    section: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a row says is in the source of what it names, and the script takes the row's flags."""
    name = section.split(".py")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line[:2] == "| "][1:]
    assert len(rows) > 10
    with_code = [(first, here) for first, here in rows if REFERENCE.search(here)]
    assert len(with_code) > len(rows) / 2
    false = {first: missing_from_sources(first, here) for first, here in with_code}
    assert {first: missing for first, missing in false.items() if missing} == {}
    script = importlib.import_module(f"benchmarks.{name}")
    for variable in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(variable, "0")
    for first, here in rows:
        for flags in re.findall(r"`(--[a-z][^`]* [^`]+)`", here):
            script.parse_args(shlex.split(flags))
        told = here + first if here.startswith("the same") else here
        for flag in re.findall(r"`(--[a-z-]+)`", told):
            assert flag in help_of(script), flag
    for file, name_there in REFERENCE.findall(section):
        source_of(file if "/" in file else f"benchmarks/{file}", name_there)
    page = (ROOT / "docs" / f"{name}.md").read_text()
    assert "What differs from the original" in page


def help_of(script: Any) -> list[str]:
    """The flags that a script takes."""
    with pytest.raises(SystemExit), redirect_stdout(StringIO()) as shown:
        script.parse_args(["--help"])
    return re.findall(r"--[a-z-]+", shown.getvalue())


def test_a_false_row_is_found() -> None:
    first, build = "settings of cuDNN", "`parameter_server.py: build`"
    assert missing_from_sources(first, f"the same: {build}, `cudnn`") == ["cudnn"]
    layers = "dense stack 512-256-127"
    dense = "`ddp_rpc.py: create_dense`, `ddp_rpc.py: DENSE_INPUT`"
    assert missing_from_sources(layers, f"the same: {dense}") == ["127"]
    assert missing_from_sources(layers, f"another one: {dense}, `Linear`") == []
    with pytest.raises(AssertionError, match="nothing to look for"):
        missing_from_sources(first, f"the same: {build}")
