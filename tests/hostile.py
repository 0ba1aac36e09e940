"""Reports whose every string tries to be something else than text."""

import copy
import json
import random
from pathlib import Path
from typing import Any

from harness import ROOT

RESULTS = sorted((ROOT / "docs" / "results").glob("*.json"))

PAYLOADS = (
    "<script>document.title='owned'</script>",
    "\"'><img src=x onerror=\"document.title='owned'\">",
    "</svg></table></title><script>document.title='owned'</script>",
    "<style>*{display:none}</style><!-- ",
    "]]><svg onload=document.title='owned'>",
    "javascript:document.title='owned'",
    "{{ 7 * 191 }}{% raw %}",
    "$\\frac{owned}{$ &lt;b&gt; &#60;i>",
    "a | b ` c | [d](javascript:alert(1)) **e** https://example.org www.example.org",
    "\x00\x1b[31m\r\n\u2028\ud800\u202edlrow",
    "\ufffe\uffff\U0001ffff",
    "Ω " * 400,
)
KEPT = {"schema", "status", "benchmark", "check", "mode", "by"}
# What may stand where something else was expected.
ODD = (
    *(None, True, False, 0, -1, 1e308, -1e308, 1e-308, 10**400, "", "1.5", "<b>", [], {}),
    *([1, 2], [2.0, 1.0], ["a"], [None, None], {"a": {"b": [1]}}, [[0, 1, 1, 1, 1, 1]]),
    *([[0, 0, 1, 1, 1, 1]], [[0, 10**9, 1, 1, 1, 1]], [[0, 1, -1, 0, 1, "x"]], 1e29, 1e-29),
)


def write(path: Path, document: dict[str, Any]) -> Path:
    path.write_text(json.dumps(document))
    return path


def report(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(path.read_text())
    return document


def poisoned(document: dict[str, Any], payload: str, keys: bool = False) -> dict[str, Any]:
    """The report with the payload behind every string; with `keys` in the names too."""

    def walk(value: Any, name: str) -> Any:
        if isinstance(value, dict):
            return {
                (key + payload if keys and key not in document else key): walk(v, key)
                for key, v in value.items()
            }
        if isinstance(value, list) and name not in ("samples_s", "ranks"):
            return [walk(v, name) for v in value]
        if isinstance(value, str) and name not in KEPT:
            return value + payload
        return value

    found: dict[str, Any] = copy.deepcopy(document)
    for name in document.keys() - {"cases", "schema", "status", "benchmark"}:
        found[name] = walk(document[name], name)
    for case in found["cases"]:
        for part in ("key", "metrics", "label"):
            case[part] = walk(case[part], part)
        case["check"] = f"failed: {payload}" if case is found["cases"][-1] else case["check"]
    if keys:
        found["benchmark"] += payload
    return found


def mutated(document: dict[str, Any], seed: int) -> dict[str, Any]:
    """The report with odd values in one place of eight of what the schema leaves open."""
    draw = random.Random(seed)
    found = copy.deepcopy(document)

    def walk(value: Any) -> Any:
        if draw.random() < 1 / 8:
            return draw.choice(ODD)
        if isinstance(value, dict):
            return {name: walk(v) for name, v in value.items()}
        return [walk(v) for v in value] if isinstance(value, list) else value

    for case in found["cases"]:
        case["key"] = {name: walk(v) for name, v in case["key"].items()}
        case["metrics"] = {name: walk(v) for name, v in case["metrics"].items()}
        for name in ("label", "other_samples_s", "rounds"):
            case[name] = walk(case.get(name))
        case["stop"] = {name: walk(v) for name, v in case["stop"].items()}
    found["environment"] = {name: walk(v) for name, v in found["environment"].items()}
    for name in ("finished_at", "reason", "run_id"):
        found[name] = walk(found.get(name))
    return found
