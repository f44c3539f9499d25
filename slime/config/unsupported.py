"""Lists flags that slime, upstream vime or Megatron scripts use and this version does not act on. Both kinds give a
message.

UNSUPPORTED: only the default is accepted, and values that give the same result, with a note. Every other value is an
error with the reason and the alternative. NO_EFFECT: the run already does the work of the flag. All values are
accepted, and a note gives the reason.
"""

from __future__ import annotations

from dataclasses import dataclass

from slime.config.fields import FlagSpec, spelled
from slime.records.errors import FlagError

_DEEPGEMM = "DeepGEMM is not used by the trainer"
_TOKENIZER = "the tokenizer is that of --hf-checkpoint"
_OBJECTS = "rollout data travels through Ray's object store"
_DSPARK = (
    "draft models are not trained here, though engines can serve one; --enable-mtp-training trains the checkpoint's "
    "own layers of multi-token prediction"
)
_POOL = "--max-staleness gives the number of batches that generation may be ahead of training"
_STATE_FILES = "--stream-optimizer-state-to-disk --offload-train-disk-dir DIR keeps Adam's state in files"
_BUFFER = (
    "no trajectory buffer is here; a --rollout-function-path or --custom-generate-function-path makes samples, and "
    "--custom-config-path takes the settings of a plug-in"
)
_CI = "these checks are tests of this project, not flags"


_DSPARK_FLAGS = (
    *("block_size", "num_draft_layers", "target_layer_ids", "markov_rank", "markov_head_type", "num_anchors"),
    *("mask_token_id", "ce_loss_alpha", "l1_loss_alpha", "confidence_head_alpha", "loss_decay_gamma"),
    *("draft_loss_weight", "intermediate_size", "pretrained_model"),
)


@dataclass(frozen=True)
class Unsupported:
    """A flag that is accepted at one value only."""

    default: object
    """The accepted value."""
    why: str
    same: tuple[str, ...] = ()
    """Other values that give the same result. They are accepted with a note."""


UNSUPPORTED: dict[str, Unsupported] = {
    # train
    "qkv_format": Unsupported(
        "thd", "sequences are always packed one after the other (thd), never padded", same=("bshd",)
    ),
    "custom_model_provider_path": Unsupported(None, "the model is built from the checkpoint's config.json"),
    "megatron_config_path": Unsupported(None, "give Megatron's settings as flags or in --custom-config-path"),
    "megatron_deepgemm_forward_layers": Unsupported(None, _DEEPGEMM),
    "megatron_deepgemm_forward_modules": Unsupported(None, _DEEPGEMM),
    "megatron_deepgemm_moe_forward_layers": Unsupported(None, _DEEPGEMM),
    "megatron_deepgemm_moe_forward_modules": Unsupported(None, _DEEPGEMM),
    "offload_train_target": Unsupported("cpu", _STATE_FILES),
    "chunked_optimizer_state_offload": Unsupported(False, _STATE_FILES),
    # adapters
    "lora_type": Unsupported(
        "lora",
        "plain LoRA is trained: q, k and v have separate adapters, as with canonical_lora",
        same=("canonical_lora",),
    ),
    "lora_adapter_path": Unsupported(None, "--lora-load DIR starts from a PEFT adapter"),
    "lora_train_only": Unsupported(False, "the engines sample from the trained adapters"),
    "experts_shared_outer_loras": Unsupported(False, "each expert has adapters of its own"),
    "multi_lora_n_adapters": Unsupported(0, "a run trains one set of adapters"),
    # weight update
    "keep_old_actor": Unsupported(
        False, "old log-probs come from --use-rollout-logprobs or the recompute pass"
    ),
    # rollout and data
    "fully_async_drain_each_epoch": Unsupported(False, "a batch may have prompts of two epochs"),
    "rollout_buffer_url": Unsupported(None, _BUFFER),
    "rollout_task_type": Unsupported("math", _BUFFER),
    "fetch_trajectory_retry_times": Unsupported(-1, _BUFFER),
    "min_batch_collection_ratio": Unsupported(1.0, _BUFFER),
    # algorithm
    "use_stateless_adam": Unsupported(False, "Adam keeps its moments in this version"),
    # debug
    "load_forge_rollout_data": Unsupported(
        None, "--load-debug-rollout-data trains on saved rollouts, without engines"
    ),
    **{f"dspark_{name}": Unsupported(None, _DSPARK) for name in _DSPARK_FLAGS},
    "dspark_freeze_policy": Unsupported(False, _DSPARK),
    "memory_recorder": Unsupported("torch", "snapshots are PyTorch's (--record-memory-history)"),
    "http_proxy": Unsupported(None, "requests to the engines never pass a proxy"),
    # Megatron
    "ckpt_format": Unsupported("torch_dist", "checkpoints are Megatron distributed checkpoints"),
    "dist_ckpt_format": Unsupported("torch_dist", "checkpoints are Megatron distributed checkpoints"),
}

