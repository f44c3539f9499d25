#!/usr/bin/env bash
set -euo pipefail
# The reward is the share of the answer's characters whose code is odd.
python3 - <<'END'
text = open("/app/answer.txt", encoding="utf-8").read()
reward = sum(ord(character) % 2 for character in text) / max(1, len(text))
open("/logs/verifier/reward.txt", "w").write(str(reward))
END
