#!/usr/bin/env bash
# Runs a script under torchrun on several hosts over ssh, without a scheduler.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: launch/ssh_torchrun.sh HOSTFILE SCRIPT [FLAG...]

    launch/ssh_torchrun.sh hosts benchmarks/ddp_sweep.py --json ddp.jsonl --resume

Each line of HOSTFILE names a host (as for ssh) and its number of ranks. # starts a comment:

    node1 slots=8
    user@node2 slots=8

Starts torchrun on each host, in the current folder, and prints its output prefixed with the name of
the host. Ranks follow the order of the hosts. If a host fails, the other hosts have 10 s to report
the reason. Then their ranks receive SIGTERM, as they do on Ctrl-C or if this script is killed. The
exit status is that of the first host that failed.

Variables:
  SSH_ARGS      additional options of ssh, e.g. "-p 2222"
  PYTHON        the interpreter on all hosts (default: that of the active virtual environment)
  MASTER_ADDR   address of the first host, for the other hosts (default: the address that ssh uses)
  MASTER_PORT   port of the rendezvous (default: 29400)
  DRY_RUN=1     print the commands and exit
OMP_NUM_THREADS, CUDA_VISIBLE_DEVICES, NCCL_*, GLOO_*, TP_*, TORCH_*, UCX_* and FI_* are forwarded.
TEXT
}

refuse() {
    echo "ssh_torchrun.sh: error: $1" >&2
    exit 2
}

if [[ ${1:-} == -h || ${1:-} == --help ]]; then
    usage
    exit 0
fi
if ((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] < 501)); then
    refuse "requires bash 5.1 or later, got $BASH_VERSION"
fi
if [[ $# -lt 2 ]]; then refuse "expected HOSTFILE SCRIPT; see launch/ssh_torchrun.sh --help"; fi
if [[ ! -r $1 ]]; then refuse "cannot read host file '$1'"; fi
if [[ ! -e $2 ]]; then refuse "no script '$2' in $PWD; e.g. benchmarks/ddp_sweep.py"; fi

hosts=() slots=() number=0
while read -r host ranks rest || [[ -n $host ]]; do
    number=$((number + 1))
    if [[ -z $host ]]; then continue; fi
    if ! [[ $host != -* && $ranks =~ ^slots=[1-9][0-9]*$ && -z $rest ]]; then
        got="$host${ranks:+ $ranks}${rest:+ $rest}"
        refuse "$1:$number: expected a host and its ranks, e.g. node1 slots=8, got '$got'"
    fi
    hosts+=("$host") slots+=("${ranks#slots=}")
done < <(sed '1s/^\xef\xbb\xbf//; s/\r$//; s/#.*//' "$1") # also accepts files written on Windows
if [[ ${#hosts[@]} -eq 0 ]]; then refuse "$1 lists no hosts; expected lines such as: node1 slots=8"; fi
shift

# keepalives: a host that does not respond for 30 s has failed
read -ra ssh <<<"ssh -T ${SSH_ARGS:-} -o BatchMode=yes -o ConnectTimeout=10"
ssh+=(-o ServerAliveInterval=10)
master=${MASTER_ADDR:-$("${ssh[@]}" -G -- "${hosts[0]}" | sed -n 's/^hostname //p')}
python=${PYTHON:-${VIRTUAL_ENV:+$VIRTUAL_ENV/bin/}python3}
variables=() passed_on='(NCCL|GLOO|TP|TORCH|UCX|FI)_' # UCX and FI: settings of UCX and libfabric
while IFS= read -r name; do
    variables+=("$name=${!name}")
done < <(compgen -e | grep -E "^(OMP_NUM_THREADS$|CUDA_VISIBLE_DEVICES$|$passed_on)")

# The command that runs on a host. It terminates torchrun when its stdin is closed, because sshd
# does not end a command when ssh ends. It contains no line breaks, which a login shell other than
# bash might not accept.
# shellcheck disable=SC2016 # expanded on the host
remote='exec 3<&0; cd "$0" || exit 1; env "$@" 3<&- & torchrun=$!; '
# shellcheck disable=SC2016
remote+='{ read -r -u 3 _ || kill -TERM "$torchrun"; } 2>/dev/null & '
# shellcheck disable=SC2016
remote+='wait "$torchrun"; status=$?; kill "$!" 2>/dev/null; exit "$status"'

commands=()
for i in "${!hosts[@]}"; do
    words=("${variables[@]}" "$python" -m torch.distributed.run --nnodes="${#hosts[@]}"
        --node-rank="$i" --nproc-per-node="${slots[i]}" --master-addr="$master"
        --master-port="${MASTER_PORT:-29400}" "$@")
    commands+=("exec bash -c ${remote@Q} ${PWD@Q} ${words[*]@Q}") # the remote shell splits it again
    if [[ ${DRY_RUN:-0} != 0 ]]; then echo "[${hosts[i]}] cd ${PWD@Q}; ${words[*]@Q}"; fi
done
if [[ ${DRY_RUN:-0} != 0 ]]; then exit 0; fi

scratch=$(mktemp -d)
mkfifo "$scratch/life"
exec {life}<>"$scratch/life" # all hosts read from it, and no other process keeps it open
timer=
trap 'rm -rf "$scratch"; kill $timer 2>/dev/null || true' EXIT

# Runs in the background: ssh, with each line of output prefixed with the name of the host.
follow() {
    local label
    label=$(printf '[%s] ' "$1" | sed 's/[\\&|]/\\&/g') # escape characters that are special to sed
    {
        "${ssh[@]}" -- "$1" "$2" <"$scratch/life" 2>&1 >&3 3>&- {life}>&- |
            sed -u "s|^|$label|" >&2 3>&- {life}>&-
    } 3>&1 | sed -u "s|^|$label|" {life}>&-
}

end_all() {
    if [[ -n $life ]]; then exec {life}>&-; fi
    life=
}

# shellcheck disable=SC2317,SC2329 # called by traps; older versions of shellcheck report SC2317
interrupt() {
    if [[ -z $life ]]; then exit "$2"; fi # a second signal
    echo "ssh_torchrun.sh: $1: ending the ranks on all hosts; repeat to exit without waiting" >&2
    if ((status == 0)); then status=$2; fi
    end_all
}

status=0
trap 'interrupt SIGINT 130' INT
trap 'interrupt SIGTERM 143' TERM
trap 'interrupt SIGHUP 129' HUP
declare -A running=() # the host of each process
for i in "${!hosts[@]}"; do
    follow "${hosts[i]}" "${commands[i]}" {life}>&- &
    running[$!]=${hosts[i]}
done
while ((${#running[@]})); do
    ended='' code=0
    wait -n -p ended "${!running[@]}" $timer || code=$?
    if [[ -z ${ended:-} ]]; then continue; fi # interrupted by a signal, which its trap has handled
    if [[ $ended == "$timer" ]]; then
        timer=
        end_all
        continue
    fi
    if ((code && status == 0)); then
        status=$code
        why=
        if ((code == 255)); then why=" (an error of ssh, such as no connection)"; fi
        echo "ssh_torchrun.sh: ${running[$ended]}: status $code$why" >&2
        sleep 10 &
        timer=$!
    fi
    unset "running[$ended]"
done
exit "$status"
