#!/usr/bin/env bash
# The tests of tests/gpu on this machine's GPUs: with one GPU those marked `gpu`, with two or more `multi_gpu` too. A test
# that would be skipped is an error. Needs an environment with requirements/gpu.txt and pytest (PYTHON, default python3).
#
#   bash scripts/test-gpu.sh
#   bash scripts/test-gpu.sh -k attention     any option of pytest
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON=${PYTHON:-python3}
gpus=$("$PYTHON" -c "import torch; print(torch.cuda.device_count())")
case "$gpus" in
    0) echo "test-gpu: a GPU must be there, got none; tests without one: bash scripts/test.sh" >&2; exit 2 ;;
    1) marked="gpu and not multi_gpu" ;;
    *) marked="gpu or multi_gpu" ;;
esac
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
exec "$PYTHON" -m pytest -q --require-gpu -m "$marked" tests/gpu "$@"
