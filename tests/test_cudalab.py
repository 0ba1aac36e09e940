"""CUDA and NCCL code on tests/cudalab, which needs no GPU (`make cudalab`).

Each entry of ROWS is a command with its expected result. Values are checked, and times are not,
because they mean nothing there. Sizes are small, because the CPU computes. tests/gpu runs on a GPU.
"""

import inspect
import json
import re
import shutil
import signal
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d

from analysis import hang
from analysis.logs.watchdog import Evidence
from common.stats import Estimate
from harness.report import Case, load
from tests.mutations import ON_CUDA, plant
from tests.process import ROOT, Bench, Run, Start, copy_of_scripts
from tests.smaller import SIZES

pytestmark = pytest.mark.cudalab

LIMIT_S = 500  # per command; a quiet machine with 2 cores needs 2 to 30 s
VALUES = "tests/cudalab_values.py"
COMPARED = 60  # values of a rank; later, trainers that share a table drift apart
RECORDED = ("batch_update_ps", "compile_sweep", "ddp_rpc", "ddp_sweep", "parameter_server")
INJECT, SMALLER = "tests/inject.py", "tests/smaller.py"
ONE_GPU = "tests/gpu/share_gpu.py"  # all ranks on GPU 0, each as a separate host
HAS_NCCL2 = hasattr(dist, "ProcessGroupNCCL2")
# TORCH_DIST_USE_NCCL2 in the rows: both values if `nccl` means nccl2 unless the variable is 0.
# Otherwise nccl2 has separate rows.
REGISTER: Any = getattr(distributed_c10d, "_register_builtin_nccl_backend", None)
BY_DEFAULT = REGISTER and 'NCCL2") == "0"' in inspect.getsource(REGISTER)
NCCL2 = ["1", "0"] if BY_DEFAULT else ["0"]


EXAMPLES = [
    pytest.param(path.name, marks=[pytest.mark.ci] if path.stem == "record_collectives" else [])
    for path in sorted((ROOT / "examples").glob("*.py"))
]


@dataclass(frozen=True)
class Row:
    """A command and its expected result.

    ranks: per node. says: patterns that occur in stdout or stderr. status: torchrun's. lacks: a
    pattern that does not occur. failed: a text in the check of at least one case; all other cases
    pass or are skipped. on_cpu: flags for a run on the CPU over gloo, with the same values.
    contexts: number of CUDA contexts, one for each process and GPU. communicators: limit on those
    that one process has open at a time. implementations: whether to run the command with each
    implementation of `nccl`, unless it has a backend. log: patterns in the log of the emulation.
    types: 16-bit types on which operators run; None: any. peak_kib: limit on the peak memory of a
    case, by its model. emulated: not valid on a GPU. tests/gpu/test_gpu.py runs the other rows, if
    they have no variables.
    """

    name: str
    ranks: int
    command: str
    says: tuple[str, ...] = ()
    status: int = 0
    lacks: str = ""
    nodes: int = 1
    failed: str = ""
    on_cpu: str = ""
    contexts: int | None = None
    communicators: int | None = None
    ci: bool = False
    implementations: bool = True
    cold: bool = False
    variables: dict[str, str] = field(default_factory=dict)
    log: tuple[str, ...] = ()
    types: tuple[str, ...] | None = None
    peak_kib: dict[str, float] = field(default_factory=dict)
    emulated: bool = False


