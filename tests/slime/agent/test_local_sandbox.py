"""Hostile programs in a local sandbox, with namespaces and without: each ends, is named, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slime.agent.sandbox import Limits, LocalSandbox, SandboxError

SMALL = Limits(
    memory_bytes=256 << 20,
    address_space_bytes=None,
    processes=64,
    disk_bytes=16 << 20,
    files=500,
    output_bytes=100_000,
)
PYTHON = "/usr/bin/python3"
DAEMON = "setsid bash -c 'setsid bash -c \"exec -a {name} sleep 1000\" &' >/dev/null 2>&1 </dev/null &"


@pytest.fixture(params=["namespaces", "processes"])
def isolation(request, namespaces_work):
    if request.param == "namespaces" and not namespaces_work:
        # The other branch: this host refuses namespaces, and says so instead of running with less.
        with pytest.raises(SandboxError, match="refuses"):
            asyncio.run(LocalSandbox(isolation="namespaces").start())
        return "auto"
    return request.param


@pytest.fixture(scope="session")
def namespaces_work():
    async def probe():
        async with LocalSandbox() as sandbox:
            return sandbox.isolation == "namespaces"

    return asyncio.run(probe())


def run(isolation, body, **settings):
    """`body(sandbox)` in a sandbox; afterwards no process and no folder of it is left."""

    async def main():
        sandbox = LocalSandbox(isolation=isolation, **{"limits": SMALL, **settings})
        async with sandbox:
            folder = sandbox.folder
            result = await body(sandbox)
        assert not os.path.exists(folder)
        assert not left_behind(sandbox.sandbox_id)
        return result

    return asyncio.run(main())


def command(isolation, text, timeout=20, **settings):
    return run(isolation, lambda sandbox: sandbox.exec(text, timeout=timeout), **settings)


def left_behind(marker):
    """Processes whose environment or command line has the marker."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        for file in ("environ", "cmdline"):
            try:
                if marker.encode() in Path(f"/proc/{name}/{file}").read_bytes():
                    found.append(int(name))
            except OSError:
                continue
    return found


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
        # A process in the background lives on between commands, as agents' servers do.
        await sandbox.exec("sleep 0.3 && echo ready > flag &")
        await asyncio.sleep(0.6)
        assert await sandbox.read_file("flag") == "ready\n"

    run(isolation, body)


def test_a_fork_bomb_ends(isolation):
    before = time.monotonic()
    result = command(isolation, "bomb() { bomb | bomb & }; bomb; sleep 30", timeout=10)
    assert result.reason == "processes"
    assert time.monotonic() - before < 9


def test_a_python_fork_bomb_that_leaves_its_session_ends(isolation):
    bomb = "import os\nwhile True:\n    try:\n        os.fork() or os.setsid()\n    except OSError:\n        pass"
    result = command(isolation, f"{PYTHON} -c '{bomb}'", timeout=10)
    assert result.reason == "processes"


@pytest.mark.parametrize("stream", ["", ">&2"])
def test_endless_output_ends_the_command(isolation, stream):
    result = command(isolation, f"yes {stream}")
    assert (result.reason, result.truncated) == ("output", True)
    assert len(result.stdout) + len(result.stderr) == SMALL.output_bytes


def test_output_below_the_limit_is_whole(isolation):
    result = command(isolation, "head -c 60000 /dev/zero; head -c 40000 /dev/zero >&2")
    assert (len(result.stdout), len(result.stderr), result.reason) == (60_000, 40_000, "")


def test_output_that_is_no_text_is_replaced(isolation):
    assert command(isolation, r"printf '\377ok'").stdout == "�ok"


def test_a_deaf_process_ends_at_its_time(isolation):
    before = time.monotonic()
    result = command(isolation, "trap '' TERM INT HUP; while :; do sleep 0.1; done", timeout=0.5)
    assert (result.timed_out, result.exit_code) == (True, 137)
    assert time.monotonic() - before < 5


