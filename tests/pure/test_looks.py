"""analysis/logs/series.py and runs/looks.py: what a series of step times shows before it becomes
one number."""

import itertools
import random
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from analysis.logs import series
from analysis.runs import looks
from tests.pure.reports import case, run, start
from tests.pure.reports import write as report

MS = r"took ([\d.]+) ms"


def write(path: Path, times_ms: Sequence[float], form: str = "step {} took {:.2f} ms") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [form.format(number, time_ms) for number, time_ms in enumerate(times_ms)]
    path.write_text("\n".join(lines) + "\n")


def near(base: float, seed: int, scatter: float = 0.05, count: int = 40) -> list[float]:
    draw = random.Random(seed)
    return [base + draw.gauss(0, scatter) for _ in range(count)]


def plus(times: Sequence[float], more: Callable[[int], float]) -> list[float]:
    """Times that are longer by something that depends on the number of the step."""
    return [t + more(i) for i, t in enumerate(times)]


def none(step: int) -> float:
    return 0.0


def write_sides(folder: Path, make: Any, runs: int = 6, names: Any = ("{}.log",)) -> None:
    """make: the times of a run; whether it is one of TEST, and its number. names: the files of
    BASE and, if others, of TEST."""
    for number in range(runs):
        write(folder / "old" / names[0].format(number), make(False, number))
        write(folder / "new" / names[-1].format(number), make(True, number))


def sides(
    folder: Path, base: Any, old: Any = none, new: Any = none, **options: Any
) -> tuple[int, str]:
    """The exit status and the output of a comparison. base: mean, scatter and number of the steps.
    old, new: what each step of BASE and of TEST takes longer."""

    def make(is_test: bool, n: int) -> list[float]:
        return plus(near(base[0], 2 * n + is_test, *base[1:]), new if is_test else old)

    write_sides(folder, make, **options)
    return compare(folder)


def compare(folder: Path, *words: str) -> tuple[int, str]:
    more = words if "--step" in words else ("--step", MS, *words)
    paths = [str(folder / "old"), "--test", str(folder / "new")]
    done = run("compare.py", *paths, *more, "--fail-on", "slower,faster")
    return done.returncode, done.stdout + done.stderr


