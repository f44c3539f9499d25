#!/usr/bin/env bash
# Runs the tests that need GPUs and prints one table that compares figures with their targets. Needs an environment with
# requirements/gpu.txt, pytest, pytest-xdist and vime itself (PYTHON, default python3), and GPUs that no other process
# uses.
#
#   CUDA_VISIBLE_DEVICES=0 bash scripts/test-gpu.sh    one GPU: its tests, and a colocated run of a random Qwen3-4B
#   bash scripts/test-gpu.sh                           two or more GPUs: their tests, a disaggregated run, rollout speed
#   bash scripts/test-gpu.sh -k attention              all tests with that name; any option of pytest
#   PARTS="tests table" bash scripts/test-gpu.sh       some of: tests smoke rollout table
#
# Tests run concurrently. The run of the 4B (smoke) starts at the same time, on one GPU after the tests of offloading and of
# features, makes two steps, and waits until the tests have ended. On two GPUs, the engine that is compared with plain vLLM
# (rollout) also starts at the same time, and waits until that run has ended. The memory of the smallest GPU decides how the
# 4B runs, and the output names the choice:
#
#   130 GiB or more   micro-batches of 16k tokens, started while the tests run
#   78 GiB or more    full recomputation, micro-batches of 8k tokens, started after the tests. On one GPU, the trainer's
#                     weights and optimizer are on the host while the engine generates
#
# A test that needs more GPUs than there are is an error. Tests of models that the installed vLLM lacks are skipped.
#
#   OUT      records (default runs/test-gpu); each part replaces its own record; the model in it is kept
#   FIGURES  more run directories and JSON files for the table, see benchmarks/gpu_numbers.py
set -euo pipefail
if [[ "${1:-}" == -h || "${1:-}" == --help ]]; then
    sed -n '2,/^set -/{/^set -/d;s/^# \{0,1\}//;p;}' "${BASH_SOURCE[0]}"
    exit 0
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHON=${PYTHON:-python3}
OUT=${OUT:-runs/test-gpu}
[[ "$OUT" == /* ]] || OUT="$PWD/$OUT"
probe="
import torch
gpus = [torch.cuda.get_device_properties(i).total_memory >> 30 for i in range(torch.cuda.device_count())]
print(len(gpus), min(gpus, default=0))
"
if ! seen=$("$PYTHON" -c "$probe" 2>/dev/null); then
    echo "test-gpu: PYTHON must be an interpreter with torch, got $PYTHON; source .venv/bin/activate" >&2
    exit 2
fi
read -r gpus gib <<<"$seen"
visible=${CUDA_VISIBLE_DEVICES:-$(seq -s , 0 $((gpus - 1)))}
first=${visible%%,*} last=${visible##*,}
export PYTHONPATH="$PWD:$PWD/benchmarks${PYTHONPATH:+:$PYTHONPATH}"
if ((gpus == 0)); then
    echo "test-gpu: a GPU must be there, got none; tests without one: bash scripts/test.sh" >&2
    exit 2
elif (($#)); then
    marked="gpu or multi_gpu"
    ((gpus > 1)) || marked="gpu and not multi_gpu"
    exec "$PYTHON" -m pytest -q --require-gpu -m "$marked" tests/gpu "$@"
elif ((gpus == 1)); then
    PARTS=${PARTS:-tests smoke table} MODE=colocate marked="gpu and not multi_gpu"
    faults=tests/gpu/test_faults_gpu.py offload=tests/gpu/test_offload_gpu.py
    runs=tests/gpu/test_runs_gpu.py families=tests/gpu/test_families_gpu.py fp8=tests/gpu/test_fp8_gpu.py
    features=tests/gpu/features # about 30 whole runs; four run at a time
    short=("$offload" "$features -n 4") long=("$faults -k engines" "$faults -k not_engines" "$runs" "$families $fp8"
        "tests/gpu --ignore=$offload --ignore=$faults --ignore=$runs --ignore=$families --ignore=$fp8 --ignore=$features")
else
    PARTS=${PARTS:-tests smoke rollout table} MODE=disaggregated marked=multi_gpu
    faults=tests/gpu/test_faults_gpu.py layouts=tests/gpu/test_layouts_gpu.py
    short=() long=("$faults" "$layouts" "tests/gpu --ignore=$layouts --ignore=$faults")
    echo "test-gpu: tests of one GPU and a colocated run: CUDA_VISIBLE_DEVICES=0 bash scripts/test-gpu.sh"
fi
wants() { [[ " $PARTS " == *" $1 "* ]]; }
step() { echo "test-gpu: [$SECONDS s] $*"; }
# The 4B needs 124 GiB beside an engine, and the tests need some of the rest. Recomputed, it needs 76 GiB (vime plan).
roomy=$((gib >= 130)) kv_cache=$((16 << 30)) card=("--max-tokens-per-gpu" 16384)
if ((!roomy)); then
    kv_cache=$((8 << 30))
    card=(--max-tokens-per-gpu 8192 --rl-kernel-workspace-mib 512
        --recompute-granularity full --recompute-method uniform --recompute-num-layers 1)
    [[ "$MODE" != colocate ]] || card+=(--offload-train)
fi
if wants smoke; then
    if ((gib < 78)); then
        echo "test-gpu: a GPU must have 78 GiB or more for the 4B, got $gib GiB; leave smoke out: PARTS=\"tests table\"" >&2
        exit 2
    fi
    step "GPUs of $gib GiB: the 4B runs $( ((roomy)) && echo "beside the tests" || echo "after the tests") with ${card[*]}"
fi
failed=()
mkdir -p "$OUT"
# Bash makes background processes ignore Ctrl-C.
trap 'kill $(jobs -p) 2>/dev/null || true; wait' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# One pytest process per group of tests. Failures are printed at the end, and the other groups still run.
declare -A running=()
begin() { # GROUP...
    local group log words
    for group in "$@"; do
        log="$OUT/tests-${#running[@]}.log"
        read -ra words <<<"$group"
        "$PYTHON" -m pytest -q -p no:cacheprovider --durations=8 --require-gpu -m "$marked" \
            "${words[@]/not_/not }" >"$log" 2>&1 &
        running[$group]="$! $log"
    done
}
# Waits for a process in steps of 0.2 s, so that Ctrl-C ends the script within that time. In `wait` alone it once did not.
await() { # PID
    while kill -0 "$1" 2>/dev/null; do sleep 0.2; done
    wait "$1"
}
end() { # GROUP...
    local group pid log
    for group in "$@"; do
        read -r pid log <<<"${running[$group]}"
        await "$pid" || failed+=("$group")
        step "$group"
        tail -n 40 "$log"
    done
}

# Eleven steps. Memory must not grow from the third to the tenth step. The engine's KV cache is given in bytes, because
# vLLM's own measurement would count the memory of the tests: 16 GiB are 116,000 tokens, more than the 256 samples of either
# part have. With 8 GiB, a tenth of the samples waits.
smoke() {
    export SETUP=0 NUM_GPUS=$((gpus > 1 ? 2 : 1)) OUT MODE
    exec bash scripts/run-qwen3-4b-grpo.sh \
        --num-rollout 11 --rollout-max-response-len 256 "${card[@]}" --vllm-gpu-memory-utilization 0.2 \
        --vllm-kv-cache-memory-bytes "$kv_cache" --vllm-max-model-len 1024 --run-dir "$OUT/$MODE" \
        --custom-generate-function-path gpu_alone.generate_when_alone >"$OUT/smoke.log" 2>&1
}
# This runs on the last GPU. With two GPUs, the run above has its engine there.
rollout() {
    CUDA_VISIBLE_DEVICES=$last exec "$PYTHON" benchmarks/rollout_speed.py --model "$model" --device cuda --rounds 3 \
        --vllm-gpu-memory-utilization 0.2 --vllm-kv-cache-memory-bytes "$((16 << 30))" \
        --after "$OUT/smoke-ended" --out "$OUT/rollout_speed.json" >"$OUT/rollout_speed.log" 2>&1
}
model="$OUT/random-qwen3-4b"
if { wants smoke || wants rollout; } && [[ ! -f "$model/config.json" ]]; then
    step "a random Qwen3-4B"
    "$PYTHON" scripts/make_model.py --arch qwen3-4b --random --arithmetic "$model" &
    making=$!
fi
if wants tests; then
    rm -f "$OUT"/tests-*.log
    step "tests marked $marked, concurrently"
    begin "${short[@]}" "${long[@]}"
    end "${short[@]}"
fi
[[ -z "${making:-}" ]] || await "$making" || failed+=(model)
rm -f "$OUT/smoke-ended"
((roomy)) || ! wants tests || end "${long[@]}"
if wants smoke; then
    step "the Qwen3-4B starts, $MODE"
    rm -rf "${OUT:?}/$MODE"
    mkdir -p "$OUT/$MODE"
    smoke &
    smoking=$!
fi
start_rollout() {
    step "the engine for the comparison with plain vLLM starts"
    rm -f "$OUT/rollout_speed.json"
    rollout &
    rolling=$!
}
# One GPU has no room for it together with the 4B.
! wants rollout || ((gpus == 1)) || start_rollout
((!roomy)) || ! wants tests || end "${long[@]}"
if [[ -n "${smoking:-}" ]]; then
    nvidia-smi --query-gpu=timestamp,index,memory.used --format=csv,noheader,nounits -lms 500 -i "$first" \
        >"$OUT/$MODE/gpu_memory.csv" &
    memory=$!
    date +%s >"$OUT/$MODE/alone_from"
    await "$smoking" || failed+=("$MODE")
    kill "$memory" || true
    step "$MODE"
    tail -n 30 "$OUT/smoke.log"
fi
if wants rollout; then
    touch "$OUT/smoke-ended"
    [[ -n "${rolling:-}" ]] || start_rollout
    await "$rolling" || failed+=(rollout)
    step "rollout compared with plain vLLM"
    tail -n 8 "$OUT/rollout_speed.log"
fi
if wants table; then
    step "figures and targets"
    read -ra paths <<<"${FIGURES:-}"
    for path in "$OUT"/{colocate,disaggregated} "$OUT/rollout_speed.json"; do
        [[ ! -f "$path/metrics.jsonl" && ! -f "$path" ]] || paths+=("$path")
    done
    required=()
    ! wants smoke || required=(--require memory_growth)
    "$PYTHON" benchmarks/gpu_numbers.py benchmarks/results/operators_h200.json "${paths[@]}" \
        --out "$OUT/figures.json" "${required[@]}" || failed+=(table)
fi
step "done"
if ((${#failed[@]})); then
    printf 'test-gpu: failed: %s\n' "${failed[@]}" >&2
    exit 1
fi
