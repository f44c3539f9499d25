#!/usr/bin/env bash
# Set up as a run does, then run the tests that need no GPU. Arguments go to pytest: bash scripts/test.sh -k packing
#
#   bash scripts/test.sh          what CI runs
#   bash scripts/test.sh --all    also the tests marked slow, before a release
#
# WORKERS=N changes the number of test processes (3). On two cores, two of them leave a third of the time unused: a test
# that started processes waits for them. Each has 2 GiB.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

marked="not gpu and not multi_gpu and not slow"
if [[ "${1:-}" == --all ]]; then
    marked="not gpu and not multi_gpu"
    shift
fi
bash scripts/setup.sh
# Where PYTHONDONTWRITEBYTECODE is set, each process that a test starts would compile the modules that it imports.
"${VENV:-.venv}/bin/python" -m compileall -q -j 0 rl_kernel slime vime
workers=(-n "${WORKERS:-3}" --dist loadfile --no-loadscope-reorder)
exec "${VENV:-.venv}/bin/python" -m pytest "${workers[@]}" -m "$marked" "$@"
