"""A mistake in a command is one line with status 2: what was expected, what was given, an example.

The scripts run in this process and end before the ranks rendezvous.
"""

import importlib
import os
import re
import shlex
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from harness.cli import check_output
from tests.process import ROOT
from tests.pure.reports import case, write
from tests.pure.test_flags import parser_of

# script, flags, part of the line; p2p_matrix stands for the refusals of all measuring scripts
MISTAKES = [
    ("p2p_matrix", "--szie 3", "unknown argument '--szie'; did you mean --size"),
    ("p2p_matrix", "--dev cpu", "unknown argument '--dev'"),  # no abbreviations
    ("p2p_matrix", "--local_rank=0", "unknown argument '--local-rank': torchrun provides it; "),
    ("p2p_matrix", "--profile=", "expected a folder, got ''; e.g. traces"),
    ("p2p_matrix", f"--device '{'x ' * 500}'", "choice: 'x x x x "),
    ("p2p_matrix", f"--iters {'9' * 20_000}", "got '99999"),
    ("p2p_matrix", f"--{'x' * 20_000}", "... (20,004 characters)"),
    ("p2p_matrix", "--json 'r-{NO_SUCH}.jsonl'", "in {NO_SUCH}, but NO_SUCH is not set, got 'r-{"),
    ("p2p_matrix", "--json fifo", "--json fifo: expected a regular file, got a pipe; e.g. report."),
    ("p2p_matrix", "--resume", "expected --json PATH, the report to write or resume"),
    ("p2p_matrix", "--json=", "expected --json PATH, the report to write or resume"),
    ("p2p_matrix", "--profile-ranks 0", "--profile-ranks requires --profile DIR"),
    ("p2p_matrix", "--plot .png", "expected a file that ends in .png, .svg or .pdf, got '.png'"),
    ("collectives", "--collective allreduce", "got 'allreduce'; did you mean all_reduce"),
    ("collectives", "all_reduce -b 8", "'all_reduce': did you mean --collective all_reduce?"),
    ("collectives", "-i 8 -f 3", "-f/--stepfactor: not allowed with argument -i/--stepbytes"),
    ("collectives", "-b 64 -e 8", "-e must not be smaller than -b: got -b 64 -e 8; e.g. -b 8 -e 6"),
    ("collectives", "-G 3 --device cpu", "-G requires CUDA, but this run is on the CPU"),
    ("collectives", "--beside allreduce", "expected one of all_reduce, all_gather, "),
    ("collectives", "--beside all_to_all:x", "expected a size above 0, got 'x'"),
    ("collectives", "--beside all_to_all -I 1", "-I cannot be used with --beside"),
    ("collectives", "--beside all_to_all --collective all", "got sendrecv; e.g. --collective all_"),
    ("collectives", "-f 1.0000001", "-f: more than 10,000 sizes; use larger steps, e.g. -f 2"),
    ("collectives", "-i 1", "-i: more than 10,000 sizes; use larger steps, e.g. -f 2"),
    ("compile_sweep", "--models decoder-10k", "'decoder-10k'; did you mean decoder-10m"),
    ("compile_sweep", "--backends eager,inducter", "got 'inducter'; did you mean inductor?"),
    ("compile_sweep", "--models a.b:c --batch-size 2", "--batch-size cannot be used with a.b:c, "),
    ("compile_sweep", "--ddp --fsdp", "argument --fsdp: not allowed with argument --ddp"),
    ("compile_sweep", "--device cpu --dtype tf32", "tf32 and cudagraphs require CUDA; use"),
    ("compile_sweep", "--interleave --strategies ddp --backends eager", "got only ddp eager; e.g."),
    ("compile_sweep", "--interleave --strategies none,ddp", "on all ranks, and none uses only one"),
    ("compile_sweep", "--torchbench-model hf_Bert", "--model tb:hf_Bert, with the tb.py of"),
    ("compile_sweep", "--profile --verbose x", "unknown argument '--verbose': TORCH_LOGS=graph_co"),
    ("compile_sweep", "--torchviz", "call torchviz in the function of --model package.module:fun"),
    ("compile_sweep", "--dynamo print", "got 'print'; TORCH_LOGS=graph_code,ddp_graphs prints"),
    ("compile_sweep", "--ddp --fsdp-checkpoint", "expected a strategy with FSDP, got ddp; e.g. --"),
    ("compile_sweep", "--no-fsdp-wrap --fsdp-wrap-classes A", "with argument --no-fsdp-wrap"),
    ("compile_sweep", "--backends relu_compile_error", "expected one or more of eager, dynamo_eag"),
    ("ddp_sweep", "--model resnet5", "unknown model 'resnet5'; did you mean resnet50"),
    ("ddp_sweep", "--model fcn_resnet50", "unknown model 'fcn_resnet50'"),  # no classifier
    ("ddp_sweep", "--model googlenet", "unknown model 'googlenet'"),  # several heads
    ("ddp_sweep", "--model a:b --batch-size 2", "cannot be used with a:b, which defi"),
    ("ddp_sweep", "--global-batch 4 --batch-size 2", "not allowed with argument --global-batch"),
    ("ddp_sweep", "--comm-hook bf61", "got 'bf61'; did you mean bf16?"),
    ("ddp_sweep", "--ddp-options static", "got 'static'; did you mean static_graph"),
    ("ddp_sweep", "--world-sizes 2,node", "--world-sizes: expected a whole number of at least 1"),
    ("ddp_sweep", "--dtype tf32 --device cpu", "--dtype tf32 requires CUDA; use fp32"),
    ("ddp_sweep", "--interleave", "expected several bucket sizes, hooks, dtypes or --ddp-options,"),
    ("ddp_sweep", "--interleave --comm-hook bf16", "got only default buckets with bf16; e.g. --co"),
    ("ddp_sweep", "--interleave --dtype default,bf16", "alternates fp32, tf32 and bf16, got def"),
    ("input_sweep", "--model resnet19", "unknown model 'resnet19'; did you mean resnet"),
    ("input_sweep", "--model a:b", "requires --dataset package.module:function, which returns its"),
    ("input_sweep", "--model a:b --dataset a:d --batch-size 3", "a:b, which defines its own batch"),
    ("input_sweep", "--dataset a:d --cache cold", "--cache cold requires images, whose files are"),
    ("parallel_sweep", "--mesh dp2dp2", "expected a mesh, got 'dp2dp2'; e.g. dp8, dp2x4"),
    ("replay", "''", "expected a folder of recordings, got ''; e.g. trace/"),
    ("rpc_latency", "--rpc-timeout 1e-9", "a number of seconds from 0.001 to 1e8"),
    ("parameter_server", "--trainer_config_path x", "its entries are flags, e.g. --epochs 10"),
    ("parameter_server", "--dense-embedding --routes hybrid_hook", "no bucket is sparse"),
    ("traffic", "--ranks 8 --mesh tp4", "mesh tp4 has 4 ranks, but the job has 8; e.g. dp8"),
    ("traffic", "--ranks 2 --mesh dp2 --rank 2", "--rank: expected 0 to 1, got 2; e.g. --rank 0"),
    ("traffic", "--ranks 4 --mesh cp4:ring", "ring attention needs CUDA; try cp4"),
    ("traffic", "--ranks 48 --mesh tp48 --model decoder-nano", "8 heads are not divisible by tp"),
    (
        "traffic",
        "--ranks 8 --mesh pp8:1f1b --model decoder-nano",
        "4 layers are not divisible by st",
    ),
    ("traffic", "--ranks 4 --mesh pp4:1f1", "after a pipeline, got 'pp4:1f1'; e.g. pp4:1f1b"),
    ("traffic", "--ranks 3 --mesh dp3 --global-batch 4", "--global-batch 4 is not divisible by"),
    ("traffic", "--ranks 4 --mesh pp4:1f1b --microbatches 2", "e.g. --microbatches 4"),
    ("traffic", "--mesh dp8", "required: --ranks"),
    ("traffic", "--ranks 9 --mesh dp9 --sequence-length 1000000000", "of 18 sequences of 1,000,"),
    ("traffic", "--ranks 8 --mesh dp8 --global-batch 1000000000", "bytes of memory, but only "),
    ("traffic", "--ranks 1 --mesh dp1 --json=", "--json: expected a report, got ''"),
    ("traffic", "--ranks 2 --against a.jsonl", "--against requires --measured, e.g. --measured co"),
    ("traffic", "--ranks 2 --measured no.jsonl", "--measured: no.jsonl: No such file or directory"),
    ("traffic", "--ranks 2 --measured a.jsonl", "--measured a.jsonl: expected a report of collect"),
    ("traffic", "--ranks 2 --measured other.jsonl", "an entry is not what collectives.py writes ("),
    ("compare", "a.jsonl", "expected reports of two sides, BASE and --test TEST; e.g. compare"),
    ("compare", "a.jsonl --test a.jsonl", "is the same file as"),
    ("compare", "a.jsonl --test other.jsonl", "BASE has ddp_sweep, TEST has collectives"),
    ("compare", "a.jsonl --test empty.jsonl", "TEST has no case"),
    ("compare", "a.jsonl --test absent.jsonl --format json", "No such file"),
    ("compare", "a.jsonl --test b.jsonl --ignore-key modle", "no case has a key field 'modle'"),
    ("compare", "a.log --test b.log --step '(.'", "a regular expression (missing ), unterminated "),
    ("compare", "a.log --test b.log --skip 1", "--skip requires --step; e.g. --s"),
    ("compare", "a.log --test b.log --step '(.*) ms' --measure x", "cannot be used with --step"),
    ("compare", "no.log --test b.log --step '(.*) ms'", "no.log: No such file or directory"),
    ("export", "other.jsonl --to pytorch", "requires a single report of ddp_sweep.py"),
    ("export", "a.jsonl other.jsonl --to pytorch", "requires a single report of ddp_sweep.py"),
    ("export", "a.jsonl --to csv --metric step_s,stpe_s", "'stpe_s'; the metrics are step_s; did"),
    ("report", "a.jsonl", "expected a page to write, e.g. -o report.html"),
    ("report", "a.jsonl -o a.jsonl", "expected a file that ends in .html, got 'a.jsonl'"),
    ("report", "a.jsonl -o no/where.html", "No such file"),
    ("report", "a.jsonl -o page.html --paired", "--paired requires --test"),
    ("report", "a.jsonl -o page.html --measure step", "--measure requires --test"),
    ("report", "a.jsonl -o page.html --margin 3%", "--margin requires two sides: --test, or a"),
    ("report", "a.jsonl -o page.html --ignore-key x", "--ignore-key requires two sides"),
    ("trace", "a.jsonl --against fifo", "--against fifo: fifo: expected a regular file, got a pip"),
    ("trace", "absent.json", "No such file"),
    ("ab", "--a true --b 'true x' --out piped", "plan.txt: expected a regular file, got a pipe"),
    ("ab", "--a '' --out ab", "expected a command, got ''; e.g. --a 'torchrun x.py'"),
    ("ab", "--a x --out=", "expected a folder, got ''; e.g. --out"),
    ("ab", "--a x --b-env X --out ab", "expected NAME=VALUE, got 'X'"),
    ("ab", "--a 'python3 \"x' --out ab", "No closing quotation"),
    ("ab", "--a no-such-program --out ab", "expected a program that can be run, got 'no-such-prog"),
    ("ab", "--a 'X=1 cmd' --out ab", "'X=1'; to set a variable, write env X=1 ..."),
    ("ab", "--a 'true a && true b' --out ab", "needs no shell, got '&&'; quote the word, or"),
    ("ab", "--a 'true a&&true b' --out ab", "needs no shell, got '&&'; quote the word, or"),
    ("ab", "--a 'true 2>/dev/null' --out ab", "needs no shell, got '>'; quote the word, or "),
    ("ab", "--a x --b y --b z --out ab", "expected one command B, quoted as one argument, got 2"),
    ("ab", "--a x --out ab --unit ms", "--unit requires --step"),
    ("ab", "--a x --out ab --step '(.*) ms' --interleave", "--interleave applies to reports, and"),
]
# other required arguments of a script
NEEDED = {"replay": "trace", "traffic": "--ranks 1 --mesh dp1"}
# script, number of ranks, flags, part of the line: numbers of ranks that do not fit the roles
ROLES = [
    ("rpc_latency", 1, "", "require 2 processes, got 1; e.g. torchrun"),
    ("rpc_latency", 2, "--rpc-channels cuda_xth", "requires CUDA, but all ranks are on the CPU"),
    ("batch_update_ps", 3, "--batch-update-size 3", "the number of trainers (2), got 3; try 2"),
    ("ddp_rpc", 2, "", "1 trainer, 1 server and a master require 3 processes, got 2"),
    ("ddp_rpc", 6, "--number_ps 1 --number-trainers 2", "require 4 processes, got 6"),
    ("ddp_rpc", 4, "--server-device cuda", "torch sees no CUDA device"),
    ("parameter_server", 4, "--ntrainer 4 --nserver 2", "require 7 processes, got 4"),
    ("parameter_server", 5, "--ncudaserver 1", "torch sees no CUDA device"),
    ("parameter_server", 5, "--ntrainer 1 --ncudatrainer 2", "on one kind of device, e.g. --ncu"),
    ("parameter_server", 6, "--nserver 2 --placement grouped", "--ntrainer 4 --nserver 2"),
    ("parameter_server", 4, "--ntrainer 3 --nserver 0", "1 server and a master require 5"),
]


