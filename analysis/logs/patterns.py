"""The lines of a log, and --step for the logs of known programs."""

import codecs
import io
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

Read = Callable[[int], bytes]  # the next bytes of a file, at most so many

# terminal control sequences: colors, cursor movements, window titles
CODES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\^_])")
# A progress bar is redrawn after a carriage return
NEW_LINE = re.compile(r"\r\n|\r|\n")
CHUNK_BYTES = 2**20
MOST_LINES = 5000  # that are searched for known patterns
MOST_CHARACTERS = 2000  # of such a line
PATTERNS = {  # program -> flags, as in docs/logs.md
    "Megatron-LM": r"--step 'elapsed time per iteration \(ms\): ([\d.]+)'",
    "torchtitan": r"--step '(?<!validate )step: .* tps: ([\d,]+)' --unit 1/s",
    "Lightning": r"--step 'Epoch [1-9]\d*: +100%.* ([\d.]+)it/s'",
    "NeMo": r"--step 'train_step_timing in s[:=] ?([\d.e-]+)'",
    "Hugging Face Trainer": "--step \"'train_steps_per_second': '?([\\d.e-]+)\"",
    "mmengine": r"--step ' time: ([\d.]+)' --unit s",
    "tqdm": r"--step '(?P<rate>[\d.]+)it/s|(?P<s>[\d.]+)s/it'",
}
QUOTED = re.compile(r"--step (['\"])(.*)\1")
# the word before a number with a unit
TIMED = re.compile(
    r"(?<!\w)([A-Za-z_][\w/]*(?:[:=] ?| ))\d+(?:\.\d+)?( ?(?:ms|s/it|it/s|s)(?![\w/]))"
)
TIME_FIELD = re.compile(r"time|sec|tps|per_s|throughput|_ms|\(s\)|/s$")


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


def suggestion(content: bytes) -> str:
    """`; its lines match those of Megatron-LM: --step '...'`: flags that may read the step times of
    a log; an example if none are known."""
    text = text_of(content[: MOST_LINES * MOST_CHARACTERS])
    lines = [line[:MOST_CHARACTERS] for line in NEW_LINE.split(text)[:MOST_LINES]]
    for program, flags in PATTERNS.items():
        quoted = QUOTED.search(flags)
        if quoted and any(re.search(quoted[2], line) for line in lines):
            return f"; its lines match those of {program}: {flags}"
    if fields := dict.fromkeys(time_fields(lines)):
        names = "' or '".join([*fields][:4])
        return f"; its fields are read by --step '{names}'"
    counts = Counter(match.groups() for line in lines for match in TIMED.finditer(line))
    for (before, after), count in counts.most_common(3):
        if count > 2 and all(len(re.findall(re.escape(before), line)) < 2 for line in lines):
            return rf"; step times of a log are read by e.g. --step '{before}([\d.]+){after}'"
    return r"; step times of a log are read by --step, e.g. --step 'took ([\d.]+) ms'"


def time_fields(lines: Sequence[str]) -> Iterator[str]:
    """The fields of JSON lines whose names are those of times or rates."""
    for line in lines[:100]:
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            continue
        for name, value in entry.items() if isinstance(entry, dict) else ():
            if isinstance(value, int | float) and TIME_FIELD.search(name):
                yield name
