"""This module defines the records that the stages of the loop exchange. It owns their fields and their check."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast

import numpy as np

from slime.records.counts import CacheCounts, SpeculationCounts
from slime.records.plain import as_array, as_plain, extended, grown, read_experts, read_numbers
from slime.vision.inputs import TrainInputs
from slime.vision.plain import media_as_plain, media_from_plain

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
"""A value of a JSON text."""

Message: TypeAlias = dict[str, Any]
"""A chat message: role, content, and other keys that the model's chat template reads."""

Tools: TypeAlias = list[Any]
"""Descriptions of tools in the form that the model's chat template accepts."""

Metadata: TypeAlias = dict[str, Any]
"""A free-form record of a line of a prompt file, which rewards and hooks read and write. JSON values."""

SamplingParams: TypeAlias = dict[str, Any]
"""Sampling parameters under slime's names (`slime.rollout.sampling.RULES`)."""

Reward: TypeAlias = float | dict[str, Any]
"""The result of a reward: a number, or a record with a number under --reward-key."""

MetaInfo: TypeAlias = Mapping[str, Any]
"""The `meta_info` of an engine's answer: finish reason, weight version, counts."""


@dataclass(frozen=True)
class Prompt:
    """A line of a prompt file, after the chat template.

    Example::

        prompt = Prompt("2 + 2 =", label="4", metadata={"rm_type": "math"})
    """

    text: str | list[Message]
    """The text that the engine tokenises, or a list of chat messages if no template is applied."""
    label: object = None
    """The value with which the reward compares the response."""
    metadata: Metadata = field(default_factory=dict)
    """The free-form record of the line."""
    images: tuple[object, ...] = ()
    """The images, in the order of their markers in the text (`slime.vision.images.PromptImage`)."""
    videos: tuple[object, ...] = ()
    """The videos: paths, or lists of frames."""

    def multimodal_inputs(self) -> dict[str, object] | None:
        """Returns a new `Sample.multimodal_inputs`, or None for a prompt of text."""
        if not self.images and not self.videos:
            return None
        return {"images": list(self.images) or None, "videos": list(self.videos) or None}


