"""The run of a script: it measures cases one after the other. Each case is a row of a table and a
line of the report. If a case fails on any rank, its row shows the reason and the run continues.
"""

import argparse
import atexit
import contextlib
import gc
import importlib.util
import json
import math
import os
import shlex
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
import torch.distributed as dist

from common.errors import LostPeer, NotArrived, Refused
from common.groups import Group, GroupCache, Subgroups, connect, local_rank, lost_peer
from common.join import join, world
from common.stats import Times, iteration_times
from common.table import Columns, Table, fitted
from common.timing import StopRule, TimedLoop, Workload
from harness import cli, contents, environment, exits
from harness.cpu_load import BUSY, Others
from harness.environment import count_of, others_text
from harness.report import DISK_FAILED, OTHER_FILE, UNCHECKED, Case, Report, load, not_json

NO_TIMEOUT = timedelta(days=30)  # where hang detection ends hangs
TORCH_WAITS = 4  # torch's own timeout beside a shorter one, as a multiple of --timeout
INTERLEAVED_ROUNDS = 24  # of a case, if ab.py --interleave runs the command
LIMIT = 2**18  # samples of a case in a report, which limits its line to a few MB
LOAD_UNKNOWN = "CPU use by other processes was not recorded"
T = TypeVar("T")
Key = dict[str, Any]  # identifies a case; flat, JSON
Build = Callable[[Key, Group], Workload]  # called on the ranks of the case
# Called on rank 0 to set case.metrics and case.check. The list contains the facts of each rank.
Derive = Callable[[Case, Times, list[Any]], None]


class Implausible(NamedTuple):
    """A sentence about an impossible number, which other processes may have caused."""

    text: str


# Called on rank 0 with the cases of a table that did not fail. Returns the sentence, or sentences,
# that answer the script's question, or None if the cases do not answer it.
Sentence = str | Implausible
Answer = Callable[[list[Case]], Sentence | Sequence[Sentence] | None]


class Planned(NamedTuple):
    """A planned case."""

    name: str  # of its row
    ranks: int
    key: Key


class RankResult(NamedTuple):
    """The result of a case on one rank, sent to rank 0."""

    times: Times
    facts: Any  # returned by Workload.facts
    seen: list[Any]  # returned by Observer.after, for each observer
    late: Mapping[str, str] = {}  # hashes of the modules imported since the report was opened


class Observer:
    """Base class of the observers, which are called outside the timed code. An exception in `row`
    or `end` becomes a line of output. One in `after` fails the case, because other ranks may be
    waiting in a collective there."""

    def __init__(self, bench: "Benchmark") -> None:
        """Called on all ranks after the preamble is printed and before the report is opened."""
        self.bench = bench

    @classmethod
    def before_join(cls, args: argparse.Namespace) -> dict[str, timedelta]:
        """Called before this rank joins the job. May return another `timeout` of groups under test
        and `control_timeout` of control groups."""
        return {}

    def begin(self, label: str, member: bool) -> None:
        """A case, or another part of the run, begins. member: whether this rank belongs to it."""

    def phase(self, what: str, ahead: int) -> None:
        """The next phase begins: see `Benchmark.phase`. An empty name precedes each line."""

    def opened(self, group: Group | None) -> None:
        """The groups of the case exist on this rank. None: they are about to be closed."""

    def failed(self, reason: str) -> None:
        """The case has failed on this rank."""

    def after(self, key: Key, work: Workload, times: Times, group: Group) -> Any:
        """Called on each rank of a case after the timing. `row` gets the values of all ranks."""

    def row(self, case: Case, seen: list[Any]) -> list[str]:
        """Called on rank 0 before the case is written. Returns lines to print below its row, and
        may add to case.metrics."""
        return []

    def end(self, last_line: dict[str, Any]) -> list[str]:
        """Called on all ranks at the end of the run. On rank 0, returns lines to print and may add
        to `last_line`, the last line of the report."""
        return []

    def ended(self) -> dict[int, str]:
        """Called if a peer is lost. Returns the ranks that have ended, with what they were doing,
        as far as this rank can know."""
        return {}

    def stop(self) -> None:
        """Called before this process leaves the job or ends."""


def common_observers() -> Sequence[type[Observer]]:
    """Return the observers of harness/observe/; none if that folder was deleted."""
    if not importlib.util.find_spec("harness.observe"):
        return ()
    return importlib.import_module("harness.observe").ALL  # type: ignore[no-any-return]


