"""Requests completions through the router: implements slime's RolloutEngine over /v1/completions of our servers.

Owns the translation of sampling parameters and the check that every token has a log-prob. Requests for the same prompt
that start at the same moment become one HTTP request, so a group costs one request. See group_wire for the format.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, cast

import aiohttp
import msgspec
import numpy as np

from slime.checkpoints.divergence import DivergedError
from slime.protocols import EXPERTS, TOP, AnswerParts, FinishReason, GenerateResult, OnTokens, ScoreResult
from slime.rollout.sampling import NAMES, checked
from vime.pool.control import ADAPTER_HEADER, SERVED_MODEL_NAME
from vime.pool.router_client import RouterClient, Transient, check_start, require_finite, require_ok, scored
from vime.vllm.group_wire import (
    ADAPTER_FIELD,
    COLUMNS_FIELD,
    PARTS_FIELD,
    SAMPLES,
    SCORE_FIELD,
    SILENT_S,
    STREAM_FIELD,
    TRANSFER_FIELD,
    Frames,
    GroupParams,
    SampleAnswer,
    unpacked,
)
from vime.vllm.images.wire import IMAGES_FIELD, MISSING, MissingFilesError, describe, with_content
from vime.vllm.worker.columns import routed_experts

if TYPE_CHECKING:
    from slime.vision.inputs import ImageInputs
    from vime.vllm.images.wire import WireImage

Offer = tuple["dict[str, object] | None", int]
"""Parameters with which an engine takes a prompt's keys and values, and the version of the weights."""
_OWN = ("max_tokens",)
"""Parameters, in addition to the seed, that may differ between a request's samples."""
_FINISH: dict[str | None, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


class VllmEngineClient(RouterClient):
    """Implements RolloutEngine over vllm-router at `router_url`, e.g. "http://127.0.0.1:3000".

    With the name of an `adapter` that the engines have, all requests use this adapter. Other adapters' requests are not
    affected.
    """

    streams = has_parts = True

    def __init__(self, router_url: str, run_key: str, adapter: str = "", *, held: bool = False) -> None:
        super().__init__(router_url, run_key, held=held)
        self._adapter_fields: dict[str, object] = {ADAPTER_FIELD: adapter} if adapter else {}
        self._headers = {ADAPTER_HEADER: adapter} if adapter else {}
        self._waiting: dict[bytes, _Request] = {}
        self._sending: set[asyncio.Task[None]] = set()

    def __getstate__(self) -> dict[str, object]:
        return {**super().__getstate__(), "_waiting": {}, "_sending": set()}

    async def generate(
        self,
        token_ids: list[int],
        sampling_params: dict[str, object],
        *,
        seed: int,
        deadline_s: float,
        columns: Mapping[str, int] = MappingProxyType({}),
        session: str | None = None,
        on_tokens: OnTokens | None = None,
        parts: AnswerParts | None = None,
        images: ImageInputs | None = None,
    ) -> GenerateResult:
        """Samples one completion of `token_ids`.

        The log-probs are in nats. They belong to the distribution that the tokens were sampled from: after temperature,
        and after top-k, top-p, min-p and penalties if these are set. The same seed gives the same sample on the same
        weights, if the engine's numbers do not depend on its batch. The text keeps the stop string unless
        `no_stop_trim` is False.

        Connection faults, lost answers (`SILENT_S`) and HTTP 5xx, 408, 425 and 429 are retried. Raises TimeoutError
        when `deadline_s` seconds (--rollout-deadline-s) pass without a completion. Raises ValueError, with the engine's
        answer, for any other status.
        """
        shared, own = request_fields(sampling_params, seed)
        shared |= self._shared_fields(images)
        if columns:
            shared[COLUMNS_FIELD] = dict(columns)
        if on_tokens is not None:
            shared[STREAM_FIELD] = True
        if parts is not None:
            shared[PARTS_FIELD] = parts.every_s
        answer = await self._until(
            deadline_s,
            lambda: self._join(token_ids, shared, own, session, on_tokens, parts),
            prompt_tokens=len(token_ids),
        )
        return parse_result(answer, len(token_ids), columns)

    async def score(
        self,
        token_ids: list[int],
        *,
        start: int,
        top_k: int = 0,
        deadline_s: float,
        images: ImageInputs | None = None,
    ) -> ScoreResult:
        """Returns log-probs of given tokens; see `slime.protocols.RolloutEngine`.

        vLLM generates one more token, so the engine's context must have room for it. vLLM returns log-probs of at most
        --max-logprobs tokens per position. `generate` describes the errors.
        """
        check_start(start, token_ids)
        shared: dict[str, object] = {SCORE_FIELD: start, COLUMNS_FIELD: {TOP: top_k}}
        shared |= self._shared_fields(images)
        answer = await self._until(
            deadline_s,
            lambda: self._join(token_ids, shared, {"max_tokens": 1}, None),
            prompt_tokens=len(token_ids),
        )
        if answer.error is not None:
            raise ValueError(f"the engine must accept the request, got {answer.error}")
        ids, log_probs = unpacked(answer.columns[TOP])
        return scored(
            np.frombuffer(answer.log_probs, np.float32),
            ids,
            log_probs,
            answer.weight_versions,
            (len(token_ids) - start, top_k),
        )

    async def prefill(self, token_ids: list[int], params: Mapping[str, object]) -> Offer:
        """Has an engine compute the prompt for another engine. `params` are vLLM's `kv_transfer_params`.

        Returns the parameters with which the other engine takes the keys and values, or None if the engine offers
        none, and the version of the weights that computed them. Makes one attempt.
        """
        shared = {**self._adapter_fields, TRANSFER_FIELD: dict(params)}
        answer = await self._join(token_ids, shared, {"max_tokens": 1}, None)
        if answer.error is not None:
            raise ValueError(f"the engine must accept the request, got {answer.error}")
        return answer.transfer, answer.weight_versions[-1]

    async def abort_all(self) -> None:
        """Aborts every running request on every engine of the router. With an adapter, aborts only the adapter's
        requests.

        Each aborted request returns the tokens that it has.
        """
        await self._on_all("/abort_requests", {}, self._headers)

    def _shared_fields(self, images: ImageInputs | None) -> dict[str, object]:
        """Returns the fields of a request for the client's adapter and for the images of its prompt."""
        return self._adapter_fields | ({IMAGES_FIELD: describe(images)} if images is not None else {})

    def _join(
        self,
        token_ids: list[int],
        shared: dict[str, object],
        own: dict[str, object],
        session: str | None,
        on_tokens: OnTokens | None = None,
        parts: AnswerParts | None = None,
    ) -> asyncio.Future[SampleAnswer]:
        """Adds a sample to the request that is sent when the tasks that are ready now have run."""
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_soon(self._send_waiting)
        key = msgspec.json.encode((token_ids, shared, session))
        request = self._waiting.setdefault(key, _Request(token_ids, GroupParams(shared, []), session))
        future: asyncio.Future[SampleAnswer] = loop.create_future()
        request.samples.each.append(own)
        request.futures.append(future)
        request.received.append(_Received(on_tokens, parts))
        return future

    def _send_waiting(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for request in waiting.values():
            task = asyncio.create_task(self._send(request))
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)
            for future in request.futures:
                future.add_done_callback(partial(_end_with, task, request.futures))

    async def _send(self, request: _Request) -> None:
        """Sends the request. Gives each sample's answer or error to the future that waits for it."""
        try:
            try:
                await self._exchange(request)
            except MissingFilesError:
                await request.add_content()
                await self._exchange(request)
            missing = sum(not future.done() for future in request.futures)
            refusal = None
            message = f"the answer lacks {missing} of {len(request.futures)} samples"
        except (Transient, aiohttp.ClientError, msgspec.DecodeError, OSError) as error:
            refusal, message = None, f"{type(error).__name__}: {error}"
        except ValueError as error:
            refusal, message = ValueError, str(error)
        for future in request.futures:
            if not future.done():
                future.set_exception((refusal or Transient)(message))

    async def _exchange(self, request: _Request) -> None:
        url = f"{self.router_url}/v1/completions"
        # vllm-router forwards each piece of a stream when it arrives
        body = {
            "model": SERVED_MODEL_NAME,
            "prompt": request.token_ids,
            "stream": True,
            SAMPLES: request.samples,
        }
        headers = {"Content-Type": "application/json"}
        if request.session is not None:
            headers["x-session-id"] = request.session  # vllm-router's consistent_hash reads it
        timeout = aiohttp.ClientTimeout(total=None, sock_read=SILENT_S)
        sent = self._connections().post(url, data=msgspec.json.encode(body), headers=headers, timeout=timeout)
        async with sent as response:
            if response.status == MISSING and not request.has_content:
                raise MissingFilesError
            await require_ok(response)
            frames = Frames()
            async for piece in response.content.iter_any():
                for answer in frames.feed(piece):
                    if answer.more:
                        request.received[answer.place].add(answer)
                    elif not request.futures[answer.place].done():
                        request.futures[answer.place].set_result(answer)


@dataclass
class _Request:
    """A request that is not sent yet: its prompt, its samples, and the futures that wait for the samples."""

    token_ids: list[int]
    samples: GroupParams
    session: str | None
    futures: list[asyncio.Future[SampleAnswer]] = field(default_factory=list)
    received: list[_Received] = field(default_factory=list)
    has_content: bool = False

    async def add_content(self) -> None:
        """Adds the content of the images, for an engine on a host that lacks their files."""
        images = cast("list[WireImage]", self.samples.shared[IMAGES_FIELD])
        self.samples.shared[IMAGES_FIELD] = await asyncio.to_thread(with_content, images)
        self.has_content = True


@dataclass
class _Received:
    """The tokens of a sample that have arrived so far."""

    on_tokens: OnTokens | None
    parts: AnswerParts | None
    shown: int = 0
    stored: int = 0

    def add(self, answer: SampleAnswer) -> None:
        """Passes on the tokens of a frame. Only a frame of parts has a finish reason."""
        ids = np.frombuffer(answer.token_ids, np.int32).tolist()
        if answer.finish_reason is None:
            if self.on_tokens is not None:
                self.on_tokens(self.shown, ids, np.frombuffer(answer.log_probs, np.float32).tolist())
            self.shown += len(ids)
        elif self.parts is not None:
            with suppress(ValueError, DivergedError):  # the complete answer raises it, too
                self.parts.take(self.stored, parse_result(answer, 0, {}))
            self.stored += len(ids)


def _end_with(task: asyncio.Task[None], futures: list[asyncio.Future[SampleAnswer]], _: object) -> None:
    """Cancels a request that no future waits for. The engine then stops computing it."""
    if all(future.done() for future in futures) and any(future.cancelled() for future in futures):
        task.cancel()


def request_fields(
    sampling_params: dict[str, object], seed: int
) -> tuple[dict[str, object], dict[str, object]]:
    """Splits sampling parameters, under vLLM's names, into those that a request's samples share and those of one
    sample.

    For a parameter that is None, the engine uses its neutral default.
    """
    params = {NAMES[name]: value for name, value in checked(sampling_params).items()}
    own = {"seed": seed} | {name: params.pop(name) for name in _OWN if name in params}
    return {"include_stop_str_in_output": True, **params}, own


def parse_result(answer: SampleAnswer, prompt_tokens: int, asked: Mapping[str, int]) -> GenerateResult:
    """Converts an engine's answer.

    Raises ValueError when the engine refused the sample, when a token has no log-prob, or when the finish reason is
    unknown. Raises DivergedError when a log-prob is NaN.
    """
    if answer.error is not None:
        raise ValueError(f"the engine must accept the request, got {answer.error}")
    token_ids = np.frombuffer(answer.token_ids, np.int32)
    log_probs = np.frombuffer(answer.log_probs, np.float32)
    if len(token_ids) != len(log_probs):
        raise ValueError(
            f"the engine must give one log-prob per token, got {len(log_probs)} for {len(token_ids)} tokens; "
            f"check that it runs with --logprobs-mode processed_logprobs"
        )
    live = answer.weight_versions
    require_finite(log_probs, live[-1])
    if answer.finish_reason not in _FINISH:
        raise ValueError(f"finish_reason must be one of {list(_FINISH)}, got {answer.finish_reason!r}")
    columns = {name: unpacked(arrays) for name, arrays in answer.columns.items()}
    if EXPERTS in asked and len(token_ids):  # no tokens: the request was aborted in the queue
        tokens = prompt_tokens + len(token_ids)
        routed_experts.check_rows(columns.get(EXPERTS), tokens=tokens, start=asked[EXPERTS])
    return GenerateResult(
        token_ids=token_ids.tolist(),
        log_probs=log_probs.tolist(),
        text=answer.text,
        finish_reason=_FINISH[answer.finish_reason],
        weight_versions=live,
        columns=columns,
        prompt_tokens=answer.prompt_tokens,
        cached_tokens=answer.cached_tokens,
        cache_ages=answer.cache_ages,
        queue_s=answer.queue_s,
        preemptions=answer.preemptions,
        decode_tokens_per_s=answer.decode_tokens_per_s,
        speculation=answer.speculation,
    )
