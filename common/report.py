"""The report that `--json PATH` writes: JSON lines. docs/measuring.md describes the format.

First the run, then a line for each case, last how the run ended. A line is appended and synced as
soon as its case is measured, so a crash or a full disk loses the case in flight and nothing else.
Needs the standard library only: benchmarks/ writes reports, analysis/ reads them.
"""

import json
import math
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

SCHEMA = "torchrun-bench/2"


@dataclass
class Case:
    """One case: what identifies it, what was measured, and what follows from that.

    key: flat, JSON; the same key in two reports is the same case. samples_s: for each step
    [ranks][iterations] in seconds; the first step is the one that the case is about. rounds: the
    iterations of each round, alike for all steps. stop: the rule that ended the timing. check:
    `passed`, `failed: why` or `skipped: why`.

    Raises ValueError, naming the field, for values that are none of this.
    """

    key: dict[str, Any]
    ranks: list[int]
    samples_s: dict[str, list[list[float]]] = field(default_factory=dict)
    rounds: list[int] = field(default_factory=list)
    stop: str = ""
    metrics: dict[str, Any] = field(default_factory=dict)
    check: str = "passed"

    @property
    def failed(self) -> bool:
        return self.check.startswith("failed")

    def __post_init__(self) -> None:
        kinds = dict(key=dict, ranks=list, samples_s=dict, rounds=list, stop=str, metrics=dict)
        for name, kind in kinds.items():
            expect(isinstance(getattr(self, name), kind), name, kind.__name__, getattr(self, name))
        for name, value in self.key.items():
            expect(not isinstance(value, (dict, list)), f"key.{name}", "a plain value", value)
        known = isinstance(self.check, str) and self.check.startswith(
            ("passed", "failed: ", "skipped: ")
        )
        expect(known, "check", "passed, failed: ... or skipped: ...", self.check)
        for name, rows in self.samples_s.items():
            at = f"samples_s.{name}"
            fits = isinstance(rows, list) and len(rows) in (0, len(self.ranks))
            expect(fits, at, "a list for each rank", rows)
            for row in rows:
                expect(isinstance(row, list) and are_seconds(row), at, "lists of seconds", row)
                expect(len(row) == len(rows[0]), at, "lists of one length", len(row))


@dataclass
class Report:
    """One run. status: complete, failed, or interrupted while the last line is missing.

    end: what the last line says beside the status and the time.
    """

    benchmark: str
    environment: dict[str, Any]
    path: str | None = None
    argv: list[str] = field(default_factory=lambda: list(sys.argv))
    started_at: str = field(default_factory=lambda: now())
    schema: str = SCHEMA
    status: str = "interrupted"
    finished_at: str | None = None
    end: dict[str, Any] = field(default_factory=dict)
    cases: list[Case] = field(default_factory=list)

    def start(self, resume: bool = False) -> None:
        """Write the first line; with `resume` take over the cases of the file that is there.

        Another file is moved to PATH.bak. Raises ValueError where it is no report, or, with
        `resume`, one of another benchmark or environment; OSError where it cannot be written.
        """
        if not self.path:
            return
        path = Path(self.path)
        old = load(self.path) if path.exists() and path.stat().st_size else None
        if old is not None and resume:
            self.take_over(old)
            return
        if old is not None:
            path.replace(self.path + ".bak")
        names = ("schema", "benchmark", "argv", "started_at", "environment")
        self.append({name: getattr(self, name) for name in names})

    def take_over(self, old: "Report") -> None:
        """Go on with an older report of the same benchmark on the same devices."""
        for name, mine, theirs in (
            ("benchmark", self.benchmark, old.benchmark),
            *((n, self.environment.get(n), old.environment.get(n)) for n in SAME),
        ):
            if mine != theirs:
                raise ValueError(
                    f"--resume: {self.path} has {name} {theirs}, this run {mine}: numbers that "
                    "do not belong together; give another --json"
                )
        self.cases = old.cases
        content = Path(self.path or "").read_bytes()
        if not content.endswith(b"\n"):  # a line that a crash cut short
            os.truncate(self.path or "", content.rfind(b"\n") + 1)

    def add(self, case: Case) -> None:
        """Append a case. A later one of the same key replaces an earlier one."""
        self.cases = [old for old in self.cases if old.key != case.key] + [case]
        self.append(asdict(case))

    def finish(self, status: str, **end: Any) -> None:
        self.status, self.finished_at = status, now()
        self.append({"status": status, "finished_at": self.finished_at, **end})

    def find(self, key: dict[str, Any]) -> Case | None:
        """The case of this key, unless it failed."""
        return next((c for c in self.cases if c.key == key and not c.failed), None)

    def append(self, line: dict[str, Any]) -> None:
        """Write a line, whole or not at all. Raises OSError, e.g. on a full disk."""
        if not self.path:
            return
        data = json.dumps(line, allow_nan=False).encode() + b"\n"
        with open(self.path, "ab") as file:
            size = file.tell()
            try:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            except OSError:
                os.truncate(self.path, size)
                raise


