"""One run of a script: its cases one after the other, each a row and a line of the report.

A case that fails on any rank is a row with its reason, and the run goes on.
"""

import argparse
import faulthandler
import gc
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from common import environment, gpus
from common.cli import refuse
from common.dist import Group, close_group, gather, open_group, share
from common.join import join
from common.report import Case, Report, not_json
from common.table import Columns, Table, progress_line
from common.timing import Step, StopRule, time_steps
from common.watchdog import Watchdog

LAUNCH_BOUND = 0.9  # of the device's time is spent launching
LAUNCH_HINT = """
# launch-bound: the host takes over 90 % of the time to launch the kernels, so this measures
# Python; try a larger --batch-size, CUDA graphs (-G) or compile"""
TURN = "TORCHRUN_BENCH_TURN"  # the two named pipes of `analysis/ab.py --interleave`
TURN_ROUNDS = 24  # of a case that takes turns with those of another command


@dataclass
class Workload:
    """What a rank does in a case."""

    # timed in alternating blocks; the first one is what the case is about. None of them where
    # build has timed the case: then `derive` fills in the samples
    steps: dict[str, Step]
    calls: int = 1  # of a step in one sample, for steps shorter than the clock
    facts: Callable[[], Any] = lambda: None  # after the timing, untimed; gathered for `derive`


Build = Callable[[Group], Workload]
Derive = Callable[[Case, list[Any]], None]  # on rank 0: fills case.metrics and case.check


