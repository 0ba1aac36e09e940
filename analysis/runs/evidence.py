"""Which runs of a case are evidence: the rules behind the table, the gate and the page.

A run is not evidence for a case if the case failed or is missing, if the run was interrupted, if it
is a copy of another run, or if it was disturbed: other processes used more than a tenth of the
cores. A pair of runs may be disturbed, provided that the load was the same on both sides.
docs/compare.md explains the rules.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeGuard

from analysis.runs.duplicates import Side, duplicates
from analysis.runs.load import Row, Run
from harness.cli import cut

# Share of a node's cores used by other processes. A larger one disturbs a run; a larger difference
# between its two runs disturbs a pair.
BUSY = 0.1
NOT_RECORDED = "load not recorded"
DISTURBED = "other processes used more than a tenth of the cores"
UNEQUAL_LOAD = "other processes loaded the two runs of a pair differently"
OTHER_NODES = "load of other nodes not measured"
ALLOWED = "disturbed runs allowed"


@dataclass
class Evidence:
    """The runs of a case that count, by their positions in BASE and in TEST.

    base, test: the runs that are evidence. If runs are paired, the two lists are equal.
    base_timed, test_timed: these, and the runs that are left out only because of the load.
    left_out: label -> reason, for runs that are not evidence for any case because they were
    interrupted, copied or disturbed.
    base_why, test_why: position -> reason, for each run that is not evidence for this case.
    caveats: remarks about the load that belong to every verdict from these runs.
    """

    base: list[int] = field(default_factory=list)
    test: list[int] = field(default_factory=list)
    base_timed: list[int] = field(default_factory=list)
    test_timed: list[int] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    base_why: dict[int, str] = field(default_factory=dict)
    test_why: dict[int, str] = field(default_factory=dict)
    caveats: list[str] = field(default_factory=list)


def evidence(base: Side, test: Side, paired: bool, allow_disturbed: bool) -> Evidence:
    """The runs of a case that are evidence, and the reasons why other runs are not.

    paired: base[i] and test[i] ran next to each other in time, so both count or neither does.
    allow_disturbed: do not leave out runs because of the load.
    """
    found = Evidence()
    both = [*base, *test]
    copies = copies_of(both)
    whys = []
    for i, (run, row) in enumerate(both):
        why = why_incomplete(run)
        why = copies.get(i, why)
        if why:
            found.left_out[run.label] = why
        whys.append(why or why_no_time(row))
    found.base_why = {i: why for i, why in enumerate(whys[: len(base)]) if why}
    found.test_why = {i: why for i, why in enumerate(whys[len(base) :]) if why}
    found.base_timed = [i for i in range(len(base)) if i not in found.base_why]
    found.test_timed = [i for i in range(len(test)) if i not in found.test_why]
    if paired:
        in_both = [i for i in found.base_timed if i in found.test_timed]
        found.base_timed = found.test_timed = in_both
        other = "the other run of its pair, {}, does not count"
        for i in found.base_why.keys() ^ found.test_why.keys():
            if i in found.test_why:
                found.base_why[i] = other.format(test[i][0].label)
            else:
                found.test_why[i] = other.format(base[i][0].label)
    found.base, found.test = list(found.base_timed), list(found.test_timed)
    if not allow_disturbed:
        leave_out_disturbed(found, base, test, paired)
    used = [base[i][0] for i in found.base] + [test[i][0] for i in found.test]
    found.caveats = caveats_of(used, allow_disturbed)
    return found


def leave_out_disturbed(found: Evidence, base: Side, test: Side, paired: bool) -> None:
    """Remove runs, or pairs, from `found` because of the load."""
    if paired:
        for i in found.base_timed:
            a, b = base[i][0], test[i][0]
            if loads_differ(a, b):
                found.base.remove(i)
                loads = f"{load_text(a)} and {load_text(b)}"
                found.base_why[i] = found.test_why[i] = f"{UNEQUAL_LOAD}: {loads}"
                pair = f"{a.label} and {b.label} ({loads})"
                found.left_out[pair] = UNEQUAL_LOAD
        found.test = list(found.base)
        return
    sides = ((base, found.base, found.base_why), (test, found.test, found.test_why))
    for side, kept, whys in sides:
        for i in kept.copy():
            run = side[i][0]
            if is_disturbed(run):
                kept.remove(i)
                whys[i] = f"{DISTURBED}: {load_text(run)}"
                found.left_out[f"{run.label} ({load_text(run)})"] = DISTURBED


def caveats_of(runs: Sequence[Run], allow_disturbed: bool) -> list[str]:
    """Remarks about the load that belong to every verdict from these runs."""
    caveats = []
    if allow_disturbed:
        caveats.append(ALLOWED)
    if any(not run.loads for run in runs):
        caveats.append(NOT_RECORDED)
    elif any(has_unmeasured_nodes(run) for run in runs):
        caveats.append(OTHER_NODES)
    return caveats


def is_timed(row: Row | None) -> TypeGuard[Row]:
    """Whether a case was measured, passed, and has a time."""
    return row is not None and not row.failed and row.time_s > 0


def why_no_time(row: Row | None) -> str:
    """Why a case has no time in a run; "" if it has a time."""
    if is_timed(row):
        return ""
    if row is None:
        return "not measured"
    return "no time above 0" if row.check == "passed" else row.check


def why_incomplete(run: Run) -> str:
    """Why no case of a run is evidence; "" if the run completed. A failed case makes the whole run
    fail, but its other cases remain evidence."""
    if run.status == "failed":
        return "" if any(row.failed for row in run.rows.values()) else "the run failed"
    return "" if run.status == "complete" else "interrupted"


def copies_of(side: Side) -> dict[int, str]:
    """The position of each copy -> `a copy of old/1.log`.

    Of equal runs, the first one that was not interrupted counts: a report may have been copied
    before the run ended.
    """
    last = [i for i, (run, _) in enumerate(side) if why_incomplete(run)]
    found = duplicates(side, last)
    return {
        i: f"a copy of {cut([side[original][0].label for original in originals], 3)}"
        for i, originals in found.items()
    }


# -- load ------------------------------------------------------------------------------------------


def busiest_load(run: Run) -> tuple[float, int] | None:
    """The number of cores used by other processes on the busiest node, and the number of its cores;
    None if the load was not recorded."""
    return max(run.loads, key=lambda load: load[0] / load[1]) if run.loads else None


def is_disturbed(run: Run) -> bool:
    """Whether other processes used more than a tenth of a node's cores during the run."""
    load = busiest_load(run)
    return load is not None and load[0] > BUSY * load[1]


