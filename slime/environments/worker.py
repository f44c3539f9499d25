"""The process of an environment: `python -P worker.py`. It reads calls from stdin and writes answers to stdout.

Each line is a JSON object. The first line has the connector's file, and the environment's name and arguments. Other
lines have `id`, `call` and `values`. An answer has the id, and `result` or `error`. Text that an environment prints
goes to stderr. The process ends when stdin ends, and it ends the processes that the environment has started.

This file runs in the Python of the hub's package. It imports the standard library only.
"""

import asyncio
import importlib.util
import json
import os
import re
import signal
import sys
import threading
from typing import TextIO, TypedDict


class Setup(TypedDict):
    """The first line."""

    file: str
    name: str
    arguments: dict[str, object]
    module: str
    """The module of the hub's package, or "" for none."""
    python: list[int]
    """The oldest Python that runs the package."""


_CLOSE_S = 15.0
"""Seconds in which an environment must close its servers after stdin has ended."""
_LONGEST = 800
"""Maximum number of characters of an error."""


def one_line(error: BaseException) -> str:
    """Returns the type and the text of an error in one line."""
    text = re.sub(r"\s+", " ", f"{type(error).__name__}: {error}").strip()
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def lacking(setup: Setup) -> dict[str, str] | None:
    """Returns the error of a Python that cannot run the connector, or None."""
    version = ".".join(map(str, sys.version_info[:2]))
    if sys.version_info[:2] < tuple(setup["python"]):
        return {"python": version}
    try:
        found = not setup["module"] or importlib.util.find_spec(setup["module"]) is not None
    except (ImportError, ValueError):
        found = False
    return None if found else {"package": version}


def load_connector(setup: Setup) -> object:
    """Returns the connector of the environment, from its file."""
    spec = importlib.util.spec_from_file_location(
        f"vime_{os.path.basename(setup['file'])[:-3]}", setup["file"]
    )
    assert spec is not None and spec.loader is not None, "a .py file has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    connector: object = module.Connector(setup["name"], setup["arguments"])
    return connector


class EpisodeWorker:
    """Answers calls with the methods of a connector, all in one event loop."""

    def __init__(self, calls: TextIO, out: TextIO) -> None:
        self.calls, self.out = calls, out
        self.tasks: dict[int, asyncio.Future[None]] = {}
        self.connector: object = None

    def send(self, message: dict[str, object]) -> None:
        self.out.write(json.dumps(message, allow_nan=True) + "\n")
        self.out.flush()

    async def answer(self, number: int, call: str, values: dict[str, object]) -> None:
        try:
            result = await getattr(self.connector, call)(**values)
            line: dict[str, object] = {"id": number, "result": result}
            json.dumps(line)
        except asyncio.CancelledError:
            line = {"id": number, "error": "CancelledError: the run has ended the call"}
        except BaseException as error:  # border: code of the environment may raise any error, and SystemExit
            line = {"id": number, "error": one_line(error)}
        self.send(line)

    def take(self, line: str) -> None:
        """Starts or cancels a call. Runs in the event loop."""
        message = json.loads(line)
        number = message["id"]
        if message["call"] == "cancel":
            if number in self.tasks:
                self.tasks[number].cancel()
            return
        task = asyncio.ensure_future(self.answer(number, message["call"], message["values"]))
        self.tasks[number] = task
        task.add_done_callback(lambda _: self.tasks.pop(number, None))

    async def serve(self, setup: Setup) -> None:
        """Loads the connector, and answers calls until stdin ends."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        try:
            self.connector = load_connector(setup)
        except BaseException as error:  # border: code of the environment may raise any error, and SystemExit
            self.send({"id": 0, "error": one_line(error)})
            return
        self.send({"id": 0, "result": None})

        def read() -> None:
            for line in self.calls:
                loop.call_soon_threadsafe(self.take, line)
            threading.Timer(_CLOSE_S, end_all).start()  # the environment's code may block the loop
            loop.call_soon_threadsafe(ended.set)

        threading.Thread(target=read, daemon=True).start()
        await ended.wait()
        for task in list(self.tasks.values()):
            task.cancel()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)
        await getattr(self.connector, "close")()  # noqa: B009


def end_all() -> None:
    """Ends this process and those that the environment has started. `start_new_session` made their group."""
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpgrp(), signal.SIGKILL)
    os._exit(1)


def main() -> None:
    calls, out = os.fdopen(os.dup(0), encoding="utf-8"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    # An environment must not read the calls, and its printed text must not become an answer. exit() closes sys.stdin.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the run ends this process
    setup = json.loads(calls.readline())
    worker = EpisodeWorker(calls, out)
    lacks = lacking(setup)
    if lacks is not None:
        worker.send({"id": 0, "lacks": lacks})
        return
    try:
        asyncio.run(worker.serve(setup))
    finally:
        end_all()


if __name__ == "__main__":
    main()
