"""One run of a script: it measures one case after the other. Each case is a row of a table and a
line of the report. If a case fails on any rank, its row has the reason, and the run goes on.
"""

import argparse
import atexit
import contextlib
import importlib
import os
import shlex
import shutil
import stat
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from common import environment
from common.cli import (
    ROOT,
    TOKEN,
    TURN,
    age_s,
    complain,
    describe,
    duration,
    end,
    leave,
    refuse,
    take_stdout,
    tell_torchrun,
)
from common.contents import of_run
from common.cpu_load import BUSY, CpuLoad, Others
from common.environment import others_text
from common.groups import Group, Groups, connect, gather, share
from common.join import join, world
from common.report import DISK_FAILED, UNCHECKED, Case, Report, load, not_json
from common.stats import Disturbed, Times, keep_samples, rounded, stacked
from common.table import Columns, Table, omitted, render
from common.timing import RankTimes, StopRule, TimedLoop, Workload, launch_share
from common.watchdog import Watchdog, end_later

LOAD_UNKNOWN = "CPU use by other processes was not recorded"
T = TypeVar("T")
Key = dict[str, Any]  # what tells a case from all others: flat, JSON
Planned = tuple[str, int, Key]  # a case: its name, how many ranks it has, its key
Build = Callable[[Key, Group], Workload]  # called on the ranks of the case
# Called on rank 0: fills in case.metrics and case.check. The list has the facts of each rank.
Derive = Callable[[Case, Times, list[Any]], None]
# Called on rank 0 with the cases of a table that did not fail. Returns the sentence, or sentences,
# that answer what the script asks; None where the cases do not tell.
Answer = Callable[[list[Case]], str | list[str] | None]


class RankResult(NamedTuple):
    """What each rank of a case sends to rank 0."""

    times: RankTimes
    facts: Any  # what Workload.facts returned
    seen: list[Any]  # by each observer


class Observer:
    """Looks on from outside the timed code. Without it a run measures the same.

    What `row` and `end` raise becomes a line. An error in `after` fails the case: the other ranks
    may be waiting within it, and would wait for ever.
    """

    def __init__(self, bench: "Benchmark") -> None:
        """All ranks have met, the preamble is printed, no report is open yet."""
        self.bench = bench

    def phase(self, what: str) -> None:
        """What comes next, never within a block; "" before a line is printed."""

    def after(self, key: Key, work: Workload, times: RankTimes, group: Group) -> Any:
        """On each rank of a case, once it is timed: it may use the case's groups. `row` gets what
        the ranks return."""

    def row(self, case: Case, seen: list[Any]) -> list[str]:
        """On rank 0, before the case is written: lines below its row. May add to case.metrics."""
        return []

    def end(self, last_line: dict[str, Any]) -> list[str]:
        """On all ranks, so that it may gather. The lines that rank 0 returns are printed, and what
        it adds to `last_line` is in the report's last line."""
        return []


def load_observers(bench: "Benchmark") -> list[Observer]:
    """One of each class of common/observe/. This is the one place that loads them."""
    observers = []
    for path in sorted((ROOT / "common" / "observe").glob("[!_]*.py")):
        module = importlib.import_module(f"common.observe.{path.stem}")
        kinds = [kind for kind in Observer.__subclasses__() if kind.__module__ == module.__name__]
        observers += [kind(bench) for kind in kinds]
    return observers


