"""analysis/logs/nccl_tests.py and load.py: reports of nccl-tests, rccl-tests and PyTorch's DDP
benchmark, as JSON and as tables."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from analysis.logs import nccl_tests
from analysis.logs.suggestions import suggested
from analysis.runs.load import Row, Run, frame, load
from common.stats import Estimate
from tests.pure.reports import ROOT, case, estimate, refusal, refused, run, write

LOGS = ROOT / "tests" / "logs"  # four ranks on two hosts
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
1048576  262144 bfloat16   none    -1  76.26   13.75   25.78       0   Direct    SIMPLE          32
"""


def read(folder: Path, text: str, name: str = "x.log") -> tuple[Run, list[Row]]:
    path = folder / name
    path.write_text(text)
    with suggested():
        (found,) = load([str(path)])
    return found, list(found.rows.values())


def compared(folder: Path, base: str, test: str, *words: str) -> CompletedProcess[str]:
    """The comparison of two logs with these texts."""
    for side, text in (("a", base), ("b", test)):
        (folder / f"{side}.log").write_text(text)
    return run("compare.py", str(folder / "a.log"), "--test", str(folder / "b.log"), *words)


def test_a_table_of_nccl_tests(tmp_path: Path) -> None:
    found, (small, large) = read(tmp_path, LOG)
    assert (found.benchmark, found.status) == ("nccl-tests", "complete")
    hosts, devices = ["worker-0", "worker-1"], ["NVIDIA H100 80GB HBM3"]
    versions = {"nccl": "22807", "nccl_tests": "2.17.6"}
    layout = {"world_size": 2, "hosts": hosts, "num_nodes": 2, "local_world_size": 1}
    assert found.environment == versions | layout | {"devices": devices}
    key = {"collective": "all_reduce", "size_bytes": 1024, "dtype": "float", "redop": "sum"}
    assert small.key == key | {"root": "-1", "ranks": 2}
    assert small.measure == "out_of_place_time_s"
    assert small.time_s == pytest.approx(12.5e-6)
    assert small.metrics["in_place_busbw_gb_per_s"] == Estimate(0.09)
    assert small.check == "passed"
    assert large.check == "failed: 3 wrong values out of place"


def test_a_table_of_rccl_tests(tmp_path: Path) -> None:
    found, (row,) = read(tmp_path, RCCL, "alltoall_8.log")
    assert row.key["collective"] == "alltoall"  # from the name of the file
    names = ("time_s", "algbw_gb_per_s", "busbw_gb_per_s")
    assert [*row.metrics] == [f"in_place_{name}" for name in names]
    assert found.status == "interrupted"  # the last line is missing
    versions = {"nccl": "2.27.7-develop:29e1567", "nccl_tests": "develop:5272cd1"}
    assert found.environment == versions | {"world_size": 2}  # 1 MiB is 2 x 262,144 bfloat16


@pytest.mark.parametrize("path", sorted(LOGS.glob("all_reduce_[!bw]*.log")), ids=lambda p: p.stem)
def test_a_log_as_launchers_change_it(path: Path) -> None:
    (plain,), (found,) = load([str(BASE)]), load([str(path)])
    assert [row.key["size_bytes"] for row in found.rows.values()] == SIZES
    for row, as_plain in zip(found.rows.values(), plain.rows.values(), strict=True):
        assert (row.key, row.metrics) == (as_plain.key, as_plain.metrics)
    assert (found.environment, found.status) == (plain.environment, "complete")


def test_a_row_cut_by_a_warning_of_nccl_is_not_misread(tmp_path: Path) -> None:
    """The rows of the other sizes are read, and that of 1 MiB is correct or missing."""
    text = BASE.read_text()
    (row,) = (line for line in text.splitlines() if " 1048576 " in line)
    for at in range(1, len(row)):
        cut = row[:at] + "nodeb:777:790 [1] NCCL WARN Call to ibv_modify_qp failed\n" + row[at:]
        _, rows = read(tmp_path, text.replace(row, cut), BASE.name)
        times = {row.key["size_bytes"]: row.time_s for row in rows}
        assert times.pop(1024) == pytest.approx(20.04e-6)
        assert times.pop(2**26) == pytest.approx(696.37e-6)
        assert times in ({}, {2**20: pytest.approx(30.74e-6)})


