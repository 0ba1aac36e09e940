#!/usr/bin/env bash
# Sets torchrun's variables in a process started by mpirun or flux, derived from the launcher's own,
# and runs the command:
#
#     mpirun -n 16 --map-by ppr:8:node bash launch/mpi_env.sh python3 benchmarks/collectives.py
#     mpirun -n 2 --map-by ppr:1:node bash launch/mpi_env.sh torchrun --nproc-per-node=8 SCRIPT
#     flux run -N 2 -n 16 bash launch/mpi_env.sh python3 benchmarks/collectives.py
#
# Supports Open MPI, MPICH, Intel MPI, MVAPICH, PALS (mpiexec of Cray), flux and jsrun, whose
# variables are listed in launchers.txt. No MPI library is loaded. A script reads RANK, WORLD_SIZE
# and so on. torchrun reads PET_NNODES and so on, and sets RANK etc. for the ranks that it starts.
# MASTER_ADDR, MASTER_PORT and OMP_NUM_THREADS are kept if they are already set.
set -euo pipefail

refuse() {
    echo "mpi_env.sh: error: $1" >&2
    exit 2
}

if [[ $# -eq 0 ]]; then refuse "expected a command, e.g. python3 benchmarks/collectives.py"; fi

# The launcher's variables: rank, world size, local rank, local world size (flux: number of nodes).
# srun also sets PMI_RANK and PMI_SIZE, but never MPI_LOCALRANKID, which MPICH and Intel MPI set.
launcher='' names=()
while read -r name marker rank size local_rank local_size _; do
    if [[ -n $name && $name != '#'* && -n ${!marker:-} ]]; then
        launcher=$name names=("$rank" "$size" "$local_rank" "$local_size")
        break
    fi
done <"$(dirname "${BASH_SOURCE[0]}")/launchers.txt"
case $launcher in
Slurm) refuse "this process was started by srun; use launch/slurm_env.sh" ;;
PALS) # older versions do not set PALS_SIZE; PBS_NODEFILE has one line per node
    if [[ -z ${PALS_SIZE:-} && -r ${PBS_NODEFILE:-} && ${PALS_LOCAL_SIZE:-} =~ ^[0-9]+$ ]]; then
        PALS_SIZE=$(($(wc -l <"$PBS_NODEFILE") * 10#$PALS_LOCAL_SIZE))
    fi
    ;;
'' | PMI)
    if [[ -z ${PMIX_RANK:-} ]]; then
        refuse "not started by a supported launcher (mpirun, mpiexec, flux, jsrun); \
e.g. mpirun -n 2 bash launch/mpi_env.sh $*"
    fi
    # the launcher sets only the rank; the user sets the sizes, and ranks fill one node after the
    # other
    names=(PMIX_RANK WORLD_SIZE LOCAL_WORLD_SIZE LOCAL_WORLD_SIZE)
    ;;
esac
numbers=()
for name in "${names[@]}"; do
    number=${!name:-}
    if ! [[ $number =~ ^[0-9]+$ ]]; then refuse "expected a number in $name, got '$number'"; fi
    numbers+=("$((10#$number))") # 08 is not octal
done
export RANK=${numbers[0]} WORLD_SIZE=${numbers[1]}
export LOCAL_RANK=${numbers[2]} LOCAL_WORLD_SIZE=${numbers[3]}
for i in 1 3; do # the sizes; for flux, the number of nodes
    if ((numbers[i] == 0)); then refuse "expected at least 1 in ${names[i]}, got '${!names[i]}'"; fi
done
case ${names[0]} in
FLUX_TASK_RANK) LOCAL_WORLD_SIZE=$((WORLD_SIZE / LOCAL_WORLD_SIZE)) ;;
PMIX_RANK) LOCAL_RANK=$((RANK % LOCAL_WORLD_SIZE)) ;;
esac
if ((WORLD_SIZE % LOCAL_WORLD_SIZE || RANK % LOCAL_WORLD_SIZE != LOCAL_RANK)); then
    refuse "rank $RANK of $WORLD_SIZE is rank $LOCAL_RANK of $LOCAL_WORLD_SIZE on $(hostname): \
ranks must fill one node after the other, with the same number on each; use mpirun --map-by \
ppr:N:node or -ppn N"
fi

# HOST:PORT of MPICH's mpirun, read from the command line of the process it starts on each node
control=$(tr '\0' '\n' <"/proc/$PPID/cmdline" | sed -n '/^--control-port$/{n;p}') || true

# The host of rank 0. On several nodes, the candidates are the host of mpirun and flux's first host.
# A candidate is accepted if it is this host for the ranks of the first node, and another host for
# the rest.
if [[ -z ${MASTER_ADDR:-} && $WORLD_SIZE -eq $LOCAL_WORLD_SIZE ]]; then
    MASTER_ADDR=127.0.0.1
