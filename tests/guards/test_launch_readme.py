"""launch/README.md: its commands parse, the files that it names exist, its messages are said."""

import contextlib
import io
import re
import shlex
import shutil
from pathlib import Path

import pytest
from harness import ROOT, load_script, run
from torch.distributed.run import get_args_parser

README = (ROOT / "launch" / "README.md").read_text()
WRAPPER = "launch/ssh_torchrun.sh"


def commands(text: str) -> list[list[str]]:
    """The words of every command: what is indented by four, and what stands in backticks."""
    lines = re.findall(r"^    (\S.*)$", text, re.MULTILINE) + re.findall(r"`([^`\n]+)`", text)
    starts = r"(NCCL_DEBUG=INFO )?(torchrun|sbatch|launch/ssh_torchrun\.sh|kubectl|docker build) "
    return [shlex.split(line) for line in lines if re.match(starts, line)]


COMMANDS = [words for words in commands(README) if "..." not in words]


def test_there_are_commands() -> None:
    starts = {words[0] for words in COMMANDS}
    assert {"torchrun", "sbatch", WRAPPER, "kubectl", "docker", "NCCL_DEBUG=INFO"} <= starts


def check(words: list[str], folder: Path) -> None:
    """Raises AssertionError where a command would be refused. Starts nothing."""
    if words[0] == "docker":
        assert (ROOT / words[words.index("-f") + 1]).is_file(), words
        return
    if words[0] == "kubectl":
        if "-k" in words:
            assert (ROOT / words[words.index("-k") + 1] / "kustomization.yaml").is_file(), words
        return
    at = next(i for i, word in enumerate(words) if word.startswith("benchmarks/"))
    assert (ROOT / words[at]).is_file(), words
    try:
        load_script(Path(words[at]).stem).parse_args(words[at + 1 :])
    except SystemExit:
        raise AssertionError(f"the script refuses {words}") from None
    if "torchrun" in words:
        get_args_parser().parse_args(words[words.index("torchrun") + 1 :])
    elif words[0] == "sbatch":
        wrapper = next(i for i, word in enumerate(words) if word.startswith("launch/"))
        usage = run(["bash", str(ROOT / words[wrapper]), "--help"])
        assert usage.returncode == 0, usage.stderr
        flags = [word for word in words[wrapper:at] if word.startswith("--")]
        assert all(f"  {flag} " in usage.stdout for flag in flags), words
    else:  # an unknown option comes before a host file that is not there
        options = words[1 : at - 1]
        done = run([str(ROOT / WRAPPER), *options, str(folder / "absent"), words[at]], cwd=ROOT)
        assert "cannot read a host file" in done.stderr, f"{words}: {done.stderr}"


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_commands_parse(words: list[str], tmp_path: Path) -> None:
    check(words, tmp_path)


@pytest.mark.parametrize(
    "line",
    [
        "torchrun --nodes-per-proc 2 benchmarks/ddp_sweep.py",
        "torchrun --nproc-per-node 2 benchmarks/ddp_sweep.py --modell x",
        "torchrun --nproc-per-node 2 benchmarks/absent.py",
        "sbatch -N 2 launch/slurm_torchrun.sbatch --absent 3 benchmarks/ddp_sweep.py",
        "launch/ssh_torchrun.sh --absent 3 hosts benchmarks/ddp_sweep.py",
        "kubectl apply -k launch/kubernetes/absent",
        "docker build -f launch/absent .",
    ],
)
def test_the_check_above_can_fail(line: str, tmp_path: Path) -> None:
    with pytest.raises((AssertionError, SystemExit)), contextlib.redirect_stderr(io.StringIO()):
        check(shlex.split(line), tmp_path)


def missing_files(text: str) -> list[str]:
    text = re.sub(r"https://\S+", "", text)
    named = re.findall(r"\b((?:benchmarks|common|launch|tests|docs)/[\w./-]*\w)", text)
    named += [f"launch/{name}" for name in re.findall(r"`(\w+\.(?:sbatch|sh))`", text)]
    return [name for name in named if not (ROOT / name).exists()]


def test_no_missing_file() -> None:
    assert missing_files(README) == []
    assert missing_files("`launch/absent.sh`, `other.sbatch`") == [
        "launch/absent.sh",
        "launch/other.sbatch",
    ]


def said_by_us() -> list[str]:
    section = README.partition("### Said by these scripts")[2].partition("\n### ")[0]
    return re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE)


def sources() -> str:
    files = [*(ROOT / "common").glob("*.py"), *(ROOT / "launch").glob("*.[ps]*")]
    text = "\n".join(path.read_text() for path in files)
    return re.sub(r'"\s*\n\s*f?"', "", text)  # a literal in several lines


@pytest.mark.skipif(
    not (ROOT / "common" / "preflight.py").exists(), reason="needs common/preflight.py"
)
def test_our_messages_are_the_ones_in_the_source() -> None:
    found = said_by_us()
    assert len(found) > 9
    text = sources()
    assert [message for message in found if message not in text] == []
    assert "no such message" not in text


def test_every_option_of_the_wrapper_is_explained() -> None:
    """In its --help, and no other there."""
    source = (ROOT / WRAPPER).read_text()
    usage = run([str(ROOT / WRAPPER), "--help"]).stdout
    known = set(re.findall(r"--[a-z-]+", "".join(re.findall(r"^ {12}(--.*)\) ;;$", source, re.M))))
    shown = set(re.findall(r"^  (--[a-z-]+)", usage, re.M)) - {"--dry-run"}
    assert known == shown
    assert known


def test_shell_parses() -> None:
    bash = shutil.which("bash")
    assert bash is not None
    for path in (ROOT / "launch").glob("*.s*"):
        assert run([bash, "-n", str(path)]).returncode == 0, path
