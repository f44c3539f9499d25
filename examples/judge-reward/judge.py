"""A reward from a judge: a frozen model that a separate engine of the run serves.

    PYTHONPATH=examples/judge-reward vime train ... --vllm-config models.yaml --custom-rm-path judge.score

The judge has the policy's tokenizer in this example, so it scores token ids. A judge of another family needs text
instead: post the text to `get_model_url(args, "judge", "/v1/completions")`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from slime.rollout.sglang_rollout import GenerateState
from slime.utils.types import Sample


async def score(args: Any, sample: Sample, **kwargs: Any) -> float:
    """Returns the judge's mean probability of the answer's tokens, between 0 and 1."""
    judge = GenerateState(args).served("judge")
    start = len(sample.tokens) - sample.response_length
    answer = await judge.score(sample.tokens, start=start, deadline_s=args.rollout_deadline_s)
    return float(np.exp(answer.log_probs).mean())
