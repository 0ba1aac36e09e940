# shellcheck shell=bash
# What slurm_torchrun.sbatch and slurm_srun.sbatch share: one step over all nodes of a job, and its
# end. They set `wrapper`, their own name, and `launch`, this folder.

refuse() {
    echo "${wrapper:?}: error: $1" >&2
    exit 2
}

# Refuses a variable that holds no number. Without a leading 0, which bash takes for octal.
need_number() { # NAME EXAMPLE
    if ! [[ ${!1} =~ ^(0|[1-9][0-9]*)$ ]]; then
        refuse "expected a number in $1, got '${!1}'; e.g. $1=$2"
    fi
}

# Sets `ranks`, the number on each node, from the job; checks the command line.
check_job() {
    local example="benchmarks/ddp_sweep.py --json ddp.jsonl --resume"
    if [[ -z ${SLURM_JOB_ID:-} ]]; then
        refuse "this is no Slurm job; e.g. sbatch -N 2 --gpus-per-node 8 launch/$wrapper $example"
    fi
    if [[ $# -eq 0 ]]; then refuse "expected a script and its flags, e.g. $example"; fi
    if [[ $1 != -m && ! -e $1 ]]; then refuse "no script $1 in $PWD; e.g. $example"; fi
    local gpus=${SLURM_GPUS_ON_NODE:-${SLURM_GPUS_PER_NODE:-}}
    gpus=${gpus##*:} # of a100:8, too
    ranks=${SLURM_NTASKS_PER_NODE:-$gpus}
    # the header of most jobs for torchrun: its one task is torchrun, which starts a rank for each GPU
    if [[ $wrapper == slurm_torchrun.sbatch && $ranks == 1 ]]; then ranks=${gpus:-1}; fi
    if ! [[ $ranks =~ ^[1-9][0-9]*$ ]]; then
        refuse "how many ranks a node? Give sbatch --gpus-per-node 8, or --ntasks-per-node 8"
    fi
    if [[ $gpus =~ ^[0-9]+$ ]] && ((ranks < gpus)); then
        echo "$wrapper: $((gpus - ranks)) of $gpus GPUs of a node stay idle: --ntasks-per-node" \
            "$ranks is as many ranks; for a rank on each give --ntasks-per-node $gpus" >&2
    fi
    : "${MAX_REQUEUES:=3}" "${GIVE_UP_S:=60}" "${SLURM_RESTART_COUNT:=0}"
    need_number MAX_REQUEUES 3
    need_number GIVE_UP_S 60
    need_number SLURM_JOB_ID 4711
    if ((SLURM_RESTART_COUNT > MAX_REQUEUES)); then
        refuse "requeued $SLURM_RESTART_COUNT times; MAX_REQUEUES=$MAX_REQUEUES"
    fi
}

# run_step TASKS_PER_NODE SRUN_OPTION... -- COMMAND...: its status becomes this shell's.
run_step() {
    local nodes=$SLURM_JOB_NUM_NODES tasks=$1 options step watch status=0
    read -ra options <<<"${SRUN_ARGS:-}" # the site's, e.g. --container-image=IMAGE
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
    # Slurm's warning comes to this shell alone (--signal=B:USR1): torchrun would die of it
    warned=
    trap 'warned=yes; end_step "the time is nearly up"' USR1
    trap 'end_step interrupted' INT TERM
    "${srun[@]}" &
    step=$!
    give_up "$step" &
    watch=$!
    # a signal ends the wait, not the step
    while wait "$step" || status=$?; kill -0 "$step" 2>/dev/null; do status=0; done
    kill "$watch" 2>/dev/null || true
    if [[ -n $warned && $status -ne 0 ]]; then requeue "$@"; fi
    exit "$status"
}

end_step() {
    echo "$wrapper: $1: ending the ranks" >&2
    # to the steps of the job, not to this shell; Slurm may be ending them already
    scancel --signal=TERM "$SLURM_JOB_ID" 2>/dev/null || true
}

# End srun a while after the last rank on this node. It waits for a word of every task, and a node
# that is cut off sends none: until Slurm takes it for dead, or until the time limit where Slurm
# still reaches it.
give_up() {
    local began='' quiet=0
    while ((quiet < GIVE_UP_S)); do
        sleep 5 &>/dev/null
        # processes of this job here, by their step: 0, 1, ..., or batch for this shell
        if scontrol listpids "$SLURM_JOB_ID" 2>/dev/null | grep -Eq '^[0-9]+ +[0-9]+ +[0-9]+ '; then
            began=yes quiet=0
        elif [[ -n $began ]]; then
            quiet=$((quiet + 5))
        fi
    done
    echo "$wrapper: no rank is left on $(hostname), and srun waits for other nodes: given up" >&2
    kill -TERM "$1"
}

# Start the job again, for a sweep that has not ended.
requeue() {
    local count=$SLURM_RESTART_COUNT
    if [[ " $* " != *" --resume "* ]]; then
        echo "$wrapper: not requeued: without --resume it would begin anew" >&2
    elif ((count >= MAX_REQUEUES)); then
        echo "$wrapper: not requeued: $count times before; MAX_REQUEUES=$MAX_REQUEUES" >&2
    else
        echo "$wrapper: requeued, $((count + 1)) of at most $MAX_REQUEUES times" >&2
        scontrol requeue "$SLURM_JOB_ID" || true # salloc's cannot be
    fi
}
