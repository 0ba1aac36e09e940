"""Damaged reports: whatever a value is replaced by, the readers show it or say so in one line."""

import contextlib
import io
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from analysis import compare, export, report
from analysis.show import DAMAGE
from tests.process import ROOT

SOUND = ROOT / "tests" / "golden" / "small.jsonl"
TIMES = 40
VALUES: tuple[Any, ...] = (
    *(None, True, 0, -1, 1.5, 10**400, "", "x", "\x1b[31m", "9999-99-99"),
    *([], [[]], [None], ["x"], [[3, 4]], [[{}]], {}, {"x": None}, {"x": {"y": 1}}),
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to each value in lists and objects, but for samples."""
    if path:
        yield path
    entries: Any = ()
    if isinstance(value, dict):
        entries = value.items()
    elif isinstance(value, list):
        entries = enumerate(value[:4])
    for name, entry in entries:
        yield from places(entry, (*path, name))


def call(main: Callable[[], int], words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a reader. It shows the report, or refuses it in one line."""
    monkeypatch.setattr("sys.argv", words)
    err, status = io.StringIO(), 0
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(err):
        try:
            status = main()
        except SystemExit as end:
            status = int(end.code or 0)
    assert (status, err.getvalue().count("\n")) in ((0, 0), (2, 1)), err.getvalue()
    assert "\x1b" not in err.getvalue()


@pytest.mark.parametrize("seed", range(TIMES))
def test_no_damage_ends_a_reader_with_a_traceback(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    lines = [json.loads(line) for line in SOUND.read_text().splitlines()]
    path = rng.choice(list(places(lines)))
    parent: Any = lines
    for name in path[:-1]:
        parent = parent[name]
    parent[path[-1]] = rng.choice(VALUES)
    damaged = str(tmp_path / "damaged.jsonl")
    Path(damaged).write_text("".join(json.dumps(line) + "\n" for line in lines))
    call(compare.main, ["compare.py", str(SOUND), "--test", damaged], monkeypatch)
    with contextlib.suppress(ValueError, OSError, *DAMAGE):  # what report.py refuses in one line
        report.sections_of([damaged])
    for name in (*export.FORMATS, "pytorch"):
        call(export.main, ["export.py", damaged, "--to", name], monkeypatch)
