"""analysis/load.py: reports of three programs as rows, and what is wrong with a file."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from analysis.load import frame, load
from tests.pure.reports import ROOT, case, estimate, write


def test_a_row_a_case(tmp_path: Path) -> None:
    samples = {"step": [[0.1, 0.3, 0.2], [0.2, 0.1, 0.1]]}
    two = case("2 ranks", samples_s=samples, ranks=[0, 1], rounds=[3])
    path = write(tmp_path / "a.jsonl", case("no ddp", [1, 3, 2]), two)
    table = frame(load([path]))
    assert table["case"].tolist() == ["no ddp", "2 ranks"]
    assert table["run"].tolist() == [path] * 2
    # of each iteration the slowest rank counts: 0.2, 0.3, 0.2
    assert table["time_s"].tolist() == [2, 0.2]
    assert table["n"].tolist() == [3, 3]
    assert table["model"].tolist() == ["resnet18"] * 2


def test_a_name_that_several_tables_have_stands_behind_its_table(tmp_path: Path) -> None:
    lines = [case("x"), case("x", key={"n": 1}, table="fp16"), case("y", table="fp16")]
    one = write(tmp_path / "a.jsonl", *lines)
    names = ["resnet18, batch size 8: x", "fp16: x", "y"]
    assert frame(load([one]))["case"].tolist() == names
    # tables of two runs are no reason: their buckets may differ
    two = write(tmp_path / "b.jsonl", case("y", key={"n": 2}, table="fp8"))
    assert frame(load([one, two]))["case"].tolist() == [*names, "y"]


def test_callers_that_go_their_own_way(tmp_path: Path) -> None:
    samples = {"step": [[1, 1, 1, 9], [2, 2, 2, 2]]}
    rows: dict[str, Any] = {"samples_s": samples, "ranks": [0, 1], "rounds": [4]}
    path = write(tmp_path / "a.jsonl", case("x", **rows), benchmark="rpc_latency")
    assert frame(load([path]))["time_s"].tolist() == [2]


@pytest.mark.parametrize(
    ("metrics", "measure", "seconds"),
    [
        ({"calls_per_s": 4.0, "stall_s": -1.0, "first_s": 9.0, "call_s": 2.0}, "first_s", 9.0),
        ({"first_s": estimate(9.0, 8.0, 10.0), "call_s": 2.0}, "first_s", 9.0),
        ({"calls_per_s": estimate(4.0), "note": "warm"}, "1 / calls_per_s", 0.25),
        ({"memory_gib": 4.0, "note": "warm"}, "", 0.0),
    ],
)
def test_a_case_without_samples_has_a_metric(
    tmp_path: Path, metrics: dict[str, float], measure: str, seconds: float
) -> None:
    path = write(tmp_path / "a.jsonl", case("x", samples_s={}, metrics=metrics, rounds=[]))
    (row,) = load([path])[0].rows.values()
    assert (row.measure, row.time_s) == (measure, seconds)


def test_measure_and_ignore_key(tmp_path: Path) -> None:
    samples = {"step": [[1.0]], "local compute": [[0.5]]}
    numbers = {"updates_per_s": 8}
    path = write(tmp_path / "a.jsonl", case("x", samples_s=samples, rounds=[1], metrics=numbers))
    (row,) = load([path], "local compute", ["model"])[0].rows.values()
    assert row.time_s == 0.5
    assert "model" not in row.key
    (row,) = load([path], "updates_per_s")[0].rows.values()
    assert (row.measure, row.time_s) == ("1 / updates_per_s", 0.125)
    with pytest.raises(ValueError, match="a rate above 0 named 'locl'"):
        load([path], "locl")
    two = write(tmp_path / "b.jsonl", case("x"), case("y"))
    with pytest.raises(ValueError, match="several cases differ in setting alone"):
        load([two], ignore=["setting"])


def test_a_measure_that_has_no_time_and_which_have(tmp_path: Path) -> None:
    """Neither a time below 0, nor a share, nor a time of a failed case."""
    good = case("x", metrics={"call_s": 0.5, "exposed_s": -0.25, "overlap": 0.5})
    bad = case("z", metrics={"broken_s": 1.0}, check="failed: out of memory")
    path = write(tmp_path / "a.jsonl", good, bad)
    for measure in ("exposed_s", "overlap", "cal_s"):
        words = f"a rate above 0 named '{measure}'; there are step, call_s"
        with pytest.raises(ValueError, match=f"{words}($|; did you)"):
            load([path], measure)


def test_intervals_are_columns_of_the_frame(tmp_path: Path) -> None:
    metrics = {"step_s": estimate(0.2, 0.1, 0.3), "rows": [1], "note": "warm"}
    path = write(tmp_path / "a.jsonl", case("x", metrics=metrics), case("y", metrics={"n": 3}))
    table = frame(load([path]))
    names = ["step_s", "step_s_low", "step_s_high", "note"]
    assert table.loc[0, names].tolist() == [0.2, 0.1, 0.3, "warm"]
    assert table.loc[1, names].isna().all()
    assert "rows" not in table


def test_links_are_cases_of_their_own(tmp_path: Path) -> None:
    links = {"links": [[0, 1, 100.0, estimate(2.0, 1.0, 3.0), 4.0, 5.0]]}
    key = {"round": 1, "by": "rank"}
    line = case("", key=key, samples_s={}, metrics=links, rounds=[])
    table = frame(load([write(tmp_path / "a.jsonl", line, benchmark="p2p_matrix")]))
    assert dict(zip(table["link"], table["time_s"], strict=True)) == pytest.approx(
        {"0 - 1 latency": 1e-4, "0 -> 1": 0.5, "1 -> 0": 0.25, "0 <-> 1": 0.2}
    )
    assert table["bandwidth_gb_per_s_high"].tolist()[1] == 3.0


def test_folders_and_patterns(tmp_path: Path) -> None:
    for name in ("b", "a"):
        write(tmp_path / f"{name}.jsonl", case("x"))
    (tmp_path / "notes.txt").write_text("no report")
    found = [Path(r.label).name for r in load([str(tmp_path)])]
    assert found == ["a.jsonl", "b.jsonl"]
    assert len(load([f"{tmp_path}/*.jsonl"])) == 2
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "a.jsonl")
    with pytest.raises(ValueError, match="is the same file as"):
        load([str(tmp_path)])


@pytest.mark.parametrize("make", [None, "torch"])
def test_a_pipe_is_read_once(tmp_path: Path, make: str | None) -> None:
    text = Path(write(tmp_path / "a.jsonl", case("x"), case("y"))).read_bytes()
    if make:
        text = json.dumps(torch_report(), indent=1).encode()
    read_end, write_end = os.pipe()
    os.write(write_end, text)
    os.close(write_end)
    (found,) = load([f"/dev/fd/{read_end}"])  # as the shell names <(zcat a.jsonl.gz)
    os.close(read_end)
    assert len(found.rows) == (3 if make else 2)


def torch_report() -> dict[str, Any]:
    """As benchmarks/distributed/ddp/benchmark.py writes it: rank after rank."""
    results = [
        {"ranks": [0], "measurements": [0.1, 0.1]},
        {"ranks": [0], "measurements": [0.2, 0.2]},
        {"ranks": [0, 1], "measurements": [0.3, 0.5, 0.4, 0.1]},
    ]
    entry = {"model": "resnet50", "batch_size": 32, "result": results}
    about = {"pytorch_version": "1.4.0", "cuda_version": "10.1", "distributed_backend": "nccl"}
    return about | {"bucket_size": 25, "benchmark_results": [entry]}


def test_pytorchs_report(tmp_path: Path) -> None:
    path = tmp_path / "torch.json"
    path.write_text(json.dumps(torch_report()))
    table = frame(load([str(path)]))
    assert table["case"].tolist() == ["no ddp", "1 rank", "2 ranks"]
    assert table["time_s"].tolist() == [0.1, 0.2, pytest.approx(0.45)]


def nccl_report() -> dict[str, Any]:
    """As src/util.cu of nccl-tests writes it."""
    # of each process the first device
    device = {"rank": 0, "hostname": "node1", "device": 0, "device_info": "NVIDIA H100"}
    body = {"time": 25.5, "alg_bw": 0.04, "bus_bw": 0.07, "nwrong": 0.0}
    sizes: list[dict[str, Any]] = [
        {"size": 1024, "count": 256, "type": "float", "redop": "sum", "root": "    -1"},
        {"size": 2048, "count": 512, "type": "float", "redop": "sum", "root": "    -1"},
    ]
    results = [size | {"out_of_place": body, "in_place": dict(body)} for size in sizes]
    results[1]["in_place"]["nwrong"] = 3.0
    return {
        "version": 2,
        "start_time": "2026-01-01 10:00:00",
        "args": ["./build/all_reduce_perf", "-J", "out.json"],
        "env": ["NCCL_ALGO=Ring", "SECRET=hunter2"],
        "nccl_version": 22703,
        "config": {"nthreads": 1, "ngpus": 4, "devices": [device, device | {"rank": 4}]},
        "results": results,
        "out_of_bounds": {"count": 0, "okay": "true"},
        "end_time": "2026-01-01 10:00:09",
    }


def test_nccl_tests_report(tmp_path: Path) -> None:
    path = tmp_path / "nccl.json"
    path.write_text(json.dumps(nccl_report()))
    (found,) = load([str(path)])
    table = frame([found])
    assert table["case"].tolist() == ["1K", "2K"]
    assert table["time_s"].tolist()[0] == pytest.approx(25.5e-6)
    assert table["in_place_busbw_gb_per_s"].tolist()[0] == 0.07
    assert table["check"].tolist() == ["passed", "failed: 3 wrong values in place"]
    assert found.environment["nccl"] == 22703
    assert found.environment["world_size"] == 8
    assert found.environment["variables"] == {"NCCL_ALGO": "Ring"}  # and no secret


def test_nccl_tests_report_with_each_iteration(tmp_path: Path) -> None:
    """Version 3 with -I 1 -K 1 -N 2, of a program whose name has a suffix: 2 x 2 samples."""
    document = nccl_report() | {"version": 3, "args": ["/usr/bin/all_reduce_perf_mpi"]}
    each = {"skipped_iterations": 1, "p50_us": 25.0, "times_us": [99.0, 24.0, 26.0]}
    result = document["results"][0] | {"out_of_place_per_iter": each, "in_place_per_iter": each}
    slower = result | {"out_of_place_per_iter": each | {"times_us": [99.0, 34.0, 36.0]}}
    document["results"] = [result, slower]
    path = tmp_path / "nccl.json"
    path.write_text(json.dumps(document))
    (row,) = load([str(path)])[0].rows.values()
    assert row.key["collective"] == "all_reduce"
    assert [*row.times_s] == pytest.approx([24e-6, 26e-6, 34e-6, 36e-6])
    assert row.measure == "out_of_place_time_s"
    assert row.time_s == pytest.approx(30e-6)
    document["results"] = [result | {"out_of_place_per_iter": {"times_us": ["nan"]}}]
    path.write_text(json.dumps(document))
    with pytest.raises(ValueError, match="but does not fit: KeyError 'skipped_iterations'"):
        load([str(path)])


@pytest.mark.parametrize(
    ("make", "path"),
    [
        (torch_report, ["benchmark_results", 0, "result", 0, "measurements"]),
        (torch_report, ["benchmark_results", 0]),
        (nccl_report, ["results", 0]),
        (nccl_report, ["config"]),
    ],
)
def test_damaged_reports_of_others(tmp_path: Path, make: Any, path: list[Any]) -> None:
    document = make()
    place = document
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = "nonsense"
    file = tmp_path / "x.json"
    file.write_text(json.dumps(document))
    with pytest.raises(ValueError, match=r"x\.json looks like a report of .*, but does not fit"):
        load([str(file)])


HEAD = {"schema": "torchrun-bench/3", "benchmark": "x", "argv": [], "environment": {}}
WHOLE = json.dumps(HEAD) + "\n" + json.dumps(case("x")) + "\n"
BAD: dict[str, tuple[str, str]] = {
    "empty": ("", "is empty"),
    "foreign": ("a,b\n1,2\n", "is neither a report nor a log"),
    "other JSON": ('{"a": 1}\n', "is neither a report nor a log"),
    "another": ('{"schema": "torchrun-bench/2"}\n', "its schema is torchrun-bench/2; this version"),
    "a part": ('{\n "schema": "torchrun-bench/1"\n}\n', "is no line of a report"),
    "two in one": (2 * WHOLE, ":3 is no line of a report: another report begins here; each needs"),
    "no environment": (json.dumps(HEAD)[:-19] + "}\n", "missing 1 required positional argument"),
    "no ranks": (
        WHOLE.replace('"ranks"', '"rank"'),
        "unexpected keyword argument 'rank'",
    ),
    "deep": ("[" * 5000, "is neither a report nor a log"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_one_line(tmp_path: Path, name: str) -> None:
    text, message = BAD[name]
    if text.startswith('{"key"'):
        text = json.dumps(HEAD) + "\n" + text + "\n"
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        load([str(path)])
    assert "bad.jsonl" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_truncated_line_is_left_out(tmp_path: Path) -> None:
    path = Path(write(tmp_path / "a.jsonl", case("x"), case("y"), status=None))
    path.write_text(path.read_text()[:-20])
    (found,) = load([str(path)])
    assert [row.name for row in found.rows.values()] == ["x"]
    assert found.status == "interrupted"


def test_what_is_no_file(tmp_path: Path) -> None:
    for word, message in (
        (str(tmp_path / "absent.jsonl"), "No such file"),
        (str(tmp_path), "no report"),
        (f"{tmp_path}/*.jsonl", "No such file"),
    ):
        with pytest.raises(ValueError, match=message):
            load([word])


def test_torch_is_never_imported() -> None:
    scripts = (
        "load",
        "foreign",
        "compare",
        "ab",
        "export",
        "report",
        "figures",
        "show",
        "verdicts",
    )
    code = "".join(f"import analysis.{name}\n" for name in scripts)
    code += "import sys\nassert 'torch' not in sys.modules\n"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=60)
