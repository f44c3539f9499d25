"""Without namespaces, Landlock hides the host's files and the run's processes from a sandbox."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from sandbox_cases import PYTHON, as_another_user, run

from slime.agent.init import landlock

pytestmark = pytest.mark.skipif(not landlock.version(), reason="this kernel has no Landlock")


@pytest.fixture
def public() -> Iterator[Path]:
    """Yields a folder with a prompt file, both readable for every user."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        Path(folder).chmod(0o755)
        (Path(folder) / "prompts.jsonl").write_text("the word")
        (Path(folder) / "prompts.jsonl").chmod(0o644)
        yield Path(folder)


def test_files_that_all_may_read_are_hidden(public: Path) -> None:
    file = public / "prompts.jsonl"

    async def body(sandbox):
        await sandbox.write_file("own", "mine")
        tries = f"cat {file}; cat < {file}; {PYTHON} -c 'print(open(\"{file}\").read())'; ls {public}; ls /; ls /var"
        lost = await sandbox.exec(f"cp {file} copy; ln -s {file} link; cat link; {tries}")
        right = f"cat own; {PYTHON} -c 'print(6 * 7)'; cat /etc/hostname > /dev/null && ls /usr/bin | wc -l"
        good = await sandbox.exec(right)
        return sandbox.isolation, lost, good

    isolation, lost, good = run("processes", body)
    assert isolation == "processes" and lost.stdout == "" and lost.stderr.count("Permission denied") == 8, (
        lost
    )
    own, count = good.stdout.split()
    assert own == "mine42" and int(count) > 50 and good.stderr == ""
    shown = run("processes", lambda sandbox: sandbox.exec(f"cat {file}"), show=(file,))
    assert shown.stdout == "the word"


def test_hide_takes_files_out_of_a_folder_of_the_system() -> None:
    async def body(sandbox):
        return await sandbox.exec("cat /etc/os-release >/dev/null && echo there; cat /etc/passwd")

    result = run("processes", body, hide=("/etc/passwd",))
    assert result.stdout == "there\n" and "Permission denied" in result.stderr


ATTACK = """
import ctypes, os, signal

def attempt(name, action, *words):
    try:
        action(*words)
    except PermissionError:
        return
    print(name)

pid = int(open("run").read())
for name in ("environ", "mem", "maps", "auxv"):
    attempt(name, lambda: open(f"/proc/{pid}/{name}", "rb").read(1))
for name in ("fd/0", "cwd", "root", "exe"):
    attempt(name, os.stat, f"/proc/{pid}/{name}")
for number in (0, signal.SIGTERM, signal.SIGKILL):
    attempt("signal", os.kill, pid, number)
print("ptrace", ctypes.CDLL(None).ptrace(16, pid, 0, 0))
"""


@pytest.mark.skipif(landlock.version() < 6, reason="this kernel's Landlock has no rule for signals")
def test_the_run_s_memory_environment_and_life_are_out_of_reach_of_its_own_user() -> None:
    script = (
        "import os\n"
        "async def main():\n"
        "    async with LocalSandbox(isolation='processes') as sandbox:\n"
        f"        await sandbox.write_file('attack.py', {ATTACK!r})\n"
        "        await sandbox.write_file('run', str(os.getpid()))\n"
        f"        print((await sandbox.exec('{PYTHON} -I attack.py')).stdout, sandbox.isolation)\n"
    )
    assert as_another_user(script) == "ptrace -1\n processes\n"


def test_a_folder_around_a_hidden_place_is_its_other_entries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a/b/c", "a/b/d", "e"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.setattr(landlock, "SYSTEM", (str(tmp_path), "/absent"))
    found = set(landlock.allowed("/box", [str(tmp_path / "a" / "b" / "c")], ["/python"]))
    places = {
        str(tmp_path / "a" / "b" / "d"),
        str(tmp_path / "e"),
        "/absent",
        "/python",
        "/box",
        "/proc",
        "/dev/shm",
    }
    assert found == places | {f"/dev/{name}" for name in landlock.DEVICES}


def test_a_kernel_without_landlock_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Landlock's version is 0 there; a test cannot remove Landlock from the kernel."""
    monkeypatch.setattr(landlock, "version", lambda: 0)
    assert landlock.ruleset(["/usr"], scoped=True) is None
