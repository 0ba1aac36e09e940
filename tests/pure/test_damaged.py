"""Damaged reports: whatever a value is replaced by, the readers show it or say so in one line."""

import contextlib
import copy
import io
import json
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from analysis import compare, export, report
from tests.pure.reports import case, estimate

MUTATIONS = 240
EVERY = 20  # a page with its figures takes as long as all other readers
VALUES: tuple[Any, ...] = (
    *(None, True, 0, 3, -1, 1.5, 1e308, 10**400, "", "x", "\x1b[31m", "9999-99-99"),
    *([], [[]], [None], [3], ["x"], [[3, 4]], [[{}]], {}, {"x": None}, {"x": [1]}, {"x": {"y": 1}}),
)
ENVIRONMENT = {
    "torch": "2.15.0",
    "world_size": 2,
    "num_nodes": 1,
    "hosts": ["vm"],
    "devices": ["H100"],
    "topologies": ["two\nlines"],
    "gpus": [[{"index": "0", "power.limit": "700 W"}, {"index": "1"}]],
    "ranks": [{"rank": 0, "cores": 2}, {"rank": 1, "cores": 2}],
    "differences": ["cores of vm is not that of other nodes"],
    "variables": {"OMP_NUM_THREADS": "1"},
}


def whole_report(benchmark: str) -> list[Any]:
    """The lines of a report in which every kind of field stands."""
    key: dict[str, Any] = {"model": "resnet18", "dtype": "fp32", "ranks": 2, "ddp": True}
    key |= {"batch_size": 8, "backend": "gloo", "bucket_size_mb": 25.0, "size_bytes": 1024}
    metrics: dict[str, Any] = {
        "step_s": estimate(0.15, 0.1, 0.2),
        "samples_per_s": estimate(53.3),
    }
    metrics |= {"overlap": 0.5, "memory_gib": 1.5, "note": "warm", "moved_bytes": 4096}
    metrics |= {"links": [[0, 1, 100.0, 2.0, 4.0, 5.0]], "exposed_s": estimate(-0.1, -0.2, 0.1)}
    samples = {"step": [[0.1, 0.2], [0.3, 0.1]], "local compute": [[0.1, 0.1], [0.1, 0.1]]}
    parts: dict[str, Any] = {"metrics": metrics, "samples_s": samples, "ranks": [0, 1]}
    parts["rounds"] = [1, 1]
    bounded: dict[str, Any] = {"bounded": "a part of the samples", "iterations": [0, 1]}
    bounded["slowest_s"] = {"step": [0.3, 0.2], "local compute": [0.1, 0.1]}
    bounded["quartiles_s"] = {"step": [[0.1, 0.15, 0.2], [0.1, 0.2, 0.3]]}
    head: dict[str, Any] = {"schema": "torchrun-bench/3", "benchmark": benchmark, "argv": ["x.py"]}
    head |= {"started_at": "2026-01-01T00:00:00+00:00", "environment": ENVIRONMENT}
    lines = [
        head,
        case("no ddp", key=key | {"ranks": 1, "ddp": False}, **parts),
        case("1M/2G", key=key, **parts, **bounded),
        {"status": "complete", "answer": ["fast"], "others": [[0.4, 2]], "gpus": [[]]},
    ]
    return copy.deepcopy(lines)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to each value in lists and objects."""
    if path:
        yield path
    entries: Any = ()
    if isinstance(value, dict):
        entries = value.items()
    elif isinstance(value, list):
        entries = enumerate(value)
    for name, entry in entries:
        yield from places(entry, (*path, name))


def damage(lines: list[Any], rng: random.Random) -> str:
    """Replace one value or leave it out; what was done, in words."""
    path = rng.choice(list(places(lines)))
    parent = lines
    for name in path[:-1]:
        parent = parent[name]
    value = rng.choice([*VALUES, "left out"])
    if value == "left out":
        del parent[path[-1]]
    else:
        parent[path[-1]] = value
    return f"{path}: {value!r}"


def call(main: Callable[[], int], words: list[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a reader. It shows the report, or refuses it in one line, which is returned."""
    monkeypatch.setattr(sys, "argv", words)
    out, err = io.StringIO(), io.StringIO()
    status: Any = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main()
        except SystemExit as end:
            status = end.code
    assert (status, err.getvalue().count("\n")) in ((0, 0), (2, 1)), err.getvalue()
    assert "\x1b" not in err.getvalue()
    return err.getvalue()


@pytest.mark.parametrize("benchmark", ["ddp_sweep", "p2p_matrix", "collectives", "from_mars"])
def test_no_damage_ends_a_reader_with_a_traceback(
    benchmark: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(29)
    sound, damaged = str(tmp_path / "sound.jsonl"), str(tmp_path / "damaged.jsonl")
    lines = whole_report(benchmark)
    lines[0]["argv"].append(sound)
    Path(sound).write_text("".join(json.dumps(line) + "\n" for line in lines))
    formats = (*export.FORMATS, "pytorch")
    for i in range(MUTATIONS // 4):
        lines = whole_report(benchmark)
        what = damage(lines, rng)
        if rng.random() < 0.3:
            what += f", {damage(lines, rng)}"
        Path(damaged).write_text("".join(json.dumps(line) + "\n" for line in lines))
        commands = [
            (compare.main, ["compare.py", sound, "--test", damaged]),
            (compare.main, ["compare.py", damaged, "--test", sound, "--format", "markdown"]),
            (report.main, ["report.py", sound, damaged, "--markdown"]),
            *((export.main, ["export.py", damaged, "--to", name]) for name in formats),
        ]
        if i % EVERY == 0:
            page = str(tmp_path / "page.html")
            commands.append((report.main, ["report.py", sound, damaged, "-o", page]))
        for main, words in commands:
            try:
                message = call(main, words, monkeypatch)
            except Exception as error:
                pytest.fail(f"{' '.join(words)} with {what}: {error!r}")
            assert not message or "damaged.jsonl" in message or "no case" in message, message
