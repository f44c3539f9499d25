#!/usr/bin/env bash
# GRPO of Qwen3-4B. All options: bash scripts/run-qwen3-4b-grpo.sh --help
set -euo pipefail
exec bash "$(dirname "${BASH_SOURCE[0]}")/lib/launch.sh" qwen3-4b Qwen/Qwen3-4B "$@"
