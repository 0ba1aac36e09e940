"""The report that `--json PATH` writes: JSON lines. docs/report.md describes the format.

The first line describes the run, followed by one line per case. The last line holds the status of
the run. Each line is synced to disk as soon as its case has been measured, so a crash or a full
disk loses only the case in flight.
"""

import errno
import fcntl
import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import chain, count
from pathlib import Path
from typing import IO, Any

from common.stats import Estimate
from harness.cli import cut
from harness.contents import differing
from harness.files import check_regular

SCHEMA = "torchrun-bench/3"
UNCHECKED = "skipped: -c 0"  # Case.check if the user turned checks off
HEADER = ("schema", "benchmark", "argv", "started_at", "environment")  # the first line
# A report can be resumed only if these entries of the environment and of each rank are unchanged,
# the hashes of the source files, and the variables but for those that differ from job to job
# (OF_A_JOB) or name a folder (OF_A_PLACE). The version says less: it may be `-dirty`.
SAME = (
    *("torch", "torchvision", "cuda", "nccl", "python"),
    *("backend", "world_size", "local_world_size", "devices"),
)
SAME_OF_RANKS = ("device", "cores", "threads")
OF_A_JOB = ("SLURM_JOB_", "TORCHELASTIC_", "CUDA_VISIBLE_DEVICES")
OF_A_PLACE = ("_DIR", "_DIRECTORY")  # such as caches, which often have a folder per job
# Prefixes of the variables that can affect a measurement: --resume and ab.py compare them between
# runs, and a run between its ranks.
FAMILIES = (
    *("NCCL_", "NVSHMEM_", "GLOO_", "UCX_", "FI_", "TP_", "TORCH", "PYTORCH_", "TRITON_"),
    *("CUDA_", "CUBLAS_", "CUDNN_", "NVIDIA_TF32", "ATEN_CPU_", "DNNL_", "ONEDNN_"),
    *("RCCL_", "HSA_", "HIP_", "MLX5_", "LD_", "PYTHON"),
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_"),
    *("MALLOC_", "TCMALLOC_", "GLIBC_TUNABLES"),
)
OTHER_FILE = "is not, or no longer, the file that earlier rows were measured with"
DISK_FAILED = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # errors of the disk, not of use
# In the names of variables with secrets; TOKENIZERS_PARALLELISM has none
SECRET = re.compile(
    "TOK(?!ENIZ)|KEY|SECRET|PASS|PWD|AUTH|BEARER|CRED|COOKIE|JWT|(?<![A-Z])(PW|SIG|SAS)(?![A-Z])"
)
SECRET_PARTS = (  # of values: users and queries of URLs, and what follows these words
    (re.compile(r"://([^/\s]+|[^/\s:]+:\S+)@"), "://(set)@"),
    (re.compile(r"(://[^\s?]*\?)\S+"), r"\1(set)"),
    (re.compile(r"(?i)\b(bearer|basic)[ =:]+\S+"), r"\1 (set)"),
)
# A part of a value that looks random: no setting has such a word
RANDOM = re.compile(r"(?=[A-Za-z+=]*\d)(?=[\d+=]*[A-Za-z])[A-Za-z\d+=]{20,}")


def as_estimate(content: dict[str, Any]) -> Any:
    """Return the Estimate that a JSON object stands for; any other object as it is."""
    return Estimate(**content) if content.keys() == {"value", "low", "high"} else content


