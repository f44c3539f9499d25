#!/usr/bin/env bash
# The soak of this repository: `vime soak` with a tiny model on a CPU, every fault, and the run directory on a small disk.
#
#   bash scripts/soak.sh                                        500 steps, the last 240 without faults
#   bash scripts/soak.sh --steps 70 --every 5 --quiet-steps 10  each fault once
#
# WORK is a new folder (default runs/soak). The record is WORK/run-soak: report.md and soak.json. Further words are
# options of `vime soak` and flags of `vime train`; `vime soak --help` lists the options.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh
bin="$PWD/${VENV:-.venv}/bin" work=$(realpath -m "${WORK:-runs/soak}") run=$(realpath -m "${WORK:-runs/soak}")/run
export PYTHONPATH="$PWD/examples/bench${PYTHONPATH:+:$PYTHONPATH}"

[[ ! -e $run ]] || { echo "WORK must be a new folder, got $work with a run; name another folder" >&2; exit 2; }
[[ -f $work/tiny/base/config.json ]] || "$bin/python" scripts/make_tiny_model.py "$work/tiny"
mkdir -p "$run"
faults=stopped-engine,delayed-replies,cut-replies,lost-replies
if reason=$(mount -t tmpfs -o size=256m tmpfs "$run" 2>&1); then
  faults+=,full-disk
  trap 'mkdir -p "$work/records" && cp -r "$run"/. "$work/records" && rm -rf "$work/records/checkpoint"; umount "$run"' EXIT
else
  echo "soak: LEFT OUT: full-disk: $reason" >&2
fi
"$bin/vime" soak --steps 500 --every 11 --quiet-steps 240 --median-s 12 --worst-s 45 \
  --kill engine,router,trainer,manager,driver,raylet,gcs --faults "$faults" \
  --device cpu --rollout-num-gpus 1 --actor-num-gpus-per-node 1 \
  --hf-checkpoint "$work/tiny/base" --prompt-data "$work/tiny/train.jsonl" \
  --input-key prompt --label-key label --apply-chat-template --rollout-shuffle \
  --custom-generate-function-path lengths.generate --custom-rm-path untrained.odd_share --rollout-deadline-s 40 --engine-standby-s 1 \
  --rollout-batch-size 8 --n-samples-per-prompt 4 --num-steps-per-rollout 1 --rollout-max-response-len 128 \
  --use-dynamic-batch-size --max-tokens-per-gpu 2048 --lr 1e-4 --use-rollout-logprobs --max-staleness 1 \
  --run-dir "$run" --save "$run/checkpoint" --load "$run/checkpoint" --save-interval 4 --max-actor-ckpt-to-keep 2 \
  --seed 0 "$@"
