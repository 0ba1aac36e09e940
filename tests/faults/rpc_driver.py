"""rpc_latency whose callee corrupts echoes (CORRUPT=1), or loses calls (LOSE=1)."""

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
spec = importlib.util.spec_from_file_location("rpc_latency", ROOT / "benchmarks" / "rpc_latency.py")
assert spec is not None
assert spec.loader is not None
rpc_latency: Any = importlib.util.module_from_spec(spec)
sys.modules["rpc_latency"] = rpc_latency
spec.loader.exec_module(rpc_latency)

echo, add = rpc_latency.echo, rpc_latency.Tally.add


def corrupted_echo(payload: Any) -> Any:
    wrong = echo(payload).clone()
    wrong[-1] += 1
    return wrong


def losing_add(tally: Any, payload: Any) -> None:
    if tally.calls != 3 or tally.bytes == 0:
        add(tally, payload)
    else:
        tally.bytes = 0


if __name__ == "__main__":
    args = rpc_latency.parse_args()
    if os.environ.get("CORRUPT") and os.environ["RANK"] == "1":
        rpc_latency.echo = corrupted_echo
    if os.environ.get("LOSE") and os.environ["RANK"] == "1":
        rpc_latency.Tally.add = losing_add
    sys.exit(rpc_latency.record(rpc_latency.main)(args))
