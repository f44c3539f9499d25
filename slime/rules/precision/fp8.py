"""Defines the rules and notes of `--fp8-recipe blockwise`: linear layers in fp8 with scales per block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from slime.checkpoints.hf_config import read_hf_config
from slime.config.fields import Values, spelled
from slime.hardware import HARDWARE
from slime.models import family_for, read_decoder
from slime.models.decoder import Hf
from slime.models.latent import Latent
from slime.plan.model_shape import Shape
from slime.plan.scheme_bytes import attention_outputs
from slime.records.errors import FlagError
from slime.roles import get_roles

if TYPE_CHECKING:
    from slime.config.schema import Config

FP8_CAPABILITY = (8, 9)
"""Least compute capability of a GPU that multiplies fp8 numbers."""
GROUP = 128
"""Elements that share a scale (`rl_kernel.fp8.GROUP`; the driver imports no torch)."""
_BLOCKS = "--fp8-recipe blockwise"
_GATHER = "the weights are kept and gathered in --params-dtype, and rounded for each product"
_REFUSED = {"fp8_param": _GATHER, "fp8_param_gather": _GATHER}
_READ = ("fp8", "fp8_recipe")


def use_own_layers(overrides: Values) -> tuple[Values, list[str]]:
    """Returns `overrides` without Transformer Engine's layers if the trainer's own layers compute in fp8, and a
    note."""
    engine = overrides.get("transformer_impl") == "transformer_engine"
    if not engine or overrides.get("fp8_recipe") != "blockwise":
        return overrides, []
    kept = {name: value for name, value in overrides.items() if name != "transformer_impl"}
    return kept, [
        f"--transformer-impl transformer_engine: without effect with {_BLOCKS}, which the trainer's own layers compute"
    ]


def check_fp8_flags(c: Config) -> None:
    """Checks the flags of the recipe."""
    flags, overrides = c.megatron, c.megatron.overrides
    _check_products(c)
    if overrides.get("fp8_recipe") != "blockwise":
        if flags.force_fp8_ue8m0_scale:
            raise FlagError("--force-fp8-ue8m0-scale", f"come with {_BLOCKS}", "it alone", "leave it out")
        return
    if overrides.get("fp8") != "e4m3":
        raise FlagError(
            "--fp8-format",
            f"be e4m3 with {_BLOCKS}",
            overrides.get("fp8") or "none",
            "gradients have scales per 128 values, so they fit e4m3: give --fp8-format e4m3",
        )
    for name, value in overrides.items():
        if value and name.startswith("fp8") and name not in _READ:
            why = _REFUSED.get(name, "the recipe has no such setting")
            raise FlagError(
                spelled(name),
                f"be left out with {_BLOCKS}",
                "it" if value is True else value,
                f"leave it out: {why}",
            )
    if c.train.round_weights:
        raise FlagError(
            "--round-weights",
            f"be left out with {_BLOCKS}",
            "it",
            "choose one of int4 and fp8",
        )
    _check_bitwise(c)
    if c.cluster.gpu is not None and not HARDWARE[c.cluster.gpu].has_fp8:
        raise _lacks_fp8(f"--gpu {c.cluster.gpu}")


def require_fp8_cards(c: Config, capabilities: Sequence[tuple[int, int]]) -> None:
    """Raises ValueError for a run whose linear layers compute in fp8 if a GPU of this machine cannot. `capabilities`
    has the compute capability of each GPU."""
    if c.megatron.has_fp8_blocks and capabilities and (least := min(capabilities)) < FP8_CAPABILITY:
        raise _lacks_fp8("a GPU of compute capability {}.{}".format(*least))


def _lacks_fp8(where: str) -> FlagError:
    return FlagError(
        "--fp8-recipe",
        "be left out on GPUs without fp8",
        f"blockwise with {where}",
        "fp8 needs compute capability 8.9, as L40S and H100 have",
    )


def _check_products(c: Config) -> None:
    """Checks that the chosen library computes products of the run."""
    products = c.kernels.rlk_fp8_products
    if products == "torch":
        return
    why = ""
    if not c.megatron.has_fp8_blocks:
        why = f"it computes the products of --fp8-format e4m3 {_BLOCKS}"
    elif c.kernels.rlk_bitwise:
        why = "with --rlk-bitwise, the products are those of the engine"
    if why:
        raise FlagError("--rlk-fp8-products", "be torch in this run", products, f"leave it out: {why}")


def _check_bitwise(c: Config) -> None:
    """Checks that all layers are in fp8 with --rlk-bitwise."""
    if c.kernels.rlk_bitwise and c.megatron.overrides.get("first_last_layers_bf16"):
        raise FlagError(
            "--first-last-layers-bf16",
            f"be left out with {_BLOCKS} and --rlk-bitwise",
            "it",
            "the engine rounds the weights of every layer; or leave --rlk-bitwise out",
        )


def check_fp8_model(c: Config, hf: Hf) -> None:
    """Checks that the inputs of each product are whole groups of 128 on each trainer rank, in each model of the
    trainer."""
    if not c.megatron.has_fp8_blocks:
        return
    shape = Shape.of(hf)
    head = read_decoder(hf).head_dim
    if c.kernels.rlk_bitwise and head % GROUP:
        raise FlagError(
            "head_dim of --hf-checkpoint",
            f"be a multiple of {GROUP} with {_BLOCKS} and --rlk-bitwise",
            head,
            "leave --rlk-bitwise out: the trainer's blocks of queries, keys and values are others than the engine's",
        )
    others = dict.fromkeys(role.shape(c) for role in get_roles(c))
    others.pop(str(c.rollout.hf_checkpoint), None)
    shapes = {"--hf-checkpoint": shape} | {name: Shape.of(read_hf_config(name)) for name in others}
    for model, each in shapes.items():
        _check_sizes(c, model, each)


def _check_sizes(c: Config, model: str, shape: Shape) -> None:
    """Checks the sizes of one model of the trainer."""
    for name, size, flag, ranks in product_inputs(c, shape):
        if size % (ranks * GROUP) == 0:
            continue
        fits = (n for n in range(ranks - 1, 0, -1) if ranks % n == 0 and size % (n * GROUP) == 0)
        fewer = next(fits, None)
        instead = "" if fewer is None else f", or use {flag} {fewer}"
        raise FlagError(
            f"{name} of {model}",
            f"be a multiple of {GROUP} on each trainer rank with {_BLOCKS}",
            size if ranks == 1 else f"{size} / {ranks} = {size / ranks:g}",
            f"leave --fp8-format and --fp8-recipe out{instead}",
        )


def product_inputs(c: Config, shape: Shape) -> Iterator[tuple[str, int, str, int]]:
    """Yields (name, inputs of a product on all ranks, flag of the number of ranks, ranks that share the inputs)."""
    flag, ranks = "--tensor-model-parallel-size", c.megatron.tensor_model_parallel_size
    yield "hidden_size", shape.hidden, flag, 1
    if any(kind.softmax for kind in shape.kinds):
        yield "heads x head_dim", attention_outputs(shape), flag, ranks
    for latent in (kind.attention for kind in shape.kinds if isinstance(kind.attention, Latent)):
        yield "q_lora_rank", latent.q_rank or 0, flag, 1
        yield "kv_lora_rank", latent.kv_rank, flag, 1
    if any(kind.dense for kind in shape.kinds):
        yield "intermediate_size", shape.ffn, flag, ranks
    if any(kind.sparse for kind in shape.kinds):
        yield "the shared expert's width", shape.shared_ffn, flag, ranks
        yield (
            *("moe_intermediate_size", shape.expert_ffn, "--expert-tensor-parallel-size"),
            c.megatron.expert_tensor_parallel,
        )


def fp8_notes(c: Config, hf: Hf) -> Iterator[str]:
    """Yields a note on the parts of a model that stay in the dtype of the weights."""
    if not c.megatron.has_fp8_blocks:
        return
    parts = ["the head", "the embedding"]
    shape, scheme = Shape.of(hf), family_for(hf).scheme(hf)
    powers = c.megatron.force_fp8_ue8m0_scale
    if scheme is not None and scheme.method == "fp8" and scheme.power_of_two != powers and c.num_engines:
        theirs, ours = ("powers of two", "float32") if scheme.power_of_two else ("float32", "powers of two")
        yield (
            f"--force-fp8-ue8m0-scale: the engines keep the scales of --hf-checkpoint, {theirs}, and the trainer's are "
            f"{ours}; {'leave the flag out' if powers else 'give the flag'} for the same rounding on both sides"
        )
    if any(kind.kind == "gated_delta_net" for kind in shape.kinds):
        parts.append("gated delta nets")
    if any(kind.kind == "mamba" for kind in shape.kinds):
        parts.append("Mamba-2 layers")
    if any(kind.sparse for kind in shape.kinds):
        parts.append("routers")
    if (products := c.kernels.rlk_fp8_products) != "torch":
        yield f"--rlk-fp8-products: {products} multiplies, and Triton for the gradients of experts' weights"
    yield (
        f"{_BLOCKS}: attention's linear layers, MLPs and experts compute in fp8; {', '.join(parts)} and the vision "
        f"tower stay in {c.megatron.params_dtype}"
    )
