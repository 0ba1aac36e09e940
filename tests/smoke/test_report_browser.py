"""Pages of report.py in a real browser: light and dark, on a desktop and on a phone."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import CHROMIUM, Page, browser
from harness import load_script
from hostile import PAYLOADS, RESULTS, poisoned, report, write

pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium; apt-get install chromium runs this test"
)

VIEWS = [(1280, False), (1280, True), (360, False), (360, True)]
# how far anything but the inside of a scrolling box reaches beyond the window
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
FOREIGN = "document.querySelectorAll('script,img,iframe,object,embed,link,base,form').length"
PAPER = "getComputedStyle(document.body).backgroundColor"
# letters and lines of the plots, as they are painted
INK = "getComputedStyle(document.querySelector('svg.plot text')).fill"
SMALLEST = """Math.min(...[...document.querySelectorAll('svg.plot text')].map(
    text => parseFloat(getComputedStyle(text).fontSize)
    * Math.hypot(text.getScreenCTM().a, text.getScreenCTM().b)))"""


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("profile")) as page:
        yield page


def show(tab: Page, path: Path, width: int = 1280, dark: bool = False) -> None:
    tab.events.clear()
    tab.open(path.as_uri(), width, dark)


def made(out: Path, files: list[Path]) -> Path:
    script = load_script("report")
    assert script.main(script.parse_args([*map(str, files), "-o", str(out)])) == 0
    return out


def test_a_page_reads_everywhere(tab: Page, tmp_path: Path) -> None:
    stems = ("ddp_sweep_cpu_2ranks", "collectives_cpu_2ranks", "p2p_matrix_cpu_4ranks")
    files = [path for path in RESULTS if path.stem in stems]
    page = made(tmp_path / "a page.html", [*files, write(tmp_path / "2.json", report(files[1]))])
    papers = set()
    for width, dark in VIEWS:
        show(tab, page, width, dark)
        assert tab.complaints() == []
        addresses = [url for url in tab.requests() if not url.startswith("data:image/png;base64,")]
        assert addresses == [page.as_uri()]
        assert tab.evaluate(OVERFLOW) <= 0, width
        assert tab.evaluate("document.querySelectorAll('svg.plot').length") > 10
        assert tab.evaluate(SMALLEST) >= 7, width
        paper, ink = tab.evaluate(PAPER), tab.evaluate(INK)
        papers.add((dark, paper, ink))
        picture = tmp_path / "picture.png"
        tab.screenshot(picture, whole=False)
        assert picture.stat().st_size > 5000
    assert len(papers) == 2  # dark differs from light, and nothing else does
    light, dark_one = (next(p for p in papers if p[0] == dark) for dark in (False, True))
    assert brightness(light[1]) > 200 > 100 > brightness(light[2])
    assert brightness(dark_one[1]) < 60 < 180 < brightness(dark_one[2])


def brightness(colour: str) -> float:
    red, green, blue = map(int, re.findall(r"\d+", colour)[:3])
    return (red + green + blue) / 3


def test_hostile_reports_stay_text(tab: Page, tmp_path: Path) -> None:
    """With the policy that forbids scripts, and without: nothing depends on it."""
    files = [
        write(tmp_path / f"{i}.json", poisoned(report(path), payload, keys=i % 2 == 1))
        for i, (path, payload) in enumerate(zip(RESULTS, PAYLOADS, strict=False))
    ]
    page = made(tmp_path / "hostile.html", files)
    bare = tmp_path / "bare.html"
    bare.write_text(re.sub(r"<meta http-equiv=.*?>", "", page.read_text()))
    assert "Content-Security-Policy" not in bare.read_text()
    for path, width in ((page, 360), (bare, 1280)):
        show(tab, path, width)
        assert tab.evaluate("document.title").startswith("torchrun-bench: ")
        assert tab.evaluate(FOREIGN) == 0
        assert tab.evaluate("document.body.innerText").count("<script>document.title=") > 5
        assert "<svg onload=" in tab.evaluate("document.body.textContent")
        assert tab.complaints() == []
        assert len([url for url in tab.requests() if not url.startswith("data:")]) == 1
        assert tab.evaluate(OVERFLOW) <= 0


def test_the_checks_above_can_fail(tab: Page, tmp_path: Path) -> None:
    bad = tmp_path / "bad.html"
    bad.write_text(
        "<title>good</title><script>document.title = 'owned'; console.error('no')</script>"
        "<img src='none.png'><div style='width: 3000px'>wide</div>"
    )
    show(tab, bad, 360)
    assert tab.evaluate("document.title") == "owned"
    assert tab.evaluate(FOREIGN) == 2
    assert tab.evaluate(OVERFLOW) > 0
    assert "no" in "".join(tab.complaints())
    assert len(tab.requests()) == 2
