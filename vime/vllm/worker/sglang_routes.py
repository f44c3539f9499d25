"""Serves SGLang's HTTP routes, to which slime's plug-ins post, on an engine server (fields: vime.sglang_api.request).

`POST /generate` calls vLLM's engine client directly, as group_route does. Log-probs are those of the sampled
distribution. vllm-router drops fields of /generate, so vime.sglang_api.gateway sends the body inside another field.
"""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast
from uuid import uuid4

import msgspec
import numpy as np

from vime.pool.asgi import Receive, Send
from vime.sglang_api.request import GenerateRequest, OneRequest, WantedOutput, parse
from vime.vllm.images.raw import prepare
from vime.vllm.versions import installed, refusals
from vime.vllm.worker import sglang_control
from vime.vllm.worker.adapter import ServedAdapters, abort_all
from vime.vllm.worker.columns.producers import LOWEST
from vime.vllm.worker.columns.token_versions import version_spans
from vime.vllm.worker.settings import EngineSettings

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.inputs.engine import MultiModalInput, TokensInput
    from vllm.logprobs import FlatLogprobs
    from vllm.lora.request import LoRARequest
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.tokenizers import TokenizerLike
    from vllm.v1.engine.async_llm import AsyncLLM

_HEALTH_S = 20.0


@dataclass(frozen=True)
class ServedEngine:
    """The engine that answers a request. `llm`: vLLM's AsyncLLM. `versions` returns the weight versions live since the
    request arrived. `running` maps a running request's name in vLLM to its `rid`. `set_version` sets the live version.
    `adapter`: only its requests are aborted; with None, all requests."""

    llm: AsyncLLM
    versions: Callable[[], list[int]]
    running: dict[str, str]
    set_version: Callable[[AsyncLLM, int], Awaitable[None]]
    adapters: ServedAdapters
    adapter: str | None = None


async def answer(
    engine: ServedEngine, route: tuple[str, str], body: bytes, receive: Receive, send: Send, *, routed: bool
) -> None:
    """Answers a request to one of `ROUTES`, or one that wraps /generate. A refused request gets 400 with the reason.

    `route` has the method and the path. `routed` is true if the request came by the URL that vllm-router has of this
    engine.
    """
    path = route[1]
    try:
        if path == "/inference/v1/generate":
            await _generate(engine, *unwrapped(body), receive, send)
        elif path == "/generate":
            if routed:
                require_whole(body)
            await _generate(engine, body, "", receive, send)
        elif path == "/abort_request":
            await _abort(engine, body)
            await _json(send, 200, {"success": True})
        elif path == "/flush_cache":
            flushed = await engine.llm.reset_prefix_cache()
            await _json(send, 200 if flushed else 400, {"success": bool(flushed)})
        elif path in sglang_control.PATHS:
            await _json(send, *await sglang_control.answer(_controlled(engine), path, body))
        elif path == "/health_generate":
            await _json(send, *await _health(engine))
        else:
            await _json(send, 200, _info(engine, server="server" in path))
    except refusals() as error:
        await _json(send, 400, _error(error))


class _Wrapped(msgspec.Struct):
    vime_generate: msgspec.Raw
    vime_adapter: str = ""


def unwrapped(body: bytes) -> tuple[bytes, str]:
    """Returns the body of /generate inside a body of /inference/v1/generate, and the adapter for a request that names
    none. Raises ValueError if the outer body has no inner one."""
    found = msgspec.json.decode(body, type=_Wrapped)
    return bytes(found.vime_generate), found.vime_adapter


def _controlled(engine: ServedEngine) -> sglang_control.Controlled:
    return sglang_control.Controlled(
        engine.llm, lambda: engine.versions()[-1], engine.set_version, lambda: _abort_all(engine)
    )


def require_whole(body: bytes) -> None:
    """Raises ValueError for a body that vllm-router has rewritten: its record of /generate lacks fields, such as
    sampling_seed. sglang-router's record has them, and also a field no_logs."""
    if b'"return_hidden_states":' not in body or b'"no_logs":' in body:
        return
    raise ValueError(
        "POST /generate must go to args.sglang_router_ip and args.sglang_router_port, got one that vllm-router "
        "passed on without the fields that it does not know; post there, or to an engine itself"
    )


class _Ask(msgspec.Struct):
    rid: str | list[str] = ""
    abort_all: bool = False


async def _abort(engine: ServedEngine, body: bytes) -> None:
    """Aborts every request of this engine, or those whose `rid` begins with the given one, as SGLang does."""
    try:
        ask = msgspec.json.decode(body or b"{}", type=_Ask)
    except msgspec.DecodeError as error:
        raise ValueError(
            f"the body of /abort_request must have rid or abort_all, got {body[:80]!r}: {error}"
        ) from None
    if ask.abort_all:
        await _abort_all(engine)
        return
    names = tuple(filter(None, [ask.rid] if isinstance(ask.rid, str) else ask.rid))
    if not names:
        raise ValueError(f"rid must not be empty, got {body[:80]!r}; set abort_all to abort every request")
    await engine.llm.abort([name for name, rid in engine.running.items() if rid.startswith(names)])


