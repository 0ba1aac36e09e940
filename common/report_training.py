"""The figures of the benchmarks that train: as data, see common/figures.py."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from common.figures import SERIES, Curves, Figure, Line, Section, Table
from common.report_figures import (
    MAX_FIGURES,
    Options,
    curves_of,
    dots,
    grouped,
    ratios,
    rest,
    series_labels,
    shortened,
    stacked_bars,
    summary_of,
)
from common.report_runs import Case, Run, number, pair, text
from common.report_tables import MAX_ROWS, joined

SPEED_UP = "With bounds that are wider than a 95 % interval."
PANEL = ("model", "dtype")  # each has a figure of its own in ddp_sweep


def scaling(runs: Sequence[Run], _: Options) -> list[Section]:
    """ddp_sweep: samples/s over the ranks, with the ideal line; and where a step's time goes."""
    baselines: dict[Any, float] = {}
    setup = ("label", "world_size", "bucket_size_mb", "comm_hook")

    def rate(case: Case) -> tuple[float, float | None, float | None] | None:
        y, p50 = (number(case.metrics.get(n)) for n in ("samples_per_s", "step_time_p50_s"))
        if y is None or y <= 0:
            return None
        bounds = pair(case.metrics.get("step_time_ci95_s"))
        if bounds is None or p50 is None or bounds[0] <= 0:
            return y, None, None
        return y, y * p50 / bounds[1], y * p50 / bounds[0]

    for run in runs:
        for case in run.cases:
            found = rate(case)
            if case.key.get("world_size") == 0 and found:
                baselines[(run.label, rest(case, *setup))] = found[0]

    by_label = {run.label: run for run in runs}

    def trained(case: Case) -> bool:
        ranks = number(case.key.get("world_size"))
        return ranks is not None and ranks >= 1

    figures: list[Figure] = []
    panels = grouped(runs, lambda c: tuple(text(c.key.get(n), 40) for n in PANEL), trained)
    for shown, entries in list(panels.items())[:MAX_FIGURES]:
        lines = curves_of(entries, "world_size", ["label", *PANEL], rate)
        if not lines:
            continue
        ranks = sorted({x for line in lines for x in line.x})
        bases = dict.fromkeys((run.label, rest(case, *setup)) for run, case in entries)
        known = [which for which in bases if which in baselines][:SERIES]
        names = series_labels([(by_label[label], constant) for label, constant in known])
        ideals = []
        for style, (which, name) in enumerate(zip(known, names, strict=True)):
            label = "ideal: no ddp times ranks" + (f", {name}" if len(known) > 1 else "")
            points = [baselines[which] * n for n in ranks]
            ideals.append(Line(label, style, ranks, points, ideal=True))
        title = " ".join(word for word in shown if word != "-")
        figures.append(
            Curves(
                title,
                summary_of(f"Scaling of {title}", lines[:SERIES], "samples/s"),
                "ranks",
                "samples/s",
                [*ideals, *lines[:SERIES]],
                note=shortened(SERIES, len(lines), "curves"),
            )
        )
    sections = []
    if figures:
        notes = ["Bars are 95 % intervals of the median."]
        notes += [shortened(MAX_FIGURES, len(panels), "settings")]
        sections.append(Section("Scaling", [n for n in notes if n], figures))
    parts = [
        ("local compute", ("local_compute_p50_s",)),
        ("exposed communication", ("exposed_communication_s",)),
    ]
    split = stacked_bars(runs, "Step time", parts)
    if split:
        note = (
            "Medians. Exposed communication is the step less local compute, both timed in turns: "
            "it may be a little under 0 (drawn as 0), and the parts need not add up exactly."
        )
        sections.append(Section("Where a step's time goes", [note], split))
    return sections


def embeddings(runs: Sequence[Run], _: Options) -> list[Section]:
    """ddp_rpc: epochs, and the phases of a batch."""
    sections = []
    found = dots(runs, "Epoch", "p50 (ms)", "epoch_time_p50_s", "epoch_time_ci95_s", 1e3)
    if found:
        sections.append(Section("Time of an epoch", ["With 95 % intervals."], found))
    names = ("lookup", "forward", "backward", "exchange", "step")
    stacked = stacked_bars(runs, "A batch", [(name, (f"{name}_s",)) for name in names])
    if stacked:
        note = "Means over trainers and batches, so that they add up."
        sections.append(Section("Where a batch's time goes", [note], stacked))
    return sections + ratios(runs, "Against the original")


