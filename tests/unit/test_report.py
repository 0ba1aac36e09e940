"""benchmarks/report.py: pages that hold what they should, and nothing else."""

import html
import itertools
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from harness import ROOT, load_script, run
from hostile import PAYLOADS, RESULTS, mutated, poisoned, report, write

from common import (
    plots,
    report_communication,
    report_content,
    report_figures,
    report_runs,
    report_training,
)
from common.figures import Bars, Curves, Heat, Line, Part, Spreads

pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")

VOID = {"meta", "br", "img", "link", "input", "hr"}
TEMPLATE = (ROOT / "common" / "templates" / "report.html.j2").read_text()


class Page(HTMLParser):
    """A page taken apart; it fails on tags that do not match."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.words: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    def values(self, name: str) -> list[str]:
        return [value for other, value in self.attributes if other == name]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("report")


def made(script: ModuleType, out: Path, files: Sequence[Path], *flags: str) -> str:
    args = script.parse_args([*map(str, files), "-o", str(out), *flags])
    assert script.main(args) == 0
    return out.read_text()


def check(text: str) -> Page:
    """What holds for every page."""
    page = Page(text)
    assert not {"script", "iframe", "object", "embed", "link", "base", "form"} & set(page.tags)
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert "default-src 'none'; style-src 'unsafe-inline'; img-src data:" in text
    for name in ("href", "xlink:href", "src"):
        for address in page.values(name):
            assert address.startswith(("#", "data:image/png;base64,")), address
    ids = page.values("id")
    assert len(ids) == len(set(ids))
    for address in page.values("href") + page.values("xlink:href"):
        assert address.startswith("data:") or address[1:] in ids
    for found in re.findall(r"url\((.*?)\)", text):
        assert found[1:] in ids
    levels = [int(tag[1]) for tag in page.tags if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(b - a <= 1 for a, b in itertools.pairwise(levels))
    assert text.count('role="img"') == page.tags.count("figure")
    assert text.count("aria-label=") >= page.tags.count("figure") + page.tags.count("table")
    assert page.values("class").count("plot") == page.tags.count("figure")
    return page


@pytest.fixture(scope="module")
def everything(script: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of all reports that the project has."""
    return made(script, tmp_path_factory.mktemp("page") / "r.html", RESULTS)


def test_every_benchmark_of_the_project(everything: str) -> None:
    text = everything
    page = check(text)
    words = " ".join(page.words)
    assert page.tags.count("figure") > 40
    for path in RESULTS:
        assert path.stem in words
        assert report(path)["benchmark"] in words
    for heading in (
        *("Scaling", "Where a step's time goes", "Distribution by rank", "Bus bandwidth", "Links"),
        *("Latency, round trip", "Latency, one way", "Resolution", "Against the original"),
        *("Throughput", "Step time by route", "Local compute by rank", "Time of an epoch"),
    ):
        assert f"<h3>{heading}</h3>" in html.unescape(text), heading
    assert "ideal: no ddp times ranks" in words
    assert re.search(r"slow link \d -&gt; \d: bandwidth \d\.\d+x", text)
    assert "What failed" in words
    assert len(text) < 2_000_000
    assert not re.search("#0101|#0102", text)  # every placeholder became a variable


def test_two_reports_overlay(script: ModuleType, tmp_path: Path) -> None:
    first = next(path for path in RESULTS if path.stem == "ddp_sweep_cpu_2ranks")
    document = report(first)
    document["status"] = "interrupted"
    document["environment"] |= {"devices": ["NVIDIA H200"], "torch": "9.9"}
    document["cases"][5]["check"] = "failed: replicas differ"
    second = write(tmp_path / "second.json", document)
    text = made(script, tmp_path / "r.html", [first, second], "--labels", "old one,new")
    words = " ".join(check(text).words)
    assert "The hardware of the ddp_sweep reports differs" in words
    assert text.count('<tr class="differs">') == 2
    assert "new is interrupted: cases may be missing." in words
    assert "replicas differ" in words
    legend = re.findall(r"<span>(.*?)</span>", text)
    assert {"old one", "new", "ideal: no ddp times ranks, new"} <= set(legend)
    assert text.count("<td>old one</td>") > 5
    same = write(tmp_path / "same.json", report(first))
    text = made(script, tmp_path / "r.html", [first, same])
    assert '<tr class="differs">' not in text
    assert "The hardware" not in text
    again = made(script, tmp_path / "r.html", [first, same])
    assert again == text  # it may be overwritten, and comes out alike


