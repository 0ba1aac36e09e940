#!/usr/bin/env bash
# Everything once on one GPU, in two parts of 9 minutes: PART=1 tests/gpu/plan.sh [LANES]
#
# It tests whether things work, not how fast: LANES tasks (6, on the CPU 2) run at the same time.
# share_gpu.py lets several NCCL ranks share the GPU. Their kernels spin while they wait for each
# other, taking turns with everything else on the GPU, so only one such task runs at a time. The
# most important tasks come first.
#
#   $OUT/verdicts.txt   ok, WRONG or "left out"; exit status; seconds; task; first reason in its log
#   $OUT/NAME.log       the output of a task; its reports (.jsonl) are in the same folder
#
# The exit status is 1 unless all tasks are ok. Variables:
#   OUT (gpu-plan)      folder of all files
#   DEVICE (cuda)       cpu: only the tasks that need no GPU, to try the plan itself
#   ONLY (.)            a regular expression: only tasks whose names match
#   PART                1 or 2: half of the tasks; without it all of them, in 18 minutes
#   SECONDS_IN_ALL (540 a part)   tasks that would start later are left out, others are cut short
#   SECONDS_PER_TASK    limit of each task, instead of its own
#   DRY_RUN=1           print the commands
#   PYTHON (python3)
set -euo pipefail

mkdir -p "${OUT:=gpu-plan}"
OUT=$(cd "$OUT" && pwd)
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
device=${DEVICE:-cuda} only=${ONLY:-.} part=${PART:-}
seconds_in_all=${SECONDS_IN_ALL:-$((part ? 540 : 1080))}
export PYTHON=${PYTHON:-python3} PYTHONUNBUFFERED=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export TORCHINDUCTOR_COMPILE_THREADS=4
reserved=40 # seconds that a task may need to end after its limit
if [[ $part != 1 ]]; then reserved=90; fi # and for the last task
lanes=${1:-6} dtypes=fp32,tf32,bf16
export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-0}
if [[ $device == cpu ]]; then
    CUDA_VISIBLE_DEVICES=
    lanes=${1:-2} dtypes=fp32,bf16
fi
verdicts=$OUT/verdicts.txt
if [[ -z ${DRY_RUN:-} ]]; then : >"$verdicts"; fi

# ranks N FILE FLAGS...: N ranks of a script. nccl does the same with NCCL on one GPU.
ranks() { "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "$@"; }
nccl() { ranks "$1" tests/gpu/share_gpu.py "${@:2}"; }
slow_to_give_up() {
    TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC=15000 TORCH_DIST_USE_NCCL2=0 nccl "$@"
}
record_and_replay() {
    nccl 2 examples/record_collectives.py "$1" && nccl 2 benchmarks/replay.py "$1" --iters 6
}
export -f ranks nccl slow_to_give_up record_and_replay

# task NAME SECONDS EXPECTED COMMAND...: run the command as soon as a lane for its kind is free.
# EXPECTED is `passes`, or a text: then the command must fail with the text in its log.
task() {
    local name=$1 limit=$2 expected=$3 its_kind=other words
    shift 3
    case $1 in nccl | slow_to_give_up | record_and_replay) its_kind=nccl ;; esac
    if [[ $its_kind != "$kind" || ! $name =~ $only ]]; then return; fi
    if [[ -n ${DRY_RUN:-} ]]; then
        words=$(printf '%q ' "$@")
        echo "$words" # one call, so that lines of two lanes do not mix
        return
    fi
    while (($(jobs -rp | wc -l) >= lanes)); do wait -n || true; done
    run_task "$name" "$limit" "$expected" "$@" &
}

cuda_task() {
    if [[ $device == cuda ]]; then task "$@"; fi
}

# run_task NAME SECONDS EXPECTED COMMAND...: run the command now and write its verdict.
run_task() {
    local name=$1 limit=${SECONDS_PER_TASK:-$2} expected=$3 began=$SECONDS left=$((seconds_in_all - reserved - SECONDS))
    local log=$OUT/$name.log status=0 child verdict=WRONG reason
    shift 3
    if ((left < 15)); then
        printf 'left out  -    0 s  %s\n' "$name" >>"$verdicts"
        return
    fi
    # torchrun needs up to 30 s to end its ranks. If timeout killed it earlier, they would go on.
    # bash gets the signal, too: because of the trap it waits for torchrun.
    timeout -k 40 $((limit < left ? limit : left)) \
        bash -c 'trap : TERM; "$@"' "$name" "$@" >"$log" 2>&1 &
    child=$!
    trap 'kill "$child"; wait "$child"' TERM
    wait "$child" || status=$?
    if [[ $expected == passes ]]; then
        if ((status == 0)); then verdict=ok; fi
    elif ((status != 0 && status != 124)) && grep -qF -e "$expected" "$log"; then
        verdict=ok
    fi
    reason=$(grep -aEm1 'failed: |HANG: |[Ee]rror: |not fit|lost a peer' "$log" || true)
    printf '%-8s %3d %4d s  %-11s %.120s\n' \
        "$verdict" "$status" $((SECONDS - began)) "$name" "$reason" >>"$verdicts"
}

