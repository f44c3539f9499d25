"""Defines the messages between the client and an engine for a group of samples: one request, then one frame per
finished sample. If streaming is requested, frames with a sample's new tokens come before its last frame.

The request is a /v1/completions body, which vllm-router balances, with the field `SAMPLES`. This field is a
`GroupParams` record with vLLM's sampling parameters: those that all samples share, and those of each sample (`seed`,
`max_tokens`). The answer is a stream of frames in the order in which samples finish. A frame is `MARK`, 4 bytes with
the length, little-endian, then a `SampleAnswer` in msgpack, in which token ids and log-probs are the bytes of arrays. A
frame of length 0 means that the server still processes the request.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np

from slime.protocols import Arrays

SAMPLES = "vime_samples"
ADAPTER_FIELD = "vime_adapter"
"""Shared parameter: name of the adapter that answers. Without this parameter, the base model answers."""
COLUMNS_FIELD = "vime_columns"
"""Shared parameter: maps the names of the engine columns that the answers must hold to their arguments
(`slime.protocols.RolloutEngine.generate`)."""
SCORE_FIELD = "vime_score_from"
"""Shared parameter of a request for log-probs of the prompt: the first position."""
STREAM_FIELD = "vime_stream"
"""Shared parameter: true if frames with tokens come before a sample is finished."""
TRANSFER_FIELD = "vime_transfer"
"""Shared parameter of a request whose prompt another engine takes: vLLM's `kv_transfer_params`."""
PARTS_FIELD = "vime_parts_s"
"""Shared parameter: seconds between two frames with the new tokens of a sample that is not finished. Such a frame has
the versions and the columns of its tokens, which the frames of STREAM_FIELD lack."""
MARK = b"vime"
"""First bytes of a frame. The router labels every stream text/event-stream, so the content type cannot identify a
frame."""
_HEAD_BYTES = len(MARK) + 4
ALIVE = MARK + bytes(4)
"""Frame that a server sends every `ALIVE_S` seconds until all samples are finished."""
ALIVE_S = 5.0
SILENT_S = 30.0
"""Seconds without a frame after which the answer counts as lost. The client then repeats the request."""


class GroupParams(msgspec.Struct):
    shared: dict[str, object]
    each: list[dict[str, object]]


class Array(msgspec.Struct, array_like=True):
    """An array: NumPy's name of its dtype, its shape, and its bytes in C order."""

    dtype: str
    shape: list[int]
    data: bytes


def packed(arrays: Arrays) -> list[Array]:
    """Returns the arrays of a column for the wire."""
    return [Array(str(each.dtype), list(each.shape), each.tobytes()) for each in arrays]


def unpacked(arrays: list[Array]) -> Arrays:
    """Returns the arrays from before `packed`. Raises ValueError for bytes that do not fit the shape."""
    return tuple(np.frombuffer(each.data, np.dtype(each.dtype)).reshape(each.shape) for each in arrays)


class SampleAnswer(msgspec.Struct, array_like=True):
    """One finished sample. With `more`, the tokens of a sample since its last frame.

    `place`: index of the sample in the request. `token_ids`: int32, `log_probs`: float32 nats.

    `error` is set if the engine refuses the sample; every other field is then empty. `columns`: the engine columns of
    the sample by their names. In an answer to a request with SCORE_FIELD, `log_probs` are those of the prompt.
    `preemptions`: number of preemptions of the request, if the engine counts them. `speculation`: numbers of model
    passes, drafted tokens and accepted tokens, if the engine counts them.
    `cache_ages`: see `slime.protocols.GenerateResult`. `transfer`: the engine's answer to TRANSFER_FIELD.
    """

    place: int
    token_ids: bytes = b""
    log_probs: bytes = b""
    text: str = ""
    finish_reason: str | None = None
    weight_versions: list[int] = []
    prompt_tokens: int = 0
    cached_tokens: int = 0
    queue_s: float | None = None
    decode_tokens_per_s: float | None = None
    speculation: tuple[int, int, int] | None = None
    error: str | None = None
    preemptions: int = 0
    columns: dict[str, list[Array]] = {}
    more: bool = False
    cache_ages: tuple[int, int] = (0, 0)
    transfer: dict[str, object] | None = None


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(SampleAnswer)


def frame(answer: SampleAnswer) -> bytes:
    body = _encoder.encode(answer)
    return MARK + len(body).to_bytes(4, "little") + body


class Frames:
    """Decodes answers from a stream of bytes that arrive in pieces of any size."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, piece: bytes) -> Iterator[SampleAnswer]:
        """Yields the answers that are complete now. Raises msgspec.DecodeError for bytes that are not a frame."""
        self._buffer += piece
        while len(self._buffer) >= _HEAD_BYTES:
            if not self._buffer.startswith(MARK):
                raise msgspec.DecodeError(
                    f"a frame must begin with {MARK!r}, got {bytes(self._buffer[:200])!r}"
                )
            end = _HEAD_BYTES + int.from_bytes(self._buffer[len(MARK) : _HEAD_BYTES], "little")
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_HEAD_BYTES:end])
            del self._buffer[:end]
            if body:
                yield _decoder.decode(body)
