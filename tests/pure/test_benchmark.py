"""What Benchmark does around a case, without a job."""

import fcntl
import gc
import os
import pty
import struct
import termios
import weakref
from typing import Any
from unittest.mock import Mock

import pytest

from common import benchmark
from common.benchmark import Benchmark
from common.groups import Group
from common.report import Case
from common.stats import Disturbed
from common.table import metric
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

    def build(key: dict[str, Any], group: Group) -> Any:
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
    others = "other programs take 0.9 of 2 cores of vm"
    assert benchmark.with_cause(sure, others) == sure
    shown = benchmark.with_cause(Disturbed(sure), others)
    assert shown == f'disturbed: "{sure}" cannot be; {others}'
    assert benchmark.with_cause(Disturbed(sure), "").endswith("be; nobody else took the cores")


@pytest.mark.parametrize(("room", "columns"), [(None, "ab"), (4, "a")])
def test_a_second_table_is_cut_like_the_first(room: int | None, columns: str) -> None:
    printed: list[str] = []
    bench: Any = Mock(room=room, print=printed.append)
    case = Case(key={}, ranks=[0], metrics={"a": 1.0, "b": 2.0})
    Benchmark.print_table(bench, {"a": metric("a"), "b": metric("b")}, [case], "Cost")
    assert printed[0].startswith("\nCost\n\na")
    assert printed[0].splitlines()[3].split() == list(columns)


def test_a_sentence_is_folded_on_a_terminal() -> None:
    sentence = "DDP adds 16.2 ms to a step, which takes 76.1 ms"
    assert benchmark.folded(sentence, None) == f"# {sentence}"
    lines = "# DDP adds 16.2 ms to a step,\n#   which takes 76.1 ms"
    assert benchmark.folded(sentence, 32) == lines
    title = "2 trainers, 1 server\nrpc threads 2"
    assert benchmark.folded(title, 16, "") == "2 trainers, 1\n  server\nrpc threads 2"
    assert benchmark.folded(title, None, "") == title


@pytest.mark.parametrize(
    ("columns", "asked", "width"), [(80, "", 80), (0, "", None), (0, "100", 100)]
)
def test_a_terminal_without_a_size_has_all_columns(
    columns: int, asked: str, width: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As mpirun's ranks have one, whose output may go to a file."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    monkeypatch.setenv("COLUMNS", asked)
    with open(theirs, "w") as terminal:
        monkeypatch.setattr("sys.stdout", terminal)
        monkeypatch.setattr("sys.__stdout__", terminal)
        assert benchmark.terminal_width() == width
        monkeypatch.undo()
    os.close(ours)
