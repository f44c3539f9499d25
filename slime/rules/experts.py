"""Checks flags of models with experts (--moe-*, expert parallelism): which values are accepted, and why others are not.

Flags that describe the checkpoint are MODEL_ARGS and are compared with config.json (model_args.py). This file covers
settings of the computation. Every accepted value computes the same policy as the engine. Every other value is an error.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from slime.config.fields import Values, spelled
from slime.config.problems import Problems
from slime.models import Decoder
from slime.plan.stages import build_stages
from slime.records.errors import FlagError
from slime.roles.groups import build_groups

if TYPE_CHECKING:
    from slime.config.schema import Config

_PADDING = "the padding of a packed row would count as tokens"
_ROWS = "the weight table has no row for it"

REFUSED = {
    "moe_aux_loss_coeff": _PADDING,
    "moe_z_loss_coeff": _PADDING,
    "moe_expert_capacity_factor": "a dropped token is not what the engine computed",
    "moe_input_jitter_eps": "two passes over the same weights must be one policy",
    "moe_router_force_load_balancing": "tokens would go to random experts",
    "moe_router_force_biased": "tokens would go to random experts",
    "moe_router_bias_update_rate": "the engine's choice of experts would move without a gradient",
    "moe_latent_size": _ROWS,
}
"""Settings that must be off, with the reason."""

_ZERO_IS_OFF = ("moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_router_bias_update_rate")
"""Settings for which 0 means off. For other settings, 0 has another meaning: a capacity of 0 drops every token."""

ONLY = {
    "moe_token_dispatcher_type": (("alltoall",), "others were never compared with a single rank"),
    "moe_router_dtype": (("fp32",), "logits of another dtype were never compared with an engine's"),
    "moe_router_load_balancing_type": (
        ("none", "aux_loss", "seq_aux_loss", "global_aux_loss"),
        "others send tokens elsewhere than the engine does; these add to a loss of --moe-aux-loss-coeff 0",
    ),
}
"""Settings with their accepted values, and the reason why other values are errors."""


def check_expert_flags(c: Config, decoder: Decoder) -> None:
    """Raises ValueError for flags that do not fit the model, with experts or dense."""
    if experts := decoder.experts:
        problems = Problems()
        problems.check(check_expert_settings, c.megatron.overrides)
        problems.check(check_untried, c.megatron.overrides)
        problems.check(check_expert_layout, c, experts.count)
        problems.check(check_expert_width, c, decoder)
        for group in build_groups(c):
            problems.check(check_expert_ranks, c, group.ranks)
        problems.check(check_expert_stages, c, decoder.sparse)
        problems.report()
    elif c.megatron.expert_model_parallel_size != 1 or c.megatron.expert_tensor_parallel_size not in (
        None,
        1,
    ):
        raise FlagError(
            "--expert-model-parallel-size and --expert-tensor-parallel-size",
            "be left out for a dense model",
            f"{c.megatron.expert_model_parallel_size} and {c.megatron.expert_tensor_parallel_size}",
            "it has no experts to share",
        )


def check_expert_settings(overrides: Values) -> None:
    """Raises ValueError for Megatron settings that would change the policy of a model with experts, or that were never
    run.

    `overrides` has megatron-core's field names.
    """
    problems = Problems()
    for name, value in overrides.items():
        values = value if isinstance(value, list) else [value]
        got = " ".join(map(str, values))
        if name in ONLY:
            accepted, why = ONLY[name]
            if any(kind not in accepted for kind in values):
                problems.add(FlagError(spelled(name), f"be {' or '.join(accepted)}", got, why))
        elif name in REFUSED and not all(_is_off(name, x) for x in values):
            problems.add(FlagError(spelled(name), "be left out", got, REFUSED[name]))
    problems.report()


def _is_off(name: str, value: object) -> bool:
    return value is None or value is False or (value == 0 and name in _ZERO_IS_OFF)


def check_untried(overrides: Values) -> None:
    """Raises ValueError for another --moe-* setting. Megatron has about thirty, and no test here covers them."""
    for name, value in overrides.items():
        if re.match("moe_", name) and name not in ONLY and name not in REFUSED and not _is_off(name, value):
            raise FlagError(spelled(name), "be left out", value, "it was never run here with experts")


def check_expert_layout(c: Config, experts: int) -> None:
    """Raises ValueError if the ranks cannot share the layers of a model with `experts` routed experts per layer."""
    tp, ep = c.megatron.tensor_model_parallel_size, c.megatron.expert_model_parallel_size
    if tp > 1 and not c.megatron.sequence_parallel:
        raise FlagError(
            "--sequence-parallel",
            "be given for experts with --tensor-model-parallel-size above 1",
            "none",
            "megatron-core trains them no other way",
        )
    if c.megatron.overrides.get("transformer_impl", "local") != "local":
        raise FlagError(
            "--transformer-impl",
            "be local for a model with experts",
            "transformer_engine",
            "the weight table has no rows for its experts",
        )
    if ep < 1 or experts % ep:
        raise FlagError(
            "--expert-model-parallel-size",
            f"divide the {experts} experts of a layer",
            f"{ep}{_division(experts, ep)}",
            "give each rank the same number of experts",
        )


def _division(whole: int, parts: int) -> str:
    """Returns ": 8 / 3 = 2.667" for a message, or "" if `parts` is 0."""
    return f": {whole} / {parts} = {whole / parts:.3f}" if parts else ""


def check_expert_width(c: Config, decoder: Decoder) -> None:
    """Raises ValueError if the experts' rows do not start at multiples of 16 bytes, which torch's grouped product needs
    on every device."""
    etp = c.megatron.expert_tensor_parallel
    assert decoder.experts is not None
    step, width = 4 if c.megatron.params_dtype == "float32" else 8, decoder.experts.width
    if decoder.hidden % step:
        raise FlagError(
            "hidden_size in config.json",
            f"be a multiple of {step} in {c.megatron.params_dtype} where a model has experts",
            decoder.hidden,
            "such a model cannot be trained here",
        )
    if width % (etp * step):
        raise ValueError(
            f"the width of an expert in config.json must be a multiple of {step} in "
            f"{c.megatron.params_dtype} on each of "
            f"{etp} ranks that share an expert, got {width}{_division(width, etp * step)}; "
            + ("share it among fewer ranks" if etp > 1 else "such a model cannot be trained here")
        )


def check_expert_stages(c: Config, sparse: Sequence[bool]) -> None:
    """Raises ValueError if a pipeline rank has no experts although experts have a separate optimizer, which
    megatron-core could not save."""
    stages = build_stages(c.megatron, len(sparse))
    for rank in range(stages.ranks):
        if c.megatron.has_expert_layout and not any(sparse[i] for i in stages.layers(rank)):
            raise FlagError(
                "each pipeline stage",
                "have a layer with experts with --expert-model-parallel-size above 1 or an "
                "--expert-tensor-parallel-size of its own",
                f"none on stage {rank} of {stages.ranks}",
                "take fewer stages, or give it more layers (--decoder-first-pipeline-num-layers)",
            )


def check_expert_ranks(c: Config, world_size: int) -> None:
    """Raises ValueError if the number of trainer ranks is not a multiple of the ranks that share a layer's experts."""
    ep, pp = c.megatron.expert_model_parallel_size, c.megatron.pipeline_model_parallel_size
    etp = c.megatron.expert_tensor_parallel
    if ep < 1 or (c.megatron.has_expert_layout and world_size % (etp * ep * pp)):
        raise FlagError(
            "--expert-model-parallel-size times ETP * PP",
            "divide the number of trainer ranks",
            f"{ep} * {etp} * {pp} for {world_size}{_division(world_size, ep * etp * pp)}",
            "change one of the sizes",
        )