# Ctrl-C and kill end the running tasks.
end_with_its_jobs() {
    # shellcheck disable=SC2046 # a word for each job
    trap 'kill $(jobs -rp) 2>/dev/null || true; wait; exit 130' INT TERM
}
end_with_its_jobs

# run_tasks KIND LANES: run the tasks of a kind, LANES at the same time.
run_tasks() {
    kind=$1 lanes=$2
    end_with_its_jobs
    if [[ $part != 2 ]]; then first_part; fi
    if [[ $part != 1 ]]; then second_part; fi
    wait
}

b=benchmarks
small=(--model mobilenet_v3_small --image-size 64 --batch-size 8 --iters 12 --warmup-iters 2)
nano=(--model decoder-nano --iters 6 --warmup-iters 1)
short=(--iters 12 --warmup-iters 2)
few=(-b 64 -e 64K -f 1024 -n 4 --max-seconds 0.05)
fails=(tests/inject.py step-raises "$b/ddp_sweep.py" "${small[@]}" --world-sizes 2)
fails+=(--no-breakdown --comm-hook "none,fp16")
injected='injected: no kernel for this step'
pipelines=pp2:gpipe,pp2:1f1b,pp2:interleaved,pp2:izb,pp2:zbv

first_part() {
    cuda_task probe 100 passes "$PYTHON" tests/gpu/probe.py
    cuda_task compile 420 passes ranks 1 $b/compile_sweep.py --models decoder-10m --strategies all \
        --backends eager,inductor --dtype bf16 "${short[@]}" --json "$OUT/compile.jsonl"
    task coll 240 passes ranks 1 $b/collectives.py --collective all -b 64 -e 64K -f 32 -n 4 \
        --max-seconds 0.05 -d float32,bfloat16,int8 -o sum,avg,max --json "$OUT/coll.jsonl"
    # A case fails: its communicators are aborted, and the next case is measured.
    task two_fail 100 "$injected" nccl 2 "${fails[@]}" --timeout 40
    task four_fail 120 "$injected" nccl 4 tests/inject.py step-raises $b/parallel_sweep.py \
        --model decoder-nano --mesh dp2tp2,dp4 --iters 12 --no-breakdown --timeout 40
    task four_twin 120 'injected: no memory for a twin' nccl 4 tests/inject.py twin-raises \
        $b/parallel_sweep.py --model decoder-nano --mesh dp2tp2,dp4 --iters 12 --timeout 40
    task two_par 280 passes nccl 2 $b/parallel_sweep.py "${nano[@]}" \
        --mesh ddp2,dp2,tp2,cp2,$pipelines --timeout 60 --json "$OUT/two_par.jsonl"
    cuda_task two_ring 100 passes nccl 2 $b/parallel_sweep.py "${nano[@]}" --mesh cp2:ring,cp2 \
        --timeout 60
    # Does torch's own NCCL watchdog stop the peers of a failed case for 60 s, as its source suggests?
    cuda_task two_stall 150 "$injected" slow_to_give_up 2 "${fails[@]}" --timeout 130
    cuda_task two_hang 90 'does not answer' nccl 2 tests/inject.py stops $b/ddp_sweep.py \
        "${small[@]}" --timeout 20 --world-sizes 2
    task two_ep 100 passes nccl 2 $b/parallel_sweep.py "${nano[@]}" --mesh ep2,dp2 --timeout 60
    task ddp 150 passes ranks 1 $b/ddp_sweep.py "${small[@]}" --dtype $dtypes \
        --comm-hook none,fp16,bf16 --json "$OUT/ddp.jsonl"
    task ddp_turns 100 passes ranks 1 $b/ddp_sweep.py "${small[@]}" --comm-hook none,bf16 --interleave
    task ckpt 150 passes ranks 1 $b/checkpoint_sweep.py --modes all --strategy fsdp2,ddp \
        --model decoder-nano --iters 2 --json "$OUT/ckpt.jsonl"
    task input 100 passes ranks 1 $b/input_sweep.py --samples 64 --workers 1 "${short[@]}"
    cuda_task ddp_gloo2 150 passes ranks 2 $b/ddp_sweep.py "${small[@]}" --dtype fp32,bf16 \
        --comm-hook none,bf16 --backend gloo
    cuda_task coll_gloo2 150 passes ranks 2 $b/collectives.py --collective all "${few[@]}" \
        -d float32,bfloat16 --backend gloo
    task rpc 100 passes ranks 2 $b/rpc_latency.py --device "$device" --server-device "$device" \
        --sizes 4,64K,4M --iters 12
    cuda_task rpc_cpu 100 passes ranks 2 $b/rpc_latency.py --device cuda --server-device cpu \
        --sizes 4,64K,4M --iters 12
}

