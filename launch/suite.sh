#!/usr/bin/env bash
#SBATCH --job-name=torchrun-bench
#SBATCH --output=%x-%j.out
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@120
# Checks a new cluster: runs several scripts one after the other, and creates a page of their reports.
set -euo pipefail

launch=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
if [[ ! -r $launch/slurm_srun.sbatch && -n ${SLURM_JOB_ID:-} ]]; then # sbatch runs a copy
    launch=$(scontrol show job "$SLURM_JOB_ID" | sed -n 's|^ *Command=||p')
    launch=${launch%%/suite.sh*}
fi
home=$(dirname "$launch")

usage() {
    cat <<'TEXT'
usage: launch/suite.sh [FLAG...] [SCRIPT...]

    launch/suite.sh                                             # a machine with GPUs
    launch/suite.sh --nproc-per-node 2 --flags "--device cpu"   # a machine without GPUs
    sbatch -N 4 --gpus-per-node 8 launch/suite.sh               # all nodes of a Slurm job
    launch/suite.sh node_check "ddp_sweep --models resnet50 --dtype bf16"

Runs each SCRIPT of benchmarks/, writes its report to a folder, and creates a page of all reports.
A script and its flags are given as one quoted argument. If a script fails, the next one still runs.

After Ctrl-C, repeat the command to continue: cases that are in the reports are not measured again,
except those of node_check. A script refuses to continue a report that was measured with different
source files, environment variables or versions; its message names the difference. Choose another
--out then.

    --out FOLDER          folder for the reports and the page (default: suite)
    --flags "FLAG..."     flags for every script, e.g. "--max-seconds 1"
    --nproc-per-node N    run on this machine only, with N ranks (default: one rank per GPU; in a
                          Slurm job on all of its nodes, started by launch/slurm_srun.sbatch)
    --baseline FOLDER     earlier reports; compare.py compares the new ones with them
    --dry-run             print the commands without running them

The exit status is the largest status of the scripts and compare.py; 0 if all of them succeeded. A
status of 4 (no verdict) is returned only if nothing failed.
TEXT
    echo "Default scripts: ${scripts[*]}"
}

refuse() {
    echo "suite.sh: error: $1" >&2
    exit 2
}

scripts=(node_check collectives p2p_matrix ddp_sweep parallel_sweep compile_sweep checkpoint_sweep)
declare -A examples=([--out]="--out suite" [--flags]="--flags '--device cpu'")
examples+=([--nproc-per-node]="--nproc-per-node 8" [--baseline]="--baseline earlier")
out=suite common=() ranks='' baseline='' dry_run='' chosen=()
while (($#)); do
    case $1 in
    --out | --flags | --nproc-per-node | --baseline)
        if [[ -z ${2:-} ]]; then refuse "expected a value after $1, e.g. ${examples[$1]}"; fi
        case $1 in
        --out) out=$2 ;;
        --flags) read -ra common <<<"$2" ;;
        --nproc-per-node) ranks=$2 ;;
        --baseline) baseline=$2 ;;
        esac
        shift
        ;;
    --dry-run) dry_run=yes ;;
    -h | --help)
        usage
        exit 0
        ;;
    -*) refuse "unknown flag '$1'; expected --out, --flags, --nproc-per-node, --baseline, --dry-run" ;;
    *) chosen+=("$1") ;;
    esac
    shift