# of the environment: what must be alike for a report to be resumed
SAME = ("torch", "nccl", "world_size", "local_world_size", "devices", "backend")


def strict_json(text: str) -> Any:
    return json.loads(text, parse_constant=refuse_constant)


def load(
    path: str,
    each: Callable[[Report, Case], None] = lambda report, case: None,
    parse: Callable[[str], Any] = strict_json,
) -> Report:
    """The report at `path`. Raises ValueError, naming the file and the line, if it is none.

    A last line without its end is the one that a crash cut short: it does not count. each: called
    with every case as soon as it is read, e.g. to drop samples of which only a median is needed.
    """
    report: Report | None = None
    cases: dict[str, Case] = {}
    number, line = 0, ""
    try:
        with open(path, encoding="utf-8") as file:
            for line in file:
                number += 1
                content = parse(line)
                expect(isinstance(content, dict), "the line", "an object", content)
                if report is None:
                    report = Report(**head(content), path=path)
                elif "status" in content:
                    report.status = content.pop("status")
                    report.finished_at = content.pop("finished_at", None)
                    report.end = content
                else:
                    case = Case(**content)
                    each(report, case)
                    name = json.dumps(case.key, sort_keys=True)
                    cases.pop(name, None)
                    cases[name] = case
                    report.status = "interrupted"  # of a report that was resumed, until its end
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    except (ValueError, TypeError, RecursionError) as error:
        if report is None or line.endswith("\n"):  # else it is the line that a crash cut short
            reason = str(error).replace("Case.__init__() ", "").replace("Report.__init__() ", "")
            at = f"{path}:{number}" if number else path
            raise ValueError(f"{at} is no line of a report: {reason}") from None
    if report is None:
        raise ValueError(f"{path} is empty; a report is what a script writes with --json PATH")
    report.cases = list(cases.values())
    return report


def head(content: dict[str, Any]) -> dict[str, Any]:
    """The first line's fields. Raises ValueError where it is of another format."""
    schema = content.get("schema")
    if schema != SCHEMA:
        newer = isinstance(schema, str) and schema.startswith("torchrun-bench/")
        hint = "; it is of another version of torchrun-bench" if newer else ""
        raise ValueError(f"schema is {schema!r}, this version reads {SCHEMA!r}{hint}")
    for name, kind in dict(benchmark=str, environment=dict, argv=list, started_at=str).items():
        expect(isinstance(content.get(name), kind), name, kind.__name__, content.get(name))
    return content


def are_seconds(row: list[Any]) -> bool:
    """Whether all are finite numbers from 0 on; by built-ins, since there may be millions."""
    if not row:
        return True
    numbers = set(map(type, row)) <= {int, float}
    return numbers and min(row) >= 0 and math.isfinite(sum(row))


def expect(condition: bool, at: str, expected: str, got: Any) -> None:
    if not condition:
        raise ValueError(f"{at}: expected {expected}, got {str(got)[:60]!r}")


def refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a number in JSON")


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