def test_limit(script: ModuleType, tmp_path: Path) -> None:
    path = next(path for path in RESULTS if path.stem == "collectives_cpu_2ranks")
    assert "limit 12.5 GB/s" in made(script, tmp_path / "r.html", [path], "--limit", "12.5")
    legend = re.findall(r"<span>(.*?)</span>", made(script, tmp_path / "r.html", [path]))
    assert legend
    assert not any("limit" in label for label in legend)
    document = report(path)
    for case in document["cases"]:
        metrics = case["metrics"]
        metrics["in_place_efficiency"] = metrics["in_place_busbw_gb_per_s"] / 25
    own = write(tmp_path / "own.json", document)
    assert "limit 25 GB/s" in html.unescape(made(script, tmp_path / "r.html", [own]))


def compiled(document: dict[str, Any], step: float) -> dict[str, Any]:
    """A report of compile_sweep with an eager and a compiled case."""
    key = {"model": "toy", "dtype": "fp32", "strategy": "ddp"}
    base = {"ranks": [0], "samples_s": [[0.1] * 6], "stop": {}, "check": "passed"}
    eager = {"step_time_p50_s": 0.1, "first_step_s": 0.2}
    fast = {"step_time_p50_s": step, "vs_eager": 0.1 / step, "vs_eager_bounds": None}
    fast |= {"compile_cost_s": 5.0, "graph_breaks": {"<b>print</b>": 2}}
    document |= {"benchmark": "compile_sweep"}
    document["cases"] = [
        base | {"key": key | {"compile_backend": "eager"}, "metrics": eager},
        base | {"key": key | {"compile_backend": "inductor"}, "metrics": fast},
    ]
    return document


def test_break_even(script: ModuleType, tmp_path: Path) -> None:
    path = write(tmp_path / "c.json", compiled(report(RESULTS[0]), 0.08))
    text = made(script, tmp_path / "r.html", [path])
    assert "inductor: paid back after 250 steps" in text  # 5 s / (100 - 80) ms
    assert "&lt;b&gt;print&lt;/b&gt;" in text
    check(text)
    write(path, compiled(report(RESULTS[0]), 0.12))
    text = made(script, tmp_path / "r.html", [path])
    assert "Compiling never pays here" in text
    assert "paid back" not in text.partition("What compiling brings")[0]


def test_scaling_by_hand(tmp_path: Path) -> None:
    document = report(next(path for path in RESULTS if path.stem == "ddp_sweep_cpu_2ranks"))
    for case, rate, p50 in zip(
        document["cases"], (100, 90, 150) * 2, (0.1, 0.1, 0.1) * 2, strict=True
    ):
        bounds = [0.08, 0.2]
        case["metrics"] |= {
            "samples_per_s": rate,
            "step_time_p50_s": p50,
            "step_time_ci95_s": bounds,
        }
    found = report_runs.load(str(write(tmp_path / "r.json", document)), "a")
    figure = report_training.scaling([found], report_figures.Options())[0].figures[0]
    assert isinstance(figure, Curves)
    ideal, line = figure.lines
    assert (list(ideal.x), list(ideal.y)) == ([1, 2], [100, 200])
    assert (list(line.x), list(line.y)) == ([1, 2], [90, 150])
    assert list(line.low) == pytest.approx([45, 75])
    assert list(line.high) == pytest.approx([112.5, 187.5])


def test_breakdown_by_hand(tmp_path: Path) -> None:
    document = report(next(path for path in RESULTS if path.stem == "ddp_sweep_cpu_2ranks"))
    parts = {"local_compute_p50_s": 0.2, "exposed_communication_s": -0.01}
    document["cases"][2]["metrics"] |= parts
    found = report_runs.load(str(write(tmp_path / "r.json", document)), "a")
    figure = report_training.scaling([found], report_figures.Options())[1].figures[0]
    assert isinstance(figure, Bars)
    assert figure.names[1] == "resnet18 1M/2G"
    assert [part.values[1] for part in figure.parts] == [200.0, 0.0]


