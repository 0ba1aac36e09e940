"""analysis/nccl_tests.py: tables, JSON lines and lists, as nccl-tests and rccl-tests write them."""

import json
from pathlib import Path
from typing import Any

import pytest

from analysis.load import Row, Run, load
from tests.pure.reports import ROOT, run

DEVICES = """\
# nccl-tests version 2.17.6 nccl-headers=22807 nccl-library=22807
# Collective test starting: {collective}_perf
# nThread 1 nGpus 1 minBytes 1024 maxBytes 1048576 step: 2(factor) warmup iters: 1 iters: 20
#
# Using devices
#  Rank  0 Group  0 Pid   1887 on   worker-0 device  0 [0000:04:00] NVIDIA H100 80GB HBM3
#  Rank  1 Group  0 Pid   1888 on   worker-1 device  0 [0000:0b:00] NVIDIA H100 80GB HBM3
#
"""
TABLE = """\
#                                                              out-of-place                in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
           0             0     float     sum      -1     5.70    0.00    0.00      0     5.54    0.00    0.00      0
           0             0     float     sum      -1     5.92    0.00    0.00      0     5.51    0.00    0.00      0
        1024           256     float     sum      -1    12.50    0.08    0.08      0    12.00    0.09    0.09    N/A
     1048576        262144     float     sum      -1    76.26   13.75   13.75      3    76.43   13.72   13.72      0
# Out of bounds values : 3 FAILED
# Avg bus bandwidth    : 6.9
"""  # noqa: E501
LOG = DEVICES.format(collective="all_reduce") + TABLE
RCCL = """\
rccl-tests: Version develop:5272cd1
#  Rank  0 Group  0 Pid 2517106 on    gpuf2b8 device  0 [0000:05:00] AMD Instinct MI300X
RCCL version : 2.27.7-develop:29e1567
HIP version  : 7.0.51831-a3e329ad8
#                                                    in-place
#       size         count      type   redop    root     time   algbw   busbw  #wrong     algo     proto   nchannels
     1048576        262144  bfloat16     sum      -1    76.26   13.75   25.78       0   Direct    SIMPLE          32
"""  # noqa: E501
OLD = """\
#                                            out-of-place                       in-place
#       size         count      type     time   algbw   busbw  error     time   algbw   busbw  error
    33554432       2097152     float    973.2   34.48   25.86  2e-07    969.7   34.60   25.95  0e+00
"""


def read(folder: Path, text: str, name: str = "x.log") -> tuple[Run, list[Row]]:
    path = folder / name
    path.write_text(text)
    (found,) = load([str(path)])
    return found, list(found.rows.values())


def test_a_table_of_nccl_tests(tmp_path: Path) -> None:
    found, (small, large) = read(tmp_path, LOG)
    assert (found.benchmark, found.status) == ("nccl-tests", "complete")
    assert found.environment == {
        **{"world_size": 2, "nccl": "22807", "nccl_tests": "2.17.6"},
        **{"hosts": ["worker-0", "worker-1"], "devices": ["NVIDIA H100 80GB HBM3"]},
    }
    key = {"collective": "all_reduce", "size_bytes": 1024, "dtype": "float", "redop": "sum"}
    assert small.key == key | {"root": "-1", "ranks": 2}
    assert small.measure == "out_of_place_time_s"
    assert small.time_s == pytest.approx(12.5e-6)
    assert small.metrics["in_place_busbw_gb_per_s"] == 0.09
    assert small.check == "passed"
    assert large.check == "failed: 3 wrong values out of place"


@pytest.mark.parametrize("label", ["[1,0]<stdout>:", "[1,12]<stdout>: ", "0: "])
def test_lines_that_a_launcher_has_labelled(tmp_path: Path, label: str) -> None:
    labelled = "".join(f"{label}{line}\n" for line in LOG.splitlines())
    _, plain_rows = read(tmp_path, LOG, "a.log")
    _, rows = read(tmp_path, labelled, "b.log")
    assert [row.metrics for row in rows] == [row.metrics for row in plain_rows]


def test_several_tables_in_a_log(tmp_path: Path) -> None:
    text = LOG + DEVICES.format(collective="reduce_scatter").replace("Rank  1", "Rank  3") + TABLE
    _, rows = read(tmp_path, text)
    names = [(row.key["collective"], row.key["ranks"]) for row in rows]
    assert names == [("all_reduce", 2)] * 2 + [("reduce_scatter", 4)] * 2