def servers(runs: Sequence[Run], _: Options) -> list[Section]:
    """parameter_server: step time by route, and forward and backward of all trainers."""
    sections = []
    found = dots(runs, "Step time", "p50 (ms)", "step_time_p50_s", "step_time_ci95_s", 1e3)
    if found:
        sections.append(Section("Step time by route", ["With 95 % intervals."], found))
    parts = [(name, ("trainers", "all", name, "p50_s")) for name in ("forward", "backward")]
    stacked = stacked_bars(runs, "Forward and backward", parts)
    if stacked:
        note = "Medians over all trainers. Gradients are exchanged within the backward pass."
        sections.append(Section("Where a step's time goes", [note], stacked))
    return sections + ratios(runs, "Against the original")


def updates(runs: Sequence[Run], _: Options) -> list[Section]:
    """batch_update_ps: updates a second."""
    found = dots(runs, "Updates a second", "updates/s", "updates_per_s", "updates_per_s_ci95")
    section = [Section("Throughput", ["With 95 % intervals."], found)] if found else []
    return section + ratios(runs, "Against the original")


def break_even(runs: Sequence[Run], _: Options) -> list[Section]:
    """compile_sweep: seconds over steps, eager and compiled; where they cross compiling pays."""
    sections = []
    found = dots(
        runs, "Speed-up", "times as fast as eager", "vs_eager", "vs_eager_bounds", reference=1.0
    )
    if found:
        sections.append(Section("Against eager of the same strategy", [SPEED_UP], found))
    panel = ("model", "dtype", "strategy")
    panels = grouped(
        runs,
        lambda case: tuple(text(case.key.get(name), 40) for name in panel),
        lambda case: _costs(case) is not None,
    )
    figures: list[Figure] = []
    for shown, entries in list(panels.items())[:MAX_FIGURES]:
        known = [(run, case, costs) for run, case in entries if (costs := _costs(case))][:SERIES]
        paid = [cost / (eager - step) for _, _, (cost, eager, step) in known if eager > step]
        last = 10.0 ** math.ceil(math.log10(max(100.0, 3 * min(max(paid, default=1000), 1e6))))
        steps = [float(x) for x in np.geomspace(1, last, 60)]
        names = series_labels([(run, rest(case, *panel, "optimize_ddp")) for run, case, _ in known])
        lines: list[Line] = []
        marks = []
        eagers: dict[str, float] = {}
        for i, ((run, case, (cost, eager, step)), name) in enumerate(
            zip(known, names, strict=True)
        ):
            if len(known) == 1:
                name = text(case.key.get("compile_backend"), 40)
            eagers.setdefault(run.label, eager)
            after = [max(cost, 0.0) + n * step for n in steps]
            lines.append(Line(name, i, steps, after, formula=True))
            if eager > step:
                crossing = max(1.0, cost / (eager - step))
                if crossing <= last:
                    marks.append(
                        (f"{name}: paid back after {math.ceil(crossing):,} steps", crossing)
                    )
        for i, (label, eager) in enumerate(eagers.items()):
            name = f"eager, {label}" if len(eagers) > 1 else "eager"
            lines.append(Line(name, len(known) + i, steps, [n * eager for n in steps], ideal=True))
        title = " ".join(word for word in shown if word != "-")
        said = "; ".join(label for label, _ in marks) or "compiling never pays here"
        figures.append(
            Curves(
                title,
                f"Break-even of {title}: {said}.",
                "steps",
                "seconds",
                lines,
                x_ticks=[10.0**k for k in range(round(math.log10(last)) + 1)],
                marks=marks,
                note="" if marks else "Compiling never pays here: its steps are not faster.",
            )
        )
    if figures:
        note = (
            "Seconds after so many steps: compiling first, or not at all. A dashed line down "
            "is where compiling has paid for itself."
        )
        sections.append(Section("Break-even of compiling", [note], figures))
    reasons = [
        [run.label, case.label, text(reason, 300), text(count, 20)]
        for run, case in joined(runs)
        if isinstance(case.metrics.get("graph_breaks"), dict)
        for reason, count in case.metrics["graph_breaks"].items()
    ]
    if reasons:
        note = shortened(MAX_ROWS, len(reasons), "reasons").replace("drawn", "shown")
        header = ["report", "case", "reason", "times"]
        table = Table("Graph breaks", header, reasons[:MAX_ROWS], note=note)
        sections.append(Section("Why graphs break", [], [], [table]))
    return sections


def _costs(case: Case) -> tuple[float, float, float] | None:
    """(seconds that compiling costs, eager step, compiled step) of a compiled case."""
    names = ("compile_cost_s", "vs_eager", "step_time_p50_s")
    cost, ratio, step = (number(case.metrics.get(name)) for name in names)
    if cost is None or ratio is None or step is None or ratio <= 0 or step <= 0:
        return None
    return cost, ratio * step, step
