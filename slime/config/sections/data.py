"""Flags of the data section: prompts, batch sizes and packing."""

from __future__ import annotations

from dataclasses import dataclass

from slime.config.fields import flag
from slime.config.ranges import COUNT, COUNT_OR_ZERO, UNIT


@dataclass(frozen=True)
class DataConfig:
    """rollout_batch_size * n_samples_per_prompt = global_batch_size * num_steps_per_rollout, or = the sum of
    `step_sizes`."""

    prompt_data: str | list[str] | None = flag(  # noqa: RUF009
        None,
        "prompt file (jsonl, json, parquet, csv, arrow), folder of such files, or hub dataset NAME[:CONFIG[:SPLIT]]; "
        "path@[start:end] takes a part of its rows; NAME=PATH NAME=PATH ... mixes several",
    )
    prompt_data_weights: list[str] | None = flag(  # noqa: RUF009
        None,
        "NAME=WEIGHT of each data set of --prompt-data: its share of the prompts (default: its number of prompts)",
    )
    curriculum: float | None = flag(
        None,
        "probability with which a prompt whose last group had equal rewards, and so no advantage, is drawn again in a "
        "later epoch (default: every prompt is drawn in every epoch)",
        range=UNIT,
    )
    input_key: str = flag("input", "column of the prompt")
    multimodal_keys: dict[str, object] | None = flag(  # noqa: RUF009
        None, 'columns of images and videos, as JSON: {"image": "images"}'
    )
    label_key: str | None = flag(None, "column of the label; a.b means field b of column a")
    chosen_key: str = flag("chosen", "column of the preferred response of a pair: text or chat messages")
    rejected_key: str = flag("rejected", "column of the other response of a pair")
    metadata_key: str = flag(
        "metadata",
        "column of the metadata of a prompt, an object; its keys win over other columns, which are metadata too",
    )
    tool_key: str = flag("tools", "column of the tools: a list of objects, of their JSON texts, or of names")
    apply_chat_template: bool = flag(False, "render the prompt with the tokenizer's chat template")
    apply_chat_template_kwargs: dict[str, object] = flag(  # noqa: RUF009 (flag copies the default)
        {},
        "keyword arguments of the chat template, as a JSON object; one that the template does not read is an error",
    )
    num_rollout: int | None = flag(
        None, "number of rollouts to run; 0 with --eval-interval evaluates once", range=COUNT_OR_ZERO
    )
    num_epoch: int | None = flag(
        None, "number of passes over the prompts; used if --num-rollout is not given", range=COUNT
    )
    train_iters: int | None = flag(
        None, "number of optimizer steps of the run, in the place of --num-rollout", range=COUNT
    )
    train_samples: int | None = flag(
        None, "number of samples of the run, in the place of --num-rollout", range=COUNT
    )
    disable_rollout_global_dataset: bool = flag(
        False, "no prompt file; the rollout function supplies its own prompts"
    )
    data_source_path: str = flag(
        "slime.data.data_source.RolloutDataSourceWithBuffer", "class of the data source"
    )
    start_rollout_id: int | None = flag(
        None,
        "number of the first rollout (default: the one after the loaded checkpoint); a command that resumes "
        "from its own --save continues after its newest checkpoint",
        range=COUNT_OR_ZERO,
    )
    rollout_batch_size: int = flag(None, "number of prompts per rollout", range=COUNT)
    n_samples_per_prompt: int = flag(1, "number of responses per prompt", range=COUNT)
    global_batch_size: int = flag(
        None, "number of samples per optimizer step (default: all samples of a rollout)", range=COUNT
    )
    num_steps_per_rollout: int = flag(None, "number of optimizer steps per rollout", range=COUNT)
    variable_global_batch_size: bool = flag(
        False,
        "the last step of a rollout may have fewer samples than --global-batch-size; without the flag, samples that "
        "fill no step are an error",
    )
    global_batch_size_schedule: list[int] | None = flag(  # noqa: RUF009
        None,
        "number of samples of each optimizer step of a rollout, such as 16,8; the sum must be that of a rollout's "
        "samples",
        range=COUNT,
        commas=True,
    )
    micro_batch_size: int = flag(
        1, "number of samples per micro-batch without --use-dynamic-batch-size", range=COUNT
    )
    use_dynamic_batch_size: bool = flag(
        False, "pack samples into micro-batches of at most --max-tokens-per-gpu tokens"
    )
    max_tokens_per_gpu: int | None = flag(
        None, "maximum number of tokens of a packed micro-batch, per context parallel rank", range=COUNT
    )
    share_prompts: bool = flag(
        True,
        "compute a prompt once for all samples of a micro-batch that have it, and the common turns of a session's "
        "branches once; has no effect with --context-parallel-size above 1 or --transformer-impl transformer_engine",
    )
    balance_data: bool = flag(False, "balance the cost of micro-batches between data parallel ranks")
    balance_by_flops: bool = flag(False, "pack by estimated FLOPs; --max-tokens-per-gpu is then not a limit")
    loss_mask_type: str = flag(
        "qwen",
        "format of the chat, to find the turns that are trained",
        choices=("qwen", "qwen3", "qwen3_5", "distill_qwen", "gemma4"),
    )

    @property
    def step_sizes(self) -> list[int]:
        """Returns the number of samples per optimizer step, for a whole rollout."""
        if self.global_batch_size_schedule is not None:
            return self.global_batch_size_schedule
        left, sizes = self.rollout_batch_size * self.n_samples_per_prompt, list[int]()
        if not self.variable_global_batch_size:
            return [self.global_batch_size] * self.num_steps_per_rollout
        while left > 0:
            sizes.append(min(left, self.global_batch_size))
            left -= sizes[-1]
        return sizes

    def samples_until(self, steps: float) -> float:
        """Returns the number of samples of the first `steps` optimizer steps of a run."""
        if not self.variable_global_batch_size:
            return steps * self.global_batch_size
        sizes = self.step_sizes
        rollouts, rest = divmod(steps, len(sizes))
        whole = int(rest)
        return rollouts * sum(sizes) + sum(sizes[:whole]) + (rest - whole) * sizes[whole]
