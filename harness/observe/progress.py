"""The progress line on a terminal: the case, its current phase, elapsed and remaining time."""

import sys

from harness.benchmark import Benchmark, Observer

try:
    from tqdm import tqdm
except ModuleNotFoundError:  # then there is no such line
    tqdm = None

# by tqdm, which assumes that the remaining cases take as long as those before them
ELAPSED, WITH_REMAINING = "{desc} [{elapsed}]", "{desc} [{elapsed}<{remaining}]"


class Progress(Observer):
    """Shows the line on stderr of rank 0, if that is a terminal."""

    def __init__(self, bench: Benchmark) -> None:
        super().__init__(bench)
        self.line = None
        self.label = ""
        if tqdm and bench.is_first and sys.stderr.isatty():
            tqdm.monitor_interval = 0  # no thread in addition to those that are timed
            self.line = tqdm(bar_format=ELAPSED, miniters=0, smoothing=0, leave=False)

    def begin(self, label: str, member: bool) -> None:
        self.label = label

    def phase(self, what: str, ahead: int) -> None:
        if self.line is None:
            return
        if not what:  # a line is about to be printed
            self.line.clear()
            return
        number, count = max(1, len(self.bench.measured)), self.bench.case_count
        self.line.n, self.line.total = number - 1, count or None
        self.line.bar_format = WITH_REMAINING if count else ELAPSED
        of = f" of {count}" if number <= count else ""
        text = f"case {number}{of}: {self.label}: {what}"
        room = max(20, (self.line.ncols or 80) - len(" [00:00:00<00:00:00]"))
        self.line.set_description_str(text[:room], refresh=False)
        self.line.update(0)  # displays it, at most ten times a second

    def end(self, last_line: dict[str, object]) -> list[str]:
        if self.line is not None:
            self.line.close()
        return []
