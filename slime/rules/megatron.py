"""Defines rules and notes for Megatron's own settings, under the names of Megatron's fields.

`SAME_RESULT` lists settings that change how fast a step is, or where its state is stored, but not its result. The
trainer chooses these itself, and a note reports it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from slime.checkpoints.hf_config import read_hf_config
from slime.config.fields import Values, spelled
from slime.config.sections.megatron import MegatronConfig
from slime.models import Decoder, read_decoder
from slime.models.fused_attention import find_layer_obstacle
from slime.plan.rounded_operands import NVFP4, form_for, has_own_recipe
from slime.records.errors import FlagError
from slime.roles import CRITIC, get_roles

if TYPE_CHECKING:
    from slime.config.schema import Config

_SPELLED = {"fp8": "--fp8-format", "fp4": "--fp4-format", "fp4_param": "--fp4-param-gather"}
_OWN_RECIPE = "; --fp8-format e4m3 --fp8-recipe blockwise does not"
_NEVER_RUN = (
    "cuda_graph_impl",
    "enable_cuda_graph",
    "external_cuda_graph",
)
_LARGEST_RATE, _LARGEST_LORA_RATE, _LARGEST_CRITIC_RATE = 1e-3, 1e-2, 1e-2
"""The learning rates above which a note warns. Only models with some thousand weights, such as the tiny one, learn with
higher rates."""
_ON_HOST = "Adam on the host is torch's, and the memory of its gradients is always pinned"
_LAYERS_ON_HOST = "--cpu-offloading keeps the inputs of all layers on the host, and no weights"
_ALLTOALL = "the number of ranks decides how tokens travel to their experts, with the same result"
_FLASH = "attention runs in the kernel for packed rows, with the same mathematics"
SAME_RESULT: dict[str, tuple[tuple[object, ...] | None, object, str]] = {
    "moe_token_dispatcher_type": (("flex", "allgather"), "alltoall", _ALLTOALL),
    "moe_enable_deepep": (None, None, _ALLTOALL),
    "moe_flex_dispatcher_backend": (None, None, _ALLTOALL),
    "moe_deepep_num_sms": (None, None, _ALLTOALL),
    "moe_shared_expert_overlap": (None, None, "the shared expert is computed before the routed ones"),
    "moe_router_fusion": (None, None, "the router is plain PyTorch"),
    "overlap_moe_expert_parallel_comm": (None, None, "the trainer's schedule has no such overlap"),
    "delay_wgrad_compute": (None, None, "the trainer's schedule has no such overlap"),
    "overlap_param_gather": (None, None, "parameters are gathered before the step"),
    "align_param_gather": (None, None, "parameters are gathered before the step"),
    "cpu_offloading_num_layers": (None, None, _LAYERS_ON_HOST),
    "cpu_offloading_activations": (None, None, _LAYERS_ON_HOST),
    "cpu_offloading_weights": (None, None, _LAYERS_ON_HOST),
    "cpu_offloading_double_buffering": (None, None, _LAYERS_ON_HOST),
    "use_torch_optimizer_for_cpu_offload": (None, None, _ON_HOST),
    "pin_cpu_grads": (None, None, _ON_HOST),
    "pin_cpu_params": (None, None, _ON_HOST),
    "attention_backend": (("unfused", "local"), "auto", _FLASH),
}
"""Field -> (its values that are replaced, or None for all; the replacement, or None for nothing; the reason)."""

_FLOAT32 = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")


MUON: dict[str, tuple[str, ...]] = {
    "muon_scale_mode": ("spectral", "shape_scaling", "unit_rms_norm"),
    "muon_tp_mode": ("blockwise", "duplicated", "distributed"),
    "muon_fp32_matmul_prec": ("medium", "high", "highest"),
    "muon_coefficient_type": ("quintic", "simple"),
    "muon_scalar_optimizer": ("adam",),
}
"""Setting of Muon -> its values."""


def same_result(overrides: Values) -> tuple[Values, list[str]]:
    """Returns `overrides` without the settings of `SAME_RESULT`, and one note per reason."""
    kept, notes = Values(), dict[str, list[str]]()
    for name, value in overrides.items():
        replaced, by, why = SAME_RESULT.get(name, ((), None, ""))
        if replaced is None or value in replaced:
            if by is not None:
                kept[name] = by
            if value not in (None, False):
                notes.setdefault(why, []).append(spelled(name) + ("" if value is True else f" {value}"))
        else:
            kept[name] = value
    return kept, [f"{', '.join(flags)}: no effect on the result; {why}" for why, flags in notes.items()]


def check_optimizer_dtypes(c: Config) -> None:
    """Checks that the optimizer's state is float32.

    Megatron-core supports other types only in Transformer Engine's FusedAdam: torch's Adam does not support them, and
    the hybrid optimizer ignores them.
    """
    for name in _FLOAT32:
        if c.megatron.overrides.get(name, "float32") != "float32":
            raise FlagError(
                spelled(name),
                "be fp32",
                c.megatron.overrides[name],
                "leave it out: other types need Transformer Engine's FusedAdam and were never run; "
                "--optimizer-cpu-offload frees the GPU of the state",
            )


def check_transformer_engine(c: Config) -> None:
    """Raises ValueError for a setting that Transformer Engine's attention does not support with packed rows. Trainers
    check its installation."""
    if c.megatron.overrides.get("transformer_impl") != "transformer_engine":
        return
    for flag, value, wanted in (
        ("--device", c.cluster.device, "cuda"),
        ("--params-dtype (--bf16, --fp32)", c.megatron.params_dtype, "bfloat16"),
        ("--context-parallel-size", c.megatron.context_parallel_size, 1),
    ):
        if value != wanted:
            raise FlagError(
                flag,
                f"be {wanted} with --transformer-impl transformer_engine",
                value,
                "--transformer-impl local does that",
            )


def without_engine_layers(c: Config) -> Config:
    """Returns the configuration without Transformer Engine's layers, for a model with experts: the trainer computes
    such a model in its own layers, in --params-dtype. A note names the flags."""
    engine = c.megatron.overrides.get("transformer_impl") == "transformer_engine"
    if not engine or c.rollout.hf_checkpoint is None or not _has_experts(c.rollout.hf_checkpoint):
        return c
    low = {name: value for name, value in c.megatron.overrides.items() if name.startswith(("fp8", "fp4"))}
    left_out = {
        "transformer_impl": "transformer_engine",
        **{name: value for name, value in low.items() if value},
    }
    flags = [
        _SPELLED.get(name, spelled(name)) + ("" if value is True else f" {value}")
        for name, value in left_out.items()
    ]
    note = f"{', '.join(flags)}: without effect for a model with experts, whose layers are the trainer's own"
    if len(left_out) > 1:
        note += f"; it computes in {c.megatron.params_dtype}, which is more exact than {next(iter(low))[:3]} and slower"
    kept = {n: v for n, v in c.megatron.overrides.items() if n not in {"transformer_impl", *low}}
    return replace(c.with_values(overrides=kept), notes=(*c.notes, note))


def _has_experts(checkpoint: str) -> bool:
    try:
        return read_decoder(read_hf_config(checkpoint)).experts is not None
    except ValueError:  # the rules of the checkpoint report it
        return False


def engine_notes(c: Config, decoder: Decoder) -> Iterator[str]:
    """Yields a note on Transformer Engine's layers, or on the layers that --attention-backend fused does not
    compute."""
    if c.megatron.overrides.get("transformer_impl") == "transformer_engine":
        yield (
            "--transformer-impl transformer_engine: these layers were written from the sources of Megatron and of "
            "Transformer Engine and have never been run; local was run and measured"
        )
    elif c.megatron.overrides.get("attention_backend") == "fused":
        yield from _fused_notes(c, decoder)


def _fused_notes(c: Config, decoder: Decoder) -> Iterator[str]:
    if c.cluster.device != "cuda" or c.megatron.params_dtype == "float32":
        yield f"--attention-backend fused: no effect on {c.cluster.device} in {c.megatron.params_dtype}"
        return
    layers = [layer for layer in decoder.layers if layer.softmax]
    obstacles = Counter(find_layer_obstacle(decoder, layer) for layer in layers)
    for why, count in obstacles.items():
        if why is not None:
            yield (
                f"--attention-backend fused: no effect in {count} of {len(layers)} layers with softmax attention, "
                f"because {why}"
            )


def check_padded_vocabulary(c: Config, vocab: int) -> None:
    """Checks that each tensor-parallel rank has the same number of rows, and that together they hold the vocabulary."""
    padded, tp = c.megatron.padded_vocab_size, c.megatron.tensor_model_parallel_size
    if padded is not None and (padded < vocab or padded % tp):
        raise FlagError(
            "--padded-vocab-size",
            f"be a multiple of --tensor-model-parallel-size {tp} and at least the vocabulary {vocab}",
            padded,
            "leave it out for --make-vocab-size-divisible-by",
        )


def check_offloaded_adam(c: Config) -> None:
    """Checks that Adam on the host comes with the distributed optimizer, in which a rank updates its part of the
    weights."""
    if c.megatron.optimizer == "muon":
        return
    if c.megatron.optimizer_cpu_offload and not c.megatron.use_distributed_optimizer:
        raise FlagError(
            "--use-distributed-optimizer",
            "be on with --optimizer-cpu-offload",
            "--no-use-distributed-optimizer",
            "leave one of the two out",
        )


def check_state_files(c: Config) -> None:
    """Checks that the optimizer's files have a folder, and that the flags about them come together."""
    flags, switch = c.megatron, "--stream-optimizer-state-to-disk"
    if flags.stream_optimizer_state_to_disk:
        if flags.offload_train_disk_dir is None:
            raise FlagError(
                "--offload-train-disk-dir", f"be given with {switch}", "none", "name a folder of a local disk"
            )
        return
    for name in (
        "offload_train_disk_dir",
        "offload_train_disk_chunk_mb",
        "stream_optimizer_state_moment_dtype",
    ):
        if (value := c.get_value(name)) != getattr(MegatronConfig, name):
            raise FlagError(switch, f"be given with {spelled(name)}", f"only {value}", "add it")


