#!/usr/bin/env bash
# GRPO of one model of examples/ on the GPUs of this machine or of a Ray cluster; called by scripts/run-MODEL-grpo.sh.
#
#   MODEL=Qwen3-4B DATA=gsm8k/train.jsonl bash scripts/run-qwen3-4b-grpo.sh
#   bash scripts/run-qwen3-4b-grpo.sh                     random weights and addition data: a smoke test and its speed
#   bash scripts/run-qwen3-4b-grpo.sh --lr 2e-6           any flag of `vime train` (see `vime flags`) overrides the layout
#   PLAN=1 bash scripts/run-qwen3-4b-grpo.sh              `vime plan` of the same flags; needs no GPU, starts nothing;
#                                                         with --gpu h100: does it fit such GPUs?
#
#   MODE      the layout, a file of examples/MODEL/. colocate (default): trainer and engines take turns on all GPUs.
#             disaggregated: some GPUs train, the others generate. gb200: for GB200, if the model has such a file
#   MODEL     Hugging Face directory (default: random weights of the same shape, made in OUT)
#   DATA      prompt file: GSM8K (question, answer) or dapo-math (prompt and label, or prompt and reward_model); other
#             columns with --input-key, --label-key and --rm-type
#   OUT       folder for checkpoints and records (default runs/NAME, without MODEL runs/NAME-smoke); a second call
#             resumes where the first stopped
#   memory    if the layout does not fit the machine's GPUs and host, the launcher chooses the share of Adam on the host,
#             the tokens of a micro-batch, the LM head's workspace, the engine's share and remainders as main weights, and
#             prints the reasons. If this is too little, it also chooses recomputation and --offload-train. It never
#             changes flags that you set
#   NUM_GPUS  number of GPUs to use on a machine, for a layout of one node (default: --num-gpus-per-node if it is set,
#             otherwise all GPUs)
#   SETUP=0   use the Python on PATH (or PYTHON) unchanged, on machines with their own environment
#   RAY_ADDRESS=HOST:PORT joins that cluster; layouts of several nodes need it. DATA, MODEL and OUT must then be on a
#             file system that all nodes see
set -euo pipefail
EXAMPLE=$1 HUB=$2 # a folder of examples/ and the model's name on the hub, from scripts/run-EXAMPLE-grpo.sh
shift 2
if [[ "${1:-}" == -h || "${1:-}" == --help ]]; then
    sed -n '2,/^set -/{/^set -/d;s/^# \{0,1\}//;p;}' "${BASH_SOURCE[0]}" | sed "s/run-qwen3-4b-grpo/run-$EXAMPLE-grpo/"
    exit 0
