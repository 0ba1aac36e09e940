#!/usr/bin/env bash
# Sets torchrun's variables in a task of a Slurm step, derived from Slurm's own, and executes the
# command. Inside a job with GPUs:
#
#     srun --ntasks-per-node=8 bash launch/slurm_env.sh python3 benchmarks/ddp_sweep.py
#     srun --ntasks-per-node=1 bash launch/slurm_env.sh torchrun --nproc-per-node=8 SCRIPT
#
# A script reads RANK, WORLD_SIZE, MASTER_ADDR and so on. torchrun reads PET_NNODES and so on, and
# sets RANK etc. for the ranks that it starts. Ranks follow the order of the nodes. MASTER_ADDR,
# MASTER_PORT and OMP_NUM_THREADS are kept if they are already set.
set -euo pipefail

refuse() {
    echo "slurm_env.sh: error: $1" >&2
    exit 2
}

tasks=${SLURM_STEP_TASKS_PER_NODE:-}
if [[ -z $tasks ]]; then refuse "not running in a Slurm step; start it with srun, in sbatch or salloc"; fi
if [[ $# -eq 0 ]]; then refuse "expected a command, e.g. python3 benchmarks/ddp_sweep.py"; fi
for name in SLURM_JOB_ID SLURM_PROCID SLURM_LOCALID SLURM_NODEID \
    SLURM_STEP_NUM_TASKS SLURM_STEP_NUM_NODES; do
    if ! [[ ${!name:-} =~ ^[0-9]+$ ]]; then refuse "expected a number in $name, got '${!name:-}'"; fi
done
export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID
export WORLD_SIZE=$SLURM_STEP_NUM_TASKS LOCAL_WORLD_SIZE=${tasks%%[(,]*}
if ((WORLD_SIZE != SLURM_STEP_NUM_NODES * LOCAL_WORLD_SIZE)); then
    refuse "expected the same number of tasks on each node, got $tasks; use srun --ntasks-per-node=N"
fi
if ((RANK != SLURM_NODEID * LOCAL_WORLD_SIZE + LOCAL_RANK)); then
    refuse "rank $RANK is task $LOCAL_RANK of node $SLURM_NODEID, but ranks must fill one node after \
the other; use srun --distribution=block"
fi

# The first host of a Slurm host list such as node[001-002,007],gpu-1: here node001. It does not use
# scontrol, which is missing in containers: it keeps the first number of each bracket, up to the
# first comma.
first_host() {
    sed 's/\[\([^],-]*\)[^]]*\]/\1/g; s/,.*//' <<<"$1"
}

# The name of the first node. If it cannot be resolved here, use the node's address in slurm.conf,
# provided that scontrol is available; torch would retry the name for a minute and a half.
if [[ -z ${MASTER_ADDR:-} ]]; then
    MASTER_ADDR=$(first_host "$SLURM_STEP_NODELIST")
    if ! getent ahosts "$MASTER_ADDR" >/dev/null; then
        address=$(scontrol -o show node "$MASTER_ADDR" 2>/dev/null |
            sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p') || true
        MASTER_ADDR=${address:-$MASTER_ADDR}
    fi
fi
# below the kernel's range of ephemeral ports
export MASTER_ADDR MASTER_PORT=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 10000))}
export PET_NNODES=$SLURM_STEP_NUM_NODES PET_NODE_RANK=$SLURM_NODEID
export PET_MASTER_ADDR=$MASTER_ADDR PET_MASTER_PORT=$MASTER_PORT
export PET_RDZV_ID=$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}
# as under torchrun, ranks on the same node share its cores
if ((LOCAL_WORLD_SIZE > 1)); then
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}
fi
exec "$@"
