"""One run of a script: its cases one after the other, each a row and a line of the report.

A case that fails on any rank is a row with its reason, and the run goes on.
"""

import argparse
import faulthandler
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from common import environment
from common.cli import check_common_flags, refuse
from common.dist import Group, PeerLost, close_group, gather, open_group, share
from common.join import join
from common.report import Case, Report
from common.table import Columns, Progress, Table
from common.timing import Step, StopRule, time_steps
from common.watchdog import Watchdog

LAUNCH_BOUND = 0.9  # of the device's time is spent launching
TURN_ROUNDS = 24  # of a case that takes turns with those of other commands
TURN = "TORCHRUN_BENCH_TURN"  # the two named pipes of `analysis/ab.py --interleave`


@dataclass
class Workload:
    """What a rank does in a case.

    steps: timed in alternating blocks; the first one is the step that the case is about. None
    where build has timed the case: then `derive` fills in the samples. calls: of a step in one
    sample, for steps shorter than the clock. facts: called after the timing, untimed; what it
    returns is gathered for `derive`.
    """

    steps: dict[str, Step]
    calls: int = 1
    facts: Callable[[], Any] = lambda: None


Build = Callable[[Group], Workload]
Derive = Callable[[Case, list[Any]], None]  # on rank 0: fills case.metrics and case.check


class Benchmark:
    """Use it as a context manager, on every rank. `status` is the exit status after it."""

    def __init__(self, name: str, args: argparse.Namespace, tested: range | None = None) -> None:
        """tested: the ranks that the groups under test may hold; None for all of them."""
        check_common_flags(args)
        faulthandler.dump_traceback_later(args.timeout * 1.5 + 20, exit=True)  # until the watchdog
        self.args, self.status = args, 1
        bind_cores = getattr(args, "bind_cores", False)
        self.job = join(args.device, args.backend, args.timeout, bind_cores, tested)
        self.turn = Turn() if self.job.rank == 0 and TURN in os.environ else None
        self.rule = StopRule(
            args.warmup_iters,
            args.iters,
            args.min_iters,
            args.target_ci,
            args.max_seconds,
            rounds=TURN_ROUNDS if TURN in os.environ else None,
            longest_block_s=args.timeout / 4,
        )
        self.table: Table | None = None
        self.problem: str | None = None
        self.launch_bound = False
        self.progress = Progress(self.job.rank == 0)
        found = environment.collect(self.job)
        self.report = Report(name, found or {}, args.json)
        self.watchdog = Watchdog(self.job, args.timeout, self.so_far)
        problem = None
        if found:
            problem = environment.problem(found, tested)
            differ = found["differences"]
            if not problem and differ and getattr(args, "strict_topology", False):
                problem = f"--strict-topology: {differ[0]}"
            problem = problem or self.open_report()
        if problem := share(problem):
            self.watchdog.stop()
            refuse(problem)
        if found:
            self.print(environment.preamble(name, found))
            for line in environment.warnings(found):
                self.print(f"# warning: {line}")
        self.done: list[dict[str, Any]] = share([c.key for c in self.report.cases if not c.failed])

    def open_report(self) -> str | None:
        try:
            self.report.start(self.args.resume)
        except OSError as error:
            return f"--json {self.args.json} cannot be written: {error.strerror}"
        except ValueError as error:
            text = str(error)
            return text if text.startswith("--") else f"--json would replace what is there: {text}"
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

        All ranks of the job call it, with the same key and ranks. build makes the workload on
        each rank of the case; derive turns the samples and each rank's facts into metrics and a
        check. A case that the resumed report holds is shown, not measured. teams: parts of the
        ranks that do the same at the same time, each in a group of its own.
        """
        ranks = tuple(range(self.job.world_size) if ranks is None else ranks)
        if key in self.done:
            return self.show(self.report.find(key))
        case = Case(key, list(ranks))
        label = " ".join(str(value) for value in key.values() if not isinstance(value, bool | None))
        self.progress.now(label)
        self.watchdog.begin(label, self.job.rank in ranks)
        group, facts, failed = None, None, False
        try:
            if (group := open_group(ranks, self.job, teams)) is not None:
                self.watchdog.guard(group)
                facts = self.time(case, build(group), group, label)
        except PeerLost as lost:
            self.lost(lost)
        except Exception as error:
            failed = True
            self.watchdog.fail(f"{describe(error)} (rank {self.job.rank})")
            if is_sticky(error):
                self.end(f"{describe(error)}: this process cannot use its GPU any more")
        if failed and group is not None:
            # gloo's peers notice once the sockets are closed, which is when nothing refers to the
            # group; the traceback, which held the model and its group, is gone by now
            gc.collect()
            close_group(group, failed=True)
            group = None
            gc.collect()
        if self.job.rank in ranks:
            self.watchdog.phase(label, "waits for all ranks")
        try:
            rows = gather((facts, case))
            if rows is not None:
                case = rows[ranks[0]][1]  # the first rank of the case has the samples
            given = [row[0] for row in rows or []]
            problem = share(None if rows is None else self.keep(case, derive, given))
        except PeerLost as lost:
            self.lost(lost)
        if group is not None:
            close_group(group, failed=problem is not None)  # its peers may have left collectives
        gc.collect()
        if problem and self.job.device.type == "cuda":
            with suppress(RuntimeError):  # after an error that lasts it would hide the reason
                torch.cuda.empty_cache()
        if problem and problem.startswith("--json"):
            self.end(problem)
        return self.show(case) if rows is not None else None

    def time(self, case: Case, work: Workload, group: Group, label: str) -> Any:
        def progress(phase: str) -> None:
            if self.turn:
                self.turn.pass_on()
            self.watchdog.phase(label, phase)

        if not work.steps:
            return work.facts()
        device = self.job.device
        timing = time_steps(work.steps, group, device, self.rule, work.calls, progress)
        case.samples_s = {name: rows.round(9).tolist() for name, rows in timing.samples_s.items()}
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
            share = max(case.metrics.get("launch_share", {"": 0.0}).values())
            mark = f"  launch-bound {share:.0%}" if share > LAUNCH_BOUND else ""
            self.launch_bound |= bool(mark)
            self.print(self.table.row(case) + mark)
        return case

    def print(self, text: str) -> None:
        """Print on rank 0. A closed stdout does not end the run, which may write a report."""
        if self.job.rank != 0:
            return
        try:
            self.progress.print(text)
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            self.fail(f"cannot print the tables: {error.strerror}")

    def share(self, value: Any) -> Any:
        """Rank 0's value, on all ranks."""
        return share(value)

    def refuse(self, problem: str) -> None:
        """End the run for a user's mistake that only the running job shows. On all ranks."""
        self.watchdog.stop()
        refuse(problem)

    def fail(self, reason: str) -> None:
        """Let the run fail although its cases passed; on rank 0."""
        self.problem = reason
        print(f"error: {reason}", file=sys.stderr, flush=True)

    def end(self, reason: str) -> None:
        """End the run now, on all ranks that call it: one line, status 1."""
        self.watchdog.stop()
        refuse(reason, status=1)

    def lost(self, error: PeerLost) -> None:
        """A process of the job has died. The launcher, which knows which, ends the others."""
        self.watchdog.phase(f"lost a peer: {error}", "waits for the launcher")
        if self.job.local_rank == 0:
            print(f"rank {self.job.rank} lost a peer: {error}", file=sys.stderr, flush=True)
        time.sleep(10)
        os._exit(1)

    def so_far(self) -> str:
        """How much is measured, for the last line of a run that a signal ends."""
        kept = f" and in {self.args.json}; go on with --resume" if self.args.json else ""
        return f"{len(self.report.cases)} cases are measured{kept}"

    def __enter__(self) -> "Benchmark":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self.watchdog.stop()
            if isinstance(error, PeerLost):
                self.lost(error)
            return
        after = environment.at_the_end(self.job)
        if after is not None:
            self.finish(after)
        self.status = share(self.status)
        dist.barrier()
        self.watchdog.stop()
        dist.destroy_process_group()

    def finish(self, after: dict[str, list[Any]]) -> None:
        hosts = self.report.environment["hosts"]
        if self.launch_bound:
            self.print(
                "\n# launch-bound: the host takes over 90 % of the time to launch the kernels, so "
                "this measures\n# Python; try a larger --batch-size, CUDA graphs (-G) or compile"
            )
        for line in environment.throttled(hosts, after["gpus"]):
            self.print(f"# warning: {line} at the end of the run")
        for choices in after["nccl"][:1]:  # of the first node
            chosen = "; ".join(f"{name} {', '.join(c)}" for name, c in choices.items() if c)
            self.print(f"# NCCL chose {chosen}" if chosen else "")
        failed = self.problem is not None or any(case.failed for case in self.report.cases)
        end = {name: rows for name, rows in after.items() if rows}
        try:
            self.report.finish("failed" if failed else "complete", **end)
        except OSError as error:
            self.fail(f"--json {self.args.json}: {error.strerror}; every case is in it")
            failed = True
        self.progress.close()
        self.status = int(failed)


