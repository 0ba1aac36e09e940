"""common/compile_facts.py."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from common.compile_facts import explain_failure, facts_so_far, one_line, start_counting

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def nothing_compiled() -> None:
    start_counting()


def test_one_graph_and_a_backward_that_is_no_recompilation() -> None:
    compiled = torch.compile(lambda x: x.sin() + 1, backend="aot_eager")
    for _ in range(3):
        compiled(torch.ones(3, requires_grad=True)).sum().backward()
    facts = facts_so_far()
    assert (facts.graphs, facts.breaks, facts.recompiles) == (1, {}, {})
    start_counting()
    assert facts_so_far().graphs == 0


def test_two_breaks() -> None:
    @torch.compiler.disable
    def opaque(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    def f(x: torch.Tensor) -> torch.Tensor:
        y = opaque(x.sin()).cos()
        torch._dynamo.graph_break()
        return y + 1

    torch.compile(f, backend="eager")(torch.ones(3))
    facts = facts_so_far()
    assert facts.graphs == 3
    assert sorted(facts.breaks.values()) == [1, 1]
    assert any("disable" in reason for reason in facts.breaks)
    assert any("graph_break" in reason for reason in facts.breaks)
    assert not any("0x" in reason or "\n" in reason for reason in facts.breaks)
    assert not facts.recompiles


def test_a_branch_on_data_is_a_break() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        y = x.cos()
        if y.sum() > 0:
            return y.sin()
        return y.exp()

    torch.compile(f, backend="eager")(torch.ones(3))
    facts = facts_so_far()
    assert facts.graphs == 2
    assert sum(facts.breaks.values()) >= 1


def test_a_generator_is_left_alone_which_breaks_nothing() -> None:
    """As those of the context managers around DDP's forward."""

    def rows(x: torch.Tensor) -> Iterator[torch.Tensor]:
        for i in range(3):
            yield x + i

    assert len(list(torch.compile(rows, backend="eager")(torch.ones(2)))) == 3
    facts = facts_so_far()
    assert (facts.graphs, facts.breaks) == (0, {})


def test_recompilations_and_their_reasons() -> None:
    compiled = torch.compile(lambda x: x * 2, backend="eager", dynamic=False)
    for size in (2, 3, 4, 3):
        compiled(torch.ones(size))
    facts = facts_so_far()
    assert facts.graphs == 3
    assert sum(facts.recompiles.values()) == 2
    assert any("size" in reason for reason in facts.recompiles), facts
    assert not any("\n" in reason for reason in facts.recompiles)
    assert not facts.breaks


def test_more_recompilations_than_dynamo_allows() -> None:
    """From its limit on the function runs eager: that is told as a break."""
    name = (
        "recompile_limit"
        if hasattr(torch._dynamo.config, "recompile_limit")
        else ("cache_size_limit")
    )
    with torch._dynamo.config.patch({name: 3}):
        compiled = torch.compile(lambda x, word: x + 1 if word else x, backend="eager")
        for i in range(6):
            compiled(torch.ones(2), str(i))
    facts = facts_so_far()
    assert facts.graphs == 3
    assert sum(facts.recompiles.values()) == 2
    assert any("limit" in reason for reason in facts.breaks), facts


def test_one_line() -> None:
    reason = """Skip calling it
      Explanation: Skip calling `<function h at 0x7fc7>` of /usr/lib/python3/torch/nn/a.py
      Hint: Remove it
    """
    assert one_line(reason) == "Skip calling it: Skip calling `<function h>` of torch/nn/a.py"
    assert one_line("generic_jump TensorVariable()") == "generic_jump TensorVariable()"
    assert len(one_line("word " * 100)) <= 160


class BackendCompilerFailed(RuntimeError):
    def __init__(self, inner: Exception) -> None:
        self.inner_exception = inner
        super().__init__(
            f"backend='inductor' raised:\n{type(inner).__name__}: {inner}\n\nSet TORCH"
        )


class InvalidCxxCompiler(RuntimeError):
    pass


class TritonMissing(RuntimeError):
    pass


TOO_OLD = (
    "Found Tesla P100 which is too old to be supported by the triton GPU compiler, which is used "
    "as the backend. Triton only supports devices of CUDA Capability >= 7.0, but your device is of "
    "CUDA capability 6.0"
)


@pytest.mark.parametrize(
    ("error", "beginning", "hint"),
    [
        (
            BackendCompilerFailed(InvalidCxxCompiler("No working C++ compiler found: (None,)")),
            "InvalidCxxCompiler: No working C++ compiler found: (None,); ",
            "no C++ compiler: install one (apt-get install g++), or name it in CXX",
        ),
        (
            TritonMissing("Cannot find a working triton installation. Either\n more"),
            "TritonMissing: Cannot find a working triton installation. Either; ",
            "Triton is missing",
        ),
        (RuntimeError(TOO_OLD), "RuntimeError: Found Tesla P100", "needs compute capability 7.0"),
        (
            BackendCompilerFailed(RuntimeError("Failed to find C compiler. Please specify via CC")),
            "RuntimeError: Failed to find C compiler.",
            "apt-get install gcc",
        ),
        (
            BackendCompilerFailed(
                RuntimeError(
                    "C++ compile error\n\nCommand:\ng++ x\n\nOutput:\nx.h:3:10: fatal "
                    "error: Python.h: No such file or directory"
                )
            ),
            "RuntimeError: x.h:3:10: fatal error: Python.h: No such file",
            "apt-get install python3-dev",
        ),
        (
            AssertionError("First bucket should be smaller/equal to other buckets to get comms"),
            "AssertionError: First bucket",
            "--dynamo-no-optimize-ddp",
        ),
        (ValueError("what is\nnot known"), "ValueError: what is", ""),
        (ValueError(), "ValueError", ""),
    ],
)
def test_failures(error: Exception, beginning: str, hint: str) -> None:
    line = explain_failure(error)
    assert line.startswith(beginning)
    assert hint in line
    assert "\n" not in line
    assert bool(hint) == ("; " in line)


def test_a_backend_that_there_is_not() -> None:
    compiled = torch.compile(lambda x: x + 1, backend="eager")
    assert compiled(torch.ones(1)) == 2
    with pytest.raises(Exception, match="nosuch") as caught:
        torch.compile(lambda x: x + 1, backend="nosuch")(torch.ones(1))
    assert "take one of torch._dynamo.list_backends()" in explain_failure(caught.value)


WITHOUT_COMPILER = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
from common.compile_facts import explain_failure
try:
    torch.compile(lambda x: x.sin() + x.cos())(torch.ones(30))
except Exception as error:
    print(explain_failure(error))
"""


def test_a_missing_compiler(tmp_path: Path) -> None:
    environment = os.environ | {
        "CXX": "/no/such/compiler",
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path),
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, "-c", WITHOUT_COMPILER, str(ROOT)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    assert "/no/such/compiler" in line
    assert "no C++ compiler: install one (apt-get install g++), or name it in CXX" in line
    assert "--backends aot_eager" in line
