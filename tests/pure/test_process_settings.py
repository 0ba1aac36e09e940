"""benchmarks/workloads/process_settings.py: what a model may change is seen and restored."""

import json
import subprocess
import sys
from typing import Any

import pytest

from benchmarks.workloads import process_settings
from benchmarks.workloads.process_settings import lines_about, restored
from tests.process import ROOT, environment

BF16_SUMS = "bf16_reduced_precision_reduction"
# What a model does, and a part of the line about it: a row for each way of finding settings
CODES = [
    ("torch.set_num_threads(torch.get_num_threads() + 1)", "the number of threads from "),
    (
        "torch.set_default_dtype(torch.float64)",
        "default dtype from torch.float32 to torch.float64;",
    ),
    ("torch.set_grad_enabled(False)", "the gradient mode from True to False; it was restored"),
    ("torch.set_default_device('meta')", "the default device from cpu to meta; it was restored"),
    ("backends.cuda.matmul.fp32_precision = 'tf32'", "fp32_precision of cuda matmul from none"),
    ("backends.cudnn.conv.fp32_precision = 'ieee'", "cuda conv from tf32 to ieee"),
    ("backends.cudnn.rnn.fp32_precision = 'ieee'", "cuda rnn from tf32 to ieee"),
    ("backends.cudnn.fp32_precision = 'ieee'", "fp32_precision of cuda all, cuda matmul from"),
    ("backends.mkldnn.conv.fp32_precision = 'bf16'", "mkldnn conv from none to bf16"),
    ("backends.fp32_precision = 'tf32'", "fp32_precision of generic all, cuda all, mkldnn all"),
    ("backends.mkldnn.fp32_precision = 'bf16'", "mkldnn all"),
    ("torch.set_float32_matmul_precision('medium')", "matmul_precision from highest to medium"),
    (  # the two APIs mixed, so that one of them cannot be read
        "torch.set_float32_matmul_precision('high'); "
        "backends.cuda.matmul.fp32_precision = 'ieee'; backends.cudnn.allow_tf32 = False",
        "cuda matmul from none to ieee",
    ),
    ("backends.cuda.matmul.allow_tf32 = True", "cuda matmul from none to tf32"),
    ("backends.cuda.matmul.allow_fp16_accumulation = True", "fp16_accumulation from False"),
    (f"backends.cuda.matmul.allow_{BF16_SUMS} = False", f"{BF16_SUMS} from (True, True) to (False"),
    ("backends.mha.set_fastpath_enabled(False)", "backends.mha.fastpath_enabled from True to"),
    ("backends.nnpack.set_flags(False)", "torch's nnpack_enabled from True to False"),
    ("backends.cuda.preferred_blas_library('cublaslt')", "torch's blas_preferred_backend from"),
    ("backends.cuda.enable_math_sdp(False)", "torch.backends.cuda.math_sdp_enabled from True"),
    ("torch._C._set_sdp_priority_order([0, 1, 2])", "torch's sdp_priority_order from ["),
    ("kept = sdpa_kernel([SDPBackend.MATH]); kept.__enter__()", "backends.cuda.flash_sdp_enabled"),
    ("backends.quantized.engine = 'onednn'", "torch.backends.quantized.engine from x86"),
    ("torch.use_deterministic_algorithms(True, warn_only=True)", "deterministic mode from 0"),
    ("torch.utils.deterministic.fill_uninitialized_memory = False", "fill_uninitialized_mem"),
    ("torch.set_autocast_dtype('cpu', torch.float16)", "autocast dtype of cpu from torch.bfl"),
    ("torch.set_autocast_cache_enabled(False)", "torch's autocast_cache_enabled from True"),
    ("torch.autograd.set_multithreading_enabled(False)", "multithreading_enabled from True"),
    ("torch.set_warn_always(True)", "torch's warnAlways from False to True"),
    ("torch.compiler.config.job_id = 'x'", "torch.compiler.config.job_id from None to x"),
    ("dist.set_debug_level(dist.DebugLevel.INFO)", "torch.distributed.debug_level from"),
    ("gc.disable()", "the garbage collection from True to False"),
    ("gc.set_threshold(1, 2, 3)", "gc.threshold from (700, 10, 10) to (1, 2, 3)"),
    ("sys.setswitchinterval(0.5)", "sys.switchinterval from 0.005 to 0.5"),
    ("threading.settrace(print)", "threading.trace from "),
    ("socket.setdefaulttimeout(9)", "socket.defaulttimeout from None to 9.0"),
    ("numpy.seterr(over='raise')", "numpy.err from {"),
    ("signal.signal(signal.SIGUSR1, print)", "the handler of SIGUSR1 from SIG_DFL to print;"),
    ("os.umask(0)", "the umask from 027 to 000; it was restored"),
    ("os.chdir('/')", "the working directory from "),
    ("sys.path.append('/a/library')", "sys.path (/a/library); it applies to this model only"),
    ("sys.argv[:] = ['x']", "sys.argv from ['-c'] to ['x']; it applies to this"),
    ("__import__('builtins').print = repr", "builtins.print from print to repr; it applies to th"),
    ("torch._dynamo.config.suppress_errors = True", "torch._dynamo.config.suppress_errors from"),
    ("os.environ.pop('PATH')", "environment variables (PATH); they apply to this model only"),
    ("sys.displayhook = 'two\\nlines'", "sys.displayhook from displayhook to 'two\\nlines'; it"),
    ("sys.stdin = None", "sys.stdin; it was restored"),
    ("sys.excepthook = print", "sys.excepthook from "),
    ("os.dup2(os.open(os.devnull, os.O_WRONLY), 1)", "file descriptor 1; it was restored"),
    ("os.close(2)", "file descriptor 2; it was restored"),
    ("resource.setrlimit(resource.RLIMIT_NOFILE, (99, most))", "RLIMIT_NOFILE from (100, "),
]
SCRIPT = """
import gc, json, os, resource, signal, socket, sys, threading
import numpy, torch
import torch.distributed as dist
from torch import backends
from torch.nn.attention import SDPBackend, sdpa_kernel
from benchmarks.workloads.process_settings import differences, lines_about, read_settings, restored

os.umask(0o027)
_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (100, most))
out = os.fdopen(os.dup(1), "w")
names = globals()
for code in json.load(sys.stdin):
    before, changes = read_settings(), {}
    with restored(changes=changes):
        exec(code, names)
    print(json.dumps([[*differences(before, read_settings())], lines_about(changes)]), file=out)
now = [torch._C._get_fp32_precision_getter(name, "matmul") for name in ("cuda", "mkldnn")]
print(json.dumps([*now, torch.get_float32_matmul_precision()]), file=out)
"""


