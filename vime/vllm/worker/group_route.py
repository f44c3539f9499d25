"""Answers a request for a group of samples in the engine server (see group_wire). Calls vLLM's engine client directly.

vLLM's own /v1/completions validates, counts and writes JSON per request, in the single process that serves HTTP. On
CPUs that costs more than the model (docs/design/decisions.md has the figures). A request without `vime_samples` goes to
vLLM's route.
"""

from __future__ import annotations

import asyncio
import io
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING, cast
from uuid import uuid4

import msgspec
import numpy as np

from vime.pool.asgi import Message, Receive, Send
from vime.vllm.group_wire import (
    ADAPTER_FIELD,
    ALIVE,
    ALIVE_S,
    KEPT_FIELD,
    SCORE_FIELD,
    STREAM_FIELD,
    TOP_FIELD,
    GroupParams,
    SampleAnswer,
    frame,
)
from vime.vllm.versions import refusals
from vime.vllm.worker.adapter import ServedAdapters
from vime.vllm.worker.routed_experts import START_FIELD
from vime.vllm.worker.token_versions import spans_of

if TYPE_CHECKING:
    from vllm.logprobs import FlatLogprobs
    from vllm.lora.request import LoRARequest
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM

LOWEST = -9999.0
"""Log-prob that replaces minus infinity, as in vLLM's own answers."""
MISSING = 1e-3
"""Largest missing probability of a complete set of kept ids. A set that misses more is not the whole cut
distribution."""
_AUTO = -1
"""Value of vLLM's --max-model-len for as many tokens as its memory holds."""
PART_S = 0.02
"""Minimum seconds between two frames of an unfinished sample."""
Finished = asyncio.Queue[SampleAnswer | BaseException | None]
"""Queue of a request's answers and errors. None means that a keep-alive frame is due."""


class _Body(msgspec.Struct):
    """The fields that are read from a request's body. vllm-router adds other fields to it."""

    prompt: list[int]
    vime_samples: GroupParams


class GroupRequest:
    """A parsed request: the prompt and each sample's sampling parameters for vLLM.

    Raises ValueError without a prompt or a sample, and for a response that does not fit. With `cuts`, such a response
    is cut, and only a prompt that leaves no room is an error. Raises one of `vllm_versions.refusals` for a value that
    vLLM refuses, TypeError for a parameter that vLLM does not have, and msgspec.DecodeError for any other body.
    """

    def __init__(self, body: bytes, max_model_len: int, vocabulary: int, *, cuts: bool = False) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        parsed = msgspec.json.decode(body, type=_Body)
        shared = parsed.vime_samples.shared
        self.prompt = parsed.prompt
        start = shared.pop(START_FIELD, None)
        self.wants_experts = start is not None
        kept = shared.pop(KEPT_FIELD, 0)
        self.kept_tokens = min(kept, vocabulary) if isinstance(kept, int) else 0
        self.score_from = shared.pop(SCORE_FIELD, None)
        adapter = shared.pop(ADAPTER_FIELD, "")
        self.adapter = adapter if isinstance(adapter, str) else ""
        self.streams = shared.pop(STREAM_FIELD, False) is True
        top = shared.pop(TOP_FIELD, 0)
        self.top_tokens = min(top, vocabulary) if isinstance(top, int) else 0
        most = max(self.kept_tokens, self.top_tokens)
        ours: dict[str, object] = {
            "logprobs": most if self.score_from is None else None,
            "prompt_logprobs": None if self.score_from is None else self.top_tokens,
            "output_kind": RequestOutputKind.CUMULATIVE if self.streams else RequestOutputKind.FINAL_ONLY,
            "skip_clone": True,
        }
        make: Callable[..., SamplingParams] = SamplingParams.from_optional
        self.samples = [make(**shared | own | ours) for own in parsed.vime_samples.each]
        for params in self.samples:
            params.flat_logprobs = True  # lists of numbers
            # older versions have no such argument of `from_optional`
            params.routed_experts_prompt_start = start if isinstance(start, int) else 0
        if not self.prompt or not self.samples:
            raise ValueError(
                f"a request must have a prompt and samples, got {len(self.prompt)} tokens and "
                f"{len(self.samples)} samples"
            )
        longest = max(params.max_tokens or 1 for params in self.samples)
        room = max_model_len - len(self.prompt)
        if room < (1 if cuts else longest):
            raise ValueError(
                f"a prompt and its response must fit the engine's context of {max_model_len} tokens, got "
                f"{len(self.prompt)} and up to {longest}"
            )
        for params in self.samples if longest > room else ():
            params.max_tokens = min(params.max_tokens or 1, room)
            params.min_tokens = min(params.min_tokens, params.max_tokens)


