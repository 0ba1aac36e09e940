# shellcheck shell=bash
# torchrun's variables for a task of a Slurm step, from Slurm's own. Source it in what srun starts:
#
#     . launch/slurm_env.sh
#
# or let it start the command, with one task a rank, or one task a node and torchrun:
#
#     srun --ntasks-per-node=8 bash launch/slurm_env.sh python3 benchmarks/ddp_sweep.py
#     srun --ntasks-per-node=1 bash launch/slurm_env.sh torchrun --nproc-per-node=8 benchmarks/ddp_sweep.py
#
# It sets RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, GROUP_RANK, GROUP_WORLD_SIZE, MASTER_ADDR
# and MASTER_PORT; where the site has not: the interface for gloo and TensorPipe, and 1 thread a
# rank (or --cpus-per-task of them). It obeys
#
#     LAUNCH_MASTER_ADDR   the first node's address, where its name will not do
#     LAUNCH_PEER          the second node's: the first one finds its interface by it
#     LAUNCH_MASTER_PORT   instead of a port from the numbers of job and step
#     LAUNCH_VENV          a virtual environment to activate
#     LAUNCH_FAILED        HOST:FIFO; on that host a command that fails leaves word there

slurm_env_error() {
    echo "slurm_env.sh: $1" >&2
    return 2
}

# The name of the first (1) or second (2) node of the step.
slurm_env_node() {
    scontrol show hostnames "${SLURM_STEP_NODELIST:-$SLURM_JOB_NODELIST}" | sed -n "$1p"
}

slurm_env() {
    local variable group first=0 node=0
    for variable in SLURM_JOB_ID SLURM_STEP_ID SLURM_PROCID SLURM_LOCALID SLURM_NODEID \
        SLURM_STEP_NUM_TASKS SLURM_STEP_NUM_NODES SLURM_STEP_TASKS_PER_NODE; do
        if [ -z "${!variable:-}" ]; then
            slurm_env_error "$variable is not set; start this with srun, in a job of sbatch or salloc"
            return
        fi
    done
    export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_STEP_NUM_TASKS
    export GROUP_RANK=$SLURM_NODEID GROUP_WORLD_SIZE=$SLURM_STEP_NUM_NODES LOCAL_WORLD_SIZE

    # 8(x3),4 means 8, 8, 8 and 4
    local -a groups
    IFS=, read -ra groups <<<"$SLURM_STEP_TASKS_PER_NODE"
    for group in "${groups[@]}"; do
        local tasks=${group%%(*} times=1
        if [[ $group == *"(x"* ]]; then
            times=${group##*(x}
            times=${times%)}
        fi
        for ((; times > 0; times--, node++)); do
            if ((node < GROUP_RANK)); then first=$((first + tasks)); fi
            if ((node == GROUP_RANK)); then LOCAL_WORLD_SIZE=$tasks; fi
        done
    done
    if ((RANK != first + LOCAL_RANK)); then
        slurm_env_error "rank $RANK is task $LOCAL_RANK of node $GROUP_RANK, whose ranks should \
start at $first; give srun --distribution=block, so that ranks follow the order of the nodes"
        return
    fi

    MASTER_ADDR=${LAUNCH_MASTER_ADDR:-$(slurm_env_node 1)}
    if [ -z "$MASTER_ADDR" ]; then
        slurm_env_error "cannot tell the first node's name without scontrol; set LAUNCH_MASTER_ADDR"
        return
    fi
    # below the ports that the kernel gives out; 64 for each step, since some scripts take several
    MASTER_PORT=${LAUNCH_MASTER_PORT:-$((10000 + (SLURM_JOB_ID * 7 + SLURM_STEP_ID) % 300 * 64))}
    export MASTER_ADDR MASTER_PORT
    slurm_env_interfaces
    # ranks that share a node share its cores, as under torchrun
    if ((LOCAL_WORLD_SIZE > 1)); then
        export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}
    fi
    if [ -n "${LAUNCH_VENV:-}" ]; then
        if [ ! -r "$LAUNCH_VENV/bin/activate" ]; then
            slurm_env_error "no virtual environment at $LAUNCH_VENV on $(hostname)"
            return
        fi
        # shellcheck source=/dev/null
        . "$LAUNCH_VENV/bin/activate"
    fi
}

# By the route to another node: on many machines a host's own name leads to its loopback.
slurm_env_interfaces() {
    if ((GROUP_WORLD_SIZE == 1)) || ! command -v ip >/dev/null; then return 0; fi
    local peer=$MASTER_ADDR address route device=
    if ((GROUP_RANK == 0)); then peer=${LAUNCH_PEER:-$(slurm_env_node 2)}; fi
    address=$(getent ahosts "$peer" | sed 's/ .*//;q') || true
    route=$(ip -o route get "${address:-$peer}" 2>/dev/null) || return 0
    if [[ $route =~ \ dev\ ([^ ]+) ]]; then device=${BASH_REMATCH[1]}; fi
    if [ -z "$device" ] || [ "$device" = lo ]; then return 0; fi
    export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-$device}
    export TP_SOCKET_IFNAME=${TP_SOCKET_IFNAME:-$device}
}

if [ "${BASH_SOURCE[0]}" != "$0" ]; then
    slurm_env # its status is that of the source command
else
    set -euo pipefail
    slurm_env
    if [ $# -eq 0 ]; then slurm_env_error "expected a command, e.g. python3 script.py"; fi
    if ! command -v "$1" >/dev/null; then
        slurm_env_error "no $1 on $(hostname); activate an environment with torch before sbatch, \
or give --venv or --container-image"
    fi
    if [ "$1" = torchrun ]; then
        shift
        export -n RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE # torchrun sets its ranks' own
        # the static rendezvous gives ranks in the order of the nodes; c10d sorts by host name
        set -- torchrun --nnodes="$GROUP_WORLD_SIZE" --node-rank="$GROUP_RANK" \
            --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" --rdzv-id="$SLURM_JOB_ID" "$@"
    fi
    failed=${LAUNCH_FAILED:-}
    if [ "${failed%%:*}" != "$(hostname)" ]; then exec "$@"; fi
    trap : HUP INT TERM USR1 USR2 # Slurm sends them to the command as well: wait for its end
    status=0
    "$@" || status=$?
    fifo=${failed#*:}
    # opened in both directions it does not wait for a reader
    if ((status)) && [ -p "$fifo" ]; then echo failed 1<>"$fifo" || true; fi
    if ((status == 137)); then kill -KILL "$$"; fi # so that srun says it
    exit "$status"
fi
