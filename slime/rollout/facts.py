"""This module records how every sample was drawn. The audit uses these facts to compare log-probs of both sides.

It also owns the rule that decides whether the rollout's and the trainer's log-prob of a token are comparable. The
trainer gets one record per sample in the column `rollout_facts` (None without a record).
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.config import Config
from slime.config.sections.rollout import RolloutConfig
from slime.data.tokenizer import tokenizer_fingerprint
from slime.types import Sample, SamplingParams, TrainData

if TYPE_CHECKING:
    from torch import Tensor

Facts = dict[str, Any]
COLUMN = "rollout_facts"
SAMPLING_KEY = "sampling"
"""Key in `Sample.metadata` for a request's sampling parameters, if they differ from the run's."""

REASONS = (
    "unrecorded",
    "weight_version",
    "token_ids",
    "mask",
    "temperature",
    "top_p",
    "top_k",
    "sampling",
    "dtype",
    "tokenizer",
    "later_step",
)
"""Reasons why a token is not comparable. The first reason that applies is reported. `later_step`: the trainer computed
the token's log-prob after its first update of the rollout. `sampling`: the request had a parameter that changes
the distribution and that the trainer does not apply."""

_NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "top_k": -1}
"""The engines' defaults. The trainer's full softmax corresponds to the same values."""

_OTHER_SAMPLING = (
    "min_p",
    "min_new_tokens",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
)


def run_facts(config: Config, engine_dtype: str | None = None) -> Facts:
    """Returns the facts that all samples of a run share: distribution, tokenizer, and the dtype of the engine's model.
    Without `engine_dtype`, the engine has the trainer's dtype."""
    return {
        "temperature": config.rollout.rollout_temperature,
        "top_p": config.rollout.rollout_top_p,
        "top_k": config.rollout.rollout_top_k,
        "sampling": {},
        "dtype": config.megatron.params_dtype if engine_dtype is None else engine_dtype,
        "tokenizer": tokenizer_fingerprint(config.rollout.hf_checkpoint),
    }


def note_sampling(flags: RolloutConfig, sample: Sample, params: SamplingParams) -> None:
    """Records a request's sampling parameters in the sample's metadata, if they differ from the run's flags."""
    run = {
        "temperature": flags.rollout_temperature,
        "top_p": flags.rollout_top_p,
        "top_k": flags.rollout_top_k,
    }
    mine: Facts = {
        name: params[name] if params.get(name) is not None else neutral for name, neutral in _NEUTRAL.items()
    }
    mine["sampling"] = {name: params[name] for name in _OTHER_SAMPLING if params.get(name) is not None}
    if mine != run | {"sampling": {}}:
        sample.metadata[SAMPLING_KEY] = mine


def sample_facts(sample: Sample, run: Facts | None) -> Facts | None:
    """Returns one sample's record, with its tokens and mask at the end of the rollout. Returns None without the run's
    facts."""
    if run is None:
        return None
    mask = sample.loss_mask if sample.loss_mask is not None else [1] * sample.response_length
    if sample.remove_sample:
        mask = [0] * sample.response_length
    return {
        **run,
        **sample.metadata.get(SAMPLING_KEY, {}),
        "group_index": sample.group_index,
        "weight_version": list(dict.fromkeys(sample.weight_versions)),
        "token_ids": token_checksum(sample.tokens),
        "mask": mask_checksum(mask),
    }


def attach(ranks: Sequence[TrainData], samples: Sequence[Sample], run: Facts | None) -> None:
    """Adds the column `rollout_facts` to every rank's data. `sample_indices` identifies the sample of a row; its tokens
    distinguish samples with the same index. A sample that a conversion hook made has no record."""
    known: dict[int | None, list[Facts | None]] = {}
    for sample in samples:
        known.setdefault(sample.index, []).append(sample_facts(sample, run))
    for data in ranks:
        indices = data.get("sample_indices", [None] * len(data["tokens"]))
        data[COLUMN] = [
            _find_sample_facts(known.get(index, []), tokens)
            for index, tokens in zip(indices, data["tokens"], strict=True)
        ]


def _find_sample_facts(candidates: list[Facts | None], tokens: list[int] | Tensor) -> Facts | None:
    if len(candidates) < 2:
        return candidates[0] if candidates else None
    checksum = token_checksum(tokens)
    same = [facts for facts in candidates if facts is not None and facts["token_ids"] == checksum]
    return same[0] if same else None


def first_difference(rollout: Facts | None, trainer: Facts) -> str | None:
    """Returns the first entry of REASONS that makes the two sides' log-probs not comparable, or None."""
    if rollout is None:
        return "unrecorded"
    return next((name for name in REASONS if name in trainer and rollout.get(name) != trainer[name]), None)


def replay_template(config: Config) -> str:
    """Returns the path template where a run that stops saves its batch, for --load-debug-rollout-data."""
    run_dir = Path(config.logging.run_dir).resolve()
    folder = str(run_dir / "audit").replace("{", "{{").replace("}", "}}")
    return folder + "/{rollout_id}.pt"


def token_checksum(tokens: list[int] | Tensor) -> int:
    """Returns the CRC-32 of token ids, a list or an int64 tensor on the host."""
    return zlib.crc32(array("q", tokens) if isinstance(tokens, list) else tokens.numpy().tobytes())


def mask_checksum(mask: list[int] | Tensor) -> int:
    """Returns the CRC-32 of a loss mask, a list or an int32 tensor on the host."""
    return zlib.crc32(array("i", mask) if isinstance(mask, list) else mask.numpy().tobytes())
