"""common/watchdog.py: what it says of a hang."""

import json
import os
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore

from common import watchdog
from common.hang import behind_of, publish_verdict, read_verdict, verdict_of
from common.process import alive, start_time
from common.watchdog import _in_time


def state(rank: int, changes: int = 3, case: str = "resnet 1M/2G", **more: Any) -> dict[str, Any]:
    """In the case of the first attempt, inside it, unless `more` has another order."""
    phase = {"phase": f"step, block {changes}", "order": [1, 0, changes]}
    return {"rank": rank, "host": f"n{rank // 2}", "case": case} | phase | more


@pytest.mark.parametrize(
    ("states", "ranks"),
    [
        ([], []),
        ([state(0)], []),
        ([state(0), state(1)], []),
        ([state(0), state(1, 2), state(2)], [1]),
        ([state(0, 1), state(1, 2), state(2, 3)], [0, 1]),
        # ranks outside the case are neither ahead of those in it nor behind
        ([state(0), state(1), state(2, order=[1])], []),
        ([state(0), state(1, 2), state(2, order=[1])], [1]),
        # one that has not come to the end of the case, to the next one
        ([state(0, order=[1, 1, 1]), state(1), state(2, order=[1, 1, 1])], [1]),
        ([state(0, order=[1, 1, 1]), state(1, order=[2, 0, 4]), state(2, order=[2])], [0]),
        ([state(0, order=[0]), state(1)], [0]),
    ],
)
def test_behind(states: list[dict[str, Any]], ranks: list[int]) -> None:
    assert [found["rank"] for found in behind_of(states)] == ranks


def test_verdict() -> None:
    gone = {"rank": 3, "host": "n1", "case": "vgg", "phase": "gather", "order": [0]}
    unknown = {"rank": 4, "host": "?", "case": "before the start", "phase": ""}
    text = verdict_of(300, [gone, unknown], [state(0), state(1, 2), state(2)])
    gone_text = "does not answer (stopped, dead or out of reach); last seen in case"
    assert text.splitlines() == [
        "HANG: no progress for 300 s",
        f"rank 3 on n1 {gone_text} 'vgg', phase 'gather'",
        f"rank 4 on ? {gone_text} 'before the start', phase ''",
        "rank 1 on n0 did not arrive: in case 'resnet 1M/2G', phase 'step, block 2'",
        "rank 0 on n0 waits in case 'resnet 1M/2G', phase 'step, block 3'",
        "rank 2 on n1 waits in case 'resnet 1M/2G', phase 'step, block 3'",
    ]


def test_verdict_of_a_large_job() -> None:
    """Who waits is shortened to 64 lines; who did not arrive is not."""
    states = [state(rank, 2 if rank >= 100 else 3) for rank in range(200)]
    lines = verdict_of(60, [], states).splitlines()
    assert [line.split()[1] for line in lines if "did not arrive" in line] == [
        str(rank) for rank in range(100, 200)
    ]
    assert len([line for line in lines if " waits " in line]) == 64


def test_one_rank_makes_the_verdict_for_all() -> None:
    """Ranks 0 and 1 on n0, 2 and 3 on n1, 4 on n2; 0, 3 and 4 do not answer, 4 has said nothing."""
    store = HashStore()
    for rank in range(4):
        mine = state(rank, pid=100 + rank, started=str(rank))
        store.set(f"phase/{rank}", json.dumps(mine))
    for rank in (1, 2):
        store.set(f"answer/{rank}", "here")
    publish_verdict(store, 5, 60)
    text, speaks, silent = read_verdict(store, 1)
    assert speaks
    assert silent == [[100, "0"]]  # on its host
    assert [line.split()[1] for line in text.splitlines()[1:]] == ["0", "3", "4", "1", "2"]
    assert not store.check(["all read"])
    assert read_verdict(store, 2) == ("HANG", False, [[103, "3"]])
    assert store.check(["all read"])  # by all who answer, so that the store's host may end
    assert read_verdict(store, 0) == (text, False, [])  # for its report, should it wake


def test_nobody_answers() -> None:
    store = HashStore()
    publish_verdict(store, 2, 60)
    text, _, silent = read_verdict(store, 0)
    assert text.count("does not answer") == 2
    assert silent == []


def test_start_time_names_a_process() -> None:
    ticks = os.sysconf("SC_CLK_TCK")
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    with subprocess.Popen(["sleep", "60"]) as child:
        mine, its = int(start_time(os.getpid())), int(start_time(child.pid))
        assert its == int(start_time(child.pid))
        child.kill()
    assert mine <= its
    assert its / ticks == pytest.approx(uptime, abs=5)  # in ticks since the machine started


def test_start_time_whatever_the_name_of_the_process() -> None:
    name = Path("/proc/self/comm")
    before, plain = name.read_text(), start_time(os.getpid())
    try:
        name.write_text("a) S 1 2 (b")
        assert start_time(os.getpid()) == plain != ""
    finally:
        name.write_text(before.rstrip("\n"))


def test_start_time_of_no_process() -> None:
    with subprocess.Popen(["true"]) as child:
        pass
    assert start_time(child.pid) == ""


def test_alive() -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        started = start_time(child.pid)
        assert alive(child.pid, started)
        assert not alive(child.pid, started + "1")  # the pid is another's by now
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert not alive(child.pid, started)  # ended, though not yet reaped
    assert not alive(child.pid, started)


def test_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "GRACE_S", 0.2)
    over = threading.Event()

    def fail() -> None:
        raise RuntimeError("the store is gone")

    assert _in_time(lambda: 7) == 7
    assert _in_time(fail) is None
    assert _in_time(over.wait) is None  # one that does not answer
    over.set()
