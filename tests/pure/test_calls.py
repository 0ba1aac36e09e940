"""analysis/traces/calls.py: matching calls across ranks, and which rank the others wait for."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from analysis.traces.calls import lateness_by_rank, sentence
from tests.pure.traces import (
    GEMM,
    Events,
    collective,
    event,
    kernel,
    remarks,
    save_ranks,
    step,
    table,
)


def columns(*paths: str) -> dict[str, list[str]]:
    """`waits` and `late` of each rank in the table of groups."""
    rows = table(*paths)
    first = next(n for n, row in enumerate(rows) if row[:3] == ["group", "ranks", "rank"])
    last = next(n for n, row in enumerate(rows) if row[:2] == ["group", "collective"])
    return {row[-6]: row[-2:] for row in rows[first + 1 : last]}


def late_by_cost(rank: int) -> Events:
    """Rank 1's backward takes 30 ms longer. Rank 0 is 5 us late in nine small all-gathers."""
    events = []
    for number in range(3):
        start = 1000 + number * 50_000
        compute = 40_000 if rank else 10_000
        events += step(number, start - 20, 49_900) + kernel(GEMM, start, compute)
        end = start + 41_000
        events += collective("allreduce", start + compute, end - start - compute, 25_000_000)
        for call in range(9):
            begin = end + 300 * call + (0 if rank else 5)
            events += collective("allgather", begin, end + 300 * call + 45 - begin, 1024)
    return events


def test_the_late_rank_is_named_by_cost_and_not_by_count(tmp_path: Path) -> None:
    paths = save_ranks(tmp_path, late_by_cost(0), late_by_cost(1))
    assert columns(*paths) == {"0": ["30", "0.045"], "1": ["0.045", "30"]}
    # steps of 50, 50 and 41 + 9 * 0.3 - 0.3 + 0.045 = 43.445 ms have a mean of 47.815 ms
    cost = "30 ms of a 47.815 ms step (62.7%), for more than 5% in 3 of 3 steps"
    line = f"makes the other ranks wait {cost}; mostly in all_reduce of dp"
    assert remarks(*paths) == [f"# rank 1 {line}"]
    paths = save_ranks(tmp_path, late_by_cost(0), late_by_cost(1), hosts=["vm7", "vm8"])
    assert remarks(*paths) == [f"# rank 1 on vm8 {line}"]
    paths = save_ranks(tmp_path, late_by_cost(1), late_by_cost(1))
    assert columns(*paths) == {"0": ["0", "0"], "1": ["0", "0"]}
    assert remarks(*paths) == [NONE]


def test_lateness_is_relative_to_the_median_of_the_others() -> None:
    """The rank that arrives last has the shortest call."""
    assert lateness_by_rank({0: 31.0, 1: 1.0}) == {0: 0, 1: 30}
    # two of four ranks arrive 30 ms after the others: both are late
    assert lateness_by_rank({0: 31, 1: 1, 2: 1.5, 3: 31}) == {0: 0, 1: 30, 2: 29.5, 3: 0}
    # one early rank of three does not make the others late
    assert lateness_by_rank({0: 31, 1: 1, 2: 1}) == {0: 0, 1: 0, 2: 0}
    # of five ranks, the others of rank 0 have the lower median 4 (of 2 4 6 8)
    assert lateness_by_rank({0: 1, 1: 2, 2: 4, 3: 6, 4: 8}) == {0: 3, 1: 2, 2: 0, 3: 0, 4: 0}


