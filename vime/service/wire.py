"""Reads requests into the records of `slime.protocols.tenants`, and writes results as the client reads them.

A body that no client of the protocol would send is a ValueError, whose text goes to the client.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import msgspec
import numpy

from slime.protocols.tenants import (
    TENANT_LOSSES,
    AdamParams,
    LossSpec,
    PassResult,
    SampledPrompt,
    TenantDatum,
    TenantLoss,
    TenantSampling,
)
from vime.service.messages import FLOAT32, INT64, LENGTH, MESSAGES, STOP

if TYPE_CHECKING:
    from google.protobuf.message import Message

_NO_LOGPROB = -99999.0
_DTYPES: dict[int, type[numpy.float32] | type[numpy.int64]] = {FLOAT32: numpy.float32, INT64: numpy.int64}


class PassRequest(msgspec.Struct, frozen=True):
    """A forward or a forward_backward, as read from its body."""

    model_id: str
    seq_id: int
    data: list[TenantDatum]
    loss: LossSpec
    forward_only: bool

    def count_tokens(self) -> int:
        return sum(len(datum.tokens) for datum in self.data)


class LoraBody(msgspec.Struct, frozen=True):
    rank: int
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class ModelBody(msgspec.Struct, frozen=True):
    """The body of create_model."""

    session_id: str
    model_seq_id: int
    base_model: str
    lora_config: LoraBody
    user_metadata: dict[str, object] | None = None
    optimizer_config: dict[str, object] = {}


class AdamBody(msgspec.Struct, frozen=True):
    """The optimizer's fields in the body of optim_step."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0

    def checked(self) -> AdamParams:
        """Returns the parameters. Raises ValueError for values with which Adam is not defined."""
        for name in self.__struct_fields__:
            if not math.isfinite(value := getattr(self, name)) or value < 0:
                raise ValueError(
                    f"{name} must be a finite number of at least 0, got {value}; correct AdamParams"
                )
        for name in ("beta1", "beta2"):
            if (value := getattr(self, name)) >= 1:
                raise ValueError(f"{name} must be below 1, got {value}; correct AdamParams")
        return AdamParams(**{name: getattr(self, name) for name in self.__struct_fields__})


class TextChunkBody(msgspec.Struct, frozen=True):
    type: str = "encoded_text"
    tokens: list[int] = []


class PromptBody(msgspec.Struct, frozen=True):
    chunks: list[TextChunkBody] = []


class SamplingBody(msgspec.Struct, frozen=True):
    max_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str | int] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


class SampleBody(msgspec.Struct, frozen=True):
    """The body of asample."""

    prompt: PromptBody
    sampling_params: SamplingBody
    num_samples: int = 1
    base_model: str | None = None
    model_path: str | None = None
    sampling_session_id: str | None = None
    seq_id: int | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    prompt_logprobs_last_n: int | None = None
    target_prompt_logprobs: msgspec.Raw | None = None
    prompt_alt_tokens_k: int = 0
    record_stability_info: bool | None = None

    def prompt_tokens(self) -> list[int]:
        if other := [chunk.type for chunk in self.prompt.chunks if chunk.type != "encoded_text"]:
            raise ValueError(f"a prompt must have only text, got a chunk of type {other[0]}; send tokens")
        return [token for chunk in self.prompt.chunks for token in chunk.tokens]

    def sampling(self) -> TenantSampling:
        """Returns the settings. A stop of the client replaces the model's own end of a response."""
        stop = self.sampling_params.stop
        texts = [stop] if isinstance(stop, str) else [part for part in stop or () if isinstance(part, str)]
        ids = [part for part in stop or () if isinstance(part, int)]
        return TenantSampling(
            max_tokens=self.sampling_params.max_tokens,
            temperature=self.sampling_params.temperature,
            top_p=self.sampling_params.top_p,
            top_k=self.sampling_params.top_k,
            seed=self.sampling_params.seed,
            stop=tuple(texts),
            stop_token_ids=tuple(ids),
            ignore_end=stop is not None,
        )


def check_ids(ids: Sequence[float], vocabulary: int, name: str) -> None:
    """Raises ValueError for ids that the base does not have. On a GPU, such an id would end every tenant's process."""
    if len(ids) and not (min(ids) >= 0 and max(ids) < vocabulary):
        raise ValueError(
            f"{name} must be ids of 0 to {vocabulary - 1}, got {min(ids):.0f} to {max(ids):.0f}; "
            "use the base's tokenizer"
        )


def _read_tensor(message: Message, name: str) -> tuple[list[int], list[float]]:
    """Returns (shape, values in row order) of a tensor."""
    if (dtype := _DTYPES.get(message.dtype)) is None:
        raise ValueError(f"{name} must be float32 or int64, got dtype {message.dtype}; send one of these")
    shape = list(message.shape)
    if message.HasField("sparse_csr"):
        raise ValueError(f"{name} must be dense, got a sparse tensor; send one value per token")
    values = numpy.frombuffer(message.dense, dtype)
    if not numpy.isfinite(values).all():
        raise ValueError(f"{name} must be finite, got nan or inf; correct the values")
    shape = shape or [len(values)]
    if math.prod(shape) != len(values):
        raise ValueError(
            f"{name} must have the values of its shape {shape}, got {len(values)}; send all values"
        )
    return shape, values.tolist()


