"""harness/benchmark.py without a job: what happens before and after the blocks of a case."""

import gc
import os
import pty
import termios
import weakref
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import pytest
from torch.distributed import HashStore

from harness import benchmark, turns
from harness.benchmark import Benchmark, Implausible
from harness.report import Case, Report


class Model:
    """Stands for what a workload keeps on the device."""


def test_a_failed_case_frees_its_model_before_its_groups_are_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A traceback refers to the frames, and these refer to the model. NCCL's abort would wait for
    the model's CUDA graphs, and the next case would lack its memory."""
    models: list[weakref.ref[Model]] = []
    alive: list[bool] = []

    def build(group: Any) -> Any:
        model = Model()
        models.append(weakref.ref(model))
        raise RuntimeError("out of memory")

    def release(ranks: Any, subgroups: Any, failed: bool) -> None:
        assert failed
        assert observer.opened.call_args == call(None)  # two threads must not abort one group
        alive.append(models[0]() is not None)

    observer = Mock()
    groups = Mock(acquire=lambda *_: Mock(start_up_s={}, extra=[]), release=release)
    bench: Any = Mock(observers=[observer], groups=groups, job=Mock(rank=3), attempts=0)
    bench.release = partial(Benchmark.release, bench)
    monkeypatch.setattr(benchmark, "gpu_is_lost", lambda device: False)
    gc.disable()
    assert Benchmark.attempt(bench, build, (0, 3), ((0, 3),)) is None
    gc.enable()
    assert alive == [False]
    bench.report_failure.assert_called_once_with("RuntimeError: out of memory (rank 3)")


def test_the_first_failure_of_a_case_is_its_reason() -> None:
    """Ranks 2 and 0 fail in this order in the first case, none in the second."""
    store = HashStore()
    ranks: list[Any] = [Mock(attempts=1, job=Mock(rank=r, store=store)) for r in range(3)]
    observer = Mock()
    ranks[0].observers = ranks[2].observers = [observer]
    Benchmark.report_failure(ranks[2], "first")
    Benchmark.report_failure(ranks[0], "follows from it")
    assert Benchmark.first_failure(ranks[1]) == ("first", 2)
    assert observer.failed.call_args_list == [call("first"), call("follows from it")]
    ranks[1].attempts += 1
    assert Benchmark.first_failure(ranks[1]) == (None, None)


def test_an_impossible_result_is_disturbed_or_implausible() -> None:
    """It depends on the CPU use by other processes."""
    sure = "DDP on 2 ranks trains 3.00 times (2.80 to 3.10) as fast as one rank alone"
    others = "other processes used 0.9 of 2 cores of vm"
    assert benchmark.with_cause(sure, others) == sure
    shown = benchmark.with_cause(Implausible(sure), others)
    assert shown == f'disturbed: "{sure}" is impossible; {others}'
    idle = benchmark.with_cause(Implausible(sure), "")
    assert idle == f'implausible: "{sure}"; no load by other processes explains it'
    unknown = benchmark.with_cause(Implausible(sure), benchmark.LOAD_UNKNOWN)
    assert unknown == f'implausible: "{sure}"; CPU use by other processes was not recorded'


