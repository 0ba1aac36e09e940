#!/usr/bin/env python3
"""Where does the time of a training step go? Analyzes the Kineto traces of torch.profiler.

    python analysis/trace.py traces
    python analysis/trace.py profile_traces/iteration_10 -o step.png
    python analysis/trace.py profile_traces/iteration_10 --against collectives.jsonl

The tables show shares of a step:

computing      a GPU kernel other than those of communication runs; in a trace without kernels, an
               operator on the CPU
communication  a communication kernel runs, such as those of NCCL, or a collective of gloo
exposed        communication runs while nothing computes
both           communication and computing run concurrently
idle           neither runs: the GPU copies memory or waits for the host, or Python code runs

Traces of several ranks also show which ranks the other ranks wait for, and how fast the collectives
are without this waiting time. Cases that --profile has traced are reported one by one. See
docs/profile.md.
"""

import re
import sys
import zlib
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from analysis.show import DAMAGE, clean, put, show_table
from analysis.traces import bandwidth, calls, kineto, receives
from analysis.traces.bandwidth import Row
from analysis.traces.calls import Group, Waiting
from analysis.traces.kineto import Activity, Cover, Span, Step, Trace, union
from harness import cli, exits, report
from harness.files import check_regular
from readers import files
from readers.files import GENERATOR, refuse_foreign
from readers.isolated import collective_times

# isort: split
from tqdm import tqdm

COLORS = {"computing": "#1f83c4", "communication": "#d55e00"}
COLUMNS = ("computing", "communication", "exposed", "both", "idle")
NUMBERS = range(2, 20)  # numeric columns of tables
PICTURES = (".png", ".svg", ".pdf")
NEARLY_ALL = 0.9  # if one call has a larger share of the communication, it dominates the table
EXPECTED = "expected a trace of torch.profiler, e.g. by export_chrome_trace('rank0.json.gz')"


# -- files -----------------------------------------------------------------------------------------


# The files that `--profile` of this project's scripts writes: a case, and a rank
OWN = re.compile(r"(.+-[0-9a-f]{8})-rank\d+\.json(\.gz)?$")


def files_in(words: Sequence[str]) -> tuple[dict[str, bool], list[str]]:
    """File -> whether it was found in a folder, and remarks on files that were left out.

    Raises ValueError for a folder without traces, or with too many files.
    """
    found: dict[str, bool] = {}
    lines = []
    for word in words:
        if not Path(word).is_dir():
            found[word] = False
            continue
        traces, others = list[Path](), list[str]()
        for path in files.files_of(word):
            if path.name.endswith((".json", ".json.gz")) and not files.kind_of(path):
                traces.append(path)
            elif ".json" in path.name:
                others.append(f"left out {path}: {files.kind_of(path) or 'compressed'}")
        if not traces:
            folders = sorted(path.name for path in Path(word).iterdir() if path.is_dir())
            hints = [f"its folders are {cli.cut(folders, 4)}"] if folders else others[:4]
            expected = "expected a folder with .json or .json.gz"
            raise ValueError("; ".join([f"{word}: {expected}", *hints]))
        files.check_total(word, traces)
        found |= dict.fromkeys(map(str, traces), True)
        lines += others
    return found, lines


def by_case(found: Mapping[str, bool]) -> dict[str, dict[str, bool]]:
    """The files of each case of this project's scripts; all other files belong to one job, ""."""
    cases: dict[str, dict[str, bool]] = {}
    for path, in_folder in found.items():
        own = OWN.match(Path(path).name)
        cases.setdefault(own[1] if own else "", {})[path] = in_folder
    return cases


def read_all(found: Mapping[str, bool]) -> tuple[list[Trace], list[str]]:
    """The traces, and remarks on files that were left out.

    Raises ValueError with a message of one line.
    """
    traces, lines = [], []
    with tqdm(
        total=sum(size_of(path) for path in found),
        unit="B",
        unit_scale=True,
        leave=False,
        disable=None,  # unless stderr is a terminal
    ) as bar:
        before = 0
        for path, in_folder in found.items():
            size = size_of(path)
            bar.set_description(clean(Path(path).name, 40))

            def tick(share: float, before: int = before, size: int = size) -> None:
                bar.update(before + share * size - bar.n)

            try:
                traces.append(kineto.read(path, tick))
            except kineto.NotATrace as error:
                if not in_folder:
                    raise ValueError(f"{path}: {EXPECTED}, got {error}") from None
                lines.append(f"left out {path}: {error}")
            except (OSError, EOFError, zlib.error, RecursionError, ValueError) as error:
                raise ValueError(f"{path}: {EXPECTED}, got {error}") from None
            except MemoryError:
                raise ValueError(f"{path}: not enough memory for its {size:,} bytes") from None
            except (AttributeError, LookupError, TypeError, ArithmeticError) as error:
                what = f"events of an unknown form: {exits.describe(error)}"
                raise ValueError(f"{path}: {EXPECTED}, got {what}") from None
            before += size
    if not traces:
        raise ValueError(f"{EXPECTED}, got none; {cli.cut(lines, 4)}")
    return traces, lines


