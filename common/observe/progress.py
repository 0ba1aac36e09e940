"""The line on a terminal: which case of how many, how long still, and what is done now."""

import sys
import time
from dataclasses import dataclass, field

from common.benchmark import Benchmark, Observer
from common.cli import duration

try:
    from tqdm import tqdm
except ModuleNotFoundError:  # then there is no such line
    tqdm = None


@dataclass
class Pace:
    """How far a run is. now: seconds of a clock that only runs forwards."""

    cases: int = 0  # that the run is going to measure; 0 if nobody knows
    taken_s: list[float] = field(default_factory=list)  # by each case that is over
    begun_s: float | None = None  # when the case began

    def begin(self, now: float) -> None:
        """A case begins, and the one before is over."""
        if self.begun_s is not None:
            self.taken_s.append(now - self.begun_s)
        self.begun_s = now

    def text(self, now: float) -> str:
        """`case 3 of 12, about 2 min left`: cases to come take as long as those before them."""
        number = len(self.taken_s) + 1
        if number > self.cases:
            return f"case {number}"
        text = f"case {number} of {self.cases}"
        if not self.taken_s or self.begun_s is None:
            return text
        mean_s = sum(self.taken_s) / len(self.taken_s)
        this_s = max(0.0, mean_s - (now - self.begun_s))
        left_s = mean_s * (self.cases - number) + this_s
        return f"{text}, about {duration(max(1.0, left_s))} left"


class Progress(Observer):
    """Shows the line on stderr of rank 0, if that is a terminal."""

    def __init__(self, bench: Benchmark) -> None:
        super().__init__(bench)
        self.pace = Pace()
        self.number = 0  # of the case
        self.line = None
        if tqdm and bench.is_first and sys.stderr.isatty():
            tqdm.monitor_interval = 0  # no thread beside those that are timed
            self.line = tqdm(bar_format="{desc} [{elapsed}]", leave=False)

    def phase(self, what: str) -> None:
        if self.line is None:
            return
        if not what:  # a line is going to be printed
            self.line.clear()
            return
        now = time.monotonic()
        self.pace.cases = self.bench.case_count
        # what comes before the first case, such as `prepare`, is none
        if len(self.bench.measured) != self.number:
            self.number = len(self.bench.measured)
            self.pace.begin(now)
        text = f"{self.pace.text(now)}: {self.bench.watchdog.label}: {what}"
        room = max(20, (self.line.ncols or 80) - len(" [00:00:00]"))
        self.line.set_description_str(text[:room], refresh=False)
        self.line.update(0)  # shows it, at most ten times a second

    def end(self, last_line: dict[str, object]) -> list[str]:
        if self.line is not None:
            self.line.close()
        return []
