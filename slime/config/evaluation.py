"""Flags of the evaluation section. What is left out takes its training counterpart (see resolve.py)."""

from __future__ import annotations

from dataclasses import dataclass

from slime.config.fields import flag


@dataclass(frozen=True)
class EvaluationConfig:
    """Evaluation at intervals, over several datasets, each of which may override these in --eval-config."""

    eval_interval: int | None = flag(None, "evaluate after every so many rollouts")
    eval_prompt_data: list[str] | None = flag(None, "name path [name path ...]")  # noqa: RUF009
    eval_config: str | None = flag(None, "YAML file that lists datasets, each with its own settings")
    eval_function_path: str | None = flag(None, "rollout function of evaluation (default: the training one)")
    skip_eval_before_train: bool = flag(False, "no evaluation before the first step")
    eval_input_key: str | None = flag(None, "column of the prompt (default: --input-key)")
    eval_label_key: str | None = flag(None, "column of the label (default: --label-key)")
    eval_tool_key: str | None = flag(None, "column of the tools (default: --tool-key)")
    n_samples_per_eval_prompt: int = flag(1, "responses of an evaluation prompt")
    eval_temperature: float | None = flag(
        None, "sampling temperature, 0 is greedy (default: --rollout-temperature)"
    )
    eval_top_p: float | None = flag(None, "nucleus sampling (default: --rollout-top-p)")
    eval_top_k: int | None = flag(None, "top-k sampling (default: --rollout-top-k)")
    eval_max_response_len: int | None = flag(
        None, "most tokens of a response (default: --rollout-max-response-len)"
    )
    eval_max_prompt_len: int | None = flag(
        None, "longer prompts are dropped (default: --rollout-max-prompt-len)"
    )
    eval_min_new_tokens: int | None = flag(None, "fewest tokens of a response")
    eval_max_context_len: int | None = flag(None, "prompt and response (default: --rollout-max-context-len)")
