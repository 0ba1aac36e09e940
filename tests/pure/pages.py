"""Read the tables and paragraphs of a page of report.py from its HTML."""

import html
import re
from pathlib import Path

from tests.pure.reports import run


def page_of(folder: Path, *words: str) -> str:
    """The page that report.py writes for these arguments."""
    path = folder / "page.html"
    done = run("report.py", *words, "-o", str(path))
    assert done.returncode == 0, done.stderr
    return path.read_text()


def text_of(markup: str) -> str:
    return html.unescape(re.sub(r"<[^>]*>", "", markup)).strip()


def tables_of(page: str) -> dict[str, list[list[str]]]:
    """Title -> rows of cells, including the header. Of several tables with a title, the first."""
    found: dict[str, list[list[str]]] = {}
    for table in re.findall(r"<table\b.*?</table>", page, re.DOTALL):
        (title,) = re.findall(r"<caption>(.*?)</caption>", table, re.DOTALL)
        rows = re.findall(r"<tr\b.*?</tr>", table, re.DOTALL)
        cells = [re.findall(r"<(?:th|td)\b.*?</(?:th|td)>", row, re.DOTALL) for row in rows]
        found.setdefault(text_of(title), [[text_of(cell) for cell in row] for row in cells])
    return found


def lines_of(page: str, kind: str) -> list[str]:
    """The paragraphs of a class: answer, warning or detail; "" for those without one."""
    begin = f'<p class="{kind}">' if kind else "<p>"
    return [text_of(text) for text in re.findall(f"{begin}(.*?)</p>", page, re.DOTALL)]