@dataclass(kw_only=True)
class Case:
    """One case of a benchmark: its key, its samples and its metrics."""

    key: dict[str, Any]  # flat, JSON; equal keys in two reports identify the same case
    name: str = ""  # of its row, unique within a table
    table: str = ""  # title of its table
    ranks: list[int]
    # Seconds of "step", which is what the case measures, and of each part: [ranks][iterations].
    samples_s: dict[str, list[list[float]]] = field(default_factory=dict)
    rounds: list[int] = field(default_factory=list)  # iterations per round, for every step
    stop: str = ""  # the rule that ended the timing
    metrics: dict[str, Any] = field(default_factory=dict)
    check: str = "passed"  # or `failed: why`, or `skipped: why` if it was measured but not checked
    aligned: bool = True  # False if the ranks do not wait for each other within an iteration
    bounded: bool = False  # True if samples_s was reduced to the samples of the slowest rank
    # The start of the run that measured it (see --resume), and its hosts, which are written if they
    # are not those of the first line. Set by Report.add and `load`.
    measured_at: str = ""
    hosts: list[str] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        """Whether it could not be measured or its results were wrong. Then it has no metrics."""
        return self.check.startswith("failed")

    @property
    def measured(self) -> str:
        """When and where it was measured: `2026-11-28 03:12 UTC on node1`."""
        place = f" on {shown(cut(self.hosts, 2))}" if self.hosts else ""
        return f"{shown(self.measured_at)[:16].replace('T', ' ')} UTC{place}"


@dataclass
class Report:
    """One run of a benchmark, and the file that it is written to."""

    benchmark: str
    environment: dict[str, Any]
    path: str | None = None  # `-` for stdout, which `files` then contains from the start
    argv: list[str] = field(default_factory=lambda: list(sys.argv))
    started_at: str = field(default_factory=lambda: now())
    schema: str = SCHEMA
    status: str = "interrupted"  # until the last line is written: then complete or failed
    end: dict[str, Any] = field(default_factory=dict)  # the other entries of the last line
    # Last line of each run that measured cases, by the start of the run. A run that was interrupted
    # has none.
    ends: dict[str, dict[str, Any]] = field(default_factory=dict)
    cases: list[Case] = field(default_factory=list)
    late: dict[str, str] = field(default_factory=dict)  # `contents` that the first line lacks
    own: dict[str, str] = field(default_factory=dict)  # `contents` of this run
    first_hosts: list[str] | None = None  # of the first line, if this run resumed the report
    files: list[IO[bytes]] = field(default_factory=list)  # open files; the last one is written to

    def start(self, resume: bool = False) -> str | None:
        """Write the first line, or resume the report. Otherwise move an existing one to PATH.bak,
        PATH.bak.1, ..., and return that path. Raises ValueError if the file is not a report, is
        being written, or does not belong to this run; OSError if it cannot be written, and then an
        existing report stays in place."""
        if not self.path:
            return None
        path, backup = os.path.realpath(self.path), None  # a symbolic link stays a link
        if self.path != "-":
            self.files.append(open_alone(self.path))
            if os.path.getsize(path):
                try:
                    old = load(self.path)
                except ValueError as error:
                    raise ValueError(f"will not overwrite the file: {error}") from None
                if resume:
                    self.resume_from(old)
                    return None
                backup = unused(f"{path}.bak")
                os.rename(path, backup)
        try:
            if backup:
                self.files.append(open_alone(path))
            header = {name: getattr(self, name) for name in HEADER}
            self.append(header, "nothing was measured, and an existing report is unchanged")
        except OSError:
            if backup:
                os.replace(backup, path)
            elif self.path != "-":
                self.files[-1].truncate(0)
            raise
        return backup

    def resume_from(self, old: "Report") -> None:
        """Continue a report. Raises ValueError if the runs do not belong together."""
        if changed := old.end.get("changed"):
            raise ValueError(f"{self.path}: {shown(changed)} {OTHER_FILE}; give another path")
        if mismatch := why_incomparable(old, self):
            raise ValueError(
                f"{self.path} has {mismatch}: the results are not comparable; give another path"
            )
        self.cases, self.first_hosts = old.cases, old.environment.get("hosts") or []
        self.own, self.late = self.contents, old.late
        self.environment["contents"] = old.environment.get("contents") or {}
        content = Path(self.path or "").read_bytes()
        self.files[-1].truncate(content.rfind(b"\n") + 1)  # drop a line that a crash cut short

    @property
    def contents(self) -> dict[str, str]:
        """The hashes of the modules that the report's runs have imported, by name."""
        return {**self.late, **(self.environment.get("contents") or {})}

    def new_contents(self, now: Mapping[str, str]) -> dict[str, Any]:
        """Return the entry `contents` of a line: the modules, of those that are loaded now, that no
        earlier line has. {} without any."""
        new = {name: digest for name, digest in now.items() if name not in self.contents}
        self.late |= new
        return {"contents": new} if new else {}

    def is_earlier(self, case: Case) -> bool:
        """Return whether a case was measured before this run resumed the report."""
        return bool(case.measured_at) and case.measured_at != self.started_at

    def add(self, case: Case, imported: Mapping[str, str] | None = None) -> None:
        """Append a case. It replaces an earlier case with the same key. imported: hashes of the
        modules that this run has imported since `start`. Raises OSError, and ValueError if they are
        not the files that an earlier run imported."""
        now = {**self.own, **(imported or {})}
        if other := [name for name in differing(self.contents, now) if name not in self.own]:
            raise ValueError(f"{self.path}: {cut(other)} {OTHER_FILE}; give another path")
        self.own |= now
        case.measured_at, case.hosts = self.started_at, self.environment.get("hosts") or []
        self.cases = [old for old in self.cases if old.key != case.key] + [case]
        line = dict(vars(case))  # not asdict, which would copy every sample
        if self.first_hosts in (None, case.hosts):
            del line["hosts"]
        line |= self.new_contents(now)
        self.append(line, "the cases before this one are intact")

    def finish(self, status: str, **end: Any) -> None:
        """Append the last line. Raises OSError."""
        self.status = status
        line = {"status": status, "finished_at": now(), **end}
        self.append(line, "all cases are intact")

    def find(self, key: dict[str, Any]) -> Case | None:
        """Return the case with this key, unless it failed."""
        return next((c for c in self.cases if c.key == key and not c.failed), None)

    def append(self, line: dict[str, Any], left: str) -> None:
        """Write a line and sync it to disk. Readers skip a line that was cut short. Raises OSError.
        left: the state of the report without the line, for its message."""
        if not self.path:
            return
        file = self.files[-1]
        content = json.dumps(line, allow_nan=False, default=vars).encode() + b"\n"
        try:
            while content:
                content = content[file.write(content) :]  # a full disk may accept only a part
            if self.path == "-":
                file.flush()
            else:
                os.fsync(file.fileno())
        except OSError as error:
            raise OSError(error.errno, f"{error.strerror}; {left}", self.path) from None