SHORT = "--iters 6 --warmup-iters 1"
TWELVE = "--iters 12"  # tests/inject.py injects some faults in the twelfth step
B = "benchmarks"
CPU = "--device cpu"
SERVERS = "--device cuda --server-device cuda"
OWN = f"{B}/ddp_sweep.py {SHORT} --model tests.own_models"
DDP, GPT = f"{OWN}:gpt", f"{OWN}:gpt --world-sizes 2 --no-breakdown"
TOGETHER = ",".join(f"tests.communicating_models:{x}" for x in ("towers", "experts"))
PAR = f"{B}/parallel_sweep.py --model decoder-nano --global-batch 4 {SHORT}"
ONE = f"{B}/collectives.py -b 64 -e 4K -f 64 -n 2 {SHORT}"
ALL = f"{ONE} --collective all"
P2P = f"{B}/p2p_matrix.py --size 64K -n 4 {SHORT}"
CKPT = f"{B}/checkpoint_sweep.py --model decoder-nano --batch-size 2 --iters 1 --warmup-iters 1"
COMPILE = f"{B}/compile_sweep.py --models toy-small --batch-size 4 {SHORT}"
INPUT = f"{B}/input_sweep.py --samples 16 --workers 1 --model mobilenet_v3_small --batch-size 4"
INPUT += f" --image-size 32 {SHORT}"
# a case ends after a second, and the budget is large enough for all cases on a busy machine
NODE = f"{SMALLER} {B}/node_check.py --budget 400 --max-seconds 1 --fail-on wrong {SHORT}"
RPC = f"{B}/rpc_latency.py --sizes 4,64K {SHORT} {SERVERS}"
DDP_RPC, UPDATE = (f"{B}/{x}.py {SERVERS} {SHORT}" for x in ("ddp_rpc", "batch_update_ps"))
PS = f"{B}/parameter_server.py --num-embeddings 64 --embedding-dim 32 --dense-layers 2"
PS += f" --dense-size 32 --sample-length 8 --batch-size 4 --bucket-size 0.01 {SHORT}"
SILENT = ("does not answer", "rank 1")
# gpt has 3,824 parameters: with gradients, momentum and buckets 60 KiB, and activations. A bucket
# of the case before, 15 KiB, may still be in use
PEAKS = {"tests.own_models:gpt": 160.0, "tests.own_models:noisy": 50.0}
# What NCCL ran in all timed cases: 6 rounds of 2 steps and 1 of warm-up are 13 of a step or a part.
# One operation connects a group. A model that communicates does so in another group than DDP.
# 4 to settle, step, alone, check. The host waits for the first one, which connects in the trial
OF_DDP = ("rank 0 of 2 ran 32 AllReduce f32, 474180 bytes, 31 awaited",)
OF_RPC = ("rank 0 of 2 ran 131 AllReduce f32",)  # 13 epochs of 10 batches
OF_PS = ("rank 0 of 2 ran 69 AllReduce f32",)  # in 4 of 6 cases; 4 checked steps and 13 others
# 3 checked steps and 3 parts are 42 steps. 12 units; the root's parameters stay gathered
OF_FSDP = ("rank 0 of 2 ran 966 AllGather f32", "rank 0 of 2 ran 504 ReduceScatter f32")
MAPS = ("maps device memory",)  # of another process: tensors are sent from GPU to GPU
LATE = {"CUDALAB_LATE": "1"}  # kernels, copies and events are as late as the host allows
HAS_PEAKS = {"CUDALAB_NAME": "NVIDIA H100 80GB HBM3"}  # in PEAKS of parallel_sweep.py: prints mfu
ONCE: dict[str, Any] = {"implementations": False}
REASONS = ("sw_power_cap", "sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake_slowdown")
UNKNOWN = ";".join(f"clocks_event_reasons_counters.{reason}=[N/A]" for reason in REASONS)


def late(name: str, ranks: int, command: str, **expected: Any) -> Row:
    return Row(f"late {name}", ranks, command, variables=LATE, **expected)


def smi(name: str, answers: str, says: tuple[str, ...] = (), **expected: Any) -> Row:
    """answers: of nvidia-smi."""
    return Row(f"gpus {name}", 2, DDP, says, variables={"CUDALAB_SMI": answers}, **expected)


def fault(name: str, ranks: int, command: str, **expected: Any) -> Row:
    result: dict[str, Any] = {"failed": "injected", "status": 1}
    return Row(f"fault {name}", ranks, command, **result | expected)


def refused(name: str, ranks: int, command: str, says: str, **variables: str) -> Row:
    return Row(f"refused {name}", ranks, command, (says,), status=1, variables=variables)