def test_which_rank_is_named() -> None:
    """Steps of 100 ms. of_ranks: how many milliseconds the others wait for each rank."""
    for of_ranks, words in (
        # 5% of the step is not more than 5%
        ([(5, 5, 5), (0, 0, 0)], "no rank makes the other ranks wait for more than 5% of a step"),
        ([(6, 6, 6), (0, 0, 0)], "rank 0 makes the other ranks wait 6 ms of a 100 ms step (6.0%)"),
        # a call of another thread may be longer than the step
        ([(250, 250), (0, 0)], "rank 0 makes the other ranks wait 250 ms, longer than a 100 ms s"),
        # in most steps: 2 of 3, and not 1 of 2
        ([(9, 9, 0), (0, 0, 0)], "rank 0 makes the other ranks wait 6 ms of a 100 ms step (6.0%)"),
        ([(90, 0, 0), (0, 0, 0)], "no rank is late in most steps; the other ranks wait 30 ms of a"),
        ([(20, 0), (0, 0)], "the other ranks wait 10 ms of a 100 ms step (10.0%) for rank 0, in 1"),
        # a tie, and a rank that stands out by more than 5% of a step
        ([(20, 20), (16, 16)], "no rank stands out: the other ranks wait 20 ms of a 100 ms"),
        ([(20, 20), (9, 9)], "rank 0 makes the other ranks wait 20 ms of a 100 ms step"),
        # by more than that on average, but not in most steps
        ([(90, 9, 9), (9, 9, 9)], "no rank stands out: the other ranks wait 36 ms of a 100 ms"),
        # two of four
        (
            [(30, 30), (0, 0), (29, 29), (0, 0)],
            "the other ranks wait for 2 ranks: 30 ms of a 100 ms step (30.0%) for rank 0, 29 ms of",
        ),
    ):
        late = {rank: dict(zip("abc", ms, strict=False)) for rank, ms in enumerate(of_ranks)}
        lengths = {rank: dict.fromkeys(steps, 100.0) for rank, steps in late.items()}
        where = {rank: {"all_gather": 1, "all_reduce": 2} for rank in late}
        labels = {rank: f"rank {rank}" for rank in late}
        assert sentence(late, where, lengths, labels).startswith(words)


def window(late_ms: Iterable[float], calls: int = 1, first: int = 0, every: int = 1) -> Events:
    """Steps of 20 ms from number `first` on, each with a matmul and `calls` all-reduces, to the
    first of which this rank comes late. every: number of steps per all-reduce."""
    events = []
    for number, ms in enumerate(late_ms):
        start = 1000 + number * 20_000
        events += step(number + first, start - 20, 20_000)
        begin, length = start + 9000 + 1e3 * ms, 9000 - 1e3 * ms
        events += kernel(GEMM, start, begin - start)
        syncs = number % every == 0
        events += collective("allreduce", begin, length) if syncs else kernel(GEMM, begin, length)
        for call in range(1, calls):
            events += collective("allreduce", start + 18_000 + 300 * call, 250)
    return events


START = "# left out the first collectives of the traces, where profilers start: "
NONE = "# no rank makes the other ranks wait for more than 5% of a step"
IN_COLLECTIVES = NONE.replace("#", "# in collectives,")
LATE = "# rank 1 makes the other ranks wait 4"


def test_a_rank_that_is_late_where_profilers_start(tmp_path: Path) -> None:
    for late_ms, calls, line in (
        # one step: late in the first of 6 calls only, or in the only call
        ([8], 6, NONE),
        ([8], 1, "# which rank is late is unknown: no other"),
        # four steps: late in the first one, or 4 ms late in the others
        ([8, 0, 0, 0], 2, NONE),
        ([8, 4, 4, 4], 1, LATE),
        # always late in the first call of a step, which is not about the start
        ([4, 4, 4], 1, f"{LATE} ms of a 19.333 ms step (20.7%)"),
    ):
        ranks = [window([0] * len(late_ms), calls), window(late_ms, calls)]
        *first, last = remarks(*save_ranks(tmp_path, *ranks))
        assert first == [f"{START}the other ranks wait 8 ms for rank 1 there"] * (8 in late_ms)
        assert last.startswith(line)


