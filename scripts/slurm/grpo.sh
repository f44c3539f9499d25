#!/usr/bin/env bash
#SBATCH --job-name=vime
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --output=vime-%j.log
# A run on the nodes of one Slurm job. Starts Ray on all nodes, then a launcher on the first node. Submit it from the
# repository's root, on a file system that all nodes share:
#
#   export MODEL=/models/Qwen3-4B DATA=/data/prompts.jsonl OUT=/data/runs/qwen3-4b NUM_GPUS=4
#   sbatch --nodes=2 --gpus-per-node=4 scripts/slurm/grpo.sh scripts/run-qwen3-4b-grpo.sh --actor-num-nodes 2
#
#   IMAGE            a container for pyxis and enroot, such as a .sqsh file; default: no container, .venv of this folder
#   MOUNTS           mounts of the container in addition to OUT: SOURCE:TARGET, separated by commas
#   OUT              the run's folder; the job's token, addresses and Ray's logs are in its folder slurm-ID (default runs)
#   JOIN_TIMEOUT_S   seconds to wait for all nodes (default 300); then the job prints the missing nodes and ends
#
# The job's exit status is the launcher's. All other variables reach the launcher unchanged.
set -euo pipefail
die() { echo "slurm: $*" >&2; exit 2; }
[[ -n "${SLURM_JOB_ID:-}" ]] || die "this script must run as a Slurm job; submit it with sbatch"
cd "${SLURM_SUBMIT_DIR:-.}" # Slurm runs a copy of this script in another folder
[[ -f scripts/slurm/node.sh ]] || die "sbatch must be called in the repository's root, got $PWD"
(($#)) || die "a launcher must be given, such as scripts/run-qwen3-4b-grpo.sh"
[[ -f "$1" ]] || die "the launcher must be a file, got $1"

NODES=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | paste -sd ' ')
[[ -z "${IMAGE:-}" || -n "${OUT:-}" ]] || die "OUT must name a folder that all nodes see where IMAGE is set, got nothing"
[[ -z "${OUT:-}" || "$OUT" == /* ]] || OUT="$PWD/$OUT"
JOB_DIR="${OUT:-$PWD/runs}/slurm-$SLURM_JOB_ID"
rm -f "$JOB_DIR/status" "$JOB_DIR/address" "$JOB_DIR"/left-* # they exist if Slurm has requeued the job
export NODES JOB_DIR
(
    # Only this user can read the token. Everyone who has the token can run code on the nodes.
    mkdir -p "${JOB_DIR%/*}"
    umask 077
    mkdir -p "$JOB_DIR"
    head -c 32 /dev/urandom | od -An -vtx1 | tr -d ' \n' >"$JOB_DIR/token"
)

CONTAINER=()
if [[ -n "${IMAGE:-}" ]]; then
    CONTAINER=(--container-image="$IMAGE" --container-workdir=/srv/vime)
    CONTAINER+=(--container-mounts="$OUT:$OUT${MOUNTS:+,$MOUNTS}")
fi
# --wait: after the first node's task has ended, Slurm waits this many seconds for the other tasks.
srun --ntasks-per-node=1 --wait="${END_TIMEOUT_S:-60}" "${CONTAINER[@]}" bash scripts/slurm/node.sh "$@" || failed=$?
rm -f "$JOB_DIR/token"
if [[ -f "$JOB_DIR/status" ]]; then
    exit "$(<"$JOB_DIR/status")"
fi
echo "slurm: the first node, ${NODES%% *}, ended before the launcher did; Ray's logs: $JOB_DIR" >&2
exit "${failed:-1}"
