# shellcheck shell=bash
# What slurm_torchrun.sbatch and slurm_srun.sbatch share: their flags, one job step, and its end.
# Expects `wrapper`, the name of the one that sources it, and `repository`.
# shellcheck disable=SC2034,SC2154

give_up_s=20 # after a task failed; the benchmarks' ranks end within some 5 s of each other

job_error() {
    echo "${wrapper:?}: error: $1" >&2
    exit 2
}

job_usage() {
    cat <<USAGE
usage: sbatch -N NODES [OPTION OF SBATCH...] launch/$wrapper [FLAG...] SCRIPT [ARGUMENT...]
       or, inside salloc: launch/$wrapper [FLAG...] SCRIPT [ARGUMENT...]

  --nproc-per-node N        ranks a node (default: the job's --ntasks-per-node, or its GPUs a node)
  --venv DIR                activate this virtual environment on the nodes (or set LAUNCH_VENV)
  --container-image IMAGE   run in this container, by pyxis (or set LAUNCH_CONTAINER_IMAGE)
  --container-mounts LIST   mount SRC:DST,... there as well (or set LAUNCH_CONTAINER_MOUNTS)
  --port N                  of the first node, where the ranks meet (default: from the job's number)
  --max-requeues N          how often the job may start again, after its time limit or a node's
                            failure; the benchmarks then resume their report (default: 3)
  --max-restarts N          how often torchrun may start the ranks again (default: 0);
                            of slurm_torchrun.sbatch only
  --dry-run                 print the srun line, and do nothing
USAGE
}

# Sets what the flags say; script: the program and its arguments.
job_parse() {
    nproc='' venv=${LAUNCH_VENV:-} image=${LAUNCH_CONTAINER_IMAGE:-} port=''
    mounts=${LAUNCH_CONTAINER_MOUNTS:-} max_requeues=3 max_restarts='' dry_run=''
    while [ $# -gt 0 ]; do
        case $1 in
        -h | --help)
            job_usage
            exit 0
            ;;
        --dry-run)
            dry_run=yes
            shift
            continue
            ;;
        --*=*)
            set -- "${1%%=*}" "${1#*=}" "${@:2}"
            continue
            ;;
        --nproc-per-node | --venv | --container-image | --container-mounts | --port) ;;
        --max-requeues) ;;
        --max-restarts)
            if [ "$wrapper" != slurm_torchrun.sbatch ]; then
                job_error "$1 is torchrun's; it needs launch/slurm_torchrun.sbatch"
            fi
            ;;
        -m) break ;; # python's and torchrun's: a module in the place of a script
        -*) job_error "unknown flag $1; see --help. The script's own flags come after the script" ;;
        *) break ;;
        esac
        if [ $# -lt 2 ]; then job_error "$1 needs a value"; fi
        case $1 in
        --nproc-per-node) nproc=$(job_number "$1" "$2" 1) ;;
        --venv) venv=$2 ;;
        --container-image) image=$2 ;;
        --container-mounts) mounts=$2 ;;
        --port) port=$(job_number "$1" "$2" 1) ;;
        --max-requeues) max_requeues=$(job_number "$1" "$2" 0) ;;
        --max-restarts) max_restarts=$(job_number "$1" "$2" 0) ;;
        esac
        shift 2
    done
    if [ $# -eq 0 ]; then job_error "expected a script, e.g. benchmarks/ddp_sweep.py"; fi
    script=("$@")
    if [ "$1" != -m ] && [ ! -e "$1" ]; then
        if [ ! -e "$repository/$1" ]; then job_error "no $1 in $PWD or $repository"; fi
        script[0]=$repository/$1
    fi
    if [ -n "$mounts" ] && [ -z "$image" ]; then
        job_error "--container-mounts has no effect without --container-image"
    fi
}

