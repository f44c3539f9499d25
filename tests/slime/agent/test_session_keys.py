"""Tests keys of the sessions that plug-ins of slime open by a name."""

from __future__ import annotations

import asyncio
import secrets
import socket
from ipaddress import IPv4Address, ip_address
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest
from aiohttp import web

from slime.agent import session_keys
from slime.agent.adapters import AnthropicAdapter
from slime.agent.aiohttp_threaded import run_app_in_thread
from slime.agent.harness import CLAUDE_CODE
from slime.agent.sandbox import plug_ins
from slime.peers.http import get_host_info
from slime.sessions.server import SessionServer


class Conversations:
    """Sessions that answer every request."""

    def open(self, key, *, sampling, max_context_tokens): ...

    async def answer(self, key, path, request):
        return web.json_response({"key": key})

    async def drop(self, key): ...

    async def close(self): ...


class Recorder:
    """A sandbox that records each command's environment."""

    home = "home-of-agent"

    def __init__(self):
        self.commands = []

    async def exec(self, cmd, *, user="root", env=None, timeout=120, check=False):
        self.commands.append((cmd, env))
        return (0, "0", "")

    async def write_file(self, sandbox_path, content, *, user="root"): ...

    async def read_file(self, sandbox_path, *, user="root"):
        return ""


@pytest.fixture
def far():
    """Returns an address of this host other than loopback, or loopback if there is no other."""
    address = get_host_info()[1]
    if ip_address(address).is_loopback:
        pytest.skip("this host has no other address than loopback")
    return address


RANDOM = secrets.token_hex(32)


def test_keys_of_sessions_cannot_be_guessed(far):
    """The guesses are an index, a plug-in's own name, the key of an earlier session, and a key that is not UTF-8."""
    adapter = AnthropicAdapter(tokenizer=None, sglang_url="http://x", sessions=Conversations())
    handle = run_app_in_thread(adapter.app, host=str(IPv4Address(0)), port=0)

    def ask(host, key):
        with socket.create_connection((host, handle.port), timeout=10) as connection:
            head = b"POST /v1/messages HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nConnection: close\r\n"
            connection.sendall(head + b"x-api-key: " + key + b"\r\n\r\n{}")
            return int(connection.makefile("rb").readline().split()[1])

    async def main():
        names = ["rollout/3", "evaluation/x/4", "rollout/5/critic", "mine", RANDOM]
        keys = [adapter.open_session(name).encode() for name in names]
        assert len({*keys}) == len(names) and all(len(key) >= 43 for key in keys)
        found = {
            host: [await asyncio.to_thread(ask, host, name.encode()) for name in names]
            for host in (far, "127.0.0.1")
        }
        assert found == {far: [401, 401, 401, 401, 200], "127.0.0.1": [401, 401, 401, 200, 200]}
        for key in keys:
            assert await asyncio.to_thread(ask, far, key) == 200
        for wrong in (b"\xff\xfe", b"", keys[0][:-1], keys[0] + b"x"):
            assert await asyncio.to_thread(ask, far, wrong) == 401
        await adapter.drop_session("rollout/3")
        assert await asyncio.to_thread(ask, far, keys[0]) == 503
        again = adapter.open_session("rollout/3").encode()
        assert [await asyncio.to_thread(ask, far, key) for key in (keys[0], again)] == [401, 200]

    try:
        asyncio.run(main())
    finally:
        handle.stop()


def test_a_harness_gives_the_agent_the_key_of_its_session(monkeypatch):
    monkeypatch.setattr(plug_ins, "POLL_S", 0.01)
    adapter = AnthropicAdapter(tokenizer=None, sglang_url="http://x", sessions=Conversations())
    keys = [adapter.open_session("rollout/3")]
    boxes = []

    async def main():
        for again in (True, False):
            boxes.append(Recorder())
            at = {"adapter_url": "http://10.0.0.1:1", "workdir": "/repo"}
            await CLAUDE_CODE.run(boxes[-1], session_id="rollout/3", time_budget_sec=5, prompt="p", **at)
            if again:
                await adapter.drop_session("rollout/3")
                keys.append(adapter.open_session("rollout/3"))
        await adapter.drop_session("rollout/3")

    asyncio.run(main())
    shown = [next(env for _, env in box.commands if env)["ANTHROPIC_AUTH_TOKEN"] for box in boxes]
    assert shown == keys and keys[0] != keys[1]
    assert session_keys.key_for("rollout/3") == "rollout/3"  # no session has it now


def test_the_server_of_sessions_refuses_a_key_that_is_not_utf8():
    """A wrong key, and the key of another session, also get 401."""
    own, other = (
        SimpleNamespace(id=name, api_key=secrets.token_urlsafe(32), url="", wrong_keys=0) for name in "ab"
    )

    def ask(port, path, header, key):
        with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
            head = f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{header}".encode()
            connection.sendall(head + key + b"\r\n\r\n")
            return int(connection.makefile("rb").readline().split()[1])

    async def main():
        server = SessionServer()
        await server.start()
        try:
            server.add(own)
            server.add(other)
            port, good = urlsplit(server.url).port, own.api_key.encode()
            for header in ("Authorization: Bearer ", "x-api-key: "):
                assert await asyncio.to_thread(ask, port, "/sessions/a/v1/models", header, good) == 200
                for key in (b"\xff\xfe", b"\xed\xa0\x80", "é".encode(), b"", other.api_key.encode()):
                    assert await asyncio.to_thread(ask, port, "/sessions/a/v1/models", header, key) == 401
            for name in ("%ff", "c", "%00"):
                assert await asyncio.to_thread(ask, port, f"/sessions/{name}/v1/models", header, good) == 401
        finally:
            await server.stop()

    asyncio.run(main())
