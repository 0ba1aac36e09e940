"""Damaged reports: whatever a value is replaced by, the readers show it or print one line."""

import json
import random
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from analysis.report import sections_of
from analysis.show import DAMAGE
from tests.pure.reports import ROOT, run

SOUND = ROOT / "tests" / "golden" / "small.jsonl"
VALUES: tuple[Any, ...] = (
    *(None, True, 0, -1, 1.5, 10**400, "", "x", "\x1b[31m", "9999-99-99"),
    *([], [[]], [None], ["x"], [[3, 4]], [[{}]], {}, {"x": None}, {"x": {"y": 1}}),
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path to each value in lists and objects, except for most samples."""
    if path:
        yield path
    entries: Any = value.items() if isinstance(value, dict) else ()
    if isinstance(value, list):
        entries = enumerate(value[:4])
    for name, entry in entries:
        yield from places(entry, (*path, name))


@pytest.mark.parametrize("seed", range(20))
def test_no_damage_ends_a_reader_with_a_traceback(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    lines = [json.loads(line) for line in SOUND.read_text().splitlines()]
    *path, last = rng.choice(list(places(lines)))
    parent: Any = lines
    for name in path:
        parent = parent[name]
    parent[last] = rng.choice(VALUES)
    damaged = tmp_path / "damaged.jsonl"
    damaged.write_text("".join(json.dumps(line) + "\n" for line in lines))
    commands = [["export.py", str(damaged), "--to", name] for name in ("csv", "gha", "pytorch")]
    commands.append(["compare.py", str(SOUND), "--test", str(damaged)])
    for words in commands:
        done = run(*words)
        assert (done.returncode, done.stderr.count("\n")) in ((0, 0), (2, 1)), done.stderr
        assert "\x1b" not in done.stderr
    with suppress(ValueError, OSError, *DAMAGE):  # report.py refuses these in one line
        sections_of([str(damaged)])
