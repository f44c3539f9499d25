#!/usr/bin/env bash
# GRPO of Qwen3-32B. All options: bash scripts/run-qwen3-32b-grpo.sh --help
set -euo pipefail
exec bash "$(dirname "${BASH_SOURCE[0]}")/lib/launch.sh" qwen3-32b Qwen/Qwen3-32B "$@"
