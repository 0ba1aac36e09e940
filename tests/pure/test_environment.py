"""harness/environment.py, join.py and cpu_load.py: nodes, variables of launchers, CPU use."""

import json
import os
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
from torch.distributed import PrefixStore, TCPStore

from common import groups, join
from common.errors import Refused
from harness import cpu_load, environment
from harness.benchmark import Benchmark
from harness.cpu_load import Others
from harness.observe import nodes
from tests import process


def rank(number: int, **more: Any) -> dict[str, Any]:
    return {"rank": number, "host": "a", "uuid": f"G{number}", "torch": "2", "nccl": "2"} | more


class Lonely:
    """Rank 0 of a job whose other ranks send these values, one per gather."""

    def __init__(self, *gathered: Any) -> None:
        self.gathered = list(gathered)

    def broadcast(self, value: Any) -> Any:
        return value

    def gather(self, value: Any) -> list[Any]:
        return [value, *(self.gathered.pop(0) if self.gathered else ())]


def refusal(found: dict[str, Any], *gathered: Any, tested: range | None = None) -> str:
    """Why this job is refused; "" if it is not."""
    job: Any = Lonely(*gathered)
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
    assert refusal(found, [None, None], [[], []]) == ""
    assert refusal(found, [[*given, "9"], [*given, "9"]]) == (
        f"expected the same arguments on all ranks, got `{' '.join(given)} 9` on rank 1, 2, "
        f"`{' '.join(given)} '8 M'` on rank 0"
    )
    assert refusal(found, [None, None], [["mine", "helper"], []]) == (
        "expected the same files on all ranks, but mine, helper of rank 1 (b) differ from rank "
        "0's; use one checkout on all nodes"
    )


def test_nodes_that_differ_are_named_and_counted() -> None:
    """400 of 1,200 nodes have half of the cores. One has another kernel and power limit, one
    another driver."""
    gpu = dict.fromkeys(nodes.OF_GPUS, "x") | {"index": "0", "power.limit": "700.00 W"}
    same = dict.fromkeys(nodes.OF_NODES, "x") | {"gpus": [gpu, gpu | {"index": "1"}]}
    cluster = [same | {"host": f"n{i}", "cores": 8} for i in range(1200)]
    ranks = [{"rank": i, "local_rank": 0, "host": f"n{i}", "threads": 4} for i in range(1200)]
    assert nodes.node_lines(cluster, ranks) == []
    few = [node | {"cores": 4} for node in cluster[:400]]
    lines = nodes.node_lines([*few, *cluster[400:]], ranks)
    assert lines[0] == "n0 differs: cores 4 (8 elsewhere)"
    assert lines[15:] == [
        "n15 differs: cores 4 (8 elsewhere)",
        "... and 384 more nodes that differ",
    ]
    capped = gpu | {"index": "1", "power.limit": "500.00 W"}
    cluster[3] |= {"kernel": "5.10", "topology": "y", "gpus": [gpu, capped]}
    cluster[5] |= {"gpus": [gpu | {"driver_version": "535"}] * 2}
    ranks[5] |= {"threads": 1}
    assert nodes.node_lines(cluster, ranks) == [
        "n3 differs: kernel 5.10 (x elsewhere); topology; "
        "power limit of GPU 1 500.00 W (700.00 W elsewhere)",
        "n5 differs: driver version of its GPUs 535 (x elsewhere); "
        "threads of rank 5: 1 (4 elsewhere)",
    ]


def test_variables_that_can_affect_a_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    """--resume compares these of a run; a variable of another program is not among them."""
    names = "LD_PRELOAD LD_LIBRARY_PATH PYTHONMALLOC PYTHONOPTIMIZE MALLOC_ARENA_MAX NCCL_ALGO "
    names += "RCCL_X TORCH_X OMP_X GLOO_X UCX_X FI_X MLX5_X HSA_X"
    given = dict.fromkeys(names.split(), "1")
    monkeypatch.setattr(os, "environ", given | {"EDITOR": "vi"})
    assert environment.user_variables() == given


