"""One HTML file of sections: lines, tables and figures. What report.py writes."""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from analysis import show
from analysis.figures import svg
from analysis.load import Run

# a path from the root on, of two names or more; not of an address, and no end of an element
ABSOLUTE = re.compile(r"""(?<![\w/.<~$}-])/(?!/)[^\s/:;,'"=<>|()]+(?:/+[^\s/:;,'"=<>|()]+)+/?""")


class Table(NamedTuple):
    title: str
    header: Sequence[Any]
    rows: list[Any]  # lists of cells
    marks: dict[int, str]  # number of a row -> why it stands out: failed, faster or differs
    words: int = 100  # the number of columns of words, which precede those of numbers


@dataclass
class Section:
    """A part of the page, in this order."""

    title: str
    tables: list[Table]  # below the figures
    answers: list[str] = field(default_factory=list)  # in bold
    loud: list[str] = field(default_factory=list)  # warnings, each in a box
    first: list[Table] = field(default_factory=list)  # above the figures
    notes: list[str] = field(default_factory=list)
    quiet: list[str] = field(default_factory=list)  # notes that few readers need
    figures: Callable[[], list[Figure]] = list
    folded: bool = False  # whether the page shows its title alone, until it is opened


def as_page(title: str, sections: Sequence[Section]) -> str:
    """The document. Every string of a report is cleaned and escaped where it is put in."""
    import jinja2  # here: if it is missing, analysis/ has said so
    from markupsafe import Markup

    jinja = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        finalize=lambda value: value if isinstance(value, Markup) else show.clean(value, 500),
    )
    jinja.filters["svg"] = lambda figure: Markup(svg(figure))  # matplotlib escapes its texts
    return jinja.get_template("report.html.j2").render(title=title, sections=sections)


# -- names without folders -------------------------------------------------------------------------


def short_names(paths: Sequence[str]) -> dict[str, str]:
    """The shortest end of each path that no other path has: `a/01` and `b/01` of two folders. The
    files of a folder have names of one form.

    Without the suffix of the file, unless two paths differ in that alone.
    """
    without = {path: PurePath(path).with_suffix("").parts for path in paths}
    if len(set(without.values())) < len(without):
        without = {path: PurePath(path).parts for path in paths}
    counts = parts_needed(without)
    of_folder: dict[PurePath, int] = {}
    for path, count in counts.items():
        folder = PurePath(path).parent
        of_folder[folder] = max(count, of_folder.get(folder, 0))
    return {
        path: end_of(parts, of_folder[PurePath(path).parent]) for path, parts in without.items()
    }


def parts_needed(parts: dict[str, tuple[str, ...]]) -> dict[str, int]:
    """Path -> how many of its last parts no other path ends in; all if there are not as many."""
    counts: dict[str, int] = {}
    for count in range(1, max(map(len, parts.values()), default=0) + 1):
        tally = Counter(parts[path][-count:] for path in parts)
        for path in parts.keys() - counts.keys():
            if tally[parts[path][-count:]] == 1 or count >= len(parts[path]):
                counts[path] = count
    return counts


def end_of(parts: tuple[str, ...], count: int) -> str:
    return str(PurePath(*parts[-count:]))


def name_reports(runs: Sequence[Run]) -> None:
    """Call each report by the end of its path: a page names no folders of a machine."""
    paths = [run.path or "" for run in runs]
    names = short_names(paths)
    for run, path in zip(runs, paths, strict=True):
        which = run.label.removesuffix(path)  # `run 2 of `
        run.label = show.clean(f"{which}{names[path]}", 60)


def without_folders(texts: Sequence[str]) -> Callable[[str], str]:
    """A function that shortens the absolute paths in any text to `.../name`, with as many folders
    as tell apart those in `texts`."""
    found = list(dict.fromkeys(path for text in texts for path in ABSOLUTE.findall(text)))
    parts = {path: PurePath(path).parts[1:] for path in found}
    counts = parts_needed(parts)

    def shorten(match: re.Match[str]) -> str:
        path = match[0]
        if path not in counts:
            return f".../{PurePath(path).name}"
        return f".../{end_of(parts[path], counts[path])}"

    return lambda text: ABSOLUTE.sub(shorten, text)


def texts_of(value: Any) -> list[str]:
    """Every text in lists and dicts of JSON; not the names of fields."""
    if isinstance(value, str):
        return [value]
    entries = value.values() if isinstance(value, dict) else value
    return [text for entry in entries for text in texts_of(entry)] if is_nested(value) else []


def is_nested(value: Any) -> bool:
    return isinstance(value, (list, tuple, dict))


def changed(value: Any, change: Callable[[str], str]) -> Any:
    """A copy of JSON in which every text is changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {name: changed(entry, change) for name, entry in value.items()}
    return [changed(entry, change) for entry in value] if is_nested(value) else value


def hide_folders(runs: Sequence[Run], commands: dict[str, str]) -> dict[str, str]:
    """Shorten the absolute paths in all that a page shows of these runs, and in the commands.

    Returns the commands. Two paths that differ stay different.
    """
    texts = list(commands.values())
    for run in runs:
        texts += texts_of([run.environment, run.argv, run.end, run.resumed])
        for row in run.rows.values():
            texts += texts_of([row.key, row.name, row.table, row.check, row.label, row.metrics])
    shorten = without_folders(texts)
    for run in runs:
        for name in ("environment", "argv", "end", "resumed"):
            setattr(run, name, changed(getattr(run, name), shorten))
        for row in run.rows.values():
            for name in ("key", "name", "table", "check", "label"):
                setattr(row, name, changed(getattr(row, name), shorten))
            words = {name: shorten(x) for name, x in row.metrics.items() if isinstance(x, str)}
            row.metrics = row.metrics | words
        run.rows = {show.canonical(row.key): row for row in run.rows.values()}
    return {name: shorten(text) for name, text in commands.items()}
