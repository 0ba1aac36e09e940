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
from common.timing import Timing
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
    def after(self, *given: Any) -> Any:
        raise RuntimeError("after")

    def row(self, case: Case, seen: list[Any]) -> list[str]:
        raise KeyError("row")


def test_an_error_of_who_looks_on_is_a_line() -> None:
    case, lines = Case(key={}, ranks=[0]), list[str]()
    bench: Any = benchmark.Benchmark.__new__(benchmark.Benchmark)
    bench.observers = [Broken.__new__(Broken)]
    bench.watchdog = Mock(failure=lambda: (None, None))
    bench.report = Mock(path=None)
    timed = Timing({"step": np.array([1.0])}, [1], "iters")
    told = benchmark.guarded(bench.observers[0], bench.observers[0].after, {}, None, timed, None)
    assert told == "Broken: RuntimeError: after"
    for seen, line in (([None], "Broken: KeyError: 'row'"), ([told], told)):
        lines = []
        assert bench.keep(case, lambda *_: None, [(timed, None, seen)], lines) == (None, None)
        assert lines == [line]
        assert case.check == "passed"
