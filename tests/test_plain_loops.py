"""The scripts that replace a program of PyTorch compute what a plain loop of its step computes.

tests/plain_loops.py has the loops, in code of their own: same model, batches, optimizer, processes.
"""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

STEPS = 3
# what the script computes beside: the losses that a plain loop has, in the same order
SAME: dict[str, Callable[[list[float]], list[float]]] = {
    # after a check of 3 batches by the trainer and by one process
    "ddp_rpc": lambda losses: losses[6:],
    "ddp_sweep": lambda losses: losses,
    # in the check each batch is first computed without averaging
    "parameter_server": lambda losses: losses[:8:2] + losses[8:],
    # one before the start
    "batch_update_ps": lambda losses: losses[1:],
    "compile_sweep": lambda losses: losses[:1],
}


@pytest.mark.smoke
@pytest.mark.parametrize("source", SAME)
def test_the_losses_are_those_of_a_plain_loop(source: str, start: Callable[..., Any]) -> None:
    """With one trainer for ddp_rpc: two change its tables at the same time, in any order."""
    ranks = 3 if source == "ddp_rpc" else 4
    flags = ("--kinds", source, "--losses", str(STEPS), "--device", "cpu")
    process = start("tests/perturbation.py", *flags, ranks=ranks)
    assert process.wait(240) == 0, process.err
    found = [json.loads(text) for text in re.findall(r"\{.*?\}", process.out)]  # one of each rank
    assert sorted(entry["rank"] for entry in found) == list(range(ranks - 2))
    # on the first of several trainers a check computes losses as well
    last = max(found, key=lambda entry: entry["rank"])
    plain, script = last["plain"], SAME[source](last["script"])
    count = min(len(plain), len(script))
    assert count >= {"ddp_rpc": 10 * STEPS, "compile_sweep": 1}.get(source, STEPS)
    # a softmax before the loss: from step to step it changes in the sixth digit
    tolerance = 1e-6 if source == "parameter_server" else 1e-5
    assert script[:count] == pytest.approx(plain[:count], rel=tolerance)
    if source != "compile_sweep":  # it trains; the first loss is not by chance that of the last
        assert plain[count - 1] != plain[0]
