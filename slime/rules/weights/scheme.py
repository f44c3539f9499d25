"""Defines the rules and notes of a run whose checkpoint is quantised."""

from __future__ import annotations

from collections.abc import Iterator

from slime.algo.losses import loss_for
from slime.checkpoints.checkpoint_dir import is_hf_directory, start_directory
from slime.checkpoints.hf_config import read_hf_config, with_own_quantization
from slime.config.problems import require_value
from slime.config.schema import Config
from slime.models import family_for
from slime.models.decoder import Hf
from slime.models.lora import sends_adapters
from slime.models.quantized.quantization import QuantizationScheme
from slime.plan.model_shape import Shape
from slime.plan.scheme_bytes import check_widths, quantized_matrices
from slime.records.errors import FlagError
from slime.roles import POLICY
from slime.system.extras import IS_CHECKOUT

_READ_ONLY = "no code writes weights in this scheme"


def check_scheme(c: Config, hf: Hf) -> None:
    """Checks that a quantised checkpoint fits its scheme, and the flags that need equal weights in trainer and
    engine."""
    scheme = family_for(hf).scheme(hf)
    if scheme is None and hf.get("quantization_config"):
        _check_read_only(c, hf["quantization_config"].get("quant_method"))
    shape = Shape.of(hf)
    _check_rounding(c, shape, scheme)
    _check_dithering(c)
    if scheme is None:
        return
    check_widths(shape)
    sends = c.num_engines and not c.debug.debug_rollout_only and not sends_adapters(c)
    if scheme.kind == "int4" and sends:
        _check_groups_of_ranks(c, shape, scheme)
    strict = c.kernels.rlk_consistency == "strict" or c.kernels.rlk_bitwise
    if c.num_engines and strict:
        flag = "--rlk-bitwise" if c.kernels.rlk_bitwise else "--rlk-consistency"
        raise FlagError(
            flag,
            f"be {'left out' if c.kernels.rlk_bitwise else 'off or audit'} for a checkpoint in {scheme.title}",
            "it" if c.kernels.rlk_bitwise else "strict",
            "the engines round weights to this scheme, and the trainer does not",
        )


def _check_groups_of_ranks(c: Config, shape: Shape, scheme: QuantizationScheme) -> None:
    """Checks that each trainer rank has whole groups of int4, because each rank quantises its slices. Blocks of fp8 may
    lie on several ranks."""
    group = scheme.block[1]
    for matrix in quantized_matrices(shape):
        ranks = (
            c.megatron.expert_tensor_parallel if matrix.is_expert else c.megatron.tensor_model_parallel_size
        )
        if matrix.splits_columns and matrix.columns % (ranks * group):
            fits = (
                n for n in range(ranks - 1, 0, -1) if ranks % n == 0 and matrix.columns % (n * group) == 0
            )
            raise FlagError(
                "--expert-tensor-parallel-size" if matrix.is_expert else "--tensor-model-parallel-size",
                f"leave whole groups of {group} of {scheme.title} on each trainer rank",
                f"{matrix.columns} columns / {ranks} = {matrix.columns / ranks:g} in {matrix.module}",
                f"use {next(fits, 1)}",
            )


def _check_rounding(c: Config, shape: Shape, scheme: QuantizationScheme | None) -> None:
    """Checks that --round-weights can round as the engines do."""
    if not c.train.round_weights:
        return
    flag = "--round-weights (OPEN_TRAINING_INT4_FAKE_QAT_FLAG)"
    if scheme is None or scheme.kind != "int4":
        raise FlagError(
            flag,
            "come with a checkpoint in INT4",
            f"{'plain weights' if scheme is None else scheme.title} in {require_value(c.rollout.hf_checkpoint)}",
            "leave it out, or quantise the checkpoint that the engines serve",
        )
    if c.lora.lora_rank:
        raise FlagError(
            "--lora-rank",
            "be left out with --round-weights",
            c.lora.lora_rank,
            "adapters do not change the weights of the base, which are those of the engines without rounding",
        )
    if c.megatron.overrides.get("transformer_impl") == "transformer_engine":
        raise FlagError(
            "--transformer-impl", "be local with --round-weights", "transformer_engine", "leave the flag out"
        )
    _check_groups_of_ranks(c, shape, scheme)


