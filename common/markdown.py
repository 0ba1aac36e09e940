"""Tables in GitHub's Markdown, with cells that cannot be anything but text."""

import re
from collections.abc import Sequence

# Letters of any script, digits and marks that mean nothing inside a line. An underscore within a
# word means nothing either. Everything else becomes a numeric reference, which CommonMark never
# takes for markup: no tag, link, code span, emphasis, end of a cell.
_PLAIN = re.compile(r"[^\W_]+(?:_+[^\W_]+)*|[ .,;?'+%()/=…±-]|:(?=[\d ])")


def escape(text: str) -> str:
    """The text as Markdown that shows it."""
    out, at = [], 0
    line = " ".join(text.split())
    while at < len(line):
        found = _PLAIN.match(line, at)
        if found:
            out.append(found[0])
            at = found.end()
        else:
            out.append(f"&#{ord(line[at])};")
            at += 1
    # GitHub makes links of these two without any markup
    return re.sub(r"\bwww\.", "www&#46;", "".join(out), flags=re.IGNORECASE)


def table(header: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[bool]) -> str:
    """A pipe table. right: which columns are aligned to the right."""
    head = [escape(cell) or " " for cell in header]
    rule = ["--:" if number else ":--" for number in right]
    body = [[escape(cell) for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [head, rule, *body])
