"""The settings of sampling that stored tokens depend on."""

from __future__ import annotations

from collections.abc import Mapping

from slime.config import Config


def sampling_settings(config: Config) -> Mapping[str, object]:
    """Returns the flags on which the log-probs of tokens depend."""
    flags = config.rollout
    return {
        "--hf-checkpoint": flags.hf_checkpoint,
        "--rollout-temperature": flags.rollout_temperature,
        "--rollout-top-p": flags.rollout_top_p,
        "--rollout-top-k": flags.rollout_top_k,
    }
