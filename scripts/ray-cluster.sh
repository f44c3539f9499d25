#!/usr/bin/env bash
# Start Ray on this node with token authentication, and run until Ray ends.
#
#   TOKEN_FILE=FILE NODE_IP=ADDRESS bash scripts/ray-cluster.sh head
#   TOKEN_FILE=FILE NODE_IP=ADDRESS HEAD=HOST:PORT bash scripts/ray-cluster.sh worker
#
# The head makes TOKEN_FILE (mode 600) if it does not exist. Every worker, and the node that runs `vime train`, needs the
# same file, on a shared file system or as a copy by ssh. Then, on a node of the cluster:
#   RAY_AUTH_TOKEN_PATH=FILE RAY_ADDRESS=HOST:PORT vime train ...
# PORT (default 6379) is the port of the head. Other arguments go to `ray start`. PYTHON names the interpreter.
set -euo pipefail

role=${1:-}
[[ "$role" == head || "$role" == worker ]] || { echo "the role must be head or worker, got '$role'" >&2; exit 2; }
shift
: "${TOKEN_FILE:?TOKEN_FILE must name the file with the token of the cluster}"
: "${NODE_IP:?NODE_IP must be the address of this node in the network of the cluster}"
[[ "$role" == head ]] || : "${HEAD:?HEAD must be the address of the head node, HOST:PORT}"

here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python}
make=()
[[ "$role" == worker ]] || make=(--make)
PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}" "$python" -P -m slime.cluster.ray_token "${make[@]}" "$TOKEN_FILE"

unset RAY_AUTH_TOKEN # it would override the file
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$TOKEN_FILE"
if [[ "$NODE_IP" == 127.0.0.1 ]]; then
    export RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 # otherwise Ray replaces the loopback address with another address
fi
common=(--node-ip-address="$NODE_IP" --disable-usage-stats --block)
if [[ "$role" == head ]]; then
    exec "$python" -P -m ray.scripts.scripts start --head --port="${PORT:-6379}" --include-dashboard=false "${common[@]}" "$@"
fi
exec "$python" -P -m ray.scripts.scripts start --address="$HEAD" "${common[@]}" "$@"
