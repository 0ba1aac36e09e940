"""What a job costs rank 0 grows no faster than its ranks: 256 against 1,024, simulated."""

import json
import sys
from pathlib import Path

from harness import run

RATIO = 4  # 1,024 to 256
SLACK = 1.15  # more digits in ranks and hosts
FIXED = 64 * 1024  # bytes that do not depend on the ranks, such as a table's borders


def test_nothing_grows_faster_than_the_ranks(tmp_path: Path) -> None:
    """Bytes, memory and calls; never seconds. In a process of its own, for its fake backend."""
    script = str(Path(__file__).with_name("simulate_ranks.py"))
    path = tmp_path / "figures.json"
    done = run([sys.executable, script, "256", "1024", "--json", str(path)], timeout=280)
    assert done.returncode == 0, done.stderr
    rows = json.loads(path.read_text())
    small = {row["step"]: row for row in rows if row["ranks"] == 256}
    large = {row["step"]: row for row in rows if row["ranks"] == 1024}
    assert small.keys() == large.keys()
    assert len(large) == 16
    for step, row in large.items():
        for what in ("bytes", "memory_bytes", "calls"):
            before, after = small[step][what], row[what]
            if before is not None:
                fixed = FIXED if what == "memory_bytes" else 0
                assert after <= RATIO * SLACK * before + fixed, (step, what, before, after)
    # and it is little: a report's line a rank, a few calls a rank
    assert large["preflight: all ranks meet"]["calls"] < 5 * 1024
    assert large["hang: roll call of all ranks"]["calls"] < 10 * 1024
    assert large["environment: in the report"]["bytes"] < 300 * 1024
    assert large["ddp_sweep: a case into the report"]["bytes"] < 1200 * 1024
    for size in ("256", "1,024"):  # as docs/numbers.md shows it
        assert size in done.stdout