def test_windows_that_overlap_and_steps_without_communication(tmp_path: Path) -> None:
    """Rank 1 is 4 ms late in both steps that were compared."""
    paths = save_ranks(tmp_path, window([0] * 4), window([4] * 4, first=2))
    assert columns(*paths) == {"0": ["4", "0"], "1": ["0", "4"]}
    line = f"{LATE} ms of a 20 ms step (20.0%), for more than 5% in 2 of 2 steps"
    assert remarks(*paths)[-1].startswith(line)
    # Gradient accumulation: 4 ms in every other step are 2 ms of a mean step.
    paths = save_ranks(tmp_path, window([0] * 4, every=2), window([4] * 4, every=2))
    assert columns(*paths) == {"0": ["2", "0"], "1": ["0", "2"]}


UNKNOWN = (
    "# for which rank the ranks wait in {} calls of recv and sendrecv is unknown: the traces do "
    "not contain or do not identify their sends"
)
SEND = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"


def stage(*messages: tuple[float, float, dict[str, Any]]) -> Events:
    """Steps of 40 ms: messages (start, duration, arguments), and an all-reduce at the end."""
    events = []
    for number in range(3):
        start = number * 40_000 + 1000
        events += step(number, start - 20, 40_000) + kernel(GEMM, start, 10)
        for at, length, args in messages:
            events += kernel(SEND, start + at, length, 33, **args)
        events += collective("allreduce", start + 39_700, 200, 1000)
    return events


def message(source: int, rank: int, name: str) -> dict[str, Any]:
    about = {"Collective name": name, "Process Group Name": "pp", "Src Rank": source}
    return about | {"Dst Rank": rank, "Process Group Ranks": "[0, 1, 2]", "Group size": 3}


def table_of_receives(*paths: str) -> list[list[str]]:
    rows = table(*paths)
    first = next(n for n, row in enumerate(rows) if row[:2] == ["rank", "receives/step"])
    return [row for row in rows[first + 1 :] if not row[0].startswith("#")]


def test_a_stage_waits_in_its_receive(tmp_path: Path) -> None:
    """Rank 1 receives from the beginning, rank 0 sends after 30 ms. Kernels have no arguments."""
    groups = [{"pg_name": "1", "pg_size": 2, "ranks": [0, 1]}]
    ranks = stage((30_010, 300, {})), stage((10, 30_300, {}))
    paths = save_ranks(tmp_path, *ranks, pg_config=groups)
    # steps of 40, 40 and 39.9 ms; 30.3 and 0.3 of 39.967 ms are 75.8% and 0.8%
    assert table_of_receives(*paths) == [
        ["0", "1", "0.3", "0.8", "0", "-"],
        ["1", "1", "30.3", "75.8", "30", "0"],
    ]
    assert remarks(*paths) == [
        "# rank 1 waits 30 ms of a 39.967 ms step (75.1%) in messages from rank 0",
        IN_COLLECTIVES,
    ]
    # rank 1's profiler started a step later: 30 ms in each of the two steps that both contain
    for one in ranks[1]:
        if number := one["name"].partition("#")[2]:
            one["name"] = f"ProfilerStep#{int(number) + 1}"
    assert remarks(*save_ranks(tmp_path, *ranks, pg_config=groups))[-3:] == [
        "# rank 1 waits 30 ms of a 40 ms step (75.0%) in messages from rank 0",
        UNKNOWN.format("2 of 6"),
        IN_COLLECTIVES,
    ]


