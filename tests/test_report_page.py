"""The page of report.py in headless chromium: at two widths, light and dark."""

import html
import json
import os
import re
import shutil
import subprocess
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.pure.reports import ROOT, case, estimate, run, start, write

SMALL = ROOT / "tests" / "golden" / "small.jsonl"
CHROMIUM = shutil.which("chromium")
# The page is in a frame of a given width, because a window of headless chromium is at least 500 px
# wide. Once the page is loaded, the measurements replace the document.
WRAPPER = """<!doctype html><meta charset="utf-8"><body>
<iframe width="WIDTH" height="HEIGHT" style="border: 0" srcdoc="PAGE"></iframe>
<script>
const frame = document.querySelector("iframe");
frame.onload = () => {
  const page = frame.contentDocument, window_ = frame.contentWindow;
  const bottom = (one) => one.getBoundingClientRect().bottom;
  document.body.textContent = JSON.stringify({
    width: window_.innerWidth,
    content: page.documentElement.scrollWidth,
    answers: [...page.querySelectorAll(".answer")].map(bottom),
    warnings: [...page.querySelectorAll(".warning")].map(bottom),
    figures: page.querySelectorAll("svg").length,
    verdicts: [...page.querySelectorAll("caption")].filter((one) => one.innerText == "Verdicts")
      .map((one) => one.closest("table").rows[1].cells[1].getBoundingClientRect().right),
    captions: [...page.querySelectorAll("caption div")].filter((one) => one.offsetParent)
      .map((one) => one.getBoundingClientRect().right),
    outside: [...page.querySelectorAll("svg text")].filter((one) => {
      const inner = one.getBoundingClientRect();
      const outer = one.closest("svg").getBoundingClientRect();
      return inner.left < outer.left - 2 || inner.right > outer.right + 2;
    }).map((one) => one.textContent),
    text: window_.getComputedStyle(page.body).color,
  });
};
</script>"""


def wide_report(path: Path) -> str:
    """A disturbed run with long names, twenty metrics and a case that failed."""
    numbers = {f"time_number_{n}_s": estimate(n / 3, n / 4, n) for n in range(1, 21)}
    lines = [case("x" * 300 + str(n), key={"n": n}, metrics=numbers) for n in range(12)]
    lines.append(case("y", check="failed: " + "z" * 300))
    write(path, *lines, status=None, benchmark="new")
    end = {"status": "complete", "answer": ["x is fast"], "others": [[1.1, 2]]}
    path.write_text(f"{path.read_text()}{json.dumps(end)}\n")
    return str(path)


def look(folder: Path, page: str, width: int, height: int, scheme: int) -> tuple[Any, list[str]]:
    """What the browser measures on the page, and the messages in its console."""
    parts = {"WIDTH": str(width), "HEIGHT": str(height), "PAGE": html.escape(page)}
    path = folder / "wrapper.html"
    path.write_text(re.sub("WIDTH|HEIGHT|PAGE", lambda match: parts[match[0]], WRAPPER))
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    command += ["--hide-scrollbars", "--enable-logging=stderr", "--window-size=1400,1100"]
    command += [f"--user-data-dir={folder / 'profile'}"]
    command += [f"--blink-settings=preferredColorScheme={scheme}", path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=True)
    (found,) = re.findall(r"<body>(\{.*\})</body>", done.stdout, re.S)
    return json.loads(html.unescape(found)), re.findall(r"CONSOLE.*", done.stderr)


def sides(folder: Path) -> list[str]:
    """Two sides of three runs; one case is missing and one has a long name."""
    names = {"base": ("no ddp", "1M/2G", "x" * 90), "test": ("no ddp", "x" * 90)}
    for side, cases in names.items():
        for i in range(3):
            lines = [case(name, [0.1 + 0.001 * i + 0.1 * (side == "test")] * 12) for name in cases]
            write(folder / side / f"{i}.jsonl", *lines, started_at=start(i))
    return [str(folder / "base"), "--test", str(folder / "test")]


SCHEMES = ((0, "rgb(255, 255, 255)"), (1, "rgb(0, 0, 0)"))  # dark and light: the colour of text


@pytest.mark.smoke
@pytest.mark.skipif(not CHROMIUM and "CI" not in os.environ, reason="no chromium; see .ci/packages")
@pytest.mark.parametrize("compared", [True, False])
def test_the_page_in_a_browser(compared: bool, tmp_path: Path) -> None:
    """Answers, verdicts and warnings are on the first screen, within its width. In the comparison
    no title or text is cut off."""
    path = tmp_path / "page.html"
    reports = sides(tmp_path) if compared else [str(SMALL), wide_report(tmp_path / "wide.jsonl")]
    done = run("report.py", *reports, "-o", str(path))
    assert done.returncode == 0, done.stderr
    for (width, height), (scheme, text) in product(((1300, 900), (420, 800)), SCHEMES):
        found, console = look(tmp_path, path.read_text(), width, height, scheme)
        assert console == []
        assert (found["width"], found["content"], found["text"]) == (width, width, text)
        assert (len(found["answers"]), len(found["verdicts"])) == (compared, compared)
        if compared:
            assert found["answers"][0] < height
            assert max(found["verdicts"] + found["captions"]) < width
            assert found["outside"] == []
        else:
            assert (len(found["warnings"]), found["figures"]) == (1, 3)
            assert found["warnings"][0] < height