# job_number FLAG VALUE LEAST
job_number() {
    if ! [[ $2 =~ ^[0-9]{1,9}$ ]] || ((10#$2 < $3)); then
        job_error "$1: expected a whole number of at least $3, got '$2'"
    fi
    echo "$((10#$2))"
}

# Sets nproc, the number of ranks on each node, unless a flag has.
job_count_ranks() {
    if [ -z "${SLURM_JOB_ID:-}" ] || [ -z "${SLURM_JOB_NUM_NODES:-}" ]; then
        job_error "this is no Slurm job; start it with sbatch -N 2 launch/$wrapper ..., or in salloc"
    fi
    local gpus=${SLURM_GPUS_ON_NODE:-${SLURM_GPUS_PER_NODE:-}} tasks=${SLURM_NTASKS:-0}
    nproc=${nproc:-${SLURM_NTASKS_PER_NODE:-}}
    if [ -z "$nproc" ] && ((tasks > SLURM_JOB_NUM_NODES)); then
        if ((tasks % SLURM_JOB_NUM_NODES)); then
            job_error "$tasks tasks do not spread evenly over $SLURM_JOB_NUM_NODES nodes; give \
--nproc-per-node N"
        fi
        nproc=$((tasks / SLURM_JOB_NUM_NODES))
    fi
    nproc=${nproc:-${gpus##*:}} # of a100:8, too
    if [ -z "$nproc" ]; then
        job_error "how many ranks a node? Give sbatch --gpus-per-node 8, or --nproc-per-node 8 to \
this script"
    fi
    local cpus=${SLURM_JOB_CPUS_PER_NODE:-}
    cpus=${cpus%%[(,]*} # 16(x3),8
    if [ -n "$cpus" ] && ((cpus < nproc)); then
        local few="$nproc ranks a node, and the job has $cpus of a node's CPUs; give salloc or \
sbatch --exclusive, or --cpus-per-task"
        if [ "$wrapper" = slurm_srun.sbatch ]; then job_error "$few"; fi # Slurm would refuse it
        echo "$wrapper: warning: $few" >&2
    fi
}

# job_run TASKS_PER_NODE SRUN_OPTION... -- COMMAND...: one step, whose status becomes this shell's.
job_run() {
    local tasks=$1 options=() nodes=() variables=() name address
    shift
    while [ "$1" != -- ]; do
        options+=("$1")
        shift
    done
    shift
    if ((${SLURM_RESTART_COUNT:-0} > max_requeues)); then
        echo "$wrapper: job $SLURM_JOB_ID was requeued $SLURM_RESTART_COUNT times, and \
--max-requeues is $max_requeues: given up" >&2
        exit 1
    fi

    mapfile -t nodes < <(scontrol show hostnames "${SLURM_JOB_NODELIST:?}")
    if [ "${#nodes[@]}" -eq 0 ]; then
        job_error "scontrol finds no hosts in SLURM_JOB_NODELIST=$SLURM_JOB_NODELIST"
    fi
    for name in "${nodes[@]:0:2}"; do
        if ! getent ahosts "$name" >/dev/null; then
            address=$(scontrol --oneliner show node "$name" |
                sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p')
            name=${address:-$name}
        fi
        if [ "${#variables[@]}" -eq 0 ]; then
            variables=("LAUNCH_MASTER_ADDR=$name")
        else
            variables+=("LAUNCH_PEER=$name")
        fi
    done
    if [ -n "$port" ]; then variables+=("LAUNCH_MASTER_PORT=$port"); fi
    if [ -n "$venv" ]; then variables+=("LAUNCH_VENV=$venv"); fi

    step_name=bench-$$
    local step=(env "${variables[@]}" srun --nodes="$SLURM_JOB_NUM_NODES"
        --ntasks="$((SLURM_JOB_NUM_NODES * tasks))" --ntasks-per-node="$tasks"
        --distribution=block --kill-on-bad-exit=1 --job-name="$step_name" --export=ALL
        "${options[@]}")
    if [ -n "$image" ]; then
        if [ "$PWD" != "$repository" ]; then mounts=$PWD:$PWD${mounts:+,$mounts}; fi
        step+=(--container-image="$image" --container-workdir="$PWD"
            --container-mounts="$repository:$repository${mounts:+,$mounts}")
    fi
    step+=(bash "$repository/launch/slurm_env.sh" "$@")
    if [ -n "$dry_run" ]; then
        local line
        printf -v line '%q ' "${step[@]}"
        echo "${line% }"
        exit 0
    fi

    # Slurm's warning comes to this shell alone (--signal=B:USR1): torchrun would die of it
    signalled='' warned='' step_pid=$$
    trap 'signalled=yes warned=yes; job_stop "the time is nearly up"' USR1
    trap 'signalled=yes; job_stop "interrupted"' INT TERM
    scratch=$(mktemp -d -p /tmp)
    mkfifo "$scratch/failed"
    LAUNCH_FAILED=$(hostname):$scratch/failed "${step[@]}" &
    step_pid=$!
    job_give_up &
    local status watch=$!
    while :; do
        signalled='' status=0
        wait "$step_pid" 2>/dev/null || status=$? # without the shell's own word of a killed srun
        if [ -z "$signalled" ]; then break; fi # else a signal has ended the wait, not the step
    done
    kill -KILL "$watch" 2>/dev/null || true
    wait "$watch" 2>/dev/null || true
    if [ -e "$scratch/given up" ]; then warned=yes; fi # Slurm would requeue it for a dead node
    rm -rf "$scratch"
    if [ "$status" -ne 0 ] && [ -n "$warned" ]; then job_requeue; fi
    exit "$status"
}

# End srun some time after a task of this node has failed. By itself it waits for the word of every
# task, and that of a node out of reach never comes: until Slurm takes the node for dead
# (SlurmdTimeout, 300 s as a rule), or for ever where the node reaches slurmctld, or this one does not.
job_give_up() {
    local word until helpers=()
    trap '' INT USR1
    exec 9<>"$scratch/failed" # both directions: it never ends
    until read -r -t 60 word <&9; do
        if ! kill -0 "$$" 2>/dev/null; then return 0; fi # killed, and could not end this
    done
    until=$((SECONDS + give_up_s))
    while ((SECONDS < until)); do read -r -t "$((until - SECONDS))" word <&9 || true; done
    echo "$wrapper: a task on $(hostname) failed $give_up_s s ago, and srun still waits for others: \
given up, a node is out of reach" >&2
    : >"$scratch/given up"
    # and its helper, which would try to reach slurmctld as long again
    read -ra helpers <"/proc/$step_pid/task/$step_pid/children" || true
    kill -KILL "$step_pid" "${helpers[@]}"
}

# Have the ranks finish their reports and end.
job_stop() {
    local id name i
    echo "$wrapper: $1: the ranks are to end" >&2
    for ((i = 0; i < 10; i++)); do # Slurm may be about to make the step
        while read -r id name; do
            if [ "$name" != "$step_name" ]; then continue; fi
            # one that Slurm is ending by itself cannot be signalled any more
            scancel --signal=TERM "$id" 2>/dev/null || true
            return 0 # in a trap a bare return has the status of what the signal broke off
        done < <(squeue --noheader --steps --jobs="$SLURM_JOB_ID" --format='%i %j')
        if ! kill -0 "$step_pid" 2>/dev/null; then return 0; fi
        sleep 0.5
    done
}

job_requeue() {
    local count=${SLURM_RESTART_COUNT:-0}
    if [ "${ENVIRONMENT:-}" != BATCH ]; then return; fi # but salloc
    if ((count >= max_requeues)); then
        echo "$wrapper: not requeued again: --max-requeues is $max_requeues" >&2
        return
    fi
    # a node that is cut off asks for minutes
    if ! timeout 5 scontrol --oneliner show job "$SLURM_JOB_ID" | grep -q ' Requeue=1 '; then
        echo "$wrapper: not requeued: sbatch --no-requeue, or slurmctld does not answer" >&2
        return
    fi
    echo "$wrapper: requeued, $((count + 1)) of at most $max_requeues times" >&2
    timeout 60 scontrol requeue "$SLURM_JOB_ID"
}
