#!/usr/bin/env bash
# GRPO of Qwen3-8B. All options: bash scripts/run-qwen3-8b-grpo.sh --help
set -euo pipefail
exec bash "$(dirname "${BASH_SOURCE[0]}")/lib/launch.sh" qwen3-8b Qwen/Qwen3-8B "$@"
