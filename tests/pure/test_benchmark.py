"""What Benchmark does around a case, without a job."""

import gc
import weakref
from typing import Any
from unittest.mock import Mock

import pytest

from common import benchmark
from common.benchmark import Benchmark
from common.groups import Group
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