def test_repeated_rows_are_samples(tmp_path: Path) -> None:
    """With -N 2 a case has the median, and fails if one of its rows does."""
    again = LOG.replace(" 12.50 ", " 16.50 ").replace("  3  76", "  0  76").splitlines()[6:]
    _, (small, large) = read(tmp_path, "\n".join([*LOG.splitlines()[:-1], *again]))
    assert [*small.times_s] == pytest.approx([12.5e-6, 16.5e-6])
    assert small.time_s == pytest.approx(14.5e-6)
    assert small.metrics["out_of_place_time_s"].value == pytest.approx(14.5e-6)
    assert large.check == "failed: 3 wrong values out of place"


def test_repeated_tables_are_runs(tmp_path: Path) -> None:
    """Two programs run alternately, twice. Then the first one is killed and started again."""
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


def test_mixed_output_of_two_jobs_is_refused() -> None:
    """Lines of two single-rank programs are mixed, because nccl-tests was built without MPI."""
    line = refusal("compare.py", str(BASE), "--test", str(LOGS / "all_reduce_worlds.log"))
    assert "Rank 0 is on nodea and on nodeb: 2 jobs wrote to it at once" in line


def test_a_log_is_compared_with_a_report_of_collectives(tmp_path: Path) -> None:
    """They are compared by the variant that the log has."""
    times = {"in_place_time_s": estimate(12e-6), "out_of_place_time_s": estimate(25e-6)}
    key = {"collective": "all_reduce", "size_bytes": 1024, "dtype": "float32", "redop": "sum"}
    key |= {"root": -1, "ranks": 2, "count": 256, "caches": "cold", "backend": "nccl"}
    line = case("1K", [12e-6], key=key, metrics=times)
    ours = write(tmp_path / "ours.jsonl", line, benchmark="collectives")
    (tmp_path / "theirs.log").write_text(LOG)
    theirs = str(tmp_path / "theirs.log")
    done = run("compare.py", theirs, "--test", ours)
    assert "2.00x slower" in done.stdout, done.stderr
    done = run("compare.py", ours, "--test", theirs, "--measure", "in_place_time_s")
    assert re.search(r"1K +12.00 us +12.00 us +1.00x", done.stdout), done.stdout


def test_json_of_rccl_tests(tmp_path: Path) -> None:
    """One object per line. Later versions write a list, with MPI also the ranks."""
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
    """The format of src/util.cu in nccl-tests: version 3 with -I 1 -K 1 -N 2."""
    # the first device of each process
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
        "env": ["NCCL_ALGO=Ring", "SECRET=hunter2", "NCCL_PW=hunter2"],
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
    assert found.environment["variables"] == {"NCCL_ALGO": "Ring", "NCCL_PW": "(set)"}


def ddp_json() -> dict[str, Any]:
    """The format of benchmarks/distributed/ddp/benchmark.py: one rank after the other."""
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


