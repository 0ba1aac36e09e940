"""common/trace.py on two real ranks."""

import json
from pathlib import Path

import pytest
from harness import ROOT, run, torchrun


def test_communication_is_found_under_ddp_and_fsdp2(tmp_path: Path) -> None:
    folder = tmp_path / "with a space"
    folder.mkdir()
    name = f"{folder}/t-{{case}}-{{rank}}.json"
    done = run(torchrun(2, str(ROOT / "tests" / "smoke" / "trace_driver.py"), name))
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(rows) == 4
    for row in rows:
        assert row["communication_s"] > 0, row
        assert row["compute_s"] > 0, row
        assert row["overlapped_s"] <= min(row["compute_s"], row["communication_s"])
        parts = row["compute_s"] + row["communication_s"] - row["overlapped_s"] + row["idle_s"]
        assert parts == pytest.approx(row["step_s"])
        assert all(row["ranges_s"][part] > 0 for part in ("Forward", "Backward", "Optimizer"))
        assert sum(row["ranges_s"].values()) < row["step_s"]
    assert len(list(folder.iterdir())) == 4
    for path in folder.iterdir():
        events = [event.get("name") for event in json.loads(path.read_text())["traceEvents"]]
        for part in ("Forward", "Backward", "Optimizer"):
            assert events.count(part) == 3, (path.name, part)
        want = "gloo:all_reduce" if "ddp" in path.name else "gloo:all_gather"
        assert want in events, path.name
