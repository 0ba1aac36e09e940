"""The programs of docs/library.md, which use only common/."""

import re
from pathlib import Path

import pytest

from tests.process import ROOT, python

ALL_REDUCE, RPC = ((ROOT / f"docs/library/{name}.py").read_text() for name in ("all_reduce", "rpc"))
INTERVAL = r"\d[\d.,]* (us|ms|s) \((\d[\d.,]* to \d[\d.,]*|no interval)\)"


def output_of(program: str, ranks: int, folder: Path) -> list[str]:
    """The lines that a program prints beside a copy of common/."""
    (folder / "common").symlink_to(ROOT / "common")
    (folder / "program.py").write_text(program)
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
    command = [*(launch if ranks > 1 else ()), str(folder / "program.py")]
    run = python(*command, PYTHONPATH=str(folder))
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()


def test_the_page_quotes_the_program() -> None:
    quoted = re.findall(r"```python\n(.*?)```", (ROOT / "docs/library.md").read_text(), re.S)
    assert [part in ALL_REDUCE for part in quoted] == [True]


@pytest.mark.smoke
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_an_all_reduce_and_a_copy(ranks: int, tmp_path: Path) -> None:
    heading, _, *rows = output_of(ALL_REDUCE, ranks, tmp_path)
    assert heading.split("  ")[0] == "bytes"
    assert [row.split()[0] for row in rows] == ["16,384", "1,048,576"]
    for row in rows:
        assert len(re.findall(INTERVAL, row)) == 2, row
        assert re.search(r"times( \(no interval\))?|times \(", row), row


@pytest.mark.smoke
@pytest.mark.parametrize("ranks", [2, 3])
def test_rpc(ranks: int, tmp_path: Path) -> None:
    """On the CPU without device maps; test_rpc_roles.py has those."""
    _, _, *rows = output_of(RPC, ranks, tmp_path)
    assert [row.split()[:2] for row in rows] == [[f"trainer{r}", "cpu"] for r in range(ranks - 1)]
    assert all(re.search(INTERVAL, row) for row in rows), rows
