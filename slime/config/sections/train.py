"""Flags of the train section: the training backend."""

from __future__ import annotations

from dataclasses import dataclass, field

from slime.config.fields import Values, flag
from slime.config.ranges import SEED


@dataclass(frozen=True)
class TrainConfig:
    """The training backend, and settings for every tool that reads a checkpoint."""

    train_backend: str = flag("megatron", "training backend", choices=("megatron",))
    custom_config_path: str | None = flag(
        None,
        "YAML file with lines of the form flag: value; its entries override the command line, and keys that are no "
        "flags go to hooks, as attributes of args",
    )
    hook_settings: Values = field(default_factory=dict)
    """The keys of --custom-config-path that are not flags."""
    trust_remote_code: bool = flag(
        False, "run Python code that ships with the checkpoint (tokenizer, engine)"
    )
    only_train_params_name_list: list[str] | None = flag(  # noqa: RUF009
        None, "train only parameters whose Megatron name has a match of one of these regular expressions"
    )
    freeze_params_name_list: list[str] | None = flag(  # noqa: RUF009
        None, "do not train parameters whose Megatron name has a match of one of these regular expressions"
    )
    train_vision: bool = flag(False, "train the vision tower too; without the flag its parameters are frozen")
    freeze_indexer: bool = flag(
        False,
        "keep the weights of the indexers of sparse attention; no loss trains them, and without the flag a note states "
        "so",
    )
    custom_megatron_init_path: str | None = flag(None, "fn(args), after the process groups are up")
    custom_megatron_before_log_prob_hook_path: str | None = flag(None, "fn(args, model, store_prefix)")
    custom_megatron_before_train_step_hook_path: str | None = flag(
        None, "fn(args, rollout_id, step_id, model, optimizer, scheduler)"
    )
    round_weights: bool = flag(
        False,
        "quantisation-aware training: compute with the weights of linear layers and experts rounded to the INT4 of "
        "--hf-checkpoint, as the engines do; gradients pass the rounding unchanged (OPEN_TRAINING_INT4_FAKE_QAT_FLAG=1 "
        "of slime)",
    )
    dither_weights: bool = flag(
        False,
        "start each weight of a checkpoint in FP8 or INT4 at a pseudo-random position of its rounding interval, not at "
        "the centre: it rounds to the same value, and small updates reach the engines",
    )
    seed: int = flag(1234, "random seed of the trainer", range=SEED)
