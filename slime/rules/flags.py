"""The flags of all sections, with the choices that registries add: an estimator or a channel is one line in its own."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import replace

from slime.algo.corrections import LEVELS, MEASURES, MODES, Mode
from slime.algo.estimators import ESTIMATORS, Estimator
from slime.algo.losses import LOSSES
from slime.algo.surrogates import SURROGATES, Surrogate
from slime.config.fields import FlagSpec, specs_of
from slime.config.schema import SECTIONS
from slime.hardware import HARDWARE
from slime.weight_sync.delta.registry import CHECKSUMS, ENCODINGS
from slime.weight_sync.registry import CHANNELS

CHOICES: dict[str, Iterable[str]] = {
    "advantage_estimator": ESTIMATORS,
    "gpu": HARDWARE,
    "loss_type": LOSSES,
    "pg_loss_type": SURROGATES,
    "rs_level": LEVELS,
    "rs_type": MEASURES,
    "tis_level": LEVELS,
    "tis_mode": MODES,
    "update_weight_delta_checksum": CHECKSUMS,
    "update_weight_delta_encoding": ENCODINGS,
    "update_weight_transport": sorted(CHANNELS),
}
"""Field name -> its values, where they are the names of a registry."""

_RECORDS: dict[str, Iterable[Estimator | Surrogate | Mode]] = {
    "advantage_estimator": ESTIMATORS.values(),
    "pg_loss_type": SURROGATES.values(),
    "tis_mode": MODES.values(),
}
ALIASES = {
    name: {alias: record.name for record in records for alias in record.aliases}
    for name, records in _RECORDS.items()
}
"""Field name -> what TRL, verl and others call a value -> its name here."""

_HELP = {
    "update_weight_transport": "; ".join(f"{name}: {channel.help}" for name, channel in CHANNELS.items()),
    "update_weight_buffer_size": " and ".join(name for name in CHANNELS if CHANNELS[name].buckets),
}
"""Field name -> the end of its help, from a registry."""

FALLBACKS = {
    "over_sampling_batch_size": "rollout_batch_size",
    "eps_clip_high": "eps_clip",
    "ref_load": "hf_checkpoint",
    "critic_lr": "lr",
    "rs_upper_bound": "tis_clip",
    "rs_lower_bound": "tis_clip_low",
    "update_weight_disk_dir": "update_weight_delta_dir",
    "weight_dir": "update_weight_disk_dir",
    "custom_update_weight_post_write_path": "custom_delta_pre_push_path",
    "eval_function_path": "rollout_function_path",
    "eval_input_key": "input_key",
    "eval_label_key": "label_key",
    "eval_tool_key": "tool_key",
    "eval_temperature": "rollout_temperature",
    "eval_top_p": "rollout_top_p",
    "eval_top_k": "rollout_top_k",
    "eval_max_response_len": "rollout_max_response_len",
    "eval_max_prompt_len": "rollout_max_prompt_len",
    "eval_max_context_len": "rollout_max_context_len",
    "eval_reward_key": "reward_key",
}
"""Field that is None -> the field that gives its value."""


@functools.cache
def section_flags(section: type) -> dict[str, FlagSpec]:
    """Field name -> spec, for the flags of a section."""
    return {name: _completed(spec) for name, spec in specs_of(section).items()}


def own_flags() -> dict[str, FlagSpec]:
    """Field name -> spec, for every flag that a section declares."""
    return {name: spec for section in SECTIONS.values() for name, spec in section_flags(section).items()}


def _completed(spec: FlagSpec) -> FlagSpec:
    choices = tuple(CHOICES[spec.name]) if spec.name in CHOICES else spec.choices
    help = f"{spec.help}: {_HELP[spec.name]}" if spec.name in _HELP else spec.help
    return replace(spec, choices=choices, help=help, aliases=ALIASES.get(spec.name, {}))
