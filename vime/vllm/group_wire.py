"""What travels between the client and an engine for a group of samples: one request, one frame per finished sample, and
before it, where these are asked for, frames with the sample's tokens so far.

The request is a /v1/completions body, which vllm-router balances, with the field `SAMPLES`: a `GroupParams` record with
vLLM's sampling parameters, those that all samples share and those of each sample (`seed`, `max_tokens`). The answer is
a stream of frames in the order in which samples finish: `MARK`, 4 bytes with the length, little-endian, then a
`SampleAnswer` in msgpack, in which token ids and log-probs are the bytes of arrays. A frame of length 0 says that the
server still has the request.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

SAMPLES = "vime_samples"
ADAPTER_FIELD = "vime_adapter"
"""A shared parameter: the name of the adapter that answers. Without it, the base does."""
KEPT_FIELD = "vime_kept_tokens"
"""A shared parameter: the largest set of kept ids that the answers shall hold."""
SCORE_FIELD = "vime_score_from"
"""A shared parameter of a request for log-probs of the prompt: the first place."""
TOP_FIELD = "vime_top"
"""A shared parameter: how many of the most probable tokens of each place the answers shall hold."""
STREAM_FIELD = "vime_stream"
"""A shared parameter: whether frames with tokens come before a sample is finished."""
MARK = b"vime"
"""What a frame begins with. The router calls every stream text/event-stream, so the content type tells nothing."""
_HEAD_BYTES = len(MARK) + 4
ALIVE = MARK + bytes(4)
"""The frame that a server sends every `ALIVE_S` seconds until all samples are finished."""
ALIVE_S = 5.0
SILENT_S = 30.0
"""After so many seconds without a frame, the answer is lost. The client asks again."""


class GroupParams(msgspec.Struct):
    shared: dict[str, object]
    each: list[dict[str, object]]


class SampleAnswer(msgspec.Struct, array_like=True):
    """One finished sample, or with `more` the tokens of a sample since its last frame.

    `place`: its place in the request. `token_ids`: int32, `log_probs`: float32 nats.

    `error` is set where the engine refuses the sample; every other field is then empty. `experts`: an .npy file.
    Of a request with SCORE_FIELD, `log_probs` are those of the prompt. `top_ids`, int32, and `top_log_probs`, float32
    nats, have the same number of the most probable tokens for each place.
    `kept_ids`, `kept_counts`: int32, the ids that sampling kept, and how many of each token.
    `version_starts`: the first token of each of `weight_versions`.
    `preemptions`: how often the engine took its memory away, where that counts them.
    `speculation`: number of passes of the model, of drafted and of accepted tokens, where the engine counts them.
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
    experts: bytes | None = None
    speculation: tuple[int, int, int] | None = None
    error: str | None = None
    kept_ids: bytes | None = None
    kept_counts: bytes = b""
    top_ids: bytes = b""
    top_log_probs: bytes = b""
    preemptions: int = 0
    version_starts: list[int] = []
    more: bool = False


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(SampleAnswer)


def frame(answer: SampleAnswer) -> bytes:
    body = _encoder.encode(answer)
    return MARK + len(body).to_bytes(4, "little") + body


class Frames:
    """Answers out of a stream of bytes that arrive in any pieces."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, piece: bytes) -> Iterator[SampleAnswer]:
        """The answers that are complete now. msgspec.DecodeError for bytes that are no frame."""
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
