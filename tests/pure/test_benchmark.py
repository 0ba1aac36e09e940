"""What Benchmark does around a case, without a job."""

import gc
import os
import pty
import termios
import weakref
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from common import benchmark
from common.benchmark import Benchmark
from common.report import Case, Report
from common.stats import Disturbed
from common.timing import StopRule


class Model:
    """Stands for what a workload has on the device."""


def test_a_failed_case_has_let_go_of_its_model_when_its_groups_are_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An error's traceback holds the frames, and they the model. NCCL's abort would wait for its
    CUDA graphs, and the next case would miss its memory."""
    models: list[weakref.ref[Model]] = []
    alive: list[bool] = []

    def build(key: Any, group: Any) -> Any:
        model = Model()
        models.append(weakref.ref(model))
        raise RuntimeError("out of memory")

    def give_back(ranks: Any, teams: Any, failed: bool) -> None:
        assert failed
        assert watchdog.group is None  # two threads must not abort one group
        alive.append(models[0]() is not None)

    watchdog = Mock(group=None)
    groups = Mock(take=lambda ranks, teams: (object(), False), give_back=give_back)
    bench: Any = Mock(watchdog=watchdog, groups=groups, job=Mock(rank=3))
    monkeypatch.setattr(benchmark, "lost", lambda device: False)
    gc.disable()
    assert Benchmark.attempt(bench, {}, build, (0, 3), None, StopRule()) is None
    gc.enable()
    assert alive == [False]
    watchdog.fail.assert_called_once_with("RuntimeError: out of memory (rank 3)")


def test_a_number_that_cannot_be_is_disturbed() -> None:
    """The sentence has no verdict but who took the cores."""
    sure = "DDP on 2 ranks trains 3.00 times (2.80 to 3.10) as fast as one rank alone"
    others = "other processes used 0.9 of 2 cores of vm"
    assert benchmark.with_cause(sure, others) == sure
    shown = benchmark.with_cause(Disturbed(sure), others)
    assert shown == f'disturbed: "{sure}" cannot be; {others}'


def test_a_sentence_is_folded_on_a_terminal() -> None:
    sentence = "DDP adds 16.2 ms to a step, which takes 76.1 ms"
    assert benchmark.folded(sentence, None) == f"# {sentence}"
    lines = "# DDP adds 16.2 ms to a step,\n#   which takes 76.1 ms"
    assert benchmark.folded(sentence, 32) == lines


@pytest.mark.parametrize(("columns", "width"), [(80, 80), (0, None)])
def test_a_terminal_without_a_size_has_all_columns(
    columns: int, width: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As mpirun's ranks have one, whose output may go to a file."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, columns))
    monkeypatch.delenv("COLUMNS", raising=False)
    with open(theirs, "w") as terminal:
        monkeypatch.setattr("sys.stdout", terminal)
        monkeypatch.setattr("sys.__stdout__", terminal)
        assert benchmark.terminal_width() == width
        monkeypatch.undo()
    os.close(ours)


@pytest.mark.parametrize("names", ["", "/nope:/nope2", "pipe:a"])
def test_a_wrong_turn_is_one_line_and_overwrites_no_file(
    names: str, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.chdir(tmp_path)
    Path("a").write_text("precious")
    os.mkfifo("pipe")
    pipe = os.open("pipe", os.O_RDWR)
    os.write(pipe, b".")  # so that nobody would wait for a turn
    with pytest.raises(SystemExit, match="2"):
        benchmark.turn_taker(names)
    os.close(pipe)
    (line,) = capsys.readouterr().err.splitlines()
    assert "TORCHRUN_BENCH_TURN: expected two named pipes such as /tmp/a:/tmp/b, got '" in line
    assert Path("a").read_text() == "precious"


@pytest.fixture
def resumed(tmp_path: Path) -> Any:
    """What begin_table and show need, with a report whose second part is being written."""
    path = str(tmp_path / "r.jsonl")
    before = Report("x", {"hosts": ["node1"]}, path, started_at="2026-11-28T03:12:00+00:00")
    before.start()
    before.add(Case(key={"n": 1}, name="a", ranks=[0], metrics={"step_s": 3.0}))
    before.files[-1].close()
    bench: Any = Mock(report=Report("x", {"hosts": ["node2"]}, path), room=None, answers=[])
    bench.names = {"Title": ["a", "b"]}
    bench.printed = []
    bench.print = bench.printed.append
    bench.report.start(resume=True)
    bench.report.add(Case(key={"n": 2}, name="b", ranks=[0], metrics={"step_s": 2.0}))
    for name in ("mark", "conclude", "show", "print_table"):
        setattr(bench, name, partial(getattr(Benchmark, name), bench))
    return bench


COLUMNS = {"": lambda case: case.name, "s": lambda case: str(case.metrics["step_s"])}


def test_rows_of_before_are_marked_and_sentences_do_not_mix_them(resumed: Any) -> None:
    """Two rows of before and now: each has a sentence of its own."""

    def answer(cases: list[Case]) -> str:
        sure = f"{cases[0].name} is the fastest of {len(cases)}"
        return Disturbed(sure) if cases[0].name == "a" else sure

    with Benchmark.begin_table(resumed, "Title", COLUMNS, answer) as table:
        for case in resumed.report.cases:
            resumed.show(case, ["two modes"])
    when = "2026-11-28 03:12 UTC on node1"
    rows = [text for text in resumed.printed if text.splitlines()[-1].startswith(("a ", "b "))]
    first, second = rows
    assert first.splitlines()[-1] == f"a          3.0  # {when}"
    assert second == "b          2.0"
    assert resumed.answers == [
        f'measured {when}: disturbed: "a is the fastest of 1" cannot be; '
        "CPU use by other processes was not recorded",
        "b is the fastest of 1",
    ]
    resumed.print_table(COLUMNS, table.cases)
    rows = resumed.printed[-1].splitlines()[-2:]
    assert [row.split() for row in rows] == [["a", *when.split(), "3.0"], ["b", "now", "2.0"]]
    resumed.print_table(COLUMNS, table.cases[1:])
    assert "now" not in resumed.printed[-1]
    resumed.table = None  # as in p2p_matrix.py
    resumed.show(table.cases[0], [])
    assert resumed.printed[-1] == f"# a: measured {when}"


def test_a_mark_has_a_line_of_its_own_if_there_is_no_room() -> None:
    assert benchmark.marked("1M/2R  0.5", "", 20) == "1M/2R  0.5"
    assert benchmark.marked("head\n1M/2R  0.5", "then", 18) == "head\n1M/2R  0.5  # then"
    assert benchmark.marked("1M/2R  0.5", "then", 17) == "1M/2R  0.5\n# ^ then"
    assert benchmark.marked("All\nTrainer0\n", "then", None) == "All\nTrainer0  # then\n"


def test_a_case_that_was_not_checked_is_measured_again_to_check_it() -> None:
    """-c 0, then --resume without it."""
    unchecked = Case(key={}, ranks=[], check="skipped: -c 0")
    assert not benchmark.counts_as_done(unchecked, Mock(check=1))
    assert benchmark.counts_as_done(unchecked, Mock(check=0))
    assert benchmark.counts_as_done(Case(key={}, ranks=[], check="skipped: why"), Mock(check=1))
    assert benchmark.counts_as_done(Case(key={}, ranks=[]), object())  # type: ignore[arg-type]
    failed = Case(key={}, ranks=[], check="failed: why")
    assert not benchmark.counts_as_done(failed, Mock(check=0))
