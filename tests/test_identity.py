"""Numbers may be combined only if the same files, variables and versions made them, on all
ranks."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.report import load
from tests.process import Bench, Warm, copy_of_scripts

pytestmark = pytest.mark.smoke

FEW = ("-b", "8", "-e", "16", "--device", "cpu", "--iters", "3")  # two cases of collectives.py
MODEL = """
import torch
from layers import WIDTH

calls = 0

def loss(y):
    global calls
    calls += 1
    if calls > 3:  # not in the trial
        import late
    return y.mean()

def tiny(device):
    return torch.nn.Linear(WIDTH, 1), torch.ones(3, WIDTH), loss
"""


def test_a_report_of_an_edited_model_is_not_resumed(bench: Bench, here: Path) -> None:
    """The edited module is one that the model imports, and the report is already complete; or the
    run was killed after its first case, and a step of the next run imports the edited module."""
    (here / "mine.py").write_text(MODEL)
    right, wrong = {"layers.py": "WIDTH = 4\n", "late.py": "X = 1\n"}, "WIDTH = X = 400\n"
    for name, text in right.items():
        (here / name).write_text(text)
    flags = ("--model", "mine:tiny", "--iters", "3", "--no-breakdown", "--device", "cpu")
    run = bench("benchmarks/ddp_sweep.py", *flags, ranks=1)
    assert run.report.environment["contents"].keys() >= {"ddp_sweep.py", "mine", "layers"}
    for name, why in (
        ("layers.py", "has other contents of layers: the results are not comparable"),
        ("late.py", "late is not, or no longer, the file that earlier rows were measured with"),
    ):
        (here / name).write_text(wrong)
        before = run.path.read_bytes()
        run = bench("benchmarks/ddp_sweep.py", *flags, "--resume", ranks=1, status=1)
        assert why in run.reason
        assert run.path.read_bytes() == before
        (here / name).write_text(right[name])
        first, case, *_ = before.splitlines(keepends=True)
        run.path.write_bytes(first + case)
    run = bench("benchmarks/ddp_sweep.py", *flags, "--resume", ranks=1)
    assert [case.name for case in run.report.cases] == ["no ddp", "1M/1R"]


def test_a_resumed_run_marks_the_earlier_rows(bench: Bench) -> None:
    """Cases without a check are measured again."""
    bench("benchmarks/collectives.py", *FEW, "-c", "0", ranks=1)
    run = bench("benchmarks/collectives.py", *FEW, "--resume", ranks=1)
    assert [case.check for case in run.report.cases] == ["passed", "passed"]
    assert run.report.started_at not in [case.measured_at for case in run.report.cases]
    more = (*FEW[:3], "32", *FEW[4:])
    run = bench("benchmarks/collectives.py", *more, "--resume", ranks=1)
    marks = re.findall(r"^# (.*): measured 20\S+ \d\d:\d\d UTC on \S+$", run.out, re.M)
    assert marks == [case.name for case in run.report.cases[:2]]
    # hints are about the row that this run measured: three samples have no interval
    assert "95% intervals missing (-) or wider than +-10% in 1 of 1 case;" in run.out
    earlier, now = [text for text in run.out.splitlines() if "bytes take" in text]
    assert earlier.startswith("# measured 20")
    assert now.startswith("# all_reduce float32 sum: 32 bytes take ")
    assert len(run.report.ends) == 3
    again = bench("benchmarks/collectives.py", *more, "--resume", ranks=1)
    assert "others" not in again.report.end  # it measured nothing
    assert again.report.ends == run.report.ends


def test_ranks_with_other_files_are_refused(by_hand: Callable[..., Warm], tmp_path: Path) -> None:
    """Even if git reports the same commit."""
    script = copy_of_scripts(tmp_path / "copy") / "benchmarks" / "collectives.py"
    script.write_text(f"{script.read_text()}\n# edited\n")
    both = [f"{name} {' '.join(FEW)}" for name in ("benchmarks/collectives.py", script)]
    process = by_hand(*both, LOCAL_WORLD_SIZE="1")
    assert process.wait() in (2, 3)  # 3: rank 1 was too slow to learn why rank 0 ended
    begin = "collectives.py: error: expected the same files on all ranks, but collectives.py of ran"
    told = process.err.splitlines()  # one line for each node
    assert any(line.startswith(begin) for line in told), process.err


def test_variables_differ_between_nodes(by_hand: Callable[..., Warm], tmp_path: Path) -> None:
    """A warning has both values, and the report has them, too."""
    path = tmp_path / "report.jsonl"
    command = f"benchmarks/collectives.py {' '.join(FEW)} --json {path}"
    odd = {"NCCL_ALGO": "Ring", "NCCL_IB_DISABLE": "1", "NCCL_IB_HCA": "mlx5_1"}
    process = by_hand(command, command, last=odd, LOCAL_WORLD_SIZE="1")
    assert process.wait() == 0, process.err
    warning = r"^# warning: (\w+) of rank 1 on .+: (\w+) \(unset elsewhere\)$"
    differing = {"NCCL_ALGO": "Ring", "NCCL_IB_DISABLE": "1"}
    assert dict(re.findall(warning, process.out, re.M)) == differing
    told = load(str(path)).environment
    assert told["other_variables"] == [{"ranks": [1], "variables": differing}]
    assert len(told["differences"]) == 2