elif [[ -z ${MASTER_ADDR:-} ]]; then
    hosts=${OMPI_MCA_orte_hnp_uri:-} # set by Open MPI 4: NUMBER;tcp://ADDRESS,ADDRESS:PORT...
    hosts=${hosts#*tcp://}
    hosts=${hosts%%:*},${control%:*}
    case $launcher in
    flux) hosts=$(flux hostlist --nth=0 local 2>/dev/null) || true ;;
    PALS) hosts=$(head -n 1 "${PBS_NODEFILE:-/dev/null}" 2>/dev/null) || true ;;
    esac
    for host in ${hosts//,/ }; do
        address=$(getent ahostsv4 "$host" | sed -n '1s/ .*//p') || continue # cannot be resolved here
        here=0
        if [[ $address == 127.* || " $(hostname -I)" == *" $address "* ]]; then here=1; fi
        if ((here == (RANK < LOCAL_WORLD_SIZE))); then
            MASTER_ADDR=$host
            break
        fi
    done
    if [[ -z ${MASTER_ADDR:-} ]]; then
        refuse "rank $RANK on $(hostname) cannot determine the host of rank 0; set MASTER_ADDR, e.g. \
mpirun -x MASTER_ADDR=node1 (MPICH, Intel MPI: -genv MASTER_ADDR node1)"
    fi
fi

# The port is derived from the job's identity, or from its allocation; it lies below the kernel's
# range of ephemeral ports.
job=${PMIX_NAMESPACE:-${FLUX_JOB_ID:-${PALS_APID:-${control:-${SLURM_JOB_ID:-${PBS_JOBID:-}}}}}}
job=${job:-${LSB_JOBID:-}}
if [[ -z ${MASTER_PORT:-} ]]; then
    if [[ -z $job ]]; then
        refuse "the launcher sets no job ID from which to derive a port; set MASTER_PORT, e.g. \
mpirun -genv MASTER_PORT 29400"
    fi
    job=$(cksum <<<"$job")
    MASTER_PORT=$((20000 + ${job%% *} % 10000))
fi
export MASTER_ADDR MASTER_PORT
export PET_NNODES=$((WORLD_SIZE / LOCAL_WORLD_SIZE)) PET_NODE_RANK=$((RANK / LOCAL_WORLD_SIZE))
export PET_MASTER_ADDR=$MASTER_ADDR PET_MASTER_PORT=$MASTER_PORT PET_RDZV_ID=$MASTER_PORT
# as under torchrun, ranks on the same node share its cores
if ((LOCAL_WORLD_SIZE > 1)); then export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}; fi
case ${names[0]} in PMI_RANK | OMPI_COMM_WORLD_RANK) ;; *) exec "$@" ;; esac

# MPICH does not report which rank was killed, and Open MPI reports a rank that was killed because it
# hung like one that ran out of memory. So a shell waits for the command, and reports how it ended.
# Signals sent by mpirun reach both. Hang detection writes the reason into the file of a rank on the
# same node before it kills that rank, which it recognizes by the environment of this shell.
wait_and_report() {
    trap : INT TERM
    local status=0 folder=${TORCHELASTIC_ERROR_FILE%/*} hung=0
    if ! (umask 077 && mkdir -p "$folder") || ! [[ -O ${folder%/*} ]]; then
        unset TORCHELASTIC_ERROR_FILE
    fi
    "$@" || status=$?
    if grep -qs '"HANG: ' "${TORCHELASTIC_ERROR_FILE:-}"; then hung=1; fi
    if [[ -n ${TORCHELASTIC_ERROR_FILE:-} ]]; then rm -rf "$folder"; fi
    rmdir "${folder%/*}" 2>/dev/null || true
    if ((status > 128 && status != 130 && status != 143)); then
        local how
        how=SIG$(kill -l "$status")
        if ((hung)); then how="ended because it hung" status=3; fi
        echo "mpi_env.sh: rank $RANK on $(hostname): $how" >&2
        if ((!hung)); then kill -KILL $$; fi
    fi
    if ((status == 3)) && [[ -z ${OMPI_COMM_WORLD_RANK:-} ]]; then
        sleep 5 # the other ranks print their stacks
        kill -KILL $$ # MPICH ends the other ranks after a signal, but not after an exit status
    fi
    exit "$status"
}
export TORCHELASTIC_ERROR_FILE=${TMPDIR:-/tmp}/mpi_env-$UID-$PPID/$LOCAL_RANK/error.json
exec bash -c "$(declare -f wait_and_report); wait_and_report \"\$@\"" mpi_env.sh "$@"
