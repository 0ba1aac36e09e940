"""analysis/report.py: escaping, tables and figures of its pages.

tests/test_report_page.py opens a page in a browser.
"""

import html
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure

from analysis.pages.figures import draw, outlines, without_zeros
from analysis.report import Section, sections_of
from analysis.runs.load import load
from tests.pure.reports import ROOT, case, estimate, run, write

BAD = "</title></svg><script>alert(1)</script><img src=x onerror=alert(1)>&\"'{{7*7}}$x^2$\x1b[31m"


def rows_of(section: Section, number: int = 0) -> list[list[str]]:
    """The rows of a table, including the header."""
    table = section.tables[number]
    return [list(table.header), *(list(row) for row in table.rows)]


def whiskers(figure: Figure) -> list[list[Any]]:
    """The two ends of each interval that is drawn, as coordinates."""
    containers = [c for c in figure.axes[0].containers if isinstance(c, ErrorbarContainer)]
    segments = [s for c in containers for s in c.lines[2][0].get_segments()]
    return [[tuple(point) for point in segment] for segment in segments if len(segment)]


def test_html_in_every_string_is_escaped(tmp_path: Path) -> None:
    key = {"model": BAD, BAD: BAD, "ranks": 2}
    numbers = {"step_s": estimate(0.1, 0.09, 0.12), BAD: BAD, "samples_per_s": 3.0, f"{BAD}_s": 1.0}
    failed = case("", key=key | {"ranks": 3}, table=BAD, check=f"failed: {BAD}", samples_s={})
    lines = [case(BAD, key=key, metrics=numbers), case(BAD, key=key | {"ranks": 4}, table=BAD)]
    inside = {"torch": BAD, BAD: BAD, "devices": [BAD], "variables": {BAD: BAD}, "hosts": [BAD]}
    inside |= {"differences": [BAD], "topologies": [f"{BAD}\n{BAD}"]}
    for number, name in enumerate(("ddp_sweep", "unknown", BAD)):
        about = {"environment": inside, "argv": [BAD, BAD], "status": BAD, "benchmark": name}
        write(tmp_path / f"<b>{number}.jsonl", *lines, failed, **about)
    done = run("report.py", str(tmp_path), "-o", str(tmp_path / "page.html"))
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "page.html").read_text()
    assert text.count("<svg") >= 3
    assert "{{7*7}}" in html.unescape(text)  # templates are not evaluated
    assert not re.findall(r"<(script|link|iframe|object|embed|form|img|b)\b", text, re.I)
    tags = " ".join(re.findall(r"<[a-z][^>]*>", text, re.I))
    assert not re.findall(r"\son\w+\s*=", tags, re.I)
    ids = re.findall(r'\sid="([^"]*)"', tags)
    assert len(set(ids)) == len(ids)
    # nothing is loaded: all addresses are within the page
    assert set(re.findall(r'(?:href|src)="(.)', tags)) == {"#"}
    for unwanted in ("\x1b", "#000000"):  # black is replaced by the color of the text
        assert unwanted not in text


def ddp(ranks: int, seconds: float, **more: Any) -> dict[str, Any]:
    key = {"model": "resnet18", "dtype": "fp32", "ranks": max(1, ranks), "ddp": ranks > 0}
    rate = 8 * max(1, ranks) / seconds
    numbers = {"samples_per_s": estimate(rate, rate * 0.98, rate * 1.01)} | more
    return case(f"{ranks} ranks" if ranks else "no ddp", [seconds] * 5, key=key, metrics=numbers)


IDEAL = "ideal: one rank (timed alternately) x ranks"


def dashes(figure: Figure) -> list[list[float]]:
    """The marks of ideal scaling at the points of each curve: ranks times samples/s of one rank
    alone. The ends of whiskers are shorter."""
    lines = [line for line in figure.axes[0].lines if line.get_markersize() > 10]
    return [[float(y) for y in np.asarray(line.get_ydata())] for line in lines]


def legend(figure: Figure) -> list[str]:
    _, labels = figure.axes[0].get_legend_handles_labels()
    return labels


def test_a_scaling_curve_begins_at_0_and_has_whiskers(tmp_path: Path) -> None:
    """One rank alone trains on 80 samples/s. `no ddp`, timed separately, is not drawn."""
    path = write(tmp_path / "a.jsonl", ddp(0, 0.05), ddp(1, 0.1), ddp(2, 0.2, efficiency=0.5))
    (figure,) = draw(load([path]))
    ends = [[y for _, y in pair] for pair in whiskers(figure)]
    assert ends == [pytest.approx([80 * 0.98, 80 * 1.01])] * 2
    (ax,) = figure.axes
    assert ax.get_ylim()[0] == 0
    assert ax.get_ylim()[1] > 160
    assert dashes(figure) == [pytest.approx([np.nan, 160], nan_ok=True)]
    assert legend(figure) == [IDEAL]


