"""What looks on is no part of the measuring: common/observe/ may be deleted, or fail."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from common import benchmark
from common.report import Case
from common.timing import RankTimes
from tests.process import ROOT

FLAGS = ("--model", "mobilenet_v3_small", "--image-size", "32", "--batch-size", "2")
SHORT = (*FLAGS, "--iters", "2", "--warmup-iters", "1", "--world-sizes", "2")


def cases_in(path: Path) -> list[Any]:
    """Key, name, table, metrics' names and check of each case of a report."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [
        (line["key"], line["name"], line["table"], sorted(line["metrics"]), line["check"])
        for line in lines
        if "key" in line
    ]


@pytest.mark.smoke
def test_without_the_folder_the_same_cases_are_written(
    bench: Callable[..., Any], tmp_path: Path
) -> None:
    copy = tmp_path / "checkout"
    for folder in ("benchmarks", "common"):
        shutil.copytree(ROOT / folder, copy / folder)
    script = str(copy / "benchmarks" / "ddp_sweep.py")
    whole = bench(script, *SHORT, ranks=2)
    assert whole.status == 0, whole.err
    before = cases_in(whole.path)
    shutil.rmtree(copy / "common" / "observe")
    alone = bench(script, *SHORT, ranks=2)
    assert alone.status == 0, alone.err
    assert cases_in(alone.path) == before
    assert len(before) == 2


class Broken(benchmark.Observer):
    def row(self, case: Case, seen: list[Any]) -> list[str]:
        raise KeyError("row")

    def end(self, last_line: dict[str, Any]) -> list[str]:
        raise RuntimeError("end")


def test_an_error_of_who_looks_on_is_a_line() -> None:
    case, lines = Case(key={}, ranks=[0]), list[str]()
    broken = Broken.__new__(Broken)
    bench: Any = benchmark.Benchmark.__new__(benchmark.Benchmark)
    bench.observers, bench.report = [broken], Mock(path=None)
    bench.watchdog = Mock(failure=lambda: (None, None))
    timed = RankTimes({"step": np.array([1.0])}, [1], "iters")
    assert bench.write(
        case, lambda *_: None, [benchmark.RankResult(timed, None, [None])], lines
    ) == (None, None)
    assert lines == ["Broken: KeyError: 'row'"]
    assert case.check == "passed"
    assert benchmark.guarded(broken, broken.end, {}) == ["Broken: RuntimeError: end"]


@pytest.mark.smoke
def test_an_error_while_a_trace_is_made_fails_the_case(
    bench: Callable[..., Any], tmp_path: Path
) -> None:
    """The other rank waits within it, so nothing else would end that."""
    flags = (*SHORT, "--profile", str(tmp_path / "traces"))
    run = bench("benchmarks/ddp_sweep.py", *flags, ranks=2, inject="profiler-raises")
    assert run.status == 1
    assert [case.name for case in run.report.cases] == ["no ddp", "1M/2G"]
    assert run.report.cases[1].check == "failed: RuntimeError: injected: no profiler (rank 1)"
