"""One run of a script: its cases one after the other, each a row and a line of the report.

A case that fails on any rank is a row with its reason, and the run goes on.
"""

import argparse
import faulthandler
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from common import environment, gpus
from common.cli import TURN, describe, end, refuse, turn_taker
from common.dist import Group, close_group, connect, gather, open_group, share
from common.join import join
from common.report import Case, Report, not_json
from common.table import LAUNCH_HINT, Columns, Table, launch_bound, progress_line
from common.timing import Step, StopRule, Timing, launch_share, samples_of, time_steps
from common.watchdog import Watchdog


@dataclass
class Workload:
    """What a rank does in a case."""

    # timed in alternating blocks; the first one is what the case is about. None of them where
    # build has timed the case: then `derive` fills in the samples
    steps: dict[str, Step]
    calls: int = 1  # of a step in one sample, for steps shorter than the clock
    facts: Callable[[], Any] = lambda: None  # after the timing, untimed; gathered for `derive`
    launches: bool = False  # the host only launches kernels in a step: say where that limits it


Derive = Callable[[Case, list[Any]], None]  # on rank 0: fills case.metrics and case.check


class Benchmark:
    """Use it as a context manager, on every rank. `status` is the exit status after it."""

    def __init__(self, name: str, args: argparse.Namespace, tested: range | None = None) -> None:
        """tested: the ranks that the groups under test may hold; None for all of them."""
        if args.json == "" or (args.resume and not args.json):
            refuse("expected --json PATH, the report to write or resume, e.g. --json report.jsonl")
        faulthandler.dump_traceback_later(args.timeout * 1.5 + 20, exit=True)  # until the watchdog
        self.args, self.status, self.failed = args, 1, False
        self.job = join(args.device, args.backend, args.timeout, getattr(args, "bind_cores", False))
        first, turns = self.job.rank == 0, os.environ.get(TURN)
        self.turn = turn_taker(turns) if turns and first else lambda: None
        self.rule = StopRule.by_flags(args, bool(turns))
        self.table: Table | None = None
        self.progress = progress_line(first)
        found = share(environment.collect(self.job))
        self.report = Report(name, found, args.json if first else None)
        self.watchdog = Watchdog(self.job, args.timeout, self.report)
        problem = environment.problem(found, tested)
        try:
            if not problem:
                self.report.start(args.resume)
        except (OSError, ValueError) as error:
            problem = f"--json: {error}"
        if problem := share(problem):
            self.refuse(problem)
        self.print(environment.preamble(name, found))
        self.done: list[dict[str, Any]] = share([c.key for c in self.report.cases if not c.failed])

    def measure(
        self,
        key: dict[str, Any],
        build: Callable[[Group], Workload],
        derive: Derive,
        ranks: Sequence[int] | None = None,
        teams: Sequence[Sequence[int]] | None = None,
    ) -> Case | None:
        """Measure a case on `ranks` (by default all). The case on rank 0, None elsewhere.

        All ranks of the job call it alike. A case that the resumed report holds is shown, not
        measured. teams: parts of the ranks that do the same at once, each in a group of its own.
        """
        ranks = tuple(range(self.job.world_size) if ranks is None else ranks)
        if key in self.done:
            return self.show(self.report.find(key))
        case, member = Case(key, list(ranks)), self.job.rank in ranks
        label = " ".join(str(value) for value in key.values() if not isinstance(value, bool | None))
        self.progress.set_description_str(label)
        self.watchdog.begin(label, member)
        group, found, error = None, None, ""
        try:
            if group := open_group(ranks, self.job, teams):
                self.watchdog.group = group
                connect(group, self.job.device)
                found = self.time(build(group), group)
        except Exception as raised:
            error = f"{describe(raised)} (rank {self.job.rank})"
            self.watchdog.fail(error)
            if gpus.lost(self.job.device):
                end(1, f"{error}: this process cannot use its GPU any more")
        if error and group:  # the traceback, which held the model and its group, is gone by now
            self.watchdog.group = None
            close_group(group, failed=True)
            group = None
        if member:
            self.watchdog.phase("waits for all ranks")
        rows = gather(found)
        reason, full = share(self.keep(case, derive, rows) if rows else None)
        if group:
            self.watchdog.group = None  # or gloo's threads outlive the interpreter, and crash
            close_group(group, failed=reason is not None)  # its peers may have left collectives
        if full:
            self.refuse(full, 1)
        return self.show(case if rows else None)

    def time(self, work: Workload, group: Group) -> tuple[Timing | None, Any]:
        """Time the steps of a case on this rank. The times, and what its `facts` then say."""

        def progress(phase: str) -> None:
            self.turn()
            self.watchdog.phase(phase)

        timing = None
        if work.steps:
            timing = time_steps(work.steps, group, self.job.device, self.rule, work.calls, progress)
            if not work.launches or self.job.device.type != "cuda":
                timing.launching_s = {}
            self.watchdog.phase("check")
        return timing, work.facts()

    def keep(self, case: Case, derive: Derive, rows: list[Any]) -> tuple[str | None, str | None]:
        """Complete and report the case, on rank 0. Why it failed; why it could not be written."""
        reason, full = self.watchdog.reason(), None
        if reason is None:
            try:
                timings, facts = zip(*(rows[rank] for rank in case.ranks), strict=True)
                if first := timings[0]:
                    case.samples_s = samples_of(timings)
                    case.rounds, case.stop = first.rounds, first.stop
                    if first.launching_s:
                        case.metrics["launch_share"] = launch_share(timings)
                derive(case, list(facts))
                reason = not_json(case.metrics)
            except Exception as error:
                reason = describe(error)
        if reason:
            case.metrics, case.check = {}, f"failed: {reason}"
        try:
            self.report.add(case)
        except OSError as error:
            full = f"--json {self.args.json}: {error.strerror}; it holds the cases before this one"
        return reason, full

    def begin_table(self, title: str, columns: Columns, widest: Sequence[str] = ()) -> None:
        """The rows of the cases that follow go here."""
        self.table = Table(columns, widest)
        self.print(f"\n{title}\n")

    def show(self, case: Case | None) -> Case | None:
        if case and self.table:
            self.print(self.table.row(case) + launch_bound(case))
        return case

    def print(self, text: str) -> None:
        """Print on rank 0."""
        if self.job.rank == 0:
            self.progress.write(text, file=sys.stdout)
            sys.stdout.flush()

    def fail(self, reason: str) -> None:
        """Let the run fail although its cases passed; on rank 0."""
        self.failed = True
        print(f"error: {reason}", file=sys.stderr, flush=True)

    def refuse(self, problem: str, status: int = 2) -> None:
        """End the run, by default for a mistake that only the running job shows. On all ranks."""
        self.watchdog.stop()
        refuse(problem, status)

    def __enter__(self) -> "Benchmark":
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is None:
            last, remarks = gpus.at_the_end(self.job, self.report.environment["hosts"])
            if any(map(launch_bound, self.report.cases)):
                self.print(LAUNCH_HINT)
            for line in remarks:
                self.print(f"# {line}")
            self.failed |= any(case.failed for case in self.report.cases)
            try:
                self.report.finish("failed" if self.failed else "complete", **last)
            except OSError as full:
                self.fail(f"--json {self.args.json}: {full.strerror}; every case is in it")
            self.progress.close()
            self.status = share(int(self.failed))
            dist.barrier()
        self.watchdog.stop()
        if error is None:
            dist.destroy_process_group()