class Benchmark:
    """A context manager for every rank. When it is left, `status` is the exit status."""

    def __init__(self, name: str, args: argparse.Namespace, tested: range | None = None) -> None:
        """tested: the ranks that groups under test may hold; None for all of them."""
        check_flags(args)
        end_later(args.timeout)
        self.args, self.status = args, 1
        self.case_count = 0  # that the run is going to measure; 0 if nobody has said so
        self.failure: tuple[int, str] | None = None  # of the run as a whole: status and reason
        self.table: Table | None = None
        self.title = ""
        self.answers: list[str] = []  # printed together, as the last lines
        self.last_line: dict[str, Any] = {}  # what a script adds to the report's last line
        self.commands: list[str] = []  # that read what the run wrote, from observers; as they are
        self.measured: list[Key] = []
        self.names: dict[str, list[str]] = {}  # of the announced cases, by the title of their table
        rank, on_node, _, _ = world()
        self.is_first = rank == 0
        # how wide a table may be, in letters; None: as wide as it is
        self.room = terminal_width() if self.is_first and not args.wide else None
        turns = os.environ.get(TURN)
        variables = environment.user_variables()  # before `join` sets more of them
        contents = of_run(sys.argv[0], own_modules(args))
        # before any rank calls CUDA; while two commands take turns, the other one holds memory
        memory_held = {}
        if on_node == 0 and not turns and torch.cuda.device_count():
            memory_held = environment.gpu_memory()
        files = [take_stdout()] if args.json == "-" else []
        # while two commands take turns, the one that waits is idle: it disturbs nobody
        self.records_load = not turns
        self.cpu_load = CpuLoad() if on_node == 0 and not turns else None
        self.job = join(args.device, args.backend, args.timeout, contents)
        self.groups = Groups(self.job)
        self.turn = turn_taker(turns) if turns and self.is_first else lambda: None
        self.rule = StopRule.by_flags(args, bool(turns))
        measured_on = share(
            environment.collect(self.job, variables, self.cpu_load, contents, memory_held)
        )
        path = args.json if self.is_first and not args.dry_run else None
        self.report = Report(name, measured_on, path, files=files)
        self.watchdog = Watchdog(self.job, args.timeout, self.report)
        if problem := environment.problem(measured_on, tested):
            self.refuse(problem)
        # These complete every key, as rank 0 has them: with RPC a server may be on another device
        # than the trainers.
        place = {"device": self.job.device.type, "backend": self.job.backend}
        self.place: Key = share({"world_size": self.job.world_size, **place})
        self.observers: list[Observer] = []
        self.print(environment.preamble(measured_on))
        self.observers = load_observers(self)
        self.replaced = self.prepare("--json", self.open_report)
        if self.replaced:
            self.print(f"# the report that was there is now {self.replaced}")
        for remark in self.report.remarks:
            self.print(f"# {remark}")
        kept = [case.key for case in self.report.cases if counts_as_done(case, args)]
        self.done: list[Key] = share(kept)

    def open_report(self) -> str | None:
        """Begin the report or go on with it, on rank 0. The new name of one that was there."""
        if self.args.dry_run and self.args.resume and self.is_first:
            with contextlib.suppress(ValueError):  # there is none, or no report
                self.report.cases = load(self.args.json).cases
        replaced = self.report.start(self.args.resume)
        for case in self.report.cases:  # a resumed report has some
            if case.check == "passed" and not case.metrics:  # a script derives some for each case
                raise ValueError(f"{self.args.json} is damaged: case {case.name!r} has no metrics")
        return replaced

    def prepare(self, what: str, make: Callable[[], T]) -> T:
        """What `make` returns. All ranks call it. Where it raises OSError or ValueError on any of
        them, the run ends with `what: the first rank's reason`: status 1 for a full disk, else 2.
        """
        self.phase(f"prepares {what}")
        result, problem = None, None
        try:
            result = make()
        except OSError as error:
            status = 1 if error.errno in DISK_FAILED else 2
            file = f" {error.filename}" if error.filename else ""
            problem = (f"{what}{file}: {error.strerror or error}", status)
        except ValueError as error:
            problem = (f"{what}: {error}", 2)
        problems = [given for given in gather(problem) or [] if given]
        if first := share(problems[0] if problems else None):
            self.refuse(*first)
        return result  # type: ignore[return-value]

    def phase(self, what: str, ahead: int = 1) -> None:
        """Say what comes next: to the watchdog, to who looks on. Keep it out of timed code.

        ahead: 0 for what only this rank does, so that the others do not count as behind it.
        """
        self.watchdog.phase(what, ahead)
        for observer in self.observers:
            observer.phase(what)

    def complete_key(self, key: Key, ranks: int) -> Key:
        """The key with device, backend, world_size and the number of ranks, where it lacks them."""
        return self.place | {"ranks": ranks} | key

    def announce(self, tables: Mapping[str, Sequence[Planned]]) -> None:
        """Say which cases the run is going to measure, by table, before anything is set up for
        them. All ranks call it. With --dry-run the run lists them and ends here."""
        planned: dict[str, list[str]] = {}
        for title, cases in tables.items():
            self.names[title] = [name for name, _, _ in cases]
            keys = {name: self.complete_key(key, ranks) for name, ranks, key in cases}
            planned[title] = [name for name, key in keys.items() if key not in self.done]
        self.case_count = sum(map(len, planned.values()))
        if not self.args.dry_run:
            return
        for title, names in planned.items():
            self.print("\n".join(["", title, *(f"  {name}" for name in names)]))
        self.print(f"\n# {environment.count_of(self.case_count, 'case')}; nothing was measured")
        self.leave_job()
        sys.exit(0)

    def measure(
        self,
        key: Key,
        name: str,
        build: Build,
        derive: Derive,
        *,
        ranks: Sequence[int] | None = None,
        teams: Sequence[Sequence[int]] | None = None,
        rule: StopRule | None = None,
    ) -> Case | None:
        """Measure a case on `ranks`, by default on all. Returns it on rank 0, None on the others.

        All ranks of the job call it with the same arguments. A case that the resumed report holds
        is shown, not measured. teams: parts of the ranks that do the same at once, each in a group
        of its own. rule: of this case, if not that of the flags. Cases over the same ranks and
        teams share their groups, until one of them fails.
        """
        ranks = tuple(range(self.job.world_size) if ranks is None else ranks)
        key = self.complete_key(key, len(ranks))
        if problem := not_json("key", key):
            self.refuse(problem)
        assert key not in self.measured, f"measured twice: {key}"
        if key in self.done:
            return self.show(self.report.find(key), [])
        self.measured.append(key)
        case = Case(key=key, ranks=list(ranks), name=name, table=self.title)
        member = self.job.rank in ranks
        self.watchdog.begin(name, member)
        self.phase("set up" if member else "not part of it")
        result = self.attempt(key, build, ranks, teams, rule or self.rule)
        if member:  # a rank outside of it is not behind the others
            self.phase("waits for all ranks")
        results, lines = gather(result), list[str]()
        reason, unwritten = share(self.write(case, derive, results, lines) if results else None)
        self.watchdog.group = None  # two threads must not abort one group
        self.groups.give_back(ranks, teams, failed=reason is not None)
        if unwritten:  # all ranks know it, so that none waits for a lost peer
            self.refuse(unwritten, 1)
        return self.show(case, lines) if results else None

    def attempt(
        self,
        key: Key,
        build: Build,
        ranks: tuple[int, ...],
        teams: Sequence[Sequence[int]] | None,
        rule: StopRule,
    ) -> RankResult | None:
        """Take the groups of a case and time it, on this rank.

        None on ranks outside the case, and where it failed: then the watchdog has the reason, and
        this rank has closed its groups.
        """
        result, error = None, ""
        try:
            group, is_new = self.groups.take(ranks, teams)
            if group:
                self.watchdog.group = group
                if is_new:
                    group.start_up_s["first_collective"] = connect(group.test, self.job)
                result = self.time(key, build(key, group), group, rule)
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

    def time(self, key: Key, work: Workload, group: Group, rule: StopRule) -> RankResult:
        """Time what `build` has made, on this rank."""
        times = work.timed
        if not times:
            times = TimedLoop(work, group, self.job.device, rule, self.before_block).run()
            self.phase("check")
        facts = work.facts()
        times.samples_s = rounded(times.samples_s)
        seen = [observer.after(key, work, times, group) for observer in self.observers]
        return RankResult(times, facts, seen)

    def before_block(self, phase: str) -> None:
        self.turn()
        self.phase(phase)

    def write(
        self, case: Case, derive: Derive, results: list[RankResult], lines: list[str]
    ) -> tuple[str | None, str | None]:
        """Complete the case and write it, on rank 0.

        Returns why it failed and why it could not be written, each None if it did not happen.
        results: of each rank of the job; None on those that have none. lines: gets what observers
        say.
        """
        reason, failed_rank = self.watchdog.failure()
        if reason is None:
            try:
                of_ranks = [results[rank] for rank in case.ranks]
                self.complete(case, derive, of_ranks)
                for number, observer in enumerate(self.observers):
                    seen = [result.seen[number] for result in of_ranks]
                    lines += guarded(observer, observer.row, case, seen)
                reason = not_json("metric", case.metrics)
            except Exception as error:
                reason = describe(error)
        if reason:
            case.metrics, case.check = {}, f"failed: {reason}"
            if failed_rank is not None:
                case.metrics["failed_rank"] = failed_rank
        if self.report.path:
            self.phase(f"writes {self.report.path}", ahead=0)
        try:
            self.report.add(case)
        except OSError as error:
            return reason, f"--json {self.args.json}: {error.strerror}"
        return reason, None

    def complete(self, case: Case, derive: Derive, results: list[RankResult]) -> None:
        """Fill in the samples, the metrics and the check. results: of the ranks of the case.

        The metrics are of all samples, also where the case keeps a part of them.
        """
        by_rank = [result.times for result in results]
        first = by_rank[0]
        samples_s = stacked([times.samples_s for times in by_rank])
        case.aligned, case.rounds, case.stop = first.aligned, first.rounds, first.stop
        keep_samples(case, samples_s)
        if first.launching_s:
            case.metrics["launch_share"] = launch_share(by_rank)
        times = Times(samples_s, case.rounds, [times.returned for times in by_rank])
        derive(case, times, [result.facts for result in results])

    @contextlib.contextmanager
    def begin_table(
        self,
        title: str,
        columns: Columns,
        answer: Answer | None = None,
        table: Table | None = None,
    ) -> Iterator[Table]:
        """The cases that are measured within it are the rows of a table. All ranks call it.

        columns: a header -> a function of a case that makes the cell, the most important ones
        first: a terminal without --wide shows as many as fit, and a line below says how many it
        does not show. answer: makes the sentence that answers the script's question. table:
        another form than usual.
        """
        self.title, self.table = title, table or Table(columns)
        self.table.room = self.room
        self.table.make_room(self.names.get(title, []))
        self.print(f"\n{folded(title, self.room, '')}\n")
        yield self.table
        for line in omitted(len(self.table.columns) - self.table.count):
            self.print(line)
        if self.table.passed and answer:
            # of a resumed report each part is answered for itself: no sentence mixes two runs
            for part in sorted({case.part or 0 for case in self.table.passed}):
                cases = [case for case in self.table.passed if (case.part or 0) == part]
                sentences = answer(cases) or []
                self.conclude([sentences] if isinstance(sentences, str) else sentences, cases[0])
        self.title, self.table = "", None

    def print_table(
        self, columns: Columns, cases: Sequence[Case], title: str = "", omitted_rows: str = ""
    ) -> None:
        """Print another table, of cases that were measured. omitted_rows: those that the caller has
        left out because this is a terminal, such as `3 trainers`."""
        above = [folded(title, self.room, ""), ""] if title else []
        if any(self.mark(case) for case in cases):
            first, *others = columns.items()
            columns = dict([first, ("measured", lambda case: self.mark(case) or "now"), *others])
        self.print("\n".join(["", *above, render(columns, cases, self.room, omitted_rows)]))

    def conclude(self, sentences: Sequence[str], case: Case | None = None) -> None:
        """Sentences that answer what the script asks, for one without tables. Call it on rank 0.

        case: that they are about. If it was measured before the report was resumed, they say when
        and where.
        """
        if case is not None and self.report.is_earlier(case):
            begin = f"measured {self.report.when_and_where(case.part)}: "
            sentences = [begin + with_cause(sentence, LOAD_UNKNOWN) for sentence in sentences]
        self.answers += sentences

    def show(self, case: Case | None, lines: list[str]) -> Case | None:
        """Print the row of a case, and what observers say of it."""
        if case and self.table:
            for row in self.table.rows_of(case):
                self.print(marked(self.table.row(row), self.mark(case), self.room))
        elif case and self.mark(case):  # a script without rows, such as p2p_matrix.py
            self.print(f"# {case.name}: measured {self.mark(case)}")
        for line in lines:
            self.print(folded(line, self.room))
        return case

    def mark(self, case: Case) -> str:
        """When and where a case was measured before the report was resumed; "" for a new one."""
        return self.report.when_and_where(case.part) if self.report.is_earlier(case) else ""

    def print(self, text: str) -> None:
        """Print on rank 0. If stdout is gone, the run ends; the report has its cases."""
        if not self.is_first:
            return
        for observer in self.observers:
            observer.phase("")
        try:
            print(text, flush=True)
        except OSError as error:
            kept = f"; {self.args.json} has the cases so far" if self.args.json else ""
            self.watchdog.stop()
            end(1, f"{Path(sys.argv[0]).name}: error: stdout: {error.strerror}{kept}")

    def fail(self, reason: str, status: int = 1) -> None:
        """Let the run end with this status although its cases passed. The first reason counts. Call
        it on rank 0."""
        self.failure = self.failure or (status, reason)
        complain(f"error: {reason}")

    def refuse(self, problem: str, status: int = 2) -> None:
        """End the run, by default for a mistake that shows only in the job.

        All ranks call it, or rank 0 alone where only it knows; the launcher then ends the others.
        """
        self.watchdog.stop()
        refuse(problem, status)

    def __enter__(self) -> "Benchmark":
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is not None:
            self.watchdog.stop()
            return
        self.finish()
        self.leave_job()
        atexit.register(leave, self.status)

    def leave_job(self) -> None:
        """Close all groups. All was printed and written: what fails here changes no status."""
        with contextlib.suppress(RuntimeError):
            self.groups.close_all()
            dist.barrier()
        self.watchdog.stop()
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()

    def load_of_others(self) -> list[Others]:
        """What other programs took from each node during the run. All ranks call it; [] on all but
        rank 0, and while two commands take turns."""
        rows = gather(self.cpu_load.of_others() if self.cpu_load else None) or []
        return [row for row in rows if row]

    def disturbed(self) -> Others | None:
        """CPU use by other processes so far, on the node where it was largest. None if it was no
        more than a tenth of the cores, or unless `records_load`. All ranks call it."""
        busiest = max(self.load_of_others(), key=lambda load: load.fraction, default=None)
        return share(busiest if busiest and busiest.fraction > BUSY else None)

    def finish(self) -> None:
        """Print remarks about the run as a whole, write the report's last line, and set status."""
        last_line = self.last_line
        remarks: list[str] = []
        for observer in self.observers:
            remarks += guarded(observer, observer.end, last_line)
        lines = [folded(remark, self.room) for remark in remarks]
        # commands are not folded, so that they can be copied
        damage = self.report.lost()
        path = None if damage else self.report.path
        lines += [f"# {line}" for line in [*self.commands, *report_lines(path, self.replaced)]]
        lines.append(f"# elapsed {duration(age_s())}")
        self.print("\n" + "\n".join(lines))
        loads = self.load_of_others()
        others = others_text(self.report.environment["hosts"], loads) if loads else LOAD_UNKNOWN
        answers = [with_cause(sentence, others) for sentence in self.answers]
        if answers:
            self.print("\n" + "\n".join(folded(sentence, self.room) for sentence in answers))
            last_line["answer"] = answers
        if damage:
            self.fail(f"--json {self.args.json}: {damage}")
        status, reason = self.failure or (0, "")
        cases = self.report.cases
        if failed := [case for case in cases if case.failed]:
            first = f"{failed[0].name}: {failed[0].check}"
            reason = reason or f"{len(failed)} of {len(cases)} cases failed; {first}"
            status = 1
        try:
            self.report.finish("failed" if status == 1 else "complete", **last_line)
        except OSError as full:
            status, reason = 1, f"--json {self.args.json}: {full.strerror}"
            complain(f"error: {reason}")
        self.status, reason = share((status, reason))
        if self.status:
            tell_torchrun(reason)


