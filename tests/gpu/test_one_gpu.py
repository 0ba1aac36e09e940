"""One GPU, one NCCL rank or several (share_gpu.py): each script, each example, and what fails.

The ranks take turns on the GPU, so these tests say that a path works, never how fast it is.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.process import INJECT, ROOT

pytestmark = pytest.mark.gpu

SHARE_GPU = str(ROOT / "tests" / "gpu" / "share_gpu.py")
# traffic.py runs nothing on a device
SCRIPTS = sorted({path.stem for path in ROOT.glob("benchmarks/*.py")} - {"traffic"})
EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.py"))
SHORT = ("--iters", "6", "--warmup-iters", "1")
SMALL = ("--model", "mobilenet_v3_small", "--image-size", "64", "--batch-size", "8", *SHORT)
FEW = ("-b", "64", "-e", "64K", "-f", "32", "-n", "4", "-d", "float32,bfloat16", *SHORT)
NANO = ("--model", "decoder-nano", *SHORT)
ON_CUDA = ("--device", "cuda", "--server-device", "cuda", *SHORT)

# By script: the processes beside its NCCL ranks (servers, a master), and its flags. Another one has
# no others, and SHORT.
COMMANDS: dict[str, tuple[int, tuple[str, ...]]] = {
    "batch_update_ps": (1, ON_CUDA),
    "checkpoint_sweep": (0, (*NANO, "--modes", "all", "--strategy", "fsdp2,ddp")),
    "collectives": (0, ("--collective", "all", *FEW)),
    "compile_sweep": (0, ("--models", "toy-small", "--backends", "eager", *SHORT)),
    "ddp_rpc": (2, ON_CUDA),
    "ddp_sweep": (0, (*SMALL, "--comm-hook", "none,fp16")),
    "input_sweep": (0, ("--samples", "64", "--workers", "1", *SHORT)),
    # slow is who has a short turn on the GPU
    "node_check": (0, ("--budget", "60", "--fail-on", "wrong", *SHORT)),
    "p2p_matrix": (0, ("--size", "1M", "-n", "4", *SHORT)),
    "parallel_sweep": (0, NANO),
    "parameter_server": (2, ("--nserver", "1", *SHORT)),
    "replay": (0, SHORT),
    "rpc_latency": (1, ("--sizes", "4,64K", *ON_CUDA)),
}


def processes_and_flags(script: str, nccl_ranks: int) -> tuple[int, list[str]]:
    """How many processes to start for so many NCCL ranks, and the flags of the script."""
    others, flags = COMMANDS.get(script, (0, SHORT))
    words = list(flags)
    if script == "parameter_server":
        words += ["--ncudatrainer", str(nccl_ranks)]
    return nccl_ranks + others, words


@pytest.fixture
def shared(bench: Callable[..., Any]) -> Callable[..., Any]:
    """shared("benchmarks/x.py", *flags, ranks=2, fault=None, ...) -> Run, on GPU 0."""

    def run(script: str, *flags: str, fault: str | None = None, **options: Any) -> Any:
        faulty = [INJECT, fault] if fault else []
        return bench(SHARE_GPU, *faulty, str(ROOT / script), *flags, **options)

    return run


def checks(run: Any, name: str) -> dict[Any, str]:
    """The check of each case, by the entry `name` of its key."""
    return {case.key[name]: case.check for case in run.report.cases}


def assert_passed(run: Any) -> None:
    """The run was on CUDA, and every case of it passed or cannot be measured."""
    assert run.status == 0, run.out + run.err
    assert run.report.status == "complete"
    assert run.report.environment["cuda"]
    verdicts = [case.check.split(":")[0] for case in run.report.cases]
    assert "passed" in verdicts
    assert "failed" not in verdicts


def record(start: Callable[..., Any], folder: Path, ranks: int) -> None:
    """Record the collectives of an example's job over NCCL."""
    example = str(ROOT / "examples" / "record_collectives.py")
    kind = ["--ddp"] if ranks == 1 else []  # FSDP2 x TP calls none on a single rank
    process = start(SHARE_GPU, example, str(folder), *kind, ranks=ranks)
    assert process.wait(120) == 0, process.out + process.err


@pytest.mark.parametrize("nccl_ranks", [1, 2])
@pytest.mark.parametrize("script", SCRIPTS)
def test_each_script(
    script: str,
    nccl_ranks: int,
    shared: Callable[..., Any],
    start: Callable[..., Any],
    tmp_path: Path,
) -> None:
    processes, flags = processes_and_flags(script, nccl_ranks)
    if script == "replay":
        folder = tmp_path / "a trace"
        record(start, folder, nccl_ranks)
        flags = [str(folder), *flags]
    run = shared(f"benchmarks/{script}.py", *flags, ranks=processes, timeout=400)
    if script == "p2p_matrix" and nccl_ranks == 1:
        assert run.status == 1  # torchrun's, where a rank ended with 2
        assert "a link needs two ranks" in run.err
        return
    assert_passed(run)
    if script == "replay":
        assert "# not replayed: 0 of " in run.out


