"""parameter_server.py in one process: serialization of gradients, and the average of a server."""

from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.distributed.rpc.internal import _internal_rpc_pickler as pickler
from torch.futures import Future

from benchmarks import parameter_server as script
from common.stats import Estimate
from harness.report import Case

CPU = torch.device("cpu")
DENSE = torch.tensor([[1.0, 2.0], [3.0, 4.0]])


def sparse(rows: list[int], values: list[float]) -> torch.Tensor:
    """A tensor [4, 1] in which a row may occur several times, as in an embedding's gradient."""
    parts = torch.tensor([rows]), torch.tensor(values)[:, None]
    return torch.sparse_coo_tensor(*parts, (4, 1), check_invariants=True)


def travel(sent: Any) -> Any:
    """Serialize and deserialize as RPC does. With a device map, TensorPipe aborts a process that
    sends a sparse tensor: it expects one tensor in the message, and finds two in its content."""
    data, tensors = pickler.serialize(sent)
    assert [tensor.layout for tensor in tensors] == [torch.strided] * len(tensors)
    return pickler.deserialize(data, tensors)


@pytest.mark.parametrize("gradient", [DENSE, sparse([2, 0, 2], [1.0, 2.0, 4.0])], ids=["d", "s"])
def test_a_gradient_is_sent_as_dense_tensors(gradient: torch.Tensor) -> None:
    arrived = script.unpack(script.copy_to(CPU, travel(script.pack(gradient))))
    assert arrived.layout == gradient.layout
    assert torch.equal(arrived.to_dense(), gradient.to_dense())
    # a future on CUDA reads the indices of a sparse tensor, which must be coalesced
    assert not arrived.is_sparse or arrived.is_coalesced()


@pytest.mark.parametrize("kind", ["running", "batch"])
def test_the_average_of_sparse_gradients(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row 0: (2 + 4) / 2; row 1: 8 / 2; row 2: (1 + 5) / 2."""
    script.start_server(kind, 2, "cpu")

    def call(name: str, function: Any, args: Any, timeout: float) -> Future[Any]:
        return function(*travel(args)).then(lambda done: travel(done.value()))

    monkeypatch.setattr("torch.distributed.rpc.rpc_async", call)
    answers = []
    for gradient in (sparse([2, 0], [1.0, 2.0]), sparse([1, 2, 0], [8.0, 5.0, 4.0])):
        bucket = Mock(**{"buffer.return_value": gradient, "index.return_value": 3})
        answers.append(script.send_bucket("server0", 7, bucket, CPU, 60))
    for answer in answers:
        average = answer.wait()
        assert average.is_sparse
        assert average.is_coalesced()
        assert average.to_dense().flatten().tolist() == [3.0, 4.0, 3.0, 0.0]
    assert len(script.bucket_times()[7]) == 1


def test_the_answer_names_every_route() -> None:
    """They were timed one after the other, so they are not ranked."""
    cases = []
    for route, server, ms in (("hybrid", None, 18.0), ("rpc running", "running", 15.0)):
        metrics = {"step_s": Estimate(ms / 1e3)}
        cases.append(Case(key={"server": server}, ranks=[0], name=route, metrics=metrics))
    told = "a step takes 18.0 ms (no interval) with hybrid, 15.0 ms (no interval) with rpc running "
    assert script.answer(cases).startswith(f"{told}(through a server); these were timed")
