#!/usr/bin/env bash
# GRPO of Qwen3-1.7B. All options: bash scripts/run-qwen3-1.7b-grpo.sh --help
set -euo pipefail
exec bash "$(dirname "${BASH_SOURCE[0]}")/lib/launch.sh" qwen3-1.7b Qwen/Qwen3-1.7B "$@"