ROWS = [
    # each script with the defaults for CUDA, compared with values on the CPU
    Row("ddp_sweep", 2, DDP, on_cpu=CPU, contexts=2, log=OF_DDP, types=(), ci=True),
    Row("parallel_sweep", 2, f"{PAR} --mesh dp2,tp2", on_cpu=CPU, ci=True, variables=HAS_PEAKS),
    Row("collectives", 2, f"{ALL} -d float32,bfloat16,int8 -o sum,avg,max",
        on_cpu=f"{CPU} -o sum,max", ci=True),
    Row("p2p_matrix", 2, P2P, on_cpu=CPU, ci=True),
    # not compared with the CPU: its metrics are times
    Row("node_check", 2, NODE, lacks="left out", ci=True),
    # two nodes with a GPU each: the links between them
    Row("node_check 2 nodes", 1, f"{ONE_GPU} {NODE}", lacks="left out", nodes=2, cold=True,
        emulated=True),
    Row("checkpoint_sweep", 2, f"{CKPT} --modes all --strategy fsdp2,ddp", on_cpu=CPU, contexts=2),
    Row("input_sweep", 2, INPUT, on_cpu=CPU),
    Row("compile_sweep", 2, f"{COMPILE} --strategies ddp --backends eager,aot_eager", on_cpu=CPU,
        ci=True),
    # RPC makes a second context on GPU 0, for rank 1: see docs/gpus.md
    Row("rpc_latency", 2, RPC, on_cpu=f"{CPU} --server-device cpu", contexts=3, ci=True, **ONCE),
    Row("ddp_rpc", 4, DDP_RPC, on_cpu=f"{CPU} --server-device cpu", ci=True),
    Row("batch_update_ps", 3, UPDATE, on_cpu=f"{CPU} --server-device cpu", ci=True),
    # with allreduce, NCCL averages dense gradients and gloo sparse ones
    Row("parameter_server", 3, f"{PS} --ncudatrainer 1 --nserver 1", ci=True,
        on_cpu="--ncudatrainer 0 --ntrainer 1 --routes hybrid,rpc,sparse_rpc"),
    # a missing wait, on the host or between streams, gives wrong values or unfinished events
    late("ddp_sweep", 2, DDP, log=OF_DDP, types=(), ci=True),
    late("compile_sweep", 2, f"{COMPILE} --strategies ddp,fsdp2 --backends aot_eager", log=OF_FSDP,
         types=()),
    # torch's DistributedOptimizer orders its streams neither before nor after those of the training
    late("ddp_rpc", 4, f"{DDP_RPC} --autograd manual", log=(*OF_RPC, *MAPS), types=()),
    # with two trainers, the second gradient and the average would be on one stream
    late("parameter_server", 5, f"{PS} --ncudatrainer 3 --ncudaserver 1 --routes allreduce,rpc",
         log=MAPS, types=()),
    late("rpc_latency", 2, f"{RPC} --sizes 4 --ops rpc_sync,async_execution", **ONCE),
    late("batch_update_ps", 3, UPDATE),
    # memory of a case does not outlive it, also if it fails
    Row("memory of cases", 2, f"{GPT} --models tests.own_models:gpt,tests.own_models:noisy "
        "--bucket-size 25,26,27,28", peak_kib=PEAKS, emulated=True, **ONCE),
    Row("memory of a failed case", 2, f"{INJECT} step-raises {GPT} --bucket-size 25,26", status=1,
        failed="injected", peak_kib=PEAKS, emulated=True, **ONCE),
    # flags for CUDA, and other combinations of device and backend
    Row("ddp dtypes", 2, f"{DDP} --dtype fp32,tf32,bf16 --comm-hook none,fp16,bf16"),
    Row("ddp torchvision", 2, f"{B}/ddp_sweep.py --model mobilenet_v3_small --image-size 32 "
        f"--batch-size 4 {SHORT} --dtype bf16"),
    Row("ddp bf16", 2, f"{GPT} --dtype bf16", types=("BFloat16",), **ONCE),
    Row("ddp hook bf16", 2, f"{GPT} --comm-hook bf16", types=("BFloat16",), **ONCE),
    Row("ddp bf16 model", 2, f"{OWN}:in_bf16 --world-sizes 2",
        log=("rank 0 of 2 ran 31 AllReduce bf16, 1240 bytes, 31 awaited",), **ONCE),
    # the groups of at most 4 numbers of ranks stay open
    Row("ddp 5 ranks", 5, f"{OWN}:noisy --world-sizes 1,2,3,4,5 --no-breakdown", communicators=4,
        **ONCE),
    Row("ddp unused", 3, f"{OWN}:idle --find-unused-parameters", types=(), **ONCE),
    Row("ddp communicates", 2, f"{B}/ddp_sweep.py {SHORT} --models {TOGETHER}", on_cpu=CPU,
        says=("towers: its step communicates", "experts: its step communicates"),
        log=("rank 0 of 2 ran 31 AllGather f32",), types=(), **ONCE),
    # as many contexts as with RPC
    Row("ddp gloo", 2, f"{DDP} --backend gloo", contexts=3, lacks=" ran "),
    Row("ddp nccl2", 2, f"{DDP} --backend nccl2"),
    Row("ddp 4 ranks", 4, f"{DDP} --bucket-size 0.01,25 --no-breakdown"),
    Row("ddp interleave", 2, f"{DDP} --bucket-size 0.01,25 --comm-hook none,bf16 --interleave",
        ("1M/2G 25MB bf16", "as fast as|differ significantly")),
    Row("compile interleave", 2, f"{COMPILE} --strategies ddp,fsdp2 --backends eager --interleave",
        ("as fast as|differ significantly",)),
    Row("ddp profile", 2, f"{DDP} --profile {{tmp}}/traces", ("traces",)),
    Row("meshes ddp, cp", 2, f"{PAR} --mesh ddp2,cp2"),
    # cold: a variable that is read when torch is imported hides a warning of c10d in these tables
    Row("meshes pp", 2, f"{PAR} --mesh pp2:gpipe,pp2:1f1b,pp2:interleaved,pp2:izb,pp2:zbv",
        cold=True),
    Row("meshes ring, ep", 2, f"{PAR} --mesh cp2:ring,ep2,dp2 --dtype bf16"),
    Row("meshes 4", 4, f"{PAR} --mesh dp2tp2,dp2x2,dp2pp2:1f1b --no-breakdown --global-batch 8",
        cold=True),
    Row("mesh gloo", 2, f"{PAR} --mesh dp2,tp2 --backend gloo"),
    Row("mesh nccl2", 2, f"{PAR} --mesh dp2,tp2,pp2:1f1b --backend nccl2"),
    Row("mesh nccl-lazy", 2, f"{PAR} --mesh dp2,pp2:1f1b --backend nccl-lazy", cold=True),
    Row("collectives -G", 2, f"{ALL} -G 3", ci=True),
    # gloo waits on the host, which is not allowed in a capture
    Row("collectives -G gloo", 2, f"{ONE} -G 3 --backend gloo -e 64", status=1, failed="capture",
        emulated=True),
    Row("collectives warm, -I", 2, f"{ALL} --cache-warm -I 1"),
    Row("collectives gloo", 2, f"{ALL} -d float32,bfloat16 --backend gloo"),
    Row("collectives nccl2", 2, f"{ALL} --backend nccl2 -G 2"),
    Row("collectives nccl-legacy", 2, f"{ONE} --backend nccl-legacy"),
    Row("collectives two backends", 2, f"{ONE} --backend cpu:gloo,cuda:nccl"),
    Row("network", 2, f"{ONE} --expect-network socket", (r"# network: Socket \(lo\)",),
        emulated=True),
    Row("network other", 2, f"{ONE} --expect-network IB", (r"got Socket \(lo\) on rank 0",),
        status=1, emulated=True),
    Row("collectives beside", 2, f"{ONE} --beside all_to_all"),
    Row("collectives groups", 4, f"{ONE} --collective all_reduce,all_to_all --groups 0,1/2-3"),
    Row("p2p 4", 4, P2P),
    Row("p2p gloo", 2, f"{P2P} --backend gloo"),
    Row("compile strategies", 2, f"{COMPILE} --strategies none,fsdp1,fsdp2 --backends aot_eager"),
    Row("compile fsdp2 bf16", 2, f"{COMPILE} --strategies ddp,fsdp2 --backends eager --dtype bf16",
        on_cpu=CPU, types=("BFloat16",)),
    Row("compile checkpoint", 3, f"{COMPILE} --strategies fsdp1,fsdp2 --backends eager "
        "--fsdp-checkpoint", on_cpu=CPU, types=(), **ONCE),
    Row("compile cudagraphs", 2, f"{COMPILE} --strategies ddp --backends eager,cudagraphs"),
    Row("compile no optimize", 2, f"{COMPILE} --strategies ddp --backends aot_eager "
        "--dynamo-no-optimize-ddp"),
    # kernels of Triton do nothing in cudalab: the check of the losses has to fail
    Row("compile inductor", 2, f"{COMPILE} --strategies ddp --backends eager,inductor", status=1,
        failed="loss", emulated=True),
    Row("input_sweep warm", 1, f"{INPUT} --cache warm", ci=True),
    Row("checkpoint dcp", 2, f"{CKPT} --modes dcp.save", ci=True),
    Row("rpc to a CPU", 2, f"{RPC} --server-device cpu", **ONCE),
    Row("ddp_rpc to a CPU", 4, f"{DDP_RPC} --server-device cpu"),
    Row("ddp_rpc sparse", 4, f"{DDP_RPC} --sparse"),
    Row("batch_update to a CPU", 3, f"{UPDATE} --server-device cpu"),
    # tensors between GPUs of trainers and servers
    Row("ps wire cuda", 4, f"{PS} --ncudatrainer 2 --ncudaserver 1", log=(*OF_PS, *MAPS),
        types=(), ci=True),
    Row("ps wire cpu", 4, f"{PS} --ncudatrainer 2 --ncudaserver 1 --wire cpu", lacks=MAPS[0]),
    Row("ps several servers", 7, f"{PS} --ncudatrainer 4 --ncudaserver 2 --routes rpc "
        "--placement buckets,grouped", log=MAPS, types=(), variables={"CUDALAB_MEMORY_GIB": "6"},
        **ONCE),
    Row("ps gloo", 4, f"{PS} --ncudatrainer 2 --ncudaserver 1 --backend gloo"),
    Row("ps servers on CUDA", 3, f"{PS} --ntrainer 1 --ncudaserver 1", **ONCE),
    Row("ps dense", 4, f"{PS} --ncudatrainer 2 --nserver 1 --routes allreduce,rpc "
        "--dense-embedding"),
    # all of 8 GPUs are throttled, and the ranks use two
    smi("slowed", "slowed", ("GPU 0 of .* throttled", "GPU 1 of .* throttled"), lacks="GPU [2-7]"),
    smi("with errors", "ecc.errors.uncorrected.volatile.total=3",
        ("GPU 0, 1 have uncorrected memory errors",)),
    smi("at their power limit", "clocks_event_reasons_counters.sw_power_cap=grows",
        ("limited by its power",)),
    smi("hot", "temperature.gpu=90;clocks_event_reasons.active=0x0000000000000020"),
    smi("without counters", UNKNOWN, ("no throttle counters",)),
    Row("gpus missing", 2, f"{NODE} --gpus 9", ("8 of 9 GPUs",), status=1, emulated=True),
    # faults: the case is a row with its reason, and the next case is measured
    fault("step", 2, f"{INJECT} step-raises {GPT} {TWELVE} --comm-hook none,fp16", ci=True),
    fault("step nccl2", 2, f"{INJECT} step-raises {GPT} {TWELVE} --comm-hook none,fp16 "
          "--backend nccl2"),
    fault("step 4", 4, f"{INJECT} step-raises {PAR} {TWELVE} --mesh dp2tp2,dp4 --no-breakdown"),
    fault("twin", 4, f"{INJECT} twin-raises {PAR} {TWELVE} --mesh dp2tp2,dp4"),
    fault("graph", 2, f"{INJECT} graph-raises {ONE} --collective all_reduce -G 3", ci=True),
    fault("graph cycle", 2, f"{INJECT} graph-raises,cyclic-graphs {ONE} -G 3"),
    fault("p2p graph", 2, f"{INJECT} graph-raises {P2P}"),
    fault("hang", 2, f"{INJECT} stops {GPT} {TWELVE} --timeout 15", says=SILENT, failed="",
          ci=True),
    fault("hang nccl2", 2, f"{INJECT} stops {GPT} {TWELVE} --timeout 15 --backend nccl2",
          says=SILENT, failed=""),
    # torch 2.14 has no flight recorder for nccl2; there `nccl` is the legacy one
    fault("hang in NCCL", 2, f"{INJECT} stops-in-all-reduce {B}/collectives.py --collective "
          f"all_reduce -b 64 -e 64K -f 32 -n 4 --warmup-iters 1 {TWELVE} --timeout 15", failed="",
          says=(*SILENT, r"last collective nccl\w*:all_reduce")),
    fault("assert", 1, f"{INJECT} device-assert {DDP} {TWELVE}", failed="", ci=True,
          says=("this process can no longer use its GPU",)),
    # the context uses 0.49 GiB
    fault("memory", 1, f"{B}/ddp_sweep.py --models resnet18,tests.own_models:gpt --no-breakdown "
          f"--image-size 64 {SHORT}", failed="OutOfMemoryError",
          variables={"CUDALAB_MEMORY_GIB": "0.54"}, ci=True),
    # one replica fits, as in `no ddp`, but four interleaved settings do not
    fault("memory of settings", 1, f"{B}/ddp_sweep.py {SHORT} --model resnet18 --image-size 32 "
          "--batch-size 2 --comm-hook none,fp16,bf16,allreduce --interleave --no-breakdown",
          failed="OutOfMemoryError", variables={"CUDALAB_MEMORY_GIB": "0.9"}),
    fault("own model", 2, f"{GPT} --models tests.own_models:too_large,tests.own_models:gpt",
          failed="OutOfMemoryError: CUDA out of memory", **ONCE),
    # refusals that depend on what the machine has; tests/pure/test_refusals.py has the others
    refused("shared GPU", 2, P2P, "NCCL requires one GPU per rank", CUDALAB_DEVICES="1"),
    refused("no GPU", 2, f"{P2P} --device cuda", "--device cuda", CUDALAB_DEVICES="0"),
    refused("nccl on the CPU", 2, f"{P2P} --device cpu --backend nccl", "nccl"),
    refused("backend", 2, f"{P2P} --backend cuda:nccl,", "a name such as gloo"),
    refused("size", 2, f"{B}/collectives.py -b 8 -e 4G", "4G", CUDALAB_MEMORY_GIB="1"),
    refused("-G with -I", 2, f"{ONE} -G 3 -I 1", "-I cannot be used with -G"),
    refused("pp over gloo", 2, f"{PAR} --mesh pp2:1f1b --backend gloo",
            "gloo sends no CUDA tensors between stages"),
    # ranks that see one GPU each, as with Slurm's --gpus-per-task
    Row("own GPU", 2, f"tests/own_gpu.py {ALL}", cold=True, emulated=True),
    Row("own GPU rpc", 2, f"tests/own_gpu.py {RPC}", contexts=2, cold=True, emulated=True,
        **ONCE),
    Row("one GPU", 2, f"{ONE_GPU} {P2P}", cold=True, emulated=True),
]  # fmt: skip


