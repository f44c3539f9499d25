"""Runs a headless Chromium for tests of the page through its DevTools protocol. It needs `chromium` on PATH."""

from __future__ import annotations

import asyncio
import base64
import itertools
import re
import shutil
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome")


class Chromium:
    """`async with Chromium() as tab` opens one tab. The browser has no network except loopback."""

    def __init__(
        self, width: int = 1280, height: int = 900, *, phone: bool = False, dark: bool = False
    ) -> None:
        self._size, self._phone, self._dark = (width, height), phone, dark
        self._numbers = itertools.count(1)
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self.errors: list[str] = []
        """Errors that the page threw or logged, including those of the content security policy."""

    async def __aenter__(self) -> Chromium:
        program = next((found for name in NAMES if (found := shutil.which(name))), None)
        assert program, "these tests need a browser: install chromium (apt-get install chromium)"
        self._process = await asyncio.create_subprocess_exec(
            *(
                program,
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--remote-debugging-port=0",
                "--hide-scrollbars",
            ),
            *("--disable-background-networking", "--no-first-run", "--disable-dev-shm-usage"),
            *(f"--user-data-dir={self._folder.name}", "about:blank"),
            stderr=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
        )
        assert self._process.stderr is not None
        port = ""
        while not port:
            line = (await asyncio.wait_for(self._process.stderr.readline(), 60)).decode()
            assert line, "Chromium ended before it had a port"
            if match := re.search(r"ws://127\.0\.0\.1:(\d+)/", line):
                port = match[1]
        self._reader = asyncio.create_task(self._drain())
        self._client = aiohttp.ClientSession()
        async with self._client.get(f"http://127.0.0.1:{port}/json") as answer:
            (page,) = [found for found in await answer.json() if found["type"] == "page"]
        self._socket = await self._client.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=0)
        for domain in ("Page", "Runtime", "Log"):
            await self.call(f"{domain}.enable")
        width, height = self._size
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": self._phone}
        await self.call("Emulation.setDeviceMetricsOverride", **metrics)
        theme = {"name": "prefers-color-scheme", "value": "dark" if self._dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[theme])
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._socket.close()
        await self._client.close()
        self._process.terminate()
        await self._process.wait()
        await self._reader
        self._folder.cleanup()

    async def _drain(self) -> None:
        assert self._process.stderr is not None
        while await self._process.stderr.readline():
            pass

    async def call(self, method: str, **params: object) -> dict[str, Any]:
        """Calls a method of the DevTools protocol and returns its result."""
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": method, "params": params})
        while True:
            message = await self._socket.receive_json(timeout=60)
            self._note(message)
            if message.get("id") == number:
                assert "error" not in message, message["error"]
                return message["result"]

    def _note(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description", details["text"]))
        if message.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")

    async def open(self, address: str) -> None:
        await self.call("Page.navigate", url=address)

    async def run(self, script: str) -> Any:
        """Returns the value of an expression, awaited if it is a promise. The value of an element is True."""
        asked = f"Promise.resolve({script}).then((found) => found instanceof Node || found)"
        found = await self.call("Runtime.evaluate", expression=asked, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    async def until(self, script: str, seconds: float = 20) -> Any:
        """Waits until an expression is true, and returns its value."""
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while not (value := await self.run(script)):
            assert loop.time() < end, (
                f"not true after {seconds} s: {script}; the page's errors: {self.errors}"
            )
            await asyncio.sleep(0.05)
        return value

    async def key(self, name: str, *, shift: bool = False) -> None:
        """Presses a key: "ArrowLeft", "Enter", "a"."""
        text = {"text": name} if len(name) == 1 else {"text": "\r"} if name == "Enter" else {}
        codes = {"Enter": 13, "Tab": 9, "Escape": 27, "Home": 36, "End": 35, "PageDown": 34}
        common = {"key": name, "modifiers": 8 * shift, "windowsVirtualKeyCode": codes.get(name, 0)}
        await self.call("Input.dispatchKeyEvent", type="keyDown", **common, **text)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    async def picture(self, path: Path, *, whole: bool = False) -> None:
        found = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(found["data"]))
