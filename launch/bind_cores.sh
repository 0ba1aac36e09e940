#!/usr/bin/env bash
# Binds each rank of a node to an equal share of the CPUs available to this process, and runs the
# command. CPUs are logical CPUs, as numbered by Linux. With SMT (hyper-threading), a core counts as
# two of them, and two ranks may share a core, depending on the numbering, which lscpu -e shows.
#
# For example:
#
#     torchrun --no-python --nproc-per-node 2 launch/bind_cores.sh python benchmarks/ddp_sweep.py
#
# Use it on CPUs. On GPUs, use torchrun's --numa-binding.
set -euo pipefail

: "${LOCAL_RANK:?start this script with torchrun --no-python}"
: "${LOCAL_WORLD_SIZE:?start this script with torchrun --no-python}"
: "${1:?expected a command, e.g. python benchmarks/ddp_sweep.py}"
allowed=$(taskset -pc $$) # pid 7's current affinity list: 0-3,8
cpus=()
IFS=, read -ra ranges <<<"${allowed##*: }"
for range in "${ranges[@]}"; do
    for ((cpu = ${range%-*}; cpu <= ${range#*-}; cpu++)); do cpus+=("$cpu"); done
done
share=$((${#cpus[@]} / LOCAL_WORLD_SIZE))
if ((share == 0)); then
    got="${#cpus[@]} CPUs for $LOCAL_WORLD_SIZE ranks"
    echo "bind_cores.sh: error: $got; start fewer ranks per node" >&2
    exit 2
fi
part=$(IFS=,; echo "${cpus[*]:LOCAL_RANK * share:share}")
exec taskset -c "$part" "$@"
