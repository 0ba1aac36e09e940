"""Recompute each ratio, difference and rate that a script has printed from the numbers next to it.

`problems(script, out)` reads the tables and sentences in the output of a run. A printed number
stands for the range of numbers that are rounded to it, and a ratio is correct if some numbers of
these ranges give it. conftest.py checks the output of every run of a script in the tests, and
test_golden.py that of the recorded runs. A column that is neither in CHECKS nor in MEASURED is a
problem as well, so that a new ratio cannot be forgotten.
"""

import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

UNITS = {"": 1.0, "K": 2.0**10, "M": 2.0**20, "G": 2.0**30, "T": 2.0**40}
SCALES = {"us": 1e-6, "ms": 1e-3, "s": 1.0}  # in seconds
NUMBER = r"-?[\d,]*\d(?:\.\d+)?(?:e[+-]\d+)?"
TIME = rf"{NUMBER} (?:us|ms|s)\b"


@dataclass(frozen=True)
class Range:
    """The range of numbers that are printed in the same way."""

    low: float
    high: float

    def __add__(self, other: "Range | float") -> "Range":
        other = of(other)
        return Range(self.low + other.low, self.high + other.high)

    def __sub__(self, other: "Range | float") -> "Range":
        other = of(other)
        return Range(self.low - other.high, self.high - other.low)

    def __rsub__(self, other: float) -> "Range":
        return of(other) - self

    def __mul__(self, other: "Range | float") -> "Range":
        other = of(other)
        ends = [a * b for a in (self.low, self.high) for b in (other.low, other.high)]
        return Range(min(ends), max(ends))

    __rmul__ = __mul__

    def __truediv__(self, other: "Range | float") -> "Range":
        other = of(other)
        if other.low <= 0 <= other.high:  # may be 0, so the quotient may be anything
            return Range(float("-inf"), float("inf"))
        return self * Range(1 / other.high, 1 / other.low)

    def meets(self, other: "Range") -> bool:
        near = 1e-9 * max(abs(self.low), abs(self.high), 1e-12)
        return self.low <= other.high + near and other.low <= self.high + near


def of(number: "Range | float") -> Range:
    return number if isinstance(number, Range) else Range(number, number)


def printed(text: str) -> Range:
    """The range of numbers that are rounded to `0.0051`, `1,234`, `6.82e-06` or `1.001M`."""
    digits, unit = re.fullmatch(rf"({NUMBER})([KMGT]?)", text).groups()  # type: ignore[union-attr]
    mantissa, _, exponent = digits.replace(",", "").partition("e")
    places = len(mantissa.partition(".")[2])
    half = 0.5 * 10.0 ** (int(exponent or 0) - places) * UNITS[unit]
    value = float(digits.replace(",", "")) * UNITS[unit]
    return Range(value - half, value + half)


def seconds(text: str) -> Range:
    """The range of seconds that are printed as e.g. `76.1 ms`."""
    number, unit = text.split()
    return printed(number) * SCALES[unit]


def largest(*ranges: Range) -> Range:
    return Range(max(r.low for r in ranges), max(r.high for r in ranges))


@dataclass
class Row:
    """A row of a table. above: the output before the table. table: all rows of it."""

    above: str
    cells: dict[str, str]
    table: "list[Row]"
    earlier: "list[Row]"  # rows of all earlier tables

    @property
    def name(self) -> str:
        return next(iter(self.cells.values()))

    def __getitem__(self, head: str) -> Range:
        if head not in self.cells:
            raise KeyError(f"{head!r} is not printed beside it")
        return printed(self.cells[head])

    def above_it(self, pattern: str) -> Range:
        """The last number above the table that matches a pattern. Whole ones are exact counts."""
        text = re.findall(pattern, self.above)[-1]
        return of(float(text)) if text.isdigit() else printed(text)

    def of_its_name(self, head: str) -> Range:
        """The number in the last earlier table that has a row of this name and such a column."""
        rows = [row for row in self.earlier if row.name == self.name and head in row.cells]
        if not rows:
            raise KeyError(f"{head!r} is printed in no table above")
        return rows[-1][head]


DASHES = re.compile(r"^-+(  -+)+$")


