#!/usr/bin/env bash
# A Prolog of Slurm: fails, so that Slurm drains the node, if node_check.py finds it slow or wrong.
# It has not been tried as a prolog. docs/node_check.md has the settings of slurm.conf.
set -euo pipefail
torchrun=${TORCHRUN:-/opt/torch/bin/torchrun}
limits=(--gpus 8 --min-tflops 600 --min-busbw 350) # examples for 8 x H100: measure your own nodes
cd "${CHECKOUT:-/opt/torchrun-bench}" || exit 0

out=$("$torchrun" --standalone --nproc-per-node 8 benchmarks/node_check.py --budget 40 \
    "${limits[@]}" 2>&1) && exit 0
grep -E '^# (slow|wrong|not fit|no verdict)' <<<"$out" || true
# torchrun turns every status into 1; its summary has the status of the rank
grep -q 'exitcode *: 4 ' <<<"$out" && exit 0 # no verdict, e.g. because other processes were running
exit 1
