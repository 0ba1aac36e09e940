"""The report that `--json PATH` writes: JSON lines. docs/measuring.md describes the format.

The first line describes the run. Then comes a line for each case, and the last line says how the
run ended. A line is appended and synced as soon as its case is measured, so a crash or a full disk
loses the case in flight and nothing else. This file needs the standard library only: benchmarks/
writes reports, analysis/ reads them.
"""

import errno
import fcntl
import hashlib
import json
import math
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

SCHEMA = "torchrun-bench/3"
UNCHECKED = "skipped: -c 0"  # the check of a case whose values nobody wanted to be checked
HEADER = ("schema", "benchmark", "argv", "started_at", "environment")  # the first line
# A report is resumed only if these entries of the environment are the same as before, these of each
# rank, the contents of the files, and the user's variables except those of a job and of a place.
# The version is not among them: two checkouts that are both `-dirty` may differ.
SAME = (
    *("torch", "torchvision", "cuda", "nccl", "python"),
    *("backend", "world_size", "local_world_size", "devices"),
)
SAME_OF_RANKS = ("device", "cores", "threads")
OF_A_JOB = ("SLURM_JOB_", "TORCHELASTIC_", "CUDA_VISIBLE_DEVICES")
OF_A_PLACE = ("_DIR", "_DIRECTORY")  # such as caches: often a folder of the job's own
# Variables that change what is measured begin with one of these.
FAMILIES = (
    *("NCCL_", "NVSHMEM_", "GLOO_", "UCX_", "FI_", "TP_", "TORCH", "PYTORCH_", "TRITON_"),
    *("CUDA_", "CUBLAS_", "CUDNN_", "NVIDIA_TF32", "ATEN_CPU_", "DNNL_", "ONEDNN_"),
    *("RCCL_", "HSA_", "HIP_", "MLX5_", "LD_", "PYTHON"),
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "MALLOC_", "GLIBC_TUNABLES"),
)
DISK_FAILED = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # a mistake of nobody's
SECRETS = ("TOKEN", "KEY", "SECRET", "PASS", "AUTH", "CRED")  # in the name of a variable
ROUNDS = 10_000  # of PBKDF2: trying out a word list takes that much longer
NOT_MEASURABLE = "nothing measurable (no interval)"
UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}  # of a time, in seconds


