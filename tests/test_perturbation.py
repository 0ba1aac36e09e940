"""tests/perturbation.py runs and prints a ratio for each step."""

import pytest

from tests.process import Start


@pytest.mark.smoke
def test_a_ratio_of_each_step(start: Start) -> None:
    """Messages, RPCs, and a training step (`first`)."""
    flags = ("--device", "cpu", "--seconds", "0.02", "--pairs", "1")
    process = start("tests/perturbation.py", "--kinds", "send,batch_update,first", *flags)
    assert process.wait(120) == 0, process.err
    first, *lines = process.out.splitlines()
    assert float(first.removeprefix("first / last ")) > 0
    rows = [line.split() for line in lines[5:]]
    sizes = ["send 64", "send 64K", "send 16M", "batch_update 4K", "batch_update 4M"]
    assert [" ".join(row[:2]) for row in rows] == sizes
    for row in rows:
        assert row.count("(no") == 2  # one pair has no interval