NOT_A_REPORT = "is neither a report nor a log with a table"
NO_FORM = "looks like a report of "
NO_LOOP = nccl_json()["results"][0] | {"out_of_place_per_iter": {"x": 1}}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (json.dumps(ddp_json() | {"benchmark_results": ["nonsense"]}), NO_FORM),
        (json.dumps(nccl_json() | {"results": [NO_LOOP]}), NO_FORM),
        ('{"inPlace": 0, "busBw": 1}', NO_FORM),
        ("nothing of the kind\n", NOT_A_REPORT),
        ("[]", NOT_A_REPORT),
        ('{"a": 1}\n{"b": 2}', NOT_A_REPORT),
        ("[" * 5000, NOT_A_REPORT),
        ('{"results": [{"command": "torchrun x.py", "mean": 3.1}]}', NOT_A_REPORT),  # hyperfine
        # 250 kB after the first words of a header: patterns must not take quadratic time
        ("size count type redop root " + "time " * 50_000, NOT_A_REPORT),
        ((LOGS / "nccom.log").read_text(), "has a table of nccom-test, which is not supported"),
        ((LOGS / "no_rows.log").read_text(), "of nccl-tests, but no rows: it is truncated"),
        # a known program, a field of JSON, or the word before a number with a unit is suggested
        (
            " iteration 10/ 2000 | elapsed time per iteration (ms): 1147.6 | lr: 1E-05 |",
            r"read by --step 'elapsed time per iteration \(ms\): ([\d.]+)' (Megatron-LM)",
        ),
        (
            "eta: 1:02:03, time: 0.54, data_time: 0.01",
            r"--step ' time: ([\d.]+)' --unit s (mmengine)",
        ),
        (
            '{"step": 1, "step_ms": 5, "tps": 7.5}',
            "; its lines are read by --step 'step_ms' or --step 'tps' --unit 1/s; use the one",
        ),
        ("step took 5.0 ms\n" * 3, r"read by --step 'took ([\d.]+) ms'"),
        ("hello 5", r"by --step, e.g. --step 'took ([\d.]+) ms'"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str, words: str) -> None:
    line = refused(read, tmp_path, text, "x.json")
    assert line.startswith(f"{tmp_path}/x.json ")
    assert words in line


PARAMETERS = (
    "# nThread 1 nGpus 1 minBytes 1024 maxBytes 1048576 step: 2(factor) warmup iters: 1 iters: 20 "
    "agg iters: {agg} validation: {check} graph: {graph} unalign: {unalign}\n"
)


def log_with(
    *lines: str, agg: int = 1, check: int = 1, graph: int = 0, unalign: int = 0, log: str = LOG
) -> str:
    """A log whose header has these parameters, followed by more lines."""
    first, rest = log.split("\n", 1)
    parameters = PARAMETERS.format(agg=agg, check=check, graph=graph, unalign=unalign)
    return "\n".join([first, parameters + "\n".join(lines), rest])


@pytest.mark.parametrize(
    ("text", "setting"),
    [
        (log_with(graph=1), {"cudagraph": 1}),
        (log_with(agg=10), {"agg_iters": 10}),
        (log_with(unalign=3), {"unalign": 3}),
        (log_with("# Blocking Enabled: wait after each inner iteration (-m), no barrier "),
         {"blocking": 2}),
        (log_with("# Blocking Enabled: wait for completion and barrier after each collective "),
         {"blocking": 1}),
        (log_with("$ mpirun -np 2 ./build/all_reduce_perf_mpi -b 1K -e 1M -R 2 -D1 | tee log"),
         {"local_register": 2, "device_implementation": 1}),
        (log_with("+ all_reduce_perf --local_register=1 --blocking 3 -g 1 && echo -G 1"),
         {"local_register": 1, "blocking": 3}),
        (LOG.replace("  time   algbw", "  cputime   algbw"), {"report_cputime": 1}),
        (log_with("$ all_reduce_perf -b 8 -e 8G -f 2 -g 2 -n 50 -w 5 -c 0 -G 0 -R 0 -a 1"), {}),
    ],
    ids=["graph", "agg", "unalign", "z2", "rccl", "command", "long", "cputime", "defaults"],
)  # fmt: skip
def test_a_setting_is_part_of_the_key(tmp_path: Path, text: str, setting: dict[str, int]) -> None:
    """Rows measured with another setting are other cases; the setting is in the table's name."""
    _, plain = read(tmp_path, LOG)
    found, rows = read(tmp_path, text, "y.log")
    for row, as_plain in zip(rows, plain, strict=True):
        assert row.key == as_plain.key | setting
        for name, value in setting.items():
            assert f"{name} {value}" in row.table
    assert found.environment["world_size"] == 2


def test_two_settings_are_two_cases(tmp_path: Path) -> None:
    """In a file, their rows are not mixed as samples. On two sides, the flag that joins them is
    named."""
    both = log_with() + log_with(graph=1)
    _, rows = read(tmp_path, both)
    keys = [(row.key["size_bytes"], row.key.get("cudagraph", 0)) for row in rows]
    assert keys == [(1024, 0), (2**20, 0), (1024, 1), (2**20, 1)]
    assert all(len(row.times_s) == 0 for row in rows)
    why = "the keys differ in cudagraph (None in BASE, 1 in TEST); --ignore-key cudagraph joins"
    sides = log_with(), log_with(graph=1)
    assert f"no case is on both sides: {why} these cases" in compared(tmp_path, *sides).stderr
    done = compared(tmp_path, *sides, "--ignore-key", "cudagraph")
    assert re.search(r"key.cudagraph: unset in BASE, 1 in TEST", done.stdout), done.stdout


