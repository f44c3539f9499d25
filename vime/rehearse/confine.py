"""Confines a launch script: writes only below named folders, no TCP connections, no signals to other processes.

    python -P -m vime.rehearse.confine FOLDER ... -- PROGRAM ARGUMENTS

Replaces itself by the program. Exits with code 125 before the program starts if the kernel cannot forbid writes.
"""

from __future__ import annotations

import os
import sys

from slime.agent.init import landlock

UNABLE = 125
"""Exit code for a kernel without Landlock."""


def main(argv: list[str]) -> int:
    end = argv.index("--")
    if not landlock.forbid_writes(argv[:end]):
        print("Landlock is not available", file=sys.stderr)
        return UNABLE
    os.execvp(argv[end + 1], argv[end + 1 :])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
