"""common/groups.py: groups that outlive their case, and aborts that cannot hang."""

import gc
import re
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from common import groups as ours
from common.groups import Group, Groups, Job, abort_group, close_group, connect, open_group
from common.watchdog import Watchdog
from tests.process import ROOT


@pytest.fixture
def job() -> Iterator[Job]:
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield Job(0, 0, 1, 1, torch.device("cpu"), "gloo", store)
    dist.destroy_process_group()


OUTLIVES = """
import gc, weakref
import common.groups
import torch
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
torch.optim.SGD([torch.zeros(1)])
world = weakref.ref(dist.group.WORLD)
dist.destroy_process_group()
gc.collect()
print("alive" if world() else "gone")
"""


def test_no_default_argument_of_torch_keeps_the_control_group() -> None:
    """In a process of its own: what the first optimizer imports is imported once."""
    command = [sys.executable, "-c", OUTLIVES]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "gone\n", done.stderr


def test_all_ranks_meet_before_rank_0_waits_for_their_values(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else those that are early go on, and rank 0 alone waits for the late one: both look late."""
    called: list[str] = []
    for name in ("barrier", "gather"):
        real = getattr(dist, name)

        def call(*given: Any, name: str = name, real: Any = real) -> None:
            called.append(name)
            real(*given)

        monkeypatch.setattr(dist, name, call)
    assert ours.gather(1) == [1]
    assert called == ["barrier", "gather", "gather"]


@pytest.mark.parametrize(("value", "messages"), [("max-seconds", 1), ("x" * 5000, 2)])
def test_a_small_value_is_one_message(
    value: str, messages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the group's first rank sends is what another rank receives."""
    sent: list[torch.Tensor] = []
    monkeypatch.setattr(dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(dist, "broadcast", lambda x, group_src, group: sent.append(x.clone()))
    assert ours.broadcast(value, None) == value
    assert len(sent) == messages
    monkeypatch.setattr(dist, "get_rank", lambda group: 1)
    monkeypatch.setattr(dist, "broadcast", lambda x, group_src, group: x.copy_(sent.pop(0)))
    assert ours.broadcast(None, None) == value


@pytest.mark.parametrize("value", [None, 1, "x" * 5000, [{"rank": 0}, (1.5, None)]])
def test_what_is_gathered_and_shared(job: Job, value: Any) -> None:
    assert ours.gather(value) == [value]
    assert ours.share(value) == value


def test_the_next_case_takes_the_groups_again(job: Job) -> None:
    groups = Groups(job)
    first, is_new = groups.take((0,), None)
    assert first is not None
    assert is_new
    groups.give_back((0,), None, failed=False)
    assert groups.take((0,), [[0]]) == (first, False)  # one team of all ranks is the same set
    dist.all_reduce(torch.ones(1), group=first.test)
    groups.give_back((0,), None, failed=True)
    again, is_new = groups.take((0,), None)
    assert is_new
    assert again is not first
    with pytest.raises(ValueError, match="not initialized"):
        dist.get_backend(first.test)
    groups.close_all()
    assert not groups.kept


def test_the_set_that_was_not_used_for_longest_goes(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[Any] = []
    world: Any = dist.group.WORLD
    monkeypatch.setattr(ours, "open_group", lambda ranks, job, teams: Group(ranks, world, world))
    monkeypatch.setattr(ours, "close_group", lambda group, failed: closed.append(group.ranks))
    groups = Groups(job)
    for size in (1, 2, 3, 4, 1, 5):
        groups.take(tuple(range(size)), None)
    assert closed == [(0, 1)]
    _, is_new = groups.take((0,), None)
    assert not is_new
    _, is_new = groups.take((0, 1, 2, 3), [[0, 1], [2, 3]])  # other teams are another set
    assert is_new


def test_a_kept_set_keeps_nothing_of_the_workload(job: Job) -> None:
    groups = Groups(job)
    group, _ = groups.take((0,), None)
    assert group is not None
    gc.disable()
    model = DistributedDataParallel(nn.Linear(2, 2), process_group=group.test)
    model(torch.ones(1, 2)).sum().backward()
    more: Any = dist.new_group([0])
    group.more.append(more)
    weight = weakref.ref(model.module.weight)
    cycle: list[Any] = [model]
    cycle.append(cycle)  # only the garbage collector frees it, as it does CUDA graphs in a cycle
    del model, cycle
    groups.give_back((0,), None, failed=False)
    gc.enable()
    assert weight() is None
    assert not group.more
    with pytest.raises(ValueError, match="not initialized"):
        dist.get_backend(more)
    groups.close_all()


class WaitsForOthers:
    """A group whose abort ends only when all groups are being aborted, as NCCL's (issue 1013)."""

    def __init__(self, barrier: threading.Barrier) -> None:
        self.barrier = barrier

    def abort(self) -> None:
        self.barrier.wait()


def test_no_abort_waits_for_another_groups_kernels() -> None:
    barrier = threading.Barrier(3, timeout=5)
    test, *more = (WaitsForOthers(barrier) for _ in range(3))
    abort_group(Group((0,), test, None, more))  # type: ignore[arg-type]
    assert not barrier.broken


class AbortsOnce:
    """A group that cannot bear two aborts at the same time, as NCCL's of torch 2.15."""

    def __init__(self) -> None:
        self.aborting, self.aborts, self.met = threading.Lock(), 0, False

    def abort(self) -> None:
        self.aborts += 1
        if not self.aborting.acquire(blocking=False):
            self.met = True
            return
        threading.Event().wait(0.05)  # as long as the other thread needs to get here
        self.aborting.release()
        raise RuntimeError("NCCL error")


def test_no_two_threads_abort_one_group() -> None:
    """Who comes second waits until the abort is over."""
    test = AbortsOnce()
    group = Group((0,), test, None)  # type: ignore[arg-type]
    still_aborting: list[bool] = []

    def abort() -> None:
        abort_group(group)
        still_aborting.append(test.aborting.locked())

    threads = [threading.Thread(target=abort) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert test.aborts == 1
    assert not test.met
    assert still_aborting == [False, False]


MAKES_GROUPS = re.compile(
    r"(.*)\n.*\b(?:new_group|new_subgroups\w*|split_group|init_device_mesh)\("
)


def test_every_group_within_a_case_is_made_after_a_rendezvous() -> None:
    files = [*ROOT.glob("benchmarks/*.py"), *ROOT.glob("common/**/*.py")]
    before = [
        line.strip()
        for path in files
        if path.name != "groups.py"  # it makes them between cases, where all ranks meet anyway
        for line in MAKES_GROUPS.findall(path.read_text())
    ]
    assert before == ["rendezvous(group)"] * 4


def test_groups_are_aborted_that_a_failed_case_makes_later() -> None:
    """At the watchdog's next look, which need not be at a change in the store."""
    first, later, next_case = AbortsOnce(), AbortsOnce(), AbortsOnce()
    group: Any = Group((0,), first, None)  # type: ignore[arg-type]
    failed = {"failed/1"}
    watched = Mock(check=lambda keys: failed.issuperset(keys))
    watchdog: Any = Mock(case=1, failed_case=0, group=group, watched=watched)
    Watchdog._abort_failed(watchdog, changed=False)
    assert first.aborts == 0
    Watchdog._abort_failed(watchdog, changed=True)
    group.more.append(later)
    Watchdog._abort_failed(watchdog, changed=False)
    Watchdog._abort_failed(watchdog, changed=False)
    assert (first.aborts, later.aborts) == (1, 1)
    watchdog.case, watchdog.group = 2, Group((0,), next_case, None)  # type: ignore[arg-type]
    Watchdog._abort_failed(watchdog, changed=True)
    assert next_case.aborts == 0


class Graph:
    """Stands for a CUDA graph."""


def test_graphs_in_a_cycle_are_gone_before_the_abort(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL's abort waits as long as graphs of the communicator live."""
    graph: Any = Graph()
    graph.itself, alive = graph, weakref.ref(graph)
    del graph
    control: Any = dist.new_group([0])
    test = Mock(abort=lambda: seen.append(alive()))
    seen: list[Any] = []
    monkeypatch.setattr(ours, "abort_process_group", lambda tested: None)
    gc.disable()  # as within a case
    close_group(Group((0,), test, control), failed=True)
    gc.enable()
    assert seen == [None]


def test_an_error_that_comes_when_a_group_is_closed_ends_no_run(
    job: Job, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """NCCL reports it in whatever is called next. The case is over and written by then."""
    groups = Groups(job)
    group, _ = groups.take((0,), None)
    assert group is not None
    group.more.append(Mock())

    def destroy(group: Any) -> None:
        raise RuntimeError("NCCL communicator was aborted\nC++ CapturedTraceback:")

    with monkeypatch.context() as patched:
        patched.setattr(dist, "destroy_process_group", destroy)
        groups.give_back((0,), None, failed=False)
    assert not group.more
    line = "rank 0, closing a group: RuntimeError: NCCL communicator was aborted\n"
    assert capfd.readouterr().err == line
    assert groups.take((0,), None) == (group, False)
    groups.close_all()


def test_a_group_that_torch_has_forgotten_ends_no_run(job: Job) -> None:
    """NCCL's abort of another group may have taken it along."""
    control: Any = dist.new_group([0])
    test: Any = dist.new_group([0])
    dist.destroy_process_group(test)
    close_group(Group((0,), test, control), failed=True)
    with pytest.raises(ValueError, match="not initialized"):
        dist.get_backend(control)


def test_torch_ends_a_group_under_test_some_time_after_the_watchdog(job: Job) -> None:
    """The control group of a case waits for as long as it takes."""
    timed = replace(job, timeout=timedelta(seconds=40))
    group = open_group((0,), timed)
    assert group is not None
    connect(group.test, timed)
    cpu = torch.device("cpu")
    limits = [g._get_backend(cpu).options._timeout for g in (group.test, group.control)]
    assert limits == [timedelta(seconds=40), ours.FOREVER]
    close_group(group)


def test_an_abort_that_raises_ends_no_run(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """All groups are aborted first, then each is forgotten, whatever another one's abort says."""
    forgotten: list[Any] = []

    def abort(group: Any) -> None:
        forgotten.append(group.aborts)
        raise RuntimeError("NCCL error")

    monkeypatch.setattr(ours, "abort_process_group", abort)
    control: Any = dist.new_group([0])
    group = Group((0,), AbortsOnce(), control, [AbortsOnce()])  # type: ignore[arg-type,list-item]
    close_group(group, failed=True)
    assert forgotten == [1, 1]
    with pytest.raises(ValueError, match="not initialized"):
        dist.get_backend(control)