async def answer(
    engine: AsyncLLM,
    body: bytes,
    receive: Receive,
    send: Send,
    versions: Callable[[str], list[int]],
    adapters: ServedAdapters,
) -> None:
    """Samples the responses that `body` requests. Sends each sample's frame when it is finished, and keep-alive frames
    until then.

    `engine`: vLLM's AsyncLLM. `versions`: an adapter's weight versions live since the request arrived. The request ends
    when the client disconnects. A request that vLLM refuses is answered with 400 and the reason.
    """
    bad_request: tuple[type[Exception], ...] = (*refusals(), TypeError, msgspec.DecodeError)
    try:
        model = engine.model_config
        # The context of --max-model-len auto depends on the memory of this engine.
        cuts = getattr(model, "original_max_model_len", None) == _AUTO
        request = GroupRequest(body, model.max_model_len, model.get_vocab_size(), cuts=cuts)
        lora = adapters.find(request.adapter)
    except bad_request as error:
        await _respond(send, 400, b"text/plain", str(error).encode())
        return
    finished: Finished = asyncio.Queue()
    name = uuid4().hex
    tasks = [
        asyncio.create_task(_sample(engine, request, place, f"{name}-{place}", lora, versions, finished))
        for place in range(len(request.samples))
    ]
    tasks += [asyncio.create_task(_gone(receive, finished)), asyncio.create_task(_alive(finished))]
    try:
        await _send_frames(finished, len(request.samples), send)
    finally:
        for task in tasks:
            task.cancel()


class _ClientGoneError(Exception):
    """The client closed the connection, so no answer is possible."""


async def _send_frames(finished: Finished, count: int, send: Send) -> None:
    """Sends frames until `count` samples are finished. Frames that are ready together are sent in one piece. Raises an
    exception that is in the queue."""
    started = False
    while count:
        found, answers = [await finished.get()], list[SampleAnswer]()
        while not finished.empty():
            found.append(finished.get_nowait())
        for one in found:
            if isinstance(one, _ClientGoneError):
                return
            if isinstance(one, BaseException):
                raise one
            if one is not None:
                answers.append(one)
        if not started:
            await send(_start(200, b"application/octet-stream"))
            started = True
        count -= sum(not answer.more for answer in answers)
        piece = b"".join(map(frame, answers)) or ALIVE
        await send({"type": "http.response.body", "body": piece, "more_body": count > 0})


async def _gone(receive: Receive, finished: Finished) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    finished.put_nowait(_ClientGoneError())


async def _alive(finished: Finished) -> None:
    while True:
        await asyncio.sleep(ALIVE_S)
        finished.put_nowait(None)


async def _sample(
    engine: AsyncLLM,
    request: GroupRequest,
    place: int,
    name: str,
    lora: LoRARequest | None,
    versions: Callable[[str], list[int]],
    finished: Finished,
) -> None:
    from vllm.inputs.engine import tokens_input

    try:
        prompt, params = tokens_input(request.prompt), request.samples[place]
        outputs = engine.generate(prompt, params, name, lora_request=lora)
        output = await _last(outputs, place, request.streams, finished)
        if isinstance(request.score_from, int):
            finished.put_nowait(_scores_of(output, place, versions(request.adapter), request.score_from))
            return
        wanted = request.wants_experts, request.kept_tokens, request.top_tokens
        finished.put_nowait(_answer_of(output, place, *wanted))
    except refusals() as error:
        finished.put_nowait(SampleAnswer(place, error=str(error)))
    except Exception as error:  # the border of a task: `_send_frames` raises it
        finished.put_nowait(error)


async def _last(
    outputs: AsyncIterator[RequestOutput], place: int, streams: bool, finished: Finished
) -> RequestOutput:
    """Returns the finished output. With `streams`, also puts a frame with each output's new tokens into the queue."""
    known, next_s = 0, 0.0
    async for output in outputs:
        now = time.monotonic()
        if not streams or output.finished or now < next_s:
            continue
        completion = output.outputs[0]
        end = len(completion.token_ids)
        values = _log_probs(completion, known, end)  # the engine's list may already be longer than its tokens
        finished.put_nowait(SampleAnswer(place, _ids(completion.token_ids[known:]), values, more=True))
        known, next_s = end, now + PART_S
    return output


def _ids(token_ids: Sequence[int]) -> bytes:
    return np.asarray(token_ids, np.int32).tobytes()


def _log_probs(completion: CompletionOutput, start: int = 0, end: int | None = None) -> bytes:
    """Returns the log-probs of the sampled tokens from `start` on as float32 bytes. NaN stays NaN."""
    flat = cast("FlatLogprobs | None", completion.logprobs)
    values = [flat.logprobs[first] for first in flat.start_indices[start:end]] if flat is not None else []
    return np.maximum(np.asarray(values, np.float32), LOWEST).tobytes()


