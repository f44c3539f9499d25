"""The HTTP server of sessions in the rollout manager's process, on loopback or --session-host.

    POST /sessions/{id}/v1/chat/completions, /v1/responses, /v1/messages    GET /sessions/{id}/v1/models

Each event loop has one server. A request must have its session's key as `Authorization: Bearer KEY` or
`x-api-key: KEY`. A rejected request ends its session, so its HTTP status is one after which clients do not retry. A
stream sends the text during generation, if the engine and the parser support that. While no text is available, a stream
sends comments, so that clients keep the connection.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncIterator

from aiohttp import web

from slime.event_loop import loop_objects
from slime.sessions.anthropic_messages import MESSAGES
from slime.sessions.dialect import Body, Dialect, Event, written
from slime.sessions.json_text import read_json
from slime.sessions.listener import LOOPBACK, SessionListener
from slime.sessions.live import LiveAnswer
from slime.sessions.messages import ChatRequest, RequestRejected
from slime.sessions.off_loop import off_loop
from slime.sessions.openai_chat import CHAT
from slime.sessions.openai_responses import RESPONSES
from slime.sessions.session import MODEL, Session

_LARGEST_BODY_BYTES = 64 << 20
_COMMENT_EVERY_S = 5.0
_WRONG_KEY = (
    "the key of a request must be that of an open session, got another key or a session that has ended; give the "
    "client session.api_key, and ask inside the block of open_session"
)
"""The text is the same for a wrong key and for an unknown session, so that it does not reveal which sessions exist."""


class SessionServer:
    """Serves each session from its `add` call to its `remove` call."""

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}
        self._runner: web.AppRunner | None = None
        self._listener: SessionListener | None = None
        self.url = ""

    async def start(self, host: str = LOOPBACK) -> None:
        """Listens on `host`. Raises ValueError if this machine does not have the address."""
        app = web.Application(client_max_size=_LARGEST_BODY_BYTES)
        for dialect in (CHAT, RESPONSES, MESSAGES):
            app.router.add_post(f"/sessions/{{id}}/v1/{dialect.path}", _Route(self, dialect).handle)
        app.router.add_get("/sessions/{id}/v1/models", self.models)
        app.router.add_post("/sessions/{id}/v1/messages/count_tokens", _Route(self, MESSAGES).count)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1)
        await self._runner.setup()
        assert self._runner.server is not None, "a runner that is set up has a server"
        self._listener = SessionListener(self._runner.server, lambda: len(self._sessions))
        self.url = await self._listener.start(host)

    async def stop(self) -> None:
        if self._listener is not None:
            self._listener.stop()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def add(self, session: Session) -> None:
        session.url = f"{self.url}/sessions/{session.id}"
        self._sessions[session.id] = session

    def remove(self, session: Session) -> None:
        self._sessions.pop(session.id, None)

    def find_session(self, request: web.Request) -> Session:
        """Returns the open session whose id and key the request has. Raises RequestRejected for any other request."""
        session = self._sessions.get(request.match_info["id"])
        header = request.headers.get("Authorization", "").removeprefix("Bearer ")
        key = (request.headers.get("x-api-key") or header).strip()
        known = hmac.compare_digest(
            key.encode(errors="surrogateescape"), (session.api_key if session else "").encode()
        )
        if session is None or not known:
            if session is not None:
                session.wrong_keys += 1
            raise RequestRejected("key", _WRONG_KEY, 401)
        if self._listener is not None:
            self._listener.trust(request)
        return session

    async def models(self, request: web.Request) -> web.Response:
        try:
            self.find_session(request)
        except RequestRejected as refused:
            return _refusal(CHAT, refused)
        model = {"id": MODEL, "object": "model", "type": "model", "created": 0, "owned_by": "vime"}
        return web.json_response({"object": "list", "data": [model], "has_more": False})


class _Route:
    """Handles the requests of one dialect."""

    def __init__(self, server: SessionServer, dialect: Dialect) -> None:
        self._server, self._dialect = server, dialect

    async def handle(self, request: web.Request) -> web.StreamResponse:
        session = None
        try:
            session = self._server.find_session(request)
            body, asked = await self._read(request, session)
            return await self._respond(request, session, body, asked)
        except RequestRejected as refused:
            if session is not None:
                session.end(refused.reason, str(refused))
            return _refusal(self._dialect, refused)
        except (asyncio.CancelledError, ConnectionError):
            if session is not None:
                session.end("disconnected", "the client closed its connection before it had the answer")
            raise
        except Exception as error:
            if session is not None:
                session.fail(error)
            raise

    async def count(self, request: web.Request) -> web.Response:
        """Answers with the number of tokens of a request's messages. The request is not a turn, and a rejected request
        does not end the session."""
        try:
            session = self._server.find_session(request)
            _, asked = await self._read(request, session)
            return web.json_response({"input_tokens": await session.count(asked)})
        except RequestRejected as refused:
            return _refusal(self._dialect, refused)

    async def _read(self, request: web.Request, session: Session) -> tuple[Body, ChatRequest]:
        try:
            raw = await request.read()
        except web.HTTPRequestEntityTooLarge as error:
            raise RequestRejected(
                "request", f"the body must have at most {_LARGEST_BODY_BYTES} bytes, got more; send less", 413
            ) from error
        except web.RequestPayloadError as error:
            text = f"the body must be encoded as its headers name it, got {error}; leave Content-Encoding out"
            raise RequestRejected("request", text) from error
        return await off_loop(len(raw), self._parse, raw, session)

    def _parse(self, raw: bytes, session: Session) -> tuple[Body, ChatRequest]:
        """Returns the body and the request. Raises RequestRejected for a body that is not a request of the dialect."""
        try:
            body = read_json(raw)
            if not isinstance(body, dict):
                raise TypeError(f"it is of type {type(body).__name__} and no object")
            asked = self._dialect.read(body, session)
        except RequestRejected:
            raise
        except Exception as error:  # border: anybody may have written the body
            text = f"the body must be a request in JSON, got {type(error).__name__}: {error}; fix the client"
            raise RequestRejected("request", text) from error
        asked.size = len(raw)
        return body, asked

    async def _respond(
        self, request: web.Request, session: Session, body: Body, asked: ChatRequest
    ) -> web.StreamResponse:
        """Answers a request with one object, or with a stream of events if the request asks for a stream."""
        live = LiveAnswer(lambda: session.ended)
        task = asyncio.create_task(session.answer(asked, live))
        live.follow(task)
        try:
            if asked.stream:
                return await self._stream(request, session, self._dialect.events(live, body))
            return web.json_response(self._dialect.whole(await live.answer()))
        finally:
            task.cancel()

    async def _stream(
        self, request: web.Request, session: Session, events: AsyncIterator[list[Event]]
    ) -> web.StreamResponse:
        """Sends the events as they arrive, and comments in the meantime. A RequestRejected error is raised if nothing
        was sent yet. Otherwise it becomes an event of the stream."""
        headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        stream = web.StreamResponse(headers=headers)
        coming = asyncio.ensure_future(_next(events))
        try:
            while True:
                came, _ = await asyncio.wait({coming}, timeout=_COMMENT_EVERY_S)
                piece = b": waiting\n\n"
                if came:
                    if (found := coming.result()) is None:
                        break
                    piece = b"".join(map(written, found))
                    coming = asyncio.ensure_future(_next(events))
                if not stream.prepared:
                    await stream.prepare(request)
                await stream.write(piece)
            await stream.write(self._dialect.last.encode())
        except RequestRejected as refused:
            if not stream.prepared:
                raise
            session.end(refused.reason, str(refused))
            await stream.write(written(self._dialect.failure(refused)))
        finally:
            coming.cancel()
        return stream


async def _next(events: AsyncIterator[list[Event]]) -> list[Event] | None:
    return await anext(events, None)


def _refusal(dialect: Dialect, refused: RequestRejected) -> web.Response:
    return web.json_response(dialect.failure(refused)[1], status=refused.status)


async def get_loop_server(host: str = LOOPBACK) -> SessionServer:
    """Returns the server of this event loop. The first call starts the server on `host`. The server stops when the
    loop's objects are closed."""
    started = loop_objects().get(SessionServer, lambda: asyncio.create_task(_started(host)), _stop)
    return await asyncio.shield(started)


async def _started(host: str) -> SessionServer:
    server = SessionServer()
    try:
        await server.start(host)
    except BaseException:
        await server.stop()
        raise
    return server


async def _stop(started: asyncio.Task[SessionServer]) -> None:
    if not (started.done() and (started.cancelled() or started.exception())):
        await (await started).stop()
