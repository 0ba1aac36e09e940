"""batch_update_ps that says when a run starts: the checked one, then the timed one.

The rank FAIL_ON_RANK raises in its 60th gradient.
"""

import itertools
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness import load_script

script: Any = load_script("batch_update_ps")
compute_gradients, run = script.compute_gradients, script.run
calls = itertools.count()


def failing(*args: Any) -> None:
    if next(calls) == 60:
        raise MemoryError("no room for the gradients")
    compute_gradients(*args)


def announced(config: Any, *args: Any) -> Any:
    if os.environ["RANK"] == "0":
        print("# a run starts", flush=True)
    return run(config, *args)


if __name__ == "__main__":
    script.run = announced
    if os.environ.get("FAIL_ON_RANK") == os.environ["RANK"]:
        script.compute_gradients = failing
    sys.exit(script.record(script.main)(script.parse_args()))
