"""A stand-in for vLLM's server that can be told to fail: `python engine_double.py PORT LOG`. tests/e2e has real ones.

It runs behind the real RunKeyMiddleware in uvicorn. Every request is appended to LOG as one line "METHOD path body".
POST /die ends it at once, POST /refuse PATH makes a route answer 500 from then on.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from vime.engine.server import EngineServer


class DoubleServer(EngineServer):
    """The pool's EngineHandle over this file."""

    def command(self) -> list[str]:
        return [sys.executable, __file__, str(self.spec.port), f"{self.spec.log_path}.requests"]


def main(port: int, log: Path) -> None:
    import uvicorn

    from vime.engine.middleware import RunKeyMiddleware

    refused: set[str] = set()

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
        answer = b'{"success": true}' if path not in refused else b"told to refuse"
        status = 200 if path not in refused else 500
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(answer)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": answer})

    uvicorn.run(RunKeyMiddleware(app), host="127.0.0.1", port=port, log_level="warning")


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
