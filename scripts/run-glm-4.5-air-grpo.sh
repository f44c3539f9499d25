#!/usr/bin/env bash
# GRPO of GLM-4.5-Air. All options: bash scripts/run-glm-4.5-air-grpo.sh --help
set -euo pipefail
exec bash "$(dirname "${BASH_SOURCE[0]}")/lib/launch.sh" glm-4.5-air zai-org/GLM-4.5-Air "$@"
