"""Models whose step communicates, under ddp_sweep.py and compile_sweep.py."""

from pathlib import Path

import pytest

from tests.process import Bench

MODELS = "tests.communicating_models"
SHORT = ("--iters", "6", "--warmup-iters", "1", "--timeout", "100")


@pytest.mark.smoke
@pytest.mark.parametrize("ranks", [2, 3])
def test_they_are_measured_on_several_ranks(bench: Bench, ranks: int) -> None:
    """Each case has a default group of its own. A rank that leaves does not stop the others, and
    groups that a case has created do not disturb the next one."""
    measured = ("towers", "norm", "own_group", "experts", "leaves", "plain")
    refused = ("sync_batch_norm", "fails_before_group", "leaves?passes=1")
    names = ",".join(f"{MODELS}:{name}" for name in (*refused, *measured))
    run = bench("benchmarks/ddp_sweep.py", *SHORT, "--models", names, ranks=ranks, status=1)
    for name in measured:
        cases = [case for case in run.report.cases if case.key["model"].endswith(name)]
        alone = [1, 1] if name == "plain" else []  # no ddp, 1M/1R
        assert [len(case.ranks) for case in cases] == alone + [2, 3][: ranks - 1]
        for case in cases:
            metrics, count = case.metrics, len(case.ranks)
            if name == "leaves":
                left = f"SystemExit: the last of {count} ranks left (communicating_models.py:"
                assert case.check.startswith(f"failed: {left}")
                assert case.check.endswith(f" (rank {count - 1})")
                continue
            assert case.check == "passed", name
            is_compared = name == "plain" and count > 1
            assert ("efficiency" in metrics) == ("late_s" in metrics) == is_compared
            assert ("exposed_s" in metrics) == case.key["ddp"]
    what = "so no ddp, 1M/1R and the efficiency are not measured"
    ops = ("allgather", "allreduce", "allreduce", "alltoall_base")
    for name, op in zip(("towers", "norm", "own_group", "experts"), ops, strict=True):
        assert f"# {MODELS}:{name}: its step communicates ({op}), {what}\n" in run.out
    for line in (
        "sync_batch_norm: ValueError: SyncBatchNorm expected input tensor to be on GPU",
        "fails_before_group: RuntimeError: no expert here (communicating_models.py:",
        f"leaves?passes=1: SystemExit: the last of {ranks} ranks left (communicating_models.py:",
    ):
        assert f"error: --model {MODELS}:{line}" in run.err


@pytest.mark.smoke
def test_the_losses_are_those_of_eager_steps_of_all_ranks(bench: Bench) -> None:
    copied = "docs.models.towers:towers?batch=8&width=16"
    names = ",".join([copied, *(f"{MODELS}:{name}" for name in ("norm", "experts"))])
    flags = ("--strategies", "none,ddp", "--backends", "eager,aot_eager", "--models", names)
    run = bench("benchmarks/compile_sweep.py", *SHORT, *flags)
    assert [case.name for case in run.report.cases] == ["ddp eager", "ddp aot_eager"] * 3
    assert {case.check for case in run.report.cases} == {"passed"}
    assert f"# {MODELS}:norm: its step communicates (allreduce), so cases of `none` are" in run.out


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("script", "flags"), [("ddp_sweep", "--world-sizes 1"), ("compile_sweep", "--strategies none")]
)
def test_one_rank_is_refused(bench: Bench, script: str, flags: str) -> None:
    words = (*SHORT, "--model", f"{MODELS}:norm", *flags.split())
    run = bench(f"benchmarks/{script}.py", *words, status=1)
    line = "norm: its step communicates (allreduce), and these cases have only one rank"
    assert f"--model {MODELS}:{line}" in run.reason
    assert not run.path.exists()


@pytest.mark.smoke
def test_a_world_of_one(bench: Bench) -> None:
    """Then nothing is left out: the collectives have one rank."""
    run = bench("benchmarks/ddp_sweep.py", *SHORT, "--model", f"{MODELS}:towers", ranks=1)
    assert run.checks == {"no ddp": "passed", "1M/1R": "passed"}


@pytest.mark.faults
def test_a_hang_in_the_trial(bench: Bench, here: Path) -> None:
    (here / "waits.py").write_text(
        "import torch, torch.distributed as dist\n"
        "def loss(y):\n"
        "    dist.get_rank() or dist.barrier()\n"
        "    return y.sum()\n"
        "def make(device): return torch.nn.Linear(4, 4), torch.ones(2, 4), loss\n"
    )
    flags = ("--model", "waits:make", "--timeout", "15")
    run = bench("benchmarks/ddp_sweep.py", *flags, status=1)
    assert "rank 0 on " in run.reason
    assert ", case 'trial of waits:make', setup: is behind the other ranks" in run.reason
