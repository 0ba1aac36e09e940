"""The JSON report: build, write atomically after every case, load, validate, resume."""

import contextlib
import json
import os
import re
import shutil
import socket
import sys
import threading
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from common.process import start_time

SCHEMA = "torchrun-bench/1"
STATUSES = ("running", "complete", "interrupted", "failed")
# A report is resumed only where these agree: the rest (host names, ports, job ids) may change
# between two runs on the same kind of machine.
SAME_ENVIRONMENT = (
    "torch",
    "cuda",
    "nccl",
    "python",
    "world_size",
    "local_world_size",
    "num_nodes",
    "devices",
    "cpus",
    "threads_per_rank",
)

_LAUNCHER = os.getppid()  # of the run's first process, from which its parts are forked

Case = dict[str, Any]
# Further top-level keys, computed from the cases.
Extras = Callable[[list[Case]], dict[str, Any]]


def check_path(path: str, resume: bool) -> None:
    """Raise ValueError where a report could not be written, or where it would destroy a file.

    A report that is there already is resumed, or kept as PATH.bak. Any other file is refused.
    """
    target = Path(os.path.realpath(path))
    try:
        target.exists()
    except OSError as error:  # a name too long, say
        raise ValueError(f"--json {path} cannot be written: {error.strerror}") from None
    if target.is_dir():
        raise ValueError(f"--json {path} is a directory; give a file, e.g. {path}/report.json")
    if not target.parent.is_dir():
        raise ValueError(f"--json {path}: there is no directory {target.parent}; make it first")
    probe = _temporary(target)
    try:
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        raise ValueError(f"--json {path} cannot be written: {error.strerror}") from None
    if not target.exists():
        return
    if not target.is_file():
        raise ValueError(f"--json {path} is not a regular file; give one, e.g. report.json")
    if resume or target.stat().st_size == 0:
        return
    for old in (path, path + ".bak"):
        if os.path.exists(old):
            try:
                load(old)
            except ValueError as error:
                raise ValueError(f"--json would overwrite {error}; give another path") from None


def load(path: str) -> dict[str, Any]:
    """The report at `path`. Raises ValueError, naming the place, if it is not a valid one."""
    report: dict[str, Any] = check_document(read_json(path), path)
    return report


def read_json(path: str, max_bytes: int | None = None) -> Any:
    """The JSON document at `path`. Raises ValueError, naming the file, if it is none.

    max_bytes: refuse a longer file before it fills the memory.
    """
    try:
        with open(path, "rb") as file:
            content = file.read() if max_bytes is None else file.read(max_bytes + 1)
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
        raise ValueError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    if max_bytes is not None and len(content) > max_bytes:
        raise ValueError(f"{path}, which has more than {max_bytes} bytes")
    if not content.strip():
        raise ValueError(f"{path}, which is not JSON (it is empty)")
    try:
        return json.loads(content.decode("utf-8"), parse_constant=_refuse)
    except ValueError as error:  # bad JSON, bad UTF-8
        raise ValueError(f"{path}, which is not JSON ({error})") from None
    except RecursionError:
        raise ValueError(f"{path}, which is nested too deeply for a report") from None


def check_document(document: Any, path: str) -> dict[str, Any]:
    """The document as the report that it is; ValueError, naming the file, if it is none."""
    schema = document.get("schema") if isinstance(document, dict) else None
    newer = re.fullmatch(r"torchrun-bench/(\d{1,9})", schema) if isinstance(schema, str) else None
    if newer and int(newer[1]) > int(SCHEMA.rpartition("/")[2]):
        raise ValueError(
            f"{path}, which a newer version wrote: its schema is {schema}, this version reads "
            f"{SCHEMA}; update torchrun-bench, e.g. git pull"
        )
    try:
        validate(document)
    except ValueError as error:
        raise ValueError(f"{path}, which is not a torchrun-bench report: {error}") from None
    report: dict[str, Any] = document
    return report


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not a number in JSON")