def guarded(observer: Observer, call: Callable[..., list[str]], *given: Any) -> list[str]:
    """The lines that an observer returns; for an error of its own a line about it."""
    try:
        return call(*given)
    except Exception as error:
        return [f"{type(observer).__name__}: {describe(error)}"]


def report_lines(path: str | None, replaced: str | None) -> list[str]:
    """Where the report is, and the next commands. replaced: where an older report is now."""
    if not path or path == "-":
        return []
    lines = [f"report {path}; {analysis_command('report.py', path, '-o', 'page.html')}"]
    if replaced:
        before = short(replaced)
        lines.append(f"before {before}; {analysis_command('compare.py', before, '--test', path)}")
    return lines


def analysis_command(script: str, *words: str) -> str:
    """The command that starts a script of analysis/ from the current folder."""
    file = str(ROOT / "analysis" / script)
    return shlex.join(["python", min(short(file), file, key=len), *words])


def counts_as_done(case: Case, args: argparse.Namespace) -> bool:
    """Whether a case of a resumed report need not be measured again: it did not fail, and if this
    run checks values, they were checked."""
    return not case.failed and not (case.check == UNCHECKED and getattr(args, "check", False))


def marked(row: str, mark: str, room: int | None) -> str:
    """A row with a mark at its end, or in a line below it if there is no room."""
    if not mark:
        return row
    text = row.rstrip("\n")
    *_, last = text.splitlines()
    fits = room is None or len(f"{last}  # {mark}") <= room
    return text + (f"  # {mark}" if fits else f"\n# ^ {mark}") + row[len(text) :]


