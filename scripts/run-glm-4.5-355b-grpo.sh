#!/usr/bin/env bash
# GRPO of GLM-4.5. All options: bash scripts/run-glm-4.5-355b-grpo.sh --help
set -euo pipefail
exec bash "$(dirname "${BASH_SOURCE[0]}")/lib/launch.sh" glm-4.5-355b zai-org/GLM-4.5 "$@"
