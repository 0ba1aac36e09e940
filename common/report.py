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
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

SCHEMA = "torchrun-bench/2"
# whose reports of version 2.0 do not say that their cases are not aligned
UNALIGNED = ("batch_update_ps", "rpc_latency")
# of the environment: what must be alike for a report to be resumed
SAME = ("torch", "nccl", "world_size", "local_world_size", "devices", "backend")


@dataclass
class Case:
    """One case. Raises ValueError, naming the field, for values that are none of this."""

    key: dict[str, Any]  # flat, JSON; the same key in two reports is the same case
    ranks: list[int]
    # [ranks][iterations], in seconds: of "step", which the case is about, and of each part
    samples_s: dict[str, list[list[float]]] = field(default_factory=dict)
    rounds: list[int] = field(default_factory=list)  # the iterations of each, alike for all steps
    stop: str = ""  # the rule that ended the timing
    metrics: dict[str, Any] = field(default_factory=dict)
    check: str = "passed"  # or `failed: why`, `skipped: why`
    aligned: bool = True  # False: the ranks did not wait for each other within an iteration

    @property
    def failed(self) -> bool:
        return self.check.startswith("failed")

    def __post_init__(self) -> None:
        kinds = dict(key=dict, ranks=list, samples_s=dict, rounds=list, metrics=dict, check=str)
        for name, kind in kinds.items():
            expect(isinstance(getattr(self, name), kind), name, kind.__name__, getattr(self, name))
        for step, rows in self.samples_s.items():
            name = f"samples_s.{step}"
            expect(len(rows) in (0, len(self.ranks)), name, "a list for each rank", rows)
            for row in rows:
                expect(are_seconds(row), name, "lists of seconds", row)
                expect(len(row) == len(rows[0]), name, "lists of one length", len(row))


@dataclass
class Report:
    """One run."""

    benchmark: str
    environment: dict[str, Any]
    path: str | None = None
    argv: list[str] = field(default_factory=lambda: list(sys.argv))
    started_at: str = field(default_factory=lambda: now())
    schema: str = SCHEMA
    status: str = "interrupted"  # while the last line is missing; then complete or failed
    finished_at: str | None = None
    end: dict[str, Any] = field(default_factory=dict)  # what else the last line says
    cases: list[Case] = field(default_factory=list)

    def start(self, resume: bool = False) -> None:
        """Write the first line; with `resume` take over the cases of the file that is there.

        Another file is moved to PATH.bak. Raises ValueError where it is no report, or, with
        `resume`, one of another benchmark or environment; OSError where it cannot be written.
        """
        path = Path(self.path or os.devnull)
        if path.is_file() and path.stat().st_size:
            try:
                old = load(str(path))
            except ValueError as error:
                raise ValueError(f"it would replace what is there: {error}") from None
            if resume:
                self.take_over(old, path)
                return
            path.replace(f"{path}.bak")
        names = ("schema", "benchmark", "argv", "started_at", "environment")
        self.append({name: getattr(self, name) for name in names})

    def take_over(self, old: "Report", path: Path) -> None:
        """Go on with an older report of the same benchmark on the same devices."""
        mine = self.environment | {"benchmark": self.benchmark}
        theirs = old.environment | {"benchmark": old.benchmark}
        for name in ("benchmark", *SAME):
            if mine.get(name) != theirs.get(name):
                raise ValueError(
                    f"{path} has {name} {theirs.get(name)}, this run {mine.get(name)}: "
                    "numbers that do not belong together; give another path"
                )
        self.cases = old.cases
        content = path.read_bytes()
        if not content.endswith(b"\n"):  # a line that a crash cut short
            os.truncate(path, content.rfind(b"\n") + 1)

    def add(self, case: Case) -> None:
        """Append a case. A later one of the same key replaces an earlier one."""
        self.cases = [old for old in self.cases if old.key != case.key] + [case]
        line = asdict(case)
        if case.aligned:  # as nearly always; version 2.0 does not know the field
            del line["aligned"]
        self.append(line)

    def finish(self, status: str, **end: Any) -> None:
        self.status, self.finished_at = status, now()
        self.append({"status": status, "finished_at": self.finished_at, **end})

    def find(self, key: dict[str, Any]) -> Case | None:
        """The case of this key, unless it failed."""
        return next((c for c in self.cases if c.key == key and not c.failed), None)

    def append(self, line: dict[str, Any]) -> None:
        """Write a line. Raises OSError, e.g. on a full disk; what is then cut short is no line."""
        if self.path:
            with open(self.path, "ab") as file:
                file.write(json.dumps(line, allow_nan=False).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())


def load(
    path: str,
    each: Callable[[Report, Case], None] = lambda report, case: None,
    parse: Callable[[str], Any] = json.loads,
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
                    if (schema := content.get("schema")) != SCHEMA:
                        other = "another version of torchrun-bench may have written it"
                        raise ValueError(f"schema is {schema!r}, not {SCHEMA!r}; {other}")
                    report = Report(**known(Report, content), path=path)
                elif "status" in content:
                    report.status = content.pop("status")
                    report.finished_at = content.pop("finished_at", None)
                    report.end = content
                else:
                    case = Case(
                        **{"aligned": report.benchmark not in UNALIGNED} | known(Case, content)
                    )
                    each(report, case)
                    name = json.dumps(case.key, sort_keys=True)
                    cases.pop(name, None)
                    cases[name] = case
                    report.status = "interrupted"  # of a report that was resumed, until its end
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except (ValueError, TypeError, RecursionError) as error:
        if report is None or line.endswith("\n"):  # else it is the line that a crash cut short
            raise ValueError(f"{path}:{number} is no line of a report: {error}") from None
    if report is None:
        raise ValueError(f"{path} is empty; a report is what a script writes with --json PATH")
    report.cases = list(cases.values())
    return report


def are_seconds(row: list[Any]) -> bool:
    """Whether all are finite numbers from 0 on; by built-ins, since there may be millions."""
    numbers = set(map(type, row)) <= {int, float}
    return numbers and min(row, default=0) >= 0 and math.isfinite(sum(row))


def not_json(metrics: dict[str, Any]) -> str | None:
    """Which metric cannot be written, or None."""
    for name, value in metrics.items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError):
            return f"metric '{name}' is not JSON: {str(value)[:60]!r}"
    return None


def expect(condition: bool, at: str, expected: str, got: Any) -> None:
    if not condition:
        raise ValueError(f"{at}: expected {expected}, got {str(got)[:60]!r}")


def known(kind: type, content: dict[str, Any]) -> dict[str, Any]:
    """The entries that are fields of a dataclass; a later version may have written others."""
    names = {each.name for each in fields(kind)}
    return {name: value for name, value in content.items() if name in names}


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
