#!/usr/bin/env bash
# Checks that the reward rises in every combination: four GRPO runs of a small model that makes errors in addition, and their
# curves in one plot. Trainer and engine take turns or run concurrently, with and without the kernels of rl_kernel.
#
#   bash scripts/learning-curves.sh                                       on GPUs; two of them for MODES=disaggregated
#   MODES=colocate FASTS=auto bash scripts/learning-curves.sh             some of the four
#   DEVICE=cpu SFT_ROLLOUTS=24 ROLLOUTS=12 bash scripts/learning-curves.sh    a smaller model on a CPU: 15 minutes
#   bash scripts/learning-curves.sh --rlk-consistency audit               any flag of `vime train`, for the four runs
#
#   OUT           model, checkpoints, run directories {mode}-{fast}, plots (default runs/curves); existing files are kept
#   SFT_ROLLOUTS  number of warm-up rollouts, ten optimizer steps each (default 20)
#   ROLLOUTS      number of rollouts of each run (default 12)
#   SETUP=0       use the Python on PATH (or PYTHON) unchanged
set -euo pipefail
if [[ "${1:-}" == -h || "${1:-}" == --help ]]; then
    sed -n '2,/^set -/{/^set -/d;s/^# \{0,1\}//;p;}' "${BASH_SOURCE[0]}"
    exit 0
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."
OUT=${OUT:-runs/curves}
MODES=${MODES:-colocate disaggregated}
FASTS=${FASTS:-auto off}
DEVICE=${DEVICE:-cuda}
case "$DEVICE" in
    cuda)
        if ! { nvidia-smi -L 2>/dev/null || true; } | grep -q '^GPU'; then
            echo "learning-curves: a GPU must be there, got none; on a CPU: DEVICE=cpu" >&2
            exit 2
        fi
        ARCH=qwen3-50m SFT_LR=3e-4 LR=2e-5
        ENGINE_ARGS=(--vllm-gpu-memory-utilization 0.3 --vllm-max-model-len 1024)
        ;;
    cpu)
        ARCH=qwen3-tiny SFT_LR=1e-3 LR=2e-4
        ENGINE_ARGS=()
        ;;
    *) echo "learning-curves: DEVICE must be cuda or cpu, got $DEVICE" >&2; exit 2 ;;
esac
for mode in $MODES; do
    [[ "$mode" == colocate || "$mode" == disaggregated ]] ||
        { echo "learning-curves: MODES must be of colocate and disaggregated, got $mode" >&2; exit 2; }
done
if [[ "${SETUP:-1}" == 1 ]]; then
    bash scripts/setup.sh
    PYTHON="${VENV:-.venv}/bin/python"
fi
PYTHON=${PYTHON:-python3}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
vime() { "$PYTHON" -m vime "$@"; }

# 1. A random model, warmed up on data with three wrong answers in ten.
[[ -f "$OUT/base/config.json" ]] ||
    "$PYTHON" scripts/make_model.py --arch "$ARCH" --random --arithmetic --device "$DEVICE" "$OUT/base"
DATA="$OUT/base/arithmetic"
if [[ ! -f "$OUT/warm/config.json" ]]; then
    vime train --device "$DEVICE" --hf-checkpoint "$OUT/base" --loss-type sft_loss \
        --rollout-function-path slime.rollout.sft_rollout.generate_rollout --debug-train-only \
        --prompt-data "$DATA/sft.jsonl" --input-key messages --rollout-shuffle \
        --num-rollout "${SFT_ROLLOUTS:-20}" --rollout-batch-size 1280 --global-batch-size 128 \
        --disable-compute-advantages-and-returns --calculate-per-token-loss \
        --lr "$SFT_LR" --lr-warmup-iters 10 --adam-beta2 0.95 --weight-decay 0 \
        --actor-num-gpus-per-node 1 --use-dynamic-batch-size --max-tokens-per-gpu 16384 \
        --accumulate-allreduce-grads-in-fp32 --save "$OUT/sft-checkpoint" --no-save-optim --run-dir "$OUT/sft" --overwrite
    vime export --load "$OUT/sft-checkpoint" --hf-checkpoint "$OUT/base" --output-dir "$OUT/warm"
fi

# 2. The runs. All use the same prompts and start with the same weights. A complete run is not repeated.
GRPO_ARGS=(
    --device "$DEVICE" --hf-checkpoint "$OUT/warm" --actor-num-gpus-per-node 1
    --prompt-data "$DATA/train.jsonl" --input-key prompt --label-key label --apply-chat-template --rollout-shuffle
    --rm-type gsm8k --num-rollout "${ROLLOUTS:-12}" --rollout-batch-size 64 --n-samples-per-prompt 16
    --rollout-max-response-len 8 --rollout-temperature 1
    --global-batch-size 256 # four optimizer steps per rollout
    --advantage-estimator grpo --eps-clip 0.2 --eps-clip-high 0.28
    --lr "$LR" --adam-beta2 0.95 --weight-decay 0 --accumulate-allreduce-grads-in-fp32
    --use-dynamic-batch-size --max-tokens-per-gpu 16384 --balance-data
    --overwrite # a run that was stopped begins anew
)
run_dirs=()
for mode in $MODES; do
    [[ "$mode" == colocate ]] && mode_args=(--colocate) || mode_args=(--rollout-num-gpus 1)
    for fast in $FASTS; do
        run_dir="$OUT/$mode-$fast"
        run_dirs+=("$run_dir")
        if [[ -f "$run_dir/whole" ]]; then
            continue
        fi
        vime train "${mode_args[@]}" "${GRPO_ARGS[@]}" "${ENGINE_ARGS[@]}" --rlk-fast "$fast" --run-dir "$run_dir" "$@"
        touch "$run_dir/whole"
    done
done

# 3. The picture.
vime plot "${run_dirs[@]}" --out "$OUT/plots"