@dataclass(frozen=True)
class Estimate:
    """A number with the ends of its 95 % interval.

    low, high: None for too few samples, or for samples that drift. In a report it is an object with
    these three entries.
    """

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def relative(self) -> float | None:
        """How far the interval reaches from the value, over the value; None without interval."""
        if self.low is None or self.high is None:
            return None
        return max(self.high - self.value, self.value - self.low) / max(abs(self.value), 1e-12)

    def may_be(self, value: float) -> bool:
        """Whether the interval holds the value; without an interval any value may be true."""
        return self.low is None or self.high is None or self.low <= value <= self.high

    def above(self, bound: float) -> bool:
        """Whether the whole interval lies above the bound; False without an interval."""
        return self.low is not None and self.low > bound

    def overlaps(self, other: "Estimate") -> bool:
        """Whether the intervals have a value in common; so may numbers without an interval."""
        if self.low is None or self.high is None or other.low is None or other.high is None:
            return True
        return self.low <= other.high and other.low <= self.high

    def __truediv__(self, other: "Estimate | float") -> "Estimate":
        """This number / a positive one. The interval is made of the ends of both intervals: it
        holds if both of them do."""
        if not isinstance(other, Estimate):
            other = Estimate(other, other, other)
        value = self.value / other.value
        if self.low is None or self.high is None or not other.low or not other.high:
            return Estimate(value)
        ends = [
            end / divisor for end in (self.low, self.high) for divisor in (other.low, other.high)
        ]
        return Estimate(value, min(ends), max(ends))

    def __rtruediv__(self, amount: float) -> "Estimate":
        """A rate: an amount / a positive time."""
        return Estimate(amount, amount, amount) / self

    def __mul__(self, factor: float) -> "Estimate":
        """This number times a positive one."""
        if self.low is None or self.high is None:
            return Estimate(self.value * factor)
        return Estimate(self.value * factor, self.low * factor, self.high * factor)

    def __rsub__(self, whole: float) -> "Estimate":
        """`1 - overlap`, for instance."""
        if self.low is None or self.high is None:
            return Estimate(whole - self.value)
        return Estimate(whole - self.value, whole - self.high, whole - self.low)

    def text(self, unit: str = "", scale: float = 1, digits: int | None = None) -> str:
        """`1.24 GB/s (1.10 to 1.39)`, times `scale`. digits: after the point."""
        digits = digits_of(self.value * scale) if digits is None else digits
        words = [f"{self.value * scale:,.{digits}f}", unit]
        if self.low is None or self.high is None:
            words.append("(no interval)")
        else:
            words.append(f"({self.low * scale:,.{digits}f} to {self.high * scale:,.{digits}f})")
        return " ".join(word for word in words if word)

    def times(self, most: float = math.inf) -> str:
        """`1.24 times (1.10 to 1.39)`; `up to 2 times (1.70 at least)` where the interval reaches
        beyond the most that can be. With more digits if it would seem to hold 1 and does not."""
        if self.low is None or self.high is None:
            return self.text("times", digits=2)
        if self.high > most:
            return f"up to {most:g} times ({self.low:.2f} at least)"
        digits = 2
        while digits < 5 and not self.may_be(1):
            if 1 not in (round(self.low, digits), round(self.high, digits)):
                break
            digits += 1
        return self.text("times", digits=digits)

    def __str__(self) -> str:
        """Of seconds: `76.1 ms (70.2 to 80.0)`"""
        unit = unit_of(self.value)
        return self.text(unit, 1 / UNITS[unit])

    def beside(self, whole: float) -> str:
        """`16.2 ms (11.3 to 22.0)`: seconds in the unit and with the digits of a time that stands
        beside them; `nothing measurable (-1.0 to 2.0 ms)` if they are not certainly above 0."""
        unit = unit_of(whole)
        digits = digits_of(whole / UNITS[unit])
        if self.low is None or self.high is None:
            measurable = self.value > 0
            return self.text(unit, 1 / UNITS[unit], digits) if measurable else NOT_MEASURABLE
        if self.low > 0:
            return self.text(unit, 1 / UNITS[unit], digits)
        low, high = (f"{end / UNITS[unit]:,.{digits}f}" for end in (self.low, self.high))
        return f"nothing measurable ({low} to {high} {unit})"


def digits_of(value: float) -> int:
    """Digits after the point, so that three count: 124, 12.4, 1.24, 0.124."""
    digits = 0
    while digits < 5 and abs(value) < 10 ** (2 - digits):
        digits += 1
    return digits


def unit_of(seconds: float) -> str:
    """The largest unit of which there is at least one."""
    return next((unit for unit, length in UNITS.items() if abs(seconds) >= length), "us")


def show_seconds(seconds: float) -> str:
    """`76.1 ms`"""
    unit = unit_of(seconds)
    scaled = seconds / UNITS[unit]
    return f"{scaled:.{digits_of(scaled)}f} {unit}"


def with_estimates(content: Any) -> Any:
    """What JSON has of metrics: an object that was an Estimate becomes one again, at any depth."""
    if isinstance(content, list):
        return [with_estimates(entry) for entry in content]
    if not isinstance(content, dict):
        return content
    if content.keys() == {"value", "low", "high"}:
        return Estimate(**content)
    return {name: with_estimates(entry) for name, entry in content.items()}