@pytest.mark.ci
@pytest.mark.parametrize("nccl2", NCCL2)
@pytest.mark.parametrize("late", ["0", "1"])
def test_the_stand_in(late: str, nccl2: str, bench: Bench, lab: dict[str, str]) -> None:
    """Cold, so that torch is imported after sitecustomize.py, as for a user."""
    variables = lab | {"TORCH_DIST_USE_NCCL2": nccl2, "CUDALAB_LATE": late}
    run = bench("tests/cudalab/selftest.py", json=False, cold=True, **variables)
    assert run.out.count("of 2: fine") == 2


@pytest.mark.ci
def test_a_gpu_that_another_process_uses(bench: Bench, lab: dict[str, str]) -> None:
    """Memory in use before the first call of CUDA, except on GPU 3, which no rank uses."""
    answers = ["1:memory.used=20480 MiB", "3:memory.used=30720 MiB", "1:power.limit=500.00 W"]
    variables = lab | {"CUDALAB_SMI": ";".join(answers)}
    flags = ("-b", "64", "-e", "64", "--iters", "2")
    run = bench("benchmarks/collectives.py", *flags, cold=True, **variables)
    (host,) = run.report.environment["hosts"]
    held = "other processes were already using 20.0 GiB of GPU 1"
    assert f"# warning: {host}: {held}\n" in run.out
    limit = f"power limit of GPU 1 of {host}: 500.00 W (700.00 W elsewhere)"
    assert f"# warning: {limit}\n" in run.out
    assert "30.0 GiB" not in run.out + run.err