MEASURING = [path.stem for path in (ROOT / "benchmarks").glob("[a-z]*.py")]
READING = ["ab", "compare", "export", "report", "trace"]
REQUIRED = {"ranks": "2", "mesh": "dp2", "to": "csv"}  # other required arguments accept x


@pytest.mark.parametrize("script", [*MEASURING, *READING])
def test_each_flag_refuses_values_in_one_line(script: str, capsys: Any) -> None:
    """Or it accepts them. The line has what was expected and what was given."""
    parser = parser_of(script, "analysis" if script in READING else "benchmarks")
    needed = list[str]()
    for action in [action for action in parser._actions if action.required]:
        needed += [*action.option_strings[:1], REQUIRED.get(action.dest, "x")]
    valued = [a.option_strings[-1] for a in parser._actions if a.option_strings and a.nargs != 0]
    told = r".*: error: argument \S*{}: (expected .*, got '|invalid choice: .* \(choose from )"
    refused = 0
    for flag, value in product(valued, ("", "x", "nan", "-1", "0", "1e400", "9" * 30, "a,b")):
        with suppress(SystemExit):
            parser.parse_args([*needed, f"{flag}={value}"])
            continue
        (line,) = capsys.readouterr().err.splitlines()
        assert re.match(told.format(flag), line), line
        refused += 1
    assert refused > len(valued)


