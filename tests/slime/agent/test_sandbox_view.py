"""Tests the view of the host inside a local sandbox, hosts without namespaces, and the processes that end together."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from sandbox_cases import PYTHON, command, left_behind, run

from slime.agent.init import landlock
from slime.agent.sandbox import LocalSandbox


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
            else:  # the log has it once, and docs/security.md explains it
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


TWICE = (
    "import asyncio, logging, sys\n"
    "logging.basicConfig(level=logging.WARNING)\n"
    "from slime.agent.sandbox import LocalSandbox\n"
    "async def main():\n"
    "    for _ in range(2):\n"
    "        async with LocalSandbox() as sandbox:\n"
    "            print(sandbox.isolation, (await sandbox.exec('echo fine')).stdout)\n"
    "asyncio.run(main())\n"
)


def test_a_host_that_refuses_namespaces_is_named_once():
    """The kernel itself raises the error: this process tree may have no further user namespace."""
    refuse = "echo 0 > /proc/sys/user/max_user_namespaces"
    inner = subprocess.run(
        [
            *("unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc", "sh", "-c"),
            *(f'{refuse} && exec "$0" -c "$1"', sys.executable, TWICE),
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )
    if inner.returncode and "unshare" in inner.stderr.splitlines()[-1]:
        inner = subprocess.run([sys.executable, "-c", TWICE], capture_output=True, text=True, timeout=60)
    assert inner.stdout.count("processes fine") == 2, inner.stderr
    assert inner.stderr.count("run without bubblewrap") == 1


def test_a_host_without_bubblewrap_runs_plain_processes_and_says_how_to_install_it(tmp_path):
    for name in ("rm", "chmod"):
        (tmp_path / name).symlink_to(f"/bin/{name}")
    environ = {**os.environ, "PATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", TWICE], capture_output=True, text=True, timeout=60, env=environ
    )
    assert done.stdout.count("processes fine") == 2, done.stderr
    assert done.stderr.count("run without bubblewrap, so with its network and its processes in view") == 1
    assert "bwrap is not installed: install the package bubblewrap" in done.stderr


@pytest.mark.slow
def test_without_root_and_namespaces_all_processes_end(tmp_path):
    """In this weakest case, the sandbox shares the user of this process."""
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
        # The outer limit protects this host: if the sandbox's limit failed, the fork bomb would end the host.
        ["prlimit", "--nproc=3000", PYTHON if user else sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=100,
        cwd="/",
        env={"PYTHONPATH": str(Path(__file__).parents[3]), "PATH": os.environ["PATH"]},
        **user,
    )
    name, reason, *lost = result.stdout.splitlines() or ["", ""]
    assert reason == "processes", result.stderr
    # Landlock of Linux 6.12 and newer blocks a command's signals to the owner.
    assert [line.partition(" ")[0] for line in lost] == (["lost"] if landlock.version() < 6 else [])
    assert not left_behind(name)


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


def test_sockets_of_the_host_stay_closed_in_commands(isolation):
    """A command inherits three descriptors, and no descriptor of this process or of the owner."""
    with socket.socket() as ours:
        ours.set_inheritable(True)
        assert command(isolation, "ls /proc/$$/fd | tr '\\n' ' '").stdout.split()[:3] == ["0", "1", "2"]
        assert "socket" not in command(isolation, "ls -l /proc/$$/fd").stdout
