"""Defines the rules of `--fp8-recipe mxfp8` and `--fp4-format e2m1`: linear layers in MXFP8 and in NVFP4.

A plan accepts them and counts their memory. No run with the trainer's own layers starts, because
`rl_kernel.microscaling` has references and no kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from slime.config.fields import spelled
from slime.hardware import HARDWARE
from slime.models.decoder import Hf
from slime.plan.model_shape import Shape
from slime.plan.rounded_operands import MXFP8, NVFP4, OperandForm, form_for
from slime.records.errors import FlagError
from slime.rules.precision.fp8 import check_fp8_model, fp8_notes, product_inputs

if TYPE_CHECKING:
    from slime.config.schema import Config

_READ = {"MXFP8": ("fp8", "fp8_recipe"), "NVFP4": ("fp4", "fp4_recipe")}


def _planned(c: Config) -> OperandForm | None:
    form = form_for(c.megatron.overrides)
    return None if form is None or form.has_layers else form


def _has_own_layers(c: Config) -> bool:
    return bool(c.megatron.overrides.get("transformer_impl", "local") == "local")


def check_microscaling_flags(c: Config) -> None:
    """Checks the flags of the form, and the GPUs of --gpu."""
    form, overrides = _planned(c), c.megatron.overrides
    if overrides.get("fp8_recipe") == "mxfp8" and not overrides.get("fp8"):
        raise FlagError("--fp8-format", f"be e4m3 with {MXFP8.flag}", "none", "give --fp8-format e4m3")
    if form is None:
        return
    if form is NVFP4 and overrides.get("fp8"):
        raise FlagError(
            "--fp8-format", f"be left out with {form.flag}", overrides["fp8"], "choose one of both"
        )
    if form is MXFP8 and overrides.get("fp8") != "e4m3":
        raise FlagError(
            "--fp8-format", f"be e4m3 with {form.flag}", overrides["fp8"], "give --fp8-format e4m3"
        )
    gpu = c.cluster.gpu
    if gpu is not None and not HARDWARE[gpu].has_microscaling:
        flag, _, value = form.flag.partition(" ")
        cards = ", ".join(card.name for card in HARDWARE.values() if card.has_microscaling)
        raise FlagError(
            flag,
            f"be left out on GPUs without {form.name}",
            f"{value} with --gpu {gpu}",
            f"compute capability 10.0 has it: {cards}",
        )
    if not _has_own_layers(c):
        return
    for name, value in overrides.items():
        if value and name.startswith(("fp8", "fp4")) and name not in _READ[form.name]:
            raise FlagError(
                spelled(name),
                f"be left out with {form.flag}",
                "it" if value is True else value,
                "leave it out: the weights stay in --params-dtype, and the form has no such setting",
            )
    if c.train.round_weights:
        raise FlagError("--round-weights", f"be left out with {form.flag}", "it", "choose one of both")


def check_operands(c: Config, hf: Hf) -> None:
    """Checks that the inputs of each product are whole blocks on each trainer rank, in any form."""
    check_fp8_model(c, hf)
    if (form := _planned(c)) is None:
        return
    for name, size, _, ranks in product_inputs(c, Shape.of(hf)):
        if size % (ranks * form.block):
            raise FlagError(
                f"{name} of --hf-checkpoint",
                f"be a multiple of {form.block} on each trainer rank with {form.flag}",
                size if ranks == 1 else f"{size} / {ranks} = {size / ranks:g}",
                f"leave {form.flag} out, or use fewer ranks",
            )


def operand_notes(c: Config, hf: Hf) -> Iterator[str]:
    """Yields a note on the form of the operands."""
    yield from fp8_notes(c, hf)
    form = _planned(c)
    if form is not None and _has_own_layers(c):
        yield f"{form.flag}: the plan counts the memory, and a run does not start, because there are no kernels yet"


def require_kernels(c: Config) -> None:
    """Raises ValueError for a run whose form has no kernels. A plan does not call it."""
    form = _planned(c)
    if form is not None and _has_own_layers(c):
        flag, _, value = form.flag.partition(" ")
        raise FlagError(
            flag,
            "be left out in a run, because this version has no kernels for it",
            value,
            f"vime plan counts the memory of {form.name}, and --fp8-format e4m3 --fp8-recipe blockwise trains",
        )
