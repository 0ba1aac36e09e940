"""One run of a benchmark: cases one after the other, each kept as soon as it is measured."""

import argparse
import functools
import gc
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

from common import cli, job, results, turns
from common.dist import (
    FOREVER,
    CaseGroup,
    PeerLost,
    RankContext,
    all_agree,
    bind_cores,
    broadcast_json,
    close_groups,
    gather_json,
    init,
    open_groups,
    shutdown,
)
from common.environment import collect, preamble, refuse_shared_devices
from common.parts import WHOLE, Part
from common.results import Case, Extras, Report
from common.table import Progress
from common.timing import ROUNDS, Measurement, StopRule
from common.watchdog import HANG, Watchdog

TURNS = 24  # rounds of a case whose blocks take turns with those of other commands
# What a failed rank's peers see of it. The reason of a case is somebody else's error.
PEER_ERRORS = ("Connection closed by peer", "Connection reset", "aborted", "Broken pipe")


@dataclass(frozen=True)
class Outcome:
    """What one rank brings back from a case. `facts` must be JSON."""

    facts: dict[str, Any]
    measurement: Measurement | None = None


# From what rank 0 brought back of a case that lost ranks: what derive makes of the others.
Salvage = Callable[[Outcome], tuple[dict[str, Any], str]]
# From a case's measurement (None if its work made none) and each rank's facts: the metrics, and
# the check's verdict.
Derive = Callable[[Any, list[dict[str, Any]]], tuple[dict[str, Any], str]]


def check_report_flags(args: argparse.Namespace, benchmark: str) -> None:
    """Refuse a report path that cannot serve. On rank 0 alone: the file is on its host."""
    cli.check_report_path(args)
    if os.environ.get("RANK", "0") != "0" or not args.json:
        return
    resume = args.resume
    try:
        results.check_path(args.json, resume or _restarted())
        path = os.path.realpath(args.json)
        if resume and os.path.exists(path) and os.path.getsize(path):
            there = results.load(path)["benchmark"]
            if there != benchmark:
                raise ValueError(
                    f"--resume: {args.json} is a report of {there}, not of {benchmark}; "
                    "give another --json"
                )
    except ValueError as error:
        cli.refuse(str(error))


def stop_rule(args: argparse.Namespace) -> StopRule:
    """The stop rule of the flags that all scripts share."""
    return StopRule(
        args.warmup_iters,
        args.iters,
        args.min_iters,
        args.target_ci,
        args.max_seconds,
        max_block_s=args.timeout / 4,  # a block is one phase to the watchdog
        rounds=TURNS if turns.taken_here() else ROUNDS,
    )