def test_variables_of_some_ranks() -> None:
    """Each host with deviating ranks has a line with both values. Variables that differ by design
    are left out."""
    by_design = {"CUDA_VISIBLE_DEVICES": "3", "NCCL_HOSTID": "7", "NCCL_IB_HCA": "mlx5_0"}
    by_design |= {"UCX_NET_DEVICES": "mlx5_0:1", "OMP_PLACES": "{0}", "OMP_NUM_THREADS": "2"}
    by_design |= {"TRITON_CACHE_DIR": "/1", "TORCHELASTIC_X": "1", "GOMP_CPU_AFFINITY": "0"}
    assert not [name for name in by_design if environment.is_compared(name)]
    assert not environment.is_compared("OMPI_COMM_WORLD_RANK")
    names = "LD_PRELOAD CUDA_LAUNCH_BLOCKING PYTORCH_CUDA_ALLOC_CONF MALLOC_ARENA_MAX TP_X FI_X "
    names += "GLIBC_TUNABLES MKL_NUM_THREADS TCMALLOC_X NCCL_ALGO TORCH_X"
    assert [name for name in names.split() if not environment.is_compared(name)] == []
    usual, ring = {"NCCL_DEBUG": "WARN"}, {"NCCL_DEBUG": "WARN", "NCCL_ALGO": "Ring"}
    other = {"NCCL_DEBUG": "INFO\33[2J", "FI_PROVIDER": "efa"}
    of_ranks = [other, usual, usual, usual, ring, ring, ring]
    hosts = ["a", "a", "a", "a", "b", "b", "c"]
    for of_rank in of_ranks:  # as sent to rank 0
        assert environment.with_changes(usual, environment.changes(usual, of_rank)) == of_rank
    assert environment.changes(usual, usual) == {}
    assert environment.other_variables(of_ranks[1:4]) == []
    assert environment.other_variables(of_ranks, first=1) == [
        {"ranks": [4, 5, 6], "variables": {"NCCL_ALGO": "Ring"}},
        {"ranks": [0], "variables": {"FI_PROVIDER": "efa", "NCCL_DEBUG": "INFO\33[2J"}},
    ]
    # in the report, relative to rank 0, whose variables are all in it
    without_fi = {"FI_PROVIDER": None, "NCCL_DEBUG": "WARN"}
    assert environment.other_variables(of_ranks) == [
        {"ranks": [1, 2, 3], "variables": without_fi},
        {"ranks": [4, 5, 6], "variables": {**without_fi, "NCCL_ALGO": "Ring"}},
    ]
    assert nodes.variable_lines(of_ranks[1:4], hosts) == []
    # of two different ranks, the first is the reference
    assert nodes.variable_lines(of_ranks[3:5], ["a", "b"]) == [
        "variables of rank 1 on b differ: NCCL_ALGO Ring (rank 0: unset)"
    ]
    assert nodes.variable_lines(of_ranks, hosts) == [
        "variables of rank 4, 5 on b differ: NCCL_ALGO Ring (rank 1: unset)",
        "variables of rank 6 on c differ: NCCL_ALGO Ring (rank 1: unset)",
        "variables of rank 0 on a differ: FI_PROVIDER efa (rank 1: unset), "
        "NCCL_DEBUG 'INFO\\x1b[2J' (rank 1: WARN)",
    ]


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


def test_broken_and_missing_gpus() -> None:
    """All GPUs with errors and the number of missing ones are named. The number of GPUs is that of
    the node, of which the ranks may use fewer."""
    gpus = [
        {"index": str(i), environment.UNCORRECTED: count}
        for i, count in enumerate(("0", "[N/A]", "1", "20", "0"))
    ]
    found = {"gpus": [gpus, gpus[:2], gpus[2:3]], "gpu_counts": [8, 7, 7]}
    assert environment.gpu_problems(found) == {
        0: "GPU 2, 3 have uncorrected memory errors",
        1: "it has 7 of 8 GPUs",
        2: "GPU 2 has uncorrected memory errors; it has 7 of 8 GPUs",
    }
    assert environment.gpu_problems({"gpus": [[]], "gpu_counts": [0]}, 8) == {
        0: "it has 0 of 8 GPUs"
    }
    healthy = {"gpus": [gpus[:2]], "gpu_counts": [8]}
    assert environment.gpu_problems(healthy) == environment.gpu_problems(healthy, 8) == {}