def dated(path: Path, form: str, steps_per_s: int = 1) -> None:
    """Begin each line of a log with a date. form: what has a place for the second."""
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(form.format(i // steps_per_s) + t for i, t in enumerate(lines)))


# -- stalls ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("every", "wait_ms", "ratio", "text"),
    [
        # (9.4 + 18 / 4) / 9.4: one step of four waits for the loader, and takes 27.4 / 9.4
        (4, 18.0, r"1\.48x slower", "1 of 4 steps takes 2.9 times as long; the mean is 1.48 times"),
        # (9.4 + 120 / 20) / 9.4
        (20, 120.0, r"1\.64x slower", "1 of 20 steps takes 14 times as long; the mean is 1.64"),
        # every tenth step is faster: the mean falls by 8 / 10 of 9.4
        (10, -8.0, r"1\.09x faster", "1 of 10 steps takes 0.15 times as long"),
    ],
)
def test_the_mean_sees_stalls(
    tmp_path: Path, every: int, wait_ms: float, ratio: str, text: str
) -> None:
    """The median of a step stays, and the training takes longer, or is faster."""
    status, out = sides(tmp_path, [9.4], new=lambda i: wait_ms * (i % every == 1))
    assert status == 1, out
    assert re.search(r"^step +9.39\d ms +9.[34]\d+ ms .* same ", out, re.MULTILINE), out
    assert "97.5% interval" in out
    assert re.search(rf"^step, mean .* {ratio} .* (slower|faster) \[", out, re.MULTILINE), out
    assert f"# warning: TEST: {text}" in out
    assert "2 looks share the error rate of 5%" in out


@pytest.mark.parametrize("stall_ms", [0.0, 20.0])
def test_logs_that_stall_alike_have_one_line(tmp_path: Path, stall_ms: float) -> None:
    """A steady log gets no new line, and neither do logs with the same stalls."""
    stalls = [lambda i: stall_ms * (i % 4 == 1)] * 2
    status, out = sides(tmp_path, [9.4, 0.01], *stalls)
    assert (status, "mean" in out.replace("means", ""), "warning" in out) == (0, False, False), out


def test_median_and_mean_that_contradict_each_other_are_undecided(tmp_path: Path) -> None:
    """In BASE, one step of four takes 40 ms and the others 10; in TEST, all take 12 ms: the mean
    falls from 17.5 to 12 ms, and the median grows."""
    status, out = sides(tmp_path, [10], lambda i: 30 * (i % 4 == 1), lambda i: 2)
    assert status == 4, out
    assert re.search(r"^step +10.\d+ ms +12.\d+ ms +1.20x slower .* undecided$", out, re.MULTILINE)
    assert re.search(r"^step, mean .* 1.46x faster .* undecided$", out, re.MULTILINE), out
    assert "2 cases, undecided: median and mean contradict each other" in out


@pytest.mark.parametrize(
    ("times", "text"),
    [
        ([10.0, 10.0, 10.0, 29.0] * 5, "1 of 4 steps takes 2.9 times as long"),
        ([10.0] * 17 + [50.0, 10.0, 50.0], "1 of 10 steps takes 5 times as long"),
        ([10.0] * 5 + [20.0] + [10.0] + [20.0], "1 of 4 steps takes 2 times as long"),
        ([10.0] * 5 + [20.0, 10.0] + [20.0, 20.0], "1 of 3 steps takes 2 times as long"),
        ([10.0] * 5 + [20.0, 10.0] * 2, "2 of 9 steps take 2 times as long"),
        ([10.0] * 8, ""),
        (
            ([30.0] * 8 + [5.0] * 6) * 3,
            "18 of 42 steps, in blocks of about 6, take 0.17 times as long, as after restarts; "
            "--skip leaves out steps at the beginning of a log and after restarts that its step "
            "counter shows",
        ),
    ],
)
def test_a_sentence_about_unusual_steps(times: list[float], text: str) -> None:
    assert series.stall_text([times]) == text
    # blocks end where logs do
    text = text.replace("2 of 9", "4 of 18").replace("18 of 42", "36 of 84")
    assert series.stall_text([[2 * t for t in times], times]) == text


# -- two kinds of steps ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("slow_ms", "is_slow", "scatter", "ratio", "text"),
    [
        # (29 * 100 + 31 * 140) / (31 * 100 + 29 * 140); the medians are 100 and 140 ms
        (40, lambda i, is_test: i >= 31 - 2 * is_test, 0.1, "1.01x slower", "87 of 180"),
        # nobody trains at a median of 150 ms
        (100, lambda i, is_test: i % 2 > 0, 0.1, "1.00x", "90 of 180"),
        (100, lambda i, is_test: i % 2 > 0, 2.0, "1.00x", "90 of 180"),
        # only TEST: (100 + 140) / 2 / 100
        (40, lambda i, is_test: is_test and i % 2 > 0, 0.1, "1.20x slower", "90 of 180"),
    ],
)
def test_a_median_between_two_kinds_of_steps_does_not_decide(
    tmp_path: Path, slow_ms: float, is_slow: Any, scatter: float, ratio: str, text: str
) -> None:
    old, new = (partial(is_slow, is_test=is_test) for is_test in (False, True))
    steps = [100, scatter, 60]
    out = sides(tmp_path, steps, lambda i: slow_ms * old(i), lambda i: slow_ms * new(i), runs=3)[1]
    assert not re.search("^step  ", out, re.MULTILINE), out
    assert re.search(rf"^step, mean .* {ratio} ", out, re.MULTILINE), out
    low, high = r"(99\.|100\.)\d+ ms", rf"({99 + slow_ms}|{100 + slow_ms})\.\d ms"
    told = rf"# warning: TEST: {text} steps.* take about {low}, and the others about {high}"
    assert re.search(told, out), out
    assert "looks share" not in out


@pytest.mark.parametrize(
    ("times", "least", "expected"),
    [
        ([100.0] * 10 + [140.0] * 10, 0.02, 120.0),
        ([100.0] * 14 + [140.0] * 6, 0.02, 120.0),  # n = 20: the 6th to the 15th smallest
        ([100.0] * 15 + [140.0] * 5, 0.02, None),  # the median is clear
        ([100.0] * 9 + [140.0] * 10, 0.02, None),  # too few
        ([100.0] * 10 + [140.0] * 10, 0.5, None),  # neighbors among rounded numbers
        ([100.0 + i for i in range(40)], 0.0, None),
    ],
)
def test_two_kinds_of_steps(times: list[float], least: float, expected: float | None) -> None:
    assert looks.two_kinds(times, least) == expected