def check_muon(c: Config) -> None:
    """Checks that the run has what Muon needs: whole float32 state on the device."""
    flags = c.megatron
    if flags.optimizer != "muon":
        return
    for name, value in (
        ("use_distributed_optimizer", flags.use_distributed_optimizer),
        ("stream_optimizer_state_to_disk", flags.stream_optimizer_state_to_disk),
        ("optimizer_cpu_offload", flags.optimizer_cpu_offload),
        ("overlap_param_gather", flags.overrides.get("overlap_param_gather")),
    ):
        if value:
            raise FlagError(
                spelled(name),
                "be left out with --optimizer muon",
                "it",
                "Muon needs whole matrices: each rank has the whole float32 state on its device",
            )
    for name, known in MUON.items():
        if (value := flags.overrides.get(name)) is not None and value not in known:
            raise FlagError(spelled(name), f"be one of {', '.join(known)}", value, "leave it out")
    if (steps := flags.overrides.get("muon_num_ns_steps", 1)) < 1:
        raise FlagError("--muon-num-ns-steps", "be at least 1", steps, "leave it out for 5")


def remainder_notes(c: Config) -> Iterator[str]:
    """Yields a note on --use-precision-aware-optimizer if no main weights can be remainders."""
    if c.megatron.use_precision_aware_optimizer and (flag := c.megatron.remainders_obstacle):
        yield (
            f"--use-precision-aware-optimizer has no effect with {flag}: it makes Adam's main weights of bfloat16 "
            "weights on the device smaller"
        )


