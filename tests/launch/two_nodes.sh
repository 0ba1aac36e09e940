#!/usr/bin/env bash
# Two nodes with one rank each on this machine, connected by a link of a given rate, as in
# docs/tutorial.md. Needs root. The rate is written as for tc.
#
#     tests/launch/two_nodes.sh 1gbit benchmarks/ddp_sweep.py --models resnet18
set -euo pipefail

rate=${1:?expected a rate and a script, e.g. 1gbit benchmarks/ddp_sweep.py}
shift
network=10.78.0
spaces=("bench1-$$" "bench2-$$")
ranks=()
trap 'kill "${ranks[@]}" 2>/dev/null || true
for space in "${spaces[@]}"; do ip netns del "$space" 2>/dev/null || true; done' EXIT

for space in "${spaces[@]}"; do ip netns add "$space"; done
ip link add eth0 netns "${spaces[0]}" type veth peer name eth0 netns "${spaces[1]}"
for node in 1 2; do
    space=${spaces[node - 1]}
    ip -n "$space" link set lo up
    ip -n "$space" address add "$network.$node/24" dev eth0
    ip -n "$space" link set eth0 up
    tc -n "$space" qdisc add dev eth0 root tbf rate "$rate" burst 256kb latency 50ms
done
for node in 1 2; do
    # each node has its own host name
    ip netns exec "${spaces[node - 1]}" unshare --uts sh -c "hostname node$node; exec \"\$@\"" run \
        torchrun --nnodes 2 --node-rank "$((node - 1))" --nproc-per-node 1 \
        --master-addr "$network.1" --master-port 29500 "$@" &
    ranks+=("$!")
done
status=0
for rank in "${ranks[@]}"; do wait "$rank" || status=$?; done
exit "$status"