def tables(out: str) -> Iterator[list[Row]]:
    """The rows of each table in the output."""
    lines, earlier = out.splitlines(), list[Row]()
    for number, line in enumerate(lines):
        if not DASHES.match(line):
            continue
        first = number
        while first and lines[first - 1].strip():
            first -= 1
        spans = [match.span() for match in re.finditer("-+", line)]
        heads: list[str] = []
        for start, end in spans:
            words = [above[start:end].strip() for above in lines[first:number]]
            heads.append(" ".join(word for word in words if word))
        rows: list[Row] = []
        for below in lines[number + 1 :]:
            if not below.strip() or DASHES.match(below):
                break
            if below.startswith("#") or "failed: " in below:
                continue
            cells = re.split(r"\s{2,}", below.partition("  # ")[0].strip())
            if len(cells) < len(heads):  # only the first row of a case has its name
                cells = [""] * (len(heads) - len(cells)) + cells
            if len(cells) == len(heads):
                named = dict(zip(unique(heads), cells, strict=True))
                rows.append(Row("\n".join(lines[:first]), named, rows, list(earlier)))
        yield rows
        earlier += rows


def unique(heads: list[str]) -> list[str]:
    """Number repeated headers: `95% ci`, `95% ci 2`."""
    counts = [heads[: i + 1].count(head) for i, head in enumerate(heads)]
    return [f"{head} {n}" if n > 1 else head for head, n in zip(heads, counts, strict=True)]


def percent(number: Range) -> Range:
    return number * 100


def size_in(row: Row) -> Range:
    """The size at the end of a row's name."""
    return printed(row.name.split()[-1])


def share_of_time(row: Row) -> Range:
    total = of(0.0)
    for other in row.table:
        total += other["calls"] * other["replayed (ms)"]
    return percent(row["calls"] * row["replayed (ms)"] / total)


def ranks_of(row: Row) -> int:
    """The number of ranks in `1M/2R`, `2M/8G (16)` or `2M/12G in all`; 1 for `no ddp`."""
    found = re.match(r"\d+M/(\d+)[GR](?: \((\d+)\))?", row.name)
    return int(found[2] or found[1]) if found else 1


def step_of_first(row: Row) -> Range:
    """Of the first setting on the same ranks, e.g. `1M/2R 25MB none` for `1M/2R 25MB bf16`."""
    ranks, _, _ = row.name.partition(" ")
    return next(r for r in row.table if r.name.startswith(f"{ranks} "))["step gmean (ms)"]


def batch_of_rank(row: Row) -> Range:
    """Samples of a rank in a step of ddp_sweep.py."""
    *_, title = re.findall(r"^.*(?:batch size|global batch) \d+ .*", row.above, re.MULTILINE)
    of_rank, whole, several = (
        re.search(pattern, title)
        for pattern in (r"batch size (\d+)", r"global batch (\d+)", r"(\d+) batches accum")
    )
    batch = int(of_rank[1]) if of_rank else int(whole[1]) // ranks_of(row) if whole else 0
    return of(float(batch * int(several[1] if several else 1)))


def step_of(row: Row) -> Range:
    """The step time of the same row, or of the row in the previous table."""
    head = "step gmean (ms)"
    return row[head] if head in row.cells else row.of_its_name(head)


def first_step(row: Row) -> Range:
    return row.table[0]["step gmean (s)"]


def efficiency(row: Row) -> Range:
    *_, kind = re.findall(r"\((weak|strong) scaling\)", row.above)
    share = row["one rank gmean (ms)"] / row["step gmean (ms)"]
    return percent(share / ranks_of(row) if kind == "strong" else share)


def workers_of(row: Row) -> int:
    return max(1, int(row.name.split()[0]))


# Numbers above a table: `{batch}` in a formula
ABOVE = {
    "batch": r"batch size (\d+)",
    "global": r"global batch (\d+)",
    "tokens": r", (\d+) tokens",
    "ranks": r"# (\d+) ranks? on",
    "trainers": r"(\d+) trainers?,",
    "samples": r"steps? of (\d+) samples?",
    "inputs": r"Linear\((\d+), ",
    "outputs": r"Linear\(\d+, (\d+)\)",
    "GB": r"AdamW: (\S+) GB",
    "every": r"every (\S+) s",
}


def percentiles(unit: str, rate: str, amount: str) -> dict[str, str]:
    """The rates next to the percentiles of a time. amount: rate * time, as at the median."""
    at_others = f"[p50 {unit}] * [p50 {rate}]"
    checks = {f"p{q} {rate}": f"{at_others} / [p{q} {unit}]" for q in (75, 90, 95)}
    return {f"p50 {rate}": f"{amount} / [p50 {unit}]"} | checks