def validate(document: Any) -> None:
    """Raise ValueError at the first place where a document departs from the schema."""
    _expect(isinstance(document, dict), "$", "an object", document)
    _expect(document.get("schema") == SCHEMA, "schema", f"'{SCHEMA}'", document.get("schema"))
    status = document.get("status")
    _expect(status in STATUSES, "status", f"one of {', '.join(STATUSES)}", status)
    for name, kind in {
        "benchmark": str,
        "argv": list,
        "started_at": str,
        "environment": dict,
        "cases": list,
    }.items():
        _expect(isinstance(document.get(name), kind), name, kind.__name__, document.get(name))
    for i, case in enumerate(document["cases"]):
        _validate_case(case, f"cases[{i}]")


def _validate_case(case: Any, at: str) -> None:
    _expect(isinstance(case, dict), at, "an object", case)
    for name, kind in {
        "key": dict,
        "ranks": list,
        "samples_s": list,
        "stop": dict,
        "metrics": dict,
        "check": str,
    }.items():
        _expect(isinstance(case.get(name), kind), f"{at}.{name}", kind.__name__, case.get(name))
    for rank in case["ranks"]:
        _expect(type(rank) is int and rank >= 0, f"{at}.ranks", "ranks", rank)
    rows = case["samples_s"]
    _expect(len(rows) in (0, len(case["ranks"])), f"{at}.samples_s", "a list a rank", len(rows))
    for row in rows:
        _expect(isinstance(row, list), f"{at}.samples_s", "lists", row)
        _expect(are_seconds(row), f"{at}.samples_s", "seconds", "something else")
        _expect(len(row) == len(rows[0]), f"{at}.samples_s", "lists of one length", len(row))
    check = case["check"]
    known = check == "passed" or check.startswith(("failed: ", "skipped: "))
    _expect(known, f"{at}.check", "passed, failed: ... or skipped: ...", check)


def are_seconds(row: list[Any]) -> bool:
    """Whether all are numbers from 0 on, and finite: by built-ins, for there may be millions."""
    if not row:
        return True
    numbers = set(map(type, row)) <= {int, float}
    # a NaN hides from min and max, unless it comes first, but not from the sum
    return numbers and min(row) >= 0 and max(row) < 1e9 and sum(row) >= 0


def _expect(condition: bool, at: str, expected: str, got: Any) -> None:
    if not condition:
        raise ValueError(f"at {at}: expected {expected}, got {str(got)[:80]!r}")