def load_text(run: Run) -> str:
    """`1.9 of 2 cores`"""
    load = busiest_load(run)
    return f"{load[0]:.3g} of {load[1]} cores" if load else "not recorded"


def has_unmeasured_nodes(run: Run) -> bool:
    nodes = run.environment.get("num_nodes") or 1
    return isinstance(nodes, int) and len(run.loads) < nodes


def loads_differ(a: Run, b: Run) -> bool:
    """Whether the loads of two runs differ by more than a tenth of the cores on any node."""
    shares = [[busy / cores for busy, cores in run.loads] for run in (a, b)]
    if not all(shares):  # a load that was not recorded is a caveat instead
        return False
    if len(shares[0]) != len(shares[1]):  # different nodes: compare the busiest ones
        shares = [[max(of_run)] for of_run in shares]
    return max(abs(x - y) for x, y in zip(*shares, strict=True)) > BUSY + 1e-9


def unusable(runs: Sequence[Run]) -> dict[str, str]:
    """The runs that are not evidence for any case, whatever the load: label -> reason. They were
    interrupted, or are copies of other runs; the label names the cases if only some are copies."""
    found = {run.label: why for run in runs if (why := why_incomplete(run))}
    copied: dict[tuple[str, str], list[str]] = {}  # run, reason -> cases
    for form in dict.fromkeys(form for run in runs for form in run.rows):
        side = [(run, run.rows.get(form)) for run in runs if form in run.rows]
        for copy, why in copies_of(side).items():
            run, row = side[copy]
            copied.setdefault((run.label, why), []).append(row.label if row else "")
    counts = {run.label: len(run.rows) for run in runs}
    for (label, why), cases in copied.items():
        found.setdefault(with_cases(label, cases, counts[label]), why)
    return found


def with_cases(label: str, cases: Sequence[str], count: int) -> str:
    """`r2.jsonl`, or `r2.jsonl (no ddp)` if not all cases of a run are meant."""
    return label if len(cases) >= count else f"{label} ({cut(cases, 3)})"


def by_reason(left_out: dict[str, str], most: int = 6) -> list[str]:
    """One line per reason: `a copy of a/01.jsonl: b/01.jsonl, b/02.jsonl`."""
    runs_by_reason: dict[str, list[str]] = {}
    for label, why in left_out.items():
        runs_by_reason.setdefault(why, []).append(label)
    return [f"{why}: {cut(runs, most)}" for why, runs in runs_by_reason.items()]
