#!/usr/bin/env bash
# What can only be shown on GPUs: the tests of tests/gpu, then a few steps of a random Qwen3-4B, then its rollout beside
# raw vLLM, and one table of the figures against their targets. With one GPU the tests marked `gpu` and a colocated run,
# with two or more `multi_gpu` and a disaggregated run too. A test that would be skipped is an error. Needs an environment
# with requirements/gpu.txt, pytest and vime itself (PYTHON, default python3). The run of a few steps (smoke) needs about
# 125 GiB of memory on its GPU (an H200): PARTS="tests table" or "tests rollout table" leaves it out.
#
#   bash scripts/test-gpu.sh
#   bash scripts/test-gpu.sh -k attention           the tests alone; any option of pytest
#   PARTS="tests table" bash scripts/test-gpu.sh    some of: tests smoke rollout table
#
#   OUT      records (default runs/test-gpu), replaced; the model in it is kept
#   FIGURES  more run directories and JSON files for the table, see vime/bench/gpu_numbers.py
set -euo pipefail
if [[ "${1:-}" == -h || "${1:-}" == --help ]]; then
    sed -n '2,/^set -/{/^set -/d;s/^# \{0,1\}//;p;}' "${BASH_SOURCE[0]}"
    exit 0
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHON=${PYTHON:-python3}
PARTS=${PARTS:-tests smoke rollout table}
(($# == 0)) || PARTS=tests
OUT=${OUT:-runs/test-gpu}
gpus=$("$PYTHON" -c "import torch; print(torch.cuda.device_count())")
case "$gpus" in
    0) echo "test-gpu: a GPU must be there, got none; tests without one: bash scripts/test.sh" >&2; exit 2 ;;
    1) marked="gpu and not multi_gpu" modes=colocate ;;
    *) marked="gpu or multi_gpu" modes="colocate disaggregated" ;;
esac
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
mkdir -p "$OUT"
failed=()
wants() { [[ " $PARTS " == *" $1 "* ]]; }
step() { echo "test-gpu: [$SECONDS s] $*"; }

# A part that fails is named at the end; the others and the table are worth having all the same.
if wants tests; then
    step "tests marked $marked"
    "$PYTHON" -m pytest -q --require-gpu -m "$marked" tests/gpu "$@" || failed+=(tests)
fi

# Eleven steps where memory must not grow from the third to the tenth. Micro-batches of 16k tokens.
smoke() { # MODE
    local run_dir="$OUT/$1" steps=11 memory status=0
    [[ "$1" == colocate ]] || steps=5
    rm -rf "$run_dir" && mkdir -p "$run_dir"
    nvidia-smi --query-gpu=timestamp,index,memory.used --format=csv,noheader,nounits -lms 500 -i 0 \
        >"$run_dir/gpu_memory.csv" &
    memory=$!
    SETUP=0 MODE="$1" NUM_GPUS="$2" OUT="$OUT" bash scripts/run-qwen3-4b-grpo.sh --num-rollout "$steps" \
        --rollout-max-response-len 256 --max-tokens-per-gpu 16384 --run-dir "$run_dir" || status=$?
    kill "$memory"
    return "$status"
}
if wants smoke; then
    for mode in $modes; do
        step "a random Qwen3-4B, $mode"
        smoke "$mode" "$([[ "$mode" == colocate ]] && echo 1 || echo 2)" || failed+=("$mode")
    done
fi

model="$OUT/random-qwen3-4b"
if wants rollout; then
    step "rollout beside raw vLLM"
    [[ -f "$model/config.json" ]] ||
        "$PYTHON" scripts/make_model.py --arch qwen3-4b --random --arithmetic "$model"
    "$PYTHON" -m vime.bench.rollout_speed --model "$model" --device cuda --rounds 2 \
        --vllm-gpu-memory-utilization 0.85 --out "$OUT/rollout_speed.json" || failed+=(rollout)
fi

if wants table; then
    step "figures and targets"
    read -ra paths <<<"${FIGURES:-}"
    for path in "$OUT"/{colocate,disaggregated} "$OUT/rollout_speed.json"; do
        [[ ! -f "$path/metrics.jsonl" && ! -f "$path" ]] || paths+=("$path")
    done
    "$PYTHON" -m vime.bench.gpu_numbers benchmarks/results/operators_h200.json "${paths[@]}" \
        --out "$OUT/figures.json" || failed+=(table)
fi
step "done"
if ((${#failed[@]})); then
    echo "test-gpu: failed: ${failed[*]}" >&2
    exit 1
fi
