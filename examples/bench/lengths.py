"""Generates responses whose lengths are log-normal with a heavy tail (p99 is 20 times the median), with any model."""

from __future__ import annotations

import math
import random
from typing import Any

from slime.rollout.generate import generate as generate_one

MEDIAN = 16
SIGMA = math.log(20) / 2.326
"""Standard deviation of the logarithm of a length. 2.326 is the normal distribution's 99th percentile."""


def length_of(index: int, limit: int) -> int:
    """Returns the number of response tokens of the sample with number `index` in a run."""
    drawn = random.Random(index).lognormvariate(math.log(MEDIAN), SIGMA)
    return max(1, min(round(drawn), limit))


async def generate(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """Generates one sample with its drawn length. Use: --custom-generate-function-path lengths.generate."""
    count = length_of(sample.index, sampling_params["max_new_tokens"])
    return await generate_one(
        args, sample, {**sampling_params, "max_new_tokens": count, "min_new_tokens": count}
    )


async def generate_longest(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """Generates one sample of --rollout-max-response-len tokens. Use: --custom-generate-function-path
    lengths.generate_longest."""
    count = sampling_params["max_new_tokens"]
    return await generate_one(args, sample, {**sampling_params, "min_new_tokens": count})
