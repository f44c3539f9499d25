"""Tests generated frames between the run's process and a sandbox's owner: each gets an answer or ends the sandbox."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from slime.agent.sandbox import LocalSandbox, SandboxError
from slime.agent.sandbox.channel import SandboxChannel

LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(st.characters(), max_size=4)
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
)
ANSWERS = st.fixed_dictionaries(
    {},
    optional={
        "id": st.integers(0, 4) | VALUES,
        "code": st.integers(0, 255) | VALUES,
        "reason": st.sampled_from(["", "time", "memory"]) | VALUES,
        "failed": st.text(max_size=4) | VALUES,
        "ready": st.sampled_from(["namespaces", "processes"]) | VALUES,
        "landlock": st.booleans() | VALUES,
    },
)
REQUESTS = st.fixed_dictionaries(
    {"op": st.sampled_from(["exec", "kill", "listen"]) | VALUES},
    optional={
        "id": st.integers(10**9, 10**9 + 4) | VALUES,
        "argv": st.just(["/bin/true"]) | VALUES,
        "env": st.just({}) | VALUES,
        "cwd": st.just("/") | VALUES,
        "reason": st.just("time") | VALUES,
        "port": st.integers(-1, 70_000) | VALUES,
    },
)


def frames(values: st.SearchStrategy[Any]) -> st.SearchStrategy[bytes]:
    deep = st.sampled_from([b"[" * 5000, b'{"id":' * 5000])
    return (
        (values | VALUES).map(lambda value: json.dumps(value).encode())
        | st.binary(min_size=1, max_size=40)
        | deep
    )


def test_any_frame_of_an_owner_ends_every_request(fuzz: Callable[..., None]) -> None:
    """Each request ends with its result or a SandboxError, and the event loop logs nothing."""

    async def run(case: list[tuple[bytes, int]]) -> None:
        faults: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        channel = SandboxChannel(ours)
        waiting = [("start", channel.first)]
        waiting += [(name, channel.ask(name)[1]) for name in ("exec", "listen", "exec")]
        with theirs, open(os.devnull, "rb") as null:
            for frame, count in case:
                socket.send_fds(theirs, [frame], [null.fileno()] * count)
        found = await asyncio.wait_for(
            asyncio.gather(*(one for _, one in waiting), return_exceptions=True), 10
        )
        for (name, _), answer in zip(waiting, found, strict=True):
            assert isinstance(answer, SandboxError | dict), answer
            if isinstance(answer, dict):
                for descriptor in answer["descriptors"]:
                    os.close(descriptor)
                if "failed" not in answer:
                    assert name != "exec" or (type(answer["code"]), type(answer["reason"])) == (int, str)
                    assert name != "listen" or answer["descriptors"]
                    assert name != "start" or (type(answer["ready"]), type(answer["landlock"])) == (str, bool)
        assert channel.closed and not faults, faults

    fuzz(
        lambda case: asyncio.run(run(case)),
        st.lists(st.tuples(frames(ANSWERS), st.integers(0, 1)), max_size=4),
    )


def test_any_frame_to_an_owner_is_served_or_ends_the_sandbox(fuzz: Callable[..., None]) -> None:
    """A sandbox that ended leaves nothing: its owner and its commands are gone."""
    sandbox: LocalSandbox | None = None
    loop = asyncio.new_event_loop()

    async def send(frame: bytes, streams: int) -> None:
        nonlocal sandbox
        if sandbox is None:
            sandbox = LocalSandbox()
            await sandbox.start()
        assert sandbox._channel is not None and sandbox._process is not None
        body = os.memfd_create("frame")
        with os.fdopen(body, "wb") as file, open(os.devnull, "r+b") as null:
            file.write(frame)
            file.flush()
            passed = [body] * (streams > 0) + [null.fileno()] * (streams - 1)
            socket.send_fds(sandbox._channel._socket, [b"x"], passed)
            try:
                result = await asyncio.wait_for(sandbox.exec("echo there"), 60)
                assert result.stdout == "there\n"
            except SandboxError:
                process = sandbox._process
                await asyncio.to_thread(process.wait, 30)
                await sandbox.close()
                sandbox = None

    try:
        fuzz(
            lambda case: loop.run_until_complete(send(*case)), st.tuples(frames(REQUESTS), st.integers(0, 5))
        )
    finally:
        if sandbox is not None:
            loop.run_until_complete(sandbox.close())
        loop.close()
