"""README and docs: links resolve, commands parse, quoted outputs are those of docs/results, and the
features in docs/sources.md exist."""

import importlib
import re
import shlex
from pathlib import Path

import pytest

from benchmarks import ddp_sweep
from common.table import fitted
from harness.report import load
from tests.process import ROOT

PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "docs" / "results" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
SCRIPTS = sorted((ROOT / "benchmarks").glob("[a-z]*.py"))
RESULTS = sorted((ROOT / "docs" / "results").glob("*.jsonl"))
COMMAND = re.compile(
    r"^    (?:[A-Z_]+=\S+ )*(?:torchrun --n.*?|python) (benchmarks/\S+\.py.*)$", re.M
)
REFERENCE = re.compile(r"`([\w/]+\.py): (\w+)`")
SOURCES = re.split(r"^## .* → ", (ROOT / "docs" / "sources.md").read_text(), flags=re.M)[1:]


def anchors(page: Path) -> set[str]:
    heads = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_resolve(page: Path) -> None:
    """Names that a page refers to as `file.py: name` exist as well."""
    text = page.read_text()
    links = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r"^\[[^\]]+\]: (\S+)$", text, re.M)
    for link in links:
        if not link.startswith(("http://", "https://")):
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link
    for file, name in REFERENCE.findall(text):
        source = (ROOT / file).read_text()
        assert re.search(rf"^(class |def )?{name}\b", source, re.MULTILINE), (file, name)


@pytest.mark.parametrize("page", [*PAGES, *SCRIPTS], ids=lambda page: page.name)
def test_commands_parse(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script accepts the flags. Checks that need a running job are not reached."""
    text = re.sub(r"\\+\n\s*", " ", page.read_text())
    text = re.sub(r"```python.*?```", "", text, flags=re.DOTALL)  # test_contributing.py runs it
    for command in COMMAND.findall(text):
        words = shlex.split(re.split(r"  #| && | \| ", command)[0])
        script = importlib.import_module(f"benchmarks.{Path(words[0]).stem}")
        monkeypatch.setattr("sys.argv", words)
        script.parse_args()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_quotes_the_report_that_it_names(page: Path) -> None:
    """A quoted output has the command of the report, and the page has one of its answers."""
    text = page.read_text()
    named = [load(str(path)) for path in RESULTS if path.name in text]
    outputs = re.findall(r"^ +# torchrun-bench \w+.*\n +# command: (.*)$", text, re.MULTILINE)
    assert set(outputs) <= {shlex.join(report.argv) for report in named}
    words = " ".join(re.sub("^    # ", " ", text, flags=re.M).split())
    for report in named:
        assert report.status == "complete"
        assert [answer for answer in report.end["answer"] if answer in words], report.path


def test_readme_shows_its_report() -> None:
    """README shows the table as a terminal of 80 columns does."""
    report = load(str(ROOT / "docs" / "results" / "ddp_sweep_cpu_2ranks.jsonl"))
    cases = [case for case in report.cases if case.key["model"] == "mobilenet_v3_small"]
    readme = re.sub(r" +", " ", (ROOT / "README.md").read_text())
    table, _ = fitted(ddp_sweep.BREAKDOWN, cases, max_width=80)
    for row in table.splitlines()[-len(cases) :]:
        assert re.sub(r" +", " ", row.strip()) in readme


# -- docs/sources.md: the features of the five source programs -------------------------------------


@pytest.mark.parametrize("section", SOURCES, ids=lambda section: section.split(".py")[0])
def test_the_flags_of_a_source_program_are_accepted(
    section: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those in the right column, and those on the left that are "the same" here."""
    name = section.split(".py")[0]
    script = importlib.import_module(f"benchmarks.{name}")
    for variable in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(variable, "0")
    with pytest.raises(SystemExit):
        script.parse_args(["--help"])
    taken = re.findall(r"--[a-z-]+", capsys.readouterr().out)
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line[:2] == "| "][1:]
    assert len(rows) > 6
    for first, here in rows:
        for flags in re.findall(r"`(--[a-z][^`]* [^`]+)`", here):
            script.parse_args(shlex.split(flags))
        if not here.startswith("omitted"):
            told = here + first if here.startswith("the same") else here
            assert set(re.findall(r"`(--[a-z-]+)`", told)) <= set(taken), first
