"""Turns of two commands that ab.py --interleave runs at the same time: they measure alternately.
Imported only if ab.py has set the variable."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from harness import cli, exits


def find_pipes() -> list[str]:
    """Return the paths of the two named pipes in the variable, which the node of rank 0 must have.
    Refuses any other value."""
    text = os.environ[cli.TURN]
    pipes = text.split(":")
    are_pipes = [Path(pipe).is_fifo() for pipe in pipes] == [True, True]
    if not are_pipes and (exits.is_rank_0() or exits.is_on_one_node()):
        exits.refuse(
            f"{cli.TURN}: expected two named pipes, which ab.py --interleave sets, got {text!r}; "
            f"try unset {cli.TURN}"
        )
    return pipes


def take(pipes: Sequence[str]) -> Callable[[], None]:
    """Wait for the first turn of this command: a token in the first pipe. Return a function that
    passes the turn to the other command, by the second pipe, and waits for the next one."""
    my_pipe = os.open(pipes[0], os.O_RDONLY)
    other_pipe = os.open(pipes[1], os.O_WRONLY)
    os.read(my_pipe, len(cli.TOKEN))

    def pass_on() -> None:
        os.write(other_pipe, cli.TOKEN)
        os.read(my_pipe, len(cli.TOKEN))

    return pass_on
