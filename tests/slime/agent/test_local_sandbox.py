"""Tests commands and files of a local sandbox."""

from __future__ import annotations

import asyncio
import os
import time

import pytest
from sandbox_cases import SMALL, left_behind, run

from slime.agent.sandbox import Limits, LocalSandbox, SandboxError
from slime.agent.sandbox.channel import CommandOutput


def test_a_command_gives_its_exit_code_and_both_streams(isolation):
    async def body(sandbox):
        assert isinstance(sandbox.sandbox_id, str)
        result = await sandbox.exec("cat; echo oops >&2; pwd; exit 3", stdin="hello\n", env={"A": "b c"})
        code, out, err = result
        assert (code, out, err) == (3, f"hello\n{sandbox.workdir}\n", "oops\n")
        assert (result.reason, result.timed_out, result.truncated) == ("", False, False)
        assert (await sandbox.exec('echo "$A"', env={"A": "b c"})).stdout == "b c\n"
        with pytest.raises(RuntimeError, match=r"exit=7"):
            await sandbox.exec("exit 7", check=True)
        await sandbox.exec("mkdir deep")
        assert (await sandbox.exec("pwd", cwd="deep")).stdout == f"{sandbox.workdir}/deep\n"
        # A background process lives on between commands, as agents' servers need.
        await sandbox.exec("sleep 0.3 && echo ready > flag &")
        await asyncio.sleep(0.6)
        assert await sandbox.read_file("flag") == "ready\n"

    run(isolation, body)


@pytest.mark.parametrize("count", [20, pytest.param(64, marks=pytest.mark.slow)])
def test_more_sandboxes_than_slots_at_once(isolation, count):
    async def one(slots, number):
        async with LocalSandbox(isolation=isolation, limits=SMALL, slots=slots) as sandbox:
            return (await sandbox.exec(f"echo {number} > file; cat file")).stdout

    async def main():
        slots = asyncio.Semaphore(16)
        return await asyncio.gather(*(one(slots, number) for number in range(count)))

    assert asyncio.run(main()) == [f"{number}\n" for number in range(count)]


def test_a_cancelled_command_ends(isolation):
    async def body(sandbox):
        name = f"cancelled-{sandbox.sandbox_id}"
        task = asyncio.create_task(sandbox.exec(f"exec -a {name} sleep 100"))
        while not left_behind(name):
            await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        end = time.monotonic() + 10
        while left_behind(name) and time.monotonic() < end:
            await asyncio.sleep(0.05)
        assert not left_behind(name)
        assert (await sandbox.exec("echo on")).stdout == "on\n"

    run(isolation, body)


def test_a_closed_sandbox_says_so():
    async def main():
        sandbox = LocalSandbox()
        with pytest.raises(SandboxError, match="must run before"):
            await sandbox.exec("true")
        async with sandbox:
            pass
        await sandbox.close()
        with pytest.raises(SandboxError, match="must run before"):
            await sandbox.read_file("x")

    asyncio.run(main())


@pytest.mark.skipif(os.getuid() != 0, reason="sandboxes of other users run as this user, who owns the folder")
def test_a_folder_that_is_closed_to_the_sandbox_is_refused(tmp_path):
    """Without namespaces, every command failed in such a folder."""
    closed = tmp_path / "closed"
    closed.mkdir(0o700)
    with pytest.raises(SandboxError, match="must lie where other users may enter, got .*closed to them"):
        asyncio.run(LocalSandbox(isolation="processes", folder=closed).start())
    assert not any(closed.iterdir())


def test_output_that_a_busy_event_loop_has_not_read_is_kept(monkeypatch):
    """The loop reads nothing here, as if it were busy until the grace period has passed."""
    make_pipe = CommandOutput.pipe

    async def pipe(self):
        writer, stream = await make_pipe(self)
        stream.transport.pause_reading()
        return writer, stream

    monkeypatch.setattr(CommandOutput, "pipe", pipe)
    monkeypatch.setattr("slime.agent.sandbox.local._GRACE_S", 0.01)

    async def main():
        async with LocalSandbox() as sandbox:
            return await sandbox.exec("echo there; echo wrong >&2")

    done = asyncio.run(main())
    assert (done.stdout, done.stderr) == ("there\n", "wrong\n")


def test_limits_must_be_positive():
    with pytest.raises(ValueError, match="processes must be positive, got 0"):
        Limits(processes=0)


@pytest.mark.parametrize(
    "path", ["../x", "/etc/passwd", "a/../../x", "{folder}/../x", "..", "{folder}x/y", "a\0b"]
)
def test_a_path_that_leads_out_is_refused(isolation, path):
    async def body(sandbox):
        name = path.format(folder=sandbox.folder)
        with pytest.raises(ValueError, match="must lie in"):
            await sandbox.read_file(name)
        with pytest.raises(ValueError, match="must lie in"):
            await sandbox.write_file(name, "x")

    run(isolation, body)


def test_links_do_not_lead_out(isolation, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("secret")
    tmp_path.chmod(0o777)

    async def body(sandbox):
        await sandbox.exec(
            f"ln -s {secret} file; ln -s {tmp_path} folder; ln -s /proc/self/root up; mkfifo pipe"
        )
        for path in ("file", "folder/secret", "up/etc/passwd"):
            with pytest.raises(ValueError, match="symbolic link"):
                await sandbox.read_file(path)
        for path in ("folder/new", "up/tmp/new"):
            with pytest.raises(ValueError, match="symbolic link"):
                await sandbox.write_file(path, "x")
        with pytest.raises(ValueError, match="regular file"):
            await sandbox.read_file("pipe")
        # A link at the path itself is replaced, and its target stays.
        await sandbox.write_file("file", "new")
        assert await sandbox.read_file("file") == "new"
        assert await sandbox.download(".", tmp_path / "copy") == 1

    run(isolation, body)
    assert secret.read_text() == "secret"
    assert [p.name for p in (tmp_path / "copy").rglob("*")] == ["file"]


def test_files_go_in_and_out(isolation, tmp_path):
    source = tmp_path / "source"
    (source / "sub").mkdir(parents=True)
    (source / "sub/run.sh").write_text("#!/bin/sh\necho run")
    (source / "sub/run.sh").chmod(0o755)
    (source / "link").symlink_to("/etc/passwd")

    async def body(sandbox):
        await sandbox.upload(source, "project")
        assert (await sandbox.exec("project/sub/run.sh; ls project")).stdout == "run\nsub\n"
        await sandbox.write_file("made/here/text", "words\n")
        await sandbox.write_file(f"{sandbox.home}/.config/bytes", b"\x00\x01")
        await sandbox.write_file("copied", source / "sub/run.sh")
        assert (await sandbox.exec("cat made/here/text; echo more >> made/here/text")).stdout == "words\n"
        assert await sandbox.read_file("made/here/text") == "words\nmore\n"
        assert await sandbox.read_bytes(f"{sandbox.home}/.config/bytes") == b"\x00\x01"
        assert await sandbox.read_file("missing") == ""
        with pytest.raises(FileNotFoundError):
            await sandbox.read_bytes("missing")
        await sandbox.exec("head -c 200000 /dev/zero > large")
        with pytest.raises(ValueError, match="at most 100000 bytes"):
            await sandbox.read_file("large")

    run(isolation, body)