def words_of(command: str, folder: Path, root: Path = ROOT) -> list[str]:
    """The words of a row's command, with the paths of files in the checkout."""
    words = [word.replace("{tmp}", str(folder)) for word in command.split()]
    files = ("benchmarks/", "tests/")
    return [str(root / word) if word.startswith(files) else word for word in words]


def judge(row: Row, run: Run, emulated: bool = True) -> None:
    """Fail the test unless the run has the result of its row."""
    said = run.out + run.err
    assert run.status == row.status, said
    for pattern in (*row.says, *(row.log if emulated else ())):
        assert re.search(pattern, said), f"no {pattern!r} in\n{said}"
    assert not row.lacks or not re.search(row.lacks, said), said
    if emulated:
        assert "NCCL mismatch" not in said, said
        assert ("this kernel does nothing" in said) == ("inductor" in row.command), said
        types = set(re.findall(r"first operator on (\w+):", said))
        assert row.types is None or types == set(row.types), f"operators on {sorted(types)}\n{said}"
    cases = run.report.cases if run.path.exists() else []
    checks, passed = [case.check for case in cases], [case for case in cases if not case.failed]
    shares = [case.metrics.get("launch_share", {}) for case in cases]
    assert all(0 <= share <= 1 for each in shares for share in each.values()), shares
    if row.status == 0 or (row.failed and len(checks) > 1):  # other cases pass if one failed
        assert "passed" in checks, said
    failed = [check for check in checks if check.startswith("failed")]
    assert [check for check in failed if not row.failed or row.failed not in check] == [], said
    assert bool(failed) == bool(row.failed), said
    if row.peak_kib:  # otherwise an earlier case is alive, or its peak is reported again
        peaks = [(c.key["model"], c.metrics["memory_allocated_gib"] * 2**20) for c in passed]
        assert all(kib < row.peak_kib[model] for model, kib in peaks), peaks


