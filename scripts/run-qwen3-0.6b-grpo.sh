#!/usr/bin/env bash
# GRPO of Qwen3-0.6B. All options: bash scripts/run-qwen3-0.6b-grpo.sh --help
set -euo pipefail
exec bash "$(dirname "${BASH_SOURCE[0]}")/lib/launch.sh" qwen3-0.6b Qwen/Qwen3-0.6B "$@"
