"""ddp_sweep.py: interleaved settings, sentences about them, and overlap.

The other formulas are in tests/test_ddp_sweep.py.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import ddp_sweep
from benchmarks.ddp_sweep import Setting
from benchmarks.workloads.settings import (
    compare_rows,
    compare_settings,
    fastest,
    of_all,
    simultaneous,
)
from common.stats import Estimate, Times
from common.table import fitted
from harness.benchmark import Implausible
from harness.report import Case

LABELS = ["25MB none", "25MB bf16", "1MB none"]
BEGIN = "m, torch's default precision"


def swinging(seconds: float) -> list[float]:
    """6 rounds of one iteration, alternately 0.01 above and below `seconds` on a log scale."""
    return [seconds * float(np.exp(0.01 * (-1) ** i)) for i in range(6)]


# t(5) at 1 - 0.05 / 2 is 3.163; the logarithms have a standard deviation of 0.01 * sqrt(6 / 5)
HALF = 3.163 * 0.01 * (6 / 5) ** 0.5 / 6**0.5


def ends(ratio: Estimate) -> list[Any]:
    return [ratio.value, ratio.low, ratio.high]


def near(value: float, half: float = HALF) -> Any:
    return pytest.approx([value, value * np.exp(-half), value * np.exp(half)], rel=1e-4)


def interleaved(*seconds: list[float]) -> Case:
    """A case of 2 ranks. seconds: those of each setting in LABELS. One rank alone takes 0.9 s, and
    local compute 0.95 s."""
    key = {"ddp": True, "settings": ", ".join(LABELS[: len(seconds)]), "model": "m"}
    key |= {"dtype": "default", "device": "cpu", "global_batch": None, "accumulate": 1}
    key |= {"batch_size": 3, "bucket_size_mb": None, "comm_hook": None}
    names = ["step", *LABELS[1:]]
    rows = {name: [row] * 2 for name, row in zip(names, seconds, strict=False)}
    rows |= {"local compute": [[0.95] * 6] * 2, "no ddp": [[0.9] * 6]}
    case = Case(key=key, name="1M/2R", ranks=[0, 1])
    facts = ddp_sweep.Facts("a", "g", {}, 0)
    facts = facts._replace(others=(facts,) * (len(seconds) - 1))
    ddp_sweep.derive(case, Times(rows, [1] * 6), [facts, facts])
    return case


def test_ratios_to_the_first_setting_by_hand() -> None:
    """1.12 s / 1 s and 1.12 s / 1.4 s, each with an interval at 97.5%."""
    case = interleaved(swinging(1.12), [1.0] * 6, [1.4] * 6)
    metrics = case.metrics
    assert ends(metrics["25MB bf16 speed"]) == near(1.12)
    assert ends(metrics["1MB none speed"]) == near(0.8)
    # how many times as fast the fastest setting is
    assert ends(metrics["25MB none lead_of_fastest"]) == near(1.12)
    assert ends(metrics["1MB none lead_of_fastest"]) == near(1.4, 0)
    assert "25MB bf16 lead_of_fastest" not in metrics
    assert "25MB none speed" not in metrics
    # exposed is step - local compute; one rank alone takes 0.9 s
    assert metrics["exposed_s"].value == pytest.approx(1.12 - 0.95)
    assert metrics["25MB bf16 exposed_s"].value == pytest.approx(0.05)
    assert metrics["efficiency"].value == pytest.approx(0.9 / 1.12)
    assert metrics["1MB none efficiency"].value == pytest.approx(0.9 / 1.4)
    assert metrics["25MB bf16 samples_per_s"].value == pytest.approx(2 * 3 / 1.0)
    assert case.check == "passed"


def test_the_rows_of_an_interleaved_case() -> None:
    """In 80 columns."""
    case = interleaved(swinging(1.12), [1.0] * 6, [1.4] * 6)
    rows = ddp_sweep.rows_of(case)
    args: Any = SimpleNamespace(interleave=True, no_breakdown=False)
    text, _ = fitted(ddp_sweep.columns_of(args), rows, 80)
    cells = [re.split("  +", line)[:5] for line in text.splitlines()[-3:]]
    assert cells == [
        ["1M/2R 25MB none", "-", "-", "1120.00", "170.00"],
        ["1M/2R 25MB bf16", "1.12", "1.10 to 1.14", "1000.00", "50.00"],
        ["1M/2R 1MB none", "0.80", "0.79 to 0.81", "1400.00", "450.00"],
    ]
    for row, step in zip(rows, (1.12, 1.0, 1.4), strict=True):
        assert row.metrics["no_ddp_s"].value == pytest.approx(0.9)
        assert row.metrics["step_p50_s"].value == pytest.approx(step, rel=1e-4)
        assert not [name for name in row.metrics if " " in name]
    args.no_breakdown = True
    alone = [head.replace("\n", " ") for head in ddp_sweep.columns_of(args)]
    assert alone == ["", "vs first", "simult. 95% ci", "step gmean (ms)", "95% ci of step"]
    failed = Case(key=case.key, ranks=[0, 1], check="failed: OutOfMemoryError", name="1M/2R")
    assert ddp_sweep.rows_of(failed) == [failed]


def test_the_fastest_setting_is_significantly_faster_than_all_others() -> None:
    rows = ddp_sweep.rows_of(interleaved(swinging(1.12), [1.0] * 6, [1.4] * 6))
    first, *sentences = ddp_sweep.answer(rows)
    assert str(first).startswith(f"{BEGIN}, buckets of 25 MiB: DDP on 2 ranks trains 1.61 times (")
    assert sentences == [
        f"{BEGIN}, 2 ranks: 25 MiB with bf16 is 1.12 times (1.10 to 1.14) as fast as 25 MiB",
        f"{BEGIN}, 2 ranks: 1 MiB is 0.80 times (0.79 to 0.81) as fast as 25 MiB",
        f"{BEGIN}, 2 ranks: 25 MiB with bf16 is the fastest of 3 settings, 1.12 times (1.10 to "
        "1.14) as fast as 25 MiB, the next",
    ]


def test_settings_that_do_not_differ_significantly() -> None:
    """1.01 times: 0.996 to 1.024 at 97.5%. At 95% of a single ratio it would be significant."""
    rows = ddp_sweep.rows_of(interleaved(swinging(1.01), [1.0] * 6, [1.4] * 6))
    _, *sentences = ddp_sweep.answer(rows)
    assert sentences[0] == (
        f"{BEGIN}, 2 ranks: 25 MiB with bf16 and 25 MiB do not differ significantly: 1.01 times "
        "(1.00 to 1.02) as fast"
    )
    assert sentences[-1] == (
        f"{BEGIN}, 2 ranks: no setting is the fastest: 25 MiB with bf16 does not differ "
        "significantly from 25 MiB: 1.01 times (1.00 to 1.02)"
    )
    # with two settings the ratio is enough
    _, *sentences = ddp_sweep.answer(ddp_sweep.rows_of(interleaved(swinging(1.12), [1.0] * 6)))
    assert len(sentences) == 1
    wide = {"b": Estimate(2, 1.9, 2.1), "a": Estimate(2.5, 0.9, 6)}  # b is the next
    assert fastest("c", wide).endswith(
        "c does not differ significantly from a: 2.50 times (0.90 to 6.00)"
    )
    words = "which setting is the fastest is unknown: c and a cannot be compared, because their "
    assert fastest("c", {"b": Estimate(2, 1.9, 2.1), "a": Estimate(2.5)}).startswith(words)


def test_a_ratio_of_means_that_contradicts_that_of_typical_times() -> None:
    """Every third step stalls: 2 * 23.3 / 37.1 = 1.26, and 0.32 is outside of the interval."""
    samples_s = {"step": [[0.02, 0.02, 0.0713] * 4], "no ddp": [[0.0233] * 12]}
    case = Case(key={}, ranks=[0, 1], samples_s=samples_s)
    told = of_all(Estimate(0.32, 0.17, 0.63), case, case, "no ddp", 2)
    assert told == " by medians, and 1.26 times by means"
    for near in (Estimate(1.2, 1.1, 1.21), Estimate(1.3, 1.31, 1.4), Estimate(0.32)):
        assert of_all(near, case, case, "no ddp", 2) == ""
    # every fourth step of b takes 300 instead of 77.8 ms, 133.3 ms on average
    rows = []
    for name, step_s in {"a": [0.1] * 4, "b": [0.0778] * 3 + [0.3], "c": [0.2] * 4}.items():
        samples_s = {"step": [step_s * 6]}
        rows.append(Case(key={}, ranks=[0], name=name, samples_s=samples_s))
    lead = Estimate(1.25, 1.2, 1.3)
    rows[0].metrics["lead_of_fastest"] = rows[1].metrics["speed"] = lead
    rows[2].metrics |= {"lead_of_fastest": lead * 2, "speed": Estimate(0.5, 0.48, 0.52)}
    first, second, third = compare_rows(rows, lambda row: row.name)
    assert (
        first == "b is 1.25 times (1.20 to 1.30) as fast as a by medians, and 0.75 times by means"
    )
    assert second == "c is 0.50 times (0.48 to 0.52) as fast as a"
    assert third.startswith("by medians, b is the fastest of 3 settings, 1.25 times (")


def named_fastest(rng: np.random.Generator, times: Sequence[float]) -> str | None:
    """The setting that is called the fastest, or None. Blocks scatter by 2 percent."""
    labels = [f"{number}MB none" for number in range(len(times))]
    blocks = [seconds * np.exp(rng.normal(0, 0.02, 8)) for seconds in times]
    names = ["step", *labels[1:]]
    samples = {name: [block] for name, block in zip(names, blocks, strict=True)}
    found = compare_settings(Times(samples, [1] * 8), labels)
    leads = {label: found.get(f"{label} lead_of_fastest") for label in labels}
    [best] = [label for label, lead in leads.items() if lead is None]
    sentence = fastest(best, {label: lead for label, lead in leads.items() if lead})
    return best if sentence.startswith(best) else None


def test_how_often_a_setting_is_called_the_fastest() -> None:
    """Of equal settings in at most 5% of 500 runs, plus 2 standard deviations; one that is 10%
    faster nearly always."""
    rng = np.random.default_rng(5)
    for count in (2, 4, 9):
        said = [named_fastest(rng, [1.0] * count) is not None for _ in range(500)]
        assert np.mean(said) <= 0.05 + 2 * (0.05 * 0.95 / 500) ** 0.5, count
        found = [named_fastest(rng, [1.0] * (count - 1) + [0.9]) for _ in range(100)]
        assert found.count(f"{count - 1}MB none") >= 95, count
    assert [simultaneous(count) for count in (2, 3, 6)] == pytest.approx([0.95, 0.975, 0.99])


def planned(flags: str, *sizes: int) -> list[tuple[str, list[Any]]]:
    """The planned tables (title, cases) of a job of two ranks."""
    job: Any = SimpleNamespace(world_size=2, local_world_size=2, device=torch.device("cpu"))
    args = ddp_sweep.parse_args(f"--device cpu --model resnet18 {flags}".split())
    return [*ddp_sweep.plan(args, job, list(sizes), {}).items()]


def test_by_default_ddp_chooses_its_buckets() -> None:
    """It then limits the first bucket to 1 MiB, which it does not if it is given a size."""
    for flags, title, size in (
        ("", "DDP's default buckets", "default"),
        ("--bucket-size 25", "buckets of 25 MiB", 25.0),
    ):
        [(found, cases)] = planned(f"{flags} --world-sizes 2", 2)
        assert found.endswith(f", {title}")
        assert cases[1].key["bucket_size_mb"] == size


def test_settings_and_their_labels() -> None:
    mixed = ddp_sweep.settings_of({"ddp": True, "settings": "default bf16, 0.1MB none"})
    assert mixed == [Setting("default", "bf16"), Setting(0.1, "none")]
    assert (mixed[0].label, mixed[0].text) == ("default bf16", "default buckets with bf16")
    assert mixed[0].buckets == "DDP's default buckets with bf16"
    words = "default none fp32 none", "25MB bf16 bf16 static_graph+gradient_as_bucket_view"
    first, second = ddp_sweep.settings_of({"ddp": True, "settings": ", ".join(words)})
    assert first == Setting("default", "none", "fp32", "none")
    assert (first.label, second.label) == words
    assert first.text == "default buckets, fp32, no options"
    assert second.buckets == "buckets of 25 MiB with bf16, static_graph+gradient_as_bucket_view"
    assert ddp_sweep.options_of(first) == {}
    options = {"static_graph": True, "gradient_as_bucket_view": True}
    assert ddp_sweep.options_of(second) == options


def test_cases_of_interleave() -> None:
    flags = "--bucket-size 25,0.1 --comm-hook none,bf16"
    labels = ["25MB none", "25MB bf16", "0.1MB none", "0.1MB bf16"]
    [(_, cases)] = planned(f"{flags} --interleave", 1, 2)
    assert [case[:2] for case in cases] == [("no ddp", 1), ("1M/1R", 1), ("1M/2R", 2)]
    assert cases[2].key["settings"] == ", ".join(labels)
    assert [setting.label for setting in ddp_sweep.settings_of(cases[2].key)] == labels
    assert ddp_sweep.settings_of(cases[0].key) == []
    assert ddp_sweep.row_labels(cases)[:2] == ["no ddp", "1M/1R 25MB none"]
    _, cases = planned(flags, 2)[0]
    assert [case.name for case in cases] == ["no ddp", *(f"1M/2R {label}" for label in labels)]


def test_dtypes_and_options_alternate() -> None:
    """There is then one table, without a breakdown. One after the other, each dtype has one."""
    flags = "--dtype fp32,bf16 --ddp-options none,static_graph"
    [(_, cases)] = planned(f"{flags} --interleave", 2)
    dtypes = [(case.name, case.key["dtype"]) for case in cases]
    assert dtypes == [("no ddp fp32", "fp32"), ("no ddp bf16", "bf16"), ("1M/2R", None)]
    key = cases[2].key
    assert not key["breakdown"]
    labels = [f"default none {x} {y}" for x in ("fp32", "bf16") for y in ("none", "static_graph")]
    assert key["settings"] == ", ".join(labels)
    rows = ddp_sweep.rows_of(Case(key=key | {"device": "cpu"}, ranks=[0, 1], metrics={}))
    assert [ddp_sweep.model_of(row)[10:] for row in rows] == ["fp32", "fp32", "bf16", "bf16"]
    assert [ddp_sweep.setting_of(row).label for row in rows] == labels
    for _, cases in planned(flags, 2):
        assert [case.name for case in cases] == ["no ddp", "1M/2R none", "1M/2R static_graph"]
        assert [case.key["static_graph"] for case in cases] == [False, False, True]


def test_the_check_names_the_setting() -> None:
    good = ddp_sweep.Facts("a", "g", {}, 0)
    for second, expected in (
        (good, "passed"),
        (good._replace(gradients="h"), "after the steps the gradients of rank 1 differ"),
        (good._replace(parameters="not finite"), "parameters of rank 1 are not finite"),
    ):
        ranks = [good._replace(others=(setting, good)) for setting in (good, second)]
        begin = "" if second is good else "failed: 25MB bf16: "
        assert ddp_sweep.check_all(ranks, [0, 1], LABELS).startswith(begin + expected)


def row(exposed: Estimate, overlap: Estimate | None = None) -> Case:
    key = {"model": "m", "dtype": "fp32", "ddp": True, "global_batch": None, "device": "cpu"}
    key |= {"bucket_size_mb": 25.0, "comm_hook": "bf16"}
    metrics = {"step_s": Estimate(1.2, 1.1, 1.3), "exposed_s": exposed}
    metrics |= {"overlap": overlap} if overlap else {}
    return Case(key=key, ranks=[0, 1], metrics=metrics, name="1M/2R")


def test_exposed_communication_and_late_ranks() -> None:
    begin = "m, fp32, buckets of 25 MiB with bf16: DDP on 2 ranks takes 1.20 s (1.10 to 1.30) "
    for exposed, words in (
        (Estimate(-0.3, -0.4, -0.2), "nothing measurable (-0.40 to -0.20 s)"),
        (Estimate(0.1, -0.001, 0.3), "nothing measurable (0.00 to 0.30 s)"),  # not -0.00
        (Estimate(0.3), "0.30 s (no interval)"),
    ):
        [sentence] = ddp_sweep.answer([row(exposed)])
        assert sentence == f"{begin}per step; DDP adds {words} to a step, which takes 1.20 s"
    case = replace(row(Estimate(0.3, 0.2, 0.4)), ranks=[0, 1, 2, 3])
    case.metrics |= {"late_ranks": [1, 3], "late_wait_s": Estimate(0.5, 0.4, 0.6)}
    late = "; rank 1, rank 3 make the other ranks wait 0.50 s (0.40 to 0.60) of 1.20 s; DDP adds "
    assert late in str(ddp_sweep.answer([case])[0])
    first, second = row(Estimate(0.3, 0.2, 0.4)), row(Estimate(0.1, 0.05, 0.15))
    second.key["comm_hook"] = "none"
    sentences = [str(sentence) for sentence in ddp_sweep.answer([first, second])]
    begin = "m, fp32, buckets of 25 MiB"
    assert [x.split(":")[0] for x in sentences] == [f"{begin} with bf16", begin, "m, fp32"]
    assert sentences[2].endswith("are not ranked; --interleave compares them")


def test_overlaps_below_0_and_above_100_percent() -> None:
    """Only a significantly negative one has a possible cause."""
    exposed = Estimate(0.3, 0.2, 0.4)
    longer = row(exposed, Estimate(-0.2, -0.3, -0.1))
    unsure = [row(exposed, Estimate(-0.2, -0.5, 0.1)), row(exposed, Estimate(-9)), row(exposed)]
    assert ddp_sweep.interference([*unsure, longer]) == (
        "exposed exceeds communication alone for 1M/2R: computation and communication may slow "
        "each other down"
    )
    assert ddp_sweep.interference(unsure) is None
    for low in (1.1, 0.9):
        [sentence] = ddp_sweep.answer([row(Estimate(-0.1, -0.2, 0), Estimate(1.2, low, 1.3))])
        assert isinstance(sentence, Implausible) == (low > 1)


def test_powersgd_cannot_be_timed_alone() -> None:
    """Its hook does not send the low-rank factors all at once."""
    ddp: Any = None  # refused before it is used
    with pytest.raises(ValueError, match="powersgd cannot be timed alone"):
        ddp_sweep.average_alone(ddp, "powersgd")
