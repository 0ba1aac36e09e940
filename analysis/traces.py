"""The traces of a job: files and folders, and whose each one is."""

import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from tqdm import tqdm

from analysis import kineto
from analysis.kineto import Trace
from analysis.show import clean
from common import cli

EXPECTED = "expected a trace of torch.profiler, e.g. by export_chrome_trace('rank0.json.gz')"


def files_in(words: Sequence[str]) -> dict[str, bool]:
    """The files, and whether each is from a folder. Raises ValueError if a folder has none."""
    files: dict[str, bool] = {}
    for word in words:
        if not Path(word).is_dir():
            files[word] = False
            continue
        inside = sorted(Path(word).iterdir())
        found = [str(path) for path in inside if path.name.endswith((".json", ".json.gz"))]
        if not found:
            folders = [path.name for path in inside if path.is_dir()]
            hint = f"; its folders are {cli.cut(folders, 4)}" if folders else ""
            raise ValueError(f"{word}: expected a folder with .json or .json.gz{hint}")
        files |= dict.fromkeys(found, True)
    return files


def read_all(files: Mapping[str, bool]) -> tuple[list[Trace], list[str]]:
    """The traces, and lines about files that were left out. Raises ValueError with one line."""
    traces, lines = [], []
    with tqdm(
        total=sum(size_of(path) for path in files),
        unit="B",
        unit_scale=True,
        leave=False,
        disable=None,  # unless stderr is a terminal
    ) as bar:
        before = 0
        for path, in_folder in files.items():
            size = size_of(path)
            bar.set_description(clean(Path(path).name, 40))

            def tick(share: float, before: int = before, size: int = size) -> None:
                bar.update(before + share * size - bar.n)

            try:
                traces.append(kineto.read(path, tick))
            except kineto.NoTrace as error:
                if not in_folder:
                    raise ValueError(f"{path}: {EXPECTED}, got {error}") from None
                lines.append(f"left out {path}: {error}")
            except (OSError, EOFError, zlib.error, RecursionError, ValueError) as error:
                raise ValueError(f"{path}: {EXPECTED}, got {error}") from None
            except (AttributeError, LookupError, TypeError, ArithmeticError) as error:
                what = f"other events: {cli.describe(error)}"
                raise ValueError(f"{path}: {EXPECTED}, got {what}") from None
            before += size
    return traces, lines


def size_of(path: str) -> int:
    """Bytes, for the progress bar."""
    return Path(path).stat().st_size if Path(path).is_file() else 0


def by_rank(traces: Sequence[Trace]) -> tuple[dict[int, Trace], list[str]]:
    """The traces by rank, and lines about those that were left out. Raises ValueError with one
    line.

    Files without a rank count by their position, unless others have one. A file without a rank and
    without kernels beside those of GPUs is another process's: that of a server, for instance.
    """
    lines = []
    used = list(traces)
    if any(trace.on_gpu and trace.rank is not None for trace in traces):
        for trace in traces:
            if trace.rank is None and not trace.on_gpu:
                used.remove(trace)
                lines.append(f"left out {trace.path}: it has neither a rank nor kernels")
    unknown = [trace for trace in used if trace.rank is None]
    if unknown and len(unknown) < len(used):
        what = "expected a rank in the trace or in the file's name, as in the other files"
        raise ValueError(f"{unknown[0].path}: {what}, got none; e.g. rank0.json.gz")
    found: dict[int, Trace] = {}
    for number, trace in enumerate(used):
        rank = number if trace.rank is None else trace.rank
        if rank in found:
            other = f"that is the rank of {found[rank].path}"
            what = f"expected a trace of each rank, got another one of {rank}; {other}"
            raise ValueError(f"{trace.path}: {what}")
        found[rank] = trace._replace(rank=rank)
    return dict(sorted(found.items())), lines
