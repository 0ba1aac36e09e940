"""What a job's start took, worked out by hand."""

from benchmarks.workloads import start_up

HOSTS = [{"host": "a"}, {"host": "a"}, {"host": "b"}]
ROWS = [  # of ranks 0 and 2
    {"rendezvous_s": 3.2, "group_s": 0.01, "first_collective_s": 0.004},
    {"rendezvous_s": 0.2, "group_s": 0.03, "first_collective_s": 0.002},
]


def test_the_slowest_rank_of_each_step_is_named() -> None:
    """Of the rendezvous the least counts: all wait for the rank that comes last."""
    by_rank = start_up.seconds_by_name(ROWS)
    assert by_rank["group_s"] == [0.01, 0.03]
    seconds = {"rendezvous_s": 0.2, "group_s": 0.03, "first_collective_s": 0.004}
    assert start_up.in_all(by_rank) == seconds
    one_node = start_up.sentence(by_rank, [0, 2], {"num_nodes": 1, "ranks": HOSTS})
    assert one_node == (
        "start-up: 30.0 ms to make the group (rank 2 on b), first collective 4.00 ms (rank 0 on a)"
    )
    two_nodes = start_up.sentence(by_rank, [0, 2], {"num_nodes": 2, "ranks": HOSTS})
    last = "; rendezvous 200 ms, others waited up to 3.20 s for rank 2 on b"
    assert two_nodes == one_node + last


def test_a_case_that_took_groups_that_were_there_tells_nothing() -> None:
    assert start_up.in_all(start_up.seconds_by_name([{}, {}])) == {}
