"""common/groups.py: groups that are kept between cases, and aborts that cannot hang."""

import gc
import os
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from time import sleep
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from common import groups as ours
from common.errors import LostPeer
from common.groups import Group, GroupCache, Job
from harness.observe.watchdog import Watchdog


@pytest.fixture
def job() -> Iterator[Job]:
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    world: Any = dist.group.WORLD
    yield Job(0, 0, 1, 1, torch.device("cpu"), "gloo", store, world)
    dist.destroy_process_group()


def group_of(test: Any, *more: Any, control: Any = None) -> Group:
    return Group((0,), test, control, list(more))


def test_what_gloo_prints_while_it_creates_a_group_is_discarded(
    capfd: pytest.CaptureFixture[str],
) -> None:
    for backend, seen in (("gloo", "before after"), ("nccl", "before in after")):
        print("before", end=" ")
        with ours.silenced(backend):
            os.write(1, b"in ")
        print("after")
        assert capfd.readouterr().out == f"{seen}\n"


def test_a_closed_stdout_prevents_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its number is closed, the file is closed, or there was none at the start."""
    for error in (OSError, ValueError, AttributeError):
        monkeypatch.setattr(os, "dup", Mock(side_effect=error))
        with ours.silenced("gloo"):
            pass


def test_no_rank_leaves_a_gather_before_all_have_arrived(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch first all-gathers the sizes: early ranks wait, so that only the late one looks late."""
    calls = Mock()
    for name in ("all_gather", "gather"):
        calls.attach_mock(Mock(wraps=getattr(dist.distributed_c10d, name)), name)
        monkeypatch.setattr(dist.distributed_c10d, name, getattr(calls, name))
    value = ["x" * 5000, {"rank": (0, None)}]
    assert job.gather(value) == [value]
    assert [call[0] for call in calls.method_calls] == ["all_gather", "gather"]