# entries of a case's key that differ between the two runs
DEVICES = {
    "device",
    "devices",
    "backend",
    "server_device",
    "callee_device",
    "wire",
    "dtype",
    "size",
}
TIMES = re.compile(  # of metrics that are times, are computed from times or differ between devices
    r"(_s2?|_per_s|_cv|_factor|_share|_ranks?|overlap|efficiency|idle|spread|drift|links|bits|slowest)$"
    r"|from_device|mfu|memory|launch_share|slowed|log|gradients_per_update"
)


def values_of(metrics: Any, place: str = "") -> dict[str, Any]:
    """Metrics by path that are neither times nor computed from times."""
    if isinstance(metrics, Estimate) or TIMES.search(place):
        return {}
    if isinstance(metrics, dict):
        parts = metrics.items()
    elif isinstance(metrics, list):
        parts = dict(enumerate(metrics)).items()
    else:
        return {place: metrics}
    return {k: v for name, part in parts for k, v in values_of(part, f"{place}.{name}").items()}


def compare(cuda: list[Case], cpu: list[Case]) -> None:
    """Each case on the CPU has a case on CUDA with the same key, check and values. CUDA may have
    more cases, such as averages, which gloo does not support."""

    def key_of(case: Case) -> str:
        return repr(sorted((k, v) for k, v in case.key.items() if k not in DEVICES))

    on_cuda = {key_of(case): case for case in cuda}
    assert cpu
    for other in cpu:
        case = on_cuda[key_of(other)]
        assert case.check == other.check, case.name
        names = case.metrics.keys() ^ other.metrics.keys()
        assert [name for name in names if not TIMES.search(name)] == [], case.name
        values, expected = values_of(case.metrics), values_of(other.metrics)
        assert values.keys() == expected.keys(), case.name
        for name, value in values.items():
            if isinstance(value, (int, float)):  # torch.save also writes the name of the device
                assert value == pytest.approx(expected[name], rel=1e-3), (case.name, name)
            else:
                assert value == expected[name], (case.name, name)


def compare_values(cuda: Path, cpu: Path, tolerance: float) -> None:
    """On each rank, the first losses, gradients and parameters of the run on the CPU occur on CUDA.
    They are sorted, because gradients arrive at a server in any order; CUDA may have more cases."""
    for path in sorted(cpu.iterdir()):
        of_cuda, of_cpu = (
            [json.loads(line) for line in (where / path.name).read_text().splitlines()]
            for where in (cuda, cpu)
        )
        rest = iter(sorted(of_cuda))
        for name, value in sorted(of_cpu[:COMPARED]):
            near = pytest.approx(value, rel=tolerance)
            assert any(other == name and near == got for other, got in rest), (path.name, name)


def lacks_backend(row: Row) -> bool:
    return bool(re.search("nccl(2|-)", row.command)) and not HAS_NCCL2


def variants() -> list[Any]:
    """A parameter for each row and each implementation of `nccl` to use."""
    parameters = []
    for row in ROWS:
        has_backend = re.search("--backend (gloo|nccl)", row.command)
        for nccl2 in NCCL2 if row.implementations and not has_backend else NCCL2[:1]:
            # the second implementation runs only in `make cudalab`
            marks = [pytest.mark.ci] if row.ci and nccl2 == NCCL2[0] else []
            if lacks_backend(row):
                marks.append(pytest.mark.skip(reason="this torch has one nccl alone"))
            name = f"{row.name}, legacy" if nccl2 != NCCL2[0] else row.name
            parameters.append(pytest.param(row, nccl2, id=name, marks=marks))
    return parameters


