"""Everything that the five source programs print, their replacements print in 160 columns.

docs/sources.md lists it. Each test runs a script and looks for every quantity of its source.
"""

import re
from collections.abc import Callable

import pytest

from benchmarks import compile_sweep
from tests import quotients
from tests.process import Start

pytestmark = pytest.mark.smoke
CPU = ("--device", "cpu", "--warmup-iters", "1")
# versions, the backend, and the topology of the node
PREAMBLE = r"^# PyTorch \d.* backend gloo\n# \d ranks on 1 node\n(#.*\n)+# .* \d+ NUMA nodes?$"
PERCENTILES = ("p50", "p75", "p90", "p95")


@pytest.fixture
def shown(start: Start) -> Callable[..., str]:
    """shown("x", *flags, ranks=2, columns=160): the output of benchmarks/x.py on a terminal."""

    def run(script: str, *flags: str, ranks: int, columns: int = 160) -> str:
        process = start(f"benchmarks/{script}.py", *CPU, *flags, ranks=ranks, columns=columns)
        assert process.wait() == 0, process.err
        lines = process.out.splitlines()
        tables = [line for line in lines if not line.startswith("#")]  # a path may be longer
        assert max(map(len, tables)) <= columns
        return process.out

    return run


def table(text: str, *headers: str) -> list[dict[str, str]]:
    """The rows of all tables whose header has these words, as {column: cell}.

    The name of a column is its whole header in one line, e.g. `p50 sec/iter`. An empty cell is "".
    """
    every = [row.cells for rows in quotients.tables(text) for row in rows]
    rows = [cells for cells in every if set(headers) <= cells.keys()]
    assert rows, f"no table has {headers}:\n{text}"
    return rows


def numbers(row: dict[str, str], *names: str) -> list[float]:
    return [float(row[name]) for name in names]


def test_ddp_rpc(shown: Callable[..., str]) -> None:
    """Versions and topology; percentiles and rates of each trainer and of all."""
    out = shown("ddp_rpc", "--epochs", "3", "--autograd", "manual", ranks=5)
    assert re.search(PREAMBLE, out, re.MULTILINE)
    seconds, rates = ([f"{p} {unit}" for p in PERCENTILES] for unit in ("sec/epoch", "samples/s"))
    rows = table(out, *seconds, *rates)
    assert [row[""] for row in rows] == ["All", "Trainer0", "Trainer1"]
    for row in rows:
        assert numbers(row, *seconds) == sorted(numbers(row, *seconds))
        assert min(numbers(row, *seconds, *rates)) > 0


def test_ddp_sweep(shown: Callable[..., str]) -> None:
    """Backend and bucket size; percentiles and rates, on a terminal with --wide only."""
    small = ["--model", "mobilenet_v3_small", "--image-size", "32", "--batch-size", "2"]
    small += ["--bucket-size", "3", "--iters", "2"]
    narrow = shown("ddp_sweep", *small, "--no-breakdown", "--world-sizes", "1", ranks=2, columns=80)
    assert "\n# not shown: percentiles and rates; --wide prints them\n" in narrow
    assert "p50" not in narrow
    out = shown("ddp_sweep", *small, "--wide", ranks=2, columns=300)
    assert re.search(PREAMBLE, out, re.MULTILINE)
    assert "buckets of 3 MiB" in out
    seconds, rates = ([f"{p} {unit}" for p in PERCENTILES] for unit in ("sec/iter", "ex/sec/dev"))
    rows = table(out, *seconds, *rates)
    assert [row[""][:2] for row in rows] == ["no", "1M", "1M"]
    for row in rows:
        assert numbers(row, *seconds) == sorted(numbers(row, *seconds))
        assert min(numbers(row, *seconds, *rates)) > 0


def test_parameter_server(shown: Callable[..., str]) -> None:
    """The arguments; five statistics of each phase, for each trainer, each server and all."""
    sizes = "--num-embeddings 32 --embedding-dim 16 --dense-layers 3 --dense-size 16"
    flags = f"{sizes} --sample-count 20 --batch-size 4 --bucket-size 0.001 --iters 2 --routes rpc"
    out = shown("parameter_server", *flags.split(), "--nserver", "2", ranks=5)
    assert "sample-count 20" in out.split("# command: ")[1]
    statistics = ["mean ms", "stdev ms", "variance ms^2", "min ms", "max ms"]
    workers = {role: {f"{role[:-1]}0", f"{role[:-1]}1", "all"} for role in ("trainers", "servers")}
    phases = {"trainers": {"forward", "backward", "batch", "hook sparse", "hook dense"}}
    phases["servers"] = {"straggler", "batch", "averaging"}
    for role in workers:
        rows = table(out, role, *statistics)
        found = {(row["phase"], row[""]) for row in rows}
        assert found == {(phase, worker) for phase in phases[role] for worker in workers[role]}
        for row in rows:
            mean, _, _, least, most = numbers(row, *statistics)
            assert 0 <= least <= mean <= most


def test_batch_update_ps(shown: Callable[..., str]) -> None:
    """Which gradients have arrived, of how many; each update; the time of the run."""
    flags = ("--payload", "module", "--iters", "4", "--log-updates")
    out = shown("batch_update_ps", *flags, ranks=3)
    for count in (1, 2):
        line = rf"^ +\d+\.\d{{6}}  gradients of trainer[01], {count} of 2$"
        assert re.search(line, out, re.MULTILINE)
    assert re.search(r"^ +\d+\.\d{6}  update 1: model updated$", out, re.MULTILINE)
    assert re.search(r"^# elapsed \d", out, re.MULTILINE)


def test_compile_sweep(shown: Callable[..., str]) -> None:
    """The mean of forward and backward is the first number, also in a narrow terminal."""
    flags = ("--strategies", "ddp", "--backends", "eager", "--iters", "2")
    wide = shown("compile_sweep", *flags, ranks=2)
    (row,) = table(wide, "fwd+bwd mean (s)")
    assert list(row)[1] == "fwd+bwd mean (s)"
    assert numbers(row, "fwd+bwd mean (s)")[0] > 0
    narrow = shown("compile_sweep", *flags, ranks=2, columns=50)
    (row,) = table(narrow, "fwd+bwd mean (s)")
    left_out = re.search(r"^# not shown: (\d+) columns; --wide prints all$", narrow, re.MULTILINE)
    assert left_out
    assert int(left_out[1]) + len(row) == len(compile_sweep.COLUMNS)