async def _abort_all(engine: ServedEngine) -> None:
    await abort_all(engine.llm, engine.adapter)


async def _health(engine: ServedEngine) -> tuple[int, dict[str, object]]:
    """Returns status and record: 200 if the engine generates a token within `_HEALTH_S` seconds, else 503."""
    from vllm import SamplingParams
    from vllm.inputs.engine import tokens_input

    outputs = engine.llm.generate(tokens_input([0]), SamplingParams(max_tokens=1), f"health-{uuid4().hex}")
    try:
        async with asyncio.timeout(_HEALTH_S):
            async for _ in outputs:
                pass
    except TimeoutError:
        return 503, _error(f"the engine must generate a token within {_HEALTH_S:g} s, got none")
    return 200, {"success": True}


def _info(engine: ServedEngine, *, server: bool) -> dict[str, object]:
    config = engine.llm.model_config
    info: dict[str, object] = {
        "model_path": config.model,
        "tokenizer_path": config.tokenizer,
        "is_generation": True,
        "weight_version": engine.versions()[-1],
        "has_image_understanding": engine.llm.renderer.mm_processor is not None,
        "has_audio_understanding": False,
    }
    if server:
        info |= {
            "context_length": config.max_model_len,
            "dtype": str(config.dtype).removeprefix("torch."),
            "engine": f"vLLM {installed()}",
            "status": "ready",
        }
    return info


async def _generate(engine: ServedEngine, body: bytes, adapter: str, receive: Receive, send: Send) -> None:
    request = parse(body)
    lora = engine.adapters.find(request.adapter or adapter)
    prompts = [await prepare(engine.llm, one.prompt, one.images) for one in request.each]
    jobs = [_Job(engine, *asked, request, lora) for asked in zip(request.each, prompts, strict=True)]
    gone = asyncio.create_task(_gone(receive))
    work = asyncio.create_task(
        _stream(jobs, request, send) if request.stream else _whole(jobs, request, send)
    )
    try:
        await asyncio.wait({gone, work}, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            work.result()
    finally:
        gone.cancel()
        work.cancel()  # if the client disconnected, the engine stops computing


async def _whole(jobs: list[_Job], request: GenerateRequest, send: Send) -> None:
    async def last(job: _Job) -> dict[str, object]:
        answers = [answer async for answer in job.answers()]
        return answers[-1]

    if len(jobs) == 1:
        made = [await last(jobs[0])]
    else:
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(last(job)) for job in jobs]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        made = [task.result() for task in tasks]
    await _json(send, 200, made if request.batched else made[0])


async def _stream(jobs: list[_Job], request: GenerateRequest, send: Send) -> None:
    """Sends server-sent events, each with all text and tokens of a sample so far, then [DONE]."""
    await send(
        {
            "type": "http.response.start",
            "status": 200,
            "headers": [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")],
        }
    )

    async def events(index: int, job: _Job) -> None:
        try:
            async for answer in job.answers():
                await _event(send, {**answer, "index": index} if request.batched else answer)
        except refusals() as error:
            await _event(send, _error(error))

    async with asyncio.TaskGroup() as group:
        for index, job in enumerate(jobs):
            group.create_task(events(index, job))
    await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})


class _Job:
    """One sample: its sampling parameters for vLLM, and its output in SGLang's format."""

    def __init__(
        self,
        engine: ServedEngine,
        one: OneRequest,
        prompt: tuple[list[int], TokensInput | MultiModalInput],
        request: GenerateRequest,
        lora: LoRARequest | None,
    ) -> None:
        self.engine, self.wanted, self.lora = engine, request.wanted, lora
        self.tokenizer = engine.llm.get_tokenizer()
        self.prompt, self.input = prompt
        self.rid, self.scored = one.rid or uuid4().hex, one.scored
        self.name = f"{self.rid}-{uuid4().hex}"
        self.params = _sampling(engine, one.params, self.prompt, self.wanted, stream=request.stream)
        self.began = time.perf_counter()

    async def answers(self) -> AsyncIterator[dict[str, object]]:
        self.engine.running[self.name] = self.rid
        made = self.engine.llm.generate(self.input, self.params, self.name, lora_request=self.lora)
        try:
            async for output in made:
                yield self.to_json(output)
        finally:
            del self.engine.running[self.name]

    def to_json(self, output: RequestOutput) -> dict[str, object]:
        completion = output.outputs[0]
        ids = [] if self.scored else list(completion.token_ids)
        spans = version_spans(completion)
        meta: dict[str, object] = {
            "id": self.rid,
            "finish_reason": _finish(completion, ids),
            "prompt_tokens": len(self.prompt),
            "completion_tokens": len(ids),
            "cached_tokens": output.num_cached_tokens or 0,
            "weight_version": spans[-1].version,
            "weight_versions": [span._asdict() for span in spans],
            "e2e_latency": time.perf_counter() - self.began,
        }
        wanted = self.wanted
        if wanted.log_probs:
            made = _log_probs(completion, wanted, self.tokenizer)
            meta |= {name: [] for name in made} if self.scored else made
        if wanted.prompt_from is not None and output.prompt_logprobs is not None:
            meta |= _prompt_logprobs(
                cast("FlatLogprobs", output.prompt_logprobs), self.prompt, wanted, self.tokenizer
            )
        if wanted.experts and completion.routed_experts is not None:
            rows = np.ascontiguousarray(completion.routed_experts, np.int32)
            meta["routed_experts"] = base64.b64encode(rows.tobytes()).decode()
            meta["routed_experts_shape"] = list(rows.shape)
        return {"text": "" if self.scored else completion.text, "output_ids": ids, "meta_info": meta}


