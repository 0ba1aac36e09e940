"""harness/environment.py and cpu_load.py: nodes, variables, CPU use by other processes."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest

from common.errors import Refused
from harness import cpu_load, environment, exits
from harness.benchmark import Benchmark, find_world
from harness.cpu_load import Others
from harness.observe import nodes, watchdog
from tests import process


def rank(number: int, **more: Any) -> dict[str, Any]:
    return {"rank": number, "host": "a", "uuid": f"G{number}", "torch": "2", "nccl": "2"} | more


def refusal(found: dict[str, Any], *gathered: Any, tested: range | None = None) -> str:
    """Why this job is refused; "" if it is not."""
    sent = [*gathered, ()]  # by the other ranks, in one gather after the other
    job = Mock(broadcast=lambda value: value, gather=lambda value: [value, *sent.pop(0)])
    try:
        environment.refuse_differences(job, found, {"x.py": "1"}, tested)
    except Refused as error:
        return str(error)
    return ""


def test_jobs_that_must_not_be_measured() -> None:
    """Ranks that share a GPU under NCCL are refused, and so is a node with another torch."""
    shared: dict[str, Any] = {"backend": "nccl", "variables": {}}
    shared["ranks"] = [rank(0), rank(1, uuid="G0")]
    for backend in ("nccl", "nccl2", "cpu:gloo,cuda:nccl"):
        told = refusal(shared | {"backend": backend})
        assert told.startswith("ranks 0 and 1 share a GPU on a; NCCL requires one")
    assert refusal(shared, tested=range(1)) == ""  # rank 1 is a server
    assert refusal(shared | {"backend": "gloo"}) == ""
    assert refusal(shared | {"ranks": [rank(0), rank(1, uuid="G0", host="b")]}) == ""
    assert refusal(shared | {"ranks": [rank(0), rank(1, nccl="", uuid="")]}) == ""
    # NCCL 2.30 allows it, and older versions print why they do not
    assert refusal(shared | {"variables": {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}}) == ""
    mixed = shared | {"ranks": [rank(0), rank(1), rank(2, host="b", torch="1")]}
    assert refusal(mixed) == "torch is 1 on b, 2 elsewhere"


def test_ranks_with_other_arguments_or_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that only some ranks write may differ."""
    monkeypatch.setattr("sys.argv", ["/a/x.py", "--json", "r0", "--profile=t0", "-b", "8 M"])
    found = {"backend": "gloo", "variables": {}, "ranks": [rank(0), rank(1, host="b"), rank(2)]}
    given = ["x.py", "--json", "PATH", "--profile=PATH", "-b"]
    assert environment.without_paths(sys.argv[1:]) == [*given[1:], "8 M"]
    assert environment.without_paths(["--json", "-", "-J", "x"]) == ["--json", "-", "-J", "PATH"]
    assert refusal(found, [([], []), ([], [])]) == ""
    assert refusal(found, [([*given, "9"], []), ([*given, "9"], ["mine"])]) == (
        f"expected the same arguments on all ranks, got `{' '.join(given)} 9` on rank 1, 2, "
        f"`{' '.join(given)} '8 M'` on rank 0"
    )
    assert refusal(found, [([], ["mine", "helper"]), ([], [])]) == (
        "expected the same files on all ranks, but mine, helper of rank 1 (b) differ from rank "
        "0's; use one checkout on all nodes"
    )


