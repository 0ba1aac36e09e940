"""Commands run in turn, again and again: each run leaves a report and a log in a folder.

    DIR/campaign.json   the commands, their variables, every run with its status, start and end
    DIR/a-01.json       the report of the first run of side `a`
    DIR/a-01.log        what it printed
    DIR/lock            locked while a campaign runs in DIR

`campaign.json` is replaced atomically before and after every run, so that the same campaign
started again goes on where it was. Imports no torch: what runs is somebody else's command.
"""

import contextlib
import fcntl
import json
import os
import shlex
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from types import TracebackType
from typing import Any

from common.commands import (
    LATE,
    STOPPED,
    Command,
    Interrupted,
    Status,
    defer_signals,
    restore_signals,
    run_commands,
    stop_if_asked,
)
from common.results import replace_file
from common.runs import load_run
from common.sides import Side, environment_of
from common.text import printable
from common.turns import Turns

SCHEMA = "torchrun-bench-campaign/1"


class RunFailed(Exception):
    """A run that left no complete report; the message says which, why, and shows its log."""

    status = 1


Slot = tuple[str, int]  # a side, and the number of its run, from 1


class Campaign:
    """A folder of runs. As a context manager it holds the folder's lock and defers signals."""

    def __init__(
        self,
        folder: str,
        sides: Sequence[Side],
        design: dict[str, Any],
        check: Callable[[str], object],
        timeout: float | None = None,
        interleave: bool = False,
    ) -> None:
        """design: what was decided before the first run, e.g. how many there are to be.

        check: raises ValueError for a path that holds no report. timeout: seconds for one run.
        interleave: runs that are to be compared run together and take turns, see common/turns.py.
        """
        self._shown = folder
        self.folder = Path(os.path.realpath(folder))
        self._sides = {side.name: side for side in sides}
        self._check = check
        self._timeout = timeout
        self._interleave = interleave
        self._lock: Any = None
        self._mask: set[int] = set()
        self._document: dict[str, Any] = {
            "schema": SCHEMA,
            "status": "running",
            "started_at": _now(),
            "finished_at": None,
            "directory": str(Path.cwd()),
            "interleave": interleave,
            "sides": {
                side.name: {"command": list(side.command), "variables": side.variables}
                for side in sides
            },
            "design": design,
            "looked": False,  # whether a result was computed: the design must not change after it
            "runs": [],
        }

    def __enter__(self) -> "Campaign":
        """Raises ValueError where the folder cannot serve, with one line that says why."""
        self._take_folder()
        try:
            self._resume()
            self._write()
        except (ValueError, OSError) as error:
            self._lock.close()
            if isinstance(error, OSError):
                raise ValueError(
                    f"--out {self._shown} cannot be written: {error.strerror}"
                ) from None
            raise
        self._mask = defer_signals()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        status = "complete"
        if isinstance(error, Interrupted):
            status = "interrupted"
        elif error is not None:
            status = "failed"
        self._document |= {"status": status, "finished_at": _now()}
        try:
            self._write()
        except OSError as problem:
            _tell(
                f"error: cannot write {self._shown}/campaign.json: {problem.strerror}; its "
                "previous version is intact"
            )
        self._lock.close()
        restore_signals(self._mask, drop=isinstance(error, Interrupted))

    def path(self, side: str, number: int, suffix: str = "json") -> str:
        """Where run `number` (from 1) of a side has its report, or its log."""
        return str(self.folder / f"{side}-{number:02d}.{suffix}")

    def done(self, side: str, number: int) -> bool:
        """Whether that run is complete."""
        return any((run["side"], run["number"]) == (side, number) for run in self.finished())

    def finished(self) -> list[dict[str, Any]]:
        """The complete runs, as in campaign.json."""
        return [run for run in self._document["runs"] if run["status"] == "complete"]

    def note_look(self) -> None:
        """A result is about to be computed: from now on the design is fixed."""
        self._document["looked"] = True
        self._write_or_fail()

    def run_all(self, rounds: Sequence[Sequence[Slot]], planned: int) -> None:
        """Run what is not done yet, in this order; progress on stderr.

        rounds: of runs that are to be compared, as (side, number). In an interleaved campaign
        those of a round run together; where one of them is not done, all run.
        planned: how many runs there are to be in the end, at most.
        """
        rows = rounds if self._interleave else [[slot] for row in rounds for slot in row]
        for row in rows:
            if all(self.done(*slot) for slot in row):
                continue
            seconds = self.run(row)
            done = self.finished()
            together = Counter(run["number"] for run in done) if self._interleave else {}
            spent = sum(run["seconds"] / together.get(run["number"], 1) for run in done)
            left = (planned - len(done)) * spent / len(done)
            names = ", ".join(f"{side}-{number:02d}" for side, number in row)
            _tell(
                f"{names} took {seconds:.1f} s; {len(done)} of {planned} runs, "
                f"about {left / 60:.1f} min to go"
            )

    def run(self, row: Sequence[Slot]) -> float:
        """Run the command of each (side, number) once, all together; how many seconds it took.

        Several take turns, each from block to block. Raises RunFailed where one leaves no complete
        report, Interrupted on a signal.
        """
        stop_if_asked()
        reports = [Path(self.path(*slot)) for slot in row]
        logs = [Path(self.path(*slot, "log")) for slot in row]
        entries: list[dict[str, Any]] = [
            {
                "side": side,
                "number": number,
                "report": report.name,
                "log": log.name,
                "status": "running",
                "exit_status": None,
                "started_at": _now(),
                "finished_at": None,
                "seconds": None,
            }
            for (side, number), report, log in zip(row, reports, logs, strict=True)
        ]
        kept = [r for r in self._document["runs"] if (r["side"], r["number"]) not in row]
        self._document["runs"] = [*kept, *entries]
        self._write_or_fail()
        start = time.monotonic()
        reasons: list[str | None] = [None] * len(row)
        try:
            with Turns([side for side, _ in row] if len(row) > 1 else []) as turns:
                commands = []
                for (side, _), report, log in zip(row, reports, logs, strict=True):
                    report.unlink(missing_ok=True)  # half a one of an earlier attempt
                    variables = turns.variables(side) if len(row) > 1 else {}
                    words = [*self._sides[side].command, "--json", str(report)]
                    environment = environment_of(self._sides[side]) | variables
                    commands.append(Command(side, words, environment, log))
                statuses = run_commands(commands, self._timeout, turns.over)
            for i, (side, _) in enumerate(row):
                reasons[i] = self._why_failed(statuses[i], reports[i])
                if len(row) > 1:
                    entries[i]["turns"] = turns.taken[side]
                    if not reasons[i] and not turns.taken[side]:
                        reasons[i] = (
                            "took no turn: only this project's scripts can, and rank 0 has to be "
                            "on this machine; run it without --interleave"
                        )
                stopped = statuses[i] is STOPPED
                status = "stopped" if stopped else "failed" if reasons[i] else "complete"
                number = statuses[i] if isinstance(statuses[i], int) else None
                entries[i] |= {"status": status, "exit_status": number}
        except Interrupted:
            for entry in entries:
                entry["status"] = "interrupted"
            raise
        except OSError as error:  # the program has gone, the disk is full
            for entry in entries:
                entry["status"] = "failed"
            reasons[0] = f"could not be started: {error.strerror}: {error.filename}"
        finally:
            for entry in entries:
                entry |= {"finished_at": _now(), "seconds": round(time.monotonic() - start, 3)}
            if entries[0]["status"] != "interrupted":  # then the last writing is at hand
                self._write_or_fail()
        for report, log, reason in zip(reports, logs, reasons, strict=True):
            if reason:
                lines = [*_last_lines(log, self._shown), *_failed_cases(report)]
                raise RunFailed("\n".join([f"error: run {report.stem} {reason}", *lines]))
        if len(row) > 1 and max(turns.taken.values()) < 2:
            _tell("warning: none was interrupted by another's turn: this script has no blocks")
        seconds: float = entries[0]["seconds"]
        return seconds

    def _why_failed(self, status: "Status", report: Path) -> str | None:
        if status is LATE:
            return f"took longer than {self._timeout:g} s and was ended"
        if status is STOPPED:
            return None
        assert isinstance(status, int)
        if status != 0:
            return f"ended with status {status}" if status > 0 else _by_signal(-status)
        return self._problem_of(report)

    def _problem_of(self, report: Path) -> str | None:
        if not report.exists():
            return "wrote no report, although it ended well; does the command know --json?"
        try:
            self._check(str(report))
        except ValueError as error:
            return f"left a report of no use: {error}"
        return None

    def _take_folder(self) -> None:
        shown = self._shown
        if not shown:
            raise ValueError("--out needs a folder, got ''; e.g. --out ab")
        try:
            if self.folder.exists() and not self.folder.is_dir():
                raise ValueError(f"--out {shown} is not a folder; give one, e.g. --out ab")
            self.folder.mkdir(parents=True, exist_ok=True)
            strangers = [path.name for path in self.folder.iterdir() if path.name != "lock"]
            if strangers and "campaign.json" not in strangers:
                raise ValueError(
                    f"--out {shown} holds {sorted(strangers)[0]} but no campaign; "
                    "give a new folder, or one whose campaign is to go on"
                )
            self._lock = open(self.folder / "lock", "w", encoding="utf-8")  # noqa: SIM115
        except OSError as error:
            raise ValueError(f"--out {shown} cannot be used: {error.strerror}") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise ValueError(f"--out {shown}: another campaign is running there") from None

    def _resume(self) -> None:
        path = self.folder / "campaign.json"
        if not path.exists():
            return
        old = load_campaign(str(path))
        self._refuse_differences(old)
        new = self._document
        if old["looked"]:
            for name in {**new["design"], **old["design"]}:
                there, here = (design.get(name) for design in (old["design"], new["design"]))
                if there != here:
                    raise ValueError(
                        f"--out {self._shown}: its result was computed with {name} {there}, and "
                        f"now it is {here}; a plan that changes after a look has an unknown "
                        "error rate, give a new --out"
                    )
        runs = []
        for run in old["runs"]:
            if run["status"] != "complete":
                _tell(f"{run['side']}-{run['number']:02d} is run again, it was {run['status']}")
                continue
            report = self.path(run["side"], run["number"])
            problem = self._problem_of(Path(report))
            if problem:
                _tell(f"{Path(report).stem} is run again: it {problem}")
            else:
                runs.append(run)
        new |= {"started_at": old["started_at"], "looked": old["looked"], "runs": runs}
        if runs:
            _tell(f"runs that are kept: {len(runs)}")

    def _refuse_differences(self, old: dict[str, Any]) -> None:
        new = self._document
        pairs = [("the directory it was started in", old["directory"], new["directory"])]
        pairs.append(("--interleave", old.get("interleave", False), new["interleave"]))
        if list(old["sides"]) != list(new["sides"]):
            pairs.append(("what is compared", ", ".join(old["sides"]), ", ".join(new["sides"])))
        for name in [name for name in new["sides"] if name in old["sides"]]:
            there, here = old["sides"][name], new["sides"][name]
            pairs.append((f"--{name}", shlex.join(there["command"]), shlex.join(here["command"])))
            pairs.append(
                (f"--{name}-env", _show(there["variables"]), _show(here["variables"])),
            )
        for what, there, here in pairs:
            if there != here:
                raise ValueError(
                    f"--out {self._shown} holds a campaign of something else: {what} was {there} "
                    f"there, and is {here} now; give another --out"
                )

    def _write(self) -> None:
        replace_file(self.folder / "campaign.json", json.dumps(self._document, indent=1) + "\n")

    def _write_or_fail(self) -> None:
        try:
            self._write()
        except OSError as error:
            raise RunFailed(
                f"error: {self._shown}/campaign.json cannot be written: {error.strerror}; "
                "its previous version is intact"
            ) from None