def test_messages_that_state_their_ranks(tmp_path: Path) -> None:
    """Rank 1 waits 8 ms for rank 0, and rank 2 waits 19 ms for rank 1."""
    first, second = message(0, 1, "send"), message(1, 2, "send")
    received = [one | {"Collective name": "recv"} for one in (first, second)]
    paths = save_ranks(
        tmp_path,
        stage((8010, 1000, first)),
        stage((10, 9000, received[0]), (20_000, 1000, second)),
        stage((1000, 20_000, received[1])),
    )
    assert table_of_receives(*paths) == [
        ["0", "0", "0", "0.0", "0", "-"],
        ["1", "1", "9", "22.5", "8", "0"],
        ["2", "1", "20", "50.0", "19", "1"],
    ]
    ranks = [stage((10, 9000 * rank + 100, {})) for rank in range(3)]
    paths = save_ranks(tmp_path, *ranks, pg_config=[{"pg_name": "1", "ranks": [0, 1, 2]}])
    assert [row[-2:] for row in table_of_receives(*paths)] == [["-", "-"]] * 3
    lines = remarks(*paths)
    # 0.1, 9.1 and 18.1 ms of 40, 40 and 39.9 ms
    assert UNKNOWN.format("9 of 9") in lines
    assert "not compared: sendrecv (on average 22.8% of a step, 45.3% on rank 2)" in lines[-1]
    # a single trace with such kernels, which may be an all-to-all, says nothing about receives
    assert not any("receives/step" in row for row in table(paths[1]))


def gloo(*calls: tuple[float, float, dict[str, Any]]) -> Events:
    """Calls of gloo (start, duration, arguments and perhaps the name), each in a thread of its own,
    and a matmul."""
    events = [event("cpu_op", "aten::mm", 0, 200, 5)]
    for thread, (start, length, args) in enumerate(calls):
        args = {"name": "gloo:all_reduce"} | args
        events.append(event("user_annotation", args.pop("name"), start, length, thread, **args))
    return events


def sent(start: float, length: float, name: str = "send") -> tuple[float, float, dict[str, Any]]:
    return start, length, {"name": f"gloo:{name}"}


def received(start: float, length: float) -> tuple[float, float, dict[str, Any]]:
    return sent(start, length, "recv")


WAITS = "# rank {} waits 0.14 ms of a 0.2 ms step (70.0%) in messages "
TIMES = "include waiting for other ranks, which is known only for collectives and matched messages"
ON_AVERAGE = "recv (on average 45.0% of a step, 90.0% on rank 1)"


@pytest.mark.parametrize(
    ("of_0", "of_1", "lines"),
    [
        # rank 0 sends 140 us after rank 1 has begun to receive, or rank 1 receives as late
        ([sent(150, 20)], [received(10, 160)], [WAITS.format(1) + "from rank 0"]),
        ([sent(10, 160)], [received(150, 20)], [WAITS.format(0) + "to rank 1"]),
        # at the same time, a message in the other direction
        (
            [sent(150, 20), received(150, 20)],
            [received(10, 160), sent(10, 160)],
            [WAITS.format(1) + "from rank 0"],
        ),
        # an all-reduce of the same length on both ranks
        (
            [sent(150, 20), (175, 25, {})],
            [received(10, 160), (175, 25, {})],
            [WAITS.format(1) + "from rank 0", IN_COLLECTIVES],
        ),
        # no rank waits
        ([sent(150, 20)], [received(150, 20)], []),
        # two receives and a send cannot be matched: 160 + 20 of 200 us, and 4 us
        (
            [sent(150, 4)],
            [received(10, 160), received(175, 20)],
            [
                f"# times of recv, send {TIMES}",
                UNKNOWN.format("2 of 2"),
                f"# which ranks wait is unknown; not compared between ranks: {ON_AVERAGE}",
            ],
        ),
        # nor can receives without the trace of the rank that sends
        (
            [],
            [received(10, 160)],
            [f"# times of recv {TIMES}", UNKNOWN.format("1 of 1")],
        ),
    ],
)
def test_a_pipeline_of_gloo(
    of_0: list[Any], of_1: list[Any], lines: list[str], tmp_path: Path
) -> None:
    """Steps of 0.2 ms. The sentences agree on which messages were matched."""
    groups = [{"pg_name": "0", "pg_size": 2, "ranks": [0, 1]}]
    paths = save_ranks(tmp_path, gloo(*of_0), gloo(*of_1), pg_config=groups)
    assert remarks(*paths[not of_0 :]) == lines


