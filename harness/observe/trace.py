"""Traces of each case by torch.profiler: `--profile DIR`. docs/profile.md describes the files.

After a case is timed, its ranks run a few more iterations of each step. Some of the ranks profile
them and write a trace for analysis/trace.py, Perfetto and similar tools.
"""

import gzip
import hashlib
import json
import os
import re
import tempfile
import warnings
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import torch.distributed as dist
from torch.profiler import profile, record_function

from common.groups import Group
from common.stats import Times, show_seconds
from common.timing import STEP, Step, Workload, time_block
from harness.benchmark import Benchmark, Observer, analysis_command
from harness.cli import cut
from harness.environment import node_of_each
from harness.report import Case

ITERATIONS = 5
SLOW = 1.1  # a slowdown of the step under the profiler beyond this factor is reported
Ranks = Collection[int]
LONGEST_NAME = 120  # characters of a file name that describe the case

# Kineto logs to stderr when it starts and ends, and if there is no GPU. 99 disables all of it.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")


class Trace(Observer):
    """Runs and profiles a few more iterations after a case is timed."""

    def __init__(self, bench: Benchmark) -> None:
        super().__init__(bench)
        self.folder = Path(bench.args.profile or "")
        self.asked: Ranks | None = bench.args.profile_ranks
        if bench.args.profile:
            bench.prepare("--profile", lambda: check(self.folder, self.asked, bench.job.world_size))
            self.nodes = node_of_each(bench.report.environment)

    def after(
        self, key: Mapping[str, Any], work: Workload, times: Times, group: Group
    ) -> dict[str, Any] | None:
        """Run the steps, and write a trace if this rank is one of those that profile. Returns the
        `file`, the seconds of a step without and with the profiler (`step_s`), their quotient
        (`slowdown`), and the reason if the file is `lost`; None without a trace."""
        if not self.bench.args.profile:
            return None
        steps: Mapping[str, Step | None] = work.profiled or {STEP: work.step, **work.parts}
        own_s = float(median(times.each()[0]))
        medians_s = [own_s] * len(group.ranks)
        dist.all_gather_object(medians_s, own_s, group=group.control)
        iters = max(1, min(ITERATIONS, int(self.bench.rule.longest_block_s / max(medians_s))))
        chosen = choose_ranks(group.ranks, self.nodes, medians_s, self.asked)
        rank = self.bench.job.rank
        if rank not in chosen:
            if chosen:
                self.run(steps, iters, group)
            return None
        warnings.filterwarnings("ignore", "Warning: Profiler clears events")  # torch 2.11: of any
        # with shapes, because a trace has the bytes that gloo sends only by them
        with profile(record_shapes=True) as profiler:
            seconds = self.run(steps, iters, group)
        file = self.folder / f"{name_of_case(self.bench.report.benchmark, key)}-rank{rank}.json.gz"
        summary: dict[str, Any] = {"file": str(file)}
        if STEP in steps:  # the step of a checkpoint is only a part of what is profiled
            summary["slowdown"] = round(seconds[STEP] / own_s, 3)
            summary["step_s"] = [own_s, seconds[STEP]]
        self.bench.phase(f"writing {file}", 0)
        return summary | write(profiler, file)

    def run(self, steps: Mapping[str, Step | None], iters: int, group: Group) -> dict[str, float]:
        """Run each step `iters` times in a range of its name. Returns median seconds by name."""
        seconds: dict[str, float] = {}
        for name, step in steps.items():
            self.bench.phase(f"{name}, profiled")
            dist.barrier(group.control)
            if step is None:  # this rank waits while others run it
                continue
            step()  # without a range, because the first call under the profiler is slower
            in_range = record_function(name)(step)
            times_s, _ = time_block(in_range, iters, self.bench.job.device)
            seconds[name] = median(times_s)
        return seconds

    def row(self, case: Case, seen: Sequence[dict[str, Any] | None]) -> list[str]:
        """Add the summaries to the report. Returns lines on the files and on lost traces."""
        summaries = zip(map(str, case.ranks), seen, strict=True)
        if traces := {rank: summary for rank, summary in summaries if summary}:
            case.metrics["traces"] = traces
        lines, command = lines_about(traces)
        if command:
            self.bench.commands = [command]
        return lines


def lines_about(traces: Mapping[str, Mapping[str, Any]]) -> tuple[list[str], str]:
    """Return lines on lost and on written traces, and the command that reads the latter; "" if all
    were lost. traces: results of `after` by rank."""
    lost = [rank for rank, summary in traces.items() if "lost" in summary]
    written = [rank for rank in traces if rank not in lost]
    lines, command = [], ""
    if lost:
        first = traces[lost[0]]
        lines.append(f"trace of rank {cut(lost)} lost: {first['lost']}: {first['file']}")
    if written:
        begin, _, end = traces[written[0]]["file"].rpartition(f"-rank{written[0]}.")
        # the shell expands the pattern, so it is not quoted
        command = f"traces of the last case; {analysis_command('trace.py', begin)}-rank*.{end}"
        slowest = max(written, key=lambda rank: traces[rank].get("slowdown", 1.0))
        slowdown, words = traces[slowest].get("slowdown", 1.0), ""
        if slowdown > SLOW:
            own_s, profiled_s = map(show_seconds, traces[slowest]["step_s"])
            words = (
                f"; under the profiler a step of rank {slowest} took {profiled_s} instead of "
                f"{own_s}, {slowdown:.2f} times as long"
            )
        lines.append(f"trace of rank {cut(written)}: {begin}-rank*.{end}{words}")
    return lines, command


def check(folder: Path, asked: Ranks | None, world_size: int) -> None:
    """Make the folder. Raises ValueError if this rank cannot write into it."""
    if asked and max(asked) >= world_size:
        most = world_size - 1
        raise ValueError(f"expected --profile-ranks from 0 to {most}, got {max(asked)}; e.g. 0")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ValueError(f"cannot write into {folder}: {error.strerror}; e.g. traces") from None


def name_of_case(benchmark: str, key: Mapping[str, Any]) -> str:
    """Return a file name: the values of the key in words, and a digest of the whole key."""
    told = [str(value) for value in key.values() if not isinstance(value, bool | None)]
    words = re.sub(r"[^A-Za-z0-9._]+", "-", " ".join([benchmark, *told]))
    text = f"{benchmark} {json.dumps(key, sort_keys=True)}"
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    return f"{words[:LONGEST_NAME].strip('-.')}-{digest}"


def choose_ranks(
    ranks: Sequence[int], nodes: Sequence[int], medians_s: Sequence[float], asked: Ranks | None
) -> set[int]:
    """Return the ranks that profile: those `asked` for, or the first rank of each node and the
    slowest rank. nodes: of all ranks."""
    if asked is not None:
        return set(ranks) & set(asked)
    first_of_node = {nodes[rank]: rank for rank in reversed(ranks)}
    slowest = ranks[medians_s.index(max(medians_s))]
    return {*first_of_node.values(), slowest}


def write(profiler: profile, file: Path) -> dict[str, str]:
    """Write the trace. Returns {} or, if that failed, {"lost": reason}."""
    try:
        file.unlink(missing_ok=True)
        profiler.export_chrome_trace(str(file))
        if not gzip.decompress(file.read_bytes()).rstrip().endswith(b"}"):
            raise ValueError(f"cut off; is {tempfile.gettempdir()} full?")
        return {}
    except (OSError, EOFError, ValueError) as error:
        with suppress(OSError):
            file.unlink(missing_ok=True)
        return {"lost": getattr(error, "strerror", None) or str(error)}
