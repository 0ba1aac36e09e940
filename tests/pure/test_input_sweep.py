"""input_sweep.py without torchrun: which samples come, resting workers, sentences, refusals."""

import multiprocessing
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import input_sweep
from benchmarks.input_sweep import (
    Facts,
    Feed,
    Images,
    Tokens,
    call_or_refuse,
    check_room,
    checksum_of,
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

KEY: dict[str, Any] = {
    **{"kind": "tokens", "model": "decoder-nano", "batch_size": 4, "image_size": 8, "seed": 0},
    **{"workers": 0, "cache": "warm", "prefetch": 2, "pin_memory": "off", "decode": "cpu"},
    **{"persistent_workers": "on", "start_method": "fork"},
}


def job_of(rank: int, world_size: int) -> Any:
    return SimpleNamespace(rank=rank, world_size=world_size, device=torch.device("cpu"))


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    args = parse_args(["--kind", "tokens", "--samples", "10", "--model", "decoder-nano"])
    make_files(args, tmp_path, lambda phase: None)
    return tmp_path / "tokens.bin"


def test_every_sample_comes_once_in_an_epoch(tokens: Path) -> None:
    """10 samples on 3 ranks are 4 for each rank: 2 are padding. A batch is larger than that."""
    seen = torch.zeros(10, dtype=torch.int32)
    for rank in range(3):
        feed = Feed(Tokens(str(tokens), KEY), KEY | {"batch_size": 3}, job_of(rank, 3))
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
    feed = Feed(Counted(str(tokens), KEY), KEY | {"workers": 2}, job_of(0, 1))
    feed.next()
    feed.pause()
    assert Counted.made.value == feed.samples == 4 * (1 + 2 * 2)
    feed.pause()  # nothing to do
    feed.next()
    feed.pause()
    assert Counted.made.value == feed.samples == 2 * 20
    assert len(feed.processes) == 2
    assert len(feed.checksums) == 2  # of each worker's first sample
    assert feed.wrong_checksum() is None
    index = next(iter(feed.checksums))
    feed.checksums[index] += 1
    wrong = f"a worker decodes sample {index} into other values than this rank"
    assert feed.wrong_checksum() == wrong
    feed.close()


def test_images_are_decoded_and_cropped(tmp_path: Path) -> None:
    args = parse_args(["--samples", "12", "--file-size", "20", "--seed", "3"])
    make_files(args, tmp_path, lambda phase: None)
    files: Any = find_data(args, tmp_path)
    assert len(files) == 12
    assert {target for _, target in files} == set(range(10))
    for cache in ("warm", "cold"):
        images = Images(files, KEY | {"cache": cache})
        image, target, ticket = images[11]
        assert image.shape == (3, 8, 8)
        assert image.dtype == torch.float32
        assert target == files[11][1]
        index, _, checksum, size = ticket.tolist()
        assert index == 11
        assert checksum == checksum_of(images.content(11))
        assert size == Path(files[11][0]).stat().st_size
        assert images[0][2][2] == input_sweep.NOT_CHECKED  # only the first one is checked


def test_tokens_are_those_of_the_file(tokens: Path) -> None:
    content = torch.frombuffer(bytearray(tokens.read_bytes()), dtype=torch.uint16).long()
    sequences = Tokens(str(tokens), KEY)
    assert len(sequences) == 10
    inputs, targets, _ = sequences[9]
    assert torch.equal(inputs, content[9 * 64 : 10 * 64] % 256)
    assert torch.equal(targets, content[9 * 64 + 1 : 10 * 64 + 1] % 256)


def case_of(
    step: list[float], resident: list[float], loader: list[float], workers: int = 2
) -> Case:
    """A case of 2 ranks on one host, 8 samples a step. Seconds of each of 6 rounds."""
    case = Case({"workers": workers, "batch_size": 8}, [0, 1])
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
    assert m["exposed_wait_s"] == pytest.approx(0.0076)
    assert (m["loader_samples_per_s"], m["training_samples_per_s"]) == (800, 1280)
    assert m["workers_needed"] == 4
    assert m["worker_cores"] == pytest.approx(6.4)
    assert m["cores_needed"] == pytest.approx(2 * (0.75 + 6.4))
    assert case.check == "passed"
    assert sentence_of(case, 2, 8) == (
        "input-bound: the loader brings 800 samples/s (800 to 800), training takes "
        "1,280 samples/s (1,280 to 1,280); 4 workers a rank would do (8 cores; there are 8)"
    )


def test_the_other_sentences() -> None:
    slow = [0.1, 0.11, 0.12, 0.1, 0.11, 0.12]
    fed = case_of([0.1001] * 6, [0.1] * 6, [0.02] * 6)
    assert sentence_of(fed, 2, 2) == (
        "not input-bound: a step waits 0.1 ms (0.1 to 0.1), and computes 100.0 ms"
    )
    unsure = case_of(slow, [0.1, 0.1, 0.1, 0.12, 0.1, 0.1], [0.02] * 6)
    assert "it cannot be told" in sentence_of(unsure, 2, 2)
    short_of_cores = case_of([0.2] * 6, [0.1] * 6, [0.02] * 6)
    sentence = sentence_of(short_of_cores, 2, 2)
    assert sentence.startswith("the workers slow the training down: a step waits 100.0 ms")
    assert sentence.endswith("ranks and workers need 3.1 cores; there are 2")


def test_a_case_is_a_setting() -> None:
    keys = plan(parse_args(["--workers", "0,4", "--prefetch", "2,8"]))
    settings = [(key["workers"], key["cache"], key["prefetch"]) for key in keys]
    assert settings[:3] == [(0, "warm", 2), (0, "warm", 8), (0, "cold", 2)]
    assert len(keys) == 8


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--model", "resnet19"), "unknown model 'resnet19' for images; did you mean resnet1"),
        (("--kind", "tokens", "--model", "gpt"), "for tokens; e.g. decoder-nano"),
        (("--decode", "cuda", "--device", "cpu"), "need a GPU"),
        (("--cache", "hot"), "expected some of warm, cold"),
    ],
)
def test_a_mistake_is_one_line(
    flags: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse_args(list(flags))
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


class Refused(Exception):
    """In place of the end of the run."""


def test_data_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that is not there or is empty, a short file, a full disk: the first line is told."""
    monkeypatch.setattr(input_sweep, "gather", lambda value: [None, value])
    monkeypatch.setattr(input_sweep, "share", lambda value: value)
    images, tokens = parse_args([]), parse_args(["--kind", "tokens", "--data", "x"])
    short, empty = tmp_path / "short.bin", tmp_path / "folder"
    short.write_bytes(b"12")
    empty.mkdir()

    def refuse(problem: str) -> None:
        raise Refused(problem)

    def refusal(what: str, function: Any, *arguments: Any) -> str:
        with pytest.raises(Refused) as refused:
            call_or_refuse(bench, what, partial(function, *arguments))
        return str(refused.value)

    bench: Any = SimpleNamespace(refuse=refuse)
    missing = refusal("--data", find_data, images, tmp_path / "none")
    assert missing == "--data: No such file or directory"
    assert "Couldn't find any class folder" in refusal("--data", find_data, images, empty)
    (empty / "cats").mkdir()
    (empty / "cats" / "a.jpg").write_text("text")
    no_image = refusal("--data", find_data, images, empty)
    assert no_image == f"--data: {empty}/cats/a.jpg is no image: UnidentifiedImageError"
    too_short = refusal("--data", find_data, tokens, short)
    assert too_short == "--data: expected 130 bytes of tokens or more, got 2"
    full = refusal("TMPDIR", input_sweep.write, Path("/dev/full"), b"1")
    assert full == "TMPDIR: No space left on device"


def test_too_many_workers_for_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """2 ranks * 4 workers * (64 MiB + 2 batches of 8 images of 3 * 64 * 64 * 4 bytes)."""
    job: Any = SimpleNamespace(local_world_size=2)
    args = parse_args(["--workers", "1,4", "--device", "cpu"])
    check_room(args, job)
    monkeypatch.setattr(input_sweep, "free_on_host", lambda: 2**29)
    message = "expected 543,162,368 bytes of host memory, 536,870,912 are free; lower --workers"
    with pytest.raises(ValueError, match=message):
        check_room(args, job)
