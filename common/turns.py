"""Two commands that take turns block by block: `analysis/ab.py --interleave`.

A token goes round in two named pipes. Who reads it may measure; who is done writes it to the other.
"""

import os
from collections.abc import Callable

from common.cli import refuse

TURN = "TORCHRUN_BENCH_TURN"  # the variable with the names of the two pipes: MINE:THE_OTHERS


def turn_taker(pipes: str) -> Callable[[], None]:
    """Of two commands only one measures at a time (`ab.py --interleave`): wait for the first turn.
    Returns what passes the turn on and waits for the next one.

    pipes: two names. A byte in the first is this command's turn, in the second the other's.
    """
    try:
        mine, others = pipes.split(":")
        own, other = os.open(mine, os.O_RDONLY), os.open(others, os.O_WRONLY)
    except (ValueError, OSError):
        got = f"got {pipes!r}; only ab.py --interleave sets it"
        refuse(f"{TURN}: expected two named pipes such as /tmp/a:/tmp/b, {got}")
    os.read(own, 1)

    def pass_on() -> None:
        os.write(other, b".")
        os.read(own, 1)

    return pass_on
