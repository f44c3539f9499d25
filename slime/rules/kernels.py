"""Defines the rules of the rl_kernel switch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from slime.algo.losses import loss_for
from slime.config.near_names import nearest
from slime.config.problems import require_value
from slime.config.schema import Config
from slime.config.sections.kernels import BITWISE_OPERATORS, OPERATORS
from slime.config.sections.weight_update import EACH
from slime.hardware import HARDWARE
from slime.hooks import MissingHookError, load_function
from slime.models import Decoder, Experts
from slime.models.rope import Rope
from slime.records.errors import FlagError

PROVIDER = "--selected-logprob-provider"
BITWISE_DTYPES = {"cpu": ("float32",), "cuda": ("bfloat16",)}
"""--device -> the dtypes that rl_kernel.invariant computes on that device."""
BITWISE_ROPES = ("default", "llama3", "yarn")
"""Kinds of rotary embeddings that engines compute with the trainer's angles."""
_FACTORS = {"attention_factor", "mscale", "mscale_all_dim"}
"""Settings of YaRN that older versions of vLLM ignore."""
BITWISE_SHARED_KIB = 227
"""KiB of a GPU's shared memory that the kernels of rl_kernel.invariant need (SHARED_BYTES of its product)."""


def check_kernels(c: Config) -> None:
    """Checks that operators are known, and that flags do not contradict each other."""
    unknown = [name for name in require_value(c.kernels.rl_kernel_ops) if name not in OPERATORS]
    if unknown:
        raise FlagError(
            "--rl-kernel-ops",
            f"name operators of {', '.join(OPERATORS)}",
            f"{unknown[0]}{nearest(unknown[0], OPERATORS, prefix='')}",
        )
    if c.kernels.rl_kernel_strict and c.kernels.rlk_fast != "strict":
        raise FlagError(
            "--rl-kernel-strict",
            f"not be combined with --rlk-fast {c.kernels.rlk_fast}",
            advice="leave one out",
        )
    if c.kernels.enable_rl_kernel and c.kernels.rlk_fast == "off":
        raise FlagError("--enable-rl-kernel", "not be combined with --rlk-fast off", advice="leave one out")
    _check_provider(c)
    _check_bitwise(c)
    if c.kernels.rlk_consistency != "off" and (
        not loss_for(c.algorithm).rewarded or c.debug.debug_rollout_only
    ):
        what = (
            "--debug-rollout-only"
            if loss_for(c.algorithm).rewarded
            else f"--loss-type {c.algorithm.loss_type}"
        )
        raise FlagError(
            "--rlk-consistency",
            f"be off with {what}",
            c.kernels.rlk_consistency,
            "it compares log-probs of a trainer and an engine",
        )


