"""input_sweep.py without torchrun: its check, idle workers, sentences, refusals."""

import multiprocessing
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from benchmarks import input_sweep
from benchmarks.input_sweep import Feed, Images, Ticketed, epoch_problem, find_files
from common.stats import Times
from harness.report import Case

CPU = torch.device("cpu")


class Counted(Images):
    """Images without files. Counts the samples that the workers have produced."""

    made = multiprocessing.get_context("fork").Value("i", 0)

    def __init__(self, count: int) -> None:
        super().__init__([("/dev/null", 0)] * count, pixels=8)

    def content(self, index: int) -> torch.Tensor:
        with self.made.get_lock():
            self.made.value += 1
        return torch.zeros(3, 16, 16, dtype=torch.uint8)


def test_incomplete_and_repeated_samples() -> None:
    for seen, problem in (
        ([1, 2, 1], None),  # 3 samples on 2 ranks: one is padding
        ([1, 0, 1, 0], None),  # half an epoch
        ([2, 0, 2, 0], "2 of 4 samples are missing from an epoch"),
        ([2, 0, 0, 0], "1 samples are repeated in an epoch; padding accounts for 0"),
    ):
        assert epoch_problem(torch.tensor(seen), 2) == problem


def test_paused_workers_are_idle_and_nothing_is_prefetched() -> None:
    """Two workers prefetch two batches of four. Batches after a pause are produced after it."""
    options = {"num_workers": 2, "prefetch_factor": 2, "persistent_workers": True}
    feed = Feed(Ticketed(Counted(10)), 4, 0, 1, CPU, multiprocessing_context="fork", **options)
    before = Counted.made.value
    feed.next()
    feed.pause()
    assert Counted.made.value - before == feed.samples == 4 * (1 + 2 * 2)
    feed.next()
    feed.pause()
    assert Counted.made.value - before == feed.samples == 2 * 20
    assert len(feed.processes) == 2
    feed.close()


def case_of(
    step_s: float, resident_s: float, rounds: int = 6, cache: str = "warm", swing: float = 1
) -> Case:
    """A case of 2 ranks, 2 workers each, 8 samples a step. The loader takes 20 ms a batch.
    swing: every other step takes this many times as long."""
    key = {"workers": 2, "batch_size": 8, "cache": cache}
    case = Case(key=key, ranks=[0, 1], name=f"{step_s:g} s, {cache}")
    seconds = {"step": step_s, "resident": resident_s, "loader": 0.02}
    samples = {part: [[each] * rounds] * 2 for part, each in seconds.items()}
    samples["step"] = [[step_s, step_s * swing] * (rounds // 2)] * 2
    times = Times(samples, [1] * rounds)
    fact = input_sweep.Facts(from_device=0.2, problem=None, digest="same")
    input_sweep.derive(case, times, [fact, fact])
    return case


ARGS = Namespace(iters=None, max_seconds=10)


def test_metrics_and_sentences_by_hand() -> None:
    """16 samples in 0.02 s are 800/s, and in 0.0125 s 1,280/s. 2 workers * 0.02 / 0.0125 = 3.2."""
    m = case_of(0.0201, 0.0125).metrics
    assert m["exposed_wait_s"].value == pytest.approx(0.0076)
    assert m["loader_samples_per_s"].value == pytest.approx(800)
    assert m["training_samples_per_s"].value == pytest.approx(1280)
    assert m["workers_needed"].value == pytest.approx(3.2)
    assert input_sweep.sentence_of(case_of(0.0201, 0.0125), ARGS, 2, 8) == (
        "input-bound: the loader delivers 800 samples/s (800 to 800) and training consumes "
        "1,280 samples/s (1,280 to 1,280); training would keep 3.2 (3.2 to 3.2) workers per "
        "rank busy, with one core each; this node has 8 cores for 2 ranks"
    )
    assert input_sweep.sentence_of(case_of(0.2, 0.1), ARGS, 2, 8) == (
        "the workers slow the training down: a step waits 100 ms (100 to 100), although the "
        "loader delivers 800 samples/s (800 to 800) and training consumes 160 samples/s (160 "
        "to 160); the workers and 2 ranks share this node's 8 cores"
    )
    # The files of the cold case were read from the page cache.
    cases = [case_of(0.2, 0.1), case_of(0.1002, 0.1), case_of(0.1, 0.1, 2, "cold")]
    assert input_sweep.answer(ARGS, 2, 2, cases) == [
        "0.1002 s, warm: not input-bound: a step waits 200 us (200 to 200) and computes for 100 ms "
        "(100 to 100)",
        "0.1 s, cold: unclear whether the training is input-bound: too few samples",
        "not cold: this file system did not drop files from the page cache",
    ]


@pytest.mark.parametrize(("iters", "more"), [(None, "--max-seconds 40"), (12, "--iters 24")])
def test_advice_for_an_unclear_wait(iters: int | None, more: str) -> None:
    """Steps of 95 and 114 ms with a resident step of 100 ms. --iters overrides --max-seconds."""
    case = case_of(0.095, 0.1, 12, swing=1.2)
    sentence = input_sweep.sentence_of(case, Namespace(iters=iters, max_seconds=10), 2, 8)
    assert sentence.startswith("unclear whether the training is input-bound: a step waits ")
    assert sentence.endswith(f"; try {more}")


def test_a_folder_that_cannot_be_read(tmp_path: Path) -> None:
    """A folder without images, and a text file named as an image."""
    (tmp_path / "cats").mkdir()
    with pytest.raises(FileNotFoundError, match="Found no valid file for the classes cats"):
        find_files(tmp_path)
    text = tmp_path / "cats" / "a.jpg"
    text.write_text("text")
    with pytest.raises(ValueError, match=f"^{text} is not an image: UnidentifiedImageError$"):
        find_files(tmp_path)
    with pytest.raises(
        ValueError, match=r"^expected a folder with a folder of .*, got /no; e.g. --data"
    ):
        find_files(Path("/no"))


class Pair(NamedTuple):
    x: torch.Tensor
    name: str


@dataclass
class Graph:
    x: torch.Tensor
    size: int


def test_batches_of_all_kinds_are_moved() -> None:
    """Here from the CPU to the device without memory."""
    x, meta = torch.ones(2), torch.device("meta")
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    batch = {"a": [x, (x, 3)], "b": Pair(x, "y"), "c": Graph(x, 5), "d": None, "e": packed}
    moved = input_sweep.to_device(batch, meta)
    first, (second, number) = moved["a"]
    kept = (number, moved["b"].name, moved["c"].size, moved["d"])
    assert kept == (3, "y", 5, None)
    assert type(moved["c"]) is Graph
    tensors = (first, second, moved["b"].x, moved["c"].x, moved["e"].data)
    assert {tensor.device for tensor in tensors} == {meta}