@contextlib.contextmanager
def end_on_error() -> Iterator[None]:
    """End this process with one line and a status if common/ raises one of its exceptions."""
    try:
        yield
    except Refused as error:
        exits.refuse(str(error), prints=error.here or None)
    except NotArrived as error:
        prints = exits.is_rank_0() or (0 in error.missing and local_rank() == 0)
        exits.exit_now(exits.HANG, f"HANG: {error}", prints)
    except LostPeer as error:
        end_after_loss(str(error), local_rank() == 0)


def end_after_loss(why: str, prints: bool) -> NoReturn:
    """End this process because it has lost a peer. The launcher may know why the peer died, and has
    10 s to end the job."""
    reason = f"rank {os.environ.get('RANK', 0)} {why}"
    if prints:
        exits.write_stderr(reason)
    time.sleep(10)
    exits.exit_now(1, reason, prints=False)


def kept_samples(times: Times) -> tuple[dict[str, list[list[float]]], bool]:
    """Return the samples to store, and whether they are bounded: above LIMIT, only those of the
    slowest rank in each iteration."""
    rows = {name: times.each(name) for name in times.samples_s}
    bounded = sum(samples.size for samples in rows.values()) > LIMIT
    if bounded:
        rows = {name: iteration_times(x, times.aligned)[None] for name, x in rows.items()}
    return {name: samples.tolist() for name, samples in rows.items()}, bounded


def stop_rule(args: argparse.Namespace, interleaved: bool) -> StopRule:
    """Return the stop rule that the flags define."""
    limits = {name: getattr(args, name) for name in ("min_iters", "target_ci", "max_seconds")}
    if args.warmup_iters is not None:
        limits |= {"warmup_iters": args.warmup_iters, "full_warmup": True}
    rounds = INTERLEAVED_ROUNDS if interleaved else None
    return StopRule(iters=args.iters, rounds=rounds, longest_block_s=args.timeout / 4, **limits)


def timed_s(case: Case) -> float:
    """Return the total seconds of the first row's samples, of the step and all parts."""
    return sum(sum(rows[0]) for rows in case.samples_s.values() if rows)


def flag_for_more(cases: Sequence[Case], args: argparse.Namespace) -> str:
    """Return the flag for more samples of at least one case: twice as many iterations, or four
    times the time of the samples, because each block starts with untimed iterations."""
    if args.iters:
        return f"--iters {2 * args.iters}"
    # --max-seconds applies to each setting of a case
    counts = [len(str(case.key.get("settings", "")).split(", ")) for case in cases]
    timed = [timed_s(case) / count for case, count in zip(cases, counts, strict=True)]
    seconds = f"--max-seconds {math.ceil(4 * max(args.max_seconds, *timed))}"
    # in node_check.py and collectives.py, a case ends with its share of a budget, too
    budgets = [name for name in ("budget", "total_seconds") if getattr(args, name, None)]
    more = [f"--{name.replace('_', '-')} {4 * getattr(args, name):g}" for name in budgets]
    return " ".join([*more, seconds])


def find_world() -> tuple[int, int, int, int]:
    """Return what `world` does. Refuses tasks of a launcher that would each be a world of one."""
    exits.refuse_worlds_of_one()
    with end_on_error():
        return world()


