"""Each mistake of tests/mutations.toml and of tests/cudalab_faults.toml can be planted. When code
moves, its entry has to follow."""

import ast
import re
from pathlib import Path

import pytest

from tests import mutations

MISTAKES = [
    *mutations.MISTAKES,
    *({**fault, "tests": "tests/test_cudalab.py"} for fault in mutations.ON_CUDA),
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake["name"])
def test_a_mistake_can_be_planted(mistake: dict[str, str], tmp_path: Path) -> None:
    """Its text occurs once in the file, the result is valid Python (otherwise any test would fail),
    and the files and tests that it names exist."""
    copy = tmp_path / mistake["file"]
    copy.parent.mkdir(parents=True)
    copy.write_text((mutations.ROOT / mistake["file"]).read_text())
    mutations.plant(mistake, tmp_path)
    ast.parse(copy.read_text())
    words, _, expression = mistake["tests"].partition(" -k ")
    texts = [(mutations.ROOT / name.split("::")[0]).read_text() for name in words.split()]
    names = {*re.findall(r"[a-z_]{4,}", expression)} - {"test"}
    assert [name for name in names if name not in "".join(texts)] == []
