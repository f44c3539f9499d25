"""Answers a request for a group of samples in the engine server (see group_wire). Calls vLLM's engine client directly.

vLLM's own /v1/completions validates, counts and writes JSON per request, in the single process that serves HTTP. On
CPUs that costs more than the model (docs/design/decisions.md has the figures). A request without `vime_samples` goes to
vLLM's route.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, cast
from uuid import uuid4

import msgspec
import numpy as np

from slime.protocols import TOP, VERSIONS
from vime.pool.asgi import Message, Receive, Send
from vime.vllm.caches.ages import CacheAges, RequestAges
from vime.vllm.caches.prefill import Prefills, make_aborted
from vime.vllm.group_wire import (
    ADAPTER_FIELD,
    ALIVE,
    ALIVE_S,
    COLUMNS_FIELD,
    PARTS_FIELD,
    SCORE_FIELD,
    STREAM_FIELD,
    TRANSFER_FIELD,
    GroupParams,
    SampleAnswer,
    frame,
    packed,
)
from vime.vllm.images import engine_input
from vime.vllm.images.wire import IMAGES_FIELD, MISSING, MissingFilesError, missing_files, parse_images
from vime.vllm.versions import refusals
from vime.vllm.worker.adapter import ServedAdapters
from vime.vllm.worker.columns.parts import PartReader
from vime.vllm.worker.columns.producers import LOWEST, PRODUCERS
from vime.vllm.worker.columns.token_versions import version_spans

if TYPE_CHECKING:
    from vllm.inputs.engine import MultiModalInput, TokensInput
    from vllm.logprobs import FlatLogprobs
    from vllm.lora.request import LoRARequest
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM

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
    """A parsed request: the prompt and each sample's sampling parameters for vLLM, and, in an engine that keeps its
    cache over updates, the record of the cache's ages.

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
        self.columns = _columns(shared.pop(COLUMNS_FIELD, {}), vocabulary)
        self.score_from = shared.pop(SCORE_FIELD, None)
        self.images = parse_images(shared.pop(IMAGES_FIELD, []))
        adapter = shared.pop(ADAPTER_FIELD, "")
        self.adapter = adapter if isinstance(adapter, str) else ""
        self.streams = shared.pop(STREAM_FIELD, False) is True
        transfer = shared.pop(TRANSFER_FIELD, None)
        self.offers = isinstance(transfer, dict)
        self.takes_prefill = not (self.images or self.offers or self.score_from is not None)
        self.ages: RequestAges | None = None
        parts_s = shared.pop(PARTS_FIELD, None)
        self.parts_s = float(parts_s) if isinstance(parts_s, int | float) and parts_s > 0 else None
        likeliest = [argument for name, argument in self.columns.items() if PRODUCERS[name].likeliest]
        most = max(likeliest, default=0)
        ours: dict[str, object] = {
            "logprobs": most if self.score_from is None else None,
            "prompt_logprobs": None if self.score_from is None else most,
            "output_kind": RequestOutputKind.CUMULATIVE if self.streams else RequestOutputKind.FINAL_ONLY,
            "skip_clone": True,
        }
        if self.offers:
            ours["extra_args"] = {"kv_transfer_params": transfer}
        make: Callable[..., SamplingParams] = SamplingParams.from_optional
        self.samples = [make(**shared | own | ours) for own in parsed.vime_samples.each]
        for params in self.samples:
            params.flat_logprobs = True  # lists of numbers
            for name, argument in self.columns.items():
                PRODUCERS[name].prepare(params, argument)
        if not self.prompt or not self.samples:
            raise ValueError(
                f"a request must have a prompt and samples, got {len(self.prompt)} tokens and "
                f"{len(self.samples)} samples"
            )
        longest = max(params.max_tokens or 1 for params in self.samples)
        remaining = max_model_len - len(self.prompt)
        if remaining < (1 if cuts else longest):
            raise ValueError(
                f"a prompt and its response must fit the engine's context of {max_model_len} tokens, got "
                f"{len(self.prompt)} and up to {longest}"
            )
        for params in self.samples if longest > remaining else ():
            params.max_tokens = min(params.max_tokens or 1, remaining)
            params.min_tokens = min(params.min_tokens, params.max_tokens)


