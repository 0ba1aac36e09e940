#!/usr/bin/env bash
# Run a script under torchrun on several hosts that ssh reaches, without a scheduler.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: launch/ssh_torchrun.sh [OPTION...] HOSTFILE SCRIPT [ARGUMENT...]

Checks every host, starts one torchrun on each, prints what they print behind the host's name, and
ends all of them when one fails, or on Ctrl-C. The first host's ranks are the first ones.

    launch/ssh_torchrun.sh hosts benchmarks/ddp_sweep.py --json report.json
    launch/ssh_torchrun.sh --nproc-per-node 8 --venv /opt/torch hosts benchmarks/collectives.py

HOSTFILE has a host on each line, as ssh knows it (a name, an address, user@name, an alias of
~/.ssh/config), with slots=N for the number of ranks there, and # before a comment:

    node1 slots=8
    node2 slots=8    # next to the window

The checkout, the folder this is started from, and the script are at the same path on all hosts, the
same torch is installed, and a key or an agent lets ssh in without a password. The addresses are
those that ssh connects to.

options:
  --nproc-per-node N       ranks on a host without slots= (default: its GPUs, else 1)
  --venv DIR               python is DIR/bin/python on every host (default: the active virtual
                           environment, else the python3 that ssh finds)
  --port N                 that the first host listens on (default: a free one)
  --first-address ADDRESS  the first host's, for the other hosts (default: where ssh reaches it)
  --env NAME               pass this variable on; may be repeated. OMP_NUM_THREADS, MKL_NUM_THREADS,
                           CUDA_VISIBLE_DEVICES, NO_COLOR, NCCL_*, GLOO_*, TP_*, TORCH_*, UCX_* and
                           FI_* are passed on anyway
  --ssh-option OPTION      for ssh's -o, e.g. Port=2222; may be repeated
  --dry-run                check the hosts, and print the commands instead of running them
  -h, --help               this text

On every host NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME and TP_SOCKET_IFNAME become the interface that
leads to the first host, where they are not set.

exit status: 0; that of the first host to fail (255: its connection broke); 1 when a check fails;
2 for bad usage; 130 after Ctrl-C, 143 after SIGTERM.
TEXT
}

readonly BEAT_S=5      # a byte to every host; a host that hears none for 30 s ends (ssh_agent.py)
readonly PARTING_S=10  # the other hosts' own time, after one failed, to find out and say why
readonly ENDING_S=30   # from ending the hosts to giving up on ssh; ssh_agent.py takes 20 s
readonly CHECK_S=120   # for a host's check, which imports torch
readonly FORWARDED='^(OMP_NUM_THREADS|MKL_NUM_THREADS|CUDA_VISIBLE_DEVICES|NO_COLOR|(NCCL|GLOO|TP|TORCH|UCX|FI)_[A-Z0-9_]+)$'

complain() { printf 'ssh_torchrun.sh: %s\n' "$*" >&2; }

refuse() {
    complain "error: $*"
    exit 2
}

# One word for the shell at the other end, whichever it is. printf %q would write $'...', which
# is bash's alone.
quote() {
    if [[ $1 =~ ^[A-Za-z0-9_./:=,@%+-]+$ ]]; then
        printf '%s' "$1"
    else
        printf "'%s'" "${1//\'/\'\\\'\'}"
    fi
}

# ssh joins its words with spaces, and the other end's shell splits them anew.
command_line() {
    local line='' word
    for word in "$@"; do
        line+=" $(quote "$word")"
    done
    printf '%s' "${line# }"
}

# -- the command line and the host file -------------------------------------------------------------

nproc='' venv=${VIRTUAL_ENV:-} port=0 first_address='' dry_run=
ssh_options=() environment=()

