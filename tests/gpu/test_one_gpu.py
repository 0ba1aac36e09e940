"""Each script and each example on one GPU with one NCCL rank or several (share_gpu.py), and faults.

The ranks take turns on the GPU, so these tests tell that code works, never how fast it is.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.process import INJECT, ROOT, Bench

pytestmark = pytest.mark.gpu

SHARE_GPU = str(ROOT / "tests" / "gpu" / "share_gpu.py")
# traffic.py runs nothing on a device
SCRIPTS = sorted({path.stem for path in ROOT.glob("benchmarks/[a-z]*.py")} - {"traffic"})
EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.py"))
SHORT = ("--iters", "6", "--warmup-iters", "1")
SMALL = ("--model", "mobilenet_v3_small", "--image-size", "64", "--batch-size", "8", *SHORT)
FEW = ("-b", "64", "-e", "64K", "-f", "32", "-n", "4", "-d", "float32,bfloat16", *SHORT)
NANO = ("--model", "decoder-nano", *SHORT)
LINKS = ("--size", "1M", "-n", "4", *SHORT)
ON_CUDA = ("--device", "cuda", "--server-device", "cuda", *SHORT)

# By script: the number of processes besides its NCCL ranks (servers, a master), and its flags. The
# scripts not listed have none, and SHORT.
COMMANDS: dict[str, tuple[int, tuple[str, ...]]] = {
    "batch_update_ps": (1, ON_CUDA),
    "checkpoint_sweep": (0, (*NANO, "--modes", "all", "--strategy", "fsdp2,ddp")),
    "collectives": (0, ("--collective", "all", *FEW)),
    "compile_sweep": (0, ("--models", "toy-small", "--backends", "eager", *SHORT)),
    "ddp_rpc": (2, ON_CUDA),
    "ddp_sweep": (0, (*SMALL, "--comm-hook", "none,fp16")),
    "input_sweep": (0, ("--samples", "64", "--workers", "1", *SHORT)),
    # without --fail-on a rank with short turns on the GPU would count as slow
    "node_check": (0, ("--budget", "60", "--fail-on", "wrong", *SHORT)),
    "p2p_matrix": (0, LINKS),
    "parallel_sweep": (0, NANO),
    "parameter_server": (2, ("--nserver", "1", *SHORT)),
    "replay": (0, SHORT),
    "rpc_latency": (1, ("--sizes", "4,64K", *ON_CUDA)),
}


def processes_and_flags(script: str, nccl_ranks: int) -> tuple[int, list[str]]:
    """How many processes to start for nccl_ranks, and the flags of the script."""
    others, flags = COMMANDS.get(script, (0, SHORT))
    trainers = ["--ncudatrainer", str(nccl_ranks)] if script == "parameter_server" else []
    return nccl_ranks + others, [*flags, *trainers]


@pytest.fixture
def shared(bench: Bench) -> Callable[..., Any]:
    """shared("benchmarks/x.py", *flags, ranks=2, fault=None, ...) -> Run, on GPU 0."""

    def run(script: str, *flags: str, fault: str | None = None, **options: Any) -> Any:
        faulty = [INJECT, fault] if fault else []
        return bench(SHARE_GPU, *faulty, str(ROOT / script), *flags, timeout=400, **options)

    return run


def assert_passed(run: Any) -> None:
    """The run was on CUDA, and each of its cases passed or cannot be measured."""
    assert run.report.status == "complete"
    assert run.report.environment["cuda"]
    verdicts = [case.check.split(":")[0] for case in run.report.cases]
    assert "passed" in verdicts
    assert "failed" not in verdicts


@pytest.mark.parametrize("nccl_ranks", [1, 2])
@pytest.mark.parametrize("script", sorted(set(SCRIPTS) - {"p2p_matrix", "replay"}))
def test_each_script(script: str, nccl_ranks: int, shared: Callable[..., Any]) -> None:
    processes, flags = processes_and_flags(script, nccl_ranks)
    assert_passed(shared(f"benchmarks/{script}.py", *flags, ranks=processes))


def test_p2p_matrix(shared: Callable[..., Any]) -> None:
    assert_passed(shared("benchmarks/p2p_matrix.py", *LINKS, ranks=2))


@pytest.mark.parametrize("ranks", [1, 2])
def test_replay(shared: Callable[..., Any], tmp_path: Path, ranks: int) -> None:
    """The job of an example is recorded and replayed."""
    folder = str(tmp_path / "a trace")
    kind = ["--ddp"] if ranks == 1 else []  # FSDP2 x TP calls no collective on a single rank
    shared("examples/record_collectives.py", folder, *kind, ranks=ranks, json=False)
    run = shared("benchmarks/replay.py", folder, *SHORT, ranks=ranks)
    assert_passed(run)
    assert "# not replayed: 0 of " in run.out


@pytest.mark.parametrize("name", EXAMPLES)
def test_each_example(name: str, shared: Callable[..., Any]) -> None:
    run = shared(f"examples/{name}", ranks=2, json=False)
    assert "95% interval" in run.out


@pytest.mark.parametrize(
    ("ranks", "mesh"),
    [
        *((2, "ddp2,dp2,tp2"), (2, "cp2,ep2"), (2, "cp2:ring"), (2, "pp2:gpipe,pp2:1f1b")),
        *((2, "pp2:interleaved,pp2:izb,pp2:zbv"), (4, "dp2tp2,dp2x2,dp2pp2:1f1b")),
    ],
)
def test_meshes(shared: Callable[..., Any], ranks: int, mesh: str) -> None:
    more = ["--no-breakdown"] if ranks == 4 else []
    assert_passed(shared("benchmarks/parallel_sweep.py", *NANO, "--mesh", mesh, *more, ranks=ranks))


def test_gloo_takes_cuda_tensors(bench: Bench) -> None:
    """Collectives that gloo lacks for CUDA tensors are skipped, and none fails."""
    flags = ("--collective", "all", *FEW, "--backend", "gloo")
    assert_passed(bench("benchmarks/collectives.py", *flags, ranks=2))


HOOKS = (*SMALL, "--iters", "12", "--world-sizes", "2", "--comm-hook", "none,fp16")
MESHES = (*NANO, "--iters", "12", "--mesh", "dp2tp2,dp4")
GRAPHS = ("--collective", "all_reduce", "-G", "3", *FEW)


@pytest.mark.parametrize(
    ("script", "ranks", "flags", "fault"),
    [
        # rank 1 fails in a timed block or before the model exists; rank 0 waits for it in NCCL
        ("ddp_sweep", 2, (*HOOKS, "--no-breakdown"), "step-raises"),
        ("ddp_sweep", 2, (*HOOKS, "--no-breakdown"), "build-raises"),
        # kernels of one communicator wait for those of another: both must be aborted together
        ("parallel_sweep", 4, (*MESHES, "--no-breakdown"), "step-raises"),
        # a twin fails while the other ranks are about to create the next twin's communicators
        ("parallel_sweep", 4, MESHES, "twin-raises"),
        # NCCL does not release a communicator while graphs that use it exist
        ("collectives", 2, GRAPHS, "graph-raises"),
        ("collectives", 2, GRAPHS, "graph-raises,cyclic-graphs"),
        ("p2p_matrix", 2, LINKS, "graph-raises"),
        ("p2p_matrix", 2, LINKS, "graph-raises,cyclic-graphs"),
    ],
)
def test_the_next_case_is_measured_after_a_failure(
    shared: Callable[..., Any], script: str, ranks: int, flags: tuple[str, ...], fault: str
) -> None:
    words = (*flags, "--timeout", "60")
    run = shared(f"benchmarks/{script}.py", *words, ranks=ranks, fault=fault, status=1)
    verdicts = [case.check for case in run.report.cases]
    assert any("injected" in verdict for verdict in verdicts)
    if script != "p2p_matrix":  # the matrix of 2 ranks is one case
        assert verdicts[-1] == "passed"


def test_a_hang_over_nccl_is_named(shared: Callable[..., Any]) -> None:
    """The flight recorder of NCCL is read while rank 0 waits for an all-reduce that rank 1 never
    enters. Torch 2.14 has no recorder for nccl2."""
    flags = ("--collective", "all_reduce", *FEW, "--iters", "12", "--timeout", "20")
    run = shared(
        "benchmarks/collectives.py", *flags, ranks=2, fault="stops-in-all-reduce", status=1
    )
    assert "rank 1" in run.err
    assert "does not answer" in run.err
    assert re.search(r"last collective nccl\w*:all_reduce", run.err)  # or nccl2:
