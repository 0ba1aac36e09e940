"""What environment.py reads out of other programs' words, what it refuses, and what other programs
use of a node."""

import json
import os
import platform
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest
import torch

from common import groups as dist
from common.benchmark import Benchmark
from common.environment import (
    CpuLoad,
    Others,
    collect,
    cpu_model,
    differences,
    gpu_state,
    job_seconds,
    lacking,
    others_text,
    preamble,
    problem,
    user_variables,
)
from common.join import (
    check_backend,
    connect_to_store,
    meet,
    meets_on_loopback,
    misfit,
    set_variables,
    world,
)
from tests.process import ROOT, environment


def rank(number: int, **more: str) -> dict[str, Any]:
    return {"rank": number, "host": "a", "uuid": f"G{number}", "torch": "2", "nccl": "2"} | more


@pytest.mark.parametrize(
    ("cpuinfo", "name"),
    [
        (b"processor\t: 0\nmodel name\t: AMD EPYC \nflags\t: x\n", "AMD EPYC"),
        (None, platform.machine()),
    ],
)
def test_the_name_of_a_processor(
    cpuinfo: bytes | None, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None: there is no such file."""
    path = tmp_path / "cpuinfo"
    if cpuinfo is not None:
        path.write_bytes(cpuinfo)
    monkeypatch.setattr("common.environment.Path", lambda name: path)
    assert cpu_model() == name


def test_what_must_not_be_measured() -> None:
    """Ranks under test that share a GPU under NCCL; a node with another torch."""
    shared: dict[str, Any] = {"backend": "nccl", "variables": {}}
    shared["ranks"] = [rank(0), rank(1, uuid="G0")]
    assert (problem(shared) or "").startswith("ranks 0 and 1 share a GPU on a; NCCL wants one")
    assert problem(shared, tested=range(1)) is None  # rank 1 is a server
    assert problem(shared | {"backend": "gloo"}) is None
    assert problem(shared | {"ranks": [rank(0), rank(1, uuid="G0", host="b")]}) is None
    assert problem(shared | {"ranks": [rank(0), rank(1, nccl="", uuid="")]}) is None
    # NCCL 2.30 can, and an older one says why it cannot
    assert problem(shared | {"variables": {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}}) is None
    mixed = shared | {"ranks": [rank(0), rank(1), rank(2, host="b", torch="1")]}
    assert problem(mixed) == "torch is 1 on b, 2 elsewhere"
    for backend in ("nccl2", "nccl-legacy", "cpu:gloo,cuda:nccl"):
        assert "ranks 0 and 1 share a GPU on a" in (problem(shared | {"backend": backend}) or "")


def test_nodes_that_differ_are_named_and_counted() -> None:
    nodes = [{"host": f"n{i}", "device": "D", "cores": 8, "topology": "t"} for i in range(1024)]
    assert differences(nodes) == []
    nodes[1] |= {"topology": "u"}
    assert differences(nodes) == ["topology of n1 is not that of other nodes"]
    nodes[1] |= {"topology": "t"}
    for node in nodes[:400]:
        node["cores"] = 4
    (line,) = differences(nodes)
    assert line == "cores of n0, n1, n2, n3, n4, n5, n6, n7 and 392 more is not that of other nodes"


def test_what_the_first_lines_say_and_warn_of() -> None:
    """Planted: two ranks on one GPU, another program, and a node that differs."""
    ranks = [rank(i, uuid="G0") | {"device": "H100", "cores": 8, "threads": 1} for i in (0, 1)]
    found: dict[str, Any] = {"torch": "2.11", "cuda": "13.0", "nccl": "2.28.9", "python": "3"}
    found |= {"backend": "gloo", "world_size": 2}
    found |= {"num_nodes": 1, "hosts": ["a"], "ranks": ranks, "topologies": ["GPU0 X"]}
    found |= {"differences": ["cores of b is not that of other nodes"], "others": [Others(1.5, 8)]}
    lines = preamble(found).splitlines()
    assert lines[:4] == [
        "# PyTorch 2.11, CUDA 13.0, NCCL 2.28.9, Python 3, backend gloo",
        "# 2 ranks on 1 node",
        "# rank 0: a, H100, 8 cores, 1 thread",
        "# rank 1: a, H100, 8 cores, 1 thread",
    ]
    assert lines[4] == "# GPU0 X"
    assert lines[-3:] == [
        "# warning: cores of b is not that of other nodes",
        "# warning: other programs take 1.5 of 8 cores of a: times will scatter",
        "# warning: ranks 0 and 1 share a GPU on a: their times include each other's turns",
    ]


def test_gpus_are_described_where_the_first_rank_of_the_node_has_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A master on the CPU, which is rank 0, and a trainer on CUDA."""
    gpus = [{"index": "0"}]
    trainer = rank(1, nccl="2.28.9") | {"device": "H100"}

    def gather(value: Any) -> list[Any]:
        return [value, "cuda" if value == "cpu" else (trainer, None)]

    monkeypatch.setattr("common.environment.gather", gather)
    monkeypatch.setattr("common.environment.share", lambda value: value)
    monkeypatch.setattr("common.environment.gpu_state", lambda: gpus)
    monkeypatch.setattr("common.environment.run", lambda command: "GPU0 X")
    master = dist.Job(0, 0, 2, 2, torch.device("cpu"), "nccl", torch.distributed.HashStore())
    described = collect(master, {})
    assert described["gpus"] == [gpus]
    assert described["nccl"] == "2.28.9"
    assert described["topologies"] == ["GPU0 X"]
    assert described["cuda"] == torch.version.cuda


NVIDIA_SMI = """\
#!/bin/sh
case "$1" in *memory.total*) echo "Field \\"x\\" is not a valid field to query."; exit 2; esac
cat <<'END'
3, GPU-5e9f2c, NVIDIA H100 80GB HBM3, 580.65.06, Disabled, Enabled, 0, 700.00 W, 1980 MHz, 34, 0x1
1, GPU-5e9f2d, NVIDIA H100 80GB HBM3, 580.65.06, Disabled, Enabled, 0, 650.00 W, 1980 MHz, 34, 0x1
END
"""


def test_the_state_of_gpus_is_what_nvidia_smi_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    tool.write_text(NVIDIA_SMI)
    tool.chmod(0o755)
    first, second = gpu_state()
    assert (first["index"], second["index"]) == ("3", "1")
    assert (first["power.limit"], second["power.limit"]) == ("700.00 W", "650.00 W")
    assert first["clocks_event_reasons.active"] == "0x1"
    assert gpu_state("memory.total") == []  # a field that this driver does not know
    tool.write_text("#!/bin/sh\nexit 9\n")  # no driver
    assert gpu_state() == []


def test_lacking() -> None:
    errors = "ecc.errors.uncorrected.volatile.total"
    healthy, broken, unknown = ({"index": "7", errors: text} for text in ("0", "30", "[N/A]"))
    assert lacking({"gpus": [[healthy] * 8, [healthy] * 7]}) == {1: "it has 7 of 8 GPUs"}
    assert lacking({"gpus": [[healthy, broken], [unknown, healthy]]}) == {
        0: "GPU 7 has uncorrected errors of its memory"
    }
    assert lacking({"gpus": [[]]}) == {}
    assert lacking({"gpus": [[]]}, 8) == {0: "it has 0 of 8 GPUs"}


@pytest.mark.parametrize(
    ("name", "ours", "users"),
    [
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0", "3"),
        ("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "0", "15000"),
        ("TORCH_NCCL_RETHROW_CUDA_ERRORS", "0", "1"),
    ],
)
@pytest.mark.parametrize("by_torchrun", [True, False])
def test_what_the_user_has_set_stays(
    name: str, ours: str, users: str, by_torchrun: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {"TORCHELASTIC_RUN_ID": "none", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    clean = {key: text for key, text in os.environ.items() if "NCCL" not in key}
    clean |= own if by_torchrun else {}
    monkeypatch.setattr(os, "environ", clean.copy())
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in user_variables()
    set_variables()
    assert os.environ[name] == ours
    monkeypatch.setattr(os, "environ", clean | {name: users})
    assert user_variables()[name] == users
    set_variables()
    assert os.environ[name] == users


def test_a_1_that_torchrun_has_not_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    set_variables()
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "1"


BY_HAND = {
    "RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


def start() -> None:
    _, _, *sizes = world()
    connect_to_store(0, 20, meets_on_loopback(*sizes))


@pytest.fixture
def refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """refused(function, NAME="value", ...): the one line that it ends with, status 2. None: unset.

    The variables are those of a process that is started by hand, with these changes.
    """

    def run(function: Callable[[], object], **changes: str | None) -> str:
        with monkeypatch.context() as patch:
            for name in set(os.environ) - set(environment()):  # a launcher's
                patch.delenv(name)
            for name, value in (BY_HAND | changes).items():
                patch.setenv(name, value or "")  # noted, so that it is as before at the end
                if value is None:
                    patch.delenv(name)
            with pytest.raises(SystemExit) as caught:
                function()
        assert caught.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    return run


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("RANK", None, "a whole number from 0 to 1, but it is not set"),
        ("RANK", "x", "a whole number from 0 to 1, got 'x'"),
        ("RANK", "5", "a whole number from 0 to 1, got '5'"),
        ("WORLD_SIZE", "-2", "a whole number of at least 1, got '-2'"),
        ("LOCAL_WORLD_SIZE", "0", "a whole number from 1 to 2, got '0'"),
        ("LOCAL_RANK", None, "a whole number from 0 to 1, but it is not set"),
        ("MASTER_ADDR", None, "the name or address of rank 0's host, but it is not set"),
        ("MASTER_ADDR", "no..host", "the name or address of rank 0's host, got 'no..host'"),
        ("MASTER_PORT", "99999", "a whole number from 1 to 65535, got '99999'"),
    ],
)
def test_a_wrong_variable_of_the_launcher(
    name: str, value: str | None, expected: str, refused: Callable[..., str]
) -> None:
    line = refused(start, **{name: value})
    assert f"error: {name} on {socket.gethostname()}: expected {expected}; without torch" in line
    assert "e.g. RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=2 MASTER_ADDR=" in line


def test_a_port_in_use(refused: Callable[..., str]) -> None:
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = str(other.getsockname()[1])
        for on_loopback in (False, True):
            line = refused(lambda there=on_loopback: meet(0, 2, 20, there), MASTER_PORT=port)
            assert f"expected a free port (Address already in use), got '{port}'" in line


@pytest.mark.parametrize(
    ("variables", "sizes", "want"),
    [
        ({"LOCAL_RANK": "0"}, (2, 2), True),  # wherever MASTER_ADDR leads
        ({"LOCAL_RANK": "0"}, (4, 2), False),
        ({"LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}, (4, 2), False),
        ({}, (2, 2), False),
        ({"MASTER_ADDR": "localhost"}, (2, 2), True),
        ({"MASTER_ADDR": "::1"}, (2, 2), True),
        ({"MASTER_ADDR": "0.0.0.0"}, (2, 2), False),
    ],
)
def test_who_meets_on_loopback(
    variables: dict[str, str], sizes: tuple[int, int], want: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in ({"MASTER_ADDR": "10.0.0.1"} | variables).items():
        monkeypatch.setenv(name, value)
    assert meets_on_loopback(*sizes) is want


def test_ranks_that_do_not_fit_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of the store: host, address, command line."""
    words = ["x.py", "-b", "8"]
    here, there = ["a", "10.0.0.1", words], ["b", "10.0.0.2", words]
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert misfit([here, there, there]) is None
    other = ["b", "10.0.0.2", ["x.py", "-b", "8 K"]]
    assert misfit([here, other, here, other]) == (
        "expected the same arguments on all ranks, got `x.py -b '8 K'` on rank 1, 3, "
        "`x.py -b 8` on rank 0"
    )
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert misfit([here, here]) is None
    assert misfit([here, there]) == (
        "RANK and WORLD_SIZE alone are for one host, got a (10.0.0.1), b (10.0.0.2); "
        "set LOCAL_RANK and LOCAL_WORLD_SIZE"
    )


JOINS = """
import os
from common.join import join
join("cpu", None, 9)
print(os.environ["GLOO_SOCKET_IFNAME"], os.environ["TP_SOCKET_IFNAME"])
"""


def test_on_one_node_gloo_and_tensorpipe_are_told_loopback() -> None:
    """By themselves they listen on the address of the host's name. What is set stays."""
    clean = {name: text for name, text in os.environ.items() if "IFNAME" not in name}
    for variables, shown in (({}, "lo lo\n"), ({"GLOO_SOCKET_IFNAME": "lo,lo"}, "lo,lo lo\n")):
        command = [sys.executable, "-c", JOINS]
        own = clean | variables
        done = subprocess.run(command, cwd=ROOT, env=own, capture_output=True, text=True)
        assert done.stdout == shown, done.stderr


def test_the_second_connection_does_not_wait_for_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watchdog looks for other ranks while the main thread waits for one of them."""
    server = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    of_the_run = torch.distributed.PrefixStore("torchrun-bench/0", server)
    words = [os.path.basename(sys.argv[0]), *sys.argv[1:]]
    of_the_run.set("here/1", json.dumps([socket.gethostname(), "127.0.0.1", words]))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(server.port))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    first, second = meet(0, 2, 20)
    assert isinstance(first, torch.distributed.PrefixStore)
    assert isinstance(second, torch.distributed.PrefixStore)
    assert first.underlying_store is not second.underlying_store  # one call at a time for each
    waits = threading.Thread(target=first.get, args=["a late rank"])
    waits.start()
    second.set("seen meanwhile", "yes")
    assert of_the_run.get("seen meanwhile") == b"yes"
    assert waits.is_alive()
    second.set("a late rank", "here")
    waits.join(20)
    assert not waits.is_alive()


def test_the_numbers_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """(rank, number on its node, world size, ranks of its node)."""

    def given(**values: int) -> tuple[int, ...]:
        for name in (*BY_HAND, "GROUP_WORLD_SIZE"):
            monkeypatch.delenv(name, raising=False)
        for name, value in values.items():
            monkeypatch.setenv(name, str(value))
        return world()

    assert given() == (0, 0, 1, 1)
    torchrun = {"WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 2, "GROUP_WORLD_SIZE": 2}
    assert given(RANK=3, LOCAL_RANK=1, **torchrun) == (3, 1, 4, 2)
    assert given(RANK=3, LOCAL_RANK=0, **torchrun) == (3, 1, 4, 2)  # --virtual-local-rank
    assert given(RANK=2, LOCAL_RANK=0, **torchrun) == (2, 0, 4, 2)
    # a node of 1 and one of 3: the last rank is not the first one of its node
    assert given(RANK=3, LOCAL_RANK=2, **torchrun | {"LOCAL_WORLD_SIZE": 3}) == (3, 2, 4, 3)
    # srun's numbers, which need not follow the nodes
    assert given(RANK=2, LOCAL_RANK=1, WORLD_SIZE=4, LOCAL_WORLD_SIZE=2) == (2, 1, 4, 2)
    assert dist.local_rank() == 1
    # alone: all are on one node
    assert given(RANK=2, WORLD_SIZE=4) == (2, 2, 4, 4)
    assert dist.local_rank() == 2


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nccl2", "needs CUDA devices, this run is on the CPU; try gloo"),
        ("cpu:gloo,cuda:nccl", "needs CUDA devices"),
        ("cpu:gloo,", "expected a name such as gloo or cpu:gloo,cuda:nccl, got 'cpu:gloo,'"),
        ("gloo,ucc", "this torch was built without it"),
        ("mpx", "this torch was built without it"),
    ],
)
def test_backends_that_cannot_work_on_the_cpu(
    name: str, words: str, refused: Callable[..., str]
) -> None:
    assert words in refused(lambda: check_backend(name, cuda=False))


@pytest.mark.parametrize("name", ["TORCH_TOKEN", "TORCH_secret"])
def test_secrets_stay_out_of_reports(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "hunter2")
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    told = user_variables()
    assert (told[name], told["NCCL_ALGO"]) == ("(not shown)", "Ring")


FREED = """
from common.join import keep_freed_memory
import torch
print(keep_freed_memory())
def resident(): return int(open("/proc/self/statm").read().split()[1]) * 4096
blocks = [torch.ones(2**18) for _ in range(64)]  # of 1 MiB
before = resident()
del blocks
print(before - resident() < 2**24)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
@pytest.mark.parametrize(("variables", "kept"), [({}, True), ({"MALLOC_TOP_PAD_": "0"}, False)])
def test_freed_memory_is_kept_unless_the_user_has_set_malloc(
    variables: dict[str, str], kept: bool
) -> None:
    """So that the first case of a run is no slower than the next one."""
    command = [sys.executable, "-c", FREED]
    env = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    run = subprocess.run(
        command, env=env | variables, cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert run.stdout.split() == [str(kept), str(kept)], run.stderr


# -- what other programs use of a node ------------------------------------------------------------

BURN = "import time\nwhile time.process_time() < 0.3: pass\n"


def test_what_the_job_did_not_use_others_did(monkeypatch: pytest.MonkeyPatch) -> None:
    """In 10 s the cores were busy for 12 s, of which the job used 7."""
    clock, busy, job = [100.0], [50.0], [20.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr("common.environment.busy_seconds", lambda cores: busy[0])
    monkeypatch.setattr("common.environment.job_seconds", lambda root: job[0])
    load = CpuLoad()
    clock[0], busy[0], job[0] = 110.0, 62.0, 27.0
    assert load.of_others().busy == 0.5
    job[0] = 33.0  # both are counted in ticks: never below 0
    assert load.of_others().busy == 0
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    clock[0] = 100.0625  # ticks are too coarse for that: it waits until 0.1 s are over
    load.of_others()
    assert slept == [pytest.approx(0.0375)]


def test_children_count_also_after_their_end() -> None:
    """A process that has burnt 0.3 s of CPU, and whose child did the same and ended."""
    code = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {BURN!r}])\n{BURN}"
    with subprocess.Popen(
        [sys.executable, "-c", f"{code}\nprint(1, flush=True)\ninput()"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert job_seconds(psutil.Process(process.pid)) >= 0.55  # in ticks of 0.01 s
        process.communicate(b"\n", timeout=60)


def test_a_shell_between_launcher_and_rank_is_passed_over() -> None:
    """The `;` keeps the shell from replacing itself."""
    code = "import psutil; from common.environment import launcher_of\n"
    code += "print(launcher_of(psutil.Process()).pid)"
    for words in ([sys.executable, "-c", code], ["sh", "-c", '"$@"; true', "sh"]):
        command = [*words, *([sys.executable, "-c", code] if words[0] == "sh" else [])]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert done.stdout == f"{os.getpid()}\n", done.stderr


def test_a_busy_node_is_named() -> None:
    loads = [Others(0.2, 2), Others(0.21, 2), Others(3.0, 64)]
    assert others_text(["a", "b", "c"], loads) == "other programs take 0.2 of 2 cores of b"
    assert others_text(["a"], loads[:1]) == ""
    assert others_text(["a", "b"], []) == ""  # a dry run


@pytest.mark.parametrize(
    ("loads", "taken"),
    [
        ([], None),  # while two commands take turns
        ([Others(0.2, 2), Others(6.0, 64)], None),
        ([Others(0.9, 2), Others(1.6, 2), Others(3.0, 64)], Others(1.6, 2)),
    ],
)
def test_a_run_is_disturbed_from_a_tenth_of_a_node_on(
    loads: list[Others], taken: Others | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node where they took most counts. Rank 0 knows the loads."""
    monkeypatch.setattr("common.benchmark.share", lambda value: value)
    assert Benchmark.disturbed(Mock(load_of_others=lambda: loads)) == taken
