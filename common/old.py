"""The Benchmark of scripts that are not moved yet. It goes with the last of them."""

import argparse
import atexit
import contextlib
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import psutil
import torch.distributed as dist

from common import environment
from common.benchmark import Benchmark as New
from common.benchmark import load_observers, lost
from common.cli import (
    TURN,
    abandon,
    complain,
    describe,
    end,
    leave,
    refuse,
    take_stdout,
    tell_torchrun,
)
from common.environment import BUSY, CpuLoad, Others, node_of_each, others_text
from common.groups import Group, Groups, connect, gather, share
from common.join import join, world
from common.remarks import (
    Conditions,
    Pace,
    crowded_text,
    duration,
    hints,
    label_of,
    planned_lines,
    report_lines,
)
from common.report import DISK_FAILED, Case, Report, load, not_json
from common.samples import keep_samples, rounded, stacked
from common.stats import Times
from common.table import (
    LAUNCH_HINT,
    Columns,
    Table,
    launch_bound,
    launch_mark,
    progress_line,
)
from common.timing import (
    Measured,
    StopRule,
    Timing,
    Workload,
    launch_share,
    time_steps,
)
from common.turns import turn_taker
from common.watchdog import Watchdog, end_later

RUN_ID = "TORCHELASTIC_RUN_ID"
Key = dict[str, Any]
Build = Callable[[Key, Group], Workload | Measured]  # called on the ranks of the case
# Called on rank 0: fills in case.metrics and case.check. The list has the facts of each rank.
Derive = Callable[[Case, Times, list[Any]], None]
# Called on rank 0 at the end of the run, with the cases that did not fail. Returns the sentences
# that answer what the script asks; none where the cases do not tell.
Answer = Callable[[list[Case]], list[str]]


