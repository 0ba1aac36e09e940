"""What report.py says about a set of reports: tables and figures, as data.

Each benchmark has a function that makes its figures. One that is not listed has the distributions
of its samples, and the table of everything.
"""

from collections.abc import Callable, Sequence
from typing import Any

from common.figures import SERIES, Curves, Section
from common.report_communication import busbw, calls, link_maps
from common.report_figures import Options, curves_of, grouped, ratios, spreads, summary_of
from common.report_runs import Case, Run, number
from common.report_tables import tables_of
from common.report_training import break_even, embeddings, scaling, servers, updates

# whose samples are shown otherwise
NO_SPREADS = ("p2p_matrix",)


def harness(runs: Sequence[Run], _: Options) -> list[Section]:
    """calibrate: ratios that should be 1, and what a run of so many seconds can tell apart."""
    sections = ratios(runs, "Reported against a bare loop")

    def percent(case: Case) -> Any:
        y = number(case.metrics.get("resolution"))
        return (y * 100, None, None) if y is not None and y > 0 else None

    entries = [entry for entries in grouped(runs, lambda _: 0).values() for entry in entries]
    lines = curves_of(entries, "seconds", ["mode"], percent)
    if lines:
        title = "Smallest difference that one run shows"
        figure = Curves(
            title, summary_of(title, lines, "%"), "seconds", "difference (%)", lines[:SERIES]
        )
        sections.append(Section("Resolution", [], [figure]))
    return sections


FIGURES: dict[str, Callable[[Sequence[Run], Options], list[Section]]] = {
    "ddp_sweep": scaling,
    "compile_sweep": break_even,
    "collectives": busbw,
    "p2p_matrix": link_maps,
    "rpc_latency": calls,
    "ddp_rpc": embeddings,
    "parameter_server": servers,
    "batch_update_ps": updates,
    "calibrate": harness,
}


def sections_of(runs: Sequence[Run], options: Options) -> list[Section]:
    """Everything about one benchmark. runs: all of the same benchmark."""
    benchmark = runs[0].benchmark
    draw = FIGURES.get(benchmark)
    sections = draw(runs, options) if draw else []
    if benchmark not in NO_SPREADS:
        sections += spreads(runs)
        # a synchronised step makes all ranks look alike; this does not
        sections += spreads(runs, "Local compute by rank", lambda case: case.local, least=2)
    tables = tables_of(runs)
    return [*sections, Section("Tables", [], [], tables)] if tables else sections
