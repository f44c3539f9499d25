"""Implements `--vllm-quantization`: engines keep the weights of their linear layers and experts in blocks of fp8, while
the trainer keeps plain weights.

Updates bring plain weights. vLLM quantises them on arrival, as it does at its start (online quantisation). This module
owns the flag's values, its rules, and the bytes of a quantised weight.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from slime.checkpoints.hf_config import read_hf_config
from slime.config import Config
from slime.models import family_for, read_decoder
from slime.records.errors import FlagError

_FLAG = "--quantization"
_BLOCKS = "fp8_per_block"
VALUES = ("fp8", _BLOCKS)
"""Values of the flag. Both mean 128 x 128 blocks. vLLM itself accepts "fp8" for a checkpoint that is stored in fp8."""
WEIGHT_BYTES = 1 + 4 / 128**2
"""Bytes of one fp8 value, with its share of the block's float32 scale."""
_DTYPES = ("bfloat16", "float16", "half", "auto")


def quantizes(backend_args: Mapping[str, object]) -> bool:
    """Returns true if engines with these flags of vLLM (`EngineConfig.backend_args`) quantise their weights."""
    return backend_args.get("quantization") is not None


def in_blocks(argv: Sequence[str]) -> list[str]:
    """Returns the engine flags with vLLM's name for quantisation in blocks."""
    return [
        _BLOCKS if before == _FLAG and token in VALUES else token
        for before, token in zip(["", *argv], argv, strict=False)
    ]


def check_quantization(config: Config) -> None:
    """Checks the flag's value, the dtype of activations, and --check-weight-update-equal."""
    quantization = config.engine.backend_args.get("quantization")
    if quantization is None or not config.num_engines:
        return
    if quantization not in VALUES:
        raise FlagError(
            "--vllm-quantization",
            f"be one of {', '.join(VALUES)}",
            quantization,
            "updates bring plain weights, and vLLM quantises these in blocks of fp8",
        )
    hf = read_hf_config(config.rollout.hf_checkpoint)
    scheme = family_for(hf).scheme(hf)
    if scheme is not None:
        raise FlagError(
            "--vllm-quantization",
            f"be left out for a checkpoint in {scheme.title}",
            quantization,
            "the engines keep the checkpoint's scheme",
        )
    dtype = config.engine.backend_args.get("dtype") or config.megatron.params_dtype
    if dtype not in _DTYPES:
        raise FlagError(
            "--vllm-dtype",
            f"be bfloat16 or float16 with --vllm-quantization {quantization}",
            dtype,
            "vLLM has no other activations for fp8 weights",
        )
    if config.kernels.rlk_consistency == "strict":
        raise FlagError(
            "--rlk-consistency",
            f"be off or audit with --vllm-quantization {quantization}",
            "strict",
            "the weights of trainer and engine differ by their rounding to fp8",
        )
    _check_model(config, quantization)


def _check_model(config: Config, quantization: str) -> None:
    decoder = read_decoder(read_hf_config(config.rollout.hf_checkpoint))
    latent = any(layer.attention.cache_whole for layer in decoder.layers)
    if config.weight_update.check_weight_update_equal and (decoder.experts or latent):
        raise FlagError(
            "--check-weight-update-equal",
            f"be left out with --vllm-quantization {quantization} for a model with experts or latent attention",
            "it",
            "vLLM keeps such weights in forms that are not compared in fp8",
        )


def check_on_cpu(config: Config) -> None:
    """Raises ValueError for a model with experts on CPUs, because vLLM's CPU kernels for fp8 experts need AMX
    instructions."""
    if not config.num_engines or config.cluster.device != "cpu" or not quantizes(config.engine.backend_args):
        return
    if read_decoder(read_hf_config(config.rollout.hf_checkpoint)).experts:
        raise FlagError(
            "--vllm-quantization",
            "be left out with --device cpu for a model with experts",
            config.engine.backend_args["quantization"],
            "experts in fp8 need a GPU",
        )


def remarks(config: Config) -> Iterator[str]:
    """Yields a note on the log-prob difference of quantised engines, with its correction."""
    quantization = config.engine.backend_args.get("quantization")
    if quantization is None or not config.num_engines:
        return
    text = (
        f"--vllm-quantization {quantization}: engines sample with weights rounded to fp8, so their log-probs "
    )
    text += "differ from the trainer's, as vime audit measures"
    if not config.off_policy.use_tis:
        text += (
            "; --use-tis weights the loss by the ratio, and --custom-tis-function-path can also mask tokens"
        )
    yield text
