"""Strings of a report on their way to a terminal or a page: they are data, whoever wrote them."""

from common.markdown import escape


def printable(text: str, limit: int = 160) -> str:
    """The text in one line, without control characters, escape sequences or changes of direction.

    What is not printable becomes its escape, as `\\x1b`; what is longer than `limit` is cut.
    """
    shown = text if len(text) <= limit else text[: limit - 3] + "..."
    return "".join(c if c.isprintable() else _escaped(c) for c in shown)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def markdown(text: str, limit: int = 160) -> str:
    """The text as it is in a cell of a Markdown table: no markup, no HTML, no further cell."""
    return escape(printable(text, limit))
