"""Opens, answers and finishes a plug-in's sessions by name. This module holds no token and parses no body.

A plug-in makes one adapter, serves its `app`, opens a session per sample under a name that it chooses, and gets the
samples when the agent has ended. The agent sends the session's key, because a name can be guessed. `open_session`
returns the key, and the harnesses of `slime.agent.harness` find it by the name.
"""

from __future__ import annotations

import asyncio
import logging
from argparse import Namespace
from collections import Counter
from collections.abc import Callable
from ipaddress import ip_address
from typing import Any, Protocol, overload

from aiohttp import web

from slime.agent import session_keys
from slime.agent.adapters.wire import (
    flatten_content,
    manager_finish_reason,
    sid_from_bearer,
    sid_from_body,
    tool_call_dict,
)
from slime.agent.segments import TokenSegment, TurnRecord
from slime.hooks import load_function
from slime.system.upstream import refused_names
from slime.types import Metadata, Reward, Sample, SamplingParams

__all__ = [
    "BaseAdapter",
    "Sessions",
    "TurnRecord",
    "flatten_content",
    "manager_finish_reason",
    "sid_from_bearer",
    "sid_from_body",
    "tool_call_dict",
]
__getattr__ = refused_names("slime.agent.adapters.common")
logger = logging.getLogger(__name__)

_LARGEST_BODY_BYTES = 64 << 20
_SESSIONS = "slime.sessions.keyed.KeyedSessions"
"""A path, because rewards of the rollout run programs in sandboxes, and sessions need the rollout."""
_NO_TURN = ("messages/count_tokens",)


class Sessions(Protocol):
    """The object that holds the conversations."""

    def open(
        self, key: str, *, sampling: SamplingParams, max_context_tokens: int, **template: dict[str, object]
    ) -> None:
        """Opens a conversation. With `max_context_tokens` 0, the limit of the run holds. `template` has
        `template_kwargs`, the arguments of the chat template, if the plug-in sets them."""
        ...

    async def answer(self, key: str, path: str, request: web.Request) -> web.StreamResponse:
        """Answers a request in the dialect of its path."""
        ...

    async def finish(self, key: str, base_sample: Sample) -> list[Sample]:
        """Ends a session and returns one sample per conversation, made from `base_sample`."""
        ...

    async def drop(self, key: str) -> None:
        """Ends a session without samples."""
        ...

    async def close(self) -> None:
        """Closes the resources that belong to the event loop of an application."""
        ...


