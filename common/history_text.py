"""The history of a folder of reports as a table, as Markdown, and as JSON."""

from collections.abc import Callable, Sequence
from typing import Any

import tabulate

from common.compare import Difference
from common.compare_text import show_interval, show_ratio, show_time
from common.history import Change, History, Series, parse_time
from common.text import markdown, printable

SCHEMA = "torchrun-bench-history/1"


def _title(series: Series) -> str:
    machine = series.machine
    devices = machine.get("devices")
    shown = ", ".join(map(str, devices)) if isinstance(devices, list) else str(devices)
    ranks, nodes = machine.get("world_size"), machine.get("num_nodes")
    return f"{series.benchmark} on {shown}, ranks {ranks}, nodes {nodes}"


def _groups(history: History) -> list[list[Series]]:
    groups: dict[str, list[Series]] = {}
    for series in history.series:
        groups.setdefault(f"{series.benchmark} {series.machine}", []).append(series)
    return list(groups.values())


def _fields(fields: Sequence[Difference]) -> str:
    if not fields:
        return "nothing that the reports record"
    return ", ".join(f"{d.field} {d.base[0]} -> {d.test[0]}" for d in fields)


def _change_rows(group: Sequence[Series]) -> list[list[str]]:
    changes: list[tuple[Series, Change]] = [(s, c) for s in group for c in s.changes]
    changes.sort(key=lambda pair: parse_time(pair[1].when[1]) or 0.0)
    return [
        [c.when[1], s.label, show_ratio(c.ratio), show_interval(c.ci95), _fields(c.fields)]
        for s, c in changes
    ]


def _newest_rows(group: Sequence[Series]) -> list[list[str]]:
    rows = []
    for series in group:
        newest = series.newest
        if newest is None:
            rows.append([series.label, "-", "-", "-", "-", series.missing])
            continue
        past = series.times_s[-1 - newest.past : -1]
        verdict = newest.verdict
        if verdict == "undecided":
            verdict += f": {newest.past} earlier runs at this level are too few"
        rows.append(
            [
                series.label,
                show_time(past) if past else "-",
                show_time(series.times_s[-1:]),
                show_ratio(newest.ratio) if past else "-",
                show_interval(newest.expected),
                verdict,
            ]
        )
    return rows


CHANGES = ["first run after", "case", "from then on", "95 % interval", "what changed with it"]
NEWEST = ["case", "before", "newest", "newest is", "95 % of runs", "verdict"]


def _newest_line(group: Sequence[Series]) -> str:
    last = group[0].last
    return f"newest run, of {last.started_at} ({last.path}):"


def summary(history: History) -> str:
    changes = sum(len(s.changes) for s in history.series)
    verdicts = [s.newest.verdict if s.newest else "missing" for s in history.series]
    names = ("slower", "faster", "as before", "undecided", "missing")
    counts = [f"{verdicts.count(name)} {name}" for name in names if name in verdicts]
    plural = "" if changes == 1 else "s"
    return f"{changes} change{plural}; newest runs: {', '.join(counts) or 'none'}"


def as_table(history: History, folder: str) -> str:
    """For a terminal."""
    lines = [printable(f"# torchrun-bench compare: history of {folder}", 500)]
    for group in _groups(history):
        runs = max(len(s.runs) for s in group)
        lines += ["", printable(f"{_title(group[0])}: {runs} runs, {len(group)} cases", 300), ""]
        changes = _change_rows(group)
        lines += [_table(CHANGES, changes)] if changes else ["no change found"]
        lines += ["", printable(_newest_line(group), 500), "", _table(NEWEST, _newest_rows(group))]
    lines += ["", f"# {summary(history)}"]
    if history.unread:
        lines.append(f"# not used ({len(history.unread)}):")
        lines += [printable(f"#   {line}", 500) for line in history.unread]
    return "\n".join(lines)


def _table(header: list[str], rows: list[list[str]]) -> str:
    tabulate.MIN_PADDING = 0
    cells = [[printable(cell, 200) for cell in row] for row in rows]
    text = tabulate.tabulate(cells, header, tablefmt="simple", disable_numparse=True)
    return "\n".join(line.rstrip() for line in text.splitlines())


def as_markdown(history: History, folder: str) -> str:
    """For an issue or a page."""
    escape: Callable[[str], str] = markdown
    lines = [f"**{summary(history)}**"]
    for group in _groups(history):
        lines += ["", f"### {escape(_title(group[0]))}", ""]
        changes = _change_rows(group)
        lines += _markdown_table(CHANGES, changes) if changes else ["no change found"]
        lines += ["", markdown(_newest_line(group), 500), ""]
        lines += _markdown_table(NEWEST, _newest_rows(group))
    if history.unread:
        lines += ["", f"not used ({len(history.unread)}):", ""]
        lines += [f"- {markdown(line, 500)}" for line in history.unread]
    return "\n".join(lines)


def _markdown_table(header: list[str], rows: list[list[str]]) -> list[str]:
    return [
        f"| {' | '.join(header)} |",
        "|---" * len(header) + "|",
        *(f"| {' | '.join(markdown(cell, 200) for cell in row)} |" for row in rows),
    ]


def as_json(history: History, folder: str, margin: float) -> dict[str, Any]:
    """For a program."""
    return {
        "schema": SCHEMA,
        "folder": folder,
        "margin": margin,
        "not_used": history.unread,
        "series": [
            {
                "benchmark": s.benchmark,
                "machine": s.machine,
                "key": s.key,
                "label": s.label,
                "measure": s.measure,
                "runs": [
                    {"path": run.path, "started_at": run.started_at, "time_s": time}
                    for run, time in zip(s.runs, s.times_s, strict=True)
                ],
                "changes": [
                    {
                        "after": c.when[0],
                        "at": c.when[1],
                        "ratio": c.ratio,
                        "ci95": c.ci95,
                        "fields": [
                            {"field": d.field, "before": d.base[0], "after": d.test[0]}
                            for d in c.fields
                        ],
                    }
                    for c in s.changes
                ],
                "newest": s.newest
                and {
                    "ratio": s.newest.ratio,
                    "expected95": s.newest.expected,
                    "past": s.newest.past,
                    "verdict": s.newest.verdict,
                },
                "missing": s.missing,
            }
            for s in history.series
        ],
    }
