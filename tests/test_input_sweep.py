"""input_sweep.py in full runs: with a slow decoder, a dead worker, an early end."""

import contextlib
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from benchmarks.input_sweep import FROM_DEVICE, make_files
from tests.process import Bench, Start

SCRIPT = "benchmarks/input_sweep.py"
TINY = ("--samples", "25", "--image-size", "32", "--cache", "warm", "--warmup-iters", "1")
FORK = ("--start-method", "fork")  # forked workers have the faults that are injected


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder whose path is short enough for the workers' sockets."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.mark.smoke
def test_a_slow_decoder_is_measured_as_waiting(bench: Bench, short: Path) -> None:
    """5 ms for each of 32 images: 160 ms a step in the rank itself, by a clock that counts only
    this delay. A worker's delays are not on the clock of its rank: tests/pure/test_input_sweep.py
    checks that workers do not run ahead in the resident blocks."""
    flags = ("--batch-size", "32", "--iters", "2", "--workers", "0,1", *FORK)
    run = bench(SCRIPT, *TINY, *flags, inject="planted-time,slow-decoder", TMPDIR=str(short))
    planted_s = pytest.approx(32 * 0.005, rel=0.01)
    m = run.report.cases[0].metrics
    assert (m["loader_s"].value, m["step_s"].value) == (planted_s, planted_s)
    assert m["exposed_wait_s"].value == planted_s
    assert m["resident_s"].value < 0.001
    for case in run.report.cases:
        assert case.check == "passed"
        assert set(case.samples_s) == {"step", "resident", "loader"}
    assert list(short.glob("input_sweep-*")) == []


@pytest.mark.smoke
def test_a_path_too_long_for_sockets(bench: Bench, tmp_path: Path) -> None:
    """The workers could not send their batches, and the ranks would wait forever."""
    folder = tmp_path / ("long" * 20)
    folder.mkdir()
    run = bench(SCRIPT, *TINY, "--workers", "1", ranks=0, TMPDIR=str(folder), status=2)
    assert "error: TMPDIR: expected a path of at most 89 characters for the workers' s" in run.err


@pytest.mark.smoke
def test_a_cold_folder_of_the_user(bench: Bench, tmp_path: Path) -> None:
    """With the default start method of workers. 25 images for 2 ranks need padding."""
    folder = tmp_path / "images"
    folder.mkdir()
    make_files(25, folder, lambda phase: None)
    flags = ("--data", str(folder), "--cache", "cold", "--workers", "1", "--iters", "2")
    run = bench(SCRIPT, *TINY, *flags)
    (case,) = run.report.cases
    assert case.check == "passed"
    assert (case.metrics["from_device"] < FROM_DEVICE) == ("# not cold: " in run.out)


OWN = """
import torch
from torch import nn
from tests.communicating_models import Sum

class Rows(torch.utils.data.Dataset):
    def __len__(self): return 25
    def __getitem__(self, index): return {"x": torch.full((16,), float(index)), "y": index % 4}

class Net(nn.Linear):
    def forward(self, x, y):
        assert x.shape == (6, 16) and not (x == 1).all()  # a batch of the dataset
        return nn.functional.cross_entropy(super().forward(x), y)

class Together(Net):
    def forward(self, x, y): return super().forward(Sum.apply(x, None), y)

def rows(): return Rows()
def pairs(): return Rows(), pair
def pair(samples):
    return torch.stack([s["x"] for s in samples]), torch.tensor([s["y"] for s in samples])

def net(device, kind="Net"):
    x, y = torch.full((6, 16), 2.0, device=device), torch.zeros(6, dtype=int, device=device)
    return globals()[kind](16, 4).to(device), {"x": x, "y": y}, lambda loss: loss
"""


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("model", "dataset"), [("net", "rows"), ("net", "pairs"), ("net?kind=Together", "rows")]
)
def test_a_users_model_and_dataset(bench: Bench, here: Path, model: str, dataset: str) -> None:
    """Batches are dicts of arguments or tuples, of 6 samples as in the batch of the function. The
    default start method imports the dataset in the workers."""
    (here / "mine.py").write_text(OWN)
    flags = ("--model", f"mine:{model}", "--dataset", f"mine:{dataset}", "--workers", "0,1")
    run = bench(SCRIPT, *flags, "--iters", "6", "--warmup-iters", "1")
    assert f"\nmine:{model}, batch size 6, mine:{dataset}\n" in run.out
    assert run.checks == {"0 workers": "passed", "1 worker": "passed"}
    for case in run.report.cases:
        assert (case.key["data"], case.key["batch_size"]) == (f"mine:{dataset}", 6)
        rate = 2 * 6 / case.metrics["loader_s"].value
        assert case.metrics["loader_samples_per_s"].value == pytest.approx(rate)
        assert "from_device" not in case.metrics
    told = "# mine:net?kind=Together: its step communicates (allreduce)\n" in run.out
    assert told == ("Together" in model)


