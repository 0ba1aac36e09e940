"""benchmarks/workloads/own_model.py: functions of users, and what is refused."""

import os
import re
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from benchmarks.workloads import own_model, process_settings
from benchmarks.workloads.own_model import Trial, make_own, try_own
from benchmarks.workloads.process_settings import around_case, differences, read_settings, restored
from common.errors import Refused
from harness.exits import describe
from tests.pure.reports import refused

CPU = torch.device("cpu")
USERS = """
import os
import sys
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn

number = 3

def trio(samples=2, width=4, kind=nn.Linear):
    return kind(width, 1), (torch.ones(samples, width),), torch.sum

def as_dict(kind=nn.Linear, **more):
    model, args, loss = trio(kind=kind)
    return {"model": model, "args": args, "loss": loss} | more

def fine(device): return trio()
def sized(device, samples=2, width=4): return trio(samples, width)
def alone(device): return nn.Linear(4, 1), torch.ones(2, 4), torch.sum
def no_tensor(device): return nn.Linear(4, 1), {"x": 3}, torch.sum
def other_key(device): return {"modle": nn.Linear(4, 1)}
def no_model(device): return {"args": (torch.ones(2, 4),), "loss": torch.sum}
def other_unit(device): return as_dict(fsdp_units=[nn.Linear(1, 1)])
def no_rate(device): return as_dict(optimizer=Rateless)
def exits(device): sys.exit(0)
def interrupts(device): raise KeyboardInterrupt
def divides(device): return number / 0
def missing_file(device): return torch.load("weights.pt")
def empty(device): return trio(samples=0)
def no_batch(device): return nn.Linear(4, 1), (torch.tensor(1.0),), torch.sum
def wrong_shape(device): return trio(kind=Wrong)
def grows(device): return trio(kind=Grows)
def exits_in_forward(device): return trio(kind=Exits)
def fills_the_gpu_in_forward(device): return trio(kind=Large)

def fills_the_gpu(device):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

class Rateless(torch.optim.SGD):
    def __init__(self, parameters):
        super().__init__(parameters)
        self.param_groups[0]["lr"] = None

class Wrong(nn.Linear):
    def forward(self, x): return super().forward(x[:, 1:])

class Grows(nn.Linear):
    def forward(self, x):
        y = super().forward(x.clone())
        x.resize_(len(x) + 1, 4)
        return y

class Exits(nn.Linear):
    def forward(self, x): sys.exit("enough")

class Large(nn.Linear):
    def forward(self, x): fills_the_gpu(x.device)


def sets_everything(device):
    torch.autograd.set_detect_anomaly(True)
    torch.use_deterministic_algorithms(True)
    torch.backends.mkldnn.enabled = False
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.enable_flash_sdp(False)
    torch.set_float32_matmul_precision("medium")
    torch.set_autocast_enabled("cpu", True)
    os.environ["MINE"] = "1"
    sys.stdout = open(os.devnull, "w")
    return trio()

class Takes(nn.Linear):
    def forward(self, batch):
        return super().forward(batch if isinstance(batch, torch.Tensor) else batch.x)

@dataclass
class Graph:
    x: torch.Tensor
    edges: torch.Tensor

class Data:  # like PyG's Data: moves by .to, and is not a dataclass
    def __init__(self, x): self.x = x

@dataclass(slots=True)
class Slots:
    x: torch.Tensor
    y: torch.Tensor

@dataclass(slots=True)
class Unset(Slots):
    z: torch.Tensor = field(init=False)

class Masked(nn.Linear):
    def forward(self, mask, x): return super().forward(x)

def takes(batch): return Takes(4, 1), batch, torch.sum
def graph(device): return takes(Graph(torch.ones(10, 4), torch.ones(2, 30)))
def one_class(device): return takes((Graph(torch.ones(6, 4), torch.ones(6)),))
def one_dict(device): return takes({"image": torch.ones(2, 4)})
def no_samples(device): return data(device, samples="many")
def slots(device, kind="Slots"): return takes(globals()[kind](torch.ones(6, 4), torch.ones(6)))
def data(device, **more): return as_dict(Takes, args=(Data(torch.ones(10, 4)),), **more)
def masked(device): return as_dict(Masked, args=(torch.ones(1, 4), torch.ones(8, 4)))

def jagged(device):
    parts = [torch.ones(2, 4), torch.ones(5, 4), torch.ones(1, 4)]
    batch = torch.nested.nested_tensor(parts, layout=torch.jagged)
    return Takes(4, 1), batch, lambda y: y.values().sum()

def then(done, y): return y.sum()  # a loss, after something was done
def reduces(y): return then(dist.all_reduce(y.detach()), y)
def waits(y): return then(dist.barrier(), y)
def in_backward(y): return then(y.register_hook(lambda gradient: reduces(gradient) * gradient), y)
def functional(y): return funcol.all_reduce(y.sum(), "sum", dist.group.WORLD)
def local(y): return y.sum()

def gathers(y):  # as nn.SyncBatchNorm does
    return then(dist.all_gather_into_tensor(torch.empty_like(y), y.detach()), y)

class Shares(torch.optim.SGD):  # its weights, in each step
    def step(self):
        super().step()
        dist.all_reduce(self.param_groups[0]["params"][0].detach())

class SharesAtStart(torch.optim.SGD):
    def __init__(self, parameters):
        super().__init__(parameters)
        dist.barrier()

class Rounds:  # a wrapper of an optimizer
    def __init__(self, parameters):
        self.inner = torch.optim.Adam(parameters)
        self.param_groups = self.inner.param_groups

    def step(self):
        self.inner.step()
        dist.barrier()

def communicates(device, how):
    return as_dict(**{"loss" if how.islower() else "optimizer": globals()[how]})

class Numbers:
    def __len__(self): return 3
    def __getitem__(self, index): return index

def numbers(count=3): return Numbers()
def with_collate(): return Numbers(), torch.tensor
def no_dataset(): return iter([])
def no_function(): return Numbers(), 3

sizes = iter([64, 640])

def grows_by_call(device, stated=False):
    size = next(sizes)
    return data(device, samples=size) if stated else trio(size)

class GrowsLater(nn.Linear):  # from the third step on
    steps = 0

    def forward(self, batch):
        self.steps += 1
        if self.steps == 3 and isinstance(batch, dict):
            batch["x"] = torch.cat([batch["x"]] * 2)
        elif self.steps == 3:
            batch.resize_(len(batch) + 1, 4)
        return super().forward(batch["x"] if isinstance(batch, dict) else batch)

def grows_later(device, nested=False):
    x = torch.ones(2, 4)
    return GrowsLater(4, 1), ({"x": x},) if nested else x, lambda y: y.detach().sum()

class Forgets(torch.optim.SGD):  # the gradients, once they are used
    def step(self):
        super().step()
        self.zero_grad()

def forgets(device): return as_dict(optimizer=Forgets)

def sets_later(device):
    def loss(y):
        torch.backends.cudnn.benchmark = True
        return y.sum()

    return nn.Linear(4, 1), torch.ones(2, 4), loss
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with the user's modules."""
    (tmp_path / "users.py").write_text(USERS)
    (tmp_path / "leaving.py").write_text("raise SystemExit('from the module')\n")
    (tmp_path / "unfinished.py").write_text("def f(:\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(own_model, "SIZES", {})
    process_settings.OF_CASE.clear()
    process_settings.TOLD.clear()
    monkeypatch.setattr(own_model, "IMPORTED", {})
    for name in ("users", "leaving", "unfinished"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nowhere:gpt", "cannot import nowhere: No module named 'nowhere'; e.g. my"),
        ("tests.own_models:gtp", "own_models.py has no function 'gtp'; did you mean gpt"),
        ("tests.own_models:model_alone", "a tuple or a dict with tensors), a function; got Linear"),
        ("users:one_dict", "keyword argument 'image'; for a forward pass that takes the whole dic"),
        ("users:no_samples", "expected a number of samples above 0, got 'many'; e.g. 32"),
        ("users:no_tensor", "a function; got no tensor in the batch"),
        ("users:other_key", "got the key 'modle'; did you mean model?"),
        ("users:no_model", "expected a dict with model, loss and args or kwargs (model, args, "),
        ("users:other_unit", "expected modules of the model in fsdp_units, got a Linear"),
        ("users:no_rate", "expected an optimizer with a learning rate, got Rateless (lr None)"),
        ("users:sized?wdith=8", "expected parameters samples, width, got 'wdith'; did you mean"),
        ("users:fine?width=8", "expected parameters none, got 'width'"),
        ("users:sized?width", "expected parameters as in 'my_model:make?batch=16&layers=4', got"),
        ("tests.own_models:vector", "expected a loss that is a scalar, got [3, 4]"),
        ("tests.own_models:idle", "1.weight receives no gradient; try --find-unused-parameters or"),
        ("./users:fine", "expected package.module:function, got './users:fine'; e.g. my_model:"),
        (".users:fine", "expected package.module:function, got '.users:fine'; e.g. my_model:"),
        (":fine", "expected package.module:function, got ':fine'; e.g. my_model:"),
        ("users:", "users.py has no function ''"),
        ("users:number", "users.py has no function 'number', but a value of type int"),
        ("users:exits", "users:exits: SystemExit: 0 (users.py:28)"),
        ("users:interrupts", "users:interrupts: KeyboardInterrupt: no message (users.py:29)"),
        ("users:exits_in_forward", "SystemExit: enough (users.py:57)"),
        ("leaving:f", "leaving:f: SystemExit: from the module (leaving.py:1)"),
        ("unfinished:f", "unfinished:f: SyntaxError: invalid syntax (unfinished.py, line 1)"),
        ("users:divides", "users:divides: ZeroDivisionError: division by zero (users.py:30)"),
        ("users:missing_file", "No such file or directory: 'weights.pt' (users.py:31)"),
        ("users:wrong_shape", "mat1 and mat2 shapes cannot be multiplied"),
        ("users:empty", "expected a batch of at least 1 sample, got [0, 4]"),
        ("users:no_batch", "expected a batch of at least 1 sample, got []"),
        ("users:grows", "changes the shape of its inputs, from [[2, 4]] to [[3, 4]]"),
    ],
)
def test_a_model_that_cannot_be_measured_is_one_line(name: str, words: str) -> None:
    assert words in refused(try_own, name, CPU, idle_allowed=False)