class Benchmark:
    """A run, as a context manager on every rank. On exit, `status` is the exit status."""

    @end_on_error()
    def __init__(
        self,
        name: str,
        args: argparse.Namespace,
        tested: range | None = None,
        observers: Sequence[type[Observer]] = (),
    ) -> None:
        """Join the job. args: flags, including those of `add_common_flags`. tested: the ranks that
        groups under test may contain; None for all. observers: of this script, in addition."""
        check_flags(args)
        self.args, self.tested = args, tested
        self.status = 1
        self.failure: tuple[int, str] | None = None  # of the run as a whole: status and reason
        self.table: Table | None = None
        self.title = ""
        # Set by scripts that run a user's code: entered around the set-up, the timing and the check
        # of each case, and called on all ranks after it
        self.around_case: Callable[[Key, Group], contextlib.AbstractContextManager[Any]]
        self.around_case = lambda key, group: contextlib.nullcontext()
        self.after_case: Callable[[], None] = lambda: None
        self.names: dict[str, list[str]] = {}  # title of a table -> names of its planned cases
        self.case_count = 0  # number of planned cases; 0 if unknown
        self.measured: list[Key] = []
        self.modules: set[str] = set()  # those imported when the report was opened
        self.skipped = ""  # the reason that was printed last why a check was skipped
        self.attempts = 0  # number of cases and rehearsals so far
        self.unshown: dict[str, tuple[Case, list[str]]] = {}  # by name, with observers' lines
        self.done: list[Key] = []  # cases of a resumed report that need not be measured again
        self.answers: list[Sentence] = []  # printed together, as the last lines
        self.commands: list[str] = []  # next commands to print, added by observers; never wrapped
        self.last_line: dict[str, Any] = {}  # entries that a script adds to the report's last line
        self.replaced: str | None = None  # new path of an older report
        self.is_report_open = False
        self.is_interleaved = bool(os.environ.get(cli.TURN))  # with another command, by ab.py
        # Returns the CPU use by other processes on each node, on rank 0; [] on other ranks, and if
        # no observer sets both. All ranks call it.
        self.load_of_others: Callable[[], list[Others]] = list
        self.records_load = False
        self.observers: list[Observer] = []
        self.rule = stop_rule(args, self.is_interleaved)
        files = [exits.take_stdout()] if args.json == "-" else []
        kinds = [*common_observers(), *observers]
        measured_on = self.join_job(kinds)
        self.groups = GroupCache(self.job)
        self.is_first = self.job.rank == 0
        # maximum width of a table in characters; None for no limit
        self.max_width = terminal_width() if self.is_first and not args.wide else None
        path = args.json if self.is_first and not args.dry_run else None
        self.report = Report(name, measured_on, path, files=files)
        environment.refuse_differences(self.job, measured_on, contents.loaded(), tested)
        # Added to every key. Those of rank 0, because under RPC the servers and the trainers may be
        # on different devices.
        place = {"device": self.job.device.type, "backend": self.job.backend}
        self.place: Key = self.job.broadcast({"world_size": self.job.world_size, **place})
        self.print(environment.preamble(measured_on))
        for kind in kinds:
            self.observers.append(kind(self))

    def join_job(self, kinds: Sequence[type[Observer]]) -> dict[str, Any]:
        """Join the job and return its environment. Torch's own timeouts end a hang, unless an
        observer replaces them."""
        args = self.args
        _, on_node, _, _ = find_world()
        turns = importlib.import_module("harness.turns") if self.is_interleaved else None
        pipes = turns.find_pipes() if turns else []
        variables = environment.user_variables()  # before `join` sets others
        # before any rank uses CUDA; not for interleaved commands, where the other one uses memory
        memory_held = environment.gpu_memory() if on_node == 0 and not turns else {}
        timeout = timedelta(seconds=args.timeout)
        # ranks outside a case wait in the control group until it ends
        limits = {"timeout": timeout, "control_timeout": TORCH_WAITS * timeout}
        for kind in kinds:
            limits |= kind.before_join(args)
        job = join(args.device, args.backend, timeout, control_timeout=limits["control_timeout"])
        self.job = replace(job, timeout=limits["timeout"])
        # Imported modules are never garbage, so collections between cases need not traverse them.
        gc.freeze()
        atexit.register(gc.unfreeze)  # otherwise nanobind reports leaks at exit
        self.turn = turns.take(pipes) if turns and job.rank == 0 else lambda: None
        collected = environment.collect(self.job, variables, memory_held)
        return dict(self.job.broadcast(collected))

    def open_report(self) -> None:
        """Start or resume the report. All ranks call it once all modules of the models are
        imported, since the first line has their contents."""
        self.modules = {*sys.modules}
        loaded = self.report.environment["contents"] = contents.loaded()
        environment.refuse_differences(self.job, self.report.environment, loaded, self.tested)
        self.replaced = self.prepare("--json", self.start_report)
        self.is_report_open = True
        if self.replaced:
            self.print(f"# the existing report was moved to {self.replaced}")
        for start in sorted({case.measured_at for case in self.report.cases}):
            run = [case for case in self.report.cases if case.measured_at == start]
            self.print(f"# {count_of(len(run), 'case')} measured {run[0].measured}")
        done = [case.key for case in self.report.cases if counts_as_done(case, self.args)]
        self.done = self.job.broadcast(done)

    def start_report(self) -> str | None:
        """Start or resume the report, and return the new path of an existing one."""
        if self.args.dry_run and self.args.resume and self.is_first:
            with contextlib.suppress(ValueError):  # no report exists
                self.report.cases = load(self.args.json).cases
        return self.report.start(self.args.resume)

    def prepare(self, what: str, make: Callable[[], T]) -> T:
        """Return the result of `make`. All ranks call this. If `make` raises OSError or ValueError
        on any of them, the run ends with `what: reason`, with status 1 for a full disk, else 2."""
        self.phase(f"preparing {what}")
        result, problem = None, None
        try:
            result = make()
        except LostPeer:  # an OSError, too
            raise
        except OSError as error:
            status = 1 if error.errno in DISK_FAILED else 2
            file = f" {error.filename}" if error.filename else ""
            problem = (f"{what}{file}: {error.strerror or error}", status)
        except ValueError as error:
            problem = (f"{what}: {error}", 2)
        problems = [given for given in self.job.gather(problem) or [] if given]
        if first := self.job.broadcast(problems[0] if problems else None):
            self.refuse(*first)
        return result  # type: ignore[return-value]

    def begin(self, label: str, member: bool = True) -> None:
        """Announce a case, or another part of the run, to the observers."""
        for observer in self.observers:
            observer.begin(label, member)

    def phase(self, what: str, ahead: int = 1) -> None:
        """Announce the next phase to the observers, outside of timed code. ahead: 0 if only this
        rank enters the phase, so that the other ranks do not count as behind."""
        for observer in self.observers:
            observer.phase(what, ahead)

    def complete_key(self, key: Key, ranks: int) -> Key:
        """Return the key with device, backend, world_size and ranks, unless it has them."""
        return self.place | {"ranks": ranks} | key

    def announce(self, tables: Mapping[str, Sequence[Planned]]) -> None:
        """Announce the planned cases by table and open the report, before anything is set up for
        the cases. All ranks call it. With --dry-run, the run lists them and ends here."""
        self.open_report()
        lines: list[str] = []
        for title, cases in tables.items():
            self.names[title] = [case.name for case in cases]
            left = [x.name for x in cases if self.complete_key(x.key, x.ranks) not in self.done]
            self.case_count += len(left)
            lines += ["", title, *(f"  {name}" for name in left)]
        if self.args.dry_run:
            count = count_of(self.case_count, "case")
            self.print("\n".join([*lines, "", f"# {count}; nothing was measured"]))
            self.leave_job()
            sys.exit(0)

    def run(
        self,
        title: str,
        cases: Sequence[Planned],
        columns: Columns,
        build: Build,
        derive: Derive,
        answer: Answer | None = None,
        *,
        layout: Table | None = None,
        ranks: Sequence[int] | None = None,
        rule: Callable[[Key], StopRule] | None = None,
    ) -> Table:
        """Measure the cases of a table, after `announce`. All ranks call it. ranks: of all cases;
        None for the first ones. rule: returns the stop rule of a case. Others: see `begin_table`.
        """
        with self.begin_table(title, columns, answer, layout) as table:
            for case in cases:
                on = range(case.ranks) if ranks is None else ranks
                stop = rule and rule(case.key)
                self.measure(case.key, case.name, build, derive, ranks=on, rule=stop)
        return table

    def measure(
        self,
        key: Key,
        name: str,
        build: Build,
        derive: Derive,
        *,
        ranks: Sequence[int] | None = None,
        subgroups: Sequence[Sequence[int]] | None = None,
        rule: StopRule | None = None,
        shown: bool = True,
    ) -> Case | None:
        """Measure a case, or print it if the resumed report has it. All ranks of the job call this
        with the same arguments. Returns the case on rank 0, None on other ranks.

        ranks: of the case; None for all. subgroups: a partition of them; the subgroups do the same
        work concurrently, each in its own process group. rule: None for that of the flags. shown:
        False to print the row later, by `show_measured`. Then the case may replace one that this
        run has measured.
        """
        ranks = tuple(range(self.job.world_size) if ranks is None else ranks)
        key = self.complete_key(key, len(ranks))
        if key in self.measured and shown:
            raise ValueError(f"expected a new key for each case, got {key} twice")
        if key in self.done:
            if earlier := self.report.find(key):  # None on other ranks
                self.show(
                    earlier, [f"{name}: measured {earlier.measured}", *self.unchecked(earlier)]
                )
            return earlier
        self.measured.append(key)
        case = Case(key=key, ranks=list(ranks), name=name, table=self.title)
        parts: Subgroups = tuple(map(tuple, subgroups or [ranks]))
        member = self.job.rank in ranks
        self.begin(name, member)
        self.phase("setup" if member else "outside the case")

        def run(group: Group) -> RankResult:
            with self.around_case(key, group):
                return self.time(key, build(key, group), group, rule or self.rule)

        result = self.attempt(run, ranks, parts)
        if member:  # ranks outside the case are not behind
            self.phase("waiting for all ranks")
        results, lines = self.job.gather(result), list[str]()
        written = self.write(case, derive, results, lines) if results else None
        reason, unwritten = self.job.broadcast(written)
        self.release(ranks, parts, failed=reason is not None)
        self.after_case()
        if unwritten:  # on all ranks, so that none of them waits for a lost peer
            self.refuse(*unwritten)
        if results and shown:
            self.show(case, lines)
        elif results:
            self.unshown[name] = case, lines
        return case if results else None

    def show_measured(self) -> None:
        """Print the rows of the cases that were not shown."""
        for case, lines in self.unshown.values():
            self.show(case, lines)
        self.unshown.clear()

    def attempt(
        self, run: Callable[[Group], T], ranks: tuple[int, ...], subgroups: Subgroups
    ) -> T | None:
        """Run a case on this rank. Returns None on ranks outside the case, and if the case failed:
        then the store has the reason, and this rank has closed its groups."""
        self.attempts += 1
        result, error = None, ""
        try:
            group = self.groups.acquire(ranks, subgroups)
            if group:
                for observer in self.observers:
                    observer.opened(group)
                if group.start_up_s:  # it is new
                    group.start_up_s["first_collective"] = connect(group.workload, self.job)
                result = run(group)
        except LostPeer:
            raise
        # SystemExit and the like from a user's code, too. Ctrl-C never raises, because an observer
        # handles it; without observers it ends the run.
        except BaseException as raised:
            if isinstance(raised, KeyboardInterrupt) and not self.observers:
                raise
            place = "" if isinstance(raised, Exception) else exits.place_of(raised)
            error = f"{exits.describe(raised)}{place} (rank {self.job.rank})"
            self.report_failure(error)
            if gpu_is_lost(self.job.device):
                exits.exit_now(1, f"{error}: this process can no longer use its GPU")
        # after the except block, whose traceback referenced the model and its group
        if error:
            group = None
            self.release(ranks, subgroups, failed=True)
        return result

    def release(self, ranks: tuple[int, ...], subgroups: Subgroups, failed: bool) -> None:
        """End the use of a case's groups on this rank."""
        for observer in self.observers:
            observer.opened(None)
        self.groups.release(ranks, subgroups, failed)

    def report_failure(self, reason: str) -> None:
        """Put the reason why the case failed on this rank into the store, unless another rank was
        first, from whose failure this one follows."""
        failure = json.dumps([reason, self.job.rank])
        with lost_peer():
            self.job.store.compare_set(f"failed/{self.attempts}", "", failure)
        for observer in self.observers:
            observer.failed(reason)

    def first_failure(self) -> tuple[str | None, int | None]:
        """Return the reason why the case failed and the rank; (None, None) if it did not."""
        key = f"failed/{self.attempts}"
        with lost_peer():
            failed = self.job.store.check([key])
            reason, rank = json.loads(self.job.store.get(key)) if failed else (None, None)
        return reason, rank

    def time(self, key: Key, work: Workload, group: Group, rule: StopRule) -> RankResult:
        """Time a workload on this rank."""
        times = work.timed
        if not times:
            times = TimedLoop(work, group, self.job.device, rule, self.before_block).run()
            self.phase("checking results")
        facts = work.facts()
        seen = [observer.after(key, work, times, group) for observer in self.observers]
        return RankResult(times, facts, seen, contents.loaded(self.modules))

    def before_block(self, phase: str) -> None:
        self.turn()
        self.phase(phase)

    def write(
        self, case: Case, derive: Derive, results: list[RankResult], lines: list[str]
    ) -> tuple[str | None, tuple[str, int] | None]:
        """Complete a case and write it to the report, on rank 0. Appends the lines of observers.
        Returns the reason if the case failed; if it could not be written, why, and the status."""
        reason, failed_rank = self.first_failure()
        late: dict[str, str] = {}
        if reason is None:
            try:
                of_ranks = [results[rank] for rank in case.ranks]
                for rank, result in zip(case.ranks, of_ranks, strict=True):
                    if other := contents.differing(late, result.late):
                        raise ValueError(
                            f"{cli.cut(other)} of rank {rank} differs from rank {case.ranks[0]}'s"
                        )
                    late |= result.late
                self.complete(case, derive, of_ranks)
                for number, observer in enumerate(self.observers):
                    seen = [result.seen[number] for result in of_ranks]
                    lines += guarded(observer, observer.row, case, seen)
                lines += self.unchecked(case)
                reason = not_json(case.metrics)
            except Exception as error:
                reason = exits.describe(error)
        if reason:
            case.metrics, case.check = {}, f"failed: {reason}"
            lines.clear()  # its row has no times
            if failed_rank is not None:
                case.metrics["failed_rank"] = failed_rank
        if self.report.path:
            self.phase(f"writing {self.report.path}", ahead=0)
        try:
            self.report.add(case, late)
        except OSError as error:
            return reason, (f"--json {self.args.json}: {error.strerror}", 1)
        except ValueError as error:
            return reason, (f"--json {error}", 2)
        return reason, None

    def unchecked(self, case: Case) -> list[str]:
        """A line with the reason why the check of a case was skipped, unless it was the last one's
        as well, or the user's decision."""
        if not case.check.startswith("skipped: ") or case.check in (UNCHECKED, self.skipped):
            return []
        self.skipped = case.check
        return [f"not checked: {case.check.removeprefix('skipped: ')}"]

    def complete(self, case: Case, derive: Derive, results: list[RankResult]) -> None:
        """Set the samples, the metrics and the check of a case, from the results of its ranks.
        Metrics are computed from all samples, even if the case keeps only some of them."""
        times = Times.merge([result.times for result in results])
        case.aligned, case.rounds, case.stop = times.aligned, list(times.rounds), times.stop
        case.samples_s, case.bounded = kept_samples(times)
        if times.launch_share:
            case.metrics["launch_share"] = times.launch_share
        derive(case, times, [result.facts for result in results])

    @contextlib.contextmanager
    def begin_table(
        self, title: str, columns: Columns, answer: Answer | None = None, table: Table | None = None
    ) -> Iterator[Table]:
        """Return a table whose rows are the cases measured in the block. All ranks call it.

        columns: header -> function from a case to a cell, most important first: a terminal shows as
        many as fit, and a line below counts the others. table: a Table of another layout.
        """
        self.title, self.table = title, table or Table(columns)
        self.table.max_width = self.max_width
        self.table.reserve_width(self.names.get(title, []))
        self.print(f"\n{folded(title, self.max_width, '')}\n")
        yield self.table
        for line in omitted(len(self.table.columns) - self.table.count):
            self.print(line)
        if self.table.passed and answer:
            # one answer for each run that measured cases, so that no sentence mixes two runs
            for start in sorted({case.measured_at for case in self.table.passed}):
                cases = [case for case in self.table.passed if case.measured_at == start]
                sentences = answer(cases) or []
                if isinstance(sentences, str | Implausible):
                    sentences = [sentences]
                self.conclude(sentences, cases[0])
        self.title, self.table = "", None

    def print_table(self, columns: Columns, cases: Sequence[Case], title: str = "") -> None:
        """Print another table of measured cases."""
        above = [folded(title, self.max_width, ""), ""] if title else []
        text, count = fitted(columns, cases, self.max_width)
        self.print("\n".join(["", *above, text, *omitted(count)]))

    def conclude(self, sentences: Sequence[Sentence], case: Case | None = None) -> None:
        """Add sentences that answer the script's question, on rank 0. Those about a case that was
        measured before the report was resumed start with the time and the hosts."""
        if case is not None and self.report.is_earlier(case):
            begin = f"measured {case.measured}: "
            sentences = [begin + with_cause(sentence, LOAD_UNKNOWN) for sentence in sentences]
        self.answers += sentences

    def show(self, case: Case | None, lines: list[str]) -> None:
        """Print the row of a case and the lines of the observers."""
        if case and self.table:
            for row in self.table.rows_of(case):
                self.print(self.table.row(row))
        for line in lines:
            self.print(folded(line, self.max_width))

    def print(self, text: str) -> None:
        """Print on rank 0. If writing to stdout fails, end the run; the report is intact."""
        if not self.is_first:
            return
        self.phase("")
        try:
            print(text, flush=True)
        except (OSError, ValueError) as error:  # a model may have closed it
            kept = f"; {self.args.json} has the finished cases" if self.args.json else ""
            self.stop_observers()
            reason = getattr(error, "strerror", None) or error
            exits.exit_now(1, f"{Path(sys.argv[0]).name}: error: stdout: {reason}{kept}")

    def fail(self, reason: str, status: int = 1) -> None:
        """Make the run end with this status although its cases passed, on rank 0. The first reason
        counts."""
        self.failure = self.failure or (status, reason)
        exits.print_error(f"error: {reason}")

    def refuse(self, problem: str, status: int = 2) -> None:
        """End the run, by default because of a user's mistake. All ranks call it, or only rank 0:
        the launcher then ends the others."""
        self.stop_observers()
        self.discard_empty_report()
        exits.refuse(problem, status)

    def discard_empty_report(self) -> None:
        """Remove the report that this run has started if it has no case, and give the report that
        it replaced its name back."""
        path = self.report.path
        if not self.is_report_open or path in (None, "-") or self.report.cases or self.args.resume:
            return
        with contextlib.suppress(OSError):
            if self.replaced:
                os.replace(self.replaced, os.path.realpath(path))
            else:
                os.unlink(path)

    def __enter__(self) -> "Benchmark":
        return self

    @end_on_error()
    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            if error is None:
                self.finish()
                self.leave_job()
        except LostPeer as lost:
            error = lost
        if isinstance(error, LostPeer):
            self.name_lost_peer(error)
        if isinstance(error, BaseException):
            self.stop_observers()
            if isinstance(error, Refused):
                self.discard_empty_report()
            if isinstance(error, Refused | NotArrived):
                raise error  # to end_on_error
            return
        atexit.register(exits.fast_exit, self.status)

    def name_lost_peer(self, error: LostPeer) -> NoReturn:
        """End this process. The first remaining rank of this host prints the line."""
        ended = {rank: x for observer in self.observers for rank, x in observer.ended().items()}
        before = range(self.job.rank - self.job.local_rank, self.job.rank)
        self.stop_observers()
        why = str(error)
        if ended:
            why = f"lost a peer: {cli.cut([*ended.values()])}; {why.removeprefix('lost a peer: ')}"
        end_after_loss(why, all(rank in ended for rank in before))

    def leave_job(self) -> None:
        """Close all groups. All results are written, so errors are ignored."""
        with contextlib.suppress(RuntimeError, LostPeer):
            self.groups.close_all()
            self.job.barrier()
        self.stop_observers()
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()

    def stop_observers(self) -> None:
        for observer in self.observers:
            observer.stop()

    def disturbed(self) -> Others | None:
        """Return the CPU use by other processes on the node where it was largest; None if it was at
        most BUSY or is not recorded. All ranks call it."""
        busiest = max(self.load_of_others(), key=lambda load: load.fraction, default=None)
        return self.job.broadcast(busiest if busiest and busiest.fraction > BUSY else None)

    def finish(self) -> None:
        """Print the final lines, write the report's last line and set `status`."""
        lines: list[str] = []
        for observer in self.observers:
            remarks = guarded(observer, observer.end, self.last_line)
            lines += [folded(remark, self.max_width) for remark in remarks]
        path = self.report.path
        if path and path != "-" and not os.path.exists(path):
            self.fail(f"--json {path}: the report was removed during the run")
            path = None
        commands = [*self.commands, *report_lines(self.report, path, self.replaced)]
        elapsed = cli.duration(time.monotonic() - exits.STARTED_S)
        # not wrapped, so that commands can be copied
        self.print("\n".join(["", *lines, *(f"# {x}" for x in commands), f"# elapsed {elapsed}"]))
        loads = self.load_of_others()
        others = others_text(self.report.environment["hosts"], loads) if loads else LOAD_UNKNOWN
        answers = [with_cause(sentence, others) for sentence in self.answers]
        if answers:
            self.print("\n" + "\n".join(folded(sentence, self.max_width) for sentence in answers))
            self.last_line["answer"] = answers
        loaded = contents.loaded()
        if changed := contents.differing(self.report.contents, loaded):
            self.last_line["changed"] = changed
            line = f"{cli.cut(changed)} {OTHER_FILE}; --resume will refuse the report"
            self.print(folded(f"warning: {line}", self.max_width))
        self.last_line |= self.report.new_contents(loaded)
        status, reason = self.failure or (0, "")
        cases = self.report.cases
        if failed := [case for case in cases if case.failed]:
            first = f"{failed[0].name}: {failed[0].check}"
            reason = reason or f"{len(failed)} of {len(cases)} cases failed; {first}"
            status = 1
        try:
            self.report.finish("failed" if status == 1 else "complete", **self.last_line)
        except OSError as full:
            status, reason = 1, f"--json {self.args.json}: {full.strerror}"
            exits.print_error(f"error: {reason}")
        self.status, reason = self.job.broadcast((status, reason))
        if self.status:
            exits.write_error_file(reason)


