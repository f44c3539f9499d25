"""Tests the command lines for a container's engine, with a stand-in that runs `exec` on this host. No real engine
runs."""

from __future__ import annotations

import asyncio
import json
import sys
import time

import pytest

from slime.agent.sandbox import ContainerSandbox, Limits, Sandbox, SandboxError

ENGINE = """
import json, os, sys
words = sys.argv[1:]
with open({record!r}, "a") as file:
    file.write(json.dumps([words, os.environ.get("KEY", "")]) + "\\n")
if words[0] == "run" and "missing" in words:
    sys.exit("no such image")
if words[0] == "exec":
    at = next(i for i, word in enumerate(words) if word.startswith("vime-"))
    os.chdir({folder!r})
    os.execvp(words[at + 1], words[at + 1:])
"""


@pytest.fixture
def engine(tmp_path):
    (tmp_path / "box").mkdir()
    record = tmp_path / "record"
    record.touch()
    program = tmp_path / "engine.py"
    program.write_text(ENGINE.format(record=str(record), folder=str(tmp_path / "box")))
    return (sys.executable, "-S", str(program)), lambda: [json.loads(line) for line in record.open()]


def run(engine, body, **settings):
    async def main():
        async with ContainerSandbox("image", engine=engine[0], workdir="/repo", **settings) as sandbox:
            assert isinstance(sandbox, Sandbox)
            await body(sandbox)
            return sandbox.sandbox_id

    return asyncio.run(main())


def test_the_container_has_the_limits_and_no_network(engine):
    async def body(sandbox):
        result = await sandbox.exec("echo $KEY; cat; exit 3", env={"KEY": "hush"}, user="agent", stdin="in")
        assert tuple(result) == (3, "hush\nin", "")

    limits = Limits(memory_bytes=1000, processes=7, open_files=9, disk_bytes=11, tmp_bytes=13)
    name = run(engine, body, limits=limits)
    (start, _), (command, key), (end, _) = engine[1]()
    assert start == [
        *("run", "--detach", "--rm", "--init", "--name", name, "--network", "none"),
        *("--memory", "1000", "--memory-swap", "1000", "--pids-limit", "7"),
        *("--security-opt", "no-new-privileges", "--ulimit", "nofile=9", "--ulimit", "fsize=11"),
        *("--ulimit", "core=0", "--shm-size", "13", "--entrypoint", "sleep", "image", "infinity"),
    ]
    assert command[:8] == ["exec", "--interactive", "--user", "agent", "--workdir", "/repo", "--env", "KEY"]
    assert key == "hush" and not any("hush" in word for word in command)
    assert end == ["rm", "--force", name]


def test_files_go_in_and_out(engine, tmp_path):
    (tmp_path / "source/sub").mkdir(parents=True)
    (tmp_path / "source/sub/file").write_text("words")

    async def body(sandbox):
        await sandbox.write_file("a/b", b"bytes")
        assert await sandbox.read_file("a/b") == "bytes"
        assert await sandbox.read_file("none") == ""
        await sandbox.upload(tmp_path / "source", "up")
        await sandbox.exec("ln -s /etc/passwd up/link")
        assert await sandbox.download("up", tmp_path / "down") == 1

    run(engine, body)
    assert [path.name for path in (tmp_path / "down").rglob("*")] == ["sub", "file"]


@pytest.mark.parametrize(
    ("command", "timeout", "reason"), [("yes", 20, "output"), ("trap '' TERM; sleep 60", 0.5, "time")]
)
def test_a_limit_ends_the_command_in_the_container(engine, command, timeout, reason):
    async def body(sandbox):
        before = time.monotonic()
        result = await sandbox.exec(command, timeout=timeout)
        assert result.reason == reason and time.monotonic() - before < 10

    run(engine, body, limits=Limits(output_bytes=10_000))
    assert any("kill -9" in words[-1] for words, _ in engine[1]())


def test_an_engine_that_refuses_is_quoted(engine):
    slots = asyncio.Semaphore(1)
    with pytest.raises(SandboxError, match="no such image"):
        asyncio.run(ContainerSandbox("missing", engine=engine[0], slots=slots).start())
    assert not slots.locked()
