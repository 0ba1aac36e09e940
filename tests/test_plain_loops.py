"""The scripts that replace programs of PyTorch compute the values that plain loops compute.

The loops in tests/plain_loops.py share no code with the scripts, but have the same model, batches,
optimizer and processes.
"""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.process import Start

STEPS = 3
# from the script's losses those that the plain loop has, in the same order
SAME: dict[str, Callable[[list[Any]], list[Any]]] = {
    # before them a check computes 3 batches on the trainer and in one process
    "ddp_rpc": lambda losses: losses[6:],
    "ddp_sweep": lambda losses: losses,
    # the check first computes each batch without averaging
    "parameter_server": lambda losses: losses[:8:2] + losses[8:],
    # one loss before the start
    "batch_update_ps": lambda losses: losses[1:],
    "compile_sweep": lambda losses: losses[:1],
}


# the same of the norms after a step of the trainer's optimizer; the other scripts have none there
NORMS: dict[str, Callable[[list[Any]], list[Any]]] = {
    "ddp_sweep": lambda norms: norms,
    "parameter_server": lambda norms: norms[1:8:2] + norms[8:],
}


@pytest.mark.smoke
@pytest.mark.parametrize("source", SAME)
def test_the_losses_are_those_of_a_plain_loop(source: str, start: Start) -> None:
    compare(source, start, "cpu")


@pytest.mark.cudalab
@pytest.mark.parametrize("source", SAME)
def test_the_losses_on_cuda(source: str, start: Start, lab: dict[str, str]) -> None:
    compare(source, start, "cuda", **lab, CUDALAB_RANDOM="cpu")


def compare(source: str, start: Start, device: str, **variables: str) -> None:
    """ddp_rpc with one trainer: two would change its tables at the same time, in any order."""
    ranks = 3 if source == "ddp_rpc" else 4
    flags = ("--kinds", source, "--losses", str(STEPS), "--device", device)
    process = start("tests/perturbation.py", *flags, ranks=ranks, **variables)
    assert process.wait() == 0, process.err
    found = [json.loads(text) for text in re.findall(r"\{.*?\}", process.out)]  # one a rank
    assert sorted(entry["rank"] for entry in found) == list(range(ranks - 2))
    # not the first of several trainers: its check computes more losses
    last = max(found, key=lambda entry: entry["rank"])
    plain, script = last["plain"], SAME[source](last["script"])
    count = min(len(plain), len(script))
    assert count >= {"ddp_rpc": 10 * STEPS, "compile_sweep": 1}.get(source, STEPS)
    # with a softmax before the loss, the loss changes in the sixth digit from step to step
    tolerance = 1e-6 if source == "parameter_server" else 1e-5
    assert script[:count] == pytest.approx(plain[:count], rel=tolerance)
    if chosen := NORMS.get(source):
        got, wanted = chosen(last["script norms"]), last["plain norms"]
        for step, expected in zip(got[:STEPS], wanted, strict=True):
            assert step == pytest.approx(expected, rel=1e-5)
    if source != "compile_sweep":  # the model trains, so the losses change
        assert plain[count - 1] != plain[0]
