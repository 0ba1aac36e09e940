"""benchmarks/parameter_server.py and its server: everything that one process can show."""

import argparse
import itertools
import math
import statistics
import threading
import weakref
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from harness import load_script
from torch import nn

from common import averaging_server, durations
from common.averaging_server import Server, pack, part_bytes, unpack
from common.check import relative_error
from common.dist import CaseGroup
from common.rpc import Layout

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("parameter_server")


@pytest.fixture
def parsed(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What the flags come to in a world of so many ranks: (arguments, layout)."""

    def parse(size: int, *flags: str) -> tuple[argparse.Namespace, Layout]:
        for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            monkeypatch.setenv(name, str(size))
        for name in ("RANK", "LOCAL_RANK"):
            monkeypatch.setenv(name, "0")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
        args = script.parse_args(list(flags))
        return args, script.check_args(args)[0]

    return parse


# -- roles, groups, cases --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "flags", "trainers", "servers"),
    [
        (3, "", 1, 1),
        (4, "", 2, 1),
        (5, "", 3, 1),
        (6, "", 4, 1),
        (9, "", 6, 2),
        (6, "--nserver 2", 3, 2),
        (6, "--ntrainer 2 --placement sharded", 2, 3),
        (6, "--ntrainer 3 --nserver 2", 3, 2),
    ],
)
def test_roles(parsed: Any, size: int, flags: str, trainers: int, servers: int) -> None:
    _, layout = parsed(size, *flags.split())
    assert layout == Layout(trainers, servers)


def test_roles_on_cuda(script: ModuleType) -> None:
    def parse(flags: str) -> argparse.Namespace:
        args: argparse.Namespace = script.parse_args(flags.split())
        args.placement = ["grouped"]
        return args

    args = parse("")
    assert script.roles(args, 6, True) == Layout(4, 1, True, cuda_trainers=4)
    assert script.roles(args, 6, False) == Layout(4, 1, True)
    args = parse("--ntrainer 2 --ncudatrainer 2 --nserver 1 --ncudaserver 1")
    layout = script.roles(args, 7, True)
    assert layout == Layout(4, 2, True, cuda_trainers=2, cuda_servers=1)
    assert [layout.server_of(rank) for rank in range(4)] == [4, 4, 5, 5]
    assert script.describe(layout) == "4 trainers (2 on CUDA) and 2 servers (1 on CUDA)"
    # CUDA servers alone serve whoever there is
    args = parse("--ntrainer 2 --ncudaserver 1")
    assert script.roles(args, 4, True) == Layout(2, 1, True, cuda_servers=1)
    # both kinds of servers, one kind of trainers
    args = parse("--ncudatrainer 3 --nserver 1 --ncudaserver 1")
    with pytest.raises(ValueError, match=r"server0 \(CPU\) would have no trainer"):
        script.roles(args, 6, True)
    args.placement = ["sharded"]  # there everyone sends to every server
    assert script.roles(args, 6, True).servers == 2


@pytest.mark.parametrize(
    ("size", "flags", "message"),
    [
        (2, "", "start 3: torchrun --nproc-per-node 3"),
        (4, "--ntrainer 4 --nserver 2", "make 7 processes, and there are 4; start 7"),
        (6, "--ntrainer 2 --placement grouped", "server2 (CPU) would have no trainer"),
        (5, "--ncudatrainer 2", "torch sees no CUDA device"),
        (5, "--ncudaserver 1", "torch sees no CUDA device"),
        (5, "--device cuda", "torch sees no CUDA device"),
        (5, "--device cpu --ntrainer 3", "--device has no effect"),
        (5, "--backend nccl", "nccl needs every trainer on CUDA"),
        (5, "--backend multi", "multi needs every trainer on CUDA"),
        (5, "--cuda-seed 3", "--cuda-seed has no effect without CUDA trainers"),
        (5, "--max-val 300", "--num-embeddings 300"),
        (5, "--sample-count 16", "2 batches of 8, fewer than the 3 trainers"),
        (5, "--sparsity-percentage 100", "from 0 to 99"),
        (5, "--torch-seed -1", "from 0 to"),
        (5, "--ntrainer 0", "at least 1"),
        (5, "--nserver -2", "at least 1"),
        (5, "--routes rcp", "did you mean rpc?"),
        (5, "--servers runing", "did you mean running?"),
        (5, "--placement shard", "did you mean sharded?"),
        (5, "--backend gluo", "'gloo', 'nccl', 'multi'"),
        (5, "--rpc-transports shn", "did you mean shm?"),
        (5, "--epochs 2 --iters 4", "--iters has no effect with --epochs"),
        (5, "--epochs 2 --max-seconds 4", "--max-seconds has no effect with --epochs"),
        (5, "--dense-embedding --routes rpc,hybrid", "--routes hybrid has no effect"),
        (5, "--dense-embedding --backend multi", "--backend multi has no effect"),
        (5, "--routes allreduce --servers batch", "--servers has no effect"),
        (5, "--routes hybrid --placement grouped", "--placement has no effect"),
        (5, "--routes hybrid --rpc-threads 4", "--rpc-threads has no effect"),
        (5, "--route rpc", "did you mean --routes"),
    ],
)
def test_refused(
    parsed: Any, capsys: pytest.CaptureFixture[str], size: int, flags: str, message: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        parsed(size, *flags.split())
    assert ended.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert message in lines[0]


def test_sparse_gradients_over_nccl_are_refused(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script, "roles", lambda *args: Layout(2, 1, True, cuda_trainers=2))
    monkeypatch.setattr(script, "place", lambda layout, backend: (CPU, backend))
    with pytest.raises(SystemExit):
        script.check_args(script.parse_args(["--backend", "nccl"]))
    assert "all-reduces sparse gradients, which nccl cannot" in capsys.readouterr().err
    for flags, backend in ((["--dense-embedding"], "nccl"), ([], "multi")):
        args = script.parse_args(flags)
        assert script.check_args(args)[2] == "nccl"
        assert args.backend == backend
        assert (args.embedding_dim, args.dense_layers, args.bucket_size) == (1024, 8, 25)


def test_cases(script: ModuleType, parsed: Any) -> None:
    through = [
        f"{route} {kind}" for route in ("rpc", "sparse_rpc") for kind in ("running", "batch")
    ]
    one = script.plan(*parsed(4))
    assert list(map(str, one)) == ["allreduce", "hybrid", *(f"{case} grouped" for case in through)]
    two = script.plan(*parsed(6, "--nserver", "2", "--ddp-hook", "rpc_hook,sparse_rpc"))
    assert list(map(str, two)) == [f"{c} {p}" for c in through for p in ("grouped", "sharded")]
    assert list(map(str, script.plan(*parsed(4, "--placement", "sharded"))))[2] == (
        "rpc running sharded"
    )
    dense = script.plan(*parsed(4, "--dense-embedding", "--servers", "batch"))
    assert list(map(str, dense)) == ["allreduce", "rpc batch grouped"]


def test_names_answer_to_functions(script: ModuleType) -> None:
    assert tuple(script.ROUTES) == script.ROUTE_NAMES
    assert tuple(averaging_server.SERVERS) == script.SERVER_KINDS


def test_who_averages_with_whom(script: ModuleType) -> None:
    layout = Layout(5, 2)
    groups = [(0, 1, 2), (0, 1, 2), (0, 1, 2), (3, 4), (3, 4)]
    everyone = (0, 1, 2, 3, 4)

    def over(route: str, placement: str | None, rank: int) -> tuple[Any, Any]:
        config = script.Config(route, placement and "batch", placement)
        found = script.averaged_over(config, layout, rank)
        return found["embedding"], found["dense"]

    for rank, group in enumerate(groups):
        assert over("rpc", "grouped", rank) == (group, group)
        assert over("sparse_rpc", "grouped", rank) == (group, everyone)
        for route, placement in (("rpc", "sharded"), ("sparse_rpc", "sharded"), ("hybrid", None)):
            assert over(route, placement, rank) == (everyone, everyone)
        config = script.Config("rpc", "batch", "sharded")
        assert script.servers_of(config, layout, rank) == (5, 6)
        config = script.Config("rpc", "batch", "grouped")
        assert script.servers_of(config, layout, rank) == (layout.server_of(rank),)
        assert script.servers_of(script.Config("hybrid"), layout, rank) == ()


def test_digests_are_compared_within_the_groups(script: ModuleType) -> None:
    layout = Layout(4, 2)
    rpc, sparse_rpc = (script.Config(r, "batch", "grouped") for r in ("rpc", "sparse_rpc"))

    def digests(embedding: str, dense: str) -> list[dict[str, str]]:
        return [{"embedding": a, "dense": b} for a, b in zip(embedding, dense, strict=True)]

    drifted = digests("aabb", "ccdd")
    assert script.compare_all(rpc, layout, drifted) is None
    assert script.compare_all(sparse_rpc, layout, digests("aabb", "cccc")) is None
    wrong = script.compare_all(sparse_rpc, layout, drifted)
    assert "dense: after the steps the parameters of rank 2, 3 differ from rank 0's" in wrong
    sharded = script.Config("rpc", "batch", "sharded")
    assert "embedding: " in script.compare_all(sharded, layout, drifted)
    assert "rank 3 differ from rank 2's" in script.compare_all(rpc, layout, digests("aabc", "ccdd"))
    # a CPU and a GPU round the same step differently
    mixed = Layout(4, 1, True, cuda_trainers=2)
    assert script.compare_all(rpc, mixed, drifted) is None
    assert script.compare_all(rpc, mixed, digests("abcc", "dddd")) is not None


# -- data and steps --------------------------------------------------------------------------------


@pytest.mark.parametrize("trainers", [1, 2, 3, 5, 7])
def test_shards_share_out_the_batches_and_all_trainers_take_as_many_steps(
    script: ModuleType, trainers: int
) -> None:
    for batches in range(trainers, 3 * trainers):
        shards = [list(script.shard(batches, trainers, i)) for i in range(trainers)]
        assert sorted(itertools.chain(*shards)) == list(range(batches))
        steps = script.epoch_steps(batches, trainers)
        assert steps == max(map(len, shards))
        assert min(map(len, shards)) in (steps, steps - 1)


def test_epochs_are_a_number_of_steps(parsed: Any, script: ModuleType) -> None:
    args, layout = parsed(5, "--epochs", "3", "--sample-count", "63", "--batch-size", "9")
    assert layout.trainers == 3
    assert args.iters == 9  # 7 batches on 3 trainers: 3 steps
    text = script.heading(args, layout)
    assert "7 batches of 9: an epoch is 3 steps; 2 trainers with a batch less" in text
    assert "drift apart" not in text
    assert "drift apart" in script.heading(*parsed(6, "--nserver", "2"))
    assert "drift apart" not in script.heading(*parsed(6, "--nserver", "2", "--routes", "hybrid"))


def test_data_follows_from_the_seed(script: ModuleType, parsed: Any) -> None:
    args, _ = parsed(4, "--sample-count", "40", "--sparsity-percentage", "90")
    whole = script.create_batches(args, 1, 0, CPU)
    parts = [script.create_batches(args, 2, rank, CPU) for rank in (0, 1)]
    assert [len(part) for part in parts] == [3, 2]
    for number, (inputs, targets) in enumerate(whole):
        assert inputs.shape == (8, 16)
        assert targets.shape == (8,)
        again = parts[number % 2][number // 2]
        assert torch.equal(inputs, again[0])
        assert torch.equal(targets, again[1])
    rows = torch.cat([inputs for inputs, _ in whole])
    assert len(rows.unique()) <= 256 // 10
    assert not torch.equal(whole[0][0], whole[1][0])
    other, _ = parsed(4, "--torch-seed", "1")
    assert not torch.equal(script.create_batches(other, 1, 0, CPU)[0][0], whole[0][0])


def test_model(script: ModuleType, parsed: Any) -> None:
    flags = "--num-embeddings 20 --embedding-dim 6 --dense-layers 3 --dense-size 7 --classes 5"
    args, _ = parsed(4, *flags.split())
    model = script.create_model(args, CPU)
    assert [tuple(p.shape) for p in model.parameters()] == [
        *((20, 6), (7, 6), (7,), (7, 7), (7,), (5, 7), (5,))
    ]
    output = model(torch.zeros(2, 4, dtype=torch.long))
    assert torch.allclose(output.sum(dim=1), torch.ones(2))
    output[:, 0].sum().backward()
    assert model.embedding.weight.grad.is_sparse
    args, _ = parsed(4, "--dense-layers", "1", "--dense-embedding")
    model = script.create_model(args, CPU)
    assert [layer.weight.shape for layer in model.dense] == [(256, 256)]
    assert not model.embedding.sparse


# -- the server ------------------------------------------------------------------------------------


def sparse(rows: list[int], value: float) -> torch.Tensor:
    return torch.sparse_coo_tensor(
        torch.tensor([rows]), torch.full((len(rows), 2), value), (4, 2), check_invariants=False
    )


@pytest.mark.parametrize("kind", ["running", "batch"])
def test_a_server_averages(kind: str) -> None:
    server = Server(kind, 3, CPU, "server0")
    for step in (0, 1):
        answers = [
            server.add(step, 0, pack(torch.tensor([float(value), step]), CPU))
            for value in (1, 2, 6)
        ]
        assert all(answer.done() for answer in answers)
        for answer in answers:
            assert unpack(answer.value(), CPU).tolist() == [3.0, step]
    answers = [
        server.add(0, 1, pack(sparse(rows, value), CPU))
        for rows, value in (([0, 0], 3.0), ([0, 2], 6.0), ([3], 9.0))
    ]
    average = unpack(answers[0].value(), CPU)
    assert average.is_sparse
    assert average.to_dense()[:, 0].tolist() == [4.0, 0.0, 2.0, 3.0]
    assert [row[0] for row in server.records] == [0, 1, 0]
    for _, straggler, whole, averaging in server.records:
        assert 0 <= straggler <= whole
        assert averaging > 0
    assert server.buckets == {}
    server.reset()
    assert server.records == []


@pytest.mark.parametrize("kind", ["running", "batch"])
def test_a_server_loses_no_gradient_of_many_threads(kind: str) -> None:
    """8 threads, each ahead of or behind the others by any number of buckets and steps."""
    threads, steps, buckets = 8, 12, 3
    server = Server(kind, threads, CPU, "server0")
    answers: dict[tuple[int, int, int], Any] = {}

    def trainer(number: int) -> None:
        for step in range(steps):
            for bucket in range(buckets):
                gradient = torch.full((1000,), float(number + step))
                answers[number, step, bucket] = server.add(step, bucket, pack(gradient, CPU))

    running = [threading.Thread(target=trainer, args=(i,)) for i in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(30)
    assert len(answers) == threads * steps * buckets
    for (_, step, _), answer in answers.items():
        assert answer.done()
        assert unpack(answer.value(), CPU).tolist() == [3.5 + step] * 1000
    assert len(server.records) == steps * buckets
    assert not server.buckets


def test_a_server_that_fails_answers_everyone(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server("batch", 2, CPU, "server1")
    waiting = server.add(0, 0, pack(torch.ones(2), CPU))
    assert not waiting.done()
    # shapes that do not add up
    last = server.add(0, 0, pack(torch.ones(3), CPU))
    assert waiting.value() == last.value()
    assert waiting.value().startswith("server1: RuntimeError: The size of tensor")
    assert server.add(1, 0, pack(torch.ones(2), CPU)).value() == waiting.value()
    server.give_up("too late")
    assert server.failed == waiting.value()


def test_a_trainer_that_fails_ends_the_wait_of_the_others() -> None:
    server = Server("running", 3, CPU, "server0")
    waiting = [server.add(0, bucket, pack(torch.ones(2), CPU)) for bucket in (0, 1)]
    server.give_up("aborted, since trainer1 has failed")
    assert [answer.value() for answer in waiting] == ["aborted, since trainer1 has failed"] * 2


def test_parts() -> None:
    dense = pack(torch.ones(3, 2), CPU)
    assert part_bytes(dense) == 24
    parts = pack(sparse([1, 1, 3], 2.0), CPU)
    assert part_bytes(parts) == 2 * 8 + 2 * 2 * 4 + 2 * 8  # indices, values, size
    assert unpack(parts, CPU).to_dense()[:, 1].tolist() == [0.0, 4.0, 0.0, 2.0]


# -- bytes, times, checks --------------------------------------------------------------------------


def test_bytes_of_each_route(script: ModuleType) -> None:
    assert script.ring_bytes(1000, 1) == 0
    assert script.ring_bytes(1000, 2) == 2000  # sends 1000, receives 1000
    assert script.ring_bytes(1000, 4) == 3000
    assert script.gather_bytes(1000, 1) == 0
    assert script.gather_bytes(1000, 4) == 6000  # sends 3000, receives 3000


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.EmbeddingBag(8, 4, sparse=True)
        self.dense = nn.Linear(4, 3)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.dense(self.embedding(rows))
        return out


@pytest.mark.parametrize("route", ["allreduce", "hybrid"])
def test_hooks_in_a_world_of_one(script: ModuleType, group: CaseGroup, route: str) -> None:
    ddp = nn.parallel.DistributedDataParallel(Bag(), process_group=group.test)
    state = script.Exchange(CPU, group.test, group.test, [])
    ddp.register_comm_hook(state, script.ROUTES[route])
    for _ in range(2):
        ddp(torch.tensor([[1, 2], [2, 3]])).sum().backward()
    assert {(sent.step, sent.sparse) for sent in state.log} == {
        *((0, False), (0, True), (1, False), (1, True))
    }
    assert all(0 < sent.end - sent.start < 10 for sent in state.log)
    assert all(sent.moved == 0 for sent in state.log)  # nobody to send to


def test_a_hook_whose_future_fails_fails_the_backward(
    script: ModuleType, group: CaseGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    def call(*args: Any, **kwargs: Any) -> torch.futures.Future[str]:
        answer: torch.futures.Future[str] = torch.futures.Future()
        threading.Timer(0.1, answer.set_result, ("server0: no more memory",)).start()
        return answer

    monkeypatch.setattr(script.rpc, "rpc_async", call)
    ddp = nn.parallel.DistributedDataParallel(Bag(), process_group=group.test)
    state = script.Exchange(CPU, group.test, group.test, [("server0", CPU)])
    ddp.register_comm_hook(state, script.ROUTES["rpc"])
    with pytest.raises(RuntimeError, match="no more memory"):
        ddp(torch.tensor([[1, 2], [2, 3]])).sum().backward()
    assert "server0: no more memory" in {sent.error for sent in state.log}


@pytest.mark.parametrize("route", ["allreduce", "rpc"])
def test_a_bucket_on_its_way_keeps_no_group_alive(
    script: ModuleType, group: CaseGroup, monkeypatch: pytest.MonkeyPatch, route: str
) -> None:
    """Or gloo's own thread may be the one to destroy it, which ends the process."""
    pending: torch.futures.Future[Any] = torch.futures.Future()
    work = SimpleNamespace(get_future=lambda: pending)
    monkeypatch.setattr(script.dist, "all_reduce", lambda *args, **kwargs: work)
    monkeypatch.setattr(script.rpc, "rpc_async", lambda *args, **kwargs: pending)
    state = script.Exchange(CPU, group.test, group.test, [("server0", CPU)])
    bucket = SimpleNamespace(index=lambda: 0, buffer=lambda: torch.ones(3))
    average = script.ROUTES[route](state, bucket)
    alive = weakref.ref(state)
    del state
    assert alive() is None
    pending.set_result([torch.ones(3)])
    assert average.wait().tolist() == [1, 1, 1]


def test_times_of_the_timed_steps_only(script: ModuleType) -> None:
    log = [[0.0, 1.0, 3.0, 3.5], [10.0, 11.5, 14.0, 15.0]]
    sent = [
        *(
            script.Sent(step, False, CPU, 2.0 + 10 * step, 2.5 + 10 * step, 100.0)
            for step in (0, 1)
        ),
        script.Sent(1, True, CPU, 12.25, 13.0, 7.0),
    ]
    times = script.trainer_times(log, sent, [1])
    assert times == {
        "phases": {
            "forward": [1.5],
            "backward": [2.5],
            "batch": [5.0],
            "hook dense": [0.5],
            "hook sparse": [0.75],
        },
        "hook_s": [1.0],
        "moved": [107.0],
    }
    rows = [[0, 1.0, 2.0, 0.5], [1, 3.0, 4.0, 0.25]]
    assert script.server_times(rows, [1]) == {
        "straggler": [3.0],
        "batch": [4.0],
        "averaging": [0.25],
    }


def test_timed_steps() -> None:
    # 2 of warm-up, then a lead-in and 3, then a lead-in and 1
    assert durations.timed_steps([3, 1], 2) == [3, 4, 5, 7]


def test_summaries() -> None:
    one = durations.summary([0.25])
    assert (one["min_s"], one["max_s"], one["mean_s"], one["p95_s"]) == (0.25, 0.25, 0.25, 0.25)
    assert (one["variance_s2"], one["stdev_s"], one["count"]) == (0.0, 0.0, 1)
    values = [1.0, 2.0, 3.0, 6.0]
    found = durations.summaries(
        {"trainer0": {"batch": values[:1]}, "trainer1": {"batch": values[1:]}}
    )
    assert list(found) == ["trainer0", "trainer1", "all"]
    whole = found["all"]["batch"]
    assert whole["variance_s2"] == pytest.approx(statistics.variance(values))
    assert whole["stdev_s"] == pytest.approx(statistics.stdev(values))
    assert (whole["p50_s"], whole["p75_s"]) == (2.5, 3.75)
    # a server that no bucket came to
    found = durations.summaries({"server0": {"batch": [1.0]}, "server1": {"batch": []}})
    assert found["server1"] == {}
    table = durations.phase_table("servers", found)
    assert [line.split()[:3] for line in table.splitlines()[3:]] == [
        ["batch", "server0", "1"],
        ["batch", "all", "1"],
    ]
    many = durations.summaries({f"trainer{i}": {"batch": [1.0]} for i in range(11)})
    assert durations.phase_table("trainers", many).endswith("# 3 more workers are in the report")


def test_relative_error() -> None:
    want = torch.tensor([1.0, -4.0])
    assert relative_error(want, want) == 0
    assert relative_error(torch.tensor([1.0, -3.0]), want) == 0.25
    assert relative_error(torch.zeros(2), torch.zeros(2)) == 0
    assert relative_error(torch.ones(2), torch.zeros(2)) == math.inf
    assert relative_error(torch.tensor([math.nan, 0]), want) == math.inf
    assert relative_error(sparse([0], 2.0), sparse([0], 1.0)) == 1.0