def test_reports_of_a_training_loop_have_the_same_looks(tmp_path: Path) -> None:
    """As docs/ci/train.py writes them. In one case of TEST every fourth step takes 0.3 s."""
    for number, side in itertools.product(range(3), ("old", "new")):
        steady, stalls = ([t / 1000 for t in near(100, 2 * number + k, 0.1)] for k in (0, 50))
        if side == "new":
            stalls = [t + 0.2 * (i % 4 == 1) for i, t in enumerate(stalls)]
        cases = [
            case(name, [t * (1 + 1e-4 * (side == "new")) for t in times], rounds=[])
            for name, times in (("steady", steady), ("stalls", stalls))
        ]
        about = {"benchmark": "my_training", "started_at": start(number)}
        report(tmp_path / side / f"{number}.jsonl", *cases, **about)
    paths = [str(tmp_path / "old"), "--test", str(tmp_path / "new")]
    done = run("compare.py", *paths, "--fail-on", "slower")
    assert done.returncode == 1, done.stdout
    for row in ("steady .* same", "stalls .* same", r"stalls, mean .* 1\.50x slower .* slower"):
        assert re.search(f"^{row}", done.stdout, re.MULTILINE), done.stdout
    assert "steady, mean" not in done.stdout
    assert "# warning: TEST, stalls: 1 of 4 steps takes 3 times as long; the mean" in done.stdout
    assert "2 looks share the error rate of 5%" in done.stdout


# -- slow starts and restarts ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("times", "starts", "expected"),
    [
        ([90.0, 31.0, 10.0, 10.0, 31.0, 10.0, 10.0, 10.0], [], [0, 1]),
        ([30.0, 10.0, 10.0, 10.0], [], []),  # not above 3 medians
        ([90.0, 90.0, 90.0, 10.0], [], []),  # the median of the second half is 50 ms
        ([90.0, 10.0], [], []),  # too few to know
        ([99.0, 10.0, 10.0, 10.0, 99.0, 10.0, 10.0, 10.0], [4], [0, 4]),
    ],
)
def test_slow_leading_steps(times: list[float], starts: list[int], expected: list[int]) -> None:
    assert series.slow_start(times, starts) == expected


def test_leading_steps_are_left_out_with_a_line(tmp_path: Path) -> None:
    slow = [lambda i: [3000, 400, *[0] * 40][i]] * 2
    status, out = sides(tmp_path, [9.4, 0.05, 42], *slow)
    assert status == 0, out
    assert "the first 2 steps of the logs of TEST took more than 3 medians" in out
    assert re.search(r"^step +9.\d+ ms +9.\d+ ms .* same ", out, re.MULTILINE), out
    assert "first 2" not in compare(tmp_path, "--skip", "2")[1]


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ([(1,), (2,), (3,), (1,), (2,)], [3]),
        ([(10, 100), (20, 100), (30, 100), (10, 100), (20, 100)], [3]),
        ([(300,), (310,), (320,), (310,), (320,), (330,)], []),  # ranks that are not in step
        ([(1,), (2,), (1,), (2,), (3,), (2,), (3,), (4,)], []),  # two ranks
        ([(300,), (310,), (320,), (330,), (340,), (310,), (320,)], [5]),  # from a checkpoint
        # epochs: two that are complete, with a part of another one at either end, with a number
        ([(1,), (2,), (3,), (1,), (2,), (3,)], []),
        ([(3,), (1,), (2,), (3,), (1,), (2,), (3,), (1,)], []),
        ([(0, 1), (0, 2), (0, 3), (1, 1), (1, 2), (2, 1)], []),
        # the second of four epochs was killed, and began again
        ([(1,), (2,), (3,), (4,), (1,), (2,), (3,), (1,), (2,), (3,), (4,), (1,)], [7]),
        # attempts: of other lengths, or twice from the same checkpoint to the same error
        ([(1,), (2,), (3,), (1,), (2,), (3,), (4,), (1,), (2,), (3,)], [3, 7]),
        ([(1,), (2,), (3,), (4,), (5,), (2,), (3,), (4,), (5,), (2,), (3,), (4,), (5,)], [5, 9]),
        ([(1, 1), (2, 2), (3, 3), (1, 4), (2, 5), (3, 6)], []),  # all steps are counted as well
        ([(7,), (3,), (5,), (9,), (1,)], []),
        ([(), (), (), ()], []),
        ([(1,), (2, 8), (2,), (3,), (1,), (2,)], [4]),
    ],
)
def test_restarts_of_the_step_counter(columns: list[tuple[int, ...]], expected: list[int]) -> None:
    assert series.restarts(columns) == expected


