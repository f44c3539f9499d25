"""Command lines of running processes, for tests that look for one among them."""

import psutil


def command_line(process: psutil.Process) -> str:
    """The arguments joined by spaces; empty when the process has ended and nobody has waited for it yet."""
    try:
        return " ".join(process.cmdline())
    except (psutil.ZombieProcess, psutil.NoSuchProcess):
        return ""
