"""compile_sweep with faults planted: its checks fail, and a rank that fails takes none along."""

from pathlib import Path

import pytest
from harness import ROOT, load, run, torchrun

DRIVER = str(ROOT / "tests" / "faults" / "compile_driver.py")
LONG = pytest.mark.timeout(600)  # compiling is slow where the machine is busy
SHORT = ["--device", "cpu", "--iters", "6", "--warmup-iters", "1", "--timeout", "200"]


def checks(path: Path) -> dict[tuple[str, str], str]:
    cases = load(path)["cases"]
    keys = ("strategy", "compile_backend")
    return {(case["key"][keys[0]], case["key"][keys[1]]): case["check"] for case in cases}


@LONG
def test_wrong_gradients_and_wrong_results_fail(tmp_path: Path) -> None:
    """DDP that does not average; a backend that computes something else, one that cannot work."""
    path = tmp_path / "r.json"
    wrong, broken = "relu_accuracy_error_TESTING_ONLY", "relu_compile_error_TESTING_ONLY"
    options = ["--strategies", "ddp,fsdp2", "--backends", f"eager,{wrong},{broken}"]
    start = ["env", "NO_AVERAGE=ddp", *torchrun(2), DRIVER]
    done = run([*start, *SHORT, *options, "--json", str(path)], timeout=580)
    assert done.returncode == 1, done.stdout + done.stderr
    found = checks(path)
    assert "with one eager process" in found["ddp", "eager"]
    assert found["fsdp2", "eager"] == "passed"
    assert "with one eager process" in found["fsdp2", wrong]
    assert found["fsdp2", broken].startswith("failed: CompileError: ReluCompileError")
    assert found["fsdp2", broken] in done.stdout


@LONG
def test_a_failing_rank_fails_the_case_and_the_sweep_goes_on(tmp_path: Path) -> None:
    """A trace that cannot be written fails its case as well, and costs no number."""
    path = tmp_path / "r.json"
    options = ["--strategies", "fsdp2,none", "--backends", "eager,aot_eager", "--json", str(path)]
    options += ["--profile", "--trace-file", str(tmp_path / "{case}-{rank}.json")]
    faults = ["env", "FAIL_ON_RANK=1", "FULL_DISK=1"]
    done = run([*faults, *torchrun(2), DRIVER, *SHORT, *options], timeout=580)
    assert done.returncode == 1, done.stdout + done.stderr
    found = checks(path)
    assert found["none", "aot_eager"] == "passed"
    assert found["none", "eager"] == "failed: the trace could not be written to here (rank 0)"
    unwritten = load(path)["cases"][0]
    assert len(unwritten["samples_s"][0]) == 6
    assert unwritten["metrics"]["step_time_p50_s"] > 0
    assert unwritten["metrics"]["tflops"] > 0
    for backend in ("eager", "aot_eager"):
        assert found["fsdp2", backend] == "failed: OutOfMemoryError: no more memory (rank 1)"