@pytest.mark.faults
def test_a_dead_worker_and_a_wrong_epoch_are_failed_cases(bench: Bench) -> None:
    flags = ("--workers", "1,0", "--iters", "4", *FORK)
    run = bench(SCRIPT, *TINY, *flags, inject="worker-dies,same-part", status=1)
    assert len(run.report.cases) == 2, run.out + run.err
    dead, repeated = (case.check for case in run.report.cases)
    assert dead.startswith("failed: RuntimeError: DataLoader worker ")
    assert dead.endswith("(rank 1)")
    assert repeated == "failed: 12 of 25 samples are missing from an epoch"


def left_over(folder: Path) -> list[psutil.Process]:
    """The processes whose TMPDIR is this folder, also those whose parent has ended."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            running = process.status() != psutil.STATUS_ZOMBIE
            if running and process.environ().get("TMPDIR") == str(folder):
                found.append(process)
    return found


@pytest.mark.faults
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=lambda number: number.name)
def test_the_fork_server_and_its_workers_end_with_the_rank(
    start: Start, short: Path, tmp_path: Path, number: signal.Signals
) -> None:
    """After Ctrl-C, which reaches all processes of the terminal, and after a kill of the rank
    alone, no process, folder or semaphore is left."""
    flags = ("--workers", "2", "--iters", "100000", *TINY)
    # torch creates its cache when the first optimizer imports dynamo: not in the folder under test
    folders = {"TMPDIR": str(short), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    process = start(SCRIPT, *flags, ranks=0, cold=True, **folders)
    rank = process.parts[0]
    # the rank, two shells that will remove folders, resource tracker, fork server, two workers
    process.until(lambda: len(left_over(short)) >= 7)
    maps = [row.path.removesuffix(" (deleted)") for row in rank.memory_maps()]
    semaphores = [Path(path) for path in maps if path.startswith("/dev/shm/sem.")]
    assert semaphores
    if number is signal.SIGINT:
        os.killpg(rank.pid, number)
    else:
        rank.kill()
    assert process.wait() != 0
    process.until(lambda: not left_over(short))
    assert [path for path in semaphores if path.exists()] == []
    assert os.listdir(short) == []


@pytest.mark.faults
def test_ranks_wait_for_the_files_longer_than_their_timers(bench: Bench, tmp_path: Path) -> None:
    """Rank 0 writes ten files at 3.5 s each. Rank 1 waits. Its timer of 1.5 * 8 + 20 = 32 s must
    not end it while rank 0 makes progress."""
    flags = ("--samples", "10", "--cache", "warm", "--image-size", "32", "--workers", "0")
    times = ("--iters", "2", "--warmup-iters", "1", "--timeout", "8")
    run = bench(SCRIPT, *flags, *times, inject="slow-files", cold=True, TMPDIR=str(tmp_path))
    assert [case.check for case in run.report.cases] == ["passed"]


@pytest.mark.faults
def test_nothing_is_left_when_all_ranks_are_killed(start: Start, short: Path) -> None:
    """Neither files nor processes. test_checkpoint_sweep.py does the same with Ctrl-C."""
    flags = ("--workers", "1", "--iters", "100000", *TINY, *FORK)
    process = start(SCRIPT, *flags, TMPDIR=str(short))
    # torchrun, two ranks, their workers and the shell that will remove the files
    process.until(lambda: [*short.glob("input_sweep-*/*/24.jpg")] and len(process.tree()) > 6)
    family = process.tree()
    for each in (process.parts[0], *process.ranks().values()):
        each.kill()
    assert process.wait() != 0
    process.until(lambda: not [*short.glob("input_sweep-*")])
    _, alive = psutil.wait_procs(family, timeout=500)
    assert alive == []
