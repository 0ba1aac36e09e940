"""tests/quotients.py finds numbers that do not agree, in outputs written by hand."""

import re

import pytest

from tests import quotients
from tests.quotients import printed, problems

COMPILED = """\
# 2 ranks on 1 node

m, batch size 4, fp32

          vs    95% ci      eager       step  samples/s
       eager  of ratio  gmean (s)  gmean (s)
---  -------  --------  ---------  ---------  ---------
ddp     1.30         -     0.0065     0.0050     1600.0
# two modes: 3 us (50%), 4 us (50%)
# on average a step takes 2.00 times this long; over all
#   iterations 800.0 samples/s
x          -         -          -     0.0050     1600.0  # 2026-11-28 03:12 UTC on vm
y  failed: why

# m, fp32: whole steps of ddp are 1.30 times (1.21 to 1.38) as
#   fast as eager ones by medians, and 0.90 times by means
"""


def test_numbers_that_agree_are_no_problem() -> None:
    """0.0065 / 0.0050 = 1.30; 2 * 4 / 0.005 = 1600."""
    assert problems("compile_sweep", COMPILED) == []


@pytest.mark.parametrize(
    ("right", "wrong", "said"),
    [
        (" 1.30 ", " 1.40 ", "'vs eager' is 1.40, expected 1.27"),
        (" 1600.0\n# t", " 1700.0\n# t", "'samples/s' is 1700.0, expected 1584"),
        ("eager       step", "eager      steps", "'step gmean (s)' is not printed beside it"),
        ("1.30 times", "1.31 times", "1.31 times is in no table"),
        (" 800.0", " 700.0", "2.00 does not follow from a row's samples/s"),
        ("of ratio", "of speed", ""),
        ("95% ci", "  load", "column 'load of ratio' is neither in CHECKS nor in MEASURED"),
    ],
)
def test_numbers_that_do_not_agree_are_found(right: str, wrong: str, said: str) -> None:
    found = "; ".join(problems("compile_sweep", COMPILED.replace(right, wrong, 1)))
    assert said in found
    assert bool(found) == bool(said)


SENTENCES = """
p2p_matrix: latency 2.93x the median time (60.00 us against [20.50|21.50] us), 9 sigmas
p2p_matrix: latency 2.93x the median time[ (60.00 us against 20.50 us)|], 9 sigmas
p2p_matrix: 4.00x the time of the other ([95.00|1520] GB/s against 380.0 GB/s)
replay: a step takes 5.09 ms (4 to 6) back to back, [31|33]% (26 to 39) of the job's step of 16.3 ms
parallel_sweep: busy for 20.9 ms (20 to 21) of a step's 30.7 ms, and is idle for [32|33]% of it
traffic: dp8, rank 0: dp, 8 ranks on 1 node: all_[gather|reduce] 10 x, 4G (bus 3.5G)
collectives:   2048  512  float32  sum  -1  4.00  0.51  0.5  0  [8.00|9.00]  0.26  0.3  0
"""


def test_sentences() -> None:
    """In brackets: what agrees with the rest, and what does not."""
    for text in SENTENCES.strip().splitlines():
        script, _, line = text.partition(":")
        right, wrong = (re.sub(r"\[(.*)\|(.*)\]", rf"\{n}", line) for n in (1, 2))
        assert problems(script, right) == []
        assert problems(script, wrong) != [], wrong


def test_a_printed_number_is_a_range() -> None:
    ranges = {"0.0051": (0.00505, 0.00515), "1,234": (1233.5, 1234.5), "-3": (-3.5, -2.5)}
    ranges |= {"6.82e-06": (6.815e-6, 6.825e-6), "1.5K": (1.45 * 1024, 1.55 * 1024)}
    for text, ends in ranges.items():
        assert (printed(text).low, printed(text).high) == pytest.approx(ends)
    share = 1 - printed("21.5") / printed("30.7")
    assert quotients.percent(share).meets(printed("30"))
    assert not quotients.percent(share).meets(printed("32"))
