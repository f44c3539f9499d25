"""An agent whose history grows: it writes tokens, then reads an observation, and so on.

The lengths of histories are between 40% and 100% of --rollout-max-response-len, so that agents do not go in step.
The reward is the share of odd ids among the tokens that the model wrote, so an untrained model learns within a few
steps. No tool runs: the observations are drawn from the number of the sample.
"""

from __future__ import annotations

import random
from typing import Any

from slime.rollout.generate import generate as write

WRITES, READS = 64, 64
"""Tokens of a turn that the model writes, and that it reads afterwards."""
FIRST, LAST = 4, 40
"""Range of the token ids of an observation. Tiny models have them all."""


async def generate(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """Makes turns until the next one would not fit. Use: --custom-generate-function-path histories.generate."""
    drawn = random.Random(sample.index)
    limit = round(sampling_params["max_new_tokens"] * drawn.uniform(0.4, 1))
    while sample.response_length + WRITES <= limit:
        end = sample.response_length + WRITES
        sample = await write(args, sample, sampling_params | {"max_new_tokens": end, "min_new_tokens": end})
        if sample.response_length < end:  # aborted; a later call goes on
            return sample
        if end + READS + WRITES > limit:
            break
        observation = [drawn.randint(FIRST, LAST) for _ in range(READS)]
        sample.append_response_tokens(tokens=observation, trainable=False)
    return sample


def odd_share(args: Any, sample: Any, **kwargs: Any) -> float:
    """Returns the share of odd ids among the tokens of the model."""
    response = sample.tokens[-sample.response_length :] if sample.response_length else []
    written = [token for token, own in zip(response, sample.loss_mask or (), strict=True) if own]
    return sum(token % 2 for token in written) / max(len(written), 1)