def _sampling(
    engine: ServedEngine, sampling: dict[str, Any], prompt: list[int], wanted: WantedOutput, *, stream: bool
) -> SamplingParams:
    """Returns vLLM's parameters. Raises ValueError if the response or the output does not fit the engine."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    left = engine.llm.model_config.max_model_len - len(prompt)
    most = sampling.get("max_tokens", max(left, 1))
    if most > left:
        raise ValueError(
            f"sampling_params.max_new_tokens must fit the engine's context of {left + len(prompt)} tokens, got "
            f"{len(prompt)} tokens of input_ids or text and up to {most} new ones"
        )
    if wanted.experts and not EngineSettings.from_config(engine.llm.vllm_config).routed_experts:
        raise ValueError(
            "return_routed_experts must be left out, got true; only a run with --use-rollout-routing-replay has them"
        )
    kind = RequestOutputKind.CUMULATIVE if stream else RequestOutputKind.FINAL_ONLY
    params = {**sampling, "max_tokens": most, "output_kind": kind, "skip_clone": True}
    if wanted.log_probs:
        params["logprobs"] = wanted.top
    if wanted.prompt_from is not None:
        params["prompt_logprobs"] = wanted.top
    made = SamplingParams.from_optional(**params)
    made.routed_experts_prompt_start = 0
    made.flat_logprobs = True  # numbers alone, see compact_log_probs
    return made


def _finish(completion: CompletionOutput, ids: list[int]) -> dict[str, object] | None:
    reason = completion.finish_reason
    if reason is None:
        return None
    if reason == "length":
        return {"type": "length", "length": len(ids)}
    if reason == "stop":
        matched = completion.stop_reason
        return {"type": "stop", "matched": ids[-1] if matched is None and ids else matched}
    return {"type": "abort", "message": "the request was aborted"}


def _log_probs(
    completion: CompletionOutput, wanted: WantedOutput, tokenizer: TokenizerLike
) -> dict[str, object]:
    """Returns `output_token_logprobs` and perhaps `output_top_logprobs`: rows [log-prob, token id, text or null]."""
    flat = cast("FlatLogprobs | None", completion.logprobs)
    if flat is None:
        return {"output_token_logprobs": []}
    firsts = flat.start_indices
    values, ids = flat.logprobs, flat.token_ids
    texts = [tokenizer.decode([token]) if wanted.texts else None for token in ids]
    rows = [[max(value, LOWEST), token, text] for value, token, text in zip(values, ids, texts, strict=True)]
    made: dict[str, object] = {"output_token_logprobs": [rows[first] for first in firsts]}
    if wanted.top:
        # the most likely tokens follow the sampled token, in order
        ends = flat.end_indices
        made["output_top_logprobs"] = [
            rows[first + 1 : min(end, first + 1 + wanted.top)]
            for first, end in zip(firsts, ends, strict=True)
        ]
    return made


def _prompt_logprobs(
    flat: FlatLogprobs, prompt: list[int], wanted: WantedOutput, tokenizer: TokenizerLike
) -> dict[str, object]:
    """Returns `input_token_logprobs` and perhaps `input_top_logprobs`: rows [log-prob, token id, text or null] of the
    prompt's tokens from the wanted one on. The log-prob of the first row is null."""

    def row(position: int) -> list[object]:
        token = flat.token_ids[position]
        text = tokenizer.decode([token]) if wanted.texts else None
        return [max(flat.logprobs[position], LOWEST), token, text]

    start = min(wanted.prompt_from or 0, len(prompt) - 1)
    text = tokenizer.decode([prompt[start]]) if wanted.texts else None
    firsts, ends = flat.start_indices[start + 1 :], flat.end_indices[start + 1 :]
    made: dict[str, object] = {
        "input_token_logprobs": [[None, prompt[start], text], *(row(first) for first in firsts)]
    }
    if wanted.top:
        # the most likely tokens follow the token itself, in order
        spans = zip(firsts, ends, strict=True)
        made["input_top_logprobs"] = [None, *([row(i) for i in range(a + 1, b)] for a, b in spans)]
    return made


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _error(error: object) -> dict[str, object]:
    return {"error": {"message": str(error), "type": "BadRequestError"}}


async def _event(send: Send, record: object) -> None:
    piece = b"data: " + msgspec.json.encode(record) + b"\n\n"
    await send({"type": "http.response.body", "body": piece, "more_body": True})


async def _json(send: Send, status: int, record: object) -> None:
    body = msgspec.json.encode(record)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