def bandwidth(time: str) -> str:
    return f"[busbw factor] * [bytes] / [{time}] / 1e6"


LONGER = "largest([alone gmean (us)], [other alone gmean (us)])"
AXES = ("dp", "ddp", "tp", "pp", "cp", "ep")
# By script: columns that follow from others, with the formula. A cell `-` is skipped.
CHECKS: dict[str, dict[str, str]] = {
    "batch_update_ps": {
        "updates/s": "[gradients/s] / [gradients /update]",
        "MB/s": "[gradients/s] * ({inputs} + 1) * {outputs} * 8e-6",
    },
    "checkpoint_sweep": {
        "stall (s)": "[saving gmean (s)] - [alone gmean (s)]",
        "cost (%)": "percent([stall (s)] / {every})",
        "write GB/s": "{GB} / [upload gmean (s)]",
        "load (s)": "[read (s)] + [distribute (s)] + [apply (s)]",
        "load GB/s": "{GB} / [load (s)]",
    },
    "collectives": {
        "both / longer": f"[both gmean (us)] / {LONGER}",
        "serial / longer": f"([alone gmean (us)] + [other alone gmean (us)]) / {LONGER}",
    },
    "compile_sweep": {
        "vs eager": "[eager gmean (s)] / [step gmean (s)]",
        "samples/s": "{batch} * (1 if row.name.startswith('none') else {ranks}) / [step gmean (s)]",
        "vs first": "first_step(row) / [step gmean (s)]",
        "payback (steps)": "[compiling (s)] / [gain of a step (ms)] * 1e3",
    },
    "ddp_rpc": percentiles("sec/epoch", "samples/s", "[samples /epoch]"),
    "ddp_sweep": {
        "efficiency (%)": "efficiency(row)",
        "exposed commun. (ms)": "[step gmean (ms)] - [local compute gmean (ms)]",
        "overlap (%)": "percent(1 - [exposed commun. (ms)] / [commun. alone gmean (ms)])",
        "vs first": "step_of_first(row) / [step gmean (ms)]",
        "samples/s": "batch_of_rank(row) * ranks_of(row) / step_of(row) * 1e3",
        "per sample (ms)": "step_of(row) / (batch_of_rank(row) * ranks_of(row))",
        **percentiles("sec/iter", "ex/sec/dev", "batch_of_rank(row)"),
    },
    "input_sweep": {
        "wait (ms)": "[step gmean (ms)] - [resident gmean (ms)]",
        "workers needed": "workers_of(row) * [loader gmean (ms)] / [resident gmean (ms)]",
        "loader samples/s": "{batch} * {ranks} / [loader gmean (ms)] * 1e3",
        "training samples/s": "{batch} * {ranks} / [resident gmean (ms)] * 1e3",
    },
    "node_check": {},
    "p2p_matrix": {},
    "parallel_sweep": {
        **{f"exposed {x} (ms)": f"[step gmean (ms)] - [without {x}, gmean (ms)]" for x in AXES},
        "idle (%)": "percent(1 - [busy gmean (ms)] / [step gmean (ms)])",
        "tokens/s": "{global} * {tokens} / [step gmean (ms)] * 1e3",
        "tokens/s /rank": "[tokens/s] / {ranks}",
    },
    "parameter_server": {
        "samples/s": "{samples} * {trainers} / [step gmean (ms)] * 1e3",
        **percentiles("sec/step", "samples/s", "{samples} * {trainers}"),
        "variance ms^2": "[stdev ms] * [stdev ms]",
    },
    "replay": {
        "replayed / alone": "[replayed (ms)] / [alone (ms)]",
        "share (%)": "share_of_time(row)",
        "replayed (GB/s)": bandwidth("replayed (ms)"),
        "alone (GB/s)": bandwidth("alone (ms)"),
        "job (GB/s)": bandwidth("job (ms)"),
    },
    "rpc_latency": {
        "GB/s": "[calls/s] * size_in(row) * 2 / 1e9",
        "one way GB/s": "[one way calls/s] * size_in(row) / 1e9",
    },
    "traffic": {},
}


