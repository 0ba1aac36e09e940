"""analysis/: stdout is full, closed, a broken pipe, or only supports ASCII; and Ctrl-C."""

import io
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from analysis import export
from tests.pure.reports import ROOT, case, write


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    return ["export.py", write(tmp_path / "a.jsonl", case("réseau")), "--to", "csv"]


def show_on(stdout: Any, words: list[str], monkeypatch: pytest.MonkeyPatch) -> tuple[Any, str]:
    """The exit status and stderr of a program that prints to this stdout."""
    monkeypatch.setattr(sys, "argv", words)
    errors = io.StringIO()
    with redirect_stdout(stdout), redirect_stderr(errors):
        try:
            return export.main(), errors.getvalue()
        except SystemExit as end:
            return end.code, errors.getvalue()


def test_a_failing_stdout_is_one_line(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)  # `| head` has ended
    for file, why in (("/dev/full", "No space left on device"), (write_end, "Broken pipe")):
        with open(file, "w") as stdout:
            done = show_on(stdout, words, monkeypatch)
            assert done == (1, f"export.py: error: stdout: {why}\n")


def test_an_ascii_terminal(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    content = io.BytesIO()
    terminal = io.TextIOWrapper(content, encoding="ascii")
    assert show_on(terminal, words, monkeypatch) == (0, "")
    terminal.flush()
    assert b"r\\xe9seau" in content.getvalue()


@pytest.mark.parametrize("command", ["compare.py PIPE --test b.jsonl", "export.py PIPE --to csv"])
def test_ctrl_c_is_one_line(command: str) -> None:
    """While a script reads a report, here as from `<(command)`, which has written one byte."""
    read_end, write_end = os.pipe()
    script, *words = command.replace("PIPE", f"/dev/fd/{read_end}").split()
    argv = [sys.executable, str(ROOT / "analysis" / script), *words]
    streams: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "pass_fds": [read_end]}
    process = subprocess.Popen(argv, text=True, **streams)
    with process, open(write_end, "wb", buffering=0) as pipe:
        pipe.write(b"{")
        while select.select([read_end], [], [], 0)[0] and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=500)
    os.close(read_end)
    assert (process.returncode, out, errors) == (130, "", f"{script}: interrupted\n")


def test_a_closed_stdout(words: list[str]) -> None:
    """`>&-`: a file that is opened next must not get the descriptor of stdout."""
    command = ["bash", "-c", 'exec "$@" >&-', "bash", sys.executable, *words]
    command[5] = str(ROOT / "analysis" / "export.py")
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert (done.returncode, done.stderr) == (1, "export.py: error: stdout: Bad file descriptor\n")