class Benchmark:
    """Use it as a context manager, on every rank. `status` is the exit status after it."""

    def __init__(self, name: str, args: argparse.Namespace, tested: range | None = None) -> None:
        """tested: the ranks that the groups under test may hold; None for all of them."""
        if args.json == "" or (args.resume and not args.json):
            refuse("expected --json PATH, the report to write or resume, e.g. --json report.jsonl")
        faulthandler.dump_traceback_later(args.timeout * 1.5 + 20, exit=True)  # until the watchdog
        self.args, self.status, self.failed, turns = args, 1, False, TURN in os.environ
        bind_cores = getattr(args, "bind_cores", False)
        self.job = join(args.device, args.backend, args.timeout, bind_cores)
        self.turn = Turn() if self.job.rank == 0 and turns else None
        flags = (args.warmup_iters, args.iters, args.min_iters, args.target_ci, args.max_seconds)
        self.rule = StopRule(*flags, TURN_ROUNDS if turns else None, args.timeout / 4)
        self.table: Table | None = None
        self.launch_bound = False
        self.progress = progress_line(self.job.rank == 0)
        self.report = Report(name, environment.collect(self.job), args.json)
        self.watchdog = Watchdog(self.job, args.timeout, self.so_far)
        if problem := share(self.start(tested) if self.job.rank == 0 else None):
            self.refuse(problem)
        self.done: list[dict[str, Any]] = share([c.key for c in self.report.cases if not c.failed])

    def start(self, tested: range | None) -> str | None:
        """Begin the report, on rank 0. Why there is nothing to measure, or None."""
        found = self.report.environment
        if problem := environment.problem(found, tested):
            return problem
        if found["differences"] and getattr(self.args, "strict_topology", False):
            return f"--strict-topology: {found['differences'][0]}"
        try:
            self.report.start(self.args.resume)
        except OSError as error:
            return f"--json {self.args.json} cannot be written: {error.strerror}"
        except ValueError as error:
            return str(error)
        self.print(environment.preamble(self.report.benchmark, found))
        return None

    def measure(
        self,
        key: dict[str, Any],
        build: Build,
        derive: Derive,
        ranks: Sequence[int] | None = None,
        teams: Sequence[Sequence[int]] | None = None,
    ) -> Case | None:
        """Measure a case on `ranks` (by default all). The case on rank 0, None elsewhere.

        All ranks of the job call it with the same key and ranks. A case that the resumed report
        holds is shown, not measured. teams: parts of the ranks that do the same at the same time,
        each in a group of its own.
        """
        ranks = tuple(range(self.job.world_size) if ranks is None else ranks)
        if key in self.done:
            return self.show(self.report.find(key))
        case, member = Case(key, list(ranks)), self.job.rank in ranks
        label = " ".join(str(value) for value in key.values() if not isinstance(value, bool | None))
        self.progress.set_description_str(label)
        self.watchdog.begin(label, member)
        group, facts, error = None, None, ""
        try:
            if (group := open_group(ranks, self.job, teams)) is not None:
                self.watchdog.group = group
                facts = self.time(case, build(group), group, label)
        except Exception as raised:
            error = describe(raised)
            self.watchdog.fail(f"{error} (rank {self.job.rank})")
        if "CUDA error" in error and "out of memory" not in error:
            self.end(f"{error}: this process cannot use its GPU any more")
        if error and group is not None:
            # gloo's peers notice once the sockets are closed, which is when nothing refers to the
            # group; the traceback, which held the model and its group, is gone by now
            gc.collect()
            close_group(group, failed=True)
            group = None
            gc.collect()
        if member:
            self.watchdog.phase(label, "waits for all ranks")
        rows = gather((facts, case))
        if rows is not None:
            case = rows[ranks[0]][1]  # the first rank of the case has the samples
        problem = share(self.keep(case, derive, [row[0] for row in rows]) if rows else None)
        if group is not None:
            close_group(group, failed=problem is not None)  # its peers may have left collectives
        gc.collect()
        if problem and self.job.device.type == "cuda":
            with suppress(RuntimeError):  # of a context that is lost
                torch.cuda.empty_cache()
        if problem and problem.startswith("--json"):
            self.end(problem)
        return self.show(case) if rows is not None else None

    def time(self, case: Case, work: Workload, group: Group, label: str) -> Any:
        """Time the steps of a case. What its `facts` then say."""

        def progress(phase: str) -> None:
            if self.turn:
                self.turn.pass_on()
            self.watchdog.phase(label, phase)

        if work.steps:
            device = self.job.device
            timing = time_steps(work.steps, group, device, self.rule, work.calls, progress)
            case.samples_s = {n: rows.round(9).tolist() for n, rows in timing.samples_s.items()}
            case.rounds, case.stop = timing.rounds, timing.stop
            if timing.launch_share:
                case.metrics["launch_share"] = timing.launch_share
            self.watchdog.phase(label, "check")
        return work.facts()

    def keep(self, case: Case, derive: Derive, facts: list[Any]) -> str | None:
        """Complete the case and add it to the report; on rank 0. What went wrong, or None."""
        reason = self.watchdog.reason()
        if reason is None:
            try:
                derive(case, [facts[rank] for rank in case.ranks])
                reason = not_json(case.metrics)
            except Exception as error:
                reason = describe(error)
        if reason:
            case.metrics, case.check = {}, f"failed: {reason}"
        try:
            self.report.add(case)
        except OSError as error:
            return f"--json {self.args.json}: {error.strerror}; it holds the cases before this one"
        return reason

    def begin_table(self, title: str, columns: Columns, widest: Sequence[str] = ()) -> None:
        """The rows of the cases that follow go here."""
        self.table = Table(columns, widest)
        self.print(f"\n{title}\n")

    def show(self, case: Case | None) -> Case | None:
        if case is not None and self.table is not None:
            most = max(case.metrics.get("launch_share", {"": 0.0}).values())
            mark = f"  launch-bound {most:.0%}" if most > LAUNCH_BOUND else ""
            self.launch_bound |= bool(mark)
            self.print(self.table.row(case) + mark)
        return case

    def print(self, text: str) -> None:
        """Print on rank 0."""
        if self.job.rank == 0:
            self.progress.write(text, file=sys.stdout)
            sys.stdout.flush()

    def share(self, value: Any) -> Any:
        """Rank 0's value, on all ranks."""
        return share(value)

    def fail(self, reason: str) -> None:
        """Let the run fail although its cases passed; on rank 0."""
        self.failed = True
        print(f"error: {reason}", file=sys.stderr, flush=True)

    def refuse(self, problem: str, status: int = 2) -> None:
        """End the run for a mistake that only the running job shows. On all ranks, in one line."""
        self.watchdog.stop()
        refuse(problem, status)

    def end(self, reason: str) -> None:
        """End the run, which cannot go on, in one line."""
        self.refuse(reason, status=1)

    def so_far(self) -> str:
        """How much is measured, for the last line of a run that a signal ends."""
        kept = f" and in {self.args.json}; go on with --resume" if self.args.json else ""
        return f"{len(self.report.cases)} cases are measured{kept}"

    def __enter__(self) -> "Benchmark":
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is None:
            last = gpus.at_the_end(self.job)
            self.status = share(self.finish(last) if self.job.rank == 0 else None)
            dist.barrier()
        self.watchdog.stop()
        if error is None:
            dist.destroy_process_group()

    def finish(self, last: dict[str, list[Any]]) -> int:
        """Say what there is to say, and end the report; on rank 0. The exit status."""
        if self.launch_bound:
            self.print(LAUNCH_HINT)
        for line in gpus.throttled(self.report.environment["hosts"], last["gpus"]):
            self.print(f"# warning: {line} at the end of the run")
        for choices in last["nccl"][:1]:  # of the first node
            chosen = [f"{name} {', '.join(names)}" for name, names in choices.items() if names]
            self.print(f"# NCCL chose {'; '.join(chosen)}")
        self.failed |= any(case.failed for case in self.report.cases)
        try:
            rows = {name: rows for name, rows in last.items() if rows}
            self.report.finish("failed" if self.failed else "complete", **rows)
        except OSError as error:
            self.fail(f"--json {self.args.json}: {error.strerror}; every case is in it")
        self.progress.close()
        return int(self.failed)


class Turn:
    """A place among commands of which only one measures at a time: `analysis/ab.py --interleave`.

    A byte in the first pipe is this command's turn, in the second one the other's. A command keeps
    its turn while it sets up a case or gathers.
    """

    def __init__(self) -> None:
        grant, release = os.environ[TURN].split(":")
        self.grant = os.open(grant, os.O_RDONLY)
        self.release = os.open(release, os.O_WRONLY)
        os.read(self.grant, 1)

    def pass_on(self) -> None:
        """Let the others have theirs, and come back with the next one."""
        os.write(self.release, b".")
        os.read(self.grant, 1)


def describe(error: BaseException) -> str:
    """The error in one line."""
    lines = str(error).strip().splitlines()
    if lines and "On WorkerInfo(" in lines[0] and len(lines) > 1:  # what RPC adds
        return lines[1]
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