def test_a_function_that_exits_in_a_case_fails_the_case() -> None:
    """Benchmark.attempt turns an Exception into a row. SystemExit would end the rank with 0."""
    assert "SystemExit: 0" in refused(make_own, "users:exits", CPU)


def test_settings_of_a_model_apply_to_its_cases() -> None:
    """All that the function has set applies until the end of a case; nothing applies after it."""
    own_model.search_working_directory()
    before = read_settings()
    with restored():
        make_own("users:sets_everything", CPU)
        assert torch.is_anomaly_enabled()
        assert not torch.backends.mkldnn.enabled
        assert os.environ["MINE"] == "1"
        assert sys.stdout is before["sys.stdout"]  # of which the rows of the table are printed
    assert differences(before, read_settings()) == {}
    changes = try_own("users:sets_everything", CPU).changes
    assert differences(before, read_settings()) == {}
    names = {re.split(" from |;", change)[0] for change in changes}
    assert names - {"torch._inductor.config.deterministic"} == {  # if it is imported
        *("the anomaly mode", "the deterministic mode", "the autocast of cpu", "sys.stdout"),
        *(f"torch.backends.{x}" for x in ("cudnn.benchmark", "mkldnn.enabled")),
        *("torch.backends.cuda.flash_sdp_enabled", "torch's float32_matmul_precision"),
        *(f"torch's fp32_precision of {x} matmul" for x in ("cuda", "mkldnn")),
        "environment variables (MINE)",
    }
    assert "the anomaly mode from False to True; it applies to this model only" in changes