@dataclass
class Sample:
    """A prompt and a response. The record is mutable: the stages of a rollout fill its fields in order.

    Existing slime hooks read and write these field names. `to_dict` and `from_dict` keep an attribute that a hook adds;
    its value must be plain to be saved.

    Example::

        sample = Sample(index=0, group_index=0, prompt="2 + 2 =", tokens=[17, 10, 17, 28])
        sample.append_response_tokens(tokens=[19], log_probs=[-0.1], text=" 4")
        sample.check()
    """

    SpecInfo = SpeculationCounts
    PrefixCacheInfo = CacheCounts

    class Status(enum.Enum):
        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: str | list[Message] = ""
    tokens: list[int] = field(default_factory=list)
    """Token ids of the prompt and the response."""
    multimodal_inputs: dict[str, object] | None = None
    """Images and videos of the prompt under the names of a processor's arguments. None for a prompt of text."""
    multimodal_train_inputs: TrainInputs | None = None
    """The processed images: references to files, or a plug-in's tensors by name."""
    multimodal_train_input_id: str | None = None
    apply_chat_template_kwargs: dict[str, object] | None = None
    """Arguments of the chat template that renders, or has rendered, the prompt. None for a raw text."""
    response: str = ""
    response_length: int = 0
    label: object = None
    reward: Reward | None = None
    loss_mask: list[int] | None = None
    """One entry per response token."""
    weight_versions: list[int] = field(default_factory=list)
    """Versions of the weights that generated the response, oldest first."""
    rollout_log_probs: list[float] | None = None
    """Log-probs in nats, one per response token, under the temperature-scaled distribution of the engine."""
    rollout_top_p_token_ids: list[int] | None = None
    rollout_top_p_token_offsets: list[int] | None = None
    rollout_topk_token_ids: np.ndarray | None = field(default=None, compare=False)
    rollout_topk_log_probs: np.ndarray | None = field(default=None, compare=False)  # data.top_tokens
    rollout_routed_experts: np.ndarray | None = field(default=None, compare=False)
    """The experts that the engine used for each token except the last, an unsigned integer array [len(tokens) - 1,
    layers, experts per token]. Only with --use-rollout-routing-replay."""
    remove_sample: bool = False
    teacher_log_probs: list[float] | None = None
    teacher_top: tuple[np.ndarray, np.ndarray] | None = field(default=None, compare=False)
    status: Status = Status.PENDING
    metadata: Metadata = field(default_factory=dict)
    generate_function_path: str | None = None
    custom_rm_path: str | None = None
    train_metadata: Metadata | None = None
    session_id: str | None = None
    non_generation_time: float = 0.0
    spec_info: SpeculationCounts = field(default_factory=SpeculationCounts)
    prefix_cache_info: CacheCounts = field(default_factory=CacheCounts)
    columns: dict[str, list[float | None]] = field(default_factory=dict)
    """Other values per response token, by their names in `slime.data.columns`. None for a token without a value."""

    def to_dict(self) -> dict[str, object]:
        """Returns plain values only (the status as text), so that JSON or torch can save the record. The result
        includes attributes that are not fields."""
        out = {name: as_plain(value) for name, value in vars(self).items()}
        out |= {name: media_as_plain(out[name]) for name in _MEDIA if out[name]}
        out["status"] = self.status.value
        out |= {name: getattr(self, name).to_dict() for name in _COUNTS}
        return out

    @classmethod
    def from_dict(cls, data: Metadata) -> Sample:
        """Inverts `to_dict`. A key that is not a field becomes an attribute."""
        data = {name: as_array(value) for name, value in data.items()}
        data |= {name: media_from_plain(data[name]) for name in _MEDIA if data.get(name)}
        if not isinstance(data.get("status", cls.Status.PENDING), cls.Status):
            data["status"] = cls.Status(data["status"])
        for name, record in _COUNTS.items():
            if isinstance(data.get(name), Mapping):
                data[name] = record.from_dict(data[name])
        fields = {f.name for f in dataclasses.fields(cls)}
        sample = cls(**{name: value for name, value in data.items() if name in fields})
        vars(sample).update({name: value for name, value in data.items() if name not in fields})
        return sample

    def get_reward_value(self, args: object) -> float:
        """Returns `reward_value` with the --reward-key of a hook's `args`. Without a key, returns a dict unchanged."""
        key = getattr(args, "reward_key", None)
        return (
            cast("float", self.reward)
            if isinstance(self.reward, dict) and not key
            else self.reward_value(key)
        )

    def reward_value(self, key: str | None) -> float:
        """Returns the number to train on: `reward`, or its entry `key` if the reward is a dict."""
        if isinstance(self.reward, dict):
            if key not in self.reward:
                raise ValueError(
                    f"--reward-key must name an entry of the reward, got {key!r}; "
                    f"sample {self.index} has {sorted(map(str, self.reward))}{_key_to_give(self.reward)}"
                )
            return float(self.reward[key])
        if self.reward is None:
            raise ValueError(f"reward must be set before training, got None for sample {self.index}")
        return float(self.reward)

    @property
    def effective_response_length(self) -> int:
        """Returns the number of response tokens that are trained on."""
        return sum(self.loss_mask) if self.loss_mask is not None else self.response_length

    def append_response_tokens(
        self,
        args: object = None,
        *,
        tokens: Iterable[int] | None = None,
        log_probs: Iterable[float] | None = None,
        trainable: bool = True,
        meta_info: MetaInfo | None = None,
        text: str | None = None,
        update_terminal_info: bool = True,
        columns: Mapping[str, list[float]] | None = None,
    ) -> None:
        """Appends tokens of the model (`trainable`) or of a tool (not trained on, log-prob 0) to the response.

        `tokens`, `loss_mask`, `rollout_log_probs` and `columns` grow in place, because plug-ins hold these lists; a
        list from an earlier response is replaced. Lists, arrays and tensors are accepted. `meta_info` of the engine's
        answer may contain the experts of the tokens. It is passed to `update_from_meta_info` unless
        `update_terminal_info` is False. `columns` are values of `slime.data.columns` for these tokens; a token without
        a value takes the column's default. Raises ValueError if lengths disagree, before anything has changed.
        """
        ids = [int(token) for token in read_numbers(tokens)]
        values = None if log_probs is None else [float(value) for value in read_numbers(log_probs)]
        self._check_appended(ids, values, trainable, columns or {})
        before, experts = self.response_length, None
        if ids and meta_info is not None:
            shape = getattr(args, "num_layers", None), getattr(args, "moe_router_topk", None)
            experts = read_experts(meta_info, len(self.tokens) + len(ids), *shape)
        if ids:
            self.columns = self.columns if before else {}
            for name in {**self.columns, **(columns or {})}:
                new: list[float | None] = [*(columns or {}).get(name, [None] * len(ids))]
                self.columns[name] = extended(self.columns.get(name), before, None, new)
            self.loss_mask = extended(self.loss_mask, before, 1, [int(trainable)] * len(ids))
            self.tokens = grown(self.tokens, ids)
            self.response_length += len(ids)
            if ends := self.rollout_top_p_token_offsets:
                self.rollout_top_p_token_offsets = grown(ends, [ends[-1]] * len(ids))
        if ids or values is not None:
            added = (values or []) if trainable else [0.0] * len(ids)
            self.rollout_log_probs = extended(self.rollout_log_probs, before, 0.0, added)
        self.response += text or ""
        if experts is not None:
            start, rows = experts
            known = [] if not start else [np.asarray(self.rollout_routed_experts)[:start]]
            self.rollout_routed_experts = np.concatenate([*known, rows])
        if meta_info is not None and update_terminal_info:
            self.update_from_meta_info(args, meta_info)

    def _check_appended(
        self,
        ids: list[int],
        log_probs: list[float] | None,
        trainable: bool,
        columns: Mapping[str, list[float]],
    ) -> None:
        """Raises ValueError unless new values have one entry per new token, and old values have one entry per old
        token."""
        per_token: dict[str, list[float] | list[int] | None] = dict(columns)
        if trainable:
            per_token["log_probs"] = log_probs if log_probs is not None else [] if not ids else None
        elif log_probs is not None and (any(log_probs) or len(log_probs) != len(ids)):
            raise ValueError(
                f"log_probs must be left out or 0 for tokens that the model did not generate, got {len(log_probs)}; "
                "their loss mask is 0"
            )
        for name, values in per_token.items():
            if values is None or len(values) != len(ids):
                got = "none" if values is None else len(values)
                raise ValueError(
                    f"{name} must have one entry per generated token, got {got} for {len(ids)} tokens"
                )
        for name in ("loss_mask", "rollout_log_probs"):
            values = getattr(self, name)
            if self.response_length and values is not None and len(values) != self.response_length:
                raise ValueError(
                    f"{name} must have one entry per response token, got {len(values)} for {self.response_length} "
                    f"tokens of sample {self.index} of group {self.group_index}; to start a sample again, set "
                    "response_length to 0 as well"
                )
        if trainable and ids and self.response_length and self.rollout_log_probs is None:
            raise ValueError(
                f"rollout_log_probs must be set before more generated tokens, got none for {self.response_length} "
                f"response tokens of sample {self.index} of group {self.group_index}; append these tokens with "
                "their log-probs, or with trainable=False"
            )

    def update_from_meta_info(self, args: object, meta_info: MetaInfo) -> None:
        """Sets status, weight version and counts from the `meta_info` of an engine's answer.

        Each answer adds its weight version. A finish reason other than stop, length and abort does not change the
        status. Without "finish_reason" the answer is not the end of a request, and nothing changes. `args` is not read.
        """
        if (reason := meta_info.get("finish_reason")) is None:
            return
        kind = reason.get("type") if isinstance(reason, Mapping) else reason
        self.spec_info.add(meta_info)
        self.prefix_cache_info.add(meta_info)
        if (version := meta_info.get("weight_version")) is not None:
            self.weight_versions.append(int(version) if str(version).isdecimal() else version)
        self.status = FINISH_STATUS.get(str(kind), self.status)

    def add_weight_version(self, version: int) -> None:
        """Records the version of the weights that generated tokens, once per change."""
        if not self.weight_versions or self.weight_versions[-1] != version:
            self.weight_versions.append(version)

    @property
    def known_experts(self) -> int:
        """Returns the number of leading tokens whose experts are known. The next request asks for the rows after these
        tokens."""
        return 0 if self.rollout_routed_experts is None else len(self.rollout_routed_experts)

    def append_routed_experts(self, rows: np.ndarray) -> None:
        """Adds the experts [n, layers, k] of the tokens after the known tokens."""
        before = [] if self.rollout_routed_experts is None else [self.rollout_routed_experts]
        self.rollout_routed_experts = np.concatenate([*before, rows])

    def check(self, *, require_log_probs: bool = True, require_experts: bool = False) -> None:
        """Checks the sample. This runs once, before samples are passed from the rollout to the trainer.

        Raises ValueError, with group and sample, if lengths disagree, a log-prob is missing or not finite, or no token
        is trained on although `remove_sample` is not set. With `require_experts`, the experts of each token except the
        last must be present. slime.data.routed_experts compares the experts with the model.
        """
        who = f"sample {self.index} of group {self.group_index}"
        if not 0 < self.response_length < len(self.tokens):
            raise ValueError(
                f"response_length must lie in (0, len(tokens)), got {self.response_length} with {len(self.tokens)} "
                f"tokens for {who}; a generate function must fill sample.tokens with the ids of the prompt and the "
                "response, and sample.response_length with the number of ids of the response"
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
                f"for {self.response_length} tokens of {who}; take them from the engine's answer"
            )
        if not all(map(math.isfinite, self.rollout_log_probs)):
            position = next(i for i, v in enumerate(self.rollout_log_probs) if not math.isfinite(v))
            value = self.rollout_log_probs[position]
            raise ValueError(f"rollout_log_probs must be finite, got {value} at position {position} of {who}")


