#!/usr/bin/env bash
# GRPO of Qwen3-30B-A3B. All options: bash scripts/run-qwen3-30b-a3b-grpo.sh --help
set -euo pipefail
exec bash "$(dirname "${BASH_SOURCE[0]}")/lib/launch.sh" qwen3-30b-a3b Qwen/Qwen3-30B-A3B "$@"
