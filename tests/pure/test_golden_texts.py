"""What analysis/ writes of one small report, word for word: tests/golden/*.txt.

Held here: the tables of compare.py, the formats of export.py, and the words of report.py's page
with its table cells, row by row (not its styles and figures). Whoever changes one of these on
purpose writes the texts anew, and reads in the diff what has changed for people who use it:

    python tests/pure/test_golden_texts.py
"""

import json
import re
import sys
import tempfile
from html.parser import HTMLParser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.pure.reports import run  # noqa: E402

FOLDER = ROOT / "tests" / "golden"
SMALL = "tests/golden/small.jsonl"  # ddp_sweep.py --models mobilenet_v3_small --max-seconds 1
COMMANDS: dict[str, tuple[str, ...]] = {
    "compare": ("compare.py", SMALL, "--test", "{later}"),
    "export_csv": ("export.py", "--to", "csv", SMALL),
    "export_gha": ("export.py", "--to", "gha", SMALL, "--metric", "step_s"),
    "report": ("report.py", SMALL),
}
SILENT = {"style", "script", "svg", "head"}
ENDS_A_LINE = {"p", "tr", "h1", "h2", "h3", "li", "caption", "figcaption", "summary", "nav", "pre"}


class Words(HTMLParser):
    """The words of a page: a line for each paragraph, heading and row; ` | ` between cells."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.text = ""
        self.silent = 0
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.silent += tag in SILENT
        if tag in ("td", "th", "a"):
            self.text += " | "
        elif tag in ("figure", "table", "div", "br"):
            self.text += "\n"

    def handle_endtag(self, tag: str) -> None:
        self.silent -= tag in SILENT
        if tag in ENDS_A_LINE:
            self.text += "\n"

    def handle_data(self, data: str) -> None:
        if not self.silent:
            self.text += re.sub(r"\s+", " ", data)


def words_of(page: str) -> str:
    lines = [line.strip().removeprefix("| ") for line in Words(page).text.splitlines()]
    return "\n".join(line for line in lines if line) + "\n"


def a_day_later(report: str) -> str:
    """Another run, in which each step took 10 % more time."""
    lines = [json.loads(line) for line in report.replace("2026-11-25T", "2026-11-26T").splitlines()]
    for case in lines[1:-1]:
        rows = case["samples_s"]["step"]
        case["samples_s"]["step"] = [[round(1.1 * seconds, 9) for seconds in row] for row in rows]
    return "".join(json.dumps(line) + "\n" for line in lines)


def written(name: str) -> str:
    """What the command writes today: stdout, or the words of the page."""
    script, *words = COMMANDS[name]
    with tempfile.TemporaryDirectory() as folder:
        later = Path(folder) / "later.jsonl"
        later.write_text(a_day_later(Path(SMALL).read_text()))
        words = [word.format(later=later) for word in words]
        page = Path(folder) / "page.html"
        done = run(script, *words, *(["-o", str(page)] if script == "report.py" else []))
        assert done.returncode == 0, done.stderr
        if script == "report.py":
            return words_of(page.read_text())
        return done.stdout.replace(str(later), "later.jsonl")


@pytest.mark.parametrize("name", COMMANDS)
def test_the_text_is_as_it_was(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert written(name) == (FOLDER / f"{name}.txt").read_text()


def test_no_text_is_left_over() -> None:
    assert {path.stem for path in FOLDER.glob("*.txt")} == set(COMMANDS)


if __name__ == "__main__":
    for text in COMMANDS:
        (FOLDER / f"{text}.txt").write_text(written(text))
