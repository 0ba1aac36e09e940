"""analysis/foreign.py: JSON and tables, as PyTorch's DDP benchmark, nccl-tests and rccl-tests write
them."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from analysis.load import Row, Run, frame, load
from common.report import Estimate
from tests.pure.reports import ROOT, case, estimate, run, write

LOGS = ROOT / "tests" / "logs"  # four ranks on two hosts; as launchers, editors and mails left them
BASE = LOGS / "all_reduce_base.log"
SIZES = [1024, 2**20, 2**26]
LOG = """\
# nccl-tests version 2.17.6 nccl-headers=22807 nccl-library=22807
# Collective test starting: all_reduce_perf
#  Rank  0 Group  0 Pid   1887 on   worker-0 device  0 [0000:04:00] NVIDIA H100 80GB HBM3
#  Rank  1 Group  0 Pid   1888 on   worker-1 device  0 [0000:0b:00] NVIDIA H100 80GB HBM3
#                                                      out-of-place                in-place
#  size    count  type  redop  root   time   algbw   busbw #wrong   time   algbw   busbw #wrong
      0        0 float    sum    -1   5.70    0.00    0.00      0   5.54    0.00    0.00      0
   1024      256 float    sum    -1  12.50    0.08    0.08      0  12.00    0.09    0.09    N/A
