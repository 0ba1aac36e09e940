"""Run a script with smaller sizes than on CUDA: smaller.py SCRIPT FLAGS...

Some sizes are not flags, and would take minutes on a CPU. tests/test_cudalab.py starts such scripts
through this file. Line numbers do not change.
"""

import sys
from pathlib import Path

# of examples: at least 6 rounds or saves are needed for an interval
FEWER = {
    "ROUNDS = 15": "ROUNDS = 6",
    "ROUNDS, STEPS = 16, ": "ROUNDS, STEPS = 6, ",
    "ROUNDS, BATCH = 16": "ROUNDS, BATCH = 6",
    "SAVES, IDLE = 8, 5": "SAVES, IDLE = 7, 1",
}
WIDTH = {"else 8192": "else 64"}
SIZES: dict[str, dict[str, str]] = {  # text of a script -> replacement
    "node_check.py": {
        "n = 8192 if": "n = 128 if",
        "size = 2**29 if": "size = 2**20 if",
        "size = 1, 2**28": "size = 1, 2**20",
    },
    "allreduce_busbw.py": {", 2**20, 2**24]": "]", ", 2**28]": "]"},
    **dict.fromkeys(("compiled_ddp.py", "dcp_stall.py", "ddp_exposed.py"), WIDTH),
    **dict.fromkeys(("fsdp_exposed.py", "pp_bubble.py"), WIDTH),
    "tp_exposed.py": {"else 6144": "else 64"},
    "who_is_slow.py": {"(8192, 1024)": "(64, 8)"},
}


def with_fewer_rounds(source: str) -> str:
    for many, few in FEWER.items():
        source = source.replace(many, few)
    return source


if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    path = Path(sys.argv[0]).resolve()
    sys.path[0], __file__ = str(path.parent), str(path)
    source = with_fewer_rounds(path.read_text())
    for text, smaller in SIZES[path.name].items():
        if source.count(text) != 1:
            sys.exit(f"smaller.py: expected {text!r} once in {path.name}")
        source = source.replace(text, smaller)
    exec(compile(source, path, "exec"), globals())
