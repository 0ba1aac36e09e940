"""replay.py as its user runs it; tests/pure/test_replay.py has what it reads and computes."""

import json
import math
import pickle
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SCRIPT = "benchmarks/replay.py"
SHORT = ("--iters", "6", "--warmup-iters", "1")


def recording(**more: Any) -> dict[str, Any]:
    """An all-reduce of a world of one."""
    entry = {
        **{"profiling_name": "gloo:all_reduce", "process_group": ["0", "default_pg"]},
        **{"collective_seq_id": 1, "input_sizes": [[8]], "output_sizes": [[8]]},
        **{"input_dtypes": ["Float"], "output_dtypes": ["Float"], "time_created_ns": 5},
    }
    return {"world_size": 1, "groups": {"0": [0]}, "entries": [entry | more]}


def recorded(folder: Path) -> tuple[int, float]:
    """Operations of all ranks, and bytes of a rank in a step: the larger of in and out."""
    operations, size = 0, 0
    for path in folder.iterdir():
        trace = json.loads(path.read_text())
        for entry in trace["entries"]:
            if entry["time_created_ns"] >= trace["started_ns"]:
                operations += 1
                size += 4 * max(
                    sum(map(math.prod, entry[name])) for name in ("input_sizes", "output_sizes")
                )
    return operations, size / len(list(folder.iterdir())) / trace["steps"]


@pytest.mark.smoke
@pytest.mark.oldest
@pytest.mark.parametrize("job", [(), ("--ddp",)], ids=["fsdp2 x tp", "ddp"])
def test_a_job_is_recorded_and_replayed(
    job: tuple[str, ...], bench: Callable[..., Any], start: Callable[..., Any], tmp_path: Path
) -> None:
    """All of it: the operations and the bytes that the flight recorder has, and it again."""
    folder = tmp_path / "a trace"
    process = start("examples/record_collectives.py", str(folder), *job, ranks=4)
    assert process.wait(180) == 0, process.err
    operations, size = recorded(folder)
    run = bench(SCRIPT, str(folder), *SHORT, ranks=4)
    assert run.status == 0, run.err
    (case,) = run.report.cases
    assert case.check == "passed"
    assert operations > 0
    assert run.out.splitlines()[-1] == f"# not replayed: 0 of {operations}"
    assert case.metrics["step_bytes"] == pytest.approx(size)
    groups = Counter(row["group"] for row in case.metrics["operations"])
    assert set(groups) == ({"default_pg"} if job else {"mesh_dp", "mesh_tp"})
    assert len(case.samples_s) == 2 + sum(groups.values())
    assert case.metrics["with_gaps_p50_s"] > case.metrics["back_to_back_p50_s"]
    again = bench(SCRIPT, str(folder), *SHORT, "--resume", ranks=4)
    assert again.status == 0, again.err
    assert again.out.splitlines()[-4:] == run.out.splitlines()[-4:]


@pytest.mark.smoke
def test_what_cannot_be_replayed_is_named(bench: Callable[..., Any], tmp_path: Path) -> None:
    """Rank 0 has a group of its own, too; rank 1 an operation that rank 0 has not recorded."""
    trace = recording() | {"world_size": 2, "groups": {"0": [0, 1], "1": [0]}}
    (first,) = trace["entries"]
    alone = first | {"process_group": ["1", "own"]}
    unlabelled = first | {"process_group": ["9", "other"]}
    odd = first | {"profiling_name": "gloo:sparse_all_reduce", "collective_seq_id": 2}
    missed = first | {"collective_seq_id": 3}
    for rank, entries in enumerate([[first, alone, odd, unlabelled], [first, missed]]):
        (tmp_path / f"fr_{rank}.json").write_text(json.dumps(trace | {"entries": entries}))
    run = bench(SCRIPT, str(tmp_path), *SHORT, "--scale-size", "0.5", ranks=2)
    assert run.status == 0, run.err
    assert run.out.splitlines()[-4:] == [
        "# 1 x sparse_all_reduce of default_pg: this operation is not known",
        "# 1 x all_reduce of other: the ranks of its group are not recorded",
        "# 1 x all_reduce of default_pg: not recorded on every rank of its group",
        "# not replayed: 3 of 6",
    ]
    rows = run.report.cases[0].metrics["operations"]
    assert [(row["group"], row["group_ranks"]) for row in rows] == [("default_pg", 2), ("own", 1)]
    assert [(row["size_bytes"], row["calls"]) for row in rows] == [(16, 1), (16, 1)]


class Code:
    def __reduce__(self) -> Any:
        return print, ("code of a recording runs",)


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("content", "text"),
    [
        (json.dumps(recording())[:99].encode(), "fr_0.json: expected a rank's recording, got JSON"),
        (pickle.dumps(Code()), "it asks for the class builtins.print"),
        (recording(input_sizes=[[-8]]), "'-8' where a whole number from 0 on belongs"),
        (recording(input_sizes=[[2**38]], output_sizes=[[2**38]]), "the buffers need 2,199,"),
        (recording() | {"world_size": 4}, "recorded on 4 ranks, and this job has 1; e.g. torchrun"),
        (None, "has no recording of rank 0, e.g. fr_0.json"),
    ],
    ids=["truncated", "code", "negative", "1 TB", "other world", "missing"],
)
def test_bad_input_is_one_line(
    content: Any, text: str, bench: Callable[..., Any], tmp_path: Path
) -> None:
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    name = "fr_1.json" if content is None else "fr_0.json"
    (tmp_path / name).write_bytes(data)
    run = bench(SCRIPT, str(tmp_path), ranks=0)
    assert run.status == 2
    assert text in run.err
    assert run.err.count("\n") == 1
    assert "code of a recording runs" not in run.out
