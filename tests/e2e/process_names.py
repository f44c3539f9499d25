"""Returns command lines of running processes, for tests that search for a process."""

import psutil


def command_line(process: psutil.Process) -> str:
    """Returns the arguments joined by spaces, or an empty text for a process that has ended as a zombie."""
    try:
        return " ".join(process.cmdline())
    except (psutil.ZombieProcess, psutil.NoSuchProcess):
        return ""