@dataclass(kw_only=True)
class Case:
    """One case."""

    key: dict[str, Any]  # flat, JSON; the same key in two reports is the same case
    name: str = ""  # of its row; no two cases of a table share one
    table: str = ""  # the title of its table
    ranks: list[int]
    # The seconds of "step", which the case is about, and of each part: [ranks][iterations].
    samples_s: dict[str, list[list[float]]] = field(default_factory=dict)
    rounds: list[int] = field(default_factory=list)  # iterations of each round, for every step
    stop: str = ""  # the rule that ended the timing
    metrics: dict[str, Any] = field(default_factory=dict)
    check: str = "passed"  # or `failed: why`; `skipped: why` if it was measured, but not checked
    aligned: bool = True  # False: the ranks did not wait for each other within an iteration
    bounded: bool = False  # True: too many samples; samples_s has those of the slowest rank alone
    # Not written: which part of the report has the case, counted by its lines `resumed_at`. None
    # for a row that is no case of a report.
    part: int | None = None

    @property
    def failed(self) -> bool:
        return self.check.startswith("failed")


@dataclass
class Report:
    """One run."""

    benchmark: str
    environment: dict[str, Any]
    path: str | None = None  # `-` for stdout: then `files` has it from the start
    argv: list[str] = field(default_factory=lambda: list(sys.argv))
    started_at: str = field(default_factory=lambda: now())
    schema: str = SCHEMA
    status: str = "interrupted"  # while the last line is missing; then complete or failed
    finished_at: str | None = None
    end: dict[str, Any] = field(default_factory=dict)  # the other entries of the last line
    cases: list[Case] = field(default_factory=list)
    # The lines before the cases of each later part: resumed_at, hosts, argv, cases_before
    resumed: list[dict[str, Any]] = field(default_factory=list)
    part: int = 0  # the number of the part that is being written
    taken_over: "Report | None" = None  # the report as it was before this run resumed it
    remarks: list[str] = field(default_factory=list)  # what a user must know of a resumed report
    files: list[IO[bytes]] = field(default_factory=list)  # the last one is written
    size: int = 0  # of the file after the last line that was written, in bytes

    def start(self, resume: bool = False) -> str | None:
        """Write the first line, or go on with the report that exists already.

        The run goes on with it if `resume` is set. Otherwise it is moved to PATH.bak, PATH.bak.1,
        ..., and the new name is returned. Raises ValueError if the file is no report or a damaged
        one, if another run is writing it, or if it must be resumed but is about another benchmark
        or environment. Raises OSError if it cannot be written.
        """
        if not self.path:
            return None
        if self.path != "-":
            self.files.append(open_alone(self.path))
            path = os.path.realpath(self.path)  # a link stays a link
            if os.path.getsize(path):
                try:
                    old = load(self.path)
                except ValueError as error:
                    raise ValueError(f"it would replace what is there: {error}") from None
                if resume:
                    self.take_over(old)
                    return None
                return self.replace(path)
        self.append_header()
        return None

    def replace(self, path: str) -> str:
        """Move the report that is there. Its new name; its old one where this one cannot begin."""
        backup = unused(f"{path}.bak")
        os.rename(path, backup)
        try:
            self.files.append(open_alone(path))
            self.append_header()
        except OSError:
            os.replace(backup, path)
            raise
        return backup

    def append_header(self) -> None:
        """Where there is no room for the first line, the file stays empty."""
        try:
            header = {name: getattr(self, name) for name in HEADER}
            self.append(header, "nothing was measured, and what was there stays")
        except OSError:
            if self.path != "-":
                self.files[-1].truncate(0)
            raise

    def take_over(self, old: "Report") -> None:
        """Go on with an older report of the same benchmark in the same environment.

        A line with the time, the hosts and the arguments is written before the first new case.
        """
        if damage := next(filter(None, map(damage_of, old.cases)), None):
            raise ValueError(f"{self.path} is damaged: {damage}; give another path")
        try:
            before = {"benchmark": old.benchmark} | identity(old.environment)
        except (AttributeError, LookupError, TypeError) as error:
            what = f"{self.path} is damaged: its first line has no valid environment"
            raise ValueError(f"{what} ({error}); give another path") from None
        differing = differences(before, {"benchmark": self.benchmark} | identity(self.environment))
        if differing:
            raise ValueError(
                f"{self.path} has {differing}: numbers that do not belong together; "
                "give another path"
            )
        self.cases, self.resumed = old.cases, old.resumed
        self.part, self.taken_over = len(old.resumed) + 1, old
        content = Path(self.path or "").read_bytes()
        self.files[-1].truncate(content.rfind(b"\n") + 1)  # without what `load` left out
        hosts = self.environment.get("hosts")
        for part in range(self.part):
            count = sum(case.part == part for case in old.cases)
            if not count:
                continue
            noun = "case was" if count == 1 else "cases were"
            argv, hosts_then = old.part_entry(part, "argv"), old.part_entry(part, "hosts")
            told = f"{count} {noun} measured earlier, {old.when_and_where(part)}"
            if hosts_then != hosts:
                told += f", not on {shown(hosts)}"
            if arguments_of(argv) != arguments_of(self.argv):
                told += f", by {shown(shlex.join(map(str, argv or ())))}"
            self.remarks.append(told)

    def part_entry(self, part: int, name: str) -> Any:
        """What the first line of a part says: its hosts, its argv, or when it began (`at`)."""
        if part:
            line = self.resumed[part - 1]
            return line.get("resumed_at" if name == "at" else name)
        first = self.taken_over or self
        if name == "hosts":
            return first.environment.get("hosts")
        return first.started_at if name == "at" else getattr(first, name)

    def when_and_where(self, part: int | None) -> str:
        """`2026-11-28 03:12 UTC on node1`: when a part of the report began, and its hosts."""
        part = part or 0
        hosts = [str(host) for host in self.part_entry(part, "hosts") or ()]
        more = f" and {len(hosts) - 2:,} more" if len(hosts) > 2 else ""
        place = f" on {shown(hosts[:2])}{more}" if hosts else ""
        return f"{shown(self.part_entry(part, 'at'))[:16].replace('T', ' ')} UTC{place}"

    def is_earlier(self, case: Case) -> bool:
        """Whether a case was measured before this run resumed the report."""
        return case.part is not None and case.part < self.part

    def add(self, case: Case) -> None:
        """Append a case. A later one of the same key replaces an earlier one."""
        if len(self.resumed) < self.part:  # the first case of this part
            line = {"resumed_at": now(), "hosts": self.environment.get("hosts"), "argv": self.argv}
            line["cases_before"] = len(self.cases)
            self.resumed.append(line)
            self.append(line, "it holds the cases of before")
        case.part = self.part
        self.cases = [old for old in self.cases if old.key != case.key] + [case]
        line = dict(vars(case))  # not asdict: it would copy each of the samples
        del line["part"]
        if case.aligned:  # nearly always
            del line["aligned"]
        if not case.bounded:
            del line["bounded"]
        self.append(line, "it holds the cases before this one")

    def finish(self, status: str, **end: Any) -> None:
        self.status, self.finished_at = status, now()
        line = {"status": status, "finished_at": self.finished_at, **end}
        self.append(line, "every case is in it")

    def lost(self) -> str | None:
        """Why the file at `path` is not what this run has written; None if it is.

        Another program may remove, replace or shorten it meanwhile. Editors and rsync replace it.
        """
        if self.path in (None, "-") or not self.files:
            return None
        written = os.fstat(self.files[-1].fileno())
        try:
            found = os.stat(str(self.path))
        except OSError as error:
            return f"{error.strerror}: it was removed while this run was writing it"
        if not os.path.samestat(found, written):
            return "another file replaced it while this run was writing it"
        if found.st_size < self.size:
            return "another program has shortened it while this run was writing it"
        return None

    def find(self, key: dict[str, Any]) -> Case | None:
        """The case of this key, unless it failed."""
        return next((c for c in self.cases if c.key == key and not c.failed), None)

    def append(self, line: dict[str, Any], left: str) -> None:
        """Write a line until it is on the disk. Raises OSError, e.g. on a full disk; readers skip a
        line cut short. left: what the report holds then, as words for the error."""
        if not self.path:
            return
        file = self.files[-1]
        content = json.dumps(line, allow_nan=False, default=vars).encode() + b"\n"
        try:
            while content:
                content = content[file.write(content) :]  # a disk that is full takes a part
            if self.path == "-":
                file.flush()
            else:
                os.fsync(file.fileno())
                self.size = os.fstat(file.fileno()).st_size
        except OSError as error:
            raise OSError(error.errno, f"{error.strerror}; {left}", self.path) from None


