#!/usr/bin/env python3
"""Draw a step of a trace that --profile has written: when communication and computing run.

    python analysis/timeline.py traces/CASE-rank0.json.gz step.svg
    python analysis/timeline.py traces/CASE-rank0.json.gz compute.png --step compute --number 2

Each row is a thread of the CPU or a stream of the GPU. Perfetto (ui.perfetto.dev) shows the whole
trace; this is a picture for a page.
"""

import gzip
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from analysis.figures import SERIES, Figure
from common import cli

Event = dict[str, Any]
Spans = dict[tuple[str, str], list[tuple[float, float]]]  # start and length, by row and kind
COLORS = {"computing": SERIES[0], "communication": SERIES[1]}


def find_ranges(events: list[Event], step: str) -> list[Event]:
    """The ranges of a step in the order of time: those of the GPU, or the CPU's without one."""
    on_gpu, on_cpu = [], []
    for event in events:
        if event["name"] == step and event["cat"] == "gpu_user_annotation":
            on_gpu.append(event)
        elif event["name"] == step and event["cat"] == "user_annotation":
            on_cpu.append(event)
    return sorted(on_gpu or on_cpu, key=lambda event: event["ts"])


def kind_of(event: Event, has_kernels: bool) -> str:
    """`communication`, `computing`, or "" for what is not drawn."""
    name: str = event["name"]
    category = event["cat"]
    if name.startswith("gloo:"):
        return "communication"
    if category == "kernel":
        return "communication" if "nccl" in name.lower() else "computing"
    is_operator = category == "cpu_op" and name.startswith("aten::")
    return "computing" if is_operator and not has_kernels else ""


def find_spans(events: list[Event], begin: float, end: float) -> Spans:
    """Milliseconds since `begin` and their length, of what runs from begin to end (us)."""
    has_kernels = any(event["cat"] == "kernel" for event in events)
    row_word = "stream" if has_kernels else "thread"
    spans: Spans = defaultdict(list)
    for event in events:
        kind = kind_of(event, has_kernels)
        start = max(begin, event["ts"])
        stop = min(end, event["ts"] + event["dur"])
        if kind and start < stop:
            row = f"{row_word} {event['tid']}"
            start_ms = (start - begin) / 1e3
            length_ms = (stop - start) / 1e3
            spans[row, kind].append((start_ms, length_ms))
    return spans


def draw(spans: Spans, title: str) -> Figure:
    """A row for each thread, a colour for each kind."""
    rows = sorted({row for row, _ in spans})
    height = 1.2 + 0.5 * len(rows)
    figure = Figure(figsize=(8, height), layout="constrained")
    ax = figure.add_subplot(xlabel="ms", title=title)
    named: set[str] = set()
    for (row, kind), bars in sorted(spans.items(), reverse=True):  # communication is on top
        label = f"_{kind}" if kind in named else kind  # matplotlib hides what begins with _
        named.add(kind)
        place = (rows.index(row) - 0.35, 0.7)
        ax.broken_barh(bars, place, facecolors=COLORS[kind], label=label)
    ax.set_yticks(range(len(rows)), rows)
    ax.invert_yaxis()
    ax.grid(axis="y", visible=False)
    ax.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2)
    return figure


def main() -> int:
    parser = cli.Parser(__doc__)
    parser.add_argument("trace", help="a file of --profile, .json.gz")
    parser.add_argument("picture", help="the file to draw: .svg, .png or .pdf")
    parser.add_argument("--step", default="step", help="the range to draw (default: step)")
    count = "which of its iterations, from 0 (default: 1, the first one may be slower)"
    parser.add_argument("--number", type=cli.number(int, 0), default=1, metavar="N", help=count)
    args = parser.parse_args()
    try:
        packed = Path(args.trace).read_bytes()
        content = json.loads(gzip.decompress(packed))
        events = [event for event in content["traceEvents"] if event.get("ph") == "X"]
        ranges = find_ranges(events, args.step)
        if args.number >= len(ranges):
            problem = f"has {len(ranges)} of '{args.step}', no number {args.number}"
            parser.error(f"{args.trace} {problem}")
        begin = ranges[args.number]["ts"]
        end = begin + ranges[args.number]["dur"]
        spans = find_spans(events, begin, end)
        figure = draw(spans, f"{args.step}, iteration {args.number}")
        figure.savefig(args.picture, dpi=150)
    except (OSError, ValueError, KeyError, EOFError) as error:
        parser.error(cli.describe(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