def ranks_of(groups: Sequence[int], hosts: Sequence[str]) -> str:
    """A log whose header has these ranks."""
    head, _, table = LOG.partition("#  Rank  0")
    form = "#  Rank  {} Group  {} Pid 1 on {} device  0 [0000:0b:00] NVIDIA H100\n"
    ranks = "".join(form.format(n, *of) for n, of in enumerate(zip(groups, hosts, strict=True)))
    return head + ranks + table.split("\n", 2)[2]


def test_groups_of_a_split_job(tmp_path: Path) -> None:
    """With NCCL_TESTS_SPLIT, four ranks in two groups run two all-reduces of two ranks."""
    found, rows = read(tmp_path, ranks_of([0, 1, 0, 1], ["n0", "n1", "n2", "n3"]))
    assert {(row.key["ranks"], row.key["groups"]) for row in rows} == {(2, 2)}
    assert found.environment["world_size"] == 4


def stating(*lines: str) -> str:
    """A log in which NCCL states this."""
    head, table = LOG.split("#                  ", 1)
    stated = [f"node1:9:11 [0] NCCL INFO {line}" for line in lines]
    return "\n".join([head, *stated, "#      " + table])


@pytest.mark.parametrize(
    ("base", "test", "lines"),
    [
        (stating("NET/IB : Using [0]mlx5_0:1/IB", "Using network IB"),
         stating("NET/IB : No device found.", "Using network Socket"),
         ["network: IB in BASE, Socket in TEST"]),
        (stating("NET/Plugin: Loaded net plugin IBext_v9 (v9)"),
         stating("NET/Plugin: Could not find: libnccl-net.so"),
         ["network_plugin: IBext_v9 (v9) in BASE, unset in TEST"]),
        (stating("NET/OFI Initializing aws-ofi-nccl 1.9.1"),
         stating("NET/OFI Initializing aws-ofi-nccl 1.14.0"),
         ["network_plugin: aws-ofi-nccl 1.9.1 in BASE, aws-ofi-nccl 1.14.0 in TEST"]),
        (stating("NCCL_ALGO set by environment to Ring"),
         stating("NCCL_COMM_ID set by environment to node1:4711"),
         ["variables.NCCL_ALGO: Ring in BASE, unset in TEST"]),
        (stating("Using network IB"), stating("Using network IB"), []),
        (log_with(), log_with(check=0), ["validation: 1 in BASE, 0 in TEST"]),
        (ranks_of([0] * 4, ["a", "a", "b", "b"]), ranks_of([0] * 4, ["a", "b", "c", "d"]),
         ["HARDWARE DIFFERS: num_nodes: 2 in BASE, 4 in TEST",
          "HARDWARE DIFFERS: local_world_size: 2 in BASE, 1 in TEST",
          "hosts: a, b in BASE, a, b, c, d in TEST"]),
    ],
    ids=["network", "plugin", "ofi", "algo", "same", "check", "nodes"],
)  # fmt: skip
def test_other_differences(tmp_path: Path, base: str, test: str, lines: list[str]) -> None:
    """The cases are compared, and lines above the table name the differences."""
    done = compared(tmp_path, base, test)
    assert "\n1K " in done.stdout, done.stderr
    found = re.findall("^# (?:environment: |THE )(.*)$", done.stdout, re.MULTILINE)
    assert found == lines, done.stdout + done.stderr


