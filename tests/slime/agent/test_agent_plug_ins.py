"""Tests the names that slime's plug-ins import below slime.agent, used as the plug-ins use them."""

from __future__ import annotations

import asyncio
import sys

import aiohttp
import pytest
from aiohttp import web

from slime.agent.adapters import AnthropicAdapter, OpenAIAdapter
from slime.agent.adapters.anthropic import AnthropicAdapter as SameAdapter
from slime.agent.aiohttp_threaded import FilteredAccessLogger, run_app_in_thread
from slime.agent.harness import CLAUDE_CODE, CODEX, run_agent
from slime.agent.harness.common import BaseHarness, HarnessContext
from slime.agent.sandbox import (
    EXIT_TIME_BUDGET_EXCEEDED,
    ContainerSandbox,
    E2BSandbox,
    LocalSandbox,
    Sandbox,
    SandboxError,
    e2b,
    ensure_agent_user,
    exec_and_wait,
    make_sandbox,
    plug_ins,
)
from slime.types import Sample

CLIENT = """
import json, os, sys, urllib.request
for kind, path in (("OPENAI", "/chat/completions"), ("ANTHROPIC", "/v1/messages")):
    base, key = os.environ[kind + "_BASE_URL"], os.environ[kind + "_API_KEY"]
    ask = urllib.request.Request(base + path, b"{}", {"Authorization": "Bearer " + key})
    print(urllib.request.urlopen(ask).read().decode(), sys.argv[1:])
"""


class Conversations:
    """Sessions that answer with their key."""

    def __init__(self):
        self.opened, self.answered, self.dropped, self.delay_s = {}, [], [], 0.0

    def open(self, key, *, sampling, max_context_tokens):
        self.opened[key] = (sampling, max_context_tokens)

    async def answer(self, key, path, request):
        await asyncio.sleep(self.delay_s)
        self.answered.append((key, path))
        return web.json_response({"key": key, "path": path})

    async def finish(self, key, base_sample):
        return [Sample(prompt=base_sample.prompt, metadata={"turns": len(self.answered)})]

    async def drop(self, key):
        self.dropped.append(key)

    async def close(self):
        self.closed = True


def served(adapter):
    return run_app_in_thread(
        adapter.app,
        host="127.0.0.1",
        port=0,
        thread_name="adapter",
        runner_kwargs={"handler_cancellation": True, "access_log_class": FilteredAccessLogger},
    )


class Both(OpenAIAdapter):
    paths = (*OpenAIAdapter.paths, *AnthropicAdapter.paths)


@pytest.mark.parametrize("isolation", ["auto", "processes"])
def test_a_program_in_a_sandbox_talks_to_its_session(isolation):
    conversations = Conversations()
    adapter = Both(tokenizer=None, sglang_url="http://127.0.0.1:1/", sessions=conversations)
    handle = served(adapter)

    async def main():
        adapter.open_session("key-1", sampling_defaults={"temperature": 1.0}, max_context_tokens=100)
        async with LocalSandbox(isolation=isolation, network="loopback") as sandbox:
            await sandbox.write_file("agent.py", CLIENT)
            url = f"http://127.0.0.1:{handle.port}/v1"
            result = await run_agent(sandbox, "/usr/bin/python3 agent.py x", base_url=url, api_key="key-1")
            assert result.exit_code == 0, result.stderr
            wrong = await run_agent(sandbox, "/usr/bin/python3 agent.py", base_url=url, api_key="key-2")
            assert "HTTP Error 401" in wrong.stderr
            late = await run_agent(sandbox, "sleep 60", base_url=url, api_key="key-1", time_s=0.3)
            assert late.timed_out
        sample = Sample(prompt="p")
        samples = await adapter.finish_session(
            "key-1", base_sample=sample, reward=0.5, extra_metadata={"a": 1}
        )
        assert [(s.reward, s.metadata) for s in samples] == [(0.5, {"turns": 2, "a": 1})]
        assert await adapter.finish_session("key-1", base_sample=sample) == []

    try:
        asyncio.run(main())
    finally:
        handle.stop()
    assert conversations.answered == [("key-1", "chat/completions"), ("key-1", "messages")]
    assert conversations.opened == {"key-1": ({"temperature": 1.0}, 100)}