def check_report(path: str) -> None:
    """Raise ValueError for anything but the report of a run that came to its end."""
    run = load_run(path)
    if run.status != "complete":
        raise ValueError(f"{path}: its status is {run.status}")
    if not run.cases:
        raise ValueError(f"{path}: it has no case")


def load_campaign(path: str) -> dict[str, Any]:
    """The campaign.json at `path`. Raises ValueError where it is none."""
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise ValueError(f"{path} is damaged; give another --out") from None
    good = isinstance(document, dict) and document.get("schema") == SCHEMA
    kinds = {
        **{"directory": str, "sides": dict, "design": dict, "looked": bool},
        **{"runs": list, "started_at": str},
    }
    good = good and all(isinstance(document.get(name), kind) for name, kind in kinds.items())
    good = good and all(
        isinstance(side, dict)
        and isinstance(side.get("command"), list)
        and all(isinstance(word, str) for word in side["command"])
        and isinstance(side.get("variables"), dict)
        for side in document["sides"].values()
    )
    good = good and all(
        isinstance(run, dict)
        and isinstance(run.get("side"), str)
        and type(run.get("number")) is int
        and isinstance(run.get("seconds"), int | float | None)
        and isinstance(run.get("status"), str)
        for run in document["runs"]
    )
    if not good:
        raise ValueError(f"{path} is not a campaign of this program; give another --out")
    campaign: dict[str, Any] = document
    return campaign


def _tell(line: str) -> None:
    """Progress, on stderr: in a log file as on a terminal, since a campaign takes hours."""
    with contextlib.suppress(OSError):
        print(printable(line, 500), file=sys.stderr, flush=True)


def _show(variables: dict[str, str]) -> str:
    return shlex.join(f"{n}={v}" for n, v in sorted(variables.items())) or "nothing"


def _by_signal(number: int) -> str:
    return f"was killed by {signal.Signals(number).name}"


def _last_lines(log: Path, shown: str, lines: int = 20) -> list[str]:
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 64 * 1024))
            text = file.read().decode(errors="replace").rstrip().splitlines()[-lines:]
    except OSError:
        return []
    if not text:
        return ["it printed nothing"]
    return [f"the end of {shown}/{log.name}:", *(f"    {printable(line, 300)}" for line in text)]


def _failed_cases(report: Path) -> list[str]:
    """What the report says itself; under torchrun the end of the log is torchrun's own."""
    try:
        cases = load_run(str(report)).cases.values()
    except ValueError:
        return []
    failed = [case for case in cases if case.check.startswith("failed")]
    return [printable(f"{case.label}: {case.check}", 300) for case in failed[:10]]


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
