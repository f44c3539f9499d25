"""The table of train data's columns: one record per column. Conversion, split, packing, trainer and loss read the
table.

Train data is a dict of lists with one entry per sample (`slime.types.TrainData`). A new column needs one record here, a
producer and a reader. Lists with one entry per optimizer step (such as `num_microbatches`) are not columns.

Shapes: sample i has R_i response tokens and L_i prompt and response tokens, and a packed micro-batch has P rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from torch import Tensor

from slime.config.schema import Config
from slime.data import kept_tokens, routed_experts, top_tokens
from slime.data.media.row import without_media
from slime.data.token_slice import TokenSlice
from slime.protocols import UNKNOWN_VERSION, VERSIONS, GenerateResult
from slime.protocols.engine_column import EngineColumn
from slime.types import Sample, SamplingParams, TrainData

Kind = Literal["response", "sequence", "ragged", "sample"]
"""The form of an entry, and the part of an entry that a context-parallel rank gets.

response: [R_i] numbers, or [R_i, K]; the response tokens that the rank predicts (`MicroBatch.local`).
sequence: [L_i] numbers; the rank's tokens (`TokenSlice.tokens`).
ragged: an array of any shape; `Column.to_rows` makes the rows of the rank.
sample: one value of any type, which every rank gets.
"""

Origin = Literal["sample", "batch", "hook", "trainer", "pass", "estimator"]
"""The producer of a column.

sample: conversion reads it from each sample. batch: conversion computes it from all samples of a rollout. hook: only a
hook fills it. trainer: the trainer fills it when it gets the data. pass: a pass of a model fills it (`slime.roles`).
estimator: the advantage estimator fills it."""

Stage = Literal["sent", "device", "scored", "advantages"]
"""The stages of a trainer rank's data (`slime.data.rank_data`)."""

STAGES: tuple[Stage, ...] = ("sent", "device", "scored", "advantages")
_STAGE_OF: dict[Origin, Stage] = {"trainer": "device", "pass": "scored", "estimator": "advantages"}

Carried = Literal["never", "training", "policy", "every"]
"""The micro-batches that carry a column: none; those of the training pass; those of the policy's passes; those of any
model's passes."""


@dataclass(frozen=True)
class Column:
    """One column of train data."""

    name: str
    kind: Kind
    origin: Origin
    dtype: type[np.generic] | None = None
    """dtype of the tensors, for kind response and sequence."""
    read: Callable[[Sample], object] | None = None
    """Returns the entry of a sample, for origin sample. None to read the engine's values with the name of the column
    (`Sample.columns`)."""
    optional: bool = False
    """True if a batch may lack the column. Then all samples have the column, or no sample has it. With a `default`, a
    part of the samples may have it. A part may also have a column of kind sample, and the others have None."""
    default: float | None = None
    """Value for the tokens without a value of the engine, if a token of the batch has one."""
    flag: str = ""
    """Field of the configuration that turns the column on, or "" for a column that is always on."""
    asked: bool = False
    """True if requests ask the engine for the column under its name. Only without `read`."""
    carried: Carried = "never"
    mean: bool = False
    """True if the trainer reports the mean as `rollout/{name}`."""
    to_tensor: Callable[[np.ndarray], Tensor] | None = None
    """Returns an entry as a host tensor, for kind ragged, and for kind response with K numbers per token."""
    to_rows: Callable[[TrainData, list[int], TokenSlice], Tensor] | None = None
    """Returns this rank's rows [P, ...] of a packed micro-batch, for kind ragged."""

    @property
    def stage(self) -> Stage:
        """Returns the stage of a trainer rank after which the column exists."""
        return _STAGE_OF.get(self.origin, "sent")

    def on(self, config: Config) -> bool:
        """Returns true if the flags turn the column on."""
        return not self.flag or bool(config.get_value(self.flag))

    def read_samples(self, samples: list[Sample]) -> list[object] | None:
        """Returns the samples' entries, or None if the column is optional and no sample has it. Raises ValueError if
        only a part of the samples has the column."""
        read = self.read or self._from_engine
        values = [read(sample) for sample in samples]
        present = sum(value is not None for value in values)
        if not self.optional or present == len(values) or (present and self.kind == "sample"):
            return values
        if present and self.default is not None:
            return [
                [self.default] * sample.response_length if value is None else value
                for sample, value in zip(samples, values, strict=True)
            ]
        if present:
            raise ValueError(
                f"{self.name} must be set on all samples or none, got {present} of {len(values)}"
            )
        return None

    def _from_engine(self, sample: Sample) -> list[float] | None:
        values = sample.columns.get(self.name)
        if values is None:
            return None
        default = self.default
        filled = values if default is None else [default if value is None else value for value in values]
        known = [value for value in filled if value is not None]
        if len(known) != sample.response_length:
            raise ValueError(
                f"{self.name} must have one value per response token, got {len(known)} for {sample.response_length} "
                f"tokens of sample {sample.index} of group {sample.group_index}; give all values to "
                "append_response_tokens, or a default to the column"
            )
        return known