def size_of(path: str) -> int:
    """Size in bytes, for the progress bar."""
    return Path(path).stat().st_size if Path(path).is_file() else 0


def by_rank(traces: Sequence[Trace]) -> tuple[dict[int, Trace], list[str]]:
    """The traces by rank, and remarks on those that were left out.

    If no trace contains its rank, the ranks are the positions of the traces. A trace with neither a
    rank nor kernels, next to traces of GPUs, is left out: it belongs to another process, such as a
    server. Raises ValueError with a message of one line.
    """
    lines = []
    used = list(traces)
    if any(trace.on_gpu and trace.rank is not None for trace in traces):
        for trace in traces:
            if trace.rank is None and not trace.on_gpu:
                used.remove(trace)
                lines.append(f"left out {trace.path}: it has neither a rank nor kernels")
    unknown = [trace for trace in used if trace.rank is None]
    if unknown and len(unknown) < len(used):
        what = "expected a rank in the trace or in the file's name, as in the other files"
        raise ValueError(f"{unknown[0].path}: {what}, got none; e.g. rank0.json.gz")
    if len(unknown) > 1:
        names = [f"{number} is {Path(trace.path).name}" for number, trace in enumerate(unknown)]
        lines.append(f"no file contains its rank; ranks are numbers of files: {cli.cut(names)}")
    found: dict[int, Trace] = {}
    for number, trace in enumerate(used):
        rank = number if trace.rank is None else trace.rank
        if rank in found:
            what = f"expected one trace per rank, got another one of rank {rank}"
            raise ValueError(f"{trace.path}: {what}; see {found[rank].path}")
        found[rank] = trace._replace(rank=rank, numbered=bool(unknown) and len(unknown) > 1)
    return dict(sorted(found.items())), lines


# -- shares of a step ------------------------------------------------------------------------------


def shares_of(
    computing: Sequence[Span], communication: Sequence[Span], steps: Sequence[Step]
) -> list[list[float]]:
    """Milliseconds of the mean step, and of each step: its length, then COLUMNS. [1 + steps, 6]"""
    computes, communicates = Cover(union(computing)), Cover(union(communication))
    either = Cover(union([*computes.spans, *communicates.spans]))
    rows = []
    for step in steps:
        length = step.end - step.start
        spans = (step.start, step.end)
        computing_us, communication_us = computes.within(*spans), communicates.within(*spans)
        busy = either.within(*spans)
        exposed, both = busy - computing_us, computing_us + communication_us - busy
        times = (length, computing_us, communication_us, exposed, both, length - busy)
        rows.append([max(0, time) / 1e3 for time in times])  # a difference may be just below 0
    mean = [fmean(times) for times in zip(*rows, strict=True)]
    return [mean, *rows]


def show_shares(traces: Iterable[Trace]) -> None:
    """Print a table with the mean step of each rank and each of its steps."""
    rows = []
    for trace in traces:
        times = shares_of(trace.spans("computing"), trace.spans("communication"), trace.steps)
        names = [f"mean of {len(trace.steps)}", *[step.name for step in trace.steps]]
        for name, (ms, *parts) in zip(names, times, strict=True):
            shares = [f"{100 * part / ms if ms else 0:.1f}" for part in parts]
            rows.append([trace.rank, name, f"{ms:.3f}", *shares])
    header = ["rank", "step", "ms", *[f"{column} (%)" for column in COLUMNS]]
    put(show_table(header, rows, NUMBERS) + "\n")


def dominating_call(trace: Trace) -> str | None:
    """A remark if nearly all of the communication is a single call in the first step.

    In the first step connections are set up, and ranks on which the profiler started earlier wait
    for the other ranks.
    """
    every = [call for step in trace.steps for call in step.calls]
    if len(every) < 2:
        return None
    lengths = [one.end - one.start for one in every]
    longest = max(range(len(every)), key=lengths.__getitem__)
    share = lengths[longest] / sum(lengths)
    if share < NEARLY_ALL or every[longest] not in trace.steps[0].calls:
        return None
    others = [(one.start, one.end) for number, one in enumerate(every) if number != longest]
    computing = trace.spans("computing")
    whole = shares_of(computing, trace.spans("communication"), trace.steps)[0]
    rest = shares_of(computing, others, trace.steps)[0]
    length_ms = whole[0] - (whole[3] - rest[3])  # without the exposed part of that call
    name = clean(name_of(every[longest]), 60)
    what = f"one call of {len(every)} ({name}, {lengths[longest] / 1e3:.4g} ms, in the first step)"
    part = f"{rest[3] / length_ms if length_ms else 0:.1%} of a {length_ms:.4g} ms step is exposed"
    return f"{what} accounts for {share:.2%} of the communication; without it, {part}"


