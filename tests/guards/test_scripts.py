"""What holds for every script: --help, flags, and the commands that the README shows."""

import contextlib
import re
import shlex
import sys
from pathlib import Path

import pytest
from harness import READERS, ROOT, SCRIPTS, load_script, run
from torch.distributed.run import get_args_parser


def help_text(script: Path) -> str:
    done = run([sys.executable, str(script), "--help"], cwd=Path("/"))
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_help_needs_no_torchrun_and_no_torch(script: Path) -> None:
    done = run([sys.executable, "-X", "importtime", str(script), "--help"], cwd=Path("/"))
    assert done.returncode == 0, done.stderr
    assert "usage: " in done.stdout
    imported = {line.split("|")[-1].strip() for line in done.stderr.splitlines()}
    assert not imported & {"torch", "torchvision", "numpy"}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_no_flag_is_ambiguous_to_torchrun(script: Path) -> None:
    """Before Python 3.12 torchrun's parser rejects a prefix of several of its own options."""
    theirs = [flag for action in get_args_parser()._actions for flag in action.option_strings]
    ours = set(re.findall(r"--[a-z][a-z-]*", help_text(script)))
    assert script.stem in READERS or {"--json", "--resume", "--timeout"} <= ours
    for flag in ours:
        for spelling in {flag, flag.replace("-", "_").replace("__", "--", 1)}:
            matches = [option for option in theirs if option.startswith(spelling)]
            assert spelling in theirs or len(matches) < 2, f"{spelling}: {matches}"


def test_the_guard_above_can_fail() -> None:
    theirs = [flag for action in get_args_parser()._actions for flag in action.option_strings]
    assert len([option for option in theirs if option.startswith("--node")]) > 1


def commands(text: str) -> list[list[str]]:
    """The words of every command in a Markdown text or docstring that runs one of the scripts."""
    joined = re.sub(r"\\\n\s*", " ", text)
    found = []
    for line in joined.splitlines():
        stripped = line.strip()
        if re.search(r"(^|\s)(torchrun|python|srun)\s.*benchmarks/\w+\.py", stripped):
            words = shlex.split(stripped.split("&&")[-1])
            if any(word.startswith("benchmarks/") for word in words):
                found.append(words)
    return found


def documented() -> list[tuple[str, list[str]]]:
    sources = {"README.md": (ROOT / "README.md").read_text()}
    sources |= {f"docs/{path.name}": path.read_text() for path in (ROOT / "docs").glob("*.md")}
    for script in SCRIPTS:
        sources[script.name] = script.read_text().split('"""')[1].replace("\\\\", "\\")
    return [(name, words) for name, text in sources.items() for words in commands(text)]


def test_there_are_documented_commands() -> None:
    names = {name for name, _ in documented()}
    assert {"README.md", "docs/numbers.md", *(script.name for script in SCRIPTS)} <= names


@pytest.mark.parametrize(("source", "words"), documented(), ids=lambda value: str(value)[:60])
def test_documented_commands_parse(source: str, words: list[str]) -> None:
    at = next(i for i, word in enumerate(words) if word.startswith("benchmarks/"))
    script = ROOT / words[at]
    assert script.is_file()
    if words[0] == "torchrun":
        get_args_parser().parse_args(words[1:])
    with contextlib.suppress(SystemExit):  # a refusal
        load_script(script.stem).parse_args(words[at + 1 :])
        return
    pytest.fail(f"{source}: {words[at + 1 :]} does not parse")


def test_readme_has_the_two_commands() -> None:
    readme = (ROOT / "README.md").read_text()
    start = "python3 -m venv .venv && . .venv/bin/activate && pip install -r "
    assert f"{start}requirements.txt && torchrun --nproc-per-node 2 benchmarks/ddp_sweep.py" in (
        readme
    )
    assert f"{start}tests/requirements.txt && python -m pytest" in readme


def test_readme_names_no_missing_file() -> None:
    readme = (ROOT / "README.md").read_text()
    own = readme.partition("BSD-3-Clause")[0]  # the lineage names PyTorch's files
    for name in re.findall(r"\b(?:benchmarks|common|tests|docs)/[\w./-]*\w", own):
        assert (ROOT / name).exists(), name