class BaseAdapter:
    """The base of the adapters. `sessions` holds the conversations; the default is `slime.sessions.keyed`, the sessions
    of this process's rollout.

    The adapter stores `tokenizer`, `tool_parser`, `reasoning_parser` and `address` only for the plug-in; the sessions
    use the run's values. `address` is the router's address under the name that slime or upstream vime uses. In a
    process without a run, sessions use the servers of `vime serve` at `address`, with `rollout_args` as the flags.
    `model` has no effect. `debug_callback` and `fork_threshold_tokens` belong to slime's record of turns, which
    sessions do not have. The first raises ValueError, the second logs a warning unless it is 0.
    """

    paths: tuple[str, ...] = ()

    def __init__(
        self,
        *,
        tokenizer: object,
        sessions: Sessions | None = None,
        tool_parser: str | None = None,
        reasoning_parser: str | None = None,
        max_turns_per_sid: int | None = None,
        fork_threshold_tokens: int | None = None,
        debug_callback: Callable[..., None] | None = None,
        model: str | None = None,
        rollout_args: Namespace | None = None,
        **address: str,
    ) -> None:
        if wrong := [name for name in address if not name.endswith("_url")]:
            raise TypeError(
                f"{type(self).__name__} has no argument {wrong[0]!r}; see its docstring for those it has"
            )
        if debug_callback is not None:
            raise ValueError(
                "debug_callback must be None, got a function, which a session would never call; leave it out"
            )
        if fork_threshold_tokens:
            logger.warning("fork_threshold_tokens has no effect: a session never merges conversations")
        self.tokenizer, self.model, self.rollout_args = tokenizer, model, rollout_args
        vars(self).update({name: url.rstrip("/") for name, url in address.items()})
        self.tool_parser, self.reasoning_parser = tool_parser, reasoning_parser
        self.max_turns_per_sid = max_turns_per_sid
        if sessions is None:
            router = next(iter(address.values()), "").rstrip("/")
            sessions = load_function(_SESSIONS)(router, rollout_args, tokenizer)
        self.sessions: Sessions = sessions
        self._open: set[str] = set()
        self._keys: dict[str, str] = {}
        self._names: dict[str, str] = {}
        self.closed: set[str] = set()
        self._turns: Counter[str] = Counter()
        self.inflight: dict[str, set[asyncio.Task[Any]]] = {}
        self.app = web.Application(client_max_size=_LARGEST_BODY_BYTES)
        for path in self.paths:
            self.app.router.add_post(f"/v1/{path}", self._handle)
        self.app.on_cleanup.append(self._close)
        self.app.router.add_get("/healthz", _healthy)
        self.app.router.add_get("/v1/models", _healthy)

    def open_session(
        self,
        sid: str,
        *,
        sampling_defaults: SamplingParams | None = None,
        max_context_tokens: int = 0,
        apply_chat_template_kwargs: dict[str, object] | None = None,
    ) -> str:
        """Opens a session and returns its key. Raises ValueError for the name of an open session. The name of a
        finished session is free again: a group that is generated again keeps its `session_id`s, and its sessions get
        new keys. `apply_chat_template_kwargs` replace the run's --apply-chat-template-kwargs."""
        if sid in self._open:
            raise ValueError(
                f"session_id must be new for each agent, got {sid!r} while its session is open; choose another, or "
                "finish that session first"
            )
        template = {}
        if apply_chat_template_kwargs is not None:
            template["template_kwargs"] = dict(apply_chat_template_kwargs)
        self.sessions.open(
            sid, sampling=dict(sampling_defaults or {}), max_context_tokens=max_context_tokens, **template
        )
        self._open.add(sid)
        self.closed.discard(sid)
        self._turns.pop(sid, None)
        self._names.pop(self._keys.pop(sid, ""), None)
        self._keys[sid] = key = session_keys.issue(sid)
        self._names[key] = sid
        return key

    async def shutdown_session(self, sid: str, *, wait_timeout: float = 5.0) -> None:
        """Refuses further requests, and cancels requests that are not answered after `wait_timeout` seconds."""
        self.closed.add(sid)
        session_keys.withdraw(sid, self._keys.get(sid, ""))
        tasks = [task for task in self.inflight.pop(sid, ()) if not task.done()]
        if tasks:
            # The app may be served by another thread's loop.
            waits = asyncio.run_coroutine_threadsafe(_drain(tasks, wait_timeout), tasks[0].get_loop())
            await asyncio.wrap_future(waits)

    @overload
    async def finish_session(
        self,
        sid: str,
        *,
        base_sample: Sample,
        reward: Reward = 0.0,
        extra_metadata: Metadata | None = None,
        wait_timeout: float = 5.0,
    ) -> list[Sample]: ...

    @overload
    async def finish_session(self, sid: str, *, wait_timeout: float = 5.0) -> list[TokenSegment]: ...

    async def finish_session(
        self,
        sid: str,
        *,
        base_sample: Sample | None = None,
        reward: Reward = 0.0,
        extra_metadata: Metadata | None = None,
        wait_timeout: float = 5.0,
    ) -> list[Sample] | list[TokenSegment]:
        """Ends a session and returns its samples, with the reward. Returns [] for a finished session.

        Without `base_sample` it returns the session's token segments, as older versions of upstream vime do, for
        `slime.agent.trajectory.fan_out_sample_segments`; [] for a session that the rollout has ended.
        """
        await self.shutdown_session(sid, wait_timeout=wait_timeout)
        if sid not in self._open:
            return []
        self._open.discard(sid)
        if base_sample is None:
            found = await self.sessions.finish(sid, Sample(session_id=sid))
            kept = (sample for sample in found if sample.status is not Sample.Status.ABORTED)
            return [TokenSegment.from_sample(sample) for sample in kept]
        samples = await self.sessions.finish(sid, base_sample)
        for sample in samples:
            if sample.status is not Sample.Status.ABORTED:  # it is generated again, without a reward
                sample.reward = reward
            sample.metadata = {**(sample.metadata or {}), **(extra_metadata or {})}
        return samples

    async def drop_session(self, sid: str, *, wait_timeout: float = 5.0) -> None:
        """Ends a session without samples. It does nothing for a finished session."""
        await self.shutdown_session(sid, wait_timeout=wait_timeout)
        if sid in self._open:
            self._open.discard(sid)
            await self.sessions.drop(sid)

    async def _close(self, app: web.Application) -> None:
        await self.sessions.close()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        key = request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        key = key or request.headers.get("x-api-key", "").strip()
        sid = self._names.get(key, key)
        if key not in self._names and not session_keys.is_key(key, loopback=_is_on_loopback(request)):
            return _refusal(401, "no open session has this key; open_session returns the key of a session")
        if sid in self.closed:
            return _refusal(503, "the session has ended")
        if sid not in self._open:
            return _refusal(401, "no open session has this key")
        path = request.path.removeprefix("/v1/")
        if path not in _NO_TURN:
            if self.max_turns_per_sid is not None and self._turns[sid] >= self.max_turns_per_sid:
                return _refusal(
                    429, f"the session has had its max_turns_per_sid={self.max_turns_per_sid} turns"
                )
            self._turns[sid] += 1
        task = asyncio.current_task()
        assert task is not None
        running = self.inflight.setdefault(sid, set())
        running.add(task)
        try:
            return await self.sessions.answer(sid, path, request)
        finally:
            running.discard(task)


def _is_on_loopback(request: web.Request) -> bool:
    """Returns True if the request came to a loopback address of this server."""
    own = request.transport.get_extra_info("sockname") if request.transport else None
    return own is not None and ip_address(own[0].partition("%")[0]).is_loopback


async def _drain(tasks: list[asyncio.Task[Any]], timeout: float) -> None:
    _, late = await asyncio.wait(tasks, timeout=timeout)
    for task in late:
        task.cancel()
    if late:
        await asyncio.wait(late)


def _refusal(status: int, message: str) -> web.Response:
    error = {"type": "invalid_request_error", "message": message}
    return web.json_response({"type": "error", "error": error}, status=status)


async def _healthy(request: web.Request) -> web.Response:
    return web.json_response({"object": "list", "data": []})
