"""The records that travel between the stages of the loop. Owns their fields and the border check."""

from __future__ import annotations

import base64
import copy
import dataclasses
import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Prompt:
    """One line of a prompt file, after the chat template.

    `text`: the text that the engine tokenises, or a list of chat messages if no template is applied. `label`: the
    reward compares the response with it. `metadata`: the line's own free-form record.
    """

    text: str | list[dict[str, Any]]
    label: Any = None
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass
class Sample:
    """One prompt and one response. Mutable: the stages of a rollout fill it in order.

    `tokens` is prompt + response, int token ids. `loss_mask` and `rollout_log_probs` have one entry per
    response token. `rollout_log_probs` are in nats, from the temperature-scaled distribution that the engine sampled
    from. `weight_versions` are the versions of the weights that produced the response, oldest first.
    `rollout_routed_experts`: the experts that the engine used for each token except the last, an unsigned integer
    array [len(tokens) - 1, layers, experts per token]; only with --use-rollout-routing-replay.
    `columns`: other values per response token, by their names in `slime.data.columns`; None for a token without one.
    Existing slime hooks read and write these field names.
    """

    class Status(enum.Enum):
        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: str | list[dict[str, Any]] = ""
    tokens: list[int] = field(default_factory=list)
    multimodal_inputs: dict[str, Any] | None = None
    multimodal_train_inputs: dict[str, Any] | None = None
    multimodal_train_input_id: str | None = None
    apply_chat_template_kwargs: dict[str, Any] | None = None
    response: str = ""
    response_length: int = 0
    label: Any = None
    reward: float | dict[str, Any] | None = None
    loss_mask: list[int] | None = None
    weight_versions: list[int] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    rollout_top_p_token_ids: list[int] | None = None
    rollout_top_p_token_offsets: list[int] | None = None
    rollout_routed_experts: np.ndarray | None = field(default=None, compare=False)
    remove_sample: bool = False
    teacher_log_probs: list[float] | None = None
    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    generate_function_path: str | None = None
    custom_rm_path: str | None = None
    train_metadata: dict[str, Any] | None = None
    session_id: str | None = None
    non_generation_time: float = 0.0
    spec_info: dict[str, int] = field(default_factory=dict)
    prefix_cache_info: dict[str, int] = field(default_factory=dict)
    columns: dict[str, list[float | None]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain values only (the status as text), so that JSON or torch can save the record."""
        out = {f.name: copy.copy(getattr(self, f.name)) for f in dataclasses.fields(self)}
        out["status"] = self.status.value
        rows = self.rollout_routed_experts
        if rows is not None:
            text = base64.b64encode(np.ascontiguousarray(rows).tobytes()).decode()
            out["rollout_routed_experts"] = {
                "dtype": rows.dtype.name,
                "shape": list(rows.shape),
                "base64": text,
            }
        return out

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Sample:
        """Inverse of `to_dict`. TypeError for a key that is not a field."""
        data = dict(data)
        if not isinstance(data.get("status", cls.Status.PENDING), cls.Status):
            data["status"] = cls.Status(data["status"])
        rows = data.get("rollout_routed_experts")
        if isinstance(rows, dict):
            flat = np.frombuffer(
                base64.b64decode(rows["base64"]), rows["dtype"]
            ).copy()  # torch needs a writable array
            data["rollout_routed_experts"] = flat.reshape(rows["shape"])
        return cls(**data)

    def get_reward_value(self, args: Any) -> float:
        """The number to train on: `reward`, or its entry `--reward-key` if the reward is a dict."""
        if isinstance(self.reward, dict):
            key = getattr(args, "reward_key", None)
            if key not in self.reward:
                raise ValueError(
                    f"--reward-key must name an entry of the reward, got {key!r}; "
                    f"sample {self.index} has {sorted(self.reward)}"
                )
            return float(self.reward[key])
        if self.reward is None:
            raise ValueError(f"reward must be set before training, got None for sample {self.index}")
        return float(self.reward)

    @property
    def effective_response_length(self) -> int:
        """Number of response tokens that are trained on."""
        return sum(self.loss_mask) if self.loss_mask is not None else self.response_length

    def append_response_tokens(
        self,
        token_ids: list[int],
        log_probs: list[float] | None = None,
        *,
        trainable: bool = True,
        text: str = "",
        columns: Mapping[str, list[float]] | None = None,
    ) -> None:
        """Append tokens of the model (`trainable`) or of a tool (not trained on, log-prob 0) to the response.

        `columns`: values of `slime.data.columns` for these tokens. A token without a value takes the column's default.
        """
        if trainable and (log_probs is None or len(log_probs) != len(token_ids)):
            got = "none" if log_probs is None else len(log_probs)
            raise ValueError(
                f"log_probs must have one entry per generated token, got {got} for {len(token_ids)} tokens"
            )
        added = columns or {}
        for name, values in added.items():
            if len(values) != len(token_ids):
                raise ValueError(
                    f"{name} must have one entry per generated token, got {len(values)} for {len(token_ids)} tokens"
                )
        for name in {**self.columns, **added}:
            before = self.columns.get(name, [None] * self.response_length)
            self.columns[name] = [*before, *added.get(name, [None] * len(token_ids))]
        if self.loss_mask is None:
            self.loss_mask = [1] * self.response_length
        if self.rollout_log_probs is None:
            self.rollout_log_probs = []
        self.tokens = self.tokens + list(token_ids)
        self.loss_mask += [int(trainable)] * len(token_ids)
        self.rollout_log_probs += list(log_probs) if trainable else [0.0] * len(token_ids)  # type: ignore[arg-type]
        self.response_length += len(token_ids)
        self.response += text

    @property
    def known_experts(self) -> int:
        """Number of tokens, from the first on, whose experts are known. The next request gets the rows after them."""
        return 0 if self.rollout_routed_experts is None else len(self.rollout_routed_experts)

    def append_routed_experts(self, rows: np.ndarray) -> None:
        """Add the experts [n, layers, k] of the tokens after the known ones."""
        before = [] if self.rollout_routed_experts is None else [self.rollout_routed_experts]
        self.rollout_routed_experts = np.concatenate([*before, rows])

    def check(self, *, require_log_probs: bool = True, require_experts: bool = False) -> None:
        """Check the sample. Runs once at the border from rollout to trainer.

        ValueError, with group and sample, if lengths disagree, a log-prob is missing or not finite, or no token is
        left to train on although `remove_sample` is not set. `require_experts`: the experts of each token except the
        last must be present. slime.data.routed_experts compares them with the model.
        """
        who = f"sample {self.index} of group {self.group_index}"
        if not 0 < self.response_length < len(self.tokens):
            raise ValueError(
                f"response_length must lie in (0, len(tokens)), got {self.response_length} "
                f"with {len(self.tokens)} tokens for {who}"
            )
        if self.loss_mask is not None:
            if len(self.loss_mask) != self.response_length:
                raise ValueError(
                    f"loss_mask must have one entry per response token, got {len(self.loss_mask)} "
                    f"for {self.response_length} tokens of {who}"
                )
            if not any(self.loss_mask) and not self.remove_sample:
                raise ValueError(
                    f"loss_mask must not be empty, got all zeros for {who}; set remove_sample to drop it"
                )
        rows = self.rollout_routed_experts
        if require_experts and (rows is None or len(rows) != len(self.tokens) - 1):
            got = "none" if rows is None else len(rows)
            raise ValueError(
                f"rollout_routed_experts must have one row per token but the last, got {got} for "
                f"{len(self.tokens)} tokens of {who}; a generate function must fill it for what it appends"
            )
        if not require_log_probs:
            return
        if self.rollout_log_probs is None or len(self.rollout_log_probs) != self.response_length:
            got = "none" if self.rollout_log_probs is None else len(self.rollout_log_probs)
            raise ValueError(
                f"rollout_log_probs must have one entry per response token, got {got} "
                f"for {self.response_length} tokens of {who}"
            )
        if not all(map(math.isfinite, self.rollout_log_probs)):
            position, value = next(
                (i, v) for i, v in enumerate(self.rollout_log_probs) if not math.isfinite(v)
            )
            raise ValueError(f"rollout_log_probs must be finite, got {value} at position {position} of {who}")


SampleGroup = list[Sample]
"""The G samples of one prompt. A plain list: existing hooks take and return `list[list[Sample]]`."""

TrainData = dict[str, Any]
"""Columns of a rollout, one entry per sample (SLIME contract 2b): tokens, response_lengths, rewards, raw_reward,
truncated, sample_indices, rollout_ids, loss_masks, rollout_mask_sums, rollout_log_probs, ... A dict: hooks
(`--custom-convert-samples-to-train-data-path`, `--custom-advantage-function-path`) read and write it."""