@pytest.mark.parametrize(
    ("fault", "name"),
    [(fault, name) for fault in ON_CUDA for name in fault["tests"].split(", ")],
    ids=lambda each: each if isinstance(each, str) else each["name"],
)
def test_fault(
    fault: dict[str, str], name: str, bench: Bench, lab: dict[str, str], tmp_path: Path
) -> None:
    """The row fails if the fault is planted in a copy of the checkout, unless its entry says why it
    may pass. The results are appended to a table."""
    results = ROOT / "tests" / "cudalab" / ".build" / "faults"
    checkout = copy_of_scripts(tmp_path / "checkout")
    ignored = shutil.ignore_patterns(".build", "*cache*")
    shutil.copytree(ROOT / "tests", checkout / "tests", ignore=ignored)
    plant(fault, checkout)
    (row,) = [row for row in ROWS if row.name == name]
    row = replace(row, command=f"{row.command} --timeout 60", on_cpu="")
    reason = ""
    try:
        check_row(row, NCCL2[0], bench, lab, tmp_path, checkout)
    except AssertionError as caught:
        shown = r"failed: \w.*|^HANG: .*|NCCL mismatch.*|^no '.*|^operators on .*|Error: \w.*"
        words = re.findall(shown, str(caught), re.MULTILINE)
        reason = str([*words, *str(caught).splitlines()][0]).strip()
    with results.open("a") as table:
        table.write(f"{fault['name']:70} {name:25} {reason[:90] or 'NOT CAUGHT'}\n")
    assert reason or fault["missed"]


@pytest.mark.parametrize(("row", "nccl2"), variants())
def test_row(row: Row, nccl2: str, bench: Bench, lab: dict[str, str], tmp_path: Path) -> None:
    check_row(row, nccl2, bench, lab, tmp_path)


def check_row(
    row: Row, nccl2: str, bench: Bench, lab: dict[str, str], folder: Path, root: Path = ROOT
) -> None:
    """Run the command of a row and fail unless it has the expected result. root: the checkout."""
    script, *flags = words_of(row.command, folder, root)
    options: dict[str, Any] = {"ranks": row.ranks, "nodes": row.nodes, "cold": row.cold}
    options |= {"status": None, "timeout": LIMIT_S}
    options |= lab | {"CUDALAB_VERBOSE": "1", "TORCH_DIST_USE_NCCL2": nccl2} | row.variables
    if row.log or row.on_cpu:  # calls are counted or values compared
        options["inject"] = "one-untimed"
    if not row.on_cpu:
        run = bench(script, *flags, **options)
        judge(row, run)
    else:
        options["CUDALAB_RANDOM"] = "cpu"
        for where in ("cuda", "cpu"):
            (folder / where).mkdir()
        to_cuda, to_cpu = (
            [str(root / VALUES), str(folder / where)] if Path(script).stem in RECORDED else []
            for where in ("cuda", "cpu")
        )
        run = bench(*to_cuda, script, *flags, **options)
        judge(row, run)
        cuda = run.report.cases
        other = bench(*to_cpu, script, *flags, *row.on_cpu.split(), **options)
        judge(replace(row, log=(), types=()), other)
        compare(cuda, other.report.cases)
        compare_values(folder / "cuda", folder / "cpu", 0.15 if row.types else 1e-3)
    contexts = re.findall(r"pid (\d+) has a context on device (\d+)", run.err)
    assert row.contexts in (None, len(contexts)), contexts
    if row.communicators:
        most = max(open_communicators(run.err).values())
        assert 1 < most <= row.communicators, f"{most} communicators open at a time\n{run.err}"


def open_communicators(said: str) -> dict[str, int]:
    """The largest number of communicators that each process had open at a time."""
    opened: dict[str, str] = {}  # communicator and rank -> process
    most: dict[str, int] = {}
    event = r"NCCL communicator (\S+ rank \d+) of \d+ on device \d+, pid (\d+)"
    event += r"|NCCL (\S+ rank \d+) of \d+ ran"
    for new, process, ended in re.findall(event, said):
        if new:
            opened[new] = process
            most[process] = max(most.get(process, 0), list(opened.values()).count(process))
        else:
            opened.pop(ended, None)  # a line for each kind of operation
    return most


@pytest.mark.parametrize("nccl2", NCCL2)
@pytest.mark.parametrize("name", EXAMPLES)
def test_example(name: str, nccl2: str, bench: Bench, lab: dict[str, str], tmp_path: Path) -> None:
    smaller = [str(ROOT / SMALLER)] if name in SIZES else []
    flags = ["aot_eager"] if name == "compiled_ddp.py" else []  # kernels of Triton do nothing
    options = lab | {"TORCH_DIST_USE_NCCL2": nccl2}
    options["TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING"] = "false"  # pp_bubble.py's
    check_example(name, flags, smaller, bench, tmp_path, **options)


def check_example(
    name: str, flags: list[str], before: list[str], bench: Bench, folder: Path, **options: str
) -> None:
    """Run an example, and replay what record_collectives.py records. before: words before it."""
    trace, path = str(folder / "trace"), ROOT / "examples" / name
    more: dict[str, Any] = options | {"ranks": 3 if "server" in path.read_text() else 2}
    records = name == "record_collectives.py"
    words = [*before, str(path), *flags, *([trace] if records else [])]
    run = bench(*words, json=False, timeout=LIMIT_S, **more)
    assert "95% interval" in run.out
    if records:
        words = [*before, str(ROOT / B / "replay.py"), trace, *SHORT.split()]
        run = bench(*words, timeout=LIMIT_S, **more)
        assert "# not replayed: 0 of " in run.out
        assert {case.check for case in run.report.cases} == {"passed"}


