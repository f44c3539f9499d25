"""A reward from a judge: a frozen model that an engine of the run serves beside the policy's.

    PYTHONPATH=examples/judge-reward vime train ... --vllm-config models.yaml --custom-rm-path judge.score

The judge has the policy's tokenizer here, so it scores token ids. A judge of another family gets text instead: post
it to `get_model_url(args, "judge", "/v1/completions")`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from slime.rollout.sglang_rollout import GenerateState
from slime.utils.types import Sample


async def score(args: Any, sample: Sample, **kwargs: Any) -> float:
    """The mean probability of the answer's tokens by the judge, between 0 and 1."""
    judge = GenerateState(args).served("judge")
    start = len(sample.tokens) - sample.response_length
    answer = await judge.score(sample.tokens, start=start, deadline_s=args.rollout_deadline_s)
    return float(np.exp(answer.log_probs).mean())