def identity(environment: dict[str, Any]) -> dict[str, Any]:
    """What must be the same for numbers to belong together, by its name in a message."""
    same = {name: environment.get(name) for name in SAME}
    for row in environment.get("ranks") or ():
        for name in SAME_OF_RANKS:
            same[f"{name} (rank {row.get('rank')})"] = row.get(name)
    for part, digest in (environment.get("contents") or {}).items():
        same[f"contents of {part}"] = digest
    for name, value in (environment.get("variables") or {}).items():
        if not name.startswith(OF_A_JOB) and not name.endswith(OF_A_PLACE):
            same[name] = value
    for row in environment.get("other_variables") or ():
        for name, value in row["variables"].items():
            same[f"{name} (rank {row['ranks'][0]})"] = value
    return same


def arguments_of(argv: Any) -> list[str]:
    """The arguments of a command line, without those that every resumed run may change."""
    words = [str(word) for word in argv or ()][1:]
    return [word for word in words if word != "--resume"]


def differences(before: dict[str, Any], now: dict[str, Any]) -> str:
    """`torch 2.14, this run 2.15; ...`; "" where all is the same. The first three are named."""
    names = [name for name in before | now if before.get(name) != now.get(name)]
    parts = [f"{n} {shown(before.get(n))}, this run {shown(now.get(n))}" for n in names[:3]]
    if len(names) > 3:
        parts.append(f"and {len(names) - 3} more")
    return "; ".join(parts)


