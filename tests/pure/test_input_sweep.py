"""input_sweep.py without torchrun: which samples come, resting workers, sentences, refusals."""

import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import input_sweep
from benchmarks.input_sweep import (
    Facts,
    Feed,
    Images,
    Tokens,
    answer,
    derive,
    epoch_problem,
    find_data,
    make_files,
    parse_args,
    plan,
    sentence_of,
)
from common.report import Case
from common.stats import Times

LENGTH, VOCAB = 64, 256  # of decoder-nano
CPU = torch.device("cpu")


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    args = parse_args(["--kind", "tokens", "--samples", "10", "--model", "decoder-nano"])
    make_files(args, tmp_path, lambda phase: None)
    return tmp_path / "tokens.bin"


def test_every_sample_comes_once_in_an_epoch(tokens: Path) -> None:
    """10 samples on 3 ranks are 4 for each rank: 2 are padding. A batch is larger than that."""
    seen = torch.zeros(10, dtype=torch.int32)
    for rank in range(3):
        feed = Feed(Tokens(str(tokens), LENGTH, VOCAB), 3, rank, 3, CPU, workers=0)
        feed.finish_epoch()
        assert feed.samples == 6
        assert int(feed.seen.sum()) == feed.epoch == 4
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


class Counted(Tokens):
    """Counts how many samples the workers have made."""

    made = multiprocessing.get_context("fork").Value("i", 0)

    def content(self, index: int) -> torch.Tensor:
        with self.made.get_lock():
            self.made.value += 1
        return super().content(index)


def test_paused_workers_have_no_work_and_nothing_is_fetched_ahead(tokens: Path) -> None:
    """Two workers fetch two batches of four ahead. What comes after a pause is made after it."""
    of_workers = {"prefetch_factor": 2, "multiprocessing_context": "fork"}
    counted = Counted(str(tokens), LENGTH, VOCAB)
    feed = Feed(counted, 4, 0, 1, CPU, workers=2, **of_workers)
    feed.next()
    feed.pause()
    assert Counted.made.value == feed.samples == 4 * (1 + 2 * 2)
    feed.pause()  # nothing to do
    feed.next()
    feed.pause()
    assert Counted.made.value == feed.samples == 2 * 20
    assert len(feed.processes) == 2
    feed.close()


def test_images_are_decoded_and_cropped(tmp_path: Path) -> None:
    args = parse_args(["--samples", "12"])
    make_files(args, tmp_path, lambda phase: None)
    files: Any = find_data(args, tmp_path)
    assert len(files) == 12
    assert {target for _, target in files} == set(range(10))
    for cold in (False, True):
        images = Images(files, 8, cold)
        image, target, ticket = images[11]
        assert image.shape == (3, 8, 8)
        assert image.dtype == torch.float32
        assert target == files[11][1]
        assert ticket.tolist() == [11, os.getpid(), Path(files[11][0]).stat().st_size]


def test_tokens_are_those_of_the_file(tokens: Path) -> None:
    content = torch.frombuffer(bytearray(tokens.read_bytes()), dtype=torch.uint16).long()
    sequences = Tokens(str(tokens), LENGTH, VOCAB)
    assert len(sequences) == 10
    inputs, targets, _ = sequences[9]
    assert torch.equal(inputs, content[9 * 64 : 10 * 64] % 256)
    assert torch.equal(targets, content[9 * 64 + 1 : 10 * 64 + 1] % 256)


def case_of(
    step: list[float], resident: list[float], loader: list[float], workers: int = 2
) -> Case:
    """A case of 2 ranks on one host, 8 samples a step. Seconds of each of 6 rounds."""
    case = Case(key={"workers": workers, "batch_size": 8}, ranks=[0, 1])
    times = {"step": [step] * 2, "resident": [resident] * 2, "loader": [loader] * 2}
    fact = Facts(1.0, 0.5, 2**28, 0.01, 1.0, 0.75, None, 1.0, "same")
    derive(2, case, Times(times, [1] * 6), [fact, fact])
    return case


