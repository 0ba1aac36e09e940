"""Commands that take turns block by block: `--interleave` of analysis/ab.py.

A token goes round in two named pipes. The command that reads it from its pipe may measure. When its
block is over, it writes the token into the other command's pipe.
"""

import os
import stat
from collections.abc import Callable

from common.cli import TOKEN, TURN, refuse


def turn_taker(pipes: str) -> Callable[[], None]:
    """Wait for the first turn of this command. Returns a function that passes the turn on and waits
    for the next one.

    pipes: two names. The token in the first pipe is this command's turn, in the second the other's.
    """
    try:
        my_name, other_name = pipes.split(":")
        for name in (my_name, other_name):
            if not stat.S_ISFIFO(os.stat(name).st_mode):  # a token would overwrite another file
                raise ValueError(f"{name} is no pipe")
        my_pipe = os.open(my_name, os.O_RDONLY)
        other_pipe = os.open(other_name, os.O_WRONLY)
    except (ValueError, OSError):
        got = f"got {pipes!r}; only ab.py --interleave sets it"
        refuse(f"{TURN}: expected two named pipes such as /tmp/a:/tmp/b, {got}")
    os.read(my_pipe, len(TOKEN))

    def pass_on() -> None:
        os.write(other_pipe, TOKEN)
        os.read(my_pipe, len(TOKEN))

    return pass_on
