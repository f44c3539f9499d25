"""Tests sessions that answer on an address of this host that other machines reach (--session-host)."""

from __future__ import annotations

import asyncio
import socket
import subprocess
from ipaddress import IPv4Address
from urllib.parse import urlsplit

import aiohttp
import pytest
from session_double import converse

from slime.agent.harness import run_agent
from slime.agent.sandbox import LocalSandbox
from slime.peers.http import get_host_info
from slime.sessions import listener
from slime.sessions.server import SessionServer

ANY = str(IPv4Address(0))
"""All interfaces of this host."""


def host_address():
    """An address of this host beyond loopback."""
    said = subprocess.run(["hostname", "-I"], capture_output=True, text=True).stdout.split()
    found = [address for address in said if ":" not in address]
    if not found:
        pytest.skip("this host has no address beyond loopback")
    return found[0]


async def ask(session, host, key=None, **more):
    """Returns the status of a request to the session at `host`, with its answer."""
    port = urlsplit(session.url).port
    url = f"http://{host}:{port}{urlsplit(session.url).path}/v1/chat/completions"
    body = {"model": "policy", "messages": [{"role": "user", "content": "a"}], **more}
    headers = {"Authorization": f"Bearer {session.api_key if key is None else key}"}
    async with aiohttp.ClientSession() as client, client.post(url, json=body, headers=headers) as answer:
        return answer.status, await answer.json()


@pytest.mark.parametrize("flag", ["address", "auto", ANY])
def test_an_agent_on_another_machine_reaches_its_session(flag):
    address = host_address()
    own = get_host_info()[1]
    seen = []

    async def agent(session):
        shown = urlsplit(session.base_url).hostname
        seen.append(shown)
        assert shown == (address if flag == "address" else own)
        assert (await ask(session, address, key="wrong"))[0] == 401
        status, answer = await ask(session, address)
        assert status == 200 and answer["choices"][0]["message"]["content"]
        if flag != ANY:
            with pytest.raises(aiohttp.ClientConnectorError):
                await ask(session, "127.0.0.1")

    samples, _ = converse(
        agent, lambda prompt: "yes<|im_end|>", session_host=address if flag == "address" else flag
    )
    assert seen and samples[0].metadata["session"]["turns"] == 1


def test_sessions_answer_on_loopback_by_default():
    async def agent(session):
        assert urlsplit(session.url).hostname == "127.0.0.1"
        with pytest.raises(aiohttp.ClientConnectorError):
            await ask(session, host_address())
        assert (await ask(session, "127.0.0.1"))[0] == 200

    converse(agent, lambda prompt: "yes<|im_end|>")


def test_an_address_of_another_machine_is_an_error():
    async def agent(session): ...

    with pytest.raises(
        ValueError, match="--session-host must be an address of the rollout manager's host, got '192"
    ):
        converse(agent, str, session_host="192.0.2.7")


def test_a_program_reaches_the_session_from_a_sandbox_with_the_hosts_network():
    address = host_address()
    program = """
import json, os, urllib.request
body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": "a"}]}).encode()
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
print(os.environ["OPENAI_BASE_URL"], urllib.request.urlopen(request).status)
"""

    async def agent(session):
        async with LocalSandbox(network="host") as sandbox:
            await sandbox.write_file("ask.py", program)
            command = "/usr/bin/python3 ask.py"
            result = await run_agent(sandbox, command, base_url=session.base_url, api_key=session.api_key)
            assert result.stdout.split() == [
                f"http://{address}:{urlsplit(session.url).port}{urlsplit(session.url).path}/v1",
                "200",
            ], result.stderr
        async with LocalSandbox(network="loopback") as sandbox:
            if sandbox.isolation == "namespaces":
                with pytest.raises(ValueError, match="--session-host"):
                    await run_agent(sandbox, "true", base_url=session.base_url, api_key=session.api_key)

    converse(agent, lambda prompt: "yes<|im_end|>", session_host=address)


def closed_within(connection, seconds):
    connection.settimeout(seconds)
    try:
        return connection.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


def test_connections_without_a_key_are_bounded_in_number_and_time(monkeypatch):
    """The oldest connection without a key is closed for a new one. A connection with a key stays."""
    monkeypatch.setattr(listener, "CONNECTIONS", 3)
    monkeypatch.setattr(listener, "PER_SESSION", 0)

    async def agent(session):
        port = urlsplit(session.url).port

        def connect():
            return socket.create_connection(("127.0.0.1", port), timeout=10)

        known = await asyncio.to_thread(connect)
        head = f"GET {urlsplit(session.url).path}/v1/models HTTP/1.1\r\nHost: x\r\nx-api-key: {session.api_key}\r\n\r\n"
        known.sendall(head.encode())
        assert b"200 OK" in await asyncio.to_thread(known.recv, 4096)
        idle = []
        for _ in range(3):
            idle.append(await asyncio.to_thread(connect))
            await asyncio.sleep(0.05)
        assert await asyncio.to_thread(closed_within, idle[0], 5)
        assert not await asyncio.to_thread(closed_within, idle[2], 0.2)
        known.sendall(head.encode())
        assert b"200 OK" in await asyncio.to_thread(known.recv, 4096)
        monkeypatch.setattr(listener, "UNKNOWN_S", 0.1)
        late = await asyncio.to_thread(connect)
        late.sendall(b"GET / HTTP/1.1\r\n")
        assert await asyncio.to_thread(closed_within, late, 5)
        for each in (known, late, *idle):
            each.close()

    converse(agent, lambda prompt: "yes<|im_end|>")


def test_a_server_whose_connections_all_have_keys_takes_no_more(monkeypatch):
    monkeypatch.setattr(listener, "CONNECTIONS", 1)
    monkeypatch.setattr(listener, "PER_SESSION", 0)

    async def agent(session):
        async with aiohttp.ClientSession() as client:
            headers = {"x-api-key": session.api_key}
            async with client.get(f"{session.base_url}/models", headers=headers) as answer:
                assert answer.status == 200
            other = await asyncio.to_thread(
                socket.create_connection, ("127.0.0.1", urlsplit(session.url).port), 10
            )
            assert await asyncio.to_thread(closed_within, other, 5)
            other.close()
            async with client.get(f"{session.base_url}/models", headers=headers) as answer:
                assert answer.status == 200

    converse(agent, lambda prompt: "yes<|im_end|>")


def test_a_server_can_be_stopped_before_it_listens():
    asyncio.run(SessionServer().stop())