fi
from_here() { [[ -z "$1" || "$1" == /* ]] && echo "$1" || echo "$PWD/$1"; }
MODE=${MODE:-colocate}
MODEL=$(from_here "${MODEL:-}")
DATA=$(from_here "${DATA:-}")
OUT=$(from_here "${OUT:-}")
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
OUT=${OUT:-runs/$EXAMPLE$([[ -n "$MODEL" ]] || echo -smoke)}
NUM_GPUS=${NUM_GPUS:-}
if [[ -z "$NUM_GPUS" && " $* " =~ \ --num-gpus-per-node[\ =]([0-9]+)\  ]]; then
    NUM_GPUS=${BASH_REMATCH[1]}
fi
PLAN=${PLAN:-0}
die() { echo "run-$EXAMPLE-grpo: $*" >&2; exit 2; }

# 1. The settings, and this machine's GPUs.
[[ "$MODE" != colocate ]] || MODE=colocated
LAYOUT="examples/$EXAMPLE/$MODE.yaml"
if [[ ! -f "$LAYOUT" ]]; then
    modes=$(basename -s .yaml "examples/$EXAMPLE"/*.yaml | sed 's/^colocated$/colocate/' | paste -sd ' ')
    die "MODE must be one of ${modes// /, }, got $MODE"
fi
layout_value() { sed -n "s/^$1: *\([0-9a-z]*\).*/\1/p" "$LAYOUT"; }
rollout_gpus=$(layout_value rollout-num-gpus)
layout_gpus=$(($(layout_value actor-num-nodes) * $(layout_value actor-num-gpus-per-node) + ${rollout_gpus:-0}))
node_gpus=$([[ "$(layout_value gpu)" == gb?00 ]] && echo 4 || echo 8)
NODES=$(((layout_gpus + node_gpus - 1) / node_gpus))
[[ -z "$NUM_GPUS" || "$NUM_GPUS" =~ ^[1-9][0-9]*$ ]] || die "NUM_GPUS must be a whole number above 0, got $NUM_GPUS"
[[ -z "$MODEL" || -f "$MODEL/config.json" ]] || die "MODEL must be a folder with a config.json, got $MODEL;" \
    "from the hub: hf download $HUB --local-dir ${HUB##*/}"
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
if ((NODES > 1)); then
    [[ -z "$NUM_GPUS" ]] || die "NUM_GPUS must be left out for a layout of $NODES nodes ($LAYOUT), got $NUM_GPUS"
    [[ "$PLAN" == 1 || -n "${RAY_ADDRESS:-}" ]] ||
        die "RAY_ADDRESS must be given for a layout of $NODES nodes ($LAYOUT), got none; see docs/several-hosts.md"
    [[ "$PLAN" == 1 || -n "$MODEL" ]] || die "MODEL must be given for a layout of $NODES nodes, got none"
else
    if [[ "$PLAN" == 1 && -n "$NUM_GPUS" ]]; then
        gpus=$NUM_GPUS # A plan may be for another machine.
    elif [[ "$PLAN" == 1 ]] && ((gpus == 0)); then
        gpus=$layout_gpus
        echo "PLAN: NUM_GPUS not given and no GPU here, planned for the $gpus of $LAYOUT" >&2
    fi
    if ((gpus == 0)) && [[ -z "${RAY_ADDRESS:-}" ]]; then
        die "a GPU must be there, got none ($why); on a CPU: bash scripts/run-tiny-grpo.sh, or PLAN=1 to see what would run"
    fi
    NUM_GPUS=${NUM_GPUS:-$gpus}
    ((NUM_GPUS > 0)) || die "NUM_GPUS must be given where this machine shows no GPU, got none; the GPUs of each machine"
    if [[ -z "${RAY_ADDRESS:-}" ]] && ((NUM_GPUS > gpus)); then
        die "NUM_GPUS must be at most the $gpus of this machine, got $NUM_GPUS; for more join a cluster with RAY_ADDRESS"
    fi
    if [[ "$MODE" == disaggregated* ]] && ((NUM_GPUS < 2)); then
        die "NUM_GPUS must be 2 or more with MODE=$MODE, got $NUM_GPUS; on one GPU: MODE=colocate"
    fi
fi

if [[ "${SETUP:-1}" == 1 ]]; then
    bash scripts/setup.sh
    PATH="$(cd "${VENV:-.venv}/bin" && pwd):$PATH"
    PYTHON=python
fi
PYTHON=${PYTHON:-python3}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" # processes that Ray and the engines start also import this folder
missing=$("$PYTHON" -P - <<'PY'
from importlib.metadata import entry_points
from importlib.util import find_spec


def found(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # The parent package is missing, too.
        return False


needed = ("torch", "transformers", "safetensors", "megatron.core", "ray", "vllm", "vllm_router")
plugins = entry_points(group="vllm.general_plugins").names
print(*(name for name in needed if not found(name)), *([] if "vime_weight_transfer" in plugins else ["vime"]))
PY
) || die "PYTHON must be an interpreter, got $PYTHON; leave SETUP=0 out to have one set up"
[[ -z "${missing// /}" ]] || die "PYTHON must have the packages of requirements/gpu.txt and vime itself" \
    "(pip install --no-deps --no-build-isolation --editable .), got $PYTHON without: $missing"
if [[ -n "$MODEL" ]] && ! grep -q '^expert-model-parallel-size' "$LAYOUT"; then
    experts=$("$PYTHON" -P -c '
import sys
from slime.checkpoints.hf_config import read_hf_config
from slime.models.reading import expert_count
try:
    print(expert_count(read_hf_config(sys.argv[1])))
except ValueError as error:
    sys.exit(f"{sys.argv[2]}: {error}")
' "$MODEL" "run-$EXAMPLE-grpo") || exit 2
    # Otherwise each rank would have all experts: by `vime plan`, Qwen3-30B-A3B needs 191 GiB on each of 8 GPUs.
    ((experts == 0)) || die "MODEL must be dense, got $MODEL with $experts experts a layer;" \
        "a launcher for such a model: scripts/run-qwen3-30b-a3b-grpo.sh"
fi

# 2. Placement: the layout's file, adapted to this machine's GPUs, and to the memory of its GPUs and its host. This comes
# before the weights are made, so that a run that cannot fit ends at once.
SIZE_ARGS=() CHOSEN_ARGS=() SMOKE_ARGS=()
[[ -n "$MODEL" ]] || SMOKE_ARGS=(--num-rollout 10 --rollout-max-response-len 512)
SHAPE=$MODEL
if [[ -z "$MODEL" ]]; then
    SHAPE="$OUT/plan-$EXAMPLE"
    [[ -f "$SHAPE/config.json" ]] ||
        "$PYTHON" scripts/make_model.py --arch "$EXAMPLE" --no-weights --arithmetic "$SHAPE"
fi
if ((NODES == 1)); then
    read -ra SIZE_ARGS <<<"$("$PYTHON" scripts/lib/scale_layout.py "$LAYOUT" "$NUM_GPUS")"
    chosen=$("$PYTHON" -P -m vime.memory.choose "$([[ "$PLAN" == 1 ]] && echo --plan || echo --run)" --device cuda \
        --config examples/grpo.yaml "$LAYOUT" "${SIZE_ARGS[@]}" --hf-checkpoint "$SHAPE" --rm-type gsm8k \
        --prompt-data "${DATA:-$SHAPE/arithmetic/train.jsonl}" --save "$OUT/checkpoint" --run-dir "$OUT/grpo" \
        "${SMOKE_ARGS[@]}" -- "$@") || exit 2
    read -ra CHOSEN_ARGS <<<"$chosen"
fi

# 3. Model and data. Without MODEL, this is a smoke run: a random model learns nothing, and its rewards stay 0.
if [[ -z "$MODEL" ]]; then
    MODEL=$SHAPE
    if [[ "$PLAN" != 1 ]]; then
        MODEL="$OUT/random-$EXAMPLE"
        [[ -f "$MODEL/config.json" ]] ||
            "$PYTHON" scripts/make_model.py --arch "$EXAMPLE" --random --arithmetic "$MODEL"
    fi
    cat >&2 <<'TEXT'
**************************************************************************************************
SMOKE RUN: MODEL was not given, so the weights are random. It shows that the parts work together,
and at what speed; nothing is learned and nothing saved. For training: MODEL=... DATA=...
**************************************************************************************************
TEXT
    if [[ -z "$DATA" ]]; then
        DATA="$MODEL/arithmetic/train.jsonl"
        SMOKE_ARGS+=(--rm-type gsm8k)
    fi
    CKPT_ARGS=(--hf-checkpoint "$MODEL" --overwrite)
else
    CKPT_ARGS=(
        --hf-checkpoint "$MODEL"
        --load "$OUT/checkpoint" # The run resumes from this folder if it has a checkpoint.
        --save "$OUT/checkpoint"
        --save-interval 20
    )
fi
if [[ " $* " == *" --input-key"[\ =]* ]]; then
    DATA_ARGS=() # The user's flags name the columns.
else
    layout=$("$PYTHON" -P - "$DATA" "$EXAMPLE" <<'PY'
import json
import sys

LAYOUTS = {
    ("question", "answer"): "--input-key question --label-key answer --rm-type gsm8k",
    ("prompt", "label"): "--input-key prompt --label-key label --rm-type deepscaler",
    ("prompt", "reward_model"): "--input-key prompt --label-key reward_model.ground_truth --rm-type dapo --reward-key score",
}
columns = None
if sys.argv[1].endswith(".jsonl"):  # read here, because the import of `datasets` takes 3 s on a GPU host
    try:
        with open(sys.argv[1], encoding="utf-8") as file:
            columns = json.loads(file.readline())
    except ValueError:
        pass
if not isinstance(columns, dict):
    from slime.data.prompts import read_file

    try:
        columns = next(read_file(sys.argv[1], flag="DATA"), {})
    except ValueError as error:
        sys.exit(f"run-{sys.argv[2]}-grpo: {error}")
for needed, flags in LAYOUTS.items():
    if set(needed) <= set(columns):
        print(flags)
        break
else:
    sys.exit(
        f"run-{sys.argv[2]}-grpo: DATA must have the columns {' or '.join(' and '.join(n) for n in LAYOUTS)}, "
        f"got {sorted(columns)}; name them with --input-key, --label-key and --rm-type"
    )
PY
) || exit 2
    read -ra DATA_ARGS <<<"$layout"
fi

COMMAND=train
if [[ "$PLAN" == 1 ]]; then
    COMMAND=plan
else
    echo "curves, at any time: vime plot $OUT/grpo"
fi
# With exec, signals reach the run itself, and it ends only the processes that it started.
exec "$PYTHON" -P -m vime "$COMMAND" --device cuda --config examples/grpo.yaml "$LAYOUT" "${SIZE_ARGS[@]}" \
    "${CHOSEN_ARGS[@]}" "${CKPT_ARGS[@]}" --prompt-data "$DATA" "${DATA_ARGS[@]}" "${SMOKE_ARGS[@]}" --run-dir "$OUT/grpo" "$@"
