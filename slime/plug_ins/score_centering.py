"""Score centering (2609.20807) for losses and requests of plug-ins. --use-score-centering applies it without a
plug-in."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from typing import TYPE_CHECKING, TypedDict

from slime.algo.surrogates.reinforce import CENTRED, LEAST_TAIL, centering
from slime.config.schema import Config
from slime.config.sections.off_policy import OffPolicyConfig
from slime.types import SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

_MODES = {"none": None, "tis": "truncate", "mis": "mask"}
_NEUTRAL = {
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}


class Weights(TypedDict, total=False):
    """The importance weight per token. `mode`: none, tis (bounded) or mis (0 outside the bounds)."""

    mode: str
    low: float
    high: float


def score_centering_correction(
    train_head_logp: Tensor,
    sampler_head_logp: Tensor,
    *,
    mode: str = "none",
    low: float | None = None,
    high: float | None = None,
    eps: float = LEAST_TAIL,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns each token's centering term [N], and the masses of the top-k under the sampler and the trainer [N].

    The arguments are log-probs of the whole vocabulary at the sampler's top-k ids [N, K]. `slime.algo.surrogates` has
    the maths. Only the term has a gradient. `eps` is the least probability outside of the top-k. Raises ValueError for
    another mode than none, tis and mis.
    """
    import torch

    if mode not in _MODES:
        raise ValueError(f"mode must be one of {', '.join(_MODES)}, got {mode!r}; take the mode of --use-tis")
    flags = OffPolicyConfig()
    if name := _MODES[mode]:
        least, most = flags.tis_clip_low if low is None else low, flags.tis_clip if high is None else high
        flags = replace(flags, use_tis=True, tis_mode=name, tis_clip_low=least, tis_clip=most)
    known = torch.ones_like(train_head_logp, dtype=torch.bool)
    term = centering(flags, train_head_logp, sampler_head_logp, known, least_tail=eps)
    with torch.no_grad():
        masses = [log_probs.float().exp().sum(-1) for log_probs in (sampler_head_logp, train_head_logp)]
    return term, masses[0], masses[1]


def get_score_centering_is_config(flags: Namespace) -> Weights:
    """Returns the weight of --use-tis, as keywords of `score_centering_correction`."""
    off_policy = Config.from_args(flags).off_policy
    if not off_policy.use_tis:
        return {"mode": "none"}
    mode = next(
        ours
        for ours, name in _MODES.items()
        if name == ("mask" if off_policy.tis_mode == "mask" else "truncate")
    )
    return {"mode": mode, "low": off_policy.tis_clip_low, "high": off_policy.tis_clip}


def validate_score_centering_args(flags: Namespace) -> None:
    """Raises ValueError for flags that do not fit --use-score-centering."""
    config = Config.from_args(flags)
    if config.algorithm.use_score_centering:
        for check in CENTRED.checks:
            check(config)


def score_centering_request(flags: Namespace, sampling_params: SamplingParams) -> dict[str, object]:
    """Sets the run's temperature and top-p in the parameters of a request, if they are missing, and returns {}: the
    engine needs no other field. With --use-score-centering, raises ValueError for parameters that sample from another
    distribution."""
    config = Config.from_args(flags)
    if not config.algorithm.use_score_centering:
        return {}
    expected = {"temperature": config.rollout.rollout_temperature, "top_p": config.rollout.rollout_top_p}
    for name, value in expected.items():
        sampling_params.setdefault(name, value)
    for name, value in {**expected, **_NEUTRAL}.items():
        if (found := sampling_params.get(name)) is not None and found != value:
            raise ValueError(
                f"{name} must be {value} in a request with --use-score-centering, got {found}; leave it out"
            )
    return {}