def test_metrics_and_sentence_by_hand() -> None:
    """16 samples in 0.02 s are 800/s, in 0.0125 s 1,280/s. 2 workers * 0.02 / 0.0125 = 3.2.

    A sample takes a worker 0.01 s of CPU: 8 of them in 0.0125 s are 6.4 cores.
    """
    case = case_of([0.0201] * 6, [0.0125] * 6, [0.02] * 6)
    m = case.metrics
    assert m["exposed_wait_s"].value == pytest.approx(0.0076)
    rates = m["loader_samples_per_s"], m["training_samples_per_s"]
    assert [rate.value for rate in rates] == [800, 1280]
    assert m["workers_needed"].value == pytest.approx(3.2)
    assert m["worker_cores"] == pytest.approx(6.4)
    assert m["cores_needed"] == pytest.approx(2 * (0.75 + 6.4))
    assert case.check == "passed"
    assert sentence_of(case, 2, 8) == (
        "input-bound: the loader brings 800 samples/s (800 to 800), training takes "
        "1,280 samples/s (1,280 to 1,280); it would keep 3.2 (3.2 to 3.2) workers a rank busy, "
        "each with a core; this node has 8 for 2 ranks"
    )


def test_the_other_sentences() -> None:
    slow = [0.1, 0.11, 0.12, 0.1, 0.11, 0.12]
    fed = case_of([0.1002] * 6, [0.1] * 6, [0.02] * 6)
    assert sentence_of(fed, 2, 2) == (
        "not input-bound: a step waits 200 us (200 to 200), and computes 100 ms (100 to 100)"
    )
    unsure = case_of(slow, [0.1, 0.1, 0.1, 0.12, 0.1, 0.1], [0.02] * 6)
    assert "it cannot be told" in sentence_of(unsure, 2, 2)
    short_of_cores = case_of([0.2] * 6, [0.1] * 6, [0.02] * 6)
    sentence = sentence_of(short_of_cores, 2, 2)
    assert sentence.startswith("the workers slow the training down: a step waits 100 ms (100")
    assert sentence.endswith("workers need about 3.1 cores; this node has 2 for 2 ranks")


def test_the_answer_is_of_the_fastest_case_of_each_cache() -> None:
    few = Times({name: [[0.1] * 2] for name in ("step", "resident", "loader")}, [1] * 2)
    fact = Facts(1.0, 0.5, 0, None, 0.2, 1.0, None, 1.0, "same")
    cases = [
        case_of([0.2] * 6, [0.1] * 6, [0.02] * 6),
        case_of([0.1002] * 6, [0.1] * 6, [0.02] * 6),
    ]
    cases.append(Case(key={"workers": 1, "batch_size": 8}, ranks=[0]))
    derive(2, cases[2], few, [fact])
    for case, name, cache in zip(cases, "abc", ("warm", "warm", "cold"), strict=True):
        case.name = name
        case.key["cache"] = cache
    assert answer(2, 2, cases) == [
        "b: not input-bound: a step waits 200 us (200 to 200), and computes 100 ms (100 to 100)",
        "c: it cannot be told whether the loader feeds the training: too few samples",
        "not cold: this file system keeps what it was told to drop",
    ]


def test_a_case_is_a_setting() -> None:
    cases = plan(parse_args(["--workers", "0,4", "--prefetch", "2,8"]), 2)
    settings = [(key["workers"], key["cache"], key["prefetch"]) for _, _, key in cases]
    assert settings[:3] == [(0, "warm", 2), (0, "warm", 8), (0, "cold", 2)]
    assert len(cases) == 8
    assert cases[1][0] == "0 workers, warm, prefetch 8"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--model", "resnet19"), "unknown model 'resnet19' for images; did you mean resnet1"),
        (("--kind", "tokens", "--model", "gpt"), "for tokens; e.g. decoder-nano"),
        (("--decode", "cuda"), "unknown argument '--decode': Pillow decodes in the workers"),
        (("--cache", "hot"), "expected some of warm, cold"),
    ],
)
def test_a_mistake_is_one_line(
    flags: tuple[str, ...],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.argv", ["input_sweep.py"])
    with pytest.raises(SystemExit):
        parse_args(list(flags))
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_data_that_cannot_be_read(tmp_path: Path) -> None:
    """A folder that is not there or is empty, a text for an image, a short file."""
    images, tokens = parse_args([]), parse_args(["--kind", "tokens", "--data", "x"])
    short, folder = tmp_path / "short.bin", tmp_path / "folder"
    short.write_bytes(b"12")
    with pytest.raises(FileNotFoundError):
        find_data(images, folder)
    (folder / "cats").mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match="Found no valid file for the classes cats"):
        find_data(images, folder)
    text = folder / "cats" / "a.jpg"
    text.write_text("text")
    with pytest.raises(ValueError, match=f"^{text} is no image: UnidentifiedImageError$"):
        find_data(images, folder)
    with pytest.raises(ValueError, match="expected 130 bytes of tokens or more, got 2"):
        find_data(tokens, short)
    with pytest.raises(OSError, match="No space left on device"):
        input_sweep.write(Path("/dev/full"), b"1")
