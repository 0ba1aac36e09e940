"""Scripts that read reports, logs and traces. They do not need torch."""

import sys
from pathlib import Path
from types import TracebackType

from harness import exits  # first: it reports a missing package


def end_interrupted(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """sys.excepthook: on Ctrl-C, print one line and exit with status 130."""
    if issubclass(kind, KeyboardInterrupt) and not hasattr(sys, "ps1"):  # not in a Python shell
        exits.print_error(f"{Path(sys.argv[0]).name}: interrupted")
        sys.exit(130)
    exits.name_missing_package(kind, error, trace)


sys.excepthook = end_interrupted
