"""input_sweep.py without torchrun: which samples come, resting workers, sentences, refusals."""

import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.input_sweep import (
    Facts,
    Feed,
    Images,
    answer,
    derive,
    epoch_problem,
    find_files,
    make_files,
    parse_args,
    plan,
    sentence_of,
)
from common.report import Case
from common.stats import Times

CPU = torch.device("cpu")


class Counted(Images):
    """Images without files. It counts how many samples the workers have made."""

    made = multiprocessing.get_context("fork").Value("i", 0)

    def __init__(self, count: int) -> None:
        super().__init__([("/dev/null", 0)] * count, pixels=8)

    def content(self, index: int) -> torch.Tensor:
        with self.made.get_lock():
            self.made.value += 1
        return torch.zeros(3, 16, 16, dtype=torch.uint8)


def test_every_sample_comes_once_in_an_epoch() -> None:
    """10 samples on 3 ranks are 4 for each rank: 2 are padding. A batch is larger than that."""
    seen = torch.zeros(10, dtype=torch.int32)
    for rank in range(3):
        feed = Feed(Counted(10), 3, rank, 3, CPU)
        feed.next()
        feed.next()
        assert feed.samples == 6
        assert int(feed.seen.sum()) == feed.epoch_samples == 4
        seen += feed.seen
    assert epoch_problem(seen, 3) is None
    assert sorted(seen.tolist()) == [1] * 8 + [2] * 2


@pytest.mark.parametrize(
    ("seen", "ranks", "problem"),
    [
        ([1, 1, 1, 1], 2, None),
        ([1, 2, 1], 2, None),  # 3 samples on 2 ranks: one is padding
        ([1, 0, 1, 0], 2, None),  # half an epoch
        ([2, 0, 2, 0], 2, "2 of 4 samples do not come in an epoch"),
        ([2, 0, 0, 0], 2, "1 samples come twice in an epoch; padding explains 0"),
        ([3, 1, 0], 2, "1 of 3 samples do not come in an epoch"),
    ],
)
def test_what_is_wrong_with_an_epoch(seen: list[int], ranks: int, problem: str | None) -> None:
    assert epoch_problem(torch.tensor(seen), ranks) == problem


def test_paused_workers_have_no_work_and_nothing_is_fetched_ahead() -> None:
    """Two workers fetch two batches of four ahead. What comes after a pause is made after it."""
    options = {"num_workers": 2, "prefetch_factor": 2, "persistent_workers": True}
    feed = Feed(Counted(10), 4, 0, 1, CPU, multiprocessing_context="fork", **options)
    before = Counted.made.value
    feed.next()
    feed.pause()
    assert Counted.made.value - before == feed.samples == 4 * (1 + 2 * 2)
    feed.pause()  # nothing to do
    feed.next()
    feed.pause()
    assert Counted.made.value - before == feed.samples == 2 * 20
    assert len(feed.processes) == 2
    feed.close()


def test_images_are_decoded_and_cropped(tmp_path: Path) -> None:
    make_files(12, tmp_path, lambda phase: None)
    files = find_files(tmp_path)
    assert len(files) == 12
    assert {target for _, target in files} == set(range(10))
    for cold in (False, True):
        image, target, ticket = Images(files, 8, cold)[11]
        assert image.shape == (3, 8, 8)
        assert image.dtype == torch.float32
        assert target == files[11][1]
        assert ticket.tolist() == [11, os.getpid(), Path(files[11][0]).stat().st_size]


def case_of(
    step: list[float], resident: list[float], name: str = "", cache: str = "warm"
) -> tuple[Case, dict[str, Any]]:
    """A case of 2 ranks on one host with 2 workers each, 8 samples a step. The loader takes 20 ms
    for a batch. step, resident: seconds of each round."""
    key = {"workers": 2, "batch_size": 8, "cache": cache}
    case = Case(key=key, ranks=[0, 1], name=name)
    seconds = {"step": step, "resident": resident, "loader": [0.02] * len(step)}
    times = Times({part: [row] * 2 for part, row in seconds.items()}, [1] * len(step))
    fact = Facts(from_device=0.2, problem=None, digest="same")
    derive(case, times, [fact, fact])
    return case, case.metrics