def damage_of(case: Case) -> str | None:
    """What is wrong with a case of a report that is to be resumed; None if nothing is.

    Rows and answers are made of its numbers. Only an edited file has such damage: what a crash
    leaves is not a whole line.
    """

    def is_number(value: Any) -> bool:
        try:
            return isinstance(value, (int, float)) and math.isfinite(value)
        except OverflowError:  # an integer of hundreds of digits
            return False

    def is_valid(metric: Any) -> bool:
        if isinstance(metric, Estimate):
            ends = [end for end in (metric.low, metric.high) if end is not None]
            return all(map(is_number, [metric.value, *ends]))
        if isinstance(metric, (list, dict)):
            return all(map(is_valid, metric.values() if isinstance(metric, dict) else metric))
        return metric is None or isinstance(metric, str) or is_number(metric)

    kinds = {"key": dict, "ranks": list, "metrics": dict, "samples_s": dict, "check": str}
    for name, kind in {**kinds, "name": str, "rounds": list}.items():
        if not isinstance(getattr(case, name), kind):
            return f"'{name}' of a case is {shown(getattr(case, name))[:60]}"
    named = f"case {shown(case.name)[:60]!r}"
    for name, metric in case.metrics.items():
        if not is_valid(metric):
            return f"metric '{shown(name)[:60]}' of {named} is {metric!r:.60}"
    if not all(map(is_number, case.ranks)):
        return f"'ranks' of {named} are {shown(case.ranks)[:60]}"
    for name, rows in case.samples_s.items():
        try:
            sound = all(is_number(value) for row in rows for value in row)
        except TypeError:
            sound = False
        if not sound:
            return f"a sample of '{shown(name)[:60]}' of {named} is no number"
    return None