def test_names_of_collectives(tmp_path: Path) -> None:
    """A page has only two tables, named by their footers. The number of ranks follows from the
    tables: 2 (n-1) / n is 1.75, and 1 GiB is 8 times 33,554,432 floats. Of two tables, the second
    has no redop, so it is not an all-reduce like the first one. A command names a program with a
    suffix, all_reduce_perf_mpi."""
    (found,) = load([str(LOGS / "concluded.txt")])
    kinds = [(row.key["collective"], row.key["ranks"]) for row in found.rows.values()]
    assert kinds == [("all_reduce", 8)] * 2 + [("alltoall", 8)] * 2
    assert found.environment["world_size"] == 8
    header, *lines = LOG.splitlines()[5:]
    other = "\n".join([header, *(row.replace(" sum ", "none ") for row in lines)])
    _, rows = read(tmp_path, LOG + other)
    assert [row.key["collective"] for row in rows] == ["all_reduce"] * 2 + ["unknown"] * 2
    paths = [str(LOGS / f"slurm-{number}.out") for number in (4711, 4712)]
    assert "# 3 undecided, 3 missing" in run("compare.py", paths[0], "--test", paths[1]).stdout


@pytest.mark.parametrize(
    ("ranks", "rows"),
    [
        (8, [(178.60, 312.55)]),
        (16, [(20.00, 37.50), (120.00, 225.00)]),
        (32, [(150.00, 290.63)]),
        (None, [(0.01, 0.02)]),  # two digits are not enough
        (None, [(178.60, 312.55), (150.00, 290.63)]),  # they contradict each other
        (2, [(178.60, 178.60)]),
    ],
)
def test_ranks_from_busbw(ranks: int | None, rows: list[tuple[float, float]]) -> None:
    """busbw / algbw of an all-reduce is 2 (n-1) / n: 1.75 for 8, 1.875 for 16, 1.9375 for 32."""
    about = {"size": 1024, "count": 256, "type": "float"}
    results = [about | {"bandwidths": [(f"{a:.2f}", f"{b:.2f}")]} for a, b in rows]
    assert nccl_tests.ranks_from(results, "all_reduce") == ranks
    assert nccl_tests.ranks_from(results, "broadcast") is None


def test_columns_before_2_11(tmp_path: Path) -> None:
    """There is no root, and sendrecv has no redop. `error` is a deviation, not a count."""
    (found,) = load([str(LOGS / "old_all_reduce.log")])
    row, _ = found.rows.values()
    key = {"collective": "all_reduce", "size_bytes": 2**20, "dtype": "float", "redop": "sum"}
    assert row.key == key | {"root": "-1", "ranks": 2}
    assert row.metrics["in_place_time_s"].value == pytest.approx(214.8e-6)
    (found,) = load([str(LOGS / "old_sendrecv.log")])
    first, second = found.rows.values()
    assert (first.key["redop"], first.key["root"]) == ("none", "-1")
    assert second.metrics["in_place_time_s"].value == pytest.approx(11698e-6)
    assert second.check == "passed"  # error 3e+02, and `Out of bounds values : 0 OK`


UNITS_LINE = "#   (B)  (elements)                  (us)  (GB/s)  (GB/s)"
UNITS_LINE += "          (us)  (GB/s)  (GB/s)\n"


def log_in(time: str, rate: str) -> str:
    line = UNITS_LINE.replace("us", time).replace("GB/s", rate)
    return LOG.replace("      0        0 float", line + "      0        0 float")


def test_units_of_the_header(tmp_path: Path) -> None:
    _, (small, _) = read(tmp_path, log_in("ms", "MB/s"))
    assert small.time_s == pytest.approx(12.5e-3)
    assert small.metrics["in_place_algbw_gb_per_s"].value == pytest.approx(0.09e-3)
    _, (small, _) = read(tmp_path, log_in("us", "GB/s"), "y.log")
    assert small.time_s == pytest.approx(12.5e-6)
    for text, unit in ((log_in("jiffies", "GB/s"), "jiffies"), (log_in("us", "Gbit/s"), "Gbit/s")):
        assert f"is in {unit}; expected one of" in refused(read, tmp_path, text, "z.log")