class Benchmark:
    """A context manager for every rank. When it is left, `status` is the exit status."""

    def __init__(
        self,
        name: str,
        args: argparse.Namespace,
        tested: range | None = None,
        answer: Answer | None = None,
    ) -> None:
        """tested: the ranks that groups under test may hold; None for all of them. answer: makes
        the sentences that end the run."""
        check_flags(args)
        # ends a hang until there is a watchdog, which then renews the timer
        end_later(args.timeout)
        self.args, self.status, self.answer = args, 1, answer
        self.failure: tuple[int, str] | None = None  # of the run as a whole: status and reason
        self.silenced = False  # stdout or stderr is gone
        variables = environment.user_variables()
        rank, on_node, _, _ = world()
        self.is_first, turns = rank == 0, os.environ.get(TURN)
        files = [take_stdout()] if args.json == "-" else []
        self.progress, self.pace = progress_line(self.is_first), Pace()
        # while two commands take turns, the one that waits is idle: it disturbs nobody
        self.load = CpuLoad() if on_node == 0 and not turns else None
        self.job = join(args.device, args.backend, args.timeout)
        self.groups = Groups(self.job)
        self.turn = turn_taker(turns) if turns and self.is_first else lambda: None
        self.rule = StopRule.by_flags(args, bool(turns))
        self.table: Table | None = None
        measured_on = share(environment.collect(self.job, variables, self.load))
        path = args.json if self.is_first and not args.dry_run else None
        self.report = Report(name, measured_on, path, files=files)
        # These complete every key, as rank 0 has them: with RPC a server may be on another device
        # than the trainers.
        self.place: Key = share(
            {
                "world_size": self.job.world_size,
                "device": self.job.device.type,
                "backend": self.job.backend,
            }
        )
        self.watchdog = Watchdog(self.job, args.timeout, self.report)
        if problem := environment.problem(measured_on, tested):
            self.refuse(problem)
        observers = {type(o).__name__: o for o in load_observers(self)}  # type: ignore[arg-type]
        self.node, self.tracer = observers["Node"], observers["Trace"]
        self.lines: list[str] = []
        self.open_report()
        self.print(environment.preamble(measured_on))
        if self.replaced:
            self.print(f"# the report that was there is now {self.replaced}")
        for remark in self.report.remarks:
            self.print(f"# {remark}")
        self.done: list[Key] = share([case.key for case in self.report.cases if not case.failed])

    prepare = New.prepare

    def phase(self, what: str, ahead: int = 1) -> None:
        self.watchdog.phase(what, ahead)

    def open_report(self) -> None:
        """Begin the report or go on with it, on rank 0. End the run if that is not possible."""
        problem, status = None, 2
        self.replaced: str | None = None  # the new name of the report that was there
        if self.args.dry_run and self.args.resume:
            with contextlib.suppress(ValueError):  # there is none, or no report
                self.report.cases = load(self.args.json).cases
        if self.report.path:
            self.watchdog.phase(f"opens {self.report.path}", ahead=0)
            try:
                self.replaced = self.report.start(self.args.resume, since=restarted_after())
            except OSError as error:
                problem = f"--json {self.args.json}: {error.strerror}"
                status = 1 if error.errno in DISK_FAILED else 2
            except ValueError as error:
                problem = f"--json: {error}"
        problem, status = share((problem, status))
        if problem:
            self.refuse(problem, status)

    def complete_key(self, key: Key) -> Key:
        """The key with device, backend and world_size, where it lacks them."""
        missing = [name for name in self.place if name not in key]
        return key | {name: self.place[name] for name in missing}

    def announce(
        self,
        keys: Sequence[Key],
        longest_s: Callable[[Key], float | None] | None = None,
        all_s: float | None = None,
    ) -> None:
        """Say which cases the run is going to measure, before anything is set up for them. With
        --dry-run the run lists them and ends here.

        All ranks call it. longest_s: the most seconds to warm a case up and time it, None if no
        time limits it; by default the stop rule's. all_s: the same for the run, if it has a limit.
        """
        completed = [self.complete_key(key) for key in keys]
        planned = [key for key in completed if key not in self.done]
        limits: list[float | None] = []
        for key in planned:
            limits.append(longest_s(key) if longest_s else self.rule.longest_s)
        known = [limit for limit in limits if limit]
        if len(known) == len(limits):
            all_s = all_s or sum(known)
        self.pace = Pace(len(planned), all_s)
        if self.args.dry_run:
            self.print(planned_lines(planned))
            sys.exit(0)

    def show_progress(self, phase: str) -> None:
        """The line on a terminal: which case of how many, how long still, and what is done."""
        if not self.progress.disable:
            line = f"{self.pace.text(time.monotonic())}: {phase}: {self.watchdog.label}"
            room = max(20, (self.progress.ncols or 80) - len(" [00:00:00]"))
            self.progress.set_description_str(line[:room], refresh=False)
            self.progress.update(0)  # shows it, at most ten times a second

    def measure(
        self,
        key: Key,
        build: Build,
        derive: Derive,
        ranks: Sequence[int] | None = None,
        teams: Sequence[Sequence[int]] | None = None,
    ) -> Case | None:
        """Measure a case on `ranks`, by default on all. Returns it on rank 0, None on the others.

        All ranks of the job call it with the same arguments. A case that the resumed report holds
        is shown, not measured. key: a flat dict; device, backend and world_size are added if it
        lacks them. teams: parts of the ranks that do the same at once, each in a group of its own.
        Cases over the same ranks and teams share their groups, until one of them fails.
        """
        key = self.complete_key(key)
        ranks = tuple(range(self.job.world_size) if ranks is None else ranks)
        if problem := not_json("key", key):
            self.refuse(problem)
        if self.args.dry_run:  # a script that announces nothing
            self.print(f"# {label_of(key)}")
            return None
        if key in self.done:
            return self.show(self.report.find(key))
        case, member = Case(key=key, ranks=list(ranks)), self.job.rank in ranks
        self.watchdog.begin(label_of(key), member)
        self.pace.begin(time.monotonic())
        self.show_progress("set up")
        result = self.attempt(key, build, ranks, teams)
        if member:
            self.watchdog.phase("waits for all ranks")
        results = gather(result)
        reason, write_error = share(self.keep(case, derive, results) if results else None)
        self.watchdog.group = None  # two threads must not abort one group
        self.groups.give_back(ranks, teams, failed=reason is not None)
        self.pace.end(time.monotonic())
        if write_error:
            self.refuse(write_error, 1)
        return self.show(case if results else None)

    def attempt(
        self,
        key: Key,
        build: Build,
        ranks: tuple[int, ...],
        teams: Sequence[Sequence[int]] | None,
    ) -> tuple[Timing, Any] | None:
        """Take the groups of a case and time it, on this rank.

        Returns what `time` returned; None on ranks outside the case, and where it failed: then the
        watchdog has the reason, and this rank has closed its groups.
        """
        result, error = None, ""
        try:
            group, is_new = self.groups.take(ranks, teams)
            if group:
                self.watchdog.group = group
                if is_new:
                    connect(group.test, self.job)
                result = self.time(build(key, group), group, key)
        except Exception as raised:
            error = f"{describe(raised)} (rank {self.job.rank})"
            self.watchdog.fail(error)
            if lost(self.job.device):
                end(1, f"{error}: this process cannot use its GPU any more")
        # After the except block: its traceback held the model and its group, and is gone by now.
        if error:
            self.watchdog.group = group = None
            self.groups.give_back(ranks, teams, failed=True)
        return result

    def time(self, built: Workload | Measured, group: Group, key: Key) -> tuple[Timing, Any]:
        """Time what `build` has made, on this rank. Returns the times, and this rank's facts."""
        if isinstance(built, Measured):
            samples_s, facts = rounded(built.samples_s), built.facts
            timing = Timing(samples_s, built.rounds, built.stop, aligned=built.aligned)
        else:
            timing, facts = self.time_workload(built, group)
        timing.trace = self.tracer.after(key, built, timing, group)  # type: ignore[attr-defined]
        return timing, facts

    def time_workload(self, built: Workload, group: Group) -> tuple[Timing, Any]:
        """Time a workload by the timed loop, on this rank."""

        def progress(phase: str) -> None:
            self.turn()
            self.watchdog.phase(phase)
            self.show_progress(phase)

        timing = time_steps(built, group, self.job.device, self.rule, progress)
        timing.samples_s = rounded(timing.samples_s)
        self.watchdog.phase("check")
        return timing, built.facts()

    def keep(self, case: Case, derive: Derive, results: list[Any]) -> tuple[str | None, str | None]:
        """Complete the case and write it, on rank 0.

        Returns why it failed and why it could not be written, each None if it did not happen.
        results: what `time` returned on each rank of the job.
        """
        reason, failed_rank = self.watchdog.failure()
        if reason is None:
            try:
                timings, facts = zip(*(results[rank] for rank in case.ranks), strict=True)
                self.complete(case, derive, timings, list(facts))
                reason = not_json("metric", case.metrics)
            except Exception as error:
                reason = describe(error)
        if reason:
            case.metrics, case.check = {}, f"failed: {reason}"
            if failed_rank is not None:
                case.metrics["failed_rank"] = failed_rank
        if self.report.path:
            self.watchdog.phase(f"writes {self.report.path}", ahead=0)
        try:
            self.report.add(case)
        except OSError as error:
            return reason, f"--json {self.args.json}: {error.strerror}"
        return reason, None

    def complete(
        self, case: Case, derive: Derive, timings: Sequence[Timing], facts: list[Any]
    ) -> None:
        """Fill in the samples, the metrics and the check. timings, facts: one of each rank.

        The metrics are of all samples, also where the case keeps a part of them.
        """
        first = timings[0]
        samples_s = stacked([timing.samples_s for timing in timings])
        case.aligned, case.rounds, case.stop = first.aligned, first.rounds, first.stop
        keep_samples(case, samples_s)
        if first.launching_s:
            case.metrics["launch_share"] = launch_share(timings)
        returned = [timing.returned for timing in timings]
        self.lines = self.tracer.row(case, [vars(timing).get("trace") for timing in timings])
        derive(case, Times(samples_s, case.rounds, returned), facts)

    def begin_table(self, title: str, columns: Columns, widest: Sequence[str] = ()) -> None:
        """Begin the table that shows the next cases. All ranks call it.

        columns: a header -> a function of a case that makes the cell. widest: a wide cell for each
        of the first columns, where `0.0000` would be too narrow: it sets the column's width.
        """
        self.table = Table(columns, widest)
        self.print(f"\n{title}\n")

    def show(self, case: Case | None) -> Case | None:
        if case and self.table:
            self.print(self.table.row(case) + launch_mark(case))
        for line in self.lines:
            self.print(f"# {line}")
        self.lines = []
        return case

    def print(self, text: str) -> None:
        """Print on rank 0. If stdout is gone, the run goes on for its report, if it writes one."""
        if self.is_first:
            try:
                self.progress.write(text, file=sys.stdout)
                sys.stdout.flush()
            except OSError as error:
                self.silenced = True
                abandon(sys.stdout)
                if not self.args.json:
                    self.refuse(f"stdout: {error.strerror}; without --json the run ends here", 1)
                goes_on = f"the run goes on, {self.args.json} gets its cases"
                complain(f"error: stdout: {error.strerror}; {goes_on}")

    def fail(self, reason: str, status: int = 1) -> None:
        """Let the run end with this status although its cases passed. The first reason counts. Call
        it on rank 0."""
        self.failure = self.failure or (status, reason)
        complain(f"error: {reason}")

    def refuse(self, problem: str, status: int = 2) -> None:
        """End the run, by default for a mistake that shows only in the job.

        All ranks call it, or rank 0 alone where only it knows; the launcher then ends the others.
        """
        if hasattr(self, "watchdog"):  # not before the ranks have met
            self.watchdog.stop()
        refuse(problem, status)

    def __enter__(self) -> "Benchmark":
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is None:
            self.finish()
        # Everything has been printed and written. What fails from here on changes no exit status.
        with contextlib.suppress(RuntimeError):
            if error is None:
                self.groups.close_all()
                dist.barrier()
        self.watchdog.stop()
        with contextlib.suppress(RuntimeError):
            if error is None:
                dist.destroy_process_group()
        if error is None:
            atexit.register(leave, self.status)

    def load_of_others(self) -> list[Others]:
        """What other programs took from each node during the run. All ranks call it; [] on all but
        rank 0, and while two commands take turns."""
        rows = gather(self.load.of_others() if self.load else None) or []
        return [row for row in rows if row]

    def disturbed(self) -> Others | None:
        """What other programs took from the node where they took most, so far. None if it was no
        more than a tenth of its cores. All ranks call it."""
        busiest = max(self.load_of_others(), key=lambda load: load.fraction, default=None)
        return share(busiest if busiest and busiest.fraction > BUSY else None)

    def uncertain(self, others: list[Others]) -> list[str]:
        """Lines about intervals that are missing or wide. others: of each node."""
        measured_on, args = self.report.environment, self.args
        conditions = Conditions(
            iters=args.iters,
            min_iters=args.min_iters,
            max_seconds=args.max_seconds,
            others=others_text(measured_on["hosts"], others),
            crowded=crowded_text(measured_on["ranks"], others, node_of_each(measured_on)),
        )
        passed = [case for case in self.report.cases if not case.failed]
        return hints(passed, conditions) if self.table else []

    def print_answer(self) -> list[str]:
        """Print the sentences that answer what the script asks. Returns them; [] without any."""
        passed = [case for case in self.report.cases if not case.failed]
        sentences = self.answer(passed) if self.answer else []
        if sentences:
            self.print("")
        for sentence in sentences:
            self.print(f"# {sentence}")
        return sentences

    def finish(self) -> None:
        """Print remarks about the run as a whole, write the report's last line, and set status."""
        last_line: dict[str, Any] = {}
        remarks = self.node.end(last_line)
        cases = self.report.cases
        last_line["others"] = self.load_of_others()
        remarks += self.uncertain(last_line["others"])
        if any(launch_bound(case) for case in cases):
            self.print(LAUNCH_HINT)
        if remarks:
            self.print("")
        for remark in remarks:
            self.print(f"# {remark}")
        for line in report_lines(self.report.path, self.replaced):
            self.print(f"# {line}")
        self.print(f"# elapsed {duration(time.time() - psutil.Process().create_time())}")
        if sentences := self.print_answer():
            last_line["answer"] = sentences
        status, reason = self.failure or (0, "")
        if failed := [case for case in cases if case.failed]:
            first = f"{label_of(failed[0].key)}: {failed[0].check}"
            reason = reason or f"{len(failed)} of {len(cases)} cases failed; {first}"
            status = 1
        try:
            self.report.finish("failed" if status == 1 else "complete", **last_line)
        except OSError as full:
            status, reason = 1, f"--json {self.args.json}: {full.strerror}"
            complain(f"error: {reason}")
        self.progress.close()
        try:
            sys.stderr.flush()
            os.write(2, b"")  # fails where stderr was closed from the start
        except OSError as why:
            self.silenced = True
            abandon(sys.stderr)
            self.print(f"# error: stderr: {why.strerror}; warnings may be missing")
        if self.silenced:
            status, reason = 1, reason or "stdout or stderr could not be written"
        self.status, reason = share((status, reason))
        if self.status:
            tell_torchrun(reason)


def check_flags(args: argparse.Namespace) -> None:
    """Refuse flags of all scripts that do not go together."""
    if args.json == "" or (args.resume and args.json in (None, "-")):
        refuse("expected --json PATH, the report to write or resume, e.g. --json report.jsonl")
    if args.profile_ranks and not args.profile:
        refuse("--profile-ranks needs the folder of the traces; e.g. --profile traces")


def restarted_after() -> float:
    """If torchrun has restarted its ranks: when torchrun itself started, in seconds since 1970.
    A newer report comes from the same torchrun, so --max-restarts goes on with it. Else infinite.
    """
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        return math.inf
    torchrun = psutil.Process().parent()
    with contextlib.suppress(psutil.Error):  # of another user: that is no wrapper of ours
        # a wrapper that torchrun has started has the variables of its ranks
        while torchrun and torchrun.environ().get(RUN_ID) == os.environ.get(RUN_ID):
            torchrun = torchrun.parent()
    if torchrun is None:  # outside the container of this rank
        return math.inf
    return torchrun.create_time() - 1  # the report has whole seconds
