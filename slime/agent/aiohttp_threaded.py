"""Runs an aiohttp application in a thread with a separate event loop. Plug-ins of slime import this module."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass

from aiohttp import web
from aiohttp.abc import AbstractAccessLogger

_STOP_S = 10.0


class FilteredAccessLogger(AbstractAccessLogger):
    """Logs only failed requests, because an agent sends thousands of requests."""

    def log(self, request: web.BaseRequest, response: web.StreamResponse, time: float) -> None:
        if response.status >= 400:
            self.logger.warning(
                "%s %s: HTTP %d in %.2f s", request.method, request.path, response.status, time
            )


@dataclass
class AppHandle:
    """A running application. `port` is its actual port."""

    host: str
    port: int
    thread: threading.Thread
    loop: asyncio.AbstractEventLoop
    _ended: asyncio.Event

    def stop(self) -> None:
        """Closes the application and ends its thread. It may be called again."""
        if self.thread.is_alive():
            self.loop.call_soon_threadsafe(self._ended.set)
            self.thread.join(_STOP_S)


def run_app_in_thread(
    app: web.Application,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    thread_name: str = "aiohttp-app",
    runner_kwargs: Mapping[str, object] | None = None,
) -> AppHandle:
    """Serves `app` until `stop`, or until this process ends. Returns when `app` listens, and raises an error of its
    start."""
    started: Future[AppHandle] = Future()

    async def serve() -> None:
        runner = web.AppRunner(app, **dict(runner_kwargs or {}))  # type: ignore[arg-type]
        try:
            await runner.setup()
            await web.TCPSite(runner, host, port).start()
            ended = asyncio.Event()
            loop = asyncio.get_running_loop()
            started.set_result(AppHandle(host, runner.addresses[0][1], thread, loop, ended))
            await ended.wait()
        except BaseException as error:
            if started.done():
                raise
            started.set_exception(error)
        finally:
            await runner.cleanup()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), name=thread_name, daemon=True)
    thread.start()
    return started.result()
