#!/usr/bin/env bash
# Set up as a run does, then run the tests that need no GPU. Arguments go to pytest: bash scripts/test.sh -k packing
#
#   bash scripts/test.sh          what CI runs
#   bash scripts/test.sh --all    also the tests marked slow, before a release
#
# WORKERS=N changes the number of test processes (2).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

marked="not gpu and not multi_gpu and not slow"
if [[ "${1:-}" == --all ]]; then
    marked="not gpu and not multi_gpu"
    shift
fi
bash scripts/setup.sh
workers=(-n "${WORKERS:-2}" --dist loadfile --no-loadscope-reorder)
exec "${VENV:-.venv}/bin/python" -m pytest "${workers[@]}" -m "$marked" "$@"
