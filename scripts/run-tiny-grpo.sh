#!/usr/bin/env bash
# A first GRPO run on any machine: sets up, makes a tiny model that makes errors in two-digit addition, and trains it until
# it makes clearly fewer. It takes about six minutes on two CPU cores. It needs no GPU and downloads only Python packages.
#
#   bash scripts/run-tiny-grpo.sh                       trainer and engine take turns (colocated)
#   OUT=runs/apart MODE=disaggregated bash scripts/run-tiny-grpo.sh    each runs on its own half of the cores
#   OUT=runs/async MODE=async bash scripts/run-tiny-grpo.sh            generation runs one rollout ahead of training
#   bash scripts/run-tiny-grpo.sh --num-rollout 100     any flag of `vime train` (see `vime flags`)
#   WARM_UP=8 bash scripts/run-tiny-grpo.sh             warm up in a third of the time, to a model that makes more errors
#
# OUT=DIR names the folder for model, checkpoints and records (default runs/tiny). A second call resumes the run in the
# same MODE. Remove the folder to start a new run.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash scripts/setup.sh
PATH="$(cd "${VENV:-.venv}/bin" && pwd):$PATH"
OUT=${OUT:-runs/tiny}
MODE=${MODE:-colocate}

case "$MODE" in
    colocate) MODE_ARGS=(--colocate) ;;
    disaggregated) MODE_ARGS=(--rollout-num-gpus 1) ;;
    async) MODE_ARGS=(--rollout-num-gpus 1 --max-staleness 1) ;;
    *) echo "MODE must be colocate, disaggregated or async, got $MODE" >&2; exit 2 ;;
esac
mkdir -p "$OUT"
before=$(cat "$OUT/mode" 2>/dev/null || echo "$MODE")
if [[ "$before" != "$MODE" ]]; then
    echo "OUT must be a folder of this MODE, got $OUT, where MODE=$before began; name another: OUT=runs/$MODE" >&2
    exit 2
fi
echo "$MODE" >"$OUT/mode"

# 1. A random model and its addition data.
[[ -f "$OUT/sft.jsonl" ]] || python scripts/make_tiny_model.py "$OUT"
source scripts/models/qwen3-tiny.sh

# 2. The flags of GRPO.
CKPT_ARGS=(
    --load "$OUT/checkpoint" # resume from here if it has a checkpoint
    --save "$OUT/checkpoint"
    --save-interval 10
)
ROLLOUT_ARGS=(
    --prompt-data "$OUT/train.jsonl"
    --input-key prompt
    --label-key label
    --apply-chat-template
    --rollout-shuffle
    --rm-type gsm8k # the last number of the response must be the label
    --num-rollout 20
    --rollout-batch-size 64
    --n-samples-per-prompt 16
    --rollout-max-response-len 5
    --rollout-temperature 1
    --global-batch-size 256 # four optimizer steps per rollout
)
EVAL_ARGS=(
    --eval-interval 10
    --eval-prompt-data addition "$OUT/test.jsonl"
    --eval-temperature 0.01
)
GRPO_ARGS=(
    --advantage-estimator grpo
    --eps-clip 0.2
    --eps-clip-high 0.28
)
OPTIMIZER_ARGS=(
    --lr 2e-4
    --adam-beta2 0.95
    --weight-decay 0
)
PERF_ARGS=(
    --actor-num-gpus-per-node 1
    --use-dynamic-batch-size
    --max-tokens-per-gpu 16384
    --balance-data
)
GRPO_RUN=(
    "${MODE_ARGS[@]}" "${MODEL_ARGS[@]}" "${CKPT_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "${EVAL_ARGS[@]}" "${GRPO_ARGS[@]}"
    "${OPTIMIZER_ARGS[@]}" "${PERF_ARGS[@]}" --use-tensorboard --run-dir "$OUT/grpo" "$@"
)

# 3. Supervised warm-up with the trainer that GRPO uses. Three in ten answers of its data are wrong, so the model errs too.
if [[ ! -f "$OUT/warm/config.json" ]]; then
    vime plan --hf-checkpoint "$OUT/base" "${GRPO_RUN[@]}" >/dev/null # a wrong flag is an error before the warm-up
    SFT_ARGS=(
        --loss-type sft_loss
        --rollout-function-path slime.rollout.sft_rollout.generate_rollout
        --debug-train-only # no engine: the answers are in the data
        --prompt-data "$OUT/sft.jsonl"
        --input-key messages
        --rollout-shuffle
        --num-rollout "${WARM_UP:-24}"
        --rollout-batch-size 1280
        --global-batch-size 128 # ten optimizer steps per rollout
        --disable-compute-advantages-and-returns
        --calculate-per-token-loss
        --lr 1e-3
        --lr-warmup-iters 10
        --adam-beta2 0.95
        --weight-decay 0
        --actor-num-gpus-per-node 1
        --use-dynamic-batch-size
        --max-tokens-per-gpu 16384
        --save "$OUT/sft-checkpoint"
        --no-save-optim
        --overwrite # what a warm-up that was stopped has left
    )
    vime train --hf-checkpoint "$OUT/base" "${MODEL_ARGS[@]}" "${SFT_ARGS[@]}" --run-dir "$OUT/sft"
    vime export --load "$OUT/sft-checkpoint" --hf-checkpoint "$OUT/base" --output-dir "$OUT/warm"
fi

# 4. GRPO.
vime train --hf-checkpoint "$OUT/warm" "${GRPO_RUN[@]}"

# 5. Draw the metrics and print a summary.
vime plot "$OUT/grpo"
python -P - "$OUT/grpo" <<'END'
import json, sys

with open(f"{sys.argv[1]}/metrics.jsonl") as lines:
    records = [json.loads(line) for line in lines]
rewards = [r["rollout/raw_reward"] for r in records if "rollout/raw_reward" in r]
gaps = [r["train/train_rollout_logprob_abs_diff"] for r in records if "train/train_rollout_logprob_abs_diff" in r]
print(f"reward: {rewards[0]:.3f} in the first rollout, {rewards[-1]:.3f} in the last of {len(rewards)}")
with open(f"{sys.argv[1]}/config.json") as file:
    stale = any(part.get("max_staleness") for part in json.load(file).values() if isinstance(part, dict))
whose = "the trainer and an engine that may be an update behind" if stale else "engine and trainer"
print(f"log-prob difference between {whose}: mean of every step at most {max(gaps):.1e}")
print(f"the picture: {sys.argv[1]}/plots/overview.png")
END
