#!/usr/bin/env bash
# GRPO on a Qwen3-4B, or any dense Qwen3 or Qwen2.5, on the GPUs of this machine or of a Ray cluster.
#
#   MODEL=Qwen3-4B DATA=gsm8k/train.jsonl bash scripts/run-qwen3-4b-grpo.sh
#   bash scripts/run-qwen3-4b-grpo.sh                     random weights, sums for data: does it run, and how fast?
#   bash scripts/run-qwen3-4b-grpo.sh --lr 2e-6           any flag of `vime train` (see `vime flags`), which wins
#   PLAN=1 bash scripts/run-qwen3-4b-grpo.sh              `vime plan` of the same flags; needs no GPU, starts nothing;
#                                                         with --gpu-memory-gib 80: does it fit such GPUs?
#
#   MODE      colocate (default): trainer and engines take turns on all GPUs
#             disaggregated: half of the GPUs train, half generate; with --max-staleness 1 both at the same time
#   MODEL     Hugging Face directory (default: a random Qwen3-4B, made in OUT)
#   DATA      prompt file: GSM8K (question, answer) or dapo-math (prompt and label, or prompt and reward_model); other
#             columns with --input-key, --label-key and --rm-type
#   OUT       folder for checkpoints and records (default runs/qwen3-4b, without MODEL runs/qwen3-4b-smoke); a second call
#             goes on where the first stopped
#   NUM_GPUS  GPUs to use on a machine (default: --num-gpus-per-node where that is given, otherwise all)
#   SETUP=0   use the Python on PATH (or PYTHON) as it is: for machines whose environment was made by hand
#   RAY_ADDRESS=HOST:PORT joins that cluster; two machines: NUM_GPUS=8 ... --actor-num-nodes 2. DATA, MODEL and OUT must
#             then be on a file system that all of them see.
set -euo pipefail
if [[ "${1:-}" == -h || "${1:-}" == --help ]]; then
    sed -n '2,/^set -/{/^set -/d;s/^# \{0,1\}//;p;}' "${BASH_SOURCE[0]}"
    exit 0
