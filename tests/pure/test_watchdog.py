"""common/watchdog.py: what a roll call says of few ranks and of many."""

from typing import Any

from common.watchdog import LATE, SILENT, WAITS, fates, ranks_by_fate


def state(rank: int, phase: int = 3, newest: Any = ("g", 7)) -> dict[str, Any]:
    return {"where": f"rank {rank}", "order": [1, phase], "newest": newest}


def test_few_ranks_have_a_line_each() -> None:
    states = [state(0), state(1, newest=None), state(2, phase=2), state(3, newest=("g", 6))]
    outside = state(4, phase=0)
    assert fates(ranks_by_fate([*states, outside])).splitlines() == [
        f"rank 1: {SILENT}",
        f"rank 2: {LATE}",
        f"rank 3: {LATE}",
        f"rank 0: {WAITS}",
        f"rank 4: {WAITS}",
    ]


def test_many_ranks_are_counted() -> None:
    states = [state(rank) for rank in range(1024)]
    for rank in (7, 8):
        states[rank]["newest"] = None
    for rank in range(100, 120):
        states[rank]["order"] = [1, 2]
    lines = fates(ranks_by_fate(states)).splitlines()
    assert lines[:3] == [f"rank 7: {SILENT}", f"rank 8: {SILENT}", f"rank 100: {LATE}"]
    assert lines[17:] == [
        f"rank 115: {LATE}",
        f"and 4 more ranks: {LATE}",
        "1,002 ranks wait, the first of them:",
        f"rank 0: {WAITS}",
    ]