def test_a_stopped_process_ends_at_its_time(isolation):
    assert command(isolation, "kill -STOP $$", timeout=0.5).timed_out


def test_memory_ends_everything(isolation):
    hog = "x = []\nwhile True: x.append(bytearray(b'a' * (1 << 22)))"
    result = command(isolation, f'{PYTHON} -c "{hog}"')
    assert (result.reason, result.exit_code) == ("memory", 137)


def test_memory_of_many_small_processes_counts(isolation):
    hog = "import time; x = bytearray(b'a' * (20 << 20)); time.sleep(30)"
    result = command(isolation, f'for i in $(seq 30); do {PYTHON} -c "{hog}" & done; wait')
    assert result.reason == "memory"


def test_address_space_is_limited(isolation):
    limits = Limits(address_space_bytes=1 << 30)
    result = command(isolation, f"{PYTHON} -c 'bytearray(2 << 30)'", limits=limits)
    assert "MemoryError" in result.stderr


def test_cpu_time_is_limited(isolation):
    result = command(isolation, "while :; do :; done", limits=Limits(cpu_s=1))
    assert result.reason == "cpu"


def test_one_large_file_ends_its_program(isolation):
    result = command(isolation, "exec dd if=/dev/zero of=big bs=1M count=100")
    assert result.reason == "file size"


def test_many_files_that_fill_the_disk_end_everything(isolation):
    fill = "i=0; while :; do i=$((i+1)); head -c 1000000 /dev/zero > f$i; done"
    assert command(isolation, fill).reason == "disk"


def test_too_many_files_end_everything(isolation):
    assert command(isolation, "for i in $(seq 600); do : > f$i; done; sleep 10").reason == "files"


def test_a_folder_without_end_ends_and_is_deleted(isolation):
    deep = "while mkdir -p d/d/d/d/d/d/d/d && cd d/d/d/d/d/d/d/d; do :; done; sleep 10"
    assert command(isolation, deep).reason == "files"


def test_a_hidden_file_counts(isolation):
    fill = "mkdir h; i=0; chmod 300 h; while :; do i=$((i+1)); head -c 1000000 /dev/zero > h/f$i; done"
    assert command(isolation, fill).reason == "disk"


def test_zombies_are_taken_and_daemons_end_with_the_sandbox(isolation):
    async def body(sandbox):
        name = f"daemon-{sandbox.sandbox_id}"
        await sandbox.exec(DAEMON.format(name=name), env={"SHELL": "x"})
        # It clears its environment, and its parents are gone.
        await sandbox.exec(f"env -i setsid bash -c 'exec -a {name} sleep 1000 &' >/dev/null 2>&1 &")
        for _ in range(100):
            if len(left_behind(name)) >= 2:
                break
            await asyncio.sleep(0.1)
        assert len(left_behind(name)) >= 2
        await sandbox.exec("for i in $(seq 20); do (sh -c 'exit 0' &); done; sleep 0.3")
        zombies = (await sandbox.exec("cat /proc/[0-9]*/stat 2>/dev/null | grep ') Z' | grep '(sh)'")).stdout
        assert zombies == ""
        return name

    assert not left_behind(run(isolation, body))


def test_a_daemon_that_holds_the_pipes_does_not_hold_the_command(isolation):
    before = time.monotonic()
    assert command(isolation, "setsid sleep 100 & echo done").stdout == "done\n"
    assert time.monotonic() - before < 5


def test_a_command_cannot_end_its_owner(isolation):
    async def body(sandbox):
        await sandbox.exec("kill -9 1; kill -9 $PPID; kill -9 -1", timeout=5)
        return (await sandbox.exec("echo alive")).stdout

    if isolation == "namespaces" or os.getuid() == 0:
        assert run(isolation, body) == "alive\n"


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
        # A link at the place itself is replaced, and its target stays.
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