@pytest.mark.parametrize(
    "form", ["[{}] took {:.4f} ms", "2026-11-29 10:00:01,338 attempt 3 iteration {}/30 took {} ms"]
)
@pytest.mark.parametrize("skip", ["0", "20"])
def test_skip_applies_after_every_restart(tmp_path: Path, form: str, skip: str) -> None:
    """A requeued job appends to its log. Each attempt has 20 slow steps, and then 500 ms in 12 to
    15 steps."""
    for number in range(2):
        draw = random.Random(number)
        slow = [[3000 + 1000 * draw.random() for _ in range(20)] for _ in range(5)]
        for side, attempts in {"old": 1, "new": 4}.items():
            path = tmp_path / side / f"{number}.log"
            texts = []
            for more, part in enumerate(slow[:attempts]):
                write(path, part + near(500 + number, draw.randrange(999), 2.0, 12 + more), form)
                texts.append(path.read_text())
            path.write_text("".join(texts))
    _, out = compare(tmp_path, "--skip", skip)
    assert re.search(r"^step +50\d.\d ms +50\d.\d ms +1.00x ", out, re.MULTILINE), out
    assert ("the first 20 steps of the logs of BASE" in out) == (skip == "0")
    both = "the first 20 steps and 60 steps after restarts of the logs of TEST took more than"
    assert (both in out) == (skip == "0")