def _columns(requested: object, vocabulary: int) -> dict[str, int]:
    """Returns the columns of a request with their arguments. Raises ValueError for a column that has no producer."""
    if not isinstance(requested, dict) or not all(
        isinstance(argument, int) for argument in requested.values()
    ):
        raise ValueError(
            f"{COLUMNS_FIELD} must map names of columns to integers, got {requested!r:.200}; send {{}}"
        )
    if unknown := sorted(requested.keys() - PRODUCERS.keys()):
        raise ValueError(f"columns must be among {sorted(PRODUCERS)}, got {unknown}; leave them out")
    return {
        name: min(argument, vocabulary) if PRODUCERS[name].likeliest else argument
        for name, argument in requested.items()
    }


async def answer(
    engine: AsyncLLM,
    body: bytes,
    receive: Receive,
    send: Send,
    versions: Callable[[str], list[int]],
    adapters: ServedAdapters,
    ages: CacheAges | None = None,
    prefills: Prefills | None = None,
) -> None:
    """Samples the responses that `body` requests. Sends each sample's frame when it is finished, and keep-alive frames
    until then.

    `engine` is vLLM's AsyncLLM. `versions` has an adapter's weight versions live since the request arrived. The request
    ends when the client disconnects. A request that vLLM refuses is answered with 400 and the reason. A request with
    files that this host lacks is answered with `MISSING`.
    """
    bad_request: tuple[type[Exception], ...] = (*refusals(), TypeError, msgspec.DecodeError)
    try:
        model = engine.model_config
        # The context of --max-model-len auto depends on the memory of this engine.
        cuts = getattr(model, "original_max_model_len", None) == _AUTO
        request = GroupRequest(body, model.max_model_len, model.get_vocab_size(), cuts=cuts)
        lora = adapters.find(request.adapter)
        prompt = await _prompt(engine, request)
    except MissingFilesError as error:
        await _respond(send, MISSING, b"text/plain", str(error).encode())
        return
    except bad_request as error:
        await _respond(send, 400, b"text/plain", str(error).encode())
        return
    finished: Finished = asyncio.Queue()

    def live() -> int:
        return versions(request.adapter)[-1]

    if ages is not None and not request.images:
        request.ages = RequestAges(ages, request.prompt, live(), request.adapter)
    name = uuid4().hex
    names = [f"{name}-{index}" for index in range(len(request.samples))]
    filled = None
    block = engine.vllm_config.cache_config.block_size if prefills is not None and prefills.used else 0
    if prefills is not None and request.takes_prefill and 0 < block < len(request.prompt):
        filled = asyncio.create_task(prefills.fill(engine, request.prompt, name, request.adapter, lora, live))
    tasks = [
        asyncio.create_task(_sample(engine, request, prompt, index, own, lora, versions, finished, filled))
        for index, own in enumerate(names)
    ]
    if request.parts_s is not None:
        reader = PartReader(engine, names)
        tasks.append(asyncio.create_task(_send_parts(reader, request.parts_s, request.columns, finished)))
    tasks += [asyncio.create_task(_gone(receive, finished)), asyncio.create_task(_alive(finished))]
    try:
        await _send_frames(finished, len(request.samples), send)
    finally:
        for task in tasks:
            task.cancel()


async def _prompt(engine: AsyncLLM, request: GroupRequest) -> TokensInput | MultiModalInput:
    """Returns vLLM's input for the prompt. Files of images are read in a thread."""
    from vllm.inputs.engine import tokens_input

    if not request.images:
        return tokens_input(request.prompt)
    if missing := missing_files(request.images):
        raise MissingFilesError(
            f"files of images must be on the engine's host, got none at {missing}; send their content"
        )
    return await asyncio.to_thread(engine_input.make_input, engine, request.prompt, request.images)


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


async def _send_parts(
    reader: PartReader, every_s: float, columns: Mapping[str, int], finished: Finished
) -> None:
    """Puts a frame with the new tokens of each unfinished sample into the queue, every `every_s` seconds."""
    try:
        while True:
            await asyncio.sleep(every_s)
            for index, output in reader.read():
                part = _make_answer(output, index, columns)
                part.more, part.finish_reason = True, "abort"
                finished.put_nowait(part)
                await asyncio.sleep(0)
    except Exception as error:  # the border of a task: `_send_frames` raises it
        finished.put_nowait(error)