@pytest.fixture
def started(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Any:
    """Run a script in an empty folder as rank 0 on the CPU: its status, stdout and stderr."""
    for name in ("TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"RANK": "0", "CUDA_VISIBLE_DEVICES": ""}.items():
        monkeypatch.setenv(name, value)

    def run(script: str, flags: str, ranks: int) -> tuple[Any, str, str]:
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
        monkeypatch.setattr("sys.argv", [f"{script}.py", *shlex.split(flags)])
        (folder,) = [f for f in ("benchmarks", "analysis") if (ROOT / f / f"{script}.py").exists()]
        with pytest.raises(SystemExit) as end:
            importlib.import_module(f"{folder}.{script}").main()
        return end.value.code, *capsys.readouterr()

    return run


@pytest.mark.parametrize(
    ("script", "ranks", "flags", "words"),
    [(script, 1, flags, words) for script, flags, words in MISTAKES] + ROLES,
)
def test_a_mistake_is_one_line(
    script: str, ranks: int, flags: str, words: str, started: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo("fifo")
    os.mkdir("piped")
    os.mkfifo("piped/plan.txt")
    write(Path("a.jsonl"), case("x"))
    write(Path("b.jsonl"), case("x", [0.2]))
    write(Path("other.jsonl"), case("x"), benchmark="collectives")
    write(Path("empty.jsonl"))
    for name in ("a.log", "b.log"):
        Path(name).write_text("a step in N/A ms\n")
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    status, out, err = started(script, flags, ranks)
    assert status == 2
    # mistakes that the parser finds come before the first two lines
    assert not out or re.fullmatch("# torchrun-bench .*\n# command: .*\n", out)
    (line,) = err.splitlines()
    assert line.startswith(f"{script}.py: error: ")
    assert words in line
    assert len(line) < 2500


@pytest.mark.parametrize(
    ("script", "flag"),
    [
        *((script, "--json base/1.jsonl") for script in MEASURING),
        ("p2p_matrix", "--plot base/1.png"),
        ("node_check", "--exclude-file base/1.txt"),
    ],
)
def test_a_missing_folder_is_refused(script: str, flag: str, started: Any) -> None:
    """Two ranks without MASTER_ADDR: they would be refused for that if they tried to rendezvous."""
    command = script, f"{NEEDED.get(script, '')} {flag}", 2
    named = f"{script}.py: error: {flag}: no folder base; try mkdir -p base\n"
    assert started(*command) == (2, "", named)
    Path("base", Path(flag).name).mkdir(parents=True)
    status, out, err = started(*command)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert f": error: {flag}: expected a regular file, got a folder; " in err


def test_only_rank_0_checks_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only rank 0 writes the report. A read-only folder is refused, unless the file exists."""
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    check_output("--json", str(tmp_path / "no" / "1.jsonl"))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr("os.access", lambda path, mode: False)  # as root every folder is writable
    with pytest.raises(SystemExit):
        check_output("--json", str(tmp_path / "1.jsonl"))
    (tmp_path / "1.jsonl").touch()
    check_output("--json", str(tmp_path / "1.jsonl"))
    check_output("--json", "-")