def muon_notes(c: Config) -> Iterator[str]:
    """Yields notes on settings of Muon that are read in another way, or not at all."""
    stated = [name for name in c.megatron.overrides if name.startswith(("muon_", "adaptive_muon_"))]
    if c.megatron.optimizer != "muon":
        for name in stated:
            yield f"{spelled(name)} has no effect without --optimizer muon: it is read only there"
    elif c.megatron.overrides.get("muon_tp_mode") == "distributed":
        yield "--muon-tp-mode distributed is taken as duplicated, which gives the same update"


def check_warm_up(c: Config) -> None:
    """Checks that the warm-up has one length."""
    if c.megatron.lr_warmup_fraction is not None and c.megatron.lr_warmup_iters:
        raise FlagError(
            "--lr-warmup-fraction",
            "not be given with --lr-warmup-iters",
            f"{c.megatron.lr_warmup_fraction} and {c.megatron.lr_warmup_iters}",
            "leave out one of the two",
        )


def weight_decays(c: Config) -> tuple[float, float]:
    """Returns the weight decay at the start and at the end of the schedule."""
    flags = c.megatron
    if flags.start_weight_decay is None or flags.end_weight_decay is None:
        return flags.weight_decay, flags.weight_decay
    return flags.start_weight_decay, flags.end_weight_decay


