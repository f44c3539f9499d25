#!/usr/bin/env bash
# GRPO of Qwen3-14B. All options: bash scripts/run-qwen3-14b-grpo.sh --help
set -euo pipefail
exec bash "$(dirname "${BASH_SOURCE[0]}")/lib/launch.sh" qwen3-14b Qwen/Qwen3-14B "$@"