def _loss_mask(sample: Sample) -> list[int]:
    if sample.remove_sample:
        return [0] * sample.response_length
    return list(sample.loss_mask or [1] * sample.response_length)


def token_versions(sample: Sample) -> list[int]:
    """Returns the version of the weights that sampled each response token, and `UNKNOWN_VERSION` for a token without a
    version. The result is empty for a sample without versions, and for a sample whose response a hook has made longer
    or shorter."""
    found = sample.columns.get(VERSIONS, [])
    if len(found) != sample.response_length:
        return []
    return [UNKNOWN_VERSION if version is None else int(version) for version in found]


def _part(read: Callable[[Sample], top_tokens.Top | None], index: int) -> Callable[[Sample], object]:
    """Returns a function that reads the ids (`index` 0) or the log-probs (`index` 1) of a sample's record."""

    def part(sample: Sample) -> object:
        found = read(sample)
        return None if found is None else found[index]

    return part


_TABLE = (
    Column("tokens", "sequence", "sample", np.int64, lambda s: s.tokens),
    Column("rewards", "sample", "batch", mean=True),
    Column("raw_reward", "sample", "batch"),
    Column("group_rewards", "sample", "batch"),  # only for an estimator that reads it
    Column(
        "truncated", "sample", "sample", read=lambda s: int(s.status is Sample.Status.TRUNCATED), mean=True
    ),
    Column("response_lengths", "sample", "sample", read=lambda s: s.response_length, mean=True),
    Column("total_lengths", "sample", "sample", read=lambda s: len(s.tokens), mean=True),
    Column("sample_indices", "sample", "sample", read=lambda s: s.index),
    Column("rollout_ids", "sample", "batch"),
    Column("rollout_mask_sums", "sample", "batch"),
    Column("prompt", "sample", "sample", read=lambda s: without_media(s.prompt)),
    Column("metadata", "sample", "sample", read=lambda s: s.metadata),
    Column(
        "multimodal_train_inputs",
        "sample",
        "sample",
        read=lambda s: s.multimodal_train_inputs,
        optional=True,
    ),
    Column("round_number", "sample", "hook"),
    Column("source_names", "sample", "hook"),
    Column("rollout_facts", "sample", "batch"),  # slime.rollout.facts adds it to every rank's data
    Column("kept", "sample", "batch"),  # --save-samples: slime.data.rank_data.mark_saved_samples adds it
    Column("loss_masks", "response", "sample", np.int32, _loss_mask, carried="training"),
    Column("loss_denominators", "response", "trainer", np.float32, carried="training"),
    Column("log_probs", "response", "pass", np.float32, mean=True),
    Column("old_log_probs", "response", "pass", np.float32, carried="training"),
    Column("ref_log_probs", "response", "pass", np.float32, carried="training", mean=True),
    Column("values", "response", "pass", np.float32, mean=True),
    Column(
        "rollout_log_probs",
        "response",
        "sample",
        np.float32,
        lambda s: s.rollout_log_probs,
        optional=True,
        carried="training",
        mean=True,
    ),
    Column(
        "teacher_log_probs",  # of a served teacher; another is a role, whose pass fills it
        "response",
        "sample",
        np.float32,
        lambda s: s.teacher_log_probs,
        optional=True,
        mean=True,
    ),
    *(
        Column(
            name,
            "response",
            "sample",
            dtype,
            _part(read, i),
            flag=flag,
            carried="training",
            optional=flag == "opd_top_k",  # of a served teacher; another is a role, whose pass fills them
            to_tensor=top_tokens.as_tensor,
        )
        for names, read, flag in (
            (top_tokens.ROLLOUT, top_tokens.read_rollout_top, "use_score_centering"),
            (top_tokens.TEACHER, top_tokens.read_teacher_top, "opd_top_k"),
        )
        for i, (name, dtype) in enumerate(zip(names, (np.int32, np.float32), strict=True))
    ),
    Column(  # 1 for the tokens of a chosen response, -1 of a rejected one
        "preference", "response", "sample", np.float32, optional=True, carried="training"
    ),
    Column(
        VERSIONS,
        "response",
        "sample",
        np.int32,
        lambda s: token_versions(s) or None,
        optional=True,
        default=UNKNOWN_VERSION,
        carried="training",
    ),
    Column("advantages", "response", "estimator", np.float32, carried="training", mean=True),
    Column("returns", "response", "estimator", np.float32, mean=True),
    Column(
        "chosen_tokens", "response", "estimator", np.float32, carried="training", mean=True
    ),  # clip_cov, kl_cov
    Column("turn_advantages", "response", "batch", np.float32),  # only for an estimator that reads it
    Column("kl", "response", "estimator", np.float32, flag="kl_coef", mean=True),  # zeros without the flag
    Column("opd_reverse_kl", "response", "estimator", np.float32, mean=True),
    Column(
        kept_tokens.COLUMN,
        "ragged",
        "sample",
        read=kept_tokens.read_sample,
        flag="replay_kept_tokens",
        carried="every",  # a KL compares log-probs over the same ids
        to_tensor=kept_tokens.as_tensor,
        to_rows=kept_tokens.packed,
    ),
    Column(
        routed_experts.COLUMN,
        "ragged",
        "sample",
        read=lambda s: s.rollout_routed_experts,
        flag="use_rollout_routing_replay",
        carried="policy",
        to_tensor=routed_experts.as_tensor,
        to_rows=routed_experts.packed,
    ),
)