def guarded(observer: Observer, call: Callable[..., list[str]], *given: Any) -> list[str]:
    """Return the lines of a method of an observer, or a line about its exception."""
    try:
        return call(*given)
    except LostPeer:
        raise
    except Exception as error:
        return [f"{type(observer).__name__}: {exits.describe(error)}"]


def report_lines(report: Report, path: str | None, replaced: str | None) -> list[str]:
    """Return lines with the path of the report, that of the replaced one, and next commands."""
    if not path or path == "-":
        return []
    lines = [f"report {path}; {analysis_command('report.py', path, '-o', 'page.html')}"]
    if replaced:
        before = exits.shortest(replaced)
        command = analysis_command("compare.py", before, "--test", path)
        compare = f"; to compare: {command}" if has_common_case(report, replaced) else ""
        lines.append(f"previous report {before}{compare}")
    return lines


def has_common_case(report: Report, path: str) -> bool:
    """Return whether a case passed in both this report and the one at `path`."""
    with contextlib.suppress(OSError, ValueError):
        old = load(path)
        passed = [case.key for case in old.cases if not case.failed]
        both = [case for case in report.cases if case.key in passed and not case.failed]
        return bool(both) and old.benchmark == report.benchmark
    return False


def analysis_command(script: str, *words: str) -> str:
    """Return the command that runs a script of analysis/ from the current folder."""
    path = exits.shortest(str(exits.ROOT / "analysis" / script))
    return shlex.join(["python", *exits.words_of(path), *words])


