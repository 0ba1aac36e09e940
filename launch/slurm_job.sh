# shellcheck shell=bash
# What slurm_torchrun.sbatch and slurm_srun.sbatch share: one step over all nodes of a job, and its
# end. They set `wrapper`, their own name, and `launch`, this folder.

refuse() {
    echo "${wrapper:?}: error: $1" >&2
    exit 2
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
    ranks=${SLURM_NTASKS_PER_NODE:-${gpus##*:}} # of a100:8, too
    if ! [[ $ranks =~ ^[1-9][0-9]*$ ]]; then
        refuse "how many ranks a node? Give sbatch --gpus-per-node 8, or --ntasks-per-node 8"
    fi
    if ((${SLURM_RESTART_COUNT:-0} > ${MAX_REQUEUES:=3})); then
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
    if [[ -n ${DRY_RUN:-} ]]; then
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
    while ((quiet < ${GIVE_UP_S:-60})); do
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
    local count=${SLURM_RESTART_COUNT:-0}
    if [[ " $* " != *" --resume "* ]]; then
        echo "$wrapper: not requeued: without --resume it would begin anew" >&2
    elif ((count >= MAX_REQUEUES)); then
        echo "$wrapper: not requeued: $count times before; MAX_REQUEUES=$MAX_REQUEUES" >&2
    else
        echo "$wrapper: requeued, $((count + 1)) of at most $MAX_REQUEUES times" >&2
        scontrol requeue "$SLURM_JOB_ID" || true # salloc's cannot be
    fi
}
