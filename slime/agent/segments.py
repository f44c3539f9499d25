"""Token records of an agent's turns, and the samples that plug-ins make from them. `slime.agent.trajectory` exports
the names."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

from slime.data.agents.blank_sample import blank
from slime.types import Metadata, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class TurnRecord:
    """The tokens of a request and its answer.

    `replay` must be None: a session keeps the experts and the kept token sets of an answer in its samples.
    """

    prompt_ids: list[int]
    output_ids: list[int]
    finish_reason: str
    output_log_probs: list[float] = field(default_factory=list)
    """One entry per token of `output_ids`. Without them, the samples have no log-probs."""
    ill_formed: bool = False
    """True if the answer has a tool call whose arguments are no JSON object."""
    replay: Metadata | None = None

    def __post_init__(self) -> None:
        if self.replay is not None:
            raise ValueError(
                f"replay must be None, got {sorted(self.replay)}; take an adapter's samples, which have these values"
            )
        if self.output_log_probs and len(self.output_log_probs) != len(self.output_ids):
            raise ValueError(
                f"output_log_probs must have one entry per token of output_ids, got {len(self.output_log_probs)} for "
                f"{len(self.output_ids)} tokens; take both from the engine's answer"
            )


@dataclass(frozen=True)
class TurnSegment:
    """Turns that become one segment, with metadata for it."""

    turns: list[TurnRecord]
    metadata: Metadata = field(default_factory=dict)


@dataclass(frozen=True)
class TokenSegment:
    """A prompt and a response. `loss_mask` and `rollout_log_probs` have one entry per token of `response_ids`.
    `rollout_log_probs` is empty if they are unknown."""

    prompt_ids: list[int]
    response_ids: list[int]
    loss_mask: list[int]
    rollout_log_probs: list[float] = field(default_factory=list)
    metadata: Metadata = field(default_factory=dict)
    session_sample: Sample | None = field(default=None, repr=False, compare=False)
    """The sample of a session from which the segment was made. It has values that a segment lacks, such as weight
    versions."""

    @classmethod
    def from_sample(cls, sample: Sample) -> TokenSegment:
        """Returns the segment of a sample that a session has filled."""
        start = len(sample.tokens) - sample.response_length
        mask = sample.loss_mask or [1] * sample.response_length
        log_probs = sample.rollout_log_probs or []
        prompt, response = sample.tokens[:start], sample.tokens[start:]
        return cls(prompt, response, list(mask), list(log_probs), dict(sample.metadata), sample)


class TokenRow:
    """Turns whose prompts continue each other, as one row of tokens."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.loss_mask: list[int] = []
        self.log_probs: list[float] = []
        self.prompt_length = 0
        self._has_log_probs = True
        self._answers: list[tuple[int, int]] = []
        # the positions at which each answer begins and ends

    @property
    def last_answer(self) -> int:
        """Returns the index at which the newest answer begins."""
        return self._answers[-1][0]

    def shared(self, prompt_ids: Sequence[int]) -> int:
        """Returns the number of leading tokens that the row and the prompt share."""
        pairs = zip(self.tokens, prompt_ids, strict=False)
        different = (i for i, (ours, theirs) in enumerate(pairs) if ours != theirs)
        return next(different, min(len(self.tokens), len(prompt_ids)))

    def add(self, turn: TurnRecord, *, trained: bool = True) -> None:
        """Adds a turn. Tokens of the row that its prompt does not repeat are removed. An answer that is removed in part
        is not trained on."""
        kept = self.shared(turn.prompt_ids)
        while self._answers and self._answers[-1][0] > kept:
            self._answers.pop()
        if self._answers and self._answers[-1][1] > kept:
            start, _ = self._answers[-1]
            self.loss_mask[start:], self.log_probs[start:] = [0] * (kept - start), [0.0] * (kept - start)
        for values in (self.tokens, self.loss_mask, self.log_probs):
            del values[kept:]
        if not self._answers:
            self.prompt_length = len(turn.prompt_ids)
        self._extend(turn.prompt_ids[kept:], None)
        self._answers.append((len(self.tokens), len(self.tokens) + len(turn.output_ids)))
        log_probs = turn.output_log_probs or [0.0] * len(turn.output_ids)
        self._has_log_probs &= not trained or len(turn.output_log_probs) == len(turn.output_ids)
        self._extend(turn.output_ids, log_probs if trained else None)

    def _extend(self, ids: Sequence[int], log_probs: Sequence[float] | None) -> None:
        self.tokens += ids
        self.loss_mask += [int(log_probs is not None)] * len(ids)
        self.log_probs += [0.0] * len(ids) if log_probs is None else log_probs

    def segment(self, metadata: Metadata, most_tokens: int = 0) -> TokenSegment:
        """Returns the row as a segment, cut to `most_tokens` tokens if that is not 0."""
        start, end = self.prompt_length, most_tokens or len(self.tokens)
        mask = self.loss_mask[start:end]
        log_probs = self.log_probs[start:end] if self._has_log_probs else []
        return TokenSegment(self.tokens[:start], self.tokens[start:end], mask, log_probs, dict(metadata))


