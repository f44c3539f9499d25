"""Simulates vLLM's server and fails on request: `python engine_double.py PORT LOG [MODULE]`. tests/e2e has real
servers.

It runs behind the real RunKeyMiddleware in uvicorn. It appends every request to LOG as one line "METHOD path body".
POST /die ends it at once, POST /refuse PATH makes a route answer 500 from then on, and POST /answer {"path", "text"}
makes the route answer text. It takes broadcast buckets as an engine does, and with MODULE, which adds a weight
channel, every part. When an update is finished, it appends the digests of its tensors as one line "HOLDS {...}". POST
/doom {"part": its number, from 1, "when"} kills it there: before it takes the part (reach), while the other engines
wait for it to take the part (stall), or once it has answered (leave).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

from vime.vllm.server import VllmServer


class DoubleServer(VllmServer):
    """The pool's EngineHandle for this file."""

    def command(self) -> list[str]:
        return [sys.executable, __file__, str(self.spec.port), f"{self.spec.log_path}.requests"]


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Receiver:
    """Handles the broadcast buckets of the double."""

    def __init__(self) -> None:
        self.doom: dict[str, Any] = {"part": 0}
        self.receivers: dict[str, Any] = {}
        self.taken = 0
        self.series: str | None = None
        self.held: dict[str, str] = {}

    async def take(self, channel: str, info: dict[str, Any]) -> bool:
        """Takes a part. Returns whether the double dies after its answer."""
        import torch

        from slime.weight_sync.channel import Worker
        from slime.weight_sync.registry import CHANNELS

        if channel not in self.receivers:
            self.receivers[channel] = CHANNELS[channel].load().on_engine(Worker.here(torch.device("cpu"), 0))
        self.taken += 1
        when = self.doom["when"] if self.taken == self.doom["part"] else None
        if when == "reach":
            kill()
        if when == "stall":
            await asyncio.sleep(0.5)
            kill()
        return await asyncio.to_thread(self._hold, channel, info) and when == "leave"

    def _hold(self, channel: str, info: dict[str, Any]) -> bool:
        """Records the received tensors. Returns False if the broadcast was given up and no tensor came."""
        with self.receivers[channel].receive(info) as part:
            if part is not None:
                if part.series != self.series:
                    self.series, self.held = part.series, {}
                self.held |= {name: digest(part.get(name)) for name in part.shapes}
        return part is not None


def digest(tensor: Any) -> str:
    import torch

    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:8]


def main(port: int, log: Path, module: str | None = None) -> None:
    import uvicorn

    from vime.vllm.worker.middleware import RunKeyMiddleware

    if module:
        import_module(module)
    refused: set[str] = set()
    answers: dict[str, bytes] = {}
    receiver = Receiver()
    no_requests = SimpleNamespace(output_handler=None, output_processor=SimpleNamespace(request_states={}))
    no_requests.is_paused = AsyncMock(return_value=False)

    async def app(scope: dict, receive: object, send: object) -> None:
        if scope["type"] == "lifespan":
            while True:
                await send({"type": f"{(await receive())['type']}.complete"})
        body = (await receive()).get("body", b"").decode()
        path = scope["path"]
        scope["app"] = SimpleNamespace(state=SimpleNamespace(engine_client=no_requests))  # as FastAPI does
        with log.open("a") as file:
            file.write(f"{scope['method']} {path} {body}\n")
        if path == "/die":
            print("the double was told to die", flush=True)
            os._exit(3)
        if path == "/refuse":
            refused.add(json.loads(body))
        if path == "/answer":
            answers.update({json.loads(body)["path"]: json.loads(body)["text"].encode()})
        dies = False
        if path == "/doom":
            receiver.doom = json.loads(body)
        if path == "/update_weights":
            message = json.loads(body)["update_info"]
            if module or "group" in message["info"]:
                dies = await receiver.take(message["channel"], message["info"])
        if path == "/finish_weight_update" and receiver.held:
            with log.open("a") as file:
                file.write(f"HOLDS {json.dumps(receiver.held, sort_keys=True)}\n")
            receiver.held = {}
        answer = answers.get(path, b'{"success": true}') if path not in refused else b"told to refuse"
        status = 200 if path not in refused else 500
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(answer)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": answer})
        if dies:
            kill()

    uvicorn.run(RunKeyMiddleware(app), host="127.0.0.1", port=port, log_level="warning")


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
