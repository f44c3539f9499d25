"""`python -m vime.sglang.serve FLAGS...` runs `python -m sglang.launch_server FLAGS --api-key KEY` in this process.

SGLang's own command takes the key on the command line, which every user of the machine can read, and logs the key with
its settings. This command reads the key from $VIME_RUN_KEY, and its log shows asterisks. The server also answers the
challenge that proves that it has the key (`slime.peers.proof`). SGLang's own command cannot answer the challenge, so
users must start SGLang's servers on other hosts with this command.
"""

from __future__ import annotations

import logging
import os
import runpy
import sys
from collections.abc import Callable

import uvicorn

from slime import bridges
from slime.peers.proof import PROOF_PATH
from vime.pool.asgi import KEY_VARIABLE, App, Receive, Scope, Send, prove
from vime.sglang.patches import PROOF

MODULE = "sglang.launch_server"


def hide(secret: str) -> None:
    """Replaces `secret` by asterisks in all log records of this process."""
    make = logging.getLogRecordFactory()

    def hidden(*args: object, **kwargs: object) -> logging.LogRecord:
        record = make(*args, **kwargs)
        message = record.getMessage()
        if secret in message:
            record.msg, record.args = message.replace(secret, "***"), ()
        return record

    logging.setLogRecordFactory(hidden)


class Proving:
    """ASGI middleware that answers the challenge."""

    def __init__(self, app: App, run_key: str) -> None:
        self._app, self._run_key = app, run_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (scope["type"], scope.get("method"), scope.get("path")) == ("http", "GET", PROOF_PATH):
            await prove(scope, send, self._run_key)
        else:
            await self._app(scope, receive, send)


def with_proof(load: Callable[[uvicorn.Config], None]) -> Callable[[uvicorn.Config], None]:
    """Returns a replacement of uvicorn's `Config.load`, which wraps the loaded app in `Proving` with the key from the
    environment."""
    run_key = os.environ[KEY_VARIABLE]

    def loaded(config: uvicorn.Config) -> None:
        load(config)
        config.loaded_app = Proving(config.loaded_app, run_key)

    return loaded


def main() -> None:
    """Serves until the process is terminated."""
    run_key = os.environ[KEY_VARIABLE]
    bridges.apply(PROOF)
    hide(run_key)
    sys.argv += ["--api-key", run_key]
    runpy.run_module(MODULE, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