1048576   262144 float    sum    -1  76.26   13.75   13.75      3  76.43   13.72   13.72      0
# Avg bus bandwidth    : 6.9
"""
RCCL = """\
rccl-tests: Version develop:5272cd1
RCCL version : 2.27.7-develop:29e1567
#                                        in-place
#  size   count     type  redop  root   time   algbw   busbw  #wrong     algo     proto   nchannels
1048576  262144 bfloat16    sum    -1  76.26   13.75   25.78       0   Direct    SIMPLE          32
"""


def read(folder: Path, text: str, name: str = "x.log") -> tuple[Run, list[Row]]:
    path = folder / name
    path.write_text(text)
    (found,) = load([str(path)])
    return found, list(found.rows.values())


def test_a_table_of_nccl_tests(tmp_path: Path) -> None:
    found, (small, large) = read(tmp_path, LOG)
    assert (found.benchmark, found.status) == ("nccl-tests", "complete")
    hosts, devices = ["worker-0", "worker-1"], ["NVIDIA H100 80GB HBM3"]
    versions = {"nccl": "22807", "nccl_tests": "2.17.6"}
    assert found.environment == versions | {"world_size": 2, "hosts": hosts, "devices": devices}
    key = {"collective": "all_reduce", "size_bytes": 1024, "dtype": "float", "redop": "sum"}
    assert small.key == key | {"root": "-1", "ranks": 2}
    assert small.measure == "out_of_place_time_s"
    assert small.time_s == pytest.approx(12.5e-6)
    assert small.metrics["in_place_busbw_gb_per_s"] == Estimate(0.09)
    assert small.check == "passed"
    assert large.check == "failed: 3 wrong values out of place"


def test_a_table_of_rccl_tests(tmp_path: Path) -> None:
    found, (row,) = read(tmp_path, RCCL, "alltoall_8.log")
    assert row.key["collective"] == "alltoall"  # from the file's name
    assert [*row.metrics] == [
        f"in_place_{n}" for n in ("time_s", "algbw_gb_per_s", "busbw_gb_per_s")
    ]
    assert found.status == "interrupted"  # the line of the end is missing
    versions = {"nccl": "2.27.7-develop:29e1567", "nccl_tests": "develop:5272cd1"}
    assert found.environment == versions


@pytest.mark.parametrize("path", sorted(LOGS.glob("all_reduce_[!bw]*.log")), ids=lambda p: p.stem)
def test_a_log_as_a_launcher_has_left_it(path: Path) -> None:
    (plain,), (found,) = load([str(BASE)]), load([str(path)])
    assert [row.key["size_bytes"] for row in found.rows.values()] == SIZES
    for row, as_plain in zip(found.rows.values(), plain.rows.values(), strict=True):
        assert (row.key, row.metrics) == (as_plain.key, as_plain.metrics)
    assert (found.environment, found.status) == (plain.environment, "complete")


def test_wherever_nccl_cuts_a_row_no_wrong_time_is_read(tmp_path: Path) -> None:
    """The rows of the other sizes are read, and that of 1 MiB is right or missing."""
    text = BASE.read_text()
    (row,) = (line for line in text.splitlines() if " 1048576 " in line)
    for at in range(1, len(row)):
        cut = row[:at] + "nodeb:777:790 [1] NCCL WARN Call to ibv_modify_qp failed\n" + row[at:]
        _, rows = read(tmp_path, text.replace(row, cut), BASE.name)
        times = {row.key["size_bytes"]: row.time_s for row in rows}
        assert times.pop(1024) == pytest.approx(20.04e-6)
        assert times.pop(2**26) == pytest.approx(696.37e-6)
        assert times in ({}, {2**20: pytest.approx(30.74e-6)})


def test_rows_that_repeat_are_samples(tmp_path: Path) -> None:
    """-N 2: a case has the median, and fails if one of its rows does."""
    again = LOG.replace(" 12.50 ", " 16.50 ").replace("  3  76", "  0  76").splitlines()[6:]
    _, (small, large) = read(tmp_path, "\n".join([*LOG.splitlines()[:-1], *again]))
    assert [*small.times_s] == pytest.approx([12.5e-6, 16.5e-6])
    assert small.time_s == pytest.approx(14.5e-6)
    assert small.metrics["out_of_place_time_s"].value == pytest.approx(14.5e-6)
    assert large.check == "failed: 3 wrong values out of place"


def test_tables_that_repeat_are_runs(tmp_path: Path) -> None:
    """Two programs in turn, and again; then the first one was killed, and began anew."""
    gather = LOG.replace("all_reduce", "all_gather").replace("Rank  1", "Rank  3")
    killed = "\n".join(LOG.splitlines()[:-2]) + "\n"
    path = tmp_path / "soak.log"
    path.write_text(LOG + gather + LOG + gather + killed + LOG)
    runs = load([str(path)])
    kinds = [{(row.key["collective"], row.key["ranks"]) for row in r.rows.values()} for r in runs]
    both = {("all_reduce", 2), ("all_gather", 4)}
    assert kinds == [both, both, {("all_reduce", 2)}, {("all_reduce", 2)}]
    assert [run.status for run in runs] == ["complete", "complete", "interrupted", "complete"]
    assert runs[1].label == f"run 2 of {path}"


def test_programs_whose_names_have_a_suffix() -> None:
    """all_reduce_perf_mpi, named by a command above its table."""
    paths = [str(LOGS / f"slurm-{number}.out") for number in (4711, 4712)]
    done = run("compare.py", paths[0], "--test", paths[1])
    assert "# 3 undecided, 3 missing" in done.stdout, done.stderr


def test_jobs_that_have_written_at_once_are_refused() -> None:
    """Two programs of one rank each, line by line: nccl-tests was built without MPI."""
    done = run("compare.py", str(BASE), "--test", str(LOGS / "all_reduce_worlds.log"))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "Rank 0 stands on nodea and on nodeb: 2 jobs have written at once" in done.stderr


def test_a_log_meets_a_report_of_collectives(tmp_path: Path) -> None:
    """By the time that the table shows, whichever variant the report is about."""
    times = {"in_place_time_s": estimate(12e-6), "out_of_place_time_s": estimate(25e-6)}
    key = {"collective": "all_reduce", "size_bytes": 1024, "dtype": "float32", "redop": "sum"}
    key |= {"root": -1, "ranks": 2, "count": 256, "caches": "cold", "backend": "nccl"}
    line = case("1K", [12e-6], key=key, metrics=times)
    ours = write(tmp_path / "ours.jsonl", line, benchmark="collectives")
    theirs = tmp_path / "theirs.log"
    theirs.write_text(LOG)
    done = run("compare.py", str(theirs), "--test", ours)
    assert "2.00x slower" in done.stdout, done.stderr
    done = run("compare.py", ours, "--test", str(theirs), "--measure", "in_place_time_s")
    assert re.search(r"1K +12 us +12 us +1.00x", done.stdout), done.stdout


def test_json_of_rccl_tests(tmp_path: Path) -> None:
    """An object a line; later versions write a list, with MPI its ranks as well."""
    line = {"name": "AllReduce", "size": 1024, "type": "float", "redop": "sum", "inPlace": 0}
    line |= {"time": 19.2, "algBw": 1.0, "busBw": 1.5, "#wrong": "0", "gpus": 4}
    entries = [line, line | {"inPlace": 1, "time": 19.9}, line | {"size": 2048}]
    found, rows = read(tmp_path, "".join(json.dumps(line) + "\n" for line in entries), "a.json")
    assert (found.benchmark, found.environment) == ("nccl-tests", {"world_size": 4})
    assert [row.key["size_bytes"] for row in rows] == [1024, 2048]
    assert rows[0].key["collective"] == "all_reduce"
    assert rows[0].metrics["in_place_time_s"].value == pytest.approx(19.9e-6)
    mpi = {"ranks": 2, "gpusPerRank": 8, "nodes": 2, "numCycle": 0, "wrong": "2"}
    _, (row,) = read(tmp_path, json.dumps([line | mpi]), "b.json")
    assert (row.key["ranks"], row.check) == (16, "failed: 2 wrong values out of place")


def nccl_json() -> dict[str, Any]:
    """As src/util.cu of nccl-tests writes it: version 3 with -I 1 -K 1 -N 2."""
    # of each process the first device
    device = {"rank": 0, "hostname": "node1", "device": 0, "device_info": "NVIDIA H100"}
    body = {"time": 25.5, "alg_bw": 0.04, "bus_bw": 0.07, "nwrong": 0.0}
    each = {"skipped_iterations": 1, "p50_us": 25.0, "times_us": [99.0, 24.0, 26.0]}
    small = {"size": 1024, "count": 256, "type": "float", "redop": "sum", "root": "    -1"}
    small |= {"out_of_place": body, "in_place": body, "out_of_place_per_iter": each}
    slower = small | {"out_of_place_per_iter": each | {"times_us": [99.0, 34.0, 36.0]}}
    wrong = small | {"size": 2048, "in_place": body | {"nwrong": 3.0}}
    return {
        "version": 3,
        "start_time": "2026-01-01 10:00:00",
        "args": ["/usr/bin/all_reduce_perf_mpi", "-J", "out.json"],
        "env": ["NCCL_ALGO=Ring", "SECRET=hunter2"],
        "nccl_version": 22703,
        "config": {"nthreads": 1, "ngpus": 4, "devices": [device, device | {"rank": 4}]},
        "results": [small, slower, wrong],
        "end_time": "2026-01-01 10:00:09",
    }


def test_json_of_nccl_tests(tmp_path: Path) -> None:
    found, (small, large) = read(tmp_path, json.dumps(nccl_json()), "nccl.json")
    assert (small.name, small.key["collective"], small.key["root"]) == ("1K", "all_reduce", "-1")
    assert [*small.times_s] == pytest.approx([24e-6, 26e-6, 34e-6, 36e-6])
    assert small.time_s == pytest.approx(30e-6)
    assert small.metrics["in_place_busbw_gb_per_s"].value == 0.07
    assert large.check == "failed: 3 wrong values in place"
    assert (found.environment["nccl"], found.environment["world_size"]) == (22703, 8)
    assert found.environment["variables"] == {"NCCL_ALGO": "Ring"}  # and no secret


def ddp_json() -> dict[str, Any]:
    """As benchmarks/distributed/ddp/benchmark.py writes it: rank after rank."""
    results = [
        {"ranks": [0], "measurements": [0.1, 0.1]},
        {"ranks": [0], "measurements": [0.2, 0.2]},
        {"ranks": [0, 1], "measurements": [0.3, 0.5, 0.4, 0.1]},
    ]
    entry = {"model": "resnet50", "batch_size": 32, "result": results}
    about = {"pytorch_version": "1.4.0", "cuda_version": "10.1", "distributed_backend": "nccl"}
    return about | {"bucket_size": 25, "benchmark_results": [entry]}


def test_json_of_pytorchs_ddp_benchmark(tmp_path: Path) -> None:
    found, _ = read(tmp_path, json.dumps(ddp_json(), indent=1), "torch.json")
    table = frame([found])
    assert table["case"].tolist() == ["no ddp", "1 rank", "2 ranks"]
    assert table["time_s"].tolist() == [0.1, 0.2, pytest.approx(0.45)]  # 0.4, 0.5


@pytest.mark.parametrize(
    "document",
    [
        ddp_json() | {"benchmark_results": ["nonsense"]},
        nccl_json()
        | {"results": [nccl_json()["results"][0] | {"out_of_place_per_iter": {"x": 1}}]},
        {"inPlace": 0, "busBw": 1},
    ],
)
def test_damaged_reports_are_refused(tmp_path: Path, document: Any) -> None:
    with pytest.raises(ValueError, match=r"x\.json looks like a report of .*, but does not fit"):
        read(tmp_path, json.dumps(document), "x.json")


@pytest.mark.parametrize("text", ["nothing of the kind\n", "[]", '{"a": 1}\n{"b": 2}', "[" * 5000])
def test_what_is_no_report_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ValueError, match=r"x\.json is neither a report nor a log with a table"):
        read(tmp_path, text, "x.json")
