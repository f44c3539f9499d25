"""Opens sessions under keys that a plug-in chooses. `slime.agent.adapters` uses this module by default.

An adapter's application runs in a separate thread and event loop. Sessions are in the rollout's loop, whose server has
an address for every session. So this module forwards a request to that address, and returns the answer in pieces.
"""

from __future__ import annotations

import asyncio
from argparse import Namespace
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

import aiohttp
from aiohttp import web

from slime.event_loop import loop_objects
from slime.hooks import load_function
from slime.rollout.context import RunContext
from slime.rollout.generate import EVALUATION
from slime.rollout.state import GenerateState, current_state, entered
from slime.sessions.limits import DONE, SessionLimits
from slime.sessions.opening import begin
from slime.sessions.server import SessionServer
from slime.sessions.session import Session
from slime.types import Sample, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_STANDALONE = "vime.vllm.standalone.make_state"
"""The path of a function. It is no import, because that module's package imports this package."""
_COPIED_HEADERS = ("Content-Type", "Cache-Control")


@dataclass
class _Opened:
    own: GenerateState
    begun: Future[tuple[SessionServer, Session]]
    timer: asyncio.TimerHandle | None = None

    async def session(self) -> Session:
        return (await asyncio.wrap_future(self.begun))[1]


class KeyedSessions:
    """Implements `slime.agent.adapters.Sessions` with the sessions of this process's rollout. Every thread may call it.

    The flags of the rollout apply, as in `open_session`. A client may request any model name, because programs that a
    plug-in starts use their own names.
    """

    def __init__(
        self,
        router_url: str = "",
        flags: Namespace | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        """`router_url`, `flags` and `tokenizer` are used in a process without a run."""
        self._outside = router_url, flags, tokenizer
        self._own: GenerateState | None = None
        self._opened: dict[str, _Opened] = {}

    def open(
        self,
        key: str,
        *,
        sampling: SamplingParams,
        max_context_tokens: int,
        template_kwargs: dict[str, object] | None = None,
    ) -> None:
        """Opens a session under `key`. Raises RuntimeError if this process has no rollout."""
        own = self._state()
        context = RunContext.from_state(own)
        if key.startswith(EVALUATION):
            context = context.for_evaluation()
        params = {**own.sampling_params, **sampling}
        if max_context_tokens:
            params["max_context_len"] = max_context_tokens
        # Plug-ins that follow slime use the sample's session_id as the key. The seeds depend on this id.
        sample = Sample(prompt="", session_id=key, apply_chat_template_kwargs=template_kwargs)
        limits = SessionLimits.of(context.config.sessions)
        begun = own.submit(begin(context, sample, params, limits, model=None))
        self._opened[key] = opened = _Opened(own, begun)
        if limits.seconds is not None:
            own.submit(_limit(opened, limits))

    async def answer(self, key: str, path: str, request: web.Request) -> web.StreamResponse:
        """Forwards a request to the session's route `path`, and returns the session's answer. A cancelled call ends the
        session, like a client that closes its connection."""
        session = await self._opened[key].session()
        try:
            body = await request.read()
        except web.RequestPayloadError as error:
            raise web.HTTPBadRequest(
                text=f"the body must be encoded as its headers name it, got {error}; leave Content-Encoding out"
            ) from error
        headers = {"Authorization": f"Bearer {session.api_key}", "Content-Type": "application/json"}
        post = self._client().post(f"{session.base_url}/{path}", data=body, headers=headers)
        async with post as answered:
            kept = {name: answered.headers[name] for name in _COPIED_HEADERS if name in answered.headers}
            if kept.get("Content-Type") != "text/event-stream":
                return web.Response(body=await answered.read(), status=answered.status, headers=kept)
            response = web.StreamResponse(status=answered.status, headers=kept)
            await response.prepare(request)
            async for piece in answered.content.iter_any():
                await response.write(piece)
            return response

    async def finish(self, key: str, base_sample: Sample) -> list[Sample]:
        """Ends the session. Returns one sample per conversation, with the fields of `base_sample`. Raises the session's
        fault if it has one."""
        session = await self._end(key)
        if session.fault is not None:
            raise session.fault
        session.adopt(base_sample)
        return session.samples()

    async def drop(self, key: str) -> None:
        """Ends the session without samples."""
        await self._end(key)

    def _state(self) -> GenerateState:
        """Returns the run's state, or a separate state in a process without a run."""
        router_url, flags, tokenizer = self._outside
        if entered() is not None or not router_url or flags is None or tokenizer is None:
            return current_state()
        if self._own is None:
            self._own = load_function(_STANDALONE)(router_url, flags, tokenizer)
        return self._own

    async def close(self) -> None:
        """Closes the running loop's connections, and the separate state of a process without a run."""
        await loop_objects().end(self)
        if self._own is not None:
            await asyncio.to_thread(self._own.close)

    async def _end(self, key: str) -> Session:
        opened = self._opened.pop(key)
        return await asyncio.wrap_future(opened.own.submit(_ended(opened)))

    def _client(self) -> aiohttp.ClientSession:
        """Returns the HTTP client of the running loop."""
        return loop_objects().get(self, _new_client, aiohttp.ClientSession.close)


def _new_client() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=None),
        trust_env=False,
        auto_decompress=False,
    )


async def _limit(opened: _Opened, limits: SessionLimits) -> None:
    session = await opened.session()
    assert limits.seconds is not None
    loop = asyncio.get_running_loop()
    opened.timer = loop.call_later(limits.seconds, session.end, "time", limits.too_late)


async def _ended(opened: _Opened) -> Session:
    server, session = await asyncio.wrap_future(opened.begun)
    if opened.timer is not None:
        opened.timer.cancel()
    server.remove(session)
    session.end(DONE)
    return session