def make_turn_segment(
    turns: Iterable[TurnRecord], *, kind: str = "", metadata: Metadata | None = None
) -> TurnSegment:
    """Returns the turns with their metadata: `segment_kind` if `kind` is not None, and the last `finish_reason`."""
    turns = list(turns)
    added: Metadata = {"segment_kind": kind} if kind else {}
    added["finish_reason"] = turns[-1].finish_reason if turns else ""
    return TurnSegment(turns, {**added, **(metadata or {})})


def merge_turns(turns: Sequence[TurnRecord], *, metadata: Metadata | None = None) -> TokenSegment | None:
    """Returns the turns as one segment, or None without a turn.

    Each prompt should repeat the tokens before it. Tokens that a later prompt does not repeat are removed. An answer
    that is removed in part is not trained on. A prompt that differs within the first prompt starts the segment anew.
    """
    row = TokenRow()
    for turn in turns:
        if row.tokens and row.shared(turn.prompt_ids) < row.prompt_length:
            row = TokenRow()
        row.add(turn)
    return row.segment(metadata or {}) if turns else None


def merge_turn_segments(segments: Iterable[TurnSegment]) -> list[TokenSegment]:
    """Returns the merged segments that have a response."""
    merged = [merge_turns(segment.turns, metadata=segment.metadata) for segment in segments]
    return [segment for segment in merged if segment is not None and segment.response_ids]


def write_segment_to_sample(
    sample: Sample, segment: TokenSegment, reward: float, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Fills the sample with the tokens of the segment, their text, and the reward."""
    made = segment.session_sample or build_sample(segment, sample)
    for name in _GENERATED:
        setattr(sample, name, getattr(made, name))
    sample.response = str(tokenizer.decode(segment.response_ids, skip_special_tokens=False))
    sample.reward = float(reward)


_FACTS = {"group_index", "index", "rollout_id", "prompt", "label", "metadata", "session_id", "custom_rm_path"}
_FACTS |= {
    "generate_function_path",
    "train_metadata",
    "apply_chat_template_kwargs",
    "non_generation_time",
    "reward",
}
_GENERATED = [one.name for one in fields(Sample) if one.name not in _FACTS]
"""The fields of a sample that an answer of the model fills."""


def fan_out_sample_segments(
    sample: Sample,
    segments: Sequence[TokenSegment],
    reward: float,
    tokenizer: PreTrainedTokenizerBase,
    *,
    metadata: Metadata | None = None,
    rollout_id: int | None = None,
) -> list[Sample]:
    """Returns one sample per segment. The first is `sample` itself.

    The samples are siblings: they share `rollout_id`, so together they have the weight of one sample in the loss. Each
    gets the whole `reward`, because a group compares the rewards of trajectories. `metadata` of a sample has
    `segment_idx` and `num_segments`.
    """
    own = sample.index if sample.rollout_id is None else sample.rollout_id
    base = {**(sample.metadata or {}), **(metadata or {})}
    made = []
    for number, segment in enumerate(segments):
        sibling = copy.copy(sample) if number else sample
        write_segment_to_sample(sibling, segment, reward, tokenizer)
        sibling.rollout_id = own if rollout_id is None else rollout_id
        counts = {"segment_idx": number, "num_segments": len(segments)}
        sibling.metadata = {**base, **segment.metadata, **counts}
        made.append(sibling)
    return made


def build_sample(segment: TokenSegment, original: Sample) -> Sample:
    """Returns a new sample with the facts of `original`, and the tokens and the metadata of the segment."""
    sample = blank(original)
    sample.tokens = [*segment.prompt_ids, *segment.response_ids]
    sample.response_length = len(segment.response_ids)
    sample.loss_mask = list(segment.loss_mask)
    sample.rollout_log_probs = list(segment.rollout_log_probs) or None
    sample.rollout_id = original.index if original.rollout_id is None else original.rollout_id
    sample.metadata = {**sample.metadata, **segment.metadata}
    truncated = segment.metadata.get("truncated") or segment.metadata.get("finish_reason") == "length"
    sample.status = Sample.Status.TRUNCATED if truncated else Sample.Status.COMPLETED
    return sample