def test_settings_of_an_import_apply_to_later_calls(folder: Path) -> None:
    """A module is imported once."""
    (folder / "imported.py").write_text(
        "import os, torch, users\nos.environ['AT_IMPORT'] = '1'\n"
        "torch.backends.cudnn.benchmark = True\nfine = users.fine\n"
    )
    assert len(try_own("imported:fine", CPU).changes) == 2
    assert "AT_IMPORT" not in os.environ
    with restored():
        make_own("imported:fine", CPU)
        assert os.environ["AT_IMPORT"] == "1"
        assert torch.backends.cudnn.benchmark
    assert not torch.backends.cudnn.benchmark


@pytest.mark.parametrize(
    ("function", "samples", "shapes"),
    [
        ("alone", 2, [[2, 4]]),
        ("forgets", 2, [[2, 4]]),
        ("graph", None, [[10, 4], [2, 30]]),
        ("one_class", 6, [[6, 4], [6]]),
        ("slots", 6, [[6, 4], [6]]),
        ("slots?kind=Unset", 6, [[6, 4], [6]]),
        ("data", None, []),
        ("data?samples=12", 12, []),
        ("jagged", 3, [[3]]),
        ("masked", 8, [[1, 4], [8, 4]]),
    ],
)
def test_batches_of_all_kinds(function: str, samples: int | None, shapes: list[list[int]]) -> None:
    """The number of samples is what all tensors share, or unknown."""
    trial = try_own(f"users:{function}", CPU, idle_allowed=False)
    assert (trial.samples, trial.shapes) == (samples, shapes)


