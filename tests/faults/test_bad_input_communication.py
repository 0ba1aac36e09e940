"""collectives.py and p2p_matrix.py: a user's mistake is one line, exit status 2, nothing lost."""

import sys
from pathlib import Path

import pytest
from harness import COLLECTIVES, P2P_MATRIX, ROOT, run, torchrun


def refused(script: str, options: list[str], cwd: Path) -> str:
    done = run([sys.executable, script, "--device", "cpu", *options], cwd=cwd)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith(f"{Path(script).name}: error: ")
    assert list(cwd.iterdir()) == []
    return lines[0]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["-b", "1M", "-e", "4K"], ["1048576", "above", "4096"]),
        (["-f", "1"], ["factor of 1", "would not end"]),
        (["-f", "x"], ["-f", "'x'"]),
        (["-i", "0"], ["step of 0 bytes", "would not end"]),
        (["-b", "8", "-e", "64M", "-i", "1"], ["too many"]),
        (["-i", "8", "-f", "2"], ["give one of them"]),
        (["-b", "2"], ["-b 2 is less than one float32", "-b 4"]),
        (["-b", "4", "-d", "float32,float64"], ["less than one float64", "-b 8"]),
        (["-b", "4Q"], ["expected a size", "'4Q'"]),
        (["-d", "float33"], ["unknown 'float33'", "float32"]),
        (["-o", "summ"], ["unknown 'summ'", "sum"]),
        (["--collective", "allreduce"], ["unknown 'allreduce'", "all_reduce"]),
        (["--collective", "all_reduce,all_reduce"], ["each item once"]),
        (["--collective", "broadcast", "-r", "1"], ["-r 1", "outside group", "1 rank", "-r 0"]),
        (["-r", "1"], ["-r has no effect on all_reduce"]),
        (["-r", "-1"], ["-r", "'-1'"]),
        (["--collective", "broadcast", "-o", "max"], ["-o has no effect on broadcast"]),
        (["-n", "0"], ["-n", "at least 1"]),
        (["-w", "-1"], ["-w", "0 or more"]),
        (["-c", "x"], ["-c", "'x'"]),
        (["-a", "median"], ["-a", "median"]),
        (["-z", "2"], ["-z", "'2'"]),
        (["-z", "1"], ["-z 1 has no effect on the CPU"]),
        (["-G", "3"], ["-G has no effect on the CPU"]),
        (["--in-flight", "2", "--coalesce", "2"], ["give one of them"]),
        (["--in-flight", "2", "--per-iteration"], ["--per-iteration has no effect"]),
        (["--limit", "0"], ["--limit", "above 0"]),
        (["--min-busbw", "nan"], ["--min-busbw", "'nan'"]),
        (["--groups", "racks"], ["expected world, node, cross", "'racks'"]),
        (["--groups", "0/0"], ["rank 0 is named twice"]),
        (["--groups", "0,7"], ["names rank 7"]),
        (["--colective", "all"], ["unknown argument '--colective'", "--collective"]),
        (["--warmup-iter", "3"], ["unknown argument", "--warmup-iters"]),
        (["-e", "64T"], ["-e 64T needs", "bytes of memory", "free; try -e "]),
        (["--resume"], ["--json PATH"]),
        (["-J", "."], ["is a directory"]),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else None,
)
def test_collectives(tmp_path: Path, options: list[str], expected: list[str]) -> None:
    message = refused(COLLECTIVES, options, tmp_path)
    for text in expected:
        assert text in message


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], ["a link needs two ranks", "torchrun --nproc-per-node 2"]),
        (["--size", "big"], ["expected a size", "'big'"]),
        (["--by", "rack"], ["--by", "'rack'"]),
        (["--sigmas", "-1"], ["--sigmas", "above 0"]),
        (["--seriall"], ["unknown argument '--seriall'", "--serial"]),
        (["--blocks", "0"], ["--blocks", "at least 1"]),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else None,
)
def test_p2p_matrix(tmp_path: Path, options: list[str], expected: list[str]) -> None:
    message = refused(P2P_MATRIX, options, tmp_path)
    for text in expected:
        assert text in message


@pytest.mark.parametrize(
    ("script", "options", "expected"),
    [
        (COLLECTIVES, ["--groups", "cross"], "--groups cross needs at least two nodes"),
        (P2P_MATRIX, ["--by", "node"], "--by node needs at least two nodes"),
        (P2P_MATRIX, ["--plot", "missing/p.png"], "cannot write in"),
        (P2P_MATRIX, ["--plot", "p.jpg"], "--plot needs a file"),
        (P2P_MATRIX, ["--size", "64T"], "bytes of memory"),
    ],
)
def test_refused_in_a_job(tmp_path: Path, script: str, options: list[str], expected: str) -> None:
    """What only two ranks, or the running job, show: still one message, and no traceback."""
    done = run([*torchrun(2), script, "--device", "cpu", *options], cwd=tmp_path)
    assert done.returncode != 0
    said = [line for line in done.stderr.splitlines() if f"{Path(script).name}: error: " in line]
    assert len(said) == 1, done.stderr
    assert expected in said[0]
    assert "exitcode  : 2" in done.stderr


def test_a_report_of_the_other(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "results" / "calibrate_cpu_1rank.json").read_bytes()
    (tmp_path / "c.json").write_bytes(text)
    done = run(
        [sys.executable, COLLECTIVES, "--device", "cpu", "-J", "c.json", "--resume"], cwd=tmp_path
    )
    assert done.returncode == 2
    assert "a report of calibrate, not of collectives" in done.stderr
    assert (tmp_path / "c.json").read_bytes() == text
