"""Changes the flags of a launch so that it runs on a CPU in a minute: sizes, devices, folders and services.

It keeps the user's reward, hooks, filters, algorithm, weight update, data format and order of the phases.
"""

from __future__ import annotations

import re
from pathlib import Path

from slime.models import FAMILIES
from slime.rules.model_args import READERS
from vime.rehearse.changes import Flags

ROLLOUTS, PROMPTS, SAMPLES, STEPS = 3, 4, 4, 2
RESPONSE_TOKENS, CONTEXT_TOKENS, BATCH_TOKENS = 32, 2048, 4096
SIZES = (
    ("tensor_model_parallel_size", 2),
    ("pipeline_model_parallel_size", 2),
    ("context_parallel_size", 2),
)
GPU_ONLY = [
    "attention_backend",
    "transformer_impl",
    "fp8",
    "fp8_format",
    "fp8_recipe",
    "fp8_param_gather",
    "moe_enable_deepep",
    "moe_token_dispatcher_type",
    "moe_grouped_gemm",
    "moe_permute_fusion",
    "optimizer_cpu_offload",
    "overlap_cpu_optimizer_d2h_h2d",
    "optimizer_offload_fraction",
    "offload_train",
    "offload_train_parts",
    "offload_rollout",
    "offload",
    "no_offload_train",
    "no_offload_rollout",
    "gpu",
    "num_gpus_per_node",
    "nvlink_domain_size",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "num_layers_per_virtual_pipeline_stage",
    "mtp_num_layers",
    "enable_mtp_training",
    "mtp_loss_scaling_factor",
    "round_weights",
    "dither_weights",
    "fp4",
    "fp4_format",
    "fp4_recipe",
    "main_grads_dtype",
    "main_params_dtype",
    "exp_avg_dtype",
    "exp_avg_sq_dtype",
    "train_memory_margin_bytes",
]
SERVICES = re.compile(
    r"(use_)?(wandb|mlflow|clearml|swanlab)(_.*)?|disable_wandb_random_suffix|prometheus_port"
)
ENGINE = re.compile(r"(sglang|vllm|router)_(?!.*(parser|template|trust_remote_code))")
MODEL_FOLDERS = ("ref_load", "opd_teacher_load", "critic_load", "lora_load")
EVALUATION = re.compile(r"(eval_|n_samples_per_eval_prompt|skip_eval).*")
SFT = "sft_loss"


def fit_flags(flags: Flags, model: Path, folder: Path, *, processes: int, made_tokenizer: bool) -> None:
    """Changes `flags`. `model` is the tiny model. The run writes to `folder`. `processes` is the largest number of
    trainer ranks."""
    _leave_model_args(flags)
    for name in GPU_ONLY:
        flags.drop(name, "needs a GPU, or splits a large model")
    for group in list(flags.groups):
        if SERVICES.fullmatch(group.name):
            flags.drop(group.name, "a rehearsal reports to no service")
        elif ENGINE.match(group.name):
            flags.drop(group.name, "sizes or kernels of an engine on GPUs")
    _fit_layout(flags, processes)
    _fit_batches(flags)
    _fit_lengths(flags, made_tokenizer)
    _fit_folders(flags, model, folder)
    flags.set("device", "this machine's CPU", "cpu")


def _leave_model_args(flags: Flags) -> None:
    shape = set(READERS) | {name for family in FAMILIES.values() for name in family.flags}
    shape |= {"make_vocab_size_divisible_by", "moe_aux_loss_coeff", "no_rope_fusion", "seq_length"} - {
        "moe_aux_loss_coeff"
    }
    for group in list(flags.groups):
        if group.name in shape:
            flags.drop(group.name, "the tiny model's config.json decides its shape")


