"""Flags of the evaluation section. A flag that is not given has the value of its training flag (see resolve.py)."""

from __future__ import annotations

from dataclasses import dataclass

from slime.config.fields import flag
from slime.config.ranges import COUNT, COUNT_OR_ZERO, FRACTION, TEMPERATURE_OR_GREEDY, TOP_K


@dataclass(frozen=True)
class EvaluationConfig:
    """Evaluation at intervals over several datasets. Each dataset may override these flags in --eval-config."""

    eval_interval: int | None = flag(None, "number of rollouts between two evaluations", range=COUNT)
    eval_prompt_data: list[str] | None = flag(  # noqa: RUF009
        None,
        "datasets for evaluation: name path [name path ...]; held-out sets for SFT, pairs and reward models",
    )
    eval_config: str | None = flag(None, "YAML file with datasets for evaluation, each with its own settings")
    eval_function_path: str = flag(None, "rollout function for evaluation (default: the one for training)")
    skip_eval_before_train: bool = flag(False, "do not evaluate before the first step")
    eval_input_key: str = flag(None, "column of the prompt (default: --input-key)")
    eval_label_key: str | None = flag(None, "column of the label (default: --label-key)")
    eval_tool_key: str = flag(None, "column of the tools (default: --tool-key)")
    n_samples_per_eval_prompt: int = flag(1, "number of responses per evaluation prompt", range=COUNT)
    eval_temperature: float = flag(
        None,
        "sampling temperature; 0 is greedy (default: --rollout-temperature)",
        range=TEMPERATURE_OR_GREEDY,
    )
    eval_top_p: float = flag(None, "nucleus sampling (default: --rollout-top-p)", range=FRACTION)
    eval_top_k: int = flag(None, "top-k sampling (default: --rollout-top-k)", range=TOP_K)
    eval_max_response_len: int | None = flag(
        None, "maximum number of tokens of a response (default: --rollout-max-response-len)", range=COUNT
    )
    eval_max_prompt_len: int | None = flag(
        None, "maximum number of tokens of a prompt (default: --rollout-max-prompt-len)", range=COUNT
    )
    eval_min_new_tokens: int | None = flag(
        None, "minimum number of tokens of a response", range=COUNT_OR_ZERO
    )
    eval_max_context_len: int | None = flag(
        None,
        "maximum number of tokens of prompt and response together (default: --rollout-max-context-len)",
        range=COUNT,
    )