def with_cause(sentence: str, others: str) -> str:
    """The sentence; one about a number that cannot be says so, and who took the cores. others: what
    other programs took, "" for nothing."""
    if not isinstance(sentence, Disturbed):
        return sentence
    return f'disturbed: "{sentence}" cannot be; {others or "nobody else took the cores"}'


def folded(text: str, room: int | None, mark: str = "# ") -> str:
    """Each line of a text behind a mark, in lines of so many letters; None: as long as it is."""
    if room is None:
        return "\n".join(mark + line for line in text.splitlines())
    wrapper = textwrap.TextWrapper(room, initial_indent=mark, subsequent_indent=f"{mark}  ")
    wrapper.break_long_words = wrapper.break_on_hyphens = False  # names stay whole
    return "\n".join(wrapper.fill(line) for line in text.splitlines())


def terminal_width() -> int | None:
    """In letters, as COLUMNS or the terminal says; None where stdout is no terminal, or one without
    a size: mpirun gives its ranks such, and passes on to a file what they print."""
    if not sys.stdout.isatty():
        return None
    return shutil.get_terminal_size(fallback=(0, 0)).columns or None


def short(path: str) -> str:
    """The path from the current folder; the same path if that folder has been removed."""
    try:
        return os.path.relpath(path)
    except FileNotFoundError:
        return path