def counts_as_done(case: Case, args: argparse.Namespace) -> bool:
    """Whether a case of a resumed report passed, and was checked if this run checks values."""
    return not case.failed and not (case.check == UNCHECKED and getattr(args, "check", False))


def with_cause(sentence: Sentence, others: str) -> str:
    """Return the sentence. An impossible result is called disturbed if other processes used the
    CPU, and implausible otherwise. others: from `others_text`."""
    if not isinstance(sentence, Implausible):
        return sentence
    if others and others != LOAD_UNKNOWN:
        return f'disturbed: "{sentence.text}" is impossible; {others}'
    return f'implausible: "{sentence.text}"; {others or "no load by other processes explains it"}'


def folded(text: str, max_width: int | None, mark: str = "# ") -> str:
    """Return the text with a mark at the start of each line, wrapped to `max_width` characters."""
    if max_width is None:
        return "\n".join(mark + line for line in text.splitlines())
    wrapper = textwrap.TextWrapper(max_width, initial_indent=mark, subsequent_indent=f"{mark}  ")
    wrapper.break_long_words = wrapper.break_on_hyphens = False  # keep names intact
    return "\n".join(wrapper.fill(line) for line in text.splitlines())


def omitted(count: int) -> list[str]:
    """Return the line below a table whose last columns were left out; no line if none was."""
    return [f"# not shown: {count_of(count, 'column')}; --wide prints all"] if count else []


def terminal_width() -> int | None:
    """Return the width in characters; None if stdout is not a terminal, or is one without a size:
    mpirun creates those, and may forward their output."""
    if not sys.stdout.isatty():
        return None
    return shutil.get_terminal_size(fallback=(0, 0)).columns or None


def check_flags(args: argparse.Namespace) -> None:
    """Refuse combinations of the common flags that are not possible."""
    if args.json == "" or (args.resume and args.json in (None, "-")):
        exits.refuse(
            "expected --json PATH, the report to write or resume, e.g. --json report.jsonl"
        )
    if args.profile_ranks and not args.profile:
        exits.refuse("--profile-ranks requires --profile DIR, e.g. --profile traces")


def gpu_is_lost(device: torch.device) -> bool:
    """Whether every CUDA call of this process fails, as after a failed assertion in a kernel."""
    try:
        if device.type == "cuda":
            torch.cuda.current_stream(device).query()  # does not wait: work may never finish
    except RuntimeError:
        return True
    return False