done
if ((${#chosen[@]})); then scripts=("${chosen[@]}"); fi

declare -A seen=()
for entry in "${scripts[@]}"; do
    name=${entry%% *}
    if [[ ! -f $home/benchmarks/$name.py ]]; then
        names=$(cd "$home/benchmarks" && printf '%s, ' [a-z]*.py)
        names=${names//.py/}
        refuse "no script '$name' in benchmarks/; the scripts are ${names%, }"
    fi
    if [[ -n ${seen[$name]:-} ]]; then
        refuse "$name is given twice, but $out has one report per script"
    fi
    seen[$name]=yes
done
if [[ -z $ranks && -z ${SLURM_JOB_ID:-} ]]; then
    ranks=$(nvidia-smi -L 2>/dev/null | grep -c ^GPU) || true
    if ((ranks == 0)); then refuse "no GPU found; give the number of ranks, e.g. --nproc-per-node 2"; fi
fi
if [[ -n $ranks && ! $ranks =~ ^[1-9][0-9]*$ ]]; then
    refuse "expected a number of ranks after --nproc-per-node, e.g. 8, got '$ranks'"
fi
if [[ -n $baseline && -z $(find "$baseline" -name '*.json*' -print -quit 2>/dev/null) ]]; then
    refuse "expected a folder of reports after --baseline, got '$baseline'"
fi
if [[ -n $baseline && $baseline -ef $out ]]; then
    refuse "--baseline and --out are the same folder, '$out'"
fi
if [[ -n $ranks ]]; then
    start=(torchrun --standalone --nproc-per-node "$ranks")
else
    start=(bash "$launch/slurm_srun.sbatch")
    DRY_RUN=1 "${start[@]}" "$launch/suite.sh" >/dev/null || exit 2 # it prints why it cannot start
fi
if [[ -z $dry_run ]] && ! mkdir -p "$out" 2>/dev/null; then
    refuse "cannot create the folder '$out'; choose another --out"
fi

child='' stopped=''
# Forwards a signal to the running script, which ends its ranks. After Slurm's warning before the time
# limit (USR1), it also requeues the job.
# shellcheck disable=SC2317,SC2329 # called by traps; older versions report SC2317
stop() {
    stopped=$2
    if [[ -z $child ]]; then end; fi
    kill -"$1" "$child" 2>/dev/null || true
}

end() {
    echo "suite.sh: interrupted; $out has the finished cases; repeat the same command to continue" >&2
    exit "$stopped"
}
trap 'stop TERM 130' INT
trap 'stop TERM 143' TERM
trap 'stop TERM 129' HUP
trap 'stop USR1 143' USR1

# Runs a command and sets `status`; with --dry-run, prints the command.
run() {
    status=0
    if [[ -n $dry_run ]]; then
        if [[ $1 == bash ]]; then
            DRY_RUN=1 "$@"
        else
            printf '%q ' "$@"
            echo
        fi
        return
    fi
    set -m # puts the command into its own process group, so that Ctrl-C reaches only this shell
    "$@" </dev/null &
    child=$!
    set +m
    # a signal interrupts `wait`: wait again for the status of the command itself
    while wait "$child" || status=$?; kill -0 "$child" 2>/dev/null; do status=0; done
    child=
    if [[ -n $stopped ]]; then end; fi
    # 4 means no verdict, and must not hide a failure
    if ((status && (worst == 0 || worst == 4 || (status > worst && status != 4)))); then
        worst=$status
    fi
}

worst=0 said=() page=$out/report.html
for entry in "${scripts[@]}"; do
    read -ra words <<<"$entry"
    name=${words[0]} began=$SECONDS
    if [[ -z $dry_run ]]; then echo -e "\n# suite.sh: $name"; fi
    run "${start[@]}" "$home/benchmarks/$name.py" "${words[@]:1}" "${common[@]}" \
        --json "$out/$name.jsonl" --resume
    said+=("$name: status $status, $((SECONDS - began)) s")
done
if [[ -n $dry_run ]] || compgen -G "$out/*.jsonl" >/dev/null; then
    run python3 "$home/analysis/report.py" "$out" -o "$page"
    said+=("page $page: status $status")
    if [[ -n $baseline ]]; then
        run python3 "$home/analysis/compare.py" "$baseline" --test "$out" --fail-on slower
        said+=("compare.py with $baseline: status $status")
    fi
fi
if [[ -n $dry_run ]]; then exit 0; fi
echo
for line in "${said[@]}"; do echo "# suite.sh: $line"; done
echo "# suite.sh: status $worst"
exit "$worst"
