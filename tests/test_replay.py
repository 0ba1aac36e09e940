"""replay.py in full runs; tests/pure/test_replay.py tests what it reads and computes."""

import json
import re
from pathlib import Path

import pytest

from tests.process import ROOT, Bench, Start

SCRIPT = "benchmarks/replay.py"
SHORT = ("--iters", "2", "--warmup-iters", "1")
RECORDING = ROOT / "tests" / "recording"


@pytest.mark.smoke
def test_a_job_is_recorded_and_replayed(bench: Bench, start: Start, tmp_path: Path) -> None:
    """FSDP2 x TP: all operations of the flight recorder are replayed."""
    folder = tmp_path / "a trace"
    process = start("examples/record_collectives.py", str(folder), ranks=4)
    assert process.wait() == 0, process.err
    run = bench(SCRIPT, str(folder), *SHORT, ranks=4)
    (case,) = run.report.cases
    assert case.check == "passed"
    assert re.search(r"^# not replayed: 0 of [1-9]\d+ operations$", run.out, re.MULTILINE)
    assert {row["group"] for row in case.metrics["operations"]} == {"mesh_dp", "mesh_tp"}
    # no replay with gaps is faster than the job was
    slowest = [max(times) for times in zip(*case.samples_s["with gaps"], strict=True)]
    assert min(slowest) / 3 >= case.metrics["job_step_s"]


@pytest.mark.smoke
def test_what_cannot_be_replayed_is_named(bench: Bench, tmp_path: Path) -> None:
    """A job with DDP. Rank 0 recorded two operations more, rank 1 one that rank 0 lacks."""
    for path in RECORDING.iterdir():
        trace = json.loads(path.read_text())
        last, begin = trace["entries"][-1], {"time_created_ns": trace["started_ns"]}
        missed = last | {"collective_seq_id": 99} | begin
        odd = missed | {"profiling_name": "gloo:sparse_all_reduce"}
        unlabelled = missed | {"process_group": ["9", "other"]}
        trace["entries"] += [odd, unlabelled] if path.stem == "fr_0" else [missed]
        (tmp_path / path.name).write_text(json.dumps(trace))
    run = bench(SCRIPT, str(tmp_path), *SHORT)
    lines = [
        "# 1 x sparse_all_reduce of default_pg: this operation is not replayed",
        "# 1 x all_reduce of other: the ranks of its group are not recorded",
        "# 1 x all_reduce of default_pg: not recorded equally often on all ranks of its group",
        "# not replayed: 3 of 15 operations",
    ]
    assert "\n".join(lines) in run.out
    rows = run.report.cases[0].metrics["operations"]
    assert [(row["size_bytes"], row["calls"]) for row in rows] == [(1049600, 1), (3154944, 1)]
    # the recording is in the key: a recording of another job would be listed
    planned = bench(SCRIPT, str(tmp_path), *SHORT, "--dry-run", "--resume")
    assert planned.out.endswith("\n# 0 cases; nothing was measured\n"), planned.err


@pytest.mark.smoke
@pytest.mark.oldest
def test_a_trace_of_the_profiler_is_replayed(bench: Bench) -> None:
    run = bench(SCRIPT, str(ROOT / "tests" / "recordings" / "profiler_2.14"), *SHORT)
    (case,) = run.report.cases
    rows = case.metrics["operations"]
    calls = {row["op"]: row["calls"] for row in rows}
    assert calls == dict.fromkeys(("all_reduce", "all_gather", "broadcast", "barrier"), 1)
    assert all(row["job_s"].value > 0 for row in rows)
    assert "# not replayed: 4 of 20 operations\n" in run.out
    assert case.metrics["job_step_s"] <= case.metrics["with_gaps_s"].value


@pytest.mark.smoke
def test_a_replay_without_gaps(bench: Bench) -> None:
    run = bench(SCRIPT, str(RECORDING), *SHORT, "--no-gaps")
    (case,) = run.report.cases
    assert case.key["gaps"] is False
    assert not {"job_step_s", "with_gaps_s"} & case.metrics.keys()
    answer = r"^# the communication of a step takes \S+ .*back to back$"
    assert re.search(answer, run.out, re.MULTILINE)
    assert ": 3 steps without gaps; all groups\n" in run.out


@pytest.mark.faults
def test_another_order_on_one_rank_is_refused(bench: Bench, tmp_path: Path) -> None:
    """A replay would end with an error of gloo, or never."""
    for path in RECORDING.iterdir():
        trace = json.loads(path.read_text())
        if path.stem == "fr_1":
            trace["entries"][:2] = reversed(trace["entries"][:2])
        (tmp_path / path.name).write_text(json.dumps(trace))
    run = bench(SCRIPT, str(tmp_path), *SHORT, status=1)
    assert "12 x all_reduce of default_pg: in a different order on rank 1 than on ra" in run.err


@pytest.mark.faults
def test_wrong_values_fail_the_case(bench: Bench) -> None:
    run = bench(SCRIPT, str(RECORDING), *SHORT, inject="wrong-sum", status=1)
    assert "all_reduce of default_pg delivered wrong values (rank 1)" in run.out
