"""The tables of compile_sweep, and the numbers in them. docs/numbers.md derives each one."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from common.compiling import payback_steps, speed_up
from common.results import Case
from common.table import Columns, interval_width, metric, render

EAGER = "eager"  # not compiled
LARGEST = ("first_step_s", "recompiles", "recompile_s", "start_s", "memory_gib", "graphs")
Cell = Callable[[dict[str, Any]], str]


def rank_metrics(facts: Sequence[dict[str, Any]], step_s: float) -> dict[str, Any]:
    """A case's metrics from what its ranks bring back. facts: [ranks]; step_s: the median step.

    mfu is over the peaks of all devices, and only there where all of them are known.
    """
    first = facts[0]
    metrics: dict[str, Any] = {name: max(fact[name] for fact in facts) for name in LARGEST}
    metrics |= {name: first[name] for name in ("graph_breaks", "recompile_reasons")}
    if first["tokens"] is not None:
        metrics["tokens_per_s"] = len(facts) * first["tokens"] / step_s
    if first["flops"] is not None:
        metrics["flops_per_step"] = first["flops"]
        metrics["tflops"] = first["flops"] / step_s / 1e12
        peaks = [fact["peak_flops"] for fact in facts]
        if None not in peaks:
            metrics["mfu"] = first["flops"] * len(facts) / step_s / sum(peaks)
    if all("profile" in fact for fact in facts):
        metrics["profile"] = [fact["profile"] for fact in facts]
    return metrics


def compare(metrics: dict[str, Any], eager: Case | None, none: Case | None) -> dict[str, Any]:
    """How a case does against two others of the report: speed-ups, cost, steps to pay it back.

    eager: the same strategy, not compiled; none: the same backend without a strategy.
    """
    result: dict[str, Any] = {}
    median, ci = metrics["step_time_p50_s"], metrics["step_time_ci95_s"]
    for name, case in (("eager", eager), ("none", none)):
        if case is not None:
            base = case["metrics"]
            there = (base["step_time_p50_s"], base["step_time_ci95_s"])
            ratio, bounds = speed_up(there, (median, ci))
            result |= {f"vs_{name}": ratio, f"vs_{name}_bounds": bounds}
    if eager is not None:
        cost = metrics["first_step_s"] + metrics["recompile_s"] + metrics["start_s"]
        cost -= eager["metrics"]["first_step_s"]
        steps = payback_steps(cost, eager["metrics"]["step_time_p50_s"], median)
        result |= {"compile_cost_s": cost, "payback_steps": steps}
    return result


def case_name(case: dict[str, Any]) -> str:
    return f"{case['key']['strategy']} {case['key']['compile_backend']}"


def title(key: dict[str, Any]) -> str:
    """What the cases of a table have in common."""
    parts = [key["model"], f"batch size {key['batch_size'] or 'of the model'}"]
    if "context" in key:
        parts.append(f"{key['context']} tokens")
    if "image_size" in key:
        parts.append(f"{key['image_size']} px")
    parts.append(key["dtype"])
    parts += ["checkpointed"] if key["checkpoint"] else []
    parts += [] if key["optimizer"] else ["forward and backward only"]
    return ", ".join(parts)


def told_apart(case: dict[str, Any], name: str) -> bool:
    """Whether the intervals of a case and of what it is compared with leave no doubt."""
    bounds = case["metrics"].get(f"vs_{name}_bounds")
    return bounds is not None and not bounds[0] <= 1 <= bounds[1]


def _times_faster(name: str) -> Cell:
    def cell(case: dict[str, Any]) -> str:
        ratio = case["metrics"].get(f"vs_{name}")
        if ratio is None:
            return "-"
        return f"{ratio:.2f}x{' ' if told_apart(case, name) else '?'}"

    return cell


def step_columns(key: dict[str, Any]) -> Columns:
    """The first table: how long a step takes."""
    unit = "tokens" if "context" in key else "samples"
    return {
        "": case_name,
        "95% ci\nof p50": interval_width,
        **{f"p{q}\nsec/step": metric(f"step_time_p{q}_s", digits=4) for q in (50, 75, 90, 95)},
        f"{unit}/s": metric(f"{unit}_per_s", digits=1),
        "vs\neager": _times_faster("eager"),
        "vs\nnone": _times_faster("none"),
    }


def widest_row(keys: Sequence[dict[str, Any]]) -> list[str]:
    """A row of the first table as wide as any will be."""
    names = [case_name({"key": key}) for key in keys]
    return [max(names, key=len), "+-10.0%", *["0.0000"] * 4, "100000.0", "0.00x?", "0.00x?"]


def _cost_columns(memory: str) -> Columns:
    def compiled(cell: Cell) -> Cell:
        return lambda case: "-" if case["key"]["compile_backend"] == EAGER else cell(case)

    def payback(case: dict[str, Any]) -> str:
        steps = case["metrics"].get("payback_steps")
        return "-" if steps is None else f"{steps}{' ' if told_apart(case, 'eager') else '?'}"

    def tflops(case: dict[str, Any]) -> str:
        value = case["metrics"].get("tflops")
        return "-" if value is None else f"{value:.3g}"

    return {
        "": case_name,
        "first\nstep (s)": metric("first_step_s"),
        "start of\nbackend (s)": compiled(metric("start_s")),
        "recompiles": compiled(metric("recompiles", digits=0)),
        "recompiling\n(s)": compiled(metric("recompile_s")),
        "payback\n(steps)": payback,
        "graphs": compiled(metric("graphs", digits=0)),
        "graph\nbreaks": compiled(lambda case: str(sum(case["metrics"]["graph_breaks"].values()))),
        f"{memory}\n(GiB)": metric("memory_gib"),
        "tflops": tflops,
        "mfu(%)": metric("mfu", 100, 1),
    }


def _profile_columns() -> Columns:
    def mean(name: str, outer: str | None = None) -> Cell:
        def cell(case: dict[str, Any]) -> str:
            rows = [row[outer] if outer else row for row in case["metrics"]["profile"]]
            return f"{sum(row[name] for row in rows) / len(rows) * 1e3:.2f}"

        return cell

    parts = {f"{part}\n(ms)": mean(f"{part}_s") for part in ("step", "compute", "communication")}
    rest = {f"{part}\n(ms)": mean(f"{part}_s") for part in ("overlapped", "idle")}
    spans = {f"{name}\n(ms)": mean(name, "ranges_s") for name in ("Forward", "Backward")}
    return {
        "": case_name,
        **parts,
        **rest,
        **spans,
        "Optimizer\n(ms)": mean("Optimizer", "ranges_s"),
    }


def cost_tables(cases: Sequence[Case], memory: str) -> str:
    """The second table for each model and dtype: what compiling costs, what breaks the graphs,
    and what the profiler saw. cases: those that have passed, in order; memory: what is measured."""
    texts = []
    for heading, group in itertools.groupby(cases, key=lambda case: title(case["key"])):
        rows = list(group)
        texts.append(f"\nCost: {heading}\n\n{render(_cost_columns(memory), rows)}")
        texts += _remarks(rows)
        profiled = [case for case in rows if "profile" in case["metrics"]]
        if profiled:
            table = render(_profile_columns(), profiled)
            texts.append(f"\nProfile: {heading}, mean over ranks, under the profiler\n\n{table}")
    return "\n".join(texts)


def _remarks(cases: Sequence[Case]) -> list[str]:
    lines = []
    for what in ("graph_breaks", "recompile_reasons"):
        where: dict[str, list[str]] = {}
        for case in cases:
            for reason in case["metrics"][what]:
                where.setdefault(reason, []).append(case_name(case))
        name = "graph break" if what == "graph_breaks" else "recompiled"
        lines += [f"# {name}, {', '.join(names)}: {reason}" for reason, names in where.items()]
    for case in cases:
        if case["key"]["compile_backend"] != EAGER and not case["metrics"]["graphs"]:
            lines.append(f"# {case_name(case)}: dynamo found nothing to compile, it ran eager")
        if case["check"] != "passed":
            lines.append(f"# {case_name(case)}: check {case['check']}")
    unsure = any(
        f"vs_{name}" in case["metrics"] and not told_apart(case, name)
        for case in cases
        for name in ("eager", "none")
    )
    if unsure:
        lines.append("# ?: the intervals of the two medians do not tell them apart")
    return lines