def test_tables_of_rccl_tests_and_of_old_versions(tmp_path: Path) -> None:
    found, (row,) = read(tmp_path, RCCL, "alltoall_8.log")
    assert row.key["collective"] == "alltoall"  # from the file's name
    assert list(row.metrics) == [
        f"in_place_{end}" for end in ("time_s", "algbw_gb_per_s", "busbw_gb_per_s")
    ]
    assert found.status == "interrupted"  # the line of the end is missing
    assert found.environment["rccl"] == "2.27.7-develop:29e1567"
    assert found.environment["rccl_tests"] == "develop:5272cd1"
    _, (row,) = read(tmp_path, OLD)
    assert (row.key["collective"], row.key["ranks"], row.check) == ("unknown", None, "passed")
    assert row.time_s == pytest.approx(973.2e-6)


def test_our_own_table_meets_theirs(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "collectives.md").read_text()
    table = page[page.index("    # all_reduce float32") : page.index("## How to read it")]
    found, rows = read(tmp_path, table.replace("\n    ", "\n").removeprefix("    "))
    assert found.status == "complete"
    assert [row.key["size_bytes"] for row in rows] == [8, 4096, 2097152]
    assert rows[0].key | {"size_bytes": 1024} == read(tmp_path, LOG)[1][0].key


def entry(size: int, place: int, time_us: float, **changes: Any) -> dict[str, Any]:
    line = {"name": "AllReduce", "size": size, "type": "float", "redop": "sum", "inPlace": place}
    return line | {"time": time_us, "algBw": 1.0, "busBw": 1.5, "#wrong": "0", "gpus": 4} | changes


def test_json_of_rccl_tests(tmp_path: Path) -> None:
    """An object a line; later versions write a list, with MPI its ranks as well."""
    entries = [entry(1024, 0, 19.2), entry(1024, 1, 19.9), entry(2048, 0, 20.0)]
    found, rows = read(tmp_path, "".join(json.dumps(line) + "\n" for line in entries), "a.json")
    assert (found.benchmark, found.environment) == ("nccl-tests", {"world_size": 4})
    assert [row.key["size_bytes"] for row in rows] == [1024, 2048]
    assert rows[0].key["collective"] == "all_reduce"
    assert rows[0].metrics["in_place_time_s"] == pytest.approx(19.9e-6)
    mpi = {"ranks": 2, "gpusPerRank": 8, "nodes": 2, "numCycle": 0, "wrong": "2"}
    _, rows = read(tmp_path, json.dumps([entry(1024, 0, 19.2, **mpi)]), "b.json")
    assert rows[0].key["ranks"] == 16
    assert rows[0].check == "failed: 2 wrong values out of place"
    _, rows = read(tmp_path, json.dumps(entries[0]), "c.json")
    assert len(rows) == 1


@pytest.mark.parametrize(
    "text", ["[]", "[1]", '{"a": 1}\n{"b": 2}\n', '{"inPlace": 0, "busBw": 1}\n', "# size\n1 2\n"]
)
def test_what_is_no_report_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ValueError, match=r"x\.json"):
        load([str(tmp_path / "x.json")])


def test_compare_report_and_export_read_logs(tmp_path: Path) -> None:
    """Three a side; what their lines say of versions and devices is compared as well."""
    sides = []
    for side, scale in (("a", 1.0), ("b", 2.0)):
        for i in range(3):
            text = LOG.replace(" 12.50 ", f" {scale * (12.5 + 0.01 * i):.2f} ")
            (tmp_path / f"{side}{i}.log").write_text(text.replace("22807", "22807" + side))
        sides.append(str(tmp_path / f"{side}*.log"))
    done = run("compare.py", sides[0], "--test", sides[1], "--fail-on", "slower")
    assert done.returncode == 1, done.stderr
    assert "# environment: nccl: 22807a in BASE, 22807b in TEST" in done.stdout
    assert "2.00x slower" in done.stdout
    done = run("report.py", sides[0], "--markdown")
    assert "out of place time" in done.stdout, done.stderr
    done = run("export.py", sides[0], "--to", "csv")
    assert "out_of_place_busbw_gb_per_s" in done.stdout, done.stderr