@pytest.mark.parametrize(
    ("how", "op"),
    [
        ("reduces", "allreduce"),
        ("functional", "all_reduce"),
        ("waits", "barrier"),
        ("in_backward", "allreduce"),
        ("gathers", "allgather_base"),
        ("Shares", "allreduce"),  # optimizers
        ("SharesAtStart", "barrier"),
        ("Rounds", "barrier"),
        ("local", ""),
    ],
)
def test_communication_is_seen(how: str, op: str) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        trial = try_own(f"users:communicates?how={how}", CPU)
    finally:
        dist.destroy_process_group()
    assert trial == Trial(2, [], shapes=[[2, 4]], communication=(op,) * bool(op))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("users:grows_by_call", "[64, 4] first and [640, 4] now"),
        (
            "users:grows_by_call?stated=true",
            "no tensors with 64 samples first and no tensors with 640 samples now",
        ),
    ],
)
def test_a_batch_of_another_size_than_in_the_first_call(name: str, words: str) -> None:
    """A rate would be computed from 64 samples, and the step would train 640."""
    assert try_own(name, CPU).samples == 64
    assert f"steps, got {words}" in refused(make_own, name, CPU)


@pytest.mark.parametrize(
    ("name", "now"), [("users:grows_later", "[3, 4]"), ("users:grows_later?nested=true", "[4, 4]")]
)
def test_a_batch_that_grows_in_a_later_step_fails_the_case(name: str, now: str) -> None:
    bench = Mock()
    for steps in (2, 3):
        own = make_own(name, CPU, {})  # the first call, outside of a case
        fails: Any = pytest.raises(Refused) if steps == 3 else nullcontext()
        with fails as error, around_case(bench):
            own = make_own(name, CPU)
            for _ in range(steps):
                own.model(*own.args)
    assert describe(error.value) == (  # without the name of the exception
        f"{name}: expected batches of equal shapes in all calls and steps, got [2, 4] first and "
        f"{now} now"
    )
    assert process_settings.OF_CASE == []
    assert bench.print.call_args_list == []


def test_a_setting_that_a_step_changes_is_named() -> None:
    """In a step after the trial. What the function itself or the case before it sets is not."""
    bench = Mock()
    with around_case(bench):
        torch.backends.cudnn.deterministic = True  # like --dtype
        make_own("users:sets_everything", CPU)
        own = make_own("users:sets_later", CPU)
        assert bench.print.call_count == 0
        torch.backends.cudnn.benchmark = False
        own.loss(torch.ones(1))
        os.environ["LATER"] = "1"
    assert not torch.backends.cudnn.benchmark
    assert "LATER" not in os.environ
    (line,) = bench.print.call_args.args
    assert line.startswith("# a step of users:sets_everything has changed environment variables (L")
    assert line.endswith("(LATER); they were restored after the case")
    assert bench.print.call_count == 1


def test_a_model_that_does_not_fit_fails_its_cases() -> None:
    """The cases fail with the reason, and others are measured. It may fit on some ranks."""
    assert try_own("users:fills_the_gpu", CPU) == Trial(None, [], fits=False)
    assert try_own("users:fills_the_gpu_in_forward", CPU).samples == 2
    with pytest.raises(torch.OutOfMemoryError):
        make_own("users:fills_the_gpu", CPU)


def trials_of(*batches: tuple[int | None, list[list[int]]] | None) -> list[Trial]:
    """Trials with these samples and shapes, by rank. None: the model did not fit."""
    return [Trial(b[0], [], shapes=b[1]) if b else Trial(None, []) for b in batches]