def test_strong_scaling_is_one_curve_and_interleaved_settings_are_several(tmp_path: Path) -> None:
    """The batch of a rank follows from the number of ranks. Each interleaved setting has its own
    curve, and all have the same marks: 80 / 0.5 = 100 / 0.625 = 160."""
    lines = [ddp(ranks, 0.1 * ranks, efficiency=0.4) for ranks in (2, 4)]
    for line in lines:
        line["key"] |= {"global_batch": 8, "batch_size": 8 // line["key"]["ranks"]}
    (figure,) = draw(load([write(tmp_path / "a.jsonl", *lines)]))
    assert dashes(figure) == [pytest.approx([200, 200])]
    assert legend(figure) == [IDEAL]
    others = {"25MB bf16 samples_per_s": estimate(100.0), "25MB bf16 efficiency": 0.625}
    line = ddp(2, 0.2, efficiency=0.5, **others)
    line["key"] |= {"settings": "25MB none, 25MB bf16"}
    (figure,) = draw(load([write(tmp_path / "b.jsonl", line)]))
    assert dashes(figure) == [pytest.approx([160])] * 2
    assert sorted(legend(figure)) == ["25MB bf16", "25MB none", IDEAL]


def test_bars_begin_at_0_have_whiskers_and_short_names(tmp_path: Path) -> None:
    """A figure for each model. Intervals are drawn even if they begin below 0."""
    numbers = {"compute_s": estimate(0.05), "exposed_dp_s": estimate(0.02, 0.01, 0.04)}
    numbers |= {"exposed_tp_s": estimate(-0.01, -0.02, 0.01)}
    lines = []
    for model in "ab":
        for mesh in ("dp2", "dp4"):
            key = {"model": model, "mesh": mesh}
            lines.append(case(mesh, key=key, table=f"model {model}", metrics=numbers))
    figures = draw(load([write(tmp_path / "a.jsonl", *lines, benchmark="parallel_sweep")]))
    assert [str(figure.get_label())[-1] for figure in figures] == ["a", "b"]
    (ax,) = figures[0].axes
    assert [label.get_text() for label in ax.get_yticklabels()] == ["dp2", "dp4"]
    ends = [[round(x) for x, _ in pair] for pair in whiskers(figures[0])]
    assert ends == [[10, 40]] * 2 + [[-20, 10]] * 2  # ms
    assert ax.get_xlim()[0] == 0
    assert "95% intervals" in ax.get_xlabel()


def test_an_unknown_script(tmp_path: Path) -> None:
    """Each table is shown. Rows are metrics if there are many more of them than cases."""
    many = {"heat_gib": 1.5, "queue_s": 0.25, "moved_bytes": 4096, "note": "warm"}
    lines = [
        case("x", [0.1, 0.3, 0.2] * 4, table="one", metrics={"alone_s": 0.1}),
        case("y", [0.5] * 12, table="one", metrics={"step_p90_s": 0.4}),
        case("dp8", key={"n": 1}, table="one", check="failed: no memory"),
        case("z", table="many", metrics=many | {"step_s": 0.5}),
    ]
    path = write(tmp_path / "a.jsonl", *lines, benchmark="from_mars")
    assert [figure.get_label() for figure in draw(load([path]))] == ["Time, resnet18"]
    _, (summary, section, _) = sections_of([path])
    # the interval of 12 samples of x is the third to the tenth of the sorted values; y already has
    # a metric of its step
    assert rows_of(section) == [
        ["case", "step (ms)", "alone (ms)", "step p90 (ms)"],
        ["x", "200 (100 to 300)", "100.0", "-"],
        ["y", "-", "-", "400.0"],
        ["dp8 (failed)", "-", "-", "-"],
    ]
    cells = dict(rows_of(section, 1))
    assert (cells["heat (GiB)"], cells["queue (ms)"]) == ("1.500", "250.0")
    assert (cells["moved bytes"], cells["note"], cells[""]) == ("4K", "warm", "z")
    assert rows_of(summary)[1][3] == "3 passed, 1 failed"
    assert rows_of(summary, 1)[1] == ["a", "dp8", "failed: no memory"]


def test_labels_of_axes_have_no_trailing_zeros() -> None:
    given = ["50.00 ms", "12.50 ms", "193.0 us", "1,500", "0", "0.0002000", "2.000e-05"]
    wanted = ["50 ms", "12.5 ms", "193 us", "1,500", "0", "0.0002", "2e-05"]
    assert [without_zeros(text) for text in given] == wanted


def test_units_avoid_exponents(tmp_path: Path) -> None:
    """Each cell has its own unit if values differ widely. The digits depend on the value."""
    lines = []
    for size, rate in ((8, 1.222e-5), (1 << 30, 5.5)):
        numbers: dict[str, Any] = {"mb_per_s": rate * 1000, "messages_per_s": 12345.6}
        numbers |= {"in_place_busbw_gb_per_s": estimate(rate, rate / 2, rate * 2)}
        numbers |= {"efficiency": estimate(0.5), "cost": 0.000633}
        numbers |= {"copy_bytes_per_s": 2.5e10, "tokens_per_s_per_rank": estimate(3.0, 2.0, 4.0)}
        lines.append(case(str(size), key={"size_bytes": size}, metrics=numbers))
    path = write(tmp_path / "a.jsonl", *lines, benchmark="collectives")
    assert [figure.get_label() for figure in draw(load([path]))] == ["busbw (GB/s)"]
    _, (_, section, _) = sections_of([path])
    rows = {head: cells for head, *cells in rows_of(section)}
    assert rows == {
        "": ["8", "1073741824"],
        "step (ms)": ["100 (no interval)"] * 2,
        "in place busbw": ["12.2 kB/s (6.1 to 24.4)", "5.5 GB/s (2.8 to 11.0)"],
        "efficiency (%)": ["50.0 (no interval)"] * 2,
        "cost (%)": ["0.06330"] * 2,
        "tokens/s per rank": ["3.00 (2.00 to 4.00)"] * 2,
        "MB/s": ["12.22 kB/s", "5.500 GB/s"],
        "messages/s": ["12,346"] * 2,
        "copy Gbytes/s": ["25.00"] * 2,
    }


def test_reports_of_different_machines(tmp_path: Path) -> None:
    """The environment is last and folded, with a row for each value."""
    reports = []
    for number, torch in enumerate(("2.14.0", "2.15.0", "2.15.0")):
        variables = {"TORCHELASTIC_MAX_RESTARTS": "0", "NCCL_ALGO": "Ring"}
        inside = {"torch": torch, "devices": [f"CPU {number // 2}"], "variables": variables}
        inside |= {"differences": ["node2 has fewer cores"]}
        path = tmp_path / f"r{number}.jsonl"
        reports.append(write(path, ddp(0, 0.1), argv=["x"], environment=inside))
    _, (summary, section, environment) = sections_of(reports)
    assert summary.warnings[0].startswith("The hardware of the ddp_sweep reports differs (devices)")
    assert summary.warnings[1] == "Nodes differ, r0: node2 has fewer cores"
    assert section.details == ["In all cases: model resnet18, dtype fp32, ranks 1, ddp: no."]
    assert [row[0] for row in rows_of(section)] == ["case", *(f"no ddp, r{n}" for n in range(3))]
    assert environment.folded
    assert environment.tables[0].title == "2 of 4 fields differ"
    assert rows_of(environment)[1:] == [
        ["command", "x", "all"],
        ["torch", "2.14.0", "r0"],
        ["torch", "2.15.0", "r1, r2"],
        ["devices", "CPU 0", "r0, r1"],
        ["devices", "CPU 1", "r2"],
        ["variables.NCCL_ALGO", "Ring", "all"],
    ]


TRACE = str(ROOT / "tests" / "recordings" / "profiler_2.14" / "rank0_trace.json.gz")


@pytest.mark.parametrize("name", ["page.html", "step.png", "step.svg", "step.pdf"])
def test_only_earlier_outputs_are_replaced(name: str, tmp_path: Path) -> None:
    """Or an empty file."""
    report, output = write(tmp_path / "a.html", ddp(0, 0.09)), tmp_path / name
    program = ("report.py", report) if name == "page.html" else ("trace.py", TRACE)
    words = (*program, "-o", str(output))
    for _ in range(2):
        assert run(*words).returncode == 0
    output.write_bytes(foreign := b"<p>my notes about torchrun-bench</p>")
    done = run(*words)
    why = f"{output} exists and is no output of torchrun-bench; give another path\n"
    assert (done.returncode, done.stderr) == (2, f"{program[0]}: error: {why}")
    assert output.read_bytes() == foreign
    output.write_text("")
    assert run(*words).returncode == 0
    before = Path(report).read_bytes()
    done = run("report.py", report, "-o", report)
    assert (done.returncode, "it would overwrite" in done.stderr) == (2, True)
    assert Path(report).read_bytes() == before


def write_links(
    path: Path, hosts: list[str], slow: list[dict[str, Any]], by: str = "rank", slowest: Any = ()
) -> str:
    """A report of p2p_matrix.py with each pair once. The link of a and b has a latency of 10 a + b
    us, and 1 GB/s there, 2 back and 3 in both directions; the slowest link has a tenth of that."""
    count = len(hosts)
    rows = []
    for a in range(count):
        for b in range(a + 1, count):
            share = 0.1 if (a, b) == slowest else 1
            rows.append([a, b, 10 * a + b, share, 2 * share, 3 * share])
    key = {"round": 1, "by": by, "members": count}
    metrics = {"links": rows, "links_spread": [0.1] * len(rows)}
    names = list(dict.fromkeys(hosts))
    ranks = [{"rank": rank, "host": host} for rank, host in enumerate(hosts)]
    about = {"benchmark": "p2p_matrix", "environment": {"hosts": names, "ranks": ranks}}
    write(path, case("round 1", key=key, metrics=metrics, samples_s={}), status=None, **about)
    with path.open("a") as file:
        file.write(json.dumps({"status": "complete", "slow": slow}) + "\n")
    return str(path)


def cells(figure: Figure) -> Any:
    values: Any = figure.axes[0].images[0].get_array()
    return values.filled(-1).tolist()


def frames_of(axes: Any) -> list[tuple[float, ...]]:
    """The outlines as x, y, width and height."""
    return [(*patch.get_xy(), patch.get_width(), patch.get_height()) for patch in axes.patches]


def test_a_heat_map_of_each_matrix(tmp_path: Path) -> None:
    """Rows send, -1 is no link. The latency of rank 1 and the bandwidth of 2 -> 0 are slow."""
    slow = [
        {"what": "latency within nodes", "members": [1]},
        {"what": "bandwidth between nodes", "link": [2, 0]},
        # ranks that do not exist: a damaged report
        {"what": "bandwidth between nodes", "link": [7, 9]},
    ]
    path = write_links(tmp_path / "p.jsonl", ["a", "a", "b", "b"], slow)
    latency, bandwidth, both = draw(load([path]))
    titles = [figure.get_label() for figure in (latency, bandwidth, both)]
    assert titles == ["latency (us)", "bandwidth (GB/s)", "both directions (GB/s)"]
    rows = [[-1, 1, 2, 3], [1, -1, 12, 13], [2, 12, -1, 23], [3, 13, 23, -1]]
    assert cells(latency) == [pytest.approx(row) for row in rows]
    assert cells(bandwidth) == [[-1, 1, 1, 1], [2, -1, 1, 1], [2, 2, -1, 1], [2, 2, 2, -1]]
    assert cells(both)[0] == [-1, 3, 3, 3]
    axes = latency.axes[0]
    labels = ["a 0", "a 1", "b 2", "b 3"]
    assert [text.get_text() for text in axes.get_yticklabels()] == labels
    assert [text.get_text() for text in axes.get_xticklabels()] == labels
    # the row and the column of rank 1
    assert frames_of(axes) == [(-0.5, 0.5, 4, 1), (0.5, -0.5, 1, 4)]
    assert frames_of(bandwidth.axes[0]) == [(-0.5, 1.5, 1, 1)]  # 2 sends to 0
    assert list(both.axes[0].patches) == []
    assert outlines((1, 2), 4, both=True) == [((1.5, 0.5), 1, 1), ((0.5, 1.5), 1, 1)]


def test_a_heat_map_of_many_ranks_is_by_host(tmp_path: Path) -> None:
    """With 66 ranks on 3 hosts, a cell is the worst link between two hosts."""
    hosts = [f"node{rank // 22}" for rank in range(66)]
    slow = [{"what": "bandwidth between nodes", "link": [1, 65]}]
    path = write_links(tmp_path / "p.jsonl", hosts, slow, slowest=(1, 65))
    _, bandwidth, _ = draw(load([path]))
    assert cells(bandwidth) == [[1, 1, 0.1], [2, 1, 1], [0.2, 2, 1]]
    axes = bandwidth.axes[0]
    assert [text.get_text() for text in axes.get_yticklabels()] == ["node0", "node1", "node2"]
    assert [frame[:2] for frame in frames_of(axes)] == [(1.5, -0.5)]
    figures = draw(load([write_links(tmp_path / "q.jsonl", hosts[:64], [])]))
    assert [len(cells(figure)) for figure in figures] == [64] * 3
    [text, *_] = figures[0].axes[0].get_yticklabels()
    assert text.get_text() == "node0 0"
    path = write_links(tmp_path / "r.jsonl", ["x", "y", "z"], [], by="node")
    labels = draw(load([path]))[0].axes[0].get_yticklabels()
    assert [text.get_text() for text in labels] == ["x", "y", "z"]
