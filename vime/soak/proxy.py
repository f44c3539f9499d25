"""A TCP proxy between the rollout manager and the router, which can delay, cut and lose replies.

The proxy never changes a byte, like a faulty network.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

from vime.soak.replies import PROXY_FILE, ROUTER_FILE

_PIECE = 65536


class Proxy:
    """Serves in a separate thread until `close`. Each connection goes to the router that a file in `folder` names."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.hold_until = 0.0
        """Time until which replies wait."""
        self.to_cut = self.to_lose = 0
        """Number of next replies to cut in the middle with their connections, and number of next replies to lose on
        connections that stay open."""
        self.hit = 0
        """Number of replies that were held, cut or lost."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._thread.start()
        self._server = asyncio.run_coroutine_threadsafe(
            asyncio.start_server(self._serve, "127.0.0.1", 0), self._loop
        ).result()
        port = self._server.sockets[0].getsockname()[1]
        (folder / PROXY_FILE).write_text(f"http://127.0.0.1:{port}", encoding="utf-8")

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._end_connections(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end_connections(self) -> None:
        self._server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        try:
            router = urlsplit((self._folder / ROUTER_FILE).read_text(encoding="utf-8"))
            from_router, to_router = await asyncio.open_connection(router.hostname, router.port)
        except OSError:  # The router restarts. The manager's request fails, as it would without a proxy.
            to_client.close()
            return
        try:
            async with asyncio.TaskGroup() as pumps:
                reply = pumps.create_task(self._reply(from_router, to_client))
                request = pumps.create_task(_copy(client, to_router))
                await asyncio.wait((reply, request), return_when=asyncio.FIRST_COMPLETED)
                reply.cancel()
                request.cancel()
        except* OSError:
            pass
        finally:
            to_client.close()
            to_router.close()

    async def _reply(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        """Copies until the router closes the connection. A lost reply ends only when the manager closes it."""
        while piece := await source.read(_PIECE):
            if self.to_lose > 0:
                self.to_lose -= 1
                self.hit += 1
                while await source.read(_PIECE):
                    pass
                await asyncio.Event().wait()
            if self.to_cut > 0:
                self.to_cut -= 1
                self.hit += 1
                sink.write(piece[: len(piece) // 2])
                await sink.drain()
                return
            if (left_s := self.hold_until - time.time()) > 0:
                self.hit += 1
                await asyncio.sleep(left_s)
            sink.write(piece)
            await sink.drain()


async def _copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    while piece := await source.read(_PIECE):
        sink.write(piece)
        await sink.drain()
    with contextlib.suppress(OSError):
        sink.write_eof()
