"""replay.py as its user runs it; tests/pure/test_replay.py has what it reads and computes."""

import json
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.process import ROOT

SCRIPT = "benchmarks/replay.py"
SHORT = ("--iters", "6", "--warmup-iters", "1")
RECORDING = ROOT / "tests" / "recording"


def recorded(folder: Path) -> tuple[int, float]:
    """Operations of all ranks, and bytes of a rank in a step: the larger of in and out."""
    operations, size = 0, 0
    for path in folder.iterdir():
        trace = json.loads(path.read_text())
        for entry in trace["entries"]:
            if entry["time_created_ns"] >= trace["started_ns"]:
                operations += 1
                size += 4 * max(
                    sum(map(math.prod, entry[name])) for name in ("input_sizes", "output_sizes")
                )
    return operations, size / len(list(folder.iterdir())) / trace["steps"]


@pytest.mark.smoke
@pytest.mark.oldest
def test_a_job_is_recorded_and_replayed(
    bench: Callable[..., Any], start: Callable[..., Any], tmp_path: Path
) -> None:
    """FSDP2 x TP: the operations and the bytes that the flight recorder has, all of them."""
    folder = tmp_path / "a trace"
    process = start("examples/record_collectives.py", str(folder), ranks=4)
    assert process.wait(180) == 0, process.err
    operations, size = recorded(folder)
    run = bench(SCRIPT, str(folder), *SHORT, ranks=4)
    assert run.status == 0, run.err
    (case,) = run.report.cases
    assert case.check == "passed"
    assert operations > 0
    assert f"# not replayed: 0 of {operations}" in run.out.splitlines()
    assert case.metrics["step_bytes"] == pytest.approx(size)
    groups = Counter(row["group"] for row in case.metrics["operations"])
    assert set(groups) == {"mesh_dp", "mesh_tp"}
    assert f"\n# recording {case.key['recording']}: 3 steps in " in run.out
    assert len(case.samples_s) == 2 + sum(groups.values())
    # every replay ends no earlier than the job did
    slowest = [max(times) for times in zip(*case.samples_s["step"], strict=True)]
    assert min(slowest) / 3 >= case.metrics["job_step_s"]


@pytest.mark.smoke
def test_what_cannot_be_replayed_is_named(bench: Callable[..., Any], tmp_path: Path) -> None:
    """A job with DDP; rank 0 has recorded two operations more, rank 1 one that rank 0 has not."""
    for path in RECORDING.iterdir():
        trace = json.loads(path.read_text())
        last, begin = trace["entries"][-1], {"time_created_ns": trace["started_ns"]}
        missed = last | {"collective_seq_id": 99} | begin
        odd = missed | {"profiling_name": "gloo:sparse_all_reduce"}
        unlabelled = missed | {"process_group": ["9", "other"]}
        trace["entries"] += [odd, unlabelled] if path.stem == "fr_0" else [missed]
        (tmp_path / path.name).write_text(json.dumps(trace))
    run = bench(SCRIPT, str(tmp_path), *SHORT, ranks=2)
    assert run.status == 0, run.err
    lines = [
        "# 1 x sparse_all_reduce of default_pg: this operation is not known",
        "# 1 x all_reduce of other: the ranks of its group are not recorded",
        "# 1 x all_reduce of default_pg: not recorded alike on every rank of its group",
        "# not replayed: 3 of 15",
    ]
    assert "\n".join(lines) in run.out
    rows = run.report.cases[0].metrics["operations"]
    assert [(row["size_bytes"], row["calls"]) for row in rows] == [(1049600, 1), (3154944, 1)]


@pytest.mark.smoke
def test_a_dry_run_leaves_out_what_the_report_has(bench: Callable[..., Any]) -> None:
    """The key has the recording, so that of another job would be listed."""
    run = bench(SCRIPT, str(RECORDING), *SHORT, ranks=2)
    assert run.status == 0, run.err
    planned = bench(SCRIPT, str(RECORDING), *SHORT, "--dry-run", "--resume", ranks=2)
    assert planned.status == 0, planned.err
    assert planned.out.endswith("\n# 0 cases; nothing was measured\n")


@pytest.mark.faults
def test_wrong_values_fail_the_case(bench: Callable[..., Any]) -> None:
    run = bench(SCRIPT, str(RECORDING), *SHORT, ranks=2, inject="wrong-sum")
    assert run.status == 1, run.out + run.err
    assert "all_reduce of default_pg brought wrong values (rank 1)" in run.out
