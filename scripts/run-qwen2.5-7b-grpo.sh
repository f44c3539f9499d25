#!/usr/bin/env bash
# GRPO of Qwen2.5-7B-Instruct. All options: bash scripts/run-qwen2.5-7b-grpo.sh --help
set -euo pipefail
exec bash "$(dirname "${BASH_SOURCE[0]}")/lib/launch.sh" qwen2.5-7b Qwen/Qwen2.5-7B-Instruct "$@"