def _check_dithering(c: Config) -> None:
    """Checks that the weights that --dither-weights would spread are trained, and are in FP8 or INT4."""
    if not c.train.dither_weights:
        return
    if c.lora.lora_rank:
        raise FlagError(
            "--lora-rank",
            "be left out with --dither-weights",
            c.lora.lora_rank,
            "engines and exports add adapters to the weights of the checkpoint, which are not dithered",
        )
    if POLICY.resumes(c) is None and _first_method(c) in (None, "mxfp4"):
        raise FlagError(
            "--dither-weights",
            "come with first weights in FP8 or INT4",
            f"{_first_method(c) or 'plain'} weights in {start_directory(c)}",
            "leave it out, because only values at the centre of rounding intervals need it",
        )


def _check_read_only(c: Config, method: str) -> None:
    """Checks that nothing has to write weights in a scheme that the family only reads."""
    checkpoint = require_value(c.rollout.hf_checkpoint)
    if c.checkpoint.save_hf_format == "checkpoint":
        raise FlagError("--save-hf-format", f"be bf16 for a checkpoint in {method}", "checkpoint", _READ_ONLY)
    if not c.debug.debug_train_only:
        how = (
            f": python scripts/dequantize.py {checkpoint} OUT_DIR"
            if IS_CHECKOUT
            else " with vime's repository"
        )
        raise FlagError(
            "--hf-checkpoint",
            "hold weights that an update of the engines can bring",
            f"quant_method {method} in {checkpoint}",
            f"{_READ_ONLY}: write a copy in bfloat16{how}",
        )


def scheme_notes(c: Config, hf: Hf) -> Iterator[str]:
    """Yields a note that recommends a correction if the engines keep the scheme of a quantised checkpoint, and a note
    that recommends plain weights if the trainer starts from rounded ones."""
    scheme = family_for(hf).scheme(hf)
    if scheme is None or not c.num_engines or not loss_for(c.algorithm).rewarded:
        return
    trainer = (
        "rounds them in the same way (--round-weights), so their log-probs differ only by the order of sums"
        if c.train.round_weights
        else f"has them in {c.megatron.params_dtype}, so their log-probs differ, as vime audit measures"
    )
    text = f"the engines keep the weights of --hf-checkpoint in {scheme.title}, and the trainer {trainer}"
    o = c.off_policy
    if not (o.use_tis or o.use_rs or o.use_rollout_logprobs or c.train.round_weights):
        text += (
            "; --use-tis weights the loss by the ratio, and --use-tis --tis-mode mask --tis-clip 5 --tis-clip-low 0.5 "
            "(IcePop) trains without the tokens that differ most"
        )
    yield text
    if c.train.dither_weights or sends_adapters(c) or POLICY.resumes(c) is not None:
        return
    if _first_method(c) is not None:
        spreads = "" if c.lora.lora_rank else "--dither-weights spreads them over their intervals, and "
        yield (
            f"the trainer starts from weights in {scheme.title}, in the middle between two rounding limits, so most of "
            f"its first small updates do not change the engines' weights; {spreads}--ref-load DIR starts from the "
            "model's plain weights (docs/models.md)"
        )


def _first_method(c: Config) -> str | None:
    """Returns the `quant_method` of the files from which a new run reads its first weights. None means plain weights,
    as converted weights are."""
    start = start_directory(c)
    if not is_hf_directory(start):
        return None
    own = with_own_quantization(read_hf_config(POLICY.shape(c)), start).get("quantization_config") or {}
    method: str | None = own.get("quant_method")
    return method
