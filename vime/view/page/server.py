"""Runs the server of `vime ui`: read-only, on loopback, for users with its key.

    GET /?key=KEY         sets a cookie with the key, and leads to /
    GET /                 the page
    GET /static/NAME      its files
    GET /api/runs                                   the state of each run
    GET /api/curves|timeline|settings?run=0         parts of a run, by its number
    GET /api/samples?run=0&since=12                 rows of the samples that were read after reading 12
    GET /api/sample?run=0&rollout=3&place=8         one sample
    GET /api/group?run=0&rollout=3&place=8          the kept samples of its group
    GET /api/find?run=0&text=TEXT&begin=3           samples with a text, from rollout 3 on

A request identifies a run by its number, so a request cannot name a file.
"""

from __future__ import annotations

import asyncio
import errno
import hmac
import secrets
from collections.abc import Awaitable, Callable, Sequence

from aiohttp import web

from vime.view.page.cached import to_json
from vime.view.page.html import served_page, static_files
from vime.view.page.run_data import RunData

HOST = "127.0.0.1"
_HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_TYPES = {"js": "text/javascript", "css": "text/css"}
_MOST_CHARACTERS = 1000

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class PageServer:
    """Serves the page of some runs. `await start()` returns its address with the key."""

    def __init__(self, runs: Sequence[RunData]) -> None:
        self.key = secrets.token_urlsafe(24)
        self._runs = runs
        self._runner: web.AppRunner | None = None
        self._port = 0
        self._page, self._policy = served_page()

    async def start(self, port: int) -> str:
        """Starts the server. Port 0 means a free port. Raises ValueError if the port is taken."""
        app = web.Application(middlewares=[self._guard])
        app.router.add_get("/", self._index)
        app.router.add_get("/static/{name}", _static)
        app.router.add_get("/api/runs", self._all_runs)
        for name, read in _READERS.items():
            app.router.add_get(f"/api/{name}", self._reader(read))
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1)
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, HOST, port).start()
        except OSError as error:
            await self.stop()
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
            raise ValueError(
                f"--port must be a free port, got {port}: {error.strerror}; name another, or 0 for any"
            ) from error
        self._port = self._runner.addresses[0][1]
        return f"http://{HOST}:{self._port}/?key={self.key}"

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    @property
    def _cookie(self) -> str:
        """Returns the cookie's name. It contains the port, because browsers send a host's cookies to all its ports."""
        return f"vime-ui-{self._port}"

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        sent = request.query.get("key")
        key = sent if sent is not None else request.cookies.get(self._cookie, "")
        if not hmac.compare_digest(key.encode(errors="replace"), self.key.encode()):
            text = "The key of this page is missing or wrong. Open the address that `vime ui` printed.\n"
            return web.Response(status=401, text=text, headers=_HEADERS)
        try:
            response = await handler(request)
        except ValueError as error:
            response = _json({"error": str(error)}, 422)
        except web.HTTPException as error:
            response = web.Response(status=error.status, text=f"{error.reason}\n")
        response.headers.update(_HEADERS)
        return response

    async def _index(self, request: web.Request) -> web.Response:
        if "key" not in request.query:
            headers = {"Content-Security-Policy": self._policy}
            return web.Response(text=self._page, content_type="text/html", headers=headers)
        # The redirect removes the key from the address bar and the history.
        response = web.Response(status=303, headers={"Location": "/"})
        response.set_cookie(self._cookie, self.key, httponly=True, samesite="Lax", path="/")
        return response

    async def _all_runs(self, request: web.Request) -> web.Response:
        return _json([await asyncio.to_thread(_summary_or_problem, run) for run in self._runs])

    def _reader(self, read: Callable[[RunData, web.Request], object]) -> Handler:
        async def handle(request: web.Request) -> web.Response:
            number = _number(request, "run")
            if number >= len(self._runs):
                raise ValueError(
                    f"run must be below {len(self._runs)}, got {number}; /api/runs has the runs of this page"
                )
            return _json(await asyncio.to_thread(read, self._runs[number], request))

        return handle


def _find(run: RunData, request: web.Request) -> object:
    return run.find(request.query.get("text", "")[:_MOST_CHARACTERS], _number(request, "begin"))


_READERS: dict[str, Callable[[RunData, web.Request], object]] = {
    "curves": lambda run, request: run.curves(),
    "timeline": lambda run, request: run.timeline(),
    "settings": lambda run, request: run.settings(),
    "samples": lambda run, request: run.samples(_number(request, "since")),
    "sample": lambda run, request: run.sample(_number(request, "rollout"), _number(request, "place")),
    "group": lambda run, request: run.group(_number(request, "rollout"), _number(request, "place")),
    "find": _find,
}


def _summary_or_problem(run: RunData) -> object:
    """Returns the summary or the error, so that an unreadable run does not hide the other runs."""
    try:
        return run.summary()
    except ValueError as error:
        return {"name": run.name, "dir": str(run.dir), "state": "unknown", "cause": str(error), "stamps": {}}


def _number(request: web.Request, name: str) -> int:
    text = request.query.get(name, "0")
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise ValueError(f"{name} must be a whole number from 0, got {text[:80]!r}; correct the address")
    return int(text)


async def _static(request: web.Request) -> web.Response:
    name = request.match_info["name"]
    if name not in static_files():
        raise web.HTTPNotFound
    return web.Response(
        body=static_files()[name], content_type=_TYPES[name.rpartition(".")[2]], charset="utf-8"
    )


def _json(value: object, status: int = 200) -> web.Response:
    return web.Response(status=status, text=to_json(value), content_type="application/json")
