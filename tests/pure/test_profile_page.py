"""docs/profile.md quotes the output and the numbers of docs/results/profile."""

import gzip
import json
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.pure.reports import ROOT, run

PAGE = (ROOT / "docs" / "profile.md").read_text()
FOLDER = ROOT / "docs" / "results" / "profile"
TRACES = [str(FOLDER / f"rank{rank}.json.gz") for rank in (0, 1)]


def events(path: str) -> list[dict[str, Any]]:
    whole = json.loads(gzip.decompress(Path(path).read_bytes()))["traceEvents"]
    return [event for event in whole if event["ph"] == "X"]


def test_the_page_shows_the_output() -> None:
    done = run("trace.py", *TRACES, "--against", str(FOLDER / "collectives.jsonl"))
    assert done.returncode == 0, done.stderr
    first, *_, last = done.stdout.splitlines()
    block = re.search(rf"^    {re.escape(first)}\n.*^    {re.escape(last)}$", PAGE, re.M | re.S)
    assert block
    rest = done.stdout
    for part in textwrap.dedent(block[0]).split("[...]\n"):  # which are in this order
        _, found, rest = rest.partition(part)
        assert found, part
    assert rest == "\n"


def test_the_page_has_the_numbers_of_the_traces() -> None:
    """Computed here from the events, without analysis/."""
    calls = []  # milliseconds per step, by rank
    for path in TRACES:
        found = [event for event in events(path) if event["name"] == "gloo:all_reduce"]
        steps = [event for event in events(path) if event["name"].startswith("ProfilerStep#")]
        assert (len(found), len(steps)) == (12, 3)
        assert {tuple(event["args"]["Input Dims"][0]) for event in found} == {(2**18,)}
        calls.append(sum(event["dur"] for event in found) / 1e3 / 3)
    # rank 0's calls overlap, rank 1's do not
    assert f" {calls[1]:.5g} ms " in re.sub(r"\s+", " ", PAGE)
    alone = []
    for line in (FOLDER / "collectives.jsonl").read_text().splitlines()[1:-1]:
        case = json.loads(line)
        if case["key"]["size_bytes"] == 2**20:
            names = ("out_of_place_time_s", "in_place_time_s")
            alone = [case["metrics"][name]["value"] * 4e3 for name in names]
    assert f" {min(alone):.5g} ms " in re.sub(r"\s+", " ", PAGE)
    assert f" {calls[1] / min(alone):.2f} (" in re.sub(r"\s+", " ", PAGE)


@pytest.mark.parametrize("code", re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL))
def test_code_compiles(code: str) -> None:
    compile(code, "profile.md", "exec")