COLUMNS: dict[str, Column] = {column.name: column for column in _TABLE}


ENGINE_COLUMNS: tuple[EngineColumn, ...] = (kept_tokens.ENGINE, top_tokens.ENGINE, routed_experts.ENGINE)
"""The columns of an engine's answer that a sample stores in fields. A column with one number per token is not among
them, see `Column.asked`."""


def wanted(config: Config, known: Callable[[EngineColumn], int]) -> dict[str, int]:
    """Returns the engine columns that a request asks for, with their arguments.

    `known(column)` is the number of rows that the tokens before the request have already.
    """
    found = {column.name: 1 for column in COLUMNS.values() if column.asked and column.on(config)}
    for column in ENGINE_COLUMNS:
        if argument := column.asked(config):
            found[column.name] = known(column) if column.known else argument
    return found


def check_answer(
    sample: Sample, result: GenerateResult, asked: Mapping[str, int], params: SamplingParams
) -> None:
    """Raises ValueError, with the sample's name, if an answer's columns are not those that the request asked for."""
    for column in ENGINE_COLUMNS:
        if column.name in asked:
            column.check(sample, result, asked[column.name], params)


def store(sample: Sample, result: GenerateResult, *, again: bool = False) -> None:
    """Adds an answer's columns to a sample that has its tokens already.

    `again` is true if another sample trains on these tokens.
    """
    for column in ENGINE_COLUMNS if result.token_ids else ():
        if column.name in result.columns and (column.known or not again):
            column.append(sample, result.columns[column.name])


def clear(sample: Sample) -> None:
    """Removes the engine's columns from a sample that starts again."""
    sample.columns = {}
    for column in ENGINE_COLUMNS:
        for field in column.fields:
            setattr(sample, field, None)


def read_engine_columns(data: TrainData, i: int) -> dict[str, list[float | None]]:
    """Returns `Sample.columns` of sample i: the values of the columns that an engine fills by name."""
    named = (
        c.name
        for c in present(data, "response")
        if c.origin == "sample" and (c.read is None or c.name == VERSIONS)
    )
    return {name: data[name][i].tolist() for name in named}


def present(data: TrainData, kind: Kind | None = None) -> Iterator[Column]:
    """Yields the columns that `data` has, for one kind or for every kind, in the table's order."""
    return (c for c in COLUMNS.values() if kind in (None, c.kind) and c.name in data)


def carried(data: TrainData, config: Config, *, training: bool, policy: bool) -> list[str]:
    """Returns the names of the columns of `data` that a micro-batch of this pass carries."""
    passes = ["every", *(name for name, on in (("training", training), ("policy", policy)) if on)]
    return [column.name for column in present(data) if column.carried in passes and column.on(config)]


def reported(data: TrainData, config: Config, kind: Kind) -> list[str]:
    """Returns the names of the columns of `data` with this kind whose mean the trainer reports."""
    return [column.name for column in present(data, kind) if column.mean and column.on(config)]