class Sweep:
    """Runs cases; contains their failures; keeps the report, the watchdog and the progress.

    Use it as a context manager on every rank. `status` is the exit status once it is over.
    """

    def __init__(
        self,
        benchmark: str,
        args: argparse.Namespace,
        device: torch.device,
        backend: str,
        extras: Extras = lambda cases: {},
        tested: Sequence[int] | None = None,
        part: Part = WHOLE,
    ) -> None:
        """tested: the ranks that the groups under test may hold; None for all."""
        args.timeout = min(args.timeout, FOREVER.total_seconds())
        try:
            if getattr(args, "bind_cores", False):
                bind_cores()
            self.ctx: RankContext = init(device, backend, args.timeout, part.number)
        except ValueError as error:
            cli.refuse(str(error))
        except TimeoutError as error:
            print(error, file=sys.stderr, flush=True)
            os._exit(HANG)
        self._args = args
        self._benchmark = benchmark
        self._extras = extras
        self._tested = tested
        self._part = part
        self._attempts = 0
        self._turn: turns.Turn | None = None
        self._printed = True
        self._on_loss: Callable[[], object] | None = None
        self.outside = "not part of"  # how the watchdog calls what ranks outside a case do
        self.last_failed = False  # on rank 0: whether the last attempt raised an error
        self._problem: str | None = None
        self._kept: tuple[list[tuple[int, ...]], CaseGroup | None] | None = None
        self._planned: Sequence[dict[str, Any]] = ()
        self._summary: Callable[[], None] = lambda: None
        self.report: Report | None = None  # on rank 0
        self.status = 1

    def __enter__(self) -> "Sweep":
        self.watch = Watchdog(self.ctx, self._args.timeout, self._on_end)
        problem = None
        if self.ctx.rank == 0:
            try:
                self._turn = turns.join(self.watch.alive, min(5.0, self._args.timeout / 3))
            except ConnectionError as error:
                problem = str(error)
        environment = self._contained(lambda: collect(self.ctx))
        if environment is not None:
            self.report = Report(self._args.json, self._benchmark, environment, self._extras)
            try:
                refuse_shared_devices(environment, self.ctx.backend, self._tested)
                again = _restarted() or not self.ctx.attempt.startswith("0.")
                self.report.open(self._args.resume, again or self._part.number > 0)
            except (ValueError, OSError) as error:
                problem = problem or str(error)
        problem = self._contained(lambda: broadcast_json(problem))
        if problem:
            self.watch.stop()
            cli.refuse(problem)
        self._progress = Progress(self.ctx.rank == 0)
        if environment is not None and self._part.number == 0:
            self.say(preamble(self._benchmark, environment, self.ctx.backend))
            for line in environment["differences"]:
                print(f"warning: {line}", file=sys.stderr, flush=True)
        return self

    def plan(
        self, keys: Sequence[dict[str, Any]], summary: Callable[[], None] = lambda: None
    ) -> list[bool]:
        """For each case's key, whether the report holds it already. On all ranks.

        summary: prints the final tables of what is in the report; on rank 0, also when the run
        is interrupted.
        """
        self._summary = summary
        self._planned = keys
        done = [bool(self.report and self.report.find(key)) for key in keys]
        self._progress.expect(len(keys) - sum(done))
        known: list[bool] = self._contained(lambda: broadcast_json(done))
        return known

    def attempt(
        self,
        label: str,
        groups: Sequence[tuple[int, ...]],
        work: Callable[[CaseGroup], Outcome],
        keep_groups: bool = False,
        on_loss: Callable[[Outcome], object] = lambda outcome: None,
    ) -> tuple[list[dict[str, Any]], Outcome | None, str | None] | None:
        """Run `work` on disjoint sets of ranks at once; every rank of the job calls this.

        Each set has process groups of its own. keep_groups: the next attempt on the same sets
        takes over the process groups of this one, unless it fails.

        On rank 0: (facts of each of the ranks, rank 0's own outcome, None), or, where the work
        raised an error on any rank, ([], None, reason). None on the other ranks.

        on_loss: called with rank 0's outcome if the job ends because another rank has none.
        """
        mine, error = None, None
        groups = [tuple(ranks) for ranks in groups]
        ranks = [rank for members in groups for rank in members]
        self._progress.now(label)
        self._attempts += 1
        member = self.ctx.rank in ranks
        try:
            if self._turn is not None:
                self._turn.meet()
            if member:
                self.watch.enter(label, (self._attempts, 0, 0), "set up")
            else:  # neither ahead of the ranks in the case nor behind them
                self.watch.enter(
                    f"{self.outside} {label}", (self._attempts,), "waits for all ranks"
                )
            mine = self._in_groups(groups, work, keep_groups)
        except PeerLost as lost:
            self.watch.lost_peer(lost)
        except Exception as caught:
            error = describe(caught)
        if error:
            # only a group that nothing refers to closes its sockets, which is how gloo's peers
            # learn of the failure; the traceback is gone by now, the model's cycles are not
            gc.collect()
            if self.ctx.device.type == "cuda":
                torch.cuda.empty_cache()
        if mine and self.report is not None:
            self._on_loss = functools.partial(on_loss, mine)
        rows = self._contained(lambda: self._gather(label, member, error, mine))
        self._on_loss = None
        if rows is None:
            return None
        errors = [(rank, row[0]) for rank, row in enumerate(rows) if row[0]]
        self.last_failed = bool(errors)
        if errors:
            return [], None, _root_cause(errors, rows)
        return [rows[rank][1] for rank in ranks], mine, None

    def everywhere(self, label: str, work: Callable[[], object]) -> str | None:
        """Run `work` on every rank of the job; why it failed, or None. The same on all ranks."""
        error = None
        self._attempts += 1
        self.watch.enter(label, (self._attempts, 0, 0), "")
        try:
            work()
        except PeerLost as lost:
            self.watch.lost_peer(lost)
        except Exception as caught:
            error = describe(caught)
        rows = self._contained(lambda: self._gather(label, True, error, None))
        errors = [(rank, row[0]) for rank, row in enumerate(rows or []) if row[0]]
        reason: str | None = self.share(_root_cause(errors, rows or []) if errors else None)
        return reason

    def _gather(
        self, label: str, member: bool, error: str | None, mine: Outcome | None
    ) -> list[Any] | None:
        if member:
            self.watch.enter(f"after {label}", (self._attempts, 1, 0), "waits for all ranks")
        return gather_json([error, mine.facts if mine else None])

    def _in_groups(
        self,
        groups: list[tuple[int, ...]],
        work: Callable[[CaseGroup], Outcome],
        keep: bool,
    ) -> Outcome | None:
        # what failed on another rank is of no use here either
        kept = self._kept is not None and self._kept[0] == groups
        if keep and all_agree(kept):
            assert self._kept is not None
            group = self._kept[1]
        else:
            self._drop_kept()
            group = open_groups(groups, self.ctx)
        self._kept = None
        try:
            if group is None:
                outcome = None
            else:
                with self.watch.guard(group.test):
                    outcome = work(group)
            if keep:
                self._kept = (groups, group)
            return outcome
        finally:
            if self._kept is None:
                close_groups(group)

    def _drop_kept(self) -> None:
        if self._kept is not None:
            close_groups(self._kept[1])
            self._kept = None

    def case(
        self,
        key: dict[str, Any],
        label: str,
        ranks: tuple[int, ...],
        work: Callable[[CaseGroup], Outcome],
        derive: Derive,
        broken: str | None = None,
        salvage: Salvage | None = None,
    ) -> Case | None:
        """Measure one case and add it to the report. The case on rank 0, None elsewhere.

        broken: why the case need not be tried; it fails with this reason. salvage: for work that
        goes on without a rank that is lost; makes the case of the others' before the job ends.
        """

        def on_loss(mine: Outcome) -> None:
            if salvage is not None:
                self.keep(key, label, ranks, mine.measurement, *salvage(mine))

        if broken is None:
            outcome = self.attempt(label, [ranks], work, on_loss=on_loss)
        else:
            outcome = ([], None, broken) if self.ctx.rank == 0 else None
        if outcome is None:
            return None
        facts, mine, error = outcome
        measured = mine.measurement if mine else None
        if error:
            metrics: dict[str, Any] = {}
            check = f"failed: {error}"
        else:
            metrics, check = derive(measured, facts)
        return self.keep(key, label, ranks, measured, metrics, check)

    def keep(
        self,
        key: dict[str, Any],
        label: str,
        ranks: tuple[int, ...],
        measured: Measurement | None,
        metrics: dict[str, Any],
        check: str,
        save: bool = True,
    ) -> Case:
        """Add a case that `attempt` has measured to the report; on rank 0.

        measured: its samples have a row for each of the ranks. save: write the report; the last
        of several that come at once does.
        """
        self._progress.done()
        samples = {
            name: [[round(float(x), 9) for x in row] for row in rows]
            for name, rows in (measured.samples if measured else {}).items()
        }
        primary = next(iter(samples), None)
        case = {
            "key": key,
            "label": label,
            "ranks": list(ranks),
            "samples_s": samples.pop(primary) if primary else [],
            "other_samples_s": samples,
            "rounds": measured.rounds if measured else [],
            "stop": measured.stop if measured else {},
            "metrics": metrics,
            "check": check,
        }
        assert self.report is not None
        self.report.add(case, save)
        return case

    def next_block(self, phase: str) -> None:
        """Before a block, which starts with a barrier: say which one comes next.

        Where ab.py runs other commands at the same time, they have their turns first.
        """
        if self._turn is not None:
            self._turn.pass_on()
        self.watch.phase(phase)

    def refuse_differences(self) -> None:
        """End the run where nodes differ, on all ranks."""
        lines = self.share(self.report and self.report.environment["differences"])
        if lines:
            self.watch.stop()
            cli.refuse(f"--strict-topology: {lines[0]}")

    def fail(self, reason: str) -> None:
        """Let the run fail although its cases passed; on rank 0."""
        self._problem = reason
        print(f"error: {reason}", file=sys.stderr, flush=True)

    def refuse(self, problem: str | None) -> None:
        """End the run for a user's mistake that only the running job shows. On all ranks."""
        if problem:
            self.watch.stop()
            cli.refuse(problem)

    def share(self, value: Any) -> Any:
        """Rank 0's value, on all ranks; JSON."""
        return self._contained(lambda: broadcast_json(value))

    def devices(self) -> list[str]:
        """Every rank's own device, by its index on its node. On all ranks."""
        rows = self._contained(lambda: gather_json(str(self.ctx.device)))
        devices: list[str] = self.share(rows)
        return devices

    def find(self, key: dict[str, Any]) -> Case | None:
        """The report's complete case of this key; on rank 0."""
        return self.report.find(key) if self.report is not None else None

    def find_any(self, key: dict[str, Any]) -> Case | None:
        """The report's case of this key, failed or not; on rank 0."""
        return self.report.find_any(key) if self.report is not None else None

    def nodes(self) -> list[int]:
        """The node of each rank; on all ranks."""
        rows = self.report.environment["ranks"] if self.report is not None else []
        nodes: list[int] = self.share([row["node"] for row in rows])
        return nodes

    def host_of(self, rank: int) -> str:
        """The host name of a rank; on rank 0."""
        assert self.report is not None
        return str(self.report.environment["ranks"][rank]["host"])

    def say(self, text: str) -> None:
        """Print to stdout, on rank 0. Where that fails the sweep goes on, for its report."""
        if self.ctx.rank != 0:
            return
        try:
            self._progress.say(text)
        except OSError as error:  # closed, as by `| head`, or a full disk
            self._printed = False
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            print(f"error: cannot print the tables: {error.strerror}", file=sys.stderr, flush=True)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, PeerLost):
            self.watch.lost_peer(error)
        if error is not None:
            if self.report is not None:
                self.report.finish("failed", describe(error))
            self.watch.stop("" if isinstance(error, SystemExit) else describe(error))
            return
        self.status = 0
        if self._turn is not None:
            self._turn.close()
        if self.report is not None:
            failed = any(self.report.find(key) is None for key in self._planned)
            saved = self.report.saved
            self._progress.close()
            if self._part.last:
                before = any(case["check"].startswith("failed") for case in self.report.cases)
                failed |= bool(before and self._part.number > 0) or self._problem is not None
                status = "failed" if failed else "complete"
                saved = self.report.finish(status, self._problem)
                self._summary()
            self.status = 0 if saved and self._printed and not failed else 1
        if job.may_restart(os.environ):  # then all agents are to start their ranks again, or none
            self.status = self._contained(lambda: self.share(self.status))
        self._contained(shutdown)
        self.watch.stop()

    def _contained(self, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except PeerLost as lost:
            self.watch.lost_peer(lost)

    def _on_end(self, status: str, reason: str) -> None:
        """Called by the watchdog before it ends this process."""
        if self.report is None or self.report.finished:
            return
        if self._on_loss is not None:
            self._on_loss()
        saved = self.report.finish(status, reason)
        self._progress.close()
        self._summary()
        kept = self._args.json and not getattr(self._args, "temporary_report", False)
        where = f"; {self._args.json} holds them" if kept and saved else ""
        more = "; go on with --resume" if where and status == "interrupted" else ""
        print(
            f"# {status} ({reason.splitlines()[0]}); cases measured: {len(self.report.cases)}"
            f"{where}{more}",
            flush=True,
        )


def describe(error: BaseException) -> str:
    """The error in one line: its type and the first line of its message.

    RPC puts the worker's name into that line of an error that a worker sent back, and what went
    wrong there into the next one.
    """
    lines = str(error).strip().splitlines()
    worker = re.search(r"On WorkerInfo\(id=\d+, name=(.+)\):$", lines[0]) if lines else None
    if worker and len(lines) > 1:
        return f"{lines[1]} (on {worker[1]})"
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"


def _root_cause(errors: list[tuple[int, str]], rows: list[Any]) -> str:
    own = [pair for pair in errors if not any(text in pair[1] for text in PEER_ERRORS)]
    rank, text = (own or errors)[0]
    everywhere = all(row[0] == text for row in rows)
    return text if everywhere else f"{text} (rank {rank})"


def _restarted() -> bool:
    """Whether torchrun has started the ranks again, or Slurm the job, as far as they count it."""
    counts = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
    return any(int(os.environ.get(name) or 0) > 0 for name in counts)