def test_batches_with_other_numbers_of_samples_are_refused() -> None:
    """A rank without memory is not compared, nor are unknown numbers of samples."""

    def told(*batches: Any) -> str | None:
        return own_model.uneven("mine:f", trials_of(*batches))

    three, five, graph = (3, [[3, 4]]), (5, [[5, 4]]), (None, [[3], [8]])
    assert told(three, three) is told(three, None, three) is told(None, None) is None
    assert told((8, []), (8, [[1]])) is told(graph, (None, [[5], [9]])) is None
    line = "mine:f: expected the same number of samples on all ranks, got "
    assert told(three, five, three, five) == f"{line}3 on rank 0 and 5 on rank 1, 3"
    assert told(None, graph, five) == f"{line}an unknown number on rank 1 and 5 on rank 2"
    assert told(three, graph) == f"{line}3 on rank 0 and an unknown number on rank 1"


def test_other_shapes_on_a_rank_are_a_line() -> None:
    """It may be intended. Also if `samples` is stated, or only a later tensor differs."""

    def told(*batches: Any) -> list[str]:
        bench = Mock()
        own_model.combined(bench, "mine:f", trials_of(*batches))
        return [call.args[0] for call in bench.print.call_args_list]

    short, long, mask = [[2, 8]], [[2, 64]], [[2, 8], [2, 2, 8]]
    start = "# mine:f: shapes of the batch differ between ranks: "
    assert told((2, short), None, (2, short)) == []
    rest = "[2, 8] on rank 0, [2, 64] on rank 1, 2"
    assert told((2, short), (2, long), (2, long)) == [start + rest]
    rest = "[2, 8], [2, 2, 8] on rank 1, [2, 8] on rank 2"
    assert told(None, (6, mask), (6, short)) == [start + rest]


def test_parameters_in_the_name() -> None:
    name = "a.b:make?batch=16&rate=1e-3&rope=true&cache=False&kind=tiny%20one&empty="
    parameters = {"batch": 16, "rate": 1e-3, "rope": True, "cache": False, "kind": "tiny one"}
    assert own_model.parameters_of(name) == ("a.b", "make", parameters | {"empty": ""})
    assert own_model.parameters_of("a:make") == ("a", "make", {})
    assert try_own("users:sized?samples=3&width=2", CPU) == Trial(3, [], shapes=[[3, 2]])


def test_a_batch_of_keyword_arguments() -> None:
    """A batch like that of Hugging Face: nested, with values that are not tensors. 4 x 5 tokens."""
    name = "tests.own_models:batch_of_transformers?batch=4&long=true"
    trial = Trial(4, [], tokens=20, shapes=[[4, 5], [4, 1, 1]])
    assert try_own(name, CPU, idle_allowed=False) == trial
    own = make_own(name, CPU)
    assert own.tokens() == 20
    assert (own.args, list(own.kwargs)) == ((), ["input_ids", "extra", "use_cache"])
    assert own.shapes() == [[4, 5], [4, 1, 1]]
    assert [key for key, _ in own_model.leaves_of(own.kwargs)] == ["input_ids", "masks"]


def test_a_dict_with_an_optimizer_and_units() -> None:
    own = make_own("tests.own_models:everything", CPU)
    assert own.fsdp_units == [*own.model.modules()][1:3]
    assert own.optimizer is not None
    optimizer = own.optimizer(own.model.parameters())
    assert optimizer.param_groups[0]["lr"] == 0.5
    own_model.without_rate(optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.0
    rate = torch.tensor(0.5)
    by_tensor = torch.optim.Adam(own.model.parameters(), lr=rate)
    own_model.without_rate(by_tensor)
    assert float(by_tensor.param_groups[0]["lr"]) == 0.0


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no_dataset", "expected a dataset with __getitem__ and __len__, got a list_iterator"),
        ("no_function", "expected a dataset, or a dataset and a collate function"),
        ("missing_file?device=1", "No such file or directory: 'weights.pt' (users.py:"),
        ("numbers?number=3", "expected parameters count, got 'number'"),
    ],
)
def test_datasets_that_are_refused(name: str, words: str) -> None:
    assert words in refused(own_model.make_dataset, f"users:{name}")
    assert len(own_model.make_dataset("users:numbers?count=3")[0]) == 3
    assert own_model.make_dataset("users:with_collate")[1] is torch.tensor