def test_the_footer_may_fail_a_table_whose_rows_pass(tmp_path: Path) -> None:
    text = LOG.replace("      3  76", "      0  76")
    footer = "# Out of bounds values : 3 FAILED\n# Avg"
    _, rows = read(tmp_path, text.replace("# Avg", footer))
    assert {row.check for row in rows} == {"failed: 3 values out of bounds in this table"}
    _, (small, large) = read(tmp_path, LOG.replace("# Avg", footer), "y.log")
    assert small.check == "passed"  # the row shows which size is wrong
    assert large.check == "failed: 3 wrong values out of place"
    _, rows = read(tmp_path, text.replace("# Avg", footer.replace("3 FAILED", "0 OK")), "z.log")
    assert {row.check for row in rows} == {"passed"}


def test_settings_in_json(tmp_path: Path) -> None:
    """The output of -J: two groups of two ranks, a graph, blocking, and -R of the command."""
    document = nccl_json()
    document["args"] += ["-R", "2"]
    devices = [{"hostname": f"node{i}", "device_info": "H100", "group": i % 2} for i in range(4)]
    config = {"ngpus": 1, "nthreads": 1, "devices": devices, "graph": 3, "validation": 0}
    document["config"] = config | {"aggregated_iterations": 1, "blocking_collectives": "true"}
    found, (small, _) = read(tmp_path, json.dumps(document), "nccl.json")
    settings = {"cudagraph": 3, "blocking": 1, "local_register": 2, "groups": 2}
    assert {name: small.key[name] for name in settings} == settings
    assert small.key["ranks"] == 2
    assert "agg_iters" not in small.key
    layout = {"world_size": 4, "num_nodes": 4, "local_world_size": 1, "validation": 0}
    assert {name: found.environment[name] for name in layout} == layout


def test_a_table_without_wrong_values(tmp_path: Path) -> None:
    """-c 0 in some versions: no column `#wrong`."""
    text = re.sub(r" #wrong", "", LOG)
    text = re.sub(r"(?<=\d\.\d\d) +(?:\d|N/A)(?= |$)", "", text, flags=re.MULTILINE)
    found, rows = read(tmp_path, text)
    assert found.status == "complete"
    times = [row.metrics["in_place_time_s"].value for row in rows]
    assert times == pytest.approx([12e-6, 76.43e-6])
    assert [row.check for row in rows] == ["passed", "passed"]


@pytest.mark.parametrize(
    ("base", "test", "measure", "verdict"),
    [
        # 1.2e+07 stands for 1.15e+07 to 1.25e+07 us, which is +-4.2%
        ("1.2e+07", "1.2e+07", (), "undecided"),
        ("1.2e+07", "1.8e+07", (), "slower"),  # at least 1.75 / 1.25
        ("12000000", "12000000", (), "same"),
        # the rates have two digits: 0.08 stands for 0.075 to 0.085
        ("12000000", "12000000", ("--measure", "out_of_place_busbw_gb_per_s"), "undecided"),
    ],
)
def test_rounded_numbers(tmp_path: Path, base: str, test: str, measure: Any, verdict: str) -> None:
    for side, time in (("a", base), ("b", test)):
        for number in range(3):
            text = LOG.replace(" 12.50 ", f" {time} ").replace("  3   7", "  0   7")
            (tmp_path / f"{side}{number}.log").write_text(f"run {number} of {side}\n{text}")
    words = [str(tmp_path / "a?.log"), "--test", str(tmp_path / "b?.log"), *measure]
    done = run("compare.py", *words)
    row = next(line for line in done.stdout.splitlines() if line.startswith("1K"))
    assert verdict in row, done.stdout
    if verdict == "undecided" and base == test:
        assert "numbers are so coarse that they may be off by" in done.stdout


def test_the_digits_of_json_widen_the_interval(tmp_path: Path) -> None:
    """12.5 may stand for 12.50: the number with the most digits shows the resolution."""
    numbers = {"alg_bw": 0.1, "bus_bw": 0.1}
    later: dict[str, Any] = {"in_place": numbers | {"time": 12.0}}
    rows = [later | {"out_of_place": numbers | {"time": time}} for time in (12.5, 20.04)]
    nccl_tests.add_last_digits(rows)
    assert rows[0]["out_of_place"]["last_digits"]["time_s"] == pytest.approx(0.01 / 12.5)
    assert rows[1]["in_place"]["last_digits"]["time_s"] == pytest.approx(1 / 12)
