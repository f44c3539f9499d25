"""Flags of the data section: prompts, batch sizes and packing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slime.config.fields import flag


@dataclass(frozen=True)
class DataConfig:
    """rollout_batch_size * n_samples_per_prompt = global_batch_size * num_steps_per_rollout."""

    prompt_data: str | None = flag(
        None, "prompt file (jsonl, json, parquet, csv), optionally path@[start:end]"
    )
    input_key: str = flag("input", "column of the prompt")
    label_key: str | None = flag(None, "column of the label; a.b is field b of column a")
    metadata_key: str = flag("metadata", "column of the free-form record of a line")
    tool_key: str = flag("tools", "column of the tool descriptions")
    apply_chat_template: bool = flag(False, "render the prompt through the tokenizer's chat template")
    apply_chat_template_kwargs: dict[str, Any] = flag(  # noqa: RUF009 (flag copies the default)
        {}, "keyword arguments of the chat template, as a JSON object"
    )
    num_rollout: int | None = flag(None, "rollouts to run")
    num_epoch: int | None = flag(None, "passes over the prompts; used when --num-rollout is not given")
    disable_rollout_global_dataset: bool = flag(
        False, "no prompt file: the rollout function finds its own prompts"
    )
    data_source_path: str = flag(
        "slime.rollout.data_source.RolloutDataSourceWithBuffer", "class of the data source"
    )
    start_rollout_id: int | None = flag(None, "first rollout (default: after the loaded checkpoint)")
    rollout_batch_size: int | None = flag(None, "prompts of a rollout")
    n_samples_per_prompt: int = flag(1, "responses of a prompt")
    global_batch_size: int | None = flag(None, "samples of an optimizer step (default: all of a rollout)")
    num_steps_per_rollout: int | None = flag(None, "optimizer steps of a rollout")
    micro_batch_size: int = flag(1, "samples of a micro-batch when --use-dynamic-batch-size is off")
    use_dynamic_batch_size: bool = flag(False, "pack samples up to --max-tokens-per-gpu")
    max_tokens_per_gpu: int | None = flag(
        None, "most tokens of a packed micro-batch, times the context-parallel ranks"
    )
    balance_data: bool = flag(False, "give the data-parallel ranks micro-batches of even cost")
    balance_by_flops: bool = flag(False, "pack by estimated FLOPs; --max-tokens-per-gpu is then no cap")
    loss_mask_type: str = flag(
        "qwen", "how chat turns are told apart", choices=("qwen", "qwen3", "qwen3_5", "distill_qwen")
    )
