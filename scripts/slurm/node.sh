#!/usr/bin/env bash
# One node of a job. scripts/slurm/grpo.sh calls it through srun with NODES, JOB_DIR and the launcher with its flags. The
# first node starts Ray's head, waits for all nodes and runs the launcher. Each other node starts a Ray worker and ends it
# when the first node has written the launcher's exit status. Every process that this script started ends with it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
[[ ! -d "${VENV:-.venv}/bin" ]] || PATH="$(cd "${VENV:-.venv}/bin" && pwd):$PATH"
node=${SLURMD_NODENAME:-$(hostname -s)}
HEAD_TIMEOUT_S=${HEAD_TIMEOUT_S:-300} JOIN_TIMEOUT_S=${JOIN_TIMEOUT_S:-300}
LEAVE_S=20 # Workers end first: without a head, a worker takes 30 s to end, and its agent 60 s more.
log="$JOB_DIR/ray-$node.log"
die() { echo "slurm: node $node: $*" >&2; exit 1; }

# Every Ray process requires the token in this file.
unset RAY_AUTH_TOKEN
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$JOB_DIR/token"
ip=${NODE_IP:-$(python -P -c 'import ray; print(ray.util.get_node_ip_address())')}
read -ra options <<<"${RAY_START_OPTIONS:-}"
options+=(--node-name="$node")

children=()
finish() {
    ((${#children[@]} == 0)) || kill "${children[@]}" 2>/dev/null || true
    wait || true
    [[ "$node" == "${NODES%% *}" || ! -d "$JOB_DIR" ]] || touch "$JOB_DIR/left-$node"
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
start_ray() {
    TOKEN_FILE="$JOB_DIR/token" NODE_IP="$ip" bash scripts/ray-cluster.sh "$@" "${options[@]}" >"$log" 2>&1 &
    children+=($!)
}
ended() { ! kill -0 "$1" 2>/dev/null; }

if [[ "$node" == "${NODES%% *}" ]]; then
    # Two jobs on one machine use different ports.
    address="$ip:$((20000 + SLURM_JOB_ID % 10000))"
    PORT=${address##*:} start_ray head
    status=0
    read -ra names <<<"$NODES"
    python scripts/slurm/wait_for_nodes.py --address "$address" --log-dir "$JOB_DIR" \
        --head-timeout-s "$HEAD_TIMEOUT_S" --join-timeout-s "$JOIN_TIMEOUT_S" --ray-pid "${children[0]}" \
        "${names[@]}" || status=$?
    joined=()
    if ((status == 0)); then
        joined=("${names[@]:1}")
        RAY_ADDRESS="$address" bash "$@" &
        children+=($!)
        wait "${children[1]}" || status=$?
        children=("${children[0]}")
    fi
    # The other nodes read the file as soon as it exists, so it must be complete then.
    echo "$status" >"$JOB_DIR/status.new"
    mv "$JOB_DIR/status.new" "$JOB_DIR/status"
    end=$((SECONDS + LEAVE_S))
    for name in "${joined[@]}"; do
        while [[ ! -f "$JOB_DIR/left-$name" ]] && ((SECONDS < end)); do sleep 0.2; done
    done
    exit "$status"
fi

while [[ ! -f "$JOB_DIR/address" ]]; do
    [[ ! -f "$JOB_DIR/status" ]] || exit 0
    ((SECONDS < HEAD_TIMEOUT_S)) ||
        die "Ray's head on ${NODES%% *} must answer within $HEAD_TIMEOUT_S s; is that node up? Its log: $JOB_DIR"
    sleep 1
done
HEAD=$(<"$JOB_DIR/address") start_ray worker
while [[ ! -f "$JOB_DIR/status" ]]; do
    ! ended "${children[0]}" || die "Ray's worker has ended; its log: $log"
    sleep 1
done