def test_an_adapter_keeps_the_life_of_its_sessions():
    conversations = Conversations()
    adapter = AnthropicAdapter(
        tokenizer=None, sglang_url="http://x", sessions=conversations, max_turns_per_sid=1
    )
    handle = served(adapter)
    url = f"http://127.0.0.1:{handle.port}"

    async def post(client, key):
        async with client.post(f"{url}/v1/messages", json={}, headers={"x-api-key": key}) as response:
            return response.status

    async def main():
        async with aiohttp.ClientSession() as client:
            async with client.get(f"{url}/healthz") as response:
                assert response.status == 200
            adapter.open_session("a")
            with pytest.raises(ValueError, match="must be new"):
                adapter.open_session("a")
            assert [await post(client, key) for key in ("a", "a", "b")] == [200, 429, 401]
            adapter.open_session("c")
            conversations.delay_s = 60
            slow = asyncio.create_task(post(client, "c"))
            while not adapter.inflight.get("c"):
                await asyncio.sleep(0.01)
            await adapter.drop_session("c", wait_timeout=0.1)
            with pytest.raises(aiohttp.ClientError):
                await slow
            assert await post(client, "c") == 503
            adapter.open_session("c")  # as for a group that is drawn again
            conversations.delay_s = 0
            assert await post(client, "c") == 200

    try:
        asyncio.run(main())
    finally:
        handle.stop()
    assert conversations.dropped == ["c"] and conversations.closed


def test_an_adapter_without_a_rollout_says_what_is_missing(monkeypatch):
    monkeypatch.setattr("slime.rollout.state._entered", [])
    adapter = SameAdapter(tokenizer=None, sglang_url="http://x", tool_parser="qwen25", reasoning_parser=None)
    with pytest.raises(RuntimeError, match="while a rollout runs"):
        adapter.open_session("a")
    with pytest.raises(ValueError, match="debug_callback"):
        OpenAIAdapter(tokenizer=None, sglang_url="http://x", debug_callback=print)


def test_a_port_that_is_taken_is_raised_by_the_start():
    first = run_app_in_thread(web.Application())
    with pytest.raises(OSError, match="in use"):
        run_app_in_thread(web.Application(), port=first.port)
    first.stop()
    assert not first.thread.is_alive()


def test_exec_and_wait_gives_code_and_output():
    async def main():
        async with LocalSandbox() as sandbox:
            await ensure_agent_user(sandbox, sandbox.workdir)
            await sandbox.exec("mkdir sub")
            call = dict(user="agent", tag="t", time_budget_sec=20, want_output=True)
            cmd = "echo $A; pwd; echo bad >&2\n(exit 3)"
            code, out = await exec_and_wait(
                sandbox, cmd=cmd, env={"A": "b"}, workdir=f"{sandbox.workdir}/sub", **call
            )
            assert (code, out) == (3, f"b\n{sandbox.workdir}/sub\nbad\n")
            code, out = await exec_and_wait(sandbox, cmd="echo x", out_file="o.txt", **call)
            assert (code, out) == (0, "x\n")
            code, out = await exec_and_wait(sandbox, cmd="sleep 60", tag="t", time_budget_sec=0.3)
            assert (code, out) == (EXIT_TIME_BUDGET_EXCEEDED, "")

    asyncio.run(main())


