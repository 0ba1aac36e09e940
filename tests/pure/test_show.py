"""analysis/show.py: results on an stdout that is gone, full, closed, or knows ASCII alone."""

import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from analysis import compare, export
from tests.pure.reports import ROOT, case, write

READERS: dict[str, tuple[Callable[[], int], list[str]]] = {
    "compare": (compare.main, ["{0}", "--test", "{1}"]),
    "export": (export.main, ["{0}", "--to", "csv"]),
}


def two_reports(folder: Path, label: str = "x") -> list[str]:
    return [write(folder / f"{n}.jsonl", case(label, [n, n, n])) for n in (1, 2)]


def show_on(
    stdout: Any, reader: str, folder: Path, monkeypatch: pytest.MonkeyPatch, label: str = "x"
) -> tuple[Any, str]:
    """The exit status of a reader that prints there, and its stderr."""
    main, words = READERS[reader]
    paths = two_reports(folder, label)
    monkeypatch.setattr(sys, "argv", ["reader.py", *(word.format(*paths) for word in words)])
    errors = io.StringIO()
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(errors):
        try:
            return main(), errors.getvalue()
        except SystemExit as end:
            return end.code, errors.getvalue()


@pytest.mark.parametrize("reader", READERS)
def test_an_stdout_that_is_gone_is_one_line(
    reader: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open("/dev/full", "w") as full:
        done = show_on(full, reader, tmp_path, monkeypatch)
        assert done == (1, "reader.py: error: stdout: No space left on device\n")
    read_end, write_end = os.pipe()
    os.close(read_end)  # `| head` has ended
    with open(write_end, "w") as pipe:
        done = show_on(pipe, reader, tmp_path, monkeypatch)
        assert done == (1, "reader.py: error: stdout: Broken pipe\n")


@pytest.mark.parametrize("reader", READERS)
def test_a_terminal_of_ascii(reader: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = io.BytesIO()
    terminal = io.TextIOWrapper(content, encoding="ascii")
    assert show_on(terminal, reader, tmp_path, monkeypatch, "réseau") == (0, "")
    terminal.flush()
    text = content.getvalue().decode("ascii")
    assert "r\\xe9seau" in text or "r\\\\xe9seau" in text or "r\\u00e9seau" in text


def test_a_closed_stdout(tmp_path: Path) -> None:
    """`>&-`: a file that is opened next must not take its number."""
    base, test = two_reports(tmp_path)
    command = [sys.executable, str(ROOT / "analysis/compare.py"), base, "--test", test]
    done = subprocess.run(
        ["bash", "-c", 'exec "$@" >&-', "bash", *command],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr == "compare.py: error: stdout: Bad file descriptor\n"