def test_what_differs_between_nodes_gpus_and_ranks() -> None:
    """400 of 1,200 nodes have half of the cores, and nodes 3, 5 and 7 differ otherwise."""
    gpu = dict.fromkeys(nodes.OF_GPUS, "x") | {"index": "0", "power.limit": "700.00 W"}
    names = [f"n{i}" for i in range(1200)]
    same = {"local_rank": 0, "threads": 4, "cores": 8}
    ranks: list[dict[str, Any]] = [same | {"rank": i, "host": names[i]} for i in range(1200)]
    cluster: dict[str, Any] = {"hosts": names, "ranks": ranks, "variables": {"NCCL_ALGO": "Ring"}}
    cluster |= {listed: ["x"] * 1200 for listed in nodes.OF_NODES.values()}
    cluster |= {"gpus": [[gpu, gpu | {"index": "1"}]] * 1200, "other_variables": []}
    assert nodes.differences_of(cluster) == []
    cluster["kernels"][3], cluster["topologies"][3] = "5.10\33[2J", "y"
    cluster["gpus"][3] = [gpu, gpu | {"index": "1", "power.limit": "500.00 W"}]
    cluster["gpus"][5] = [gpu | {"driver_version": "535"}] * 2
    for i in range(400):
        ranks[i]["cores"] = 4
    ranks[5]["threads"] = 1
    other = {"NCCL_ALGO": None, "FI_PROVIDER": "efa"}
    cluster["other_variables"] = [{"ranks": [7], "variables": other}]
    few = [f"rank {i} on n{i}" for i in range(8)]
    assert nodes.differences_of(cluster) == [
        "kernel of n3: '5.10\\x1b[2J' (x elsewhere)",
        "topology of n3: another one",
        "driver version of GPU 0 of n5: 535 (x elsewhere)",
        "power limit of GPU 1 of n3: 500.00 W (700.00 W elsewhere)",
        f"cores of {', '.join(few)} and 392 more: 4 (8 elsewhere)",
        "threads of rank 5 on n5: 1 (4 elsewhere)",
        "NCCL_ALGO of rank 7 on n7: unset (Ring elsewhere)",
        "FI_PROVIDER of rank 7 on n7: efa (unset elsewhere)",
    ]