@pytest.mark.parametrize("name", EXAMPLES)
def test_each_example(name: str, shared: Callable[..., Any]) -> None:
    run = shared(f"examples/{name}", ranks=2, json=False)
    assert run.status == 0, run.out + run.err
    assert "95 % interval" in run.out


@pytest.mark.parametrize(
    "meshes",
    ["ddp2,dp2,tp2", "cp2", "cp2:ring", "pp2:gpipe,pp2:1f1b", "pp2:interleaved,pp2:izb,pp2:zbv"],
)
def test_axes_of_two_ranks(shared: Callable[..., Any], meshes: str) -> None:
    assert_passed(shared("benchmarks/parallel_sweep.py", *NANO, "--mesh", meshes, ranks=2))


def test_experts_on_two_ranks(shared: Callable[..., Any]) -> None:
    assert_passed(shared("benchmarks/parallel_sweep.py", *NANO, "--mesh", "ep2", ranks=2))


def test_products_of_axes(shared: Callable[..., Any]) -> None:
    flags = (*NANO, "--mesh", "dp2tp2,dp2x2,dp2pp2:1f1b", "--no-breakdown")
    assert_passed(shared("benchmarks/parallel_sweep.py", *flags, ranks=4, timeout=400))


def test_gloo_takes_cuda_tensors(bench: Callable[..., Any]) -> None:
    """Those collectives that gloo lacks for CUDA tensors are skipped, and none fails."""
    flags = ("--collective", "all", *FEW, "--backend", "gloo")
    assert_passed(bench("benchmarks/collectives.py", *flags, ranks=2))


# -- failures: the case is a row with its reason, and the next one is measured ---------------------


@pytest.mark.parametrize("fault", ["step-raises", "build-raises"])
def test_a_failure_beside_one_communicator(shared: Callable[..., Any], fault: str) -> None:
    """Rank 1 fails in a timed block, or before the model is there. Rank 0 waits for it in NCCL."""
    hooks = ("--comm-hook", "none,fp16", "--no-breakdown")
    flags = (*SMALL, "--iters", "12", "--world-sizes", "2", *hooks, "--timeout", "60")
    run = shared("benchmarks/ddp_sweep.py", *flags, ranks=2, fault=fault)
    assert run.status == 1
    by_hook = checks(run, "comm_hook")
    assert "injected" in by_hook["none"]
    assert by_hook["fp16"] == "passed"


@pytest.mark.parametrize(
    ("fault", "more"), [("step-raises", ("--no-breakdown",)), ("twin-raises", ())]
)
def test_a_failure_beside_several_communicators(
    shared: Callable[..., Any], fault: str, more: tuple[str, ...]
) -> None:
    """Kernels of one communicator wait for those of another: both must be aborted at once. A twin
    fails while the others are about to make the next twin's communicators."""
    flags = (*NANO, "--iters", "12", "--mesh", "dp2tp2,dp4", *more, "--timeout", "60")
    run = shared("benchmarks/parallel_sweep.py", *flags, ranks=4, fault=fault, timeout=400)
    assert run.status == 1
    by_mesh = checks(run, "mesh")
    assert "injected" in by_mesh["dp2tp2"]
    assert by_mesh["dp4"] == "passed"


@pytest.mark.parametrize("fault", ["graph-raises", "graph-raises,cyclic-graphs"])
@pytest.mark.parametrize(
    ("script", "flags"),
    [
        ("collectives", ("--collective", "all_reduce", "-G", "3", *FEW)),
        ("p2p_matrix", ("--size", "1M", "-n", "4", *SHORT)),
    ],
)
def test_a_failure_beside_cuda_graphs(
    shared: Callable[..., Any], script: str, flags: tuple[str, ...], fault: str
) -> None:
    """NCCL does not let go of a communicator while graphs that use it are alive."""
    words = (*flags, "--timeout", "60")
    run = shared(f"benchmarks/{script}.py", *words, ranks=2, fault=fault)
    assert run.status == 1
    verdicts = [case.check for case in run.report.cases]
    assert any("injected" in verdict for verdict in verdicts)
    if script == "collectives":  # the matrix of 2 ranks is one case
        assert "passed" in verdicts


def test_a_hang_over_nccl_is_named(shared: Callable[..., Any]) -> None:
    """The roll call reads the flight recorder of NCCL, while rank 0 waits in an all-reduce."""
    flags = (*SMALL, "--iters", "12", "--world-sizes", "2", "--timeout", "20")
    run = shared("benchmarks/ddp_sweep.py", *flags, ranks=2, fault="stops", timeout=120)
    assert run.status != 0
    assert "rank 1" in run.err
    assert "does not answer" in run.err
    assert re.search(r"newest collective nccl\w*:", run.err)  # nccl2's have its name