def _fit_layout(flags: Flags, processes: int) -> None:
    """Keeps a parallel size of 2 where it was above 1, as long as `processes` ranks suffice."""
    ranks = 1
    for name, most in SIZES:
        size = flags.number(name, 1)
        kept = most if size > 1 and ranks * most <= processes else 1
        ranks *= kept
        if size != kept:
            flags.set(name, f"at most {processes} trainer processes here", kept)
    wanted = flags.number("actor_num_nodes", 1) * flags.number("actor_num_gpus_per_node", 8)
    data = 2 if ranks == 1 and wanted > 1 and processes > 1 else 1
    experts = flags.number("expert_model_parallel_size", 1)
    if experts > 1:
        shared = ranks * data // flags.number("pipeline_model_parallel_size", 1)
        flags.set("expert_model_parallel_size", f"at most {processes} trainer processes here", min(2, shared))
    if flags.number("expert_tensor_parallel_size", 1) > 1:
        flags.set("expert_tensor_parallel_size", f"at most {processes} trainer processes here", 1)
    if flags.number("tensor_model_parallel_size", 1) == 1:
        flags.drop("sequence_parallel", "needs a tensor-parallel size above 1")
    flags.set("actor_num_nodes", "one host", 1)
    flags.set("actor_num_gpus_per_node", f"at most {processes} trainer processes here", ranks * data)
    flags.set("rollout_num_gpus_per_engine", "one process serves the tiny model", 1)
    flags.limit("rollout_engines_per_gpu", 1, "one process serves the tiny model")
    if not flags.has("colocate"):
        flags.set("rollout_num_gpus", "one engine", 1)
    else:
        flags.drop("rollout_num_gpus", "colocated engines have the trainer's devices")


def _fit_batches(flags: Flags) -> None:
    why = "a rehearsal trains a few short samples"
    prompts, samples = flags.number("rollout_batch_size", 32), flags.number("n_samples_per_prompt", 1)
    size = flags.number("global_batch_size", prompts * samples)
    steps = min(STEPS, max(1, prompts * samples // max(size, 1)))
    kept, each = min(prompts, PROMPTS), min(samples, SAMPLES)
    flags.set("rollout_batch_size", why, kept)
    if flags.has("n_samples_per_prompt"):
        flags.set("n_samples_per_prompt", why, each)
    if flags.has("num_steps_per_rollout"):
        flags.limit("num_steps_per_rollout", STEPS, why)
        steps = flags.number("num_steps_per_rollout", 1)
    flags.set("global_batch_size", why, kept * each // steps)
    flags.limit("over_sampling_batch_size", 2 * kept, why)
    flags.drop("num_epoch", why)
    flags.set("num_rollout", why, ROLLOUTS)
    flags.drop("start_rollout_id", why)
    flags.limit("max_tokens_per_gpu", BATCH_TOKENS, why)
    flags.limit("log_probs_max_tokens_per_gpu", BATCH_TOKENS, why)


def _fit_lengths(flags: Flags, made_tokenizer: bool) -> None:
    why = "a random model ends no answer by itself"
    flags.set(
        "rollout_max_response_len",
        why,
        min(RESPONSE_TOKENS, flags.number("rollout_max_response_len", RESPONSE_TOKENS)),
    )
    flags.limit("rollout_max_context_len", CONTEXT_TOKENS, why)
    flags.limit("rollout_max_prompt_len", CONTEXT_TOKENS, why)
    if made_tokenizer:
        flags.drop("rollout_stop_token_ids", "the made tokenizer has other ids")
    for group in list(flags.groups):
        if EVALUATION.fullmatch(group.name):
            flags.drop(group.name, "a random model has no score")


def _fit_folders(flags: Flags, model: Path, folder: Path) -> None:
    why = "the rehearsal writes into its own folder"
    flags.set("hf_checkpoint", "a tiny model of the same family", model)
    for name in MODEL_FOLDERS:
        if flags.has(name):
            flags.set(name, "a tiny model of the same family", model)
    for group in list(flags.groups):
        if group.name.endswith("_dir") and group.name != "run_dir":
            flags.set(group.name, why, folder / group.name)
        elif group.name in ("save_debug_rollout_data", "save_debug_train_data"):
            flags.set(group.name, why, folder / group.name / Path(group.values[0]).name)
        elif group.name == "save_hf":
            flags.set("save_hf", why, folder / "hf" / "{rollout_id}")
    flags.set("save", why, folder / "checkpoint")
    flags.set("load", "the second start resumes what the first one saved", folder / "checkpoint")
    flags.set("save_interval", "every step, for the kill and the resume", 1)
    for name in ("no_save_optim", "no_load_optim", "no_load_rng", "finetune", "ckpt_step", "overwrite"):
        flags.drop(name, "a rehearsal resumes")
    flags.set("run_dir", why, folder / "run")