PROFILED = """
import os, sys
import torch, torch.distributed as dist
rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
x = torch.ones(64, device="cuda")
dist.all_reduce(x)
with torch.profiler.profile(record_shapes=True) as profile:
    for _ in range(3):
        dist.all_reduce(x)
        dist.broadcast(x, 0)
        dist.barrier(device_ids=[rank])
    torch.cuda.synchronize()
profile.export_chrome_trace(f"{sys.argv[1]}/rank{rank}_trace.json")
dist.destroy_process_group()
"""


def test_a_profile_is_replayed(bench: Bench, lab: dict[str, str], tmp_path: Path) -> None:
    """A trace of Kineto with collectives over NCCL. For nccl2 it has no sizes."""
    (tmp_path / "profiled.py").write_text(PROFILED)
    (tmp_path / "traces").mkdir()
    options: dict[str, Any] = lab | {"timeout": LIMIT_S, "TORCH_DIST_USE_NCCL2": "0"}
    # Kineto warns about kernels; the variable is read when torch is imported
    options |= {"cold": True, "TORCH_CPP_LOG_LEVEL": "ERROR"}
    bench(str(tmp_path / "profiled.py"), str(tmp_path / "traces"), json=False, **options)
    run = bench(f"{B}/replay.py", str(tmp_path / "traces"), *SHORT.split(), **options)
    assert "# not replayed: 0 of " in run.out
    assert {case.check for case in run.report.cases} == {"passed"}


OTHER_SIZE = """
import datetime, os
import torch, torch.distributed as dist
rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl", timeout=datetime.timedelta(seconds=8))
for step in range(6):
    dist.all_reduce(torch.ones(7 if (rank, step) == (1, 3) else 65536, device="cuda"))
    torch.cuda.synchronize()
"""


def test_another_size_hangs_and_is_named(bench: Bench, lab: dict[str, str], tmp_path: Path) -> None:
    """Over NCCL, the rank with fewer elements completes the collective, and the others wait. Their
    log does not show why, but the dumps of the flight recorder do."""
    (tmp_path / "other_size.py").write_text(OTHER_SIZE)
    options: dict[str, Any] = lab | {"timeout": LIMIT_S, "TORCH_DIST_USE_NCCL2": "0", "cold": True}
    options |= {"CUDALAB_MISMATCH": "hang", "TORCH_FR_BUFFER_SIZE": "2000"}
    options |= {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
    options["TORCH_FR_DUMP_TEMP_FILE"] = str(tmp_path / "nccl_trace_rank_")
    run = bench(str(tmp_path / "other_size.py"), ranks=3, json=False, status=1, **options)
    log, dumps = tmp_path / "job.log", sorted(map(str, tmp_path.glob("nccl_trace_rank_*")))
    log.write_text(run.out + run.err)
    assert len(dumps) == 3
    for files, ranks in (([str(log)], ()), ([str(log), *dumps], (1,))):
        evidence = Evidence()
        for path in files:
            hang.read(path, evidence)
        finding = hang.conclude(evidence)
        assert finding is not None
        assert finding.ranks == ranks, finding.sentence
        both = "rank 1: all_reduce of 7 elements; ranks 0, 2: all_reduce of 65,536 elements"
        assert finding.sentence.endswith(both) == bool(ranks)


@pytest.mark.ci
@pytest.mark.parametrize("nccl2", NCCL2)
def test_ctrl_c(nccl2: str, start: Start, lab: dict[str, str], tmp_path: Path) -> None:
    """While rank 0 waits in NCCL for rank 1."""
    marker, report = tmp_path / "waits", tmp_path / "report.jsonl"
    words = f"{GPT} {TWELVE} --json {report}".split()
    options: dict[str, Any] = lab | {"TORCH_DIST_USE_NCCL2": nccl2, "MARKER": str(marker)}
    process = start(*words, inject="waits", cold=True, **options)
    process.until(marker.exists, LIMIT_S)
    ranks = process.ranks().values()
    for each in process.parts * 2:  # like a terminal, to torchrun and its ranks
        each.send_signal(signal.SIGINT)
    assert process.wait() != 0
    assert psutil.wait_procs(ranks, timeout=500)[1] == []
    # torchrun may be faster, and ends its ranks by SIGTERM after the second signal
    named = r"SIG(INT|TERM): ended after \d cases?, saved in "
    assert re.search(named, process.err), process.err
    assert load(str(report)).status == "interrupted"


@pytest.mark.ci
def test_a_missing_function_is_named(bench: Bench, lab: dict[str, str]) -> None:
    """A run that calls a function that cudalab lacks fails with its name."""
    code = Path(lab["CUDALAB_STATE"]).with_name("missing.py")
    code.write_text("import ctypes, torch\nctypes.CDLL('libcudart.so.13').cudaDeviceReset()\n")
    run = bench(str(code), ranks=1, json=False, cold=True, status=1, **lab)
    assert "called cudaDeviceReset, which is not implemented" in run.err
