"""Settings of TRL and verl that this project spells in another way, for the error of an unknown flag and for two pages.

Names are those of TRL's GRPOConfig, ModelConfig and ScriptArguments, of transformers' TrainingArguments, and of verl's
ppo_trainer.yaml.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

TRL, VERL = "TRL", "verl"
PAGES = {TRL: "docs/from-trl.md", VERL: "docs/from-verl.md"}
"""The page of each program."""
VERL_SECTIONS = (
    "actor_rollout_ref",
    "algorithm",
    "critic",
    "custom_reward_function",
    "data",
    "reward_model",
    "trainer",
)
"""First words of verl's settings."""
_RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
_OVERRIDE = re.compile(rf"\+{{0,2}}((?:{'|'.join(VERL_SECTIONS)})(?:\.[A-Za-z_]\w*)+)=(.*)", re.DOTALL)


@dataclass(frozen=True)
class PeerName:
    """One setting of another program."""

    program: str
    name: str
    flags: str
    """The flags of this project as typed; empty if none is needed."""
    note: str = ""
    """What differs. Without a flag, the reason."""

    def answer(self) -> str:
        """What to do with the setting, as the end of an error message."""
        if not self.flags:
            return f"leave {self.name} of {self.program} out: {self.note}"
        return f"for {self.name} of {self.program}, give {self.flags}{self.note and f' ({self.note})'}"