def test_variables_of_some_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative to rank 0, without variables that differ by design."""
    by_design = {"CUDA_VISIBLE_DEVICES": "3", "NCCL_HOSTID": "7", "NCCL_IB_HCA": "mlx5_0"}
    by_design |= {"UCX_NET_DEVICES": "mlx5_0:1", "OMP_PLACES": "{0}", "OMP_NUM_THREADS": "2"}
    by_design |= {"TRITON_CACHE_DIR": "/1", "TORCHELASTIC_X": "1", "GOMP_CPU_AFFINITY": "0"}
    assert not [name for name in by_design if environment.is_compared(name)]
    assert not environment.is_compared("OMPI_COMM_WORLD_RANK")
    names = "LD_PRELOAD CUDA_LAUNCH_BLOCKING PYTORCH_CUDA_ALLOC_CONF MALLOC_ARENA_MAX TP_X FI_X "
    names += "GLIBC_TUNABLES MKL_NUM_THREADS TCMALLOC_X NCCL_ALGO TORCH_X"
    assert [name for name in names.split() if not environment.is_compared(name)] == []
    usual, ring = {"NCCL_DEBUG": "WARN"}, {"NCCL_DEBUG": "WARN", "NCCL_ALGO": "Ring"}
    other = {"NCCL_DEBUG": "INFO", "FI_PROVIDER": "efa"}
    of_ranks = [other, usual, usual, usual, ring, ring, ring]
    assert environment.other_variables(of_ranks[1:4]) == []
    without_fi = {"FI_PROVIDER": None, "NCCL_DEBUG": "WARN"}
    assert environment.other_variables(of_ranks) == [
        {"ranks": [1, 2, 3], "variables": without_fi},
        {"ranks": [4, 5, 6], "variables": {**without_fi, "NCCL_ALGO": "Ring"}},
    ]
    # --resume compares these of a run; a variable of another program is not among them.
    names = "LD_PRELOAD LD_LIBRARY_PATH PYTHONMALLOC PYTHONOPTIMIZE MALLOC_ARENA_MAX NCCL_ALGO "
    names += "RCCL_X TORCH_X OMP_X GLOO_X UCX_X FI_X MLX5_X HSA_X"
    given = dict.fromkeys(names.split(), "1")
    monkeypatch.setattr(os, "environ", given | {"EDITOR": "vi"})
    assert environment.user_variables() == given


def test_warnings_in_the_first_lines() -> None:
    """Two ranks share a GPU, another process uses the other GPU, and one node differs."""
    found: dict[str, Any] = {"hosts": ["a"]}
    of_ranks = [rank(0, local_rank=0), rank(1, local_rank=1, uuid="G0")]
    found |= {"ranks": of_ranks, "differences": ["b is small"]}
    gpu = {"index": "0", "mig.mode.current": "Disabled", "memory.used": "20480 MiB"}
    found["gpus"] = [[gpu, gpu | {"index": "1", "mig.mode.current": "Enabled"}]]
    assert nodes.warnings_of(found) == [
        "b is small",
        "ranks 0 and 1 share a GPU on a: each one's times include the other's work",
        "a: other processes were already using 20.0 GiB of GPU 0",
    ]
    for text in ("1024 MiB", "", "[N/A]"):  # memory of the driver itself, or unknown
        gpu["memory.used"] = text
        assert environment.memory_in_use(found) == {}


NVIDIA_SMI = """\
#!/bin/sh
case "$1" in *memory.total*) echo "Field \\"x\\" is not a valid field to query."; exit 2; esac
echo "3, GPU-5e9f2c, NVIDIA H100, 580.6, Disabled, Enabled, 30, 700.00 W, 1980 MHz, 34, 0x1"
"""


def test_the_state_of_gpus_comes_from_nvidia_smi(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nvidia-smi").write_text(NVIDIA_SMI)
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (gpu,) = environment.gpu_state()
    assert (gpu["power.limit"], gpu["clocks_event_reasons.active"]) == ("700.00 W", "0x1")
    assert environment.gpu_state("memory.total") == []  # a field that the driver does not know
    mig = gpu | {"uuid": "GPU-1", "mig.mode.current": "Enabled"}
    other_jobs = gpu | {"uuid": "GPU-2"}
    ranks = [{"uuid": "5e9f2c"}, {"uuid": "of an instance"}, {"uuid": ""}]  # the last: on the CPU
    assert environment.used_gpus([other_jobs, gpu, mig], ranks) == [gpu, mig]
    # The number of GPUs is that of the node, of which the ranks may use fewer.
    errors = enumerate(("0", "[N/A]", "1", "20", "0"))
    gpus = [{"index": str(i), environment.UNCORRECTED: count} for i, count in errors]
    found = {"gpus": [gpus, gpus[:2], gpus[2:3]], "gpu_counts": [8, 7, 7]}
    assert environment.gpu_problems(found) == {
        0: "GPU 2, 3 have uncorrected memory errors",
        1: "it has 7 of 8 GPUs",
        2: "GPU 2 has uncorrected memory errors; it has 7 of 8 GPUs",
    }
    none: dict[str, Any] = {"gpus": [[]], "gpu_counts": [0]}
    assert environment.gpu_problems(none, 8) == {0: "it has 0 of 8 GPUs"}
    healthy = {"gpus": [gpus[:2]], "gpu_counts": [8]}
    assert environment.gpu_problems(healthy) == environment.gpu_problems(healthy, 8) == {}


@pytest.mark.parametrize("by_torchrun", [True, False])
def test_variables_that_the_user_has_set_are_kept(
    by_torchrun: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A value that torchrun has set is not the user's. The report contains no secrets."""
    clean = {name: text for name, text in process.environment().items() if "NCCL" not in name}
    if by_torchrun:
        clean |= {"TORCHELASTIC_RUN_ID": "none", environment.ERROR_HANDLING: "1"}
    monkeypatch.setattr(os, "environ", clean.copy())
    assert environment.ERROR_HANDLING not in environment.user_variables()
    watchdog.set_nccl_variables()
    assert {os.environ[name] for name in watchdog.SETTINGS} == {"0"}
    users = dict.fromkeys(watchdog.SETTINGS, "3" if by_torchrun else "1")
    monkeypatch.setattr(os, "environ", clean | users | {"TORCH_secret": "hunter2"})
    told = environment.user_variables()
    secret = told.pop("TORCH_secret")
    assert secret == "(set)"
    assert told.items() >= users.items()
    watchdog.set_nccl_variables()
    assert os.environ.items() >= users.items()


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """No variables of a launcher."""
    for name in set(os.environ) - set(process.environment()):
        monkeypatch.delenv(name)
    return monkeypatch