async def _sample(
    engine: AsyncLLM,
    request: GroupRequest,
    prompt: TokensInput | MultiModalInput,
    index: int,
    name: str,
    lora: LoRARequest | None,
    versions: Callable[[str], list[int]],
    finished: Finished,
    filled: asyncio.Task[bool] | None,
) -> None:
    try:
        if filled is not None and not await filled:
            finished.put_nowait(make_aborted(index, request.prompt, versions(request.adapter)[-1]))
            return
        params = request.samples[index]
        outputs = engine.generate(prompt, params, name, lora_request=lora)
        output = await _last(outputs, index, request.streams, finished)
        if isinstance(request.score_from, int):
            finished.put_nowait(_make_scores(output, index, versions(request.adapter), request.score_from))
            return
        made = _make_answer(output, index, request.columns)
        made.transfer = output.kv_transfer_params if request.offers else None
        if request.ages is not None:
            made.cache_ages = request.ages.finish(output)
        finished.put_nowait(made)
    except refusals() as error:
        finished.put_nowait(SampleAnswer(index, error=str(error)))
    except Exception as error:  # the border of a task: `_send_frames` raises it
        finished.put_nowait(error)


async def _last(
    outputs: AsyncIterator[RequestOutput], index: int, streams: bool, finished: Finished
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
        finished.put_nowait(SampleAnswer(index, _ids(completion.token_ids[known:]), values, more=True))
        known, next_s = end, now + PART_S
    return output


def _ids(token_ids: Sequence[int]) -> bytes:
    return np.asarray(token_ids, np.int32).tobytes()


def _log_probs(completion: CompletionOutput, start: int = 0, end: int | None = None) -> bytes:
    """Returns the log-probs of the sampled tokens from `start` on as float32 bytes. NaN stays NaN."""
    flat = cast("FlatLogprobs | None", completion.logprobs)
    values = [flat.logprobs[first] for first in flat.start_indices[start:end]] if flat is not None else []
    return np.maximum(np.asarray(values, np.float32), LOWEST).tobytes()


def _make_answer(output: RequestOutput, index: int, columns: Mapping[str, int]) -> SampleAnswer:
    completion, times = output.outputs[0], output.metrics
    made = {
        name: PRODUCERS[name].make(output, argument) for name, argument in {**columns, VERSIONS: 1}.items()
    }
    queue_s = speed = None
    if times is not None:
        if 0 < times.queued_ts <= times.scheduled_ts:
            queue_s = times.scheduled_ts - times.queued_ts
        decoded = len(completion.token_ids) - 1
        if decoded > 0 and 0 < times.first_token_ts < times.last_token_ts:
            speed = decoded / (times.last_token_ts - times.first_token_ts)
    return SampleAnswer(
        index,
        _ids(completion.token_ids),
        _log_probs(completion),
        completion.text,
        completion.finish_reason,
        [span.version for span in version_spans(completion)],
        len(output.prompt_token_ids or ()),
        output.num_cached_tokens or 0,
        queue_s,
        speed,
        _speculation(completion),
        preemptions=getattr(times, "num_preemptions", 0),  # some versions have no such field
        columns={name: packed(arrays) for name, arrays in made.items() if arrays is not None},
    )


def _make_scores(output: RequestOutput, index: int, versions: list[int], start: int) -> SampleAnswer:
    """Returns the log-probs of the prompt from `start` on. At each position, vLLM lists the token itself first, then
    the most probable tokens in order."""
    flat = cast("FlatLogprobs", output.prompt_logprobs)
    firsts, ends = flat.start_indices[start:], flat.end_indices[start:]
    values, ids = np.asarray(flat.logprobs, np.float32), np.asarray(flat.token_ids, np.int32)
    top = np.asarray([i for first, end in zip(firsts, ends, strict=True) for i in range(first + 1, end)], int)
    values = np.maximum(values, np.float32(LOWEST))  # keeps NaN
    return SampleAnswer(
        index,
        log_probs=values[firsts].tobytes(),
        weight_versions=versions,
        prompt_tokens=len(output.prompt_token_ids or ()),
        columns={TOP: packed((ids[top], values[top]))},
    )


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