def _key_to_give(reward: Mapping[str, object]) -> str:
    """Returns the remedy that names the numeric entry of a reward record: score, or the first numeric entry."""
    names = sorted(str(name) for name, value in reward.items() if isinstance(value, int | float | np.number))
    best = "score" if "score" in names else next(iter(names), None)
    return "" if best is None else f": give --reward-key {best}"


_MEDIA = ("prompt", "multimodal_inputs", "multimodal_train_inputs")
"""The fields that may have images."""

_COUNTS: dict[str, type[SpeculationCounts] | type[CacheCounts]] = {
    "spec_info": SpeculationCounts,
    "prefix_cache_info": CacheCounts,
}
"""Maps the fields that are records of counts to their classes."""

FINISH_STATUS = {
    "stop": Sample.Status.COMPLETED,
    "length": Sample.Status.TRUNCATED,
    "abort": Sample.Status.ABORTED,
}
"""Maps the finish reason of the last request to the sample's status."""


SampleGroup = list[Sample]
"""The G samples of one prompt, in a plain list, because existing hooks take and return `list[list[Sample]]`.

Example::

    group: SampleGroup = [Sample(group_index=0, index=index, prompt="2 + 2 =") for index in range(8)]
"""

TrainData = dict[str, Any]
"""Columns of a rollout (`slime.data.columns`), one entry per sample. A dict: hooks read and write it."""