def test_no_secret_is_in_the_environment(isolation, monkeypatch):
    secrets = (
        "HF_TOKEN",
        "OPENAI_API_KEY",
        "AWS_SECRET_ACCESS_KEY",
        "https_proxy",
        "VIME_RUN_KEY",
        "RAY_AUTH_TOKEN",
    )
    for name in secrets:
        monkeypatch.setenv(name, f"hush-{name}")

    async def body(sandbox):
        result = await sandbox.exec(
            "env; cat /proc/*/environ 2>/dev/null | tr '\\0' '\\n'; echo $KEY", env={"KEY": "x"}
        )
        assert result.stdout.endswith("x\n")
        return result.stdout

    if isolation == "namespaces" or os.getuid() == 0:
        assert "hush-" not in run(isolation, body)
    else:
        assert "hush-" not in command(isolation, "env").stdout


def test_the_network_is_closed_but_for_the_ports_that_are_allowed(isolation):
    ask = f"{PYTHON} -c \"import socket; print(socket.create_connection(('127.0.0.1', {{}}), 2).recv(9))\""

    async def main():
        async def answer(reader, writer):
            writer.write(b"welcome")
            writer.close()

        servers = [await asyncio.start_server(answer, "127.0.0.1", 0) for _ in range(2)]
        allowed, other = (server.sockets[0].getsockname()[1] for server in servers)
        async with LocalSandbox(isolation=isolation, network="loopback") as sandbox:
            await sandbox.allow_loopback(allowed)
            for _ in range(3):
                assert "welcome" in (await sandbox.exec(ask.format(allowed))).stdout
            refused = await sandbox.exec(ask.format(other))
            interfaces = (await sandbox.exec("tail -n +3 /proc/net/dev | cut -d: -f1")).stdout.split()
        async with LocalSandbox(isolation=isolation) as closed:
            if closed.isolation == "namespaces":
                assert "Connection refused" in refused.stderr and interfaces == ["lo"]
                assert "Connection refused" in (await closed.exec(ask.format(allowed))).stderr
            else:  # said once in the log and in docs/security.md
                assert "welcome" in refused.stdout
            with pytest.raises(ValueError, match="network="):
                await closed.allow_loopback(allowed)
        for server in servers:
            server.close()

    asyncio.run(main())


def test_the_host_is_read_only_and_hidden_with_namespaces(namespaces_work, tmp_path):
    (tmp_path / "labels.jsonl").write_text("42")
    tmp_path.chmod(0o755)

    async def body(sandbox):
        result = await sandbox.exec(
            f"cat {tmp_path}/labels.jsonl; touch /etc/x /usr/x; ls -A /home /root /run; ls /proc | grep -c '^[0-9]'; "
            "unshare -Ur true; ls /dev | tr '\\n' ' '; touch /tmp/x /dev/shm/x && echo scratch"
        )
        return result

    if namespaces_work:
        result = run("namespaces", body, hide=(tmp_path,))
        assert "42" not in result.stdout and "scratch" in result.stdout and "nvidia" not in result.stdout
        assert result.stderr.count("Read-only file system") == 2 and "unshare failed" in result.stderr
    assert not os.path.exists("/etc/x")


