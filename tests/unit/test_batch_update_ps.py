"""benchmarks/batch_update_ps.py: the server under many threads, its log replayed, its rates."""

import copy
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import load_script

from common.timing import StopRule

SCRIPT = load_script("batch_update_ps")


def config(trainers: int = 3, **changes: Any) -> Any:
    values: dict[str, Any] = {
        "in_features": 5,
        "out_features": 4,
        "batch_size": 2,
        "num_batches": 3,
        "trainers": trainers,
        "batch_update_size": trainers,
        "payload": "tensors",
        "straggler_timeout_s": 30.0,
        "device": "cpu",
        "server_device": "cpu",
    }
    return SCRIPT.Config(**values | changes)


def rule(iters: int | None, warmup: int = 1) -> StopRule:
    return StopRule(warmup, iters, min_iters=20, target_ci=0.02, max_seconds=0.2)


def train(server: Any, trainer: int, limit: int | None = None) -> None:
    """What a trainer does, without RPC; leaves without a word after `limit` gradients."""
    payload = SCRIPT.PAYLOADS[server.config.payload]
    batches = SCRIPT.create_batches(server.config, trainer)
    model = SCRIPT.create_model(server.config)
    received, more = server.fetch(trainer)
    sent = 0
    while more and sent != limit:
        received = copy.deepcopy(received)  # as RPC's pickle does
        model = payload.load(model, received, torch.device("cpu"))
        SCRIPT.compute_gradients(model, *batches[sent % len(batches)])
        received, more = server.update(trainer, payload.gradients(model, "cpu")).wait()
        sent += 1
    if not more:
        server.finish(trainer, [0.001] * sent)


