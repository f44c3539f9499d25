#!/usr/bin/env bash
# GRPO of Qwen3-235B-A22B. All options: bash scripts/run-qwen3-235b-a22b-grpo.sh --help
set -euo pipefail
exec bash "$(dirname "${BASH_SOURCE[0]}")/lib/launch.sh" qwen3-235b-a22b Qwen/Qwen3-235B-A22B "$@"
