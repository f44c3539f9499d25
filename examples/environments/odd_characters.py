"""An environment for `verifiers` that an untrained model can learn: `load_environment`, as on the Environments Hub.

The reward is the share of the answer's characters whose code is odd. After the first answer, the environment sends
another message, so that an episode has two turns.
"""

from __future__ import annotations

from typing import Any

import verifiers as vf
from datasets import Dataset


def odd_share(completion: list[Any], **_: object) -> float:
    """Returns the share of the characters of all answers whose code is odd."""
    text = "".join(str(message["content"]) for message in completion if message["role"] == "assistant")
    return sum(ord(character) % 2 for character in text) / max(1, len(text))


class TwoTurns(vf.MultiTurnEnv):
    """Asks for a second answer."""

    async def env_response(self, messages: list[Any], state: Any, **_: object) -> list[dict[str, str]]:
        return [{"role": "user", "content": "Once more."}]


def load_environment(tasks: int = 64) -> vf.Environment:
    """Returns the environment with `tasks` prompts."""
    rows = [{"question": f"Write {number} characters.", "answer": ""} for number in range(1, tasks + 1)]
    return TwoTurns(max_turns=2, dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[odd_share]))