fi
from_here() { [[ -z "$1" || "$1" == /* ]] && echo "$1" || echo "$PWD/$1"; }
MODE=${MODE:-colocate}
MODEL=$(from_here "${MODEL:-}")
DATA=$(from_here "${DATA:-}")
OUT=$(from_here "${OUT:-}")
cd "$(dirname "${BASH_SOURCE[0]}")/.."
OUT=${OUT:-runs/qwen3-4b$([[ -n "$MODEL" ]] || echo -smoke)}
NUM_GPUS=${NUM_GPUS:-}
if [[ -z "$NUM_GPUS" && " $* " =~ \ --num-gpus-per-node[\ =]([0-9]+)\  ]]; then
    NUM_GPUS=${BASH_REMATCH[1]}
fi
PLAN=${PLAN:-0}
die() { echo "run-qwen3-4b-grpo: $*" >&2; exit 2; }

# 1. What is asked for, and what is there.
[[ "$MODE" == colocate || "$MODE" == disaggregated ]] || die "MODE must be colocate or disaggregated, got $MODE"
[[ -z "$NUM_GPUS" || "$NUM_GPUS" =~ ^[1-9][0-9]*$ ]] || die "NUM_GPUS must be a whole number above 0, got $NUM_GPUS"
[[ -z "$MODEL" || -f "$MODEL/config.json" ]] || die "MODEL must be a folder with a config.json, got $MODEL;" \
    "from the hub: hf download Qwen/Qwen3-4B --local-dir Qwen3-4B"
[[ -z "$DATA" || -f "${DATA%@\[*}" ]] || die "DATA must be a prompt file that exists, got $DATA"
[[ -z "$MODEL" || -n "$DATA" ]] || die "DATA must be given with MODEL, got none; GSM8K's train.jsonl will do"

gpus=0
why="nvidia-smi is not on PATH"
if command -v nvidia-smi >/dev/null &&
    ! listed=$(nvidia-smi --query-gpu=index,name,memory.total,memory.used --format=csv,noheader 2>&1); then
    why="nvidia-smi says: ${listed:0:200}"
elif command -v nvidia-smi >/dev/null; then
    gpus=$(wc -l <<<"$listed")
    echo "GPUs (index, name, memory, in use):"
    echo "$listed"
    links=$(nvidia-smi topo -m 2>/dev/null | grep -oE '\bNV[0-9]+\b' | sort -u | paste -sd ' ' || true)
    echo "NVLink: ${links:-none found}"
    if [[ -n "${CUDA_VISIBLE_DEVICES+set}" ]]; then
        gpus=$(tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c '[^[:space:]]' || true)
        why="CUDA_VISIBLE_DEVICES=$CUDA_VISIBLE_DEVICES leaves $gpus"
        echo "$why"
    fi
    if ((gpus > 1)) && [[ -z "$links" ]]; then
        echo "note: without NVLink, weights and tensor-parallel layers travel over PCIe" >&2
    fi
fi
if [[ "$PLAN" == 1 && -n "$NUM_GPUS" ]]; then
    gpus=$NUM_GPUS # a plan may be for another machine
elif [[ "$PLAN" == 1 ]] && ((gpus == 0)); then
    echo "PLAN: NUM_GPUS not given and no GPU here, planned for 2" >&2
    gpus=2
fi
if ((gpus == 0)) && [[ -z "${RAY_ADDRESS:-}" ]]; then
    die "a GPU must be there, got none ($why); on a CPU: bash scripts/run-tiny-grpo.sh, or PLAN=1 to see what would run"
fi
NUM_GPUS=${NUM_GPUS:-$gpus}
((NUM_GPUS > 0)) || die "NUM_GPUS must be given where this machine shows no GPU, got none; the GPUs of each machine"
if [[ -z "${RAY_ADDRESS:-}" ]] && ((NUM_GPUS > gpus)); then
    die "NUM_GPUS must be at most the $gpus of this machine, got $NUM_GPUS; for more join a cluster with RAY_ADDRESS"
fi
if [[ "$MODE" == disaggregated ]] && ((NUM_GPUS < 2)); then
    die "NUM_GPUS must be 2 or more with MODE=disaggregated, got $NUM_GPUS; on one GPU: MODE=colocate"
fi

if [[ "${SETUP:-1}" == 1 ]]; then
    bash scripts/setup.sh
    PATH="$(cd "${VENV:-.venv}/bin" && pwd):$PATH"
    PYTHON=python
fi
PYTHON=${PYTHON:-python3}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" # what Ray and the engines start imports this folder, too
missing=$("$PYTHON" - <<'PY'
from importlib.metadata import entry_points
from importlib.util import find_spec


def found(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # its parent is not there either
        return False


needed = ("torch", "transformers", "safetensors", "megatron.core", "ray", "vllm", "vllm_router")
plugins = entry_points(group="vllm.general_plugins").names
print(*(name for name in needed if not found(name)), *([] if "vime_weight_transfer" in plugins else ["vime"]))
PY
) || die "PYTHON must be an interpreter, got $PYTHON; leave SETUP=0 out to have one set up"
[[ -z "${missing// /}" ]] || die "PYTHON must have the packages of requirements/gpu.txt and vime itself" \
    "(pip install --no-deps --no-build-isolation --editable .), got $PYTHON without: $missing"
if [[ -n "$MODEL" ]]; then
    experts=$("$PYTHON" - "$MODEL" <<'PY'
import sys

from slime.hf_config import expert_count, read_hf_config

try:
    print(expert_count(read_hf_config(sys.argv[1])))
except ValueError as error:
    sys.exit(f"run-qwen3-4b-grpo: {error}")
PY
) || exit 2
    # No rank would share its experts: by `vime plan`, a Qwen3-30B-A3B takes 191 GiB of each of 8 GPUs.
    ((experts == 0)) || die "MODEL must be dense, got $MODEL with $experts experts a layer; commands for such a model" \
        "(\`vime train\` with --expert-model-parallel-size) are printed by" \
        "vime bench plan examples/bench/qwen3-30b-a3b-dapo-math-17k.yaml --model $MODEL --data $DATA;" \
        "take FLAGS and rl_kernel-0 under e2e, and --save"
fi

# 2. Model and data. Without MODEL this is a smoke run: a random model learns nothing, its rewards stay 0.
SMOKE_ARGS=()
if [[ -z "$MODEL" ]]; then
    MODEL="$OUT/random-qwen3-4b"
    weights=--random
    if [[ "$PLAN" == 1 ]]; then
        MODEL="$OUT/plan-qwen3-4b" weights=--no-weights
    fi
    [[ -f "$MODEL/config.json" ]] ||
        "$PYTHON" scripts/make_model.py --arch qwen3-4b "$weights" --arithmetic "$MODEL"
    cat >&2 <<'TEXT'
**************************************************************************************************
SMOKE RUN: MODEL was not given, so the weights are random. It shows that the parts work together,
and at what speed; nothing is learned and nothing saved. For training: MODEL=... DATA=...
**************************************************************************************************
TEXT
    SMOKE_ARGS=(--num-rollout 10 --rollout-max-response-len 512)
    if [[ -z "$DATA" ]]; then
        DATA="$MODEL/arithmetic/train.jsonl"
        SMOKE_ARGS+=(--rm-type gsm8k)
    fi
    CKPT_ARGS=(--hf-checkpoint "$MODEL")
else
    CKPT_ARGS=(
        --hf-checkpoint "$MODEL"
        --load "$OUT/checkpoint" # resume from here when there is something
        --save "$OUT/checkpoint"
        --save-interval 20
    )
fi
if [[ " $* " == *" --input-key"[\ =]* ]]; then
    DATA_ARGS=() # the columns are named by the flags
else
    layout=$("$PYTHON" - "$DATA" <<'PY'
import sys

from slime.data.prompts import read_file

LAYOUTS = {
    ("question", "answer"): "--input-key question --label-key answer --rm-type gsm8k",
    ("prompt", "label"): "--input-key prompt --label-key label --rm-type deepscaler",
    ("prompt", "reward_model"): "--input-key prompt --label-key reward_model.ground_truth --rm-type dapo --reward-key score",
}
try:
    columns = next(read_file(sys.argv[1], flag="DATA"), {})
except ValueError as error:
    sys.exit(f"run-qwen3-4b-grpo: {error}")
for needed, flags in LAYOUTS.items():
    if set(needed) <= set(columns):
        print(flags)
        break
else:
    sys.exit(
        f"run-qwen3-4b-grpo: DATA must have the columns {' or '.join(' and '.join(n) for n in LAYOUTS)}, "
        f"got {sorted(columns)}; name them with --input-key, --label-key and --rm-type"
    )
PY
) || exit 2
    read -ra DATA_ARGS <<<"$layout"
fi

# 3. Who runs where. A 4B fits one GPU, and two engines of one GPU are faster than one of two; trainers share each
# layer between two GPUs where there are two.
TRAINERS=$NUM_GPUS
if [[ "$MODE" == colocate ]]; then
    # The engine's share of each GPU: what fits beside the trainer's state on 140 GiB; on smaller GPUs state is
    # offloaded, see PLAN=1. One trainer GPU holds all of the optimizer, several a part each.
    MODE_ARGS=(--colocate --vllm-gpu-memory-utilization "$( ((NUM_GPUS == 1)) && echo 0.4 || echo 0.5)")
else
    TRAINERS=$((NUM_GPUS - NUM_GPUS / 2))
    MODE_ARGS=(--rollout-num-gpus $((NUM_GPUS / 2)) --vllm-gpu-memory-utilization 0.85)
fi
CLUSTER_ARGS=(
    --device cuda
    --actor-num-nodes 1
    --actor-num-gpus-per-node "$TRAINERS"
    --num-gpus-per-node "$NUM_GPUS"
    --rollout-num-gpus-per-engine 1
)
if ((TRAINERS % 2 == 0)); then
    CLUSTER_ARGS+=(--tensor-model-parallel-size 2 --sequence-parallel)
    # Megatron overlaps tensor-parallel collectives with products by the order of their launches.
    CLUSTER_ARGS+=(--train-env-vars '{"CUDA_DEVICE_MAX_CONNECTIONS": "1"}')
fi

# 4. GRPO as slime sets it up for a Qwen3-4B. The shape comes from config.json of MODEL; the KL, which slime's script
# computes with weight 0, is left out, for it costs a second model.
ROLLOUT_ARGS=(
    --prompt-data "$DATA"
    --apply-chat-template
    --rollout-shuffle
    --num-rollout 3000
    --rollout-batch-size 32
    --n-samples-per-prompt 8
    --rollout-max-response-len 8192
    --rollout-temperature 1
    --global-batch-size 256 # one optimizer step a rollout
    --balance-data
)
# On an H200 a trainer of its own 4B peaks at 119 GiB with these. Less memory: fewer tokens (not below the longest sample),
# or --recompute-granularity full --recompute-method uniform --recompute-num-layers 1, which costs a quarter more time.
PERF_ARGS=(
    --use-dynamic-batch-size
    --max-tokens-per-gpu 16384
)
GRPO_ARGS=(
    --advantage-estimator grpo
    --entropy-coef 0.00
    --eps-clip 0.2
    --eps-clip-high 0.28
)
OPTIMIZER_ARGS=(
    --optimizer adam
    --lr 1e-6
    --lr-decay-style constant
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.98
)
MISC_ARGS=(
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --accumulate-allreduce-grads-in-fp32
    --attention-softmax-in-fp32
    --attention-backend flash
    --use-tensorboard
    --run-dir "$OUT/grpo"
)
COMMAND=train
if [[ "$PLAN" == 1 ]]; then
    COMMAND=plan
else
    echo "curves, at any time: vime plot $OUT/grpo"
fi
# exec: signals reach the run itself, which ends what it started and nothing else.
exec "$PYTHON" -m vime "$COMMAND" "${CLUSTER_ARGS[@]}" "${MODE_ARGS[@]}" "${CKPT_ARGS[@]}" "${ROLLOUT_ARGS[@]}" \
    "${DATA_ARGS[@]}" "${PERF_ARGS[@]}" "${GRPO_ARGS[@]}" "${OPTIMIZER_ARGS[@]}" "${MISC_ARGS[@]}" "${SMOKE_ARGS[@]}" "$@"