@pytest.fixture(scope="module")
def results() -> list[Any]:
    """What is left of each of CODES, and the lines about it; at the end the precisions."""
    options: dict[str, Any] = {"capture_output": True, "text": True, "cwd": ROOT, "timeout": 500}
    codes = json.dumps([code for code, _ in CODES])
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, input=codes, env=environment(), **options)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(
    ("number", "line"), [*enumerate(line for _, line in CODES)], ids=[code for code, _ in CODES]
)
def test_a_setting_is_named_and_restored(results: list[Any], number: int, line: str) -> None:
    left, lines = results[number]
    assert left == []
    assert [told for told in lines if line in told] != [], lines


def test_precisions_are_restored_as_they_were(results: list[Any]) -> None:
    """torch's older API gives `highest` back, but sets the newer one to `ieee`."""
    assert results[-1] == ["none", "none", "highest"]


def test_a_setting_that_cannot_be_restored_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a lower niceness, or a higher limit, of a user who is not root."""
    state = {"nice": 0, "level": 0}
    access: dict[str, Any] = {"niceness": (lambda: state["nice"], lambda value: 1 / 0)}
    access["level"] = lambda: state["level"], lambda value: state.update(level=value)
    monkeypatch.setattr(process_settings, "all_settings", lambda: access)
    monkeypatch.setattr(process_settings, "STUCK", set())
    changes: dict[str, Any] = {}
    with restored(changes=changes):
        state.update(nice=5, level=3)
    assert lines_about(changes) == [
        "the niceness from 0 to 5; it could not be restored, and applies to later models, too",
        "the level from 0 to 3; it applies to this model only",
    ]
    assert state == {"nice": 5, "level": 0}
