#!/usr/bin/env bash
# Binds each rank of a node to an equal part of the cores that this process has, and runs the command:
#
#     torchrun --no-python --nproc-per-node 2 launch/bind_cores.sh python benchmarks/ddp_sweep.py
#
# For CPUs; on GPUs torchrun has --numa-binding.
set -euo pipefail

: "${LOCAL_RANK:?start this by torchrun --no-python}" "${LOCAL_WORLD_SIZE:?start this by torchrun}"
: "${1:?expected a command, e.g. python benchmarks/ddp_sweep.py}"
allowed=$(taskset -pc $$) # pid 7's current affinity list: 0-3,8
cores=()
IFS=, read -ra ranges <<<"${allowed##*: }"
for range in "${ranges[@]}"; do
    for ((core = ${range%-*}; core <= ${range#*-}; core++)); do cores+=("$core"); done
done
share=$((${#cores[@]} / LOCAL_WORLD_SIZE))
if ((share == 0)); then
    echo "bind_cores.sh: error: ${#cores[@]} cores for $LOCAL_WORLD_SIZE ranks; start fewer a node" >&2
    exit 2
fi
part=$(IFS=,; echo "${cores[*]:LOCAL_RANK * share:share}")
exec taskset -c "$part" "$@"
