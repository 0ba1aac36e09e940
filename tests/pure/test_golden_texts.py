"""What analysis/ writes of reports in docs/results, word for word: tests/golden/*.txt.

Held here: the tables of compare.py, the formats of export.py, and the words of report.py's page
with its table cells, row by row (not its styles and figures). Whoever changes one of these on
purpose writes the texts anew, and reads in the diff what has changed for people who use it:

    python tests/pure/test_golden_texts.py
"""

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
A, B = "docs/results/tutorial/change/a", "docs/results/tutorial/change/b"
DDP, COLLECTIVES, MESHES, LINKS, LOADER = (
    f"docs/results/{name}.jsonl"
    for name in (
        "ddp_sweep_cpu_2ranks",
        "collectives_cpu_2ranks",
        "parallel_sweep_cpu_4ranks",
        "p2p_matrix_cpu_4ranks",
        "input_sweep_cpu_2ranks",
    )
)
BOTH_BUCKETS = ("--ignore-key", "bucket_size_mb,comm_hook,label")
COMMANDS: dict[str, tuple[str, ...]] = {
    "compare_folders": ("compare.py", A, "--test", B, *BOTH_BUCKETS),
    "compare_pairs": ("compare.py", A, "--test", B, *BOTH_BUCKETS, "--paired", "--margin", "40%"),
    "compare_markdown": ("compare.py", A, "--test", B, "--format", "markdown"),
    "compare_json": ("compare.py", A, "--test", B, "--format", "json"),
    "export_csv_ddp_sweep": ("export.py", "--to", "csv", DDP),
    "export_csv_p2p_matrix": ("export.py", "--to", "csv", LINKS),
    "export_csv_input_sweep": ("export.py", "--to", "csv", LOADER),
    "export_gha_ddp_sweep": ("export.py", "--to", "gha", DDP, "--metric", "step_time_p50_s"),
    "export_gha_collectives": ("export.py", "--to", "gha", COLLECTIVES),
    "report_ddp_sweep": ("report.py", DDP),
    "report_collectives": ("report.py", COLLECTIVES),
    "report_parallel_sweep": ("report.py", MESHES),
    "report_two": ("report.py", f"{A}/01.jsonl", LINKS),
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


def written(name: str) -> str:
    """What the command writes today: stdout, or the words of the page."""
    script, *words = COMMANDS[name]
    if script != "report.py":
        done = run(script, *words)
        assert done.returncode == 0, done.stderr
        return done.stdout
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        done = run(script, *words, "-o", str(page))
        assert done.returncode == 0, done.stderr
        return words_of(page.read_text())


@pytest.mark.parametrize("name", COMMANDS)
def test_the_text_is_as_it_was(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert written(name) == (FOLDER / f"{name}.txt").read_text()


def test_no_text_is_left_over() -> None:
    assert {path.stem for path in FOLDER.glob("*.txt")} == set(COMMANDS)


if __name__ == "__main__":
    for text in COMMANDS:
        (FOLDER / f"{text}.txt").write_text(written(text))
