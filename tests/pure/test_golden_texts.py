"""The output of analysis/ for one small report, word for word: tests/golden/*.txt.

These are the tables of compare.py, the formats of export.py, and the words and table cells of
report.py's page (not its styles and figures). After an intended change, write the texts again and
check the difference:

    python tests/pure/test_golden_texts.py
"""

import html
import json
import re
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.pure.reports import run  # noqa: E402

FOLDER = ROOT / "tests" / "golden"
SMALL = "tests/golden/small.jsonl"  # ddp_sweep.py --models mobilenet_v3_small --max-seconds 1
COMMANDS = {
    "compare": f"compare.py {SMALL} --test LATER",
    "export_csv": f"export.py --to csv {SMALL}",
    "export_gha": f"export.py --to gha {SMALL} --metric step_s",
    "report": f"report.py {SMALL} -o PAGE",
}
BREAKS = r"<(figure|table|div|br)\b[^>]*>|</(p|tr|h1|h2|h3|li|caption|figcaption|summary|nav|pre)>"


def words_of(page: str) -> str:
    """One line for each paragraph, heading and row, with ` | ` between cells."""
    text = re.sub(r"<(style|script|svg|head)\b.*?</\1>", "", page, flags=re.DOTALL)
    text = re.sub(r"<(td|th|a)\b[^>]*>", " | ", re.sub(r"\s+", " ", text))
    text = html.unescape(re.sub(r"<[^>]*>", "", re.sub(BREAKS, "\n", text)))
    lines = [line.strip().removeprefix("| ") for line in text.splitlines()]
    return "\n".join(line for line in lines if line) + "\n"


def a_day_later(report: str) -> str:
    """The report of another run, whose steps took 10% longer."""
    lines = [json.loads(line) for line in report.replace("2026-11-25T", "2026-11-26T").splitlines()]
    for case in lines[1:-1]:
        rows = case["samples_s"]["step"]
        case["samples_s"]["step"] = [[round(1.1 * seconds, 9) for seconds in row] for row in rows]
    return "".join(json.dumps(line) + "\n" for line in lines)


def written(name: str) -> str:
    """The output of the command: stdout, or the words of the page."""
    with tempfile.TemporaryDirectory() as folder:
        later, page = Path(folder) / "later.jsonl", Path(folder) / "page.html"
        later.write_text(a_day_later(Path(SMALL).read_text()))
        command = COMMANDS[name].replace("LATER", str(later)).replace("PAGE", str(page))
        done = run(*command.split())
        assert done.returncode == 0, done.stderr
        if page.exists():
            return words_of(page.read_text())
        return done.stdout.replace(str(later), "later.jsonl")


@pytest.mark.parametrize("name", COMMANDS)
def test_the_text_is_unchanged(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert written(name) == (FOLDER / f"{name}.txt").read_text()


if __name__ == "__main__":
    for text in COMMANDS:
        (FOLDER / f"{text}.txt").write_text(written(text))