@pytest.mark.parametrize("skip", ["0", "1"])
def test_a_stall_at_the_start_of_every_epoch_counts(tmp_path: Path, skip: str) -> None:
    """Six epochs of 50 steps of 100 ms. In TEST, the first step of each takes 2,000 ms, and that of
    the log is left out: (294 * 100 + 5 * 2000) / 299 = 131.8."""
    for (side, first_ms), number in itertools.product((("old", 100), ("new", 2000)), range(4)):
        path = tmp_path / side / f"{number}.log"
        texts = []
        for epoch in range(6):
            rest = near(100, 8 * epoch + 2 * number + (side == "new"), 0.05, 49)
            write(path, [first_ms, *rest], "[{:4}/50] took {:.2f} ms")
            texts.append(path.read_text())
        path.write_text("".join(texts))
    status, out = compare(tmp_path, "--skip", skip)
    assert status == 1, out
    assert re.search(r"^step, mean +100.0 ms +131.8 ms +1.32x slower ", out, re.MULTILINE), out
    assert re.search(r"^step +100.0 ms +100.0 ms .* same ", out, re.MULTILINE), out
    assert ("the first 1 step of the logs of TEST took more than 3" in out) == (skip == "0")


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ([0.25 * i for i in range(1, 11)], True),
        ([0.25 * i for i in range(1, 10)], False),  # too few
        ([100 + 0.5 * i for i in range(30)], True),
        ([100 + 0.5 * i for i in range(29)], False),  # may be a drift
        ([1 + i // 4 for i in range(40)], True),  # whole seconds
        ([*range(1, 13)] * 3, True),  # since the start of the epoch
        ([100.0] * 40, False),
        ([8.0] * 20 + [8.1] * 20 + [8.2] * 20, False),
        ([1 + i // 50 / 10 for i in range(600)], False),  # longer and longer sequences
        ([i // 16 for i in range(16, 800)], True),  # 16 ranks print whole seconds
        ([5.0], False),
        (near(100, 1, 2.0, 1000), False),
        ([t + 0.01 * i for i, t in enumerate(near(100, 1, 0.05, 1000))], False),  # a slow drift
    ],
)
def test_numbers_that_only_grow(numbers: list[float], expected: bool) -> None:
    assert series.only_grow(numbers) == expected


# -- ranks of one job ------------------------------------------------------------------------------


def job(seed: int, base: float, own: float = 0.02, count: int = 60) -> list[list[float]]:
    """The times of the four ranks of a job, with a common scatter of 0.6."""
    common = near(base, seed, 0.6, count)
    rows = [near(0, 10 * seed + rank, own, count) for rank in range(4)]
    return [plus(common, row.__getitem__) for row in rows]


ONE_JOB = "4 files of TEST are ranks of one job"
TOGETHER = "go together, as those of the ranks of one job or of runs with the same data"


@pytest.mark.parametrize(
    ("name", "seed", "base", "own", "dates", "expected"),
    [
        # two jobs whose steps differ by 3.5%: one run per side, which does not show the scatter
        ("attempt_0/{}/stdout.log", 2, 103.5, 0.02, (), f"{ONE_JOB}, whose steps go together"),
        ("slurm_4711_{}.out", 2, 103.5, 0.02, (), f"{ONE_JOB}, whose steps go together"),
        ("worker-{}/log.txt", 2, 103.5, 0.02, (), f"{ONE_JOB}, whose steps go together"),
        # noise of 0.35 of each rank: a correlation of 0.36 / 0.48 = 0.75
        ("rank{}.log", 2, 100, 0.35, (), ONE_JOB),
        ("{}.log", 2, 100, 0.35, (), TOGETHER),
        # all files see the same batches: paths or times of day decide
        ("{}.log", 1, 103.5, 0.02, (), TOGETHER),
        ("rank{}.log", 1, 103.5, 0.02, (), "4 files of BASE are ranks of one job"),
        ("{}.log", 1, 103.5, 0.02, [10] * 4, "4 files of BASE are ranks of one job"),
        ("{}.log", 1, 103.5, 0.02, [10, 11, 12, 13], "4 of BASE, 4 of TEST"),
    ],
)
def test_ranks_of_one_job_are_one_run(
    tmp_path: Path, name: str, seed: int, base: float, own: float, dates: Any, expected: str
) -> None:
    jobs = [job(number, middle, own, 200) for number, middle in ((1, 100.0), (seed, base))]
    write_sides(tmp_path, lambda is_test, n: jobs[is_test][n], 4, [name])
    for side, (n, hour) in itertools.product(("old", "new"), enumerate(dates)):
        dated(tmp_path / side / name.format(n), f"2026-11-29 {hour}:00:0{{}} ", 100)
    status, out = compare(tmp_path)
    assert expected in out
    assert ("go together" in out) == (expected[0] != "4" or "of one job" in expected)
    if seed == 2 and base > 100:
        assert status == 4, out
        assert "1 of BASE, 1 of TEST; margin 2%; one run per side" in out
        row = r"^step +100.\d ms +103.\d ms +1.0\dx slower +- +undecided"
        assert re.search(row, out, re.MULTILINE), out


def test_the_slowest_rank_counts(tmp_path: Path) -> None:
    """Rank 1 takes 0.2 ms longer. A file without steps is left out."""
    write(tmp_path / "old" / "stderr.log", [])

    def make(is_test: bool, n: int) -> list[float]:
        return plus(job(1 + is_test, 100.0)[n], lambda i: 0.2 * n)

    write_sides(tmp_path, make, 2)
    out = compare(tmp_path)[1]
    assert re.search(r"^step +100.\d ms +100.\d ms", out, re.MULTILINE)
    assert "left out: 1 file without a match of --step: " in out


@pytest.mark.parametrize(
    ("name", "dates", "count", "line"),
    [
        ("rank{}.log", False, 40, "the paths of {}/rank0.log, {}/rank1.log of BASE are those of"),
        ("{}.log", True, 40, "the times of day in {}/0.log, {}/1.log of BASE are those of"),
        ("{}.log", True, 8, "the times of day in {}/0.log, {}/1.log of BASE are those of"),
        ("{}.log", False, 40, ""),
        ("run{}.log", False, 8, ""),
    ],
)
def test_ranks_whose_steps_do_not_go_together(
    tmp_path: Path, name: str, dates: bool, count: int, line: str
) -> None:
    """They count as runs, and a line asks. The files of TEST have other names and no dates."""
    out = sides(tmp_path, [100, 0.5, count], runs=2, names=(name, "{}.log"))[1]
    if dates:
        for number in range(2):
            dated(tmp_path / "old" / name.format(number), "2026-11-29 10:00:{:02} ")
        out = compare(tmp_path)[1]
    assert "2 of BASE, 2 of TEST" in out
    assert ("the ranks of one job, but not their steps" in out) == bool(line)
    assert line.format(*[tmp_path / "old"] * 2) in out


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (lambda i: 0, "3 of BASE, 3 of TEST"),
        # each run of TEST becomes slower by 50%: the times go together, but not the changes
        (lambda i: 5 * i / 120, "3 of BASE, 3 of TEST"),
        # every third step waits for the loader: a correlation of 3 * 1/3 * 2/3 = 0.67
        (lambda i: 20 * (i % 3 == 0), "TEST: 1 of 3 steps takes 3 times as long"),
    ],
)
def test_separate_runs_are_not_ranks(tmp_path: Path, more: Any, said: str) -> None:
    status, out = sides(tmp_path, [10, 0.05, 120], new=more, runs=3)
    assert said in out
    assert "ranks" not in out
    assert "go together" not in out
    assert (status == 0) == (more(1) == more(3))


def test_the_levels_of_steps_after_restarts(tmp_path: Path) -> None:
    """Four attempts a log: 20 steps of 3.5 s, which are left out, and 10 of 0.5 s."""

    def make(is_test: bool, n: int) -> list[float]:
        return (near(3500 if is_test else 500, n, 1, 20) + near(500, n + 9, 1, 10)) * 4

    write_sides(tmp_path, make, 3)
    out = compare(tmp_path, "--skip", "20")[1]
    told = r"TEST: 120 of 300 steps, in blocks of about 10, take about (499|500).\d ms, and the"
    assert re.search(rf"{told} others about 3.500 s, as after restarts; --skip", out), out


@pytest.mark.parametrize("mark", ["-", "/"])
def test_dates_in_the_lines_tell_the_sessions(tmp_path: Path, mark: str) -> None:
    """Nights differ by up to 6%, the runs of one night hardly. With dates, 3% is undecided; without
    them, each run of TEST counts, and a line says what that requires."""
    levels = [97, 99, 100, 101, 103, 100]

    def make(is_test: bool, n: int) -> list[float]:
        return near(97.3 if is_test else levels[n], 2 * n + 19 * is_test)

    write_sides(tmp_path, make)
    out = compare(tmp_path)[1]
    assert "faster" in out
    assert "the intervals do not include the scatter between sessions, unless the" in out
    for side, n in itertools.product(("old", "new"), range(6)):
        day = 20 if side == "new" else n + 1
        form = f"2026{mark}11{mark}{day:02d} 02:00:{{:02d}} "
        dated(tmp_path / side / f"{n}.log", form)
    out = compare(tmp_path)[1]
    assert "TEST, 6 runs of one session, is judged by the scatter of the 6 sessions" in out
    assert "undecided" in out


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([*range(12)], [2 * x for x in range(12)], 1.0),
        ([*range(12)], [-x for x in range(12)], -1.0),
        ([*range(9)], [*range(9)], None),  # fewer than 10 steps
        ([1.0] * 12, [*range(12)], None),
        # 1 - 6 * (1 + 1) / (10 * 99): two neighbors are exchanged
        ([*range(10)], [1, 0, *range(2, 10)], 1 - 12 / 990),
    ],
)
def test_rank_correlation(a: list[float], b: list[float], expected: float | None) -> None:
    found = series.correlation(a, b)
    assert found == (None if expected is None else pytest.approx(expected))


# -- units -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("step", "unit", "line"),
    [
        (r"ran ([\d.]+)", "1/s", "1 / rate is 50.00 s in BASE; are the numbers"),
        (r"ran ([\d.]+)", "s", ""),
        (r"took ([\d.]+)", "s", "a step takes 22.00 s in TEST; is its unit"),
    ],
)
def test_a_long_step_is_said_aloud(tmp_path: Path, step: str, unit: str, line: str) -> None:
    for side, seconds in (("old", 21), ("new", 22)):
        write(tmp_path / side / "1.log", [seconds] * 5, "{} ran 0.02 or took {:.3f}")
    out = compare(tmp_path, "--step", step, "--unit", unit)[1]
    assert line in out if line else " is " not in out.split("case")[0]
