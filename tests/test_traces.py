"""--profile in a full run: the files, the ranges in them, and the report."""

import gzip
import json
from pathlib import Path

import pytest

from tests.process import Bench


def communication_by_range(file: Path) -> dict[str, list[int]]:
    """How many operations of gloo began in each range of a trace, by the range's name."""
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    complete = [event for event in events if event["ph"] == "X"]
    begun = [event["ts"] for event in complete if event["name"].startswith("gloo:")]
    counts: dict[str, list[int]] = {}
    for event in complete:
        if event["name"] in ("step", "without dp", "compute"):
            start, end = event["ts"], event["ts"] + event["dur"]
            within = [time for time in begun if start <= time <= end]
            counts.setdefault(event["name"], []).append(len(within))
    return counts


@pytest.mark.smoke
def test_a_trace_without_an_axis_communicating(bench: Bench, tmp_path: Path) -> None:
    """Only rank 1 writes a trace. The samples are as without the flag."""
    folder = tmp_path / "tr aces"
    flags = ("--sequence-length", "32", "--global-batch", "8", "--warmup-iters", "0")
    asked = ("--profile", str(folder), "--profile-ranks", "1")
    run = bench("benchmarks/parallel_sweep.py", *flags, "--iters", "2", "--mesh", "dp2", *asked)
    (case,) = run.report.cases
    assert case.check == "passed"
    assert [len(times) for times in case.samples_s["step"]] == [2, 2]
    assert list(case.metrics["traces"]) == ["1"]
    summary = case.metrics["traces"]["1"]
    (file,) = folder.iterdir()
    assert summary["file"] == str(file)
    assert file.name.endswith("-rank1.json.gz")
    assert set(summary) == {"file", "slowdown", "step_s"}
    assert summary["slowdown"] > 0
    assert f"\n# trace of rank 1: {str(file).replace('rank1', 'rank*')}" in run.out
    counts = communication_by_range(file)
    assert [len(counts[name]) for name in counts] == [5] * len(case.samples_s)
    assert min(counts.pop("step")) > 0
    assert set(map(max, counts.values())) == {0}
