"""The progress of a run on stderr of rank 0: the case, its current phase, elapsed and remaining
time. On a terminal it is one line; otherwise, lines report only a case that is built slowly."""

import sys
import threading
import time

from harness.benchmark import Benchmark, Observer
from harness.cli import duration
from harness.exits import write_stderr

try:
    from tqdm import tqdm
except ModuleNotFoundError:  # then there is no such line
    tqdm = None

# by tqdm, which assumes that the remaining cases take as long as those before them
ELAPSED, WITH_REMAINING = "{desc} [{elapsed}]", "{desc} [{elapsed}<{remaining}]"
FIRST_S, NEXT_S = 5.0, 60.0  # after which a line reports a slow build, and then another one
TICK_S = 1.0  # between updates of the line on a terminal while a case is built


class Progress(Observer):
    """Shows the line on stderr of rank 0, if that is a terminal, with the elapsed time while a case
    is set up or compiled. Otherwise prints a line if that has taken FIRST_S, and every NEXT_S."""

    def __init__(self, bench: Benchmark) -> None:
        super().__init__(bench)
        self.line = None
        self.label = self.what = ""
        self.timer: threading.Timer | None = None  # while a case is built; never in blocks
        self.lock = threading.RLock()  # held while the timer writes
        self.start_s = self.case_start_s = time.monotonic()
        if tqdm and bench.is_first and sys.stderr.isatty():
            tqdm.monitor_interval = 0  # no thread in addition to those that are timed
            self.line = tqdm(bar_format=ELAPSED, miniters=0, smoothing=0, leave=False)

    def begin(self, label: str, member: bool) -> None:
        self.stop()
        self.label, self.case_start_s = label, time.monotonic()
        if len(self.bench.measured) == 1:
            self.start_s = self.case_start_s

    def phase(self, what: str, ahead: int) -> None:
        self.watch_build(what)
        if self.line is None:
            return
        if not what:  # a line is about to be printed
            self.line.clear()
            return
        number, count = max(1, len(self.bench.measured)), self.bench.case_count
        self.line.n, self.line.total = number - 1, count or None
        self.line.bar_format = WITH_REMAINING if count else ELAPSED
        room = max(20, (self.line.ncols or 80) - len(" [00:00:00<00:00:00]"))
        self.line.set_description_str(f"{self.case}: {what}"[:room], refresh=False)
        self.line.update(0)  # displays it, at most ten times a second

    @property
    def case(self) -> str:
        """`case 2 of 6: 1M/2R`"""
        number, count = max(1, len(self.bench.measured)), self.bench.case_count
        of = f" of {count}" if number <= count else ""
        return f"case {number}{of}: {self.label}"

    def watch_build(self, what: str) -> None:
        """Let a timer write while the case is built; not during timed phases."""
        if not (is_building(what) and self.bench.is_first):
            self.stop()
            return
        self.what = what
        if self.timer is None:
            self.start_timer(FIRST_S if self.line is None else TICK_S)

    def start_timer(self, seconds: float) -> None:
        self.timer = threading.Timer(seconds, self.tick)
        self.timer.daemon = True
        self.timer.start()

    def tick(self) -> None:
        """Update the line on a terminal, or print one, on the thread of the timer."""
        with self.lock:
            if self.timer is not threading.current_thread():
                return  # the build has ended
            if self.line is None:
                self.tell()
            else:
                self.line.refresh()
            self.start_timer(NEXT_S if self.line is None else TICK_S)

    def tell(self) -> None:
        now = time.monotonic()
        where = f"{self.case}: " if self.bench.measured else ""
        write_stderr(f"# {where}{self.what}, {duration(now - self.case_start_s)}{self.left}")

    @property
    def left(self) -> str:
        """`; about 3 min left`, if the remaining cases take as long as those before them."""
        done, count = len(self.bench.measured) - 1, self.bench.case_count
        if not 0 < done < count:
            return ""
        mean_s = (self.case_start_s - self.start_s) / done
        rest_s = mean_s * (count - done) - (time.monotonic() - self.case_start_s)
        return f"; about {duration(max(0, rest_s))} left" if rest_s > 0 else ""

    def end(self, last_line: dict[str, object]) -> list[str]:
        self.stop()
        if self.line is not None:
            self.line.close()
        return []

    def stop(self) -> None:
        with self.lock:
            if self.timer is not None:
                self.timer.cancel()
                self.timer = None


def is_building(what: str) -> bool:
    """Whether a phase is before all blocks and may be long: set-up, compilation, or the first
    iteration of a step, which may include both."""
    long = what == "setup" or what.startswith("preparing ") or what.endswith(", warm-up 1")
    return long or "compiles" in what
