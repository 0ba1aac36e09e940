"""The lines of a log, and --step for the logs of known programs."""

import codecs
import io
import re
from collections.abc import Callable, Iterator

Read = Callable[[int], bytes]  # the next bytes of a file, at most so many

# terminal control sequences: colors, cursor movements, window titles
CODES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\^_])")
# A progress bar is redrawn after a carriage return
NEW_LINE = re.compile(r"\r\n|\r|\n")
CHUNK_BYTES = 2**20
PATTERNS = {  # program -> flags, as in docs/logs.md
    "Megatron-LM": r"--step 'elapsed time per iteration \(ms\): ([\d.]+)'",
    "torchtitan": r"--step '(?<!validate )step: .* tps: ([\d,]+)' --unit 1/s",
    "Lightning": r"--step 'Epoch [1-9]\d*: +100%.* ([\d.]+)it/s'",
    "NeMo": r"--step 'train_step_timing in s[:=] ?([\d.e-]+)'",
    "Hugging Face Trainer": "--step \"'train_steps_per_second': '?([\\d.e-]+)\"",
    "mmengine": r"--step ' time: ([\d.]+)' --unit s",
    "tqdm": r"--step '(?P<rate>[\d.]+)it/s|(?P<s>[\d.]+)s/it'",
}


def code_of(content: bytes) -> str:
    """The encoding of a text that begins with these bytes."""
    return "utf-16" if content[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"


def text_of(content: bytes) -> str:
    """The text of a log without control sequences."""
    return CODES.sub("", content.decode(code_of(content), errors="replace"))


def lines_in(read: Read, most: int) -> Iterator[str]:
    """The lines of a log without control sequences. Only a part of the log is in memory: of a line
    with more than `most` characters, the beginning is the last line."""
    first = read(CHUNK_BYTES)
    decode = codecs.getincrementaldecoder(code_of(first))(errors="replace")
    newlines = io.IncrementalNewlineDecoder(decode, translate=True)
    rest = newlines.decode(first)
    while len(rest) <= most or "\n" in rest:
        *lines, rest = rest.split("\n")
        yield from (CODES.sub("", line) for line in lines)
        if len(rest) > most:
            break
        if not (chunk := read(CHUNK_BYTES)):
            rest += newlines.decode(b"", final=True)
            yield from (CODES.sub("", line) for line in rest.split("\n"))
            return
        rest += newlines.decode(chunk)
    yield rest