second_part() {
    task two_coll 200 passes nccl 2 $b/collectives.py --collective all -b 64 -e 1M -f 128 -n 4 \
        --max-seconds 0.2
    task two_p2p 100 passes nccl 2 $b/p2p_matrix.py --size 1M -n 4 --max-seconds 0.3
    cuda_task two_graphs 100 'injected: a graph is broken' nccl 2 tests/inject.py graph-raises \
        $b/collectives.py "${few[@]}" -G 3 --timeout 40
    cuda_task ps_mix 150 passes ranks 4 $b/parameter_server.py --ncudatrainer 2 --ncudaserver 1 \
        --backend gloo "${short[@]}"
    cuda_task ps_nccl 120 passes ranks 3 $b/parameter_server.py --ncudatrainer 1 --nserver 1 \
        "${short[@]}"
    task ps_cpu 120 passes ranks 3 $b/parameter_server.py --ntrainer 1 --nserver 1 "${short[@]}"
    task ddprpc 120 passes nccl 4 $b/ddp_rpc.py --device "$device" --server-device "$device" \
        "${short[@]}"
    task bups 100 passes nccl 4 $b/batch_update_ps.py --device "$device" \
        --server-device "$device" "${short[@]}"
    task two_check 100 passes nccl 2 $b/node_check.py --budget 60 --fail-on wrong
    task check 80 passes ranks 1 $b/node_check.py --budget 40 --fail-on wrong --json "$OUT/check.jsonl"
    task replay 120 passes record_and_replay "$OUT/trace"
    cuda_task coll_G 150 passes ranks 1 $b/collectives.py --collective all "${few[@]}" -G 3
    cuda_task coll_big 100 passes ranks 1 $b/collectives.py --collective all_reduce,all_to_all \
        -b 256M -e 4G -f 16
    task par 100 passes ranks 1 $b/parallel_sweep.py --mesh ddp1,dp1 --dtype bf16 --iters 12
    task plain 100 passes ranks 1 $b/ddp_sweep.py "${small[@]}" --no-breakdown
    cuda_task graphs 120 passes ranks 1 $b/compile_sweep.py --models decoder-10m --strategies none \
        --backends eager,cudagraphs --iters 12
    task toy 120 passes ranks 1 $b/compile_sweep.py --models toy-small --strategies none,ddp \
        --backends eager --iters 12
    cuda_task assert 60 'can no longer use its GPU' ranks 1 tests/inject.py device-assert \
        $b/ddp_sweep.py "${small[@]}"
    task stops 90 'does not answer' ranks 2 tests/inject.py stops $b/ddp_sweep.py "${small[@]}" \
        --backend gloo --timeout 20 --world-sizes 2
    cuda_task refused 60 'NCCL requires one GPU per rank' ranks 2 $b/p2p_matrix.py
    cuda_task p2p_gloo 60 passes ranks 2 $b/p2p_matrix.py --backend gloo --size 1M
    for example in ddp_exposed allreduce_busbw who_is_slow tp_exposed pp_bubble dcp_stall \
        input_wait fsdp_exposed compiled_ddp ddp_rpc parameter_server batch_update_ps; do
        task "$example" 60 passes nccl 2 examples/$example.py
    done
}

run_tasks nccl 1 &
run_tasks other $((lanes > 1 ? lanes - 1 : 1)) &
wait
if [[ $part != 1 ]]; then
    kind=other reserved=0 # the last task needs all memory of the GPU
    cuda_task oom 60 OutOfMemoryError ranks 1 $b/ddp_sweep.py --models resnet152,mobilenet_v3_small \
        --batch-size 2048 --iters 6 --no-breakdown --image-size 224
    wait
fi

if [[ -n ${DRY_RUN:-} ]]; then exit; fi
sort -k5 -o "$verdicts" "$verdicts"
cat "$verdicts"
ok=$(grep -c '^ok ' "$verdicts" || true) all=$(wc -l <"$verdicts")
echo "$ok of $all tasks are ok; $verdicts"
((ok == all && all > 0))
