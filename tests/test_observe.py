"""Measuring does not depend on harness/observe/, which may be deleted, or fail."""

import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from common.stats import Times
from harness import benchmark
from harness.report import Case
from tests.process import Bench, copy_of_scripts

FLAGS = ("--model", "mobilenet_v3_small", "--image-size", "32", "--batch-size", "2")
SHORT = (*FLAGS, "--iters", "2", "--world-sizes", "2", "--no-breakdown")


@pytest.mark.smoke
def test_the_same_cases_are_written_without_the_folder(bench: Bench, tmp_path: Path) -> None:
    folder, written = copy_of_scripts(tmp_path / "checkout"), []
    for _ in range(2):
        cases = bench(str(folder / "benchmarks" / "ddp_sweep.py"), *SHORT).report.cases
        written.append([(c.key, c.name, c.table, list(c.metrics), c.check) for c in cases])
        shutil.rmtree(folder / "harness" / "observe", ignore_errors=True)
    assert written[0] == written[1]
    assert len(written[1]) == 2


@pytest.mark.faults
def test_without_the_folder_torch_ends_a_hang(bench: Bench, tmp_path: Path) -> None:
    """Rank 1 is stopped in a case. The groups have the timeout of the run."""
    script = copy_of_scripts(tmp_path / "checkout", "observe") / "benchmarks" / "ddp_sweep.py"
    run = bench(str(script), *SHORT, "--timeout", "10", inject="stops", status=1)
    assert "lost a peer" in run.reason
    assert [case.name for case in run.report.cases] == ["no ddp"]


class Broken(benchmark.Observer):
    def row(self, case: Case, seen: list[Any]) -> list[str]:
        raise KeyError("row")

    def end(self, last_line: dict[str, Any]) -> list[str]:
        raise RuntimeError("end")


def test_an_error_of_an_observer_is_printed_in_a_line() -> None:
    case, lines = Case(key={}, ranks=[0]), list[str]()
    broken = Broken.__new__(Broken)
    bench: Any = benchmark.Benchmark.__new__(benchmark.Benchmark)
    bench.observers, bench.report = [broken], Mock(path=None)
    bench.first_failure = lambda: (None, None)
    timed = Times.of_rank({"step": [1.0]}, [1], "iters")
    bench.write(case, lambda *_: None, [benchmark.RankResult(timed, None, [None])], lines)
    assert lines == ["Broken: KeyError: 'row'"]
    assert case.check == "passed"
    assert benchmark.guarded(broken, broken.end, {}) == ["Broken: RuntimeError: end"]


@pytest.mark.smoke
def test_an_error_while_a_trace_is_made_fails_the_case(bench: Bench, tmp_path: Path) -> None:
    """The other rank waits while a trace is made, and nothing else would end its wait."""
    flags = (*SHORT, "--profile", str(tmp_path / "traces"))
    run = bench("benchmarks/ddp_sweep.py", *flags, inject="profiler-raises", status=1)
    checks = [case.check for case in run.report.cases]
    assert checks == ["passed", "failed: RuntimeError: injected: no profiler (rank 1)"]