def same_key(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Whether two case keys name the same case."""
    return _name(a) == _name(b)


def _name(key: dict[str, Any]) -> str:
    return json.dumps(key, sort_keys=True)


class Report:
    """One run's report, on rank 0. Without a path it only keeps the cases.

    Every method may be called from any thread.
    """

    def __init__(
        self, path: str | None, benchmark: str, environment: dict[str, Any], extras: Extras
    ) -> None:
        self.path = path and os.path.realpath(path)
        self._shown_path = path
        self._extras = extras
        self._lock = threading.Lock()
        # each with its JSON, made once, by its key: a matrix of links has a case a round
        self._cases: dict[str, tuple[Case, str]] = {}
        self._unsaved = False
        self._head: dict[str, Any] = {
            "schema": SCHEMA,
            "benchmark": benchmark,
            "status": "running",
            "argv": sys.argv,
            "run_id": _run_id(),
            "started_at": _now(),
            "finished_at": None,
            "environment": environment,
        }
        self._environment = _text(environment)  # it grows with the ranks: made once

    @property
    def cases(self) -> list[Case]:
        with self._lock:
            return [case for case, _ in self._cases.values()]

    @property
    def finished(self) -> bool:
        return bool(self._head["status"] != "running")

    @property
    def saved(self) -> bool:
        """Whether the file holds all there is."""
        return not self._unsaved

    @property
    def environment(self) -> dict[str, Any]:
        environment: dict[str, Any] = self._head["environment"]
        return environment

    def open(self, resume: bool, restarted: bool = False) -> None:
        """Write the first version. With `resume`, take over the cases of the one that is there;
        when the launcher has restarted the workers, those that the same job has written.

        Raises ValueError when that one is damaged, of another benchmark, or of another
        environment. Without `resume` it is kept as PATH.bak.
        """
        if not self.path:
            return
        there = os.path.exists(self.path) and os.path.getsize(self.path) > 0
        if there and restarted and not resume:
            resume = load(self.path).get("run_id") == self._head["run_id"]
        if there and resume:
            self._take_over(load(self.path))
        elif there:
            shutil.copyfile(self.path, self.path + ".bak")
        self._write()

    def _take_over(self, old: dict[str, Any]) -> None:
        mine, theirs = self._head["environment"], old["environment"]
        if old["benchmark"] != self._head["benchmark"]:
            raise ValueError(
                f"--resume: {self._shown_path} is a report of {old['benchmark']}, "
                f"not of {self._head['benchmark']}; give another --json"
            )
        different = [name for name in SAME_ENVIRONMENT if mine.get(name) != theirs.get(name)]
        if different:
            name = different[0]
            raise ValueError(
                f"--resume: the environment differs from {self._shown_path}'s in "
                f"{', '.join(different)} ({name}: {theirs.get(name)} there, {mine.get(name)} "
                f"here); its numbers do not belong beside new ones, give another --json"
            )
        self._cases = {_name(case["key"]): (case, _text(case)) for case in old["cases"]}
        self._head["started_at"] = old["started_at"]

    def find(self, key: dict[str, Any]) -> Case | None:
        """The complete case of this key: one whose check has not failed."""
        case = self.find_any(key)
        return None if case is None or case["check"].startswith("failed") else case

    def find_any(self, key: dict[str, Any]) -> Case | None:
        """The case of this key, failed or not."""
        entry = self._cases.get(_name(key))
        return entry and entry[0]

    def add(self, case: Case, save: bool = True) -> None:
        """Add a case, in the place of an earlier failed attempt at it, and write the report."""
        _validate_case(case, "case")
        entry = (case, _text(case))
        with self._lock:
            self._cases.pop(_name(case["key"]), None)  # the new one comes last
            self._cases[_name(case["key"])] = entry
        if save:
            self._write()

    def finish(self, status: str, reason: str | None = None) -> bool:
        """Write the last version; False if it could not be written. A second call does nothing."""
        with self._lock:
            if self._head["status"] != "running":
                return not self._unsaved
            self._head["status"] = status
            self._head["finished_at"] = _now()
            if reason:
                self._head["reason"] = reason
        self._write()
        return not self._unsaved

    def _write(self) -> None:
        """Replace the file by a new version. On an error the previous version stays, intact."""
        if not self.path:
            return
        with self._lock:
            fields = self._head | self._extras([case for case, _ in self._cases.values()])
            texts = {name: _text(v) for name, v in fields.items() if name != "environment"}
            texts["environment"] = self._environment
            head = ",\n".join(f" {json.dumps(name)}: {texts[name]}" for name in fields)
            cases = ",\n  ".join(text for _, text in self._cases.values())
            try:
                replace_file(Path(self.path), f'{{\n{head},\n "cases": [\n  {cases}\n ]\n}}\n')
                self._unsaved = False
            except OSError as error:
                self._unsaved = True
                print(
                    f"error: cannot write {self._shown_path}: {error.strerror}; "
                    "its previous version is intact, and the next case tries again",
                    file=sys.stderr,
                    flush=True,
                )


def replace_file(path: Path, text: str) -> None:
    """Write `text` to `path` so that a crash leaves the old content or the new, never a mix."""
    temporary = _temporary(path)
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    with contextlib.suppress(OSError):  # not every file system can sync a directory
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def _text(value: Any) -> str:
    return json.dumps(value, allow_nan=False)


def _run_id() -> str | None:
    """Of this job, and the same after a restart by the launcher; None without one."""
    given = os.environ.get("TORCHELASTIC_RUN_ID", os.environ.get("SLURM_JOB_ID"))
    if given != "none":
        return given
    # torchrun's default is the same for all jobs; this job's agent is not
    return f"{socket.gethostname()}-{_LAUNCHER}-{start_time(_LAUNCHER)}"


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