def test_heat_by_hand(tmp_path: Path) -> None:
    document = report(next(path for path in RESULTS if path.stem == "p2p_matrix_cpu_4ranks"))
    document["cases"] = document["cases"][:1]
    document["cases"][0]["metrics"]["links"] = [[0, 2, 5.0, 1.0, 2.0, 3.0], [1, 1, 1, 1, 1, 1]]
    found = report_runs.load(str(write(tmp_path / "r.json", document)), "a")
    (section,) = report_communication.link_maps([found], report_figures.Options())
    latency, bandwidth, _ = section.figures
    assert isinstance(latency, Heat)
    assert isinstance(bandwidth, Heat)
    assert (latency.values[0][2], latency.values[2][0]) == (5.0, 5.0)
    assert (bandwidth.values[0][2], bandwidth.values[2][0]) == (1.0, 2.0)
    assert math.isnan(bandwidth.values[1][1])
    assert "worst: 0 to 2, 1 GB/s" in bandwidth.summary


def test_many_ranks_are_cut_to_the_fastest_and_the_slowest(tmp_path: Path) -> None:
    document = report(RESULTS[0])
    ranks = list(range(100))
    document["cases"] = document["cases"][:1]
    rows = [[1.0 + rank / 1000] * 10 for rank in ranks]
    document["cases"][0] |= {"ranks": ranks, "samples_s": rows}
    found = report_runs.load(str(write(tmp_path / "r.json", document)), "a")
    figure = report_figures.spreads([found])[0].figures[0]
    assert isinstance(figure, Spreads)
    names = [box.name for box in figure.boxes]
    assert len(names) == report_figures.MAX_BOXES
    assert names[0] == "0"
    assert names[-1] == "99"
    assert "100 ranks" in figure.note
    assert sum(len(box.points) for box in figure.boxes) <= 450


@pytest.mark.parametrize("keys", [False, True], ids=["values", "names too"])
def test_hostile_strings_are_text(
    script: ModuleType, tmp_path: Path, everything: str, keys: bool
) -> None:
    good = set(Page(everything).tags) | {"details", "summary", "pre"}
    for number, payload in enumerate(PAYLOADS):
        chosen = [RESULTS[number % len(RESULTS)]]  # each payload meets another benchmark
        folder = tmp_path / str(number)
        folder.mkdir()
        files = [
            write(folder / f"<b>{i}&.json", poisoned(report(path), payload, keys))
            for i, path in enumerate(chosen)
        ]
        title = "T" + payload.replace("\0", "").replace("\ud800", "")
        text = made(script, folder / "r.html", files, "--title", title)
        page = check(text)
        assert set(page.tags) <= good
        shown = report_runs.text(payload, 20)[:12].strip()
        assert shown in "".join(page.words)
        markdown = script.markdown_of(
            script.read(script.parse_args([*map(str, files), "--markdown"]))
        )
        assert not set(re.sub(r"&#\d+;", "", markdown)) & set('<>`*[]{}\\$!~@"\r')
        markdown.encode()
        for block in markdown.split("\n\n"):
            lines = [line for line in block.splitlines() if line.startswith("|")]
            assert len({line.count("|") for line in lines}) <= 1


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_odd_values_never_break_a_page(script: ModuleType, tmp_path: Path, path: Path) -> None:
    document = report(path)
    document["cases"] = document["cases"][:8]
    for seed in range(8):
        files = [write(tmp_path / f"{k}.json", mutated(document, 10 * seed + k)) for k in (0, 1)]
        runs = script.read(script.parse_args([*map(str, files), "--markdown"]))
        script.markdown_of(runs)
        report_content.sections_of(runs, report_figures.Options())
    check(made(script, tmp_path / "r.html", files))


def test_an_unknown_benchmark_gets_a_table(script: ModuleType, tmp_path: Path) -> None:
    document = report(RESULTS[0])
    document["benchmark"] = "of tomorrow"
    for n, case in enumerate(document["cases"]):
        case["key"] = {"n": n}
        case["metrics"] = {"new_s": 1.5, "bounds": [1, 2], "many": {"a": 1}}
        case["metrics"] |= {f"m{i}": i for i in range(40)}
    text = made(script, tmp_path / "r.html", [write(tmp_path / "r.json", document)])
    page = check(text)
    assert {"of tomorrow", "new_s", "1.500", "1 to 2"} <= set(page.words)
    assert "The first 24 of 42 metrics." in text
    assert "Distribution by rank" in text


