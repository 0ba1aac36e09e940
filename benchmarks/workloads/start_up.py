"""How long a job takes to start: its rendezvous, the first group under test, a first collective."""

from collections.abc import Mapping, Sequence
from typing import Any

from common.groups import Group, Job
from common.report import show_seconds

NAMES = ("rendezvous_s", "group_s", "first_collective_s")
Seconds = Mapping[str, Sequence[float]]  # by name, of each rank


def start_up_of(job: Job, group: Group) -> dict[str, float]:
    """The seconds of this rank by name; empty where the case took a group that was there."""
    if not group.start_up_s:
        return {}
    steps = (job.rendezvous_s, group.start_up_s["group"], group.start_up_s["first_collective"])
    return dict(zip(NAMES, steps, strict=True))


def seconds_by_name(rows: Sequence[Mapping[str, float]]) -> Seconds:
    """rows: of the ranks, what `start_up_of` returned."""
    return {name: [row[name] for row in rows] for name in NAMES if name in rows[0]}


def in_all(by_rank: Seconds) -> dict[str, float]:
    """The slowest rank's seconds; of the rendezvous the least, as all wait for the last rank."""
    return {name: (min if name == NAMES[0] else max)(times) for name, times in by_rank.items()}


def sentence(by_rank: Seconds, ranks: Sequence[int], environment: dict[str, Any]) -> str:
    """`start-up: 12.3 ms to make the group (rank 1 on a), first collective 4.50 ms (rank 0 on a)`:
    the slowest rank of each. On several nodes also the rendezvous. ranks: of the case."""
    overall = in_all(by_rank)
    took, who = {}, {}
    for name, seconds in overall.items():
        rank = ranks[by_rank[name].index(seconds)]
        took[name] = show_seconds(seconds)
        who[name] = f"rank {rank} on {environment['ranks'][rank]['host']}"
    first = f"first collective {took['first_collective_s']} ({who['first_collective_s']})"
    words = f"start-up: {took['group_s']} to make the group ({who['group_s']}), {first}"
    if environment["num_nodes"] == 1:
        return words
    waited = show_seconds(max(by_rank["rendezvous_s"]))
    last = f"others waited up to {waited} for {who['rendezvous_s']}"
    return f"{words}; rendezvous {took['rendezvous_s']}, {last}"