def name_of(one: Activity) -> str:
    return one.collective.name if one.collective else one.name


# -- process groups --------------------------------------------------------------------------------


def exposed_ms(
    spans: Iterable[Span], computing: Cover, steps: Sequence[Step]
) -> tuple[float, float]:
    """The duration of the communication in `spans`, and of its exposed part: milliseconds per step.

    Communication that overlaps counts once.
    """
    cover = Cover(union(spans))
    whole = hidden = 0.0
    for step in steps:
        for start, end in cover.cut(step.start, step.end):
            whole += end - start
            hidden += computing.within(start, end)
    return whole / len(steps) / 1e3, (whole - hidden) / len(steps) / 1e3


def show_groups(
    groups: Sequence[Group], waiting: Sequence[dict[int, Waiting]], traces: Mapping[int, Trace]
) -> None:
    """Print a row for each process group of each rank."""
    rows = []
    computing = {rank: Cover(union(one.spans("computing"))) for rank, one in traces.items()}
    for group, waits in zip(groups, waiting, strict=True):
        for rank, own in group.calls.items():
            steps = traces[rank].steps
            spans = [(call.activity.start, call.activity.end) for call in own]
            whole, exposed = exposed_ms(spans, computing[rank], steps)
            cells = [f"{number:.5g}" for number in (len(own) / len(steps), whole, exposed)]
            if (one := waits.get(rank)) and one.steps:
                for by_step in map(calls.ms_by_step, (one.waits, one.late)):
                    cells.append(f"{sum(by_step.values()) / len(one.steps):.5g}")
            else:
                cells += ["-", "-"]
            rows.append([group.name or "not named", short_ranks(group.ranks), rank, *cells])
    header = ["group", "ranks", "rank", "calls/step", "ms", "exposed (ms)", "waits (ms)"]
    put(show_table([*header, "late (ms)"], rows, NUMBERS) + "\n")


def short_ranks(ranks: str) -> str:
    """Abbreviate a long list of ranks: `[0, 8, 16, ..., 504]`."""
    words = ranks.strip("[]").split(", ")
    if len(words) < 8:
        return ranks
    return f"[{', '.join(words[:3])}, ..., {words[-1]}]"


def show_bandwidths(rows: Sequence[Row]) -> None:
    """Print a row for each collective of each process group."""
    compared = any(row.alone for row in rows)
    header = ["group", "collective", "ranks", "calls/step", "bytes", "ms", "algbw (GB/s)"]
    header += ["busbw", "step (%)", *(["alone (ms)", "ratio", "95% ci"] if compared else [])]
    cells = []
    for row in rows:
        size = cli.show_size(row.size_bytes) if row.size_bytes else "-"
        line = [row.group.name or "not named", row.operation, row.group.size or "-"]
        line += [f"{row.calls:.5g}", size, f"{row.ms:.5g}"]
        line += ["-" if rate is None else f"{rate:.4g}" for rate in (row.algbw, row.busbw)]
        line.append(f"{100 * row.share:.1f}")
        if row.alone and row.ratio:
            low, high = row.ratio.low, row.ratio.high  # from the interval of the isolated time
            ends = "-" if low is None or high is None else f"{low:.2f} to {high:.2f}"
            line += [f"{row.alone.value:.5g}", f"{row.ratio.value:.2f}", ends]
        elif compared:
            line += ["-", "-", "-"]
        cells.append(line)
    put(show_table(header, cells, NUMBERS) + "\n")


def draw(traces: Mapping[int, Trace], path: str) -> None:
    """Draw the step of median length: a row per thread or stream, a color per kind."""
    from matplotlib.figure import Figure  # not above, because tables do not need it

    steps = next(iter(traces.values())).steps
    median = sorted(steps, key=lambda step: step.end - step.start)[len(steps) // 2]
    number = steps.index(median)
    bars = defaultdict[str, dict[str, list[Span]]](lambda: defaultdict(list))
    for rank, trace in traces.items():
        step = trace.steps[min(number, len(trace.steps) - 1)]
        for one in sorted(trace.activities, key=lambda one: one.kind != "computing"):
            start, end = max(one.start, step.start), min(one.end, step.end)
            if start < end:
                bar = ((start - step.start) / 1e3, (end - start) / 1e3)
                bars[f"rank {rank}, {one.place}"][one.kind].append(bar)
    figure = Figure(figsize=(9, 1.2 + 0.4 * len(bars)), layout="constrained")
    axes = figure.add_subplot(xlabel="ms")
    axes.set_title(clean(median.name), loc="left")
    for kind, color in COLORS.items():
        for row, place in enumerate(bars):
            axes.broken_barh(bars[place][kind], (row - 0.35, 0.7), facecolors=color)
        axes.plot([], [], color=color, linewidth=6, label=kind)
    axes.set_yticks(range(len(bars)), bars)
    axes.invert_yaxis()
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False)
    writer = "Software" if path.endswith(".png") else "Creator"  # metadata field of the format
    figure.savefig(path, dpi=150, metadata={writer: GENERATOR})