def test_no_case_at_all(script: ModuleType, tmp_path: Path) -> None:
    document = report(RESULTS[0])
    document["cases"] = []
    text = made(script, tmp_path / "r.html", [write(tmp_path / "r.json", document)])
    assert "holds no case" in text
    check(text)


def test_a_huge_report(script: ModuleType, tmp_path: Path) -> None:
    """1,000 cases of 64 ranks with 100 samples."""
    document = report(next(path for path in RESULTS if path.stem == "ddp_sweep_cpu_2ranks"))
    case = document["cases"][2]
    ranks = list(range(64))
    case |= {"ranks": ranks, "samples_s": [[0.0123] * 100] * 64}
    case["other_samples_s"] = {}
    case["key"]["comm_hook"] = "NUMBER"
    case["label"] = "NUMBER"
    document["cases"] = []
    one = json.dumps(case)
    cases = ",".join(one.replace("NUMBER", f"hook {i}") for i in range(1000))
    path = tmp_path / "r.json"
    path.write_text(json.dumps(document).replace('"cases": []', f'"cases": [{cases}]'))
    text = made(script, tmp_path / "r.html", [path])
    assert len(text) < 2_000_000
    assert "The first 200 of 1,000 rows." in text
    assert "The first 8 of 1,000 curves are drawn." in text
    assert "6 of 1,000 cases" in text
    check(text)


def test_figures_have_a_limit(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "MAX_FIGURES", 3)
    chosen = [
        path for path in RESULTS if path.stem in ("ddp_sweep_cpu_2ranks", "ddp_rpc_cpu_4ranks")
    ]
    text = made(script, tmp_path / "r.html", chosen)
    assert text.count("<figure>") == 3
    assert "a page has at most 3" in text


def test_dollars_are_letters() -> None:
    figure = Bars("t", "s", "ms", ["$x^2$ \\alpha", "<g>"], [Part("p", 0, [1, 2])])
    svg = plots.draw(figure, 7).svg
    assert "$x^2$ \\alpha" in svg
    assert "&lt;g&gt;" in svg
    assert re.search(r'id="f7-\w', svg)


@pytest.mark.parametrize(
    ("x", "y"),
    [
        ([1], [1]),
        ([1, 2], [1e-30, 1e30]),
        ([1e-30, 1e30], [5, 5]),
        ([3, 3], [2, 2]),
        ([1, 2], [5, 5.0001]),
    ],
)
def test_curves_of_any_range(x: list[float], y: list[float]) -> None:
    for sizes in (False, True):
        line = Line("a", 0, x, y, y, [2 * v for v in y])
        svg = plots.draw(Curves("t", "s", "x", "y", [line], bytes_x=sizes), 1).svg
        assert "nan" not in svg
        assert len(svg) < 200_000


