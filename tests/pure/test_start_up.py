"""benchmarks/workloads/start_up.py: times of a job's start-up."""

from benchmarks.workloads import start_up

HOSTS = [{"host": "a"}, {"host": "a"}, {"host": "b"}]
ROWS = [  # of ranks 0 and 2
    {"rendezvous_s": 3.2, "group_s": 0.01, "first_collective_s": 0.004},
    {"rendezvous_s": 0.2, "group_s": 0.03, "first_collective_s": 0.002},
]


def test_the_slowest_rank_of_each_step_is_named() -> None:
    """The shortest rendezvous counts, because all ranks wait for the last one."""
    by_rank = start_up.seconds_by_name(ROWS)
    assert by_rank["group_s"] == [0.01, 0.03]
    seconds = {"rendezvous_s": 0.2, "group_s": 0.03, "first_collective_s": 0.004}
    assert start_up.overall(by_rank) == seconds
    one_node = start_up.sentence(by_rank, [0, 2], {"num_nodes": 1, "ranks": HOSTS})
    assert one_node == (
        "start-up: 30.0 ms to create the group (rank 2 on b), first collective 4.00 ms (rank 0 on "
        "a)"
    )
    two_nodes = start_up.sentence(by_rank, [0, 2], {"num_nodes": 2, "ranks": HOSTS})
    last = "; rendezvous 200 ms, other ranks waited up to 3.20 s for rank 2 on b"
    assert two_nodes == one_node + last


def test_a_case_with_existing_groups_has_no_start_up() -> None:
    assert start_up.overall(start_up.seconds_by_name([{}, {}])) == {}