def identity(environment: dict[str, Any]) -> dict[str, Any]:
    """Return what must be equal for two runs to be comparable: name in messages -> value."""
    same = {name: environment.get(name) for name in SAME}
    for row in environment.get("ranks") or ():
        for name in SAME_OF_RANKS:
            same[f"{name} (rank {row.get('rank')})"] = row.get(name)
    for name, value in (environment.get("variables") or {}).items():
        if not name.startswith(OF_A_JOB) and not name.endswith(OF_A_PLACE):
            same[name] = value
    others = environment.get("other_variables") or ()
    for row in others:
        for name, value in row["variables"].items():
            same[f"{name} (rank {row['ranks'][0]})"] = value
    if others:
        same["ranks with other variables"] = [rank for row in others for rank in row["ranks"]]
    return same


def why_incomparable(before: Report, now: Report) -> str:
    """Return the first differences that keep the cases of two runs out of one report: `torch 2.14,
    this run 2.15; ...`; "" if there are none."""
    old = {"benchmark": before.benchmark} | identity(before.environment)
    new = {"benchmark": now.benchmark} | identity(now.environment)
    names = [name for name in old | new if old.get(name) != new.get(name)]
    parts = [f"{name} {shown(old.get(name))}, this run {shown(new.get(name))}" for name in names]
    if modules := differing(before.contents, now.contents):
        parts.append(f"other contents of {cut(modules, 3)}")
    return "; ".join(parts[:3] + [f"and {len(parts) - 3} more"] * (len(parts) > 3))


