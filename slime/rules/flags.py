"""Collects every section's flags, with the choices from registries: an estimator or a channel is one line in its
registry."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import replace

from slime.algo.corrections import LEVELS, MEASURES, MODES, Mode
from slime.algo.estimators import ESTIMATORS, Estimator
from slime.algo.losses import LOSSES, held_out
from slime.algo.surrogates import SURROGATES, Surrogate
from slime.config.fields import FlagSpec, get_specs, spelled
from slime.config.schema import SECTIONS, Config
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
"""Maps a field name to its values, if these are the names of a registry."""

_RECORDS: dict[str, Iterable[Estimator | Surrogate | Mode]] = {
    "advantage_estimator": ESTIMATORS.values(),
    "pg_loss_type": SURROGATES.values(),
    "tis_mode": MODES.values(),
}
ALIASES = {
    name: {alias: record.name for record in records for alias in record.aliases}
    for name, records in _RECORDS.items()
}
"""Maps a field name to {name of a value in TRL, verl and others: its name here}."""

_HELP = {
    "update_weight_transport": "; ".join(f"{name}: {channel.help}" for name, channel in CHANNELS.items()),
    "update_weight_buffer_size": ", ".join(name for name in CHANNELS if CHANNELS[name].buckets),
}
"""Maps a field name to the end of its help text, from a registry."""

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
"""Maps a field that is None to the field whose value it takes."""

READ_WITH: dict[tuple[str, ...], tuple[str, ...]] = {
    ("use_wandb",): (
        *("wandb_mode", "wandb_dir", "wandb_key", "wandb_host", "wandb_team", "wandb_run_id"),
        *("disable_wandb_random_suffix", "wandb_always_use_train_step"),
    ),
    ("use_wandb", "use_swanlab", "use_trackio"): ("wandb_project",),
    ("use_wandb", "use_mlflow", "use_swanlab", "use_trackio", "use_prometheus"): ("wandb_group",),
    ("use_tensorboard",): ("tb_project_name", "tb_experiment_name"),
    ("use_mlflow",): (
        *("mlflow_tracking_uri", "mlflow_experiment_name", "mlflow_run_name", "mlflow_run_id"),
    ),
    ("use_swanlab",): ("swanlab_project", "swanlab_experiment_name", "swanlab_mode"),
    ("use_trackio",): ("trackio_project", "trackio_run_name"),
    ("use_prometheus",): ("prometheus_host", "prometheus_port", "prometheus_run_name"),
    ("partial_rollout",): ("mask_offpolicy_in_partial_rollout",),
    ("overlong_buffer_len",): ("overlong_penalty_factor",),
    ("save",): ("async_save", "no_save_optim"),
    ("load",): ("no_load_optim", "no_load_rng"),
    ("use_dynamic_batch_size",): ("max_tokens_per_gpu",),
    ("record_memory_history",): ("memory_snapshot_num_steps", "memory_snapshot_dir"),
    ("receipt",): ("receipt_key",),
    ("load_debug_rollout_data",): ("load_debug_rollout_data_subsample",),
    ("update_weight_mode=delta",): ("update_weight_delta_encoding", "update_weight_delta_checksum"),
    ("eval_interval",): (
        *("eval_prompt_data", "eval_config", "skip_eval_before_train", "n_samples_per_eval_prompt"),
        *("eval_function_path", "eval_input_key", "eval_label_key", "eval_tool_key", "eval_temperature"),
        *("eval_top_p", "eval_top_k", "eval_max_response_len", "eval_max_prompt_len", "eval_min_new_tokens"),
        *("eval_max_context_len", "eval_reward_key"),
    ),
}
"""Maps switches, each a field or a field with a value, to the fields that are read only if one of the switches is on.

`slime.algo.flags` has the flags of the objective. For flags of a critic, a teacher or adapters, the rules raise errors.
"""


def read_nowhere(c: Config) -> Iterator[str]:
    """Yields notes on flags of `READ_WITH` whose switches are all off. A value that another flag gave counts as not
    given."""
    specs = own_flags()
    for switches, names in READ_WITH.items():
        if any(_is_on(c, switch) for switch in switches) or _is_never_on(c, switches):
            continue
        for name in names:
            value, source, spec = c.get_value(name), FALLBACKS.get(name), specs[name]
            if value in (spec.default, None) or (source and value == c.get_value(source)):
                continue
            shown = (
                ""
                if value is True or spec.secret
                else f" {' '.join(value) if isinstance(value, list) else value}"
            )
            needed = " or ".join(map(_shown, switches))
            yield f"{spelled(name)}{shown} has no effect without {needed}: it is read only there"


def _is_on(c: Config, switch: str) -> bool:
    name, _, wanted = switch.partition("=")
    value = c.get_value(name)
    return value == wanted if wanted else bool(value)


def _shown(switch: str) -> str:
    name, _, wanted = switch.partition("=")
    return f"{spelled(name)} {wanted}".strip()


def _is_never_on(c: Config, switches: tuple[str, ...]) -> bool:
    """Returns True for flags of evaluation in a run without engines and held-out sets, which has a separate note."""
    return "eval_interval" in switches and c.debug.debug_train_only and not held_out(c)


@functools.cache
def section_flags(section: type) -> dict[str, FlagSpec]:
    """Returns field name -> spec, for the flags of a section."""
    return {name: _completed(spec) for name, spec in get_specs(section).items()}


def own_flags() -> dict[str, FlagSpec]:
    """Returns field name -> spec, for every flag that a section declares."""
    return {name: spec for section in SECTIONS.values() for name, spec in section_flags(section).items()}


def _completed(spec: FlagSpec) -> FlagSpec:
    choices = tuple(CHOICES[spec.name]) if spec.name in CHOICES else spec.choices
    help = f"{spec.help}: {_HELP[spec.name]}" if spec.name in _HELP else spec.help
    return replace(spec, choices=choices, help=help, aliases=ALIASES.get(spec.name, {}))
