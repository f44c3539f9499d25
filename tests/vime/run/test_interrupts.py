"""Tests signals in the first seconds of a command, a reader of its output that ends, and the files after a failed
start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
from config_cases import good_argv

from slime.rules import parse_args
from vime import driver
from vime.run import interrupts

ROOT = Path(__file__).parents[3]
COMMAND = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background has it ignored, and
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup this one
from vime import cli, commands
commands.MODULES[sys.argv[1]] = "part"
sys.exit(cli.main(sys.argv[1:]))
"""
STRIKE = "import os, signal, time; os.kill(os.getpid(), signal.Signals[{0!r}]); time.sleep(9)\n"


@pytest.fixture
def command(tmp_path):
    """Starts a command whose module has this text."""

    def start(name: str, module: str, **options) -> subprocess.Popen:
        (tmp_path / "part.py").write_text(module, encoding="utf-8")
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "encoding": "utf-8", "env": environ}
        return subprocess.Popen([sys.executable, "-c", COMMAND, name], **pipes | options)

    return start


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143), ("SIGHUP", 129)])
def test_a_signal_while_modules_are_imported_is_one_line(command, name, code):
    """The command prints one line even if an import catches every exception."""
    module = f"try:\n    {STRIKE.format(name)}except BaseException:\n    pass\n"
    process = command("train", module)
    assert process.communicate(timeout=60) == (
        "",
        f"vime train: interrupted by {name} before anything was started\n",
    )
    assert process.returncode == code


@pytest.mark.parametrize(
    ("name", "code", "by"),
    [("SIGINT", 130, ""), ("SIGTERM", 143, " by SIGTERM"), ("SIGHUP", 129, " by SIGHUP")],
)
@pytest.mark.parametrize("replaced", [False, True], ids=["", "replaced"])
def test_a_signal_while_the_command_reads_its_data_is_one_line(command, name, code, by, replaced):
    """Ray replaces the exception of a signal handler while it waits for an actor (`replaced`)."""
    strike = STRIKE.format(name).strip()
    if replaced:
        strike = f"try: {strike}\n    except KeyboardInterrupt: raise KeyboardInterrupt from None"
    process = command(
        "train",
        f"from vime.run.interrupts import catch_signals\ndef main(argv):\n    catch_signals()\n    {strike}\n",
    )
    assert process.communicate(timeout=60) == ("", f"vime train: interrupted{by}\n")
    assert process.returncode == code


ASKED = "{0}: the run saves a checkpoint of its last step and ends; another {0} ends it at once\n"


@pytest.fixture
def signals(monkeypatch):
    """Installs the handlers of a running command, without a signal so far."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    monkeypatch.setattr(interrupts, "stop", threading.Event())
    monkeypatch.setattr(interrupts, "_asked_by", [])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    interrupts.catch_signals()
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def strike(*numbers: int, pause_s: float = 0.0) -> None:
    with interrupts.asks_first(signal.SIGINT, signal.SIGTERM):
        for number in numbers:
            os.kill(os.getpid(), number)
            time.sleep(pause_s)


@pytest.mark.parametrize(
    ("numbers", "pause_s", "saves", "code"),
    [
        ([signal.SIGINT], 0.0, True, 130),
        ([signal.SIGTERM], 0.0, True, 143),
        ([signal.SIGINT] * 2, 0.4, False, 130),
        ([signal.SIGINT] * 2, 0.0, True, 130),  # `timeout -s INT` sends it twice at once
        ([signal.SIGTERM] * 2, 0.4, True, 143),  # and Slurm within seconds
        ([signal.SIGTERM, signal.SIGINT], 0.0, False, 130),
        ([signal.SIGINT, signal.SIGTERM], 0.0, False, 143),
        ([signal.SIGINT, signal.SIGHUP], 0.0, False, 129),
    ],
)
def test_the_first_signal_asks_and_another_one_ends_at_once(signals, capfd, numbers, pause_s, saves, code):
    ended = None
    try:
        strike(*numbers, pause_s=pause_s)
    except KeyboardInterrupt as interrupt:
        ended = interrupt
    assert (ended is None) == saves and interrupts.stop.is_set()
    assert interrupts.exit_code(interrupts.interrupt_error() if ended is None else ended) == code
    assert capfd.readouterr().err == ASKED.format("Ctrl-C" if numbers[0] == signal.SIGINT else "SIGTERM")
    with pytest.raises(KeyboardInterrupt):  # after the block it ends at once, too
        os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_that_is_ignored_stays_so(signals):
    """A script's background commands ignore it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    strike(signal.SIGINT)
    assert not interrupts.stop.is_set()
    strike(signal.SIGTERM)
    assert interrupts.exit_code(interrupts.interrupt_error()) == 143


PRINTS = """
from pathlib import Path
def main(argv):
    for line in range(3000):
        print("line", line, "\\u2192 \\ud800", flush=True)
    Path(__file__).with_name("saved").touch()
"""


@pytest.mark.parametrize("reader", ["goes", "full", "none"])
def test_a_command_that_works_goes_on_without_a_reader(command, tmp_path, reader):
    """The cases are `vime train | head -1`, a log on a full disk, and `vime train >&-`."""
    reason = ""
    if reader == "goes":
        process = command("train", PRINTS)
        assert process.stdout.readline() == "line 0 \u2192 \\ud800\n"
        process.stdout.close()
        reason = "Broken pipe"
    elif reader == "full":
        with open("/dev/full", "w", encoding="utf-8") as full:
            process = command("train", PRINTS, stdout=full)
        reason = "No space left on device"
    else:
        process = command("train", PRINTS, stdout=None, preexec_fn=lambda: os.close(1))
    said = process.stderr.read()
    process.stderr.close()
    assert process.wait(60) == 0, said
    assert (tmp_path / "saved").exists()
    wanted = f"note: standard output cannot be written ({reason}); the command continues without it\n"
    assert said == ("" if reader == "none" else wanted)


def test_a_command_that_only_prints_ends_with_its_reader(command, tmp_path):
    process = command("flags", PRINTS)
    process.stdout.readline()
    process.stdout.close()
    assert process.stderr.read() == "" and process.wait(60) == 0
    process.stderr.close()
    assert not (tmp_path / "saved").exists()


def test_a_start_that_fails_leaves_no_temporary_folder(tmp_path, monkeypatch):
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))

    def no_process(*arguments):
        raise BlockingIOError("no more processes")

    config = parse_args([*good_argv(tmp_path), "--run-dir", str(tmp_path / "run")])
    monkeypatch.setattr(driver, "Watchdog", no_process)
    with pytest.raises(BlockingIOError, match="no more processes"):
        driver.run(config, [])
    assert list(folder.iterdir()) == []