def _check_bitwise(c: Config) -> None:
    """Checks the requirements of --rlk-bitwise, and the features that were not implemented or not run with it. Modules
    are checked where they are built."""
    chosen = c.kernels.rlk_bitwise_operators
    if unknown := [name for name in chosen if name not in BITWISE_OPERATORS]:
        raise FlagError(
            "--rlk-bitwise-operators",
            f"be of {', '.join(BITWISE_OPERATORS)}",
            f"{unknown[0]}{nearest(unknown[0], BITWISE_OPERATORS, prefix='')}",
            "leave the flag out for all of them",
        )
    whole = set(chosen) == set(BITWISE_OPERATORS)
    if not c.kernels.rlk_bitwise:
        if not whole:
            raise FlagError(
                "--rlk-bitwise-operators",
                "be combined with --rlk-bitwise",
                f"{','.join(chosen)} alone",
                "add --rlk-bitwise",
            )
        return
    dtypes = BITWISE_DTYPES[c.cluster.device]
    wants: dict[str, tuple[object, object]] = {
        "--rlk-consistency": ("strict" if whole else "audit", c.kernels.rlk_consistency),
        "--rollout-backend": ("vllm", c.engine.rollout_backend),
        PROVIDER: (None, c.kernels.selected_logprob_provider),
        "--custom-loss-function-path": (None, c.algorithm.custom_loss_function_path),
        "--rollout-external-engine-addrs": (None, c.rollout.rollout_external_engine_addrs),
        "--lora-rank": (0, c.lora.lora_rank or 0),
        "--max-staleness": (0, c.rollout.max_staleness),
        "--partial-rollout": (False, c.rollout.partial_rollout),
        "--use-rollout-routing-replay": (False, c.off_policy.use_rollout_routing_replay),
        "--rollout-top-p": (1, c.rollout.rollout_top_p),
        "--rollout-top-k": (-1, c.rollout.rollout_top_k),
        "--replay-kept-tokens": (0, c.off_policy.replay_kept_tokens or 0),
        "--flush-cache-interval": (EACH, c.weight_update.flush_cache_interval),
    }
    if c.megatron.overrides.get("attention_backend") == "fused":
        wants["--attention-backend"] = "auto", "fused"
    for name, (wanted, got) in wants.items():
        if got != wanted:
            must = "be left out" if wanted is None or wanted is False else f"be {wanted}"
            raise FlagError(name, f"{must} with --rlk-bitwise", got, "change it, or leave --rlk-bitwise out")
    _check_bitwise_ranks(c)
    if c.megatron.params_dtype not in dtypes:
        raise FlagError(
            "parameters",
            f"be {' or '.join(dtypes)} with --rlk-bitwise on --device {c.cluster.device}",
            c.megatron.params_dtype,
            f"use {' or '.join('--fp32' if d == 'float32' else '--bf16' for d in dtypes)}",
        )
    if c.cluster.device == "cuda" and (
        c.kernels.rlk_fast == "off" or "rotary" not in c.kernels.rl_kernel_ops
    ):
        raise FlagError(
            "--rlk-fast",
            "be auto or strict, and --rl-kernel-ops have rotary, with --rlk-bitwise",
            f"{c.kernels.rlk_fast} and {','.join(c.kernels.rl_kernel_ops)}",
            "the engine rotates with that kernel",
        )
    if c.cluster.gpu and (shared := HARDWARE[c.cluster.gpu].shared_kib) < BITWISE_SHARED_KIB:
        raise FlagError(
            "--gpu",
            f"have {BITWISE_SHARED_KIB} KiB of shared memory for a program with --rlk-bitwise",
            f"{c.cluster.gpu} with {shared}",
            "leave --rlk-bitwise out on such GPUs",
        )
    facts = c.engine.engine_facts
    if not facts.invariant or facts.dtype not in (None, "auto", c.megatron.params_dtype):
        raise FlagError(
            "engines",
            "have plain weights of the trainer's dtype, no drafts and no context parallelism "
            "with --rlk-bitwise",
            "flags that say otherwise",
            "leave out the engine's flags for quantisation, dtype, speculation and context parallelism",
        )


def find_other_angles(ropes: Iterable[Rope]) -> dict[str, bool]:
    """Returns the features of rotary embeddings for which engines do not compute with the trainer's angles: name ->
    True if an embedding has it."""
    found = list(ropes)
    return {
        "rotary frequencies of another kind": any(rope.kind not in BITWISE_ROPES for rope in found),
        f"YaRN with {' or '.join(sorted(_FACTORS))}, which older vLLMs ignore": any(
            rope.kind == "yarn" and not _FACTORS.isdisjoint(rope.settings) for rope in found
        ),
        "interleaved rotary pairs": any(rope.interleaved for rope in found),
    }


def check_bitwise_model(c: Config, decoder: Decoder) -> None:
    """Raises ValueError with the parts of the model that no operator of --rlk-bitwise computes, according to
    config.json.

    Trainer and engine check each module where it is built.
    """
    if not c.kernels.rlk_bitwise:
        return
    on_gpu, size = c.cluster.device == "cuda", decoder.head_dim
    parts = {
        "experts in fp8 on a GPU": decoder.experts is not None and on_gpu and c.megatron.has_fp8_blocks,
        **_uncomputed_experts(decoder.experts),
        f"{decoder.activation} activations": decoder.activation != "swiglu",
        "norms that multiply by 1 + weight": decoder.zero_centred,
        "scaled embeddings": decoder.embedding_scale != 1,
        "another attention": any(layer.kind != "full" for layer in decoder.layers),
        "sinks": decoder.sinks,
        "capped scores": decoder.attention_cap is not None,
        "capped logits": decoder.logit_cap is not None,
        **find_other_angles(decoder.ropes),
        f"heads of {size} (no power of two)": on_gpu and size & (size - 1) != 0,
        "a norm over all heads": decoder.qk_norm == "projection",
        "norms of outputs": decoder.post_norms,
    }
    if found := [name for name, there in parts.items() if there]:
        raise FlagError(
            "--rlk-bitwise",
            "have a model whose every part rl_kernel.invariant computes",
            f"one with {', '.join(found)}",
            "leave --rlk-bitwise out for this model",
        )
    if decoder.experts is not None:
        _check_bitwise_experts(c, decoder.experts)


