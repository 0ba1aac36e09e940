"""The exceptions of this library, and lists in their messages. It never prints and never ends the
process: the caller does."""

from collections.abc import Sequence


class Refused(ValueError):
    """The job cannot run as configured.

    here: whether the fault is of this host, such as a variable, a port or an interface. Then other
    ranks may not see it, and this rank should print the message. Otherwise all ranks raise the same
    error, and rank 0 should print it.
    """

    def __init__(self, message: str, here: bool = False) -> None:
        super().__init__(message)
        self.here = here


class NotArrived(TimeoutError):
    """Not all ranks joined the job in time. missing: their numbers, as far as this rank knows."""

    def __init__(self, message: str, missing: list[int]) -> None:
        super().__init__(message)
        self.missing = missing


class LostPeer(ConnectionError):
    """Another process of the job has died or is unreachable. The launcher knows which one."""


def cut(words: Sequence[object], most: int = 8) -> str:
    """Join words with commas. Of more than `most`, list the first and count the rest."""
    shown = ", ".join(map(str, words[:most]))
    return shown if len(words) <= most else f"{shown} and {len(words) - most:,} more"