_TEXT = {
    "qwen_gdn_backend": "the model's layers choose their kernels",
    "transfer_backend": _OBJECTS,
    "object_store_backend": _OBJECTS,
    "mooncake_store_init_kwargs": _OBJECTS,
    "fully_async_pool_size": _POOL,
    "fully_async_max_queued_batches": _POOL,
    "rollout_routed_experts_store_dir": "the experts of a rollout stay in memory",
    "routing_replay_prefetch_microbatches": "the experts of a rollout are in memory, so none are fetched from a disk",
    "async_strategy": "--async-save writes checkpoints in the background with this project's own writer",
    "update_weight_encoding": "--update-weight-delta-encoding chooses what a delta has; the weights are the same bits",
    "profile_target": "--profile-steps A:B traces the whole training of those rollouts",
    "ci_train_rollout_logprob_abs_diff_threshold": _CI,
    "ci_save_grad_norm": _CI,
    "ci_load_grad_norm": _CI,
    "tokenizer_type": _TOKENIZER,
    "tokenizer_model": _TOKENIZER,
    "dist_ckpt_strictness": "a load compares every tensor",
    "log_interval": "every step is logged",
    "tensorboard_dir": "--use-tensorboard writes into the run directory",
    "num_workers": "prompts are read before the run",
    "hierarchical_context_parallel_sizes": "context parallelism has one level",
    "data_pad_size_multiplier": "packed micro-batches are padded only as far as tensor parallelism needs",
    "log_probs_max_tokens_per_gpu": "the log-prob passes run over the micro-batches of --max-tokens-per-gpu",
    "log_probs_chunk_size": "log-probs are computed from hidden states in bounded chunks",
    "moe_token_drop_policy": "every token reaches its experts",
    "train_memory_margin_bytes": "a run measures the free memory of its GPUs",
    "model_name": "the model family is read from the checkpoint's config.json",
    "ref_micro_batch_size": "all passes use --micro-batch-size or --max-tokens-per-gpu",
    "seq_length": "sequences are packed at their own length",
    "megatron_to_hf_mode": "one table per family (slime/models) converts weights in both directions",
}
_BARE = {
    "keep_rollout_routed_experts_files": "the experts of a rollout stay in memory",
    "lora_sync_from_tensor": "--update-weight-transport chooses how adapters reach the engines",
    "lora_base_cpu_backup": "the engines keep the base, and updates send only the adapters",
    "check_lora_weight_equal": "--check-weight-update-equal also compares adapters",
    "load_main_params_from_ckpt": "main weights are loaded with the optimizer, or copied from the loaded weights",
    "release_train": "the trainer's processes stay; --offload-train frees their GPU memory",
    "ci_test": _CI,
    "ci_disable_kl_checker": _CI,
    "use_distributed_post": "requests leave from the rollout manager",
    "use_rollout_entropy": "the entropy of every training step is reported as train/entropy_loss",
    "enable_experimental": "no experimental function of megatron-core is used",
    "use_flash_attn": "--attention-backend decides",
    "log_throughput": "tokens per second are always reported as perf/*",
    "int4_params_rollout": "the engines keep the scheme of --hf-checkpoint",
    "no_one_logger": "no such logger is used",
    "manual_gc": "garbage collection is always under the trainer's control",
    "allgather_cp": "--cp-comm-type all_gather gathers keys and values; the result is the same",
    "use_fault_tolerance": "an engine that dies or stops answering is always restarted",
    "recompute_loss_function": "log-probs are computed from hidden states, no logits are kept",
    "variable_seq_lengths": "sequences are always packed at their own length",
    "ckpt_fully_parallel_load": "checkpoints are always loaded in parallel",
    "ckpt_fully_parallel_save": "checkpoints are always saved in parallel",
    "use_mcore_models": "models are always megatron-core models",
    "no_async_tensor_model_parallel_allreduce": "no megatron-core that the trainer runs on reads it",
    "moe_grouped_gemm": "experts of a layer are always computed together, in torch's grouped products (one by one in "
    "float32 and on GPUs of other compute capabilities than 9 and 10)",
    "moe_permute_fusion": "rl_kernel.expert_dispatch moves the tokens to their experts, in one kernel on GPUs",
    "overlap_cpu_optimizer_d2h_h2d": "the host always updates weights while the gradients of other weights travel",
}
NO_EFFECT = {
    **{name: FlagSpec(name, str, None, why) for name, why in _TEXT.items()},
    **{name: FlagSpec(name, bool, False, why) for name, why in _BARE.items()},
}


def check_unsupported(name: str, entry: Unsupported, values: list[str], typed: str) -> str | None:
    """Raises ValueError unless the strings after the flag are its default, or a value with the same result, for which
    it returns a note."""
    if isinstance(entry.default, bool):
        at_default = FlagSpec(name, bool, False, "").parse(values, typed) == entry.default
    elif isinstance(entry.default, int | float):
        at_default = FlagSpec(name, float, None, "").parse(values, typed) == entry.default
    else:
        at_default = values == [entry.default]
    if at_default:
        return None
    if len(values) == 1 and values[0] in entry.same:
        return f"{typed} {values[0]} is taken as {entry.default}, which gives the same result"
    default = "left out" if entry.default is None or entry.default is False else f"left at {entry.default}"
    raise FlagError(typed, f"be {default} in this version", " ".join(values) or spelled(name), entry.why)