def evaluate(formula: str, row: Row) -> Range:
    """The value of a formula, in which `[header]` is a cell of the row."""
    code = re.sub(r"\[(.+?)\]", r"row['\1']", formula)
    code = re.sub(r"\{(\w+)\}", r"row.above_it(ABOVE['\1'])", code)
    return of(eval(code, globals(), {"row": row}))


# Other columns: names, settings, counts, and values that are measured or estimated independently.
# Those of all scripts, with statistics of a time and with intervals; then those of one script.
COMMON = re.compile(
    r"\b(95% ci|ci of \w+|gmean|mean|p\d\d (sec/|\(?[mu]?s\b)|slowest rank|memory)|\+-%"
)
MEASURED = {
    "batch_update_ps": "payload; gradients/s; gradients /update",
    "checkpoint_sweep": "mode; first extra (s); load by; read (s); distribute (s); apply (s); from",
    "collectives": "size; other size; #wrong",
    "compile_sweep": "compiling (s); gain of a step (ms); first step (s); graph breaks; "
    "recom- piles; graphs; start of backend (s); FSDP layers; tokens/s",
    "ddp_rpc": "samples /epoch; ms per batch; lookup; forward; backward; step",
    "ddp_sweep": "late (ms); tokens/s",
    "input_sweep": "",
    "node_check": "rank; host; matmul bf16 TFLOP/s; matmul fp32 TFLOP/s; copy GB/s; "
    "to device GB/s; to host GB/s; launch 1000/s; all reduce inside GB/s; "
    "all reduce between GB/s; bits",
    "p2p_matrix": "",
    "parallel_sweep": "mesh; theory (%); mfu (%); others wait (ms); min (GiB)",
    "parameter_server": "hook (ms); trainers; servers; phase; stdev ms; min ms; max ms; count",
    "replay": "op; group; bytes; replayed (ms); alone (ms); calls; busbw factor; job (ms); "
    "waits (ms)",
    "rpc_latency": "calls/s; one way calls/s",
    "traffic": "mesh; rank; all axes (ms); across nodes; parameters (bytes); gradients (bytes); "
    "optimizer (bytes); TFLOP",
}
OF_AXES = re.compile(rf"^\w+ (calls|\(bytes\)|\(ms\))$|{COMMON.pattern}")  # of traffic.py


def problems(script: str, out: str) -> list[str]:
    """Numbers in the output of a script that do not agree, in words.

    A terminal may lack the last columns. Columns that follow from those are not checked.
    """
    if script not in CHECKS or script not in MEASURED:
        return [f"expected an entry for {script} in CHECKS and in MEASURED of tests/quotients.py"]
    out = out.replace("\r\n", "\n")  # from a terminal
    others = OF_AXES if script == "traffic" else COMMON
    known = {"", *(" ".join(head.split()) for head in MEASURED[script].split(";"))}
    found: list[str] = []
    ratios: set[str] = set()  # as printed in tables
    steps: dict[str, Range] = {}  # by names of rows
    rates: list[Range] = []  # of rows
    for rows in tables(out):
        for row in rows:
            if row.cells.get("step gmean (s)", "-") != "-":
                steps[row.name] = row["step gmean (s)"]
            if row.cells.get("samples/s", "-") != "-":
                rates.append(row["samples/s"])
            for head, cell in row.cells.items():
                if formula := CHECKS[script].get(head):
                    ratios.add(cell)
                    found += divided(row, head, formula, "# not shown: " in out)
                elif head not in known and not others.search(head):
                    found.append(f"column {head!r} is neither in CHECKS nor in MEASURED")
    said = re.sub(r"\n#   ?", " ", out)  # unfold sentences
    for line in said.splitlines():
        if mean := re.search(MEAN, line):
            quotients = [rate / printed(mean["overall"]) for rate in rates]
            if rates and not any(map(printed(mean["longer"]).meets, quotients)):
                found.append(f"{mean['longer']} does not follow from a row's samples/s: {line}")
            continue
        found += [f"{problem}: {line}" for problem in in_sentence(script, line, ratios, steps)]
    return list(dict.fromkeys(found))


