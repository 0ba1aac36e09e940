"""Scripts that read reports. They need no torch."""

import sys
from pathlib import Path
from types import TracebackType

from common import cli  # first: it reports a missing package


def end_interrupted(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """sys.excepthook: Ctrl-C ends a script with a message of one line and status 130."""
    if issubclass(kind, KeyboardInterrupt) and not hasattr(sys, "ps1"):  # not in a Python shell
        cli.complain(f"{Path(sys.argv[0]).name}: interrupted")
        sys.exit(130)
    cli.name_missing_package(kind, error, trace)


sys.excepthook = end_interrupted
