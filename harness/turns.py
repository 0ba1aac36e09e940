"""Turns of two commands that ab.py --interleave runs at the same time: they measure alternately.
Imported only if ab.py has set the variable."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from harness import cli, exits


def find_pipes() -> list[str]:
    """Return the paths of the two named pipes in the variable. Refuses any other value. Other nodes
    than that of rank 0 need not have the pipes."""
    text = os.environ[cli.TURN]
    pipes = text.split(":")
    is_checked = exits.is_rank_0() or exits.is_on_one_node()
    if is_checked and [Path(pipe).is_fifo() for pipe in pipes] != [True, True]:
        exits.refuse(
            f"{cli.TURN}: expected two named pipes, which ab.py --interleave sets, got {text!r}; "
            f"try unset {cli.TURN}"
        )
    return pipes


def take(pipes: Sequence[str]) -> Callable[[], None]:
    """Wait for the first turn of this command. Return a function that passes the turn to the other
    command and waits for the next one.

    pipes: a token in the first one is the turn of this command, one in the second that of the other
    command.
    """
    my_pipe = os.open(pipes[0], os.O_RDONLY)
    other_pipe = os.open(pipes[1], os.O_WRONLY)
    os.read(my_pipe, len(cli.TOKEN))

    def pass_on() -> None:
        os.write(other_pipe, cli.TOKEN)
        os.read(my_pipe, len(cli.TOKEN))

    return pass_on
