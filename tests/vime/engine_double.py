"""A stand-in for vLLM's server that can be told to fail: `python engine_double.py PORT LOG`. tests/e2e has real ones.

It runs behind the real RunKeyMiddleware in uvicorn. Every request is appended to LOG as one line "METHOD path body".
POST /die ends it at once, POST /refuse PATH makes a route answer 500 from then on. Buckets that are broadcast it takes
as an engine does; the digests of what it holds when an update is finished are appended as one line "HOLDS {...}".
POST /doom {"part": which of them, from 1, "when"} has it killed there: before it takes the part (reach), while the
others wait for it to (stall), or once it has answered (leave).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from vime.engine.server import EngineServer


class DoubleServer(EngineServer):
    """The pool's EngineHandle over this file."""

    def command(self) -> list[str]:
        return [sys.executable, __file__, str(self.spec.port), f"{self.spec.log_path}.requests"]


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Receiver:
    """What the double does with broadcast buckets."""

    def __init__(self) -> None:
        self.doom: dict[str, Any] = {"part": 0}
        self.buckets: Any = None
        self.taken = 0
        self.store = ""
        self.held: dict[str, str] = {}

    async def take(self, info: dict[str, Any]) -> bool:
        """Whether to die once this is answered."""
        import torch

        from slime.weight_sync.group import GivenUp
        from vime.engine.buckets import SentBuckets, views

        self.buckets = self.buckets or SentBuckets(torch.device("cpu"), 0)
        self.taken += 1
        when = self.doom["when"] if self.taken == self.doom["part"] else None
        if when == "reach":
            kill()
        if when == "stall":
            await asyncio.sleep(0.5)
            kill()
        if info["group"]["store"] != self.store:
            self.store, self.held = info["group"]["store"], {}
        try:
            bucket = await asyncio.to_thread(self.buckets.take, info["bytes"], info["group"])
        except GivenUp:
            return False
        for name, tensor in views(bucket, info["tensors"]).items():
            self.held[name] = digest(tensor)
        return when == "leave"


def digest(tensor: Any) -> str:
    import torch

    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:8]


def main(port: int, log: Path) -> None:
    import uvicorn

    from vime.engine.middleware import RunKeyMiddleware

    refused: set[str] = set()
    receiver = Receiver()

    async def app(scope: dict, receive: object, send: object) -> None:
        if scope["type"] == "lifespan":
            while True:
                await send({"type": f"{(await receive())['type']}.complete"})
        body = (await receive()).get("body", b"").decode()
        path = scope["path"]
        with log.open("a") as file:
            file.write(f"{scope['method']} {path} {body}\n")
        if path == "/die":
            print("the double was told to die", flush=True)
            os._exit(3)
        if path == "/refuse":
            refused.add(json.loads(body))
        dies = False
        if path == "/doom":
            receiver.doom = json.loads(body)
        if path == "/update_weights" and "group" in (info := json.loads(body)["update_info"]):
            dies = await receiver.take(info)
        if path == "/finish_weight_update" and receiver.held:
            with log.open("a") as file:
                file.write(f"HOLDS {json.dumps(receiver.held, sort_keys=True)}\n")
            receiver.held = {}
        answer = b'{"success": true}' if path not in refused else b"told to refuse"
        status = 200 if path not in refused else 500
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(answer)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": answer})
        if dies:
            kill()

    uvicorn.run(RunKeyMiddleware(app), host="127.0.0.1", port=port, log_level="warning")


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