def check_schedules(c: Config) -> None:
    """Checks that the flags of a schedule come together."""
    flags = c.megatron
    if (flags.lr_wsd_decay_iters is not None) != (flags.lr_decay_style == "WSD"):
        raise FlagError(
            "--lr-wsd-decay-iters",
            "be given with --lr-decay-style WSD and only there",
            f"{flags.lr_wsd_decay_iters} with {flags.lr_decay_style}",
            "give both or leave both out",
        )
    if (flags.start_weight_decay is None) != (flags.end_weight_decay is None):
        raise FlagError(
            "--start-weight-decay",
            "be given with --end-weight-decay",
            f"{flags.start_weight_decay} and {flags.end_weight_decay}",
            "give both or leave both out",
        )
    start, end = weight_decays(c)
    if start > end or (flags.weight_decay_incr_style == "constant" and start != end):
        raise FlagError(
            "--end-weight-decay",
            "be at least --start-weight-decay, and equal to it with --weight-decay-incr-style constant",
            f"{end} after {start}",
            "give --weight-decay-incr-style linear or cosine",
        )


def check_local_layers(c: Config) -> None:
    """Checks that fp8 and fp4 come with Transformer Engine, if no form of `slime.plan.rounded_operands` has their
    flags. Without it, Megatron's fp8 context is empty and the run would silently use bf16."""
    overrides = c.megatron.overrides
    if overrides.get("transformer_impl") == "transformer_engine":
        return
    own = ("fp8", "fp4") if form_for(overrides) is NVFP4 else ("fp8",) * has_own_recipe(overrides)
    for name, value in overrides.items():
        low = name.startswith(("fp8", "fp4")) and not name.startswith(own)
        if value and (low or name == "tp_comm_overlap"):
            flag, what = _SPELLED.get(name, spelled(name)), name[:3] if low else "this overlap"
            raise FlagError(
                flag,
                "be left out with --transformer-impl local",
                "it" if value is True else value,
                f"{what} needs Transformer Engine" + _OWN_RECIPE * (name[:3] == "fp8"),
            )


def check_activation_offload(c: Config) -> None:
    """Checks that the layers keep only their inputs. Other saved tensors include the weights."""
    flags = c.megatron
    if not flags.cpu_offloading:
        return
    wanted = {"recompute_granularity": "full", "recompute_method": "uniform"}
    for name, value in wanted.items():
        if (got := flags.overrides.get(name)) != value:
            raise FlagError(
                spelled(name),
                f"be {value} with --cpu-offloading",
                got or "none",
                "add --recompute-granularity full --recompute-method uniform --recompute-num-layers 1, or leave "
                "--cpu-offloading out",
            )


RULES = (
    *(check_local_layers, check_optimizer_dtypes, check_offloaded_adam, check_state_files, check_muon),
    *(check_activation_offload, check_schedules, check_warm_up),
)
"""The rules that need no model."""


def never_run(overrides: Values) -> Iterator[str]:
    """Yields a note for each setting that goes to Megatron only and that no test or measurement covers."""
    for name in _NEVER_RUN:
        if overrides.get(name) not in (None, False, "none"):
            yield f"{spelled(name)}: passed to Megatron unchanged; never run here"


def rate_notes(c: Config) -> Iterator[str]:
    """Yields a note for each learning rate with which Adam moves every weight too far in a step."""
    if c.debug.debug_rollout_only:
        return
    rates = [("lr", c.megatron.lr, _LARGEST_LORA_RATE if c.lora.lora_rank else _LARGEST_RATE)]
    if CRITIC in get_roles(c) and c.critic.critic_lr is not None:
        rates.append(("critic_lr", c.critic.critic_lr, _LARGEST_CRITIC_RATE))
    for name, rate, largest in rates:
        if rate > largest:
            kind = "adapters" if name == "lr" and c.lora.lora_rank else "all weights of a model"
            yield (
                f"{spelled(name)} {rate:g}: Adam moves each weight by up to this much in a step, and {kind} often "
                f"collapse above {largest:g}; models of 1B weights and more learn with 1e-6 to 1e-4"
            )


def check_dropout(c: Config) -> None:
    """Checks that Megatron's dropouts are off."""
    for name in ("attention_dropout", "hidden_dropout"):
        value = c.megatron.overrides.get(name, 0.0)
        if value != 0:
            raise FlagError(
                spelled(name), "be 0", value, "log-probs of two passes must be those of one policy"
            )