def _read_datum(message: Message, number: int) -> TenantDatum:
    parts = []
    for chunk in message.model_input:
        if not chunk.HasField("encoded_text"):
            raise ValueError(f"datum {number} must have only text, got an image or audio; send tokens")
        parts.append(numpy.frombuffer(chunk.encoded_text.tokens, numpy.int32))
    tokens = numpy.concatenate(parts).tolist() if parts else []
    inputs = {}
    for entry in message.loss_fn_inputs:
        shape, values = _read_tensor(entry.value, f"{entry.key} of datum {number}")
        if len(shape) == 2 and shape[1] == 1:
            shape = shape[:1]
        if len(shape) != 1:
            raise ValueError(
                f"{entry.key} of datum {number} must have one value per token, got shape {shape}; this service has "
                "no losses with several targets per token"
            )
        inputs[entry.key] = values
    return TenantDatum(tokens, inputs)


def read_message(body: bytes) -> Message:
    """Returns the message of a body of forward_backward, with its model_id and seq_id."""
    message = MESSAGES["ForwardBackwardRequest"]()
    try:
        message.ParseFromString(body)
    except Exception as error:  # border: protobuf's DecodeError has no common base with ValueError
        raise ValueError(
            f"the body must be a ForwardBackwardRequest, got other bytes: {error}; use the client"
        ) from None
    return message


def read_pass(message: Message) -> PassRequest:
    """Returns the content of a forward_backward."""
    config = {entry.key: float(entry.value) for entry in message.numbers}
    for entry in message.loss_fn_config:
        if entry.value.HasField("text"):
            raise ValueError(f"loss_fn_config must have numbers, got a text for {entry.key}; leave it out")
        config[entry.key] = entry.value.number
    if message.loss_fn not in TENANT_LOSSES:
        raise ValueError(
            f"loss_fn must be one of {', '.join(TENANT_LOSSES)}, got {message.loss_fn[:40]}; choose one"
        )
    data = [_read_datum(datum, number) for number, datum in enumerate(message.data)]
    if not data:
        raise ValueError("data must have at least one datum, got none; send one")
    loss = LossSpec(cast(TenantLoss, message.loss_fn), config)
    return PassRequest(message.model_id, message.seq_id, data, loss, message.forward_only)


def write_pass(result: PassResult) -> bytes:
    """Returns the bytes of a ForwardBackwardOutput, with a float32 value per token."""
    message = MESSAGES["ForwardBackwardOutput"](loss_fn_output_type="ArrayRecord")
    record = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(result.outputs))
    for name in result.outputs[0] if result.outputs else ():
        arrays = [numpy.asarray(output[name], numpy.float32) for output in result.outputs]
        offsets = numpy.cumsum([0, *(array.nbytes for array in arrays)], dtype=numpy.int64)
        field = record.fields.add(key=name)
        field.value.data = b"".join(array.tobytes() for array in arrays)
        field.value.offsets, field.value.dtype = offsets.tobytes(), FLOAT32
    for key, value in result.metrics.items():
        message.metrics.add(key=key, value=value)
    return cast(bytes, message.SerializeToString())


def _write_top(message: Message, rows: Sequence[list[tuple[int, float]] | None], width: int) -> None:
    """Writes a matrix with `width` columns. Missing entries have the id 0 and the log-prob _NO_LOGPROB."""
    ids = numpy.zeros((len(rows), width), numpy.int32)
    logprobs = numpy.full((len(rows), width), _NO_LOGPROB, numpy.float32)
    for row, entries in enumerate(rows):
        for column, (token, logprob) in enumerate((entries or [])[:width]):
            ids[row, column], logprobs[row, column] = token, logprob
    message.token_ids, message.logprobs = ids.tobytes(), logprobs.tobytes()
    message.k, message.length = width, len(rows)


def write_samples(result: SampledPrompt, body: SampleBody) -> bytes:
    """Returns the bytes of a SampleResponse."""
    message = MESSAGES["SampleResponse"]()
    for sequence in result.sequences:
        added = message.sequences.add(stop_reason=LENGTH if sequence.stop_reason == "length" else STOP)
        added.tokens = numpy.asarray(sequence.tokens, numpy.int32).tobytes()
        added.logprobs = numpy.asarray(sequence.logprobs, numpy.float32).tobytes()
        if body.topk_sample_logprobs and sequence.top is not None:
            _write_top(added.topk_sampled_logprobs, sequence.top, body.topk_sample_logprobs)
    if body.prompt_logprobs and result.prompt_logprobs is not None:
        values = numpy.asarray(
            [numpy.nan if value is None else value for value in result.prompt_logprobs], numpy.float32
        )
        if body.prompt_logprobs_last_n:
            values[: -body.prompt_logprobs_last_n] = numpy.nan
        message.prompt_logprobs = values.tobytes()
    if body.topk_prompt_logprobs and result.prompt_top is not None:
        _write_top(message.topk_prompt_logprobs, result.prompt_top, body.topk_prompt_logprobs)
    return cast(bytes, message.SerializeToString())