def test_a_lost_peer_is_an_exception_of_its_own(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """In collectives of the job, not in those of a case, where it fails the case."""
    lost = Mock(side_effect=RuntimeError("Connection closed by peer\nC++ frames"))
    for name in ("gather_object", "broadcast_object_list", "barrier"):
        monkeypatch.setattr(ours.dist, name, lost)
    for call in (lambda: job.gather(1), lambda: job.broadcast(1), job.barrier):
        with pytest.raises(LostPeer, match="lost a peer: Connection closed by peer"):
            call()
    with pytest.raises(RuntimeError, match="Connection closed"):
        group_of(None).broadcast(1)


def test_the_groups_of_the_last_four_sets_are_kept(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing: Any = None

    def open_group(ranks: tuple[int, ...], *_: object) -> Group:
        return Group(ranks, nothing, nothing, start_up_s={"group": 0.1})

    monkeypatch.setattr(ours, "open_group", open_group)
    monkeypatch.setattr(ours, "close_group", closed := Mock())
    groups = GroupCache(job)

    def is_new(*ranks: int) -> bool:
        group = groups.acquire(ranks, (ranks,))
        assert group
        return bool(group.start_up_s)

    assert [is_new(*range(size)) for size in (1, 2, 3, 4, 1, 5)] == [True] * 4 + [False, True]
    groups.release((0,), ((0,),), failed=False)
    assert not is_new(0)
    groups.release((0,), ((0,),), failed=True)
    assert is_new(0)
    # the least recently used set, and that of a failed case
    assert [call.args[0].ranks for call in closed.call_args_list] == [(0, 1), (0,)]


def test_no_abort_waits_for_another_groups_kernels() -> None:
    """NCCL's abort ends only when all groups are being aborted (NVIDIA/nccl#1013)."""
    barrier = threading.Barrier(3, timeout=500)
    ours.abort_group(group_of(*(Mock(abort=barrier.wait) for _ in range(3))))
    assert not barrier.broken


def test_no_two_threads_abort_one_group() -> None:
    """NCCL in torch 2.15 does not support it: the second one waits until the abort has ended."""
    events: list[str] = []

    def abort() -> None:
        events.append("begins")
        sleep(0.05)  # long enough for the other thread to get here
        events.append("ends")

    group = group_of(Mock(abort=abort))

    def abort_group(_: int) -> None:
        ours.abort_group(group)
        events.append("over")

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(abort_group, range(2)))
    assert events == ["begins", "ends", "over", "over"]


def test_groups_that_a_failed_case_creates_later_are_aborted() -> None:
    """They are aborted at the watchdog's next poll, even without a change in the store."""
    first, later = Mock(), Mock()
    watched = Mock(check=lambda keys: keys == ["failed/1"])
    watchdog: Any = Mock(case=1, failed_case=0, group=group_of(first), watched=watched)
    Watchdog._abort_failed(watchdog, changed=False)
    assert first.abort.call_count == 0
    Watchdog._abort_failed(watchdog, changed=True)
    watchdog.group.extra.append(later)
    for _ in range(2):
        Watchdog._abort_failed(watchdog, changed=False)
    assert (first.abort.call_count, later.abort.call_count) == (1, 1)
    watchdog.case, watchdog.group = 2, group_of(next_case := Mock())
    Watchdog._abort_failed(watchdog, changed=True)
    assert next_case.abort.call_count == 0


class Graph:
    """Stands for a CUDA graph in a reference cycle, which only the garbage collector frees."""

    def __init__(self) -> None:
        self.itself = self


@pytest.mark.parametrize("failed", [False, True])
def test_graphs_in_a_cycle_are_freed_before_groups_are_closed(
    failed: bool, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL's destroy and abort wait until all graphs of the communicator are freed."""
    alive: list[Graph | None] = []
    gc.disable()  # as within a case
    graph = weakref.ref(Graph())

    def look(*_: object) -> None:
        alive.append(graph())

    monkeypatch.setattr(ours, "destroy", look)
    monkeypatch.setattr(dist.distributed_c10d, "_abort_process_group", look)
    ours.close_group(group_of(Mock(abort=look), Mock()), failed)
    gc.enable()
    assert alive
    assert not any(alive)


def test_errors_when_a_group_is_closed_do_not_end_the_run(
    job: Job, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """NCCL raises it in the next call, when the case has already been written."""
    error = RuntimeError("NCCL communicator was aborted\nC++ CapturedTraceback:")
    monkeypatch.setattr(ours.dist, "destroy_process_group", Mock(side_effect=error))
    ours.close_extra(group_of(None, Mock()))
    monkeypatch.undo()
    line = "rank 0, closing a group: RuntimeError: NCCL communicator was aborted"
    assert caplog.messages == [line]
    # NCCL's abort of another group may have destroyed it.
    gone: Any = dist.new_group([0])
    control: Any = dist.new_group([0])
    dist.destroy_process_group(gone)
    ours.close_group(group_of(gone, control=control), failed=True)
    with pytest.raises(ValueError, match="not initialized"):
        dist.get_backend(control)
    # All groups are aborted first, then each is destroyed, even if another abort raises.
    forget = Mock(side_effect=RuntimeError("NCCL error"))
    monkeypatch.setattr(dist.distributed_c10d, "_abort_process_group", forget)
    test, more = Mock(), Mock()
    control = dist.new_group([0])
    test.abort.side_effect = RuntimeError("NCCL error")
    ours.close_group(group_of(test, more, control=control), failed=True)
    assert more.abort.call_count == 1
    assert [call.args for call in forget.call_args_list] == [(more,), (test,)]
    with pytest.raises(ValueError, match="not initialized"):
        dist.get_backend(control)


def test_the_time_limit_of_a_group_is_longer_than_that_of_the_watchdog(job: Job) -> None:
    """The control group of a case has no time limit."""
    timed = replace(job, timeout=timedelta(seconds=40), control_timeout=timedelta(days=30))
    group = ours.open_group((0,), timed, ((0,),))
    assert group
    ours.connect(group.workload, timed)
    cpu = torch.device("cpu")
    limits = [g._get_backend(cpu).options._timeout for g in (group.workload, group.control)]
    assert limits == [timedelta(seconds=40), timedelta(days=30)]
    ours.close_group(group)