def divided(row: Row, head: str, formula: str, is_narrow: bool) -> list[str]:
    """The problem of a cell, if any. is_narrow: columns may be missing."""
    cell = row.cells[head]
    if cell == "-":
        return []
    try:
        wanted = evaluate(formula, row)
    except (KeyError, IndexError, AttributeError) as error:
        if is_narrow:
            return []
        return [f"{head!r} is {cell}, and cannot be checked: {error} ({row.cells})"]
    if printed(cell).meets(wanted):
        return []
    return [f"{head!r} is {cell}, expected {wanted.low:.6g} to {wanted.high:.6g} ({row.cells})"]


def slowdown(cost: str, middle: str) -> Range:
    """Of two times, or of two rates, the lower of which takes longer."""
    if cost.split()[1] in SCALES:
        return seconds(cost) / seconds(middle)
    return printed(middle.split()[0]) / printed(cost.split()[0])


# Sentences that say a number about two others, a and b, and how it follows from them
SENTENCES: dict[str, Callable[[str, str], Range]] = {
    rf"(?P<said>{NUMBER})x the (median time|time of the other) "
    rf"\((?P<a>{NUMBER} \S+) against (?P<b>{NUMBER} [^\s)]+)\)": slowdown,
    rf"busy for (?P<a>{TIME}) .* of a step's (?P<b>{TIME}), and is idle for (?P<said>{NUMBER})%": (
        lambda busy, step: percent(1 - seconds(busy) / seconds(step))
    ),
    rf"a step takes (?P<a>{TIME}) .*? back to back, (?P<said>{NUMBER})% "
    rf".*? of the job's step of (?P<b>{TIME})": lambda a, b: percent(seconds(a) / seconds(b)),
    rf"took (?P<a>{TIME}) instead of (?P<b>{TIME}), (?P<said>{NUMBER}) times as long": (
        lambda profiled, own: seconds(profiled) / seconds(own)
    ),
}


# A hint on a row whose steps stall: overall = the row's samples/s / longer
MEAN = rf"a step takes (?P<longer>{NUMBER}) times this long; .* (?P<overall>{NUMBER}) samples/s"


def in_sentence(script: str, line: str, ratios: set[str], steps: dict[str, Range]) -> Iterator[str]:
    """Problems of the quotients in a sentence. `N times` is in a table, or is the quotient of two
    steps that the sentence names. No table has a ratio of means over all iterations."""
    for pattern, follows in SENTENCES.items():
        for found in re.finditer(pattern, line):
            if not printed(found["said"]).meets(follows(found["a"], found["b"])):
                yield f"{found['said']} does not follow from {found['a']} and {found['b']}"
    if "x the median time," in line or "x the time of the other;" in line:
        yield "the parts of a quotient are missing"
    if "under the profiler" in line:
        return
    if script in ("collectives", "compile_sweep") and line.startswith("#"):
        for times_as in re.findall(rf"({NUMBER}) times\b(?! by means)", line):
            named = itertools.permutations([name for name in steps if name and name in line], 2)
            quotients = (steps[a] / steps[b] for a, b in named)
            if times_as not in ratios and not any(map(printed(times_as).meets, quotients)):
                yield f"{times_as} times is in no table"
    if script == "traffic":
        yield from buses(line)
    if script == "collectives":
        yield from bandwidths(line)


def buses(line: str) -> Iterator[str]:
    """Check `all_gather 10 x, 4G (bus 3.5G)` with the number of ranks."""
    if not (found := re.search(r", (\d+) ranks on ", line)):
        return
    n = int(found[1])
    for name, size, bus in re.findall(rf"(\w+) {NUMBER} x, (\S+) \(bus ([^)]+)\)", line):
        factor = {"all_reduce": 2 * (n - 1) / n, "send": 1.0, "recv": 1.0, "broadcast": 1.0}
        if not printed(bus).meets(printed(size) * factor.get(name, (n - 1) / n)):
            yield f"bus {bus} of {name} is not {size} * factor"


def bandwidths(line: str) -> Iterator[str]:
    """In a row in the format of nccl-tests, algbw is size / time for both variants."""
    words = line.split()
    if not re.match(r" {2,}\d+ +\d+ +[a-z]+\d+ ", line):
        return
    columns = 8 if len(words) >= 21 else 4  # with --per-iter-timing
    for first in (5, 5 + columns):
        time, algbw = words[first : first + 2]
        rate = printed(words[0]) / printed(time) / 1e3 if time != "N/A" else None
        if rate and not printed(algbw).meets(rate):
            yield f"algbw {algbw} is not {words[0]} / {time}"