def _uncomputed_experts(experts: Experts | None) -> dict[str, bool]:
    """Returns the features of experts that no operator of --rlk-bitwise computes: name -> True if the model has it."""
    if experts is None:
        return {}
    return {
        "scores of experts of another kind": experts.score not in ("softmax", "sigmoid"),
        "groups of experts": experts.groups is not None,
        "biases of a router with softmax scores": experts.bias and experts.score == "softmax",
        "a shared expert with a gate": experts.shared > 0 and experts.shared_gate,
        "biases of experts": experts.biases,
    }


def _check_bitwise_experts(c: Config, experts: Experts) -> None:
    """Checks that an engine's and a trainer's ranks split the width of an expert in the same way, and that a rank has
    all tokens of its experts."""
    tp, etp = c.megatron.tensor_model_parallel_size, c.megatron.expert_tensor_parallel
    parts = 1 if c.engine.engine_facts.expert_parallel else tp
    if parts != etp:
        raise FlagError(
            "--expert-tensor-parallel-size",
            "be the number of parts of an expert in an engine with --rlk-bitwise",
            f"{etp} and {parts}",
            f"give --expert-tensor-parallel-size {parts}, or change {c.engine.engine_facts.flag('expert_parallel')}",
        )
    if (ranks := c.megatron.expert_model_parallel_size * etp) > experts.topk:
        raise FlagError(
            "--expert-model-parallel-size",
            f"share the experts of a layer among at most {experts.topk} ranks with --rlk-bitwise, as many as a token "
            "has experts",
            ranks,
            "use fewer ranks, or leave --rlk-bitwise out",
        )


def _check_bitwise_ranks(c: Config) -> None:
    """Checks that an engine's and a trainer's ranks cut the inputs of a product at the same positions, and add the same
    number of parts."""
    facts, trainer = c.engine.engine_facts, c.megatron.tensor_model_parallel_size
    for name in ("data_parallel_size", "pipeline_parallel_size"):
        if (size := getattr(facts, name)) != 1:
            raise FlagError(
                facts.flag(name), "be 1 with --rlk-bitwise", size, "leave it out, or leave --rlk-bitwise out"
            )
    if (engine := c.cluster.rollout_num_gpus_per_engine) != trainer:
        raise FlagError(
            "--rollout-num-gpus-per-engine",
            "equal --tensor-model-parallel-size with --rlk-bitwise",
            f"{engine} and {trainer}",
            "sums over ranks have the same bits only if engine and trainer have equally many",
        )


def _check_provider(c: Config) -> None:
    """Checks that a provider is a function, and that it exists in mode strict. In mode auto, `provider_notes` reports a
    missing one."""
    path, mode = c.kernels.selected_logprob_provider, c.kernels.selected_logprob_provider_mode
    if path is None:
        if mode != "auto":
            raise FlagError(
                f"{PROVIDER}-mode {mode}", f"be combined with {PROVIDER}", "none", "name the provider"
            )
        return
    try:
        load_function(path, PROVIDER)
    except MissingHookError as error:
        if mode == "strict":
            raise FlagError(
                PROVIDER,
                "name a function that is there in mode strict",
                f"{path!r}: {error}",
                f"or take {PROVIDER}-mode auto, which uses the trainer's own log-probs",
            ) from error


def provider_notes(c: Config) -> Iterator[str]:
    """Yields a note for a provider that a run in mode auto cannot import."""
    path = c.kernels.selected_logprob_provider
    if path is None or c.kernels.selected_logprob_provider_mode == "strict":
        return
    try:
        load_function(path, PROVIDER)
    except MissingHookError as error:
        yield f"the trainer's own log-probs are used: {error}"
    except ValueError:
        return  # an error of `check_kernels`