def test_metrics_by_hand() -> None:
    """16 samples in 0.02 s are 800/s, in 0.0125 s 1,280/s. 2 workers * 0.02 / 0.0125 = 3.2."""
    case, m = case_of([0.0201] * 6, [0.0125] * 6)
    assert m["exposed_wait_s"].value == pytest.approx(0.0076)
    assert m["loader_samples_per_s"].value == pytest.approx(800)
    assert m["training_samples_per_s"].value == pytest.approx(1280)
    assert m["workers_needed"].value == pytest.approx(3.2)
    assert case.check == "passed"


SLOW = [0.1, 0.11, 0.12, 0.1, 0.11, 0.12]


@pytest.mark.parametrize(
    ("step", "resident", "sentence"),
    [
        (
            [0.0201] * 6,
            [0.0125] * 6,
            "input-bound: the loader brings 800 samples/s (800 to 800), training takes 1,280 "
            "samples/s (1,280 to 1,280); it would keep 3.2 (3.2 to 3.2) workers a rank busy, "
            "each with a core; this node has 8 for 2 ranks",
        ),
        (
            [0.1002] * 6,
            [0.1] * 6,
            "not input-bound: a step waits 200 us (200 to 200), and computes 100 ms (100 to 100)",
        ),
        (
            [0.2] * 6,
            [0.1] * 6,
            "the workers slow the training down: a step waits 100 ms (100 to 100), although the "
            "loader brings 800 samples/s (800 to 800), training takes 160 samples/s (160 to 160); "
            "they and the ranks share the cores; this node has 8 for 2 ranks",
        ),
        (
            SLOW,
            [0.1, 0.1, 0.1, 0.12, 0.1, 0.1],
            "it cannot be told whether the loader feeds the training: a step waits 10.00 ms "
            "(-20.00 to 20.00); a larger --max-seconds may tell",
        ),
        (
            [0.2] * 2,
            [0.1] * 2,
            "it cannot be told whether the loader feeds the training: too few samples",
        ),
    ],
)
def test_the_sentences(step: list[float], resident: list[float], sentence: str) -> None:
    case, _ = case_of(step, resident)
    assert sentence_of(case, 2, 8) == sentence


def test_the_answer_is_of_the_fastest_case_of_each_cache() -> None:
    """The files of the cold case came from the page cache."""
    slow, _ = case_of([0.2] * 6, [0.1] * 6, "a")
    fast, _ = case_of([0.1002] * 6, [0.1] * 6, "b")
    cold, _ = case_of([0.1] * 2, [0.1] * 2, "c", "cold")
    assert answer(2, 2, [slow, fast, cold]) == [
        "b: not input-bound: a step waits 200 us (200 to 200), and computes 100 ms (100 to 100)",
        "c: it cannot be told whether the loader feeds the training: too few samples",
        "not cold: this file system keeps what it was told to drop",
    ]


def test_a_case_is_a_setting() -> None:
    cases = plan(parse_args(["--workers", "1,4", "--prefetch", "2,8"]), 2)
    settings = [(key["workers"], key["cache"], key["prefetch"]) for _, _, key in cases]
    assert settings[:3] == [(1, "warm", 2), (1, "warm", 8), (1, "cold", 2)]
    assert len(cases) == 8
    assert cases[1][0] == "1 worker, warm, prefetch 8"


def test_an_unknown_model(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_args(["--model", "resnet19"])
    error = capsys.readouterr().err
    assert "--model: unknown model 'resnet19'; did you mean resnet1" in error
    assert error.count("\n") == 1


def test_a_folder_that_cannot_be_read(tmp_path: Path) -> None:
    """One that is not there, one without images, a text for an image."""
    folder = tmp_path / "folder"
    with pytest.raises(FileNotFoundError):
        find_files(folder)
    (folder / "cats").mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match="Found no valid file for the classes cats"):
        find_files(folder)
    text = folder / "cats" / "a.jpg"
    text.write_text("text")
    with pytest.raises(ValueError, match=f"^{text} is no image: UnidentifiedImageError$"):
        find_files(folder)
