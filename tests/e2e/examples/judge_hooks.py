"""Has a reward for the tests of examples/judge-reward, given by dotted path (`judge_hooks.by_url`)."""

from __future__ import annotations

import math
from typing import Any

from slime.rollout.sglang_rollout import get_model_url
from slime.utils.http_utils import post


async def by_url(args: Any, sample: Any, **kwargs: Any) -> float:
    """Returns the mean probability of the answer's tokens, or NaN for one sample per group. It asks the model over
    HTTP, as slime's plug-ins do."""
    ip, port = args.sglang_model_routers["judge"]
    url = get_model_url(args, "judge", "/generate")
    assert url == f"http://{ip}:{port}/generate" and get_model_url(args, "actor") != url
    start = len(sample.tokens) - sample.response_length
    asked = {"max_new_tokens": 1}
    scored = {"return_logprob": True, "logprob_start_len": start - 1}
    answer = await post(url, {"input_ids": sample.tokens, "sampling_params": asked, **scored})
    rows = answer["meta_info"]["input_token_logprobs"][-sample.response_length :]
    assert [row[1] for row in rows] == sample.tokens[start:]
    if sample.index % args.n_samples_per_prompt == 1:
        return math.nan
    return sum(math.exp(row[0]) for row in rows) / len(rows)