read_options() {
    local name value
    while [[ $# -gt 0 && $1 == -* ]]; do
        name=${1%%=*}
        case $name in
            -h | --help)
                usage
                exit 0
                ;;
            --dry-run)
                [[ $1 == "$name" ]] || refuse "--dry-run takes no value, got '$1'"
                dry_run=yes
                shift
                continue
                ;;
            --nproc-per-node | --venv | --port | --first-address | --env | --ssh-option) ;;
            *) refuse "unknown option '$name' before HOSTFILE; see launch/ssh_torchrun.sh --help" ;;
        esac
        if [[ $1 == *=* ]]; then
            value=${1#*=}
            shift
        else
            [[ $# -gt 1 ]] || refuse "$name needs a value; see launch/ssh_torchrun.sh --help"
            value=$2
            shift 2
        fi
        [[ -n $value ]] || refuse "$name needs a value, got an empty one"
        case $name in
            --nproc-per-node)
                [[ $value =~ ^[1-9][0-9]{0,3}$ ]] ||
                    refuse "--nproc-per-node expects a number from 1 on, e.g. 8, got '$value'"
                nproc=$value
                ;;
            --port)
                [[ $value =~ ^[1-9][0-9]{0,4}$ && $value -lt 65536 ]] ||
                    refuse "--port expects a number from 1 to 65535, e.g. 29400, got '$value'"
                port=$value
                ;;
            --venv) venv=$value ;;
            --first-address)
                [[ $value =~ ^[A-Za-z0-9.:_-]+$ && $value != -* ]] ||
                    refuse "--first-address expects an address, e.g. 10.0.0.1, got '$value'"
                first_address=$value
                ;;
            --env)
                [[ $value =~ ^[A-Za-z_][A-Za-z0-9_]*$ ]] ||
                    refuse "--env expects the name of a variable, e.g. LD_LIBRARY_PATH, got '$value'"
                [[ -v $value ]] || refuse "--env $value: there is no such variable here; export it"
                environment+=("$value=${!value}")
                ;;
            --ssh-option)
                [[ $value == *[=\ ]* ]] ||
                    refuse "--ssh-option expects what ssh's -o takes, e.g. Port=2222, got '$value'"
                ssh_options+=(-o "$value")
                ;;
        esac
    done
    [[ $# -gt 0 ]] || refuse "expected HOSTFILE SCRIPT; see launch/ssh_torchrun.sh --help"
    [[ $# -gt 1 ]] || refuse "expected a SCRIPT after HOSTFILE '$1', e.g. benchmarks/ddp_sweep.py"
    hostfile=$1 script=$2
    shift 2
    arguments=("$@")
}

hosts=() slots=()

read_hostfile() {
    local line number=0 unsized=0 words word where
    local -A lines=()
    [[ -f $hostfile && -r $hostfile ]] || refuse "cannot read a host file '$hostfile'"
    while IFS= read -r line || [[ -n $line ]]; do
        number=$((number + 1))
        where="$hostfile:$number"
        line=${line%$'\r'}
        read -r -a words <<<"${line%%#*}"
        [[ ${#words[@]} -gt 0 ]] || continue
        word=${words[0]}
        [[ $word =~ ^([A-Za-z0-9_.][A-Za-z0-9_.-]*@)?[A-Za-z0-9_.:][A-Za-z0-9_.:%-]*$ ]] ||
            refuse "$where: expected a host, e.g. node1 slots=8, got '$line'"
        [[ ! -v lines[$word] ]] || refuse "$where: $word is there already, in line ${lines[$word]}"
        lines[$word]=$number
        hosts+=("$word")
        if [[ ${#words[@]} -eq 1 ]]; then
            slots+=("$nproc")
            unsized=$((unsized + 1))
        elif [[ ${#words[@]} -eq 2 && ${words[1]} =~ ^slots=([1-9][0-9]{0,3})$ ]]; then
            slots+=("${BASH_REMATCH[1]}")
        else
            refuse "$where: expected '$word' or '$word slots=N', got '$line'"
        fi
    done <"$hostfile"
    [[ ${#hosts[@]} -gt 0 ]] || refuse "$hostfile names no host; expected lines like: node1 slots=8"
    [[ -z $nproc || $unsized -gt 0 ]] ||
        refuse "--nproc-per-node has no effect: every host of $hostfile has slots="
}

# -- checks -----------------------------------------------------------------------------------------

status=() torch=() devices=() free=() client=() address=() machine=() problem=()

# What has to be the same everywhere, the checkout's code and the script: files becomes FILE=DIGEST.
list_files() {
    local i path=$script digests
    [[ $path == /* ]] || path=$PWD/$path
    files=("$root"/{benchmarks,common,launch}/*.py "$path")
    mapfile -t digests < <(sha256sum -- "${files[@]}")
    for i in "${!files[@]}"; do
        path=${digests[i]#\\} # before the digest of a name with a backslash
        files[i]=${files[i]#"$root/"}=${path:0:16}
    done
}

# Ask all hosts at the same time; what comes back is in $scratch/N.out and N.err.
ask_hosts() {
    local i files line pids=()
    list_files
    for i in "${!hosts[@]}"; do
        # the port matters on the first host alone
        line=$(command_line "$python" - "$root" "$PWD" "$((i == 0 ? port : 0))" "${files[@]}")
        timeout "$CHECK_S" "${ssh[@]}" "${hosts[i]}" "$line" \
            <"$root/launch/ssh_check.py" >"$scratch/$i.out" 2>"$scratch/$i.err" &
        pids+=($!)
    done
    for i in "${!hosts[@]}"; do
        status[i]=0
        wait "${pids[i]}" || status[i]=$?
    done
}

# Host $1's answer, into the arrays above.
read_answer() {
    local i=$1 last line fields problems=''
    last=$(tail -n 1 "$scratch/$i.err" | tr -d '\r')
    while IFS= read -r line; do
        IFS=$'\t' read -r -a fields <<<"$line"
        case ${fields[0]:-}-${fields[1]:-} in
            ssh_check-problem) problems+="${problems:+; }${fields[2]}" ;;
            ssh_check-facts)
                torch[i]=${fields[2]} devices[i]=${fields[3]} free[i]=${fields[4]}
                client[i]=${fields[5]} address[i]=${fields[6]} machine[i]=${fields[7]}
                ;;
        esac
    done <"$scratch/$i.out"
    if [[ -z $problems && -z ${torch[i]:-} ]]; then
        case ${status[i]} in
            124) problems="no answer to the checks within $CHECK_S s" ;;
            126 | 127) problems="cannot run $python there ($last); give --venv DIR" ;;
            255) problems="ssh cannot get in ($last); try: ssh ${hosts[i]} true" ;;
            *) problems="the check ended with status ${status[i]}: $last" ;;
        esac
    fi
    problem[i]=$problems
}

# The torch that most hosts have.
usual_torch() {
    printf '%s\n' "${torch[@]}" | sed '/^-$/d' | sort | uniq -c | sort -n -r |
        sed -n '1s/^ *[0-9]* //p'
}

check_hosts() {
    local i usual bad=0
    local -A names=()
    ask_hosts
    for i in "${!hosts[@]}"; do
        read_answer "$i"
    done
    usual=$(usual_torch)
    for i in "${!hosts[@]}"; do
        if [[ -n ${problem[i]} ]]; then
            :
        elif [[ ${torch[i]} != "$usual" ]]; then
            problem[i]="torch ${torch[i]}, and most hosts have $usual; give --venv DIR"
        elif [[ -n ${names[${machine[i]}]:-} ]]; then
            problem[i]="the same machine as ${names[${machine[i]}]}"
        elif [[ ${free[i]} == 0 ]]; then
            problem[i]="port $port is taken there; give another --port, or none"
        fi
        names[${machine[i]:-$i}]=${hosts[i]}
        [[ -n ${slots[i]} ]] || slots[i]=$((${devices[i]:-0} > 0 ? devices[i] : 1))
        if [[ -n ${problem[i]} ]]; then
            complain "${hosts[i]}: ${problem[i]}"
            bad=1
        fi
    done
    [[ $bad == 0 ]] || exit 1
    [[ $port != 0 ]] || port=${free[0]}
    [[ -n $first_address ]] || find_first_address
}

is_loopback() { [[ $1 == 127.* || $1 == ::1 || $1 == - ]]; }

# Where the other hosts find the first one: where ssh found it. When that was over the loopback, the
# first host is this one, and the others have seen its address.
find_first_address() {
    first_address=${address[0]}
    [[ ${#hosts[@]} -gt 1 ]] || first_address=127.0.0.1
    if [[ ${#hosts[@]} -gt 1 ]] && is_loopback "$first_address"; then
        first_address=${client[1]}
        if is_loopback "$first_address"; then
            complain "${hosts[0]}: reached over the loopback, as ${hosts[1]}; give --first-address"
            exit 1
        fi
    fi
}

# -- the agents -------------------------------------------------------------------------------------

# What runs on host $1, as one line for its shell.
agent_line() {
    local i=$1
    local agent=("$python" "$root/launch/ssh_agent.py" "$first_address" "$port" "$i")
    local runner=("$python" -m torch.distributed.run --nnodes "${#hosts[@]}" --node-rank "$i")
    runner+=(--nproc-per-node "${slots[i]}" --master-addr "$first_address" --master-port "$port")
    printf 'cd %s && exec %s' "$(quote "$PWD")" "$(
        command_line env "${environment[@]}" "${agent[@]}" "${runner[@]}" "$script" "${arguments[@]}"
    )"
}

print_commands() {
    local i
    for i in "${!hosts[@]}"; do
        command_line "${ssh[@]}" "${hosts[i]}" "$(agent_line "$i")"
        echo
    done
}

beats=() clients=() running=0

prefix() { LC_ALL=C sed -u "s/^/[$1] /"; }

# Runs in the background: ssh, with what it prints behind the host's name. Says its pid and status.
follow() {
    local i=$1 line=$2 fd status ended
    set +e # a failure is to be reported
    trap '' INT # a terminal's Ctrl-C is for the script alone: the ranks' last words come through ssh
    for fd in "${beats[@]}"; do
        exec {fd}>&- # a life line that a neighbour holds would not end with this script
    done
    {
        {
            (
                echo "pid $i $BASHPID" >&"$events"
                exec "${ssh[@]}" "${hosts[i]}" "$line" <"$scratch/$i.beats" {events}>&-
            ) | prefix "${hosts[i]}"
            ended=("${PIPESTATUS[@]}") # the second one tells of output that could not be written
            exit "$((ended[0] ? ended[0] : ended[1]))"
        } 2>&1 >&3 3>&- | prefix "${hosts[i]}" >&2
        status=${PIPESTATUS[0]}
    } 3>&1
    echo "end $i $status" >&"$events"
}

start_agents() {
    local i fd
    mkfifo "$scratch/events"
    exec {events}<>"$scratch/events"
    for i in "${!hosts[@]}"; do
        mkfifo "$scratch/$i.beats"
        follow "$i" "$(agent_line "$i")" &
        # open for reading too: it blocks neither here nor when ssh has gone
        exec {fd}<>"$scratch/$i.beats"
        beats[i]=$fd
        running=$((running + 1))
    done
}

close_life_lines() {
    local fd
    for fd in "${beats[@]}"; do
        exec {fd}>&-
    done
    beats=()
    deadline=$((SECONDS + ENDING_S))
    stage=ending
}

# shellcheck disable=SC2317,SC2329 # a trap calls it
clean_up() {
    local pids
    mapfile -t pids <<<"$(jobs -p)"
    kill "${pids[@]}" "${clients[@]}" 2>/dev/null || true
    rm -rf "$scratch"
}

# Ctrl-C or another signal: end all; the second time do not wait for them, they end by themselves.
# shellcheck disable=SC2317,SC2329 # a trap calls it
interrupt() {
    [[ $stage != ending ]] || exit "$2"
    complain "$1: ending all hosts; once more to leave them to it"
    [[ $result != 0 ]] || result=$2
    close_life_lines
}

# Until all have ended. Sets result to the status of the first that failed.
attend() {
    local what i value
    while [[ $running -gt 0 ]]; do
        if read -r -t "$BEAT_S" -u "$events" what i value; then
            if [[ $what == pid ]]; then
                clients[i]=$value
                continue
            fi
            running=$((running - 1))
            unset "clients[i]"
            [[ $value == 0 || $result != 0 ]] || report_failure "$i" "$value"
        elif [[ $SECONDS -ge $deadline ]]; then
            if [[ $stage == ending ]]; then
                complain "$running hosts did not end within $ENDING_S s; left to themselves"
                return 0
            fi
            close_life_lines
        fi
        for i in "${!beats[@]}"; do
            echo >&"${beats[i]}"
        done
    done
}

report_failure() {
    local i=$1 what="ended with status $2"
    result=$2
    [[ $2 != 255 ]] || what='its connection broke, or it ended with status 255'
    [[ $running -eq 0 ]] || what+="; the others have $PARTING_S s to end"
    complain "${hosts[i]}: $what"
    deadline=$((SECONDS + PARTING_S))
}

# -- main -------------------------------------------------------------------------------------------

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
read_options "$@"
read_hostfile
[[ -f $script ]] || refuse "no script '$script' here, e.g. benchmarks/ddp_sweep.py"
for tool in ssh sha256sum timeout mkfifo; do
    command -v "$tool" >/dev/null || refuse "$tool is needed, and not in PATH"
done

python=python3
if [[ -n $venv ]]; then
    [[ $venv == /* ]] || venv=$PWD/$venv
    python=$venv/bin/python
    environment+=("VIRTUAL_ENV=$venv")
fi
while IFS= read -r name; do
    [[ ! $name =~ $FORWARDED ]] || environment+=("$name=${!name}")
done < <(compgen -e)
# the first value that ssh sees counts: the user's
ssh=(ssh -T ${ssh_options[@]+"${ssh_options[@]}"} -o BatchMode=yes -o ConnectTimeout=10)
ssh+=(-o ServerAliveInterval=5 -o ServerAliveCountMax=6 -o ControlMaster=no -o ControlPath=none --)

scratch=$(mktemp -d)
stage=checks result=0 deadline=999999999
trap clean_up EXIT
check_hosts
if [[ -n $dry_run ]]; then
    print_commands
    exit 0
fi
trap 'interrupt SIGINT 130' INT
trap 'interrupt SIGTERM 143' TERM
trap 'interrupt SIGHUP 129' HUP
stage=running
start_agents
attend
exit "$result"
