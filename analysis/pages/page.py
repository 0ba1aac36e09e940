"""The HTML page of report.py: sections with lines, tables and figures, in a single file."""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, NamedTuple

from analysis import show
from analysis.runs.load import Run
from harness import exits

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# An absolute path of at least two names, but not a part of a URL or the end of an HTML element
ABSOLUTE = re.compile(r"""(?<![\w/.<~$}-])/(?!/)[^\s/:;,'"=<>|()]+(?:/+[^\s/:;,'"=<>|()]+)+/?""")


class Table(NamedTuple):
    """A table of the page."""

    title: str
    header: Sequence[Any]
    rows: list[Any]  # lists of cells
    marks: dict[int, str]  # number of a row -> how to highlight it: failed, faster or differs
    words: int = 100  # number of columns with text, which precede those with numbers


@dataclass
class Section:
    """A section of the page. Its parts appear in the order of the fields, and `tables` last."""

    title: str
    tables: list[Table]  # below the figures
    answers: list[str] = field(default_factory=list)  # in bold
    warnings: list[str] = field(default_factory=list)  # each in a separate box
    first: list[Table] = field(default_factory=list)  # tables above the figures
    notes: list[str] = field(default_factory=list)
    details: list[str] = field(default_factory=list)  # in small print
    figures: Callable[[], "list[Figure]"] = list
    folded: bool = False  # show only the title until the reader opens the section


def as_page(title: str, sections: Sequence[Section]) -> str:
    """The HTML document. Every string of a report is cleaned and escaped when it is inserted."""
    import jinja2  # not above, so that analysis/ can report a missing package
    from markupsafe import Markup

    from analysis.pages.figures import svg

    jinja = jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda name: exits.read_text(f"analysis/pages/{name}")),
        autoescape=True,
        finalize=lambda value: value if isinstance(value, Markup) else show.clean(value, 500),
    )
    jinja.filters["svg"] = lambda figure: Markup(svg(figure))  # matplotlib escapes its text
    return jinja.get_template("report.html.j2").render(title=title, sections=sections)


# -- names without directories ---------------------------------------------------------------------


def short_names(paths: Sequence[str]) -> dict[str, str]:
    """The shortest suffix of each path that is unique: `a/01` and `b/01` from two folders.

    Files of the same folder get suffixes of the same length. File name extensions are omitted,
    unless two paths differ only in their extensions.
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
    """Path -> the number of trailing parts that are unique to it; all parts if none is unique."""
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
    """Label each report with the end of its path, because a page must not reveal directories."""
    paths = [run.path or "" for run in runs]
    names = short_names(paths)
    for run, path in zip(runs, paths, strict=True):
        which = run.label.removesuffix(path)  # `run 2 of `
        run.label = show.clean(f"{which}{names[path]}", 60)


def without_folders(texts: Sequence[str]) -> Callable[[str], str]:
    """A function that shortens absolute paths in a text to `.../name`, with as many directories as
    are needed to distinguish the paths in `texts`."""
    found = list(dict.fromkeys(path for text in texts for path in ABSOLUTE.findall(text)))
    parts = {path: PurePath(path).parts[1:] for path in found}
    counts = parts_needed(parts)

    def shorten(match: re.Match[str]) -> str:
        path = match[0]
        if path not in counts:
            return f".../{PurePath(path).name}"
        return f".../{end_of(parts[path], counts[path])}"

    return lambda text: ABSOLUTE.sub(shorten, text)


def map_texts(function: Callable[[str], Any], value: Any) -> Any:
    """A copy of nested lists and dicts, with the function applied to every text but dict keys."""
    if isinstance(value, str):
        return function(value)
    if isinstance(value, dict):
        return {name: map_texts(function, entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [map_texts(function, entry) for entry in value]
    return value


def hide_folders(runs: Sequence[Run], commands: dict[str, str]) -> dict[str, str]:
    """Shorten the absolute paths in everything that a page shows of these runs, and in commands.

    Returns the commands. Different paths remain different.
    """
    texts = list(commands.values())
    for run in runs:
        map_texts(texts.append, [run.environment, run.argv, run.end])
        for row in run.rows.values():
            words = [row.key, row.name, row.table, row.check, row.label, row.metrics]
            map_texts(texts.append, words)
    shorten = without_folders(texts)
    for run in runs:
        for name in ("environment", "argv", "end"):
            setattr(run, name, map_texts(shorten, getattr(run, name)))
        for row in run.rows.values():
            for name in ("key", "name", "table", "check", "label"):
                setattr(row, name, map_texts(shorten, getattr(row, name)))
            short = {name: shorten(x) for name, x in row.metrics.items() if isinstance(x, str)}
            row.metrics = row.metrics | short
        run.rows = {show.canonical(row.key): row for row in run.rows.values()}
    return {name: shorten(text) for name, text in commands.items()}