_TRL = (
    ("model_name_or_path", "--hf-checkpoint", ""),
    ("dataset_name", "--prompt-data", "a file, or a data set of the hub as NAME:CONFIG:SPLIT"),
    ("dataset_config", "--prompt-data", "NAME:CONFIG:SPLIT"),
    ("dataset_train_split", "--prompt-data", "NAME:CONFIG:SPLIT"),
    ("output_dir", "--save", "checkpoints; --run-dir has the records"),
    ("run_name", "--run-dir", "also --wandb-group"),
    ("per_device_train_batch_size", "--global-batch-size",
     "samples of one optimizer step on all devices; --max-tokens-per-gpu bounds the memory"),
    ("gradient_accumulation_steps", "--global-batch-size",
     "samples of one optimizer step; micro-batches follow from --max-tokens-per-gpu"),
    ("generation_batch_size", "--rollout-batch-size", "counts prompts: divide by --n-samples-per-prompt"),
    ("steps_per_generation", "--num-steps-per-rollout", ""),
    ("num_generations", "--n-samples-per-prompt", ""),
    ("num_generations_eval", "--n-samples-per-eval-prompt", ""),
    ("max_prompt_length", "--rollout-max-prompt-len", "longer prompts are dropped, not cut"),
    ("max_completion_length", "--rollout-max-response-len", ""),
    ("temperature", "--rollout-temperature", ""),
    ("top_p", "--rollout-top-p", ""),
    ("top_k", "--rollout-top-k", "-1 switches it off"),
    ("chat_template_kwargs", "--apply-chat-template-kwargs", "a JSON object"),
    ("shuffle_dataset", "--rollout-shuffle", ""),
    ("learning_rate", "--lr", ""),
    ("lr_scheduler_type", "--lr-decay-style", ""),
    ("warmup_steps", "--lr-warmup-iters", "optimizer steps"),
    ("warmup_ratio", "--lr-warmup-fraction", ""),
    ("max_grad_norm", "--clip-grad", ""),
    ("num_train_epochs", "--num-epoch", ""),
    ("max_steps", "--train-iters", "optimizer steps; --num-rollout counts rollouts"),
    ("beta", "--kl-loss-coef", "with --use-kl-loss and --kl-loss-type k3; for DPO --dpo-beta"),
    ("epsilon", "--eps-clip", ""),
    ("epsilon_high", "--eps-clip-high", ""),
    ("delta", "--eps-clip-c", "for negative advantages"),
    ("scale_rewards", "--disable-grpo-std-normalization", "for scale_rewards none"),
    ("importance_sampling_level", "--advantage-estimator gspo", "for the level sequence; token is the default"),
    ("mask_truncated_completions", "--use-overlong-filtering", ""),
    ("num_iterations", "", "each sample is trained on once"),
    ("ref_model_sync_steps", "--ref-update-interval", "counts rollouts"),
    ("sync_ref_model", "--ref-update-interval", "counts rollouts"),
    ("use_vllm", "", "vLLM always generates"),
    ("reward_funcs", "--custom-rm-path", "module.function; --rm-type names a reward that is there"),
    ("gradient_checkpointing", _RECOMPUTE, ""),
    ("attn_implementation", "--attention-backend", ""),
    ("dtype", "--bf16", "also --fp16 and --fp32"),
    ("torch_dtype", "--bf16", "also --fp16 and --fp32"),
    ("use_peft", "--lora-rank", "a rank above 0 trains adapters"),
    ("lora_r", "--lora-rank", ""),
    ("save_steps", "--save-interval", "counts rollouts"),
    ("save_total_limit", "--max-actor-ckpt-to-keep", ""),
    ("resume_from_checkpoint", "--load", "the folder of --save: the same command then resumes"),
    ("eval_steps", "--eval-interval", "counts rollouts"),
    ("eval_strategy", "--eval-interval", "counts rollouts"),
    ("logging_steps", "", "each step is logged"),
    ("log_completions", "", "samples are kept in the run directory, and `vime ui RUN_DIR` shows them"),
    ("report_to", "--use-wandb", "also --use-tensorboard, --use-mlflow, --use-swanlab, --use-trackio"),
)  # fmt: skip
_ACTOR, _ROLLOUT, _MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
_VERL = (
    ("data.train_files", "--prompt-data", ""),
    ("data.val_files", "--eval-prompt-data", "NAME FILE"),
    ("data.train_batch_size", "--rollout-batch-size", "prompts of a rollout"),
    ("data.max_prompt_length", "--rollout-max-prompt-len", "longer prompts are dropped, not cut"),
    ("data.max_response_length", "--rollout-max-response-len", ""),
    ("data.prompt_key", "--input-key", ""),
    ("data.shuffle", "--rollout-shuffle", ""),
    ("data.filter_overlong_prompts", "--rollout-max-prompt-len", "longer prompts are dropped"),
    ("data.truncation", "--rollout-max-prompt-len", "longer prompts are dropped, not cut"),
    ("data.reward_fn_key", "--rm-type", "one reward for a data set; a --custom-rm-path reads sample.metadata"),
    (f"{_MODEL}.path", "--hf-checkpoint", ""),
    (f"{_MODEL}.enable_gradient_checkpointing", _RECOMPUTE, ""),
    (f"{_MODEL}.use_remove_padding", "", "samples are always packed"),
    (f"{_MODEL}.lora_rank", "--lora-rank", ""),
    (f"{_MODEL}.lora_alpha", "--lora-alpha", ""),
    (f"{_MODEL}.target_modules", "--lora-target-modules", ""),
    (f"{_ACTOR}.optim.lr", "--lr", ""),
    (f"{_ACTOR}.optim.lr_warmup_steps", "--lr-warmup-iters", "optimizer steps"),
    (f"{_ACTOR}.optim.weight_decay", "--weight-decay", ""),
    (f"{_ACTOR}.ppo_mini_batch_size", "--global-batch-size",
     "counts samples: multiply by --n-samples-per-prompt"),
    (f"{_ACTOR}.ppo_micro_batch_size_per_gpu", "--micro-batch-size",
     "or --use-dynamic-batch-size with --max-tokens-per-gpu"),
    (f"{_ACTOR}.use_dynamic_bsz", "--use-dynamic-batch-size", ""),
    (f"{_ACTOR}.ppo_max_token_len_per_gpu", "--max-tokens-per-gpu", ""),
    (f"{_ACTOR}.ppo_epochs", "", "each sample is trained on once"),
    (f"{_ACTOR}.clip_ratio", "--eps-clip", ""),
    (f"{_ACTOR}.clip_ratio_low", "--eps-clip", ""),
    (f"{_ACTOR}.clip_ratio_high", "--eps-clip-high", ""),
    (f"{_ACTOR}.clip_ratio_c", "--eps-clip-c", ""),
    (f"{_ACTOR}.loss_agg_mode", "--calculate-per-token-loss",
     "for token-mean; seq-mean-token-mean is the default; --use-dr-grpo for seq-mean-token-sum-norm"),
    (f"{_ACTOR}.entropy_coeff", "--entropy-coef", ""),
    (f"{_ACTOR}.use_kl_loss", "--use-kl-loss", ""),
    (f"{_ACTOR}.kl_loss_coef", "--kl-loss-coef", ""),
    (f"{_ACTOR}.kl_loss_type", "--kl-loss-type", ""),
    (f"{_ACTOR}.grad_clip", "--clip-grad", ""),
    (f"{_ACTOR}.ulysses_sequence_parallel_size", "--context-parallel-size", ""),
    (f"{_ACTOR}.strategy", "", "Megatron always trains"),
    (f"{_ACTOR}.fsdp_config.param_offload", "--offload-train", "with --colocate"),
    (f"{_ACTOR}.fsdp_config.optimizer_offload", "--optimizer-cpu-offload", "Adam also runs on the host"),
    (f"{_ROLLOUT}.name", "--rollout-backend", "vllm is the default"),
    (f"{_ROLLOUT}.n", "--n-samples-per-prompt", ""),
    (f"{_ROLLOUT}.temperature", "--rollout-temperature", ""),
    (f"{_ROLLOUT}.top_p", "--rollout-top-p", ""),
    (f"{_ROLLOUT}.top_k", "--rollout-top-k", ""),
    (f"{_ROLLOUT}.tensor_model_parallel_size", "--rollout-num-gpus-per-engine", ""),
    (f"{_ROLLOUT}.val_kwargs.n", "--n-samples-per-eval-prompt", ""),
    (f"{_ROLLOUT}.val_kwargs.temperature", "--eval-temperature", ""),
    (f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu", "--max-tokens-per-gpu", "with --use-dynamic-batch-size"),
    ("algorithm.adv_estimator", "--advantage-estimator", "gae is ppo here"),
    ("algorithm.gamma", "--gamma", ""),
    ("algorithm.lam", "--lambd", ""),
    ("algorithm.use_kl_in_reward", "--kl-coef", "a weight above 0"),
    ("algorithm.kl_ctrl.kl_coef", "--kl-coef", ""),
    ("algorithm.norm_adv_by_std_in_grpo", "--disable-grpo-std-normalization", "for false"),
    ("critic.optim.lr", "--critic-lr", ""),
    ("critic.model.path", "--critic-load", ""),
    ("custom_reward_function.path", "--custom-rm-path", "module.function"),
    ("custom_reward_function.name", "--custom-rm-path", "module.function"),
    ("reward_model.reward_manager", "--rm-type", "or --custom-rm-path"),
    ("trainer.nnodes", "--actor-num-nodes", ""),
    ("trainer.n_gpus_per_node", "--actor-num-gpus-per-node", "with --colocate"),
    ("trainer.total_epochs", "--num-epoch", ""),
    ("trainer.total_training_steps", "--num-rollout", "verl counts batches of data.train_batch_size"),
    ("trainer.save_freq", "--save-interval", ""),
    ("trainer.test_freq", "--eval-interval", ""),
    ("trainer.val_before_train", "--skip-eval-before-train", "for false"),
    ("trainer.default_local_dir", "--save", ""),
    ("trainer.resume_mode", "--load", "the folder of --save, for auto"),
    ("trainer.logger", "--use-wandb", "also --use-tensorboard, --use-mlflow, --use-swanlab, --use-trackio"),
    ("trainer.project_name", "--wandb-project", ""),
    ("trainer.experiment_name", "--wandb-group", ""),
    ("trainer.max_actor_ckpt_to_keep", "--max-actor-ckpt-to-keep", ""),
)  # fmt: skip


def table_of(program: str, rows: Iterable[tuple[str, str, str]]) -> dict[str, PeerName]:
    """Name -> its entry, of rows of name, flags and note."""
    return {name: PeerName(program, name, flags, note) for name, flags, note in rows}


PEER_NAMES: dict[str, PeerName] = {**table_of(TRL, _TRL), **table_of(VERL, _VERL)}
"""Settings that no backend owns. A backend adds those of its engine."""
NONE: Mapping[str, PeerName] = MappingProxyType({})


def override_of(token: str) -> tuple[str, str] | None:
    """Name and value of a token that is a setting of verl as Hydra spells it, such as `algorithm.gamma=1`."""
    found = _OVERRIDE.fullmatch(token)
    return None if found is None else (found[1], found[2])


def peer_answer(name: str, values: Iterable[str] = (), engines: Mapping[str, PeerName] = NONE) -> str:
    """What to give in the place of a setting of TRL or verl; empty if `name` is none.

    `engines` has the settings that the backend owns. A section of verl in a YAML file has its settings as a JSON object
    in `values`.
    """
    name, known = name.lstrip("+"), {**PEER_NAMES, **engines}
    if name in known:
        return known[name].answer()
    if name in VERL_SECTIONS:
        found = [known[each].answer() for each in _inner(name, values) if each in known]
        return "; ".join([*found, f"for other settings of verl, see {PAGES[VERL]}"])
    if name.partition(".")[0] in VERL_SECTIONS:
        return f"it is spelled as a setting of verl; {PAGES[VERL]} has the flags of this project"
    return ""


def _inner(section: str, values: Iterable[str]) -> list[str]:
    """The dotted names of all settings in a section."""
    names = []
    for text in values:
        try:
            todo = [(section, json.loads(text))]
        except ValueError:
            continue
        while todo:
            name, value = todo.pop(0)
            if isinstance(value, dict):
                todo += [(f"{name}.{key}", each) for key, each in value.items()]
            else:
                names.append(name)
    return names
