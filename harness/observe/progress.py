"""The progress of a run on stderr of rank 0: the case, its phase, and the elapsed and remaining
time. On a terminal it is one line; otherwise, lines report only a case that is built slowly."""

import os
import sys
import threading
import time
from contextlib import suppress

from harness.benchmark import Benchmark, Observer
from harness.cli import duration
from harness.exits import write_stderr

FIRST_S, NEXT_S = 5.0, 60.0  # after which a line reports a slow build, and then another one
TICK_S = 1.0  # between updates of the line on a terminal while a case is built
CLEAR = "\r\x1b[K"  # deletes the line of a terminal


class Progress(Observer):
    """On a terminal, writes the line in each phase, and every TICK_S while a case is set up or
    compiled. Otherwise prints a line if that has taken FIRST_S, and every NEXT_S."""

    def __init__(self, bench: Benchmark) -> None:
        super().__init__(bench)
        self.is_terminal = bench.is_first and sys.stderr.isatty()
        self.label = self.what = ""
        self.timer: threading.Timer | None = None  # while a case is built; never in blocks
        self.lock = threading.RLock()  # held while a line is written
        self.start_s = self.case_start_s = time.monotonic()

    def begin(self, label: str, member: bool) -> None:
        self.label, self.case_start_s = label, time.monotonic()
        if len(self.bench.measured) == 1:
            self.start_s = self.case_start_s

    def phase(self, what: str, ahead: int) -> None:
        with self.lock:
            self.what = what
            if self.is_terminal:
                self.write()
            if not (is_building(what) and self.bench.is_first):
                if self.timer:
                    self.timer.cancel()
                self.timer = None
            elif self.timer is None:
                self.start_timer(TICK_S if self.is_terminal else FIRST_S)

    def start_timer(self, seconds: float) -> None:
        self.timer = threading.Timer(seconds, self.tick)
        self.timer.daemon = True
        self.timer.start()

    def tick(self) -> None:
        """Write a line, on the thread of the timer."""
        with self.lock:
            if self.timer is threading.current_thread():  # otherwise the build has ended
                self.write()
                self.start_timer(TICK_S if self.is_terminal else NEXT_S)

    def write(self) -> None:
        """Write a line; on a terminal in place of the previous one, which is only deleted if there
        is no phase, because a row is about to be printed."""
        number, count = len(self.bench.measured), self.bench.case_count
        of = f" of {count}" if number <= count else ""
        line = f"case {number}{of}: {self.label}: {self.what}" if number else self.what
        spent_s = time.monotonic() - self.case_start_s
        times = f", {duration(spent_s)}{self.left(spent_s)}"
        if not self.is_terminal:
            write_stderr(f"# {line}{times}")
            return
        width = 80
        with suppress(OSError):
            width = os.get_terminal_size(sys.stderr.fileno()).columns or width
        room = max(20, width - 1 - len(times))
        write_stderr(CLEAR + line[:room] + times if self.what else CLEAR, end="")

    def left(self, spent_s: float) -> str:
        """`; about 3 min left`, if the remaining cases take as long as those so far. spent_s: on
        this case."""
        done, count = len(self.bench.measured) - 1, self.bench.case_count
        if not 0 < done < count:
            return ""
        before_s = self.case_start_s - self.start_s
        each_s = max(before_s / done, (before_s + spent_s) / (done + 1))
        rest_s = each_s * (count - done - 1) + max(0.0, each_s - spent_s)
        return f"; about {duration(rest_s)} left" if rest_s > 0 else ""

    def stop(self) -> None:
        self.phase("", 0)


def is_building(what: str) -> bool:
    """Whether a phase is before all blocks and may be long: set-up, compilation, or the first
    iteration of a step, which may include both."""
    long = what == "setup" or what.startswith("preparing ") or what.endswith(", warm-up 1")
    return long or "compiles" in what