def test_two_threads_of_gloo(tmp_path: Path) -> None:
    """Rank 0 waits in both, from 10 and from 20 us on: 90 us in all, not 90 + 80."""
    ranks = [gloo((a, 110 - a, {}), (b, 120 - b, {})) for a, b in ((10, 20), (100, 100))]
    assert columns(*save_ranks(tmp_path, *ranks)) == {"0": ["0.09", "0"], "1": ["0", "0.09"]}
    # Two threads of gloo start a large and a small all-reduce in another order on rank 1.
    ranks = []
    for sizes in ((1000, 10), (10, 1000)):
        shapes: list[dict[str, Any]] = [
            {"Input Dims": [[n]], "Input type": ["float"]} for n in sizes
        ]
        ranks.append(gloo((10, sizes[0], shapes[0]), (11, sizes[1], shapes[1])))
    assert columns(*save_ranks(tmp_path, *ranks)) == {"0": ["0", "0"], "1": ["0", "0"]}


def test_ranks_wait_in_custom_all_reduces(tmp_path: Path) -> None:
    """vLLM's kernel has no arguments in a trace. Rank 1 arrives 40 us later."""
    name = "void vllm::cross_device_reduce_1stage<float, 2>(vllm::RankData*)"
    ranks = [kernel(GEMM, 0, 50 + late) + kernel(name, 50 + late, 50 - late) for late in (0, 40)]
    assert columns(*save_ranks(tmp_path, *ranks)) == {"0": ["0.04", "0"], "1": ["0", "0.04"]}


def gathers(calls: int = 4, numbered: bool = True, windows: int = 0) -> Events:
    """Three steps of all-gathers of 9, 1, 9, 1 ms, or the last `calls`. windows: the first step."""
    events = []
    for number in range(3):
        start = 1000 + number * 50_000
        events += step(number, start - 20, 49_900)
        for call, length in list(enumerate((9000, 1000, 9000, 1000)))[-calls:]:
            seq: dict[str, Any] = {"Seq": 4 * (number + windows) + call, "Comms Id": 77}
            about = seq if numbered else {}
            at = start + 12_000 * call
            events += collective("_allgather_base", at, length, 100 * length, **about)
    return events


def test_calls_are_matched_by_seq(tmp_path: Path) -> None:
    paths = save_ranks(tmp_path, gathers(), gathers(3))
    assert columns(*paths) == {"0": ["0", "0"], "1": ["0", "0"]}
    # rank 0's steps take 50, 50 and 37 ms, of which the three calls of 9 ms were left out; those of
    # rank 1 take 50, 50 and 25 ms. 11 ms a step were compared: 33/137 and 33/125. 27/137 were not
    compared = "in the calls that were compared (25.2% of a step); not compared: all_gather "
    assert remarks(*paths) == [
        "# left out 3 calls of dp that some traces do not contain",
        f"{NONE} {compared}(on average 9.9% of a step, 19.7% on rank 0)",
    ]
    # rank 1's profiler started one step later: 8 of its calls are in the trace of rank 0
    paths = save_ranks(tmp_path, gathers(), gathers(windows=1))
    assert columns(*paths) == {"0": ["0", "0"], "1": ["0", "0"]}
    assert remarks(*paths)[0] == "# left out 8 calls of dp that some traces do not contain"
    paths = save_ranks(tmp_path, gathers(numbered=False), gathers(3, numbered=False))
    assert columns(*paths) == {"0": ["-", "-"], "1": ["-", "-"]}
    why = "the ranks have different numbers of calls; torch 2.12 and later number them (Seq)"
    assert f"# left out all_gather of dp in 3 steps: {why}" in remarks(*paths)
    paths = save_ranks(tmp_path, gathers(numbered=False), gathers(numbered=False))
    assert columns(*paths) == {"0": ["0", "0"], "1": ["0", "0"]}