class Elsewhere:
    """A plug-in's sandbox on top of a local sandbox, whose connection ends early. Its /tmp is the local sandbox's own
    folder for temporary files, because a command without bubblewrap cannot read in /tmp (docs/security.md)."""

    sandbox_id = "elsewhere"

    def __init__(self, image="", timeout=None):
        self.image, self.inner = image, LocalSandbox()

    async def __aenter__(self):
        await self.inner.start()
        return self

    async def __aexit__(self, *error):
        await self.inner.close()

    async def exec(self, cmd, *, user="root", env=None, timeout=120, check=False):
        return await self.inner.exec(self.inside(cmd), env=env, timeout=min(timeout, 1), check=check)

    async def write_file(self, sandbox_path, content, *, user="root"):
        await self.inner.exec(f"cat > {self.inside(sandbox_path)}", stdin=content, check=True)

    async def read_file(self, sandbox_path, *, user="root"):
        return (await self.inner.exec(f"cat {self.inside(sandbox_path)}")).stdout

    def inside(self, text):
        return text.replace("/tmp/", f"{self.inner.folder}/tmp/")


def test_exec_and_wait_outlives_a_connection_that_ends_early(monkeypatch):
    monkeypatch.setattr(plug_ins, "POLL_S", 0.2)

    async def main():
        async with Elsewhere() as sandbox:
            call = dict(tag="t", want_output=True)
            cmd = "sleep 1.5; echo done; (exit 4)"
            assert await exec_and_wait(sandbox, cmd=cmd, time_budget_sec=30, **call) == (4, "done\n")
            code, _ = await exec_and_wait(sandbox, cmd="sleep 30", time_budget_sec=0.5, **call)
            assert code == EXIT_TIME_BUDGET_EXCEEDED

    asyncio.run(main())


def test_make_sandbox_reads_the_environment(monkeypatch):
    monkeypatch.setenv(plug_ins.BACKEND, "podman")
    made = make_sandbox("image", timeout=60)
    assert isinstance(made, ContainerSandbox) and made.engine == ("podman",) and made.image == "image"
    monkeypatch.setenv(plug_ins.BACKEND, "local")
    assert isinstance(make_sandbox("image"), LocalSandbox)
    monkeypatch.setenv(plug_ins.BACKEND, f"{__name__}.Elsewhere")
    other = make_sandbox("image")
    assert isinstance(other, Sandbox) and other.image == "image"
    monkeypatch.setenv(plug_ins.BACKEND, "e2b")
    service = make_sandbox("image", timeout=60)
    assert isinstance(service, E2BSandbox) and service.timeout == 60
    for wrong in ("", "kubernetes"):
        monkeypatch.setenv(plug_ins.BACKEND, wrong)
        with pytest.raises(ValueError, match="must be docker, podman, e2b, local or"):
            make_sandbox("image")


class Service:
    """A stand-in for the package `e2b` on top of a local sandbox. `calls` records the calls of its AsyncSandbox."""

    class SandboxException(Exception): ...

    class TimeoutException(SandboxException): ...

    class NotFoundException(SandboxException): ...

    class CommandExitException(SandboxException):
        def __init__(self, code, stdout, stderr):
            self.exit_code, self.stdout, self.stderr = code, stdout, stderr

    def __init__(self):
        self.calls, self.local = [], LocalSandbox()
        self.AsyncSandbox = self.commands = self.files = self
        self.sandbox_id = "sb-1"

    async def create(self, template=None, timeout=None, metadata=None):
        self.calls.append((template, timeout, metadata))
        await self.local.start()
        return self

    async def kill(self):
        await self.local.close()

    async def run(self, cmd, background=None, envs=None, user=None, cwd=None, timeout=60):
        if cmd == "lost":
            raise self.SandboxException("the sandbox is gone")
        result = await self.local.exec(cmd, env=envs, timeout=timeout, cwd=cwd)
        if result.timed_out:
            raise self.TimeoutException("late")
        if result.exit_code:
            raise self.CommandExitException(*result)
        return self.CommandExitException(*result)

    async def write(self, path, data, user=None, request_timeout=None):
        await self.local.write_file(path, data)

    async def read(self, path, user=None):
        if not (text := await self.local.read_file(path)):
            raise self.NotFoundException(path)
        return text