def test_colours_can_be_told_from_the_page() -> None:
    """Contrast as WCAG 2 has it: 4.5 for text, 3 for what is drawn; light and dark."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    def contrast(a: str, b: str) -> float:
        low, high = sorted((luminance(a), luminance(b)))
        return (high + 0.05) / (low + 0.05)

    assert contrast("#ffffff", "#777777") == pytest.approx(4.48, abs=0.01)  # a known value
    schemes = re.findall(r":root \{(.*?)\n? *\}", TEMPLATE, re.DOTALL)
    assert len(schemes) == 2
    for scheme in schemes:
        colours = dict(re.findall(r"--([\w-]+): (#\w{6});", scheme))
        for name in ("ink", "muted", "link", "good", "bad", "note"):
            assert contrast(colours[name], colours["paper"]) >= 4.5, name
        assert contrast(colours["ink"], colours["panel"]) >= 4.5
        assert contrast(colours["ink"], colours["bad-panel"]) >= 4.5
        assert contrast(colours["note"], colours["note-panel"]) >= 4.5
        for number in range(8):
            assert contrast(colours[f"s{number}"], colours["paper"]) >= 3, number


# -- the command -----------------------------------------------------------------------------------


def test_markdown_and_no_torch() -> None:
    """As a user starts it, from elsewhere; and neither torch nor matplotlib is imported."""
    command = [sys.executable, "-X", "importtime", str(ROOT / "benchmarks" / "report.py")]
    done = run([*command, *map(str, RESULTS), "--markdown"], cwd=Path("/"))
    assert done.returncode == 0, done.stderr[-500:]
    assert "| resnet18 | 1M/2G |" in done.stdout
    assert "### Where the time goes" in done.stdout
    assert "| ddp_sweep_cpu_2ranks | ddp_sweep | complete | 6 passed |" in done.stdout
    imported = {line.split("|")[-1].strip() for line in done.stderr.splitlines()}
    assert "numpy" in imported
    assert not imported & {"torch", "torchvision", "matplotlib", "jinja2"}


def refusal(script: ModuleType, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as ending:
        script.main(script.parse_args([*words]))
    assert ending.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    return captured.err


def test_refusals(script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, out = str(RESULTS[0]), str(tmp_path / "r.html")
    foreign = tmp_path / "mine.html"
    foreign.write_text("<!doctype html><p>precious")
    copy = tmp_path / "report.json"
    copy.write_bytes(RESULTS[0].read_bytes())
    for words, message in {
        (good,): "nothing to do; give a page to write, -o report.html, or --markdown",
        (): "REPORT",
        (good, "-o", ""): "-o needs a file",
        (good, "-o", str(tmp_path)): "-o needs a file",
        (good, "-o", str(tmp_path / "no" / "r.html")): "there is no directory",
        (good, "-o", "/dev/full"): "not a regular file",
        (good, "-o", str(tmp_path / ("x" * 300))): "cannot be written",
        (good, "-o", str(foreign)): "would overwrite",
        (str(copy), "-o", str(copy)): "would overwrite",
        (good, good, "-o", out): "are the same report; give it once",
        (good, str(tmp_path / "none.json"), "-o", out): "No such file",
        (good, "-o", out, "--limit", "5"): "--limit has no effect without a report of collectives",
        (good, "--markdown", "--limit", "5"): "--limit has no effect without a page",
        (good, "--markdown", "--title", "x"): "--title has no effect without a page",
        (good, "-o", out, "--labels", "a,b"): "--labels has 2 names for 1 reports",
        (good, "-o", out, "--lables", "a"): "did you mean --labels",
        (good, "-o", out, "--limit", "fast"): "--limit",
    }.items():
        assert message in refusal(script, capsys, *words), words
    assert foreign.read_text() == "<!doctype html><p>precious"
    assert copy.read_bytes() == RESULTS[0].read_bytes()
    assert not Path(out).exists()


@pytest.mark.parametrize("package", ["matplotlib", "jinja2"])
def test_without_a_package(
    script: ModuleType,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    package: str,
) -> None:
    find = script.importlib.util.find_spec
    monkeypatch.setattr(
        script.importlib.util, "find_spec", lambda name: None if name == package else find(name)
    )
    said = refusal(script, capsys, str(RESULTS[0]), "-o", str(tmp_path / "r.html"))
    assert f"pip install {package}" in said


def test_a_full_disk_keeps_the_last_page(script: ModuleType, tmp_path: Path) -> None:
    out = tmp_path / "r.html"
    before = made(script, out, RESULTS[:1])
    code = (
        "import resource, runpy, signal, sys\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4000, resource.RLIM_INFINITY))\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    start = f"import sys; sys.argv = sys.argv[1:]\n{code}"
    words = [str(ROOT / "benchmarks" / "report.py"), str(RESULTS[1]), "-o", str(out)]
    done = run([sys.executable, "-c", start, *words])
    assert done.returncode == 1
    assert "cannot write" in done.stderr
    assert "Traceback" not in done.stderr
    assert out.read_text() == before
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize("sink", ["> /dev/full", "| head -n 1"])
def test_a_reader_that_stops(sink: str) -> None:
    files = " ".join(map(str, RESULTS))
    command = f"{sys.executable} {ROOT}/benchmarks/report.py {files} --markdown {sink}"
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, timeout=60, env=dict(os.environ)
    )
    assert "Traceback" not in done.stderr
    assert ("No space left" in done.stderr) == (sink == "> /dev/full")
