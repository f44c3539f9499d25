#!/usr/bin/env bash
# Set up like a run does, then pass every test that needs no GPU. Arguments go to pytest: bash scripts/test.sh -k packing
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash scripts/setup.sh
exec "${VENV:-.venv}/bin/python" -m pytest -m "not gpu and not multi_gpu" "$@"
