"""Sessions: runs of one host with gaps below an hour.

Runs of one session have more in common than runs of different times, so that many of them say
little about tomorrow's. docs/ci.md states when the session is the unit of observation.
"""

from collections.abc import Sequence
from datetime import datetime, timedelta

from analysis.runs.evidence import Side
from analysis.runs.load import Row, Run, instant

GAP = timedelta(hours=1)  # between two sessions of a host
ENOUGH = 6  # with this number of sessions on a side, the session is the unit of observation
Groups = list[list[int]]


def sessions_of(side: Side, positions: Sequence[int]) -> tuple[Groups, bool]:
    """Return the sessions among these runs of a side, each as indices into `positions`, and whether
    the start of every run is known.

    If a start is unknown, as for logs without dates in their lines, the runs in a file are a group.
    The time of the file is not used: it is that of the last copy or checkout.
    """
    when = [times_of(*side[position]) for position in positions]
    known = [(host, begin, end, i) for i, (host, begin, end) in enumerate(when) if begin and end]
    if len(known) < len(positions):
        files: dict[str | int, list[int]] = {}
        for i, position in enumerate(positions):
            files.setdefault(side[position][0].path or i, []).append(i)
        return list(files.values()), False
    groups: Groups = []
    last: tuple[str, datetime] | None = None
    for host, begin, end, i in sorted(known):
        if last and last[0] == host and begin - last[1] < GAP:
            groups[-1].append(i)
            last = host, max(last[1], end)
        else:
            groups.append([i])
            last = host, end
    return groups, True


def times_of(run: Run, row: Row | None) -> tuple[str, datetime | None, datetime | None]:
    """Return the host of a case, the start of its run, and the end, which is the start if the end
    is unknown."""
    start = (row.measured_at if row else "") or run.started_at
    begin = instant(start)
    if not begin and run.span:  # the dates in the lines of a log
        first, last = (instant(text.replace("/", "-")) for text in run.span)
        return "", first, last
    end = instant(run.ends.get(start, {}).get("finished_at"))
    host = str((row.hosts if row else []) or run.environment.get("hosts"))
    return host, begin, max(begin, end) if begin and end else begin
