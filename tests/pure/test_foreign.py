"""analysis/foreign.py: tables, JSON lines and lists, as nccl-tests and rccl-tests write them."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from analysis.load import Row, Run, load
from common.report import Estimate
from tests.pure.reports import ROOT, case, estimate, run, write

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
    assert small.metrics["in_place_busbw_gb_per_s"] == Estimate(0.09)
    assert small.check == "passed"
    assert large.check == "failed: 3 wrong values out of place"


LOGS = ROOT / "tests" / "logs"  # four ranks on two hosts; as launchers, editors and mails left them
SIZES = (1024, 2**20, 2**26)


def numbers_of(rows: list[Row]) -> list[Any]:
    return [(row.key, row.metrics, row.check) for row in rows]


@pytest.mark.parametrize("path", sorted(LOGS.glob("all_reduce_[!bw]*.log")), ids=lambda p: p.stem)
def test_a_log_as_a_launcher_has_left_it(path: Path) -> None:
    (plain,), (found,) = load([str(LOGS / "all_reduce_base.log")]), load([str(path)])
    assert [row.key["size_bytes"] for row in found.rows.values()] == [*SIZES]
    assert numbers_of([*found.rows.values()]) == numbers_of([*plain.rows.values()])
    assert (found.environment, found.status) == (plain.environment, "complete")


@pytest.mark.parametrize(
    "form",
    [
        *("0: {}", "  0: {}", "[0] {}", "[0]{}", "(0){}", "<0> {}"),  # srun, MPICH, hydra
        *("[1,0]<stdout>:{}", "[1,12]<stdout>: {}", "[prterun-host-1234@1,0]<stdout>:{}"),
        *("Wed Nov 25 17:01:19 2026<stdout>:{}", "2026-11-25 17:01:19 [1,0]<stdout>:{}"),
        *("node1: {}", "node[1-2]: {}", "worker-1  | {}", "(worker pid=1234, ip=10.0.0.1) {}"),
        *("[pod/x-launcher-abc12/mpi] {}", "[pod/x/mpi] 2026-11-25T17:01:19.123456789Z {}"),
        *("[default0]:{}", "[role3]:{}", "[node-1:0]:{}", "trainer/0 {}"),  # torchrun, torchx
        *("Nov 25 17:01:19 node1 srun[4711]: {}", "Nov 25 17:01:19 {}", "1766620000 {}"),
        *("2026-11-25 17:01:19,123 INFO worker: {}", "I1125 17:01:19.123456 12345 main.cc:33] {}"),
        *("\x1b[1;33m0:\x1b[0m {}\x1b[K", "\x1b[36m{}\x1b[m", "\t{}", ">> > {}", "| {} |", "{}\r"),
        *("'{}',", "`{}`", "\x1b(B\x1b[m{}", "\x1b]0;a title\x07{}"),
        '{"log":"{}\\n","stream":"stdout","time":"2026-11-25T17:01:19.1Z"}',  # of Docker
        *('        "{}",', "slurm-12.out:7:{}", "     7\t{}", "\ufeff{}", "[0] {}\n[1] {}"),
        "{}\nnodea:777:790 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM",
    ],
)
def test_what_launchers_and_people_put_around_a_line(tmp_path: Path, form: str) -> None:
    text = "".join(form.replace("{}", line) + "\n" for line in LOG.splitlines())
    plain, plain_rows = read(tmp_path, LOG, "a.log")
    found, rows = read(tmp_path, text, "b.log")
    assert numbers_of(rows) == numbers_of(plain_rows)
    assert (found.environment, found.status) == (plain.environment, "complete")


def test_wherever_nccl_cuts_a_row_no_wrong_time_is_read(tmp_path: Path) -> None:
    """The rows of the other sizes are read, and that of 1 MiB is right or missing."""
    path = LOGS / "all_reduce_base.log"
    lines = path.read_text().splitlines()
    (number,) = (i for i, line in enumerate(lines) if " 1048576 " in line)
    row = lines[number]
    for at in range(1, len(row)):
        nccl = "nodeb:777:790 [1] NCCL WARN Call to ibv_modify_qp failed\n"
        text = "\n".join([*lines[:number], row[:at] + nccl + row[at:], *lines[number + 1 :]])
        _, rows = read(tmp_path, text, path.name)
        times = {row.key["size_bytes"]: row.time_s for row in rows}
        assert times.pop(1024) == pytest.approx(20.04e-6)
        assert times.pop(2**26) == pytest.approx(696.37e-6)
        assert times in ({}, {2**20: pytest.approx(30.74e-6)})


def test_rows_that_repeat_are_samples(tmp_path: Path) -> None:
    """-N 3: three times each size. The median, and the rates that follow, are the case's."""
    (found,) = load([str(LOGS / "cycles.log")])
    rows = [*found.rows.values()]
    assert [row.key["size_bytes"] for row in rows] == [*SIZES]
    assert [len(row.times_s) for row in rows] == [3, 3, 3]
    again = TABLE.replace(" 12.50 ", " 16.50 ").splitlines()[3:-2]
    more = TABLE.replace(" 12.50 ", " 13.50 ").replace("     3    ", "     0    ").splitlines()[3:]
    text = "\n".join([*LOG.splitlines()[:-2], *again, *more])
    _, (small, large) = read(tmp_path, text)
    assert [*small.times_s] == pytest.approx([12.5e-6, 16.5e-6, 13.5e-6])
    assert small.measure == "out_of_place_time_s"
    assert small.time_s == pytest.approx(13.5e-6)
    assert small.metrics["out_of_place_time_s"].value == pytest.approx(13.5e-6)
    assert large.check == "failed: 3 wrong values out of place"
    (in_place,) = load([str(tmp_path / "x.log")], "in_place_time_s")
    assert len(next(iter(in_place.rows.values())).times_s) == 3


