#!/usr/bin/env bash
# A long run of the tiny model under faults, and what its ledger says afterwards. All options: bash scripts/soak.sh --help
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh
exec "${VENV:-.venv}/bin/python" scripts/soak.py "$@"
