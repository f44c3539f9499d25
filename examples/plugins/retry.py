"""Generates a sample again if its response did not end, and keeps the first tokens of the response.

    --custom-generate-function-path retry.until_it_ends

`args.max_attempts` and `args.kept_tokens` are keys of the file of --custom-config-path.
"""

from vime.rollout.vllm_rollout import generate
from vime.utils.types import Sample


async def until_it_ends(args, sample: Sample, sampling_params) -> Sample:
    """Returns the first response that is not truncated, or the last of `args.max_attempts` responses."""
    for attempt in range(1, args.max_attempts + 1):
        sample = await generate(args, sample, dict(sampling_params))
        sample.attempts = attempt
        if sample.status is not Sample.Status.TRUNCATED or attempt == args.max_attempts:
            break
        rebuild(args, sample, args.kept_tokens)
    return sample


def rebuild(args, sample: Sample, kept: int) -> None:
    """Resets the sample, then appends the first `kept` tokens of its response again."""
    tokens = sample.tokens[-sample.response_length :][:kept]
    log_probs = sample.rollout_log_probs[:kept]
    sample.tokens = sample.tokens[: -sample.response_length]
    sample.response, sample.response_length = "", 0
    sample.loss_mask = sample.rollout_log_probs = sample.reward = None
    sample.weight_versions, sample.status = [], Sample.Status.PENDING
    sample.spec_info, sample.prefix_cache_info = Sample.SpecInfo(), Sample.PrefixCacheInfo()
    sample.append_response_tokens(args, tokens=tokens, log_probs=log_probs)