class Turn:
    """A place among commands of which only one measures at a time: `analysis/ab.py --interleave`.

    Two runs one after the other see two moments of a shared machine; two that take turns, a block
    of iterations each, see the same one. ab.py puts a byte into this command's first pipe when it
    is its turn, and waits for one in the second. The command keeps its turn while it sets up a
    case or gathers.
    """

    def __init__(self) -> None:
        grant, release = os.environ[TURN].split(":")
        self.grant = os.open(grant, os.O_RDONLY)
        self.release = os.open(release, os.O_WRONLY)
        os.read(self.grant, 1)

    def pass_on(self) -> None:
        """Let the others have theirs, and come back with the next one."""
        os.write(self.release, b".")
        if not os.read(self.grant, 1):
            raise PeerLost("ab.py, which hands out the turns, is gone")


def describe(error: BaseException) -> str:
    """The error in one line: its type and the first line that says something."""
    lines = str(error).strip().splitlines()
    if lines and "On WorkerInfo(" in lines[0] and len(lines) > 1:  # what RPC adds
        return lines[1]
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"


def is_sticky(error: BaseException) -> bool:
    """Whether CUDA refuses everything after this error: all but running out of memory."""
    text = str(error)
    return "CUDA error" in text and "out of memory" not in text


def not_json(metrics: dict[str, Any]) -> str | None:
    """Which metric cannot be written, or None."""
    for name, value in metrics.items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError):
            return f"metric '{name}' is not JSON: {str(value)[:60]!r}"
    return None