# -- collectives ----------------------------------------------------------------------------------


def read_alone(path: str) -> bandwidth.IsolatedTimes:
    """The times in a report of collectives.py. Raises ValueError with a message of one line."""
    try:
        check_regular(path)
        return collective_times(report.load(path))
    except ValueError as error:
        raise ValueError(f"--against {path}: {error}") from None
    except DAMAGE as error:
        what = f"an entry does not have the expected form ({type(error).__name__}: {error})"
        raise ValueError(f"--against {path}: {what}") from None


def show_collectives(
    traces: Mapping[int, Trace], alone: bandwidth.IsolatedTimes | None, ranks_per_node: int | None
) -> list[str]:
    """Print the tables of process groups and of their collectives. Returns the lines to print below
    them, with the answers last."""
    groups = calls.groups_of(traces)
    receives.match(groups, traces)
    lines = [remark for group in groups for remark in group.remarks]
    if groups:
        waiting = [calls.waiting_in(group) for group in groups]
        show_groups(groups, waiting, traces)
        rows, remarks = bandwidth.rows_of(groups, traces, alone, ranks_per_node)
        show_bandwidths(rows)
        lines += remarks
        if found := receives.receives_of(groups, traces):
            header = ["rank", "receives/step", "ms", "step (%)", "waits (ms)", "for rank"]
            put(show_table(header, receives.rows_of(found, traces), NUMBERS) + "\n")
            lines += receives.sentences(found, traces)
        lines += calls.conclude(groups, waiting, traces)
        if alone is not None:
            lines.append(bandwidth.sentence(rows))
    return lines


def main() -> int:
    parser = cli.Parser(__doc__)
    add = parser.add_argument
    files = "one .json or .json.gz file per rank of a job, or a folder of such files"
    add("trace", nargs="+", metavar="TRACE", help=files)
    suffixes = "a file that ends in .png, .svg or .pdf"
    drawn = cli.checked(str, lambda path: Path(path).suffix in PICTURES, suffixes, "e.g. step.png")
    add("-o", "--output", type=drawn, metavar="PICTURE", help=f"draw the median step to {suffixes}")
    against = "compare the collectives with those in this report of collectives.py"
    add("--against", metavar="REPORT", help=against)
    nodes = f"number of ranks per node (default: by host name, or {bandwidth.RANKS_PER_NODE})"
    add("--gpus-per-node", type=cli.positive_int, metavar="N", help=nodes)
    args = parser.parse_args()
    try:
        if args.output:
            refuse_foreign(args.output)
        alone = read_alone(args.against) if args.against else None
        found, lines = files_in(args.trace)
        cases = by_case(found)
        if args.output and len(cases) > 1:
            raise ValueError(f"-o draws one case, got {len(cases)}: {cli.cut(list(cases), 2)}")
        for number, (case, its_files) in enumerate(cases.items()):
            if len(cases) > 1:
                put(f"\n# {case or 'other files'}\n" if number else f"# {case or 'other files'}\n")
            for line in [*lines, *show_case(its_files, alone, args)]:
                put(f"# {line}")
            lines = []
    except (ValueError, OSError) as error:
        parser.error(clean(error, 1000))
    return 0


def show_case(
    found: Mapping[str, bool], alone: bandwidth.IsolatedTimes | None, args: Namespace
) -> list[str]:
    """Print the tables of a job, and draw its step. Returns the lines to print below them.

    Raises ValueError or OSError with a message of one line.
    """
    every, lines = read_all(found)
    traces, more = by_rank(every)
    show_shares(traces.values())
    lines += more
    for rank, trace in traces.items():
        lines += [f"rank {rank}: {remark}" for remark in trace.remarks]
        if line := dominating_call(trace):
            lines.append(f"rank {rank}: {line}")
    lines += show_collectives(traces, alone, args.gpus_per_node)
    if args.output:
        draw(traces, args.output)
    return lines


if __name__ == "__main__":
    sys.exit(main())
