"""Which runs of a case are evidence. The gate, the table and the page all ask this file.

Not evidence: a run in which the case failed or is missing, an interrupted run, a copy of another
run, and a disturbed run: one during which other processes used more than a tenth of the cores.
Runs that were started in pairs may be disturbed if both sides were disturbed alike.
docs/compare.md has the rules in words.
"""

import hashlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TypeGuard

from analysis.load import Row, Run
from common.cli import cut

BUSY = 0.1  # share of a node's cores: more used by other processes disturbs a run, or a pair
NOT_RECORDED = "load not recorded"
DISTURBED = "other processes used more than a tenth of the cores"
UNLIKE = "other processes used the cores unequally during the two runs of a pair"
OTHER_NODES = "load of other nodes not measured"
ALLOWED = "disturbed runs allowed"

Side = Sequence[tuple[Run, Row | None]]  # the runs of BASE or TEST, and the case in each


@dataclass
class Evidence:
    """The runs of a case that count, by their positions in BASE and in TEST.

    base, test: the runs that are evidence; the same positions on both sides if runs are paired.
    base_timed, test_timed: these, and those that are left out for their load alone.
    left_out: runs that are no evidence for any case, by label -> why: interrupted, copied or
    disturbed ones.
    base_why, test_why: the position of each run that is no evidence for this case -> why.
    caveats: what every verdict from these runs has to say.
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
    """The runs of a case that are evidence, and why the others are not.

    paired: base[i] and test[i] were neighbours in time, so they count together or not at all.
    allow_disturbed: the load is no reason to leave out a run.
    """
    found = Evidence()
    both = [*base, *test]
    copies = copies_of(both)
    whys = []
    for i, (run, row) in enumerate(both):
        why = unfinished(run)
        if i in copies:
            why = f"a copy of {both[copies[i]][0].label}"
        if why:
            found.left_out[run.label] = why
        whys.append(why or untimed(row))
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
    """Take runs, or pairs, out of `found` by their load."""
    if paired:
        for i in found.base_timed:
            a, b = base[i][0], test[i][0]
            if are_loaded_unlike(a, b):
                found.base.remove(i)
                loads = f"{load_text(a)} and {load_text(b)}"
                found.base_why[i] = found.test_why[i] = f"{UNLIKE}: {loads}"
                pair = f"{a.label} and {b.label} ({loads})"
                found.left_out[pair] = UNLIKE
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
    """What every verdict from these runs has to say about their load."""
    caveats = []
    if allow_disturbed:
        caveats.append(ALLOWED)
    if any(not run.loads for run in runs):
        caveats.append(NOT_RECORDED)
    elif any(has_unmeasured_nodes(run) for run in runs):
        caveats.append(OTHER_NODES)
    return caveats


def is_timed(row: Row | None) -> TypeGuard[Row]:
    """Whether a case was measured, did not fail, and has a time."""
    return row is not None and not row.failed and row.time_s > 0


def untimed(row: Row | None) -> str:
    """Why a case has no time in a run; "" if it has one."""
    if is_timed(row):
        return ""
    if row is None:
        return "not measured"
    return "it has none above 0" if row.check == "passed" else row.check


def unfinished(run: Run) -> str:
    """Why no case of a run is evidence; "" if the run ended in order. A failed case fails the run,
    but not its other cases."""
    has_failed_case = any(row.failed for row in run.rows.values())
    if run.status == "complete" or (run.status == "failed" and has_failed_case):
        return ""
    return "the run failed" if run.status == "failed" else "interrupted"


def identity(run: Run, row: Row | None) -> Hashable:
    """What two copies of a run have in common: host, start and samples of the case; the bytes of
    the report if it lacks host or start."""
    hosts = run.environment.get("hosts")
    if not (hosts and run.started_at):
        return run.digest or id(run)
    if row is None:
        return id(run)
    samples = repr((row.check, row.time_s, list(row.times_s)))
    return (str(hosts), run.started_at, hashlib.sha256(samples.encode()).hexdigest())


def copies_of(runs: Side) -> dict[int, int]:
    """The position of each copy -> that of the run it is a copy of, which comes first."""
    first: dict[Hashable, int] = {}
    copies = {}
    for i, (run, row) in enumerate(runs):
        original = first.setdefault(identity(run, row), i)
        if original != i:
            copies[i] = original
    return copies


# -- load ------------------------------------------------------------------------------------------


def load_of_others(run: Run) -> tuple[float, int] | None:
    """The number of cores that other processes used on the busiest node, and of how many; None if
    it was not recorded."""
    return max(run.loads, key=lambda load: load[0] / load[1]) if run.loads else None


def is_disturbed(run: Run) -> bool:
    """Whether other processes used more than a tenth of a node's cores during the run."""
    load = load_of_others(run)
    return load is not None and load[0] > BUSY * load[1]


def load_text(run: Run) -> str:
    """`1.9 of 2 cores`"""
    load = load_of_others(run)
    return f"{load[0]:.3g} of {load[1]} cores" if load else "not recorded"


def has_unmeasured_nodes(run: Run) -> bool:
    nodes = run.environment.get("num_nodes") or 1
    return isinstance(nodes, int) and len(run.loads) < nodes


def are_loaded_unlike(a: Run, b: Run) -> bool:
    """Whether the loads of two runs differ on some node by more than a tenth of the cores."""
    shares = [[busy / cores for busy, cores in run.loads] for run in (a, b)]
    if not all(shares):  # a load that was not recorded is a caveat
        return False
    if len(shares[0]) != len(shares[1]):  # different nodes: the busiest ones
        shares = [[max(of_run)] for of_run in shares]
    return max(abs(x - y) for x, y in zip(*shares, strict=True)) > BUSY + 1e-9


def unfit(runs: Sequence[Run]) -> dict[str, str]:
    """The label of each run that is no evidence for any of its cases, apart from its load -> why:
    it was interrupted, or it is a copy of another one."""
    found = {run.label: why for run in runs if (why := unfinished(run))}
    for form in dict.fromkeys(form for run in runs for form in run.rows):
        side = [(run, run.rows.get(form)) for run in runs if form in run.rows]
        for copy, original in copies_of(side).items():
            found.setdefault(side[copy][0].label, f"a copy of {side[original][0].label}")
    return found


def by_reason(left_out: dict[str, str], most: int = 6) -> list[str]:
    """`a copy of a/01.jsonl: b/01.jsonl, b/02.jsonl`: a line for each reason."""
    runs_by_reason: dict[str, list[str]] = {}
    for label, why in left_out.items():
        runs_by_reason.setdefault(why, []).append(label)
    return [f"{why}: {cut(runs, most)}" for why, runs in runs_by_reason.items()]


def noteworthy(left_out: dict[str, str]) -> list[str]:
    """`left out: a copy of a/01.jsonl: b/01.jsonl, b/02.jsonl`: a line for each reason."""
    return [f"left out: {line}" for line in by_reason(left_out)]
