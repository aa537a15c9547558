@@ set then = "bash " ~ path ~ ("" if hosts else " HOST0 HOST1 HOST2 HOST3"[:6 * [job.nodes, 4]|min])
#!/usr/bin/env bash
# @{job.summary()}. One ssh connection to each node, from any host that reaches them without a password:
#   bash FILE [HOST0 HOST1 ...]
# Ctrl-C, SIGTERM and a lost connection save a checkpoint and end the run. Each node has a log in @{name}-logs.
# SSH_OPTIONS may hold options of ssh; MAIN_PROCESS_IP is the address of the first host, if the others need another one.
# Written by: @{command}
set -uo pipefail

HOSTS=(@{hosts.split(",")|map("quote")|join(" ") if hosts else ""})
(($#)) && HOSTS=("$@")
FOLDER=@{(folder or present|string)|quote}
LOGS=@{name}-logs
OPTIONS="-T -o BatchMode=yes -o ConnectTimeout=20 -o ServerAliveInterval=15 -o ServerAliveCountMax=4 ${SSH_OPTIONS:-}"
read -ra OPTIONS <<< "$OPTIONS"

# Runs on each host: its rank, the address of node 0, the folder. Its input ends when this script lets go or is gone.
node() {
    set -eo pipefail
    cd "$3"
@@ if setup
    @{setup|indent(4)}
@@ endif
@@ for name, value in exports
    export @{name}=@{value|quote}
@@ endfor
    exec 3<&0
    {
        exec @{job.launch('--machine_rank "$1" --main_process_ip "$2"')|indent(8)}
    } < /dev/null 3<&- &
    launch=$! code=0
    (read -r -u 3 || kill -TERM "$launch") > /dev/null 2>&1 &
    wait "$launch" || code=$?
    kill $! 2> /dev/null || true
    exit "$code"
}

quoted() { # for the login shell of a host
    printf "'%s' " "${1//\'/\'\\\'\'}"
}

complain() {
    echo "$0: $*" >&2
}

if ((${#HOSTS[@]} != @{job.nodes})); then
    complain "got ${#HOSTS[@]} hosts, expected @{job.nodes}, one for each node of "@{job.quoted}
    exit 2
fi

# All hosts are asked at once, before a node waits for the others.
asked=()
for host in "${HOSTS[@]}"; do
    ssh "${OPTIONS[@]}" "$host" "cd $(quoted "$FOLDER")" < /dev/null &
    asked+=("$!")
done
for k in "${!HOSTS[@]}"; do
    wait "${asked[k]}" || { complain "node $k: no ssh to ${HOSTS[k]}, or no folder $FOLDER there"; failed=1; }
done
[[ -z ${failed:-} ]] || exit 3

address=${MAIN_PROCESS_IP:-$(ssh "${OPTIONS[@]}" -G "${HOSTS[0]}" | awk '$1 == "hostname" { print $2 }')}
mkdir -p "$LOGS" || exit
private=$(mktemp -d) || exit
trap 'rm -rf "$private"' EXIT
mkfifo "$private/input"
exec 4<> "$private/input" # input of all connections; it ends with the last descriptor
let_go() {
    complain "$1: every node saves a checkpoint if it trains, and ends"
    exec 4>&-
    trap '' INT TERM HUP
}
trap 'let_go "received SIGINT"' INT
trap 'let_go "received SIGTERM"' TERM
trap 'let_go "received SIGHUP"' HUP

connections=()
for k in "${!HOSTS[@]}"; do
    command="bash -c $(quoted "$(declare -f node); node \"\$@\"") node $k $(quoted "$address") $(quoted "$FOLDER")"
    (
        exec 4>&-
        trap '' INT TERM HUP # the connection stays for the last lines and the exit code
        ssh "${OPTIONS[@]}" "${HOSTS[k]}" "$command" 2>&1 |
            if ((k)); then cat > "$LOGS/node$k.log"; else tee "$LOGS/node0.log"; fi
    ) < "$private/input" &
    connections+=("$!")
done

# A failed run ends on all nodes by itself; a node that failed before the roll-call would be waited for.
code=0 ended=0 until=0
declare -A done=()
while ((${#done[@]} < ${#HOSTS[@]})); do
    sleep 0.2
    for k in "${!HOSTS[@]}"; do
        if [[ -z ${done[$k]:-} ]] && ! kill -0 "${connections[k]}" 2> /dev/null; then
            wait "${connections[k]}"
            done[$k]=$?
            complain "node $k (${HOSTS[k]}) ended with code ${done[$k]}; log: $LOGS/node$k.log"
            ((code)) || code=${done[$k]}
            ((code && !until)) && until=$((SECONDS + 60))
        fi
    done
    if ((until && SECONDS > until && !ended)); then
        ended=1
        let_go "a node failed 60 s ago"
    fi
done
exit "$code"