def own_modules(args: argparse.Namespace) -> list[str]:
    """The modules of one's own models, which --model package.module:function names."""
    models = getattr(args, "models", None) or []
    return list(dict.fromkeys(name.partition(":")[0] for name in models if ":" in name))


def check_flags(args: argparse.Namespace) -> None:
    """Refuse flags of all scripts that do not go together."""
    if args.json == "" or (args.resume and args.json in (None, "-")):
        refuse("expected --json PATH, the report to write or resume, e.g. --json report.jsonl")
    if args.profile_ranks and not args.profile:
        refuse("--profile-ranks needs the folder of the traces; e.g. --profile traces")


def lost(device: torch.device) -> bool:
    """Whether this process can no longer use its GPU, e.g. after an assertion failed in a kernel:
    then every call fails."""
    try:
        if device.type == "cuda":
            torch.cuda.current_stream(device).query()  # does not wait: peers may never answer
    except RuntimeError:
        return True
    return False


def turn_taker(pipes: str) -> Callable[[], None]:
    """Wait for the first turn of this command. Returns a function that passes the turn on and waits
    for the next one.

    pipes: two names. The token in the first pipe is this command's turn, in the second the other's.
    """
    try:
        my_name, other_name = pipes.split(":")
        for name in (my_name, other_name):
            if not stat.S_ISFIFO(os.stat(name).st_mode):  # a token would overwrite another file
                raise ValueError(f"{name} is no pipe")
        my_pipe = os.open(my_name, os.O_RDONLY)
        other_pipe = os.open(other_name, os.O_WRONLY)
    except (ValueError, OSError):
        got = f"got {pipes!r}; only ab.py --interleave sets it"
        refuse(f"{TURN}: expected two named pipes such as /tmp/a:/tmp/b, {got}")
    os.read(my_pipe, len(TOKEN))

    def pass_on() -> None:
        os.write(other_pipe, TOKEN)
        os.read(my_pipe, len(TOKEN))

    return pass_on
