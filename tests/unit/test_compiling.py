"""common/compiling.py and common/compile_report.py."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from common import compiling
from common.compile_facts import start_counting
from common.compile_report import (
    compare,
    cost_tables,
    rank_metrics,
    step_columns,
    title,
    widest_row,
)
from common.table import StreamedTable


def test_payback() -> None:
    assert compiling.payback_steps(10.0, 0.5, 0.25) == 40
    assert compiling.payback_steps(10.1, 0.5, 0.25) == 41
    assert compiling.payback_steps(10.0, 0.25, 0.5) is None
    assert compiling.payback_steps(10.0, 0.5, 0.5) is None
    assert compiling.payback_steps(-1.0, 0.5, 0.25) == 0


def test_speed_up() -> None:
    ratio, bounds = compiling.speed_up((6.0, [5.0, 8.0]), (2.0, [1.6, 2.5]))
    assert (ratio, bounds) == (3.0, [2.0, 5.0])
    assert compiling.speed_up((6.0, None), (2.0, [1.6, 2.5])) == (3.0, None)


def test_caches_are_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/mine")
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)

    def fail() -> None:
        with compiling.caches_in(tmp_path):
            assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path)
            assert os.environ["TRITON_CACHE_DIR"].startswith(str(tmp_path))
            raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        fail()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/mine"
    assert "TRITON_CACHE_DIR" not in os.environ
    with compiling.caches_in(None):
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/mine"


def test_start_of_a_backend() -> None:
    cpu = torch.device("cpu")
    assert compiling.start_backend("aot_eager", cpu) > 0
    with pytest.raises(compiling.CompileError, match="No module named 'tvm'; install it"):
        compiling.start_backend("tvm", cpu)


def test_only_the_compilers_own_errors_are_turned() -> None:
    def broken(graph: Any, inputs: Any) -> Any:
        raise ValueError("cannot do that")

    start_counting()
    compiled = torch.compile(lambda x: x + 1, backend=broken)
    with pytest.raises(compiling.CompileError, match="cannot do that"), compiling.compile_errors():
        compiled(torch.ones(2))
    with pytest.raises(torch.OutOfMemoryError), compiling.compile_errors():
        raise torch.OutOfMemoryError("too much")


FACTS = {
    **{"first_step_s": 3.0, "recompiles": 0, "recompile_s": 0.0, "start_s": 1.0},
    **{"memory_gib": 0.5, "graphs": 2, "graph_breaks": {"a print": 1}, "recompile_reasons": {}},
    **{"tokens": 64, "flops": 10**12, "peak_flops": 4e12},
}


def test_metrics_of_ranks_by_hand() -> None:
    """1 TFLOP a rank in half a second: 2 tflops, of 4 and 6 possible: 4 / 10."""
    facts = [FACTS, FACTS | {"first_step_s": 4.0, "peak_flops": 6e12, "memory_gib": 0.7}]
    metrics = rank_metrics(facts, 0.5)
    assert metrics["first_step_s"] == 4.0
    assert metrics["memory_gib"] == 0.7
    assert metrics["tokens_per_s"] == 256
    assert metrics["tflops"] == 2.0
    assert metrics["mfu"] == pytest.approx(0.4)


def test_no_mfu_without_every_peak() -> None:
    assert "mfu" not in rank_metrics([FACTS, FACTS | {"peak_flops": None}], 0.5)
    without = rank_metrics([FACTS | {"flops": None, "tokens": None}], 0.5)
    assert not {"mfu", "tflops", "tokens_per_s"} & set(without)


KEY = {"model": "toy", "dtype": "fp32", "strategy": "ddp", "compile_backend": "inductor"}
KEY |= {"batch_size": 8, "checkpoint": False, "optimizer": True}


def case(step_s: float, ci: list[float] | None, **metrics: Any) -> dict[str, Any]:
    times = {f"step_time_p{q}_s": step_s for q in (50, 75, 90, 95)} | {"step_time_ci95_s": ci}
    own = rank_metrics([FACTS | {"tokens": None}], step_s)
    found = {**times, **own, **metrics}
    return {"key": KEY, "metrics": found, "stop": {"ci95_rel": None}, "check": "passed"}


def test_comparison_by_hand() -> None:
    """3 s + 1 s of start - 0.5 s, at 0.25 s a step saved: 14 steps."""
    eager = case(0.5, [0.4, 0.6], first_step_s=0.5)
    found = compare(case(0.25, [0.2, 0.3])["metrics"], eager, None)
    assert found["vs_eager"] == 2.0
    assert found["vs_eager_bounds"] == pytest.approx([0.4 / 0.3, 3.0])
    assert found["compile_cost_s"] == 3.5
    assert found["payback_steps"] == 14
    assert "vs_none" not in found
    assert compare(case(0.25, None)["metrics"], None, None) == {}


def test_tables_with_gaps() -> None:
    told = case(0.25, [0.2, 0.3], vs_eager=2.0, vs_eager_bounds=[1.3, 3.0], payback_steps=14)
    doubt = case(0.25, None, vs_eager=1.1, vs_eager_bounds=None, payback_steps=900, mfu=None)
    skipped = case(0.25, None, graphs=0, tflops=0.00001234) | {"check": "skipped: too large"}
    table = StreamedTable(step_columns(KEY), widest_row([KEY]))
    rows = [table.row(one) for one in (told, doubt, skipped)]
    assert "2.00x " in rows[0] or rows[0].rstrip().endswith("-")
    assert "1.10x?" in rows[1]
    text = cost_tables([told, doubt, skipped], "RSS growth")
    assert title(KEY) in text
    assert "900?" in text
    assert " 14 " in text
    assert "# graph break, ddp inductor, ddp inductor, ddp inductor: a print" in text
    assert "# ddp inductor: check skipped: too large" in text
    assert "# ddp inductor: dynamo found nothing to compile" in text
    assert "1.23e-05" in text
    assert "None" not in text
    assert "nan" not in text
    assert cost_tables([], "RSS growth") == ""


def test_profile_is_the_mean_over_ranks() -> None:
    def of(step_s: float) -> dict[str, Any]:
        parts = ("compute", "communication", "overlapped", "idle")
        ranges = {"Forward": 0.001, "Backward": 0.002, "Optimizer": 0.003}
        return {"step_s": step_s, **{f"{part}_s": 0.0 for part in parts}, "ranges_s": ranges}

    text = cost_tables([case(0.25, None, profile=[of(0.010), of(0.014)])], "RSS growth")
    assert "12.00" in text
    assert "Optimizer" in text
