#!/usr/bin/env bash
# Gives a task of a Slurm step torchrun's variables, made from Slurm's own, and becomes the command:
#
#     srun --ntasks-per-node=8 bash launch/slurm_env.sh python3 benchmarks/ddp_sweep.py
#     srun --ntasks-per-node=1 bash launch/slurm_env.sh torchrun --nproc-per-node=8 SCRIPT
#
# A script reads RANK, WORLD_SIZE, MASTER_ADDR and so on; torchrun reads PET_NNODES and so on, and
# sets the others anew for its ranks. Ranks follow the order of the nodes. MASTER_ADDR, MASTER_PORT
# and OMP_NUM_THREADS stay as they are where they are set.
set -euo pipefail

refuse() {
    echo "slurm_env.sh: error: $1" >&2
    exit 2
}

tasks=${SLURM_STEP_TASKS_PER_NODE:-}
if [[ -z $tasks ]]; then refuse "this is no Slurm step; start it with srun, in sbatch or salloc"; fi
if [[ $# -eq 0 ]]; then refuse "expected a command, e.g. python3 benchmarks/ddp_sweep.py"; fi
export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID
export WORLD_SIZE=$SLURM_STEP_NUM_TASKS LOCAL_WORLD_SIZE=${tasks%%[(,]*}
if ((WORLD_SIZE != SLURM_STEP_NUM_NODES * LOCAL_WORLD_SIZE)); then
    refuse "expected as many tasks on each node, got $tasks; give srun --ntasks-per-node=N"
fi
if ((RANK != SLURM_NODEID * LOCAL_WORLD_SIZE + LOCAL_RANK)); then
    refuse "rank $RANK is task $LOCAL_RANK of node $SLURM_NODEID; give srun --distribution=block"
fi

# The first node by its name, or by its address in slurm.conf where the name is unknown here: torch
# would look for it for a minute and a half.
if [[ -z ${MASTER_ADDR:-} ]]; then
    MASTER_ADDR=$(scontrol show hostnames "$SLURM_STEP_NODELIST" | sed -n 1p)
    if ! getent ahosts "$MASTER_ADDR" >/dev/null; then
        address=$(scontrol -o show node "$MASTER_ADDR" | sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p')
        MASTER_ADDR=${address:-$MASTER_ADDR}
    fi
fi
# below the ports that the kernel gives out
export MASTER_ADDR MASTER_PORT=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 10000))}
export PET_NNODES=$SLURM_STEP_NUM_NODES PET_NODE_RANK=$SLURM_NODEID
export PET_MASTER_ADDR=$MASTER_ADDR PET_MASTER_PORT=$MASTER_PORT
export PET_RDZV_ID=$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}
# ranks that share a node share its cores, as under torchrun
if ((LOCAL_WORLD_SIZE > 1)); then
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}
fi
exec "$@"
