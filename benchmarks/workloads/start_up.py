"""Start-up times of a job: rendezvous, creation of the first group under test, first collective."""

from collections.abc import Mapping, Sequence
from typing import Any

from common.groups import Group, Job
from common.stats import show_seconds

NAMES = ("rendezvous_s", "group_s", "first_collective_s")
Seconds = Mapping[str, Sequence[float]]  # by name, one number per rank


def start_up_of(job: Job, group: Group) -> dict[str, float]:
    """The seconds of this rank by name; empty if the case reuses an existing group."""
    if not group.start_up_s:
        return {}
    steps = (job.rendezvous_s, group.start_up_s["group"], group.start_up_s["first_collective"])
    return dict(zip(NAMES, steps, strict=True))


def seconds_by_name(rows: Sequence[Mapping[str, float]]) -> Seconds:
    """Transpose the results of `start_up_of`. rows: one per rank."""
    return {name: [row[name] for row in rows] for name in NAMES if name in rows[0]}


def overall(by_rank: Seconds) -> dict[str, float]:
    """The maximum over ranks; for the rendezvous the minimum: all ranks wait for the last one."""
    return {name: (min if name == NAMES[0] else max)(times) for name, times in by_rank.items()}


def sentence(by_rank: Seconds, ranks: Sequence[int], environment: dict[str, Any]) -> str:
    """Return `start-up: 12.3 ms to create the group (rank 1 on a), first collective 4.50 ms (rank 0
    on a)`: of the slowest of these ranks; with several nodes the rendezvous, too."""
    times, slowest = {}, {}
    for name, seconds in overall(by_rank).items():
        rank = ranks[by_rank[name].index(seconds)]
        times[name] = show_seconds(seconds)
        slowest[name] = f"rank {rank} on {environment['ranks'][rank]['host']}"
    first = f"first collective {times['first_collective_s']} ({slowest['first_collective_s']})"
    words = f"start-up: {times['group_s']} to create the group ({slowest['group_s']}), {first}"
    if environment["num_nodes"] == 1:
        return words
    waited = show_seconds(max(by_rank["rendezvous_s"]))
    last = f"other ranks waited up to {waited} for {slowest['rendezvous_s']}"
    return f"{words}; rendezvous {times['rendezvous_s']}, {last}"
