"""Defines the rules of a resolved configuration, one small function each. Every error gives the flag, the rule, the
values found and the remedy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from slime.algo.losses import check_responses
from slime.checkpoints.hf_config import check_checkpoint_shapes, largest_token_id, read_hf_config
from slime.config.fields import spelled
from slime.config.problems import Problems, require_value
from slime.config.schema import Config
from slime.environments.flags import check_environments
from slime.hooks import load_function
from slime.models import Decoder, read_decoder
from slime.models.decoder import Hf
from slime.models.selection import check_selection
from slime.plan.stages import check_stages, micro_batch_group
from slime.plan.trained_params import check_parameter_names
from slime.receipts.flags import check_receipt
from slime.records.errors import FlagError
from slime.roles.groups import build_groups
from slime.rollout.straw.flags import check_queue
from slime.rules.algorithm import RULES as ALGORITHM
from slime.rules.checkpoint import check_directories, check_recovery, check_saving, check_weight_update
from slime.rules.cluster import (
    check_critic_devices,
    check_domains,
    check_engines,
    check_frozen_models,
    check_hardware,
    check_offload,
    check_parallel_sizes,
    check_prefill,
)
from slime.rules.data import (
    check_batches,
    check_curriculum,
    check_files,
    check_held_out,
    check_length,
    check_media,
    check_memory_history,
    check_profile_steps,
    check_train_data_file,
)
from slime.rules.distillation import check_distillation, check_teacher
from slime.rules.experts import check_expert_flags
from slime.rules.flags import FALLBACKS, own_flags
from slime.rules.heads import check_attention, indexer_notes
from slime.rules.images.roles import check_towers
from slime.rules.images.tower import check_tower
from slime.rules.kernels import check_bitwise_model, check_kernels
from slime.rules.lora import check_lora
from slime.rules.megatron import RULES as MEGATRON
from slime.rules.megatron import (
    check_dropout,
    check_padded_vocabulary,
    check_transformer_engine,
    engine_notes,
)
from slime.rules.model_args import check_model_args, model_arg_notes
from slime.rules.off_policy import (
    check_kept_tokens,
    check_levels,
    check_off_policy,
    check_replayed_model,
    check_routing_replay,
)
from slime.rules.packages import check_packages
from slime.rules.precision.fp8 import check_fp8_flags
from slime.rules.precision.microscaling import check_microscaling_flags, check_operands, operand_notes
from slime.rules.prediction import check_prediction
from slime.rules.weights.cache_flush import check_flush_interval, check_flush_value
from slime.rules.weights.scheme import check_scheme, scheme_notes
from slime.rules.weights.sources import check_sources
from slime.weight_sync.registry import CHANNELS

Rule = Callable[[Config], None]
_OF_SAMPLING = (
    *("--rollout-function-path", "--rollout-max-response-len", "--rollout-num-gpus", "--colocate"),
    *("--rm-type", "--custom-rm-path", "--n-samples-per-prompt"),
)
"""Flags of generation and rewards, which a run on given responses does not need."""


def validate(
    config: Config, problems: Problems, more: Sequence[Rule] = (), last: Sequence[Rule] = ()
) -> None:
    """Adds every rule's errors to `problems`. The order is: the source of the loss's responses, the rules of single
    flags, the rules between flags with `more`, then the rules in `last`."""
    problems.check(check_responses, config, causes=_OF_SAMPLING)
    for stage in (BY_THEMSELVES, (*TOGETHER, *more), last):
        for rule in stage:
            problems.check(rule, config)
        problems.next_stage()


def _required(c: Config) -> None:
    problems = Problems()
    needed = {
        "hf_checkpoint": "a Hugging Face checkpoint directory",
        "rollout_batch_size": "prompts of a rollout",
    }
    if not c.debug.load_debug_rollout_data and not c.data.disable_rollout_global_dataset:
        needed["prompt_data"] = "a prompt file, unless --disable-rollout-global-dataset"
    for name, what in needed.items():
        if c.get_value(name) is None:
            problems.add(FlagError(spelled(name), f"be given ({what})", "none"))
    if {c.data.num_rollout, c.data.num_epoch, c.data.train_iters, c.data.train_samples} == {None}:
        problems.add(FlagError("--num-rollout", "be given", "none", "or give --num-epoch"))
    elif c.data.num_rollout is None and c.data.disable_rollout_global_dataset:
        problems.add(FlagError("--num-rollout", "be given with --disable-rollout-global-dataset", "none"))
    generates = c.cluster.rollout_num_gpus != 0
    if generates and c.rollout.rollout_max_response_len is None and c.rollout.rollout_max_context_len is None:
        problems.add(
            FlagError("--rollout-max-response-len", "be given", "none", "or give --rollout-max-context-len")
        )
    problems.report()


def _ranges(c: Config) -> None:
    """Checks the ranges of derived values. `FlagSpec.parse` has checked the values that the user typed."""
    problems = Problems()
    for name, spec in own_flags().items():
        value, source = c.get_value(name), FALLBACKS.get(name)
        # The rule of the source reports a value that was taken over.
        if spec.range is None or value is None or (source is not None and value == c.get_value(source)):
            continue
        for number in value if spec.many else [value]:
            if rule := spec.range.problem(number):
                problems.add(FlagError(spelled(name), rule, number))
    problems.report()


def _precision(c: Config) -> None:
    chosen = [name for name in ("bf16", "fp16", "fp32") if c.get_value(name)]
    if len(chosen) > 1:
        raise FlagError("--bf16, --fp16 and --fp32", "not be combined", " and ".join(map(spelled, chosen)))
    if c.cluster.device == "cuda" and c.cluster.distributed_backend != "nccl":
        raise FlagError("--distributed-backend", "be nccl on GPUs", c.cluster.distributed_backend)
    if c.megatron.fp16:  # without loss scaling, gradients would underflow
        raise FlagError("--fp16", "be left out in this version", "--fp16", "use --bf16 or --fp32")


def _staleness(c: Config) -> None:
    if c.cluster.colocate and c.rollout.max_staleness > 0:
        raise FlagError(
            "--max-staleness",
            "be 0 with --colocate",
            c.rollout.max_staleness,
            "engines and trainer take turns on the same GPUs, so nothing runs ahead: leave out "
            "one of the two",
        )
    if c.weight_update.update_weights_interval > c.rollout.max_staleness + 1:
        raise FlagError(
            "--update-weights-interval",
            "be at most --max-staleness + 1",
            f"{c.weight_update.update_weights_interval} and {c.rollout.max_staleness}",
        )
    if c.rollout.stale_samples == "keep" and not c.off_policy.use_tis:
        raise FlagError(
            "--stale-samples keep",
            "come with --use-tis, which corrects for their older weights",
            advice="add it, or use mask",
        )
    transport = require_value(c.weight_update.update_weight_transport)
    if CHANNELS[transport].needs_gpus and c.cluster.device == "cpu":
        raise FlagError(
            f"--update-weight-transport {transport}",
            "have trainer and engines on GPUs",
            "--device cpu",
            "use nccl, which has gloo on CPUs",
        )
    shares_gpus = c.cluster.colocate and c.cluster.device == "cuda"
    if CHANNELS[transport].gpus == "shared" and not shares_gpus:
        raise FlagError(
            f"--update-weight-transport {transport}",
            "have trainer and engines on the same GPUs",
            "no --colocate" if not c.cluster.colocate else f"--device {c.cluster.device}",
            "leave the flag out",
        )


def _micro_batches(c: Config) -> None:
    if c.debug.debug_rollout_only:
        return
    if c.data.use_dynamic_batch_size and c.data.max_tokens_per_gpu is None:
        raise FlagError("--max-tokens-per-gpu", "be given with --use-dynamic-batch-size", "none")
    for ranks in {group.config.data_parallel_size for group in build_groups(c)}:
        _check_rank_samples(c, ranks)


def _check_rank_samples(c: Config, ranks: int) -> None:
    """Checks that a step has enough samples for `ranks` data-parallel ranks."""
    size, group = c.data.micro_batch_size, _group(c)
    least, part = min(c.data.step_sizes), ""
    if c.data.variable_global_batch_size:
        schedule = " of --global-batch-size-schedule" if c.data.global_batch_size_schedule else ""
        part = f" in every step{schedule}"
    virtual = f" * {group} micro-batches of each virtual stage" if group > 1 else ""
    if c.data.use_dynamic_batch_size:
        if least < ranks * group:
            raise FlagError(
                "--global-batch-size",
                f"be at least the data-parallel size{virtual}{part}",
                f"{least} for {ranks} ranks{f' * {group} = {ranks * group}' if group > 1 else ''}",
                "every rank needs a sample in every step and micro-batch",
            )
    elif odd := [each for each in c.data.step_sizes if each % (ranks * size * group)]:
        raise FlagError(
            "--global-batch-size",
            f"be a multiple of data-parallel size * --micro-batch-size{virtual}{part}",
            f"{odd[0]} and {ranks} * {size}{f' * {group}' if group > 1 else ''} = {ranks * size * group}",
            "or use --use-dynamic-batch-size",
        )


def _group(c: Config) -> int:
    """Returns `micro_batch_group`, or 1 for a model or stages that other checks report."""
    decoder = _decoder(c) if c.megatron.pipeline_model_parallel_size > 1 else None
    try:
        return 1 if decoder is None else micro_batch_group(c.megatron, len(decoder.layers))
    except ValueError:
        return 1


def _rewards(c: Config) -> None:
    if c.reward.rm_type or c.reward.rm_weights:
        from slime.rollout.rewards import check_flags

        check_flags(c.reward)


def _hooks(c: Config) -> None:
    """Loads every function that the user named, so that a misspelled path is an error at start-up."""
    problems = Problems()
    for name, spec in own_flags().items():
        value = c.get_value(name)
        taken_over = name in FALLBACKS and value == c.get_value(FALLBACKS[name])
        if (
            name.endswith("_path")
            and name != "custom_config_path"
            and value != spec.default
            and not taken_over
        ):
            paths: list[str] = value if spec.many else [value]
            for path in paths:
                problems.check(load_function, path, spelled(name))
    problems.report()


def _intervals(c: Config) -> None:
    problems, e = Problems(), c.evaluation
    if c.checkpoint.save_interval is not None and c.checkpoint.save is None:
        problems.add(
            FlagError(
                "--save",
                "be given with --save-interval",
                f"only --save-interval {c.checkpoint.save_interval}",
            )
        )
    if e.eval_interval is not None and not e.eval_prompt_data and e.eval_config is None:
        problems.add(
            FlagError("--eval-prompt-data", f"be given with --eval-interval {e.eval_interval}", "none")
        )
    if c.data.num_rollout == 0 and e.eval_interval is None:
        problems.add(
            FlagError("--num-rollout", "be 1 or more without --eval-interval", "0", "give one of them")
        )
    pairs = e.eval_prompt_data or []
    if len(pairs) % 2:
        problems.add(FlagError("--eval-prompt-data", "be pairs of name and path", " ".join(pairs)))
    problems.report()


def _model(c: Config) -> Hf:
    return read_hf_config(require_value(c.rollout.hf_checkpoint))


def _checkpoint(c: Config) -> None:
    checkpoint, hf_config = require_value(c.rollout.hf_checkpoint), _model(c)
    read_decoder(hf_config)
    check_checkpoint_shapes(checkpoint, hf_config)
    largest, vocabulary = largest_token_id(checkpoint), hf_config.get("vocab_size")
    if largest is not None and vocabulary is not None and largest >= vocabulary:
        raise FlagError(
            "--hf-checkpoint",
            "have a tokenizer whose ids fit the model",
            f"token id {largest} and vocab_size {vocabulary} in {checkpoint}",
            "the two are not of the same model",
        )


def _model_args(c: Config) -> None:
    check_model_args(c.megatron.model_args, _model(c))


def _decoder(c: Config) -> Decoder | None:
    """Returns the decoder, or None for a model that `_checkpoint` reports."""
    try:
        return read_decoder(_model(c))
    except ValueError:
        return None


def _replayed_model(c: Config) -> None:
    if (decoder := _decoder(c)) is not None:
        experts = decoder.experts
        check_replayed_model(c, experts.count if experts else 0, experts.topk if experts else None)


def _with_decoder(check: Callable[[Config, Decoder], None]) -> Rule:
    """Wraps `check` so that it runs only for a model that `_checkpoint` does not report."""

    def rule(c: Config) -> None:
        if (decoder := _decoder(c)) is not None:
            check(c, decoder)

    return rule


def checkpoint_notes(c: Config) -> Iterator[str]:
    """Yields notes on flags that describe the checkpoint of a validated configuration."""
    yield from model_arg_notes(c.megatron.model_args, _model(c))
    yield from scheme_notes(c, _model(c))
    decoder = read_decoder(_model(c))
    yield from (*operand_notes(c, _model(c)), *indexer_notes(c, decoder))
    yield from engine_notes(c, decoder)


BY_THEMSELVES: tuple[Rule, ...] = (
    _required,
    _ranges,
    check_flush_value,
    _precision,
    check_selection,
    check_environments,
)
TOGETHER: tuple[Rule, ...] = (
    check_hardware,
    check_parallel_sizes,
    check_weight_update,
    check_critic_devices,
    check_transformer_engine,
    *(*MEGATRON, check_fp8_flags, check_microscaling_flags),
    check_dropout,
    check_engines,
    check_domains,
    _staleness,
    check_offload,
    check_batches,
    _micro_batches,
    *ALGORITHM,
    check_frozen_models,
    check_prefill,
    check_flush_interval,
    check_distillation,
    check_off_policy,
    check_kept_tokens,
    check_levels,
    check_routing_replay,
    check_kernels,
    _rewards,
    check_packages,
    _intervals,
    check_held_out,
    check_saving,
    check_recovery,
    check_queue,
    check_length,
    check_memory_history,
    check_profile_steps,
    check_train_data_file,
    check_receipt,
    check_files,
    check_curriculum,
    check_media,
    check_directories,
    check_teacher,
    _hooks,
    _checkpoint,
    _model_args,
    _replayed_model,
    _with_decoder(lambda c, decoder: check_stages(c.megatron, len(decoder.layers))),
    _with_decoder(lambda c, _: check_scheme(c, _model(c))),
    _with_decoder(lambda c, _: check_operands(c, _model(c))),
    _with_decoder(lambda c, _: check_sources(c)),
    _with_decoder(check_expert_flags),
    _with_decoder(check_attention),
    _with_decoder(check_bitwise_model),
    _with_decoder(lambda c, _: check_lora(c, _model(c))),
    _with_decoder(lambda c, _: check_prediction(c, _model(c))),
    _with_decoder(check_tower),
    _with_decoder(lambda c, _: check_towers(c)),
    _with_decoder(lambda c, _: check_parameter_names(c, _model(c))),
    _with_decoder(lambda c, decoder: check_padded_vocabulary(c, decoder.vocab)),
)
