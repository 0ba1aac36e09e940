"""CPU use by other processes: a warning at the start, and the average of the run."""

from typing import Any

from harness.benchmark import Benchmark, Observer
from harness.cpu_load import CpuLoad, Others
from harness.environment import others_text


class Load(Observer):
    """Measures CPU use by other processes on each node, from the node's first rank. Not for
    interleaved commands, which are idle while the other one measures."""

    def __init__(self, bench: Benchmark) -> None:
        super().__init__(bench)
        if bench.is_interleaved:
            return
        self.load = CpuLoad() if bench.job.local_rank == 0 else None
        bench.load_of_others, bench.records_load = self.of_each_node, True
        if busy := others_text(bench.report.environment["hosts"], self.of_each_node()):
            bench.print(f"# warning: {busy}: times will be noisy")

    def of_each_node(self) -> list[Others]:
        """Return the average since the start for each node, on rank 0. All ranks call it."""
        rows = self.bench.job.gather(self.load.of_others() if self.load else None) or []
        return [row for row in rows if row]

    def end(self, last_line: dict[str, Any]) -> list[str]:
        loads = self.bench.load_of_others()
        if loads and self.bench.measured:  # otherwise keep that of the run that measured the cases
            last_line["others"] = loads
        return []