def test_an_e2b_sandbox_speaks_to_the_package(monkeypatch):
    async def main():
        with pytest.raises(ValueError, match="pip install e2b"):
            await E2BSandbox("image").__aenter__()
        service = Service()
        monkeypatch.setitem(sys.modules, "e2b", service)
        monkeypatch.setenv(e2b.IMAGE_KEY, "image-of")
        async with E2BSandbox("image", timeout=60) as sandbox:
            assert isinstance(sandbox, Sandbox) and sandbox.sandbox_id == "sb-1"
            await sandbox.write_file("a.txt", b"text")
            assert await sandbox.read_file("a.txt") == "text" and await sandbox.read_file("b") == ""
            assert await sandbox.exec("echo $A", env={"A": "1"}) == (0, "1\n", "")
            assert await sandbox.exec("echo bad >&2; exit 3") == (3, "", "bad\n")
            with pytest.raises(RuntimeError, match="exit=3"):
                await sandbox.exec("exit 3", check=True)
            assert (await sandbox.exec("sleep 60", timeout=0.3)).timed_out
            with pytest.raises(SandboxError, match="is gone"):
                await sandbox.exec("lost")
        with pytest.raises(SandboxError, match="must run"):
            await sandbox.exec("true")
        monkeypatch.delenv(e2b.IMAGE_KEY)
        async with E2BSandbox("template"):
            pass
        assert service.calls == [(None, 60, {"image-of": "image"}), ("template", 3600, None)]

    asyncio.run(main())


class Recorder(Elsewhere):
    """A sandbox that runs nothing."""

    single_user = True
    home = "home-of-agent"

    def __init__(self):
        self.commands, self.files = [], {}

    async def exec(self, cmd, *, user="root", env=None, timeout=120, check=False):
        self.commands.append((cmd, env))
        return (0, "0", "")

    async def write_file(self, sandbox_path, content, *, user="root"):
        self.files[sandbox_path] = content

    async def read_file(self, sandbox_path, *, user="root"):
        return ""


def test_claude_code_and_codex_get_their_address_key_and_prompt(monkeypatch):
    monkeypatch.setattr(plug_ins, "POLL_S", 0.01)
    for harness in (CLAUDE_CODE, CODEX):
        assert isinstance(harness, BaseHarness)
        box = Recorder()
        code = asyncio.run(
            harness.run(
                box,
                workdir="/repo",
                session_id="key",
                adapter_url="http://10.0.0.1:18001",
                time_budget_sec=5,
                prompt="it's",
            )
        )
        env = next(env for _, env in box.commands if env)
        script = box.files["/tmp/harness.sh"]
        assert code == 0 and "cd /repo" in script and "'it'\"'\"'s'" in script
        if harness is CLAUDE_CODE:
            assert script.count("claude -p") == 1
            assert env["ANTHROPIC_BASE_URL"] == "http://10.0.0.1:18001"
            assert env["ANTHROPIC_AUTH_TOKEN"] == "key" and "ANTHROPIC_API_KEY" not in env
            assert env["ANTHROPIC_MODEL"] == HarnessContext("", "", "").model_label
            assert "home-of-agent/.claude/settings.json" in box.files
        else:
            assert "codex exec" in script and env["OPENAI_API_KEY"] == "key"
            config = box.files["home-of-agent/.codex/config.toml"]
            assert 'base_url = "http://10.0.0.1:18001/v1"' in config


def test_a_harness_installs_only_what_is_not_there(monkeypatch, tmp_path):
    async def main():
        async with LocalSandbox() as sandbox:
            with pytest.raises(ValueError, match="SLIME_AGENT_CC_TARBALL"):
                await CLAUDE_CODE.install_cli(sandbox)
        box = Recorder()
        await CODEX.install_cli(box)
        assert len(box.commands) == 1 and not box.files

    monkeypatch.delenv("SLIME_AGENT_CC_TARBALL", raising=False)
    asyncio.run(main())


def test_an_address_without_a_port_is_refused():
    async def main():
        async with LocalSandbox(network="loopback") as sandbox:
            with pytest.raises(ValueError, match="with its port"):
                await run_agent(sandbox, "true", base_url="http://localhost/v1", api_key="k")

    asyncio.run(main())