POOLS = '{"cluster": {"workerpool0": ["a:1"], "workerpool1": ["b:1", "c:1"]}}'
CLOUDS = {"SKYPILOT_NUM_NODES": "3", "SM_HOSTS": '["a", "b", "c"]', "CLUSTER_SPEC": POOLS}


def test_processes_without_torchrun_or_without_its_wrapper(
    alone: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Each would be a world of one rank. Not with one node, nor once a launcher has joined them."""
    torchrun = "configure torchrun, but python was started; start torchrun"
    cloud = "lists 3 nodes, but each would run as a world of its own; start torchrun"
    task = "but each task would run as a world of one; start them with launch/"
    rows = [({name: text}, f"{name} {cloud}") for name, text in CLOUDS.items()]
    rows += [({size: "4"}, f"{size}=4, {task}") for _, size in exits.read_launchers()]
    for values, words in (
        *rows,
        ({"PET_NPROC_PER_NODE": "auto"}, f"PET_NNODES=1 and PET_NPROC_PER_NODE=auto {torchrun}"),
        ({"PET_NNODES": "2"}, f"PET_NNODES=2 and PET_NPROC_PER_NODE=1 {torchrun}"),
    ):
        with alone.context() as patch:
            for name, value in values.items():
                patch.setenv(name, value)
            with pytest.raises(SystemExit, match="2"):
                exits.refuse_worlds_of_one()
            (line,) = capsys.readouterr().err.splitlines()
            assert words in line
            patch.setenv("RANK", "0")
            exits.refuse_worlds_of_one()
    for name in CLOUDS:
        for other in ("1", '["a"]', '{"cluster": {"workerpool0": ["a:1"]}}', "{}", "null", "x"):
            alone.setenv(name, other)
            exits.refuse_worlds_of_one()
    # Like a script in a tutorial that was copied without launch/.
    alone.setattr("harness.exits.ROOT", tmp_path)
    assert exits.read_launchers() == []
    assert find_world() == (0, 0, 1, 1)


def test_cpu_use_of_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """In 10 s the cores were busy for 12 s, 7 s of which belong to the job."""
    clock, busy, job = [100.0], [50.0], [20.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(cpu_load, "busy_seconds", lambda cores: busy[0])
    monkeypatch.setattr(cpu_load, "job_seconds", lambda root: job[0])
    load = cpu_load.CpuLoad()
    clock[0], busy[0], job[0] = 110.0, 62.0, 27.0
    assert load.of_others().busy == 0.5
    job[0] = 33.0  # both are counted in ticks, so the difference may be negative
    assert load.of_others().busy == 0


BURN = "import time\nwhile time.process_time() < 0.3: pass\n"


def test_cpu_use_of_the_job() -> None:
    """The shell of a wrapper is not the launcher. CPU time of children that have ended counts."""
    code = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {BURN!r}])\n{BURN}"
    code += "print(1, flush=True)\ninput()"
    # the `;` keeps the shell from replacing itself
    command = ["sh", "-c", '"$@"; true', "sh", sys.executable, "-c", code]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as shell:
        assert shell.stdout
        assert shell.stdout.readline() == "1\n"
        (own,) = psutil.Process(shell.pid).children()
        assert cpu_load.launcher_of(own).pid == os.getpid()
        assert cpu_load.job_seconds(own) >= 0.55  # in ticks of 0.01 s
        shell.communicate("\n", timeout=500)


def test_a_run_is_disturbed_above_a_tenth_of_the_cores() -> None:
    """The node with the highest use counts."""
    quiet, busy, busiest = [Others(0.2, 2), Others(6.0, 64)], Others(0.21, 2), Others(1.6, 2)
    told = environment.others_text(["a", "b", "c"], [*quiet, busy])
    assert told == "other processes used 0.2 of 2 cores of c"

    def taken(*loads: Others) -> Others | None:
        job = Mock(broadcast=lambda value: value)
        return Benchmark.disturbed(Mock(job=job, load_of_others=lambda: loads))

    assert taken() is None  # while two commands are interleaved
    assert taken(*quiet) is None
    assert taken(busy, busiest, *quiet) == busiest
