#!/usr/bin/env bash
# Checks nodes with node_check.py in a job of its own, then submits a job without the bad ones:
#     launch/check_and_submit.sh 16 train.sbatch
# GPUS per node (8); nothing is submitted if more than MOST_EXCLUDED hosts (4) would be excluded.
set -euo pipefail
nodes=$1 gpus=${GPUS:-8} bad=bad.txt # in a folder that the first node of the job also sees
shift

rm -f "$bad" # with status 2, 3 or 4 nothing is written, and an older file would remain
status=0
sbatch --wait -N "$nodes" --gpus-per-node "$gpus" "$(dirname "$0")/slurm_srun.sbatch" \
    benchmarks/node_check.py --gpus "$gpus" --exclude-file "$bad" || status=$?
if [ "$status" -gt 1 ] || [ ! -e "$bad" ]; then
    echo "not submitted: the nodes were not checked, or there is no verdict: status $status" >&2
    exit 1
elif [ "$(tr ',' '\n' <"$bad" | wc -l)" -gt "${MOST_EXCLUDED:-4}" ]; then
    echo "not submitted: $bad excludes more than ${MOST_EXCLUDED:-4} hosts" >&2
    exit 1
fi
hosts=$(cat "$bad")
sbatch ${hosts:+"--exclude=$hosts"} "$@"
