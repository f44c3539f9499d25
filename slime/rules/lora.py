"""Defines the rules of the lora section."""

from __future__ import annotations

from pathlib import Path

from slime.config.fields import spelled
from slime.config.schema import Config
from slime.config.sections.lora import LoraConfig
from slime.models import family_for, read_decoder
from slime.models.decoder import Hf
from slime.models.lora import Lora, list_modules, read_peft, sends_adapters
from slime.records.errors import FlagError
from slime.roles import POLICY


def check_lora(c: Config, hf: Hf) -> None:
    """Checks flags that cannot be combined with adapters, and targets that match no module of the model."""
    lora = Lora.of(c)
    if lora is None:
        _check_left_out(c)
        return
    if c.lora.lora_load is not None:
        _check_loaded(c, lora)
    decoder = read_decoder(hf)
    experts = decoder.experts.count if decoder.experts else 0
    lora.check(list_modules(family_for(hf), hf, 1 if experts else 0))
    for name, why in (
        ("only_train_params_name_list", "the adapters are what is trained"),
        ("freeze_params_name_list", "the adapters are what is trained"),
        ("enable_mtp_training", "layers of multi-token prediction have no adapters"),
        ("ref_update_interval", "the reference model is the base, which is not trained"),
    ):
        if value := c.get_value(name):
            shown = " ".join(value) if isinstance(value, list) else value
            raise FlagError(spelled(name), "be left out with --lora-rank", shown, why)
    base = POLICY.source(c).directory
    if (
        sends_adapters(c)
        and c.num_engines
        and Path(base).resolve() != Path(c.rollout.hf_checkpoint).resolve()
    ):
        raise FlagError(
            "--lora-merge",
            "be given where adapters are trained over other weights than --hf-checkpoint",
            f"{base}: the engines have those of {c.rollout.hf_checkpoint}",
        )
    if c.megatron.overrides.get("transformer_impl") == "transformer_engine":
        raise FlagError(
            "--transformer-impl", "be local with --lora-rank", "transformer_engine", "leave the flag out"
        )
    if not c.lora.lora_name.isidentifier() and not c.lora.lora_name.replace("-", "_").isidentifier():
        raise FlagError(
            "--lora-name",
            "be letters, digits, - and _",
            f"{c.lora.lora_name!r}",
            "engines call the adapter so",
        )


def _check_left_out(c: Config) -> None:
    if c.lora.lora_load is not None:
        read_peft(c.lora.lora_load)  # raises an error with the reason why it gave no rank
    names = ("lora_merge", "target_modules", "exclude_modules", "lora_dropout", "lora_alpha", "lora_name")
    for name in names:
        if (value := c.get_value(name)) and value != getattr(LoraConfig, name):
            shown = " ".join(value) if isinstance(value, list) else value
            raise FlagError("--lora-rank", f"be given with {spelled(name)}", f"{shown} alone", "add it")


def _check_loaded(c: Config, lora: Lora) -> None:
    stored, _ = read_peft(path := c.lora.lora_load or "")
    for name, ours, theirs in (
        ("lora_rank", lora.rank, stored.rank),
        ("lora_alpha", lora.alpha, stored.alpha),
        ("target_modules", sorted(lora.targets), sorted(stored.targets)),
        ("exclude_modules", sorted(lora.excluded), sorted(stored.excluded)),
    ):
        if ours != theirs:
            raise FlagError(
                spelled(name), f"be {theirs} as in --lora-load {path}", ours, f"leave {spelled(name)} out"
            )
