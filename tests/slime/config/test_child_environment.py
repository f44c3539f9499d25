"""Child processes that need no key do not get one; the test reads each child's environment from the kernel."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from rl_kernel.host import command_output
from slime.cluster import ray_start
from slime.cluster.watchdog import Watchdog
from slime.config.child_environment import without_secrets
from slime.rollout.rewards.math_processes import MathChecker
from vime.doctor.machine import run_command

SECRETS = {
    "VIME_RUN_KEY": "k" * 64,
    "RAY_AUTH_TOKEN": "t" * 64,
    "WANDB_API_KEY": "w" * 40,
    "HF_TOKEN": "hf_0123456789",
    "DB_PASSWORD": "p" * 12,
}


@pytest.fixture(autouse=True)
def secrets_of_the_user(monkeypatch):
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HARMLESS", "1")


def environment(pid: int) -> dict[str, str]:
    end = time.monotonic() + 10
    while not (entries := Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0"))[0]:
        assert time.monotonic() < end  # the kernel fills it a moment after the start
    return dict(entry.split("=", 1) for entry in entries if entry)


def leaked(environ: dict[str, str]) -> set[str]:
    return set(SECRETS) & set(environ) | {
        name for name, value in environ.items() if value in SECRETS.values()
    }


def test_only_secrets_are_left_out():
    assert not leaked(without_secrets())
    assert without_secrets() == {
        name: value for name, value in os.environ.items() if name in without_secrets()
    }
    assert {"PATH", "HOME", "HARMLESS"} <= set(without_secrets())


def test_processes_that_compare_answers():
    checker = MathChecker(workers=1)
    assert checker.equal("1/2", "0.5") is True
    environ = environment(checker._idle[0].process.pid)
    assert environ["PATH"] == os.environ["PATH"] and not leaked(environ)
    checker.close()


def test_the_watchdog():
    watchdog = Watchdog([])
    try:
        environ = environment(watchdog._process.pid)
    finally:
        watchdog.dismiss()
    assert environ["PATH"] == os.environ["PATH"] and not leaked(environ)


@pytest.mark.parametrize("output", [lambda: command_output("env"), lambda: run_command(("env",)).text])
def test_commands_about_the_machine(output):
    environ = dict(line.split("=", 1) for line in output().splitlines() if "=" in line)
    assert environ["PATH"] == os.environ["PATH"] and not leaked(environ)


def test_processes_of_ray_get_no_run_key():
    """Ray's processes keep the user's other keys, which hooks may need, and Ray's token."""
    with ray_start._safe_path():
        listed = subprocess.run(["env"], capture_output=True, text=True, check=True).stdout.splitlines()
    environ = dict(line.split("=", 1) for line in listed if "=" in line)
    assert leaked(environ) == set(SECRETS) - {"VIME_RUN_KEY"}
    assert os.environ["VIME_RUN_KEY"] == SECRETS["VIME_RUN_KEY"]  # the driver keeps its key
