"""analysis/report.py: a page that a browser can be trusted with, and Markdown."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from matplotlib.container import ErrorbarContainer

from analysis.figures import draw
from analysis.load import load as load_runs
from common.report import load
from tests.pure.reports import case, estimate, run, write

BAD = "</title></svg><script>alert(1)</script><img src=x onerror=alert(1)>&\"'{{7*7}}$x^2$\x1b[31m"
VOID = {"meta", "link", "br", "img", "hr", "input"}


class Page(HTMLParser):
    """Tags, attributes and text of a page; fails where tags are not closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        self.ids += [value or "" for name, value in attrs if name == "id"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def page(folder: Path, *reports: str) -> tuple[Page, str]:
    path = folder / "page.html"
    done = run("report.py", *reports, "-o", str(path))
    assert done.returncode == 0, done.stderr
    text = path.read_text()
    found = Page(text)
    assert len(set(found.ids)) == len(found.ids)
    names = {name for name, _ in found.attributes}
    assert not {name for name in names if name.startswith("on")}
    assert not {"script", "link", "iframe", "object", "embed", "form"} & set(found.tags)
    # nothing is fetched: no address but the names of XML's formats
    addresses = [v for n, v in found.attributes if n in ("href", "src", "xlink:href") and v]
    assert all(value.startswith(("#", "data:image/png")) for value in addresses)
    return found, text


def metrics(seconds: float, **more: Any) -> dict[str, Any]:
    return {"step_s": estimate(seconds, seconds * 0.99, seconds * 1.02)} | more


def ddp(ranks: int, seconds: float, **more: Any) -> dict[str, Any]:
    name = f"{ranks} ranks" if ranks else "no ddp"
    key = {"model": "resnet18", "dtype": "fp32", "ranks": max(1, ranks), "ddp": ranks > 0}
    rate = 8 * max(1, ranks) / seconds
    found = metrics(seconds, samples_per_s=estimate(rate, rate * 0.98, rate * 1.01), **more)
    return case(name, [seconds] * 5, key=key, metrics=found)


def test_figures_tables_and_environment(tmp_path: Path) -> None:
    parts = {"local_compute_s": estimate(0.09), "exposed_s": estimate(0.01, 0.005, 0.02)}
    cases = ddp(0, 0.09), ddp(1, 0.1, **parts), ddp(2, 0.11, efficiency=estimate(0.818), **parts)
    other = {"environment": {"torch": "2.14.0", "world_size": 2, "devices": ["another CPU"]}}
    a = write(tmp_path / "before.jsonl", *cases)
    b = write(tmp_path / "after.jsonl", *cases, **other)
    found, text = page(tmp_path, a, b)
    assert text.count("<svg") == 2  # scaling, and where a step's time goes
    assert "one rank without DDP, times ranks" in found.text
    assert "The hardware of the ddp_sweep reports differs" in found.text
    assert "step (ms)" in found.text
    assert "110 (109 to 112)" in found.text
    assert "efficiency (%)" in found.text
    assert "81.8" in found.text
    assert "stroke: currentColor" in text  # what matplotlib has drawn black, also in dark mode
    assert "#000000" not in text


def test_a_scaling_curve_begins_at_0_and_has_whiskers(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", ddp(0, 0.1), ddp(1, 0.1), ddp(2, 0.2))
    figure, *_ = draw(load_runs([path]))
    (ax,) = figure.axes
    (points,) = [each for each in ax.containers if isinstance(each, ErrorbarContainer)]
    ends = [[y for _, y in segment] for segment in points.lines[2][0].get_segments()]
    assert ends == [pytest.approx([80 * 0.98, 80 * 1.01])] * 2
    assert ax.get_ylim()[0] == 0
    assert ax.get_ylim()[1] > 160  # the dashed line: what 2 ranks would do


def test_a_script_that_nobody_knows(tmp_path: Path) -> None:
    numbers = metrics(0.002, heat_gib=1.5, queue_s=0.25, moved_bytes=4096, note="warm")
    key = {"mode": "fast", "size_bytes": 1 << 20}
    lines = [case("fast", key=key, metrics=numbers), case("slow", key=key | {"mode": "slow"})]
    found, text = page(tmp_path, write(tmp_path / "new.jsonl", *lines, benchmark="from_mars"))
    for words in ("heat (GiB)", "queue (ms)", "moved bytes", "4K", "warm", "fast", "slow"):
        assert words in found.text
    assert text.count("<svg") == 1  # the time of each case
    assert "In all cases: size 1M." in found.text


@pytest.mark.parametrize(
    ("benchmark", "keys", "numbers", "figures"),
    [
        ("collectives", {"collective": "all_reduce", "size_bytes": 8}, "busbw_gb_per_s", 1),
        ("rpc_latency", {"operation": "rpc_sync", "size_bytes": 8}, "round_trip_s", 1),
        ("rpc_latency", {"operation": "no size: bars of times"}, "round_trip_s", 1),
        ("compile_sweep", {"model": "m", "compiler": "eager"}, "step_s", 1),
        ("parallel_sweep", {"model": "m", "mesh": "dp2tp2"}, "exposed_dp_s", 1),
        ("checkpoint_sweep", {"mode": "dcp.save"}, "blocked_s", 1),
    ],
)
def test_each_benchmark_has_its_figure(
    tmp_path: Path, benchmark: str, keys: dict[str, Any], numbers: str, figures: int
) -> None:
    names = [f"{place}_{numbers}" for place in ("out_of_place", "in_place")]
    values = dict.fromkeys([numbers, *names, "compute_s", "exposed_tp_s", "stall_s"], 0.5)
    lines = [case(f"n {n}", key=keys | {"n": n}, metrics=values) for n in (1, 2)]
    found, text = page(tmp_path, write(tmp_path / "a.jsonl", *lines, benchmark=benchmark))
    assert text.count("<svg") == figures
    words = {"parallel_sweep": "exposed tp", "checkpoint_sweep": "stall"}.get(benchmark, "n 2")
    assert words in found.text


def test_links(tmp_path: Path) -> None:
    links = [[0, 1, 100.0, 2.0, 4.0, 5.0], [0, 2, 90.0, 2.0, 4.0, 5.0], [1, 2, 80.0, 2.0, 4.0, 5.0]]
    line = case("", key={"round": 1}, samples_s={}, rounds=[], metrics={"links": links})
    path = write(tmp_path / "p2p.jsonl", line, benchmark="p2p_matrix")
    found, _ = page(tmp_path, path)
    assert "latency (us)" in found.text
    assert "0 -> 1" in found.text


def test_html_in_every_string_is_text(tmp_path: Path) -> None:
    key = {"model": BAD, BAD: BAD, "ranks": 2}
    numbers = metrics(0.1, **{BAD: BAD, "samples_per_s": 3.0, f"{BAD}_s": 1.0})
    failed = case(
        "", key=key | {"ranks": 3}, table=BAD, check=f"failed: {BAD}", samples_s={}, rounds=[]
    )
    lines = [
        case(BAD, key=key, metrics=numbers),
        case(BAD, key=key | {"ranks": 4, "model": "m"}, table=BAD),
    ]
    inside = {"torch": BAD, BAD: BAD, "devices": [BAD], "variables": {BAD: BAD}}
    inside |= {"differences": [BAD], "topologies": [BAD + "\n" + BAD], "hosts": [BAD]}
    about = {"environment": inside, "argv": [BAD, BAD], "status": BAD}
    reports = [
        write(tmp_path / f"{name}.jsonl", *lines, failed, benchmark=name, **about)
        for name in ("ddp_sweep", "unknown")
    ]
    renamed = write(tmp_path / "<b>bold.jsonl", *lines, **(about | {"benchmark": BAD}))
    found, text = page(tmp_path, *reports, renamed)
    assert "<script" not in text
    assert "<b>" not in text
    assert "\x1b" not in text
    assert "{{7*7}}" in found.text  # and no template either
    done = run("report.py", *reports, renamed, "--markdown")
    assert done.returncode == 0
    assert not re.search(r"(?<!\\)<", done.stdout)
    assert "\x1b" not in done.stdout


def test_a_script_that_has_only_samples_shows_the_time_of_each_case(tmp_path: Path) -> None:
    samples = {"step": [[0.1, 0.3, 0.2] * 4], "alone": [[0.1] * 12]}
    line = case("x", samples_s=samples, rounds=[12], metrics={"alone_s": 0.1})
    path = write(tmp_path / "new.jsonl", line, case("y", [0.5] * 12, metrics={"step_p90_s": 0.4}))
    done = run("report.py", path, "--markdown")
    assert done.stdout.isascii()
    # 12 samples: the third to the tenth of the sorted ones, 0.1, 0.1, 0.1, 0.1, 0.2, ..., 0.3;
    # a metric of y is about its step already
    assert re.search(r"\| case +\| +step \(ms\) \| +alone \(ms\)", done.stdout)
    assert re.search(r"\| x +\| 200 \(100 to 300\) \| +100 ", done.stdout)
    assert re.search(r"\| y +\| +- \| +- \| +400 ", done.stdout)


def test_what_disturbed_a_run_stands_beside_its_answer(tmp_path: Path) -> None:
    for busy, words in ((0.04, "of a node meanwhile."), (0.4, "they disturbed it")):
        path = tmp_path / f"{busy}.jsonl"
        write(path, case("x"), status=None)
        end = {"status": "complete", "answer": ["2 ranks train"], "others": [[0.01, 2], [busy, 2]]}
        path.write_text(f"{path.read_text()}{json.dumps(end)}\n")
        done = run("report.py", str(path), "--markdown")
        title, _, answer, load_of_others, *_ = done.stdout.split("\n\n")
        assert title == "# ddp\\_sweep on vm with a CPU, 2026-01-01"
        assert answer == "2 ranks train"
        assert f"{busy} of 2 cores" in load_of_others
        assert words in load_of_others


def test_units_are_read_without_an_exponent(tmp_path: Path) -> None:
    """Each cell has a unit where a metric goes from 8 bytes to 1 GiB; digits follow the value."""
    lines = []
    for size, rate in ((8, 1.222e-5), (1 << 30, 5.5)):
        numbers = {"busbw_gb_per_s": estimate(rate, rate / 2, rate * 2), "mb_per_s": rate * 1000}
        numbers |= {"messages_per_s": 12345.6, "step_s": 0.5, "efficiency": estimate(0.5)}
        numbers |= {"copy_bytes_per_s": 2.5e10, "tokens_per_s_per_rank": estimate(3.0, 2.0, 4.0)}
        lines.append(case(str(size), key={"size_bytes": size}, metrics=numbers))
    done = run("report.py", write(tmp_path / "a.jsonl", *lines), "--markdown")
    for words in (
        *("| busbw ", " 12.2 kB/s (6.1 to 24.4) ", " 5.5 GB/s (2.8 to 11.0) ", "| MB/s "),
        *("| messages/s ", " 12,346 ", "| copy Gbytes/s ", " 25 ", "| tokens/s per rank "),
        *("| efficiency (%) ", " 50.0 (no interval) ", "| step (ms) ", " 500 "),
    ):
        assert words in done.stdout
    assert "1/s" not in done.stdout
    assert "e-0" not in done.stdout


def test_the_summary_comes_first_and_the_environment_last(tmp_path: Path) -> None:
    """A summary says what each script has answered; the environment is folded."""
    answers = {"collectives": ["all_reduce: 2 GB/s"], "ddp_sweep": ["2 ranks train", BAD]}
    variables = {"TORCHELASTIC_MAX_RESTARTS": "0", "NCCL_ALGO": "Ring"}
    inside = {"torch": "2.15.0", "world_size": 2, "variables": variables}
    inside |= {"differences": ["node2 has fewer cores"]}
    reports = []
    for name, sentences in answers.items():
        path = tmp_path / f"{name}.jsonl"
        write(path, case("x"), benchmark=name, environment=inside)
        lines = path.read_text().splitlines()
        lines[-1] = json.dumps({"status": "complete", "answer": sentences})
        path.write_text("\n".join(lines) + "\n")
        reports.append(str(path))
    older = write(tmp_path / "older.jsonl", case("x"), benchmark="older", environment=inside)
    found, text = page(tmp_path, *reports, older)
    words = ["all_reduce: 2 GB/s", "2 ranks train", "node2 has fewer cores", "In all cases"]
    words += ["Environment", "variables.NCCL_ALGO", "Ring"]
    places = [found.text.rindex(word) for word in words]
    assert places == sorted(places)
    assert "TORCHELASTIC" not in text
    assert re.search(r"<details id=\"s\d\"><summary>Environment</summary>", text)
    assert text.count("<details") == text.count("<details id=") == 1
    done = run("report.py", *reports, "--markdown")
    assert "collectives: all\\_reduce: 2 GB/s" in done.stdout


def test_the_environment_has_a_row_for_each_value(tmp_path: Path) -> None:
    reports = []
    for number, torch in enumerate(("2.14.0", "2.15.0", "2.15.0")):
        inside = {"environment": {"torch": torch, "world_size": 2}, "benchmark": f"b{number}"}
        reports.append(write(tmp_path / f"r{number}.jsonl", case("x"), argv=["x"], **inside))
    done = run("report.py", *reports, "--markdown")
    assert "1 of 3 fields differ" in done.stdout
    assert re.findall(r"^\| (torch|world.*?) *\| (\S+) *\| (.*?) *\|$", done.stdout, re.M) == [
        ("torch", "2.14.0", "r0"),
        ("torch", "2.15.0", "r1, r2"),
        (r"world\_size", "2", "all"),
    ]


def test_each_table_of_a_script_is_a_table_of_the_page(tmp_path: Path) -> None:
    """Where it has more metrics than cases, a row is a metric. Bars have the short names."""
    parts = {f"exposed_{axis}_s": 0.01 for axis in ("dp", "tp", "cp")} | {"compute_s": 0.05}
    lines = []
    for table in ("model a", "model b"):
        for name in ("dp2", "dp4"):
            key = {"model": table, "mesh": name}
            lines.append(case(name, key=key, table=table, metrics=parts | {"step_s": 0.1}))
    lines.append(case("dp8", key={"n": 1}, table="model b", check="failed: no memory"))
    path = write(tmp_path / "a.jsonl", *lines, benchmark="parallel_sweep")
    done = run("report.py", path, "--markdown")
    tables = done.stdout.split("### ")
    assert re.search(r"^model a\n\n\| +\| dp2 +\| dp4 +\|\n", tables[3])
    assert re.search(r"^model b\n\n\| case +\| exposed dp", tables[4])
    assert re.search(r"\| dp8 \(failed\) (\| +- ){5}\|", tables[4])
    assert "4 passed, 1 failed" in tables[1]
    figures = draw(load_runs([path]))
    shown = [[label.get_text() for label in f.axes[0].get_yticklabels()] for f in figures]
    assert shown == [["dp2", "dp4"], ["dp2", "dp4"]]


def test_exposed_time_has_its_interval(tmp_path: Path) -> None:
    """Drawn where it is, at the end of its part of the bar, also where it reaches below 0."""
    parts = {"compute_s": estimate(0.05), "exposed_dp_s": estimate(0.02, 0.01, 0.04)}
    parts |= {"exposed_tp_s": estimate(-0.01, -0.02, 0.01)}
    line = case("dp2tp2", key={"mesh": "dp2tp2"}, metrics=parts)
    plain = case("dp4", key={"mesh": "dp4"}, metrics={"compute_s": estimate(0.06)})
    runs = load_runs([write(tmp_path / "a.jsonl", line, plain, benchmark="parallel_sweep")])
    (figure,) = draw(runs)
    (ax,) = figure.axes
    ends = []
    for container in ax.containers:
        if isinstance(container, ErrorbarContainer):
            segments = container.lines[2][0].get_segments()
            ends += [[round(x) for x, _ in segment] for segment in segments if len(segment)]
    assert ends == [[60, 90], [50, 80]]  # ms: 50 + 10 to 50 + 40; 50 + 20 - 20 to 50 + 20 + 10
    assert "95 % intervals" in ax.get_xlabel()
    assert ax.get_xlim()[0] == 0


def test_refusals(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", ddp(0, 0.09))
    for words, message in (
        ([path], "expected a page to write, e.g. -o report.html"),
        ([path, "-o", path, "--markdown"], "expected a page to write, e.g. -o report.html"),
        ([path, "-o", str(tmp_path / "no/where.html")], "No such file"),
        ([str(tmp_path / "absent"), "--markdown"], "No such file"),
    ):
        done = run("report.py", *words)
        assert done.returncode == 2, words
        assert message in done.stderr
        assert done.stderr.count("\n") == 1
    named_html = tmp_path / "a.html"
    named_html.write_bytes(Path(path).read_bytes())
    done = run("report.py", str(named_html), "-o", str(named_html))
    assert (done.returncode, "it would overwrite" in done.stderr) == (2, True)
    assert load(str(named_html)).cases