def shown(value: Any) -> str:
    """Return a value of the environment as printable text of at most 300 characters."""
    if isinstance(value, list):
        value = ", ".join(map(str, value))
    text = "unset" if value is None else str(value)[:300]
    return text if text.isprintable() else ascii(text)  # a report may contain terminal codes


def without_secrets(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with `(set)` for secrets, by their names, and for parts of values that
    may be secrets, by their form."""
    told = {}
    for name, value in variables.items():
        for part, instead in SECRET_PARTS:
            value = part.sub(instead, value)
        value = RANDOM.sub(lambda match: masked(match[0]), value)
        told[name] = "(set)" if SECRET.search(name.upper()) else value
    return told


def masked(value: str) -> str:
    """Return a text that nearly always changes with a value, but from which it cannot be found."""
    return f"(set, {hashlib.sha256(value.encode(errors='surrogateescape')).hexdigest()[:3]})"


def open_alone(path: str) -> IO[bytes]:
    """Open a regular file for appending and lock it against other runs, until the process ends.
    Raises ValueError if it is not regular or locked, OSError if it cannot be opened."""
    check_regular(path)
    # unbuffered, so that nothing is left to be written when the process exits
    file = open(path, "ab", buffering=0)  # noqa: SIM115 (stays open to keep the lock)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(f"another run is writing {path}; give another path") from None
    except OSError:  # the file system does not support locks
        pass
    return file


def unused(path: str) -> str:
    """Return the first of PATH, PATH.1, PATH.2, ... that does not exist."""
    names = chain([path], (f"{path}.{number}" for number in count(1)))
    return next(name for name in names if not os.path.lexists(name))


def load(
    path: str,
    each: Callable[[Report, Case], None] = lambda report, case: None,
    lines: Iterable[bytes] | None = None,
) -> Report:
    """Read the report at `path`. A later case replaces an earlier one with the same key, and a last
    line without a newline, which a crash cut short, is ignored. each: called with every case as
    soon as it is read. lines: of an open file. Raises ValueError with the file and the line."""
    report: Report | None = None
    cases: dict[str, Case] = {}  # by key, as text
    number, measured_at = 0, ""
    try:
        with open(path, "rb") if lines is None else nullcontext(lines) as file:
            for line in file:
                number += 1
                if not line.endswith(b"\n"):
                    break
                if line.isspace():
                    continue
                content = json.loads(line.decode(), object_hook=as_estimate)
                if report is None:
                    if (schema := content.get("schema")) != SCHEMA:
                        raise ValueError(f"expected schema {SCHEMA}, got {shown(schema)[:60]}")
                    header = {name: content[name] for name in HEADER if name in content}
                    # without them, Report would have those of the program that reads
                    report = Report(**{"argv": [], "started_at": ""} | header, path=path)
                elif "schema" in content:
                    raise ValueError("another report starts here; each report needs its own file")
                elif "status" in content:
                    report.ends.setdefault(measured_at or report.started_at, {**content})
                    report.status = content.pop("status")
                    content.pop("finished_at", None)
                    report.late |= content.pop("contents", {})
                    report.end = content
                else:
                    report.status = "interrupted"  # until a last line follows
                    report.late |= content.pop("contents", {})
                    case = Case(**content)
                    case.measured_at = measured_at = case.measured_at or report.started_at
                    case.hosts = case.hosts or report.environment.get("hosts") or []
                    each(report, case)
                    name = json.dumps(case.key, sort_keys=True)
                    cases.pop(name, None)
                    cases[name] = case
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path}:{number} is not a line of a report: {error}") from None
    if report is None:
        raise ValueError(
            f"{path} is not a complete report; expected a file written by a script with --json PATH"
        )
    report.cases = list(cases.values())
    return report


def not_json(metrics: dict[str, Any]) -> str | None:
    """Return a message about the first metric that JSON cannot represent; None if none."""
    for name, value in metrics.items():
        try:
            json.dumps(value, allow_nan=False, default=vars)
        except (TypeError, ValueError):
            return f"metric '{name}' cannot be written as JSON: {str(value)[:60]!r}"
    return None


def now() -> str:
    """Return the current time in UTC, in ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")