def shown(value: Any) -> str:
    """A value of the environment in a message."""
    if isinstance(value, list):
        value = ", ".join(map(str, value))
    text = "unset" if value is None else str(value)[:300]
    return text if text.isprintable() else ascii(text)  # a report may hold a terminal's codes


def without_secrets(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables, with a short hash instead of the value where the name is that of a secret.

    Equal values have equal hashes, so that runs can be compared. A hash has 24 bits, far too few to
    recover a random secret.
    """
    public = {}
    for name, value in variables.items():
        if any(word in name.upper() for word in SECRETS):
            content = os.fsencode(value)
            digest = hashlib.pbkdf2_hmac("sha256", content, os.fsencode(name), ROUNDS)
            value = f"(not shown; hash {digest.hex()[:6]})"
        public[name] = value
    return public


def open_alone(path: str) -> IO[bytes]:
    """Open a file to append to, locked against other runs. The lock ends with the process."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise ValueError(f"{path} is no regular file; expected a path such as report.jsonl")
    # without a buffer, which would be written later, at the process's end
    file = open(path, "ab", buffering=0)  # noqa: SIM115 (it stays open, for the lock)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(f"another run is writing {path}; give another path") from None
    except OSError:  # a file system without locks
        pass
    return file


def unused(path: str) -> str:
    """The first of PATH, PATH.1, PATH.2, ... that does not exist."""
    name, number = path, 0
    while os.path.lexists(name):
        number += 1
        name = f"{path}.{number}"
    return name


def load(
    path: str,
    each: Callable[[Report, Case], None] = lambda report, case: None,
    parse: Callable[[str], Any] = json.loads,
    lines: Iterable[bytes] | None = None,
) -> Report:
    """The report at `path`. If it is no report, a ValueError names the file and the line.

    A line without its end does not count: a crash has cut it short. each: is called with every case
    as soon as it is read, e.g. to drop samples of which only a median is needed. lines: the lines
    of a file that is open already. A later case replaces an earlier one with the same key.
    """
    report: Report | None = None
    cases: dict[str, Case] = {}  # by key, as text
    number = 0
    try:
        with open(path, "rb") if lines is None else nullcontext(lines) as file:
            for line in file:
                number += 1
                if not line.endswith(b"\n"):
                    break
                if line.isspace():
                    continue
                content = parse(line.decode())
                if report is None:
                    report = read_header(content, path)
                elif "schema" in content:
                    raise ValueError("another report begins here; each needs a file of its own")
                elif "status" in content:
                    report.status = content.pop("status")
                    report.finished_at = content.pop("finished_at", None)
                    report.end = content
                else:
                    report.status = "interrupted"  # until a last line follows
                    if "resumed_at" in content:
                        report.resumed.append(content)
                        continue
                    case = Case(**content | {"part": len(report.resumed)})
                    case.metrics = with_estimates(case.metrics)
                    each(report, case)
                    name = json.dumps(case.key, sort_keys=True)
                    cases.pop(name, None)
                    cases[name] = case
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path}:{number} is no line of a report: {error}") from None
    if report is None:
        what = "is empty or cut short; a report is what a script writes with --json PATH"
        raise ValueError(f"{path} {what}")
    report.cases = list(cases.values())
    return report


def read_header(content: dict[str, Any], path: str) -> Report:
    """The first line: the run, without its cases."""
    schema = content.get("schema")
    if schema != SCHEMA:
        raise ValueError(f"its schema is {shown(schema)[:60]}; this version reads {SCHEMA}")
    return Report(**{name: content[name] for name in HEADER if name in content}, path=path)


def not_json(what: str, values: dict[str, Any]) -> str | None:
    """A line about the first value that JSON cannot hold, or None. what: `key` or `metric`."""
    for name, value in values.items():
        try:
            json.dumps(value, allow_nan=False, default=vars)
        except (TypeError, ValueError):
            return f"{what} '{name}' is not JSON: {str(value)[:60]!r}"
    return None


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