def _answer_of(
    output: RequestOutput,
    place: int,
    wants_experts: bool,
    kept_tokens: int = 0,
    top_tokens: int = 0,
) -> SampleAnswer:
    completion, times = output.outputs[0], output.metrics
    flat = cast("FlatLogprobs | None", completion.logprobs)
    kept_ids, kept_counts = None, b""
    if kept_tokens and flat is not None:
        kept_ids, kept_counts = _kept(flat)
    top_ids = top_log_probs = b""
    if top_tokens and flat is not None:
        top_ids, top_log_probs = _top(flat, top_tokens)
    queue_s = speed = None
    if times is not None:
        if 0 < times.queued_ts <= times.scheduled_ts:
            queue_s = times.scheduled_ts - times.queued_ts
        decoded = len(completion.token_ids) - 1
        if decoded > 0 and 0 < times.first_token_ts < times.last_token_ts:
            speed = decoded / (times.last_token_ts - times.first_token_ts)
    spans = spans_of(completion)
    experts = None
    if wants_experts and completion.routed_experts is not None:
        file = io.BytesIO()
        np.save(file, completion.routed_experts, allow_pickle=False)
        experts = file.getvalue()
    return SampleAnswer(
        place,
        _ids(completion.token_ids),
        _log_probs(completion),
        completion.text,
        completion.finish_reason,
        [span.version for span in spans],
        len(output.prompt_token_ids or ()),
        output.num_cached_tokens or 0,
        queue_s,
        speed,
        experts,
        _speculation(completion),
        kept_ids=kept_ids,
        kept_counts=kept_counts,
        top_ids=top_ids,
        top_log_probs=top_log_probs,
        preemptions=getattr(times, "num_preemptions", 0),  # some versions have no such field
        version_starts=[span.start for span in spans],
    )


def _scores_of(output: RequestOutput, place: int, versions: list[int], start: int) -> SampleAnswer:
    """Returns the log-probs of the prompt from `start` on. At each position, vLLM lists the token itself first, then
    the most probable tokens in order."""
    flat = cast("FlatLogprobs", output.prompt_logprobs)
    firsts, ends = flat.start_indices[start:], flat.end_indices[start:]
    values, ids = np.asarray(flat.logprobs, np.float32), np.asarray(flat.token_ids, np.int32)
    top = np.asarray([i for first, end in zip(firsts, ends, strict=True) for i in range(first + 1, end)], int)
    values = np.maximum(values, np.float32(LOWEST))  # keeps NaN
    return SampleAnswer(
        place,
        log_probs=values[firsts].tobytes(),
        weight_versions=versions,
        prompt_tokens=len(output.prompt_token_ids or ()),
        top_ids=ids[top].tobytes(),
        top_log_probs=values[top].tobytes(),
    )


def _kept(flat: FlatLogprobs) -> tuple[bytes, bytes]:
    """Returns (ids, number of ids per token), int32: the likeliest ids that are not cut off, if together they have all
    of the probability.

    `flat` lists the likeliest ids after the sampled one.
    """
    ids: list[int] = []
    counts: list[int] = []
    for first, end in zip(flat.start_indices, flat.end_indices, strict=True):
        found = {
            token: value
            for token, value in zip(flat.token_ids[first:end], flat.logprobs[first:end], strict=True)
            if value > LOWEST
        }
        whole = sum(map(math.exp, found.values())) > 1 - MISSING
        ids += found if whole else ()
        counts.append(len(found) if whole else 0)
    return np.asarray(ids, np.int32).tobytes(), np.asarray(counts, np.int32).tobytes()


def _top(flat: FlatLogprobs, count: int) -> tuple[bytes, bytes]:
    """Returns (ids int32, log-probs float32) of the likeliest `count` ids per token, which `flat` lists after the
    sampled one."""
    places = [at for first in flat.start_indices for at in range(first + 1, first + 1 + count)]
    ids = np.asarray(flat.token_ids, np.int32)[places]
    return ids.tobytes(), np.maximum(np.asarray(flat.logprobs, np.float32)[places], LOWEST).tobytes()


def _speculation(completion: CompletionOutput) -> tuple[int, int, int] | None:
    """Returns (model passes that checked a draft, drafted tokens, accepted tokens).

    Returns None without speculation, and for versions of vLLM that do not count them per request.
    """
    counts = getattr(completion, "spec_decode_metrics", None)
    if counts is None:
        return None
    accepted = sum(number * times for number, times in enumerate(counts.histogram))
    return sum(counts.histogram), counts.num_draft_tokens, accepted


def _start(status: int, media_type: bytes) -> Message:
    return {"type": "http.response.start", "status": status, "headers": [(b"content-type", media_type)]}


async def _respond(send: Send, status: int, media_type: bytes, body: bytes) -> None:
    await send(_start(status, media_type))
    await send({"type": "http.response.body", "body": body})