def test_a_turn_without_pipes_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    for pipes in ("x", "/nowhere:/dev/null", "a:b:c"):
        for name in ("RANK", "SLURM_PROCID"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("TORCHRUN_BENCH_TURN", pipes)
        with pytest.raises(SystemExit, match="2"):
            turns.find_pipes()
        expected = "expected two named pipes, which ab.py --interleave sets"
        told = f"TORCHRUN_BENCH_TURN: {expected}, got {pipes!r}; try unset TORCHRUN_BENCH_TURN\n"
        assert capsys.readouterr().err.endswith(f": error: {told}")
    two = [str(tmp_path / name) for name in "ab"]
    for pipe in two:
        os.mkfifo(pipe)
    monkeypatch.setenv("TORCHRUN_BENCH_TURN", ":".join(two))
    assert turns.find_pipes() == two


def test_the_width_of_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the ranks of mpirun has no size, and their output may go to a file."""
    monkeypatch.delenv("COLUMNS", raising=False)
    for columns, width in ((80, 80), (0, None)):
        ours, theirs = pty.openpty()
        termios.tcsetwinsize(theirs, (24, columns))
        with open(theirs, "w") as terminal, monkeypatch.context() as patch:
            patch.setattr("sys.stdout", terminal)
            patch.setattr("sys.__stdout__", terminal)
            assert benchmark.terminal_width() == width
        os.close(ours)
    sentence = "DDP adds 16.2 ms to a step, which takes 76.1 ms"
    assert benchmark.folded(sentence, None) == f"# {sentence}"
    lines = "# DDP adds 16.2 ms to a step,\n#   which takes 76.1 ms"
    assert benchmark.folded(sentence, 32) == lines


@pytest.fixture
def resumed(tmp_path: Path) -> Any:
    """A resumed report, with what begin_table and show need of a Benchmark."""
    path = str(tmp_path / "r.jsonl")
    before = Report("x", {"hosts": ["node1"]}, path, started_at="2026-11-28T03:12:00+00:00")
    before.start()
    before.add(Case(key={"n": 1}, name="a", ranks=[0], metrics={"step_s": 3.0}))
    before.files[-1].close()
    bench: Any = Mock(report=Report("x", {"hosts": ["node2"]}, path), max_width=None, answers=[])
    bench.names = {"Title": ["a", "b"]}
    bench.printed = []
    bench.print = bench.printed.append
    bench.report.start(resume=True)
    bench.report.add(Case(key={"n": 2}, name="b", ranks=[0], metrics={"step_s": 2.0}))
    for name in ("conclude", "show"):
        setattr(bench, name, partial(getattr(Benchmark, name), bench))
    return bench


COLUMNS = {"": lambda case: case.name, "s": lambda case: str(case.metrics["step_s"])}


def test_earlier_rows_have_separate_sentences(resumed: Any) -> None:
    """One row was measured earlier and one now. Each has its own sentence."""

    def answer(cases: list[Case]) -> Any:
        sure = f"{cases[0].name} is the fastest of {len(cases)}"
        return Implausible(sure) if cases[0].name == "a" else sure

    with Benchmark.begin_table(resumed, "Title", COLUMNS, answer):
        for case in resumed.report.cases:
            resumed.show(case, [])
    when = "2026-11-28 03:12 UTC on node1"
    assert resumed.answers == [
        f'measured {when}: implausible: "a is the fastest of 1"; '
        "CPU use by other processes was not recorded",
        "b is the fastest of 1",
    ]


def test_an_unchecked_case_is_measured_again() -> None:
    """A run with -c 0 is continued by --resume without it."""
    unchecked = Case(key={}, ranks=[], check="skipped: -c 0")
    assert not benchmark.counts_as_done(unchecked, Mock(check=1))
    assert benchmark.counts_as_done(unchecked, Mock(check=0))
    assert benchmark.counts_as_done(Case(key={}, ranks=[], check="skipped: why"), Mock(check=1))
    assert benchmark.counts_as_done(Case(key={}, ranks=[]), object())  # type: ignore[arg-type]
    failed = Case(key={}, ranks=[], check="failed: why")
    assert not benchmark.counts_as_done(failed, Mock(check=0))


def test_a_reason_why_cases_are_not_checked_is_printed_once() -> None:
    bench = Benchmark.__new__(Benchmark)
    bench.skipped = ""
    checks = ["passed", "skipped: why", "skipped: why", "skipped: -c 0", "skipped: other"]
    lines = [bench.unchecked(Case(key={}, ranks=[], check=check)) for check in checks]
    assert lines == [[], ["not checked: why"], [], [], ["not checked: other"]]


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_refused_run_leaves_no_empty_report(is_replaced: bool, tmp_path: Path) -> None:
    """Not even after it was opened. The report of an earlier run keeps its name."""
    path = tmp_path / "r.jsonl"
    bench: Any = Mock(args=Mock(resume=False), is_report_open=False, replaced=None)
    bench.report = Report("x", {}, str(path))
    if is_replaced:
        path.write_text('{"schema": "torchrun-bench/3", "benchmark": "x", "environment": {}}\n')
    before = path.read_text() if is_replaced else None
    Benchmark.discard_empty_report(bench)  # not yet started
    assert path.exists() == is_replaced
    bench.replaced, bench.is_report_open = bench.report.start(), True
    Benchmark.discard_empty_report(bench)
    assert [entry.name for entry in tmp_path.iterdir()] == ["r.jsonl"] * is_replaced
    assert not is_replaced or path.read_text() == before
    for file in bench.report.files:
        file.close()
    bench.report = Report("x", {}, str(path))
    bench.replaced = bench.report.start()
    bench.report.add(Case(key={}, name="a", ranks=[0], metrics={}))
    Benchmark.discard_empty_report(bench)
    assert '"name": "a"' in path.read_text()