def test_a_host_that_refuses_namespaces_is_named_once():
    """The kernel's own refusal: this process tree may have no further user namespace."""
    script = (
        "import asyncio, logging, sys\n"
        "logging.basicConfig(level=logging.WARNING)\n"
        "from slime.agent.sandbox import LocalSandbox\n"
        "async def main():\n"
        "    for _ in range(2):\n"
        "        async with LocalSandbox() as sandbox:\n"
        "            print(sandbox.isolation, (await sandbox.exec('echo fine')).stdout)\n"
        "asyncio.run(main())\n"
    )
    refuse = "echo 0 > /proc/sys/user/max_user_namespaces"
    inner = subprocess.run(
        [
            *("unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc", "sh", "-c"),
            *(f'{refuse} && exec "$0" -c "$1"', sys.executable, script),
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )
    if inner.returncode and "unshare" in inner.stderr.splitlines()[-1]:
        inner = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert inner.stdout.count("processes fine") == 2, inner.stderr
    assert inner.stderr.count("run without namespaces") == 1


def test_without_root_and_namespaces_all_processes_end(tmp_path):
    """The weakest case: the sandbox shares the user of this process."""
    script = (
        "import asyncio\n"
        "from slime.agent.sandbox import LocalSandbox, Limits\n"
        "async def main():\n"
        "    async with LocalSandbox(isolation='processes', limits=Limits(processes=64)) as sandbox:\n"
        "        print(sandbox.sandbox_id)\n"
        "        bomb = await sandbox.exec('bomb() { bomb | bomb & }; bomb; sleep 30', timeout=10)\n"
        "        print(bomb.reason)\n"
        "        await sandbox.exec('(setsid sleep 1000 &) >/dev/null 2>&1')\n"
        "        try:\n"
        "            await sandbox.exec('kill -9 $PPID; sleep 5')\n"
        "        except RuntimeError as error:\n"
        "            print('lost', error)\n"
        "asyncio.run(main())\n"
    )
    user = {"user": 54321, "group": 54321, "extra_groups": []} if os.getuid() == 0 else {}
    result = subprocess.run(
        [PYTHON if user else sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=100,
        cwd="/",
        env={"PYTHONPATH": str(Path(__file__).parents[3]), "PATH": os.environ["PATH"]},
        **user,
    )
    name, reason, lost = result.stdout.splitlines() or ["", "", ""]
    assert reason == "processes" and lost.startswith("lost"), result.stderr
    assert not left_behind(name)


def test_sixty_four_sandboxes_at_once(isolation):
    async def one(slots, number):
        async with LocalSandbox(isolation=isolation, limits=SMALL, slots=slots) as sandbox:
            return (await sandbox.exec(f"echo {number} > file; cat file")).stdout

    async def main():
        slots = asyncio.Semaphore(16)
        return await asyncio.gather(*(one(slots, number) for number in range(64)))

    assert asyncio.run(main()) == [f"{number}\n" for number in range(64)]


def test_a_cancelled_command_ends(isolation):
    async def body(sandbox):
        task = asyncio.create_task(sandbox.exec("exec -a cancelled-one sleep 100"))
        await asyncio.sleep(0.3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0.3)
        return (
            await sandbox.exec("cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -c '^cancelled-one' || true")
        ).stdout

    assert run(isolation, body) == "0\n"


def test_a_sandbox_ends_with_its_process(isolation):
    script = (
        "import asyncio, os\n"
        "from slime.agent.sandbox import LocalSandbox\n"
        "async def main():\n"
        f"    sandbox = await LocalSandbox(isolation='{isolation}').__aenter__()\n"
        "    print(sandbox.sandbox_id, sandbox.folder, flush=True)\n"
        "    await sandbox.exec('setsid sleep 1000 >/dev/null 2>&1 &')\n"
        "    os.kill(os.getpid(), 9)\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    name, folder = done.stdout.split()
    end = time.monotonic() + 10
    while left_behind(name) and time.monotonic() < end:
        time.sleep(0.1)
    assert not left_behind(name)
    subprocess.run(["rm", "-rf", folder], check=True)


def test_a_closed_sandbox_says_so():
    async def main():
        sandbox = LocalSandbox()
        with pytest.raises(SandboxError, match="not running"):
            await sandbox.exec("true")
        async with sandbox:
            pass
        await sandbox.close()
        with pytest.raises(SandboxError, match="not running"):
            await sandbox.read_file("x")

    asyncio.run(main())


def test_limits_must_be_positive():
    with pytest.raises(ValueError, match="processes must be positive, got 0"):
        Limits(processes=0)


def test_sockets_of_the_host_stay_closed_in_commands(isolation):
    """A command inherits three descriptors and nothing of this process or of the owner."""
    with socket.socket() as ours:
        ours.set_inheritable(True)
        assert command(isolation, "ls /proc/$$/fd | tr '\\n' ' '").stdout.split()[:3] == ["0", "1", "2"]
        assert "socket" not in command(isolation, "ls -l /proc/$$/fd").stdout
