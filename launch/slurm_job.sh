# shellcheck shell=bash
# Shared by slurm_torchrun.sbatch and slurm_srun.sbatch: starts one step over all nodes of a job and
# handles its end. Both set `wrapper` (their own name) and `launch` (this folder).

refuse() {
    echo "${wrapper:?}: error: $1" >&2
    exit 2
}

# Requires a number without a leading 0, which bash would read as octal.
need_number() { # NAME EXAMPLE
    if ! [[ ${!1} =~ ^(0|[1-9][0-9]*)$ ]]; then
        refuse "expected a number in $1, got '${!1}'; e.g. $1=$2"
    fi
}

# Checks the command line, and sets `ranks`, the number of ranks per node, from the job's variables.
check_job() {
    local example="benchmarks/ddp_sweep.py --json ddp.jsonl --resume"
    if [[ -z ${SLURM_JOB_ID:-} ]]; then
        refuse "not running in a Slurm job; e.g. sbatch -N 2 --gpus-per-node 8 launch/$wrapper $example"
    fi
    if [[ $# -eq 0 ]]; then refuse "expected a script and its flags, e.g. $example"; fi
    if [[ $1 != -m && ! -e $1 ]]; then refuse "no script $1 in $PWD; e.g. $example"; fi
    local gpus=${SLURM_GPUS_ON_NODE:-${SLURM_GPUS_PER_NODE:-}}
    gpus=${gpus##*:} # a100:8 -> 8
    ranks=${SLURM_NTASKS_PER_NODE:-$gpus}
    # one task per node, as in most jobs for torchrun: the task is torchrun, which starts a rank per
    # GPU
    if [[ $wrapper == slurm_torchrun.sbatch && $ranks == 1 ]]; then ranks=${gpus:-1}; fi
    if ! [[ $ranks =~ ^[1-9][0-9]*$ ]]; then
        refuse "unknown number of ranks per node; use sbatch --gpus-per-node 8 or --ntasks-per-node 8"
    fi
    if [[ $gpus =~ ^[0-9]+$ && ! " $* " =~ \ --device[\ =]cpu\  ]] && ((ranks < gpus)); then
        echo "$wrapper: $((gpus - ranks)) of $gpus GPUs per node are idle with --ntasks-per-node" \
            "$ranks; use --ntasks-per-node $gpus for one rank per GPU" >&2
    fi
    : "${MAX_REQUEUES:=3}" "${GIVE_UP_S:=60}" "${SLURM_RESTART_COUNT:=0}"
    need_number MAX_REQUEUES 3
    need_number GIVE_UP_S 60
    need_number SLURM_JOB_ID 4711
    if ((SLURM_RESTART_COUNT > MAX_REQUEUES)); then
        refuse "already requeued $SLURM_RESTART_COUNT times; MAX_REQUEUES=$MAX_REQUEUES"
    fi
}

# run_step TASKS_PER_NODE SRUN_OPTION... -- COMMAND...: runs the step, and exits with its status.
run_step() {
    local nodes=$SLURM_JOB_NUM_NODES tasks=$1 options step watch status=0
    read -ra options <<<"${SRUN_ARGS:-}" # from the user, e.g. --container-image=IMAGE
    shift
    while [[ $1 != -- ]]; do
        options+=("$1")
        shift
    done
    shift
    local srun=(srun --nodes="$nodes" --ntasks="$((nodes * tasks))" --ntasks-per-node="$tasks"
        --distribution=block --kill-on-bad-exit=1 "${options[@]}"
        bash "${launch:?}/slurm_env.sh" "$@")
    if [[ ${DRY_RUN:-0} != 0 ]]; then
        echo "${srun[*]@Q}"
        exit 0
    fi
    # Slurm sends its warning only to this shell (--signal=B:USR1); it would kill torchrun
    warned=
    trap 'warned=yes; end_step "the time limit is near"' USR1
    trap 'end_step interrupted' INT TERM
    "${srun[@]}" &
    step=$!
    give_up "$step" &
    watch=$!
    # a signal interrupts `wait`, but not the step
    while wait "$step" || status=$?; kill -0 "$step" 2>/dev/null; do status=0; done
    kill "$watch" 2>/dev/null || true
    if [[ -n $warned && $status -ne 0 ]]; then requeue "$@"; fi
    exit "$status"
}

end_step() {
    echo "$wrapper: $1: ending the ranks" >&2
    # signals the steps of the job, not this shell; Slurm may already be terminating them
    scancel --signal=TERM "$SLURM_JOB_ID" 2>/dev/null || true
}

# Terminates srun GIVE_UP_S seconds after the last rank on this node has ended. srun waits for the exit
# status of every task. A node that is cut off from the network sends none, so srun would wait until
# Slurm declares the node dead or, if Slurm still reaches the node, until the time limit.
#
# The wrapper must run on a node of the job, as it does in sbatch. With salloc it may run on a login
# node, where no rank ever starts; then srun is never terminated.
give_up() {
    local began='' quiet=0
    while ((quiet < GIVE_UP_S)); do
        sleep 5 &>/dev/null
        # this job's processes on this node; the third column is their step: 0, 1, ..., or batch
        # (this shell)
        if scontrol listpids "$SLURM_JOB_ID" 2>/dev/null | grep -Eq '^[0-9]+ +[0-9]+ +[0-9]+ '; then
            began=yes quiet=0
        elif [[ -n $began ]]; then
            quiet=$((quiet + 5))
        fi
    done
    echo "$wrapper: all ranks on $(hostname) have ended, but srun waits for other nodes:" \
        "ending srun" >&2
    kill -TERM "$1"
}

# Puts the job back into the queue, so that an unfinished sweep can continue.
requeue() {
    local count=$SLURM_RESTART_COUNT
    if [[ " $* " != *" --resume "* ]]; then
        echo "$wrapper: not requeued: without --resume the job would start over" >&2
    elif ((count >= MAX_REQUEUES)); then
        echo "$wrapper: not requeued: already requeued $count times; MAX_REQUEUES=$MAX_REQUEUES" >&2
    else
        echo "$wrapper: requeued, $((count + 1)) of at most $MAX_REQUEUES times" >&2
        scontrol requeue "$SLURM_JOB_ID" || true # fails for a job of salloc
    fi
}