def run_threads(works: list[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=work, daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()


@pytest.fixture(params=["tensors", "module"])
def payload(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_eight_threads_lose_no_update() -> None:
    """Large gradients, so that two additions that overlap would show."""
    size = 1000
    settings = config(8, in_features=size, out_features=size, batch_update_size=8)
    server = SCRIPT.BatchUpdateServer(settings, rule(10))
    start = SCRIPT.flat_parameters(server.model)

    def send(trainer: int) -> None:
        gradient = torch.full_like(start, float(2**trainer))
        _, more = server.fetch(trainer)
        while more:
            _, more = server.update(trainer, gradient).wait()
        server.finish(trainer, [])

    run_threads([lambda trainer=trainer: send(trainer) for trainer in range(8)])  # type: ignore[misc]
    server.finished.wait()
    log = server.log()
    assert [sorted(t for t, _ in members) for members in log["updates"]] == [list(range(8))] * 11
    # SGD with momentum 0.9 and the mean gradient 255 / 8: v = 0.9 v + g, p -= 0.001 v
    velocity = moved = 0.0
    for _ in range(11):
        velocity = 0.9 * velocity + 255 / 8
        moved += 0.001 * velocity
    change = start - log["parameters"]
    torch.testing.assert_close(change, torch.full_like(change, moved), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_log_replayed_gives_the_parameters(payload: str, size: int) -> None:
    settings = config(3, batch_update_size=size, payload=payload)
    server = SCRIPT.BatchUpdateServer(settings, rule(25))
    run_threads([lambda trainer=trainer: train(server, trainer) for trainer in range(3)])  # type: ignore[misc]
    log = server.log()
    assert len(log["updates"]) == 26  # one is warm-up
    assert {len(members) for members in log["updates"]} == {size}
    assert SCRIPT.compare_with_replay(settings, log) is None


def test_a_lost_gradient_is_seen() -> None:
    settings = config(3)
    server = SCRIPT.BatchUpdateServer(settings, rule(SCRIPT.CHECKED_UPDATES - 1))
    split = server.payload.split
    calls = iter(range(10**6))

    def losing(model: Any, gradients: Any) -> Any:
        parts = list(split(model, gradients))
        return [part * 0 for part in parts] if next(calls) == 40 else parts

    object.__setattr__(server, "payload", SCRIPT.dataclasses.replace(server.payload, split=losing))
    run_threads([lambda trainer=trainer: train(server, trainer) for trainer in range(3)])  # type: ignore[misc]
    wrong = SCRIPT.compare_with_replay(settings, server.log())
    assert wrong is not None
    assert "from a sequential reference" in wrong


def test_the_others_go_on_without_a_trainer_that_is_gone(payload: str) -> None:
    settings = config(3, straggler_timeout_s=0.3, payload=payload)
    server = SCRIPT.BatchUpdateServer(settings, rule(30))
    run_threads(
        [
            lambda: train(server, 0),
            lambda: train(server, 1, limit=4),
            lambda: train(server, 2),
        ]
    )
    server.finished.wait()
    log = server.log()
    assert log["lost"] == {1: 4}
    assert [len(members) for members in log["updates"]] == [3] * 4 + [2] * 27
    assert sorted(log["latencies_s"]) == [0, 2]
    assert SCRIPT.compare_with_replay(settings, log) is None


def test_a_trainer_that_comes_back_counts_again() -> None:
    settings = config(2, straggler_timeout_s=0.2)
    server = SCRIPT.BatchUpdateServer(settings, rule(10**6))
    gradient = torch.zeros(24)
    server.fetch(0)
    server.fetch(1)
    alone = server.update(0, gradient)
    alone.wait()
    assert server.lost == {1: 0}
    late = server.update(1, gradient)
    assert server.lost == {}
    assert not late.done()
    server.update(0, gradient)
    late.wait()
    assert [len(members) for members in server.updates] == [1, 2]
    server.finish(0, [])
    server.finish(1, [])


def test_nobody_is_left_out_while_nobody_waits() -> None:
    server = SCRIPT.BatchUpdateServer(config(2, straggler_timeout_s=0.1), rule(5))
    server.fetch(0)
    time.sleep(0.4)
    assert server.lost == {}
    server.finish(0, [])
    server.finish(1, [])


def test_the_stop_rule_by_time_and_by_count() -> None:
    for settings, updates in ((rule(7, warmup=2), 9), (rule(None), None)):
        server = SCRIPT.BatchUpdateServer(config(1), settings)
        train(server, 0)
        if updates is None:
            assert len(server.updates) >= 21
        else:
            assert len(server.updates) == updates


def test_rates() -> None:
    """Updates at 0, 1, 3, 4, 6 s of 2, 2, 3, 1, 2 gradients; two are warm-up."""
    log = {
        "stamps_s": [0.0, 1.0, 3.0, 4.0, 6.0],
        "updates": [[(0, 0)] * n for n in (2, 2, 3, 1, 2)],
    }
    rates = SCRIPT.rates(log, warmup=2)
    assert rates["updates"] == 3
    assert rates["updates_per_s"] == pytest.approx(3 / 5)
    assert rates["gradients_per_s"] == pytest.approx(6 / 5)
    assert rates["warmup_s"] == 1
    assert rates["update_time_p50_s"] == 2


def test_payloads_carry_the_same(payload: str) -> None:
    settings = config()
    way = SCRIPT.PAYLOADS[payload]
    model, other = SCRIPT.create_model(settings), SCRIPT.create_model(settings)
    inputs, labels = SCRIPT.create_batches(settings, 0)[0]
    SCRIPT.compute_gradients(model, inputs, labels)
    parts = list(way.split(other, way.gradients(model, "cpu")))
    for part, parameter in zip(parts, model.parameters(), strict=True):
        assert torch.equal(part, parameter.grad)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 1
    loaded = way.load(other, way.parameters(model, "cpu"), torch.device("cpu"))
    assert torch.equal(SCRIPT.flat_parameters(loaded), SCRIPT.flat_parameters(model))


def test_trainers_have_different_data() -> None:
    a, b = (SCRIPT.create_batches(config(), trainer)[0][0] for trainer in (0, 1))
    assert not torch.equal(a, b)
    assert torch.equal(a, SCRIPT.create_batches(config(), 0)[0][0])