@pytest.mark.parametrize("by_torchrun", [True, False])
def test_variables_that_the_user_has_set_are_kept(
    by_torchrun: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A value that torchrun has set is not the user's. The report contains no secrets."""
    clean = {name: text for name, text in process.environment().items() if "NCCL" not in name}
    if by_torchrun:
        clean |= {"TORCHELASTIC_RUN_ID": "none", join.ERROR_HANDLING: "1"}
    monkeypatch.setattr(os, "environ", clean.copy())
    assert join.ERROR_HANDLING not in environment.user_variables()
    join.set_variables()
    assert {os.environ[name] for name in join.SETTINGS} == {"0"}
    users = dict.fromkeys(join.SETTINGS, "3" if by_torchrun else "1")
    monkeypatch.setattr(os, "environ", clean | users | {"TORCH_secret": "hunter2"})
    told = environment.user_variables()
    secret = told.pop("TORCH_secret")
    assert secret == "(set)"
    assert told.items() >= users.items()
    join.set_variables()
    assert os.environ.items() >= users.items()


@pytest.fixture
def by_hand(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The variables of rank 0 of two ranks that are started by hand."""
    for name in set(os.environ) - set(process.environment()):  # of a launcher
        monkeypatch.delenv(name)
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    return monkeypatch


def refused(capsys: Any, function: Callable[..., object], *given: Any) -> str:
    """The line with which a call ends the run, with status 2."""
    with pytest.raises(SystemExit, match="2"):
        function(*given)
    (line,) = capsys.readouterr().err.splitlines()
    return str(line)


def start() -> None:
    join.world()
    join.meet(0, 2, 20, join.meets_on_loopback(2, 2))


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("RANK", "", "a whole number from 0 to 1, but it is not set"),
        ("RANK", "5", "a whole number from 0 to 1, got '5'"),
        ("LOCAL_WORLD_SIZE", "0", "a whole number from 1 to 2, got '0'"),
        ("MASTER_ADDR", "no..host", "the name or address of rank 0's host, got 'no..host'"),
        ("MASTER_PORT", "x", "a whole number from 1 to 65535, got 'x'"),
    ],
)
def test_an_invalid_variable_of_the_launcher(
    name: str, value: str, expected: str, by_hand: pytest.MonkeyPatch, capsys: Any
) -> None:
    """It may be correct on other nodes, so each rank prints the line."""
    by_hand.setenv(name, value)
    if not value:
        by_hand.delenv(name)
    line = refused(capsys, start)
    assert f"error: {name} on {socket.gethostname()}: expected {expected}; without torch" in line
    assert "e.g. RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=2 MASTER_ADDR=" in line


def test_a_port_in_use(by_hand: pytest.MonkeyPatch, capsys: Any) -> None:
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = str(other.getsockname()[1])
        by_hand.setenv("MASTER_PORT", port)
        for on_loopback in (False, True):
            line = refused(capsys, join.meet, 0, 2, 20, on_loopback)
            assert f"expected a free port (Address already in use), got '{port}'" in line


def test_too_few_files_are_allowed(by_hand: pytest.MonkeyPatch, capsys: Any) -> None:
    """32 files plus 2 for each of 2 ranks are needed, 64 plus 16 for each are recommended."""
    by_hand.setattr(join, "raise_file_limit", lambda needed: 35)
    line = refused(capsys, join.join, "cpu", None, 20)
    allowed = f"a rank needs 36 open files or more, but the limit on {socket.gethostname()} is 35"
    assert f"error: {allowed}; try ulimit -n 96" in line


def test_a_network_without_loopback(by_hand: pytest.MonkeyPatch, capsys: Any) -> None:
    """As under `unshare -n`. torch itself would print C++ frames and wait."""
    by_hand.setattr(join, "address_towards", lambda host: "")
    line = refused(capsys, join.join, "cpu", None, 20)
    assert "the loopback interface is down; try `ip link set lo up`" in line


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("lo", "expected an interface with an address, e.g. eth0, got 'lo'"),
        ("eht0", "with an address, e.g. eth0, lo, got 'eht0'; did you mean eth0?"),
    ],
)
def test_an_interface_without_an_address(
    name: str, words: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", name)
    monkeypatch.setattr("psutil.net_if_addrs", lambda: {"lo": [], "eth0": []})
    assert words in refused(capsys, join.refuse_interface)


def test_backends_that_cannot_work_on_the_cpu(capsys: Any) -> None:
    no_cuda = "--backend nccl2 requires CUDA, but this run is on the CPU; try gloo"
    assert no_cuda in refused(capsys, join.check_backend, "nccl2", False)
    assert "expected a name such as gloo" in refused(capsys, join.check_backend, "cpu:gloo,", False)
    assert "this torch was built without it" in refused(capsys, join.check_backend, "mpx", False)


def test_several_hosts_need_local_ranks(by_hand: pytest.MonkeyPatch) -> None:
    """A rank publishes its host, address, command line and hashes of files."""
    here, there = ["a", "10.0.0.1", ["x.py"], {}], ["b", "10.0.0.2", ["x.py"], {}]
    assert join.mismatch([here, there]) is None
    contents = [{"common/": "1", "x.py": "2"}, {"common/": "1", "x.py": "3", "mine": "4"}]
    assert join.mismatch([[*here[:3], contents[0]], [*there[:3], contents[1]]]) == (
        "expected the same files on all ranks, but x.py, mine of rank 1 (b) differ from rank 0's; "
        "use one checkout on all nodes"
    )
    by_hand.delenv("LOCAL_RANK")
    by_hand.delenv("LOCAL_WORLD_SIZE")
    assert join.mismatch([here, here]) is None
    assert join.mismatch([here, there]) == (
        "only RANK and WORLD_SIZE are set, but ranks are on a (10.0.0.1), b (10.0.0.2); "
        "set LOCAL_RANK and LOCAL_WORLD_SIZE"
    )


def test_the_numbers_of_ranks(by_hand: pytest.MonkeyPatch) -> None:
    """(rank, local rank, world size, local world size)."""

    def given(**values: int) -> tuple[int, ...]:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"):
            by_hand.delenv(name, raising=False)
        for name, value in values.items():
            by_hand.setenv(name, str(value))
        return join.world()

    assert given() == (0, 0, 1, 1)
    torchrun = {"WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 2, "GROUP_WORLD_SIZE": 2}
    assert given(RANK=3, LOCAL_RANK=1, **torchrun) == (3, 1, 4, 2)
    assert given(RANK=3, LOCAL_RANK=0, **torchrun) == (3, 1, 4, 2)  # --virtual-local-rank
    # nodes with 1 and 3 ranks: the last rank is not the first of its node
    assert given(RANK=3, LOCAL_RANK=2, **torchrun | {"LOCAL_WORLD_SIZE": 3}) == (3, 2, 4, 3)
    # ranks of srun, which may be cyclic over nodes
    assert given(RANK=2, LOCAL_RANK=1, WORLD_SIZE=4, LOCAL_WORLD_SIZE=2) == (2, 1, 4, 2)
    # with RANK and WORLD_SIZE only, all ranks are on one node
    assert given(RANK=2, WORLD_SIZE=4) == (2, 2, 4, 4)
    assert groups.local_rank() == 2


def test_the_path_of_the_report_may_differ_between_ranks() -> None:
    """--json on some ranks only is a different command line, and so is - for stdout."""
    words = ["-b", "8", "--json", "a.jsonl", "--output-file=b", "--profile", "c", "--resume"]
    want = ["-b", "8", "--json", "PATH", "--output-file=PATH", "--profile", "PATH", "--resume"]
    assert join.without_paths(words) == want
    assert join.without_paths(["--json", "-"]) == ["--json", "-"]
    assert join.without_paths(["a.jsonl", "--json"]) == ["a.jsonl", "--json"]


def one_world(given: pytest.MonkeyPatch, capsys: Any, **values: str) -> str:
    """The refusal of a plain python process with these variables of a launcher."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        given.delenv(name)
    for name, value in values.items():
        given.setenv(name, value)
    return refused(capsys, join.world)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"PET_NNODES": "2", "PET_NPROC_PER_NODE": "4"}, "NNODES=2 and PET_NPROC_PER_NODE=4"),
        ({"PET_NPROC_PER_NODE": "auto"}, "PET_NNODES=1 and PET_NPROC_PER_NODE=auto"),
    ],
)
def test_python_instead_of_torchrun(
    values: dict[str, str], said: str, by_hand: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Each pod prints the line."""
    line = one_world(by_hand, capsys, **values)
    assert f"{said} configure torchrun, but python was started; start torchrun" in line


@pytest.mark.parametrize("size", [size for _, size in join.read_launchers()])
def test_tasks_of_a_launcher_without_its_wrapper(
    size: str, by_hand: pytest.MonkeyPatch, capsys: Any
) -> None:
    line = one_world(by_hand, capsys, **{size: "4"})
    assert f"{size}=4, but each task would run as a world of one; start them with launch/" in line


def test_a_copy_without_the_list_of_launchers_starts(
    by_hand: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Like a script in a tutorial that was copied without launch/."""
    by_hand.setattr("harness.cli.ROOT", tmp_path)
    assert join.read_launchers() == []
    assert join.world() == (0, 0, 2, 2)


def test_the_second_connection_does_not_wait_for_the_first(by_hand: pytest.MonkeyPatch) -> None:
    """The watchdog polls the store while the main thread waits in it."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    words = [os.path.basename(sys.argv[0]), *sys.argv[1:]]
    row = json.dumps([socket.gethostname(), "127.0.0.1", words, {}])
    PrefixStore("torchrun-bench/0", server).set("here/1", row)
    by_hand.setenv("MASTER_PORT", str(server.port))
    by_hand.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    stores: Any = join.meet(0, 2, 20)
    first, second = stores
    assert first.underlying_store is not second.underlying_store  # each serves one call at a time
    waits = threading.Thread(target=first.get, args=["a late rank"])
    waits.start()
    second.set("seen meanwhile", "yes")
    assert waits.is_alive()
    second.set("a late rank", "here")
    waits.join(20)
    assert not waits.is_alive()


JOINS = """
import os
from common.join import join
def resident(): return int(open("/proc/self/statm").read().split()[1]) * 4096
join("cpu", None, 9)
blocks = [bytearray(2**20) for _ in range(64)]
before = resident()
del blocks
print(os.environ["GLOO_SOCKET_IFNAME"], os.environ["TP_SOCKET_IFNAME"], before - resident() < 2**24)
"""


def test_gloo_uses_loopback_and_freed_memory_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default gloo listens on the address of the host name, and glibc returns freed memory to
    the system, which makes the first case slower. Variables that the user has set are kept."""
    users = {name: text for name, text in process.environment().items() if "MALLOC_" not in name}
    users = {name: text for name, text in users.items() if "IFNAME" not in name}
    users["TP_SOCKET_IFNAME"] = "lo,lo"
    command = [sys.executable, "-c", JOINS]
    run = subprocess.run(command, env=users, cwd=process.ROOT, capture_output=True, text=True)
    assert run.stdout == "lo lo,lo True\n", run.stderr
    monkeypatch.setenv("MALLOC_TOP_PAD_", "0")
    assert not join.keep_freed_memory()


# -- CPU use by other processes --------------------------------------------------------------------


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
    """The node with the highest use counts. It is not measured while two commands are
    interleaved."""
    quiet, busy, busiest = [Others(0.2, 2), Others(6.0, 64)], Others(0.21, 2), Others(1.6, 2)
    told = environment.others_text(["a", "b", "c"], [*quiet, busy])
    assert told == "other processes used 0.2 of 2 cores of c"

    def taken(*loads: Others) -> Others | None:
        job = Mock(broadcast=lambda value: value)
        return Benchmark.disturbed(Mock(job=job, load_of_others=lambda: loads))

    assert taken() is None
    assert taken(*quiet) is None
    assert taken(busy, busiest, *quiet) == busiest


def test_cpu_load_can_be_copied_into_a_training_loop(tmp_path: Path) -> None:
    """A copy of cpu_load.py needs neither torch nor this project."""
    copy = tmp_path / "cpu_load.py"
    copy.write_text(Path(cpu_load.__file__).read_text())
    code = "import sys, cpu_load; print(cpu_load.CpuLoad().of_others().cores > 0)\n"
    code += "print('torch' in sys.modules)"
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=500
    )
    assert run.stdout == "True\nFalse\n", run.stderr
