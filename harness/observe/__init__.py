"""Observers of a run. Measuring does not depend on them: this folder may be deleted."""

from harness.benchmark import Observer
from harness.observe.hints import Hints
from harness.observe.load import Load
from harness.observe.nodes import Nodes
from harness.observe.progress import Progress
from harness.observe.trace import Trace
from harness.observe.watchdog import Watchdog

ALL: tuple[type[Observer], ...] = (Watchdog, Nodes, Load, Hints, Progress, Trace)