def test_tables_that_repeat_are_runs(tmp_path: Path) -> None:
    """Two programs in turn, and again; then the first one was killed, and began anew."""
    gather = LOG.replace("all_reduce", "all_gather")
    killed = "\n".join(LOG.splitlines()[:-3]) + "\n"
    (tmp_path / "soak.log").write_text(LOG + gather + LOG + gather + killed + LOG)
    runs = load([str(tmp_path / "soak.log")])
    collectives = [[row.key["collective"] for row in run.rows.values()] for run in runs]
    both = ["all_reduce"] * 2 + ["all_gather"] * 2
    assert collectives == [both, both, ["all_reduce"], ["all_reduce"] * 2]
    assert [run.status for run in runs] == ["complete", "complete", "interrupted", "complete"]
    twice = tmp_path / "all_reduce_twice.log"
    twice.write_text(2 * (LOGS / "all_reduce_base.log").read_text())
    done = run("compare.py", str(LOGS / "all_reduce_base2.log"), "--test", str(twice))
    assert "1 of BASE, 2 of TEST" in done.stdout, done.stderr


def test_programs_whose_names_have_a_suffix(tmp_path: Path) -> None:
    paths = [str(LOGS / f"slurm-{number}.out") for number in (4711, 4712)]
    done = run("compare.py", paths[0], "--test", paths[1])
    assert "# 3 undecided, 3 missing" in done.stdout, done.stderr
    keys = []
    for name in ("all_reduce_perf", "/usr/bin/all_reduce_perf_mpi", "x_perf-2/all_reduce_perf-12"):
        text = LOG.replace("# Collective test starting: all_reduce_perf", f"+ srun {name} -b 8")
        keys.append([row.key for row in read(tmp_path, text)[1]])
    assert keys[0] == keys[1] == keys[2]
    assert keys[0][0]["collective"] == "all_reduce"


def test_jobs_that_have_written_at_once_are_refused() -> None:
    """Two programs of one rank each, line by line: nccl-tests was built without MPI."""
    path = str(LOGS / "all_reduce_worlds.log")
    done = run("compare.py", str(LOGS / "all_reduce_base.log"), "--test", path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "Rank 0 stands on nodea and on nodeb: 2 jobs have written at once" in done.stderr


@pytest.mark.parametrize(
    "text",
    [
        *("nothing of the kind\n", "numCycle,name,nodes\n0,AllReduce,1\n", "[" * 5000),
        *('{"version": 3, "args": ["all_reduce_perf"], "results": [{"si', '{"a": 1}\n{"b": 2}\n'),
        *("[]", "[1]", '{"inPlace": 0, "busBw": 1}\n', "# size\n1 2\n"),
    ],
)
def test_what_is_no_report_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ValueError, match=r"x\.json (is neither a report nor|looks like)"):
        load([str(tmp_path / "x.json")])


def test_a_log_meets_a_report_of_collectives(tmp_path: Path) -> None:
    """By the time that the tables of both show, whichever variant the report is about."""
    times = {"in_place_time_s": estimate(12e-6), "out_of_place_time_s": estimate(25e-6)}
    key = {"collective": "all_reduce", "size_bytes": 1024, "dtype": "float32", "redop": "sum"}
    key |= {"root": -1, "ranks": 2, "count": 256, "caches": "cold", "backend": "nccl"}
    line = case("1K", [12e-6], key=key, metrics=times)
    ours = write(tmp_path / "ours.jsonl", line, benchmark="collectives")
    (tmp_path / "theirs.log").write_text(LOG)
    done = run("compare.py", str(tmp_path / "theirs.log"), "--test", ours)
    assert "2.00x slower" in done.stdout, done.stderr
    assert "# 1 undecided, 1 missing" in done.stdout
    done = run(
        "compare.py", ours, "--test", str(tmp_path / "theirs.log"), "--measure", "in_place_time_s"
    )
    assert re.search(r"1K +12 us +12 us +1.00x", done.stdout), done.stdout
    backends = [case("1K", [1e-5], key=key | {"backend": name}) for name in ("nccl", "gloo")]
    write(tmp_path / "ours.jsonl", *backends, benchmark="collectives")
    done = run("compare.py", ours, "--test", str(tmp_path / "theirs.log"))
    assert "several cases are one for nccl-tests, e.g. " in done.stderr


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
    assert rows[0].metrics["in_place_time_s"].value == pytest.approx(19.9e-6)
    mpi = {"ranks": 2, "gpusPerRank": 8, "nodes": 2, "numCycle": 0, "wrong": "2"}
    _, rows = read(tmp_path, json.dumps([entry(1024, 0, 19.2, **mpi)]), "b.json")
    assert rows[0].key["ranks"] == 16
    assert rows[0].check == "failed: 2 wrong values out of place"
    _, rows = read(tmp_path, json.dumps(entries[0]), "c.json")
    assert len(rows) == 1


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
    done = run("export.py", sides[0], "--to", "csv")
    assert "out_of_place_busbw_gb_per_s" in done.stdout, done.stderr
